"""The pattern of a statement: which places of a factor each place of the result takes from.

One panel for each index of a factor that is looked up in a tensor, or that is a window; of a
statement without any, the first index of the result against the summed one. Places are put
together into at most `CELLS` cells along a side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from insum.lang.expr import Access, Affine, Statement, Var, accesses, variables
from insum.lang.parser import parse

CELLS = 48
#: Values of a variable that are followed, and of one inside of a window, which would be too thin.
MOST, WINDOW = 1024, 24


@dataclass(frozen=True)
class Panel:
    """Two indices, and the tensors that they are indices of."""

    target: str
    row: Affine
    tensor: str
    column: Affine


def panels_of(statement: str, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Every panel of a statement, with its cells as runs: row, first column, length."""
    return [_drawn(panel, tensors, parse(statement)) for panel in _panels(parse(statement))]


def _panels(statement: Statement) -> list[Panel]:
    left, factors = statement.target, list(accesses(statement.value, nested=False))
    found = {
        (str(row), str(column)): Panel(left.tensor, row, factor.tensor, column)
        for factor in factors
        for column in factor.indices
        if column.var is None
        if (row := _partner(left, column))
    }
    if found:
        return list(found.values())
    for row in left.indices:
        if row.var is None:
            return [Panel(left.tensor, row, factors[0].tensor, factors[0].indices[0])]
    summed = [(f, i) for f in factors for i in f.indices if i.var not in variables(left)]
    factor, column = (summed or [(factors[0], factors[0].indices[0])])[0]
    return [Panel(left.tensor, left.indices[0], factor.tensor, column)]


def _partner(left: Access, column: Affine) -> Affine:
    """The index of the result that goes with one of a factor: of the same variables, looked up
    rather than plain.
    """
    shared = [row for row in left.indices if {*variables(row)} & {*variables(column)}]
    return next((row for row in shared if row.var is None), (shared or list(left.indices))[0])


def _drawn(panel: Panel, tensors: Mapping[str, Tensor], statement: Statement) -> dict[str, Any]:
    names = dict.fromkeys((*variables(panel.row), *variables(panel.column)))
    looked_up = any(True for i in (panel.row, panel.column) for _ in accesses(i))
    most = MOST if looked_up else WINDOW
    sizes = [min(most, _extent(name, tensors, statement)) for name in names]
    grids = torch.meshgrid(*(torch.arange(n) for n in sizes), indexing="ij")
    known = {name: grid.reshape(-1) for name, grid in zip(names, grids)}
    rows, columns = (_places(i, known, tensors) for i in (panel.row, panel.column))
    there = (rows >= 0) & (columns >= 0)
    return {
        "rows": f"{panel.target}[{panel.row}]",
        "columns": f"{panel.tensor}[{panel.column}]",
        **_cells(rows[there], columns[there]),
    }


def _extent(name: str, tensors: Mapping[str, Tensor], statement: Statement) -> int:
    for access in (*accesses(statement.target), *accesses(statement.value)):
        for dim, index in enumerate(access.indices):
            if index.var == name and access.tensor in tensors:
                return tensors[access.tensor].shape[dim]
    return WINDOW  # of a window alone, whose picture is the same for every size


def _places(index: Affine, known: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
    total = torch.full_like(next(iter(known.values())), index.offset)
    for factor, atom in index.terms:
        match atom:
            case Var(name):
                total = total + factor * known[name]
            case Access(name, indices):
                places = tuple(_places(i, known, tensors) for i in indices)
                total = total + factor * tensors[name].cpu().long()[places]
    return total


def _cells(rows: Tensor, columns: Tensor) -> dict[str, Any]:
    high, wide = int(rows.max()) + 1, int(columns.max()) + 1
    size = min(CELLS, high), min(CELLS, wide)
    grid = torch.zeros(size, dtype=torch.bool)
    grid[rows * size[0] // high, columns * size[1] // wide] = True
    runs = []
    for row, line in enumerate(grid.tolist()):
        start = 0
        for filled, run in groupby(line):
            length = len(list(run))
            if filled:
                runs.append(f"{row},{start},{length}")
            start += length
    return {"size": size, "runs": " ".join(runs)}
