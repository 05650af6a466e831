"""Products of gathered rows with one matrix, which commute with the gather: ``x[i] @ w`` is ``(x @
w)[i]``, with as many rows to multiply as there are nodes, and not edges.

Rows may be put together of several, ``cat([x[i], x[j], e], 1) @ w``: each part is multiplied by its
own rows of ``w``, and the results are added, at the edges, by whoever reads them next. Sums and
differences of gathered rows are parts as they are: the difference of two products is less exact
than the product of a difference.

In the backward pass a scatter commutes in the same way: the gradient of ``x`` is a product with
what is scattered, ``s = zeros.index_add(0, i, dz)``, and so is that of ``w``, ``x.T @ s``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from insum.fusion.hoist import sweep
from insum.fusion.later import later_of
from insum.fusion.making import NodeMaker, is_transposed
from insum.fusion.report import MovedProduct, where_of
from insum.fusion.shapes import is_one, is_zero, points, same, shape_of, value_of
from insum.fusion.views import INDICES

aten = torch.ops.aten
_UNIT_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.select.int,
)
_INDEX = (aten.index.Tensor, aten._unsafe_index.Tensor)
_PUT = (aten.index_put.default, aten._unsafe_index_put.default)
_WHAT = "rows are multiplied before they are gathered: there are fewer nodes than edges"
#: What may be done with a gradient before it is scattered.
_LINEAR = (
    aten.slice.Tensor,
    aten.neg.default,
    aten.add.Tensor,
    aten.select_scatter.default,
)
#: In these, one more rounding of a part of a sum does not show.
_WIDE = (torch.float32, torch.float64)
#: How many times fewer nodes than edges there are, at least; and how many times narrower than
#: their products gathered rows may be, which are what is gathered instead.
FEWER, NARROWER = 2, 4


@dataclass(frozen=True, slots=True)
class RowPart:
    """Some columns of what is multiplied: rows of ``source``, gathered where there is an index."""

    source: Node
    index: Node | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A product of rows, put together of parts, with a matrix."""

    node: Node
    rows: Node
    parts: tuple[RowPart, ...]


@dataclass(frozen=True, slots=True)
class GradientTerm:
    """Some columns of the gradient of rows, ``upstream @ matrix``, perhaps negated."""

    product: Node
    start: int
    stop: int
    negated: bool


def rewrite(graph: Graph, wish: str, taken: frozenset[Node]) -> tuple[MovedProduct, ...]:
    """Multiply before gathers, and after scatters, where there are fewer nodes than edges; which
    products that were. ``taken``: nodes that a chain computes in its own statement.
    """
    if wish == "never" or later_of(graph).overwritten:
        return ()
    found = [one for node in graph.nodes if (one := _product_of(node)) and node not in taken]
    found = [one for one in found if wish == "always" or _is_on_gpu(one.node)]
    by_rows: dict[Node, list[RowProduct]] = {}
    for one in found:
        by_rows.setdefault(one.rows, []).append(one)
    alone = [
        every for rows, every in by_rows.items() if _users_are(rows, {one.node for one in every})
    ]
    _RowsWriter(graph).commute(alone)
    return tuple(
        MovedProduct(one.node.name, _WHAT, where_of(one.node)) for every in alone for one in every
    )


def _is_on_gpu(node: Node) -> bool:
    return value_of(node).device.type == "cuda"


def _given(node: Node) -> Any:
    return node.args


