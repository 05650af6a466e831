"""Which row of each tensor a point picks, as numbers; and what is made of them once and kept with
the index tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from insum import memory
from insum.compat.calls import untracked
from insum.host.roles import HostRoles, Side
from insum.lang.bind import Value
from insum.lang.expr import accesses
from insum.runtime.check import evaluated

T = TypeVar("T")
#: What is remembered about each index tensor of a call.
IndexEntries: TypeAlias = Mapping[str, memory.Entry]


@dataclass(frozen=True, slots=True, eq=False)
class HostCall:
    """The arguments of a call: ``values`` as given, ``indices`` with negative values counted from
    the end where they are, ``entries`` of the index tensors as they were given.
    """

    values: Mapping[str, Value]
    indices: Callable[[], Mapping[str, Value]]
    entries: IndexEntries

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """``make()``, once while all index tensors stay as they are."""
        first, *others = self.entries.values()

        def plainly() -> T:
            with untracked():
                return make()

        return first.remembered((key, *[e.serial for e in others]), plainly)


class Lowering(Protocol):
    """One way to run a statement: its result, as a new tensor."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str: ...

    @property
    def slowness(self) -> int:
        """How many times longer it takes for a multiplication than a dense product, measured; 0
        where it gathers first, and that is what counts.
        """
        ...

    def __call__(self, call: HostCall) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class PointRows:
    """For each present point the row of every side, target first; ``take`` says which points are
    present, None that all are.
    """

    rows: tuple[Tensor, ...]
    take: Tensor | None


def places_of(roles: HostRoles, call: HostCall) -> PointRows:
    count = len(roles.points)
    grid = {
        v: torch.arange(size).reshape([-1 if k == at else 1 for k in range(count)])
        for at, (v, size) in enumerate(zip(roles.points, roles.sizes))
    }
    values = call.indices()
    present = _present(roles, values, grid)
    take = None if present is None else present.nonzero()[:, 0]
    found = []
    for side in roles.sides:
        rows = _numbers(roles, side, values, grid)
        found.append(rows if take is None else rows[take])
    return PointRows(tuple(found), take)


def _numbers(
    roles: HostRoles, side: Side, values: Mapping[str, Value], grid: Mapping[str, Tensor]
) -> Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for d in side.rows:
        place, there = evaluated(roles.problem, side.access.indices[d], values, grid)
        total = total * side.shape[d] + torch.where(there, place, 0)
    return total.expand(roles.sizes).reshape(-1)


def _present(
    roles: HostRoles, values: Mapping[str, Value], grid: Mapping[str, Tensor]
) -> Tensor | None:
    """Where no index is absent, or None where none can be."""
    problem, found = roles.problem, None
    for _, _, index in problem.index_uses():
        if any(a.tensor in problem.padded for a in accesses(index)):
            there = evaluated(problem, index, values, grid)[1]
            found = there if found is None else found & there
    if found is None or bool(found.all()):
        return None
    return found.expand(roles.sizes).reshape(-1)


# --- what is made of them -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RowSegments:
    """Entries sorted by row: those from ``starts[r]`` to ``starts[r+1]`` are in columns
    ``columns`` of row r. ``take`` says which point an entry is, None that they are the points.
    """

    starts: Tensor
    columns: Tensor
    take: Tensor | None

    def taken(self, weights: Tensor | None) -> Tensor | None:
        """Numbers of points as numbers of entries."""
        if weights is None or self.take is None:
            return weights
        return weights.index_select(0, self.take)


def segments(rows: Tensor, count: int, columns: Tensor, take: Tensor | None) -> RowSegments:
    order = None if is_sorted(rows) else sorting(rows)
    if order is not None:
        rows, columns = rows[order], columns[order]
        take = order if take is None else take[order]
    width = torch.int32 if max(count, len(rows), _most(columns)) < 2**31 - 1 else torch.int64
    return RowSegments(
        starts_of(rows, count).to(width),
        columns.to(width),
        None if take is None else take.to(width),
    )


def starts_of(rows: Tensor, count: int) -> Tensor:
    """Where each of ``count`` rows begins among sorted numbers of rows, and where the last ends."""
    return torch.searchsorted(rows.contiguous(), torch.arange(count + 1))


def is_sorted(rows: Tensor) -> bool:
    return bool((rows[1:] >= rows[:-1]).all())


def is_counting(rows: Tensor) -> bool:
    """Whether these are 0, 1, 2, ..."""
    return bool((rows == torch.arange(len(rows))).all())


def sorting(rows: Tensor) -> Tensor:
    return torch.sort(rows, stable=True).indices


def _most(numbers: Tensor) -> int:
    return int(numbers.max()) if len(numbers) else 0


def narrow(numbers: Tensor) -> Tensor:
    """As int32 where they fit."""
    return numbers.int() if _most(numbers) < 2**31 - 1 else numbers
