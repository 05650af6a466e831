"""Text -> Statement. A hand-written recursive descent, so that every mistake has a place and a
remedy.

statement := access operator value    operator := "=" | "+=" | "-=" | "max=" | "min=" | "mean="
value     := sum [("<" | "<=" | ">" | ">=" | "==" | "!=") sum]
sum       := ["-"] product (("+" | "-") product)*
product   := factor (("*" | "/") factor)*
factor    := "-" factor | atom ["**" ["-"] (number | "(" value ")")]
atom      := number | name | access | function "(" value ("," value)* ")" | "(" value ")"
access    := name "[" [index ("," index)*] "]"
index     := affine combination of variables, accesses and integer literals
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import NoReturn

from insum.errors import Span, StatementError
from insum.lang.expr import (
    COMPARISONS,
    FUNCTIONS,
    Access,
    Affine,
    Atom,
    Call,
    Expr,
    Number,
    Product,
    Statement,
    Var,
    accesses,
    affine,
    names_of,
    product,
    tensors_of,
    total,
    variables,
)

#: Nesting deeper than this is a mistake or an attack, not a formula.
MAX_DEPTH = 50
#: Longer texts than this are refused before they are read.
MAX_LENGTH = 100_000
#: Names of options of ``insum.insum`` and friends: a tensor of that name could not be passed.
OPTION_NAMES = frozenset(
    {"out_shape", "sizes", "padded", "config", "optimize", "backend", "dense_output"}
)
#: The first functions. A tensor may have the name of a later one: such statements were there
#: before.
_FIRST = ("exp", "log", "sqrt", "abs", "relu", "sigmoid", "tanh", "reciprocal", "sign", "step")
RESERVED = frozenset({*_FIRST, "conj", "eq", *OPTION_NAMES, "max", "min"})

_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<comparison>[<>]=?|[=!]=)"
    r"|(?P<operator>[+-]=(?!=)|(?:max|min|mean)\s*=(?!=)|=)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<mark>\*\*|[\[\](),+*/-])",
    re.ASCII,
)
#: What a mean is here.
#: What functions of other names are here.
_MEANT = {
    "max": "maximum(x, y)",
    "min": "minimum(x, y)",
    "rsqrt": "x ** -0.5",
    "square": "x ** 2",
    "gt": "x > y",
    "ge": "x >= y",
    "div": "x / y",
    "clamp": "minimum(maximum(x, low), high)",
    "ln": "log(x)",
    "sum": "nothing: an index that is not on the left side is summed over",
}
_CLOSING = {"[": "]", "(": ")"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    span: Span


def parse(text: str) -> Statement:
    """Read a statement.

    >>> statement = parse("C[AM[p], n] += AV[p]*B[AK[p],n]")
    >>> print(statement)
    C[AM[p],n] += AV[p] * B[AK[p],n]
    >>> parse(str(statement)) == statement
    True
    """
    if not isinstance(text, str):
        raise StatementError(
            f"a statement is a string, not {type(text).__name__}",
            remedy='insum("C[i] = A[i,j] * B[j]", A=A, B=B)',
        )
    if len(text) > MAX_LENGTH:
        raise StatementError(
            f"the statement has {len(text)} characters; the limit is {MAX_LENGTH}",
            statement=text,
            remedy="split it into several statements",
        )
    return _parse(text)


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Statement:
    return _Parser(text).statement()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.tokens = list(self._tokens())
        self._check_brackets()

    # --- tokens ---

    def _tokens(self) -> list[_Token]:
        tokens, position = [], 0
        while position < len(self.text):
            found = _TOKEN.match(self.text, position)
            if found is None:
                self._fail(
                    *_stray(self.text[position]),
                    span=Span(position, position + 1),
                )
            kind = found.lastgroup or ""
            if kind != "space":
                tokens.append(
                    _Token(kind, re.sub(r"\s", "", found.group()), Span(position, found.end()))
                )
            position = found.end()
        tokens.append(_Token("end", "the end", Span(len(self.text), len(self.text) + 1)))
        return tokens

    def _check_brackets(self) -> None:
        open_: list[_Token] = []
        for token in self.tokens:
            if token.text in _CLOSING:
                open_.append(token)
            elif token.text in _CLOSING.values():
                if not open_:
                    self._fail(
                        f"unbalanced bracket: {token.text!r} closes nothing",
                        "remove it, or add the opening bracket",
                        span=token.span,
                    )
                opening = open_.pop()
                if _CLOSING[opening.text] != token.text:
                    self._fail(
                        f"unbalanced bracket: {opening.text!r} is closed by {token.text!r}",
                        f"close it with {_CLOSING[opening.text]!r}",
                        span=token.span,
                    )
        if open_:
            self._fail(
                f"unbalanced bracket: {open_[-1].text!r} is never closed",
                f"add {_CLOSING[open_[-1].text]!r}",
                span=open_[-1].span,
            )

    def _fail(self, fact: str, remedy: str = "", *, expected: str = "", span: Span) -> NoReturn:
        raise StatementError(fact, expected=expected, remedy=remedy, statement=self.text, span=span)

    @property
    def peek(self) -> _Token:
        return self.tokens[self.at]

    def take(self) -> _Token:
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def accept(self, text: str) -> bool:
        if self.peek.kind == "mark" and self.peek.text == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str, where: str) -> _Token:
        token = self.peek
        if token.text != text or token.kind != "mark":
            self._fail(f"found {_show(token)} where {text!r} was expected {where}", span=token.span)
        return self.take()

    def nest(self, token: _Token) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail(
                f"the expression is nested more than {MAX_DEPTH} levels deep",
                "compute a part of it into a tensor of its own first",
                span=token.span,
            )

    # --- grammar ---

    def statement(self) -> Statement:
        target = self.target()
        token = self.take()
        if token.kind != "operator":
            self._fail(
                f"found {_show(token)} after the left side",
                expected="one of =, +=, -=, max=, min=, mean=",
                span=token.span,
            )
        value = self.value()
        if self.peek.kind != "end":
            self._fail(
                f"found {_show(self.peek)} after the right side",
                expected="an operator (*, /, +, -, **) or the end of the statement",
                span=self.peek.span,
            )
        operator = token.text
        if operator == "-=":
            operator, value = "+=", product([Number(-1), value])
        statement = Statement(target, operator, value, self.text)
        self._check_names(statement)
        return statement

    def target(self) -> Access:
        token = self.take()
        if token.kind != "name":
            self._fail(
                f"a statement starts with its result, found {_show(token)}",
                remedy='write it as "C[i] = ..."',
                span=token.span,
            )
        if self.peek.text == "[":
            return self.access(token)
        if self.peek.kind == "operator":
            return Access(token.text, (), token.span)
        self._fail(
            f"found {_show(self.peek)} after the result's name",
            expected="'[' and its indices, or '[]' for a scalar",
            span=self.peek.span,
        )

    def value(self) -> Expr:
        start = self.peek.span.start
        left = self.sum()
        if self.peek.kind != "comparison":
            return left
        function, swapped = COMPARISONS[self.take().text]
        right = self.sum()
        if self.peek.kind == "comparison":
            self._fail(
                "comparisons do not chain",
                "multiply them: (a < b) * (b < c)",
                span=self.peek.span,
            )
        return Call(function, (right, left) if swapped else (left, right), self.since(start))

    def sum(self) -> Expr:
        start = self.peek.span.start
        terms = [self.product(negative=self.accept("-"))]
        while self.peek.text in ("+", "-") and self.peek.kind == "mark":
            terms.append(self.product(negative=self.take().text == "-"))
        return total(terms, self.since(start))

    def product(self, *, negative: bool = False) -> Expr:
        start = self.peek.span.start
        factors: list[Expr] = [Number(-1)] if negative else []
        factors.append(self.factor())
        while self.peek.text in ("*", "/") and self.peek.kind == "mark":
            divides = self.take().text == "/"
            factor = self.factor()
            factors.append(self.inverse(factor) if divides else factor)
        value = product(factors, self.since(start))
        self.check_literal(
            value.factors[0] if isinstance(value, Product) else value, self.since(start)
        )
        return value

    def inverse(self, divisor: Expr) -> Expr:
        """What division multiplies with."""
        span = self.since(self.tokens[self.at - 1].span.start)
        if not isinstance(divisor, Number):
            return Call("reciprocal", (divisor,), span)
        if not divisor.value:
            self._fail("a division by the number 0", span=span)
        return Number(1 / divisor.value, span)

    def factor(self) -> Expr:
        token = self.take()
        self.nest(token)
        if token.kind == "mark" and token.text == "-":
            value = product([Number(-1), self.factor()], self.since(token.span.start))
        else:
            value = self.power(token, self.atom(token))
        self.depth -= 1
        return value

    def power(self, token: _Token, base: Expr) -> Expr:
        if not self.accept("**"):
            return base
        start = self.peek.span.start
        sign = -1 if self.accept("-") else 1
        first = self.take()
        exponent = self.atom(first) if first.text == "(" or first.kind == "number" else None
        if not isinstance(exponent, Number) or self.peek.text == "**":
            self._fail(
                "an exponent is a number",
                "exp(y * log(x)) is x to the power of y",
                span=self.since(start),
            )
        number = Number(sign * exponent.value, first.span)
        span = self.since(token.span.start)
        return self.folded(base, number, span) or Call("pow", (base, number), span)

    def folded(self, base: Expr, exponent: Number, span: Span) -> Number | None:
        """A power of two numbers, which is a number."""
        if not isinstance(base, Number):
            return None
        try:
            value = float(base.value) ** exponent.value
        except (ArithmeticError, ValueError):
            value = math.inf
        whole = isinstance(base.value, int) and isinstance(exponent.value, int)
        if isinstance(value, complex) or not math.isfinite(value):
            self._fail(f"{base} ** {exponent} is no number that a tensor can hold", span=span)
        return Number(base.value**exponent.value if whole else value, span)

    def atom(self, token: _Token) -> Expr:
        match token.kind, token.text:
            case "number", text:
                return Number(self.number(token, text), token.span)
            case "mark", "(":
                inner = self.value()
                self.expect(")", "to close the parenthesis")
                return inner
            case "name", name if self.peek.text == "(":
                return self.call(token, name)
            case "name", name:
                return self.access(token) if self.peek.text == "[" else Access(name, (), token.span)
        self._fail(
            f"found {_show(token)} where a value was expected",
            expected="a tensor access, a number, a function or '('",
            span=token.span,
        )

    def call(self, token: _Token, name: str) -> Expr:
        if name not in FUNCTIONS:
            meant = _MEANT.get(name)
            if meant:
                self._fail(f"unknown function {name!r}", f"write {meant}", span=token.span)
            self._fail(
                f"unknown function {name!r}",
                f"the functions are {', '.join(FUNCTIONS)}; a tensor is indexed with brackets: "
                f"{name}[...]",
                span=token.span,
            )
        self.take()
        args = [self.value()]
        while self.accept(","):
            args.append(self.value())
        self.expect(")", f"after the arguments of {name}")
        span = self.since(token.span.start)
        return Call(name, (*args, *self.numbers(name, args, span)), span)

    def numbers(self, name: str, args: list[Expr], span: Span) -> list[Number]:
        """The numbers behind the arguments that were left out."""
        wanted = FUNCTIONS[name]
        missing = wanted.values + len(wanted.numbers) - len(args)
        defaults = wanted.numbers[len(wanted.numbers) - missing :] if missing > 0 else ()
        if missing < 0 or len(args) < wanted.values or None in defaults:
            self._fail(f"{name} takes {wanted}, found {len(args)}", span=span)
        for arg in args[wanted.values :]:
            if not isinstance(arg, Number):
                self._fail(
                    f"the last argument of {name} is a number, found {arg}",
                    "exp(y * log(x)) is x to the power of y" if name == "pow" else "",
                    span=span,
                )
        return [Number(default) for default in defaults if default is not None]

    def access(self, token: _Token) -> Access:
        self.nest(token)
        self.expect("[", "after a tensor's name")
        indices: list[Affine] = []
        if not self.accept("]"):
            indices.append(self.index())
            while self.accept(","):
                indices.append(self.index())
            self.expect("]", f"after the indices of {token.text}")
        self.depth -= 1
        return Access(token.text, tuple(indices), self.since(token.span.start))

    # --- index expressions: (terms, offset) pairs until the end ---

    def index(self) -> Affine:
        start = self.peek.span.start
        terms, offset = self.index_sum()
        value = affine(terms, offset, self.since(start))
        if not all(_fits(c) for c in (value.offset, *(c for c, _ in value.terms))):
            self._fail("an integer of the index does not fit into 64 bits", span=self.since(start))
        return value

    def index_sum(self) -> tuple[list[tuple[int, Atom]], int]:
        sign = -1 if self.accept("-") else 1
        terms, offset = _scaled(sign, self.index_product())
        while self.peek.text in ("+", "-") and self.peek.kind == "mark":
            sign = -1 if self.take().text == "-" else 1
            more, constant = _scaled(sign, self.index_product())
            terms, offset = terms + more, offset + constant
        return terms, offset

    def index_product(self) -> tuple[list[tuple[int, Atom]], int]:
        start = self.peek.span.start
        terms, offset = self.index_factor()
        while self.accept("*"):
            more, constant = self.index_factor()
            if terms and more:
                self._fail(
                    "an index may multiply variables by integers only",
                    "an affine index such as 2*i + k",
                    span=self.since(start),
                )
            terms, offset = (
                _scaled(constant, (terms, offset))
                if not more
                else _scaled(offset, (more, constant))
            )
        if self.peek.kind == "mark" and self.peek.text in ("/", "**"):
            self._fail(
                f"{self.peek.text!r} cannot stand in an index",
                "compute the index tensor first",
                span=self.peek.span,
            )
        return terms, offset

    def index_factor(self) -> tuple[list[tuple[int, Atom]], int]:
        token = self.take()
        self.nest(token)
        value = self._index_factor(token)
        self.depth -= 1
        return value

    def _index_factor(self, token: _Token) -> tuple[list[tuple[int, Atom]], int]:
        match token.kind, token.text:
            case "number", text:
                value = self.number(token, text)
                if not isinstance(value, int):
                    self._fail(f"an index is an integer, found {text}", span=token.span)
                return [], value
            case "mark", "(":
                inner = self.index_sum()
                self.expect(")", "to close the parenthesis")
                return inner
            case "mark", "-":
                return _scaled(-1, self.index_factor())
            case "name", name if self.peek.text == "(":
                self._fail(
                    f"a function cannot stand in an index: {name}(...)",
                    "compute the index tensor first",
                    span=token.span,
                )
            case "name", name:
                return [
                    (1, self.access(token) if self.peek.text == "[" else Var(name, token.span))
                ], 0
        self._fail(
            f"found {_show(token)} where an index was expected",
            expected="a variable, an integer or an access to an integer tensor",
            span=token.span,
        )

    # --- helpers ---

    def number(self, token: _Token, text: str) -> int | float:
        if len(text) > 40:
            self._fail("a number has more than 40 characters", span=token.span)
        value = int(text) if text.isdigit() else float(text)
        self.check_literal(Number(value), token.span)
        return value

    def check_literal(self, value: Expr, span: Span) -> None:
        """Literals, also those that came of multiplying literals, must be values that a tensor can
        hold.
        """
        match value:
            case Number(int(number)) if not _fits(number):
                self._fail(
                    "an integer literal does not fit into 64 bits",
                    "write it as a float, such as 1e20",
                    span=span,
                )
            case Number(float(number)) if not math.isfinite(number):
                self._fail("a literal is too large for a float64", span=span)

    def since(self, start: int) -> Span:
        return Span(start, max(self.tokens[self.at - 1].span.end, start + 1))

    def _check_names(self, statement: Statement) -> None:
        reserved = names_of(statement) & RESERVED
        if reserved:
            name = min(reserved)
            self._fail(
                f"{name!r} is a reserved name",
                f"call it {name}_ instead; reserved are {', '.join(sorted(RESERVED))}",
                span=self.find(name),
            )
        both = {statement.target.tensor, *tensors_of(statement)} & {
            *variables(statement.target),
            *variables(statement.value),
        }
        if both:
            name = min(both)
            access = next(
                a
                for a in (statement.target, *accesses(statement.target), *accesses(statement.value))
                if a.tensor == name
            )
            remedy = (
                "give one of them another name"
                if access.indices
                else (
                    "an index variable has no value of its own; pass torch.arange(n) under "
                    "another name"
                )
            )
            self._fail(
                f"{name!r} stands for a tensor and for an index variable",
                remedy,
                span=access.span or self.find(name),
            )

    def find(self, name: str) -> Span:
        return next(t.span for t in self.tokens if t.kind == "name" and t.text == name)


def _fits(value: int) -> bool:
    return -(2**63) <= value < 2**63


def _scaled(
    by: int, value: tuple[list[tuple[int, Atom]], int]
) -> tuple[list[tuple[int, Atom]], int]:
    terms, offset = value
    return [(by * c, a) for c, a in terms], by * offset


def _show(token: _Token) -> str:
    return token.text if token.kind == "end" else repr(token.text)


def _stray(character: str) -> tuple[str, str]:
    """What to say of a character that starts no token."""
    return (
        f"unknown character {character!r}",
        "names are ASCII letters, digits and underscores; "
        "the operators are = += -= max= min= mean= + - * / ** < <= > >= == != ( ) [ ] ,",
    )
