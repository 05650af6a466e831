"""The README's table of measurements, made from the files under benchmarks/results/ and from nothing else.

    python benchmarks/report.py            rewrite the table
    python benchmarks/report.py --check    exit with 1 if the table is not what the files say

``bench.json`` is what ``insum bench all`` (or ``insum bench report``) leaves in its folder; where it is not, ``kernels.json`` is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
START, END = "<!-- results:start -->", "<!-- results:end -->"
_OURS = ("application", "case", "error", "insum_ms", "ok")
Row = dict[str, Any]


def table(folder: Path = ROOT / "benchmarks" / "results") -> str:
    """Markdown of the newest results; ratios above 1 mean that insum is faster."""
    for name, make in (("bench.json", bench_table), ("kernels.json", kernels_table)):
        if (folder / name).exists():
            return "\n".join(make(json.loads((folder / name).read_text(encoding="utf-8")))) + "\n"
    return "No measurements yet.\n"


# --- of insum bench --------------------------------------------------------------------------------------------------------------


def bench_table(result: dict[str, Any]) -> list[str]:
    """Forward case by case; training as the range of ratios over all cases; ablation and compilers row by row."""
    sections = {s["benchmark"]: s for s in result["sections"]}
    compared = [s for name, s in sections.items() if name not in ("ablation", "compilers")]
    lines = _about(result["sections"])
    lines += ["| application | case | insum ms | rivals ms | of the limit | error |", "|---|---|--:|---|--:|--:|"]
    lines += [line for s in compared for line in forward_lines(s)]
    lines += ["", "Forward and backward together, over all cases:", ""]
    lines += ["| application | against | insum is faster in | least | median | most |", "|---|---|--:|--:|--:|--:|"]
    lines += [line for s in compared for line in training_lines(s)]
    if "ablation" in sections:
        lines += ["", "What each technique contributes (each line has what those before it have):", "", "| stage | ms | times as fast |", "|---|--:|--:|"]
        lines += ablation_lines(sections["ablation"])
    if "compilers" in sections:
        lines += ["", "From one line to a result:", "", "| application | route | first call s | run ms |", "|---|---|--:|--:|"]
        lines += compiler_lines(sections["compilers"])
    missing = [f"{m['name']} ({s['title']})" for s in result["sections"] for m in s["missing"]]
    lines += ["", "Not measured there: " + ", ".join(dict.fromkeys(missing)) + "."] if missing else []
    commands = ", ".join(f"`{c}`" for c in dict.fromkeys(s["command"] for s in result["sections"]))
    return [*lines, "", f"Made by {commands}, then `python benchmarks/report.py`."]


def _about(sections: list[dict[str, Any]]) -> list[str]:
    place = sections[0]
    dates = ", ".join(dict.fromkeys(s["date"] for s in sections))
    limits = place["limits"]
    rates = ", ".join(f"{value:.3g} {unit}" for unit, value in limits.items())
    return [
        f"Medians in milliseconds on one {place['device']}, torch {place['versions']['torch']}, {dates}, default configs, CUDA-graph replay, rivals in the",
        f"same run, every result checked against float64. A ratio above 1 means that insum is faster. Limits in that run: {rates}.",
        "",
    ]


def grouped(rows: Iterable[Row], direction: str) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["direction"] == direction:
            found.setdefault((row["case"], row["dtype"]), []).append(row)
    return found


def ours(rows: list[Row]) -> Row | None:
    return next((r for r in rows if r["contender"].startswith("insum") and r["milliseconds"]), None)


def forward_lines(section: dict[str, Any]) -> list[str]:
    lines = []
    for (case, dtype), rows in grouped(section["rows"], "forward").items():
        mine = ours(rows)
        if mine is None:
            continue
        others = [r for r in rows if r["milliseconds"] and r is not mine]
        beside = ", ".join(f"{r['contender']} {r['milliseconds']:.3f} ({r['milliseconds'] / mine['milliseconds']:.2f}x)" for r in others)
        numbers = f"{mine['milliseconds']:.3f} | {beside} | {mine['limit_percent']:.0f} % | {mine['error']:.0e}"
        lines.append(f"| {section['benchmark']} | {case}, {dtype} | {numbers} |")
    return lines


def training_lines(section: dict[str, Any]) -> list[str]:
    ratios: dict[str, list[float]] = {}
    for rows in grouped(section["rows"], "forward+backward").values():
        mine = ours(rows)
        for row in rows:
            if mine is not None and row["milliseconds"] and not row["contender"].startswith("insum"):
                ratios.setdefault(row["contender"], []).append(row["milliseconds"] / mine["milliseconds"])
    lines = []
    for name, found in ratios.items():
        ahead, middle = sum(r > 1 for r in found), statistics.median(found)
        lines.append(f"| {section['benchmark']} | {name} | {ahead} of {len(found)} | {min(found):.2f}x | {middle:.2f}x | {max(found):.2f}x |")
    return lines


def ablation_lines(section: dict[str, Any]) -> list[str]:
    rows = [r for r in section["rows"] if r["milliseconds"]]
    base = next((r["milliseconds"] for r in rows if r["contender"] == section["baseline"]), None)
    return [f"| {r['contender']} | {r['milliseconds']:.3f} | {_times(base, r)} |" for r in rows]


def _times(base: float | None, row: Row) -> str:
    return f"{base / row['milliseconds']:.1f}x" if base else ""


def compiler_lines(section: dict[str, Any]) -> list[str]:
    return [f"| {r['case']} | {r['contender']} | {r['first_call_s']:.2f} | {r['milliseconds']:.3f} |" for r in section["rows"] if r["milliseconds"]]


# --- of kernels.py ---------------------------------------------------------------------------------------------------------------


def rows_of(result: dict[str, Any]) -> list[str]:
    rows = []
    for row in result["rows"]:
        rivals = {name: value for name, value in row.items() if name not in _OURS}
        beside = ", ".join(f"{name} {value:.3f} ({value / row['insum_ms']:.2f}x)" for name, value in rivals.items())
        rows.append(f"| {row['application']} | {row['case']} | {row['insum_ms']:.3f} | {beside} | {row['error']:.0e} |")
    return rows


def kernels_table(result: dict[str, Any]) -> list[str]:
    return [
        f"Medians in milliseconds on one {result['device']}, torch {result['torch']}, {result['date']}, default configs, CUDA-graph replay, rivals in the same",
        "run. A ratio above 1 means that insum is faster. \"prototype\" is a kernel written by hand for that one case, not part of this repository.",
        "",
        "| application | case | insum | rivals | relative error |",
        "|---|---|--:|---|--:|",
        *rows_of(result),
        "",
        f"Made by `{result['command']}`, then `python benchmarks/report.py`.",
    ]


def updated(readme: str) -> str:
    before, rest = readme.split(START)
    return f"{before}{START}\n{table()}{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    if arguments.check:
        sys.exit(0 if updated(text) == text else "README.md does not show benchmarks/results: run python benchmarks/report.py")
    readme.write_text(updated(text))


if __name__ == "__main__":
    main()
