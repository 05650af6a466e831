"""Rows of a padded table in an order that fills tiles.

In ``Out[x,m] += In[Nb[x,z],c] * W[z,c,m]`` a tile of rows multiplies with ``W[z]`` for every ``z`` that any of its rows has. Rows that
have the same ``z`` belong into the same tile. So the rows are sorted by what they have, once per table; each tile walks the list of what
its rows have between them, and writes every row to its own place. What is left out is only what is absent in the whole tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from insum.lang.expr import Access, Affine, Var, accesses, fresh, index_of
from insum.plan.draft import Draft, Drafting, remembered
from insum.plan.facts import IndexFacts, facts_of
from insum.plan.rewrite import substitute
from insum.plan.schedule import Segments

#: Rows of one tile, and how many rows a table has at least that is worth an order.
TILE = 128
LEAST_ROWS, LEAST_STEPS = 1024, 4
#: The order is used where it leaves at most this share of all steps.
WORTH = 0.8
_WORD = 62  # bits of a sort key


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Tiles of rows, and the steps that each has to take."""

    rows: Tensor  # (tiles, TILE): a row, or -1 beyond the last
    steps: Tensor  # what the tiles have, one tile after the other
    segments: Segments  # where each tile's steps start and end
    share: float  # of all steps


class Packing(Drafting):
    """Leaves out what is absent in a whole tile."""

    def packed(self, draft: Draft, owner: IndexFacts | None = None) -> None:
        """Rewrite a product that reads a padded table row by row, where an order of the rows pays; ``owner`` keeps what is derived."""
        found = self.table(draft)
        if found is None:
            return
        access, x, z = found
        facts = owner or facts_of(self.tensors[access.tensor])
        count, steps = draft.extents[x], draft.extents[z]
        key = ("order", str(access.indices), x, z, count, steps)
        order = remembered(facts, key, lambda: _order(self.lines(draft, access, x, z)))
        if order.share > WORTH:
            return
        trial = replace(draft, extents=dict(draft.extents), padded=set(draft.padded), arrays=dict(draft.arrays), why=list(draft.why))
        self.to_tiles(trial, access, x, z, order)
        if self.roles(trial).dot:
            for name in ("target", "factors", "extents", "padded", "arrays", "segments", "row", "segment", "why", "baked"):
                setattr(draft, name, getattr(trial, name))

    def table(self, draft: Draft) -> tuple[Access, str, str] | None:
        """A padded index over a row of the tile and a variable that is summed one value at a time."""
        if self.reduce != "sum" or draft.segment:
            return None
        roles = self.roles(draft)
        if not roles.dot:
            return None
        rows = [axis[0] for axis in (roles.m, roles.n) if len(axis) == 1 and draft.extents[axis[0]] >= LEAST_ROWS]
        reads = [a for f in draft.factors for access in accesses(f) for i in access.indices for _, a in i.terms if isinstance(a, Access)]
        for access in reads:
            if access.tensor not in draft.padded or len(access.indices) != 2:
                continue
            for x_at in (0, 1):
                x, z = access.indices[x_at].var, _walked(access.indices[1 - x_at])
                direct = any(i.var == x for i in draft.target.indices)
                if x in rows and z in roles.loops and draft.extents[z] >= LEAST_STEPS and direct and x is not None:
                    return access, x, z
        return None

    def lines(self, draft: Draft, access: Access, x: str, z: str) -> Tensor:
        """Whether each row has each step: (rows, steps)."""
        table = draft.arrays[access.tensor] if access.tensor in draft.arrays else self.tensors[access.tensor]
        for dim, index in enumerate(access.indices):
            ((coefficient, _),) = index.terms
            extent = draft.extents[x if index.var == x else z]
            table = table.index_select(dim, torch.arange(extent, device=table.device) * coefficient + index.offset)
        return (table if access.indices[0].var == x else table.t()) >= 0

    def to_tiles(self, draft: Draft, access: Access, x: str, z: str, order: Order) -> None:
        tile, lane, step = (fresh(name, self.taken) for name in ("tile", "lane", "step"))
        rows, steps = fresh(f"{x}_tiles", self.taken), fresh(f"{z}_steps", self.taken)
        change = {
            x: Affine(((1, Access(rows, (index_of(tile), index_of(lane)))),)),
            z: Affine(((1, Access(steps, (index_of(step),))),)),
        }
        draft.factors = tuple(substitute(f, change) for f in draft.factors)
        target = substitute(draft.target, change)
        assert isinstance(target, Access)
        draft.target = target
        draft.arrays |= {rows: order.rows, steps: order.steps}
        draft.extents |= {tile: order.rows.shape[0], lane: TILE, step: order.steps.numel()}
        draft.row, draft.segment, draft.segments = tile, step, order.segments
        if order.rows.numel() != draft.extents[x]:
            draft.padded.add(rows)
        if access.tensor in self.tensors:
            draft.baked.setdefault(access.tensor)
        draft.why.append(f"rows are ordered by what {access.tensor} has of them, which leaves {order.share:.0%} of the steps")


def _walked(index: Affine) -> str | None:
    """The one variable that an index walks, forwards or backwards."""
    if len(index.terms) != 1 or index.terms[0][0] not in (1, -1):
        return None
    atom = index.terms[0][1]
    return atom.name if isinstance(atom, Var) else None


def _order(present: Tensor) -> Order:
    """Sort rows by what they have, what is rare deciding first, and list each tile's steps; tiles with many steps come first."""
    count, width = present.shape
    device = present.device
    by_frequency = torch.argsort(present.sum(0), descending=True, stable=True)
    order = torch.arange(count, device=device)
    for first in range(0, width, _WORD):  # the least significant word first; sorting is stable
        word = present[:, by_frequency[first : first + _WORD]].long()
        key = (word << torch.arange(word.shape[1], device=device)).sum(1)
        order = order[torch.argsort(key[order], stable=True)]
    tiles = -(-count // TILE)
    rows = torch.full((tiles * TILE,), -1, dtype=torch.int64, device=device)
    rows[:count] = order
    absent = torch.zeros(1, width, dtype=torch.bool, device=device)
    held = torch.cat([present, absent])[rows].view(tiles, TILE, width).any(1)
    heavy = torch.argsort(held.sum(1), descending=True, stable=True)
    held = held[heavy]
    steps, length = held.nonzero()[:, 1], held.sum(1)
    end = length.cumsum(0)
    total = int(end[-1])
    bounds = Segments((end - length).int(), end.int(), int(length.max()), total)
    return Order(rows.view(tiles, TILE)[heavy].int(), steps.int(), bounds, total / (tiles * width))
