"""A program for one call: its recipes evaluated, so that only addresses are missing.

`Ready` is what is left to do at every call of the same sizes and strides: put addresses into lists
of numbers, and launch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    Stride,
    annotation,
)
from insum.compat import calls
from insum.errors import UnsupportedError
from insum.lang.expr import Access, variables
from insum.plan.plan import Plan
from insum.plan.recipes import (
    CeilDivided,
    OfCount,
    OfExtent,
    OfLength,
    OfShape,
    Recipe,
    SizeExpr,
    size_of,
)
from insum.plan.sizes import ALIGNED, FITTED, OUT, WORK
from insum.runtime import binaries, launch
from insum.runtime.program import WIDE, CopyRoom, Launch, ProductLaunches, Program
from insum.runtime.prologue import Made, Prologue

MOST_PROGRAMS = 2**31
#: What the record of a device is made of.
_OWN = {FLAGS: "*i32", CLAIM: "*i32", RECORD: "*i64"}
#: Copies of factors, which are memory of the call.
_COPIES = (FITTED, ALIGNED)


#: Programs and arguments of each launch, and shapes of workspaces, of values, extents, shape, what
#: is written to and what was made of index tensors.
Numbers: TypeAlias = Callable[
    [Mapping[str, Any], tuple[int, ...], tuple[int, ...], Tensor | None, Sequence[Made]],
    tuple[list[tuple[int, list[Any]]], list[tuple[int, ...]]],
]


#: A launch whose numbers are in their places: programs, arguments, which pointers are not aligned
#: whatever is passed (a bit each), and where what is passed goes: place, number, and the bit of an
#: address that may not be aligned.
Placed: TypeAlias = tuple["BoundLaunch", int, list[Any], int, tuple[tuple[int, int, int], ...]]
#: By name, what makes the workspaces of a step.
Rooms: TypeAlias = tuple[tuple[str, Callable[[], Tensor]], ...]
#: Of a step what makes its workspaces, by number, and its launches.
PlacedStep: TypeAlias = tuple[tuple[tuple[int, Callable[[], Tensor]], ...], tuple[Placed, ...]]


class NotYet(Exception):
    """Numbers that decide a schedule are still on their way from the device."""


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

    def programs(self, one: Launch, counts: Mapping[str, int]) -> int:
        """How many programs a launch has."""
        found = 1
        for axis, tile in one.grid:
            size = 1
            for a in axis:
                size *= counts[a.what] if isinstance(a, Count) else self.extent(one.plan, a.var)
            found *= -(-size // tile)
        return found

    def number(self, one: Launch, argument: Argument, counts: Mapping[str, int]) -> int | None:
        """A number among the arguments of a launch; None for what comes with each call."""
        match argument:
            case ExtentArgument(var, unit):
                return self.extent(one.plan, var) // unit
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
            return math.prod(self.extent(one.plan, v) for v in _work_order(one.plan)[dim:])
        if tensor == OUT and OUT not in self.tensors:
            return math.prod(self.shape[dim + 1 :])
        if tensor in one.arrays:
            recipe, part = one.arrays[tensor]
            return self.made[recipe].arrays[part].stride(dim)
        found: int = self.tensors[tensor].stride(dim)
        return found


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
        work, indices = WIDE[plan.accumulator], plan.index_tensors
        kinds = dict(plan.kinds)
        copies = {name: getattr(torch, kinds[name]) for name in _COPIES if name in kinds}
        for place, argument in enumerate(one.arguments):
            type = annotation(argument, wide=plan.wide)
            number = sizes.number(one, argument, counts)
            match argument:
                case Pointer(name):
                    anywhere = name in sizes.tensors and name in indices
                    self.pointers.append((place, name, anywhere))
                    number = self.held[name].data_ptr() if name in self.held else None
                    own = {OUT: out, WORK: work, **copies}
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
                    found = work[name] if name in _COPIES else values[name]
                arguments[place] = at = found.data_ptr()
            unaligned = 2 * unaligned + (any_address or at & 15 != 0)
        for place, name in self.passed:
            arguments[place] = _plain(values[name])
        launcher = self.variants.get(unaligned)
        if launcher is None:
            launcher = self.variants[unaligned] = self.compiled(unaligned)
        launcher(programs, arguments)

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
                if name in _COPIES:
                    arguments[place] = work[name]
                    continue
                own = out if name is OUT else work if name is WORK else self.held.get(name)
                arguments[place] = values[name] if own is None else own
            for place, name in self.passed:
                arguments[place] = _plain(values[name])
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
        key = one.kernel.source, types, unaligned, warps, stages, calls.current_device()
        loaded = launch.loaded.get(key)
        if loaded is not None:
            return loaded
        found = binaries.recalled(one.function, types, unaligned, warps, stages)
        if found is None:
            found = launch.compile_kernel(one.function, types, unaligned, warps, stages)
            binaries.note(found, one.function, types, unaligned, warps, stages)
        return launch.keep_loaded(key, launch.launcher_of(found))

    def job(self) -> launch.Job:
        """What a compiling worker needs, for pointers that are aligned."""
        one = self.launch
        config = one.config
        warps, stages = config.warps, config.stages
        return launch.job(one.function, one.kernel.name, self.types, self.usual, warps, stages)

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
        launch.compile_ahead(list(jobs.values()), launch.current_target())


def _is_long(one: BoundLaunch) -> bool:
    return one.launch.kernel.source.count("\n") > LONG_TEXT


def _plain(value: Any) -> Any:
    """A truth value counts as a number in a kernel."""
    return int(value) if isinstance(value, bool) else value


def _work_order(plan: Plan) -> list[str]:
    """The variables of a workspace behind its slots."""
    indices = [i for f in plan.factors if isinstance(f, Access) for i in f.indices]
    return [str(i.var) for i in indices[1:]]


class Ready:
    """A program with everything of one call but addresses: launching it is all that is left to
    do. It can be called again with tensors of the same sizes and strides, and the same index
    tensors where it holds what was derived from them.
    """

    __slots__ = (
        *("buffer", "check", "device", "dtype", "empty", "filled", "index"),
        *("__weakref__", "program", "promotable", "reads", "start", "steps", "together", "work"),
    )

    def __init__(self, program: Program, sizes: CallNumbers) -> None:
        #: By what else is computed with it, one launch for all (`runtime.together`).
        self.together: dict[Any, Any] = {}
        problem = program.problem
        self.program, self.buffer, self.dtype = program, program.buffer, problem.dtype
        self.start = program.start
        strategies = [step.planned.plan.strategy for step in program.steps]
        self.promotable = strategies == ["onehot"] and program.promotes
        held = program.buffer or problem.dtype
        device = self.device = problem.device
        self.empty = calls.maker(sizes.shape, held, device)
        new = OUT not in sizes.tensors
        several = device.type == "cuda" and torch.cuda.device_count() > 1
        self.index = device.index if several else None
        if program.buffer is not None and OUT in sizes.tensors:
            tensors = {n: t for n, t in sizes.tensors.items() if n != OUT}
            sizes = CallNumbers(tensors, sizes.extents, sizes.shape, sizes.made)
        self.work = tuple(_bound(step, sizes, held, device) for step in program.steps)
        first = program.steps[0]
        self.filled = first.atomic or not self.work[0][1] or _needs_fill(first, sizes)
        self.check = None
        if program.check is not None and self.launches:
            self.check = _bound_check(program, sizes, held, filled=self.filled and new)
        #: Names of what launches are passed, in the order in which `run` takes it.
        self.reads = _passed_to(self.launches)
        own = (*self.reads, *_OWN_MEMORY)
        self.steps = _placed(self.work, {name: number for number, name in enumerate(own)})

    @property
    def launches(self) -> list[BoundLaunch]:
        return [one for _, launches in self.work for one in launches]

    def __call__(
        self, values: Mapping[str, Any], target: Tensor | None = None, *, look: bool = False
    ) -> Tensor:
        """Launch everything, on the program's device; without a ``target`` into a new tensor.
        ``look``: at unchecked indices first, with what the record of the device takes among
        ``values``.
        """
        by_address, sources = not launch.interpreting(), []
        for name in self.reads:
            value = values[name]
            if isinstance(value, Tensor):
                sources.append(value.data_ptr() if by_address else value)
            else:
                sources.append(_plain(value))
        return self.run(sources, target, values if look else None)

    def run(
        self,
        sources: list[Any],
        target: Tensor | None,
        looks_at: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The same, of the addresses and numbers of `reads`; in Triton's interpreter, of tensors.
        ``looks_at``: values for the launch that looks at indices, where it is to.
        """
        if self.index is not None and self.index != calls.device_now():
            with torch.cuda.device(self.index):
                return self.run(sources, target, looks_at)
        if target is None:
            out = self.empty()
            if self.filled and looks_at is None:
                out.fill_(self.start)
        elif self.buffer is None:
            out = target
        else:
            out = target.to(self.buffer, memory_format=torch.contiguous_format, copy=True)
        if looks_at is not None and self.check is not None:
            self.check(looks_at, out, out)
        by_address = not launch.interpreting()
        at = out.data_ptr() if by_address else out
        sources += (at, at, at, at)  # of a workspace without slots nothing is read
        for rooms, launches in self.steps:
            held = []  # until everything is launched
            for number, make in rooms:
                held.append(room := make())
                sources[number] = room.data_ptr() if by_address else room
            for one, programs, numbers, unaligned, moves in launches:
                arguments = numbers.copy()
                for place, number, bit in moves:
                    arguments[place] = found = sources[number]
                    if bit and found & 15:
                        unaligned |= bit
                if by_address:
                    launcher = one.variants.get(unaligned)
                    if launcher is None:
                        launcher = one.variants[unaligned] = one.compiled(unaligned)
                    launcher(programs, arguments)
                else:
                    one.interpret(programs, arguments)
        if self.buffer is None:
            return out
        return out.to(self.dtype) if target is None else target.copy_(out)

    def new(self) -> Tensor:
        """What a result is written to, filled with what it starts from, where that counts."""
        out: Tensor = self.empty()
        return out.fill_(self.start) if self.filled else out


