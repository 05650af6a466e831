"""Several statements on the same tensors in one launch, where one kernel can write all their
results (`plan.beside`).

What runs them is a program like any other, of the statement that owns the loops: the results of the
others are tensors that it is passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.lang.bind import Value
from insum.plan.beside import beside_each_other, together
from insum.plan.sizes import beside
from insum.runtime.bound_launch import compile_at_once
from insum.runtime.build import first_choice, step_of
from insum.runtime.fused import FusedCall
from insum.runtime.program import Program
from insum.runtime.ready import NotYet, Ready, has_nothing, ready
from insum.runtime.unseen import Unseen

#: Sets of other statements that one is computed with.
MOST_SETS = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One of several calls: the code that would run it by itself, and what is remembered of its
    index tensors.
    """

    call: FusedCall
    code: Unseen
    entries: list[memory.Entry]

    def new(self) -> Tensor:
        return self.code.new(self.call.sized.shape)


def run_together(
    calls: Sequence[FusedCall], values: Sequence[Mapping[str, Value]]
) -> list[Tensor | None]:
    """Of several calls on tensors that have the same names in all of them, the results of those
    that one launch computes; None for those that are to be run by themselves.
    """
    results: list[Tensor | None] = [None] * len(calls)
    parts = {k: one for k, call in enumerate(calls) if (one := _part(call, values[k]))}
    order = _order(parts)
    if len(order) < 2:
        return results
    every = {name: value for k in order for name, value in values[k].items()}
    found = _run([parts[k] for k in order], every)
    if found is not None:
        for k, result in zip(order, found):
            results[k] = result
    return results


def _part(call: FusedCall, values: Mapping[str, Value]) -> _Part | None:
    """What would run a call, where it is one kernel that has nothing to look for or to convert."""
    if call.kind.negated:
        return None
    found, entries = call.looked_up(values, None)
    code = call.code_of(found, None) if isinstance(found, Ready) else found
    if not isinstance(code, Unseen) or code.check is not None or code.buffer is not None:
        return None
    return _Part(call, code, entries) if len(code.program.steps) == 1 else None


def _order(parts: Mapping[int, _Part]) -> list[int]:
    """Which of these one kernel writes, found out the first time; the others are compiled then."""
    if len(parts) < 2:
        return []
    programs = tuple([(k, one.code.program) for k, one in parts.items()])
    held = programs[0][1].orders
    found = held.get(programs)
    if found is None:
        order = beside_each_other({k: one.steps[0].planned for k, one in programs})
        alone = [one for k, one in parts.items() if k not in order or len(order) < 2]
        compile_at_once(launch for one in alone for launch in one.code.launches)
        found = keep(held, programs, order, MOST_SETS)
    return found


def _run(parts: Sequence[_Part], values: Mapping[str, Value]) -> list[Tensor] | None:
    """The results of all parts, the first of which owns the loops; None where they take more."""
    first, *others = parts
    index = first.code.index
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _run(parts, values)
    program = _program(tuple([one.code.program for one in parts]))
    if program is None or has_nothing(
        program.steps[0], first.call.sized.extents, first.call.sized.shape
    ):
        return None
    rest = [one.new() for one in others]
    every = {**values, **{beside(number): one for number, one in enumerate(rest, 1)}}
    code = program.codes.get(False)
    if code is None:
        code = _code(program, first, every)
    if code is None:
        return None
    return [first.call.run_unseen(code, every, None, first.entries), *rest]


def _code(program: Program, first: _Part, values: Mapping[str, Value]) -> Unseen | None:
    """Code for the launch on all sizes, written the first time."""
    sized, prologue = first.call.sized, first.call.prologue(values, first.entries)
    try:
        found = ready(program, values, sized.extents, sized.shape, prologue)
    except NotYet:
        return None
    return first.call.code_of(found, None)


def _program(programs: tuple[Program, ...]) -> Program | None:
    """One kernel for all programs, written the first time."""
    first, others = programs[0], programs[1:]
    if others in first.together:
        return first.together[others]
    planned = together(first.steps[0].planned, [one.steps[0].planned for one in others])
    found = None
    if planned is not None:
        step = step_of(planned, first.wishes, first_choice(planned, first.wishes), None)
        found = replace(first, steps=(step,), codes={}, together={}, orders={})
    return keep(first.together, others, found, MOST_SETS)
