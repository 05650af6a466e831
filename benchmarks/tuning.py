"""First guess against a full search, for each application and each graph and cloud of the data
folder: one table.

    python benchmarks/tuning.py --data DIR [--json FILE] [--effort full] [--budget 450]
        [--only block-spmm,spmm,conv,tensor-product]

Both times of a row are medians of CUDA-graph replays from the same run. The search starts with an
empty cache in a temporary folder, and its winner is checked against float64 like the first guess.
What the time budget leaves no room for is named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import insum
import kernels
from insum import search
from insum.plan.config import shown

GOAL = 1.3


class Searches(kernels.Table):
    """A table that tunes what it is given."""

    def __init__(self, effort: str, budget: float) -> None:
        super().__init__()
        self.effort, self.end, self.skipped = effort, time.monotonic() + budget, [""][:0]
        self.found: list[search.Tuned] = []
        tune = search.tune
        search.tune = lambda *args, **options: (  # type: ignore[assignment]
            self.found.append(tune(*args, **options)) or self.found[-1]
        )

    def add(
        self,
        application: str,
        case: str,
        run: Callable[[], torch.Tensor],
        want: torch.Tensor,
        tolerance: float,
        rivals: Any,
    ) -> None:
        if time.monotonic() > self.end:
            self.skipped.append(f"{application} {case}")
            return
        before = kernels.error(run(), want)
        start, self.found[:] = time.monotonic(), []
        with insum.settings(effort=self.effort):
            run()
        taken = time.monotonic() - start
        after = kernels.error(run(), want)
        (tuned,) = self.found
        row = {
            "application": application,
            "case": case,
            "first_guess_us": tuned.first_guess,
            "tuned_us": tuned.microseconds,
            "ratio": tuned.speedup,
            "tried": len(tuned.trials),
            "failed": sum(t.microseconds == float("inf") for t in tuned.trials),
            "search_s": taken,
            "error": max(before, after),
            "ok": max(before, after) < tolerance,
            "config": shown(tuned.choice),
            "first_config": shown(tuned.trials[0].choice) if tuned.trials else "",
            "trials": [
                (shown(t.choice), t.microseconds)
                for t in sorted(tuned.trials, key=lambda t: t.microseconds)[:8]
            ],
        }
        self.rows.append(row)
        print(self.line(row), flush=True)

    def line(self, row: dict[str, Any]) -> str:
        mark = " " if row["ratio"] <= GOAL else "!"
        times = (
            f"first guess {row['first_guess_us']:9.1f} µs  {self.effort} "
            f"{row['tuned_us']:9.1f} µs  ratio {row['ratio']:.2f}{mark}"
        )
        wrong = "" if row["ok"] else f"  WRONG {row['error']:.1e}"
        return (
            f"{row['application']:15s} {row['case']:34s} {times}  {row['tried']:3d} tried, "
            f"{row['search_s']:4.1f} s  {row['config']}{wrong}"
        )


def summary(table: Searches) -> str:
    ratios = [row["ratio"] for row in table.rows]
    if not ratios:
        return "nothing was tuned"
    over = [
        f"{row['application']} {row['case']} ({row['ratio']:.2f})"
        for row in table.rows
        if row["ratio"] > GOAL
    ]
    text = (
        f"{len(ratios)} cases, first guess to {table.effort}: median "
        f"{statistics.median(ratios):.2f}, largest {max(ratios):.2f}"
    )
    text += f"; above {GOAL}: {', '.join(over) or 'none'}"
    return text + (f"\nno time for: {', '.join(table.skipped)}" if table.skipped else "")


def names(folder: Path, *, clouds: bool) -> tuple[str, ...]:
    """Point clouds are the files that begin with pc-, graphs the others."""
    return tuple(sorted(f.stem for f in folder.glob("*.npz") if f.stem.startswith("pc-") == clouds))


def write(table: Searches, file: Path) -> None:
    command = " ".join(["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)])
    about = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
    }
    about |= {
        "torch": torch.__version__,
        "insum": insum.__version__,
        "rows": table.rows,
        "skipped": table.skipped,
    }
    file.write_text(json.dumps(about, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        default="../shared/data",
        help="a folder with .npz files, or one with graphs/ and clouds/ in it",
    )
    parser.add_argument("--json", default="")
    parser.add_argument("--effort", default="full", choices=("quick", "full"))
    parser.add_argument("--only", default="block-spmm,conv,tensor-product,spmm")
    parser.add_argument(
        "--graphs",
        default="",
        help="names, separated by commas; all of the data folder where there are none",
    )
    parser.add_argument("--clouds", default="")
    parser.add_argument("--sparsities", default="0.5,0.8,0.9,0.95,0.99")
    parser.add_argument(
        "--candidates",
        type=int,
        default=0,
        help="how many configs are tried; 0: as many as the effort says",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="after which no new config is tried for one case",
    )
    parser.add_argument(
        "--budget", type=float, default=440.0, help="seconds after which no new case is begun"
    )
    arguments = parser.parse_args()
    os.environ["INSUM_CACHE_DIR"] = tempfile.mkdtemp(prefix="insum-tuning-")
    usual = search.EFFORTS[arguments.effort]
    search.EFFORTS[arguments.effort] = search.Effort(
        arguments.candidates or usual.candidates, usual.refine, arguments.seconds
    )
    table, data, only = (
        Searches(arguments.effort, arguments.budget),
        Path(arguments.data),
        arguments.only.split(","),
    )
    graphs, clouds = (
        (data / "graphs", data / "clouds") if (data / "graphs").is_dir() else (data, data)
    )
    try:
        if "block-spmm" in only:
            kernels.block_spmm(
                table, data, None, tuple(float(s) for s in arguments.sparsities.split(","))
            )
        if "conv" in only:
            kernels.conv(
                table,
                clouds,
                None,
                tuple(filter(None, arguments.clouds.split(","))) or names(clouds, clouds=True),
            )
        if "tensor-product" in only:
            kernels.tensor_product(table, None, None)
        if "spmm" in only:
            kernels.spmm(
                table,
                graphs,
                tuple(filter(None, arguments.graphs.split(","))) or names(graphs, clouds=False),
            )
    finally:  # what was found is kept, whatever happens to the rest
        if arguments.json:
            write(table, Path(arguments.json))
    print("\n" + "\n".join(table.line(row) for row in table.rows))
    print("\n" + summary(table))
    sys.exit(0 if all(row["ok"] for row in table.rows) else 1)


if __name__ == "__main__":
    main()
