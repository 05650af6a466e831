"""Edges grouped by their relation, on the device and without waiting.

A group has room for so many edges of one relation; what a relation leaves of its last group is
padding. How many groups there are at most follows from sizes that the host knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum.codegen.arguments import CALL, CLAIM, FLAGS, RECORD
from insum.codegen.checking import REPORT
from insum.compat.tensors import empty
from insum.runtime.handwritten.kernel import BLOCK, Handwritten, blocks
from insum.runtime.record import Explain, record_of

#: What is reported: a source or a target that is no node, a relation that does not exist.
SOURCE, TARGET, RELATION = 0, 1, 2

_COUNT = Handwritten(
    "insum_count_relations",
    REPORT
    + f"""@triton.jit
def insum_count_relations(
    edges_ptr, relation_ptr, count_ptr, claim_at, record_at, flags_at, edges: "i64",
    end_stride: "i64", edge_stride: "i64", relation_stride: "i64", nodes: "i64", relations: "i64",
    call: "i64",
):
    edge = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})
    there = edge < edges
    source = tl.load(edges_ptr + edge * edge_stride, mask=there, other=0).to(tl.int64)
    target = tl.load(edges_ptr + end_stride + edge * edge_stride, mask=there, other=0).to(tl.int64)
    relation = tl.load(relation_ptr + edge * relation_stride, mask=there, other=0).to(tl.int64)
    number = call.to(tl.int32)
    bad = there & ((source < 0) | (source >= nodes))
    insum_report(bad, edge, source, {SOURCE}, claim_at, record_at, flags_at, number)
    bad = there & ((target < 0) | (target >= nodes))
    insum_report(bad, edge, target, {TARGET}, claim_at, record_at, flags_at, number)
    bad = there & ((relation < 0) | (relation >= relations))
    insum_report(bad, edge, relation, {RELATION}, claim_at, record_at, flags_at, number)
    place = tl.where(relation < 0, 0, relation + 1)
    one = (edge * 0 + 1).to(tl.int32)
    tl.atomic_add(count_ptr + place, one, mask=there & (relation < relations), sem="relaxed")
""",
)
_START = Handwritten(
    "insum_start_groups",
    """@triton.jit
def insum_start_groups(count_ptr, start_ptr, group_ptr, relations: "i64", size: "i64"):
    start = tl.load(count_ptr).to(tl.int64)
    group = start * 0
    for first in range(0, relations, 1024):
        relation = first + tl.arange(0, 1024)
        there = relation < relations
        count = tl.load(count_ptr + 1 + relation, mask=there, other=0).to(tl.int64)
        groups = (count + size - 1) // size
        tl.store(start_ptr + relation, start + tl.cumsum(count, 0) - count, mask=there)
        tl.store(group_ptr + relation, group + tl.cumsum(groups, 0) - groups, mask=there)
        start += tl.sum(count, 0)
        group += tl.sum(groups, 0)
""",
)
_FILL = Handwritten(
    "insum_fill_groups",
    f"""@triton.jit
def insum_fill_groups(
    edges_ptr, relation_ptr, weight_ptr, order_ptr, start_ptr, group_ptr, ends_ptr, own_ptr,
    of_ptr, edges: "i64", end_stride: "i64", edge_stride: "i64", relation_stride: "i64",
    nodes: "i64", relations: "i64", size: "i64", slots: "i64",
):
    at = tl.program_id(0).to(tl.int64) * {BLOCK} + tl.arange(0, {BLOCK})
    there = at < edges
    edge = tl.load(order_ptr + at, mask=there, other=0)
    relation = tl.load(relation_ptr + edge * relation_stride, mask=there, other=-1).to(tl.int64)
    inside = there & (relation >= 0) & (relation < relations)
    place = at - tl.load(start_ptr + relation, mask=inside, other=0)
    slot = tl.load(group_ptr + relation, mask=inside, other=0) * size + place
    tl.store(of_ptr + slot // size, relation.to(tl.int32), mask=inside & (place % size == 0))
    source = tl.load(edges_ptr + edge * edge_stride, mask=inside, other=-1).to(tl.int64)
    target = tl.load(edges_ptr + end_stride + edge * edge_stride, mask=inside, other=-1)
    target = target.to(tl.int64)
    inside = inside & (source >= 0) & (source < nodes) & (target >= 0) & (target < nodes)
    tl.store(ends_ptr + slot, source.to(tl.int32), mask=inside)
    tl.store(ends_ptr + slots + slot, target.to(tl.int32), mask=inside)
    weight = tl.load(weight_ptr + edge, mask=inside, other=0)
    tl.store(own_ptr + slot, weight, mask=inside)
""",
)


@dataclass(frozen=True, eq=False)
class Grouped:
    """Edges in groups: ``source``, ``target`` and ``weight`` of every slot, the ends -1 where there
    is no edge; the ``relation`` of every group.
    """

    source: Tensor
    target: Tensor
    weight: Tensor
    relation: Tensor


def counted(
    edges: Tensor, relation: Tensor, nodes: int, relations: int, explain: Explain
) -> Tensor:
    """How many edges have each relation, from the second place on. What is out of range is
    reported.
    """
    count = torch.zeros(relations + 1, dtype=torch.int32, device=edges.device)
    record: dict[str, Any] = record_of(edges.device).next(explain, {})
    where = record[CLAIM], record[RECORD], record[FLAGS]
    numbers = edges.shape[1], *edges.stride(), relation.stride(0), nodes, relations, record[CALL]
    _COUNT(blocks(edges.shape[1]), edges, relation, count, *where, *numbers)
    return count


def grouped(
    edges: Tensor, relation: Tensor, weight: Tensor, count: Tensor, nodes: int, size: int
) -> Grouped:
    """The edges in groups of ``size``, of ``count`` edges of each relation."""
    device, relations, many = edges.device, count.shape[0] - 1, edges.shape[1]
    groups = many // size + relations
    start, group = (empty((relations,), torch.int64, device) for _ in range(2))
    _START(1, count, start, group, relations, size)
    ends = torch.full((2, groups, size), -1, dtype=torch.int32, device=device)
    own = torch.zeros(groups, size, dtype=weight.dtype, device=device)
    of = torch.zeros(groups, dtype=torch.int32, device=device)
    order = torch.argsort(relation, stable=True)
    made = order, start, group, ends, own, of
    strides = *edges.stride(), relation.stride(0)
    numbers = many, *strides, nodes, relations, size, groups * size
    _FILL(blocks(many), edges, relation, weight, *made, *numbers)
    return Grouped(ends[0], ends[1], own, of)
