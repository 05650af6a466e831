"""Sparse convolutions: ``Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]`` over occupied voxels."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from insum.accepted import COUNT, FLAG, SIZE, TENSOR, TEXT, Accepted, require, takes
from insum.api import insum
from insum.bounded import is_first
from insum.compat.calls import PLAIN
from insum.compat.placed import beside
from insum.errors import BindingError, UnsupportedError
from insum.formats import NeighborTable, SparseFormat
from insum.formats.einsum import einsum
from insum.nn.checks import last_size, layer_takes, one_device
from insum.nn.functional import _tensor
from insum.nn.kernel_map import Geometry, kernel_map
from insum.nn.modules import SizePerAxis, SparseModule, geometry_of, same_dimensions
from insum.nn.sparse_tensor import VOXELS, SparseTensor, at_voxels

if TYPE_CHECKING:
    from typing_extensions import Self

#: The dense layers in one to three dimensions; PyTorch has none in four.
_DENSE = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d),
          3: (nn.Conv3d, nn.ConvTranspose3d)}  # fmt: skip
#: Said once.
KEYS = (
    "indice_key has no effect: layers find maps by coordinates and share them; the voxels of an "
    "inverse convolution are given by like=, as in layer(x, like=y)"
)
#: A convolution over a table, and over a map in any format: of all channels; of groups of them;
#: channel by channel, with one output of each, and with several.
WHOLE = (
    "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]",
    "Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]",
)
GROUPED = (
    "Out[x,g,m] = In[Nb[z,x],g,c] * W[z,c,g,m]",
    "Out[x,g,m] = Map[z,x,y] * In[y,g,c] * W[z,c,g,m]",
)
BY_CHANNEL = (
    "Out[x,c] = In[Nb[z,x],c] * W[z,c]",
    "Out[x,c] = Map[z,x,y] * In[y,c] * W[z,c]",
)
MULTIPLIED = (
    "Out[x,c,m] = In[Nb[z,x],c] * W[z,c,m]",
    "Out[x,c,m] = Map[z,x,y] * In[y,c] * W[z,c,m]",
)
#: What a layer that was made by one of these is made of.
DenseConv = (
    nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
)


@SparseModule.register
class SparseConv(nn.Module):
    """A convolution over occupied voxels in any number of dimensions; `SparseConv3d` tells of it.

    Raises:
        BindingError: Sizes, groups or channels that do not fit; a tensor of other dimensions.
        UnsupportedError: A submanifold convolution with a stride or padding; ``like`` for one.
    """

    ndim: ClassVar[int]

    @takes(
        in_channels=COUNT,
        out_channels=COUNT,
        bias=FLAG,
        groups=SIZE,
        submanifold=FLAG,
        transposed=FLAG,
        indice_key=TEXT.optional,
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
        groups: int = 1,
        submanifold: bool = False,
        transposed: bool = False,
        output_padding: SizePerAxis = 0,
        indice_key: str | None = None,
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise BindingError(
                f"{in_channels} and {out_channels} channels cannot be cut into {groups} groups",
                expected="channels that the number of groups divides",
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.indice_key = indice_key
        if indice_key is not None and is_first(KEYS):
            warnings.warn(KEYS, stacklevel=3)
        made = geometry_of(
            self.ndim, kernel_size, stride, padding, dilation, output_padding, transposed
        )
        self.geometry = _centred(made) if submanifold else made
        volume = self.geometry.volume
        self.weight = nn.Parameter(torch.empty(volume, in_channels // groups, out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Conv3d`: uniform, bounded by the square root of the number of inputs of one
        output.
        """
        bound = 1 / math.sqrt(max(1, self.geometry.volume * self.weight.shape[1]))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    @takes(submanifold=FLAG)
    def from_dense(cls, layer: DenseConv, *, submanifold: bool = False) -> Self:
        """The sparse layer with the weights of a dense one.

        >>> from insum.nn import SparseConv3d
        >>> SparseConv3d.from_dense(nn.Conv3d(4, 8, 3, stride=2, padding=1))
        SparseConv3d(4, 8, kernel_size=(3, 3, 3), stride=(2, 2, 2), padding=(1, 1, 1))
        """
        require("layer", layer, _dense_layer(cls.ndim))
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise UnsupportedError(f"{layer}", expected="zeros as padding, given in numbers")
        transposed = isinstance(layer, _DENSE[cls.ndim][1])
        made = cls(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            0 if submanifold else layer.padding,
            layer.dilation,
            layer.bias is not None,
            groups=layer.groups,
            submanifold=submanifold,
            transposed=transposed,
            output_padding=layer.output_padding,
        )
        made.weight = nn.Parameter(offsets_first(layer.weight.detach(), layer.groups, transposed))
        made.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        return made

    @layer_takes(x=VOXELS, like=VOXELS.optional)
    def forward(self, x: SparseTensor, like: SparseTensor | None = None) -> SparseTensor:
        features, weight, geometry = x.features, self.weight, self.geometry
        if (
            like is not None
            or x.ndim != self.ndim
            or features.shape[-1] != self.in_channels
            or features.device != weight.device
        ):
            self._check(x, like)
        if geometry.submanifold and geometry.volume == self.groups == 1:
            # every voxel meets itself; the gradient of a view of all of it is a view, too
            voxels, out = x.voxels, features @ weight.squeeze(0)
        else:
            target = None if like is None else like.voxels
            voxels, found = kernel_map(x.voxels, geometry, target)
            if self.groups == 1:
                out = _spelled(found, WHOLE, features, weight)
            else:
                out = _grouped(found, features, weight, self.groups)
        bias = self.bias
        if bias is not None:  # under autocast the product is narrower
            out = out + (bias if bias.dtype is out.dtype else bias.to(out.dtype))
        return at_voxels(voxels, out)

    def _check(self, x: SparseTensor, like: SparseTensor | None) -> None:
        """What is wrong with these, if anything is."""
        last_size("x.features", x.features, self.in_channels, "in_channels")
        one_device(
            weight=self.weight, features=x.features, like=None if like is None else like.features
        )
        same_dimensions(self.ndim, type(self).__name__, x, like)
        if like is not None and self.geometry.submanifold:
            raise UnsupportedError(
                "like= with a submanifold convolution",
                expected="nothing: its outputs are at its inputs",
            )

    def extra_repr(self) -> str:
        default = Geometry(self.geometry.kernel)
        names = ("stride", "padding", "dilation", "output_padding", "transposed", "submanifold")
        more = [
            f"{n}={getattr(self.geometry, n)}"
            for n in names
            if getattr(self.geometry, n) != getattr(default, n)
        ]
        more += [f"groups={self.groups}"] if self.groups > 1 else []
        more += ["bias=False"] if self.bias is None else []
        more += [f"indice_key={self.indice_key!r}"] if self.indice_key else []
        return ", ".join(
            [f"{self.in_channels}, {self.out_channels}, kernel_size={self.geometry.kernel}", *more]
        )


