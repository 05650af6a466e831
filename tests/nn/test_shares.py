"""Means of layers have the digits of what is averaged, whatever its dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from insum.nn import GlobalPool, SparseAvgPool1d, SparseTensor, adjacency, propagate, voxelize
from insum.nn.relations import _shares

VALUES = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64)
PLACES = torch.tensor([[0, 0], [0, 1], [0, 2]])
EDGES = torch.tensor([[0, 1, 2], [0, 0, 0]])


def sequence(values: Tensor) -> SparseTensor:
    return SparseTensor(PLACES, values, ndim=1)


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "all voxels": lambda values: GlobalPool("mean")(sequence(values)),
    "voxels under a kernel": lambda values: SparseAvgPool1d(3)(sequence(values)).features,
    "points of a voxel": lambda values: voxelize(torch.rand(3, 3), 2.0, values).features,
    "edges": lambda values: propagate(EDGES, values, None, "mean")[:1],
    "rows of a matrix": lambda values: propagate(
        adjacency(EDGES, num_nodes=3), values, None, "mean"
    )[:1],
}


@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_in_double_precision(mean: Callable[[Tensor], Tensor]) -> None:
    assert_close(mean(VALUES), VALUES.mean(0, keepdim=True), rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", [name for name in MEANS if name != "edges"])
def test_of_integers(name: str) -> None:
    assert_close(MEANS[name]((VALUES * 3).long()), torch.tensor([[8.0]]))


def test_of_more_edges_than_half_precision_counts() -> None:
    many = torch.zeros(70_000, dtype=torch.int64)
    found = _shares(many, many, 1, 1, True, torch.float16)
    assert_close(found, torch.full((70_000,), 1 / 70_000, dtype=torch.float16))
