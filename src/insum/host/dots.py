"""A scalar product for each point: a product of two dense matrices, sampled where there are points.
Neither matrix is gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from insum.host.arguments import HostCall
from insum.host.parts import Finish, extent_of, finish_of
from insum.host.places import RowSegments, is_sorted, places_of, segments
from insum.host.roles import HostRoles, Side, are_dense, as_tensor, cast
from insum.host.rows import csr
from insum.lang.expr import variables

#: Points of a row that is picked from which on it is worth laying these side by side, measured.
MANY_PAIRS = 12


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Entries by row of one factor and column of the other; ``first`` says which has the rows, and
    ``take`` which point an entry is, None that they are the points.
    """

    entries: RowSegments
    first: int
    take: Tensor | None

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        entries = self.entries
        matrix = csr(entries, a.new_zeros(entries.columns.shape), (a.shape[0], b.shape[0]))
        # into what is there: a product that makes its own copies zeros first
        torch.sparse.sampled_addmm(matrix, a, b.T, beta=0.0, out=matrix)
        found: Tensor = matrix.values()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Every:
    """More points than there are pairs of rows: all products, and where each point's is."""

    at: Tensor
    take: Tensor | None
    first: int = 0

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b.T).reshape(-1).index_select(0, self.at)


@dataclass(frozen=True, slots=True, eq=False)
class Dots:
    """``S[p] = A[row(p),n] * B[column(p),n]``, summed over n."""

    roles: HostRoles
    finish: Finish
    key: tuple[object, ...]
    sizes: tuple[int, ...]
    name, slowness = "dots", 8
    why = "a scalar product for each point is a product of two matrices, sampled at the points"

    def __call__(self, call: HostCall) -> Tensor:
        found = call.kept(self.key, lambda: self.made(call))
        a, b = self.factor(call, found.first), self.factor(call, 1 - found.first)
        result = found.dots(a, b)
        if found.take is not None:
            result = a.new_zeros(math.prod(self.sizes)).scatter_(0, found.take, result)
        return cast(self.finish(call, result.reshape(self.sizes)), self.roles.problem.dtype)

    def factor(self, call: HostCall, which: int) -> Tensor:
        side = self.roles.wide[which]
        tensor = cast(as_tensor(call.values[side.access.tensor]), self.roles.dtype)
        if not side.is_matrix:
            tensor = side.matrices(tensor, self.roles.shared[0, 1])
        return tensor.contiguous()

    def made(self, call: HostCall) -> _Pairs | _Every:
        places = places_of(self.roles, call)
        _, a, b = places.rows
        count = [side.count for side in self.roles.wide]
        if len(a) >= count[0] * count[1]:
            return _Every(a * count[1] + b, places.take)
        first = 1 if is_sorted(b) and not is_sorted(a) else 0
        rows, columns = (b, a) if first else (a, b)
        side = self.roles.wide[first]
        entries = segments(rows, side.count, columns, places.take)
        return _Pairs(entries, first, None if entries.take is None else entries.take.long())


def _picked(roles: HostRoles, side: Side) -> int:
    """How many rows of it are picked."""
    indices = [side.access.indices[d] for d in side.rows]
    return extent_of(roles.problem, {v for index in indices for v in variables(index)})


def dots_of(roles: HostRoles) -> Dots | None:
    if len(roles.wide) != 2 or set(roles.shared) != {(0, 1)}:
        return None
    if are_dense(roles.wide) or roles.width((0, 1)) == 1:
        return None  # a product of matrices, or one of two numbers for each point
    if all(MANY_PAIRS * _picked(roles, side) <= roles.count for side in roles.wide):
        return None  # rows that are picked, and then meet each other: products of matrices
    moved = sum(side.count for side in roles.wide if side.is_moved(roles.shared[0, 1]))
    if roles.count < moved:
        return None  # what would have to be laid side by side first is more than what is read
    return Dots(roles, finish_of(roles), ("dots", *roles.key), roles.sizes)
