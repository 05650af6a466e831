"""Rows of the output own runs of a sorted index: no atomics, every place is written once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from insum.lang.expr import Access, Expr, accesses, index_of
from insum.plan.draft import Draft, Planned, Subject, finish
from insum.plan.questions import AskSummary
from insum.plan.recipes import OfExtent, OfShape, RowRecipe, Segments, Slots
from insum.plan.substitution import Merge, Scatter, merge_of


def segments(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    if not fits(subject, draft, scatter):
        return None
    draft = to_segments(subject, draft.because(f"{scatter.access.tensor} is sorted"), scatter)
    return finish(subject, draft, "segment", fill=False)


def fits(subject: Subject, draft: Draft, scatter: Scatter) -> bool:
    """Whether the index is sorted, and entries have one number: an index of one dimension, or of
    several that every tensor can be flattened over.
    """
    name = scatter.access.tensor
    known = subject.known(name)
    if known is None or not known.sorted or not subject.is_clean(name):
        return False
    if not subject.sizes.strides[name].is_contiguous:
        return False
    return len(scatter.access.indices) == 1 or merge(subject, draft, scatter.variables) is not None


def to_segments(subject: Subject, draft: Draft, scatter: Scatter) -> Draft:
    """A summed variable that always follows the index is merged with it, and padding at its end
    dropped.
    """
    base = Segments(scatter.access.tensor, OfShape(scatter.dim))
    draft = replace(draft, home=scatter.access)
    together = scatter.variables
    summed = [v for v in draft.summed() if v not in together]
    found = next((m for q in summed if (m := merge(subject, draft, (*together, q)))), None)
    if found is None and len(together) > 1:
        found = merge(subject, draft, together)
    if found is None:
        return to_rows(subject, draft, scatter, base, together[0])
    inner = tuple(v for v in found.variables if v not in together)
    draft = merged(draft, found)
    if not inner:
        return to_rows(subject, draft, scatter, base, found.into)
    draft, rows = _widened(subject, draft, base, inner, found.into)
    return to_rows(subject, draft, scatter, rows, found.into)


def merge(subject: Subject, draft: Draft, together: tuple[str, ...]) -> Merge | None:
    """Adjacent variables as one, if every tensor can be walked so."""
    found = merge_of(draft.factors, together, subject.name("slot"))
    if found is None:
        return None
    joined = all(
        subject.sizes.strides[t].can_join(at, len(together))
        for t, at in found.dims
        if t in subject.sizes.strides and t not in draft.arrays
    )
    return found if joined else None


def merged(draft: Draft, found: Merge) -> Draft:
    count = len(found.variables)
    return replace(
        draft,
        factors=tuple(found(f) for f in draft.factors),
        home=at_home(draft, found),
        views={**draft.views, **{t: (at, count) for t, at in found.dims}},
        extents={**draft.extents, found.into: math.prod(draft.extents[v] for v in found.variables)},
        made={**draft.made, found.into: tuple(OfExtent(v) for v in found.variables)},
    )


def at_home(draft: Draft, change: Callable[[Expr], Expr]) -> Access | None:
    """The index that rows are made of, changed as all that is read."""
    found = None if draft.home is None else change(draft.home)
    return found if isinstance(found, Access) else None


def _widened(
    subject: Subject, draft: Draft, base: Segments, inner: tuple[str, ...], slot: str
) -> tuple[Draft, Slots]:
    reads = {a.tensor for f in draft.factors for a in accesses(f) if a.indices == (index_of(slot),)}
    padded = tuple(sorted(reads & draft.padded))
    if any(subject.known(name) is None for name in padded):
        padded = ()  # where their padding stands is not to be asked
    rows = Slots(base, tuple(OfExtent(v) for v in inner), padded)
    if padded and subject.ask(AskSummary(rows)).trimmed:
        draft = replace(draft, padded=draft.padded - reads)
        draft = draft.because("padding ends each row and is skipped")
    return draft, rows


def to_rows(subject: Subject, draft: Draft, scatter: Scatter, base: RowRecipe, slot: str) -> Draft:
    """The left side over output rows, each of which walks its entries ``slot``."""
    row = subject.name("row", draft)
    indices = tuple(
        index_of(row) if d == scatter.dim else i for d, i in enumerate(draft.target.indices)
    )
    seen = subject.known(scatter.access.tensor) is not None
    draft = replace(
        draft,
        target=Access(draft.target.tensor, indices),
        segments=base,
        row=row,
        segment=slot,
        extents={**draft.extents, row: subject.rows(scatter)},
        made={**draft.made, row: (OfShape(scatter.dim),)},
        longest=subject.ask(AskSummary(base)).longest if seen else 0,
        entries=draft.extents[slot],
    )
    return draft.without_padding(scatter.access.tensor)
