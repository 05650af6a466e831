"""``insum bench sweep``: time over size, for sizes that nobody tuned for.

Columns of sparse products, channels of convolutions, sides of blocks. A record is kept after every
size, and what it has is not measured again: several runs make one record.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

import insum
from insum.bench import conv, data, measure, spmm
from insum.bench.options import BenchOptions
from insum.bench.records import FORWARD
from insum.bench.study import Study
from insum.errors import BenchError
from insum.formats import BlockGroupCOO
from insum.runtime import cache

WIDTHS = (1, 3, 8, 16, 20, 32, 48, 64, 80, 100, 128, 160, 192, 200, 256, 300, 384, 512, 640, 1000)
CHANNELS = (4, 8, 16, 24, 32, 40, 48, 64, 72, 96, 100, 120, 128, 160, 192, 200, 256)
SQUARES = (8, 12, 16, 20, 24, 32, 40, 48, 64, 128)
BLOCKS = (*((n, n) for n in SQUARES), (16, 32), (32, 16), (8, 64), (64, 8), (24, 40))
GRAPHS, CLOUDS = 4, 2
#: Rows and columns of the matrix of blocks, and its columns, where there is a GPU and elsewhere.
SIDE, COLUMNS = (3840, 240), (4096, 64)
#: A size may take so much longer than the next larger friendly one, and no longer than a rival.
ALLOWED = 1.1
#: Points that a process prepares before it is its turn: as many as memory has room for.
AT_ONCE = 4
TOLERANCES = {measure.name_of(dtype): error for dtype, error in measure.TOLERANCE.items()}
#: What tells a size from all others.
SizeKey: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class Swept:
    """One size: what it is a size of, the time, that of a rival, the error."""

    kind: str
    case: str
    dtype: str
    size: tuple[int, ...]
    milliseconds: float
    rival: str
    rival_ms: float | None
    error: float

    @property
    def key(self) -> SizeKey:
        return self.kind, self.case, self.dtype, tuple(self.size)


@dataclass(frozen=True, eq=False)
class Point:
    """A size to be measured: ``make`` gives what we run, what the rival runs, and what is right."""

    kind: str
    case: str
    dtype: torch.dtype
    size: tuple[int, ...]
    rival: str
    make: Callable[[], tuple[measure.Thunk, measure.Thunk | None, Tensor]]

    @property
    def key(self) -> SizeKey:
        return self.kind, self.case, measure.name_of(self.dtype), self.size


# --- sizes ----------------------------------------------------------------------------------------


def points(options: BenchOptions) -> Iterator[Point]:
    kinds = {"spmm": _columns, "conv": _channels, "blocks": _sides}
    for name in options.names or kinds:
        yield from kinds[name](options)


def _columns(options: BenchOptions) -> Iterator[Point]:
    names = data.graph_names(options.data)[: None if options.gpu else 1]
    chosen = names[:: max(1, len(names) // GRAPHS)][:GRAPHS]
    usual = (torch.float16, torch.float32, torch.bfloat16) if options.gpu else (torch.float32,)
    held_of = functools.cache(
        lambda name: functools.cache(lambda: data.graph(name, options.data, options.device))
    )
    for dtype in options.dtypes_or(*usual):
        for name in chosen:
            held = held_of(name)
            for n in WIDTHS if options.gpu else WIDTHS[:4]:
                make = functools.partial(_spmm, held, n, dtype)
                yield Point("spmm", name, dtype, (n,), "torch.sparse", make)


def _spmm(
    graph: Callable[[], data.CsrPattern], n: int, dtype: torch.dtype
) -> tuple[measure.Thunk, measure.Thunk | None, Tensor]:
    given = spmm.inputs(graph(), n, dtype)
    (want,) = spmm.want(given, FORWARD)
    ours, theirs = spmm.ours(given, FORWARD), spmm.cusparse(given, FORWARD)
    return ours.run, theirs.run, want


def _channels(options: BenchOptions) -> Iterator[Point]:
    names = data.cloud_names(options.data)[: CLOUDS if options.gpu else 1]
    kind = torch.float16 if options.gpu else torch.float32
    pairs = [(c, m) for c in CHANNELS for m in CHANNELS]
    for name in names:
        limit = None if options.gpu else 500
        held = functools.cache(
            lambda name=name, limit=limit: data.cloud(name, options.data, options.device, limit)
        )
        for c, m in pairs if options.gpu else pairs[:2]:
            make = functools.partial(_conv, held, c, m, kind)
            yield Point("conv", name, kind, (c, m), "", make)


def _conv(
    voxels: Callable[[], Tensor], inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[measure.Thunk, measure.Thunk | None, Tensor]:
    square = conv.inputs(voxels(), max(inputs, outputs), dtype)
    x, w = square.x[:, :inputs].contiguous(), square.w[:, :inputs, :outputs].contiguous()
    table = insum.unchanging(square.table)
    want = torch.zeros(len(x), outputs, dtype=torch.float64, device=x.device)
    for z, (here, there) in enumerate(square.lists()):
        want.index_add_(0, here, x.double()[there] @ w[z].double())

    def run() -> measure.Results:
        out: Tensor = insum.insum(
            "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]", In=x, W=w, Nb=table, padded=("Nb",)
        )
        return (out,)

    return run, None, want


def _sides(options: BenchOptions) -> Iterator[Point]:
    side = SIDE[0] if options.gpu else SIDE[1]
    columns = COLUMNS[0] if options.gpu else COLUMNS[1]
    kind = torch.float16 if options.gpu else torch.float32
    for block in BLOCKS if options.gpu else BLOCKS[:2]:
        zeros = f"90 % zeros in blocks of {block[0]} x {block[1]}"
        # the same matrix in blocks of its own, and in the next larger friendly ones
        for stored in dict.fromkeys((block, (friendly(block[0]), friendly(block[1])))):
            make = functools.partial(_blocks, side, columns, block, stored, kind, options.device)
            yield Point("blocks", zeros, kind, stored, "dense" if stored == block else "", make)


def _blocks(
    side: int,
    columns: int,
    block: tuple[int, int],
    stored: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[measure.Thunk, measure.Thunk | None, Tensor]:
    draw = data.RandomTensors(device, dtype)
    rows, cols = (-(-side // b) for b in block)
    kept = (draw.chance(rows, cols) < 0.1).repeat_interleave(block[0], 0)
    kept = kept.repeat_interleave(block[1], 1)
    a = draw.normal(*kept.shape) * kept
    over = [-size % by for size, by in zip(a.shape, stored, strict=True)]
    a = torch.nn.functional.pad(a, (0, over[1], 0, over[0]))
    b = draw.normal(a.shape[1], columns, scale=side**-0.5)
    sparse = BlockGroupCOO.from_dense(a, block_shape=stored, group_size="auto")
    want = a.double() @ b.double()
    ours = lambda: (insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=sparse, B=b),)
    return ours, (lambda: (a @ b,)) if stored == block else None, want


# --- running --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PreparedPoint:
    """A size whose kernels are compiled and whose result was looked at: what is left is timing."""

    point: Point
    ours: measure.Thunk
    theirs: measure.Thunk | None
    error: float

    def swept(self, device: torch.device) -> Swept:
        point, (ours, theirs) = self.point, (self.ours, self.theirs)
        with torch.no_grad():
            times = [measure.clock(ours, device)[0]]
            rival = None if theirs is None else measure.clock(theirs, device)[0]
            times.append(measure.clock(ours, device)[0])  # in turns
        kind = measure.name_of(point.dtype)
        found = min(times), point.rival, rival, self.error
        return Swept(point.kind, point.case, kind, point.size, *found)


def prepared(point: Point, device: torch.device) -> PreparedPoint:
    ours, theirs, want = point.make()
    measure.poison((want,), point.dtype, device)
    with torch.no_grad():
        error = measure.relative_error(ours(), (want,))
        measure.warm(ours, device)
    del want
    measure.release(device)  # others prepare at the same time
    return PreparedPoint(point, ours, theirs, error)


def add_options(parser: Any) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="processes that compile at the same time, and then are timed one after the other",
    )


def run(study: Study) -> int:
    """Measure what the record lacks until the time is up; 1 if something was wrong."""
    rows, wrong = {row.key: row for row in _read(study.file)}, 0
    lacking = [point for point in points(study.options) if point.key not in rows]
    if study.asked.workers > 1:  # neighbours are of one size, and all of them at once too large
        random.Random(0).shuffle(lacking)
    for row in swept_in_turns(lacking, study, points):
        rows[row.key] = row
        wrong += not row.error <= TOLERANCES[row.dtype]
        beside = f" {row.rival} {row.rival_ms:.4f}" if row.rival_ms is not None else ""
        print(f"{row.kind} {row.case} {row.dtype} {row.size}: {row.milliseconds:.4f} ms{beside}")
        study.keep(rows=[asdict(row) for row in rows.values()])
    if any(point.key not in rows for point in lacking):
        print("the time is up; the same command goes on from here")
    found = cliffs(list(rows.values()))
    study.keep(rows=[asdict(row) for row in rows.values()], cliffs=found)
    print(*found, sep="\n")
    return 1 if wrong else 0


def swept_in_turns(
    lacking: Sequence[Point], study: Study, every: Callable[[BenchOptions], Iterator[Point]]
) -> Iterator[Swept]:
    """Rows of what is lacking while there is time. ``every``: finds the same points in another
    process.
    """
    if study.asked.workers > 1:
        yield from _by_workers([point.key for point in lacking], study, every)
        return
    for point in lacking:
        if not study.has_time():
            return
        yield prepared(point, study.device).swept(study.device)
        _forget(study.device)


def _forget(device: torch.device) -> None:
    cache.forget()  # a process has room for so many kernels of a statement
    measure.release(device)


def _by_workers(
    keys: Sequence[SizeKey], study: Study, every: Callable[[BenchOptions], Iterator[Point]]
) -> Iterator[Swept]:
    """Several processes prepare some points each; when all are done they time theirs one after the
    other, so that each has the device to itself.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    pairs = [context.Pipe() for _ in range(study.asked.workers)]
    pipes = [here for here, _ in pairs]
    processes = [
        context.Process(target=_work, args=(study.options, every, there), daemon=True)
        for _, there in pairs
    ]
    for process, (_, there) in zip(processes, pairs, strict=True):
        process.start()
        there.close()  # so that the end of a process is seen
    at_once = AT_ONCE * len(pipes)
    for start in range(0, len(keys), at_once):
        if not study.has_time():
            break
        portion = keys[start : start + at_once]
        for at, pipe in enumerate(pipes):
            pipe.send(portion[at :: len(pipes)])
        for pipe in pipes:
            _answer(pipe)  # when it is ready
        for pipe in pipes:
            pipe.send("your turn")
            yield from _answer(pipe)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


