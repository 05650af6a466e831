"""Places that count along a diagonal, as distances from one point to another do, walked by
themselves:

    s[i,j] = q[i,f] * r[j-i+c,f]           scores of relative places
    t[i,u] = q[i,f] * r[u,f]               one product of matrices
    s[i,j] = t[i,j-i+c]                    a view of it

and the other way round where the diagonal is read, or written to:

    dq[i,f] = ds[i,j] * r[j-i+c,f]         dr[j-i+c,f] = ds[i,j] * q[i,f]
    t[i,j-i+c] = ds[i,j]                   into zeros
    dq[i,f] = t[i,u] * r[u,f]              dr[u,f] = t[i,u] * q[i,f]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from insum.graph.lower import live_terms
from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall
from insum.host.operations import lower_on_host
from insum.host.parts import SubProblem, is_finite, sub_problem, tensor_kind
from insum.host.roles import FLOATS, cast, plain_variables
from insum.lang.bind import Problem
from insum.lang.expr import (
    Access,
    Expr,
    accesses,
    fresh,
    index_of,
    names_of,
    odd_index,
    variables,
)
from insum.lang.problem import Kind

#: How many times more places there may be than one point counts, how many multiplications for each
#: number that is moved pay for it, and points of a statement that is worth it.
MOST_PLACES, LEAST_REUSE, LEAST_POINTS = 2.5, 8, 1 << 16


@dataclass(frozen=True, slots=True)
class _Diagonal:
    """Place ``j + by * i + offset``, of ``count``, of what ``holder`` accesses along ``dim``; where
    ``flipped``, that is counted from the end.
    """

    holder: Access
    dim: int
    i: str
    j: str
    by: int
    offset: int
    count: int
    flipped: bool


@dataclass(frozen=True, slots=True)
class _Skewed:
    """A tensor with dimensions for ``i`` and ``j``, these first, among all others in their order,
    and the same with places instead of ``j``: its shape, and where in its memory the first lies.
    """

    order: tuple[int, ...]
    shape: tuple[int, ...]
    by: int
    offset: int

    def view(self, places: Tensor, length: int) -> Tensor:
        """Of a contiguous tensor over places the numbers that are met, ``length`` of each ``i``."""
        strides = list(places.stride())
        strides[-2] += self.by
        shape = *self.shape[:-1], length
        return places.as_strided(shape, strides, places.storage_offset() + self.offset)

    def laid(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor among zeros."""
        moved = tensor.permute(self.order)
        places = torch.zeros(self.shape, dtype=dtype)
        self.view(places, moved.shape[-1]).copy_(moved)
        return places


@dataclass(frozen=True, slots=True, eq=False)
class Diagonals:
    """``product`` over places; ``read`` tells how the tensors lie that are laid out for it, by
    their new names, and ``written`` how the result is found in it. ``flipped``: a tensor, or the
    result where that is '', whose places along a dimension are counted from the end.
    """

    product: SubProblem
    read: tuple[tuple[str, str, _Skewed], ...]
    written: _Skewed | None
    length: int
    flipped: tuple[str, int] | None
    dtype: torch.dtype
    otherwise: SubProblem
    name, slowness = "diagonals", 1
    why = "places are counted along a diagonal, and a product over all of them has few in vain"

    def __call__(self, call: HostCall) -> Tensor:
        values = dict(call.values)
        wide = self.product.problem.dtype
        for name, source, skewed in self.read:
            values[name] = skewed.laid(torch.as_tensor(values[source]), wide)
        if self.flipped is not None and self.flipped[0]:
            name, dim = self.flipped
            values[name] = torch.as_tensor(values[name]).flip(dim)
        found = self.product(values)
        # zeros between what is met must not meet what is not finite
        if self.read and not is_finite(found, wide):
            return self.otherwise(call.values)
        if self.written is not None:
            found = self.written.view(found, self.length)
            found = found.permute(_inverse(self.written.order)).contiguous()
        if self.flipped is not None and not self.flipped[0]:
            found = found.flip(self.flipped[1])
        return cast(found, self.dtype)


def diagonals_of(problem: Problem) -> Diagonals | None:
    """None where no index is a diagonal, or other places of it than those that are met would take
    longer than finding these.
    """
    terms = live_terms(problem)
    points = prod(int(n) for n in problem.extents.values())
    plain = problem.statement.operator in ("=", "+=") and problem.dtype in FLOATS
    if len(terms) != 1 or not plain or problem.target_read or points < LEAST_POINTS:
        return None
    factors = terms[0].factors
    reads = [problem.statement.target, *(f for f in factors if isinstance(f, Access))]
    if any(True for h in reads for i in h.indices for _ in accesses(i)):
        return None
    rest = [f for f in factors if not isinstance(f, Access)]
    if any(map(variables, rest)):
        return None
    found = (_by_places(problem, reads, rest, one) for one in _diagonals(problem, reads))
    return next((one for one in found if one is not None), None)


