"""What a joint graph does later: its backward pass, and which tensors hold other values by then.

A tensor that is passed and written to, edges that are put in another order at the end of a step for
one, is there for the forward pass as it was. What the backward pass needs of it the forward pass
has to compute and save.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from insum.compat.compiler import is_view, written_inputs
from insum.fusion.shapes import points, shape_of


@dataclass(frozen=True, slots=True)
class Later:
    """Of a graph the nodes that depend on an upstream gradient, tensors that are written to before
    those are run, and what the forward pass computes of such tensors.
    """

    backward: frozenset[Node]
    overwritten: frozenset[Node]
    computed: frozenset[Node]


def later_of(graph: Graph) -> Later:
    backward: set[Node] = set()
    overwritten = set(written_inputs(graph))
    computed: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if str(node.target).startswith("tangents"):
                backward.add(node)
        elif not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif is_view(node.target) and not overwritten.isdisjoint(node.all_input_nodes[:1]):
            overwritten.add(node)
        elif any(n in overwritten or n in computed for n in node.all_input_nodes):
            computed.add(node)
    return Later(frozenset(backward), frozenset(overwritten), frozenset(computed))


def save(graph: Graph) -> None:
    """Have the forward pass save what the backward pass reads of tensors that are written to:
    computed again, from what is there then, it would be something else.
    """
    later = later_of(graph)
    for node in later.computed:
        if not later.backward.isdisjoint(node.users):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def compute_again(graph: Graph, read_through: Collection[Node], cheap: Collection[Any]) -> None:
    """Have the backward pass compute again what fused statements of the forward pass have read
    through, where that pass has no other use for it: it would be gathered a second time there, to
    be saved. Where something else than ``cheap`` operations follows, or more would have to be kept
    between the passes, torch decides.
    """
    later = later_of(graph)
    ahead = _ahead(graph, later)
    found = [n for n in graph.nodes if n in read_through and n in ahead]
    for region in _regions(found, ahead):
        read = [n for n in region if not later.backward.isdisjoint(n.users)]
        given = {_owner(n) for node in region for n in node.all_input_nodes if n not in region}
        more = [n for n in given if n.op != "placeholder" and later.backward.isdisjoint(n.users)]
        if all(n.target in cheap for n in region) and _bytes(more) <= _bytes(read):
            for node in region:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _ahead(graph: Graph, later: Later) -> set[Node]:
    """Nodes that are computed before the backward pass, for it alone."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node not in later.backward and node.users:
            if all(user in later.backward or user in found for user in node.users):
                found.add(node)
    return found - later.computed


def _regions(nodes: list[Node], ahead: set[Node]) -> list[dict[Node, None]]:
    """Nodes with what is computed of them ahead, those that read one another together."""
    regions: list[dict[Node, None]] = []
    for node in nodes:
        region: dict[Node, None] = {}
        todo = [node]
        while todo:
            one = todo.pop()
            if one not in region:
                region[one] = None
                todo += [user for user in one.users if user in ahead]
        for other in [r for r in regions if not r.keys().isdisjoint(region)]:
            region |= other
            regions.remove(other)
        regions.append(region)
    return regions


def _owner(node: Node) -> Node:
    """The tensor that a node is a view of."""
    while node.op == "call_function" and is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _bytes(nodes: Iterable[Node]) -> int:
    values = ((n, n.meta.get("val")) for n in nodes)
    return sum(points(shape_of(n)) * v.itemsize for n, v in values if isinstance(v, Tensor))
