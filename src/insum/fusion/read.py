"""Reads graph nodes at index expressions: indices are pulled from a root down to the tensors that
are really there.

``x.index_select(0, src)`` read at ``(e, f)`` is ``x`` read at ``(src[e], f)``; ``mm(a, b)`` read at
``(i, j)`` is ``a`` at ``(i, k)`` times ``b`` at ``(k, j)`` with a new variable ``k``. Views only
change indices. What cannot be read through is a leaf: a tensor that the statement takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from insum.fusion.pointwise import SPELL, number, pointwise
from insum.fusion.shapes import (
    ZERO,
    Stop,
    broadcast,
    is_one,
    merged_dims,
    points,
    same,
    shape_of,
    value_of,
)
from insum.fusion.views import FLOATS, INDICES, VIEWS, Indices, input_of, reshaped, rounds
from insum.lang.bind import Size
from insum.lang.expr import Access, Affine, Expr, Number, Var, fresh, index_of, variables

aten, prims = torch.ops.aten, torch.ops.prims
#: A product that has this many times fewer elements than what it is multiplied with is kept: it
#: would be computed anew for each of those.
KEEP_SMALL = 8
#: Operations of programs to which a negative index is an error.
_STRICT = {
    str(op.default) for op in (aten.index_select, aten.index_add, aten.index_reduce, aten.embedding)
}
_RESERVED = {
    "max",
    "min",
    "statement",
    "out_shape",
    "sizes",
    "padded",
    "config",
    "backend",
    "dense_output",
    "out",
}


@dataclass(frozen=True, slots=True)
class IndexTensor:
    """An index tensor of a statement: ``base`` at fixed positions of some dimensions, for indexing
    a dimension of a certain size.
    """

    name: str
    base: Node
    selects: tuple[tuple[int, int], ...]
    limit: Size


@dataclass(frozen=True, slots=True)
class Around:
    """What is known of the graph that a chain stands in."""

    kept: frozenset[Node]  # nodes that are computed anyway
    reaches: Callable[[Node], bool]  # whether something is gathered somewhere below a node
    # tensors that hold other values when the backward pass is run, and whether the chain is part
    # of that
    overwritten: frozenset[Node]
    backward: bool
    scatters: Collection[Any] = ()  # operations whose results are statements of their own


@dataclass(slots=True)
class ProductReader:
    """One statement on its way: what its right side reads."""

    around: Around
    sums: bool = True  # whether the statement may sum: a largest sum is no largest value
    # whether somebody compares the result with what it is read from: nothing may be rounded anew
    compared: bool = False
    half: torch.dtype | None = None  # what the result is rounded to, where that is half precision
    names: dict[Node, str] = field(default_factory=dict)
    indices: list[IndexTensor] = field(default_factory=list)
    # index tensors in which a negative value counts from the end
    wrapped: set[str] = field(default_factory=set)
    # and those in which it is an error somewhere, and so in all of the program
    strict: set[str] = field(default_factory=set)
    inlined: dict[Node, None] = field(default_factory=dict)
    gathers: list[Node] = field(default_factory=list)
    rounded: list[Node] = field(default_factory=list)  # conversions that were left out
    # products with more elements than their factors
    grown: list[Node] = field(default_factory=list)
    contractions: int = 0
    inside: int = 0  # how many functions are around the node being read
    multiplied: bool = False  # whether there is a matrix product around it
    beside: int = 0  # about how many elements that has which the node being read is multiplied with
    # of variables: a node and one of its dimensions
    extents: dict[str, tuple[Node, int]] = field(default_factory=dict)
    # variables that views split, and their parts with sizes
    splits: dict[str, tuple[tuple[str, Size], ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=lambda: set(_RESERVED))

    # --- variables ---

    def variable(self, kind: str, node: Node, dim: int) -> Affine:
        name = fresh(f"{kind}{sum(v.startswith(kind) for v in self.extents)}", self.taken)
        self.extents[name] = (node, dim)
        return index_of(name)

    def variables(self, node: Node) -> Indices:
        """One variable per dimension of a node; a dimension of size 1 needs none."""
        return tuple(
            ZERO if is_one(size) else self.variable("i", node, d)
            for d, size in enumerate(shape_of(node))
        )

    def split(self, index: Affine, node: Node, dims: tuple[int, ...]) -> Indices:
        """A variable over several dimensions of a node as one variable for each; the same ones when
        it is split so again.
        """
        sizes = [shape_of(node)[d] for d in dims]
        if index.var is None or not all(isinstance(s, int) for s in sizes[1:]):
            raise Stop("a view merges dimensions")
        if index.var not in self.splits:
            self.splits[index.var] = tuple(
                (self.variable("s", node, d).var or "", shape_of(node)[d]) for d in dims
            )
        parts = self.splits[index.var]
        if len(parts) != len(sizes) or not all(
            same(a, b) for (_, a), b in zip(parts, sizes, strict=True)
        ):
            raise Stop("two views merge dimensions in different ways")
        return tuple(index_of(name) for name, _ in parts)

    def unsplit(self) -> dict[str, Affine]:
        """What each split variable is in terms of its parts."""
        found: dict[str, Affine] = {}
        for name, parts in self.splits.items():
            scale, terms = 1, []
            for part, size in reversed(parts):
                terms.append((scale, Var(part)))
                scale *= size if isinstance(size, int) else 1
            found[name] = Affine(tuple(reversed(terms)))
        return found

    # --- values ---

    def value(self, node: Node, at: Indices, *, gathered: bool = False) -> list[Expr]:
        """The factors of a node's value at ``at``. Below a gather nothing is computed that is worth
        computing once: it would be computed anew at every point.
        """
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is None or node in self.around.kept:
            return [self.leaf(node, at)]
        before = self.state()
        try:
            if rule in COMPUTE:
                self.check_computed(node, gathered)
            return rule(self, node, at, gathered)
        except Stop as reason:
            self.restore(before)
            self.notes.append(f"{node.name} is taken as it is: {reason}")
            return [self.leaf(node, at)]

    def state(self) -> tuple[Any, ...]:
        numbers = self.contractions, self.beside, self.inside, self.multiplied
        return tuple(type(part)(part) for part in self._parts()), *numbers

    def restore(self, state: tuple[Any, ...]) -> None:
        for part, before in zip(self._parts(), state[0], strict=True):
            part.clear()
            part.extend(before) if isinstance(part, list) else part.update(before)
        self.contractions, self.beside, self.inside, self.multiplied = state[1:]

    def _parts(self) -> tuple[Any, ...]:
        return (
            self.names,
            self.indices,
            self.wrapped,
            self.strict,
            self.inlined,
            self.gathers,
            self.rounded,
            self.grown,
            self.extents,
            self.splits,
            self.taken,
        )

    def check_computed(self, node: Node, gathered: bool) -> None:
        if gathered and self.is_step(node):
            return
        if gathered:
            raise Stop("it is computed before it is gathered, and so once")
        if not self.around.reaches(node) and not self.is_message(node):
            raise Stop("nothing is gathered or grows below it")
        if 0 < points(shape_of(node)) * KEEP_SMALL <= self.beside:
            raise Stop("it is small beside what it is multiplied with")
        if node.target in CONTRACTIONS and self.contractions:
            raise Stop("a sum in a sum would be computed anew at every point")
        if node.target in CONTRACTIONS and not self.sums:
            raise Stop("it is a sum, of which the largest or smallest is looked for")
        if node.target in CONTRACTIONS and self.inside:
            raise Stop("it is a sum, of which a function is taken")

    def is_step(self, node: Node) -> bool:
        """Whether a node adds a number to what was scattered, or multiplies that by one: for a
        kernel between two statements there is less to do than for whoever launches it.
        """
        inputs = node.all_input_nodes
        return (
            node.target in STEPS and len(inputs) == 1 and inputs[0].target in self.around.scatters
        )

    def is_message(self, node: Node) -> bool:
        """Whether a node is computed point by point, from what has no fewer elements, beside
        something as large: there it need not be written first.
        """
        size = points(shape_of(node))
        inputs = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        return (
            node.target in (SPELL.keys() | PRODUCTS.keys())
            and 0 < self.beside <= 2 * size
            and all(points(shape_of(n)) <= size for n in inputs)
        )

    def leave_out_rounding(self, node: Node, gathered: bool) -> None:
        """Read what a conversion to half precision rounds: where it is computed on the way to a
        result of half precision, and nobody asks which of two rounded values is the larger.
        """
        if self.half != value_of(node).dtype:
            to = str(value_of(node).dtype).removeprefix("torch.")
            raise Stop(f"it converts float32 to {to}")
        if self.compared:
            raise Stop("its largest or smallest value is looked for, which others compare it with")
        if gathered or not (self.around.reaches(node) or self.is_message(input_of(node))):
            raise Stop("it is converted once, and read as half of the bytes")
        self.rounded.append(node)

    def leaf(self, node: Node, at: Indices) -> Access:
        value = value_of(node)
        if value.dtype not in FLOATS:
            raise Stop(f"{node.name} holds {str(value.dtype).removeprefix('torch.')}")
        if value.layout != torch.strided:
            raise Stop(f"{node.name} is sparse")
        self.check_there(node)
        self.check_extents(node, at)
        if node not in self.names:
            self.names[node] = fresh(node.name, self.taken)
        return Access(self.names[node], at)

    def check_extents(self, node: Node, at: Indices) -> None:
        """A variable ranges over the whole of every dimension that it stands in."""
        for index, size in zip(at, shape_of(node), strict=True):
            self.check_whole(index, size, node)

    def check_whole(self, index: Affine, size: Size, node: Node) -> None:
        if index.var is not None:
            owner, dim = self.extents[index.var]
            if not same(shape_of(owner)[dim], size):
                raise Stop(f"a part of {node.name} is read")

    def check_there(self, node: Node) -> None:
        if self.around.backward and node in self.around.overwritten:
            raise Stop(f"{node.name} is written to before the backward pass reads it")

    def check_summed(self, index: Affine, factors: list[Expr]) -> list[Expr]:
        """Factors of a sum over a variable, which have to depend on it: that equal values are added
        up so many times is nothing that a statement tells.
        """
        name = index.var
        if name is None:
            return factors
        there = {v for factor in factors for v in variables(factor)}
        parts = {part for part, _ in self.splits.get(name, ())}
        if name not in there and not (parts and parts <= there):
            raise Stop("it adds up equal values")
        return factors

    def inline(self, node: Node) -> None:
        self.inlined.setdefault(node)

    # --- indices ---

    def index(self, node: Node, at: Indices, limit: Size, *, wraps: bool) -> Affine:
        """An integer tensor's element as an index of a dimension of size ``limit``."""
        rule = VIEWS.get(node.target) if node.op == "call_function" else None
        if rule is not None:
            try:
                source, inner = rule(node, at)
                return self.index(source, inner, limit, wraps=wraps)
            except Stop:
                pass
        value = value_of(node)
        if value.dtype not in INDICES:
            raise Stop(f"the index {node.name} holds {str(value.dtype).removeprefix('torch.')}")
        self.check_there(node)
        self.check_extents(node, at)
        selects = tuple((d, index.offset) for d, index in enumerate(at) if not index.terms)
        rest = tuple(index for index in at if index.terms)
        if not rest:
            raise Stop(f"the index {node.name} is one number")
        return Affine(((1, Access(self.index_name(node, selects, limit, wraps), rest)),))

    def index_name(
        self, node: Node, selects: tuple[tuple[int, int], ...], limit: Size, wraps: bool
    ) -> str:
        found = next(
            (
                t
                for t in self.indices
                if t.base is node and t.selects == selects and same(t.limit, limit)
            ),
            None,
        )
        if found is None:
            wanted = "_".join([node.name, *(str(i) for _, i in selects)])
            found = IndexTensor(fresh(wanted, self.taken), node, selects, limit)
            self.indices.append(found)
        (self.wrapped if wraps else self.strict).add(found.name)
        return found.name

    def placed(
        self, tensors: Sequence[Node | None], source: Node, at: Indices, *, wraps: bool
    ) -> Indices:
        """Indices of ``source[tensors]`` as indices of ``source``, by the rules of advanced
        indexing.
        """
        shape = shape_of(source)
        positions = [d for d, t in enumerate(tensors) if t is not None]
        if not positions:
            raise Stop("nothing is indexed")
        if any(value_of(t).dtype not in INDICES for t in tensors if t is not None):
            raise Stop("it is indexed by a mask")
        rank = max(value_of(t).dim() for t in tensors if t is not None)
        together = positions == list(range(positions[0], positions[-1] + 1))
        lead = positions[0] if together else 0
        inner, others = at[lead : lead + rank], iter(at[:lead] + at[lead + rank :])
        found: list[Affine] = []
        for d, size in enumerate(shape):
            tensor = tensors[d] if d < len(tensors) else None
            if tensor is None:
                found.append(next(others))
            else:
                found.append(
                    self.index(tensor, broadcast(inner, shape_of(tensor)), size, wraps=wraps)
                )
        return tuple(found)


