"""`SparseConv3d` against PyTorch's dense convolutions on grids of few voxels, both spellings."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from insum.errors import FormatError, IndexRangeError
from insum.formats import GroupCOO, NeighborTable
from insum.nn import SparseConv3d, SparseTensor
from insum.nn import kernel_map as maps

SHAPE = (7, 6, 8)
SPELLINGS = {"table": 0.0, "grouped": 2.0}


@pytest.fixture(params=SPELLINGS)
def spelling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to hold a map, whatever the density."""
    monkeypatch.setattr(maps, "TABLE_FROM", SPELLINGS[request.param])
    return str(request.param)


def grid(
    density: float = 0.1,
    shape: tuple[int, int, int] = SHAPE,
    channels: int = 3,
    batches: int = 2,
    seed: int = 0,
) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(batches, channels, *shape, dtype=torch.float64) * (
        torch.rand(batches, 1, *shape) < density
    )


def compare(
    layer: SparseConv3d, dense: nn.Module, full: Tensor, like: SparseTensor | None = None
) -> SparseTensor:
    """Outputs where there are outputs, nothing elsewhere in the dense result (unless outputs were
    asked for), and all gradients.
    """
    a, b = full.clone().requires_grad_(), full.clone().requires_grad_()
    x = SparseTensor.from_dense(a)
    got, want = layer(x, like), dense(b)
    where = tuple(got.coords.long().unbind(1))
    assert_close(got.features, want.movedim(1, -1)[where])
    upstream = torch.randn_like(got.features)
    got.features.backward(upstream)
    want.movedim(1, -1)[where].backward(upstream)
    occupied = (full != 0).any(1, keepdim=True)
    assert_close(a.grad, b.grad * occupied)
    axes = (2, 3, 4, 0, 1) if isinstance(dense, nn.ConvTranspose3d) else (2, 3, 4, 1, 0)
    assert_close(layer.weight.grad, dense.weight.grad.permute(axes).reshape(layer.weight.shape))
    if layer.bias is not None:
        assert_close(layer.bias.grad, dense.bias.grad)
    return got


KERNELS = [
    (kernel, stride, padding, dilation)
    for kernel, stride, padding, dilation in itertools.product(
        (2, 3, (3, 1, 2)), (1, 2, 3), (0, 1), (1, 2)
    )
    if kernel != (3, 1, 2) or padding == dilation - 1
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), KERNELS)
def test_strided(
    kernel: int | tuple[int, int, int], stride: int, padding: int, dilation: int, spelling: str
) -> None:
    dense = nn.Conv3d(3, 4, kernel, stride, padding, dilation, bias=False).double()  # type: ignore[arg-type]
    full = grid()
    got = compare(SparseConv3d.from_dense(dense), dense, full)
    assert_close(got.to_dense(2), dense(full))  # and zero wherever there is no output


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), KERNELS)
def test_transposed(
    kernel: int | tuple[int, int, int], stride: int, padding: int, dilation: int, spelling: str
) -> None:
    dense = nn.ConvTranspose3d(
        3,
        4,
        kernel,  # type: ignore[arg-type]
        stride,
        padding,
        dilation=dilation,
        bias=False,
    ).double()
    full = grid(shape=(4, 3, 5))
    got = compare(SparseConv3d.from_dense(dense), dense, full)
    assert_close(got.to_dense(2), dense(full))


