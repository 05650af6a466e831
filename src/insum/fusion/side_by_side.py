"""Side by side: in the backward pass gradients of parts are put together by ``cat``, which would be
written at every edge. They may stay apart until they were added up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from insum.fusion.hoist import sweep
from insum.fusion.parts import POINTWISE, PartWriter, is_large, may_move
from insum.fusion.report import MovedProduct, where_of
from insum.fusion.shapes import points, same, shape_of, value_of

aten = torch.ops.aten
_PUT = (aten.index_put.default, aten._unsafe_index_put.default)
_ADD = (aten.index_add.default, aten.scatter_add.default)
_WHAT = "parts that are put side by side and added up: each added up for itself"


def rewrite(graph: Graph, wish: str) -> tuple[MovedProduct, ...]:
    """Put together what was added up; which nodes that were."""
    if not may_move(graph, wish):
        return ()
    writer, moved = _SideWriter(graph), list[MovedProduct]()
    for node in list(graph.nodes):
        # those that were replaced on the way have no users any more
        if node.target is aten.cat.default and node.users and is_large(node, wish):
            where = where_of(node)
            moved += [MovedProduct(node.name, _WHAT, where)] if writer.put_off(node) else []
    return tuple(moved)


class _SideWriter:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.parts = graph, PartWriter(graph)

    def put_off(self, node: Node) -> bool:
        """Put a node's parts together behind what reads them, where all of that adds them up."""
        parts, dim = _concatenated(node)
        if dim is None or not any(map(self.parts.reaches, parts)):
            return False
        found = _carried(node, dim)
        if found is None:
            return False
        dims, ends = found
        self.parts.made.clear()
        pieces = {node: parts}
        sizes = [int(shape_of(part)[dim]) for part in parts]
        for one in dims:
            if one is node:
                continue
            with self.parts.maker.instead_of(one):
                pieces[one] = list(self.pieces_of(one, pieces, dims, sizes))
                if one in ends:
                    one.replace_all_uses_with(
                        self.parts.maker.made(aten.cat.default, pieces[one], dims[one])
                    )
        sweep(self.graph, [*reversed(dims)])
        return True

    def pieces_of(
        self,
        node: Node,
        pieces: Mapping[Node, list[Node]],
        dims: Mapping[Node, int],
        sizes: list[int],
    ) -> Iterator[Node]:
        """A node of each of the parts; what it reads beside them, in parts as well."""
        for number, size in enumerate(sizes):
            beside = functools.partial(self.beside, node, dims[node], sum(sizes[:number]), size)

            def operand(one: Node, number: int = number, beside: Any = beside) -> Any:
                return pieces[one][number] if one in pieces else beside(one)

            arguments, named = map_arg((node.args, node.kwargs), operand)
            yield self.parts.maker.made(node.target, *arguments, **named)

    def beside(self, node: Node, dim: int, start: int, size: int, one: Node) -> Node:
        """What a node reads beside parts along ``dim``, where these are the next ``size``."""
        if node.target in POINTWISE:
            return self.parts.operand(node, dim, start, size, one)
        if node.target not in (*_PUT, *_ADD) or value_of(one).dim() != value_of(node).dim():
            return one  # a matrix, or an index of rows
        if one.target is aten.full.default:  # as zeros are known that are added to
            shape: list[Any] = list(one.args[0])  # type: ignore[arg-type]
            shape[dim] = size
            return self.parts.maker.made(one.target, shape, *one.args[1:], **one.kwargs)
        return self.parts.part(one, dim, start, size)


def _concatenated(node: Node) -> tuple[list[Node], int | None]:
    """The parts of a concatenation, and along which dimension, where all lengths are known."""
    given: Any = node.args
    parts = list(given[0])
    dim = given[1] if len(given) > 1 else node.kwargs.get("dim", 0)
    alike = all(value_of(part).dim() == value_of(node).dim() for part in parts)
    if not isinstance(dim, int) or not alike:
        return parts, None
    dim %= value_of(node).dim()
    known = all(isinstance(shape_of(part)[dim], int) for part in parts)
    dtypes = {value_of(part).dtype for part in parts}
    return parts, dim if known and len(dtypes) == 1 and len(parts) > 1 else None


