"""Programs in half precision: what is rounded between functions, and scatters by themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import insum.fusion
from insum.fusion import cost, roots

from .programs import E, N, Somewhere, compiled, counts, graph_of
from .programs import F as C

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
src, dst = (row.clone() for row in graph_of())


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def scores(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """Torch computes the function in float32, and rounds it before the product."""
    return (F.leaky_relu(a[src] + b[dst], 0.2) * w).sum(-1)


def films(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return x.new_zeros(x.shape).index_add(0, dst, F.silu(g[dst] * x[src] + b[dst]))


@HALVES
@pytest.mark.parametrize(
    ("program", "shapes", "fused"),
    [
        (scores, [(N, 2, C), (N, 2, C), (2, C)], [1, 3]),
        (films, [(N, C), (N, C), (N, C)], [1, 3]),
    ],
    ids=["scores", "films"],
)
def test_chains_go_through_what_is_rounded_on_the_way(
    program: object, shapes: list[tuple[int, ...]], fused: list[int], dtype: torch.dtype
) -> None:
    """As many statements as in float32, and no further from the exact result than eager is."""
    assert callable(program)
    given = [drawn(*shape, dtype=dtype) for shape in shapes]
    run, graphs = compiled(program)
    out = run(*given)
    upstream = torch.randn_like(out)
    got = out, *torch.autograd.grad(out, given, upstream)
    assert counts(graphs) == fused
    wide = [one.detach().double().requires_grad_() for one in given]
    exact = program(*wide)
    want = exact, *torch.autograd.grad(exact, wide, upstream.double())
    eager = program(*given)
    theirs = eager, *torch.autograd.grad(eager, given, upstream)
    for g, e, w in zip(got, theirs, (one.detach() for one in want), strict=True):
        assert g.dtype == dtype
        errors = [float((one.detach().double() - w).norm() / w.norm()) for one in (g, e)]
        assert errors[0] <= 1.5 * errors[1] + torch.finfo(dtype).eps


def test_a_result_in_full_precision_keeps_what_was_rounded_before() -> None:
    """Whoever rounds on purpose, as to see what half precision would do, gets that."""

    def program(x: Tensor, e: Tensor) -> Tensor:
        rounded = (x[src] * e).to(torch.bfloat16).float()
        return x.new_zeros(x.shape).index_add(0, dst, rounded)

    x, e = torch.randn(N, C), torch.randn(E, C)
    run, _ = compiled(program)
    torch.testing.assert_close(run(x, e), program(x, e), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("limit", [0.0, 2.0**-23])
def test_equality_with_something_rounded_is_left(limit: float) -> None:
    """Many values are rounded to one: which of them are equal is decided by that."""

    def program(x: Tensor, e: Tensor) -> Tensor:
        rounded = (x[src].float() * e.float() * 1e-7).to(torch.float16)
        return x.new_zeros(x.shape).index_add(0, dst, (rounded == limit) * x[src])

    x, e = torch.randn(N, C).half(), torch.randn(E, C).half()
    run, _ = compiled(program)
    torch.testing.assert_close(run(x, e), program(x, e), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("asks", [torch.sign, lambda v: torch.where(v > 0, v + 1, -1)])
def test_what_is_rounded_to_zero_stays_zero(asks: Callable[[Tensor], Tensor]) -> None:
    """What is small is above zero before it is rounded."""

    def program(x: Tensor, e: Tensor) -> Tensor:
        small = (x[src].float() * e.float() * 1e-12).to(torch.float16)
        return x.new_zeros(x.shape).index_add(0, dst, asks(small) * x[src])

    x, e = torch.rand(N, C).half() + 1, torch.rand(E, C).half() + 1
    run, _ = compiled(program)
    torch.testing.assert_close(run(x, e), program(x, e), rtol=4e-3, atol=4e-3)


def test_conversions_to_another_half_are_not_left_out() -> None:
    """What float16 cannot hold is infinite, though bfloat16 could."""

    def program(x: Tensor, e: Tensor) -> Tensor:
        large = (x[src].float() * e.float() * 1e6).half().to(torch.bfloat16)
        return x.new_zeros(x.shape).index_add(0, dst, large)

    x, e = (torch.rand(size, C).bfloat16() + 1 for size in (N, E))
    run, _ = compiled(program)
    assert torch.equal(run(x, e).isinf(), program(x, e).isinf())


def test_what_is_read_in_full_precision_is_rounded_before() -> None:
    """The statement's result would be in full precision: it takes what was rounded."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        return x.new_zeros(N, C, dtype=torch.float16).index_add(0, dst, (x[src] * w).half())

    run, graphs = compiled(program)
    x, w = torch.randn(N, C), torch.randn(E, 1)
    torch.testing.assert_close(run(x, w), program(x, w), rtol=4e-3, atol=4e-3)
    assert counts(graphs) == [0]
    (left,) = insum.fusion.report().left
    assert "converts float32 to float16" in left.why


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_scatters_in_half_precision_are_worth_a_statement_earlier(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU: atomics of half precision take many times as long, and round each time."""

    def program(e: Tensor, ends: Tensor) -> Tensor:
        return e.new_zeros(N, C).index_add(0, ends[1], e)

    monkeypatch.setattr(cost, "value_of", lambda node: Somewhere())
    monkeypatch.setattr(roots, "WORTH_A_HALF_SCATTER", E * C)
    run = torch.compile(program, backend="insum", options={"insum.rest": "eager"})
    e = torch.randn(E, C).to(dtype)
    wanted = program(e.double(), graph_of()).to(dtype)
    torch.testing.assert_close(run(e, graph_of()), wanted, rtol=2e-2, atol=2e-2)
    assert len(insum.fusion.report().fused) == int(dtype != torch.float32)
