"""Points that share a matrix, as one matrix product a run of them: sparse convolutions, experts,
relations; and the gradient of such matrices, a product for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from insum.host.arguments import HostCall
from insum.host.parts import Weights, weights_of
from insum.host.places import (
    RowSegments,
    is_counting,
    is_sorted,
    narrow,
    places_of,
    segments,
    sorting,
)
from insum.host.roles import HostRoles, Side, as_tensor
from insum.host.rows import sum_of_rows
from insum.lang.expr import accesses, variables

#: Bytes of the rows that are multiplied at a time: as much as a cache holds, and long enough for a
#: matrix product.
AT_ONCE = 1 << 23
#: Points that a matrix must have on the average; or multiplications, so that calling for each is
#: little beside them.
LEAST_RUN, LEAST_PRODUCT = 16, 1 << 15
#: Where all matrices are one: bytes of what is summed for all of them at a time, and columns that
#: are scattered, from which on that is quicker than a sum of what each gives, if no fewer are
#: multiplied for them; measured.
MOST_SUMMED, LEAST_SCATTERED = 1 << 20, 64
#: What calling for a matrix takes, in steps of a dense statement.
PER_CALL = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Some output rows: the rows that are read for them, sorted by matrix; how many each matrix
    has; and which products they are: sums of some, one each, or None where they are the products.
    """

    first: int
    last: int
    reads: Tensor | slice
    runs: tuple[tuple[int, int, int], ...]
    sums: RowSegments | Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """``Out[o(p),m] += scale(p) * In[i(p),k] * W[w(p),k,m]``."""

    roles: HostRoles
    weights: Weights
    key: tuple[object, ...]
    matrix: int
    name = "runs"
    why = "points that share a matrix are one matrix product, summed while they are in cache"

    @property
    def slowness(self) -> int:
        return _slowness(self.roles, self.roles.wide[self.matrix].count)

    @property
    def sides(self) -> tuple[Side, Side]:
        """The rows that are read, and the matrices."""
        return self.roles.wide[1 - self.matrix], self.roles.wide[self.matrix]

    def __call__(self, call: HostCall) -> Tensor:
        roles, (rows, matrices) = self.roles, self.sides
        chunks = call.kept(self.key, lambda: tuple(self.made(call)))
        inner, outer = roles.shared[0, 1], roles.shared[-1, self.matrix]
        x = rows.matrices(as_tensor(call.values[rows.access.tensor]), inner)
        w = matrices.matrices(as_tensor(call.values[matrices.access.tensor]), inner, outer)
        w = w.to(roles.dtype)
        weights = self.weights(call, roles.dtype)
        out = x.new_empty((roles.target.count, w.shape[2]), dtype=roles.dtype)
        for chunk in chunks:
            _run(chunk, x, w, weights, out[chunk.first : chunk.last])
        return roles.target.restored(out, outer).to(roles.problem.dtype)

    def made(self, call: HostCall) -> Iterator[_Chunk]:
        places = places_of(self.roles, call)
        to, *read = places.rows
        reads, which = read[1 - self.matrix], read[self.matrix]
        take = places.take
        count = self.roles.target.count
        length = torch.bincount(to, minlength=count)
        chunk_of = (length.cumsum(0) - length) // at_once(self.roles)
        # by chunk of the output, then by matrix
        order = sorting(chunk_of[to] * self.sides[1].count + which)
        to, reads, which = (t.index_select(0, order) for t in (to, reads, which))
        points = order if take is None else take.index_select(0, order)
        numbers = torch.arange(int(chunk_of[-1]) + 2)
        starts = torch.searchsorted(chunk_of[to], numbers).tolist()
        firsts = torch.searchsorted(chunk_of, numbers).tolist()
        for (a, b), (first, last) in zip(pairwise(starts), pairwise(firsts)):
            if first < last:
                here = slice(a, b)
                sums = self.sums(to[here] - first, last - first, points[here])
                yield _Chunk(first, last, _side_by_side(reads[here]), _runs(which[here]), sums)

    def sums(self, to: Tensor, count: int, points: Tensor) -> RowSegments | Tensor | None:
        """How the products of a chunk are summed: by output, with the point of each."""
        if not self.roles.narrow and len(to) == count and is_counting(to):
            return None
        found = segments(to, count, torch.arange(len(to)), None)
        if not self.roles.narrow and len(to) == count and is_counting(found.starts):
            return found.columns
        ordered = narrow(points[found.columns.long()]) if self.roles.narrow else None
        return RowSegments(found.starts, found.columns, ordered)


def _side_by_side(reads: Tensor) -> Tensor | slice:
    """Rows that lie one after the other need not be gathered."""
    first = int(reads[0]) if len(reads) else 0
    return slice(first, first + len(reads)) if is_counting(reads - first) else narrow(reads)


def _run(chunk: _Chunk, x: Tensor, w: Tensor, weights: Tensor | None, out: Tensor) -> None:
    reads, sums = chunk.reads, chunk.sums
    read = (x[reads] if isinstance(reads, slice) else x.index_select(0, reads)).to(w.dtype)
    products = out if sums is None else out.new_empty((len(read), out.shape[1]))
    for matrix, start, end in chunk.runs:
        torch.mm(read[start:end], w[matrix], out=products[start:end])
    if isinstance(sums, Tensor):
        torch.index_select(products, 0, sums, out=out)
    elif sums is not None and not len(read):
        out.zero_()
    elif sums is not None:
        out.copy_(sum_of_rows(sums, sums.taken(weights), products))


