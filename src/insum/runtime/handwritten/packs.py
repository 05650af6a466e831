"""Rows of a padded table ordered by what they have, on the device and without waiting.

Each row has words of bits, one bit for every step that it has. Rows are ordered by their words, and
each tile of rows lists the steps that any of its rows has. Lists have room for every step, so that
nothing has to be counted on the host.

Words are ordered as those of a reflected binary code are: one differs from the next by few bits,
and steps that few rows have decide first, for a whole tile takes a step that one row has. Rows of
one short word are counted into buckets between words that were drawn from them: nearly as good as
sorting them all, in two launches instead of a dozen. Which steps are rare is another question among
rows that have much in common already. So windows of that order are sorted once more, by what is
rare in each: tiles of real clouds then have 1 to 24 % fewer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum.compat.streams import current_stream
from insum.compat.tensors import empties, empty
from insum.plan.strategies.packing import TILE
from insum.runtime import launch
from insum.runtime.handwritten.kernel import BLOCK, Handwritten, blocks

#: Steps of the widest table that is packed here: its lists have room for all of them.
MOST_STEPS = 512
#: Pieces that the tiles of all steps are cut into, where rows are summed: programs enough for a
#: large device. Each step has one more at most.
PIECES = 396
#: Tiles that are looked at to tell how many pieces each step deserves.
LOOKED_AT = 2048
#: Rows that are sorted by one program, and as many words are drawn to tell the buckets apart.
WINDOW, BUCKETS = 1024, 256
#: Bits of several words that a key has besides the place of the first, for which 10 are left. By
#: such keys, tiles of real clouds have at most 0.6 % more steps than sorted by all words.
FIRST_BITS = 53
#: Bits of a part of a word, whose rows are looked at together, and parts of the rows of which
#: windows are sorted; and how many bits of all parts, the rarest, decide there.
PART, MOST_PARTS, LOCAL_BITS = 31, 4, 52
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
        runs: what calls ran on the table, by the number of the call, stream and epoch of programs.
        inverse: the map of the way back, which leads from ``y`` to ``x``, where there is one. By a
            weak reference: that one knows this one, too.
        stream: on which the table was made.
    """

    __slots__ = (
        *("comes_back", "first", "inverse", "made", "mirrored", "names", "runs", "stream"),
        "words",
    )

    def __init__(self, names: Tensor, words: Tensor, mirrored: bool) -> None:
        self.stream = current_stream(words.device) if words.is_cuda else 0
        self.names, self.words, self.mirrored = names, words, mirrored
        self.comes_back = False
        self.first: int | None = None
        self.made: dict[object, Any] = {}
        self.runs: dict[object, Any] = {}
        self.inverse: weakref.ref[Tensor] | None = None


