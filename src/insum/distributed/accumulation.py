"""``+=``, ``max=`` and ``min=`` into a DTensor, which stays where it is: the update comes to it,
and every rank combines what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from insum.compat.placed import Wrapper, for_each_rank, local_of
from insum.distributed.local import sent
from insum.errors import UnsupportedError

_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+=": torch.add,
    "max=": torch.maximum,
    "min=": torch.minimum,
}
#: What may be pending while ranks combine by themselves: extrema of extrema come in any order, and
#: adding the same number everywhere moves extrema and means by it.
_PENDING = {
    "+=": frozenset({"sum", "avg", "max", "min"}),
    "max=": frozenset({"max", "min"}),
    "min=": frozenset({"max", "min"}),
}


def accumulated(operator: str, initial: DTensor, update: DTensor) -> Tensor:
    """The result of accumulating, placed as ``initial`` is, without a history."""
    placements = tuple(initial.placements)
    places = [_beside(own, found) for own, found in zip(placements, update.placements)]
    local = local_of(sent(update, places))
    here = initial.device_mesh.get_coordinate()
    assert here is not None
    for own, place, rank in zip(placements, places, here):
        if own.is_partial("sum") and not place.is_partial():
            local = for_each_rank(_on_first)(local, rank)  # a sum has it once
    combined = _COMBINED[operator](local_of(initial), local).to(initial.dtype)
    return Wrapper(initial.device_mesh, placements, initial.shape)(combined)


def _beside(own: Placement, found: Placement) -> Placement:
    """Where an update is needed."""
    return own if own == found or not own.is_partial() else Replicate()


def _on_first(local: Tensor, rank: int) -> Tensor:
    return local if rank == 0 else torch.zeros_like(local)


def check_pending(statement: str, name: str, operator: str, placements: Sequence[Any]) -> None:
    """Refuse to write into what is pending in a way that ranks cannot follow by themselves."""
    for place in placements:
        if place.is_partial() and place.reduce_op not in _PENDING[operator]:
            raise UnsupportedError(
                f"{name} is {place!r}: {operator} needs the numbers that its ranks have in common",
                statement=statement,
                expected="Replicate or Shard",
                remedy=f"{name}={name}.redistribute(placements=[...]) with Replicate() or Shard()",
            )
