"""Layers over voxels in one to four dimensions against PyTorch's dense layers on grids, and, where
PyTorch has none, against a loop over the kernel: outputs and gradients, drawn sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from insum import nn as layers
from insum.nn import SparseTensor
from insum.nn import kernel_map as maps
from insum.nn.kernel_map import Geometry

SIDES = {1: 17, 2: 9, 3: 6, 4: 4}


def of_dimension(name: str, ndim: int) -> Any:
    return getattr(layers, f"{name}{ndim}d")


def grid(draw: random.Random, ndim: int, channels: int, batches: int, low: int = 3) -> Tensor:
    torch.manual_seed(draw.randrange(10**6))
    sides = [draw.randint(low, SIDES[ndim]) for _ in range(ndim)]
    there = torch.rand(batches, 1, *sides) < draw.choice((0.1, 0.3))
    there[(0, 0, *[side // 2 for side in sides])] = True
    return torch.randn(batches, channels, *sides, dtype=torch.float64) * there


def at(dense: Tensor, coords: Tensor) -> Tensor:
    return dense.movedim(1, -1)[tuple(coords.long().unbind(1))]


def compare(layer: nn.Module, dense: Callable[[Tensor], Tensor], full: Tensor) -> SparseTensor:
    """Outputs, and the gradient of the inputs."""
    a, b = full.clone().requires_grad_(), full.clone().requires_grad_()
    x = SparseTensor.from_dense(a)
    got: SparseTensor = layer(x)
    want = at(dense(b), got.coords)
    assert_close(got.features, want)
    upstream = torch.randn_like(want)
    got.features.backward(upstream)
    want.backward(upstream)
    assert a.grad is not None and b.grad is not None
    assert_close(a.grad, b.grad * (full != 0).any(1, keepdim=True))
    return got


def windows(full: Tensor, g: Geometry, fill: float = 0.0) -> list[Tensor]:
    """What every offset of a kernel sees: grids of the size of the outputs."""
    shape = full.shape[2:] if g.submanifold else g.spatial_shape(tuple(full.shape[2:]))
    assert shape is not None
    ends = [(p, max(0, (n - 1) * s + r + 1 - size - p))
            for p, n, s, r, size in zip(g.padding, shape, g.stride, g.reach, full.shape[2:])
            ]  # fmt: skip
    padded = nn.functional.pad(full, [e for pair in reversed(ends) for e in pair], value=fill)
    return [
        padded[
            (..., *(slice(o, o + s * (n - 1) + 1, s) for o, s, n in zip(place, g.stride, shape)))
        ]
        for place in g.places()
    ]


def looped(full: Tensor, layer: Any) -> Tensor:
    """A convolution as a loop over its kernel, in any number of dimensions."""
    g, groups, weight = layer.geometry, layer.groups, layer.weight
    parts = weight.reshape(len(weight), -1, groups, layer.out_channels // groups)
    product = lambda seen, part: torch.einsum(
        "bgc...,cgm->bgm...", seen.unflatten(1, (groups, -1)), part
    ).flatten(1, 2)
    if not g.transposed:
        out = sum(product(seen, part) for seen, part in zip(windows(full, g), parts))
    else:
        shape = g.spatial_shape(tuple(full.shape[2:]))
        whole = [n + 2 * p + max(g.reach) for n, p in zip(shape, g.padding)]
        out = full.new_zeros(full.shape[0], layer.out_channels, *whole)
        for place, part in zip(g.places(), parts):
            where = [slice(o, o + s * (n - 1) + 1, s)
                     for o, s, n in zip(place, g.stride, full.shape[2:])]  # fmt: skip
            out[(..., *where)] += product(full, part)
        out = out[(..., *(slice(p, p + n) for p, n in zip(g.padding, shape)))]
    return out if layer.bias is None else out + layer.bias.reshape(-1, *[1] * g.ndim)


def options(draw: random.Random, ndim: int, kind: str) -> dict[str, Any]:
    groups = draw.choice((1, 1, 2, 4))
    sizes = lambda low, high: tuple(draw.randint(low, high) for _ in range(ndim))
    wide = 3 if ndim < 4 else 2
    made = {"in_channels": 4, "out_channels": draw.choice((4, 8)), "groups": groups,
            "bias": draw.random() < 0.5, "kernel_size": sizes(1, wide), "dilation": sizes(1, 2)
            }  # fmt: skip
    if kind == "submanifold":
        return {**made, "submanifold": True}
    padding = tuple(
        draw.randint(0, d * (k - 1)) for d, k in zip(made["dilation"], made["kernel_size"])
    )
    return {**made, "stride": sizes(1, 3), "padding": padding, "transposed": kind == "transposed"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["strided", "submanifold", "transposed"])
@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_convolutions(ndim: int, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{ndim} {kind} {seed}")
    monkeypatch.setattr(maps, "TABLE_FROM", draw.choice((0.0, 2.0)))  # either way to hold a map
    layer = of_dimension("SparseConv", ndim)(**options(draw, ndim, kind)).double()
    full = grid(draw, ndim, 4, draw.randint(1, 3), low=5 if ndim < 3 else 4)
    if any(
        n + 2 * p <= r
        for n, p, r in zip(full.shape[2:], layer.geometry.padding, layer.geometry.reach)
    ):
        full = nn.functional.pad(full, [0, 4] * ndim)
    compare(layer, lambda b: looped(b, layer), full)
    x = SparseTensor.from_dense(full)
    out = layer(x)
    upstream = torch.randn_like(out.features)
    ours = torch.autograd.grad(out.features, [*layer.parameters()], upstream)
    want = torch.autograd.grad(at(looped(full, layer), out.coords), [*layer.parameters()], upstream)
    assert_close(ours, want)
    if kind != "submanifold" and layer.bias is None:
        assert_close(out.to_dense(full.shape[0]), looped(full, layer).detach())


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_weights_of_dense_layers(ndim: int, kind: str, groups: int) -> None:
    """Also that the loop is what PyTorch does."""
    draw = random.Random(f"{ndim} {kind} {groups}")
    dense = getattr(nn, f"{kind}{ndim}d")(
        6, 12, 3, stride=2, padding=1, dilation=draw.choice((1, 2)), groups=groups
    ).double()
    layer = of_dimension("SparseConv", ndim).from_dense(dense)
    full = grid(draw, ndim, 6, 2, low=5)
    compare(layer, dense, full)
    assert_close(looped(full, layer), dense(full))


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(("kernel", "dilation"), [(2, 1), (4, 1), (2, 2), (5, 1)])
def test_submanifold_kernels_are_padded_as_same(ndim: int, kernel: int, dilation: int) -> None:
    dense = getattr(nn, f"Conv{ndim}d")(3, 4, kernel, dilation=dilation).double()
    layer = of_dimension("SparseConv", ndim).from_dense(dense, submanifold=True)
    reach = dilation * (kernel - 1)
    ends = [reach // 2, reach - reach // 2] * ndim
    compare(layer, lambda b: dense(nn.functional.pad(b, ends)), grid(random.Random(1), ndim, 3, 2))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["Max", "Avg", "Avg, empty"])
def test_pooling(ndim: int, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{ndim} {kind} {seed}")
    monkeypatch.setattr(maps, "TABLE_FROM", draw.choice((0.0, 2.0)))
    kernel = tuple(draw.randint(1, 3) for _ in range(ndim))
    stride = draw.choice((None, 1, 2))
    padding = tuple(draw.randint(0, k // 2) for k in kernel)
    more = {"count_empty": True} if kind == "Avg, empty" else {}
    layer = of_dimension(f"Sparse{kind[:3]}Pool", ndim)(kernel, stride, padding, **more)
    full = grid(draw, ndim, 3, 2)
    there = (full != 0).any(1, keepdim=True)

    def dense(b: Tensor) -> Tensor:
        if kind == "Max":
            given = torch.where(there, b, float("-inf"))
            return torch.stack(windows(given, layer.geometry, float("-inf"))).amax(0)
        total = torch.stack(windows(b, layer.geometry)).sum(0)
        if kind == "Avg, empty":
            return total / layer.geometry.volume
        return total / torch.stack(windows(there.double(), layer.geometry)).sum(0).clamp(min=1)

    compare(layer, dense, full)
    if ndim < 4 and kind != "Avg":
        torchs = getattr(nn, f"{kind[:3]}Pool{ndim}d")(kernel, stride, padding)
        given = torch.where(there, full, float("-inf")) if kind == "Max" else full
        got = layer(SparseTensor.from_dense(full))
        assert_close(got.features, at(torchs(given), got.coords))


def test_pooling_to_given_voxels() -> None:
    x = SparseTensor(torch.tensor([[0], [1], [9]]), torch.tensor([[1.0], [2.0], [3.0]]), ndim=1)
    like = SparseTensor(torch.tensor([[0], [2]]), torch.ones(2, 1), ndim=1)
    assert layers.SparseMaxPool1d(2)(x, like).features.tolist() == [[2.0], [0.0]]
    assert layers.SparseAvgPool1d(2)(x, like=like).features.tolist() == [[1.5], [0.0]]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_global_pooling(reduce: str) -> None:
    full = grid(random.Random(1), 3, 4, 3)
    full[1] = 0  # a batch without voxels
    x = SparseTensor.from_dense(full.clone().requires_grad_())
    out = layers.GlobalPool(reduce)(x)
    assert out.shape == (3, 4) and not out[1].any()
    for number in (0, 2):
        rows = x.features[x.coords[:, 0] == number]
        want = rows.amax(0) if reduce == "max" else getattr(rows, reduce)(0)
        assert_close(out[number], want)
    assert torch.autograd.grad(out.sum(), x.features)[0].any()
    assert layers.GlobalPool(reduce)(x, batch_size=5).shape == (5, 4)


def test_half_precision_is_averaged_wide() -> None:
    x = SparseTensor(torch.arange(300)[:, None], torch.full((300, 1), 500.0).half(), ndim=1)
    assert layers.GlobalPool("mean")(x).item() == 500.0


@pytest.mark.parametrize("ndim", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_voxels(ndim: int, count: int) -> None:
    x = SparseTensor(torch.zeros(count, ndim, dtype=torch.int32), torch.ones(count, 2), ndim=ndim)
    conv = of_dimension("SparseConv", ndim)
    for layer in (
        conv(2, 3, 3, submanifold=True),
        conv(2, 3, 2, stride=2),
        conv(2, 3, 2, stride=2, transposed=True),
        conv(2, 2, 3, submanifold=True, groups=2),
        of_dimension("SparseMaxPool", ndim)(2),
        of_dimension("SparseAvgPool", ndim)(2),
    ):
        assert layer(x).voxels.count == (0 if count == 0 else max(1, layer(x).voxels.count))
    assert layers.GlobalPool("max")(x).shape == (1, 2)


def test_layers_over_voxels_are_sparse_modules() -> None:
    for kind in ("SparseConv", "SparseMaxPool", "SparseAvgPool"):
        assert all(issubclass(of_dimension(kind, n), layers.SparseModule) for n in range(1, 5))
    assert issubclass(layers.GlobalPool, layers.SparseModule)
    assert not issubclass(nn.Linear, layers.SparseModule)


def test_sequences_of_layers() -> None:
    full = grid(random.Random(3), 2, 4, 2).float()
    block = layers.SparseSequential(
        layers.SparseConv2d(4, 8, 3, submanifold=True, bias=False),
        nn.BatchNorm1d(8),
        nn.Sequential(nn.ReLU(), nn.Linear(8, 8)),
        Residual(8),
        nn.Dropout(0.5),
        layers.SparseMaxPool2d(2),
    ).eval()
    x = SparseTensor.from_dense(full)
    by_hand = block[0](x)
    by_hand = by_hand.with_features(block[2](block[1](by_hand.features)))
    by_hand = by_hand + block[3].conv(by_hand)
    assert_close(block(x).features, block[5](by_hand).features)
    assert [type(one).__name__ for one in block] == [type(m).__name__ for m in block.children()]


class Residual(nn.Module):
    """A module of a user, with a layer inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = layers.SparseConv2d(width, width, 3, submanifold=True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x + self.conv(x)  # type: ignore[no-any-return]


def test_a_kernel_of_one_place_needs_no_map() -> None:
    x = SparseTensor.from_dense(grid(random.Random(0), 3, 4, 1))
    layer = layers.SparseConv3d(4, 5, 1, submanifold=True).double()
    assert_close(layer(x).features, x.features @ layer.weight[0] + layer.bias)
    assert not x.voxels.maps


def test_autocast() -> None:
    x = SparseTensor.from_dense(grid(random.Random(0), 3, 4, 1).float())
    for options in ({"kernel_size": 3}, {"kernel_size": 1}):
        layer = layers.SparseConv3d(4, 5, submanifold=True, **options)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype is torch.bfloat16


def test_pools_share_maps_with_convolutions() -> None:
    x = SparseTensor.from_dense(grid(random.Random(0), 3, 4, 1).float())
    down = layers.SparseConv3d(4, 4, 2, stride=2)(x)
    assert layers.SparseMaxPool3d(2)(x).voxels is down.voxels and len(x.voxels.maps) == 1


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("dilation", [1, 3])
def test_what_a_kernel_reaches(kernel: int, stride: int, dilation: int) -> None:
    """Few candidates for each input, and all that there are."""
    g = Geometry((kernel,), (stride,), (1,), (dilation,))
    inputs = torch.tensor([[0, c] for c in range(-7, 9)])
    outputs, there = g.reached(inputs, g.steps(torch.device("cpu")))
    assert there is not None and len(outputs) == dilation * (kernel - 1) // stride + 1
    got = [{int(o) for o, t in zip(outputs[:, n, 1], there[:, n]) if t} for n in range(len(inputs))]
    offsets = [k * dilation - 1 for k in range(kernel)]
    for found, (_, place) in zip(got, inputs.tolist()):
        assert found == {o for o in range(-30, 30) if place - o * stride in offsets}
