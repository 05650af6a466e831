"""Which program a call runs, by what is known of its index tensors.

An index tensor that was never seen gets a program that needs to know nothing of it: scatters add
atomically, or sort first where atomics are not allowed, and indices out of range are treated as
absent. One that comes back is looked at, without waiting, and gets the better schedule; so does, at
its first call, one that was declared to come back. What was made for a call is kept with the index
tensors that decided it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.compat.streams import cudagraph_state, elsewhere, is_recorded
from insum.facts import IndexFacts, known_now
from insum.lang.bind import Value
from insum.lang.problem import resized
from insum.plan.questions import Question, Summary
from insum.plan.recipes import (
    Composed,
    DimOfPlaces,
    Inverse,
    LeftPlaces,
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
from insum.plan.strategies.unrolling import PROMOTE_POINTS
from insum.runtime import cache, classify
from insum.runtime.answers import Answers, summary_of
from insum.runtime.check import live_uses
from insum.runtime.fused_kind import SizedCall
from insum.runtime.handwritten import packs
from insum.runtime.handwritten.looking import looked_at
from insum.runtime.program import Program, Refusal
from insum.runtime.prologue.prologue import Prologue
from insum.runtime.ready import NotYet, Ready, ready
from insum.runtime.shelf import QuestionTree
from insum.runtime.unseen import Unseen, unseen_of

_serial = operator.attrgetter("serial")
#: A short pattern that comes back for this many calls is compiled into the code.
PROMOTE_AT = 3
#: Classes of sizes for which it is kept what runs: those of a network on data that change are some
#: hundreds, though few of them have a program of their own.
MOST_UNSEEN = 1024
#: Calls on the same index tensors, of which a network may make several in one step, before the
#: arguments of its launches are kept: making them takes as long as a few calls without.
MOST_MET = 8
#: What is kept of calls without index tensors.
without_indices = memory.Entry()


def find(
    call: SizedCall,
    values: Mapping[str, Value],
    target: Tensor | None,
    entries: list[memory.Entry],
    recorded: bool,
) -> Ready | Unseen | Refusal:
    """What runs a call. It is kept for later ones once everything is known that can be; nothing is
    where it is ``recorded``: a graph is replayed on other values.
    """
    mapped = None
    if not recorded and entries and packs.MAP in entries[0].things:
        mapped = _map_key(call, values, target, entries)
        held = None if mapped is None else call.kind.unseen.get(mapped)
        if held is not None:
            return held
    if _is_known(call, values, entries, recorded):
        try:
            found = _make_now(call, values, target, entries, recorded)
        except NotYet:
            pass
        else:
            if isinstance(found, Unseen):
                return found
            code = code_of(call, found, target) if mapped and isinstance(found, Ready) else None
            if code is not None:  # a map is met by it until it has come back often enough
                keep(call.kind.unseen, mapped, code, MOST_UNSEEN)
            elif not recorded:
                call.keeps = True
                (entries[0] if entries else without_indices).keep(call.key(target, entries), found)
            return found
    return _make_unseen(call, values, target, entries, recorded)


def promoted(
    call: SizedCall,
    found: Ready,
    values: Mapping[str, Value],
    target: Tensor | None,
    entries: list[memory.Entry],
) -> Ready:
    """A short pattern that keeps coming back is compiled into the code."""
    for entry in entries:
        entry.sights += 1
    short = all(values[n].numel() <= PROMOTE_POINTS for n in call.kind.indices)  # type: ignore[union-attr]
    if not short or min(entry.sights for entry in entries) <= PROMOTE_AT:
        return found
    key = (*call.key(target, entries), "promoted")
    better: Ready | Refusal | None = entries[0].get(key)
    if better is None and not is_recorded(call.kind.device):
        try:
            better = _make(call, values, target, entries, promote=True)
        except NotYet:
            return found
        entries[0].keep(key, better)
    return better if isinstance(better, Ready) else found


def _map_key(
    call: SizedCall, values: Mapping[str, Value], target: Tensor | None, entries: list[memory.Entry]
) -> tuple[object, ...] | None:
    """What decides the program where all index tensors are maps of kernels that few calls have
    met; None where they are not.
    """
    kind = call.kind
    if kind.limits is None or len(entries) > 1 and not _are_maps(entries):
        return None
    about: list[object] = []
    highest = {}
    for name, entry in zip(kind.indices, entries):
        known: packs.KernelMap = entry.things[packs.MAP]
        if known.first is None:
            known.first = call.serial
        if known.first == call.serial:
            entry.sights += 1
        if entry.sights > MOST_MET:
            # one that keeps coming back is worth arguments of its own, and a better order
            if not kind.firm:
                _settle(entry)
            return None
        facts: IndexFacts | None = entry.things.get("facts")
        if facts is None:
            return None
        highest[name] = facts.high
        about.append((known.mirrored, values[name].shape[0]))  # type: ignore[union-attr]
    for name, owner, dim in kind.limits:
        limit = call.shape[dim] if owner is OUT else values[owner].shape[dim]  # type: ignore[union-attr]
        if highest[name] >= limit:
            return None
    for k in kind.exact:
        about.append(call.spans[k])
    sizes = call.new_class
    if target is not None:
        sizes = call.class_key(values, target)
    elif sizes is None:  # as `class_key`
        sizes = call.new_class = kind.classify[0](values, call.spans, call.shape, None)
    return sizes, target is None, cache.state["epoch"], *about


def _is_known(
    call: SizedCall, values: Mapping[str, Value], entries: list[memory.Entry], recorded: bool
) -> bool:
    """Whether all index tensors have been looked at, or may be now. In deterministic mode what
    is found out later must change nothing; and a recorded graph is replayed on other values.
    """
    settled, all_known = call.kind.firm or recorded, True
    for name, entry in zip(call.kind.indices, entries):  # all of them are counted
        if not settled and "facts" in entry.things:
            continue
        tensor: Any = values[name]
        if settled:
            known = _is_settled(tensor, entry)
        else:
            known = known_now(tensor, entry, looked_at) is not None
        all_known = known and all_known
    return all_known


def _make_now(
    call: SizedCall,
    values: Mapping[str, Value],
    target: Tensor | None,
    entries: list[memory.Entry],
    recorded: bool,
) -> Ready | Unseen | Refusal:
    """What runs on index tensors of which all is known: code for all that are alike, until
    they have come back often enough for arguments of their own.
    """
    kind, told = call.kind, _told_key(call, values, target, entries)
    if recorded:
        if kind.on_gpu and cudagraph_state(kind.device) == "warmup":
            return elsewhere(kind.device, lambda: _make(call, values, target, entries, told=told))
        return _make(call, values, target, entries, told=told)
    if told is None or _comes_back(call, target, entries):
        return _make(call, values, target, entries, told=told)
    program = _program_told(call, told, values, entries)
    code: Unseen | None = None if program is None else program.codes.get(target is not None)
    if code is not None:
        return code
    found = _make(call, values, target, entries, told=told)
    if isinstance(found, Ready) and not found.promotable:
        code_of(call, found, target)  # for the next ones
    return found


def _comes_back(call: SizedCall, target: Tensor | None, entries: list[memory.Entry]) -> bool:
    """Whether arguments of their own are worth it for these tensors: calls of such sizes have met
    them often. Those of a call without anything to launch are few.
    """
    if 0 in call.spans or 0 in call.shape:
        return True
    first = entries[0] if entries else without_indices
    return first.meets(call.key(target, entries)) > MOST_MET


def _program_told(
    call: SizedCall,
    told: tuple[object, ...],
    values: Mapping[str, Value],
    entries: list[memory.Entry],
    prologue: Prologue | None = None,
) -> Program | None:
    """The program for tensors of which the same was known before; `NotYet` where something
    that was derived from these decides, and is on its way.
    """
    tree = call.kind.told.get(told)
    if tree is None:
        return None
    found = tree.found
    if tree.question is not None:

        def derived(question: Question) -> Summary:
            nonlocal prologue
            prologue = prologue or prologue_of(call, values, entries)
            return summary_of(question.recipe, prologue)  # type: ignore[union-attr]

        found = tree.asked(derived, call.extents)
    return found if isinstance(found, Program) else None


def _told_key(
    call: SizedCall, values: Mapping[str, Value], target: Tensor | None, entries: list[memory.Entry]
) -> tuple[object, ...] | None:
    """What decides the program of a call where facts of all index tensors are known and none
    can be out of range, so that new tensors that are alike need not be asked again; None where
    they are not. What became code is told by the tensor itself.
    """
    kind = call.kind
    if kind.limits is None:
        return None
    about: list[object] = []
    highest, padded = {}, kind.problem.padded
    for name, entry in zip(kind.indices, entries):
        facts: IndexFacts | None = entry.things.get("facts")
        if facts is None or facts.low < (-1 if name in padded else 0):
            return None
        highest[name] = facts.high
        known = facts.sorted, facts.unique, facts.padded, facts.constant
        about.append((*known, entry.serial if entry.declared else None))
    for name, owner, dim in kind.limits:
        limit = call.shape[dim] if owner is OUT else values[owner].shape[dim]  # type: ignore[union-attr]
        if highest[name] >= limit:
            return None
    about += map(_serial, entries[len(kind.indices) :])
    return call.class_key(values, target), target is None, cache.state["epoch"], *about


def _make(
    call: SizedCall,
    values: Mapping[str, Value],
    target: Tensor | None,
    entries: list[memory.Entry],
    *,
    known: bool = True,
    promote: bool = False,
    told: tuple[object, ...] | None = None,
) -> Ready | Refusal:
    prologue, uses = prologue_of(call, values, entries), call.kind.programs.uses
    tensors = dict(values) if target is None else {**values, OUT: target}
    before = None if told is None else _program_told(call, told, values, entries, prologue)
    if before is not None:
        return ready(before, tensors, call.extents, call.shape, prologue)
    shapes = {n: v.shape for n, v in values.items() if isinstance(v, Tensor)}
    problem = resized(call.kind.problem, call.extents, call.shape, shapes)
    live = live_uses(problem, uses)
    answers = Answers(problem, uses, live, values, prologue, known, promote)
    wishes = call.kind.wishes[target is not None]
    key = call.class_key(values, target)
    program = call.kind.programs.find(
        key, lambda: _size_class(call, values, target), wishes, answers
    )
    if isinstance(program, Refusal):
        return program
    if told is not None and answers.lasting:
        tree = keep(call.kind.told, told, QuestionTree(), MOST_UNSEEN)
        tree.note(answers.of_call, program)
    return ready(program, tensors, call.extents, call.shape, prologue)


def prologue_of(
    call: SizedCall, values: Mapping[str, Value], entries: list[memory.Entry]
) -> Prologue:
    """It may wait for tensors that were declared to come back, and where what is found out
    later must change nothing, while nobody records.
    """
    kind, wait, known = call.kind, True, {}
    for name, entry in zip(kind.indices, entries):
        known[name] = entry
        if wait and not (entry.declared or kind.firm and entry.given):
            wait = memory.can_look(values[name])  # type: ignore[arg-type]
    recorded = kind.on_gpu and is_recorded(kind.device)
    return Prologue(
        *(values, call.extents, call.shape, kind.programs.wraps),
        wait=wait and not recorded,
        recorded=recorded,
        entries=known,
    )


def _size_class(call: SizedCall, values: Mapping[str, Value], target: Tensor | None) -> SizeClass:
    kind = call.kind
    return classify.classified(kind.problem, kind.runs, values, call.spans, call.shape, target)


def _make_unseen(
    call: SizedCall,
    values: Mapping[str, Value],
    target: Tensor | None,
    entries: list[memory.Entry],
    recorded: bool,
) -> Ready | Unseen | Refusal:
    """What runs where nothing is known of undeclared tensors. Where it derives nothing from
    them, it is kept with the kind of call, for all sizes of its class.
    """
    kind = call.kind
    declared = []
    for entry in entries:
        if entry.declared:
            declared.append(entry.serial)
    if declared:  # code that was written for a pattern knows some extents
        declared += [call.spans[k] for k in kind.exact]
    sizes = call.new_class if target is None else None
    sizes = sizes or call.class_key(values, target)
    key = (sizes, target is None, cache.state["epoch"], *declared)
    held = kind.unseen.get(key)
    if held is not None:
        return held
    mine = (*call.key(target, entries), "unseen", key)  # it may hold what others are, too
    kept: Ready | Refusal | None = None
    if not recorded:
        kept = entries[0].get(mine)
    if kept is not None:
        return kept
    found = _make(call, values, target, entries, known=False)
    code = code_of(call, found, target) if isinstance(found, Ready) else None
    if code is not None:
        return keep(kind.unseen, key, code, MOST_UNSEEN)
    if not recorded:
        entries[0].keep(mine, found)
    return found


def code_of(call: SizedCall, found: Ready, target: Tensor | None) -> Unseen | None:
    """What was found as code for all sizes of its class and all index tensors; None where it
    needs numbers that only the device knows.
    """
    codes, into = found.program.codes, target is not None
    if not all(launches for _, launches in found.work):
        return None  # of other sizes there is something to launch
    if into not in codes:
        made = unseen_of(found, tuple(call.kind.problem.extents), into)
        at_once = made is not None and all(map(_is_known_at_once, made.recipes))
        codes[into] = made if at_once else None
    code: Unseen | None = codes[into]
    return code


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
        case LeftPlaces() | DimOfPlaces():
            return True
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
