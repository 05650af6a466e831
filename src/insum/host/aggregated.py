"""What index tensors sum, summed before it meets a factor that one of them picks:

    Out[X[e],m] = V[e] * In[Y[e],c] * W[Z[e],c,m]      a matrix for each relation Z
    H[X[e],Z[e],c] = V[e] * In[Y[e],c]                 a sum of rows
    Out[x,m] = H[x,z,c] * W[z,c,m]                     one product of matrices

instead of a product for each point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from insum.graph.contraction import WRITING
from insum.graph.lower import live_terms
from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall
from insum.host.operations import lower_on_host
from insum.host.parts import SubProblem, extent_of, is_finite, sub_problem, tensor_kind
from insum.host.places import Lowering
from insum.lang.bind import Problem
from insum.lang.expr import Access, Affine, Expr, fresh, index_of, names_of, variables


@dataclass(frozen=True, slots=True, eq=False)
class Aggregated:
    """The sums, by the way that suits them, and the product; or ``otherwise``."""

    first: Lowering
    second: SubProblem
    sums: str
    dtype: torch.dtype
    otherwise: Lowering
    name, slowness = "aggregated", 2
    why = "points that meet the same row of a factor are summed before they are multiplied by it"

    def __call__(self, call: HostCall) -> Tensor:
        found = self.second({**call.values, self.sums: self.first(call)})
        # Sums of no points are zeros, which must not meet what is not finite.
        return found if is_finite(found, self.dtype) else self.otherwise(call)


@dataclass(frozen=True, slots=True)
class _Picked:
    """A tensor of which an index tensor picks a row; the other dimensions are variables."""

    access: Access
    dim: int
    size: int
    vars: frozenset[str]

    @property
    def index(self) -> Affine:
        return self.access.indices[self.dim]

    def along(self, var: str) -> Access:
        """The tensor with a variable that runs along its rows instead."""
        indices = [*self.access.indices]
        indices[self.dim] = index_of(var)
        return Access(self.access.tensor, tuple(indices))


def aggregated_of(
    problem: Problem, way: Callable[[Problem], Lowering], otherwise: Callable[[], Lowering]
) -> Aggregated | None:
    """``way`` says how the sums are run, ``otherwise`` how this statement is without."""
    (term,) = live_terms(problem)
    target = _picked(problem, problem.statement.target)
    if target is None:
        return None
    for k, factor in enumerate(term.factors):
        rest = (*term.factors[:k], *term.factors[k + 1 :])
        side = _picked(problem, factor)
        if side is not None and side.index != target.index and _pays(problem, target, side, rest):
            return _aggregated(problem, target, side, rest, way, otherwise)
    return None


def _aggregated(
    problem: Problem,
    target: _Picked,
    factor: _Picked,
    rest: tuple[Expr, ...],
    way: Callable[[Problem], Lowering],
    otherwise: Callable[[], Lowering],
) -> Aggregated:
    taken = names_of(problem.statement)
    name, i, j = fresh("sums", taken), fresh("i", taken), fresh("j", taken)
    kept, wide = _kept(target, factor, rest), meeting_dtype(problem)
    shape = (target.size, factor.size, *(int(problem.extents[v]) for v in kept))
    inner = tuple(index_of(v) for v in kept)
    sums = Access(name, (target.index, factor.index, *inner))
    first = sub_problem(problem, sums, [*rest], shape, wide, {}, {})
    whole = Access(name, (index_of(i), index_of(j), *inner))
    second = sub_problem(
        problem,
        target.along(i),
        [whole, factor.along(j)],
        tuple(int(s) for s in problem.shape),
        problem.dtype,
        {name: tensor_kind(shape, wide)},
        {i: target.size, j: factor.size},
    )
    product = SubProblem(second, lower_on_host(second))
    return Aggregated(way(first), product, name, wide, otherwise())


def _picked(problem: Problem, holder: Expr) -> _Picked | None:
    if not isinstance(holder, Access):
        return None
    dims = [d for d, index in enumerate(holder.indices) if index.var is None]
    if len(dims) != 1 or not isinstance(holder.indices[dims[0]].atom, Access):
        return None
    rest = [(d, str(i.var)) for d, i in enumerate(holder.indices) if d != dims[0]]
    whole = all(int(problem.size_of(holder, d)) == problem.extents[v] for d, v in rest)
    vars = frozenset(v for _, v in rest)
    is_apart = len(vars) == len(rest) and vars.isdisjoint(variables(holder.indices[dims[0]]))
    if not whole or not is_apart:
        return None
    return _Picked(holder, dims[0], int(problem.size_of(holder, dims[0])), vars)


def _kept(target: _Picked, factor: _Picked, rest: Iterable[Expr]) -> list[str]:
    """Variables of the sums: those that the factor or the left side has, too."""
    found = dict.fromkeys(v for f in rest for v in variables(f))
    return [v for v in found if v in target.vars | factor.vars]


def _pays(problem: Problem, target: _Picked, factor: _Picked, rest: tuple[Expr, ...]) -> bool:
    """Whether sums and one product take less than a product of matrices for each point."""
    indices = {*variables(target.index), *variables(factor.index)}
    both, kept = target.vars | factor.vars, _kept(target, factor, rest)
    if not rest or indices & both:
        return False
    every = indices | {v for f in rest for v in variables(f)}
    points = extent_of(problem, every - both)
    width, own = extent_of(problem, kept), extent_of(problem, both - {*kept})
    of_matrices = extent_of(problem, {*kept} - (target.vars & factor.vars)) > 1 and own > 1
    if not of_matrices:
        return False
    pairs = target.size * factor.size
    if pairs > points:
        return False  # most sums would be of none, and take more room than the rows do
    alone = points * (width * own + WRITING * (width + own))
    return WRITING * points * width + pairs * width * (own + WRITING) < alone
