"""Sparse tensors as objects: moved, copied, joined, batched, made of points and read at points; and
weights of other libraries.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import insum
from insum.bounded import say_again
from insum.nn import (
    GlobalPool,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseMaxPool3d,
    SparseSequential,
    SparseTensor,
    batch,
    cat,
    collate,
    devoxelize,
    load_minkowski,
    load_spconv,
    load_torchsparse,
    voxelize,
)
from insum.nn.models import MinkUNet
from insum.runtime.record import Record


def cloud(ndim: int = 3, channels: int = 2, seed: int = 0, batches: int = 2) -> SparseTensor:
    torch.manual_seed(seed)
    coords = (torch.rand(batches, *[4] * ndim) < 0.4).nonzero()
    return SparseTensor(
        coords - torch.tensor([0] + [2] * ndim), torch.randn(len(coords), channels), ndim=ndim
    )


# --- copies ---


def after_convolutions() -> SparseTensor:
    x = cloud()
    down = SparseConv3d(2, 2, 2, stride=2)(x)
    return SparseConv3d(2, 2, 2, stride=2, transposed=True)(down, like=x)


@pytest.mark.parametrize("make", [cloud, after_convolutions])
def test_copies(make: Callable[[], SparseTensor]) -> None:
    x = make()
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    layer = SparseConv3d(2, 3, 3, submanifold=True)
    copies = {
        "pickle": pickle.loads(pickle.dumps(x)),
        "saved": torch.load(file, weights_only=False),
        "deepcopy": copy.deepcopy(x),
        "copy": copy.copy(x),
        "moved": x.to("cpu"),
        "there and back": x.to(torch.float64).to(torch.float32),
    }
    for name, again in copies.items():
        assert_close(layer(again).features, layer(x).features, msg=name)
    assert copies["deepcopy"].features.data_ptr() != x.features.data_ptr()
    assert copies["deepcopy"].voxels is not x.voxels
    assert copies["deepcopy"].features.requires_grad == x.features.requires_grad


def test_copies_of_several_share_voxels() -> None:
    x = cloud()
    one, two = pickle.loads(pickle.dumps((x, x * 2)))
    assert one.voxels is two.voxels
    assert_close((one + two).features, 3 * x.features)


def test_to() -> None:
    x = cloud()
    assert x.to(torch.float16).dtype is torch.float16 and x.to(torch.float16).voxels is x.voxels
    assert x.to("cpu", torch.float64).dtype is torch.float64
    assert x.cpu().voxels is x.voxels and x.device.type == "cpu"
    assert not after_convolutions().detach().features.requires_grad
    on_meta = x.voxels.moved(torch.device("meta"))
    assert on_meta.coords.is_meta and on_meta is not x.voxels


def test_what_a_notebook_shows() -> None:
    text = cloud(2)._repr_html_()
    for part in ("<b>SparseTensor</b>", "voxels", "float32", "ndim", "bytes"):
        assert part in text


# --- arithmetic ---


def test_arithmetic() -> None:
    x = cloud()
    y = SparseConv3d(2, 2, 3, submanifold=True)(x)
    for got, want in (
        (x + y, x.features + y.features),
        (x - y, x.features - y.features),
        (x * y, x.features * y.features),
        (2 * x + 1, 2 * x.features + 1),
        (x * torch.tensor([1.0, 3.0]), x.features * torch.tensor([1.0, 3.0])),
    ):
        assert got.voxels is x.voxels
        assert_close(got.features, want)
    both = cat([x, y, x])
    assert both.voxels is x.voxels and both.features.shape[1] == 6
    assert_close(both.features[:, 2:4], y.features)
    again = SparseTensor(x.coords, x.features)  # other objects, the same voxels
    assert_close((x + again).features, 2 * x.features)


# --- grids ---


def test_grids_without_a_shape() -> None:
    x = cloud(2)
    low = x.coords.amin(0)[1:]
    grid = x.to_dense()
    assert grid.shape == (2, 2, *(x.coords.amax(0)[1:] - low + 1))
    place = (x.coords[:, 0], *(x.coords[:, 1:] - low).T)
    assert_close(grid.movedim(1, -1)[place], x.features)
    assert int((grid != 0).any(1).sum()) == x.voxels.count
    moved = SparseTensor(x.coords + torch.tensor([0, 2, 2]), x.features, ndim=2)
    assert_close(moved.to_dense(3, shape=(9, 9))[:2, :, : grid.shape[2], : grid.shape[3]], grid)
    with pytest.raises(insum.BindingError, match=r"coords\[0\] is \(0, -2, .*outside of the grid"):
        x.to_dense(shape=(9, 9))


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_there_and_back(ndim: int) -> None:
    torch.manual_seed(ndim)
    grid = torch.randn(2, 3, *[4] * ndim) * (torch.rand(2, 1, *[4] * ndim) < 0.3)
    x = SparseTensor.from_dense(grid)
    assert x.ndim == ndim and x.batch_size == 2
    assert_close(x.to_dense(), grid)
    empty = SparseTensor.from_dense(torch.zeros(2, 3, *[4] * ndim))
    assert empty.to_dense().shape == grid.shape


# --- batches ---


def test_batches() -> None:
    clouds = [cloud(seed=seed, batches=1) for seed in range(3)]
    empty = SparseTensor(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 2))
    both = batch([*clouds, empty])
    assert both.batch_size == 4 and both.voxels.count == sum(c.voxels.count for c in clouds)
    layer = SparseConv3d(2, 3, 2, stride=2)
    joined = layer(both)
    assert joined.batch_size == 4  # known, also where the last is empty
    parts = joined.unbatch()
    for part, one in zip(parts, clouds, strict=False):
        assert torch.equal(part.coords, layer(one).coords)
        assert_close(part.features, layer(one).features)
    assert parts[3].voxels.count == 0
    again = batch(parts)
    assert torch.equal(again.coords, joined.coords) and again.batch_size == 4
    two = batch([both, clouds[0]])  # batches of batches
    assert two.batch_size == 5 and int(two.coords[:, 0].max()) == 4


def test_voxels_that_are_kept() -> None:
    x = cloud()
    mask = x.features[:, 0] > 0
    kept = x.keep(mask)
    assert torch.equal(kept.coords, x.coords[mask]) and kept.batch_size == x.batch_size
    assert_close(kept.features, x.features[mask])


class Clouds(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, Any]:
        x = cloud(seed=number, batches=1)
        return {"x": x, "labels": x.coords.sum(1), "name": f"cloud {number}", "weight": number / 2}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader(workers: int) -> None:
    loader = torch.utils.data.DataLoader(
        Clouds(), batch_size=2, collate_fn=collate, num_workers=workers
    )
    for number, sample in enumerate(loader):
        want = [Clouds()[2 * number + k] for k in range(2)]
        assert torch.equal(sample["x"].features, torch.cat([w["x"].features for w in want]))
        assert sample["x"].batch_size == 2
        assert torch.equal(sample["labels"], torch.cat([w["labels"] for w in want]))
        assert sample["name"] == [w["name"] for w in want] and sample["weight"].shape == (2,)
        assert SparseConv3d(2, 2, 3, submanifold=True)(sample["x"]).voxels.count


def test_samples_that_are_tuples() -> None:
    samples = [(cloud(seed=k, batches=1), torch.tensor([k, k])) for k in range(2)]
    x, kinds = collate(samples)
    assert x.batch_size == 2 and kinds.shape == (2, 2)
    assert collate([one for one, _ in samples]).batch_size == 2
    assert collate([1, 2]).tolist() == [1, 2]


def test_samples_inside_of_samples() -> None:
    x, y = cloud(seed=1, batches=1), cloud(seed=2, batches=1)
    labels = [one.coords.sum(1) for one in (x, y)]
    samples = [((x, {"labels": labels[0]}), [y, 1]), ((y, {"labels": labels[1]}), [x, 2])]
    (first, told), (second, kinds) = collate(samples)
    assert torch.equal(first.features, torch.cat([x.features, y.features]))
    assert torch.equal(second.features, torch.cat([y.features, x.features]))
    assert torch.equal(told["labels"], torch.cat(labels)) and kinds.tolist() == [1, 2]


# --- points ---


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min"])
def test_points_to_voxels(reduce: str) -> None:
    torch.manual_seed(0)
    points, features = torch.randn(200, 3), torch.randn(200, 4, requires_grad=True)
    number = torch.randint(0, 2, (200,))
    x, inverse = voxelize(
        points, (0.5, 0.7, 1.0), features, batch=number, reduce=reduce, return_inverse=True
    )
    place = torch.floor(points.double() / torch.tensor([0.5, 0.7, 1.0]).double()).long()
    assert torch.equal(x.coords[inverse], torch.cat([number[:, None], place], 1))
    assert len(x.coords.unique(dim=0)) == x.voxels.count == int(inverse.max()) + 1
    for row in range(0, x.voxels.count, 7):
        own = features[inverse == row]
        want = getattr(own, f"a{reduce}" if reduce in ("max", "min") else reduce)(0)
        assert_close(x.features[row], want)
    assert torch.autograd.grad(x.features.sum(), features)[0].any()
    assert SparseConv3d(4, 2, 3, submanifold=True)(x).voxels is x.voxels


def test_points_without_features() -> None:
    x = voxelize(torch.tensor([[0.2], [0.4], [-0.1]]), 1.0)
    assert_close(x.features, torch.tensor([[-0.1], [0.3]]))
    assert voxelize(torch.zeros(0, 3), 1.0).voxels.count == 0


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_voxels_to_points(ndim: int) -> None:
    """A linear function of the position is read exactly where all voxels around are there."""
    torch.manual_seed(0)
    coords = torch.cartesian_prod(*[torch.arange(-2, 3)] * ndim).reshape(-1, ndim)
    slope = torch.randn(ndim, 2, dtype=torch.float64)
    x = SparseTensor(coords, (coords.double() + 0.5) * 0.2 @ slope, ndim=ndim)
    points = torch.rand(20, ndim, dtype=torch.float64) * 0.5 - 0.2
    assert_close(devoxelize(x, points, 0.2), points @ slope)
    near = devoxelize(x, points, 0.2, mode="nearest")
    assert_close(near, (torch.floor(points / 0.2) + 0.5) * 0.2 @ slope)
    leaves = (x.features[:4].clone().requires_grad_(), points[:2].clone().requires_grad_())
    some = lambda f, p: devoxelize(SparseTensor(coords[:4], f, ndim=ndim), p, 0.2)
    assert torch.autograd.gradcheck(some, leaves)


def test_points_of_other_batches_and_beyond() -> None:
    x = SparseTensor(torch.tensor([[0, 0], [1, 0]]), torch.tensor([[1.0], [2.0]]), ndim=1)
    points, number = torch.tensor([[0.5], [0.9], [5.0]]), torch.tensor([0, 1, 1])
    assert devoxelize(x, points, 1.0, batch=number)[:, 0].tolist() == [1.0, 2.0, 0.0]


# --- weights of other libraries, told apart by the offset that each belongs to ---


def offsets_in(theirs: str, kernel: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The place of every weight of another library, in its documented order."""
    import itertools

    first_fastest = [
        place[::-1] for place in itertools.product(*(range(k) for k in reversed(kernel)))
    ]
    last_fastest = list(itertools.product(*(range(k) for k in kernel)))
    odd = len(last_fastest) % 2
    return (
        first_fastest if theirs == "minkowski" or theirs == "torchsparse" and odd else last_fastest
    )