# --- rules of values ------------------------------------------------------------------------------


def _through(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    try:
        source, inner = VIEWS[node.target](node, at)
    except Stop:
        if VIEWS[node.target] is not reshaped or not reader.around.reaches(node):
            raise
        source, inner = _merged(reader, node, at)
    if rounds(node):
        reader.leave_out_rounding(node, gathered)
    if not reader.around.reaches(source) and any(
        index.terms and index not in at for index in inner
    ):
        raise Stop("a view of a tensor that is there costs nothing, sums in indices do")
    reader.inline(node)
    return reader.value(source, inner, gathered=gathered)


def _merged(reader: ProductReader, node: Node, at: Indices) -> tuple[Node, Indices]:
    """A view that merges dimensions, read at a variable that is split into one for each of them."""
    source = input_of(node)
    shape = shape_of(source)
    inner = [ZERO] * len(shape)
    for place, group in merged_dims(shape, shape_of(node)):
        if len(group) == 1:
            inner[group[0]] = at[place]
            continue
        reader.check_whole(at[place], shape_of(node)[place], node)
        for dim, part in zip(group, reader.split(at[place], source, group), strict=True):
            inner[dim] = part
    return source, tuple(inner)


def counts_from_end(node: Node) -> bool:
    """Whether a negative index counts from the end. Torch writes operations that allow none as
    others that do.
    """
    return str(node.meta.get("original_aten")) not in _STRICT


def _gathered(reader: ProductReader, node: Node, source: Node, at: Indices) -> list[Expr]:
    reader.inline(node)
    reader.gathers.append(node)
    return reader.value(source, at, gathered=True)


def _index(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    source, tensors = input_of(node), node.args[1]
    inner = reader.placed(tensors, source, at, wraps=counts_from_end(node))  # type: ignore[arg-type]
    return _gathered(reader, node, source, inner)


def _index_select(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    source, index = input_of(node), input_of(node, 2)
    if not at or value_of(index).dim() != 1:
        raise Stop("it has no dimension, or its index has none")
    dim = int(node.args[1]) % len(at)  # type: ignore[arg-type]
    inner = reader.index(index, (at[dim],), shape_of(source)[dim], wraps=False)
    return _gathered(reader, node, source, (*at[:dim], inner, *at[dim + 1 :]))


def _gather(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    source, index = input_of(node), input_of(node, 2)
    if not at or value_of(source).dim() != len(at):
        raise Stop("its operands have no dimension")
    dim = int(node.args[1]) % len(at)  # type: ignore[arg-type]
    inner = reader.index(index, at, shape_of(source)[dim], wraps=False)
    return _gathered(reader, node, source, (*at[:dim], inner, *at[dim + 1 :]))


def _embedding(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    weight, index = input_of(node), input_of(node, 1)
    inner = reader.index(index, at[:-1], shape_of(weight)[0], wraps=False)
    return _gathered(reader, node, weight, (inner, at[-1]))


def _mul(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    factors: list[Expr] = []
    reader.inline(node)
    if grows(node):
        reader.grown.append(node)
    before = reader.beside
    for operand, other in (node.args[:2], node.args[1::-1]):
        if isinstance(operand, Node):
            reader.beside = max(before, points(shape_of(other)) if isinstance(other, Node) else 0)
            factors += reader.value(operand, broadcast(at, shape_of(operand)))
        else:
            factors += [number(operand)] if operand != 1 else []
    reader.beside = before
    if not reader.sums and sum(factor != Number(-1) for factor in factors) > 2:
        raise Stop(
            "a product of several, of which the largest or smallest is looked for, is rounded "
            "otherwise"
        )
    return factors


def _neg(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    reader.inline(node)
    return [Number(-1), *reader.value(input_of(node), at)]


def _sum(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    source = input_of(node)
    if value_of(source).dtype != value_of(node).dtype:
        raise Stop("it sums in another dtype")
    rank = value_of(source).dim()
    given = (node.args[1] if len(node.args) > 1 else None) or range(rank)
    dims = {int(d) % rank for d in given} if rank else set()  # type: ignore[union-attr, arg-type]
    keeps = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    reader.inline(node)
    reader.contractions += 1
    rest = iter(at if not keeps else [index for d, index in enumerate(at) if d not in dims])
    inner = tuple(
        (reader.variable("k", source, d) if not is_one(shape_of(source)[d]) else ZERO)
        if d in dims
        else next(rest)
        for d in range(rank)
    )
    factors = reader.value(source, inner)
    for d in dims:
        reader.check_summed(inner[d], factors)
    return factors


def _matmul(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    """``mm`` and ``bmm``: rows, a summed variable, columns, behind what both have."""
    a, b = input_of(node), input_of(node, 1)
    reader.inline(node)
    reader.contractions += 1
    size = shape_of(a)[-1]
    k = ZERO if is_one(size) else reader.variable("k", a, len(at) - 1)
    *batch, i, j = at
    reader.multiplied = True
    factors = [*reader.value(a, (*batch, i, k)), *reader.value(b, (*batch, k, j))]
    reader.multiplied = False
    return reader.check_summed(k, factors)


def _matvec(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    a, b = input_of(node), input_of(node, 1)
    reader.inline(node)
    reader.contractions += 1
    k = ZERO if is_one(shape_of(b)[0]) else reader.variable("k", b, 0)
    return reader.check_summed(k, [*reader.value(a, (*at, k)), *reader.value(b, (k,))])


ReadRule: TypeAlias = Callable[[ProductReader, Node, Indices, bool], list[Expr]]
GATHERS: dict[Any, ReadRule] = {
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.embedding.default: _embedding,
}
CONTRACTIONS: dict[Any, ReadRule] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mv.default: _matvec,
    aten.dot.default: _matvec,
}
PRODUCTS: dict[Any, ReadRule] = {
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.neg.default: _neg,
}
RULES: dict[Any, ReadRule] = {
    **dict.fromkeys(SPELL, pointwise),
    **dict.fromkeys(VIEWS, _through),
    **GATHERS,
    **CONTRACTIONS,
    **PRODUCTS,
}
#: With a number, one instruction for each element.
STEPS = PRODUCTS.keys() | {
    getattr(getattr(aten, name), overload)
    for name in ("add", "sub")
    for overload in ("Scalar", "Tensor")
}
#: Rules that compute something, rather than read it elsewhere.
COMPUTE = {_mul, _neg, _sum, _matmul, _matvec, pointwise}


def grows(node: Node) -> bool:
    """Whether a product has at least twice the elements of each of its factors, as an outer product
    has.
    """
    factors = [_owner(a) for a in node.args[:2] if isinstance(a, Node)]
    return len(factors) == 2 and all(
        2 * points(shape_of(f)) <= points(shape_of(node)) for f in factors
    )


def _owner(node: Node) -> Node:
    """The tensor of which a node is a view."""
    while (
        node.op == "call_function"
        and node.target in VIEWS
        and isinstance(node.args[0], Node)
        and isinstance(node.args[0].meta.get("val"), Tensor)
    ):
        node = node.args[0]
    return node


def reaching(kept: frozenset[Node]) -> Callable[[Node], bool]:
    """Whether a gather of numbers, or a product that grows, lies below a node, with nothing but
    views, products and sums above it.
    """
    known: dict[Node, bool] = {}

    def reaches(node: Node) -> bool:
        if node not in known:
            known[node] = False
            rule = (
                RULES.get(node.target) if node.op == "call_function" and node not in kept else None
            )
            if rule is not None and isinstance(node.meta.get("val"), Tensor):
                grown = node.target in GATHERS or node.target in PRODUCTS and grows(node)
                known[node] = grown or any(isinstance(a, Node) and reaches(a) for a in node.args)
        return known[node]

    return reaches
