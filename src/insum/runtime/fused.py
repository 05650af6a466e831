"""Runs a bound statement as generated kernels: plan once, keep the launch, then only look up and launch.

A launch is kept with the facts of the index tensor that decided it (so it lives as long as that tensor), or, where no index
tensor decided anything, in one bounded table.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum.codegen.emit import Kernel, Shape, emit
from insum.codegen.unrolled import emit_unrolled
from insum.errors import NotFusedError
from insum.lang.bind import Problem, Value
from insum.lang.expr import Access, index_of, variables
from insum.lang.types import identity
from insum.plan import model
from insum.plan.config import Config, power_of_two
from insum.plan.facts import IndexFacts, facts_of
from insum.plan.plan import Plan, Segment
from insum.plan.prepare import PROMOTE_POINTS, CannotFuse, Prepared, Wishes, index_reads, prepare
from insum.plan.roles import Contraction
from insum.plan.schedule import Segments, Tasks, tasks
from insum.runtime import launch
from insum.settings import settings

_WIDE = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
_launches: dict[object, _Program | str] = {}
_MOST_LAUNCHES = 1024
_said: set[str] = set()
_OUT, _WORK = "out_at", "work_at"  # arguments that are no tensors of the statement; names of those end in _ptr
_NOWHERE = contextlib.nullcontext()


@dataclass(slots=True, eq=False)
class _Launch:
    """One kernel launch: ``arguments`` are constants, or ``names`` to look up among the call's tensors."""

    function: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    names: tuple[tuple[int, str], ...]  # (position, name) of arguments that change from call to call
    config: Config
    kernel: Kernel
    header: str
    runner: Any = None  # the compiled kernel, for calls whose pointers are all aligned as the first such call's were

    def __call__(self, values: Mapping[str, Any], out: Tensor, work: Tensor | None) -> None:
        arguments = list(self.arguments)
        aligned = True
        for position, name in self.names:
            value = out if name == _OUT else work if name == _WORK else values[name]
            arguments[position] = value
            if isinstance(value, Tensor) and value.data_ptr() % 16:
                aligned = False
        if aligned and self.runner is not None:
            self.runner(*arguments)
            return
        compiled = self.function[self.grid](*arguments, num_warps=self.config.warps, num_stages=self.config.stages)
        if aligned and compiled is not None and not any(self._is_number(values, name) for _, name in self.names):
            self.runner = compiled[(self.grid[0], 1, 1)]

    @staticmethod
    def _is_number(values: Mapping[str, Any], name: str) -> bool:
        """Numbers may be specialised by value, so calls that pass some look their kernel up anew."""
        return isinstance(values.get(name), int | float)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One product of the statement: its launches and what the output must be before them."""

    prepared: Prepared
    launches: tuple[_Launch, ...]
    workspace: tuple[int, ...]  # shape of the workspace for pieces of long rows, or ()
    atomic: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """All products of one statement, for one kind of input."""

    problem: Problem  # held so that its identity stays taken
    steps: tuple[_Step, ...]
    buffer: torch.dtype | None
    start: bool | int | float
    promote: tuple[str, ...]  # index tensors that become constants of the code once they have come back often enough
    calls: list[int]


#: A short pattern that comes back for this many calls is compiled into the code.
_PROMOTE_AT = 3


def run(problem: Problem, values: Mapping[str, Value], target: Tensor | None) -> Tensor | None:
    """The statement's result, or None where no kernel can express it. With ``target``, accumulates into it in place."""
    program = lookup(problem, values, target)
    if isinstance(program, str):
        return _fall_back(problem, program)
    with _on_device(problem.device):
        return _execute(program, problem, values, target)


def _execute(program: _Program, problem: Problem, values: Mapping[str, Value], target: Tensor | None) -> Tensor:
    shape = tuple(int(s) for s in problem.shape)
    if target is None:
        out = torch.empty(shape, dtype=program.buffer or problem.dtype, device=problem.device)
    else:
        out = target.to(program.buffer, memory_format=torch.contiguous_format, copy=True) if program.buffer else target
    for position, step in enumerate(program.steps):
        _run_step(step, out, values, program.start, first=target is None and position == 0)
    if not program.buffer:
        return out
    return out.to(problem.dtype) if target is None else target.copy_(out)


def _run_step(step: _Step, out: Tensor, values: Mapping[str, Value], start: bool | int | float, *, first: bool) -> None:
    if first and (step.atomic or step.prepared.fill or not step.launches):
        out.fill_(start)
    work = None
    if step.workspace:
        work = torch.empty(step.workspace, dtype=_WIDE[step.prepared.plan.accumulator], device=out.device)
    for one in step.launches:
        one(values, out, work)


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return _NOWHERE
    return torch.cuda.device(device)


