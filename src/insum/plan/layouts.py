"""Layouts: a dense factor that a matrix product would read number by number is copied first.

Loads are wide where an axis of the tile walks what lies together in memory, from aligned places on.
A window ``t + r`` begins anywhere, ``2*t`` leaves gaps, and a variable that is not of the tile, as
the ``r`` of ``w[o,c,r]``, takes one number of each run. Neighbouring places of a window share all
but one of what they read, so that every number is read many times over: a copy in which an axis of
the tile lies together, the summed one where it can be, is read once and written once, and a window
then walks whole rows of it.

Everything here depends on the statement, on sizes and on strides, never on values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from insum.lang.expr import Access, Affine, Expr, fresh, index_of, variables
from insum.plan.order import Ordered
from insum.plan.roles import Contraction, Roles, contraction
from insum.plan.sizes import MemoryLayout
from insum.plan.steps import MOVED, STARTED, Place, Step, Term
from insum.plan.windows import gathered

#: Points for each number that is copied, from which on a copy pays: a product that reads number by
#: number takes 20 to 50 ns longer for a million points, and a copy of a million numbers 1.3 µs.
LEAST_USES = 48
#: And where rows lie together but begin anywhere, which caches make up for.
LEAST_UNALIGNED = 192
#: Points of a product that is worth more than one launch.
LEAST_POINTS = 2**27


def copied(term: Term, layouts: Mapping[str, MemoryLayout]) -> Ordered | None:
    """The product with copies of factors before it; None where no copy pays."""
    points = math.prod(term.extents[v] for v in {v for f in term.factors for v in variables(f)})
    if points < LEAST_POINTS:
        return None
    roles, factors = _roles(term)
    if not roles.dot:
        return None
    writer = _Copies(term)
    for position in (*roles.left, *roles.right):
        read, factor = factors[position], term.factors[position]
        assert isinstance(read, Access) and isinstance(factor, Access)
        layout = layouts[factor.tensor]
        moved = _moved(read, layout, roles)
        uses = points / math.prod(term.shapes[factor.tensor])
        least = LEAST_UNALIGNED if _lies_along(read, layout, roles) else LEAST_USES
        if moved is not None and uses >= least:
            writer.copy(position, factor, moved)
    return writer.written(points) if writer.steps else None


def _roles(term: Term) -> tuple[Contraction, tuple[Expr, ...]]:
    """The roles that variables will have, and the factors as they will be read."""
    target, factors, extents = term.target, term.factors, term.extents
    found = gathered(target, factors, extents, term.shape, set(term.taken))
    if found is not None:
        target, factors, extents = found.target, found.factors, found.extents
    kept = tuple(dict.fromkeys(variables(target)))
    every = dict.fromkeys(v for f in factors for v in variables(f))
    summed = tuple(v for v in every if v not in kept)
    return contraction(Roles(factors, kept, summed, extents), allow_dot=True), factors


def _moved(read: Access, layout: MemoryLayout, roles: Contraction) -> int | None:
    """The dimension that should lie together; None where what does is read in wide loads, or where
    no other would be.
    """
    tile = (*roles.k, *roles.n, *roles.m)
    plain = [index.var for index in read.indices]
    if _lies_along(read, layout, roles) and layout.aligned:
        return None
    could = [dim for dim, var in enumerate(plain) if var in tile and layout.fills[dim]]
    return min(could, key=lambda dim: tile.index(str(plain[dim])), default=None)


def _lies_along(read: Access, layout: MemoryLayout, roles: Contraction) -> bool:
    """Whether what lies together in memory is walked by an axis of the tile."""
    along = layout.along
    return along >= 0 and read.indices[along].var in (*roles.k, *roles.n, *roles.m)


class _Copies:
    """Writes copies down as statements, and the product that reads them."""

    def __init__(self, term: Term) -> None:
        self.term, self.factors = term, list(term.factors)
        self.taken = {*term.taken, term.target.tensor, *term.shapes, *term.extents}
        self.steps: list[Step] = []
        self.places: dict[str, Place] = {}
        self.made: dict[tuple[str, int], str] = {}

    def copy(self, position: int, factor: Access, moved: int) -> None:
        """One factor reads a copy in which a dimension was moved behind all others."""
        tensor = factor.tensor
        if (tensor, moved) not in self.made:
            self.made[tensor, moved] = self.fill(factor, moved)
        name = self.made[tensor, moved]
        self.factors[position] = Access(name, _moved_last(factor.indices, moved))

    def fill(self, factor: Access, moved: int) -> str:
        tensor, plain = factor.tensor, [index.var for index in factor.indices]
        name = fresh(f"{tensor}_{plain[moved]}", self.taken)
        walked = [
            var if var is not None and plain.count(var) == 1 else self.variable(tensor, dim)
            for dim, var in enumerate(plain)
        ]
        read = Access(tensor, tuple(map(index_of, walked)))
        target = Access(name, _moved_last(read.indices, moved))
        points = math.prod(self.term.shapes[tensor])
        cost = points + 2 * MOVED * points + STARTED
        self.steps.append(Step(target, (read,), tuple(variables(target)), (), cost, points))
        return name

    def variable(self, tensor: str, dim: int) -> str:
        name = fresh(f"{tensor}{dim}".lower(), self.taken)
        self.places[name] = (tensor, dim)
        return name

    def written(self, points: float) -> Ordered:
        buffered = sum(step.points for step in self.steps)
        last = Step(self.term.target, tuple(self.factors), (), (), points, points)
        return Ordered((*self.steps, last), self.places, buffered)


def _moved_last(indices: tuple[Affine, ...], moved: int) -> tuple[Affine, ...]:
    return (*indices[:moved], *indices[moved + 1 :], indices[moved])
