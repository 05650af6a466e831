"""Group size, as in section 4.2 of the paper: how many gathers and scatters a group size costs, and
which one costs least.

With occupancies ``occ`` (entries per row) a group size ``g`` makes ``sum(ceil(occ / g))`` groups,
each with one scatter and ``g`` gathers: ``F(g) = (g + 1) * sum(ceil(occ / g))``. Relaxing the
ceiling gives the estimate ``g* = sqrt(S / n)``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from insum.accepted import (
    COUNT,
    COUNTS,
    ELEMENTS,
    INTEGER_DTYPES,
    LIMIT,
    is_number,
    is_size,
    require,
    shown,
    takes,
)
from insum.errors import FormatError

GroupSize: TypeAlias = int | Literal["auto", "exact"]
_CHUNK = 1 << 24


def count_groups(occupancy: Tensor | Sequence[int], group_size: int) -> int:
    """``sum(ceil(occ / g))``: how many groups there are.

    Args:
        occupancy: How many entries each row has.
        group_size: How many entries share a group.

    Returns:
        Their number.

    Examples:
        >>> count_groups([3, 1, 1, 2], 2)
        5
    """
    return int(_groups(_as_tensor(occupancy), _positive(group_size)))


def count_accesses(occupancy: Tensor | Sequence[int], group_size: int) -> int:
    """F(g): the gathers and scatters of one pass over the entries.

    Args:
        occupancy: How many entries each row has.
        group_size: How many entries share a group.

    Returns:
        Their number.

    Examples:
        >>> [count_accesses([3, 1, 1, 2], g) for g in (1, 2, 3)]
        [14, 15, 16]
    """
    groups = count_groups(occupancy, group_size)
    return (group_size + 1) * groups


def count_padding(occupancy: Tensor | Sequence[int], group_size: int) -> int:
    """How many slots hold no entry.

    Args:
        occupancy: How many entries each row has.
        group_size: How many entries share a group.

    Returns:
        Their number.

    Examples:
        >>> [count_padding([3, 1, 1, 2], g) for g in (1, 2, 3)]
        [0, 3, 5]
    """
    occ = _as_tensor(occupancy)
    groups = count_groups(occ, group_size)
    return group_size * groups - int(occ.sum())


@takes(FormatError, entries=COUNT, rows=COUNT)
def estimate_group_size(entries: int, rows: int) -> float:
    """g* = sqrt(S / n), where the relaxed F is least; n counts empty rows too, as in the paper.

    Args:
        entries: S, how many entries there are.
        rows: n, how many rows.

    Returns:
        g*, which need not be an integer.

    Examples:
        >>> estimate_group_size(64, 4)
        4.0
    """
    return math.sqrt(entries / rows) if rows and entries else 1.0


def neighbouring_powers(size: float) -> tuple[int, ...]:
    """The powers of two around a group size: one where it is a power itself, else the next below
    and above.

    Args:
        size: A group size, such as g*.

    Returns:
        One or two powers of two.

    Examples:
        >>> neighbouring_powers(5.0), neighbouring_powers(8.0), neighbouring_powers(0.3)
        ((4, 8), (8,), (1,))
    """
    if not is_number(size) or not math.isfinite(size):
        raise FormatError(f"size is {shown(size)}", expected="a finite number")
    if size <= 1:
        return (1,)
    below = 1 << math.floor(math.log2(size))
    return (below,) if below == size else (below, 2 * below)


def accesses_by_group_size(occupancy: Tensor | Sequence[int]) -> Tensor:
    """F(1), F(2), ... F(max occ), all at once, from one histogram of the occupancies.

    ``sum(ceil(occ / g))`` counts, for j = 0, 1, 2 ..., the rows with more than ``j * g`` entries.
    Those counts are one suffix sum of the histogram, so that all g together read ``max * (1 + 1/2 +
    1/3 + ...)`` numbers, whatever the number of rows.

    Args:
        occupancy: How many entries each row has.

    Returns:
        The gathers and scatters of each group size, from 1 on.

    Examples:
        >>> accesses_by_group_size([3, 1, 1, 2])
        tensor([14, 15, 16])
    """
    occ = _as_tensor(occupancy)
    if occ.numel() and not 0 <= int(occ.min()) <= int(occ.max()) < LIMIT:
        raise FormatError(
            f"occupancy holds values from {int(occ.min())} to {int(occ.max())}",
            expected="how many entries each row has",
        )
    histogram = torch.bincount(occ) if occ.numel() else occ.new_zeros(1)
    # more_than[x]: rows with more than x entries
    more_than = histogram.flip(0).cumsum(0).flip(0)[1:]
    longest = more_than.shape[0]
    sizes = torch.arange(1, longest + 1, device=occ.device)
    parts = [_groups_for(more_than, sizes[a:b]) for a, b in _chunks(longest)]
    return (sizes + 1) * (torch.cat(parts) if parts else sizes)


def best_group_size(occupancy: Tensor | Sequence[int]) -> int:
    """The group size with the fewest gathers and scatters; of equals the larger, which has fewer
    scatters.

    Args:
        occupancy: How many entries each row has.

    Returns:
        A group size of at least 1.

    Examples:
        >>> best_group_size([3, 1, 1, 2]), best_group_size([8, 8, 8])
        (1, 8)
    """
    cost = accesses_by_group_size(occupancy)
    if not cost.numel():
        return 1
    return cost.shape[0] - int(cost.flip(0).argmin())


@takes(FormatError, rows=COUNT.optional)
def suggested_group_size(occupancy: Tensor | Sequence[int], rows: int | None = None) -> int:
    """Of the powers of two beside g*, the one with fewer gathers and scatters.

    Args:
        occupancy: How many entries each row has.
        rows: How many rows there are; the length of ``occupancy`` where it is not given.

    Returns:
        A power of two.

    Examples:
        >>> suggested_group_size([3, 1, 1, 2]), suggested_group_size([16, 18, 15, 15])
        (1, 4)
    """
    occ = _as_tensor(occupancy)
    candidates = neighbouring_powers(
        estimate_group_size(int(occ.sum()), occ.shape[0] if rows is None else rows)
    )
    if len(candidates) == 1:
        return candidates[0]
    costs = torch.stack([(g + 1) * _groups(occ, g) for g in candidates]).tolist()
    return candidates[0] if costs[0] < costs[1] else candidates[1]


def resolve(group_size: GroupSize, occupancy: Tensor, rows: int) -> int:
    """What the user asked for as a number; ``occupancy`` may leave out empty rows, of which
    ``rows`` counts all.
    """
    if not isinstance(group_size, str):
        return _positive(group_size)
    if group_size == "auto":
        return suggested_group_size(occupancy, rows)
    if group_size == "exact":
        return best_group_size(occupancy)
    return _positive(group_size)


def _positive(group_size: object) -> int:
    if (
        isinstance(group_size, bool)
        or not isinstance(group_size, int)
        or not is_size(group_size, 1)
    ):
        raise FormatError(
            f"group_size is {group_size!r}",
            expected='an integer of at least 1, "auto" (the estimate sqrt(S/n)) or "exact" '
            "(the best by count)",
        )
    return group_size


OCCUPANCY = ELEMENTS | COUNTS


def _as_tensor(occupancy: Tensor | Sequence[int]) -> Tensor:
    require("occupancy", occupancy, OCCUPANCY, FormatError)
    if isinstance(occupancy, Tensor) and (
        occupancy.dim() != 1 or occupancy.dtype not in INTEGER_DTYPES
    ):
        kind = str(occupancy.dtype).removeprefix("torch.")
        raise FormatError(
            f"occupancy is a tensor {tuple(occupancy.shape)} of {kind}",
            expected="one dimension of integers: the entries of each row",
        )
    return (
        occupancy.long()
        if isinstance(occupancy, Tensor)
        else torch.tensor(list(occupancy), dtype=torch.int64)
    )


def _groups(occupancy: Tensor, group_size: int) -> Tensor:
    return (occupancy + (group_size - 1)).div(group_size, rounding_mode="floor").sum()


def _chunks(longest: int) -> list[tuple[int, int]]:
    """Ranges of group sizes whose terms together stay below a limit, so that memory does too."""
    chunks, start, terms = [], 0, 0
    bounds = [2**k for k in range(longest.bit_length())] + [longest + 1] if longest else []
    for low, high in itertools.pairwise(bounds):
        need = (high - low) * -(-longest // low)
        if terms and terms + need > _CHUNK:
            chunks.append((start, low - 1))
            start, terms = low - 1, 0
        terms += need
    return chunks + ([(start, longest)] if longest else [])


def _groups_for(more_than: Tensor, sizes: Tensor) -> Tensor:
    """``sum over j of more_than[j * g]`` for every g in ``sizes``."""
    lengths = (more_than.shape[0] + sizes - 1).div(sizes, rounding_mode="floor")
    ends = lengths.cumsum(0)
    which = torch.repeat_interleave(torch.arange(sizes.shape[0], device=sizes.device), lengths)
    step = torch.arange(which.shape[0], device=sizes.device) - (ends - lengths)[which]
    sums = torch.cat([more_than.new_zeros(1), more_than[step * sizes[which]].cumsum(0)])
    return sums[ends] - sums[ends - lengths]
