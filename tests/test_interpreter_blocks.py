"""Blocks of any shape on matrix instructions, in Triton's interpreter: tiles that end inside of
blocks, values and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import insum
from applications import block_spmm, relative_error
from insum.plan.config import Config
from kernels import ONLY_FUSED, lookup, poison_new_memory, run

pytestmark = pytest.mark.interpreter

#: Blocks that divide no tile on one side or on both, and some that do.
BLOCKS = [(8, 8), (12, 12), (20, 20), (24, 40), (16, 48), (8, 64), (64, 8), (28, 20), (9, 21)]


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    poison_new_memory(monkeypatch)
    with insum.settings(**ONLY_FUSED, scatter="segment"):  # as large matrices have it
        yield


@pytest.mark.parametrize("group", [0, 3])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_values_and_gradients(block: tuple[int, int], group: int) -> None:
    """The second row of blocks is empty, the first full; every other one ends somewhere."""
    one = block_spmm(
        rows=4, columns=5, block=block, n=40, density=0.4, group=group, dtype=torch.float16
    )
    upstream = one.upstream()
    wanted = {"": one.expected(), **one.expected_gradients(upstream)}
    for name, call in {"": one.forward, **one.gradients(upstream)}.items():
        (step,) = lookup(call.problem(), call.values).steps
        assert step.planned.plan.roles.dot, call.name
        assert relative_error(call.run(), wanted[name]) < 2e-3, call.name


@pytest.mark.parametrize("k", [16, 32, 128])
@pytest.mark.parametrize("block", [12, 20, 40])
def test_any_tile_of_entries(block: int, k: int) -> None:
    """Shorter than an entry, longer than a row: what a tile holds is a matter of speed alone."""
    one = block_spmm(rows=3, columns=4, block=block, n=40, density=0.5, dtype=torch.float32)
    got = insum.insum(
        one.statement,
        sizes=one.sizes,
        config=Config(m=64, n=64, k=k, warps=4, stages=2),
        **one.values,
    )
    assert relative_error(got, one.expected()) < 2e-6


def test_extents_of_one_class_have_programs_of_their_own() -> None:
    """20 and 28 are of one class of sizes, but an entry's length is a number of the code."""
    sources = set()
    for block in (20, 28, 20):
        one = block_spmm(rows=3, columns=4, block=block, n=40, density=0.5, dtype=torch.float32)
        assert relative_error(one.forward.run(), one.expected()) < 2e-6
        (step,) = lookup(one.forward.problem(), one.values).steps
        sources |= {launch.kernel.source for launch in step.launches}
    assert len(sources) == 2


def test_absent_blocks_contribute_nothing() -> None:
    """Padding inside of rows, and values that must not be read beside it."""
    index = torch.tensor([[2, -1, 0], [-1, -1, -1], [1, 3, -1]], dtype=torch.int32)
    values = torch.randn(3, 3, 20, 20)
    values[index < 0] = float("nan")
    dense = torch.randn(4, 20, 24)
    rows = torch.tensor([0, 1, 1], dtype=torch.int32)
    got = run(
        "C[AM[p],i,n] += AV[p,q,i,k] * B[AK[p,q],k,n]",
        {0: 3},
        ("AK",),
        AM=rows,
        AV=values,
        AK=index,
        B=dense,
    )
    products = torch.where(
        (index >= 0)[:, :, None, None], values.double() @ dense.double()[index.long()], 0
    )
    wanted = torch.zeros(3, 20, 24, dtype=torch.float64).index_add(
        0, rows.long(), products.nan_to_num().sum(1)
    )
    assert relative_error(got, wanted) < 2e-6
