"""Entries: coordinates and values, the form through which every conversion passes.

Everything here is a handful of whole-array operations on the device of the data. The host learns
sizes (how many entries, how many blocks) and whether input was in order, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from insum.accepted import NARROW_FLOATS

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries without duplicates, sorted by the dimensions in ``order`` (empty: in no known order).

    With a ``block_shape`` every entry is a block and coordinates count blocks. ``pointers``
    (optional) are row pointers over dimension ``order[0]``, as CSR has them. ``values`` is ``None``
    where every entry is 1.
    """

    coords: tuple[Tensor, ...]
    values: Tensor | None
    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    block_shape: tuple[int, ...] | None = None
    pointers: Tensor | None = None

    @property
    def count(self) -> int:
        return self.coords[0].shape[0]

    @property
    def grid(self) -> tuple[int, ...]:
        """The range of the coordinates: the shape, or the number of blocks along each dimension."""
        return grid_of(self.shape, self.block_shape) if self.block_shape else self.shape


def grid_of(shape: Sequence[int], block_shape: Sequence[int]) -> tuple[int, ...]:
    """How many blocks cover each dimension, the last one padded."""
    return tuple(-(-size // block) for size, block in zip(shape, block_shape))


def index_dtype(size: int) -> torch.dtype:
    """int32 where a dimension of this size allows it."""
    return torch.int32 if size <= _INT32_MAX else torch.int64


def ordered(entries: Entries, order: tuple[int, ...]) -> Entries:
    """The same entries sorted by ``order``; checked before anything is moved, so that sorted input
    costs no sort.
    """
    if entries.order == order or entries.count == 0:
        return replace(
            entries, order=order, pointers=entries.pointers if entries.order == order else None
        )
    if not entries.order and bool(_increases(entries, order)):
        return replace(entries, order=order)
    return _taken(entries, argsort(entries.coords, entries.grid, order), order)


def collect(
    coords: Sequence[Tensor],
    values: Tensor | None,
    shape: tuple[int, ...],
    *,
    order: tuple[int, ...],
    block_shape: tuple[int, ...] | None = None,
    in_order: bool = False,
) -> Entries:
    """Entries from coordinates in any order, duplicates summed (merged if there are no values)."""
    narrow = tuple(c.to(index_dtype(size)) for c, size in zip(coords, shape))
    entries = Entries(narrow, values, shape, block_shape=block_shape)
    if in_order or entries.count == 0 or bool(_increases(entries, order)):
        return replace(entries, order=order)
    return _coalesced(_taken(entries, argsort(narrow, entries.grid, order), order))


def from_dense(x: Tensor, order: tuple[int, ...]) -> Entries:
    """The nonzeros of a dense tensor (NaN is one), sorted by ``order`` as they are found."""
    turned = x.permute(order)
    found = (turned.detach() != 0).nonzero(as_tuple=True)
    values = turned[found]
    coords = tuple(found[order.index(d)].to(index_dtype(x.shape[d])) for d in range(x.dim()))
    return Entries(coords, values, tuple(x.shape), order)


def blocks_from_dense(x: Tensor, block_shape: tuple[int, ...], order: tuple[int, ...]) -> Entries:
    """Blocks of a dense tensor that hold a nonzero; those at the edge are padded with zeros."""
    grid, rank = grid_of(x.shape, block_shape), x.dim()
    split = padded_to(x, [g * b for g, b in zip(grid, block_shape)]).reshape(
        [s for pair in zip(grid, block_shape) for s in pair]
    )
    blocks = split.permute([2 * d for d in order] + [2 * d + 1 for d in range(rank)])
    found = (
        (blocks.detach() != 0).flatten(rank).any(-1).nonzero(as_tuple=True)
        if x.numel()
        else _none_found(x, rank)
    )
    coords = tuple(found[order.index(d)].to(index_dtype(grid[d])) for d in range(rank))
    return Entries(coords, blocks[found], tuple(x.shape), order, block_shape)


@dataclass(frozen=True, eq=False)
class InBlocks:
    """Entries and the blocks they fall into: the blocks without their values, and for every entry
    its block and its place in it.
    """

    blocks: Entries
    values: Tensor
    number: Tensor
    inner: Tensor

    def placed(self, slots: Tensor | None, count: int) -> Tensor:
        """The values of ``count`` blocks, where block ``i`` comes to lie at ``slots[i]`` (at ``i``,
        where there are none).
        """
        block = self.blocks.block_shape or ()
        at = self.number if slots is None else slots.index_select(0, self.number)
        return placed(
            self.values, at * math.prod(block) + self.inner, count * math.prod(block)
        ).reshape(count, *block)


def in_blocks(entries: Entries, block_shape: tuple[int, ...], order: tuple[int, ...]) -> InBlocks:
    """Finds the blocks of single entries, sorted by ``order``."""
    grid = grid_of(entries.shape, block_shape)
    outer = [c.div(b, rounding_mode="floor") for c, b in zip(entries.coords, block_shape)]
    within = [c - o * b for c, o, b in zip(entries.coords, outer, block_shape)]
    inner = _linear(within, block_shape, tuple(range(len(block_shape))), math.prod(block_shape))
    coords, number = distinct(outer, grid, order)
    values = (
        entries.values
        if entries.values is not None
        else entries.coords[0].new_ones(entries.count, dtype=torch.get_default_dtype())
    )
    blocks = Entries(
        tuple(c.to(index_dtype(g)) for c, g in zip(coords, grid)),
        None,
        entries.shape,
        order,
        block_shape,
    )
    return InBlocks(blocks, values, number, inner)


def to_blocks(entries: Entries, block_shape: tuple[int, ...], order: tuple[int, ...]) -> Entries:
    """The entries put into the blocks they fall into."""
    if entries.block_shape == block_shape:
        return ordered(entries, order)
    found = in_blocks(to_elements(entries), block_shape, order)
    return replace(found.blocks, values=found.placed(None, found.blocks.count))


def to_elements(entries: Entries, *, stored: bool = False) -> Entries:
    """Blocks taken apart: their nonzeros; without values, or if all that is ``stored`` is asked
    for, everything that a block covers inside the shape.
    """
    if entries.block_shape is None:
        return entries
    filled = (
        entries.values.detach() != 0
        if entries.values is not None and not stored
        else inside(entries.coords, entries.block_shape, entries.shape)
    )
    block, *within = filled.nonzero(as_tuple=True)
    coords = tuple(
        (c[block].long() * b + i).to(index_dtype(s))
        for c, b, i, s in zip(entries.coords, entries.block_shape, within, entries.shape)
    )
    return Entries(
        coords, None if entries.values is None else entries.values[(block, *within)], entries.shape
    )


def placed(values: Tensor, slots: Tensor, size: int) -> Tensor:
    """A zero tensor of ``size`` rows with ``values[i]`` at row ``slots[i]``."""
    if values.dtype in NARROW_FLOATS:  # whose zero is a zero byte, and of which torch copies none
        return placed(values.view(torch.uint8), slots, size).view(values.dtype)
    return values.new_zeros(size, *values.shape[1:]).index_copy_(0, slots.long(), values)


def padded_to(x: Tensor, shape: Sequence[int], value: int = 0) -> Tensor:
    """``x`` with ``value`` behind every dimension that is shorter than in ``shape``; ``x`` itself
    where none is.
    """
    if tuple(x.shape) == tuple(shape):
        return x
    pads = [
        extra
        for have, want in zip(reversed(x.shape), reversed(shape))
        for extra in (0, want - have)
    ]
    return torch.nn.functional.pad(x, pads, value=value)


def argsort(coords: Sequence[Tensor], sizes: Sequence[int], order: tuple[int, ...]) -> Tensor:
    """The permutation that sorts coordinates by ``order``: one sort where a linear key fits 64
    bits, else one per dimension.
    """
    total = math.prod(sizes)
    if total <= _INT64_MAX:
        return torch.argsort(_linear(coords, sizes, order, total), stable=True)
    permutation = torch.arange(coords[0].shape[0], device=coords[0].device)
    for dim in reversed(order):
        permutation = permutation[torch.argsort(coords[dim][permutation], stable=True)]
    return permutation


def changes(coords: Sequence[Tensor]) -> Tensor:
    """True where an entry differs from the one before it in any of the coordinates, and at the
    first.
    """
    flags = torch.ones(coords[0].shape[0], dtype=torch.bool, device=coords[0].device)
    if flags.numel() > 1:
        flags[1:] = False
        for c in coords:
            flags[1:] |= c[1:] != c[:-1]
    return flags


def linear(coords: Sequence[Tensor], sizes: Sequence[int], order: tuple[int, ...]) -> Tensor:
    """One integer per entry, row-major over the dimensions in ``order``; the caller knows that it
    fits 64 bits.
    """
    return _linear(coords, sizes, order, math.prod([sizes[d] for d in order]))


def unravel(key: Tensor, sizes: Sequence[int], order: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The inverse of `linear` for a permutation ``order`` of all dimensions."""
    coords: dict[int, Tensor] = {}
    for dim in reversed(order[1:]):
        rest = key.div(sizes[dim], rounding_mode="floor")
        coords[dim] = key - rest * sizes[dim]
        key = rest
    coords[order[0]] = key
    return tuple(coords[d] for d in range(len(sizes)))


def _linear(
    coords: Sequence[Tensor], sizes: Sequence[int], order: tuple[int, ...], total: int
) -> Tensor:
    if not order:
        return coords[0].new_zeros(coords[0].shape[0])
    dtype = index_dtype(total)
    key = coords[order[0]].to(dtype)
    for dim in order[1:]:
        key = key * sizes[dim] + coords[dim].to(dtype)
    return key


def _increases(entries: Entries, order: tuple[int, ...]) -> Tensor:
    """Whether the entries increase strictly, as one boolean on the device."""
    total = math.prod(entries.grid)
    if total <= _INT64_MAX:
        key = _linear(entries.coords, entries.grid, order, total)
        return (key[1:] > key[:-1]).all()
    less = torch.zeros(max(entries.count - 1, 0), dtype=torch.bool, device=entries.coords[0].device)
    for dim in reversed(order):
        a, b = entries.coords[dim][:-1], entries.coords[dim][1:]
        less = (a < b) | (a == b) & less
    return less.all()


def _taken(entries: Entries, permutation: Tensor, order: tuple[int, ...]) -> Entries:
    coords = tuple(c.index_select(0, permutation) for c in entries.coords)
    values = None if entries.values is None else entries.values.index_select(0, permutation)
    return replace(entries, coords=coords, values=values, order=order, pointers=None)


def _coalesced(entries: Entries) -> Entries:
    first = changes(entries.coords)
    number = torch.cumsum(first, 0) - 1
    keep = first.nonzero().squeeze(1)
    values = None if entries.values is None else _summed(entries.values, number, keep.shape[0])
    return replace(entries, coords=tuple(c[keep] for c in entries.coords), values=values)


def _summed(values: Tensor, number: Tensor, count: int) -> Tensor:
    """Sums of the values with equal number; half precision meets in float32, and two truths are
    one.
    """
    wide = {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.bool: torch.int32,
        **dict.fromkeys(NARROW_FLOATS, torch.float32),
    }.get(values.dtype, values.dtype)
    total = torch.zeros((count, *values.shape[1:]), dtype=wide, device=values.device).index_add(
        0, number, values.to(wide)
    )
    return total.to(values.dtype)


def distinct(
    coords: Sequence[Tensor], sizes: tuple[int, ...], order: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The distinct coordinates sorted by ``order``, and for every entry the number of its own."""
    total, count = math.prod(sizes), coords[0].shape[0]
    if total > _INT64_MAX:
        permutation = argsort(coords, sizes, order)
        sorted_coords = [c[permutation] for c in coords]
        first = changes(sorted_coords)
        number = torch.empty_like(permutation).index_copy_(
            0, permutation, torch.cumsum(first, 0) - 1
        )
        return tuple(c[first] for c in sorted_coords), number
    key = _linear(coords, sizes, order, total).long()
    if total <= 8 * count + (1 << 20):  # few enough places to mark each: no sort
        seen = torch.zeros(total, dtype=torch.bool, device=key.device)
        seen[key] = True
        places = seen.nonzero().squeeze(1)
        rank = torch.empty(total, dtype=torch.int64, device=key.device).index_copy_(
            0, places, torch.arange(places.shape[0], device=key.device)
        )
        number = rank.index_select(0, key)
    else:
        places, number = torch.unique(key, return_inverse=True)
    return unravel(places, sizes, order), number


def inside(coords: Sequence[Tensor], block_shape: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Which elements of the blocks at these block coordinates (tensors of one shape) lie inside the
    shape.
    """
    lead, rank = coords[0].dim(), len(shape)
    within_all = torch.ones(
        (*coords[0].shape, *block_shape), dtype=torch.bool, device=coords[0].device
    )
    for dim, (c, block, size) in enumerate(zip(coords, block_shape, shape)):
        within = torch.arange(block, device=c.device).reshape(
            [1] * lead + [block if d == dim else 1 for d in range(rank)]
        )
        within_all &= c.long().reshape(*c.shape, *[1] * rank) * block + within < size
    return within_all


def _none_found(x: Tensor, rank: int) -> tuple[Tensor, ...]:
    return tuple(torch.empty(0, dtype=torch.int64, device=x.device) for _ in range(rank))
