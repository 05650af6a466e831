"""What is derived from index tensors before kernels run: orders, segments, tasks, tables.

One function for each recipe of `plan.recipes`. Sizes of what is made follow from sizes that the
host knows, so that nothing waits for the device; numbers that only the device knows (how long the
longest row is, whether a table has an inverse) are sent for, and are there for a later call. What
is made is kept with the index tensor that it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.compat.calls import untracked
from insum.facts import Coming, segment_pointers
from insum.plan.model import SHORT
from insum.plan.questions import Summary
from insum.plan.recipes import (
    Composed,
    Inverse,
    OfCount,
    OfLength,
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
from insum.plan.sizes import power_of_two
from insum.plan.strategies.packing import TILE
from insum.runtime import packs, sharing
from insum.runtime.handwritten import on_device

#: An order of rows is used where it leaves at most this share of all steps.
WORTH = 0.8
#: Pieces that the tiles of all steps are cut into, where rows are summed: programs enough for a
#: large device.
PIECES = 396
_WORD = 62  # bits of a sort key


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Arrays by the names that recipes give them, numbers, and what plans may know."""

    arrays: Mapping[str, Tensor]
    counts: Mapping[str, int]
    summary: Summary = Summary()


@dataclass(slots=True, eq=False)
class Awaited:
    """The same while numbers are still on the device. They are sent for when they are first asked
    for: ``early``, where there is one, is enough for whoever needs none of them.
    """

    arrays: Mapping[str, Tensor]
    numbers: Tensor
    finish: Callable[[Sequence[int]], Made]
    early: Made | None = None
    coming: Coming | None = None

    def arrived(self, *, wait: bool) -> Made | None:
        coming = self.coming = self.coming or Coming(self.numbers)
        return self.finish(coming.numbers()) if wait or coming.is_there() else None


Result: TypeAlias = Made | Awaited


def awaited(
    arrays: Mapping[str, Tensor],
    numbers: Sequence[Tensor],
    finish: Callable[[Sequence[int]], Made],
    early: Made | None = None,
) -> Result:
    """What is made of arrays and numbers on the device: at once on the CPU, else when the numbers
    have arrived.
    """
    together = torch.stack([n.reshape(()).long() for n in numbers])
    if together.is_cuda:
        return Awaited(arrays, together, finish, early)
    return finish(together.tolist())


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
            self.keep(*self.place(recipe), arrived)
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
        if found is not None:
            self.keep(entry, key, found)
        return found

    def keep(self, entry: memory.Entry | None, key: tuple[object, ...], found: Result) -> None:
        if entry is None:
            self.own[key] = found
        else:
            entry.keep(key, found)

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
        return size_of(expr, self.extents, self.shape, self.counted)

    def counted(self, one: OfCount) -> int:
        made = self.made(one.recipe)
        assert made is not None
        return made.counts[one.name]

    def index(self, name: str) -> Tensor:
        """An index tensor as it is; where negative values count from the end, recipes see to it."""
        tensor: Tensor = self.tensors[name]
        return tensor

    def make(self, recipe: Recipe) -> Result | None:
        match recipe:
            case Segments(index, rows):
                count = self.tensors[index].numel()
                return segments(segment_pointers(self.tensors[index], self.shape[rows.dim]), count)
            case Slots(base, width, padded):
                made = self.made(base)
                tensors = [self.index(n) for n in padded]
                return None if made is None else slots(made, self.size(width), tensors)
            case Sorted(index, rows):
                return in_order(self.index(index), self.shape[rows.dim], index in self.wraps)
            case Position(base, dim):
                order = self.sorted(base).arrays["order"]
                return _one(position(self.index(base.index), order, dim))
            case Composed(base, source, dims):
                anchor, order = self.index(base.index), self.sorted(base).arrays["order"]
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
        found: packs.KernelMap | None = self.entry(index).things.get(packs.MAP)
        return found

    def inverse(self, recipe: Inverse) -> Result:
        index, rows = self.index(recipe.index), self.shape[recipe.rows.dim]
        of = self.map_of(recipe.index) if recipe.dim == 1 else None
        if of is None:
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
        if _is_backwards(walks, table):
            made = self.made(recipe.forwards)
            return None if made is None else read_backwards(made)
        if on_device(table) and steps <= packs.MOST_STEPS:
            if of is None:
                return packed_on_device(table, walks)
            known = isinstance(recipe.table, str) and _is_whole(walks, table)
            words = of.words if known else packs.bits_of(table, of.names, walks)
            arrays = _packed(words, of.names)
            if of.comes_back:
                arrays = packs.heaviest_first(arrays)
            return packed_made(arrays, steps, None)
        for dim, (_, coefficient, offset, extent) in enumerate(walks):
            places = torch.arange(extent, device=table.device)
            table = table.index_select(dim, places * coefficient + offset)
        return packed((table if recipe.walks[0].is_row else table.t()) >= 0)


