"""Occupied voxels and their features: what sparse convolutions work on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum.errors import BindingError, FormatError, IndexRangeError
from insum.nn.checks import integers, one_device

if TYPE_CHECKING:
    from typing_extensions import Self

Triple = tuple[int, int, int]
_AXES = ("batch", "x", "y", "z")


@dataclass(frozen=True, eq=False)
class Voxels:
    """A set of voxels that can be searched: coordinates, their keys in ascending order, and the
    kernel maps that start here.

    A key is the place of a voxel in the box that holds them all, counted row by row. ``order``
    leads from a place among the sorted keys to the voxel's row in ``coords``. All tensors of one
    resolution share one object, and so its maps.
    """

    coords: Tensor
    keys: Tensor
    order: Tensor
    low: tuple[int, ...]
    size: tuple[int, ...]
    spatial_shape: Triple | None
    maps: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, coords: Tensor, spatial_shape: Sequence[int] | None = None) -> Self:
        """From coordinates (N, 3) or (N, 4), each of them once.

        >>> voxels = Voxels.of(torch.tensor([[0, 2, 1], [5, 0, 0]]))
        >>> voxels.find(torch.tensor([[0, 5, 0, 0], [0, 1, 1, 1], [0, 0, 2, 1]]))
        tensor([ 1, -1,  0], dtype=torch.int32)
        """
        shape = _checked_shape(spatial_shape)
        coords = _checked_coords(coords)
        low, size = _box(coords, shape)
        keys, order = keys_of(coords, low, size).sort()
        _check_unique(coords, keys, order)
        return cls(coords, keys, order.to(torch.int32), low, size, shape)

    @classmethod
    def of_sorted(
        cls, keys: Tensor, low: tuple[int, ...], size: tuple[int, ...], spatial_shape: Triple | None
    ) -> Self:
        """From ascending keys, known to be right."""
        order = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
        return cls(_coords(keys, low, size), keys, order, low, size, spatial_shape)

    @property
    def count(self) -> int:
        return self.coords.shape[0]

    def find(self, wanted: Tensor) -> Tensor:
        """The row of each wanted coordinate (..., 4), or -1; by binary search on the device."""
        if self.count == 0:
            return torch.full(wanted.shape[:-1], -1, dtype=torch.int32, device=wanted.device)
        low, size = (torch.tensor(t, device=wanted.device) for t in (self.low, self.size))
        inside = ((wanted >= low) & (wanted < low + size)).all(-1)
        key = keys_of(wanted, self.low, self.size)
        at = torch.searchsorted(self.keys, key).clamp_(max=self.count - 1)
        return torch.where(inside & (self.keys[at] == key), self.order[at], -1)


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """Features at voxels: ``coords`` (N, 4) as batch, x, y, z or (N, 3) for a single one, and
    ``features`` (N, channels).

    Every voxel stands once; the order is free. ``spatial_shape`` bounds the coordinates to ``0 ..
    size-1``, as a dense grid does; without it they may be any integers. Layers keep the kernel maps
    that they build with the voxels, so that all layers of one resolution share them.

    >>> coords = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 2], [1, 1, 1, 1]])
    >>> x = SparseTensor(coords, torch.ones(3, 8), spatial_shape=(4, 4, 4))
    >>> x
    SparseTensor(voxels=3, channels=8, float32, spatial_shape=(4, 4, 4), cpu)
    >>> x.to_dense().shape
    torch.Size([2, 8, 4, 4, 4])
    """

    coords: Tensor
    features: Tensor
    spatial_shape: Triple | None = None
    voxels: Voxels = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.voxels is None:
            one_device(coords=self.coords, features=self.features)
            object.__setattr__(self, "voxels", Voxels.of(self.coords, self.spatial_shape))
        if self.features.dim() != 2 or self.features.shape[0] != self.voxels.count:
            count = self.voxels.count
            raise BindingError(
                f"features have shape {tuple(self.features.shape)}, but there are {count} voxels",
                expected=f"({count}, channels)",
            )
        object.__setattr__(self, "coords", self.voxels.coords)
        object.__setattr__(self, "spatial_shape", self.voxels.spatial_shape)

    @classmethod
    def from_dense(cls, grid: Tensor) -> Self:
        """The voxels of a grid (batch, channels, x, y, z) that hold anything but zero."""
        if grid.dim() != 5:
            raise BindingError(
                f"the grid has shape {tuple(grid.shape)}", expected="(batch, channels, x, y, z)"
            )
        last = grid.movedim(1, -1)
        found = (last.detach() != 0).any(-1).nonzero()
        return cls(
            found,
            last[tuple(found.unbind(1))],
            spatial_shape=(grid.shape[2], grid.shape[3], grid.shape[4]),
        )

    def to_dense(self, batch_size: int | None = None) -> Tensor:
        """The grid (batch, channels, x, y, z), zero where there is no voxel."""
        if self.spatial_shape is None:
            raise BindingError(
                "the spatial shape of this tensor is not known",
                remedy="SparseTensor(coords, features, spatial_shape=(...))",
            )
        batches = batch_size or (int(self.coords[:, 0].max()) + 1 if self.voxels.count else 1)
        grid = self.features.new_zeros(batches, *self.spatial_shape, self.features.shape[1])
        return grid.index_put(tuple(self.coords.long().unbind(1)), self.features).movedim(-1, 1)

    def with_features(self, features: Tensor) -> Self:
        """The same voxels with other features.

        >>> x = SparseTensor(torch.tensor([[0, 0, 0]]), torch.tensor([[-1.0, 2.0]]))
        >>> x.with_features(x.features.relu()).features
        tensor([[0., 2.]])
        """
        return type(self)(self.coords, features, self.spatial_shape, self.voxels)

    def __repr__(self) -> str:
        f = self.features
        kind = str(f.dtype).removeprefix("torch.")
        return (
            f"SparseTensor(voxels={self.voxels.count}, channels={f.shape[1]}, {kind}, "
            f"spatial_shape={self.spatial_shape}, {f.device})"
        )


# --- checks ---


def _checked_shape(shape: Sequence[int] | None) -> Triple | None:
    if shape is None:
        return None
    if len(shape) != 3 or not all(isinstance(s, int) and s >= 1 for s in shape):
        raise BindingError(
            f"spatial_shape is {shape!r}", expected="three sizes of at least 1: x, y, z"
        )
    return (shape[0], shape[1], shape[2])


def _checked_coords(coords: Tensor) -> Tensor:
    integers("coords", coords)
    if coords.dim() != 2 or coords.shape[1] not in (3, 4):
        raise BindingError(
            f"coords have shape {tuple(coords.shape)}",
            expected="(voxels, 4) for batch, x, y, z, or (voxels, 3) for x, y, z",
        )
    whole = coords if coords.shape[1] == 4 else torch.nn.functional.pad(coords, (1, 0))
    return whole.to(torch.int32) if whole.dtype != torch.int64 else whole


def _box(coords: Tensor, shape: Triple | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The lowest coordinate and the size of a box that holds all; one look at the device."""
    if coords.shape[0] == 0:
        return (0, 0, 0, 0), (1, *(shape or (1, 1, 1)))
    least, most = torch.stack(torch.aminmax(coords, dim=0)).tolist()
    limits = [None, *shape] if shape else [None] * 4
    for axis, (low, high, limit) in enumerate(zip(least, most, limits)):
        if (limit is not None or axis == 0) and low < 0 or limit is not None and high >= limit:
            raise _outside(coords, axis, limit)
    low = (0, 0, 0, 0) if shape else (0, *least[1:])
    size = (most[0] + 1, *(shape or [b - a + 1 for a, b in zip(least[1:], most[1:])]))
    if math.prod(size) >= 2**63:
        raise FormatError(
            f"the voxels lie in a box of {size}, too large for 64-bit keys",
            expected="fewer than 2**63 places",
        )
    return low, size


