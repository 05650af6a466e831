"""``insum bench fusion``: programs in plain PyTorch: eager, torch.compile alone, and
torch.compile(backend="insum"), in one run.

Per program and way: median milliseconds of the forward pass of a training step and of the whole
step: of single calls that are waited for, of calls in a row, as a training loop makes them, both in
rounds, in which the ways take turns because hosts are now quick, now slow; and replayed as a CUDA
graph where it can be recorded, with edges that were promised to stay (`insum.unchanging`). Peak
memory beyond what is there before, and the largest relative
error, of the result and of every gradient, against eager in float64, or in float32 where float64
does not fit. The record is written after each program, and what it has is not measured again:
several runs make one record. Runs that share a device take turns (`measure.turn`): all compile side
by side, then one after the other measures. Without a GPU everything is tiny, and shows only that
all of it runs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import insum
import insum.fusion
from insum.bench import batches
from insum.bench.kernels import KernelTimes, kernel_times
from insum.bench.measure import (
    TOLERANCE,
    clock,
    in_turns,
    name_of,
    peak_bytes,
    relative_error,
    release,
    set_up,
    turn,
    wait_quietly,
)
from insum.bench.programs import (
    FURTHER_PROGRAMS,
    ON_REQUEST,
    PROGRAMS,
    PlainProgram,
    ProgramData,
    made,
    names_over,
)
from insum.bench.study import Study
from insum.compat.compiler import traced_sizes_of_data

#: Times as fast as torch.compile alone: the median forward and with backward, with backward of
#: layers with attention, and each program at least.
GOALS = {"forward": 1.5, "both": 1.3, "attention": 2.0, "least": 0.98}
ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")
WARM, ROW, ROUNDS = 15, 10, 9
#: A gradient with this share of the largest one's norm is taken for zero.
NOTHING = 1e-3
#: Where layers of PyG keep what they made of edges.
CACHED = ("_cached_edge_index", "_cached_adj_t")
REPLAYED = ("forward_replayed_ms", "both_replayed_ms")


@dataclass(frozen=True)
class CompiledWay:
    """A program compiled in one way, or not at all: its calls, and what was measured."""

    name: str
    forward: Callable[[], Tensor]
    both: Callable[[], tuple[Tensor, ...]]
    row: dict[str, Any]


def ways(model: nn.Module, fuse: str) -> dict[str, Callable[..., Tensor]]:
    return {
        "eager": model,
        "torch.compile": torch.compile(model),
        "insum": torch.compile(model, backend="insum", options={"insum.fuse": fuse}),
    }


# --- what is right --------------------------------------------------------------------------------


def results(
    model: nn.Module, run: Callable[..., Tensor], arguments: tuple[Any, ...], upstream: Tensor
) -> tuple[Tensor, ...]:
    x = arguments[0].detach().requires_grad_()
    out = run(x, *arguments[1:])
    leaves = [x, *model.parameters()]
    return (out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def largest_error(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The largest relative error. A gradient that is zero but for rounding, as that of a bias of
    the keys of an attention, is measured by the largest of all.
    """
    norms = [float(w.double().norm()) for w in want]
    pairs = zip(got, want, norms, strict=True)
    return max(
        relative_error((g,), (w,)) * n / max(n, NOTHING * max(norms), 1e-30) for g, w, n in pairs
    )


def reference(program: PlainProgram, upstream: Tensor) -> tuple[Tensor, ...]:
    """Values and gradients of the eager model in float64; in float32 where that does not fit."""
    for dtype in (torch.float64, torch.float32):
        model = copy.deepcopy(program.model).to(dtype)
        for part, name in itertools.product(model.modules(), CACHED):
            if hasattr(part, name):
                setattr(part, name, None)
        wide = tuple(
            a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a
            for a in program.arguments
        )
        try:
            return results(model, model, wide, upstream.to(dtype))
        except torch.OutOfMemoryError:
            release(upstream.device)
    raise torch.OutOfMemoryError(f"{program.name} does not fit in float32 either")


# --- measuring ------------------------------------------------------------------------------------


