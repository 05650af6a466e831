"""Gradients as kernels: those of a tensor that stands in several products are one statement, and
those that are equal for several tensors are computed once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.call import running
from insum.lang.derive import adjoint
from kernels import error, watch_programs

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

BOTH = "y[i[p],n] = v[p] * x[j[p],n] + v[p] * z[j[p],n]"


def formula(v: Tensor, x: Tensor, z: Tensor, i: Tensor, j: Tensor) -> Tensor:
    rows = v[:, None] * (x[j] + z[j])
    return rows.new_zeros(9, 4).index_add(0, i, rows)


def test_equal_gradients_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    i, j = torch.randint(9, (40,)), torch.randint(9, (40,))
    leaves = [torch.randn(s, requires_grad=True) for s in ((40,), (9, 4), (9, 4))]
    named = dict(zip("vxz", leaves, strict=True))
    upstream = torch.randn(9, 4)
    for _ in range(3):
        got = torch.autograd.grad(
            insum.insum(BOTH, **named, i=i, j=j, out_shape=(9, 4)), leaves, upstream
        )
    ran = watch_programs(monkeypatch)
    y = insum.insum(BOTH, **named, i=i, j=j, out_shape=(9, 4))
    before = len(ran)
    got = torch.autograd.grad(y, leaves, upstream)
    assert len(ran) - before == 2  # of v, and of x and z
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = torch.autograd.grad(formula(*wide, i, j), wide, upstream.double())
    assert all(error(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))
    got[1].zero_()
    assert error(got[2], want[2]) <= 1e-5  # no memory is shared


def test_alike_but_of_other_sizes() -> None:
    """The same words for tensors of another number of rows, or of another dtype."""
    i, j = torch.randint(9, (40,)), torch.randint(5, (40,))
    v, x = torch.randn(40), torch.randn(5, 4, requires_grad=True)
    for z in (torch.randn(7, 4), torch.randn(5, 4).half()):
        z.requires_grad_()
        for _ in range(3):
            y = insum.insum(BOTH, v=v, x=x, z=z, i=i, j=j, out_shape=(9, 4))
            dx, dz = torch.autograd.grad(y, (x, z), torch.ones_like(y))
        assert (dx.shape, dz.shape) == (x.shape, z.shape)
        assert (dx.dtype, dz.dtype) == (x.dtype, z.dtype)
        want = torch.zeros(5).double().index_add(0, j, v.double())[:, None].expand(5, 4)
        assert error(dx, want) <= 1e-5
        assert error(dz[:5], want) <= (1e-5 if z.dtype == torch.float32 else 2e-3)
        assert not dz[5:].any()


TURNED = "y[t,h,f] = x[t,h,f] * C[t,f] + x[t,h,p[f]] * S[t,f]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_add_to_what_is_there(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a gradient is several statements, the second reads the result of the first."""
    draw = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(s, generator=draw).to(dtype).requires_grad_()
        for s in ((5, 3, 8), (5, 8), (5, 8))
    ]
    p = (torch.arange(8) + 4) % 8
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    upstream = torch.randn(5, 3, 8, generator=draw).to(dtype)
    x, C, S = wide
    want = torch.autograd.grad(x * C[:, None] + x[:, :, p] * S[:, None], wide, upstream.double())
    modes: list[str] = []
    run = running.run

    def watched(call: Any, mode: str, *given: Any) -> Tensor:
        modes.append(mode)
        return run(call, mode, *given)

    for turn in range(4):
        y = insum.insum(TURNED, x=leaves[0], C=leaves[1], S=leaves[2], p=p)
        monkeypatch.setattr(running, "run", watched)
        found = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
        monkeypatch.setattr(running, "run", run)
        for one, other in zip(found, want, strict=True):
            assert one.dtype == dtype and error(one, other) <= 2e-3, turn
        assert modes.count("from") == turn + 1  # of x; C and S stand in one product each
    kept = found[0].clone()
    torch.autograd.grad(y, leaves, upstream)
    assert torch.equal(found[0], kept)


def test_statements_of_one_tensor_are_joined() -> None:
    """Where they read through indices; plain products stay apart, for a library."""
    found = adjoint(BOTH, "v")
    assert len(found.statements) == 2
    assert found.joined == ("dv[p] += dy[i[p],n] * whole(x[j[p],n] + z[j[p],n])",)
    plain = adjoint("C[i,j] = A[i,k] * B[k,j] + A[i,k] * D[k,j]", "A")
    assert plain.joined == plain.statements and len(plain.joined) == 2


def test_double_backward() -> None:
    i, j = torch.randint(9, (5,)), torch.randint(3, (5,))
    leaves = [torch.randn(s, dtype=torch.float64) for s in ((5,), (3, 4), (3, 4))]

    def summed(*given: Tensor) -> Tensor:
        named = dict(zip("vxz", given, strict=True))
        return insum.insum(BOTH, **named, i=i, j=j, out_shape=(9, 4))

    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradgradcheck(summed, leaves)


@pytest.mark.parametrize("rows", [1, 5])
def test_columns_of_every_width(rows: int) -> None:
    """Which tiles are masked follows from how many there are; one kernel after the other."""
    x = torch.randn(rows, 11)
    for count in (1, 2, 3, 7, 8, 100, 127, 128, 129, 200, 256, 300, 1000, 128, 7):
        t, w = torch.randint(11, (count,)), torch.randn(count)
        got = insum.insum("y[b,p] = x[b,t[p]] * w[p]", x=x, t=t, w=w)
        assert error(got, (x[:, t] * w).double()) <= 1e-6
        back = insum.insum("y[b,t[p]] = g[b,p] * w[p]", g=got, t=t, w=w, out_shape=(rows, 11))
        want = torch.zeros(rows, 11).double().index_add(1, t, (got * w).double())
        assert error(back, want) <= 1e-5
