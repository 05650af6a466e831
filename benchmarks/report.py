"""The tables of measurements in README.md and docs/results.md, the page docs/gallery.md and the
pictures of both, made from the files under benchmarks/results/ and from nothing else.

    python benchmarks/report.py            rewrite the tables
    python benchmarks/report.py --check    exit with 1 if a table is not what the files say

``bench.json`` is what ``insum bench all`` (or ``insum bench report``) leaves in its folder; where
it is not, ``kernels.json`` is shown.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sweep_report import sweep_lines, sweep_picture
from tables import head

ROOT = Path(__file__).parent.parent
RESULTS, README, PAGE = (
    ROOT / "benchmarks" / "results",
    ROOT / "README.md",
    ROOT / "docs" / "results.md",
)
GALLERY = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "pictures"
START, END = "<!-- results:start -->", "<!-- results:end -->"
_OURS = ("application", "case", "error", "insum_ms", "ok")
Row = dict[str, Any]


def table(folder: Path = RESULTS) -> str:
    """Markdown of the newest results, in short; ratios above 1 mean that insum is faster."""
    for name, make in (("bench.json", bench_table), ("kernels.json", kernels_table)):
        if (folder / name).exists():
            lines = make(json.loads((folder / name).read_text(encoding="utf-8")))
            for more, more_lines in SUMMARIES.items():
                if (folder / more).exists():
                    found = json.loads((folder / more).read_text(encoding="utf-8"))
                    lines += ["", *more_lines(found)]
            return "\n".join(lines) + "\n"
    return "No measurements yet.\n"


def page(folder: Path = RESULTS) -> str:
    """All that was measured, case by case."""
    parts = [
        "# Results",
        "",
        "Made by `python benchmarks/report.py` from the files under `benchmarks/results`; a "
        "test compares the two. Commands are those of the day: scripts that are no longer there "
        "are studies of `insum bench` now.",
        "",
    ]
    fused = (
        ("fusion.json", fusion_lines),
        ("fusion_fresh.json", fresh_lines),
        ("fusion_batches.json", batch_lines),
        ("fusion_further.json", further_lines),
    )
    for name, make in (
        ("bench.json", case_lines),
        *fused,
        ("tuning.json", tuning_lines),
        ("overhead.json", overhead_lines),
        ("gallery.json", gallery_lines),
        ("survey.json", survey_lines),
        ("survey_drawn.json", drawn_survey_lines),
        ("survey_random.json", random_survey_lines),
        ("equivariant.json", equivariant_lines),
        ("fresh.json", new_data_lines),
        ("unet.json", unet_lines),
        ("voxels.json", voxel_lines),
        ("models.json", model_lines),
        ("limits.json", limits_lines),
        ("compare.json", compare_lines),
        ("cpu.json", cpu_lines),
        ("cpu_aarch64.json", cpu_lines),
        ("distributed.json", distributed_lines),
        ("sweep.json", lambda result: sweep_lines(result, _measured(result))),
        ("soak.json", soak_lines),
        ("sanitize.json", sanitizer_lines),
    ):
        if (folder / name).exists():
            parts += [*make(json.loads((folder / name).read_text(encoding="utf-8"))), ""]
    return "\n".join(parts).rstrip() + "\n"


def _torch(result: dict[str, Any]) -> str:
    """The version of torch; older records have no other versions."""
    found: str = result["versions"]["torch"] if "versions" in result else result["torch"]
    return found


# --- of the gallery ---


def gallery_lines(result: dict[str, Any]) -> list[str]:
    """Where statements stand beside what people use for them."""
    (section,) = result["sections"]
    cases = {row["case"] for row in section["rows"]}
    return [
        "## Gallery",
        "",
        f"{len(cases)} statements with their times, rivals and kernels: [gallery](gallery.md).",
    ]


def drawn_survey_lines(result: dict[str, Any]) -> list[str]:
    """The same at sizes that were drawn."""
    return survey_lines(result, "Survey at sizes that were drawn")


def random_survey_lines(result: dict[str, Any]) -> list[str]:
    """Statements that were drawn themselves."""
    for row in result["sections"][0]["rows"]:
        row["case"] = f"`{row['case']}`"
    return survey_lines(result, "Survey of statements that were drawn")


def survey_lines(result: dict[str, Any], title: str = "Survey") -> list[str]:
    """Every statement that nobody tuned for, beside the better of eager and compiled PyTorch."""
    (section,) = result["sections"]
    times: dict[tuple[str, str, str], dict[str, float | None]] = {}
    for row in section["rows"]:
        key = row["case"], row["dtype"], row["direction"]
        times.setdefault(key, {})[row["contender"]] = row["milliseconds"]
    directions = ("forward", "forward+backward")
    ratios = {
        d: [_best_beside(one)[2] for key, one in times.items() if key[2] == d] for d in directions
    }
    told = "; ".join(
        f"{d} {_spread([r for r in found if r is not None])}" for d, found in ratios.items()
    )
    lines = [f"## {title}", "", _measured(section), ""]
    lines += [
        "Microseconds, replayed as a CUDA graph, beside the better of eager PyTorch and "
        f"torch.compile; where neither is right, nothing. Times as fast: {told}.",
        "",
    ]
    columns = [f">{name}{more}" for more in ("", ", gradients") for name in ("insum", "PyTorch")]
    lines += head("statement", "dtype", *columns[:2], ">times", *columns[2:], ">times")
    for case, dtype in dict.fromkeys(key[:2] for key in times):
        cells = []
        for direction in directions:
            one = times.get((case, dtype, direction))
            ours, theirs, ratio = (None, None, None) if one is None else _best_beside(one)
            cells += [f"{1e3 * t:.1f}" if t else "-" for t in (ours, theirs)]
            cells.append(f"{ratio:.2f}" if ratio else "-")
        lines.append(f"| {case} | {dtype} | {' | '.join(cells)} |")
    return [*lines, *(line for note in section.get("notes", []) for line in ("", note))]


def _best_beside(times: dict[str, float | None]) -> tuple[float | None, float | None, float | None]:
    """Our time, that of the best other, and how many times as fast we are."""
    ours = times.get("insum")
    theirs = min((t for name, t in times.items() if name != "insum" and t), default=None)
    return ours, theirs, theirs / ours if ours and theirs else None


def gallery_page(folder: Path = RESULTS) -> str:
    """Every statement of the gallery: its line, its times beside all others, its kernel."""
    timed = json.loads((folder / "gallery.json").read_text(encoding="utf-8"))
    written = json.loads((folder / "gallery_kernels.json").read_text(encoding="utf-8"))
    (section,) = timed["sections"]
    parts = [
        "# Gallery",
        "",
        "Statements of all kinds. For each: the line, its pattern (which places of a factor, from "
        "left to right, each place of the result takes from, from above; as in the kernel's small "
        "sizes), the time beside all else that was run, "
        "the share of what the device's memory and arithmetic allow, and the generated kernel. "
        "A ratio above 1 means that insum is faster; losses stand beside wins.",
        "",
        "![Time of the best rival over that of insum](pictures/gallery.svg)",
        "",
        *_about([section]),
        f"Times: `{section['command']}`. Kernels: `{written['command']}`, {written['date']}, for "
        f"{written['architecture']} at small sizes; the configuration depends on sizes. "
        "*Of the limit* counts each tensor as read or written once: where a small one stays in "
        "the cache from call to call, more than 100 % is possible.",
        "",
    ]
    for one in written["kernels"]:
        parts += _exhibit(one, section)
    return "\n".join(parts).rstrip() + "\n"


def _exhibit(one: dict[str, Any], section: dict[str, Any]) -> list[str]:
    shapes = ", ".join(f"{name} {shape}" for name, shape in one["shapes"].items())
    lines = [f"## {one['case'][:1].upper()}{one['case'][1:]}", "", "```text", one["statement"]]
    title = "Places of the result, from above, and those of a factor that they take from"
    lines += ["```", "", f"![{title}](pictures/{_pattern_name(one['case'])})", ""]
    lines += [*head("", "", ">ms", ">insum is faster by", ">of the limit")]
    for direction in ("forward", "forward+backward"):
        for (case, dtype), rows in grouped(section["rows"], direction).items():
            if case == one["case"]:
                lines += _contenders(rows, f"{direction}, {dtype}")
    lines += ["", f'??? note "The kernel ({shapes})"', ""]
    for part in one["parts"] or [{"statement": "left to a library", "kernel": ""}]:
        about = f"`{part['statement']}`"
        about += f", strategy {part['strategy']}, {part['config']}" if part["kernel"] else ""
        lines += [f"    {about}", ""]
        if part["kernel"]:
            code = [f"    {line}".rstrip() for line in part["kernel"].splitlines()]
            lines += ["    ```python3", *code, "    ```", ""]
    return [*lines, ""]


def _contenders(rows: list[Row], what: str) -> list[str]:
    mine = ours(rows)
    lines = []
    for row in rows:
        if not row["milliseconds"]:
            continue
        share = "" if row["limit_percent"] is None else f"{row['limit_percent']:.0f} %"
        ratio = "" if mine in (None, row) else f"{row['milliseconds'] / mine['milliseconds']:.2f}"
        lines.append(f"| {row['contender']} | {what} | {_short(row)} | {ratio} | {share} |")
    return lines


def gallery_picture(folder: Path = RESULTS) -> str:
    """Bars of the best rival's time over ours, forward, as SVG."""
    timed = json.loads((folder / "gallery.json").read_text(encoding="utf-8"))
    bars = []
    for (case, _), rows in grouped(timed["sections"][0]["rows"], "forward").items():
        mine, others = ours(rows), [r for r in rows if r["milliseconds"]]
        rivals = [r for r in others if r is not mine]
        if mine is not None and rivals:
            best = min(rivals, key=lambda r: r["milliseconds"])
            bars.append((case, best["contender"], best["milliseconds"] / mine["milliseconds"]))
    return bar_picture("Time of the best rival / time of insum (forward, log scale)", bars)


