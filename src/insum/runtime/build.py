"""Prepared products + choices -> a program: kernels written, their arguments bound, ready to be
launched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from insum.codegen.emit import Kernel, Shape, emit
from insum.codegen.unrolled import emit_unrolled, parts
from insum.lang.bind import Problem, Value
from insum.lang.expr import Access, accesses, index_of, variables
from insum.lang.types import identity
from insum.plan import model
from insum.plan.config import Choice, Config, power_of_two
from insum.plan.facts import IndexFacts, facts_of, known
from insum.plan.packing import buffer_is_small
from insum.plan.plan import Plan, Segment
from insum.plan.prepare import CannotFuse, Prepared, Wishes
from insum.plan.roles import Contraction
from insum.plan.schedule import Segments, Tasks, tasks
from insum.runtime import binaries, launch
from insum.runtime.program import OUT, WIDE, WORK, Launch, Program, Step

_OWN = {"out_at": OUT, "work_at": WORK}  # names of the statement's tensors end in _ptr


def assemble(
    problem: Problem,
    prepared: Sequence[Prepared],
    values: Mapping[str, Value],
    target: Tensor | None,
    wishes: Wishes,
    choices: Sequence[Choice],
) -> Program:
    """The launches of all products of a statement, each by its choice."""
    wide = WIDE[prepared[0].plan.accumulator]
    steps = tuple(
        _step(problem, one, values, target, wishes, choice)
        for one, choice in zip(prepared, choices, strict=True)
    )
    buffer = (
        wide
        if wide != problem.dtype and (len(prepared) > 1 or any(s.atomic for s in steps))
        else None
    )
    shape = tuple(int(s) for s in problem.shape)
    return Program(
        problem,
        wishes,
        steps,
        shape,
        buffer,
        identity(problem.statement.operator, buffer or problem.dtype),
    )


def jobs(program: Program, values: Mapping[str, Value], *, new: bool = False) -> list[launch.Job]:
    """What compiling workers need to compile the kernels of a program; of ``new`` ones alone, that
    no process has noted yet.
    """
    found = []
    for step in program.steps:
        for one in step.launches:
            arguments = one.bound(values, *program.examples(step))
            if not (
                new
                and binaries.is_noted(one.function, arguments, one.config.warps, one.config.stages)
            ):
                found.append(
                    launch.job(
                        one.function,
                        one.kernel.name,
                        arguments,
                        one.config.warps,
                        one.config.stages,
                    )
                )
    return found


def is_empty(problem: Problem, prepared: Prepared) -> bool:
    """Whether there is no point to sum over, or nowhere to write."""
    used = {
        *variables(prepared.plan.target),
        *(v for f in prepared.plan.factors for v in variables(f)),
    }
    return any(prepared.extents[v] == 0 for v in used) or any(int(s) == 0 for s in problem.shape)


def first_choice(prepared: Prepared, wishes: Wishes) -> Choice:
    """What the model says, without any search."""
    plan = model.oriented(prepared.plan, prepared.extents, allowed=wishes.settings.swap)
    rows = prepared.segments
    choice = model.first_choice(
        plan,
        prepared.extents,
        longest=rows.longest if rows else 0,
        entries=rows.entries if rows else 0,
    )
    return model.suited(prepared.plan, choice, wishes.architecture)


def _step(
    problem: Problem,
    prepared: Prepared,
    values: Mapping[str, Value],
    target: Tensor | None,
    wishes: Wishes,
    choice: Choice,
) -> Step:
    if is_empty(problem, prepared):
        return Step(prepared, (), (), False, choice)
    plan = model.oriented(
        prepared.plan, prepared.extents, choice[0].swap, allowed=wishes.settings.swap
    )
    build = Builder(problem, replace(prepared, plan=plan), values, target, wishes, choice)
    if plan.strategy == "unrolled":
        return build.unrolled()
    return build.rows() if model.in_rows(plan) else build.tiles()


_anchor_names: dict[int, tuple[Problem, tuple[str, ...]]] = {}
_MOST_ANCHORS = 4096


def anchors(problem: Problem) -> tuple[str, ...]:
    """Index tensors whose facts decide the plan: those of the target, and those that may hold
    padding.
    """
    known = _anchor_names.get(id(problem))
    if known is None or known[0] is not problem:
        if len(_anchor_names) > _MOST_ANCHORS:
            _anchor_names.clear()
        found = [
            a.tensor
            for i in problem.statement.target.indices
            for _, a in i.terms
            if isinstance(a, Access)
        ]
        known = _anchor_names[id(problem)] = (
            problem,
            tuple(dict.fromkeys((*found, *sorted(problem.padded)))),
        )
    return known[1]


def points(problem: Problem) -> frozenset[str]:
    """Variables that index tensors are read at."""
    return frozenset(
        v
        for access, dim, index in problem.index_uses()
        for inner in accesses(index)
        for v in variables(inner)
    )


class Builder:
    """Turns one prepared product into launches."""

    def __init__(
        self,
        problem: Problem,
        prepared: Prepared,
        values: Mapping[str, Value],
        target: Tensor | None,
        wishes: Wishes,
        choice: Choice,
        *,
        loose: bool = False,
    ) -> None:
        """``loose``: index tensors are new at each call; where facts about them say so it need not
        be told.
        """
        self.problem, self.prepared, self.values, self.target, self.wishes = (
            problem,
            prepared,
            values,
            target,
            wishes,
        )
        self.plan, self.extents, self.choice = prepared.plan, prepared.extents, choice
        #: Variables whose extent is another at each call.
        self.loose = points(problem) if loose or self.is_passing() else frozenset()

    # --- dense tiles, with or without segments looped over inside ---

    def tiles(self) -> Step:
        (config,) = self.choice
        pieces = model.pieces(self.plan, config, self.extents) if self.pieces_fit() else 1
        shape = self.shape(config, pieces)
        wished = self.wishes.settings
        kernel = emit(
            self.plan, config, shape, prefetch=wished.prefetch, lazy=wished.lazy_broadcasting
        )
        extra: dict[str, Any] = {"piece_count": pieces}
        if self.prepared.segments:
            extra |= {
                "seg_start_at": self.prepared.segments.start,
                "seg_end_at": self.prepared.segments.end,
            }
        programs = (
            self.tile_count(config)
            * pieces
            * math.prod(self.extents[v] for v in self.plan.roles.grid)
        )
        one = self.launch(self.plan, config, kernel, programs, extra)
        return Step(
            self.prepared, (one,), (), self.plan.strategy == "atomic" or pieces > 1, self.choice
        )

    def tile_count(self, config: Config) -> int:
        return math.ceil(model.extent(self.plan.roles.m, self.extents) / config.m) * math.ceil(
            model.extent(self.plan.roles.n, self.extents) / config.n
        )

    def pieces_fit(self) -> bool:
        """Whether a reduction may be cut into pieces that meet in atomics: its float32 buffer is
        small beside what is read.
        """
        if self.wishes.deterministic or self.target is not None:
            return False
        return buffer_is_small(
            self.problem.shape, [v for v in self.values.values() if isinstance(v, Tensor)]
        )

    def shape(self, config: Config, pieces: int) -> Shape:
        roles, extents = self.plan.roles, self.extents
        inner = model.inner_extent(self.plan, extents)
        k = extents[roles.k[0]] if roles.k else 1
        alone = not roles.loops and not (
            self.plan.segment and self.plan.segment.var in (*roles.k, *roles.loops)
        )
        return Shape(
            even_m=model.extent(roles.m, extents) % config.m == 0
            and (config.m == 1 or not self.loose & {*roles.m}),
            even_n=model.extent(roles.n, extents) % config.n == 0
            and (config.n == 1 or not self.loose & {*roles.n}),
            even_k=k % config.k == 0 and (config.k == 1 or not self.loose & {*roles.k}),
            inner=inner,
            onehot=int(self.problem.shape[self.plan.onehot]) if self.plan.onehot >= 0 else 0,
            single_k=bool(roles.k) and alone and k <= config.k,
            pieces=pieces > 1,
        )

    def is_passing(self) -> bool:
        found = [
            known(v) for name in anchors(self.problem) if isinstance(v := self.values[name], Tensor)
        ]
        return any(facts is not None and facts.passing for facts in found)

    # --- rows of a segmented output in the tile ---

    def rows(self) -> Step:
        segments = self.prepared.segments
        assert segments is not None
        short, long = self.choice
        work = self.kept_tasks(segments, short.split or max(1, segments.longest))
        plan = replace(self.plan, split=work.slots > 0)
        launches = []
        if work.long:
            launches.append(self.row_launch(plan, long, work, 0, work.long))
        if work.count > work.long:
            launches.append(self.row_launch(plan, short, work, work.long, work.count))
        if work.slots:
            launches.append(self.combine(plan, work))
        return Step(self.prepared, tuple(launches), self.workspace(plan, work), False, self.choice)

    def kept_tasks(self, segments: Segments, limit: int) -> Tasks:
        facts: IndexFacts = facts_of(self.values[anchors(self.problem)[0]])  # type: ignore[arg-type]
        key = ("tasks", id(segments), limit)
        if key not in facts.derived:
            facts.derived[key] = (tasks(segments, limit), segments)
        return facts.derived[key][0]  # type: ignore[no-any-return]

    def others(self, plan: Plan) -> list[str]:
        assert plan.segment is not None
        return [v for v in variables(plan.target) if v != plan.segment.row]

    def workspace(self, plan: Plan, work: Tasks) -> tuple[int, ...]:
        return (work.slots, *(self.extents[v] for v in self.others(plan))) if work.slots else ()

    def row_launch(self, plan: Plan, config: Config, work: Tasks, first: int, last: int) -> Launch:
        shape = replace(self.shape(config, 1), even_m=False, inner=1)
        kernel = emit(plan, config, shape, prefetch=False)
        extra = {
            "seg_start_at": work.start,
            "seg_end_at": work.end,
            "seg_row_at": work.row,
            "task_first": first,
            "task_last": last,
        }
        return self.launch(
            plan, config, kernel, self.row_programs(plan, config, last - first), extra
        )

    def row_programs(self, plan: Plan, config: Config, count: int) -> int:
        grid = math.prod(self.extents[v] for v in plan.roles.grid)
        count *= model.extent(plan.roles.m[1:], self.extents)
        return (
            math.ceil(count / config.m)
            * math.ceil(model.extent(plan.roles.n, self.extents) / config.n)
            * grid
        )

    def combine(self, plan: Plan, work: Tasks) -> Launch:
        """Add up the pieces of each cut row: the same kind of kernel, over the workspace."""
        segment = plan.segment
        assert segment is not None
        others = self.others(plan)
        read = Access("work", (index_of(segment.var), *(index_of(v) for v in others)))
        n = plan.roles.n
        roles = Contraction(
            (segment.row,),
            n,
            (segment.var,),
            (),
            (),
            tuple(v for v in others if v not in n),
            False,
            post=(0,),
        )
        segment, kinds = Segment(segment.row, segment.var, True), (("work", plan.accumulator),)
        plan = replace(
            plan,
            factors=(read,),
            roles=roles,
            segment=segment,
            split=False,
            padded=frozenset(),
            kinds=kinds,
            numbers=(),
        )
        base = model.first_guess(plan, self.extents)
        config = replace(base, m=1, k=power_of_two(min(8, max(1, work.slots))), warps=1)
        kernel = emit(plan, config, Shape(even_n=self.shape(config, 1).even_n), prefetch=False)
        extra: dict[str, Any] = {
            "seg_start_at": work.split_start,
            "seg_end_at": work.split_end,
            "seg_row_at": work.split_rows,
        }
        extra |= {"task_first": 0, "task_last": work.split_rows.numel()}
        sizes = (work.slots, *(self.extents[v] for v in others))
        extra |= {"work_ptr": WORK} | {
            f"work_s{d}": math.prod(sizes[d + 1 :]) for d in range(len(sizes))
        }
        return self.launch(
            plan, config, kernel, self.row_programs(plan, config, work.split_rows.numel()), extra
        )

    # --- unrolled patterns ---

    def unrolled(self) -> Step:
        (config,) = self.choice
        written = [(part, *emit_unrolled(part, config, self.extents)) for part in parts(self.plan)]
        launches = tuple(
            self.launch(part, config, kernel, programs, {}) for part, kernel, programs in written
        )
        return Step(self.prepared, launches, (), False, self.choice)

    # --- arguments ---

    def launch(
        self, plan: Plan, config: Config, kernel: Kernel, programs: int, extra: Mapping[str, Any]
    ) -> Launch:
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
        return Launch(
            launch.load(kernel, header),
            (programs,),
            tuple(arguments),
            tuple(names),
            config,
            kernel,
            header,
        )

    def argument(self, name: str, extra: Mapping[str, Any]) -> Any:
        """A constant, or the name of a tensor of the call."""
        if name in extra:
            return extra[name]
        if name in _OWN:
            return _OWN[name]
        if name.removeprefix("out_stride").isdigit():
            return self.out_stride(int(name.removeprefix("out_stride")))
        base, _, suffix = name.rpartition("_")
        if suffix in ("ptr", "number"):
            return self.prepared.arrays.get(base, base)
        if suffix == "size":
            return self.extents[base]
        return self.stride(base, int(suffix[1:]))

    def out_stride(self, dim: int) -> int:
        shape = [int(s) for s in self.problem.shape]
        return (
            self.target.stride(dim)
            if self.target is not None and not self.buffered()
            else math.prod(shape[dim + 1 :])
        )

    def stride(self, tensor: str, dim: int) -> int:
        if tensor in self.prepared.arrays:
            return self.prepared.arrays[tensor].stride(dim)
        value = self.values[tensor]
        assert isinstance(value, Tensor)
        if tensor in self.prepared.views:
            at, count = self.prepared.views[tensor]
            strides = [
                *value.stride()[:at],
                value.stride(at + count - 1),
                *value.stride()[at + count :],
            ]
            return strides[dim]
        return value.stride(dim)

    def buffered(self) -> bool:
        """Whether contributions meet in a fresh contiguous buffer instead of the passed target."""
        return WIDE[self.plan.accumulator] != self.problem.dtype and (
            len(self.problem.terms) > 1 or self.plan.strategy == "atomic"
        )

    def header(self, plan: Plan, config: Config) -> str:
        sizes = ", ".join(f"{v}={e}" for v, e in self.extents.items())
        lines = [
            f'"""{_comment(plan.statement)}',
            "",
            *plan.describe(self.extents).splitlines(),
            f"config       {config}",
            f"first seen   {sizes}",
            '"""',
        ]
        return "\n".join(lines)


def _comment(text: str) -> str:
    """User text inside a docstring of generated source: printable ASCII without quotes or
    backslashes, whatever was passed.
    """
    return "".join(
        c if c.isascii() and (c.isalnum() or c in " _[]()+-*=.,") else "?" for c in text
    )[:400]
