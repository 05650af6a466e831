"""Matrices of which only some places count, before chains are looked for.

``(x @ y.T)[i, j]`` reads a product at some places, and ``a @ x`` with ``a = zeros.index_put((i, j),
v, accumulate=True)`` multiplies by a matrix that is zero but at some places. Neither matrix has to
be there: the first is ``(x[i] * y[j]).sum(-1)``, the second ``zeros.index_add(0, i, v[:, None] *
x[j])``, and both are chains. Each is the gradient of the other.

A matrix goes only where nobody else reads it. Functions of such a matrix, point by point, and
products of it with others are followed in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from insum.fusion.hoist import sweep
from insum.fusion.later import later_of
from insum.fusion.making import NodeMaker, is_transposed
from insum.fusion.pointwise import SPELL
from insum.fusion.read import PRODUCTS
from insum.fusion.report import MovedProduct, where_of
from insum.fusion.shapes import is_one, is_zero, points, same, shape_of, value_of
from insum.fusion.views import FLOATS, INDICES, VIEWS

aten = torch.ops.aten
_INDEX = (aten.index.Tensor, aten._unsafe_index.Tensor)
_PUT = (aten.index_put.default, aten._unsafe_index_put.default)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_INVERSES = (
    aten.reciprocal.default,
    aten.rsqrt.default,
    aten.log.default,
    aten.exp.default,
)
#: What gives its argument as it is.
_SAME = (aten.alias.default, aten.detach.default, aten.clone.default)
_POINTWISE = {*SPELL, *PRODUCTS, *_SAME}
#: Bytes and operations in a second, about, and seconds that one more kernel takes: what decides
#: between a matrix and its places has to differ by more than what this is wrong by.
_BYTES, _FLOPS, _LAUNCH, _CLEARLY = 3e12, 5e13, 1e-5, 2.0


@dataclass(frozen=True, slots=True)
class MatrixEntries:
    """What is scattered into a matrix: rows, columns and values, as many of each."""

    rows: Node
    columns: Node
    values: Node


def rewrite(graph: Graph, wish: str) -> tuple[MovedProduct, ...]:
    """Do without every such matrix where that is clearly cheaper; which went."""
    # What the backward pass computes at places may be what the forward pass has as a matrix now: of
    # tensors that are written to in between it would be something else.
    if wish == "never" or later_of(graph).overwritten:
        return ()
    found = _VirtualMatrices(graph)
    found.reduce(lambda node: wish == "always" or _pays(found, node))
    if not found.virtual:
        return ()
    told = tuple(_told(node) for node in graph.nodes if node in found.virtual and _is_root(node))
    writer = _PairsWriter(graph, found)
    gone = [writer.replace(node) for node in list(graph.nodes) if found.ends_at(node)]
    sweep(graph, [*gone, *found.virtual])
    return told


def _told(node: Node) -> MovedProduct:
    what = "scattered to" if node.target in _PUT else "read"
    return MovedProduct(
        node.name,
        f"a matrix of all pairs, of which only the places that are {what} are computed",
        where_of(node),
    )


# --- which matrices -------------------------------------------------------------------------------


class _VirtualMatrices:
    """Matrices that nobody needs as a whole: products and functions of them (``dense``), and what
    was scattered (``scattered``).
    """

    def __init__(self, graph: Graph) -> None:
        self.dense: set[Node] = set()
        self.scattered: set[Node] = set()
        for node in graph.nodes:
            if not _is_matrix(node):
                continue
            if _is_scatter(node) or self._is_scaled(node):
                self.scattered.add(node)
            elif self._is_product(node) or self._is_of_dense(node):
                self.dense.add(node)

    @property
    def virtual(self) -> set[Node]:
        return self.dense | self.scattered

    def _is_product(self, node: Node) -> bool:
        return node.target is aten.mm.default and not any(
            n in self.scattered for n in node.all_input_nodes
        )

    def _is_scaled(self, node: Node) -> bool:
        """Whether a matrix is zero wherever a scattered one is, and linear in it."""
        if is_transposed(node) or node.target in _SAME:
            return _given(node)[0] in self.scattered
        arguments = [a for a in _given(node) if isinstance(a, Node)]
        if sum(a in self.scattered for a in arguments) != 1:
            return False
        if node.target in _QUOTIENTS:  # not by a tensor: there are zeros in it where nobody looks
            return _given(node)[0] in self.scattered and _is_finite(_given(node)[1], divides=True)
        return node.target in PRODUCTS and not any(map(_may_be_infinite, _given(node)))

    def _is_of_dense(self, node: Node) -> bool:
        if is_transposed(node):
            return _given(node)[0] in self.dense
        if node.target not in _POINTWISE or any(n in self.scattered for n in node.all_input_nodes):
            return False
        return any(n in self.dense for n in node.all_input_nodes)

    def reduce(self, pays: Callable[[Node], bool]) -> None:
        """Leave those that have to be there, until all others are read by each other, or at places
        alone.
        """
        for node in [n for n in self.virtual if _is_root(n) and not pays(n)]:
            self._leave(node)
        changed = True
        while changed:
            changed = False
            for node in list(self.virtual):
                used = bool(node.users) and all(self._is_read(node, user) for user in node.users)
                if not used or not self._has_root(node):
                    self._leave(node)
                    changed = True

    def _leave(self, node: Node) -> None:
        self.dense.discard(node)
        self.scattered.discard(node)

    def _has_root(self, node: Node) -> bool:
        return _is_root(node) or any(n in self.virtual for n in node.all_input_nodes)

    def _is_read(self, node: Node, user: Node) -> bool:
        if user in self.scattered:
            return True
        if node in self.dense:
            of_dense = user in self.dense and user.target is not aten.mm.default
            return of_dense or places_of(user, node) is not None
        return _is_product_with(user, node) or _is_sum_of(user, node)

    def ends_at(self, node: Node) -> bool:
        """Whether a node reads such a matrix and is none."""
        return node not in self.virtual and any(n in self.virtual for n in node.all_input_nodes)

    def ends(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """What reads a matrix in the end, or one that is made of it: that, and who."""
        for user in node.users:
            if user in self.virtual:
                yield from self.ends(user)
            else:
                yield node, user


def _given(node: Node) -> Any:
    """The arguments of a node, of whatever kind."""
    return node.args


def _is_matrix(node: Node) -> bool:
    """Whether a node is a matrix of pairs. A single row, or column, is as good as its places; and
    where it is broadcast, what is scattered to one place is at many.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    numbers = value.dtype in FLOATS or value.dtype == torch.bool
    return numbers and not any(map(is_one, value.shape))


