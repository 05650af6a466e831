"""Adjoints as statements: gradients of an indirect einsum are indirect einsums.

For each occurrence ``T[e]`` in a product the adjoint is the same statement with left side and
factor swapped::

    C[AM[p],n] += AV[p] * B[AK[p],n]        dAV[p] += dC[AM[p],n] * B[AK[p],n]        dB[AK[p],n] +=
    dC[AM[p],n] * AV[p]

Derivatives of functions are products of functions of the whole argument, never sums: a sum would be
distributed, and each part reduced over its own variables only. A sum stands in ``whole(...)``, and
a derivative of 1 is ``ones(...)`` of what it is the derivative of, where nothing else tells over
which points it is summed.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from insum.lang.expand import expand
from insum.lang.expr import (
    FUNCTIONS,
    Access,
    Call,
    Expr,
    Number,
    Product,
    Statement,
    Sum,
    accesses,
    factors_of,
    fresh,
    names_of,
    product,
    tensors_of,
    total,
    variables,
)
from insum.lang.parser import parse


@dataclass(frozen=True, slots=True)
class Adjoint:
    """Statements whose results add up to the gradient of ``tensor``; they read the gradient of the
    output as ``upstream``.

    For ``max=`` and ``min=`` they also read the result as ``result``, and ``upstream`` is the
    gradient divided by how many points share it. ``joined``: fewer statements that add up to the
    same, for those who run each as one kernel.
    """

    statements: tuple[str, ...]
    upstream: str
    result: str
    gradient: str
    joined: tuple[str, ...] = ()


@functools.lru_cache(maxsize=4096)
def adjoint(text: str, tensor: str, complex_names: frozenset[str] = frozenset()) -> Adjoint:
    """How the gradient of ``tensor`` follows from that of the output. ``complex_names``: tensors
    with complex values, the output included.

    >>> adjoint("C[AM[p],n] += AV[p] * B[AK[p],n]", "B").statements
    ('dB[AK[p],n] += dC[AM[p],n] * AV[p]',)
    >>> adjoint("y[i] = x[i] * exp(A[i,j])", "A").statements
    ('dA[i,j] += dy[i] * x[i] * exp(A[i,j])',)
    >>> adjoint("y[i] = sin(x[i]) * exp(x[i])", "x").statements
    ('dx[i] += dy[i] * exp(x[i]) * whole(cos(x[i]) + sin(x[i]))',)
    >>> adjoint("y[d[e]] = v[e] * x[s[e]] + v[e] * z[s[e]]", "v").joined
    ('dv[e] += dy[d[e]] * whole(x[s[e]] + z[s[e]])',)
    """
    statement = parse(text)
    names = _Names.of(statement, tensor)
    upstream = Access(names.upstream, statement.target.indices)
    walker = _Walker(
        tensor,
        complex_names | ({names.upstream} if statement.target.tensor in complex_names else set()),
    )
    found: list[Statement] = []
    for term in expand(statement):
        start: Expr = upstream
        if statement.operator in ("max=", "min="):
            start = product([upstream, _wins(statement, names.result)])
        for occurrence, value in walker.walk(term.value, start):
            target = Access(names.gradient, occurrence.indices)
            found.append(Statement(target, "+=", _without_ones(target, value)))
    apart, joined = (
        tuple(map(str, _together(found, meets)))
        for meets in (_has_function, lambda value: _has_function(value) or _has_index(value))
    )
    return Adjoint(apart, names.upstream, names.result, names.gradient, joined)


def _together(found: list[Statement], meets: Callable[[Expr], bool]) -> list[Statement]:
    """What values of the same points that one ``meets`` send to the same places is one statement: a
    tensor that stands in an expression several times is read, and its gradient written, once.
    Products without functions and indices stay apart always, for each may be left to a library.
    """
    groups: dict[object, list[Statement]] = {}
    for one in _each_once(found):
        alike = one.target, _reach(one.value)
        groups.setdefault(alike if meets(one.value) else one, []).append(one)
    return [
        Statement(same[0].target, "+=", _value_of_all([one.value for one in same]))
        for same in groups.values()
    ]


def _each_once(found: list[Statement]) -> list[Statement]:
    """Equal statements, as of a square, as one with their number as a factor."""
    keys = [(one.target, frozenset(Counter(factors_of(one.value)).items())) for one in found]
    counts, once = Counter(keys), list[Statement]()
    for one, key in zip(found, keys):
        number = counts.pop(key, 0)
        if number:
            value = one.value if number == 1 else product([one.value, Number(number)])
            once.append(Statement(one.target, one.operator, value))
    return once


def _value_of_all(values: list[Expr]) -> Expr:
    """The sum as one value, times what is a factor of each."""
    if len(values) == 1:
        return values[0]
    parts: list[list[Expr]] = [[*factors_of(v)] for v in values]
    shared = [f for f in parts[0] if all(f in factors for factors in parts)]
    shared = [f for f in dict.fromkeys(shared) if not isinstance(f, Number)]
    for factors in parts:
        for one in shared:
            factors.remove(one)
    rest = total([product(factors) if factors else Number(1) for factors in parts])
    return product([*shared, _f("whole", rest)])


def _has_function(node: Expr) -> bool:
    match node:
        case Call():
            return True
        case Product(parts) | Sum(parts):
            return any(map(_has_function, parts))
    return False


def _has_index(node: Expr) -> bool:
    """Whether something is read through an index tensor."""
    return any(any(accesses(index)) for access in accesses(node) for index in access.indices)


@functools.lru_cache(maxsize=4096)
def tangent(text: str, tensor: str) -> Adjoint:
    """How the tangent of the output follows from that of ``tensor``, which is read as ``upstream``;
    of statements over real numbers.

    For ``max=`` and ``min=`` it is the sum over the points that attain the result.

    >>> tangent("C[AM[p],n] += AV[p] * B[AK[p],n]", "B").statements
    ('dC[AM[p],n] += AV[p] * dB[AK[p],n]',)
    >>> tangent("y[i] = x[i] * exp(A[i,j])", "A").statements
    ('dy[i] += x[i] * exp(A[i,j]) * dA[i,j]',)
    """
    statement = parse(text)
    names = _Names.of(statement, tensor)
    target = Access(names.upstream, statement.target.indices)
    extremum = statement.operator in ("max=", "min=")
    start = _wins(statement, names.result) if extremum else Number(1)
    found: list[Statement] = []
    for term in expand(statement):
        for occurrence, slope in _Walker(tensor, frozenset()).walk(term.value, start):
            value = product([slope, Access(names.gradient, occurrence.indices)])
            found.append(Statement(target, "+=", _without_ones(target, value)))
    return Adjoint(tuple(map(str, found)), names.gradient, names.result, names.upstream)


@functools.lru_cache(maxsize=4096)
def winners(text: str) -> tuple[str, str, str]:
    """For ``max=`` and ``min=``: the statement that counts the points which attain the result, its
    output's name, the result's name.

    >>> winners("y[i] max= A[i,j]")
    ('count[i] += eq(eq(A[i,j], y[i]), eq(A[i,j], A[i,j]))', 'count', 'y')
    """
    statement = parse(text)
    taken = names_of(statement)
    result = _result_name(statement, taken)
    count = fresh("count", taken)
    counting = Statement(Access(count, statement.target.indices), "+=", _wins(statement, result))
    return str(counting), count, result


def _wins(statement: Statement, result: str) -> Expr:
    """1 where a point attains the result, which is shared evenly among the points that do, as
    `torch.amax` does.

    A point that is NaN attains it, for then the result is NaN: such a point equals neither the
    result nor itself, and any other equals itself.
    """
    attained = Call("eq", (statement.value, Access(result, statement.target.indices)))
    return Call("eq", (attained, Call("eq", (statement.value, statement.value))))


@dataclass(frozen=True, slots=True)
class _Names:
    upstream: str
    result: str
    gradient: str

    @staticmethod
    def of(statement: Statement, tensor: str) -> _Names:
        taken = names_of(statement)
        result = _result_name(statement, taken)
        upstream = fresh(f"d{statement.target.tensor}", taken)
        return _Names(upstream, result, fresh(f"d{tensor}", taken))


def _result_name(statement: Statement, taken: set[str]) -> str:
    """The output's own name, unless the right side reads an argument of that name."""
    name = statement.target.tensor
    return fresh(f"{name}_result", taken) if name in tensors_of(statement) else name


