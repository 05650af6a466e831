"""Windows of a few places that slide along many, a part of them at a time: together they reach few
places more than one of them, so that a product over all of these has few in vain::

    s[t,r] = q[t,f] * k[t+r,f]             scores of the places that come next
    s[t,u-t] = q[t,f] * k[u,f]             one product of matrices for each part of t
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall
from insum.host.diagonals import MOST_PLACES, Diagonals, diagonals_of
from insum.host.operations import lower_on_host
from insum.host.parts import SubProblem
from insum.host.roles import as_tensor, cast
from insum.host.slices import dense_product, slices_of
from insum.lang.bind import Problem
from insum.lang.expand import expand
from insum.lang.expr import (
    Access,
    Affine,
    Statement,
    Var,
    fresh,
    index_of,
    names_of,
    odd_index,
    product,
    variables,
)

#: Places of a window from which on this is quicker than adding up slices, measured.
LEAST_WIDTH = 8
#: Bytes of what is made for the parts that are done at a time, as much as a cache holds.
AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Band:
    """Place ``a * j + b * i + offset`` along ``dim`` of ``holder``, which is '' for the result;
    ``width`` places of ``j``.
    """

    holder: str
    dim: int
    j: str
    i: str
    a: int
    b: int
    offset: int
    width: int

    def first(self, start: int, length: int) -> int:
        """The first place that is reached from these of ``i``."""
        back = min(self.a * (self.width - 1), 0) + min(self.b * (length - 1), 0)
        return self.offset + self.b * start + back

    def places(self, length: int) -> int:
        return self.width + abs(self.b) * (length - 1)

    def windows(self, tensor: Tensor, parts: Parts) -> Tensor:
        """What parts reach of a tensor, a view: they lie over each other."""
        return self._view(tensor, parts, 0, self.places(parts.length))

    def add(self, tensor: Tensor, found: Tensor, parts: Parts) -> None:
        """Add to a tensor what parts reach of it: at a time what does not lie over each other."""
        places, apart = self.places(parts.length), abs(self.b) * parts.length
        for begin in range(0, places, apart if parts.count > 1 else places):
            count = min(apart, places - begin) if parts.count > 1 else places
            into = self._view(tensor, parts, begin, count)
            into.add_(found.narrow(self.dim + 1, begin, count))

    def _view(self, tensor: Tensor, parts: Parts, begin: int, count: int) -> Tensor:
        sizes, strides = list(tensor.shape), list(tensor.stride())
        one = strides[self.dim]
        offset = tensor.storage_offset() + one * (self.first(parts.start, parts.length) + begin)
        sizes[self.dim : self.dim + 1] = parts.count, count
        strides[self.dim : self.dim + 1] = one * abs(self.b) * parts.length, one
        return tensor.as_strided(sizes, strides, offset)

    def index(self, length: int) -> Affine:
        """The same, from the first place on."""
        terms = ((self.a, Var(self.j)), (self.b, Var(self.i)))
        return Affine(terms, -self.first(0, length) + self.offset)


@dataclass(frozen=True, slots=True)
class Parts:
    """``count`` parts of ``length`` places of the band's ``i`` each, from ``start`` on."""

    start: int
    count: int
    length: int

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Of a tensor along which ``i`` runs, with a dimension for the parts before it."""
        whole = tensor.narrow(dim, self.start, self.count * self.length)
        shape = *whole.shape[:dim], self.count, self.length, *whole.shape[dim + 1 :]
        return whole.view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """``products`` of some parts at a time, by how many there are and how long they are; ``dims``
    are the dimensions of factors along which the band's ``i`` runs, and ``along`` that of the
    output, -1 where it is summed.
    """

    problem: Problem
    band: Band
    parts: tuple[Parts, ...]
    products: Mapping[tuple[int, int], Diagonals | SubProblem]
    dims: tuple[tuple[str, int], ...]
    along: int
    name, slowness = "bands", 1
    why = "windows of a part of all places reach few places more than one: they are one product"

    def __call__(self, call: HostCall) -> Tensor:
        problem, band, values = self.problem, self.band, dict(call.values)
        made = torch.empty if self.along >= 0 else torch.zeros
        out = made([int(n) for n in problem.shape], dtype=meeting_dtype(problem))
        for some in self.parts:
            for name, dim in self.dims:
                values[name] = some.of(as_tensor(call.values[name]), dim)
            if band.holder:
                values[band.holder] = band.windows(as_tensor(call.values[band.holder]), some)
            product = self.products[some.count, some.length]
            given = HostCall(values, {}, None)
            found = product(given) if isinstance(product, Diagonals) else product(values)
            if self.along >= 0:
                some.of(out, self.along).copy_(found)
            elif band.holder:
                out.add_(found)
            else:
                band.add(out, found, some)
        return cast(out, problem.dtype)


def bands_of(problem: Problem) -> Bands | None:
    """None where no window slides along more places than it has, or parts would be too small."""
    every = dense_product(problem)
    if every is None or problem.target_read:
        return None
    target, *factors = every
    names = [f.tensor for f in factors]
    if len({*names}) < len(names):
        return None  # a tensor that is read twice is cut in two ways
    for band in _bands(problem, target, factors):
        if band.width < LEAST_WIDTH and slices_of(problem) is not None:
            continue
        found = _parts(problem, target, factors, band)
        if found is not None:
            return found
    return None


def _bands(problem: Problem, target: Access, factors: Sequence[Access]) -> Iterator[Band]:
    """The only index that is more than a variable, as windows of one of its two variables."""
    every = target, *factors
    for at, dim, (a, along), (b, across) in odd_index(every):
        if abs(a) == 1:
            holder, index = every[at].tensor if at else "", every[at].indices[dim]
            width = int(problem.extents[along.name])
            yield Band(holder, dim, along.name, across.name, a, b, index.offset, width)


def _parts(problem: Problem, target: Access, factors: Sequence[Access], band: Band) -> Bands | None:
    whole = int(problem.extents[band.i])
    longest = 1 + int((MOST_PLACES - 1) * band.width / abs(band.b))
    length = -(-whole // -(-whole // longest))
    runs = [
        (f.tensor, d) for f in factors for d, index in enumerate(f.indices) if index.var == band.i
    ]
    if not whole or len({name for name, _ in runs}) < len(runs):
        return None
    along = [d for d, index in enumerate(target.indices) if index.var == band.i]
    pair = {band.i, band.j}
    both = [{*variables(a)} for a in (target, *factors) if pair <= {i.var for i in a.indices}]
    laid = max((prod(int(problem.extents[v]) for v in vars - pair) for vars in both), default=1)
    nbytes = meeting_dtype(problem).itemsize * laid * length * band.places(length)
    most = max(1, AT_ONCE // max(1, nbytes)) if band.b > 0 else 1
    parts, products = list[Parts](), dict[tuple[int, int], Diagonals | SubProblem]()
    start = 0
    while start < whole:
        own = min(length, whole - start)
        parts.append(Parts(start, max(1, min(most, (whole - start) // own)), own))
        start += parts[-1].count * own
    for some in parts:
        if (some.count, some.length) not in products:
            part = _part(problem, target, factors, band, some)
            found = diagonals_of(part)
            if found is None and some is parts[0]:
                return None
            products[some.count, some.length] = found or SubProblem(part, lower_on_host(part))
    return Bands(problem, band, tuple(parts), products, tuple(runs), along[0] if along else -1)


def _part(
    problem: Problem, target: Access, factors: Sequence[Access], band: Band, parts: Parts
) -> Problem:
    """The same statement over some parts, with a variable for them."""
    own = fresh("part", names_of(problem.statement))
    every, shapes = list[Access](), list[tuple[int, ...]]()
    for name, access in ("", target), *((f.tensor, f) for f in factors):
        shape = problem.kinds[name].shape if name else problem.shape
        indices, found = list[Affine](), list[int]()
        for dim, (index, size) in enumerate(zip(access.indices, shape, strict=True)):
            if name == band.holder and dim == band.dim:
                indices += index_of(own), band.index(parts.length)
                found += parts.count, band.places(parts.length)
            elif index.var == band.i:
                indices += index_of(own), index
                found += parts.count, parts.length
            else:
                indices.append(index)
                found.append(int(size))
        every.append(Access(access.tensor, tuple(indices)))
        shapes.append(tuple(found))
    left, *reads = every
    statement = Statement(left, problem.statement.operator, product([*reads]))
    kinds = {
        a.tensor: replace(problem.kinds[a.tensor], shape=s)
        for a, s in zip(reads, shapes[1:], strict=True)
    }
    return replace(
        problem,
        statement=statement,
        terms=expand(statement),
        kinds=kinds,
        extents={**problem.extents, band.i: parts.length, own: parts.count},
        shape=shapes[0],
        dtype=meeting_dtype(problem),
    )
