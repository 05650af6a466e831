"""What was measured, as values that go to JSON and back: rows in sections, one section for each
benchmark.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from insum.errors import BenchError

FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True)
class Row:
    """One contender in one case."""

    benchmark: str
    case: str
    dtype: str
    direction: str
    contender: str
    #: "ok"; "WRONG", which has no time; "missing" and "failed", of which the note says why;
    #: "skipped", which there was no time for.
    status: str
    milliseconds: float | None = None
    clock: str = ""
    first_call_s: float | None = None
    memory_mib: float | None = None
    limit_percent: float | None = None
    error: float | None = None
    lines: int | None = None
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What is compared with each other."""
        return self.case, self.dtype, self.direction


@dataclass(frozen=True)
class Missing:
    """A rival that could not be measured here, and why."""

    name: str
    reason: str


@dataclass
class Section:
    """All rows of one benchmark, and what one needs to know about them."""

    benchmark: str
    title: str
    statement: str
    baseline: str
    command: str
    date: str
    device: str
    versions: dict[str, str]
    limits: dict[str, float]
    data: str
    quick: bool
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cases(self) -> dict[tuple[str, str, str], list[Row]]:
        found: dict[tuple[str, str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.key, []).append(row)
        return found

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if row.status == "WRONG"]


COLUMNS = tuple(f.name for f in fields(Row))


def ours(rows: Sequence[Row]) -> Row | None:
    """The first of our rows that was timed: what a user gets by default."""
    return next((r for r in rows if r.contender.startswith("insum") and r.milliseconds), None)


def speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times longer this contender takes than insum in the same case."""
    mine = ours(rows)
    if mine is None or not row.milliseconds or not mine.milliseconds:
        return None
    return row.milliseconds / mine.milliseconds


# --- files ----------------------------------------------------------------------------------------


def to_json(sections: Iterable[Section]) -> str:
    return json.dumps({"format": 1, "sections": [asdict(s) for s in sections]}, indent=1) + "\n"


def from_json(text: str, origin: str = "the file") -> list[Section]:
    """The sections of a file that `to_json` wrote.

    >>> from_json('{"format": 1, "sections": []}')
    []
    """
    try:
        found = json.loads(text)
        return [_section(s) for s in found["sections"]]
    except (ValueError, KeyError, TypeError) as error:
        fact = f"{origin} is no result of insum bench ({type(error).__name__}: {error})"
        raise BenchError(fact, expected="a bench.json, or a folder with one") from None


def _section(found: Mapping[str, Any]) -> Section:
    rows = [Row(**row) for row in found["rows"]]
    return Section(**{**found, "rows": rows, "missing": [Missing(**m) for m in found["missing"]]})


def read(places: Iterable[Path]) -> list[Section]:
    """The sections of files or folders; where several have a benchmark, cases of the later replace
    those of the earlier.
    """
    sections: dict[str, Section] = {}
    for place in places:
        file = place / "bench.json" if place.is_dir() else place
        if not file.is_file():
            raise BenchError(
                f"there is no {file}",
                expected="a bench.json, or a folder with one",
                remedy="insum bench all writes out/bench/bench.json",
            )
        for section in from_json(file.read_text(encoding="utf-8"), str(file)):
            sections[section.benchmark] = joined(sections.get(section.benchmark), section)
    return list(sections.values())


def joined(earlier: Section | None, later: Section) -> Section:
    """Two runs of one benchmark on one device as one; of another device's nothing is kept."""
    if earlier is None or (earlier.device, earlier.versions, earlier.data) != (
        later.device,
        later.versions,
        later.data,
    ):
        return later
    again = later.cases()
    rows = [row for row in earlier.rows if row.key not in again] + later.rows
    commands = "; ".join(dict.fromkeys([earlier.command, later.command]))
    notes = list(dict.fromkeys([*earlier.notes, *later.notes]))
    return replace(
        later,
        rows=rows,
        command=commands,
        seconds=earlier.seconds + later.seconds,
        notes=notes,
        quick=earlier.quick or later.quick,
    )


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """A record that is no table of contenders."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write_csv(sections: Iterable[Section], file: Path) -> None:
    """Every row, and every missing rival as a row without a case."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        for section in sections:
            writer.writerows(asdict(row) for row in section.rows)
            writer.writerows(
                asdict(Row(section.benchmark, "", "", "", m.name, "missing", note=m.reason))
                for m in section.missing
            )
