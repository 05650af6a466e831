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
from insum.plan.guess_products import for_product
from insum.plan.guess_rows import (
    FEW_ENTRIES,
    MANY_LAUNCHES,
    TINY_ENTRIES,
    are_narrow,
    for_cut_rows,
    for_few_rows,
    for_rows,
    for_short_pieces,
    row_bytes,
    split_length,
)
from insum.plan.plan import Pattern, Plan
from insum.plan.roles import contiguity
from insum.plan.sizes import WIDE_LOAD, power_of_two
from insum.plan.tiling import (
    ENOUGH_PROGRAMS,
    LONG,
    SHORT,
    extent,
    held,
    in_rows,
    output_places,
    step_bytes,
)

#: Below so many entries a launch costs more than what its programs could gain by registers of their
#: own: short and long rows have one.
ONE_LAUNCH = 2**18
#: Points of several results of one kernel beyond which a warp takes one row.
LONG_TOGETHER = 256
#: Tiles of two elements a thread that straight-line code can hold at once.
MOST_TILES = 24
#: Threads of a tile that sum each its own, and how many outputs they take: as many halves as the
#: widest load has.
OWN_THREADS, OWN_SUMS = 128, 8
#: Steps of such sums that are read before the first is added.
OWN_STEPS = 9
#: Values of a tile that has one axis and sums nothing.
SINGLE_VALUES = 512
#: Values of a tile that sums and is put together before atomics.
SMALL_SUMS = 1024
#: Side of a tile that is read along one axis and written along the other: a line of memory each
#: way.
TURNED = 64
#: Numbers of a row that one thread reads by itself.
SHORT_ROW = 4
#: Bytes of shared memory that pipelines may take where there is the least of it.
SMALL_SHARED = 64 * 1024


def first_guess(plan: Plan, extents: Mapping[str, int], *, along_sum: bool = False) -> Config:
    """The config used when nobody tuned. ``along_sum``: both factors of a product of 32-bit numbers
    are read along the sum.
    """
    if plan.pattern:
        return _for_pattern(plan, plan.pattern, extents)
    if plan.roles.dot:
        return for_product(plan, extents, along_sum=along_sum)
    if plan.segment:
        return for_rows(plan, extents, long=False)
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
    narrow = are_narrow(plan, extents, guess.n)
    if MANY_LAUNCHES <= entries < TINY_ENTRIES and not (narrow or plan.roles.loops):
        guess = for_few_rows(guess)
    elif split and entries < FEW_ENTRIES and not narrow:
        guess = for_cut_rows(guess)
    short = 0 < split <= SHORT and not narrow
    long = for_short_pieces(guess) if short else for_rows(plan, extents, long=True)
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
        if m * k <= SHORT_ROW and n >= 64:  # as of positions: a thread for each
            return Config(m=m, n=min(n, 256), k=k, warps=8, stages=1)
        if m * k <= (128 if m > 1 else 64) and n >= 32:  # and all that lies beside it
            n = min(n, 2048 // (m * k))
            return Config(m=m, n=n, k=k, warps=max(1, m * n * k // 1024), stages=1)
        if 1 < m <= 8 and n >= 32:
            # what lies beside each other, or is shared by several sums, in steps
            k = min(k, 32)
            return Config(m=m, n=8, k=k, warps=max(1, m * 8 * k // 1024), stages=1)
        # gathered in steps of a load or two, while the next is on its way
        if plan.index_tensors and m == 1 and k == 128 and n >= 16:
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
    if k < 128 and _gathers_a_list_each(plan, extents):
        # the same; a thread has as much of a row as the widest load
        even = math.gcd(extent(plan.roles.n, extents), n)
        n = even if even >= 32 else n
        m = min(m, max(1, OWN_THREADS * (WIDE_LOAD // row_bytes(plan)) // n))
        steps = min(extent(plan.roles.k, extents), OWN_STEPS)
        return Config(m=m, n=n, k=1, warps=OWN_THREADS // 32, stages=steps)
    if plan.roles.k and k >= 1024 and output_places(plan, extents) < 2 * ENOUGH_PROGRAMS * n:
        # long sums over few columns: more programs, and more rows in flight
        wide = 128 // row_bytes(plan)  # a line of memory
        if n >= wide and m >= 4 and _shares_rows(plan):
            return Config(m=min(m, 16), n=min(n, wide), k=4, warps=4, stages=2)
        n = min(n, 32)
        return Config(m=1, n=n, k=max(32, 1024 // n), warps=8, stages=1)
    if plan.roles.m and not plan.roles.k and _reads_apart(plan):
        # a load for each number: few of them for each thread
        return Config(m=min(m, 2), n=n, warps=2, stages=1)
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


def _gathers_a_list_each(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether many outputs are sums over gathered rows, of which each has a list of its own in an
    index tensor: neighbours that are interpolated, and bags of embeddings.
    """
    if not (plan.roles.m and plan.roles.n and plan.roles.k):
        return False
    reads = [a for f in plan.factors if not isinstance(f, Number) for a in accesses(f)]
    lists = [
        a
        for a in reads
        if a.tensor in plan.index_tensors and a.indices and a.indices[-1].var in plan.roles.k
    ]
    enough = output_places(plan, extents) >= ENOUGH_PROGRAMS * OWN_THREADS * OWN_SUMS // 4
    return enough and any({*plan.roles.m} & {*variables(a)} for a in lists)


def _reads_apart(plan: Plan) -> bool:
    """Whether what lies beside each other in a factor is gathered number by number, along N."""
    reads = [a for f in plan.factors if not isinstance(f, Number) for a in accesses(f)]
    ends = [a.indices[-1] for a in reads if a.indices and a.tensor not in plan.index_tensors]
    return any(any(True for _ in accesses(i)) and {*plan.roles.n} & {*variables(i)} for i in ends)


def _is_turned(plan: Plan) -> bool:
    """Whether nothing is summed, and what is read lies along M and what is written along N."""
    along_m, along_n = (
        any(contiguity(plan.factors, v) for v in axis) for axis in (plan.roles.m, plan.roles.n)
    )
    return not plan.roles.k and not plan.roles.loops and along_m and not along_n
