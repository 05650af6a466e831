"""Columns that a factor scales, multiplied by it before an index tensor picks rows of them:

    Out[X[e],m] = V[e] * In[Y[e],m] * w[m]
    S[y,m] = In[y,m] * w[m]                 a number for each of a row, once
    Out[X[e],m] = V[e] * S[Y[e],m]

What is left has a column of matrices where three tensors shared one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from insum.graph.lower import live_terms
from insum.graph.value import meeting_dtype
from insum.host.aggregated import LEAST_COLUMNS
from insum.host.arguments import HostCall
from insum.host.operations import lower_on_host
from insum.host.parts import SubProblem, sub_problem, tensor_kind
from insum.host.places import Lowering
from insum.host.roles import plain_variables
from insum.lang.bind import Problem
from insum.lang.expr import Access, Expr, fresh, index_of, names_of, variables


@dataclass(frozen=True, slots=True, eq=False)
class ScaledColumns:
    """A tensor and what scales it as ``scaled``; then the rest, by the way that suits it."""

    first: SubProblem
    rest: Lowering
    scaled: str
    name, slowness = "scaled", 0

    @property
    def why(self) -> str:
        return f"rows are scaled before they are picked; then {self.rest.name}: {self.rest.why}"

    def __call__(self, call: HostCall) -> Tensor:
        return self.rest(call.given(self.scaled, self.first(call.values)))


def scaled_of(problem: Problem, way: Callable[[Problem], Lowering]) -> ScaledColumns | None:
    """``way`` says how the rest is run. None where no factor of dense columns scales those of a
    tensor that has fewer numbers than are read of it.
    """
    (term,) = live_terms(problem)
    found = min(_pairs(problem, term.factors), default=None)
    if found is None:
        return None
    _, scale, at = found
    side, taken = term.factors[at], names_of(problem.statement)
    assert isinstance(side, Access)
    shape = tuple(int(n) for n in problem.kinds[side.tensor].shape)
    kind = tensor_kind(shape, meeting_dtype(problem))
    name = fresh("scaled", taken)
    along = [index.var or fresh("i", taken) for index in side.indices]
    every = tuple(map(index_of, along))
    whole, product = Access(side.tensor, every), Access(name, every)
    factors = [whole, term.factors[scale]]
    extents = dict(zip(along, shape, strict=True))
    first = sub_problem(problem, product, factors, shape, kind.dtype, {}, extents)
    rest = [f for k, f in enumerate(term.factors) if k not in (scale, at)]
    rest.insert(at - (scale < at), Access(name, side.indices))
    target, result = problem.statement.target, tuple(int(n) for n in problem.shape)
    second = sub_problem(problem, target, rest, result, problem.dtype, {name: kind}, {})
    return ScaledColumns(SubProblem(first, lower_on_host(first)), way(second), name)


def _pairs(problem: Problem, factors: Sequence[Expr]) -> Iterator[tuple[int, int, int]]:
    """Which factor scales which, and how many numbers are scaled."""
    points = prod(int(n) for n in problem.extents.values())
    holders: list[Expr] = [problem.statement.target, *factors]
    shared = Counter(v for holder in holders for v in {*variables(holder)})
    for k, scale in enumerate(factors):
        columns = {*plain_variables(scale)}
        width = prod(int(problem.extents[v]) for v in columns)
        if width < LEAST_COLUMNS or not any(shared[v] > 2 for v in columns):
            continue
        for j, side in enumerate(factors):
            if j != k and isinstance(side, Access) and columns <= _dense(problem, side):
                count = prod(int(n) for n in problem.kinds[side.tensor].shape)
                if count <= points:
                    yield count, k, j


def _dense(problem: Problem, side: Access) -> set[str]:
    """Variables along dimensions of a tensor of which an index tensor picks rows."""
    found = [(d, index.var) for d, index in enumerate(side.indices) if index.var is not None]
    names = [var for _, var in found]
    inner = {v for index in side.indices if index.var is None for v in variables(index)}
    whole = all(problem.size_of(side, d) == problem.extents[var] for d, var in found)
    return {*names} if whole and inner and len({*names}) == len(names) else set()
