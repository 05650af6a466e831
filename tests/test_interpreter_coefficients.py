"""Coefficients of constant patterns as numbers of the code, and strides that the code knows: right
for every width, and void when somebody writes to the coefficients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.bench.data import coefficients, degrees, promised
from insum.testing.as_on_a_gpu import pretended
from kernels import ONLY_FUSED, watch_programs

pytestmark = pytest.mark.interpreter
CONVOLUTION = "Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]"


def drawn(width: int, edges: int = 30, nodes: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(width)
    ends = torch.randint(0, nodes, (2, edges), generator=generator)
    return {
        "X": torch.randn(nodes, 4, width, generator=generator),
        "Y": torch.randn(edges, 4, generator=generator),
        "W": torch.randn(edges, 4, width, generator=generator),
        "src": ends[0],
        "dst": ends[1].sort().values,
    }


def exact(fixed: dict[str, Tensor], t: dict[str, Tensor]) -> Tensor:
    """Point by point, in double precision."""
    out = torch.zeros(t["X"].shape, dtype=torch.float64)
    for v, i, j, k, l in zip(*(fixed[n].tolist() for n in "VIJKL"), strict=True):
        value = v * t["X"].double()[t["src"], j] * t["Y"].double()[:, k, None]
        out[:, i] = out[:, i].index_add(0, t["dst"], value * t["W"].double()[:, l])
    return out


def run(fixed: dict[str, Tensor], t: dict[str, Tensor]) -> Tensor:
    given: dict[str, Any] = {**t, **fixed}
    return insum.insum(CONVOLUTION, **given, out_shape=t["X"].shape)


def pattern(degree: int) -> tuple[dict[str, Tensor], int]:
    """The coefficients of all products, and how many products there are."""
    products = degrees(degree, even=True)
    return promised(coefficients(products), torch.device("cpu")), len(products)


@pytest.fixture
def fixed() -> dict[str, Tensor]:
    return pattern(1)[0]


def test_they_are_in_the_code(fixed: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    programs = watch_programs(monkeypatch)
    t = drawn(16)
    with insum.settings(**ONLY_FUSED):
        torch.testing.assert_close(run(fixed, t).double(), exact(fixed, t), rtol=1e-5, atol=1e-5)
        assert "V_ptr" not in programs[-1].launches[0].kernel.source
        plain = {**fixed, "V": fixed["V"].clone()}  # nobody promised anything of these
        torch.testing.assert_close(run(plain, t).double(), exact(fixed, t), rtol=1e-5, atol=1e-5)
        assert "V_ptr" in programs[-1].launches[0].kernel.source


@pytest.mark.parametrize("seen", [True, False])
def test_a_write_ends_the_promise(seen: bool) -> None:
    def twice() -> None:
        t, fixed = drawn(16), pattern(1)[0]
        for factor in (1.0, 3.0, -2.0):
            fixed["V"].mul_(factor)
            want = exact(fixed, t)
            torch.testing.assert_close(run(fixed, t).double(), want, rtol=1e-5, atol=1e-4)
        fixed["V"].data = torch.ones_like(fixed["V"])
        torch.testing.assert_close(run(fixed, t).double(), exact(fixed, t), rtol=1e-5, atol=1e-4)

    if seen:
        with insum.settings(**ONLY_FUSED):
            twice()
    else:
        with pretended():
            twice()


@pytest.mark.parametrize("seen", [True, False])
def test_widths_that_share_a_class(seen: bool) -> None:
    """Of 40 and 56 columns the same is known, but for the number itself."""

    def widths() -> None:
        fixed = pattern(1)[0]
        for width in (40, 56, 40, 48, 64, 56):
            t = drawn(width)
            want = exact(fixed, t)
            torch.testing.assert_close(run(fixed, t).double(), want, rtol=1e-5, atol=1e-4)

    if seen:
        with insum.settings(**ONLY_FUSED):
            widths()
    else:
        with pretended():
            widths()


def test_rows_that_do_not_follow_each_other(fixed: dict[str, Tensor]) -> None:
    t = drawn(16)
    t["X"] = torch.randn(5, 4, 24)[:, :, :16]
    t["W"] = torch.randn(30, 8, 16)[:, ::2]
    with insum.settings(**ONLY_FUSED):
        torch.testing.assert_close(run(fixed, t).double(), exact(fixed, t), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("degree", [1, 2])
def test_gradients(degree: int) -> None:
    held, paths = pattern(degree)
    size, width = (degree + 1) ** 2, 8
    ends = torch.randint(0, 4, (2, 12))
    X, Y, W = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((4, size, width), (12, size), (12, paths, width))
    )
    held = {**held, "V": insum.constant(held["V"].double())}

    def call(X: Tensor, Y: Tensor, W: Tensor) -> Tensor:
        given: dict[str, Any] = {"X": X, "Y": Y, "W": W, "src": ends[0], "dst": ends[1], **held}
        return insum.insum(CONVOLUTION, **given, out_shape=(4, size, width))

    out = {}
    for backend in ("graph", "fused"):
        with insum.settings(backend=backend, require_fused=backend == "fused"):
            value = call(X, Y, W)
            out[backend] = value, *torch.autograd.grad(value.square().sum(), (X, Y, W))
    torch.testing.assert_close(out["fused"], out["graph"])
