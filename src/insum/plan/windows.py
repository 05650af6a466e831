"""Windows on the left side: a scatter through ``t + r`` is a gather.

``dx[b,c,t+r] += g[b,o,t] * w[o,c,r]`` sends every point to a place ``u``, and many to the same.
Seen from the place, ``t`` is ``u - r``, where that is a ``t`` at all: a program owns its places,
walks ``r``, and adds up in registers. Neither atomics nor zeros are needed, and sums have one
order.

Windows that are ``s`` apart, ``s*t + r``, meet a place ``s*q + p`` only by the ``r`` that are
``s*a + p``, and there ``t`` is ``q - a``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from insum.lang.expr import (
    Access,
    Affine,
    Expr,
    Var,
    accesses,
    affine,
    fresh,
    index_of,
    substitute,
    variables,
)
from insum.plan.plan import Bound
from insum.plan.recipes import CeilDivided, OfExtent, OfShape, SizeExpr
from insum.plan.sizes import power_of_two

#: A dimension has at most so many times the places that windows begin at: what is walked in vain is
#: less than what is not.
MOST_PLACES = 2


@dataclass(frozen=True, slots=True)
class Gathered:
    """A product with variables over places of the output where windows stood on the left side.

    Attributes:
        made: the extents of variables of our own; ``extents`` are typical ones of all variables.
        bounds: where there are points.
    """

    target: Access
    factors: tuple[Expr, ...]
    made: Mapping[str, SizeExpr]
    extents: Mapping[str, int]
    bounds: tuple[Bound, ...]


@dataclass(frozen=True, slots=True)
class _Solved:
    """One dimension: how it is walked, and what that makes of the variables of its window."""

    index: Affine
    change: Mapping[str, Affine]
    made: Mapping[str, SizeExpr]
    extents: Mapping[str, int]


def gathered(
    target: Access,
    factors: tuple[Expr, ...],
    extents: Mapping[str, int],
    shape: tuple[int, ...],
    taken: set[str],
) -> Gathered | None:
    """The product as a gather; None where its left side has no window, or more than windows, or
    where its factors do not say how many points meet in a place.

    >>> from insum.lang.parser import parse
    >>> def seen(text, shape, **sizes):
    ...     statement = parse(text)
    ...     found = gathered(statement.target, statement.value.factors, sizes, shape, {*sizes})
    ...     bounds = " and ".join(map(str, found.bounds))
    ...     return f"{found.target} += {' * '.join(map(str, found.factors))} where {bounds}"
    >>> seen("y[c,t+r] += g[o,t] * w[o,c,r]", (8, 66), c=8, o=8, t=64, r=3)
    'y[c,y1] += g[o,-r + y1] * w[o,c,r] where 0 <= -r + y1 < t'
    >>> seen("y[2*t+r] += g[t] * w[r]", (129,), t=64, r=3)
    'y[2*q + p] += g[q - a] * w[2*a + p] where 0 <= q - a < t and 0 <= 2*a + p < r'
    """
    if not _are_apart(target) or any(map(_reads_indices, factors)):
        return None
    indices, found = list(target.indices), []
    for dim, index in enumerate(target.indices):
        if index.var is not None:
            continue
        solved = _solved(index, target.tensor, dim, extents, shape[dim], taken)
        if solved is None:
            return None
        indices[dim] = solved.index
        found.append(solved)
    if not found:
        return None
    change = {v: index for solved in found for v, index in solved.change.items()}
    kept = {v: n for v, n in extents.items() if v not in change}
    place = Access(target.tensor, tuple(indices), target.span)
    read = tuple(substitute(factor, change) for factor in factors)
    walked = {v for expr in (place, *read) for v in variables(expr)}
    if not walked.issuperset(v for index in change.values() for v in variables(index)):
        return None  # points are counted by a variable that nothing is read at
    return Gathered(
        place,
        read,
        {v: size for solved in found for v, size in solved.made.items()},
        kept | {v: n for solved in found for v, n in solved.extents.items()},
        tuple(Bound(index, var) for var, index in change.items()),
    )


def _are_apart(target: Access) -> bool:
    """Whether the dimensions have nothing but variables, each of them in one place."""
    atoms = [atom for index in target.indices for _, atom in index.terms]
    names = [atom.name for atom in atoms if isinstance(atom, Var)]
    return len(names) == len(atoms) == len(set(names)) and all(i.terms for i in target.indices)


def reach(index: Affine, extents: Mapping[str, int]) -> int:
    """Places that the windows of a dimension cover, whatever it has beyond them.

    >>> reach(affine([(2, Var("t")), (1, Var("r"))], 0), {"t": 64, "r": 3})
    129
    """
    steps = [(by, atom.name) for by, atom in index.terms if isinstance(atom, Var)]
    return 1 + sum(abs(by) * (extents[name] - 1) for by, name in steps)


def _reads_indices(factor: Expr) -> bool:
    return any(True for access in accesses(factor) for i in access.indices for _ in accesses(i))


def _solved(
    index: Affine,
    tensor: str,
    dim: int,
    extents: Mapping[str, int],
    places: int,
    taken: set[str],
) -> _Solved | None:
    """A window solved for its longest variable, which the others and the place determine."""
    steps = {atom.name: by for by, atom in index.terms if isinstance(atom, Var)}
    begins = max(steps, key=lambda name: extents[name])
    apart = abs(steps[begins])
    if len(steps) < 2 or places > MOST_PLACES * apart * extents[begins]:
        return None
    if apart == 1:
        return _by_place(index, begins, fresh(f"{tensor.lower()}{dim}", taken), dim, places)
    if len(steps) == 2 and steps[begins] > 0 and not index.offset:
        (inside,) = steps.keys() - {begins}
        if steps[inside] == 1:
            names = (fresh("q", taken), fresh("p", taken), fresh("a", taken))
            return _by_phase(begins, inside, apart, names, dim, places, extents[inside])
    return None


def _by_place(index: Affine, begins: str, place: str, dim: int, places: int) -> _Solved:
    by = next(by for by, atom in index.terms if atom == Var(begins))
    rest = [(-by * c, atom) for c, atom in index.terms if atom != Var(begins)]
    begin = affine([*rest, (by, Var(place))], -by * index.offset)
    return _Solved(index_of(place), {begins: begin}, {place: (OfShape(dim),)}, {place: places})


def _by_phase(
    begins: str,
    inside: str,
    apart: int,
    names: tuple[str, str, str],
    dim: int,
    places: int,
    width: int,
) -> _Solved:
    q, p, a = names
    change = {
        begins: affine([(1, Var(q)), (-1, Var(a))], 0),
        inside: affine([(apart, Var(a)), (1, Var(p))], 0),
    }
    made: dict[str, SizeExpr] = {
        q: (CeilDivided(OfShape(dim), apart),),
        p: (apart,),
        a: (CeilDivided(OfExtent(inside), apart),),
    }
    # tiles that hold all of `a` are as wide as what is typical of it
    typical = {q: math.ceil(places / apart), p: apart, a: math.ceil(power_of_two(width) / apart)}
    return _Solved(affine([(apart, Var(q)), (1, Var(p))], 0), change, made, typical)
