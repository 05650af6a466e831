"""What a partition costs: who holds what, what travels in a product, and what runs meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from insum.accepted import DTYPE, SIZE, TEXT, takes
from insum.distributed.cuts import Cuts, lengths, owners
from insum.distributed.division import (
    ORDER,
    PARTITION,
    Balance,
    Send,
    check_choices,
    cuts_of,
    spec_of,
)
from insum.distributed.needs import RankPlan, planned
from insum.distributed.partitioned import Partitioned, RankTraffic
from insum.distributed.renumbering import ordered_entries
from insum.formats import SparseFormat
from insum.formats.base import FORMAT
from insum.notebook import table


@dataclass(frozen=True, repr=False)
class PartitionExplanation:
    """The cuts, what each rank holds and what it sends, in numbers and, printed, as a table.

    Attributes:
        shape: Of the matrix.
        row_cuts: Where its rows are cut.
        column_cuts: Where its columns are cut.
        ranks: What each rank holds, sends and receives.
        columns: How wide the dense factor is.
        dtype: The dtype of the dense factor.

    Examples:
        >>> from insum.formats import COO
        >>> found = plan(COO.from_dense(torch.ones(4, 4)), 2)
        >>> found.rows_exchanged, found.rows_of_all_gather
        (4, 4)
    """

    shape: tuple[int, ...]
    row_cuts: Cuts
    column_cuts: Cuts
    ranks: tuple[RankTraffic, ...]
    columns: int
    dtype: torch.dtype

    @property
    def rows_exchanged(self) -> int:
        """Rows that travel in one product, over all ranks."""
        return sum(rank.received for rank in self.ranks)

    @property
    def rows_of_all_gather(self) -> int:
        """Rows that would travel if every rank got the whole dense factor."""
        return self.shape[1] * (len(self.ranks) - 1)

    @property
    def share(self) -> float:
        """Rows that travel, by the number of rows of the matrix."""
        return self.rows_exchanged / max(1, self.shape[0])

    @property
    def bytes_of_row(self) -> int:
        return self.columns * self.dtype.itemsize

    def bytes_received(self, rank: int) -> int:
        """Bytes that a rank receives in one product."""
        return self.ranks[rank].received * self.bytes_of_row

    def __str__(self) -> str:
        width = f"{self.columns} columns of {str(self.dtype).removeprefix('torch.')}"
        lines = [
            f"{' x '.join(map(str, self.shape))} on {len(self.ranks)} rank(s), {width}",
            f"rows that travel in a product: {self.rows_exchanged} ({self.share:.2f} of the rows; "
            f"all-gather: {self.rows_of_all_gather})",
            f"{'rank':>4} {'rows':>9} {'entries':>10} {'own':>10} {'far':>9} {'out':>9} "
            f"{'rows in':>8} {'sums in':>8} {'MB in':>8}",
        ]
        for number, rank in enumerate(self.ranks):
            lines.append(
                f"{number:>4} {rank.rows:>9} {rank.entries:>10} {rank.own:>10} {rank.far:>9} "
                f"{rank.out:>9} {rank.rows_in:>8} {rank.sums_in:>8} "
                f"{self.bytes_received(number) / 1e6:>8.2f}"
            )
        return "\n".join([*lines, *self._overlap()])

    def _overlap(self) -> list[str]:
        if not self.rows_exchanged:
            return ["nothing travels"]
        total = sum(rank.entries for rank in self.ranks)
        meanwhile = sum(rank.own for rank in self.ranks)
        return [
            f"meanwhile: own entries, {meanwhile / max(1, total):.0%} of all, and sums for others "
            "(out); far waits for rows",
        ]

    __repr__ = __str__

    def _repr_html_(self) -> str:
        names = "rows", "entries", "own", "far", "out", "rows_in", "sums_in"
        rows = [
            (
                number,
                *(f"{getattr(rank, name):,}" for name in names),
                f"{self.bytes_received(number) / 1e6:.2f}",
            )
            for number, rank in enumerate(self.ranks)
        ]
        head = ("rank", *(name.replace("_", " ") for name in names), "MB in")
        return table(head, rows, ". ".join([*str(self).splitlines()[:2], *self._overlap()]))


@takes(A=PARTITION, columns=SIZE, dtype=DTYPE.optional)
def explain(
    A: Partitioned, columns: int = 64, dtype: torch.dtype | None = None
) -> PartitionExplanation:
    """The cuts of a partition, rows and bytes that travel in a product, and what overlaps. Nothing
    is sent for it.

    Args:
        A: The partition.
        columns: How wide the dense factor is.
        dtype: Its dtype; that of the values, else torch's default.

    Returns:
        What travels, in numbers; printed, as a table.

    Examples:
        >>> import torch
        >>> from insum.distributed import partition
        >>> from insum.formats import COO
        >>> A = partition(COO.from_dense(torch.eye(3)), mesh)
        >>> explain(A, columns=16).rows_exchanged
        0
    """
    kind = dtype or A.dtype or torch.get_default_dtype()
    return PartitionExplanation(A.shape, A.row_cuts, A.column_cuts, A.traffic, columns, kind)


@takes(format=FORMAT, ranks=SIZE, balance=TEXT, order=ORDER, send=TEXT, columns=SIZE)
def plan(
    format: SparseFormat,
    ranks: int,
    *,
    balance: Balance = "nonzeros",
    order: Any = None,
    send: Send = "fewest",
    columns: int = 64,
) -> PartitionExplanation:
    """What `partition` would do on so many ranks, worked out in this process alone.

    Args:
        format: The matrix.
        ranks: How many ranks there would be.
        balance: As in `partition`.
        order: As in `partition`.
        send: As in `partition`.
        columns: How wide the dense factor is.

    Returns:
        What `explain` would say there.

    Examples:
        >>> from insum.formats import COO
        >>> ring = torch.eye(8) + torch.eye(8).roll(1, 0)
        >>> plan(COO.from_dense(ring), 2, columns=4)
        8 x 8 on 2 rank(s), 4 columns of float32
        rows that travel in a product: 2 (0.25 of the rows; all-gather: 8)
        rank      rows    entries        own       far       out  rows in  sums in    MB in
           0         4          8          7         1         0        1        0     0.00
           1         4          8          7         1         0        1        0     0.00
        meanwhile: own entries, 88% of all, and sums for others (out); far waits for rows
    """
    check_choices(balance, send)
    spec = spec_of(format)
    entries, _ = ordered_entries(format.entries(), spec, order)
    cuts = cuts_of(entries.coords[0], spec, balance, ranks)
    rows, all_columns = (c.long() for c in entries.coords[:2])
    plans = planned(rows, all_columns, cuts.row_units, cuts.column_units, cover=send == "fewest")
    held = torch.bincount(owners(rows, cuts.row_units), minlength=ranks).tolist()
    traffic = tuple(
        traffic_of(one, cuts.block, cuts.rows, cuts.columns, rank) for rank, one in enumerate(plans)
    )
    assert sum(held) == sum(one.entries for one in traffic)
    dtype = format.dtype or torch.get_default_dtype()
    return PartitionExplanation(spec.shape, cuts.rows, cuts.columns, traffic, columns, dtype)


def traffic_of(
    one: RankPlan, block: tuple[int, int], row_cuts: Cuts, column_cuts: Cuts, rank: int
) -> RankTraffic:
    """What one rank holds and sends, in rows."""
    columns = one.columns.in_rows(block[1], column_cuts[rank], column_cuts[-1])
    rows = one.rows.in_rows(block[0], row_cuts[rank], row_cuts[-1])
    return RankTraffic.counted(lengths(row_cuts)[rank], one, columns, rows)
