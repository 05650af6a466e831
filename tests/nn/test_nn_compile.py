"""Every layer under `torch.compile(fullgraph=True)`: the same values and gradients as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import insum
from insum.compat import contexts
from insum.nn import (
    BlockSparseLinear,
    FullyConnectedTensorProduct,
    GCNConv,
    GraphConv,
    RelationalConv,
    SparseAvgPool3d,
    SparseConv3d,
    SparseLinear,
    SparseMaxPool3d,
    SparseSequential,
    SparseTensor,
    TensorProduct,
    adjacency,
)

EDGES = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 2, 0, 2]])
REL = torch.tensor([0, 1, 0, 1, 1])


class Features(nn.Module):
    """A convolution as a function of features, over voxels whose map has been built."""

    def __init__(self, layer: nn.Module, x: SparseTensor) -> None:
        super().__init__()
        self.layer, self.x = layer, x
        layer(x)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.layer(self.x.with_features(features)).features
        return out


def voxels() -> SparseTensor:
    coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1], [2, 2, 2]])
    return SparseTensor(coords, torch.randn(4, 3))


LAYERS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "SparseLinear": lambda: (
        SparseLinear.from_dense(nn.Linear(6, 4), density=0.5),
        (torch.randn(2, 3, 6),),
    ),
    "BlockSparseLinear": lambda: (
        BlockSparseLinear.from_dense(nn.Linear(7, 6), density=0.5, block_shape=2),
        (torch.randn(3, 7),),
    ),
    "GraphConv": lambda: (GraphConv(3, 2), (torch.randn(4, 3), EDGES, torch.rand(5))),
    "GraphConv, mean": lambda: (GraphConv(3, 2, aggr="mean"), (torch.randn(4, 3), EDGES)),
    "GraphConv, max": lambda: (GraphConv(3, 2, aggr="max"), (torch.randn(4, 3), EDGES)),
    "GraphConv, matrix": lambda: (
        GraphConv(3, 2),
        (torch.randn(4, 3), adjacency(EDGES, num_nodes=4)),
    ),
    "GCNConv": lambda: (GCNConv(3, 2), (torch.randn(4, 3), EDGES)),
    "RelationalConv": lambda: (RelationalConv(3, 2, 2), (torch.randn(4, 3), EDGES, REL)),
    "SparseConv3d": lambda: (
        Features(SparseConv3d(3, 2, 3, submanifold=True), voxels()),
        (torch.randn(4, 3),),
    ),
    "SparseConv3d, strided": lambda: (
        Features(SparseConv3d(3, 2, 2, stride=2), voxels()),
        (torch.randn(4, 3),),
    ),
    "SparseSequential": lambda: (
        Features(
            SparseSequential(
                SparseConv3d(3, 6, 3, submanifold=True, groups=3),
                nn.LayerNorm(6),
                SparseMaxPool3d(2),
                SparseConv3d(6, 6, 3, submanifold=True, groups=2),
                SparseAvgPool3d(2),
            ),
            voxels(),
        ),
        (torch.randn(4, 3),),
    ),
    "TensorProduct": lambda: (
        TensorProduct(
            "2x0e+2x1o", "0e+1o", "2x0e+2x1o", [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", False)]
        ),
        (torch.randn(3, 8), torch.randn(3, 4)),
    ),
    "FullyConnectedTensorProduct": lambda: (
        FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "2x0e+1x1o", shared_weights=False),
        (torch.randn(3, 8), torch.randn(3, 4), torch.randn(3, 12)),
    ),
}


def differentiated(
    function: Callable[..., Tensor], layer: nn.Module, given: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """The output, and the gradients of everything that has one."""
    leaves = [t for t in given if isinstance(t, Tensor) and t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    out = function(*given)
    upstream = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return (out.detach(), *torch.autograd.grad(out, [*leaves, *layer.parameters()], upstream))


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_is_eager(name: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    layer, given = LAYERS[name]()
    # one through to the end; tracing is what differs between layers
    backend = "inductor" if name == "BlockSparseLinear" else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for got, want in zip(
        differentiated(compiled, layer, given), differentiated(layer, layer, given)
    ):
        assert_close(got, want)


class AtVoxels(nn.Module):
    """A layer as a function of features, over voxels that nobody has looked at yet."""

    def __init__(self, layer: nn.Module, coords: Tensor) -> None:
        super().__init__()
        self.layer, self.coords = layer, coords
        self.x = SparseTensor(coords, torch.zeros(len(coords), 4))

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.layer(self.x.with_features(features)).features
        return found


@pytest.mark.parametrize(
    "layer",
    [
        SparseConv3d(4, 3, 5, submanifold=True),
        SparseConv3d(4, 3, 3, stride=2, padding=1),
        SparseMaxPool3d(2),
        SparseAvgPool3d(3, padding=1),
    ],
    ids=["submanifold", "strided", "max", "avg"],
)
def test_a_model_over_voxels_of_its_own_is_exported(layer: nn.Module) -> None:
    coords = torch.cartesian_prod(*[torch.arange(n) for n in (1, 3, 2, 4)])
    model, features = AtVoxels(layer, coords), torch.randn(24, 4)
    program = torch.export.export(model, (features,))
    found = program.module()(features)
    assert_close(found, layer(SparseTensor(coords, features)).features)  # another map, made eagerly
    assert_close(found, model(features))  # the one that was made for the program
    assert type(model(features)) is Tensor


def test_a_failed_export_leaves_nothing_behind() -> None:
    """Numbers that were sent while torch traced were fakes, and kept for all layers to come."""
    layer = SparseConv3d(4, 3, (1, 7, 5), padding=(0, 3, 2))
    coords, features = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]]), torch.randn(2, 4)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, coords: Tensor, features: Tensor) -> Tensor:
            found: Tensor = self.layer(SparseTensor(coords, features)).features
            return found

    with pytest.raises(insum.UnsupportedError, match=r"(?s)an input of a program.*with_features"):
        torch.export.export(Whole(), (coords, features))
    assert type(Whole()(coords, features)) is Tensor


LAYERS_OVER_VOXELS = {
    "submanifold": lambda: SparseConv3d(4, 3, 3, submanifold=True),
    "strided": lambda: SparseConv3d(4, 3, 2, stride=2),
    "pool": lambda: SparseMaxPool3d(2),
}


@pytest.mark.parametrize("name", LAYERS_OVER_VOXELS)
def test_a_map_is_built_between_graphs(name: str) -> None:
    """Where there has to be one graph, the error says what to do, and doing it helps."""
    torch._dynamo.reset()
    layer = LAYERS_OVER_VOXELS[name]()
    coords = torch.cartesian_prod(*[torch.arange(n) for n in (1, 3, 2, 4)])
    features = torch.randn(24, 4)
    want = layer(SparseTensor(coords, features)).features

    def forward(x: SparseTensor) -> Tensor:
        found: Tensor = layer(x).features
        return found

    x = SparseTensor(coords, features)
    whole = torch.compile(forward, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Call the layer once on this"):
        whole(x)
    in_parts = torch.compile(forward, backend="eager")
    assert_close(in_parts(SparseTensor(coords, features)), want)
    layer(x)
    assert_close(whole(x), want)


def test_a_sparse_tensor_that_is_made_in_a_compiled_function() -> None:
    torch._dynamo.reset()
    layer = SparseConv3d(4, 3, 3, submanifold=True)
    coords = torch.cartesian_prod(*[torch.arange(n) for n in (1, 3, 2, 4)])
    features = torch.randn(24, 4)

    def forward(coords: Tensor, features: Tensor) -> Tensor:
        found: Tensor = layer(SparseTensor(coords, features)).features
        return found

    with pytest.raises(torch._dynamo.exc.Unsupported, match="Make it outside of the function"):
        torch.compile(forward, backend="eager", fullgraph=True)(coords, features)
    torch._dynamo.reset()
    assert_close(
        torch.compile(forward, backend="eager")(coords, features), forward(coords, features)
    )


def test_where_modes_cannot_be_left_a_layer_is_not_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("torch.utils._python_dispatch._disable_current_modes")
    assert contexts._unseen() is contexts._NOTHING
