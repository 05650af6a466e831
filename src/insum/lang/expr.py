"""The whole language on one screen: frozen values that print as the notation and parse back to
equal values.

Statement   C[AM[p],n] += AV[p,q] * B[AK[p,q],n]
Access      B[AK[p,q],n]          a tensor and one index expression per dimension
Affine      2*i + AK[p] - 1       integer combination of variables and accesses, plus a constant
Expr        Access | Number | Call | Product | Sum
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from insum.errors import Span

OPERATORS = ("=", "+=", "max=", "min=", "mean=")


@dataclass(frozen=True, slots=True)
class Signature:
    """How many values a function takes, and the numbers behind them: a default for each, None where
    there is none.
    """

    values: int = 1
    numbers: tuple[float | None, ...] = ()

    def __str__(self) -> str:
        return f"{self.values} argument(s)" + "".join(
            " and a number" if n is None else f" and perhaps a number ({n})" for n in self.numbers
        )


#: Pointwise functions. Those behind ``where`` exist so that derivatives are statements too:
#: ``whole`` is its argument, as one value that is not expanded, and ``ones`` is 1 at each of its
#: points.
FUNCTIONS = {
    "exp": Signature(),
    "expm1": Signature(),
    "log": Signature(),
    "log1p": Signature(),
    "sqrt": Signature(),
    "abs": Signature(),
    "sin": Signature(),
    "cos": Signature(),
    "tanh": Signature(),
    "erf": Signature(),
    "sigmoid": Signature(),
    "relu": Signature(),
    "leaky_relu": Signature(1, (0.01,)),
    "elu": Signature(1, (1.0,)),
    "gelu": Signature(),
    "silu": Signature(),
    "softplus": Signature(),
    "reciprocal": Signature(),
    "pow": Signature(1, (None,)),
    "maximum": Signature(2),
    "minimum": Signature(2),
    "where": Signature(3),
    "whole": Signature(),
    "ones": Signature(),
    "sign": Signature(),
    "step": Signature(),
    "conj": Signature(),
    "eq": Signature(2),
    "ne": Signature(2),
    "lt": Signature(2),
    "le": Signature(2),
}
#: How comparisons are written: a function, and whether it takes its arguments the other way round.
COMPARISONS = {
    "==": ("eq", False),
    "!=": ("ne", False),
    "<": ("lt", False),
    "<=": ("le", False),
    ">": ("lt", True),
    ">=": ("le", True),
}


def _span() -> Span | None:
    return field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Var:
    """An index variable: ranges over ``0 .. extent-1``."""

    name: str
    span: Span | None = _span()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Affine:
    """``sum(coefficient * atom) + offset``; the common case is one variable with coefficient 1."""

    terms: tuple[tuple[int, Atom], ...] = ()
    offset: int = 0
    span: Span | None = _span()

    @property
    def var(self) -> str | None:
        """The variable's name where the expression is one variable and nothing else."""
        atom = self.atom
        return atom.name if isinstance(atom, Var) else None

    @property
    def atom(self) -> Atom | None:
        """The variable or access where the expression is that and nothing else."""
        return (
            self.terms[0][1]
            if len(self.terms) == 1 and self.offset == 0 and self.terms[0][0] == 1
            else None
        )

    def __str__(self) -> str:
        parts = [
            _signed(c, f"{abs(c)}*{_in_index(a)}" if abs(c) != 1 else _in_index(a))
            for c, a in self.terms
        ]
        if self.offset or not parts:
            parts.append(_signed(self.offset, str(abs(self.offset))))
        return _join_signed(parts)


@dataclass(frozen=True, slots=True)
class Access:
    """A tensor read or written at index expressions; with no indices, a scalar."""

    tensor: str
    indices: tuple[Affine, ...] = ()
    span: Span | None = _span()

    def __str__(self) -> str:
        return f"{self.tensor}[{','.join(map(str, self.indices))}]" if self.indices else self.tensor


@dataclass(frozen=True, slots=True)
class Number:
    """A literal. ``2`` and ``2.0`` are different literals: they promote to different dtypes."""

    value: int | float
    span: Span | None = _span()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Number)
            and type(self.value) is type(other.value)
            and self.value == other.value
        )

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Call:
    """A pointwise function of expressions; reduction happens outside it."""

    function: str
    args: tuple[Expr, ...]
    span: Span | None = _span()

    def __str__(self) -> str:
        return f"{self.function}({', '.join(map(str, self.args))})"


