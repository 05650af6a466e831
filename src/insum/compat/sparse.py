"""PyTorch's own sparse tensors, and its kernels for them, which benchmarks compare with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor


def bsr_kernels() -> Any:
    """PyTorch's Triton kernels for BSR matrices, as a namespace of ``mm``, ``sampled`` and
    ``minimize`` (their tuner); a text says why they are not there.
    """
    try:
        from torch.sparse import _triton_ops as ops
        from torch.sparse import _triton_ops_meta as meta

        return SimpleNamespace(
            mm=ops.bsr_dense_addmm, sampled=ops.sampled_addmm, minimize=meta.minimize
        )
    except (ImportError, AttributeError) as error:
        return f"this torch has no Triton kernels for BSR ({error})"


def indices_of(x: Tensor) -> Tensor:
    """The indices of a COO tensor as they were given: in any order, and never looked at."""
    found: Tensor = x._indices()
    return found
