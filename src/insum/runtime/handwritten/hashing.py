"""A hash table of coordinates on the device: built and searched without waiting.

A place of the table holds a row of a tensor of coordinates and, in the bits that rows leave, a part
of the hash of its coordinates, so that a search reads coordinates only where that is equal; they
decide, so that any integers may be coordinates. Places come in buckets, which are read at once, and
neighbours along the last axis share one. A program is one warp: its threads look until the last of
them has found, and wait for nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum.codegen.arguments import CALL, CLAIM, FLAGS, RECORD
from insum.codegen.checking import REPORT
from insum.compat.tensors import empties
from insum.plan.sizes import power_of_two
from insum.runtime import launch
from insum.runtime.handwritten.kernel import Handwritten, blocks
from insum.runtime.handwritten.packs import words_for
from insum.runtime.record import Explain, record_of

#: What is reported: two rows with the same coordinates; coordinates outside of what they may be.
TWICE, OUTSIDE = 0, 1

#: Names of the axes, and the odd numbers that their hashes are multiplied with; that of the batch.
_PRIMES = {"x": 2654435761, "y": 2246822519, "z": 3266489917, "t": 374761393}
_OF_BATCH = 668265263
MOST_DIMENSIONS = len(_PRIMES)
#: Rows that one program inserts, and places that one looks for at a time. The interpreter has no
#: warps, and pays for every program.
INSERTED, SOUGHT = (1024, 4096) if launch.interpreting() else (64, 32)
#: Offsets of a kernel that a program looks for at a time, by whether there are many rows: of few
#: several, for programs wait for memory, and there should be more of them.
LANES = {False: 32, True: 32} if launch.interpreting() else {False: 8, True: 1}
MANY_ROWS = 1 << 17
#: Places of a bucket, as many as one load reads; voxels along the last axis that share one.
BUCKET_BITS = 2
BUCKET = 1 << BUCKET_BITS
#: Places for every row, such that nearly all searches end in the first bucket; and of tables that
#: do not fit the cache.
ROOM, LESS_ROOM = 8, 4
LARGE = 1 << 20


class _Axes(tuple[str, ...]):
    """The axes of coordinates in so many dimensions, for which lines of kernels are repeated."""

    __slots__ = ()

    def each(self, line: str, between: str = "\n    ") -> str:
        """A line for every axis: @ is its name, # its column behind the batch, % its prime."""
        made = [
            line.replace("@", axis).replace("#", str(at)).replace("%", str(_PRIMES[axis]))
            for at, axis in enumerate(self)
        ]
        return between.join(made)

    @property
    def names(self) -> str:
        return ", ".join(self)

    @property
    def columns(self) -> int:
        return len(self) + 1


def _hash(axes: _Axes) -> str:
    *outer, last = axes
    mixed = " + ".join(f"{axis}.to(tl.uint32) * {_PRIMES[axis]}" for axis in outer)
    mixed = mixed and f"{mixed} + "
    return f"""@triton.jit
def insum_hash(b, {axes.names}):
    # Of a bucket: the same for neighbours along the last axis.
    h = {mixed}({last} >> {BUCKET_BITS}).to(tl.uint32) * {_PRIMES[last]}
    h = (h + b.to(tl.uint32) * {_OF_BATCH}).to(tl.uint32)
    h = (h ^ (h >> 15)).to(tl.uint32) * 739982445
    return (h ^ (h >> 12)).to(tl.uint32)


@triton.jit
def insum_entry(h, {last}, row_bits):
    # Above the row: where in its bucket a voxel would like to be, and the upper end of the hash,
    # whose lower end tells the bucket.
    part = h >> tl.minimum(row_bits + {BUCKET_BITS}, 31).to(tl.uint32)
    part = (part << {BUCKET_BITS}) | ({last}.to(tl.uint32) & {BUCKET - 1})
    return part << row_bits.to(tl.uint32)


@triton.jit
def insum_floor(a, b):
    return tl.where(a < 0, -((b - 1 - a) // b), a // b)


"""