@dataclass(frozen=True, slots=True, eq=False)
class _MatrixPoints:
    """The points of one matrix: which rows of each factor they read, None where they are counted
    from the start on; and which points they are.
    """

    matrix: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _SortedPoints:
    reads: tuple[Tensor | None, Tensor | None]
    points: Tensor | None
    runs: tuple[_MatrixPoints, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """``W[w(p),k,m] += scale(p) * A[a(p),k] * B[b(p),m]``."""

    roles: HostRoles
    weights: Weights
    key: tuple[object, ...]
    name = "runs"
    why = "points that add to the same matrix are one matrix product"

    @property
    def slowness(self) -> int:
        return _slowness(self.roles, self.roles.target.count)

    def __call__(self, call: HostCall) -> Tensor:
        roles, (left, right) = self.roles, self.roles.wide
        found = call.kept(self.key, lambda: self.made(call))
        rows, columns = roles.shared[-1, 0], roles.shared[-1, 1]
        a = left.matrices(as_tensor(call.values[left.access.tensor]), rows)
        b = right.matrices(as_tensor(call.values[right.access.tensor]), columns)
        weights = self.weights(call, roles.dtype)
        if weights is not None and found.points is not None:
            weights = weights.index_select(0, found.points)
        out = a.new_zeros((roles.target.count, a.shape[1], b.shape[1]), dtype=roles.dtype)
        step = at_once(roles)
        for run in found.runs:
            for start in range(run.start, run.end, step):
                here = slice(start, min(start + step, run.end))
                x, y = (
                    _part(t, reads, here).to(roles.dtype) for t, reads in zip((a, b), found.reads)
                )
                if weights is not None:
                    y = y * weights[here, None]
                out[run.matrix].addmm_(x.T, y)
        result = roles.target.restored(out, rows, columns)
        return result.to(roles.problem.dtype)

    def made(self, call: HostCall) -> _SortedPoints:
        places = places_of(self.roles, call)
        to, *reads = places.rows
        points = places.take
        if not is_sorted(to):
            order = sorting(to)
            to, *reads = (t.index_select(0, order) for t in (to, *reads))
            points = order if points is None else points.index_select(0, order)
        a, b = (None if is_counting(r) else narrow(r) for r in reads)
        runs = tuple(_MatrixPoints(*run) for run in _runs(to))
        return _SortedPoints((a, b), points, runs)


def _part(rows: Tensor, reads: Tensor | None, here: slice) -> Tensor:
    return rows[here] if reads is None else rows.index_select(0, reads[here])


def _runs(which: Tensor) -> tuple[tuple[int, int, int], ...]:
    """For each matrix, in order, where its points begin and end."""
    matrices, counts = torch.unique_consecutive(which, return_counts=True)
    ends = counts.cumsum(0)
    return tuple(zip(matrices.tolist(), (ends - counts).tolist(), ends.tolist()))


def at_once(roles: HostRoles) -> int:
    """How many points are multiplied at a time."""
    widths = [roles.width(pair) for pair in roles.shared]
    return max(LEAST_RUN, AT_ONCE // (roles.dtype.itemsize * max(widths)))


def runs_of(roles: HostRoles) -> Products | Sums | None:
    if len(roles.wide) != 2 or len(roles.shared) != 2 or _is_one_product(roles):
        return None
    if (0, 1) not in roles.shared:
        enough = _are_long(roles, roles.count, roles.target.count)
        return Sums(roles, weights_of(roles), ("sums", *roles.key)) if enough else None
    matrix = 0 if (-1, 0) in roles.shared else 1
    step = at_once(roles)
    few = roles.count <= step * roles.target.count
    long = _are_long(roles, min(roles.count, step), roles.wide[matrix].count)
    key = ("runs", *roles.key)
    return Products(roles, weights_of(roles), key, matrix) if few and long else None


def _is_one_product(roles: HostRoles) -> bool:
    """Whether all matrices together are one, which the graph multiplies with what is gathered for
    it: every matrix has as many points, and of the two other sides one does not know them apart.
    """
    places = [-1, 0, 1]
    shared = [{*pair} for pair in roles.shared]
    (matrix,) = (place for place in places if all(place in pair for pair in shared))
    indices = [roles.sides[matrix + 1].access.indices[d] for d in roles.sides[matrix + 1].rows]
    own = {index.var for index in indices}
    others = [roles.sides[place + 1].access for place in places if place != matrix]
    apart = all(own & {*variables(access)} for access in others)
    if None in own or apart or roles.narrow or roles.problem.padded:
        return False
    if matrix < 0:
        return roles.dtype.itemsize * prod(roles.target.shape) <= MOST_SUMMED
    scatters = any(True for index in roles.target.access.indices for _ in accesses(index))
    columns = roles.width((-1, matrix))
    return not scatters or LEAST_SCATTERED <= columns <= roles.width((0, 1))


def _are_long(roles: HostRoles, points: int, matrices: int) -> bool:
    """Whether a product for each matrix is worth its call: it has enough points, or enough to do
    for those that it has.
    """
    return points >= LEAST_RUN * matrices or points * _each(roles) >= LEAST_PRODUCT * matrices


def _slowness(roles: HostRoles, matrices: int) -> int:
    """Products of small matrices take little more than calling for them."""
    return 2 + PER_CALL * matrices // max(1, roles.count * _each(roles))


def _each(roles: HostRoles) -> int:
    """Multiplications of a point."""
    return prod(roles.width(pair) for pair in roles.shared)
