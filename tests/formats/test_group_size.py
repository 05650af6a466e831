"""Section 4.2 of the paper: F(g), g* and padding against tables worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from insum.formats import (
    COO,
    ELL,
    BlockGroupCOO,
    GroupCOO,
    accesses_by_group_size,
    best_group_size,
    count_accesses,
    count_groups,
    count_padding,
    estimate_group_size,
    neighbouring_powers,
    suggested_group_size,
)

# occupancies: (groups, F, padding) for g = 1, 2, 3, ...
TABLES = {
    (3, 1, 1, 2): [(7, 14, 0), (5, 15, 3), (4, 16, 5)],
    (4, 4, 4): [(12, 24, 0), (6, 18, 0), (6, 24, 6), (3, 15, 0)],
    (5, 0, 1): [(6, 12, 0), (4, 12, 2), (3, 12, 3), (3, 15, 6), (2, 12, 4)],
    (6,): [(6, 12, 0), (3, 9, 0), (2, 8, 0), (2, 10, 2), (2, 12, 4), (1, 7, 0)],
}
#: The paper's matrix: rows of 3, 1, 1 and 2.
PAPER = torch.tensor([[1.0, 2, 3, 0], [4, 0, 0, 0], [0, 5, 0, 0], [0, 0, 6, 7]])


@pytest.mark.parametrize("occupancy", TABLES, ids=str)
def test_tables(occupancy: tuple[int, ...]) -> None:
    for g, (groups, accesses, padding) in enumerate(TABLES[occupancy], start=1):
        assert (
            count_groups(occupancy, g),
            count_accesses(occupancy, g),
            count_padding(occupancy, g),
        ) == (groups, accesses, padding)
    assert accesses_by_group_size(occupancy).tolist() == [row[1] for row in TABLES[occupancy]]


def test_estimate() -> None:
    assert estimate_group_size(7, 4) == pytest.approx(math.sqrt(1.75))
    assert estimate_group_size(0, 4) == estimate_group_size(0, 0) == 1.0
    assert [neighbouring_powers(g) for g in (0.2, 1, 1.3, 2, 3, 4, 5.6, 100)] == [
        (1,),
        (1,),
        (1, 2),
        (2,),
        (2, 4),
        (4,),
        (4, 8),
        (64, 128),
    ]


def test_choices() -> None:
    assert (
        best_group_size([3, 1, 1, 2]) == 1
        and best_group_size([4, 4, 4]) == 4
        and best_group_size([6]) == 6
    )
    # four sizes cost 12; the largest has the fewest scatters
    assert best_group_size([5, 0, 1]) == 5
    assert best_group_size([]) == best_group_size([0, 0]) == 1
    assert suggested_group_size([3, 1, 1, 2]) == 1  # g* = 1.32: F(1) = 14 < F(2) = 15
    # g* = 3: F(2) = F(4) = 60, and 4 has fewer scatters
    assert suggested_group_size([9, 9, 9, 9]) == 4
    assert suggested_group_size([]) == 1


@pytest.mark.parametrize(("size", "groups", "padded"), [(1, 7, 0), (2, 5, 3), (3, 4, 5)])
def test_the_papers_example(size: int, groups: int, padded: int) -> None:
    a = GroupCOO.from_dense(PAPER, group_dims=0, group_size=size)
    assert a.positions == (groups, size) and a.stored - a.nnz == padded
    if size == 1:
        coo = COO.from_dense(PAPER)
        assert torch.equal(a.group_indices[0], coo.indices[0]) and torch.equal(
            a.slot_indices[0][:, 0], coo.indices[1]
        )
    if size == 3:
        ell = ELL.from_dense(PAPER)
        assert torch.equal(a.slot_indices[0], ell.indices[0]) and a.group_indices[0].tolist() == [
            0,
            1,
            2,
            3,
        ]
        assert a.values is not None and ell.values is not None and torch.equal(a.values, ell.values)


def test_group_size_by_word() -> None:
    x = torch.zeros(16, 64)
    x[:, :16] = 1
    assert (
        GroupCOO.from_dense(x).group_size == 4
        and GroupCOO.from_dense(x, group_size="exact").group_size == 16
    )
    # four block rows of four blocks
    assert BlockGroupCOO.from_dense(x, block_shape=4).group_size == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30))
def test_all_sizes_at_once_against_the_definition(occupancy: list[int]) -> None:
    want = [
        (g + 1) * sum(-(-o // g) for o in occupancy)
        for g in range(1, max(occupancy, default=0) + 1)
    ]
    assert accesses_by_group_size(occupancy).tolist() == want
    best = best_group_size(occupancy)
    assert best == max((g for g, f in enumerate(want, start=1) if f == min(want)), default=1)


def test_many_group_sizes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    occupancy = torch.tensor([1000, 3, 517, 64, 64, 1])
    whole = accesses_by_group_size(occupancy)
    monkeypatch.setattr("insum.formats.groupsize._CHUNK", 100)
    assert torch.equal(accesses_by_group_size(occupancy), whole)


def test_one_row_of_a_million() -> None:
    assert best_group_size(torch.tensor([1_000_000])) == 1_000_000
