"""Entries that gather the same matrix share its tiles.

In ``Y[p,n] = X[t[p],k] * W[e[p],k,n]`` (experts, relations, adapters, offsets of a kernel) every
entry multiplies one row with a matrix of its own choice. Entries of equal ``e`` belong into the
same tile: then one side of a matrix product has the entries, the other the matrix, which is read
once for all of them. So entries are put into tiles by their ``e``, what a value leaves of its last
tile is padding, and no tile crosses from one value to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from insum.lang.expr import Access, Affine, accesses, index_of, substitute, variables
from insum.plan.draft import Draft, Planned, Subject, finish, roles_of
from insum.plan.recipes import OfCount, OfLength, OfShape, SharedTiles
from insum.plan.sizes import power_of_two
from insum.plan.substitution import Scatter, replace_atom, scatter_of
from insum.plan.tiling import ENOUGH_PROGRAMS, LARGE_TILE

#: Entries of one tile, at least and at most.
FEWEST_LANES, MOST_LANES = 16, 128
#: Below so many entries of a value, on average, there is little to share.
LEAST_SHARED = 2
#: Below so many elements a matrix stays near by itself.
LEAST_MATRIX = 256
#: Elements of matrices that all entries together would read, above which it pays to find the tiles
#: for one call; for index tensors that come back it nearly always does.
PAYS_UNSEEN, PAYS = 2**26, 2**18
#: Entries that are summed in one tile, at least and at most, where few rows are written.
FEWEST_SUMMED, MOST_SUMMED = 64, 4096


def shared(subject: Subject, draft: Draft) -> Planned | None:
    """The product over tiles of entries, where a gathered matrix is worth sharing."""
    if subject.reduce != "sum" or subject.wishes.settings.scatter not in ("auto", "atomic"):
        return None
    if roles_of(subject, draft).dot:
        return None  # its tiles share the matrix already
    for access in _gathered(draft):
        planned = _over_tiles(subject, draft, access)
        if planned is not None:
            return planned
    return None


def _gathered(draft: Draft) -> list[tuple[Access, int, Access]]:
    """Tensors of which an index tensor selects a whole matrix: the access, the dimension, and the
    index. One side of the matrix is summed, the other kept.
    """
    summed, found = set(draft.summed()), []
    for factor in draft.factors:
        if not isinstance(factor, Access) or len(factor.indices) < 3:
            continue
        chosen = [d for d, i in enumerate(factor.indices) if i.var is None]
        rest = [i.var for i in factor.indices if i.var is not None]
        if len(chosen) != 1 or not summed & set(rest) or set(rest) <= summed:
            continue
        atom = factor.indices[chosen[0]].atom
        if not isinstance(atom, Access) or atom.tensor in draft.arrays:
            continue
        over = [i.var for i in atom.indices]
        if over and None not in over and len(set(over)) == len(over) and not set(over) & set(rest):
            found.append((factor, chosen[0], atom))
    return found


def _over_tiles(
    subject: Subject, draft: Draft, gathered: tuple[Access, int, Access]
) -> Planned | None:
    factor, dim, index = gathered
    over = [str(i.var) for i in index.indices]
    matrix = math.prod(draft.extents[str(i.var)] for i in factor.indices if i.var is not None)
    entries = math.prod(draft.extents[v] for v in over)
    matrices = max(1, subject.sizes.numel[factor.tensor] // max(1, matrix))
    known = subject.known(index.tensor)
    if known is not None and known.unique:
        return None  # no two entries gather the same
    least = PAYS if known is not None else PAYS_UNSEEN
    if matrix < LEAST_MATRIX or entries < LEAST_SHARED * matrices or entries * matrix < least:
        return None
    meeting = _meeting(subject, draft, over)
    if meeting is None:
        return None
    lanes = max(FEWEST_LANES, min(MOST_LANES, power_of_two(entries // matrices)))
    recipe = SharedTiles(
        index.tensor, OfLength(factor.tensor, dim), lanes, index.tensor in draft.padded
    )
    trial = _in_tiles(subject, draft, index, recipe, entries // lanes + matrices)
    trial = trial.because(f"entries of equal {index.tensor} share the tiles of {factor.tensor}")
    roles = roles_of(subject, trial)
    if not roles.dot:
        return None
    strategy, fill = meeting
    return finish(subject, trial, strategy, fill=fill, roles=roles)


def _meeting(subject: Subject, draft: Draft, over: Sequence[str]) -> tuple[str, bool] | None:
    """How contributions meet once entries are in tiles, and whether the output is filled before.
    None where only atomics would do, and must not.
    """
    match scatter_of(subject.problem.statement):
        case "direct" if set(over) <= {i.var for i in draft.target.indices}:
            return "store", False  # every entry is in one tile, and writes its own row
        case Scatter() as scatter if set(over) <= set(scatter.variables):
            known = subject.known(scatter.access.tensor)
            if known is not None and known.unique and subject.is_clean(scatter.access.tensor):
                return "store", True
    return None if subject.wishes.deterministic else ("atomic", True)


def shared_rows(subject: Subject, draft: Draft, scatter: Scatter) -> Planned | None:
    """Few rows of the output, to each of which very many entries add a matrix, as in the gradient
    of small matrices that entries choose: tiles of entries of one row each add their sum to it.
    """
    if subject.wishes.settings.scatter != "auto" or subject.wishes.deterministic:
        return None
    over = scatter.variables
    row = [v for v in variables(draft.target) if v not in over]
    area = math.prod(draft.extents[v] for v in row)
    entries, rows = math.prod(draft.extents[v] for v in over), subject.rows(scatter)
    tiles = -(-area // LARGE_TILE)
    if subject.reduce != "sum" or len(row) < 2 or 2 * rows * tiles > ENOUGH_PROGRAMS:
        return None
    if entries < ENOUGH_PROGRAMS * FEWEST_SUMMED or entries < LEAST_SHARED * FEWEST_SUMMED * rows:
        return None
    lanes = power_of_two(entries * tiles // (2 * ENOUGH_PROGRAMS))
    lanes = max(FEWEST_SUMMED, min(MOST_SUMMED, lanes))
    index = scatter.access
    recipe = SharedTiles(index.tensor, OfShape(scatter.dim), lanes, index.tensor in draft.padded)
    trial = _in_tiles(subject, draft, index, recipe, entries // lanes + rows)
    trial = trial.because(f"tiles of entries of equal {index.tensor} add their sums")
    roles = roles_of(subject, trial)
    return finish(subject, trial, "atomic", fill=True, roles=roles) if roles.dot else None


def _in_tiles(
    subject: Subject, draft: Draft, index: Access, recipe: SharedTiles, tiles: int
) -> Draft:
    """Entries read through the table of tiles, and the index as one value for each tile."""
    over = [str(i.var) for i in index.indices]
    tile, lane = (subject.name(name, draft) for name in ("tile", "lane"))
    value = subject.name(f"{index.tensor}_tile", draft)
    places = [subject.name(f"{v}_tiles", draft) for v in over]
    both = index_of(tile), index_of(lane)
    change = {v: Affine(((1, Access(name, both)),)) for v, name in zip(over, places, strict=True)}
    at_tile = Access(value, (index_of(tile),))
    arrays = {
        name: subject.array(recipe, f"place{k}", "int32", rank=2) for k, name in enumerate(places)
    }
    arrays[value] = subject.array(recipe, "value", "int32")
    padded = draft.padded | set(places) | ({value} if recipe.pads else set())
    factors = tuple(substitute(replace_atom(f, index, at_tile), change) for f in draft.factors)
    target = substitute(replace_atom(draft.target, index, at_tile), change)
    assert isinstance(target, Access)
    trial = replace(
        draft,
        target=target,
        factors=factors,
        arrays={**draft.arrays, **arrays},
        padded=padded,
        extents={**draft.extents, tile: tiles, lane: recipe.lanes},
        made={**draft.made, tile: (OfCount(recipe, "tiles"),), lane: (OfCount(recipe, "lanes"),)},
        multiples={**draft.multiples, lane: recipe.lanes},
        idle=Access(places[0], both),
    )
    reads = trial.reads() | {a.tensor for i in target.indices for a in accesses(i)}
    return trial if index.tensor in reads else replace(trial, padded=trial.padded - {index.tensor})