def _carried(node: Node, dim: int) -> tuple[dict[Node, int], set[Node]] | None:
    """All that is computed of parts side by side, in order and with the dimension that they lie
    along, and where they are added up; None where one of them needs the whole, or where nothing is
    scattered.
    """
    dims, ends = {node: dim}, set[Node]()
    for one in node.graph.nodes:
        if not any(n in dims and n not in ends for n in one.all_input_nodes):
            continue
        rule = _RULES.get(one.target) if one.op == "call_function" else None
        found = rule(one, dims) if rule is not None else None
        if found is None:
            return None
        dims[one] = found
        if one.target not in _CARRIES:
            ends.add(one)
    scattered = any(one.target in (*_PUT, *_ADD) for one in ends)
    smaller = all(2 * points(shape_of(one)) <= points(shape_of(node)) for one in ends)
    return (dims, ends) if scattered and smaller else None


#: The dimension of a node's value along which parts lie, given those of what it reads; None: it
#: needs them as a whole.
CarryRule = Callable[[Node, Mapping[Node, int]], int | None]


def _along(node: Node, dims: Mapping[Node, int]) -> int | None:
    """Point by point; what is broadcast along the dimension has no parts."""
    rank, read = value_of(node).dim(), [one for one in node.all_input_nodes if one in dims]
    found = {dims[one] + rank - value_of(one).dim() for one in read}
    width = shape_of(read[0])[dims[read[0]]]
    return next((d for d in found if len(found) == 1 and same(shape_of(node)[d], width)), None)


def _turned(node: Node, dims: Mapping[Node, int]) -> int | None:
    given: Any = node.args
    rank = value_of(node).dim()
    return [int(d) % rank for d in given[1]].index(dims[given[0]])


def _summed(node: Node, dims: Mapping[Node, int]) -> int | None:
    given: Any = node.args
    rank, dim = value_of(given[0]).dim(), dims[given[0]]
    over = {int(d) % rank for d in given[1] or range(rank)}
    keeps = bool(given[2]) if len(given) > 2 else bool(node.kwargs.get("keepdim", False))
    if dim in over:
        return None
    return dim if keeps else dim - sum(d < dim for d in over)


def _multiplied(node: Node, dims: Mapping[Node, int]) -> int | None:
    """The rows of the left matrix, or the columns of the right one."""
    left, right = node.all_input_nodes if len(node.all_input_nodes) == 2 else (None, None)
    if left in dims and right in dims:
        return None
    if left is not None and left in dims:
        return 0 if dims[left] == 0 else None
    return 1 if right is not None and right in dims and dims[right] == 1 else None


def _put(node: Node, dims: Mapping[Node, int]) -> int | None:
    """Rows that one index finds."""
    base, indices, values, *rest = node.args
    given: Any = indices
    single = len(given) == 1 and given[0] is not None and value_of(given[0]).dim() == 1
    if not single or rest != [True] or base in dims or values not in dims:
        return None
    dim = dims[values]  # type: ignore[index]
    return dim if dim > 0 and _are_as_wide(node, values, dim) else None


def _added(node: Node, dims: Mapping[Node, int]) -> int | None:
    base, along, index, values, *_ = node.args
    if base in dims or index in dims or values not in dims:
        return None
    dim = dims[values]  # type: ignore[index]
    across = int(along) % value_of(node).dim() != dim  # type: ignore[arg-type]
    wide = _are_as_wide(node, values, dim)
    if node.target is aten.scatter_add.default:
        wide = wide and _are_as_wide(node, index, dim)
    return dim if across and wide else None


def _are_as_wide(node: Node, other: Any, dim: int) -> bool:
    """Whether a tensor has all columns of a node's value."""
    rank = value_of(node).dim()
    return value_of(other).dim() == rank and same(shape_of(node)[dim], shape_of(other)[dim])


_CARRIES: frozenset[Any] = frozenset({*POINTWISE, aten.permute.default})
_RULES: dict[Any, CarryRule] = {
    **dict.fromkeys(POINTWISE, _along),
    aten.permute.default: _turned,
    aten.sum.dim_IntList: _summed,
    aten.mm.default: _multiplied,
    **dict.fromkeys(_PUT, _put),
    **dict.fromkeys(_ADD, _added),
}
