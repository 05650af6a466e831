"""Rows of a padded table in an order that fills tiles.

In ``Out[x,m] += In[Nb[x,z],c] * W[z,c,m]`` a tile of rows multiplies with ``W[z]`` for every ``z``
that any of its rows has. Rows that have the same ``z`` belong into the same tile. So the rows are
sorted by what they have, once per table; each tile walks the list of what its rows have between
them, and writes every row to its own place. What is left out is only what is absent in the whole
tile.

In ``dW[z,c,m] += G[x,m] * In[Nb[x,z],c]``, where rows are summed, each ``z`` walks the tiles that
have it, in pieces that meet in atomics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from insum.lang.expr import Access, Affine, Var, accesses, index_of, substitute, variables
from insum.plan.draft import SMALL_BYTES, Draft, Subject, roles_of
from insum.plan.questions import AskSummary
from insum.plan.recipes import (
    Inverse,
    OfCount,
    OfExtent,
    Packed,
    PackedByStep,
    RecipeArray,
    SizeExpr,
    Walk,
)
from insum.plan.roles import Contraction

#: Rows of one tile, and how many rows a table has at least that is worth an order.
TILE = 128
LEAST_ROWS, LEAST_STEPS = 1024, 4
#: Numbers of a gathered row from which on its steps are better walked than flattened with it.
LEAST_CHANNELS = 16
#: Pieces that the tiles of all steps are about; and numbers of a matrix in half precision up to
#: which one program sums all rows as soon as pieces are rounded.
TYPICAL_PIECES, LEAST_ADDED = 512, 512
#: Steps of tables that are worth an order where a tile could hold many of them anyhow: rows of more
#: are sorted by several words, for longer than it saves.
MOST_JOINED = 124


def packed(subject: Subject, draft: Draft) -> tuple[Draft, bool]:
    """The product rewritten where an order of its rows pays, and whether the pieces of a sum over
    rows now meet in the output.
    """
    if subject.reduce != "sum" or draft.segment or not (roles := roles_of(subject, draft)).dot:
        return draft, False
    rows = [axis[0] for axis in (roles.m, roles.n) if len(axis) == 1]
    short = [v for v in roles.k if draft.extents[v] <= MOST_JOINED]
    found = _table(subject, draft, rows, (*roles.loops, *short), kept=True)
    if found is not None:
        trial = _to_tiles(subject, draft, *found)
        return (draft if trial is None else trial), False
    if subject.wishes.deterministic or subject.wishes.accumulate or len(roles.k) > 1:
        return draft, False
    flattened = [
        v
        for axis in (roles.m, roles.n)
        if draft.extents[axis[-1]] >= LEAST_CHANNELS
        for v in axis[:-1]
    ]
    found = _table(subject, draft, list(roles.k), (*roles.grid, *flattened), kept=False)
    if found is None or not _pays_pieces(subject, draft, roles, *found[1:]):
        return draft, False
    trial = _to_pieces(subject, draft, *found)
    return (draft, False) if trial is None else (trial, True)


def _pays_pieces(subject: Subject, draft: Draft, roles: Contraction, x: str, z: str) -> bool:
    """Whether a buffer for the result is little, and pieces read clearly more than they add to it:
    where rows are few and wide, adding takes longer than a sum over all of them in half precision
    does. Classes that bound no rows have those with few.
    """
    if subject.small_buffers():
        return True
    size = subject.problem.dtype.itemsize
    small = subject.bounds_result() and subject.buffer_bytes() <= SMALL_BYTES
    if not small or subject.sizes.extents[x].open:
        return False
    high, wide = (draft.extents[axis[-1]] for axis in (roles.m, roles.n))
    gathered = draft.extents[x] * draft.extents[z] * (high + wide) * size
    return high * wide > LEAST_ADDED and gathered >= 1.5 * TYPICAL_PIECES * high * wide * 4


def _table(
    subject: Subject, draft: Draft, rows: Sequence[str], steps: Sequence[str], *, kept: bool
) -> tuple[Access, str, str] | None:
    """A padded index over one of ``rows`` and one of ``steps``; the rows are ``kept`` in the
    target, or the steps are.
    """
    reads = [
        a
        for f in draft.factors
        for access in accesses(f)
        for i in access.indices
        for _, a in i.terms
        if isinstance(a, Access)
    ]
    for access in reads:
        if access.tensor not in draft.padded or len(access.indices) != 2:
            continue
        if access.tensor not in draft.arrays and subject.known(access.tensor) is None:
            continue
        for x_at in (0, 1):
            x, z = access.indices[x_at].var, _walked(access.indices[1 - x_at])
            if x is None or z is None or x not in rows or z not in steps:
                continue
            long = draft.extents[x] >= LEAST_ROWS and draft.extents[z] >= LEAST_STEPS
            if long and any(i.var == (x if kept else z) for i in draft.target.indices):
                return access, x, z
    return None


def _walked(index: Affine) -> str | None:
    """The one variable that an index walks, forwards or backwards."""
    if len(index.terms) != 1 or index.terms[0][0] not in (1, -1):
        return None
    atom = index.terms[0][1]
    return atom.name if isinstance(atom, Var) else None


def _recipe(draft: Draft, access: Access, x: str) -> Packed:
    """What an order depends on: the table or its inverse, and how it is read; not what variables
    are called.
    """
    table: str | Inverse = access.tensor
    if access.tensor in draft.arrays:
        made = draft.arrays[access.tensor].recipe
        assert isinstance(made, Inverse)
        table = made
    walks = []
    for index in access.indices:
        (var,) = variables(index)
        extent: SizeExpr = draft.made.get(var, (OfExtent(var),))
        walks.append(Walk(index.var == x, index.terms[0][0], index.offset, extent))
    return Packed(table, tuple(walks))


def _to_tiles(subject: Subject, draft: Draft, access: Access, x: str, z: str) -> Draft | None:
    recipe = _recipe(draft, access, x)
    if not subject.ask(AskSummary(recipe)).worth:
        return None
    tile, lane, step = (subject.name(name, draft) for name in ("tile", "lane", "step"))
    rows, steps = subject.name(f"{x}_tiles", draft), subject.name(f"{z}_steps", draft)
    change = {x: _through(rows, index_of(tile), index_of(lane)), z: _through(steps, index_of(step))}
    arrays = {
        rows: subject.array(recipe, "rows", "int32", rank=2),
        steps: subject.array(recipe, "steps", "int32"),
    }
    tiles = -(-draft.extents[x] // TILE)
    trial = replace(
        _read_through(draft, change, arrays, rows),
        row=tile,
        segment=step,
        segments=recipe,
        extents={**draft.extents, tile: tiles, lane: TILE, step: tiles * draft.extents[z]},
        made={
            **draft.made,
            tile: (OfCount(recipe, "tiles"),),
            lane: (OfCount(recipe, "lanes"),),
            step: (OfCount(recipe, "entries"),),
        },
        multiples={**draft.multiples, lane: TILE},
    ).because(f"rows are ordered by what {access.tensor} has of them")
    return trial if roles_of(subject, trial).dot else None


def _to_pieces(subject: Subject, draft: Draft, access: Access, x: str, z: str) -> Draft | None:
    base = _recipe(draft, access, x)
    if not subject.ask(AskSummary(base)).worth:
        return None
    recipe = PackedByStep(base)
    piece, lane, slot = (subject.name(name, draft) for name in ("piece", "lane", "slot"))
    names = (f"{x}_tiles", f"{x}_tile", f"{z}_pieces")
    rows, of_slot, of_piece = (subject.name(name, draft) for name in names)
    change = {
        x: _through(rows, _through(of_slot, index_of(slot)), index_of(lane)),
        z: _through(of_piece, index_of(piece)),
    }
    arrays = {
        rows: subject.array(base, "rows", "int32", rank=2),
        of_slot: subject.array(recipe, "tile", "int32"),
        of_piece: subject.array(recipe, "step", "int32"),
    }
    tiles = -(-draft.extents[x] // TILE)
    slots = tiles * draft.extents[z]
    trial = replace(
        _read_through(draft, change, arrays, rows),
        row=piece,
        segment=slot,
        segments=recipe,
        extents={**draft.extents, piece: TYPICAL_PIECES, lane: TILE, slot: slots},
        made={
            **draft.made,
            piece: (OfCount(recipe, "pieces"),),
            lane: (OfCount(base, "lanes"),),
            slot: (OfCount(base, "entries"),),
        },
        multiples={**draft.multiples, lane: TILE},
    ).because(f"tiles of rows that {access.tensor} has nothing for are left out")
    return trial if roles_of(subject, trial).dot else None


def _read_through(
    draft: Draft, change: Mapping[str, Affine], arrays: Mapping[str, RecipeArray], rows: str
) -> Draft:
    """Replace the rows and steps of a product by reads of arrays that were derived from its
    table. The last tile has places without a row.
    """
    target = substitute(draft.target, change)
    assert isinstance(target, Access)
    return replace(
        draft,
        factors=tuple(substitute(f, change) for f in draft.factors),
        target=target,
        arrays={**draft.arrays, **arrays},
        padded=draft.padded | {rows},
    )


def _through(array: str, *at: Affine) -> Affine:
    return Affine(((1, Access(array, at)),))
