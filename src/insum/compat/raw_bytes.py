"""The bytes of a tensor on the CPU, read and compared without an op of torch's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor


def _comparison() -> Callable[[int, bytes, int], int] | None:
    """C's own, or None where it is not found by this name."""
    try:
        found: Any = ctypes.CDLL(None).memcmp
        found.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        found.restype = ctypes.c_int
        usable = found(ctypes.addressof(ctypes.create_string_buffer(b"ab")), b"ab", 2) == 0
    except (AttributeError, OSError, TypeError):
        return None
    return found if usable else None


_compare = _comparison()


def bytes_of(tensor: Tensor) -> bytes | None:
    """A copy of what a tensor holds; None where that is not one piece of memory, or is read as
    something else, or could not be compared.
    """
    if _compare is None or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        return None
    try:
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
    except RuntimeError:  # a tensor of tensors
        return None


def has_bytes(tensor: Tensor, wanted: bytes) -> bool:
    """Whether a tensor of the same shape, strides and dtype holds these bytes, and is read so."""
    assert _compare is not None
    same = _compare(tensor.data_ptr(), wanted, len(wanted)) == 0
    return same and not tensor.is_neg() and not tensor.is_conj()
