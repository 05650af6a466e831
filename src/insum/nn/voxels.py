"""Sets of occupied voxels in one to four dimensions, which can be searched."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum.accepted import ELEMENTS, SHAPE, is_common, is_dense, is_fake, is_size, require
from insum.compat.calls import is_transformed
from insum.compat.contexts import untracked, without_levels
from insum.compat.tensors import empty
from insum.errors import (
    BindingError,
    FormatError,
    IndexRangeError,
    InsumError,
    UnsupportedError,
)
from insum.nn.checks import integers, kernels_look, sent
from insum.runtime.handwritten import hashing
from insum.runtime.record import EARLIER, synchronize

if TYPE_CHECKING:
    from typing_extensions import Self

#: One number for each axis.
Sizes = tuple[int, ...]
AXES = ("x", "y", "z", "t")
#: Of coordinates that nothing else is said of.
USUAL_DIMENSIONS = 3
#: Dtypes whose values int32 holds.
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32)
#: Coordinates below this have neighbours that 64 bits hold.
FARTHEST = 2**62
#: More batches than this, out of order, beside a last column of zeros, are coordinates.
_MANY_BATCHES = 256


@dataclass(frozen=True)
class Box:
    """A box that holds voxels: its lowest corner, and its size."""

    low: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def high(self) -> tuple[int, ...]:
        """The highest corner, which is part of it."""
        return tuple(a + b - 1 for a, b in zip(self.low, self.size))


@dataclass(frozen=True, eq=False)
class Voxels:
    """A set of voxels that can be searched, and the kernel maps that start here.

    On the CPU voxels are searched by their keys, in ascending order: a key is the place of a voxel
    in the box that holds them all, counted row by row. On a GPU they are searched in a hash table,
    which is built without waiting when the first map is; a voxel that stands twice or lies outside
    of the spatial shape is then reported by a later call. All tensors of one resolution share one
    object, and so its maps.

    Attributes:
        coords: (N, 1 + dimensions): batch, then x, y, z, t as far as they go.

    Examples:
        >>> Voxels.of(torch.tensor([[0, 2, 1], [5, 0, 0]])).count
        2
    """

    coords: Tensor
    spatial_shape: Sizes | None = None
    maps: dict[object, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if is_transformed():
            object.__setattr__(self, "coords", without_levels(self.coords))

    @classmethod
    def of(
        cls,
        coords: Tensor,
        spatial_shape: Sequence[int] | None = None,
        ndim: int | None = None,
    ) -> Self:
        """From coordinates with or without a batch in front, each of them once.

        Args:
            coords: (N, ndim) or (N, 1 + ndim), integers.
            spatial_shape: Bounds the coordinates to ``0 .. size-1``.
            ndim: The number of dimensions; that of ``spatial_shape`` where it is given, else 3.

        Returns:
            The set, with coordinates of its own.

        Raises:
            BindingError: The numbers of columns and dimensions do not fit.
            FormatError: A voxel stands twice, or the batch stands last.
            IndexRangeError: A voxel lies outside of the spatial shape.

        >>> voxels = Voxels.of(torch.tensor([[0, 2, 1], [5, 0, 0]]))
        >>> voxels.find(torch.tensor([[0, 5, 0, 0], [0, 1, 1, 1], [0, 0, 2, 1]]))
        tensor([ 1, -1,  0], dtype=torch.int32)
        """
        if torch.compiler.is_dynamo_compiling():
            from insum.nn.untraced import looked_at  # which loads the compiler

            made: Self = looked_at(cls._of, coords, spatial_shape, ndim)
            return made
        return cls._of(coords, spatial_shape, ndim)

    @classmethod
    def _of(cls, coords: Tensor, spatial_shape: Sequence[int] | None, ndim: int | None) -> Self:
        shape = None if spatial_shape is None else _checked_shape(spatial_shape)
        usual = ndim is None and shape is None
        dimensions = USUAL_DIMENSIONS if usual else _dimensions(ndim, shape)
        given = _checked_coords(coords, dimensions, ndim is None)
        if not kernels_look(given):
            with untracked():
                made = cls(_copied(without_levels(given), dimensions), shape)
                if ndim is None and given.shape[1] > dimensions:
                    _check_batch_first(made.coords)
                made.check()
            return made
        # a copy, too, which the kernel that looks at them makes
        with untracked():
            made = cls(empty((given.shape[0], dimensions + 1), given.dtype, given.device), shape)
            made.__dict__["table"] = made.hashed(given)
        return made

    @classmethod
    def of_sorted(cls, keys: Tensor, box: Box, spatial_shape: Sizes | None) -> Self:
        """From ascending keys, known to be right."""
        with untracked():
            keys = without_levels(keys)
            made = cls(_coords(keys, box), spatial_shape)
            order = torch.arange(keys.shape[0], dtype=torch.int32, device=keys.device)
        made.__dict__.update(box=box, ranked=(keys, order))
        return made

    @property
    def count(self) -> int:
        return self.coords.shape[0]

    @property
    def ndim(self) -> int:
        """The number of dimensions, without the batch."""
        return self.coords.shape[1] - 1

    @property
    def is_hashed(self) -> bool:
        """Whether voxels are searched by kernels, which do not wait. So they are once there is a
        table; until then it is asked anew, for a mode of torch's or a setting that keeps kernels
        from running ends.
        """
        if "table" in self.__dict__:
            return True
        with untracked(self.coords):
            return kernels_look(self.coords)

    @functools.cached_property
    def box(self) -> Box:
        """A box that holds all voxels; waits for the device."""
        with untracked(self.coords):
            return _box(self.coords, self.spatial_shape)

    @functools.cached_property
    def batch_size(self) -> int:
        """One more than the largest batch, or what was known of it; waits for the device."""
        return int(self.coords[:, 0].max()) + 1 if self.count else 1

    def in_batches(self, source: Voxels) -> Self:
        """This set, with as many batches as that which it was made of, where that is known."""
        known = source.__dict__.get("batch_size")
        if known is not None:
            self.__dict__["batch_size"] = known
        return self

    @functools.cached_property
    def batches(self) -> Tensor:
        """The batch of every voxel."""
        with untracked(self.coords):
            return self.coords[:, 0].contiguous()

    @functools.cached_property
    def ranked(self) -> tuple[Tensor, Tensor]:
        """Keys in ascending order, and the row in ``coords`` of each."""
        with untracked(self.coords):
            keys, order = keys_of(self.coords, self.box.low, self.box.size).sort()
            return keys, order.to(torch.int32)

    @functools.cached_property
    def table(self) -> hashing.Table:
        """The hash table; building it looks at the coordinates, and reports."""
        with untracked(self.coords):
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

    def is_same(self, other: Voxels) -> bool:
        """Whether the voxels are the same, in the same order. Sets that share one object are told
        at once; else their coordinates are compared, which waits.
        """
        if self is other:
            return True
        if self.coords.shape != other.coords.shape or self.coords.device != other.coords.device:
            return False
        return bool((self.coords == other.coords).all())

    def moved(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The same voxels on another device, where maps are built anew."""
        if device == self.coords.device:
            return self
        made = type(self)(self.coords.to(device, non_blocking=non_blocking), self.spatial_shape)
        return made.in_batches(self)

    def __getstate__(self) -> dict[str, Any]:
        """Maps are built anew: they are held by the identity of what they lead to."""
        state = {name: held for name, held in self.__dict__.items() if name != "table"}
        return {**state, "maps": {}}

    def find(self, wanted: Tensor) -> Tensor:
        """The row of each wanted coordinate (..., 1 + dimensions), or -1; without waiting."""
        if self.is_hashed:
            places = wanted.reshape(-1, self.ndim + 1).contiguous()
            found, _ = hashing.find(self.table, places, _here(self.ndim, places.device))
            return found.reshape(wanted.shape[:-1])
        if self.count == 0:
            return torch.full(wanted.shape[:-1], -1, dtype=torch.int32, device=wanted.device)
        low, size = (torch.tensor(t, device=wanted.device) for t in (self.box.low, self.box.size))
        inside = ((wanted >= low) & (wanted < low + size)).all(-1)
        keys, order = self.ranked
        key = keys_of(wanted, self.box.low, self.box.size)
        at = torch.searchsorted(keys, key).clamp_(max=self.count - 1)
        return torch.where(inside & (keys[at] == key), order[at], -1)


