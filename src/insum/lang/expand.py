"""The right side as a sum of products: each is reduced over its own variables.

``max=`` and ``min=`` do not distribute over sums, and ``mean=`` counts the points of all of it, so
there the whole right side stays one term.
"""

from __future__ import annotations

from dataclasses import dataclass

from insum.errors import StatementError
from insum.lang.expr import (
    Call,
    Expr,
    Number,
    Product,
    Statement,
    Sum,
    factors_of,
    product,
    variables,
)

#: More products than this come from a product of long sums, and would each become work.
MAX_TERMS = 1024


@dataclass(frozen=True, slots=True)
class ProductTerm:
    """A product of factors, and the variables it ranges over: the left side's and its own."""

    factors: tuple[Expr, ...]
    variables: tuple[str, ...]

    @property
    def value(self) -> Expr:
        return product(list(self.factors))


def expand(statement: Statement) -> tuple[ProductTerm, ...]:
    """
    >>> from insum.lang.parser import parse
    >>> [str(t.value) for t in expand(parse("y[i] = x[i] * (A[i,j] - b[i])"))]
    ['x[i] * A[i,j]', '-x[i] * b[i]']
    """
    target = variables(statement.target)
    if statement.operator not in ("=", "+="):
        products: list[tuple[Expr, ...]] = [(statement.value,)]
    else:
        products = _products(statement.value)
    if len(products) > MAX_TERMS:
        raise StatementError(
            f"the right side expands into more than {MAX_TERMS} products",
            statement=statement.text or str(statement),
            remedy="compute the sums into tensors of their own first",
        )
    for factors in products:
        if (
            isinstance(factors[0], Number)
            and isinstance(factors[0].value, int)
            and not -(2**63) <= factors[0].value < 2**63
        ):
            raise StatementError(
                f"the literals of the product {product(list(factors))} do not fit into 64 bits",
                statement=statement.text or str(statement),
                remedy="write one of them as a float",
            )
    return tuple(
        ProductTerm(
            factors, tuple(dict.fromkeys((*target, *(v for f in factors for v in variables(f)))))
        )
        for factors in products
    )


def _products(value: Expr) -> list[tuple[Expr, ...]]:
    match value:
        case Sum(terms):
            return [p for term in terms for p in _products(term)]
        case Product(factors):
            return _distribute([_products(f) for f in factors])
        case Call("conj", (Sum(terms),)):
            return [p for term in terms for p in _products(Call("conj", (term,)))]
        case Call("conj", (Product(factors),)):
            return _distribute([_products(Call("conj", (f,))) for f in factors])
        case Call("conj", (Number() as number,)):
            return [(number,)]
        case Call("conj", (Call("conj", (inner,)),)):
            return _products(inner)
        case _:
            return [(value,)]


def _distribute(choices: list[list[tuple[Expr, ...]]]) -> list[tuple[Expr, ...]]:
    result: list[tuple[Expr, ...]] = [()]
    for options in choices:
        if len(result) * len(options) > MAX_TERMS:
            # refused by the caller; the products themselves could fill the memory
            return [()] * (MAX_TERMS + 1)
        result = [left + right for left in result for right in options]
    return [factors_of(product([*p])) for p in result]
