"""Scatters that are gathers through an inverse table: where the other variables fix the scattered
one, as in a neighbour table, and where columns are put into an order.
"""

from __future__ import annotations

from dataclasses import replace

from insum.lang.expr import Access, Affine, Var, index_of, substitute, variables
from insum.plan.draft import Draft, Planned, Subject, finish
from insum.plan.questions import AskSummary
from insum.plan.recipes import INVERT_UP_TO, Inverse, OfShape
from insum.plan.strategies.packing import packed
from insum.plan.strategies.sorting import tiles_scatter
from insum.plan.substitution import Scatter


def inverse(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    if len(scatter.variables) < 2 or not tiles_scatter(subject, draft, scatter):
        return None
    return None if subject.may_wrap(scatter.access.tensor) else _inverted(subject, draft, scatter)


def columns_in_order(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    """Numbers that are stored one by one beside each other each take a piece of memory; loads of
    them share what they read.
    """
    name, last = scatter.access.tensor, len(draft.target.indices) - 1
    if len(scatter.variables) != 1 or scatter.dim != last or last == 0:
        return None
    known = subject.known(name)
    if known is None or not known.unique or not subject.is_clean(name):
        return None
    return _inverted(subject, draft, scatter)


def _inverted(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    if subject.sizes.general:  # which does not say what is long in a table
        return None
    known = subject.known(scatter.access.tensor)
    if known is None or subject.wishes.settings.scatter != "auto":
        return None
    sizes = [draft.extents[v] for v in scatter.variables]
    dim = max(range(len(sizes)), key=lambda d: sizes[d])
    var = scatter.variables[dim]
    if var not in {v for f in draft.factors for v in variables(f)}:
        # The value does not depend on the inverted variable, so nothing would mask absent points.
        return None
    rows = subject.rows(scatter)
    if rows > INVERT_UP_TO * sizes[dim]:
        return None
    recipe = Inverse(scatter.access.tensor, dim, OfShape(scatter.dim))
    found = subject.ask(AskSummary(recipe))
    if not found.exists:
        return None
    row = subject.name("row", draft)
    how = _mirrored if found.mirrored else _tabled
    draft, read = how(subject, draft, scatter, var, row, recipe)
    draft = replace(
        draft,
        factors=tuple(substitute(f, {var: Affine(((1, read),))}) for f in draft.factors),
        target=Access(
            draft.target.tensor,
            tuple(
                index_of(row) if d == scatter.dim else i for d, i in enumerate(draft.target.indices)
            ),
        ),
        extents={**draft.extents, row: rows},
        made={**draft.made, row: (OfShape(scatter.dim),)},
    ).without_padding(scatter.access.tensor)
    draft, _ = packed(subject, draft)
    return finish(subject, draft, "store", fill=False)


def _tabled(
    subject: Subject, draft: Draft, scatter: Scatter, var: str, row: str, recipe: Inverse
) -> tuple[Draft, Access]:
    """A read of the inverse table, which is kept with the index tensor."""
    name = subject.name(f"{scatter.access.tensor}_inverse", draft)
    array = subject.array(recipe, "inverse", "int32", rank=len(scatter.variables))
    draft = replace(
        draft, arrays={**draft.arrays, name: array}, padded=draft.padded | {name}
    ).because(f"{scatter.access.tensor} has an inverse table")
    return draft, Access(name, tuple(index_of(row if v == var else v) for v in scatter.variables))


def _mirrored(
    subject: Subject, draft: Draft, scatter: Scatter, var: str, row: str, recipe: Inverse
) -> tuple[Draft, Access]:
    """A read of the index tensor itself, the other variables backwards: an offset leads back where
    its opposite leads to.
    """
    draft = draft.because(f"{scatter.access.tensor}, read backwards, is its own inverse table")
    indices = tuple(
        index_of(row) if v == var else Affine(((-1, Var(v)),), subject.last(v))
        for v in scatter.variables
    )
    return draft, Access(scatter.access.tensor, indices)