def words_for(rows: int, steps: int) -> tuple[int, tuple[torch.dtype, tuple[int, int]]]:
    """How many bits the words of rows have, and their dtype and shape: (words, rows)."""
    # short words are sorted in half the time
    per, dtype = (PART, torch.int32) if steps <= PART else (2 * PART, torch.int64)
    return per, (dtype, (-(-steps // per), rows))


def bits_per_word(steps: int) -> int:
    return words_for(0, steps)[0]


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
#: The place of a word in the reflected binary code.
_RANK = """@triton.jit
def insum_rank(word):
    word = word ^ (word >> 1)
    word = word ^ (word >> 2)
    word = word ^ (word >> 4)
    word = word ^ (word >> 8)
    word = word ^ (word >> 16)
    return word ^ (word >> 32)


"""
#: The bucket of a rank: how many of the limits, which ascend, it does not reach.
_BUCKET = f"""@triton.jit
def insum_bucket(rank, limits):
    below = (rank * 0).to(tl.int32)
    for power in tl.static_range({(BUCKETS - 1).bit_length()}):
        further = below + ({BUCKETS // 2} >> power)
        below = tl.where(tl.gather(limits, further, 0) <= rank, further, below)
    return {BUCKETS - 1} - below


"""
_COUNT = Handwritten(
    "insum_count_words",
    _ORDERED
    + _RANK
    + _BUCKET
    + f"""@triton.jit
def insum_count_words(words_ptr, counts_ptr, rows: "i64"):
    window = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, {WINDOW})
    bin = tl.arange(0, {BUCKETS})
    drawn = tl.load(words_ptr + lane * rows // {WINDOW}).to(tl.int64)
    drawn = insum_ordered(insum_rank(drawn) * {WINDOW} + lane)
    limits = tl.gather(drawn, bin * {WINDOW // BUCKETS}, 0) // {WINDOW}
    limits_ptr = counts_ptr + tl.num_programs(0) * {BUCKETS}
    tl.store(limits_ptr + bin, limits.to(tl.int32), mask=window + bin * 0 == 0)
    at = window * {WINDOW} + lane
    word = tl.load(words_ptr + at, mask=at < rows, other=0).to(tl.int64)
    bucket = insum_bucket(insum_rank(word), limits)
    # What is beyond the rows is counted into the last bucket, where it comes last.
    count = tl.histogram(tl.where(at < rows, bucket, {BUCKETS - 1}), {BUCKETS})
    tl.store(counts_ptr + window * {BUCKETS} + bin, count)
""",
)
_PLACE = Handwritten(
    "insum_place_words",
    _ORDERED
    + _RANK
    + _BUCKET
    + f"""@triton.jit
def insum_place_words(words_ptr, counts_ptr, order_ptr, rows: "i64", windows: "i64"):
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
    limits = tl.load(counts_ptr + windows * {BUCKETS} + bin).to(tl.int64)
    bucket = insum_bucket(insum_rank(word), limits)
    bucket = tl.where(at < rows, bucket, {BUCKETS - 1})
    ordered = insum_ordered(bucket * {WINDOW} + lane)
    # A row's place: where its bucket starts, what other windows have of it, what is ahead here.
    start = tl.cumsum(total, 0) - total + before - (tl.cumsum(own, 0) - own)
    row = window * {WINDOW} + ordered % {WINDOW}
    tl.store(order_ptr + tl.gather(start, ordered // {WINDOW}, 0) + lane, row, mask=row < rows)
""",
)


def _sorted_window(parts: int) -> str:
    """Rows of a window by their words, of which there are so many parts, what is rare in the window
    deciding first; what is beyond the rows comes last. Bits that no row has decide nothing.
    """
    lines = ["one_bit = tl.arange(0, 32)"]
    for k in range(parts):
        word, shift = divmod(k, 2)
        load = f"tl.load(bits_ptr + {word} * rows + row, mask=there, other=0).to(tl.int64)"
        lines += [
            f"part{k} = (({load} >> {PART * shift}) & {(1 << PART) - 1}).to(tl.int32)",
            f"count{k} = tl.sum((part{k}[:, None] >> one_bit[None, :]) & 1, 0)",
            f"count{k} = tl.where(count{k} == 0, {2 * WINDOW}, count{k})",
        ]
    lowest = max(0, 32 * parts - LOCAL_BITS)
    lines.append(f"local = tl.zeros([{WINDOW}], tl.int64)")
    for k in range(parts):
        lines.append(f"place{k} = tl.zeros([32], tl.int32)")
        for other in range(parts):
            counts, own = f"count{other}[None, :]", f"count{k}[:, None]"
            ahead = f"({counts} {'>=' if other < k else '>'} {own})"
            if other == k:  # of as many, the first is ahead
                ahead += f" | (({counts} == {own}) & (one_bit[None, :] < one_bit[:, None]))"
            lines.append(f"place{k} += tl.sum(({ahead}).to(tl.int32), 1)")
        lines += [
            f"for which in range({PART}):",
            f"    goes_to = tl.sum(tl.where(one_bit == which, place{k}, 0), 0) - {lowest}",
            f"    own = ((part{k} >> which) & 1).to(tl.int64)",
            "    local |= tl.where(goes_to >= 0, own << tl.maximum(goes_to, 0).to(tl.int64), 0)",
        ]
    lines += [
        f"largest = {(1 << LOCAL_BITS) - 1}",
        "rank = tl.where(there, insum_rank(local), -1)",
        f"ordered = insum_ordered((largest - rank) * {WINDOW} + lane)",
        f"there = largest - (ordered >> {WINDOW.bit_length() - 1}) >= 0",
        f"row = tl.load(order_ptr + first_row + (ordered & {WINDOW - 1}), mask=there, other=0)",
    ]
    return "".join(f"    {line}\n" for line in lines)


def _steps(parts: int) -> Handwritten:
    """Tiles of rows in an order; where their words have no more than so many parts, windows of the
    order are sorted once more.
    """
    length = WINDOW if parts else TILE
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
{_sorted_window(parts) if parts else ""}
    tl.store(rows_ptr + at, tl.where(there, row, -1).to(tl.int32), mask=at < tiles * {TILE})
    tile = first_row // {TILE} + tl.arange(0, {length // TILE})
    real = tile < tiles
    first = tile * steps
    last = first
    bit = tl.arange(0, 64)
    for number in range((steps + per - 1) // per):
        bits = tl.load(bits_ptr + number * rows + row, mask=there, other=0).to(tl.int64)
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
    return Handwritten("insum_steps", _ORDERED + _RANK + text, warps=8 if parts else 4)


#: One key for all words of a row, of which one follows the other as the rank of one long word
#: would: as floating-point numbers do, it has where that begins and the bits that come first.
_KEYS = Handwritten(
    "insum_keys",
    _RANK
    + f"""@triton.jit
def insum_keys(words_ptr, keys_ptr, rows: "i64", words: "i64", per: "i64"):
    at = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    there = at < rows
    # A rank runs backwards where the bits above it are odd in number: the lowest of their rank.
    odd = tl.zeros([256], tl.int64)
    rank = odd
    begin = odd
    first = odd
    length = odd
    for number in range(words):
        word = words - 1 - number
        rank = insum_rank(tl.load(words_ptr + word * rows + at, mask=there, other=0).to(tl.int64))
        rank = tl.where(odd > 0, (tl.full([], 1, tl.int64) << per) - 1 - rank, rank)
        odd = rank & 1
        # How many bits the rank has from its first on.
        rest = rank
        bits = tl.where(rank > 0, 1, 0).to(tl.int64)
        for power in tl.static_range(6):
            long = rest >= (1 << (32 >> power))
            bits = tl.where(long, bits + (32 >> power), bits)
            rest = tl.where(long, rest >> (32 >> power), rest)
        begins = (begin == 0) & (rank > 0)
        begin = tl.where(begins, word * per + bits, begin)
        bits = tl.where(begins, bits, per)
        taken = tl.where(begin > 0, tl.minimum(bits, {FIRST_BITS} - length), 0)
        first = (first << taken) | tl.where(taken > 0, rank >> (bits - taken), 0)
        length += taken
    key = (begin << {FIRST_BITS}) | (first << ({FIRST_BITS} - length))
    key = tl.where(words == 1, rank, key)
    tl.store(keys_ptr + at, key.to(keys_ptr.dtype.element_ty), mask=there)
""",
)
#: By the parts that words have, where windows are sorted once more; else 0.
_STEPS = {parts: _steps(parts) for parts in range(MOST_PARTS + 1)}
_BY_STEP = Handwritten(
    "insum_by_step",
    f"""@triton.jit
def insum_tiles_of_steps(held_ptr, tiles, apart):
    bit = tl.arange(0, 64)
    count = tl.zeros([64], tl.int64)
    for first in range(0, tl.cdiv(tiles, apart), 64):
        tile = (first + tl.arange(0, 64)) * apart
        held = tl.load(held_ptr + tile, mask=tile < tiles, other=0)
        count += tl.sum((held[None, :] >> bit[:, None]) & 1, 1)
    return count


@triton.jit
def insum_by_step(
    held_ptr, names_ptr, tile_ptr, step_ptr, start_ptr, end_ptr, tiles: "i64", per: "i64",
    turned: "i64",
):
    name = tl.program_id(0).to(tl.int64)
    steps = tl.num_programs(0).to(tl.int64)
    words = tl.cdiv(steps, per)
    # Every program comes to the same number of pieces for each step, from the same tiles.
    apart = tl.cdiv(tiles, {LOOKED_AT})
    total = tl.zeros([], tl.int64)
    for number in range(words):
        total += tl.sum(insum_tiles_of_steps(held_ptr + number * tiles, tiles, apart), 0)
    share = tl.maximum(tl.cdiv(total, {PIECES}), 1)
    ahead = tl.zeros([], tl.int64)
    every = tl.zeros([], tl.int64)
    upto = tl.zeros([], tl.int64)
    for number in range(words):
        count = insum_tiles_of_steps(held_ptr + number * tiles, tiles, apart)
        pieces = tl.maximum(tl.cdiv(count, share), 1)
        other = number * per + tl.arange(0, 64)
        real = (tl.arange(0, 64) < per) & (other < steps)
        every += tl.sum(tl.where(real, pieces, 0), 0)
        ahead += tl.sum(tl.where(real & (other < name), pieces, 0), 0)
        upto += tl.sum(tl.where(real & (other <= name), pieces, 0), 0)
    own = upto - ahead
    held_ptr += name // per * tiles
    bit = name % per
    count = tl.zeros([], tl.int64)
    for first in range(0, tiles, 1024):
        tile = first + tl.arange(0, 1024)
        held = tl.load(held_ptr + tile, mask=tile < tiles, other=0)
        has = ((held >> bit) & 1).to(tl.int64)
        place = count + tl.cumsum(has, 0) - has
        tl.store(tile_ptr + name * tiles + place, tile.to(tl.int32), mask=has > 0)
        count += tl.sum(has, 0)
    # Triton does not compile a division by what it takes for 0; there is a piece for every step.
    length = tl.maximum(tl.cdiv(count, tl.maximum(own, 1)), 1)
    step = tl.load(names_ptr + name).to(tl.int32)
    step = tl.where(turned > 0, steps.to(tl.int32) - 1 - step, step)
    # The last program also writes the pieces that are left over, which have nothing.
    more = tl.where(name == steps - 1, {PIECES} + steps - every, 0)
    for first in range(0, own + more, 64):
        piece = first + tl.arange(0, 64)
        there = piece < own + more
        start = tl.minimum(piece * length, count)
        end = tl.minimum(start + length, count)
        at = ahead + piece
        tl.store(step_ptr + at, step + (piece * 0).to(tl.int32), mask=there)
        tl.store(start_ptr + at, (name * tiles + start).to(tl.int32), mask=there)
        tl.store(end_ptr + at, (name * tiles + end).to(tl.int32), mask=there)
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
    per, room = words_for(rows, steps)
    words = empties(table.device, words=room)["words"]
    first = offset * table.stride(step_at)
    strides = table.stride(row_at), coefficient * table.stride(step_at), first
    programs = blocks(rows, 256) * words.shape[0]
    _BITS(programs, table, names, words, rows, steps, per, *strides)
    return words


def order_of(words: Tensor, steps: int, *, thorough: bool) -> Tensor:
    """Rows by their words; those with the rarest steps, which have the highest bits, come first.
    Unless it is to be ``thorough``, short words are told apart by buckets alone: windows are sorted
    later (`tiled`).
    """
    rows, device = words.shape[1], words.device
    windows = -(-rows // WINDOW)
    if words.dtype == torch.int32 and windows <= MOST_WINDOWS and not thorough:
        made = empties(
            device,
            counts=(torch.int32, (windows + 1, BUCKETS)),  # the last: their limits
            order=(torch.int64, (rows,)),
        )
        _COUNT(windows, words, made["counts"], rows)
        _PLACE(windows, words, made["counts"], made["order"], rows, windows)
        return made["order"]
    keys = empty((rows,), words.dtype, device)
    _KEYS(blocks(rows, 256), words, keys, rows, words.shape[0], bits_per_word(steps))
    return torch.argsort(keys, descending=True, stable=True)


def tiled(words: Tensor, order: Tensor, names: Tensor) -> dict[str, Tensor]:
    """Tiles of rows in an order, and the steps of each, by the ``names`` of the bits: forwards, and
    ``back``, counted from the last.
    """
    (count, rows), steps = words.shape, names.shape[0]
    tiles, device = -(-rows // TILE), words.device
    kind = torch.int32
    most, each = (kind, (tiles * steps,)), (kind, (tiles,))
    made = empties(
        device,
        rows=(kind, (tiles, TILE)),
        steps=most,
        back=most,
        start=each,
        end=each,
        held=(torch.int64, (count, tiles)),
    )
    parts, per = -(-steps // PART), PART if words.dtype == torch.int32 else 2 * PART
    parts = parts if parts <= MOST_PARTS else 0
    programs = -(-rows // WINDOW) if parts else tiles
    _STEPS[parts](programs, words, order, names, *made.values(), rows, steps, per, tiles)
    made["names"] = names
    return made


def heaviest_first(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tiles, those with many steps first: what ends last is then short."""
    order = torch.argsort(found["end"] - found["start"], descending=True, stable=True)
    turned = {name: found[name][order] for name in ("rows", "start", "end")}
    return {**found, **turned, "held": found["held"][:, order]}


def by_step(held: Tensor, names: Tensor, *, turned: bool) -> dict[str, Tensor]:
    """The tiles that have each step, in pieces; ``turned``: steps are counted from the last."""
    tiles, steps, device = held.shape[1], names.shape[0], held.device
    each = torch.int32, (PIECES + steps,)
    made = empties(device, tile=(torch.int32, (steps * tiles,)), step=each, start=each, end=each)
    _BY_STEP(steps, held, names, *made.values(), tiles, bits_per_word(steps), int(turned))
    return made


def inverted(table: Tensor, rows: int) -> Tensor:
    """``inverse[z,y] = x`` where ``table[z,x] = y``, which at most one x does; else -1."""
    table = table.contiguous()
    found = torch.full((table.shape[0], rows), -1, dtype=torch.int32, device=table.device)
    columns, count = table.shape[1], table.numel()
    _INVERT(blocks(count), table, found, columns, count, rows)
    return found