def _inserter(axes: _Axes) -> Handwritten:
    last = axes[-1]
    text = f"""@triton.jit
def insum_same(coords_ptr, columns, row, b, {axes.names}, active):
    at = coords_ptr + row.to(tl.int64) * columns + (columns - {len(axes)})
    has_batch = active & (columns > {len(axes)})
    same = active & (tl.load(at - 1, mask=has_batch, other=0).to(tl.int64) == b)
    {axes.each("same = same & (tl.load(at + #, mask=active, other=0).to(tl.int64) == @)")}
    return same


@triton.jit
def insum_insert(
    given_ptr, coords_ptr, table_ptr, claim_at, record_at, flags_at, count: "i64", columns: "i64",
    mask: "i64", row_bits: "i64", bounded: "i64", {axes.each('@_size: "i64"', ", ")}, call: "i64",
):
    row = tl.program_id(0).to(tl.int64) * {INSERTED} + tl.arange(0, {INSERTED})
    there = row < count
    at = given_ptr + row * columns + (columns - {len(axes)})
    b = tl.load(at - 1, mask=there & (columns > {len(axes)}), other=0).to(tl.int64)
    {axes.each("@ = tl.load(at + #, mask=there, other=0).to(tl.int64)")}
    own = coords_ptr + row * {axes.columns} + 1
    kind = coords_ptr.dtype.element_ty
    tl.store(own - 1, b.to(kind), mask=there)
    {axes.each("tl.store(own + #, @.to(kind), mask=there)")}
    low = {axes.each("(@ < 0)", " | ")}
    high = {axes.each("(@ >= @_size)", " | ")}
    outside = there & ((b < 0) | ((bounded > 0) & (low | high)))
    call_number = call.to(tl.int32)
    insum_report(outside, row, row, 1, claim_at, record_at, flags_at, call_number)
    h = insum_hash(b, {axes.names})
    bucket = h.to(tl.int64) & mask
    part = insum_entry(h, {last}, row_bits)
    entry = (part | row.to(tl.uint32)).to(tl.int32, bitcast=True)
    row_mask = ((row * 0 + 1) << row_bits) - 1
    active = there
    twice = row < 0
    first = row * 0
    place = {last} & {BUCKET - 1}
    tries = row * 0
    while tl.max(active.to(tl.int32), axis=0) > 0:
        # Rows that have a place ask for what no place holds, each where it is: all at one address
        # would wait for each other.
        expected = tl.where(active, -1, -2).to(tl.int32)
        slot = bucket * {BUCKET} + ((place + tries) & {BUCKET - 1})
        wish = tl.where(active, entry, expected)
        old = tl.atomic_cas(table_ptr + slot, expected, wish, sem="relaxed")
        taken = active & (old != -1)
        held = old.to(tl.uint32, bitcast=True).to(tl.int64) & row_mask
        other = (old ^ entry).to(tl.uint32, bitcast=True).to(tl.int64) >> row_bits
        alike = taken & (other == 0)
        held = tl.where(alike, held, 0)
        same = insum_same(given_ptr, columns, held, b, {axes.names}, alike)
        twice = twice | same
        first = tl.where(same, held, first)
        active = taken & (same == 0)
        tries = tl.where(active, tries + 1, tries)
        full = active & ((tries & {BUCKET - 1}) == 0)
        bucket = tl.where(full, (bucket + 1) & mask, bucket)
    insum_report(twice, row, first, 0, claim_at, record_at, flags_at, call_number)
"""
    return Handwritten("insum_insert", REPORT + _hash(axes) + text, warps=1)


def _finder(axes: _Axes, coarse: bool, lanes: int) -> Handwritten:
    """``coarse``: as `Stencil` has it; divisions take registers."""
    rows, inner, last = SOUGHT // lanes, "\n            ", axes[-1]
    deeper, columns = inner + "    ", power_of_two(axes.columns)
    there = ["@ = @_here * @_stride - @_pad + d@"]
    if coarse:
        there = ["@_fine = @_here + @_pad - d@", "@ = insum_floor(@_fine, @_stride)",
                 "active = active & (@ * @_stride == @_fine)"]  # fmt: skip
    lead = inner.join(axes.each(line, inner) for line in there)
    wanted = axes.each("wanted = tl.where(column == # + 1, @[:, :, None], wanted)", deeper)
    # Rows that are a power of two long are read in one load, which a mask along them would cut.
    real = "" if columns == axes.columns else f" & (column < {axes.columns})"
    text = f"""@triton.jit
def insum_find(
    coords_ptr, table_ptr, from_ptr, offsets_ptr, names_ptr, found_ptr, words_ptr, count: "i64",
    steps: "i64", per: "i64", mask: "i64", row_bits: "i64",
    {axes.each('@_stride: "i64"', ", ")}, {axes.each('@_pad: "i64"', ", ")},
):
    row = tl.program_id(0).to(tl.int64) * {rows} + tl.arange(0, {rows})
    there = row < count
    at = from_ptr + row * {axes.columns} + 1
    b = tl.load(at - 1, mask=there, other=0).to(tl.int64)[:, None]
    {axes.each("@_here = tl.load(at + #, mask=there, other=0).to(tl.int64)[:, None]")}
    lane = tl.arange(0, {lanes})
    place = tl.arange(0, {BUCKET})[None, None, :]
    column = tl.arange(0, {columns})[None, None, :]
    row_mask = (1 << row_bits) - 1
    for word in range((steps + per - 1) // per):
        last = tl.minimum(per, steps - word * per)
        bits = tl.zeros([{rows}], tl.int64)
        for first in range(0, last, {lanes}):
            bit = first + lane
            used = bit < last
            step = tl.load(names_ptr + word * per + bit, mask=used, other=0).to(tl.int64)
            {axes.each(f"d@ = tl.load(offsets_ptr + step * {len(axes)} + #)[None, :]", inner)}
            active = there[:, None] & used[None, :]
            {lead}
            h = insum_hash(b, {axes.names})
            bucket = h.to(tl.int64) & mask
            part = insum_entry(h, {last}, row_bits)
            found = tl.full([{rows}, {lanes}], -1, tl.int32)
            # Rows of a bucket that look alike are tried from the last to the first.
            below = tl.full([{rows}, {lanes}], {2**31 - 1}, tl.int32)
            while tl.max(tl.max(active.to(tl.int32), axis=1), axis=0) > 0:
                bucket_at = table_ptr + bucket[:, :, None] * {BUCKET} + place
                entry = tl.load(bucket_at, mask=active[:, :, None], other=-1)
                other = (entry.to(tl.uint32, bitcast=True) ^ part[:, :, None]).to(tl.int64)
                other_row = (other & row_mask).to(tl.int32)
                alike = (entry != -1) & (other <= row_mask) & (other_row < below[:, :, None])
                held = tl.max(tl.where(alike, other_row, -1), axis=2)
                tried = active & (held >= 0)
                own_at = tl.maximum(held, 0).to(tl.int64)[:, :, None] * {axes.columns} + column
                read = tried[:, :, None]{real}
                own = tl.load(coords_ptr + own_at, mask=read, other=0).to(tl.int64)
                wanted = b[:, :, None] + (column * 0)
                {wanted}
                differs = (own != wanted){real}
                same = tried & (tl.max(differs.to(tl.int32), axis=2) == 0)
                found = tl.where(same, held, found)
                empty = tl.max((entry == -1).to(tl.int32), axis=2) > 0
                passed = active & (held < 0)
                active = (tried & (same == 0)) | (passed & (empty == 0))
                bucket = tl.where(passed, (bucket + 1) & mask, bucket)
                below = tl.where(passed, {2**31 - 1}, held)
            found_at = found_ptr + step[None, :] * count + row[:, None]
            tl.store(found_at, found, mask=there[:, None] & used[None, :])
            bits += tl.sum((found >= 0).to(tl.int64) << bit[None, :].to(tl.int64), 1)
        word_at = words_ptr + word * count + row
        tl.store(word_at, bits.to(words_ptr.dtype.element_ty), mask=there)
"""
    return Handwritten("insum_find", _hash(axes) + text, warps=1)


