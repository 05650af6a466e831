"""A call in generated kernels: what was made for it is found and launched; where nothing was yet,
`which_program` says what to run.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.compat.streams import CUDAGRAPH_TREES, is_capturing, is_recorded
from insum.facts import CONSTANT
from insum.lang.bind import Value
from insum.plan.strategies.unrolling import UNROLL_POINTS
from insum.runtime import cache, which_program
from insum.runtime.check import found as offences
from insum.runtime.fused_kind import SizedCall
from insum.runtime.handwritten import packs
from insum.runtime.program import Refusal
from insum.runtime.prologue.made import Made
from insum.runtime.prologue.prologue import Prologue
from insum.runtime.ready import Ready
from insum.runtime.record import record_of
from insum.runtime.unseen import Unseen
from insum.runtime.which_program import without_indices

#: Programs whose needs are kept with one map of a kernel.
MOST_MADE = 64


class MapRun(NamedTuple):
    """What a call ran on the map of a kernel, and what was made of the map for it."""

    code: Unseen
    made: Sequence[Made]


class FusedCall(SizedCall):
    """A call of certain sizes and strides, as generated kernels."""

    __slots__ = ()

    def __call__(self, values: Mapping[str, Value], target: Tensor | None) -> Tensor | Refusal:
        """The result (in ``target``, where one is given), or why there is no kernel."""
        if self.kind.negated:
            values = {n: v.resolve_neg() if isinstance(v, Tensor) else v for n, v in values.items()}
        found, entries, recorded = self.looked_up(values, target)
        if type(found) is Ready:
            if found.settled:
                return found(values, target)
            return self.run_ready(found, values, target, entries)
        if type(found) is MapRun:
            return found.code.run(values, self.spans, self.shape, None, found.made, False)
        if type(found) is Unseen:
            return self.run_unseen(found, values, target, entries, recorded)
        return found  # type: ignore[return-value]

    def run_ready(
        self,
        found: Ready,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
    ) -> Tensor:
        if found.promotable:
            found = which_program.promoted(self, found, values, target, entries)
        if found.check is None:
            return found(values, target)
        values, look = self.with_record(found, values, target, entries)
        return found(values, target, look=look)

    def looked_up(
        self,
        values: Mapping[str, Value],
        target: Tensor | None,
        known: dict[str, memory.Entry] | None = None,
    ) -> tuple[Ready | Unseen | MapRun | Refusal, list[memory.Entry], bool]:
        """What runs a call, what is remembered of index tensors, and of coefficients that may
        become code, and whether a graph is recorded. Raises what earlier calls were found to have
        done wrong. ``known``: what other calls on the same tensors have looked for, to which this
        adds; all of them are asked for their code alone.
        """
        for numbers, report in offences:  # one of many calls: not worth another for each
            if numbers[0]:
                report()
        kind, entries, promised = self.kind, [], False
        for name in kind.indices:
            entry = None if known is None else known.get(name)
            if entry is None:
                index: Any = values[name]
                entry = memory.known(index) or memory.made(index)
                if known is not None:
                    known[name] = entry
            promised = promised or entry.declared  # which the index tensors of a pattern are
            entries.append(entry)
        for name in kind.coefficients if promised else ():
            value: Any = values[name]
            own = memory.known(value) if value.numel() <= 2 * UNROLL_POINTS else None
            if own is not None and CONSTANT in own:
                entries.append(own)  # its values may be part of the program
        found: Ready | Unseen | MapRun | Refusal | None = None
        recorded = (
            kind.on_gpu
            and (is_capturing() or CUDAGRAPH_TREES in sys.modules)
            and is_recorded(kind.device)
        )
        if not recorded:
            if self.keeps:
                found = (entries[0] if entries else without_indices).get(self.key(target, entries))
            if found is None and target is None and known is None and len(entries) == 1:
                of: packs.KernelMap | None = entries[0].things.get(packs.MAP)
                if of is not None:
                    found = of.runs.get((self.serial, kind.stream(), cache.state["epoch"]))
                    if found is not None and of.first == self.serial:
                        entries[0].sights += 1  # once for all calls of a network on this map
                    if entries[0].sights > which_program.MOST_MET:
                        found = None  # it is worth arguments of its own
        if found is None:
            found = which_program.find(self, values, target, entries, recorded)
        return found, entries, recorded

    def settled(self, target: Tensor | None, entries: list[memory.Entry]) -> Ready | None:
        """What is kept for a call on index tensors of which this is remembered, where it only has
        to be launched. Raises what earlier calls were found to have done wrong.
        """
        for numbers, report in offences:
            if numbers[0]:
                report()
        if not self.keeps or self.kind.on_gpu and is_recorded(self.kind.device):
            return None
        found = entries[0].get(self.key(target, entries))
        return found if type(found) is Ready and found.settled else None

    def run_unseen(
        self,
        found: Unseen,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
        recorded: bool,
    ) -> Tensor:
        made = self.made_of(found, values, entries, recorded) if found.recipes else ()
        look = False
        if found.check is not None:
            values, look = self.with_record(found, values, target, entries)
        elif target is None and not recorded and len(entries) == 1:
            of: packs.KernelMap | None = entries[0].things.get(packs.MAP)
            # what was made of the map of the way back would be held by this one
            lasting = of is not None and not (made and of.inverse)
            if of is not None and lasting and len(of.runs) < MOST_MADE:
                of.runs[self.serial, self.kind.stream(), cache.state["epoch"]] = MapRun(found, made)
        return found.run(values, self.spans, self.shape, target, made, look)

    def made_of(
        self,
        found: Unseen,
        values: Mapping[str, Value],
        entries: list[memory.Entry],
        recorded: bool,
    ) -> Sequence[Made]:
        """What the recipes of a program make of the index tensors. All that one call needs of the
        map of a kernel is kept with the map, for the others of a network: they look for one thing.
        """
        kind, key = self.kind, None
        of: packs.KernelMap | None = None if recorded else entries[0].things.get(packs.MAP)
        wraps = kind.programs.wraps
        if of is not None and found.sizes is not None and len(entries) == 1 and not wraps:
            key = kind.stream(), found.does, found.sizes(values, self.spans, self.shape)
            before: Sequence[Made] | None = of.made.get(key)
            if before is not None:
                return before
        prologue = Prologue(
            *(values, self.extents, self.shape, wraps),
            wait=False,
            recorded=recorded,
            entries=dict(zip(kind.indices, entries)),
        )
        made: list[Made] = []
        for recipe in found.recipes:
            there = prologue.of_way_back(recipe) if of is not None and of.inverse else None
            if there is not None:
                key = None
            one = prologue.result(recipe) if there is None else there
            if not isinstance(one, Made):
                one = prologue.soon(recipe)
                assert one is not None  # of maps everything is known at once
            made.append(one)
        if of is not None and key is not None:
            keep(of.made, key, made, MOST_MADE)
        return made

    # --- checks ---

    def with_record(
        self,
        found: Ready | Unseen,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
    ) -> tuple[Mapping[str, Value], bool]:
        """The values with what kernels need to report indices out of range, and whether they are to
        look: an earlier call may have, and has reported what it found. A call in place looks for
        itself, because it must change nothing where one is out of range.
        """
        kind, program = self.kind, found.program
        place = dict(zip(kind.indices, entries))
        ranges = program.ranges(values, self.shape)
        if target is None and len(ranges) == len(program.unchecked):
            for name, range_ in ranges:
                if range_ not in place[name].looked:
                    break
            else:
                return values, False
        for name, range_ in ranges:
            place[name].note_range(range_)
        references, called = [], {}
        for name, entry in place.items():
            references.append((name, weakref.ref(values[name]), weakref.ref(entry)))
            if entry.called is not None:
                called[name] = entry.called
        numbers = {n: values[n] for n in kind.numbers} if kind.numbers else {}
        shapes = {n: v.shape for n, v in values.items() if isinstance(v, Tensor)}
        own = kind.programs.problem, self.extents, self.shape
        made = (*own, program.unchecked, references, numbers, shapes, called)
        return record_of(kind.device).next(made, values), True
