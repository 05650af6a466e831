"""Reading: index expressions, offsets, masks and loads, each value with the tile axes it spans."""

from __future__ import annotations

import functools
import math

import torch

from insum.codegen.arguments import Count, Length, Passed, Stride
from insum.codegen.frame import GROUP, Frame, Run
from insum.codegen.functions import COMPARED, called
from insum.codegen.ir import (
    Assignment,
    Literal,
    Named,
    Operation,
    Tile,
    TileAxes,
    apply,
    as_tile,
    cdiv,
    chain,
    combine,
    distinct,
    load,
    narrow_first,
    operation,
    union,
    where,
)
from insum.lang.expr import (
    FUNCTIONS,
    Access,
    Affine,
    Call,
    Expr,
    Number,
    Product,
    Sum,
    Var,
    accesses,
    product,
    variables,
)
from insum.lang.types import Typed, accumulator, call_type, deciding, infer, is_rounded
from insum.plan.draft import TRITON
from insum.plan.fitting import FITTED_ROW, FITTED_ROWS
from insum.plan.sizes import ALIGNED, ALSO_ALIGNED, FITTED, OUT, WIDE_LOAD
from insum.plan.tiling import BYTES


class Reads:
    """Turns index expressions and right-side expressions into lines of the kernel."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.plan = frame, frame.plan
        self.parts: dict[tuple[str, ...], Tile] = {}
        self.at_first = False  # whether what is read is read at the first entry of a row

    def index(self, index: Affine) -> Tile:
        parts = [self.scaled(c, self.atom(a)) for c, a in index.terms]
        if index.offset or not parts:
            parts.append(as_tile(index.offset))
        return combine(parts, "+")

    def scaled(self, coefficient: int, value: Tile) -> Tile:
        return value if coefficient == 1 else combine([value, as_tile(coefficient)], "*")

    def atom(self, atom: Var | Access) -> Tile:
        return (
            self.frame.vars[atom.name] if isinstance(atom, Var) else self.load(atom, as_index=True)
        )

    def offset(self, access: Access, of: str = "") -> Tile:
        """Offset in elements; parts over the same axes are added first, so that two-dimensional
        arithmetic is done once. ``of``: another tensor that is read at the same places, but for
        those along which it repeats itself.
        """
        by_axes: dict[TileAxes, list[Tile]] = {}
        together, passed = self.walked_together(access, of or access.tensor), 0
        for dim, unit in enumerate(self.units(of or access.tensor)):
            if of and unit == 0 or dim < passed:
                continue
            value, passed = together.get(dim) or (self.place(access, dim), dim + 1)
            last = passed - 1
            unit = self.units(of or access.tensor)[last]
            if unit != 1:
                value = value * self.stride(of or access.tensor, last, unit)
            by_axes.setdefault(value.axes, []).append(value)
        if not by_axes:
            return as_tile(0)
        found = combine([combine(parts, "+") for parts in by_axes.values()], "+")
        # one by one each would be added to a pointer, which takes several times as long
        return found.grouped() if self.plan.roles.flat and len(by_axes) == 1 else found

    def walked_together(self, access: Access, tensor: str) -> dict[int, tuple[Tile, int]]:
        """By the first of several dimensions that an axis of the tile walks as one, and that lie in
        memory as one: its places, and the dimension behind.
        """
        names, joins = [i.var for i in access.indices], dict(self.plan.strides)[tensor].joins
        found: dict[int, tuple[Tile, int]] = {}
        for run in self.frame.runs:
            dim = 0
            while dim < len(names) - 1:
                name = names[dim]
                first = run.variables.index(name) if name in run.variables else -1
                if first < 0 or first and not self.plan.roles.flat:  # which takes registers
                    dim += 1
                    continue
                end = dim + 1
                while (
                    end < len(names)
                    and joins[end - 1]
                    and run.variables[first + end - dim : first + end - dim + 1] == (names[end],)
                ):
                    end += 1
                if end - dim > 1:
                    found[dim] = self.part_of(run, first, first + end - dim), end
                dim = end
        return found

    def part_of(self, run: Run, first: int, behind: int) -> Tile:
        """The places of some variables of a run, of neighbours."""
        value = run.rests[behind - 1]
        if not first:
            return value
        key = run.variables[first:behind]
        if key not in self.parts:
            size = self.frame.axis_size(key)
            value = self.frame.define("part", value - run.rests[first - 1] * size, 0)
            unit = math.prod(self.frame.unit(v) for v in key)
            inner = behind == len(run.variables)
            if inner and unit % GROUP == 0 and self.frame.config.n >= GROUP:
                value = self.frame.told(value, GROUP, inner=True)
            self.parts[key] = value
        return self.parts[key]

    def address(self, access: Access, offset: Tile) -> Tile:
        pointer = self.frame.pointer(access.tensor)
        return chain("+", pointer, offset) if access.indices else pointer

    def units(self, tensor: str) -> tuple[int, ...]:
        return dict(self.plan.strides)[tensor].units

    def stride(self, tensor: str, dim: int, unit: int) -> Tile:
        """In units the stride is known to be a multiple of them: a condition for loads of several
        values at once.
        """
        if unit >= 0:
            return as_tile(unit)
        if tensor == FITTED:
            lengths = [FITTED_ROWS, FITTED_ROW][dim - len(self.units(tensor)) + 1 :]
            return operation("*", *(self.frame.arg(Count(n)) for n in lengths), -unit)
        name = self.frame.arg(Stride(tensor, self.dimension(tensor, dim), -unit))
        return name if unit == -1 else name * -unit

    def dimension(self, tensor: str, dim: int) -> int:
        """The tensor's own dimension, where the plan walks several as one."""
        first, count = dict(self.plan.views).get(tensor, (dim, 1))
        return dim if dim < first else dim + count - 1

    def length(self, tensor: str, dim: int) -> Tile:
        return self.frame.arg(Length(tensor, self.dimension(tensor, dim)))

    def place(self, access: Access, dim: int) -> Tile:
        """The place that a dimension is accessed at; negative ones count from the end where the
        statement came from a program in which they do.
        """
        index = access.indices[dim]
        value, atom = self.index(index), index.atom
        if not isinstance(atom, Access) or atom.tensor not in self.plan.wraps:
            return value
        key = value, access.tensor, dim
        if key not in self.frame.wrapped:
            behind = where(value < 0, value + self.length(access.tensor, dim), value)
            self.frame.wrapped[key] = self.define_load(atom, behind, True)
        return self.frame.wrapped[key]

    def guarded(self, access: Access) -> list[int]:
        """Dimensions that are indexed by values which nobody has looked at."""
        return [
            dim
            for dim in range(len(access.indices))
            if (access.tensor, self.dimension(access.tensor, dim)) in self.plan.guarded
        ]

    def unreached(self, access: Access) -> list[int]:
        """Dimensions that some places of the output lead out of, where no window reaches and
        nothing counts: what says so depends on more than the access.
        """
        own, depends, found = {*dict(self.plan.made)}, self.depends(access), list[int]()
        for dim, index in enumerate(access.indices):
            names = {*variables(index)}
            if access.tensor == OUT or names.isdisjoint(own):
                continue
            meeting = [b.index for b in self.plan.bounds if names & {*variables(b.index)}]
            told = [b for b in meeting if {*variables(b)} <= depends]
            if told != meeting and not any(_follows(index, b) for b in told):
                found.append(dim)
        return found

    def ranges(self, access: Access, *, inner: bool = False) -> list[Tile]:
        """Where unchecked indices are in range, and windows reach: nothing else is read or written.
        ``inner``: also those inside of indices, where they decide what is written to.
        """
        nested = [a for i in access.indices for a in accesses(i)] if inner else []
        found = [v for a in nested for v in self.ranges(a, inner=True)]
        for dim in (*self.guarded(access), *self.unreached(access)):
            value = self.place(access, dim)
            inside = (as_tile(0) <= value) & (value < self.length(access.tensor, dim))
            found.append(inside.grouped())
        return found

    def offences(self, access: Access) -> list[Tile]:
        """Where an unchecked index is out of range, of an access and of those inside its indices.
        A point that padding marks as absent has no index.
        """
        found = [v for i in access.indices for a in accesses(i) for v in self.offences(a)]
        for dim in self.guarded(access):
            value = self.place(access, dim)
            outside = (value < 0) | (value >= self.length(access.tensor, dim))
            masks = [m for axis, m in self.frame.masks.items() if set(m.axes) <= set(value.axes)]
            for inner in accesses(access.indices[dim]):
                if inner.tensor in self.plan.padded:
                    masks.append(self.load(inner, as_index=True).differs(-1))
            found.append(combine([*distinct(masks), outside], "&"))
        return found

    def mask_of(self, access: Access, offset: Tile, *, as_index: bool) -> Tile | None:
        masks = [
            self.row_mask(access) if axis == "N" and self.ends_with_load(access) else m
            for axis, m in self.frame.masks.items()
            if axis in offset.axes
            and set(m.axes) <= set(offset.axes)
            and not self.fills_tile(access, axis)
        ]
        if any(m.axes == ("M", "K") for m in masks):  # a row beyond the last has no entries
            masks = [m for m in masks if m.axes != ("M",)]
        masks += self.inner_masks(access) if as_index else self.absent_masks(access, offset)
        # An index load beyond the end of an axis yields padding, so the padding's mask covers its
        # axes; what holds for all of a tile, as where a window ends, has none. What is out of the
        # range of this access is no padding.
        covered = {axis for m in masks if _is_presence(m) for axis in m.axes}
        masks = [m for m in masks if _is_presence(m) or not m.axes or not covered >= {*m.axes}]
        masks = distinct([*masks, *self.ranges(access)])
        if not as_index:
            masks = self.compared_once(masks, offset.axes)
        return combine(masks, "&") if masks else None

    def compared_once(self, masks: list[Tile], axes: TileAxes) -> list[Tile]:
        """A place of the sum and a padded index in one comparison, where a value is read at both:
        an index is at least zero where the sum has such a place, and no index is at least what
        stands elsewhere.
        """
        inside = self.frame.masks.get("K")
        present = next((m for m in reversed(masks) if m in self.frame.implied), None)
        if inside not in masks or present is None or inside.axes != ("K",) or self.frame.eager:
            return masks
        if set(inside.axes) & set(present.axes):
            return masks
        if self.frame.least is None:
            most = 2**63 - 1 if self.plan.wide else 2**31 - 1
            self.frame.least = self.frame.assign(inside.stage, "k_least", where(inside, 0, most))
        assert isinstance(present, Operation)
        both = operation(">=", present.args[0].over(axes), self.frame.least.over(axes))
        gone = {inside, present, *self.frame.implied[present]}
        return [*(m for m in masks if m not in gone), both]

    def fills_tile(self, access: Access, axis: str) -> bool:
        """Whether an access is to a copy that goes on to the ends of tiles; entries on the K axis
        end elsewhere.
        """
        roles = self.plan.roles
        if self.ends_with_load(access):
            return False
        if access.tensor in (ALIGNED, ALSO_ALIGNED):
            walked = {"M": roles.m, "N": roles.n, "K": roles.k}.get(axis, ())
            return walked == (access.indices[-1].var,)
        return access.tensor == FITTED and (axis != "K" or len(roles.k) == 1)

    def ends_with_load(self, access: Access) -> bool:
        """Whether an access is to a copy of rows that go on to the ends of widest loads."""
        return access.tensor == ALIGNED and not self.plan.roles.dot

    def row_mask(self, access: Access) -> Tile:
        """Where the rows of such a copy are: the same for all numbers of a load."""
        (var,), wide = self.plan.roles.n, WIDE_LOAD // BYTES[dict(self.plan.kinds)[access.tensor]]
        if self.frame.row_mask is None:
            inside = self.frame.vars[var] < cdiv(self.frame.size(var), wide) * wide
            self.frame.row_mask = self.frame.assign(0, "row_ok", inside)
        return self.frame.row_mask

    def absent_masks(self, access: Access, offset: Tile) -> list[Tile]:
        """Points that some padded index marks as absent: their values are not read, unless several
        points share one, as those of a row do that is found by the row.
        """
        depends = self.depends(access)
        return [
            m
            for vars_, m in self.frame.point_masks
            if vars_ <= depends and set(m.axes) <= set(offset.axes)
        ]

    def inner_masks(self, access: Access) -> list[Tile]:
        """Indices are read wherever they exist, absent point or not: they say where an output is
        stored, if only as zero.
        """
        padded = [a for i in access.indices for a in accesses(i) if a.tensor in self.plan.padded]
        return [self.load(a, as_index=True) >= 0 for a in padded]

    def depends(self, access: Access) -> frozenset[str]:
        return frozenset(variables(access))

    def load(self, access: Access, *, as_index: bool = False) -> Tile:
        key = (access, as_index)
        if access.tensor in self.plan.numbers:
            return apply("tl.cast", self.passed(access.tensor), self.frame.index_dtype)
        if key in self.frame.loaded:
            return self.frame.loaded[key]
        if as_index and access == self.plan.home and not self.at_first:
            return self.frame.loaded.setdefault(key, self.load_home(access))
        offset = self.offset(access)
        mask = self.mask_of(access, offset, as_index=as_index)
        other = "-1" if as_index and access.tensor in self.plan.padded else "0"
        if dict(self.plan.kinds).get(access.tensor, "").startswith("float8"):
            other = "0.0"  # no integer is converted to 8-bit floats
        read = load(self.address(access, offset), mask, None if mask is None else other)
        if as_index:
            read = self.bounded(access, read).to(self.frame.index_dtype)
        value = self.define_load(access, read, as_index)
        self.frame.loaded[key] = value
        if as_index and access.tensor in self.plan.padded:
            present = value >= 0
            self.frame.point_masks.append((self.depends(access), present))
            # where an index is not read, it is absent
            self.frame.implied[present] = set(self.inner_masks(access))
        return value

    def load_home(self, access: Access) -> Tile:
        """The index that rows were made of, which all entries of a row share: read at the first
        one, before the loop, and so is what is read at it.
        """
        frame, segment = self.frame, self.plan.segment
        assert segment is not None
        entry, loaded, wrapped = frame.vars[segment.var], frame.loaded, frame.wrapped
        frame.vars[segment.var] = Named("seg_first", ("M",))
        frame.loaded, frame.wrapped, self.at_first = {}, {}, True  # read at another place
        found = self.load(access, as_index=True)
        frame.vars[segment.var], frame.loaded, frame.wrapped = entry, loaded, wrapped
        self.at_first = False
        return found

    def bounded(self, access: Access, value: Tile) -> Tile:
        """An unchecked index value within what offsets are computed in: beyond it a value would be
        cut to one that is in range.
        """
        kind = dict(self.plan.kinds).get(access.tensor, "")
        wide = kind in ("int64", "uint64", "uint32")
        if self.plan.wide or not self.plan.guarded or not (wide or self.steps(access) > 1):
            return value
        most = (2**31 - 1) // self.steps(access)
        if kind == "uint64":  # whose upper half would be negative
            value = apply("tl.minimum", value, most)
        return apply("tl.minimum", apply("tl.maximum", value.to("tl.int64"), -most), most)

    def steps(self, access: Access) -> int:
        """The largest number that an index value is multiplied with."""
        exprs = [self.plan.target, *self.plan.factors]
        every = [i for e in exprs for a in accesses(e) for i in a.indices]
        return max([abs(c) for i in every for c, a in i.terms if a == access], default=1)

    def define_load(self, access: Access, value: Tile, as_index: bool) -> Tile:
        """Give what was read a name: indices of the loop stand first in it, to be read ahead."""
        frame, name = self.frame, self.frame.name(access.tensor.strip("<>"))
        stage = value.stage if as_index else max(value.stage, frame.earliest)
        if as_index and stage == 2 and not frame.late:
            frame.index_lines.append(Assignment(name, value))
            return Named(name, value.axes, stage)
        return frame.assign(stage, name, value)

    # --- expressions ---

    def evaluate(self, expr: Expr, dtype: str) -> Tile:
        match expr:
            case Number(value):
                return self.literal(value, dtype)
            case Access(tensor, ()) if tensor in self.plan.numbers:
                return self.number(tensor, dtype)
            case Access():
                loaded = self.load(expr)
                kind = dict(self.plan.kinds)[expr.tensor]
                if kind != dtype:
                    loaded = converted(loaded, kind, dtype)
                return self.poisoned(expr, loaded, dtype)
            case Call("ones"):
                return apply("tl.full", "[]", 1, f"tl.{dtype}")
            case Call(function, args):
                own = self.dtype_of(expr, dtype)
                found = self.called(function, args, own)
                return found if own == dtype else self.widened(expr, found, dtype)
            case Product(factors):
                parts = [self.evaluate(f, dtype) for f in narrow_first(factors)]
                return combine(parts, "*", as_written=True)
            case Sum(terms):
                parts = [self.evaluate(t, dtype) for t in narrow_first(terms)]
                return combine(parts, "+", as_written=True).grouped()

    def called(self, function: str, args: tuple[Expr, ...], dtype: str) -> Tile:
        """A function of arguments in ``dtype``; a condition is looked at in its own."""
        count = FUNCTIONS[function].values
        values = [self.argument(a, dtype) for a in args[:count]]
        if all(infer(a, self.types).dtype == torch.bool for a in args):
            values = [self.truth(a, v, dtype) for a, v in zip(args, values)]
        if function == "where":
            condition = Call("whole", args[:1])
            values[0] = self.argument(condition, self.dtype_of(condition, dtype))
        if function in COMPARED:
            values = self.rounded(function, args, values, dtype)
        if function == "sigmoid" and (opposite := _opposite(args[0])) is not None:
            function, values = "sigmoid_of_minus", [self.argument(opposite, dtype)]
        numbers = [a.value for a in args[count:] if isinstance(a, Number)]
        axes = union(*(v.axes for v in values))
        return called(function, [v.over(axes) for v in values], numbers, dtype)

    def dtype_of(self, expr: Call, dtype: str) -> str:
        """Functions of integer tensors are computed as integers, which floats may not hold: in
        float32, 2**24 and the number behind it are equal.
        """
        args = deciding(expr.function, expr.args)
        read = [a.tensor for arg in args for a in accesses(arg, nested=False)]
        if all(name in self.plan.numbers for name in read):
            return dtype
        own = call_type(expr.function, expr.args, self.types, torch.float32)
        if not own.is_floating_point:
            return "int64"
        return dtype if dtype.startswith("float") else TRITON[accumulator(own)]

    def truth(self, expr: Expr, value: Tile, dtype: str) -> Tile:
        """Among truth values + means or: a sum of two is 1, not 2."""
        if not isinstance(expr, Product | Sum):
            return value
        return value.differs(0).to(f"tl.{dtype}")

    def widened(self, expr: Expr, value: Tile, dtype: str) -> Tile:
        result = value.to(f"tl.{dtype}")
        for access in accesses(expr, nested=False):
            result = self.poisoned(access, result, dtype)
        return result

    @functools.cached_property
    def types(self) -> dict[str, Typed]:
        kinds = dict(self.plan.kinds)
        dtypes = {kind: dtype for dtype, kind in TRITON.items()}
        return {
            n: Typed(dtypes[k], n not in self.plan.numbers) for n, k in kinds.items() if k in dtypes
        }

    def poisoned(self, access: Access, value: Tile, dtype: str) -> Tile:
        """NaN where an index was out of range, so that it shows in the result."""
        if not self.plan.guarded or not dtype.startswith("float"):
            return value
        offences = distinct(self.offences(access))
        if (
            self.frame.deferred is not None
        ):  # what concerns all of a tile is seen to once, at its end
            self.frame.deferred += [v for v in offences if not v.axes and not v.stage]
            offences = [v for v in offences if v.axes or v.stage]
        return where(combine(offences, "|"), NAN, value) if offences else value

    def passed(self, tensor: str) -> Tile:
        """A Python number among the arguments."""
        kind, wide = dict(self.plan.kinds)[tensor], self.plan.accumulator == "float64"
        type = ("fp64" if wide else "fp32") if kind.startswith("float") else "i64"
        return self.frame.arg(Passed(tensor, type))

    def literal(self, value: int | float, dtype: str) -> Tile:
        """A number of the statement. By itself Triton would take it for a float32."""
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        return apply("tl.full", "[]", text, "tl.float64") if dtype == "float64" else as_tile(text)

    def number(self, tensor: str, dtype: str) -> Tile:
        """A number that is passed; integers are computed with in the kind of the result."""
        name = self.passed(tensor)
        if dict(self.plan.kinds)[tensor].startswith("float"):
            return apply("tl.full", "[]", name, "tl.float64") if dtype == "float64" else name
        return apply("tl.cast", name, f"tl.{dtype}")

    def argument(self, expr: Expr, dtype: str) -> Tile:
        """An argument of a function; numbers alone have no dtype yet, but in float64, and functions
        want one.
        """
        value = self.evaluate(expr, dtype)
        typed = dtype == "float64" or any(
            a.tensor not in self.plan.numbers for a in accesses(expr, nested=False)
        )
        return value if typed else apply("tl.full", "[]", value, f"tl.{dtype}")

    def rounded(
        self, function: str, args: tuple[Expr, ...], values: list[Tile], dtype: str
    ) -> list[Tile]:
        """What is compared, as torch rounds it; for equality as rounded to the narrower dtype: a
        half-precision maximum equals the wide value it was rounded from.
        """
        held = [arg for arg in args if is_rounded(arg, self.types)]
        halves = {self.half_of(arg) for arg in held}
        if function in ("eq", "ne"):
            halves -= {""}
        if len(halves) != 1 or halves == {""}:
            return values
        half = halves.pop()
        return [v.to(f"tl.{half}").to(f"tl.{dtype}") for v in values]

    def half_of(self, expr: Expr) -> str:
        """The dtype of a value in half precision; '' of others."""
        kinds = dict(self.plan.kinds)
        read = {kinds[a.tensor] for a in accesses(expr, nested=False)}
        floats = {kind for kind in read if "float" in kind and not kind.startswith("float8")}
        return floats.pop() if len(floats) == 1 and floats <= {"float16", "bfloat16"} else ""

    def prepare_masks(self) -> None:
        """Load every padded index tensor first, so that all other loads know the points that are
        absent; and those that a window does not reach.
        """
        for bound in self.plan.bounds:
            place = self.frame.define("place", self.index(bound.index))
            inside = (as_tile(0) <= place) & (place < self.frame.size(bound.var))
            mask = self.frame.define("inside", inside)
            self.frame.point_masks.append((frozenset(variables(bound.index)), mask))
        for factor in (*self.plan.factors, self.plan.target):
            for access in accesses(factor):
                for index in access.indices:
                    for _, atom in index.terms:
                        if isinstance(atom, Access) and any(
                            a.tensor in self.plan.padded for a in accesses(atom)
                        ):
                            self.load(atom, as_index=True)


