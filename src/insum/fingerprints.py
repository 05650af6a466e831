"""A number that tells whether the values of a tensor on the CPU are still the same."""

from __future__ import annotations

import torch
from torch import Tensor

#: How many words at a time are multiplied with numbers, and those, drawn when they are needed.
_CHUNK = 1 << 16
_drawn: tuple[Tensor, Tensor] | None = None


def fingerprint(tensor: Tensor) -> int:
    """A number that other values have with a probability of at most 2**-32."""
    flat, rest = _as_words(tensor.detach())
    total, count = tensor.numel() + rest, flat.numel()
    for start in range(0, count, _CHUNK):
        length = min(_CHUNK, count - start)
        chunk = flat if length == count else flat.narrow(0, start, length)
        mixed = int(torch.dot(chunk, _weights(0, length)))
        if tensor.dtype is not torch.int64:
            # of a product with the last bits of a word little is left: of the sign of a number
            # nothing where an even number of them change
            mixed += int(torch.dot(chunk >> 32, _weights(1, length)))
        total = (total * 0x9E3779B97F4A7C15 + mixed) % 2**64
    return total


def _as_words(tensor: Tensor) -> tuple[Tensor, int]:
    """The bytes of a tensor, eight at a time, and what is left of them as a number."""
    flat = tensor.reshape(-1)
    if flat.dtype is torch.int64:
        return flat, 0
    flat = flat.resolve_conj().resolve_neg()  # memory is read as it is
    # a single element may have any stride and be contiguous
    if flat.stride(0) != 1 or flat.storage_offset() * flat.itemsize % 8:
        flat = flat.new_empty(flat.numel()).copy_(flat)
    whole = flat.numel() * flat.itemsize // 8 * 8 // flat.itemsize
    rest = flat[whole:].view(torch.uint8).tolist()
    return flat[:whole].view(torch.int64), int.from_bytes(bytes(rest), "little")


def _weights(which: int, count: int) -> Tensor:
    """Odd numbers, of which there are two for each word."""
    global _drawn
    if _drawn is None:
        generator = torch.Generator().manual_seed(0x1A5A)
        with torch.inference_mode(False):
            drawn = torch.randint(
                -(2**62), 2**62, (2, _CHUNK), generator=generator, device="cpu"
            ).bitwise_or_(1)
            _drawn = drawn[0], drawn[1]
    return _drawn[which].narrow(0, 0, count)
