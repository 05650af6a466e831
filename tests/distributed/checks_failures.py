"""A process that raises does not leave the others waiting for ever."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist


def check_a_rank_that_raises_lets_the_others_raise() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    begin = time.perf_counter()
    try:
        if dist.get_rank() == 1:
            raise ValueError("one rank has other data")
        dist.all_reduce(torch.ones(3), group=group)
    except (RuntimeError, ValueError):
        assert time.perf_counter() - begin < 20
        return
    raise AssertionError("nothing was raised")
