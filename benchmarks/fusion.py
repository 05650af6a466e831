"""Programs in plain PyTorch on a GPU: eager, torch.compile alone, and
torch.compile(backend="insum"), in one run.

    python benchmarks/fusion.py --data DIR [--json FILE] [--only GCNConv,...] [--graph NAME]
        [--columns 64] [--seconds 100] [--fresh] [--breaks]

PyG's layers, unmodified, over a graph, and a sparse convolution written by hand (for each of 27
offsets: gather, matrix product, index_add) over the voxels of a point cloud. ``DIR`` holds graphs
and clouds as .npz files; without them, drawn ones of similar size are used and named so. Per
program and way: median milliseconds of the forward pass of a training step and of the whole step:
of single calls that are waited for, of calls in a row, as a training loop makes them, both in
rounds, in which the ways take turns because hosts are now quick, now slow; and replayed as a CUDA
graph where it can be recorded. Peak memory beyond what is there before, and the largest relative
error, of the result and of every gradient, against eager in float64. Programs that are not begun
after ``--seconds`` are left out, and named; the file is written after each program.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import insum
import insum.fusion

GOAL = 1.5
WARM, REPEAT, MOST_MS, REPLAYS, ROW, ROUNDS = 15, 10, 100.0, 10, 10, 5
REPLAYED = ("forward_replayed_ms", "both_replayed_ms")
CALLS = ("forward_ms", "both_ms", "forward_row_ms", "both_row_ms")
#: Programs that are run when they are named: torch.compile alone fails on the first with some
#: versions of torch.
ON_REQUEST = ("FastRGCNConv",)
#: Programs that run over something else than a graph.
WITHOUT_GRAPH = ("convolution",)
#: Programs that mask edges: those of each relation, or self-loops.
MASKING = ("RGCNConv", "GCNConv-uncached")


@dataclass(frozen=True)
class Program:
    """A model and what it is called with; the first argument and the parameters have gradients."""

    name: str
    case: str
    model: nn.Module
    arguments: tuple[Any, ...]
    messages: int
    """Elements of a tensor with one row per edge and one column per channel."""
    waits: bool = False
    (
        """Whether something in it waits for the device, as masks do. Then it can be recorded as """
        """a """
        """CUDA graph only where that is gone."""
    )


@dataclass(frozen=True)
class Way:
    """A program compiled in one way, or not at all: its calls, and what was measured."""

    name: str
    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, ...]]
    row: dict[str, Any]


# --- data -----------------------------------------------------------------------------------------


def files(folder: str) -> dict[str, Path]:
    return {f.stem: f for f in Path(folder).rglob("*.npz")} if folder else {}


def graph(found: dict[str, Path], name: str, device: str, small: bool) -> tuple[str, int, Tensor]:
    """A name, the number of nodes, and edges (source, target)."""
    if name in found and not small:
        loaded = np.load(found[name])
        nodes = int(loaded["shape"][0])
        counts = torch.from_numpy(np.diff(loaded["indptr"]).astype(np.int64))
        rows = torch.repeat_interleave(torch.arange(nodes), counts)
        return (
            name,
            nodes,
            torch.stack([torch.from_numpy(loaded["indices"].astype(np.int64)), rows]).to(device),
        )
    nodes, edges = (60, 400) if small else (80_000, 1_800_000)
    print(
        f"{name} is not in the data folder: drawn edges instead"
        if not small
        else "small drawn edges"
    )
    return (
        "drawn",
        nodes,
        torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(0)).to(device),
    )


def pairs(
    found: dict[str, Path], name: str, device: str, small: bool
) -> tuple[str, int, list[Tensor]]:
    """A name, the number of voxels, and for each of 27 offsets the pairs (input voxel, output
    voxel).
    """
    if name in found and not small:
        points = torch.from_numpy(np.load(found[name])["points"]).to(device)
    else:
        print(
            f"{name} is not in the data folder: a drawn surface instead"
            if not small
            else "a small drawn surface"
        )
        name, count = "drawn", 300 if small else 300_000
        flat = torch.rand(count, 2, generator=torch.Generator().manual_seed(0)) * (
            1.0 if small else 12.0
        )
        points = torch.cat([flat, 0.3 * torch.sin(flat.sum(1, keepdim=True))], 1).to(device)
    voxels = torch.unique(torch.floor(points.double() / 0.05).long(), dim=0)
    low = voxels.min(0).values - 1
    span = voxels.max(0).values - low + 2
    key = lambda v: (
        ((v[:, 0] - low[0]) * span[1] + (v[:, 1] - low[1])) * span[2] + (v[:, 2] - low[2])
    )
    keys = key(voxels)  # torch.unique sorts, so the keys ascend
    offsets = torch.cartesian_prod(*[torch.arange(-1, 2, device=device)] * 3)
    result = []
    for offset in offsets:
        wanted = key(voxels + offset)
        at = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        there = (keys[at] == wanted).nonzero()[:, 0]
        result.append(torch.stack([at[there], there]).contiguous())
    return name, len(voxels), result


class Convolution(nn.Module):
    """As people write it: for each offset gather the inputs, multiply, add to the outputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(27, channels, channels) / channels)

    def forward(self, x: Tensor, *pairs: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], self.weight.shape[2])
        for z, (i, o) in enumerate(pairs):
            out.index_add_(0, o, x[i] @ self.weight[z])
        return out