def _is_finite(number: Any, divides: bool = False) -> bool:
    """Whether a number times zero is zero; where it ``divides``, zero by it."""
    if not isinstance(number, int | float):
        return False
    return math.isfinite(number) if not divides else number == number and number != 0


def _may_be_infinite(node: Any) -> bool:
    """Whether a tensor is a quotient of zeros easily, which times the zero of a place that nothing
    is scattered to is no number: a degree's inverse, where there is a node without edges.
    """
    if not isinstance(node, Node):
        return not _is_finite(node)
    while node.op == "call_function" and node.target in VIEWS and isinstance(_given(node)[0], Node):
        node = _given(node)[0]
    if node.target is aten.pow.Tensor_Scalar:
        return not isinstance(_given(node)[1], int | float) or _given(node)[1] < 0
    if node.target in _QUOTIENTS:
        return isinstance(_given(node)[1], Node) or not _given(node)[1]
    return node.target in _INVERSES


def _is_root(node: Node) -> bool:
    return node.target is aten.mm.default or node.target in _PUT


def _is_scatter(node: Node) -> bool:
    """Whether a node adds values to zeros, each at one place of a matrix."""
    if node.target not in _PUT or len(_given(node)) < 4 or _given(node)[3] is not True:
        return False
    base, tensors, values = _given(node)[:3]
    return (
        isinstance(base, Node)
        and isinstance(values, Node)
        and is_zero(base)
        and _are_places(tensors)
        and value_of(values).dim() <= 1
        and value_of(values).dtype == value_of(node).dtype
    )


def _are_places(tensors: Any) -> bool:
    """Whether index tensors name one place of a matrix after the other."""
    if not isinstance(tensors, list | tuple) or len(tensors) != 2:
        return False
    values: list[Any] = [t.meta.get("val") if isinstance(t, Node) else None for t in tensors]
    if not all(isinstance(v, torch.Tensor) and v.dtype in INDICES and v.dim() == 1 for v in values):
        return False
    return same(values[0].shape[0], values[1].shape[0])


