"""Plan + Config -> Triton source text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from insum.codegen.arguments import CALL, FLAGS, Argument, Count, Passed, Pointer, annotation
from insum.codegen.contract import Contract
from insum.codegen.frame import AFTER, Frame, Kernel, Shape, kernel_name
from insum.codegen.functions import prelude
from insum.codegen.output import Output
from insum.codegen.reads import Reads
from insum.plan.config import Config
from insum.plan.plan import Plan

__all__ = ["AFTER", "FLAG_COUNT", "Emitter", "Kernel", "Shape", "emit", "signature"]

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
    name = kernel_name(plan.statement, suffix)
    return Emitter(Frame(plan, config, shape, prefetch, lazy)).kernel(name)


#: What a kernel is written for.
Written: TypeAlias = tuple[Plan, Config, Shape]


def emit_joined(first: Written, second: Written, own: Mapping[str, Argument]) -> Kernel:
    """One kernel of two whose programs come one behind the other: of tasks in tiles of different
    kinds. ``own``: by its name, what the first of them is passed instead of what the second is;
    its tasks begin with 0.
    """
    plan, config, shape = second
    name, outer = kernel_name(plan.statement), Emitter(Frame(plan, config, shape))
    outer.leave_if_flagged()
    arguments, texts, calls = dict(outer.frame.arguments), [], []
    for suffix, (plan, config, shape), others in (("first", first, own), ("second", second, {})):
        frame = Frame(replace(plan, leaves=False), config, replace(shape, part=True), False)
        part = kernel_name(plan.statement, suffix)
        texts += Emitter(frame).function(part)
        passed = {n: others.get(n, one) for n, one in frame.arguments.items()}
        values = ["0" if others and n == "task_first" else passed[n].name for n in passed]
        calls.append((part, frame, values))
        arguments |= {one.name: one for one in passed.values()}
    (one, frame, values), (other, _, rest) = calls
    body = [
        *outer.frame.stages[0],
        frame.program_id(),
        f"programs = {frame.row_programs(own['task_last'].name)}",
        "if pid < programs:",
        f"    {one}(pid, {', '.join(values)})",
        "else:",
        f"    {other}(pid - programs, {', '.join(rest)})",
    ]
    header = signature(name, arguments, wide=second[0].wide)
    lines = [*prelude(texts), *texts, *header, *("    " + line for line in body)]
    return Kernel(name, "\n".join(lines) + "\n", tuple(arguments.values()))


def signature(name: str, arguments: Mapping[str, Argument], *, wide: bool) -> list[str]:
    """The head of a kernel. Numbers have fixed types and are never specialised: no size is compiled
    for.
    """
    types = {n: annotation(argument, wide=wide) for n, argument in arguments.items()}
    numbers = [n for n, type in types.items() if type]
    shown = [f'{n}: "{type}"' if type else n for n, type in types.items()]
    decorator = f"@triton.jit(do_not_specialize={_listed(numbers)})" if numbers else "@triton.jit"
    return [decorator, f"def {name}(", *(f"    {line}," for line in _wrapped(shown)), "):"]


class Emitter:
    """Puts the stages together into one function."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.plan, self.shape = frame, frame.plan, frame.shape
        self.reads = Reads(frame)
        self.contract = Contract(frame, self.reads)
        self.output = Output(frame, self.reads, self.contract)

    def kernel(self, name: str) -> Kernel:
        self.fill_stages()
        return Kernel(name, self.write(name), tuple(self.frame.arguments.values()))

    def function(self, name: str) -> list[str]:
        """A function that a kernel calls with the number of a program."""
        self.fill_stages()
        arguments = _wrapped(["pid", *self.frame.arguments])
        header = ["@triton.jit", f"def {name}(", *(f"    {line}," for line in arguments), "):"]
        return [*header, *("    " + line for line in self.body()), "", ""]

    def fill_stages(self) -> None:
        self.leave_if_flagged()
        self.frame.begin()
        self.leave_if_idle()
        self.reads.prepare_masks()
        total = self.contract.write()
        self.frame.late = True
        self.output.finish(total)

    def leave_if_flagged(self) -> None:
        """A call in place changes nothing where one of its indices was found out of range."""
        if self.plan.leaves:
            flags, call = self.frame.arg(Pointer(FLAGS)), self.frame.arg(Passed(CALL, "i32"))
            self.frame.line(0, f"if tl.load({flags} + {call} % {FLAG_COUNT}) == {call}:")
            self.frame.line(0, "    return")

    def leave_if_idle(self) -> None:
        """A grid is as large as it may have to be: some programs find nothing to do."""
        if self.plan.idle is not None:
            tile, _ = self.plan.idle.indices
            stride = self.reads.stride(
                self.plan.idle.tensor, 0, self.reads.units(self.plan.idle.tensor)[0]
            )
            first = f"{self.reads.index(tile).text} * {stride}"
            self.frame.line(
                0, f"if tl.load({self.frame.arg(Pointer(self.plan.idle.tensor))} + {first}) < 0:"
            )
            self.frame.line(0, "    return")

    def write(self, name: str) -> str:
        body = self.body()
        header = signature(name, self.frame.arguments, wide=self.plan.wide)
        lines = [*prelude(body), *header, *("    " + line if line else "" for line in body)]
        return "\n".join(lines) + "\n"

    def body(self) -> list[str]:
        body = list(self.frame.stages[0])
        inner: list[str] = []
        depth = 0
        for var in self.plan.roles.outer:
            bounds = (
                "seg_start, seg_end"
                if self.plan.segment and var == self.plan.segment.var
                else self.frame.size(var)
            )
            body.append("    " * depth + f"for {var}_i in range({bounds}):")
            depth += 1
        inner += self.frame.stages[1] + self.loop_text() + self.frame.stages[AFTER]
        return body + ["    " * depth + line for line in inner] + self.frame.tail

    def loop_text(self) -> list[str]:
        indices = [line for _, line in self.frame.index_lines]
        if not self.frame.counters:
            return indices + self.frame.stages[2]
        outermost, *nested = self.frame.counters
        count = (
            " * ".join([f"({outermost})", *(f"count{depth + 1}" for depth in range(len(nested)))])
            if nested
            else outermost
        )
        first, last = "0", count
        lines: list[str] = []
        if self.shape.pieces:
            lines += [
                f"t_count = {count}",
                f"t_step = tl.cdiv(t_count, {self.frame.arg(Count('piece_count'))})",
            ]
            first, last = "piece * t_step", "tl.minimum(piece * t_step + t_step, t_count)"
        if self.shape.single_k and not self.shape.pieces:
            return ["t = 0", *self.ordered(indices)]
        together = self.steps_at_once()
        if together > 1:
            return [*lines, *self.side_by_side(first, last, together)]
        if not (self.frame.prefetch and indices):
            return [
                *lines,
                f"for t in range({first}, {last}):",
                *("    " + line for line in self.ordered(indices)),
            ]
        return [*lines, *self.prefetched(first, last)]

    def steps_at_once(self) -> int:
        """How many steps of the loop are read before the first is summed: without matrix units
        nothing else has them in flight together.
        """
        config, lines = self.frame.config, self.ordered([])
        plain = all(re.match(r"\w+ = ", line) for line in lines)
        if self.plan.roles.dot or self.plan.segment or config.k > 1 or not plain:
            return 1
        return config.stages if len(self.frame.counters) == 1 else 1

    def side_by_side(self, first: str, last: str, together: int) -> list[str]:
        """Several steps in each turn of the loop, line by line: all of them read their indices,
        then what these lead to, and are summed one after the other. What is left is done step by
        step.
        """
        body = self.ordered([line for _, line in self.frame.index_lines])
        own = {line.split(" = ")[0] for line in body} - {"acc"}
        lines = [f"t_first = {first}", f"t_last = {last}"]
        lines.append(f"t_whole = t_first + (t_last - t_first) // {together} * {together}")
        lines.append(f"for t in range(t_first, t_whole, {together}):")
        lines += [
            "    " + _renamed(line, own, f"(t + {step})", f"_{step}")
            for line in body
            for step in range(together)
        ]
        lines.append("for t in range(t_whole, t_last):")
        return [*lines, *("    " + line for line in body)]

    def ordered(self, indices: list[str]) -> list[str]:
        """Loop-variable definitions, then index loads, then the rest (loads of data and
        arithmetic).
        """
        split = self.frame.frame_lines
        return [*self.frame.stages[2][:split], *indices, *self.frame.stages[2][split:]]

    def prefetched(self, first: str, last: str) -> list[str]:
        """Index loads run one iteration ahead of the data they address, so that the pipeline
        buffers data, not indices.
        """
        lines, split = self.frame.stages[2], self.frame.frame_lines
        counters, rest = lines[:split], lines[split:]
        ahead = [*counters, *(line for _, line in self.frame.index_lines)]
        needed = _needed(ahead, {name for name, _ in self.frame.index_lines})
        defined = {line.split(" = ")[0] for line in needed}
        lines = [f"t_first = {first}", f"t_last = {last}"]
        lines += self.ahead(needed, defined, "t_first")
        lines.append("for t in range(t_first, t_last):")
        lines += ["    " + line for line in counters]
        lines += [f"    {name} = {name}_next" for name, _ in self.frame.index_lines]
        lines += ["    " + line for line in rest]
        lines += ["    " + line for line in self.ahead(needed, defined, "(t + 1)")]
        return lines

    def ahead(self, lines: list[str], defined: set[str], at: str) -> list[str]:
        """The index loads of iteration ``at``; beyond the last iteration nothing may be read, so
        the loop's bound joins the mask.
        """
        names = {name for name, _ in self.frame.index_lines}
        bound = f"{at.strip('()')} < t_last"
        return [
            _with_bound(_renamed(line, defined, at), bound)
            if line.split(" = ")[0] in names and "tl.load(" in line
            else _renamed(line, defined, at)
            for line in lines
        ]


