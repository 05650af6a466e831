"""``insum bench voxels``: single layers over voxels on maps that are there, and the building of a
map beside a sort of its keys.

A layer is compared with the submanifold convolution of equal work: of as many channels and pairs of
voxels. That is read off the lines between the convolutions over a few of a cloud's voxels, whose
time is that of a launch, over the next coarser cloud, over the cloud, and over a batch of four.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from insum.bench import data, measure
from insum.bench.study import Study
from insum.bench.table import aligned
from insum.formats import NeighborTable
from insum.nn import (
    SparseAvgPool3d,
    SparseConv3d,
    SparseConv4d,
    SparseMaxPool3d,
    SparseTensor,
    Voxels,
)
from insum.nn.kernel_map import Geometry, build_map, kernel_map
from insum.nn.voxels import keys_of

CHANNELS = (4, 16, 64, 256)
MILLION = 10**6
#: What others are compared with, over the cloud, over the next coarser one, over few voxels, and
#: over four clouds.
FINE, COARSE = "submanifold 3", "submanifold 3, coarser"
FEW, MANY = "submanifold 3, few", "submanifold 3, batch of four"
#: Voxels that are few, and yet enough for tiles.
FEW_VOXELS = 2048
SUBMANIFOLD = Geometry((3, 3, 3), padding=(1, 1, 1), submanifold=True)
HEAD = ("cloud", "channels", "layer", "pairs", "us", "of equal work")


@dataclass(frozen=True)
class LayerRow:
    """Microseconds of one layer; ``ratio`` is to the submanifold convolution of equal work."""

    cloud: str
    channels: int
    layer: str
    pairs: int
    us: float
    ratio: float


@dataclass(frozen=True)
class MapRow:
    """Microseconds of the table and the map of so many voxels, and of a sort of their keys."""

    order: str
    voxels: int
    map_us: float
    sort_us: float


@dataclass(frozen=True, eq=False)
class LayerCase:
    """A layer on voxels, and those that it leads to where that was asked for."""

    layer: nn.Module
    x: SparseTensor
    like: SparseTensor | None = None

    def run(self) -> Tensor:
        given = () if self.like is None else (self.like,)
        found: Tensor = self.layer(self.x, *given).features
        return found

    def pairs(self) -> int:
        target = None if self.like is None else self.like.voxels
        geometry: Geometry = self.layer.geometry  # type: ignore[assignment]
        _, found = kernel_map(self.x.voxels, geometry, target)
        assert isinstance(found, NeighborTable)
        return int((found.table >= 0).sum())


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--channels", default="", help="of the layers (default: 4,16,64,256)")
    parser.add_argument("--voxels", type=int, default=MILLION, help="of the map")


def layers(x: SparseTensor, x4: SparseTensor) -> dict[str, LayerCase]:
    """``x4``: voxels in four dimensions."""
    c, kind = x.features.shape[1], x.features.dtype

    def conv(kernel: int, **more: object) -> nn.Module:
        made: nn.Module = SparseConv3d(c, c, kernel, bias=False, **more)  # type: ignore[arg-type]
        return made.to(x.device, kind)

    by_two, by_three = conv(2, stride=2), conv(3, stride=2, padding=1)
    fours = SparseConv4d(c, c, 3, bias=False, submanifold=True).to(x.device, kind)
    coarse, coarser = by_two(x), by_three(x)
    few = SparseTensor(x.coords[:FEW_VOXELS], x.features[:FEW_VOXELS], ndim=3)
    batch = [nn.functional.pad(x.coords[:, -3:], (1, 0), value=b) for b in range(4)]
    many = SparseTensor(torch.cat(batch), x.features.repeat(4, 1), ndim=3)
    return {
        FINE: LayerCase(conv(3, submanifold=True), x),
        COARSE: LayerCase(conv(3, submanifold=True), coarser),
        FEW: LayerCase(conv(3, submanifold=True), few),
        MANY: LayerCase(conv(3, submanifold=True), many),
        "strided 3 / 2": LayerCase(by_three, x),
        "strided 2 / 2": LayerCase(by_two, x),
        "transposed 3 / 2": LayerCase(
            conv(3, stride=2, padding=1, transposed=True), coarser, like=x
        ),
        "transposed 2 / 2": LayerCase(conv(2, stride=2, transposed=True), coarse, like=x),
        "depthwise 3": LayerCase(conv(3, submanifold=True, groups=c), x),
        "largest 3 / 1": LayerCase(SparseMaxPool3d(3, 1, 1), x, like=x),
        "largest 2 / 2": LayerCase(SparseMaxPool3d(2), x),
        "mean 3 / 1": LayerCase(SparseAvgPool3d(3, 1, 1), x, like=x),
        "mean 2 / 2": LayerCase(SparseAvgPool3d(2), x),
        "submanifold 3, four dimensions": LayerCase(fours, x4),
    }


def rows_of(cloud: str, coords: Tensor, channels: int, kind: torch.dtype) -> Iterator[LayerRow]:
    # a part of the cloud that stands still for four frames
    still = coords[: len(coords) // 4]
    frames = torch.cat([nn.functional.pad(still, (0, 1), value=t) for t in range(4)])
    x, x4 = (
        SparseTensor(c, torch.randn(len(c), channels, device=c.device).to(kind), ndim=n)
        for c, n in ((coords, 3), (frames, 4))
    )
    found = {}
    for name, case in layers(x, x4).items():
        measure.warm(lambda case=case: (case.run(),), coords.device)  # type: ignore[misc]
        milliseconds, _ = measure.clock(case.run, coords.device)
        found[name] = case.pairs(), 1e3 * milliseconds
    equal = lines(*(found[name] for name in (FEW, COARSE, FINE, MANY)))
    for name, (pairs, us) in found.items():
        yield LayerRow(cloud, channels, name, pairs, us, us / equal(pairs))


def lines(*points: tuple[int, float]) -> Callable[[int], float]:
    """From point to point, on along the last line, and no lower than the first point.

    >>> equal = lines((10, 5.0), (20, 9.0), (40, 11.0))
    >>> equal(5), equal(15), equal(30), equal(50)
    (5.0, 7.0, 10.0, 12.0)
    """
    ordered = sorted(points)

    def at(x: int) -> float:
        ends = itertools.pairwise(ordered)
        (x0, y0), (x1, y1) = next((e for e in ends if x <= e[1][0]), ordered[-2:])
        slope = max(0.0, (y1 - y0) / max(1, x1 - x0))
        return max(ordered[0][1], y0 + slope * (x - x0))

    return at


def maps_of(base: Tensor, count: int) -> Iterator[MapRow]:
    """Copies of a cloud beside each other, in the order of the cloud and in none."""
    size, needed = base.amax(0) - base.amin(0) + 3, -(-count // len(base))
    steps = torch.arange(needed, device=base.device)[:, None, None] * size.new_tensor([1, 0, 0])
    coords = (base + steps * size).flatten(0, 1)[:count].int()
    for order in ("as scanned", "shuffled"):
        if order == "shuffled":
            coords = coords[torch.randperm(len(coords), device=coords.device)]
        given = nn.functional.pad(coords, (1, 0)).contiguous()
        low, high = given.amin(0).tolist(), given.amax(0).tolist()
        keys = keys_of(given, low, [b - a + 1 for a, b in zip(low, high)])

        def build(given: Tensor = given) -> object:
            voxels = Voxels.of(given)
            return build_map(voxels, voxels, SUBMANIFOLD)

        times = []
        for run in (build, keys.sort):
            measure.warm(lambda run=run: (run(),), base.device)  # type: ignore[misc]
            times.append(1e3 * measure.clock(run, base.device, capture=False)[0])
        yield MapRow(order, len(given), *times)


def run(study: Study) -> int:
    """Measure, show and write."""
    options, asked = study.options, study.asked
    names = data.chosen(data.cloud_names(options.data), options.names, "cloud")
    names = names if options.names else names[: 4 if options.gpu and not options.quick else 1]
    channels = [int(c) for c in asked.channels.split(",") if c] or CHANNELS
    kind = torch.float16 if options.gpu else torch.float32
    rows: list[LayerRow] = []
    with torch.no_grad():
        for name in names:
            coords = data.cloud(name, options.data, options.device, None if options.gpu else 60)
            for count in channels if options.gpu else channels[:1]:
                if study.has_time():
                    rows += rows_of(name, coords, count, kind)
                    study.keep(layers=[asdict(row) for row in rows])
        maps = list(maps_of(coords, asked.voxels if options.gpu else 100))
    study.keep(layers=[asdict(row) for row in rows], maps=[asdict(row) for row in maps])
    print("\n".join(aligned([HEAD, *map(_cells, rows)])))
    for row in maps:
        ratio = row.map_us / row.sort_us
        print(
            f"map of {row.voxels} voxels, {row.order}: {row.map_us:.0f} us, {ratio:.1f} sorts of "
            "its keys"
        )
    print(f"written: {study.file}")
    return 0


def _cells(row: LayerRow) -> tuple[str, ...]:
    times = f"{row.us:.1f}", f"{row.ratio:.2f}"
    return row.cloud, str(row.channels), row.layer, str(row.pairs), *times