@dataclass(frozen=True, slots=True)
class Product:
    """At least two factors; literal factors are folded into one number that stands first."""

    factors: tuple[Expr, ...]
    span: Span | None = _span()

    def __str__(self) -> str:
        if self.factors[0] == Number(-1):
            return "-" + " * ".join(map(_in_product, self.factors[1:]))
        return " * ".join(map(_in_product, self.factors))


@dataclass(frozen=True, slots=True)
class Sum:
    """At least two terms; a difference is a term whose leading number is negative."""

    terms: tuple[Expr, ...]
    span: Span | None = _span()

    def __str__(self) -> str:
        texts = [str(t) for t in self.terms]
        return _join_signed([("-", t[1:]) if t.startswith("-") else ("+", t) for t in texts])


Atom: TypeAlias = Var | Access
Expr: TypeAlias = Access | Number | Call | Product | Sum


@dataclass(frozen=True, slots=True)
class Statement:
    """``target operator value``; variables absent from the target are reduced."""

    target: Access
    operator: str
    value: Expr
    text: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return (
            f"{self.target if self.target.indices else self.target.tensor + '[]'} "
            f"{self.operator} {self.value}"
        )


def _signed(sign: int, text: str) -> tuple[str, str]:
    return ("-", text) if sign < 0 else ("+", text)


def _join_signed(parts: list[tuple[str, str]]) -> str:
    head, *rest = parts
    return (
        ("-" if head[0] == "-" else "")
        + head[1]
        + "".join(f" {sign} {text}" for sign, text in rest)
    )


def _in_index(atom: Atom) -> str:
    """A scalar index tensor keeps its brackets, or it would read as a variable."""
    return f"{atom}[]" if isinstance(atom, Access) and not atom.indices else str(atom)


def _in_product(factor: Expr) -> str:
    return f"({factor})" if isinstance(factor, Sum) else str(factor)


# --- building canonical values --------------------------------------------------------------------


def affine(
    terms: Iterator[tuple[int, Atom]] | list[tuple[int, Atom]],
    offset: int,
    span: Span | None = None,
) -> Affine:
    """Merge equal atoms (``i + i`` is ``2*i``) and drop those that cancel."""
    merged: dict[Atom, int] = {}
    for coefficient, atom in terms:
        merged[atom] = merged.get(atom, 0) + coefficient
    return Affine(tuple((c, a) for a, c in merged.items() if c), offset, span)


def index_of(name: str) -> Affine:
    """The index expression that is one variable."""
    return Affine(((1, Var(name)),))


def product(factors: list[Expr], span: Span | None = None) -> Expr:
    """Flatten nested products and fold literals into one leading number."""
    coefficient: int | float = 1
    rest: list[Expr] = []
    for factor in factors:
        for f in factors_of(factor):
            if isinstance(f, Number):
                coefficient = _times(coefficient, f.value)
            else:
                rest.append(f)
    if not (isinstance(coefficient, int) and coefficient == 1) or not rest:
        rest.insert(0, Number(coefficient))
    return rest[0] if len(rest) == 1 else Product(tuple(rest), span)


def _times(a: int | float, b: int | float) -> int | float:
    try:
        return a * b
    except OverflowError:  # an integer beyond float64 met a float
        return math.copysign(1.0, a) * math.copysign(1.0, b) * math.inf


def total(terms: list[Expr], span: Span | None = None) -> Expr:
    """Flatten nested sums."""
    flat = [t for term in terms for t in (term.terms if isinstance(term, Sum) else (term,))]
    return flat[0] if len(flat) == 1 else Sum(tuple(flat), span)


# --- looking inside -------------------------------------------------------------------------------


def accesses(node: Expr | Affine | Var, *, nested: bool = True) -> Iterator[Access]:
    """Every access in reading order, the outer before those inside its indices (left out with
    ``nested=False``).
    """
    found: list[Access] = []
    _add_accesses(node, nested, found)
    return iter(found)


def _add_accesses(node: Expr | Affine | Var, nested: bool, found: list[Access]) -> None:
    # a list that is handed down: planning asks this of every part of a statement, again and again,
    # and generators inside of each other take twice the time
    match node:
        case Affine():
            for _, atom in node.terms:
                if not isinstance(atom, Var):
                    _add_accesses(atom, nested, found)
        case Access():
            found.append(node)
            if nested:
                for index in node.indices:
                    _add_accesses(index, True, found)
        case Call(_, args) | Product(args) | Sum(args):
            for arg in args:
                _add_accesses(arg, nested, found)


