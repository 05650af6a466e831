"""What a joint graph does later: its backward pass, and which tensors hold other values by then.

A tensor that is passed and written to, edges that are put in another order at the end of a step for
one, is there for the forward pass as it was. What the backward pass needs of it the forward pass
has to compute and save.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from insum.compat.compiler import is_view, written_inputs


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
