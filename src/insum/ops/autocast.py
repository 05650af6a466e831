"""What autocast does to tensors: floating ones are cast, float64 excepted; what gives the output
its dtype is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from insum.compat.contexts import set_grad
from insum.lang.bind import Value

AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def lowered(
    target: str, values: Mapping[str, Value], leaves: dict[str, Tensor] | None = None
) -> dict[str, Value]:
    """The values of a statement as autocast has them; that of its ``target`` stays. Leaves that a
    gradient is asked of are cast without being recorded, and put into ``leaves``, where that is
    given: gradients are being recorded then.
    """
    found, known, dtype = dict(values), "", None
    for name, value in values.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or name == target:
            continue
        device = value.device.type
        if device != known:
            known = device
            on = device in AUTOCAST_KEYS and torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if on else None
        if dtype is None or value.dtype is dtype or value.dtype is torch.float64:
            continue
        if leaves is None or not (value.requires_grad and value.is_leaf) or value.is_inference():
            found[name] = value.to(dtype)  # of one of inference mode no versions are counted
            continue
        leaves[name] = value
        set_grad(False)
        try:
            found[name] = value.to(dtype)
        finally:
            set_grad(True)
    return found


def lowered_tensor(tensor: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    """One tensor of an op that autocasts on a device."""
    eligible = (
        tensor.is_floating_point()
        and tensor.dtype != torch.float64
        and tensor.device.type == device
    )
    return tensor.to(dtype) if eligible else tensor
