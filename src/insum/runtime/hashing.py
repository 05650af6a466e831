"""A hash table of coordinates on the device: built and searched without waiting.

A place of the table holds a row of a tensor of coordinates and the hash of its coordinates, so that
a search reads coordinates only where the hashes are equal; they decide, so that any integers may be
coordinates. A program is one warp: its threads look until the last of them has found, and wait for
nobody else.
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
from insum.runtime import launch
from insum.runtime.handwritten import Handwritten, blocks
from insum.runtime.packs import bits_per_word, words_for
from insum.runtime.record import Explain, record_of

#: What is reported: two rows with the same coordinates; coordinates outside of what they may be.
TWICE, OUTSIDE = 0, 1

#: Names of the axes, and the odd numbers that their hashes are multiplied with; that of the batch.
_PRIMES = {"x": 2654435761, "y": 2246822519, "z": 3266489917, "t": 374761393}
_OF_BATCH = 668265263
MOST_DIMENSIONS = len(_PRIMES)
#: Rows that one program inserts, and places that one looks for: all that a warp has registers for.
#: The interpreter has no warps, and pays for every program.
INSERTED, SOUGHT = (1024, 4096) if launch.interpreting() else (64, 128)
#: The half of a place that has the row.
_LOW = 0xFFFFFFFF
#: Tables of fewer rows are sparser, so that searches are shorter: they are read from the cache.
_SPARSE_BELOW = 1 << 20


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
    mixed = axes.each("(@.to(tl.uint32) * %)", " ^ ")
    return f"""@triton.jit
def insum_hash(b, {axes.names}):
    h = ({mixed} ^ (b.to(tl.uint32) * {_OF_BATCH})).to(tl.uint32)
    h = (h ^ (h >> 15)).to(tl.uint32) * 739982445
    return (h ^ (h >> 12)).to(tl.uint32).to(tl.int64)


