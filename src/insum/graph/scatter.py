"""Writing contributions to the left side: the mirror of reading. Views where they suffice,
``index_add_``, ``scatter_add_``, ``index_put_`` or ``scatter_reduce_``.
"""

from __future__ import annotations

import operator
from functools import reduce

import torch
from torch.fx import Node

from insum.graph.gather import AccessReader, Dim, PlacesAlong
from insum.graph.nodes import GraphBuilder, GraphValue
from insum.graph.value import Evaluator, opposite, positive_first
from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
from insum.lang.expr import accesses, factors_of, variables
from insum.lang.types import identity, infer


class GraphWriter:
    """Writes whole graphs."""

    late: tuple[str, ...] = ()

    def __init__(self, problem: Problem) -> None:
        self.problem, self.builder = problem, GraphBuilder(problem)
        self.reader = AccessReader(self.builder)
        self.evaluator = Evaluator(self.reader)

    def build(self, terms: list[ProductTerm], mode: str) -> Node:
        """The output's node. ``mode``: ``new`` (from the identity), ``from`` (from a given value),
        ``into`` (in place).
        """
        target = self.problem.statement.target
        names = [index.var for index in target.indices]
        plain = tuple(n for n in names if n is not None)
        if mode == "new" and len(plain) == len(names) == len(set(plain)):
            return self._dense(terms, plain)
        return self._written(terms, mode)

    @property
    def _result(self) -> str:
        return f"{self.problem.statement.target.tensor}_written"

    @property
    def extremum(self) -> bool:
        return self.problem.statement.operator in ("max=", "min=")

    # --- every output element is one point of the left side's variables ---

    def _dense(self, terms: list[ProductTerm], order: tuple[str, ...]) -> Node:
        if not terms:
            return self._start(self.problem.dtype)
        first, *rest = (terms[k] for k in positive_first([t.value for t in terms]))
        result = self.evaluator.term(first, order)
        for term in rest:
            other = self._opposite(term)
            function = torch.add if other is None else torch.sub
            value = self.evaluator.term(term if other is None else other, order)
            result = self.builder.pointwise(function, result, value, name="added")
        node = self.builder.expanded(result, order)
        spans = set(order) <= set(result.vars)
        if result.dtype != self.problem.dtype:
            node = self._narrow(node)
            return self.builder.method("contiguous", node)
        if result.fresh and spans:
            return self.builder.method("contiguous", node)
        if self.problem.dtype.is_complex:
            node = self.builder.method("resolve_conj", node)
        return self.builder.method("clone", node, memory_format=torch.contiguous_format)

    def _opposite(self, term: ProductTerm) -> ProductTerm | None:
        """What a term of floating numbers is the negative of, where it is computed alike."""
        value = opposite(term.value)
        if value is None or not self.evaluator.accumulator.is_floating_point:
            return None
        other = ProductTerm(factors_of(value), term.variables)
        dtypes = {infer(one.value, self.evaluator.types).dtype for one in (term, other)}
        return other if len(dtypes) == 1 else None

    def _narrow(self, node: Node) -> Node:
        if self.problem.dtype == torch.bool:
            return self.builder.call(torch.ne, node, 0)
        before = self.builder.before_cast.get(node)
        if before is None or before.dtype != self.problem.dtype or not before.fresh:
            return self.builder.method("to", node, self.problem.dtype)
        if not node.users:  # nothing was done with the wide value, which was never more than that
            self.builder.graph.erase_node(node)
        assert isinstance(before.node, Node)
        return before.node

    # --- through views and index tensors ---

    def _written(self, terms: list[ProductTerm], mode: str) -> Node:
        # Every value is computed before anything is written: the output may be read on the right
        # side too.
        order = self._order()
        values = [self.evaluator.term(t, order) for t in terms]
        self.late = self._late(values)
        narrow = self.evaluator.accumulator != self.problem.dtype
        target = self.problem.statement.target
        old = None if mode == "new" else self.builder.initial(target.tensor)
        if not values:
            unchanged = (
                old
                if mode == "into" or old is None
                else self.builder.method("clone", old, memory_format=torch.contiguous_format)
            )
            return self._start(self.problem.dtype) if unchanged is None else unchanged
        buffer = self._buffer(old, mode, narrow)
        view, dims = self.reader.opened(buffer, target.indices, write=True)
        for value in values:
            self._write(view, dims, value)
        if mode == "into" and narrow:
            assert old is not None
            return self.builder.method(
                "copy_",
                old,
                self._merged(self.builder.method("to", old, self.evaluator.accumulator), buffer),
            )
        return buffer if mode == "into" or not narrow else self._narrow(buffer)

    def _late(self, values: list[GraphValue]) -> tuple[str, ...]:
        """What is read after writing begins: views of arguments, and index tensors, which may well
        be the output itself.
        """
        indices = [a.tensor for i in self.problem.statement.target.indices for a in accesses(i)]
        views = [] if all(v.fresh for v in values) else self.builder.inputs
        return tuple(dict.fromkeys((*views, *indices)))

    def _order(self) -> tuple[str, ...]:
        """The left side's variables in the order in which they are written."""
        return variables(self.problem.statement.target)

    def _buffer(self, old: Node | None, mode: str, narrow: bool) -> Node:
        if old is None or mode == "into" and narrow:
            return self._start(self.evaluator.accumulator)
        if mode == "into":
            return old
        name = self.problem.statement.target.tensor
        if narrow:
            return self.builder.method(
                "contiguous",
                self.builder.method("to", old, self.evaluator.accumulator),
                name=f"{name}_sum",
            )
        return self.builder.method(
            "clone", old, memory_format=torch.contiguous_format, name=f"{name}_sum"
        )

    def _start(self, dtype: torch.dtype) -> Node:
        """A new output that holds the identity of the operator."""
        name = f"{self.problem.statement.target.tensor}_new"
        if not self.extremum:
            return self.builder.call(
                torch.zeros,
                self.builder.shape(),
                dtype=dtype,
                device=self.problem.device,
                name=name,
            )
        value = (
            identity(self.problem.statement.operator, self.problem.dtype)
            if dtype == self.problem.dtype
            else self.evaluator.identity
        )
        return self.builder.call(
            torch.full,
            self.builder.shape(),
            value,
            dtype=dtype,
            device=self.problem.device,
            name=name,
        )

    def _write(self, view: Node, dims: list[Dim], value: GraphValue) -> None:
        plain = {d for d in dims if isinstance(d, str)}
        indexed = [(k, d) for k, d in enumerate(dims) if isinstance(d, GraphValue)]
        if not indexed:
            self._write_view(view, self.builder.aligned(value, [str(d) for d in dims]))
        elif len(indexed) == 1 and plain.isdisjoint(indexed[0][1].vars):
            self._write_rows(view, dims, *indexed[0], value)
        else:
            self._write_points(view, dims, value)

    def _write_view(self, view: Node, source: object) -> None:
        if self.extremum:
            assert isinstance(source, Node)
            self.builder.method("copy_", view, self._merged(view, source), name=self._result)
        else:
            self.builder.method("add_", view, source, name=self._result)

    def _merged(self, a: Node, b: Node) -> Node:
        if not self.extremum:
            return self.builder.call(torch.add, a, b)
        return self.builder.call(
            torch.maximum if self.problem.statement.operator == "max=" else torch.minimum, a, b
        )

    def _write_rows(
        self, view: Node, dims: list[Dim], dim: int, index: GraphValue, value: GraphValue
    ) -> None:
        """One index tensor: the source gets its variables as one dimension."""
        order = [v for d in dims for v in ((d,) if isinstance(d, str) else d.vars)]
        source = self.builder.expanded(value, order)
        if len(index.vars) > 1:
            source = self.builder.call(torch.flatten, source, dim, dim + len(index.vars) - 1)
        elif not index.vars:
            source = self.builder.call(torch.unsqueeze, source, dim)
        rows = self.reader.flat(index)
        if not self.extremum:
            if self.problem.device.type == "cpu" and index.dtype != torch.int64:
                # of narrow rows with indices of int32, torch adds one after the other
                rows = self.builder.method("to", rows, torch.int64)
            self.builder.method("index_add_", view, dim, rows, source, name=self._result)
        else:
            self._reduce(view, dim, rows, source, len(dims))

    def _reduce(self, view: Node, dim: int, rows: Node, source: Node, rank: int) -> None:
        rows = self.builder.method("to", rows, torch.int64)
        for _ in range(rank - dim - 1):
            rows = self.builder.call(torch.unsqueeze, rows, -1)
        rows = self.builder.method("expand_as", rows, source)
        self.builder.method(
            "scatter_reduce_",
            view,
            dim,
            rows,
            source,
            "amax" if self.problem.statement.operator == "max=" else "amin",
            name=self._result,
        )

    def _write_points(self, view: Node, dims: list[Dim], value: GraphValue) -> None:
        """Several indices, or one that shares a variable with another dimension."""
        along = self.reader.along(dims, self.evaluator.accumulator)
        if along is not None:
            return self._write_along(view, along, value)
        front, order = self.reader.indexed_dims(dims)
        rest = [k for k in range(len(dims)) if k not in front]
        source = self.builder.expanded(value, [*order, *(str(dims[k]) for k in rest)])
        if self.extremum:
            return self._reduce_points(view, front, rest, order, source)
        if list(front) != list(range(len(front))):
            view = self.builder.call(torch.permute, view, (*front, *rest))
        indices = tuple(self.builder.aligned(v, order) for v in front.values())
        self.builder.method("index_put_", view, indices, source, accumulate=True, name=self._result)

    def _write_along(self, view: Node, along: PlacesAlong, value: GraphValue) -> None:
        source = self.builder.expanded(value, tuple(filter(None, along.vars)))
        if not along.vars[along.dim]:
            source = self.builder.call(torch.unsqueeze, source, along.dim)
        arguments = view, along.dim, along.places, source
        if self.extremum:
            how = "amax" if self.problem.statement.operator == "max=" else "amin"
            self.builder.method("scatter_reduce_", *arguments, how, name=self._result)
        else:
            self.builder.method("scatter_add_", *arguments, name=self._result)

    def _reduce_points(
        self,
        view: Node,
        front: dict[int, GraphValue],
        rest: list[int],
        order: tuple[str, ...],
        source: Node,
    ) -> None:
        """Reduce into a buffer in which the indexed dimensions are one, then merge that into the
        view.
        """
        sizes = {d: self.builder.method("size", view, d) for d in (*front, *rest)}
        linear = self._linear(front, sizes, order)
        rows = reduce(lambda a, b: self.builder.call(operator.mul, a, b), (sizes[d] for d in front))
        buffer = self.builder.call(
            torch.full,
            (rows, *(sizes[d] for d in rest)),
            self.evaluator.identity,
            dtype=self.evaluator.accumulator,
            device=self.problem.device,
        )
        if len(order) != 1:
            source = (
                self.builder.call(torch.flatten, source, 0, len(order) - 1)
                if order
                else self.builder.call(torch.unsqueeze, source, 0)
            )
        self._reduce(buffer, 0, linear, source, 1 + len(rest))
        buffer = self.builder.call(torch.unflatten, buffer, 0, tuple(sizes[d] for d in front))
        places = (*front, *rest)
        if list(places) != sorted(places):
            buffer = self.builder.call(
                torch.permute, buffer, tuple(places.index(d) for d in sorted(places))
            )
        self.builder.method("copy_", view, self._merged(view, buffer), name=self._result)

    def _linear(
        self, front: dict[int, GraphValue], sizes: dict[int, Node], order: tuple[str, ...]
    ) -> Node:
        values = list(front.items())
        linear = self.builder.cast(values[0][1], torch.int64)
        for dim, value in values[1:]:
            scaled = GraphValue(
                self.builder.call(torch.mul, linear.node, sizes[dim]),
                linear.vars,
                torch.int64,
                True,
            )
            linear = self.builder.pointwise(
                torch.add, scaled, self.builder.cast(value, torch.int64)
            )
        return self.builder.method("reshape", self.builder.expanded(linear, order), -1)
