"""Weights of other libraries for sparse convolution, for models of the same names.

How each of them lays out a kernel, with coordinates and kernel axes in the same order:

- spconv: ``weight`` (outputs, ..., inputs), offsets in the order of a dense kernel; saved by older
  versions as (..., outputs, inputs) or (..., inputs, outputs). A kernel of one place is held as a
  matrix (inputs, outputs), whatever its shape says.
- TorchSparse: ``kernel`` (offsets, inputs, outputs); the first axis runs fastest where the number
  of offsets is odd, else the last. A kernel of one place is (inputs, outputs).
- MinkowskiEngine: ``kernel`` (offsets, inputs, outputs), the first axis fastest; ``bias`` (1,
  outputs); norms are held one level deeper, as ``bn``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, TENSOR, TEXT, Accepted, require, takes
from insum.errors import BindingError, UnsupportedError
from insum.nn.conv import SparseConv

MODEL = Accepted("a module", lambda v: isinstance(v, nn.Module))
STATE = Accepted(
    "a state dict: tensors by their names",
    lambda v: isinstance(v, Mapping) and all(isinstance(k, str) for k in v),
)
#: The axes of a kernel of spconv, as they were saved: K outputs, RS places, C inputs.
LAYOUTS = ("KRSC", "RSKC", "RSCK")

Convert = Callable[[SparseConv, Tensor], Tensor]


@takes(model=MODEL, state=STATE, layout=TEXT, strict=FLAG)
def load_spconv(
    model: nn.Module, state: Mapping[str, Tensor], *, layout: str = "KRSC", strict: bool = True
) -> None:
    """Load the state dict of an spconv model into one of insum's, with modules of the same names.

    Args:
        model: Holds insum's convolutions where that of spconv held its own.
        state: What ``state_dict()`` of the other gave.
        layout: ``"KRSC"``, as spconv saves since 2.2; ``"RSKC"`` or ``"RSCK"`` of older ones.
        strict: As in `torch.nn.Module.load_state_dict`.

    Raises:
        BindingError: A kernel has another shape; nothing is loaded then.
        DtypeError: What goes by the name of a parameter is no tensor.
        UnsupportedError: There is no such layout.

    Examples:
        >>> from insum.nn import SparseConv3d
        >>> model = nn.ModuleDict({"down": SparseConv3d(4, 8, 2, stride=2)})
        >>> theirs = torch.randn(8, 2, 2, 2, 4)
        >>> load_spconv(model, {"down.weight": theirs, "down.bias": torch.zeros(8)})
        >>> bool((model["down"].weight[1] == theirs[:, 0, 0, 1].T).all())
        True
    """
    if layout not in LAYOUTS:
        raise UnsupportedError(f"there is no layout {layout!r}", expected=", ".join(LAYOUTS))
    _load(model, state, "weight", lambda conv, kernel: _spconv(conv, kernel, layout), strict)


@takes(model=MODEL, state=STATE, strict=FLAG)
def load_torchsparse(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Load the state dict of a TorchSparse model into one of insum's, with modules of the same
    names.

    Args:
        model: Holds insum's convolutions where that of TorchSparse held its own.
        state: What ``state_dict()`` of the other gave.
        strict: As in `torch.nn.Module.load_state_dict`.

    Raises:
        BindingError: A kernel has another shape; nothing is loaded then.
        DtypeError: What goes by the name of a parameter is no tensor.

    Examples:
        >>> from insum.nn import SparseConv3d
        >>> model = nn.ModuleDict({"same": SparseConv3d(4, 8, 3, submanifold=True, bias=False)})
        >>> theirs = torch.randn(27, 4, 8)
        >>> load_torchsparse(model, {"same.kernel": theirs})
        >>> bool((model["same"].weight[1] == theirs[9]).all())  # (0, 0, 1), of which z runs slowest
        True
    """

    def convert(conv: SparseConv, kernel: Tensor) -> Tensor:
        return _by_offset(conv, kernel, "first" if conv.geometry.volume % 2 else "last")

    _load(model, state, "kernel", convert, strict)


