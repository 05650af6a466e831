"""Windows on the left side: a scatter through ``t + r`` is a gather.

``dx[b,c,t+r] += g[b,o,t] * w[o,c,r]`` sends every point to a place ``u``, and many to the same.
Seen from the place, ``t`` is ``u - r``, where that is a ``t`` at all: a program owns its places,
walks ``r``, and adds up in registers. Neither atomics nor zeros are needed, and sums have one
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from insum.lang.expr import Access, Affine, Atom, Expr, Var, affine, fresh, index_of
from insum.plan.plan import Bound
from insum.plan.rewrite import substitute

#: A dimension has at most so many times the places of the variable that is solved for: what is
#: walked in vain is less than what is not.
MOST_PLACES = 2


@dataclass(frozen=True, slots=True)
class Gathered:
    """A product with variables over dimensions of the output in place of those that a window
    scatters.

    Attributes:
        places: the dimension that each variable of our own walks.
        bounds: where there are points.
    """

    target: Access
    factors: tuple[Expr, ...]
    places: Mapping[str, int]
    bounds: tuple[Bound, ...]


def gathered(
    target: Access,
    factors: tuple[Expr, ...],
    extents: Mapping[str, int],
    shape: tuple[int, ...],
    taken: set[str],
) -> Gathered | None:
    """The product as a gather; None where its left side has no window, or more than windows.

    >>> from insum.lang.parser import parse
    >>> statement = parse("dx[c,t+r] += g[o,t] * w[o,c,r]")
    >>> sizes = {"c": 8, "o": 8, "t": 64, "r": 3}
    >>> found = gathered(statement.target, statement.value.factors, sizes, (8, 66), set())
    >>> str(found.target), [str(f) for f in found.factors], [str(b) for b in found.bounds]
    ('dx[c,dx1]', ['g[o,-r + dx1]', 'w[o,c,r]'], ['0 <= -r + dx1 < t'])
    """
    if not _are_apart(target):
        return None
    indices, places, change = list(target.indices), {}, {}
    for dim, index in enumerate(target.indices):
        if index.var is not None:
            continue
        solved = _solved_for(index, extents, shape[dim])
        if solved is None:
            return None
        place = fresh(f"{target.tensor.lower()}{dim}", taken)
        places[place], indices[dim] = dim, index_of(place)
        change[solved] = _solution(index, solved, place)
    if not change:
        return None
    return Gathered(
        Access(target.tensor, tuple(indices), target.span),
        tuple(substitute(factor, change) for factor in factors),
        places,
        tuple(Bound(index, var) for var, index in change.items()),
    )


def _are_apart(target: Access) -> bool:
    """Whether the dimensions have nothing but variables, each of them in one place."""
    atoms = [atom for index in target.indices for _, atom in index.terms]
    names = [atom.name for atom in atoms if isinstance(atom, Var)]
    return len(names) == len(atoms) == len(set(names)) and all(i.terms for i in target.indices)


def _solved_for(index: Affine, extents: Mapping[str, int], places: int) -> str | None:
    """The longest variable of a window that the others and the place determine."""
    if len(index.terms) < 2:
        return None
    steps = {name: by for by, name in _named(index)}
    longest = max(steps, key=lambda name: extents[name])
    fits = abs(steps[longest]) == 1 and places <= MOST_PLACES * extents[longest]
    return longest if fits else None


def _solution(index: Affine, solved: str, place: str) -> Affine:
    """What ``solved`` is at a place of the window."""
    by = next(by for by, name in _named(index) if name == solved)
    rest: list[tuple[int, Atom]] = [(-by * c, Var(v)) for c, v in _named(index) if v != solved]
    return affine([*rest, (by, Var(place))], -by * index.offset)


def _named(index: Affine) -> list[tuple[int, str]]:
    return [(by, atom.name) for by, atom in index.terms if isinstance(atom, Var)]