NAN = Literal('float("nan")')
#: Conversions of floats of 8 bits that Triton lacks (to float64), or makes finite numbers of
#: infinities and NaN in, and the dtype on the way that keeps all: kinds, dtypes.
_BY_WAY_OF = {
    ("float8e4nv", "float64"): "float32",
    ("float8e5", "float64"): "float32",
    ("float8e5", "bfloat16"): "float16",
}


def converted(value: Tile, kind: str, dtype: str) -> Tile:
    """A loaded value in another dtype."""
    way = _BY_WAY_OF.get((kind, dtype))
    return (value.to(f"tl.{way}") if way else value).to(f"tl.{dtype}")


def _follows(index: Affine, other: Affine) -> bool:
    """Whether an index is a multiple of another, but for an offset."""
    steps, others = ({atom: by for by, atom in one.terms} for one in (index, other))
    if steps.keys() != others.keys():
        return False
    first = next(iter(steps))
    return all(steps[atom] * others[first] == steps[first] * others[atom] for atom in steps)


def _is_presence(mask: Tile) -> bool:
    """Whether a mask is of an index that is there, and not padding."""
    return isinstance(mask, Operation) and mask.symbol == ">=" and mask.args[1] == as_tile(0)


def _opposite(expr: Expr) -> Expr | None:
    """What an expression is written as the negative of."""
    match expr:
        case Product((Number(value), *rest)) if value < 0:
            return product([Number(-value), *rest])
    return None