def _pattern_name(case: str) -> str:
    return f"pattern-{re.sub(r'[^a-z0-9]+', '-', case.lower()).strip('-')}.svg"


def pattern_pictures(folder: Path = RESULTS) -> dict[Path, str]:
    """By file, the pattern of each statement of the gallery."""
    written = json.loads((folder / "gallery_kernels.json").read_text(encoding="utf-8"))
    return {
        PICTURES / _pattern_name(one["case"]): pattern_picture(one["statement"], one["pattern"])
        for one in written["kernels"]
    }


def pattern_picture(statement: str, panels: list[dict[str, Any]]) -> str:
    """Panels beside each other, each as large as any other, in colours as `bar_picture` has."""
    side, left, gap = 144, 26, 40
    text = 'font-family="sans-serif" font-size="12" fill="#808080"'
    wide = left + (side + gap) * len(panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{side + 40}" '
        f'viewBox="0 0 {wide} {side + 40}" '
        f'role="img" aria-label="The pattern of {html.escape(statement)}">',
    ]
    for number, panel in enumerate(panels):
        x, (high, width) = left + (side + gap) * number, panel["size"]
        runs = [tuple(map(int, run.split(","))) for run in panel["runs"].split()]
        path = "".join(f"M{column} {row}h{n}v1h-{n}z" for row, column, n in runs)
        scale = f"translate({x} 20) scale({side / width:.4f} {side / high:.4f})"
        lines += [
            f'<text x="{x}" y="13" {text}>{html.escape(panel["columns"])}</text>',
            f'<text transform="translate({x - 8} {20 + side}) rotate(-90)" {text}>'
            f"{html.escape(panel['rows'])}</text>",
            f'<path transform="{scale}" d="{path}" fill="#2a9d8f"/>',
            f'<rect x="{x}" y="20" width="{side}" height="{side}" fill="none" stroke="#808080"/>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def bar_picture(title: str, bars: list[tuple[str, str, float]]) -> str:
    """Horizontal bars from 1, to the right where we are faster; no fonts, no scripts, and colours
    that can be read on white and on black.
    """
    left, width, high = 330, 560, 22
    low, top = min(0.5, *(r for *_, r in bars)), max(2.0, *(r for *_, r in bars))
    scale = lambda r: left + (math.log(r) - math.log(low)) / math.log(top / low) * width
    one, tall = scale(1.0), 50 + high * len(bars)
    text = 'font-family="sans-serif" font-size="12" fill="#808080"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 190} {tall}" '
        f'role="img" aria-label="{html.escape(title)}">',
        f'<text x="10" y="20" {text} font-weight="bold">{html.escape(title)}</text>',
        f'<line x1="{one:.1f}" y1="30" x2="{one:.1f}" y2="{tall - 10}" stroke="#808080"/>',
    ]
    for number, (case, rival, ratio) in enumerate(bars):
        y, end = 36 + high * number, scale(ratio)
        colour = "#2a9d8f" if ratio >= 1 else "#e76f51"
        lines += [
            f'<text x="{left - 8}" y="{y + 13}" {text} text-anchor="end">'
            f"{html.escape(case)}</text>",
            f'<rect x="{min(one, end):.1f}" y="{y}" width="{abs(end - one):.1f}" height="16" '
            f'fill="{colour}"/>',
            f'<text x="{max(one, end) + 6:.1f}" y="{y + 13}" {text}>{ratio:.2f} '
            f"({html.escape(rival)})</text>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def applications_picture(folder: Path = RESULTS) -> str:
    """Median ratios of the applications of the README, as SVG."""
    result = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    bars = []
    for section in result["sections"]:
        if section["benchmark"] in STAGES:
            continue
        ratios = beside_ours(section["rows"], "forward")
        bars += [(section["title"], n, statistics.median(found)) for n, found in ratios.items()]
    title = "Median time of a rival / time of insum (forward, log scale)"
    return bar_picture(title, bars)


# --- of new data ----------------------------------------------------------------------------------


def new_data_lines(result: dict[str, Any]) -> list[str]:
    """Calls on tensors and sizes that were never seen."""
    lines = [
        "## New data at each call",
        "",
        f"{result['device']}, torch {_torch(result)}, {result['date']}.",
        "",
        f"{result['calls']} calls each on tensors of a new size, wall time from an idle device to "
        "an idle device, in turns with the rival; what was compiled after the tenth call; what a "
        "call waited for. Most of these times are the host's, which differs between machines by "
        "a third. A step is forward, sum, backward and SGD.",
        "",
        *head("case", "", ">median ms", ">p99", ">most", ">wanted", ">compiled", "waits", ">error"),
    ]
    for row in result["rows"]:
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        wanted = f"{row['wanted_ms']:.2f}" if row["contender"] == "insum" else ""
        lines.append(
            f"| `{row['case']}` | {row['contender']} | {row['median_ms']:.3f} | "
            f"{row['p99_ms']:.3f} | {row['max_ms']:.2f} | {wanted} | {row['compiled']} | "
            f"{row['waits'] or '-'} | {error} |"
        )
    return [*lines, "", f"Made by `{result['command']}`."]


def _beside(others: list[Row]) -> str:
    return ", ".join(f"{other['contender']} {other['median_ms']:.3f}" for other in others)


def new_data_summary(result: dict[str, Any]) -> list[str]:
    """A sentence: the median of every case that has a rival, beside it."""
    cases: dict[str, list[Row]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], []).append(row)
    parts = [
        f"`{case}` {mine['median_ms']:.3f} ms ({_beside(others)})"
        for case, (mine, *others) in cases.items()
        if others
    ]
    return [
        "Calls on tensors of a size that was never seen, from an idle device to an idle device, "
        f"medians of {result['calls']}: {'; '.join(parts)}. "
        "[More](docs/results.md#new-data-at-each-call).",
    ]


