"""The command: ``insum bench WHAT`` through typer, or ``python -m insum.bench WHAT`` with nothing
but Python's own parser.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch

from insum.bench import (
    ablation,
    block_spmm,
    compare,
    compilers,
    conv,
    cpu,
    data,
    distributed,
    equivariant,
    first_call,
    formats,
    fresh,
    fusion,
    gallery,
    machine,
    measure,
    memory,
    models,
    overhead,
    records,
    rivals,
    spmm,
    survey,
    sweep,
    table,
    tensor_product,
    tuning,
    unet,
    voxels,
)
from insum.bench.options import BenchOptions, directions_of, dtypes_of
from insum.bench.progress import Progress
from insum.bench.records import Missing, Row, Section
from insum.bench.study import Study
from insum.errors import BenchError
from insum.runtime import launch

BENCHMARKS: dict[str, ModuleType] = {
    "block-spmm": block_spmm,
    "spmm": spmm,
    "conv": conv,
    "tensor-product": tensor_product,
    "ablation": ablation,
    "compilers": compilers,
}
#: What is no part of ``all``, which is the paper's.
MORE: dict[str, ModuleType] = {
    "gallery": gallery,
    "survey": survey,
    "equivariant": equivariant,
}
#: What has a record of its own.
STUDIES: dict[str, ModuleType] = {
    "fresh": fresh,
    "sweep": sweep,
    "fusion": fusion,
    "tuning": tuning,
    "first-call": first_call,
    "overhead": overhead,
    "memory": memory,
    "formats": formats,
    "cpu": cpu,
    "compare": compare,
    "unet": unet,
    "models": models,
    "voxels": voxels,
    "distributed": distributed,
}
#: What takes folders.
TAKES_SOURCES = ("report", "compare")
#: Seconds after which --quick begins nothing new.
QUICK_BUDGET = {"cuda": 420.0, "cpu": math.inf}
#: Share of the time that every later benchmark keeps for itself.
RESERVED = 0.1
#: What a share above the limit means.
ABOVE = (
    "More than 100 % of the limit: the limit counts each tensor as read or written once, at the "
    "speed of main memory; what is small enough stays in caches from call to call. On a machine "
    "that does other work, too, a row may also be timed in a better moment than the limit was."
)
OUT = Path("out/bench")


def parser(what: str = "") -> argparse.ArgumentParser:
    """``what``: the study whose own options are to be understood, too."""
    made = argparse.ArgumentParser(
        prog="insum bench",
        description="The paper's tables and figures against the rivals that are here.",
    )
    _add_places(made)
    _add_cases(made)
    if what in STUDIES and hasattr(STUDIES[what], "add_options"):
        STUDIES[what].add_options(made.add_argument_group(f"options of {what}"))
    return made


def _add_places(made: argparse.ArgumentParser) -> None:
    """What is run, what of, and where results go."""
    made.add_argument(
        "what",
        nargs="?",
        default="all",
        help=f"{_names()}; report draws tables and figures anew from results; the others are told "
        "of in docs/benchmarks.md, and `insum bench NAME --help` tells of their own options",
    )
    made.add_argument(
        "sources",
        nargs="*",
        type=Path,
        help="report: folders or bench.json files; where several have a case, the last counts; "
        "compare: the src folders of two versions",
    )
    made.add_argument(
        "--data",
        default=None,
        help="a folder with graphs/*.npz and clouds/*.npz; default: ../shared/data where it "
        "is; '': stand-ins",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=OUT,
        help="where bench.json, bench.csv, figures and report.html go (default: out/bench)",
    )
    made.add_argument(
        "--json", type=Path, default=None, help="write the results to this file as well"
    )


def _add_cases(made: argparse.ArgumentParser) -> None:
    """Which cases and rivals, where, and for how long."""
    made.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases; slow rivals only in the first; on a GPU nothing new after 7 minutes",
    )
    made.add_argument(
        "--no-slow",
        action="store_true",
        help="leave out rivals that take long to set up, such as what torch.compile compiles",
    )
    made.add_argument(
        "--skip",
        default="",
        help="rivals to leave out, separated by commas: those whose name contains one of these",
    )
    made.add_argument(
        "--drawn",
        type=int,
        metavar="SEED",
        help="of survey: sizes drawn around those that are named, so that nobody tuned for them",
    )
    made.add_argument(
        "--random",
        type=int,
        metavar="SEED",
        help="of survey: statements that nobody wrote, of sizes that nobody chose",
    )
    made.add_argument(
        "--dtypes", default="", help="fp32,fp16,bf16 (default: the paper's for each benchmark)"
    )
    made.add_argument(
        "--directions",
        default="both",
        help="forward, backward (forward and backward together) or both",
    )
    made.add_argument(
        "--only",
        default="",
        help="cases, separated by commas: names of graphs or clouds, sparsities (90), degree "
        "and channels (3x16)",
    )
    made.add_argument("--device", default="", help="cuda or cpu (default: cuda where there is one)")
    made.add_argument(
        "--budget",
        type=float,
        default=0.0,
        help="seconds after which nothing new is begun; what is left out is named",
    )


def _names() -> str:
    return ", ".join([*BENCHMARKS, "all", *MORE, *STUDIES]) + " or report"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 if every result was right, 1 if one was wrong, 2 if the request was.

    >>> main(["spmm", "--dtypes", "fp8"])
    insum bench: there is no dtype 'fp8'
      expected: fp32, fp16, bf16
    2
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return run(parser(given[0] if given else "").parse_args(given), given)
    except BenchError as error:
        print(f"insum bench: {error}")
        return 2


def run(asked: argparse.Namespace, given: Sequence[str]) -> int:
    if asked.what == "report":
        sections = records.read(asked.sources or [asked.out])
        return finish(sections, asked)
    if asked.what not in (*BENCHMARKS, *MORE, *STUDIES, "all"):
        raise BenchError(f"there is no benchmark {asked.what!r}", expected=_names())
    if asked.sources and asked.what not in TAKES_SOURCES:
        raise BenchError(
            f"{asked.sources[0]} was given to a benchmark",
            expected="one benchmark, and options",
            remedy="folders are for insum bench report",
        )
    if asked.what in STUDIES:
        status: int = STUDIES[asked.what].run(study_of(asked, given))
        return status
    if asked.only and asked.what in ("ablation", "compilers", "all"):
        expected = (
            "one of the four applications: sparsities (90), graphs, clouds, or rows of "
            "the product (3x16)"
        )
        raise BenchError(f"--only {asked.only} was given to {asked.what}", expected=expected)
    options = options_of(asked)
    names = list(BENCHMARKS) if asked.what == "all" else [asked.what]
    budget = asked.budget or (QUICK_BUDGET[options.device.type] if asked.quick else math.inf)
    print(
        f"insum bench on {machine.device_name(options.device)}; data: {data_note(options)}",
        flush=True,
    )
    keep = lambda found: store(found, asked.out)
    sections = measured(names, options, time.monotonic() + budget, machine.command(given), keep)
    return finish(sections, asked)


def study_of(asked: argparse.Namespace, given: Sequence[str]) -> Study:
    file = asked.json or asked.out / f"{asked.what.replace('-', '_')}.json"
    end = time.monotonic() + (asked.budget or math.inf)
    command = machine.command(given)
    return Study(asked.what, options_of(asked), asked, command, file, end, asked.sources)


def options_of(asked: argparse.Namespace) -> BenchOptions:
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cuda", "cpu") or device == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            f"there is no device {device!r}",
            expected="cpu" + (" or cuda" if torch.cuda.is_available() else ""),
        )
    names = tuple(filter(None, asked.only.split(",")))
    skip = tuple(filter(None, asked.skip.split(",")))
    place = data.folder(asked.data)
    return BenchOptions(
        torch.device(device),
        place,
        asked.quick,
        dtypes_of(asked.dtypes),
        directions_of(asked.directions),
        names,
        not asked.no_slow,
        skip,
        asked.drawn,
        asked.random,
    )


def data_note(options: BenchOptions) -> str:
    return (
        f"files of {options.data.name or options.data}" if options.data else "generated stand-ins"
    )


def measured(
    names: Sequence[str],
    options: BenchOptions,
    deadline: float,
    command: str,
    keep: Callable[[list[Section]], object],
) -> list[Section]:
    """One section after the other, each kept as soon as it is there."""
    # torch.sparse, a rival, announces that it is in beta
    warnings.filterwarnings("ignore", message="Sparse")
    limits = measure.DeviceLimits(options.device)
    reserve = RESERVED * (deadline - time.monotonic()) if math.isfinite(deadline) else 0.0
    sections: list[Section] = []
    with Progress() as progress:
        for number, name in enumerate(names):
            later = reserve * (len(names) - number - 1)
            sections.append(
                section(
                    name,
                    options,
                    limits,
                    deadline - later,
                    command,
                    progress,
                    lambda made: keep([*sections, made]),
                )
            )
    return sections


def section(
    name: str,
    options: BenchOptions,
    limits: measure.DeviceLimits,
    deadline: float,
    command: str,
    progress: Progress,
    keep: Callable[[Section], object],
) -> Section:
    """All rows of one benchmark, each shown, and kept, when it is there: a run that is cut off
    leaves what it measured.
    """
    benchmark, start = {**BENCHMARKS, **MORE}[name], time.monotonic()
    made = Section(
        name,
        benchmark.TITLE,
        benchmark.STATEMENT,
        benchmark.BASELINE,
        **machine.about(command, options.device),
        limits={},
        data=data_note(options),
        quick=options.quick,
    )
    made.missing = [
        *rivals.missing(name, options.device),
        *(Missing(*pair) for pair in _not_here(name, options)),
    ]
    if launch.interpreting():
        made.notes.append(
            "Kernels ran in Triton's interpreter, which shows that they are right; their times "
            "say nothing."
        )
    slow = slow_cases(name, options)
    runner = measure.Runner(limits, deadline, slow, options.skip, first_anyway=options.quick)
    progress.start(benchmark.TITLE)
    try:
        for row in runner.rows(benchmark.cases(options)):
            made.rows.append(row)
            made.limits, made.seconds = limits.told(), time.monotonic() - start
            progress.show(row, line(row, made.rows))
            keep(made)
    except (RuntimeError, MemoryError) as error:
        # inputs that do not fit: what was measured is kept
        made.notes.append(
            f"ended early: {type(error).__name__}: {str(error).splitlines()[0][:300]}"
        )
        print(made.notes[-1], flush=True)
    made.limits, made.seconds = limits.told(), time.monotonic() - start
    if any((row.limit_percent or 0) > 100 for row in made.rows):
        made.notes.append(ABOVE)
    keep(made)
    return made


def slow_cases(name: str, options: BenchOptions) -> int:
    """In how many cases rivals that take long to set up are tried."""
    if not options.slow:
        return 0
    return 1 if options.quick and name != "compilers" else 10**6


def _not_here(name: str, options: BenchOptions) -> list[tuple[str, str]]:
    if name == "ablation":
        return ablation.not_here(options)
    if name == "compilers":
        return compilers.not_here(options)
    return []


def line(row: Row, rows: Sequence[Row]) -> str:
    """A row as one line of text."""
    same = [r for r in rows if r.key == row.key]
    ratio = records.speedup(row, same)
    time_ = f"{row.milliseconds:9.4f} ms" if row.milliseconds is not None else f"{row.status:>12s}"
    beside = f" ({ratio:.2f}x)" if ratio is not None else ""
    note = f"  {row.note}" if row.note and row.status != "ok" else ""
    return (
        f"{row.benchmark:15s} {row.case:24s} {row.dtype:9s} {row.direction:17s} "
        f"{row.contender:34s} {time_}{beside}{note}"
    )


def finish(sections: Sequence[Section], asked: argparse.Namespace) -> int:
    """Everything one looks at: table on the terminal, then the files."""
    for one in sections:
        table.show(one)
    written = write(sections, asked.out)
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(records.to_json(sections), encoding="utf-8")
        written.append(asked.json)
    print("written: " + ", ".join(str(f) for f in written))
    wrong = [row for one in sections for row in one.wrong]
    for row in wrong:
        print(
            f"WRONG: {row.benchmark}, {row.case}, {row.dtype}, {row.direction}, "
            f"{row.contender}: {row.note}"
        )
    return (
        1
        if any(row.contender.startswith("insum") or row.benchmark == "ablation" for row in wrong)
        else 0
    )


def write(sections: Sequence[Section], out: Path) -> list[Path]:
    from insum.bench import page, plots

    stored = store(sections, out)
    figures = plots.draw(sections)
    drawn: list[Path] = []
    for name, svg in figures.items():
        drawn.append(out / f"{name}.svg")
        drawn[-1].write_text(svg, encoding="utf-8")
    report = out / "report.html"
    report.write_text(page.page(sections, figures, plots.why_not()), encoding="utf-8")
    return [*stored, *drawn, report]


def store(sections: Sequence[Section], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    results, rows = out / "bench.json", out / "bench.csv"
    results.write_text(records.to_json(sections), encoding="utf-8")
    records.write_csv(sections, rows)
    return [results, rows]
