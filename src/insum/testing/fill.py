"""Tensors for drawn statements: values that are exact in every dtype, or generic ones for
derivatives, in all kinds of memory layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum.lang.bind import Value
from insum.lang.expr import Affine
from insum.testing.cases import Options


@dataclass
class UnfilledTensor:
    """What is decided about a tensor before it is filled; an index tensor has a ``bound`` that its
    values stay below.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bound: int | None = None
    positive: bool = False
    padded: bool = False
    layout: str = "contiguous"
    number: bool = False
    readable: bool = True
    first: tuple[Affine, ...] = ()
    depth: int = 0


def fill(array: UnfilledTensor, seed: int, options: Options) -> Value:
    """The tensor, or the Python number."""
    random = np.random.default_rng(seed)
    if array.bound is not None:
        values = _indices(array, random)
    elif options.differentiable:
        values = _generic(array, random)
    else:
        values = _exact(array, random)
    tensor = torch.from_numpy(np.ascontiguousarray(values)).reshape(array.shape).to(array.dtype)
    if array.number:
        number: bool | int | float | complex = tensor.item()
        return number
    return laid_out(tensor, array.layout, random)


def _indices(array: UnfilledTensor, random: np.random.Generator) -> np.ndarray[Any, Any]:
    values = random.integers(0, array.bound or 1, array.shape)
    if random.random() < 0.3:
        values = np.sort(values, axis=-1) if values.ndim else values
    return np.where(random.random(array.shape) < 0.3, -1, values) if array.padded else values


def _exact(array: UnfilledTensor, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Small multiples of a quarter, small integers, or truth values."""
    if array.dtype == torch.bool:
        return random.random(array.shape) < (2 if array.positive else 0.6)
    if not (array.dtype.is_floating_point or array.dtype.is_complex):
        low = 1 if array.positive else 0 if array.dtype == torch.uint8 else -3
        return random.integers(low, 4, array.shape)
    quarters = random.integers(2 if array.positive else -8, 9, array.shape) / 4
    return (
        quarters + 1j * random.integers(-8, 9, array.shape) / 4
        if array.dtype.is_complex
        else quarters
    )


def _generic(array: UnfilledTensor, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Magnitudes from a half to one and a half: away from 0, and no two alike."""
    sign = 1 if array.positive else random.choice([-1, 1], array.shape)
    values = np.asarray(sign * random.uniform(0.5, 1.5, array.shape))
    return values + 1j * random.uniform(-1, 1, array.shape) if array.dtype.is_complex else values


def laid_out(tensor: Tensor, layout: str, random: np.random.Generator) -> Tensor:
    """The same values in memory of another shape; gaps hold values that would show."""
    match layout:
        case "permuted" if tensor.dim() > 1:
            order = [int(d) for d in random.permutation(tensor.dim())]
            inverse = [order.index(d) for d in range(tensor.dim())]
            return tensor.permute(order).contiguous().permute(inverse)
        case "stepped" if tensor.dim() > 0:
            wide = _garbage((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1), tensor.dtype)
            view = wide[..., 1::2]
            return view.copy_(tensor)
        case "offset":
            memory = _garbage((tensor.numel() + 3,), tensor.dtype)
            return memory[3:].view(tensor.shape).copy_(tensor)
        case "expanded" if tensor.dim() > 0 and tensor.numel() > 0:
            dim = int(random.integers(tensor.dim()))
            return tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)
        case "conjugated" if tensor.is_complex():
            return tensor.conj().resolve_conj().conj()
        case _:
            return tensor


def _garbage(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(
        shape,
        1
        if dtype == torch.bool
        else float("nan")
        if dtype.is_floating_point or dtype.is_complex
        else 99,
        dtype=dtype,
    )
