"""What each variable of a product does for a CPU: *dense* ones run along two tensors and become the
columns of matrices; the others together are the *points*, each of which picks a row of every
tensor.

    C[AM[p],n] += AV[p,q] * B[AK[p,q],n]       n is dense in C and B; the points are (p, q)
    Out[x,m] += In[Nb[x,z],c] * W[z,c,m]       c is dense in In and W, m in Out and W; (x, z)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from insum.graph.lower import live_terms
from insum.graph.value import meeting_dtype
from insum.lang.bind import Problem, Value
from insum.lang.expr import Access, Expr, accesses, variables

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Side:
    """A tensor as matrices: which dimensions the points index, and which run along dense variables,
    in the order of ``columns``; ``is_matrix``: it is one as it is.
    """

    access: Access
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[tuple[str, int], ...]
    is_matrix: bool

    @property
    def count(self) -> int:
        """How many rows there are."""
        return prod(self.shape[d] for d in self.rows)

    def extent(self, names: tuple[str, ...]) -> int:
        return prod(self.shape[d] for name, d in self.columns if name in names)

    def matrices(self, tensor: Tensor, *groups: tuple[str, ...]) -> Tensor:
        """The tensor with its rows first and then one dimension for each group of variables."""
        if self.is_matrix and len(groups) == 1:
            return tensor
        if not self.columns and len(groups) == 1:
            return tensor.reshape(-1, 1)
        order = self.order(groups)
        if order != tuple(range(len(order))):
            tensor = tensor.permute(order)
        return tensor.reshape((self.count, *(self.extent(group) for group in groups)))

    def restored(self, matrices: Tensor, *groups: tuple[str, ...]) -> Tensor:
        """The reverse of `matrices`."""
        if self.is_matrix and len(groups) == 1:
            return matrices
        if not self.columns and len(groups) == 1:
            return matrices.view(self.shape)
        order = self.order(groups)
        whole = matrices.view([self.shape[d] for d in order])
        if order == tuple(range(len(order))):
            return whole
        return whole.permute(sorted(range(len(order)), key=order.__getitem__)).contiguous()

    def is_moved(self, *groups: tuple[str, ...]) -> bool:
        """Whether `matrices` makes a copy."""
        order = self.order(groups)
        return order != tuple(range(len(order)))

    def order(self, groups: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
        at = dict(self.columns)
        return (*self.rows, *[at[name] for group in groups for name in group])


@dataclass(frozen=True, slots=True)
class HostRoles:
    """A product of floating numbers, taken apart.

    Attributes:
        target: the left side.
        wide: factors with dense variables.
        narrow: the others, which scale.
        points: variables that are not dense, in the order in which points are counted.
        shared: dense variables of two sides, by the places of the sides (the target's is -1).
        dtype: in which contributions meet.
    """

    problem: Problem
    target: Side
    wide: tuple[Side, ...]
    narrow: tuple[Expr, ...]
    points: tuple[str, ...]
    shared: Mapping[tuple[int, int], tuple[str, ...]]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        """How many points there are, absent ones included."""
        return prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(self.problem.extents[v]) for v in self.points)

    def width(self, pair: tuple[int, int]) -> int:
        """The extent of what two sides share."""
        return prod(int(self.problem.extents[v]) for v in self.shared[pair])

    @property
    def key(self) -> tuple[object, ...]:
        """What decides, besides index values, which rows the points pick: dtypes do, by what is a
        side. One text: it is made once and knows its hash.
        """
        sides = [(str(side.access), side.shape) for side in self.sides]
        return (f"{self.problem.statement} {self.sizes} {sides}",)

    @property
    def sides(self) -> tuple[Side, ...]:
        return self.target, *self.wide


def roles_of(problem: Problem) -> HostRoles | None:
    """The roles of a statement that is one product of real floating numbers with an index tensor in
    it; None for others.
    """
    terms = live_terms(problem)
    if len(terms) != 1 or not is_plain(problem):
        return None
    (term,) = terms
    holders: list[Expr] = [problem.statement.target, *term.factors]
    dense = {v: pair for v in term.variables if (pair := _two_sides(problem, holders, v))}
    sides = {k: _side(problem, holders[k], dense) for pair in dense.values() for k in pair}
    narrow = tuple(f for k, f in enumerate(holders) if k > 0 and k not in sides)
    sides.setdefault(0, _side(problem, holders[0], dense))
    places = {k: n - 1 for n, k in enumerate(sorted(sides))}
    shared: dict[tuple[int, int], tuple[str, ...]] = {}
    for name, (a, b) in dense.items():
        pair = places[a], places[b]
        shared[pair] = (*shared.get(pair, ()), name)
    points = tuple(v for v in term.variables if v not in dense)
    return HostRoles(
        problem,
        sides[0],
        tuple(sides[k] for k in sorted(sides) if k),
        narrow,
        _in_order(problem, points, narrow),
        shared,
        meeting_dtype(problem),
    )


def one_column(roles: HostRoles) -> HostRoles | None:
    """A sum of numbers as one of rows of a single column: the first factor of which index tensors
    pick another number at every place is what rows are picked from; None where there is none, or
    nothing is summed.
    """
    left = roles.target.access
    if roles.wide or not left.indices or set(plain_variables(left)) == set(roles.points):
        return None
    kinds = roles.problem.kinds
    for k, factor in enumerate(roles.narrow):
        if not isinstance(factor, Access) or all(i.var is not None for i in factor.indices):
            continue
        picked = {v for i in factor.indices if i.var is None for v in variables(i)}
        if not picked.issuperset(i.var for i in factor.indices if i.var is not None):
            continue
        if factor.indices and kinds[factor.tensor].dtype in FLOATS:
            side = _side(roles.problem, factor, {})
            rest = (*roles.narrow[:k], *roles.narrow[k + 1 :])
            return replace(roles, wide=(side,), narrow=rest, shared={(-1, 0): ()})
    return None


def are_dense(sides: Iterable[Side]) -> bool:
    """Whether no index tensor picks rows of these: all pairs of them meet, as in a product of
    matrices.
    """
    return all(index.var is not None for side in sides for index in side.access.indices)


def is_plain(problem: Problem) -> bool:
    """One statement of real floats on the CPU that sums, and in which some index is a tensor."""
    indices = [a.tensor for _, _, i in problem.index_uses() for a in accesses(i)]
    return (
        problem.statement.operator in ("=", "+=")
        and problem.device.type == "cpu"
        and problem.dtype in FLOATS
        and bool(indices)
        and all(problem.kinds[name].device is not None for name in indices)
        and not problem.target_read
        and meeting_dtype(problem) in (torch.float32, torch.float64)
        and all(isinstance(s, int) for s in problem.extents.values())
    )


def _two_sides(problem: Problem, holders: list[Expr], var: str) -> tuple[int, int] | None:
    """The two sides of which the variable is a dimension, where it stands nowhere else."""
    found = [k for k, holder in enumerate(holders) if var in variables(holder)]
    if len(found) != 2 or not all(_runs_along(problem, holders[k], var) for k in found):
        return None
    return found[0], found[1]


def _runs_along(problem: Problem, holder: Expr, var: str) -> bool:
    if not isinstance(holder, Access):
        return False
    mentions = [d for d, index in enumerate(holder.indices) if var in variables(index)]
    if len(mentions) != 1 or holder.indices[mentions[0]].var != var:
        return False
    if problem.size_of(holder, mentions[0]) != problem.extents[var]:
        return False
    is_target = holder is problem.statement.target
    return is_target or problem.kinds[holder.tensor].dtype in FLOATS


def _side(problem: Problem, holder: Expr, dense: Mapping[str, object]) -> Side:
    assert isinstance(holder, Access)
    is_target = holder is problem.statement.target
    shape = problem.shape if is_target else problem.kinds[holder.tensor].shape
    columns = [(i.var, d) for d, i in enumerate(holder.indices) if i.var in dense]
    taken = {d for _, d in columns}
    rows = tuple(d for d in range(len(shape)) if d not in taken)
    return Side(
        holder,
        tuple(int(s) for s in shape),
        rows,
        tuple((str(name), d) for name, d in columns),
        rows == (0,) and len(columns) == 1 and len(shape) == 2,
    )


def _in_order(
    problem: Problem, points: tuple[str, ...], narrow: tuple[Expr, ...]
) -> tuple[str, ...]:
    """Points in the order of what scales them, so that this need not be copied; else in that of the
    largest index tensor.
    """
    every = [plain_variables(a) for a in (*narrow, *_index_accesses(problem))]
    found = max(every, key=lambda vs: len(set(vs) & set(points)), default=())
    first = [v for v in dict.fromkeys(found) if v in points]
    return (*first, *(v for v in points if v not in first))


def _index_accesses(problem: Problem) -> Iterator[Access]:
    for _, _, index in problem.index_uses():
        yield from accesses(index)


def plain_variables(node: Expr) -> tuple[str, ...]:
    """The variables of an access whose dimensions are one variable each; else nothing."""
    if not isinstance(node, Access) or any(i.var is None for i in node.indices):
        return ()
    return tuple(str(i.var) for i in node.indices)


def as_tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """torch takes a while to find that there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)
