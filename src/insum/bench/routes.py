"""Routes that several benchmarks take: the sparse product, and what goes through TorchInductor.

The latter is a program of torch operations as people write it, or a statement by ``settings.backend
= "inductor"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import insum
from insum.bench.measure import ReadyContender, autograd
from insum.bench.records import BOTH
from insum.formats import SparseFormat


def compiled(
    plain: Callable[..., Tensor], call: Callable[..., Any], native: bool | None
) -> tuple[Callable[..., Any], str]:
    """The route for one application, and a note that says what is compiled; ``native`` is for
    statements, None for the program in torch operations.
    """
    if native is None:
        torch.compiler.reset()
        return torch.compile(
            plain, dynamic=False
        ), "gather, matmul and scatter written in torch operations"

    def run(*arguments: Any) -> Any:
        with insum.settings(backend="inductor", native_matmul=native):
            return call(*arguments)

    return run, f"settings.backend='inductor', native_matmul={native}"


def sparse_product(a: SparseFormat, b: Tensor, upstream: Tensor, direction: str) -> ReadyContender:
    """The one line; with gradients, of the stored values and of the dense matrix."""
    assert a.values is not None
    filled = a.with_values if direction == BOTH else lambda values: a
    return autograd(
        lambda v, b: insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=filled(v), B=b),
        (a.values, b),
        upstream,
        direction,
    )
