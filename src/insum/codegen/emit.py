"""Plan + Config -> Triton source text.

A kernel is written in stages: 0 before any loop, 1 inside the outer loop (variables that a scattered dimension absorbs), 2
inside the contraction's loop, 3 after it. A line goes to the earliest stage in which everything it reads is known, so
loop-invariant loads are hoisted by construction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from insum.codegen.functions import PRELUDE, call
from insum.codegen.values import Val, combine, union
from insum.lang.expr import Access, Affine, Call, Expr, Number, Product, Sum, Var, accesses, variables
from insum.plan.config import Config, power_of_two
from insum.plan.plan import Plan

AFTER = 3
#: The output's name inside the emitter. Names that come from the statement always carry a suffix (_ptr, _s0, _size, _number, _i,
#: _v1), which names of our own never have, so that no spelling of a statement can collide with them.
OUTPUT = "<out>"
REGISTERS = "<registers>"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the text depends on besides plan and config: which axes divide evenly, and extents that became constants."""

    even_m: bool = False
    even_n: bool = False
    even_k: bool = False
    inner: int = 1  # extent of the inner variable of a flattened K axis
    onehot: int = 0  # extent of the dimension that is kept in registers
    single_k: bool = False  # the K axis is covered by one tile and nothing else is looped over
    pieces: bool = False  # a long reduction is cut into pieces that meet in atomics


@dataclass(frozen=True, slots=True)
class Kernel:
    """Generated source, and the order in which arguments are passed."""

    name: str
    source: str
    arguments: tuple[str, ...]


