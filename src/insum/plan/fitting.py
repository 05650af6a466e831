"""Fitting: a small factor of a matrix product that is read again and again is copied first, so that
it fills whole tiles.

Tiles walk rows of such a factor. Rows that do not begin at whole sectors of memory are read in more
pieces than they have, by every program anew; and where a tile reaches past the last row, each load
of it needs a mask, and each mask registers. A copy has rows that begin at whole sectors, with zeros
where the sum ends: it is read without masks. How long its rows are is passed, so that networks of
many widths share kernels.

32-bit factors are turned, too: matrix instructions read them along the sum, and what lies across it
reaches them number by number. A copy has its rows along the sum.

Everything here depends on the plan and on the class of sizes, never on values.
"""

from __future__ import annotations

from dataclasses import dataclass

from insum.lang.expr import Access, Affine
from insum.plan.config import Config
from insum.plan.copying import (
    HALF,
    is_apart,
    is_large_dot,
    lies_along_sum,
    points,
    reading_copy,
)
from insum.plan.draft import Planned
from insum.plan.plan import Plan
from insum.plan.sizes import FEW, FITTED, Extent, Strides
from insum.plan.tiling import LARGE_SIDE, inner_extent

#: Programs that read each number, from which on a copy pays; and where it is turned.
LEAST_READS, LEAST_TURNED = 64, 8
#: Numbers of a factor that is small.
MOST_NUMBERS = 2**22
#: Numbers of a tile whose masks, where the sum ends, take longer than a copy.
LEAST_MASKED = 64 * 128
#: Numbers of half precision in a sector of memory, at whose multiples rows begin.
SECTOR = 16
#: In which lengths of rows are passed, and the least of them.
UNIT = 16
#: The rows of a matrix of the copy, and their length in units.
FITTED_ROWS, FITTED_ROW = "fitted_rows", "fitted_row"


