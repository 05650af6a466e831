"""The places that a kernel reaches from given coordinates, each once, in ascending order: made on
the device by few launches, with one look at their number.

A place is held by its key, its number in the box of all places, counted row by row; keys are
sorted, and each is kept where it differs from the one before: those are counted by blocks, and
blocks by groups, so that each knows how many are ahead of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insum.compat.tensors import empty
from insum.runtime.handwritten.hashing import _EVERY, _Axes
from insum.runtime.handwritten.kernel import BLOCK, Handwritten, blocks

#: The key of no place.
NOWHERE = 2**63 - 1
#: Blocks of keys that are counted together.
GROUP = 64


@dataclass(frozen=True)
class Steps:
    """How a kernel leads from inputs to outputs: ``output = (input + padding) // stride - step``,
    where the rest is an offset of the kernel, or, transposed, ``input * stride - padding + step``.

    Attributes:
        steps: (steps, dimensions), int64, on the device.
        reach: From the first offset of the kernel to the last, along each axis.
        shape: The size of the outputs' grid, where it has one.
    """

    steps: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    reach: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    shape: Sequence[int] | None


def _reacher(axes: _Axes) -> Handwritten:
    inner, deeper = "\n        ", "\n            "
    ends = """@_least = tl.load(least_ptr + 1 + #, mask=boxed == 0, other=0).to(tl.int64)
    @_most = tl.load(most_ptr + 1 + #, mask=boxed == 0, other=0).to(tl.int64)
    @_least = tl.where(boxed > 0, @_first, @_least)
    @_most = tl.where(boxed > 0, @_last, @_most)"""
    forth = """@_low = @_least * @_stride - @_pad
        @_high = @_most * @_stride - @_pad + @_reach"""
    back = """@_low = -insum_floor(@_reach - @_least - @_pad, @_stride)
        @_high = insum_floor(@_most + @_pad, @_stride)"""
    grid = """@_low = @_low * 0
        @_high = @_low + @_size - 1"""
    coarse = """@_fine = @_here + @_pad
            @ = insum_floor(@_fine, @_stride) - d@
            @_rest = @_fine - @ * @_stride
            found = found & (@_rest <= @_reach) & (@_rest // @_hole * @_hole == @_rest)"""
    number = """found = found & (@ >= @_low) & (@ <= @_high)
        key = key * @_extent + (@ - @_low)"""
    names = "stride", "pad", "reach", "hole", "size", "first", "last"
    sizes = (f'@_{name}: "i64"' for name in names)
    text = f"""@triton.jit
def insum_floor(a, b):
    return tl.where(a < 0, -((b - 1 - a) // b), a // b)


@triton.jit
def insum_reach(
    coords_ptr, least_ptr, most_ptr, steps_ptr, keys_ptr, counts_ptr, found_ptr, count: "i64",
    steps: "i64", blocks: "i64", groups: "i64", transposed: "i64", bounded: "i64", boxed: "i64",
    batch_first: "i64", batch_last: "i64", {", ".join(axes.each(one, ", ") for one in sizes)},
):
    b_low = tl.load(least_ptr, mask=boxed == 0, other=0).to(tl.int64)
    b_low = tl.where(boxed > 0, batch_first, b_low)
    b_most = tl.load(most_ptr, mask=boxed == 0, other=0).to(tl.int64)
    b_extent = tl.where(boxed > 0, batch_last, b_most) - b_low + 1
    {axes.each(ends)}
    if transposed > 0:
        {axes.each(forth, inner)}
    else:
        {axes.each(back, inner)}
    if bounded > 0:
        b_extent = b_extent + b_low
        b_low = b_low * 0
        {axes.each(grid, inner)}
    {axes.each("@_extent = tl.maximum(@_high - @_low + 1, 1)")}
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        tl.store(counts_ptr + blocks + group, 0)
    if tl.program_id(0) == 0:
        tl.store(found_ptr, b_low * 0)
        tl.store(found_ptr + 1, b_low)
        tl.store(found_ptr + {axes.columns + 1}, b_extent)
        {axes.each("tl.store(found_ptr + 2 + #, @_low)", inner)}
        {axes.each(f"tl.store(found_ptr + {axes.columns + 2} + #, @_extent)", inner)}
    row = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    there = row < count
    at = coords_ptr + row * {axes.columns} + 1
    b = tl.load(at - 1, mask=there, other=0).to(tl.int64)
    {axes.each("@_here = tl.load(at + #, mask=there, other=0).to(tl.int64)")}
    for step in range(steps):
        {axes.each(f"d@ = tl.load(steps_ptr + step * {len(axes)} + #)", inner)}
        found = there
        if transposed > 0:
            {axes.each("@ = @_here * @_stride - @_pad + d@", deeper)}
        else:
            {axes.each(coarse, deeper)}
        key = b - b_low
        {axes.each(number, inner)}
        key = tl.where(found, key, {NOWHERE})
        tl.store(keys_ptr + step * count + row, key, mask=there)
"""
    return Handwritten("insum_reach", text)


def _placer(axes: _Axes) -> Handwritten:
    lines = [
        line
        for axis, at in reversed([*zip(axes, range(1, axes.columns))])
        for line in (
            f"{axis}_extent = tl.load(found_ptr + {axes.columns + 1 + at})",
            f"rest = key // {axis}_extent",
            f"{axis} = key - rest * {axis}_extent + tl.load(found_ptr + {1 + at})",
            f"tl.store(own + {at}, {axis}, mask=first)",
            "key = rest",
        )
    ]
    body = "\n    ".join(lines)
    text = f"""@triton.jit
def insum_places(keys_ptr, counts_ptr, found_ptr, coords_ptr, count: "i64", blocks: "i64"):
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, {BLOCK})
    at = block * {BLOCK} + lane
    group = block // {GROUP}
    ahead = tl.zeros([], tl.int64)
    for start in range(0, group, {BLOCK}):
        other = start + lane
        held = tl.load(counts_ptr + blocks + other, mask=other < group, other=0)
        ahead += tl.sum(held.to(tl.int64), 0)
    other = group * {GROUP} + tl.arange(0, {GROUP})
    held = tl.load(counts_ptr + other, mask=other < block, other=0)
    ahead += tl.sum(held.to(tl.int64), 0)
    key = tl.load(keys_ptr + at, mask=at < count, other={NOWHERE})
    first = insum_first(keys_ptr, at, count, key)
    place = ahead + tl.cumsum(first.to(tl.int64), 0) - 1
    own = coords_ptr + place * {axes.columns}
    {body}
    tl.store(own, key + tl.load(found_ptr + 1), mask=first)
"""
    return Handwritten("insum_places", _FIRST + text)


#: Whether a key is that of a place, and the first of its kind.
_FIRST = f"""@triton.jit
def insum_first(keys_ptr, at, count, key):
    before = tl.load(keys_ptr + at - 1, mask=(at < count) & (at > 0), other=-1)
    return (key != {NOWHERE}) & (key != before)


"""
_FIRSTS = Handwritten(
    "insum_firsts",
    _FIRST
    + f"""@triton.jit
def insum_firsts(keys_ptr, counts_ptr, found_ptr, count: "i64", blocks: "i64"):
    block = tl.program_id(0).to(tl.int64)
    at = block * {BLOCK} + tl.arange(0, {BLOCK})
    key = tl.load(keys_ptr + at, mask=at < count, other={NOWHERE})
    number = tl.sum(insum_first(keys_ptr, at, count, key).to(tl.int32), 0)
    tl.store(counts_ptr + block, number)
    tl.atomic_add(counts_ptr + blocks + block // {GROUP}, number, sem="relaxed")
    tl.atomic_add(found_ptr, number.to(tl.int64), sem="relaxed")
""",
)
#: By the number of dimensions.
_REACHERS = {n: _reacher(axes) for n, axes in _EVERY.items()}
_PLACERS = {n: _placer(axes) for n, axes in _EVERY.items()}


@dataclass(frozen=True, eq=False)
class Ranked:
    """Ascending keys, with repetitions; how many in each block are the first of their kind, then in
    each group of blocks; and how many there are, with the box that the keys are of: low corner,
    then size.
    """

    keys: Tensor
    counts: Tensor
    found: Tensor

    def numbers(self) -> list[int]:
        """How many places there are, and the box; waits for the device."""
        numbers: list[int] = self.found.tolist()
        return numbers

    def coords(self, count: int) -> Tensor:
        """The coordinates of so many places, batch first."""
        columns, total = self.found.shape[0] // 2, self.keys.shape[0]
        made, programs = empty((count, columns), torch.int64, self.keys.device), blocks(total)
        kernel = _PLACERS[columns - 1]
        kernel(programs, self.keys, self.counts, self.found, made, total, programs)
        return made


def ranked(
    coords: Tensor, how: Steps, ends: tuple[Sequence[int], Sequence[int]] | None = None
) -> Ranked:
    """What is reached from contiguous coordinates (N, 1 + dimensions), of which there are some;
    ``ends``: between which they lie, both included, where that is known.
    """
    (count, columns), device = coords.shape, coords.device
    steps, ndim = how.steps.shape[0], columns - 1
    total, programs = steps * count, blocks(steps * count)
    groups = blocks(programs, GROUP)
    keys = empty((total,), torch.int64, device)
    counts = empty((programs + groups,), torch.int32, device)
    found = empty((1 + 2 * columns,), torch.int64, device)
    least, most = (coords, coords) if ends else torch.aminmax(coords, dim=0)
    first, last = ends or ((0,) * columns, (0,) * columns)
    _REACHERS[ndim](
        blocks(count, 256),
        coords,
        least,
        most,
        how.steps,
        keys,
        counts,
        found,
        count,
        steps,
        programs,
        groups,
        int(how.transposed),
        int(how.shape is not None),
        int(ends is not None),
        first[0],
        last[0],
        *how.stride,
        *how.padding,
        *how.reach,
        *how.dilation,
        *(how.shape or (0,) * ndim),
        *first[1:],
        *last[1:],
    )
    ordered = keys.sort().values
    _FIRSTS(programs, ordered, counts, found, total, programs)
    return Ranked(ordered, counts, found)
