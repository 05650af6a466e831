"""Several statements on the same tensors in one launch, where one kernel can write all their
results (`plan.beside`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum.bounded import keep
from insum.lang.bind import Value
from insum.plan.beside import beside_each_other, together
from insum.plan.sizes import beside
from insum.runtime.bound_launch import BoundLaunch, CallNumbers, compile_at_once
from insum.runtime.build import first_choice, step_of
from insum.runtime.fused import FusedCall
from insum.runtime.program import ProductLaunches, Program
from insum.runtime.ready import NotYet, Ready, has_nothing

#: Sets of other statements that one is computed with.
MOST_SETS = 16


class ReadyTogether:
    """One launch that writes the results of several statements, the first of which owns its
    loops.
    """

    __slots__ = ("bound", "index", "ready")

    def __init__(self, ready: tuple[Ready, ...], bound: BoundLaunch) -> None:
        self.ready, self.bound, self.index = ready, bound, ready[0].index

    def __call__(self, values: Mapping[str, Any]) -> list[Tensor]:
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self(values)
        results = [one.new() for one in self.ready]
        every = dict(values)
        for number, result in enumerate(results[1:], 1):
            every[beside(number)] = result
        self.bound(every, results[0], results[0])
        return results


def run_together(
    calls: Sequence[FusedCall], values: Sequence[Mapping[str, Value]]
) -> list[Tensor | None]:
    """Of several calls on tensors that have the same names in all of them, the results of those
    that one launch computes; None for those that are to be run by themselves.
    """
    results: list[Tensor | None] = [None] * len(calls)
    ready = {k: found for k, call in enumerate(calls) if (found := _ready(call, values[k]))}
    order = _order({k: one.program for k, one in ready.items()})
    compile_at_once(
        bound
        for k, one in ready.items()
        if k not in order or len(order) < 2
        for bound in one.launches
    )
    if len(order) < 2:
        return results
    every = {name: value for k in order for name, value in values[k].items()}
    try:
        one = _together([calls[k] for k in order], tuple(ready[k] for k in order), every)
    except NotYet:
        return results
    if one is not None:
        for k, result in zip(order, one(every)):
            results[k] = result
    return results


def _order(programs: Mapping[int, Program]) -> list[int]:
    """Which of these one kernel writes, found out the first time."""
    if len(programs) < 2:
        return []
    held, key = next(iter(programs.values())).orders, tuple(programs.items())
    found = held.get(key)
    if found is None:
        planned = {k: one.steps[0].planned for k, one in programs.items()}
        found = keep(held, key, beside_each_other(planned), MOST_SETS)
    return found


def _ready(call: FusedCall, values: Mapping[str, Value]) -> Ready | None:
    """What would run a call, where it is one kernel that has nothing to look for or to convert."""
    if call.kind.negated:
        return None
    found, _, _ = call.looked_up(values, None)
    if not isinstance(found, Ready) or found.check is not None or found.buffer is not None:
        return None
    return found if len(found.program.steps) == 1 and found.launches else None


def _together(
    calls: Sequence[FusedCall], ready: tuple[Ready, ...], values: Mapping[str, Value]
) -> ReadyTogether | None:
    kept, others = ready[0].together, ready[1:]
    if others in kept:
        ready_before: ReadyTogether | None = kept[others]
        return ready_before
    found: ReadyTogether | None = keep(kept, others, _bound(calls, ready, values), MOST_SETS)
    return found


def _bound(
    calls: Sequence[FusedCall], ready: tuple[Ready, ...], values: Mapping[str, Value]
) -> ReadyTogether | None:
    step, first = _step(tuple(one.program for one in ready)), calls[0]
    sized = first.sized
    if step is None or has_nothing(step, sized.extents, sized.shape):
        return None
    prologue, made = first.prologue(values), {}
    for recipe in step.recipes():
        found = prologue.soon(recipe)
        if found is None:
            raise NotYet
        made[recipe] = found
    outputs = {
        beside(number): torch.empty(call.sized.shape, dtype=one.dtype, device="meta")
        for number, (call, one) in enumerate(zip(calls[1:], ready[1:]), 1)
    }
    numbers = CallNumbers({**values, **outputs}, sized.extents, sized.shape, made)
    (launch,) = step.launches
    return ReadyTogether(ready, BoundLaunch(launch, launch.plan, numbers, ready[0].dtype))


def _step(programs: tuple[Program, ...]) -> ProductLaunches | None:
    """One kernel for all programs, written the first time."""
    first, others = programs[0], programs[1:]
    if others in first.together:
        return first.together[others]
    planned = together(first.steps[0].planned, [one.steps[0].planned for one in others])
    step = None
    if planned is not None:
        step = step_of(planned, first.wishes, first_choice(planned, first.wishes), None)
    return keep(first.together, others, step, MOST_SETS)
