"""Aligning: a factor of a matrix product whose rows are gathered again and again is copied first,
so that rows begin where widest loads may.

Rows of 100 halves begin at multiples of 8 bytes, and rows of 25 anywhere: they are read in twice as
many pieces as they have, or one number at a time, and each piece takes an instruction. The copy has
rows of a length that the code knows, with zeros behind their ends, so that tiles need no mask
there.

Everything here depends on the plan and on the class of sizes, never on values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from insum.lang.expr import Access, accesses, variables
from insum.plan.config import Config
from insum.plan.copying import HALF, is_apart, is_large_dot, reading_copy
from insum.plan.draft import Planned
from insum.plan.plan import Plan
from insum.plan.sizes import ALIGNED, WIDE_LOAD, Strides

#: How often a row is gathered, from which on a copy pays: it costs as much as two of them.
LEAST_GATHERS = 4
#: Columns of the result, up to which reading the rows is what takes the time.
MOST_COLUMNS = 256
#: Bytes of a number in half precision.
_BYTES = 2


@dataclass(frozen=True, slots=True)
class Alignment:
    """How one factor is copied.

    Attributes:
        place: of the factor, in the product.
        tensor: that it reads.
        var: that walks its rows.
        row: length of a row in the copy.
        tile: of which multiples are filled.
    """

    place: int
    tensor: str
    var: str
    row: int
    tile: int

    def reading(self, plan: Plan) -> Plan:
        """The plan, with the copy in the place of the factor."""
        read = plan.factors[self.place]
        assert isinstance(read, Access)
        copy, strides = Access(ALIGNED, read.indices), Strides((self.row, 1), (True,))
        why = f"{self.tensor} is copied first, in rows of {self.row}, which wide loads read"
        return reading_copy(plan, self.place, copy, strides, why)


def alignment_of(planned: Planned, config: Config) -> Alignment | None:
    """The factor that is copied, of a plan whose sides are as its config wants them; None where a
    copy does not pay.
    """
    plan = planned.plan
    if plan.operand not in HALF or not is_large_dot(planned):
        return None
    alone = [side[0] for side in (plan.roles.left, plan.roles.right) if len(side) == 1]
    found = (_aligned(planned, config, place) for place in alone)
    return next((one for one in found if one is not None), None)


def _aligned(planned: Planned, config: Config, place: int) -> Alignment | None:
    plan, sizes = planned.plan, planned.sizes
    read = plan.factors[place]
    if not isinstance(read, Access) or len(read.indices) != 2 or not is_apart(plan, read):
        return None
    gathered, var = read.indices[0], read.indices[1].var
    if var is None or not accesses(gathered) or var in variables(gathered):
        return None
    extent, tile = sizes.extents.get(var), _tile(plan, config, var)
    if extent is None or extent.open or var in sizes.runs or not tile:
        return None
    step, unit = dict(plan.strides)[read.tensor].units
    if unit != 1 or not -WIDE_LOAD < step * _BYTES < 0:
        return None
    row, rows = max(extent.most, tile), sizes.numel[read.tensor] // extent.typical
    gathers = math.prod(planned.extents[v] for v in variables(gathered))
    if gathers < LEAST_GATHERS * rows or not plan.wide and 2 * rows * row >= 2**31:
        return None
    if _columns(planned, read) > MOST_COLUMNS:
        return None
    return Alignment(place, read.tensor, var, row, tile)


def _columns(planned: Planned, read: Access) -> int:
    """Results that one row is multiplied for: the kept side that the factor does not read."""
    roles, own = planned.plan.roles, variables(read)
    return math.prod(planned.extents[v] for v in (*roles.m, *roles.n) if v not in own)


def _tile(plan: Plan, config: Config, var: str) -> int:
    """Of the axis that is this variable alone; 0: there is none."""
    roles = plan.roles
    axes = ((roles.k, config.k), (roles.n, config.n), (roles.m, config.m))
    return next((tile for axis, tile in axes if axis == (var,)), 0)
