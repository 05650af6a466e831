"""Channels of irreps mixed in one launch, in Triton's interpreter, on tensors that nobody has
seen.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from insum.compat.autograd import wanted_gradients
from insum.nn import FullyConnectedTensorProduct, TensorProduct, mixing
from insum.nn.irreps import Irreps
from insum.nn.irreps_linear import Linear
from insum.nn.reordering import channel_order, component_order, in_order, irrep_order
from insum.testing.as_on_a_gpu import pretended

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("in_double")]

ONCE = ["insum_mix"]
GRADIENTS = ["insum_mix", "insum_mix_weights"]


def product(layout: str) -> Callable[[], nn.Module]:
    irreps = "2x0e + 2x1o", "3x0e", "2x0e + 1x1o + 1x0o"
    return lambda: FullyConnectedTensorProduct(*irreps, layout=layout)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "irreps": lambda: Linear("3x0e + 2x1o + 2x0e", "2x0e + 2x1o + 1x2e + 1x0e"),
    "twice": lambda: Linear("2x0e + 1x1o", "2x0e + 1x1o", instructions=[(0, 0), (0, 0), (1, 1)]),
    "biases": lambda: Linear("2x0e + 1x1o", "2x0e + 1x1o + 3x0e", biases=True),
    "product": product("mul_ir"),
    "product by component": product("ir_mul"),
}


def given(layer: Any, rows: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    if isinstance(layer, Linear):
        return (torch.randn(rows, layer.irreps_in.dim, dtype=dtype, requires_grad=True),)
    x = torch.randn(rows, layer.irreps_in1.dim, dtype=dtype, requires_grad=True)
    return x, torch.randn(rows, layer.irreps_in2.dim, dtype=dtype)


def orders(layer: nn.Module, inputs: Sequence[Tensor], along: Tensor, most: int) -> list[Tensor]:
    """A result, and the gradients of every order up to the third."""
    leaves = [inputs[0], *layer.parameters()]
    found = [layer(*inputs)]
    if most:
        found += torch.autograd.grad(found[0], leaves, along, create_graph=True)
    last = found[1:]
    for _ in range(most - 1):
        loss = sum((one.square().sum() for one in last), torch.zeros(()))
        by = torch.autograd.grad(loss, [*leaves, along], create_graph=True, allow_unused=True)
        last = [one for one in by if one is not None]
        found += last
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_every_order(name: str, launched: list[str]) -> None:
    layer = LAYERS[name]()
    inputs = given(layer, 3)
    along = torch.randn_like(layer(*inputs)).requires_grad_()
    want = orders(layer, inputs, along, 3)
    with pretended():
        got = orders(layer, inputs, along, 3)
    assert launched[:3] == ONCE + GRADIENTS
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


ANOTHER_WAY: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.T.contiguous().T,
    "apart": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "negated": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("way", ANOTHER_WAY)
@pytest.mark.parametrize("name", ["irreps", "product"])
def test_numbers_that_lie_another_way(name: str, way: str, launched: list[str]) -> None:
    layer, as_held = LAYERS[name](), ANOTHER_WAY[way]
    inputs = [one.detach() for one in given(layer, 3)]
    along = torch.randn(layer(*inputs).shape)
    want = torch.autograd.grad(layer(*inputs), layer.weight, along)
    with pretended():
        found = layer(*map(as_held, inputs))
        got = torch.autograd.grad(found, layer.weight, as_held(along))
    assert launched == GRADIENTS
    torch.testing.assert_close((found, *got), (layer(*inputs), *want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_rows_and_channels_than_a_tile_has(dtype: torch.dtype) -> None:
    layer = Linear("70x0e + 17x1o", "66x0e + 33x1o").to(dtype)
    inputs = given(layer, 70, dtype)
    along = torch.randn(70, layer.irreps_out.dim, dtype=dtype)
    want = orders(layer, inputs, along, 1)
    with pretended():
        got = orders(layer, inputs, along, 1)
    close = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got, want, rtol=close, atol=close)


def test_weights_are_left_alone_where_no_gradient_of_theirs_is_asked_for(
    launched: list[str],
) -> None:
    layer = LAYERS["irreps"]()
    (x,) = given(layer, 3)
    with pretended():
        found = layer(2 * x).sum()
        torch.autograd.grad(found, x)
    assert launched == ONCE * 2


def test_one_launch_for_what_both_gradients_send_back(launched: list[str]) -> None:
    layer = LAYERS["irreps"]()
    (x,) = given(layer, 3)
    along = torch.randn(3, layer.irreps_out.dim, requires_grad=True)
    with pretended():
        first = torch.autograd.grad(layer(x), [x, layer.weight], along, create_graph=True)
        launched.clear()
        torch.autograd.grad(sum(one.sum() for one in first), along)
    assert launched == ONCE


def test_rows_that_are_apart() -> None:
    layer = LAYERS["irreps"]()
    wide = torch.randn(4, 2 * layer.irreps_in.dim)
    for x in (wide[:, 3 : 3 + layer.irreps_in.dim], wide.T[: layer.irreps_in.dim].T):
        want = layer(x)
        with pretended():
            torch.testing.assert_close(layer(x), want, rtol=1e-12, atol=1e-12)


def test_much_work_is_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    layer = LAYERS["irreps"]()
    (x,) = given(layer, 3)
    monkeypatch.setattr(mixing, "MOST_WORK", 3 * layer._mixing.work - 1)
    with pretended():
        layer(x)
        assert not launched
        layer(x[:2])
    assert launched == ONCE


def test_batched_gradients(launched: list[str]) -> None:
    layer = LAYERS["irreps"]()
    (x,) = given(layer, 3)
    many = torch.randn(2, 3, layer.irreps_out.dim)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x), [x, layer.weight], many, is_grads_batched=True)

    want = both()
    with pretended():
        torch.testing.assert_close(both(), want, rtol=1e-12, atol=1e-12)
    assert launched == ONCE


def test_no_rows_and_autocast(launched: list[str]) -> None:
    layer = LAYERS["irreps"]()
    with pretended():
        assert layer(torch.zeros(0, layer.irreps_in.dim)).shape == (0, layer.irreps_out.dim)
        with torch.autocast("cpu"):
            layer(*given(layer, 2))
    assert not launched


def test_copies_make_tables_of_their_own() -> None:
    layer = LAYERS["product"]()
    inputs = given(layer, 2)
    with pretended():
        want = layer(*inputs)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert not other._mixing._tables
            torch.testing.assert_close(other(*inputs), want)
    old = layer.__getstate__()
    del old["_mixing"]  # as modules were stored before
    again = type(layer).__new__(type(layer))
    again.__setstate__(old)
    assert again._mixing == layer._mixing


def test_scales_are_exact_in_every_dtype() -> None:
    torch.set_default_dtype(torch.float32)
    layer = Linear("3x0e", "2x0e").double()
    assert layer.scales.dtype == torch.float64
    assert torch.equal(layer.scales, torch.full((6,), 3**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("order", [component_order, irrep_order, channel_order])
def test_columns_in_another_order(order: Callable[[Irreps], Any]) -> None:
    irreps = Irreps.of("2x0e + 2x1o + 2x0e")
    found = order(irreps)
    x = torch.randn(3, irreps.dim, requires_grad=True)
    along = torch.randn(3, irreps.dim, requires_grad=True)
    with pretended():
        ordered = in_order(order, irreps, x)
        assert ordered is not None and torch.equal(ordered, x[:, list(found.places)])
        assert torch.equal(found.back(found(x)), x)
        (by_x,) = torch.autograd.grad(found(x), x, along, create_graph=True)
        assert torch.equal(by_x, found.back(along))
        (by_along,) = torch.autograd.grad(by_x, along, x)
        assert torch.equal(by_along, found(x))
    assert in_order(order, irreps, x) is None


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_products_put_their_columns_in_order(layout: str) -> None:
    instructions = [(0, 0, 0, "uvu", False), (1, 0, 1, "uvu", False), (0, 1, 1, "uvu", False)]
    irreps = "2x0e + 2x1o", "0e + 1o", "2x0e + 2x1o"
    product = TensorProduct(*irreps, instructions, layout=layout)
    x, y = torch.randn(3, 8, requires_grad=True), torch.randn(3, 4)
    (want,) = torch.autograd.grad(product(x, y).square().sum(), x)
    with pretended():
        (got,) = torch.autograd.grad(product(x, y).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_gradients_that_a_pass_is_for() -> None:
    """Statements of a call, too, are asked for no others."""
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, number: int, one: Tensor, fixed: Tensor, two: Tensor) -> Tensor:
            return one * two

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
            seen.append(wanted_gradients(ctx))
            return None, gradient, None, gradient

    apply: Any = Looks.apply
    fixed = torch.ones(3)
    torch.autograd.grad(apply(1, a, fixed, b).sum(), a)
    torch.autograd.grad(apply(1, a * 2, fixed, b * 2).sum(), b)
    apply(1, a, fixed, b).sum().backward()
    assert seen == [
        (False, True, False, False),
        (False, False, False, True),
        (False, True, False, True),
    ]