def _one(array: Tensor) -> Made:
    return Made({"": array}, {})


# --- segments -------------------------------------------------------------------------------------


def segments(pointers: Tensor, entries: int) -> Result:
    """Runs of equal values in a sorted index tensor: entries ``start[r] .. end[r]`` belong to row
    ``r``. Values beyond the rows belong to none.
    """
    return _rows(pointers[:-1].contiguous(), pointers[1:].contiguous(), entries)


def _rows(start: Tensor, end: Tensor, entries: int, **more: Tensor) -> Result:
    arrays = {"start": start, "end": end, **more}

    def finish(numbers: Sequence[int]) -> Made:
        longest = power_of_two(numbers[0]) if numbers[0] else 0
        return Made(arrays, {"entries": entries}, Summary(longest=longest))

    longest = (end - start).max() if start.numel() else start.new_zeros(())
    return awaited(arrays, [longest], finish, Made(arrays, {"entries": entries}))


def slots(base: Made, width: int, padded: Sequence[Tensor]) -> Result:
    """Segments over slots when every entry holds ``width`` of them, without the padding at the end
    of rows.
    """
    entries = base.counts["entries"] * width
    wide = torch.int64 if entries >= 2**31 else base.arrays["start"].dtype
    start, end = (base.arrays[name].to(wide) * width for name in ("start", "end"))
    whole = {"start": start, "end": end}
    longest = base.summary.longest * power_of_two(width)
    if not padded or not start.numel():
        return Made(whole, {"entries": entries}, Summary(longest=longest))
    valid = padded[0] >= 0
    for other in padded[1:]:
        valid = valid & (other >= 0)
    counted = torch.zeros(valid.numel() + 1, dtype=torch.int64, device=valid.device)
    torch.cumsum(valid.reshape(-1), 0, out=counted[1:])
    filled = (counted[end.long()] - counted[start.long()]).to(start.dtype)
    # Padding is trailing in a row exactly when the first `filled` slots hold all of them.
    leading = counted[(start + filled).long()] - counted[start.long()]
    arrays = {"start": start, "end": start + filled}

    def finish(numbers: Sequence[int]) -> Made:
        trailing, most = numbers
        if not trailing:
            return Made(whole, {"entries": entries}, Summary(longest=longest))
        known = Summary(longest=power_of_two(most) if most else 0, trimmed=True)
        return Made(arrays, {"entries": entries}, known)

    return awaited({**arrays, "whole": end}, [(leading == filled).all(), filled.max()], finish)


def in_order(anchor: Tensor, rows: int, wraps: bool) -> Result:
    """The stable order of an index tensor, and the segments of what it sorts."""
    flat = anchor.reshape(-1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.int32))
    if wraps:
        flat = torch.where(flat < 0, flat + rows, flat)
    values, order = torch.sort(flat, stable=True)
    small = torch.int32 if flat.numel() < 2**31 else torch.int64
    bounds = torch.arange(rows + 1, device=flat.device, dtype=values.dtype)
    found = segments(
        torch.searchsorted(values, bounds, out_int32=small is torch.int32), flat.numel()
    )
    order = order.to(small)
    if isinstance(found, Made):
        return Made({**found.arrays, "order": order}, found.counts, found.summary)
    arrays = {**found.arrays, "order": order}

    def finish(numbers: Sequence[int]) -> Made:
        made = found.finish(numbers)
        return Made(arrays, made.counts, made.summary)

    early = Made(arrays, {"entries": flat.numel()})
    return Awaited(arrays, found.numbers, finish, early)


