"""The right side of a statement as values over its variables: pointwise functions, then one einsum
(or one reduction) a term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from string import ascii_letters
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from insum.errors import DtypeError, UnsupportedError
from insum.graph.contraction import Pair, cheapest, is_of_vectors
from insum.graph.gather import AccessReader
from insum.graph.matmul import stored_order
from insum.graph.nodes import GraphValue
from insum.lang.bind import Problem
from insum.lang.expand import ProductTerm
from insum.lang.expr import FUNCTIONS, Access, Call, Expr, Number, Product, Sum, product, variables
from insum.lang.types import (
    Typed,
    accumulator,
    call_type,
    deciding,
    identity,
    infer,
    is_rounded,
)

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "abs": torch.abs,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "softplus": functional.softplus,
    "reciprocal": torch.reciprocal,
    "pow": torch.pow,
    "sign": torch.sign,
    "conj": torch.conj,
    "ones": torch.ones_like,
}
_OF_TWO: dict[str, Callable[..., Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
}
#: Variables of factors, and those that are kept.
VariablesOfFactors: TypeAlias = tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]
_HALVES = (torch.float16, torch.bfloat16)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are computed: wide, and one that torch has kernels
    for.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        # torch.einsum and torch.sum turn narrow integers into int64 at places of their own choice
        return torch.int64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else accumulator(dtype)


def meeting_dtype(problem: Problem) -> torch.dtype:
    """The dtype in which contributions meet; never narrower than the values themselves."""
    types = {name: kind.type for name, kind in problem.kinds.items()}
    value = infer(problem.statement.value, types).dtype
    return torch.promote_types(computed_in(problem.dtype), computed_in(value))


#: Up to so many summed places, many small vectors are multiplied and summed rather than contracted;
#: and numbers of an innermost dimension up to which moving everything takes less time, measured.
MOST_SUMMED, SHORT_INSIDE = 64, 2


def is_short(problem: Problem, vars: Iterable[str], most: int) -> bool:
    """Whether these variables have few places together."""
    sizes = [problem.extents[v] for v in vars]
    return all(isinstance(size, int) for size in sizes) and math.prod(int(s) for s in sizes) <= most


def opposite(value: Expr) -> Expr | None:
    """What a value is the negative of, as it is written; None where it is not."""
    if isinstance(value, Product) and value.factors[0] == Number(-1):
        return product([*value.factors[1:]])
    return None


def positive_first(parts: Sequence[Expr]) -> list[int]:
    """Numbers of terms, the first two the other way round where the first would be subtracted, and
    runs over nothing that the other does not.
    """
    numbers = list(range(len(parts)))
    if len(parts) > 1 and opposite(parts[0]) is not None and opposite(parts[1]) is None:
        if {*variables(parts[0])} <= {*variables(parts[1])}:
            numbers[:2] = 1, 0
    return numbers


class Evaluator:
    """Adds the evaluation of terms to a graph."""

    def __init__(self, reader: AccessReader) -> None:
        self.reader, self.builder, self.problem = reader, reader.builder, reader.problem
        #: What sizes decided: variables and how many places are few for them, and whether each
        #: `is_short`. Where they are not, the graph is another.
        self.short: dict[tuple[tuple[str, ...], int], bool] = {}
        #: Likewise by variables of factors, and those that are kept: the order of products.
        self.orders: dict[VariablesOfFactors, tuple[Pair, ...]] = {}
        #: Parts of a term, which may stand in it several times. Not of another one: the result of
        #: the first is written to.
        self.parts: dict[tuple[Expr, torch.dtype], GraphValue] = {}

    @property
    def types(self) -> dict[str, Typed]:
        return {name: kind.type for name, kind in self.problem.kinds.items()}

    @property
    def accumulator(self) -> torch.dtype:
        return meeting_dtype(self.problem)

    def term(self, term: ProductTerm, order: tuple[str, ...]) -> GraphValue:
        """The contribution of a term, reduced to the variables of the left side; in ``order`` where
        that costs nothing.
        """
        self.parts = {}
        if self.problem.statement.operator in ("max=", "min="):
            return self._extremum(term.value, order)
        return self._product(term, order)

    # --- pointwise ---

    def evaluate(self, expr: Expr, dtype: torch.dtype) -> GraphValue:
        """The value of an expression over its own variables, computed in ``dtype``."""
        match expr:
            case Access():
                return self.builder.cast(self.reader.read(expr), dtype)
            case Number(value):
                return GraphValue(self._literal(value, dtype))
        found = self.parts.get((expr, dtype))
        if found is None:
            found = self.parts[expr, dtype] = self._composed(expr, dtype)
        return found

    def _composed(self, expr: Expr, dtype: torch.dtype) -> GraphValue:
        match expr:
            case Call(function, args):
                return self.builder.cast(self._call(function, args, dtype), dtype)
            case Product(parts):
                return self._fold(torch.mul, parts, dtype)
            case Sum(parts):
                return self._sum(parts, dtype)
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
    ) -> GraphValue:
        result = self.evaluate(parts[0], dtype)
        for part in parts[1:]:
            result = self.builder.pointwise(function, result, self.evaluate(part, dtype))
        return result

    def _sum(self, parts: tuple[Expr, ...], dtype: torch.dtype) -> GraphValue:
        if not (dtype.is_floating_point or dtype.is_complex):
            return self._fold(torch.add, parts, dtype)
        first, *rest = (parts[k] for k in positive_first(parts))
        result = self.evaluate(first, dtype)
        for part in rest:
            other = None if result.dtype is None else opposite(part)
            added = torch.add if other is None else torch.sub
            value = self.evaluate(part if other is None else other, dtype)
            result = self.builder.pointwise(added, result, value)
        return result

    def _call(self, function: str, args: tuple[Expr, ...], wanted: torch.dtype) -> GraphValue:
        dtype = computed_in(call_type(function, args, self.types, wanted))
        count = FUNCTIONS[function].values
        deciders = deciding(function, args[:count])
        values = self._arguments(deciders, dtype)
        match function:
            case "whole":
                return values[0]
            case "where":
                return self._chosen(args[0], values, dtype)
            case "maximum" | "minimum":
                return self.builder.pointwise(_OF_TWO[function], values[0], values[1])
            case "eq" | "ne" | "lt" | "le":
                return self._compared(function, args, values, dtype)
            case "step":
                positive = self.builder.call(torch.gt, values[0].node, 0, name="is_positive")
                return self._truth(positive, values[0].vars, dtype)
        result = dtype.to_real() if function == "abs" and dtype.is_complex else dtype
        numbers = [a.value for a in args[count:] if isinstance(a, Number)]
        node = self.builder.call(_FUNCTIONS[function], values[0].node, *numbers)
        return GraphValue(node, values[0].vars, result, function != "conj")

    def _arguments(self, args: tuple[Expr, ...], dtype: torch.dtype) -> list[GraphValue]:
        """Among truth values + means or: a sum of two is 1, not 2."""
        values = [self.builder.as_tensor(self.evaluate(a, dtype), dtype) for a in args]
        if any(infer(a, self.types).dtype != torch.bool for a in args):
            return values
        return [
            self._truth(self.builder.call(torch.ne, v.node, 0), v.vars, dtype)
            if isinstance(a, Product | Sum)
            else v
            for a, v in zip(args, values)
        ]

    def _truth(self, node: Any, vars: tuple[str, ...], dtype: torch.dtype) -> GraphValue:
        """1 where something holds, else 0."""
        return self.builder.cast(GraphValue(node, vars, torch.bool, True), dtype)

    def _chosen(self, condition: Expr, values: list[GraphValue], dtype: torch.dtype) -> GraphValue:
        own = computed_in(infer(condition, self.types).dtype)
        (given,) = self._arguments((condition,), own)
        holds = self.builder.call(torch.ne, given.node, 0, name="holds")
        parts = [GraphValue(holds, given.vars, torch.bool, True), *values]
        order = self.builder.together(*parts)
        node = self.builder.call(torch.where, *(self.builder.aligned(p, order) for p in parts))
        return GraphValue(node, order, dtype, True)

    def _compared(
        self,
        function: str,
        args: tuple[Expr, ...],
        values: list[GraphValue],
        dtype: torch.dtype,
    ) -> GraphValue:
        """Ordered as rounded to the wider of the two dtypes, as torch does it; equal as rounded to
        the narrower: a half-precision maximum equals the wide value it was rounded from. Of two
        kinds of halves none is the narrower.
        """
        rounded = {infer(a, self.types).dtype for a in args if is_rounded(a, self.types)}
        chosen = min if function in ("eq", "ne") else max
        narrow = chosen(rounded, key=lambda d: d.itemsize, default=dtype)
        if narrow.itemsize < dtype.itemsize and rounded != {*_HALVES}:
            values = [self.builder.cast(v, narrow) for v in values]
        values = self.builder.before_casts(values, torch.bool)  # which are short
        holds = self.builder.pointwise(_OF_TWO[function], values[0], values[1])
        return self._truth(holds.node, holds.vars, dtype)

    # --- products, summed ---

    def _product(self, term: ProductTerm, order: tuple[str, ...]) -> GraphValue:
        dtype = self._term_dtype(term)
        values = [self.evaluate(f, dtype) for f in term.factors]
        scalars = [v for v in values if not v.vars]
        tensors = [v for v in values if v.vars]
        late, early = self._masks_of(term, order)
        kept = tuple(v for v in order if v in _variables(tensors))
        seen = all({*mask.vars} <= {*_variables(tensors)} for mask in early)
        if early and seen and self._is_within(tensors, kept):
            # factors that are masked are as large as their product, which is masked once
            result: GraphValue | None = self._multiplied(tensors, kept, dtype, early)
        else:
            for mask in early:
                tensors = self._masked_factors(tensors, mask)
            result = self._contracted(tensors, kept, dtype)
        for scalar in scalars:
            result = scalar if result is None else self.builder.pointwise(torch.mul, result, scalar)
        assert result is not None
        result = self.builder.cast(self.builder.as_tensor(result, dtype), self.accumulator)
        for mask in late:
            result = self.reader.masked(result, mask, 0)
        return result

    def _term_dtype(self, term: ProductTerm) -> torch.dtype:
        """Half precision is widened on the CPU, where that is faster and more exact; elsewhere
        einsum widens inside, but rounds its result, which a wide one must not be.
        """
        dtype = infer(term.value, self.types).dtype
        narrow = dtype in _HALVES and self.problem.dtype in _HALVES
        return dtype if narrow and self.problem.device.type != "cpu" else self.accumulator

    def _masks_of(
        self, term: ProductTerm, order: tuple[str, ...]
    ) -> tuple[list[GraphValue], list[GraphValue]]:
        """Masks that may be applied to the result, because nothing they speak of is summed away,
        and those that may not.
        """
        masks = self.reader.masks(term.value)
        for index in self.problem.statement.target.indices:
            masks += [m for m in self.reader.masks(index) if m not in masks]
        late = [m for m in masks if set(m.vars) <= set(order)]
        return late, [m for m in masks if m not in late]

    def _masked_factors(self, factors: list[GraphValue], mask: GraphValue) -> list[GraphValue]:
        """Zero where absent, in every factor that sees the mask's variables or can without growing
        past one that does: 0 * inf is nan.
        """
        spans = [set(f.vars) for f in factors if set(mask.vars) <= set(f.vars)]
        return [
            self.reader.masked(f, mask, 0)
            if any(set(f.vars) | set(mask.vars) <= s for s in spans)
            else f
            for f in factors
        ]

    def _contracted(
        self, factors: list[GraphValue], kept: tuple[str, ...], dtype: torch.dtype
    ) -> GraphValue | None:
        if not factors:
            return None
        if len(factors) == 1:
            return self._summed(factors[0], kept, dtype)
        if self._of_many_vectors(factors, kept) or self._is_pointwise(factors, kept):
            return self._multiplied(factors, kept, dtype)
        if len(factors) > 2 and self._sizes_decide(dtype):
            return self._in_best_order(factors, kept, dtype)
        ordered = _in_order(factors, kept)
        if self._has_einsum(dtype) and len(_variables(factors)) <= len(ascii_letters):
            return self._einsum(ordered, kept, dtype)
        return self._in_pairs(ordered, kept, dtype)

    def _sizes_decide(self, dtype: torch.dtype) -> bool:
        """Whether sizes are known, and matrix products are all there is to choose from."""
        return (
            self.problem.device.type == "cpu"
            and dtype.is_floating_point
            and all(isinstance(size, int) for size in self.problem.extents.values())
        )

    def _in_best_order(
        self, factors: list[GraphValue], kept: tuple[str, ...], dtype: torch.dtype
    ) -> GraphValue:
        """Two factors at a time, the cheapest first. What is summed later stands last, so that it
        need not be moved there; but before the last variable where no matrix product sums it.
        """
        names = tuple(f.vars for f in factors)
        pairs = self.orders[names, kept] = best_order(self.problem, names, kept)
        left = list(factors)
        for at, (a, b) in enumerate(pairs):
            second, first = left.pop(b), left.pop(a)
            both = _variables([first, second])
            later = {*kept, *_variables(left)}
            still = [v for v in kept if v in both]
            still += _summed_last(both, kept, left, pairs[at + 1 :])
            result = tuple(v for v in still if v in later)
            if len(both) > len(ascii_letters):
                return self._in_pairs([first, second, *left], kept, dtype)
            if len(left) == 1 and self._of_many_vectors(
                [left[0], replace(first, vars=result)], kept
            ):
                # as what is multiplied lies in memory; torch sums along what is not innermost
                inner = [v for v in kept if v in result][-1:]
                lying = sorted([first, second], key=lambda f: -len(f.vars))
                outer = [v for v in _variables(lying) if v in result and v not in inner]
                result = (*outer, *inner)
            if len(left) == 1 and {*left[0].vars} == {*result}:
                result = left[0].vars  # number by number, as both lie
            two = [first, second]
            is_sum = self._of_many_vectors(two, result) or self._is_pointwise(two, result)
            left.append((self._multiplied if is_sum else self._einsum)(two, result, dtype))
        return left[0]

    def _has_einsum(self, dtype: torch.dtype) -> bool:
        """Elsewhere than on the CPU there are no matrix products of integers."""
        return dtype.is_floating_point or dtype.is_complex or self.problem.device.type == "cpu"

    def _in_pairs(
        self, factors: list[GraphValue], kept: tuple[str, ...], dtype: torch.dtype
    ) -> GraphValue:
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

    def _multiplied(
        self,
        factors: list[GraphValue],
        kept: tuple[str, ...],
        dtype: torch.dtype,
        masks: Sequence[GraphValue] = (),
    ) -> GraphValue:
        # the one with more variables first: its order is that of a product that is summed
        a, b = sorted(factors, key=lambda f: -len(f.vars))
        product = self.builder.pointwise(torch.mul, a, b, wanted=kept)
        for mask in masks:
            product = self.reader.masked(product, mask, 0)
        return self._summed(product, kept, dtype)

    def _of_many_vectors(self, factors: list[GraphValue], kept: tuple[str, ...]) -> bool:
        """Whether an einsum would be one small product of a vector after the other, which a CPU
        does far more slowly than it multiplies and sums.
        """
        if not self._is_within(factors, kept):
            return False
        small, large = sorted((set(f.vars) for f in factors), key=len)
        if small == large or self._is_inside(factors, kept):
            return True
        return self._is_short(small - set(kept), MOST_SUMMED)

    def _is_short(self, vars: Iterable[str], most: int) -> bool:
        asked = tuple(sorted(vars)), most
        found = self.short[asked] = is_short(self.problem, *asked)
        return found

    def _is_inside(self, factors: list[GraphValue], kept: tuple[str, ...]) -> bool:
        """Whether a product of matrices for each number of an innermost dimension would have to
        move everything first.
        """
        inner = {f.vars[-1] for f in factors}
        return len(inner) == 1 and inner <= {*kept} and not self._is_short(inner, SHORT_INSIDE)

    def _is_within(self, factors: list[GraphValue], kept: tuple[str, ...]) -> bool:
        """Whether a CPU sums a product of two factors over variables of both, of which one has no
        other variables than these and some that are kept.
        """
        if self.problem.device.type != "cpu" or len(factors) != 2:
            return False
        return is_of_vectors(factors[0].vars, factors[1].vars, kept)

    def _is_pointwise(self, factors: list[GraphValue], kept: tuple[str, ...]) -> bool:
        """Whether a CPU has nothing to sum, nor to make larger, which einsum takes a while to find
        out; or only along what is not innermost, which it does one number at a time.
        """
        if self.problem.device.type != "cpu" or len(factors) != 2:
            return False
        if not kept or set(_variables(factors)) != {*kept}:
            return False
        is_whole = any(set(f.vars) == set(kept) for f in factors)
        return is_whole or all(kept[-1] in f.vars[-1:] for f in factors)

    def _einsum(
        self, factors: list[GraphValue], kept: tuple[str, ...], dtype: torch.dtype
    ) -> GraphValue:
        names = _letters_in_order([f.vars for f in factors], kept)
        equation = (
            ",".join("".join(names[v] for v in f.vars) for f in factors)
            + "->"
            + "".join(names[v] for v in kept)
        )
        return GraphValue(
            self.builder.call(
                torch.einsum, equation, *(f.node for f in factors), name="contracted"
            ),
            kept,
            dtype,
            True,
        )

    def _summed(self, value: GraphValue, kept: tuple[str, ...], dtype: torch.dtype) -> GraphValue:
        dims = tuple(d for d, v in enumerate(value.vars) if v not in kept)
        if not dims:
            return value
        node = self.builder.call(torch.sum, value.node, dims, dtype=dtype, name="summed")
        return GraphValue(node, tuple(v for v in value.vars if v in kept), dtype, True)

    # --- max and min ---

    def _extremum(self, value: Expr, order: tuple[str, ...]) -> GraphValue:
        dtype = self.accumulator
        result = self.builder.as_tensor(self.evaluate(value, dtype), dtype)
        masks = self.reader.masks(value)
        for index in self.problem.statement.target.indices:
            masks += [m for m in self.reader.masks(index) if m not in masks]
        for mask in masks:
            result = self.reader.masked(result, mask, self.identity)
        dims = tuple(d for d, v in enumerate(result.vars) if v not in order)
        if dims:
            function = torch.amax if self.problem.statement.operator == "max=" else torch.amin
            node = self.builder.call(function, result.node, dims, name="reduced")
            result = GraphValue(node, tuple(v for v in result.vars if v in order), dtype, True)
        return result

    @property
    def identity(self) -> int | float:
        """What contributions start from, in the accumulator's dtype."""
        value = identity(self.problem.statement.operator, self.problem.dtype)
        return int(value) if isinstance(value, bool) else value


