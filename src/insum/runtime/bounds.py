"""One kernel that looks whether all values of an index tensor are in range, and counts negative
ones from the end. The program does not wait for it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from insum.codegen.emit import Kernel
from insum.runtime import launch

_BLOCK = 1024
_SOURCE = """@triton.jit
def {name}(index_ptr, result_ptr, flag_ptr, count, limit):
    at = tl.program_id(0).to(tl.int64) * {block} + tl.arange(0, {block})
    there = at < count
    value = tl.load(index_ptr + at, mask=there, other=0).to(tl.int64)
{body}    outside = there & ((value < 0) | (value >= limit))
    tl.store(flag_ptr + at * 0, 0, mask=outside)
"""
_WRAP = """    value = tl.where(value < 0, value + limit, value)
    tl.store(result_ptr + at, value, mask=there)
"""


@functools.cache
def _function(wraps: bool) -> Any:
    name = "insum_wrapped" if wraps else "insum_bounds"
    source = _SOURCE.format(name=name, block=_BLOCK, body=_WRAP if wraps else "")
    return launch.load(
        Kernel(name, source, ("index_ptr", "result_ptr", "flag_ptr", "count", "limit")),
        '"""Index tensors against their range."""',
    )


#: Compiled kernels by what Triton compiles arguments for.
_compiled: dict[Any, Any] = {}


def is_for(tensor: Tensor) -> bool:
    """Whether the kernel can look at a tensor."""
    if (
        not tensor.is_cuda
        or not tensor.is_contiguous()
        or tensor.dtype not in (torch.int64, torch.int32)
        or launch.available()
    ):
        return False
    return tensor.device in _flags or not torch.cuda.is_current_stream_capturing()


_flags: dict[torch.device, Tensor] = {}


def flag(device: torch.device) -> Tensor:
    """1 while no index was out of range. It never needs to be set again: whoever finds a 0 ends the
    process' use of the device.
    """
    if device not in _flags:
        _flags[device] = torch.ones((), dtype=torch.int32, device=device)
    return _flags[device]


def look(tensor: Tensor, limit: int, wraps: bool, found: Tensor) -> Tensor:
    """Sets ``found`` to 0 where a value is out of range; returns the tensor, with negative values
    counted from the end where ``wraps``.
    """
    result = torch.empty(tensor.shape, dtype=torch.int64, device=tensor.device) if wraps else tensor
    count = tensor.numel()
    numbers, pointers = (count, limit), (tensor, result, found)
    programs = math.ceil(count / _BLOCK)
    addresses = [p.data_ptr() for p in pointers]
    kind = (
        wraps,
        tensor.dtype,
        tensor.device,
        *launch.kind_of(*numbers),
        *(a % 16 == 0 for a in addresses),
    )
    compiled = _compiled.get(kind)
    if compiled is None:
        made = _function(wraps)[(programs,)](*pointers, *numbers, num_warps=4)
        if made is not None:  # the interpreter makes none
            _compiled[kind] = made
    else:
        launch.runner_of(compiled, programs)([*addresses, *numbers])
    return result
