"""Plan: how one product becomes one kernel. Frozen and printable; the code generator reads nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from insum.lang.expr import Access, Affine, Expr, accesses, product
from insum.plan.recipes import SizeExpr
from insum.plan.roles import Contraction
from insum.plan.sizes import BASE, Strides


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of the output own consecutive runs of ``var``; ``tiled`` when one program takes several
    rows (the M axis).
    """

    row: str
    var: str
    tiled: bool


#: What is written at one point of a pattern, and what is multiplied.
PatternPoint: TypeAlias = tuple[Access, tuple[Expr, ...]]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A product whose index tensors became constants: what is written and what is multiplied, point
    by point; ``products``: how many were put together, one after the other.
    """

    variables: tuple[str, ...]
    points: tuple[PatternPoint, ...]
    products: int = 1

    def number(self, at: int) -> int:
        """Of one of its points, the number among those of its own product."""
        return at % (len(self.points) // self.products)


@dataclass(frozen=True, slots=True)
class Beside:
    """One more result of the same points: a place for every entry that is walked, of each column
    or of all.
    """

    tensor: str
    pattern: Pattern


@dataclass(frozen=True, slots=True)
class Bound:
    """A point exists where an index is a value of the variable in whose place it stands."""

    index: Affine
    var: str

    def __str__(self) -> str:
        return f"0 <= {self.index} < {self.var}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides the text of a kernel, but for the tile sizes."""

    statement: str  # as the user wrote it, for the header
    target: Access
    factors: tuple[Expr, ...]
    reduce: str  # "sum", "max" or "min"
    roles: Contraction
    strategy: str  # "segment", "store", "atomic", "onehot", "unrolled"
    base: str  # what is added to: the output itself, `sizes.BASE`, or nothing
    kinds: tuple[tuple[str, str], ...]  # triton dtype name of every tensor, e.g. ("A", "float16")
    strides: tuple[tuple[str, Strides], ...]  # of every tensor that is read, and of the output
    padded: frozenset[str]
    accumulator: str  # "float32", "float64", "int64", "int32"
    operand: str = ""  # dtype of the operands of tl.dot
    precision: str = ""  # input_precision of tl.dot for float32 operands
    segment: Segment | None = None
    home: Access | None = None  # an index that has one value in all entries of a row
    onehot: int = -1  # the target's dimension that is kept whole in registers
    pattern: Pattern | None = None
    wide: bool = False  # 64-bit offsets
    split: bool = False  # pieces of long rows go to a workspace
    why: tuple[str, ...] = field(default=(), compare=False)
    numbers: tuple[str, ...] = ()  # scalars passed as Python numbers
    views: tuple[
        tuple[str, tuple[int, int]], ...
    ] = ()  # dimensions that are walked as one: first, count
    made: tuple[tuple[str, SizeExpr], ...] = ()  # extents of variables that the plan has made
    guarded: frozenset[tuple[str, int]] = frozenset()  # dimensions indexed by unchecked values
    leaves: bool = False  # nothing is done where the call's indices were found out of range
    wraps: frozenset[str] = frozenset()  # index tensors in which negative values count from the end
    idle: Access | None = None  # a program has nothing to do where the first of these is negative
    bounds: tuple[Bound, ...] = ()  # where there are points
    beside: tuple[Beside, ...] = ()  # what is written while entries are walked

    @property
    def accumulate(self) -> bool:
        """Whether there are values to start from."""
        return bool(self.base)

    @property
    def value(self) -> Expr:
        return product(list(self.factors))

    @property
    def index_tensors(self) -> frozenset[str]:
        """The tensors that stand in an index."""
        outer = [a for e in (self.target, *self.factors) for a in accesses(e, nested=False)]
        return frozenset(a.tensor for one in outer for i in one.indices for a in accesses(i))

    @property
    def pointwise(self) -> bool:
        """Whether absent points must be masked after the value is computed, because zero factors do
        not make it zero.
        """
        return self.reduce != "sum" or any(
            not isinstance(f, Access) and type(f).__name__ != "Number" for f in self.factors
        )

    def describe(self, extents: Mapping[str, object]) -> str:
        """The plan in a few lines: roles, strategy and why."""
        r = self.roles

        def names(axis: tuple[str, ...]) -> str:
            return (
                "(" + ", ".join(f"{v}:{extents.get(v, '?')}" for v in axis) + ")" if axis else "-"
            )

        precision = (
            f" in {self.operand}{', ' + self.precision if self.precision else ''}" if r.dot else ""
        )
        lines = [
            f"strategy     {self.strategy}" + (f": {'; '.join(self.why)}" if self.why else ""),
            f"computes     {self.target} {'+=' if self.reduce == 'sum' else self.reduce + '='} "
            f"{self.value}",
            f"contraction  {'tl.dot' if r.dot else 'multiply and ' + self.reduce}{precision}",
            f"axes         M {names(r.m)}  N {names(r.n)}  K {names(r.k)}",
            f"grid         {names(r.grid)}   loops {names((*r.outer, *r.loops))}",
            f"accumulator  {self.accumulator}   offsets {'64' if self.wide else '32'} bits",
        ]
        if self.base == BASE:
            lines.insert(2, "base         added where a result is stored")
        if self.bounds:
            lines.insert(2, f"where        {' and '.join(map(str, self.bounds))}")
        if self.pattern:
            lines.insert(
                1,
                f"pattern      {len(self.pattern.points)} points of "
                f"({', '.join(self.pattern.variables)}) as straight-line code",
            )
        for one in self.beside:
            target, factors = one.pattern.points[0]
            lines.insert(2, f"beside       {target} += {product(list(factors))}, ...")
        if self.segment:
            several = ", several rows per tile" if self.segment.tiled else ""
            lines.insert(
                1,
                f"segments     {self.segment.var} from start[{self.segment.row}] to "
                f"end[{self.segment.row}]{several}",
            )
        return "\n".join(lines)
