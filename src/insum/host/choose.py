"""Which way a CPU goes for a statement: the first of a few that suits it. Statement and sizes alone
decide; what is made of index values is kept with the index tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from insum.graph.value import meeting_dtype
from insum.host.aggregated import aggregated_of
from insum.host.arguments import HostCall
from insum.host.bands import bands_of
from insum.host.block_rows import block_rows_of
from insum.host.blocks import blocks_of
from insum.host.by_row import by_row_of
from insum.host.chunks import chunks_of
from insum.host.convolution_roles import convolution_of
from insum.host.diagonals import diagonals_of
from insum.host.dots import dots_of
from insum.host.operations import lower_on_host
from insum.host.parts import SubProblem
from insum.host.patterns import patterns_of
from insum.host.places import Lowering
from insum.host.roles import FLOATS, HostRoles, roles_of
from insum.host.rows import rows_of
from insum.host.runs import runs_of
from insum.host.scaled import scaled_of
from insum.host.slices import slices_of
from insum.host.terms import terms_of
from insum.lang.bind import Problem

#: Measured. Fewer points than this are done before anything is looked up; fewer than this before
#: anything is noted about an index tensor of which nothing is known; and fewer than this before
#: anything is made of index tensors that may never come back.
LEAST_WORK, LEAST_NEW_WORK, LEAST_FIRST_WORK = 1 << 11, 1 << 14, 1 << 18
#: Multiplications of a point below which that holds however many points there are: making something
#: of an index takes as long as gathering some numbers by it and summing them, measured.
LEAST_OF_A_POINT = 16
#: How many times more points there may be than any tensor has elements: more are no sparse matrix,
#: but a dense product in disguise.
MOST_PER_ELEMENT = 4


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """The graph, at once."""

    part: SubProblem
    name, slowness = "graph", 0
    why = ""

    def __call__(self, call: HostCall) -> Tensor:
        return self.part(call.indices())


def waits(problem: Problem, indices: Iterable[str]) -> bool:
    """Whether this is one graph until index tensors come back: what is made of them takes longer
    than the graph, and so does finding out how.
    """
    kinds = [problem.kinds[name] for name in indices]
    work = _work(problem)
    if not kinds or any(kind.device is None for kind in kinds) or work < LEAST_WORK:
        return False
    if work < LEAST_FIRST_WORK:
        return True
    points = max(prod(int(n) for n in kind.shape) for kind in kinds)
    roles = roles_of(problem)
    if roles is not None and roles.wide:
        points = roles.count  # an entry of a sparse matrix for each
    return work < LEAST_OF_A_POINT * points


def is_little(problem: Problem) -> bool:
    """Whether this takes no longer than noting something about index tensors. Where the same bits
    are wanted each time, it must not matter whether something was.
    """
    wanted = torch.are_deterministic_algorithms_enabled()
    return _work(problem) < LEAST_NEW_WORK and not wanted


def _work(problem: Problem) -> int:
    return prod(int(n) for n in problem.extents.values())


def choose(problem: Problem, *, new: bool = True) -> Lowering | None:
    """How a CPU runs this problem; None: as one graph. ``new``: the result is a new tensor, not
    something to be added to another, which is then not rounded.
    """
    work = _work(problem)
    if work < LEAST_WORK or not new and 2 * work < prod(int(n) for n in problem.shape):
        return None
    if not new and problem.dtype in FLOATS:
        problem = replace(problem, dtype=meeting_dtype(problem))
    rules = diagonals_of, bands_of, convolution_of, slices_of
    windows = (rule(problem) for rule in rules)
    found = next((one for one in windows if one is not None), None)
    if found is not None:
        return found
    roles = roles_of(problem)
    if roles is None:
        return terms_of(problem, _as_matrices) or by_row_of(problem)  # sums of several products
    return patterns_of(problem, _whole, lambda: _plainly(problem)) or _without_pattern(problem)


def _plainly(problem: Problem) -> Lowering:
    return _without_pattern(problem) or _whole(problem)


def _without_pattern(problem: Problem) -> Lowering | None:
    """Of several statements each is run as suits it."""
    return _as_matrices(problem) or _in_parts(problem)


def _as_matrices(problem: Problem) -> Lowering | None:
    """As products of matrices, where that is a way."""
    roles = roles_of(problem)
    if roles is None:
        return None
    found = scaled_of(problem, _plainly) or aggregated_of(
        problem, _plainly, lambda: _in_one(problem)
    )
    return found or _by_rules(roles)


def _in_one(problem: Problem) -> Lowering:
    roles = roles_of(problem)
    return (roles and _by_rules(roles)) or _whole(problem)


def _by_rules(roles: HostRoles) -> Lowering | None:
    """Sums of rows, scalar products, runs of a matrix and blocks are products of matrices; anything
    else is summed by row, or done a part at a time.
    """
    rules: tuple[Callable[[HostRoles], Lowering | None], ...] = (
        rows_of,
        dots_of,
        runs_of,
        block_rows_of,
        blocks_of,
    )
    found = (rule(roles) for rule in rules if _is_sparse(roles))
    return next((one for one in found if one is not None), None)


def _in_parts(problem: Problem) -> Lowering | None:
    return by_row_of(problem) or chunks_of(problem)


def _whole(problem: Problem) -> Lowering:
    return _in_parts(problem) or Whole(SubProblem(problem, lower_on_host(problem)))


def _is_sparse(roles: HostRoles) -> bool:
    elements = [prod(int(s) for s in kind.shape) for kind in roles.problem.kinds.values()]
    return roles.count <= MOST_PER_ELEMENT * max(elements)
