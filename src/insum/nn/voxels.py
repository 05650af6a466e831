"""Occupied voxels and their features: what sparse convolutions work on."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum.accepted import (
    COMPUTABLE,
    ELEMENTS,
    SHAPE,
    SIZE,
    TENSOR,
    VALUES,
    Accepted,
    is_common,
    require,
    takes,
)
from insum.compat.calls import empty, untracked
from insum.errors import BindingError, FormatError, IndexRangeError, InsumError
from insum.nn.checks import integers, kernels_look, one_device, sent
from insum.runtime import hashing
from insum.runtime.record import EARLIER, synchronize

if TYPE_CHECKING:
    from typing_extensions import Self

Triple = tuple[int, int, int]
_AXES = ("batch", "x", "y", "z")
#: Dtypes whose values int32 holds.
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)


@dataclass(frozen=True)
class Box:
    """A box that holds voxels: its lowest corner, and its size."""

    low: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Voxels:
    """A set of voxels that can be searched, and the kernel maps that start here.

    On the CPU voxels are searched by their keys, in ascending order: a key is the place of a voxel
    in the box that holds them all, counted row by row. On a GPU they are searched in a hash table,
    which is built without waiting when the first map is; a voxel that stands twice or lies outside
    of the spatial shape is then reported by a later call. All tensors of one resolution share one
    object, and so its maps.
    """

    coords: Tensor
    spatial_shape: Triple | None = None
    maps: dict[object, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, coords: Tensor, spatial_shape: Sequence[int] | None = None) -> Self:
        """From coordinates (N, 3) or (N, 4), each of them once.

        >>> voxels = Voxels.of(torch.tensor([[0, 2, 1], [5, 0, 0]]))
        >>> voxels.find(torch.tensor([[0, 5, 0, 0], [0, 1, 1, 1], [0, 0, 2, 1]]))
        tensor([ 1, -1,  0], dtype=torch.int32)
        """
        shape = _checked_shape(spatial_shape)
        given = _checked_coords(coords)
        if not kernels_look(given):
            made = cls(_copied(given), shape)
            made.check()
            return made
        # a copy, too, which the kernel that looks at them makes
        with untracked():
            made = cls(empty((given.shape[0], 4), given.dtype, given.device), shape)
            made.__dict__.update(is_hashed=True, table=made.hashed(given))
        return made

    @classmethod
    def of_sorted(cls, keys: Tensor, box: Box, spatial_shape: Triple | None) -> Self:
        """From ascending keys, known to be right."""
        made = cls(_coords(keys, box), spatial_shape)
        order = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
        made.__dict__.update(box=box, ranked=(keys, order))
        return made

    @property
    def count(self) -> int:
        return self.coords.shape[0]

    @functools.cached_property
    def is_hashed(self) -> bool:
        """Whether voxels are searched by kernels, which do not wait."""
        return kernels_look(self.coords)

    @functools.cached_property
    def box(self) -> Box:
        """A box that holds all voxels; waits for the device."""
        return _box(self.coords, self.spatial_shape)

    @functools.cached_property
    def ranked(self) -> tuple[Tensor, Tensor]:
        """Keys in ascending order, and the row in ``coords`` of each."""
        keys, order = keys_of(self.coords, self.box.low, self.box.size).sort()
        return keys, order.to(torch.int32)

    @functools.cached_property
    def table(self) -> hashing.Table:
        """The hash table; building it looks at the coordinates, and reports."""
        with untracked():
            return self.hashed(self.coords)

    def hashed(self, given: Tensor) -> hashing.Table:
        """The table of coordinates that are, or are to become, those of the voxels."""
        explain = _Explained(weakref.ref(self.coords), self.spatial_shape)
        return hashing.table_of(given, self.coords, self.spatial_shape, explain)

    def check(self) -> None:
        """Raise where a voxel stands twice or lies outside of the spatial shape. Waits."""
        if self.is_hashed:
            _ = self.table
            synchronize(self.coords.device if self.coords.is_cuda else None)
        else:
            _check_unique(self.coords, *self.ranked)

    def __getstate__(self) -> dict[str, Any]:
        """Maps are built anew: they are held by the identity of what they lead to."""
        own = ("table", "is_hashed")  # of the device
        state = {name: held for name, held in self.__dict__.items() if name not in own}
        return {**state, "maps": {}}

    def find(self, wanted: Tensor) -> Tensor:
        """The row of each wanted coordinate (..., 4), or -1; without waiting."""
        if self.is_hashed:
            places = wanted.reshape(-1, 4).contiguous()
            found, _ = hashing.find(self.table, places, _here(places.device))
            return found.reshape(wanted.shape[:-1])
        if self.count == 0:
            return torch.full(wanted.shape[:-1], -1, dtype=torch.int32, device=wanted.device)
        low, size = (torch.tensor(t, device=wanted.device) for t in (self.box.low, self.box.size))
        inside = ((wanted >= low) & (wanted < low + size)).all(-1)
        keys, order = self.ranked
        key = keys_of(wanted, self.box.low, self.box.size)
        at = torch.searchsorted(keys, key).clamp_(max=self.count - 1)
        return torch.where(inside & (keys[at] == key), order[at], -1)


@functools.lru_cache(maxsize=16)
def _here(device: torch.device) -> hashing.Stencil:
    """The stencil that leads nowhere else."""
    offsets, first = sent([[0, 0, 0]], torch.int64, device), sent([0], torch.int32, device)
    return hashing.Stencil(offsets, first, (1, 1, 1), (0, 0, 0), coarse=False)


VOXEL_SET = Accepted("Voxels, or None", lambda v: isinstance(v, Voxels))


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
        features, voxels = self.features, self.voxels
        if not is_common(features) or features.dtype not in COMPUTABLE:
            require("features", features, VALUES)
        if type(self.coords) is not Tensor:
            require("coords", self.coords, TENSOR)
        if type(voxels) is not Voxels:
            if voxels is not None:
                require("voxels", voxels, VOXEL_SET)
            one_device(coords=self.coords, features=features)
            voxels = voxels or Voxels.of(self.coords, self.spatial_shape)
            object.__setattr__(self, "voxels", voxels)
        count = voxels.coords.shape[0]
        if features.dim() != 2 or features.shape[0] != count:
            raise BindingError(
                f"features have shape {tuple(features.shape)}, but there are {count} voxels",
                expected=f"({count}, channels)",
            )
        object.__setattr__(self, "coords", voxels.coords)
        object.__setattr__(self, "spatial_shape", voxels.spatial_shape)

    @classmethod
    @takes(grid=ELEMENTS)
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

    @takes(batch_size=SIZE.optional)
    def to_dense(self, batch_size: int | None = None) -> Tensor:
        """The grid (batch, channels, x, y, z), zero where there is no voxel."""
        if self.spatial_shape is None:
            raise BindingError(
                "the spatial shape of this tensor is not known",
                remedy="SparseTensor(coords, features, spatial_shape=(...))",
            )
        if self.voxels.is_hashed:
            self.voxels.check()  # torch's own kernels would end the process' use of the device
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
    if not SHAPE.fits(shape) or len(shape) != 3 or 0 in shape:
        raise BindingError(
            f"spatial_shape is {shape!r}", expected="three sizes of at least 1: x, y, z"
        )
    return (shape[0], shape[1], shape[2])


def _checked_coords(coords: Tensor) -> Tensor:
    if not is_common(coords):
        require("coords", coords, ELEMENTS)
    integers("coords", coords)
    if coords.dim() != 2 or coords.shape[1] not in (3, 4):
        raise BindingError(
            f"coords have shape {tuple(coords.shape)}",
            expected="(voxels, 4) for batch, x, y, z, or (voxels, 3) for x, y, z",
        )
    kind = torch.int32 if coords.dtype in _NARROW else torch.int64
    if coords.dtype is kind and coords.is_contiguous():
        return coords
    return coords.to(kind).contiguous()


def _copied(coords: Tensor) -> Tensor:
    """With a batch. A copy: maps hold for these coordinates, whatever becomes of the caller's
    buffer.
    """
    if coords.shape[1] == 3:
        return torch.nn.functional.pad(coords, (1, 0))
    return coords.clone()


def _box(coords: Tensor, shape: Triple | None) -> Box:
    """A box that holds all; one look at the device."""
    if coords.shape[0] == 0:
        return Box((0, 0, 0, 0), (1, *(shape or (1, 1, 1))))
    least, most = torch.stack(torch.aminmax(coords, dim=0)).tolist()
    limits = [None, *shape] if shape else [None] * 4
    for axis, (low, high, limit) in enumerate(zip(least, most, limits)):
        if (limit is not None or axis == 0) and low < 0 or limit is not None and high >= limit:
            raise _first_outside(coords, axis, limit)
    low = (0, 0, 0, 0) if shape else (0, *least[1:])
    size = (most[0] + 1, *(shape or [b - a + 1 for a, b in zip(least[1:], most[1:])]))
    check_box(size)
    return Box(low, size)


def check_box(size: tuple[int, ...]) -> None:
    """Every place of a box has a key of 64 bits."""
    if math.prod(size) >= 2**63:
        raise FormatError(
            f"the voxels lie in a box of {size}, too large for 64-bit keys",
            expected="fewer than 2**63 places",
        )


def _first_outside(coords: Tensor, axis: int, limit: int | None) -> IndexRangeError:
    column = coords[:, axis].long()  # a limit need not fit into the dtype of the coordinates
    row = int(((column < 0) | (column >= (limit or 2**31 - 1))).nonzero()[0])
    return _outside(row, coords[row].tolist(), axis, limit)


def _outside(
    row: int, place: Sequence[int], axis: int, limit: int | None, when: str = ""
) -> IndexRangeError:
    where = f"coords[{row}] is {tuple(place)}"
    if limit is None:
        return IndexRangeError(f"{where}: batch {place[axis]}{when}", expected="batches from 0")
    return IndexRangeError(
        f"{where}, outside the spatial shape: {_AXES[axis]} is {place[axis]}{when}",
        expected=f"{_AXES[axis]} from 0 to {limit - 1}",
    )


def _check_unique(coords: Tensor, keys: Tensor, order: Tensor) -> None:
    twice = keys[1:] == keys[:-1]
    if bool(twice.any()):
        at = int(twice.nonzero()[0])
        first, second = sorted(order[at : at + 2].tolist())
        raise _twice(first, second, f" are both {tuple(coords[first].tolist())}")


def _twice(first: int, second: int, where: str) -> FormatError:
    return FormatError(
        f"coords[{first}] and coords[{second}]{where}",
        expected="every voxel once",
        remedy="merge them first: coords, at = coords.unique(dim=0, return_inverse=True)",
    )


@dataclass(frozen=True)
class _Explained:
    """Makes the error of what a kernel found; the coordinates may be gone by then."""

    coords: weakref.ref[Tensor]
    shape: Triple | None

    def __call__(self, offence: int, row: int, other: int) -> InsumError:
        coords = self.coords()
        place = None if coords is None else coords[row].tolist()
        if offence == hashing.TWICE:
            first, second = sorted((row, other))
            where = " are the same" if place is None else f" are both {tuple(place)}"
            return _twice(first, second, where + EARLIER)
        if place is None:
            return IndexRangeError(f"coords[{row}] is outside the spatial shape{EARLIER}")
        limits = [None, *self.shape] if self.shape else [None]
        axis = next(a for a, n in enumerate(limits) if not 0 <= place[a] < (n or place[a] + 1))
        return _outside(row, place, axis, limits[axis], EARLIER)


# --- keys ---


def keys_of(coords: Tensor, low: Sequence[int] | Tensor, size: Sequence[int] | Tensor) -> Tensor:
    """The place of each coordinate (..., 4) in a box, counted row by row; meaningless outside."""
    key = coords[..., 0].long() - low[0]
    for axis in (1, 2, 3):
        # the difference of two coordinates of 32 bits may need 33
        key = key * size[axis] + (coords[..., axis].long() - low[axis])
    return key


def _coords(keys: Tensor, box: Box) -> Tensor:
    columns, (low, size) = [], (box.low, box.size)
    for axis in (3, 2, 1):
        rest = keys.div(size[axis], rounding_mode="floor")
        columns.append(keys - rest * size[axis] + low[axis])
        keys = rest
    return torch.stack([keys + low[0], *reversed(columns)], -1)
