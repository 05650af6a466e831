"""A process that raises does not leave the others waiting for ever."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import insum
from distributed.checks_halo import drawn, raised
from insum.distributed import distribute_rows, partition
from insum.formats import COO


def patient_group() -> dist.ProcessGroup:
    """Whoever is slow while a check is prepared is waited for; see `lose_patience`."""
    return dist.new_group(timeout=timedelta(seconds=10))


def lose_patience(group: dist.ProcessGroup) -> None:
    """From now on a second is waited; torch before it had this waits as long as it did."""
    getattr(group, "set_timeout", lambda _: None)(timedelta(seconds=1))


def check_waiting_ends_with_the_time_of_the_group() -> None:
    group = patient_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    A = partition(COO.from_dense(drawn(40, 40, 0.5)), mesh)
    x = distribute_rows(torch.ones(40, 2, dtype=torch.float64), A)
    lose_patience(group)
    if dist.get_rank():
        assert "init_process_group(timeout=...)" in raised(lambda: A @ x)
    dist.barrier()


def check_a_rank_that_raises_lets_the_others_raise() -> None:
    """One rank has an index out of range; the others wait for its part of the sum as long as their
    group says.
    """
    group = patient_group()
    mesh, ranks = DeviceMesh.from_group(group, "cpu"), dist.get_world_size()
    places = torch.zeros(4 * ranks, dtype=torch.int64)
    places[4] = 9  # of the second rank
    D = distribute_tensor(places, mesh, [Shard(0)])
    x = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    lose_patience(group)
    begin = time.perf_counter()
    error: Exception | None = None
    try:
        insum.insum("y[] = x[D[p]]", D=D, x=x).full_tensor()
    except (insum.IndexRangeError, RuntimeError) as raised_here:
        error = raised_here
    assert isinstance(error, insum.IndexRangeError) == (dist.get_rank() == 1), error
    assert error is not None and time.perf_counter() - begin < 150
