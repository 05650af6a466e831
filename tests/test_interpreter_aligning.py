"""Rows that no wide load can read: copied first where they are read often, in the interpreter, as
rows that are summed, as operands of matrix products, and as blocks of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.plan import aligning, copying, fitting
from insum.runtime.program import Program
from kernels import ONLY_FUSED, error, poison_new_memory, watch_programs

pytestmark = pytest.mark.interpreter

ROWS = "y[i[p],c] = v[p] * x[j[p],c]"
SCORES = "S[b,q,k] = Q[r[b],q,d] * K[c[b],k,d]"
WEIGHTS = "D[c,o] = x[j[p],c] * dy[i[p],o]"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies pay as if everything were larger; memory that nobody wrote to holds NaN."""
    monkeypatch.setattr(copying, "LEAST_POINTS", 1)
    monkeypatch.setattr(fitting, "LEAST_READS", 2**31)
    monkeypatch.setattr(fitting, "LEAST_TURNED", 2**31)
    monkeypatch.setattr(aligning, "LEAST_READS", 0)
    monkeypatch.setattr(aligning, "LEAST_READ", 0)
    monkeypatch.setattr(aligning, "LEAST_GATHERED", 0)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    poison_new_memory(monkeypatch)
    memory.forget()
    with insum.settings(**ONLY_FUSED):
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    return watch_programs(monkeypatch)


def copied(program: Program) -> list[str]:
    return [one.header.split()[1] for one in program.launches if "__copies_" in one.kernel.name]


def most(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 5e-3


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype)


def below(limit: int, *shape: int) -> Tensor:
    torch.manual_seed(limit)
    return insum.unchanging(torch.randint(0, limit, shape))


@DTYPES
@pytest.mark.parametrize("width", [17, 31, 87, 129])
@pytest.mark.parametrize("entries", [300, 3000])  # rows in one launch, and long ones cut
def test_sums_of_rows(
    width: int, entries: int, dtype: torch.dtype, launched: list[Program]
) -> None:
    x, v = normal(40, width, dtype=dtype), normal(entries, dtype=dtype)
    i, j = below(9, entries), below(40, entries)
    x[-1] = 100.0  # what would be read past an end is large
    got = insum.insum(ROWS, x=x, v=v, i=i, j=j, out_shape=(9, width))
    assert copied(launched[-1]) == ["x"]
    rows = v.double()[:, None] * x.double()[j]
    assert error(got, rows.new_zeros(9, width).index_add(0, i, rows)) <= most(dtype)


def test_widths_share_kernels(launched: list[Program]) -> None:
    i, j = below(9, 300), below(40, 300)
    for width in (97, 111, 127):
        x, v = normal(40, width, dtype=torch.float16), normal(300, dtype=torch.float16)
        got = insum.insum(ROWS, x=x, v=v, i=i, j=j, out_shape=(9, width))
        rows = v.double()[:, None] * x.double()[j]
        assert error(got, rows.new_zeros(9, width).index_add(0, i, rows)) <= 5e-3
    kernels = {(*one.text,) for program in launched for one in program.launches}
    assert len(kernels) == len(launched[0].launches)


@pytest.mark.parametrize("width", [64, 88, 15])
def test_rows_that_loads_read_are_left(width: int, launched: list[Program]) -> None:
    x, v = normal(40, width, dtype=torch.float16), normal(300, dtype=torch.float16)
    insum.insum(ROWS, x=x, v=v, i=below(9, 300), j=below(40, 300), out_shape=(9, width))
    assert not copied(launched[-1])


def test_a_view_of_wider_rows(launched: list[Program]) -> None:
    """Rows that lie in wider ones, an odd number apart."""
    whole = normal(40, 101, dtype=torch.float16)
    x, v = whole[:, 3:90], normal(300, dtype=torch.float16)
    i, j = below(9, 300), below(40, 300)
    got = insum.insum(ROWS, x=x, v=v, i=i, j=j, out_shape=(9, 87))
    rows = v.double()[:, None] * x.double()[j]
    assert copied(launched[-1]) == ["x"]
    assert error(got, rows.new_zeros(9, 87).index_add(0, i, rows)) <= 5e-3


@DTYPES
@pytest.mark.parametrize(("side", "depth"), [(72, 75), (17, 33), (40, 129), (33, 17)])
def test_blocks_of_both_operands(
    side: int, depth: int, dtype: torch.dtype, launched: list[Program]
) -> None:
    q, k = normal(5, side, depth, dtype=dtype), normal(4, side, depth, dtype=dtype)
    r, c = below(5, 11), below(4, 11)
    q[-1, -1, -1] = k[-1, -1, -1] = 8.0
    got = insum.insum(SCORES, Q=q, K=k, r=r, c=c)
    assert copied(launched[-1]) == ["Q", "K"]
    want = torch.einsum("bqd,bkd->bqk", q.double()[r], k.double()[c])
    assert error(got, want) <= most(dtype)


@DTYPES
@pytest.mark.parametrize(("inputs", "outputs"), [(87, 104), (33, 17)])
def test_sums_that_are_cut_into_pieces(
    inputs: int, outputs: int, dtype: torch.dtype, launched: list[Program]
) -> None:
    x, dy = normal(50, inputs, dtype=dtype), normal(60, outputs, dtype=dtype)
    i, j = below(60, 5000), below(50, 5000)
    got = insum.insum(WEIGHTS, x=x, dy=dy, i=i, j=j, optimize=False)
    assert "x" in copied(launched[-1])
    want = torch.einsum("pc,po->co", x.double()[j], dy.double()[i])
    assert error(got, want) <= most(dtype)