def measured(program: PlainProgram, study: Study) -> dict[str, Any]:
    """Every way is compiled first, and then measured in turn."""
    device, fuse = study.device, "auto" if study.options.gpu else "always"
    with set_up():
        with torch.no_grad():
            out = program.model(*program.arguments)
        upstream = torch.randn(out.shape, device=device).to(out.dtype)
        del out
        want = reference(program, upstream)
    row: dict[str, Any] = {"case": program.case, "messages": 4 * program.messages}
    torch.compiler.reset()
    insum.fusion.clear()
    prepared: list[CompiledWay] = []
    for name, run in ways(program.model, fuse).items():
        if any(part in name for part in study.options.skip):
            continue
        release(device)
        try:
            with set_up():
                way = prepare(name, program, run, upstream, want, study)
        except Exception as failure:  # one that fails does not hide the others
            row[name] = _failed(failure)
        else:
            prepared.append(way)
            row[name] = way.row
    with turn():
        for way in prepared:
            try:
                measure_quietly(way, program, study)
            except Exception as failure:
                wait_quietly(device)
                way.row.update(_failed(failure))
        whole = [way for way in prepared if "failed" not in way.row]
        time_calls(whole, device, study.asked.rounds if study.options.gpu else 1)
    if "failed" in row.get("insum", {}):
        alone = row.get("torch.compile", {})
        also = " (and so does torch.compile alone)" if "failed" in alone else ""
        row["failed"] = row["insum"]["failed"] + also
    elif "insum" in row:
        told = insum.fusion.report()
        row["insum"]["fused"] = [found.statement for found in told.fused]
        row["insum"]["left"] = [f"{found.root}: {found.why}" for found in told.left]
    return row


def _failed(failure: Exception) -> dict[str, Any]:
    return {"failed": f"{type(failure).__name__}: {str(failure)[:500]}"}


def prepare(
    name: str,
    program: PlainProgram,
    run: Callable[..., Tensor],
    upstream: Tensor,
    want: tuple[Tensor, ...],
    study: Study,
) -> CompiledWay:
    """Compile, compare with what is wanted, and warm up."""
    fresh = study.asked.fresh
    x = program.arguments[0].detach().requires_grad_()
    leaves, calls = [x, *program.model.parameters()], itertools.count(1)

    def forward() -> Tensor:
        if not fresh:
            return run(x, *program.arguments[1:])
        less = 37 * next(calls) % (1000 if study.options.gpu else 100)
        return run(x, *(_fewer(a, less) for a in program.arguments[1:]))

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, upstream)

    def error() -> float:
        return largest_error(results(program.model, run, program.arguments, upstream), want)

    first = error()
    # the latter until kernels are there for all kinds of sizes
    for _ in range((2 if fresh else 1) * (WARM if study.options.gpu else 2)):
        both()
    return CompiledWay(name, forward, both, {"error": max(first, error())})


def _fewer(value: Tensor, less: int) -> Tensor:
    """Edges, relations or values of edges without the last of them, in a tensor of its own."""
    dim = 0 if value.is_floating_point() else -1
    return value.narrow(dim, 0, max(0, value.shape[dim] - less)).clone()


def measure_quietly(way: CompiledWay, program: PlainProgram, study: Study) -> None:
    """What the host does not disturb: peak memory, replays, and each kernel where it is asked for;
    into the way's row.
    """
    device, row = study.device, way.row
    release(device)
    for kind, call in (("forward", way.forward), ("both", way.both)):
        row[f"{kind}_bytes"] = peak_bytes(call, device) if study.options.gpu else 0
    if study.options.gpu and not study.asked.fresh and (way.name == "insum" or not program.waits):
        if way.name == "insum":
            promise(program)
        times = replayed(lambda: (way.forward().detach(),), device), replayed(way.both, device)
        row |= dict(zip(REPLAYED, times, strict=True))
    if study.asked.profile:
        row["kernels"] = [one.told() for one in kernel_times(way.both, device)]


def promise(program: PlainProgram) -> None:
    """Say that the edges stay: a CUDA graph may be replayed on others, which nobody would see, so
    that kernels in it rest on nothing that was not promised.
    """
    kept = [getattr(m, "_cached_edge_index", None) or () for m in program.model.modules()]
    for value in (*program.arguments, *itertools.chain(*kept)):
        if isinstance(value, Tensor) and not value.is_floating_point():
            insum.unchanging(value)