class SparseConv1d(SparseConv):
    """`SparseConv3d` along one axis: a sequence with gaps, such as events in time.

    Args:
        in_channels: Features of an input voxel.
        out_channels: Features of an output voxel.
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.
        bias: Whether there is a bias.
        groups: How many parts channels are cut into, each by itself.
        submanifold: Outputs at the input voxels.
        transposed: The transposed convolution.
        output_padding: As in `torch.nn.ConvTranspose3d`.
        indice_key: Taken, and without effect.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 3], [0, 4]]), torch.ones(2, 3), ndim=1)
        >>> SparseConv1d(3, 8, 3, submanifold=True)(x).features.shape
        torch.Size([2, 8])
    """

    ndim = 1


class SparseConv2d(SparseConv):
    """`SparseConv3d` in two dimensions. ``SparseTensor(coords, features, ndim=2)`` takes
    coordinates (N, 3) as batch, x, y.

    Args:
        in_channels: Features of an input voxel.
        out_channels: Features of an output voxel.
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.
        bias: Whether there is a bias.
        groups: How many parts channels are cut into, each by itself.
        submanifold: Outputs at the input voxels.
        transposed: The transposed convolution.
        output_padding: As in `torch.nn.ConvTranspose3d`.
        indice_key: Taken, and without effect.

    Examples:
        >>> x = SparseTensor(torch.tensor([[0, 3, 1], [0, 4, 1]]), torch.ones(2, 3), ndim=2)
        >>> SparseConv2d(3, 8, 3, submanifold=True)(x).features.shape
        torch.Size([2, 8])
    """

    ndim = 2


