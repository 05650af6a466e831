"""``insum bench fusion``: programs in plain PyTorch: eager, torch.compile alone, and
torch.compile(backend="insum"), in one run.

Per program and way: median milliseconds of the forward pass of a training step and of the whole
step: of single calls that are waited for, of calls in a row, as a training loop makes them, both in
rounds, in which the ways take turns because hosts are now quick, now slow; and replayed as a CUDA
graph where it can be recorded. Peak memory beyond what is there before, and the largest relative
error, of the result and of every gradient, against eager in float64. The record is written after
each program. Without a GPU everything is tiny, and shows only that all of it runs.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import insum.fusion
from insum.bench.measure import clock, in_turns, peak_bytes, relative_error, release
from insum.bench.programs import (
    ON_REQUEST,
    PROGRAMS,
    PlainProgram,
    ProgramData,
    made,
    names_over,
)
from insum.bench.study import Study
from insum.compat.compiler import traced_sizes_of_data

GOAL = 1.5
WARM, ROW, ROUNDS = 15, 10, 3
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


def reference(program: PlainProgram, upstream: Tensor) -> tuple[Tensor, ...]:
    """Values and gradients of the eager model in float64."""
    model = copy.deepcopy(program.model).double()
    for name in ("_cached_edge_index", "_cached_adj_t"):
        if hasattr(model, name):
            setattr(model, name, None)
    wide = tuple(
        a.double() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in program.arguments
    )
    return results(model, model, wide, upstream.double())


# --- measuring ------------------------------------------------------------------------------------


def measured(program: PlainProgram, study: Study) -> dict[str, Any]:
    device, fuse = study.device, "auto" if study.options.gpu else "always"
    with torch.no_grad():
        shape = program.model(*program.arguments).shape
    upstream = torch.randn(shape, device=device)
    want = reference(program, upstream)
    row: dict[str, Any] = {
        "program": program.name,
        "case": program.case,
        "messages": 4 * program.messages,
    }
    torch.compiler.reset()
    insum.fusion.clear()
    prepared: list[CompiledWay] = []
    for name, run in ways(program.model, fuse).items():
        release(device)
        try:
            way = prepare(name, program, run, upstream, want, study)
        except Exception as failure:  # one that fails does not hide the others
            row[name] = {"failed": f"{type(failure).__name__}: {str(failure)[:500]}"}
        else:
            prepared.append(way)
            row[name] = way.row
    time_calls(prepared, device)
    if "failed" in row["insum"]:
        also = " (and so does torch.compile alone)" if "failed" in row["torch.compile"] else ""
        row["failed"] = row["insum"]["failed"] + also
    else:
        told = insum.fusion.report()
        row["insum"]["fused"] = [found.statement for found in told.fused]
        row["insum"]["left"] = [f"{found.root}: {found.why}" for found in told.left]
    return row


def prepare(
    name: str,
    program: PlainProgram,
    run: Callable[..., Tensor],
    upstream: Tensor,
    want: tuple[Tensor, ...],
    study: Study,
) -> CompiledWay:
    """Compile, compare with what is wanted, warm up; and measure what the host does not disturb."""
    fresh, device = study.asked.fresh, study.device
    x = program.arguments[0].detach().requires_grad_()
    leaves, calls = [x, *program.model.parameters()], itertools.count(1)

    def forward() -> Tensor:
        if not fresh:
            return run(x, *program.arguments[1:])
        less = 37 * next(calls) % (1000 if study.options.gpu else 100)
        return run(x, *(a[..., : a.shape[-1] - less].clone() for a in program.arguments[1:]))

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), leaves, upstream)

    def error() -> float:
        return relative_error(results(program.model, run, program.arguments, upstream), want)

    first = error()
    # the latter until kernels are there for all kinds of sizes
    for _ in range((2 if fresh else 1) * (WARM if study.options.gpu else 2)):
        both()
    row: dict[str, Any] = {"error": max(first, error())}
    for key, call in (("forward_bytes", forward), ("both_bytes", both)):
        row[key] = peak_bytes(call, device) if study.options.gpu else 0
    if study.options.gpu and not fresh and (name == "insum" or not program.waits):
        times = replayed(lambda: (forward().detach(),), device), replayed(both, device)
        row |= dict(zip(REPLAYED, times, strict=True))
    return CompiledWay(name, forward, both, row)


def replayed(run: Callable[[], tuple[Tensor, ...]], device: torch.device) -> float | None:
    """Milliseconds by replays of a CUDA graph; None where it cannot be recorded."""
    milliseconds, how = clock(run, device)
    if how == "CUDA graph":
        return milliseconds
    print(f"  {how}", flush=True)
    return None


def time_calls(every: Sequence[CompiledWay], device: torch.device) -> None:
    """The calls of every way, in turns: medians into their rows."""

    def single(run: Callable[[], object]) -> float:
        return clock(run, device, capture=False)[0]

    def in_a_row(run: Callable[[], object]) -> float:
        """None is waited for: the host prepares the next while the device works."""
        return clock(lambda: [run() for _ in range(ROW)], device, capture=False)[0] / ROW

    for kind in ("forward", "both"):
        runs: Mapping[str, Callable[[], object]] = {way.name: getattr(way, kind) for way in every}
        for key, time_of in ((f"{kind}_ms", single), (f"{kind}_row_ms", in_a_row)):
            times = in_turns(runs, ROUNDS if device.type == "cuda" else 1, time_of)
            for way in every:
                way.row[key] = statistics.median(times[way.name])


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: Any) -> None:
    parser.add_argument("--graph", default="ego-twitter", help="graphs, separated by commas")
    parser.add_argument("--cloud", default="pc-s3dis-ucf-lobby")
    parser.add_argument("--columns", type=int, default=64, help="channels")
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


def run(study: Study) -> int:
    wanted, rows = study.wanted(PROGRAMS), list[dict[str, Any]]()
    if not study.options.names:
        wanted = [name for name in wanted if name not in ON_REQUEST]
    # So that no way has to break its graph where shapes depend on data.
    scope = contextlib.nullcontext() if study.asked.breaks else traced_sizes_of_data()
    with scope, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, graph in names_over(wanted, study.asked.graph.split(",")):
            if not study.has_time():
                print(f"{name}: left out, the time is over (--budget)", flush=True)
                continue
            row = row_of(name, graph, study)
            if row is not None:
                rows.append(row)
                study.keep(goal=GOAL, rows=rows)
    failed = [row["failed"] for row in rows if "failed" in row]
    return int(any("so does torch.compile alone" not in why for why in failed))


def row_of(name: str, graph: str, study: Study) -> dict[str, Any] | None:
    """Measured and shown; None where a package is missing."""
    asked = study.asked
    try:
        program = made(name, ProgramData(study.options, graph, asked.cloud, asked.columns))
    except ImportError as missing:
        print(f"skipped: {missing}")
        return None
    row = measured(program, study)
    print(*_lines(row), sep="\n", flush=True)
    del program
    release(study.device)
    return row


def _lines(row: dict[str, Any]) -> list[str]:
    """A line for each way: milliseconds and peak memory, forward / forward and backward, and how
    many times as fast as torch.compile alone.
    """
    messages = f"messages would take {row['messages'] / 2**20:.1f} MiB"
    lines = [f"\n{row['program']}: {row['case']}; {messages}"]
    for name in ("eager", "torch.compile", "insum"):
        one = row[name]
        if "failed" in one:
            lines.append(f"{name:14s} FAILED {one['failed']}")
            continue
        parts = [f"{name:14s} {_pair(one, 'ms')} ms (in a row {_pair(one, 'row_ms')})"]
        if all(one.get(key) for key in REPLAYED):
            parts.append(f"(replayed {_pair(one, 'replayed_ms')})")
        peak = " / ".join(f"{one[f'{kind}_bytes'] / 2**20:.1f}" for kind in ("forward", "both"))
        parts.append(f"peak {peak} MiB  error {one['error']:.1e}")
        if name == "insum" and "failed" not in row["torch.compile"]:
            parts.append(_faster(row["torch.compile"], one))
        lines.append("  ".join(parts))
    return lines


def _pair(one: dict[str, Any], key: str) -> str:
    return " / ".join(f"{one[f'{kind}_{key}']:.3f}" for kind in ("forward", "both"))


def _faster(rival: dict[str, Any], ours: dict[str, Any]) -> str:
    """Times as fast, for each way in which both were timed."""
    told = []
    for key, label in (("ms", "calls"), ("row_ms", "in a row"), ("replayed_ms", "replayed")):
        names = [f"{kind}_{key}" for kind in ("forward", "both")]
        if all(one.get(name) for one in (rival, ours) for name in names):
            told.append(f"{label} {', '.join(f'{rival[n] / ours[n]:.2f}x' for n in names)}")
    return "; ".join(told)
