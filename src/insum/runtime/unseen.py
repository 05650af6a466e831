"""A program for all calls of its class: its recipes as straight-line code, run for each call.

Where `Ready` holds the numbers of one call, `Unseen` evaluates them for sizes and index tensors
that were not met before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.codegen.arguments import Argument, Count, ExtentArgument, Length, Pointer, Stride
from insum.compat import calls
from insum.lang.expr import variables
from insum.plan.plan import Plan
from insum.plan.recipes import CeilDivided, OfCount, OfExtent, OfLength, OfShape, Recipe
from insum.plan.sizes import OUT, WORK
from insum.runtime.bound_launch import COPIES, BoundLaunch
from insum.runtime.program import Launch, Program
from insum.runtime.prologue.made import Made
from insum.runtime.ready import Ready

#: Programs and arguments of each launch, and shapes of workspaces, of values, extents, shape, what
#: is written to and what was made of index tensors.
Numbers: TypeAlias = Callable[
    [Mapping[str, Any], tuple[int, ...], tuple[int, ...], Tensor | None, Sequence[Made]],
    tuple[list[tuple[int, list[Any]]], list[tuple[int, ...]]],
]


#: The sizes that recipes name, of values, extents and shape.
RecipeSizes: TypeAlias = Callable[
    [Mapping[str, Any], tuple[int, ...], tuple[int, ...]], tuple[int, ...]
]


class Unseen:
    """A program for all sizes of its class, and for all index tensors of which the same is known:
    its recipes are straight-line code, run for each call. It holds nothing of any index tensor.

    Attributes:
        recipes: what is made of the index tensors of each call.
        does: what these do, whatever tensors and sizes are called; ``sizes`` evaluates the sizes
            that they name, and is None where only a recipe knows one. Both together tell what was
            made of a tensor.
        arrays: by name, which array of which of them is passed.
        rooms: by the first launch of a product, copies of factors that it has.
    """

    __slots__ = (
        *("arrays", "buffer", "check", "device", "does", "dtype", "filled", "index", "launches"),
        *("numbers", "program", "recipes", "rooms", "sizes", "start", "written"),
    )

    def __init__(
        self,
        found: Ready,
        numbers: Numbers,
        recipes: tuple[Recipe, ...],
        arrays: Mapping[str, tuple[int, str]],
        sizes: RecipeSizes | None,
    ) -> None:
        self.program, self.check, self.numbers = found.program, found.check, numbers
        self.does, self.sizes = tuple(recipe.outline.does for recipe in recipes), sizes
        self.recipes, self.arrays = recipes, tuple((n, *at) for n, at in arrays.items())
        self.launches = [_holding_nothing(one) for one in found.launches]
        self.rooms = tuple(
            step.copies if first else ()
            for step in found.program.steps
            for first in (True, *[False] * (len(step.launches) - 1))
        )
        self.index, self.device, self.buffer = found.index, found.device, found.buffer
        first = found.program.steps[0]
        self.written = None if first.atomic else first.planned.written
        self.dtype, self.start = found.dtype, found.start
        self.filled = found.filled or self.written is not None

    def run(
        self,
        values: Mapping[str, Any],
        spans: tuple[int, ...],
        shape: tuple[int, ...],
        target: Tensor | None,
        made: Sequence[Made] = (),
        *,
        look: bool,
    ) -> Tensor:
        """The same as `Ready`'s, for other sizes, and for what was ``made`` of index tensors."""
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self.run(values, spans, shape, target, made, look=look)
        if made:
            every = dict(values)
            for name, k, part in self.arrays:
                every[name] = made[k].arrays[part]
            values = every
        numbers, rooms = self.numbers(values, spans, shape, target, made)
        if target is None:
            out = self.new(shape, fill=not look)
        elif self.buffer is None:
            out = target
        else:
            out = target.to(self.buffer, memory_format=torch.contiguous_format, copy=True)
        if self.check is not None:
            first = numbers.pop(0)
            if look:
                self.check.start(*first, values, out, out)
        work: Any = out
        for one, copies, (programs, arguments) in zip(self.launches, self.rooms, numbers):
            if copies:
                work = {c.name: calls.empty(rooms.pop(0), c.dtype, self.device) for c in copies}
            one.start(programs, arguments, values, out, work)
        if self.buffer is None:
            return out
        return out.to(self.dtype) if target is None else target.copy_(out)

    def new(self, shape: tuple[int, ...], *, fill: bool = True) -> Tensor:
        """What a result is written to, filled with what it starts from, where that counts: where a
        pattern leaves places of a dimension out, where that is what decides.
        """
        out = calls.empty(shape, self.buffer or self.dtype, self.device)
        written = self.written
        if fill and self.filled and (written is None or shape[written[0]] != written[1]):
            out.fill_(self.start)
        return out


