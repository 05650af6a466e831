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
    def program(self) -> Program | None:
        """Its program, where that is one product that has nothing to look for or to convert."""
        found = self.found
        if found.check is not None or found.buffer is not None:
            return None
        if isinstance(found, Ready) and found.promotable:
            return None
        return found.program if len(found.program.steps) == 1 else None

    def new(self) -> Tensor:
        """What its result is written to."""
        found = self.found
        return found.empty() if isinstance(found, Ready) else found.new(self.call.shape)


def run_together(
    calls: Sequence[FusedCall], values: Sequence[Mapping[str, Value]]
) -> list[Tensor | None]:
    """The results of several calls on tensors that have the same names in all of them, of those
    that one launch can be for in one; None where there is no kernel.
    """
    known: dict[str, memory.Entry] = {}
    parts, programs = {}, {}
    for k, call in enumerate(calls):
        if not call.kind.negated:
            found, entries, recorded = call.looked_up(values[k], None, known)
            if not isinstance(found, Refusal | MapRun):
                parts[k] = part = _LookedUp(call, values[k], found, entries, recorded)
                if (program := part.program) is not None:
                    programs[k] = program
    results: list[Tensor | None] = [None] * len(calls)
    order = _order(parts, programs)
    together = _run([parts[k] for k in order], [programs[k] for k in order]) if order else []
    for k, result in zip(order, together):
        results[k] = result
    for k, part in parts.items():
        if results[k] is None:
            results[k] = part.alone()
    return results


def _order(parts: Mapping[int, _LookedUp], every: Mapping[int, Program]) -> list[int]:
    """Which of these one kernel writes, found out the first time; the others are compiled then."""
    if len(every) < 2:
        return []
    programs = tuple(every.items())
    held = programs[0][1].orders
    found = held.get(programs)
    if found is None:
        order = beside_each_other({k: one.steps[0].planned for k, one in programs})
        order = order if len(order) > 1 else []
        alone = [parts[k].found for k in every if k not in order]
        compile_at_once(launch for one in alone for launch in one.launches)
        found = keep(held, programs, order, MOST_SETS)
    return found


def _run(parts: Sequence[_LookedUp], programs: Sequence[Program]) -> list[Tensor]:
    """The results of all parts, the first of which owns the loops; none where they take more."""
    index, call = parts[0].found.index, parts[0].call
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _run(parts, programs)
    program = _program(tuple(programs))
    if program is None or has_nothing(program.steps[0], call.extents, call.shape):
        return []
    values = {name: value for one in parts for name, value in one.values.items()}
    results = []
    for number, one in enumerate(parts[1:], 1):
        values[beside(number)] = result = one.new()
        results.append(result)
    joined = program.codes.get(False) or _joined(program, parts, values)
    if joined is None:
        return []
    if isinstance(joined, Ready):
        return [joined(values), *results]
    entries, recorded = parts[0].entries, parts[0].recorded
    return [call.run_unseen(joined, values, None, entries, recorded), *results]


def _joined(
    program: Program, parts: Sequence[_LookedUp], values: Mapping[str, Value]
) -> Unseen | Ready | None:
    """The launch: code for all sizes, written the first time; where rows decide it, what is kept
    with these index tensors.
    """
    call, entries, recorded = parts[0].call, parts[0].entries, parts[0].recorded
    key = (*call.key(None, entries), "together", *(one.call.serial for one in parts[1:]))
    found: Ready | None = None if recorded else entries[0].get(key)
    if found is not None:
        return found
    try:
        found = ready(program, values, call.extents, call.shape, prologue_of(call, values, entries))
    except NotYet:
        return None
    code = code_of(call, found, None)
    if code is None and not recorded:
        entries[0].keep(key, found)
    return found if code is None else code


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
