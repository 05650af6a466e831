"""Kernels that copy a factor first: into rows which tiles divide (`plan.fitting`), or which widest
loads read (`plan.aligning`).
"""

from __future__ import annotations

from insum.codegen.arguments import Argument, Count, ExtentArgument, Length, Pointer, Stride
from insum.codegen.emit import signature
from insum.codegen.frame import Kernel, kernel_name
from insum.lang.expr import Access
from insum.plan.aligning import Alignment
from insum.plan.fitting import FITTED_ROW, FITTED_ROWS, UNIT, Fit
from insum.plan.plan import Plan
from insum.plan.sizes import ALIGNED, FITTED

#: Numbers that a program copies, and of a row at once.
COPIED, AT_ONCE = 2048, 256
#: Rows that a program copies into whole tiles, and of a row at once: the same for all lengths.
FITTED_AT_ONCE, COLUMNS = 16, 128


def rows_at_once(row: int) -> int:
    """How many rows of a copy, each so long, a program fills.

    >>> rows_at_once(64)
    32
    """
    return max(1, COPIED // row)


def emit_fitting(plan: Plan, fit: Fit, units: dict[str, int]) -> Kernel:
    """Copies a factor; ``units``: in which extents are passed."""
    return _FitWriter(plan, fit, units).kernel(
        kernel_name(plan.statement, f"copies_{fit.tensor}"[:20])
    )


class _FitWriter:
    """Writes the kernel of one copy."""

    def __init__(self, plan: Plan, fit: Fit, units: dict[str, int]) -> None:
        read = plan.factors[fit.place]
        assert isinstance(read, Access)
        self.plan, self.fit, self.units = plan, fit, units
        self.vars = [str(read.indices[dim].var) for dim in fit.dims[-2:]]
        self.arguments: dict[str, Argument] = {}

    def kernel(self, name: str) -> Kernel:
        body = self.body()
        head = signature(name, self.arguments, wide=self.plan.wide)
        lines = [*head, *("    " + line for line in body)]
        return Kernel(name, "\n".join(lines) + "\n", tuple(self.arguments.values()))

    def body(self) -> list[str]:
        fit = self.fit
        rows, row = self.arg(Count(FITTED_ROWS)), f"({self.arg(Count(FITTED_ROW))} * {UNIT})"
        source, matrices = self.arg(Pointer(fit.tensor)), "1"
        tall, wide = (self.size(var) for var in self.vars)
        offset = f"(place * {self.stride(fit.dims[-2])})[:, None]"
        if len(fit.dims) == 3:
            matrices = self.arg(Length(fit.tensor, fit.dims[0]))
            offset = f"(matrix * {self.stride(fit.dims[0])})[:, None] + {offset}"
        first = "tl.program_id(0)" + (".to(tl.int64)" if self.plan.wide else "")
        return [
            f"at = {first} * {FITTED_AT_ONCE} + tl.arange(0, {FITTED_AT_ONCE})",
            f"matrix = at // {rows}",
            f"place = at % {rows}",
            # beyond the tiles of the product nothing is read
            f"filled = (matrix < {matrices}) & (place < {self.end(tall, fit.ends[0], rows)})",
            f"there = filled & (place < {tall})",
            f"for first in range(0, {self.end(wide, fit.ends[1], row)}, {COLUMNS}):",
            f"    column = first + tl.arange(0, {COLUMNS})",
            f"    value = tl.load({source} + {offset} + {self.columns()}[None, :], "
            f"mask=there[:, None] & (column < {wide})[None, :], other=0)",
            f"    tl.store({self.arg(Pointer(FITTED))} + (at * {row})[:, None] + column[None, :], "
            f"value, mask=filled[:, None] & (column < {row})[None, :])",
        ]

    def columns(self) -> str:
        stride = self.stride(self.fit.dims[-1])
        return "column" if stride == "1" else f"(column * {stride})"

    def end(self, size: str, tile: int | None, side: str) -> str:
        return side if tile is None else f"tl.cdiv({size}, {tile}) * {tile}"

    def arg(self, argument: Argument) -> str:
        self.arguments.setdefault(argument.name, argument)
        return argument.name

    def size(self, var: str) -> str:
        unit = self.units.get(var, 1)
        name = self.arg(ExtentArgument(var, unit))
        return name if unit == 1 else f"({name} * {unit})"

    def stride(self, dim: int) -> str:
        unit = dict(self.plan.strides)[self.fit.tensor].units[dim]
        if unit >= 0:
            return str(unit)
        name = self.arg(Stride(self.fit.tensor, dim, -unit))
        return name if unit == -1 else f"({name} * {-unit})"


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
    count, width = rows_at_once(row), min(row, AT_ONCE)
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
