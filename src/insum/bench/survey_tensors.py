"""What the statements of ``insum bench survey`` are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insum.bench.data import RandomTensors


@dataclass(frozen=True, eq=False)
class SurveyTensors:
    """Tensors of one dtype, and sizes as they are here: ``n`` rows, ``e`` entries, ``t`` tokens."""

    draw: RandomTensors
    n: int
    e: int
    t: int

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
