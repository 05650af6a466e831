"""Graphs and point clouds: real ones from a folder, or generated stand-ins with the same
statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import insum
from insum.errors import BenchError
from insum.nn.kernel_map import Geometry, build_map
from insum.nn.voxels import Voxels
from insum.nn.wigner import wigner_3j

USUAL = Path("../shared/data")
#: 3 x 3 x 3 around a voxel, outputs where inputs are.
SUBMANIFOLD = Geometry((3, 3, 3), padding=(1, 1, 1), submanifold=True)
VOXEL = 0.05

#: Rows, nonzeros and longest row of the graphs, for stand-ins: an even one, a skewed one, one of
#: cliques, and citation graphs.
STAND_INS: dict[str, tuple[int, int, int]] = {
    "cora": (2_708, 10_556, 168),
    "citeseer": (3_327, 9_228, 99),
    "pubmed": (19_717, 88_651, 171),
    "PROTEINS_full": (43_471, 162_088, 25),
    "DD": (334_925, 1_686_092, 19),
    "amazon0601": (403_394, 3_387_388, 10),
    "REDDIT-BINARY": (859_254, 1_991_016, 3_062),
    "COLLAB": (372_474, 24_574_995, 491),
    "ego-twitter": (81_306, 1_768_149, 1_205),
    "email-Enron": (36_692, 367_662, 1_383),
    "copter2": (55_476, 704_476, 44),
    "kim1": (38_415, 933_195, 25),
    "c-46": (14_913, 130_397, 1_397),
}
#: Voxels of the clouds and the mean number of neighbours among 27.
CLOUD_STAND_INS: dict[str, tuple[int, float]] = {
    "pc-s3dis-ucf-lobby": (48_503, 11.5),
    "pc-pcl-room_scan1": (27_906, 6.3),
    "pc-spconv-benchmark": (173_112, 3.5),
    "pc-lidar-ucf-LIDAR1": (87_164, 6.3),
}


class RandomTensors:
    """Random tensors of one kind, the same in every run."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        self.device, self.dtype, self.generator = (
            device,
            dtype,
            torch.Generator(device=device).manual_seed(seed),
        )

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device, generator=self.generator) * scale).to(
            self.dtype
        )

    def chance(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device, generator=self.generator)


@dataclass(frozen=True, eq=False)
class CsrPattern:
    """A CSR pattern."""

    name: str
    indptr: Tensor
    indices: Tensor
    shape: tuple[int, int]

    @property
    def nonzeros(self) -> int:
        return self.indices.numel()

    def rows(self) -> Tensor:
        counts = self.indptr.diff().long()
        return torch.repeat_interleave(
            torch.arange(self.shape[0], device=counts.device, dtype=torch.int32), counts
        )


def folder(given: str | None) -> Path | None:
    """The data folder: the given one, which must be there, or the usual one where it is, or None
    for stand-ins.

    >>> folder("") is None
    True
    """
    if given == "":
        return None
    place = USUAL if given is None else Path(given)
    if place.is_dir():
        return place
    if given is None:
        return None
    remedy = (
        "leave --data out: ../shared/data is used where it is, generated stand-ins where it is not"
    )
    raise BenchError(
        f"the data folder {given} is not there",
        expected="a folder with graphs/*.npz and clouds/*.npz",
        remedy=remedy,
    )


def files(place: Path | None, key: str) -> dict[str, Path]:
    """The .npz files below a folder that hold an array of this name."""
    found = {}
    for file in sorted(place.rglob("*.npz")) if place else []:
        with np.load(file) as content:
            if key in content.files:
                found[file.stem] = file
    return found


def graph_names(place: Path | None) -> list[str]:
    """Small ones first, so that a run that is cut short has seen many."""
    found = files(place, "indptr")
    return sorted(found or STAND_INS, key=lambda name: STAND_INS.get(name, (0, 0, 0))[1])


def cloud_names(place: Path | None) -> list[str]:
    found = files(place, "points")
    return sorted(found or CLOUD_STAND_INS, key=lambda name: CLOUD_STAND_INS.get(name, (0, 0.0))[0])


def graph(name: str, place: Path | None, device: torch.device) -> CsrPattern:
    found = files(place, "indptr")
    if name in found:
        with np.load(found[name]) as content:
            indptr, indices = (
                torch.from_numpy(content[k].astype(np.int32)).to(device)
                for k in ("indptr", "indices")
            )
            shape = tuple(int(s) for s in content["shape"])
        return CsrPattern(name, indptr, indices, (shape[0], shape[1]))
    return made_graph(name, device)