@pytest.mark.parametrize("theirs", ["minkowski", "torchsparse"])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (2, 2, 2), (3, 1, 2), (1, 1, 1)])
def test_weights_by_offset(theirs: str, kernel: tuple[int, ...]) -> None:
    model = SparseSequential(SparseConv3d(2, 3, kernel), nn.BatchNorm1d(3))
    places = offsets_in(theirs, kernel)
    state = {f"1.{n}": v for n, v in model[1].state_dict().items()}
    state["0.kernel"] = torch.stack([_marked(place, 2, 3) for place in places])
    state["0.bias"] = torch.arange(3.0)
    if kernel == (1, 1, 1):
        state["0.kernel"] = state["0.kernel"][0]
    if theirs == "minkowski":
        state["0.bias"] = state["0.bias"][None]
        state = {n.replace("1.", "1.bn."): v for n, v in state.items()}
    (load_minkowski if theirs == "minkowski" else load_torchsparse)(model, state)
    _check_marked(model[0])
    assert model[0].bias.tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", ["KRSC", "RSKC", "RSCK"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_weights_of_spconv(layout: str, ndim: int) -> None:
    sizes = (3, 2, 1)[:ndim]
    model = nn.ModuleDict(
        {"a": (SparseConv2d, SparseConv3d)[ndim - 2](2, 3, sizes, indice_key="a")}
    )
    places = offsets_in("spconv", sizes)
    full = torch.stack([_marked(place, 2, 3) for place in places]).reshape(*sizes, 2, 3)
    axes = {"KRSC": (-1, *range(ndim), -2), "RSKC": (*range(ndim), -1, -2),
            "RSCK": (*range(ndim), -2, -1)}[layout]  # fmt: skip
    state = {"a.weight": full.permute(axes), "a.bias": torch.zeros(3)}
    load_spconv(model, state, layout=layout)
    _check_marked(model["a"])
    assert "indice_key='a'" in repr(model)


