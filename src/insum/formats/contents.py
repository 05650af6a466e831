"""What stands at every position of a format: its coordinates, whether there is an entry, and the
tensor that all of them make.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum.formats import entries as E
from insum.formats.layout import fixed

if TYPE_CHECKING:
    from insum.formats.base import SparseFormat


def count_entries(x: SparseFormat) -> int:
    """For blocks their nonzero values, for the other formats everything that is not padding."""
    mask, block = x.mask(), x.block_shape_or_none
    if block is None:
        return x.stored if mask is None else int(mask.sum())
    filled = (
        E.inside(x.coordinates(), block, x.shape) if x.values is None else x.values.detach() != 0
    )
    per_block = (
        filled.flatten(len(x.positions)).sum(-1)
        if x.stored
        else torch.zeros(x.positions, device=x.device)
    )
    return int(per_block.sum() if mask is None else per_block[mask].sum())


def coordinates(x: SparseFormat) -> tuple[Tensor, ...]:
    found: list[Tensor] = []
    positions = x.positions
    arrays = {dim: array for dim, _, array in x.index_arrays()}
    for dim, coordinate in enumerate(x.layout.coordinates):
        array = (
            arrays[dim]
            if dim in arrays
            else torch.arange(
                positions[coordinate.axes[0]],
                device=x.device,
                dtype=E.index_dtype(x.shape[dim]),
            )
        )
        view = [positions[a] if a in coordinate.axes else 1 for a in range(len(positions))]
        found.append(array.reshape(view).expand(positions))
    return tuple(found)


def entries_of(x: SparseFormat) -> E.Entries:
    mask, block = x.mask(), x.block_shape_or_none
    values = None if x.values is None else x.values.reshape(math.prod(x.positions), *(block or ()))
    coords = tuple(c.reshape(-1) for c in x.coordinates())
    if mask is None:
        return E.Entries(coords, values, x.shape, x.sorted_dims, block)
    keep = mask.reshape(-1).nonzero().squeeze(1)
    coords = tuple(c.index_select(0, keep) for c in coords)
    kept = None if values is None else values.index_select(0, keep)
    return E.Entries(coords, kept, x.shape, (), block)


def dense(x: SparseFormat, dtype: torch.dtype | None) -> Tensor:
    block = x.block_shape_or_none or ()
    grid, total = x.grid, math.prod(x.grid)
    places = E.linear([c.long() for c in x.coordinates()], grid, tuple(range(x.ndim)))
    mask = x.mask()
    if mask is not None:
        # one place more than there are, cut off again
        places = torch.where(mask, places, total)
    values = (
        x.ones(dtype) if x.values is None else x.values if dtype is None else x.values.to(dtype)
    )
    values = values.reshape(math.prod(x.positions), *block)
    cells = E.placed(values, places.reshape(-1), total + (mask is not None))[:total].reshape(
        *grid, *block
    )
    return _assembled(cells, x.shape) if block else cells


def _assembled(cells: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``[grid..., block...]`` put together and cut to shape."""
    rank = len(shape)
    whole = cells.permute([axis for d in range(rank) for axis in (d, rank + d)])
    whole = whole.reshape([cells.shape[d] * cells.shape[rank + d] for d in range(rank)])
    return whole[tuple(slice(size) for size in shape)]


def ones(x: SparseFormat, dtype: torch.dtype) -> Tensor:
    block = x.block_shape_or_none
    if block is not None and any(size % b for size, b in zip(x.shape, block)):
        return E.inside(x.coordinates(), block, x.shape).to(dtype)
    return torch.ones((), dtype=dtype, device=x.device).expand(*x.positions, *(block or ()))


def signature_of(x: SparseFormat, seen: list[Tensor] | None = None) -> tuple[Any, ...]:
    """What `SparseFormat.signature` says, index arrays counted from those that were ``seen``."""
    block = x.block_shape_or_none or ()
    dims = getattr(x, "group_dims", (getattr(x, "dim", 0),))
    seen = [] if seen is None else seen
    numbers: list[int] = []
    for coordinate in x.layout.coordinates:
        if coordinate.field is None:
            numbers.append(-1 - coordinate.axes[0])
            continue
        held = getattr(x, coordinate.field)
        array = held[coordinate.number] if isinstance(held, tuple) else held
        number = 0
        while number < len(seen) and seen[number] is not array:
            number += 1
        if number == len(seen):
            seen.append(array)
        numbers.append(number)
    even = all(size % b == 0 for size, b in zip(x.shape, block))
    return x.ndim, x._kind, fixed(dims), fixed(block), tuple(numbers), even