def replayed(run: Callable[[], tuple[Tensor, ...]], device: torch.device) -> float | None:
    """Milliseconds by replays of a CUDA graph; None where it cannot be recorded."""
    milliseconds, how = clock(run, device)
    if how == "CUDA graph":
        return milliseconds
    print(f"  {how}", flush=True)
    return None


def time_calls(every: Sequence[CompiledWay], device: torch.device, rounds: int) -> None:
    """The calls of every way, in turns: medians into their rows."""

    def single(run: Callable[[], object]) -> float:
        return clock(run, device, capture=False)[0]

    def in_a_row(run: Callable[[], object]) -> float:
        """None is waited for: the host prepares the next while the device works."""
        return clock(lambda: [run() for _ in range(ROW)], device, capture=False)[0] / ROW

    for kind in ("forward", "both"):
        runs: Mapping[str, Callable[[], object]] = {way.name: getattr(way, kind) for way in every}
        for key, time_of in ((f"{kind}_ms", single), (f"{kind}_row_ms", in_a_row)):
            times = in_turns(runs, rounds, time_of)
            for way in every:
                way.row[key] = statistics.median(times[way.name])


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: Any) -> None:
    parser.add_argument("--graph", default="ego-twitter", help="graphs, separated by commas")
    parser.add_argument("--cloud", default="pc-s3dis-ucf-lobby")
    parser.add_argument(
        "--further",
        action="store_true",
        help="the other layers of PyG, and messages written by hand",
    )
    parser.add_argument("--columns", type=int, default=64, help="channels")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="index tensors never seen before at each call, and of another length, as in "
        "mini-batches",
    )
    parser.add_argument(
        "--batches",
        action="store_true",
        help="train two layers on sampled neighbourhoods instead, steps after steps",
    )
    parser.add_argument("--steps", type=int, default=200, help="of --batches")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="in which the ways take turns, on a GPU"
    )
    parser.add_argument(
        "--breaks",
        action="store_true",
        help="Dynamo as it is by default: layers that mask edges break their graph",
    )
    parser.add_argument(
        "--profile", action="store_true", help="every kernel of a step, and what it takes"
    )


def run(study: Study) -> int:
    if study.asked.batches:
        return batches.run(study)
    rows = {key_of(row): row for row in read(study.file)}
    # So that no way has to break its graph where shapes depend on data.
    scope = contextlib.nullcontext() if study.asked.breaks else traced_sizes_of_data()
    with scope, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for about in wanted(study):
            if key_of(about) in rows:
                continue
            if not study.has_time():
                print("the time is up; the same command goes on from here", flush=True)
                break
            row = row_of(about, study)
            if row is not None:
                rows[key_of(about)] = row
                study.keep(goals=GOALS, rows=list(rows.values()))
    for line in told(list(rows.values())):
        print(line)
    failed = [row["failed"] for row in rows.values() if "failed" in row]
    return int(any("so does torch.compile alone" not in why for why in failed))


