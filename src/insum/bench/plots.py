"""The figures, as SVG text that takes its colours from the page around it; drawn with matplotlib
where it is installed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from insum.bench.records import Row, Section

#: Text and axes are drawn in this colour, which then becomes the page's own.
INK = "#010203"
#: Distinct for most colour-blind readers, readable on white and on dark grey.
COLOURS = ("#d1495b", "#2e86ab", "#edae49", "#4c9f70", "#8a6fb3", "#7a8b99", "#b5651d", "#3bb0a8")


def why_not() -> str:
    """Empty where figures can be drawn, else the reason."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return (
            f"no figures: matplotlib is not installed ({error}); where it is, insum bench "
            "report FOLDER draws them from bench.json"
        )
    return ""


def draw(sections: Sequence[Section]) -> dict[str, str]:
    """A figure for each benchmark that has times; none without matplotlib.

    >>> draw([])
    {}
    """
    if why_not():
        return {}
    timed = [s for s in sections if any(row.milliseconds for row in s.rows)]
    return {section.benchmark: _figure(section) for section in timed}


def _figure(section: Section) -> str:
    match section.benchmark:
        case "ablation":
            return _ablation(section)
        case "compilers":
            return _compilers(section)
    return _speedups(section)


# --- speed-ups over the baseline, a panel for each dtype and direction ----------------------------


def _speedups(section: Section) -> str:
    panels = list(
        dict.fromkeys((row.dtype, row.direction) for row in section.rows if row.milliseconds)
    )
    figure, axes = _canvas(len(panels), 3.6)
    names = list(dict.fromkeys(row.contender for row in section.rows if row.milliseconds))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for axis, (dtype, direction) in zip(axes, panels, strict=True):
        rows = [row for row in section.rows if (row.dtype, row.direction) == (dtype, direction)]
        base = baseline(rows, section.baseline)
        _panel(axis, rows, base, colours, lines=section.benchmark == "block-spmm")
        axis.set_title(f"{section.title}, {dtype}, {direction}")
        axis.set_ylabel(f"times as fast as {base}")
    return _svg(figure, section.benchmark)


def baseline(rows: Sequence[Row], wanted: str) -> str:
    """The contender that the others are compared with: the paper's, or where it is missing the
    first rival that was timed, or we ourselves.
    """
    timed = [row.contender for row in rows if row.milliseconds]
    rivals = [name for name in timed if not name.startswith("insum")]
    return next((name for name in timed if name.startswith(wanted)), (rivals or timed)[0])


def _panel(
    axis: Any, rows: Sequence[Row], base_name: str, colours: dict[str, str], *, lines: bool
) -> None:
    cases = list(dict.fromkeys(row.case for row in rows))
    base = {
        row.case: row.milliseconds
        for row in rows
        if row.contender == base_name and row.milliseconds
    }
    names = [n for n in colours if any(row.contender == n and row.milliseconds for row in rows)]
    width = 0.84 / max(1, len(names))
    for position, name in enumerate(names):
        found = {
            row.case: row.milliseconds for row in rows if row.contender == name and row.milliseconds
        }
        at = [i for i, case in enumerate(cases) if case in found and case in base]
        heights = [base[cases[i]] / found[cases[i]] for i in at]
        if lines:
            axis.plot(at, heights, marker="o", label=name, color=colours[name])
        else:
            axis.bar(
                [i + (position - (len(names) - 1) / 2) * width for i in at],
                heights,
                width,
                label=name,
                color=colours[name],
            )
    axis.set_xticks(
        range(len(cases)),
        [_short(c) for c in cases],
        rotation=0 if len(cases) < 5 else 30,
        ha="center" if len(cases) < 5 else "right",
    )
    axis.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    heights = [h for bar in (*axis.containers, *axis.lines) for h in _heights(bar)]
    if heights and max(heights) > 8:
        axis.set_yscale("log")
    _legend(axis)


def _legend(axis: Any) -> None:
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _heights(drawn: Any) -> list[float]:
    if hasattr(drawn, "get_ydata"):
        return [float(y) for y in drawn.get_ydata()]
    return [float(patch.get_height()) for patch in drawn]


