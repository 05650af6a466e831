"""A program: the kernels of one statement for one class of sizes, with recipes for their arguments.

Nothing in it belongs to one call. `runtime.ready` evaluates the recipes for the sizes, strides and
index tensors of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from insum.codegen.arguments import Argument, Count, ExtentArgument, annotation
from insum.codegen.kernel import Kernel
from insum.lang.bind import Problem
from insum.plan.config import Choice, Config
from insum.plan.draft import Planned, Wishes
from insum.plan.plan import Plan
from insum.plan.recipes import OfCount, Recipe, SizeExpr
from insum.plan.sizes import OUT, WORK
from insum.plan.uses import Use

__all__ = ["OUT", "WIDE", "WORK", "Grid", "Launch", "ProductLaunches", "Program", "Workspace"]

WIDE = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}

#: How many programs there are: the product of ``ceil(product of sizes / tile)``.
Grid: TypeAlias = tuple[tuple[tuple[ExtentArgument | Count, ...], int], ...]


#: What lies in the workspace of a product, one behind the other, in numbers of the accumulator.
Workspace: TypeAlias = tuple[SizeExpr, ...]

#: Kernels of one statement up to which every class of sizes has its own; then those of the same
#: widths and about the same lengths share them; then those of lengths that differ more; then those
#: whose widths keep loads wide, and those whose do not; and what comes last shares kernels for all
#: sizes.
MOST_FINE, MOST_BY_LENGTH, MOST_BY_WIDTH, MOST_EXACT = 16, 38, 44, 47


@dataclass(slots=True, eq=False)
class Room:
    """The kernels that were written for classes of sizes of one statement: text, warps, stages, and
    which pointers are not aligned, where that is not as usual.
    """

    kernels: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def is_left(self) -> bool:
        return len(self.kernels) < MOST_EXACT

    @property
    def level(self) -> int:
        """How much what is new has to share, from nothing to everything."""
        limits = MOST_FINE, MOST_BY_LENGTH, MOST_BY_WIDTH, MOST_EXACT
        return sum(len(self.kernels) >= limit for limit in limits)

    def takes(self, kernel: tuple[object, ...]) -> bool:
        """Whether a kernel may be compiled; if so it is counted."""
        if kernel not in self.kernels and not self.is_left:
            return False
        self.kernels.add(kernel)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel, and how its arguments and its grid follow from a call.

    Attributes:
        arrays: by the names that the kernel has for them, arrays that recipes make: which recipe,
            and which of its arrays.
        counts: numbers of the launch, known now or given by a recipe.
        before: programs of the launch that come before those of ``grid``.
        general: whether it serves all sizes and strides: no use is made of aligned pointers.
        room: where its variants are counted.
        variants: what was compiled, by the types of the pointers and by which are not aligned.
        types: of its arguments, where they are no pointers.
        indices: tensors that stand in an index.
    """

    plan: Plan
    kernel: Kernel
    function: Any
    header: str
    config: Config
    grid: Grid
    arrays: Mapping[str, tuple[Recipe, str]]
    counts: Mapping[str, int | OfCount]
    general: bool = False
    room: Room | None = None
    before: Grid | None = None
    variants: dict[tuple[Any, ...], dict[int, Any]] = field(default_factory=dict)
    types: tuple[str, ...] = field(init=False)
    indices: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        types = tuple(annotation(one, wide=self.plan.wide) for one in self.arguments)
        object.__setattr__(self, "types", types)
        object.__setattr__(self, "indices", self.plan.index_tensors)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return self.kernel.arguments

    @property
    def text(self) -> tuple[object, ...]:
        """What is compiled, but for types and alignment."""
        return self.kernel.source, self.config.warps, self.config.stages


@dataclass(frozen=True, slots=True)
class CopyRoom:
    """Memory for the copy of a factor, under the name that kernels read it by."""

    name: str
    shape: SizeExpr
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class ProductLaunches:
    """One product of the statement: its launches and what the output must be before them."""

    planned: Planned
    launches: tuple[Launch, ...]
    workspace: Workspace  # for pieces of sums, or ()
    atomic: bool
    choice: Choice
    variables: tuple[str, ...]  # where one of them has no values, there is nothing to do
    copies: tuple[CopyRoom, ...] = ()  # of factors, which the first launches fill

    @property
    def plan(self) -> Plan:
        """As it is told: with copies of factors in their places."""
        return self.launches[len(self.copies)].plan if self.copies else self.planned.plan

    def recipes(self) -> tuple[Recipe, ...]:
        """Everything that must be made before the launches."""
        found = [array.recipe for array in self.planned.arrays.values()]
        for launch in self.launches:
            found += [recipe for recipe, _ in launch.arrays.values()]
            found += [one.recipe for one in launch.counts.values() if isinstance(one, OfCount)]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class Program:
    """All products of one statement, for one class of sizes and what is known of index tensors.

    Attributes:
        buffer: the dtype in which contributions meet where it is not the result's.
        start: what a result starts from.
        unchecked: uses whose index values nobody has looked at, so that its kernels treat what is
            out of range as absent; ``check`` looks at them.
        codes: by whether it is called in place, what runs it on other sizes (`runtime.unseen`).
    """

    problem: Problem
    wishes: Wishes
    steps: tuple[ProductLaunches, ...]
    buffer: torch.dtype | None
    start: bool | int | float
    unchecked: tuple[Use, ...] = ()
    check: Launch | None = None
    codes: dict[bool, Any] = field(default_factory=dict)
    #: By the programs of other statements, that of one launch for all (`runtime.one_launch`).
    together: dict[tuple[Program, ...], Program | None] = field(default_factory=dict)
    #: Of several programs, this one the first, which of them one launch can be for.
    orders: dict[tuple[tuple[int, Program], ...], list[int]] = field(default_factory=dict)

    @property
    def launches(self) -> list[Launch]:
        found = [one for step in self.steps for one in step.launches]
        return found if self.check is None else [self.check, *found]

    @functools.cached_property
    def limits(self) -> tuple[tuple[str, str, int, bool, bool], ...]:
        """Of the unchecked uses that are one index tensor alone: its name, what it indexes and
        where, and how negative values are meant.
        """
        return tuple(
            (u.tensor, OUT if u.is_target else u.access.tensor, u.dim, u.padded, u.wraps)
            for u in self.unchecked
            if u.tensor
        )

    def ranges(
        self, values: Mapping[str, Any], shape: tuple[int, ...]
    ) -> list[tuple[str, tuple[int, int]]]:
        """The ranges that unchecked index tensors must keep in a call: from a least value up to a
        limit.
        """
        found = []
        for name, owner, dim, padded, wraps in self.limits:
            limit = shape[dim] if owner is OUT else values[owner].shape[dim]
            found.append((name, (-limit if wraps else -1 if padded else 0, limit)))
        return found

    @property
    def promotes(self) -> bool:
        """Whether short patterns may become code: another kernel rounds differently from one call
        to the next, which deterministic mode forbids.
        """
        return self.wishes.settings.scatter == "auto" and not self.wishes.deterministic


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a statement has no kernel."""

    reason: str
