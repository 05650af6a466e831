"""Gradients of one backward pass that read what they have in common: equal to each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import insum
from insum.lang.parser import parse
from insum.ops import gradients
from insum.ops.common_factors import common_factors

N, E, F = 30, 200, 5
STATEMENTS = {
    "y[d[e],f] = relu(x[s[e],f] + w[e,f])": "xw",
    "y[d[e],f] = silu(x[s[e],f] * w[e,f])": "xw",
    "y[d[e],f] = sigmoid(x[s[e],f] + x[d[e],f])": "x",
    "y[d[e],f] = v[e] * tanh(x[s[e],f] + w[e,f])": "xwv",
    "y[d[e],f] += exp(w[e,f]) * x[s[e],f]": "xw",
    "y[f] = gelu(w[e,f] + b[f])": "wb",
    "y[d[e],f] = where(x[s[e],f] < w[e,f], x[s[e],f] * w[e,f], v[e])": "xwv",
    "y[d[e],f] = w[e,f] * sin(x[s[e],f]) * w[e,f]": "xw",
    "y[s[e],d[e]] = log(1 + w[e,f] * w[e,f])": "w",
    "y[d[e],f] max= softplus(x[s[e],f] + w[e,f])": "xw",
    "y[d[e],f] mean= elu(x[s[e],f] - w[e,f])": "xw",
}


def drawn(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    s, d = torch.randint(0, N, (2, E)).unbind()
    floats = {"x": (N, F), "w": (E, F), "v": (E,), "b": (F,)}
    return {"s": s, "d": d, **{n: torch.randn(*at, dtype=dtype) for n, at in floats.items()}}


def results(text: str, values: dict[str, Tensor], wanted: str) -> tuple[Tensor, ...]:
    statement = parse(text)
    reads = {n: v for n, v in values.items() if f"{n}[" in text}
    sizes = {"y[f]": (F,), "y[s[e],d[e]]": (N, N)}.get(str(statement.target), (N, F))
    leaves = [reads[n].requires_grad_() for n in wanted]
    out = insum.insum(text, **reads, out_shape=sizes)  # type: ignore[arg-type]
    torch.manual_seed(1)
    return torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=out.dtype))


@pytest.mark.parametrize("text", STATEMENTS)
def test_gradients_are_those_of_each_by_itself(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float64):
        values = drawn(dtype)
        for _ in range(3):  # the first finds, the others look up
            got = results(text, values, STATEMENTS[text])
        with monkeypatch.context() as patched:
            patched.setattr(gradients, "_computed_once", lambda *_: None)
            want = results(text, values, STATEMENTS[text])
        for one, other in zip(got, want):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is computed once."""
    found: list[str] = []
    original = gradients._computed_once

    def noted(*given: object) -> gradients.ComputedOnce | None:
        one = original(*given)  # type: ignore[arg-type]
        if one is not None:
            found.extend(made.kinds.form.statement for _, made in one.values.values())
        return one

    monkeypatch.setattr(gradients, "_computed_once", noted)
    return found


def test_a_function_of_gathered_values_is_computed_once(once: list[str]) -> None:
    results("y[d[e],f] = relu(x[s[e],f] + w[e,f])", drawn(torch.float32), "xw")
    assert once == ["common[e,f] = dy[d[e],f] * step(x[s[e],f] + w[e,f])"]


def test_one_gradient_alone_has_nothing_in_common(once: list[str]) -> None:
    results("y[d[e],f] = relu(x[s[e],f] + w[e,f])", drawn(torch.float32), "x")
    assert not once


def test_products_without_functions_stay_as_they_are(once: list[str]) -> None:
    """They are products of sparse matrices, which write nothing for each entry and column."""
    results("y[d[e],f] = v[e] * x[s[e],f]", drawn(torch.float32), "xv")
    assert not once


def test_halves_are_rounded_once(once: list[str]) -> None:
    results("y[d[e],f] = relu(x[s[e],f] + w[e,f])", drawn(torch.float16), "xw")
    assert not once


def test_absent_points_meet_nothing(once: list[str]) -> None:
    values = drawn(torch.float32)
    values["s"][::3] = -1
    w = values["w"].index_fill_(0, torch.arange(0, E, 3), torch.inf).requires_grad_()
    x = values["x"].requires_grad_()
    text = "y[d[e],f] = silu(x[s[e],f] * w[e,f])"
    given = {"x": x, "w": w, "s": values["s"], "d": values["d"]}
    out = insum.insum(text, **given, out_shape=(N, F), padded=("s",))  # type: ignore[arg-type]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (x, w)))
    assert not once


