"""A program for all calls of its class: its recipes as straight-line code, run for each call.

Where `Ready` holds the numbers of one call, `Unseen` evaluates them for sizes and index tensors
that were not met before.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.codegen.arguments import (
    Argument,
    Count,
    ExtentArgument,
    Length,
    Passed,
    Reciprocal,
    Stride,
    reciprocal_text,
)
from insum.codegen.cut_rows import beside_rows
from insum.compat import streams, tensors
from insum.lang.expr import variables
from insum.plan.plan import Plan
from insum.plan.recipes import CeilDivided, OfCount, OfExtent, OfLength, OfShape, Recipe
from insum.plan.sizes import BASE, OUT, WORK, spread_strides
from insum.plan.tiling import in_rows
from insum.runtime import launch
from insum.runtime.bound_launch import BoundLaunch, plain_number
from insum.runtime.program import WIDE, Launch, Program
from insum.runtime.prologue.made import Made
from insum.runtime.ready import Ready

#: Launches everything and gives the result: of values, extents, shape, what is written to, what was
#: made of index tensors, and whether indices are to be looked at first.
RunCode: TypeAlias = Callable[
    [Mapping[str, Any], tuple[int, ...], tuple[int, ...], Tensor | None, Sequence[Made], bool],
    Tensor,
]


#: The sizes that recipes name, of values, extents and shape.
RecipeSizes: TypeAlias = Callable[
    [Mapping[str, Any], tuple[int, ...], tuple[int, ...]], tuple[int, ...]
]


class Unseen:
    """A program for all sizes of its class, and for all index tensors of which the same is known:
    its recipes are straight-line code, run for each call. It holds nothing of any index tensor.

    Attributes:
        run: does what a call of `Ready` does, for other sizes, and for what was made of index
            tensors.
        new: what a result of some shape is written to, filled with what it starts from, where that
            counts.
        recipes: what is made of the index tensors of each call.
        does: what these do, whatever tensors and sizes are called; ``sizes`` evaluates the sizes
            that they name, and is None where only a recipe knows one. Both together tell what was
            made of a tensor.
    """

    __slots__ = (
        *("buffer", "check", "does", "index", "launches", "new", "program", "recipes", "run"),
        "sizes",
    )

    def __init__(
        self,
        found: Ready,
        run: RunCode,
        new: Callable[[tuple[int, ...]], Tensor],
        launches: list[BoundLaunch],
        recipes: tuple[Recipe, ...],
        sizes: RecipeSizes | None,
    ) -> None:
        self.program, self.check, self.new = found.program, found.check, new
        self.does, self.sizes = tuple(recipe.outline.does for recipe in recipes), sizes
        self.recipes, self.launches = recipes, launches
        self.index, self.buffer = found.index, found.buffer
        self.run = run if found.index is None else functools.partial(_run_on, found.index, run)


def _run_on(index: int, run: RunCode, *given: Any) -> Tensor:
    """Where there are several GPUs, on that of the program."""
    if index == streams.device_now():
        return run(*given)
    with torch.cuda.device(index):
        return run(*given)


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
    for step, (_, launches) in zip(program.steps, found.work):
        if not launches or step.workspace and in_rows(step.planned.plan):
            return None  # there is nothing to launch for some product, or its rows are cut
    recipes = tuple(dict.fromkeys(r for step in program.steps for r in step.recipes()))
    arrays: dict[str, tuple[int, str]] = {}
    for one in found.launches:
        for name, (recipe, part) in one.launch.arrays.items():
            at = recipes.index(recipe), part
            if arrays.setdefault(name, at) != at or "task_last" in one.launch.counts:
                return None
    writer = _CodeWriter(extents, recipes, arrays, strided=into and program.buffer is None)
    passed = [_holding_nothing(one) for one in found.launches]
    run = _run_code(writer, found, passed, into=into)
    new = _CodeWriter(extents, recipes, arrays)
    new.make_new(found)
    made = new.function("new", "d, look=False", "out")
    return Unseen(found, run, made, passed, recipes, _sizes_of(recipes, extents))


def _run_code(
    writer: _CodeWriter, found: Ready, launches: list[BoundLaunch], *, into: bool
) -> RunCode:
    """The code of `Unseen.run`."""
    program, result = found.program, "out"
    if not into:
        writer.make_new(found)
        result = "out" if found.buffer is None else f"out.to({writer.named(found.dtype)})"
    elif found.buffer is None:
        writer.lines.append("out = t")
    else:
        kind, form = writer.named(found.buffer), writer.named(torch.contiguous_format)
        writer.lines.append(f"out = t.to({kind}, memory_format={form}, copy=True)")
        result = "t.copy_(out)"
    if found.check is not None:
        fill = "False" if into else _fill_condition(found)
        with writer.where("look"):
            one, counts = found.check, _check_counts(program, fill, writer)
            numbers = writer.launch(one.launch, counts, [None] * len(one.launch.arguments))
            own, given = writer.named(one), ", ".join(numbers)
            writer.lines.append(f"{own}.start({given}, v, out, out)")
    every = iter(launches)
    for step in program.steps:
        for room in step.copies:
            shape = f"({', '.join(map(writer.count, room.shape))},)"
            writer.make_room(room.name, writer.new(shape, len(room.shape), room.dtype, found))
        if step.workspace:
            parts = [" * ".join(map(writer.count, part)) for part in step.workspace]
            held = WIDE[step.planned.plan.accumulator]
            writer.make_room(WORK, writer.new(f"({' + '.join(parts)},)", 1, held, found))
        for _ in step.launches:
            writer.start(next(every))
    code: RunCode = writer.function("run", "v, x, d, t, m, look", result)
    return code


def _sizes_of(recipes: tuple[Recipe, ...], extents: tuple[str, ...]) -> RecipeSizes | None:
    """Code that evaluates all sizes that recipes name; None where only a recipe knows one."""
    writer, parts = _CodeWriter(extents, recipes), []
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


class _CodeWriter:
    """Writes the code that evaluates the recipes of launches, and starts them."""

    def __init__(
        self,
        extents: tuple[str, ...],
        recipes: tuple[Recipe, ...],
        arrays: Mapping[str, tuple[int, str]] | None = None,
        *,
        strided: bool = False,
    ) -> None:
        """``arrays``: which array of which recipe is passed, by name. ``strided``: the output was
        passed, with strides of its own.
        """
        self.extents = {name: f"x[{k}]" for k, name in enumerate(extents)}
        self.strided, self.recipes, self.arrays = strided, recipes, arrays or {}
        self.lines: list[str] = []
        self.known: dict[str, str] = {}
        self.names: dict[str, Any] = {}
        #: Variables of memory that a call has of its own.
        self.own = {OUT: "out", WORK: "out"}  # of a workspace without slots nothing is read

    def named(self, thing: object) -> str:
        """A name of something that the code needs."""
        name = f"n{len(self.names)}"
        self.names[name] = thing
        return name

    def once(self, text: str) -> str:
        """A variable that holds what this evaluates to."""
        if text not in self.known:
            self.known[text] = f"k{len(self.known)}"
            self.lines.append(f"{self.known[text]} = {text}")
        return self.known[text]

    @contextmanager
    def where(self, condition: str) -> Iterator[None]:
        """What is written meanwhile is evaluated where this holds; the rest does not read it."""
        before, known = len(self.lines), dict(self.known)
        yield
        inner = [f"    {line}" for line in self.lines[before:]]
        self.lines[before:], self.known = [f"if {condition}:", *inner], known

    def tensor(self, name: str) -> str:
        if name in self.own:
            return self.own[name]
        if name in self.arrays:
            k, part = self.arrays[name]
            return self.once(f"m[{k}].arrays[{part!r}]")
        return f"v[{name!r}]"

    def of(self, tensor: str, what: str) -> str:
        """Shape or strides of a tensor, read once."""
        return self.once(f"{'t' if tensor == OUT else self.tensor(tensor)}.{what}")

    # --- memory ---

    def new(self, shape: str, rank: int, dtype: torch.dtype, found: Ready) -> str:
        """A tensor without values."""
        sizes = [f"s[{k}]" for k in range(rank)]
        strides = "".join(f"{' * '.join(sizes[k + 1 :]) or '1'}, " for k in range(rank))
        self.lines.append(f"s = {shape}")
        kind, where = self.named(dtype), found.device
        if where.type in tensors.strided_makers():
            makers = f"{self.named(tensors)}.strided_makers()"
            return f"{makers}[{where.type!r}](s, ({strides}), {kind})"
        make, device = f"{self.named(torch)}.empty_strided", self.named(where)
        return f"{make}(s, ({strides}), dtype={kind}, device={device})"

    def make_new(self, found: Ready) -> None:
        """The result, filled with what it starts from where that counts, unless the launch that
        looks at indices does it.
        """
        dtype, rank = found.buffer or found.dtype, len(found.program.problem.shape)
        self.lines.append(f"out = {self.new('d', rank, dtype, found)}")
        fill = _fill_condition(found)
        start = f"copy_(v[{BASE!r}])" if found.based else f"fill_({self.named(found.start)})"
        if fill != "False":
            self.lines.append(f"if not look and {fill}: out.{start}")

    def make_room(self, name: str, text: str) -> None:
        """Memory for a copy of a factor."""
        self.own[name] = variable = f"w{len(self.lines)}"
        self.lines.append(f"{variable} = {text}")

    # --- numbers ---

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
        if tensor == BASE:
            spread, base = self.named(spread_strides), self.tensor(BASE)
            return f"{self.once(f'{spread}({base}.shape, {base}.stride(), d)')}[{dim}]"
        return f"{self.of(tensor, 'stride()')}[{dim}]"

    def start(self, one: BoundLaunch) -> None:
        """Start a launch: where it has programs, with the kernel for the alignment of what it is
        passed; in Triton's interpreter, with tensors for addresses.
        """
        by_address, last = not launch.interpreting(), len(one.pointers) - 1
        addresses: list[str | None] = [None] * len(one.launch.arguments)
        bits, always = [], 0
        for k, (place, name, anywhere) in enumerate(one.pointers):
            tensor = self.tensor(name)
            addresses[place] = found = self.once(f"{tensor}.data_ptr()") if by_address else tensor
            if anywhere:
                always |= 1 << last - k
            else:
                bits.append(f"({found} & 15 and {1 << last - k})")
        counts = {k: self.count(v) for k, v in one.launch.counts.items()}
        own = self.named(one)
        programs, arguments = self.launch(one.launch, counts, addresses)
        self.lines.append(f"p = {programs}")
        if by_address:
            self.lines.append(f"u = {' | '.join([str(always), *bits])}")
            kernel = f"({self.named(one.variants)}.get(u) or {own}.launcher(u))"
            self.lines.append(f"if p: {kernel}(p, {arguments})")
        else:
            self.lines.append(f"if p: {own}.interpret(p, {arguments})")

    def launch(
        self, one: Launch, counts: Mapping[str, str], addresses: Sequence[str | None]
    ) -> tuple[str, str]:
        """How many programs a launch has, and its arguments; ``addresses`` are those of pointers,
        by place.
        """
        rank = len(one.plan.target.indices)
        grid = [
            f"-(-({' * '.join(self.sized(one, a, counts) for a in axis) or '1'}) // {tile})"
            for axis, tile in one.grid
        ]
        arguments = [
            address or self.number(one, argument, counts, rank)
            for argument, address in zip(one.arguments, addresses, strict=True)
        ]
        return " * ".join(grid) or "1", f"[{', '.join(arguments)}]"

    def sized(self, one: Launch, size: ExtentArgument | Count, counts: Mapping[str, str]) -> str:
        return counts[size.what] if isinstance(size, Count) else self.size(one.plan, size.var)

    def number(self, one: Launch, argument: Argument, counts: Mapping[str, str], rank: int) -> str:
        match argument:
            case ExtentArgument(var, unit):
                return f"{self.size(one.plan, var)} // {unit}"
            case Reciprocal(var):
                return reciprocal_text(self.size(one.plan, var))
            case Count(what):
                return counts[what]
            case Length(tensor, dim):
                return f"d[{dim}]" if tensor == OUT else f"{self.of(tensor, 'shape')}[{dim}]"
            case Stride(tensor, dim, unit) if tensor == WORK:
                sizes = [self.size(one.plan, v) for v in beside_rows(one.plan)[dim:]]
                return f"({' * '.join(sizes) or '1'}) // {unit}"
            case Stride(tensor, dim, unit):
                return f"{self.stride(tensor, dim, rank)} // {unit}"
            case Passed(name):
                return f"{self.named(plain_number)}(v[{name!r}])"
            case _:
                return "None"

    def function(self, name: str, arguments: str, found: str) -> Any:
        """A function that evaluates what was written, and gives this."""
        body = "\n    ".join([*self.lines, f"return {found}"])
        exec(f"def {name}({arguments}):\n    {body}\n", self.names)
        return self.names[name]


def _fill_condition(found: Ready) -> str:
    """Whether a new result is filled first, as code."""
    first = found.program.steps[0]
    if first.planned.written is None or first.atomic:
        return str(found.filled)
    dim, count = first.planned.written
    return f"d[{dim}] != {count}"


def _check_counts(program: Program, fill: str, writer: _CodeWriter) -> dict[str, str]:
    """The numbers of the launch that looks at index values, as code."""
    out = " * ".join(f"d[{k}]" for k in range(len(program.problem.shape))) or "1"
    points = [
        " * ".join(writer.extents[v] for v in variables(use.index)) or "1"
        for use in program.unchecked
    ]
    count = f"({out} if {fill} else 0)"
    return {"most": f"max({', '.join([count, *points])})", "out_count": count}
