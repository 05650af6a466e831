"""The kernel that copies a factor into rows which tiles divide."""

from __future__ import annotations

from insum.codegen.arguments import Argument, ExtentArgument, Length, Pointer, Stride
from insum.codegen.emit import signature
from insum.codegen.frame import Kernel, kernel_name
from insum.lang.expr import Access
from insum.plan.fitting import Fit
from insum.plan.plan import Plan
from insum.plan.sizes import FITTED

#: Numbers that a program copies, and of a row at once.
COPIED, AT_ONCE = 2048, 256


def rows_at_once(fit: Fit) -> int:
    """Rows that a program copies.

    >>> rows_at_once(Fit(1, "W", (0, 1, 2), (128, 64), (128, 64)))
    32
    """
    return max(1, COPIED // fit.sides[1])


def emit_fitting(plan: Plan, fit: Fit, units: dict[str, int]) -> Kernel:
    """Copies a factor; ``units``: in which extents are passed."""
    return _Writer(plan, fit, units).kernel(
        kernel_name(plan.statement, f"copies_{fit.tensor}"[:20])
    )


class _Writer:
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
        fit, (rows, row) = self.fit, self.fit.sides
        width, count = min(row, AT_ONCE), rows_at_once(fit)
        source, matrices = self.arg(Pointer(fit.tensor)), "1"
        tall, wide = (self.size(var) for var in self.vars)
        offset = f"(place * {self.stride(fit.dims[-2])})[:, None]"
        if len(fit.dims) == 3:
            matrices = self.arg(Length(fit.tensor, fit.dims[0]))
            offset = f"(matrix * {self.stride(fit.dims[0])})[:, None] + {offset}"
        first = "tl.program_id(0)" + (".to(tl.int64)" if self.plan.wide else "")
        return [
            f"at = {first} * {count} + tl.arange(0, {count})",
            f"matrix = at // {rows}",
            f"place = at % {rows}",
            # beyond the tiles of the product nothing is read
            f"filled = (matrix < {matrices}) & (place < {self.end(tall, fit.ends[0])})",
            f"there = filled & (place < {tall})",
            f"for first in range(0, {self.end(wide, fit.ends[1])}, {width}):",
            f"    column = first + tl.arange(0, {width})",
            f"    value = tl.load({source} + {offset} + column[None, :], "
            f"mask=there[:, None] & (column < {wide})[None, :], other=0)",
            f"    tl.store({self.arg(Pointer(FITTED))} + (at * {row})[:, None] + column[None, :], "
            "value, mask=filled[:, None])",
        ]

    def end(self, size: str, tile: int) -> str:
        return f"tl.cdiv({size}, {tile}) * {tile}"

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