def places_of(user: Node, matrix: Node) -> tuple[Node, Node] | None:
    """The places at which a node reads a matrix; None where it reads more."""
    if (
        user.target not in _INDEX
        or _given(user)[0] is not matrix
        or not _are_places(_given(user)[1])
    ):
        return None
    rows, columns = _given(user)[1]
    return (rows, columns) if matrix not in (rows, columns) else None


def _is_product_with(user: Node, matrix: Node) -> bool:
    """Whether a node is a product of a matrix with another one."""
    if user.target not in (aten.mm.default, aten.addmm.default):
        return False
    sides = _given(user)[-2:]
    plain = user.target is aten.mm.default or _given(user)[0] is not matrix and not user.kwargs
    return plain and len(_given(user)) <= 3 and sum(side is matrix for side in sides) == 1


def _is_sum_of(user: Node, matrix: Node) -> bool:
    """Whether a node sums each row, or each column, of a matrix."""
    if user.target is not aten.sum.dim_IntList or value_of(user).dtype != value_of(matrix).dtype:
        return False
    return len(_given(user)) > 1 and len(_given(user)[1]) == 1


def _pays(found: _VirtualMatrices, node: Node) -> bool:
    """Whether all places of a matrix are clearly more work than those that are read."""
    value = value_of(node)
    if value.device.type != "cuda":
        return False
    size, width = points(shape_of(node)), value.itemsize
    if node.target is aten.mm.default:
        inner = points(shape_of(_given(node)[0])[1:])
        ends = {p for at, user in found.ends(node) if (p := places_of(user, at)) is not None}
        work, read = size * inner, sum(points(shape_of(rows)) for rows, _ in ends) * inner
    else:
        entries = points(shape_of(_given(node)[1][0]))
        others = [
            points(shape_of(user)) // max(1, points(shape_of(at)[:1]))
            for at, user in found.ends(node)
            if _is_product_with(user, at)
        ]
        work, read = size * max([1, *others]), entries * max([1, *others])
    dense = 2 * work / _FLOPS + 2 * size * width / _BYTES
    return _CLEARLY * (2 * read * width / _BYTES + _LAUNCH) < dense


# --- without them ---------------------------------------------------------------------------------


