"""Sparse linear layers against the dense layer with a masked weight: outputs, gradients, training,
states.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from insum.formats import COO, ELL
from insum.nn import BlockSparseLinear, SparseLinear, block_mask, magnitude_mask


def dense_and_mask(
    bias: bool = True, shape: tuple[int, int] = (18, 30)
) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    dense = nn.Linear(shape[1], shape[0], bias=bias).double()
    return dense, torch.rand(shape) < 0.3


def blocks_of(dense: nn.Linear, block: tuple[int, int]) -> Tensor:
    """A mask of blocks, and the same as a mask of weights."""
    rows, columns = (-(-s // b) for s, b in zip(dense.weight.shape, block))
    return torch.rand(rows, columns) < 0.5


def spread(mask: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    return torch.kron(mask.double(), torch.ones(block, dtype=torch.float64))[: shape[0], : shape[1]]


def compare(sparse: SparseLinear, dense: nn.Linear, mask: Tensor, x: Tensor) -> None:
    """Outputs and gradients of input, values and bias."""
    dense = copy.deepcopy(dense)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = sparse(a), nn.functional.linear(b, dense.weight * mask, dense.bias)
    assert_close(got, want)
    upstream = torch.randn_like(want)
    got.backward(upstream)
    want.backward(upstream)
    assert_close(a.grad, b.grad)
    gradient = sparse.weight().with_values(sparse.weight.values.grad).to_dense()
    assert_close(gradient, dense.weight.grad)
    if dense.bias is not None:
        assert sparse.bias is not None
        assert_close(sparse.bias.grad, dense.bias.grad)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (0,)])
def test_sparse_linear_is_a_masked_linear(lead: tuple[int, ...], bias: bool) -> None:
    dense, mask = dense_and_mask(bias)
    compare(
        SparseLinear.from_dense(dense, mask),
        dense,
        mask,
        torch.randn(*lead, 30, dtype=torch.float64),
    )


@pytest.mark.parametrize("block", [(6, 10), (4, 8), (32, 32), (1, 1)], ids=str)
@pytest.mark.parametrize("lead", [(5,), (2, 3), (0,)])
def test_block_sparse_linear_is_a_masked_linear(
    lead: tuple[int, ...], block: tuple[int, int]
) -> None:
    dense, _ = dense_and_mask()
    mask = blocks_of(dense, block)
    sparse = BlockSparseLinear.from_dense(dense, mask, block_shape=block)
    compare(
        sparse,
        dense,
        spread(mask, block, dense.weight.shape),
        torch.randn(*lead, 30, dtype=torch.float64),
    )


def test_a_mask_of_weights_keeps_the_blocks_it_touches() -> None:
    dense, mask = dense_and_mask()
    mask[:6] = False
    sparse = BlockSparseLinear.from_dense(dense, mask, block_shape=(6, 10))
    assert_close(sparse.weight().to_dense(), dense.weight.detach() * mask)
    assert sparse.weight().entries().count == 6


@pytest.mark.parametrize("format", [COO, ELL])
def test_any_format_will_do(format: Any) -> None:
    dense, mask = dense_and_mask()
    compare(
        SparseLinear(format.from_dense(dense.weight.detach() * mask), dense.bias),
        dense,
        mask,
        torch.randn(4, 30, dtype=torch.float64),
    )


def test_weights_that_are_zero_are_kept_where_the_mask_says_so() -> None:
    layer = SparseLinear.from_dense(torch.zeros(3, 4), torch.ones(3, 4))
    assert layer.weight().nnz == 12 and layer.bias is None
    assert (
        BlockSparseLinear.from_dense(torch.zeros(4, 4), torch.ones(2, 2), block_shape=2)
        .weight()
        .entries()
        .count
        == 4
    )


def test_pruning_rules() -> None:
    torch.manual_seed(1)
    weight = torch.randn(20, 30)
    mask = magnitude_mask(weight, 0.25)
    assert mask.sum() == 150 and weight[mask].abs().min() >= weight[~mask].abs().max()
    # blocks at the edge are smaller, and count as they are
    blocks = block_mask(weight, (8, 8), 0.5)
    norms = torch.nn.functional.pad(weight, (0, 2, 0, 4)).view(3, 8, 4, 8).square().sum((1, 3))
    assert (
        blocks.shape == (3, 4) and blocks.sum() == 6 and norms[blocks].min() >= norms[~blocks].max()
    )
    assert not magnitude_mask(weight, 0.0).any() and magnitude_mask(weight, 1).all()
    assert block_mask(torch.randn(64, 64).half(), 32, 0.5).sum() == 2


def test_density_prunes_and_training_keeps_the_pattern() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(32, 16)
    layer = BlockSparseLinear.from_dense(dense, density=0.25, block_shape=8)
    before = layer.weight().to_dense() != 0
    assert before.sum() == 2 * 64
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    x, y = torch.randn(64, 32), torch.randn(64, 16)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(layer(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(layer.weight().to_dense() != 0, before)


def test_to_dense_and_back() -> None:
    dense, mask = dense_and_mask()
    back = SparseLinear.from_dense(dense, mask).to_dense()
    assert_close(back.weight.detach(), dense.weight.detach() * mask)
    assert_close(back.bias, dense.bias)
    assert not SparseLinear.from_dense(dense.weight, mask).to_dense().bias


@pytest.mark.parametrize("kind", [SparseLinear, BlockSparseLinear])
def test_state_dict_round_trip(kind: type[SparseLinear]) -> None:
    options: dict[str, Any] = {"block_shape": (6, 10)} if kind is BlockSparseLinear else {}
    dense, _ = dense_and_mask()
    saved = kind.from_dense(dense, density=0.5, **options)
    other = kind.from_dense(nn.Linear(30, 18).double(), density=0.25, **options)
    other.load_state_dict(saved.state_dict())
    x = torch.randn(3, 30, dtype=torch.float64)
    assert torch.equal(other(x), saved(x))
    assert torch.equal(copy.deepcopy(saved)(x), saved(x))


def test_dtypes_and_moving() -> None:
    dense, mask = dense_and_mask()
    layer = SparseLinear.from_dense(dense, mask).to(torch.bfloat16)
    x = torch.randn(4, 30, dtype=torch.bfloat16)
    want = nn.functional.linear(
        x.double(), layer.weight().to_dense().double(), layer.bias.detach().double()
    )
    assert layer(x).dtype == torch.bfloat16
    assert_close(layer(x).double(), want, atol=3e-2, rtol=2e-2)


def test_layers_print_themselves() -> None:
    dense, mask = dense_and_mask()
    text = repr(SparseLinear.from_dense(dense, mask))
    assert "in_features=30, out_features=18, bias=True" in text and "GroupCOO" in text
