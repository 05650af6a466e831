"""Finding the program of a call, by its size class and by what is known of its index tensors; built
the first time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from insum.bounded import keep
from insum.errors import SettingsError
from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
from insum.plan import legal
from insum.plan.config import Choice
from insum.plan.draft import CannotFuse, Planned, Subject, Wishes
from insum.plan.joining import added_up, joined
from insum.plan.library import WHY, is_batch_left_to_library
from insum.plan.orientation import oriented
from insum.plan.plan import Plan
from insum.plan.questions import Ask, AskExact, AskInside, Question
from insum.plan.sizes import (
    FEWER_LENGTHS,
    LENGTHS,
    OUT,
    Differing,
    SizeClass,
    coarse,
    general,
)
from insum.plan.strategies import plan
from insum.plan.uses import Use
from insum.runtime import cache, launch
from insum.runtime.build import assemble, first_choice
from insum.runtime.program import Program, Refusal, Room
from insum.settings import SettingValues, settings

ProgramOrRefusal: TypeAlias = Program | Refusal
#: Classes of sizes of one statement, those that have programs of their own, those that share them,
#: and answers to one question.
MOST_CLASSES, MOST_OWN, MOST_SHARED, MOST_ANSWERS = 2048, 16, 256, 64
#: Classes of extents up to which a variable is taken for a width, of which a network has so many;
#: and, for what index tensors run over or point to, for a side of groups. Others have another
#: extent at every call.
MOST_WIDTHS, MOST_SIDES = 12, 5
#: The levels at which lengths are fewer, widths are shared, too, and programs are for all sizes.
FEWER, ANY_WIDTH, GENERAL = 2, 3, 4


@dataclass(slots=True)
class QuestionTree:
    """The questions that planning asks for one class of sizes, and the program where it ends."""

    question: Question | None = None
    branches: dict[Any, QuestionTree] = field(default_factory=dict)
    found: ProgramOrRefusal | None = None

    def asked(self, ask: Ask, extents: Mapping[str, int] | None = None) -> ProgramOrRefusal | None:
        """The program of these answers; None where there is none yet. ``extents``: those of the
        call, where they need not be asked for.
        """
        tree = self
        while tree.question is not None:
            question, branches = tree.question, tree.branches
            known = extents is not None and type(question) is AskExact
            answer = extents[question.var] if known else ask(question)  # type: ignore[index,union-attr]
            tree = branches.get(answer) or keep(branches, answer, QuestionTree(), MOST_ANSWERS)
        return tree.found

    def note(self, answers: Mapping[Any, Any], found: ProgramOrRefusal) -> None:
        """What was found by these answers, in the order in which they were asked for."""
        tree = self
        for question, answer in answers.items():
            tree.question = question
            tree = tree.branches.setdefault(answer, QuestionTree())
        tree.found = found


@dataclass(frozen=True, slots=True, eq=False)
class ClassPrograms:
    """The programs of one class of sizes; ``level``: how much they share, see `Room.level`."""

    sizes: SizeClass
    level: int
    tree: QuestionTree = field(default_factory=QuestionTree)


@dataclass(eq=False)
class Shelf:
    """The programs of one statement on tensors of the same dtypes, whatever the settings.

    A class of sizes gets a program of its own while there is room for more kernels, and keeps it;
    classes that come later share programs with those of the same widths, then with those of other
    widths, and then with all. So a call runs the same program at all times.

    Attributes:
        classes: by class of sizes and wishes, what runs.
        shared: by coarser classes, and wishes.
        met: classes of extents of each variable, and sizes of each dimension of the output.
        moving: those of which more were met than a network has.
    """

    epoch: int = -1
    room: Room = field(default_factory=Room)
    classes: dict[object, ClassPrograms] = field(default_factory=dict)
    shared: dict[object, ClassPrograms] = field(default_factory=dict)
    met: dict[Differing, set[object]] = field(default_factory=dict)
    moving: frozenset[Differing] = frozenset()

    def of_class(
        self, key: object, wishes: Wishes, sizes: Callable[[], SizeClass]
    ) -> ClassPrograms:
        """Where the program of a class of sizes is found, or is to be put."""
        if self.epoch != cache.epoch():  # other configs were found: everything is written anew
            self.epoch, self.room, self.classes, self.shared = cache.epoch(), Room(), {}, {}
        found = self.classes.get((key, wishes))
        if found is None:
            level = max(self.room.level, int(len(self.classes) >= MOST_OWN))
            found = self.note_class(key, level, wishes, sizes())
        return found

    def note_class(
        self, key: object, level: int, wishes: Wishes, sizes: SizeClass
    ) -> ClassPrograms:
        """What a class of sizes runs from now on, which has to share so much."""
        self.meet(sizes)
        if len(self.classes) >= MOST_CLASSES:  # which is not noted, and must stay what it is
            return self.at_level(GENERAL, wishes, sizes)
        return self.classes.setdefault((key, wishes), self.at_level(level, wishes, sizes))

    def next_of_class(
        self, key: object, level: int, wishes: Wishes, sizes: Callable[[], SizeClass]
    ) -> ClassPrograms:
        """The same where a class shares so much, because there was no room for other answers."""
        found = self.classes.get(((key, level), wishes))
        return self.note_class((key, level), level, wishes, sizes()) if found is None else found

    def meet(self, sizes: SizeClass) -> None:
        """Note what calls differ by."""
        differing: dict[Differing, object] = dict(enumerate(sizes.shape))
        differing.update(sizes.extents)
        for one, size in differing.items():
            if one not in self.moving:
                met = self.met.setdefault(one, set())
                met.add(size)
                is_width = one in sizes.extents and one not in sizes.runs
                if len(met) > (MOST_WIDTHS if is_width else MOST_SIDES):
                    self.moving |= {one}

    def at_level(self, level: int, wishes: Wishes, sizes: SizeClass) -> ClassPrograms:
        """What runs where so much has to be shared."""
        if level == 0:
            return ClassPrograms(sizes, level)
        if level == GENERAL:
            sizes = general(sizes)
        else:
            widths = {v for v in sizes.extents if v not in sizes.runs} if level == ANY_WIDTH else ()
            lengths = LENGTHS if level < FEWER else FEWER_LENGTHS
            sizes = coarse(sizes, self.moving.union(widths), lengths)
        made = ClassPrograms(sizes, level)
        return keep(self.shared, (level, sizes.key, wishes), made, MOST_SHARED)


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of one kind of call."""

    problem: Problem  # of any sizes
    uses: tuple[Use, ...]
    wraps: frozenset[str]
    config: Choice | None
    shelf: Shelf = field(default_factory=Shelf)

    def find(
        self, key: object, sizes: Callable[[], SizeClass], wishes: Wishes, ask: Ask
    ) -> ProgramOrRefusal:
        """The program for a class of sizes and what is known of index tensors."""
        shelf = self.shelf
        of = shelf.of_class(key, wishes, sizes)
        found = of.tree.asked(ask)
        for level in range(of.level + 1, shelf.room.level + 1):
            if found is None:  # for other answers nothing is written
                of = shelf.next_of_class(key, level, wishes, sizes)
                found = of.tree.asked(ask)
        return self.grow(of, wishes, ask) if found is None else found

    def grow(self, of: ClassPrograms, wishes: Wishes, ask: Ask) -> ProgramOrRefusal:
        """Plan and build, and note every question with its answer on the way."""
        answers: dict[Question, Any] = {}

        def noted(question: Question) -> Any:
            if question not in answers:
                answers[question] = ask(question)
            return answers[question]

        found = self.build(of.sizes, wishes, noted)
        if isinstance(found, Program) and of.level < GENERAL:
            self.shelf.room.kernels.update((*one.text,) for one in found.launches)
        of.tree.note(answers, found)
        return found

    def build(
        self, sizes: SizeClass, wishes: Wishes, ask: Ask, *, anywhere: bool = False
    ) -> ProgramOrRefusal:
        """Plan and write the kernels; ``anywhere``: also where they cannot run."""
        reason = "" if anywhere else unusable(self.problem)
        if reason:
            return Refusal(reason)
        if self.is_left_to_library(sizes, wishes):
            return Refusal(WHY)
        try:
            planned = self.plan(sizes, wishes, ask)
            choices = chosen(self.problem, planned, wishes, self.config)
            unchecked = tuple(u for k, u in enumerate(self.uses) if not ask(AskInside(k)))
            room = self.shelf.room
            return assemble(self.problem, planned, wishes, choices, unchecked, room)
        except CannotFuse as refused:
            return Refusal(str(refused))

    def is_left_to_library(self, sizes: SizeClass, wishes: Wishes) -> bool:
        now, added = wishes.settings, bool(wishes.base)
        if now.backend == "fused" or now.require_fused or self.config is not None:
            return False
        return is_batch_left_to_library(self.problem, sizes.typical(), accumulates=added)

    def plan(self, sizes: SizeClass, wishes: Wishes, ask: Ask) -> list[Planned]:
        """Every product of the statement, planned; all but the first add to what is there. Those
        that can be are one.
        """

        def planned(terms: Sequence[ProductTerm]) -> list[Planned]:
            adding = replace(wishes, base=OUT)
            return [
                plan(Subject(self.problem, term, sizes, wish, self.uses, self.wraps, ask))
                for term, wish in zip(terms, (wishes, *[adding] * (len(terms) - 1)), strict=True)
            ]

        apart = planned(self.problem.terms)
        together = added_up(self.problem, apart)
        return joined(apart) if together is None else planned([together])


