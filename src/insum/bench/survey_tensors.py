"""What the statements of ``insum bench survey`` are made of."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from insum.bench.data import RandomTensors


@dataclass(frozen=True, eq=False)
class SurveyTensors:
    """Tensors of one dtype, and sizes as they are here: ``n`` rows, ``e`` entries, ``t`` tokens;
    ``sizes``: where given, all of them and all widths are drawn around those that are named.
    """

    draw: RandomTensors
    n: int
    e: int
    t: int
    sizes: random.Random | None = None

    def drawn(self, seed: int | None) -> SurveyTensors:
        """The same with sizes around these, drawn by a seed where there is one."""
        if seed is None:
            return self
        around = replace(self, sizes=random.Random(seed))
        return replace(
            around, n=around.about(self.n), e=around.about(self.e), t=around.about(self.t)
        )

    def about(self, size: int) -> int:
        """A size as it is named, or one between half and twice of it, half of them of eights."""
        if self.sizes is None:
            return size
        found = max(2, round(math.exp(math.log(size) + self.sizes.uniform(-1, 1) * math.log(2))))
        return found // 8 * 8 if found >= 16 and self.sizes.random() < 0.5 else found

    def normal(self, *shape: int) -> Tensor:
        return self.draw.normal(*shape)

    def below(self, limit: int, *shape: int) -> Tensor:
        return (self.draw.chance(*shape) * limit).long().clamp(max=limit - 1)

    def rising(self, limit: int, count: int) -> Tensor:
        return self.below(limit, count).sort().values


def added_rows(index: Tensor, rows: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, index, rows)


def einsum(equation: str, **tensors: Tensor) -> Tensor:
    found: Tensor = torch.einsum(equation, *tensors.values())
    return found