def wanted(study: Study) -> list[dict[str, Any]]:
    """What is to be measured, each as the beginning of its row."""
    asked = study.asked
    names = study.wanted(FURTHER_PROGRAMS if asked.further else PROGRAMS)
    if not study.options.names:
        names = [name for name in names if name not in ON_REQUEST]
    about = {"columns": asked.columns, "fresh": asked.fresh, "breaks": asked.breaks}
    return [
        {"program": name, "graph": graph, "dtype": name_of(dtype), **about}
        for name, graph in names_over(names, asked.graph.split(","))
        for dtype in study.options.dtypes_or(torch.float32)
    ]


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("program", "graph", "dtype", "columns", "fresh", "breaks"))


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a record, if there is one."""
    if not file.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return rows


def row_of(about: dict[str, Any], study: Study) -> dict[str, Any] | None:
    """Measured and shown; None where a package is missing."""
    dtype = getattr(torch, about["dtype"])
    given = ProgramData(study.options, about["graph"], study.asked.cloud, about["columns"], dtype)
    try:
        program = made(about["program"], given)
    except ImportError as missing:
        print(f"skipped: {missing}")
        return None
    except Exception as failure:  # of one program, which must not cost the rows of the others
        return _lost(about, failure)
    try:
        row = about | measured(program, study)
    except Exception as failure:
        wait_quietly(study.device)
        row = _lost(about, failure)
    else:
        print(*_lines(row), sep="\n", flush=True)
    del program
    release(study.device)
    return row


def _lost(about: dict[str, Any], failure: Exception) -> dict[str, Any]:
    """The row of a program that could not be made or measured at all."""
    row = about | _failed(failure)
    print(f"\n{row['program']}: FAILED {row['failed']}", flush=True)
    return row


# --- what it tells --------------------------------------------------------------------------------


def _lines(row: dict[str, Any]) -> list[str]:
    """A line for each way: milliseconds and peak memory, forward / forward and backward, and how
    many times as fast as torch.compile alone.
    """
    messages = f"messages would take {row['messages'] / 2**20:.1f} MiB"
    lines = [f"\n{row['program']}: {row['case']}, {row['dtype']}; {messages}"]
    for name in (name for name in ("eager", "torch.compile", "insum") if name in row):
        one = row[name]
        if "failed" in one:
            lines.append(f"{name:14s} FAILED {one['failed']}")
            continue
        parts = [f"{name:14s} {_pair(one, 'ms')} ms (in a row {_pair(one, 'row_ms')})"]
        if all(one.get(key) for key in REPLAYED):
            parts.append(f"(replayed {_pair(one, 'replayed_ms')})")
        peak = " / ".join(f"{one[f'{kind}_bytes'] / 2**20:.1f}" for kind in ("forward", "both"))
        parts.append(f"peak {peak} MiB  error {one['error']:.1e}")
        if name == "insum" and is_compared(row):
            parts.append(_faster(row["torch.compile"], one))
        lines.append("  ".join(parts))
        lines += [f"    {KernelTimes(*kernel)}" for kernel in one.get("kernels", ())]
    return lines


def _pair(one: dict[str, Any], key: str) -> str:
    return " / ".join(f"{one[f'{kind}_{key}']:.3f}" for kind in ("forward", "both"))


def _faster(rival: dict[str, Any], ours: dict[str, Any]) -> str:
    """Times as fast, for each way in which both were timed."""
    told = []
    for key, label in (("ms", "calls"), ("row_ms", "in a row"), ("replayed_ms", "replayed")):
        found = [_times(rival, ours, f"{kind}_{key}") for kind in ("forward", "both")]
        if None not in found:
            told.append(f"{label} {', '.join(f'{times:.2f}x' for times in found)}")
    return "; ".join(told)


def _times(rival: dict[str, Any], ours: dict[str, Any], key: str) -> float | None:
    """How many times as fast we are; None where one was not timed."""
    return rival[key] / ours[key] if rival.get(key) and ours.get(key) else None


def is_compared(row: dict[str, Any]) -> bool:
    """Whether both were run, and neither failed."""
    both = [row.get(name, {"failed": ""}) for name in ("torch.compile", "insum")]
    return all("failed" not in one for one in both)


def told(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Medians over all programs, and what falls short: slower than torch.compile alone, more memory
    at the peak, or a result that is no better than the dtype.
    """
    lines, factors = [], dict[str, list[float]]()
    for row in rows:
        if not is_compared(row):
            continue
        rival, ours = row["torch.compile"], row["insum"]
        label = f"{row['program']} {row['graph']} {row['dtype']}"
        for kind, way in itertools.product(("forward", "both"), ("row_ms", "replayed_ms")):
            times = _times(rival, ours, f"{kind}_{way}")
            if times is None:
                continue
            factors.setdefault(f"{kind} {way}", []).append(times)
            attends = kind == "both" and row["program"] in ATTENTION
            if times < GOALS["attention" if attends else "least"]:
                lines.append(f"{label}: {kind} {way} {times:.2f} of torch.compile")
        for kind in ("forward_bytes", "both_bytes"):
            if ours[kind] > 1.01 * rival[kind]:
                lines.append(f"{label}: {kind} {ours[kind] / rival[kind]:.2f} of torch.compile")
        allowed = max(TOLERANCE[getattr(torch, row["dtype"])], 2 * rival["error"])
        if not ours["error"] <= allowed:
            lines.append(f"{label}: error {ours['error']:.1e}, torch.compile {rival['error']:.1e}")
    for key, found in factors.items():
        goal = GOALS[key.split()[0]]
        lines.append(
            f"{key}: median {statistics.median(found):.2f} of {len(found)} (goal {goal}), "
            f"least {min(found):.2f} (goal {GOALS['least']})"
        )
    return lines