def _fall_back(problem: Problem, why: str) -> None:
    text = problem.statement.text or str(problem.statement)
    if settings.require_fused:
        raise problem.complain(NotFusedError, f"no fused kernel: {why}", expected="a statement that a kernel can express", remedy="settings.require_fused = False runs it as a graph of torch operations")
    if settings.backend == "fused" or "fallback" in settings.log:
        import warnings

        if text not in _said:
            _said.add(text)
            warnings.warn(f"insum: {text!r} runs as a graph of torch operations: {why}", stacklevel=5)
    return None


# --- looking up and building launches ------------------------------------------------------------------------------------------


def lookup(problem: Problem, values: Mapping[str, Value], target: Tensor | None) -> _Program | str:
    """The program for this kind of call, built the first time; a string says why there is none."""
    reason = _unusable(problem)
    if reason:
        return reason
    wishes = _wishes(problem, target is not None)
    anchors = _anchors(problem)
    facts = [facts_of(value) for name in anchors if isinstance(value := values[name], Tensor)]
    table: dict[object, Any] = facts[0].derived if facts else _launches
    strides = tuple(v.stride() if isinstance(v, Tensor) else None for v in values.values())
    key = (id(problem), strides, target.stride() if target is not None else None, wishes, tuple((f.serial, f.constant) for f in facts))
    program = table.get(key)
    if program is not None and program.__class__ is _Program and program.promote and _promoted(program, values):
        return lookup(problem, values, target)
    if program is None:
        program = _build(problem, values, target, wishes)
        if table is _launches and len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        table[key] = program
    return program


def _promoted(program: _Program, values: Mapping[str, Value]) -> bool:
    """Whether this call is the one at which a pattern that keeps coming back is taken for a constant."""
    program.calls[0] += 1
    if program.calls[0] != _PROMOTE_AT or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    for name in program.promote:
        facts_of(values[name]).constant = True  # type: ignore[arg-type]
    return True


def _promotable(problem: Problem, prepared: Sequence[Prepared]) -> tuple[str, ...]:
    """Index tensors of a short pattern that scatters into registers: straight-line code is faster still."""
    if len(prepared) != 1 or prepared[0].plan.strategy != "onehot" or settings.scatter != "auto":
        return ()
    reads = index_reads(problem, problem.terms[0])
    points = math.prod(int(problem.extents[v]) for v in dict.fromkeys(v for a in reads for v in variables(a)))
    return tuple(dict.fromkeys(a.tensor for a in reads)) if points <= PROMOTE_POINTS else ()


def _unusable(problem: Problem) -> str:
    if launch.available():
        return launch.available()
    if problem.device.type not in ("cuda",) and not (launch.interpreting() and problem.device.type == "cpu"):
        return f"generated kernels do not run on {problem.device.type}"
    return ""


def _wishes(problem: Problem, accumulate: bool) -> Wishes:
    precision = "tf32" if torch.get_float32_matmul_precision() != "highest" else "tf32x3"
    if launch.interpreting() or torch.version.hip:
        precision = "ieee"
    return Wishes(settings.values, torch.are_deterministic_algorithms_enabled(), precision, accumulate)


_anchor_names: dict[int, tuple[Problem, tuple[str, ...]]] = {}


def _anchors(problem: Problem) -> tuple[str, ...]:
    """Index tensors whose facts decide the plan: those of the target, and those that may hold padding."""
    known = _anchor_names.get(id(problem))
    if known is None or known[0] is not problem:
        if len(_anchor_names) > 4 * _MOST_LAUNCHES:
            _anchor_names.clear()
        found = [a.tensor for i in problem.statement.target.indices for _, a in i.terms if isinstance(a, Access)]
        known = _anchor_names[id(problem)] = (problem, tuple(dict.fromkeys((*found, *sorted(problem.padded)))))
    return known[1]


def _build(problem: Problem, values: Mapping[str, Value], target: Tensor | None, wishes: Wishes) -> _Program | str:
    try:
        prepared = [prepare(problem, term, values, wishes if i == 0 else replace(wishes, accumulate=True)) for i, term in enumerate(problem.terms)]
    except CannotFuse as reason:
        return str(reason)
    wide = _WIDE[prepared[0].plan.accumulator]
    half = wide != problem.dtype
    steps = []
    for one in prepared:
        steps.append(_step(problem, one, values, target, wishes, several=len(prepared) > 1))
    buffer = wide if half and (len(prepared) > 1 or any(s.atomic for s in steps)) else None
    return _Program(problem, tuple(steps), buffer, identity(problem.statement.operator, buffer or problem.dtype), _promotable(problem, prepared), [0])


