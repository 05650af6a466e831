"""Gradients that only repeat what arrives are views, as torch's own of a sum are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import insum

#: Statements over x[i,k,j], the same in torch, and along which dimensions the gradient repeats.
SUMS: list[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    ("y[i] = x[i,k,j]", lambda x: x.sum((1, 2)), (1, 2)),
    ("y[j,i] = x[i,k,j]", lambda x: x.sum(1).T, (1,)),
    ("y[k] = 2 * x[i,k,j]", lambda x: 2 * x.sum((0, 2)), (0, 2)),
    ("y = x[i,k,j]", lambda x: x.sum(), (0, 1, 2)),
    ("y[j] mean= x[i,k,j]", lambda x: x.mean((0, 1)), (0, 1)),
    ("y[k,j] = a[j] * x[i,k,j]", lambda x: x.sum(0) * _A, (0,)),
    (
        "y[d[i],j] += x[i,k,j]",
        lambda x: torch.zeros(4, 3).double().index_add(0, _D, x.sum(1)),
        (1,),
    ),
    ("y[j] = x[i,k,j] + exp(a[j])", lambda x: x.sum((0, 1)) + _A.exp(), (0, 1)),
]
_A = torch.tensor([2.0, 3.0, 5.0]).double()
_D = torch.tensor([3, 0, 3, 1, 0])


def _run(statement: str, x: Tensor) -> Tensor:
    given = {"a": _A} if "a[" in statement else {"d": _D} if "d[" in statement else {}
    sizes = {"out_shape": (4, 3)} if "d[" in statement else {}
    return insum.insum(statement, x=x, **given, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("statement", "formula", "repeats"), SUMS, ids=[s for s, *_ in SUMS])
def test_gradients_of_sums_are_views(
    statement: str,
    formula: Callable[[Tensor], Tensor],
    repeats: tuple[int, ...],
    compiled: bool,
) -> None:
    def run(x: Tensor) -> Tensor:
        return _run(statement, x)

    call = torch.compile(run, backend="aot_eager") if compiled else run
    x = torch.randn(5, 7, 3, dtype=torch.float64, requires_grad=True)
    result = call(x)
    upstream = torch.randn_like(result)
    (found,) = torch.autograd.grad(result, x, upstream)
    (expected,) = torch.autograd.grad(formula(x), x, upstream)
    torch.testing.assert_close(found, expected)
    assert tuple(d for d, stride in enumerate(found.stride()) if stride == 0) == repeats


@pytest.mark.parametrize("statement", [s for s, *_ in SUMS])
def test_of_every_order_and_both_modes(statement: str) -> None:
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    check = torch.autograd.gradcheck(lambda x: _run(statement, x), x, check_forward_ad=True)
    assert check and torch.autograd.gradgradcheck(lambda x: _run(statement, x), x)
    many = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    each = torch.func.vmap(torch.func.grad(lambda x: _run(statement, x).square().sum()))(many)
    one = torch.func.grad(lambda x: _run(statement, x).square().sum())(many[1])
    torch.testing.assert_close(each[1], one)


def test_gradients_of_leaves_are_their_own() -> None:
    """What is written into one changes neither another nor what arrived."""
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    upstream = torch.randn(3, 4)
    given = upstream.clone()
    insum.insum("y[i,j] = a[i,j] + b[i,j]", a=a, b=b).backward(upstream)
    assert a.grad is not None and b.grad is not None
    a.grad.zero_()
    torch.testing.assert_close(b.grad, given)
    torch.testing.assert_close(upstream, given)

    x = torch.randn(3, 4, requires_grad=True)
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    insum.insum("y[i] = x[i,k]", x=x).backward(upstream[:, 0])
    assert x.grad is not None and x.grad.is_contiguous()
    x.grad += 1
    torch.testing.assert_close(seen[0], given[:, :1].expand(3, 4))
    torch.testing.assert_close(upstream, given)


def test_a_transposed_gradient_is_no_view() -> None:
    """Two leaves would take one memory for theirs."""
    a, b = (torch.randn(4, 3).T.requires_grad_() for _ in range(2))
    insum.insum("y[j,i] = a[i,j] + b[i,j]", a=a, b=b).backward(torch.randn(4, 3))
    assert a.grad is not None and b.grad is not None
    kept = b.grad.clone()
    a.grad.zero_()
    torch.testing.assert_close(b.grad, kept)


def test_empty_sums() -> None:
    x = torch.randn(5, 0, requires_grad=True)
    insum.insum("y[i] = x[i,k]", x=x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and x.grad.shape == (5, 0)


def test_gradients_in_another_dtype_are_cast() -> None:
    x = torch.randn(5, 4, dtype=torch.float16, requires_grad=True)
    a = torch.randn(5)
    (found,) = torch.autograd.grad(insum.insum("y[i] = x[i,k] * a[i]", x=x, a=a).sum(), x)
    assert found.dtype is torch.float16 and found.shape == x.shape
