"""Windows, slice by slice: where ``x[i+a]`` is read or written, each ``a`` is a slice of ``x``,
which lies in memory as it is. A graph would make a copy of all windows, as many times as large.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from insum.graph.lower import live_terms
from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall
from insum.host.roles import FLOATS, as_tensor, cast
from insum.lang.bind import Problem
from insum.lang.expr import Access, Affine, Var, accesses, variables

#: Slices that are added up one after the other, and numbers of one below which calling torch takes
#: longer than what it does.
MOST_SLICES, LEAST_POINTS = 512, 1 << 12
#: Bytes of what is read and written of one slice after the other before what comes next, measured:
#: a part of the last cache. Less is done in no time, beside calling torch.
AT_ONCE = 1 << 23
#: Bytes of a number that is read and of one that is written.
READ_AND_WRITTEN = 8
#: Numbers that lie side by side, from which on torch sums a view of windows as quickly, measured.
LEAST_SIDE_BY_SIDE = 8
#: Where each variable stands that is looped over.
LoopPlaces: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SlicedIndex:
    """One dimension: where its slice begins, by the variables that are looped over, and which
    variable runs along it, in which steps; '' where a single place is left.
    """

    offset: int
    looped: tuple[tuple[int, str], ...]
    var: str
    step: int

    def begin(self, places: LoopPlaces) -> int:
        own = self.step * places.get(self.var, 0)
        return self.offset + own + sum(by * places[name] for by, name in self.looped)


@dataclass(frozen=True, slots=True)
class SlicedAccess:
    """A tensor, sliced anew for every place of the variables that are looped over."""

    tensor: str
    indices: tuple[SlicedIndex, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(index.var for index in self.indices if index.var)

    def of(self, tensor: Tensor, places: LoopPlaces, extents: Mapping[str, int]) -> Tensor:
        dim = 0
        for index in self.indices:
            begin = index.begin(places)
            if not index.var:
                tensor = tensor.select(dim, begin)
                continue
            end = begin + index.step * (extents[index.var] - 1) + 1
            tensor = tensor[(slice(None),) * dim + (slice(begin, end, index.step),)]
            dim += 1
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """``y[i] = x[i+a] * w[a]``, added up over ``a``: ``loops`` are the variables that each slice
    has one place of. All of that is done for ``step`` places of ``var`` after the other, which stay
    in cache.
    """

    problem: Problem
    target: SlicedAccess
    factors: tuple[SlicedAccess, ...]
    loops: tuple[str, ...]
    var: str
    step: int
    name, slowness = "slices", 0
    why = "windows are added up slice by slice: no copy of them is made"

    def __call__(self, call: HostCall) -> Tensor:
        dtype = meeting_dtype(self.problem)
        extents = {v: int(n) for v, n in self.problem.extents.items()}
        read = {f.tensor: cast(as_tensor(call.values[f.tensor]), dtype) for f in self.factors}
        out = torch.zeros([int(n) for n in self.problem.shape], dtype=dtype)
        whole = extents.get(self.var, 1)
        for start in range(0, whole, self.step):
            extents[self.var] = min(self.step, whole - start)
            for at in itertools.product(*(range(extents[v]) for v in self.loops)):
                places = {**dict(zip(self.loops, at)), self.var: start}
                parts = [f.of(read[f.tensor], places, extents) for f in self.factors]
                self.add(self.target.of(out, places, extents), parts)
        return cast(out, self.problem.dtype)

    def add(self, into: Tensor, parts: Sequence[Tensor]) -> None:
        """One slice of each factor, multiplied and, where more is summed, added up."""
        kept = self.target.variables
        own = [f.variables for f in self.factors]
        summed = tuple(dict.fromkeys(v for names in own for v in names if v not in kept))
        order = (*kept, *summed)
        first, *others = (_spread(p, names, order) for p, names in zip(parts, own))
        if not others:
            into.add_(first)
            return
        *inner, last = others
        for part in inner:
            first = first * part
        if summed:
            into.add_((first * last).sum(tuple(range(len(kept), len(order)))))
        else:
            into.addcmul_(first, last)


@dataclass(frozen=True, slots=True, eq=False)
class WindowSums:
    """``y[i,f] = x[i+a,f]``: windows are a view of what they lie in, so much further in memory for
    each place of a variable, and are summed as torch sums any view.
    """

    problem: Problem
    access: Access
    name, slowness = "slices", 0
    why = "windows are summed where they lie: no copy of them is made"

    def __call__(self, call: HostCall) -> Tensor:
        tensor = as_tensor(call.values[self.access.tensor])
        dtype, kept = meeting_dtype(self.problem), variables(self.problem.statement.target)
        order = *kept, *(v for v in self.problem.extents if v not in kept)
        strides, offset = dict.fromkeys(order, 0), tensor.storage_offset()
        for index, stride in zip(self.access.indices, tensor.stride()):
            offset += index.offset * stride
            for by, atom in index.terms:
                assert isinstance(atom, Var)
                strides[atom.name] += by * stride
        sizes = [int(self.problem.extents[v]) for v in order]
        view = tensor.as_strided(sizes, list(strides.values()), offset)
        found = view.sum(tuple(range(len(kept), len(order))), dtype=dtype)
        return cast(found, self.problem.dtype).contiguous()


def _spread(part: Tensor, names: Sequence[str], kept: Sequence[str]) -> Tensor:
    """Its dimensions in the order of those of the result, with one place for each that it lacks."""
    part = part.permute([names.index(v) for v in kept if v in names])
    for dim, var in enumerate(kept):
        if var not in names:
            part = part.unsqueeze(dim)
    return part


def slices_of(problem: Problem) -> Slices | WindowSums | None:
    """None where there are no windows, where indices are read, and where slices are too small, or
    too many.
    """
    every = dense_product(problem)
    if every is None:
        return None
    reads = every[1:]
    extents = {v: int(n) for v, n in problem.extents.items()}
    loops = _looped([index for access in every for index in access.indices], extents)
    count = prod(extents[v] for v in loops)
    if not loops or count > MOST_SLICES or prod(extents.values()) < LEAST_POINTS * count:
        return None
    found = [sliced(access, loops) for access in every]
    known = {*loops, *(v for a in reads for v in variables(a))}
    if None in found or {*variables(every[0])} - known:
        return None
    if _runs_behind(problem, every, loops):
        return WindowSums(problem, every[1])
    target, *factors = (one for one in found if one is not None)
    if not factors or not _is_plain(target, factors):
        return None
    var = next(iter(target.variables), "")
    place = prod(n for v, n in extents.items() if v not in loops and v != var)
    step = max(1, AT_ONCE // max(1, READ_AND_WRITTEN * place))
    return Slices(problem, target, tuple(factors), loops, var, step)


def _runs_behind(problem: Problem, every: Sequence[Access], loops: Sequence[str]) -> bool:
    """Whether windows of one tensor are summed, and what lies side by side in memory stays so."""
    if len(every) != 2 or any(index.var is None for index in every[0].indices):
        return False
    kept, read = variables(every[0]), every[1]
    last = read.indices[-1].var
    if last is None or last in loops or last not in kept or {*problem.extents} <= {*kept}:
        return False
    forward = all(by > 0 for index in read.indices for by, _ in index.terms)
    return forward and int(problem.extents[last]) >= LEAST_SIDE_BY_SIDE


def dense_product(problem: Problem) -> list[Access] | None:
    """The left side and the factors of a product of floating numbers that reads no index tensor."""
    terms, statement = live_terms(problem), problem.statement
    if len(terms) != 1 or statement.operator not in ("=", "+=") or not _are_floats(problem):
        return None
    every = [statement.target, *(f for f in terms[0].factors if isinstance(f, Access))]
    indexed = any(True for a in every for i in a.indices for _ in accesses(i))
    return None if indexed or len(every) <= len(terms[0].factors) else every


def _is_plain(target: SlicedAccess, factors: Sequence[SlicedAccess]) -> bool:
    """Whether a slice of the product is as large as one of a factor, and nothing of it is summed;
    or all along the windows is, of two such factors. Products of matrices, and of vectors, are
    quicker over all windows at once.
    """
    every, kept = {v for factor in factors for v in factor.variables}, {*target.variables}
    along = {i.var for factor in factors for i in factor.indices if i.var and i.looped}
    whole = sum(every == {*factor.variables} for factor in factors)
    return bool(whole) and every <= kept or not along & kept and whole > 1


def _are_floats(problem: Problem) -> bool:
    kinds = problem.kinds.values()
    return all(kind.device is not None and kind.dtype in FLOATS for kind in kinds)


def _looped(indices: Sequence[Affine], extents: Mapping[str, int]) -> tuple[str, ...]:
    """Of the variables of each window all but the longest."""
    found: dict[str, None] = {}
    for index in indices:
        names = [atom.name for _, atom in index.terms if isinstance(atom, Var)]
        found |= dict.fromkeys(sorted(names, key=lambda v: extents[v])[:-1])
    return tuple(found)


def sliced(access: Access, loops: Sequence[str]) -> SlicedAccess | None:
    found = []
    for index in access.indices:
        terms = [(by, atom.name) for by, atom in index.terms if isinstance(atom, Var)]
        looped = tuple(term for term in terms if term[1] in loops)
        left = [term for term in terms if term[1] not in loops]
        if len(left) > 1 or any(by < 1 for by, _ in left):
            return None
        step, var = left[0] if left else (1, "")
        found.append(SlicedIndex(index.offset, looped, var, step))
    made = SlicedAccess(access.tensor, tuple(found))
    return made if len({*made.variables}) == len(made.variables) else None
