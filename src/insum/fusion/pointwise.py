"""Functions of values that a chain reads: what a graph computes at each point by itself, as an
expression of the language.

A sum, a condition and a function are one value at each point: nothing inside of them is summed, and
a sum is not expanded, so that it stands in ``whole(...)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.fx import Node

from insum.fusion.shapes import Stop, broadcast, points, shape_of, value_of
from insum.fusion.views import Indices
from insum.lang.expr import (
    COMPARISONS,
    Access,
    Call,
    Expr,
    Number,
    Product,
    Sum,
    accesses,
    product,
    total,
)

if TYPE_CHECKING:
    from insum.fusion.read import ProductReader

aten = torch.ops.aten
#: Longer expressions than this, counted in functions, sums and accesses, are computed elsewhere:
#: what is read more than once stands there more than once.
MOST_PARTS = 160
#: Integers from here on are not floats.
_EXACT = 2**53

_COMPARISONS = frozenset(function for function, _ in COMPARISONS.values())
#: The expression of a node, of those of its arguments.
Spell: TypeAlias = Callable[[Node, list[Expr]], Expr]


def pointwise(reader: ProductReader, node: Node, at: Indices, gathered: bool) -> list[Expr]:
    """A function of what its arguments are at the same point."""
    if reader.compared:
        raise Stop("its largest or smallest value is looked for, which others compare it with")
    if reader.multiplied:
        raise Stop("it is a side of a matrix product, for which it had better be computed once")
    reader.inline(node)
    before, rounded = reader.beside, len(reader.rounded)
    reader.inside += 1
    found = SPELL[node.target](node, [_argument(reader, node, a, at) for a in _values(node)])
    reader.inside -= 1
    reader.beside = before
    _check_widths(reader, node, found, len(reader.rounded) > rounded)
    if _parts(found) > MOST_PARTS:
        raise Stop("it is too long an expression")
    return [found]


def _check_widths(reader: ProductReader, node: Node, found: Expr, rounded: bool) -> None:
    """A statement compares halves as halves; a program that widened them first does not. Which side
    of zero they are on does not change; but what is small may be rounded to zero.
    """
    if not isinstance(found, Call) or found.function not in {*_COMPARISONS, "sign"}:
        return
    if rounded:
        raise Stop("it compares values that were rounded")
    if found.function == "sign" or any(isinstance(a, Number) and not a.value for a in found.args):
        return
    dtypes = {name: value_of(n).dtype for n, name in reader.names.items()}
    read = {dtypes[a.tensor] for a in accesses(found, nested=False) if a.tensor in dtypes}
    compared = {value_of(n).dtype for n in node.all_input_nodes}
    if any(d.is_floating_point and d.itemsize == 2 and d not in compared for d in read):
        raise Stop("it compares values that were widened")


def _values(node: Node) -> list[Any]:
    """The arguments that are values: tensors and numbers."""
    return list(node.args[: _COUNTS.get(node.target, 2)])


def _argument(reader: ProductReader, node: Node, value: Any, at: Indices) -> Expr:
    if not isinstance(value, Node):
        return number(value)
    constant = _constant(value)
    if constant is not None:
        return number(constant)
    others = [n for n in node.all_input_nodes if n is not value and _constant(n) is None]
    reader.beside = max([reader.beside, *(points(shape_of(n)) for n in others)])
    return product(reader.value(value, broadcast(at, shape_of(value))))


def _constant(node: Node) -> Any:
    """The number that a node is full of, or None."""
    if node.op != "call_function":
        return None
    if node.target is aten.scalar_tensor.default:
        return node.args[0]
    return node.args[1] if node.target in (aten.full.default, aten.full_like.default) else None


def number(value: Any) -> Number:
    """A number that a kernel can write."""
    limits = torch.finfo(torch.float32)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or isinstance(value, int)
        and abs(value) > _EXACT
        or value
        and not limits.tiny <= abs(value) <= limits.max
    ):
        raise Stop(f"it holds {value}, which a kernel would round, or cannot write")
    return Number(value)


def _parts(value: Expr) -> int:
    match value:
        case Call(_, parts) | Product(parts) | Sum(parts):
            return 1 + sum(map(_parts, parts))
    return 1


# --- how nodes are spelled ------------------------------------------------------------------------


def _named(function: str, *numbers: Number) -> Spell:
    return lambda node, args: Call(function, (*args, *numbers))


def _sum(sign: int) -> Spell:
    def spell(node: Node, args: list[Expr]) -> Expr:
        scale = number(node.kwargs.get("alpha", 1))
        return _whole([args[0], product([Number(sign), scale, args[1]])])

    return spell


def _reversed_difference(node: Node, args: list[Expr]) -> Expr:
    return _whole([args[1], product([Number(-1), args[0]])])


def _whole(terms: list[Expr]) -> Expr:
    """A sum as one value; of sums that are one value there is no need to say so."""
    return Call(
        "whole",
        (total([t.args[0] if _is_whole(t) else t for t in terms]),),  # type: ignore[union-attr]
    )


def _is_whole(value: Expr) -> bool:
    return isinstance(value, Call) and value.function == "whole"


def _quotient(node: Node, args: list[Expr]) -> Expr:
    match args[1]:
        case Number(0):
            raise Stop("it divides by zero")
        case Number(value):
            return product([args[0], number(1 / value)])
    return product([args[0], Call("reciprocal", (args[1],))])


def _compared(function: str, swapped: bool = False) -> Spell:
    def spell(node: Node, args: list[Expr]) -> Expr:
        if function in ("eq", "ne") and not all(isinstance(a, Access | Number) for a in args):
            raise Stop("it asks for equality with something computed, which may be rounded anew")
        return Call(function, tuple(args[::-1] if swapped else args))

    return spell


def _both(node: Node, args: list[Expr]) -> Expr:
    _check_conditions(node)
    return product(args)


def _either(node: Node, args: list[Expr]) -> Expr:
    _check_conditions(node)
    return Call("maximum", tuple(args))


def _negated(node: Node, args: list[Expr]) -> Expr:
    _check_conditions(node)
    return Call("eq", (args[0], Number(0)))


def _check_conditions(node: Node) -> None:
    if any(value_of(n).dtype != torch.bool for n in node.all_input_nodes):
        raise Stop("it takes numbers for conditions")


def _clamped(node: Node, args: list[Expr]) -> Expr:
    given = dict(zip(("min", "max"), node.args[1:])) | node.kwargs
    value = args[0]
    for function, limit in (("maximum", given.get("min")), ("minimum", given.get("max"))):
        if limit is not None:
            value = Call(function, (value, number(limit)))
    return value


def _power(node: Node, args: list[Expr]) -> Expr:
    return args[0] if node.args[1] == 1 else Call("pow", (args[0], number(node.args[1])))


SPELL: dict[Any, Spell] = {
    **{
        getattr(aten, name).default: _named(name)
        for name in ("exp", "expm1", "log", "log1p", "sqrt", "abs", "sin", "cos", "tanh", "erf")
        + ("sigmoid", "relu", "reciprocal", "sign", "maximum", "minimum")
    },
    aten.rsqrt.default: _named("pow", Number(-0.5)),
    aten.pow.Tensor_Scalar: _power,
    aten.add.Tensor: _sum(1),
    aten.add.Scalar: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.sub.Scalar: _sum(-1),
    aten.rsub.Scalar: _reversed_difference,
    aten.div.Tensor: _quotient,
    aten.div.Scalar: _quotient,
    aten.where.self: _named("where"),
    aten.clamp.default: _clamped,
    aten.clamp_min.default: _named("maximum"),
    aten.clamp_max.default: _named("minimum"),
    aten.logical_and.default: _both,
    aten.bitwise_and.Tensor: _both,
    aten.logical_or.default: _either,
    aten.bitwise_or.Tensor: _either,
    aten.logical_not.default: _negated,
    aten.bitwise_not.default: _negated,
    **{
        getattr(getattr(aten, name), overload): _compared(function, swapped)
        for overload in ("Scalar", "Tensor")
        for name, (function, swapped) in {
            "eq": ("eq", False),
            "ne": ("ne", False),
            "lt": ("lt", False),
            "le": ("le", False),
            "gt": ("lt", True),
            "ge": ("le", True),
        }.items()
    },
}
#: What compares two values, or tells zero from others.
COMPARED = frozenset(
    [aten.sign.default]
    + [
        getattr(getattr(aten, name), overload)
        for overload in ("Scalar", "Tensor")
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    ]
)
#: How many arguments are values, where it is not up to two.
_COUNTS: dict[Any, int] = {aten.where.self: 3, aten.pow.Tensor_Scalar: 1, aten.clamp.default: 1}
