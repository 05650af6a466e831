"""Parts: programs compute several things as columns of one tensor, and take it apart:
``a, b = (x[src] * w).chunk(2, -1)``.

A statement reads whole tensors, so that what is taken apart would be written first, at every edge.
Parts may as well be taken of what is read, where they are views, and computed each for itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from insum.fusion.hoist import sweep
from insum.fusion.later import later_of
from insum.fusion.making import NodeMaker
from insum.fusion.pointwise import SPELL
from insum.fusion.read import PRODUCTS, reaching
from insum.fusion.report import MovedProduct, where_of
from insum.fusion.roots import least_scatter
from insum.fusion.shapes import points, same, shape_of, value_of
from insum.fusion.trial import alike

aten, prims = torch.ops.aten, torch.ops.prims
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_INDEX = (aten.index.Tensor, aten._unsafe_index.Tensor)
POINTWISE = (SPELL.keys() | PRODUCTS.keys()) | {prims.convert_element_type.default}
_WHAT = "what is computed of gathered rows and taken apart: its parts, each for itself"


def rewrite(graph: Graph, wish: str) -> tuple[MovedProduct, ...]:
    """Take parts of what is read; of which nodes that was."""
    if not may_move(graph, wish):
        return ()
    writer, moved = PartWriter(graph), list[MovedProduct]()
    for node in list(graph.nodes):
        if node.target is aten.glu.default and is_large(node, wish):
            writer.spell_out(node)
    for node in list(graph.nodes):
        # those that were replaced on the way have no users any more
        if node.users and is_large(node, wish) and writer.take_apart(node):
            moved.append(MovedProduct(node.name, _WHAT, where_of(node)))
    return tuple(moved)


def may_move(graph: Graph, wish: str) -> bool:
    """Whether values of a graph may lie elsewhere in memory than they do, and be read later."""
    return wish != "never" and not later_of(graph).overwritten and not _reads_storage(graph)


def _reads_storage(graph: Graph) -> bool:
    """Whether some node reads memory by places in it, whatever tensor lies there."""
    return any("as_strided" in str(node.target) for node in graph.nodes)


def is_large(node: Node, wish: str) -> bool:
    """Whether a node is a tensor, and a chain will take what is computed of it."""
    if not _is_tensor(node) or wish == "always":
        return _is_tensor(node)
    large = points(shape_of(node)) >= least_scatter(node)
    return large and value_of(node).device.type == "cuda"


class PartWriter:
    """Makes parts of nodes, and puts them in the place of what reads them."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.maker = graph, NodeMaker(graph)
        self.reaches = reaching(frozenset())
        # parts that were computed already: of what, along which dimension, from where, how long
        self.made: dict[tuple[Node, int, int, int], Node] = {}

    def spell_out(self, node: Node) -> None:
        """A gated linear unit is a function of two halves; in half precision it is rounded once."""
        source = node.all_input_nodes[0]
        rank, given = value_of(source).dim(), (*node.args, *node.kwargs.values(), -1)
        dim: Any = given[1]
        half = shape_of(node)[dim]
        wide = value_of(node).dtype in (torch.float32, torch.float64)
        if not isinstance(half, int) or not wide or not self.reaches(source):
            return
        with self.maker.instead_of(node):
            value, gate = (
                self.maker.made(aten.slice.Tensor, source, dim % rank, start, start + half)
                for start in (0, half)
            )
            opened = self.maker.made(aten.sigmoid.default, gate)
            node.replace_all_uses_with(self.maker.made(aten.mul.Tensor, value, opened))
        self.graph.erase_node(node)

    def take_apart(self, node: Node) -> bool:
        """Take the parts of what a node reads, where it is computed of gathered rows and nobody
        reads all of it.
        """
        computed = node.target in (*POINTWISE, *_INDEX) and self.reaches(node)
        taken = _taken(node) if computed else None
        if not taken or not all(self.is_apart(node, dim) for dim, *_ in taken.values()):
            return False
        if any(_readers(user, _compact(user)) is None for user in taken):
            return False
        self.made.clear()
        order = {one: k for k, one in enumerate(self.graph.nodes)}
        done = False
        for user in sorted(taken, key=lambda user: order[user]):
            with self.maker.instead_of(user):
                part = self.part(node, *taken[user])
            done |= self.replace(user, part)
        sweep(self.graph, [*self.made.values(), *taken, *node.users, node])
        return done

    def replace(self, old: Node, new: Node) -> bool:
        """Put a node in the place of another that lies otherwise in memory: what reads it is made
        anew, unless something of that is returned.
        """
        readers = _readers(old, value_of(new))
        if readers is None:
            return False
        now = {old: new}
        for reader in readers:
            with self.maker.instead_of(reader):
                given: Any = map_arg((reader.args, reader.kwargs), lambda n: now.get(n, n))
                now[reader] = self.maker.made(reader.target, *given[0], **given[1])
        for one, other in now.items():
            one.replace_all_uses_with(other)
        sweep(self.graph, [*reversed(now)])
        return True

    def is_apart(self, node: Node, dim: int) -> bool:
        """Whether rows that are gathered below a node have parts along a dimension of it."""
        looked: dict[tuple[Node, int], None] = {}

        def look(node: Node, dim: int) -> bool:
            if (node, dim) in looked or not self.reaches(node):
                return True
            looked[node, dim] = None
            if node.target not in POINTWISE:
                return _gathered_from(node, dim) is not None
            read = filter(_is_tensor, node.all_input_nodes)
            return all(at < 0 or look(one, at) for one, at in _aligned(node, dim, read))

        return look(node, dim)

    def part(self, node: Node, dim: int, start: int, length: int) -> Node:
        """Some columns of a node: computed of such of its operands, where it is computed of
        gathered rows, else a view.
        """
        key = node, dim, start, length
        if key not in self.made:
            self.made[key] = self.new_part(node, dim, start, length)
        return self.made[key]

    def new_part(self, node: Node, dim: int, start: int, length: int) -> Node:
        if node.target in POINTWISE and self.reaches(node):
            operand = functools.partial(self.operand, node, dim, start, length)
            arguments, named = map_arg((node.args, node.kwargs), operand)
            return self.maker.made(node.target, *arguments, **named)
        table = _gathered_from(node, dim)
        if table is not None:
            source, at = table
            rows = self.part(source, at, start, length)
            return self.maker.made(node.target, rows, *node.args[1:])
        return self.maker.made(aten.slice.Tensor, node, dim, start, start + length)

    def operand(self, node: Node, dim: int, start: int, length: int, one: Node) -> Node:
        """What columns of a node are computed of; what is broadcast along them has no parts."""
        ((_, at),) = _aligned(node, dim, [one]) if _is_tensor(one) else ((one, -1),)
        whole = at < 0 or same(shape_of(one)[at], 1)
        return one if whole else self.part(one, at, start, length)


