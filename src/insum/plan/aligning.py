"""Aligning: a factor whose rows are read again and again is copied first, so that rows begin
where widest loads may.

Rows of 100 halves begin at multiples of 8 bytes, and rows of 25 anywhere: they are read in twice as
many pieces as they have, or one number at a time, and each piece takes an instruction. The copy has
rows of a length that the code knows, with zeros behind their ends: tiles of a product of matrices
need no mask there, and sums of rows one that ends with a load.

Everything here depends on the plan and on the class of sizes, never on values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from insum.lang.expr import Access, Expr, accesses, variables
from insum.plan.config import Config
from insum.plan.copying import HALF, is_apart, is_large_dot, points, reading_copy
from insum.plan.draft import Planned
from insum.plan.plan import Plan
from insum.plan.sizes import ALIGNED, ALSO_ALIGNED, WIDE_LOAD, Extent, Strides
from insum.plan.tiling import BYTES, extent, in_rows

#: How often a number is read, from which on a copy pays: it costs as much as two of them.
LEAST_READS = 4
#: Columns of the result, up to which reading the rows is what takes the time.
MOST_COLUMNS = 256
#: Numbers that are read of a factor, from which on a copy pays; and that sums of rows gather, and
#: those of a row.
LEAST_READ, LEAST_GATHERED, LEAST_ROW = 2**22, 2**23, 16
#: Numbers of a copy.
MOST_COPIED = 2**26


@dataclass(frozen=True, slots=True)
class Alignment:
    """How one factor is copied.

    Attributes:
        place: of the factor, in the product.
        tensor: that it reads.
        var: that walks its rows.
        row: length of a row in the copy.
        middle: rows of a matrix of the copy, where the tensor has several matrices; else 1.
        tile: of which multiples are filled.
        name: of the copy.
    """

    place: int
    tensor: str
    var: str
    row: int
    middle: int
    tile: int
    name: str = ALIGNED

    def reading(self, plan: Plan) -> Plan:
        """The plan, with the copy in the place of the factor."""
        read = plan.factors[self.place]
        assert isinstance(read, Access)
        outer = (self.middle * self.row, self.row)[-len(read.indices) + 1 :]
        copy = Access(self.name, read.indices)
        strides = Strides((*outer, 1), (True,) * len(outer))
        why = f"{self.tensor} is copied first, in rows of {self.row}, which wide loads read"
        return reading_copy(plan, self.place, copy, strides, why)


def aligned_operands(
    planned: Planned, config: Config, *, fitted: int | None = None
) -> list[Alignment]:
    """Factors of a product of matrices that are copied, of a plan whose sides are as its config
    wants them, filled to the ends of its tiles. ``fitted``: the place of one that is copied anyway.
    """
    plan = planned.plan
    if plan.operand not in (*HALF, "float32") or not is_large_dot(planned):
        return []
    names = iter((ALIGNED, ALSO_ALIGNED))
    sides = ((plan.roles.left, config.n, plan.roles.n), (plan.roles.right, config.m, plan.roles.m))
    return [
        replace(one, name=next(names))
        for places, opposite, axis in sides
        if len(places) == 1 and places[0] != fitted
        for one in _aligned_operand(planned, config, places[0], min(opposite, _most(planned, axis)))
    ]


def _aligned_operand(
    planned: Planned, config: Config, place: int, opposite: int
) -> Iterator[Alignment]:
    """``opposite``: for how many places of a tile a number is read once."""
    rows, half = _uneven_rows(planned, place), planned.plan.operand in HALF
    if rows is None or points(planned) < opposite * max(LEAST_READ, LEAST_READS * rows.numbers):
        return
    if rows.step > 1 and not (half and rows.gathered):  # in pieces
        return
    tile = _tile(planned.plan, config, rows.var)
    if tile and _columns(planned, rows.read) <= MOST_COLUMNS:
        yield rows.aligned(place, tile)


def sides_by_numbers(planned: Planned, config: Config, copied: Collection[int]) -> int:
    """How long the sides of a tile are whose operand is read one number at a time; ``copied``:
    places of factors that are copied first.
    """
    plan = planned.plan
    sides = ((plan.roles.left, config.m), (plan.roles.right, config.n))
    return sum(
        tile
        for places, tile in sides
        if any(p not in copied and _is_read_by_numbers(plan, plan.factors[p]) for p in places)
    )


def _is_read_by_numbers(plan: Plan, factor: Expr) -> bool:
    strides = dict(plan.strides)
    return any(
        math.gcd(*strides[read.tensor].units[:-1]) == 1 and strides[read.tensor].units[-1] == 1
        for read in accesses(factor, nested=False)
        if len(read.indices) > 1 and read.tensor in strides
    )


def aligned_rows(planned: Planned) -> Alignment | None:
    """The factor that is copied of sums of rows, filled to the ends of loads: rows that are read
    number by number, so many that a copy is little beside them.
    """
    plan = planned.plan
    if not in_rows(plan):
        return None
    for place in range(len(plan.factors)):
        rows = _uneven_rows(planned, place)
        if rows is None or rows.step > 1 or plan.roles.n != (rows.var,) or rows.middle > 1:
            continue
        gathered = math.prod(planned.extents[v] for v in variables(rows.read))
        long = planned.extents[rows.var] >= LEAST_ROW and gathered >= LEAST_GATHERED
        if long and gathered >= LEAST_READS * rows.numbers:
            return rows.aligned(place, rows.wide)
    return None


@dataclass(frozen=True, slots=True)
class _UnevenRows:
    """A factor whose rows begin where no widest load may.

    Attributes:
        read: the factor.
        var: that walks its rows.
        most: how long they may be.
        middle: how many of a matrix there may be.
        numbers: of all of it.
        step: what the distance of rows is a multiple of, in numbers.
        wide: numbers of the widest load.
    """

    read: Access
    var: str
    most: int
    middle: int
    numbers: int
    step: int
    wide: int

    @property
    def gathered(self) -> bool:
        """Whether an index tensor finds each row."""
        return any(True for index in self.read.indices[-2:] for _ in accesses(index))

    def aligned(self, place: int, tile: int) -> Alignment:
        row = max(self.most, tile)
        return Alignment(place, self.read.tensor, self.var, row, self.middle, tile)


def _uneven_rows(planned: Planned, place: int) -> _UnevenRows | None:
    plan, sizes = planned.plan, planned.sizes
    read = plan.factors[place]
    if not isinstance(read, Access) or not 2 <= len(read.indices) <= 3 or sizes.general:
        return None
    *outer, var = (index.var for index in read.indices)
    kind, units = dict(plan.kinds)[read.tensor], dict(plan.strides)[read.tensor].units
    if not is_apart(plan, read) or var is None or BYTES.get(kind, 8) > 4:
        return None
    inside = (v for index in read.indices[:-1] for v in variables(index))
    row, middle = sizes.extents.get(var), _middle(planned, outer)
    if row is None or middle is None or not _is_bounded(planned, var) or var in inside:
        return None
    wide, step = WIDE_LOAD // BYTES[kind], math.gcd(*(abs(unit) for unit in units[:-1]))
    typical = max(row.typical * middle.typical, 1)  # there may be no columns
    copied = sizes.numel[read.tensor] // typical * row.most * middle.most
    if units[-1] != 1 or max(units[:-1]) >= 0 or step % wide == 0 or copied > MOST_COPIED:
        return None
    return _UnevenRows(read, var, row.most, middle.most, sizes.numel[read.tensor], step, wide)


def _middle(planned: Planned, outer: list[str | None]) -> Extent | None:
    """Of rows in a matrix; one where there are no matrices."""
    if len(outer) == 1:
        return Extent(1, 1)
    var = outer[1]
    return planned.sizes.extents[var] if var is not None and _is_bounded(planned, var) else None


def _is_bounded(planned: Planned, var: str) -> bool:
    found = planned.sizes.extents.get(var)
    return found is not None and not found.open and var not in planned.sizes.runs


def _most(planned: Planned, axis: tuple[str, ...]) -> int:
    return extent(axis, planned.extents) if axis else 1


def _columns(planned: Planned, read: Access) -> int:
    """Results that one row is multiplied for: the kept side that the factor does not read."""
    roles, own = planned.plan.roles, variables(read)
    return math.prod(planned.extents[v] for v in (*roles.m, *roles.n) if v not in own)


def _tile(plan: Plan, config: Config, var: str) -> int:
    """Of the axis that is this variable alone; 0: there is none."""
    roles = plan.roles
    axes = ((roles.k, config.k), (roles.n, config.n), (roles.m, config.m))
    return next((tile for axis, tile in axes if axis == (var,)), 0)
