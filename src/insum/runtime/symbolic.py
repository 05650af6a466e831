"""Programs for calls whose sizes are symbols, and whose index values come later: what an exported
program can hold.

They are the programs that run where nothing is known of index tensors; the same recipes are
evaluated, with symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from insum.codegen.arguments import Passed, Pointer
from insum.lang.bind import Problem, Value
from insum.plan.draft import CannotFuse
from insum.plan.questions import AskExact, AskFacts, AskInside, Question
from insum.plan.sizes import OUT
from insum.plan.uses import uses_of
from insum.runtime import classify, launch
from insum.runtime.bound_launch import CallNumbers
from insum.runtime.program import Launch, Program, Refusal
from insum.runtime.shelf import Programs, wishes_of

__all__ = ["CannotFuse", "program_of", "run"]


def program_of(problem: Problem, values: Mapping[str, Value]) -> Program:
    """The program of a problem, or `CannotFuse`."""
    wishes = wishes_of("", problem.device)
    if wishes.deterministic:
        raise CannotFuse("deterministic mode, and nothing is known of the index tensors")
    if launch.available():
        raise CannotFuse(launch.available())
    if 0 in problem.extents.values() or 0 in problem.shape:
        raise CannotFuse("there is nothing to compute")

    def ask(question: Question) -> Any:
        match question:
            case AskFacts():
                return None
            case AskInside():
                return False
            case AskExact(var):
                raise CannotFuse(f"its kernel needs the extent of {var}")
        raise CannotFuse("its kernel needs values of index tensors")

    wishes = replace(wishes, settings=replace(wishes.settings, effort="none"))
    sizes = classify.symbolic(problem, classify.running(problem), values)
    programs = Programs(problem, uses_of(problem), frozenset(), None)
    found = programs.build(sizes, wishes, ask, anywhere=True)
    if isinstance(found, Refusal):
        raise CannotFuse(found.reason)
    if any(step.recipes() for step in found.steps):
        raise CannotFuse("its kernel needs values of index tensors")
    passed = [a for step in found.steps for one in step.launches for a in one.arguments]
    if any(isinstance(a, Passed) and a.type == "fp64" for a in passed):
        raise CannotFuse("a Python number would be passed in float32 to a float64 kernel")
    return found


def run(
    program: Program,
    problem: Problem,
    values: Mapping[str, Value],
    start: Callable[[Any], Any],
) -> Tensor:
    """Launch everything; ``start`` makes of a jitted function something that is launched like one,
    and can be traced.
    """
    shape: Any = tuple(problem.shape)
    first, dtype = program.steps[0], program.buffer or problem.dtype
    if first.atomic or first.planned.fill:
        out = torch.full(shape, program.start, dtype=dtype, device=problem.device)
    else:
        out = torch.empty(shape, dtype=dtype, device=problem.device)
    sizes = CallNumbers(values, problem.extents, shape, {})  # type: ignore[arg-type]
    for step in program.steps:
        own = {OUT: out}
        for name, room, held in sizes.rooms(step):
            own[name] = torch.empty(room, dtype=held, device=problem.device)
        for one in step.launches:
            _launch(one, sizes, {**values, **own}, start)
    return out if dtype == problem.dtype else out.to(problem.dtype)


def _launch(
    one: Launch,
    sizes: CallNumbers,
    values: Mapping[str, Value],
    start: Callable[[Any], Any],
) -> None:
    counts = sizes.counts(one)
    arguments: list[Any] = []
    for argument in one.arguments:
        match argument:
            case Pointer(name):
                arguments.append(values[name])
            case Passed(name):
                value = values[name]
                arguments.append(int(value) if isinstance(value, bool) else value)
            case _:
                arguments.append(sizes.number(one, argument, counts))
    grid = (sizes.programs(one, counts),)
    config = one.config
    start(one.function)[grid](*arguments, num_warps=config.warps, num_stages=config.stages)
