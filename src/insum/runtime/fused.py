"""Runs a bound statement as generated kernels: plan once, keep the launch, then only look up and
launch.

A launch is kept with the facts of the index tensor that decided it (so it lives as long as that
tensor), or, where no index tensor decided anything, in one bounded table.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum.codegen.emit import Kernel
from insum.errors import NotFusedError, SettingsError
from insum.lang.bind import Problem, Value
from insum.lang.expr import variables
from insum.plan import cost, legal, model
from insum.plan.config import Choice
from insum.plan.facts import facts_of
from insum.plan.plan import Plan
from insum.plan.prepare import PROMOTE_POINTS, CannotFuse, Prepared, Wishes, index_reads, prepare
from insum.runtime import cache, launch
from insum.runtime.build import anchors, assemble, first_choice, is_empty, jobs
from insum.runtime.program import Program
from insum.settings import settings

_launches: dict[object, Program | Refusal] = {}
_MOST_LAUNCHES = 1024
_said: set[str] = set()
_NOWHERE = contextlib.nullcontext()
#: Lines from which on a kernel takes seconds to compile.
LONG_KERNEL = 60


@dataclass(slots=True, eq=False)
class Refusal:
    """Why a statement has no kernel; holds what was asked about, so that identities stay taken."""

    problem: Problem
    wishes: Wishes
    reason: str


def run(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None,
    config: Choice | None = None,
) -> Tensor | None:
    """The statement's result, or None where no kernel can express it. With ``target``, accumulates
    into it in place.
    """
    if any([isinstance(v, Tensor) and v.is_neg() for v in values.values()]):  # noqa: C419  # on the path of every call
        values = {
            name: v.resolve_neg() if isinstance(v, Tensor) else v for name, v in values.items()
        }
    if problem.device.type == "cuda" and (how := _capture().state(problem)):
        with on_device(problem.device):
            return _capture().run(problem, values, target, config, how)  # type: ignore[no-any-return]
    program = lookup(problem, values, target, config)
    if isinstance(program, str):
        _fall_back(problem, program)
        return None
    return execute(program, values, None) if target is None else into(program, values, target)


def into(program: Program, values: Mapping[str, Value], target: Tensor) -> Tensor:
    """Accumulate into ``target``, and let autograd and facts about it know that it was written."""
    result = execute(program, values, target)
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)
    return result


@functools.cache
def _capture() -> Any:
    from insum.runtime import capture  # which rests on this module

    return capture


def execute(program: Program, values: Mapping[str, Value], target: Tensor | None) -> Tensor:
    """Launch everything, on the program's device; without a ``target`` into a new tensor."""
    if program.index is not None and program.index != torch.cuda.current_device():
        with torch.cuda.device(program.index):
            return execute(program, values, target)
    if target is None:
        out = program.empty()
        if program.filled:
            out.fill_(program.start)
    else:
        out = (
            target
            if program.buffer is None
            else target.to(program.buffer, memory_format=torch.contiguous_format, copy=True)
        )
    for room, launches in program.work:
        work = None if room is None else room()
        for one in launches:
            one(values, out, work)
    if program.buffer is None:
        return out
    return out.to(program.problem.dtype) if target is None else target.copy_(out)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return _NOWHERE
    return torch.cuda.device(device)


def _fall_back(problem: Problem, why: str) -> None:
    text = problem.statement.text or str(problem.statement)
    if settings.require_fused:
        expected, remedy = (
            "a statement that a kernel can express",
            "settings.require_fused = False runs it as a graph of torch operations",
        )
        raise problem.complain(
            NotFusedError, f"no fused kernel: {why}", expected=expected, remedy=remedy
        )
    if settings.backend == "fused" or "fallback" in settings.log:
        import warnings

        if text not in _said:
            _said.add(text)
            warnings.warn(
                f"insum: {text!r} runs as a graph of torch operations: {why}", stacklevel=5
            )


# --- looking up -----------------------------------------------------------------------------------


