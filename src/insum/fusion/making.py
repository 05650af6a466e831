"""Nodes that passes put into a graph, with what tracing would have left at them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from insum.fusion.later import later_of
from insum.fusion.shapes import same, shape_of, value_of

aten = torch.ops.aten
#: What tells where a node comes from.
_ORIGIN = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack", "seq_nr")


def is_transposed(node: Node) -> bool:
    """Whether a node is a matrix with its dimensions exchanged."""
    given: Any = node.args
    if node.target is aten.permute.default:
        return [int(d) % 2 for d in given[1]] == [1, 0]
    if node.target is aten.transpose.int:
        return value_of(node).dim() == 2 and {int(d) % 2 for d in given[1:3]} == {0, 1}
    return node.target is aten.t.default


class NodeMaker:
    """Makes nodes where another one stands, which they take the place of."""

    def __init__(self, graph: Graph, going: Collection[Node] = ()) -> None:
        self.graph, self.going = graph, going
        self.backward = later_of(graph).backward
        self.like: Node | None = None

    @contextlib.contextmanager
    def instead_of(self, node: Node) -> Iterator[None]:
        self.like = node
        with self.graph.inserting_before(node):
            yield

    def made(self, target: Any, *arguments: Any, **named: Any) -> Node:
        """A node with the value that tracing would leave at it, said to come from where the one
        comes from whose place it takes.
        """
        node = self.graph.call_function(target, arguments, named)
        value: Any = map_arg((arguments, named), lambda n: n.meta["val"])
        assert self.like is not None
        node.meta = {k: v for k, v in self.like.meta.items() if k in _ORIGIN}
        node.meta["val"] = target(*value[0], **value[1])
        return node

    def zeros(self, like: Node, *dims: tuple[Node, int]) -> Node:
        return self.full(0, like, *dims)

    def full(self, number: int, like: Node, *dims: tuple[Node, int]) -> Node:
        """A tensor of one number, with the dtype and the device of another and such dimensions."""
        value = value_of(like)
        return self.made(
            aten.full.default,
            [self.size(*dim) for dim in dims],
            number,
            dtype=value.dtype,
            device=value.device,
            pin_memory=False,
        )

    def size(self, node: Node, dim: int) -> Any:
        """The size of a dimension: a number, or a node that gives it, which is no part of the
        backward pass and of no tensor that goes.
        """
        size = shape_of(node)[dim]
        if isinstance(size, int):
            return size
        for known in self.graph.nodes:
            if known is self.like:
                break
            value = known.meta.get("val")
            if known in self.backward or known in self.going:
                continue
            if isinstance(value, torch.SymInt) and same(value, size):
                return known
            if isinstance(value, torch.Tensor):
                for place, other in enumerate(value.shape):
                    if same(other, size):
                        return self.made(aten.sym_size.int, known, place)
        return self.made(aten.sym_size.int, node, dim)
