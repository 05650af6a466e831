"""Statements as one graph, such as gradients of one backward pass: equal to each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.call import running
from insum.call.prepared import prepare
from insum.call.request import Request
from insum.host import choose, chunks, joint
from insum.host.joint import JointGraph, joint_of
from insum.lang.parser import parse
from insum.ops import gradients

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


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts so small that there are several."""
    monkeypatch.setattr(chunks, "AT_ONCE", 512)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[JointGraph]:
    """What was made one graph."""
    found: list[JointGraph] = []
    original = joint.joint_of

    def noted(*given: Any) -> tuple[JointGraph, tuple[int, ...]] | None:
        one = original(*given)
        found.extend([one[0]] if one is not None else [])
        return one

    monkeypatch.setattr(joint, "joint_of", noted)
    return found


def operations(graph: JointGraph, name: str) -> int:
    nodes = graph.module.graph.nodes
    return sum(getattr(node.target, "__name__", node.target) == name for node in nodes)


@pytest.mark.parametrize("text", STATEMENTS)
def test_gradients_are_those_of_each_by_itself(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, precision in ((torch.float32, 1e-5), (torch.float64, 1e-12), (torch.float16, 4e-3)):
        values = drawn(dtype)
        for _ in range(3):  # the first finds, the others look up
            got = results(text, values, STATEMENTS[text])
        with monkeypatch.context() as patched:
            patched.setattr(gradients, "is_one_graph", lambda calls: False)
            want = results(text, values, STATEMENTS[text])
        for one, other in zip(got, want):
            torch.testing.assert_close(one, other, rtol=precision, atol=precision)


def test_what_is_gathered_and_computed_twice_is_so_once(together: list[JointGraph]) -> None:
    results("y[d[e],f] = tanh(x[s[e],f] + w[e,f]) * x[d[e],f]", drawn(torch.float32), "xw")
    (found,) = together
    assert found.var == "e" and 1 < found.step < E
    # dy, and x at both ends, for four gradients: by the two places of x, and by w
    assert operations(found, "index_select") == 3 and operations(found, "tanh") <= 1


def test_a_product_that_another_needs_transposed_is_made_once(
    together: list[JointGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "factored", lambda texts: None)  # each part by itself
    w, x = torch.randn(40, dtype=torch.float64), torch.randn(40, 6, dtype=torch.float64)
    leaves = [w.requires_grad_(), x.requires_grad_()]
    upstream = torch.randn(6, 6, dtype=torch.float64)
    out = insum.insum("C[i,j] = w[n] * X[n,i] * X[n,j]", w=w, X=x)
    got = torch.autograd.grad(out, leaves, upstream)
    want = torch.autograd.grad(torch.einsum("n,ni,nj->ij", w, x, x), leaves, upstream)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other)
    assert operations(together[-1], "einsum") < len(together[-1].members)


def test_what_another_multiplies_transposed_is_multiplied_once(together: list[JointGraph]) -> None:
    """``dy * x`` is summed along rows for one gradient, and along columns for another."""
    shapes = {"a": (40,), "x": (40, 60), "b": (60,)}
    leaves = {n: torch.randn(s, dtype=torch.float64).requires_grad_() for n, s in shapes.items()}
    upstream = torch.randn(40, 60, dtype=torch.float64)
    out = insum.insum("y[i,j] = a[i] * x[i,j] * b[j]", **leaves)
    got = torch.autograd.grad(out, [*leaves.values()], upstream)
    want = torch.einsum("i,ij,j->ij", *leaves.values())
    for one, other in zip(got, torch.autograd.grad(want, [*leaves.values()], upstream)):
        torch.testing.assert_close(one, other)
    assert operations(together[-1], "mul") == 1 and len(together[-1].members) == 2


def test_parts_are_of_a_variable_that_runs_through_all_that_is_made(
    together: list[JointGraph],
) -> None:
    """Else all would be gathered anew for every part."""
    values = drawn(torch.float32)
    values["b"] = torch.randn(3 * E)
    given = {n: values[n] for n in "sdxvb"}
    leaves = [given[n].requires_grad_() for n in "xv"]
    text = "y[d[e],f] = silu(x[s[e],f] * v[e]) * b[z]"
    out = insum.insum(text, **given, out_shape=(N, F), optimize=False)  # type: ignore[arg-type]
    torch.autograd.grad(out.sum(), leaves)
    assert together and all(found.var == "e" for found in together)


def test_one_gradient_alone_is_no_graph_of_several(together: list[JointGraph]) -> None:
    results("y[d[e],f] = relu(x[s[e],f] + w[e,f])", drawn(torch.float32), "x")
    assert not together


def test_products_of_matrices_stay_what_they_are(
    together: list[JointGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sparse ones, which write nothing for each entry and column."""
    monkeypatch.setattr(choose, "LEAST_WORK", 0)
    results("y[d[e],f] = v[e] * x[s[e],f]", drawn(torch.float32), "xv")
    assert not together


def test_absent_points_meet_nothing(together: list[JointGraph]) -> None:
    values = drawn(torch.float32)
    values["s"][::3] = -1
    w = values["w"].index_fill_(0, torch.arange(0, E, 3), torch.inf).requires_grad_()
    x = values["x"].requires_grad_()
    text = "y[d[e],f] = silu(x[s[e],f] * w[e,f])"
    given = {"x": x, "w": w, "s": values["s"], "d": values["d"]}
    out = insum.insum(text, **given, out_shape=(N, F), padded=("s",))  # type: ignore[arg-type]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (x, w)))
    assert together


def test_indices_are_looked_at(together: list[JointGraph]) -> None:
    """Also where they changed between a forward call and its backward pass."""
    values = drawn(torch.float32)
    x, w = values["x"].requires_grad_(), values["w"].requires_grad_()
    given = {"x": x, "w": w, "s": values["s"], "d": values["d"]}
    text = "y[d[e],f] = silu(x[s[e],f] * w[e,f])"
    for _ in range(2):
        out = insum.insum(text, **given, out_shape=(N, F))  # type: ignore[arg-type]
        torch.autograd.grad(out.sum(), (x, w))
    assert together
    with torch.no_grad():
        values["s"][7] = N
    with pytest.raises(insum.IndexRangeError, match=r"s\[7\] is 30"):
        insum.insum(text, **given, out_shape=(N, F))  # type: ignore[arg-type]


def test_several_statements() -> None:
    """One is scattered to, another written to, a third summed; the last shares nothing."""
    values = drawn(torch.float64)
    del values["b"]
    texts = {
        "a[d[e],f] = sin(x[s[e],f] * w[e,f]) * v[e]": (N, F),
        "c[e,f] = cos(x[s[e],f] * w[e,f]) * sin(x[s[e],f] * w[e,f])": (E, F),
        "g[f] = cos(x[s[e],f] * w[e,f])": (F,),
        "h[e] = v[e] * v[e]": (E,),
    }
    requests = [Request(t, ((t[0], size),)) for t, size in texts.items()]
    reads = [{n: v for n, v in values.items() if f"{n}[" in text} for text in texts]
    calls = [prepare(*one) for one in zip(requests, reads)]
    problems = [call.problem(own) for call, own in zip(calls, reads)]
    found = joint_of(problems, [None] * len(problems))
    assert found is not None and found[1] == (0, 1, 2)
    results = found[0](values)
    for call, own, result in zip(calls, reads, results):
        torch.testing.assert_close(result, running.run(call, "new", own, None))


def test_gradients_of_gradients_are_as_before() -> None:
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


def test_what_is_not_wanted_decides_the_precision_too(together: list[JointGraph]) -> None:
    """A float64 factor of a float32 result: what is derived is computed in float64."""
    values = drawn(torch.float32)
    x, v = values["x"].mul_(1e-10).requires_grad_(), values["v"].mul_(1e-30).requires_grad_()
    wide = torch.full((E, F), 100.0, dtype=torch.float64)
    text = "y[d[e],f] = v[e] * x[s[e],f] * exp(w[e,f])"
    given = {"x": x, "v": v, "w": wide, "s": values["s"], "d": values["d"]}
    out = insum.insum(text, y=torch.empty(N, F), **given)  # type: ignore[arg-type]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (x, v)))
    assert together


def test_a_zero_meets_nothing_that_overflows(together: list[JointGraph]) -> None:
    values = drawn(torch.float32)
    x, v = values["x"].fill_(88.0).requires_grad_(), values["v"].zero_().requires_grad_()
    text = "y[d[e],f] = v[e] * exp(x[s[e],f])"
    given = {"x": x, "v": v, "s": values["s"], "d": values["d"]}
    out = insum.insum(text, **given, out_shape=(N, F))  # type: ignore[arg-type]
    (got,) = torch.autograd.grad(10 * out.sum(), (x,), retain_graph=True)
    both = torch.autograd.grad(10 * out.sum(), (x, v))
    assert not got.any() and not both[0].any() and together


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
