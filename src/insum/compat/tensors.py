"""Tensors: whether they are like others, and made in the quickest way."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter


def kinds_guard(values: Sequence[object], *, exact: bool) -> Callable[..., bool]:
    """Tells whether other values are like these: numbers of the same type, and tensors of the same
    type, dtype, device, rank, marks of views and need of a gradient; where ``exact``, of the same
    sizes and strides.
    """
    if all(isinstance(v, Tensor) for v in values):
        guard = _tensor_guard([v for v in values if isinstance(v, Tensor)], exact=exact)
        if guard is not None:
            return guard
    wanted = tuple(_kind(v, exact) for v in values)

    def alike(*others: object) -> bool:
        return wanted == tuple([_kind(v, exact) for v in others])

    return alike


def _kind(value: object, exact: bool) -> tuple[Any, ...]:
    if not isinstance(value, Tensor):
        fits = isinstance(value, int) and -(2**63) <= value < 2**63
        return type(value), fits
    if isinstance(
        value, UninitializedParameter | UninitializedBuffer
    ):  # which has nothing to be compared
        return type(value), False
    marks = value.requires_grad, value.is_inference(), value.is_neg(), value.is_conj()
    kind = type(value), value.dtype, value.device, value.layout, value.dim(), marks
    return (*kind, value.shape, value.stride()) if exact else kind


def _tensor_guard(tensors: Sequence[Tensor], *, exact: bool) -> Callable[..., bool] | None:
    """The same in one call of torch's; None where this torch has no such thing, or one that does
    not tell.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) if exact else [None] * t.dim() for t in tensors]
        strides: Any = [list(t.stride()) if exact else [None] * t.dim() for t in tensors]
        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        other = torch.empty(2, 3, 5, 7, 11, device="meta")
        usable = check(*tensors) is True and not any(
            check(*tensors[:k], other, *tensors[k + 1 :]) for k in range(len(tensors))
        )
    except Exception:
        return None
    return check if usable else None


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor without values, made as `maker` makes them."""
    quick = strided_makers().get(device.type)
    if quick is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if len(shape) == 1:
        return quick(shape, (1,), dtype)
    if len(shape) == 2:
        return quick(shape, (shape[1], 1), dtype)
    if len(shape) == 3:
        return quick(shape, (shape[1] * shape[2], shape[2], 1), dtype)
    return quick(shape, tuple([math.prod(shape[d + 1 :]) for d in range(len(shape))]), dtype)


def empties(
    device: torch.device, **shapes: tuple[torch.dtype, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Several tensors without values, of one or two dimensions, by name."""
    quick, found = strided_makers().get(device.type), {}
    for name, (dtype, shape) in shapes.items():
        if quick is None:
            found[name] = torch.empty(shape, dtype=dtype, device=device)
        else:
            found[name] = quick(shape, (1,) if len(shape) == 1 else (shape[1], 1), dtype)
    return found


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Makes contiguous tensors without values, on the current device where that is a GPU, in the
    quickest way that this torch has.
    """
    strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    quick = strided_makers().get(device.type)
    if quick is not None:
        return functools.partial(quick, shape, strides, dtype)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


@functools.cache
def strided_makers() -> dict[str, Callable[..., Tensor]]:
    """By device, what compiled code of TorchInductor makes its tensors with; nothing where this
    torch has no such thing.
    """
    try:
        from torch._C._dynamo import guards

        found = {kind: getattr(guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")}
        made = found["cpu"]((2, 3), (3, 1), torch.float64)
        usable = (
            made.shape == (2, 3)
            and made.stride() == (3, 1)
            and made.dtype is torch.float64
            and made.is_cpu
        )
    except Exception:
        return {}
    return found if usable else {}


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which ``tensor`` is a view."""
    return tensor._base if tensor._is_view() else None