class _Walker:
    """Finds every occurrence of a tensor as a value and carries the upstream gradient to it."""

    def __init__(self, tensor: str, complex_names: frozenset[str]) -> None:
        self.tensor, self.complex_names = tensor, complex_names

    def walk(self, node: Expr, upstream: Expr) -> Iterator[tuple[Access, Expr]]:
        match node:
            case Access(name) if name == self.tensor:
                yield node, upstream
            case Sum(terms):
                for term in terms:
                    yield from self.walk(term, upstream)
            case Product(factors):
                for k, factor in enumerate(factors):
                    others = [self.conj(_one(f)) for f in (*factors[:k], *factors[k + 1 :])]
                    yield from self.walk(factor, product([upstream, *others]))
            case Call("conj", (inner,)):
                yield from self.walk(inner, self.conj(upstream))
            case Call("abs", (inner,)) if self.is_complex(inner):
                yield from self.walk(inner, product([self.real(upstream), inner, _guarded(inner)]))
            case Call(function, args):
                for k, inner in enumerate(args[: FUNCTIONS[function].values]):
                    slope = _slope(function, args, k)
                    if slope is not None:
                        yield from self.walk(inner, product([upstream, self.conj(slope)]))
            case _:
                return

    def is_complex(self, node: Expr) -> bool:
        match node:
            case Access(name):
                return name in self.complex_names
            case Call("abs"):
                return False
            case Call(_, parts) | Product(parts) | Sum(parts):
                return any(self.is_complex(p) for p in parts)
        return False

    def conj(self, node: Expr) -> Expr:
        if not self.is_complex(node):
            return node
        match node:
            case Call("conj", (inner,)):
                return inner
            case Product(factors):
                return product([self.conj(f) for f in factors])
            case _:
                return Call("conj", (node,))

    def real(self, node: Expr) -> Expr:
        """The gradient of a real value is real; both halves have the same variables, so that
        distributing them loses none.
        """
        return (
            product([Number(0.5), total([node, self.conj(node)])])
            if self.is_complex(node)
            else node
        )