def _listed(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _wrapped(arguments: list[str], width: int = 90) -> list[str]:
    lines, line = [], ""
    for argument in arguments:
        if line and len(line) + len(argument) + 2 > width:
            lines.append(line)
            line = ""
        line = f"{line}, {argument}" if line else argument
    return [*lines, line] if line else lines


def _needed(lines: list[str], names: set[str]) -> list[str]:
    """The lines that the named values depend on, themselves included, in order."""
    wanted, kept = set(names), []
    for line in reversed(lines):
        name, _, text = line.partition(" = ")
        if name in wanted:
            kept.append(line)
            wanted |= set(re.findall(r"[A-Za-z_]\w*", text))
    return kept[::-1]


def _renamed(line: str, defined: set[str], at: str, end: str = "_next") -> str:
    def change(found: re.Match[str]) -> str:
        word = found.group()
        return f"{word}{end}" if word in defined else at if word == "t" else word

    return re.sub(r"(?<![.\w])[A-Za-z_]\w*", change, line)


def _with_bound(line: str, bound: str) -> str:
    """Add ``bound`` to the mask of the load in ``line``."""
    if ", mask=" in line:
        return line.replace(", mask=", f", mask=({bound}) & ", 1)
    position = _end_of_load(line)
    return f"{line[:position]}, mask={bound}, other=0{line[position:]}"


def _end_of_load(line: str) -> int:
    start = line.index("tl.load(") + len("tl.load(")
    depth = 1
    for position in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[position], 0)
        if depth == 0:
            return position
    raise AssertionError(line)
