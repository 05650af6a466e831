"""What a call would launch, without running it: plans, kernels, what the compiler and the model say
of them. Also for architectures that are not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from insum.codegen.kernel import Kernel
from insum.lang.bind import Problem, Value
from insum.plan import cost
from insum.plan.config import Choice
from insum.plan.draft import CannotFuse, Planned, Wishes
from insum.plan.sizes import BASE, OUT
from insum.plan.uses import uses_of
from insum.runtime import classify, compiling, launch
from insum.runtime.answers import Answers
from insum.runtime.bound_launch import BoundLaunch
from insum.runtime.program import ProductLaunches, Program, Refusal
from insum.runtime.prologue.prologue import Prologue
from insum.runtime.ready import Ready, ready
from insum.runtime.shelf import Programs, precision_of, unusable, wishes_of
from insum.settings import settings


class Look:
    """One statement on tensors: its programs, and what it derives from index tensors."""

    def __init__(
        self,
        problem: Problem,
        values: Mapping[str, Value],
        target: Tensor | None = None,
        config: Choice | None = None,
        wishes: Wishes | None = None,
    ) -> None:
        self.problem, self.values, self.target = problem, values, target
        self.extents = {name: int(size) for name, size in problem.extents.items()}
        self.shape = tuple(int(size) for size in problem.shape)
        self.wishes = wishes or wishes_of(_base_of(values, target), problem.device)
        uses = uses_of(problem)
        self.programs = Programs(problem, uses, frozenset(), config)
        self.prologue = Prologue(values, self.extents, self.shape)
        self.answers = Answers(problem, uses, (), values, self.prologue)
        self.sizes = classify.classified(
            problem,
            classify.running(problem),
            values,
            tuple(self.extents.values()),
            self.shape,
            target,
        )

    def planned(self) -> list[Planned]:
        return self.programs.plan(self.sizes, self.wishes, self.answers)

    def program(self, *, anywhere: bool = False) -> Program | Refusal:
        """The program; ``anywhere``: also where it cannot run."""
        if not anywhere and (reason := unusable(self.problem)):
            return Refusal(reason)
        return self.programs.build(self.sizes, self.wishes, self.answers, anywhere=True)

    def ready(self, program: Program) -> Ready:
        tensors = dict(self.values) if self.target is None else {**self.values, OUT: self.target}
        return ready(program, tensors, self.extents, self.shape, self.prologue)

    def load(self, planned: Planned) -> cost.Load:
        rows = None
        if planned.segments is not None:
            made = self.prologue.made(planned.segments)
            assert made is not None
            rows = made.arrays["start"], made.arrays["end"]
        arrays = {}
        for name, array in planned.arrays.items():
            found = self.prologue.made(array.recipe)
            assert found is not None
            arrays[name] = found.arrays[array.part]
        return cost.load_of({**self.values, **arrays}, rows)


def _base_of(values: Mapping[str, Value], target: Tensor | None) -> str:
    """What results are added to: what is passed under that name, the target, or nothing."""
    if BASE in values:
        return BASE
    return "" if target is None else OUT


# --- telling about it -----------------------------------------------------------------------------


def describe(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None = None,
    config: Choice | None = None,
) -> str:
    """The plan and the kernels of a statement, or why there are none."""
    return described(Look(problem, values, target, config))


def described(look: Look, *, anywhere: bool = False) -> str:
    """The same of a look; ``anywhere``: also where it cannot run."""
    program = look.program(anywhere=anywhere)
    return (
        f"no fused kernel: {program.reason}"
        if isinstance(program, Refusal)
        else told(look, program)
    )


def told(look: Look, program: Program) -> str:
    """A program as text: plans, what the model predicts, configs and kernels."""
    parts = []
    for step in program.steps:
        parts.append(step.plan.describe({**step.planned.shown(), **look.extents}))
        if all(look.extents[v] for v in step.variables) and 0 not in look.shape:
            parts.append(_predicted(look, step).describe())
        parts += [f"config       {one.config}\n\n{one.kernel.source}" for one in step.launches]
    return "\n\n".join(parts)


def _predicted(look: Look, step: ProductLaunches) -> cost.Cost:
    device, planned = cost.device_of(look.problem.device), step.planned
    load = look.load(planned)
    return cost.predict(planned.plan, planned.extents, step.choice, device, load)


def predicted(problem: Problem, values: Mapping[str, Value]) -> float:
    """Microseconds of a statement by the model, on the device that is there or an assumed one; NaN
    where there is no kernel.
    """
    look = elsewhere(problem, values)
    program = look.program(anywhere=True)
    if isinstance(program, Refusal):
        return math.nan
    return sum(_predicted(look, step).total for step in program.steps)


def kernels(
    problem: Problem, values: Mapping[str, Value], target: Tensor | None = None
) -> Sequence[Kernel]:
    """The generated kernels of a statement, in launch order."""
    program = Look(problem, values, target).program()
    if isinstance(program, Refusal):
        return ()
    return tuple(one.kernel for step in program.steps for one in step.launches)


def strategy(problem: Problem, values: Mapping[str, Value]) -> str:
    """The scatter strategy of each product of a statement, or why there is no kernel."""
    program = Look(problem, values).program()
    if isinstance(program, Refusal):
        return program.reason
    plans = [step.planned.plan for step in program.steps]
    return ", ".join(plan.strategy + (" + tl.dot" if plan.roles.dot else "") for plan in plans)


# --- without a device -----------------------------------------------------------------------------


def elsewhere(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None = None,
    config: Choice | None = None,
    architecture: str = "sm_90",
) -> Look:
    """A statement as a GPU would get it, on tensors that may lie anywhere."""
    wishes = Wishes(
        settings.values,
        torch.are_deterministic_algorithms_enabled(),
        precision_of(architecture),
        _base_of(values, target),
        architecture,
    )
    return Look(problem, values, target, config, wishes)


def plan_only(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None = None,
    config: Choice | None = None,
    architecture: str = "sm_90",
) -> Program:
    """The program of a statement as a GPU would get it; it cannot be run where its tensors are."""
    look = elsewhere(problem, values, target, config, architecture)
    program = look.program(anywhere=True)
    if isinstance(program, Refusal):
        raise CannotFuse(program.reason)
    return program


def compile_only(
    problem: Problem, values: Mapping[str, Value], architecture: str, target: Tensor | None = None
) -> list[tuple[str, compiling.CompilerReport]]:
    """Compile every kernel of a statement for an architecture that need not be here: (strategy,
    compiler's figures).
    """
    look = elsewhere(problem, values, target, architecture=architecture)
    program = look.program(anywhere=True)
    if isinstance(program, Refusal):
        raise CannotFuse(program.reason)
    found: list[tuple[str, compiling.CompilerReport]] = []
    for one in look.ready(program).launches:
        found.append((one.launch.plan.strategy, _compiled_for(one, architecture)))
    return found


def _compiled_for(one: BoundLaunch, architecture: str) -> compiling.CompilerReport:
    """As a launch would compile it."""
    function, config = one.launch.function, one.launch.config

    def compiled(warps: int) -> compiling.CompilerReport:
        return compiling.compile_for(
            function, one.types, architecture, warps=warps, stages=config.stages
        )

    return compiling.with_enough_warps(compiled, lambda found: found.flaw, config.warps)


def compile_note(problem: Problem, values: Mapping[str, Value], architecture: str) -> str:
    """One line about the kernels of a statement, compiled for an architecture that need not be
    here.
    """
    if launch.available() or launch.interpreting():
        return launch.available() or "interpreted"
    try:
        compiled = compile_only(problem, values, architecture)
    except CannotFuse as reason:
        return str(reason)
    name, figures = max(compiled, key=lambda c: c[1].registers)
    return (
        f"{name}{' + wgmma' if any(c.uses('wgmma') for _, c in compiled) else ''}, "
        f"{figures.registers} registers, {figures.stack} bytes spilled, {figures.warps} warps"
    )
