"""Convolutions of clouds that are new at every call, as on a GPU: maps out of hash tables against
maps out of sorted keys, without reading a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

import insum
from as_on_a_gpu import no_reads
from insum import memory
from insum.errors import FormatError, IndexRangeError
from insum.formats import NeighborTable
from insum.nn import SparseConv3d, SparseTensor, Voxels
from insum.nn import kernel_map as maps
from insum.nn.checks import sent
from insum.nn.kernel_map import Geometry, build_map, kernel_map
from insum.nn.sparse_tensor import at_voxels
from insum.nn.voxels import Box
from insum.plan.recipes import Inverse, OfExtent, OfShape, Packed, Walk
from insum.runtime import which_program
from insum.runtime.handwritten import packs, reaching
from insum.runtime.handwritten.kernel import BLOCK
from insum.runtime.prologue.made import Made, Result
from insum.runtime.prologue.prologue import Prologue
from insum.runtime.prologue.tables import inverse
from insum.runtime.shelf import Programs
from insum.testing.as_on_a_gpu import pretended

pytestmark = pytest.mark.interpreter


@pytest.fixture
def on_device() -> Iterator[None]:
    with pretended():
        yield


def cloud(count: int, reach: int = 5, seed: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
    """Voxels in two batches around the origin, in any order."""
    torch.manual_seed(seed)
    batch, place = torch.randint(0, 2, (count, 1)), torch.randint(-reach, reach + 1, (count, 3))
    found = torch.unique(torch.cat([batch, place], 1), dim=0)
    shuffled: Tensor = found[torch.randperm(len(found))].to(dtype)
    return shuffled


def on_the_cpu(layer: SparseConv3d, *clouds: SparseTensor, **options: Any) -> SparseTensor:
    with insum.settings(backend="graph", require_fused=False), pytest.MonkeyPatch.context() as m:
        m.setattr("insum.call.prepared.kernels_look_on", lambda device: False)
        m.setattr("insum.call.prepared._forms", {})
        m.setattr("insum.call.lookup._fronts", {})
        fresh = [SparseTensor(c.coords, c.features, c.spatial_shape) for c in clouds]
        out: SparseTensor = layer(*fresh, **options)
        return out


GEOMETRIES = {
    "3": {"kernel_size": 3, "submanifold": True},
    "5": {"kernel_size": 5, "submanifold": True},
    "1": {"kernel_size": 1, "submanifold": True},
    "wide": {"kernel_size": (3, 1, 3), "dilation": 2, "submanifold": True},
    "down": {"kernel_size": 2, "stride": 2},
    "padded": {"kernel_size": 3, "stride": 2, "padding": 1},
    "up": {"kernel_size": 3, "stride": 2, "padding": 1, "transposed": True},
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("count", [0, 1, 80])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_maps(name: str, count: int, dtype: torch.dtype, on_device: None) -> None:
    geometry = SparseConv3d(1, 1, **GEOMETRIES[name]).geometry  # type: ignore[arg-type]
    coords = cloud((count + 1) // 2 if name == "up" else count, dtype=dtype)
    voxels = Voxels.of(coords)
    with no_reads(0 if geometry.submanifold else 1 if count else 9):
        outputs, found = kernel_map(voxels, geometry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("insum.call.prepared.kernels_look_on", lambda device: False)
        patch.setattr(maps, "TABLE_FROM", 0.0)
        want_outputs, want = kernel_map(Voxels.of(coords), geometry)
        dense = found.to_format(NeighborTable, dim=2)
    assert isinstance(want, NeighborTable) and isinstance(dense, NeighborTable)
    assert torch.equal(outputs.coords, want_outputs.coords)
    assert torch.equal(dense.table, want.table)


@contextmanager
def transformed() -> Iterator[None]:
    with torch._functorch.eager_transforms.grad_increment_nesting():
        yield


MODES: dict[str, Callable[[], Any]] = {
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "a transform": transformed,
    "forward mode": torch.autograd.forward_ad.dual_level,
    "a setting": lambda: insum.settings(check="always"),
}


@pytest.mark.parametrize("mode", MODES)
def test_voxels_that_were_first_asked_under_a_mode(mode: str, on_device: None) -> None:
    """What holds under a mode, or inside of a block of settings, ends with it."""
    voxels = Voxels(cloud(20))
    with MODES[mode]():
        _ = voxels.is_hashed
    assert voxels.is_hashed
    geometry = SparseConv3d(1, 1, kernel_size=3, submanifold=True).geometry
    with no_reads():
        kernel_map(voxels, geometry)


OTHERS = {
    "1": (1, {"kernel_size": 3, "submanifold": True}),
    "2, even": (2, {"kernel_size": (2, 4), "submanifold": True}),
    "2, down": (2, {"kernel_size": 3, "stride": 2, "padding": 1}),
    "2, dilated": (2, {"kernel_size": 3, "stride": (1, 2), "dilation": 2}),
    "3, apart": (3, {"kernel_size": 2, "stride": 3}),
    "4": (4, {"kernel_size": 3, "submanifold": True}),
    "4, up": (4, {"kernel_size": (2, 1, 1, 2), "stride": 2, "transposed": True}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_maps_in_other_dimensions(name: str, on_device: None) -> None:
    ndim, options = OTHERS[name]
    geometry = getattr(insum.nn, f"SparseConv{ndim}d")(1, 1, **options).geometry
    torch.manual_seed(0)
    coords = torch.randint(-4, 5, (16, ndim + 1)).unique(dim=0)
    coords[:, 0] = coords[:, 0] > 0
    coords = coords.unique(dim=0)
    coords = coords[torch.randperm(len(coords))]
    voxels = Voxels.of(coords, ndim=ndim)
    with no_reads(0 if geometry.submanifold else 1), torch.autocast("cpu", enabled=ndim % 2 == 1):
        outputs, found = kernel_map(voxels, geometry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("insum.call.prepared.kernels_look_on", lambda device: False)
        patch.setattr(maps, "TABLE_FROM", 0.0)
        want_outputs, want = kernel_map(Voxels.of(coords, ndim=ndim), geometry)
    assert isinstance(want, NeighborTable) and isinstance(found, NeighborTable)
    assert torch.equal(outputs.coords, want_outputs.coords)
    assert torch.equal(found.table, want.table)


@pytest.mark.parametrize("kind", ["groups", "depthwise", "wider", "max", "mean"])
def test_other_layers(kind: str, on_device: None) -> None:
    """Kernels of groups and of pooling, forwards and backwards."""
    layer: Any = {
        "groups": lambda: insum.nn.SparseConv2d(8, 8, 3, submanifold=True, groups=2),
        "depthwise": lambda: insum.nn.SparseConv2d(4, 4, 3, submanifold=True, groups=4),
        "wider": lambda: insum.nn.SparseConv2d(4, 8, 2, submanifold=True, groups=4),
        "max": lambda: insum.nn.SparseMaxPool2d(2),
        "mean": lambda: insum.nn.SparseAvgPool2d(2),
    }[kind]()
    torch.manual_seed(0)
    coords = (torch.rand(1, 6, 6) < 0.5).nonzero().int()
    channels = 8 if kind == "groups" else 4
    features = torch.randn(len(coords), channels, requires_grad=True)
    x = SparseTensor(coords, features, ndim=2)
    with insum.settings(backend="graph", require_fused=False), pytest.MonkeyPatch.context() as m:
        m.setattr("insum.call.prepared.kernels_look_on", lambda device: False)
        m.setattr("insum.call.prepared._forms", {})
        m.setattr("insum.call.lookup._fronts", {})
        want = differentiated(
            layer, layer(SparseTensor(coords, features, ndim=2)).features, features
        )
    with no_reads(1 if kind in ("max", "mean") else 0):
        got = differentiated(layer, layer(x).features, features)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_voxel_twice_in_four_dimensions(on_device: None) -> None:
    SparseTensor(torch.tensor([[0, 1, 2, 3, 4]] * 2), torch.ones(2, 1), ndim=4)
    with pytest.raises(FormatError, match=r"coords\[0\] and coords\[1\] are"):
        insum.synchronize()


def test_a_map_to_given_voxels_does_not_wait(on_device: None) -> None:
    coarse, fine = Voxels.of(cloud(60, 2)), Voxels.of(cloud(300))
    geometry = Geometry((3, 3, 3), (2, 2, 2), (1, 1, 1), transposed=True)
    with no_reads():
        _, found = kernel_map(coarse, geometry, fine)
    assert isinstance(found, NeighborTable)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_searching_in_portions(name: str, on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = SparseConv3d(1, 1, **GEOMETRIES[name]).geometry  # type: ignore[arg-type]
    want = kernel_map(Voxels.of(cloud(24)), geometry)[0]
    monkeypatch.setattr(maps, "AT_ONCE", 240)
    assert torch.equal(kernel_map(Voxels.of(cloud(24)), geometry)[0].coords, want.coords)


def test_voxels_that_are_searched_for(on_device: None) -> None:
    voxels = Voxels.of(torch.tensor([[0, 2, 1], [5, 0, 0]]))
    wanted = torch.tensor([[[0, 5, 0, 0], [0, 1, 1, 1]], [[0, 0, 2, 1], [1, 0, 2, 1]]])
    with no_reads():
        found = voxels.find(wanted)
    assert found.tolist() == [[1, -1], [0, -1]]


# --- layers ---


def differentiated(layer: SparseConv3d, out: Tensor, features: Tensor) -> list[Tensor]:
    upstream = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    leaves = [features, *layer.parameters()]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("count", [1, 80])
def test_layers(name: str, count: int, on_device: None) -> None:
    layer = SparseConv3d(16, 16, **GEOMETRIES[name])  # type: ignore[arg-type]
    allowed = 0 if layer.geometry.submanifold else 1
    count = (count + 1) // 2 if name == "up" else count  # each has eight outputs
    for seed in range(2):
        coords = cloud(count, seed=seed)
        features = torch.randn(len(coords), 16, requires_grad=True)
        x = SparseTensor(coords, features)
        want = differentiated(layer, on_the_cpu(layer, x).features, features)
        with no_reads(allowed):
            got = differentiated(layer, layer(SparseTensor(coords, features)).features, features)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{"submanifold": True}, {"padding": 1}], ids=str)
def test_ordered_rows(options: dict[str, Any], deterministic: bool, on_device: None) -> None:
    """A cloud that is large enough for tiles of similar rows, forwards and backwards."""
    layer = SparseConv3d(16, 16, 3, **options)
    coords = cloud(1400, 6)
    assert len(coords) > 1024
    features = torch.randn(len(coords), 16, requires_grad=True)
    x = SparseTensor(coords, features)
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = on_the_cpu(layer, x) if options == {"submanifold": True} else None
        like = x if out is None else None
        want = on_the_cpu(layer, x, like=like) if out is None else out
        expected = differentiated(layer, want.features, features)
        with no_reads():
            got = differentiated(layer, layer(x, like=like).features, features)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_without_channels_that_fill_a_tile(on_device: None) -> None:
    layer = SparseConv3d(1, 2, 3, submanifold=True)
    coords = cloud(200)
    features = torch.randn(len(coords), 1, requires_grad=True)
    want = on_the_cpu(layer, SparseTensor(coords, features)).features
    with no_reads():
        got = layer(SparseTensor(coords, features)).features
    assert_close(got, want)
    for a, b in zip(*(differentiated(layer, out, features) for out in (got, want))):
        assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_cloud_that_comes_back(on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of launches are kept after a few calls; the results stay the same."""
    monkeypatch.setattr("insum.runtime.which_program.MOST_MET", 4)
    layer, coords = SparseConv3d(16, 16, 3, submanifold=True), cloud(300)
    features = torch.randn(len(coords), 16, requires_grad=True)
    x = SparseTensor(coords, features)
    want = differentiated(layer, on_the_cpu(layer, x).features, features)
    for _ in range(3):
        with no_reads():
            got = differentiated(layer, layer(x).features, features)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_a_map_that_comes_back_is_ordered_once_more(
    on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first that a program was built for."""
    orders: list[bool] = []
    order_of = packs.order_of

    def noted(words: Tensor, steps: int, *, thorough: bool) -> Tensor:
        orders.append(thorough)
        return order_of(words, steps, thorough=thorough)

    monkeypatch.setattr(packs, "order_of", noted)
    layer, coords = SparseConv3d(16, 16, 3, submanifold=True), cloud(1600, reach=6)
    x = SparseTensor(coords, torch.randn(len(coords), 16))
    want = on_the_cpu(layer, x).features
    for _ in range(which_program.MOST_MET + 4):
        assert_close(layer(x).features, want, atol=1e-4, rtol=1e-4)
    assert orders == [False, True]


@pytest.mark.parametrize("first", [True, False])
def test_a_map_that_comes_back_stays_as_it_is(on_device: None, first: bool) -> None:
    """Where sums must be the same each time: another order of steps would be another sum."""
    layer = SparseConv3d(16, 16, 3, submanifold=True)
    torch.use_deterministic_algorithms(True)
    try:
        for seed in [0] if first else [1, 0]:
            coords = cloud(1200, reach=9, seed=seed)
            x = SparseTensor(coords, torch.randn(len(coords), 16))
            want = layer(x).features
        for _ in range(2 * which_program.MOST_MET + 2):
            assert torch.equal(layer(x).features, want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_maps_of_other_sizes_run_the_same_code(
    on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    original = Programs.build

    def build(self: Programs, *arguments: Any, **options: Any) -> Any:
        built.append(self.problem.statement.text)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Programs, "build", build)
    layer = SparseConv3d(16, 16, 3, submanifold=True)
    for seed in range(2):
        coords = cloud(300 + 10 * seed, seed=seed)
        features = torch.randn(len(coords), 16, requires_grad=True)
        want = on_the_cpu(layer, SparseTensor(coords, features)).features.detach()
        out, *_ = differentiated(layer, layer(SparseTensor(coords, features)).features, features)
        assert_close(out, want, atol=1e-3, rtol=1e-3)
        assert len(built) == 3, built  # forward, and two gradients


def test_inference_mode(on_device: None) -> None:
    layer, coords = SparseConv3d(16, 16, 3, submanifold=True), cloud(300)
    features = torch.randn(len(coords), 16)
    want = on_the_cpu(layer, SparseTensor(coords, features)).features.detach()
    with torch.inference_mode(), no_reads():
        got = layer(SparseTensor(coords, features)).features
    assert_close(got.clone(), want)


# --- what is derived from maps ---


def table_of(geometry: Geometry, coords: Tensor) -> Tensor:
    voxels = Voxels.of(coords)
    found = build_map(voxels, voxels, geometry)
    assert isinstance(found, NeighborTable)
    return found.table


def made(table: Tensor, recipe: Any) -> Made:
    rows = table.shape[1]
    found = Prologue({"Nb": table}, {"z": table.shape[0], "x": rows}, (rows,)).made(recipe)
    assert found is not None
    return found


def really(found: Result) -> Made:
    """What is made when the numbers are there."""
    arrived = found if isinstance(found, Made) else found.arrived(wait=True)
    assert arrived is not None
    return arrived


CENTRED = SparseConv3d(1, 1, 3, submanifold=True).geometry
WIDER = SparseConv3d(1, 1, 5, submanifold=True).geometry
ROWS, STEPS = Walk(True, 1, 0, (OfExtent("x"),)), Walk(False, 1, 0, (OfExtent("z"),))


@pytest.mark.parametrize("geometry", [CENTRED, WIDER], ids=["3", "5"])
def test_a_centred_map_read_backwards_is_its_inverse(geometry: Geometry, on_device: None) -> None:
    table = table_of(geometry, cloud(300))
    found = made(table, Inverse("Nb", 1, OfShape(0)))
    assert found.summary.mirrored and found.summary.exists
    assert really(inverse(table, 1, table.shape[1])).summary.mirrored


def test_the_inverse_of_another_map(on_device: None) -> None:
    fine, coarse = Voxels.of(cloud(300)), Voxels.of(cloud(60, 2))
    geometry = Geometry((3, 3, 3), (2, 2, 2), (1, 1, 1))
    found = build_map(fine, coarse, geometry)
    assert isinstance(found, NeighborTable)
    prologue = Prologue({"Nb": found.table}, {}, (fine.count,))
    got = prologue.made(Inverse("Nb", 1, OfShape(0)))
    want = really(inverse(found.table, 1, fine.count))
    assert got is not None
    assert torch.equal(got.arrays["inverse"], want.arrays["inverse"])
    assert got.summary == want.summary


@pytest.mark.parametrize("geometry", [CENTRED, WIDER], ids=["3", "5"])
@pytest.mark.parametrize("backwards", [False, True])
def test_tiles(geometry: Geometry, backwards: bool, on_device: None) -> None:
    table = table_of(geometry, cloud(280, 3))
    last = table.shape[0] - 1
    walk = Walk(False, -1, last, (OfExtent("z"),)) if backwards else STEPS
    with no_reads():
        packed = made(table, Packed("Nb", (walk, ROWS)))
    found, turned = packed.arrays, packed.counts["turned"] > 0
    read = table.flip(0) if backwards else table
    rows = found["rows"]
    assert sorted(rows[rows >= 0].tolist()) == list(range(table.shape[1]))
    for tile, start, end in zip(rows, found["start"], found["end"]):
        want = (read[:, tile[tile >= 0].long()] >= 0).any(1).nonzero().flatten()
        assert torch.equal(found["steps"][start:end].sort().values, want.int())
    pieces = packs.by_step(found["held"], found["names"], turned=turned)
    for step in range(table.shape[0]):
        of = (pieces["step"] == step).nonzero().flatten().tolist()
        tiles = [t for p in of for t in pieces["tile"][pieces["start"][p] : pieces["end"][p]]]
        has = [(read[step, t[t >= 0].long()] >= 0).any().item() for t in rows]
        assert [int(t) for t in tiles] == [k for k, there in enumerate(has) if there]


@pytest.mark.parametrize("tiles", [1, 700, 6000])
def test_pieces_are_about_as_long_as_each_other(tiles: int) -> None:
    """However many tiles a step has: what one piece of a frequent step took would be waited for."""
    draw = torch.Generator().manual_seed(tiles)
    names = torch.arange(40, dtype=torch.int32)
    shares = torch.where(names == 0, 1.0, 0.03)
    has = torch.rand(tiles, 40, generator=draw) < shares
    held = (has.long() << torch.arange(40)).sum(1)[None]
    found = packs.by_step(held, names, turned=False)
    lengths = found["end"] - found["start"]
    assert found["step"].shape == (packs.PIECES + 40,)
    assert bool((lengths >= 0).all())
    assert int(lengths.sum()) == int(has.sum())
    assert int(lengths.max()) <= 2 * int(has.sum()) // packs.PIECES + 1


@pytest.mark.parametrize("written", [False, True], ids=["as built", "written to"])
@pytest.mark.parametrize("which", ["down", "up"])
def test_the_way_back_of_a_map(
    which: str, written: bool, on_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse of the map of a strided convolution is the map of its inverse: nothing is
    inverted again, unless someone has written to it.
    """
    inverted: list[int] = []
    original = packs.inverted
    monkeypatch.setattr(packs, "inverted", lambda *a: inverted.append(1) or original(*a))
    down, up = (SparseConv3d(16, 16, 2, stride=2, transposed=t) for t in (False, True))
    for moved in (0, 2):  # of the first cloud the programs are made
        coords = cloud(100, 3) + torch.tensor([0, moved, moved, moved], dtype=torch.int32)
        fine = SparseTensor(coords, torch.randn(len(coords), 16, requires_grad=True))
        voxels, there = kernel_map(fine.voxels, down.geometry)
        coarse = at_voxels(voxels, torch.randn(voxels.count, 16, requires_grad=True))
        _, back = kernel_map(voxels, up.geometry, fine.voxels)
        if written:
            (back if which == "down" else there).table.add_(0)  # type: ignore[attr-defined]
        layer, x, more = (down, fine, {}) if which == "down" else (up, coarse, {"like": fine})
        want = on_the_cpu(layer, x, **more).features
        inverted.clear()
        got = layer(x, **more).features
        for a, b in zip(*(differentiated(layer, out, x.features) for out in (got, want))):
            assert_close(a, b, atol=1e-3, rtol=1e-3)
    assert bool(inverted) is written


def reached_from(coords: Tensor, geometry: Geometry, box: Box | None) -> Tensor:
    inputs = Voxels.of(coords)
    if box is not None:
        inputs.__dict__["box"] = box
    with no_reads(allowed=1):
        return kernel_map(inputs, geometry)[0].coords


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_reached_from_voxels_in_a_box_that_is_known(
    transposed: bool, on_device: None
) -> None:
    """As the outputs of a strided convolution are: they are not looked at again."""
    geometry = Geometry((2,) * 3, (2,) * 3, transposed=transposed)
    coords = cloud(200)
    want = reached_from(coords, geometry, None)
    wide = Box((0, -9, -8, -7), (3, 20, 20, 20))
    with mock.patch("torch.aminmax", side_effect=AssertionError("looked for")):
        assert torch.equal(reached_from(coords, geometry, wide), want)


def test_more_keys_than_one_group_of_blocks_holds(on_device: None) -> None:
    count = (reaching.GROUP + 1) * BLOCK + 7
    coords = torch.stack([torch.zeros(count), *torch.randint(0, 99, (3, count))], 1).long()
    one = sent([[0, 0, 0]], torch.int64, coords.device)
    how = reaching.Steps(one, (2,) * 3, (0,) * 3, (1,) * 3, (1,) * 3, False, None)
    found = reaching.ranked(coords, how)
    number, *_ = found.numbers()
    halves = torch.cat([coords[:, :1], coords[:, 1:] // 2], 1)
    assert torch.equal(found.coords(number), torch.unique(halves, dim=0))


def there_and_back(down: SparseConv3d, up: SparseConv3d, x: SparseTensor) -> Tensor:
    out: Tensor = up(down(x), like=x).features
    return out


def test_maps_that_know_each_other_go_with_their_voxels(
    on_device: None, nothing_remembered: None
) -> None:
    down = SparseConv3d(16, 16, 2, stride=2)
    up = SparseConv3d(16, 16, 2, stride=2, transposed=True)
    counts = []
    for seed in range(3):
        coords = cloud(50, 2, seed=seed)
        features = torch.ones(len(coords), 16, requires_grad=True)
        there_and_back(down, up, SparseTensor(coords, features)).sum().backward()
        counts.append(memory.report().entries)
    assert counts[-1] <= counts[0], counts


def test_what_ran_on_a_map_runs_again(on_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that are alike look for their program once, unless the map was written to."""
    sought: list[int] = []
    original = which_program.find
    monkeypatch.setattr(which_program, "find", lambda *a: sought.append(1) or original(*a))
    layers = [SparseConv3d(16, 16, 3, submanifold=True) for _ in range(2)]
    found = []
    for seed in (0, 0, 1):  # of the first cloud the programs are made
        coords = cloud(200, seed=seed)
        x = SparseTensor(coords, torch.randn(len(coords), 16))
        for written in (False, True):
            if written:
                kernel_map(x.voxels, layers[0].geometry)[1].table.add_(0)  # type: ignore[attr-defined]
            sought.clear()
            for layer in layers:
                with torch.no_grad():
                    assert_close(layer(x).features, on_the_cpu(layer, x).features)
            found.append(len(sought))
    assert found[2] == found[4] == 1 and found[5] > 1, found


def test_maps_go_with_their_voxels(on_device: None, nothing_remembered: None) -> None:
    before = memory.report().entries
    for seed in range(3):
        coords = cloud(300, seed=seed)
        SparseConv3d(16, 16, 3, submanifold=True)(SparseTensor(coords, torch.ones(len(coords), 16)))
    del coords
    assert memory.report().entries <= before + 1


# --- mistakes ---


def convolved(coords: Tensor, shape: tuple[int, int, int] | None = None) -> None:
    x = SparseTensor(coords, torch.ones(len(coords), 2), spatial_shape=shape)
    SparseConv3d(2, 2, 3, submanifold=True)(x)
    insum.synchronize()


def test_a_voxel_twice(on_device: None) -> None:
    coords = torch.cat([c := cloud(50), c[7:8]])
    where = tuple(coords[7].tolist())
    with pytest.raises(FormatError) as caught:
        convolved(coords)
    assert str(caught.value).startswith(
        f"coords[7] and coords[{len(c)}] are both {where} (found on the device by an earlier "
        "call)\n  expected: every voxel once\n  try: merge them first"
    )
    convolved(c)  # and nothing is left of it


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        (2, 7, "outside the spatial shape: y is 7 (found"),
        (3, -1, "outside the spatial shape: z is -1 (found"),
        (0, -2, ": batch -2 (found"),
    ],
)
def test_a_voxel_outside(column: int, value: int, text: str, on_device: None) -> None:
    coords = cloud(30, 1) + torch.tensor([0, 2, 2, 2])
    coords[5, column] = value
    with pytest.raises(IndexRangeError) as caught:
        convolved(coords, (4, 4, 4))
    assert f"coords[5] is {tuple(coords[5].tolist())}" in str(caught.value)
    assert text in str(caught.value)


def test_coordinates_that_are_gone(on_device: None) -> None:
    x = SparseTensor(torch.tensor([[0, 0, 0], [0, 0, 0]]), torch.ones(2, 2))
    assert x.voxels.table.mask
    del x
    with pytest.raises(FormatError, match=r"coords\[0\] and coords\[1\] are the same"):
        insum.synchronize()


def test_mistakes_at_once(on_device: None) -> None:
    with (
        insum.settings(check="always"),
        pytest.raises(FormatError, match=r"coords\[0\] and coords\[1\] are both \(0, 3, 3, 3\)\n"),
    ):
        SparseTensor(torch.tensor([[3, 3, 3], [3, 3, 3]]), torch.ones(2, 2))


def test_a_grid_of_voxels_outside_is_not_written(on_device: None) -> None:
    x = SparseTensor(torch.tensor([[0, 0, 9]]), torch.ones(1, 2), spatial_shape=(4, 4, 4))
    with pytest.raises(IndexRangeError, match="z is 9"):
        x.to_dense()
