"""The proposals: which format for which tensor, with predictions that come true."""

from __future__ import annotations

import io
from typing import Any

import pytest
import scipy.sparse as sp
import torch

from insum.formats import (
    COO,
    ELL,
    BlockGroupCOO,
    GroupCOO,
    NeighborTable,
    SparseFormat,
    SparseParameter,
    draw,
    suggest,
)

from .cases import every_format


def full_blocks(side: int) -> torch.Tensor:
    return torch.block_diag(*[torch.ones(side, side)] * 2)


def skewed() -> torch.Tensor:
    x = torch.zeros(64, 64)
    for i in range(64):
        x[i, torch.randperm(64, generator=torch.Generator().manual_seed(i))[: 4 + (i % 5) ** 2]] = (
            1.0
        )
    return x


def banded() -> torch.Tensor:
    return (torch.ones(256, 256).triu(-2).tril(2) > 0).float()


def communities() -> torch.Tensor:
    """Rows that share columns with those beside them, in half precision."""
    draw, x = torch.Generator().manual_seed(0), torch.zeros(512, 512, dtype=torch.float16)
    for rows in x.view(16, 32, 512):
        columns = torch.randperm(512, generator=draw)[:40]
        rows[:, columns] = (torch.rand(32, 40, generator=draw) < 0.6).half()
    return x


def neighbours() -> torch.Tensor:
    table = torch.tensor([[-1, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, -1]])
    return NeighborTable(table, shape=(4, 4, 3)).to_dense()


@pytest.mark.parametrize(
    ("x", "format", "options"),
    [
        (torch.block_diag(*[torch.ones(32, 32)] * 4), "BlockGroupCOO", {"block_shape": (32, 32)}),
        (full_blocks(64).half(), "BlockGroupCOO", {"block_shape": (64, 64)}),
        (full_blocks(64), "BlockGroupCOO", {"block_shape": (32, 32)}),  # float32, as measured
        (full_blocks(64) * (torch.arange(128) % 5 < 1), "BlockGroupCOO", {"block_shape": (32, 32)}),
        (full_blocks(64).half() * (torch.arange(128) % 5 < 1), "BlockGroupCOO", {}),
        (banded(), "ELL", {}),
        (skewed(), "GroupCOO", {"group_dims": (0,)}),
        (communities(), "BlockGroupCOO", {"block_shape": (32, 1)}),
        (communities().float(), "GroupCOO", {}),
        (communities()[torch.arange(512) * 181 % 512], "GroupCOO", {}),
        (
            torch.eye(64)
            .flip(0)[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))][::2]
            .repeat(2, 1)
            * torch.tensor([1.0, 0.0]).repeat(32)[:, None],
            "COO",
            {},
        ),
        (neighbours(), "NeighborTable", {"dim": 1}),
        (torch.zeros(8, 8), "COO", {}),
    ],
    ids=[
        *(
            "blocks of 32",
            "blocks of 64",
            "full precision",
            "a fifth",
            "half a fifth",
            "banded",
            "skewed",
            "panels",
            "wide panels",
        ),
        *("no neighbours alike", "few", "neighbours", "empty"),
    ],
)
def test_choice(x: torch.Tensor, format: str, options: dict[str, Any]) -> None:
    s = suggest(x)
    assert s.format == format and s.options.items() >= options.items()
    assert torch.equal(s.build().to_dense(), x)
    assert len(s.reasons) >= 2 and format in str(s)


def test_predictions_come_true() -> None:
    for x in (banded(), skewed(), communities(), torch.block_diag(*[torch.ones(16, 16)] * 3)):
        for c in suggest(x).candidates:
            a = COO.from_dense(x).to_format(c.format, **c.options)
            assert (a.stored, a.nbytes) == (c.stored, c.nbytes) and a.padding == pytest.approx(
                c.padding
            ), c
            if isinstance(a, GroupCOO | BlockGroupCOO):
                assert c.accesses == sum(i.numel() for i in (*a.group_indices, *a.slot_indices))


def test_sources_and_ranks() -> None:
    x = skewed()
    by_column = suggest(x, group_dims=1)
    assert by_column.options["group_dims"] == (1,)
    for source in (x, x.to_sparse(), sp.csr_array(x.numpy()), GroupCOO.from_dense(x)):
        assert suggest(source).format == "GroupCOO"
    t = torch.zeros(5, 40, 40)
    t[:, :16, :16] = 1
    s = suggest(t)
    assert (
        s.format == "BlockGroupCOO"
        and s.options["block_shape"] == (1, 16, 16)
        and torch.equal(s.build().to_dense(), t)
    )
    assert suggest(torch.ones(5)).build().to_dense().tolist() == [1] * 5
    assert any("dense tensor" in r for r in suggest(torch.ones(8, 8)).reasons)


def test_pictures() -> None:
    formats: list[SparseFormat] = [
        *every_format(skewed()),
        COO.from_dense(torch.ones(4)),
        ELL.from_dense(neighbours()),
        COO.from_dense(torch.zeros(3, 3)),
    ]
    for a in formats:
        picture = io.BytesIO()
        draw(a).savefig(picture, dpi=20)
        assert picture.getbuffer().nbytes > 1000
    suggest(banded()).plot().savefig(io.BytesIO(), dpi=20)


# --- a format as a parameter ---


def test_sparse_parameter() -> None:
    for a in every_format(skewed()):
        module = SparseParameter(a)
        assert a.values is not None and torch.equal(module().to_dense(), a.to_dense())
        assert [n for n, _ in module.named_parameters()] == ["values"] and type(a).__name__ in repr(
            module
        )
        (module() @ torch.ones(64, 1)).sum().backward()
        assert (
            module.values is not None
            and module.values.grad is not None
            and module.values.grad.shape == a.values.shape
        )
        assert module.double()().dtype == torch.float64 and {
            f.sorted for f in module().facts().values()
        } == {f.sorted for f in a.facts().values()}
    pattern = SparseParameter(COO.from_dense(skewed()).pattern())
    assert list(pattern.parameters()) == [] and pattern().values is None


def test_state_dict() -> None:
    a, b = (GroupCOO.from_dense(skewed() * s, group_size=4) for s in (1.0, 3.0))
    one, two = SparseParameter(a), SparseParameter(b)
    two.load_state_dict(one.state_dict())
    assert torch.equal(two().to_dense(), a.to_dense())
    smaller = SparseParameter(GroupCOO.from_dense(torch.eye(64), group_size=2))
    smaller.load_state_dict(one.state_dict())
    assert torch.equal(smaller().to_dense(), a.to_dense()) and smaller().group_size == 4  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="shape"):
        SparseParameter(GroupCOO.from_dense(torch.eye(3))).load_state_dict(one.state_dict())
