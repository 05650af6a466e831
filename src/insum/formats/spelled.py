"""A statement over sparse operands, and how each of their patterns is spelled in it."""

from __future__ import annotations

from typing import NoReturn

from insum.errors import InsumError, Span
from insum.formats.spell import Operand, Source, Spelling, pattern_key
from insum.lang.expr import (
    Access,
    Call,
    Expr,
    Number,
    Product,
    Statement,
    Sum,
    accesses,
    names_of,
    variables,
)

#: Functions that are 0 at 0: what is absent stays absent under them.
_KEEP_ZERO = frozenset(
    {
        *("abs", "relu", "sqrt", "tanh", "sign", "conj", "expm1", "log1p", "sin", "erf"),
        *("leaky_relu", "elu", "gelu", "silu", "whole"),
    }
)


class SpelledStatement:
    """``spellings`` are those of patterns that were met, ``sources`` the arguments that are made of
    operands, by how; ``taken`` are names that stand for something.
    """

    def __init__(self, statement: Statement, operands: dict[str, Operand]) -> None:
        self.statement, self.target = statement, statement.target
        self.text = statement.text or str(statement)
        self.operands = operands
        self.taken = names_of(statement)
        self.spellings: dict[object, Spelling] = {}
        self.sources: dict[object, Source] = {}

    def fail(
        self,
        kind: type[InsumError],
        fact: str,
        *,
        span: Span | None = None,
        expected: str = "",
        remedy: str = "",
    ) -> NoReturn:
        raise kind(fact, statement=self.text, span=span, expected=expected, remedy=remedy)

    def is_sparse(self, name: str) -> bool:
        return name in self.operands and bool(self.operands[name].kind)

    def key_of(self, access: Access) -> object:
        return pattern_key(self.operands[access.tensor], self.names_of(access))

    def names_of(self, access: Access) -> tuple[str, ...]:
        return tuple(str(index.var) for index in access.indices)

    def vanishes(self, expr: Expr, key: object) -> bool:
        """Whether an expression is zero wherever the pattern has no entry."""
        match expr:
            case Access():
                return self.is_sparse(expr.tensor) and self.key_of(expr) == key
            case Product(factors):
                return any(self.vanishes(f, key) for f in factors)
            case Sum(terms):
                return all(self.vanishes(t, key) for t in terms)
            case Call("pow", (base, Number(exponent))):
                return exponent > 0 and self.vanishes(base, key)
            case Call(function, args):
                return function in _KEEP_ZERO and self.vanishes(args[0], key)
        return False

    def ranges_of_functions(self, expr: Expr) -> set[str]:
        """Index variables of dense operands inside of functions that are not 0 at 0."""
        match expr:
            case Product(parts) | Sum(parts):
                return {v for part in parts for v in self.ranges_of_functions(part)}
            case Call(function, args):
                zero = function in _KEEP_ZERO or (
                    function == "pow" and isinstance(args[1], Number) and args[1].value > 0
                )
                if zero:
                    return self.ranges_of_functions(args[0])
                read = [a for arg in args for a in accesses(arg, nested=False)]
                return {v for a in read if not self.is_sparse(a.tensor) for v in variables(a)}
        return set()
