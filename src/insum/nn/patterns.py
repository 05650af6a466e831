"""Modules with constant patterns: coefficients and index arrays that are computed once and move
with the module; mostly they are part of its programs (`insum.constant`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from insum.facts import constant
from insum.nn.irreps import Irreps

Promise: TypeAlias = Callable[[Tensor], Tensor]


def hold(
    module: nn.Module,
    patterns: Sequence[dict[str, Tensor]],
    like: Tensor,
    promise: Promise = constant,
) -> None:
    """A module gets patterns, by the names that they have in its statements. They are kept exact,
    so that coefficients are rounded once, whatever dtypes the module has been in; and they are no
    part of its state.

    Args:
        module: It calls `renew` where it was moved or read.
        patterns: The arrays of each.
        like: Where the module is, and its dtype.
        promise: What statements are promised of the arrays: that they are part of programs, or that
            they do not change.
    """
    vars(module)["_exact"] = list(patterns)
    for number, arrays in enumerate(patterns):
        for name, tensor in arrays.items():
            dtype = like.dtype if tensor.is_floating_point() else None
            module.register_buffer(
                f"{name}{number}", tensor.to(like.device, dtype), persistent=False
            )
    renew(module, promise)


def renew(module: Any, promise: Promise = constant) -> None:
    """Every array anew from the exact pattern."""
    for number, arrays in enumerate(module._exact):
        for name, exact in arrays.items():
            old = getattr(module, f"{name}{number}")
            new = exact.to(old.device, old.dtype)
            setattr(module, f"{name}{number}", new)
            if new.device.type != "meta":
                promise(new)


def arrays_of(module: Any, number: int) -> dict[str, Any]:
    """The arrays of a pattern where the module is."""
    return {name: getattr(module, f"{name}{number}") for name in module._exact[number]}


def mask_of(irreps: Irreps, reached: Container[int]) -> Tensor:
    """1 at the components of terms that are reached, 0 at the others."""
    mask = [torch.full((mul * ir.dim,), float(i in reached)) for i, (mul, ir) in enumerate(irreps)]
    return torch.cat([*mask, torch.ones(0)])


def without_compiled_parts(
    module: nn.Module, state: dict[str, Any], prefix: str, *_: object
) -> None:
    """e3nn keeps Wigner symbols in its states, and MACE its basis; here they are computed."""
    for key in [k for k in state if k.startswith(prefix) and _is_computed(k[len(prefix) :])]:
        del state[key]


def _is_computed(key: str) -> bool:
    return key.startswith("_compiled_main_") or ".U_matrix_" in key or key.endswith("_zeroed")
