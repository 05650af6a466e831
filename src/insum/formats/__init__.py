"""Sparse formats: plain data over dense tensors, how to make and leave them, and which one to
choose.

>>> import insum, torch
>>> A = insum.formats.GroupCOO.from_dense(torch.eye(3), group_size="auto")
>>> A @ torch.arange(3.0).reshape(3, 1)
tensor([[0.],
        [1.],
        [2.]])
"""

from insum.formats.base import FORMATS, SparseFormat
from insum.formats.block import BlockCOO, BlockGroupCOO
from insum.formats.coo import COO
from insum.formats.grouped import ELL, GroupCOO
from insum.formats.groupsize import (
    accesses_by_group_size,
    best_group_size,
    count_accesses,
    count_groups,
    count_padding,
    estimate_group_size,
    neighbouring_powers,
    suggested_group_size,
)
from insum.formats.module import SparseParameter
from insum.formats.picture import draw
from insum.formats.suggest import Suggestion, suggest
from insum.formats.table import NeighborTable
from insum.formats.tune import TunedFormat, tune

__all__ = [
    "COO",
    "ELL",
    "FORMATS",
    "BlockCOO",
    "BlockGroupCOO",
    "GroupCOO",
    "NeighborTable",
    "SparseFormat",
    "SparseParameter",
    "Suggestion",
    "TunedFormat",
    "accesses_by_group_size",
    "best_group_size",
    "count_accesses",
    "count_groups",
    "count_padding",
    "draw",
    "estimate_group_size",
    "neighbouring_powers",
    "suggest",
    "suggested_group_size",
    "tune",
]
