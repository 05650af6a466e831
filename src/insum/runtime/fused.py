"""A call's generated kernels: which program it runs, by what is known of its index tensors.

An index tensor that was never seen gets a program that needs to know nothing of it: scatters add
atomically, or sort first where atomics are not allowed, and indices out of range are treated as
absent. One that comes back is looked at, without waiting, and gets the better schedule; so does, at
its first call, one that was declared to come back. What was made for a call is kept with the index
tensors that decided it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.compat.calls import (
    CUDAGRAPH_TREES,
    cudagraph_state,
    elsewhere,
    is_capturing,
    is_recorded,
    stream_getter,
)
from insum.facts import CONSTANT, IndexFacts, known_now
from insum.lang.bind import Problem, Value
from insum.lang.expr import accesses, variables
from insum.lang.problem import Sized
from insum.plan.config import Choice
from insum.plan.draft import Wishes
from insum.plan.questions import Question, Summary
from insum.plan.recipes import (
    Composed,
    Inverse,
    Packed,
    PackedByStep,
    Pieces,
    Position,
    Recipe,
    Segments,
    SharedTiles,
    Sorted,
    is_packed,
)
from insum.plan.sizes import OUT, SizeClass
from insum.plan.strategies.unrolling import PROMOTE_POINTS, UNROLL_POINTS
from insum.plan.uses import Use
from insum.runtime import cache, classify
from insum.runtime.answers import Answers, summary_of
from insum.runtime.check import found as offences
from insum.runtime.check import live_uses
from insum.runtime.handwritten import packs
from insum.runtime.program import Program, Refusal
from insum.runtime.prologue.made import Made
from insum.runtime.prologue.prologue import Prologue
from insum.runtime.ready import NotYet, Ready, ready
from insum.runtime.record import record_of
from insum.runtime.shelf import Programs, QuestionTree, Shelf, wishes_of
from insum.runtime.unseen import Unseen, unseen_of

_serial = operator.attrgetter("serial")
#: A short pattern that comes back for this many calls is compiled into the code.
PROMOTE_AT = 3
#: Classes of sizes for which programs of tensors that were never seen are kept.
MOST_UNSEEN = 96
#: Calls on the same index tensors, of which a network may make several in one step, before the
#: arguments of its launches are kept: making them takes as long as a few calls without.
MOST_MET = 8
#: Programs whose needs are kept with one map of a kernel.
MOST_MADE = 64
#: What is made of maps of kernels without numbers that the host would have to wait for.
_serials = itertools.count()
#: What is kept of calls without index tensors.
_plain = memory.Entry()

Classify = Callable[[Mapping[str, Any], tuple[int, ...], tuple[int, ...], Any], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class FusedKind:
    """What all calls of one kind share.

    Attributes:
        classify: the class of a call's sizes, as a key; the second for calls in place.
        wishes: what decides plans besides the statement; the second for calls in place.
        negated: whether some tensor is to be read as its negative.
        numbers: scalars that are passed as Python numbers.
        coefficients: tensors at the places of index tensors, whose values may be promised.
        unseen: programs for index tensors that were never seen, by class of sizes; for maps of
            kernels by what is known of every map of their kind, too.
        told: programs for index tensors of which all is known, by what that is; what was derived
            from them may decide further.
    """

    programs: Programs
    indices: tuple[str, ...]
    runs: frozenset[str]
    classify: tuple[Classify, Classify]
    wishes: tuple[Wishes, Wishes]
    negated: bool
    numbers: tuple[str, ...]
    coefficients: tuple[str, ...]
    unseen: dict[object, Unseen] = field(default_factory=dict)
    told: dict[object, QuestionTree] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        return self.programs.problem

    @functools.cached_property
    def device(self) -> torch.device:
        return self.programs.problem.device

    @functools.cached_property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @functools.cached_property
    def stream(self) -> Callable[[], int]:
        """Tells which stream is the current one."""
        return stream_getter(self.device)

    @functools.cached_property
    def firm(self) -> bool:
        """Whether what is found out about tensors later must change nothing."""
        wishes = self.wishes[0]
        return wishes.deterministic or wishes.settings.tier == "stable"

    @functools.cached_property
    def limits(self) -> tuple[tuple[str, str, int], ...] | None:
        """Of every use its index tensor, what that indexes and where; None where a use is more."""
        uses = self.programs.uses
        if not all(use.tensor for use in uses):
            return None
        return tuple((u.tensor, OUT if u.is_target else u.access.tensor, u.dim) for u in uses)

    @functools.cached_property
    def exact(self) -> tuple[int, ...]:
        """Places, among all extents, of those that all tensors of a layer share."""
        return tuple(k for k, v in enumerate(self.problem.extents) if v not in self.runs)

    @functools.cached_property
    def call(self) -> Callable[[Sized], FusedCall]:
        """Makes the call of certain sizes."""
        return functools.partial(FusedCall, self)


def fused_kind(
    problem: Problem,
    uses: tuple[Use, ...],
    wraps: frozenset[str],
    config: Choice | None,
    negated: bool,
    shelf: Shelf,
) -> FusedKind:
    """A kind of call as generated kernels; ``shelf``: where its programs are kept."""
    runs = classify.running(problem)
    names = dict.fromkeys(a.tensor for use in uses for a in accesses(use.index))
    return FusedKind(
        Programs(problem, uses, wraps, config, shelf),
        tuple(n for n in names if problem.kinds[n].device is not None),
        runs,
        (
            classify.classifier(problem, runs, into=False),
            classify.classifier(problem, runs, into=True),
        ),
        (wishes_of(False, problem.device), wishes_of(True, problem.device)),
        negated,
        tuple(n for n, kind in problem.kinds.items() if kind.device is None),
        _coefficients(problem, runs),
    )


def _coefficients(problem: Problem, runs: frozenset[str]) -> tuple[str, ...]:
    """Floating-point tensors that are read at the places of index tensors and nowhere else."""
    reads = [a for a in accesses(problem.statement.value, nested=False) if a.indices]
    return tuple(
        dict.fromkeys(
            a.tensor
            for a in reads
            if problem.kinds[a.tensor].dtype.is_floating_point
            and all(i.var in runs for i in a.indices)
        )
    )


class MapRun(NamedTuple):
    """What a call ran on the map of a kernel, and what was made of the map for it."""

    code: Unseen
    made: Sequence[Made]


class FusedCall:
    """A call of certain sizes and strides, as generated kernels."""

    __slots__ = ("_class", "keeps", "kind", "serial", "sized")

    def __init__(self, kind: FusedKind, sized: Sized) -> None:
        self.kind, self.sized = kind, sized
        self.serial = next(_serials)
        self.keeps = False  # whether something is kept under this serial
        self._class: tuple[Any, ...] | None = None  # of a call that makes its result

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
            sized = self.sized
            return found.code.run(values, sized.spans, sized.shape, None, found.made, False)
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
            found = self.promoted(found, values, target, entries)
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
                found = (entries[0] if entries else _plain).get(self.key(target, entries))
            if found is None and target is None and known is None and len(entries) == 1:
                of: packs.KernelMap | None = entries[0].things.get(packs.MAP)
                if of is not None:
                    found = of.runs.get((self.serial, kind.stream(), cache.state["epoch"]))
                    entries[0].sights += found is not None and of.first == self.serial
                    if entries[0].sights > MOST_MET:
                        found = None
        if found is None:
            found = self.find(values, target, entries, recorded)
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

    def is_by_indices(self, values: Mapping[str, Value]) -> bool:
        """Whether nothing decides what is run but sizes and what is remembered of index tensors."""
        kind = self.kind
        if kind.negated or not kind.indices:
            return False
        small = [n for n in kind.coefficients if values[n].numel() <= 2 * UNROLL_POINTS]  # type: ignore[union-attr]
        return not small  # of those it may be promised that they are constant

    def run_unseen(
        self,
        found: Unseen,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
        recorded: bool,
    ) -> Tensor:
        made = self.made_of(found, values, entries, recorded) if found.recipes else ()
        look, sized = False, self.sized
        if found.check is not None:
            values, look = self.with_record(found, values, target, entries)
        elif target is None and not recorded and len(entries) == 1:
            of: packs.KernelMap | None = entries[0].things.get(packs.MAP)
            # what was made of the map of the way back would be held by this one
            lasting = of is not None and not (made and of.inverse)
            if of is not None and lasting and len(of.runs) < MOST_MADE:
                of.runs[self.serial, self.kind.stream(), cache.state["epoch"]] = MapRun(found, made)
        return found.run(values, sized.spans, sized.shape, target, made, look)

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
        kind, sized, key = self.kind, self.sized, None
        of: packs.KernelMap | None = None if recorded else entries[0].things.get(packs.MAP)
        wraps = kind.programs.wraps
        if of is not None and found.sizes is not None and len(entries) == 1 and not wraps:
            key = kind.stream(), found.does, found.sizes(values, sized.spans, sized.shape)
            before: Sequence[Made] | None = of.made.get(key)
            if before is not None:
                return before
        prologue = Prologue(
            *(values, sized.extents, sized.shape, wraps),
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

    # --- what is kept ---

    def key(self, target: Tensor | None, entries: list[memory.Entry]) -> tuple[object, ...]:
        kind = self.kind
        out = None if target is None else target.stride()
        if len(entries) < 2:
            return self.serial, kind.stream(), cache.state["epoch"], out
        others = tuple(map(_serial, entries))
        return self.serial, kind.stream(), cache.state["epoch"], out, others

    # --- which program ---

    def find(
        self,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
        recorded: bool,
    ) -> Ready | Unseen | Refusal:
        """What is kept for later calls once everything is known that can be; nothing is where it
        is ``recorded``: a graph is replayed on other values.
        """
        mapped = None
        if not recorded and entries and packs.MAP in entries[0].things:
            mapped = self.map_key(values, target, entries)
            held = None if mapped is None else self.kind.unseen.get(mapped)
            if held is not None:
                return held
        if self.is_known(values, entries, recorded):
            try:
                found = self.make_now(values, target, entries, recorded)
            except NotYet:
                pass
            else:
                if isinstance(found, Unseen):
                    return found
                if not recorded:
                    self.keeps = True
                    (entries[0] if entries else _plain).keep(self.key(target, entries), found)
                code = self.code_of(found, target) if mapped and isinstance(found, Ready) else None
                if code is not None:
                    keep(self.kind.unseen, mapped, code, MOST_UNSEEN)
                return found
        return self.make_unseen(values, target, entries, recorded)

    def map_key(
        self, values: Mapping[str, Value], target: Tensor | None, entries: list[memory.Entry]
    ) -> tuple[object, ...] | None:
        """What decides the program where all index tensors are maps of kernels that few calls have
        met; None where they are not.
        """
        kind, sized = self.kind, self.sized
        if kind.limits is None or len(entries) > 1 and not _are_maps(entries):
            return None
        about: list[object] = []
        highest = {}
        for name, entry in zip(kind.indices, entries):
            known: packs.KernelMap = entry.things[packs.MAP]
            if known.first is None:
                known.first = self.serial
            entry.sights += known.first == self.serial
            if entry.sights > MOST_MET:
                # one that keeps coming back is worth arguments of its own, and a better order
                _settle(entry)
                return None
            facts: IndexFacts | None = entry.things.get("facts")
            if facts is None:
                return None
            highest[name] = facts.high
            about.append((known.mirrored, values[name].shape[0]))  # type: ignore[union-attr]
        for name, owner, dim in kind.limits:
            limit = sized.shape[dim] if owner is OUT else values[owner].shape[dim]  # type: ignore[union-attr]
            if highest[name] >= limit:
                return None
        for k in kind.exact:
            about.append(sized.spans[k])
        sizes = self._class
        if target is not None:
            sizes = self.class_key(values, target)
        elif sizes is None:  # as `class_key`
            sizes = self._class = kind.classify[0](values, sized.spans, sized.shape, None)
        return sizes, target is None, cache.state["epoch"], *about

    def is_known(
        self, values: Mapping[str, Value], entries: list[memory.Entry], recorded: bool
    ) -> bool:
        """Whether all index tensors have been looked at, or may be now. In deterministic mode what
        is found out later must change nothing; and a recorded graph is replayed on other values.
        """
        settled, all_known = self.kind.firm or recorded, True
        for name, entry in zip(self.kind.indices, entries):  # all of them are counted
            if not settled and "facts" in entry.things:
                continue
            tensor: Any = values[name]
            known = _is_settled(tensor, entry) if settled else known_now(tensor, entry) is not None
            all_known = known and all_known
        return all_known

    def make_now(
        self,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
        recorded: bool,
    ) -> Ready | Unseen | Refusal:
        """What runs on index tensors of which all is known: code for all that are alike, until
        they have come back often enough for arguments of their own.
        """
        kind, told = self.kind, self.told_key(values, target, entries)
        if recorded:
            if kind.on_gpu and cudagraph_state(kind.device) == "warmup":
                return elsewhere(kind.device, lambda: self.make(values, target, entries, told=told))
            return self.make(values, target, entries, told=told)
        if told is None or self.comes_back(target, entries):
            return self.make(values, target, entries, told=told)
        program = self.program_told(told, values, entries)
        code: Unseen | None = None if program is None else program.codes.get(target is not None)
        if code is not None:
            return code
        found = self.make(values, target, entries, told=told)
        if isinstance(found, Ready) and not found.promotable:
            self.code_of(found, target)  # for the next ones
        return found

    def comes_back(self, target: Tensor | None, entries: list[memory.Entry]) -> bool:
        """Whether arguments of their own are worth it for these tensors: they were declared to
        come back, or have. Those of a call without anything to launch are few.
        """
        sized = self.sized
        if 0 in sized.spans or 0 in sized.shape:
            return True
        for entry in entries:
            if not entry.declared:
                return entries[0].meets(self.key(target, entries)) > MOST_MET
        return bool(entries) or _plain.meets(self.key(target, entries)) > MOST_MET

    def program_told(
        self,
        told: tuple[object, ...],
        values: Mapping[str, Value],
        entries: list[memory.Entry],
        prologue: Prologue | None = None,
    ) -> Program | None:
        """The program for tensors of which the same was known before; `NotYet` where something
        that was derived from these decides, and is on its way.
        """
        tree = self.kind.told.get(told)
        if tree is None:
            return None
        found = tree.found
        if tree.question is not None:
            prologue = prologue or self.prologue(values, entries)

            def derived(question: Question) -> Summary:
                return summary_of(question.recipe, prologue)  # type: ignore[union-attr]

            found = tree.asked(derived)
        return found if isinstance(found, Program) else None

    def told_key(
        self, values: Mapping[str, Value], target: Tensor | None, entries: list[memory.Entry]
    ) -> tuple[object, ...] | None:
        """What decides the program of a call where facts of all index tensors are known and none
        can be out of range, so that new tensors that are alike need not be asked again; None where
        they are not. What became code is told by the tensor itself.
        """
        kind, sized = self.kind, self.sized
        if kind.limits is None:
            return None
        about: list[object] = []
        highest = {}
        for name, entry in zip(kind.indices, entries):
            facts: IndexFacts | None = entry.things.get("facts")
            if facts is None or facts.low < 0:
                return None
            highest[name] = facts.high
            known = facts.sorted, facts.unique, facts.padded, facts.constant
            about.append((*known, entry.serial if entry.declared else None))
        for name, owner, dim in kind.limits:
            limit = sized.shape[dim] if owner is OUT else values[owner].shape[dim]  # type: ignore[union-attr]
            if highest[name] >= limit:
                return None
        about += [sized.spans[k] for k in kind.exact]
        about += map(_serial, entries[len(kind.indices) :])
        return self.class_key(values, target), target is None, cache.state["epoch"], *about

    def make(
        self,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
        *,
        known: bool = True,
        promote: bool = False,
        told: tuple[object, ...] | None = None,
    ) -> Ready | Refusal:
        sized, prologue, uses = self.sized, self.prologue(values, entries), self.kind.programs.uses
        tensors = dict(values) if target is None else {**values, OUT: target}
        before = None if told is None else self.program_told(told, values, entries, prologue)
        if before is not None:
            return ready(before, tensors, sized.extents, sized.shape, prologue)
        shapes = {n: v.shape for n, v in values.items() if isinstance(v, Tensor)}
        problem = sized.problem(shapes)
        live = live_uses(problem, uses)
        answers = Answers(problem, uses, live, values, prologue, known, promote)
        wishes = self.kind.wishes[target is not None]
        key = self.class_key(values, target)
        program = self.kind.programs.find(
            key, lambda: self.size_class(values, target), wishes, answers
        )
        if isinstance(program, Refusal):
            return program
        if told is not None and answers.lasting and not answers.exact & self.moving(values):
            tree = keep(self.kind.told, told, QuestionTree(), MOST_UNSEEN)
            tree.note(answers.summaries, program)
        return ready(program, tensors, sized.extents, sized.shape, prologue)

    def moving(self, values: Mapping[str, Value]) -> set[str]:
        """Variables that index tensors run over which nobody has declared: others have others."""
        found: set[str] = set()
        for access in (a for use in self.kind.programs.uses for a in accesses(use.index)):
            tensor = values[access.tensor]
            if isinstance(tensor, Tensor) and not memory.entry_of(tensor).declared:
                found.update(v for index in access.indices for v in variables(index))
        return found

    def prologue(self, values: Mapping[str, Value], entries: list[memory.Entry]) -> Prologue:
        """It may wait for tensors that were declared to come back, and where what is found out
        later must change nothing, while nobody records.
        """
        kind, sized, wait, known = self.kind, self.sized, True, {}
        for name, entry in zip(kind.indices, entries):
            known[name] = entry
            if wait and not (entry.declared or kind.firm and entry.given):
                wait = memory.can_look(values[name])  # type: ignore[arg-type]
        recorded = kind.on_gpu and is_recorded(kind.device)
        return Prologue(
            *(values, sized.extents, sized.shape, kind.programs.wraps),
            wait=wait and not recorded,
            recorded=recorded,
            entries=known,
        )

    def class_key(self, values: Mapping[str, Value], target: Tensor | None) -> tuple[Any, ...]:
        sized, classes = self.sized, self.kind.classify
        if target is not None:
            return classes[1](values, sized.spans, sized.shape, target)
        if self._class is None:  # sizes and strides are those of all calls of this
            self._class = classes[0](values, sized.spans, sized.shape, None)
        return self._class

    def size_class(self, values: Mapping[str, Value], target: Tensor | None) -> SizeClass:
        sized, kind = self.sized, self.kind
        return classify.classified(
            kind.problem, kind.runs, values, sized.spans, sized.shape, target
        )

    def make_unseen(
        self,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
        recorded: bool,
    ) -> Ready | Unseen | Refusal:
        """What runs where nothing is known of undeclared tensors. Where it derives nothing from
        them, it is kept with the kind of call, for all sizes of its class.
        """
        kind = self.kind
        declared = []
        for entry in entries:
            if entry.declared:
                declared.append(entry.serial)
        if declared:  # code that was written for a pattern knows some extents
            declared += [self.sized.spans[k] for k in kind.exact]
        sizes = self._class if target is None else None
        sizes = sizes or self.class_key(values, target)
        key = (sizes, target is None, cache.state["epoch"], *declared)
        held = kind.unseen.get(key)
        if held is not None:
            return held
        mine = (*self.key(target, entries), "unseen", key)  # it may hold what others are, too
        kept: Ready | Refusal | None = None
        if not recorded:
            kept = entries[0].get(mine)
        if kept is not None:
            return kept
        found = self.make(values, target, entries, known=False)
        code = self.code_of(found, target) if isinstance(found, Ready) else None
        if code is not None:
            return keep(kind.unseen, key, code, MOST_UNSEEN)
        if not recorded:
            entries[0].keep(mine, found)
        return found

    def code_of(self, found: Ready, target: Tensor | None) -> Unseen | None:
        """What was found as code for all sizes of its class and all index tensors; None where it
        needs numbers that only the device knows.
        """
        codes, into = found.program.codes, target is not None
        if not all(launches for _, launches in found.work):
            return None  # of other sizes there is something to launch
        if into not in codes:
            made = unseen_of(found, tuple(self.kind.problem.extents), into)
            at_once = made is not None and all(map(_is_known_at_once, made.recipes))
            codes[into] = made if at_once else None
        code: Unseen | None = codes[into]
        return code

    def promoted(
        self,
        found: Ready,
        values: Mapping[str, Value],
        target: Tensor | None,
        entries: list[memory.Entry],
    ) -> Ready:
        """A short pattern that keeps coming back is compiled into the code."""
        for entry in entries:
            entry.sights += 1
        short = all(values[n].numel() <= PROMOTE_POINTS for n in self.kind.indices)  # type: ignore[union-attr]
        if not short or min(entry.sights for entry in entries) <= PROMOTE_AT:
            return found
        key = (*self.key(target, entries), "promoted")
        better: Ready | Refusal | None = entries[0].get(key)
        if better is None and not is_recorded(self.kind.device):
            try:
                better = self.make(values, target, entries, promote=True)
            except NotYet:
                return found
            entries[0].keep(key, better)
        return better if isinstance(better, Ready) else found

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
        kind, sized, program = self.kind, self.sized, found.program
        place = dict(zip(kind.indices, entries))
        ranges = program.ranges(values, sized.shape)
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
        made = (sized, program.unchecked, references, numbers, shapes, called)
        return record_of(kind.device).next(made, values), True


def _is_settled(tensor: Tensor, entry: memory.Entry) -> bool:
    """Whether the same is known of a tensor at every call."""
    return memory.can_look(tensor) or entry.declared or entry.given


def _is_known_at_once(recipe: Recipe) -> bool:
    """Whether a recipe's result is made without any number of the device; of tables, where they
    are maps of kernels.
    """
    match recipe:
        case SharedTiles() | Segments() | Sorted() | Pieces() | Position() | Composed():
            return True  # of an order everything but how long rows are
        case Inverse(_, dim):
            return dim == 1
        case Packed(table):
            return isinstance(table, str) or _is_known_at_once(table)
        case PackedByStep(base):
            return _is_known_at_once(base)
    return False


def _are_maps(entries: list[memory.Entry]) -> bool:
    return all(packs.MAP in entry for entry in entries)


def _settle(entry: memory.Entry) -> None:
    """What was packed in a hurry is packed anew, unless a CUDA graph reads it where it is."""
    found: packs.KernelMap | None = entry.get(packs.MAP)
    if found is None or found.comes_back or entry.in_graph:
        return
    found.comes_back = True
    found.made.clear()
    found.runs.clear()
    entry.drop(is_packed)
