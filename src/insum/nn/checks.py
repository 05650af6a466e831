"""What every layer asks of its arguments before any kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from insum.accepted import (
    COUNTS,
    TENSOR,
    Accepted,
    F,
    explains,
    is_fake,
    is_size,
    require,
)
from insum.call import prepared
from insum.compat.calls import is_eager_call
from insum.compat.placed import is_placed
from insum.errors import AutogradError, BindingError, DeviceError, DtypeError, UnsupportedError
from insum.formats import SparseFormat
from insum.formats.base import FORMAT
from insum.formats.operands import OWNER, SPARSE_LAYOUTS
from insum.lang.types import INTEGERS, NARROW_FLOATS
from insum.nn.irreps import Irreps
from insum.runtime.handwritten.kernel import on_device
from insum.settings import settings

#: PyG's ``adj_t``.
SPARSE = Accepted(
    "a sparse tensor of torch", lambda v: isinstance(v, Tensor) and v.layout in SPARSE_LAYOUTS
)
#: The edges of a graph and their weights.
EDGES = {"edge_index": TENSOR | FORMAT | OWNER | SPARSE, "edge_weight": TENSOR.optional}
#: Of a graph between two sets of nodes: sources, targets.
PAIR = Accepted("a pair of them", lambda v: COUNTS.fits(v) and len(v) == 2)


def layer_takes(**kinds: Accepted) -> Callable[[F], F]:
    """The arguments of ``forward``, looked at where it fails: their kinds, then where they are and
    their dtypes, beside the layer's parameters.
    """
    return explains(also=as_the_layer, **kinds)


def refuse_scripting(layer: torch.nn.Module) -> torch.nn.Module:
    """What `torch.jit.script` asks of a module first, as ``__prepare_scriptable__``."""
    raise UnsupportedError(
        f"TorchScript cannot compile {type(layer).__name__}",
        expected="torch.compile or torch.export, which take every layer",
        remedy="torch.export.export(model, example), then insum.export.package(program, path)",
    )


def as_the_layer(layer: torch.nn.Module, *arguments: object) -> None:
    one_dtype(layer, *arguments)
    own = list(layer.parameters())
    if any(map(is_fake, _tensors_in(arguments))) and not all(map(is_fake, own)):
        raise DeviceError(
            "a fake tensor was passed to a layer whose parameters are none",
            expected="a layer that was made under the same FakeTensorMode",
        )
    recorded = any(p.requires_grad for p in own) and torch.is_grad_enabled()
    if recorded and any(t.is_inference() for t in _tensors_in(arguments)):
        raise AutogradError(
            "what was passed was made under inference mode, so that no gradient can be recorded "
            "with it",
            remedy="pass its clone(), or call under torch.no_grad()",
        )
    if own and is_placed(_tensors_in(arguments)) and not is_placed(own):
        raise DeviceError(
            "a DTensor was passed to a layer whose parameters are none",
            expected="parameters and features on one mesh",
            remedy="torch.distributed.tensor.distribute_module(layer, mesh), after which every "
            "rank has the layer; or x.to_local() and the layer's result as a part",
        )


def one_dtype(layer: torch.nn.Module, *arguments: object) -> None:
    own = next((p.dtype for p in layer.parameters() if p.is_floating_point()), None)
    for number, value in enumerate(_tensors_in(arguments)):
        indices = INTEGERS if number else ()  # features come first, and are no integers
        if own is not None and NARROW_FLOATS & {own, value.dtype}:
            narrow = own if own in NARROW_FLOATS else value.dtype
            raise DtypeError(
                f"{'the layer' if narrow == own else 'a tensor'} is of "
                f"{str(narrow).removeprefix('torch.')}, in which {type(layer).__name__} computes "
                "nothing",
                expected="one dtype of 16 bits or more",
                remedy="layer.to(torch.bfloat16) and x.to(torch.bfloat16)",
            )
        if own is not None and value.dtype not in (own, *indices):
            raise DtypeError(
                f"a tensor of {str(value.dtype).removeprefix('torch.')} was passed to a layer of "
                f"{str(own).removeprefix('torch.')}",
                expected="one dtype",
                remedy=f"x.to({own}), or layer.to({value.dtype})",
            )


def _tensors_in(arguments: tuple[object, ...]) -> Iterator[Tensor]:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _tensors_in(value)
        elif isinstance(features := getattr(value, "features", value), Tensor):
            yield features


def kernels_look(tensor: Tensor) -> bool:
    """Whether kernels look at the values of a tensor and report what is out of range, so that the
    host goes on; where it does not, it looks itself before anything runs.
    """
    return (
        prepared.kernels_look_on(tensor.device)
        and settings.values.check != "always"
        and on_device(tensor)
        and is_eager_call((tensor,))
    )


def sent(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor of numbers that the host knows, without waiting for the device."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def one_device(**tensors: Tensor | SparseFormat | None) -> None:
    """All that were passed on one device; the error names two that are not.

    >>> import torch
    >>> one_device(x=torch.ones(2), mask=torch.ones(2, device="meta"))
    Traceback (most recent call last):
        ...
    insum.errors.DeviceError: x is on cpu but mask is on meta
      expected: all tensors on one device
      try: mask.to('cpu')
    """
    first, place = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if place is None:
            first, place = name, tensor.device
        elif tensor.device != place:
            raise DeviceError(
                f"{first} is on {place} but {name} is on {tensor.device}",
                expected="all tensors on one device",
                remedy=f"{name}.to({str(place)!r})",
            )


def integers(name: str, x: Tensor) -> None:
    """A tensor of coordinates or node numbers holds integers."""
    if x.dtype not in INTEGERS:
        raise DtypeError(
            f"{name} holds {str(x.dtype).removeprefix('torch.')}",
            expected="integers",
            remedy=f"{name}.long()",
        )


def last_size(name: str, x: Tensor, size: int, what: str) -> None:
    """The last dimension has the size that the layer was made for."""
    if type(x) is Tensor and x.layout is torch.strided and not (x.is_nested or x.is_quantized):
        if x.dim() and x.shape[-1] == size:
            return  # without a call: every step of a network asks
    else:
        require(name, x, TENSOR)
    if not x.dim() or x.shape[-1] != size:
        raise BindingError(
            f"{name} has shape {tuple(x.shape)}", expected=f"{size} in the last dimension: {what}"
        )


def in_irreps(name: str, x: Tensor, what: str, irreps: Irreps) -> None:
    """The last dimension is that of irreps that the layer was made for."""
    common = type(x) is Tensor and x.layout is torch.strided and not x.is_nested
    if not common or x.is_quantized or not x.dim() or x.shape[-1] != irreps.dim:
        last_size(name, x, irreps.dim, f"{what} {irreps}")  # which says what is wrong


def node_rows(name: str, x: Tensor, channels: int, *, only: bool = False) -> None:
    """A row of features for each node, perhaps of more than one dimension."""
    common = type(x) is Tensor and x.layout is torch.strided and not (x.is_nested or x.is_quantized)
    if common and x.dim() == 2 and x.shape[1] == channels:
        return
    last_size(name, x, channels, "in_channels")
    if x.dim() < 2 or only and x.dim() > 2:
        raise BindingError(
            f"{name} has shape {tuple(x.shape)}",
            expected=f"a row for each node: (nodes, {channels})",
        )


def instruction_number(number: int, count: int) -> None:
    """One of so many instructions."""
    if not is_size(number, 0, count):
        raise BindingError(
            f"there is no instruction {number}", expected=f"a number from 0 to {count - 1}"
        )


def refuse_own_for_each(internal: bool, shared: bool) -> None:
    """A layer has no weights of its own for items that it does not know yet."""
    if internal and not shared:
        raise BindingError(
            "internal weights that are not shared",
            expected="weights for each item are passed to the call",
            remedy="internal_weights=False",
        )