def _step(problem: Problem, prepared: Prepared, values: Mapping[str, Value], target: Tensor | None, wishes: Wishes, *, several: bool) -> _Step:
    plan, extents = prepared.plan, prepared.extents
    used = {*variables(plan.target), *(v for f in plan.factors for v in variables(f))}
    if any(extents[v] == 0 for v in used) or any(int(s) == 0 for s in problem.shape):
        return _Step(prepared, (), (), False)
    if wishes.settings.swap and plan.onehot < 0 or plan.onehot >= 0 and _swap_ok(plan):
        plan = replace(plan, roles=model.swapped(plan.roles, extents))
    build = _Builder(problem, replace_plan(prepared, plan), values, target, wishes)
    if plan.strategy == "unrolled":
        return build.unrolled()
    return build.rows() if plan.segment and plan.segment.tiled else build.tiles()


def _swap_ok(plan: Plan) -> bool:
    return plan.roles.dot


def replace_plan(prepared: Prepared, plan: Plan) -> Prepared:
    return replace(prepared, plan=plan)


class _Builder:
    """Turns one prepared product into launches."""

    def __init__(self, problem: Problem, prepared: Prepared, values: Mapping[str, Value], target: Tensor | None, wishes: Wishes) -> None:
        self.problem, self.prepared, self.values, self.target, self.wishes = problem, prepared, values, target, wishes
        self.plan, self.extents = prepared.plan, prepared.extents

    # --- dense tiles, with or without segments looped over inside ---

    def tiles(self) -> _Step:
        config = model.first_guess(self.plan, self.extents)
        pieces = 1 if self.wishes.deterministic or self.target is not None else model.pieces(self.plan, config, self.extents)
        shape = self.shape(config, pieces)
        kernel = emit(self.plan, config, shape, prefetch=self.wishes.settings.prefetch)
        extra: dict[str, Any] = {"piece_count": pieces}
        if self.prepared.segments:
            extra |= {"seg_start_at": self.prepared.segments.start, "seg_end_at": self.prepared.segments.end}
        programs = self.tile_count(config) * pieces * math.prod(self.extents[v] for v in self.plan.roles.grid)
        one = self.launch(self.plan, config, kernel, programs, extra)
        return _Step(self.prepared, (one,), (), self.plan.strategy == "atomic" or pieces > 1)

    def tile_count(self, config: Config) -> int:
        return math.ceil(model.extent(self.plan.roles.m, self.extents) / config.m) * math.ceil(model.extent(self.plan.roles.n, self.extents) / config.n)

    def shape(self, config: Config, pieces: int) -> Shape:
        roles, extents = self.plan.roles, self.extents
        inner = model.inner_extent(self.plan, extents)
        k = extents[roles.k[0]] if roles.k else 1
        alone = not roles.loops and not (self.plan.segment and self.plan.segment.var in (*roles.k, *roles.loops))
        return Shape(
            even_m=model.extent(roles.m, extents) % config.m == 0,
            even_n=model.extent(roles.n, extents) % config.n == 0,
            even_k=k % config.k == 0,
            inner=inner,
            onehot=int(self.problem.shape[self.plan.onehot]) if self.plan.onehot >= 0 else 0,
            single_k=bool(roles.k) and alone and k <= config.k,
            pieces=pieces > 1,
        )

    # --- rows of a segmented output in the tile ---

    def rows(self) -> _Step:
        segments = self.prepared.segments
        assert segments is not None
        n_tiles = math.ceil(model.extent(self.plan.roles.n, self.extents) / model.first_guess(self.plan, self.extents).n)
        limit = _split_length(segments, n_tiles)
        work = self.kept_tasks(segments, limit)
        plan = replace(self.plan, split=work.slots > 0)
        launches = []
        if work.long:
            launches.append(self.row_launch(plan, model.long_rows(plan, self.extents), work, 0, work.long))
        if work.count > work.long:
            launches.append(self.row_launch(plan, model.first_guess(plan, self.extents), work, work.long, work.count))
        if work.slots:
            launches.append(self.combine(plan, work))
        return _Step(self.prepared, tuple(launches), self.workspace(plan, work), False)

    def kept_tasks(self, segments: Segments, limit: int) -> Tasks:
        facts: IndexFacts = facts_of(self.values[_anchors(self.problem)[0]])  # type: ignore[arg-type]
        key = ("tasks", id(segments), limit)
        if key not in facts.derived:
            facts.derived[key] = (tasks(segments, limit), segments)
        return facts.derived[key][0]  # type: ignore[no-any-return]

    def others(self, plan: Plan) -> list[str]:
        assert plan.segment is not None
        return [v for v in variables(plan.target) if v != plan.segment.row]

    def workspace(self, plan: Plan, work: Tasks) -> tuple[int, ...]:
        return (work.slots, *(self.extents[v] for v in self.others(plan))) if work.slots else ()

    def row_launch(self, plan: Plan, config: Config, work: Tasks, first: int, last: int) -> _Launch:
        shape = replace(self.shape(config, 1), even_m=False, inner=1)
        kernel = emit(plan, config, shape, prefetch=False)
        extra = {"seg_start_at": work.start, "seg_end_at": work.end, "seg_row_at": work.row, "task_first": first, "task_last": last}
        return self.launch(plan, config, kernel, self.row_programs(plan, config, last - first), extra)

    def row_programs(self, plan: Plan, config: Config, count: int) -> int:
        grid = math.prod(self.extents[v] for v in plan.roles.grid)
        return math.ceil(count / config.m) * math.ceil(model.extent(plan.roles.n, self.extents) / config.n) * grid

    def combine(self, plan: Plan, work: Tasks) -> _Launch:
        """Add up the pieces of each cut row: the same kind of kernel, over the workspace."""
        segment = plan.segment
        assert segment is not None
        others = self.others(plan)
        read = Access("work", (index_of(segment.var), *(index_of(v) for v in others)))
        n = plan.roles.n
        roles = Contraction((segment.row,), n, (segment.var,), (), (), tuple(v for v in others if v not in n), False, post=(0,))
        plan = replace(plan, factors=(read,), roles=roles, segment=Segment(segment.row, segment.var, True), split=False, padded=frozenset(), kinds=(("work", plan.accumulator),), numbers=())
        base = model.first_guess(plan, self.extents)
        config = replace(base, m=1, k=power_of_two(min(8, max(1, work.slots))), warps=1)
        kernel = emit(plan, config, Shape(even_n=self.shape(config, 1).even_n), prefetch=False)
        extra = {"seg_start_at": work.split_start, "seg_end_at": work.split_end, "seg_row_at": work.split_rows, "task_first": 0, "task_last": work.split_rows.numel()}
        sizes = (work.slots, *(self.extents[v] for v in others))
        extra |= {"work_ptr": _WORK} | {f"work_s{d}": math.prod(sizes[d + 1 :]) for d in range(len(sizes))}
        return self.launch(plan, config, kernel, self.row_programs(plan, config, work.split_rows.numel()), extra)

    # --- unrolled patterns ---

    def unrolled(self) -> _Step:
        config = model.first_guess(self.plan, self.extents)
        kernel, programs = emit_unrolled(self.plan, config, self.extents)
        return _Step(self.prepared, (self.launch(self.plan, config, kernel, programs, {}),), (), False)

    # --- arguments ---

    def launch(self, plan: Plan, config: Config, kernel: Kernel, programs: int, extra: Mapping[str, Any]) -> _Launch:
        header = self.header(plan, config)
        arguments: list[Any] = []
        names: list[tuple[int, str]] = []
        for position, name in enumerate(kernel.arguments):
            value = self.argument(name, extra)
            if isinstance(value, str):
                names.append((position, value))
            arguments.append(value)
        if programs >= 2**31:
            raise CannotFuse(f"the grid would have {programs} programs")
        return _Launch(launch.load(kernel, header), (programs,), tuple(arguments), tuple(names), config, kernel, header)

    def argument(self, name: str, extra: Mapping[str, Any]) -> Any:
        """A constant, or the name of a tensor of the call."""
        if name in extra:
            return extra[name]
        if name in (_OUT, _WORK):
            return name
        if name.startswith("out_stride"):
            return self.out_stride(int(name.removeprefix("out_stride")))
        base, _, suffix = name.rpartition("_")
        if suffix in ("ptr", "number"):
            return self.prepared.arrays.get(base, base)
        if suffix == "size":
            return self.extents[base]
        return self.stride(base, int(suffix[1:]))

    def out_stride(self, dim: int) -> int:
        shape = [int(s) for s in self.problem.shape]
        return self.target.stride(dim) if self.target is not None and not self.buffered() else math.prod(shape[dim + 1 :])

    def stride(self, tensor: str, dim: int) -> int:
        if tensor in self.prepared.arrays:
            return self.prepared.arrays[tensor].stride(dim)
        value = self.values[tensor]
        assert isinstance(value, Tensor)
        if tensor in self.prepared.views:
            at, count = self.prepared.views[tensor]
            strides = [*value.stride()[:at], value.stride(at + count - 1), *value.stride()[at + count :]]
            return strides[dim]
        return value.stride(dim)

    def buffered(self) -> bool:
        """Whether contributions meet in a fresh contiguous buffer instead of the passed target."""
        return _WIDE[self.plan.accumulator] != self.problem.dtype and (len(self.problem.terms) > 1 or self.plan.strategy == "atomic")

    def header(self, plan: Plan, config: Config) -> str:
        sizes = ", ".join(f"{v}={e}" for v, e in self.extents.items())
        lines = [f'"""{_comment(plan.statement)}', "", *plan.describe(self.extents).splitlines(), f"config       {config}", f"first seen   {sizes}", '"""']
        return "\n".join(lines)