def test_what_is_too_large_is_computed_anew(
    once: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing of the call is as large, and it is more than a few megabytes."""
    monkeypatch.setattr(gradients, "MOST_IN_COMMON", 100)
    results("y[d[e],f] = sigmoid(x[s[e],f] + x[d[e],f])", drawn(torch.float32), "x")
    assert not once
    results("y[d[e],f] = sigmoid(x[s[e],f] + w[e,f])", drawn(torch.float32), "xw")
    assert len(once) == 1  # it is no larger than w


def test_gradients_of_gradients_are_as_before(once: list[str]) -> None:
    values = drawn(torch.float64)
    x, w = values["x"].requires_grad_(), values["w"].requires_grad_()
    call = lambda x, w: insum.insum(
        "y[d[e],f] = tanh(x[s[e],f] * w[e,f])",
        x=x,
        w=w,
        s=values["s"],
        d=values["d"],
        out_shape=(N, F),
    )
    assert torch.autograd.gradgradcheck(call, (x, w))


def test_names_of_the_statement_are_not_taken() -> None:
    texts = "a[s[e]] = common[e] * exp(x[e])", "common[e] = exp(x[e]) * x[e]"
    found = common_factors([parse(text) for text in texts])
    assert found is not None and [str(v) for v in found.values] == ["common_1[e] = exp(x[e])"]
    texts = "a[s[common]] = exp(x[common])", "b[common] = exp(x[common])"
    shared = common_factors([parse(text) for text in texts])
    assert shared is not None and shared.values[0].target.tensor == "common_1"


def test_sums_and_single_statements_share_nothing() -> None:
    assert common_factors([parse("a[e] = exp(x[e])")]) is None
    assert common_factors([parse("a[e] = exp(x[e]) + x[e]")] * 2) is None
    assert common_factors([parse("a[e] = exp(x[e])"), parse("b[e] = exp(2 * x[e])")]) is None


def test_what_is_not_wanted_decides_the_precision_too(once: list[str]) -> None:
    """A float64 factor of a float32 result: what is derived is computed in float64."""
    values = drawn(torch.float32)
    x, v = values["x"].mul_(1e-10).requires_grad_(), values["v"].mul_(1e-30).requires_grad_()
    wide = torch.full((E, F), 100.0, dtype=torch.float64)
    text = "y[d[e],f] = v[e] * x[s[e],f] * exp(w[e,f])"
    given = {"x": x, "v": v, "w": wide, "s": values["s"], "d": values["d"]}
    out = insum.insum(text, y=torch.empty(N, F), **given)  # type: ignore[arg-type]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (x, v)))
    assert not once


def test_a_zero_meets_nothing_that_overflows(once: list[str]) -> None:
    values = drawn(torch.float32)
    x, v = values["x"].fill_(88.0).requires_grad_(), values["v"].zero_().requires_grad_()
    text = "y[d[e],f] = v[e] * exp(x[s[e],f])"
    given = {"x": x, "v": v, "s": values["s"], "d": values["d"]}
    out = insum.insum(text, **given, out_shape=(N, F))  # type: ignore[arg-type]
    (got,) = torch.autograd.grad(10 * out.sum(), (x,), retain_graph=True)
    both = torch.autograd.grad(10 * out.sum(), (x, v))
    assert not got.any() and not both[0].any() and once == ["common[e,f] = exp(x[s[e],f])"]


def test_a_variable_of_any_name() -> None:
    s, d = torch.randint(0, N, (2, E)).unbind()
    x, w = torch.randn(N, requires_grad=True), torch.randn(E, requires_grad=True)
    text = "y[d[common]] = relu(x[s[common]] + w[common])"
    out = insum.insum(text, x=x, w=w, s=s, d=d, out_shape=(N,))  # type: ignore[arg-type]
    want = torch.zeros(N).index_add(0, d, torch.relu(x[s] + w))
    for one, other in zip(*(torch.autograd.grad(y.sum(), (x, w)) for y in (out, want))):
        torch.testing.assert_close(one, other)


def test_gradients_share_no_memory() -> None:
    a, b = (torch.randn(E, requires_grad=True) for _ in range(2))
    out = insum.insum("y[e] = exp(a[e]) * exp(b[e])", a=a, b=b)
    one, other = torch.autograd.grad(out.sum(), (a, b))
    before = other.clone()
    one.zero_()
    assert torch.equal(other, before)


@pytest.mark.parametrize("backend", ["auto", "graph"])
def test_what_a_comparison_chooses_has_no_precision_of_its_own(backend: str) -> None:
    """Numbers are computed in the dtype that they meet, also where tensors choose among them."""
    x, b, w = (torch.randn(50, dtype=torch.float64) for _ in range(3))
    with insum.settings(backend=backend):
        y = insum.insum("y[e] = exp(0.1 * where(lt(x[e], b[e]), 1, 0)) * w[e]", x=x, b=b, w=w)
        torch.testing.assert_close(y, (0.1 * (x < b).double()).exp() * w, rtol=1e-14, atol=0)
        w.requires_grad_()
        y = insum.insum("y[e] = erf(where(lt(x[e], b[e]), w[e], 0.3 * w[e]))", x=x, b=b, w=w)
        (got,) = torch.autograd.grad(y.sum(), w)
    (want,) = torch.autograd.grad(torch.where(x < b, w, 0.3 * w).erf().sum(), w)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