#: Memory of a call, whose addresses come behind those of what it reads.
_OWN_MEMORY = (OUT, WORK, *_COPIES)


def _passed_to(launches: Iterable[BoundLaunch]) -> tuple[str, ...]:
    """Names of what launches read and do not hold."""
    names: dict[str, None] = {}
    for one in launches:
        pointers = (n for _, n, _ in one.pointers if n not in one.held and n not in _OWN_MEMORY)
        names |= dict.fromkeys((*pointers, *(name for _, name in one.passed)))
    return tuple(names)


def _placed(
    work: Iterable[tuple[Rooms, tuple[BoundLaunch, ...]]], numbers: Mapping[str, int]
) -> tuple[PlacedStep, ...]:
    """Steps that have something to launch."""
    found = []
    for rooms, launches in work:
        placed = tuple(one.placed(numbers) for one in launches if one.programs)
        if placed:
            found.append((tuple((numbers[name], make) for name, make in rooms), placed))
    return tuple(found)


def has_nothing(step: ProductLaunches, extents: Mapping[str, int], shape: tuple[int, ...]) -> bool:
    """Whether a product is over no values, or of no elements: others of the statement may do."""
    return not all(extents[v] for v in step.variables) or 0 in shape


def _bound(
    step: ProductLaunches, sizes: CallNumbers, dtype: torch.dtype, device: torch.device
) -> tuple[Rooms, tuple[BoundLaunch, ...]]:
    """Of a step what makes its workspaces, where it has some, and its launches."""
    if has_nothing(step, sizes.extents, sizes.shape):
        return (), ()
    launches = tuple(BoundLaunch(one, one.plan, sizes, dtype) for one in step.launches)
    if step.copies:
        return _copies(step.copies, sizes, device), launches
    if not step.workspace:
        return (), launches
    shape = tuple(sizes.expr((one,)) for one in step.workspace)
    held = WIDE[step.planned.plan.accumulator]
    return (((WORK, calls.maker(shape, held, device)),) if shape[0] else ()), launches