def _one(factor: Expr) -> Expr:
    """A factor as one value: a sum, which can only stand inside of a function, would be distributed
    outside of it.
    """
    return _f("whole", factor) if isinstance(factor, Sum) else factor


def _guarded(inner: Expr) -> Expr:
    """1/|u|, and 1 where u is 0: there the direction u/|u| counts as 0, as torch has it."""
    size = Call("abs", (inner,))
    return Call("reciprocal", (total([size, Call("eq", (size, Number(0)))]),))


def _slope(function: str, args: tuple[Expr, ...], k: int) -> Expr | None:
    """The derivative by one argument, as a product of functions of all of them; None where it is
    zero.
    """
    if len(args) > 1:
        return _slope_of_several(function, args, k)
    (u,) = args
    match function:
        case "exp" | "expm1":
            return _f("exp", u)
        case "log":
            return _f("reciprocal", u)
        case "log1p":
            return _f("reciprocal", total([Number(1), u]))
        case "reciprocal":
            return product([Number(-1), _f("reciprocal", u), _f("reciprocal", u)])
        case "sqrt":
            return product([Number(0.5), _f("reciprocal", _f("sqrt", u))])
        case "abs":
            return _f("sign", u)
        case "relu":
            return _f("step", u)
        case "sigmoid":
            return product([_f("sigmoid", u), _f("sigmoid", product([Number(-1), u]))])
        case "softplus":
            return _f("sigmoid", u)
        case "sin":
            return _f("cos", u)
        case "cos":
            return product([Number(-1), _f("sin", u)])
        case "erf":
            return product([Number(2 / math.sqrt(math.pi)), _bell(1, u)])
        case "tanh":
            return product(
                [
                    Number(4),
                    _f("sigmoid", product([Number(2), u])),
                    _f("sigmoid", product([Number(-2), u])),
                ]
            )
        case "silu":
            rest = product([u, _f("sigmoid", product([Number(-1), u]))])
            return product([_f("sigmoid", u), _f("whole", total([Number(1), rest]))])
        case "gelu":
            below = product([Number(0.5), _f("erf", product([Number(math.sqrt(0.5)), u]))])
            rest = product([Number(math.sqrt(0.5 / math.pi)), u, _bell(0.5, u)])
            return _f("whole", total([Number(0.5), below, rest]))
        case "whole":
            return _f("ones", u)
    return None