class SparseConv3d(SparseConv):
    """A convolution over occupied voxels: ``insum.einsum("Out[x,m] = Map[z,x,y] * In[y,c] *
    W[z,c,m]", ...)``.

    ``Map`` tells which input voxel ``y`` reaches output voxel ``x`` through kernel offset ``z``.
    Sizes, stride, padding, dilation and groups mean what they mean in `torch.nn.Conv3d`, and
    outputs equal those of the dense convolution at the voxels where there are outputs:

    - by default wherever any input reaches (with stride 2, kernel 2: the occupied voxels of the
      next coarser grid);
    - ``submanifold=True``: at the input voxels; the kernel is centred, as with PyTorch's
      ``padding="same"``, and the padding follows from it;
    - ``transposed=True``: as `torch.nn.ConvTranspose3d`, wherever any input reaches, which is the
      generative convolution of other libraries; or, with ``layer(x, like=y)``, at the voxels of
      ``y``: the inverse of a strided convolution when ``y`` was its input.

    ``weight`` is (kernel volume, in_channels / groups, out_channels), offsets in the order of a
    dense kernel. Maps are built on the device, once for each kernel and set of voxels, and shared
    by all layers that use them; an ``indice_key``, which names a map in spconv, is taken and has
    no effect.

    Args:
        in_channels: Features of an input voxel.
        out_channels: Features of an output voxel.
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.
        bias: Whether there is a bias.
        groups: How many parts channels are cut into, each by itself.
        submanifold: Outputs at the input voxels.
        transposed: The transposed convolution.
        output_padding: As in `torch.nn.ConvTranspose3d`.
        indice_key: Taken, and without effect.

    Examples:
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

    ndim = 3


class SparseConv4d(SparseConv):
    """`SparseConv3d` in space and time: coordinates (N, 5) as batch, x, y, z, t.

    Args:
        in_channels: Features of an input voxel.
        out_channels: Features of an output voxel.
        kernel_size: How many voxels the kernel spans, or one number for each axis.
        stride: From one output to the next.
        padding: How far the kernel reaches over the edge.
        dilation: From one place of the kernel to the next.
        bias: Whether there is a bias.
        groups: How many parts channels are cut into, each by itself.
        submanifold: Outputs at the input voxels.
        transposed: The transposed convolution.
        output_padding: As in `torch.nn.ConvTranspose3d`.
        indice_key: Taken, and without effect.

    Examples:
        >>> coords = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
        >>> x = SparseTensor(coords, torch.ones(2, 4), ndim=4)
        >>> SparseConv4d(4, 8, 3, submanifold=True)(x)
        SparseTensor(voxels=2, channels=8, float32, ndim=4, spatial_shape=None, cpu)
    """

    ndim = 4


def _grouped(found: SparseFormat, features: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Groups are a dimension of their own, or the channels, where every channel is one."""
    volume, inner, outputs = weight.shape
    if inner != 1:
        given = features.reshape(features.shape[0], groups, inner)
        parts = weight.reshape(volume, inner, groups, outputs // groups)
        return _spelled(found, GROUPED, given, parts).flatten(1)
    if outputs == groups:
        return _spelled(found, BY_CHANNEL, features, weight.squeeze(1))
    parts = weight.reshape(volume, groups, outputs // groups)
    return _spelled(found, MULTIPLIED, features, parts).flatten(1)


def _spelled(
    found: SparseFormat, spelling: tuple[str, str], features: Tensor, weight: Tensor
) -> Tensor:
    """The statement as the format of the map spells it; that of a table without detours."""
    if isinstance(found, NeighborTable):
        tensors: dict[str, Any] = {"Nb": found.table, "In": features, "W": weight}
        if type(features) not in PLAIN or type(weight) not in PLAIN:
            tensors = beside(tensors, ("Nb",))
        return insum(spelling[0], padded=("Nb",), **tensors)
    return _tensor(einsum(spelling[1], Map=found, In=features, W=weight))


def offsets_first(weight: Tensor, groups: int = 1, transposed: bool = False) -> Tensor:
    """A dense kernel, (outputs, inputs / groups, ...) or, transposed, (inputs, outputs / groups,
    ...), as (offsets, inputs / groups, outputs).
    """
    if not transposed:
        return weight.flatten(2).permute(2, 1, 0).contiguous()
    flat = weight.flatten(2)
    grouped = flat.reshape(groups, flat.shape[0] // groups, *flat.shape[1:])  # inputs, outputs
    return grouped.permute(3, 1, 0, 2).flatten(2).contiguous()


def _dense_layer(ndim: int) -> Accepted:
    kinds = _DENSE.get(ndim, ())
    names = " or ".join(f"an nn.{kind.__name__}" for kind in kinds)
    return Accepted(
        names or "nothing: PyTorch has no dense convolution in four dimensions",
        lambda v: isinstance(v, kinds) and TENSOR.fits(v.weight),
    )


def _centred(made: Geometry) -> Geometry:
    """The kernel of a submanifold convolution."""
    if made.transposed or max(made.stride) > 1 or max(made.padding) or max(made.output_padding):
        raise UnsupportedError(
            "a submanifold convolution with a stride, with padding, or transposed",
            expected="its outputs are its inputs: none of these",
        )
    centre = tuple(r // 2 for r in made.reach)
    return Geometry(made.kernel, padding=centre, dilation=made.dilation, submanifold=True)
