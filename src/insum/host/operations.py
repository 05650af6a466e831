"""Operations of graphs that a CPU does better in another way than torch's own: rows that several
index tensors choose, to be read or added to, and products of many small matrices, for which torch,
where it has no library for them, calls BLAS for one after the other, through views that take longer
than the product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from insum.graph.lower import MOST_GRAPHS, Lowered, lower
from insum.host.library import has_library
from insum.lang.bind import Problem

#: Multiplications of one product from which on what torch does around it does not matter, measured.
MOST_PRODUCT = 1 << 18
#: Numbers of a result from which on it matters where they are written, and rows and columns of each
#: of many products of which calling the library is little, measured.
LEAST_WRITTEN, LEAST_SIDE = 1 << 14, 16
#: How many times less than the result something has to be that is read turned, or copied, for it;
#: measured.
TURNED, COPIED = 2, 4
_FLOATS = torch.float32, torch.float64


def lower_on_host(problem: Problem, mode: str = "new", *, alone: bool = True) -> Lowered:
    """The graph of a problem, as this CPU is to run it: of plain tensors, without being traced.
    ``alone``: it is not to be merged with others.
    """
    return _with_operations(lower(problem, mode), has_library(), alone)


@lru_cache(maxsize=MOST_GRAPHS)
def _with_operations(lowered: Lowered, library: bool, alone: bool) -> Lowered:
    copied = Graph()
    copied.output(copied.graph_copy(lowered.module.graph, {}))
    changed = False
    for node in copied.nodes:
        operation = _operation(node, library)
        if operation is not None:
            node.op, node.target, changed = "call_function", operation, True
    changed |= alone and made_in_order(copied)
    if not changed:
        return lowered
    return replace(lowered, module=GraphModule(lowered.module, copied))


def _operation(node: Node, library: bool) -> Callable[..., Tensor] | None:
    """What is called instead."""
    if node.target is torch.einsum and len(node.args) == 3:
        return einsum if library else einsum_without_library
    if node.target is operator.getitem and isinstance(node.args[1], tuple):
        is_rows = len(node.args[1]) > 1 and all(isinstance(i, Node) for i in node.args[1])
        return rows_at if is_rows else None
    if node.op == "call_method" and node.target in ("index_put_", "index_add_"):
        return add_at if node.target == "index_put_" else add_rows
    return None


def made_in_order(graph: Graph) -> bool:
    """Compute products as they are to lie in memory, instead of moving them afterwards."""
    changed = False
    for node in [*graph.nodes]:
        if node.target != "contiguous":
            continue
        (before,) = node.all_input_nodes
        operation = _in_order(before)
        if operation is not None and len(before.users) == 1:
            node.op, node.target, node.args = "call_function", operation, before.args
            graph.erase_node(before)
            changed = True
    return changed


def _in_order(node: Node) -> Callable[..., Tensor] | None:
    """What computes the same, and gives it as its dimensions are."""
    if len(node.all_input_nodes) != 2 or node.kwargs:
        return None
    if node.target is einsum:
        return einsum_in_order
    return multiplied_in_order if node.target is torch.mul else None


# --- rows -----------------------------------------------------------------------------------------


def rows_at(tensor: Tensor, indices: tuple[Tensor, ...]) -> Tensor:
    """``tensor[indices]`` of several index tensors in range: rows that are copied one by one, not
    number by number, where they lie in memory as those of a matrix do.

    >>> x = torch.arange(12).view(2, 3, 2)
    >>> rows_at(x, (torch.tensor([[1], [0]]), torch.tensor([0, 2]))).tolist()
    [[[6, 7], [10, 11]], [[0, 1], [4, 5]]]
    """
    at = _as_one(tensor, indices)
    if at is None:
        return tensor[indices]
    rows = tensor.flatten(0, len(indices) - 1).index_select(0, at.reshape(-1))
    return rows.view((*at.shape, *rows.shape[1:]))


def add_at(
    tensor: Tensor, indices: tuple[Tensor, ...], values: Tensor, *, accumulate: bool
) -> Tensor:
    """``tensor.index_put_`` of several index tensors in range: rows, or numbers, that are added one
    by one, where they lie in memory as those of a matrix do.

    >>> at = torch.tensor([[1], [0]]), torch.tensor([0, 2])
    >>> add_at(torch.zeros(2, 3), at, torch.ones(2, 2), accumulate=True).tolist()
    [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]]
    """
    at = _as_one(tensor, indices) if accumulate and tensor.dtype in _FLOATS else None
    if at is None:
        return tensor.index_put_(indices, values, accumulate=accumulate)
    rows = tensor.flatten(0, len(indices) - 1)
    values = values.expand((*at.shape, *rows.shape[1:]))
    add_rows(rows, 0, at.reshape(-1), values.reshape((at.numel(), *rows.shape[1:])))
    return tensor


def add_rows(tensor: Tensor, dim: int, rows: Tensor, values: Tensor) -> Tensor:
    """``tensor.index_add_``, of single numbers in half of its time.

    >>> add_rows(torch.zeros(2), 0, torch.tensor([1, 1]), torch.ones(2))
    tensor([0., 2.])
    """
    if tensor.dim() == 1 and tensor.dtype in _FLOATS:
        return tensor.scatter_add_(0, rows, values)
    return tensor.index_add_(dim, rows, values)


def _as_one(tensor: Tensor, indices: tuple[Tensor, ...]) -> Tensor | None:
    """Index tensors as one, of these dimensions flattened; None where that would be no view."""
    sizes, strides = tensor.shape, tensor.stride()
    for k in range(1, len(indices)):
        if strides[k - 1] != strides[k] * sizes[k]:
            return None
    at = indices[0].long()
    for size, index in zip(sizes[1:], indices[1:]):
        at = at * size + index
    return at


# --- products -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _BatchedProduct:
    """An einsum of two as matrix products: how the dimensions of both are ordered (those of the
    batch, then rows and columns of the matrix), how many are of each sort, and how those of the
    result are; ``swapped``: the second stands first, so that what is innermost in the result is in
    the product, too.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    batch: int
    rows: int
    columns: int
    result: tuple[int, ...]
    swapped: bool