def _comment(text: str) -> str:
    """User text inside a docstring of generated source: printable ASCII without quotes or backslashes, whatever was passed."""
    return "".join(c if c.isascii() and (c.isalnum() or c in " _[]()+-*=.,") else "?" for c in text)[:400]


def _split_length(segments: Segments, n_tiles: int) -> int:
    """Entries per task: rows stay whole where they are even or the whole thing is small."""
    if segments.longest <= model.LEAVE_WHOLE or segments.entries < 4096:
        return max(1, segments.longest)
    return model.SPLIT_AT


# --- telling about it ----------------------------------------------------------------------------------------------------------


def describe(problem: Problem, values: Mapping[str, Value], target: Tensor | None = None) -> str:
    """The plan and the kernels of a statement, or why there are none."""
    program = lookup(problem, values, target)
    if isinstance(program, str):
        return f"no fused kernel: {program}"
    parts = []
    for step in program.steps:
        parts.append(step.prepared.plan.describe(step.prepared.extents))
        parts += [f"config       {one.config}\n\n{one.kernel.source}" for one in step.launches]
    return "\n\n".join(parts)


def kernels(problem: Problem, values: Mapping[str, Value], target: Tensor | None = None) -> Sequence[Kernel]:
    """The generated kernels of a statement, in launch order."""
    program = lookup(problem, values, target)
    return () if isinstance(program, str) else tuple(one.kernel for step in program.steps for one in step.launches)