def _holding_nothing(one: BoundLaunch) -> BoundLaunch:
    made = copy.copy(one)
    made.held = {}
    return made


def unseen_of(found: Ready, extents: tuple[str, ...], into: bool) -> Unseen | None:
    """Code that runs the program of a call on the sizes of others of its class; None where that
    takes more than evaluating its recipes.
    """
    program = found.program
    steps = [step.planned for step in program.steps]
    if any(one.covers for one in steps):
        return None
    for step, (rooms, launches) in zip(program.steps, found.work):
        if not launches or rooms and not step.copies:
            return None  # there is nothing to launch for some product, or it is cut into pieces
    recipes = tuple(dict.fromkeys(r for step in program.steps for r in step.recipes()))
    arrays: dict[str, tuple[int, str]] = {}
    for one in found.launches:
        for name, (recipe, part) in one.launch.arrays.items():
            at = recipes.index(recipe), part
            if arrays.setdefault(name, at) != at or "task_last" in one.launch.counts:
                return None
    writer = _LaunchWriter(extents, into and program.buffer is None, recipes)
    if found.check is not None:
        counts = _check_counts(program, _fill_condition(found) if not into else "False", writer)
        writer.launch(found.check.launch, counts, addresses=False)
    for one in found.launches:
        writer.launch(one.launch, {k: writer.count(v) for k, v in one.launch.counts.items()})
    for step in program.steps:
        for copied in step.copies:
            writer.rooms.append(f"({', '.join(map(writer.count, copied.shape))},)")
    return Unseen(found, writer.write(), recipes, arrays, _sizes_of(recipes, extents))


def _sizes_of(recipes: tuple[Recipe, ...], extents: tuple[str, ...]) -> RecipeSizes | None:
    """Code that evaluates all sizes that recipes name; None where only a recipe knows one."""
    writer, parts = _LaunchWriter(extents, False, recipes), []
    for size in (size for recipe in recipes for size in recipe.outline.sizes):
        match size:
            case str():
                parts.append(writer.extents[size])
            case OfLength():
                parts.append(writer.count(size))
            case _ if any(isinstance(one, OfCount) for one in size):
                return None
            case _:
                parts.append(" * ".join(map(writer.count, size)) or "1")
    every = "".join(f"{part}, " for part in parts)
    sizes: RecipeSizes = writer.function("sizes", "v, x, d", f"({every})")
    return sizes


#: What is there only when a launch is started.
_MADE_LATER = (OUT, WORK, *COPIES)


