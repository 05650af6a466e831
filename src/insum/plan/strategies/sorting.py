"""An index that is not sorted: its entries are walked in sorted order, which is found once and kept
with the tensor.
"""

from __future__ import annotations

import math
from dataclasses import replace

from insum.lang.expr import Access, Affine, accesses, index_of, substitute, variables
from insum.plan.draft import Draft, Planned, Subject, finish, roles_of
from insum.plan.recipes import Composed, OfExtent, OfShape, Position, Sorted
from insum.plan.strategies.segmenting import at_home, fits, merge, merged, to_rows
from insum.plan.substitution import Scatter, replace_atom

#: All tensors together are this many times a sorted copy of one index tensor, if it is made. Read
#: through the order, each index fetches a sector of memory for itself: as much as a narrow row.
COMPOSE_SHARE = 4
#: Elements of a row of the output, and additions to all of them, above which rows are heavy.
HEAVY_ROW, HEAVY = 1024, 2**26


def sorted_for_heavy_rows(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    """Rows so large that sorting the entries is nothing beside adding them up by themselves, as in
    the gradient of matrices that entries choose; also of tensors that were never seen.
    """
    if subject.reduce != "sum" or subject.wishes.settings.scatter != "auto":
        return None
    row = math.prod(draft.extents[v] for v in variables(draft.target) if v not in scatter.variables)
    entries = math.prod(draft.extents[v] for v in scatter.variables)
    if row < HEAVY_ROW or row * entries < HEAVY or fits(subject, draft, scatter):
        return None
    if tiles_scatter(subject, draft, scatter):
        return None
    return finish(subject, to_sorted_rows(subject, draft, scatter), "segment", fill=False)


def sorted_first(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    if not _pays(subject, draft, scatter):
        return None
    return finish(subject, to_sorted_rows(subject, draft, scatter), "segment", fill=False)


def to_sorted_rows(subject: Subject, draft: Draft, scatter: Scatter) -> Draft:
    """The product over output rows, each of which walks its entries in sorted order."""
    name = scatter.access.tensor
    known = subject.known(name)
    draft = draft.because(
        f"{name} was sorted once" if known is not None else f"{name} is sorted first"
    )
    base = Sorted(name, (OfShape(scatter.dim),))
    draft = replace(draft, home=scatter.access)
    draft, slot = in_sorted_order(subject, draft, scatter.variables, base, seen=known is not None)
    return to_rows(subject, draft, scatter, base, slot)


def in_sorted_order(
    subject: Subject, draft: Draft, over: tuple[str, ...], base: Sorted, *, seen: bool
) -> tuple[Draft, str]:
    """The right side with one variable, which walks the entries ``over`` these variables in sorted
    order, instead of them. ``seen``: whether index tensors come back.
    """
    slot = subject.name("slot", draft)
    draft = replace(
        draft,
        extents={**draft.extents, slot: math.prod(draft.extents[v] for v in over)},
        made={**draft.made, slot: tuple(OfExtent(v) for v in over)},
    )
    if seen:
        draft = _composed(subject, draft, over, base, slot)
    return _in_order(subject, draft, over, base, slot), slot


def _pays(subject: Subject, draft: Draft, scatter: Scatter) -> bool:
    """Always for sums in deterministic mode. Else only of a tensor that comes back, and not where
    the scattered variables are a side of a matrix product: sorting would destroy that.
    """
    if subject.is_ordered or subject.wishes.settings.scatter == "segment":
        return True
    if subject.known(scatter.access.tensor) is None:
        return False
    return not tiles_scatter(subject, draft, scatter)


def tiles_scatter(subject: Subject, draft: Draft, scatter: Scatter) -> bool:
    """Whether a matrix product would have the scattered variables along one side of its tile."""
    roles = roles_of(subject, draft)
    return roles.dot and bool(set(scatter.variables) & {roles.m[-1], roles.n[-1]})


def _in_order(
    subject: Subject, draft: Draft, over: tuple[str, ...], base: Sorted, slot: str
) -> Draft:
    """The right side read at the entries in their order."""
    order = subject.name("order", draft)
    through = Affine(((1, Access(order, (index_of(slot),))),))
    found = merge(subject, draft, over) if len(over) > 1 else None
    if found is not None:
        flat = subject.name("flat", draft)
        draft = merged(draft, replace(found, into=flat))
        change = {flat: through}
    elif len(over) == 1:
        change = {over[0]: through}
    else:
        draft, change = _positions(subject, draft, over, base, slot)
    draft = replace(
        draft,
        factors=tuple(substitute(f, change) for f in draft.factors),
        home=at_home(draft, lambda read: substitute(read, change)),
    )
    if order in draft.reads():
        arrays = {**draft.arrays, order: subject.array(base, "order")}
        draft = replace(draft, arrays=arrays)
    return draft


def _positions(
    subject: Subject, draft: Draft, over: tuple[str, ...], base: Sorted, slot: str
) -> tuple[Draft, dict[str, Affine]]:
    """Each scattered variable as an array over the sorted entries."""
    change: dict[str, Affine] = {}
    used = {v for f in draft.factors for v in variables(f)}
    for dim, var in enumerate(over):
        if var in used:
            name = subject.name(f"{var}_order", draft)
            array = subject.array(Position(base, dim), "")
            draft = replace(draft, arrays={**draft.arrays, name: array})
            change[var] = Affine(((1, Access(name, (index_of(slot),))),))
    return draft, change


def _composed(
    subject: Subject, draft: Draft, over: tuple[str, ...], base: Sorted, slot: str
) -> Draft:
    """Index tensors over the scattered variables are gathered into sorted order once, so that the
    kernel reads them in a row.

    Left alone where the copy would be a noticeable part of all memory: the kernel then reads them
    through the order.
    """
    mine = set(over)
    width = 8 if subject.sizes.wide else 4
    if len(mine) == 1 and COMPOSE_SHARE * draft.extents[slot] * width > subject.bytes_read():
        return draft
    atoms = dict.fromkeys(
        atom
        for factor in draft.factors
        for access in accesses(factor)
        for index in access.indices
        for _, atom in index.terms
        if isinstance(atom, Access)
        and atom.tensor in subject.problem.kinds
        and atom.indices
        and all(i.var in mine for i in atom.indices)
        and subject.known(atom.tensor) is not None
        and not subject.may_wrap(atom.tensor)
    )
    for atom in atoms:
        name = subject.name(f"{atom.tensor}_sorted", draft)
        dims = tuple(over.index(str(i.var)) for i in atom.indices)
        array = subject.array(Composed(base, atom.tensor, dims), "")
        new = Access(name, (index_of(slot),))
        draft = replace(
            draft,
            arrays={**draft.arrays, name: array},
            padded=draft.padded | {name} if atom.tensor in draft.padded else draft.padded,
            factors=tuple(replace_atom(f, atom, new) for f in draft.factors),
            home=new if atom == draft.home else draft.home,
        )
    return draft