@takes(model=MODEL, state=STATE, strict=FLAG)
def load_minkowski(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Load the state dict of a MinkowskiEngine model into one of insum's, with modules of the same
    names; norms that are ``norm.bn.weight`` there may be ``norm.weight`` here.

    Args:
        model: Holds insum's convolutions where that of MinkowskiEngine held its own.
        state: What ``state_dict()`` of the other gave.
        strict: As in `torch.nn.Module.load_state_dict`.

    Raises:
        BindingError: A kernel has another shape; nothing is loaded then.
        DtypeError: What goes by the name of a parameter is no tensor.

    Examples:
        >>> from insum.nn import SparseConv2d
        >>> model = nn.ModuleDict({"conv": SparseConv2d(4, 8, 3, submanifold=True)})
        >>> theirs = torch.randn(9, 4, 8)
        >>> load_minkowski(model, {"conv.kernel": theirs, "conv.bias": torch.zeros(1, 8)})
        >>> bool((model["conv"].weight[1] == theirs[3]).all())  # (0, 1), of which y runs slower
        True
    """
    own = {*model.state_dict()}
    flat = {_without_bn(name, own): value for name, value in state.items()}
    _load(model, flat, "kernel", lambda conv, kernel: _by_offset(conv, kernel, "first"), strict)


def _load(
    model: nn.Module, state: Mapping[str, Tensor], name: str, convert: Convert, strict: bool
) -> None:
    """With the kernels of all convolutions converted, before anything is written."""
    made = dict(state)
    for prefix, conv in model.named_modules(remove_duplicate=False):
        if not isinstance(conv, SparseConv):
            continue
        before = f"{prefix}." if prefix else ""
        kernel = made.pop(before + name, None)
        if kernel is not None:
            made[before + "weight"] = _checked(before + name, conv, kernel, convert)
        bias = made.get(before + "bias")
        if isinstance(bias, Tensor):
            made[before + "bias"] = bias.reshape(-1)
    _check_state(model.state_dict(), made, strict)
    model.load_state_dict(made, strict=strict)


def _check_state(own: Mapping[str, Tensor], given: Mapping[str, Tensor], strict: bool) -> None:
    """PyTorch looks while it loads, and leaves a model that is half of one and half of another."""
    for name, tensor in given.items():
        if name not in own or not isinstance(own[name], Tensor):
            continue
        require(name, tensor, TENSOR)
        if own[name].shape != tensor.shape:
            raise BindingError(
                f"{name} has shape {tuple(tensor.shape)}", expected=f"{tuple(own[name].shape)}"
            )
    missing, unknown = [n for n in own if n not in given], [n for n in given if n not in own]
    if strict and (missing or unknown):
        told = [f"has no {missing[0]}"] if missing else []
        told += [f"has a {unknown[0]}, which the model has not"] if unknown else []
        raise BindingError(
            f"the state {' and '.join(told)}",
            expected="the names of the model",
            remedy="strict=False loads what there is",
        )


def _checked(name: str, conv: SparseConv, kernel: Tensor, convert: Convert) -> Tensor:
    require(name, kernel, TENSOR)
    wanted = conv.geometry.volume * conv.in_channels * conv.out_channels
    if conv.groups > 1 or kernel.numel() != wanted:
        raise BindingError(
            f"{name} has shape {tuple(kernel.shape)}, but the layer is {conv}",
            expected=f"{wanted} numbers, and one group",
        )
    try:
        return convert(conv, kernel)
    except RuntimeError as wrong:
        raise BindingError(
            f"{name} has shape {tuple(kernel.shape)}, but the layer is {conv}",
            expected="a kernel of the sizes of the layer",
        ) from wrong


def _spconv(conv: SparseConv, kernel: Tensor, layout: str) -> Tensor:
    if conv.geometry.volume == 1:
        return kernel.reshape(conv.weight.shape)
    ndim = conv.ndim
    places = list(range(1, ndim + 1)) if layout == "KRSC" else list(range(ndim))
    outputs, inputs = {"KRSC": (0, ndim + 1), "RSKC": (ndim, ndim + 1), "RSCK": (ndim + 1, ndim)}[
        layout
    ]
    turned = kernel.permute(*places, inputs, outputs)
    if turned.shape != (*conv.geometry.kernel, conv.in_channels, conv.out_channels):
        raise RuntimeError("a kernel of another shape")
    return turned.reshape(conv.weight.shape)


def _by_offset(conv: SparseConv, kernel: Tensor, fastest: str) -> Tensor:
    """In the order of a dense kernel, whose last axis runs fastest."""
    given = kernel.reshape(conv.weight.shape)
    sizes = conv.geometry.kernel
    numbers = torch.arange(math.prod(sizes), device=kernel.device)
    if fastest == "first":
        axes = range(len(sizes) - 1, -1, -1)
        numbers = numbers.reshape(sizes[::-1]).permute(*axes).reshape(-1)
    return given[numbers]


def _without_bn(name: str, own: set[str]) -> str:
    """The name of a norm's tensor where the model has it one level higher."""
    *path, last = name.split(".")
    if name in own or not path or path[-1] != "bn":
        return name
    higher = ".".join([*path[:-1], last])
    return higher if higher in own else name
