"""A scatter or a sum, the root of a chain, and what lies below it, as one statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from insum.fusion.origin import Origin, origin_of
from insum.fusion.pointwise import COMPARED, SPELL
from insum.fusion.read import (
    CONTRACTIONS,
    PRODUCTS,
    Around,
    IndexTensor,
    ProductReader,
    counts_from_end,
)
from insum.fusion.shapes import (
    ZERO,
    Stop,
    broadcast,
    is_contiguous,
    is_one,
    is_zero,
    points,
    same,
    shape_of,
    value_of,
)
from insum.fusion.views import FLOATS, VIEWS, Indices, is_half
from insum.lang.bind import Size
from insum.lang.expr import (
    Access,
    Expr,
    Number,
    Statement,
    factors_of,
    index_of,
    product,
    substitute,
    tensors_of,
    variables,
)
from insum.lang.types import Typed, infer

aten = torch.ops.aten
#: Elements of messages below which a scatter without atomics saves less time than another call
#: takes: Inductor makes one kernel of it, too, and writes none of what it computes on the way.
WORTH_A_SCATTER = 2**25
#: The same in half precision: atomics of that take sixty times as long (1 ms for 1.8 M elements on
#: an H200), and round at each addition.
WORTH_A_HALF_SCATTER = 2**18


def least_scatter(node: Node) -> int:
    """Elements from which a scatter into what has the dtype of ``node`` is worth a statement."""
    return WORTH_A_HALF_SCATTER if is_half(node) else WORTH_A_SCATTER


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A root, and the one statement that it and what lies below it are."""

    root: Node
    statement: Statement
    initial: Node | None  # what is added to, where that is not zero
    zeros: Node | None  # the zeros that are added to
    tensors: tuple[tuple[str, Node], ...]  # read as values
    indices: tuple[IndexTensor, ...]
    wrapped: tuple[str, ...]
    extents: dict[str, tuple[Node, int]]
    inlined: tuple[Node, ...]
    gathers: tuple[Node, ...]
    notes: tuple[str, ...]
    # of the root, one for each of the statement's result; None where it has several for one
    dims: tuple[int | None, ...]
    # whether what is there already counts: rows that nothing is scattered to keep it in any case
    own: bool = True
    # tensors that hold other values when the backward pass is run
    overwritten: frozenset[Node] = frozenset()

    @property
    def leaves(self) -> tuple[Node, ...]:
        """The nodes that the statement reads."""
        more = [n for n in (self.initial,) if n is not None]
        return tuple(
            dict.fromkeys([*(n for _, n in self.tensors), *(t.base for t in self.indices), *more])
        )

    def after(self, replaced: dict[Node, Node]) -> Chain:
        """The same chain, when nodes that it reads have been replaced."""
        indices = tuple(replace(t, base=replaced.get(t.base, t.base)) for t in self.indices)
        extents = {v: (replaced.get(node, node), dim) for v, (node, dim) in self.extents.items()}
        initial = replaced.get(self.initial, self.initial) if self.initial is not None else None
        return replace(
            self,
            initial=initial,
            tensors=tuple((name, replaced.get(n, n)) for name, n in self.tensors),
            indices=indices,
            extents=extents,
        )

    def origins(self) -> dict[Node, Origin]:
        """Nodes that the statement reads and can compute itself: index tensors, and numbers that
        take long, from integer tensors alone. Those must not be written to: the backward pass reads
        what the forward pass has computed of them.
        """
        found = {t.base: origin for t in self.indices if (origin := origin_of(t.base)) is not None}
        found |= {
            n: origin
            for _, n in self.tensors
            if n not in found and (origin := origin_of(n, sums=True)) is not None and origin.costly
        }
        return {n: o for n, o in found.items() if not self.overwritten.intersection(o.sources)}

    @property
    def saved(self) -> int:
        """About how many elements are no longer written to memory."""
        return sum(
            points(shape_of(n))
            for n in self.inlined
            if n is not self.root and n.target not in VIEWS
        )

    @property
    def scattered(self) -> int:
        """About how many elements are scattered, whether they are there or not."""
        owners = (self.extents[v] for v in variables(self.statement.target))
        return points([shape_of(node)[dim] for node, dim in owners])


# --- roots ----------------------------------------------------------------------------------------