@functools.lru_cache(maxsize=64)
def _here(ndim: int, device: torch.device) -> hashing.Stencil:
    """The stencil that leads nowhere else."""
    offsets, first = sent([[0] * ndim], torch.int64, device), sent([0], torch.int32, device)
    return hashing.Stencil(offsets, first, (1,) * ndim, (0,) * ndim, coarse=False)


# --- checks ---


def axes_of(ndim: int) -> str:
    """The names of the axes, for messages."""
    return ", ".join(AXES[:ndim])


def _dimensions(ndim: int | None, shape: Sizes | None) -> int:
    found = ndim if ndim is not None else USUAL_DIMENSIONS if shape is None else len(shape)
    if not is_size(found, 1) or found > len(AXES):
        raise BindingError(f"ndim is {ndim!r}", expected="1, 2, 3 or 4 dimensions")
    if shape is not None and len(shape) != found:
        raise BindingError(
            f"spatial_shape is {shape}, but there are {found} dimensions",
            expected=f"{found} sizes: {axes_of(found)}",
        )
    return found


def _checked_shape(shape: Sequence[int]) -> Sizes:
    if not SHAPE.fits(shape) or not 1 <= len(shape) <= len(AXES) or 0 in shape:
        raise BindingError(
            f"spatial_shape is {shape!r}",
            expected="one to four sizes of at least 1, one for each of x, y, z, t",
        )
    return tuple(n if isinstance(n, torch.SymInt) else int(n) for n in shape)


