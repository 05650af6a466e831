"""Atomic additions, maxima and minima: always possible, seldom the best, and all there is for an
index tensor that was never seen.
"""

from __future__ import annotations

import math

from insum.lang.expr import accesses, variables
from insum.plan.draft import Draft, Planned, Subject, finish, roles_of
from insum.plan.roles import SMALLEST_DOT, contiguity
from insum.plan.strategies.segmenting import fits, to_segments
from insum.plan.substitution import Scatter

#: Rows beside each other of which single numbers are added to, and how many times as many places
#: they have as entries.
LEAST_ROWS, MOSTLY_EMPTY = 32, 4


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
    if subject.is_ordered or subject.wishes.settings.scatter != "auto":
        return None
    if subject.reduce != "sum" or subject.known(scatter.access.tensor) is None:
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


def atomic_for_numbers(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    """Where the last dimension is scattered, and what is added lies along the entries: rows of the
    output would be numbers far apart, each written by itself, as what is read for them would be.
    """
    if subject.is_ordered or subject.wishes.settings.scatter != "auto" or subject.reduce != "sum":
        return None
    *outer, last = draft.target.indices
    if scatter.dim != len(outer) or None in [index.var for index in outer]:
        return None
    (*_, entry), own = scatter.variables, {*variables(draft.target)}
    beside = math.prod(draft.extents[v] for v in own - {*variables(last)})
    entries = math.prod(draft.extents[v] for v in scatter.variables)
    along = contiguity(draft.factors, entry) > 0
    times = MOSTLY_EMPTY * (1 if along else 2)
    if draft.summed() or times * entries > subject.rows(scatter) or beside < LEAST_ROWS:
        return None
    return _atomic(subject, draft, "what is added lies along the entries")


def _atomic(subject: Subject, draft: Draft, why: str) -> Planned:
    return finish(subject, draft.because(why), "atomic", fill=True)
