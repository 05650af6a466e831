"""The graph, a part of one variable at a time: what is gathered stays in cache, and nothing of the
size of all points is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from insum.graph.contraction import cheapest
from insum.graph.lower import Lowered, live_terms
from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall
from insum.host.operations import lower_on_host
from insum.host.roles import as_tensor
from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
from insum.lang.expr import Access, Call, Expr, Product, Sum, accesses, variables

#: Bytes of the largest intermediate that are made at a time; and multiplications of a number of it
#: from which on it does not matter that it leaves the cache, measured.
AT_ONCE, LEAST_REUSE = 1 << 20, 8
#: How many times less may be made again for every part.
PARTS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The same statement over ``step`` places of ``var`` after the other. ``dims`` are the
    dimensions of tensors along which it runs; ``along`` is that of the output, -1 where it is
    summed.
    """

    problem: Problem
    graph: Lowered
    var: str
    step: int
    dims: Mapping[str, int]
    along: int
    name, slowness = "chunks", 0

    @property
    def why(self) -> str:
        return f"{self.step} of {self.var} at a time, so that what is gathered stays in cache"

    def __call__(self, call: HostCall) -> Tensor:
        problem, values = self.problem, dict(call.indices())
        made = torch.zeros if self.graph.mode == "into" else torch.empty
        out = made(problem.shape, dtype=meeting_dtype(problem))
        whole = {name: as_tensor(values[name]) for name in self.dims}
        extent = int(problem.extents[self.var])
        for start in range(0, extent, self.step):
            length = min(self.step, extent - start)
            for name, dim in self.dims.items():
                values[name] = whole[name].narrow(dim, start, length)
            into = out if self.along < 0 else out.narrow(self.along, start, length)
            part = _shortened(problem, self.var, length, into)
            if self.graph.mode == "into":
                self.graph(part, values, into)
            else:
                into.copy_(self.graph(part, values))
        return out.to(problem.dtype)


def _shortened(problem: Problem, var: str, length: int, into: Tensor) -> Problem:
    return replace(problem, extents={**problem.extents, var: length}, shape=tuple(into.shape))