def _aligned(node: Node, dim: int, operands: Iterable[Node]) -> list[tuple[Node, int]]:
    """Operands with the dimension that is broadcast to one of the result; below 0: none is."""
    rank = value_of(node).dim()
    return [(one, dim - rank + value_of(one).dim()) for one in operands]


def _is_drawn(node: Node) -> bool:
    """Whether a node draws random numbers, or does something beside giving a value."""
    tags: Any = getattr(node.target, "tags", ())
    return node.is_impure() or torch.Tag.nondeterministic_seeded in tags


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _compact(node: Node) -> torch.Tensor:
    """A value like that of a node, by itself in memory."""
    value = value_of(node)
    return value.new_empty(value.shape)


def _readers(node: Node, value: torch.Tensor) -> list[Node] | None:
    """What reads a node, and what reads that, as far as another layout of its value changes theirs;
    None where one of them is returned, or cannot read it.
    """
    alike_but_for_layout = value.dtype == value_of(node).dtype and all(
        map(same, value.shape, shape_of(node))
    )
    assert alike_but_for_layout, f"{node.name} is replaced by something else"
    values: dict[Node, Any] = {node: value}
    found = []
    for one in node.graph.nodes:
        if not any(n in values for n in one.all_input_nodes):
            continue
        if one.op != "call_function" or _is_drawn(one):
            return None
        found.append(one)
        given: Any = map_arg(
            (one.args, one.kwargs), lambda n: values[n] if n in values else n.meta["val"]
        )
        try:
            other = one.target(*given[0], **given[1])
        except (RuntimeError, ValueError):  # a view of what lies so
            return None
        if not alike(other, one.meta["val"]):
            values[one] = other
    return found


def _taken(node: Node) -> dict[Node, tuple[int, int, int]] | None:
    """What reads parts of a node: the dimension, where the part begins, and how long it is. None
    where somebody reads all of it, or where that is not known.
    """
    found: dict[Node, tuple[int, int, int]] = {}
    for user in node.users:
        if user.target in _SPLITS:
            pieces = _pieces(user, node)
            if pieces is None or not all(u.target is operator.getitem for u in user.users):
                return None
            dim, sizes = pieces
            for one in user.users:
                number: Any = one.args[1]
                found[one] = dim, sum(sizes[:number]), sizes[number]
        elif user.target is aten.slice.Tensor and (part := _sliced(user, node)) is not None:
            found[user] = part
        else:
            return None
    return found


def _sliced(node: Node, source: Node) -> tuple[int, int, int] | None:
    """The dimension of a slice, where it begins, and how long it is."""
    given: Any = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, start, _, step = given
    size, length = shape_of(source)[dim], shape_of(node)[dim]
    if not isinstance(start, int | None) or step != 1 or node.kwargs:
        return None
    if not isinstance(size, int) or not isinstance(length, int) or not 0 < length < size:
        return None
    start = start or 0
    return dim % len(shape_of(source)), start if start >= 0 else max(0, start + size), length


def _pieces(node: Node, source: Node) -> tuple[int, list[int]] | None:
    """The dimension that a split takes apart, and the lengths of its parts."""
    given, shape = (*node.args, *node.kwargs.values()), shape_of(source)
    dim: Any = given[2] if len(given) > 2 else 0
    size = shape[dim]
    if not isinstance(dim, int) or not isinstance(size, int):
        return None
    by: Any = given[1]
    if isinstance(by, int):
        sizes = [min(by, size - start) for start in range(0, size, by)] if by > 0 else []
    else:
        sizes = list(by)
    known = all(isinstance(one, int) for one in sizes) and sum(sizes) == size
    return (dim % len(shape), sizes) if known and sizes else None


def _gathered_from(node: Node, dim: int) -> tuple[Node, int] | None:
    """What rows are gathered from, and which of its dimensions becomes ``dim``: one that no index
    is for.
    """
    given: Any = node.args
    if node.target in _INDEX and len(given[1]) == 1 and given[1][0] is not None:
        rank = value_of(given[1][0]).dim()
        integers = not value_of(given[1][0]).dtype.is_floating_point
        if integers and value_of(given[1][0]).dtype != torch.bool and dim >= rank:
            return given[0], dim - rank + 1
    if node.target is aten.index_select.default and int(given[1]) % value_of(node).dim() != dim:
        return given[0], dim
    return None
