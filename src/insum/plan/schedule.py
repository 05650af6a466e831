"""Segments of a sorted index: where each output row's entries start and end, and how uneven rows
are cut into even tasks.

Computed once per index tensor with a handful of device operations and kept with its facts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Tasks up to this length count as short: several of them share a program.
SHORT = 32


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Entries ``start[r] .. end[r]`` belong to output row ``r``."""

    start: Tensor
    end: Tensor
    longest: int
    entries: int

    @property
    def rows(self) -> int:
        return self.start.numel()


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Rows cut into pieces, long pieces first; ``row`` is the output row, or ``-1 - slot`` of the
    workspace.
    """

    start: Tensor
    end: Tensor
    row: Tensor
    long: int  # how many of them are longer than SHORT
    slots: int  # rows of the workspace
    split_rows: Tensor  # rows that were cut
    split_start: Tensor  # their first slot
    split_end: Tensor

    @property
    def count(self) -> int:
        return self.start.numel()


def segments(index: Tensor, rows: int) -> Segments:
    """Runs of equal values in a sorted one-dimensional index tensor."""
    bounds = torch.arange(rows + 1, device=index.device, dtype=index.dtype)
    pointers = torch.searchsorted(index.contiguous(), bounds, out_int32=index.numel() < 2**31)
    return _with_lengths(pointers[:-1].contiguous(), pointers[1:].contiguous(), index.numel())


def scaled(base: Segments, width: int, valid: Tensor | None) -> tuple[Segments, bool]:
    """Segments over slots when every entry holds ``width`` of them; ``valid`` (entries x width)
    drops trailing padding.

    The second value says whether all padding was trailing, so that none is left inside the
    segments.
    """
    start, end = base.start * width, base.end * width
    whole = Segments(start, end, base.longest * width, base.entries * width)
    if valid is None:
        return whole, False
    counted = torch.zeros(valid.numel() + 1, dtype=torch.int64, device=valid.device)
    torch.cumsum(valid.reshape(-1), 0, out=counted[1:])
    filled = (counted[end.long()] - counted[start.long()]).to(start.dtype)
    # Padding is trailing in a row exactly when the first `filled` slots hold all of them.
    leading = counted[(start + filled).long()] - counted[start.long()]
    if bool((leading == filled).all()):
        return _with_lengths(start, start + filled, base.entries * width), True
    return whole, False


def _with_lengths(start: Tensor, end: Tensor, entries: int) -> Segments:
    longest = int((end - start).max()) if start.numel() else 0
    return Segments(start, end, longest, entries)


def tasks(base: Segments, limit: int) -> Tasks:
    """Cut rows into pieces of at most ``limit`` entries, long pieces first and otherwise in the
    order of the rows.

    The order inside a class is kept: rows that are near in the output gather near inputs, and a
    full sort would lose that.
    """
    count = (base.end - base.start).long()
    device = count.device
    pieces = torch.clamp((count + limit - 1) // limit, min=1)
    total = int(pieces.sum())
    row = torch.repeat_interleave(pieces, output_size=total)
    piece = torch.arange(total, device=device) - (pieces.cumsum(0) - pieces)[row]
    start = base.start.long()[row] + piece * limit
    end = torch.minimum(start + limit, base.end.long()[row])
    split = pieces[row] > 1
    destination = torch.where(split, -split.long().cumsum(0), row)
    length = end - start
    klass = torch.where(
        length <= SHORT, 0, torch.ceil(torch.log2(length.clamp(min=1).float())).long()
    )
    order = torch.argsort(-klass, stable=True)
    cut = (pieces > 1).nonzero()[:, 0]
    slot_end = pieces[cut].cumsum(0)
    long, slots = (int(x) for x in torch.stack([(length > SHORT).sum(), split.sum()]).tolist())
    small = torch.int32 if base.entries < 2**31 and base.rows < 2**31 else torch.int64
    arrays = (start[order], end[order], destination[order], cut, slot_end - pieces[cut], slot_end)
    first, last, target, cut, slot_start, slot_end = (array.to(small) for array in arrays)
    return Tasks(first, last, target, long, slots, cut, slot_start, slot_end)
