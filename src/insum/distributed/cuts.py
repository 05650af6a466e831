"""Where rows are cut: at even numbers of nonzeros, or of rows, without anybody seeing them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

#: Rank ``r`` holds rows ``cuts[r]`` up to, not including, ``cuts[r + 1]``.
Cuts: TypeAlias = tuple[int, ...]


def even_cuts(rows: int, ranks: int) -> Cuts:
    """As many rows for each rank as for any other, but for one.

    >>> even_cuts(10, 4)
    (0, 2, 5, 7, 10)
    """
    return tuple(rows * rank // ranks for rank in range(ranks + 1))


def nonzero_cuts(
    below: Callable[[Tensor], Tensor], nonzeros: int, rows: int, ranks: int, device: torch.device
) -> Cuts:
    """Cuts between which nonzeros are even, as far as whole rows allow.

    ``below`` tells for each of some rows how many nonzeros lie in rows before it; a sum over ranks
    where each has some of them. It is asked about as often as the number of rows has bits, about
    one row for each cut, so that no rank needs a count for every row.

    >>> rows = torch.tensor([0, 0, 0, 0, 1, 2, 3, 3])
    >>> nonzero_cuts(lambda row: torch.searchsorted(rows, row), 8, 4, 2, rows.device)
    (0, 1, 4)
    """
    wanted = torch.tensor([nonzeros * rank // ranks for rank in range(1, ranks)], device=device)
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, rows)
    for _ in range(rows.bit_length()):
        middle = (low + high).div(2, rounding_mode="floor")
        enough = below(middle) >= wanted
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
        low = torch.minimum(low, high)
    return 0, *high.tolist(), rows


def scaled(cuts: Cuts, size: int, rows: int) -> Cuts:
    """Cuts of blocks as cuts of rows; the last block may be cut off.

    >>> scaled((0, 2, 3), 4, 10)
    (0, 8, 10)
    """
    return tuple(min(cut * size, rows) for cut in cuts)


def lengths(cuts: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(cuts)]


def owners(rows: Tensor, cuts: Cuts) -> Tensor:
    """The rank that holds each of some rows.

    >>> owners(torch.tensor([0, 3, 4, 9]), (0, 4, 4, 10))
    tensor([0, 0, 2, 2])
    """
    ends = torch.tensor(cuts[1:-1], device=rows.device, dtype=rows.dtype)
    return torch.bucketize(rows.contiguous(), ends, right=True)
