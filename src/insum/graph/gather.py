"""Reading a tensor at index expressions: views where they suffice, ``index_select`` for one index
tensor, ``gather`` for one that runs beside all other dimensions, else advanced indexing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.fx import Node

from insum.graph.nodes import GraphBuilder, GraphValue, label
from insum.lang.expr import Access, Affine, Expr, Var, accesses

#: A dimension of a view: the variable that runs along it, or the index values at which it is to be
#: read or written.
Dim: TypeAlias = str | GraphValue
#: Dtypes that torch can convert but not gather.
_ONLY_CAST = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, slots=True)
class PlacesAlong:
    """Places along dimension ``dim``, of these variables, of which that of ``dim`` may be none."""

    dim: int
    places: Node
    vars: tuple[str, ...]


class AccessReader:
    """Adds the reading of accesses to a graph. Equal accesses are read once."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder, self.problem = builder, builder.problem
        self._reads: dict[Access, GraphValue] = {}
        self._masks: dict[Access, GraphValue] = {}

    def read(self, access: Access) -> GraphValue:
        """The values of an access over its own variables."""
        if access not in self._reads:
            self._reads[access] = self._read(access)
        return self._reads[access]

    def _read(self, access: Access) -> GraphValue:
        kind = self.problem.kinds[access.tensor]
        node = self.builder.tensor(access.tensor)
        if kind.device is None:
            return GraphValue(node)
        view, dims = self.opened(node, access.indices)
        dtype = kind.dtype
        if dtype in _ONLY_CAST and any(isinstance(d, GraphValue) for d in dims):
            view, dtype = self.builder.method("to", view, torch.int64), torch.int64
        return self.gathered(access, view, dims, dtype)

    # --- views ---

    def opened(
        self, node: Node, indices: Sequence[Affine], *, write: bool = False
    ) -> tuple[Node, list[Dim]]:
        """A view of ``node`` in which literals are selected, affine indices cut out and repeated
        variables taken on the diagonal.
        """
        dims: list[Dim] = []
        windows: list[str] = []
        for index in indices:
            if not index.terms:
                node = self.builder.call(torch.select, node, len(dims), index.offset)
            elif index.var is not None:
                dims.append(index.var)
            elif _is_window(index) and not (write and len(index.terms) > 1):
                node, first, others = self._window(node, len(dims), index)
                dims.append(first)
                windows += others
            else:
                dims.append(self.index(index))
        dims += windows
        return self._diagonals(node, dims)

    def _window(self, node: Node, dim: int, index: Affine) -> tuple[Node, str, list[str]]:
        """``2*i + k + 1`` as a strided view: dimension ``dim`` becomes ``i``, the other variables
        get new dimensions at the end.
        """
        (first_by, first), *others = [(c, a.name) for c, a in index.terms if isinstance(a, Var)]
        if others and index.offset:
            node = self._sliced(node, dim, slice(index.offset, None))
        for by, var in others:
            reach = (
                self.builder.size(var)
                if by == 1
                else self.builder.plus(self.builder.times(self.builder.size(var), by), 1 - by)
            )
            node = self.builder.method("unfold", node, dim, reach, 1)
            if by != 1:
                node = self.builder.call(operator.getitem, node, (Ellipsis, slice(None, None, by)))
        offset = 0 if others else index.offset
        if first_by == 1:
            node = self.builder.call(torch.narrow, node, dim, offset, self.builder.size(first))
        else:
            stop = self.builder.plus(self.builder.times(self.builder.size(first), first_by), offset)
            node = self._sliced(node, dim, slice(offset, stop, first_by))
        return node, first, [var for _, var in others]

    def _sliced(self, node: Node, dim: int, part: slice) -> Node:
        return self.builder.call(operator.getitem, node, (slice(None),) * dim + (part,))

    def _diagonals(self, node: Node, dims: list[Dim]) -> tuple[Node, list[Dim]]:
        while (pair := _repeated(dims)) is not None:
            a, b = pair
            node = self.builder.call(torch.diagonal, node, 0, a, b)
            dims = [d for k, d in enumerate(dims) if k not in pair] + [dims[a]]
        return node, dims

    # --- index values ---

    def index(self, index: Affine) -> GraphValue:
        """The values of an index expression, as int32 or int64; those of absent (padded) points are
        0.
        """
        atom = index.atom
        masks = self.masks(index)
        if isinstance(atom, Access):
            value = self._integers(self.read(atom))
            if len(masks) == 1 and atom.tensor in self.problem.padded:
                return GraphValue(
                    self.builder.call(torch.clamp, value.node, min=0, name=label(atom, "clamped")),
                    value.vars,
                    value.dtype,
                    True,
                )
        else:
            value = self._affine(index)
        for mask in masks:
            value = self.masked(value, mask, 0)
        return value

    def _affine(self, index: Affine) -> GraphValue:
        total = GraphValue(index.offset)
        for by, atom in index.terms:
            part = (
                self.builder.arange(atom.name)
                if isinstance(atom, Var)
                else self.builder.cast(self._integers(self.read(atom)), torch.int64)
            )
            part = self.builder.pointwise(torch.mul, part, GraphValue(by)) if by != 1 else part
            total = (
                part
                if total.node == 0 and total.dtype is None
                else self.builder.pointwise(torch.add, part, total)
            )
        return total

    def _integers(self, value: GraphValue) -> GraphValue:
        if value.dtype is None:
            return self.builder.as_tensor(value, torch.int64)
        node = value.node
        if self.problem.device.type != "cpu" and not value.vars and isinstance(node, Node):
            value = GraphValue(
                self.builder.method("to", node, self.problem.device), (), value.dtype, True
            )
        return value if value.dtype == torch.int32 else self.builder.cast(value, torch.int64)

    # --- absent points ---

    def masks(self, node: Expr | Affine) -> list[GraphValue]:
        """For each padded index tensor that is read to evaluate ``node``: where it is present."""
        found = dict.fromkeys(a for a in _index_reads(node) if a.tensor in self.problem.padded)
        return [self._mask(a) for a in found]

    def _mask(self, access: Access) -> GraphValue:
        if access not in self._masks:
            value = self.builder.as_tensor(self.read(access), torch.int64)
            value = self.builder.cast(value, torch.int64) if value.dtype in _ONLY_CAST else value
            self._masks[access] = GraphValue(
                self.builder.call(torch.ge, value.node, 0, name=label(access, "present")),
                value.vars,
                torch.bool,
                True,
            )
        return self._masks[access]

    def masked(
        self, value: GraphValue, mask: GraphValue, otherwise: bool | int | float
    ) -> GraphValue:
        """``value`` where the mask holds, broadcast over the variables of both."""
        order = self.builder.together(value, mask)
        tensor = self.builder.as_tensor(value, value.dtype or torch.float32)
        node = self.builder.call(
            torch.where,
            self.builder.aligned(mask, order),
            self.builder.aligned(tensor, order),
            otherwise,
        )
        return GraphValue(node, order, tensor.dtype, True)

    # --- gathering ---

    def gathered(
        self, access: Access, node: Node, dims: list[Dim], dtype: torch.dtype
    ) -> GraphValue:
        plain = {d for d in dims if isinstance(d, str)}
        indexed = [(k, d) for k, d in enumerate(dims) if isinstance(d, GraphValue)]
        if not indexed:
            return GraphValue(node, tuple(d for d in dims if isinstance(d, str)), dtype)
        if len(indexed) == 1 and plain.isdisjoint(indexed[0][1].vars):
            return self._selected(access, node, dims, *indexed[0], dtype)
        along = self.along(dims, dtype)
        if along is not None:
            name = label(access, "gathered")
            node = self.builder.call(torch.gather, node, along.dim, along.places, name=name)
            node = (
                node if along.vars[along.dim] else self.builder.call(torch.squeeze, node, along.dim)
            )
            return GraphValue(node, tuple(filter(None, along.vars)), dtype, True)
        front, order = self.indexed_dims(dims)
        rest = [k for k in range(len(dims)) if k not in front]
        if list(front) != list(range(len(front))):
            node = self.builder.call(torch.permute, node, (*front, *rest))
        indices = tuple(self.builder.aligned(v, order) for v in front.values())
        node = self.builder.call(operator.getitem, node, indices, name=label(access, "gathered"))
        return GraphValue(node, (*order, *(str(dims[k]) for k in rest)), dtype, True)

    def along(self, dims: list[Dim], dtype: torch.dtype) -> PlacesAlong | None:
        """Where a CPU finds one number for each place of one dimension, and an index names those of
        all others, as in ``x[b,t[b,k]]``; None elsewhere.
        """
        plain = [d for d in dims if isinstance(d, str)]
        indexed = [(k, d) for k, d in enumerate(dims) if isinstance(d, GraphValue)]
        if self.problem.device.type != "cpu" or len(indexed) != 1 or not plain:
            return None
        if dtype.itemsize == 1 and dtype.is_floating_point or dtype == torch.complex32:
            return None
        ((dim, index),) = indexed
        own = [v for v in index.vars if v not in plain]
        if len(own) > 1 or not {*plain} <= {*index.vars}:
            return None
        vars = (*plain[:dim], *(own or [""]), *plain[dim:])
        if dim < len(dims) - 1 and index.vars[-1] != vars[-1]:
            return None  # it would walk both across what lies side by side
        places = self.builder.aligned(
            self.builder.cast(index, torch.int64), tuple(filter(None, vars))
        )
        if not own:
            places = self.builder.call(torch.unsqueeze, places, dim)
        assert isinstance(places, Node)
        return PlacesAlong(dim, places, vars)

    def _selected(
        self,
        access: Access,
        node: Node,
        dims: list[Dim],
        dim: int,
        index: GraphValue,
        dtype: torch.dtype,
    ) -> GraphValue:
        """One index tensor whose variables stand nowhere else: ``index_select``."""
        node = self.builder.call(
            torch.index_select, node, dim, self.flat(index), name=label(access, "gathered")
        )
        node = self.unflat(node, dim, index.vars)
        vars = [v for d in dims for v in ((d,) if isinstance(d, str) else d.vars)]
        return GraphValue(node, tuple(vars), dtype, True)

    def indexed_dims(self, dims: list[Dim]) -> tuple[dict[int, GraphValue], tuple[str, ...]]:
        """The dimensions that advanced indexing must index, and the variables the indices range
        over together.

        A dimension with a plain variable that an index shares (``A[i, D[i]]``) is indexed by the
        variable's values.
        """
        order = tuple(dict.fromkeys(v for d in dims if isinstance(d, GraphValue) for v in d.vars))
        front = {
            k: d if isinstance(d, GraphValue) else self.builder.arange(d)
            for k, d in enumerate(dims)
            if isinstance(d, GraphValue) or d in order
        }
        return front, order

    def flat(self, index: GraphValue) -> Node:
        """Index values as one dimension."""
        assert isinstance(index.node, Node)
        return (
            index.node if len(index.vars) == 1 else self.builder.method("reshape", index.node, -1)
        )

    def unflat(self, node: Node, dim: int, vars: tuple[str, ...]) -> Node:
        if len(vars) == 1:
            return node
        return (
            self.builder.call(torch.unflatten, node, dim, tuple(self.builder.size(v) for v in vars))
            if vars
            else self.builder.call(torch.squeeze, node, dim)
        )


def _index_reads(node: Expr | Affine) -> list[Access]:
    """Every access that stands in an index."""
    if isinstance(node, Affine):
        return list(accesses(node))
    return [
        inner
        for access in accesses(node, nested=False)
        for index in access.indices
        for inner in accesses(index)
    ]


def _is_window(index: Affine) -> bool:
    return index.offset >= 0 and all(c > 0 and isinstance(a, Var) for c, a in index.terms)


def _repeated(dims: list[Dim]) -> tuple[int, int] | None:
    for b, dim in enumerate(dims):
        if isinstance(dim, str) and dim in dims[:b]:
            return dims.index(dim), b
    return None
