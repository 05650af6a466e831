"""Gradients of many at once, in torch's older way (``is_grads_batched``, ``vectorize``), and
forward mode over reverse mode: against plain torch, and against one gradient after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian

import insum
from insum import nn
from insum.call.request import request_of
from insum.compat import many
from insum.ops.eager import accumulate

S, D = torch.tensor([0, 1, 4, 4]), torch.tensor([2, 2, 0, 1])
Function = Callable[[Tensor, Tensor], Tensor]


def gathered(x: Tensor, w: Tensor) -> Tensor:
    return insum.insum("Y[d[e],f] = w[e] * X[s[e],f]", d=D, w=w, X=x, s=S, out_shape=(3, 3))


def by_torch(x: Tensor, w: Tensor) -> Tensor:
    return x.new_zeros(3, 3).index_add(0, D, w[:, None] * x[S])


def largest(x: Tensor, w: Tensor) -> Tensor:
    return insum.insum("Y[d[e],f] max= w[e] * X[s[e],f]", d=D, w=w, X=x, s=S, out_shape=(4, 3))


def added(x: Tensor, w: Tensor) -> Tensor:
    return insum.insum("Y[e] += exp(w[e]) * X[s[e],f]", Y=1 * w, w=w, X=x, s=S)


def mean(x: Tensor, w: Tensor) -> Tensor:
    return insum.insum("Y[d[e],f] mean= w[e] * X[s[e],f]", d=D, w=w, X=x, s=S, out_shape=(3, 3))


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((5, 3), (4,)))  # type: ignore[return-value]


@pytest.mark.parametrize("f", [gathered, largest, added, mean])
@pytest.mark.parametrize("count", [1, 3])
def test_as_one_after_the_other(f: Function, count: int) -> None:
    leaves = given()
    result = f(*leaves)
    upstream = torch.randn(count, *result.shape, dtype=torch.float64)
    options: Any = {"retain_graph": True}
    found = torch.autograd.grad(result, leaves, upstream, is_grads_batched=True, **options)
    for k, one in enumerate(upstream):
        torch.testing.assert_close(
            [many[k] for many in found], list(torch.autograd.grad(result, leaves, one, **options))
        )
    assert [tuple(many.shape) for many in found] == [(count, 5, 3), (count, 4)]


def test_gradients_of_them() -> None:
    leaves = given()
    found = []
    for f in (gathered, by_torch):
        upstream = torch.linspace(-1, 1, 18, dtype=torch.float64).view(2, 3, 3)
        options: Any = {"is_grads_batched": True, "create_graph": True}
        first = torch.autograd.grad(f(*leaves), leaves, upstream, **options)
        found.append(torch.autograd.grad(sum(one.pow(3).sum() for one in first), leaves))
    torch.testing.assert_close(*found)


def test_some_gradients_are_not_wanted() -> None:
    x, w = given()
    result = gathered(x, w.detach())
    upstream = torch.randn(2, *result.shape, dtype=torch.float64)
    (found,) = torch.autograd.grad(result, x, upstream, is_grads_batched=True)
    want = torch.autograd.grad(by_torch(x, w.detach()), x, upstream, is_grads_batched=True)
    torch.testing.assert_close(found, *want)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians_and_hessians(strategy: str) -> None:
    leaves = given()
    found, want = (
        jacobian(f, leaves, vectorize=True, strategy=strategy) for f in (gathered, by_torch)
    )
    torch.testing.assert_close(found, want)
    options: Any = {"vectorize": True, "outer_jacobian_strategy": strategy}
    cubes = hessian(lambda *t: gathered(*t).pow(3).sum(), leaves, **options)
    torch.testing.assert_close(cubes, hessian(lambda *t: by_torch(*t).pow(3).sum(), leaves))


def test_forward_over_reverse() -> None:
    """What a call saves for its gradient keeps the tangent that it came with."""
    found = []
    for f in (gathered, by_torch):
        x, w = given()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            first = torch.autograd.grad(f(dual, w).pow(2).sum(), (dual, w), create_graph=True)
            found.append([forward_ad.unpack_dual(one).tangent for one in first])
    torch.testing.assert_close(*found)


class Pulled(torch.autograd.Function):
    """Whose backward pass is a statement."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return insum.insum("Y[i,j] = X[j,i]", X=upstream)


def test_statements_on_them() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    upstream = torch.randn(2, 3, 3)
    for _ in range(2):  # the second call is known
        result = Pulled.apply(x)  # type: ignore[no-untyped-call]
        (found,) = torch.autograd.grad(result, x, upstream, is_grads_batched=True)
        assert torch.equal(found, upstream.mT)


class PulledBy(torch.autograd.Function):
    """A backward pass that is any function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.function(upstream), None


def test_sums_from_and_onto_them() -> None:
    torch.manual_seed(0)
    layers = nn.GCNConv(3, 3).double(), nn.SAGEConv(3, 2).double()
    for layer in layers:
        layer.requires_grad_(False)
    ones = torch.ones(5, 3, dtype=torch.float64)
    request = request_of("Y[d[e],f] += X[s[e],f]", (5, 3), None, ())
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda g: layers[0](g, torch.stack([S, D])),
        lambda g: layers[1](g, torch.stack([S, D])) @ ones[:2],
        lambda g: accumulate(request, ones[0], {"d": D, "X": g, "s": S}),
        lambda g: accumulate(request, g, {"d": D, "X": ones, "s": S}),
        lambda g: insum.insum("Y[d[e],f] += X[s[e],f]", Y=g.clone(), d=D, X=ones, s=S),
    ]
    for function in functions:
        x, upstream = ones.clone().requires_grad_(), torch.randn(2, 5, 3, dtype=torch.float64)
        result = PulledBy.apply(x, function)  # type: ignore[no-untyped-call]
        (found,) = torch.autograd.grad(result, x, upstream, is_grads_batched=True)
        torch.testing.assert_close(found, torch.stack([function(one) for one in upstream]))


def test_nested() -> None:
    x, y = torch.randn(2, 3), torch.randn(4, 3)

    def product(a: Tensor, b: Tensor) -> Tensor:
        (found, nothing) = many.over_items(lambda a, b: (a * b, None), (a, b))
        assert found is not None and nothing is None
        return found

    found = _vmap(lambda a: _vmap(lambda b: product(a, b))(y))(x)
    assert torch.equal(found, x[:, None] * y)


def test_layers() -> None:
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2], [1, 2, 2]])
    attention = nn.GATConv(3, 2)
    layers: list[Callable[[Tensor], Tensor]] = [
        lambda x: attention(x, edges),
        nn.SphericalHarmonics([0, 1, 2], True),
        nn.Linear("3x0e", "2x0e"),
    ]
    for layer in layers:
        x = torch.randn(4, 3)
        torch.testing.assert_close(jacobian(layer, x, vectorize=True), jacobian(layer, x))