def lookup(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None,
    config: Choice | None = None,
) -> Program | str:
    """The program for this kind of call, built the first time; a string says why there is none."""
    table, key = _place(problem, values, target)
    program: Program | Refusal | None = table.get(key)
    if program is None:
        program = _build_and_keep(table, key, problem, values, target, config)
        _compile_together(program, values)
    if isinstance(program, Refusal):
        return program.reason
    if program.promote and _promoted(program, values):
        return lookup(problem, values, target, config)
    return program


def _compile_together(program: Program | Refusal, values: Mapping[str, Value]) -> None:
    """Several long kernels are compiled at the same time, by worker processes, instead of one after
    the other.
    """
    if (
        isinstance(program, Refusal)
        or program.problem.device.type != "cuda"
        or launch.interpreting()
    ):
        return
    long = [
        one
        for step in program.steps
        for one in step.launches
        if one.kernel.source.count("\n") > LONG_KERNEL
    ]
    if len(long) > 1 and (wanted := jobs(program, values, new=True)):
        with contextlib.suppress(OSError):
            launch.compile_ahead(wanted, launch.current_target())


def kept(problem: Problem, values: Mapping[str, Value], target: Tensor | None) -> Program | None:
    """The program of an earlier call like this one. Asks nothing of the device where facts are
    known.
    """
    table, key = _place(problem, values, target)
    program = table.get(key)
    return program if isinstance(program, Program) else None


