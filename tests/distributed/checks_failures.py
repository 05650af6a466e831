"""A process that raises does not leave the others waiting for ever."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import insum


def check_a_rank_that_raises_lets_the_others_raise() -> None:
    """One rank has an index out of range; the others wait for its part of the sum as long as their
    group says.
    """
    group = dist.new_group(timeout=timedelta(seconds=1))
    mesh, ranks = DeviceMesh.from_group(group, "cpu"), dist.get_world_size()
    places = torch.zeros(4 * ranks, dtype=torch.int64)
    places[4] = 9  # of the second rank
    D = distribute_tensor(places, mesh, [Shard(0)])
    x = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    begin = time.perf_counter()
    raised: Exception | None = None
    try:
        insum.insum("y[] = x[D[p]]", D=D, x=x).full_tensor()
    except (insum.IndexRangeError, RuntimeError) as error:
        raised = error
    assert isinstance(raised, insum.IndexRangeError) == (dist.get_rank() == 1), raised
    assert raised is not None and time.perf_counter() - begin < 30