@pytest.mark.parametrize("kernel", [1, 3, 5, (3, 1, 5)], ids=str)
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("density", [0.05, 0.6, 1.0])
def test_submanifold(
    kernel: int | tuple[int, int, int], dilation: int, density: float, spelling: str
) -> None:
    sizes = (kernel,) * 3 if isinstance(kernel, int) else kernel
    padding = tuple(dilation * (k // 2) for k in sizes)
    dense = nn.Conv3d(3, 4, kernel, padding=padding, dilation=dilation).double()  # type: ignore[arg-type]
    layer = SparseConv3d.from_dense(dense, submanifold=True)
    got = compare(layer, dense, grid(density))
    assert got.spatial_shape == SHAPE


def test_output_padding() -> None:
    dense = nn.ConvTranspose3d(3, 4, 3, stride=2, padding=1, output_padding=1, bias=False).double()
    full = grid(shape=(4, 3, 5))
    assert_close(compare(SparseConv3d.from_dense(dense), dense, full).to_dense(2), dense(full))


def test_inverse_of_a_strided_convolution(spelling: str) -> None:
    """Back at the voxels where one came from: the dense transposed convolution, read there."""
    full = grid(shape=(6, 6, 8))
    x = SparseTensor.from_dense(full)
    down = SparseConv3d.from_dense(nn.Conv3d(3, 4, 2, stride=2).double())(x)
    dense = nn.ConvTranspose3d(4, 5, 2, stride=2).double()
    up = SparseConv3d.from_dense(dense)(down, like=x)
    assert up.voxels is x.voxels
    assert_close(up.features, dense(down.to_dense(2)).movedim(1, -1)[tuple(x.coords.unbind(1))])


def test_strided_to_given_voxels() -> None:
    full = grid()
    x, like = (
        SparseTensor.from_dense(full),
        SparseTensor.from_dense(grid(0.3, shape=(4, 3, 4), seed=1)),
    )
    dense = nn.Conv3d(3, 4, 3, stride=2, padding=1).double()
    got = SparseConv3d.from_dense(dense)(x, like=like)
    assert_close(got.features, dense(full).movedim(1, -1)[tuple(like.coords.unbind(1))])


@pytest.mark.parametrize(
    ("options", "shift"),
    [
        ({"submanifold": True}, 6),
        ({"padding": 1}, 6),
        ({"stride": 2, "padding": 1}, 3),
        ({"stride": 2, "transposed": True}, 12),
    ],
    ids=str,
)
def test_any_order_negative_coordinates_and_no_batch_column(
    options: dict[str, Any], shift: int
) -> None:
    """A cloud without bounds, moved to the middle of a grid, is the same cloud; ``shift`` is how
    far its outputs move.
    """
    torch.manual_seed(0)
    place = torch.randperm(216)[:40]
    coords, features = (
        torch.stack([place // 36, place // 6 % 6, place % 6], 1) - 3,
        torch.randn(40, 3),
    )
    layer = SparseConv3d(3, 4, 3, **options)
    free, bounded = (
        layer(SparseTensor(coords.int(), features)),
        layer(SparseTensor(coords + 6, features, spatial_shape=(16, 16, 16))),
    )
    one = {
        tuple(c): f
        for c, f in zip(
            (free.coords + torch.tensor([0, shift, shift, shift])).tolist(), free.features
        )
    }
    two = {tuple(c): f for c, f in zip(bounded.coords.tolist(), bounded.features)}
    assert one.keys() == two.keys()
    assert_close(torch.stack([one[c] for c in one]), torch.stack([two[c] for c in one]))


def test_batches_do_not_meet() -> None:
    layer = SparseConv3d(2, 2, 3, padding=1, bias=False)
    one, two = torch.randn(1, 2), torch.randn(1, 2)
    alone = layer(SparseTensor(torch.tensor([[0, 1, 1, 1]]), one))
    both = layer(SparseTensor(torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]), torch.cat([two, one])))
    assert_close(both.features[both.coords[:, 0] == 0], alone.features)


def test_no_voxels(spelling: str) -> None:
    x = SparseTensor(
        torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 3), spatial_shape=(4, 4, 4)
    )
    for options in ({"submanifold": True}, {"stride": 2}, {"stride": 2, "transposed": True}):
        y = SparseConv3d(3, 4, 3, **options)(x)  # type: ignore[arg-type]
        assert y.features.shape == (0, 4)
    assert not x.to_dense().any() and x.to_dense().shape == (1, 3, 4, 4, 4)


# --- maps ---


def test_maps_are_shared_by_layers_of_one_resolution() -> None:
    x = SparseTensor.from_dense(grid().float())
    one, two = (SparseConv3d(3, 3, 3, submanifold=True) for _ in range(2))
    y = two(one(x))
    assert y.voxels is x.voxels and len(x.voxels.maps) == 1
    down, again = SparseConv3d(3, 3, 2, stride=2), SparseConv3d(3, 3, 2, stride=2)
    assert down(x).voxels is again(y).voxels and len(x.voxels.maps) == 2
    coarse = down(x)
    assert SparseConv3d(3, 3, 2, stride=2, transposed=True)(coarse, like=x).voxels is x.voxels


def test_maps_do_not_keep_their_voxels_alive() -> None:
    x = SparseTensor.from_dense(grid().float())
    coarse = SparseConv3d(3, 3, 2, stride=2)(x)
    SparseConv3d(3, 3, 2, stride=2, transposed=True)(coarse, like=x)
    gone = weakref.ref(x.voxels)
    gc.disable()
    try:
        del x
        # by counting references alone: memory on a device is not held until a collection
        assert gone() is None
    finally:
        gc.enable()


def test_maps_to_voxels_that_are_gone_are_gone() -> None:
    layer = SparseConv3d(3, 3, 2, stride=2, transposed=True)
    coarse = SparseConv3d(3, 3, 2, stride=2)(SparseTensor.from_dense(grid().float()))
    held = lambda: len(coarse.voxels.maps)
    for _ in range(5):
        like = SparseTensor.from_dense(grid().float())
        found = [weakref.ref(layer(coarse, like=like).voxels) for _ in range(2)]
        assert found[0]() is found[1]() is like.voxels and held() == 1
    del like
    assert held() == 0


def test_tensors_with_maps_can_be_copied_and_pickled() -> None:
    x = SparseTensor.from_dense(grid().float())
    layer, down = SparseConv3d(3, 3, 3, submanifold=True), SparseConv3d(3, 3, 2, stride=2)
    want = layer(x).features, down(x).features
    for again in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
        assert_close((layer(again).features, down(again).features), want)


# --- coordinates ---


@pytest.mark.parametrize(
    "options",
    [{"submanifold": True}, {"padding": 1}, {"stride": 2}, {"stride": 2, "transposed": True}],
    ids=str,
)
def test_coordinates_whose_difference_needs_more_than_32_bits(options: dict[str, Any]) -> None:
    far = 2**31 - 5
    coords = torch.tensor([[-far, 0, 0], [far, 0, 0], [far, 1, 0], [-far, 1, 0]])
    features, layer = torch.randn(4, 2), SparseConv3d(2, 3, 3, **options)
    got, want = (layer(SparseTensor(c, features)) for c in (coords.int(), coords))
    assert torch.equal(got.coords, want.coords.to(got.coords.dtype))
    assert_close(got.features, want.features)


def test_a_box_of_outputs_without_keys_is_refused() -> None:
    coords = torch.tensor([[-(2**30), 0, 0], [2**30, 2**29, 0]])
    x = SparseTensor(coords, torch.ones(2, 1))
    with pytest.raises(FormatError, match="too large for 64-bit keys"):
        SparseConv3d(1, 1, 2, stride=2**17, transposed=True)(x)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int64],
    ids=str,
)
@pytest.mark.parametrize("columns", [3, 4])
def test_coordinates_of_any_integer_dtype(dtype: torch.dtype, columns: int) -> None:
    coords = torch.cartesian_prod(*[torch.arange(3)] * 3)[::2] + 100
    coords = torch.nn.functional.pad(coords, (columns - 3, 0))
    coords = coords + 2**31 * (dtype in (torch.uint32, torch.uint64)) * (columns == 3)
    features, layer = torch.randn(len(coords), 2), SparseConv3d(2, 2, 3, submanifold=True)
    want = layer(SparseTensor(coords, features)).features
    assert_close(layer(SparseTensor(coords.to(dtype), features)).features, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("columns", [3, 4])
def test_a_buffer_that_is_filled_anew_changes_nothing(dtype: torch.dtype, columns: int) -> None:
    coords = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 5, 5, 5], [0, 5, 5, 6]])[:, -columns:]
    features, layer = torch.randn(4, 2), SparseConv3d(2, 2, 3, submanifold=True)
    buffer = coords.to(dtype, copy=True)
    x = SparseTensor(buffer, features)
    buffer.random_(0, 50)
    assert_close(layer(x).features, layer(SparseTensor(coords, features)).features)
    assert torch.equal(x.coords[:, -columns:], coords.to(dtype))


