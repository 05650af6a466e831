"""The cost model: what a choice should take on a device, as a sum of terms that can be read.

For every kind of launch: bytes that cross HBM and L2, matrix or scalar arithmetic at the rate its
tile allows, programs that fit a multiprocessor by registers and shared memory, and how full the
last wave is. Loads are limited by bandwidth or by how many bytes are in flight while a load takes
its latency, whichever is worse. The model ranks configs before anything is compiled; it does not
have to be right to the microsecond, and times that count are measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum.lang.expr import Access, accesses, variables
from insum.plan import first_guess, tiling
from insum.plan.config import Choice, Config
from insum.plan.plan import Plan
from insum.plan.tiling import SHORT

_BYTES = {
    "int1": 1,
    "int8": 1,
    "uint8": 1,
    "float8e4nv": 1,
    "float8e5": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


@dataclass(frozen=True, slots=True)
class Device:
    """What the model knows of a device; the defaults are an H200's."""

    name: str = "H200 (assumed)"
    multiprocessors: int = 132
    hbm: float = 4.2  # TB/s, measured copies
    l2: float = 11.0  # TB/s of gathers out of L2
    l2_bytes: int = 50 * 2**20
    shared: int = 227 * 1024  # bytes for one program
    registers: int = 65536  # of one multiprocessor
    threads: int = 2048
    half: float = 700.0  # TFLOP/s of matrix instructions on 16-bit operands, as matmuls reach
    tf32: float = 350.0
    single: float = 55.0  # TFLOP/s without matrix instructions
    double: float = 28.0
    latency: float = 0.8  # µs of a load that misses L1
    launch: float = 2.0  # µs of one more kernel in a stream


#: 16-bit matrix TFLOP/s of one multiprocessor, by compute capability: Volta and Turing, Ampere and
#: Ada, Hopper, Blackwell.
_HALF_RATE = {7: 0.9, 8: 2.0, 9: 5.3, 10: 11.0, 12: 3.0}


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device as the driver describes it, or the default where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Device()
    found: Any = torch.cuda.get_device_properties(device)
    base = Device()
    sms = int(found.multi_processor_count)
    half = _HALF_RATE.get(int(found.major), 5.3) * sms if torch.version.hip is None else base.half
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    hbm = (
        0.87 * 2 * clock * 1e3 * width / 8 / 1e12
        if clock and width
        else base.hbm * sms / base.multiprocessors
    )
    return replace(
        base,
        name=str(found.name),
        multiprocessors=sms,
        hbm=hbm,
        l2=base.l2 * sms / base.multiprocessors,
        l2_bytes=int(getattr(found, "L2_cache_size", 0)) or base.l2_bytes,
        shared=int(getattr(found, "shared_memory_per_block_optin", 0)) or base.shared,
        registers=int(getattr(found, "regs_per_multiprocessor", 0)) or base.registers,
        threads=int(getattr(found, "max_threads_per_multi_processor", 0)) or base.threads,
        half=half,
        tf32=half / 2,
        single=base.single * sms / base.multiprocessors,
        double=base.double * sms / base.multiprocessors,
    )


@dataclass(frozen=True, slots=True)
class Load:
    """What extents do not tell: bytes of every tensor, and the rows of a segmented output by
    length.
    """

    bytes: Mapping[str, int]
    # (length, rows of about that length), lengths being powers of two
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def entries(self) -> float:
        return sum(length * rows for length, rows in self.lengths)


def load_of(tensors: Mapping[str, Any], rows: tuple[Tensor, Tensor] | None) -> Load:
    """The load of a product over these tensors, with the starts and ends of its segments where it
    has some. Asks the device for a histogram.
    """
    size = {n: t.numel() * t.element_size() for n, t in tensors.items() if isinstance(t, Tensor)}
    return Load(size, histogram(rows[1] - rows[0]) if rows is not None else ())


def histogram(lengths: Tensor) -> tuple[tuple[int, int], ...]:
    """Rows by length: the mean length of each class between powers of two, and how many rows it
    has.

    >>> histogram(torch.tensor([0, 1, 3, 4, 5, 100]))
    ((1, 1), (3, 1), (4, 2), (100, 1))
    """
    lengths = lengths.long().reshape(-1)
    lengths = lengths[lengths > 0]
    if not lengths.numel():
        return ()
    klass = torch.floor(torch.log2(lengths.double())).long()
    count = torch.bincount(klass)
    total = torch.zeros_like(count).index_add_(0, klass, lengths)
    return tuple(
        (max(1, round(t / c)), c) for t, c in zip(total.tolist(), count.tolist(), strict=True) if c
    )


