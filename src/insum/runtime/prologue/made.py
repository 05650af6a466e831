"""What a recipe makes of index tensors: arrays, and numbers, which may still be on their way from
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from insum.facts import Coming
from insum.plan.questions import Summary


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Arrays by the names that recipes give them, numbers, and what plans may know."""

    arrays: Mapping[str, Tensor]
    counts: Mapping[str, int]
    summary: Summary = Summary()


@dataclass(slots=True, eq=False)
class Awaited:
    """The same while numbers are still on the device. They are sent for when they are first asked
    for: ``early``, where there is one, is enough for whoever needs none of them.
    """

    arrays: Mapping[str, Tensor]
    numbers: Tensor
    finish: Callable[[Sequence[int]], Made]
    early: Made | None = None
    coming: Coming | None = None

    def arrived(self, *, wait: bool) -> Made | None:
        coming = self.coming = self.coming or Coming(self.numbers)
        return self.finish(coming.numbers()) if wait or coming.is_there() else None


Result: TypeAlias = Made | Awaited


def awaited(
    arrays: Mapping[str, Tensor],
    numbers: Sequence[Tensor],
    finish: Callable[[Sequence[int]], Made],
    early: Made | None = None,
) -> Result:
    """What is made of arrays and numbers on the device: at once on the CPU, else when the numbers
    have arrived.
    """
    together = torch.stack([n.reshape(()).long() for n in numbers])
    if together.is_cuda:
        return Awaited(arrays, together, finish, early)
    return finish(together.tolist())
