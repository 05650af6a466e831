"""Atomic additions, maxima and minima: always possible, seldom the best, and all there is for an
index tensor that was never seen.
"""

from __future__ import annotations

import math

from insum.lang.expr import accesses, variables
from insum.plan.draft import TRITON, Draft, Planned, Subject, finish, roles_of
from insum.plan.questions import AskSummary
from insum.plan.recipes import OfShape, Segments, Sorted
from insum.plan.roles import SMALLEST_DOT
from insum.plan.strategies.segmenting import fits, to_segments
from insum.plan.substitution import Scatter

#: Entries of one row that may wait for each other at one place.
MOST_AT_ONE_PLACE = 1024


def atomic(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    name = scatter.access.tensor
    if subject.known(name) is None:
        return _atomic(subject, draft, f"{name} was not seen before")
    return _atomic(
        subject, draft, f"{name} is not sorted, and its tiles hold several entries of it"
    )


def atomic_is_asked_for(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    if subject.wishes.settings.scatter != "atomic" or subject.is_ordered:
        return None
    return _atomic(subject, draft, "asked for")


def atomic_keeps_its_tiles(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    """Where only several entries together make a matrix product, rows would take it apart."""
    if subject.wishes.deterministic or subject.wishes.settings.scatter == "segment":
        return None
    if not fits(subject, draft, scatter) or not roles_of(subject, draft).dot:
        return None
    if roles_of(subject, to_segments(subject, draft, scatter)).dot:
        return None
    return _atomic(subject, draft, f"its tiles hold several entries of {scatter.access.tensor}")


def atomic_reads_matrices_once(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    """Where entries have matrices of their own, and each is multiplied and summed by itself: rows
    would walk through them one value at a time. Tiles of entries read them once and in order, and
    what they add is little beside that.
    """
    if not _may_meet_anywhere(subject) or subject.known(scatter.access.tensor) is None:
        return None
    columns = {v for v in variables(draft.target) if v not in scatter.variables}
    summed = {v for v in draft.summed() if draft.extents[v] >= SMALLEST_DOT}
    if not any(
        set(scatter.variables) <= set(own) and columns & set(own) and summed & set(own)
        for factor in draft.factors
        for access in accesses(factor, nested=False)
        if None not in (own := [index.var for index in access.indices])
    ):
        return None
    roles = roles_of(subject, draft)
    if roles.dot or roles.loops or roles.grid:
        return None
    return _atomic(subject, draft, "each entry has a matrix of its own, which is read once")


def atomic_adds_single_values(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    """Single values that are read in order: finding the entries of a row costs more than adding
    them where they belong, as long as few belong to one place.
    """
    name = scatter.access.tensor
    if not _may_meet_anywhere(subject) or subject.known(name) is None or draft.summed():
        return None
    if subject.accumulator() != TRITON[subject.problem.dtype]:  # they meet in a buffer, then
        return None
    columns = (v for v in variables(draft.target) if v not in scatter.variables)
    reads = [a for factor in draft.factors for a in accesses(factor) if a.indices]
    in_order = all(index.var is not None for access in reads for index in access.indices)
    if not in_order or math.prod(draft.extents[v] for v in columns) > 1:
        return None
    rows = Segments if fits(subject, draft, scatter) else Sorted
    longest = subject.ask(AskSummary(rows(name, OfShape(scatter.dim)))).longest
    if longest > MOST_AT_ONE_PLACE:
        return None
    return _atomic(subject, draft, f"few of the single values meet at one place of {name}")


def _may_meet_anywhere(subject: Subject) -> bool:
    return (
        subject.reduce == "sum"
        and not subject.wishes.deterministic
        and subject.wishes.settings.scatter == "auto"
    )


def _atomic(subject: Subject, draft: Draft, why: str) -> Planned:
    return finish(subject, draft.because(why), "atomic", fill=True)
