"""Index tensors as compiled graphs have them: parts of others, with negative values that count from
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

#: Selects of the dimensions of a tensor: which, and at which place.
Selects: TypeAlias = tuple[tuple[int, int], ...]


def written(selects: Selects) -> list[str]:
    """Selects as text, for the specification of an op; `read` is the reverse."""
    return [f"{dim}.{place}" for dim, place in selects]


def read(texts: Sequence[str]) -> Selects:
    return tuple(
        (int(dim), int(place)) for dim, _, place in (text.partition(".") for text in texts)
    )


def select(base: Tensor, selects: Selects) -> Tensor:
    """``base`` at fixed places of some dimensions."""
    for dim, place in reversed(selects):
        base = base.select(dim, place)
    return base


def wrapped(tensor: Tensor, size: int) -> Tensor:
    """Negative values counted from the end, in a dtype that holds them; what is out of range stays
    so, and does not become -1, which marks an absent entry elsewhere.
    """
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.int32))
    counted = torch.where(wide < 0, wide + size, wide)
    return torch.where(counted < 0, size, counted)
