"""What each rank needs of the others for one product, found once for each pattern.

Plain functions of one rank's entries and of what the others ask for: `needs_of` says what a rank
asks for, `plan_of` what follows from all that is asked. The ranks of a group send what is asked for
to each other between the two; tests and `planned` run all ranks in one process.

Everything counts in units: single rows, or blocks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from insum.distributed.cover import minimum_cover
from insum.distributed.cuts import Cuts, owners


@dataclass(frozen=True, eq=False)
class Asked:
    """What one rank asks of another: rows of the dense factor, and sums for rows of the result, for
    which it hands over its entries ``moved`` (numbers of its own).
    """

    wanted: Tensor
    summed: Tensor
    moved: Tensor


@dataclass(frozen=True, eq=False)
class Needs:
    """What one rank asks of every rank, itself included, and which of its entries are multiplied at
    once (``own``) or when rows have come (``far``).
    """

    asked: tuple[Asked, ...]
    own: Tensor
    far: Tensor

    @property
    def halo(self) -> Tensor:
        """All rows of the dense factor that come from others, by number and so by owner."""
        return torch.cat([one.wanted for one in self.asked])


def needs_of(rows: Tensor, columns: Tensor, rank: int, column_cuts: Cuts, *, cover: bool) -> Needs:
    """What the owner of some rows asks for, given all entries of these rows.

    Args:
        rows: Of each entry, all of them this rank's.
        columns: Of each entry.
        rank: Whose rows they are.
        column_cuts: Where columns are cut.
        cover: Choose what travels by a minimum vertex cover; else rows of the dense factor do.
    """
    holder = owners(columns, column_cuts)
    asked, far = [], [torch.empty(0, dtype=torch.int64, device=rows.device)]
    for other in range(len(column_cuts) - 1):
        here = (holder == other).nonzero().squeeze(1)
        if other == rank or not here.numel():
            asked.append(_nothing(rows))
            continue
        given = _moved(rows[here], columns[here]) if cover else torch.zeros_like(here).bool()
        moved, kept = here[given], here[~given]
        asked.append(Asked(torch.unique(columns[kept]), torch.unique(rows[moved]), moved))
        far.append(kept)
    own = (holder == rank).nonzero().squeeze(1)
    return Needs(tuple(asked), own, torch.cat(far))


def _moved(rows: Tensor, columns: Tensor) -> Tensor:
    """Which entries between two ranks are handed over: those whose column does not travel."""
    kinds = (torch.unique(ends, return_inverse=True)[1] for ends in (rows, columns))
    row, column = (kind.cpu().numpy().astype(np.int64) for kind in kinds)
    in_columns = minimum_cover(row, column)[1]
    return torch.from_numpy(~in_columns[column]).to(rows.device)


def _nothing(like: Tensor) -> Asked:
    none = torch.empty(0, dtype=torch.int64, device=like.device)
    return Asked(none.to(like.dtype), none.to(like.dtype), none)


@dataclass(frozen=True, eq=False)
class UnitExchange:
    """Units that one rank gives, by number among its own and ordered by who gets them; those that
    it takes, by number among all; and how many it gives to and takes from each.
    """

    given: Tensor
    taken: Tensor
    give: tuple[int, ...]
    take: tuple[int, ...]

    def in_rows(self, size: int, first: int, total: int) -> UnitExchange:
        """The same where a unit is ``size`` rows, but for the last of ``total``; ``first`` is this
        rank's first row.
        """
        if size == 1:
            return self
        given, give = _in_rows(self.given, self.give, size, total - first)
        taken, take = _in_rows(self.taken, self.take, size, total)
        return UnitExchange(given, taken, give, take)


def _in_rows(
    units: Tensor, counts: tuple[int, ...], size: int, limit: int
) -> tuple[Tensor, tuple[int, ...]]:
    every = units.long()[:, None] * size + torch.arange(size, device=units.device)
    kept = every < limit
    sizes = torch.split(kept.sum(1), list(counts))
    return every[kept], tuple(int(one.sum()) for one in sizes)


@dataclass(frozen=True, eq=False)
class Places:
    """Entries of one part of the matrix: row, column, in the numbering of that part."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank does: three parts of the matrix, and two exchanges.

    ``own`` is between its rows and its columns; ``far`` between its rows and rows that come, in the
    order in which they come; ``out`` between rows of others, for which it sums, and its columns.
    ``columns`` brings rows of the dense factor, ``rows`` leads from the owner of a row of the
    result to those that sum for it: sums travel the other way.
    """

    own: Places
    far: Places
    out: Places
    columns: UnitExchange
    rows: UnitExchange


@dataclass(frozen=True, eq=False)
class HandedOver:
    """What one rank got from another: what it is asked for, and the entries that came with it."""

    wanted: Tensor
    summed: Tensor
    rows: Tensor
    columns: Tensor


def plan_of(
    rows: Tensor,
    columns: Tensor,
    needs: Needs,
    came: Sequence[HandedOver],
    rank: int,
    row_cuts: Cuts,
    column_cuts: Cuts,
) -> RankPlan:
    """What a rank does, from its entries, what it asks for and what came from each rank."""
    first_row, first_column = row_cuts[rank], column_cuts[rank]
    halo, foreign = needs.halo, torch.cat([one.summed for one in came])
    out_rows = torch.cat([one.rows for one in came])
    out_columns = torch.cat([one.columns for one in came])
    summed = torch.cat([one.summed for one in needs.asked])
    return RankPlan(
        own=Places(rows[needs.own] - first_row, columns[needs.own] - first_column),
        far=Places(rows[needs.far] - first_row, torch.searchsorted(halo, columns[needs.far])),
        out=Places(torch.searchsorted(foreign, out_rows), out_columns - first_column),
        columns=UnitExchange(
            torch.cat([one.wanted for one in came]) - first_column,
            halo,
            tuple(len(one.wanted) for one in came),
            tuple(len(one.wanted) for one in needs.asked),
        ),
        rows=UnitExchange(
            summed - first_row,
            foreign,
            tuple(len(one.summed) for one in needs.asked),
            tuple(len(one.summed) for one in came),
        ),
    )


def planned(
    rows: Tensor, columns: Tensor, row_cuts: Cuts, column_cuts: Cuts, *, cover: bool = True
) -> list[RankPlan]:
    """The plans of all ranks, from all entries, in one process.

    >>> rows, columns = torch.tensor([0, 0, 0, 3]), torch.tensor([0, 2, 3, 1])
    >>> first, second = planned(rows, columns, (0, 2, 4), (0, 2, 4))
    >>> first.rows.give, first.columns.take  # one sum instead of two rows
    ((0, 1), (0, 0))
    """
    ranks = len(row_cuts) - 1
    owner = owners(rows, row_cuts)
    held = [(owner == rank).nonzero().squeeze(1) for rank in range(ranks)]
    needs = [
        needs_of(rows[mine], columns[mine], rank, column_cuts, cover=cover)
        for rank, mine in enumerate(held)
    ]
    plans = []
    for rank, mine in enumerate(held):
        came = []
        for source, asked in zip(held, (one.asked[rank] for one in needs)):
            moved = source[asked.moved]
            came.append(HandedOver(asked.wanted, asked.summed, rows[moved], columns[moved]))
        plans.append(
            plan_of(rows[mine], columns[mine], needs[rank], came, rank, row_cuts, column_cuts)
        )
    return plans


def exchanged(plans: Sequence[RankPlan]) -> int:
    """Units that travel in one product, over all ranks."""
    return sum(sum(plan.columns.take) + sum(plan.rows.give) for plan in plans)
