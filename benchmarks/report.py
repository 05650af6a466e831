"""The README's table of measurements, made from the files under benchmarks/results/ and from nothing else.

    python benchmarks/report.py            rewrite the table
    python benchmarks/report.py --check    exit with 1 if the table is not what the files say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
START, END = "<!-- results:start -->", "<!-- results:end -->"
_OURS = ("application", "case", "error", "insum_ms", "ok")


def rows_of(result: dict[str, Any]) -> list[str]:
    rows = []
    for row in result["rows"]:
        rivals = {name: value for name, value in row.items() if name not in _OURS}
        beside = ", ".join(f"{name} {value:.3f} ({value / row['insum_ms']:.2f}x)" for name, value in rivals.items())
        rows.append(f"| {row['application']} | {row['case']} | {row['insum_ms']:.3f} | {beside} | {row['error']:.0e} |")
    return rows


def table() -> str:
    """Markdown of the newest results; ratios above 1 mean that insum is faster."""
    file = ROOT / "benchmarks" / "results" / "kernels.json"
    if not file.exists():
        return "No measurements yet.\n"
    result = json.loads(file.read_text())
    lines = [
        f"Medians in milliseconds on one {result['device']}, torch {result['torch']}, {result['date']}, default configs, CUDA-graph replay, rivals in the same",
        "run. A ratio above 1 means that insum is faster. \"prototype\" is a kernel written by hand for that one case, not part of this repository.",
        "",
        "| application | case | insum | rivals | relative error |",
        "|---|---|--:|---|--:|",
        *rows_of(result),
        "",
        f"Made by `{result['command']}`, then `python benchmarks/report.py`.",
    ]
    return "\n".join(lines) + "\n"


def updated(readme: str) -> str:
    before, rest = readme.split(START)
    return f"{before}{START}\n{table()}{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    if arguments.check:
        sys.exit(0 if updated(text) == text else "README.md does not show benchmarks/results: run python benchmarks/report.py")
    readme.write_text(updated(text))


if __name__ == "__main__":
    main()
