"""Fitting: a small factor of a matrix product that is read again and again is copied first, so that
it fills whole tiles.

Tiles walk rows of such a factor. Rows that do not begin at whole sectors of memory are read in more
pieces than they have, by every program anew; and where a tile reaches past the last row, each load
of it needs a mask, and each mask registers. A copy has rows of a length that the code knows, with
zeros where the sum ends: it is read without masks, at offsets that are numbers of the code.

Everything here depends on the plan and on the class of sizes, never on values.
"""

from __future__ import annotations

from dataclasses import dataclass

from insum.lang.expr import Access, Affine
from insum.plan.config import Config
from insum.plan.copying import is_apart, is_large_dot, points, reading_copy
from insum.plan.draft import Planned
from insum.plan.plan import Plan
from insum.plan.sizes import FEW, FITTED, Extent, Strides
from insum.plan.tiling import inner_extent

#: Programs that read each number, from which on a copy pays.
LEAST_READS = 64
#: Numbers of a factor that is small.
MOST_NUMBERS = 2**22
#: Numbers of a tile whose masks, where the sum ends, take longer than a copy.
LEAST_MASKED = 64 * 128
#: Numbers of half precision in a sector of memory, at whose multiples rows begin.
SECTOR = 16


@dataclass(frozen=True, slots=True)
class Fit:
    """How one factor is copied.

    Attributes:
        place: of the factor, in the product.
        tensor: that it reads.
        dims: dimensions of the tensor in the order of the copy: one that selects a matrix, where
            there are several, and the two of the tile.
        sides: lengths of these two in the copy.
        ends: which multiples of their extents are filled.
    """

    place: int
    tensor: str
    dims: tuple[int, ...]
    sides: tuple[int, int]
    ends: tuple[int, int]

    def reading(self, plan: Plan) -> Plan:
        """The plan, with the copy in the place of the factor."""
        read = plan.factors[self.place]
        assert isinstance(read, Access)
        copy = Access(FITTED, tuple(read.indices[dim] for dim in self.dims))
        rows, row = self.sides
        strides = Strides((rows * row, row, 1)[-len(self.dims) :], (True,) * (len(self.dims) - 1))
        why = f"{self.tensor} is copied first, in {rows} rows of {row}, which tiles read unmasked"
        return reading_copy(plan, self.place, copy, strides, why)


def fit_of(planned: Planned, config: Config) -> Fit | None:
    """The factor that is copied, of a plan whose sides are as its config wants them; None where a
    copy does not pay.
    """
    plan = planned.plan
    if not is_large_dot(planned):
        return None
    roles, m, n = plan.roles, config.m, config.n
    sides = ((roles.left, roles.m, m, n), (roles.right, roles.n, n, m))
    found = [_fit(planned, config, *side) for side in sides]
    return min(
        (one for one in found if one is not None),
        key=lambda one: planned.sizes.numel[one.tensor],
        default=None,
    )


def _fit(
    planned: Planned,
    config: Config,
    side: tuple[int, ...],
    axis: tuple[str, ...],
    tile: int,
    opposite: int,
) -> Fit | None:
    """The fit of the one factor on a side of the product, which has this axis beside the summed
    one; ``tile`` on it and on the ``opposite`` one.
    """
    plan, sizes = planned.plan, planned.sizes
    if len(side) != 1 or len(axis) != 1 or not plan.roles.k:
        return None
    read = plan.factors[side[0]]
    if not isinstance(read, Access) or not is_apart(plan, read):
        return None
    k, across = plan.roles.k[-1], axis[0]
    plain = [index.var for index in read.indices]
    classes = [sizes.extents.get(v) for v in (k, across)]
    if len(plain) > 3 or plain.count(k) != 1 or plain.count(across) != 1 or None in classes:
        return None
    depth, width = (one for one in classes if one is not None)
    if depth.open or width.open or not _pays(planned, read.tensor, opposite):
        return None
    if {k, across} & sizes.runs:  # as long as what is gathered
        return None
    others = [dim for dim, var in enumerate(plain) if var not in (k, across)]
    if not all(_is_shared(planned, read.indices[dim]) for dim in others):
        return None
    units = dict(plan.strides)[read.tensor].units
    dims = sorted((plain.index(k), plain.index(across)), key=lambda dim: units[dim] == 1)
    lengths = {k: (depth, _depth(planned, config)), across: (width, tile)}
    rows, row = (lengths[str(plain[dim])] for dim in dims)
    if units[dims[1]] != 1 or _fits(depth, width, row[0], config, tile, plan):
        return None
    return Fit(
        side[0],
        read.tensor,
        (*others, *dims),
        (max(rows[0].most, rows[1]), max(row[0].most, row[1])),
        (rows[1], row[1]),
    )


def _depth(planned: Planned, config: Config) -> int:
    """How deep a tile is in the summed variable of the copy."""
    inner = inner_extent(planned.plan, planned.extents)
    return config.k if inner == 1 else min(config.k, inner)


def _pays(planned: Planned, tensor: str, tile: int) -> bool:
    """``tile``: on the axis that the factor has not."""
    numbers = planned.sizes.numel[tensor]
    return numbers <= MOST_NUMBERS and points(planned) >= LEAST_READS * tile * numbers


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
