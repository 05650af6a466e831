"""Places of the left side that several indices lead to, as one number for each point."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from insum.lang.expr import Affine
from insum.runtime.points import evaluated, from_the_end, variable_grid


def left_places(
    indices: Sequence[Affine],
    shape: Sequence[int],
    over: Sequence[str],
    sizes: Sequence[int],
    values: Mapping[str, Tensor],
    padded: Collection[str],
    wraps: Collection[str],
) -> Tensor:
    """With a dimension for each of the variables ``over``. They count through dimensions of this
    ``shape``, of which each is indexed by one of the ``indices``; -1 where an entry is absent, or
    leads out.

    >>> from insum.lang.parser import parse
    >>> d, c = torch.tensor([0, 1, 1, -1, 5]), torch.tensor([2, 0, 1, 1, 1])
    >>> target = parse("y[d[e],c[e]] = x[e]").target
    >>> left_places(target.indices, (2, 3), ("e",), (5,), {"d": d, "c": c}, ("d",), ())
    tensor([ 2,  3,  4, -1, -1], dtype=torch.int32)
    """
    device = next(iter(values.values())).device
    grid = variable_grid(over, sizes, device)
    total: Tensor | None = None
    there = torch.ones((), dtype=torch.bool, device=device)
    for index, size in zip(indices, shape, strict=True):
        place, present = evaluated(index, values, grid, device, padded, wraps)
        place = from_the_end(index, place, size, wraps)
        there = there & present & (place >= 0) & (place < size)
        total = place if total is None else total * size + place
    assert total is not None
    dtype = torch.int32 if math.prod(shape) < 2**31 else torch.int64
    return torch.where(there, total, -1).to(dtype).expand(*sizes).contiguous()


def dim_of_places(shape: Sequence[int], dim: int, device: torch.device) -> Tensor:
    """Of each place in dimensions of this shape the number along one of them.

    >>> dim_of_places((2, 3), 1, torch.device("cpu"))
    tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    """
    count = math.prod(shape)
    places = torch.arange(count, device=device)
    found = places // math.prod(shape[dim + 1 :]) % max(1, shape[dim])
    return found.to(torch.int32 if count < 2**31 else torch.int64)
