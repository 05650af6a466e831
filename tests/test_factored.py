"""Sums of products that differ in one factor: one product, with the same value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import insum
from insum.call import running
from insum.call.prepared import BoundCall
from insum.lang.derive import adjoint
from insum.lang.expr import accesses
from insum.lang.factored import factored
from insum.lang.parser import parse

#: A statement, the tensor that stands in it several times, and of how many statements its gradient
#: is then.
CASES = (
    ("y[b] = x[b,i] * A[i,j] * x[b,j]", "x", 1),
    ("C[i,j] = X[n,i] * X[n,j]", "X", 1),
    ("C[i,j] = w[n] * X[n,i] * X[n,j]", "X", 1),
    ("y = A[i,j] * A[j,i]", "A", 1),
    ("t[b] = A[b,i,j] * A[b,j,i]", "A", 1),
    ("C[i,k] = A[i,j] * A[j,k]", "A", 2),
    ("y = x[i] * A[i,j,k] * x[j] * x[k]", "x", 2),
    ("y[b] = x[b,i] * A[i,j] * z[b,j] + x[b,i] * B[i,j] * z[b,j]", "x", 1),
    ("y[b] = x[b,i] * A[i,j] * z[b,j] + 2 * x[b,i] * B[i,j] * z[b,j]", "x", 2),
    ("y[b] = x[b,i] * A[i,j] * z[b,j] + x[b,i] * u[i] * z[b,j]", "x", 2),
    ("y[b] = x[b,i] * D[i] * x[b,i]", "x", 1),
    ("y = x[k,l] * x[m,j]", "x", 1),
    ("y[i] = x[i] * A[i,j] + x[i] * B[i,k]", "x", 2),
    ("y[k,l] = x[i,j] * x[b,j] + A[l] * x[b,l] * z[k] - 3 * A[j] * x[b,j] * x[i,j]", "x", 3),
)


@pytest.mark.parametrize(("statement", "tensor", "count"), CASES)
def test_how_many_are_left(statement: str, tensor: str, count: int) -> None:
    before = adjoint(statement, tensor).statements
    after = factored(before)
    found = before if after is None else after.statements
    assert len(found) == count and (after is None) is (count == len(before))
    for text in found:
        parse(text)


def test_what_is_left_as_it_is() -> None:
    for texts in (
        ["dx[i] += dy[i] * a[i]", "dx[i] += dy[i] * b[i]"],  # nothing is summed
        ["dx[i] += a[i,j] * b[j]", "dz[i] += a[i,j] * c[j]"],
        ["dx[i] += a[i,j] * b[s[j]]", "dx[i] += a[i,j] * c[s[j]]"],
        ["dx[i] += a[i,j] * exp(b[j])", "dx[i] += a[i,j] * c[j]"],
        ["dx[i,i] += a[i,j] * b[j]", "dx[i,i] += a[i,j] * c[j]"],
        ["dx[i] += a[i,j] * b[j]", "dx[i] += a[i,j] * c[i]"],  # over other points
        ["dx[i] += a[i,j]", "dx[i] += b[i,j]"],  # nothing is multiplied
        ["dx[3*n,i] += dy[i,j] * x[n,j]", "dx[n,j] += dy[i,j] * x[3*n,i]"],
    ):
        assert factored(texts) is None


def _given(statement: str, dtype: torch.dtype) -> dict[str, Tensor]:
    draw, ranks = torch.Generator().manual_seed(0), dict[str, int]()
    parsed = parse(statement)
    for access in accesses(parsed.value):
        ranks[access.tensor] = len(access.indices)
    return {n: torch.randn((7,) * r, generator=draw, dtype=dtype) for n, r in ranks.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64])
@pytest.mark.parametrize(("statement", "tensor", "count"), CASES)
def test_gradients(statement: str, tensor: str, count: int, dtype: torch.dtype) -> None:
    """Those of doubles by finite differences, twice; the others are compared with them."""
    given = _given(statement, torch.float64)
    for value in given.values():
        value.requires_grad_()

    def run(*values: Tensor) -> Tensor:
        return insum.insum(statement, **dict(zip(given, values, strict=True)))

    if dtype is torch.float64:
        assert gradcheck(run, tuple(given.values()), fast_mode=True)
        assert gradgradcheck(run, tuple(given.values()), fast_mode=True)
        return
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = [v.detach().to(dtype).to(wide).requires_grad_() for v in given.values()]
    mine = [v.detach().to(dtype).requires_grad_() for v in exact]
    out = run(*exact)
    upstream = torch.ones_like(out)
    want = torch.autograd.grad(out, exact, upstream)
    got = torch.autograd.grad(run(*mine), mine, upstream.to(dtype))
    tolerance = {"rtol": 4e-3, "atol": 4e-2} if dtype is torch.float16 else {}
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other.to(dtype), **tolerance)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("y[i] = x[i] * A[i,j] + x[i] * B[i,k]", {"x": (3,), "A": (3, 4), "B": (3, 5)}),
        ("y = X[k,l] * X[m,j]", {"X": (2, 3)}),
        ("y[k,l] = X[k,i] * X[i,l]", {"X": (4, 4)}),
        ("y[i,l] = X[i,j] * Z[l,j] + X[i,j] * W[l,j]", {"X": (2, 3), "Z": (4, 3), "W": (4, 3)}),
        (
            "y[k,l] = Y[b,l] * A[l] * Z[k] - Y[i,j] * Y[b,j] - 3 * A[j] * Y[b,j] * Y[i,j]",
            {"Y": (3, 5), "A": (5,), "Z": (2,)},
        ),
    ],
)
def test_variables_of_one_name_have_one_extent(text: str, shapes: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes.values()]
    leaves = [value.requires_grad_() for value in given]

    def run(*values: Tensor) -> Tensor:
        named = dict(zip(shapes, values, strict=True))
        return insum.insum(text, out_shape=(2, 5) if "y[k,l] = Y" in text else None, **named)

    assert gradcheck(run, leaves)
    assert gradgradcheck(run, leaves)


def test_sums_are_made_where_they_are_multiplied_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes decide, of each call anew, whether others came before it or not."""
    ran: list[str] = []
    run = running.run

    def noted(call: BoundCall, *given: Any) -> Tensor:
        ran.append(call.prepared.form.statement)
        return run(call, *given)

    monkeypatch.setattr(running, "run", noted)
    text = "y[b] = x[b,i] * A[i,j] * x[b,j]"
    draw = torch.Generator().manual_seed(0)
    for count in (3, 200, 3, 4, 200, 201):
        for wanted in ((0,), (0, 1), (0,)):
            x = torch.randn(count, 6, generator=draw, dtype=torch.float64, requires_grad=True)
            A = torch.randn(6, 6, generator=draw, dtype=torch.float64, requires_grad=True)
            leaves = [(x, A)[k] for k in wanted]
            ran.clear()
            got = torch.autograd.grad(insum.insum(text, x=x, A=A).sum(), leaves)
            want = torch.autograd.grad(torch.einsum("bi,ij,bj->b", x, A, x).sum(), leaves)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other)
            if wanted == (0,):
                assert any("whole" in statement for statement in ran) is (count > 64)


def test_small_integers_do_not_overflow() -> None:
    """Their sum would be one of small integers, too."""
    A = torch.full((3, 3), 100, dtype=torch.int8)
    x = torch.randn(5, 3, requires_grad=True)
    y = insum.insum("y[b] = x[b,i] * A[i,j] * x[b,j]", x=x, A=A)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, 200 * x.sum(1, keepdim=True).expand(5, 3).detach())
