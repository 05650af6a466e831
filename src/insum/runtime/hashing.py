"""A hash table of coordinates on the device: built and searched without waiting.

The table holds rows of a tensor of coordinates; rows are compared by their coordinates, so that any
integers may be coordinates. It is as long as a power of two that is at least twice as large as the
number of rows, so that searches are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum.codegen.arguments import CALL, CLAIM, FLAGS, RECORD
from insum.codegen.checking import REPORT
from insum.compat.calls import empty
from insum.plan.sizes import power_of_two
from insum.runtime.handwritten import Handwritten, blocks
from insum.runtime.packs import bits_per_word, words_for
from insum.runtime.record import Explain, record_of

#: What is reported: two rows with the same coordinates; coordinates outside of what they may be.
TWICE, OUTSIDE = 0, 1

_HASH = """@triton.jit
def insum_hash(b, x, y, z, mask):
    h = (x.to(tl.uint32) * 2654435761) ^ (y.to(tl.uint32) * 2246822519)
    h = (h ^ (z.to(tl.uint32) * 3266489917) ^ (b.to(tl.uint32) * 668265263)).to(tl.uint32)
    h = (h ^ (h >> 15)).to(tl.uint32) * 739982445
    h = (h ^ (h >> 12)).to(tl.uint32)
    return h.to(tl.int64) & mask