def _contraction(node: Node, around: Around) -> Chain:
    """A sum over something gathered, with nothing scattered: dot products per edge, the gradient of
    a weight.
    """

    def chain(half: torch.dtype | None) -> Chain:
        reader = ProductReader(replace(around, kept=around.kept - {node}), half=half)
        at = reader.variables(node)
        factors = CONTRACTIONS[node.target](reader, node, at, False)
        return _chain(node, reader, at, factors, None)

    return _rounded_late(node, chain)


def _rounded_late(node: Node, chain: Callable[[torch.dtype | None], Chain]) -> Chain:
    """A chain that is rounded to half precision at its end alone; or else, as where it would read
    something in full precision, one that takes what was rounded on the way as it is.
    """
    if not is_half(node):
        return chain(None)
    try:
        return chain(value_of(node).dtype)
    except Stop:
        return chain(None)


def _scattered(
    node: Node,
    base: Node,
    message: Node,
    at: Callable[[ProductReader], tuple[Indices, Indices]],
    around: Around,
    operator: str = "=",
) -> Chain:
    """A scatter of ``message`` into ``base``; ``at`` gives the indices of both."""

    def read(half: torch.dtype | None, beside: int) -> tuple[ProductReader, Indices, list[Expr]]:
        sums = operator == "="
        compared = not sums and is_compared(node)
        reader = ProductReader(around, sums=sums, compared=compared, half=half, beside=beside)
        target, source = at(reader)
        reader.inline(node)
        return reader, target, reader.value(message, source)

    def chain(half: torch.dtype | None) -> Chain:
        reader, target, factors = read(half, 0)
        size = points(shape_of(message))
        if operator == "=" and not reader.gathers and size >= least_scatter(node):
            reader, target, factors = read(half, size)  # with what Inductor computes on the way
        return _chain(node, reader, target, factors, base, operator)

    return _rounded_late(node, chain)


def _index_put(node: Node, around: Around) -> Chain:
    if len(node.args) < 4 or node.args[3] is not True:
        raise Stop("it overwrites, and does not add: of places that are listed twice one wins")
    base, tensors, message = node.args[:3]
    if str(node.meta.get("original_aten")) == str(aten.embedding_dense_backward.default):
        message = _of_embedding(message, tensors)
    return _put(node, base, tensors, message, around)


def _of_embedding(message: Any, tensors: Any) -> Any:
    """The gradient of an embedding without the mask that leaves out index -1, where that stands for
    no index: it would be an error before.
    """
    if not isinstance(message, Node) or message.target is not aten.where.self:
        return message
    mask, nothing, value = message.args
    while isinstance(mask, Node) and mask.target in (
        aten.unsqueeze.default,
        aten.view.default,
        aten.expand.default,
    ):
        mask = mask.args[0]
    if (
        not isinstance(mask, Node)
        or not isinstance(nothing, Node)
        or not isinstance(value, Node)
        or not is_zero(nothing)
    ):
        return message
    alone = (
        len(tensors) == 1
        and mask.target is aten.eq.Scalar
        and mask.args[0] is tensors[0]
        and mask.args[1] == -1
    )
    same_shape = len(shape_of(value)) == len(shape_of(message)) and all(
        map(same, shape_of(value), shape_of(message))
    )
    return value if alone and same_shape else message


def _masked_put(node: Node, around: Around) -> Chain:
    """The gradient of an embedding: a mask leaves out what lies outside of the table, and that
    would be an error before.
    """
    base, mask, tensors, message = node.args[:4]
    if (
        not isinstance(tensors, list | tuple)
        or len(tensors) != 1
        or not isinstance(base, Node)
        or not _only_range(mask, tensors[0], shape_of(base)[0])
    ):
        raise Stop("a mask leaves out some of what it adds")
    return _put(node, base, tensors, message, around)


def _only_range(mask: Any, index: Any, size: Size) -> bool:
    """Whether a mask is true for all values from 0 to ``size``."""
    if not isinstance(mask, Node) or mask.op != "call_function":
        return False
    if mask.target in (aten.bitwise_and.Tensor, aten.logical_and.default):
        return all(_only_range(part, index, size) for part in mask.args[:2])
    if mask.target in (aten.unsqueeze.default, aten.view.default, aten.expand.default):
        return _only_range(mask.args[0], index, size)
    if mask.args[0] is not index:
        return False
    limit: Any = mask.args[1].meta.get("val") if isinstance(mask.args[1], Node) else mask.args[1]
    if mask.target is aten.lt.Scalar:
        return same(limit, size)
    if not isinstance(limit, int):
        return False
    return (
        mask.target is aten.ge.Scalar and limit <= 0 or mask.target is aten.ne.Scalar and limit < 0
    )


