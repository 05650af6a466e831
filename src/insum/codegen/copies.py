"""Kernels that copy a factor first: into rows which tiles divide (`plan.fitting`), or which widest
loads read (`plan.aligning`).
"""

from __future__ import annotations

from insum.codegen.arguments import Argument, Count, ExtentArgument, Length, Pointer, Stride
from insum.codegen.ir import (
    Assignment,
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
    store,
)
from insum.codegen.kernel import Kernel, kernel_name, kernel_of
from insum.lang.expr import Access
from insum.plan.aligning import Alignment
from insum.plan.fitting import FITTED_ROW, FITTED_ROWS, UNIT, Fit
from insum.plan.plan import Plan
from insum.plan.sizes import FITTED

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
    return _FitWriter(plan, fit, units).kernel(kernel_name(plan, f"copies_{fit.tensor}"[:20]))


#: Rows and columns of the tile that is copied, and what says which of them are to be.
_ROWS, _COLUMNS = ("M",), ("N",)
_BLOCK = (*_ROWS, *_COLUMNS)
_AT, _COLUMN = Named("at", _ROWS), Named("column", _COLUMNS)
_THERE, _FILLED = Named("there", _ROWS), Named("filled", _ROWS)


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
        return kernel_of(name, self.arguments, body, wide=self.plan.wide)

    def body(self) -> list[KernelLine]:
        fit, column = self.fit, _COLUMN
        rows, row = self.arg(Count(FITTED_ROWS)), self.arg(Count(FITTED_ROW)) * UNIT
        source, matrices = self.arg(Pointer(fit.tensor)), as_tile(1)
        tall, wide = (self.size(var) for var in self.vars)
        matrix, place = Named("matrix", _ROWS), Named("place", _ROWS)
        offset = [place * self.stride(fit.dims[-2])]
        if len(fit.dims) == 3:
            matrices = self.arg(Length(fit.tensor, fit.dims[0]))
            offset.insert(0, matrix * self.stride(fit.dims[0]))
        # beyond the tiles of the product nothing is read
        filled = (matrix < matrices) & (place < self.end(tall, fit.ends[0], rows))
        return [
            _first_rows(self.plan, FITTED_AT_ONCE),
            Assignment(matrix.name, _AT // rows),
            Assignment(place.name, _AT % rows),
            Assignment(_FILLED.name, filled),
            Assignment(_THERE.name, _FILLED & (place < tall)),
            loop(
                *("first", 0, self.end(wide, fit.ends[1], row), COLUMNS),
                body=_copied(
                    COLUMNS,
                    chain("+", source, *(one.over(_BLOCK) for one in (*offset, self.columns()))),
                    _THERE & (column < wide),
                    chain("+", self.arg(Pointer(FITTED)), (_AT * row).over(_BLOCK), _COLUMN),
                    _FILLED & (column < row),
                ),
            ),
        ]

    def columns(self) -> Tile:
        unit = dict(self.plan.strides)[self.fit.tensor].units[self.fit.dims[-1]]
        return _COLUMN if unit == 1 else _COLUMN * self.stride(self.fit.dims[-1])

    def end(self, size: Tile, length: int | None, side: Tile) -> Tile:
        return side if length is None else cdiv(size, length) * length

    def arg(self, argument: Argument) -> Named:
        self.arguments.setdefault(argument.name, argument)
        return Named(argument.name)

    def size(self, var: str) -> Tile:
        unit = self.units.get(var, 1)
        name = self.arg(ExtentArgument(var, unit))
        return name if unit == 1 else name * unit

    def stride(self, dim: int) -> Tile:
        unit = dict(self.plan.strides)[self.fit.tensor].units[dim]
        if unit >= 0:
            return as_tile(unit)
        name = self.arg(Stride(self.fit.tensor, dim, -unit))
        return name if unit == -1 else name * -unit


def _first_rows(plan: Plan, count: int) -> Assignment:
    """The rows of a program."""
    number = apply("tl.program_id", 0)
    number = number.to("tl.int64") if plan.wide else number
    return Assignment(_AT.name, number * count + apply("tl.arange", 0, count, over=_ROWS))


def _copied(
    columns: int, source: Tile, read: Tile, target: Tile, written: Tile
) -> list[KernelLine]:
    """A tile of the copy: from where and where to, and which of it."""
    along = Named("first") + apply("tl.arange", 0, columns, over=_COLUMNS)
    return [
        Assignment(_COLUMN.name, along),
        Assignment("value", load(source, read, 0)),
        store(target, Named("value", _BLOCK), written),
    ]


def emit_aligning(plan: Plan, alignment: Alignment, units: dict[str, int]) -> Kernel:
    """Copies a factor; ``units``: in which extents are passed."""
    name = kernel_name(plan, f"copies_{alignment.tensor}"[:20])
    tensor, unit = alignment.tensor, units.get(alignment.var, 1)
    extent = ExtentArgument(alignment.var, unit)
    steps = [-step for step in dict(plan.strides)[tensor].units[:-1]]
    lengths = [Length(tensor, dim) for dim in range(len(steps))]
    strides = [Stride(tensor, dim, step) for dim, step in enumerate(steps)]
    pointers = Pointer(tensor), Pointer(alignment.name)
    every: tuple[Argument, ...] = (*pointers, *lengths, *strides, extent)
    arguments = {one.name: one for one in every}
    row, end = alignment.row, alignment.tile
    count, columns = rows_at_once(row), min(row, AT_ONCE)
    source, target = (Named(one.name) for one in pointers)
    places: list[Tile] = [_AT]
    if len(steps) == 2:  # rows of a matrix follow each other, to as many as there may be
        places = [_AT // alignment.middle, _AT % alignment.middle]
    inside = [place < Named(one.name) for place, one in zip(places, lengths, strict=True)]
    offsets = [
        place * (Named(one.name) * one.unit) for place, one in zip(places, strides, strict=True)
    ]
    column, wide = _COLUMN, Named("wide")
    body: list[KernelLine] = [
        _first_rows(plan, count),
        Assignment(_THERE.name, combine(inside, "&")),
        Assignment(wide.name, Named(extent.name) * unit),
        # beyond the tiles of the product nothing is read
        loop(
            *("first", 0, cdiv(wide, end) * end, columns),
            body=_copied(
                columns,
                chain("+", source, *(one.over(_BLOCK) for one in offsets), _COLUMN),
                _THERE & (column < wide),
                chain("+", target, (_AT * row).over(_BLOCK), _COLUMN),
                _THERE,
            ),
        ),
    ]
    return kernel_of(name, arguments, body, wide=plan.wide)
