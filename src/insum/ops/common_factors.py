"""What the gradients of one backward pass have in common, on a CPU.

The gradients of ``relu(x[s[e],f] + w[e,f])`` by ``x`` and by ``w`` are sums of the same function of
gathered values. A kernel computes it in passing, wherever it is read; torch operations take longer
for it than for all the rest, so that it is computed once, and read from memory by each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
    product,
    tensors_of,
    variables,
)


@dataclass(frozen=True)
class CommonFactors:
    """``value``: what is computed once, a tensor over all of its variables; ``readers``: the
    statements, in their order, which read it.
    """

    value: Statement
    readers: tuple[Statement, ...]

    @property
    def name(self) -> str:
        return self.value.target.tensor

    @property
    def over(self) -> tuple[str, ...]:
        return tuple(str(index.var) for index in self.value.target.indices)


def common_factors(statements: Sequence[Statement]) -> CommonFactors | None:
    """Of statements that are products each; None where they share nothing that takes long.

    >>> from insum.lang.parser import parse
    >>> texts = "a[s[e]] = g[d[e]] * exp(x[e]) * w[e]", "b[e] = g[d[e]] * exp(x[e])"
    >>> found = common_factors([parse(text) for text in texts])
    >>> print(found.value, *found.readers, sep="; ")
    common[e] = g[d[e]] * exp(x[e]); a[s[e]] = common[e] * w[e]; b[e] = common[e]
    """
    if len(statements) < 2 or any(isinstance(one.value, Sum) for one in statements):
        return None
    factors = [_factors(one.value) for one in statements]
    shared = Counter(factors[0])
    for own in factors[1:]:
        shared &= Counter(own)
    common = _taken(factors[0], shared)
    if not any(isinstance(f, Call) and variables(f) for f in common):
        return None
    value = product(common)
    taken = {name for one in statements for name in (*tensors_of(one), one.target.tensor)}
    over = tuple(index_of(v) for v in variables(value))
    made = Access(fresh("common", taken), over)
    readers = tuple(
        Statement(one.target, one.operator, product([made, *_left(own, shared)]))
        for one, own in zip(statements, factors)
    )
    return CommonFactors(Statement(made, "=", value), readers)


def _factors(value: Expr) -> tuple[Expr, ...]:
    return value.factors if isinstance(value, Product) else (value,)


def _taken(factors: Iterable[Expr], wanted: Counter[Expr]) -> list[Expr]:
    """Those that are wanted, in order."""
    open_, found = wanted.copy(), []
    for factor in factors:
        if open_[factor] > 0:
            open_[factor] -= 1
            found.append(factor)
    return found


def _left(factors: Iterable[Expr], taken: Counter[Expr]) -> list[Expr]:
    """Those that are not taken, in order."""
    open_, found = taken.copy(), []
    for factor in factors:
        if open_[factor] > 0:
            open_[factor] -= 1
        else:
            found.append(factor)
    return found