def _slope_of_several(function: str, args: tuple[Expr, ...], k: int) -> Expr | None:
    u, v = args[0], args[1]
    match function, v:
        case "pow", Number(exponent):
            return _slope_of_power(u, exponent)
        case "leaky_relu", _:
            return Call("where", (_f("lt", Number(0), u), Number(1), v))
        case "elu", _:
            falling = _f("exp", product([Number(-1), _f("relu", product([Number(-1), u]))]))
            side = Call("where", (_f("lt", Number(0), u), Number(1), v))
            return falling if v == Number(1.0) else product([side, falling])
        case "maximum" | "minimum", _:
            smaller = (args[k], args[1 - k]) if function == "maximum" else (args[1 - k], args[k])
            share = Call("where", (_f("eq", u, v), Number(0.5), Number(1)))
            return Call("where", (_f("lt", *smaller), Number(0), share))
        case "where", _ if k > 0:
            chosen = Call("where", (u, Number(int(k == 1)), Number(int(k == 2))))
            return product([chosen, _f("ones", total(list(args)))])
    return None


def _slope_of_power(u: Expr, exponent: float) -> Expr | None:
    match exponent:
        case 0:
            return None
        case 1:
            return product([Number(exponent), _f("ones", u)])
        case 2:
            return product([Number(exponent), _f("whole", u)])
    return product([Number(exponent), Call("pow", (u, Number(exponent - 1)))])


def _bell(width: float, u: Expr) -> Expr:
    """exp(-width * u ** 2)"""
    return _f("exp", product([Number(-width), Call("pow", (u, Number(2)))]))


def _f(function: str, *args: Expr) -> Expr:
    return Call(function, args)


def _without_ones(target: Access, value: Expr) -> Expr:
    """``ones(...)`` where other factors tell of the same points, and padding, is left out; else it
    has the fewest arguments that do.
    """
    factors: list[Expr] = [*value.factors] if isinstance(value, Product) else [value]
    for one in [f for f in factors if isinstance(f, Call) and f.function == "ones"]:
        factors.remove(one)
        known = _reach(target).union(*map(_reach, factors))
        needed: list[Expr] = []
        for access in sorted(accesses(one, nested=False), key=lambda a: -len(_reach(a))):
            if not _reach(access) <= known:
                needed.append(access)
                known |= _reach(access)
        if needed:
            factors.append(_f("ones", total(needed)))
    return product(factors) if factors else Number(1)


def _reach(node: Expr) -> frozenset[str]:
    """The variables of an expression, and the tensors that stand in its indices."""
    outer = list(accesses(node, nested=False))
    inner = (a.tensor for one in outer for i in one.indices for a in accesses(i))
    return frozenset((*variables(node), *inner))
