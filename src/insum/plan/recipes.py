"""Arrays that kernels read beside the tensors of the call, as descriptions: what they are derived
from, and how. `runtime.prologue` makes them.

A recipe is a frozen value, so that what was made is found again under it. Sizes in it are names,
resolved for each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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


#: A product of sizes.
SizeExpr: TypeAlias = tuple[OfExtent | OfShape | OfCount, ...]


@dataclass(frozen=True, slots=True)
class Segments:
    """``start`` and ``end`` of the runs of each value in a sorted index tensor."""

    index: str
    rows: OfShape


@dataclass(frozen=True, slots=True)
class Slots:
    """The same over slots, where every entry of a sorted index holds several, those at the end of
    a row that are padding in ``padded`` left out.
    """

    base: Segments
    width: SizeExpr
    padded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sorted:
    """The stable ``order`` in which an index tensor is sorted, and the segments in that order."""

    index: str
    rows: OfShape


@dataclass(frozen=True, slots=True)
class Position:
    """Where the sorted entries stand along one dimension of their index tensor."""

    base: Sorted
    dim: int


@dataclass(frozen=True, slots=True)
class Composed:
    """An index tensor over (some of) the dimensions of a sorted one, in its order."""

    base: Sorted
    source: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inverse:
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


@dataclass(frozen=True, slots=True)
class Packed:
    """Tiles of similar ``rows`` of a padded table, and the ``steps`` that each tile has to take."""

    table: str | Inverse
    walks: tuple[Walk, ...]


@dataclass(frozen=True, slots=True)
class PackedByStep:
    """The same read the other way: pieces of the tiles that each step occurs in."""

    base: Packed


@dataclass(frozen=True, slots=True)
class Tasks:
    """Rows of segments cut into pieces of at most ``limit`` entries, long pieces first."""

    base: Segments | Slots | Sorted
    limit: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """The entries of an index tensor that nothing is known of, sorted and cut into runs of equal
    values of at most ``limit`` entries. Its counts stay on the device.
    """

    base: Sorted
    limit: int


@dataclass(frozen=True, slots=True)
class SharedTiles:
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
        case Segments(index) | Sorted(index) | Inverse(index) | SharedTiles(index):
            return index
        case Packed(table):
            return table if isinstance(table, str) else table.index
        case _:
            return index_of_recipe(recipe.base)


def sources(recipe: Recipe) -> tuple[str, ...]:
    """Every index tensor that a recipe looks at, the one with which it is kept first."""
    more: tuple[str, ...] = ()
    match recipe:
        case Composed(_, source):
            more = (source,)
        case Slots(_, _, padded):
            more = padded
        case Tasks(base) if isinstance(base, Slots):
            more = base.padded
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
        case Sorted():
            return ("sorted",)
        case Position(base, dim):
            return "position", canonical(base), dim
        case Composed(base, _, dims):
            return "composed", canonical(base), dims
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
