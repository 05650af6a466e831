"""Tiles of a plan: how large its axes are, how deep a step is, what a tile has to hold, and into
how many pieces a long sum is cut. The first guess, the search and the cost model all go by these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from insum.lang.expr import variables
from insum.plan.config import Config
from insum.plan.plan import Plan
from insum.plan.roles import FLATTEN_UP_TO, one_place_an_entry, read_with
from insum.plan.sizes import power_of_two

#: Tasks up to this length count as short: several of them share a program.
SHORT = 32

#: Patterns with more points than this are long: several kernels, which share neither an output nor
#: the largest factor.
LONG = 48

#: Steps from which on a sum is cut into pieces, and those that take longer than another launch.
LEAST_CUT, MANY_STEPS = 16, 32
#: Programs that fill a device twice over; fewer than this and a long reduction is cut into pieces.
ENOUGH_PROGRAMS = 264

#: Sides of the tiles that arithmetic alone decides on: this, and twice this on N.
LARGE_SIDE = 128

#: A square tile of such sides, and places of an output that fill a device with them.
LARGE_TILE = LARGE_SIDE**2

LARGE = ENOUGH_PROGRAMS * LARGE_TILE

#: Steps of a reduction that fill a deep pipeline.
LARGE_STEPS = 8

#: The least M of Hopper's matrix instructions.
HIGH = 64

#: Of a multiprocessor: bytes of shared memory that its tiles may have, and tiles at most.
SHARED, RESIDENT = 200_000, 16

#: Measured on an H200, in microseconds: what a step of a tile waits for, and for so many bytes of
#: it one more; a launch, and so many numbers that go through the workspace in one.
STEP_WAIT, STEP_BYTES, LAUNCH, WORKSPACE_NUMBERS = 0.3, 97_000, 2.0, 312_000

#: Pieces of a list of steps at most, and what they must leave of its time, for that is a guess.
MOST_PIECES, CLEARLY = 8, 0.85

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def extent(axis: tuple[str, ...], extents: Mapping[str, int]) -> int:
    return math.prod(extents[v] for v in axis)


def inner_extent(plan: Plan, extents: Mapping[str, int]) -> int:
    """Extent of the variable flattened under the segment's entries on the K axis."""
    return extents[plan.roles.k[1]] if len(plan.roles.k) == 2 else 1


