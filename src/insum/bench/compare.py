"""``insum bench compare OLD/src NEW/src``: two versions of insum beside each other: cases of the
four applications, in turns, each version in processes of its own.

Everything is run once before, all at the same time, so that nothing is compiled while it is timed.
Of each case the better time of all rounds counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insum.bench import records
from insum.bench.records import Row
from insum.bench.study import Study
from insum.errors import BenchError

#: Left out: what stays the same between the versions.
RIVALS = "torch,PyG,cu,e3nn,Open,Flex,spconv,Torch,gather,grouped"
CASES = {
    "conv": "--only pc-lidar-ucf-LIDAR1 --dtypes fp16",
    "spmm": "--only cora,email-Enron",
    "block-spmm": "--only 90 --dtypes fp16",
    "tensor-product": "--only 1x64",
}
KEY = ("benchmark", "case", "dtype", "direction", "contender")


def started(source: Path, case: str, study: Study, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "insum.bench", *case.split(), "--quick", "--no-slow"]
    command += ["--device", study.device.type, "--data", str(study.options.data or "")]
    command += ["--skip", RIVALS, "--out", str(out)]
    surroundings = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.Popen(
        command, env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def times_of(out: Path) -> dict[tuple[str, ...], float]:
    """Our times, by case; none where the version could not run it."""
    file = out / "bench.json"
    rows = (
        [row for section in records.read([file]) for row in section.rows] if file.exists() else []
    )
    return {
        _key(row): row.milliseconds
        for row in rows
        if row.milliseconds and row.contender.startswith("insum")
    }


def _key(row: Row) -> tuple[str, ...]:
    return tuple(getattr(row, name) for name in KEY)


def compared(
    versions: Mapping[str, Path], cases: Sequence[str], study: Study
) -> list[dict[str, Any]]:
    times: dict[tuple[str, ...], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        warm = [
            started(source, case, study, Path(folder) / f"warm-{name}-{number}")
            for number, case in enumerate(cases)
            for name, source in versions.items()
        ]
        for one in warm:
            one.wait()
        for turn in range(study.asked.rounds):
            for number, case in enumerate(cases):
                for name, source in versions.items():
                    out = Path(folder) / f"{name}-{number}-{turn}"
                    started(source, case, study, out).wait()
                    for key, taken in times_of(out).items():
                        best = times.setdefault(key, {})
                        best[name] = min(best.get(name, taken), taken)
    return [
        {**dict(zip(KEY, key, strict=True)), "old_ms": own.get("old"), "new_ms": own.get("new")}
        for key, own in sorted(times.items())
    ]


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: Any) -> None:
    parser.add_argument("--rounds", type=int, default=2)


def run(study: Study) -> int:
    if len(study.sources) != 2 or not all(one.is_dir() for one in study.sources):
        raise BenchError(
            f"compare was given {', '.join(map(str, study.sources)) or 'no folders'}",
            expected="two folders that are there: the src of one version and of another",
        )
    cases = [f"{name} {CASES[name]}" for name in study.wanted(list(CASES))]
    old, new = study.sources
    rows = compared({"old": old, "new": new}, cases, study)
    study.keep(rows=rows)
    for row in rows:
        both = row["old_ms"] and row["new_ms"]
        ratio = f"{row['new_ms'] / row['old_ms']:.3f}" if both else "-"
        print("  ".join(row[k] for k in KEY), row["old_ms"], row["new_ms"], ratio, flush=True)
    return 0 if rows else 1
