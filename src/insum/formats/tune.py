"""The format as part of the search: the neighbours of g*, or a table against groups, are timed on
the statement itself; the fastest is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from insum.accepted import TEXT, explains
from insum.api import no_option
from insum.errors import BindingError, FormatError
from insum.formats.base import FORMAT, SparseFormat
from insum.formats.explained import named_operands
from insum.formats.grouped import GroupCOO
from insum.formats.groupsize import estimate_group_size, neighbouring_powers
from insum.formats.run import FormatCall, FormatOrValue, rewritten
from insum.formats.table import NeighborTable
from insum.lang.expr import tensors_of
from insum.lang.parser import parse
from insum.notebook import table
from insum.runtime.timing import Timer, timer_for
from insum.settings import settings

#: How often a candidate is timed.
REPEAT = 15
#: Sizes of the groups by the shortest dimension that a table is timed against.
TABLE_GROUPS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class TunedFormat:
    """The fastest format, and what each group size took; a table's time stands under 0.

    Attributes:
        format: The fastest.
        group_size: Its group size.
        microseconds: By group size, what a call took.
        estimate: g* = sqrt(S/n).

    Examples:
        >>> import torch, insum
        >>> A = insum.formats.GroupCOO.from_dense(torch.eye(8), group_size=1)
        >>> tuned = insum.formats.tune(A, "C[m,n] = A[m,k] * B[k,n]", B=torch.ones(8, 4))
        >>> sorted(tuned.microseconds), tuned.format.group_size in tuned.microseconds
        ([1, 2], True)
    """

    format: SparseFormat
    group_size: int
    microseconds: Mapping[int, float]
    estimate: float  # g*

    def __str__(self) -> str:
        times = ", ".join(
            f"{size or 'table'}: {taken:.1f}" for size, taken in sorted(self.microseconds.items())
        )
        found = f"group size {self.group_size}" if self.group_size else "table"
        return f"{found} (g* = {self.estimate:.1f}; µs by group size: {times})"

    def _repr_html_(self) -> str:
        rows = [(size or "table", f"{t:.1f}") for size, t in sorted(self.microseconds.items())]
        return table(("group size", "µs"), rows, str(self).partition(";")[0] + ")")


@explains(FormatError, A=FORMAT, effort=TEXT)
def tune(
    A: SparseFormat,
    statement: str,
    /,
    *,
    effort: str = "none",
    timer: Timer | None = None,
    **operands: FormatOrValue,
) -> TunedFormat:
    """Time a statement with ``A`` in groups of the sizes around g* = sqrt(S/n), and keep the
    fastest; a `NeighborTable` also as it is.

    ``statement`` is one of `insum.einsum`; ``A`` stands in it under the one name that is not among
    ``operands``. ``effort`` is the search that every group size gets for its kernel (``none``: the
    first guess). Where there is no GPU the graph path is timed.

    Args:
        A: The sparse operand.
        statement: A statement of `insum.einsum` in which it stands.
        effort: The search that every group size gets for its kernel.
        timer: What takes the time of a call; a clock of the device by default.
        operands: All other operands.

    Returns:
        The fastest format, and what each took.

    Examples:
        >>> import torch, insum
        >>> A = insum.formats.GroupCOO.from_dense(torch.ones(4, 16), group_size=1)
        >>> tuned = insum.formats.tune(
        ...     A, "y[m] = A[m,k] * x[k]", x=torch.ones(16), timer=lambda run, repeat: 1.0
        ... )
        >>> sorted(tuned.microseconds)
        [1, 2, 4, 8]
    """
    if "group_size" not in type(A)._options and not isinstance(A, NeighborTable):
        raise FormatError(
            f"{type(A).__name__} has no group size",
            expected="a GroupCOO, a BlockGroupCOO or a NeighborTable",
            remedy="A.to_format('GroupCOO')",
        )
    no_option(statement, "effort", "timer")
    name = _name(statement, operands)
    named_operands(statement, (), {**operands, name: A})  # which says what is no operand
    timer = timer or timer_for(A.device)
    made, best = _spellings(A)
    times: dict[int, float] = {}
    for size, spelled in made.items():
        with settings(effort=effort):
            times[size] = timer(_call(statement, {**operands, name: spelled}).run, REPEAT)
    fastest = min(times, key=lambda size: times[size])
    return TunedFormat(made[fastest], fastest, times, best)


def _spellings(A: SparseFormat) -> tuple[dict[int, SparseFormat], float]:
    """What is tried, by group size, 0 for a table; and g*."""
    if not isinstance(A, NeighborTable):
        best = estimate(A)
        own: int = A.group_size  # type: ignore[attr-defined]
        sizes = sizes_around(best, own)
        return {size: A if size == own else _regrouped(A, size) for size in sizes}, best
    shortest = min((d for d in range(A.ndim) if d != A.dim), key=lambda d: A.shape[d])
    grouped = A.to_format(GroupCOO, group_dims=shortest, group_size=1)
    best = estimate(grouped)
    # Groups by offset are rows of a matrix product, and a long way from g* each offset fills whole
    # tiles of any size.
    sizes = [size for size in TABLE_GROUPS if size <= 2 * best] or [1]
    return {0: A, **{size: _regrouped(grouped, size) for size in sizes}}, best


def estimate(A: SparseFormat) -> float:
    """g* of a grouped format: of its entries, or of its blocks."""
    mask = A.mask()
    entries = math.prod(A.positions) if mask is None else int(mask.sum())
    return estimate_group_size(entries, math.prod(A.grid[d] for d in A.group_dims))  # type: ignore[attr-defined]


def sizes_around(best: float, present: int) -> list[int]:
    """The powers of two beside g*, one further on either side, and the size that A has now.

    >>> sizes_around(5.0, 3), sizes_around(1.0, 1)
    ([2, 3, 4, 8, 16], [1, 2])
    """
    beside = neighbouring_powers(best)
    return sorted({max(1, beside[0] // 2), *beside, 2 * beside[-1], present})


def _regrouped(A: SparseFormat, size: int) -> SparseFormat:
    options: dict[str, Any] = {"group_size": size, "group_dims": A.group_dims}  # type: ignore[attr-defined]
    block = A.block_shape_or_none
    return A.to_format(type(A), **options, **({"block_shape": block} if block else {}))


def _call(statement: str, given: Mapping[str, FormatOrValue]) -> FormatCall:
    return FormatCall(rewritten(statement, given, False), given)


def _name(statement: str, operands: Mapping[str, FormatOrValue]) -> str:
    """The name under which A stands in the statement."""
    parsed = parse(statement)
    missing = [
        name for name in tensors_of(parsed) if name not in operands and name != parsed.target.tensor
    ]
    if len(missing) != 1:
        found = ", ".join(missing) or "none"
        raise BindingError(
            f"not exactly one tensor of the statement is missing among the operands: {found}",
            statement=statement,
            expected="one, which is A",
        )
    return missing[0]
