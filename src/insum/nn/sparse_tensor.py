"""Features at voxels: what sparse convolutions work on."""

from __future__ import annotations

import copy
import html
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum.accepted import (
    COMPUTABLE,
    DEVICE,
    DTYPE,
    ELEMENTS,
    FLAG,
    NARROW_FLOATS,
    SHAPE,
    SIZE,
    TENSOR,
    VALUES,
    Accepted,
    is_common,
    is_number,
    require,
    shown,
    takes,
)
from insum.errors import BindingError, DtypeError
from insum.nn.checks import one_device
from insum.nn.voxels import AXES, Sizes, Voxels, axes_of

if TYPE_CHECKING:
    from typing_extensions import Self

VOXEL_SET = Accepted("Voxels, or None", lambda v: isinstance(v, Voxels))
#: Elements of a grid that no device holds.
LARGEST_GRID = 2**36
MASK = Accepted(
    "a dense tensor of truth values", lambda v: TENSOR.fits(v) and v.dtype is torch.bool
)


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """Features at voxels in one to four dimensions: ``coords`` (N, 1 + dimensions) as batch, x, y,
    z, t, or (N, dimensions) for a single batch, and ``features`` (N, channels).

    Every voxel stands once; the order is free. ``spatial_shape`` bounds the coordinates to ``0 ..
    size-1``, as a dense grid does; without it they may be any integers from -2**62 to 2**62 - 1.
    There are as many dimensions as ``spatial_shape`` has sizes, else ``ndim``, else three. Layers
    keep the kernel maps that they build with the voxels, so that all layers of one resolution
    share them.

    Args:
        coords: Coordinates of the voxels, integers.
        features: One row for each voxel.
        spatial_shape: The size of the grid, if it has one.
        voxels: The set of voxels, where several tensors share one; made of ``coords`` by default.
        ndim: The number of dimensions.

    Examples:
        >>> coords = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 2], [1, 1, 1, 1]])
        >>> x = SparseTensor(coords, torch.ones(3, 8), spatial_shape=(4, 4, 4))
        >>> x
        SparseTensor(voxels=3, channels=8, float32, spatial_shape=(4, 4, 4), cpu)
        >>> x.to_dense().shape
        torch.Size([2, 8, 4, 4, 4])
        >>> SparseTensor(torch.tensor([[0, 5, 7]]), torch.ones(1, 8), ndim=2)
        SparseTensor(voxels=1, channels=8, float32, ndim=2, spatial_shape=None, cpu)
    """

    coords: Tensor
    features: Tensor
    spatial_shape: Sizes | None = None
    voxels: Voxels = field(default=None, repr=False)  # type: ignore[assignment]
    ndim: int = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        features, voxels = self.features, self.voxels
        if not is_common(features) or features.dtype not in COMPUTABLE:
            require("features", features, VALUES)
        if type(self.coords) is not Tensor:
            require("coords", self.coords, TENSOR)
        if type(voxels) is not Voxels:
            if voxels is not None:
                require("voxels", voxels, VOXEL_SET)
            if self.coords.device != features.device:
                one_device(coords=self.coords, features=features)  # which says what is wrong
            voxels = voxels or Voxels.of(self.coords, self.spatial_shape, self.ndim)
            object.__setattr__(self, "voxels", voxels)
        count, columns = voxels.coords.shape
        if features.dim() != 2 or features.shape[0] != count:
            raise _not_rows(features, count)
        self.__dict__.update(
            coords=voxels.coords, spatial_shape=voxels.spatial_shape, ndim=columns - 1
        )

    # --- grids ---

    @classmethod
    @takes(grid=ELEMENTS)
    def from_dense(cls, grid: Tensor) -> Self:
        """The voxels of a grid (batch, channels, x, ...) of one to four dimensions that hold
        anything but zero.
        """
        if not 3 <= grid.dim() <= 2 + len(AXES):
            raise BindingError(
                f"the grid has shape {tuple(grid.shape)}",
                expected="(batch, channels, x, y, z), or one to four sizes behind the channels",
            )
        last = grid.movedim(1, -1)
        found = (last.detach() != 0).any(-1).nonzero()
        made = cls(found, last[tuple(found.unbind(1))], spatial_shape=tuple(grid.shape[2:]))
        made.voxels.__dict__["batch_size"] = max(1, grid.shape[0])
        return made

    @takes(batch_size=SIZE.optional, shape=SHAPE.optional)
    def to_dense(
        self, batch_size: int | None = None, *, shape: Sequence[int] | None = None
    ) -> Tensor:
        """The grid (batch, channels, x, ...), zero where there is no voxel.

        Args:
            batch_size: Batches of the grid; those that there are, where it is not given.
            shape: The size of the grid, whose places are coordinates. Where neither it nor
                ``spatial_shape`` is known, the grid is the box that holds all voxels, and
                begins at the lowest coordinate of each axis.

        Returns:
            The grid, which takes part in autograd.

        Raises:
            BindingError: A voxel is outside of the grid, or the grid is too large.

        >>> x = SparseTensor(torch.tensor([[-1, 5], [2, 5]]), torch.ones(2, 1), ndim=2)
        >>> x.to_dense()[0, 0]
        tensor([[1.],
                [0.],
                [0.],
                [1.]])
        """
        if self.voxels.is_hashed:
            self.voxels.check()  # torch's own kernels would end the process' use of the device
        sizes = self.spatial_shape if shape is None else tuple(shape)
        coords, low = self.coords.long(), [0] * (self.ndim + 1)
        if sizes is None:
            low, sizes = _bounds(coords)
        batches = batch_size or self.voxels.batch_size
        if batches * math.prod(sizes) * self.features.shape[1] >= LARGEST_GRID:
            raise BindingError(
                f"a grid of {(batches, self.features.shape[1], *sizes)} is too large",
                expected="a box that memory can hold",
                remedy="keep part of it, or coarser voxels",
            )
        _check_inside(coords, low, (batches, *sizes))
        place = coords - torch.tensor(low, device=coords.device) if any(low) else coords
        grid = self.features.new_zeros(batches, *sizes, self.features.shape[1])
        return grid.index_put(tuple(place.unbind(1)), self.features).movedim(-1, 1)

    # --- other features, other places ---

    def with_features(self, features: Tensor) -> Self:
        """The same voxels with other features.

        >>> x = SparseTensor(torch.tensor([[0, 0, 0]]), torch.tensor([[-1.0, 2.0]]))
        >>> x.with_features(x.features.relu()).features
        tensor([[0., 2.]])
        """
        if type(self) is not SparseTensor or torch.compiler.is_compiling():
            return type(self)(self.coords, features, self.spatial_shape, self.voxels)
        if not is_common(features) or features.dtype not in COMPUTABLE:
            require("features", features, VALUES)
        count = self.voxels.coords.shape[0]
        if features.dim() != 2 or features.shape[0] != count:
            raise _not_rows(features, count)
        made = object.__new__(SparseTensor)  # as `at_voxels`
        made.__dict__.update(self.__dict__, features=features)
        return made  # type: ignore[return-value]

    @takes(device=(DEVICE | DTYPE).optional, dtype=DTYPE.optional, non_blocking=FLAG)
    def to(
        self,
        device: str | torch.device | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """On another device, or with features of another dtype, as `torch.Tensor.to`.

        >>> x = SparseTensor(torch.tensor([[0, 0, 0]]), torch.ones(1, 2))
        >>> x.to(torch.float16)
        SparseTensor(voxels=1, channels=2, float16, spatial_shape=None, cpu)
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        features = self.features.to(device, dtype, non_blocking=non_blocking)
        voxels = self.voxels.moved(features.device, non_blocking)
        return type(self)(voxels.coords, features, voxels.spatial_shape, voxels)

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self) -> Self:
        return self.to("cuda")

    def pin_memory(self) -> Self:
        """With coordinates and features in pinned memory, as a DataLoader asks for it."""
        voxels = Voxels(self.coords.pin_memory(), self.spatial_shape).in_batches(self.voxels)
        return type(self)(voxels.coords, self.features.pin_memory(), None, voxels)

    def detach(self) -> Self:
        return self.with_features(self.features.detach())

    @property
    def device(self) -> torch.device:
        return self.features.device

    @property
    def dtype(self) -> torch.dtype:
        return self.features.dtype

    @property
    def batch_size(self) -> int:
        """How many batches there are; waits for the device where that is not known."""
        return self.voxels.batch_size

    @takes(mask=MASK)
    def keep(self, mask: Tensor) -> Self:
        """The voxels where a mask is true, as generative networks prune what they have grown.

        >>> x = SparseTensor(torch.tensor([[0, 0, 0], [0, 0, 1]]), torch.ones(2, 2))
        >>> x.keep(torch.tensor([True, False])).coords
        tensor([[0, 0, 0, 0]])
        """
        if mask.shape != (self.voxels.count,):
            raise BindingError(
                f"the mask has shape {tuple(mask.shape)}, but there are {self.voxels.count} voxels",
                expected=f"({self.voxels.count},)",
            )
        one_device(features=self.features, mask=mask)
        rows = mask.nonzero()[:, 0]
        voxels = Voxels(self.coords[rows], self.spatial_shape).in_batches(self.voxels)
        return type(self)(voxels.coords, self.features[rows], None, voxels)

    def unbatch(self) -> list[Self]:
        """One tensor for each batch, each of batch 0.

        >>> x = SparseTensor(torch.tensor([[1, 0, 0], [0, 3, 3]]), torch.ones(2, 2), ndim=2)
        >>> [one.coords.tolist() for one in x.unbatch()]
        [[[0, 3, 3]], [[0, 0, 0]]]
        """
        order = self.voxels.batches.argsort(stable=True)
        counts = torch.bincount(self.voxels.batches, minlength=self.batch_size).tolist()
        made = []
        for rows in torch.split(order, counts):
            coords = self.coords[rows]
            coords[:, 0] = 0
            voxels = Voxels(coords, self.spatial_shape)
            voxels.__dict__["batch_size"] = 1
            made.append(type(self)(coords, self.features[rows], None, voxels))
        return made

    # --- arithmetic ---

    def __add__(self, other: Any) -> Self:
        return self._combined(other, operator.add)

    def __sub__(self, other: Any) -> Self:
        return self._combined(other, operator.sub)

    def __mul__(self, other: Any) -> Self:
        return self._combined(other, operator.mul)

    def __truediv__(self, other: Any) -> Self:
        return self._combined(other, operator.truediv)

    def __rsub__(self, other: Any) -> Self:
        return self._combined(other, lambda own, given: given - own)

    def __neg__(self) -> Self:
        return self * -1

    __radd__, __rmul__ = __add__, __mul__

    def _combined(self, other: Any, how: Callable[[Any, Any], Tensor]) -> Self:
        """With a number, a tensor that broadcasts to the features, or features there."""
        if isinstance(other, SparseTensor):
            same_voxels(self, other)
            one_device(features=self.features, other=other.features)
            wanted: Any = other.features
        elif is_number(other) or TENSOR.fits(other):
            wanted = other
        else:
            raise DtypeError(
                f"the other operand is {shown(other)}",
                expected="a SparseTensor at the same voxels, a number, or a tensor",
            )
        try:
            return self.with_features(how(self.features, wanted))
        except (RuntimeError, OverflowError, TypeError, AssertionError) as wrong:
            if NARROW_FLOATS & {self.dtype, getattr(wanted, "dtype", None)}:
                raise DtypeError(
                    "features of 8-bit floats, in which nothing is computed, are combined",
                    expected="features of 16 bits or more",
                    remedy="x.to(torch.bfloat16)",
                ) from wrong
            # the last where only one is a fake tensor
            raise BindingError(
                f"features of shape {tuple(self.features.shape)} and {shown(wanted)} cannot be "
                "combined",
                expected="as many channels, or a tensor that broadcasts to the features",
            ) from wrong

    # --- copies, and what is shown ---

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Of features that were computed, too, which torch copies only by `clone`."""
        voxels = copy.deepcopy(self.voxels, memo)
        leaf = self.features.is_leaf
        features = copy.deepcopy(self.features, memo) if leaf else self.features.clone()
        return type(self)(voxels.coords, features, None, voxels)

    def _facts(self) -> dict[str, object]:
        more = {} if self.ndim == 3 else {"ndim": self.ndim}
        return {
            "voxels": self.voxels.count,
            "channels": self.features.shape[1],
            "dtype": str(self.features.dtype).removeprefix("torch."),
            **more,
            "spatial_shape": self.spatial_shape,
            "device": self.features.device,
        }

    def __repr__(self) -> str:
        bare = ("dtype", "device")
        parts = [f"{v}" if k in bare else f"{k}={v}" for k, v in self._facts().items()]
        return f"SparseTensor({', '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = {**self._facts(), "bytes": f"{self.coords.nbytes + self.features.nbytes:,}"}
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(k)}</th>"
            f"<td>{html.escape(str(v))}</td></tr>"
            for k, v in rows.items()
        )
        return f"<table><caption><b>SparseTensor</b></caption>{cells}</table>"


