"""`SparseConv3d`: ``Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]`` over occupied voxels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import insum
from insum.accepted import COUNT, FLAG, TENSOR, Accepted, is_size, takes
from insum.errors import BindingError, UnsupportedError
from insum.formats import NeighborTable, SparseFormat
from insum.nn.checks import last_size, layer_takes, one_device
from insum.nn.functional import _tensor
from insum.nn.kernel_map import Geometry, kernel_map
from insum.nn.voxels import SparseTensor, Triple

if TYPE_CHECKING:
    from typing_extensions import Self

SizePerAxis = int | Sequence[int]


VOXELS = Accepted("a SparseTensor", lambda v: isinstance(v, SparseTensor))
DENSE_LAYER = Accepted(
    "an nn.Conv3d or an nn.ConvTranspose3d",
    lambda v: isinstance(v, nn.Conv3d | nn.ConvTranspose3d) and TENSOR.fits(v.weight),
)


class SparseConv3d(nn.Module):
    """A convolution over occupied voxels: ``insum.einsum("Out[x,m] = Map[z,x,y] * In[y,c] *
    W[z,c,m]", ...)``.

    ``Map`` tells which input voxel ``y`` reaches output voxel ``x`` through kernel offset ``z``.
    Sizes, stride, padding and dilation mean what they mean in `torch.nn.Conv3d`, and outputs equal
    those of the dense convolution at the voxels where there are outputs:

    - by default wherever any input reaches (with stride 2, kernel 2: the occupied voxels of the
      next coarser grid);
    - ``submanifold=True``: at the input voxels; the kernel is centred and the padding follows from
      it;
    - ``transposed=True``: as `torch.nn.ConvTranspose3d`, wherever any input reaches, or, with
      ``layer(x, like=y)``, at the voxels of ``y``: the inverse of a strided convolution when ``y``
      was its input.

    ``weight`` is (kernel volume, in_channels, out_channels), offsets in the order of a dense
    kernel. Maps are built on the device, once for each kernel and set of voxels, and shared by all
    layers that use them.

    >>> coords = torch.cartesian_prod(*[torch.arange(4)] * 3)[::3]
    >>> x = SparseTensor(coords, torch.randn(len(coords), 8))
    >>> y = SparseConv3d(8, 16, 3, submanifold=True)(x)
    >>> y
    SparseTensor(voxels=22, channels=16, float32, spatial_shape=None, cpu)
    >>> z = SparseConv3d(16, 32, 2, stride=2)(y)
    >>> z
    SparseTensor(voxels=8, channels=32, float32, spatial_shape=None, cpu)
    >>> SparseConv3d(32, 8, 2, stride=2, transposed=True)(z, like=y).voxels is x.voxels
    True
    """

    @takes(
        in_channels=COUNT,
        out_channels=COUNT,
        bias=FLAG,
        submanifold=FLAG,
        transposed=FLAG,
    )
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: SizePerAxis,
        stride: SizePerAxis = 1,
        padding: SizePerAxis = 0,
        dilation: SizePerAxis = 1,
        bias: bool = True,
        *,
        submanifold: bool = False,
        transposed: bool = False,
        output_padding: SizePerAxis = 0,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.geometry = _geometry(
            kernel_size, stride, padding, dilation, output_padding, submanifold, transposed
        )
        self.weight = nn.Parameter(torch.empty(self.geometry.volume, in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Conv3d`: uniform, bounded by the square root of the number of inputs of one
        output.
        """
        bound = 1 / math.sqrt(max(1, self.geometry.volume * self.in_channels))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    @takes(layer=DENSE_LAYER, submanifold=FLAG)
    def from_dense(
        cls, layer: nn.Conv3d | nn.ConvTranspose3d, *, submanifold: bool = False
    ) -> Self:
        """The sparse layer with the weights of a dense one.

        >>> SparseConv3d.from_dense(nn.Conv3d(4, 8, 3, stride=2, padding=1))
        SparseConv3d(4, 8, kernel_size=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1))
        """
        if layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise UnsupportedError(
                f"{layer}", expected="one group, and zeros as padding given in numbers"
            )
        transposed = isinstance(layer, nn.ConvTranspose3d)
        made = cls(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            0 if submanifold else layer.padding,
            layer.dilation,
            layer.bias is not None,
            submanifold=submanifold,
            transposed=transposed,
            output_padding=layer.output_padding,
        )
        axes = (2, 3, 4, 0, 1) if transposed else (2, 3, 4, 1, 0)
        made.weight = nn.Parameter(
            layer.weight.detach().permute(axes).reshape(made.weight.shape).clone()
        )
        made.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        return made

    @layer_takes(x=VOXELS, like=VOXELS.optional)
    def forward(self, x: SparseTensor, like: SparseTensor | None = None) -> SparseTensor:
        last_size("x.features", x.features, self.in_channels, "in_channels")
        one_device(
            weight=self.weight, features=x.features, like=None if like is None else like.features
        )
        if like is not None and self.geometry.submanifold:
            raise UnsupportedError(
                "like= with a submanifold convolution",
                expected="nothing: its outputs are at its inputs",
            )
        voxels, found = kernel_map(x.voxels, self.geometry, None if like is None else like.voxels)
        out = _convolved(found, x.features, self.weight)
        return SparseTensor(
            voxels.coords,
            out if self.bias is None else out + self.bias,
            voxels.spatial_shape,
            voxels,
        )

    def extra_repr(self) -> str:
        default = Geometry(self.geometry.kernel)
        names = ("stride", "padding", "dilation", "output_padding", "transposed", "submanifold")
        more = [
            f"{n}={getattr(self.geometry, n)}"
            for n in names
            if getattr(self.geometry, n) != getattr(default, n)
        ]
        more += ["bias=False"] if self.bias is None else []
        return ", ".join(
            [f"{self.in_channels}, {self.out_channels}, kernel_size={self.geometry.kernel}", *more]
        )


def _convolved(found: SparseFormat, features: Tensor, weight: Tensor) -> Tensor:
    """The statement as the format of the map spells it; that of a table without detours."""
    if isinstance(found, NeighborTable):
        return insum.insum(
            "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]",
            padded=("Nb",),
            Nb=found.table,
            In=features,
            W=weight,
        )
    statement = "Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]"
    return _tensor(insum.einsum(statement, Map=found, In=features, W=weight))


def _geometry(
    kernel: SizePerAxis,
    stride: SizePerAxis,
    padding: SizePerAxis,
    dilation: SizePerAxis,
    output_padding: SizePerAxis,
    submanifold: bool,
    transposed: bool,
) -> Geometry:
    sizes = _triple("kernel_size", kernel, 1)
    steps, holes = _triple("stride", stride, 1), _triple("dilation", dilation, 1)
    if not submanifold:
        return Geometry(
            sizes,
            steps,
            _triple("padding", padding, 0),
            holes,
            _triple("output_padding", output_padding, 0),
            transposed,
        )
    if transposed or steps != (1, 1, 1) or _triple("padding", padding, 0) != (0, 0, 0):
        raise UnsupportedError(
            "a submanifold convolution with a stride, with padding, or transposed",
            expected="its outputs are its inputs: none of these",
        )
    if any(k % 2 == 0 for k in sizes):
        raise UnsupportedError(
            f"a submanifold convolution with kernel_size {sizes}",
            expected="odd sizes, which have a centre",
        )
    centre = [d * (k // 2) for d, k in zip(holes, sizes)]
    return Geometry(
        sizes, padding=(centre[0], centre[1], centre[2]), dilation=holes, submanifold=True
    )


def _triple(name: str, size: SizePerAxis, least: int) -> Triple:
    sizes = tuple(size) if isinstance(size, tuple | list) else (size,) * 3
    if len(sizes) != 3 or not all(is_size(s, least) for s in sizes):
        raise BindingError(
            f"{name} is {size!r}", expected=f"an integer of at least {least}, or three: x, y, z"
        )
    return (sizes[0], sizes[1], sizes[2])
