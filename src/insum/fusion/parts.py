"""Parts: programs compute several things as columns of one tensor, and take it apart:
``a, b = (x[src] * w).chunk(2, -1)``. In the backward pass gradients of parts are put side by side.

A statement reads tensors and writes one, so that what is taken apart, or put together, would be
written first, at every edge. Parts may as well be taken of what is read, where they are views, and
computed each for itself; and what is put together may stay apart until it was added up.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
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
_PUT = (aten.index_put.default, aten._unsafe_index_put.default)
_ADD = (aten.index_add.default, aten.scatter_add.default)
_POINTWISE = (SPELL.keys() | PRODUCTS.keys()) | {prims.convert_element_type.default}
_APART = "what is computed of gathered rows and taken apart: its parts, each for itself"
_TOGETHER = "parts that are put side by side and added up: each added up for itself"


def rewrite(graph: Graph, wish: str) -> tuple[MovedProduct, ...]:
    """Take parts of what is read, and put together what was added up; which that were."""
    if wish == "never" or later_of(graph).overwritten or _reads_storage(graph):
        return ()
    writer = _PartWriter(graph)
    moved: list[tuple[Node, str]] = []
    for node in list(graph.nodes):
        if node.target is aten.glu.default and _is_large(node, wish):
            writer.spell_out(node)
    for what, work in ((_APART, writer.take_apart), (_TOGETHER, writer.put_off)):
        for node in list(graph.nodes):
            # those that were replaced on the way have no users any more
            if node.users and _is_tensor(node) and _is_large(node, wish) and work(node):
                moved.append((node, what))
    return tuple(MovedProduct(node.name, what, where_of(node)) for node, what in moved)


def _reads_storage(graph: Graph) -> bool:
    """Whether some node reads memory by places in it, whatever tensor lies there."""
    return any("as_strided" in str(node.target) for node in graph.nodes)


def _is_large(node: Node, wish: str) -> bool:
    """Whether a chain will take what is computed of it."""
    value = value_of(node)
    if wish == "always":
        return True
    return value.device.type == "cuda" and points(shape_of(node)) >= least_scatter(node)


class _PartWriter:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.maker = graph, NodeMaker(graph)
        self.reaches = reaching(frozenset())
        # parts that were computed already: of what, along which dimension, from where, how long
        self.made: dict[tuple[Node, int, int, int], Node] = {}

    # --- what is taken apart ---

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
        computed = node.target in (*_POINTWISE, *_INDEX) and self.reaches(node)
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
            if node.target not in _POINTWISE:
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
        if node.target in _POINTWISE and self.reaches(node):
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

    # --- what is put together ---

    def put_off(self, node: Node) -> bool:
        """Put a node's parts together behind what reads them, where all of that adds them up."""
        if node.target is not aten.cat.default:
            return False
        parts, dim = _concatenated(node)
        if dim is None or not any(map(self.reaches, parts)):
            return False
        found = _carried(node, dim)
        if found is None:
            return False
        dims, ends = found
        self.made.clear()
        pieces = {node: parts}
        sizes = [int(shape_of(part)[dim]) for part in parts]
        for one in dims:
            if one is node:
                continue
            with self.maker.instead_of(one):
                pieces[one] = list(self.pieces_of(one, pieces, dims, sizes))
                if one in ends:
                    one.replace_all_uses_with(
                        self.maker.made(aten.cat.default, pieces[one], dims[one])
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
            yield self.maker.made(node.target, *arguments, **named)

    def beside(self, node: Node, dim: int, start: int, size: int, one: Node) -> Node:
        """What a node reads beside parts along ``dim``, where these are the next ``size``."""
        if node.target in _POINTWISE:
            return self.operand(node, dim, start, size, one)
        if node.target not in (*_PUT, *_ADD) or value_of(one).dim() != value_of(node).dim():
            return one  # a matrix, or an index of rows
        if one.target is aten.full.default:  # as zeros are known that are added to
            shape: list[Any] = list(one.args[0])  # type: ignore[arg-type]
            shape[dim] = size
            return self.maker.made(one.target, shape, *one.args[1:], **one.kwargs)
        return self.part(one, dim, start, size)


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
    after = False
    for one in node.graph.nodes:
        after = after or one is node
        if not after or one is node:
            continue
        read = [n for n in one.all_input_nodes if n in dims and n not in ends]
        if not read:
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
    rank, width = value_of(node).dim(), None
    found = set()
    for one in node.all_input_nodes:
        if one in dims:
            found.add(dims[one] + rank - value_of(one).dim())
            width = shape_of(one)[dims[one]]
    (dim,) = found if len(found) == 1 else (None,)
    return (
        dim if dim is not None and width is not None and same(shape_of(node)[dim], width) else None
    )


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


_CARRIES: frozenset[Any] = frozenset({*_POINTWISE, aten.permute.default})
_RULES: dict[Any, CarryRule] = {
    **dict.fromkeys(_POINTWISE, _along),
    aten.permute.default: _turned,
    aten.sum.dim_IntList: _summed,
    aten.mm.default: _multiplied,
    **dict.fromkeys(_PUT, _put),
    **dict.fromkeys(_ADD, _added),
}
