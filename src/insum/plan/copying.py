"""Copying: what `fitting` and `aligning` share, which both copy a factor that is read again and
again.
"""

from __future__ import annotations

import math
from dataclasses import replace

from insum.lang.expr import Access, accesses, variables
from insum.plan.draft import Planned
from insum.plan.plan import Plan
from insum.plan.sizes import Strides

#: Points of a product that is worth one launch more.
LEAST_POINTS = 2**27
HALF = ("float16", "bfloat16")


def is_large_dot(planned: Planned) -> bool:
    """Whether a plan is a matrix product with points enough for a copy."""
    if not planned.plan.roles.dot or planned.sizes.general:
        return False
    return points(planned) >= LEAST_POINTS


def lies_along_sum(plan: Plan, read: Access) -> bool:
    """Whether what is neighbours in memory is neighbours in the sum. Hopper's matrix instructions
    take 32-bit operands from shared memory in this order alone.
    """
    strides = dict(plan.strides).get(read.tensor)
    units = () if strides is None else strides.units
    return any(i.var == plan.roles.k[-1] and unit == 1 for i, unit in zip(read.indices, units))


def points(planned: Planned) -> int:
    """Points of the product: rows of segments have their entries between them."""
    plan = planned.plan
    every = {v for f in plan.factors for v in variables(f)} | set(variables(plan.target))
    if plan.segment is not None:
        every.discard(plan.segment.row)
    return math.prod(planned.extents[v] for v in every)


def is_apart(plan: Plan, read: Access) -> bool:
    """Whether a factor reads a tensor that is read nowhere else, of which nothing is unchecked, and
    all of it in the right place.
    """
    exprs = (plan.target, *plan.factors)
    count = sum(a.tensor == read.tensor for e in exprs for a in accesses(e))
    inner = {a.tensor for i in read.indices for a in accesses(i)}
    unchecked = {tensor for tensor, _ in plan.guarded}
    return (
        count == 1
        and read.tensor not in plan.numbers
        and read.tensor not in dict(plan.views)
        and not unchecked & {read.tensor, *inner}
        and not inner & plan.wraps
        and plan.operand in ("", dict(plan.kinds)[read.tensor])
    )


def reading_copy(plan: Plan, place: int, copy: Access, strides: Strides, why: str) -> Plan:
    """The plan, with a copy in the place of a factor."""
    read = plan.factors[place]
    assert isinstance(read, Access)
    return replace(
        plan,
        factors=(*plan.factors[:place], copy, *plan.factors[place + 1 :]),
        kinds=(*plan.kinds, (copy.tensor, dict(plan.kinds)[read.tensor])),
        strides=(*plan.strides, (copy.tensor, strides)),
        why=(*plan.why, why),
    )