def made_graph(name: str, device: torch.device) -> CsrPattern:
    """Random columns; lengths of rows follow a power law between 0 and the longest, scaled to the
    number of nonzeros.

    >>> made = made_graph("cora", torch.device("cpu"))
    >>> made.shape, abs(made.nonzeros - 10556) < 2000
    ((2708, 2708), True)
    """
    rows, nonzeros, longest = STAND_INS[name]
    draw = np.random.default_rng(len(name) + rows)
    mean = nonzeros / rows
    skew = max(1.0, np.log(longest / mean))
    lengths = np.exp(draw.normal(0.0, skew / 3, rows))
    lengths = np.minimum(np.round(lengths * mean / lengths.mean()), longest).astype(np.int64)
    row = np.repeat(np.arange(rows), lengths)
    key = np.unique(row * rows + draw.integers(0, rows, len(row)))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(key // rows, minlength=rows))])
    starts, columns = (
        torch.from_numpy(array.astype(np.int32)).to(device) for array in (indptr, key % rows)
    )
    return CsrPattern(name, starts, columns, (rows, rows))


def cloud(name: str, place: Path | None, device: torch.device, most: int | None = None) -> Tensor:
    """Occupied voxels (x, y, z) of a cloud at 5 cm, sorted; at most the first ``most``, which are
    neighbours of each other.
    """
    found = files(place, "points")
    if name in found:
        with np.load(found[name]) as content:
            points = torch.from_numpy(content["points"]).to(device)
        voxels: Tensor = torch.unique(torch.floor(points.double() / VOXEL).long(), dim=0)
    else:
        voxels = made_cloud(name, device)
    return voxels if most is None else voxels[:most].contiguous()


def made_cloud(name: str, device: torch.device) -> Tensor:
    """A sheet with hills, which has about 9 of 27 neighbours: thinned where the cloud has fewer,
    with some of a second layer where it has more.

    >>> made_cloud("pc-pcl-room_scan1", torch.device("cpu")).shape[1]
    3
    """
    count, neighbours = CLOUD_STAND_INS[name]
    keep, second = min(1.0, (neighbours - 1) / 8), max(0.0, (neighbours - 9) / 9)
    side = int((count / (keep + second)) ** 0.5)
    draw = torch.Generator().manual_seed(side)
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    z = (4 * torch.sin(x / 9) + 4 * torch.cos(y / 7)).round().long()
    sheet = torch.stack([x, y, z], -1).reshape(-1, 3)
    chance = torch.rand(2, len(sheet), generator=draw)
    voxels: Tensor = torch.unique(
        torch.cat([sheet[chance[0] < keep], (sheet + torch.tensor([0, 0, 1]))[chance[1] < second]]),
        dim=0,
    )
    return voxels.to(device)


def neighbour_table(voxels: Tensor) -> Tensor:
    """``Nb[z,x]``: the voxel at offset z (of 27) from voxel x, or -1."""
    from insum.formats import NeighborTable

    occupied = Voxels.of(voxels)
    found = build_map(occupied, occupied, SUBMANIFOLD)
    table = found if isinstance(found, NeighborTable) else found.to_format(NeighborTable, dim=2)
    assert isinstance(table, NeighborTable)
    return table.table


def chosen(names: Sequence[str], wanted: Sequence[str], kind: str) -> list[str]:
    """The names that were asked for, all where none were."""
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise BenchError(f"there is no {kind} {unknown[0]!r}", expected=", ".join(names))
    return list(wanted or names)


# --- equivariant products -------------------------------------------------------------------------


def degrees(highest: int, *, even: bool = False) -> list[tuple[int, int, int]]:
    """The degrees of both factors and of the result, of all products up to the highest; ``even``:
    of those that keep parity.

    >>> degrees(1)
    [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    >>> degrees(1, even=True)
    [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    """
    every = range(highest + 1)
    found = [(a, b, c) for a in every for b in every for c in every if abs(a - b) <= c <= a + b]
    return [one for one in found if sum(one) % 2 == 0] if even else found


def promised(tables: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Tables on a device, which are promised to stay as they are."""
    return {name: insum.constant(table.to(device)) for name, table in tables.items()}


def coefficients(products: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
    """The nonzero coefficients of products of these degrees, one product after the other: values
    ``V``, components of the result ``I`` and of both factors ``J`` and ``K``, products ``L``.
    """
    found: dict[str, list[float]] = {name: [] for name in "VIJKL"}
    for number, (a, b, c) in enumerate(products):
        block = wigner_3j(a, b, c)
        for i, j, k in block.nonzero().tolist():
            entry = (float(block[i, j, k]), k + c * c, i + a * a, j + b * b, number)
            for name, value in zip("VIJKL", entry, strict=True):
                found[name].append(value)
    made = {n: torch.tensor(v, dtype=torch.int32) for n, v in found.items() if n != "V"}
    return {**made, "V": torch.tensor(found["V"])}


def grouped_coefficients(products: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
    """The same with a row for each product, as long as the longest, padded with -1."""
    found = coefficients(products)
    counts = found["L"].bincount()
    row, slot = (torch.arange(int(counts.max())) < counts[:, None]).nonzero(as_tuple=True)
    shape = len(counts), int(counts.max())
    made = {name: torch.full(shape, -1, dtype=torch.int32) for name in "IJK"}
    made["V"] = torch.zeros(shape)
    for name, table in made.items():
        table[row, slot] = found[name]
    made["L"] = torch.arange(len(counts), dtype=torch.int32)
    return made
