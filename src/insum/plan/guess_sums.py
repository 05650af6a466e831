"""The first guess for sums of products without matrix units: small rules, the first that has
something to say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from insum.lang.expr import Access, Affine, accesses, variables
from insum.plan.config import Config
from insum.plan.guess_rows import reads_narrow_rows, row_bytes
from insum.plan.plan import Plan
from insum.plan.roles import contiguity
from insum.plan.sizes import WIDE_LOAD, power_of_two
from insum.plan.tiling import (
    BYTES,
    ENOUGH_PROGRAMS,
    HIGH,
    extent,
    held,
    output_places,
    sums_columns,
)

#: Threads of a tile that sum each its own, and how many outputs they take: as many halves as the
#: widest load has.
OWN_THREADS, OWN_SUMS = 128, 8
#: Steps of such sums that are read before the first is added.
OWN_STEPS = 9
#: Values of a tile that has one axis and sums nothing.
SINGLE_VALUES = 512
#: Places of a run of them, and warps that have it: where several numbers are read at a time, of
#: halves, and of others.
RUN, RUN_OF_HALVES, RUN_NUMBER_BY_NUMBER = (1024, 4), (2048, 8), (512, 4)
#: So many sums of runs are a thread's each; others read at least so many bytes that lie together.
MANY_SUMS_OF_RUNS, RUN_BYTES = 2**18, 64
#: Tiles of sums of runs that are long enough to be cut into pieces.
CUT_RUN = Config(m=1, n=128, k=8, warps=4, stages=1)
#: Columns of a tile that are not divided further where sums do not lie along memory.
NARROWEST = 16
#: Steps of sums along memory up to which there are more programs of smaller tiles.
FEW_STEPS = 32
#: So few columns are read in deep steps.
NARROW_COLUMNS = 8
#: Values of a tile that sums and is put together before atomics.
SMALL_SUMS = 1024
#: And of one that sums long rows of few columns.
LONGEST_SUM = 4096
#: Sides of a tile that is read along the first and written along the second: lines of memory.
TURNED = 32, 128
#: Sides and depth of a tile whose points are functions of what its rows and columns share.
SHARED_TILE = 64, 128, 2
#: Columns of the least of them, which one warp has.
SMALL_TILE = 32
#: Sums of windows that one warp has, how many steps of each are read before the first is added, and
#: bytes of a row of them where windows lie along it.
WINDOW_SUMS, WINDOW_STEPS, WINDOW_ROW_BYTES = 512, 4, 1024
#: Places up to which a row of windows is one tile's.
WINDOW_ROW = 128
#: Steps of a column up to which its thread may be one of few, and bytes that so many threads as
#: hide longer ones read at a time.
SHORT_COLUMN, ENOUGH_BYTES = 16, 1 << 19
#: Rows and columns of a tile that gathers number by number, of lists of at most so many.
LISTED_ROWS, LISTED_COLUMNS, MOST_LISTED = 2, 256, 16
#: So many short rows that lie beside each other are read together.
WHOLE_LINES = 8
#: Rows of windows that share a tile, and how much of them is read at most in a step.
SLIDING_ROWS, SLIDING_STEP = 8, 64
#: Numbers of a row that one thread reads by itself.
SHORT_ROW = 4
#: Rows of a tile that sums along them where there are many, and numbers of fewer.
ROWS_OF_SUMS, ROW_NUMBERS = 16, 1024
#: Rows that no wide load can read: of how many lists each warp reads so many at once.
NARROW_LISTS, NARROW_STEPS, NARROW_NUMBERS = 8, 8, 4096


@dataclass(frozen=True, slots=True)
class SummedTile:
    """What a rule looks at: a plan, and how large a tile could be."""

    plan: Plan
    extents: Mapping[str, int]
    m: int
    n: int
    k: int


GuessRule: TypeAlias = Callable[[SummedTile], Config | None]


def for_sum(plan: Plan, extents: Mapping[str, int]) -> Config:
    roles = plan.roles
    m, n, k = (
        power_of_two(extent(axis, extents)) if axis else 1 for axis in (roles.m, roles.n, roles.k)
    )
    tile = SummedTile(plan, extents, m, n, k)
    # where rows are summed, a tile has as much of them as it can, and fewer of them
    row = replace(tile, k=min(k, 128)) if _reads_rows_of_sums(plan) else None
    narrow = tile if row is None else replace(row, n=min(n, max(1, 2048 // row.k)))
    columns = replace(narrow, n=min(narrow.n, 128))
    rules: tuple[tuple[GuessRule, SummedTile | None], ...] = (
        (_in_registers, tile),
        (_runs_of_places, tile),
        (_columns_summed_last, tile),
        (_of_shared_rows, tile),
        (_few_sums_of_rows, row),
        (_vectors_of_rows, row),
        (_along_rows, row),
        (_short_sums_of_columns, tile),
        (_turned, narrow),
        (_single_values, narrow),
        (_side_by_side, columns),
        (_a_list_each, columns),
        (_sums_of_numbers, narrow),
        (_few_long_sums, columns),
        (_number_by_number, narrow),
        (_windows, tile),
        (_down_columns, tile),
        (_few_rows, row),
    )
    for rule, one in rules:
        config = None if one is None else rule(one)
        if config is not None:
            return _spread(tile, config) if _may_spread(rule, tile, config) else config
    config = _any_other(columns)
    return _spread(tile, config) if _may_spread(_any_other, tile, config) else config


def _may_spread(rule: GuessRule, tile: SummedTile, config: Config) -> bool:
    """Whether tiles of a rule may be too few: of sides that are shared, or of sums so short that
    they are not cut into pieces.
    """
    if rule not in (_along_rows, _any_other):
        return rule is _of_shared_rows
    steps = math.ceil(extent(tile.plan.roles.k, tile.extents) / config.k)
    return steps * math.prod(tile.extents[v] for v in tile.plan.roles.loops) <= FEW_STEPS


def _in_registers(tile: SummedTile) -> Config | None:
    """A scattered dimension is held whole."""
    plan, m, n = tile.plan, tile.m, tile.n
    if plan.onehot < 0:
        return None
    m, n = held(plan, tile.extents, min(m, 16), min(n, 64))
    if not {*plan.roles.m, *plan.roles.n} & set(variables(plan.target.indices[plan.onehot])):
        # the register tile has a third axis, the scattered one
        n, m = min(n, 32), 1 if plan.roles.m else m
    k = min(tile.k, 16, max(4, 1024 // (m * n)))
    return Config(m=m, n=n, k=k, warps=max(1, min(4, m * n * k // 2048)), stages=2)


def _runs_of_places(tile: SummedTile) -> Config | None:
    """Several loads for each thread where they read several numbers at a time, else one of the
    width of its store: what is gathered number by number is soon too much to be in flight.
    """
    plan, roles = tile.plan, tile.plan.roles
    if not roles.flat:
        return None
    if roles.k:
        return _sums_of_runs(tile)
    inner = roles.n[-1]
    picked = _picks_along(plan, (inner,))
    n, warps = RUN_NUMBER_BY_NUMBER
    if tile.extents[inner] % 2 == 0 and not picked:
        n, warps = RUN_OF_HALVES if _widest(plan) <= 2 else RUN
    while n > 256 and output_places(plan, tile.extents) < ENOUGH_PROGRAMS * n:
        n, warps = n // 2, max(1, warps // 2)
    return Config(m=1, n=min(n, tile.n), warps=warps, stages=1)


def _sums_of_runs(tile: SummedTile) -> Config:
    """Each thread's own, as many as a load has, of which it reads some steps before it adds the
    first; of fewer places several threads each, until so much is read at once as hides how long it
    takes, and no narrower pieces of memory than it is read in.
    """
    roles, places = tile.plan.roles, output_places(tile.plan, tile.extents)
    length, half = power_of_two(extent(roles.k, tile.extents)), _widest(tile.plan) <= 2
    own = MANY_SUMS_OF_RUNS if length > SHORT_COLUMN else ENOUGH_PROGRAMS * OWN_THREADS
    if places >= own or length <= WINDOW_STEPS:
        even = math.gcd(tile.extents[roles.n[-1]], 4 if half else 2)
        while even > 1 and places < ENOUGH_PROGRAMS * OWN_THREADS * even:
            even //= 2
        n, steps = min(tile.n, OWN_THREADS * even), min(WINDOW_STEPS, length)
        return Config(m=1, n=n, k=1, warps=OWN_THREADS // 32, stages=steps)
    n = min(tile.n, 128)
    pieces = length * math.prod(tile.extents[v] for v in roles.loops) // (8 * CUT_RUN.k)
    if n == CUT_RUN.n and places // n * pieces >= 4 * ENOUGH_PROGRAMS:
        return CUT_RUN
    least = RUN_BYTES // _widest(tile.plan)
    least = max(least, min(SMALL_TILE, power_of_two(_row_of_a_run(tile))))
    while n > least and places < 4 * ENOUGH_PROGRAMS * n:
        n //= 2
    k = min(length, ROW_NUMBERS // n)
    return Config(m=1, n=n, k=k, warps=max(1, min(4, n * k // 256)), stages=2)


def _row_of_a_run(tile: SummedTile) -> int:
    """Numbers that lie together in memory for one value of what is summed, in the factor that has
    one for each point.
    """
    roles, found = tile.plan.roles, 1
    summed = {*roles.k, *roles.loops}
    for read in _reads(tile.plan):
        names = [v for index in reversed(read.indices) for v in variables(index)]
        if {*names} >= {*roles.n, *summed}:
            for v in itertools.takewhile(lambda v: v not in summed, names):
                found *= tile.extents[v]
            break
    return found


def _spread(tile: SummedTile, config: Config) -> Config:
    """With smaller tiles, and more of each sum, where there are few: until there are programs
    enough, or all of the sum is in a tile. Long sums of what lies along memory are cut instead.
    """
    roles = tile.plan.roles
    if tile.plan.strategy != "store" or not roles.k or sums_columns(tile.plan):
        return config
    few = ENOUGH_PROGRAMS // 4
    if _tiles(tile, config.m, config.n) >= few or output_places(tile.plan, tile.extents) < few:
        return config
    length = power_of_two(extent(roles.k, tile.extents))
    least = 1 if _reads_rows_of_sums(tile.plan) else NARROWEST
    while config.k < length and (config.m > 1 or config.n > least):
        if _tiles(tile, config.m, config.n) >= ENOUGH_PROGRAMS:
            break
        m, n = (config.m // 2, config.n) if config.m > 1 else (1, config.n // 2)
        config = replace(config, m=m, n=n, k=min(2 * config.k, length, ROW_NUMBERS))
    return config


def _columns_summed_last(tile: SummedTile) -> Config | None:
    """N is summed after the loop, so one tile holds all of it."""
    plan, m, n = tile.plan, tile.m, tile.n
    if not sums_columns(plan):
        return None
    k = min(tile.k, max(1, 2048 // (n * m)))
    return Config(m=m, n=n, k=k, warps=max(1, min(4, m * n * k // 512)), stages=2)


def _of_shared_rows(tile: SummedTile) -> Config | None:
    """Every factor is shared by a whole side of the tile, as in products of matrices: what is read
    is used for as many sums as registers hold, each thread's own.
    """
    plan, (m, n, k) = tile.plan, SHARED_TILE
    if not _shares_sides(plan) or plan.strategy != "store" or plan.accumulator == "float64":
        return None
    if tile.n < 16 or tile.m < 8:
        return None
    enough = ENOUGH_PROGRAMS // 2
    if tile.n <= n and tile.m > tile.n:  # few columns: parts of them, to have programs
        n, k, enough = (16, k, enough) if tile.n >= HIGH else (8, 2 * k, enough // 2)
    while m > 8 and _tiles(tile, m, n) < enough or m > tile.m:
        m, k = m // 2, min(2 * k, 4)
    if m == 8 and n > SMALL_TILE and _tiles(tile, m, n) < 4 * enough:
        return Config(m=m, n=SMALL_TILE, k=min(4, tile.k), warps=1, stages=1)
    n = min(tile.n, n)
    return Config(m=m, n=n, k=min(k, tile.k), warps=max(1, min(4, m * n // 128)), stages=1)


def _few_sums_of_rows(tile: SummedTile) -> Config | None:
    """So few that they are cut into pieces: as much of one at a time as hides how long it takes."""
    roles = tile.plan.roles
    length = extent(roles.k, tile.extents)
    if tile.plan.strategy != "store" or length < ROW_NUMBERS:
        return None
    if length * math.prod(tile.extents[v] for v in roles.loops) < FEW_STEPS * ROW_NUMBERS:
        return None
    if output_places(tile.plan, tile.extents) >= 2 * ENOUGH_PROGRAMS:
        return None
    if any(own[-1] != roles.k[-1] for own in _every_point(tile.plan)):
        return None
    return Config(
        m=1, n=1, k=ROW_NUMBERS * (2 if _widest(tile.plan) <= 2 else 1), warps=4, stages=1
    )


def _vectors_of_rows(tile: SummedTile) -> Config | None:
    """Of rows that are gathered a few numbers at each column: every thread sums them one after the
    other, and nothing of a tile is empty.
    """
    roles, picked = tile.plan.roles, _picks_along(tile.plan, tile.plan.roles.m)
    if not roles.m or tile.k > SHORT_ROW or tile.n < SMALL_TILE or not picked:
        return None
    if _picks_along(tile.plan, (*roles.n, *roles.k)) or roles.loops:
        return None
    n = min(tile.n, 2 * SMALL_TILE)
    return Config(m=min(tile.m, OWN_THREADS * 2 // n), n=n, k=1, warps=4, stages=1)


def _along_rows(tile: SummedTile) -> Config | None:
    """The summed variable walks memory in order: whole rows of it are read."""
    m, n, k = tile.m, tile.n, tile.k
    if m * k <= SHORT_ROW and n >= 64:  # as of positions: a thread for each
        return Config(m=m, n=min(n, 256), k=k, warps=8, stages=1)
    if m * k <= (128 if m > 1 else 64) and n >= 32:  # and all that lies beside it
        # an empty place counts; but of rows of a few numbers, lines that are read in parts do
        whole = m >= WHOLE_LINES and k <= SHORT_ROW
        m = m if whole else _filled(extent(tile.plan.roles.m, tile.extents), m)
        n = min(n, 2048 // (m * k))
        return Config(m=m, n=n, k=k, warps=max(1, m * n * k // 1024), stages=1)
    if 1 < m <= 8 and n >= 32:
        # what lies beside each other, or is shared by several sums, in steps
        k = min(k, 32)
        return Config(m=m, n=8, k=k, warps=max(1, m * 8 * k // 1024), stages=1)
    plan, roles = tile.plan, tile.plan.roles
    if m > SLIDING_ROWS and n >= 16 and _adds_up(_row_places(plan), roles.m, roles.n):
        n = min(n, 32)
        whole = extent(tile.plan.roles.k, tile.extents) == SLIDING_STEP
        k = SLIDING_STEP if whole else SLIDING_STEP // 4  # sums of several steps take registers
        warps = 2 if whole else SLIDING_ROWS * n * k // 1024
        return Config(m=SLIDING_ROWS, n=n, k=k, warps=warps, stages=1)
    # gathered in steps of a load or two, while the next is on its way
    if tile.plan.index_tensors and m == 1 and k == 128 and n >= 16:
        return Config(m=1, n=16, k=32, warps=4, stages=2)
    return None


def _short_sums_of_columns(tile: SummedTile) -> Config | None:
    """Rows lie along memory, and a few of them are summed: a thread sums as many columns as the
    widest load has, and reads as many rows at once as every sum of the class has.
    """
    roles, n = tile.plan.roles, OWN_THREADS * SHORT_ROW
    if roles.m or not 1 < tile.k <= 2 * OWN_STEPS or tile.n < ENOUGH_PROGRAMS * n // 2:
        return None
    along = contiguity(tile.plan.factors, roles.n[-1]) > 0
    if not along or contiguity(tile.plan.factors, roles.k[-1]) or len(roles.k) > 1:
        return None
    return Config(m=1, n=n, k=1, warps=OWN_THREADS // 32, stages=min(tile.k // 2, OWN_STEPS))


def _few_rows(tile: SummedTile) -> Config | None:
    """Sums along rows that are few, with a tile for fewer of them, and more of each; of so few that
    they are cut into pieces these have tiles as of many.
    """
    roles, rows = tile.plan.roles, ROWS_OF_SUMS
    length = extent(roles.k, tile.extents) if roles.k else 0
    if roles.m or roles.loops or length < HIGH or tile.plan.strategy != "store":
        return None
    enough, places = 4 * ENOUGH_PROGRAMS, output_places(tile.plan, tile.extents)
    while rows > 1 and places < enough * rows:
        rows //= 2
    if rows == ROWS_OF_SUMS or places < ENOUGH_PROGRAMS:
        return None
    k = min(power_of_two(length), ROW_NUMBERS // rows)
    return Config(m=1, n=min(rows, tile.n), k=k, warps=2 if rows > 1 else 4, stages=2)


def _turned(tile: SummedTile) -> Config | None:
    m, n = (min(side, most) for side, most in zip((tile.m, tile.n), TURNED, strict=True))
    if not _is_turned(tile.plan) or min(m, n) < TURNED[0]:
        return None
    kinds = dict(tile.plan.kinds)
    half = all(BYTES.get(kinds[a.tensor]) == 2 for f in tile.plan.factors for a in accesses(f))
    return Config(m=m, n=n, warps=2 if half else 8, stages=1)


def _single_values(tile: SummedTile) -> Config | None:
    """As many of them for each thread as the widest load has."""
    m, n = tile.m, tile.n
    if max(m, n) != m * n * tile.k:
        return None
    return Config(m=min(m, SINGLE_VALUES), n=min(n, SINGLE_VALUES), warps=4, stages=1)


def _side_by_side(tile: SummedTile) -> Config | None:
    """Every thread sums what is its own, one after the other: nothing is put together at the
    end.
    """
    if tile.k >= 128 or not _gathers_side_by_side(tile.plan, tile.extents):
        return None
    n = min(tile.n, 64)
    m = min(tile.m, OWN_THREADS * min(n, OWN_SUMS) // n)
    return Config(m=m, n=n, k=1, warps=OWN_THREADS // 32, stages=min(tile.k, OWN_STEPS))


def _a_list_each(tile: SummedTile) -> Config | None:
    """The same; a thread has as much of a row as the widest load. Put together across warps, such
    sums take up to ten times as long.
    """
    plan, extents = tile.plan, tile.extents
    if tile.k >= 128 or not _gathers_a_list_each(plan, extents):
        return None
    if reads_narrow_rows(plan):
        k = min(tile.k, NARROW_STEPS)
        m = max(1, min(tile.m, NARROW_LISTS, NARROW_NUMBERS // (tile.n * k)))
        return Config(m=m, n=tile.n, k=k, warps=1, stages=1)
    even = math.gcd(extent(plan.roles.n, extents), tile.n)
    n = even if even >= 32 else tile.n
    m = min(tile.m, max(1, OWN_THREADS * (WIDE_LOAD // row_bytes(plan)) // n))
    steps = max(1, min(extent(plan.roles.k, extents), OWN_STEPS))
    return Config(m=m, n=n, k=1, warps=OWN_THREADS // 32, stages=steps)


def _sums_of_numbers(tile: SummedTile) -> Config | None:
    """Long sums along columns that are gathered number by number: every thread has its own, and a
    warp a part of one row at a time, which stays in the cache.
    """
    plan, n = tile.plan, min(tile.n, 2 * OWN_THREADS)
    if tile.k < 1024 or n < OWN_THREADS or plan.roles.m or not _reads_apart(plan):
        return None
    return Config(m=1, n=n, k=1, warps=n // 32, stages=1)


def _few_long_sums(tile: SummedTile) -> Config | None:
    """Over few columns: more programs, and more rows in flight."""
    plan, n = tile.plan, tile.n
    places = output_places(plan, tile.extents)
    if not plan.roles.k or tile.k < 1024 or places >= 2 * ENOUGH_PROGRAMS * n:
        return None
    wide = 128 // row_bytes(plan)  # a line of memory
    if n >= wide and tile.m >= 4 and _shares_rows(plan):
        m, n = min(tile.m, 16), min(n, wide)
        return Config(
            m=m, n=n, k=4 if m == 16 else min(32, LONGEST_SUM // (m * n)), warps=4, stages=2
        )
    n = min(n, 32)
    deep, steps = (
        LONGEST_SUM // n,
        math.prod(tile.extents[v] for v in (*plan.roles.k, *plan.roles.loops)),
    )
    if n <= NARROW_COLUMNS and steps >= 8 * ENOUGH_PROGRAMS * deep:
        return Config(m=1, n=n, k=min(deep, tile.k), warps=8, stages=2)
    return Config(m=1, n=n, k=max(32, min(128, 1024 // n)), warps=8, stages=1)


def _number_by_number(tile: SummedTile) -> Config | None:
    """A load for each number: few for each thread, but for indices that many rows share. Of lists
    of numbers, and of rows that are gathered, only so few that they stay in the cache.
    """
    roles = tile.plan.roles
    if not roles.m or tile.k > MOST_LISTED or not _reads_apart(tile.plan):
        return None
    if roles.k:
        m, n, k = min(tile.m, LISTED_ROWS), min(tile.n, LISTED_COLUMNS), min(tile.k, SHORT_ROW)
        return Config(m=m, n=n, k=k, warps=8, stages=1)
    gathered = any(any(True for _ in accesses(index)) for index in _row_places(tile.plan))
    n = min(tile.n, 2 * SINGLE_VALUES if gathered else SINGLE_VALUES)
    if n == SINGLE_VALUES and not gathered:
        shared = not _has_an_index_each(tile.plan)
        return Config(m=min(tile.m, 4) if shared else 1, n=n, warps=4, stages=1)
    m = max(1, SINGLE_VALUES // n)
    return Config(m=min(tile.m, m), n=n, warps=max(2, m * n // 256), stages=1)


def _down_columns(tile: SummedTile) -> Config | None:
    """Sums across rows that lie along memory: every thread has its own and reads some rows before
    it adds the first.
    """
    plan, roles, n = tile.plan, tile.plan.roles, tile.n
    if len(roles.k) != 1 or roles.loops or _picks_along(plan, (*roles.n, *roles.k)) or n < 32:
        return None
    along = contiguity(plan.factors, roles.n[-1]) > 0
    if not along or contiguity(plan.factors, roles.k[-1]):
        return None
    places = output_places(plan, tile.extents)
    if places < ENOUGH_PROGRAMS * OWN_THREADS:
        return None
    if extent(roles.k, tile.extents) > SHORT_COLUMN and places * row_bytes(plan) < ENOUGH_BYTES:
        return None  # too few threads for so many steps
    n = _hardly_idle(extent(roles.n, tile.extents), min(n, 2 * OWN_THREADS))
    return Config(m=1, n=n, k=1, warps=1, stages=WINDOW_STEPS)


def _windows(tile: SummedTile) -> Config | None:
    """Sums of what lies beside each other: every thread has its own and reads the steps one after
    the other, for what neighbours share comes out of the cache.
    """
    plan, roles = tile.plan, tile.plan.roles
    summed, places = (*roles.k, *roles.loops), output_places(plan, tile.extents)
    if not summed or places < ENOUGH_PROGRAMS * OWN_THREADS:
        return None
    if _adds_up(_row_places(plan), roles.m, summed):
        most, sums = OWN_THREADS, WINDOW_SUMS
    elif _adds_up((a.indices[-1] for a in _reads(plan)), roles.n, summed):
        most = sums = WINDOW_ROW_BYTES // _widest(plan)
    else:
        return None
    n = min(most, tile.n)
    if tile.n > WINDOW_ROW:  # shorter rows are one tile's: neighbours read the same lines
        n = _hardly_idle(extent(roles.n, tile.extents), n)
    m = min(tile.m, max(1, sums // (n * _stride(plan))))
    return Config(m=m, n=n, k=1, warps=1, stages=WINDOW_STEPS)


def _any_other(tile: SummedTile) -> Config:
    plan, m, n, k = tile.plan, tile.m, tile.n, tile.k
    k = min(k, max(4, 1024 // n) if plan.roles.k and k < 128 or n > 16 else LONGEST_SUM // n)
    if plan.strategy == "atomic" and k > 1 and n * k <= SMALL_SUMS:
        # matrices of entries: a program waits for its sums, and small ones for less
        return Config(m=min(m, SMALL_SUMS // (n * k)), n=n, k=k, warps=2, stages=1)
    width = row_bytes(plan) if k == 1 and n >= 64 else 0
    m = min(m, max(1, (1024 if width >= 4 else 2048) // (n * k)))
    # every thread finds out anew where its row lies, so that few have many places of it each; what
    # only passes by takes as many threads as there are
    few = width == 4 and plan.strategy == "store" and not _reads_every_place(plan)
    return Config(m=m, n=n, k=k, warps=2 if few else 4, stages=1 if k == 1 else 2)


# --- what rules ask -------------------------------------------------------------------------------


def _reads_rows_of_sums(plan: Plan) -> bool:
    """Whether the summed variable walks memory in order, and those along N do not, but for less
    than there is a number of for each point.
    """
    roles = plan.roles
    if not roles.k or not contiguity(plan.factors, roles.k[-1]):
        return False
    if not any(contiguity(plan.factors, v) for v in roles.n):
        return True
    return any(own[-1] == roles.k[-1] for own in _every_point(plan))


def _every_point(plan: Plan) -> Iterator[list[str | None]]:
    """The variables of each factor that has a number for each point, in the order of its memory."""
    roles = plan.roles
    points = {*roles.grid, *roles.m, *roles.n, *roles.k, *roles.loops}
    for read in _reads(plan):
        own = [index.var for index in read.indices]
        if points <= {*own}:
            yield own


def _shares_sides(plan: Plan) -> bool:
    """Whether nothing is read at each point: all of it for a whole row, column or sum of a tile."""
    axes = tuple({*axis} for axis in (plan.roles.m, plan.roles.n, plan.roles.k))
    reads = [{*variables(a)} for f in plan.factors for a in accesses(f)]
    several = sum(any(axis & read for read in reads) for axis in axes) == len(axes)
    return several and not any(all(axis & read for axis in axes) for read in reads)


def _tiles(tile: SummedTile, m: int, n: int) -> int:
    """How many programs tiles of such sides make."""
    places = output_places(tile.plan, tile.extents)
    return math.ceil(places / (min(m, tile.m) * min(n, tile.n)))


def _picks_along(plan: Plan, axes: tuple[str, ...]) -> bool:
    """Whether index tensors are read along these variables."""
    indices = (a for read in _reads(plan) for index in read.indices for a in accesses(index))
    return any({*axes} & {*variables(a)} for a in indices)


def _shares_rows(plan: Plan) -> bool:
    """Whether a factor is summed for every place along M alike: it is read once for many."""
    summed, across = {*plan.roles.k}, {*plan.roles.m}
    read = [{*variables(f)} for f in plan.factors]
    return any(summed & vars_ and not across & vars_ for vars_ in read)


def _gathers_side_by_side(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether many outputs are sums over gathered rows, found by an index tensor that lies along
    the outputs and not along the sums: maps of pooling, and of convolutions channel by channel.
    """
    if not (plan.roles.m and plan.roles.n and plan.roles.k):
        return False
    reads = [a for f in plan.factors for a in accesses(f)]
    ends = {
        a.indices[-1].var for a in reads if len(a.indices) > 1 and a.tensor in plan.index_tensors
    }
    enough = output_places(plan, extents) >= ENOUGH_PROGRAMS * OWN_THREADS * OWN_SUMS // 4
    return enough and bool(ends & set(plan.roles.m)) and not ends & set(plan.roles.k)


