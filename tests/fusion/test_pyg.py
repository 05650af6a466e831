"""Layers of PyG, unmodified, and a sparse convolution written by hand: one op for each step, equal
to eager.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import insum.fusion
from insum.compat.compiler import compiled_graphs

from . import pyg_layers
from .programs import E, N, agrees, compiled, counts, graph_of, leaf

pyg: Any = pytest.importorskip(
    "torch_geometric.nn", reason="torch_geometric is not installed: PyG's layers are left out"
)

TYPES = torch.randint(0, 3, (E,), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.rand(E)

#: name -> layer, arguments after the features, ops in forward and backward.
LAYERS: dict[str, tuple[Any, tuple[Any, ...], list[int]]] = {
    "GCNConv": (lambda: pyg.GCNConv(8, 16, add_self_loops=False), (graph_of(), WEIGHTS), [1, 1]),
    "GCNConv without normalisation": (
        lambda: pyg.GCNConv(8, 16, normalize=False),
        (graph_of(),),
        [1, 1],
    ),
    "SAGEConv": (lambda: pyg.SAGEConv(8, 16), (graph_of(),), [1, 1]),
    "SAGEConv, sum": (lambda: pyg.SAGEConv(8, 16, aggr="sum"), (graph_of(),), [1, 1]),
    "GATConv": (lambda: pyg.GATConv(8, 16, heads=4, add_self_loops=False), (graph_of(),), [2, 4]),
    "FastRGCNConv": (lambda: pyg.FastRGCNConv(8, 16, 3), (graph_of(), TYPES), [1, 2]),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", LAYERS)
def test_one_op_per_step(name: str, dynamic: bool | None) -> None:
    make, arguments, expected = LAYERS[name]
    layer: nn.Module = make()
    run, graphs = compiled(layer, fullgraph=True, dynamic=dynamic)
    agrees(layer, run, (leaf(N, 8), *arguments), list(layer.parameters()), rtol=1e-4, atol=1e-5)
    assert counts(graphs) == expected, str(insum.fusion.report())


def test_self_loops_that_are_added_in_the_layer() -> None:
    """Their number is not known when the graph is traced."""
    for layer, expected in ((pyg.GCNConv(8, 16), [1, 1]), (pyg.GATConv(8, 16, heads=2), [2, 4])):
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            run, graphs = compiled(layer, fullgraph=True, dynamic=True)
            agrees(
                layer, run, (leaf(N, 8), graph_of()), list(layer.parameters()), rtol=1e-4, atol=1e-5
            )
        assert counts(graphs) == expected, str(insum.fusion.report())


def test_a_layer_that_keeps_its_normalised_edges() -> None:
    layer = pyg.GCNConv(8, 16, cached=True)
    run, graphs = compiled(layer)
    for _ in range(3):
        agrees(layer, run, (leaf(N, 8), graph_of()), list(layer.parameters()), rtol=1e-4, atol=1e-5)
    assert counts(graphs)[-2:] == [1, 1]


def test_relations_one_by_one() -> None:
    """RGCNConv masks the edges of each relation in turn and breaks its graph there; the step of one
    relation is compiled once for all of them.
    """
    layer = pyg.RGCNConv(8, 16, 3)
    run, graphs = compiled(layer, dynamic=True)
    agrees(
        layer, run, (leaf(N, 8), graph_of(), TYPES), list(layer.parameters()), rtol=1e-4, atol=1e-5
    )
    assert sum(counts(graphs)) % 2 == 0 and set(counts(graphs)) == {0, 1}
    steps = [found for found in insum.fusion.report().fused if not found.backward]
    assert steps and all("[" in found.statement for found in steps)


def test_relations_in_one_graph() -> None:
    layer = pyg.RGCNConv(8, 16, 3)
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        run, _ = compiled(layer, dynamic=True)
        agrees(
            layer,
            run,
            (leaf(N, 8), graph_of(), TYPES),
            list(layer.parameters()),
            rtol=1e-4,
            atol=1e-5,
        )
    forward = [found for found in insum.fusion.report().fused if not found.backward]
    assert len(forward) >= 1


@pytest.mark.parametrize("name", ["SAGEConv", "GATConv"])
def test_no_compilation_for_another_number_of_edges(name: str) -> None:
    make, _, _ = LAYERS[name]
    layer: nn.Module = make()
    run, _ = compiled(layer, dynamic=True, fullgraph=True)
    before = 0
    for step, edges in enumerate((E, 50, 77)):
        agrees(
            layer,
            run,
            (leaf(N, 8), graph_of(N, edges)),
            list(layer.parameters()),
            rtol=1e-4,
            atol=1e-5,
        )
        before = compiled_graphs() if step == 0 else before
    assert compiled_graphs() == before


def test_two_layers_and_a_loss() -> None:
    """A small model: each layer one op forward, and those of its gradients."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                pyg.SAGEConv(8, 16),
                pyg.GATConv(16, 4, heads=2, add_self_loops=False),
            )

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.second(self.first(x, edges).relu(), edges).log_softmax(-1)

    model = Model()
    run, graphs = compiled(model, fullgraph=True)
    agrees(model, run, (leaf(N, 8), graph_of()), list(model.parameters()), rtol=1e-4, atol=1e-5)
    assert counts(graphs) == [4, 6], str(insum.fusion.report())


def test_convolution_over_27_offsets() -> None:
    pairs = [graph_of(20, 12 + z, seed=z) for z in range(27)]

    def convolution(x: Tensor, w: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], w.shape[2])
        for z, (i, o) in enumerate(pairs):
            out.index_add_(0, o, x[i] @ w[z])
        return out

    run, graphs = compiled(convolution, fullgraph=True)
    agrees(convolution, run, (leaf(20, 8), leaf(27, 8, 4)), rtol=1e-4, atol=1e-4)
    assert counts(graphs) == [1, 2], (
        "all offsets together, forward; and backward for the inputs and for the weights"
    )


def test_every_layer_is_in_the_count() -> None:
    named = {name.partition(",")[0] for name in pyg_layers.LAYERS}
    assert set(pyg.conv.__all__) <= named | set(pyg_layers.LEFT_OUT)


@pytest.mark.parametrize("name", ["ResGatedGraphConv", "HypergraphConv"])
def test_some_of_the_count(name: str) -> None:
    """All of them: ``python tests/fusion/pyg_layers.py``."""
    found = pyg_layers.checked(name, pyg)
    assert found.eager and found.agrees and found.fused and not found.warned, found
