"""Entries by the row that they belong to: segments of sorted index tensors, orders of others, and
tasks, which are rows or pieces of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from insum.plan.questions import Summary
from insum.plan.sizes import power_of_two
from insum.plan.tiling import SHORT
from insum.runtime.prologue.made import Awaited, Made, Result, awaited

#: Short rows that are ordered by length among each other.
WINDOW = 2048


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


def tasks(base: Made, limit: int) -> Result:
    """Cut rows into even pieces of at most ``limit`` entries. Pieces and long rows come first, and
    of a row that was cut the last piece behind its others. ``row`` is the output row, or
    ``-1 - slot`` of the workspace.
    """
    start, end, entries = base.arrays["start"], base.arrays["end"], base.counts["entries"]
    if 0 < base.summary.longest <= min(limit, SHORT):
        return _one_task_each(start, end)
    # Numbers are as narrow as they can be, and let go of early: of very many rows each of these
    # arrays is a noticeable part of all memory.
    small = torch.int32 if entries < 2**31 and start.numel() < 2**31 else torch.int64
    most = start.numel() + entries // limit  # of pieces; the rest stays empty
    length = end - start
    cut = (length + (limit - 1)).div_(limit, rounding_mode="floor").clamp_(min=1).to(small)
    last = cut.cumsum(0, dtype=small)
    number = torch.arange(most, device=cut.device, dtype=small)
    row = torch.searchsorted(last, number, right=True, out_int32=small is torch.int32)
    row.clamp_(max=max(0, start.numel() - 1))
    total, there = last[-1], number < last[-1:]
    number.sub_((last - cut)[row])  # of each piece in its row
    del last
    length, cut = length[row], cut[row]
    first = (number * (length // cut)).add_(torch.minimum(number, length % cut)).add_(start[row])
    length = length.add_(cut).sub_(1).sub_(number).div_(cut, rounding_mode="floor")
    split = (cut > 1) & there
    is_last = split & (number + 1 == cut)
    slot = split.cumsum(0, dtype=small)
    opens = slot - 1 - number  # the slot of its row's first piece
    ends, most_cut = torch.where(is_last, row, -1), entries // limit
    arrays = _chosen(split, min(most, 2 * most_cut), small, cut_row=ends, cut_start=opens)
    arrays |= _chosen(is_last, most_cut, small, sum_row=row, sum_start=opens, sum_end=slot)
    row, slot_count, cut_count = torch.where(split, -slot, row), split.sum(), is_last.sum()
    del number, cut, slot, opens, ends, is_last
    length = torch.where(there, length, -1)
    is_long = split | (length > SHORT)
    long, stop = is_long.sum(), first + length
    order = torch.argsort(_among_tasks(length, is_long), stable=True)
    del length, split, is_long, there
    arrays |= {"start": first[order].to(small), "end": stop[order].to(small), "row": row[order]}
    del first, stop, row, order

    def finish(numbers: Sequence[int]) -> Made:
        total, long, slot_count, cut_count = numbers
        # an even number, so that what lies behind the slots is aligned
        counts = {"tasks": total, "long": long, "slots": slot_count + slot_count % 2}
        lengths = {"cut": slot_count, "sum": cut_count}
        found = {n: _first(array, lengths.get(n[:3], total)) for n, array in arrays.items()}
        return Made(found, {**counts, "cut": cut_count})

    return awaited(arrays, [total, long, slot_count, cut_count], finish)


def _chosen(mask: Tensor, most: int, dtype: torch.dtype, **arrays: Tensor) -> dict[str, Tensor]:
    """Of arrays those elements that a mask chooses, one behind the other; zeros up to ``most``.

    >>> _chosen(torch.tensor([False, True, True]), 3, torch.int32, a=torch.arange(3))
    {'a': tensor([1, 2, 0], dtype=torch.int32)}
    """
    place = torch.where(mask, mask.cumsum(0) - 1, most)
    blank = torch.zeros(most + 1, dtype=dtype, device=mask.device)
    return {n: blank.scatter(0, place, one.to(dtype))[:most] for n, one in arrays.items()}


def _among_tasks(length: Tensor, is_long: Tensor) -> Tensor:
    """Numbers that tasks of these lengths are ordered by; those of -1 entries come last.

    Of long ones their class. Short ones share tiles, which wait for the longest of them: they are
    ordered by length, but only among those that are near in the output, because these gather near
    inputs.
    """
    at = torch.arange(length.numel(), device=length.device, dtype=length.dtype)
    short = at.div_(WINDOW, rounding_mode="floor").mul_(SHORT + 1).add_(SHORT).sub_(length)
    long = -1 - length.clamp(min=1).log2().ceil_().to(length.dtype)
    last = torch.iinfo(length.dtype).max
    return torch.where(length < 0, last, torch.where(is_long, long, short))


def _first(array: Tensor, count: int) -> Tensor:
    """The beginning of an array, without the rest in memory."""
    return array if array.numel() == count else array[:count].clone()


def _one_task_each(start: Tensor, end: Tensor) -> Made:
    """No row is cut, and none is long: they stay as they are, which takes no memory to speak of."""
    row = torch.arange(start.numel(), device=start.device, dtype=start.dtype)
    none = start[:0]
    arrays = {"start": start, "end": end, "row": row}
    arrays |= dict.fromkeys(("cut_row", "cut_start", "sum_row", "sum_start", "sum_end"), none)
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
    opens = slot - 1 - (first // limit - start.long()[of] // limit)  # its row's first piece
    is_last = split & (stop == end.long()[of])
    ends = torch.where(is_last, of, -1)
    by_slot = _chosen(split, 2 * boundaries, small, cut_row=ends, cut_start=opens)
    by_row = _chosen(is_last, boundaries, small, sum_row=of, sum_start=opens, sum_end=slot)
    arrays = {
        "start": torch.where(there, first, 0).to(small),
        "end": torch.where(there, stop, 0).to(small),
        "row": target.to(small),
        "count": total.reshape(1).to(small),
        "sum_count": is_last.sum().reshape(1).to(small),
        **by_slot,
        **by_row,
    }
    return Made(arrays, {"tasks": most, "slots": 2 * boundaries, "cut": boundaries})
