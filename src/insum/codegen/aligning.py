"""The kernel that copies a factor into rows which widest loads read."""

from __future__ import annotations

from insum.codegen.arguments import Argument, ExtentArgument, Length, Pointer, Stride
from insum.codegen.emit import signature
from insum.codegen.fitting import AT_ONCE, COPIED
from insum.codegen.frame import Kernel, kernel_name
from insum.plan.aligning import Alignment
from insum.plan.plan import Plan
from insum.plan.sizes import ALIGNED


def rows_at_once(alignment: Alignment) -> int:
    """Rows that a program copies.

    >>> rows_at_once(Alignment(0, "In", "c", 128, 64))
    16
    """
    return max(1, COPIED // alignment.row)


def emit_aligning(plan: Plan, alignment: Alignment, units: dict[str, int]) -> Kernel:
    """Copies a factor; ``units``: in which extents are passed."""
    name = kernel_name(plan.statement, f"copies_{alignment.tensor}"[:20])
    unit = units.get(alignment.var, 1)
    extent = ExtentArgument(alignment.var, unit)
    step = -dict(plan.strides)[alignment.tensor].units[0]
    length, stride = Length(alignment.tensor, 0), Stride(alignment.tensor, 0, step)
    pointers = Pointer(alignment.tensor), Pointer(ALIGNED)
    every = (*pointers, length, stride, extent)
    arguments: dict[str, Argument] = {one.name: one for one in every}
    row, tile = alignment.row, alignment.tile
    count, width = rows_at_once(alignment), min(row, AT_ONCE)
    first = "tl.program_id(0)" + (".to(tl.int64)" if plan.wide else "")
    body = [
        f"at = {first} * {count} + tl.arange(0, {count})",
        f"there = at < {length.name}",
        f"wide = {extent.name} * {unit}",
        # beyond the tiles of the product nothing is read
        f"for first in range(0, tl.cdiv(wide, {tile}) * {tile}, {width}):",
        f"    column = first + tl.arange(0, {width})",
        f"    value = tl.load({pointers[0].name} + (at * ({stride.name} * {step}))[:, None] "
        "+ column[None, :], mask=there[:, None] & (column < wide)[None, :], other=0)",
        f"    tl.store({pointers[1].name} + (at * {row})[:, None] + column[None, :], "
        "value, mask=there[:, None])",
    ]
    head = signature(name, arguments, wide=plan.wide)
    lines = [*head, *("    " + line for line in body)]
    return Kernel(name, "\n".join(lines) + "\n", tuple(arguments.values()))
