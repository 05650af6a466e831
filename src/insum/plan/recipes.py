"""Arrays that kernels read beside the tensors of the call, as descriptions: what they are derived
from, and how. `runtime.prologue` makes them.

A recipe is a frozen value, so that what was made is found again under it. Sizes in it are names,
resolved for each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from insum.lang.expr import Access, Affine, Var


@dataclass(frozen=True, slots=True)
class OfExtent:
    """The extent of an index variable."""

    var: str


@dataclass(frozen=True, slots=True)
class OfShape:
    """A size of the output."""

    dim: int


@dataclass(frozen=True, slots=True)
class OfLength:
    """A size of a tensor that is read."""

    tensor: str
    dim: int


@dataclass(frozen=True, slots=True)
class OfCount:
    """A number that a recipe gave: how many tiles, steps, pieces there are."""

    recipe: Recipe
    name: str


@dataclass(frozen=True, slots=True)
class CeilDivided:
    """A size divided by a number, rounded up."""

    size: OfExtent | OfShape
    by: int


#: A product of sizes, which `size_of` evaluates.
SizeExpr: TypeAlias = tuple[OfExtent | OfShape | OfLength | OfCount | CeilDivided | int, ...]


def size_of(
    expr: SizeExpr,
    extents: Mapping[str, int],
    shape: Sequence[int],
    counted: Callable[[OfCount], int],
    length: Callable[[OfLength], int] | None = None,
) -> int:
    """The number that a product of sizes is in a call of these; ``counted`` gives what recipes have
    counted, ``length`` the sizes of tensors, where the product has such.

    >>> size_of((2, OfExtent("e"), CeilDivided(OfShape(0), 3)), {"e": 5}, (7,), lambda one: 0)
    30
    """
    found = 1
    for one in expr:
        match one:
            case OfExtent(var):
                found *= extents[var]
            case OfShape(dim):
                found *= shape[dim]
            case OfLength():
                assert length is not None
                found *= length(one)
            case OfCount():
                found *= counted(one)
            case CeilDivided(size, by):
                found *= -(-size_of((size,), extents, shape, counted) // by)
            case int():
                found *= one
    return found


@dataclass(frozen=True, slots=True)
class Outline:
    """What decides where the result of a recipe is kept: every index tensor that it looks at, the
    one with which it is kept first; what it does, whatever they are called; and the sizes that it
    names, an extent as its variable.
    """

    names: tuple[str, ...]
    does: tuple[object, ...]
    sizes: tuple[str | SizeExpr | OfLength, ...]


class _Outlined:
    """Found once for each recipe: every call on new tensors asks for it."""

    @functools.cached_property
    def outline(self) -> Outline:
        return Outline(sources(self), canonical(self), _named(_sizes(self)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Segments(_Outlined):
    """``start`` and ``end`` of the runs of each value in a sorted index tensor."""

    index: str
    rows: OfShape


@dataclass(frozen=True)
class Slots(_Outlined):
    """The same over slots, where every entry of a sorted index holds several, those at the end of
    a row that are padding in ``padded`` left out.
    """

    base: Segments
    width: SizeExpr
    padded: tuple[str, ...]


@dataclass(frozen=True)
class LeftPlaces(_Outlined):
    """Where several ``indices`` of the left side lead to, in the ``dims`` that they index: of every
    point of the variables that they run ``over`` one number, which counts through these dimensions;
    -1 where an entry is absent, or out of range.
    """

    indices: tuple[Affine, ...]
    dims: tuple[int, ...]
    over: tuple[str, ...]
    names: tuple[str, ...]
    padded: tuple[str, ...]

    @property
    def count(self) -> SizeExpr:
        """How many places there are."""
        return tuple(OfShape(dim) for dim in self.dims)


@dataclass(frozen=True)
class DimOfPlaces(_Outlined):
    """Of each of these places the number in one of the dimensions."""

    base: LeftPlaces
    dim: int


@dataclass(frozen=True)
class Sorted(_Outlined):
    """The stable ``order`` in which an index tensor is sorted, or places are, and the segments in
    that order.
    """

    index: str | LeftPlaces
    rows: SizeExpr


@dataclass(frozen=True)
class Position(_Outlined):
    """Where the sorted entries stand along one dimension of their index tensor."""

    base: Sorted
    dim: int


@dataclass(frozen=True)
class Composed(_Outlined):
    """An index tensor over (some of) the dimensions of a sorted one, in its order."""

    base: Sorted
    source: str
    dims: tuple[int, ...]


#: An inverse table may have this many places per entry of the index.
INVERT_UP_TO = 2


@dataclass(frozen=True)
class Inverse(_Outlined):
    """``inverse[.., y, ..] = x`` where ``index[.., x, ..] = y``; -1 where there is none."""

    index: str
    dim: int
    rows: OfShape


@dataclass(frozen=True, slots=True)
class Walk:
    """How one dimension of a table is read: forwards or backwards, from an offset, how far."""

    is_row: bool
    coefficient: int
    offset: int
    extent: SizeExpr


@dataclass(frozen=True)
class Packed(_Outlined):
    """Tiles of similar ``rows`` of a padded table, and the ``steps`` that each tile has to take."""

    table: str | Inverse
    walks: tuple[Walk, ...]

    @functools.cached_property
    def forwards(self) -> Packed:
        """The same with the steps walked forwards, from the first."""
        turned = [w if w.is_row else replace(w, coefficient=1, offset=0) for w in self.walks]
        return Packed(self.table, tuple(turned))

    @functools.cached_property
    def of_table(self) -> Packed:
        """The same of a table that is the inverse itself."""
        return Packed(index_of_recipe(self), self.walks)


@dataclass(frozen=True)
class PackedByStep(_Outlined):
    """The same read the other way: pieces of the tiles that each step occurs in."""

    base: Packed

    @functools.cached_property
    def of_table(self) -> PackedByStep:
        return PackedByStep(self.base.of_table)


@dataclass(frozen=True)
class Tasks(_Outlined):
    """Rows of segments cut into pieces of at most ``limit`` entries, long pieces first."""

    base: Segments | Slots | Sorted
    limit: int


@dataclass(frozen=True)
class Pieces(_Outlined):
    """The entries of an index tensor that nothing is known of, sorted and cut into runs of equal
    values of at most ``limit`` entries. Its counts stay on the device.
    """

    base: Sorted
    limit: int


@dataclass(frozen=True)
class SharedTiles(_Outlined):
    """Entries of an index tensor in tiles of ``lanes``, each of one ``value``: of every entry its
    ``place`` along each dimension, -1 where there is none. ``values``: how many there may be. How
    many tiles there are at most follows from sizes.
    """

    index: str
    values: OfLength | OfShape
    lanes: int
    pads: bool  # -1 stands for an absent entry


RowRecipe: TypeAlias = Segments | Slots | Sorted
Recipe: TypeAlias = (
    Segments
    | Slots
    | LeftPlaces
    | DimOfPlaces
    | Sorted
    | Position
    | Composed
    | Inverse
    | Packed
    | PackedByStep
    | Tasks
    | Pieces
    | SharedTiles
)


@dataclass(frozen=True, slots=True)
class RecipeArray:
    """One array of what a recipe makes, as kernels see it."""

    recipe: Recipe
    part: str
    dtype: str
    rank: int = 1


def index_of_recipe(recipe: Recipe) -> str:
    """The index tensor with which what a recipe makes is kept."""
    match recipe:
        case Sorted(index):
            return index if isinstance(index, str) else index.names[0]
        case Segments(index) | Inverse(index) | SharedTiles(index):
            return index
        case LeftPlaces():
            return recipe.names[0]
        case Packed(table):
            return table if isinstance(table, str) else table.index
        case _:
            return index_of_recipe(recipe.base)


def sources(recipe: Recipe) -> tuple[str, ...]:
    """Every index tensor that a recipe looks at, the one with which it is kept first."""
    more: tuple[str, ...] = ()
    match recipe:
        case (LeftPlaces() as places) | Sorted(LeftPlaces() as places):
            more = places.names
        case Composed(base, source):
            more = (*sources(base), source)
        case Slots(_, _, padded):
            more = padded
        case DimOfPlaces(base) | Position(base) | Pieces(base) | Tasks(base):
            more = sources(base)
        case _:
            pass
    return tuple(dict.fromkeys((index_of_recipe(recipe), *more)))


def canonical(recipe: Recipe) -> tuple[object, ...]:
    """What a recipe does, whatever its index tensors and its sizes are called: what is made of one
    tensor is found again in other statements.
    """
    match recipe:
        case Segments():
            return ("segments",)
        case Slots(base, _, padded):
            return "slots", canonical(base), len(padded)
        case LeftPlaces():
            return ("places", *_numbered(recipe))
        case DimOfPlaces(base, dim):
            return "dimension", canonical(base), dim
        case Sorted(LeftPlaces() as places):
            return "sorted", canonical(places)
        case Sorted():
            return ("sorted",)
        case Position(base, dim):
            return "position", canonical(base), dim
        case Composed(base, source, dims):
            # the source may be one of those that places are made of
            return "composed", canonical(base), sources(recipe).index(source), dims
        case Inverse(_, dim):
            return "inverse", dim
        case Packed(table, walks):
            inner = () if isinstance(table, str) else canonical(table)
            return "packed", inner, tuple((w.is_row, w.coefficient, w.offset) for w in walks)
        case PackedByStep(base):
            return "packed by step", canonical(base)
        case Tasks(base, limit):
            return "tasks", canonical(base), limit
        case Pieces(base, limit):
            return "pieces", canonical(base), limit
        case SharedTiles(_, _, lanes, pads):
            return "shared tiles", lanes, pads


def _numbered(places: LeftPlaces) -> tuple[str, ...]:
    """Their indices as text, with numbers for names of tensors and variables."""
    tensors = {name: f"t{k}" for k, name in enumerate(places.names)}
    own = {name: f"v{k}" for k, name in enumerate(places.over)}

    def renamed(index: Affine) -> Affine:
        return Affine(tuple((by, atom_of(atom)) for by, atom in index.terms), index.offset)

    def atom_of(atom: Var | Access) -> Var | Access:
        if isinstance(atom, Var):
            return Var(own[atom.name])
        return Access(tensors[atom.tensor], tuple(map(renamed, atom.indices)))

    padded = (tensors[name] for name in places.padded)
    return *(str(renamed(index)) for index in places.indices), *padded


def is_packed(key: object) -> bool:
    """Whether what is kept under a key are tiles of similar rows, or was made of them."""
    does = key[0] if isinstance(key, tuple) else None
    return isinstance(does, tuple) and does[0] in ("packed", "packed by step")


def _sizes(recipe: Recipe) -> tuple[SizeExpr | OfLength, ...]:
    match recipe:
        case LeftPlaces(_, _, over):
            # each of them: as many places may be in dimensions of other sizes
            return *((size,) for size in recipe.count), *((OfExtent(v),) for v in over)
        case Sorted(LeftPlaces() as places):
            return _sizes(places)
        case Sorted(_, rows):
            return (rows,)
        case Segments(_, rows) | Inverse(_, _, rows):
            return ((rows,),)
        case Slots(base, width):
            return *_sizes(base), width
        case Packed(table, walks):
            inner = () if isinstance(table, str) else _sizes(table)
            return (*inner, *[w.extent for w in walks])
        case SharedTiles(_, values):
            return (values if isinstance(values, OfLength) else (values,),)
        case _:
            return _sizes(recipe.base)


def _named(sizes: tuple[SizeExpr | OfLength, ...]) -> tuple[str | SizeExpr | OfLength, ...]:
    return tuple(
        size[0].var
        if isinstance(size, tuple) and len(size) == 1 and isinstance(size[0], OfExtent)
        else size
        for size in sizes
    )
