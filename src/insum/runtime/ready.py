"""A program for one call: its recipes evaluated, so that only addresses are missing.

`Ready` is what is left to do at every call of the same sizes and strides: put addresses into lists
of numbers, and launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.compat import streams
from insum.compat.tensors import maker
from insum.lang.expr import variables
from insum.plan.recipes import Recipe
from insum.plan.sizes import BASE, OUT, WORK
from insum.runtime import launch
from insum.runtime.bound_launch import (
    COPIES,
    BoundLaunch,
    CallNumbers,
    Placed,
    plain_number,
)
from insum.runtime.program import ProductLaunches, Program
from insum.runtime.prologue.made import Made
from insum.runtime.prologue.prologue import Prologue

#: By name, what makes the workspaces of a step.
Rooms: TypeAlias = tuple[tuple[str, Callable[[], Tensor]], ...]
#: Of a step what makes its workspaces, by number, and its launches.
PlacedStep: TypeAlias = tuple[tuple[tuple[int, Callable[[], Tensor]], ...], tuple[Placed, ...]]


class NotYet(Exception):
    """Numbers that decide a schedule are still on their way from the device."""


class Ready:
    """A program with everything of one call but addresses: launching it is all that is left to
    do. It can be called again with tensors of the same sizes and strides, and the same index
    tensors where it holds what was derived from them.
    """

    __slots__ = (
        *("based", "buffer", "check", "device", "dtype", "empty", "filled", "index"),
        *("__weakref__", "program", "promotable", "reads", "settled", "start", "steps", "work"),
    )

    def __init__(self, program: Program, sizes: CallNumbers) -> None:
        problem = program.problem
        self.program, self.buffer, self.dtype = program, program.buffer, problem.dtype
        self.start, self.based = program.start, program.wishes.base == BASE
        strategies = [step.planned.plan.strategy for step in program.steps]
        self.promotable = strategies == ["onehot"] and program.promotes
        held = program.buffer or problem.dtype
        device = self.device = problem.device
        self.empty = maker(sizes.shape, held, device)
        new = OUT not in sizes.tensors
        several = device.type == "cuda" and torch.cuda.device_count() > 1
        self.index = device.index if several else None
        if program.buffer is not None and OUT in sizes.tensors:
            tensors = {n: t for n, t in sizes.tensors.items() if n != OUT}
            sizes = CallNumbers(tensors, sizes.extents, sizes.shape, sizes.made)
        self.work = tuple(_bound(step, sizes, held, device) for step in program.steps)
        first = program.steps[0]
        self.filled = first.atomic or not self.work[0][1] or _needs_fill(first, sizes)
        self.check = None
        if program.check is not None and self.launches:
            self.check = _bound_check(program, sizes, held, filled=self.filled and new)
        #: Whether it only has to be launched.
        self.settled = self.check is None and not self.promotable
        #: Names of what launches are passed, in the order in which `run` takes it.
        self.reads = _passed_to(self.launches)
        own = (*self.reads, *_OWN_MEMORY)
        self.steps = _placed(self.work, {name: number for number, name in enumerate(own)})

    @property
    def launches(self) -> list[BoundLaunch]:
        return [one for _, launches in self.work for one in launches]

    def __call__(
        self, values: Mapping[str, Any], target: Tensor | None = None, *, look: bool = False
    ) -> Tensor:
        """Launch everything, on the program's device; without a ``target`` into a new tensor.
        ``look``: at unchecked indices first, with what the record of the device takes among
        ``values``.
        """
        by_address, sources = not launch.interpreting(), []
        for name in self.reads:
            value = values[name]
            if isinstance(value, Tensor):
                sources.append(value.data_ptr() if by_address else value)
            else:
                sources.append(plain_number(value))
        base = values[BASE] if self.based else None
        return self.run(sources, target, values if look else None, base)

    def run(
        self,
        sources: list[Any],
        target: Tensor | None,
        looks_at: Mapping[str, Any] | None = None,
        base: Tensor | None = None,
    ) -> Tensor:
        """The same, of the addresses and numbers of `reads`; in Triton's interpreter, of tensors.
        ``looks_at``: values for the launch that looks at indices, where it is to. ``base``: what
        is accumulated from, where the launches leave places as they are.
        """
        if self.index is not None and self.index != streams.device_now():
            with torch.cuda.device(self.index):
                return self.run(sources, target, looks_at, base)
        if target is None:
            out = self.empty()
            if self.filled and looks_at is None:
                out.fill_(self.start) if base is None else out.copy_(base)
        elif self.buffer is None:
            out = target
        else:
            out = target.to(self.buffer, memory_format=torch.contiguous_format, copy=True)
        if looks_at is not None and self.check is not None:
            self.check(looks_at, out, out)
        by_address = not launch.interpreting()
        at = out.data_ptr() if by_address else out
        sources += (at,) * len(_OWN_MEMORY)  # of a workspace without slots nothing is read
        for rooms, launches in self.steps:
            held = []  # until everything is launched
            for number, make in rooms:
                held.append(room := make())
                sources[number] = room.data_ptr() if by_address else room
            for one, programs, numbers, unaligned, moves in launches:
                arguments = numbers.copy()
                for place, number, bit in moves:
                    arguments[place] = found = sources[number]
                    if bit and found & 15:
                        unaligned |= bit
                if by_address:
                    (one.variants.get(unaligned) or one.launcher(unaligned))(programs, arguments)
                else:
                    one.interpret(programs, arguments)
        if self.buffer is None:
            return out
        return out.to(self.dtype) if target is None else target.copy_(out)


#: Memory of a call, whose addresses come behind those of what it reads.
_OWN_MEMORY = (OUT, WORK, *COPIES)


def _passed_to(launches: Iterable[BoundLaunch]) -> tuple[str, ...]:
    """Names of what launches read and do not hold."""
    names: dict[str, None] = {}
    for one in launches:
        pointers = (n for _, n, _ in one.pointers if n not in one.held and n not in _OWN_MEMORY)
        names |= dict.fromkeys((*pointers, *(name for _, name in one.passed)))
    return tuple(names)


def _placed(
    work: Iterable[tuple[Rooms, tuple[BoundLaunch, ...]]], numbers: Mapping[str, int]
) -> tuple[PlacedStep, ...]:
    """Steps that have something to launch."""
    found = []
    for rooms, launches in work:
        placed = tuple(one.placed(numbers) for one in launches if one.programs)
        if placed:
            found.append((tuple((numbers[name], make) for name, make in rooms), placed))
    return tuple(found)


def has_nothing(step: ProductLaunches, extents: Mapping[str, int], shape: tuple[int, ...]) -> bool:
    """Whether a product is over no values, or of no elements: others of the statement may do."""
    return not all(extents[v] for v in step.variables) or 0 in shape


def _bound(
    step: ProductLaunches, sizes: CallNumbers, dtype: torch.dtype, device: torch.device
) -> tuple[Rooms, tuple[BoundLaunch, ...]]:
    """Of a step what makes its workspaces, where it has some, and its launches."""
    if has_nothing(step, sizes.extents, sizes.shape):
        return (), ()
    launches = tuple(BoundLaunch(one, one.plan, sizes, dtype) for one in step.launches)
    rooms = tuple(
        (name, maker(room, held, device)) for name, room, held in sizes.rooms(step) if 0 not in room
    )
    return rooms, launches


def _bound_check(
    program: Program, sizes: CallNumbers, dtype: torch.dtype, *, filled: bool
) -> BoundLaunch:
    """The launch that looks at index values, and fills a new output where it is to be filled."""
    one = program.check
    assert one is not None
    points = [math.prod(sizes.extents[v] for v in variables(u.index)) for u in program.unchecked]
    count = math.prod(sizes.shape) if filled else 0
    numbers = {"most": max([count, *points]), "out_count": count}
    return BoundLaunch(one, one.plan, sizes, dtype, numbers)


def _needs_fill(step: ProductLaunches, sizes: CallNumbers) -> bool:
    """Whether a new result is filled with what it starts from before anything is launched."""
    planned = step.planned
    if not planned.fill:
        return False
    if planned.covers is not None:
        written, places = planned.covers
        return sizes.expr(written) != sizes.expr(places)
    if planned.written is not None:
        dim, count = planned.written
        return sizes.shape[dim] != count
    return True


def ready(
    program: Program,
    tensors: Mapping[str, Any],
    extents: Mapping[str, int],
    shape: tuple[int, ...],
    prologue: Prologue,
) -> Ready:
    """The program for one call; `NotYet` where numbers are still on their way."""
    made: dict[Recipe, Made] = {}
    busy = [step for step in program.steps if not has_nothing(step, extents, shape)]
    for recipe in dict.fromkeys(recipe for step in busy for recipe in step.recipes()):
        found = prologue.soon(recipe)
        if found is None:
            raise NotYet
        made[recipe] = found
    return Ready(program, CallNumbers(tensors, extents, shape, made))
