"""The routes through TorchInductor: a program of torch operations as people write it, or a statement by ``settings.backend = "inductor"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import insum


def compiled(plain: Callable[..., Tensor], call: Callable[..., Any], native: bool | None) -> tuple[Callable[..., Any], str]:
    """The route for one application, and a note that says what is compiled; ``native`` is for statements, None for the program in torch operations."""
    if native is None:
        torch.compiler.reset()
        return torch.compile(plain, dynamic=False), "gather, matmul and scatter written in torch operations"

    def run(*arguments: Any) -> Any:
        with insum.settings(backend="inductor", native_matmul=native):
            return call(*arguments)

    return run, f"settings.backend='inductor', native_matmul={native}"
