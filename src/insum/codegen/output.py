"""After the contraction: remaining factors, register tiles of small scattered dimensions, and the
store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from insum.codegen.arguments import Length
from insum.codegen.contract import Contract
from insum.codegen.cut_rows import CutRows, piece_stored
from insum.codegen.frame import AFTER, REGISTERS, Frame
from insum.codegen.functions import merged, reduced
from insum.codegen.ir import (
    Assignment,
    Effect,
    KernelLine,
    Named,
    Tile,
    TileAxes,
    apply,
    as_tile,
    chain,
    combine,
    distinct,
    load,
    operation,
    store,
    union,
    where,
)
from insum.codegen.reads import Reads
from insum.lang.expr import Access, Affine, Var, accesses, variables
from insum.plan.sizes import BASE, OUT

#: What the tiles of several iterations are added up in.
TOTAL = "total"
#: Places of the dimension that is kept in registers.
IN_REGISTERS = Named("i_reg", ("I",))


class Output:
    """Brings a contracted tile to memory: plain stores, atomics, or one register tile for a whole
    scattered dimension.
    """

    def __init__(self, frame: Frame, reads: Reads, contract: Contract) -> None:
        self.frame, self.reads, self.contract = frame, reads, contract
        self.plan, self.shape = frame.plan, frame.shape

    def finish(self, total: Tile) -> None:
        plan = self.plan
        value = total
        if plan.roles.dot and plan.roles.post:
            post = [self.reads.evaluate(plan.factors[f], plan.accumulator) for f in plan.roles.post]
            value = self.contract.scaled(total, post)
        value = self.sum_unkept(value)
        if plan.onehot >= 0:
            return self.finish_onehot(value)
        if plan.roles.outer:
            return self.finish_outer(value)
        self.store(value)

    def finish_outer(self, value: Tile) -> None:
        """Variables looped over outside the contraction: add up what each iteration gives, store
        once after the loops.
        """
        self.add_up(self.zero(value.axes), [Assignment(TOTAL, value, "+=")])
        self.stored_last(self.store, value.axes)

    def zero(self, axes: TileAxes) -> Tile:
        if axes:
            return self.frame.zeros(axes)
        dtype = f"tl.{self.plan.accumulator}"
        return apply("tl.sum", apply("tl.zeros", "[1]", dtype=dtype), axis=0)

    def add_up(self, start: Tile, lines: Sequence[KernelLine]) -> None:
        """A total from before all loops on, which each iteration changes."""
        self.frame.stages[0].append(Assignment(TOTAL, start))
        self.frame.stages[AFTER] += lines

    def stored_last(self, write: Callable[[Tile], None], axes: TileAxes) -> None:
        """Write the total once, behind the outer loops."""
        lines, self.frame.stages[AFTER] = self.frame.stages[AFTER], []
        write(Named(TOTAL, axes))
        self.frame.tail, self.frame.stages[AFTER] = self.frame.stages[AFTER], lines

    def sum_unkept(self, value: Tile) -> Tile:
        for axis in ("M", "N"):
            if axis in value.axes and self.frame.summed_axis(axis):
                value = self.frame.define("sum", reduced(self.plan.reduce, value, axis), AFTER)
        return value

    # --- a scattered dimension in registers ---

    def finish_onehot(self, value: Tile) -> None:
        """Add the contraction's tile into the rows of the register tile that its index names."""
        plan = self.plan
        index = self.reads.place(Access(OUT, plan.target.indices), plan.onehot)
        scattered = next((a for a in ("M", "N") if a in index.axes), "")
        other = tuple(a for a in value.axes if a not in ("I", scattered))
        axes = union((*other, "I"))
        registers = apply("tl.arange", 0, self.frame.tile("I"), over=("I",))
        self.frame.stages[0].append(Assignment(IN_REGISTERS.name, registers))
        if scattered:
            value = self.contract.full(value, union((scattered, *other)))
        if not isinstance(value, Named):
            value = self.frame.define("tile", value)
        self.add_up(self.frame.zeros(axes), [self.onehot_line(value, index, scattered, axes)])
        self.stored_last(self.store_registers, axes)

    def onehot_line(self, value: Tile, index: Tile, scattered: str, axes: TileAxes) -> Assignment:
        if not scattered:
            hit = IN_REGISTERS.equals(index)
            return Assignment(TOTAL, where(hit.over(axes), value.over(axes), 0), "+=")
        first = axes[0] == "I"
        pair = ("I", scattered) if first else (scattered, "I")
        pick = operation(
            "==", *([IN_REGISTERS, index] if first else [index, IN_REGISTERS]), over=pair
        )
        if scattered in self.frame.masks:
            pick = operation("&", pick, self.frame.masks[scattered], over=pair)
        sizes = [self.frame.tile(a) for a in ("I", scattered, *(a for a in axes if a != "I"))]
        if len(axes) == 2 and min(sizes) >= 16 and self.plan.accumulator == "float32":
            hot = apply("tl.where", pick, "1.0", "0.0", over=pair)
            return self.onehot_product(value, hot, axes)
        every = (*pair, *axes[1:]) if first else (axes[0], *pair)
        picked = apply("tl.where", pick.over(every), value.over(every), 0, over=every)
        return Assignment(TOTAL, reduced("sum", picked, scattered), "+=")

    def onehot_product(self, value: Tile, hot: Tile, axes: TileAxes) -> Assignment:
        """The same on the tensor cores."""
        pair = (hot, value) if axes[0] == "I" else (value, hot)
        precision = repr(self.plan.precision or "tf32x3")
        total = Named(TOTAL, axes)
        return Assignment(
            TOTAL, apply("tl.dot", *pair, total, over=axes, input_precision=precision)
        )

    def store_registers(self, total: Tile) -> None:
        dim, target, saved = self.plan.onehot, self.plan.target, self.frame.vars
        registers = IN_REGISTERS
        self.frame.vars = {**saved, REGISTERS: registers}
        index = Affine(((1, Var(REGISTERS)),))
        indices = tuple(index if d == dim else i for d, i in enumerate(target.indices))
        inside = registers < self.frame.arg(Length(OUT, dim))
        self.emit_store(Access(target.tensor, indices), total, extra=[inside], order=total.axes)
        self.frame.vars = saved

    # --- stores ---

    def store(self, value: Tile) -> None:
        plan = self.plan
        if self.shape.apart:
            piece = piece_stored(self.frame, self.contract, Named("piece"), value)
            return self.frame.put(AFTER, piece)
        row = Named("seg_row", ("M",))
        if plan.split and self.shape.waits:
            value = CutRows(self.frame, self.contract).put_together(value)
        elif plan.split:
            slot = as_tile(-1) - row
            self.frame.put(AFTER, piece_stored(self.frame, self.contract, slot, value, [row < 0]))
        self.emit_store(plan.target, value, extra=[row >= 0] if plan.split else [])

    def whole(self, mask: Tile, axes: TileAxes) -> Tile:
        """A mask of one value as a full tile: the interpreter's atomics take a broadcast view for
        one.
        """
        if not mask.axes or any(self.frame.tile(a) > 1 for a in mask.axes):
            return mask
        return combine([mask, self.everywhere(axes)], "&")

    def everywhere(self, axes: TileAxes) -> Tile:
        if not axes:
            return as_tile("True")
        return apply("tl.full", self.frame.block(axes), 1, "tl.int1", over=axes)

    def emit_store(
        self, target: Access, value: Tile, extra: Sequence[Tile] = (), order: TileAxes = ()
    ) -> None:
        plan, place = self.plan, Access(OUT, target.indices)
        offset = self.reads.offset(place)
        axes = order or union(offset.axes, value.axes)
        value = self.contract.full(value, axes)
        masks = [m for a, m in self.frame.masks.items() if a in axes and a != "K"]
        masks += [*extra, *(index >= 0 for index in self.padded_indices(target))]
        masks += self.reads.ranges(place, inner=True) + self.edges(place)
        mask, out = combine(distinct(masks), "&") if masks else None, self.frame.pointer(OUT)
        address = chain("+", out, offset.over(axes))
        if plan.strategy == "atomic" or self.shape.pieces:
            self.frame.put(AFTER, Effect(self.met(address, value, mask, axes)))
            return
        if plan.base == BASE:
            value = merged(plan.reduce, self.based(place, masks).over(axes), value)
        elif plan.base:
            old = load(address, mask, None if mask is None else 0)
            value = merged(plan.reduce, old.to(f"tl.{plan.accumulator}"), value)
        self.frame.put(AFTER, store(address, value.to(f"{out.name}.dtype.element_ty"), mask))

    def based(self, place: Access, masks: list[Tile]) -> Tile:
        """What a new result is accumulated from. Along dimensions in which it repeats itself it is
        loaded once, and what masks them has nothing to do with it.
        """
        offset = self.reads.offset(place, BASE)
        own = [m for m in distinct(masks) if set(m.axes) <= set(offset.axes)]
        mask = combine(own, "&") if own else None
        read = load(chain("+", self.frame.pointer(BASE), offset), mask, 0 if own else None)
        return self.frame.define("base", read.to(f"tl.{self.plan.accumulator}"), AFTER)

    def met(self, address: Tile, value: Tile, mask: Tile | None, axes: TileAxes) -> Tile:
        """What brings values to places where those of other programs arrive, too. Triton's maximum
        of floats knows no NaN, and sends every atomic.
        """
        reduce = self.plan.reduce
        if reduce != "sum":
            every = self.everywhere(axes)
            where = combine([mask, every], "&") if mask is not None else every
            return apply(f"insum_atomic_{reduce}", address, value, where.over(axes), over=axes)
        if mask is not None:
            mask = self.whole(mask, axes).over(axes)
        return apply("tl.atomic_add", address, value, over=axes, mask=mask, sem='"relaxed"')

    def edges(self, place: Access) -> list[Tile]:
        """Where places end that are walked by several variables of the plan's own: the last of them
        may walk past.
        """
        own = {*dict(self.plan.made)}
        several = [
            dim
            for dim, index in enumerate(place.indices)
            if len(index.terms) > 1 and own.intersection(variables(index))
        ]
        return [self.reads.place(place, dim) < self.reads.length(OUT, dim) for dim in several]

    def padded_indices(self, target: Access) -> list[Tile]:
        """Index values of the target that may be padding: such a point writes nothing."""
        inner = [a for i in target.indices for a in accesses(i) if a.tensor in self.plan.padded]
        return [self.frame.loaded[(a, True)] for a in inner if (a, True) in self.frame.loaded]
