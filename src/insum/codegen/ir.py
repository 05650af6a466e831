"""What kernels are made of before they are text: operations on tiles, and statements.

Every tile knows the axes that it spans, and its stage, the innermost loop that it depends on. Tiles
of different axes are broadcast where they meet, and not before (lazy broadcasting): `operation` and
`apply` see to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from insum.lang.expr import Expr, variables

#: The one order of axes in every tile: operands of ``tl.dot`` are born (M,K) and (K,N), a register
#: tile (I,N) or (M,I), and nothing is ever transposed.
ORDER = ("M", "K", "I", "N")
TileAxes: TypeAlias = tuple[str, ...]


class Eager(tuple[str, ...]):
    """Axes of a value that was given an axis for each of (M, N, K) up front, as compilers without
    lazy broadcasting do (ablation).
    """

    __slots__ = ()
    ORDER = ("M", "N", "K")


def union(*groups: TileAxes) -> TileAxes:
    present = set[str]().union(*groups)
    if not present:
        return ()
    found = tuple([a for a in ORDER if a in present])
    return Eager(found) if any(isinstance(group, Eager) for group in groups) else found


# --- tiles ----------------------------------------------------------------------------------------


class Tile:
    """A scalar, or a block of values over ``axes``. Operators make further ones."""

    __slots__ = ()
    axes: TileAxes
    stage: int

    def over(self, axes: TileAxes) -> Tile:
        """With a new axis wherever ``axes`` has one that this does not span."""
        if not self.axes or self.axes == axes or isinstance(self.axes, Eager):
            return self
        assert set(self.axes) < set(axes), (self, axes)
        return Spread(self, axes, self.stage)

    def to(self, dtype: str) -> Tile:
        return Cast(self, dtype, False, self.axes, self.stage)

    def grouped(self) -> Tile:
        """The same, and nothing else is added or multiplied in between (`chain`)."""
        return replace(self, closed=True) if isinstance(self, Operation) else self

    def equals(self, other: TileLike) -> Tile:
        return operation("==", self, other)

    def differs(self, other: TileLike) -> Tile:
        return operation("!=", self, other)

    def __add__(self, other: TileLike) -> Tile:
        return operation("+", self, other)

    def __sub__(self, other: TileLike) -> Tile:
        return operation("-", self, other)

    def __mul__(self, other: TileLike) -> Tile:
        return operation("*", self, other)

    def __floordiv__(self, other: TileLike) -> Tile:
        return operation("//", self, other)

    def __mod__(self, other: TileLike) -> Tile:
        return operation("%", self, other)

    def __and__(self, other: TileLike) -> Tile:
        return operation("&", self, other)

    def __or__(self, other: TileLike) -> Tile:
        return operation("|", self, other)

    def __lt__(self, other: TileLike) -> Tile:
        return operation("<", self, other)

    def __le__(self, other: TileLike) -> Tile:
        return operation("<=", self, other)

    def __gt__(self, other: TileLike) -> Tile:
        return operation(">", self, other)

    def __ge__(self, other: TileLike) -> Tile:
        return operation(">=", self, other)


#: Numbers, and what stands in the code as it is (shapes, dtypes), count as tiles.
TileLike: TypeAlias = Tile | int | str


@dataclass(frozen=True, slots=True)
class Named(Tile):
    """A variable of the kernel, or an argument."""

    name: str
    axes: TileAxes = ()
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Literal(Tile):
    """A number of the code, or a shape, a dtype, a function that is passed."""

    text: str
    axes: TileAxes = ()
    stage: int = 0


@dataclass(frozen=True, slots=True)
class Operation(Tile):
    """``a + b + ...``, ``a < b``: element by element; ``closed``: see `chain`."""

    symbol: str
    args: tuple[Tile, ...]
    axes: TileAxes
    stage: int
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Applied(Tile):
    """What a function of Triton's, or a helper of ours, makes of tiles."""

    function: str
    args: tuple[Tile, ...]
    keywords: tuple[tuple[str, Tile], ...]
    axes: TileAxes
    stage: int


@dataclass(frozen=True, slots=True)
class Cast(Tile):
    """The same values in another dtype, or the same bits."""

    value: Tile
    dtype: str
    bitcast: bool
    axes: TileAxes
    stage: int


@dataclass(frozen=True, slots=True)
class Spread(Tile):
    """The same values over further axes."""

    value: Tile
    axes: TileAxes
    stage: int


@dataclass(frozen=True, slots=True)
class Reading(Tile):
    """What lies at addresses; where the mask does not hold, ``other``."""

    address: Tile
    mask: Tile | None
    other: Tile | None
    cache: str
    axes: TileAxes
    stage: int


def as_tile(value: TileLike) -> Tile:
    return value if isinstance(value, Tile) else Literal(str(value))


def operation(symbol: str, *operands: TileLike, over: TileAxes | None = None) -> Tile:
    """An operation over the union of the axes, or in another order of them."""
    args = [as_tile(one) for one in operands]
    axes = union(*[a.axes for a in args]) if over is None else over
    stage = max([a.stage for a in args])
    return Operation(symbol, tuple([a.over(axes) for a in args]), axes, stage)


def chain(symbol: str, *operands: TileLike) -> Tile:
    """The same of many, one after the other: what is such a chain itself is taken apart, unless it
    is `Tile.grouped`.
    """
    found = [part for one in operands for part in terms(symbol, as_tile(one))]
    return found[0] if len(found) == 1 else operation(symbol, *found)


