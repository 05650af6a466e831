"""Channels of irreps mixed in one launch, in Triton's interpreter, on tensors that nobody has seen."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from insum.nn.irreps import Irreps
from insum.nn.irreps_linear import Linear
from insum.nn.mixing import ChannelMixing, MixingPath, columns_of
from insum.nn import mixing
from insum.testing.as_on_a_gpu import pretended

pytestmark = pytest.mark.interpreter

CASES = {
    "irreps": ("5x0e + 3x1o + 2x0e", "4x0e + 2x1o + 3x2e + 1x0e", {}),
    "instructions": (
        "3x0e + 2x1o",
        "3x0e + 2x1o + 4x0e",
        {"instructions": [(0, 0), (0, 0), (1, 1)]},
    ),
    "biases": ("3x0e + 2x1o", "3x0e + 2x1o + 4x0e", {"biases": True}),
    "wide": ("70x0e + 17x1o", "80x0e + 33x1o", {}),
}


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is launched from now on, by the kernels' names."""
    found: list[str] = []
    call = mixing.kernels.Handwritten.__call__

    def counted(self: object, *arguments: object) -> None:
        found.append(self.name)  # type: ignore[attr-defined]
        call(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(mixing.kernels.Handwritten, "__call__", counted)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    irreps_in, irreps_out, options = CASES[name]
    torch.manual_seed(0)
    layer = Linear(irreps_in, irreps_out, **options).to(dtype)
    x = torch.randn(37, layer.irreps_in.dim, dtype=dtype, requires_grad=True)
    along = torch.randn(37, layer.irreps_out.dim, dtype=dtype, requires_grad=True)

    def results() -> list[torch.Tensor]:
        given = [x, *layer.parameters()]
        out = layer(x)
        first = torch.autograd.grad(out, given, along, create_graph=True)
        loss = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(loss, [*given, along], create_graph=True, allow_unused=True)
        third = torch.autograd.grad(
            sum(g.square().sum() for g in second if g is not None),
            [*given, along],
            allow_unused=True,
        )
        return [out, *first, *(g for g in (*second, *third) if g is not None)]

    want = results()
    with pretended():
        found = launches(monkeypatch)
        got = results()
    assert found[:3] == ["insum_mix", "insum_mix", "insum_mix_weights"]
    torch.testing.assert_close(
        got,
        want,
        rtol=1e-10 if dtype == torch.float64 else 2e-3,
        atol=1e-9 if dtype == torch.float64 else 2e-3,
    )
