"""Sparse products over several ranks of `torch.distributed`."""

from insum.distributed.checkpoint import load, save
from insum.distributed.costs import PartitionExplanation, explain, plan
from insum.distributed.dividing import (
    collect_rows,
    distribute_rows,
    partition,
    partition_edges,
)
from insum.distributed.graphs import gcn_norm
from insum.distributed.partitioned import Partitioned

__all__ = [
    "PartitionExplanation",
    "Partitioned",
    "collect_rows",
    "distribute_rows",
    "explain",
    "gcn_norm",
    "load",
    "partition",
    "partition_edges",
    "plan",
    "save",
]
