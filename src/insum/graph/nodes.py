"""The nodes of a graph under construction: placeholders, sizes, names, and values whose dimensions
are index variables.
"""

from __future__ import annotations

import keyword
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from insum.errors import UnsupportedError
from insum.lang.bind import Problem
from insum.lang.expr import Access

PythonNumber: TypeAlias = bool | int | float | complex
#: torch's own limit.
MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A node (or a literal) and the index variable of each of its dimensions.

    ``dtype`` is None for a Python number. ``fresh`` says that the memory belongs to the graph, so
    that it may be returned.
    """

    node: Node | PythonNumber
    vars: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    fresh: bool = False


class GraphBuilder:
    """Adds nodes to one graph; placeholders appear when they are first asked for."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = Graph()
        self.inputs: list[str] = []
        self.sizes: list[str] = []
        self._placeholders: dict[str, Node] = {}
        self._aranges: dict[str, GraphValue] = {}
        self._last: Node | None = None
        #: What casts were made of.
        self.before_cast: dict[Node, GraphValue] = {}

    # --- what the graph is called with ---

    def tensor(self, name: str) -> Node:
        """The argument of that name: a tensor or a Python number."""
        if name not in self.inputs:
            self.inputs.append(name)
        return self._placeholder(f"tensor {name}", name)

    def initial(self, name: str) -> Node:
        """The output's old value; always the first argument."""
        return self._placeholder("initial", name)

    def size(self, var: str) -> Node:
        """The extent of an index variable."""
        if var not in self.sizes:
            self.sizes.append(var)
        return self._placeholder(f"size {var}", f"{var}_size")

    def shape(self) -> Node:
        """The shape of the output."""
        if "" not in self.sizes:
            self.sizes.append("")
        return self._placeholder("shape", f"{self.problem.statement.target.tensor}_shape")

    def _placeholder(self, key: str, name: str) -> Node:
        node = self._placeholders.get(key)
        if node is None:
            with (
                self.graph.inserting_after(self._last)
                if self._last is not None
                else self.graph.inserting_before()
            ):
                legal = name + "_" * (keyword.iskeyword(name) or name == "self")
                node = self._placeholders[key] = self._last = self.graph.create_node(
                    "placeholder", name, name=legal
                )
            node.target = node.name  # the parameter's name: unique, and no keyword
        return node

    def finish(self, output: Node) -> GraphModule:
        """The module, its arguments in their order: the output's old value where it is used,
        ``inputs``, ``sizes``.
        """
        self.graph.output(output)
        keys = [
            "initial",
            *(f"tensor {name}" for name in self.inputs),
            *(f"size {s}" if s else "shape" for s in self.sizes),
        ]
        for node in reversed([self._placeholders[k] for k in keys if k in self._placeholders]):
            first = next(iter(self.graph.nodes))
            if node is not first:
                first.prepend(node)
        return GraphModule(torch.nn.Module(), self.graph, class_name="Insum")

    # --- nodes ---

    def call(
        self, function: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> Node:
        return self.graph.create_node("call_function", function, args, kwargs, name=name)

    def method(
        self, method: str, node: Node, *args: Any, name: str | None = None, **kwargs: Any
    ) -> Node:
        return self.graph.create_node("call_method", method, (node, *args), kwargs, name=name)

    def times(self, size: Node | int, by: int) -> Node | int:
        return size if by == 1 else self.call(operator.mul, size, by)

    def plus(self, size: Node | int, constant: int) -> Node | int:
        return size if constant == 0 else self.call(operator.add, size, constant)

    # --- values ---

    def arange(self, var: str) -> GraphValue:
        """The values of an index variable as a tensor."""
        if var not in self._aranges:
            node = self.call(
                torch.arange, self.size(var), device=self.problem.device, name=f"{var}_values"
            )
            self._aranges[var] = GraphValue(node, (var,), torch.int64, True)
        return self._aranges[var]

    def cast(self, value: GraphValue, dtype: torch.dtype) -> GraphValue:
        if value.dtype is None or value.dtype == dtype or not isinstance(value.node, Node):
            return value
        node = self.method("to", value.node, dtype, name=f"{value.node.name}_{short(dtype)}")
        self.before_cast[node] = value
        return replace(value, node=node, dtype=dtype, fresh=True)

    def before_casts(self, values: list[GraphValue], dtype: torch.dtype) -> list[GraphValue]:
        """Values as they were of one dtype, where all of them were before they were cast."""
        before = [self.before_cast.get(v.node) for v in values if isinstance(v.node, Node)]
        found = [v for v in before if v is not None and v.dtype == dtype]
        if len(found) < len(values):
            return values
        for value in values:
            assert isinstance(value.node, Node)
            if not value.node.users and self.before_cast.pop(value.node, None) is not None:
                self.graph.erase_node(value.node)
        return found

    def aligned(self, value: GraphValue, order: Sequence[str]) -> Node | PythonNumber:
        """The value with one dimension per variable of ``order``: of size 1 where it does not
        depend on the variable.
        """
        node = value.node
        if value.dtype is None or not isinstance(node, Node) or not value.vars:
            return node
        wanted = tuple(v for v in order if v in value.vars)
        if wanted != value.vars:
            node = self.call(torch.permute, node, tuple(value.vars.index(v) for v in wanted))
        missing = [d for d, v in enumerate(order) if v not in value.vars]
        # these come with broadcasting
        leading = next((k for k, d in enumerate(missing) if d != k), len(missing))
        for d in reversed(missing[leading:]):
            node = self.call(torch.unsqueeze, node, d - len(order))
        return node

    def expanded(self, value: GraphValue, order: Sequence[str]) -> Node:
        """The value with every dimension of ``order`` at its full size (a view)."""
        node = self.aligned(self.as_tensor(value, value.dtype or torch.float32), order)
        assert isinstance(node, Node)
        if set(order) <= set(value.vars):
            return node
        return self.method("expand", node, tuple(self.size(v) for v in order))

    def pointwise(
        self,
        function: Callable[..., Any],
        a: GraphValue,
        b: GraphValue,
        name: str | None = None,
        wanted: tuple[str, ...] = (),
    ) -> GraphValue:
        """A function of two values, broadcast over the variables of both, in the ``wanted`` order
        where that is one of them.
        """
        order = self.together(a, b)
        order = wanted if sorted(wanted) == sorted(order) else order
        if a.dtype is None and b.dtype is None:
            return GraphValue(_fold(self, function, a.node, b.node))
        if a.dtype is None and b.dtype is not None:
            a, b = b, a  # add and mul commute, and their first argument is a tensor
        node = self.call(function, self.aligned(a, order), self.aligned(b, order), name=name)
        return GraphValue(node, order, a.dtype, True)

    def together(self, *values: GraphValue) -> tuple[str, ...]:
        """The variables of values that are broadcast over each other."""
        order = tuple(dict.fromkeys(v for value in values for v in value.vars))
        if len(order) > MOST_DIMENSIONS:
            raise self.problem.complain(
                UnsupportedError,
                f"a value depends on {len(order)} index variables",
                expected=f"at most {MOST_DIMENSIONS}, the dimensions that a tensor may have",
                remedy="compute parts of it in statements of their own",
            )
        return order

    def as_tensor(self, value: GraphValue, dtype: torch.dtype) -> GraphValue:
        """A Python number as a 0-d tensor."""
        if value.dtype is not None:
            return value
        return GraphValue(
            self.call(torch.full, (), value.node, dtype=dtype, device=self.problem.device),
            (),
            dtype,
            True,
        )


def _fold(
    builder: GraphBuilder,
    function: Callable[..., Any],
    a: Node | PythonNumber,
    b: Node | PythonNumber,
) -> Node | PythonNumber:
    plain = operator.mul if function is torch.mul else operator.add
    if isinstance(a, Node) or isinstance(b, Node):
        return builder.call(plain, a, b)
    folded: PythonNumber = plain(a, b)
    return folded


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def label(access: Access, suffix: str) -> str:
    """A node name that says what it holds."""
    return f"{access.tensor}_{suffix}"
