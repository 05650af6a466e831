"""Tables: their inverses, rows packed by the steps that they have, and entries in tiles of equal
values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from insum.plan.questions import Summary
from insum.plan.strategies.packing import TILE
from insum.runtime.handwritten import equal_tiles, packs
from insum.runtime.prologue.made import Made, Result, awaited

#: An order of rows is used where it leaves at most this share of all steps.
WORTH = 0.8
_WORD = 62  # bits of a sort key


def shared_tiles(index: Tensor, values: int, lanes: int, wraps: bool, pads: bool) -> Made:
    """Entries in tiles of equal values, and where they stand along each dimension."""
    place, value = equal_tiles.in_tiles(index, values, lanes, wraps=wraps, pads=pads)
    arrays = {"value": value}
    for dim, size in enumerate(index.shape):
        after = math.prod(index.shape[dim + 1 :])
        along = place if index.dim() == 1 else torch.where(place < 0, -1, place // after % size)
        arrays[f"place{dim}"] = along.int()
    return Made(arrays, {"tiles": place.shape[0], "lanes": lanes})


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


def is_whole(walks: Sequence[tuple[bool, int, int, int]], table: Tensor) -> bool:
    """Whether a table with the steps first is read forwards, from its beginning to its end."""
    (rows_first, *steps), (_, *rows) = walks
    return not rows_first and steps == [1, 0, table.shape[0]] and rows == [1, 0, table.shape[1]]


def is_backwards(walks: Sequence[tuple[bool, int, int, int]], table: Tensor) -> bool:
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
    arrays, steps = packed_by_frequency(table, walks)
    total = (arrays["end"] - arrays["start"]).sum()
    return packed_made(arrays, steps, total)


def packed_by_frequency(
    table: Tensor, walks: Sequence[tuple[bool, int, int, int]]
) -> tuple[dict[str, Tensor], int]:
    """Tiles of a table that comes back, so that work on their order pays: all rows are sorted, and
    tiles with many steps come first, because what ends last is short then.
    """
    rows_at = next(d for d, walk in enumerate(walks) if walk[0])
    _, coefficient, offset, steps = walks[1 - rows_at]
    names = packs.names_by_frequency(table, rows_at)
    if coefficient < 0 or offset or steps != table.shape[1 - rows_at]:
        names = _names_walked(names, coefficient, offset, steps)
    words = packs.bits_of(table, names, walks)
    return packs.heaviest_first(packed_words(words, names, thorough=True)), steps


def packed_words(words: Tensor, names: Tensor, *, thorough: bool = False) -> dict[str, Tensor]:
    """Tiles of rows that are ordered by their words of bits, one bit for each of these steps, with
    as little work as that takes, unless they are to be ordered ``thorough``ly.
    """
    return packs.tiled(words, packs.order_of(words, names.shape[0], thorough=thorough), names)


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
    length = max(1, entries // packs.PIECES)
    number = (count + length - 1) // length
    most = min(entries, 2 * packs.PIECES) + width
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
