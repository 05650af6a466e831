"""Sizes that no tile divides, and rows that no wide load can read, in tiles that are made for
them: small statements against float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import insum
from kernels import error

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def most(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 5e-3


@DTYPES
@pytest.mark.parametrize("width", [17, 34])
@pytest.mark.parametrize("count", [3, 8, 11])
def test_lists_of_rows(width: int, count: int, dtype: torch.dtype) -> None:
    lists = 70_000 // width  # as many results as are worth a rule
    t = torch.randint(0, 50, (lists, count))
    w, x = normal(lists, count, dtype=dtype), normal(50, width, dtype=dtype)
    got = insum.insum("y[q,c] = w[q,k] * x[t[q,k],c]", w=w, x=x, t=t)
    want = torch.einsum("qk,qkc->qc", w.double(), x.double()[t])
    assert error(got, want) <= most(dtype)


@DTYPES
@pytest.mark.parametrize(("heads", "depth"), [(3, 20), (5, 12), (7, 3), (8, 6)])
def test_heads(heads: int, depth: int, dtype: torch.dtype) -> None:
    i, j = torch.randint(0, 9, (2, 130))
    q, k = normal(9, heads, depth, dtype=dtype), normal(9, heads, depth, dtype=dtype)
    got = insum.insum("s[p,h] = Q[i[p],h,d] * K[j[p],h,d]", Q=q, K=k, i=i, j=j)
    want = (q.double()[i] * k.double()[j]).sum(-1)
    assert error(got, want) <= most(dtype)
    a = normal(130, heads, dtype=dtype)
    for _ in range(3):  # once the index was seen, another plan
        got = insum.insum(
            "y[i[p],h,f] = a[p,h] * Q[j[p],h,f]", a=a, Q=q, i=i, j=j, out_shape=(9, heads, depth)
        )
    rows = a.double()[:, :, None] * q.double()[j]
    assert error(got, rows.new_zeros(9, heads, depth).index_add(0, i, rows)) <= most(dtype)


@DTYPES
@pytest.mark.parametrize(("before", "width"), [(16, 80), (21, 100), (40, 24)])
def test_windows_over_each_other(before: int, width: int, dtype: torch.dtype) -> None:
    q, k = normal(2, 37, width, dtype=dtype), normal(2, 37 + before - 1, width, dtype=dtype)
    got = insum.insum("s[b,t,r] = q[b,t,f] * k[b,t+r,f]", q=q, k=k, out_shape=(2, 37, before))
    windows = k.double().unfold(1, before, 1)
    assert error(got, torch.einsum("btf,btfr->btr", q.double(), windows)) <= most(dtype)


@DTYPES
@pytest.mark.parametrize(("channels", "columns"), [(59, 94), (33, 17), (8, 94)])
def test_a_layer_on_neighbours(channels: int, columns: int, dtype: torch.dtype) -> None:
    t = torch.randint(0, 1100, (1100, 5))
    dy, w = normal(1100, columns, dtype=dtype), normal(5, channels, columns, dtype=dtype)
    for _ in range(2):
        got = insum.insum(
            "dx[t[q,k],c] = dy[q,o] * W[k,c,o]", dy=dy, W=w, t=t, out_shape=(1100, channels)
        )
    rows = torch.einsum("qo,kco->qkc", dy.double(), w.double())
    want = rows.new_zeros(1100, channels).index_add(0, t.flatten(), rows.flatten(0, 1))
    assert error(got, want) <= most(dtype)
    x = normal(1100, channels, dtype=dtype)
    got = insum.insum("dW[k,c,o] = dy[q,o] * x[t[q,k],c]", dy=dy, x=x, t=t)
    assert error(got, torch.einsum("qo,qkc->kco", dy.double(), x.double()[t])) <= 10 * most(dtype)


@DTYPES
@pytest.mark.parametrize(("fields", "width"), [(51, 17), (26, 32), (9, 5)])
def test_pairs_of_fields(fields: int, width: int, dtype: torch.dtype) -> None:
    i = torch.randint(0, 30, (6, fields))
    dy, table = normal(6, fields, fields, dtype=dtype), normal(30, width, dtype=dtype)
    got = insum.insum(
        "D[i[b,f],k] = dy[b,f,g] * E[i[b,g],k]", dy=dy, E=table, i=i, out_shape=(30, width)
    )
    rows = dy.double() @ table.double()[i]
    want = rows.new_zeros(30, width).index_add(0, i.flatten(), rows.flatten(0, 1))
    assert error(got, want) <= most(dtype)


@DTYPES
def test_blocks_of_uneven_sides(dtype: torch.dtype) -> None:
    r, c = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 0, 1, 1, 2])
    p, v = normal(5, 97, 97, dtype=dtype), normal(3, 97, 96, dtype=dtype)
    insum.unchanging(r)
    for _ in range(2):
        got = insum.insum(
            "O[r[b],q,d] = P[b,q,k] * V[c[b],k,d]", P=p, V=v, r=r, c=c, out_shape=(3, 97, 96)
        )
    rows = p.double() @ v.double()[c]
    assert error(got, rows.new_zeros(3, 97, 96).index_add(0, r, rows)) <= most(dtype)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_a_sigmoid_and_that_of_the_opposite(scale: float) -> None:
    """Both are made of one exponential, and neither loses what is small."""
    x = torch.linspace(-1, 1, 401) * scale
    for factor in (1, 2):
        statement = f"y[n] = sigmoid({factor} * x[n]) * sigmoid(-{factor} * x[n])"
        got, wide = insum.insum(statement, x=x).double(), factor * x.double()
        want = torch.sigmoid(wide) * torch.sigmoid(-wide)
        seen = want > 1e-37  # float32 has nothing smaller
        assert ((got - want).abs() / want)[seen].max() <= 1e-5
        assert not (got[~seen] > 1e-37).any()
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf])
    got = insum.insum("y[n] = sigmoid(-x[n])", x=odd)
    assert torch.equal(got.isnan(), odd.isnan()) and got[1:].tolist() == [0.0, 1.0]