def variables(node: Expr | Affine | Var) -> tuple[str, ...]:
    """Names of the index variables, in order of first appearance."""
    found: dict[str, None] = {}
    _add_variables(node, found)
    return tuple(found)


def _add_variables(node: Expr | Affine | Var, found: dict[str, None]) -> None:
    match node:
        case Affine():
            for _, atom in node.terms:
                if isinstance(atom, Var):
                    found[atom.name] = None
                else:
                    _add_variables(atom, found)
        case Var():
            found[node.name] = None
        case Access(_, children) | Call(_, children) | Product(children) | Sum(children):
            for child in children:
                _add_variables(child, found)


def tensors_of(statement: Statement) -> tuple[str, ...]:
    """Names of the tensors that are read, in order of first appearance, the target's index tensors
    first.
    """
    reads = [a.tensor for index in statement.target.indices for a in accesses(index)]
    reads += [a.tensor for a in accesses(statement.value)]
    return tuple(dict.fromkeys(reads))


def rewrite(node: Expr, change: Callable[[Access], Expr]) -> Expr:
    """Replace every outermost access by ``change(access)``; index expressions are left to
    ``change``.
    """
    match node:
        case Access():
            return change(node)
        case Call(function, args, span):
            return Call(function, tuple(rewrite(a, change) for a in args), span)
        case Product(factors, span):
            return product([rewrite(f, change) for f in factors], span)
        case Sum(terms, span):
            return total([rewrite(t, change) for t in terms], span)
        case _:
            return node


def factors_of(value: Expr) -> tuple[Expr, ...]:
    """What a value is the product of: itself where it is none."""
    return value.factors if isinstance(value, Product) else (value,)


def substitute(expr: Expr, change: Mapping[str, Affine]) -> Expr:
    """Replace index variables by index expressions, at every depth."""
    match expr:
        case Access(tensor, indices, span):
            return Access(tensor, tuple(_substitute_index(i, change) for i in indices), span)
        case Call(function, args, span):
            return Call(function, tuple(substitute(a, change) for a in args), span)
        case Product(factors, span):
            return Product(tuple(substitute(f, change) for f in factors), span)
        case Sum(terms, span):
            return Sum(tuple(substitute(t, change) for t in terms), span)
        case _:
            return expr


def _substitute_index(index: Affine, change: Mapping[str, Affine]) -> Affine:
    terms: list[tuple[int, Atom]] = []
    offset = index.offset
    for coefficient, atom in index.terms:
        if isinstance(atom, Var) and atom.name in change:
            new = change[atom.name]
            terms += [(coefficient * c, a) for c, a in new.terms]
            offset += coefficient * new.offset
        else:
            inner = substitute(atom, change) if isinstance(atom, Access) else atom
            terms.append((coefficient, inner))  # type: ignore[arg-type]
    return affine(terms, offset)


#: A variable of an index, and by how much it counts.
VarTerm: TypeAlias = tuple[int, Var]


def odd_index(holders: Sequence[Access]) -> Iterator[tuple[int, int, VarTerm, VarTerm]]:
    """The only index that is more than a variable, where it is of two: of which access, along which
    dimension, and its terms in both orders.
    """
    odd = [(k, d) for k, h in enumerate(holders) for d, i in enumerate(h.indices) if i.var is None]
    terms = holders[odd[0][0]].indices[odd[0][1]].terms if len(odd) == 1 else ()
    found = [(by, atom) for by, atom in terms if isinstance(atom, Var)]
    if len(found) == len(terms) == 2:
        ((at, dim),), (first, second) = odd, found
        yield at, dim, first, second
        yield at, dim, second, first


def fresh(wanted: str, taken: set[str]) -> str:
    """``wanted``, or the first of ``wanted_1``, ``wanted_2`` ... that is free; the choice is added
    to ``taken``.
    """
    name, k = wanted, 0
    while name in taken or name in FUNCTIONS:
        k += 1
        name = f"{wanted}_{k}"
    taken.add(name)
    return name


def names_of(statement: Statement) -> set[str]:
    """Every identifier of the statement: tensors and index variables."""
    target = statement.target
    return {target.tensor, *tensors_of(statement), *variables(target), *variables(statement.value)}
