"""What one of several contributions to a mean counts for."""

from __future__ import annotations

import torch
from torch import Tensor

from insum.lang.types import widened


def counted_in(dtype: torch.dtype) -> torch.dtype:
    """What contributions of a dtype are counted in: half precision does not hold every count, and
    single precision has not the digits of a share of doubles.
    """
    return torch.promote_types(widened(dtype), torch.float32)


def is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def shares_of(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """One over each count, or over 1 where there is nothing, in the dtype of what is averaged; of
    integers in float32.
    """
    kind = dtype if is_inexact(dtype) else counted_in(dtype)
    return counts.clamp(min=1).to(counted_in(dtype)).reciprocal().to(kind)
