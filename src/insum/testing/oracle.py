"""The meaning of a statement as plainly as it can be written: loops over every point of its index
variables.

Nothing of the graph or of the kernels is used, only the parsed and bound statement, so that an
agreement means something.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum.errors import IndexRangeError
from insum.lang.bind import Problem, Size, Value, bind
from insum.lang.expand import ProductTerm
from insum.lang.expr import (
    Access,
    Affine,
    Call,
    Expr,
    Number,
    Product,
    Statement,
    Sum,
    Var,
    product,
)
from insum.lang.parser import parse
from insum.lang.types import infer


def oracle(
    statement: str | Statement,
    values: Mapping[str, Value],
    *,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None = None,
    padded: Sequence[str] = (),
) -> np.ndarray[Any, Any]:
    """What ``statement`` means for ``values``, computed point by point: slow, obvious, and in
    double precision.

    Floating results come as float64, complex ones as complex128, booleans as bool. Integers are
    exact Python integers until they are wrapped, once and at the end, to the dtype of the result
    (an overflow inside a function's argument is not modelled). Nothing that is passed in is
    changed.

    Args:
        statement: One statement of the language.
        values: A tensor or number for each name.
        sizes: As in `insum`.
        padded: As in `insum`.

    Returns:
        An array of NumPy.

    Examples:
        >>> import torch
        >>> A, x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 10.0])
        >>> oracle("y[i] = A[i,j] * x[j]", {"A": A, "x": x})
        array([21., 43.])
        >>> values = {"A": torch.ones(3), "D": torch.tensor([0, 2, 2])}
        >>> oracle("C[D[p]] += A[p]", values, sizes={"C": (4,)})
        array([1., 0., 2., 0.])
    """
    parsed = parse(statement) if isinstance(statement, str) else statement
    problem = bind(parsed, values, sizes=sizes, padded=padded)
    with np.errstate(all="ignore"):
        return _Interpreter(problem, values).run()


class _Absent(Exception):
    """A padded index was -1: this point contributes nothing."""


#: One term: what it adds at every point of its variables, as Python runs it.
_LOOP = """
def loop(points, result, combine, counts):
    for {position} in points:
        try:
            where, value = {place}, prod([{factors}])
        except Absent:
            continue
        result[where] = combine(result[where], value)
        counts[where] += 1
"""


class _Interpreter:
    """Each expression becomes text of Python: an expression of the point's variables."""

    def __init__(self, problem: Problem, values: Mapping[str, Value]) -> None:
        self.problem, self.statement = problem, problem.statement
        self.types = {name: kind.type for name, kind in problem.kinds.items()}
        self.arrays = {name: _exact(value) for name, value in values.items()}
        self.combine = _COMBINE[self.statement.operator]
        self.boolean = infer(self.statement.value, self.types).dtype == torch.bool
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.known: dict[str, Any] = {"prod": math.prod, "present": _present, "Absent": _Absent}
        self.tensors = {name: self.name(array) for name, array in self.arrays.items()}
        self.variables = {name: f"v{k}" for k, name in enumerate(problem.extents)}

    def run(self) -> np.ndarray[Any, Any]:
        result = self.initial()
        place = self.place(self.statement.target)
        for term in self.problem.terms:
            self.add(term, result, place)
        if self.statement.operator == "mean=":
            for where, count in self.counts.items():
                result[where] = result[where] / count
        return _finished(result, self.problem.dtype)

    def initial(self) -> np.ndarray[Any, Any]:
        name, operator = self.statement.target.tensor, self.statement.operator
        if operator != "=" and name in self.arrays:
            return self.arrays[name].copy()
        result = np.empty(tuple(int(s) for s in self.problem.shape), dtype=object)
        result.fill(_nothing(operator, self.problem.dtype))
        return result

    def add(self, term: ProductTerm, result: np.ndarray[Any, Any], place: str) -> None:
        factors = ", ".join([self.value(f, self.boolean) for f in term.factors])
        position = _tuple([self.variables[v] for v in term.variables])
        exec(_LOOP.format(position=position, place=place, factors=factors), self.known)
        points = itertools.product(*[range(int(self.problem.extents[v])) for v in term.variables])
        self.known["loop"](points, result, self.combine, self.counts)

    # --- one piece of text for each node ---

    def name(self, what: Any) -> str:
        """A name that the text has for a value."""
        name = f"known_{len(self.known)}"
        self.known[name] = what
        return name

    def value(self, expr: Expr, boolean: bool) -> str:
        """``boolean``: whether what the expression is a part of is a truth value, so that + means
        or.
        """
        match expr:
            case Number(number):
                return self.name(number)
            case Access():
                return self.element(expr)
            case Call(function, args):
                deciders = args[1:] if function == "where" else args
                inner = infer(product(list(deciders)), self.types).dtype == torch.bool
                values = [self.value(a, inner) for a in deciders]
                if function == "where":
                    own = infer(args[0], self.types).dtype == torch.bool
                    values.insert(0, self.value(args[0], own))
                return f"{self.name(_FUNCTIONS[function])}({', '.join(values)})"
            case Product(parts):
                return self.joined("all" if boolean else "prod", parts, boolean)
            case Sum(parts):
                return self.joined("any" if boolean else "sum", parts, boolean)
        raise AssertionError(expr)

    def joined(self, join: str, parts: Sequence[Expr], boolean: bool) -> str:
        return f"{join}([{', '.join(self.value(p, boolean) for p in parts)}])"

    def element(self, access: Access) -> str:
        value = f"{self.tensors[access.tensor]}[{self.place(access)}]"
        return f"present({value})" if access.tensor in self.problem.padded else value

    def place(self, access: Access) -> str:
        return _tuple([self.index(access, dim, i) for dim, i in enumerate(access.indices)])

    def index(self, access: Access, dim: int, index: Affine) -> str:
        limit = int(self.problem.size_of(access, dim))
        value = " + ".join([*(f"{c} * {self.atom(a)}" for c, a in index.terms), str(index.offset)])

        def outside(value: int) -> None:
            fact = (
                f"index {index} of {access.tensor} is {value}, outside dimension {dim} "
                f"of size {limit}"
            )
            raise self.problem.complain(IndexRangeError, fact, span=index.span)

        return f"(at if 0 <= (at := int({value})) < {limit} else {self.name(outside)}(at))"

    def atom(self, atom: Var | Access) -> str:
        return self.element(atom) if isinstance(atom, Access) else self.variables[atom.name]


