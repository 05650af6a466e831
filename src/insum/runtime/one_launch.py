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
from insum.runtime.fused import FusedCall, MapRun
from insum.runtime.program import Program, Refusal
from insum.runtime.ready import NotYet, Ready, has_nothing, ready
from insum.runtime.unseen import Unseen
from insum.runtime.which_program import code_of, prologue_of

#: Sets of other statements that one is computed with.
MOST_SETS = 16


@dataclass(frozen=True, slots=True, eq=False)
class _LookedUp:
    """One of several calls: its values, what runs it by itself, and what is remembered of its index
    tensors.
    """

    call: FusedCall
    values: Mapping[str, Value]
    found: Ready | Unseen
    entries: list[memory.Entry]
    recorded: bool

    def alone(self) -> Tensor:
        if isinstance(self.found, Unseen):
            return self.call.run_unseen(self.found, self.values, None, self.entries, self.recorded)
        return self.call.run_ready(self.found, self.values, None, self.entries)

    @property
    def code(self) -> Unseen | None:
        """What runs it on all sizes, where it is one kernel that has nothing to look for or to
        convert.
        """
        found, call = self.found, self.call
        code = code_of(call, found, None) if isinstance(found, Ready) else found
        if code is None or code.check is not None or code.buffer is not None:
            return None
        return code if len(code.program.steps) == 1 else None


def run_together(
    calls: Sequence[FusedCall], values: Sequence[Mapping[str, Value]]
) -> list[Tensor | None]:
    """The results of several calls on tensors that have the same names in all of them, of those
    that one launch can be for in one; None where there is no kernel.
    """
    known: dict[str, memory.Entry] = {}
    parts, codes = {}, {}
    for k, call in enumerate(calls):
        if not call.kind.negated:
            found, entries, recorded = call.looked_up(values[k], None, known)
            if not isinstance(found, Refusal | MapRun):
                parts[k] = part = _LookedUp(call, values[k], found, entries, recorded)
                if (code := part.code) is not None:
                    codes[k] = code
    results: list[Tensor | None] = [None] * len(calls)
    order = _order(codes)
    together = _run([parts[k] for k in order], [codes[k] for k in order]) if order else []
    for k, result in zip(order, together):
        results[k] = result
    for k, part in parts.items():
        if results[k] is None:
            results[k] = part.alone()
    return results


def _order(codes: Mapping[int, Unseen]) -> list[int]:
    """Which of these one kernel writes, found out the first time; the others are compiled then."""
    if len(codes) < 2:
        return []
    programs = tuple([(k, one.program) for k, one in codes.items()])
    held = programs[0][1].orders
    found = held.get(programs)
    if found is None:
        order = beside_each_other({k: one.steps[0].planned for k, one in programs})
        order = order if len(order) > 1 else []
        alone = [one for k, one in codes.items() if k not in order]
        compile_at_once(launch for one in alone for launch in one.launches)
        found = keep(held, programs, order, MOST_SETS)
    return found


def _run(parts: Sequence[_LookedUp], codes: Sequence[Unseen]) -> list[Tensor]:
    """The results of all parts, the first of which owns the loops; none where they take more."""
    index, call = codes[0].index, parts[0].call
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _run(parts, codes)
    program = _program(tuple([one.program for one in codes]))
    if program is None or has_nothing(program.steps[0], call.extents, call.shape):
        return []
    values = {name: value for one in parts for name, value in one.values.items()}
    results = []
    for number, (one, code) in enumerate(zip(parts[1:], codes[1:]), 1):
        values[beside(number)] = result = code.new(one.call.shape)
        results.append(result)
    joined = program.codes.get(False) or _code(program, parts[0], values)
    if joined is None:
        return []
    entries, recorded = parts[0].entries, parts[0].recorded
    return [call.run_unseen(joined, values, None, entries, recorded), *results]


def _code(program: Program, first: _LookedUp, values: Mapping[str, Value]) -> Unseen | None:
    """Code for the launch on all sizes, written the first time."""
    call = first.call
    prologue = prologue_of(call, values, first.entries)
    try:
        found = ready(program, values, call.extents, call.shape, prologue)
    except NotYet:
        return None
    return code_of(call, found, None)


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
