"""Atomic additions, maxima and minima: always possible, seldom the best, and all there is for an
index tensor that was never seen.
"""

from __future__ import annotations

from insum.plan.draft import Draft, Planned, Subject, finish, roles_of
from insum.plan.strategies.segmenting import fits, to_segments
from insum.plan.substitution import Scatter


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


def _atomic(subject: Subject, draft: Draft, why: str) -> Planned:
    return finish(subject, draft.because(why), "atomic", fill=True)