def test_a_spatial_shape_that_the_coordinates_dtype_does_not_hold() -> None:
    coords = torch.tensor([[0, 7, 7, 7]], dtype=torch.int32)
    shape = (3 * 10**9, 8, 8)
    assert SparseTensor(coords, torch.ones(1, 1), spatial_shape=shape).voxels.count == 1
    with pytest.raises(IndexRangeError, match=r"coords\[0\] is \(0, -1, 7, 7\), outside"):
        SparseTensor(torch.tensor([[0, -1, 7, 7]]).int(), torch.ones(1, 1), spatial_shape=shape)


def test_density_decides_the_spelling() -> None:
    layer = SparseConv3d(1, 1, 5, submanifold=True)
    full = SparseTensor.from_dense(torch.ones(1, 1, 6, 6, 6)).voxels
    sparse = SparseTensor.from_dense(
        (torch.arange(1000).reshape(1, 1, 10, 10, 10) % 37 == 0).float()
    ).voxels
    assert isinstance(maps.kernel_map(full, layer.geometry)[1], NeighborTable)
    assert isinstance(maps.kernel_map(sparse, layer.geometry)[1], GroupCOO)


def test_searching_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    x = SparseTensor.from_dense(grid())
    layer = SparseConv3d(3, 4, 3, stride=2, padding=1).double()
    want = layer(x)
    monkeypatch.setattr(maps, "AT_ONCE", 100)
    got = layer(SparseTensor.from_dense(grid()))
    assert torch.equal(got.coords, want.coords) and torch.equal(got.features, want.features)