def unet_lines(result: dict[str, Any]) -> list[str]:
    """A whole network on clouds that are new at every step."""
    lines = [
        "## MinkUNet18",
        "",
        f"{result['device']}, torch {_torch(result)}, {result['date']}. Medians of "
        f"{result['calls']} steps, wall time from an idle device to an idle device: on maps that "
        "are there, and on clouds that are new at every step, maps included; memory at the peak of "
        "such a step. float16 is autocast; tf32: products of float32, by all of them.",
        *result.get("notes", ()),
        "",
        *head(
            "cloud", ">voxels", ">batch", "dtype", "", "contender",
            ">ms", ">new cloud, ms", ">MiB",
        ),
    ]  # fmt: skip
    for row in result["rows"]:
        times = [row["failed"], ""]
        if not row["failed"]:
            times = [f"{row['steady_ms']:.2f}", f"{row['fresh_ms']:.2f}"]
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        lines.append(
            f"| {row['cloud']} | {row['voxels']} | {row['batch']} | {row['dtype']} | "
            f"{row['direction']} | {row['contender']} | {times[0]} | {times[1]} | {peak} |"
        )
    return [*lines, "", f"Made by `{result['command']}`."]


def voxel_lines(result: dict[str, Any]) -> list[str]:
    """Single layers over voxels, beside a convolution of equal work."""
    lines = [
        "## Layers over voxels",
        "",
        f"{result['device']}, torch {_torch(result)}, {result['date']}. Microseconds on maps that "
        "are there, and how many times those of the submanifold convolution of equal work.",
        "",
        *head("cloud", ">channels", "layer", ">pairs", ">us", ">times"),
    ]
    for row in result["layers"]:
        lines.append(
            f"| {row['cloud']} | {row['channels']} | {row['layer']} | {row['pairs']} | "
            f"{row['us']:.1f} | {row['ratio']:.2f} |"
        )
    maps = [
        f"- A map of {row['voxels']:,} voxels, {row['order']}: {row['map_us']:.0f} us, "
        f"{row['map_us'] / row['sort_us']:.1f} sorts of its keys."
        for row in result["maps"]
    ]
    return [*lines, "", *maps, "", f"Made by `{result['command']}`."]


