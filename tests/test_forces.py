"""Training on energies and forces, compiled: the recipe of docs/torch-compile.md, step by step the
same as eager.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from insum.compat import compiler
from insum.nn import FullyConnectedTensorProduct
from insum.testing import count_compiles

ATOMS, EDGES = 6, 14


class Energy(nn.Module):
    """A small equivariant potential: edge vectors -> tensor product -> sum over neighbours ->
    tensor product -> energy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = FullyConnectedTensorProduct("2x0e", "0e+1o", "2x0e+2x1o")
        self.second = FullyConnectedTensorProduct("2x0e+2x1o", "2x0e+2x1o", "1x0e")

    def forward(self, features: Tensor, positions: Tensor, edges: Tensor) -> Tensor:
        vectors = positions[edges[0]] - positions[edges[1]]
        filters = torch.cat([vectors.square().sum(1, keepdim=True), vectors], 1)
        messages = self.first(features[edges[1]], filters)
        gathered = torch.zeros(
            features.shape[0], messages.shape[1], dtype=messages.dtype
        ).index_add(0, edges[0], messages)
        energy: Tensor = self.second(gathered, gathered).sum()
        return energy


def energy_and_forces(
    model: nn.Module, features: Tensor, positions: Tensor, edges: Tensor
) -> tuple[Tensor, Tensor]:
    energy = model(features, positions, edges)
    (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
    return energy, -gradient


def batch(seed: int, edges: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    pairs = torch.randint(ATOMS, (2, edges), generator=draw)
    pairs[1] = torch.where(pairs[0] == pairs[1], (pairs[1] + 1) % ATOMS, pairs[1])
    normal = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)
    return normal(ATOMS, 2), normal(ATOMS, 3), pairs, normal(), normal(ATOMS, 3)


Function = Callable[[nn.Module, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def trained(model: nn.Module, function: Function, edges: list[int]) -> dict[str, Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, count in enumerate(edges):
        features, positions, pairs, energy, forces = batch(step, count)
        found, pull = function(model, features, positions.requires_grad_(), pairs)
        loss = (found - energy).square() + (pull - forces).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Energy().double()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("whole", [True, False])
def test_ten_steps_compiled_are_ten_steps_eager(whole: bool) -> None:
    """``whole``: energy and forces as one compiled function. Otherwise only the energy is compiled
    and the gradient is taken outside, which torch refuses for second derivatives of compiled code,
    so that this must say so rather than be wrong.
    """
    torch.compiler.reset()
    eager, compiled = models()
    edges = [EDGES + 2 * (step % 3) for step in range(10)]
    expected = trained(eager, energy_and_forces, edges)
    if whole:
        with compiler.traced_gradients(), count_compiles() as count:
            found = trained(
                compiled,
                torch.compile(energy_and_forces, fullgraph=True, dynamic=True, backend="aot_eager"),
                edges,
            )
        assert count.graphs == 1
        assert expected.keys() == found.keys()
        assert any(
            not torch.equal(before, expected[name])
            for name, before in models()[0].named_parameters()
        )
        for name, want in expected.items():
            assert_close(found[name], want)
    else:
        part = torch.compile(compiled, fullgraph=True, dynamic=True, backend="aot_eager")
        with pytest.raises(RuntimeError, match=r"double backward|create_graph=False"):
            trained(compiled, lambda _, *given: energy_and_forces(part, *given), edges)