# --- the rest ---


def test_dense_round_trip_and_features() -> None:
    full = grid()
    x = SparseTensor.from_dense(full)
    assert torch.equal(x.to_dense(2), full)
    assert torch.equal(x.with_features(x.features * 2).to_dense(2), full * 2)


def test_half_precision() -> None:
    x = SparseTensor.from_dense(grid(0.4).float())
    layer = SparseConv3d(3, 4, 3, submanifold=True)
    want = layer(x).features
    got = layer.to(torch.bfloat16)(x.with_features(x.features.to(torch.bfloat16)))
    assert got.features.dtype == torch.bfloat16
    assert_close(got.features.float(), want, atol=5e-2, rtol=5e-2)


def test_state_round_trip_and_repr() -> None:
    x = SparseTensor.from_dense(grid().float())
    one, two = (SparseConv3d(3, 4, 3, stride=2, dilation=2, bias=False) for _ in range(2))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(x).features, two(x).features)
    assert repr(one) == (
        "SparseConv3d(3, 4, kernel_size=(3, 3, 3), stride=(2, 2, 2), dilation=(2, 2, 2), "
        "bias=False)"
    )


def test_second_derivatives(spelling: str) -> None:
    x = SparseTensor.from_dense(grid(0.15, (3, 3, 3), channels=2, batches=1))
    layer = SparseConv3d(2, 2, 3, submanifold=True, bias=False).double()

    def run(features: Tensor, weight: Tensor) -> Tensor:
        given = (x.with_features(features),)
        return torch.func.functional_call(layer, {"weight": weight}, given).features  # type: ignore[no-any-return]

    inputs = x.features.detach().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradgradcheck(run, inputs)