def model_lines(result: dict[str, Any]) -> list[str]:
    """Whole equivariant networks, swapped and as their packages have them."""
    lines = [
        "## MACE and NequIP",
        "",
        f"{result['device']}, torch {_torch(result)}, {result['date']}. Medians of "
        f"{result['steps']} steps on batches that are new at every step, wall time from an idle "
        "device to an idle device; memory at the peak of a step; the error is that of energies, "
        "forces, stress and gradients of parameters in float64.",
        "",
        *head("model", "step", "contender", ">atoms", ">edges", ">ms", ">MiB", ">error"),
    ]
    for row in result["rows"]:
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        lines.append(
            f"| {row['model']} | {row['step']} | {row['contender']} | {row['atoms']} | "
            f"{row['edges']} | {row['failed'] or format(row['ms'], '.1f')} | {peak} | {error} |"
        )
    return [*lines, "", *result.get("notes", []), f"Made by `{result['command']}`."]


def limits_lines(result: dict[str, Any]) -> list[str]:
    """What must not grow, and what must not break."""
    calls, many = result["calls"], result["nonzeros"]
    resident = " and ".join(f"{m:.0f}" for m in calls["resident_mib"])
    lines = [
        "## Limits",
        "",
        f"{result['device']}, torch {_torch(result)}, {result['date']}.",
        "",
        f"- {calls['calls']} calls of random sizes, strides and settings, in two dtypes: "
        f"{calls['compiled']} kernels compiled, {resident} MiB resident after half of them and "
        f"after all; remembered: {calls['remembered']}.",
        f"- {many['nonzeros'] / 1e6:.0f} million nonzeros in sorted rows: "
        f"{many['inputs_and_outputs_gib']:.2f} GiB of inputs and outputs, "
        f"{100 * many['share']:.0f} % of that beside them at the peak, error {many['error']:.0e}.",
        "- Indices out of range, each found on the device and reported, the next call right:",
    ]
    lines += [f"    - {name}: `{text}`" for name, text in result["offences"].items()]
    return [*lines, "", f"Made by `{result['command']}`."]


def soak_lines(result: dict[str, Any]) -> list[str]:
    """What was drawn, and what was found."""
    lines = [
        "## Soak test",
        "",
        *head("device", "torch", "date", ">minutes", ">trials", ">found", "command"),
    ]
    lines += [
        f"| {run['device']} | {_torch(run)} | {run['date']} | {run['seconds'] / 60:.1f} | "
        f"{run['trials']} | {len(run['found'])} | `{run['command'].split(' --out')[0]}` |"
        for run in result["runs"]
    ]
    tried: Counter[str] = Counter()
    for run in result["runs"]:
        tried.update(run["tried"])
    every = ", ".join(f"{count} {name}" for name, count in sorted(tried.items()))
    return [*lines, "", f"Together: {every}."]


def sanitizer_lines(result: dict[str, Any]) -> list[str]:
    """What compute-sanitizer says of kernels of every kind."""
    lines = [
        "## Sanitizer",
        "",
        f"{result['device']}, torch {_torch(result)}, {result['date']}; what is missing did not "
        "finish in the time that there was. `library` is a matrix product by PyTorch alone: "
        "initcheck does not see what cuBLAS writes, there as in the one statement of the gallery "
        "that is left to it. The hazard of several threads is the tool's own: it lost a launch.",
        "",
        *head("tool", "over", "results", "said", "in kernels"),
    ]
    for row in result["results"]:
        kernels = [name for name in row.get("kernels", {}) if name != "kernel"]
        said = next((s for s in row.get("first", []) if s.startswith("Internal")), row["summary"])
        lines.append(
            f"| {row['tool']} | {row['part']} | {row['checked']} | {said} | {', '.join(kernels)} |"
        )
    return [*lines, "", f"Made by `{result['command']}`."]


