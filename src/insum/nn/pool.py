"""Pooling over occupied voxels."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

import insum
from insum.accepted import FLAG, SIZE, takes
from insum.errors import BindingError, UnsupportedError
from insum.formats import NeighborTable, SparseFormat
from insum.nn.checks import layer_takes
from insum.nn.functional import _tensor
from insum.nn.kernel_map import Geometry, kernel_map
from insum.nn.modules import SizePerAxis, SparseModule, per_axis, same_dimensions
from insum.nn.sparse_tensor import VOXELS, SparseTensor


class _Pool(SparseModule):
    """What both kinds of pooling share: a kernel that leads to coarser voxels."""

    ndim: ClassVar[int]

    def __init__(
        self,
        kernel_size: SizePerAxis,
        stride: SizePerAxis | None = None,
        padding: SizePerAxis = 0,
        dilation: SizePerAxis = 1,
    ) -> None:
        super().__init__()
        every = {"kernel_size": (kernel_size, 1),
                 "stride": (kernel_size if stride is None else stride, 1),
                 "padding": (padding, 0), "dilation": (dilation, 1)}  # fmt: skip
        sizes = [per_axis(name, size, least, self.ndim) for name, (size, least) in every.items()]
        self.geometry = Geometry(*sizes)
        if any(2 * p > k for p, k in zip(self.geometry.padding, self.geometry.kernel)):
            raise BindingError(
                f"padding is {padding!r} beside a kernel of {kernel_size!r}",
                expected="at most half of the kernel",
            )

    def _mapped(
        self, x: SparseTensor, like: SparseTensor | None
    ) -> tuple[SparseTensor, SparseFormat]:
        """The outputs without features, and the map to them."""
        for given in (x, like):
            if given is not None and given.ndim != self.ndim:
                same_dimensions(given, self.ndim, type(self).__name__)
        target = None if like is None else like.voxels
        voxels, found = kernel_map(x.voxels, self.geometry, target)
        return SparseTensor(
            voxels.coords, x.features.new_empty(voxels.count, 0), None, voxels
        ), found

    def extra_repr(self) -> str:
        g = self.geometry
        return f"kernel_size={g.kernel}, stride={g.stride}, padding={g.padding}, " + (
            f"dilation={g.dilation}"
        )


class SparseMaxPool(_Pool):
    """The largest value of the occupied voxels under a kernel; `SparseMaxPool3d` tells of it."""

    @layer_takes(x=VOXELS, like=VOXELS.optional)
    def forward(self, x: SparseTensor, like: SparseTensor | None = None) -> SparseTensor:
        out, found = self._mapped(x, like)
        if isinstance(found, NeighborTable):
            statement = "Out[x,c] max= In[Nb[z,x],c]"
            top = insum.insum(statement, padded=("Nb",), Nb=found.table, In=x.features)
        else:
            top = _tensor(insum.einsum("Out[x,c] max= Map[z,x,y] * In[y,c]", Map=found, In=x.features))
        # voxels that were asked for may have nothing under the kernel
        return out.with_features(top if like is None else torch.where(top.isneginf(), 0, top))


class SparseAvgPool(_Pool):
    """The mean of the voxels under a kernel; `SparseAvgPool3d` tells of it."""

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
        super().__init__(kernel_size, stride, padding, dilation)
        self.count_empty = count_empty

    @layer_takes(x=VOXELS, like=VOXELS.optional)
    def forward(self, x: SparseTensor, like: SparseTensor | None = None) -> SparseTensor:
        out, found = self._mapped(x, like)
        if self.count_empty:
            return out.with_features(_summed(found, x.features) / self.geometry.volume)
        return out.with_features(_summed(found, x.features) * _shares(found, x.features))

    def extra_repr(self) -> str:
        return super().extra_repr() + (", count_empty=True" if self.count_empty else "")


class SparseMaxPool1d(SparseMaxPool):
    """`SparseMaxPool3d` along one axis."""

    ndim = 1


class SparseMaxPool2d(SparseMaxPool):
    """`SparseMaxPool3d` in two dimensions."""

    ndim = 2


class SparseMaxPool3d(SparseMaxPool):
    """The largest value of the occupied voxels under a kernel, ``insum.insum("Out[x,c] max=
    In[Nb[z,x],c]", ...)``, wherever there is one, or at the voxels of ``like``, with 0 where there
    is none.

    Sizes mean what they mean in `torch.nn.MaxPool3d`: the stride is the kernel's size where it is
    not given. Maps are shared with convolutions of the same kernel.

    >>> x = SparseTensor(torch.tensor([[0, 0, 0], [0, 1, 1]]), torch.tensor([[1.0], [-5.0]]))
    >>> SparseMaxPool3d(2)(x).features
    tensor([[1.]])
    """

    ndim = 3


class SparseMaxPool4d(SparseMaxPool):
    """`SparseMaxPool3d` in space and time."""

    ndim = 4


class SparseAvgPool1d(SparseAvgPool):
    """`SparseAvgPool3d` along one axis."""

    ndim = 1


class SparseAvgPool2d(SparseAvgPool):
    """`SparseAvgPool3d` in two dimensions."""

    ndim = 2


class SparseAvgPool3d(SparseAvgPool):
    """The mean over the occupied voxels under a kernel; with ``count_empty=True`` over all its
    places, as `torch.nn.AvgPool3d` has it for a grid with zeros.

    >>> x = SparseTensor(torch.tensor([[0, 0, 0], [0, 1, 1]]), torch.tensor([[1.0], [-5.0]]))
    >>> SparseAvgPool3d(2)(x).features
    tensor([[-2.]])
    >>> SparseAvgPool3d(2, count_empty=True)(x).features
    tensor([[-0.5000]])
    """

    ndim = 3


class SparseAvgPool4d(SparseAvgPool):
    """`SparseAvgPool3d` in space and time."""

    ndim = 4


class GlobalPool(SparseModule):
    """All voxels of a batch as one row: their sum, mean or largest value, (batches, channels).

    Args:
        reduce: ``"sum"``, ``"mean"`` or ``"max"``; a batch without voxels gets 0.

    >>> x = SparseTensor(torch.tensor([[0, 1], [0, 3], [1, 1]]), torch.tensor([[1.0], [2.0], [5.0]]), ndim=1)
    >>> GlobalPool("mean")(x)
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


def check_reduction(name: object, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UnsupportedError(
            f"there is no reduction {name!r}", expected=", ".join(f'"{one}"' for one in known)
        )


def scattered(values: Tensor, rows: Tensor, count: int, reduce: str) -> Tensor:
    """The values of each of so many rows, reduced; 0 where there are none."""
    shape = (count, values.shape[1])
    if reduce in ("sum", "mean"):
        total = insum.insum("Out[r[p],c] = In[p,c]", r=rows, In=values, out_shape=shape)
        if reduce == "sum":
            return total
        many = torch.zeros(count, device=rows.device).index_add_(
            0, rows.long(), torch.ones(rows.shape, device=rows.device)
        )
        return total * many.clamp(min=1).reciprocal().to(values.dtype)[:, None]
    top = insum.insum(f"Out[r[p],c] {reduce}= In[p,c]", r=rows, In=values, out_shape=shape)
    return torch.where(top.isinf(), 0, top)


def _summed(found: SparseFormat, features: Tensor) -> Tensor:
    if isinstance(found, NeighborTable):
        return insum.insum(
            "Out[x,c] = In[Nb[z,x],c]", padded=("Nb",), Nb=found.table, In=features
        )
    return _tensor(insum.einsum("Out[x,c] = Map[z,x,y] * In[y,c]", Map=found, In=features))


def _shares(found: SparseFormat, features: Tensor) -> Tensor:
    """One over how many inputs an output has."""
    if isinstance(found, NeighborTable):
        many = (found.table >= 0).sum(0)
    else:
        many = _tensor(insum.einsum("Out[x] = Map[z,x,y]", Map=found))
    return many.clamp(min=1).to(features.dtype).reciprocal()[:, None]
