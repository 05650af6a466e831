"""One HTML page with everything: figures, tables, machine, missing rivals, lines of code. It refers
to nothing outside itself.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence

from insum.bench.records import Row, Section, ours, speedup
from insum.bench.table import HEAD, cells

#: Lines of code that one line replaces, as the paper counts them.
REPLACES = {
    "block-spmm": ("TorchBSR", 202),
    "spmm": ("Sputnik", 1918),
    "conv": ("TorchSparse", 4491),
    "tensor-product": ("e3nn", 225),
}

STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --paper: #ffffff; --faint: #f3f4f6;
  --rule: #d5d9e0; --good: #1a7f4b; --bad: #b3261e; --soft: #5b6472; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --paper: #16181d; --faint: #20242b; --rule: #3a404b; --good: #5fd39a;
  --bad: #ff8a80; --soft: #a2abb8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 .3rem; font-size: 1.7rem; }
h2 { margin: 2.6rem 0 .4rem; padding-top: .6rem; border-top: 2px solid var(--rule); }
nav a { margin-right: 1rem; } a { color: inherit; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--faint); padding: .6rem .8rem; overflow-x: auto; border-radius: 6px; }
.soft { color: var(--soft); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px;
  margin: .6rem 0; }
th, td { padding: .22rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); }
th { position: sticky; top: 0; background: var(--faint); }
td.text, th.text { text-align: left; } td.note { white-space: normal; min-width: 14rem; }
tr.first td { border-top: 2px solid var(--rule); }
tr.insum td { background: var(--faint); font-weight: 600; }
.good { color: var(--good); } .bad, .WRONG { color: var(--bad); font-weight: 700; }
.missing, .failed, .skipped { color: var(--soft); }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
details > summary { cursor: pointer; margin: .5rem 0; }
"""


def page(sections: Sequence[Section], figures: Mapping[str, str], no_figures: str = "") -> str:
    """The page's text.

    >>> page([], {}).startswith("<!doctype html>")
    True
    """
    links = "".join(f'<a href="#{s.benchmark}">{_e(s.title)}</a>' for s in sections)
    parts = [
        f"<h1>insum bench</h1>{_where(sections)}<nav>{links}</nav>",
        _summary(sections),
        _lines(sections),
    ]
    parts += [f'<p class="soft">{_e(no_figures)}</p>'] if no_figures else []
    parts += [_section(s, figures.get(s.benchmark, "")) for s in sections]
    head = (
        '<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>insum bench</title><style>{STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _e(text: object) -> str:
    return html.escape(str(text))


def _where(sections: Sequence[Section]) -> str:
    """Devices, dates and versions; several where results of several runs were put together."""
    devices, dates = (
        " / ".join(dict.fromkeys(getattr(s, field) for s in sections))
        for field in ("device", "date")
    )
    versions = ", ".join(
        f"{name} {number}" for name, number in (sections[-1].versions if sections else {}).items()
    )
    return f'<p>{_e(devices)}, {_e(dates)}<br><span class="soft">{_e(versions)}</span></p>'


# --- the short of it ------------------------------------------------------------------------------


def _summary(sections: Sequence[Section]) -> str:
    """Every contender against insum: in how many cases it is slower, and by how much at least, in
    the middle, and at most.
    """
    rows = []
    for section in sections:
        if section.benchmark in ("ablation", "compilers"):
            continue
        for (name, direction), ratios in _ratios(section).items():
            middle, ahead = statistics.median(ratios), sum(r > 1 for r in ratios)
            kind = "good" if ahead == len(ratios) else "bad"
            numbers = "".join(
                f"<td>{value:.2f}x</td>" for value in (min(ratios), middle, max(ratios))
            )
            text = (
                f'<td class="text">{_e(section.title)}</td>'
                f'<td class="text">{_e(direction)}</td><td class="text">{_e(name)}</td>'
            )
            rows.append(f'<tr>{text}<td class="{kind}">{ahead} of {len(ratios)}</td>{numbers}</tr>')
    if not rows:
        return ""
    head = "".join(
        f'<th class="text">{name}</th>' for name in ("benchmark", "direction", "against")
    )
    head += "".join(f"<th>{name}</th>" for name in ("insum ahead", "least", "median", "most"))
    return (
        f'<h2>In short</h2><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _ratios(section: Section) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for rows in section.cases().values():
        for row in rows:
            ratio = speedup(row, rows)
            if ratio is not None and not row.contender.startswith("insum"):
                found.setdefault((row.contender, row.direction), []).append(ratio)
    return found


def _lines(sections: Sequence[Section]) -> str:
    rows = []
    for section in sections:
        if section.benchmark in REPLACES:
            name, lines = REPLACES[section.benchmark]
            count = len(section.statement.splitlines())
            code = (
                f'<td class="text">{_e(section.title)}</td>'
                f'<td class="text"><code>{_e(section.statement)}</code></td>'
            )
            rows.append(f"<tr>{code}<td>{count}</td><td>{name} {lines:,}</td></tr>")
    if not rows:
        return ""
    head = (
        '<th class="text">application</th><th class="text">user code</th>'
        "<th>lines</th><th>replaces (lines, by the paper)</th>"
    )
    return (
        "<h2>Lines of user code</h2>"
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


# --- one benchmark --------------------------------------------------------------------------------


def _section(section: Section, figure: str) -> str:
    limits = ", ".join(f"{value:.3g} {unit}" for unit, value in section.limits.items())
    about = (
        f"{section.device}; data: {section.data}; {section.date}; {section.seconds:.0f} s; "
        f"limits in this run: {limits}"
    )
    missing = "".join(f"<li><b>{_e(m.name)}</b>: {_e(m.reason)}</li>" for m in section.missing)
    parts = [
        f'<h2 id="{section.benchmark}">{_e(section.title)}</h2>'
        f"<pre>{_e(section.statement)}</pre>"
        f'<p class="soft">{_e(about)}</p>'
    ]
    parts += [f"<figure>{figure}</figure>"] if figure else []
    parts += (
        [f"<p>Missing here:</p><ul>{missing}</ul>"]
        if missing
        else ["<p>No rival of this benchmark is missing here.</p>"]
    )
    parts += [f"<p>{_e(note)}</p>" for note in section.notes]
    parts += [
        f"<details open><summary>All rows</summary>{_table(section)}</details>"
        f"<p class='soft'>Made by <code>{_e(section.command)}</code></p>"
    ]
    return "".join(parts)


def _table(section: Section) -> str:
    text = ("case", "contender", "note")
    head = "".join(f"<th{' class=text' if name in text else ''}>{_e(name)}</th>" for name in HEAD)
    body = "".join(
        _row(row, rows, position == 0)
        for rows in section.cases().values()
        for position, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _row(row: Row, rows: Sequence[Row], first: bool) -> str:
    values = cells(row, rows)
    kinds = ["text", "text", row.status, _kind(row, rows), "", "", "", "", "", "text note"]
    shown = "".join(
        f'<td class="{kind}">{_e(value if first or i else "")}</td>'
        for i, (kind, value) in enumerate(zip(kinds, values, strict=True))
    )
    classes = " ".join([*(["first"] if first else []), *(["insum"] if row is ours(rows) else [])])
    return f'<tr class="{classes}">{shown}</tr>'


def _kind(row: Row, rows: Sequence[Row]) -> str:
    ratio = speedup(row, rows)
    if ratio is None or row is ours(rows):
        return ""
    return "good" if ratio > 1 else "bad"
