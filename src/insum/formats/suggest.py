"""Looks at a sparse tensor and proposes a format, with reasons and with what every candidate would
cost.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum.accepted import ANY_TENSOR, Accepted, explains
from insum.errors import FormatError
from insum.formats import entries as E
from insum.formats import validate as checks
from insum.formats.base import FORMAT, FORMATS, SparseFormat
from insum.formats.coo import COO
from insum.formats.grouped import rows_of
from insum.formats.groupsize import (
    best_group_size,
    count_groups,
    estimate_group_size,
    suggested_group_size,
)
from insum.notebook import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCKS = (8, 16, 32, 64)


@dataclass(frozen=True)
class BlockArithmetic:
    """What full blocks are worth in some precision, as measured on an H200.

    Attributes:
        enough_fill: Blocks pay where this share of their elements is used: dense arithmetic is that
            much cheaper than gathering.
        speed: How fast it is by the side of a block, relative to the others.
        units: What runs it.
    """

    enough_fill: float
    speed: dict[int, float]
    units: str


#: Tensor Cores want large operands. What they cannot take without a loss of precision is best in
#: blocks of 32 at 128 columns and of 64 at 32 columns: 32 is never far from the best.
HALF = BlockArithmetic(0.25, {16: 0.35, 32: 0.65, 64: 1.0}, "Tensor Cores")
FULL = BlockArithmetic(0.18, {16: 0.75, 32: 1.0, 64: 0.95}, "full tiles")
#: Heights of panels: blocks of several rows and one column, for rows that share columns.
PANELS = (16, 32, 64)
#: What a panel costs by its height, in entries of GroupCOO (in half precision, on an H200, where
#: measured: 2.6 at 16, 3.2 at 32, 5.1 at 64), and below which share of their cost it is proposed.
PANEL_COST = {height: 2 + 0.045 * height for height in PANELS}
PANELS_PAY = 0.8
#: Square blocks are read in order, which is worth this many times the elements of panels.
BLOCKS_IN_ORDER = 1.25
#: A row of panels is walked by one program: none may be so many times as long as the mean.
MOST_UNEVEN = 64
#: ELL pays where no more than this share of its slots is padding: it saves the scatter.
LITTLE_PADDING = 0.2
#: A neighbour table pays where this share of it is filled; below, grouping by the other dimension
#: does less work.
FULL_TABLE = 1 / 3


@dataclass(frozen=True)
class Candidate:
    """One format with its options: slots for values, padding share, gathers plus scatters, and
    bytes.
    """

    format: str
    options: dict[str, Any]
    stored: int
    padding: float
    accesses: int
    nbytes: int

    def __str__(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return (
            f"{self.format + '(' + options + ')':<68} {self.stored:>12,} "
            f"{self.padding:>8.1%} {self.accesses:>12,} {self.nbytes:>14,}"
        )


@dataclass(frozen=True, repr=False)
class Suggestion:
    """A proposal that prints its reasons, builds the format and draws the picture.

    Attributes:
        format: The name of the proposed format.
        options: What it is made with.
        reasons: Why, in words.
        candidates: What was compared.
        block_fill: By block size, the share of nonzeros in the blocks that hold any.
        histogram: How many rows have so many entries.
        source: What was looked at.

    Examples:
        >>> print(suggest(torch.eye(4)).reasons[0])
        4 entries in 4 rows: 1.0 on average, 1 at most, 0 rows empty
    """

    format: str
    options: dict[str, Any]
    reasons: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    block_fill: dict[int, float]
    histogram: Tensor = field(repr=False)
    source: COO = field(repr=False)

    def build(self) -> SparseFormat:
        """The tensor in the proposed format."""
        return self.source.to_format(self.format, **self.options)

    def plot(self) -> Figure:
        """Spy plot with the proposed blocks and groups, and the histogram of occupancies. Needs
        matplotlib.
        """
        from insum.formats.picture import draw

        return draw(self.build(), title=f"{self.format}, {self.options}")

    def __str__(self) -> str:
        head = f"{'':<68} {'stored':>12} {'padding':>8} {'accesses':>12} {'bytes':>14}"
        chosen = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        return "\n".join(
            [
                f"{self.format}({chosen})",
                *(f"  - {r}" for r in self.reasons),
                head,
                *map(str, self.candidates),
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def options(held: dict[str, Any]) -> str:
            return ", ".join(f"{k}={v!r}" for k, v in held.items())

        rows = [
            (
                f"{one.format}({options(one.options)})",
                f"{one.stored:,}",
                f"{one.padding:.1%}",
                f"{one.accesses:,}",
                f"{one.nbytes:,}",
            )
            for one in self.candidates
        ]
        shown = table(("candidate", "stored", "padding", "accesses", "bytes"), rows)
        reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in self.reasons)
        chosen = html.escape(f"{self.format}({options(self.options)})")
        return f"<p><b>{chosen}</b></p><ul>{reasons}</ul>{shown}"


SPARSE_ARRAY = Accepted("a sparse array of SciPy", lambda v: hasattr(v, "tocoo"))


@explains(FormatError, x=ANY_TENSOR | FORMAT | SPARSE_ARRAY)
def suggest(x: Any, *, group_dims: int | Sequence[int] | None = None) -> Suggestion:
    """Propose a format for a dense, `torch.sparse` or SciPy tensor, or for a format.

    Args:
        x: A dense tensor, one of `torch.sparse`, an array of SciPy, or a format.
        group_dims: What counts as a row; the first dimension where it is not given.

    Returns:
        A proposal: ``suggestion.build()`` makes the format.

    Examples:
        >>> s = suggest(torch.block_diag(*[torch.ones(16, 16)] * 4))
        >>> s.format, s.options["block_shape"]
        ('BlockGroupCOO', (16, 16))
        >>> s.build()
        BlockGroupCOO(shape=(64, 64), float32, nnz=1024, groups=4, group_size=1, group_dims=(0,),
        block_shape=(16, 16), padding=0.0%, 4,128 bytes, cpu)
    """
    source = _as_coo(x)
    return _Occupancy(source, checks.group_dims(group_dims, source.ndim)).proposal()


def _as_coo(x: Any) -> COO:
    if isinstance(x, SparseFormat):
        return x.to_format(COO)
    return COO.from_torch(x) if isinstance(x, Tensor) else COO.from_scipy(x)


class _Occupancy:
    """Everything that is counted once: occupancies, blocks, candidates."""

    def __init__(self, source: COO, dims: tuple[int, ...]) -> None:
        self.source, self.dims, self.shape = source, dims, source.shape
        order = (*dims, *(d for d in range(source.ndim) if d not in dims))
        self.entries = E.ordered(source.entries(), order)
        self.nnz, self.rows = self.entries.count, math.prod(self.shape[d] for d in dims)
        self.item = 4 if source.values is None else source.values.element_size()
        self.arithmetic = HALF if self.item <= 2 else FULL
        self.occupancy = rows_of(self.entries, dims).counts
        self.longest = int(self.occupancy.max()) if self.occupancy.numel() else 0
        self.blocks = {
            b: self.count_blocks(self.block_shape(b))
            for b in BLOCKS
            if b <= max(self.shape) and self.nnz
        }
        self.panels = {
            height: self.count_blocks((height, 1)) for height in PANELS if self.panels_run(height)
        }
        self.fill = {
            b: self.nnz / (count * self.block_size(b)) for b, (count, _) in self.blocks.items()
        }

    # --- counting ---

    def block_shape(self, b: int) -> tuple[int, ...]:
        """Blocks of the last two dimensions; of a vector, of its one."""
        return (*(1,) * (len(self.shape) - 2), *(b,) * min(2, len(self.shape)))

    def block_size(self, b: int) -> int:
        return math.prod(self.block_shape(b))

    def panels_run(self, height: int) -> bool:
        """Whether Tensor Cores take panels, without a loss of precision, and there are several."""
        in_rows = len(self.shape) == 2 and self.dims == (0,)
        return in_rows and self.item == 2 and self.nnz > 0 and height < self.shape[0]

    def count_blocks(self, shape: tuple[int, ...]) -> tuple[int, Tensor]:
        """How many blocks hold an entry, and how many of them each block row has."""
        order = self.entries.order
        grid = E.grid_of(self.shape, shape)
        coords, _ = E.distinct(
            [c.div(s, rounding_mode="floor") for c, s in zip(self.entries.coords, shape)],
            grid,
            order,
        )
        blocks = E.Entries(coords, None, grid, order)
        return blocks.count, rows_of(blocks, self.dims).counts

    def candidates(self) -> list[Candidate]:
        rank, rest = len(self.shape), len(self.shape) - len(self.dims)
        found = [self.candidate("COO", {}, self.nnz, 2 * self.nnz, rank * self.nnz)]
        slots = self.rows * self.longest
        found.append(self.candidate("ELL", {"group_dims": self.dims}, slots, slots, rest * slots))
        for g in dict.fromkeys(
            (suggested_group_size(self.occupancy, self.rows), best_group_size(self.occupancy))
        ):
            groups = count_groups(self.occupancy, g)
            options = {"group_dims": self.dims, "group_size": g}
            found.append(
                self.candidate(
                    "GroupCOO",
                    options,
                    groups * g,
                    (g + 1) * groups,
                    groups * (len(self.dims) + rest * g),
                )
            )
        found += [self.block_candidate(self.block_shape(b), self.blocks[b][1]) for b in self.blocks]
        return found + [self.block_candidate((h, 1), self.panels[h][1]) for h in self.panels]

    def block_candidate(self, shape: tuple[int, ...], per_row: Tensor) -> Candidate:
        rows = math.prod(-(-self.shape[d] // shape[d]) for d in self.dims)
        g = suggested_group_size(per_row, rows)
        groups = count_groups(per_row, g)
        options = {"block_shape": shape, "group_dims": self.dims, "group_size": g}
        indices = groups * (len(self.dims) + (len(self.shape) - len(self.dims)) * g)
        return self.candidate(
            "BlockGroupCOO", options, groups * g * math.prod(shape), (g + 1) * groups, indices
        )

    def candidate(
        self, format: str, options: dict[str, Any], stored: int, accesses: int, indices: int
    ) -> Candidate:
        padding = 1 - self.nnz / stored if stored else 0.0
        return Candidate(
            format, options, stored, padding, accesses, stored * self.item + 4 * indices
        )

    # --- choosing ---

    def proposal(self) -> Suggestion:
        candidates = self.candidates()
        reasons = [self.about_occupancy()]
        table = self.table() if len(self.shape) > 2 else None
        best, panel = self.best_block(), self.best_panel()
        if panel is not None and best is not None and self.panels_fit(panel, best):
            best = None
        if self.nnz == 0:
            chosen, why = candidates[0], "there is nothing to group"
        elif table is not None:
            candidates.append(table)
            chosen, why = (
                table,
                f"at most one entry along dimension {table.options['dim']} and the table is "
                f"{1 - table.padding:.0%} full: no scatter, no values to group",
            )
        elif best is not None:
            chosen = next(
                c for c in candidates if c.options.get("block_shape") == self.block_shape(best)
            )
            why = (
                f"{self.fill[best]:.0%} of each {best} x {best} block is used: dense blocks "
                f"run on {self.arithmetic.units}"
            )
        elif panel is not None:
            chosen = next(c for c in candidates if c.options.get("block_shape") == (panel, 1))
            shared = self.nnz / self.panels[panel][0]
            why = (
                f"{panel} rows in a row share columns: each is gathered once for {shared:.1f} "
                "entries, and panels run on Tensor Cores"
            )
        elif candidates[1].padding <= LITTLE_PADDING:
            chosen, why = (
                candidates[1],
                f"rows are even: ELL pads {candidates[1].padding:.0%} and needs no scatter",
            )
        else:
            chosen, why = self.grouped(candidates)
        reasons += [why, *self.about_blocks(), *self.about_density()]
        histogram = (
            torch.bincount(self.occupancy)
            if self.occupancy.numel()
            else torch.zeros(1, dtype=torch.int64)
        )
        return Suggestion(
            chosen.format,
            chosen.options,
            tuple(reasons),
            tuple(candidates),
            self.fill,
            histogram,
            self.source,
        )

    def grouped(self, candidates: list[Candidate]) -> tuple[Candidate, str]:
        best = min(
            (c for c in candidates if c.format in ("COO", "GroupCOO")),
            key=lambda c: (c.accesses, c.stored),
        )
        if best.format == "COO" or best.options["group_size"] == 1:
            return (
                candidates[0],
                f"rows hold {self.nnz / max(self.rows, 1):.1f} entries on average: grouping "
                "would only pad",
            )
        g = estimate_group_size(self.nnz, self.rows)
        return (
            best,
            f"uneven rows: groups of {best.options['group_size']} need {best.accesses:,} "
            f"gathers and scatters (COO {2 * self.nnz:,}); g* = {g:.1f}",
        )

    def best_block(self) -> int | None:
        useful = {
            b: self.fill[b] * speed
            for b, speed in self.arithmetic.speed.items()
            if self.fill.get(b, 0.0) >= self.arithmetic.enough_fill
        }
        return max(useful, key=lambda b: useful[b], default=None)

    def best_panel(self) -> int | None:
        cost = {
            height: PANEL_COST[height] * count / self.nnz
            for height, (count, per_row) in self.panels.items()
            if int(per_row.max()) * per_row.numel() <= MOST_UNEVEN * count
        }
        best = min(cost, key=lambda height: cost[height], default=None)
        return best if best is not None and cost[best] <= PANELS_PAY else None

    def panels_fit(self, height: int, block: int) -> bool:
        """Whether panels leave out enough of what blocks hold."""
        in_panels = self.panels[height][0] * height
        return in_panels * BLOCKS_IN_ORDER <= self.blocks[block][0] * self.block_size(block)

    def table(self) -> Candidate | None:
        """The smallest neighbour table, where an ungrouped dimension has at most one entry for
        every choice of the others.
        """
        options: list[Candidate] = []
        for dim in (d for d in range(len(self.shape)) if d not in self.dims):
            rest = tuple(d for d in range(len(self.shape)) if d != dim)
            places = math.prod(self.shape[d] for d in rest)
            if not self.nnz or self.nnz > places or self.nnz < FULL_TABLE * places:
                continue
            key = E.linear([c.long() for c in self.entries.coords], self.shape, rest)
            if torch.unique(key).shape[0] == self.nnz:
                options.append(
                    self.candidate("NeighborTable", {"dim": dim}, places, places, places)
                )
        return min(options, key=lambda c: c.stored, default=None)

    def about_occupancy(self) -> str:
        empty = self.rows - int((self.occupancy > 0).sum())
        mean = self.nnz / max(self.rows, 1)
        return (
            f"{self.nnz:,} entries in {self.rows:,} rows: {mean:.1f} on average, "
            f"{self.longest:,} at most, {empty:,} rows empty"
        )

    def about_blocks(self) -> list[str]:
        return (
            ["block fill: " + ", ".join(f"{fill:.0%} at {b}" for b, fill in self.fill.items())]
            if self.fill
            else []
        )

    def about_density(self) -> list[str]:
        density = self.nnz / max(math.prod(self.shape), 1)
        return (
            [f"{density:.0%} of all elements are entries: a dense tensor may well be faster"]
            if density >= 0.3
            else []
        )


__all__ = ["FORMATS", "Candidate", "Suggestion", "suggest"]
