"""What it takes to bring tensors from one placement to another, in bytes that a rank receives; and
the choice of a way by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from insum.distributed.placements import SharedWork

#: Dtypes that every backend of torch.distributed adds up and compares.
_REDUCIBLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64}
)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor as it is held: the bytes of all of it, and its placements."""

    nbytes: int
    placements: tuple[Placement, ...]

    def share(self, dim: int, ranks: Sequence[int]) -> float:
        """Bytes of what the ranks of one dimension of the mesh have between them."""
        others = (n for d, n in enumerate(ranks) if d != dim and self.placements[d].is_shard())
        return self.nbytes / math.prod(others)


def moved_bytes(before: Placement, after: Placement, nbytes: float, ranks: int) -> float:
    """What a rank receives when a tensor of so many bytes goes to another placement.

    >>> moved_bytes(Shard(0), Replicate(), 1000, 4)
    750.0
    >>> moved_bytes(Replicate(), Shard(0), 1000, 4)
    0.0
    """
    others = (ranks - 1) / ranks
    if before == after or _is_whole(before):
        return math.inf if before != after and after.is_partial() else 0.0
    if after.is_partial():
        return math.inf
    if _is_cut(before):
        return nbytes * others / (ranks if _is_cut(after) else 1)
    # what is pending: everyone gets a part of every sum, then all of them
    return nbytes * others * (1 if _is_cut(after) else 2)


def _is_whole(placement: Placement) -> bool:
    return type(placement) is Replicate


def _is_cut(placement: Placement) -> bool:
    return type(placement) is Shard


def choose(
    found: Sequence[SharedWork],
    held: Mapping[str, HeldTensor],
    ranks: Sequence[int],
    dtype: torch.dtype,
) -> tuple[SharedWork, ...]:
    """For each dimension of a mesh the way that moves the fewest bytes, then the fewest tensors.
    ``dtype`` is that of the result: some cannot be left partial.
    """
    able = [way for way in found if _can_be(way.output, dtype)]
    return tuple(
        min(able, key=lambda way: _cost(way, held, dim, ranks)) for dim in range(len(ranks))
    )


def _can_be(output: Placement, dtype: torch.dtype) -> bool:
    if not isinstance(output, Partial):
        return True
    return dtype in _REDUCIBLE or output.reduce_op == "sum" and dtype.is_complex


def _cost(
    way: SharedWork, held: Mapping[str, HeldTensor], dim: int, ranks: Sequence[int]
) -> tuple[float, int]:
    total, changed = 0.0, 0
    for name, after in way.inputs.items():
        one = held[name]
        before = one.placements[dim]
        total += moved_bytes(before, after, one.share(dim, ranks), ranks[dim])
        changed += before != after
    return total, changed
