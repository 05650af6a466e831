"""Plain stores where points meet through windows: every place gathers what belongs to it."""

from __future__ import annotations

from dataclasses import replace

from insum.lang.expr import names_of
from insum.plan.draft import Draft, Planned, Subject, finish
from insum.plan.recipes import CeilDivided, OfExtent
from insum.plan.windows import Gathered, gathered, reach


def _divided(found: Gathered) -> list[str]:
    """Variables of which a part is summed over."""
    parts = [one for size in found.made.values() for one in size if isinstance(one, CeilDivided)]
    return [one.size.var for one in parts if isinstance(one.size, OfExtent)]


def gathered_windows(subject: Subject, draft: Draft) -> Planned | None:
    if subject.reduce != "sum" or subject.wishes.settings.scatter not in ("auto", "store"):
        return None
    shape = subject.sizes.shape
    if subject.sizes.general:  # which says nothing of sizes
        shape = tuple(reach(index, draft.extents) for index in draft.target.indices)
    taken = {*names_of(subject.problem.statement), *draft.extents}
    found = gathered(draft.target, draft.factors, draft.extents, shape, taken)
    if found is None or any(map(subject.is_open, _divided(found))):
        return None
    draft = replace(
        draft.because("each place gathers its window"),
        target=found.target,
        factors=found.factors,
        extents=found.extents,
        made=found.made,
        bounds=found.bounds,
    )
    return finish(subject, draft, "store", fill=False)
