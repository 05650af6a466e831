"""Result dtypes: torch's own promotion, in which tensors outrank 0-d tensors and those outrank
Python numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from insum import accepted
from insum.lang.expr import Access, Call, Expr, Number, Product, Sum

_TO_FLOAT = frozenset(
    {
        *("exp", "expm1", "log", "log1p", "sqrt", "reciprocal", "sin", "cos", "tanh", "erf"),
        *("sigmoid", "leaky_relu", "elu", "gelu", "silu", "softplus"),
    }
)
_REAL_ONLY = frozenset(
    {
        *("relu", "leaky_relu", "elu", "gelu", "silu", "softplus", "erf", "expm1", "log1p"),
        *("maximum", "minimum", "sign", "step", "lt", "le"),
    }
)
#: Half-width floats accumulate in float32.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int64}
INTEGERS = accepted.INTEGER_DTYPES
#: What can be computed with. Other dtypes (wide unsigned integers as index tensors) can only be
#: read as indices.
COMPUTABLE = accepted.COMPUTABLE
#: What can be read as a factor, too: floats of 8 bits, which every other float holds exactly.
NARROW_FLOATS = accepted.NARROW_FLOATS


@dataclass(frozen=True, slots=True)
class Typed:
    """A dtype and how strongly it is held: 2 a tensor with dimensions, 1 a 0-d tensor, 0 a Python
    number.
    """

    dtype: torch.dtype
    strength: int

    def __or__(self, other: Typed) -> Typed:
        strong, weak = (self, other) if self.strength >= other.strength else (other, self)
        if strong.strength != weak.strength and _category(weak.dtype) <= _category(strong.dtype):
            return strong
        if (
            strong.strength != weak.strength
            and weak.dtype.is_complex
            and strong.dtype.is_floating_point
        ):
            return Typed(_complex_of(strong.dtype), strong.strength)
        return Typed(promoted(strong.dtype, weak.dtype), strong.strength)


@functools.cache  # torch dispatches it as an operation
def promoted(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """torch's promotion. Floats of 8 bits, which torch promotes with nothing, give way to every
    other float, and stand for themselves beside integers; nothing is computed in them (`widened`).

    >>> promoted(torch.float8_e5m2, torch.bfloat16), promoted(torch.int8, torch.float8_e5m2)
    (torch.bfloat16, torch.float8_e5m2)
    """
    if not {one, other} & NARROW_FLOATS:
        return torch.promote_types(one, other)
    narrow, wide = (one, other) if one in NARROW_FLOATS else (other, one)
    return narrow if wide in NARROW_FLOATS or _category(wide) < 2 else wide


def of_number(value: bool | int | float | complex) -> Typed:
    match value:
        case bool():
            return Typed(torch.bool, 0)
        case int():
            return Typed(torch.int64, 0)
        case float():
            return Typed(torch.get_default_dtype(), 0)
        case _:
            return Typed(_complex_of(torch.get_default_dtype()), 0)


def infer(expr: Expr, types: dict[str, Typed]) -> Typed:
    """The type of an expression's value at one point."""
    match expr:
        case Access(tensor):
            return types[tensor]
        case Number(value):
            return of_number(value)
        case Call(function, args):
            return _of_call(function, args, _joined(deciding(function, args), types))
        case Product(parts) | Sum(parts):
            return _joined(parts, types)
    raise AssertionError(expr)


def bad_call(expr: Expr, types: dict[str, Typed]) -> Call | None:
    """The first function that is applied to a dtype it is not defined for: complex numbers have no
    order.
    """
    match expr:
        case Call(function, args):
            inner = next((bad for a in args if (bad := bad_call(a, types))), None)
            return inner or (
                expr if function in _REAL_ONLY and _joined(args, types).dtype.is_complex else None
            )
        case Product(parts) | Sum(parts):
            return next((bad for p in parts if (bad := bad_call(p, types))), None)
    return None


