"""Which row of each tensor a point picks, as numbers; and what is made of them once and kept with
the index tensors.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy
import torch
from torch import Tensor

from insum import memory
from insum.compat.contexts import untracked
from insum.host.arguments import HostCall
from insum.host.roles import HostRoles, Side, plain_variables
from insum.lang.bind import Problem, Value
from insum.lang.expr import Access, Affine, accesses
from insum.runtime.points import evaluated, variable_grid

T = TypeVar("T")
#: Numbers below this are kept as int32.
_SMALL = 2**31 - 1
#: From so many numbers on torch sorts in several threads.
_MANY = 1 << 15
#: Whether NumPy sorts long integers in vector code.
_HAS_VECTOR_CODE = platform.machine() in ("x86_64", "AMD64")


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
    grid = variable_grid(roles.points, roles.sizes)
    values = call.indices()
    present = _present(roles, values, grid)
    take = None if present is None else present.nonzero()[:, 0]
    found = []
    for side in roles.sides:
        rows = _numbers(roles, side, values, grid)
        found.append(rows if take is None else rows.index_select(0, take))
    return PointRows(tuple(found), take)


def on_grid(
    problem: Problem, index: Affine, values: Mapping[str, Value], grid: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """An index at all points of a grid, and where it is not absent, None where that is everywhere.
    A tensor that the grid runs along is taken as it lies.
    """
    atom = index.atom
    found = _laid(atom, values, grid) if isinstance(atom, Access) else None
    if found is None or not isinstance(atom, Access):
        return evaluated(index, values, grid, problem.device, problem.padded)
    return found, found != -1 if atom.tensor in problem.padded else None


def _laid(access: Access, values: Mapping[str, Value], grid: Mapping[str, Tensor]) -> Tensor | None:
    """A tensor with a dimension for each variable of the grid; None where these are not its
    dimensions, from end to end.
    """
    vars = plain_variables(access)
    if not vars or len(set(vars)) < len(vars):
        return None
    tensor = torch.as_tensor(values[access.tensor])
    if tensor.shape != tuple(grid[v].numel() for v in vars):
        return None
    there = [v for v in grid if v in vars]
    ordered = tensor.permute([vars.index(v) for v in there])
    return ordered.reshape([grid[v].numel() if v in vars else 1 for v in grid]).long()


def _numbers(
    roles: HostRoles, side: Side, values: Mapping[str, Value], grid: Mapping[str, Tensor]
) -> Tensor:
    total: Tensor | None = None
    for d in side.rows:
        place, there = on_grid(roles.problem, side.access.indices[d], values, grid)
        place = place if there is None else torch.where(there, place, 0)
        total = place if total is None else total * side.shape[d] + place
    total = torch.zeros((), dtype=torch.int64) if total is None else total
    return total.expand(roles.sizes).reshape(-1)


def _present(
    roles: HostRoles, values: Mapping[str, Value], grid: Mapping[str, Tensor]
) -> Tensor | None:
    """Where no index is absent, or None where none can be."""
    problem, found = roles.problem, None
    for _, _, index in problem.index_uses():
        if any(a.tensor in problem.padded for a in accesses(index)):
            there = on_grid(problem, index, values, grid)[1]
            if there is not None:
                found = there if found is None else found & there
    if found is None or bool(found.all()):
        return None
    return found.expand(roles.sizes).reshape(-1)


# --- what is made of them -------------------------------------------------------------------------


class LastWeights:
    """Which tensor scaled the points of the last call, and its version. One that comes back as it
    was is worth keeping in the order of the entries; one that is trained never does.

    A matrix over weights that are in this order reads them where they lie, so that it is as good as
    they are, whatever is written to them: it stays with the tensor object, which it does not hold,
    and with the memory, which it does.
    """

    __slots__ = ("over", "reference", "version")

    def __init__(self) -> None:
        self.reference: weakref.ref[Tensor] | None = None
        self.version = -1
        self.over: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def are(self, weights: Tensor) -> bool:
        """Whether they are these; from now on they are."""
        if weights.is_inference():
            return False
        root = weights if weights._base is None else weights._base
        same = self.reference is not None and self.reference() is root
        if same and self.version == weights._version:
            return True
        self.reference = self.reference if same else weakref.ref(root)
        self.version = weights._version
        return False

    def matrix_over(self, weights: Tensor, dtype: torch.dtype, make: Callable[[], Any]) -> Any:
        """``make()``, once where it is a matrix over the memory of these weights."""
        known, place = self.over, weights.data_ptr()
        if known is not None and known[0]() is weights and known[1] == place:
            if weights.is_contiguous() and known[2].dtype is dtype:
                return known[2]
        made = make()
        if isinstance(made, Tensor) and made.layout is torch.sparse_csr:
            if made.values().data_ptr() == place:
                self.over = weakref.ref(weights, self._gone), place, made
        return made

    def _gone(self, reference: weakref.ref[Tensor]) -> None:
        """Let go of memory that nobody else has."""
        if self.over is not None and self.over[0] is reference:
            self.over = None


@dataclass(frozen=True, slots=True, eq=False)
class RowSegments:
    """Entries sorted by row: those from ``starts[r]`` to ``starts[r+1]`` are in columns
    ``columns`` of row r. ``take`` says which point an entry is, None that they are the points.
    """

    starts: Tensor
    columns: Tensor
    take: Tensor | None
    last: LastWeights = field(default_factory=LastWeights)
    #: By dtype what was made for entries without weights.
    alone: dict[torch.dtype, Any] = field(default_factory=dict)

    def kept(self, weights: Tensor | None, dtype: torch.dtype, make: Callable[[], T]) -> T:
        """``make()``, of weights of points in this dtype, once while they come back as they were;
        in the order of the entries, while they come back.
        """
        if weights is None or weights.is_neg() or weights.is_conj():
            return make()  # its memory says nothing of the sign
        if self.take is None:
            found: T = self.last.matrix_over(weights, dtype, make)
            return found
        if not self.last.are(weights):
            return make()
        entry, key = memory.known(weights) or memory.made(weights), (self.last, dtype)
        kept: T | None = entry.get(key)
        if kept is None:
            with untracked():
                kept = entry.keep(key, make())
        return kept

    def without_weights(self, dtype: torch.dtype, make: Callable[[], T]) -> T:
        """``make()``, once in this dtype."""
        if dtype not in self.alone:
            with untracked():
                self.alone[dtype] = make()
        found: T = self.alone[dtype]
        return found

    def in_order(self, weights: Tensor | None) -> Tensor | None:
        """Numbers of points as numbers of entries."""
        take = self.take
        return weights if weights is None or take is None else weights.index_select(0, take)

    def taken(self, weights: Tensor | None) -> Tensor | None:
        """The same, kept."""
        if weights is None:
            return None
        return self.kept(weights, weights.dtype, lambda: self.in_order(weights))


def segments(rows: Tensor, count: int, columns: Tensor, take: Tensor | None) -> RowSegments:
    lengths = torch.bincount(rows, minlength=count)
    if not is_sorted(rows):
        order = sorting(rows)
        columns = columns.index_select(0, order)
        take = order if take is None else take.index_select(0, order)
    width = torch.int32 if max(count, len(rows), _most(columns)) < _SMALL else torch.int64
    return RowSegments(
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(width),
        columns.to(width),
        None if take is None else take.to(width),
    )


def is_sorted(rows: Tensor) -> bool:
    return bool((rows[1:] >= rows[:-1]).all())


def is_counting(rows: Tensor) -> bool:
    """Whether these are 0, 1, 2, ..."""
    return bool((rows == torch.arange(len(rows))).all())


def sorting(rows: Tensor) -> Tensor:
    """The order in which they do not fall; of equal ones the first comes first. Measured: NumPy
    sorts 16 bits by counting, several times as fast as anything else. Where it has vector code, a
    number and its place in one integer take a tenth of torch's time for a few and half of it for
    many, which torch shares among threads.
    """
    most = _most(rows)
    if most < 1 << 16:
        return torch.from_numpy(numpy.argsort(rows.numpy().astype(numpy.uint16), kind="stable"))
    bits = len(rows).bit_length()
    is_one_word = _HAS_VECTOR_CODE and most >> (62 - bits) == 0
    if not is_one_word or len(rows) >= _MANY and torch.get_num_threads() > 2:
        return torch.sort(narrow(rows), stable=True).indices  # half as long takes half as long
    keys = torch.arange(len(rows)).add_(rows, alpha=1 << bits)
    keys.numpy().sort()
    return keys.bitwise_and_((1 << bits) - 1)


def _most(numbers: Tensor) -> int:
    return int(numbers.max()) if len(numbers) else 0


def narrow(numbers: Tensor) -> Tensor:
    """As int32 where they fit."""
    return numbers.int() if _most(numbers) < _SMALL else numbers
