"""Which side of a matrix product is M: matrix instructions want a long one, and loads through
indices are hidden better on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insum.lang.expr import accesses
from insum.plan.plan import Plan
from insum.plan.roles import Contraction
from insum.plan.sizes import power_of_two
from insum.plan.tiling import BYTES, HIGH, LARGE_SIDE, extent, is_large, walks_matrices


def swapped(roles: Contraction, extents: Mapping[str, int]) -> Contraction:
    """The same product with its sides exchanged where that puts the wide side on M, as `wgmma`
    wants.
    """
    m, n = extent(roles.m, extents), extent(roles.n, extents)
    return roles if not roles.dot or m >= 64 or n <= m else exchanged(roles)


def exchanged(roles: Contraction) -> Contraction:
    return replace(roles, m=roles.n, n=roles.m, left=roles.right, right=roles.left)


def oriented(
    plan: Plan, extents: Mapping[str, int], swap: int = -1, *, allowed: bool = True
) -> Plan:
    """The plan with the sides of its matrix product as a config wants them; -1 leaves it to the
    rule, where settings allow it.
    """
    if swap == 0 or not plan.roles.dot or swap < 0 and plan.onehot < 0 and not allowed:
        return plan
    if swap == 1 or _gathers_left(plan, extents) or _holds_short_side(plan, extents):
        return replace(plan, roles=exchanged(plan.roles))
    if _fills_high_tile(plan, extents):
        return plan
    return replace(plan, roles=swapped(plan.roles, extents))


def _fills_high_tile(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether entries of half precision are more than half as high as the least M of `wgmma`: tiles
    are padded to it on either side, and on N the wide side is read in longer rows.
    """
    high = extent(plan.roles.m, extents) > HIGH // 2
    return high and walks_matrices(plan) and BYTES.get(plan.operand, 4) == 2


def _gathers_left(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether, of two wide sides whose product is summed over the entries of rows, the left one
    alone is gathered: loads through indices are hidden better on the right.
    """
    if plan.segment is None or plan.segment.var not in plan.roles.k or plan.onehot >= 0:
        return False
    if min(extent(plan.roles.m, extents), extent(plan.roles.n, extents)) < 128:
        return False
    left, right = (
        [a for f in side for a in accesses(plan.factors[f]) if a.tensor in plan.index_tensors]
        for side in (plan.roles.left, plan.roles.right)
    )
    return bool(left) and not right


def _holds_short_side(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether the largest tile would hold all of the short side, were it on N: the long side is
    then read by one program alone.
    """
    m, n = (power_of_two(extent(axis, extents)) for axis in (plan.roles.m, plan.roles.n))
    return m == 2 * LARGE_SIDE < n and is_large(plan, extents)