class _PairsWriter(NodeMaker):
    """Writes what reads such matrices without them."""

    def __init__(self, graph: Graph, found: _VirtualMatrices) -> None:
        super().__init__(graph, found.virtual)
        self.found = found
        self.entries: dict[Node, MatrixEntries] = {}
        self.values: dict[tuple[Node, Node, Node], Node] = {}

    def replace(self, node: Node) -> Node:
        with self.instead_of(node):
            new = self.written(node)
        node.replace_all_uses_with(new)
        return node

    def written(self, node: Node) -> Any:
        if node.target in _INDEX:
            matrix, (rows, columns) = _given(node)[:2]
            return self.at(matrix, rows, columns)
        if node.target is aten.sum.dim_IntList:
            return self.summed(node)
        left, right = _given(node)[-2:]
        assert isinstance(left, Node) and isinstance(right, Node)
        new = (
            self.by_left(left, right)
            if left in self.found.scattered
            else self.by_right(left, right)
        )
        if node.target is aten.addmm.default:
            new = self.made(aten.add.Tensor, _given(node)[0], new)
        return new

    def by_left(self, matrix: Node, other: Node) -> Node:
        """``matrix @ other``"""
        e = self.entries_of(matrix)
        rows = self.made(aten.index.Tensor, other, [e.columns])
        message = self.made(aten.mul.Tensor, self.made(aten.unsqueeze.default, e.values, 1), rows)
        zeros = self.zeros(message, (matrix, 0), (other, 1))
        return self.made(aten.index_put.default, zeros, [e.rows], message, True)

    def by_right(self, other: Node, matrix: Node) -> Node:
        """``other @ matrix``"""
        e = self.entries_of(matrix)
        message = self.made(
            aten.mul.Tensor, self.made(aten.index.Tensor, other, [None, e.rows]), e.values
        )
        zeros = self.zeros(message, (other, 0), (matrix, 1))
        return self.made(aten.index_put.default, zeros, [None, e.columns], message, True)

    def summed(self, node: Node) -> Node:
        """Each row of a scattered matrix, or each column, as a sum."""
        matrix, (dim,), *keeps = _given(node)
        e = self.entries_of(matrix)
        kept = 1 - int(dim) % 2
        zeros = self.zeros(e.values, (matrix, kept))
        at = (e.rows, e.columns)[kept]
        new = self.made(aten.index_put.default, zeros, [at], e.values, True)
        keep = bool(keeps[0]) if keeps else bool(node.kwargs.get("keepdim", False))
        return self.made(aten.unsqueeze.default, new, 1 - kept) if keep else new

    def entries_of(self, matrix: Node) -> MatrixEntries:
        """What a scattered matrix, or one that is made of it, holds."""
        if matrix not in self.entries:
            self.entries[matrix] = self._entries_of(matrix)
        return self.entries[matrix]

    def _entries_of(self, matrix: Node) -> MatrixEntries:
        if _is_scatter(matrix):
            rows, columns = _given(matrix)[1]
            values = _given(matrix)[2]
            assert isinstance(values, Node)
            if not value_of(values).dim() or not same(shape_of(values)[0], shape_of(rows)[0]):
                values = self.made(aten.expand.default, values, [self.size(rows, 0)])
            return MatrixEntries(rows, columns, values)
        if is_transposed(matrix):
            e = self.entries_of(_given(matrix)[0])
            return MatrixEntries(e.columns, e.rows, e.values)
        if matrix.target in _SAME:
            return self.entries_of(_given(matrix)[0])
        inner = next(n for n in matrix.all_input_nodes if self.is_scattered(n))
        e = self.entries_of(inner)
        arguments = [
            e.values if a is inner else self.at(a, e.rows, e.columns) for a in _given(matrix)
        ]
        return MatrixEntries(e.rows, e.columns, self.made(matrix.target, *arguments))

    def is_scattered(self, node: Node) -> bool:
        return node in self.found.scattered or node in self.entries or _is_scatter(node)

    def at(self, value: Any, rows: Node, columns: Node) -> Any:
        """A matrix at places; numbers are the same at all of them."""
        if not isinstance(value, Node):
            return value
        key = value, rows, columns
        if key not in self.values:
            self.values[key] = self._at(value, rows, columns)
        return self.values[key]

    def _at(self, node: Node, rows: Node, columns: Node) -> Any:
        shape = shape_of(node)
        if not shape:
            return node
        if len(shape) == 1 or is_one(shape[0]):
            return self.of_vector(node, columns, len(shape) - 1)
        if is_one(shape[1]):
            return self.of_vector(node, rows, 0)
        if node.target is aten.expand.default and value_of(_given(node)[0]).dim() <= 2:
            return self.at(_given(node)[0], rows, columns)
        if node not in self.found.dense:
            return self.made(aten.index.Tensor, node, [rows, columns])
        if is_transposed(node):
            return self.at(_given(node)[0], columns, rows)
        if node.target is aten.mm.default:
            return self.sampled(node, rows, columns)
        if node.target in _SAME:
            return self.at(_given(node)[0], rows, columns)
        arguments = [self.at(a, rows, columns) for a in _given(node)]
        return self.made(node.target, *arguments, **node.kwargs)

    def of_vector(self, node: Node, index: Node, dim: int) -> Node:
        """One that is broadcast along the other dimension."""
        if is_one(shape_of(node)[dim]):
            return self.made(aten.view.default, node, [1])
        if len(shape_of(node)) == 2:
            node = self.made(aten.select.int, node, 1 - dim, 0)
        return self.made(aten.index.Tensor, node, [index])

    def sampled(self, node: Node, rows: Node, columns: Node) -> Node:
        """``(a @ b)[rows, columns]``"""
        a, b = _given(node)[:2]
        assert isinstance(a, Node) and isinstance(b, Node)
        other = _given(b)[0] if is_transposed(b) else self.made(aten.permute.default, b, [1, 0])
        left = self.made(aten.index.Tensor, a, [rows])
        right = self.made(aten.index.Tensor, other, [columns])
        return self.made(aten.sum.dim_IntList, self.made(aten.mul.Tensor, left, right), [1])
