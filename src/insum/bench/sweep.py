"""``insum bench sweep``: time over size, for sizes that nobody tuned for.

Columns of sparse products, channels of convolutions, sides of blocks. A record is kept after every
size, and what it has is not measured again: several runs make one record.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import insum
from insum.bench import conv, data, measure, spmm
from insum.bench.options import BenchOptions
from insum.bench.records import FORWARD
from insum.bench.study import Study
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
    def key(self) -> tuple[object, ...]:
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
    def key(self) -> tuple[object, ...]:
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
    for dtype in options.dtypes_or(*usual):
        for name in chosen:
            held = functools.cache(lambda name=name: data.graph(name, options.data, options.device))
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


def swept(point: Point, device: torch.device) -> Swept:
    ours, theirs, want = point.make()
    measure.poison((want,), point.dtype, device)
    with torch.no_grad():
        got = ours()
        error = measure.relative_error(got, (want,))
        measure.warm(ours, device)
        times = [measure.clock(ours, device)[0]]
        rival = None if theirs is None else measure.clock(theirs, device)[0]
        times.append(measure.clock(ours, device)[0])  # in turns
    name = measure.name_of(point.dtype)
    return Swept(point.kind, point.case, name, point.size, min(times), point.rival, rival, error)


def run(study: Study) -> int:
    """Measure what the record lacks until the time is up; 1 if something was wrong."""
    rows, wrong = {row.key: row for row in _read(study.file)}, 0
    for point in points(study.options):
        if point.key in rows:
            continue
        if not study.has_time():
            print("the time is up; the same command goes on from here")
            break
        row = swept(point, study.device)
        rows[row.key] = row
        wrong += not row.error <= measure.TOLERANCE[point.dtype]
        beside = f" {row.rival} {row.rival_ms:.4f}" if row.rival_ms is not None else ""
        print(f"{row.kind} {row.case} {row.dtype} {row.size}: {row.milliseconds:.4f} ms{beside}")
        study.keep(rows=[asdict(row) for row in rows.values()])
        cache.forget()  # a process has room for so many kernels of a statement
        measure.release(study.device)
    for line in cliffs(list(rows.values())):
        print(line)
    return 1 if wrong else 0


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