def at_voxels(voxels: Voxels, features: Tensor) -> SparseTensor:
    """What a layer made at voxels, which nobody has to look at: quicker than the class."""
    coords, shape = voxels.coords, voxels.spatial_shape
    if torch.compiler.is_compiling():
        return SparseTensor(coords, features, shape, voxels)
    made = object.__new__(SparseTensor)
    made.__dict__.update(
        coords=coords,
        features=features,
        spatial_shape=shape,
        voxels=voxels,
        ndim=coords.shape[1] - 1,
    )
    return made


def _not_rows(features: Tensor, count: int) -> BindingError:
    return BindingError(
        f"features have shape {tuple(features.shape)}, but there are {count} voxels",
        expected=f"({count}, channels)",
    )


VOXELS = Accepted("a SparseTensor", lambda v: isinstance(v, SparseTensor))


# --- checks ---


def same_voxels(one: SparseTensor, other: SparseTensor) -> None:
    if not one.voxels.is_same(other.voxels):
        raise BindingError(
            f"{one} and {other} are not at the same voxels",
            expected="features at the same voxels",
            remedy="a convolution with like= ends at the voxels of another tensor",
        )


def _bounds(coords: Tensor) -> tuple[list[int], Sizes]:
    """The lowest corner, with batch 0, and the size of the box that holds voxels."""
    if coords.shape[0] == 0:
        return [0] * coords.shape[1], (1,) * (coords.shape[1] - 1)
    low, high = torch.stack(torch.aminmax(coords, dim=0)).tolist()
    return [0, *low[1:]], tuple(b - a + 1 for a, b in zip(low[1:], high[1:]))


def _check_inside(coords: Tensor, low: Sequence[int], sizes: Sizes) -> None:
    if coords.shape[1] != len(sizes):
        raise BindingError(
            f"shape is {sizes[1:]}, but there are {coords.shape[1] - 1} dimensions",
            expected=f"{coords.shape[1] - 1} sizes: {axes_of(coords.shape[1] - 1)}",
        )
    ends = [torch.tensor(t, device=coords.device) for t in (low, sizes)]
    outside = ((coords < ends[0]) | (coords - ends[0] >= ends[1])).any(1)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise BindingError(
            f"coords[{row}] is {tuple(coords[row].tolist())}, outside of the grid",
            expected=f"batch, {axes_of(len(sizes) - 1)} below {sizes}",
        )
