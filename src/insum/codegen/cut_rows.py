"""The workspace for pieces of a sum, and rows that were cut into pieces.

Pieces of a row are in several programs. Each stores what it has in the workspace; that of the last
piece, which is started behind all others, waits for them and takes the sum of all in their order.
That they are there is told by marks behind the pieces. Memory for them comes as it is: the mark is
a number that nothing else writes, and whoever waited for it takes it away. So a workspace
belongs to one call, and calls on several streams, or graphs that are replayed, share nothing.

Nobody waits for ever: a program waits only for those of lower numbers, and devices start programs
in the order of their numbers, as the scans of CUDA's own libraries rely on. And nobody reads too
early: a mark is released behind a barrier, and NVIDIA's barriers order the stores of all warps for
whoever acquires the mark, too. AMD's do not: there the sums are a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from insum.codegen.arguments import CUT_START, Count, Pointer
from insum.codegen.contract import IDENTITY, MERGE, Contract
from insum.codegen.frame import AFTER, Frame
from insum.codegen.functions import reduced
from insum.codegen.values import Val, combine, union
from insum.lang.expr import variables
from insum.plan.plan import Plan
from insum.plan.sizes import WORK

#: Numbers of a thread that are read at once where pieces are summed, and pieces at most.
AT_ONCE, MOST_AT_ONCE = 32, 8


def beside_rows(plan: Plan) -> list[str]:
    """What a slot of the workspace is a dense table over: the kept variables, but for the row,
    where it is a piece of one.
    """
    row = plan.segment.row if plan.segment and plan.segment.tiled else ""
    return [v for v in dict.fromkeys(variables(plan.target)) if v != row]


def slot_offset(frame: Frame, slot: Val) -> Val:
    """Where a slot of the workspace lies."""
    offset = Val(slot.text + (".to(tl.int64)" if frame.plan.wide else ""), slot.axes, 0)
    for var in beside_rows(frame.plan):
        row = Val(f"({offset.text}) * {frame.size(var)}", offset.axes)
        offset = combine([row, frame.vars[var]], "+")
    return offset


def piece_stored(
    frame: Frame, contract: Contract, slot: Val, value: Val, masks: Sequence[Val] = ()
) -> str:
    """The line that puts a piece of a long sum into its slot of the workspace."""
    offset = slot_offset(frame, slot)
    axes = union(offset.axes, value.axes)
    masks = [*masks, *(m for a, m in frame.masks.items() if a in axes and a != "K")]
    masked = f", mask={combine(masks, '&').over(axes)}" if masks else ""
    place = f"{frame.arg(Pointer(WORK))} + {offset.over(axes)}"
    return f"tl.store({place}, {contract.full(value, axes).text}{masked})  # ({','.join(axes)})"


class CutRows:
    """Writes what brings the pieces of a row together."""

    def __init__(self, frame: Frame, contract: Contract) -> None:
        self.frame, self.contract, self.plan = frame, contract, frame.plan

    def put_together(self, value: Val) -> Val:
        """Where a tile has the last piece of a row, the value and the row of all pieces."""
        frame = self.frame
        value = self.contract.full(value, union(("M",), value.axes))
        if not value.text.isidentifier():
            value = frame.define("piece", value)
        slot, is_piece = Val("cut_slot", ("M",)), Val("(seg_row < 0)", ("M",))
        lines = ["cut_slot = -1 - seg_row  # (M)"]
        lines.append(piece_stored(frame, self.contract, slot, value, [is_piece]))
        lines += self.told()
        lines += ["if tl.max(cut_row, axis=0) >= 0:", *_indented(self.summed(value))]
        frame.line(AFTER, "if tl.min(seg_row, axis=0) < 0:")
        for line in _indented(lines):
            frame.line(AFTER, line)
        return Val(value.text, value.axes, AFTER)

    def told(self) -> list[str]:
        """A mark for each piece and each tile of columns, that of its program."""
        frame, roles = self.frame, self.plan.roles
        kept = beside_rows(self.plan)
        end = " * ".join(
            [frame.widened(frame.arg(Count("slot_count"))), *(frame.size(v) for v in kept)]
        )
        places = [(frame.size(v), frame.vars[v].text) for v in kept if v not in roles.n]
        if roles.n:
            tiles = f"tl.cdiv({frame.axis_size(roles.n)}, {frame.config.n})"
            places.append((tiles, "n_tile"))
        place = ""
        for count, at in places:
            place = f"({place}) * {count} + {at}" if place else at
        marks = f"({frame.arg(Pointer(WORK))} + {end}).to(tl.pointer_type(tl.int64), bitcast=True)"
        return [
            f"mark_at = {marks}" + (f" + {place}" if place else ""),
            f"mark_step = {' * '.join(count for count, _ in places) or '1'}",
            f"insum_tell(mark_at, cut_slot * mark_step, cut_row == -1, {frame.tile('M')})",
        ]

    def summed(self, value: Val) -> list[str]:
        frame, plan, axes = self.frame, self.plan, value.axes
        m, threads = frame.tile("M"), 32 * frame.config.warps
        size = frame.tile("N") if "N" in axes else 1
        k = max(1, min(MOST_AT_ONCE, AT_ONCE * threads // (m * size)))
        loaded = f"tl.load({frame.arg(Pointer(CUT_START))} + cut_slot, mask=cut_row >= 0, other=0)"
        lines = [
            f"cut_start = {frame.widened(loaded)}  # (M)",
            "cut_count = tl.where(cut_row >= 0, cut_slot + 1 - cut_start, 0)  # (M)",
        ]
        width = max(1, threads // m)
        lines.append(f"insum_wait(mark_at, cut_start, cut_count - 1, mark_step, {m}, {width})")
        identity = IDENTITY[plan.reduce](plan.accumulator)
        tile = ", ".join(str(frame.tile(a)) for a in axes)
        wide = union(axes, ("K",))
        there = Val("(part[None, :] < cut_count[:, None])", ("M", "K"))
        masks = [there, *(m for a, m in frame.masks.items() if a in axes and a == "N")]
        offset = slot_offset(frame, Val("(cut_start[:, None] + part[None, :])", ("M", "K")))
        read = (
            f"tl.load({frame.arg(Pointer(WORK))} + {offset.over(wide)}, "
            f'mask={combine(masks, "&").over(wide)}, other={identity}, cache_modifier=".cg")'
        )
        total = MERGE[plan.reduce].format("total", reduced(plan.reduce, "piece", 1))
        last = Val("(cut_row >= 0)", ("M",)).over(axes)
        row = plan.segment.row if plan.segment else ""
        return [
            *lines,
            "tl.debug_barrier()",
            f"total = tl.full([{tile}], {identity}, dtype=tl.{plan.accumulator})",
            f"for t in range(0, tl.cdiv(tl.max(cut_count, axis=0), {k})):",
            f"    part = t * {k} + tl.arange(0, {k})  # (K)",
            f"    piece = {read}  # ({','.join(wide)})",
            f"    total = {total}  # ({','.join(axes)})",
            f"{value.text} = tl.where({last}, total, {value.text})",
            "seg_row = tl.where(cut_row >= 0, cut_row, seg_row)  # (M)",
            f"{row}_i = tl.where(seg_row >= 0, seg_row, 0)  # (M)",
        ]


def _indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]