class _LaunchWriter:
    """Writes the code that evaluates the recipes of launches."""

    def __init__(
        self, extents: tuple[str, ...], strided: bool, recipes: tuple[Recipe, ...]
    ) -> None:
        """``strided``: the output was passed, with strides of its own."""
        self.extents = {name: f"x[{k}]" for k, name in enumerate(extents)}
        self.strided, self.recipes = strided, recipes
        self.lines: list[str] = []
        self.known: dict[str, str] = {}
        self.results: list[str] = []
        self.rooms: list[str] = []

    def of(self, tensor: str, what: str) -> str:
        """Shape or strides of a tensor, read once."""
        text = f"v[{tensor!r}].{what}" if tensor != OUT else f"t.{what}"
        if text not in self.known:
            self.known[text] = f"k{len(self.known)}"
            self.lines.append(f"{self.known[text]} = {text}")
        return self.known[text]

    def size(self, plan: Plan, var: str) -> str:
        made = dict(plan.made)
        if var not in made:
            return self.extents[var]
        return f"({' * '.join([self.count(one) for one in made[var]])})"

    def count(self, one: int | OfExtent | OfShape | OfLength | OfCount | CeilDivided) -> str:
        match one:
            case OfLength(tensor, dim):
                return f"{self.of(tensor, 'shape')}[{dim}]"
            case OfExtent(var):
                return self.extents[var]
            case OfShape(dim):
                return f"d[{dim}]"
            case OfCount(recipe, name):
                return f"m[{self.recipes.index(recipe)}].counts[{name!r}]"
            case CeilDivided(size, by):
                return f"-(-{self.count(size)} // {by})"
            case _:
                return str(one)

    def stride(self, tensor: str, dim: int, rank: int) -> str:
        if tensor == OUT and not self.strided:
            return f"({' * '.join([f'd[{k}]' for k in range(dim + 1, rank)]) or '1'})"
        return f"{self.of(tensor, 'stride()')}[{dim}]"

    def launch(self, one: Launch, counts: Mapping[str, str], *, addresses: bool = True) -> None:
        """``addresses``: of all that is read, too; else they are looked for when it is started."""
        rank = len(one.plan.target.indices)
        grid = [
            f"-(-({' * '.join(self.sized(one, a, counts) for a in axis) or '1'}) // {tile})"
            for axis, tile in one.grid
        ]
        arguments = [
            f"v[{argument.tensor!r}].data_ptr()"
            if addresses and isinstance(argument, Pointer) and argument.tensor not in _MADE_LATER
            else self.number(one, argument, counts, rank)
            for argument in one.arguments
        ]
        self.results.append(f"({' * '.join(grid) or '1'}, [{', '.join(arguments)}])")

    def sized(self, one: Launch, size: ExtentArgument | Count, counts: Mapping[str, str]) -> str:
        return counts[size.what] if isinstance(size, Count) else self.size(one.plan, size.var)

    def number(self, one: Launch, argument: Argument, counts: Mapping[str, str], rank: int) -> str:
        match argument:
            case ExtentArgument(var, unit):
                return f"{self.size(one.plan, var)} // {unit}"
            case Count(what):
                return counts[what]
            case Length(tensor, dim):
                return f"d[{dim}]" if tensor == OUT else f"{self.of(tensor, 'shape')}[{dim}]"
            case Stride(tensor, dim, unit):
                return f"{self.stride(tensor, dim, rank)} // {unit}"
            case _:
                return "None"

    def write(self) -> Numbers:
        found = f"[{', '.join(self.results)}], [{', '.join(self.rooms)}]"
        numbers: Numbers = self.function("numbers", "v, x, d, t, m", found)
        return numbers

    def function(self, name: str, arguments: str, found: str) -> Any:
        """A function that evaluates what was written, and gives this."""
        body = "\n    ".join([*self.lines, f"return {found}"])
        names: dict[str, Any] = {}
        exec(f"def {name}({arguments}):\n    {body}\n", names)
        return names[name]


def _fill_condition(found: Ready) -> str:
    """Whether a new result is filled first, as code."""
    first = found.program.steps[0]
    if first.planned.written is None or first.atomic:
        return str(found.filled)
    dim, count = first.planned.written
    return f"d[{dim}] != {count}"


def _check_counts(program: Program, fill: str, writer: _LaunchWriter) -> dict[str, str]:
    """The numbers of the launch that looks at index values, as code."""
    out = " * ".join(f"d[{k}]" for k in range(len(program.problem.shape))) or "1"
    points = [
        " * ".join(writer.extents[v] for v in variables(use.index)) or "1"
        for use in program.unchecked
    ]
    count = f"({out} if {fill} else 0)"
    return {"most": f"max({', '.join([count, *points])})", "out_count": count}