def compare_lines(result: dict[str, Any]) -> list[str]:
    """Two versions beside each other."""
    lines = [
        "## Against the version before the one runtime",
        "",
        f"Milliseconds as CUDA-graph replays, in turns. {result['device']}, torch "
        f"{_torch(result)}, {result['date']}.",
        "",
        *head("case", "dtype", "", "contender", ">before", ">now", ">now / before"),
    ]
    for row in result["rows"]:
        old, new = row["old_ms"], row["new_ms"]
        lines.append(
            f"| {row['benchmark']}, {row['case']} | {row['dtype']} | {row['direction']} | "
            f"{row['contender']} | {old:.4f} | {new:.4f} | {new / old:.2f} |"
        )
    return [*lines, "", f"Made by `{result['command']}`."]


def cpu_lines(result: dict[str, Any]) -> list[str]:
    """A CPU beside what PyTorch and e3nn have there."""
    machine = result["device"].partition("(")[2].partition(",")[0]
    lines = [
        "## On a CPU" if machine == "x86_64" else f"## On a CPU: {machine}",
        "",
        f"Milliseconds, {machine}, {result['threads']} thread, float32, in turns, "
        f"{result['turns']} each; a "
        "ratio is the median of the rival's time by ours. SpMM is `insum.einsum` over a GroupCOO "
        "of the usual group size; torch.sparse has its transposed matrix prepared. torch "
        f"{_torch(result)}, {result['date']}.",
        "",
        *head("application", "case", "", "rival", ">insum", ">rival", ">ratio"),
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['application']} | {row['case']} | {row['direction']} | {row['rival']} | "
            f"{row['insum_ms']:.3f} | {row['rival_ms']:.3f} | {row['ratio']:.2f} |"
        )
    return [*lines, "", f"Made by `{result['command']}`."]


def distributed_lines(result: dict[str, Any]) -> list[str]:
    """A matrix on several ranks: rows that travel, host time, and a model."""
    lines = ["## Rows on several ranks", ""]
    for name, make in (
        ("volume", _volume_lines),
        ("host", _host_lines),
        ("model", _model_lines),
    ):
        if name in result["parts"]:
            part = result["parts"][name]
            lines += [*make(part["rows"]), "", f"{_measured(part)}", ""]
    return lines[:-1]


def _volume_lines(rows: list[Row]) -> list[str]:
    """One line for each graph and order."""
    columns = ("all-gather", "rows", "rows or sums")
    lines = [
        f"Rows that travel in one product over {rows[0]['ranks']} ranks, by the number of rows; "
        '`send="fewest"` sends rows of the dense factor or sums for rows of the result, whichever '
        "are fewer. MB: what the rank receives that receives most, 64 columns of float32. "
        "Imbalance: entries of the rank that has most, by the mean. Seconds: planning all ranks "
        "one after the other, the order included.",
        "",
        *head("graph", "order", *(f">{c}" for c in columns), ">MB", ">imbalance", ">s"),
    ]
    by_case: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault((row["graph"], row["order"]), {})[row["send"]] = row
    for (graph, order), found in by_case.items():
        least = found["fewest"]
        lines.append(
            f"| {graph} | {order} | {least['all_gather_share']:.2f} | {found['rows']['share']:.2f} "
            f"| {least['share']:.2f} | {least['most_mb']:.1f} | {least['imbalance']:.2f} "
            f"| {least['plan_s']:.1f} |"
        )
    return lines


def _host_lines(rows: list[Row]) -> list[str]:
    lines = [
        "Host time of a warm call on one rank, in microseconds:",
        "",
        *head("call", ">plain format", ">partitioned", ">more"),
    ]
    return lines + [
        f"| {r['call']} | {r['plain_us']:.0f} | {r['partitioned_us']:.0f} | {r['more_us']:.0f} |"
        for r in rows
    ]


def _model_lines(rows: list[Row]) -> list[str]:
    lines = [
        "**A model, not a measurement:** milliseconds of one product with 64 columns. The kernels "
        "of every rank are timed on one device; the rate and the latency of links are assumed "
        "(`--link`, `--latency`).",
        "",
        *head("graph", ">ranks", ">product", ">with all-gather", ">times one rank"),
    ]
    return lines + [
        f"| {r['graph']} | {r['ranks']} | {r['product_ms']:.3f} | {r['all_gather_ms']:.3f} "
        f"| {r['speedup']:.2f} |"
        for r in rows
    ]


# --- of insum bench -------------------------------------------------------------------------------


def bench_table(result: dict[str, Any]) -> list[str]:
    """How often insum is ahead of each rival and by how much; ablation and compilers row by row."""
    sections = {s["benchmark"]: s for s in result["sections"]}
    compared = [s for name, s in sections.items() if name not in STAGES]
    lines = _about(result["sections"])
    lines += [
        *head("application", "against", "", ">insum is faster in", ">least", ">median", ">most"),
    ]
    lines += [line for s in compared for line in ratio_lines(s)]
    lines += ["", *(f"{s['title']}: {note}" for s in compared for note in s.get("notes", []))]
    lines += ["", "Every case, with its times: [docs/results.md](docs/results.md)."]
    for name, make in STAGES.items():
        if name in sections:
            lines += ["", *make(sections[name])]
    missing = [f"{m['name']} ({s['title']})" for s in result["sections"] for m in s["missing"]]
    lines += (
        ["", "Not measured there: " + ", ".join(dict.fromkeys(missing)) + "."] if missing else []
    )
    return [*lines, "", f"Made by {_commands(result)}, then `python benchmarks/report.py`."]


