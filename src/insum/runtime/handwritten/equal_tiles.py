"""Entries of an index tensor in tiles of equal values, on the device and without waiting.

A tile has room for so many entries of one value; what a value leaves of its last tile is padding.
Entries of a tile stand in no order: whoever reads them treats each by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from insum.compat.tensors import empty
from insum.runtime.handwritten.kernel import BLOCK, Handwritten, blocks, on_device

#: After the first value that is out of range, which stands for all such: that of absent entries.
_ABSENT = 1

_RANK = Handwritten(
    "insum_rank_entries",
    f"""@triton.jit
def insum_rank_entries(
    index_ptr, count_ptr, rank_ptr, entries: "i64", values: "i64", wraps: "i64", pads: "i64"
):
    at = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})
    there = at < entries
    value = tl.load(index_ptr + at, mask=there, other=0).to(tl.int64)
    absent = (value == -1) & (pads > 0)
    value = tl.where((value < 0) & (wraps > 0), value + values, value)
    value = tl.where((value < 0) | (value >= values), values, value)
    value = tl.where(absent, values + {_ABSENT}, value)
    one = (at * 0 + 1).to(tl.int32)
    rank = tl.atomic_add(count_ptr + value, one, mask=there, sem="relaxed")
    tl.store(rank_ptr + at, rank, mask=there)
    tl.store(rank_ptr + entries + at, value.to(tl.int32), mask=there)
""",
)
_START = Handwritten(
    "insum_start_tiles",
    """@triton.jit
def insum_start_tiles(count_ptr, tile_ptr, values: "i64", lanes: "i64"):
    tile = (lanes * 0).to(tl.int32)
    for first in range(0, values, 1024):
        value = first + tl.arange(0, 1024)
        there = value < values
        count = tl.load(count_ptr + value, mask=there, other=0)
        tiles = ((count + lanes - 1) // lanes).to(tl.int32)
        tl.store(tile_ptr + value, tile + tl.cumsum(tiles, 0) - tiles, mask=there)
        tile += tl.sum(tiles, 0)
""",
)
_FILL = Handwritten(
    "insum_fill_tiles",
    f"""@triton.jit
def insum_fill_tiles(
    rank_ptr, tile_ptr, place_ptr, value_ptr, entries: "i64", values: "i64", lanes: "i64"
):
    at = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})
    there = at < entries
    rank = tl.load(rank_ptr + at, mask=there, other=0)
    value = tl.load(rank_ptr + entries + at, mask=there, other=0)
    slot = tl.load(tile_ptr + value, mask=there, other=0).to(tl.int64) * lanes + rank
    tl.store(place_ptr + slot, at.to(tl.int32), mask=there)
    shown = tl.where(value > values, -1, value)
    tl.store(value_ptr + slot // lanes, shown, mask=there & (rank % lanes == 0))
""",
)


def most_tiles(entries: int, values: int, lanes: int) -> int:
    """So many tiles there are at most: full ones, and one that is not for every value, and for
    what is out of range or absent.
    """
    return entries // lanes + min(entries, values + 2)


def in_tiles(
    index: Tensor, values: int, lanes: int, *, wraps: bool, pads: bool
) -> tuple[Tensor, Tensor]:
    """Numbers of entries, (tiles, lanes), -1 where there is none; and the value of each tile.

    Values that are out of range count as the first that is; absent ones, where -1 ``pads``, as -1.
    """
    flat = index.reshape(-1)
    if on_device(index):
        return _on_device(flat.contiguous(), values, lanes, wraps=wraps, pads=pads)
    flat = flat.long()
    absent = flat == -1
    flat = torch.where(flat < 0, flat + values, flat) if wraps else flat
    flat = torch.where((flat < 0) | (flat >= values), values, flat)
    flat = torch.where(absent, values + _ABSENT, flat) if pads else flat
    count = torch.bincount(flat, minlength=values + 2)
    tiles = (count + lanes - 1) // lanes
    first_tile, first = tiles.cumsum(0) - tiles, count.cumsum(0) - count
    order = torch.argsort(flat, stable=True)
    own = flat[order]
    slot = first_tile[own] * lanes + torch.arange(flat.numel()) - first[own]
    place = torch.full((most_tiles(flat.numel(), values, lanes) * lanes,), -1, dtype=torch.int32)
    place[slot] = order.int()
    value = torch.full((place.numel() // lanes,), -1, dtype=torch.int32)
    value[slot // lanes] = torch.where(own > values, -1, own).int()
    return place.view(-1, lanes), value


def _on_device(
    flat: Tensor, values: int, lanes: int, *, wraps: bool, pads: bool
) -> tuple[Tensor, Tensor]:
    entries, device = flat.numel(), flat.device
    tiles = most_tiles(entries, values, lanes)
    count = torch.zeros(values + 2, dtype=torch.int32, device=device)
    first = empty((values + 2,), torch.int32, device)
    rank = empty((2, entries), torch.int32, device)
    place = torch.full((tiles, lanes), -1, dtype=torch.int32, device=device)
    value = torch.zeros(tiles, dtype=torch.int32, device=device)
    _RANK(blocks(entries), flat, count, rank, entries, values, int(wraps), int(pads))
    _START(1, count, first, values + 2, lanes)
    _FILL(blocks(entries), rank, first, place, value, entries, values, lanes)
    return place, value