def terms(symbol: str, value: Tile) -> list[Tile]:
    """What a chain of operations is of."""
    if not isinstance(value, Operation) or value.symbol != symbol or value.closed:
        return [value]
    first, *rest = value.args
    return [*terms(symbol, first), *rest]


def product(parts: Iterable[TileLike]) -> Tile:
    """Of sizes, of which there may be none."""
    found = [as_tile(one) for one in parts] or [as_tile(1)]
    return found[0] if len(found) == 1 else operation("*", *found)


def apply(
    function: str, *operands: TileLike, over: TileAxes | None = None, **keywords: TileLike | None
) -> Tile:
    """A function of tiles, over the union of their axes; ``over``: the axes of what it gives where
    those are others. Keywords without a value are left out.
    """
    args, named = [as_tile(one) for one in operands], []
    for key, value in keywords.items():
        if value is not None:
            named.append((key, as_tile(value)))
    stage = max([0, *[a.stage for a in args], *[a.stage for _, a in named]])
    if over is None:
        over = union(*[a.axes for a in args])
        args = [a.over(over) for a in args]
    return Applied(function, tuple(args), tuple(named), over, stage)


def load(
    address: Tile, mask: Tile | None = None, other: TileLike | None = None, cache: str = ""
) -> Tile:
    axes, stage = address.axes, address.stage
    if mask is not None:
        mask, stage = mask.over(axes), max(stage, mask.stage)
    return Reading(address, mask, None if other is None else as_tile(other), cache, axes, stage)


def where(condition: Tile, value: TileLike, otherwise: TileLike) -> Tile:
    return apply("tl.where", condition, value, otherwise)


def cdiv(value: TileLike, divisor: TileLike) -> Tile:
    return apply("tl.cdiv", value, divisor)


def combine(values: list[Tile], symbol: str, *, as_written: bool = False) -> Tile:
    """``a + b + ...`` or ``a * b * ...``, scalars first so that they are added once; or
    ``as_written``, one after the other, where two kernels must round alike.
    """
    if len(values) == 1:
        return values[0]
    if as_written:
        return operation(symbol, *values)
    scalars = [v for v in values if not v.axes]
    blocks = sorted([v for v in values if v.axes], key=lambda v: len(v.axes))
    together = chain if symbol == "+" else operation  # whose order does not matter to addresses
    if len(scalars) > 1 and blocks:
        scalars = [together(symbol, *scalars).grouped()]
    axes = union(*[v.axes for v in values])
    return together(symbol, *scalars, *[v.over(axes) for v in blocks])


def inside(value: Tile) -> tuple[Tile, ...]:
    """What a tile is made of."""
    match value:
        case Operation(args=args):
            return args
        case Applied(args=args, keywords=keywords):
            return (*args, *(one for _, one in keywords))
        case Cast(value=inner) | Spread(value=inner):
            return (inner,)
        case Reading(address, mask, other):
            return tuple(one for one in (address, mask, other) if one is not None)
    return ()


def rebuilt(value: Tile, change: Callable[[Tile], Tile]) -> Tile:
    """The same of other tiles."""
    match value:
        case Operation(args=args):
            return replace(value, args=tuple(map(change, args)))
        case Applied(args=args, keywords=keywords):
            named = tuple((key, change(one)) for key, one in keywords)
            return replace(value, args=tuple(map(change, args)), keywords=named)
        case Cast(value=inner) | Spread(value=inner):
            return replace(value, value=change(inner))
        case Reading(address, mask, other):
            kept = mask if mask is None else change(mask), other if other is None else change(other)
            return replace(value, address=change(address), mask=kept[0], other=kept[1])
    return value


def distinct(values: Iterable[Tile]) -> list[Tile]:
    return list(dict.fromkeys(values))


def narrow_first(parts: Iterable[Expr]) -> list[Expr]:
    """Factors or terms with few variables first, so that they are not broadcast before they have
    to be. An order that depends on no tile: an extremum and its gradient, which looks for what is
    equal to it, must round alike.
    """
    return sorted(parts, key=lambda part: len(set(variables(part))))


# --- statements -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assignment:
    """``name = value``, or ``name += value``."""

    name: str
    value: Tile
    symbol: str = "="


@dataclass(frozen=True, slots=True)
class Effect:
    """A store, an atomic, a call of a function that gives nothing."""

    call: Tile


@dataclass(frozen=True, slots=True)
class Return:
    """The end of a program."""


@dataclass(frozen=True, slots=True)
class Loop:
    name: str
    bounds: tuple[Tile, ...]
    body: tuple[KernelLine, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    condition: Tile
    body: tuple[KernelLine, ...]
    otherwise: tuple[KernelLine, ...] = ()


KernelLine: TypeAlias = Assignment | Effect | Return | Loop | Branch


def loop(name: str, *bounds: TileLike, body: Iterable[KernelLine]) -> Loop:
    """``for name in range(*bounds)``."""
    return Loop(name, tuple(as_tile(one) for one in bounds), tuple(body))


def store(address: Tile, value: Tile, mask: Tile | None = None) -> Effect:
    axes = union(address.axes, value.axes)
    return Effect(apply("tl.store", address, value, over=axes, mask=mask and mask.over(axes)))