def chunks_of(problem: Problem) -> Chunks | None:
    terms = live_terms(problem)
    if len(terms) != 1 or is_dense(problem) and _is_selection(terms[0]):
        return None
    if wants_same_bits(problem.statement.value):
        return None
    extents = {v: int(n) for v, n in problem.extents.items()}
    largest, wide = _largest(problem), meeting_dtype(problem)
    nbytes = wide.itemsize * _volume(largest, extents)
    if nbytes <= 2 * AT_ONCE or _is_of_products(problem, nbytes):
        return None
    for var in sorted(largest, key=lambda v: (adds_up_much(problem, v), -extents[v])):
        found = dims_of(problem, var)
        if found is not None and extents[var] > 1:
            dims, along = found
            step = max(1, extents[var] * AT_ONCE // nbytes)
            mode = "new" if along >= 0 and is_dense(problem) else "into"
            graph = lower_on_host(replace(problem, dtype=wide), mode)
            return Chunks(problem, graph, var, step, dims, along)
    return None


def wants_same_bits(value: Expr, compared: bool = False) -> bool:
    """Whether a function is compared for equality, as gradients of a maximum do with the result.
    Torch computes the last numbers of a tensor by other means than the rest, and rounds otherwise:
    of a part these are others.

    >>> from insum.lang.parser import parse
    >>> of = lambda text: wants_same_bits(parse(f"y[i] = {text}").value)
    >>> of("x[i] * (exp(x[i]) == z[i])"), of("exp(x[i]) * (x[i] == z[i])")
    (True, False)
    """
    match value:
        case Call("eq", parts):
            return any(wants_same_bits(part, compared=True) for part in parts)
        case Call(_, parts):
            return compared or any(wants_same_bits(part) for part in parts)
        case Product(parts) | Sum(parts):
            return any(wants_same_bits(part, compared) for part in parts)
        case _:
            return False


def _is_selection(term: ProductTerm) -> bool:
    """Whether a tensor is read and nothing else is done: there is nothing on the way."""
    return len(term.factors) == 1 and isinstance(term.factors[0], Access)


def most_at_once(problem: Problem) -> int:
    """Bytes of the largest intermediate of the graph."""
    extents = {v: int(n) for v, n in problem.extents.items()}
    return meeting_dtype(problem).itemsize * _volume(_largest(problem), extents)


def adds_up_much(problem: Problem, var: str) -> bool:
    """Whether every part of a variable would be added to more than a part is itself."""
    if not is_dense(problem) or any(i.var == var for i in problem.statement.target.indices):
        return False
    return meeting_dtype(problem).itemsize * prod(int(n) for n in problem.shape) > AT_ONCE


def runs_through(problem: Problem, var: str) -> bool:
    """Whether a variable runs through all that the graph makes on its way, but for what is so small
    that it may be made again for every part.
    """
    extents, wide = {v: int(n) for v, n in problem.extents.items()}, meeting_dtype(problem)
    every = [vs for term in live_terms(problem) for vs in _intermediates(problem, term)]
    return all(var in vs or PARTS * wide.itemsize * _volume(vs, extents) <= AT_ONCE for vs in every)


def _largest(problem: Problem) -> frozenset[str]:
    """The variables of the largest intermediate."""
    every = [vs for term in live_terms(problem) for vs in _intermediates(problem, term)]
    extents = {v: int(n) for v, n in problem.extents.items()}
    return max(every, key=lambda vs: _volume(vs, extents), default=frozenset())


def _is_of_products(problem: Problem, nbytes: int) -> bool:
    """Whether an intermediate is no more than what is read anyway, and is multiplied as a matrix:
    one product of all of it takes less than many of parts.
    """
    extents = {v: int(n) for v, n in problem.extents.items()}
    kinds = problem.kinds.values()
    given = max((prod(map(int, k.shape)) * k.dtype.itemsize for k in kinds), default=0)
    points = meeting_dtype(problem).itemsize * prod(extents.values())
    return nbytes <= given and points >= LEAST_REUSE * nbytes


def is_dense(problem: Problem) -> bool:
    """Whether each element of the output is written once."""
    vars = [index.var for index in problem.statement.target.indices]
    return None not in vars and len(set(vars)) == len(vars)


def _volume(vars: frozenset[str], extents: Mapping[str, int]) -> int:
    return prod(extents[v] for v in vars)


def _intermediates(problem: Problem, term: ProductTerm) -> list[frozenset[str]]:
    """The variables of everything that the graph makes on its way and nobody asked for."""
    factors = [variables(f) for f in term.factors if variables(f)]
    found = [
        frozenset(variables(a))
        for f in term.factors
        for a in accesses(f, nested=False)
        if any(i.var is None and i.terms for i in a.indices)
    ]
    kept = frozenset(variables(problem.statement.target))
    if any(True for i in problem.statement.target.indices for _ in accesses(i)):
        found.append(kept)
    if len(factors) > 2:
        found.append(cheapest(factors, tuple(kept), problem.extents).largest)
    return found


def dims_of(problem: Problem, var: str) -> tuple[dict[str, int], int] | None:
    """The dimension of each tensor along which a variable runs, and of the output; None where it
    is anything else than a dimension of its own.
    """
    target = problem.statement.target
    places: dict[str, set[int]] = {}
    reads = [a for term in live_terms(problem) for f in term.factors for a in accesses(f)]
    for access in (*reads, *(a for i in target.indices for a in accesses(i))):
        places.setdefault(access.tensor, set()).add(_dim(access, var))
    places_of_target = _dim(target, var)
    if places_of_target == _TANGLED or any(len(p) > 1 or _TANGLED in p for p in places.values()):
        return None
    return {n: d for n, (d,) in places.items() if d >= 0}, places_of_target


#: Not a dimension of the access; and in it otherwise than as one whole dimension.
_NONE, _TANGLED = -1, -2


def _dim(access: Access, var: str) -> int:
    outside = [d for d, index in enumerate(access.indices) if index.var == var]
    mixed = any(
        index.var != var and var in (a.name for _, a in index.terms if not isinstance(a, Access))
        for index in access.indices
    )
    if mixed or len(outside) > 1:
        return _TANGLED
    return outside[0] if outside else _NONE
