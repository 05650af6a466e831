"""What index tensors sum, summed before it meets a factor that one of them picks:

    Out[X[e],m] = V[e] * In[Y[e],c] * W[Z[e],c,m]      a matrix for each relation Z
    H[X[e],Z[e],c] = V[e] * In[Y[e],c]                 a sum of rows
    Out[x,m] = H[x,z,c] * W[z,c,m]                     one product of matrices

instead of a product for each point. So are sums that a factor scales, which has variables of the
left side alone, and those of which the left side has no index:

    Out[X[e],m] = In[e,m] * w[m]           H[X[e],m] = In[e,m]     Out[x,m] = H[x,m] * w[m]
    Out[m] = In[e,m] * W[Z[e],m]           H[Z[e],m] = In[e,m]     Out[m] = H[z,m] * W[z,m]
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

#: Rows of fewer numbers are gathered, and scaled, as quickly as they are summed.
LEAST_COLUMNS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Aggregated:
    """The sums, by the way that suits them, and the product; or ``otherwise``."""

    first: Lowering
    second: SubProblem
    sums: str
    dtype: torch.dtype
    otherwise: Lowering
    name, slowness = "aggregated", 1
    why = "points that meet the same row of a factor are summed before they are multiplied by it"

    def __call__(self, call: HostCall) -> Tensor:
        found = self.second({**call.values, self.sums: self.first(call)})
        # Sums of no points are zeros, which must not meet what is not finite.
        return found if is_finite(found, self.dtype) else self.otherwise(call)


@dataclass(frozen=True, slots=True)
class _Picked:
    """A tensor of which an index tensor picks a row, or none does: there is one of that ``size``,
    and no ``dim``. The other dimensions are variables.
    """

    access: Access
    dim: int | None
    size: int
    vars: frozenset[str]

    @property
    def indices(self) -> tuple[Affine, ...]:
        return () if self.dim is None else (self.access.indices[self.dim],)

    def along(self, var: str) -> Access:
        """The tensor with a variable that runs along its rows instead."""
        indices = [*self.access.indices]
        if self.dim is not None:
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
        if side is not None and _is_apart(target, side) and _pays(problem, target, side, rest):
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
    picked = [(side, var) for side, var in ((target, i), (factor, j)) if side.indices]
    sizes = {var: side.size for side, var in picked}
    shape = (*sizes.values(), *(int(problem.extents[v]) for v in kept))
    inner = tuple(index_of(v) for v in kept)
    sums = Access(name, (*target.indices, *factor.indices, *inner))
    first = sub_problem(problem, sums, [*rest], shape, wide, {}, {})
    whole = Access(name, (*map(index_of, sizes), *inner))
    second = sub_problem(
        problem,
        target.along(i),
        [whole, factor.along(j)],
        tuple(int(s) for s in problem.shape),
        problem.dtype,
        {name: tensor_kind(shape, wide)},
        sizes,
    )
    product = SubProblem(second, lower_on_host(second))
    return Aggregated(way(first), product, name, wide, otherwise())


def _picked(problem: Problem, holder: Expr) -> _Picked | None:
    if not isinstance(holder, Access):
        return None
    dims = [d for d, index in enumerate(holder.indices) if index.var is None]
    if len(dims) > 1 or not all(isinstance(holder.indices[d].atom, Access) for d in dims):
        return None
    rest = [(d, str(i.var)) for d, i in enumerate(holder.indices) if d not in dims]
    whole = all(int(problem.size_of(holder, d)) == problem.extents[v] for d, v in rest)
    vars = frozenset(v for _, v in rest)
    own = {v for d in dims for v in variables(holder.indices[d])}
    if not whole or len(vars) < len(rest) or own & vars:
        return None
    dim = dims[0] if dims else None
    return _Picked(holder, dim, 1 if dim is None else int(problem.size_of(holder, dim)), vars)


def _is_apart(target: _Picked, factor: _Picked) -> bool:
    """Whether what is picked differs; a factor of which nothing is scales the left side."""
    if not factor.indices:
        return bool(target.indices) and factor.vars <= target.vars
    return target.indices != factor.indices


def _kept(target: _Picked, factor: _Picked, rest: Iterable[Expr]) -> list[str]:
    """Variables of the sums: those that the factor or the left side has, too."""
    found = dict.fromkeys(v for f in rest for v in variables(f))
    return [v for v in found if v in target.vars | factor.vars]


def _pays(problem: Problem, target: _Picked, factor: _Picked, rest: tuple[Expr, ...]) -> bool:
    """Whether sums and one product take less than a product of matrices for each point."""
    indices = {v for side in (target, factor) for i in side.indices for v in variables(i)}
    both, kept = target.vars | factor.vars, _kept(target, factor, rest)
    if not rest or indices & both:
        return False
    every = indices | {v for f in rest for v in variables(f)}
    points = extent_of(problem, every - both)
    width, own = extent_of(problem, kept), extent_of(problem, both - {*kept})
    if not (target.indices and factor.indices):
        wide = width >= LEAST_COLUMNS or bool(factor.indices) and width * own >= LEAST_COLUMNS
        return wide and target.size * factor.size <= points
    of_matrices = extent_of(problem, {*kept} - (target.vars & factor.vars)) > 1 and own > 1
    if not of_matrices:
        return False
    pairs = target.size * factor.size
    if pairs > points:
        return False  # most sums would be of none, and take more room than the rows do
    alone = points * (width * own + WRITING * (width + own))
    return WRITING * points * width + pairs * width * (own + WRITING) < alone
