"""The prologue of a call: what the recipes of its program make of index tensors, once.

`prologue.rows` and `prologue.tables` have one function for each recipe of `plan.recipes`. Sizes of
what is made follow from sizes that the host knows, so that nothing waits for the device; numbers
that only the device knows (how long the longest row is, whether a table has an inverse) are sent
for, and are there for a later call. What is made is kept with the index tensor that it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from insum import memory
from insum.compat.contexts import untracked
from insum.compat.streams import current_stream
from insum.facts import segment_pointers
from insum.plan.questions import Summary
from insum.plan.recipes import (
    INVERT_UP_TO,
    Composed,
    DimOfPlaces,
    Inverse,
    LeftPlaces,
    OfCount,
    OfExtent,
    OfLength,
    OfShape,
    Packed,
    PackedByStep,
    Pieces,
    Position,
    Recipe,
    Segments,
    SharedTiles,
    SizeExpr,
    Slots,
    Sorted,
    Tasks,
    size_of,
)
from insum.runtime.handwritten import packs
from insum.runtime.handwritten.kernel import on_device
from insum.runtime.prologue.made import Awaited, Made, Result
from insum.runtime.prologue.places import dim_of_places, left_places
from insum.runtime.prologue.rows import composed, in_order, pieces, position, segments, slots, tasks
from insum.runtime.prologue.tables import (
    by_step,
    inverse,
    is_backwards,
    is_whole,
    packed,
    packed_by_frequency,
    packed_made,
    packed_on_device,
    packed_words,
    read_backwards,
    shared_tiles,
)


class Prologue:
    """What one call derives from its index tensors.

    ``wait``: whether it may wait for the device, as it may for tensors that were declared to come
    back. ``recorded``: a graph is recorded and will be replayed on other values: what is kept with
    tensors that nobody has declared does not count, and what is made serves this call alone.
    ``entries``: what is remembered about index tensors, as far as the call has looked for it.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        extents: Mapping[str, int],
        shape: Sequence[int],
        wraps: frozenset[str] = frozenset(),
        *,
        wait: bool = True,
        recorded: bool = False,
        entries: Mapping[str, memory.Entry] = MappingProxyType({}),
    ) -> None:
        self.tensors, self.extents, self.shape, self.wraps = tensors, extents, shape, wraps
        self.entries = entries
        self.wait, self.recorded = wait, recorded
        self.own: dict[object, Result] = {}

    def made(self, recipe: Recipe) -> Made | None:
        """What a recipe makes; None while its numbers are on their way."""
        found = self.result(recipe)
        if not isinstance(found, Awaited):
            return found
        arrived = found.arrived(wait=self.may_wait(recipe))
        if arrived is not None:
            entry, key = self.place(recipe)
            if entry is None:
                self.own[key] = arrived
            else:
                entry.keep(key, arrived)
        return arrived

    def may_wait(self, recipe: Recipe) -> bool:
        """Also where other tensors of the call are not known: of these everything is."""
        if self.wait or self.recorded:
            return self.wait
        return all(self.entry(n).declared for n in recipe.outline.names)

    def soon(self, recipe: Recipe) -> Made | None:
        """The same, for whoever has decided without the numbers, or has them already."""
        found = self.result(recipe)
        if not isinstance(found, Awaited):
            return found
        return self.made(recipe) if found.early is None else found.early

    def sorted(self, base: Sorted) -> Made:
        """The order of an index tensor, which is there before its numbers are."""
        found = self.soon(base)
        assert found is not None
        return found

    def result(self, recipe: Recipe) -> Result | None:
        """What was made before, or is made now; None where that takes numbers on their way."""
        entry, key = self.place(recipe)
        found: Result | None = self.own.get(key) if entry is None else entry.get(key)
        if found is not None:
            return found
        with untracked():
            found = self.make(recipe)
        if found is None:
            return None
        if entry is None:
            self.own[key] = found
            return found
        return entry.keep(key, found)

    def place(self, recipe: Recipe) -> tuple[memory.Entry | None, tuple[object, ...]]:
        """Where and under what a thing is kept; without an entry, for this call alone."""
        outline, known, first, lasting = recipe.outline, self.entries, None, True
        key: list[object] = [outline.does]
        for size in outline.sizes:
            key.append(self.extents[size] if type(size) is str else self.size(size))  # type: ignore[arg-type]
        for name in outline.names:
            entry = known[name] if name in known else self.entry(name)
            first = first or entry
            lasting = lasting and (not self.recorded or entry.declared or entry.given)
            key.append((entry.serial, name in self.wraps))
        return first if lasting else None, tuple(key)

    def entry(self, name: str) -> memory.Entry:
        """What is remembered about an index tensor."""
        found = self.entries.get(name)
        return memory.entry_of(self.tensors[name]) if found is None else found

    def size(self, expr: SizeExpr | OfLength) -> int:
        """A size that a recipe names, as it is in this call."""
        if isinstance(expr, OfLength):
            return int(self.tensors[expr.tensor].shape[expr.dim])
        if len(expr) == 1:  # as most are
            match expr[0]:
                case OfExtent(var):
                    return self.extents[var]
                case OfShape(dim):
                    return self.shape[dim]
        return size_of(expr, self.extents, self.shape, self.counted)

    def counted(self, one: OfCount) -> int:
        made = self.made(one.recipe)
        assert made is not None
        return made.counts[one.name]

    def index(self, name: str) -> Tensor:
        """An index tensor as it is; where negative values count from the end, recipes see to it."""
        tensor: Tensor = self.tensors[name]
        return tensor

    def anchor(self, base: Sorted) -> Tensor:
        """What is sorted: an index tensor, or places that several lead to."""
        if isinstance(base.index, str):
            return self.index(base.index)
        found = self.soon(base.index)
        assert found is not None
        return found.arrays[""]

    def make(self, recipe: Recipe) -> Result | None:
        match recipe:
            case Segments(index, rows):
                count = self.tensors[index].numel()
                return segments(segment_pointers(self.tensors[index], self.shape[rows.dim]), count)
            case Slots(base, width, padded):
                made = self.made(base)
                tensors = [self.index(n) for n in padded]
                return None if made is None else slots(made, self.size(width), tensors)
            case LeftPlaces(indices, dims, over):
                sizes = [self.extents[v] for v in over]
                shape = [self.shape[d] for d in dims]
                values = {name: self.index(name) for name in recipe.names}
                return _one(
                    left_places(indices, shape, over, sizes, values, recipe.padded, self.wraps)
                )
            case DimOfPlaces(base, dim):
                shape = [self.shape[d] for d in base.dims]
                return _one(dim_of_places(shape, dim, self.index(base.names[0]).device))
            case Sorted(index, rows):
                wraps = index in self.wraps if isinstance(index, str) else False
                return in_order(self.anchor(recipe), self.size(rows), wraps)
            case Position(base, dim):
                order = self.sorted(base).arrays["order"]
                return _one(position(self.anchor(base), order, dim))
            case Composed(base, source, dims):
                anchor, order = self.anchor(base), self.sorted(base).arrays["order"]
                return _one(composed(self.index(source), anchor, order, dims))
            case Inverse():
                return self.inverse(recipe)
            case Packed():
                return self.packed(recipe)
            case PackedByStep(base):
                made = self.soon(base)
                return None if made is None else by_step(made)
            case Tasks(base, limit):
                made = self.made(base)
                return None if made is None else tasks(made, limit)
            case Pieces(base, limit):
                return pieces(self.sorted(base), limit)
            case SharedTiles(index, values, lanes, pads):
                of: SizeExpr | OfLength = values if isinstance(values, OfLength) else (values,)
                count, wraps = self.size(of), index in self.wraps
                return shared_tiles(self.index(index), count, lanes, wraps, pads)

    def map_of(self, index: str) -> packs.KernelMap | None:
        """What is known of an index tensor that was made as the map of a kernel."""
        entry = self.entries[index] if index in self.entries else self.entry(index)
        found: packs.KernelMap | None = entry.things.get(packs.MAP)
        return found

    def of_way_back(self, recipe: Recipe) -> Made | None:
        """What a recipe makes of the inverse of a map, where that is a map, too: it is there, and
        what is made of it is kept with it. The result serves one call: kept here it would hold the
        other map, and that one this.
        """
        match recipe:
            case Inverse() as of:
                there: Packed | PackedByStep | None = None
            case Packed(Inverse() as of) | PackedByStep(Packed(Inverse() as of)):
                there = recipe.of_table
            case _:
                return None
        if of.dim != 1:
            return None
        known = self.map_of(of.index)
        other = None if known is None or known.inverse is None else known.inverse()
        if other is None or other.shape[1] != self.shape[of.rows.dim]:
            return None
        entry = memory.known(other)
        if entry is None or packs.MAP not in entry.things:  # it was written to
            return None
        stream = current_stream(other.device) if other.is_cuda else 0
        if entry.things[packs.MAP].stream != stream:  # nobody has waited for it here
            return None
        if there is None:
            return Made({"inverse": other}, {})
        tensors, entries = {**self.tensors, of.index: other}, {**self.entries, of.index: entry}
        back = Prologue(tensors, self.extents, self.shape, self.wraps, wait=False, entries=entries)
        return back.soon(there)

    def inverse(self, recipe: Inverse) -> Result:
        index, rows = self.index(recipe.index), self.shape[recipe.rows.dim]
        of = self.map_of(recipe.index) if recipe.dim == 1 else None
        if of is None:
            if rows > INVERT_UP_TO * index.shape[recipe.dim]:  # the plan knew what is typical
                return Made({}, {}, Summary(exists=False))
            return inverse(index, recipe.dim, rows)
        if of.mirrored:
            return Made({}, {}, Summary(mirrored=True))
        return Made({"inverse": packs.inverted(index, rows)}, {})

    def packed(self, recipe: Packed) -> Result | None:
        if isinstance(recipe.table, str):
            table, of = self.tensors[recipe.table], self.map_of(recipe.table)
        else:
            made = self.made(recipe.table)
            if made is None:
                return None
            table, of = made.arrays["inverse"], self.map_of(recipe.table.index)
        walks, steps = [], 0
        for w in recipe.walks:
            extent = self.size(w.extent)
            walks.append((w.is_row, w.coefficient, w.offset, extent))
            steps = steps if w.is_row else extent
        if is_backwards(walks, table):
            made = self.made(recipe.forwards)
            return None if made is None else read_backwards(made)
        if steps <= packs.MOST_STEPS and (of is not None or on_device(table)):
            if of is None:
                return packed_on_device(table, walks)
            if of.comes_back:
                return packed_made(*packed_by_frequency(table, walks), None)
            known = isinstance(recipe.table, str) and is_whole(walks, table)
            words = of.words if known else packs.bits_of(table, of.names, walks)
            return packed_made(packed_words(words, of.names), steps, None)
        for dim, (_, coefficient, offset, extent) in enumerate(walks):
            places = torch.arange(extent, device=table.device)
            table = table.index_select(dim, places * coefficient + offset)
        return packed((table if recipe.walks[0].is_row else table.t()) >= 0)


def _one(array: Tensor) -> Made:
    return Made({"": array}, {})
