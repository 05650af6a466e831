"""Edges with one loop at every node, on the device and without waiting: what graph convolutions
normalise over.

A loop among the edges hands its weight to the loop that its node gets; the last one does, where
there are several. Ends of edges that are no nodes are reported, and such edges have no weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from insum.codegen.arguments import CALL, CLAIM, FLAGS, RECORD
from insum.codegen.checking import REPORT
from insum.compat.tensors import empty
from insum.runtime.handwritten.kernel import BLOCK, Handwritten, blocks
from insum.runtime.record import Explain, record_of

_ENDS = f"""@triton.jit
def insum_ends(edges_ptr, edge, edges, end_stride, edge_stride, nodes):
    there = edge < edges
    at = edges_ptr + edge * edge_stride
    source = tl.load(at, mask=there, other=0).to(tl.int64)
    target = tl.load(at + end_stride, mask=there, other=0).to(tl.int64)
    inside = there & (source >= 0) & (source < nodes) & (target >= 0) & (target < nodes)
    return tl.where(inside, source, 0), tl.where(inside, target, 0), inside


@triton.jit
def insum_place():
    return tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})


"""
_COUNT = Handwritten(
    "insum_count_edges",
    REPORT
    + _ENDS
    + """@triton.jit
def insum_count_edges(
    edges_ptr, counts_ptr, claim_at, record_at, flags_at, edges: "i64", end_stride: "i64",
    edge_stride: "i64", nodes: "i64", apart: "i64", call: "i64",
):
    edge = insum_place()
    there = edge < edges
    at = edges_ptr + edge * edge_stride
    source = tl.load(at, mask=there, other=0).to(tl.int64)
    target = tl.load(at + end_stride, mask=there, other=0).to(tl.int64)
    number = call.to(tl.int32)
    bad = there & ((source < 0) | (source >= nodes))
    insum_report(bad, edge, source, 0, claim_at, record_at, flags_at, number)
    bad = there & ((target < 0) | (target >= nodes))
    insum_report(bad, edge, target, 1, claim_at, record_at, flags_at, number)
    source, target, inside = insum_ends(edges_ptr, edge, edges, end_stride, edge_stride, nodes)
    loop = inside & (source == target) & (apart > 0)
    kind = counts_ptr.dtype.element_ty
    one = (edge * 0 + 1).to(kind)
    tl.atomic_add(counts_ptr + target, one, mask=inside & (loop == 0), sem="relaxed")
    tl.atomic_max(counts_ptr + nodes + target, (edge + 1).to(kind), mask=loop, sem="relaxed")
""",
)
_NORMALISE = Handwritten(
    "insum_normalise_edges",
    _ENDS
    + """@triton.jit
def insum_root(counts_ptr, nodes, node, mask, fill):
    own = tl.load(counts_ptr + nodes + node, mask=mask, other=0) > 0
    degree = tl.load(counts_ptr + node, mask=mask, other=0).to(tl.int64)
    degree += tl.where(own & (fill > 0), 1, fill)
    root = 1.0 / tl.sqrt(tl.maximum(degree, 1).to(tl.float64))
    return tl.where(degree > 0, root, 0.0), own


@triton.jit
def insum_normalise_edges(
    edges_ptr, counts_ptr, ends_ptr, weight_ptr, edges: "i64", end_stride: "i64",
    edge_stride: "i64", nodes: "i64", fill: "i64",
):
    edge = insum_place()
    every = edges + tl.where(fill > 0, nodes, 0)
    source, target, inside = insum_ends(edges_ptr, edge, edges, end_stride, edge_stride, nodes)
    added = (edge >= edges) & (edge < every)
    source = tl.where(added, edge - edges, source)
    target = tl.where(added, edge - edges, target)
    there = inside | added
    one, own = insum_root(counts_ptr, nodes, source, there, fill)
    two, _ = insum_root(counts_ptr, nodes, target, there, fill)
    weight = tl.where(added & (own == 0), fill, 1).to(tl.float64)
    weight = tl.where(inside & (source == target) & (fill > 0), 0.0, weight * one * two)
    weight = tl.where(there, weight, 0.0)
    if weight_ptr.dtype.element_ty != tl.float64:
        weight = weight.to(tl.float32)
    tl.store(weight_ptr + edge, weight.to(weight_ptr.dtype.element_ty), mask=edge < every)
    kind = ends_ptr.dtype.element_ty
    tl.store(ends_ptr + edge, source.to(kind), mask=(edge < every) & (fill > 0))
    tl.store(ends_ptr + every + edge, target.to(kind), mask=(edge < every) & (fill > 0))
