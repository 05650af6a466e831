"""Two of every four weights: held, trained, saved and written out; multiplied by torch's sparse
tensor cores on a GPU (`test_nn_gpu.py`).
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import insum
from insum.nn import SemiStructuredLinear, semi_structured, semi_structured_mask

X = torch.randn(3, 5, 16, dtype=torch.float64)


def dense(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(16, 8).double()


def test_the_largest_two_of_every_four() -> None:
    weight = torch.tensor([[0.1, -3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 5.0]])
    mask = semi_structured_mask(weight)
    assert mask[0, :4].tolist() == [False, True, True, False] and int(mask.sum()) == 4
    assert bool(mask[0, 7])


@pytest.mark.parametrize("kept", [None, 1, 0])
def test_it_is_the_masked_layer_with_its_gradients(kept: int | None) -> None:
    layer = dense()
    mask = semi_structured_mask(layer.weight)
    if kept is not None:  # fewer than two of some
        mask = mask & (torch.arange(16) % 4 >= 4 - kept)
    sparse = SemiStructuredLinear.from_dense(layer, None if kept is None else mask)
    want = nn.functional.linear(X, layer.weight * mask, layer.bias)
    assert_close(sparse(X), want)
    assert_close(sparse.to_dense().weight, layer.weight * mask)
    sparse(X).square().sum().backward()
    want.square().sum().backward()
    assert sparse.values.grad is not None and layer.weight.grad is not None
    where = sparse.weight != 0
    full = torch.zeros(8, 16, dtype=torch.float64)
    columns = semi_structured._columns(sparse.places).long()
    assert_close(full.scatter(1, columns, sparse.values.grad)[where], layer.weight.grad[where])


def test_it_is_trained_saved_copied_and_traced() -> None:
    sparse = SemiStructuredLinear.from_dense(dense())
    optimizer = torch.optim.SGD(sparse.parameters(), 0.1)
    before = sparse(X).detach()
    sparse(X).square().mean().backward()
    optimizer.step()
    assert not torch.equal(sparse(X), before) and int((sparse.weight != 0).sum()) == 64
    fresh = SemiStructuredLinear(16, 8).double()
    assert all(isinstance(held, Tensor) for held in sparse.state_dict().values())
    fresh.load_state_dict(sparse.state_dict())
    copies = [copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse)), fresh]
    traced = torch.export.export(sparse, (X,)).module()
    for one in (*copies, traced):
        assert_close(one(X), sparse(X))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert SemiStructuredLinear(16, 8)(X.float()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda places: places + 16, "no two places of four"),
        (lambda places: places * 0, "no two places of four"),
        (lambda places: places[:-1], "of shape"),
        (lambda places: places.int(), "torch.int32"),
    ],
)
def test_a_hostile_state_is_an_error(wrong: Any, message: str) -> None:
    layer = nn.Sequential(SemiStructuredLinear(16, 8))
    state = layer.state_dict()
    with pytest.raises(insum.FormatError, match=message):
        layer.load_state_dict({**state, "0.places": wrong(state["0.places"])})


def test_mistakes() -> None:
    with pytest.raises(insum.BindingError, match="multiples of 4"):
        SemiStructuredLinear(6, 8)
    with pytest.raises(insum.BindingError, match="multiples of 4"):
        semi_structured_mask(torch.ones(4))
    with pytest.raises(
        insum.FormatError, match="keeps 4 of the four weights of row 0 from column 0"
    ):
        SemiStructuredLinear.from_dense(dense(), torch.ones(8, 16))
    with pytest.raises(insum.FormatError, match="the mask has shape"):
        SemiStructuredLinear.from_dense(dense(), torch.ones(8, 8))
    with pytest.raises(insum.BindingError, match="16 in the last dimension"):
        SemiStructuredLinear(16, 8)(torch.ones(3, 4))
    with torch.inference_mode():
        x = torch.ones(3, 16)
    with pytest.raises(insum.AutogradError, match="inference mode"):
        SemiStructuredLinear(16, 8)(x)
    with pytest.raises(insum.DtypeError, match="float64"):
        SemiStructuredLinear(16, 8)(X)


def test_packed_weights_are_made_once_for_each_state_of_the_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Tensor] = []
    monkeypatch.setattr(semi_structured, "_pack", lambda weight: made.append(weight) or weight)
    layer = SemiStructuredLinear.from_dense(dense())
    assert layer.packed() is layer.packed() and len(made) == 1
    with torch.no_grad():
        layer.values.mul_(2)
    assert_close(layer.packed(), layer.weight.detach())
    assert len(made) == 2 and copy.deepcopy(layer)._packed is None
    assert not layer._fits(X)


def test_layers_without_numbers_take_them_and_their_pattern_from_a_state() -> None:
    saved = SemiStructuredLinear(8, 3)
    with torch.device("meta"):
        made = SemiStructuredLinear(8, 3)
    made.load_state_dict(saved.state_dict(), assign=True)
    x = torch.randn(2, 8)
    assert torch.equal(made(x), saved(x))


def test_what_is_left_out_may_be_infinite() -> None:
    weight, mask = torch.ones(1, 4), torch.tensor([[False, False, False, True]])
    weight[0, 0] = torch.inf
    assert SemiStructuredLinear.from_dense(weight, mask).weight.tolist() == [[0, 0, 0, 1]]