def whole_entries(k: int, inner: int) -> bool:
    """Whether a tile of K holds entries as a whole, so that places in it are numbers of the code:
    those that fill it, or nearly, or most of a deep one. Elsewhere tiles end inside of entries.

    >>> [whole_entries(64, inner) for inner in (1, 8, 20, 24, 64, 128)]
    [True, True, True, False, True, False]
    >>> [whole_entries(128, inner) for inner in (64, 90, 96, 123)]
    [True, False, True, True]
    """
    return 16 * (k // inner * inner) >= (12 if k >= LARGE_SIDE else 15) * k


def in_rows(plan: Plan) -> bool:
    """Whether tiles hold rows of a segmented output, so that short and long rows are launched
    apart.
    """
    return plan.pattern is None and plan.segment is not None and plan.segment.tiled


def sums_columns(plan: Plan) -> bool:
    """Whether the N axis is summed at the end, or for a result beside, so that a tile holds all of
    it.
    """
    targets = [plan.target, *(target for one in plan.beside for target, _ in one.pattern.points)]
    columns = set(plan.roles.n)
    return bool(columns) and any(not columns & set(variables(target)) for target in targets)


def least_n(plan: Plan) -> int:
    """The least N of a tile: of half precision, where entries are walked through, 8, for what is
    read beside it counts, and not how matrix instructions are filled.
    """
    return 8 if walks_entries(plan) and BYTES.get(plan.operand, 4) == 2 else 16


def walks_entries(plan: Plan) -> bool:
    """Whether the steps of a tile go through the entries of a row, each with its own K axis."""
    if plan.segment is None:
        return False
    return plan.segment.var in plan.roles.loops or len(plan.roles.k) == 2


def walks_matrices(plan: Plan) -> bool:
    """... and both sides of the product are read at one place for each entry."""
    segment = plan.segment
    if segment is None or not walks_entries(plan):
        return False
    return one_place_an_entry(plan.factors, segment.var, segment.row)


def gathers_along(plan: Plan, axis: tuple[str, ...]) -> bool:
    """Whether index tensors are read at each entry for every place along an axis of the tile."""
    segment = plan.segment
    if segment is None or not walks_entries(plan):
        return False
    return not read_with(plan.factors, segment.var).isdisjoint({*axis} - {segment.var})


def gathers_places(plan: Plan) -> bool:
    """Whether an index tensor is read along M and K both: an index for each place of a tile."""
    if plan.segment is not None or not plan.roles.k:
        return False
    return not read_with(plan.factors, plan.roles.k[0]).isdisjoint(plan.roles.m)


def is_large(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether a product is so large that arithmetic alone counts: the largest tiles, which leave
    room for one program on a multiprocessor, still fill the device, and each has many steps.
    """
    if BYTES.get(plan.operand) != 2 or plan.onehot >= 0 or plan.segment:
        return False
    if plan.roles.loops and not is_dense(plan):  # gathers are hidden behind other programs
        return False
    sides = [extent(axis, extents) for axis in (plan.roles.m, plan.roles.n)]
    if min(sides) <= LARGE_SIDE // 2:
        return False
    tiles = math.prod(sides) / (2 * LARGE_SIDE**2) * math.prod(extents[v] for v in plan.roles.grid)
    steps = extents[plan.roles.k[0]] * math.prod(extents[v] for v in plan.roles.loops)
    return tiles >= ENOUGH_PROGRAMS / 2 and steps >= LARGE_STEPS * k_tile(plan, extents, 2)


def is_dense(plan: Plan) -> bool:
    return plan.segment is None and not plan.index_tensors


def held(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> tuple[int, int]:
    """A tile holds all of a variable that scatters into a register tile, and all of one that is
    summed after the product: the largest of its class.
    """
    kept = set(variables(plan.target))
    scattered = set(variables(plan.target.indices[plan.onehot])) if plan.onehot >= 0 else set()
    least = 16 if plan.roles.dot else 1
    if plan.roles.m and (scattered & set(plan.roles.m) or not kept & set(plan.roles.m)):
        m = max(least, most(plan.roles.m, extents))
    if plan.roles.n and (scattered & set(plan.roles.n) or not kept & set(plan.roles.n)):
        n = max(least, most(plan.roles.n, extents))
    return m, n


def most(axis: tuple[str, ...], extents: Mapping[str, int]) -> int:
    """What no extent of the classes of these typical ones exceeds."""
    return math.prod(power_of_two(extents[v]) for v in axis)


def k_tile(plan: Plan, extents: Mapping[str, int], size: int) -> int:
    if len(plan.roles.k) == 2:
        inner = inner_extent(plan, extents)
        if inner == power_of_two(inner):
            return inner * max(1, 32 // inner)
        if size == 2 and inner > FLATTEN_UP_TO and whole_entries(LARGE_SIDE, inner):
            return LARGE_SIDE
        deep = 64 if size == 2 else 32
        return deep if whole_entries(deep, inner) or inner > FLATTEN_UP_TO else 32
    longest = power_of_two(extents[plan.roles.k[0]])
    if plan.segment and plan.segment.var in plan.roles.k and output_places(plan, extents) >= LARGE:
        return max(16, min(longest, 32))  # rows end anywhere, and their entries are gathered
    deep = 64 if size == 2 else 32
    if walks_entries(plan):  # each has a step more, and what they share is copied where steps end
        return max(16, min(longest, deep))
    return dividing(extents[plan.roles.k[0]], deep)


def dividing(extent: int, most: int) -> int:
    """The depth of a tile, ``most`` or the whole: less where that divides what is summed, for masks
    cost more than shallow steps.
    """
    deep = max(16, min(power_of_two(extent), most))
    even = math.gcd(extent, deep)
    return even if even >= 32 else deep


def output_places(plan: Plan, extents: Mapping[str, int]) -> int:
    """How many elements of the output a plan computes: all values of what it does not sum."""
    return extent((*plan.roles.grid, *plan.roles.m, *plan.roles.n), extents)


def pieces(plan: Plan, config: Config, extents: Mapping[str, int]) -> int:
    """Into how many pieces a long reduction is cut when the output alone gives too little to do (1:
    not at all).
    """
    if plan.strategy != "store" or not plan.roles.k:
        return 1
    programs = math.prod(extents[v] for v in plan.roles.grid)
    programs *= math.ceil(extent(plan.roles.m, extents) / config.m) * math.ceil(
        extent(plan.roles.n, extents) / config.n
    )
    own = _contraction_steps(plan, config, extents)
    if plan.segment:
        return _pieces_of_lists(plan, config, extents, programs, own)
    most = extents[plan.roles.outer[0]] if cuts_outer_loop(plan, config, extents) else own
    if config.split:
        return max(1, min(config.split, most))
    steps = steps_of_program(plan, config, extents)
    # without matrix units all waits for memory, and many programs wait at once
    enough = ENOUGH_PROGRAMS if plan.roles.dot else 4 * ENOUGH_PROGRAMS
    at_once = config.stages if config.k == 1 else 1  # steps that each thread reads before it adds
    if programs >= enough // 2 or steps < LEAST_CUT * at_once or not programs:
        return 1
    return max(1, min(enough // programs, steps // (8 if plan.roles.dot else 4), most))


def cuts_outer_loop(plan: Plan, config: Config, extents: Mapping[str, int]) -> bool:
    """Whether pieces are parts of the outermost loop around a contraction, rather than of the
    contraction's own: of the longer one.
    """
    if plan.segment or not plan.roles.outer:
        return False
    return extents[plan.roles.outer[0]] > _contraction_steps(plan, config, extents)


def steps_of_program(plan: Plan, config: Config, extents: Mapping[str, int]) -> int:
    """How many steps a program takes whose sum is not cut."""
    outer = math.prod(extents[v] for v in plan.roles.outer)
    return outer * _contraction_steps(plan, config, extents)


def _contraction_steps(plan: Plan, config: Config, extents: Mapping[str, int]) -> int:
    deep = math.ceil(extent(plan.roles.k, extents) / config.k)
    return deep * math.prod(extents[v] for v in plan.roles.loops)


def _pieces_of_lists(
    plan: Plan, config: Config, extents: Mapping[str, int], programs: int, steps: int
) -> int:
    """Into how many pieces the lists of steps are cut that tiles walk: where all tiles run at once,
    the longest list decides, and pieces of it pay for the sum of their results.
    """
    assert plan.segment is not None
    lists, buffered = max(1, extents[plan.segment.row]), config.stages * step_bytes(plan, config)
    length = steps // lists
    if config.split:
        return max(1, min(config.split, length))
    at_once = ENOUGH_PROGRAMS // 2 * max(1, min(RESIDENT, SHARED // buffered))
    waits = length * (STEP_WAIT + step_bytes(plan, config) / STEP_BYTES)
    room = output_places(plan, extents) / WORKSPACE_NUMBERS

    def microseconds(count: int) -> float:
        return waits / count + (LAUNCH + count * room if count > 1 else 0)

    most = min(at_once // max(1, programs), MOST_PIECES, length // 4)
    found = min(range(1, max(1, most) + 1), key=microseconds)
    return found if microseconds(found) < CLEARLY * waits else 1


def step_bytes(plan: Plan, config: Config) -> int:
    """What one step of a product reads."""
    return (config.m + config.n) * config.k * BYTES.get(plan.operand, 4)
