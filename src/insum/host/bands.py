"""Windows of a few places that slide along many, a part of them at a time: together they reach few
places more than one of them, so that a product over all of these has few in vain::

    s[t,r] = q[t,f] * k[t+r,f]             scores of the places that come next
    s[t,u-t] = q[t,f] * k[u,f]             one product of matrices for each part of t
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall
from insum.host.diagonals import LEAST_POINTS, MOST_PLACES, Diagonals, diagonals_of
from insum.host.operations import lower_on_host
from insum.host.parts import SubProblem
from insum.host.roles import as_tensor, cast
from insum.host.slices import dense_product
from insum.lang.bind import Problem
from insum.lang.expand import expand
from insum.lang.expr import Access, Affine, Statement, Var, product

#: Parts that are done one after the other.
MOST_PARTS = 256


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

    def index(self, length: int) -> Affine:
        """The same, from the first place on."""
        terms = ((self.a, Var(self.j)), (self.b, Var(self.i)))
        return Affine(terms, -self.first(0, length) + self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """``parts`` has the products of ``step`` places of the band's ``i`` and of those that are left
    over, by how many they are; ``dims`` are the dimensions of factors along which it runs, and
    ``along`` that of the output, -1 where it is summed.
    """

    problem: Problem
    band: Band
    parts: Mapping[int, Diagonals | SubProblem]
    step: int
    dims: tuple[tuple[str, int], ...]
    along: int
    name, slowness = "bands", 1
    why = "windows of a part of all places reach few places more than one: they are one product"

    def __call__(self, call: HostCall) -> Tensor:
        problem, band, values = self.problem, self.band, dict(call.values)
        whole = int(problem.extents[band.i])
        made = torch.empty if self.along >= 0 else torch.zeros
        out = made([int(n) for n in problem.shape], dtype=meeting_dtype(problem))
        for start in range(0, whole, self.step):
            length = min(self.step, whole - start)
            for name, dim in self.dims:
                values[name] = as_tensor(call.values[name]).narrow(dim, start, length)
            reached = band.first(start, length), band.places(length)
            if band.holder:
                values[band.holder] = as_tensor(call.values[band.holder]).narrow(band.dim, *reached)
            part = self.parts[length]
            given = HostCall(values, {}, None)
            found = part(given) if isinstance(part, Diagonals) else part(values)
            if self.along >= 0:
                out.narrow(self.along, start, length).copy_(found)
            else:
                (out if band.holder else out.narrow(band.dim, *reached)).add_(found)
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
        found = _parts(problem, target, factors, band)
        if found is not None:
            return found
    return None


def _bands(problem: Problem, target: Access, factors: Sequence[Access]) -> Iterator[Band]:
    """The only index that is more than a variable, as windows of one of its two variables."""
    every = ("", target), *((f.tensor, f) for f in factors)
    odd = [(n, a, d) for n, a in every for d, index in enumerate(a.indices) if index.var is None]
    if len(odd) != 1:
        return
    ((holder, access, dim),) = odd
    index = access.indices[dim]
    if len(index.terms) != 2:
        return
    for (a, along), (b, across) in (index.terms, index.terms[::-1]):
        assert isinstance(along, Var) and isinstance(across, Var)
        if abs(a) == 1:
            width = int(problem.extents[along.name])
            yield Band(holder, dim, along.name, across.name, a, b, index.offset, width)


def _parts(problem: Problem, target: Access, factors: Sequence[Access], band: Band) -> Bands | None:
    extents = {v: int(n) for v, n in problem.extents.items()}
    whole, points = extents[band.i], 1
    for extent in extents.values():
        points *= extent
    longest = 1 + int((MOST_PLACES - 1) * band.width / abs(band.b))
    count = -(-whole // longest)
    if count > MOST_PARTS or points < LEAST_POINTS * count:
        return None
    step = -(-whole // count)
    runs = [
        (f.tensor, d) for f in factors for d, index in enumerate(f.indices) if index.var == band.i
    ]
    if len({name for name, _ in runs}) < len(runs):
        return None
    along = [d for d, index in enumerate(target.indices) if index.var == band.i]
    parts: dict[int, Diagonals | SubProblem] = {}
    for length in {min(step, whole - start) for start in range(0, whole, step)}:
        part = _part(problem, target, factors, band, length)
        found = diagonals_of(part)
        if found is None and length == step:
            return None
        parts[length] = found or SubProblem(part, lower_on_host(part))  # few are left over
    return Bands(problem, band, parts, step, tuple(runs), along[0] if along else -1)


def _part(
    problem: Problem, target: Access, factors: Sequence[Access], band: Band, length: int
) -> Problem:
    """The same statement over so many places."""
    sizes = {band.i: length}
    every, shapes = list[Access](), list[tuple[int, ...]]()
    for name, access in ("", target), *((f.tensor, f) for f in factors):
        shape = problem.kinds[name].shape if name else problem.shape
        indices = list(access.indices)
        found = [sizes.get(str(i.var), int(n)) for i, n in zip(indices, shape, strict=True)]
        if name == band.holder:
            indices[band.dim], found[band.dim] = band.index(length), band.places(length)
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
        extents={**problem.extents, **sizes},
        shape=shapes[0],
        dtype=meeting_dtype(problem),
    )