def _put(node: Node, base: Any, tensors: Any, message: Any, around: Around) -> Chain:
    assert isinstance(base, Node) and isinstance(message, Node)

    def at(reader: ProductReader) -> tuple[Indices, Indices]:
        places = [t for t in tensors if isinstance(t, Node)]
        if not places:
            raise Stop("nothing is indexed")
        widest = max(places, key=lambda t: value_of(t).dim())
        rank, size = value_of(widest).dim(), len(shape_of(base))
        positions = [d for d, t in enumerate(tensors) if t is not None]
        together = positions == list(range(positions[0], positions[-1] + 1))
        inner = []
        for d in range(rank):
            owner = next(
                (
                    t
                    for t in places
                    if value_of(t).dim() > rank - 1 - d and not is_one(shape_of(t)[d - rank])
                ),
                None,
            )
            inner.append(
                ZERO
                if owner is None
                else reader.variable("i", owner, d - rank + value_of(owner).dim())
            )
        free = [
            ZERO if is_one(shape_of(base)[d]) else reader.variable("i", base, d)
            for d in range(size)
            if d not in positions
        ]
        lead = positions[0] if together else 0
        full = (*free[:lead], *inner, *free[lead:])
        target = reader.placed(tensors, base, full, wraps=counts_from_end(node))
        return target, broadcast(full, shape_of(message))

    return _scattered(node, base, message, at, around)


def _index_add(node: Node, around: Around) -> Chain:
    base, dim, index, message = node.args[:4]
    assert isinstance(base, Node) and isinstance(index, Node) and isinstance(message, Node)
    if node.kwargs.get("alpha", 1) != 1:
        raise Stop("it scales what it adds")
    if value_of(index).dim() != 1 or not shape_of(base):
        raise Stop("its index has no dimension")

    def at(reader: ProductReader) -> tuple[Indices, Indices]:
        source = reader.variables(message)
        d = int(dim) % len(source)  # type: ignore[arg-type]
        place = reader.index(index, (source[d],), shape_of(base)[d], wraps=False)
        return (*source[:d], place, *source[d + 1 :]), source

    return _scattered(node, base, message, at, around)


def _scatter_add(node: Node, around: Around) -> Chain:
    base, dim, index, message = node.args[:4]
    if not isinstance(message, Node):
        raise Stop("it adds a number")
    assert isinstance(base, Node) and isinstance(index, Node)
    operator, own = _reduction(node)
    d = int(dim) % len(shape_of(base)) if shape_of(base) else 0  # type: ignore[arg-type]
    sizes = zip(shape_of(base), shape_of(index), shape_of(message), strict=True)
    if not all(same(i, m) and (k == d or same(b, i)) for k, (b, i, m) in enumerate(sizes)):
        raise Stop("index, message and result differ in shape")

    def at(reader: ProductReader) -> tuple[Indices, Indices]:
        source = reader.variables(message)
        place = reader.index(index, source, shape_of(base)[d], wraps=False)
        if operator != "=" and (not isinstance(place.atom, Access) or len(place.atom.indices) != 1):
            raise Stop(
                "it has an index for each column, and rows that nothing is scattered to are "
                "not found out column by column"
            )
        return (*source[:d], place, *source[d + 1 :]), source

    return replace(_scattered(node, base, message, at, around, operator), own=own)


def _reduction(node: Node) -> tuple[str, bool]:
    """How a scatter reduces, and whether what is there already counts."""
    if node.target is not aten.scatter_reduce.two:
        return "=", True
    reduction, own = node.args[4], node.kwargs.get("include_self", True) is True
    if reduction in ("amax", "amin"):
        return {"amax": "max=", "amin": "min="}[str(reduction)], own
    if reduction != "sum":
        raise Stop(f"it reduces by {reduction}")
    if not own:
        raise Stop("it leaves out what is there")
    return "=", True


def is_compared(node: Node) -> bool:
    """Whether somebody may ask which of many values is the largest or smallest, as gradients do:
    whoever compares that, or what is computed of it before the next sum, and whoever gets it.
    """
    seen: set[Node] = set()
    todo = [(node, False)]
    while todo:
        one, changed = todo.pop()
        for user in one.users:
            if user.op == "output" and not changed or user.target in COMPARED:
                return True
            if user not in seen and user.target not in SCATTERS.keys() | CONTRACTIONS.keys():
                seen.add(user)
                todo.append((user, changed or user.target in SPELL.keys() | PRODUCTS.keys()))
    return False


