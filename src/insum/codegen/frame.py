"""The frame of a kernel: program ids, tile axes, segment bounds and the one flat loop of the
contraction.

A kernel is written in stages: 0 before any loop, 1 inside the outer loop (variables that a
scattered dimension absorbs), 2 inside the contraction's loop, 3 after it. A statement goes to the
earliest stage in which everything it reads is known, so loop-invariant loads are hoisted by
construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from insum.codegen.arguments import (
    COUNT,
    CUT_ROW,
    END,
    ROW,
    START,
    Argument,
    Count,
    ExtentArgument,
    Pointer,
    Reciprocal,
)
from insum.codegen.ir import (
    Assignment,
    Eager,
    KernelLine,
    Literal,
    Named,
    Spread,
    Tile,
    TileAxes,
    TileLike,
    apply,
    as_tile,
    cdiv,
    chain,
    load,
    product,
    where,
)
from insum.codegen.kernel import Shape
from insum.codegen.passes import STEP
from insum.lang.expr import Access, variables
from insum.plan.config import Config
from insum.plan.plan import Plan
from insum.plan.sizes import power_of_two
from insum.plan.tiling import whole_entries

AFTER = 3
#: A variable of our own. Names that come from the statement always carry a suffix (_ptr, _s0, _d0,
#: _size, _reciprocal, _number, _i, _v1), which names of our own never have, so that no spelling of
#: a statement can collide with them.
REGISTERS = "<registers>"
#: What is counted by the grid, and unpacked from it: a name, and how many there are.
GridPart: TypeAlias = tuple[str, Tile]
PID = Named("pid")


#: Neighbouring places of which one is divided by the extents of variables: what a thread stores at
#: once.
GROUP = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Places that are walked as one, of several variables.

    Attributes:
        rests: of each variable, what it and those before it make: places of their own.
    """

    variables: tuple[str, ...]
    rests: tuple[Tile, ...]


