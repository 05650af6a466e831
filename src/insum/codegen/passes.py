"""What is done with the loop of a contraction once it is written: indices are read one step ahead
of what they lead to, or several steps side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from insum.codegen.ir import (
    Assignment,
    KernelLine,
    Named,
    Reading,
    Tile,
    TileLike,
    as_tile,
    chain,
    inside,
    loop,
    rebuilt,
)

#: The counter of the loop.
STEP = Named("t", (), 2)
_FIRST, _LAST = Named("t_first"), Named("t_last")


def prefetched(
    first: TileLike,
    last: TileLike,
    counters: Sequence[Assignment],
    indices: Sequence[Assignment],
    rest: Sequence[KernelLine],
) -> list[KernelLine]:
    """Index loads run one iteration ahead of the data they address, so that the pipeline buffers
    data, not indices. ``counters`` define what the loop runs over.
    """
    names = {one.name for one in indices}
    ahead = _needed([*counters, *indices], names)
    body = [
        *counters,
        *(Assignment(one.name, Named(f"{one.name}_next", one.value.axes)) for one in indices),
        *rest,
        *_at_step(ahead, names, STEP + 1),
    ]
    return [
        *_bounds(first, last),
        *_at_step(ahead, names, _FIRST),
        loop("t", _FIRST, _LAST, body=body),
    ]


def side_by_side(
    first: TileLike, last: TileLike, body: Sequence[Assignment], together: int, total: str
) -> list[KernelLine]:
    """Several steps in each turn of the loop, line by line: all of them read their indices, then
    what these lead to, and are summed one after the other, in ``total``. What is left is done step
    by step.
    """
    own = {one.name for one in body} - {total}
    steps = [
        _renamed(one, own, STEP + step, f"_{step}") for one in body for step in range(together)
    ]
    whole = Named("t_whole")
    return [
        *_bounds(first, last),
        Assignment(whole.name, _FIRST + (_LAST - _FIRST) // together * together),
        loop("t", _FIRST, whole, together, body=steps),
        loop("t", whole, _LAST, body=body),
    ]


def _bounds(first: TileLike, last: TileLike) -> list[KernelLine]:
    return [Assignment(_FIRST.name, as_tile(first)), Assignment(_LAST.name, as_tile(last))]


def _at_step(lines: Sequence[Assignment], loads: set[str], at: Tile) -> list[Assignment]:
    """The index loads of another step; beyond the last one nothing may be read, so the loop's bound
    joins the mask.
    """
    defined = {one.name for one in lines}
    found = []
    for line in lines:
        own = _renamed(line, defined, at, "_next")
        within = line.name in loads
        found.append(replace(own, value=_bounded(own.value, at < _LAST)) if within else own)
    return found


def _needed(lines: Sequence[Assignment], names: set[str]) -> list[Assignment]:
    """The lines that the named values depend on, themselves included, in order."""
    wanted, kept = set(names), []
    for line in reversed(lines):
        if line.name in wanted:
            kept.append(line)
            wanted |= names_in(line.value)
    return kept[::-1]


def names_in(value: Tile) -> set[str]:
    """The variables that a tile is computed from."""
    if isinstance(value, Named):
        return {value.name}
    return {name for part in inside(value) for name in names_in(part)}


def _renamed(line: Assignment, names: set[str], at: Tile, end: str) -> Assignment:
    """A line at another step, with names of its own."""

    def named(found: Named) -> Tile:
        if found.name == STEP.name:
            return at
        return replace(found, name=f"{found.name}{end}") if found.name in names else found

    def change(value: Tile) -> Tile:
        return named(value) if isinstance(value, Named) else rebuilt(value, change)

    name = f"{line.name}{end}" if line.name in names else line.name
    return replace(line, name=name, value=change(line.value))


def _bounded(value: Tile, bound: Tile) -> Tile:
    """Read nothing where ``bound`` does not hold."""

    def change(part: Tile) -> Tile:
        if not isinstance(part, Reading):
            return rebuilt(part, change)
        if part.mask is None:
            return replace(part, mask=bound, other=as_tile(0))
        return replace(part, mask=chain("&", bound, part.mask))

    return change(value)