def _copies(copies: tuple[CopyRoom, ...], sizes: CallNumbers, device: torch.device) -> Rooms:
    """What makes memory for copies of factors."""
    return tuple(
        (one.name, calls.maker(tuple(sizes.expr((n,)) for n in one.shape), one.dtype, device))
        for one in copies
    )


def _bound_check(
    program: Program, sizes: CallNumbers, dtype: torch.dtype, *, filled: bool
) -> BoundLaunch:
    """The launch that looks at index values, and fills a new output where it is to be filled."""
    one = program.check
    assert one is not None
    points = [math.prod(sizes.extents[v] for v in variables(u.index)) for u in program.unchecked]
    count = math.prod(sizes.shape) if filled else 0
    numbers = {"most": max([count, *points]), "out_count": count}
    return BoundLaunch(one, one.plan, sizes, dtype, numbers)


def _needs_fill(step: ProductLaunches, sizes: CallNumbers) -> bool:
    """Whether a new result is filled with what it starts from before anything is launched."""
    planned = step.planned
    if not planned.fill:
        return False
    if planned.covers is not None:
        written, places = planned.covers
        return sizes.expr(written) != sizes.expr(places)
    if planned.written is not None:
        dim, count = planned.written
        return sizes.shape[dim] != count
    return True


def ready(
    program: Program,
    tensors: Mapping[str, Any],
    extents: Mapping[str, int],
    shape: tuple[int, ...],
    prologue: Prologue,
) -> Ready:
    """The program for one call; `NotYet` where numbers are still on their way."""
    made: dict[Recipe, Made] = {}
    busy = [step for step in program.steps if not has_nothing(step, extents, shape)]
    for recipe in dict.fromkeys(recipe for step in busy for recipe in step.recipes()):
        found = prologue.soon(recipe)
        if found is None:
            raise NotYet
        made[recipe] = found
    return Ready(program, CallNumbers(tensors, extents, shape, made))


