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
from insum.codegen.contract import Contract
from insum.codegen.frame import AFTER, Frame
from insum.codegen.functions import identity, merged, reduced
from insum.codegen.ir import (
    Assignment,
    Branch,
    Cast,
    Effect,
    KernelLine,
    Named,
    Tile,
    apply,
    as_tile,
    cdiv,
    chain,
    combine,
    load,
    loop,
    product,
    store,
    union,
    where,
)
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


def slot_offset(frame: Frame, slot: Tile) -> Tile:
    """Where a slot of the workspace lies."""
    offset = slot.to("tl.int64") if frame.plan.wide else slot
    for var in beside_rows(frame.plan):
        offset = combine([offset * frame.size(var), frame.vars[var]], "+")
    return offset


def piece_stored(
    frame: Frame, contract: Contract, slot: Tile, value: Tile, masks: Sequence[Tile] = ()
) -> Effect:
    """What puts a piece of a long sum into its slot of the workspace."""
    offset = slot_offset(frame, slot)
    axes = union(offset.axes, value.axes)
    masks = [*masks, *(m for a, m in frame.masks.items() if a in axes and a != "K")]
    address = chain("+", frame.pointer(WORK), offset.over(axes))
    return store(address, contract.full(value, axes), combine(masks, "&") if masks else None)


#: Of each row of the tile: where its piece lies in the workspace, the row that the last piece puts
#: together, the first piece of it, and how many there are.
SLOT, CUT_ROWS, FIRST, PIECE_COUNT = (
    Named(name, ("M",)) for name in ("cut_slot", "cut_row", "cut_start", "cut_count")
)
ROWS = Named("seg_row", ("M",))
#: Where the marks of the tile's pieces lie, and how far apart those of two slots.
MARKS, MARK_STEP = Named("mark_at"), Named("mark_step")


class CutRows:
    """Writes what brings the pieces of a row together."""

    def __init__(self, frame: Frame, contract: Contract) -> None:
        self.frame, self.contract, self.plan = frame, contract, frame.plan

    def put_together(self, value: Tile) -> Tile:
        """Where a tile has the last piece of a row, the value and the row of all pieces."""
        frame = self.frame
        value = self.contract.full(value, union(("M",), value.axes))
        found = value if isinstance(value, Named) else frame.define("piece", value)
        assert isinstance(found, Named)
        lines: list[KernelLine] = [Assignment(SLOT.name, as_tile(-1) - ROWS)]
        lines.append(piece_stored(frame, self.contract, SLOT, found, [ROWS < 0]))
        lines += self.told()
        lines.append(Branch(_any(CUT_ROWS, "tl.max") >= 0, tuple(self.summed(found))))
        frame.put(AFTER, Branch(_any(ROWS, "tl.min") < 0, tuple(lines)))
        return Named(found.name, found.axes, AFTER)

    def told(self) -> list[KernelLine]:
        """A mark for each piece and each tile of columns, that of its program."""
        frame, roles = self.frame, self.plan.roles
        kept = beside_rows(self.plan)
        count = frame.widened(frame.arg(Count("slot_count")))
        end = product([count, *(frame.size(v) for v in kept)])
        places = [(frame.size(v), frame.vars[v]) for v in kept if v not in roles.n]
        if roles.n:
            columns = cdiv(frame.axis_size(roles.n), frame.config.n)
            places.append((columns, Named("n_tile")))
        marks: Tile = Cast(
            frame.pointer(WORK) + end, "tl.pointer_type(tl.int64)", bitcast=True, axes=(), stage=0
        )
        if places:
            place = places[0][1]
            for count, at in places[1:]:
                place = place * count + at
            marks = chain("+", marks, place)
        step = product(count for count, _ in places)
        last = CUT_ROWS.equals(-1)
        told = apply("insum_tell", MARKS, SLOT * MARK_STEP, last, frame.tile("M"), over=())
        return [
            Assignment(MARKS.name, marks),
            Assignment(MARK_STEP.name, step),
            Effect(told),
        ]

    def summed(self, value: Named) -> list[KernelLine]:
        frame, axes = self.frame, value.axes
        m, threads = frame.tile("M"), 32 * frame.config.warps
        is_last, width = CUT_ROWS >= 0, max(1, threads // m)
        first = load(frame.arg(Pointer(CUT_START)) + SLOT, is_last, 0)
        wait = (MARKS, FIRST, PIECE_COUNT - 1, MARK_STEP, m, width)
        row = self.plan.segment.row if self.plan.segment else ""
        return [
            Assignment(FIRST.name, frame.widened(first)),
            Assignment(PIECE_COUNT.name, where(is_last, SLOT + 1 - FIRST, 0)),
            Effect(apply("insum_wait", *wait, over=())),
            Effect(apply("tl.debug_barrier")),
            *self.total_of(value),
            Assignment(value.name, where(is_last.over(axes), Named("total", axes), value)),
            Assignment(ROWS.name, where(is_last, CUT_ROWS, ROWS)),
            Assignment(f"{row}_i", where(ROWS >= 0, ROWS, 0)),
        ]

    def total_of(self, value: Tile) -> list[KernelLine]:
        """All pieces of each row, some at a time."""
        frame, plan, axes = self.frame, self.plan, value.axes
        size = frame.tile("N") if "N" in axes else 1
        most = AT_ONCE * 32 * frame.config.warps // (frame.tile("M") * size)
        k, wide = max(1, min(MOST_AT_ONCE, most)), union(axes, ("K",))
        start, dtype = identity(plan.reduce, plan.accumulator), f"tl.{plan.accumulator}"
        part, total = Named("part", ("K",)), Named("total", axes)
        masks = [part.over(("M", "K")) < PIECE_COUNT.over(("M", "K"))]
        masks += [m for a, m in frame.masks.items() if a in axes and a == "N"]
        offset = slot_offset(frame, (FIRST + part).grouped())
        address = chain("+", frame.pointer(WORK), offset.over(wide))
        read = load(address, combine(masks, "&"), start, ".cg")
        steps: list[KernelLine] = [
            Assignment(part.name, Named("t") * k + apply("tl.arange", 0, k, over=("K",))),
            Assignment("piece", read),
            Assignment(
                "total",
                merged(plan.reduce, total, reduced(plan.reduce, Named("piece", wide), "K")),
            ),
        ]
        return [
            Assignment("total", apply("tl.full", frame.block(axes), start, over=axes, dtype=dtype)),
            loop("t", 0, cdiv(_any(PIECE_COUNT, "tl.max"), k), body=steps),
        ]


def _any(value: Tile, function: str) -> Tile:
    """The largest, or smallest, of all rows."""
    return apply(function, value, over=(), axis=0)