_EVERY = {n: _Axes(tuple(_PRIMES)[:n]) for n in range(1, MOST_DIMENSIONS + 1)}
#: By the number of dimensions.
_INSERTS = {n: _inserter(axes) for n, axes in _EVERY.items()}
#: By the number of dimensions, whether places are coarse, and whether they are many.
_FINDS = {
    (n, coarse, many): _finder(axes, coarse, lanes)
    for n, axes in _EVERY.items()
    for coarse in (False, True)
    for many, lanes in LANES.items()
}


@dataclass(frozen=True, eq=False)
class Table:
    """A hash table of the rows of ``coords``: batch, then the axes.

    Attributes:
        mask: the number of the last bucket.
        row_bits: of the bits of a place, those that rows take; all of them are no row.
    """

    coords: Tensor
    slots: Tensor
    mask: int
    row_bits: int


def table_of(given: Tensor, coords: Tensor, shape: Sequence[int] | None, explain: Explain) -> Table:
    """The table of contiguous coordinates, with or without a batch in front, which are copied to
    ``coords``, with a batch. Coordinates that stand twice, a negative batch, and what lies outside
    of ``shape``, are reported; ``explain`` makes the error of a report.
    """
    count, device = coords.shape[0], coords.device
    size = power_of_two((ROOM if count <= LARGE else LESS_ROOM) * max(1, count))
    slots = torch.full((size,), -1, dtype=torch.int32, device=device)
    made = Table(coords, slots, size // BUCKET - 1, count.bit_length())
    record: dict[str, Any] = record_of(device).next(explain, {})
    ndim = coords.shape[1] - 1
    _INSERTS[ndim](
        blocks(count, INSERTED),
        given,
        coords,
        slots,
        record[CLAIM],
        record[RECORD],
        record[FLAGS],
        count,
        given.shape[1],
        made.mask,
        made.row_bits,
        int(shape is not None),
        *(shape or (0,) * ndim),
        record[CALL],
    )
    return made


@dataclass(frozen=True, eq=False)
class Stencil:
    """Where the offsets of a kernel lead: ``wanted = place * stride - padding + offset``, or, where
    ``coarse``, the place for which that holds.

    Attributes:
        offsets: (steps, dimensions), int64.
        names: the steps in the order of their bits in the words of rows.
    """

    offsets: Tensor
    names: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    coarse: bool


def find(table: Table, places: Tensor, stencil: Stencil) -> tuple[Tensor, Tensor]:
    """The row for every offset of a stencil from every place (M, 1 + dimensions), or -1: (steps,
    M); and words with a bit for each that is there (`packs.words_for`).
    """
    (steps, ndim), count = stencil.offsets.shape, places.shape[0]
    per, room = words_for(count, steps)
    made = empties(places.device, found=(torch.int32, (steps, count)), words=room)
    many = count >= MANY_ROWS
    _FINDS[ndim, stencil.coarse, many](
        blocks(count, SOUGHT // LANES[many]),
        table.coords,
        table.slots,
        places,
        stencil.offsets,
        stencil.names,
        made["found"],
        made["words"],
        count,
        steps,
        per,
        table.mask,
        table.row_bits,
        *stencil.stride,
        *stencil.padding,
    )
    return made["found"], made["words"]