def unusable(problem: Problem) -> str:
    """Why no kernel can run there, or ''."""
    if launch.available():
        return launch.available()
    interpreted = launch.interpreting() and problem.device.type == "cpu"
    if problem.device.type != "cuda" and not interpreted:
        return f"generated kernels do not run on {problem.device.type}"
    return ""


# --- what decides besides the statement -----------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _wishes(
    values: SettingValues, deterministic: bool, precision: str, base: str, architecture: str
) -> Wishes:
    """One object for equal wishes: they are compared at every call."""
    return Wishes(values, deterministic, precision, base, architecture)


def wishes_of(base: str, device: torch.device | None = None) -> Wishes:
    """What decides plans besides statement and tensors, as it is now; ``base``: what results are
    added to, the output itself or another tensor, or nothing.
    """
    architecture, precision = _architecture(device), precision_on(device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _wishes(settings.values, deterministic, precision, base, architecture)


def precision_on(device: torch.device | None) -> str:
    """That of `precision_of` for a device; the interpreter knows one."""
    return "ieee" if launch.interpreting() else precision_of(_architecture(device))


def precision_of(architecture: str) -> str:
    """How float32 operands are multiplied: exactly, or as PyTorch's own setting allows."""
    if architecture.startswith("gfx"):
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def _architecture(device: torch.device | None) -> str:
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return "sm_90"
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


# --- configs --------------------------------------------------------------------------------------


def chosen(
    problem: Problem, planned: Sequence[Planned], wishes: Wishes, config: Choice | None
) -> list[Choice]:
    """What the user gave, else what a search found and was kept, else the first guess."""
    if config is not None:
        return _given(problem, planned, wishes, config)
    return [recalled(problem, one, wishes) or first_choice(one, wishes) for one in planned]


def recalled(problem: Problem, planned: Planned, wishes: Wishes) -> Choice | None:
    """A choice that was found for such a product before and is legal for this one."""
    choice = cache.recall(cache.key_of(planned, problem.device))
    fits = choice and not legal.broken(_oriented(planned, wishes, choice), planned.extents, choice)
    return choice if fits else None


def _given(
    problem: Problem, planned: Sequence[Planned], wishes: Wishes, config: Choice
) -> list[Choice]:
    """The user's configs, dealt out to the products of the statement."""
    counts = [len(legal.kinds(one.plan)) for one in planned]
    if len(config) != sum(counts):
        names = ", ".join(name for one in planned for name in legal.kinds(one.plan))
        raise problem.complain(
            SettingsError,
            f"{len(config)} config(s) were given",
            expected=f"{sum(counts)}: {names}",
        )
    dealt = iter(config)
    choices = [tuple(next(dealt) for _ in range(count)) for count in counts]
    for one, choice in zip(planned, choices, strict=True):
        empty = 0 in one.extents.values() or 0 in one.sizes.shape
        rule = "" if empty else legal.broken(_oriented(one, wishes, choice), one.extents, choice)
        if rule:
            raise problem.complain(
                SettingsError,
                f"the config does not fit: {rule}",
                remedy="leave config= out, or take one that insum.tune found for this statement",
            )
    return choices


def _oriented(planned: Planned, wishes: Wishes, choice: Choice) -> Plan:
    return oriented(planned.plan, planned.extents, choice[0].swap, allowed=wishes.settings.swap)