def case_lines(result: dict[str, Any]) -> list[str]:
    """Forward, and forward and backward together, case by case."""
    lines = ["## Applications", "", *_about(result["sections"])]
    for section in result["sections"]:
        lines += [f"### {section['title']}", ""]
        if section["benchmark"] in STAGES:
            lines += [*STAGES[section["benchmark"]](section), ""]
            continue
        lines += head(*TIMES)
        lines += [*time_lines(section, "forward"), *time_lines(section, "forward+backward"), ""]
        lines += [note + "\n" for note in section.get("notes", [])]
    return [*lines, f"Made by {_commands(result)}."]


def equivariant_lines(result: dict[str, Any]) -> list[str]:
    """The convolution of equivariant networks, row by row, with gradients of both orders."""
    (section,) = result["sections"]
    lines = [f"## {section['title']}", "", *_about(result["sections"]), *head(*TIMES)]
    for direction in ("forward", "forward+backward", "double backward"):
        lines += time_lines(section, direction)
    notes = [_memory_beside(section["rows"]), *section.get("notes", [])]
    return [*lines, "", *(f"{note}\n" for note in notes), f"Made by {_commands(result)}."]


def _memory_beside(rows: list[Row]) -> str:
    """Ours as a share of each rival's, over all rows."""
    shares: dict[str, list[float]] = {}
    for direction in dict.fromkeys(row["direction"] for row in rows):
        for name, found in beside_ours(rows, direction, "memory_mib").items():
            shares.setdefault(name, []).extend(1 / ratio for ratio in found)
    told = ", ".join(
        f"{min(found):.2f} to {max(found):.2f} times {name}'s" for name, found in shares.items()
    )
    return f"Peak memory of insum beside the inputs: {told}."


def _commands(result: dict[str, Any]) -> str:
    return ", ".join(
        f"`{c}`"
        for c in dict.fromkeys(c for s in result["sections"] for c in s["command"].split("; "))
    )


def _about(sections: list[dict[str, Any]]) -> list[str]:
    place = sections[0]
    dates = ", ".join(sorted({s["date"] for s in sections}))
    limits = place["limits"]
    rates = ", ".join(f"{value:.3g} {unit}" for unit, value in limits.items())
    return [
        (
            f"Medians in milliseconds on one {place['device']}, torch "
            f"{place['versions']['torch']}, {dates}, default configs, CUDA-graph replay, "
            "rivals in the"
        ),
        "same run, every result checked against float64. A ratio above 1 means that insum is "
        f"faster. Limits in that run: {rates}.{_printed(sections)}",
        "",
    ]


def _printed(sections: list[dict[str, Any]]) -> str:
    """How many times have no file behind them."""
    timed = [row for section in sections for row in section["rows"] if row["milliseconds"]]
    printed = sum(row["error"] is None for row in timed)
    if not printed:
        return ""
    return (
        f" {printed} of {len(timed)} times are from lines that a run had printed when its time was "
        "up, each after its result had been checked; the others are from files."
    )


def grouped(rows: Iterable[Row], direction: str) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["direction"] == direction:
            found.setdefault((row["case"], row["dtype"]), []).append(row)
    return found


def ours(rows: list[Row]) -> Row | None:
    return next((r for r in rows if r["contender"].startswith("insum") and r["milliseconds"]), None)


def beside_ours(
    rows: Iterable[Row], direction: str, key: str = "milliseconds"
) -> dict[str, list[float]]:
    """What each rival takes, as a multiple of what we do, case by case."""
    found: dict[str, list[float]] = {}
    for every in grouped(rows, direction).values():
        mine = ours(every)
        for row in every if mine is not None else ():
            if row[key] and mine is not None and not row["contender"].startswith("insum"):
                found.setdefault(row["contender"], []).append(row[key] / mine[key])
    return found


#: The columns of `time_lines`.
TIMES = ("case", "", "who", ">ms", ">insum is faster by", ">of the limit", ">error")


def time_lines(section: dict[str, Any], direction: str) -> list[str]:
    """A row for each contender, ours first; losses stand beside wins."""
    lines = []
    for (case, dtype), rows in grouped(section["rows"], direction).items():
        mine = ours(rows)
        if mine is None:
            continue
        others = [r for r in rows if r["milliseconds"] and r is not mine]
        lines.append(f"| {case}, {dtype} | {direction} | {_time_cells(mine, mine)}")
        lines += [f"| | | {_time_cells(row, mine)}" for row in others]
    return lines


def _time_cells(row: Row, mine: Row) -> str:
    ratio = "" if row is mine else f"{row['milliseconds'] / mine['milliseconds']:.2f}x"
    limit = "" if row["limit_percent"] is None else f"{row['limit_percent']:.0f} %"
    error = "printed" if row["error"] is None else f"{row['error']:.0e}"
    return f"{row['contender']} | {_short(row)} | {ratio} | {limit} | {error} |"


def _short(row: Row) -> str:
    """Milliseconds, to a tenth of a microsecond where they are few."""
    taken = row["milliseconds"]
    return f"{taken:.4f}" if taken < 0.1 else f"{taken:.3f}"


def ratio_lines(section: dict[str, Any]) -> list[str]:
    lines = []
    for direction in ("forward", "forward+backward"):
        ratios = beside_ours(section["rows"], direction)
        for name, found in ratios.items():
            ahead, middle = sum(r > 1 for r in found), statistics.median(found)
            numbers = (
                f"{ahead} of {len(found)} | {min(found):.2f}x | {middle:.2f}x | {max(found):.2f}x"
            )
            lines.append(f"| {section['benchmark']} | {name} | {direction} | {numbers} |")
    return lines


