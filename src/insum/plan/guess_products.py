"""The first guess for matrix products: tiles that matrix instructions can use, with as many buffers
and warps as what they gather has to wait for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from insum.lang.expr import Access
from insum.plan.config import Config
from insum.plan.guess_rows import is_narrow_row
from insum.plan.plan import Plan
from insum.plan.roles import FLATTEN_UP_TO, SMALLEST_DOT
from insum.plan.sizes import NARROW_LOAD, power_of_two
from insum.plan.tiling import (
    BYTES,
    ENOUGH_PROGRAMS,
    HIGH,
    LARGE_SIDE,
    LEAST_CUT,
    MANY_STEPS,
    dividing,
    extent,
    gathers_along,
    gathers_places,
    held,
    inner_extent,
    is_dense,
    is_large,
    k_tile,
    least_n,
    steps_of_program,
    walks_entries,
    walks_matrices,
)

#: Shared memory for the operands of one program.
PIPELINE_BYTES = 72 * 1024
#: Depth of a matrix instruction in half precision.
SHALLOW = 16
#: Height of a tile of which many run at once.
LOW = 32
#: A sum that is cut into pieces, whatever the output.
LONG_SUM = 4096
#: Numbers of operands that a thread reads one by one.
OWN_NUMBERS = 32


def for_product(plan: Plan, extents: Mapping[str, int], *, along_sum: bool) -> Config:
    """``along_sum``: both factors of a product of 32-bit numbers are read along the sum."""
    found = _for_gathered_rows(plan, extents)
    if found is None and along_sum:
        found = _for_wide_numbers(plan, extents)
    return _less_idle(plan, extents, found or _for_dot(plan, extents, along_sum=along_sum))


def _less_idle(plan: Plan, extents: Mapping[str, int], config: Config) -> Config:
    """Half as wide, where columns that nothing divides may end early in the second of two tiles."""
    columns = extent(plan.roles.n, extents)
    odd = columns % NARROW_LOAD and config.n < columns < 2 * config.n
    if not odd or config.n < LARGE_SIDE or plan.onehot >= 0 or plan.segment:
        return config
    return replace(config, n=config.n // 2, k=min(config.k, 2 * SHALLOW), warps=4, stages=3)


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
    found = (rule(plan, extents, m, n) for rule in _RULES)
    if (first := next((one for one in found if one is not None), None)) is not None:
        return first
    if gathers_places(plan) and plan.onehot < 0:  # whose addresses take registers, too
        return Config(m=min(m, LARGE_SIDE), n=n, k=min(k, 32), warps=4, stages=3)
    if (m, n) == (LARGE_SIDE, LARGE_SIDE) and n_all > n and is_large(plan, extents):
        return Config(m=m, n=2 * n, k=k, warps=8, stages=3)
    if plan.roles.loops and (m, n) == (LARGE_SIDE, LARGE_SIDE) and is_dense(plan):
        # places in flattened axes, bounds, and sides that are products themselves take registers
        several = plan.bounds or len(plan.roles.m) > 1 or len(plan.roles.n) > 1
        several = several or max(len(plan.roles.left), len(plan.roles.right)) > 1
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


def _in_one_step(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> Config | None:
    """A short sum of 32-bit numbers that ends inside of a tile: all of it at once, because masks
    take longer than what is masked.
    """
    (*_, var), size = plan.roles.k, BYTES.get(plan.operand, 4)
    deep = power_of_two(extents[var])
    if size == 2 or plan.segment or plan.onehot >= 0 or len(plan.roles.k) > 1 or plan.roles.loops:
        return None
    if max(m, n) > HIGH or deep > HIGH or deep > SHALLOW and extents[var] % 32 == 0:
        return None
    return Config(m=m, n=n, k=max(SHALLOW, deep), warps=2 if m * n <= LOW**2 else 4, stages=1)


def _for_few_wide_segments(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> Config | None:
    """Entries of 32-bit numbers, of which all tiles run at once: lower ones, as wide as they can
    be.
    """
    if BYTES.get(plan.operand, 4) == 2 or not walks_matrices(plan) or m < LARGE_SIDE:
        return None
    if plan.onehot >= 0 or _programs(plan, extents, m, n) >= ENOUGH_PROGRAMS:
        return None
    wide = min(power_of_two(extent(plan.roles.n, extents)), LARGE_SIDE)
    return Config(m=LOW, n=max(n, wide), k=32, warps=4, stages=3)


def _added_at_once(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> Config | None:
    """A tile of so few steps that adding it to the output is what takes the time: low ones, whose
    atomics are spread over more programs.
    """
    if plan.strategy != "atomic" or BYTES.get(plan.operand, 4) != 2 or plan.onehot >= 0:
        return None
    deep, high = extent(plan.roles.k, extents), extent(plan.roles.m, extents)
    if plan.segment or plan.roles.loops or deep > LARGE_SIDE or n > HIGH or high < 8 * LARGE_SIDE:
        return None
    return Config(m=min(m, LOW), n=n, k=k_tile(plan, extents, 2), warps=4, stages=3)


def _in_shallow_steps(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> Config | None:
    """Both sides have rows that no wide load reads, over a long sum: what is read takes the time,
    and is used for as much as a tile can have.
    """
    if plan.segment or plan.onehot >= 0 or plan.strategy != "store" or not plan.index_tensors:
        return None
    sides = [plan.factors[place] for place in (*plan.roles.left, *plan.roles.right)]
    narrow = all(isinstance(f, Access) and is_narrow_row(plan, f) for f in sides)
    if not narrow or extent(plan.roles.k, extents) < LONG_SUM:
        return None
    k = 2 * SHALLOW if BYTES.get(plan.operand, 4) == 2 else SHALLOW
    return Config(m=m, n=n, k=k, warps=4, stages=3)


def _dense_in_few_tiles(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> Config | None:
    """Dense factors whose sum is too short to be cut into pieces, which halves are rounded from."""
    if not is_dense(plan) or plan.onehot >= 0 or plan.strategy != "store":
        return None
    size = BYTES.get(plan.operand, 4)
    whole = Config(m=m, n=n, k=k_tile(plan, extents, size))
    if steps_of_program(plan, whole, extents) >= (MANY_STEPS if size == 2 else LEAST_CUT):
        return None
    return _for_few_tiles(plan, extents, m, n)


def _products_in_few_tiles(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> Config | None:
    """A sum of products, each of which is multiplied once more, that is long: small tiles, and
    pieces of the sum.
    """
    if not is_dense(plan) or plan.onehot >= 0 or plan.strategy != "store" or not plan.roles.outer:
        return None
    high, k = min(m, HIGH), k_tile(plan, extents, BYTES.get(plan.operand, 4))
    if _programs(plan, extents, high, LOW) >= ENOUGH_PROGRAMS // 2:
        return None
    found = Config(m=high, n=SHALLOW, k=k, warps=2, stages=3)
    return replace(found, split=max(1, min(8, steps_of_program(plan, found, extents) // 8)))


def _of_a_long_sum(plan: Plan, extents: Mapping[str, int], m: int, n: int) -> Config | None:
    """A long sum over entries is cut into pieces, which fill a device: tiles as large as the output
    is, so that what is gathered is read once.
    """
    if plan.segment or plan.onehot >= 0 or plan.strategy != "store" or not plan.index_tensors:
        return None
    if BYTES.get(plan.operand, 4) != 2 or extent(plan.roles.k, extents) < LONG_SUM:
        return None
    if len(plan.roles.k) > 1 or _programs(plan, extents, m, n) >= ENOUGH_PROGRAMS // 2:
        return None
    return Config(m=m, n=n, k=HIGH, warps=8 if m * n >= LARGE_SIDE**2 else 4, stages=3)


#: What is asked before all else, of tiles that would be so large.
_RULES = (
    _in_one_step,
    _for_few_wide_segments,
    _added_at_once,
    _in_shallow_steps,
    _products_in_few_tiles,
    _dense_in_few_tiles,
    _of_a_long_sum,
)


def _for_gathered_rows(plan: Plan, extents: Mapping[str, int]) -> Config | None:
    """Entries that gather a row for each place along M, or sum them along K: the narrower the rows,
    the more a step is all waiting, and the more programs have to wait at once. None where sums are
    exact, of several parts, and where tiles as of any other product do.
    """
    size = BYTES.get(plan.operand, 4)
    m, n = (power_of_two(extent(axis, extents)) for axis in (plan.roles.m, plan.roles.n))
    if plan.pointwise or plan.onehot >= 0 or held(plan, extents, m, n) != (m, n):
        return None
    if gathers_along(plan, plan.roles.m) and _is_shallow(plan, extents):
        n = max(least_n(plan), min(n, LARGE_SIDE))
        return Config(HIGH, n, SHALLOW, warps=4, stages=3)
    if size == 4 and plan.precision != "tf32":
        return None
    if gathers_along(plan, plan.roles.k):
        small = max(m, n) <= 32 <= extents[plan.roles.k[-1]]
        return Config(max(16, m), max(16, n), 256 // size, warps=1, stages=3) if small else None
    return _for_rows_along_m(plan, extents, n) if gathers_along(plan, plan.roles.m) else None


def by_numbers(plan: Plan, config: Config, sides: int, least_m: int) -> Config:
    """A tile of which so many ``sides``, of one operand or both, are read one number at a time:
    each takes an address, so that a thread has few of them. One step for all of a sum is better
    than several all the same. ``least_m``: which the tile has to hold.
    """
    if config.stages == 1:
        return config
    if BYTES.get(plan.operand, 4) == 4:  # and buffers of single numbers take longer to fill
        m = max(min(config.m, HIGH), least_m)
        return replace(config, m=m, k=min(config.k, 2 * SHALLOW), warps=4, stages=1)
    if len(plan.roles.k) == 2 and config.k >= LARGE_SIDE:  # an entry as a whole, and none in parts
        return replace(config, m=max(min(config.m, HIGH), least_m), warps=8, stages=3)
    if config.m * config.n >= LARGE_SIDE**2 and sides * config.k > OWN_NUMBERS * 32 * config.warps:
        config = replace(config, warps=8)
    while config.k > SHALLOW and sides * config.k > OWN_NUMBERS * 32 * config.warps:
        config = replace(config, k=config.k // 2)
    return config


def _is_shallow(plan: Plan, extents: Mapping[str, int]) -> bool:
    """Whether one matrix instruction is as deep as a gathered row, or deep enough for several."""
    inner, joined = extents[plan.roles.k[-1]], len(plan.roles.k) == 2
    half = BYTES.get(plan.operand, 4) == 2
    return inner <= SHALLOW if half else joined and inner < SMALLEST_DOT


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
    whole, size, several = (m, n), BYTES.get(plan.operand, 4), len(plan.roles.k) > 1
    while _programs(plan, extents, m, n) < ENOUGH_PROGRAMS // 2 and (m > HIGH or n > 32):
        m, n = (m // 2, n) if m > HIGH else (m, n // 2)
    if (m, n) == whole or several and not is_dense(plan):
        return None
    if several or size == 4:
        k = k_tile(plan, extents, size)
    else:
        k = dividing(extents[plan.roles.k[0]], LARGE_SIDE)
    stages = max(2, min(4, PIPELINE_BYTES // ((m + n) * k * size)))
    return Config(m=m, n=n, k=k, warps=4, stages=stages)


def _fills_deep_tile(plan: Plan, extents: Mapping[str, int], k: int) -> bool:
    """Whether one entry fills a deep tile: then more programs on half the width are better than
    fewer on the whole.
    """
    return k > 32 and inner_extent(plan, extents) == k


def _deep(extent: int, most: int) -> int:
    """The depth of a tile in few long strides: all of what is summed, where it fits."""
    even = dividing(extent, most)
    return most if even < HIGH and most // 2 < extent <= most else even