""",
)
_SPREAD = Handwritten(
    "insum_spread_weights",
    _ENDS
    + """@triton.jit
def insum_spread_weights(
    edges_ptr, counts_ptr, ends_ptr, at_ptr, fill_ptr, edges: "i64", end_stride: "i64",
    edge_stride: "i64", nodes: "i64", fill: "i64",
):
    edge = insum_place()
    every = edges + nodes
    source, target, inside = insum_ends(edges_ptr, edge, edges, end_stride, edge_stride, nodes)
    added = (edge >= edges) & (edge < every)
    source = tl.where(added, edge - edges, source)
    target = tl.where(added, edge - edges, target)
    last = tl.load(counts_ptr + nodes + source, mask=added, other=0).to(tl.int64) - 1
    own = tl.where(inside & (source != target), edge, -1)
    at = tl.where(added, last, own)
    rest = tl.where(added & (last < 0), fill, 0)
    there = edge < every
    tl.store(at_ptr + edge, at, mask=there)
    tl.store(fill_ptr + edge, rest.to(fill_ptr.dtype.element_ty), mask=there)
    kind = ends_ptr.dtype.element_ty
    tl.store(ends_ptr + edge, source.to(kind), mask=there)
    tl.store(ends_ptr + every + edge, target.to(kind), mask=there)
""",
)


def counted(edges: Tensor, nodes: int, explain: Explain, *, apart: bool) -> Tensor:
    """Of each node how many of the edges (2, E) end there, and the number of its last loop, from 1,
    or 0: (2, nodes). ``apart``: loops are no edges. Ends that are no nodes are reported.
    """
    device, count = edges.device, edges.shape[1]
    kind = torch.int32 if count < 2**31 - 1 else torch.int64
    counts = torch.zeros((2, nodes), dtype=kind, device=device)
    record: dict[str, Any] = record_of(device).next(explain, {})
    where = record[CLAIM], record[RECORD], record[FLAGS]
    numbers = count, *edges.stride(), nodes, int(apart), record[CALL]
    _COUNT(blocks(count), edges, counts, *where, *numbers)
    return counts


def normalised(
    edges: Tensor, counts: Tensor, fill: int | None, dtype: torch.dtype, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Edges of dtype ``kind`` with one loop for each node, which weighs ``fill`` where the node has
    none of its own, and weights ``1 / sqrt(degree[source] * degree[target])``. Without ``fill``
    there are no more loops, and the edges are those that were passed.
    """
    nodes, device = counts.shape[1], edges.device
    every = edges.shape[1] + (0 if fill is None else nodes)
    ends = edges if fill is None else empty((2, every), kind, device)
    weight = empty((every,), dtype, device)
    numbers = edges.shape[1], *edges.stride(), nodes, fill or 0
    _NORMALISE(blocks(every), edges, counts, ends, weight, *numbers)
    return ends, weight


def spread(
    edges: Tensor, counts: Tensor, fill: int, dtype: torch.dtype, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Edges with one loop for each node; which edge each has its weight from, or -1; and what it
    weighs besides: ``fill`` where a node has no loop of its own.
    """
    nodes, device = counts.shape[1], edges.device
    every = edges.shape[1] + nodes
    ends, at = empty((2, every), kind, device), empty((every,), torch.int64, device)
    rest = empty((every,), dtype, device)
    numbers = edges.shape[1], *edges.stride(), nodes, fill
    _SPREAD(blocks(every), edges, counts, ends, at, rest, *numbers)
    return ends, at, rest
