"""The frame of a kernel: program ids, tile axes, segment bounds and the one flat loop of the
contraction.

A kernel is written in stages: 0 before any loop, 1 inside the outer loop (variables that a
scattered dimension absorbs), 2 inside the contraction's loop, 3 after it. A line goes to the
earliest stage in which everything it reads is known, so loop-invariant loads are hoisted by
construction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

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
)
from insum.codegen.values import Eager, Val
from insum.lang.expr import Access, variables
from insum.plan.config import Config
from insum.plan.plan import Plan
from insum.plan.sizes import power_of_two
from insum.plan.tiling import whole_entries

AFTER = 3
#: A variable of our own. Names that come from the statement always carry a suffix (_ptr, _s0, _d0,
#: _size, _number, _i, _v1), which names of our own never have, so that no spelling of a statement
#: can collide with them.
REGISTERS = "<registers>"
#: Characters of a kernel's name, so that files and profilers can show it.
LONGEST_NAME = 72


@dataclass(frozen=True, slots=True)
class Shape:
    """What the text depends on besides plan and config: which axes divide evenly, and extents that
    became constants.
    """

    even_m: bool = False
    even_n: bool = False
    even_k: bool = False
    inner: int = 1  # extent of the inner variable of a flattened K axis
    onehot: int = 0  # places of the register tile for the dimension that is kept in registers
    k_tiles: int = 0  # how many tiles cover the K axis, where that is the same for every size
    single_k: bool = False  # the K axis is covered by one tile and nothing else is looped over
    pieces: bool = False  # a long reduction is cut into pieces, which meet in atomics
    apart: bool = False  # or rather go to a workspace, piece by piece
    counted: bool = False  # how many tasks there are is known on the device alone
    waits: bool = False  # pieces of a row are summed by the program of the last
    part: bool = False  # the kernel is a part of one, and given the number of its program
    units: tuple[tuple[str, int], ...] = ()  # extents that are passed in units


@dataclass(frozen=True, slots=True)
class Kernel:
    """Generated source, and the order in which arguments are passed."""

    name: str
    source: str
    arguments: tuple[Argument, ...]


def kernel_name(statement: str, suffix: str = "") -> str:
    """What profilers and error messages show of a kernel: its statement, in letters. Two
    underscores, which are always there, keep it apart from functions that kernels call.

    >>> kernel_name("C[AM[p],n] += AV[p] * B[AK[p],n]")
    'insum_C_AM_p_n__AV_p__B_AK_p_n'
    >>> kernel_name("y[r[e]] max= x[c[e]] - 1", "pieces")
    'insum_y_r_e_max__x_c_e__1__pieces'
    """
    parts = [re.sub(r"\W+", "_", part).strip("_") for part in re.split(r"[-+*/=<>]+", statement)]
    name = "__".join(parts)[: LONGEST_NAME - len("insum___") - len(suffix)].rstrip("_")
    return "__".join([f"insum_{name}", suffix] if suffix else [f"insum_{name}"])


@dataclass
class Frame:
    """State of one kernel being written, and the definitions of its variables."""

    plan: Plan
    config: Config
    shape: Shape
    prefetch: bool = True
    lazy: bool = True
    stages: dict[int, list[str]] = field(default_factory=lambda: {0: [], 1: [], 2: [], AFTER: []})
    vars: dict[str, Val] = field(default_factory=dict)
    masks: dict[str, Val] = field(default_factory=dict)  # axis -> in range
    loaded: dict[tuple[Access, bool], Val] = field(default_factory=dict)
    wrapped: dict[tuple[str, str, int], Val] = field(default_factory=dict)
    point_masks: list[tuple[frozenset[str], Val]] = field(default_factory=list)
    # by where a padded index is there, what else then holds
    implied: dict[str, set[str]] = field(default_factory=dict)
    least: str = ""  # the least index that is one, by place of the K axis
    arguments: dict[str, Argument] = field(default_factory=dict)
    counters: list[str] = field(default_factory=list)  # how often each loop runs, outermost first
    # stage-2 index loads: (name, line), to prefetch
    index_lines: list[tuple[str, str]] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)  # after the outer loops
    frame_lines: int = 0  # how many lines of stage 2 define loop variables
    late: bool = False
    earliest: int = 0  # the stage before which no value is read
    deferred: list[Val] | None = (
        None  # where a whole tile is not to be had, while operands are read
    )
    serial: int = 0

    # --- small tools ---

    def arg(self, argument: Argument) -> str:
        self.arguments.setdefault(argument.name, argument)
        return argument.name

    def parameter(self, name: str) -> str:
        """An argument as the signature has it: Triton passes floats in 32 bits unless it is told
        otherwise.
        """
        base = name.removesuffix("_number")
        double = (
            base in self.plan.numbers
            and self.plan.accumulator == "float64"
            and dict(self.plan.kinds)[base].startswith("float")
        )
        return f'{name}: "fp64"' if name != base and double else name

    def line(self, stage: int, text: str, axes: tuple[str, ...] | None = None) -> None:
        comment = f"  # ({','.join(axes)})" if axes else ""
        self.stages[AFTER if self.late and stage in (0, 1) else stage].append(text + comment)

    def name(self, base: str) -> str:
        self.serial += 1
        return f"{base}_v{self.serial}"

    def define(self, base: str, value: Val) -> Val:
        name = self.name(base)
        self.line(value.stage, f"{name} = {value.text}", value.axes)
        return Val(name, value.axes, value.stage)

    def cast_index(self, text: str) -> str:
        return f"({text}).to({'tl.int64' if self.plan.wide else 'tl.int32'})"

    def widened(self, text: str) -> str:
        """Loop counters and tile positions are 32-bit unless offsets are not."""
        return f"tl.cast({text}, tl.int64)" if self.plan.wide else text

    def size(self, var: str) -> str:
        """The extent of a variable; in units it is known to be a multiple of them, and so are masks
        that compare with it: a condition for loads of several values at once.
        """
        unit = dict(self.shape.units).get(var, 1)
        name = self.arg(ExtentArgument(var, unit))
        return name if unit == 1 else f"({name} * {unit})"

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

    def over(self, axis: str) -> tuple[str, ...]:
        """The axes of a value that runs along one axis."""
        return Eager((axis,)) if self.eager else (axis,)

    def arange(self, axis: str, tile: int) -> str:
        return f"tl.arange(0, {tile})" + (Eager.marks(axis) if self.eager else "")

    # --- the frame: program ids, axes, loops ---

    def begin(self) -> None:
        self.program_ids()
        self.axis("M", self.plan.roles.m, self.config.m, self.shape.even_m)
        self.axis("N", self.plan.roles.n, self.config.n, self.shape.even_n)
        self.segment_bounds()
        for var in self.plan.roles.outer:
            self.vars[var] = Val(f"{var}_i", (), 1)
        self.loops()
        self.frame_lines = len(self.stages[2])

    def program_id(self) -> str:
        return "pid = tl.program_id(0)" + (".to(tl.int64)" if self.plan.wide else "")

    def program_ids(self) -> None:
        """The one-dimensional grid, unpacked with the fastest part first."""
        plan, roles = self.plan, self.plan.roles
        if not self.shape.part:
            self.line(0, self.program_id())
        parts: list[tuple[str, str]] = []
        if roles.n:
            parts.append(("n_tile", f"tl.cdiv({self.axis_size(roles.n)}, {self.config.n})"))
        if roles.m:
            parts.append(("m_tile", f"tl.cdiv({self.m_count()}, {self.config.m})"))
        if plan.segment and not plan.segment.tiled:
            parts.insert(0, (f"{plan.segment.row}_i", self.size(plan.segment.row)))
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
            self.line(0, f"{name} = pid" if last else f"{name} = pid % {count}")
            if not last:
                self.line(0, f"pid = pid // {count}")
        for var in (
            *roles.grid,
            *([plan.segment.row] if plan.segment and not plan.segment.tiled else []),
        ):
            self.vars[var] = Val(f"{var}_i")

    def grouped(self, fast: tuple[str, str], slow: tuple[str, str], *, last: bool) -> None:
        """The two fastest parts of the grid in groups: ``config.group`` places of the slower one
        before the next of the faster.
        """
        (fast_name, fast_count), (slow_name, slow_count), group = fast, slow, self.config.group
        self.line(0, f"fast_count = {fast_count}")
        self.line(0, f"slow_count = {slow_count}")
        self.line(0, "place = pid" if last else "place = pid % (fast_count * slow_count)")
        if not last:
            self.line(0, "pid = pid // (fast_count * slow_count)")
        self.line(0, f"group_first = place // (fast_count * {group}) * {group}")
        self.line(0, f"group_size = tl.minimum(slow_count - group_first, {group})")
        self.line(0, f"place = place % (fast_count * {group})")
        self.line(0, f"{slow_name} = group_first + place % group_size")
        self.line(0, f"{fast_name} = place // group_size")

    def m_count(self) -> str:
        if self.plan.segment is None or not self.plan.segment.tiled:
            return self.axis_size(self.plan.roles.m)
        last, first = self.arg(Count("task_last")), self.arg(Count("task_first"))
        return self.row_count(f"({last} - {first})")

    def row_count(self, tasks: str) -> str:
        return " * ".join([tasks, *(self.size(v) for v in self.plan.roles.m[1:])])

    def row_programs(self, tasks: str) -> str:
        """How many programs so many tasks take."""
        roles, config = self.plan.roles, self.config
        columns = [f"tl.cdiv({self.axis_size(roles.n)}, {config.n})"] if roles.n else []
        grid = [self.size(v) for v in roles.grid]
        return " * ".join([f"tl.cdiv({self.row_count(tasks)}, {config.m})", *columns, *grid])

    def axis_size(self, axis: tuple[str, ...]) -> str:
        return (
            self.size(axis[0])
            if len(axis) == 1
            else "(" + " * ".join(self.size(v) for v in axis) + ")"
        )

    def axis(self, axis: str, variables_: tuple[str, ...], tile: int, even: bool) -> None:
        if not variables_:
            return
        if axis == "M" and self.plan.segment and self.plan.segment.tiled:
            return self.row_axis()
        low = axis.lower()
        flat = f"{variables_[0]}_i" if len(variables_) == 1 else f"{low}_flat"
        self.line(0, f"{flat} = {low}_tile * {tile} + {self.arange(axis, tile)}", (axis,))
        if not even:
            self.line(0, f"{low}_ok = {flat} < {self.axis_size(variables_)}", (axis,))
            self.masks[axis] = Val(f"{low}_ok", self.over(axis))
        if len(variables_) == 1:
            self.vars[variables_[0]] = Val(flat, self.over(axis))
            return
        rest = flat
        for depth, var in enumerate(reversed(variables_)):
            first = var == variables_[0]
            self.line(
                0, f"{var}_i = {rest}" if first else f"{var}_i = {rest} % {self.size(var)}", (axis,)
            )
            self.vars[var] = Val(f"{var}_i", self.over(axis))
            if not first:
                self.line(0, f"{low}_rest{depth} = {rest} // {self.size(var)}", (axis,))
                rest = f"{low}_rest{depth}"

    def row_axis(self) -> None:
        """Several tasks (pieces of rows) in one tile: each has its start, end and destination."""
        segment = self.plan.segment
        assert segment is not None
        place, beside = (
            f"m_tile * {self.config.m} + tl.arange(0, {self.config.m})",
            self.plan.roles.m[1:],
        )
        for var in beside:
            self.line(0, f"m_flat = {place}", ("M",))
            self.line(0, f"{var}_i = m_flat % {self.size(var)}", ("M",))
            self.vars[var] = Val(f"{var}_i", ("M",))
            place = f"m_flat // {self.size(var)}"
        self.line(0, f"task = {self.arg(Count('task_first'))} + {place}", ("M",))
        last = self.arg(Count("task_last"))
        if self.shape.counted:
            last = f"tl.minimum({last}, tl.load({self.arg(Pointer(COUNT))}))"
        self.line(0, f"m_ok = task < {last}", ("M",))
        for name, array in (("start", START), ("end", END), ("row", ROW)):
            loaded = f"tl.load({self.arg(Pointer(array))} + task, mask=m_ok, other=0)"
            self.line(0, f"seg_{name} = {self.widened(loaded)}", ("M",))
        self.masks["M"] = Val("m_ok", ("M",))
        if self.plan.home is not None:  # of a row without entries nothing is computed
            self.line(0, "seg_first = tl.where(seg_start < seg_end, seg_start, 0)", ("M",))
        self.line(
            0,
            f"{segment.row}_i = tl.where(seg_row >= 0, seg_row, 0)"
            if self.plan.split
            else f"{segment.row}_i = seg_row",
            ("M",),
        )
        self.vars[segment.row] = Val(f"{segment.row}_i", ("M",))
        if self.shape.waits:
            at = f"{self.arg(Pointer(CUT_ROW))} + (-1 - seg_row)"
            loaded = f"tl.load({at}, mask=seg_row < 0, other=-2)"
            self.line(0, f"cut_row = {self.widened(loaded)}", ("M",))

    def segment_bounds(self) -> None:
        segment = self.plan.segment
        if segment and not segment.tiled:
            for name, array in (("start", START), ("end", END)):
                loaded = f"tl.load({self.arg(Pointer(array))} + {segment.row}_i)"
                self.line(0, f"seg_{name} = {self.widened(loaded)}")

    # --- the contraction's loop: one flat counter over segment, looped variables and tiles of K ---

    def loops(self) -> None:
        roles, segment = self.plan.roles, self.plan.segment
        counts: list[tuple[str, Callable[[str], None]]] = []
        in_k = bool(segment and segment.var in roles.k)
        if segment and not in_k and segment.var not in roles.outer:
            counts.append(("seg_end - seg_start", self.scalar_segment))
        counts += [
            (self.size(v), self.scalar_loop(v))
            for v in roles.loops
            if not segment or v != segment.var
        ]
        if roles.k and counts and self.shape.k_tiles == 1:
            self.whole_k_axis()
        elif roles.k:
            # the counter of a loop is divided by it: cheap where it is a number of the code
            known = str(self.shape.k_tiles) if counts and self.shape.k_tiles else ""
            counts.append((known or self.k_count(in_k), self.k_axis))
        self.unpack_counter(counts)

    def k_count(self, in_k: bool) -> str:
        if not in_k:
            return f"tl.cdiv({self.size(self.plan.roles.k[0])}, {self.config.k})"
        segment = self.plan.segment
        assert segment is not None
        if self.uneven:
            self.line(0, f"seg_length = (seg_end - seg_start) * {self.shape.inner}")
            return f"tl.cdiv(seg_length, {self.config.k})"
        length = "tl.max(seg_end - seg_start, 0)" if segment.tiled else "seg_end - seg_start"
        return f"tl.cdiv({length}, {self.slots})" if self.slots > 1 else length

    @property
    def uneven(self) -> bool:
        """Whether tiles of K end inside of entries, because these fill no tile."""
        return not whole_entries(self.config.k, self.shape.inner)

    @property
    def slots(self) -> int:
        """Entries of the segment that one tile of K holds."""
        return max(1, self.config.k // self.shape.inner)

    def unpack_counter(self, counts: list[tuple[str, Callable[[str], None]]]) -> None:
        self.counters = [count for count, _ in counts]
        rest = "t"
        for position, (count, define) in reversed(list(enumerate(counts))):
            if position == 0:
                define(rest)
                continue
            self.line(0, f"count{position} = {count}")
            self.line(2, f"counter{position} = {rest} % count{position}")
            self.line(2, f"rest{position} = {rest} // count{position}")
            rest = f"rest{position}"
            define(f"counter{position}")

    def scalar_segment(self, counter: str) -> None:
        segment = self.plan.segment
        assert segment is not None
        self.line(2, f"{segment.var}_i = seg_start + {counter}")
        self.vars[segment.var] = Val(f"{segment.var}_i", (), 2)

    def scalar_loop(self, var: str) -> Callable[[str], None]:
        def define(counter: str) -> None:
            self.line(2, f"{var}_i = {self.widened(counter)}")
            self.vars[var] = Val(f"{var}_i", (), 2)

        return define

    def k_axis(self, counter: str) -> None:
        roles, segment = self.plan.roles, self.plan.segment
        if segment and segment.var in roles.k:
            return self.segment_k_axis(counter)
        var, tile = roles.k[0], self.config.k
        self.line(
            2, f"{var}_i = {self.widened(counter)} * {tile} + {self.arange('K', tile)}", ("K",)
        )
        self.vars[var] = Val(f"{var}_i", self.over("K"), 2)
        if not self.shape.even_k:
            self.line(2, f"k_ok = {var}_i < {self.size(var)}", ("K",))
            self.masks["K"] = Val("k_ok", self.over("K"), 2)

    def whole_k_axis(self) -> None:
        """One tile holds all of K: it is the same in every step of what is looped over."""
        var = self.plan.roles.k[0]
        self.line(0, f"{var}_i = {self.arange('K', self.config.k)}", ("K",))
        self.vars[var] = Val(f"{var}_i", self.over("K"))
        if not self.shape.even_k:
            self.line(0, f"k_ok = {var}_i < {self.size(var)}", ("K",))
            self.masks["K"] = Val("k_ok", self.over("K"))

    def segment_k_axis(self, counter: str) -> None:
        """K runs over entries of the segment, each with ``inner`` values of the variable flattened
        under it.
        """
        roles, segment, tile, inner = (
            self.plan.roles,
            self.plan.segment,
            self.config.k,
            self.shape.inner,
        )
        assert segment is not None
        if self.uneven:
            return self.uneven_k_axis(counter)
        slots = self.slots
        if len(roles.k) == 2:
            self.line(
                0,
                f"k_inner = {self.arange('K', tile)}" + (f" % {inner}" if slots > 1 else ""),
                ("K",),
            )
            self.vars[roles.k[1]] = Val("k_inner", self.over("K"))
        if slots == 1 and not segment.tiled and len(roles.k) == 2:
            self.line(2, f"{segment.var}_i = seg_start + {counter}")
            self.vars[segment.var] = Val(f"{segment.var}_i", (), 2)
            if inner < tile:
                self.line(0, f"k_ok = k_inner < {inner}", ("K",))
                self.masks["K"] = Val("k_ok", self.over("K"))
            return
        self.line(
            0, f"k_slot = {self.arange('K', tile)}" + (f" // {inner}" if inner > 1 else ""), ("K",)
        )
        base = f"seg_start + {counter} * {slots}" if slots > 1 else f"seg_start + {counter}"
        axes = ("M", "K") if segment.tiled else self.over("K")
        if segment.tiled:
            self.line(2, f"{segment.var}_i = ({base})[:, None] + k_slot[None, :]", axes)
            self.line(2, f"k_ok = {segment.var}_i < seg_end[:, None]", axes)
        else:
            end = f"tl.minimum({base} + {slots}, seg_end)" if slots * inner < tile else "seg_end"
            self.line(2, f"{segment.var}_i = {base} + k_slot", axes)
            self.line(2, f"k_ok = {segment.var}_i < {end}", axes)
        self.vars[segment.var] = Val(f"{segment.var}_i", axes, 2)
        self.masks["K"] = Val("k_ok", axes, 2)

    def uneven_k_axis(self, counter: str) -> None:
        """K runs through the values of all entries of the segment, one after the other."""
        segment, tile, inner = self.plan.segment, self.config.k, self.shape.inner
        assert segment is not None
        axes = self.over("K")
        self.line(2, f"k_flat = {self.widened(counter)} * {tile} + {self.arange('K', tile)}", axes)
        self.line(2, f"{segment.var}_i = seg_start + k_flat // {inner}", axes)
        self.line(2, f"k_inner = k_flat % {inner}", axes)
        self.line(2, "k_ok = k_flat < seg_length", axes)
        self.vars[segment.var] = Val(f"{segment.var}_i", axes, 2)
        self.vars[self.plan.roles.k[1]] = Val("k_inner", axes, 2)
        self.masks["K"] = Val("k_ok", axes, 2)

    def tile_axes(self) -> tuple[str, ...]:
        roles = self.plan.roles
        return tuple(a for a, v in (("M", roles.m), ("K", roles.k), ("N", roles.n)) if v)

    def tile(self, axis: str) -> int:
        return {
            "M": self.config.m,
            "N": self.config.n,
            "K": self.config.k,
            "I": power_of_two(self.shape.onehot),
        }[axis]
