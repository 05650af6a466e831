"""The right side of a statement as values over its variables: pointwise functions, then one einsum
(or one reduction) a term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from insum.errors import DtypeError, UnsupportedError
from insum.graph_access import Reader
from insum.graph_build import Value
from insum.lang.bind import Problem
from insum.lang.expand import Term
from insum.lang.expr import Access, Call, Expr, Number, Product, Sum
from insum.lang.types import Typed, accumulator, call_type, identity, infer, is_rounded

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "reciprocal": torch.reciprocal,
    "sign": torch.sign,
    "conj": torch.conj,
}
_HALVES = (torch.float16, torch.bfloat16)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are computed: wide, and one that torch has kernels
    for.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        # torch.einsum and torch.sum turn narrow integers into int64 at places of their own choice
        return torch.int64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else accumulator(dtype)


#: Up to so many summed places, many small vectors are multiplied and summed rather than contracted.
MOST_SUMMED = 64


def is_short(problem: Problem, summed: Iterable[str]) -> bool:
    """Whether the sum over these variables has few places."""
    sizes = [problem.extents[v] for v in summed]
    return (
        all(isinstance(size, int) for size in sizes)
        and math.prod(int(s) for s in sizes) <= MOST_SUMMED
    )


class Evaluator(Reader):
    """A builder that can evaluate terms."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        #: What sizes decided: sums, and whether each `is_short`. Where they are not, the graph is
        #: another.
        self.sums: dict[tuple[str, ...], bool] = {}

    @property
    def types(self) -> dict[str, Typed]:
        return {name: kind.type for name, kind in self.problem.kinds.items()}

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype in which contributions meet; never narrower than the values themselves."""
        value = infer(self.problem.statement.value, self.types).dtype
        return torch.promote_types(computed_in(self.problem.dtype), computed_in(value))

    def term(self, term: Term, order: tuple[str, ...]) -> Value:
        """The contribution of a term, reduced to the variables of the left side; in ``order`` where
        that costs nothing.
        """
        if self.problem.statement.operator in ("max=", "min="):
            return self._extremum(term.value, order)
        return self._product(term, order)

    # --- pointwise ---

    def evaluate(self, expr: Expr, dtype: torch.dtype) -> Value:
        """The value of an expression over its own variables, computed in ``dtype``."""
        match expr:
            case Access():
                return self.cast(self.read(expr), dtype)
            case Number(value):
                return Value(self._literal(value, dtype))
            case Call(function, args):
                return self.cast(self._call(function, args, dtype), dtype)
            case Product(parts):
                return self._fold(torch.mul, parts, dtype)
            case Sum(parts):
                return self._fold(torch.add, parts, dtype)
        raise AssertionError(expr)

    def _literal(self, value: int | float, dtype: torch.dtype) -> int | float:
        if dtype.is_floating_point or dtype.is_complex:
            return float(value)
        if not -(2**63) <= value < 2**63:
            raise self.problem.complain(
                DtypeError,
                f"the number {value} does not fit in int64",
                remedy=f"write it as {float(value)!r}",
            )
        return value

    def _fold(
        self, function: Callable[..., Any], parts: tuple[Expr, ...], dtype: torch.dtype
    ) -> Value:
        result = self.evaluate(parts[0], dtype)
        for part in parts[1:]:
            result = self.pointwise(function, result, self.evaluate(part, dtype))
        return result

    def _call(self, function: str, args: tuple[Expr, ...], wanted: torch.dtype) -> Value:
        joined = call_type(function, args, self.types, wanted)
        dtype = computed_in(joined)
        values = [self.as_tensor(self.evaluate(a, dtype), dtype) for a in args]
        if all(infer(a, self.types).dtype == torch.bool for a in args):
            values = [
                self._truth(v) if isinstance(a, Product | Sum) else v for a, v in zip(args, values)
            ]
        if function == "eq":
            return self._equal(args, values, dtype)
        if function == "step":
            return self.cast(
                Value(
                    self.call(torch.gt, values[0].node, 0, name="is_positive"),
                    values[0].vars,
                    torch.bool,
                    True,
                ),
                dtype,
            )
        result = dtype.to_real() if function == "abs" and dtype.is_complex else dtype
        node = self.call(_FUNCTIONS[function], values[0].node)
        return Value(node, values[0].vars, result, function != "conj")

    def _truth(self, value: Value) -> Value:
        """Among truth values + means or: a sum of two is 1, not 2."""
        assert value.dtype is not None
        return self.cast(
            Value(self.call(torch.ne, value.node, 0), value.vars, torch.bool, True), value.dtype
        )

    def _equal(self, args: tuple[Expr, ...], values: list[Value], dtype: torch.dtype) -> Value:
        """Compared as rounded to the narrower of the two dtypes: a half-precision maximum equals
        the wide value it was rounded from. Numbers and integers are not rounded.
        """
        rounded = [infer(a, self.types).dtype for a in args if is_rounded(a, self.types)]
        narrow = min(rounded, key=lambda d: d.itemsize, default=dtype)
        if narrow.is_floating_point and narrow.itemsize < dtype.itemsize:
            values = [self.cast(v, narrow) for v in values]
        same = self.pointwise(torch.eq, values[0], values[1])
        return self.cast(Value(same.node, same.vars, torch.bool, True), dtype)

    # --- products, summed ---

    def _product(self, term: Term, order: tuple[str, ...]) -> Value:
        dtype = self._term_dtype(term)
        values = [self.evaluate(f, dtype) for f in term.factors]
        scalars = [v for v in values if not v.vars]
        tensors = [v for v in values if v.vars]
        late, early = self._masks_of(term, order)
        for mask in early:
            tensors = self._masked_factors(tensors, mask)
        result = self._contracted(tensors, order, dtype)
        for scalar in scalars:
            result = scalar if result is None else self.pointwise(torch.mul, result, scalar)
        assert result is not None
        result = self.cast(self.as_tensor(result, dtype), self.accumulator)
        for mask in late:
            result = self.masked(result, mask, 0)
        return result

    def _term_dtype(self, term: Term) -> torch.dtype:
        """Half precision is widened on the CPU, where that is faster and more exact; elsewhere
        einsum widens inside, but rounds its result, which a wide one must not be.
        """
        dtype = infer(term.value, self.types).dtype
        narrow = dtype in _HALVES and self.problem.dtype in _HALVES
        return dtype if narrow and self.problem.device.type != "cpu" else self.accumulator

    def _masks_of(self, term: Term, order: tuple[str, ...]) -> tuple[list[Value], list[Value]]:
        """Masks that may be applied to the result, because nothing they speak of is summed away,
        and those that may not.
        """
        masks = self.masks(term.value)
        for index in self.problem.statement.target.indices:
            masks += [m for m in self.masks(index) if m not in masks]
        late = [m for m in masks if set(m.vars) <= set(order)]
        return late, [m for m in masks if m not in late]

    def _masked_factors(self, factors: list[Value], mask: Value) -> list[Value]:
        """Zero where absent, in every factor that sees the mask's variables or can without growing
        past one that does: 0 * inf is nan.
        """
        spans = [set(f.vars) for f in factors if set(mask.vars) <= set(f.vars)]
        return [
            self.masked(f, mask, 0) if any(set(f.vars) | set(mask.vars) <= s for s in spans) else f
            for f in factors
        ]

    def _contracted(
        self, factors: list[Value], order: tuple[str, ...], dtype: torch.dtype
    ) -> Value | None:
        if not factors:
            return None
        kept = tuple(v for v in order if any(v in f.vars for f in factors))
        if len(factors) == 1:
            return self._summed(factors[0], kept, dtype)
        if self._of_many_vectors(factors, kept):
            return self._multiplied(factors, kept, dtype)
        ordered = _in_order(factors, kept)
        if self._has_einsum(dtype) and len(_variables(factors)) <= len(ascii_letters):
            return self._einsum(ordered, kept, dtype)
        return self._in_pairs(ordered, kept, dtype)

    def _has_einsum(self, dtype: torch.dtype) -> bool:
        """Elsewhere than on the CPU there are no matrix products of integers."""
        return dtype.is_floating_point or dtype.is_complex or self.problem.device.type == "cpu"

    def _in_pairs(self, factors: list[Value], kept: tuple[str, ...], dtype: torch.dtype) -> Value:
        """One factor after the other, each time summed over what neither the result nor a later
        factor has: no product over all variables is ever formed.
        """
        result = factors[0]
        for at, factor in enumerate(factors[1:], 2):
            needed = {*kept, *_variables(factors[at:])}
            a = self._summed(result, (*needed, *factor.vars), dtype)
            b = self._summed(factor, (*needed, *a.vars), dtype)
            both = _variables([a, b])
            if len(both) > len(ascii_letters):
                raise self.problem.complain(
                    UnsupportedError,
                    f"two factors that are multiplied have {len(both)} index variables together",
                    expected=f"at most {len(ascii_letters)}",
                    remedy="multiply some of the factors in a statement of their own",
                )
            still = kept if at == len(factors) else tuple(v for v in both if v in needed)
            contracted = self._einsum if self._has_einsum(dtype) else self._multiplied
            result = contracted([a, b], still, dtype)
        return result

    def _multiplied(self, factors: list[Value], kept: tuple[str, ...], dtype: torch.dtype) -> Value:
        a, b = factors
        return self._summed(self.pointwise(torch.mul, a, b), kept, dtype)

    def _of_many_vectors(self, factors: list[Value], kept: tuple[str, ...]) -> bool:
        """Whether an einsum would be one small product of a vector after the other, which a CPU
        does far more slowly than it multiplies and sums.
        """
        if self.problem.device.type != "cpu" or len(factors) != 2:
            return False
        small, large = sorted((set(f.vars) for f in factors), key=len)
        summed = small - set(kept)
        if not (small <= large and summed and small & set(kept)):
            return False
        if small == large:
            return True
        found = self.sums[tuple(sorted(summed))] = is_short(self.problem, summed)
        return found

    def _einsum(self, factors: list[Value], kept: tuple[str, ...], dtype: torch.dtype) -> Value:
        names = _letters([v for f in factors for v in f.vars])
        equation = (
            ",".join("".join(names[v] for v in f.vars) for f in factors)
            + "->"
            + "".join(names[v] for v in kept)
        )
        return Value(
            self.call(torch.einsum, equation, *(f.node for f in factors), name="contracted"),
            kept,
            dtype,
            True,
        )

    def _summed(self, value: Value, kept: tuple[str, ...], dtype: torch.dtype) -> Value:
        dims = tuple(d for d, v in enumerate(value.vars) if v not in kept)
        if not dims:
            return value
        node = self.call(torch.sum, value.node, dims, dtype=dtype, name="summed")
        return Value(node, tuple(v for v in value.vars if v in kept), dtype, True)

    # --- max and min ---

    def _extremum(self, value: Expr, order: tuple[str, ...]) -> Value:
        dtype = self.accumulator
        result = self.as_tensor(self.evaluate(value, dtype), dtype)
        masks = self.masks(value)
        for index in self.problem.statement.target.indices:
            masks += [m for m in self.masks(index) if m not in masks]
        for mask in masks:
            result = self.masked(result, mask, self.identity)
        dims = tuple(d for d, v in enumerate(result.vars) if v not in order)
        if dims:
            function = torch.amax if self.problem.statement.operator == "max=" else torch.amin
            node = self.call(function, result.node, dims, name="reduced")
            result = Value(node, tuple(v for v in result.vars if v in order), dtype, True)
        return result

    @property
    def identity(self) -> int | float:
        """What contributions start from, in the accumulator's dtype."""
        value = identity(self.problem.statement.operator, self.problem.dtype)
        return int(value) if isinstance(value, bool) else value


