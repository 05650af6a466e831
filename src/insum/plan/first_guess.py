"""The first guess: tile sizes from a plan and its extents, good enough that no search is needed.

The numbers are properties of tiles, not of applications: matrix instructions want a side of at
least 64 on M, accumulators and operands have to fit the registers, and gathers want enough
independent loads in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insum.lang.expr import variables
from insum.plan.config import Choice, Config
from insum.plan.guess_products import for_product
from insum.plan.guess_rows import (
    FEW_ENTRIES,
    MANY_LAUNCHES,
    TINY_ENTRIES,
    are_narrow,
    are_scarce,
    for_cut_rows,
    for_few_rows,
    for_rows,
    for_scarce_rows,
    for_short_pieces,
    split_length,
)
from insum.plan.guess_sums import for_sum
from insum.plan.plan import Pattern, Plan
from insum.plan.sizes import power_of_two
from insum.plan.tiling import (
    LONG,
    SHORT,
    extent,
    held,
    in_rows,
    step_bytes,
    sums_columns,
)

#: Below so many entries a launch costs more than what its programs could gain by registers of their
#: own: short and long rows have one.
ONE_LAUNCH = 2**18
#: Points of several results of one kernel beyond which a warp takes one row.
LONG_TOGETHER = 256
#: Tiles of two elements a thread that straight-line code can hold at once.
MOST_TILES = 24
#: Bytes of shared memory that pipelines may take where there is the least of it.
SMALL_SHARED = 64 * 1024


def first_guess(plan: Plan, extents: Mapping[str, int], *, along_sum: bool = False) -> Config:
    """The config used when nobody tuned. ``along_sum``: both factors of a product of 32-bit numbers
    are read along the sum.
    """
    if plan.pattern:
        return _for_pattern(plan, plan.pattern, extents)
    if plan.roles.dot:
        guess = for_product(plan, extents, along_sum=along_sum)
        m, n = held(plan, extents, 1, 1)  # whatever a rule has made smaller
        return replace(guess, m=max(guess.m, m), n=max(guess.n, n))
    if plan.segment:
        return for_rows(plan, extents, long=False)
    return for_sum(plan, extents)


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
    if guess.n == 1:
        split = split_length(longest, entries, alone=True)
        return replace(guess, split=split), for_rows(plan, extents, long=True)
    split, narrow = split_length(longest, entries), are_narrow(plan, extents, guess.n)
    whole = narrow or bool(plan.roles.loops) or sums_columns(plan)
    if not whole and are_scarce(plan, extents):
        guess = for_scarce_rows(plan, guess)
    elif MANY_LAUNCHES <= entries < TINY_ENTRIES and not whole:
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


def suited(plan: Plan, extents: Mapping[str, int], choice: Choice, architecture: str) -> Choice:
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
    least = held(plan, extents, 1, 1)
    return tuple(_halved(one, *least) if _spills(plan, one, most) else one for one in choice)


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


def _halved(config: Config, least_m: int, least_n: int) -> Config:
    """Half a tile, cut across its wide side, or across the other where one tile holds all of it."""
    low, narrow = replace(config, m=config.m // 2), replace(config, n=config.n // 2)
    found = (narrow, low) if config.n > config.m else (low, narrow)
    return next((one for one in found if one.m >= least_m and one.n >= least_n), config)
