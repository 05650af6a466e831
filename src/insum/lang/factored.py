"""Sums of products that differ in one factor, as one product with the sum of these::

    dX[n,i] += dC[i,j] * w[n] * X[n,j]      dX[n,j] += dC[i,j] * w[n] * X[n,i]
    dX[n,i] += w[n] * X[n,j] * whole(dC[i,j] + dC[j,i])

For who runs each as a product of matrices by itself: then that is one instead of two.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from insum.lang.expr import (
    Access,
    Call,
    Expr,
    Number,
    Statement,
    factors_of,
    index_of,
    product,
    substitute,
    total,
    variables,
)
from insum.lang.parser import parse

#: Variables that two statements sum, above which nobody looks for those that are meant to be equal.
MOST_SUMMED = 4


@dataclass(frozen=True, slots=True)
class FactoredSum:
    """``statements`` that add up to a sum; each sum in one of them is multiplied ``along`` these
    variables: for each number of it there are as many multiplications as they have places.
    """

    statements: tuple[str, ...]
    along: tuple[tuple[str, ...], ...] = ()


def factored(texts: Sequence[str]) -> FactoredSum | None:
    """Fewer statements that add up to the same as these; None where there are none.

    >>> factored(["dx[b,i] += dy[b] * A[i,j] * x[b,j]", "dx[b,j] += dy[b] * x[b,i] * A[i,j]"])
    FactoredSum(statements=('dx[b,i] += dy[b] * x[b,j] * whole(A[i,j] + A[j,i])',), along=(('b',),))
    >>> factored(["dX[k,l] += dy * X[m,j]", "dX[m,j] += dy * X[k,l]"])
    FactoredSum(statements=('dX[k,l] += 2 * dy * X[m,j]',), along=())
    >>> factored(["dx[i] += dy[i] * a[i]", "dx[i] += dy[i] * b[i]"])
    """
    found: list[Statement] = []
    along: list[tuple[str, ...]] = []
    for one in map(parse, texts):
        for k, before in enumerate(found):
            both = _together(before, one)
            if both is not None:
                found[k], vars = both
                along += [vars] if vars is not None else []
                break
        else:
            found.append(one)
    if len(found) == len(texts):
        return None
    return FactoredSum(tuple(map(str, found)), tuple(along))


def _together(
    first: Statement, other: Statement
) -> tuple[Statement, tuple[str, ...] | None] | None:
    """Two statements as one, whatever the variables of the other are called, and those that its sum
    is multiplied along, where it has one.
    """
    summed = [_summed(first), _summed(other)]
    if len(summed[0]) != len(summed[1]) or len(summed[0]) > MOST_SUMMED:
        return None
    if not _is_plain(first) or not _is_plain(other) or first.target.tensor != other.target.tensor:
        return None
    kept = dict(zip(variables(other.target), variables(first.target), strict=True))
    own, written = factors_of(first.value), list[tuple[Expr, ...]]()
    for order in itertools.permutations(summed[0]):
        names = {**kept, **dict(zip(summed[1], order, strict=True))}
        change = {old: index_of(new) for old, new in names.items()}
        written.append(factors_of(substitute(other.value, change)))
    if any(Counter(own) == Counter(factors) for factors in written):
        return replace(first, value=product([*own, Number(2)])), None
    if not summed[0]:
        return None
    sums = (_of_both(own, factors, {*summed[0]}) for factors in written)
    found = next((one for one in sums if one is not None), None)
    if found is None:
        return None
    shared, both = found
    every = (*variables(first.target), *summed[0])
    along = tuple(v for v in every if v not in variables(both))
    return replace(first, value=product([*shared, both])), along


def _of_both(
    first: Sequence[Expr], other: Sequence[Expr], summed: set[str]
) -> tuple[list[Expr], Expr] | None:
    """Where all factors are the same but one, which runs over the same points in both: those, and
    the sum of these. What is the same has to tell that variables of one name have one extent.
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
    return shared, Call("whole", (total([a, b]),))


def _is_plain(statement: Statement) -> bool:
    """A product of tensors at variables, added to places that are variables."""
    target, factors = statement.target, factors_of(statement.value)
    every = [target, *(f for f in factors if isinstance(f, Access))]
    plain = all(index.var is not None for access in every for index in access.indices)
    alone = len({*variables(target)}) == len(target.indices)
    return plain and alone and all(isinstance(f, Access | Number) for f in factors)


def _summed(statement: Statement) -> list[str]:
    kept = variables(statement.target)
    return [name for name in variables(statement.value) if name not in kept]