def _in_order(factors: list[Value], kept: tuple[str, ...]) -> list[Value]:
    """Neighbours share variables, so that einsum's left-to-right order forms no outer product
    early; and the output needs no transposing.
    """
    place = {v: k for k, v in enumerate(kept)}
    rest = sorted(
        factors,
        key=lambda f: min(
            ([place[v]] for v in f.vars if v in place and _alone(v, f, factors)),
            default=[len(place)],
        ),
    )
    chosen = [rest.pop(0)]
    while rest:
        seen = {v for f in chosen for v in f.vars}
        best = max(range(len(rest)), key=lambda k: (len(seen & set(rest[k].vars)), -k))
        chosen.append(rest.pop(best))
    return chosen


def _variables(factors: list[Value]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v for f in factors for v in f.vars))


def _alone(var: str, factor: Value, factors: list[Value]) -> bool:
    return all(f is factor or var not in f.vars for f in factors)


def _letters(vars: list[str]) -> dict[str, str]:
    """One letter a variable: its own name where that is a letter."""
    wanted = tuple(dict.fromkeys(vars))
    names = {v: v for v in wanted if len(v) == 1 and v in ascii_letters}
    free = (c for c in ascii_letters if c not in names.values())
    return {v: names[v] if v in names else next(free) for v in wanted}
