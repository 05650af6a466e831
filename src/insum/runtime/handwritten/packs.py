"""Rows of a padded table ordered by what they have, on the device and without waiting.

Each row has words of bits, one bit for every step that it has. Rows are ordered by their words, and
each tile of rows lists the steps that any of its rows has. Lists have room for every step, so that
nothing has to be counted on the host.

Rows of one short word are counted into buckets by its highest bits, those of the rarest steps, and
sorted by the whole word within windows of that order: nearly as good as sorting them all, in two
launches instead of a dozen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum.compat.calls import current_stream, empties, empty
from insum.plan.strategies.packing import TILE
from insum.runtime import launch
from insum.runtime.handwritten.kernel import BLOCK, Handwritten, blocks

#: Steps of the widest table that is packed here: its lists have room for all of them.
MOST_STEPS = 512
#: Pieces that the tiles of one step are cut into, where rows are summed.
PIECES_PER_STEP = 16
#: Rows that are sorted by one program; the bits of a word that tell its bucket.
WINDOW, BUCKET_BITS = 1024, 8
BUCKETS = 1 << BUCKET_BITS
#: Windows that are counted into buckets here: every program adds up the counts of all of them.
MOST_WINDOWS = 256
#: Under which whoever made a table keeps its `KernelMap` in the memory of the table.
MAP = "kernel map"


class KernelMap:
    """What is known of a table ``Nb[z,x]`` from where it comes, so that nobody has to look: no two
    ``x`` of one ``z`` lead to the same place.

    Attributes:
        names: the step that each bit stands for; the most frequent ones should have the lowest.
        words: the words of the rows.
        mirrored: whether the table read backwards along ``z`` is its own inverse.
        comes_back: whether so many calls have met it that more work on its order pays.
        first: which call was the first to meet it.
        made: all that a program needs of the table, by stream, by what that is, and by sizes.
        inverse: the map of the way back, which leads from ``y`` to ``x``, where there is one. By a
            weak reference: that one knows this one, too.
        stream: on which the table was made.
    """

    __slots__ = ("comes_back", "first", "inverse", "made", "mirrored", "names", "stream", "words")

    def __init__(self, names: Tensor, words: Tensor, mirrored: bool) -> None:
        self.stream = current_stream(words.device) if words.is_cuda else 0
        self.names, self.words, self.mirrored = names, words, mirrored
        self.comes_back = False
        self.first: int | None = None
        self.made: dict[object, Any] = {}
        self.inverse: weakref.ref[Tensor] | None = None


def bits_per_word(steps: int) -> int:
    """Short words are sorted in half the time."""
    return 31 if steps <= 31 else 62


def words_for(rows: int, steps: int, device: torch.device) -> Tensor:
    """Room for the words of rows: (words, rows)."""
    per = bits_per_word(steps)
    dtype = torch.int32 if per == 31 else torch.int64
    return empty((-(-steps // per), rows), dtype, device)


_BITS = Handwritten(
    "insum_bits",
    """@triton.jit
def insum_bits(
    table_ptr, names_ptr, bits_ptr, rows: "i64", steps: "i64", per: "i64", row_stride: "i64",
    step_stride: "i64", step_first: "i64",
):
    words = (steps + per - 1) // per
    pid = tl.program_id(0).to(tl.int64)
    word = pid % words
    at = pid // words * 256 + tl.arange(0, 256)
    there = at < rows
    found = tl.zeros([256], tl.int64)
    for bit in range(tl.minimum(per, steps - word * per)):
        step = tl.load(names_ptr + word * per + bit).to(tl.int64)
        place = at * row_stride + (step_first + step * step_stride)
        value = tl.load(table_ptr + place, mask=there, other=-1)
        found = found | (tl.where(value >= 0, 1, 0).to(tl.int64) << bit)
    tl.store(bits_ptr + word * rows + at, found.to(bits_ptr.dtype.element_ty), mask=there)