def _outside(coords: Tensor, axis: int, limit: int | None) -> IndexRangeError:
    column = coords[:, axis]
    row = int(((column < 0) | (column >= (limit or 2**31 - 1))).nonzero()[0])
    where = f"coords[{row}] is {tuple(coords[row].tolist())}"
    if limit is None:
        return IndexRangeError(f"{where}: batch {int(column[row])}", expected="batches from 0")
    return IndexRangeError(
        f"{where}, outside the spatial shape: {_AXES[axis]} is {int(column[row])}",
        expected=f"{_AXES[axis]} from 0 to {limit - 1}",
    )


def _check_unique(coords: Tensor, keys: Tensor, order: Tensor) -> None:
    twice = keys[1:] == keys[:-1]
    if bool(twice.any()):
        at = int(twice.nonzero()[0])
        first, second = sorted(order[at : at + 2].tolist())
        where = tuple(coords[first].tolist())
        remedy = "merge them first: coords, at = coords.unique(dim=0, return_inverse=True)"
        raise FormatError(
            f"coords[{first}] and coords[{second}] are both {where}",
            expected="every voxel once",
            remedy=remedy,
        )


# --- keys ---


def keys_of(coords: Tensor, low: Sequence[int], size: Sequence[int]) -> Tensor:
    """The place of each coordinate (..., 4) in a box, counted row by row; meaningless outside."""
    key = coords[..., 0].long() - low[0]
    for axis in (1, 2, 3):
        key = key * size[axis] + (coords[..., axis] - low[axis])
    return key


def _coords(keys: Tensor, low: Sequence[int], size: Sequence[int]) -> Tensor:
    columns = []
    for axis in (3, 2, 1):
        rest = keys.div(size[axis], rounding_mode="floor")
        columns.append(keys - rest * size[axis] + low[axis])
        keys = rest
    return torch.stack([keys + low[0], *reversed(columns)], -1)