# --- predictions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """One kind of launch: its grid, what a step of a program does, and what a program occupies."""

    name: str
    config: Config
    programs: float
    steps: float  # of one program, on average
    step_bytes: float  # read out of L2 by one step
    step_flops: float
    shared: int
    registers: int  # of one thread, estimated
    written: float  # bytes, by all programs
    rate: float  # TFLOP/s that the tile's arithmetic reaches on a full device
    # steps whose loads are in flight at once; below 1 where arithmetic waits for them
    buffers: float
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted microseconds and the terms they come from."""

    total: float
    hbm: float
    l2: float
    arithmetic: float
    waves: float
    occupancy: int  # programs on one multiprocessor
    launches: float
    parts: tuple[LaunchCost, ...]
    device: str

    def describe(self) -> str:
        terms = (
            f"HBM {self.hbm:.1f}, L2 {self.l2:.1f}, arithmetic {self.arithmetic:.1f}, "
            f"launches {self.launches:.1f}"
        )
        first = max(self.parts, key=lambda part: part.programs * part.steps)
        grid = (
            f"{first.programs:,.0f} programs, {self.occupancy} per multiprocessor, "
            f"{self.waves:.1f} waves"
        )
        size = f"about {first.registers} registers, {first.shared:,} bytes shared"
        return (
            f"model        {self.total:.1f} µs on {self.device}: {terms}\n"
            f"             {grid}; {size}"
        )


def predict(
    plan: Plan, extents: Mapping[str, int], choice: Choice, device: Device, load: Load
) -> Cost:
    """What a choice should take. The plan's sides are as the choice wants them."""
    parts = parts_of(plan, extents, choice, load)
    timed = [(_time(part, device), part) for part in parts]
    l2, arithmetic = sum(t[0] for t, _ in timed), sum(t[1] for t, _ in timed)
    hbm = _hbm_bytes(plan, parts, load, device) / device.hbm / 1e6
    launches = device.launch * sum(part.launches for part in parts)
    body = sum(max(t[0], t[1]) * t[2] for t, _ in timed)
    (_, _, _, waves, occupancy), _ = max(timed, key=lambda pair: pair[1].programs * pair[1].steps)
    return Cost(
        max(hbm, body) + 0.2 * min(hbm, body) + launches,
        hbm,
        l2,
        arithmetic,
        waves,
        occupancy,
        launches,
        tuple(parts),
        device.name,
    )


def _time(part: LaunchCost, device: Device) -> tuple[float, float, float, float, int]:
    """Microseconds of loads and of arithmetic, what the last wave adds, waves, and programs per
    multiprocessor.
    """
    occupancy = fitting(part, device)
    room = occupancy * device.multiprocessors
    active = max(1.0, min(part.programs, room))
    steps = part.programs * part.steps
    in_flight = active * part.step_bytes * part.buffers
    bandwidth = min(device.l2 * 1e6, in_flight / device.latency)  # bytes per µs
    loads = steps * part.step_bytes / bandwidth if part.step_bytes else 0.0
    busy = min(1.0, part.programs / device.multiprocessors)
    filled = min(
        1.0, (0.4 + 0.25 * min(4, active / device.multiprocessors) * part.config.warps / 4)
    )
    arithmetic = (
        steps * part.step_flops / (part.rate * 1e6 * busy * filled) if part.step_flops else 0.0
    )
    waves = part.programs / room
    tail = math.ceil(waves) / waves if waves > 1 else 1.0
    return loads, arithmetic, 1 + (tail - 1) / 2, waves, occupancy


