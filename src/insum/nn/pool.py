"""Pooling over occupied voxels."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, SIZE, shown, takes
from insum.api import insum
from insum.compat.contexts import untracked
from insum.errors import BindingError, UnsupportedError
from insum.formats import NeighborTable, SparseFormat
from insum.formats.einsum import einsum
from insum.lang.types import widened
from insum.memory import remembered
from insum.nn.checks import layer_takes
from insum.nn.functional import _tensor
from insum.nn.kernel_map import Geometry, kernel_map
from insum.nn.modules import SizePerAxis, SparseModule, geometry_of, same_dimensions
from insum.nn.shares import counted_in, shares_of
from insum.nn.sparse_tensor import VOXELS, SparseTensor


@SparseModule.register
class SparseMaxPool(nn.Module):
    """The largest value of the occupied voxels under a kernel; `SparseMaxPool3d` tells of it."""

    ndim: ClassVar[int]

    def __init__(
        self,
        kernel_size: SizePerAxis,
        stride: SizePerAxis | None = None,
        padding: SizePerAxis = 0,
        dilation: SizePerAxis = 1,
    ) -> None:
        super().__init__()
        self.geometry = _pooling(self.ndim, kernel_size, stride, padding, dilation)

    @layer_takes(x=VOXELS, like=VOXELS.optional)
    def forward(self, x: SparseTensor, like: SparseTensor | None = None) -> SparseTensor:
        same_dimensions(self.ndim, type(self).__name__, x, like)
        out, found = _mapped(self.geometry, x, like)
        if isinstance(found, NeighborTable):
            statement = "Out[x,c] max= In[Nb[z,x],c]"
            top = insum(statement, padded=("Nb",), Nb=found.table, In=x.features)
        else:
            top = _tensor(einsum("Out[x,c] max= Map[z,x,y] * In[y,c]", Map=found, In=x.features))
        if like is not None and not (like.voxels is x.voxels and self.geometry.meets_itself):
            top = torch.where(_occupied(found), top, 0)  # there may be nothing under the kernel
        return out.with_features(top)

    def extra_repr(self) -> str:
        return _sizes(self.geometry)


@SparseModule.register
class SparseAvgPool(nn.Module):
    """The mean of the voxels under a kernel; `SparseAvgPool3d` tells of it."""

    ndim: ClassVar[int]

    @takes(count_empty=FLAG)
    def __init__(
        self,
        kernel_size: SizePerAxis,
        stride: SizePerAxis | None = None,
        padding: SizePerAxis = 0,
        dilation: SizePerAxis = 1,
        *,
        count_empty: bool = False,
    ) -> None:
        super().__init__()
        self.geometry = _pooling(self.ndim, kernel_size, stride, padding, dilation)
        self.count_empty = count_empty

    @layer_takes(x=VOXELS, like=VOXELS.optional)
    def forward(self, x: SparseTensor, like: SparseTensor | None = None) -> SparseTensor:
        same_dimensions(self.ndim, type(self).__name__, x, like)
        out, found = _mapped(self.geometry, x, like)
        if self.count_empty or not x.features.is_floating_point():
            many = (
                self.geometry.volume if self.count_empty else _counts(found).clamp(min=1)[:, None]
            )
            return out.with_features(_summed(found, x.features) / many)
        return out.with_features(_summed(found, x.features, _shares(found, x.dtype)))

    def extra_repr(self) -> str:
        return _sizes(self.geometry) + (", count_empty=True" if self.count_empty else "")


class SparseMaxPool1d(SparseMaxPool):
    """`SparseMaxPool3d` along one axis.

    Args:
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next; the size of the kernel where it is not given.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 0], [0, 1]]), torch.tensor([[1.0], [2.0]]), ndim=1)
        >>> SparseMaxPool1d(2)(x).features
        tensor([[2.]])
    """

    ndim = 1


class SparseMaxPool2d(SparseMaxPool):
    """`SparseMaxPool3d` in two dimensions.

    Args:
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next; the size of the kernel where it is not given.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.

    Examples:
        >>> coords, features = torch.tensor([[0, 0, 0], [0, 1, 1]]), torch.tensor([[1.0], [2.0]])
        >>> x = SparseTensor(coords, features, ndim=2)
        >>> SparseMaxPool2d(2)(x).features
        tensor([[2.]])
    """

    ndim = 2


class SparseMaxPool3d(SparseMaxPool):
    """The largest value of the occupied voxels under a kernel, ``insum.insum("Out[x,c] max=
    In[Nb[z,x],c]", ...)``, wherever there is one, or at the voxels of ``like``, with 0 where there
    is none.

    Sizes mean what they mean in `torch.nn.MaxPool3d`: the stride is the kernel's size where it is
    not given. Maps are shared with convolutions of the same kernel.

    Args:
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next; the size of the kernel where it is not given.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 0, 0], [0, 1, 1]]), torch.tensor([[1.0], [-5.0]]))
        >>> SparseMaxPool3d(2)(x).features
        tensor([[1.]])
    """

    ndim = 3


class SparseMaxPool4d(SparseMaxPool):
    """`SparseMaxPool3d` in space and time.

    Args:
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next; the size of the kernel where it is not given.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.

    Examples:
        >>> x = SparseTensor(torch.zeros(1, 5, dtype=torch.int32), torch.ones(1, 3), ndim=4)
        >>> SparseMaxPool4d(2)(x).features
        tensor([[1., 1., 1.]])
    """

    ndim = 4


class SparseAvgPool1d(SparseAvgPool):
    """`SparseAvgPool3d` along one axis.

    Args:
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next; the size of the kernel where it is not given.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.
        count_empty: Whether places without a voxel count, as zeros.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 0], [0, 1]]), torch.ones(2, 3), ndim=1)
        >>> SparseAvgPool1d(2)(x).features
        tensor([[1., 1., 1.]])
    """

    ndim = 1


class SparseAvgPool2d(SparseAvgPool):
    """`SparseAvgPool3d` in two dimensions.

    Args:
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next; the size of the kernel where it is not given.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.
        count_empty: Whether places without a voxel count, as zeros.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 0, 0], [0, 1, 1]]), torch.ones(2, 3), ndim=2)
        >>> SparseAvgPool2d(2, count_empty=True)(x).features
        tensor([[0.5000, 0.5000, 0.5000]])
    """

    ndim = 2


class SparseAvgPool3d(SparseAvgPool):
    """The mean over the occupied voxels under a kernel; with ``count_empty=True`` over all its
    places, as `torch.nn.AvgPool3d` has it for a grid with zeros.

    Args:
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next; the size of the kernel where it is not given.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.
        count_empty: Whether places without a voxel count, as zeros.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 0, 0], [0, 1, 1]]), torch.tensor([[1.0], [-5.0]]))
        >>> SparseAvgPool3d(2)(x).features
        tensor([[-2.]])
        >>> SparseAvgPool3d(2, count_empty=True)(x).features
        tensor([[-0.5000]])
    """

    ndim = 3


class SparseAvgPool4d(SparseAvgPool):
    """`SparseAvgPool3d` in space and time.

    Args:
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next; the size of the kernel where it is not given.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.
        count_empty: Whether places without a voxel count, as zeros.

    Examples:
        >>> x = SparseTensor(torch.zeros(1, 5, dtype=torch.int32), torch.ones(1, 3), ndim=4)
        >>> SparseAvgPool4d(2)(x).features
        tensor([[1., 1., 1.]])
    """

    ndim = 4


class GlobalPool(SparseModule):
    """All voxels of a batch as one row: their sum, mean or largest value, (batches, channels).

    Args:
        reduce: ``"sum"``, ``"mean"`` or ``"max"``; a batch without voxels gets 0.

    Examples:
        >>> coords = torch.tensor([[0, 1], [0, 3], [1, 1]])
        >>> GlobalPool("mean")(SparseTensor(coords, torch.tensor([[1.0], [2.0], [5.0]]), ndim=1))
        tensor([[1.5000],
                [5.0000]])
    """

    def __init__(self, reduce: str = "mean") -> None:
        super().__init__()
        check_reduction(reduce, ("sum", "mean", "max"))
        self.reduce = reduce

    @layer_takes(x=VOXELS, batch_size=SIZE.optional)
    def forward(self, x: SparseTensor, batch_size: int | None = None) -> Tensor:
        """``batch_size`` saves a look at the coordinates, which waits for the device."""
        count = x.batch_size if batch_size is None else batch_size
        return scattered(x.features, x.voxels.batches, count, self.reduce)

    def extra_repr(self) -> str:
        return repr(self.reduce)


# --- what they are made of ---


def _pooling(
    ndim: int,
    kernel_size: SizePerAxis,
    stride: SizePerAxis | None,
    padding: SizePerAxis,
    dilation: SizePerAxis,
) -> Geometry:
    """A kernel that leads to coarser voxels."""
    step = kernel_size if stride is None else stride
    made = geometry_of(ndim, kernel_size, step, padding, dilation)
    if any(2 * p > k for p, k in zip(made.padding, made.kernel)):
        raise BindingError(
            f"padding is {padding!r} beside a kernel of {kernel_size!r}",
            expected="at most half of the kernel",
        )
    return made


def _mapped(
    geometry: Geometry, x: SparseTensor, like: SparseTensor | None
) -> tuple[SparseTensor, SparseFormat]:
    """The outputs without features, and the map to them."""
    voxels, found = kernel_map(x.voxels, geometry, None if like is None else like.voxels)
    return SparseTensor(voxels.coords, x.features.new_empty(voxels.count, 0), None, voxels), found


def _sizes(g: Geometry) -> str:
    return f"kernel_size={g.kernel}, stride={g.stride}, padding={g.padding}, dilation={g.dilation}"


def check_reduction(name: object, known: tuple[str, ...]) -> None:
    if not isinstance(name, str) or name not in known:
        raise UnsupportedError(
            f"there is no reduction {shown(name)}", expected=", ".join(f'"{one}"' for one in known)
        )


def scattered(values: Tensor, rows: Tensor, count: int, reduce: str) -> Tensor:
    """The values of each of so many rows, reduced; 0 where there are none."""
    given: dict[str, Any] = {"r": rows, "In": values, "out_shape": (count, values.shape[1])}
    if reduce == "sum":
        return insum("Out[r[p],c] = In[p,c]", **given)
    # by a statement, which looks at the rows: torch's own kernels would not say what is wrong
    ones = torch.ones(rows.shape, dtype=counted_in(values.dtype), device=rows.device)
    many = insum("Out[r[p]] = One[p]", r=rows, One=ones, out_shape=(count,))
    if reduce == "mean":
        # half precision in float32: the sum of many numbers may be too large for one of them
        shares = shares_of(many, many.dtype)
        mean = insum("Out[r[p],c] = S[r[p]] * In[p,c]", S=shares, **given)
        return mean.to(widened(values.dtype)) if values.is_floating_point() else mean
    top = insum(f"Out[r[p],c] {reduce}= In[p,c]", **given)
    return torch.where(many[:, None] > 0, top, 0)


def _summed(found: SparseFormat, features: Tensor, share: Tensor | None = None) -> Tensor:
    given: dict[str, Any] = {"In": features}
    scale = ""
    if share is not None:
        given["R"], scale = share, "R[x] * "
    if isinstance(found, NeighborTable):
        statement = f"Out[x,c] = {scale}In[Nb[z,x],c]"
        return insum(statement, padded=("Nb",), Nb=found.table, **given)
    return _tensor(einsum(f"Out[x,c] = {scale}Map[z,x,y] * In[y,c]", Map=found, **given))


def _counts(found: SparseFormat) -> Tensor:
    """How many inputs every output has."""
    if isinstance(found, NeighborTable):
        return (found.table >= 0).sum(0)
    return _tensor(einsum("Out[x] = Map[z,x,y]", Map=found))


def _occupied(found: SparseFormat) -> Tensor:
    """Which outputs have an input, (outputs, 1); kept with a table."""

    def make() -> Tensor:
        with untracked():
            return _counts(found)[:, None] > 0

    return remembered(found.table, "occupied", make) if isinstance(found, NeighborTable) else make()


def _shares(found: SparseFormat, dtype: torch.dtype) -> Tensor:
    """One over how many inputs every output has; kept with a table."""

    def make() -> Tensor:
        with untracked():
            return shares_of(_counts(found), dtype)

    if not isinstance(found, NeighborTable):
        return make()
    return remembered(found.table, ("shares", dtype), make)
