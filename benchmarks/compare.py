"""Two versions of insum beside each other: the cases of ``insum bench``, in turns, each version in
processes of its own.

    python benchmarks/compare.py OLD/src NEW/src --data DIR [--json FILE] [--rounds 2]

Everything is run once before, all at the same time, so that nothing is compiled while it is timed.
Of each case the better time of all rounds counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

RIVALS = "torch,PyG,cu,e3nn,Open,Flex,spconv,Torch,gather,grouped"
CASES = (
    "conv --only pc-lidar-ucf-LIDAR1 --dtypes fp16",
    "spmm --only cora,email-Enron",
    "block-spmm --only 90 --dtypes fp16",
    "tensor-product --only 1x64",
)
KEY = ("benchmark", "case", "dtype", "direction", "contender")


def started(source: Path, case: str, data: str, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "insum.bench", *case.split(), "--quick", "--no-slow"]
    command += ["--data", data, "--skip", RIVALS, "--out", str(out)]
    surroundings = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.Popen(
        command, env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def rows_of(out: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    file = out / "bench.json"
    sections = json.loads(file.read_text())["sections"] if file.exists() else []
    every = [row for section in sections for row in section["rows"]]
    ours = [r for r in every if r["contender"].startswith("insum") and r["milliseconds"]]
    return {tuple(row[k] for k in KEY): row for row in ours}


def compared(versions: dict[str, Path], data: str, rounds: int) -> list[dict[str, Any]]:
    times: dict[tuple[str, ...], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        warm = [
            started(source, case, data, Path(folder) / f"warm-{name}-{number}")
            for number, case in enumerate(CASES)
            for name, source in versions.items()
        ]
        for one in warm:
            one.wait()
        for turn in range(rounds):
            for number, case in enumerate(CASES):
                for name, source in versions.items():
                    out = Path(folder) / f"{name}-{number}-{turn}"
                    started(source, case, data, out).wait()
                    for key, row in rows_of(out).items():
                        best = times.setdefault(key, {})
                        best[name] = min(best.get(name, float("inf")), row["milliseconds"])
    return [
        {**dict(zip(KEY, key, strict=True)), "old_ms": own.get("old"), "new_ms": own.get("new")}
        for key, own in sorted(times.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = compared({"old": asked.old, "new": asked.new}, asked.data, asked.rounds)
    for row in rows:
        both = row["old_ms"] and row["new_ms"]
        ratio = f"{row['new_ms'] / row['old_ms']:.3f}" if both else "-"
        print("  ".join(str(row[k]) for k in KEY), row["old_ms"], row["new_ms"], ratio, flush=True)
    record = {
        "command": "python benchmarks/compare.py OLD/src NEW/src --data DIR",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "rows": rows,
    }
    if asked.json:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
