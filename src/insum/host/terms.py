"""Sums of several products, each by the way that suits it, added up:

Out[X[e],n] = V[e] * A[Y[e],n] + W[e] * B[Y[e],n]      two sparse matrices times dense ones
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from insum.graph.lower import live_terms
from insum.graph.value import meeting_dtype
from insum.host.arguments import HostCall
from insum.host.parts import sub_problem
from insum.host.places import Lowering
from insum.host.roles import cast, is_plain
from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm


@dataclass(frozen=True, slots=True, eq=False)
class SumOfWays:
    """The products of a sum, one after the other."""

    parts: tuple[Lowering, ...]
    dtype: torch.dtype
    name, slowness = "terms", 0

    @property
    def why(self) -> str:
        ways = dict.fromkeys(f"{part.name}: {part.why}" for part in self.parts)
        return f"each of {len(self.parts)} products by itself; {'; '.join(ways)}"

    def __call__(self, call: HostCall) -> Tensor:
        first, *others = self.parts
        total = first(call)
        for part in others:
            total.add_(part(call))
        return cast(total, self.dtype)


def terms_of(problem: Problem, way: Callable[[Problem], Lowering | None]) -> SumOfWays | None:
    """``way`` says how one product is run, None where no way is better than the graph. None where
    that is so of one of them: the graph reads what they share once.
    """
    terms = live_terms(problem)
    if len(terms) < 2 or not is_plain(problem):
        return None
    parts = [way(_alone(problem, term)) for term in terms]
    found = tuple(part for part in parts if part is not None)
    return SumOfWays(found, problem.dtype) if len(found) == len(parts) else None


def _alone(problem: Problem, term: ProductTerm) -> Problem:
    shape = tuple(int(n) for n in problem.shape)
    wide, target = meeting_dtype(problem), problem.statement.target
    return sub_problem(problem, target, [*term.factors], shape, wide, {}, {})