@lru_cache(maxsize=MOST_GRAPHS)
def _batched_product(equation: str) -> _BatchedProduct | None:
    """None where there is no batch, or where something else is to be done.

    >>> _batched_product("bij,bkj->bik")
    _BatchedProduct(first=(0, 1, 2), second=(0, 2, 1), ..., result=(0, 1, 2), swapped=False)
    """
    left, kept = equation.split("->")
    a, b = left.split(",")
    swapped = kept[-1:] in a and kept[-1:] not in b
    a, b = (b, a) if swapped else (a, b)
    batch = [v for v in a if v in b and v in kept]
    summed = [v for v in a if v in b and v not in kept]
    rows, columns = [v for v in a if v not in b], [v for v in b if v not in a]
    named_twice = any(len(set(names)) < len(names) for names in (a, b))
    if named_twice or not batch or not {*rows, *columns} <= {*kept}:
        return None
    order = [*batch, *rows, *columns]
    return _BatchedProduct(
        tuple(a.index(v) for v in (*batch, *rows, *summed)),
        tuple(b.index(v) for v in (*batch, *summed, *columns)),
        len(batch),
        len(rows),
        len(columns),
        tuple(order.index(v) for v in kept),
        swapped,
    )


@dataclass(frozen=True, slots=True)
class _PlainProduct:
    """A product of two matrices, or two batches of them, or of a matrix and a vector, as they are
    or transposed; ``swapped``: the second stands first.
    """

    multiply: Callable[[Tensor, Tensor], Tensor]
    swapped: bool
    first_transposed: bool
    second_transposed: bool

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        first, second = (b, a) if self.swapped else (a, b)
        if self.first_transposed:
            first = first.mT
        if self.second_transposed:
            second = second.mT
        return self.multiply(first, second)


