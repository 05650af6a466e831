"""How a format's arrays name the coordinates of its entries, said once and without any data.

An *entry* (or a block of entries) sits at a *position*: `p` in COO, `(p, q)` in GroupCOO, `(m, q)`
in ELL. For every dimension a layout says where the coordinate of the entry at a position is found:
in an index array over some of the position's axes, or in the axis itself. Everything generic
(decompression, facts, validation, the rewriting of statements) is written against this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def memoised(function: Callable[P, R]) -> Callable[P, R]:
    """Memoised by its arguments, and taken as a constant by torch.compile, which would otherwise
    trace through it.
    """
    cached = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    # What torch.compiler.assume_constant_result does, without importing torch._dynamo, which takes
    # seconds.
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call


def fixed(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers that decide the statement; under ``torch.compile(dynamic=True)``, which takes every
    number for a variable, made constants again.
    """
    # A length of a list is known to the tracer, and so the number becomes known.
    return tuple(len([None] * n) for n in numbers) if torch.compiler.is_compiling() else numbers


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Where one dimension's coordinate is found.

    ``field`` and ``number`` name the index array (``None``: the coordinate is position axis
    ``axes[0]`` itself); ``axes`` are the position axes that it spans; ``padded`` says that it holds
    -1 where there is no entry.
    """

    field: str | None
    number: int
    axes: tuple[int, ...]
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Position axes by name, a `Coordinate` per dimension, and whether positions hold blocks."""

    axes: tuple[str, ...]
    coordinates: tuple[Coordinate, ...]
    blocked: bool = False


# Functions rather than properties: torch.compile traces these, and not properties of an object that
# it takes for a constant.


def implicit_axes(layout: Layout) -> dict[int, int]:
    """Dimension -> position axis, for the dimensions that are stored densely."""
    return {dim: c.axes[0] for dim, c in enumerate(layout.coordinates) if c.field is None}


def has_padding(layout: Layout) -> bool:
    """Whether there can be positions without an entry."""
    return any(c.padded for c in layout.coordinates)


@memoised
def listed(rank: int, *, blocked: bool = False) -> Layout:
    """COO, BlockCOO: one axis, one array per dimension."""
    return Layout(("p",), tuple(Coordinate("indices", dim, (0,)) for dim in range(rank)), blocked)


@memoised
def grouped(rank: int, group_dims: tuple[int, ...], *, blocked: bool = False) -> Layout:
    """GroupCOO, BlockGroupCOO: coordinates of the grouped dimensions once per group, of the others
    once per slot.
    """
    rest = [d for d in range(rank) if d not in group_dims]
    coordinates = [
        Coordinate("group_indices", group_dims.index(d), (0,))
        if d in group_dims
        else Coordinate("slot_indices", rest.index(d), (0, 1), padded=True)
        for d in range(rank)
    ]
    return Layout(("p", "q"), tuple(coordinates), blocked)


@memoised
def rowwise(rank: int, group_dims: tuple[int, ...]) -> Layout:
    """ELL: the grouped dimensions are axes of the arrays, followed by the slots."""
    rest = [d for d in range(rank) if d not in group_dims]
    every = tuple(range(len(group_dims) + 1))
    coordinates = [
        Coordinate(None, 0, (group_dims.index(d),))
        if d in group_dims
        else Coordinate("indices", rest.index(d), every, padded=True)
        for d in range(rank)
    ]
    return Layout((*(f"r{i}" for i in range(len(group_dims))), "q"), tuple(coordinates))


@memoised
def tabled(rank: int, dim: int) -> Layout:
    """Neighbour table: every dimension but one is an axis; the array holds the coordinate of that
    one.
    """
    rest = [d for d in range(rank) if d != dim]
    coordinates = [
        Coordinate("table", 0, tuple(range(rank - 1)), padded=True)
        if d == dim
        else Coordinate(None, 0, (rest.index(d),))
        for d in range(rank)
    ]
    return Layout(tuple(f"r{i}" for i in range(rank - 1)), tuple(coordinates))
