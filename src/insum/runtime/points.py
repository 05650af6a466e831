"""Index expressions, evaluated at many points at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from insum.lang.bind import Value
from insum.lang.expr import Access, Affine, Var


def variable_grid(
    vars: Sequence[str], sizes: Sequence[int], device: torch.device | None = None
) -> dict[str, Tensor]:
    """The numbers that each variable takes, along a dimension of its own.

    >>> variable_grid(("i", "j"), (2, 3))["j"]
    tensor([[0, 1, 2]])
    """
    return {
        v: torch.arange(size, device=device).reshape(
            [-1 if k == at else 1 for k in range(len(vars))]
        )
        for at, (v, size) in enumerate(zip(vars, sizes, strict=True))
    }


def evaluated(
    index: Affine,
    values: Mapping[str, Value],
    grid: Mapping[str, Tensor],
    device: torch.device,
    padded: Collection[str],
    wraps: Collection[str] = (),
) -> tuple[Tensor, Tensor]:
    """The value of an index expression at the points of a grid, and where none of the tensors in it
    is absent. ``wraps``: tensors in which negative values count from the end of what they index.

    >>> from insum.lang.parser import parse
    >>> (index,) = parse("y[2*d[e]] = x[e]").target.indices
    >>> grid, d = variable_grid(("e",), (3,)), torch.tensor([4, -1, 0])
    >>> evaluated(index, {"d": d}, grid, d.device, ("d",))
    (tensor([ 8, -2,  0]), tensor([ True, False,  True]))
    """
    total = torch.full((), index.offset, device=device)
    present = torch.ones((), dtype=torch.bool, device=device)
    for by, atom in index.terms:
        if isinstance(atom, Var):
            total = total + by * grid[atom.name]
            continue
        tensor, places = torch.as_tensor(values[atom.tensor]).long(), []
        for i, size in zip(atom.indices, tensor.shape, strict=True):
            place, there = evaluated(i, values, grid, device, padded, wraps)
            place = from_the_end(i, place, size, wraps)
            # of a place that is out of range itself another use complains
            there = there & (place >= 0) & (place < size)
            present = present & there
            places.append(torch.where(there, place, 0))
        value = tensor[tuple(places)].to(device)
        present = present & (value != -1) if atom.tensor in padded else present
        total = total + by * value
    return total, present


def from_the_end(index: Affine, place: Tensor, size: int, wraps: Collection[str]) -> Tensor:
    """Places in a dimension of this size, negative ones counted from its end where they do."""
    if isinstance(index.atom, Access) and index.atom.tensor in wraps:
        return torch.where(place < 0, place + size, place)
    return place
