"""Plain stores where points meet through windows: every place gathers what belongs to it."""

from __future__ import annotations

from dataclasses import replace

from insum.lang.expr import names_of
from insum.plan.draft import Draft, Planned, Subject, finish
from insum.plan.recipes import OfShape
from insum.plan.windows import gathered


def gathered_windows(subject: Subject, draft: Draft) -> Planned | None:
    if subject.reduce != "sum" or subject.wishes.settings.scatter not in ("auto", "store"):
        return None
    shape = subject.sizes.shape
    taken = {*names_of(subject.problem.statement), *draft.extents}
    found = gathered(draft.target, draft.factors, draft.extents, shape, taken)
    if found is None:
        return None
    solved = {bound.var for bound in found.bounds}
    kept = {v: n for v, n in draft.extents.items() if v not in solved}
    draft = replace(
        draft.because("each place gathers its window"),
        target=found.target,
        factors=found.factors,
        extents=kept | {v: shape[dim] for v, dim in found.places.items()},
        made={v: (OfShape(dim),) for v, dim in found.places.items()},
        bounds=found.bounds,
    )
    return finish(subject, draft, "store", fill=False)
