"""Statements, formats and layers over several processes, on torch.distributed."""

from insum.distributed import dispatch as dispatch  # the ops learn of DTensors
from insum.distributed.explained import PlacedExplanation
from insum.distributed.parallel import SparseColwise, SparseRowwise

__all__ = [
    "PlacedExplanation",
    "SparseColwise",
    "SparseRowwise",
]