@triton.jit
def insum_floor(a, b):
    return tl.where(a < 0, -((b - 1 - a) // b), a // b)


@triton.jit
def insum_same(coords_ptr, axes, row, b, x, y, z, active):
    at = coords_ptr + row.to(tl.int64) * axes + (axes - 4)
    same = active & (tl.load(at, mask=active & (axes > 3), other=0).to(tl.int64) == b)
    same = same & (tl.load(at + 1, mask=active, other=0).to(tl.int64) == x)
    same = same & (tl.load(at + 2, mask=active, other=0).to(tl.int64) == y)
    return same & (tl.load(at + 3, mask=active, other=0).to(tl.int64) == z)


"""
_INSERT = Handwritten(
    "insum_insert",
    REPORT
    + _HASH
    + """@triton.jit
def insum_insert(
    given_ptr, coords_ptr, table_ptr, claim_at, record_at, flags_at, count: "i64", axes: "i64",
    mask: "i64", bounded: "i64", x_size: "i64", y_size: "i64", z_size: "i64", call: "i64",
):
    row = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    there = row < count
    at = given_ptr + row * axes + (axes - 4)
    b = tl.load(at, mask=there & (axes > 3), other=0).to(tl.int64)
    x = tl.load(at + 1, mask=there, other=0).to(tl.int64)
    y = tl.load(at + 2, mask=there, other=0).to(tl.int64)
    z = tl.load(at + 3, mask=there, other=0).to(tl.int64)
    own = coords_ptr + row * 4
    kind = coords_ptr.dtype.element_ty
    tl.store(own, b.to(kind), mask=there)
    tl.store(own + 1, x.to(kind), mask=there)
    tl.store(own + 2, y.to(kind), mask=there)
    tl.store(own + 3, z.to(kind), mask=there)
    low = (x < 0) | (y < 0) | (z < 0)
    high = (x >= x_size) | (y >= y_size) | (z >= z_size)
    outside = there & ((b < 0) | ((bounded > 0) & (low | high)))
    call_number = call.to(tl.int32)
    insum_report(outside, row, row, 1, claim_at, record_at, flags_at, call_number)
    slot = insum_hash(b, x, y, z, mask)
    active = there
    twice = row < 0
    first = row * 0
    while tl.max(active.to(tl.int32), axis=0) > 0:
        # Rows that have a place ask for what no place holds, each where it is: all at one address
        # would wait for each other.
        empty = tl.where(active, -1, -2).to(tl.int32)
        old = tl.atomic_cas(table_ptr + slot, empty, row.to(tl.int32))
        taken = active & (old >= 0)
        same = insum_same(given_ptr, axes, tl.where(taken, old, 0), b, x, y, z, taken)
        twice = twice | same
        first = tl.where(same, old.to(tl.int64), first)
        active = taken & (same == 0)
        slot = tl.where(active, (slot + 1) & mask, slot)
    insum_report(twice, row, first, 0, claim_at, record_at, flags_at, call_number)
""",
)
_FIND = """@triton.jit
def insum_either(a, b):
    return a | b


@triton.jit
def insum_find(
    coords_ptr, table_ptr, from_ptr, offsets_ptr, names_ptr, found_ptr, words_ptr, count: "i64",
    steps: "i64", per: "i64", mask: "i64", coarse: "i64", x_stride: "i64", y_stride: "i64",
    z_stride: "i64", x_pad: "i64", y_pad: "i64", z_pad: "i64",
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < count
    at = from_ptr + row * 4
    b = tl.load(at, mask=there, other=0).to(tl.int64)[:, None]
    x_here = tl.load(at + 1, mask=there, other=0).to(tl.int64)[:, None]
    y_here = tl.load(at + 2, mask=there, other=0).to(tl.int64)[:, None]
    z_here = tl.load(at + 3, mask=there, other=0).to(tl.int64)[:, None]
    bit = tl.arange(0, LANES)
    for word in range((steps + per - 1) // per):
        name = word * per + bit
        used = (bit < per) & (name < steps)
        step = tl.load(names_ptr + name, mask=used, other=0).to(tl.int64)
        dx = tl.load(offsets_ptr + step * 3)[None, :]
        dy = tl.load(offsets_ptr + step * 3 + 1)[None, :]
        dz = tl.load(offsets_ptr + step * 3 + 2)[None, :]
        active = there[:, None] & used[None, :]
        if coarse > 0:
            x_fine = x_here + x_pad - dx
            y_fine = y_here + y_pad - dy
            z_fine = z_here + z_pad - dz
            x = insum_floor(x_fine, x_stride)
            y = insum_floor(y_fine, y_stride)
            z = insum_floor(z_fine, z_stride)
            active = active & (x * x_stride == x_fine)
            active = active & (y * y_stride == y_fine) & (z * z_stride == z_fine)
        else:
            x = x_here * x_stride - x_pad + dx
            y = y_here * y_stride - y_pad + dy
            z = z_here * z_stride - z_pad + dz
        slot = insum_hash(b, x, y, z, mask)
        found = tl.full([ROWS, LANES], -1, tl.int32)
        while tl.max(tl.max(active.to(tl.int32), axis=1), axis=0) > 0:
            old = tl.load(table_ptr + slot, mask=active, other=-1)
            taken = active & (old >= 0)
            same = insum_same(coords_ptr, 4, tl.where(taken, old, 0), b, x, y, z, taken)
            found = tl.where(same, old, found)
            active = taken & (same == 0)
            slot = (slot + 1) & mask
        place = found_ptr + step[None, :] * count + row[:, None]
        tl.store(place, found, mask=there[:, None] & used[None, :])
        bits = tl.where(found >= 0, 1, 0).to(tl.int64) << bit[None, :].to(tl.int64)
        held = tl.reduce(bits, 1, insum_either)
        at_word = words_ptr + word * count + row
        tl.store(at_word, held.to(words_ptr.dtype.element_ty), mask=there)
"""
#: Places that one program looks for at once: of as many rows as registers allow.
AT_ONCE = 512


def _finder(lanes: int) -> Handwritten:
    text = _FIND.replace("ROWS", str(AT_ONCE // lanes)).replace("LANES", str(lanes))
    return Handwritten("insum_find", _HASH + text)


#: By the bits of a word, which are looked for at once, how many lanes there are, and the kernel.
_FINDS = {31: (32, _finder(32)), 62: (64, _finder(64))}


@dataclass(frozen=True, eq=False)
class Table:
    """A hash table of the rows of ``coords`` (N, 4)."""

    coords: Tensor
    slots: Tensor

    @property
    def mask(self) -> int:
        return self.slots.shape[0] - 1


def table_of(given: Tensor, coords: Tensor, shape: Sequence[int] | None, explain: Explain) -> Table:
    """The table of contiguous coordinates (N, 3) or (N, 4), which are copied to ``coords`` (N, 4).
    Coordinates that stand twice, a negative batch, and what lies outside of ``shape``, are
    reported; ``explain`` makes the error of a report.
    """
    count, device = coords.shape[0], coords.device
    size = power_of_two(2 * max(1, count))
    slots = torch.full((size,), -1, dtype=torch.int32, device=device)
    record: dict[str, Any] = record_of(device).next(explain, {})
    _INSERT(
        blocks(count, 256),
        given,
        coords,
        slots,
        record[CLAIM],
        record[RECORD],
        record[FLAGS],
        count,
        given.shape[1],
        size - 1,
        int(shape is not None),
        *(shape or (0, 0, 0)),
        record[CALL],
    )
    return Table(coords, slots)


@dataclass(frozen=True, eq=False)
class Stencil:
    """Where the offsets of a kernel lead: ``wanted = place * stride - padding + offset``, or, where
    ``coarse``, the place for which that holds.

    Attributes:
        offsets: (steps, 3), int64.
        names: the steps in the order of their bits in the words of rows.
    """

    offsets: Tensor
    names: Tensor
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    coarse: bool


def find(table: Table, places: Tensor, stencil: Stencil) -> tuple[Tensor, Tensor]:
    """The row for every offset of a stencil from every place (M, 4), or -1: (steps, M); and words
    with a bit for each that is there (`packs.words_for`).
    """
    steps, count = stencil.offsets.shape[0], places.shape[0]
    found = empty((steps, count), torch.int32, places.device)
    words, per = words_for(count, steps, places.device), bits_per_word(steps)
    lanes, kernel = _FINDS[per]
    kernel(
        blocks(count, AT_ONCE // lanes),
        table.coords,
        table.slots,
        places,
        stencil.offsets,
        stencil.names,
        found,
        words,
        count,
        steps,
        per,
        table.mask,
        int(stencil.coarse),
        *stencil.stride,
        *stencil.padding,
    )
    return found, words