""",
)
#: Different numbers in ascending order. Triton's interpreter takes a minute for its own sorting
#: network; there, each number counts the smaller ones and goes to that place.
_ORDERED = """@triton.jit
def insum_ordered(keys):
    return tl.sort(keys)


"""
if launch.interpreting():
    _ORDERED = f"""@triton.jit
def insum_ordered(keys):
    rank = tl.sum((keys[None, :] < keys[:, None]).to(tl.int32), 1)
    place = tl.arange(0, {WINDOW})
    return tl.sum(tl.where(rank[None, :] == place[:, None], keys[None, :], 0), 1)


"""
_COUNT = Handwritten(
    "insum_count_words",
    f"""@triton.jit
def insum_count_words(words_ptr, counts_ptr, rows: "i64", shift: "i64"):
    window = tl.program_id(0).to(tl.int64)
    at = window * {WINDOW} + tl.arange(0, {WINDOW})
    word = tl.load(words_ptr + at, mask=at < rows, other=0).to(tl.int64)
    # What is beyond the rows is counted into the last bucket, where it comes last.
    bucket = {BUCKETS - 1} - (word >> shift).to(tl.int32)
    count = tl.histogram(bucket, {BUCKETS})
    tl.store(counts_ptr + window * {BUCKETS} + tl.arange(0, {BUCKETS}), count)
""",
)
_PLACE = Handwritten(
    "insum_place_words",
    _ORDERED
    + f"""@triton.jit