def _answer(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        remedy = "fewer --workers take less memory; what was measured is kept"
        raise BenchError("a worker of the sweep ended early", remedy=remedy) from None


def _work(
    options: BenchOptions, every: Callable[[BenchOptions], Iterator[Point]], pipe: Connection
) -> None:
    """What one process does: it prepares the points that it is told, and times them when it is
    its turn.
    """
    known = {point.key: point for point in every(options)}
    for keys in iter(pipe.recv, None):
        ready = [prepared(known[key], options.device) for key in keys]
        pipe.send("ready")
        pipe.recv()
        pipe.send([one.swept(options.device) for one in ready])
        ready.clear()
        _forget(options.device)


def _read(file: Path) -> list[Swept]:
    if not file.exists():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return [Swept(**{**row, "size": tuple(row["size"])}) for row in found]


# --- what it tells --------------------------------------------------------------------------------


def friendly(size: int) -> int:
    """The next size that is a power of two or a multiple of 64.

    >>> [friendly(n) for n in (3, 20, 48, 100, 200, 384)]
    [4, 32, 64, 128, 256, 384]
    """
    power = 1 << max(0, size - 1).bit_length()
    return min(power, -(-size // 64) * 64) if size > 32 else power


def cliffs(rows: list[Swept]) -> list[str]:
    """Sizes that take longer than the next larger friendly one, or longer than a rival."""
    times = {row.key: row.milliseconds for row in rows}
    found = []
    for row in rows:
        larger = tuple(friendly(n) for n in row.size)
        beside = times.get((row.kind, row.case, row.dtype, larger), math.inf)
        if row.milliseconds > ALLOWED * beside:
            found.append(f"{_label(row)}: {row.milliseconds / beside:.2f} of size {larger}")
        if row.rival_ms is not None and row.milliseconds > row.rival_ms:
            found.append(f"{_label(row)}: {row.rival_ms / row.milliseconds:.2f} of {row.rival}")
    return found


def _label(row: Swept) -> str:
    return f"{row.kind} {row.case} {row.dtype} {'x'.join(map(str, row.size))}"
