"""The contraction: `tl.dot` on operands that are born in its layout, or multiply and reduce."""

from __future__ import annotations

from collections.abc import Callable

from insum.codegen.frame import AFTER, Frame
from insum.codegen.functions import reduced
from insum.codegen.reads import Reads, distinct
from insum.codegen.values import Eager, Val, combine, narrow_first, union
from insum.lang.expr import Access
from insum.plan.copying import lies_along_sum

IDENTITY: dict[str, Callable[[str], str]] = {
    "sum": lambda dtype: "0",
    "max": lambda dtype: (
        'float("-inf")'
        if "float" in dtype
        else "-9223372036854775808"
        if dtype == "int64"
        else "-2147483648"
    ),
    "min": lambda dtype: (
        'float("inf")'
        if "float" in dtype
        else "9223372036854775807"
        if dtype == "int64"
        else "2147483647"
    ),
}
MERGE = {"sum": "{0} + {1}", "max": "insum_max({0}, {1})", "min": "insum_min({0}, {1})"}


class Contract:
    """Reduces one tile; the result is a value over the axes that are kept."""

    def __init__(self, frame: Frame, reads: Reads) -> None:
        self.frame, self.reads = frame, reads
        self.plan, self.config = frame.plan, frame.config

    def write(self) -> Val:
        return self.dot() if self.plan.roles.dot else self.multiply_and_sum()

    def dot(self) -> Val:
        plan, config = self.plan, self.config
        self.frame.deferred = []
        left = self.operand(plan.roles.left, ("M", "K"), (config.m, config.k))
        right = self.operand(plan.roles.right, ("K", "N"), (config.k, config.n))
        precision = f", input_precision={plan.precision!r}" if plan.precision else ""
        self.frame.line(
            1 if plan.roles.outer else 0,
            f"acc = tl.zeros([{config.m}, {config.n}], dtype=tl.{plan.accumulator})",
            ("M", "N"),
        )
        self.frame.line(2, f"acc = tl.dot({left}, {right}, acc{precision})", ("M", "N"))
        if self.frame.deferred:
            nowhere = combine(distinct(self.frame.deferred), "|").text
            self.frame.line(AFTER, f'acc = tl.where({nowhere}, float("nan"), acc)', ("M", "N"))
        self.frame.deferred = None
        if not self.frame.eager:
            return Val("acc", ("M", "N"), AFTER)
        self.frame.line(AFTER, f"acc = tl.reshape(acc, [{config.m}, {config.n}, 1])")
        return Val("acc", Eager(("M", "N")), AFTER)

    def operand(
        self, factors: tuple[int, ...], axes: tuple[str, ...], tile: tuple[int, ...]
    ) -> str:
        plan = self.plan
        read = plan.factors[factors[0]] if len(factors) == 1 else None
        if isinstance(read, Access):
            value = self.reads.evaluate(read, plan.operand)
            if plan.precision == "tf32" and not lies_along_sum(plan, read):
                # Shared memory takes it as it lies, in widest loads, if the compiler has to bring
                # it to registers once more, as this sum makes it do; else number by number.
                value = Val(f"({value.text} + 0.0)", value.axes, value.stage)
        else:
            wide = combine(
                [self.reads.evaluate(plan.factors[f], plan.accumulator) for f in factors], "*"
            )
            wide = self.masked_operand(wide, axes) if plan.pointwise else wide
            value = (
                wide
                if plan.operand == plan.accumulator
                else Val(f"({wide.text}).to(tl.{plan.operand})", wide.axes, wide.stage)
            )
        if self.frame.eager:
            return self.reshaped(value, axes, tile)
        if value.axes == axes:
            return value.text
        return f"tl.broadcast_to({value.over(axes)}, [{tile[0]}, {tile[1]}])"

    def masked_operand(self, value: Val, axes: tuple[str, ...]) -> Val:
        """Zero at absent and out-of-range points, whatever functions made of the zeros that were
        loaded there.
        """
        masks = [m for axis, m in self.frame.masks.items() if axis in axes] + [
            m for _, m in self.frame.point_masks if set(m.axes) <= set(axes)
        ]
        return where(masks, value, "0")

    def reshaped(self, value: Val, axes: tuple[str, ...], tile: tuple[int, ...]) -> str:
        """An operand that was loaded over (M, N, K), brought to the two axes that a dot takes."""
        sizes = dict(zip(axes, tile, strict=True))
        spread = [sizes.get(a, 1) for a in Eager.ORDER]
        text = value.text if value.axes == axes else f"tl.broadcast_to({value.text}, {spread})"
        flat = (
            f"tl.reshape({text}, "
            f"{[s for a, s in zip(Eager.ORDER, spread, strict=True) if a in axes]})"
        )
        return flat if axes == ("M", "K") else f"tl.trans({flat})"

    def multiply_and_sum(self) -> Val:
        plan = self.plan
        alike = plan.reduce != "sum"
        factors = narrow_first(plan.factors) if alike else plan.factors
        parts = [self.reads.evaluate(f, plan.accumulator) for f in factors]
        value = combine(parts, "*", as_written=alike)
        axes = self.frame.tile_axes()
        if plan.pointwise or not self.zero_where_absent():
            value = self.masked(value)
        if not self.frame.counters:
            return self.full(self.frame.define("value", value), tuple(a for a in axes if a != "K"))
        return self.reduced(value, axes)

    def reduced(self, value: Val, axes: tuple[str, ...]) -> Val:
        """Sum in the loop; over K inside it where entries are gathered a few at a time, after it
        where K is long.
        """
        plan = self.plan
        kept = tuple(a for a in axes if a != "K")
        in_loop = bool(plan.segment) or "K" not in axes
        over = kept if in_loop else axes
        self.start_accumulator(over)
        text = value.over(over)
        if in_loop and "K" in axes:
            step = value if "K" in value.axes else self.full(value, axes)
            text = reduced(plan.reduce, step.over(axes), axes.index("K"))
        self.frame.line(2, f"acc = {MERGE[plan.reduce].format('acc', text)}", over)
        if not in_loop:
            self.frame.line(AFTER, f"acc = {reduced(plan.reduce, 'acc', axes.index('K'))}", kept)
        return Val("acc", kept, AFTER)

    def start_accumulator(self, over: tuple[str, ...]) -> None:
        plan = self.plan
        tile = ", ".join(str(self.frame.tile(a)) for a in over)
        start = (
            f"tl.full([{tile or 1}], {IDENTITY[plan.reduce](plan.accumulator)}, "
            f"dtype=tl.{plan.accumulator})"
        )
        self.frame.line(
            1 if plan.roles.outer else 0,
            f"acc = {start}" if over else f"acc = tl.max({start}, axis=0)",
            over,
        )

    def full(self, value: Val, axes: tuple[str, ...]) -> Val:
        """The value as a full tile over ``axes``."""
        if value.axes == axes:
            return value
        tile = ", ".join(str(self.frame.tile(a)) for a in axes)
        if not value.axes and not axes:
            return value
        # Adding zeros, not tl.broadcast_to: the interpreter's atomics take a broadcast view for a
        # full tile.
        return Val(
            f"tl.zeros([{tile}], dtype=tl.{self.plan.accumulator}) + {value.over(axes)}",
            axes,
            value.stage,
        )

    def zero_where_absent(self) -> bool:
        """Whether masked loads alone make every absent point zero: each factor is masked there, so
        that none can be infinite.
        """
        reads = [
            f
            for f in self.plan.factors
            if isinstance(f, Access) and f.tensor not in self.plan.numbers
        ]
        spans = [set(self.frame.loaded[(f, False)].axes) for f in reads]
        depends = [self.reads.depends(f) for f in reads]
        tail = "K" not in self.frame.masks or bool(reads) and all("K" in s for s in spans)
        return tail and all(
            bool(reads) and all(vars_ <= d for d in depends) for vars_, _ in self.frame.point_masks
        )

    def masked(self, value: Val) -> Val:
        """Absent and out-of-range points become the reduction's identity, whatever the functions
        made of them.
        """
        masks = [
            m
            for axis, m in self.frame.masks.items()
            if axis in self.frame.tile_axes() and (axis == "K" or self.frame.summed_axis(axis))
        ]
        masks += [m for _, m in self.frame.point_masks]
        return where(masks, value, IDENTITY[self.plan.reduce](self.plan.accumulator))


def where(masks: list[Val], value: Val, otherwise: str) -> Val:
    """The value where all masks hold, elsewhere something that does not count."""
    if not masks:
        return value
    mask = combine(distinct(masks), "&")
    axes = union(value.axes, mask.axes)
    return Val(
        f"tl.where({mask.over(axes)}, {value.over(axes)}, {otherwise})",
        axes,
        max(value.stage, mask.stage),
    )
