"""Cuts, covers, orders and needs, all ranks in one process, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from insum.distributed import plan
from insum.distributed.cover import minimum_cover, own_matching
from insum.distributed.cuts import nonzero_cuts
from insum.distributed.needs import exchanged, planned
from insum.distributed.ordering import reverse_cuthill_mckee
from insum.formats import COO, BlockCOO


def pairs(seed: int, rows: int, columns: int, share: float) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    found = (torch.rand(rows, columns, generator=made) < share).nonzero()
    return found[:, 0], found[:, 1]


def smallest_cover(rows: list[int], columns: list[int]) -> int:
    """By trying all sets of rows: the columns of what is left are needed."""
    every = sorted(set(rows))
    return min(
        len(chosen) + len({c for r, c in zip(rows, columns) if r not in chosen})
        for size in range(len(every) + 1)
        for chosen in itertools.combinations(every, size)
    )


@pytest.mark.parametrize("seed", range(12))
def test_covers_are_smallest(seed: int) -> None:
    rows, columns = (t.numpy() for t in pairs(seed, 7, 9, 0.05 + 0.03 * seed))
    in_rows, in_columns = minimum_cover(rows, columns)
    assert (in_rows[rows] | in_columns[columns]).all()
    assert in_rows.sum() + in_columns.sum() == smallest_cover(rows.tolist(), columns.tolist())


@pytest.mark.parametrize("share", [0.01, 0.03, 0.2])
def test_own_matching_is_as_large_as_the_cover(share: float) -> None:
    rows, columns = (t.numpy() for t in pairs(1, 120, 100, share))
    pointers = np.searchsorted(rows, np.arange(121))
    found = own_matching(pointers, columns, 100)
    matched = found[found >= 0]
    assert len(set(matched.tolist())) == len(matched)
    edges = set(zip(rows.tolist(), columns.tolist()))
    assert all((row, column) in edges for row, column in enumerate(found.tolist()) if column >= 0)
    assert len(matched) == sum(flags.sum() for flags in minimum_cover(rows, columns))


@pytest.mark.parametrize(("rows", "ranks"), [(1, 3), (7, 2), (50, 8), (3, 8)])
def test_cuts_are_those_of_row_pointers(rows: int, ranks: int) -> None:
    torch.manual_seed(rows)
    every = torch.randint(rows, (100,)).sort().values
    below = lambda row: torch.searchsorted(every, row)
    pointers = below(torch.arange(rows + 1))
    wanted = [int(torch.searchsorted(pointers, 100 * r // ranks)) for r in range(1, ranks)]
    assert nonzero_cuts(below, 100, rows, ranks, every.device) == (0, *wanted, rows)


@pytest.mark.parametrize("cover", [True, False])
@pytest.mark.parametrize("square", [True, False])
def test_plans_of_all_ranks_make_the_product(cover: bool, square: bool) -> None:
    """Every rank does what its plan says, on rows that travel by hand."""
    rows, columns = pairs(5, 40, 40 if square else 30, 0.1)
    row_cuts = (0, 4, 4, 31, 40)
    column_cuts = row_cuts if square else (0, 10, 15, 15, 30)
    x = torch.randint(9, (column_cuts[-1],))
    want = torch.zeros(40, dtype=torch.int64).index_add(0, rows, x[columns])
    plans = planned(rows, columns, row_cuts, column_cuts, cover=cover)
    held = [x[a:b] for a, b in itertools.pairwise(column_cuts)]
    gives = [held[r][p.columns.given].split(p.columns.give) for r, p in enumerate(plans)]
    sums = []
    for rank, one in enumerate(plans):
        total = torch.zeros(sum(one.rows.take), dtype=torch.int64)
        total.index_add_(0, one.out.rows, held[rank][one.out.columns])
        sums.append(total.split(one.rows.take))
    for rank, one in enumerate(plans):
        came = torch.cat([given[rank] for given in gives])
        assert [len(given[rank]) for given in gives] == list(one.columns.take)
        y = torch.zeros(row_cuts[rank + 1] - row_cuts[rank], dtype=torch.int64)
        y.index_add_(0, one.own.rows, held[rank][one.own.columns])
        y.index_add_(0, one.far.rows, came[one.far.columns])
        y.index_add_(0, one.rows.given, torch.cat([made[rank] for made in sums]))
        assert torch.equal(y, want[row_cuts[rank] : row_cuts[rank + 1]])
    assert sum(len(p.rows) for one in plans for p in (one.own, one.far, one.out)) == len(rows)


def test_what_travels_is_least_for_each_pair() -> None:
    rows, columns = pairs(3, 24, 24, 0.15)
    cuts = (0, 8, 16, 24)
    halo = least = 0
    for here, there in itertools.permutations(range(3), 2):
        inside = (rows // 8 == here) & (columns // 8 == there)
        halo += len(columns[inside].unique())
        least += smallest_cover(rows[inside].tolist(), columns[inside].tolist())
    assert exchanged(planned(rows, columns, cuts, cuts, cover=False)) == halo
    assert exchanged(planned(rows, columns, cuts, cuts)) == least < halo


def test_an_order_brings_neighbours_together() -> None:
    torch.manual_seed(0)
    shuffled = torch.randperm(60).numpy()
    ring = np.stack([shuffled, np.roll(shuffled, 1)])
    parts = np.concatenate([ring, ring + 60], 1)
    found = reverse_cuthill_mckee(parts[0], parts[1], 121)
    place = np.empty(121, dtype=np.int64)
    place[found] = np.arange(121)
    assert sorted(found.tolist()) == list(range(121))
    assert np.abs(place[parts[0]] - place[parts[1]]).max() == 2


def test_planned_without_processes() -> None:
    torch.manual_seed(0)
    dense = torch.eye(64)[torch.randperm(64)].roll(1, 0)
    ring = torch.eye(64) + dense + dense.T
    given = plan(COO.from_dense(ring), 4, columns=8)
    near = plan(COO.from_dense(ring), 4, order="rcm", columns=8)
    assert near.rows_exchanged < given.rows_exchanged
    assert near.row_cuts[0] == 0 and near.row_cuts[-1] == 64
    assert sum(near.bytes_received(rank) for rank in range(4)) == near.rows_exchanged * 32
    whole = plan(BlockCOO.from_dense(torch.ones(7, 7), block_shape=(2, 2)), 2, send="rows")
    assert whole.row_cuts == (0, 4, 7) and whole.rows_exchanged == whole.rows_of_all_gather == 7