def _is_matrix(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()


def _product_of(node: Node) -> RowProduct | None:
    """A node as a product of rows of which it pays to multiply some before they are gathered."""
    if node.op != "call_function" or not _is_matrix(node):
        return None
    if node.target is aten.mm.default:
        rows = _given(node)[0]
    elif node.target is aten.addmm.default and not node.kwargs and _adds_a_row(node):
        rows = _given(node)[1]
    else:
        return None
    if is_transposed(rows) or not all(isinstance(s, int) for s in (*shape_of(rows)[1:],)):
        return None
    parts = tuple(_parts_of(rows, 0))
    if any(value_of(part.source).dtype != value_of(rows).dtype for part in parts):
        return None  # they are cast where they are put together
    gathered = [part for part in parts if part.index is not None]
    width = sum(part.stop - part.start for part in gathered)
    edges = points(shape_of(rows)[:1])
    fewer = all(FEWER * points(shape_of(part.source)[:1]) <= edges for part in gathered)
    rounds = len(parts) == 1 or value_of(node).dtype in _WIDE
    if not gathered or not fewer or not rounds or NARROWER * width < points(shape_of(node)[1:]):
        return None
    return RowProduct(node, rows, parts)


def _adds_a_row(node: Node) -> bool:
    """Whether what is added to a product is the same for all of its rows."""
    if len(node.args) != 3:
        return False
    shape = shape_of(_given(node)[0])
    return len(shape) < 2 or is_one(shape[0])


def _parts_of(node: Node, start: int) -> Iterator[RowPart]:
    node = _without_units(node)
    shape = shape_of(node)
    stop = start + int(shape[-1])
    if node.target is aten.cat.default and len(node.args) > 1:
        dim: Any = node.args[1]
        if int(dim) % len(shape) == len(shape) - 1:
            for one in _given(node)[0]:
                yield from _parts_of(one, start)
                start += int(shape_of(one)[-1])
            return
    source, index = _gathered(node)
    yield RowPart(source, index, start, stop)


def _without_units(node: Node) -> Node:
    """What a node is a view of that has further dimensions of size 1 between rows and columns, or
    fewer of them.
    """
    while (
        node.op == "call_function"
        and node.target in _UNIT_VIEWS
        and _is_rows(_given(node)[0])
        and _is_rows(node)
        and same(shape_of(node)[0], shape_of(_given(node)[0])[0])
        and same(shape_of(node)[-1], shape_of(_given(node)[0])[-1])
    ):
        node = _given(node)[0]
    return node


def _is_rows(node: Node) -> bool:
    shape = shape_of(node)
    return len(shape) >= 2 and all(map(is_one, shape[1:-1])) and isinstance(shape[-1], int)


def _gathered(node: Node) -> tuple[Node, Node | None]:
    """Where rows come from, and by which index."""
    given = _given(node)
    if node.target in _INDEX and len(given[1]) == 1 and _is_index(given[1][0]):
        source, index = given[0], given[1][0]
    elif node.target is aten.index_select.default and not given[1] and _is_index(given[2]):
        source, index = given[0], given[2]
    else:
        return node, None
    return (source, index) if _is_rows(source) else (node, None)


def _is_index(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype in INDICES


def _users_are(rows: Node, products: set[Node]) -> bool:
    """Whether nobody needs rows but products with matrices, and the gradients of these."""
    return all(
        user in products
        or user.target is aten.mm.default
        and _given(user)[1] is rows
        or is_transposed(user)
        and all(u.target is aten.mm.default and _given(u)[0] is user for u in user.users)
        for user in rows.users
    )


class _RowsWriter(NodeMaker):
    """Writes products of rows, and their gradients, as products of nodes."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.sums: dict[tuple[Node, Node], list[Node]] = {}
        #: What was written in place of others, which may be rows of further products.
        self.now: dict[Node, Node] = {}

    def commute(self, groups: list[list[RowProduct]]) -> None:
        """``groups``: products of the same rows."""
        wanted: dict[Node, tuple[Any, ...]] = {}
        unused: list[Node] = []
        for products in groups:
            more, gradients = self.wanted_of(products)
            wanted = more | wanted
            unused += [products[0].rows, *gradients]
        # one after the other, for what they share is made for the first
        for node in [node for node in self.graph.nodes if node in wanted]:
            self.replace(node, *wanted[node])
        sweep(self.graph, unused)

    def wanted_of(
        self, products: list[RowProduct]
    ) -> tuple[dict[Node, tuple[Any, ...]], set[Node]]:
        """What to write in the place of which nodes, and gradients that nobody reads then."""
        first = products[0]
        rows, weights = first.rows, [_given(one.node)[-1] for one in products]
        wanted: dict[Node, tuple[Any, ...]] = {one.node: (self.product, one) for one in products}
        for user in rows.users:
            if is_transposed(user):
                wanted |= dict.fromkeys(user.users, (self.of_weight, first, True))
            elif user not in wanted:
                wanted[user] = self.of_weight, first, False
        gradients = {user for weight in weights for user in _products_with(weight)}
        scatters = _scatters_of(gradients)
        wanted |= {scatter: (self.of_rows, terms) for scatter, terms in scatters.items()}
        return wanted, gradients

    def replace(self, node: Node, write: Any, *about: Any) -> None:
        with self.instead_of(node):
            new = write(node, *about)
        node.replace_all_uses_with(new)
        self.now[node] = new
        sweep(self.graph, [node])

    # --- what is written ---

    def product(self, node: Node, one: RowProduct) -> Node:
        weight, bias = _given(node)[-1], _given(node)[0]
        terms: list[Node] = []
        add = node.target is aten.addmm.default
        for part in sorted(one.parts, key=lambda part: part.index is None):
            own = self.cut(weight, 0, part.start, part.stop)
            source = self.flat(part.source)
            first = add and not terms
            made = (
                self.made(aten.addmm.default, bias, source, own)
                if first
                else self.made(aten.mm.default, source, own)
            )
            if part.index is not None:
                made = self.made(aten.index.Tensor, made, [part.index])
            terms.append(made)
        return self.total(terms)

    def of_weight(self, node: Node, one: RowProduct, rows_first: bool) -> Node:
        """``rows.T @ dz``, or ``dz.T @ rows``"""
        given = _given(node)
        upstream = given[1] if rows_first else self.turned(given[0])
        blocks: dict[int, Node] = {}
        for part in one.parts:
            source = self.flat(part.source)
            other = upstream if part.index is None else self.summed(upstream, part.index, source)
            pair = (source, other) if rows_first else (other, source)
            blocks[part.start] = self.made(aten.mm.default, self.turned(pair[0]), pair[1])
        every = [blocks[start] for start in sorted(blocks)]
        if len(every) == 1:
            return every[0]
        return self.made(aten.cat.default, every, 0 if rows_first else 1)

    def of_rows(self, node: Node, terms: list[GradientTerm]) -> Node:
        """What is scattered of a gradient of rows, as a product of what is scattered."""
        index, found = _given(node)[1][0], list[Node]()
        for term in terms:
            upstream, matrix = _given(term.product)[:2]
            own = self.cut(matrix, 1, term.start, term.stop)
            made = self.made(aten.mm.default, self.summed(upstream, index, node), own)
            found.append(self.made(aten.neg.default, made) if term.negated else made)
        new, shape = self.total(found), shape_of(node)
        if len(shape) > 2:
            new = self.made(aten.view.default, new, [self.size(node, d) for d in range(len(shape))])
        return new

    # --- pieces ---

    def summed(self, upstream: Node, index: Node, like: Node) -> Node:
        """What arrives at the edges, added up for each node; made where it is first needed."""
        made = self.sums.setdefault((upstream, index), [])
        for one in made:  # by one index nodes of several kinds may be gathered
            if same(shape_of(one)[0], shape_of(like)[0]):
                return one
        zeros = self.zeros(upstream, (like, 0), (upstream, 1))
        made.append(self.made(aten.index_put.default, zeros, [index], upstream, True))
        return made[-1]

    def flat(self, node: Node) -> Node:
        node = self.now.get(node, node)
        if len(shape_of(node)) == 2:
            return node
        return self.made(aten.view.default, node, [self.size(node, 0), shape_of(node)[-1]])

    def turned(self, node: Node) -> Node:
        if is_transposed(node):
            found: Node = _given(node)[0]
            return found
        return self.made(aten.permute.default, node, [1, 0])

    def cut(self, node: Node, dim: int, start: int, stop: int) -> Node:
        if start == 0 and shape_of(node)[dim] == stop:
            return node
        return self.made(aten.slice.Tensor, node, dim, start, stop)

    def total(self, terms: list[Node]) -> Node:
        new = terms[0]
        for term in terms[1:]:
            new = self.made(aten.add.Tensor, new, term)
        return new


# --- gradients ------------------------------------------------------------------------------------


def _products_with(weight: Node) -> Iterable[Node]:
    """Products of something with the transpose of a matrix."""
    turned = [_given(weight)[0]] if is_transposed(weight) else []
    turned += [user for user in weight.users if is_transposed(user)]
    # the transpose of a transpose
    turned += [
        twice
        for one in list(turned)
        for user in one.users
        if is_transposed(user)
        for twice in user.users
        if is_transposed(twice)
    ]
    return [
        user
        for one in turned
        for user in one.users
        if user.target is aten.mm.default and _given(user)[1] is one
    ]


def _scatters_of(products: set[Node]) -> dict[Node, list[GradientTerm]]:
    """Scatters of columns of products, where all that is done with a product is that; and what each
    adds up.
    """
    found: dict[Node, list[GradientTerm]] = {}
    todo, seen = list(products), set[Node]()
    while todo:
        for user in todo.pop().users:
            terms = _terms_of(user, products)
            if terms:
                found[user] = terms
            elif user in seen or not _is_linear(user):
                continue
            else:
                todo.append(user)
            seen.add(user)
    between = seen | products
    whole = all(user in between for node in between - found.keys() for user in node.users)
    return found if whole else {}


def _is_linear(node: Node) -> bool:
    return node.target in (*_LINEAR, *_UNIT_VIEWS)


def _terms_of(scatter: Node, products: set[Node]) -> list[GradientTerm]:
    """What a scatter adds up, where all of it is columns of such products; else none."""
    if scatter.target not in _PUT or len(scatter.args) < 4 or scatter.args[3] is not True:
        return []
    base, tensors, message = _given(scatter)[:3]
    if len(tensors) != 1 or not _is_index(tensors[0]) or not is_zero(base):
        return []
    if not _is_rows(base) or not _is_rows(message):
        return []
    edges, nodes = points(shape_of(message)[:1]), points(shape_of(base)[:1])
    if FEWER * nodes > edges:
        return []
    return _linear(message, products, 0, int(shape_of(message)[-1]), False) or []


def _linear(
    node: Node, products: set[Node], start: int, stop: int, negated: bool
) -> list[GradientTerm] | None:
    """Columns of a node as columns of products; None where it is something else."""
    given = _given(node)
    if node in products:
        return [GradientTerm(node, start, stop, negated)]
    if node.op != "call_function" or not _is_rows(node):
        return None
    if node.target is aten.slice.Tensor and _is_rows(given[0]):
        at = _columns_of(node, given[0])
        if at is None:
            return None
        return _linear(given[0], products, at[0] + start, at[0] + stop, negated)
    if node.target is aten.neg.default:
        return _linear(given[0], products, start, stop, not negated)
    if node.target is aten.add.Tensor and len(given) == 2 and not node.kwargs:
        sides = [
            _linear(side, products, start, stop, negated) if _is_like(side, node) else None
            for side in given
        ]
        return None if None in sides else [term for side in sides if side for term in side]
    below = _without_units(node)
    if below is node:
        below = _filled(node)
    return None if below is node else _linear(below, products, start, stop, negated)


def _is_like(side: Any, node: Node) -> bool:
    if not isinstance(side, Node):
        return False
    ours, its = shape_of(node), shape_of(side)
    return len(ours) == len(its) and all(map(same, ours, its))


def _filled(node: Node) -> Node:
    """What fills the whole of zeros, along a dimension of size 1."""
    if node.target is not aten.select_scatter.default:
        return node
    base, source, dim, _ = _given(node)
    whole = is_zero(base) and is_one(shape_of(node)[int(dim)]) and _is_rows(source)
    return source if whole else node


def _columns_of(user: Node, product: Node) -> tuple[int, int] | None:
    """Which columns a node is of rows; None where it is something else."""
    if user.target is not aten.slice.Tensor or _given(user)[0] is not product:
        return None
    given, shape = _given(user), shape_of(product)
    if len(given) > 4 or (int(given[1]) if len(given) > 1 else 0) % len(shape) != len(shape) - 1:
        return None
    size = int(shape[-1])
    start, stop = (*given[2:4], None, None)[:2]
    if not all(isinstance(n, int | None) for n in (start, stop)):
        return None
    low, high, _ = slice(start, stop).indices(size)
    return low, high
