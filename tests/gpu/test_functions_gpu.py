"""Functions in kernels on a GPU: values and gradients beside torch, alone and in fused programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import insum
import insum.fusion
from test_functions import FORMS, written

pytestmark = pytest.mark.gpu

NODES, EDGES, WIDTH = 500, 20_000, 32


def ends() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randint(NODES, (EDGES,), device="cuda"),
        torch.randint(NODES, (EDGES,), device="cuda"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form: str, dtype: torch.dtype) -> None:
    to, of = ends()
    A = torch.randn(EDGES, 4, device="cuda", dtype=dtype).abs().add(0.6).requires_grad_()
    b = torch.randn(NODES, device="cuda", dtype=dtype).requires_grad_()
    with insum.settings(require_fused=True):
        ours = insum.insum(written(form), sizes={0: NODES}, to=to, of=of, A=A, b=b)
        upstream = torch.randn_like(ours)
        found = (ours, *torch.autograd.grad(ours, (A, b), upstream, allow_unused=True))
    u = FORMS[form](A.double() + 0.5 * b.double()[of][:, None]).sum(1)
    theirs = torch.zeros(NODES, device="cuda", dtype=torch.float64).index_add(0, to, u)
    wanted = (theirs, *torch.autograd.grad(theirs, (A, b), upstream.double(), allow_unused=True))
    for a, c in zip(found, wanted):
        if c is not None:
            error = (a.double() - c.double()).abs().max() / c.double().abs().max().clamp(min=1)
            assert error < (3e-5 if dtype == torch.float32 else 1e-10), (form, float(error))


def test_a_half_precision_maximum_finds_its_winner() -> None:
    """The maximum is rounded, the products it is compared with are not."""
    a = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(128, device="cuda", dtype=torch.bfloat16)
    (gradient,) = torch.autograd.grad(insum.insum("y[i] max= A[i,j] * b[j]", A=a, b=b).sum(), a)
    assert (gradient != 0).sum(1).ge(1).all()


PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "GINE": lambda x, y, e, w: F.relu(x[w[0]] + e),
    "GATv2": lambda x, y, e, w: F.leaky_relu(x[w[0]] + y[w[1]], 0.2) * e,
    "FiLM": lambda x, y, e, w: F.silu(x[w[0]] * y[w[1]] + y[w[1]]),
    "gates": lambda x, y, e, w: torch.sigmoid(x[w[0]] - y[w[1]]) * F.softplus(e + x[w[0]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_fused(name: str, dtype: torch.dtype) -> None:
    def program(x: Tensor, y: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, w[1], PROGRAMS[name](x, y, e, w))

    edges = torch.stack(ends())
    x, y = (torch.randn(NODES, WIDTH, device="cuda", dtype=dtype) for _ in range(2))
    e = torch.randn(EDGES, WIDTH, device="cuda", dtype=dtype)
    insum.fusion.clear()
    run = torch.compile(
        program, backend="insum", options={"insum.rest": "eager", "insum.fuse": "always"}
    )
    leaves = [t.requires_grad_() for t in (x, y)]
    for _ in range(5):  # until the index is known
        found = run(x, y, e, edges)
        got = (found, *torch.autograd.grad(found.sum(), leaves, allow_unused=True))
    if dtype == torch.float32:
        assert insum.fusion.report().fused
    wide = [t.detach().double().requires_grad_() for t in (x, y)]
    wanted = program(*wide, e.double(), edges)
    want = (wanted, *torch.autograd.grad(wanted.sum(), wide, allow_unused=True))
    for a, c in zip(got, want):
        if c is not None and a is not None:
            error = (a.double() - c).abs().max() / c.abs().max()
            assert error < (1e-4 if dtype == torch.float32 else 0.03), (name, float(error))