def _tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)},)" if texts else "()"


def _present(value: Any) -> Any:
    if value == -1:
        raise _Absent
    return value


def _exact(value: Value) -> np.ndarray[Any, Any]:
    """An array of Python numbers: integers of any size, floats in double precision."""
    if not isinstance(value, Tensor):
        return np.array(value, dtype=object)
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    wide = (
        torch.complex128
        if plain.is_complex()
        else torch.float64
        if plain.is_floating_point()
        else plain.dtype
    )
    array = np.empty(tuple(plain.shape), dtype=object)
    array.reshape(-1)[:] = plain.to(wide).contiguous().reshape(-1).tolist()
    return array


def _nothing(operator: str, dtype: torch.dtype) -> bool | int | float:
    """What a cell holds that nothing contributes to."""
    if operator in ("=", "+=", "mean="):
        return 0
    sign = -1 if operator == "max=" else 1
    if dtype == torch.bool:
        return sign > 0
    if dtype.is_floating_point:
        return sign * math.inf
    return torch.iinfo(dtype).min if sign < 0 else torch.iinfo(dtype).max


def _finished(result: np.ndarray[Any, Any], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    cells = result.reshape(-1).tolist()
    if dtype == torch.bool:
        return np.array([bool(c != 0) for c in cells], dtype=np.bool_).reshape(result.shape)
    if dtype.is_complex or dtype.is_floating_point:
        return np.array(cells, dtype=np.complex128 if dtype.is_complex else np.float64).reshape(
            result.shape
        )
    info = torch.iinfo(dtype)
    wrapped = [(int(c) - info.min) % 2**info.bits + info.min for c in cells]
    return np.array(wrapped, dtype=str(dtype).removeprefix("torch.")).reshape(result.shape)


def _larger(a: Any, b: Any) -> Any:
    return a if a != a or a >= b else b  # a NaN wins, as in torch


def _smaller(a: Any, b: Any) -> Any:
    return a if a != a or a <= b else b


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "=": lambda a, b: a + b,
    "+=": lambda a, b: a + b,
    "max=": _larger,
    "min=": _smaller,
    "mean=": lambda a, b: a + b,
}


def _double(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A NumPy function in double precision, which yields inf and nan where Python's own would
    raise.
    """

    def apply(x: Any) -> Any:
        return function(np.complex128(x) if isinstance(x, complex) else np.float64(x)).item()

    return apply


def _power(x: Any, exponent: int | float) -> Any:
    if isinstance(x, int) and isinstance(exponent, int) and exponent >= 0:
        return x**exponent
    return _double(lambda v: np.power(v, exponent))(x)


def _softplus(x: Any) -> Any:
    return np.logaddexp(0, x)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": _double(np.exp),
    "expm1": _double(np.expm1),
    "log": _double(np.log),
    "log1p": _double(np.log1p),
    "sqrt": _double(np.sqrt),
    "sin": _double(np.sin),
    "cos": _double(np.cos),
    "tanh": _double(np.tanh),
    "erf": lambda x: math.erf(x),
    "sigmoid": _double(lambda x: 1 / (1 + np.exp(-x))),
    "gelu": _double(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
    "silu": _double(lambda x: x / (1 + np.exp(-x))),
    "softplus": _double(_softplus),
    "reciprocal": _double(lambda x: 1 / x),
    "pow": _power,
    "abs": abs,
    "relu": lambda x: x if x > 0 or x != x else 0 * x,
    "leaky_relu": lambda x, slope: x if x > 0 else slope * x,
    "elu": lambda x, scale: x if x > 0 else scale * _double(np.expm1)(x),
    "maximum": _larger,
    "minimum": _smaller,
    "where": lambda holds, a, b: a if holds else b,
    "whole": lambda x: x,
    "ones": lambda x: 1,
    "sign": lambda x: (x > 0) - (x < 0),
    "step": lambda x: int(x > 0),
    "conj": lambda x: x.conjugate(),
    "eq": lambda a, b: int(a == b),
    "ne": lambda a, b: int(a != b),
    "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b),
}
