"""After the contraction: remaining factors, register tiles of small scattered dimensions, and the
store.
"""

from __future__ import annotations

from insum.codegen.arguments import Length, Pointer
from insum.codegen.contract import MERGE, Contract
from insum.codegen.cut_rows import CutRows, piece_stored
from insum.codegen.frame import AFTER, REGISTERS, Frame
from insum.codegen.functions import reduced
from insum.codegen.reads import Reads, distinct
from insum.codegen.values import Val, combine, union
from insum.lang.expr import Access, Affine, Var, accesses
from insum.plan.sizes import BASE, OUT


class Output:
    """Brings a contracted tile to memory: plain stores, atomics, or one register tile for a whole
    scattered dimension.
    """

    def __init__(self, frame: Frame, reads: Reads, contract: Contract) -> None:
        self.frame, self.reads, self.contract = frame, reads, contract
        self.plan, self.shape = frame.plan, frame.shape

    def finish(self, total: Val) -> None:
        plan = self.plan
        value = total
        if plan.roles.dot:
            post = [self.reads.evaluate(plan.factors[f], plan.accumulator) for f in plan.roles.post]
            if post:
                value = self.frame.define(
                    "scaled",
                    Val(
                        combine([total, *post], "*").text,
                        union(total.axes, *(p.axes for p in post)),
                        AFTER,
                    ),
                )
        value = self.sum_unkept(value)
        if plan.onehot >= 0:
            return self.finish_onehot(value)
        if plan.roles.outer:
            return self.finish_outer(value)
        self.store(value)

    def finish_outer(self, value: Val) -> None:
        """Variables looped over outside the contraction: add up what each iteration gives, store
        once after the loops.
        """
        tile = ", ".join(str(self.frame.tile(a)) for a in value.axes)
        zero = (
            f"tl.zeros([{tile}], dtype=tl.{self.plan.accumulator})"
            if tile
            else f"tl.sum(tl.zeros([1], dtype=tl.{self.plan.accumulator}), axis=0)"
        )
        self.frame.stages[0].append(
            f"total = {zero}" + (f"  # ({','.join(value.axes)})" if value.axes else "")
        )
        self.frame.stages[AFTER].append(f"total += {value.text}")
        lines, self.frame.stages[AFTER] = self.frame.stages[AFTER], []
        self.store(Val("total", value.axes))
        self.frame.tail, self.frame.stages[AFTER] = self.frame.stages[AFTER], lines

    def sum_unkept(self, value: Val) -> Val:
        for axis in ("M", "N"):
            if axis in value.axes and self.frame.summed_axis(axis):
                axes = tuple(a for a in value.axes if a != axis)
                value = self.frame.define(
                    "sum",
                    Val(reduced(self.plan.reduce, value.text, value.axes.index(axis)), axes, AFTER),
                )
        return value

    def finish_onehot(self, value: Val) -> None:
        """Add the contraction's tile into the rows of the register tile that its index names."""
        plan = self.plan
        index = self.reads.place(Access(OUT, plan.target.indices), plan.onehot)
        wide = self.frame.tile("I")
        scattered = next((a for a in ("M", "N") if a in index.axes), "")
        other = tuple(a for a in value.axes if a not in ("I", scattered))
        axes = union((*other, "I"))
        tile = ", ".join(str(self.frame.tile(a)) for a in axes)
        self.frame.stages[0].append(f"i_reg = tl.arange(0, {wide})  # (I)")
        self.frame.stages[0].append(
            f"total = tl.zeros([{tile}], dtype=tl.{plan.accumulator})  # ({','.join(axes)})"
        )
        if scattered:
            value = self.contract.full(value, union((scattered, *other)))
        if not value.text.isidentifier():
            value = self.frame.define("tile", value)
        self.frame.stages[AFTER].append(self.onehot_line(value, index, scattered, axes))
        self.store_registers(axes)

    def onehot_line(self, value: Val, index: Val, scattered: str, axes: tuple[str, ...]) -> str:
        plan = self.plan
        masks = " & ".join(
            f"({m.text})" if m.text.startswith("(") else m.text
            for m in ([self.frame.masks[scattered]] if scattered in self.frame.masks else [])
        )
        if not scattered:
            hit = Val(f"(i_reg == {index.text})", ("I",))
            return (
                f"total += tl.where({hit.over(axes)}, {value.over(axes)}, 0)  # ({','.join(axes)})"
            )
        first = axes[0] == "I"
        pick = (
            f"(i_reg[:, None] == {index.text}[None, :])"
            if first
            else f"({index.text}[:, None] == i_reg[None, :])"
        )
        if masks:
            pick += f" & {masks}[None, :]" if first else f" & {masks}[:, None]"
        sizes = [
            self.frame.tile("I"),
            self.frame.tile(scattered),
            *(self.frame.tile(a) for a in axes if a != "I"),
        ]
        if len(axes) == 2 and min(sizes) >= 16 and plan.accumulator == "float32":
            hot = f"tl.where({pick}, 1.0, 0.0)"
            precision = ", input_precision=" + repr(plan.precision or "tf32x3")
            pair = f"{hot}, {value.text}" if first else f"{value.text}, {hot}"
            return f"total = tl.dot({pair}, total{precision})  # ({','.join(axes)})"
        if len(axes) == 1:
            return (
                f"total += tl.sum(tl.where({pick}, "
                f"{value.text}[{'None, :' if first else ':, None'}], 0), "
                f"axis={1 if first else 0})  # ({','.join(axes)})"
            )
        if first:
            return (
                f"total += tl.sum(tl.where(({pick})[:, :, None], {value.text}[None, :, :], "
                f"0), axis=1)  # ({','.join(axes)})"
            )
        return (
            f"total += tl.sum(tl.where(({pick})[None, :, :], {value.text}[:, :, None], 0), "
            f"axis=1)  # ({','.join(axes)})"
        )

    def store_registers(self, axes: tuple[str, ...]) -> None:
        dim = self.plan.onehot
        target = self.plan.target
        saved = self.frame.vars
        self.frame.vars = {**self.frame.vars, REGISTERS: Val("i_reg", ("I",))}
        index = Affine(((1, Var(REGISTERS)),))
        indices = tuple(index if d == dim else i for d, i in enumerate(target.indices))
        lines, self.frame.stages[AFTER] = self.frame.stages[AFTER], []
        inside = [Val(f"(i_reg < {self.frame.arg(Length(OUT, dim))})", ("I",))]
        self.emit_store(
            Access(target.tensor, indices), Val("total", axes), extra=inside, order=axes
        )
        self.frame.tail = self.frame.stages[AFTER]
        self.frame.stages[AFTER], self.frame.vars = lines, saved

    def store(self, value: Val) -> None:
        plan = self.plan
        if self.shape.apart:
            self.frame.line(AFTER, piece_stored(self.frame, self.contract, Val("piece", ()), value))
            return
        if plan.split and self.shape.waits:
            value = CutRows(self.frame, self.contract).put_together(value)
        elif plan.split:
            slot, is_piece = Val("(-1 - seg_row)", ("M",)), Val("(seg_row < 0)", ("M",))
            line = piece_stored(self.frame, self.contract, slot, value, [is_piece])
            self.frame.line(AFTER, line)
        whole = [Val("(seg_row >= 0)", ("M",))] if plan.split else []
        self.emit_store(plan.target, value, extra=whole)

    def whole(self, mask: Val, axes: tuple[str, ...]) -> Val:
        """A mask of one value as a full tile: the interpreter's atomics take a broadcast view for
        one.
        """
        if not mask.axes or any(self.frame.tile(a) > 1 for a in mask.axes):
            return mask
        tile = ", ".join(str(self.frame.tile(a)) for a in axes)
        return combine([mask, Val(f"tl.full([{tile}], 1, tl.int1)", axes)], "&")

    def emit_store(
        self,
        target: Access,
        value: Val,
        extra: list[Val] | None = None,
        order: tuple[str, ...] = (),
    ) -> None:
        plan = self.plan
        place = Access(OUT, target.indices)
        offset = self.reads.offset(place)
        axes = order or union(offset.axes, value.axes)
        value = self.contract.full(value, axes)
        masks = [m for a, m in self.frame.masks.items() if a in axes and a != "K"] + (extra or [])
        masks += [
            Val(f"({value.text} >= 0)", value.axes, value.stage)
            for value in self.padded_indices(target)
        ]
        masks += self.reads.ranges(place, inner=True) + self.edges(place)
        mask = combine(distinct(masks), "&") if masks else None
        pointer = f"{self.frame.arg(Pointer(OUT))} + {offset.over(axes)}"
        masked = f", mask={mask.over(axes)}" if mask else ""
        text = value.text
        if plan.strategy == "atomic" or self.shape.pieces:
            self.frame.line(AFTER, self.met(pointer, text, mask, axes), axes)
            return
        if plan.base == BASE:
            text = MERGE[plan.reduce].format(self.based(place, masks).over(axes), text)
        elif plan.base:
            old = (
                f"tl.load({pointer}{masked}"
                + (", other=0)" if masked else ")")
                + f".to(tl.{plan.accumulator})"
            )
            text = MERGE[plan.reduce].format(old, text)
        kind = f"{self.frame.arg(Pointer(OUT))}.dtype.element_ty"
        self.frame.line(AFTER, f"tl.store({pointer}, ({text}).to({kind}){masked})", axes)

    def based(self, place: Access, masks: list[Val]) -> Val:
        """What a new result is accumulated from. Along dimensions in which it repeats itself it is
        loaded once, and what masks them has nothing to do with it.
        """
        offset = self.reads.offset(place, BASE)
        own = [m for m in distinct(masks) if set(m.axes) <= set(offset.axes)]
        masked = f", mask={combine(own, '&').over(offset.axes)}, other=0" if own else ""
        pointer = f"{self.frame.arg(Pointer(BASE))} + {offset.over(offset.axes)}"
        text = f"tl.load({pointer}{masked}).to(tl.{self.plan.accumulator})"
        return self.frame.define("base", Val(text, offset.axes, AFTER))

    def met(self, pointer: str, text: str, mask: Val | None, axes: tuple[str, ...]) -> str:
        """What brings values to places where those of other programs arrive, too. Triton's maximum
        of floats knows no NaN, and sends every atomic.
        """
        plan = self.plan
        if plan.reduce != "sum":
            tile = ", ".join(str(self.frame.tile(a)) for a in axes)
            every = Val(f"tl.full([{tile}], 1, tl.int1)" if tile else "True", axes)
            where = combine([mask, every], "&") if mask else every
            return f"insum_atomic_{plan.reduce}({pointer}, {text}, {where.over(axes)})"
        masked = f", mask={self.whole(mask, axes).over(axes)}" if mask else ""
        return f'tl.atomic_add({pointer}, {text}{masked}, sem="relaxed")'

    def edges(self, place: Access) -> list[Val]:
        """Where places that are walked by several variables end: the last of them may walk past."""
        if not self.plan.bounds:
            return []
        several = [dim for dim, index in enumerate(place.indices) if len(index.terms) > 1]
        found = [(self.reads.place(place, dim), self.reads.length(OUT, dim)) for dim in several]
        return [Val(f"({v.text} < {length})", v.axes, v.stage) for v, length in found]

    def padded_indices(self, target: Access) -> list[Val]:
        """Index values of the target that may be padding: such a point writes nothing."""
        inner = [a for i in target.indices for a in accesses(i) if a.tensor in self.plan.padded]
        return [self.frame.loaded[(a, True)] for a in inner if (a, True) in self.frame.loaded]
