"""The first guess: tile sizes from a plan and its extents, good enough that no search is needed.

The numbers are properties of tiles, not of applications: matrix instructions want a side of at
least 64 on M, accumulators and operands have to fit the registers, and gathers want enough
independent loads in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from insum.lang.expr import Number, accesses, variables
from insum.plan.config import Choice, Config
from insum.plan.plan import Pattern, Plan
from insum.plan.roles import FLATTEN_UP_TO, contiguity
from insum.plan.sizes import WIDE_LOAD, power_of_two
from insum.plan.tiling import (
    BYTES,
    ENOUGH_PROGRAMS,
    HIGH,
    LARGE_SIDE,
    LONG,
    SHORT,
    dividing,
    extent,
    gathers_along,
    gathers_places,
    held,
    in_rows,
    inner_extent,
    is_dense,
    is_large,
    k_tile,
    least_n,
    output_places,
    step_bytes,
    walks_entries,
    walks_matrices,
)

#: Points of several results of one kernel beyond which a warp takes one row.
LONG_TOGETHER = 256
#: Tiles of two elements a thread that straight-line code can hold at once.
MOST_TILES = 24
#: Entries at which a long row is cut into pieces (where one thread has a row, and where many have),
#: and the length up to which rows are left whole.
SPLIT_ALONE, SPLIT_AT = 16, 128
LEAVE_WHOLE = 64
#: Below so many entries rows are left whole, for one launch is all that it is worth.
MANY_LAUNCHES = 4096
#: Below so many entries a launch costs more than what its programs could gain by registers of their
#: own: short and long rows have one.
ONE_LAUNCH = 2**18
#: Below so many entries the device is not full of whole rows, and they are cut short.
FEW_ENTRIES, CUT_FEW = 2**18, 32
#: And shorter still below so many.
FEWER_ENTRIES, CUT_FEWER = 100_000, 16
#: Below so many, the device is nowhere near full, and waiting for one gather after the other is all
#: there is.
TINY_ENTRIES = 2**15
#: Columns up to which rows are narrow, entries from which on they are not short, and bytes that one
#: warp reads of such rows at once.
NARROW_ROW, SHORT_ROW, NARROW_BYTES = 32, 6, 4096
#: Threads of a tile that sum each its own, and how many outputs they take: as many halves as the
#: widest load has.
OWN_THREADS, OWN_SUMS = 128, 8
#: Steps of such sums that are read before the first is added.
OWN_STEPS = 9
#: Values of a tile that has one axis and sums nothing.
SINGLE_VALUES = 512
#: Values of a tile that sums and is put together before atomics.
SMALL_SUMS = 1024
#: Columns in tiles of which the last may be half empty.
MANY_COLUMNS = 512
#: Side of a tile that is read along one axis and written along the other: a line of memory each
#: way.
TURNED = 64
#: Shared memory for the operands of one program.
PIPELINE_BYTES = 72 * 1024
#: And where there is the least of it.
SMALL_SHARED = 64 * 1024


def first_guess(plan: Plan, extents: Mapping[str, int], *, along_sum: bool = False) -> Config:
    """The config used when nobody tuned. ``along_sum``: both factors of a product of 32-bit numbers
    are read along the sum.
    """
    if plan.pattern:
        return _for_pattern(plan, plan.pattern, extents)
    if plan.roles.dot:
        found = _for_gathered_rows(plan, extents)
        if found is None and along_sum:
            found = _for_wide_numbers(plan, extents)
        return found or _for_dot(plan, extents, along_sum=along_sum)
    if plan.segment:
        return _for_rows(plan, extents, long=False)
    return _for_sum(plan, extents)


def _for_pattern(plan: Plan, pattern: Pattern, extents: Mapping[str, int]) -> Config:
    """Straight-line code holds many tiles in registers at once: the more, the smaller they are."""
    n = min(64, power_of_two(extent(plan.roles.n, extents)))
    if any(plan.roles.n[0] not in variables(one.pattern.points[0][0]) for one in plan.beside):
        return _for_several(plan, pattern, extents)
    few = len(pattern.points) <= LONG
    if plan.segment:  # a few entries of a row at a time, for many are short
        elements = 2 if _tiles_at_once(plan, pattern) <= MOST_TILES else 1
        return Config(m=1, n=n, k=2, warps=max(1, n * 2 // (32 * elements)), stages=1)
    if plan.roles.k:
        k = min(64, power_of_two(extent(plan.roles.k, extents)))
        if not few and not plan.roles.m and not plan.roles.loops and k >= 16:
            # rows are summed: a warp takes a few, an element or two of each of its tiles
            n = min(n, max(1, 4 * 32 // k))
            return Config(m=1, n=n, k=k, warps=max(1, n * k // 64), stages=1)
        # short patterns leave room for more programs
        m = max(1, (256 if few else 512) // (n * k)) if plan.roles.m else 1
        # several such tiles are in registers at once
        return Config(m=m, n=n, k=k, warps=max(1, min(8, m * n * k // 512)), stages=1)
    if plan.roles.n[0] not in variables(plan.target):
        # summed at the end, so that one tile holds all of it
        n = power_of_two(extent(plan.roles.n, extents))
        return Config(
            m=max(1, 64 // n) if plan.roles.m else 1, n=n, warps=max(1, n // 64), stages=1
        )
    # nothing to sum: as large a tile as the stores can use
    if not plan.roles.loops and plan.roles.m:
        wide = 1024 if few else 256
        m = min(power_of_two(extent(plan.roles.m, extents)), max(1, wide // n))
        return Config(m=m, n=n, warps=4, stages=1)
    return Config(m=max(1, 64 // n) if plan.roles.m else 1, n=n, warps=1, stages=1)


def _for_several(plan: Plan, pattern: Pattern, extents: Mapping[str, int]) -> Config:
    """Several results of the same points, some of which are sums over columns: a row of columns is
    one warp's, where it can be, so that sums over it stay within one; of short patterns with more
    elements for each thread.
    """
    n = power_of_two(extent(plan.roles.n, extents))
    points = len(pattern.points) + sum(len(one.pattern.points) for one in plan.beside)
    elements = 4 if points <= LONG else 2
    rows = 1 if points > LONG_TOGETHER else max(1, min(4, 32 * elements // n))
    warps = max(1, n // (32 * elements))
    if plan.segment:
        return Config(m=1, n=n, k=rows, warps=warps, stages=1)
    return Config(m=rows, n=n, warps=warps, stages=1)


def _tiles_at_once(plan: Plan, pattern: Pattern) -> int:
    """Tiles that straight-line code over the entries of rows holds all along: its outputs, and of
    its factors all but the one that comes in most forms, which is read when it is used.
    """
    columns = set(plan.roles.n)
    forms = [
        len({point[1][f] for point in pattern.points})
        for f, factor in enumerate(pattern.points[0][1])
        if columns & set(variables(factor))
    ]
    return len({target for target, _ in pattern.points}) + sum(forms) - max(forms, default=0)


def first_choice(
    plan: Plan,
    extents: Mapping[str, int],
    *,
    longest: int = 0,
    entries: int = 0,
    along_sum: bool = False,
) -> Choice:
    """The first guess for every kind of launch: one config, or two for short and long rows of a
    segmented output.
    """
    guess = first_guess(plan, extents, along_sum=along_sum)
    if not in_rows(plan):
        return (guess,)
    split = split_length(longest, entries, alone=guess.n == 1)
    narrow = 1 < guess.n <= NARROW_ROW and guess.k >= 8  # as `_for_narrow_rows` has it
    if MANY_LAUNCHES <= entries < TINY_ENTRIES and not (narrow or plan.roles.loops):
        guess = _for_few_rows(guess)
    elif split and entries < FEW_ENTRIES and not narrow:
        guess = _for_pieces(guess)
    short = 0 < split <= SHORT and not narrow
    long = _short_pieces(guess) if short else _for_rows(plan, extents, long=True)
    if entries < ONE_LAUNCH:
        long = replace(long, warps=guess.warps, stages=guess.stages)
    return replace(guess, split=split), long


def in_one_launch(choice: Choice, entries: float) -> bool:
    """Whether short rows and long ones are in one launch, of programs that have as many warps."""
    short, long = choice
    return entries < ONE_LAUNCH and short.warps == long.warps


def suited(plan: Plan, choice: Choice, architecture: str) -> Choice:
    """The first guess is made for Hopper; on NVIDIA's other architectures its largest tiles would
    spill, and half of them does not. An N of 8 is a matter of NVIDIA's older instructions. AMD's
    have less shared memory.
    """
    if architecture.startswith("sm_9"):
        return choice
    if plan.roles.dot and not architecture.startswith("sm_8"):
        choice = tuple(replace(one, n=max(16, one.n)) for one in choice)
    if architecture.startswith("gfx"):
        return tuple(_within(plan, one) for one in choice)
    most = 128 * 64 if plan.precision == "tf32x3" and architecture.startswith("sm_8") else 128 * 128
    return tuple(_halved(one) if _spills(plan, one, most) else one for one in choice)


def _within(plan: Plan, config: Config) -> Config:
    """With no more buffers than fit."""
    if not plan.roles.dot:
        return config
    buffers = SMALL_SHARED // step_bytes(plan, config)
    return replace(config, stages=max(1, min(config.stages, 1 + buffers)))


def _spills(plan: Plan, config: Config, most: int) -> bool:
    """``most``: numbers of a tile that four warps cannot hold; eight can hold twice as many, unless
    bounds, or the parts of exact products, take registers, too.
    """
    if config.warps == 4:
        return config.m * config.n >= most
    crowded = bool(plan.bounds) or plan.precision == "tf32x3"
    return crowded and config.m * config.n >= 2 * most


def _halved(config: Config) -> Config:
    """Half a tile, cut across its wide side."""
    if config.n > config.m:
        return replace(config, n=config.n // 2)
    return replace(config, m=config.m // 2)


def split_length(longest: int, entries: int, *, alone: bool = False) -> int:
    """Entries at which rows are cut; 0: rows stay whole, where they are even or the whole thing is
    small. ``alone``: a thread walks through a row by itself.
    """
    if longest <= SHORT or entries < MANY_LAUNCHES:
        return 0
    if entries < FEW_ENTRIES:
        return CUT_FEWER if entries < FEWER_ENTRIES else CUT_FEW
    if longest <= LEAVE_WHOLE:
        return 0
    return SPLIT_ALONE if alone else SPLIT_AT


def _for_dot(plan: Plan, extents: Mapping[str, int], *, along_sum: bool) -> Config:
    size = BYTES.get(plan.operand, 4)
    m_all, n_all = (power_of_two(extent(a, extents)) for a in (plan.roles.m, plan.roles.n))
    cap = 128 if size == 2 else 64
    # TF32 multiplies each number once, as half precision does, and takes as deep steps
    k = k_tile(plan, extents, 2 if plan.precision == "tf32" else size)
    m, n = max(16, min(m_all, cap)), max(least_n(plan) if k <= 32 else 16, min(n_all, cap))
    if n <= 32 and m_all >= 256 and size == 2 and not _fills_deep_tile(plan, extents, k):
        m = 256
    if m == HIGH and k <= 32 and n_all >= 256 and size == 2 and walks_matrices(plan):
        n = 256  # of a shallow tile that is no wider than high, less is read than multiplied
    across = plan.precision == "tf32" and not along_sum and len(plan.roles.m) == 1
    in_registers = across or plan.precision == "tf32x3" and (k <= 32 or not along_sum)
    if size == 4 and (n <= 16 or plan.onehot < 0 and in_registers and not plan.pointwise):
        m = max(16, min(m_all, 128))  # what is brought to registers first is used for more
    m, n = held(plan, extents, m, n)
    if gathers_places(plan) and plan.onehot < 0:  # whose addresses take registers, too
        return Config(m=min(m, LARGE_SIDE), n=n, k=min(k, 32), warps=4, stages=3)
    if (m, n) == (LARGE_SIDE, LARGE_SIDE) and is_large(plan, extents):
        return Config(m=m, n=2 * n, k=k, warps=8, stages=3)
    if plan.roles.loops and (m, n) == (LARGE_SIDE, LARGE_SIDE) and is_dense(plan):
        # places in flattened axes, and bounds, take registers
        several = plan.bounds or len(plan.roles.m) > 1 or len(plan.roles.n) > 1
        return Config(m=m, n=n, k=k, warps=8 if several else 4, stages=3)
    if size == 2 and plan.index_tensors and not plan.segment and plan.onehot < 0:
        few = _for_few_tiles(plan, extents, m, n)
        if few is not None:
            return few
    warps = 8 if m * n >= 128 * 256 else 4
    if plan.segment and walks_entries(plan) and m >= LARGE_SIDE and size == 2:
        at_once = _programs(plan, extents, m, n) < ENOUGH_PROGRAMS
        if at_once and (n >= LARGE_SIDE or not walks_matrices(plan)):
            return _for_few_segments(plan, extents, m, n, k)
        if n >= LARGE_SIDE:
            return _for_large_entries(plan, extents, m, n, k)
    # As many buffers as leave room for three programs on a multiprocessor: their waits overlap
    # better than deeper pipelines do.
    most = 2 if n <= 32 < k and walks_matrices(plan) else 3  # narrow and deep: more programs
    stages = max(2, min(most, PIPELINE_BYTES // ((m + n) * k * size)))
    return Config(m=m, n=n, k=k, warps=warps, stages=stages)


def _for_gathered_rows(plan: Plan, extents: Mapping[str, int]) -> Config | None:
    """Entries that gather a row for each place along M, or sum them along K: the narrower the rows,
    the more a step is all waiting, and the more programs have to wait at once. None where sums are
    exact, of several parts, and where tiles as of any other product do.
    """
    size = BYTES.get(plan.operand, 4)
    m, n = (power_of_two(extent(axis, extents)) for axis in (plan.roles.m, plan.roles.n))
    exact = size == 4 and plan.precision != "tf32"
    if exact or plan.pointwise or plan.onehot >= 0 or held(plan, extents, m, n) != (m, n):
        return None
    if gathers_along(plan, plan.roles.k):
        small = max(m, n) <= 32 <= extents[plan.roles.k[-1]]
        return Config(max(16, m), max(16, n), 256 // size, warps=1, stages=3) if small else None
    return _for_rows_along_m(plan, extents, n) if gathers_along(plan, plan.roles.m) else None


def _for_rows_along_m(plan: Plan, extents: Mapping[str, int], n: int) -> Config | None:
    size, inner = BYTES.get(plan.operand, 4), extents[plan.roles.k[-1]]
    programs = _programs(plan, extents, LARGE_SIDE, min(n, LARGE_SIDE))
    many = programs >= ENOUGH_PROGRAMS
    if n <= 32 or n <= HIGH and inner <= 32:
        deep = inner > 128 // size and (size == 4 or not many)  # long strides are better
        if deep or size == 4 and inner != power_of_two(inner):
            return None
        k = max(16, min(power_of_two(inner), 128 // size))
        n = max(n, least_n(plan) if k <= 32 else 16)
        return Config(HIGH, n, k, warps=4, stages=3 if (HIGH + n) * k * size < 8192 else 2)
    if n == HIGH and many and (inner >= HIGH or size == 4):
        return Config(LARGE_SIDE, n, HIGH, warps=8, stages=2 if inner <= HIGH or size == 4 else 3)
    lasting = ENOUGH_PROGRAMS // 2 <= programs < ENOUGH_PROGRAMS * 5 // 4
    k, joined = 128 // size, inner_extent(plan, extents)
    if n >= LARGE_SIDE and lasting and (many or size == 4 and n == LARGE_SIDE) and k % joined == 0:
        # the longest list decides: one program on a multiprocessor, which shares with nobody
        return Config(LARGE_SIDE, LARGE_SIDE, k, warps=8, stages=4)
    return None


def _for_wide_numbers(plan: Plan, extents: Mapping[str, int]) -> Config | None:
    """32-bit numbers that matrix instructions read as they lie: gathered rows are used for as many
    outputs as a tile can have. None where few outputs, or few tiles, leave small ones ahead.
    """
    m_all, n_all = (power_of_two(extent(a, extents)) for a in (plan.roles.m, plan.roles.n))
    if min(m_all, n_all) < LARGE_SIDE or plan.onehot >= 0 or plan.pointwise:
        return None
    # Three products of parts take registers, too; and atomics, sums in shared memory.
    widest = plan.precision == "tf32" and plan.strategy != "atomic" and n_all > LARGE_SIDE
    for n in (2 * LARGE_SIDE, LARGE_SIDE) if widest else (LARGE_SIDE,):
        if _programs(plan, extents, LARGE_SIDE, n) >= ENOUGH_PROGRAMS:
            k = k_tile(plan, extents, 4)
            return Config(m=LARGE_SIDE, n=n, k=k, warps=8, stages=3)
    return None


def _programs(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> int:
    """How many tiles there are."""
    tiles = extent(plan.roles.m, extents) / m, extent(plan.roles.n, extents) / n
    others = {*plan.roles.grid, *([plan.segment.row] if plan.segment else [])}
    return math.prod(map(math.ceil, tiles)) * math.prod(extents[v] for v in others)


def _for_large_entries(plan: Plan, extents: Mapping[str, int], m: int, n: int, k: int) -> Config:
    """A tile takes its own few steps, so filling the pipeline counts: more warps have more gathers
    in flight, or where an entry is read at one place, shallow steps have more buffers.
    """
    inner = inner_extent(plan, extents)
    fits = 32 % inner == 0 or inner != power_of_two(inner)
    if fits and walks_matrices(plan):
        return Config(m=m, n=n, k=32, warps=4, stages=4)
    # rows that are gathered along K are brought to the accumulators of few warps sooner
    return Config(m=m, n=n, k=k, warps=4 if gathers_along(plan, plan.roles.k) else 8, stages=3)


def _for_few_segments(plan: Plan, extents: Mapping[str, int], m: int, n: int, k: int) -> Config:
    """All tiles run at once, so that the longest decides: half the tile, and longer strides through
    its steps.
    """
    depth = extents[plan.roles.k[-1]]
    if n >= LARGE_SIDE or depth > FLATTEN_UP_TO or depth == power_of_two(depth):
        k = _deep(depth, LARGE_SIDE)
    return Config(m=m // 2, n=n, k=k, warps=4, stages=2 if k > 32 else 4 if n >= LARGE_SIDE else 3)


def _for_few_tiles(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> Config | None:
    """Smaller tiles, where so few would fill the device that the steps of one decide: more of them
    run at once, and a step waits for less. None where there are enough, or nothing to cut.
    """

    whole = m, n
    while _programs(plan, extents, m, n) < ENOUGH_PROGRAMS // 2 and (m > HIGH or n > 32):
        m, n = (m // 2, n) if m > HIGH else (m, n // 2)
    if (m, n) == whole or len(plan.roles.k) > 1:
        return None
    k = dividing(extents[plan.roles.k[0]], LARGE_SIDE)
    return Config(
        m=m, n=n, k=k, warps=4, stages=max(2, min(4, PIPELINE_BYTES // ((m + n) * k * 2)))
    )


def _fills_deep_tile(plan: Plan, extents: Mapping[str, int], k: int) -> bool:
    """Whether one entry fills a deep tile: then more programs on half the width are better than
    fewer on the whole.
    """
    return k > 32 and inner_extent(plan, extents) == k


def _deep(extent: int, most: int) -> int:
    """The depth of a tile in few long strides: all of what is summed, where it fits."""
    even = dividing(extent, most)
    return most if even < HIGH and most // 2 < extent <= most else even


def _for_rows(plan: Plan, extents: Mapping[str, int], *, long: bool) -> Config:
    """Tiles of several short rows, or of one long piece with many gathers in flight."""
    columns = extent(plan.roles.n, extents) if plan.roles.n else 1
    wide = row_bytes(plan) == 4
    n = _row_tile(columns, wide=wide)
    narrow = n > 1 and _reads_narrow_rows(plan)
    if narrow:  # each load fetches little: of rows less at once, and of more of them
        n = min(n, 64)
    if long:
        m = min(max(1, 64 // n), power_of_two(extent(plan.roles.m[1:], extents)))
        k = max(16, min(64, 2048 // (m * n)))
        if 1 < n <= 32:  # few lines of memory for each warp at a time
            k = max(16, min(128 if n <= 8 else 64, 4096 // (m * n * row_bytes(plan))))
        return Config(m=m, n=n, k=k, warps=1 if m * n <= 128 else 2, stages=1)
    if n == 1:  # a thread for each row
        return Config(m=64, n=1, k=1, warps=2, stages=1)
    if _are_narrow(plan, extents, n):
        return _for_narrow_rows(plan, n)
    m = max(1, min(64, 512 // n))
    if narrow:
        return Config(m=m, n=n, k=4, warps=1, stages=1)
    if columns % n and wide and n <= 32:  # few threads of a row have something to read
        return Config(m=max(1, m // 2), n=n, k=4, warps=1, stages=1)
    # where rows end inside of tiles, one warp waits for fewer threads that read nothing
    idle = columns % n > 0 and (n == 64 and not wide or n > 128)
    return Config(m=m, n=n, k=2, warps=1 if idle else 2, stages=1)


def _are_narrow(plan: Plan, extents: Mapping[str, int], n: int) -> bool:
    """Whether rows of few columns, which fill their tile, have entries enough to be read many at a
    time.
    """
    assert plan.segment is not None
    entries, rows = extents[plan.segment.var], max(1, extents[plan.segment.row])
    filled = n <= 8 or extent(plan.roles.n, extents) % n == 0
    return n <= NARROW_ROW and filled and len(plan.roles.m) == 1 and entries >= SHORT_ROW * rows


def _for_narrow_rows(plan: Plan, n: int) -> Config:
    """All entries of a short row at once, of as many rows as leave each thread of one warp some
    dozens of loads.
    """
    k, read = 16 if n <= 8 else 8, (a for f in plan.factors for a in accesses(f, nested=False))
    gathered = sum(bool(a.indices) and a.indices[-1].var in plan.roles.n for a in read)
    row = n * k * row_bytes(plan) * power_of_two(max(1, gathered))
    return Config(m=max(1, min(32, NARROW_BYTES // row)), n=n, k=k, warps=1, stages=1)


def row_bytes(plan: Plan) -> int:
    """Bytes of the numbers that rows of columns are read in."""
    kinds = dict(plan.kinds)
    read = [
        BYTES.get(kinds[a.tensor], WIDE_LOAD)
        for f in plan.factors
        for a in accesses(f)
        if a.indices and a.indices[-1].var in plan.roles.n and a.tensor in kinds
    ]
    return max(read, default=4)


def _reads_narrow_rows(plan: Plan) -> bool:
    """Whether rows begin where no widest load may."""
    kinds, strides = dict(plan.kinds), dict(plan.strides)
    rows = (
        (a.tensor, strides[a.tensor].units)
        for f in plan.factors
        for a in accesses(f)
        if len(a.indices) > 1 and a.indices[-1].var in plan.roles.n and a.tensor in strides
    )
    return any(
        -WIDE_LOAD < unit * BYTES.get(kinds[name], WIDE_LOAD) < 0
        for name, units in rows
        for unit in units[:-1]
    )


def _row_tile(columns: int, *, wide: bool) -> int:
    """Columns of a tile of gathered rows: a wide tile has few rows in flight, and one that columns
    do not fill wastes threads. Rows of float32 that end inside of any tile are read whole.
    """
    n = min(128, power_of_two(columns))
    if n < 128 or columns % 128 == 0 or not 128 < columns < MANY_COLUMNS:
        return n
    return 256 if wide and columns % 32 and columns < 256 else 64


def _for_few_rows(guess: Config) -> Config:
    """More gathers in flight, for lack of other programs to hide them behind."""
    n = min(guess.n, 64)
    return replace(guess, m=max(1, min(64, guess.m * guess.n // n)), n=n, k=8)


def _for_pieces(guess: Config) -> Config:
    """Half the rows for half the warps: rows were cut into pieces of even length, and more programs
    than the device holds balance what is left.
    """
    return replace(guess, m=max(1, guess.m // 2), warps=1)


def _short_pieces(short: Config) -> Config:
    """Pieces of rows that were cut short, in as few steps as registers allow."""
    k = max(1, min(SPLIT_ALONE, 1024 * short.warps // short.n))
    return replace(short, m=max(1, min(64, 512 * short.warps // (short.n * k))), k=k)


def _for_sum(plan: Plan, extents: Mapping[str, int]) -> Config:
    n, k, m = (
        power_of_two(extent(a, extents)) if a else 1
        for a in (plan.roles.n, plan.roles.k, plan.roles.m)
    )
    if plan.onehot >= 0:
        m, n = held(plan, extents, min(m, 16), min(n, 64))
        if not {*plan.roles.m, *plan.roles.n} & set(variables(plan.target.indices[plan.onehot])):
            # the register tile has a third axis, the scattered one
            n, m = min(n, 32), 1 if plan.roles.m else m
        k = min(k, 16, max(4, 1024 // (m * n)))
        return Config(m=m, n=n, k=k, warps=max(1, min(4, m * n * k // 2048)), stages=2)
    if plan.roles.n and not set(plan.roles.n) & set(variables(plan.target)):
        # N is summed after the loop, so one tile holds all of it
        k = min(k, max(1, 2048 // (n * m)))
        return Config(m=m, n=n, k=k, warps=max(1, min(4, m * n * k // 1024)), stages=2)
    if (
        plan.roles.k
        and contiguity(plan.factors, plan.roles.k[-1])
        and not any(contiguity(plan.factors, v) for v in plan.roles.n)
    ):
        k = min(k, 128)  # the summed variable walks memory in order: read whole rows of it
        if m * k <= 64 and n >= 32:  # and all that lies beside it
            n = min(n, 2048 // (m * k))
            return Config(m=m, n=n, k=k, warps=max(1, m * n * k // 1024), stages=1)
        if (
            m == 1 and k == 128 and n >= 16
        ):  # in steps of a load or two, while the next is on its way
            return Config(m=1, n=16, k=32, warps=4, stages=2)
        n = min(n, max(1, 2048 // k))
    if _is_turned(plan) and min(m, n) >= TURNED // 2:
        return Config(m=min(m, TURNED), n=min(n, TURNED), warps=4, stages=1)
    if max(m, n) == m * n * k:
        # single values: as many of them for each thread as the widest load has
        m, n = min(m, SINGLE_VALUES), min(n, SINGLE_VALUES)
        return Config(m=m, n=n, warps=4, stages=1)
    n = min(n, 128)
    if k < 128 and _gathers_side_by_side(plan, extents):
        # every thread sums what is its own, one after the other: nothing is put together at the end
        n = min(n, 64)
        m = min(m, OWN_THREADS * min(n, OWN_SUMS) // n)
        return Config(m=m, n=n, k=1, warps=OWN_THREADS // 32, stages=min(k, OWN_STEPS))
    if plan.roles.k and k >= 1024 and output_places(plan, extents) < 2 * ENOUGH_PROGRAMS * n:
        # long sums over few columns: more programs, and more rows in flight
        wide = 128 // row_bytes(plan)  # a line of memory
        if n >= wide and m >= 4 and _shares_rows(plan):
            return Config(m=min(m, 16), n=min(n, wide), k=4, warps=4, stages=2)
        return Config(m=1, n=min(n, 64), k=128, warps=8, stages=1)
    k = min(k, max(4, 1024 // n)) if plan.roles.k and k < 128 or n > 16 else k
    if plan.strategy == "atomic" and k > 1 and n * k <= SMALL_SUMS:
        # matrices of entries: a program waits for its sums, and small ones for less
        return Config(m=min(m, SMALL_SUMS // (n * k)), n=n, k=k, warps=2, stages=1)
    m = min(m, max(1, 2048 // (n * k)))
    return Config(m=m, n=n, k=k, warps=4, stages=1 if k == 1 else 2)


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
    reads = [a for f in plan.factors if not isinstance(f, Number) for a in accesses(f)]
    ends = {
        a.indices[-1].var for a in reads if len(a.indices) > 1 and a.tensor in plan.index_tensors
    }
    enough = output_places(plan, extents) >= ENOUGH_PROGRAMS * OWN_THREADS * OWN_SUMS // 4
    return enough and bool(ends & set(plan.roles.m)) and not ends & set(plan.roles.k)


def _is_turned(plan: Plan) -> bool:
    """Whether nothing is summed, and what is read lies along M and what is written along N."""
    along_m, along_n = (
        any(contiguity(plan.factors, v) for v in axis) for axis in (plan.roles.m, plan.roles.n)
    )
    return not plan.roles.k and not plan.roles.loops and along_m and not along_n
