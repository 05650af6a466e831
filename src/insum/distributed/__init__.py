"""Sparse products over several ranks of `torch.distributed`."""

from insum.distributed.partition import (
    collect_rows,
    distribute_rows,
    partition,
    partition_edges,
)
from insum.distributed.partitioned import Partitioned

__all__ = [
    "Partitioned",
    "collect_rows",
    "distribute_rows",
    "partition",
    "partition_edges",
]