@triton.jit
def insum_floor(a, b):
    return tl.where(a < 0, -((b - 1 - a) // b), a // b)


@triton.jit
def insum_same(coords_ptr, columns, row, b, {axes.names}, active):
    at = coords_ptr + row.to(tl.int64) * columns + (columns - {len(axes)})
    has_batch = active & (columns > {len(axes)})
    same = active & (tl.load(at - 1, mask=has_batch, other=0).to(tl.int64) == b)
    {axes.each("same = same & (tl.load(at + #, mask=active, other=0).to(tl.int64) == @)")}
    return same


"""


def _inserter(axes: _Axes) -> Handwritten:
    text = f"""@triton.jit
def insum_insert(
    given_ptr, coords_ptr, table_ptr, claim_at, record_at, flags_at, count: "i64", columns: "i64",
    mask: "i64", bounded: "i64", {axes.each('@_size: "i64"', ", ")}, call: "i64",
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
    slot = h & mask
    entry = (h << 32) | row
    active = there
    twice = row < 0
    first = row * 0
    while tl.max(active.to(tl.int32), axis=0) > 0:
        # Rows that have a place ask for what no place holds, each where it is: all at one address
        # would wait for each other.
        expected = tl.where(active, -1, -2).to(tl.int64)
        old = tl.atomic_cas(table_ptr + slot, expected, entry, sem="relaxed")
        taken = active & (old != -1)
        alike = taken & (((old >> 32) & {_LOW}) == h)
        held = tl.where(alike, old & {_LOW}, 0)
        same = insum_same(given_ptr, columns, held, b, {axes.names}, alike)
        twice = twice | same
        first = tl.where(same, held, first)
        active = taken & (same == 0)
        slot = tl.where(active, (slot + 1) & mask, slot)
    insum_report(twice, row, first, 0, claim_at, record_at, flags_at, call_number)
"""
    return Handwritten("insum_insert", REPORT + _hash(axes) + text, warps=1)


def _finder(axes: _Axes, lanes: int) -> Handwritten:
    rows, inner = SOUGHT // lanes, "\n        "
    deeper = inner + "    "
    whole = "active = active & (@ * @_stride == @_fine)"
    text = f"""@triton.jit
def insum_find(
    coords_ptr, table_ptr, from_ptr, offsets_ptr, names_ptr, found_ptr, words_ptr, count: "i64",
    steps: "i64", per: "i64", mask: "i64", coarse: "i64", {axes.each('@_stride: "i64"', ", ")},
    {axes.each('@_pad: "i64"', ", ")},
):
    row = tl.program_id(0).to(tl.int64) * {rows} + tl.arange(0, {rows})
    there = row < count
    at = from_ptr + row * {axes.columns} + 1
    b = tl.load(at - 1, mask=there, other=0).to(tl.int64)[:, None]
    {axes.each("@_here = tl.load(at + #, mask=there, other=0).to(tl.int64)[:, None]")}
    bit = tl.arange(0, {lanes})
    for word in range((steps + per - 1) // per):
        name = word * per + bit
        used = (bit < per) & (name < steps)
        step = tl.load(names_ptr + name, mask=used, other=0).to(tl.int64)
        {axes.each(f"d@ = tl.load(offsets_ptr + step * {len(axes)} + #)[None, :]", inner)}
        active = there[:, None] & used[None, :]
        if coarse > 0:
            {axes.each("@_fine = @_here + @_pad - d@", deeper)}
            {axes.each("@ = insum_floor(@_fine, @_stride)", deeper)}
            {axes.each(whole, deeper)}
        else:
            {axes.each("@ = @_here * @_stride - @_pad + d@", deeper)}
        h = insum_hash(b, {axes.names})
        slot = h & mask
        found = tl.full([{rows}, {lanes}], -1, tl.int32)
        while tl.max(tl.max(active.to(tl.int32), axis=1), axis=0) > 0:
            seeking = active
            entry = tl.full([{rows}, {lanes}], -1, tl.int64)
            while tl.max(tl.max(seeking.to(tl.int32), axis=1), axis=0) > 0:
                read = tl.load(table_ptr + slot, mask=seeking, other=-1)
                entry = tl.where(seeking, read, entry)
                seeking = seeking & (read != -1) & (((read >> 32) & {_LOW}) != h)
                slot = tl.where(seeking, (slot + 1) & mask, slot)
            alike = active & (entry != -1)
            held = tl.where(alike, entry & {_LOW}, 0)
            same = insum_same(coords_ptr, {axes.columns}, held, b, {axes.names}, alike)
            found = tl.where(same, held.to(tl.int32), found)
            active = alike & (same == 0)
            slot = tl.where(active, (slot + 1) & mask, slot)
        place = found_ptr + step[None, :] * count + row[:, None]
        tl.store(place, found, mask=there[:, None] & used[None, :])
        bits = tl.where(found >= 0, 1, 0).to(tl.int64) << bit[None, :].to(tl.int64)
        held = tl.sum(bits, 1)
        at_word = words_ptr + word * count + row
        tl.store(at_word, held.to(words_ptr.dtype.element_ty), mask=there)
"""
    return Handwritten("insum_find", _hash(axes) + text, warps=1)


_EVERY = {n: _Axes(tuple(_PRIMES)[:n]) for n in range(1, MOST_DIMENSIONS + 1)}
#: By the number of dimensions.
_INSERTS = {n: _inserter(axes) for n, axes in _EVERY.items()}
#: By the bits of a word, which are looked for at once, how many lanes there are.
_LANES = {31: 32, 62: 64}
#: By the number of dimensions and the bits of a word.
_FINDS = {
    (n, per): _finder(axes, lanes) for n, axes in _EVERY.items() for per, lanes in _LANES.items()
}


@dataclass(frozen=True, eq=False)
class Table:
    """A hash table of the rows of ``coords``: batch, then the axes."""

    coords: Tensor
    slots: Tensor

    @property
    def mask(self) -> int:
        return self.slots.shape[0] - 1


def table_of(given: Tensor, coords: Tensor, shape: Sequence[int] | None, explain: Explain) -> Table:
    """The table of contiguous coordinates, with or without a batch in front, which are copied to
    ``coords``, with a batch. Coordinates that stand twice, a negative batch, and what lies outside
    of ``shape``, are reported; ``explain`` makes the error of a report.
    """
    count, device = coords.shape[0], coords.device
    size = power_of_two((4 if count < _SPARSE_BELOW else 2) * max(1, count))
    slots = torch.full((size,), -1, dtype=torch.int64, device=device)
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
        size - 1,
        int(shape is not None),
        *(shape or (0,) * ndim),
        record[CALL],
    )
    return Table(coords, slots)


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
    found = empty((steps, count), torch.int32, places.device)
    words, per = words_for(count, steps, places.device), bits_per_word(steps)
    _FINDS[ndim, per](
        blocks(count, SOUGHT // _LANES[per]),
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
