"""Results as text: one table for each benchmark, with rich where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from insum.bench.records import Row, Section, speedup

HEAD = (
    "case",
    "contender",
    "ms",
    "to insum",
    "MiB",
    "% of limit",
    "error",
    "first call s",
    "lines",
    "note",
)


def cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """One row of the table, in the order of `HEAD`."""
    ratio = speedup(row, rows)
    return (
        f"{row.case}, {row.dtype}, {row.direction}",
        row.contender,
        _number(row.milliseconds, ".4f") if row.status == "ok" else row.status,
        _number(ratio, ".2f", "x"),
        _number(row.memory_mib, ".1f"),
        _number(row.limit_percent, ".0f"),
        _number(row.error, ".0e"),
        _number(row.first_call_s, ".2f"),
        "" if row.lines is None else str(row.lines),
        "; ".join(
            n for n in (row.note, "" if row.clock in ("CUDA graph", "host") else row.clock) if n
        ),
    )


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{spec}}{unit}"


def body(section: Section) -> list[tuple[str, ...]]:
    """All rows; the case is named in the first of its rows only."""
    lines = []
    for rows in section.cases().values():
        for position, row in enumerate(rows):
            line = cells(row, rows)
            lines.append(line if position == 0 else ("", *line[1:]))
    return lines


def show(section: Section) -> None:
    title = f"{section.title}: {section.statement}"
    try:
        _show_rich(title, section)
    except ImportError:
        print(f"\n{title}\n" + "\n".join(aligned([HEAD, *body(section)])))
    limits = ", ".join(f"{value:.3g} {unit}" for unit, value in section.limits.items())
    print(f"limits measured in this run: {limits}; {section.seconds:.0f} s")
    for note in section.notes:
        print(note)
    for one in section.missing:
        print(f"missing: {one.name}: {one.reason}")


def _show_rich(title: str, section: Section) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title), title_justify="left")
    for name in HEAD:
        made.add_column(
            name,
            overflow="fold",
            justify="left" if name in ("case", "contender", "note") else "right",
        )
    for line in body(section):
        made.add_row(*map(Text, line))
    Console(width=None if sys.stdout.isatty() else 200).print(made)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width.

    >>> aligned([("a", "b"), ("long", "c")])
    ['a     b', 'long  c']
    """
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
