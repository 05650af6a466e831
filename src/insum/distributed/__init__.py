"""Statements, formats and layers over several processes, on torch.distributed."""

from insum.distributed import dispatch as dispatch  # the ops learn of DTensors
from insum.distributed.checkpoint import load, save
from insum.distributed.dividing import (
    collect_rows,
    distribute_rows,
    partition,
    partition_edges,
)
from insum.distributed.explained import PlacedExplanation
from insum.distributed.graphs import gcn_norm
from insum.distributed.parallel import SparseColwise, SparseRowwise
from insum.distributed.partition_costs import PartitionExplanation, explain, plan
from insum.distributed.partitioned import Partitioned

__all__ = [
    "PartitionExplanation",
    "Partitioned",
    "PlacedExplanation",
    "SparseColwise",
    "SparseRowwise",
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