def call_type(
    function: str, args: tuple[Expr, ...], types: dict[str, Typed], wanted: torch.dtype
) -> torch.dtype:
    """The dtype in which a function takes its arguments, where its value is used in ``wanted``.

    Numbers and integers have no precision of their own: what is made of them alone is computed as
    exactly as what it meets, ``reciprocal(3) * x[i]`` in the dtype of ``x``.
    """
    args = deciding(function, args)
    joined = widened(_joined(args, types).dtype)
    dtype = torch.get_default_dtype() if _floats(function, args, joined) else joined
    if _category(dtype) < 2 or _category(wanted) < 2 or any(is_rounded(a, types) for a in args):
        return dtype
    return promoted(dtype, wanted if dtype.is_complex else wanted.to_real())


def widened(dtype: torch.dtype) -> torch.dtype:
    """What values of a dtype are computed in, if they meet no others."""
    return torch.float32 if dtype in NARROW_FLOATS else dtype


def deciding(function: str, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The arguments that say in which dtype a function is computed: a condition does not."""
    return args[1:] if function == "where" else args


def _floats(function: str, args: tuple[Expr, ...], dtype: torch.dtype) -> bool:
    """Whether a function of integers is no integer."""
    inverse = function == "pow" and isinstance(args[1], Number) and args[1].value < 0
    return (function in _TO_FLOAT or inverse) and _category(dtype) < 2


def is_rounded(expr: Expr, types: dict[str, Typed]) -> bool:
    """Whether a tensor of floating point is among what an expression is made of. One of 8 bits has
    no precision of its own: every dtype that it is computed in holds it. Nor has what is asked of
    one, as whether it is less than another.
    """
    read = [types[a.tensor] for a in _computed_with(expr)]
    return any(
        one.strength > 0 and _category(one.dtype) >= 2 and one.dtype not in NARROW_FLOATS
        for one in read
    )


#: Functions that give truth values, which every dtype holds.
_COMPARING = ("eq", "ne", "lt", "le")


def _computed_with(expr: Expr) -> Iterator[Access]:
    """The tensors whose values are part of an expression's value."""
    match expr:
        case Access():
            yield expr
        case Call(function, args) if function not in _COMPARING:
            for part in deciding(function, args):
                yield from _computed_with(part)
        case Product(parts) | Sum(parts):
            for part in parts:
                yield from _computed_with(part)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which contributions are summed."""
    return _WIDE.get(dtype, dtype)


def identity(operator: str, dtype: torch.dtype) -> bool | int | float:
    """What an output starts from when none is passed."""
    if operator in ("=", "+="):
        return 0
    if dtype.is_floating_point:
        return float("-inf") if operator == "max=" else float("inf")
    if dtype == torch.bool:
        return operator == "min="
    info = torch.iinfo(dtype)
    return int(info.min if operator == "max=" else info.max)


def _joined(parts: tuple[Expr, ...], types: dict[str, Typed]) -> Typed:
    # A sign stands for no number: what it is put before decides, all of it.
    first, *rest = sorted(parts, key=_is_sign)
    joined = infer(first, types)
    for part in rest:
        joined = joined | infer(part, types)
    return joined


def _is_sign(expr: Expr) -> bool:
    return isinstance(expr, Number) and type(expr.value) is int and expr.value == -1


def _of_call(function: str, args: tuple[Expr, ...], arg: Typed) -> Typed:
    if _floats(function, args, arg.dtype):
        return Typed(torch.get_default_dtype(), arg.strength)
    if function == "abs" and arg.dtype.is_complex:
        return Typed(arg.dtype.to_real(), arg.strength)
    return arg


def _category(dtype: torch.dtype) -> int:
    return (
        3 if dtype.is_complex else 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1
    )


def _complex_of(dtype: torch.dtype) -> torch.dtype:
    return widened(dtype).to_complex()
