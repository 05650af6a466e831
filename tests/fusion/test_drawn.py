"""Drawn programs: gathers, views, products and scatters in random order, some of them with traps,
agree with eager in values and gradients, whatever is fused.
"""

from __future__ import annotations

import pytest
import torch

from insum.testing import drawn_programs
from insum.testing.drawn_programs import DrawnOutcome, compare, drawn, run_drawn


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
@pytest.mark.filterwarnings("ignore")
def test_drawn_programs(block: int) -> None:
    seeds = range(8 * block, 8 * block + 8)
    assert sum(max(0, run_drawn(seed, traps=block > 0)) for seed in seeds) >= 8


def test_what_is_wrong_is_found() -> None:
    right = DrawnOutcome((torch.ones(2), torch.zeros(())))
    compare(right, right)
    for wrong in (
        DrawnOutcome((torch.ones(2), torch.ones(()))),
        DrawnOutcome((torch.ones(2).double(), torch.zeros(()))),
        DrawnOutcome((), failed=True),
    ):
        with pytest.raises(AssertionError):
            compare(wrong, right)


def test_every_trap_is_drawn() -> None:
    every = [drawn(seed) for seed in range(600)]
    traps = {number for one in every for trap, number in one.changes if trap}
    assert traps == set(range(len(drawn_programs.CHANGES_WITH_TRAPS)))
    assert {one.edges for one in every} == set(range(len(drawn_programs.EDGES_WITH_TRAPS)))
    assert any(one.beyond for one in every)
