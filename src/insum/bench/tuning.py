"""``insum bench tuning``: first guess against a full search, for every case of the four
applications.

Both times of a row are medians of CUDA-graph replays from the same run. The search starts with an
empty cache in a temporary folder, and its winner is checked against float64 like the first guess.
What the time leaves no room for is named.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import insum
from insum.bench import block_spmm, conv, spmm, tensor_product
from insum.bench.measure import (
    TOLERANCE,
    Comparison,
    ReadyContender,
    Results,
    name_of,
    relative_error,
    release,
)
from insum.bench.records import FORWARD
from insum.bench.study import Study
from insum.plan.config import shown
from insum.runtime import search

APPLICATIONS: dict[str, ModuleType] = {
    "block-spmm": block_spmm,
    "conv": conv,
    "tensor-product": tensor_product,
    "spmm": spmm,
}
GOAL = 1.3
#: Of all that were tried, so many are told.
TOLD = 8


def cases(study: Study) -> Iterator[tuple[str, Comparison]]:
    """The forward cases of each application."""
    options = replace(study.options, directions=(FORWARD,), names=())
    for name in study.wanted(list(APPLICATIONS)):
        for case in APPLICATIONS[name].cases(options):
            yield name, case


@contextlib.contextmanager
def watched() -> Iterator[list[search.Tuned]]:
    """What searches find that calls begin."""
    found: list[search.Tuned] = []
    tune = search.tune

    def noted(*arguments: Any, **options: Any) -> search.Tuned:
        found.append(tune(*arguments, **options))
        return found[-1]

    search.tune = noted
    try:
        yield found
    finally:
        search.tune = tune


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    before = os.environ.get("INSUM_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="insum-tuning-") as folder:
        os.environ["INSUM_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["INSUM_CACHE_DIR"]
            if before is not None:
                os.environ["INSUM_CACHE_DIR"] = before


@contextlib.contextmanager
def limited(effort: str, candidates: int, seconds: float) -> Iterator[None]:
    """An effort that tries no more configs than this, and none after so many seconds."""
    usual = search.EFFORTS[effort]
    made = search.Effort(candidates or usual.candidates, usual.refine, seconds)
    with mock.patch.dict(search.EFFORTS, {effort: made}):
        yield


def tuned(application: str, case: Comparison, effort: str) -> Iterator[dict[str, Any]]:
    """A row for each of our contenders that a search has something to say about."""
    want = case.want()
    for contender in case.contenders:
        if not contender.name.startswith("insum"):
            continue
        ready = contender.make()
        before, start = error_of(ready, want), time.monotonic()
        with watched() as found, insum.settings(effort=effort):
            ready.run()
        taken, after = time.monotonic() - start, error_of(ready, want)
        for one in found:
            yield {
                "application": application,
                "case": f"{case.name}, {name_of(case.dtype)}, {contender.name}",
                **_told(one),
                "search_s": taken,
                "error": max(before, after),
                "ok": max(before, after) <= TOLERANCE[case.dtype],
            }


def error_of(ready: ReadyContender, want: Results) -> float:
    return relative_error(ready.canonical(ready.run()), want)


def _told(found: search.Tuned) -> dict[str, Any]:
    best = sorted(found.trials, key=lambda tried: tried.microseconds)[:TOLD]
    return {
        "first_guess_us": found.first_guess,
        "tuned_us": found.microseconds,
        "ratio": found.speedup,
        "tried": len(found.trials),
        "failed": sum(tried.microseconds == float("inf") for tried in found.trials),
        "config": shown(found.choice),
        "first_config": shown(found.trials[0].choice) if found.trials else "",
        "trials": [(shown(tried.choice), tried.microseconds) for tried in best],
    }


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: Any) -> None:
    parser.add_argument("--effort", default="full", choices=("quick", "full"))
    parser.add_argument(
        "--candidates", type=int, default=0, help="configs to try; 0: as many as the effort says"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="for one case; no config is tried later"
    )


def run(study: Study) -> int:
    study.require_gpu()
    asked, rows, skipped = study.asked, list[dict[str, Any]](), list[str]()
    with empty_cache(), limited(asked.effort, asked.candidates, asked.seconds):
        for application, case in cases(study):
            if not study.has_time():
                skipped.append(f"{application} {case.name}")
                continue
            for row in tuned(application, case, asked.effort):
                rows.append(row)
                print(_line(row, asked.effort), flush=True)
            study.keep(rows=rows, skipped=skipped)
            release(study.device)
    study.keep(rows=rows, skipped=skipped)
    print(summary(rows, asked.effort))
    print(*(["no time for: " + ", ".join(skipped)] if skipped else []))
    return 0 if all(row["ok"] for row in rows) else 1


def summary(rows: list[dict[str, Any]], effort: str) -> str:
    """
    >>> summary([{"application": "spmm", "case": "cora", "ratio": 1.5}], "full")
    '1 cases, first guess to full: median 1.50, largest 1.50; above 1.3: spmm cora (1.50)'
    """
    if not rows:
        return "nothing was tuned"
    ratios = [row["ratio"] for row in rows]
    over = [
        f"{row['application']} {row['case']} ({row['ratio']:.2f})"
        for row in rows
        if row["ratio"] > GOAL
    ]
    return (
        f"{len(ratios)} cases, first guess to {effort}: median {statistics.median(ratios):.2f}, "
        f"largest {max(ratios):.2f}; above {GOAL}: {', '.join(over) or 'none'}"
    )


def _line(row: dict[str, Any], effort: str) -> str:
    mark = " " if row["ratio"] <= GOAL else "!"
    wrong = "" if row["ok"] else f"  WRONG {row['error']:.1e}"
    return (
        f"{row['application']:15s} {row['case']:44s} first guess {row['first_guess_us']:9.1f} µs  "
        f"{effort} {row['tuned_us']:9.1f} µs  ratio {row['ratio']:.2f}{mark}  "
        f"{row['tried']:3d} tried, {row['search_s']:4.1f} s  {row['config']}{wrong}"
    )