@dataclass(frozen=True, slots=True)
class Fit:
    """How one factor is copied.

    Attributes:
        place: of the factor, in the product.
        tensor: that it reads.
        dims: dimensions of the tensor in the order of the copy: one that selects a matrix, where
            there are several, and the two of the tile.
        sides: lengths of these two in the copy.
        ends: which multiples of their extents are filled; None: all.
    """

    place: int
    tensor: str
    dims: tuple[int, ...]
    sides: tuple[int, int]
    ends: tuple[int | None, int | None]

    @property
    def counts(self) -> dict[str, int]:
        """What is passed of the copy, to what fills it and to what reads it."""
        rows, row = self.sides
        assert row % UNIT == 0, row
        return {FITTED_ROWS: rows, FITTED_ROW: row // UNIT}

    def reading(self, plan: Plan) -> Plan:
        """The plan, with the copy in the place of the factor."""
        read = plan.factors[self.place]
        assert isinstance(read, Access)
        copy = Access(FITTED, tuple(read.indices[dim] for dim in self.dims))
        rows, row = self.sides
        units = (-UNIT, -UNIT, 1)[-len(self.dims) :]
        strides = Strides(units, (True,) * (len(self.dims) - 1))
        turned = " along the sum" if plan.operand == "float32" else ""
        why = (
            f"{self.tensor} is copied first, in {rows} rows of {row}{turned}, which tiles read "
            "unmasked"
        )
        return reading_copy(plan, self.place, copy, strides, why)


def fit_of(planned: Planned, config: Config) -> Fit | None:
    """The factor that is copied, of a plan whose sides are as its config wants them; None where a
    copy does not pay.
    """
    if planned.plan.operand not in (*HALF, "float32") or not is_large_dot(planned):
        return None
    return min(
        (one for one in _fits_of(planned, config) if one is not None),
        key=lambda one: planned.sizes.numel[one.tensor],
        default=None,
    )


def is_along_sum(planned: Planned) -> bool:
    """Whether a product of 32-bit factors reads both along the sum, one perhaps from a copy."""
    plan = planned.plan
    if plan.operand != "float32" or not plan.roles.dot or not _are_alone(plan):
        return False
    both = [plan.factors[place] for place in (*plan.roles.left, *plan.roles.right)]
    across = [f for f in both if isinstance(f, Access) and not lies_along_sum(plan, f)]
    if len(across) != 1:
        return not across
    return fit_of(planned, Config(m=LARGE_SIDE, n=2 * LARGE_SIDE, k=32)) is not None


def _are_alone(plan: Plan) -> bool:
    """Whether either side of the product is one factor that is read, and not computed."""
    sides = (plan.roles.left, plan.roles.right)
    return all(len(side) == 1 and isinstance(plan.factors[side[0]], Access) for side in sides)


def _fits_of(planned: Planned, config: Config) -> list[Fit | None]:
    """Of the left factor and of the right one."""
    roles, m, n = planned.plan.roles, config.m, config.n
    sides = (
        _copied_factor(planned, roles.left, roles.m, m, n),
        _copied_factor(planned, roles.right, roles.n, n, m),
    )
    return [None if side is None else _fit(planned, config, side) for side in sides]


@dataclass(frozen=True, slots=True)
class _CopiedFactor:
    """The one factor on a side of a product: a matrix, or several of which an index selects one.

    Attributes:
        place: of the factor, in the product.
        read: what it reads.
        vars: the summed variable, and the one across it.
        extents: of these two.
        tile: on the axis of the second.
    """

    place: int
    read: Access
    vars: tuple[str, str]
    extents: tuple[Extent, Extent]
    tile: int

    def dim(self, var: str) -> int:
        return [index.var for index in self.read.indices].index(var)


def _copied_factor(
    planned: Planned, places: tuple[int, ...], axis: tuple[str, ...], tile: int, opposite: int
) -> _CopiedFactor | None:
    """The factor that could be copied; None where there is none, or a copy does not pay.
    ``opposite``: the tile on the axis that it has not.
    """
    plan, sizes = planned.plan, planned.sizes
    if len(places) != 1 or len(axis) != 1 or not plan.roles.k:
        return None
    read, vars_ = plan.factors[places[0]], (plan.roles.k[-1], axis[0])
    if not isinstance(read, Access) or not is_apart(plan, read) or len(read.indices) > 3:
        return None
    plain = [index.var for index in read.indices]
    depth, width = (sizes.extents.get(v) for v in vars_)
    if depth is None or width is None or any(plain.count(v) != 1 for v in vars_):
        return None
    if depth.open or width.open or {*vars_} & sizes.runs:  # the latter as long as what is gathered
        return None
    others = (index for index in read.indices if index.var not in vars_)
    if not _pays(planned, read.tensor, opposite) or not all(_is_shared(planned, i) for i in others):
        return None
    return _CopiedFactor(places[0], read, vars_, (depth, width), tile)


def _fit(planned: Planned, config: Config, side: _CopiedFactor) -> Fit | None:
    """How a factor is copied; None where it fits as it is."""
    plan, tiles = planned.plan, (_depth(planned, config), side.tile)
    lengths = dict(zip(side.vars, zip(side.extents, tiles, strict=True), strict=True))
    vars_ = _turned(plan, side) if plan.operand == "float32" else _as_it_lies(plan, side, config)
    if vars_ is None:
        return None
    (rows, high), (row, wide) = (lengths[v] for v in vars_)
    sides = max(rows.most, high), max(row.most, wide, UNIT)
    # What is turned is filled to its sides: large tiles and small ones have one kernel for it.
    ends = (high, wide) if plan.operand in HALF else (None, None)
    dims = [side.dim(v) for v in vars_]
    others = [dim for dim in range(len(side.read.indices)) if dim not in dims]
    return Fit(side.place, side.read.tensor, (*others, *dims), sides, ends)


def _turned(plan: Plan, side: _CopiedFactor) -> tuple[str, str] | None:
    """Of a factor of 32 bits rows and what lies along them; None where it need not be turned."""
    k, across = side.vars
    return None if lies_along_sum(plan, side.read) or not _are_alone(plan) else (across, k)


def _as_it_lies(plan: Plan, side: _CopiedFactor, config: Config) -> tuple[str, str] | None:
    """The same of one in half precision; None where no copy is better."""
    units = dict(plan.strides)[side.read.tensor].units
    rows, row = sorted(side.vars, key=lambda v: units[side.dim(v)] == 1)
    (depth, width), along = side.extents, side.extents[side.vars.index(row)]
    if units[side.dim(row)] != 1 or _fits(depth, width, along, config, side.tile, plan):
        return None
    return rows, row


def _depth(planned: Planned, config: Config) -> int:
    """How deep a tile is in the summed variable of the copy."""
    inner = inner_extent(planned.plan, planned.extents)
    return config.k if inner == 1 else min(config.k, inner)


def _pays(planned: Planned, tensor: str, tile: int) -> bool:
    """``tile``: on the axis that the factor has not."""
    numbers = planned.sizes.numel[tensor]
    least = LEAST_READS if planned.plan.operand in HALF else LEAST_TURNED
    return numbers <= MOST_NUMBERS and points(planned) >= least * tile * numbers


def _is_shared(planned: Planned, index: Affine) -> bool:
    """Whether an index selects one of few matrices, or through a tensor; not the matrix that an
    entry has of its own.
    """
    return index.var is None or planned.extents[index.var] <= FEW


def _fits(depth: Extent, width: Extent, row: Extent, config: Config, tile: int, plan: Plan) -> bool:
    """Whether a factor fits as it is: rows begin at sectors, and tiles divide both sides. Of small
    tiles few masks are needed where the sum ends.
    """
    even = len(plan.roles.k) == 2 or depth.multiple % config.k == 0
    small = config.k * tile < LEAST_MASKED
    return row.multiple % SECTOR == 0 and width.multiple % tile == 0 and (even or small)
