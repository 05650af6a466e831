"""Means over edges as programs write them: a sum, divided by a count of the edges at each node.

How many there are follows from the edges alone. Where the division stands behind the sum, the count
is taken anew at each call, and the sum is read and written once more. Each message may as well be
multiplied by its share before: ``sum(m) / count`` is ``sum(m * (1 / count)[i])``, one statement,
which computes the shares once. In the backward pass what is divided is gathered, and there the
division may come after the gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from insum.fusion.hoist import sweep
from insum.fusion.later import later_of
from insum.fusion.making import NodeMaker
from insum.fusion.origin import origin_of
from insum.fusion.report import MovedProduct, where_of
from insum.fusion.roots import least_scatter
from insum.fusion.shapes import is_zero, points, same, shape_of, value_of
from insum.fusion.views import FLOATS, INDICES

aten = torch.ops.aten
_SPREAD = (aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.reshape.default)
_PUT = (aten.index_put.default, aten._unsafe_index_put.default)
_ADDS = (aten.scatter_add.default, aten.index_add.default)
_INDEX = (aten.index.Tensor, aten._unsafe_index.Tensor)
_CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_AT_LEAST = (aten.clamp.default, aten.clamp_min.default)
#: In these, a share is as exact as a sum.
_WIDE = (torch.float32, torch.float64)
_SPELLED = "a mean that one operation takes: as a sum, divided by a count"
_WHAT = "a sum over edges that is divided by a count of them: each edge counts for its share"


def rewrite(graph: Graph, wish: str) -> tuple[MovedProduct, ...]:
    """Divide by counts of edges before sums, and after gathers; which sums that were."""
    if wish == "never":
        return ()
    moved = _spell_out(graph, wish)
    return moved if later_of(graph).overwritten else (*moved, *_share_out(graph, wish))


def _share_out(graph: Graph, wish: str) -> tuple[MovedProduct, ...]:
    counts = {node: count for node in graph.nodes if (count := _count_of(node)) is not None}
    if len(set(map(_edges_of, counts.values()))) != 1 or None in map(_edges_of, counts.values()):
        return ()
    writer, moved = _ShareWriter(graph), list[MovedProduct]()
    for node, count in counts.items():
        total = _given(node)[0]
        if _is_sum(total, node) and _is_worth_it(total, wish):
            moved.append(MovedProduct(total.name, _WHAT, where_of(total)))
            writer.share(node, total, count)
        elif _is_worth_it(node, wish) and node.users:
            at = {user: row for user in node.users if (row := _row_of(user, node)) is not None}
            if len(at) == len(node.users):
                writer.divide_later(node, count, at)
    return tuple(moved)


def _spell_out(graph: Graph, wish: str) -> tuple[MovedProduct, ...]:
    """Means that one operation takes, for which Inductor has no kernel, as sums and counts."""
    writer, moved = _ShareWriter(graph), list[MovedProduct]()
    for node in graph.nodes:
        if node.target is aten.scatter_reduce.two and node.args[4] == "mean":
            value = value_of(node)
            if value.dtype in FLOATS and (wish == "always" or value.device.type == "cuda"):
                moved.append(MovedProduct(node.name, _SPELLED, where_of(node)))
                writer.spell_out(node)
    return tuple(moved)


def _edges_of(count: Node) -> Node | None:
    """The tensor that is counted, where it is passed as it is. Sums over several parts of edges, as
    those of each relation, had better stay alike: then they are one statement.
    """
    origin = origin_of(count, sums=True)
    assert origin is not None
    return (
        origin.sources[0]
        if len(origin.sources) == 1 and "index.Tensor" not in origin.program
        else None
    )


def _given(node: Node) -> Any:
    return node.args


def _is_worth_it(node: Node, wish: str) -> bool:
    """Whether a chain will take it: `cost.objection` tells of shorter ones why not."""
    value = value_of(node)
    if wish == "always":
        return True
    edges = [
        points(shape_of(user))
        for user in (node, *node.users, *node.all_input_nodes)
        if isinstance(user.meta.get("val"), torch.Tensor)
    ]
    return value.device.type == "cuda" and max(edges) >= least_scatter(node)


def _count_of(node: Node) -> Node | None:
    """What a node is divided by, where that is one number for each of its rows that follows from
    integer tensors alone, by a sum.
    """
    if node.op != "call_function" or node.target is not aten.div.Tensor or node.kwargs:
        return None
    value, (over, by) = node.meta.get("val"), node.args
    if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE or value.dim() < 1:
        return None
    if not isinstance(over, Node) or not isinstance(by, Node) or not _is_like(over, node):
        return None
    if len(shape_of(by)) != value.dim():  # of fewer dimensions the first is none of rows
        return None
    count = _vector_of(by, shape_of(node)[0])
    if count is None or value_of(count).dtype != value.dtype:
        return None
    origin = origin_of(count, sums=True)
    return count if origin is not None and origin.costly and _is_positive(count) else None


def _is_positive(node: Node) -> bool:
    """Whether no value is zero, as that of ``count.clamp(min=1)``: nothing divided by nothing is no
    number, and a node without edges has no share that could tell.
    """
    while node.target in (*_SPREAD, *_CASTS):
        node = _given(node)[0]
    if node.target not in _AT_LEAST:
        return False
    given = _given(node)
    low = given[1] if len(given) > 1 else node.kwargs.get("min")
    return isinstance(low, int | float) and low >= 1


def _is_like(one: Node, other: Node) -> bool:
    a, b = shape_of(one), shape_of(other)
    return len(a) == len(b) and all(map(same, a, b))


def _vector_of(node: Node, rows: Any) -> Node | None:
    """The vector that a tensor of so many rows repeats in all of its dimensions but the first. One
    that is repeated for each row, as by ``expand``, runs along another.
    """
    while shape_of(node) and same(shape_of(node)[0], rows):
        if len(shape_of(node)) == 1:
            return node
        if node.op != "call_function" or node.target not in _SPREAD:
            return None
        source: Node = _given(node)[0]
        if node.target is aten.expand.default and len(shape_of(source)) != len(shape_of(node)):
            return None
        node = source
    return None


def _is_sum(node: Node, user: Node) -> bool:
    """Whether a node adds up messages in zeros, by row, for one user alone."""
    return list(node.users) == [user] and _scattered(node) is not None


def _scattered(node: Node) -> tuple[Node, Node] | None:
    """The message of a scatter by rows into zeros, and the index."""
    given = _given(node)
    if node.target in _PUT and len(given) > 3 and given[3] is True and len(given[1]) == 1:
        index, message = given[1][0], given[2]
    elif node.target in _ADDS and given[1] == 0 and not node.kwargs:
        index, message = given[2], given[3]
    else:
        return None
    if not isinstance(message, Node) or not is_zero(given[0]):
        return None
    row = _index_of(index, message)
    full = row is not None and len(shape_of(message)) == len(shape_of(node))
    return (message, row) if full and row is not None else None


def _index_of(index: Any, message: Node) -> Node | None:
    """The row of each message."""
    if not isinstance(index, Node) or value_of(index).dtype not in INDICES:
        return None
    return _vector_of(index, shape_of(message)[0])


def _row_of(user: Node, source: Node) -> Node | None:
    """By which index a node gathers rows of another; None where it does something else."""
    given = _given(user)
    if user.target in _INDEX and given[0] is source and len(given[1]) == 1:
        return _index_of(given[1][0], user)
    if user.target is aten.index_select.default and given[0] is source and given[1] == 0:
        return _index_of(given[2], user)
    if user.target is aten.gather.default and given[0] is source and given[1] == 0:
        return _index_of(given[2], user)
    return None


class _ShareWriter(NodeMaker):
    """Writes shares instead of divisions."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.shares: dict[Node, Node] = {}

    def share(self, node: Node, total: Node, count: Node) -> None:
        """A scatter of messages that were divided, for a scatter that is divided."""
        found = _scattered(total)
        assert found is not None
        message, row = found
        with self.instead_of(node):
            scaled = self.scaled(message, count, row)
            place = 2 if total.target in _PUT else 3
            arguments = [scaled if k == place else a for k, a in enumerate(total.args)]
            new = self.made(total.target, *arguments)
        node.replace_all_uses_with(new)
        sweep(self.graph, [node, total])

    def divide_later(self, node: Node, count: Node, at: dict[Node, Node]) -> None:
        for user, row in at.items():
            with self.instead_of(user):
                arguments = [_given(node)[0] if a is node else a for a in user.args]
                new = self.scaled(self.made(user.target, *arguments), count, row)
            user.replace_all_uses_with(new)
            sweep(self.graph, [user])
        sweep(self.graph, [node])

    def spell_out(self, node: Node) -> None:
        """What ``scatter_reduce`` does: a row with no entry keeps what is there, which otherwise
        counts as one entry more, or not at all.
        """
        base, dim, index, message = _given(node)[:4]
        own = node.kwargs.get("include_self", True) is True
        with self.instead_of(node):
            start = base if own or is_zero(base) else self.made(aten.full_like.default, base, 0)
            total = self.made(aten.scatter_add.default, start, dim, index, message)
            count = self.counted(base, dim, index, message)
            if own:
                by = self.made(aten.add.Tensor, count, 1)
            else:
                by = self.made(aten.clamp_min.default, count, 1)
            new = self.made(aten.div.Tensor, total, self.spread(by, base))
            if not own and not is_zero(base):
                some = self.spread(self.made(aten.gt.Scalar, count, 0), base)
                new = self.made(aten.where.self, some, new, base)
        node.replace_all_uses_with(new)
        sweep(self.graph, [node])

    def counted(self, base: Node, dim: Any, index: Node, message: Node) -> Node:
        """How many entries each row has, by a vector where all columns have the same."""
        by_rows = dim in (0, -len(shape_of(base))) and all(
            map(same, shape_of(base)[1:], shape_of(index)[1:])
        )
        row = _index_of(index, message) if by_rows else None
        if row is None:
            ones = self.made(aten.full_like.default, message, 1)
            nothing = self.made(aten.full_like.default, base, 0)
            return self.made(aten.scatter_add.default, nothing, dim, index, ones)
        nothing = self.zeros(base, (base, 0))
        entries = self.full(1, message, (row, 0))
        return self.made(aten.scatter_add.default, nothing, 0, row, entries)

    def spread(self, vector: Node, like: Node) -> Node:
        """A number for each row, of a tensor that may have columns."""
        for place in range(len(shape_of(vector)), len(shape_of(like))):
            vector = self.made(aten.unsqueeze.default, vector, place)
        return vector

    def scaled(self, message: Node, count: Node, row: Node) -> Node:
        if count not in self.shares:
            with self.graph.inserting_after(count):  # wherever the first of them is read
                self.shares[count] = self.made(aten.reciprocal.default, count)
        share = self.made(aten.index.Tensor, self.shares[count], [row])
        return self.made(aten.mul.Tensor, message, self.spread(share, message))
