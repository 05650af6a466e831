"""What reads or writes beside a tensor is found, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.interpreter


@triton.jit
def copied(source, target, first, last, OPERATION: tl.constexpr):
    at = first + tl.arange(0, 8)
    if OPERATION == "reads":
        tl.store(target + tl.arange(0, 8), tl.load(source + at, mask=at < last, other=0))
    elif OPERATION == "writes":
        tl.store(target + at, tl.load(source + tl.arange(0, 8)), mask=at < last)
    else:
        tl.atomic_add(target + at, tl.load(source + tl.arange(0, 8)), mask=at < last)


def tensors() -> tuple[Tensor, Tensor]:
    """Parts of one that is larger on both sides: memory is there, and is not theirs."""
    whole = torch.zeros(2, 64)
    return whole[0, 16:32], whole[1, 16:32]


@pytest.mark.parametrize("operation", ["reads", "writes", "adds"])
@pytest.mark.parametrize(("first", "last"), [(-1, 16), (9, 17), (12, 100), (-40, 16)])
def test_places_beside_a_tensor_are_found(operation: str, first: int, last: int) -> None:
    with pytest.raises(Exception, match=rf"copied {operation} \d+ bytes"):
        copied[(1,)](*tensors(), first, last, operation)


@pytest.mark.parametrize("operation", ["reads", "writes", "adds"])
@pytest.mark.parametrize(("first", "last"), [(0, 16), (8, 16), (12, 16), (500, 16)])
def test_places_inside_and_masked_ones_are_not(operation: str, first: int, last: int) -> None:
    copied[(1,)](*tensors(), first, last, operation)
