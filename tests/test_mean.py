"""`mean=`: values, gradients, what is remembered, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import insum
from insum import memory
from insum.formats import COO, BlockCOO, GroupCOO
from insum.ops import mean
from insum.testing import oracle

torch.manual_seed(0)
EDGES, NODES, WIDTH = 12, 5, 3
D = torch.randint(0, NODES - 1, (EDGES,))  # the last node has no edge
S = torch.randint(0, NODES, (EDGES,))
P = torch.tensor([[0, 1, -1], [2, -1, -1], [-1, -1, -1], [4, 4, 3]])
X, W = torch.randn(NODES, WIDTH).double(), torch.randn(EDGES).double()
A, B = torch.randn(4, 5).double(), torch.randn(4).double()
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "y[D[e],f] mean= X[S[e],f]": ({"D": D, "S": S, "X": X}, {"out_shape": (NODES, WIDTH)}),
    "y[D[e],f] mean= W[e] * exp(X[S[e],f]) - 1": (
        {"D": D, "S": S, "X": X, "W": W},
        {"sizes": {0: NODES}},
    ),
    "y[i] mean= B[i] * (A[i,j] - B[i])": ({"A": A, "B": B}, {}),
    "y[] mean= A[i,j]": ({"A": A}, {}),
    "y[i,j] mean= A[i,j]": ({"A": A}, {}),
    "y[i,f] mean= X[P[i,j],f]": ({"P": P, "X": X}, {"padded": ("P",)}),
    "y[P[i,j]] mean= B[i]": ({"P": P, "B": B}, {"padded": ("P",), "out_shape": (NODES,)}),
    "y[2*i+j] mean= B[i] * W[j]": ({"B": B, "W": W[:3]}, {"out_shape": (9,)}),
    "y[D[e]] mean= A[i,j] * W[e]": ({"D": D, "A": A, "W": W}, {"out_shape": (NODES,)}),
    "y[i] mean= W[2*i+j]": ({"W": W}, {"sizes": {"i": 3, "j": 4}}),
}


@pytest.mark.parametrize("text", CASES)
def test_values_and_gradients(text: str) -> None:
    tensors, options = CASES[text]
    given = {"sizes": dict(options.get("sizes", {}))}
    if "out_shape" in options:
        given["sizes"]["y"] = options["out_shape"]
    want = oracle(text, tensors, **given, padded=options.get("padded", ()))
    assert_close(insum.insum(text, **tensors, **options), torch.from_numpy(want))
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items() if t.is_floating_point()}

    def call(*values: torch.Tensor) -> torch.Tensor:
        known = tensors | dict(zip(leaves, values, strict=True))
        return insum.insum(text, **known, **options)

    torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=True)
    torch.autograd.gradgradcheck(call, tuple(leaves.values()), fast_mode=True)


def everything(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        insum.insum("y[D[e],f] mean= x[S[e],f]", D=D, S=S, x=x, out_shape=(NODES, WIDTH)),
        insum.insum("y[i,f] mean= x[P[i,j],f]", P=P, x=x, padded="P"),
        insum.insum("y[D[e]] mean= h[e]", D=D, h=h, sizes={"D[e]": NODES}),
        insum.insum("y[i] mean= h[2*i+j]", h=h, sizes={"i": 3, "j": 4}),
        insum.insum("y mean= h[e]", h=h),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    x, h = X.clone().requires_grad_(), W.bfloat16()
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for got, want in zip(compiled(x, h), everything(x, h), strict=True):
        assert_close(got, want)
    one, other = (
        torch.autograd.grad(f(x, h)[0].square().sum(), x)[0] for f in (compiled, everything)
    )
    assert_close(one, other)


def test_transforms() -> None:
    def call(column: torch.Tensor) -> torch.Tensor:
        return insum.insum("y[D[e]] mean= x[S[e]]", D=D, S=S, x=column, out_shape=(NODES,))

    want = insum.insum(next(iter(CASES)), D=D, S=S, X=X, out_shape=(NODES, WIDTH))
    assert_close(torch.func.vmap(call, 1, 1)(X), want)
    assert_close(torch.func.jvp(call, (X[:, 0],), (X[:, 1],))[1], want[:, 1])


@pytest.mark.parametrize("leaf", [False, True])
def test_autocast(leaf: bool) -> None:
    text, x = next(iter(CASES)), X.float().requires_grad_(leaf)
    given: dict[str, Any] = {"D": D, "S": S, "out_shape": (NODES, WIDTH)}
    want = insum.insum(text, X=x, **given)
    with torch.autocast("cpu", torch.bfloat16):
        got, whole = insum.insum(text, X=x, **given), insum.insum(text, X=X, **given)
    assert got.dtype == torch.bfloat16 and whole.dtype == X.dtype
    assert_close(got.float(), want, atol=2e-2, rtol=2e-2)
    assert_close(insum.insum(text, X=X, **given), whole)  # what is kept of it is the same
    if leaf:
        one, other = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
        assert_close(one, other, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.full((3000,), 60.0, dtype=dtype)
    got = insum.insum(
        "y[d[e]] mean= x[e]", d=torch.zeros(3000, dtype=torch.int64), x=x, sizes={0: 2}
    )
    assert got.dtype == dtype and got.tolist() == [60.0, 0.0]


def test_complex() -> None:
    x = torch.randn(EDGES, dtype=torch.complex64)
    got = insum.insum("y[D[e]] mean= x[e]", D=D, x=x, out_shape=(NODES,))
    assert_close(got[D[0]], x[D[0] == D].mean())


def test_counts_are_remembered_with_the_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    d, counted = D.clone(), []
    plain = mean.contract
    monkeypatch.setattr(mean, "contract", lambda *a: counted.append(1) or plain(*a))
    call = lambda: insum.insum("y[d[e]] mean= W[e]", d=d, W=W, out_shape=(NODES,))
    assert_close(call(), call())
    assert len(counted) == 1
    d[0] = NODES - 1
    assert call()[-1] == W[0] and len(counted) == 2
    memory.forget(d)
    call()
    assert len(counted) == 3


def test_what_is_explained_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where such tensors were called with before."""
    given: dict[str, Any] = {"S": S, "X": X, "out_shape": (NODES, WIDTH)}
    insum.insum(next(iter(CASES)), D=D, **given)

    def refused(*_: object) -> Any:
        raise AssertionError("counted")

    monkeypatch.setattr("insum.ops.mean.contract", refused)
    assert "mean= " in str(insum.explain(next(iter(CASES)), D=D.flip(0), **given))


