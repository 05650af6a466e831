"""Tensor parallelism for layers with sparse weights, as styles of
`torch.distributed.tensor.parallel.parallelize_module`.

A sparse weight is cut along its rows or columns, and each rank keeps a format of its own: a part of
the pattern with as many entries as there are. A convolution's weight is dense, and becomes a
DTensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from insum.distributed.local import closed, moved, opened
from insum.errors import BindingError, FormatError, UnsupportedError
from insum.formats import SparseFormat, SparseParameter
from insum.formats.module import linear
from insum.nn import SparseLinear, SparseTensor
from insum.nn.checks import last_size
from insum.nn.conv import SparseConv


class _SparseStyle(ParallelStyle):
    """What both styles share; ``dim`` is the cut dimension of a linear weight (out, in), and
    ``channels`` that of a convolution's (offsets, in, out).
    """

    dim: int
    channels: int
    #: Where the input has to be (and a plain one is), where the product of each rank's part is, and
    #: where it goes to.
    needed: Placement
    made: Placement
    left: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or self.needed
        self.output_layouts = output_layouts or self.left
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise UnsupportedError(
                f"{type(self).__name__} on {device_mesh}",
                expected="a mesh of one dimension",
                remedy='mesh["tp"], of the dimension that weights are cut along',
            )
        if isinstance(module, SparseLinear):
            _cut_linear(module, device_mesh, self.dim)
            forward: Callable[..., Any] = _linear_forward
        elif isinstance(module, SparseConv):
            _cut_convolution(module, device_mesh, self.channels)
            forward = functools.partial(_conv_forward, type(module).forward)
        else:
            raise UnsupportedError(
                f"{type(self).__name__} on a {type(module).__name__}",
                expected="a SparseLinear, BlockSparseLinear or sparse convolution",
                remedy="torch.distributed.tensor.parallel has styles for dense layers",
            )
        module.forward = functools.partial(forward, module, self, device_mesh)  # type: ignore[method-assign]
        return module

    def enter(self, x: Tensor, mesh: DeviceMesh, features: int) -> Any:
        """The input, with so many features in all, as a DTensor, where it has to be."""
        if not isinstance(x, DTensor):
            place, shape = _from_behind(self.input_layouts, x)[0], list(x.shape)
            if isinstance(place, Shard):
                last = place.dim == x.dim() - 1
                shape[place.dim] = features if last else shape[place.dim] * mesh.size()
            x = closed(x, mesh, [place], shape)
        elif x.device_mesh != mesh:
            raise BindingError(
                f"the input is on {x.device_mesh}, the layer on {mesh}",
                expected="one mesh",
                remedy="x.full_tensor(), or distribute_tensor(...) on the layer's mesh",
            )
        last_size("x", x, features, "in_features")
        return moved(x, _from_behind(self.needed, x))

    def leave(self, y: Any) -> Tensor:
        """The output as it was asked for."""
        y = moved(y, _from_behind(self.output_layouts, y))
        if not self.use_local_output:
            whole: Tensor = y
            return whole
        return opened(y, y.placements)


class SparseColwise(_SparseStyle):
    """Every rank has some output features of a layer with a sparse weight, or output channels of a
    sparse convolution, and all of the input; the counterpart of torch's ``ColwiseParallel``.

    Args:
        input_layouts: How a plain input is placed; a DTensor says so itself.
        output_layouts: How the output is to be placed.
        use_local_output: Give the local part of the output instead of a DTensor.

    Raises:
        UnsupportedError: The layer is none of these, or the mesh has several dimensions.
        FormatError: Blocks would have to be cut, or ranks have different patterns.

    Examples:
        >>> from insum.distributed import SparseColwise, SparseRowwise
        >>> plan = {"up": SparseColwise(), "down": SparseRowwise()}
        >>> # model = parallelize_module(model, mesh["tp"], plan)
    """

    dim, channels = 0, 2
    needed, made, left = Replicate(), Shard(-1), Shard(-1)


class SparseRowwise(_SparseStyle):
    """Every rank has some input features, and a part of every sum; the counterpart of torch's
    ``RowwiseParallel``. Behind `SparseColwise` nothing is sent in between.

    Args:
        input_layouts: How a plain input is placed; a DTensor says so itself.
        output_layouts: How the output is to be placed.
        use_local_output: Give the local part of the output instead of a DTensor.

    Raises:
        UnsupportedError: The layer is none of these, or the mesh has several dimensions.
        FormatError: Blocks would have to be cut, or ranks have different patterns.

    Examples:
        >>> import insum, torch
        >>> from insum.distributed import SparseRowwise
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> layer = insum.nn.SparseLinear(insum.formats.COO.from_dense(torch.ones(4, 8)))
        >>> parallelize_module(layer, mesh, SparseRowwise())(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """

    dim, channels = 1, 1
    needed, made, left = Shard(-1), Partial(), Replicate()


# --- linear layers --------------------------------------------------------------------------------


def _cut_linear(module: SparseLinear, mesh: DeviceMesh, dim: int) -> None:
    """Keep this rank's rows, or columns, of the weight, and of the bias what belongs to them."""
    whole = module.weight()
    group = mesh.get_group()
    _same_pattern(whole, group)
    assert whole.values is not None
    with torch.no_grad():
        dist.broadcast(whole.values, group=group, group_src=0)
        if module.bias is not None:
            dist.broadcast(module.bias, group=group, group_src=0)
    own = _own_part(whole.shape[dim], mesh, _granule(whole, dim), type(module).__name__)
    part = whole[own] if dim == 0 else whole[:, own]
    assert isinstance(part, SparseFormat)
    module.weight = SparseParameter(part, requires_grad=module.weight.requires_grad)
    if dim == 0 and module.bias is not None:
        module.bias = nn.Parameter(module.bias.detach()[own].clone(), module.bias.requires_grad)


def _granule(weight: SparseFormat, dim: int) -> int:
    blocks = weight.block_shape_or_none
    return 1 if blocks is None else blocks[dim]


def _own_part(size: int, mesh: DeviceMesh, granule: int, layer: str) -> slice:
    """The features of this rank, cut as DTensor cuts them."""
    step = -(-size // mesh.size())
    if step % granule:
        raise FormatError(
            f"{size} features of a {layer} on {mesh.size()} ranks are {step} for each, which "
            f"blocks of {granule} do not divide",
            expected="whole blocks on every rank",
            remedy="smaller blocks, or fewer ranks",
        )
    first = min(mesh.get_local_rank() * step, size)
    return slice(first, min(first + step, size))


def _same_pattern(weight: SparseFormat, group: Any) -> None:
    """Raise, on every rank, where ranks have different patterns."""
    arrays = [a for _, _, a in weight.index_arrays()]
    mixed = [int((a.long() * (torch.arange(a.numel(), device=a.device).view(a.shape) % 8191 + 1))
                 .sum()) for a in arrays]  # fmt: skip
    found = torch.tensor([*weight.shape, weight.stored, *mixed], device=weight.device)
    low, high = found.clone(), found.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    if not torch.equal(low, high):
        raise FormatError(
            "ranks have sparse weights of different patterns",
            expected="the same layer on every rank, before it is cut",
            remedy="torch.manual_seed(...) before the layer is made, or load one state",
        )


def _linear_forward(
    module: SparseLinear, style: _SparseStyle, mesh: DeviceMesh, x: Tensor
) -> Tensor:
    given = style.enter(x, mesh, module.in_features)
    columns = style.dim == 0
    local = opened(given, [Partial()] if columns else given.placements)
    y = linear(local, module.weight(), module.bias if columns else None)
    whole = closed(y, mesh, _from_behind(style.made, y), (*given.shape[:-1], module.out_features))
    if columns or module.bias is None:
        return style.leave(whole)
    summed = moved(whole, _from_behind(style.output_layouts, y))
    return style.leave(summed + closed(module.bias, mesh, [Replicate()], module.bias.shape))


def _from_behind(placement: Placement, like: Tensor) -> list[Placement]:
    """A placement with its dimension counted from the front."""
    if isinstance(placement, Shard) and placement.dim < 0:
        return [Shard(placement.dim + like.dim())]
    return [placement]


# --- convolutions ---------------------------------------------------------------------------------


def _cut_convolution(module: SparseConv, mesh: DeviceMesh, dim: int) -> None:
    if module.groups > 1:
        raise UnsupportedError(
            f"a convolution of {module.groups} groups is cut over ranks",
            expected="groups=1",
            remedy="distribute_module(layer, mesh), and features that are sharded by voxels",
        )
    weight, bias = module.weight, module.bias
    cut = distribute_tensor(weight.detach(), mesh, [Shard(dim)])
    module.weight = nn.Parameter(cut, weight.requires_grad)
    if bias is not None:
        place = Shard(0) if dim == 2 else Replicate()
        module.bias = nn.Parameter(distribute_tensor(bias.detach(), mesh, [place]))


def _conv_forward(
    forward: Callable[..., SparseTensor],
    module: SparseConv,
    style: _SparseStyle,
    mesh: DeviceMesh,
    x: SparseTensor,
    like: SparseTensor | None = None,
) -> SparseTensor:
    features = style.enter(x.features, mesh, module.in_channels)
    found = forward(module, x.with_features(features), like)
    return found.with_features(style.leave(found.features))