def _gathers_a_list_each(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether many outputs are sums over gathered rows, of which each has a list of its own in an
    index tensor: neighbours that are interpolated, and bags of embeddings.
    """
    if not (plan.roles.m and plan.roles.n and plan.roles.k):
        return False
    reads = [a for f in plan.factors for a in accesses(f)]
    lists = [
        a
        for a in reads
        if a.tensor in plan.index_tensors and a.indices and a.indices[-1].var in plan.roles.k
    ]
    enough = output_places(plan, extents) >= ENOUGH_PROGRAMS * OWN_THREADS * OWN_SUMS // 4
    return enough and any({*plan.roles.m} & {*variables(a)} for a in lists)


def _reads_apart(plan: Plan) -> bool:
    """Whether what lies beside each other in a factor is gathered number by number, along N."""
    reads = [a for f in plan.factors for a in accesses(f)]
    ends = [a.indices[-1] for a in reads if a.indices and a.tensor not in plan.index_tensors]
    return any(any(True for _ in accesses(i)) and {*plan.roles.n} & {*variables(i)} for i in ends)


def _has_an_index_each(plan: Plan) -> bool:
    """Whether an index tensor is read at every place of a tile, and not once for many."""
    found = ({*variables(a)} for a in _reads(plan) if a.tensor in plan.index_tensors)
    return any({*plan.roles.m} & one and {*plan.roles.n} & one for one in found)


def _reads_every_place(plan: Plan) -> bool:
    """Whether a tensor has a number of its own for every place of the output."""
    kept = {*plan.roles.grid, *plan.roles.m, *plan.roles.n}
    return any(kept <= {index.var for index in a.indices} for a in _reads(plan))


def _reads(plan: Plan) -> Iterator[Access]:
    return (a for f in plan.factors for a in accesses(f) if a.indices)


def _row_places(plan: Plan) -> Iterator[Affine]:
    """The indices of all that is read, but for those of the last dimensions."""
    return (index for read in _reads(plan) for index in read.indices[:-1])


def _adds_up(places: Iterable[Affine], one_axis: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether something is read where places along two axes add up to: windows over each other."""
    along, across = {*one_axis}, {*other}
    names = ({*variables(i)} for i in places if not any(accesses(i)))
    return any(along & one and across & one for one in names)


def _widest(plan: Plan) -> int:
    """Bytes of the widest numbers that are multiplied."""
    kinds, inner = dict(plan.kinds), plan.index_tensors
    read = (kinds[a.tensor] for a in _reads(plan) if a.tensor not in inner and a.tensor in kinds)
    return max((BYTES.get(kind, WIDE_LOAD) for kind in read), default=4)


def _stride(plan: Plan) -> int:
    """How far apart windows begin, at most, as steps of loads: 1 or 2."""
    steps = (abs(by) for read in _reads(plan) for index in read.indices for by, _ in index.terms)
    return min(2, max(steps, default=1))


def _hardly_idle(number: int, most: int) -> int:
    """The widest tile, down to 32 columns, that ``number`` of them fill, or the last of eight.

    >>> [_hardly_idle(number, 128) for number in (128, 144, 72, 520, 1000, 192)]
    [128, 32, 32, 128, 128, 64]
    """
    sides = (most >> k for k in range(most.bit_length()))
    filled = (s for s in sides if s <= 32 or number % s == 0 or power_of_two(number) >= 8 * s)
    return next(filled)


def _filled(number: int, most: int) -> int:
    """The side of a tile, up to ``most``, of which no place is empty, or one of several.

    >>> [_filled(number, 8) for number in (3, 4, 5, 6, 7, 8)]
    [1, 4, 2, 2, 2, 8]
    """
    even = math.gcd(number, most)
    return 2 if even == 1 and number > 4 else even


def _is_turned(plan: Plan) -> bool:
    """Whether nothing is summed, and what is read lies along M and what is written along N."""
    along_m, along_n = (
        any(contiguity(plan.factors, v) for v in axis) for axis in (plan.roles.m, plan.roles.n)
    )
    return not plan.roles.k and not plan.roles.loops and along_m and not along_n