@dataclass
class Frame:
    """State of one kernel being written, and the definitions of its variables."""

    plan: Plan
    config: Config
    shape: Shape
    prefetch: bool = True
    lazy: bool = True
    stages: dict[int, list[KernelLine]] = field(
        default_factory=lambda: {0: [], 1: [], 2: [], AFTER: []}
    )
    vars: dict[str, Tile] = field(default_factory=dict)
    masks: dict[str, Tile] = field(default_factory=dict)  # axis -> in range
    runs: list[Run] = field(default_factory=list)  # axes of several variables
    loaded: dict[tuple[Access, bool], Tile] = field(default_factory=dict)
    wrapped: dict[tuple[Tile, str, int], Tile] = field(default_factory=dict)
    point_masks: list[tuple[frozenset[str], Tile]] = field(default_factory=list)
    # by where a padded index is there, what else then holds
    implied: dict[Tile, set[Tile]] = field(default_factory=dict)
    least: Tile | None = None  # the least index that is one, by place of the K axis
    row_mask: Tile | None = None  # where a copy has rows, to the ends of loads
    arguments: dict[str, Argument] = field(default_factory=dict)
    counters: list[Tile] = field(default_factory=list)  # how often each loop runs, outermost first
    index_lines: list[Assignment] = field(default_factory=list)  # index loads of stage 2
    tail: list[KernelLine] = field(default_factory=list)  # after the outer loops
    frame_lines: int = 0  # how many lines of stage 2 define loop variables
    late: bool = False
    earliest: int = 0  # the stage before which no value is read
    deferred: list[Tile] | None = (
        None  # where a whole tile is not to be had, while operands are read
    )
    serial: int = 0

    # --- small tools ---

    def arg(self, argument: Argument) -> Named:
        self.arguments.setdefault(argument.name, argument)
        return Named(argument.name)

    def pointer(self, tensor: str) -> Named:
        return self.arg(Pointer(tensor))

    def put(self, stage: int, line: KernelLine) -> None:
        self.stages[AFTER if self.late and stage in (0, 1) else stage].append(line)

    def assign(self, stage: int, name: str, value: TileLike, symbol: str = "=") -> Named:
        """Give a value a name, from a stage on."""
        found = as_tile(value)
        self.put(stage, Assignment(name, found, symbol))
        return Named(name, found.axes, stage)

    def name(self, base: str) -> str:
        self.serial += 1
        return f"{base}_v{self.serial}"

    def define(self, base: str, value: Tile, stage: int | None = None) -> Tile:
        """Give a value a name of its own, as early as it is known, or from a ``stage`` on."""
        return self.assign(value.stage if stage is None else stage, self.name(base), value)

    @property
    def index_dtype(self) -> str:
        return "tl.int64" if self.plan.wide else "tl.int32"

    def widened(self, value: Tile) -> Tile:
        """Loop counters and tile positions are 32-bit unless offsets are not."""
        return apply("tl.cast", value, "tl.int64", over=value.axes) if self.plan.wide else value

    def size(self, var: str) -> Tile:
        """The extent of a variable; in units it is known to be a multiple of them, and so are masks
        that compare with it: a condition for loads of several values at once.
        """
        unit = self.unit(var)
        name = self.arg(ExtentArgument(var, unit))
        return name if unit == 1 else name * unit

    def unit(self, var: str) -> int:
        """What the extent of a variable is known to be a multiple of."""
        return dict(self.shape.units).get(var, 1)

    @property
    def eager(self) -> bool:
        """Whether every loop variable gets an axis of its own up front: only where a ``tl.dot``
        then has to reshape its operands.
        """
        plan = self.plan
        plain = (
            plan.onehot < 0
            and not plan.roles.outer
            and not plan.split
            and not (plan.segment and plan.segment.tiled)
        )
        return (
            not self.lazy
            and plan.roles.dot
            and plain
            and not (self.summed_axis("M") or self.summed_axis("N"))
        )

    def summed_axis(self, axis: str) -> bool:
        kept = {*variables(self.plan.target)}
        roles = self.plan.roles
        return not set(roles.m if axis == "M" else roles.n) & kept

    def arange(self, axis: str, length: int) -> Tile:
        """Numbers along one axis."""
        found = apply("tl.arange", 0, length, over=(axis,))
        return Spread(found, Eager((axis,)), 0) if self.eager else found

    def block(self, axes: TileAxes) -> Literal:
        """The shape of a tile."""
        return Literal(f"[{', '.join(str(self.tile(a)) for a in axes)}]")

    def zeros(self, axes: TileAxes) -> Tile:
        dtype = f"tl.{self.plan.accumulator}"
        return apply("tl.zeros", self.block(axes), over=axes, dtype=dtype)

    def tile_axes(self) -> TileAxes:
        roles = self.plan.roles
        return tuple(a for a, v in (("M", roles.m), ("K", roles.k), ("N", roles.n)) if v)

    def tile(self, axis: str) -> int:
        return {
            "M": self.config.m,
            "N": self.config.n,
            "K": self.config.k,
            "I": power_of_two(self.shape.onehot),
        }[axis]

    # --- the frame: program ids, axes, loops ---

    def begin(self) -> None:
        self.program_ids()
        self.axis("M", self.plan.roles.m, self.config.m, self.shape.even_m)
        self.axis("N", self.plan.roles.n, self.config.n, self.shape.even_n)
        self.segment_bounds()
        for var in self.plan.roles.outer:
            self.vars[var] = Named(f"{var}_i", (), 1)
        self.loops()
        self.frame_lines = len(self.stages[2])

    def program_id(self) -> Assignment:
        number = apply("tl.program_id", 0)
        return Assignment(PID.name, number.to("tl.int64") if self.plan.wide else number)

    def program_ids(self) -> None:
        """The one-dimensional grid, unpacked with the fastest part first."""
        plan, roles = self.plan, self.plan.roles
        if not self.shape.part:
            self.put(0, self.program_id())
        parts: list[GridPart] = []
        if roles.n:
            parts.append(("n_tile", cdiv(self.axis_size(roles.n), self.config.n)))
        if roles.m:
            parts.append(("m_tile", cdiv(self.m_count(), self.config.m)))
        row = [plan.segment.row] if plan.segment and not plan.segment.tiled else []
        parts = [*((f"{v}_i", self.size(v)) for v in row), *parts]
        parts += [
            (f"{v}_i", self.size(v))
            for v in reversed(roles.grid)
            if not plan.segment or v != plan.segment.row
        ]
        if self.shape.pieces:
            parts.append(("piece", self.arg(Count("piece_count"))))
        if self.config.group > 1 and len(parts) > 1:
            self.grouped(parts[0], parts[1], last=len(parts) == 2)
            parts = parts[2:]
        for position, (name, count) in enumerate(parts):
            last = position == len(parts) - 1
            self.assign(0, name, PID if last else PID % count)
            if not last:
                self.assign(0, PID.name, PID // count)
        for var in (*roles.grid, *row):
            self.vars[var] = Named(f"{var}_i")

    def grouped(self, fast: GridPart, slow: GridPart, *, last: bool) -> None:
        """The two fastest parts of the grid in groups: ``config.group`` places of the slower one
        before the next of the faster.
        """
        group = self.config.group
        fast_count = self.assign(0, "fast_count", fast[1])
        slow_count = self.assign(0, "slow_count", slow[1])
        place = self.assign(0, "place", PID if last else PID % (fast_count * slow_count))
        if not last:
            self.assign(0, PID.name, PID // (fast_count * slow_count))
        first = self.assign(0, "group_first", place // (fast_count * group) * group)
        size = self.assign(0, "group_size", apply("tl.minimum", slow_count - first, group))
        self.assign(0, "place", place % (fast_count * group))
        self.assign(0, slow[0], first + place % size)
        self.assign(0, fast[0], place // size)

    def m_count(self) -> Tile:
        if self.plan.segment is None or not self.plan.segment.tiled:
            return self.axis_size(self.plan.roles.m)
        last, first = self.arg(Count("task_last")), self.arg(Count("task_first"))
        return self.row_count(last - first)

    def row_count(self, tasks: Tile) -> Tile:
        return product([tasks, *(self.size(v) for v in self.plan.roles.m[1:])])

    def row_programs(self, tasks: Tile) -> Tile:
        """How many programs so many tasks take."""
        roles, config = self.plan.roles, self.config
        columns = [cdiv(self.axis_size(roles.n), config.n)] if roles.n else []
        grid = [self.size(v) for v in roles.grid]
        return product([cdiv(self.row_count(tasks), config.m), *columns, *grid])

    def axis_size(self, axis: tuple[str, ...]) -> Tile:
        return product([self.size(v) for v in axis])

    def axis(self, axis: str, variables_: tuple[str, ...], length: int, even: bool) -> None:
        if not variables_:
            return
        if axis == "M" and self.plan.segment and self.plan.segment.tiled:
            return self.row_axis()
        low = axis.lower()
        name = f"{variables_[0]}_i" if len(variables_) == 1 else f"{low}_flat"
        flat = self.assign(0, name, Named(f"{low}_tile") * length + self.arange(axis, length))
        if not even:
            self.masks[axis] = self.assign(0, f"{low}_ok", flat < self.axis_size(variables_))
        if len(variables_) == 1:
            self.vars[variables_[0]] = flat
            return
        first, *others = variables_
        rests: list[Tile] = [flat]
        if self.in_groups(others[-1], length):
            self.divided_in_groups(flat, others, rests)
        else:
            together = min(length, self.unit(others[-1]))
            for depth, var in enumerate(reversed(others)):
                name = f"{low}_rest{depth}"
                rests.append(self.divided(rests[-1], var, name, together, inner=depth == 0))
        self.vars[first] = self.assign(0, f"{first}_i", rests[-1])
        self.runs.append(Run(variables_, tuple(reversed(rests))))

    def in_groups(self, inner: str, length: int) -> bool:
        """Whether rows of places are so many times as long as a few neighbours."""
        even = self.unit(inner) % GROUP == 0 and length >= self.unit(inner)
        return even and self.plan.roles.flat and not self.plan.wide

    def divided_in_groups(self, flat: Tile, others: Sequence[str], rests: list[Tile]) -> None:
        """The variables of places, but for the first, and what is left behind each, where some
        neighbours are in one row: the first of them is divided for all.
        """
        # bits: of a division of signed numbers compilers do not see that neighbours share it
        place = self.assign(0, "n_first", self.told(flat & -GROUP, GROUP, inner=False))
        for depth, var in enumerate(reversed(others)):
            by = self.arg(Reciprocal(var))
            row = apply("insum_divided", place, by, GROUP, over=flat.axes)
            row = self.assign(0, f"n_rest{depth}", row)
            own = self.define(f"{var}_first", place - row * self.size(var), 0)
            if depth == 0:
                own = self.define(f"{var}_place", own + (flat & (GROUP - 1)).grouped(), 0)
            unit = self.unit(var) if depth == 0 else GROUP
            self.vars[var] = self.assign(0, f"{var}_i", self.told(own, unit, inner=depth == 0))
            rests.append(row)
            place = row

    def told(self, value: Tile, unit: int, *, inner: bool) -> Tile:
        """A value with what compilers do not see: so many neighbours are one row's."""
        for hint in ["tl.multiple_of", "tl.max_contiguous"] if inner else ["tl.max_constancy"]:
            value = apply(hint, value, unit, over=value.axes)
        return value

    def divided(
        self, place: Tile, var: str, name: str, together: int = 1, *, inner: bool = False
    ) -> Tile:
        """Places by the extent of a variable, and that variable, what remains. Dividing takes as
        long as a load where it is not known by what, which products of matrices hide, and have no
        registers to spare for. ``together``: so many neighbours are in one row of the ``inner``
        variable, which is told, for compilers see it of a division alone.
        """
        size, plan = self.size(var), self.plan
        if plan.wide or plan.roles.dot:
            self.vars[var] = self.assign(0, f"{var}_i", place % size)
            return self.assign(0, name, place // size)
        by = self.arg(Reciprocal(var))
        found = self.assign(0, name, apply("insum_divided", place, by, together, over=place.axes))
        rest: Tile = place - found * size
        if together > 1:
            rest = self.told(self.define(f"{var}_rest", rest, 0), together, inner=inner)
        self.vars[var] = self.assign(0, f"{var}_i", rest)
        return found

    def row_axis(self) -> None:
        """Several tasks (pieces of rows) in one tile: each has its start, end and destination."""
        segment = self.plan.segment
        assert segment is not None
        place = Named("m_tile") * self.config.m + apply("tl.arange", 0, self.config.m, over=("M",))
        for var in self.plan.roles.m[1:]:
            flat = self.assign(0, "m_flat", place)
            place = self.divided(flat, var, "task_place")
        first = self.arg(Count("task_first"))
        task = self.assign(0, "task", chain("+", first, place))
        last: Tile = self.arg(Count("task_last"))
        if self.shape.counted:
            last = apply("tl.minimum", last, load(self.pointer(COUNT)))
        inside = self.masks["M"] = self.assign(0, "m_ok", task < last)
        bounds = {
            name: self.assign(
                0, f"seg_{name}", self.widened(load(self.pointer(array) + task, inside, 0))
            )
            for name, array in (("start", START), ("end", END), ("row", ROW))
        }
        start, row = bounds["start"], bounds["row"]
        if self.plan.home is not None:  # of a row without entries nothing is computed
            self.assign(0, "seg_first", where(start < bounds["end"], start, 0))
        there = where(row >= 0, row, 0) if self.plan.split else row
        self.vars[segment.row] = self.assign(0, f"{segment.row}_i", there)
        if self.shape.waits:
            at = self.pointer(CUT_ROW) + (as_tile(-1) - row)
            self.assign(0, "cut_row", self.widened(load(at, row < 0, -2)))

    def segment_bounds(self) -> None:
        segment = self.plan.segment
        if segment and not segment.tiled:
            for name, array in (("start", START), ("end", END)):
                at = self.pointer(array) + Named(f"{segment.row}_i")
                self.assign(0, f"seg_{name}", self.widened(load(at)))

    @property
    def bounds(self) -> tuple[Named, Named]:
        """Where the segment, or that of each row of the tile, begins and ends."""
        axes = ("M",) if self.plan.segment and self.plan.segment.tiled else ()
        return Named("seg_start", axes), Named("seg_end", axes)

    # --- the contraction's loop: one flat counter over segment, looped variables and tiles of K ---

    def loops(self) -> None:
        roles, segment = self.plan.roles, self.plan.segment
        counts: list[tuple[Tile, Callable[[Tile], None]]] = []
        in_k = bool(segment and segment.var in roles.k)
        if segment and not in_k and segment.var not in roles.outer:
            start, end = self.bounds
            counts.append((end - start, self.scalar_segment))
        counts += [
            (self.size(v), self.scalar_loop(v))
            for v in roles.loops
            if not segment or v != segment.var
        ]
        if roles.k and counts and self.shape.k_tiles == 1:
            self.dense_k_axis()
        elif roles.k:
            # the counter of a loop is divided by it: cheap where it is a number of the code
            known = as_tile(self.shape.k_tiles) if counts and self.shape.k_tiles else None
            counts.append((self.k_count(in_k) if known is None else known, self.k_axis))
        self.unpack_counter(counts)

    def k_count(self, in_k: bool) -> Tile:
        if not in_k:
            return cdiv(self.size(self.plan.roles.k[0]), self.config.k)
        segment, (start, end) = self.plan.segment, self.bounds
        assert segment is not None
        if self.uneven:
            return cdiv(
                self.assign(0, "seg_length", (end - start) * self.shape.inner), self.config.k
            )
        length = apply("tl.max", end - start, 0, over=()) if segment.tiled else end - start
        return cdiv(length, self.slots) if self.slots > 1 else length

    @property
    def uneven(self) -> bool:
        """Whether tiles of K end inside of entries, because these fill no tile."""
        return not whole_entries(self.config.k, self.shape.inner)

    @property
    def slots(self) -> int:
        """Entries of the segment that one tile of K holds."""
        return max(1, self.config.k // self.shape.inner)

    def unpack_counter(self, counts: list[tuple[Tile, Callable[[Tile], None]]]) -> None:
        self.counters = [count for count, _ in counts]
        rest: Tile = STEP
        for position, (count, define) in reversed(list(enumerate(counts))):
            if position == 0:
                define(rest)
                continue
            held = self.assign(0, f"count{position}", count)
            counter = self.assign(2, f"counter{position}", rest % held)
            rest = self.assign(2, f"rest{position}", rest // held)
            define(counter)

    def scalar_segment(self, counter: Tile) -> None:
        segment = self.plan.segment
        assert segment is not None
        self.vars[segment.var] = self.assign(2, f"{segment.var}_i", self.bounds[0] + counter)

    def scalar_loop(self, var: str) -> Callable[[Tile], None]:
        def define(counter: Tile) -> None:
            self.vars[var] = self.assign(2, f"{var}_i", self.widened(counter))

        return define

    def k_axis(self, counter: Tile) -> None:
        roles, segment = self.plan.roles, self.plan.segment
        if segment and segment.var in roles.k:
            return self.segment_k_axis(counter)
        self.dense_k_axis(self.widened(counter) * self.config.k)

    def dense_k_axis(self, first: Tile | None = None) -> None:
        """The places of one tile of K. Where it holds all of K, and begins nowhere else than at the
        ``first``, it is the same in every step of what is looped over.
        """
        var, along, stage = self.plan.roles.k[0], self.arange("K", self.config.k), 0
        if first is not None:
            along, stage = first + along, 2
        place = self.vars[var] = self.assign(stage, f"{var}_i", along)
        if not self.shape.even_k:
            self.masks["K"] = self.assign(stage, "k_ok", place < self.size(var))

    def segment_k_axis(self, counter: Tile) -> None:
        """K runs over entries of the segment, each with ``inner`` values of the variable flattened
        under it.
        """
        roles, segment, length, inner = (
            self.plan.roles,
            self.plan.segment,
            self.config.k,
            self.shape.inner,
        )
        assert segment is not None
        if self.uneven:
            return self.uneven_k_axis(counter)
        slots, (start, end) = self.slots, self.bounds
        if len(roles.k) == 2:
            along = self.arange("K", length)
            value = self.assign(0, "k_inner", along % inner if slots > 1 else along)
            self.vars[roles.k[1]] = value
        if slots == 1 and not segment.tiled and len(roles.k) == 2:
            self.vars[segment.var] = self.assign(2, f"{segment.var}_i", start + counter)
            if inner < length:
                self.masks["K"] = self.assign(0, "k_ok", self.vars[roles.k[1]] < inner)
            return
        along = self.arange("K", length)
        slot = self.assign(0, "k_slot", along // inner if inner > 1 else along)
        base = start + counter * slots if slots > 1 else start + counter
        if not segment.tiled and slots * inner < length:
            end_of_tile: Tile = apply("tl.minimum", base + slots, end)
        else:
            end_of_tile = end
        place = self.vars[segment.var] = self.assign(2, f"{segment.var}_i", base + slot)
        self.masks["K"] = self.assign(2, "k_ok", place < end_of_tile)

    def uneven_k_axis(self, counter: Tile) -> None:
        """K runs through the values of all entries of the segment, one after the other."""
        segment, length, inner = self.plan.segment, self.config.k, self.shape.inner
        assert segment is not None
        along = self.widened(counter) * length + self.arange("K", length)
        flat = self.assign(2, "k_flat", along)
        entry = self.assign(2, f"{segment.var}_i", self.bounds[0] + flat // inner)
        self.vars[segment.var] = entry
        self.vars[self.plan.roles.k[1]] = self.assign(2, "k_inner", flat % inner)
        self.masks["K"] = self.assign(2, "k_ok", flat < Named("seg_length"))
