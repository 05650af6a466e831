"""The places that a kernel reaches from given coordinates, each once, in ascending order: made on
the device by few launches, with one look at their number.

A place is held by its key, its number in the box of all places, counted row by row; keys are
sorted, and each is kept where it differs from the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insum.compat.calls import empty
from insum.runtime.handwritten.hashing import _EVERY, _Axes
from insum.runtime.handwritten.kernel import Handwritten, blocks

#: The key of no place.
NOWHERE = 2**63 - 1


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
    ends = """@_least = tl.load(least_ptr + 1 + #).to(tl.int64)
    @_most = tl.load(most_ptr + 1 + #).to(tl.int64)"""
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
    sizes = (f'@_{name}: "i64"' for name in ("stride", "pad", "reach", "hole", "size"))
    text = f"""@triton.jit
def insum_floor(a, b):
    return tl.where(a < 0, -((b - 1 - a) // b), a // b)


@triton.jit
def insum_reach(
    coords_ptr, least_ptr, most_ptr, steps_ptr, keys_ptr, box_ptr, count: "i64", steps: "i64",
    transposed: "i64", bounded: "i64", {", ".join(axes.each(one, ", ") for one in sizes)},
):
    b_low = tl.load(least_ptr).to(tl.int64)
    b_extent = tl.load(most_ptr).to(tl.int64) - b_low + 1
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
    if tl.program_id(0) == 0:
        tl.store(box_ptr, b_low)
        tl.store(box_ptr + {axes.columns}, b_extent)
        {axes.each("tl.store(box_ptr + 1 + #, @_low)", inner)}
        {axes.each(f"tl.store(box_ptr + {axes.columns + 1} + #, @_extent)", inner)}
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
            f"{axis}_extent = tl.load(box_ptr + {axes.columns + at})",
            f"rest = key // {axis}_extent",
            f"{axis} = key - rest * {axis}_extent + tl.load(box_ptr + {at})",
            f"tl.store(own + {at}, {axis}, mask=first)",
            "key = rest",
        )
    ]
    body = "\n    ".join(lines)
    text = f"""@triton.jit
def insum_places(keys_ptr, first_ptr, place_ptr, box_ptr, coords_ptr, count: "i64"):
    at = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    first = tl.load(first_ptr + at, mask=at < count, other=0) > 0
    key = tl.load(keys_ptr + at, mask=first, other=0)
    place = tl.load(place_ptr + at, mask=first, other=1) - 1
    own = coords_ptr + place * {axes.columns}
    {body}
    tl.store(own, key + tl.load(box_ptr), mask=first)
"""
    return Handwritten("insum_places", text)


_FIRSTS = Handwritten(
    "insum_firsts",
    f"""@triton.jit
def insum_firsts(keys_ptr, first_ptr, count: "i64"):
    at = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    there = at < count
    key = tl.load(keys_ptr + at, mask=there, other={NOWHERE})
    before = tl.load(keys_ptr + at - 1, mask=there & (at > 0), other=-1)
    first = (key != {NOWHERE}) & (key != before)
    tl.store(first_ptr + at, first.to(tl.int32), mask=there)
""",
)
#: By the number of dimensions.
_REACHERS = {n: _reacher(axes) for n, axes in _EVERY.items()}
_PLACERS = {n: _placer(axes) for n, axes in _EVERY.items()}


@dataclass(frozen=True, eq=False)
class Ranked:
    """Ascending keys, with repetitions, which of them are the first of their kind, the place of
    each among those, and the box that the keys are of: low corner, then size.
    """

    keys: Tensor
    first: Tensor
    place: Tensor
    box: Tensor

    def numbers(self) -> list[int]:
        """How many places there are, and the box; waits for the device."""
        found: list[int] = torch.cat([self.place[-1:], self.box]).tolist()
        return found

    def coords(self, count: int) -> Tensor:
        """The coordinates of so many places, batch first."""
        columns, device = self.box.shape[0] // 2, self.keys.device
        made = empty((count, columns), torch.int64, device)
        total = self.keys.shape[0]
        kernel = _PLACERS[columns - 1]
        kernel(blocks(total), self.keys, self.first, self.place, self.box, made, total)
        return made


def ranked(coords: Tensor, how: Steps) -> Ranked:
    """What is reached from contiguous coordinates (N, 1 + dimensions), of which there are some."""
    (count, columns), device = coords.shape, coords.device
    steps, ndim = how.steps.shape[0], columns - 1
    keys = empty((steps * count,), torch.int64, device)
    box = empty((2 * columns,), torch.int64, device)
    least, most = torch.aminmax(coords, dim=0)
    _REACHERS[ndim](
        blocks(count, 256),
        coords,
        least,
        most,
        how.steps,
        keys,
        box,
        count,
        steps,
        int(how.transposed),
        int(how.shape is not None),
        *how.stride,
        *how.padding,
        *how.reach,
        *how.dilation,
        *(how.shape or (0,) * ndim),
    )
    ordered = keys.sort().values
    first = empty((steps * count,), torch.int32, device)
    _FIRSTS(blocks(steps * count), ordered, first, steps * count)
    return Ranked(ordered, first, first.cumsum(0), box)