def _checked_coords(coords: Tensor, ndim: int, usual: bool) -> Tensor:
    if not is_common(coords):
        if is_dense(coords) and is_fake(coords) and torch.compiler.is_exporting():
            raise UnsupportedError(
                "the coordinates of a SparseTensor are an input of a program that is exported: "
                "they have no values, on which sizes in the program depend",
                expected="voxels that the exported module holds, and features as its input",
                remedy="make a SparseTensor x of the module's own, and x.with_features(features) "
                "in forward; for other clouds export again, or use torch.compile",
            )
        require("coords", coords, ELEMENTS)
    integers("coords", coords)
    if coords.dim() != 2 or coords.shape[1] not in (ndim, ndim + 1):
        columns = coords.shape[1] if coords.dim() == 2 else 0
        raise BindingError(
            f"coords have shape {tuple(coords.shape)}",
            expected=f"(voxels, {ndim + 1}) for batch, {axes_of(ndim)}, or (voxels, {ndim}) for "
            f"{axes_of(ndim)}",
            remedy=f"SparseTensor(coords, features, ndim={columns - 1}), where the batch is the "
            "first column"
            if usual and 2 <= columns <= 5
            else "",
        )
    kind = torch.int32 if coords.dtype in _NARROW else torch.int64
    if coords.dtype is kind and coords.is_contiguous():
        return coords
    return coords.to(kind).contiguous()


def _copied(coords: Tensor, ndim: int) -> Tensor:
    """With a batch. A copy: maps hold for these coordinates, whatever becomes of the caller's
    buffer.
    """
    if coords.shape[1] == ndim:
        return torch.nn.functional.pad(coords, (1, 0))
    return coords.clone()


def _check_batch_first(coords: Tensor) -> None:
    """Raise where the last column looks like a batch, and the first does not: numbers from 0 on
    that never fall, beside numbers that do and reach higher.
    """
    first, last = coords[:, 0], coords[:, -1]
    falls = first[1:] < first[:-1]
    if not bool(falls.any()) or bool((last[1:] < last[:-1]).any()) or int(last[0]) != 0:
        return
    batches = int(last[-1]) + 1
    if int(first.max()) + 1 <= (_MANY_BATCHES if batches == 1 else batches):
        return
    row, ndim = int(falls.nonzero()[0]) + 1, coords.shape[1] - 1
    order = [ndim, *range(ndim)]
    raise FormatError(
        f"the batch seems to be the last column of coords: coords[{row}] is "
        f"{tuple(coords[row].tolist())}, of batch {int(first[row])} after batch "
        f"{int(first[row - 1])}, while the last column goes from 0 to {batches - 1}",
        expected=f"batch, {axes_of(ndim)}",
        remedy=f"coords[:, {order}]; where the batch does come first, SparseTensor(..., "
        f"ndim={ndim}) says so",
    )


