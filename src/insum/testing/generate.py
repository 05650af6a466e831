"""Draws one case from a source of random choices, simple choices first so that hypothesis shrinks
towards them.

The statement is built from the outside in; every index expression knows which values it can take,
and tensors are given the sizes that their first access needs, or indices that fit where a tensor is
used again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from insum.lang.bind import Value
from insum.lang.expr import (
    FUNCTIONS,
    Access,
    Affine,
    Atom,
    Call,
    Expr,
    Number,
    Statement,
    Var,
    accesses,
    affine,
    index_of,
    product,
    total,
    variables,
)
from insum.lang.types import Typed, infer
from insum.testing.cases import Case, Options
from insum.testing.fill import UnfilledTensor, fill

T = TypeVar("T")

_VARIABLES = ("i", "j", "k", "n", "bm", "bk", "r", "q")
_TARGET = "C"
_VALUE_NAMES = ("A", "B", "W", "X", "Y", "Z")
_INDEX_NAMES = ("D", "E", "AK", "AM", "idx")
_POSITIVE = ("log", "sqrt", "reciprocal", "log1p", "pow")
_KINKED = ("abs", "relu", "sign", "step", "eq", "leaky_relu", "elu")
_OF_TWO = ("eq", "ne", "lt", "le", "maximum", "minimum")
_ON_COMPLEX = ("abs", "exp", "sqrt", "log", "reciprocal", "conj", "whole", "ones")


def generate(source: random.Random, options: Options) -> Case:
    """One case; the same one for the same choices of ``source``."""
    return _StatementDraft(source, options).case()


@dataclass
class _Choices:
    """Small decisions, so that everything drawn goes through whole numbers that shrink to 0: the
    first, the plain, the no.
    """

    source: random.Random

    def upto(self, high: int, low: int = 0) -> int:
        return self.source.randint(low, max(low, high))

    def of(self, items: Sequence[T]) -> T:
        return items[self.source.randrange(len(items))]

    def weighted(self, **weights: int) -> str:
        return self.of([name for name, weight in weights.items() for _ in range(weight)])

    def chance(self, percent: int) -> bool:
        return self.source.randrange(100) >= 100 - percent


class _StatementDraft:
    def __init__(self, source: random.Random, options: Options) -> None:
        self.options, self.choose = options, _Choices(source)
        self.arrays: dict[str, UnfilledTensor] = {}
        self.operator = self.choose.of(
            options.operators
            if not options.product_only
            else [o for o in options.operators if o in ("=", "+=")]
        )
        self.dtypes = self.draw_dtypes()
        self.functions = self.allowed_functions()
        self.extents = self.draw_extents()
        self.passed = self.passes_target()

    def case(self) -> Case:
        target = self.draw_target()
        statement = Statement(target, self.operator, self.draw_value())
        self.settle_target(statement)
        sizes = self.draw_sizes(statement, self.passed)
        if not self.passed:
            del self.arrays[_TARGET]
        values = self.values(statement)
        padded = tuple(name for name, array in self.arrays.items() if array.padded)
        return Case(str(statement), values, sizes, padded)

    def values(self, statement: Statement) -> dict[str, Value]:
        read = {
            a.tensor
            for a in (statement.target, *accesses(statement.target), *accesses(statement.value))
        }
        seed = self.choose.source.getrandbits(32)
        self.arrays = {name: array for name, array in self.arrays.items() if name in read}
        return {
            name: fill(array, seed + k, self.options)
            for k, (name, array) in enumerate(self.arrays.items())
        }

    # --- what the statement is made of ---

    def draw_dtypes(self) -> tuple[torch.dtype, ...]:
        options = [
            d
            for d in self.options.dtypes
            if not (d.is_complex and self.operator in ("max=", "min="))
        ]
        chosen = self.choose.of(options or [torch.float64])
        if not (self.options.mixed and self.choose.chance(20)):
            return (chosen,)
        # there is no complex number of half precision to promote to
        half = (torch.float16, torch.bfloat16)
        return tuple(d for d in options if not (d in half and any(o.is_complex for o in options)))

    def allowed_functions(self) -> tuple[str, ...]:
        allowed = self.options.functions if not self.options.product_only else ()
        if any(d.is_complex for d in self.dtypes):
            allowed = tuple(f for f in allowed if f in _ON_COMPLEX)
        return (
            tuple(f for f in allowed if f != "conj")
            if not any(d.is_complex for d in self.dtypes) and self.choose.chance(90)
            else allowed
        )

    def draw_extents(self) -> dict[str, int]:
        options = self.options
        names = _VARIABLES[: self.choose.upto(min(options.max_variables, len(_VARIABLES)), 1)]
        extents = {name: self.choose.upto(options.max_extent, 1) for name in names}
        while (points := _points(extents)) > options.max_points:
            largest = max(extents, key=lambda name: extents[name])
            extents[largest] = max(1, extents[largest] * options.max_points // points)
        if options.zero_extents and self.choose.chance(8):
            extents[self.choose.of(names)] = 0
        return extents

    def draw_value(self) -> Expr:
        options = self.options
        if options.product_only:
            factors: list[Expr] = [
                self.access() for _ in range(self.choose.upto(options.max_factors, 1))
            ]
            return product([*factors, self.number()] if self.choose.chance(15) else factors)
        terms = [
            self.term(sign=k > 0)
            for k in range(self.choose.upto(options.max_terms, 1) if self.choose.chance(40) else 1)
        ]
        return total(terms)

    def term(self, *, sign: bool) -> Expr:
        factors = [
            self.factor()
            for _ in range(
                self.choose.upto(
                    min(2, self.options.max_factors) if self.narrow else self.options.max_factors, 1
                )
            )
        ]
        negative = (
            torch.bool not in self.dtypes
            and not self.narrow
            and self.choose.chance(40 if sign else 10)
        )
        return product([Number(-1), *factors] if negative else factors)

    @property
    def narrow(self) -> bool:
        """Whether a value could leave the range of its dtype before it is compared, which depends
        on where it is wrapped.
        """
        return self.operator in ("max=", "min=") and bool(
            {torch.uint8, torch.int8} & set(self.dtypes)
        )

    def factor(self) -> Expr:
        kind = self.choose.weighted(
            access=80,
            call=12 if self.functions else 0,
            number=4 if torch.bool not in self.dtypes else 0,
            sum=4,
        )
        match kind:
            case "number":
                return self.number()
            case "call":
                return self.call(self.choose.of(self.functions), depth=0)
            case "sum":
                return total([self.access(), self.access()])
            case _:
                return self.access()

    def number(self) -> Number:
        if any(d.is_floating_point or d.is_complex for d in self.dtypes):
            return Number(self.choose.of((2, 0.5, 3, 1.25, 1, 0.25)))
        return Number(self.choose.of((2, 3, 1, 0)))

    def call(self, function: str, depth: int) -> Expr:
        if function in _OF_TWO:
            return Call(function, (self.access(), self.access()))
        if function == "where":
            condition = Call("lt", (self.access(), self.access()))
            return Call("where", (condition, self.access(), self.access()))
        numbers = tuple(
            Number(self.choose.of((0.5, 2, 3) if default is None else (default, 0.25)))
            for default in FUNCTIONS[function].numbers
        )
        if function in _POSITIVE:
            return Call(function, (self.positive(), *numbers))
        return Call(function, (self.argument(function, depth), *numbers))

    def positive(self) -> Expr:
        match self.choose.weighted(access=6, product=2, sum=2):
            case "product":
                return product([self.access(positive=True), self.access(positive=True)])
            case "sum":
                return total([self.access(positive=True), Number(0.5)])
            case _:
                return self.access(positive=True)

    def argument(self, function: str, depth: int) -> Expr:
        """Bounded arguments, so that half precision does not overflow; no differences where a kink
        could lie at an exact zero.
        """
        bounded = tuple(f for f in ("tanh", "sigmoid", "relu", "abs") if f in self.functions)
        smooth = (
            not (self.options.differentiable and function in _KINKED)
            and torch.uint8 not in self.dtypes
        )
        match self.choose.weighted(
            access=5, product=2, sum=2 if smooth else 0, call=2 if bounded and depth < 1 else 0
        ):
            case "product":
                return product([Number(0.5), self.access(), self.access()])
            case "sum":
                return total([self.access(), product([Number(-1), self.access()])])
            case "call":
                return self.call(self.choose.of(bounded), depth + 1)
            case _:
                return self.access()

    # --- accesses ---

    def access(self, *, positive: bool = False) -> Access:
        """A value read: often of a new tensor, at times of one that is there already."""
        known = [
            name
            for name, array in self.arrays.items()
            if array.bound is None and array.positive == positive and array.readable
        ]
        if known and self.choose.chance(25):
            name = self.choose.of(known)
            again = self.fitting(name, depth=0)
            if again is not None:
                return again
        rank = self.choose.of([2, 1, 2, 3, 1, 2, 3, 4, 0, 5])
        indices = self.indices(min(rank, self.options.max_rank), depth=0)
        name = self.name(_VALUE_NAMES)
        number = not indices and self.options.scalars and self.choose.chance(40)
        self.arrays[name] = UnfilledTensor(
            self.shape(indices),
            self.choose.of(self.dtypes),
            positive=positive,
            layout=self.layout(),
            number=number,
        )
        return Access(name, indices)

    def indices(self, rank: int, depth: int) -> tuple[Affine, ...]:
        found: list[Affine] = []
        elements = 1
        for _ in range(rank):
            index = self.index(depth)
            elements *= max(1, self.size(index))
            if elements > self.options.max_elements:
                break
            found.append(index)
        return tuple(found)

    def fitting(self, name: str, depth: int) -> Access | None:
        """Read a tensor again, at indices that fit the sizes it has."""
        found = [self.index_within(size, depth) for size in self.arrays[name].shape]
        return Access(name, tuple(i for i in found if i is not None)) if None not in found else None

    def index_within(self, size: int, depth: int) -> Affine | None:
        candidates = [index_of(v) for v, extent in self.extents.items() if extent == size] * 3
        if size > 0:
            candidates += [Affine((), self.choose.upto(size - 1))]
            shared = [
                Access(n, a.first)
                for n, a in self.arrays.items()
                if a.bound is not None and a.bound <= size and a.depth + depth < 2
            ]
            candidates += [Affine(((1, access),)) for access in shared]
        return self.choose.of(candidates) if candidates else None

    def index(self, depth: int, indirect: int = 18) -> Affine:
        options = self.options
        deep = depth < options.max_indirection and options.indirect
        weights = {
            "variable": 62,
            "indirect": indirect * deep,
            "affine": 9 * options.affine,
            "literal": 5,
            "both": 3 * (deep and options.affine),
        }
        match self.choose.weighted(**weights):
            case "indirect":
                return Affine(((1, self.indirect(depth)),))
            case "affine":
                return self.shifted([self.part() for _ in range(self.choose.upto(2, 1))])
            case "both":
                return self.shifted([(self.choose.of((1, 2)), self.indirect(depth)), self.part()])
            case "literal":
                return Affine((), self.choose.upto(2))
            case _:
                return index_of(self.variable())

    def part(self) -> tuple[int, Atom]:
        return self.choose.of((1, 2, 1, -1, -2)), Var(self.variable())

    def shifted(self, parts: list[tuple[int, Atom]]) -> Affine:
        """An affine index that never falls below 0."""
        index = affine(parts, self.choose.upto(2))
        low, _ = self.reach(index)
        return Affine(index.terms, index.offset - min(0, low))

    def indirect(self, depth: int) -> Access:
        """A read of an index tensor: shared with another place now and then."""
        known = [
            name
            for name, array in self.arrays.items()
            if array.bound is not None and array.depth + depth < self.options.max_indirection
        ]
        if known and self.choose.chance(35):
            name = self.choose.of(known)
            again = (
                self.fitting(name, depth + 1)
                if self.choose.chance(50)
                else Access(name, self.arrays[name].first)
            )
            if again is not None:
                return again
        indices = self.indices(
            min(self.choose.of([1, 1, 2, 1, 0, 3, 2]), self.options.max_rank), depth + 1
        )
        inner = max(
            (self.arrays[a.tensor].depth + 1 for i in indices for a in accesses(i)), default=0
        )
        padded = self.options.padded and self.choose.chance(25)
        dtypes = [d for d in self.options.index_dtypes if d.is_signed or not padded] or [
            torch.int64
        ]
        name = self.name(_INDEX_NAMES)
        number = not indices and not padded and self.options.scalars and self.choose.chance(30)
        bound, layout = self.choose.upto(4, 1), self.layout()
        shape, dtype = self.shape(indices), self.choose.of(dtypes)
        self.arrays[name] = UnfilledTensor(
            shape,
            dtype,
            bound=bound,
            padded=padded,
            layout=layout,
            number=number,
            first=indices,
            depth=inner,
        )
        return Access(name, indices)

    def variable(self) -> str:
        return self.choose.of(tuple(self.extents))

    def name(self, wanted: Sequence[str]) -> str:
        free = [name for name in wanted if name not in self.arrays]
        return free[0] if free else f"{wanted[0]}{len(self.arrays)}"

    def layout(self) -> str:
        if not self.options.strided or self.choose.chance(60):
            return "contiguous"
        # A numerical derivative moves one element at a time, so that expanded memory would be
        # perturbed in several places.
        return self.choose.of(
            (
                "permuted",
                "stepped",
                "offset",
                "conjugated",
                "permuted" if self.options.differentiable else "expanded",
            )
        )

    # --- sizes ---

    def reach(self, index: Affine) -> tuple[int, int]:
        """The least and the greatest value the index can take (0 for what ranges over nothing)."""
        ends = [
            c
            * max(
                0,
                self.extents[a.name] - 1
                if isinstance(a, Var)
                else (self.arrays[a.tensor].bound or 1) - 1,
            )
            for c, a in index.terms
        ]
        return index.offset + sum(min(0, e) for e in ends), index.offset + sum(
            max(0, e) for e in ends
        )

    def size(self, index: Affine) -> int:
        return self.extents[index.var] if index.var is not None else self.reach(index)[1] + 1

    def shape(self, indices: Sequence[Affine]) -> tuple[int, ...]:
        return tuple(self.size(i) + (i.var is None and self.choose.chance(25)) for i in indices)

    # --- the target ---

    def draw_target(self) -> Access:
        rank = min(self.choose.of([1, 2, 0, 2, 1, 3, 2, 3, 4, 5]), self.options.max_rank)
        indices = self.target_indices(rank)
        self.arrays[_TARGET] = UnfilledTensor(
            self.shape(indices),
            self.dtypes[0],
            layout=self.layout(),
            readable=self.passed and self.choose.chance(15),
        )
        # Autograd refuses to forget the old value of what it still needs, as it does for x.add_(x *
        # y).
        self.arrays[_TARGET].readable &= not (self.options.differentiable and self.operator != "=")
        return Access(_TARGET, indices)

    def target_indices(self, rank: int) -> tuple[Affine, ...]:
        unused = list(self.extents)
        found: list[Affine] = []
        for _ in range(rank):
            if unused and self.choose.chance(65):
                index = index_of(unused.pop(self.choose.upto(len(unused) - 1)))
            else:
                index = self.index(0, indirect=80)
            found.append(index)
            if (
                _points({str(k): self.size(i) for k, i in enumerate(found)})
                > self.options.max_elements
            ):
                return tuple(found[:-1])
        return tuple(found)

    def passes_target(self) -> bool:
        if self.options.differentiable and self.operator in ("max=", "min="):
            return True  # a cell that nothing reaches would be infinite
        return self.choose.chance(20 if self.operator == "=" else 55)

    def settle_target(self, statement: Statement) -> None:
        """The target's dtype: one that holds the right side. Its memory: writable."""
        array = self.arrays[_TARGET]
        types = {
            name: Typed(a.dtype, 0 if a.number else 1 if not a.shape else 2)
            for name, a in self.arrays.items()
        }
        inferred = infer(statement.value, types).dtype
        wider = [
            d
            for d in self.options.dtypes
            if torch.can_cast(inferred, d)
            and not (d.is_complex and self.operator in ("max=", "min="))
        ]
        other = wider and self.options.mixed and not array.readable and self.choose.chance(15)
        array.dtype = self.choose.of(wider) if other else inferred
        if self.options.differentiable:
            array.dtype = torch.promote_types(array.dtype, self.dtypes[0])
        if array.layout in ("expanded", "conjugated"):
            array.layout = "permuted"

    def draw_sizes(
        self, statement: Statement, passed: bool
    ) -> dict[str | int, int | tuple[int, ...]]:
        reads = [
            *accesses(statement.value),
            *(a for i in statement.target.indices for a in accesses(i)),
        ]
        alone = {i.var for access in reads for i in access.indices}
        sizes: dict[str | int, int | tuple[int, ...]] = {}
        shape, target = self.arrays[_TARGET].shape, statement.target
        open_ = [d for d, i in enumerate(target.indices) if i.var is None]
        if not passed and open_:
            if self.choose.chance(50):
                sizes[_TARGET] = shape
            else:
                sizes.update({self.size_key(target, d): shape[d] for d in open_})
        if passed or _TARGET in sizes:
            alone |= {i.var for i in target.indices}
        used = {v for access in (target, *reads) for v in variables(access)}
        return sizes | {v: e for v, e in self.extents.items() if v in used and v not in alone}

    def size_key(self, target: Access, dim: int) -> str | int:
        """By number, or as the index is written where that is no other dimension's nor a number."""
        text = str(target.indices[dim])
        same = sum(str(i) == text for i in target.indices)
        return text if same == 1 and target.indices[dim].terms and self.choose.chance(50) else dim


def _points(extents: dict[str, int]) -> int:
    points = 1
    for extent in extents.values():
        points *= max(1, extent)
    return points