def test_keys_of_spconv_are_told_to_have_no_effect() -> None:
    say_again()
    with pytest.warns(UserWarning, match="indice_key has no effect.*like=") as told:
        for _ in range(2):
            SparseConv3d(2, 3, 3, indice_key="a")
    assert len(told) == 1 and told[0].filename == __file__


def test_a_matrix_of_spconv() -> None:
    """Held as (inputs, outputs), though its shape says otherwise."""
    layer, matrix = SparseConv3d(2, 3, 1, submanifold=True, bias=False), torch.randn(2, 3)
    load_spconv(layer, {"weight": matrix.reshape(3, 1, 1, 1, 2)})
    x = cloud()
    assert_close(layer(x).features, x.features @ matrix)


def _marked(place: tuple[int, ...], inputs: int, outputs: int) -> Tensor:
    """A matrix that tells the offset, the input and the output apart."""
    mark = sum(1000 * 10**n * p for n, p in enumerate(place))
    return mark + 10.0 * torch.arange(inputs)[:, None] + torch.arange(outputs)


def _check_marked(layer: Any) -> None:
    for weight, place in zip(layer.weight, layer.geometry.places(), strict=True):
        assert_close(weight.detach(), _marked(place, 2, 3))


def test_weights_that_do_not_fit_change_nothing() -> None:
    model = SparseSequential(SparseConv3d(2, 3, 3, bias=False), SparseConv3d(3, 3, 3, bias=False))
    before = copy.deepcopy(model.state_dict())
    right, wrong = torch.randn(27, 2, 3), torch.randn(8, 3, 3)
    with pytest.raises(insum.BindingError, match=r"1.kernel has shape \(8, 3, 3\)"):
        load_minkowski(model, {"0.kernel": right, "1.kernel": wrong})
    with pytest.raises(insum.BindingError, match="the state has no 1"):
        load_torchsparse(model, {"0.kernel": right})
    with pytest.raises(insum.BindingError, match="sizes of the layer"):
        load_spconv(model[0], {"weight": torch.randn(3, 3, 3, 2, 3)})
    with pytest.raises(insum.UnsupportedError, match="there is no layout 'CKRS'"):
        load_spconv(model, {}, layout="CKRS")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


