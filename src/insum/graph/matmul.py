"""Contractions of a graph as plain matrix products, whose reduced variables are one dimension in
the order in which they are stored.

`torch.einsum` flattens them in an order of its own, so that blocks of values are read with a stride
and a compiler sees a copy. Here each step is a ``bmm`` (or ``mm``) over flattened dimensions, or,
where one side would have a single row, a multiplication and a sum, which TorchInductor fuses with
the gathers before and the scatter after.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node


@dataclass(frozen=True, slots=True)
class _LetteredNode:
    """A node and a letter for each of its dimensions."""

    node: Node
    vars: str


def flattened(module: GraphModule) -> GraphModule:
    """The same function with its einsums written out.

    >>> graph = Graph()
    >>> values, gathered = graph.placeholder("values"), graph.placeholder("gathered")
    >>> _ = graph.output(graph.call_function(torch.einsum, ("pqmk,pqkn->pmn", values, gathered)))
    >>> written = flattened(GraphModule(torch.nn.Module(), graph))
    >>> [node.target for node in written.graph.nodes if node.target is torch.bmm]
    [<built-in method bmm of type object at ...>]
    """
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.einsum:
            equation, *operands = node.args
            copied[node] = _PairwiseEinsum(graph, str(equation)).of([copied[o] for o in operands])
        elif node.target is operator.getitem and all(
            isinstance(index, Node) for index in node.args[1]
        ):
            # Spelt with brackets, an index tensor without dimensions is taken for a number that a
            # tracer cannot know.
            copied[node] = graph.call_function(
                torch.ops.aten.index.Tensor,
                (copied[node.args[0]], [copied[i] for i in node.args[1]]),
            )
        elif node.op == "output":
            graph.output(copied[node.args[0]])
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    return GraphModule(torch.nn.Module(), graph, class_name="Insum")


class _PairwiseEinsum:
    """One einsum, two operands at a time from left to right."""

    def __init__(self, graph: Graph, equation: str) -> None:
        self.graph = graph
        left, self.result = equation.split("->")
        self.vars = left.split(",")

    def of(self, nodes: Sequence[Node]) -> Node:
        total = _LetteredNode(nodes[0], self.vars[0])
        for at, node in enumerate(nodes[1:], 1):
            later = set(self.result).union(*self.vars[at + 1 :])
            total = self.product(total, _LetteredNode(node, self.vars[at]), later)
        return self.ordered(total, self.result).node

    def product(self, a: _LetteredNode, b: _LetteredNode, kept: set[str]) -> _LetteredNode:
        """The product of two operands, summed over what is not ``kept``."""
        a, b = self.summed(a, kept | set(b.vars)), self.summed(b, kept | set(a.vars))
        batch = "".join(v for v in a.vars if v in b.vars and v in kept)
        m, n = ("".join(v for v in x.vars if v not in y.vars) for x, y in ((a, b), (b, a)))
        k = "".join(stored_order((a.vars, b.vars), set(a.vars) & set(b.vars) - kept))
        if not (m and n and k):
            return self.summed(self.multiplied(a, b, batch + m + n + k), kept)
        left, right = self.grouped(a, (batch, m, k)), self.grouped(b, (batch, k, n))
        node = self.graph.call_function(torch.bmm if batch else torch.mm, (left, right))
        return self.ungrouped(node, (batch, m, n), a, b)

    def summed(self, x: _LetteredNode, kept: set[str]) -> _LetteredNode:
        dims = tuple(d for d, v in enumerate(x.vars) if v not in kept)
        return (
            _LetteredNode(
                self.graph.call_function(torch.sum, (x.node, dims)),
                "".join(v for v in x.vars if v in kept),
            )
            if dims
            else x
        )

    def multiplied(self, a: _LetteredNode, b: _LetteredNode, order: str) -> _LetteredNode:
        return _LetteredNode(
            self.graph.call_function(torch.mul, (self.spread(a, order), self.spread(b, order))),
            order,
        )

    def spread(self, x: _LetteredNode, order: str) -> Node:
        """Dimensions of ``order``, those that ``x`` has not of size 1."""
        node = self.ordered(x, "".join(v for v in order if v in x.vars)).node
        for d, v in enumerate(order):
            if v not in x.vars:
                node = self.graph.call_function(torch.unsqueeze, (node, d))
        return node

    def ordered(self, x: _LetteredNode, order: str) -> _LetteredNode:
        if x.vars == order:
            return x
        return _LetteredNode(
            self.graph.call_function(
                torch.permute, (x.node, tuple(x.vars.index(v) for v in order))
            ),
            order,
        )

    def grouped(self, x: _LetteredNode, groups: tuple[str, ...]) -> Node:
        """The groups as one dimension each; an empty first group as none."""
        node = self.ordered(x, "".join(groups)).node
        for place, group in enumerate(filter(None, groups)):
            if len(group) > 1:
                node = self.graph.call_function(
                    torch.flatten, (node, place, place + len(group) - 1)
                )
        return node

    def ungrouped(
        self, node: Node, groups: tuple[str, ...], a: _LetteredNode, b: _LetteredNode
    ) -> _LetteredNode:
        place = 0
        for group in filter(None, groups):
            if len(group) > 1:
                node = self.graph.call_function(
                    torch.unflatten, (node, place, tuple(self.size(v, a, b) for v in group))
                )
            place += len(group)
        return _LetteredNode(node, "".join(groups))

    def size(self, var: str, a: _LetteredNode, b: _LetteredNode) -> Node:
        source = a if var in a.vars else b
        return self.graph.call_method("size", (source.node, source.vars.index(var)))


def stored_order(factors: Sequence[Sequence[str]], reduced: set[str]) -> tuple[str, ...]:
    """The reduced variables in the order in which most factors hold them side by side, or of these
    the one that has most.

    >>> stored_order([("b", "o", "i"), ("o", "i", "j")], {"i", "o"})
    ('o', 'i')
    >>> stored_order([("a", "k"), ("a", "b", "k"), ("k", "a")], {"a", "k"})
    ('a', 'k')
    """
    orders = [tuple(v for v in vars_ if v in reduced) for vars_ in factors]
    whole = [order for order in orders if len(order) == len(reduced)]

    def held(order: tuple[str, ...]) -> tuple[int, int]:
        having = [vars_ for vars_ in factors if _stand_together(order, vars_)]
        return len(having), max(map(len, having), default=0)

    return max(whole, key=held, default=tuple(dict.fromkeys(v for o in orders for v in o)))


def _stand_together(order: Sequence[str], among: Sequence[str]) -> bool:
    """Whether these variables are neighbours, in this order."""
    first = among.index(order[0]) if order and order[0] in among else 0
    return tuple(among[first : first + len(order)]) == tuple(order)