@pytest.mark.parametrize("kind", [COO, GroupCOO])
def test_formats(kind: type) -> None:
    dense = torch.tensor([[1.0, 0, 2], [0, 0, 0], [0, 3, 0]])
    matrix, x = kind.from_dense(dense), torch.randn(3, 2)
    got = insum.einsum("Y[m,n] mean= M[m,k] * X[k,n]", M=matrix, X=x)
    assert_close(got, (dense @ x) / torch.tensor([[2.0], [1], [1]]))
    assert "mean= " in str(insum.explain("Y[m,n] mean= M[m,k] * X[k,n]", M=matrix, X=x))
    with pytest.raises(insum.UnsupportedError, match="zeros inside blocks"):
        insum.einsum(
            "Y[m,n] mean= M[m,k] * X[k,n]", M=BlockCOO.from_dense(dense, block_shape=(1, 3)), X=x
        )


def test_explained_compiled_and_tuned() -> None:
    given: dict[str, Any] = {"D": D, "S": S, "X": X, "out_shape": (NODES, WIDTH)}
    text = next(iter(CASES))
    page = str(insum.explain(text, **given, gpu="sm_90"))
    assert page.splitlines()[:2] == [
        text,
        "as y[D[e],f] = X[S[e],f] * share[D[e]], where share is 1 over count[D[e]] = 1",
    ]
    assert "@triton.jit" in page
    assert insum.tune(text, **given).trials == ()
    assert_close(insum.compile("y[i] mean= A[i,j]")(A=A), A.mean(1))
    with pytest.raises(insum.BindingError, match="is no single product"):
        insum.insum("y[i] mean= A[i,j] * B[i]", A=A, B=B, optimize=[(0, 1)])


def test_refused() -> None:
    passed = torch.zeros(4)
    with pytest.raises(insum.BindingError, match="y is passed"):
        insum.insum("y[i] mean= A[i,j]", A=A, y=passed)
    with pytest.raises(insum.DtypeError, match="a mean of int64"):
        insum.insum("y[i] mean= A[i,j]", A=A.long())
    with pytest.raises(insum.IndexRangeError, match=r"dimension 1 of y(.|\n)* mean= ") as found:
        insum.insum("y[f,D[e]] mean= X[e,f]", D=D, X=X[D], out_shape=(WIDTH, 2))
    assert "count" not in str(found.value)
    with pytest.raises(insum.IndexRangeError, match="S"):
        insum.insum(next(iter(CASES)), D=D, S=S + NODES, X=X, out_shape=(NODES, WIDTH))
    with pytest.raises(insum.InsumError, match=r"one of =, .*mean="):
        insum.insum("y[i] median= A[i,j]", A=A)
    with pytest.raises(Exception, match="a mean of int64"):
        torch.compile(
            lambda a: insum.insum("y[i] mean= a[i,j]", a=a), backend="eager", fullgraph=True
        )(A.long())
    assert not passed.any()
    with pytest.raises(insum.BindingError, match=r"try: pass its shape as out_shape="):
        insum.insum("y[D[e]] mean= W[e]", D=D, W=W)


@pytest.mark.parametrize("sizes", [{"x": (7, 3)}, {0: -2}, {0: 7, "f": 4}])
def test_sizes_that_are_wrong_after_right_ones(sizes: dict[Any, Any]) -> None:
    """What was bound before tells nothing of what is asked for otherwise."""
    x, d = torch.randn(5, 3), torch.tensor([0, 1, 1, 6, 0])
    statement = "y[d[e],f] mean= x[e,f]"
    insum.insum(statement, x=x, d=d, out_shape=(7, 3))
    insum.insum(statement, x=x, d=d, sizes={0: 7})
    insum.insum(statement, x=x, d=d, sizes={0: 7, "f": 3})
    with pytest.raises(insum.BindingError, match=r"mean="):
        insum.insum(statement, x=x, d=d, sizes=sizes)


@pytest.mark.parametrize("count", [70_001, 1_000_003])
def test_of_many_ones(count: int) -> None:
    """A mean of ones is one: shares multiply the sum, not every point."""
    d = torch.zeros(count, dtype=torch.long)
    got = insum.insum("y[d[e]] mean= v[e]", d=d, v=torch.ones(count), sizes={0: 2})
    assert_close(got, torch.tensor([1.0, 0.0]), rtol=1e-6, atol=0)
