"""A partition on one rank that sends rows and sums to itself: every way of a product, without a
second process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from insum.distributed.agreement import Turns
from insum.distributed.exchange import RowExchange
from insum.distributed.partitioned import Partitioned, RankTraffic
from insum.formats import COO, GroupCOO, SparseFormat


def to_itself(A: COO, mesh: DeviceMesh) -> Partitioned:
    """Of the four quarters of a matrix two are its own; one waits for rows, one makes sums."""
    (rows, columns), shape = (c.long() for c in A.indices), A.shape
    low, left = rows < shape[0] // 2, columns < shape[1] // 2
    group, turns = mesh.get_group(), Turns("to itself", 0, 1)

    def exchange(which: Tensor, length: int) -> tuple[RowExchange, Tensor]:
        found = which.unique()
        place = torch.full((length,), -1, device=which.device)
        place[found] = torch.arange(len(found), device=which.device)
        count = (len(found),)
        return RowExchange(found, found, count, count, group, turns, True), place

    def part(kind: type[SparseFormat], here: Tensor, r: Tensor, c: Tensor, sides: tuple[int, int]):
        values = None if A.values is None else A.values[here]
        return kind.from_entries((r[here], c[here]), values, sides)

    far, out = low & ~left, ~low & left
    coming, column_place = exchange(columns[far], shape[1])
    summed, row_place = exchange(rows[out], shape[0])
    return Partitioned(
        part(COO, ~far & ~out, rows, columns, shape),
        part(GroupCOO, far, rows, column_place[columns], (shape[0], coming.taken)),
        part(GroupCOO, out, row_place[rows], columns, (summed.taken, shape[1])),
        coming,
        summed,
        shape,
        (0, shape[0]),
        (0, shape[1]),
        None,
        mesh,
        (RankTraffic(shape[0], 0, 0, 0, 0, 0, 0, 0),),
        "nonzeros",
        "fewest",
    )


def one_rank(backend: str = "gloo") -> DeviceMesh:
    """A mesh of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return DeviceMesh.from_group(dist.group.WORLD, "cuda" if backend == "nccl" else "cpu")
