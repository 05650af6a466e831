"""What the gradients of one backward pass have in common, on a CPU.

The gradients of ``relu(x[s[e],f] + w[e,f])`` by ``x`` and by ``w`` are sums of the same function of
gathered values. A kernel computes it in passing, wherever it is read; torch operations take longer
for it than for all the rest, so that it is computed once, and read from memory by each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insum.lang.expr import (
    Access,
    Call,
    Expr,
    Product,
    Statement,
    Sum,
    fresh,
    index_of,
    names_of,
    product,
    variables,
)


@dataclass(frozen=True)
class CommonFactors:
    """``values``: what is computed once, tensors over all of their variables; ``readers``: the
    statements, in their order, which read them.
    """

    values: tuple[Statement, ...]
    readers: tuple[Statement, ...]


def common_factors(statements: Sequence[Statement]) -> CommonFactors | None:
    """Of statements that are products each; None where they share nothing that takes long. Where
    they are not the same, functions alone are shared: products stay in their order, in which they
    may not overflow.

    >>> from insum.lang.parser import parse
    >>> texts = "a[s[e]] = g[d[e]] * exp(x[e]) * w[e]", "b[e] = g[d[e]] * exp(x[e])"
    >>> found = common_factors([parse(text) for text in texts])
    >>> print(*found.values, *found.readers, sep="; ")
    common[e] = exp(x[e]); a[s[e]] = g[d[e]] * common[e] * w[e]; b[e] = g[d[e]] * common[e]
    >>> texts = "b[e] = g[d[e]] * exp(x[e])", "c[d[e]] = g[d[e]] * exp(x[e])"
    >>> found = common_factors([parse(text) for text in texts])
    >>> print(*found.values, *found.readers, sep="; ")
    common[e] = g[d[e]] * exp(x[e]); b[e] = common[e]; c[d[e]] = common[e]
    """
    if len(statements) < 2 or any(isinstance(one.value, Sum) for one in statements):
        return None
    taken = set[str]().union(*map(names_of, statements))
    factors = [_factors(one.value) for one in statements]
    functions = [f for f in dict.fromkeys(factors[0]) if isinstance(f, Call) and variables(f)]
    shared = [f for f in functions if all(f in own for own in factors)]
    if not shared:
        return None
    values = [statements[0].value] if len({one.value for one in statements}) == 1 else shared
    made = {value: _over_all(value, taken) for value in values}
    readers = tuple(
        Statement(
            one.target,
            one.operator,
            made[one.value] if one.value in made else product([made.get(f, f) for f in own]),
        )
        for one, own in zip(statements, factors)
    )
    return CommonFactors(tuple(Statement(at, "=", value) for value, at in made.items()), readers)


def _over_all(value: Expr, taken: set[str]) -> Access:
    """A tensor with an element for every point of an expression."""
    return Access(fresh("common", taken), tuple(index_of(v) for v in variables(value)))


def _factors(value: Expr) -> tuple[Expr, ...]:
    return value.factors if isinstance(value, Product) else (value,)
