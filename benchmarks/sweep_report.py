"""The part of docs/results.md about sizes that nobody tuned for, and its picture."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from tables import head

Row: TypeAlias = dict[str, Any]
#: Points of a line of the picture: size and milliseconds.
Points: TypeAlias = list[tuple[float, float]]
COLOURS = {"float32": "#2a9d8f", "float16": "#e76f51", "bfloat16": "#8a6fc9"}
WIDTH, HEIGHT, LEFT, TOP = 300, 190, 52, 46


def sweep_lines(result: dict[str, Any], measured: str) -> list[str]:
    """Time over size; ``measured``: where and when."""
    rows, cliffs = result["rows"], result["cliffs"]
    longer = [line for line in cliffs if " of size " in line]
    lines = [
        "## Sizes that nobody tuned for",
        "",
        measured,
        "",
        *(line for note in result.get("notes", ()) for line in (note, "")),
        f"Of {len(rows)} sizes {len(longer)} take more than a tenth longer than the next larger "
        f"friendly one, and {len(cliffs) - len(longer)} longer than the rival.",
        "",
        "![Time over columns and channels](pictures/sweep.svg)",
        "",
    ]
    for make in (_products, _convolutions, _blocks):
        lines += make(rows)
    lines += ["### Where it is not smooth", "", *(f"- {line}" for line in cliffs), ""]
    return [*lines, f"Made by `{result['command']}`, which goes on where a record ends."]


def _products(rows: Sequence[Row]) -> list[str]:
    """A line for each graph and dtype."""
    own = [row for row in rows if row["kind"] == "spmm"]
    widths = sorted({row["size"][0] for row in own})
    lines = ["### Sparse products by columns, microseconds (times as fast as torch.sparse)", ""]
    lines += head("graph", "dtype", *(f">{n}" for n in widths))
    for case, dtype in dict.fromkeys((row["case"], row["dtype"]) for row in _sorted(own)):
        by_width = {r["size"][0]: r for r in own if (r["case"], r["dtype"]) == (case, dtype)}
        cells = [_beside_rival(by_width.get(n)) for n in widths]
        lines.append(f"| {case} | {dtype} | {' | '.join(cells)} |")
    return [*lines, ""]


def _beside_rival(row: Row | None) -> str:
    if row is None:
        return ""
    ratio = f" ({row['rival_ms'] / row['milliseconds']:.1f}x)" if row["rival_ms"] else ""
    return f"{1e3 * row['milliseconds']:.1f}{ratio}"


def _convolutions(rows: Sequence[Row]) -> list[str]:
    """A table for each cloud: channels in, and out."""
    lines: list[str] = []
    own = [row for row in rows if row["kind"] == "conv"]
    for case in dict.fromkeys(row["case"] for row in _sorted(own)):
        times = {tuple(r["size"]): r["milliseconds"] for r in own if r["case"] == case}
        inputs, outputs = (sorted({size[side] for size in times}) for side in (0, 1))
        lines += [
            f"### Convolution by channels in and out, {case}, half precision, microseconds",
            "",
        ]
        lines += head("", *(f">{m}" for m in outputs))
        for c in inputs:
            cells = [f"{1e3 * times[c, m]:.1f}" if (c, m) in times else "" for m in outputs]
            lines.append(f"| {c} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _blocks(rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row["kind"] == "blocks"]
    lines = ["### Blocks, half precision, microseconds", ""]
    lines += head("matrix", ">in blocks of", ">insum", ">dense")
    for row in sorted(
        own, key=lambda r: ([int(n) for n in r["case"].split() if n.isdigit()], r["size"])
    ):
        dense = f"{1e3 * row['rival_ms']:.1f}" if row["rival_ms"] else ""
        size = " x ".join(map(str, row["size"]))
        lines.append(f"| {row['case']} | {size} | {1e3 * row['milliseconds']:.1f} | {dense} |")
    return [*lines, ""]


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["case"], row["dtype"], row["size"]))


# --- the picture ----------------------------------------------------------------------------------


def sweep_picture(result: dict[str, Any]) -> str:
    """Panels of time over size, both logarithmic; rivals are dashed."""
    panels = [*_product_panels(result["rows"]), *_convolution_panels(result["rows"])]
    columns, tall = 2, -(-len(panels) // 2) * (HEIGHT + TOP + 30) + 10
    title = "Time over columns of sparse products and channels of convolutions, both logarithmic"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * (WIDTH + LEFT + 30)} '
        f'{tall}" role="img" aria-label="{html.escape(title)}">'
    ]
    for number, (name, drawn) in enumerate(panels):
        x = (number % columns) * (WIDTH + LEFT + 30) + LEFT
        y = (number // columns) * (HEIGHT + TOP + 30) + TOP
        lines += _panel(x, y, name, drawn)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _product_panels(rows: Sequence[Row]) -> list[tuple[str, dict[tuple[str, bool], Points]]]:
    panels: dict[str, dict[tuple[str, bool], Points]] = {}
    for row in _sorted(row for row in rows if row["kind"] == "spmm"):
        lines = panels.setdefault(f"{row['case']}, us over columns", {})
        size = row["size"][0]
        lines.setdefault((row["dtype"], False), []).append((size, row["milliseconds"]))
        if row["rival_ms"] and row["dtype"] != "bfloat16":
            lines.setdefault((row["dtype"], True), []).append((size, row["rival_ms"]))
    return list(panels.items())


def _convolution_panels(rows: Sequence[Row]) -> list[tuple[str, dict[tuple[str, bool], Points]]]:
    """As many channels in as out."""
    panels: dict[str, dict[tuple[str, bool], Points]] = {}
    for row in _sorted(row for row in rows if row["kind"] == "conv"):
        if row["size"][0] == row["size"][1]:
            lines = panels.setdefault(f"{row['case']}, us over channels", {})
            point = (row["size"][0], row["milliseconds"])
            lines.setdefault((row["dtype"], False), []).append(point)
    return list(panels.items())


def _panel(x: float, y: float, name: str, drawn: dict[tuple[str, bool], Points]) -> list[str]:
    sizes, times = zip(*(point for points in drawn.values() for point in points))
    across, up = _scale(sizes, WIDTH), _scale(times, HEIGHT)
    text = 'font-family="sans-serif" font-size="11" fill="#808080"'
    lines = [
        f'<text x="{x}" y="{y - 24}" {text} font-weight="bold">{html.escape(name)}</text>',
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#808080"/>',
    ]
    for number, dtype in enumerate(dict.fromkeys(dtype for dtype, _ in drawn)):
        lines.append(
            f'<text x="{x + 80 * number}" y="{y - 8}" {text.replace("#808080", COLOURS[dtype])}>'
            f"{dtype}</text>"
        )
    for size in sorted(set(sizes)):
        if math.log2(size).is_integer():
            place = x + across(size)
            lines.append(
                f'<text x="{place:.1f}" y="{y + HEIGHT + 14}" {text} text-anchor="middle">{size}'
                "</text>"
            )
    for time in _ticks(min(times), max(times)):
        place = y + HEIGHT - up(time)
        lines += [
            f'<text x="{x - 6}" y="{place + 4:.1f}" {text} text-anchor="end">{1e3 * time:g}</text>',
            f'<line x1="{x}" y1="{place:.1f}" x2="{x + WIDTH}" y2="{place:.1f}" stroke="#808080" '
            'stroke-opacity="0.3"/>',
        ]
    for (dtype, rival), points in drawn.items():
        path = " ".join(f"{x + across(s):.1f},{y + HEIGHT - up(t):.1f}" for s, t in points)
        dashes = ' stroke-dasharray="4 3" stroke-opacity="0.6"' if rival else ""
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[dtype]}" stroke-width="1.6"'
            f"{dashes}/>"
        )
    return lines


def _scale(values: Sequence[float], length: int) -> Any:
    low, high = math.log(min(values)), math.log(max(values))
    return lambda value: (math.log(value) - low) / (high - low) * length


def _ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... microseconds between two times."""
    every = [m * 10.0**e for e in range(-4, 3) for m in (1, 2, 5)]
    return [tick for tick in every if low <= tick <= high]
