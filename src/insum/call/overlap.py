"""Memory that a call writes to: who else lies in it, and that it was written to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def written_to(target: Tensor) -> Tensor:
    """A tensor that a kernel has written to, of which autograd is told."""
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)
    return target


def shares_memory(target: Tensor, values: Iterable[object]) -> bool:
    """Whether one of the values lies in the memory that is written to. By addresses: two storages
    may be made over the same memory, as of one NumPy array.
    """
    start, end = _reach(target)
    for value in values:
        if isinstance(value, Tensor) and value.device == target.device:
            first, last = _reach(value)
            if first < end and start < last:
                return True
    return False


def _reach(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first element to behind its last."""
    first = tensor.data_ptr()
    return first, first + bytes_of(tensor)


def bytes_of(tensor: Tensor) -> int:
    """From a tensor's first element to behind its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride())])
    return (last + 1) * tensor.element_size()
