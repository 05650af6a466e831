"""Several dimensions of the left side that indices lead to: ``y[d[e],c[e],f]``, ``y[g[d[e]],f]``,
``y[e,d[e]]``. Together they are rows, one for each place that the indices lead to, and entries are
walked in the order of these rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

from insum.lang.expr import Access, Affine, accesses, index_of, variables
from insum.plan.draft import Draft, Planned, Subject, finish
from insum.plan.questions import AskSummary
from insum.plan.recipes import DimOfPlaces, LeftPlaces, Sorted
from insum.plan.strategies.sorting import in_sorted_order

#: Rows of less columns than this, and of less entries for each place, are added up as quickly by
#: atomics.
LEAST_COLUMNS, LEAST_ENTRIES = 16, 4
#: So many places an entry may have, where most rows have none; and in deterministic mode, where
#: nothing else adds up in one order.
MOST_PLACES, MOST_PLACES_IN_ORDER = 2, 8
#: More entries are not put in order.
MOST_ENTRIES = 2**26


def several_indices(subject: Subject, draft: Draft) -> Planned | None:
    dims = _dims(draft.target)
    indices = tuple(draft.target.indices[d] for d in dims)
    over = tuple(dict.fromkeys(v for index in indices for v in variables(index)))
    names = tuple(dict.fromkeys(a.tensor for index in indices for a in accesses(index)))
    tensors = tuple(name for name in names if subject.is_tensor(name))
    if not tensors or tensors != names or not _pays(subject, draft, dims, over, names):
        return None
    seen = all(subject.known(name) is not None for name in names)
    padded = tuple(name for name in names if name in draft.padded)
    base = LeftPlaces(indices, dims, over, names, padded)
    order = Sorted(base, base.count)
    how = "were sorted once" if seen else "are sorted first"
    draft = draft.because(f"the places of {', '.join(names)} together {how}")
    draft, slot = in_sorted_order(subject, draft, over, order, seen=seen)
    draft = _to_rows(subject, draft, base, order, slot, seen=seen)
    return finish(subject, draft, "segment", fill=False)


def _dims(target: Access) -> tuple[int, ...]:
    """Dimensions that are not indexed by a variable of their own.

    >>> from insum.lang.parser import parse
    >>> [_dims(parse(f"{left} = x[e,f]").target) for left in ("y[d[e],f,c[e]]", "y[e,f,d[e]]")]
    [(0, 2), (0, 2)]
    """
    own = [index.var for index in target.indices]
    shared = {v for index in target.indices if index.var is None for v in variables(index)}
    shared |= {v for v in own if v is not None and own.count(v) > 1}
    return tuple(d for d, v in enumerate(own) if v is None or v in shared)


def _pays(
    subject: Subject,
    draft: Draft,
    dims: tuple[int, ...],
    over: tuple[str, ...],
    names: tuple[str, ...],
) -> bool:
    """Always for sums in deterministic mode, while places are not too many. Else only of index
    tensors that come back, and of rows that are wide enough or have entries enough.
    """
    entries = math.prod(draft.extents[v] for v in over)
    places = math.prod(subject.sizes.shape[d] for d in dims)
    if entries > MOST_ENTRIES:
        return False
    if subject.is_ordered:
        return places <= MOST_PLACES_IN_ORDER * entries
    if subject.wishes.settings.scatter not in ("auto", "segment") or subject.sizes.general:
        return False
    columns = math.prod(draft.extents[v] for v in variables(draft.target) if v not in over)
    wide = columns >= LEAST_COLUMNS or subject.wishes.settings.scatter == "segment"
    known = all(subject.known(name) is not None for name in names)
    heavy = LEAST_ENTRIES * places <= entries
    return known and (heavy or wide and places <= MOST_PLACES * entries)


def _to_rows(
    subject: Subject, draft: Draft, base: LeftPlaces, order: Sorted, slot: str, *, seen: bool
) -> Draft:
    """The left side over rows, each of which walks its entries ``slot``."""
    row = subject.name("row", draft)
    arrays, indices = dict(draft.arrays), list(draft.target.indices)
    for k, dim in enumerate(base.dims):
        name = subject.name(f"row_{dim}", draft)
        arrays[name] = subject.array(DimOfPlaces(base, k), "")
        indices[dim] = Affine(((1, Access(name, (index_of(row),))),))
    draft = replace(
        draft,
        target=Access(draft.target.tensor, tuple(indices)),
        arrays=arrays,
        segments=order,
        row=row,
        segment=slot,
        extents={
            **draft.extents,
            row: math.prod(subject.sizes.shape[d] for d in base.dims),
        },
        made={**draft.made, row: base.count},
        longest=subject.ask(AskSummary(order)).longest if seen else 0,
        entries=draft.extents[slot],
    )
    for name in base.names:
        draft = draft.without_padding(name)
    return draft