def _place(
    problem: Problem, values: Mapping[str, Value], target: Tensor | None
) -> tuple[dict[object, Any], tuple[object, ...]]:
    """Where the program for this kind of call is kept."""
    names = anchors(problem)
    facts = (
        [facts_of(value) for name in names if isinstance(value := values[name], Tensor)]
        if names
        else ()
    )
    table: dict[object, Any] = facts[0].derived if facts else _launches
    # The problem belongs to one request, hence to one config; program and refusal hold problem and
    # settings, so that no id is used twice.
    key: tuple[object, ...] = (
        id(problem),
        id(settings.values),
        cache.epoch(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        None if target is None else target.stride(),
        *[v.stride() if isinstance(v, Tensor) else None for v in values.values()],
        *[(f.serial, f.constant) for f in facts],
    )
    baked = table.get(("baked", key))
    return _baked(baked, values, key) if baked else (table, key)


def _build_and_keep(
    table: dict[object, Any],
    key: tuple[object, ...],
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None,
    config: Choice | None,
) -> Program | Refusal:
    wishes = wishes_of(target is not None, problem.device)
    reason = unusable(problem)
    program = (
        Refusal(problem, wishes, reason)
        if reason
        else _build(problem, values, target, wishes, config)
    )
    if table is _launches and len(_launches) >= _MOST_LAUNCHES:
        _launches.clear()
    # building may tune, and a later look-up then builds with what was found
    if cache.epoch() == key[2]:
        names = (
            ()
            if isinstance(program, Refusal)
            else tuple(
                dict.fromkeys(
                    n for s in program.steps for n in s.prepared.baked if n not in anchors(problem)
                )
            )
        )
        if names and names != table.get(("baked", key)):
            table["baked", key] = names
            table, key = _baked(names, values, key)
        table[key] = program
    return program


def _baked(
    names: tuple[str, ...], values: Mapping[str, Value], key: tuple[object, ...]
) -> tuple[dict[object, Any], tuple[object, ...]]:
    """Where a program is kept that holds values of further index tensors: it is good for those
    alone, and lives as long as the first.
    """
    facts = [facts_of(values[name]) for name in names]  # type: ignore[arg-type]
    return facts[0].derived, (*key, *(f.serial for f in facts))


#: A short pattern that comes back for this many calls is compiled into the code.
_PROMOTE_AT = 3


def _promoted(program: Program, values: Mapping[str, Value]) -> bool:
    """Whether this call is the one at which a pattern that keeps coming back is taken for a
    constant.
    """
    program.calls[0] += 1
    if (
        program.calls[0] <= _PROMOTE_AT
        or torch.cuda.is_available()
        and torch.cuda.is_current_stream_capturing()
    ):
        return False
    fresh = [facts for name in program.promote if not (facts := facts_of(values[name])).constant]  # type: ignore[arg-type]
    for facts in fresh:
        facts.constant = True
    return bool(fresh)


def _promotable(
    problem: Problem, prepared: Sequence[Prepared], config: Choice | None
) -> tuple[str, ...]:
    """Index tensors of a short pattern that scatters into registers: straight-line code is faster
    still.
    """
    if (
        config is not None
        or len(prepared) != 1
        or prepared[0].plan.strategy != "onehot"
        or settings.scatter != "auto"
    ):
        return ()
    if torch.are_deterministic_algorithms_enabled():
        return ()  # another kernel would round differently from one call to the next
    reads = index_reads(problem, problem.terms[0])
    points = math.prod(
        int(problem.extents[v]) for v in dict.fromkeys(v for a in reads for v in variables(a))
    )
    return tuple(dict.fromkeys(a.tensor for a in reads)) if points <= PROMOTE_POINTS else ()


def unusable(problem: Problem) -> str:
    if launch.available():
        return launch.available()
    if problem.device.type not in ("cuda",) and not (
        launch.interpreting() and problem.device.type == "cpu"
    ):
        return f"generated kernels do not run on {problem.device.type}"
    return ""


def wishes_of(accumulate: bool, device: torch.device | None = None) -> Wishes:
    """What decides plans besides statement and tensors, as it is now."""
    architecture = _architecture(device)
    precision = "ieee" if launch.interpreting() else _precision(architecture)
    return Wishes(
        settings.values,
        torch.are_deterministic_algorithms_enabled(),
        precision,
        accumulate,
        architecture,
    )


def _precision(architecture: str) -> str:
    """How float32 operands are multiplied: exactly, or as PyTorch's own setting allows."""
    if architecture.startswith("gfx"):
        return "ieee"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@functools.cache
def _architecture(device: torch.device | None) -> str:
    if device is None or device.type != "cuda" or not torch.cuda.is_available():
        return "sm_90"
    properties: Any = torch.cuda.get_device_properties(device)
    return (
        f"sm_{properties.major}{properties.minor}"
        if torch.version.hip is None
        else str(properties.gcnArchName).split(":")[0]
    )


# --- building -------------------------------------------------------------------------------------


def prepare_all(problem: Problem, values: Mapping[str, Value], wishes: Wishes) -> list[Prepared]:
    """Every product of the statement, planned; all but the first add to what is there."""
    return [
        prepare(problem, term, values, wishes if i == 0 else replace(wishes, accumulate=True))
        for i, term in enumerate(problem.terms)
    ]


def _build(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None,
    wishes: Wishes,
    config: Choice | None = None,
) -> Program | Refusal:
    try:
        prepared = prepare_all(problem, values, wishes)
        choices = _choices(problem, prepared, values, target, wishes, config)
        program = assemble(problem, prepared, values, target, wishes, choices)
    except CannotFuse as reason:
        return Refusal(problem, wishes, str(reason))
    return replace(program, promote=_promotable(problem, prepared, config))


def _choices(
    problem: Problem,
    prepared: Sequence[Prepared],
    values: Mapping[str, Value],
    target: Tensor | None,
    wishes: Wishes,
    config: Choice | None,
) -> list[Choice]:
    """What the user gave, else what a search found and was kept, else what a search finds now, else
    the first guess.
    """
    if config is not None:
        return _given(problem, prepared, wishes, config)
    found = [recalled(problem, one, wishes) for one in prepared]
    if wishes.settings.effort != "none" and not all(found):
        from insum.runtime import tune

        return tune.on_first_call(problem, prepared, values, target, wishes)
    return [
        choice or first_choice(one, wishes) for choice, one in zip(found, prepared, strict=True)
    ]


def recalled(problem: Problem, prepared: Prepared, wishes: Wishes) -> Choice | None:
    """A choice that was found for such a product before and is legal for this one."""
    choice = cache.recall(cache.key_of(prepared, problem.device))
    return (
        choice
        if choice
        and not legal.broken(_oriented(prepared, wishes, choice), prepared.extents, choice)
        else None
    )


def _given(
    problem: Problem, prepared: Sequence[Prepared], wishes: Wishes, config: Choice
) -> list[Choice]:
    """The user's configs, dealt out to the products of the statement."""
    counts = [len(legal.kinds(one.plan)) for one in prepared]
    if len(config) != sum(counts):
        names = ", ".join(name for one in prepared for name in legal.kinds(one.plan))
        raise problem.complain(
            SettingsError, f"{len(config)} config(s) were given", expected=f"{sum(counts)}: {names}"
        )
    dealt = iter(config)
    choices = [tuple(next(dealt) for _ in range(count)) for count in counts]
    for one, choice in zip(prepared, choices, strict=True):
        rule = (
            ""
            if is_empty(problem, one)
            else legal.broken(_oriented(one, wishes, choice), one.extents, choice)
        )
        if rule:
            remedy = "leave config= out, or take one that insum.tune found for this statement"
            raise problem.complain(SettingsError, f"the config does not fit: {rule}", remedy=remedy)
    return choices


def _oriented(prepared: Prepared, wishes: Wishes, choice: Choice) -> Plan:
    return model.oriented(
        prepared.plan, prepared.extents, choice[0].swap, allowed=wishes.settings.swap
    )


# --- telling about it -----------------------------------------------------------------------------


def describe(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None = None,
    config: Choice | None = None,
) -> str:
    """The plan and the kernels of a statement, or why there are none."""
    program = lookup(problem, values, target, config)
    if isinstance(program, str):
        return f"no fused kernel: {program}"
    return told(program, values)


def told(program: Program, values: Mapping[str, Value]) -> str:
    """A program as text: plans, what the model predicts, configs and kernels."""
    parts = []
    device = cost.device_of(program.problem.device)
    for step in program.steps:
        parts.append(step.prepared.plan.describe(step.prepared.extents))
        if step.launches:
            parts.append(
                cost.predict(
                    step.prepared.plan,
                    step.prepared.extents,
                    step.choice,
                    device,
                    cost.load_of(step.prepared, values),
                ).describe()
            )
        parts += [f"config       {one.config}\n\n{one.kernel.source}" for one in step.launches]
    return "\n\n".join(parts)


def kernels(
    problem: Problem, values: Mapping[str, Value], target: Tensor | None = None
) -> Sequence[Kernel]:
    """The generated kernels of a statement, in launch order."""
    program = lookup(problem, values, target)
    return (
        ()
        if isinstance(program, str)
        else tuple(one.kernel for step in program.steps for one in step.launches)
    )


def strategy(problem: Problem, values: Mapping[str, Value]) -> str:
    """The scatter strategy of each product of a statement, or why there is no kernel."""
    program = lookup(problem, values, None)
    if isinstance(program, str):
        return program
    plans = [step.prepared.plan for step in program.steps]
    return ", ".join(plan.strategy + (" + tl.dot" if plan.roles.dot else "") for plan in plans)


# --- without a device -----------------------------------------------------------------------------


def plan_only(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None = None,
    config: Choice | None = None,
    architecture: str = "sm_90",
) -> Program:
    """The program of a statement as a GPU would get it, built from tensors that may lie anywhere;
    it cannot be run there.
    """
    wishes = Wishes(
        settings.values,
        torch.are_deterministic_algorithms_enabled(),
        _precision(architecture),
        target is not None,
        architecture,
    )
    program = _build(problem, values, target, wishes, config)
    if isinstance(program, Refusal):
        raise CannotFuse(program.reason)
    return program


def compile_only(
    problem: Problem, values: Mapping[str, Value], architecture: str
) -> list[tuple[str, launch.Compiled]]:
    """Compile every kernel of a statement for an architecture that need not be here: (strategy,
    compiler's figures).
    """
    found = []
    program = plan_only(problem, values, architecture=architecture)
    for step in program.steps:
        for one in step.launches:
            arguments = one.bound(values, *program.examples(step))
            compiled = launch.compile_for(
                one.function,
                arguments,
                architecture,
                warps=one.config.warps,
                stages=one.config.stages,
            )
            found.append((step.prepared.plan.strategy, compiled))
    return found


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
        f"{figures.registers} registers, {figures.stack} bytes spilled"
    )