def best_order(
    problem: Problem, factors: tuple[tuple[str, ...], ...], kept: tuple[str, ...]
) -> tuple[Pair, ...]:
    """The order in which factors with these variables are multiplied; nothing where sizes are not
    known.
    """
    if not all(isinstance(size, int) for size in problem.extents.values()):
        return ()
    return cheapest(factors, kept, problem.extents).pairs


def _summed_last(
    vars: tuple[str, ...], kept: tuple[str, ...], left: list[GraphValue], pairs: tuple[Pair, ...]
) -> list[str]:
    """The variables that are summed later: those of the next product last, in its order."""
    sets = [list(f.vars) for f in left] + [list(vars)]
    found: list[str] = []
    for a, b in pairs:
        second, first = sets.pop(b), sets.pop(a)
        needed = {*kept, *(v for s in sets for v in s)}
        other = second if set(first) >= set(second) or first == list(vars) else first
        done = [v for v in (*other, *first, *second) if v in vars and v not in needed]
        found = [v for v in dict.fromkeys(done) if v not in found] + found
        sets.append([v for v in dict.fromkeys((*first, *second)) if v in needed])
    return [v for v in dict.fromkeys((*found, *vars)) if v not in kept]


def _in_order(factors: list[GraphValue], kept: tuple[str, ...]) -> list[GraphValue]:
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


def _variables(factors: list[GraphValue]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v for f in factors for v in f.vars))


def _alone(var: str, factor: GraphValue, factors: list[GraphValue]) -> bool:
    return all(f is factor or var not in f.vars for f in factors)


def _letters_in_order(factors: Sequence[Sequence[str]], kept: Sequence[str]) -> dict[str, str]:
    """The same, so that the letters of what is summed rise in the order in which factors hold it:
    `torch.einsum` flattens it in the order of letters, and copies what lies in another.

    >>> _letters_in_order([("b", "o", "i"), ("o", "i", "j")], ("b", "j"))
    {'b': 'b', 'o': 'i', 'i': 'o', 'j': 'j'}
    """
    names = _letters([v for vars_ in factors for v in vars_])
    order = stored_order(factors, {*names}.difference(kept))
    return names | dict(zip(order, sorted(names[v] for v in order), strict=True))


def _letters(vars: list[str]) -> dict[str, str]:
    """One letter a variable: its own name where that is a letter."""
    wanted = tuple(dict.fromkeys(vars))
    names = {v: v for v in wanted if len(v) == 1 and v in ascii_letters}
    free = (c for c in ascii_letters if c not in names.values())
    return {v: names[v] if v in names else next(free) for v in wanted}