def _diagonals(problem: Problem, holders: Sequence[Access]) -> Iterator[_Diagonal]:
    """The only index that is more than a variable, as a diagonal of one of its two variables."""
    for at, dim, (a, along), (b, across) in odd_index(holders):
        holder = holders[at]
        index = holder.indices[dim]
        count, by = int(problem.size_of(holder, dim)), a * b
        few = count <= MOST_PLACES * int(problem.extents[along.name])
        if abs(a) == 1 and few and count + by >= 0:
            offset = index.offset if a == 1 else count - 1 - index.offset
            yield _Diagonal(holder, dim, across.name, along.name, by, offset, count, a < 0)


def _by_places(
    problem: Problem, holders: Sequence[Access], rest: Sequence[Expr], diagonal: _Diagonal
) -> Diagonals | None:
    i, j, others = diagonal.i, diagonal.j, [h for h in holders if h is not diagonal.holder]
    own = [
        v for d, n in enumerate(diagonal.holder.indices) if d != diagonal.dim for v in variables(n)
    ]
    if {i, j} & {*own} or any(h.tensor == diagonal.holder.tensor for h in others):
        return None
    meeting = [h for h in others if j in variables(h)]
    if not meeting or not all(_has_both(problem, h, holders[0], i, j) for h in meeting):
        return None
    extents = {v: int(n) for v, n in problem.extents.items()}
    moved = sum(prod(extents[v] for v in variables(h)) for h in meeting)
    if prod(extents.values()) < LEAST_REUSE * moved:
        return None
    taken, wide = names_of(problem.statement), meeting_dtype(problem)
    u, kinds, read = fresh("u", taken), dict[str, Kind](), list[tuple[str, str, _Skewed]]()
    along = {**extents, u: diagonal.count}

    def placed(holder: Access) -> Access:
        if holder is diagonal.holder:
            indices = [
                index_of(u) if d == diagonal.dim else n for d, n in enumerate(holder.indices)
            ]
            return Access(holder.tensor, tuple(indices))
        if holder not in meeting:
            return holder
        name = holder.tensor if holder is holders[0] else fresh("laid", taken)
        vars = [*(v for v in plain_variables(holder) if v not in (i, j)), i, u]
        return Access(name, tuple(map(index_of, vars)))

    new = [placed(h) for h in holders]
    for before, after in zip(holders, new):
        if before is not holders[0] and before in meeting:
            skewed = _skewed(before, after, diagonal, along)
            read.append((after.tensor, before.tensor, skewed))
            kinds[after.tensor] = tensor_kind(skewed.shape, wide)
    target, *factors = new
    shape = tuple(along[str(index.var)] for index in target.indices)
    if diagonal.holder is holders[0] or holders[0] not in meeting:
        shape = tuple(int(n) for n in problem.shape)
    terms: list[Expr] = [*rest, *factors]
    product = sub_problem(problem, target, terms, shape, wide, kinds, {u: diagonal.count})
    written = _skewed(holders[0], target, diagonal, along) if holders[0] in meeting else None
    is_target = diagonal.holder is holders[0]
    flip = ("" if is_target else diagonal.holder.tensor, diagonal.dim)
    return Diagonals(
        SubProblem(product, lower_on_host(product)),
        tuple(read),
        written,
        extents[j],
        flip if diagonal.flipped else None,
        problem.dtype,
        SubProblem(problem, lower_on_host(problem)),
    )


def _has_both(problem: Problem, holder: Access, target: Access, i: str, j: str) -> bool:
    """Whether a tensor has one whole dimension for each of its variables, and these among them."""
    vars = plain_variables(holder)
    if not {i, j} <= {*vars} or not len(holder.indices) == len(vars) == len({*vars}):
        return False
    sizes = problem.shape if holder is target else problem.kinds[holder.tensor].shape
    return all(int(n) == int(problem.extents[v]) for v, n in zip(vars, sizes, strict=True))


def _skewed(before: Access, after: Access, diagonal: _Diagonal, extents: dict[str, int]) -> _Skewed:
    vars = [*(str(index.var) for index in after.indices[:-1]), diagonal.j]
    held = plain_variables(before)
    shape = tuple(extents[str(index.var)] for index in after.indices)
    return _Skewed(tuple(held.index(v) for v in vars), shape, diagonal.by, diagonal.offset)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(k) for k in range(len(order)))