def ablation_lines(section: dict[str, Any]) -> list[str]:
    rows = [r for r in section["rows"] if r["milliseconds"]]
    base = next((r["milliseconds"] for r in rows if r["contender"] == section["baseline"]), None)
    return [
        "What each technique contributes (each line has what those before it have):",
        "",
        *head("stage", ">ms", ">times as fast"),
        *(f"| {r['contender']} | {r['milliseconds']:.3f} | {_times(base, r)} |" for r in rows),
    ]


def _times(base: float | None, row: Row) -> str:
    return f"{base / row['milliseconds']:.1f}x" if base else ""


def compiler_lines(section: dict[str, Any]) -> list[str]:
    rows = [r for r in section["rows"] if r["milliseconds"]]
    return [
        "From one line to a result:",
        "",
        *head("application", "route", ">first call s", ">run ms"),
        *(
            f"| {r['case']} | {r['contender']} | {r['first_call_s']:.2f} "
            f"| {r['milliseconds']:.3f} |"
            for r in rows
        ),
    ]


#: Sections that are shown row by row, in the README too.
STAGES = {"ablation": ablation_lines, "compilers": compiler_lines}


# --- of programs, searches and calls --------------------------------------------------------------


def _measured(result: dict[str, Any]) -> str:
    return f"{result['device']}, torch {_torch(result)}, {result['date']}, `{result['command']}`."


def _spread(ratios: Sequence[float]) -> str:
    """Of how many times as fast: least, largest, median, and how often slower."""
    least, most = min(ratios), max(ratios)
    return (
        f"{least:.2f}x to {most:.2f}x, median {statistics.median(ratios):.2f}x, "
        f"slower in {sum(r < 0.995 for r in ratios)} of {len(ratios)}"
    )


def fusion_summary(result: dict[str, Any]) -> list[str]:
    """A sentence: how many times as fast a step is, replayed and in a row, and how often slower."""
    compared = [r for r in result["rows"] if _is_compared(r)]
    parts = []
    for kind, words in (("replayed_ms", "replayed as a CUDA graph"), ("row_ms", "calls in a row")):
        steps = [
            [row[who].get(f"both_{kind}") for who in ("torch.compile", "insum")] for row in compared
        ]
        found = [theirs / mine for theirs, mine in steps if theirs and mine]
        if found:
            parts.append(f"{words} {_spread(found)}")
    return [
        'Programs in plain PyTorch with `torch.compile(backend="insum")`, forward and backward, '
        f"times as fast as with `torch.compile` alone: {'; '.join(parts)}. Calls in a row are "
        "those of a training loop; on small graphs they take the host's time more than the "
        "device's. [Each program](docs/results.md#plain-pytorch-compiled), with its memory.",
    ]


def equivariant_summary(result: dict[str, Any]) -> list[str]:
    """A sentence: how many times as fast as those who wrote kernels for it."""
    (section,) = result["sections"]
    parts = []
    for direction in ("forward", "forward+backward", "double backward"):
        ratios = beside_ours(section["rows"], direction)
        told = "; ".join(f"{name} {_spread(found)}" for name, found in ratios.items())
        parts.append(f"{direction}: {told}")
    return [
        "The convolution of equivariant networks (`insum.nn.TensorProductConv`), degrees 1 to 3, "
        "32 to 128 channels, up to 2 million edges, times as fast as the libraries that were made "
        f"for it. {'. '.join(part[0].upper() + part[1:] for part in parts)}. "
        "[Each row](docs/results.md#equivariant-convolution).",
    ]


def unet_summary(result: dict[str, Any]) -> list[str]:
    """A sentence: a whole network over voxels beside the same with FlexGEMM's convolutions."""
    steps: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in result["rows"]:
        key = tuple(row[k] for k in ("cloud", "batch", "dtype", "direction"))
        steps.setdefault(key, {})[row["contender"]] = row
    both = [pair for pair in steps.values() if {"insum", "FlexGEMM"} <= set(pair)]
    parts = [
        f"{words} {_spread([pair['FlexGEMM'][kind] / pair['insum'][kind] for pair in both])}"
        for kind, words in (("steady_ms", "maps that are there"), ("fresh_ms", "new clouds"))
    ]
    return [
        "MinkUNet18 over four clouds, alone and in batches of four, half precision and TF32, "
        "forward and with backward, times as fast as with FlexGEMM's convolutions: "
        f"{'; '.join(parts)}. [Each row](docs/results.md#minkunet18).",
    ]


#: What the README has a sentence of.
SUMMARIES = {
    "fresh.json": new_data_summary,
    "unet.json": unet_summary,
    "equivariant.json": equivariant_summary,
    "fusion.json": fusion_summary,
}


def fresh_lines(result: dict[str, Any]) -> list[str]:
    """The same with index tensors that are new at each call."""
    return fusion_lines(result, "Plain PyTorch, compiled, with other edges at each call")


def further_lines(result: dict[str, Any]) -> list[str]:
    """The layers and programs that nobody tuned for."""
    return fusion_lines(result, "Plain PyTorch, compiled: further programs")


def batch_lines(result: dict[str, Any]) -> list[str]:
    """Training on sampled neighbourhoods: milliseconds of a step, compiled in each way."""
    lines = ["## Plain PyTorch, compiled, on sampled neighbourhoods", "", _measured(result), ""]
    lines += result.get("notes", [])
    names = list(result["rows"][0]["ways"])
    lines += ["", *head("two layers", ">edges in a batch", *(f">{name}, ms" for name in names))]
    for row in result["rows"]:
        steps = " | ".join(f"{row['ways'][name]['step_ms']:.2f}" for name in names)
        lines.append(f"| {row['program']}, {row['graph']} | {row['edges']:,.0f} | {steps} |")
    return [*lines, ""]