def fitting(part: LaunchCost, device: Device) -> int:
    """Programs that one multiprocessor holds at once, by threads, registers and shared memory."""
    threads = 32 * part.config.warps
    by_shared = (device.shared + 1024) // (part.shared + 1024)
    by_registers = device.registers // (max(24, min(255, part.registers)) * threads)
    return max(1, min(32, device.threads // threads, by_registers, by_shared))


def _hbm_bytes(plan: Plan, parts: Sequence[LaunchCost], load: Load, device: Device) -> float:
    """Each tensor once, or again and again where it is gathered from and outgrows L2; and the
    output.
    """
    total = sum(part.written for part in parts) * (
        2 if plan.accumulate or plan.strategy == "atomic" else 1
    )
    touched = sum(part.programs * part.steps * part.step_bytes for part in parts)
    names = {a.tensor for f in plan.factors for a in accesses(f)}
    sizes = [load.bytes.get(name, 0) for name in names]
    once = sum(sizes)
    largest = max([1, *sizes])
    missed = max(0.0, 1 - device.l2_bytes / largest)
    return float(total + min(once, touched) + missed * max(0.0, touched - once) * 0.5)


# --- what a launch does ---------------------------------------------------------------------------


def parts_of(
    plan: Plan, extents: Mapping[str, int], choice: Choice, load: Load
) -> list[LaunchCost]:
    if plan.pattern:
        return [_unrolled(plan, extents, choice[0])]
    return (
        _rows(plan, extents, choice, load)
        if tiling.in_rows(plan)
        else [_tiles(plan, extents, choice[0], load)]
    )


def _tiles(plan: Plan, extents: Mapping[str, int], config: Config, load: Load) -> LaunchCost:
    roles = plan.roles
    tiles = math.ceil(tiling.extent(roles.m, extents) / config.m) * math.ceil(
        tiling.extent(roles.n, extents) / config.n
    )
    pieces = tiling.pieces(plan, config, extents)
    programs = tiles * math.prod(extents[v] for v in roles.grid) * pieces
    steps = _steps(plan, extents, config, load) / pieces
    flops = (
        2.0 * config.m * config.n * config.k * (1 if roles.dot else max(1, len(plan.factors) - 1))
    )
    held = max(1, config.stages - 1) if roles.dot else 0
    shared = held * tiling.step_bytes(plan, config)
    written = (
        config.m
        * config.n
        * programs
        * _BYTES[plan.accumulator]
        / (2 if plan.operand in ("float16", "bfloat16") else 1)
    )
    per_step = _tile_bytes(plan, config)
    rate, buffers = _rate(plan, config), max(0.6, config.stages - 1) if roles.dot else 1.0
    cleared = int(pieces > 1 or plan.strategy == "atomic")  # the output is filled with zeros first
    return LaunchCost(
        "tiles",
        config,
        programs,
        max(1.0, steps),
        per_step,
        flops,
        shared,
        _registers(plan, config),
        written,
        rate,
        buffers,
        1 + cleared,
    )


def _steps(plan: Plan, extents: Mapping[str, int], config: Config, load: Load) -> float:
    """Iterations of the contraction's loop, those of loops around it included."""
    roles, segment = plan.roles, plan.segment
    steps = math.prod(
        float(extents[v]) for v in (*roles.loops, *roles.outer) if not segment or v != segment.var
    )
    if segment and segment.var in (*roles.k, *roles.loops):
        rows = max(1, extents[segment.row])
        share = tiling.inner_extent(plan, extents) / config.k if segment.var in roles.k else 1
        steps *= sum(math.ceil(length * share) * count for length, count in load.lengths) / rows
        return steps * (
            math.ceil(extents[roles.k[0]] / config.k)
            if roles.k and segment.var not in roles.k
            else 1
        )
    return steps * math.ceil(extents[roles.k[0]] / config.k) if roles.k else steps


def _tile_bytes(plan: Plan, config: Config) -> float:
    """Bytes that one step reads: for every access the elements of the tile that it spans."""
    tile = {
        **dict.fromkeys(plan.roles.m, config.m),
        **dict.fromkeys(plan.roles.n, config.n),
        **dict.fromkeys(plan.roles.k, config.k),
    }
    kinds = dict(plan.kinds)
    total = 0.0
    for factor in plan.factors:
        for access in accesses(factor):
            total += _elements(plan, access, tile) * _BYTES.get(kinds.get(access.tensor, ""), 4)
    return total


def _elements(plan: Plan, access: Access, tile: Mapping[str, int]) -> float:
    spans = {}
    for axis in (plan.roles.m, plan.roles.n, plan.roles.k):
        used = set(axis) & set(variables(access))
        if used:
            spans[axis] = tile[axis[0]]
    return math.prod(spans.values())


def _rate(plan: Plan, config: Config) -> float:
    """TFLOP/s of the arithmetic of a tile: matrix instructions want 64 on M and wide N; others do
    one multiply and one add at a time.
    """
    base = Device()
    if not plan.roles.dot:
        return base.double if plan.accumulator == "float64" else base.single * 0.5
    peak = (
        base.half
        if plan.operand in ("float16", "bfloat16")
        else base.tf32 / (3 if plan.precision == "tf32x3" else 1)
    )
    if plan.operand == "float32" and plan.precision == "ieee":
        peak = base.single
    wide = (
        min(1.0, 0.35 + config.n / 200)
        if config.m >= 64 and config.warps >= 4
        else 0.45 * min(1.0, config.m * config.n / 2048)
    )
    return peak * wide * min(1.0, 0.6 + config.k / 160)


def _registers(plan: Plan, config: Config) -> int:
    threads = 32 * config.warps
    wide = 2 if plan.accumulator in ("float64", "int64") else 1
    if plan.roles.dot:
        operands = 0 if config.m >= 64 else (config.m + config.n) * config.k // 2
        return 40 + (config.m * config.n * wide + operands) // threads
    factors = max(2, len(plan.factors))
    return (
        24
        + (config.m * config.n * wide + factors * config.m * config.n * config.k * wide) // threads
    )


def _rows(plan: Plan, extents: Mapping[str, int], choice: Choice, load: Load) -> list[LaunchCost]:
    """Short rows apart from long ones and pieces of rows that were cut, in a launch each or in one.
    What brings pieces together is little beside the rest.
    """
    short, long = choice
    tasks = _tasks(load, short.split)
    found = [
        _row_part(plan, extents, config, name, mine)
        for name, config, mine in (
            ("long rows", long, [t[:2] for t in tasks if t[0] > SHORT or t[2]]),
            ("short rows", short, [t[:2] for t in tasks if t[0] <= SHORT and not t[2]]),
        )
        if mine
    ] or [_row_part(plan, extents, short, "short rows", [(1.0, 1.0)])]
    if first_guess.in_one_launch(choice, load.entries):
        found[1:] = [replace(part, launches=0) for part in found[1:]]
    return found


def _tasks(load: Load, split: int) -> list[tuple[float, float, bool]]:
    """(length, how many, whether they are pieces), after rows longer than the split were cut."""
    found: list[tuple[float, float, bool]] = []
    for length, rows in load.lengths:
        pieces = math.ceil(length / split) if split else 1
        found.append((length / pieces, rows * pieces, pieces > 1))
    return found


def _row_part(
    plan: Plan,
    extents: Mapping[str, int],
    config: Config,
    name: str,
    tasks: Sequence[tuple[float, float]],
) -> LaunchCost:
    columns = tiling.extent(plan.roles.n, extents)
    grid = math.ceil(columns / config.n) * math.prod(extents[v] for v in plan.roles.grid)
    beside = tiling.extent(plan.roles.m[1:], extents)
    tasks = [(length, count * beside) for length, count in tasks]
    rows = sum(count for _, count in tasks)
    programs = math.ceil(rows / config.m) * grid
    # The rows of a tile wait for the longest among them: about a class longer than the mean where
    # several classes meet.
    uneven = 1.3 if config.m > 1 and len(tasks) > 1 else 1.0
    loops = math.prod(
        float(extents[v]) for v in plan.roles.loops if plan.segment and v != plan.segment.var
    )
    steps = max(
        1.0,
        uneven
        * loops
        * sum(math.ceil(length / config.k) * count for length, count in tasks)
        / rows,
    )
    used = (
        sum(length * count for length, count in tasks)
        * loops
        / rows
        * config.m
        / (steps * config.m * config.k)
    )
    flops = 2.0 * config.m * config.n * config.k * max(1, len(plan.factors) - 1)
    written = rows * columns * _BYTES[plan.accumulator]
    per_step = _tile_bytes(plan, config) * min(1.0, used)
    return LaunchCost(
        name,
        config,
        programs,
        steps,
        per_step,
        flops,
        0,
        _registers(plan, config),
        written,
        _rate(plan, config),
        1.0,
    )


def _unrolled(plan: Plan, extents: Mapping[str, int], config: Config) -> LaunchCost:
    assert plan.pattern is not None
    roles = plan.roles
    points = len(plan.pattern.points)
    tiles = math.ceil(tiling.extent(roles.m, extents) / config.m) * math.ceil(
        tiling.extent(roles.n, extents) / config.n
    )
    programs = tiles * math.prod(extents[v] for v in roles.grid)
    along = tiling.extent(roles.k, extents)
    if plan.segment:  # the entries of one row
        programs *= extents[plan.segment.row]
        along = max(1, along // max(1, extents[plan.segment.row]))
    loops = math.prod(float(extents[v]) for v in roles.loops) * math.ceil(along / config.k)
    distinct = {a for _, factors in plan.pattern.points for f in factors for a in accesses(f)}
    tile = {
        **dict.fromkeys(roles.m, config.m),
        **dict.fromkeys(roles.n, config.n),
        **dict.fromkeys(roles.k, config.k),
    }
    kinds = dict(plan.kinds)
    per_step = sum(
        _elements(plan, a, tile) * _BYTES.get(kinds.get(a.tensor, ""), 4) for a in distinct
    )
    targets = len({target for target, _ in plan.pattern.points})
    registers = 32 + 3 * targets * config.m * config.n // (32 * config.warps)
    written = targets * config.m * config.n * programs * _BYTES[plan.accumulator]
    flops = 2.0 * points * config.m * config.n * config.k
    return LaunchCost(
        "straight-line code",
        config,
        programs,
        max(1.0, loops),
        per_step,
        flops,
        0,
        registers,
        written,
        _rate(plan, config),
        4.0,
    )