@lru_cache(maxsize=MOST_GRAPHS)
def _plain_product(equation: str) -> _PlainProduct | None:
    """None where something else is to be done.

    >>> _plain_product("ij,kj->ki").swapped, _plain_product("bij,bkj->bik").second_transposed
    (True, True)
    >>> _plain_product("ijk,kj->i")
    """
    left, kept = equation.split("->")
    first, second = left.split(",")
    if len(second) > len(first) or kept[:1] in second and kept[:1] not in first:
        swapped, first, second = True, second, first
    else:
        swapped = False
    batch = kept[:1] if kept[:1] and kept[:1] == first[:1] == second[:1] else ""
    first, second, kept = (names.removeprefix(batch) for names in (first, second, kept))
    summed = {*first} & {*second}
    if len(summed) != 1 or summed & {*kept} or len(first) != 2 or len({*first}) != 2:
        return None
    if sorted({*first, *second} - summed) != sorted(kept) or kept[:1] not in first:
        return None
    (inner,) = summed
    turned = first[0] == inner
    if len(second) == 1 and not batch:
        return _PlainProduct(torch.mv, swapped, turned, False)
    if len(second) != 2 or len(kept) != 2:
        return None
    return _PlainProduct(
        torch.bmm if batch else torch.mm, swapped, turned, second_transposed=second[1] == inner
    )


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum` of two, which takes several times as long to find out what to do.

    >>> a, b = torch.ones(5, 2, 3), torch.ones(5, 4, 3)
    >>> einsum("bij,bkj->bik", a, b).shape
    torch.Size([5, 2, 4])
    """
    plain = _plain_product(equation)
    return torch.einsum(equation, a, b) if plain is None else plain(a, b)


def einsum_without_library(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The same, of many small products in one call."""
    way = _batched_product(equation)
    if way is None or a.dtype is not b.dtype or a.dtype not in _FLOATS:
        return einsum(equation, a, b)
    one, other = (b, a) if way.swapped else (a, b)
    first, second = one.detach().permute(way.first), other.detach().permute(way.second)
    ends = way.batch + way.rows
    outer, m, summed = first.shape[: way.batch], first.shape[way.batch : ends], first.shape[ends:]
    n = second.shape[second.ndim - way.columns :]
    count, rows, inner, columns = prod(outer), prod(m), prod(summed), prod(n)
    if rows * inner * columns > MOST_PRODUCT or a.is_neg() or b.is_neg():
        return einsum(equation, a, b)
    left = first.reshape(count, rows, inner).numpy()
    right = second.reshape(count, inner, columns).numpy()
    with numpy.errstate(all="ignore"):  # infinities are as good as they are in torch
        product = torch.from_numpy(numpy.matmul(left, right))
    return product.view(*outer, *m, *n).permute(way.result)


def einsum_in_order(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`einsum`, and the result as its dimensions are: large products of a batch are written where
    they belong, which takes a fifth of the time of moving all of them there.

    >>> a, b = torch.ones(5, 2, 3), torch.ones(2, 3, 4)
    >>> einsum_in_order("bni,nio->bno", a, b).is_contiguous()
    True
    """
    way, middle = _batched_product(equation), _in_the_middle(equation)
    if middle is not None and a.dtype is b.dtype:
        return middle(equation, a, b)
    if way is None or not _is_one_each(way) or a.dtype is not b.dtype:
        return einsum(equation, a, b).contiguous()
    one, other = (b, a) if way.swapped else (a, b)
    first, second = one.permute(way.first), other.permute(way.second)
    sizes = *first.shape[:2], second.shape[2]
    if first.shape[1] * second.shape[1] * second.shape[2] < MOST_PRODUCT:
        return einsum(equation, a, b).contiguous()
    found = a.new_empty([sizes[k] for k in way.result])
    places = found.permute([way.result.index(k) for k in range(3)])
    torch.bmm(first, second, out=places)
    return found


@dataclass(frozen=True, slots=True)
class _MiddleProduct:
    """``y[i,n,k] = x[i,s,k] * w[n,s]``: the same matrix times each ``x[i]``, written where it
    belongs. ``many`` and ``one`` are the dimensions of both in these orders; ``swapped``: the
    matrix stands first.
    """

    many: tuple[int, ...]
    one: tuple[int, ...]
    swapped: bool

    def __call__(self, equation: str, a: Tensor, b: Tensor) -> Tensor:
        x, w = (b, a) if self.swapped else (a, b)
        if not self.pays(x, w):
            return einsum(equation, a, b).contiguous()
        x, w = x.permute(self.many), w.permute(self.one)
        if x.stride(1) != 1 and x.stride(2) != 1:
            x = x.contiguous()
        rows, inner = w.shape
        found = a.new_empty((len(x), rows, x.shape[2]))
        return torch.bmm(w.expand(len(x), rows, inner), x, out=found)

    def pays(self, x: Tensor, w: Tensor) -> bool:
        """Whether products are large enough, and what has to be read turned, or copied first, is
        less than what is written.
        """
        (i, s, k), (n, _) = self.many, self.one
        rows, columns = w.shape[n], x.shape[k]
        if rows < LEAST_SIDE or columns < LEAST_SIDE or x.shape[i] * rows * columns < LEAST_WRITTEN:
            return False
        return x.stride(k) == 1 or x.shape[s] * (TURNED if x.stride(s) == 1 else COPIED) <= rows


@lru_cache(maxsize=MOST_GRAPHS)
def _in_the_middle(equation: str) -> _MiddleProduct | None:
    """None where it is anything else.

    >>> _in_the_middle("jca,bj->abc")
    _MiddleProduct(many=(2, 0, 1), one=(0, 1), swapped=False)
    """
    left, kept = equation.split("->")
    first, second = left.split(",")
    swapped = len(first) < len(second)
    x, w = (second, first) if swapped else (first, second)
    if (len(x), len(w), len(kept)) != (3, 2, 3) or any(len({*v}) < len(v) for v in (x, w, kept)):
        return None
    summed = [v for v in x if v in w]
    if len(summed) != 1 or {kept[0], kept[2], *summed} != {*x} or {kept[1], *summed} != {*w}:
        return None
    many = tuple(x.index(v) for v in (kept[0], *summed, kept[2]))
    return _MiddleProduct(many, tuple(w.index(v) for v in (kept[1], *summed)), swapped)


def _is_one_each(way: _BatchedProduct) -> bool:
    """Whether there is one dimension of each sort, and the result is to be moved."""
    sorts = way.batch, way.rows, way.columns, len(way.first)
    return sorts == (1, 1, 1, 3) and way.result[1] == 0  # else matrices have no row that is one


def multiplied_in_order(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The same of a product of numbers.

    >>> multiplied_in_order(torch.ones(2, 3).T, torch.ones(2)).stride()
    (2, 1)
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return torch.mul(a, b).contiguous()
    if a.is_contiguous() and b.is_contiguous():
        return torch.mul(a, b).contiguous()
    shape = numpy.broadcast_shapes(a.shape, b.shape)
    return torch.mul(a, b, out=torch.empty(shape, dtype=torch.result_type(a, b)))
