"""Sums of products that differ in one factor, as one product with the sum of these::

    dX[n,i] += dC[i,j] * w[n] * X[n,j]      dX[n,j] += dC[i,j] * w[n] * X[n,i]
    dX[n,i] += w[n] * X[n,j] * whole(dC[i,j] + dC[j,i])

For who runs each as a product of matrices by itself: then that is one instead of two.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from insum.lang.expr import (
    Access,
    Call,
    Expr,
    Number,
    Product,
    Statement,
    index_of,
    product,
    rewrite,
    total,
    variables,
)
from insum.lang.parser import parse

#: Variables that two statements sum, above which nobody looks for those that are meant to be equal.
MOST_SUMMED = 4


def multiplied_along(text: str) -> tuple[str, ...] | None:
    """The variables of such a product that its sum has not got: for each number of the sum there
    are as many multiplications as these have places. None where it has no sum.

    >>> multiplied_along("dx[b,i] += dy[b] * x[b,j] * whole(A[i,j] + A[j,i])")
    ('b',)
    """
    statement = parse(text)
    for factor in _factors(statement.value):
        if isinstance(factor, Call):
            every = dict.fromkeys((*variables(statement.target), *variables(statement.value)))
            return tuple(v for v in every if v not in variables(factor))
    return None


def factored(texts: Sequence[str]) -> tuple[str, ...]:
    """Statements that add up to the same as these.

    >>> factored(["dx[i] += dy * A[i,j] * x[j]", "dx[j] += dy * x[i] * A[i,j]"])
    ('dx[i] += dy * x[j] * whole(A[i,j] + A[j,i])',)
    >>> factored(["dX[k,l] += dy * X[m,j]", "dX[m,j] += dy * X[k,l]"])
    ('dX[k,l] += 2 * dy * X[m,j]',)
    >>> factored(["dx[i] += dy[i] * a[i]", "dx[i] += dy[i] * b[i]"])
    ('dx[i] += dy[i] * a[i]', 'dx[i] += dy[i] * b[i]')
    """
    found: list[Statement] = []
    for one in map(parse, texts):
        for k, before in enumerate(found):
            both = _together(before, one)
            if both is not None:
                found[k] = both
                break
        else:
            found.append(one)
    return tuple(map(str, found)) if len(found) < len(texts) else tuple(texts)


def _together(first: Statement, other: Statement) -> Statement | None:
    """Two statements as one, whatever the variables of the other are called."""
    summed = [_summed(first), _summed(other)]
    if len(summed[0]) != len(summed[1]) or len(summed[0]) > MOST_SUMMED:
        return None
    if not _is_plain(first) or not _is_plain(other) or first.target.tensor != other.target.tensor:
        return None
    kept = dict(zip(variables(other.target), variables(first.target), strict=True))
    own, written = _factors(first.value), list[list[Expr]]()
    for order in itertools.permutations(summed[0]):
        names = {**kept, **dict(zip(summed[1], order, strict=True))}
        written.append(_factors(_renamed(other.value, names)))
    if any(Counter(own) == Counter(factors) for factors in written):
        return Statement(first.target, first.operator, product([*own, Number(2)]))
    if not summed[0]:
        return None
    values = (_of_both(own, factors, {*summed[0]}) for factors in written)
    value = next((one for one in values if one is not None), None)
    return None if value is None else Statement(first.target, first.operator, value)


def _of_both(first: list[Expr], other: list[Expr], summed: set[str]) -> Expr | None:
    """Where all factors are the same but one, which runs over the same points in both. Those that
    are the same have to tell that variables of one name have one extent.
    """
    own = [*(Counter(first) - Counter(other)).elements()]
    others = [*(Counter(other) - Counter(first)).elements()]
    if len(own) != 1 or len(others) != 1:
        return None
    (a,), (b,) = own, others
    if isinstance(a, Number) or isinstance(b, Number) or {*variables(a)} != {*variables(b)}:
        return None
    shared = list(first)
    shared.remove(a)
    if not summed <= {v for factor in shared for v in variables(factor)}:
        return None
    return product([*shared, Call("whole", (total([a, b]),))])


def _is_plain(statement: Statement) -> bool:
    """A product of tensors at variables, added to places that are variables."""
    every = [statement.target, *(f for f in _factors(statement.value) if isinstance(f, Access))]
    factors = _factors(statement.value)
    plain = all(index.var is not None for access in every for index in access.indices)
    alone = len({*variables(statement.target)}) == len(statement.target.indices)
    return plain and alone and all(isinstance(f, Access | Number) for f in factors)


def _factors(value: Expr) -> list[Expr]:
    return [*value.factors] if isinstance(value, Product) else [value]


def _summed(statement: Statement) -> list[str]:
    kept = variables(statement.target)
    return [name for name in variables(statement.value) if name not in kept]


def _renamed(value: Expr, names: Mapping[str, str]) -> Expr:
    def change(access: Access) -> Expr:
        return Access(access.tensor, tuple(index_of(names[str(i.var)]) for i in access.indices))

    return rewrite(value, change)
