"""Plain stores through an index tensor in which no value comes twice."""

from __future__ import annotations

from dataclasses import replace

from insum.plan.draft import Draft, Planned, Subject, finish
from insum.plan.recipes import OfExtent, OfShape
from insum.plan.substitution import Scatter


def unique(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    name = scatter.access.tensor
    known = subject.known(name)
    if known is None or not known.unique or not subject.is_clean(name):
        return None
    if subject.wishes.settings.scatter not in ("auto", "store"):
        return None
    entries = tuple(OfExtent(v) for v in scatter.variables)
    planned = finish(subject, draft.because(f"{name} is unique"), "store", fill=True)
    return replace(planned, covers=(entries, (OfShape(scatter.dim),)))
