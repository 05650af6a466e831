"""Products over a matrix whose rows are on four ranks, beside the same in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import insum
from insum.distributed import Partitioned, collect_rows, distribute_rows, partition
from insum.formats import COO, GroupCOO, SparseFormat

GRAPHS = Path(__file__).parents[3] / "shared" / "data" / "graphs"
NAMES = ("cora", "citeseer", "c-46", "pubmed")
PRODUCT = "Y[m,n] = A[m,k] * X[k,n]"


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def graph(name: str) -> COO:
    """A real graph where it is at hand, its first rows and columns; else one that is drawn."""
    file = GRAPHS / f"{name}.npz"
    torch.manual_seed(NAMES.index(name))
    if file.exists():
        held = np.load(file)
        rows = np.repeat(np.arange(len(held["indptr"]) - 1), np.diff(held["indptr"]))
        pairs = torch.from_numpy(np.stack([rows, held["indices"]]).astype(np.int64))
        nodes = min(800, int(held["shape"].max()))
        pairs = pairs[:, (pairs < nodes).all(0)]
    else:
        nodes = 500
        near = torch.randint(nodes, (2, 3000))
        near[1, :2000] = (near[0, :2000] + torch.randint(20, (2000,))) % nodes
        pairs = near.unique(dim=1)
    values = torch.randn(pairs.shape[1], dtype=torch.float64)
    return COO.from_entries(tuple(pairs), values, (nodes, nodes))


def gradients(A: SparseFormat | Partitioned, X: Tensor, weight: Tensor) -> list[Tensor]:
    """Value, first and second gradients for the dense factor and the values."""
    held = A.values if isinstance(A, Partitioned) else (A.values,)
    Y = insum.einsum(PRODUCT, A=A, X=X)
    first = torch.autograd.grad(
        (Y * weight).sin().sum(), (X, *held), create_graph=True, materialize_grads=True
    )
    second = torch.autograd.grad(
        sum(g.square().sum() for g in first), (X, *held), materialize_grads=True
    )
    return [t.detach() for t in (Y, *first, *second)]


def dense_of(A: Partitioned, values: list[Tensor]) -> Tensor:
    """Numbers at the entries of a partition, of all ranks, as a dense matrix in the old order."""
    rows, columns, found = A.with_values(tuple(values)).entries()
    whole = torch.zeros(A.shape, dtype=torch.float64).index_put((rows, columns), found)
    dist.all_reduce(whole)
    return whole


def check_halo_products_have_gradients_of_second_order() -> None:
    for name, kind in zip(NAMES, ("COO", "ELL", "GroupCOO", "COO")):
        A = graph(name)
        torch.manual_seed(7)
        X, weight = (torch.randn(A.shape[0], 3, dtype=torch.float64) for _ in range(2))
        alone = A.detach().requires_grad_()
        want = gradients(alone, X.clone().requires_grad_(), weight)
        for send in ("fewest", "rows"):
            part = partition(A.to_format(kind), line(), send=send).requires_grad_()
            mine = [distribute_rows(t, part) for t in (X, weight)]
            got = gradients(part, mine[0].requires_grad_(), mine[1])
            for place in (0, 1, 5):
                other = want[{0: 0, 1: 1, 5: 3}[place]]
                torch.testing.assert_close(collect_rows(got[place], part), other)
            for place, number in ((2, 2), (6, 4)):
                dense = alone.with_values(want[number]).to_dense()
                torch.testing.assert_close(dense_of(part, got[place : place + 3]), dense)