def position(anchor: Tensor, order: Tensor, dim: int) -> Tensor:
    after = math.prod(anchor.shape[dim + 1 :])
    return (order.long() // after % anchor.shape[dim]).to(order.dtype)


def composed(source: Tensor, anchor: Tensor, order: Tensor, dims: tuple[int, ...]) -> Tensor:
    at = tuple(position(anchor, order, d).long() for d in dims)
    return source[at].to(order.dtype)


# --- tasks ----------------------------------------------------------------------------------------


def tasks(base: Made, limit: int) -> Result:
    """Cut rows into pieces of at most ``limit`` entries, long pieces first and otherwise in the
    order of the rows; ``row`` is the output row, or ``-1 - slot`` of the workspace.

    The order inside a class is kept: rows that are near in the output gather near inputs, and a
    full sort would lose that.
    """
    start, end, entries = base.arrays["start"], base.arrays["end"], base.counts["entries"]
    if 0 < base.summary.longest <= min(limit, SHORT):
        return _one_task_each(start, end)
    # Numbers are as narrow as they can be, and let go of early: of very many rows each of these
    # arrays is a noticeable part of all memory.
    small = torch.int32 if entries < 2**31 and start.numel() < 2**31 else torch.int64
    most = start.numel() + entries // limit  # of pieces; the rest stays empty
    cut = (end - start).add_(limit - 1).div_(limit, rounding_mode="floor").clamp_(min=1).to(small)
    last = cut.cumsum(0, dtype=small)
    first = torch.arange(most, device=cut.device, dtype=small)
    row = torch.searchsorted(last, first, right=True, out_int32=small is torch.int32)
    row.clamp_(max=max(0, start.numel() - 1))
    there = first < last[-1:]
    first.sub_((last - cut)[row]).mul_(limit).add_(start[row])
    stop = torch.minimum(first + limit, end[row])
    split = (cut[row] > 1) & there
    total, slot_count, cut_count = last[-1], split.sum(), (cut > 1).sum()
    del last
    row = torch.where(split, -split.cumsum(0, dtype=small), row)
    length = torch.where(there, stop - first, -1)
    long = (length > SHORT).sum()
    klass = torch.where(length <= SHORT, 0, length.clamp_(min=1).log2().ceil_()).to(torch.int8)
    del length, split
    order = torch.argsort(torch.where(there, -klass, 1), stable=True)
    del klass, there
    arrays = {"start": first[order].to(small), "end": stop[order].to(small), "row": row[order]}
    del first, stop, row, order
    rows = torch.argsort((cut <= 1).to(torch.int8), stable=True)  # those that were cut come first
    cut = torch.where(cut > 1, cut, 0)[rows]
    slot_end = cut.cumsum(0, dtype=small)
    arrays |= {"cut_row": rows.to(small), "cut_start": slot_end - cut, "cut_end": slot_end}

    def finish(numbers: Sequence[int]) -> Made:
        total, long, slot_count, cut_count = numbers
        counts = {"tasks": total, "long": long, "slots": slot_count, "cut": cut_count}
        lengths = {n: cut_count if n.startswith("cut") else total for n in arrays}
        return Made({n: _first(array, lengths[n]) for n, array in arrays.items()}, counts)

    return awaited(arrays, [total, long, slot_count, cut_count], finish)


def _first(array: Tensor, count: int) -> Tensor:
    """The beginning of an array, without the rest in memory."""
    return array if array.numel() == count else array[:count].clone()


def _one_task_each(start: Tensor, end: Tensor) -> Made:
    """No row is cut, and none is long: they stay as they are, which takes no memory to speak of."""
    row = torch.arange(start.numel(), device=start.device, dtype=start.dtype)
    none = start[:0]
    arrays = {"start": start, "end": end, "row": row}
    arrays |= {"cut_row": none, "cut_start": none, "cut_end": none}
    return Made(arrays, {"tasks": start.numel(), "long": 0, "slots": 0, "cut": 0})


def pieces(base: Made, limit: int) -> Result:
    """Runs of equal rows inside pieces of ``limit`` sorted entries: tasks whose number stays on the
    device. A row that a boundary cuts has several, which meet in the workspace.
    """
    start, end, entries = base.arrays["start"], base.arrays["end"], base.counts["entries"]
    rows, device = start.numel(), start.device
    small = torch.int32 if entries < 2**31 and rows < 2**31 else torch.int64
    boundaries = -(-entries // limit)
    most = min(entries, rows + boundaries)
    at = torch.arange(entries, device=device)
    row = torch.searchsorted(end, at.to(end.dtype), right=True)  # below the first row: 0
    inside = (at >= start[:1]) & (row < rows)
    begins = inside & ((at % limit == 0) | (at == start[row.clamp(max=rows - 1)]))
    number = begins.long().cumsum(0) - 1
    place = torch.where(begins, number, most)
    first = torch.zeros(most + 1, dtype=torch.int64, device=device).scatter_(0, place, at)[:most]
    total = begins.sum()
    task = torch.arange(most, device=device)
    there = task < total
    of = torch.where(there, row[first.clamp(max=max(0, entries - 1))], 0)
    stop = torch.minimum((first // limit + 1) * limit, end.long()[of])
    whole = (first == start.long()[of]) & (stop == end.long()[of])
    split = there & ~whole
    slot = split.long().cumsum(0)
    target = torch.where(split, -slot, of)
    opens = split & (first == start.long()[of])  # the first piece of a row that was cut
    nth = torch.where(opens, opens.long().cumsum(0) - 1, boundaries)
    blank = torch.zeros(boundaries + 1, dtype=torch.int64, device=device)
    cut_row = blank.scatter(0, nth, of)[:boundaries]
    cut_start = blank.scatter(0, nth, slot - 1)[:boundaries]
    count = (end.long()[cut_row] - 1) // limit - start.long()[cut_row] // limit + 1
    arrays = {
        "start": torch.where(there, first, 0).to(small),
        "end": torch.where(there, stop, 0).to(small),
        "row": target.to(small),
        "cut_row": cut_row.to(small),
        "cut_start": cut_start.to(small),
        "cut_end": (cut_start + count).to(small),
        "count": total.reshape(1).to(small),
        "cut_count": opens.sum().reshape(1).to(small),
    }
    counts = {"tasks": most, "slots": 2 * boundaries, "cut": boundaries}
    return Made(arrays, counts)


# --- entries that share ---


def shared_tiles(index: Tensor, values: int, lanes: int, wraps: bool, pads: bool) -> Made:
    """Entries in tiles of equal values, and where they stand along each dimension."""
    place, value = sharing.in_tiles(index, values, lanes, wraps=wraps, pads=pads)
    arrays = {"value": value}
    for dim, size in enumerate(index.shape):
        after = math.prod(index.shape[dim + 1 :])
        along = place if index.dim() == 1 else torch.where(place < 0, -1, place // after % size)
        arrays[f"place{dim}"] = along.int()
    return Made(arrays, {"tiles": place.shape[0], "lanes": lanes})


# --- tables ---------------------------------------------------------------------------------------


def inverse(anchor: Tensor, dim: int, rows: int) -> Result:
    """``inverse[.., y, ..] = x`` where ``anchor[.., x, ..] = y``, -1 where there is none. Whether
    no two x share a y, and whether the table equals the anchor with its other dimensions reversed.
    """
    lines = anchor.movedim(dim, -1).reshape(-1, anchor.shape[dim])
    present = (lines >= 0) & (lines < rows)
    line = torch.arange(lines.shape[0], device=anchor.device)[:, None]
    flat = torch.where(present, line * rows + lines.long(), lines.shape[0] * rows)
    taken = torch.zeros(lines.shape[0] * rows + 1, dtype=torch.int32, device=anchor.device)
    taken.index_add_(0, flat.reshape(-1), present.reshape(-1).to(torch.int32))
    found = torch.full((lines.shape[0] * rows + 1,), -1, dtype=torch.int32, device=anchor.device)
    places = torch.arange(anchor.shape[dim], device=anchor.device, dtype=torch.int32)
    found[flat.reshape(-1)] = places.expand_as(lines).reshape(-1)
    found[-1:].fill_(-1)  # an assignment of a number would wait
    shape = [s for d, s in enumerate(anchor.shape) if d != dim]
    table = found[:-1].reshape(*shape, rows).movedim(-1, dim)
    single = (taken <= 1).all()
    if rows == anchor.shape[dim]:
        backwards = anchor.flip([d for d in range(anchor.dim()) if d != dim])
        mirrored = (table == backwards.clamp(min=-1)).all()
    else:
        mirrored = torch.zeros((), dtype=torch.bool, device=anchor.device)
    arrays = {"inverse": table.contiguous()}

    def finish(numbers: Sequence[int]) -> Made:
        exists, same = (bool(n) for n in numbers)
        kept = arrays if exists and not same else {}
        return Made(kept, {}, Summary(exists=exists, mirrored=exists and same))

    return awaited(arrays, [single, mirrored], finish)


def packed(present: Tensor) -> Result:
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
    length = held.sum(1)
    end = length.cumsum(0)
    flat = held.reshape(-1)
    slot = torch.where(flat, flat.long().cumsum(0) - 1, tiles * width)
    steps = torch.zeros(tiles * width + 1, dtype=torch.int32, device=device)
    steps.scatter_(0, slot, torch.arange(width, device=device, dtype=torch.int32).repeat(tiles))
    arrays = {
        "rows": rows.view(tiles, TILE)[heavy].int(),
        "steps": steps,
        "start": (end - length).int(),
        "end": end.int(),
    }

    def finish(numbers: Sequence[int]) -> Made:
        (total,) = numbers
        counts = {"tiles": tiles, "lanes": TILE, "width": width, "total": total, "entries": total}
        counts["turned"] = 0
        kept = {**arrays, "steps": steps[:total].clone(), "back": width - 1 - steps[:total]}
        worth = total <= WORTH * tiles * width
        return Made(kept, counts, Summary(worth=worth))

    return awaited(arrays, [end[-1]], finish)


def _is_whole(walks: Sequence[tuple[bool, int, int, int]], table: Tensor) -> bool:
    """Whether a table with the steps first is read forwards, from its beginning to its end."""
    (rows_first, *steps), (_, *rows) = walks
    return not rows_first and steps == [1, 0, table.shape[0]] and rows == [1, 0, table.shape[1]]


def _is_backwards(walks: Sequence[tuple[bool, int, int, int]], table: Tensor) -> bool:
    """Whether all steps of a table are read from the last to the first."""
    at = 1 if walks[0][0] else 0
    steps = table.shape[at]
    return walks[at][1:] == (-1, steps - 1, steps)


def read_backwards(base: Made) -> Made:
    """The same tiles, steps counted from the other end: rows that have the same steps do so
    whichever way they are read.
    """
    turned = {"steps": base.arrays["back"], "back": base.arrays["steps"]}
    counts = {**base.counts, "turned": 1 - base.counts["turned"]}
    return Made({**base.arrays, **turned}, counts, base.summary)


def packed_on_device(table: Tensor, walks: Sequence[tuple[bool, int, int, int]]) -> Result:
    """The same by kernels of our own, without waiting; how much it leaves out arrives later."""
    rows_at = next(d for d, walk in enumerate(walks) if walk[0])
    _, coefficient, offset, steps = walks[1 - rows_at]
    names = packs.names_by_frequency(table, rows_at)
    if coefficient < 0 or offset or steps != table.shape[1 - rows_at]:
        names = _names_walked(names, coefficient, offset, steps)
    arrays = packs.heaviest_first(_packed(packs.bits_of(table, names, walks), names))
    total = (arrays["end"] - arrays["start"]).sum()
    return packed_made(arrays, steps, total)


def _packed(words: Tensor, names: Tensor) -> dict[str, Tensor]:
    return {**packs.tiled(words, packs.order_of(words, len(names)), names), "names": names}


def _names_walked(names: Tensor, coefficient: int, offset: int, steps: int) -> Tensor:
    """Places along a table as values of the variable that walks it; the rest is left out."""
    walked = (names - offset) * coefficient
    order = torch.argsort(((walked < 0) | (walked >= steps)).to(torch.int8), stable=True)
    return walked[order][:steps].contiguous()


def packed_made(arrays: Mapping[str, Tensor], steps: int, total: Tensor | None) -> Result:
    """Tiles and their steps, in lists with room for every step. Without a ``total`` of steps it is
    taken for worth while.
    """
    tiles = arrays["start"].shape[0]
    counts = {"tiles": tiles, "lanes": TILE, "width": steps, "entries": tiles * steps, "turned": 0}
    if total is None:
        return Made(arrays, counts)

    def finish(numbers: Sequence[int]) -> Made:
        return Made(arrays, counts, Summary(worth=numbers[0] <= WORTH * tiles * steps))

    return awaited(arrays, [total], finish, Made(arrays, counts))


def by_step(base: Made) -> Result:
    """Tiles in the order of the steps that have them; for each piece its step, start and end."""
    if "held" in base.arrays:
        turned = bool(base.counts["turned"])
        found = packs.by_step(base.arrays["held"], base.arrays["names"], turned=turned)
        pieces = found["step"].shape[0]
        return Made(found, {"pieces": pieces, "entries": base.counts["entries"]})
    steps, entries, width = base.arrays["steps"], base.counts["entries"], base.counts["width"]
    lengths = (base.arrays["end"] - base.arrays["start"]).long()
    tile = torch.repeat_interleave(lengths, output_size=entries)
    ordered = torch.argsort(steps[:entries], stable=True)
    count = torch.zeros(width, dtype=torch.int64, device=steps.device)
    count.index_add_(0, steps[:entries].long(), torch.ones_like(steps[:entries], dtype=torch.int64))
    length = max(1, entries // PIECES)
    number = (count + length - 1) // length
    most = min(entries, 2 * PIECES) + width
    last = number.cumsum(0)
    piece = torch.arange(most, device=steps.device)
    there = piece < last[-1:]
    step = torch.searchsorted(last, piece, right=True).clamp_(max=width - 1)
    nth = piece - (last - number)[step]
    start = (count.cumsum(0) - count)[step] + nth * length
    end = torch.minimum(start + length, count.cumsum(0)[step])
    arrays = {
        "tile": tile[ordered].int(),
        "step": step.int(),
        "start": torch.where(there, start, 0).int(),
        "end": torch.where(there, end, 0).int(),
    }
    return Made(arrays, {"pieces": most, "entries": entries})