def strategy(problem: Problem, values: Mapping[str, Value]) -> str:
    """The scatter strategy of each product of a statement, or why there is no kernel."""
    program = lookup(problem, values, None)
    return program if isinstance(program, str) else ", ".join(s.prepared.plan.strategy + (" + tl.dot" if s.prepared.plan.roles.dot else "") for s in program.steps)


# --- without a device ------------------------------------------------------------------------------------------------------------


def plan_only(problem: Problem, values: Mapping[str, Value], target: Tensor | None = None) -> _Program:
    """The program of a statement as a GPU would get it, built from tensors that may lie anywhere; it cannot be run there."""
    wishes = Wishes(settings.values, torch.are_deterministic_algorithms_enabled(), "tf32x3", target is not None)
    program = _build(problem, values, target, wishes)
    if isinstance(program, str):
        raise CannotFuse(program)
    return program


def compile_only(problem: Problem, values: Mapping[str, Value], architecture: str) -> list[tuple[str, launch.Compiled]]:
    """Compile every kernel of a statement for an architecture that need not be here: (strategy, compiler's figures)."""
    found = []
    for step in plan_only(problem, values).steps:
        out = torch.empty(1, dtype=problem.dtype)
        work = torch.empty(1, dtype=_WIDE[step.prepared.plan.accumulator])
        for one in step.launches:
            arguments = list(one.arguments)
            for position, name in one.names:
                arguments[position] = out if name == _OUT else work if name == _WORK else values[name]
            compiled = launch.compile_for(one.function, arguments, architecture, warps=one.config.warps, stages=one.config.stages)
            found.append((step.prepared.plan.strategy, compiled))
    return found


def compile_note(problem: Problem, values: Mapping[str, Value], architecture: str) -> str:
    """One line about the kernels of a statement, compiled for an architecture that need not be here."""
    if launch.available() or launch.interpreting():
        return launch.available() or "interpreted"
    try:
        compiled = compile_only(problem, values, architecture)
    except CannotFuse as reason:
        return str(reason)
    name, figures = max(compiled, key=lambda c: c[1].registers)
    return f"{name}{' + wgmma' if any(c.uses('wgmma') for _, c in compiled) else ''}, {figures.registers} registers, {figures.stack} bytes spilled"
