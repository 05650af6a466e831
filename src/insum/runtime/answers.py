"""Answers to what planning asks about the index tensors of one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from insum import memory
from insum.facts import CONSTANT, Coming, IndexFacts, facts_of
from insum.lang.bind import Problem, Value
from insum.lang.expr import accesses
from insum.plan.questions import (
    AskCoefficients,
    AskExact,
    AskFacts,
    AskInside,
    AskSummary,
    AskValues,
    Known,
    Question,
    Summary,
)
from insum.plan.recipes import Recipe
from insum.plan.uses import Use
from insum.runtime.check import is_inside, verify_values
from insum.runtime.prologue.prologue import Prologue
from insum.runtime.ready import NotYet
from insum.settings import settings


class Answers:
    """What is known when a call is made.

    Args:
        problem: with the sizes of the call.
        uses: all uses of the statement, ``live`` those that have a point.
        known: whether what was found out about tensors counts; else only what can be looked at
            now, or was declared.
        promote: short index tensors are taken for constants without a promise.
    """

    def __init__(
        self,
        problem: Problem,
        uses: tuple[Use, ...],
        live: tuple[Use, ...],
        values: Mapping[str, Any],
        prologue: Prologue,
        known: bool = True,
        promote: bool = False,
    ) -> None:
        self.problem, self.uses, self.live = problem, uses, live
        self.values, self.prologue, self.known, self.promote = values, prologue, known, promote
        #: Whether all answers but those follow from facts and promises: others hold for these
        #: tensors alone.
        self.lasting = known and not promote
        #: What was asked for of this call, beyond that: summaries, and extents themselves.
        self.of_call: dict[Question, Any] = {}

    def __call__(self, question: Question) -> Any:
        match question:
            case AskFacts(index):
                return self.about(index)
            case AskInside(number):
                return self.is_inside(self.uses[number])
            case AskExact(var):
                found = self.of_call[question] = int(self.problem.extents[var])
                return found
            case AskValues(index):
                return self.numbers(index)
            case AskCoefficients(name):
                return self.coefficients(name)
            case AskSummary(recipe):
                self.of_call[question] = summary = summary_of(recipe, self.prologue)
                return summary

    def facts(self, index: str) -> IndexFacts | None:
        tensor: Tensor = self.values[index]
        entry = memory.entry_of(tensor)
        if memory.can_look(tensor) or entry.declared:
            return facts_of(tensor)
        found: IndexFacts | None = entry.get("facts")
        return found if self.known else None

    def about(self, index: str) -> Known | None:
        facts = self.facts(index)
        if facts is None:
            return None
        constant = facts.constant or self.promote
        return Known(facts.sorted, facts.unique, facts.padded, constant)

    def is_inside(self, use: Use) -> bool:
        """On the CPU every value was looked at before. Elsewhere facts tell; where they are known,
        and tell that something may be out of range, all values are looked at now.
        """
        if settings.check == "never" or use not in self.live:
            return True
        tensors = [self.values[a.tensor] for a in accesses(use.index)]
        if self.known and all(memory.can_look(t) for t in tensors if isinstance(t, Tensor)):
            return True
        seen: list[bool] = []

        def bounds(value: Value) -> tuple[int, int] | None:
            if not isinstance(value, Tensor):
                return int(value.real), int(value.real)
            facts = self.facts(next(n for n, v in self.values.items() if v is value))
            seen.append(facts is not None)
            return None if facts is None else (facts.low, facts.high)

        if is_inside(self.problem, use, self.values, {}, bounds):
            return True
        if not all(seen):
            return False
        verify_values(self.problem, (use,), self.values)
        return True

    def coefficients(self, name: str) -> Any:
        """The values of a floating-point tensor that were promised to be part of the program."""
        entry = memory.known(self.values[name])
        if entry is None or CONSTANT not in entry:
            return None
        tensor: Tensor = self.values[name].detach()
        return entry.remembered("values", lambda: _nested(tensor.tolist()))

    def numbers(self, index: str) -> Any:
        """All values of a short index tensor; None while they are on their way."""
        tensor: Tensor = self.values[index]
        entry = memory.entry_of(tensor)
        self.lasting = self.lasting and entry.declared
        found = entry.get("values")
        if found is not None:
            return found
        if memory.can_look(tensor) or entry.declared:
            return entry.keep("values", _nested(tensor.tolist()))
        coming: Coming | None = entry.get("values, coming")
        if coming is None:
            entry.keep("values, coming", Coming(tensor.detach().long().contiguous()))
            return None
        return entry.keep("values", _nested(coming.numbers())) if coming.is_there() else None


def summary_of(recipe: Recipe, prologue: Prologue) -> Summary:
    """What plans may know of what a recipe makes; `NotYet` while that is on its way."""
    made = prologue.made(recipe)
    if made is None:
        raise NotYet
    return made.summary


def _nested(values: Any) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values
