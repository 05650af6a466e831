"""Several statements on the same tensors in one launch, where one kernel can write all their
results (`plan.beside`).

What runs them is a program like any other, of the statement that owns the loops: the results of the
others are tensors that it is passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True, eq=False)
class OneLaunch:
    """What several calls on certain index tensors launch as one.

    Attributes:
        order: of those whose results it writes, by number; the first owns the loops.
        ready: is passed the results of the others.
    """

    order: tuple[int, ...]
    ready: Ready


#: Several calls on certain index tensors have no launch in common.
APART = Refusal("each has a launch of its own")


def kept_under(calls: Iterable[tuple[FusedCall, list[memory.Entry]]]) -> tuple[object, ...]:
    """What several calls have in common is kept under this, with the first index tensor of the
    first of them; of each what is remembered of its index tensors.
    """
    key: list[object] = ["together"]
    for call, entries in calls:
        key.append((entries[0].serial, *call.key(None, entries)))
    return tuple(key)


def run_together(
    calls: Sequence[FusedCall], values: Sequence[Mapping[str, Value]]
) -> list[Tensor | None]:
    """The results of several calls on tensors that have the same names in all of them, of those
    that one launch can be for in one; None where there is no kernel.
    """
    known: dict[str, memory.Entry] = {}
    parts: dict[int, _LookedUp] = {}
    for k, call in enumerate(calls):
        if not call.kind.negated:
            found, entries, recorded = call.looked_up(values[k], None, known)
            if not isinstance(found, Refusal | MapRun):
                parts[k] = _LookedUp(call, values[k], found, entries, recorded)
    results: list[Tensor | None] = [None] * len(calls)
    for k, result in _joined_results(parts, len(calls)).items():
        results[k] = result
    for k, part in parts.items():
        if results[k] is None:
            results[k] = part.alone()
    return results


def _joined_results(parts: Mapping[int, _LookedUp], count: int) -> dict[int, Tensor]:
    """By number the results of those that one launch is for."""
    bound, looks = 0, len(parts) < count  # how many have arguments of their own
    for part in parts.values():  # a loop: before Python 3.12 every comprehension is a call
        found = part.found
        looks = looks or part.recorded or not part.entries or found.check is not None
        if isinstance(found, Ready):
            looks, bound = looks or found.promotable, bound + 1
    if looks or not bound:
        return _written_by_one(parts, bound=False)[0]
    key = kept_under([(part.call, part.entries) for part in parts.values()])
    entries = parts[0].entries[0]
    kept: OneLaunch | Refusal | None = entries.get(key)
    if isinstance(kept, OneLaunch):
        return _launched(kept, parts)
    if kept is APART:
        return {}
    results, joined = _written_by_one(parts, bound=bound == count)
    if joined is not None:
        entries.keep(key, joined)
    return results


def _written_by_one(
    parts: Mapping[int, _LookedUp], *, bound: bool
) -> tuple[dict[int, Tensor], OneLaunch | Refusal | None]:
    """The same, and what was launched, found out anew: ``bound`` to what it is passed.
    None for that where later calls are to find it out, too: code for all sizes runs it, or it takes
    numbers that are on their way.
    """
    programs: dict[int, Program] = {}
    for k, part in parts.items():
        if (program := part.program) is not None:
            programs[k] = program
    order = _order(parts, programs) if len(programs) > 1 and _mean_the_same(parts) else []
    if not order:
        return {}, APART
    try:
        results, found = _run(parts, programs, order, bound=bound)
    except NotYet:
        return {}, None
    if not results:
        return {}, APART
    return results, None if found is None else OneLaunch(tuple(order), found)


def _mean_the_same(parts: Mapping[int, _LookedUp]) -> bool:
    """Whether variables of one name have one extent in all calls."""
    known: dict[str, int] = {}
    for part in parts.values():
        for var, extent in part.call.extents.items():
            if known.setdefault(var, extent) != extent:
                return False
    return True


def _launched(joined: OneLaunch, parts: Mapping[int, _LookedUp]) -> dict[int, Tensor]:
    values: dict[str, Value] = {}
    results: dict[int, Tensor] = {}
    for number, k in enumerate(joined.order):
        values |= parts[k].values
        if number:
            values[beside(number)] = results[k] = parts[k].new()
    return {joined.order[0]: joined.ready(values), **results}


def _order(parts: Mapping[int, _LookedUp], every: Mapping[int, Program]) -> list[int]:
    """Which of these one kernel writes, found out the first time; the others are compiled then."""
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


def _run(
    parts: Mapping[int, _LookedUp],
    programs: Mapping[int, Program],
    order: Sequence[int],
    *,
    bound: bool,
) -> tuple[dict[int, Tensor], Ready | None]:
    """By number the results of all in this order, the first of which owns the loops, and what was
    launched where that is for these index tensors alone; no results where they take more than one
    launch. `NotYet` where numbers are on their way.
    """
    first = parts[order[0]]
    index, call = first.found.index, first.call
    if index is not None and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return _run(parts, programs, order, bound=bound)
    if has_nothing(programs[order[0]].steps[0], call.extents, call.shape):
        return {}, None
    program = _program(tuple([programs[k] for k in order]))
    if program is None:
        return {}, None
    values: dict[str, Value] = {}
    results: dict[int, Tensor] = {}
    for number, k in enumerate(order):
        values |= parts[k].values
        if number:
            values[beside(number)] = results[k] = parts[k].new()
    joined = None if bound else program.codes.get(False)
    if joined is None:
        joined = _joined(program, first, values, bound=bound)
    if isinstance(joined, Ready):
        return {order[0]: joined(values), **results}, joined
    own = call.run_unseen(joined, values, None, first.entries, first.recorded)
    return {order[0]: own, **results}, None


def _joined(
    program: Program, first: _LookedUp, values: Mapping[str, Value], *, bound: bool
) -> Unseen | Ready:
    """The launch: ``bound`` to what it is passed, or code for all sizes, written the first time,
    where rows do not decide it.
    """
    call = first.call
    prologue = prologue_of(call, values, first.entries)
    found = ready(program, values, call.extents, call.shape, prologue)
    return found if bound else code_of(call, found, None) or found


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
