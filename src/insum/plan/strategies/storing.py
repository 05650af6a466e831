"""Plain stores through index tensors in which no value comes twice."""

from __future__ import annotations

from dataclasses import replace

from insum.lang.expr import Access, variables
from insum.plan.draft import Draft, Planned, Subject, finish
from insum.plan.recipes import OfExtent, OfShape
from insum.plan.substitution import Scatter, determined


def unique(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    name = scatter.access.tensor
    if not _is_unique(subject, name):
        return None
    if subject.wishes.settings.scatter not in ("auto", "store"):
        return None
    entries = tuple(OfExtent(v) for v in scatter.variables)
    planned = finish(subject, draft.because(f"{name} is unique"), "store", fill=True)
    return replace(planned, covers=(entries, (OfShape(scatter.dim),)))


def several_unique(subject: Subject, draft: Draft) -> Planned | None:
    """Through several index tensors, such as rows and columns that are put in order: where each
    place of the output tells the point that it comes from.
    """
    if subject.wishes.settings.scatter not in ("auto", "store"):
        return None
    indices, told = draft.target.indices, list[tuple[int, set[str]]]()
    for dim, index in enumerate(indices):
        match index.atom:
            case Access(tensor=name, indices=inner) if _is_unique(subject, name):
                names = {i.var for i in inner}
                if None not in names and len(names) == len(inner):
                    told.append((dim, {*variables(index)}))
    found = determined(indices).union(*(names for _, names in told))
    if not found >= {*variables(draft.target)}:
        return None
    draft = draft.because("no two points meet, for index tensors are unique")
    planned = finish(subject, draft, "store", fill=True)
    scattered = [dim for dim, index in enumerate(indices) if index.var is None]
    apart = sum(len({*variables(index)}) for index in indices) == len({*variables(draft.target)})
    if [dim for dim, _ in told] != scattered or not apart:
        return planned
    entries = tuple(OfExtent(v) for dim in scattered for v in variables(indices[dim]))
    return replace(planned, covers=(entries, tuple(map(OfShape, scattered))))


def _is_unique(subject: Subject, name: str) -> bool:
    """Whether an index tensor was seen to have no value twice, and no padding."""
    known = subject.known(name) if subject.is_tensor(name) else None
    return known is not None and known.unique and subject.is_clean(name)