def _short(case: str) -> str:
    return case.split(" (")[0].removeprefix("pc-").replace(" sparse", "")


# --- the two that are not speed-ups by case -------------------------------------------------------


def _ablation(section: Section) -> str:
    rows = [row for row in section.rows if row.milliseconds]
    base = (
        next((row.milliseconds for row in rows if row.contender == section.baseline), None)
        or rows[0].milliseconds
    )
    assert base is not None
    figure, (axis,) = _canvas(1, 0.42 * len(rows) + 1.2)
    speed = [base / row.milliseconds for row in rows if row.milliseconds]
    others = ("torch.mm", "TorchBSR")
    bars = axis.barh(
        range(len(rows)),
        speed,
        color=[COLOURS[5] if row.contender.startswith(others) else COLOURS[0] for row in rows],
    )
    axis.bar_label(
        bars,
        [f"{s:.1f}x, {row.milliseconds:.3f} ms" for s, row in zip(speed, rows, strict=True)],
        padding=4,
        fontsize=8,
    )
    axis.set_yticks(range(len(rows)), [row.contender for row in rows])
    axis.invert_yaxis()
    if max(speed) > 20:
        axis.set_xscale("log")
    axis.set_xlim(right=max(speed) * (8 if max(speed) > 20 else 1.35))
    axis.set_title(f"{section.title}: {rows[0].case}, {rows[0].dtype}")
    axis.set_xlabel(f"times as fast as {section.baseline}")
    return _svg(figure, section.benchmark)


def _compilers(section: Section) -> str:
    rows = [row for row in section.rows if row.milliseconds]
    names, cases = (
        list(dict.fromkeys(getattr(row, field) for row in rows)) for field in ("contender", "case")
    )
    figure, axes = _canvas(2, 3.2)
    for axis, (title, field) in zip(
        axes, (("first call, s", "first_call_s"), ("run time, ms", "milliseconds")), strict=True
    ):
        width = 0.84 / len(names)
        for position, name in enumerate(names):
            found = {row.case: getattr(row, field) for row in rows if row.contender == name}
            at = [i for i, case in enumerate(cases) if case in found]
            places = [i + (position - (len(names) - 1) / 2) * width for i in at]
            axis.bar(
                places,
                [found[cases[i]] for i in at],
                width,
                label=name,
                color=COLOURS[position % len(COLOURS)],
            )
        axis.set_xticks(range(len(cases)), cases)
        values = [getattr(row, field) for row in rows]
        if max(values) > 20 * min(values):
            axis.set_yscale("log")
        axis.set_ylabel(title)
        _legend(axis)
    axes[0].set_title(section.title)
    return _svg(figure, section.benchmark)


# --- canvas ---------------------------------------------------------------------------------------


def _canvas(panels: int, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, height * panels), layout="constrained")
    return figure, [figure.add_subplot(panels, 1, i + 1) for i in range(panels)]


def _svg(figure: Any, name: str) -> str:
    import matplotlib

    for axis in figure.axes:
        axis.patch.set_alpha(0)
        axis.spines[["top", "right"]].set_visible(False)
        for spine in axis.spines.values():
            spine.set_color(INK)
        axis.tick_params(which="both", colors=INK)
        axis.set_title(axis.get_title(), fontsize=10)
        for text in (
            axis.title,
            axis.xaxis.label,
            axis.yaxis.label,
            *axis.texts,
            *(axis.get_legend().get_texts() if axis.get_legend() else ()),
        ):
            text.set_color(INK)
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"insum {name}"}):
        figure.savefig(
            stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    return inlined(stream.getvalue())


def inlined(svg: str) -> str:
    """SVG that can stand in a page: no prologue, no metadata, no address of anything, the page's
    colour for text.

    >>> inlined(
    ...     '<?xml version="1.0"?><svg xmlns="x"><metadata>m</metadata>'
    ...     '<path style="fill: #010203"/></svg>'
    ... )
    '<svg xmlns="x"><path style="fill: currentColor"/></svg>'
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # nothing refers to groups, and figures on one page would share their names
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    return svg.replace(INK, "currentColor")