def insum_place_words(
    words_ptr, counts_ptr, order_ptr, rows: "i64", shift: "i64", windows: "i64",
):
    window = tl.program_id(0).to(tl.int64)
    bin = tl.arange(0, {BUCKETS})
    total = tl.zeros([{BUCKETS}], tl.int32)
    before = tl.zeros([{BUCKETS}], tl.int32)
    for first in range(0, windows, 8):
        other = first + tl.arange(0, 8)
        place = counts_ptr + other[:, None] * {BUCKETS} + bin[None, :]
        count = tl.load(place, mask=(other < windows)[:, None], other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((other < window)[:, None], count, 0), 0)
    own = tl.load(counts_ptr + window * {BUCKETS} + bin)
    lane = tl.arange(0, {WINDOW})
    at = window * {WINDOW} + lane
    word = tl.load(words_ptr + at, mask=at < rows, other=0).to(tl.int64)
    bucket = {BUCKETS - 1} - (word >> shift).to(tl.int32)
    ordered = insum_ordered(bucket * {WINDOW} + lane)
    # A row's place: where its bucket starts, what other windows have of it, what is ahead here.
    start = tl.cumsum(total, 0) - total + before - (tl.cumsum(own, 0) - own)
    row = window * {WINDOW} + ordered % {WINDOW}
    tl.store(order_ptr + tl.gather(start, ordered // {WINDOW}, 0) + lane, row, mask=row < rows)
""",
)
#: Rows of a window by their only words; what is beyond the rows comes last.
_SORT = f"""    largest = {(1 << 31) - 1}
    word = tl.load(bits_ptr + row, mask=there, other=-1).to(tl.int64)
    ordered = insum_ordered((largest - word) * {WINDOW} + lane)
    word = largest - (ordered >> {WINDOW.bit_length() - 1})
    there = word >= 0
    row = tl.load(order_ptr + first_row + (ordered & {WINDOW - 1}), mask=there, other=0)
"""


def _steps(windowed: bool) -> Handwritten:
    """Tiles of rows in an order; ``windowed``: of rows that are sorted by their only word here."""
    load = "tl.load(bits_ptr + number * rows + row, mask=there, other=0).to(tl.int64)"
    bits = "tl.where(there, word, 0)" if windowed else load
    length = WINDOW if windowed else TILE
    text = f"""@triton.jit
def insum_either(a, b):
    return a | b


@triton.jit
def insum_steps(
    bits_ptr, order_ptr, names_ptr, rows_ptr, steps_ptr, back_ptr, start_ptr, end_ptr, held_ptr,
    rows: "i64", steps: "i64", per: "i64", tiles: "i64",
):
    lane = tl.arange(0, {length})
    first_row = tl.program_id(0).to(tl.int64) * {length}
    at = first_row + lane
    there = at < rows
    row = tl.load(order_ptr + at, mask=there, other=0)
{_SORT if windowed else ""}
    tl.store(rows_ptr + at, tl.where(there, row, -1).to(tl.int32), mask=at < tiles * {TILE})
    tile = first_row // {TILE} + tl.arange(0, {length // TILE})
    real = tile < tiles
    first = tile * steps
    last = first
    bit = tl.arange(0, 64)
    for number in range((steps + per - 1) // per):
        bits = {bits}
        held = tl.reduce(tl.reshape(bits, [{length // TILE}, {TILE}]), 1, insum_either)
        has = ((held[:, None] >> bit[None, :]) & 1).to(tl.int64)
        place = last[:, None] + tl.cumsum(has, 1) - has
        name = number * per + bit
        step = tl.load(names_ptr + name, mask=name < steps, other=0)[None, :] + (place * 0)
        kept = (has > 0) & real[:, None]
        tl.store(steps_ptr + place, step.to(tl.int32), mask=kept)
        tl.store(back_ptr + place, (steps - 1 - step).to(tl.int32), mask=kept)
        tl.store(held_ptr + number * tiles + tile, held, mask=real)
        last += tl.sum(has, 1)
    tl.store(start_ptr + tile, first.to(tl.int32), mask=real)
    tl.store(end_ptr + tile, last.to(tl.int32), mask=real)
"""
    return Handwritten("insum_steps", _ORDERED + text)


#: By whether rows are sorted in windows.
_STEPS = {windowed: _steps(windowed) for windowed in (False, True)}
_BY_STEP = Handwritten(
    "insum_by_step",
    f"""@triton.jit
def insum_by_step(
    held_ptr, names_ptr, tile_ptr, step_ptr, start_ptr, end_ptr, tiles: "i64", per: "i64",
    turned: "i64",
):
    name = tl.program_id(0).to(tl.int64)
    bit = name % per
    held_ptr += name // per * tiles
    count = tl.zeros([], tl.int64)
    for first in range(0, tiles, 1024):
        tile = first + tl.arange(0, 1024)
        held = tl.load(held_ptr + tile, mask=tile < tiles, other=0)
        has = ((held >> bit) & 1).to(tl.int64)
        place = count + tl.cumsum(has, 0) - has
        tl.store(tile_ptr + name * tiles + place, tile.to(tl.int32), mask=has > 0)
        count += tl.sum(has, 0)
    piece = tl.arange(0, {PIECES_PER_STEP})
    length = tl.maximum((count + {PIECES_PER_STEP - 1}) // {PIECES_PER_STEP}, 1)
    start = tl.minimum(piece * length, count)
    end = tl.minimum(start + length, count)
    at = name * {PIECES_PER_STEP} + piece
    step = tl.load(names_ptr + name).to(tl.int32)
    step = tl.where(turned > 0, tl.num_programs(0) - 1 - step, step)
    tl.store(step_ptr + at, step + (piece * 0).to(tl.int32))
    tl.store(start_ptr + at, (name * tiles + start).to(tl.int32))
    tl.store(end_ptr + at, (name * tiles + end).to(tl.int32))
""",
)
_INVERT = Handwritten(
    "insum_invert",
    f"""@triton.jit
def insum_invert(table_ptr, inverse_ptr, columns: "i64", count: "i64", rows: "i64"):
    at = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})
    there = at < count
    row = tl.load(table_ptr + at, mask=there, other=-1).to(tl.int64)
    line = at // columns
    place = at - line * columns
    inside = there & (row >= 0) & (row < rows)
    tl.store(inverse_ptr + line * rows + row, place.to(tl.int32), mask=inside)
""",
)


def names_by_frequency(table: Tensor, rows_at: int) -> Tensor:
    """The step that each bit stands for: the most frequent one has the lowest."""
    count = (table >= 0).sum(rows_at)
    return torch.argsort(count, descending=True, stable=True).to(torch.int32)


def bits_of(table: Tensor, names: Tensor, walks: Sequence[tuple[bool, int, int, int]]) -> Tensor:
    """The words of the rows of a table, which is read as `plan.recipes.Walk` says: whether a
    dimension is that of the rows, coefficient, offset, extent.
    """
    (row_at, (_, _, _, rows)), (step_at, (_, coefficient, offset, steps)) = sorted(
        enumerate(walks), key=lambda pair: not pair[1][0]
    )
    words = words_for(rows, steps, table.device)
    first = offset * table.stride(step_at)
    strides = table.stride(row_at), coefficient * table.stride(step_at), first
    programs = blocks(rows, 256) * words.shape[0]
    _BITS(programs, table, names, words, rows, steps, bits_per_word(steps), *strides)
    return words


def order_of(words: Tensor, steps: int) -> Tensor:
    """Rows by their words; those with the rarest steps, which have the highest bits, come first.
    Short words are told apart by their highest bits alone: windows are sorted later (`tiled`).
    """
    rows = words.shape[1]
    windows = -(-rows // WINDOW)
    if words.dtype == torch.int32 and windows <= MOST_WINDOWS:
        # By what the words are without their lowest bits, in descending order.
        shift, device = max(0, steps - BUCKET_BITS), words.device
        counts = empty((windows, BUCKETS), torch.int32, device)
        order = empty((rows,), torch.int64, device)
        _COUNT(windows, words, counts, rows, shift)
        _PLACE(windows, words, counts, order, rows, shift, windows)
        return order
    order = torch.argsort(words[0], descending=True, stable=True)
    for word in words[1:]:
        order = order[torch.argsort(word[order], descending=True, stable=True)]
    return order


def tiled(words: Tensor, order: Tensor, names: Tensor) -> dict[str, Tensor]:
    """Tiles of rows in an order, and the steps of each, by the names of the bits: forwards, and
    ``back``, counted from the last.
    """
    (count, rows), steps = words.shape, names.shape[0]
    tiles, device = -(-rows // TILE), words.device
    most = (tiles * steps,)
    made = empties(torch.int32, device, (tiles, TILE), most, most, (tiles,), (tiles,))
    held = empty((count, tiles), torch.int64, device)
    windowed = words.dtype == torch.int32
    programs, per = (-(-rows // WINDOW), 31) if windowed else (tiles, bits_per_word(steps))
    _STEPS[windowed](programs, words, order, names, *made, held, rows, steps, per, tiles)
    return {**dict(zip(("rows", "steps", "back", "start", "end"), made)), "held": held}


def heaviest_first(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tiles, those with many steps first: what ends last is then short."""
    order = torch.argsort(found["end"] - found["start"], descending=True, stable=True)
    turned = {name: found[name][order] for name in ("rows", "start", "end")}
    return {**found, **turned, "held": found["held"][:, order]}


def by_step(held: Tensor, names: Tensor, *, turned: bool) -> dict[str, Tensor]:
    """The tiles that have each step, in pieces; ``turned``: steps are counted from the last."""
    tiles, steps, device = held.shape[1], names.shape[0], held.device
    pieces = steps * PIECES_PER_STEP
    made = empties(torch.int32, device, (steps * tiles,), (pieces,), (pieces,), (pieces,))
    _BY_STEP(steps, held, names, *made, tiles, bits_per_word(steps), int(turned))
    return dict(zip(("tile", "step", "start", "end"), made))


def inverted(table: Tensor, rows: int) -> Tensor:
    """``inverse[z,y] = x`` where ``table[z,x] = y``, which at most one x does; else -1."""
    table = table.contiguous()
    found = torch.full((table.shape[0], rows), -1, dtype=torch.int32, device=table.device)
    columns, count = table.shape[1], table.numel()
    _INVERT(blocks(count), table, found, columns, count, rows)
    return found
