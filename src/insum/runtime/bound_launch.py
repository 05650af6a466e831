"""One launch of a program with the numbers of a call: sizes, strides and counts are evaluated, and
only addresses are missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.codegen.arguments import (
    CLAIM,
    FLAGS,
    RECORD,
    Argument,
    Count,
    ExtentArgument,
    Length,
    Passed,
    Pointer,
    Reciprocal,
    Stride,
    reciprocal_of,
)
from insum.codegen.cut_rows import beside_rows
from insum.compat import streams
from insum.errors import UnsupportedError
from insum.plan.plan import Plan
from insum.plan.recipes import OfCount, OfLength, Recipe, SizeExpr, size_of
from insum.plan.sizes import ALIGNED, ALSO_ALIGNED, BASE, FITTED, OUT, WORK, spread_strides
from insum.runtime import binaries, compiling, launch, workers
from insum.runtime.program import WIDE, Grid, Launch, ProductLaunches
from insum.runtime.prologue.made import Made

MOST_PROGRAMS = 2**31

#: What the record of a device is made of.
_OWN = {FLAGS: "*i32", CLAIM: "*i32", RECORD: "*i64"}

#: Copies of factors, which are memory of the call.
COPIES = (FITTED, ALIGNED, ALSO_ALIGNED)


#: A launch whose numbers are in their places: programs, arguments, which pointers are not aligned
#: whatever is passed (a bit each), and where what is passed goes: place, number, and the bit of an
#: address that may not be aligned.
Placed: TypeAlias = tuple["BoundLaunch", int, list[Any], int, tuple[tuple[int, int, int], ...]]


class CallNumbers:
    """The numbers of one call: extents, shapes and strides, and what recipes gave. They may be
    symbols.
    """

    __slots__ = ("extents", "made", "shape", "tensors")

    def __init__(
        self,
        tensors: Mapping[str, Any],
        extents: Mapping[str, int],
        shape: tuple[int, ...],
        made: Mapping[Recipe, Made],
    ) -> None:
        self.tensors, self.extents, self.shape, self.made = tensors, extents, shape, made

    def expr(self, expr: SizeExpr) -> int:
        return size_of(expr, self.extents, self.shape, self.counted, self.length)

    def length(self, one: OfLength) -> int:
        found: int = self.tensors[one.tensor].shape[one.dim]
        return found

    def counted(self, one: OfCount) -> int:
        return self.made[one.recipe].counts[one.name]

    def extent(self, plan: Plan, var: str) -> int:
        made = dict(plan.made)
        return self.expr(made[var]) if var in made else self.extents[var]

    def counts(self, one: Launch) -> dict[str, int]:
        """The numbers of a launch itself."""
        found = {
            name: value if isinstance(value, int) else self.made[value.recipe].counts[value.name]
            for name, value in one.counts.items()
        }
        if "task_last" in found:
            found["task_count"] = max(0, found["task_last"] - found["task_first"])
        return found

    def rooms(self, step: ProductLaunches) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of the memory that a product needs beside its output."""
        found = [
            (c.name, tuple(self.expr((one,)) for one in c.shape), c.dtype) for c in step.copies
        ]
        if step.workspace:
            held = WIDE[step.planned.plan.accumulator]
            found.append((WORK, (sum(map(self.expr, step.workspace)),), held))
        return found

    def programs(self, one: Launch, counts: Mapping[str, int]) -> int:
        """How many programs a launch has."""
        grids = (one.grid,) if one.before is None else (one.before, one.grid)
        return sum(self.tiles(one.plan, grid, counts) for grid in grids)

    def tiles(self, plan: Plan, grid: Grid, counts: Mapping[str, int]) -> int:
        found = 1
        for axis, tile in grid:
            size = 1
            for a in axis:
                size *= counts[a.what] if isinstance(a, Count) else self.extent(plan, a.var)
            found *= -(-size // tile)
        return found

    def number(self, one: Launch, argument: Argument, counts: Mapping[str, int]) -> int | None:
        """A number among the arguments of a launch; None for what comes with each call."""
        match argument:
            case ExtentArgument(var, unit):
                return self.extent(one.plan, var) // unit
            case Reciprocal(var):
                return reciprocal_of(self.extent(one.plan, var))
            case Count(what):
                return counts[what]
            case Length(tensor, dim):
                return self.shape[dim] if tensor == OUT else self.tensors[tensor].shape[dim]
            case Stride(tensor, dim, unit):
                return self.stride(one, tensor, dim) // unit
            case _:
                return None

    def stride(self, one: Launch, tensor: str, dim: int) -> int:
        if tensor == WORK:
            return math.prod(self.extent(one.plan, v) for v in beside_rows(one.plan)[dim:])
        if tensor == OUT and OUT not in self.tensors:
            return math.prod(self.shape[dim + 1 :])
        if tensor in one.arrays:
            recipe, part = one.arrays[tensor]
            return self.made[recipe].arrays[part].stride(dim)
        found: Any = self.tensors[tensor]
        if tensor == BASE:
            return spread_strides(found.shape, found.stride(), self.shape)[dim]
        step: int = found.stride(dim)
        return step


class BoundLaunch:
    """One launch of one call: numbers in their places, and where addresses go."""

    __slots__ = (
        "arguments",
        "held",
        "launch",
        "passed",
        "pointers",
        "programs",
        "types",
        "usual",
        "variants",
    )

    def __init__(
        self,
        one: Launch,
        plan: Plan,
        sizes: CallNumbers,
        out: torch.dtype,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        counts = sizes.counts(one) | dict(numbers or {})
        self.launch, self.programs = one, sizes.programs(one, counts)
        if self.programs >= MOST_PROGRAMS:
            raise UnsupportedError(f"the grid would have {self.programs} programs")
        self.held = {
            name: sizes.made[recipe].arrays[part] for name, (recipe, part) in one.arrays.items()
        }
        #: Place, name, and whether no use is made of an address that is a multiple of 16: rows of
        #: an index tensor begin anywhere, and are read one place by a thread.
        self.pointers: list[tuple[int, str, bool]] = []
        self.passed: list[tuple[int, str]] = []
        self.arguments: list[Any] = []
        types: list[str] = []
        work, indices = WIDE[plan.accumulator], one.indices
        kinds = dict(plan.kinds)
        copies = {name: getattr(torch, kinds[name]) for name in COPIES if name in kinds}
        own = {OUT: out, WORK: work, **copies}
        for place, (argument, type) in enumerate(zip(one.arguments, one.types)):
            number = sizes.number(one, argument, counts)
            match argument:
                case Pointer(name):
                    anywhere = name in sizes.tensors and name in indices
                    self.pointers.append((place, name, anywhere))
                    number = self.held[name].data_ptr() if name in self.held else None
                    type = _OWN.get(name) or launch.pointer_type(
                        own.get(name) or self.dtype(name, sizes)
                    )
                case Passed(name):
                    self.passed.append((place, name))
            self.arguments.append(number)
            types.append(type)
        self.types = tuple(types)
        #: Which pointers are not aligned where all are that can be, a bit each.
        bits = "".join(str(int(anywhere or one.general)) for _, _, anywhere in self.pointers)
        self.usual = int("0" + bits, 2)
        self.variants: dict[int, Any] = one.variants.setdefault(self.types, {})

    def dtype(self, name: str, sizes: CallNumbers) -> torch.dtype:
        found: Tensor = self.held[name] if name in self.held else sizes.tensors[name]
        return found.dtype

    def __call__(self, values: Mapping[str, Any], out: Tensor, work: Any) -> None:
        self.start(self.programs, self.arguments.copy(), values, out, work)

    def start(
        self,
        programs: int,
        arguments: list[Any],
        values: Mapping[str, Any],
        out: Tensor,
        work: Any,
    ) -> None:
        """Put addresses among the numbers, and launch."""
        if not programs:
            return
        if launch.interpreting():
            return self.interpret(programs, arguments, values, out, work)
        unaligned = 0
        for place, name, any_address in self.pointers:
            at = arguments[place]
            if at is None:
                found = out if name is OUT else work if name is WORK else None
                if found is None:
                    found = work[name] if name in COPIES else values[name]
                arguments[place] = at = found.data_ptr()
            unaligned = 2 * unaligned + (any_address or at & 15 != 0)
        for place, name in self.passed:
            arguments[place] = plain_number(values[name])
        self.launcher(unaligned)(programs, arguments)

    def launcher(self, unaligned: int) -> launch.Launcher:
        """The kernel for pointers of this alignment, compiled the first time."""
        found: launch.Launcher | None = self.variants.get(unaligned)
        if found is None:
            found = self.variants[unaligned] = self.compiled(unaligned)
        return found

    def placed(self, numbers: Mapping[str, int]) -> Placed:
        """This launch where what is passed comes by number."""
        arguments, taken = self.arguments.copy(), launch.interpreting()
        unaligned, moves = 0, []
        for k, (place, name, any_address) in enumerate(reversed(self.pointers)):
            held = self.held.get(name)
            if any_address or held is not None and held.data_ptr() & 15:
                unaligned |= 1 << k
            if held is None:
                moves.append((place, numbers[name], 0 if any_address or taken else 1 << k))
            elif taken:
                arguments[place] = held
        moves += [(place, numbers[name], 0) for place, name in self.passed]
        return self, self.programs, arguments, unaligned, tuple(moves)

    def interpret(
        self,
        programs: int,
        arguments: list[Any],
        values: Mapping[str, Any] | None = None,
        out: Tensor | None = None,
        work: Any = None,
    ) -> None:
        """In Triton's interpreter, which takes tensors and not addresses; ``values``: where they
        are not among the arguments.
        """
        if values is not None:
            for place, name, _ in self.pointers:
                if name in COPIES:
                    arguments[place] = work[name]
                    continue
                own = out if name is OUT else work if name is WORK else self.held.get(name)
                arguments[place] = values[name] if own is None else own
            for place, name in self.passed:
                arguments[place] = plain_number(values[name])
        self.launch.function[(programs,)](*arguments)

    def variant(self, unaligned: int) -> int:
        """For which alignment of pointers a kernel is compiled that can take these: for just that,
        while there is room for kernels of the statement, else for any.
        """
        one, room = self.launch, self.launch.room
        if one.general or unaligned == self.usual:
            return self.usual
        if room is None or room.takes((*one.text, unaligned)):
            return unaligned
        return (1 << len(self.pointers)) - 1

    def compiled(self, unaligned: int) -> launch.Launcher:
        """The kernel for pointers of this alignment: found on disk, or compiled now."""
        one, types = self.launch, self.types
        unaligned = self.variant(unaligned)
        warps, stages = one.config.warps, one.config.stages
        # Programs of other sizes have the same text more often than not.
        key = one.kernel.source, types, unaligned, warps, stages, streams.current_device()
        loaded = launch.loaded.get(key)
        if loaded is not None:
            return loaded

        def compiled(warps: int) -> Any:
            options = one.function, types, unaligned, warps, stages
            found = binaries.recalled(*options)
            if found is None:
                found = compiling.compile_kernel(*options)
                binaries.note(found, *options)
            return found

        found = compiling.with_enough_warps(compiled, launch.flaw_of, warps)
        return launch.keep_loaded(key, launch.launcher_of(found))

    def job(self) -> compiling.Job:
        """What a compiling worker needs, for pointers that are aligned."""
        one = self.launch
        config = one.config
        warps, stages = config.warps, config.stages
        return workers.job(one.function, one.kernel.name, self.types, self.usual, warps, stages)

    def is_noted(self) -> bool:
        """Whether some process has compiled it, as far as is known."""
        function, config = self.launch.function, self.launch.config
        return binaries.is_noted(function, self.types, self.usual, config.warps, config.stages)


#: Lines of a kernel beyond which compiling it takes a second or more.
LONG_TEXT = 60


def compile_at_once(launches: Iterable[BoundLaunch]) -> None:
    """Compile long kernels that nobody has compiled yet side by side, in other processes: they take
    as long as the longest of them.
    """
    if launch.interpreting():
        return
    new = [one for one in launches if not one.variants and _is_long(one) and not one.is_noted()]
    jobs = {str(job): job for job in (one.job() for one in new)}
    if len(jobs) > 1:
        workers.compile_ahead(list(jobs.values()), launch.current_target())


def _is_long(one: BoundLaunch) -> bool:
    return one.launch.kernel.source.count("\n") > LONG_TEXT


def plain_number(value: Any) -> Any:
    """A truth value counts as a number in a kernel."""
    return int(value) if isinstance(value, bool) else value