# --- mistakes ---

ONE = torch.ones(1, 2)
SHUFFLED = torch.tensor([[7, 1, 2, 0], [3, 1, 2, 0], [5, 5, 5, 1]])
MISTAKES: dict[str, tuple[Callable[[], object], type[insum.InsumError], str]] = {
    "2-D taken for 3-D": (
        lambda: SparseConv2d(2, 2, 3)(SparseTensor(torch.tensor([[0, 5, 7]]), ONE)),
        insum.BindingError,
        "x has 3 dimension(s), coords[0] as batch, x, y, z: (0, 0, 5, 7); SparseConv2d has 2\n"
        "  expected: batch, x, y\n  try: SparseTensor(coords, features, ndim=2), or SparseConv3d",
    ),
    "pooled": (
        lambda: SparseAvgPool2d(2)(SparseTensor(torch.tensor([[0, 5, 7]]), ONE)),
        insum.BindingError,
        "SparseAvgPool2d has 2",
    ),
    "like of other dimensions": (
        lambda: SparseConv1d(2, 2, 3)(
            SparseTensor(torch.tensor([[0]]), ONE, ndim=1),
            SparseTensor(torch.tensor([[0, 0]]), ONE, ndim=2),
        ),
        insum.BindingError,
        "x has 2 dimension(s)",
    ),
    "batch last": (
        lambda: SparseTensor(SHUFFLED, torch.ones(3, 2)),
        insum.FormatError,
        "coords[1] is (3, 1, 2, 0), of batch 3 after batch 7, while the last column goes from 0 to "
        "1\n  expected: batch, x, y, z\n  try: coords[:, [3, 0, 1, 2]]",
    ),
    "one batch, last": (
        lambda: SparseTensor(torch.tensor([[700, 1, 2, 0], [300, 1, 2, 0]]), torch.ones(2, 2)),
        insum.FormatError,
        "the batch seems to be the last column",
    ),
    "columns": (
        lambda: SparseTensor(torch.zeros(1, 5, dtype=torch.int32), ONE),
        insum.BindingError,
        "coords have shape (1, 5)\n  expected: (voxels, 4) for batch, x, y, z, or (voxels, 3) for "
        "x, y, z\n  try: SparseTensor(coords, features, ndim=4), where the batch is the first",
    ),
    "ndim": (
        lambda: SparseTensor(torch.zeros(1, 6, dtype=torch.int32), ONE, ndim=5),
        insum.BindingError,
        "ndim is 5\n  expected: 1, 2, 3 or 4 dimensions",
    ),
    "ndim beside a shape": (
        lambda: SparseTensor(torch.zeros(1, 3, dtype=torch.int32), ONE, (4, 4), ndim=3),
        insum.BindingError,
        "spatial_shape is (4, 4), but there are 3 dimensions",
    ),
    "far apart": (
        lambda: SparseTensor(torch.tensor([[0, 0, 0], [2**22, 2**22, 2**23]]), torch.ones(2, 2)),
        insum.FormatError,
        "too large for 64-bit keys: from coords[0], (0, 0, 0, 0) to coords[1], (0, 4194304,",
    ),
    "twice in four dimensions": (
        lambda: SparseTensor(torch.ones(2, 5, dtype=torch.int32), torch.ones(2, 2), ndim=4),
        insum.FormatError,
        "coords[0] and coords[1] are both (1, 1, 1, 1, 1)",
    ),
    "other voxels": (
        lambda: cloud(seed=0) + cloud(seed=1),
        insum.BindingError,
        "are not at the same voxels",
    ),
    "cat of other voxels": (
        lambda: cat([cloud(seed=0), cloud(seed=1)]),
        insum.BindingError,
        "try: a convolution with like=",
    ),
    "other channels": (
        lambda: cloud() + SparseConv3d(2, 3, 3, submanifold=True)(cloud()),
        insum.BindingError,
        "cannot be combined",
    ),
    "sum with a word": (lambda: cloud() + "one", insum.DtypeError, "the other operand is 'one'"),
    "batch of other dimensions": (
        lambda: batch([cloud(3), cloud(2)]),
        insum.BindingError,
        "tensors[1] is SparseTensor(",
    ),
    "batch of nothing": (lambda: batch([]), insum.DtypeError, "at least one SparseTensor"),
    "samples of other forms": (
        lambda: collate([(cloud(), 1), (cloud(),)]),
        insum.BindingError,
        "samples such as a tuple cannot be joined",
    ),
    "mask": (
        lambda: cloud().keep(torch.ones(1, dtype=torch.bool)),
        insum.BindingError,
        "the mask has shape (1,)",
    ),
    "no point": (
        lambda: voxelize(torch.tensor([[0.0, 1.0], [float("nan"), 1.0]]), 0.1),
        insum.IndexRangeError,
        "points[1] is (nan, 1.0)",
    ),
    "size": (lambda: voxelize(torch.zeros(1, 3), 0.0), insum.BindingError, "size is 0.0"),
    "sizes": (lambda: voxelize(torch.zeros(1, 3), (1.0, 2.0)), insum.BindingError, "or 3: x, y, z"),
    "reduction": (
        lambda: voxelize(torch.zeros(1, 3), 1.0, reduce="median"),
        insum.UnsupportedError,
        "there is no reduction 'median'",
    ),
    "features of points": (
        lambda: voxelize(torch.zeros(2, 3), 1.0, torch.ones(1, 2)),
        insum.BindingError,
        "but there are 2 points",
    ),
    "batch of points": (
        lambda: voxelize(torch.zeros(2, 3), 1.0, batch=torch.tensor([0, -1])),
        insum.IndexRangeError,
        "batch[1] is -1",
    ),
    "points of other dimensions": (
        lambda: devoxelize(cloud(), torch.zeros(1, 2), 1.0),
        insum.BindingError,
        "expected: (points, 3): x, y, z",
    ),
    "mode": (
        lambda: devoxelize(cloud(), torch.zeros(1, 3), 1.0, mode="cubic"),
        insum.UnsupportedError,
        'expected: "linear", "nearest"',
    ),
    "groups": (
        lambda: SparseConv3d(3, 4, 3, groups=2),
        insum.BindingError,
        "3 and 4 channels cannot be cut into 2 groups",
    ),
    "a dense layer in four dimensions": (
        lambda: SparseConv4d.from_dense(nn.Conv3d(2, 2, 3)),  # type: ignore[arg-type]
        insum.DtypeError,
        "PyTorch has no dense convolution in four dimensions",
    ),
    "padding of a pool": (
        lambda: SparseMaxPool3d(2, padding=2),
        insum.BindingError,
        "at most half of the kernel",
    ),
    "global reduction": (lambda: GlobalPool("min"), insum.UnsupportedError, "reduction 'min'"),
    "coordinates without neighbours": (
        lambda: SparseTensor(torch.tensor([[2**63 - 1, 0, 0]]), torch.ones(1, 2)),
        insum.IndexRangeError,
        "x goes from 9223372036854775807 to 9223372036854775807",
    ),
    "outputs too far away": (
        lambda: SparseConv1d(2, 2, 2, 4, transposed=True)(
            SparseTensor(torch.tensor([[-(2**61)]]), torch.ones(1, 2), ndim=1)
        ),
        insum.IndexRangeError,
        "x goes from -9223372036854775808",
    ),
    "too few batches, mean": (
        lambda: GlobalPool("mean")(batch([cloud(), cloud()]), 1),
        insum.IndexRangeError,
        "which has size 1",
    ),
    "too few batches, max": (
        lambda: GlobalPool("max")(batch([cloud(), cloud()]), 1),
        insum.IndexRangeError,
        "which has size 1",
    ),
    "stages": (
        lambda: MinkUNet(3, 5, blocks=(1, 2)),
        insum.BindingError,
        "blocks is (1, 2)\n  expected: 8 numbers",
    ),
    "weights that are none": (
        lambda: load_spconv(SparseConv3d(2, 2, 3, bias=False), {"weight": 3}),  # type: ignore[dict-item]
        insum.DtypeError,
        "weight is 3",
    ),
    "a bias that is none": (
        lambda: load_minkowski(
            SparseConv3d(2, 2, 1),
            {"kernel": torch.ones(2, 2), "bias": [0, 0]},  # type: ignore[dict-item]
        ),
        insum.DtypeError,
        "bias is [0, 0]",
    ),
    "a tensor in a sequence": (
        lambda: SparseSequential(nn.ReLU())(torch.ones(2, 2)),  # type: ignore[arg-type]
        insum.DtypeError,
        "expected: a SparseTensor",
    ),
    "grid of two dimensions": (
        lambda: SparseTensor.from_dense(torch.ones(2, 2)),
        insum.BindingError,
        "the grid has shape (2, 2)",
    ),
    "a grid that is too large": (
        lambda: SparseTensor(torch.tensor([[0, 0, 0], [2**20] * 3]), torch.ones(2, 2)).to_dense(),
        insum.BindingError,
        "a grid of (1, 2, 1048577, 1048577, 1048577) is too large",
    ),
    "shape of a grid": (
        lambda: cloud().to_dense(shape=(9, 9)),
        insum.BindingError,
        "shape is (9, 9), but there are 3 dimensions",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, kind, text = MISTAKES[name]
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "coords",
    [
        torch.tensor([[3, 0, 0, 0], [1, 0, 0, 0]]),  # few batches, all on one plane
        torch.tensor([[2, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 2]]),
        torch.tensor([[0, 5, 5, 0], [0, 5, 4, 0], [1, 0, 0, 0], [1, 0, 0, 1]]),
    ],
)
def test_batches_that_come_first(coords: Tensor) -> None:
    assert SparseTensor(coords, torch.ones(len(coords), 1)).ndim == 3


def test_who_says_ndim_is_believed() -> None:
    assert SparseTensor(SHUFFLED, torch.ones(3, 2), ndim=3).batch_size == 8


# --- modes of PyTorch around a first call ---


LAYERS: dict[str, Callable[[], Callable[[SparseTensor], Any]]] = {
    "conv": lambda: SparseConv3d(2, 3, 3, submanifold=True),
    "pairs": lambda: SparseConv3d(2, 3, 5),
    "mean": lambda: SparseAvgPool3d(2),
    "global": lambda: GlobalPool("mean"),
    "kept": lambda: lambda x: SparseMaxPool3d(2)(x.keep(x.coords[:, 1] >= 0)),
    "made inside": lambda: lambda x: SparseMaxPool3d(2)(SparseTensor(x.coords + 1, x.features)),
    "voxelized": lambda: (
        lambda x: SparseMaxPool3d(2)(voxelize(x.coords[:, 1:].float(), 2.0, x.features))
    ),
    "devoxelized": lambda: lambda x: devoxelize(x, torch.rand(4, 3), 1.0),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", ["inference", "grad", "jvp"])
def test_maps_outlive_the_mode_that_they_were_made_under(name: str, mode: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), cloud()

    def values(features: Tensor) -> Tensor:
        torch.manual_seed(0)
        out = layer(x.with_features(features))
        return (out.features if isinstance(out, SparseTensor) else out).square().sum()

    given = torch.randn(x.features.shape)
    found: Tensor | None = None
    if mode == "inference":
        with torch.inference_mode():
            values(given)
    elif mode == "grad":
        found = torch.func.grad(values)(given)
    else:
        torch.func.jvp(values, (given,), (given,))
    (again,) = torch.autograd.grad(values(given.requires_grad_()), given)
    assert found is None or torch.equal(found, again)


def test_a_record_of_offences_can_be_emptied_outside_of_the_mode_it_was_made_under() -> None:
    with torch.inference_mode():
        record = Record(torch.device("cpu"))
    assert not any(t.is_inference() for t in (record.flags, record.claim, record.host))


# --- what stands behind, beside and between ---


def test_a_head_in_a_sequence() -> None:
    x = cloud()
    head = SparseSequential(
        SparseConv3d(2, 4, 3, submanifold=True), nn.ReLU(), GlobalPool("mean"), nn.Linear(4, 5)
    )
    assert_close(head(x), head[3](head[2](x.with_features(head[0](x).features.relu()))))


def test_a_sequence_looks_for_layers_over_voxels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    block = nn.Sequential(SparseConv3d(2, 4, 3, submanifold=True))
    head = SparseSequential(block, nn.Sequential(nn.ReLU()))
    walked: list[nn.Module] = []
    modules = nn.Module.modules

    def watched(self: nn.Module, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        walked.append(self)
        return modules(self)

    monkeypatch.setattr(nn.Module, "modules", watched)
    first = head(cloud())
    assert_close(head(cloud()).features, first.features)
    assert not walked
    head.append(nn.Sequential(nn.Tanh()))
    head[1] = SparseSequential(nn.ReLU())
    assert_close(head(cloud()).features, first.features.tanh())
    assert_close(copy.deepcopy(head)(cloud()).features, first.features.tanh())
    head(cloud())
    assert walked and walked.count(head[2]) <= 2


def test_features_between_integers() -> None:
    x = SparseTensor(torch.tensor([[0], [1]]), torch.tensor([[1], [2]]), ndim=1)
    found = devoxelize(x, torch.tensor([[1.0], [0.5]]), 1.0)
    assert_close(found, torch.tensor([[1.5], [1.0]]))


def test_numbers_minus_features() -> None:
    x = cloud()
    for found, wanted in ((1 - x, 1 - x.features), (-x, -x.features), (x / 2, x.features / 2)):
        assert found.voxels is x.voxels
        assert_close(found.features, wanted)


def test_sizes_of_numpy() -> None:
    three = np.int64(3)
    layer = SparseConv3d(2, 2, three, stride=(np.int32(2), 2, 2))  # type: ignore[arg-type]
    x = SparseTensor(torch.tensor([[0, 1, 2]]), torch.ones(1, 2), spatial_shape=(three,) * 3)
    kinds = {type(n) for n in (*layer.geometry.kernel, *layer.geometry.stride, *x.spatial_shape)}  # type: ignore[misc]
    assert kinds == {int}


@pytest.mark.parametrize("count", [0, 1])
def test_networks_over_no_voxel_and_over_one(count: int) -> None:
    net = MinkUNet(3, 5, blocks=(1,) * 8, widths=(4,) * 8, stem=(3, 4)).eval()
    features = torch.randn(count, 3, requires_grad=True)
    out = net(SparseTensor(torch.zeros(count, 4, dtype=torch.int32), features)).features
    out.sum().backward()
    assert out.shape == (count, 5) and features.grad is not None
    assert features.grad.shape == features.shape


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_batches_of_unsigned_integers(dtype: torch.dtype) -> None:
    points, batch = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
    x = voxelize(points, 0.5, batch=batch.to(dtype))
    assert torch.equal(x.coords, voxelize(points, 0.5, batch=batch).coords)
    want = devoxelize(x, points, 0.5, batch=batch)
    assert torch.equal(devoxelize(x, points, 0.5, batch=batch.to(dtype)), want)