@dataclass
class Emitter:
    plan: Plan
    config: Config
    shape: Shape
    prefetch: bool = True
    stages: dict[int, list[str]] = field(default_factory=lambda: {0: [], 1: [], 2: [], AFTER: []})
    vars: dict[str, Val] = field(default_factory=dict)
    masks: dict[str, Val] = field(default_factory=dict)  # axis -> in range
    loaded: dict[tuple[Access, bool], Val] = field(default_factory=dict)
    point_masks: list[tuple[frozenset[str], Val]] = field(default_factory=list)
    arguments: dict[str, None] = field(default_factory=dict)
    counters: list[tuple[str, str]] = field(default_factory=list)  # (count, definition) of the loop, outermost first
    index_lines: list[tuple[str, str]] = field(default_factory=list)  # stage-2 index loads: (name, line), to prefetch
    late: bool = False
    serial: int = 0

    # --- small tools ---

    def arg(self, name: str) -> str:
        self.arguments.setdefault(name)
        return name

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
        return self.arg(f"{var}_size")

    # --- the frame: program ids, axes, loops ---

    def frame(self) -> None:
        self.program_ids()
        self.axis("M", self.plan.roles.m, self.config.m, self.shape.even_m)
        self.axis("N", self.plan.roles.n, self.config.n, self.shape.even_n)
        self.segment_bounds()
        for var in self.plan.roles.outer:
            self.vars[var] = Val(f"{var}_i", (), 1)
        self.loops()

    def program_ids(self) -> None:
        """The one-dimensional grid, unpacked with the fastest part first."""
        plan, roles = self.plan, self.plan.roles
        self.line(0, "pid = tl.program_id(0)" + (".to(tl.int64)" if plan.wide else ""))
        parts: list[tuple[str, str]] = []
        if roles.n:
            parts.append(("n_tile", f"tl.cdiv({self.axis_size(roles.n)}, {self.config.n})"))
        if roles.m:
            parts.append(("m_tile", f"tl.cdiv({self.m_count()}, {self.config.m})"))
        if plan.segment and not plan.segment.tiled:
            parts.insert(0, (f"{plan.segment.row}_i", self.size(plan.segment.row)))
        parts += [(f"{v}_i", self.size(v)) for v in reversed(roles.grid) if not plan.segment or v != plan.segment.row]
        if self.shape.pieces:
            parts.append(("piece", self.arg("piece_count")))
        for position, (name, count) in enumerate(parts):
            last = position == len(parts) - 1
            self.line(0, f"{name} = pid" if last else f"{name} = pid % {count}")
            if not last:
                self.line(0, f"pid = pid // {count}")
        for var in (*roles.grid, *([plan.segment.row] if plan.segment and not plan.segment.tiled else [])):
            self.vars[var] = Val(f"{var}_i")

    def m_count(self) -> str:
        tiled = self.plan.segment is not None and self.plan.segment.tiled
        return f"({self.arg('task_last')} - {self.arg('task_first')})" if tiled else self.axis_size(self.plan.roles.m)

    def axis_size(self, axis: tuple[str, ...]) -> str:
        return self.size(axis[0]) if len(axis) == 1 else "(" + " * ".join(self.size(v) for v in axis) + ")"

    def axis(self, axis: str, variables_: tuple[str, ...], tile: int, even: bool) -> None:
        if not variables_:
            return
        if axis == "M" and self.plan.segment and self.plan.segment.tiled:
            return self.row_axis()
        low = axis.lower()
        flat = f"{variables_[0]}_i" if len(variables_) == 1 else f"{low}_flat"
        self.line(0, f"{flat} = {low}_tile * {tile} + tl.arange(0, {tile})", (axis,))
        if not even:
            self.line(0, f"{low}_ok = {flat} < {self.axis_size(variables_)}", (axis,))
            self.masks[axis] = Val(f"{low}_ok", (axis,))
        if len(variables_) == 1:
            self.vars[variables_[0]] = Val(flat, (axis,))
            return
        rest = flat
        for depth, var in enumerate(reversed(variables_)):
            first = var == variables_[0]
            self.line(0, f"{var}_i = {rest}" if first else f"{var}_i = {rest} % {self.size(var)}", (axis,))
            self.vars[var] = Val(f"{var}_i", (axis,))
            if not first:
                self.line(0, f"{low}_rest{depth} = {rest} // {self.size(var)}", (axis,))
                rest = f"{low}_rest{depth}"

    def row_axis(self) -> None:
        """Several tasks (pieces of rows) in one tile: each has its own start, end and destination."""
        segment = self.plan.segment
        assert segment is not None
        self.line(0, f"task = {self.arg('task_first')} + m_tile * {self.config.m} + tl.arange(0, {self.config.m})", ("M",))
        self.line(0, f"m_ok = task < {self.arg('task_last')}", ("M",))
        for name in ("start", "end", "row"):
            self.line(0, f"seg_{name} = {self.widened(f'tl.load({self.arg(f_name(name))} + task, mask=m_ok, other=0)')}", ("M",))
        self.masks["M"] = Val("m_ok", ("M",))
        self.line(0, f"{segment.row}_i = tl.where(seg_row >= 0, seg_row, 0)" if self.plan.split else f"{segment.row}_i = seg_row", ("M",))
        self.vars[segment.row] = Val(f"{segment.row}_i", ("M",))

    def segment_bounds(self) -> None:
        segment = self.plan.segment
        if segment and not segment.tiled:
            for name in ("start", "end"):
                self.line(0, f"seg_{name} = {self.widened(f'tl.load({self.arg(f_name(name))} + {segment.row}_i)')}")

    # --- the contraction's loop: one flat counter over segment, looped variables and tiles of K ---

    def loops(self) -> None:
        roles, segment = self.plan.roles, self.plan.segment
        counts: list[tuple[str, str, Callable[[str], None]]] = []
        in_k = bool(segment and segment.var in roles.k)
        if segment and not in_k:
            counts.append(("seg", "seg_end - seg_start", self.scalar_segment))
        counts += [(v, self.size(v), self.scalar_loop(v)) for v in roles.loops if not segment or v != segment.var]
        if roles.k:
            counts.append(("k_tile", self.k_count(in_k), self.k_axis))
        self.unpack_counter(counts)

    def k_count(self, in_k: bool) -> str:
        if not in_k:
            return f"tl.cdiv({self.size(self.plan.roles.k[0])}, {self.config.k})"
        segment = self.plan.segment
        assert segment is not None
        length = "tl.max(seg_end - seg_start, 0)" if segment.tiled else "seg_end - seg_start"
        return f"tl.cdiv({length}, {self.slots})" if self.slots > 1 else length

    @property
    def slots(self) -> int:
        """Entries of the segment that one tile of K holds."""
        return max(1, self.config.k // self.shape.inner)

    def unpack_counter(self, counts: list[tuple[str, str, Callable[[str], None]]]) -> None:
        self.counters = [(name, count) for name, count, _ in counts]
        rest = "t"
        for position, (name, count, define) in reversed(list(enumerate(counts))):
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
        self.line(2, f"{var}_i = {self.widened(counter)} * {tile} + tl.arange(0, {tile})", ("K",))
        self.vars[var] = Val(f"{var}_i", ("K",), 2)
        if not self.shape.even_k:
            self.line(2, f"k_ok = {var}_i < {self.size(var)}", ("K",))
            self.masks["K"] = Val("k_ok", ("K",), 2)

    def segment_k_axis(self, counter: str) -> None:
        """K runs over entries of the segment, each with ``inner`` values of the variable flattened under it."""
        roles, segment, tile, inner = self.plan.roles, self.plan.segment, self.config.k, self.shape.inner
        assert segment is not None
        slots = self.slots
        if len(roles.k) == 2:
            self.line(0, f"k_inner = tl.arange(0, {tile})" + (f" % {inner}" if slots > 1 else ""), ("K",))
            self.vars[roles.k[1]] = Val("k_inner", ("K",))
        if slots == 1 and not segment.tiled and len(roles.k) == 2:
            self.line(2, f"{segment.var}_i = seg_start + {counter}")
            self.vars[segment.var] = Val(f"{segment.var}_i", (), 2)
            return
        self.line(0, f"k_slot = tl.arange(0, {tile})" + (f" // {inner}" if inner > 1 else ""), ("K",))
        base = f"seg_start + {counter} * {slots}" if slots > 1 else f"seg_start + {counter}"
        axes = ("M", "K") if segment.tiled else ("K",)
        if segment.tiled:
            self.line(2, f"{segment.var}_i = ({base})[:, None] + k_slot[None, :]", axes)
            self.line(2, f"k_ok = {segment.var}_i < seg_end[:, None]", axes)
        else:
            self.line(2, f"{segment.var}_i = {base} + k_slot", axes)
            self.line(2, f"k_ok = {segment.var}_i < seg_end", axes)
        self.vars[segment.var] = Val(f"{segment.var}_i", axes, 2)
        self.masks["K"] = Val("k_ok", axes, 2)

    # --- index expressions and loads ---

    def index(self, index: Affine) -> Val:
        parts = [self.scaled(c, self.atom(a)) for c, a in index.terms]
        if index.offset or not parts:
            parts.append(Val(str(index.offset)))
        return combine(parts, "+")

    def scaled(self, coefficient: int, value: Val) -> Val:
        return value if coefficient == 1 else combine([value, Val(str(coefficient))], "*")

    def atom(self, atom: Var | Access) -> Val:
        return self.vars[atom.name] if isinstance(atom, Var) else self.load(atom, as_index=True)

    def offset(self, access: Access) -> Val:
        """Offset in elements; parts over the same axes are added first, so that two-dimensional arithmetic is done once."""
        if not access.indices:
            return Val("0")
        by_axes: dict[tuple[str, ...], list[Val]] = {}
        for dim, index in enumerate(access.indices):
            stride = Val(self.arg(f"out_stride{dim}" if access.tensor == OUTPUT else f"{access.tensor}_s{dim}"))
            value = self.index(index)
            part = Val(f"{_times(value.text)} * {stride.text}", value.axes, value.stage)
            by_axes.setdefault(part.axes, []).append(part)
        return combine([combine(parts, "+") for parts in by_axes.values()], "+")

    def mask_of(self, access: Access, offset: Val) -> Val | None:
        masks = [m for axis, m in self.masks.items() if axis in offset.axes and set(m.axes) <= set(offset.axes)]
        if any(m.axes == ("M", "K") for m in masks):  # a row beyond the last has no entries
            masks = [m for m in masks if m.axes != ("M",)]
        depends = self.depends(access)
        for index in access.indices:
            masks += [m for vars_, m in self.point_masks if vars_ <= frozenset(variables(index)) and m not in masks]
        masks += [m for vars_, m in self.point_masks if vars_ <= depends and set(m.axes) <= set(offset.axes) and m not in masks]
        # An index load that is out of range itself yields padding, so the padding's mask covers its axes.
        covered = {axis for m in masks if m.text.endswith(">= 0)") for axis in m.axes}
        masks = [m for m in masks if m.text.endswith(">= 0)") or not set(m.axes) <= covered]
        return combine(_distinct(masks), "&") if masks else None

    def depends(self, access: Access) -> frozenset[str]:
        return frozenset(variables(access))

    def load(self, access: Access, *, as_index: bool = False) -> Val:
        key = (access, as_index)
        if access.tensor in self.plan.numbers:
            return Val(f"tl.cast({self.arg(f'{access.tensor}_number')}, tl.{'int64' if self.plan.wide else 'int32'})")
        if key in self.loaded:
            return self.loaded[key]
        offset = self.offset(access)
        mask = self.mask_of(access, offset)
        pointer = f"{self.arg(f'{access.tensor}_ptr')} + {offset.text}" if access.indices else self.arg(f"{access.tensor}_ptr")
        other = "-1" if as_index and access.tensor in self.plan.padded else "0"
        text = f"tl.load({pointer}" + (f", mask={mask.over(offset.axes)}, other={other})" if mask else ")")
        stage = max(offset.stage, mask.stage if mask else 0)
        value = self.define_load(access, Val(self.cast_index(text) if as_index else text, offset.axes, stage), as_index)
        self.loaded[key] = value
        if as_index and access.tensor in self.plan.padded:
            self.point_masks.append((self.depends(access), Val(f"({value.text} >= 0)", value.axes, value.stage)))
        return value

    def define_load(self, access: Access, value: Val, as_index: bool) -> Val:
        name = self.name(access.tensor)
        line = f"{name} = {value.text}"
        if as_index and value.stage == 2 and not self.late:
            self.index_lines.append((name, line + (f"  # ({','.join(value.axes)})" if value.axes else "")))
        else:
            self.line(value.stage, line, value.axes)
        return Val(name, value.axes, value.stage)

    # --- expressions ---

    def evaluate(self, expr: Expr, dtype: str) -> Val:
        match expr:
            case Number(value):
                return Val(repr(value) if math.isfinite(value) else f'float("{value}")')
            case Access(tensor, ()) if tensor in self.plan.numbers:
                return Val(self.arg(f"{tensor}_number"))
            case Access():
                loaded = self.load(expr)
                return loaded if dict(self.plan.kinds)[expr.tensor] == dtype else Val(f"{loaded.text}.to(tl.{dtype})", loaded.axes, loaded.stage)
            case Call(function, args):
                values = [self.argument(a, dtype) for a in args]
                axes = union(*(v.axes for v in values))
                return Val(call(function, [v.over(axes) for v in values], dtype), axes, max(v.stage for v in values))
            case Product(factors):
                return combine([self.evaluate(f, dtype) for f in factors], "*")
            case Sum(terms):
                return Val(f"({(total := combine([self.evaluate(t, dtype) for t in terms], '+')).text})", total.axes, total.stage)

    def argument(self, expr: Expr, dtype: str) -> Val:
        """An argument of a function; numbers alone have no dtype yet, and functions want one."""
        value = self.evaluate(expr, dtype)
        typed = any(a.tensor not in self.plan.numbers for a in accesses(expr, nested=False))
        return value if typed else Val(f"tl.full([], {value.text}, tl.{dtype})", value.axes, value.stage)

    def prepare_masks(self) -> None:
        """Load every padded index tensor first, so that all other loads know the points that are absent."""
        for factor in (*self.plan.factors, self.plan.target):
            for access in accesses(factor):
                for index in access.indices:
                    for _, atom in index.terms:
                        if isinstance(atom, Access) and any(a.tensor in self.plan.padded for a in accesses(atom)):
                            self.load(atom, as_index=True)

    # --- the body ---

    def kernel(self, name: str) -> Kernel:
        self.frame()
        self.prepare_masks()
        total = self.contract()
        self.late = True
        self.finish(total)
        return Kernel(name, self.write(name), tuple(self.arguments))

    def contract(self) -> Val:
        return self.dot() if self.plan.roles.dot else self.multiply_and_sum()

    def dot(self) -> Val:
        plan, config = self.plan, self.config
        left = self.operand(plan.roles.left, ("M", "K"), (config.m, config.k))
        right = self.operand(plan.roles.right, ("K", "N"), (config.k, config.n))
        precision = f", input_precision={plan.precision!r}" if plan.precision else ""
        self.line(1 if plan.roles.outer else 0, f"acc = tl.zeros([{config.m}, {config.n}], dtype=tl.{plan.accumulator})", ("M", "N"))
        self.line(2, f"acc = tl.dot({left}, {right}, acc{precision})", ("M", "N"))
        return Val("acc", ("M", "N"), AFTER)

    def operand(self, factors: tuple[int, ...], axes: tuple[str, ...], tile: tuple[int, ...]) -> str:
        plan = self.plan
        if len(factors) == 1 and isinstance(plan.factors[factors[0]], Access):
            value = self.evaluate(plan.factors[factors[0]], plan.operand)
        else:
            wide = combine([self.evaluate(plan.factors[f], plan.accumulator) for f in factors], "*")
            value = wide if plan.operand == plan.accumulator else Val(f"({wide.text}).to(tl.{plan.operand})", wide.axes, wide.stage)
        if value.axes == axes:
            return value.text
        return f"tl.broadcast_to({value.over(axes)}, [{tile[0]}, {tile[1]}])"

    def multiply_and_sum(self) -> Val:
        plan = self.plan
        value = combine([self.evaluate(f, plan.accumulator) for f in plan.factors], "*")
        axes = self.tile_axes()
        if plan.pointwise or not self.zero_where_absent():
            value = self.masked(value)
        kept = tuple(a for a in axes if a != "K")
        identity = _IDENTITY[plan.reduce](plan.accumulator)
        where = 1 if plan.roles.outer else 0
        if not self.counters:
            full = self.define("value", value)
            return self.full(full, kept)
        in_loop = bool(plan.segment) or "K" not in axes
        over = kept if in_loop else axes
        tile = ", ".join(str(self.tile(a)) for a in over)
        start = f"tl.full([{tile}], {identity}, dtype=tl.{plan.accumulator})"
        self.line(where, f"acc = {start}" if over else f"acc = tl.sum(tl.full([1], {identity}, dtype=tl.{plan.accumulator}), axis=0)" if identity == "0" else f"acc = tl.max(tl.full([1], {identity}, dtype=tl.{plan.accumulator}), axis=0)", over)
        step = self.full(value, axes) if "K" in axes and in_loop and "K" not in value.axes else value
        text = step.over(axes) if in_loop and "K" in axes else step.over(over)
        if in_loop and "K" in axes:
            text = f"tl.{plan.reduce}({text}, axis={axes.index('K')})"
        self.line(2, f"acc = {_MERGE[plan.reduce].format('acc', text)}", over)
        if in_loop:
            return Val("acc", kept, AFTER)
        self.line(AFTER, f"acc = tl.{plan.reduce}(acc, axis={axes.index('K')})", kept)
        return Val("acc", kept, AFTER)

    def tile_axes(self) -> tuple[str, ...]:
        roles = self.plan.roles
        return tuple(a for a, v in (("M", roles.m), ("K", roles.k), ("N", roles.n)) if v)

    def tile(self, axis: str) -> int:
        return {"M": self.config.m, "N": self.config.n, "K": self.config.k, "I": power_of_two(self.shape.onehot)}[axis]

    def full(self, value: Val, axes: tuple[str, ...]) -> Val:
        """The value as a full tile over ``axes``."""
        if value.axes == axes:
            return value
        tile = ", ".join(str(self.tile(a)) for a in axes)
        if not value.axes and not axes:
            return value
        # Adding zeros, not tl.broadcast_to: the interpreter's atomics take a broadcast view for a full tile.
        return Val(f"tl.zeros([{tile}], dtype=tl.{self.plan.accumulator}) + {value.over(axes)}", axes, value.stage)

    def zero_where_absent(self) -> bool:
        """Whether masked loads alone make every absent point zero: each factor is masked there, so that none can be infinite."""
        reads = [f for f in self.plan.factors if isinstance(f, Access) and f.tensor not in self.plan.numbers]
        spans = [set(self.loaded[(f, False)].axes) for f in reads]
        depends = [self.depends(f) for f in reads]
        tail = "K" not in self.masks or bool(reads) and all("K" in s for s in spans)
        return tail and all(bool(reads) and all(vars_ <= d for d in depends) for vars_, _ in self.point_masks)

    def masked(self, value: Val) -> Val:
        """Absent and out-of-range points become the reduction's identity, whatever the functions made of them."""
        masks = [m for axis, m in self.masks.items() if axis in self.tile_axes() and (axis == "K" or self.summed_axis(axis))]
        masks += [m for _, m in self.point_masks]
        if not masks:
            return value
        mask = combine(_distinct(masks), "&")
        axes = union(value.axes, mask.axes)
        identity = _IDENTITY[self.plan.reduce](self.plan.accumulator)
        return Val(f"tl.where({mask.over(axes)}, {value.over(axes)}, {identity})", axes, max(value.stage, mask.stage))

    def summed_axis(self, axis: str) -> bool:
        kept = {*variables(self.plan.target)}
        roles = self.plan.roles
        return not set(roles.m if axis == "M" else roles.n) & kept

    # --- after the contraction ---

    def finish(self, total: Val) -> None:
        plan = self.plan
        value = total
        if plan.roles.dot:
            post = [self.evaluate(plan.factors[f], plan.accumulator) for f in plan.roles.post]
            if post:
                value = self.define("scaled", Val(combine([total, *post], "*").text, union(total.axes, *(p.axes for p in post)), AFTER))
        value = self.sum_unkept(value)
        if plan.onehot >= 0:
            return self.finish_onehot(value)
        if plan.roles.outer:
            return self.finish_outer(value)
        self.store(value)

    def finish_outer(self, value: Val) -> None:
        """Variables looped over outside the contraction: add up what each iteration gives, store once after the loops."""
        tile = ", ".join(str(self.tile(a)) for a in value.axes)
        zero = f"tl.zeros([{tile}], dtype=tl.{self.plan.accumulator})" if tile else f"tl.sum(tl.zeros([1], dtype=tl.{self.plan.accumulator}), axis=0)"
        self.stages[0].append(f"total = {zero}" + (f"  # ({','.join(value.axes)})" if value.axes else ""))
        self.stages[AFTER].append(f"total += {value.text}")
        lines, self.stages[AFTER] = self.stages[AFTER], []
        self.store(Val("total", value.axes))
        self.tail, self.stages[AFTER] = self.stages[AFTER], lines

    def sum_unkept(self, value: Val) -> Val:
        for axis in ("M", "N"):
            if axis in value.axes and self.summed_axis(axis):
                axes = tuple(a for a in value.axes if a != axis)
                value = self.define("sum", Val(f"tl.{self.plan.reduce}({value.text}, axis={value.axes.index(axis)})", axes, AFTER))
        return value

    def finish_onehot(self, value: Val) -> None:
        """Add the contraction's tile into the rows of the register tile that its index names."""
        plan = self.plan
        index = self.index(plan.target.indices[plan.onehot])
        wide = self.tile("I")
        scattered = next((a for a in ("M", "N") if a in index.axes), "")
        other = tuple(a for a in value.axes if a not in ("I", scattered))
        axes = _register_axes(scattered, other)
        tile = ", ".join(str(self.tile(a)) for a in axes)
        self.stages[0].append(f"i_reg = tl.arange(0, {wide})  # (I)")
        self.stages[0].append(f"total = tl.zeros([{tile}], dtype=tl.{plan.accumulator})  # ({','.join(axes)})")
        if scattered:
            value = self.full(value, union((scattered, *other)))
        if not value.text.isidentifier():
            value = self.define("tile", value)
        self.stages[AFTER].append(self.onehot_line(value, index, scattered, axes))
        self.store_registers(axes)

    def onehot_line(self, value: Val, index: Val, scattered: str, axes: tuple[str, ...]) -> str:
        plan = self.plan
        masks = " & ".join(f"({m.text})" if m.text.startswith("(") else m.text for m in ([self.masks[scattered]] if scattered in self.masks else []))
        if not scattered:
            hit = Val(f"(i_reg == {index.text})", ("I",))
            return f"total += tl.where({hit.over(axes)}, {value.over(axes)}, 0)  # ({','.join(axes)})"
        first = axes[0] == "I"
        pick = f"(i_reg[:, None] == {index.text}[None, :])" if first else f"({index.text}[:, None] == i_reg[None, :])"
        if masks:
            pick += f" & {masks}[None, :]" if first else f" & {masks}[:, None]"
        sizes = [self.tile("I"), self.tile(scattered), *(self.tile(a) for a in axes if a != "I")]
        if len(axes) == 2 and min(sizes) >= 16 and plan.accumulator == "float32":
            hot = f"tl.where({pick}, 1.0, 0.0)"
            precision = ", input_precision=" + repr(plan.precision or "tf32x3")
            pair = f"{hot}, {value.text}" if first else f"{value.text}, {hot}"
            return f"total = tl.dot({pair}, total{precision})  # ({','.join(axes)})"
        if len(axes) == 1:
            return f"total += tl.sum(tl.where({pick}, {value.text}[{'None, :' if first else ':, None'}], 0), axis={1 if first else 0})  # ({','.join(axes)})"
        if first:
            return f"total += tl.sum(tl.where(({pick})[:, :, None], {value.text}[None, :, :], 0), axis=1)  # ({','.join(axes)})"
        return f"total += tl.sum(tl.where(({pick})[None, :, :], {value.text}[:, :, None], 0), axis=1)  # ({','.join(axes)})"

    def store_registers(self, axes: tuple[str, ...]) -> None:
        dim = self.plan.onehot
        target = self.plan.target
        saved = self.vars
        self.vars = {**self.vars, REGISTERS: Val("i_reg", ("I",))}
        index = Affine(((1, Var(REGISTERS)),))
        indices = tuple(index if d == dim else i for d, i in enumerate(target.indices))
        lines, self.stages[AFTER] = self.stages[AFTER], []
        self.emit_store(Access(target.tensor, indices), Val("total", axes), extra=[Val(f"(i_reg < {self.shape.onehot})", ("I",))] if self.shape.onehot != self.tile("I") else [], order=axes)
        self.tail = self.stages[AFTER]
        self.stages[AFTER], self.vars = lines, saved

    tail: list[str] = field(default_factory=list)

    def store(self, value: Val) -> None:
        plan = self.plan
        if plan.split:
            self.store_pieces(value)
        self.emit_store(plan.target, value, extra=[Val("(seg_row >= 0)", ("M",))] if plan.split else [])

    def store_pieces(self, value: Val) -> None:
        """A piece of a long row goes to its slot of the workspace, rows of a dense table over the other kept variables."""
        others = [v for v in variables(self.plan.target) if self.plan.segment and v != self.plan.segment.row]
        offset: Val = Val("(-1 - seg_row)" + (".to(tl.int64)" if self.plan.wide else ""), ("M",), 0)
        for var in others:
            offset = combine([Val(f"({offset.text}) * {self.size(var)}", offset.axes), self.vars[var]], "+")
        masks = [Val("(seg_row < 0)", ("M",)), *(m for a, m in self.masks.items() if a in offset.axes)]
        value = self.full(value, offset.axes)
        self.line(AFTER, f"tl.store({self.arg('work_at')} + {offset.text}, {value.text}, mask={combine(masks, '&').over(offset.axes)})", offset.axes)

    def emit_store(self, target: Access, value: Val, extra: list[Val] | None = None, order: tuple[str, ...] = ()) -> None:
        plan = self.plan
        offset = self.offset(Access(OUTPUT, target.indices))
        axes = order or union(offset.axes, value.axes)
        value = self.full(value, axes)
        masks = [m for a, m in self.masks.items() if a in axes and a != "K"] + (extra or [])
        masks += [Val(f"({value.text} >= 0)", value.axes, value.stage) for value in self.padded_indices(target)]
        mask = combine(_distinct(masks), "&") if masks else None
        pointer = f"{self.arg('out_at')} + {offset.over(axes)}"
        masked = f", mask={mask.over(axes)}" if mask else ""
        text = value.text
        if plan.strategy == "atomic" or self.shape.pieces:
            operation = {"sum": "add", "max": "max", "min": "min"}[plan.reduce]
            self.line(AFTER, f'tl.atomic_{operation}({pointer}, {text}{masked}, sem="relaxed")', axes)
            return
        if plan.accumulate:
            old = f"tl.load({pointer}{masked}" + (", other=0)" if masked else ")") + f".to(tl.{plan.accumulator})"
            text = _MERGE[plan.reduce].format(old, text)
        self.line(AFTER, f"tl.store({pointer}, ({text}).to({self.arg('out_at')}.dtype.element_ty){masked})", axes)

    def padded_indices(self, target: Access) -> list[Val]:
        """Index values of the target that may be padding: such a point writes nothing."""
        inner = [a for i in target.indices for a in accesses(i) if a.tensor in self.plan.padded]
        return [self.loaded[(a, True)] for a in inner if (a, True) in self.loaded]

    # --- putting the text together ---

    def write(self, name: str) -> str:
        body = list(self.stages[0])
        inner: list[str] = []
        depth = 0
        for var in self.plan.roles.outer:
            body.append("    " * depth + f"for {var}_i in range({self.size(var)}):")
            depth += 1
        inner += self.stages[1] + self.loop_text() + self.stages[AFTER]
        body += ["    " * depth + line for line in inner] + self.tail
        arguments = ", ".join(self.arguments)
        signature = f"def {name}({arguments}):"
        if len(signature) > 140:
            signature = f"def {name}(\n    " + ",\n    ".join(_wrapped(list(self.arguments))) + ",\n):"
        prelude = [line for key, line in PRELUDE.items() if any(key in text for text in body)]
        return "\n".join([*prelude, "@triton.jit", signature, *("    " + line if line else "" for line in body)]) + "\n"

    def loop_text(self) -> list[str]:
        indices = [line for _, line in self.index_lines]
        if not self.counters:
            return indices + self.stages[2]
        count = " * ".join(f"({c})" if len(self.counters) > 1 and position == 0 else (c if len(self.counters) == 1 else f"count{position}") for position, (_, c) in enumerate(self.counters))
        first, last = "0", count
        lines: list[str] = []
        if self.shape.pieces:
            lines += [f"t_count = {count}", f"t_step = tl.cdiv(t_count, {self.arg('piece_count')})"]
            first, last = "piece * t_step", "tl.minimum(piece * t_step + t_step, t_count)"
        if self.shape.single_k and not self.shape.pieces:
            return ["t = 0", *self.ordered(indices)]
        if not (self.prefetch and indices):
            return [*lines, f"for t in range({first}, {last}):", *("    " + line for line in self.ordered(indices))]
        return [*lines, *self.prefetched(first, last)]

    def ordered(self, indices: list[str]) -> list[str]:
        """Loop-variable definitions, then index loads, then the rest (loads of data and arithmetic)."""
        split = self.frame_lines
        return [*self.stages[2][:split], *indices, *self.stages[2][split:]]

    frame_lines: int = 0

    def prefetched(self, first: str, last: str) -> list[str]:
        """Index loads run one iteration ahead of the data they address, so that the pipeline buffers data, not indices."""
        frame, rest = self.stages[2][: self.frame_lines], self.stages[2][self.frame_lines :]
        ahead = [*frame, *(line for _, line in self.index_lines)]
        needed = _needed(ahead, {name for name, _ in self.index_lines})
        defined = {line.split(" = ")[0] for line in needed}
        lines = [f"t_first = {first}", f"t_last = {last}"]
        lines += self.ahead(needed, defined, "t_first")
        lines.append("for t in range(t_first, t_last):")
        lines += ["    " + line for line in frame]
        lines += [f"    {name} = {name}_next" for name, _ in self.index_lines]
        lines += ["    " + line for line in rest]
        lines += ["    " + line for line in self.ahead(needed, defined, "(t + 1)")]
        return lines

    def ahead(self, lines: list[str], defined: set[str], at: str) -> list[str]:
        """The index loads of iteration ``at``; beyond the last iteration nothing may be read, so the loop's bound joins the mask."""
        names = {name for name, _ in self.index_lines}
        bound = f"{at.strip('()')} < t_last"
        return [_with_bound(_renamed(line, defined, at), bound) if line.split(" = ")[0] in names else _renamed(line, defined, at) for line in lines]


_IDENTITY: dict[str, Callable[[str], str]] = {
    "sum": lambda dtype: "0",
    "max": lambda dtype: 'float("-inf")' if "float" in dtype else "-9223372036854775808" if dtype == "int64" else "-2147483648",
    "min": lambda dtype: 'float("inf")' if "float" in dtype else "9223372036854775807" if dtype == "int64" else "2147483647",
}
_MERGE = {"sum": "{0} + {1}", "max": "tl.maximum({0}, {1})", "min": "tl.minimum({0}, {1})"}


def f_name(name: str) -> str:
    return f"seg_{name}_at"


def _times(text: str) -> str:
    return text if re.fullmatch(r"\w+", text) else f"({text})"


def _distinct(values: list[Val]) -> list[Val]:
    return list({v.text: v for v in values}.values())


def _register_axes(scattered: str, other: tuple[str, ...]) -> tuple[str, ...]:
    """Order of the register tile: (I, N) when M is scattered, (M, I) when N is; no transposition either way."""
    return union((*other, "I"))


def _wrapped(arguments: list[str], width: int = 120) -> list[str]:
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


def _renamed(line: str, defined: set[str], at: str) -> str:
    def change(found: re.Match[str]) -> str:
        word = found.group()
        return f"{word}_next" if word in defined else at if word == "t" else word

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


def emit(plan: Plan, config: Config, shape: Shape, *, prefetch: bool = True, name: str = "insum_kernel") -> Kernel:
    """Source text of the kernel for a plan: readable, with the block shape of every tile beside its line."""
    emitter = _FramedEmitter(plan, config, shape, prefetch)
    return emitter.kernel(name)


class _FramedEmitter(Emitter):
    """Remembers where the definitions of loop variables end, so that index loads come right behind them."""

    def frame(self) -> None:
        super().frame()
        self.frame_lines = len(self.stages[2])