def _biased(node: Node, around: Around) -> Chain:
    raise Stop("it adds a bias to a product, which is two products")


SCATTERS: dict[Any, Callable[..., Chain]] = {
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten._unsafe_masked_index_put_accumulate.default: _masked_put,
    aten.index_add.default: _index_add,
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_add,
}
ROOTS: dict[Any, Callable[..., Chain]] = {
    **SCATTERS,
    **dict.fromkeys(CONTRACTIONS, _contraction),
    aten.addmm.default: _biased,
}


# --- the statement --------------------------------------------------------------------------------


def _chain(
    root: Node,
    reader: ProductReader,
    target: Indices,
    factors: list[Expr],
    base: Node | None,
    operator: str = "=",
) -> Chain:
    # Inductor has no kernel for a largest or smallest value: such a scatter is worth it by itself.
    worth = base is not None and (reader.grown or _points(reader) >= least_scatter(root))
    if operator == "=" and not reader.gathers and not worth:
        what = "nothing is gathered into it" + (
            ", and no product in it grows" if base is not None else ""
        )
        raise Stop(what + "".join(f"; {note}" for note in reader.notes[:1]))
    # Dimensions of size 1 have no variable, and split ones several: the result is brought into
    # shape when it is there.
    parts = {
        name: tuple(index_of(part) for part, _ in split) for name, split in reader.splits.items()
    }
    places = [
        (d, i)
        for d, index in enumerate(target)
        if index.terms
        for i in parts.get(index.var or "", (index,))
    ]
    change = reader.unsplit()
    whole = substitute(Access("out", tuple(i for _, i in places)), change)
    assert isinstance(whole, Access)
    statement = Statement(whole, operator, product([substitute(f, change) for f in factors]))
    used = {*variables(statement.target), *variables(statement.value)}
    if operator == "=" and not reader.extents.keys() - reader.splits.keys() <= used:
        raise Stop("it adds up equal values")
    _check_number(statement)
    _check(root, reader, statement)
    zero = base is not None and operator == "=" and is_zero(base)
    reads = set(tensors_of(statement))
    return Chain(
        root,
        statement,
        None if zero else base,
        base if zero else None,
        tuple((name, node) for node, name in reader.names.items() if name in reads),
        tuple(t for t in reader.indices if t.name in reads),
        tuple(sorted((reader.wrapped - reader.strict) & reads)),
        {
            v: reader.extents[v]
            for v in dict.fromkeys((*variables(statement.target), *variables(statement.value)))
        },
        tuple(reader.inlined),
        tuple(reader.gathers),
        tuple(reader.notes),
        tuple(
            None if index.var in reader.extents and target[d].var != index.var else d
            for d, index in places
        ),
        overwritten=reader.around.overwritten,
    )


def _points(reader: ProductReader) -> int:
    """About how many points a statement has."""
    names = reader.extents.keys() - reader.splits.keys()
    return points([shape_of(node)[dim] for node, dim in map(reader.extents.__getitem__, names)])


def _check_number(statement: Statement) -> None:
    """That the product of all numbers is one that a kernel can write."""
    limits = torch.finfo(torch.float32)
    for one in factors_of(statement.value):
        if (
            isinstance(one, Number)
            and one.value
            and not limits.tiny <= abs(one.value) <= limits.max
        ):
            raise Stop("it is multiplied by numbers whose product is too large or too small")


def _check(root: Node, reader: ProductReader, statement: Statement) -> None:
    """Dtypes, devices and layout: that the statement gives what the root gives."""
    value = value_of(root)
    values = [value_of(n) for n in reader.names]
    if value.dtype not in FLOATS:
        raise Stop(f"it holds {str(value.dtype).removeprefix('torch.')}")
    types = {
        name: Typed(value_of(n).dtype, 2 if value_of(n).dim() else 1)
        for n, name in reader.names.items()
    }
    natural = infer(statement.value, types).dtype
    if natural != value.dtype:
        raise Stop(f"its result is {value.dtype}, the product is {natural}".replace("torch.", ""))
    if any(
        v.device != value.device for v in (*values, *(value_of(t.base) for t in reader.indices))
    ):
        raise Stop("its tensors are on several devices")
    if not is_contiguous(value):
        raise Stop("its result is laid out in an unusual way")
