"""The values of points as they come, and then their sums by row: points lie in the order of what is
read with them, which may be the longest of all, and are summed in the order of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from insum.graph.lower import Lowered, live_terms
from insum.graph.value import meeting_dtype
from insum.host import chunks
from insum.host.arguments import HostCall
from insum.host.operations import lower_on_host
from insum.host.places import RowSegments, segments
from insum.host.roles import as_tensor, cast, is_plain, plain_variables
from insum.host.rows import sum_of_rows
from insum.lang.bind import Problem
from insum.lang.expand import expand
from insum.lang.expr import Access, Statement, fresh, index_of, names_of

#: Columns below which torch adds one number after the other as quickly, measured.
LEAST_WIDTH = 4
#: How many times more than a part of the graph (`chunks.AT_ONCE`) there may be at once: sums take
#: several times as long in any other order.
MOST_PARTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class ByRow:
    """``Out[r(p),n] += value(p,n)`` for any value, of which ``values`` is the statement; ``at`` is
    the indexed dimension of the output.
    """

    problem: Problem
    values: Problem
    graph: Lowered
    index: Access
    at: int
    key: tuple[object, ...]
    name, slowness = "by row", 0

    @property
    def why(self) -> str:
        return f"values of all points, summed in the order of {self.index.tensor} (kept with it)"

    def __call__(self, call: HostCall) -> Tensor:
        found = call.kept(self.key, lambda: self.made(call), self.index.tensor)
        values = self.graph(self.values, call.indices())
        sums = sum_of_rows(found, None, values.flatten(1))
        result = sums.view(-1, *values.shape[1:]).movedim(0, self.at)
        return cast(result, self.problem.dtype).contiguous()

    def made(self, call: HostCall) -> RowSegments:
        rows = as_tensor(call.indices()[self.index.tensor]).long()
        points = torch.arange(len(rows))
        if self.index.tensor in self.problem.padded:
            points = (rows != -1).nonzero()[:, 0]
            rows = rows.index_select(0, points)
        return segments(rows, int(self.problem.shape[self.at]), points, None)


def by_row_of(problem: Problem) -> ByRow | None:
    """Where one dimension of the output is indexed by a tensor along one variable, and the others
    are other variables.
    """
    target = problem.statement.target
    indexed = [d for d, index in enumerate(target.indices) if index.var is None]
    if len(indexed) != 1 or not is_plain(problem) or len(live_terms(problem)) < len(problem.terms):
        return None
    (at,) = indexed
    index = target.indices[at].atom
    rest = [str(i.var) for i in target.indices if i.var is not None]
    if not isinstance(index, Access) or len(plain_variables(index)) != 1:
        return None
    order = (*plain_variables(index), *rest)
    values = _values(problem, order)
    width = prod(int(s) for s in values.shape[1:])
    few = chunks.most_at_once(problem) <= MOST_PARTS * chunks.AT_ONCE
    if width < LEAST_WIDTH or not few or len(set(order)) < len(order):
        return None
    if at > 0 and int(problem.shape[at]) > int(problem.extents[order[0]]):
        return None  # most rows are empty, and all of them would be moved to their places
    if at > 0 and isinstance(problem.statement.value, Access):
        return None  # so would be what is read: torch adds up along any dimension
    key = "by row", int(problem.shape[at]), index.tensor in problem.padded
    return ByRow(problem, values, lower_on_host(values), index, at, key)


def _values(problem: Problem, order: tuple[str, ...]) -> Problem:
    """The statement of the values alone, one for each point and column."""
    name = fresh("values", names_of(problem.statement))
    target = Access(name, tuple(index_of(v) for v in order))
    statement = Statement(target, "=", problem.statement.value)
    return replace(
        problem,
        statement=statement,
        terms=expand(statement),
        shape=tuple(int(problem.extents[v]) for v in order),
        dtype=meeting_dtype(problem),
    )
