"""The contraction: `tl.dot` on operands that are born in its layout, or multiply and reduce."""

from __future__ import annotations

from collections.abc import Iterable

from insum.codegen.frame import AFTER, Frame
from insum.codegen.functions import identity, merged, reduced
from insum.codegen.ir import (
    Eager,
    Named,
    Tile,
    TileAxes,
    apply,
    chain,
    combine,
    distinct,
    narrow_first,
    where,
)
from insum.codegen.reads import NAN, Reads
from insum.lang.expr import Access, Expr
from insum.plan.copying import lies_along_sum

#: What contributions are added up in.
ACC = "acc"


class Contract:
    """Reduces one tile; the result is a value over the axes that are kept."""

    def __init__(self, frame: Frame, reads: Reads) -> None:
        self.frame, self.reads = frame, reads
        self.plan, self.config = frame.plan, frame.config

    def write(self) -> Tile:
        return self.dot() if self.plan.roles.dot else self.multiply_and_sum()

    @property
    def first_stage(self) -> int:
        """Where sums start anew."""
        return 1 if self.plan.roles.outer else 0

    def dot(self) -> Tile:
        plan, config, axes = self.plan, self.config, ("M", "N")
        self.frame.deferred = []
        left = self.operand(plan.roles.left, ("M", "K"), (config.m, config.k))
        right = self.operand(plan.roles.right, ("K", "N"), (config.k, config.n))
        precision = repr(plan.precision) if plan.precision else None
        acc = self.frame.assign(self.first_stage, ACC, self.frame.zeros(axes))
        product = apply("tl.dot", left, right, acc, over=axes, input_precision=precision)
        self.frame.assign(2, ACC, product)
        if self.frame.deferred:
            nowhere = combine(distinct(self.frame.deferred), "|")
            self.frame.assign(AFTER, ACC, where(nowhere, NAN, acc))
        self.frame.deferred = None
        if not self.frame.eager:
            return Named(ACC, axes, AFTER)
        shape = f"[{config.m}, {config.n}, 1]"
        return self.frame.assign(AFTER, ACC, apply("tl.reshape", acc, shape, over=Eager(axes)))

    def operand(self, factors: tuple[int, ...], axes: TileAxes, sizes: tuple[int, ...]) -> Tile:
        plan = self.plan
        read = plan.factors[factors[0]] if len(factors) == 1 else None
        if isinstance(read, Access):
            value = self.reads.evaluate(read, plan.operand)
            if plan.precision == "tf32" and not lies_along_sum(plan, read):
                # Shared memory takes it as it lies, in widest loads, if the compiler has to bring
                # it to registers once more, as this sum makes it do; else number by number.
                value = value + "0.0"
        else:
            value = combine(
                [self.reads.evaluate(plan.factors[f], plan.accumulator) for f in factors], "*"
            )
            value = self.masked_operand(value, axes) if plan.pointwise else value
            if plan.operand != plan.accumulator:
                value = value.to(f"tl.{plan.operand}")
        if self.frame.eager:
            return self.reshaped(value, axes, sizes)
        if value.axes == axes:
            return value
        return apply("tl.broadcast_to", value.over(axes), f"[{sizes[0]}, {sizes[1]}]", over=axes)

    def masked_operand(self, value: Tile, axes: TileAxes) -> Tile:
        """Zero at absent and out-of-range points, whatever functions made of the zeros that were
        loaded there.
        """
        masks = [m for axis, m in self.frame.masks.items() if axis in axes] + [
            m for _, m in self.frame.point_masks if set(m.axes) <= set(axes)
        ]
        return where_all(masks, value, "0")

    def reshaped(self, value: Tile, axes: TileAxes, sizes: tuple[int, ...]) -> Tile:
        """An operand that was loaded over (M, N, K), brought to the two axes that a dot takes."""
        by_axis = dict(zip(axes, sizes, strict=True))
        spread = [by_axis.get(a, 1) for a in Eager.ORDER]
        if value.axes != axes:
            value = apply("tl.broadcast_to", value, str(spread), over=axes)
        kept = [s for a, s in zip(Eager.ORDER, spread, strict=True) if a in axes]
        flat = apply("tl.reshape", value, str(kept), over=axes)
        return flat if axes == ("M", "K") else apply("tl.trans", flat, over=axes)

    def multiply_and_sum(self) -> Tile:
        plan = self.plan
        alike = plan.reduce != "sum"
        factors = narrow_first(plan.factors) if alike else plan.factors
        parts = [(f, self.reads.evaluate(f, plan.accumulator)) for f in factors]
        parts, scales = self.scales_apart(parts)
        value = combine([part for _, part in parts], "*", as_written=alike)
        axes = self.frame.tile_axes()
        if plan.pointwise or not self.zero_where_absent([f for f, _ in parts]):
            value = self.masked(value)
        if not self.frame.counters:
            return self.full(self.frame.define("value", value), tuple(a for a in axes if a != "K"))
        total = self.reduced(value, axes)
        return self.scaled(total, scales) if scales else total

    def scales_apart(
        self, parts: list[tuple[Expr, Tile]]
    ) -> tuple[list[tuple[Expr, Tile]], list[Tile]]:
        """Factors that are the same in all steps of a sum multiply it once, and are rounded with it
        once: many equal shares, as of a mean, would add up to something else. Where points may be
        absent a sum may be of none, and zero whatever it is multiplied by.
        """
        apart = self.frame.counters and not self.frame.point_masks and self.plan.reduce == "sum"
        if not apart or not self.plan.accumulator.startswith("float"):
            return parts, []
        summed = [one for one in parts if one[1].stage == 2 or "K" in one[1].axes]
        if not summed:
            return parts, []
        return summed, [one[1] for one in parts if one not in summed]

    def scaled(self, total: Tile, scales: list[Tile]) -> Tile:
        """A sum times what multiplies all of it; that of a row without entries stays zero."""
        value = combine([total, *scales], "*")
        if self.plan.segment is not None:
            start, end = self.frame.bounds
            value = where(start < end, value, 0)
        return self.frame.define("scaled", value, AFTER)

    def reduced(self, value: Tile, axes: TileAxes) -> Tile:
        """Sum in the loop; over K inside it where rows of entries are gathered a few at a time,
        after it where K is long, and of single numbers: threads then meet once.
        """
        plan = self.plan
        kept = tuple(a for a in axes if a != "K")
        in_loop = "K" not in axes or bool(plan.segment) and "N" in axes
        over = kept if in_loop else axes
        acc = self.start_accumulator(over)
        if in_loop and "K" in axes:
            whole = value if "K" in value.axes else self.full(value, axes)
            step = reduced(plan.reduce, whole.over(axes), "K")
        else:
            step = value.over(over)
        self.frame.assign(2, ACC, merged(plan.reduce, acc, step))
        if not in_loop:
            self.frame.assign(AFTER, ACC, reduced(plan.reduce, acc, "K"))
        return Named(ACC, kept, AFTER)

    def start_accumulator(self, over: TileAxes) -> Tile:
        plan = self.plan
        start = apply(
            "tl.full",
            self.frame.block(over) if over else "[1]",
            identity(plan.reduce, plan.accumulator),
            over=over,
            dtype=f"tl.{plan.accumulator}",
        )
        if not over:
            start = apply("tl.max", start, axis=0)
        return self.frame.assign(self.first_stage, ACC, start)

    def full(self, value: Tile, axes: TileAxes) -> Tile:
        """The value as a full tile over ``axes``."""
        if value.axes == axes or not value.axes and not axes:
            return value
        # Adding zeros, not tl.broadcast_to: the interpreter's atomics take a broadcast view for a
        # full tile.
        return chain("+", self.frame.zeros(axes), value.over(axes))

    def zero_where_absent(self, factors: Iterable[Expr]) -> bool:
        """Whether masked loads alone make the product of these zero at every absent point: each
        factor is masked there, so that none can be infinite.
        """
        reads = [f for f in factors if isinstance(f, Access) and f.tensor not in self.plan.numbers]
        spans = [set(self.frame.loaded[(f, False)].axes) for f in reads]
        depends = [self.reads.depends(f) for f in reads]
        tail = "K" not in self.frame.masks or bool(reads) and all("K" in s for s in spans)
        return tail and all(
            bool(reads) and all(vars_ <= d for d in depends) for vars_, _ in self.frame.point_masks
        )

    def masked(self, value: Tile) -> Tile:
        """Absent and out-of-range points become the reduction's identity, whatever the functions
        made of them.
        """
        masks = [
            m
            for axis, m in self.frame.masks.items()
            if axis in self.frame.tile_axes() and (axis == "K" or self.frame.summed_axis(axis))
        ]
        masks += [m for _, m in self.frame.point_masks]
        return where_all(masks, value, identity(self.plan.reduce, self.plan.accumulator))


def where_all(masks: list[Tile], value: Tile, otherwise: str) -> Tile:
    """The value where all masks hold, elsewhere something that does not count."""
    return where(combine(distinct(masks), "&"), value, otherwise) if masks else value