# --- straight-line code for other sizes -----------------------------------------------------------


class Unseen:
    """A program for all sizes of its class, and for all index tensors of which the same is known:
    its recipes are straight-line code, run for each call. It holds nothing of any index tensor.

    Attributes:
        recipes: what is made of the index tensors of each call.
        arrays: by name, which array of which of them is passed.
        rooms: by the first launch of a product, copies of factors that it has.
    """

    __slots__ = (
        *("arrays", "buffer", "check", "device", "dtype", "filled", "index", "launches"),
        *("numbers", "program", "recipes", "rooms", "start", "written"),
    )

    def __init__(
        self,
        found: Ready,
        numbers: Numbers,
        recipes: tuple[Recipe, ...],
        arrays: Mapping[str, tuple[int, str]],
    ) -> None:
        self.program, self.check, self.numbers = found.program, found.check, numbers
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
            out = calls.empty(shape, self.buffer or self.dtype, self.device)
            if self.filled and not look and self.is_to_fill(shape):
                out.fill_(self.start)
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

    def is_to_fill(self, shape: tuple[int, ...]) -> bool:
        """Whether a pattern leaves places of a dimension out, where that is what decides."""
        return self.written is None or shape[self.written[0]] != self.written[1]


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
    return Unseen(found, writer.write(), recipes, arrays)


#: What is there only when a launch is started.
_MADE_LATER = (OUT, WORK, *_COPIES)


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
        found = f"return [{', '.join(self.results)}], [{', '.join(self.rooms)}]"
        body = "\n    ".join([*self.lines, found])
        names: dict[str, Any] = {}
        exec(f"def numbers(v, x, d, t, m):\n    {body}\n", names)
        numbers: Numbers = names["numbers"]
        return numbers


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
