"""The order of gradients of a dense product, which the graph multiplies two factors at a time."""

from __future__ import annotations

import math

from insum.graph.contraction import Pair, saved_by_reversing
from insum.graph.value import best_order
from insum.lang.bind import Problem
from insum.lang.expr import Number, variables
from insum.plan.library import plain_variables

#: Points of a product from which gradients are worth statements of their own, and the share of
#: steps that is to be saved.
LEAST_REVERSED, CLEARLY_SAVED = 2**24, 0.2


def order_for_gradients(problem: Problem) -> tuple[Pair, ...]:
    """That of the product, where gradients are better off going the same way, back; nothing where
    they are not, or where factors are anything but three dense tensors and more.
    """
    (term,) = problem.terms
    factors = [f for f in term.factors if not isinstance(f, Number)]
    parts = (problem.statement.target, *factors)
    sizes = [n for n in problem.extents.values() if isinstance(n, int)]
    if len(factors) < 3 or any(plain_variables(part) is None for part in parts):
        return ()
    if len(sizes) < len(problem.extents) or math.prod(sizes) < LEAST_REVERSED:
        return ()
    kept, *own = map(variables, parts)
    pairs = best_order(problem, tuple(own), kept)
    saved = saved_by_reversing(own, kept, problem.extents, pairs)
    return pairs if saved >= CLEARLY_SAVED else ()
