"""Products with scalars that have gradients of their own: matrices for every row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insum.nn import FullyConnectedTensorProduct
from insum.nn.row_matrices import RowMatrices
from insum.testing.as_on_a_gpu import pretended

pytestmark = pytest.mark.usefixtures("in_double")
#: With two paths to a term, and terms of both sides that no path leads to.
IRREPS = "3x0e + 2x1o + 2x1e + 1x0e", "4x0e", "5x0e + 2x1o + 3x1o + 2x2e"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of rows, matrices and results are computed of the other two."""
    found: list[str] = []
    third = RowMatrices.third

    def counted(self: RowMatrices, given: dict[str, Tensor], wanted: str) -> Tensor:
        found.append(wanted)
        return third(self, given, wanted)

    monkeypatch.setattr(RowMatrices, "third", counted)
    return found


def made(layout: str) -> tuple[FullyConnectedTensorProduct, Tensor, Tensor]:
    layer = FullyConnectedTensorProduct(*IRREPS, layout=layout)
    x = torch.randn(6, layer.irreps_in1.dim, requires_grad=True)
    return layer, x, torch.randn(6, layer.irreps_in2.dim, requires_grad=True)


def orders(layer: FullyConnectedTensorProduct, x: Tensor, y: Tensor) -> list[Tensor]:
    leaves = [x, y, layer.weight]
    found, total = [layer(x, y)], layer(x, y).sin().sum()
    for order in range(3):
        last = torch.autograd.grad(total, leaves, create_graph=order < 2)
        total = sum((one.square().sum() for one in last), torch.zeros(()))
        found += last
    return found


@pytest.mark.interpreter
@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_gradients_of_every_order_are_those_of_the_paths_by_themselves(
    layout: str, computed: list[str]
) -> None:
    layer, x, y = made(layout)
    want = orders(layer, x, y)
    assert not computed
    with pretended(require_fused=False):
        got = orders(layer, x, y)
    assert computed
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-9)


@pytest.mark.interpreter
def test_forces_and_their_gradients_compute_every_product_once(computed: list[str]) -> None:
    layer, x, y = made("mul_ir")
    with pretended(require_fused=False):
        (forces,) = torch.autograd.grad(layer(x, y).sum(), [x], create_graph=True)
        assert computed == ["Z", "X"]
        forces.square().sum().backward()
    assert computed[2:] == ["M"]


@pytest.mark.interpreter
def test_rows_that_are_apart_and_gradients_of_many_at_once() -> None:
    layer, x, y = made("mul_ir")
    wide = torch.randn(layer.irreps_in1.dim, 6).T.requires_grad_()
    want = layer(wide, y), torch.autograd.functional.jacobian(lambda x: layer(x, y), x)
    with pretended(require_fused=False):
        got = layer(wide, y)
        every = torch.autograd.functional.jacobian(lambda x: layer(x, y), x, vectorize=True)
    torch.testing.assert_close(got, want[0])
    torch.testing.assert_close(every, want[1])