def _box(coords: Tensor, shape: Sizes | None) -> Box:
    """A box that holds all; one look at the device."""
    ndim = coords.shape[1] - 1
    if coords.shape[0] == 0:
        return Box((0,) * (ndim + 1), (1, *(shape or (1,) * ndim)))
    least, most = torch.stack(torch.aminmax(coords, dim=0)).tolist()
    limits = [None, *shape] if shape else [None] * (ndim + 1)
    for axis, (low, high, limit) in enumerate(zip(least, most, limits)):
        if (limit is not None or axis == 0) and low < 0 or limit is not None and high >= limit:
            raise _first_outside(coords, axis, limit)
    low = (0,) * (ndim + 1) if shape else (0, *least[1:])
    size = (most[0] + 1, *(shape or [b - a + 1 for a, b in zip(least[1:], most[1:])]))
    check_box(low, size, coords)
    return Box(low, size)


def check_box(low: Sequence[int], size: tuple[int, ...], coords: Tensor | None = None) -> None:
    """Every place of a box has a key of 64 bits, and so have the places around it; of voxels the
    two that are farthest apart are named where a key has not.
    """
    for name, first, extent in zip(("batch", *AXES), low, size):
        if extent < FARTHEST and not -FARTHEST <= first <= FARTHEST - extent:
            raise IndexRangeError(
                f"{name} goes from {first} to {first + extent - 1}",
                expected="coordinates from -2**62 to 2**62 - 1",
            )
    if math.prod(size) < 2**63:
        return
    where = ""
    if coords is not None:
        widest = coords[:, max(range(len(size)), key=size.__getitem__)]
        rows = int(widest.argmin()), int(widest.argmax())
        named = [f"coords[{row}], {tuple(coords[row].tolist())}" for row in rows]
        where = f": from {named[0]} to {named[1]}"
    raise FormatError(
        f"the voxels lie in a box of {size}, too large for 64-bit keys{where}",
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
        return IndexRangeError(
            f"{where}: batch {place[axis]}{when}",
            expected=f"batches from 0, in the first column: batch, {axes_of(len(place) - 1)}",
        )
    name = AXES[axis - 1]
    return IndexRangeError(
        f"{where}, outside the spatial shape: {name} is {place[axis]}{when}",
        expected=f"{name} from 0 to {limit - 1}",
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
    shape: Sizes | None

    def __call__(self, offence: int, row: int, other: int) -> InsumError:
        coords = self.coords()
        place = None if coords is None else coords[row].tolist()
        if offence == hashing.TWICE:
            first, second = sorted((row, other))
            where = " are the same" if place is None else f" are both {tuple(place)}"
            return _twice(first, second, where + EARLIER)
        if place is None:
            where = "has a negative batch" + (
                ", or is outside the spatial shape" * bool(self.shape)
            )
            return IndexRangeError(
                f"coords[{row}] {where}{EARLIER}",
                expected="batches from 0, in the first column"
                + (f", and coordinates below {self.shape}" * bool(self.shape)),
            )
        limits = [None, *self.shape] if self.shape else [None]
        axis = next(a for a, n in enumerate(limits) if not 0 <= place[a] < (n or place[a] + 1))
        return _outside(row, place, axis, limits[axis], EARLIER)


# --- keys ---


def keys_of(coords: Tensor, low: Sequence[int] | Tensor, size: Sequence[int] | Tensor) -> Tensor:
    """The place of each coordinate (..., axes) in a box, row by row; meaningless outside."""
    key = coords[..., 0].long() - low[0]
    for axis in range(1, coords.shape[-1]):
        # the difference of two coordinates of 32 bits may need 33
        key = key * size[axis] + (coords[..., axis].long() - low[axis])
    return key


def _coords(keys: Tensor, box: Box) -> Tensor:
    columns, (low, size) = [], (box.low, box.size)
    for axis in reversed(range(1, len(size))):
        rest = keys.div(size[axis], rounding_mode="floor")
        columns.append(keys - rest * size[axis] + low[axis])
        keys = rest
    return torch.stack([keys + low[0], *reversed(columns)], -1)