def fusion_lines(result: dict[str, Any], title: str = "Plain PyTorch, compiled") -> list[str]:
    """Programs in plain PyTorch: torch.compile alone, and with insum."""
    lines = [f"## {title}", "", _measured(result), ""]
    lines += [
        "Milliseconds, forward / forward and backward: replayed as a CUDA graph, and of calls "
        "in a row, where calls take time. Peak of memory."
    ]
    lines += result.get("notes", [])
    columns = (
        "program",
        "torch.compile, replayed",
        "insum, replayed",
        "times as fast",
        "torch.compile, calls",
        "insum, calls",
        "times as fast",
    )
    head = "| " + " | ".join([*columns, "MiB, torch.compile", "MiB, insum", "error"]) + " |"
    lines += ["", head, "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for row in filter(_is_compared, result["rows"]):
        a, b = row["torch.compile"], row["insum"]
        cells = [f"{row['program']}: {row['case']}"]
        for kind in ("replayed_ms", "row_ms"):
            cells += [
                *(_pair(one, f"forward_{kind}", f"both_{kind}", 1) or "-" for one in (a, b)),
                _ratios(a, b, kind),
            ]
        cells += [
            *(_pair(one, "forward_bytes", "both_bytes", 2**20) for one in (a, b)),
            f"{b['error']:.0e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _is_compared(row: Row) -> bool:
    """Whether a program ran in both ways."""
    both = [row.get(name, {"failed": ""}) for name in ("torch.compile", "insum")]
    return all("failed" not in one for one in both)


def _ratios(a: Row, b: Row, kind: str) -> str:
    """Times as fast, forward / forward and backward."""
    if not all(one.get(f"both_{kind}") for one in (a, b)):
        return "-"
    return " / ".join(
        f"{a[f'{way}_{kind}'] / b[f'{way}_{kind}']:.2f}" for way in ("forward", "both")
    )


def _pair(row: Row, first: str, second: str, unit: float) -> str:
    if row.get(first) is None or row.get(second) is None:
        return ""
    digits = 3 if unit == 1 else 0
    return f"{row[first] / unit:.{digits}f} / {row[second] / unit:.{digits}f}"


def tuning_lines(result: dict[str, Any]) -> list[str]:
    """The first guess against the best that a full search finds."""
    ratios = [row["ratio"] for row in result["rows"]]
    lines = [
        "## First guess against a full search",
        "",
        _measured(result),
        "",
        *result.get("notes", []),
    ]
    lines += [
        "",
        f"{len(ratios)} cases: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}.",
        "",
    ]
    lines += ["| application | case | first guess µs | full µs | ratio |", "|---|---|--:|--:|--:|"]
    return lines + [
        f"| {r['application']} | {r['case']} | {r['first_guess_us']:.1f} | {r['tuned_us']:.1f} "
        f"| {r['ratio']:.2f} |"
        for r in result["rows"]
    ]


def overhead_lines(result: dict[str, Any]) -> list[str]:
    """CPU time of one warm call."""
    lines = ["## CPU time of a warm call", "", _measured(result), "", "| call | µs |", "|---|--:|"]
    return lines + [f"| {name} | {taken:.1f} |" for name, taken in result["microseconds"].items()]


# --- of kernels.py --------------------------------------------------------------------------------


def rows_of(result: dict[str, Any]) -> list[str]:
    rows = []
    for row in result["rows"]:
        rivals = {name: value for name, value in row.items() if name not in _OURS}
        beside = ", ".join(
            f"{name} {value:.3f} ({value / row['insum_ms']:.2f}x)" for name, value in rivals.items()
        )
        rows.append(
            f"| {row['application']} | {row['case']} | {row['insum_ms']:.3f} | {beside} | "
            f"{row['error']:.0e} |"
        )
    return rows


def kernels_table(result: dict[str, Any]) -> list[str]:
    return [
        (
            f"Medians in milliseconds on one {result['device']}, torch {_torch(result)}, "
            f"{result['date']}, default configs, CUDA-graph replay, rivals in the same"
        ),
        'run. A ratio above 1 means that insum is faster. "prototype" is a kernel written by '
        "hand for that one case, not part of this repository.",
        "",
        *head("application", "case", ">insum", "rivals", ">relative error"),
        *rows_of(result),
        "",
        f"Made by `{result['command']}`, then `python benchmarks/report.py`.",
    ]


def updated(readme: str) -> str:
    before, rest = readme.split(START)
    return f"{before}{START}\n{table()}{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    wanted = {
        README: updated(README.read_text(encoding="utf-8")),
        PAGE: page(),
        GALLERY: gallery_page(),
        PICTURES / "gallery.svg": gallery_picture(),
        **pattern_pictures(),
        PICTURES / "applications.svg": applications_picture(),
        PICTURES / "sweep.svg": sweep_picture(
            json.loads((RESULTS / "sweep.json").read_text(encoding="utf-8"))
        ),
    }
    if arguments.check:
        old = [
            file.name
            for file, text in wanted.items()
            if not file.exists() or file.read_text(encoding="utf-8") != text
        ]
        sys.exit(
            f"{', '.join(old)}: not what benchmarks/results says; run python benchmarks/report.py"
            if old
            else 0
        )
    PICTURES.mkdir(exist_ok=True)
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
