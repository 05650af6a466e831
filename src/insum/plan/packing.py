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

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from insum.lang.bind import Size
from insum.lang.expr import Access, Affine, Var, accesses, fresh, index_of, variables
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
#: Pieces that the tiles of all steps are cut into, where rows are summed: programs enough for a
#: large device.
PIECES = 396
#: What is read is at least this many times the float32 buffer in which pieces of a sum meet.
BUFFER_SHARE = 8


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Tiles of rows, and the steps that each has to take."""

    rows: Tensor  # (tiles, TILE): a row, or -1 beyond the last
    steps: Tensor  # what the tiles have, one tile after the other
    segments: Segments  # where each tile's steps start and end
    share: float  # of all steps

    def by_step(self) -> tuple[Tensor, Tensor, Segments]:
        """The same read the other way: tiles in the order of the steps that have them, and for each
        piece its step, start and end.
        """
        tile = torch.repeat_interleave(
            (self.segments.end - self.segments.start).long(), output_size=self.steps.numel()
        )
        ordered = torch.argsort(self.steps, stable=True)
        count = torch.bincount(self.steps)
        length = max(1, self.segments.entries // PIECES)
        pieces = (count + length - 1) // length
        step = torch.repeat_interleave(pieces)
        nth = torch.arange(step.numel(), device=step.device) - (pieces.cumsum(0) - pieces)[step]
        start = (count.cumsum(0) - count)[step] + nth * length
        end = torch.minimum(start + length, count.cumsum(0)[step])
        return (
            tile[ordered].int(),
            step.int(),
            Segments(start.int(), end.int(), length, self.segments.entries),
        )


def buffer_is_small(shape: Sequence[Size], tensors: Iterable[Tensor]) -> bool:
    """Whether a float32 buffer for a result of this shape is little beside the tensors that are
    read.
    """
    return BUFFER_SHARE * 4 * math.prod(int(s) for s in shape) <= sum(
        t.numel() * t.element_size() for t in tensors
    )


class Packing(Drafting):
    """Leaves out what is absent in a whole tile."""

    def packed(self, draft: Draft, owner: IndexFacts | None = None) -> bool:
        """Rewrite a product that reads a padded table, where an order of its rows pays; ``owner``
        keeps what is derived.

        Tells whether the pieces of a sum over rows now meet in the output.
        """
        if self.reduce != "sum" or draft.segment or not (roles := self.roles(draft)).dot:
            return False
        rows = [axis[0] for axis in (roles.m, roles.n) if len(axis) == 1]
        meeting = (
            not (self.wishes.deterministic or self.wishes.accumulate)
            and len(roles.k) == 1
            and buffer_is_small(self.problem.shape, self.tensors.values())
        )
        found = self.table(draft, rows, roles.loops, kept=True)
        summed = (
            None
            if found or not meeting
            else self.table(draft, list(roles.k), roles.grid, kept=False)
        )
        if found is None and summed is None:
            return False
        access, x, z = found or summed  # type: ignore[misc]
        facts = owner or facts_of(self.tensors[access.tensor])
        order = remembered(
            facts,
            ("order", *self.asked(draft, access, x)),
            lambda: _order(self.lines(draft, access, x, z)),
        )
        if order.share > WORTH:
            return False
        trial = replace(
            draft,
            extents=dict(draft.extents),
            padded=set(draft.padded),
            arrays=dict(draft.arrays),
            why=list(draft.why),
            baked=dict(draft.baked),
        )
        if found:
            self.to_tiles(trial, access, x, z, order)
        else:
            by_step = remembered(
                facts, ("order by step", *self.asked(draft, access, x)), order.by_step
            )
            self.to_pieces(trial, access, x, z, order, *by_step)
        if not self.roles(trial).dot:
            return False
        for name in (
            "target",
            "factors",
            "extents",
            "padded",
            "arrays",
            "segments",
            "row",
            "segment",
            "why",
            "baked",
        ):
            setattr(draft, name, getattr(trial, name))
        return found is None

    def asked(self, draft: Draft, access: Access, x: str) -> tuple[object, ...]:
        """What an order depends on besides the index tensor: whether it is read itself or its
        inverse, and how; not what variables are called.
        """
        return access.tensor in draft.arrays, *(
            (i.var == x, i.terms[0][0], i.offset, draft.extents[variables(i)[0]])
            for i in access.indices
        )

    def table(
        self, draft: Draft, rows: Sequence[str], steps: Sequence[str], *, kept: bool
    ) -> tuple[Access, str, str] | None:
        """A padded index over one of ``rows`` and one of ``steps``; the rows are ``kept`` in the
        target, or the steps are.
        """
        rows = [v for v in rows if draft.extents[v] >= LEAST_ROWS]
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
            for x_at in (0, 1):
                x, z = access.indices[x_at].var, _walked(access.indices[1 - x_at])
                direct = any(i.var == (x if kept else z) for i in draft.target.indices)
                if (
                    x is not None
                    and z is not None
                    and x in rows
                    and z in steps
                    and draft.extents[z] >= LEAST_STEPS
                    and direct
                ):
                    return access, x, z
        return None

    def lines(self, draft: Draft, access: Access, x: str, z: str) -> Tensor:
        """Whether each row has each step: (rows, steps)."""
        table = (
            draft.arrays[access.tensor]
            if access.tensor in draft.arrays
            else self.tensors[access.tensor]
        )
        for dim, index in enumerate(access.indices):
            ((coefficient, _),) = index.terms
            extent = draft.extents[x if index.var == x else z]
            table = table.index_select(
                dim, torch.arange(extent, device=table.device) * coefficient + index.offset
            )
        return (table if access.indices[0].var == x else table.t()) >= 0

    def to_tiles(self, draft: Draft, access: Access, x: str, z: str, order: Order) -> None:
        tile, lane, step = (fresh(name, self.taken) for name in ("tile", "lane", "step"))
        rows, steps = fresh(f"{x}_tiles", self.taken), fresh(f"{z}_steps", self.taken)
        change = {
            x: _through(rows, index_of(tile), index_of(lane)),
            z: _through(steps, index_of(step)),
        }
        draft.row, draft.segment, draft.segments = tile, step, order.segments
        draft.extents |= {tile: order.rows.shape[0], lane: TILE, step: order.steps.numel()}
        self.read_through(
            draft, access, change, {rows: order.rows, steps: order.steps}, rows, draft.extents[x]
        )
        draft.why.append(
            f"rows are ordered by what {access.tensor} has of them, which leaves "
            f"{order.share:.0%} of the steps"
        )

    def to_pieces(
        self,
        draft: Draft,
        access: Access,
        x: str,
        z: str,
        order: Order,
        tiles: Tensor,
        steps: Tensor,
        pieces: Segments,
    ) -> None:
        piece, lane, slot = (fresh(name, self.taken) for name in ("piece", "lane", "slot"))
        rows, of_slot, of_piece = (
            fresh(name, self.taken) for name in (f"{x}_tiles", f"{x}_tile", f"{z}_pieces")
        )
        change = {
            x: _through(rows, _through(of_slot, index_of(slot)), index_of(lane)),
            z: _through(of_piece, index_of(piece)),
        }
        draft.row, draft.segment, draft.segments = piece, slot, pieces
        draft.extents |= {piece: steps.numel(), lane: TILE, slot: tiles.numel()}
        self.read_through(
            draft,
            access,
            change,
            {rows: order.rows, of_slot: tiles, of_piece: steps},
            rows,
            draft.extents[x],
        )
        draft.why.append(
            f"tiles of rows that {access.tensor} has nothing for are left out, which leaves "
            f"{order.share:.0%} of them"
        )

    def read_through(
        self,
        draft: Draft,
        access: Access,
        change: Mapping[str, Affine],
        arrays: Mapping[str, Tensor],
        rows: str,
        count: int,
    ) -> None:
        """Replace the rows and steps of a product by reads of arrays that were derived from its
        table.
        """
        draft.factors = tuple(substitute(f, change) for f in draft.factors)
        target = substitute(draft.target, change)
        assert isinstance(target, Access)
        draft.target = target
        draft.arrays |= arrays
        if arrays[rows].numel() != count:
            draft.padded.add(rows)
        if access.tensor in self.tensors:
            draft.baked.setdefault(access.tensor)


def _through(array: str, *at: Affine) -> Affine:
    return Affine(((1, Access(array, at)),))


def _walked(index: Affine) -> str | None:
    """The one variable that an index walks, forwards or backwards."""
    if len(index.terms) != 1 or index.terms[0][0] not in (1, -1):
        return None
    atom = index.terms[0][1]
    return atom.name if isinstance(atom, Var) else None


def _order(present: Tensor) -> Order:
    """Sort rows by what they have, what is rare deciding first, and list each tile's steps; tiles
    with many steps come first.
    """
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