def programs(arguments: argparse.Namespace, device: str) -> dict[str, Callable[[], Program]]:
    """Makers, so that only one program's tensors are there at a time."""
    found, columns, small = files(arguments.data), arguments.columns, arguments.small
    relations, heads = 4, 4

    def on_graph(
        name: str,
        make: Callable[[Any], nn.Module],
        more: Callable[[int], tuple[Tensor, ...]] = lambda edges: (),
    ) -> Callable[[], Program]:
        def build() -> Program:
            import torch_geometric
            import torch_geometric.nn as pyg

            # Else RGCNConv counts the edges of each relation in every call, and waits for the
            # result, to choose between two ways of which one is there.
            torch_geometric.backend.use_segment_matmul = False
            where, nodes, edges = graph(found, arguments.graph, device, small)
            torch.manual_seed(0)
            x = torch.randn(nodes, columns, device=device)
            case = f"{where}, {nodes:,} nodes, {edges.shape[1]:,} edges, {columns} channels"
            return Program(
                name,
                case,
                make(pyg).to(device),
                (x, edges, *more(edges.shape[1])),
                edges.shape[1] * columns,
                name in MASKING,
            )

        return build

    def convolution() -> Program:
        where, voxels, found_pairs = pairs(found, arguments.cloud, device, small)
        torch.manual_seed(0)
        edges, width = sum(p.shape[1] for p in found_pairs), 2 * columns
        case = f"{where}, {voxels:,} voxels, {edges:,} pairs, {width} channels"
        return Program(
            "convolution",
            case,
            Convolution(width).to(device),
            (torch.randn(voxels, width, device=device), *found_pairs),
            edges * width,
        )

    types = lambda edges: (
        torch.randint(
            0, relations, (edges,), device=device, generator=torch.Generator(device).manual_seed(1)
        ),
    )
    every: dict[str, Callable[[], Program]] = {
        "GCNConv": on_graph("GCNConv", lambda pyg: pyg.GCNConv(columns, columns, cached=True)),
        "GCNConv-uncached": on_graph("GCNConv-uncached", lambda pyg: pyg.GCNConv(columns, columns)),
        "convolution": convolution,
        "GATConv": on_graph(
            "GATConv",
            lambda pyg: pyg.GATConv(columns, columns // heads, heads=heads, add_self_loops=False),
        ),
        "SAGEConv": on_graph("SAGEConv", lambda pyg: pyg.SAGEConv(columns, columns)),
        "RGCNConv": on_graph(
            "RGCNConv", lambda pyg: pyg.RGCNConv(columns, columns, relations), types
        ),
        "FastRGCNConv": on_graph(
            "FastRGCNConv", lambda pyg: pyg.FastRGCNConv(columns, columns // 4, relations), types
        ),
    }
    only = (
        arguments.only.split(",")
        if arguments.only
        else [name for name in every if name not in ON_REQUEST]
    )
    return {name: every[name] for name in only}


def every(
    arguments: argparse.Namespace, device: str
) -> Iterator[tuple[str, Callable[[], Program]]]:
    """The programs over each of the graphs."""
    for number, one in enumerate(arguments.graph.split(",")):
        for name, build in programs(
            argparse.Namespace(**{**vars(arguments), "graph": one}), device
        ).items():
            if not number or name not in WITHOUT_GRAPH:
                yield name, build


# --- measuring ------------------------------------------------------------------------------------


def ways(model: nn.Module, fuse: str) -> dict[str, Callable[..., Tensor]]:
    return {
        "eager": model,
        "torch.compile": torch.compile(model),
        "insum": torch.compile(model, backend="insum", options={"insum.fuse": fuse}),
    }


def settle(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def single(run: Callable[[], object]) -> list[float]:
    """Milliseconds of calls that are waited for, one after the other, between CUDA events."""
    times: list[float] = []
    while len(times) < 3 or len(times) < REPEAT and sum(times) < MOST_MS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times


def in_a_row(run: Callable[[], object]) -> list[float]:
    """Milliseconds of one of several calls, none of which is waited for: the host prepares the next
    while the device works.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # so that the device has something to do when the clock starts
    start.record()
    for _ in range(ROW):
        run()
    end.record()
    end.synchronize()
    return [start.elapsed_time(end) / ROW]


def in_turns(every: Sequence[Way], device: str) -> None:
    """Measure the calls of every way, in rounds, and put the medians into their rows."""
    if device != "cuda":
        for way in every:
            way.row.update(dict.fromkeys(CALLS, float("nan")))
        return
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for way in every:
            for key, measured, run in zip(
                CALLS,
                (single, single, in_a_row, in_a_row),
                (way.forward, way.both) * 2,
                strict=True,
            ):
                times.setdefault((way.name, key), []).extend(measured(run))
    for way in every:
        way.row.update({key: statistics.median(times[way.name, key]) for key in CALLS})


def replayed(run: Callable[[], object], device: str) -> float | None:
    """Milliseconds of one of several replays of a CUDA graph; None where it cannot be recorded."""
    if device != "cuda":
        return None
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, stream=side, capture_error_mode="thread_local"):
            held = run()
        recorded.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            recorded.replay()
        end.record()
        end.synchronize()
        del held
        return start.elapsed_time(end) / REPLAYS
    except Exception as reason:
        print(
            f"  not recorded as a CUDA graph: {type(reason).__name__}: "
            f"{str(reason).splitlines()[0][:160]}",
            flush=True,
        )
        torch.cuda.synchronize()
        return None


def peak(run: Callable[[], object], device: str) -> int:
    """Bytes allocated at the peak of a warm call, beyond those that were there."""
    settle(device)
    if device != "cuda":
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = run()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    del held
    return most


def relative(got: Tensor, want: Tensor) -> float:
    return (
        (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30)
    ).item()


def results(
    model: nn.Module, run: Callable[..., Tensor], arguments: tuple[Any, ...], upstream: Tensor
) -> list[Tensor]:
    x = arguments[0].detach().requires_grad_()
    out = run(x, *arguments[1:])
    leaves = [x, *model.parameters()]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def reference(program: Program, upstream: Tensor) -> list[Tensor]:
    """Values and gradients of the eager model in float64."""
    import copy

    model = copy.deepcopy(program.model).double()
    for name in ("_cached_edge_index", "_cached_adj_t"):
        if hasattr(model, name):
            setattr(model, name, None)
    wide = tuple(
        a.double() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in program.arguments
    )
    return [t.float() for t in results(model, model, wide, upstream.double())]


def measure(program: Program, fuse: str, device: str, fresh: bool) -> dict[str, Any]:
    with torch.no_grad():
        shape = program.model(*program.arguments).shape
    upstream = torch.randn(shape, device=device)
    want = reference(program, upstream)
    row: dict[str, Any] = {
        "program": program.name,
        "case": program.case,
        "messages": 4 * program.messages,
    }
    torch._dynamo.reset()
    insum.fusion.clear()
    prepared: list[Way] = []
    for name, run in ways(program.model, fuse).items():
        settle(device)
        try:
            prepared.append(prepare(name, program, run, upstream, want, device, fresh))
        except Exception as failure:  # one that fails does not hide the others
            row[name] = {"failed": f"{type(failure).__name__}: {str(failure)[:500]}"}
            print(f"{program.name:13s} {name:14s} FAILED {row[name]['failed']}", flush=True)
    in_turns(prepared, device)
    for way in prepared:
        row[way.name] = way.row
        if way.name == "insum":
            told = insum.fusion.report()
            way.row.update(
                {
                    "fused": [f.statement for f in told.fused],
                    "left": [f"{f.root}: {f.why}" for f in told.left],
                }
            )
        print(line(program.name, way.name, row), flush=True)
    if "failed" in row["insum"]:
        also = " (and so does torch.compile alone)" if "failed" in row["torch.compile"] else ""
        row["failed"] = row["insum"]["failed"] + also
    return row


def prepare(
    name: str,
    program: Program,
    run: Callable[..., Tensor],
    upstream: Tensor,
    want: list[Tensor],
    device: str,
    fresh: bool,
) -> Way:
    """Compile, compare with what is wanted, warm up; and measure what the host does not disturb."""
    x = program.arguments[0].detach().requires_grad_()
    leaves = [x, *program.model.parameters()]
    calls = itertools.count(1)

    def forward() -> Tensor:
        less = 37 * next(calls) % 1000 if fresh else 0
        return run(
            x,
            *(a[..., : a.shape[-1] - less].clone() if fresh else a for a in program.arguments[1:]),
        )

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, upstream)

    def worst() -> float:
        return max(
            relative(a, b)
            for a, b in zip(
                results(program.model, run, program.arguments, upstream), want, strict=True
            )
        )

    error = worst()
    # the latter until kernels are there for all kinds of sizes
    for _ in range(2 * WARM if fresh else WARM):
        both()
    row: dict[str, Any] = {
        "error": max(error, worst()),
        "forward_bytes": peak(forward, device),
        "both_bytes": peak(both, device),
    }
    if not fresh and (name == "insum" or not program.waits):
        row |= dict(
            zip(
                REPLAYED,
                (replayed(lambda: forward().detach(), device), replayed(both, device)),
                strict=True,
            )
        )
    return Way(name, forward, both, row)


def line(program: str, name: str, rows: dict[str, Any]) -> str:
    one, rival = rows[name], rows.get("torch.compile")
    faster = ""
    if name == "insum" and rival and "failed" not in rival:
        ratio = lambda key: (
            f"{rival[f'forward_{key}'] / one[f'forward_{key}']:.2f}x, "
            f"{rival[f'both_{key}'] / one[f'both_{key}']:.2f}x"
        )
        faster = f"  {ratio('ms')} (in a row {ratio('row_ms')})"
        if all(way.get(key) for way in (one, rival) for key in REPLAYED):
            faster += f" (replayed {ratio('replayed_ms')})"
    mib = 2**20
    again = (
        f" (replayed {one['forward_replayed_ms']:.3f} / {one['both_replayed_ms']:.3f})"
        if all(one.get(key) for key in REPLAYED)
        else ""
    )
    memory = f"peak {one['forward_bytes'] / mib:8.1f} / {one['both_bytes'] / mib:8.1f} MiB"
    row = f"(in a row {one['forward_row_ms']:.3f} / {one['both_row_ms']:.3f})"
    return (
        f"{program:13s} {name:14s} {one['forward_ms']:8.3f} / {one['both_ms']:8.3f} ms "
        f"{row}{again}  {memory}  error {one['error']:.1e}{faster}"
    )


def write(path: str, rows: list[dict[str, Any]], device: str) -> None:
    if not path:
        return
    about = {
        "command": " ".join(
            ["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]
        ),
        "date": datetime.date.today().isoformat(),
    }
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    about |= {
        "device": name,
        "torch": torch.__version__,
        "insum": insum.__version__,
        "goal": GOAL,
        "rows": rows,
    }
    Path(path).write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default="", help="names of programs, separated by commas")
    parser.add_argument(
        "--graph",
        default="ego-twitter",
        help="names of graphs, separated by commas; programs that have none are run once",
    )
    parser.add_argument("--cloud", default="pc-s3dis-ucf-lobby")
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="no program is begun later than this"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="tiny drawn data, on the CPU where there is no GPU: a check that all of it runs",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="index tensors never seen before at each call, and of another length, as in "
        "mini-batches",
    )
    parser.add_argument(
        "--breaks",
        action="store_true",
        help="Dynamo as it is by default: layers that mask edges break their graph",
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.small:
        sys.exit("benchmarks/fusion.py needs a GPU; --small runs tiny sizes without one")
    warnings.filterwarnings("ignore")
    # Layers that mask edges have shapes that depend on data; so that no way has to break its graph
    # there.
    torch._dynamo.config.capture_dynamic_output_shape_ops = not arguments.breaks
    torch._dynamo.config.capture_scalar_outputs = not arguments.breaks
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    print(
        "milliseconds and peak memory: forward / forward and backward; times faster than "
        "torch.compile alone"
    )
    for name, build in every(arguments, device):
        if time.monotonic() - began > arguments.seconds:
            print(
                f"\n{name}: left out, {arguments.seconds:.0f} seconds are over (--seconds)",
                flush=True,
            )
            continue
        try:
            program = build()
        except ImportError as missing:
            print(f"skipped: {missing}")
            continue
        print(
            f"\n{program.name}: {program.case}; messages would take "
            f"{4 * program.messages / 2**20:.1f} MiB",
            flush=True,
        )
        rows.append(
            measure(program, "always" if device == "cpu" else "auto", device, arguments.fresh)
        )
        write(arguments.json, rows, device)
        print(f"{program.name}: {time.monotonic() - began:.0f} s since the start", flush=True)
        del program
        settle(device)
    if any("failed" in row and "so does torch.compile alone" not in row["failed"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
