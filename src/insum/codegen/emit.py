"""Plan + Config -> Triton source text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from insum.codegen.arguments import CALL, FLAGS, Argument, Count, Passed
from insum.codegen.contract import ACC, Contract
from insum.codegen.entry_results import EntryResults
from insum.codegen.frame import AFTER, PID, Frame
from insum.codegen.ir import (
    Assignment,
    Branch,
    Effect,
    KernelLine,
    Named,
    Return,
    Tile,
    apply,
    as_tile,
    cdiv,
    load,
    loop,
    operation,
)
from insum.codegen.kernel import Kernel, Shape, function_of, kernel_name, kernel_of
from insum.codegen.output import Output
from insum.codegen.passes import prefetched, side_by_side
from insum.codegen.reads import Reads
from insum.plan.config import Config
from insum.plan.plan import Plan

__all__ = ["FLAG_COUNT", "Emitter", "emit", "emit_joined"]

#: Flags of calls; a call has that of its number.
FLAG_COUNT = 1024


def emit(
    plan: Plan,
    config: Config,
    shape: Shape,
    *,
    prefetch: bool = True,
    lazy: bool = True,
    suffix: str = "",
) -> Kernel:
    """Source text of the kernel for a plan: readable, with the block shape of every tile beside its
    line. ``suffix`` tells it from others of the same statement.
    """
    name = kernel_name(plan, suffix)
    return Emitter(Frame(plan, config, shape, prefetch, lazy)).kernel(name)


#: What a kernel is written for.
Written: TypeAlias = tuple[Plan, Config, Shape]


def emit_joined(first: Written, second: Written, own: Mapping[str, Argument]) -> Kernel:
    """One kernel of two whose programs come one behind the other: of tasks in tiles of different
    kinds. ``own``: by its name, what the first of them is passed instead of what the second is;
    its tasks begin with 0.
    """
    plan, config, shape = second
    name, outer = kernel_name(plan), Emitter(Frame(plan, config, shape))
    outer.leave_if_flagged()
    arguments, texts, calls = dict(outer.frame.arguments), [], []
    for suffix, (plan, config, shape), others in (("first", first, own), ("second", second, {})):
        frame = Frame(replace(plan, leaves=False), config, replace(shape, part=True), False)
        part = kernel_name(plan, suffix)
        texts += Emitter(frame).function(part)
        passed = {n: others.get(n, one) for n, one in frame.arguments.items()}
        values = ["0" if others and n == "task_first" else passed[n].name for n in passed]
        calls.append((part, frame, values))
        arguments |= {one.name: one for one in passed.values()}
    (one, frame, values), (other, _, rest) = calls
    pid, programs = PID, Named("programs")
    body = [
        *outer.frame.stages[0],
        frame.program_id(),
        Assignment(programs.name, frame.row_programs(Named(own["task_last"].name))),
        Branch(
            pid < programs,
            (Effect(apply(one, pid, *values)),),
            (Effect(apply(other, pid - programs, *rest)),),
        ),
    ]
    return kernel_of(name, arguments, body, wide=second[0].wide, helpers=texts)


class Emitter:
    """Puts the stages together into one function."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.plan, self.shape = frame, frame.plan, frame.shape
        self.reads = Reads(frame)
        self.contract = Contract(frame, self.reads)
        self.output = Output(frame, self.reads, self.contract)
        self.entries = EntryResults(frame, self.reads, self.contract)

    def kernel(self, name: str) -> Kernel:
        self.fill_stages()
        return self.written(name)

    def function(self, name: str) -> list[str]:
        """A function that a kernel calls with the number of a program."""
        self.fill_stages()
        body = self.body()
        return function_of(name, [PID.name, *self.frame.arguments], body)

    def fill_stages(self) -> None:
        self.leave_if_flagged()
        self.frame.begin()
        self.leave_if_idle()
        self.reads.prepare_masks()
        total = self.contract.write()
        self.entries.write()
        self.frame.late = True
        self.output.finish(total)

    def leave_if_flagged(self) -> None:
        """A call in place changes nothing where one of its indices was found out of range."""
        if self.plan.leaves:
            flags, call = self.frame.pointer(FLAGS), self.frame.arg(Passed(CALL, "i32"))
            self.leave_if(load(flags + call % FLAG_COUNT).equals(call))

    def leave_if_idle(self) -> None:
        """A grid is as large as it may have to be: some programs find nothing to do. Where a
        program walks what the grid has elsewhere, such steps are padding like any other.
        """
        if self.plan.idle is None:
            return
        tensor, (at, _) = self.plan.idle.tensor, self.plan.idle.indices
        if at.var in self.plan.roles.grid:
            stride = self.reads.stride(tensor, 0, self.reads.units(tensor)[0])
            place = self.reads.index(at) * stride
            self.leave_if(load(self.frame.pointer(tensor) + place) < 0)

    def leave_if(self, condition: Tile) -> None:
        self.frame.put(0, Branch(condition, (Return(),)))

    def written(self, name: str) -> Kernel:
        body = self.body()
        return kernel_of(name, self.frame.arguments, body, wide=self.plan.wide)

    def body(self) -> list[KernelLine]:
        """The stages, one inside of the other."""
        frame, segment = self.frame, self.plan.segment
        outer: list[tuple[str, tuple[Tile, ...]]] = [
            (f"{v}_i", frame.bounds if segment and v == segment.var else (frame.size(v),))
            for v in self.plan.roles.outer
        ]
        lines: list[KernelLine] = []
        if self.shape.outer:
            lines, bounds = self.piece_bounds(frame.size(self.plan.roles.outer[0]))
            outer[0] = outer[0][0], bounds
        inner = [*frame.stages[1], *self.loop_lines(), *frame.stages[AFTER]]
        for name, limits in reversed(outer):
            inner = [loop(name, *limits, body=inner)]
        return [*frame.stages[0], *lines, *inner, *frame.tail]

    def piece_bounds(self, count: Tile) -> tuple[list[KernelLine], tuple[Tile, Tile]]:
        """The part of a loop that a program runs, where a long reduction is cut into pieces."""
        total, step, piece = Named("t_count"), Named("t_step"), Named("piece")
        pieces = self.frame.arg(Count("piece_count"))
        lines: list[KernelLine] = [
            Assignment(total.name, count),
            Assignment(step.name, cdiv(total, pieces)),
        ]
        return lines, (piece * step, apply("tl.minimum", piece * step + step, total))

    def loop_lines(self) -> list[KernelLine]:
        """The contraction's loop, one flat counter over all that it runs over."""
        frame = self.frame
        if not frame.counters:
            return [*frame.index_lines, *frame.stages[2]]
        cut = self.shape.pieces and not self.shape.outer
        if self.shape.single_k and not cut:
            return [Assignment("t", as_tile(0)), *self.loop_body()]
        outermost, *nested = frame.counters
        count = outermost
        if nested:
            inner = (Named(f"count{depth + 1}") for depth in range(len(nested)))
            count = operation("*", outermost, *inner)
        lines: list[KernelLine] = []
        first, last = as_tile(0), count
        if cut:
            lines, (first, last) = self.piece_bounds(count)
        return [*lines, *self.steps(first, last)]

    def steps(self, first: Tile, last: Tile) -> list[KernelLine]:
        """The loop over these steps, with what is read ahead."""
        frame, split = self.frame, self.frame.frame_lines
        counters = [one for one in frame.stages[2][:split] if isinstance(one, Assignment)]
        plain = [one for one in self.loop_body() if isinstance(one, Assignment)]
        together = self.steps_at_once()
        if together > 1:
            return side_by_side(first, last, plain, together, total=ACC)
        if frame.prefetch and frame.index_lines:
            rest = frame.stages[2][split:]
            return prefetched(first, last, counters, frame.index_lines, rest)
        return [loop("t", first, last, body=self.loop_body())]

    def steps_at_once(self) -> int:
        """How many steps of the loop are read before the first is summed: without matrix units
        nothing else has them in flight together.
        """
        config, lines = self.frame.config, self.frame.stages[2]
        plain = all(isinstance(one, Assignment) and one.symbol == "=" for one in lines)
        if self.plan.roles.dot or self.plan.segment or config.k > 1 or not plain:
            return 1
        single = len(self.frame.counters) == 1
        return config.stages if single or self.plan.roles.flat else 1

    def loop_body(self) -> list[KernelLine]:
        """Loop-variable definitions, then index loads, then the rest (loads of data and
        arithmetic).
        """
        frame, split = self.frame, self.frame.frame_lines
        return [*frame.stages[2][:split], *frame.index_lines, *frame.stages[2][split:]]
