"""Every layer on a GPU equals itself on the CPU in float64: outputs, and gradients of inputs and
parameters.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import insum
from insum import nn as layers
from insum.bench.fresh import no_waits
from insum.nn import (
    BlockSparseLinear,
    FullyConnectedTensorProduct,
    GCNConv,
    GraphConv,
    RelationalConv,
    SemiStructuredLinear,
    SparseConv3d,
    SparseLinear,
    SparseTensor,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


class OverVoxels(nn.Module):
    """A chain of convolutions, down and up again, as a function of coordinates and features."""

    def __init__(self) -> None:
        super().__init__()
        self.same = SparseConv3d(16, 32, 3, submanifold=True)
        self.down = SparseConv3d(32, 32, 3, stride=2, padding=1)
        self.up = SparseConv3d(32, 16, 3, stride=2, padding=1, transposed=True)

    def forward(self, coords: Tensor, features: Tensor) -> Tensor:
        x = self.same(SparseTensor(coords, features))
        out: Tensor = self.up(self.down(x), like=x).features
        return out


class OverDimensions(nn.Module):
    """Convolutions in any number of dimensions, down and up again."""

    def __init__(self, ndim: int, groups: int) -> None:
        super().__init__()
        conv = getattr(layers, f"SparseConv{ndim}d")
        self.ndim = ndim
        self.same = conv(16, 32, 3, submanifold=True, groups=groups)
        self.even = conv(32, 32, 2, submanifold=True, groups=groups)
        self.down = conv(32, 32, 3, stride=2, padding=1, groups=groups)
        self.up = conv(32, 16, 2, stride=2, transposed=True, groups=groups)

    def forward(self, coords: Tensor, features: Tensor) -> Tensor:
        x = self.even(self.same(SparseTensor(coords, features, ndim=self.ndim)))
        out: Tensor = self.up(self.down(x), like=x).features
        return out


class Pooled(nn.Module):
    def __init__(self, ndim: int, kind: str) -> None:
        super().__init__()
        self.ndim, self.pool = ndim, getattr(layers, f"Sparse{kind}Pool{ndim}d")(3, 2, 1)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, coords: Tensor, features: Tensor) -> Tensor:
        out: Tensor = self.pool(
            SparseTensor(coords, self.scale * features, ndim=self.ndim)
        ).features
        return out


class AllOf(nn.Module):
    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.pool = layers.GlobalPool(reduce)

    def forward(self, coords: Tensor, features: Tensor) -> Tensor:
        out: Tensor = self.pool(SparseTensor(coords, features))
        return out


class Between(nn.Module):
    def forward(self, coords: Tensor, features: Tensor) -> Tensor:
        points = (coords[:, 1:] + 0.3).to(features.dtype)
        return layers.devoxelize(SparseTensor(coords, features), points, 1.0)


def over_dimensions(ndim: int, kind: str) -> tuple[nn.Module, tuple[Any, ...]]:
    side = {1: 400, 2: 40, 3: 14, 4: 7}[ndim]
    coords = (torch.rand(2, *[side] * ndim) < 0.3).nonzero()
    groups = {"full": 1, "groups": 4, "depthwise": 16}[kind]
    return OverDimensions(ndim, groups), (coords, torch.randn(len(coords), 16))


def pooled(ndim: int, kind: str) -> tuple[nn.Module, tuple[Any, ...]]:
    _, given = over_dimensions(ndim, "full")
    return Pooled(ndim, kind), given


def graph() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 300, (2, 2000)), torch.randint(0, 4, (2000,))


def coords(density: float) -> Tensor:
    return (torch.rand(1, 16, 16, 16) < density).nonzero()


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "SparseLinear": lambda: (
        SparseLinear.from_dense(nn.Linear(96, 64), density=0.1),
        (torch.randn(50, 96),),
    ),
    "BlockSparseLinear": lambda: (
        BlockSparseLinear.from_dense(nn.Linear(128, 96), density=0.3),
        (torch.randn(50, 128),),
    ),
    "GraphConv": lambda: (GraphConv(32, 16), (torch.randn(300, 32), graph()[0], torch.rand(2000))),
    "GraphConv, mean": lambda: (GraphConv(16, 32, aggr="mean"), (torch.randn(300, 16), graph()[0])),
    "GraphConv, max": lambda: (GraphConv(16, 32, aggr="max"), (torch.randn(300, 16), graph()[0])),
    "GCNConv": lambda: (GCNConv(32, 16), (torch.randn(300, 32), graph()[0])),
    "RelationalConv": lambda: (RelationalConv(32, 16, 4), (torch.randn(300, 32), *graph())),
    "SparseConv3d, dense": lambda: (OverVoxels(), ((c := coords(0.5)), torch.randn(len(c), 16))),
    "SparseConv3d, sparse": lambda: (OverVoxels(), ((c := coords(0.03)), torch.randn(len(c), 16))),
    **{
        f"SparseConv{n}d, {kind}": functools.partial(over_dimensions, n, kind)
        for n, kind in itertools.product((1, 2, 4), ("full", "groups", "depthwise"))
    },
    "depthwise": lambda: over_dimensions(3, "depthwise"),
    "groups": lambda: over_dimensions(3, "groups"),
    **{
        f"Sparse{kind}Pool{n}d": functools.partial(pooled, n, kind)
        for n, kind in itertools.product((1, 2, 3, 4), ("Max", "Avg"))
    },
    "GlobalPool": lambda: (AllOf("max"), ((c := coords(0.2)), torch.randn(len(c), 16))),
    "GlobalPool, mean": lambda: (AllOf("mean"), ((c := coords(0.2)), torch.randn(len(c), 16))),
    "devoxelize": lambda: (Between(), ((c := coords(0.2)), torch.randn(len(c), 16))),
    "FullyConnectedTensorProduct": lambda: (
        (
            p := FullyConnectedTensorProduct(
                "16x0e+16x1o+16x2e", "0e+1o+2e", "16x0e+16x1o+16x2e", shared_weights=False
            )
        ),
        (torch.randn(70, p.irreps_in1.dim), torch.randn(70, 9), torch.randn(70, p.weight_numel)),
    ),
    "FullyConnectedTensorProduct, unequal": lambda: (
        FullyConnectedTensorProduct("8x0e+4x1o", "2x0e+1x1o", "16x0e+4x1o"),
        (torch.randn(70, 20), torch.randn(70, 5)),
    ),
}


def differentiated(layer: nn.Module, given: tuple[Any, ...]) -> list[Tensor]:
    leaves = [t.requires_grad_() for t in given if t.is_floating_point()]
    out = layer(*given)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).reshape(
        out.shape
    )
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *layer.parameters()], upstream)]


def moved(given: tuple[Any, ...], device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(
        t.detach().to(device=device, dtype=dtype if t.is_floating_point() else None) for t in given
    )


@pytest.mark.parametrize("name", CASES)
def test_gpu_is_cpu(name: str) -> None:
    torch.manual_seed(0)
    layer, given = CASES[name]()
    want = differentiated(copy.deepcopy(layer).double(), moved(given, "cpu", torch.float64))
    on_gpu = copy.deepcopy(layer).cuda()
    for _ in range(2):  # the second call finds everything prepared
        got = differentiated(on_gpu, moved(given, "cuda", torch.float32))
    for a, b in zip(got, want):
        assert_close(a.cpu().double(), b, atol=1e-4 * b.abs().max().item(), rtol=1e-4)


def test_forces_on_the_gpu() -> None:
    torch.manual_seed(0)
    product = (
        FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "2x0e+2x1o", internal_weights=False)
        .double()
        .cuda()
    )
    given = tuple(
        torch.randn(*s, dtype=torch.float64, device="cuda", requires_grad=True)
        for s in ((2, 8), (2, 4), (product.weight_numel,))
    )
    assert torch.autograd.gradgradcheck(product, given)


# --- new data at every call -----------------------------------------------------------------------


class Submanifold(nn.Module):
    """Two convolutions over one set of voxels."""

    def __init__(self, kernel: int = 3, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.one, self.two = (
            SparseConv3d(16, 16, kernel, dilation=dilation, submanifold=True, groups=groups)
            for _ in range(2)
        )

    def forward(self, coords: Tensor, features: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(SparseTensor(coords, features))).features
        return out


def new_cloud(seed: int, count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    batch, place = torch.randint(0, 2, (count, 1)), torch.randint(-12, 12, (count, 3))
    coords = torch.unique(torch.cat([batch, place], 1), dim=0)
    coords = coords[torch.randperm(len(coords))].int()
    return coords, torch.randn(len(coords), 16)


def new_graph(seed: int, edges: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(300, 32), torch.randint(0, 300, (2, edges))


FRESH: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "SparseConv3d": (Submanifold, lambda seed: new_cloud(seed, 5000 + 37 * seed)),
    "SparseConv3d, few": (Submanifold, lambda seed: new_cloud(seed, 20 + seed)),
    "SparseConv3d, kernel 5": (lambda: Submanifold(5), lambda seed: new_cloud(seed, 3000)),
    "SparseConv3d, dilation 2": (lambda: Submanifold(3, 2), lambda seed: new_cloud(seed, 3000)),
    "SparseConv3d, even": (lambda: Submanifold(2), lambda seed: new_cloud(seed, 3000)),
    "SparseConv3d, depthwise": (
        lambda: Submanifold(3, groups=16),
        lambda seed: new_cloud(seed, 3000),
    ),
    "GCNConv": (lambda: GCNConv(32, 16), lambda seed: new_graph(seed, 2000 + 37 * seed)),
    "GCNConv, weights": (
        lambda: GCNConv(32, 16),
        lambda seed: (*new_graph(seed, 2000 + 37 * seed), torch.rand(2000 + 37 * seed)),
    ),
    "GCNConv, no loops": (
        lambda: GCNConv(32, 16, add_self_loops=False),
        lambda seed: new_graph(seed, 2000 + 37 * seed),
    ),
    "GraphConv": (lambda: GraphConv(32, 16), lambda seed: new_graph(seed, 2000 + 37 * seed)),
    "GraphConv, mean": (
        lambda: GraphConv(32, 48, aggr="mean"),
        lambda seed: new_graph(seed, 2000 + 37 * seed),
    ),
    "RelationalConv": (
        lambda: RelationalConv(32, 16, 4),
        lambda seed: (*new_graph(seed, 2000 + 37 * seed), torch.arange(2000 + 37 * seed) % 4),
    ),
    "GraphConv, max": (
        lambda: GraphConv(32, 48, aggr="max"),
        lambda seed: new_graph(seed, 2000 + 37 * seed),
    ),
}


@pytest.mark.parametrize("name", FRESH)
def test_new_data_without_waits(name: str) -> None:
    """Forward and backward; the first call compiles."""
    torch.manual_seed(0)
    make, draw = FRESH[name]
    layer = make()
    exact, on_gpu = copy.deepcopy(layer).double(), copy.deepcopy(layer).cuda()
    for seed in range(6):
        given = draw(seed)
        want = differentiated(exact, moved(given, "cpu", torch.float64))
        here = moved(given, "cuda", torch.float32)
        torch.cuda.synchronize()
        with no_waits() if seed else contextlib.nullcontext():
            got = differentiated(on_gpu, here)
        insum.synchronize()
        for a, b in zip(got, want, strict=True):
            assert_close(a.cpu().double(), b, atol=1e-4 * b.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("name", FRESH)
def test_the_same_data_without_waits(name: str) -> None:
    torch.manual_seed(0)
    make, draw = FRESH[name]
    layer, given = make().cuda(), draw(1)
    want = differentiated(copy.deepcopy(layer).double().cpu(), moved(given, "cpu", torch.float64))
    here = moved(given, "cuda", torch.float32)
    for step in range(8):
        torch.cuda.synchronize()
        with no_waits() if step else contextlib.nullcontext():
            got = differentiated(layer, here)
        for a, b in zip(got, want, strict=True):
            assert_close(a.cpu().double(), b, atol=1e-4 * b.abs().max().item(), rtol=1e-4)


def test_a_strided_convolution_waits_once() -> None:
    layer = SparseConv3d(16, 16, 3, stride=2, padding=1).cuda()
    for seed in range(3):
        coords, features = (t.cuda() for t in new_cloud(seed, 3000))
        with torch.profiler.profile() as profile:
            layer(SparseTensor(coords, features))
        reads = [e for e in profile.events() if e.name == "aten::_local_scalar_dense"]
        copies = [e for e in profile.events() if "Memcpy DtoH" in e.name]
        assert not reads and len(copies) <= 1


def test_mistakes_are_reported_by_a_later_call() -> None:
    coords = torch.tensor([[0, 1, 2], [3, 3, 3], [0, 1, 2]], device="cuda")
    layer = SparseConv3d(2, 2, 3, submanifold=True).cuda()
    with pytest.raises(
        insum.FormatError, match=r"coords\[0\] and coords\[2\] are both \(0, 0, 1, 2\)"
    ):
        layer(SparseTensor(coords, torch.ones(3, 2, device="cuda")))
        insum.synchronize()
    x, edges = new_graph(0, 50)
    edges[1, 7] = 300
    with pytest.raises(
        insum.IndexRangeError, match=r"edge_index\[1, 7\] is 300, but there are 300"
    ):
        GCNConv(32, 16).cuda()(x.cuda(), edges.cuda())
        insum.synchronize()
    insum.synchronize()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_of_four_on_sparse_tensor_cores(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = SemiStructuredLinear(256, 128).to("cuda", dtype)
    x = torch.randn(3, 40, 256, device="cuda", dtype=dtype)
    want = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad():
        assert layer._fits(x) and layer._packed is None
        got = layer(x)
        assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
        if torch.cuda.get_device_capability()[0] in (8, 9):
            assert layer.packed() is not None, "torch multiplied nothing on sparse tensor cores"
        layer.values.mul_(2)
        assert_close(layer(x).double() - layer.bias, 2 * (want - layer.bias), rtol=3e-2, atol=3e-2)
    layer(x).sum().backward()
    assert layer.values.grad is not None
