"""A matrix product for each point, where the matrices lie: the blocks of a sparse matrix and of its
gradients. Nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from insum.host.arguments import HostCall
from insum.host.parts import Weights, weights_of
from insum.host.places import is_sorted, places_of, sorting
from insum.host.roles import HostRoles, as_tensor

#: How many points are called for one after the other; and multiplications of each from which on
#: that is quicker than laying their matrices side by side. Measured.
MOST_CALLS, LEAST_BLOCK = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Calls:
    """For each product the matrix that it is added to, those that are multiplied, and its point."""

    matrices: tuple[tuple[int, int, int], ...]
    points: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """``C[c(p),m,n] += scale(p) * A[a(p),m,k] * B[b(p),k,n]``."""

    roles: HostRoles
    weights: Weights
    key: tuple[object, ...]
    name, slowness = "blocks", 1
    why = "a matrix product for each point, on matrices where they lie"

    def __call__(self, call: HostCall) -> Tensor:
        roles = self.roles
        found = call.kept(self.key, lambda: self.made(call))
        rows, columns, inner = (roles.shared[pair] for pair in ((-1, 0), (-1, 1), (0, 1)))
        left, right = (as_tensor(call.values[side.access.tensor]) for side in roles.wide)
        a = roles.wide[0].matrices(left.to(roles.dtype), rows, inner)
        b = roles.wide[1].matrices(right.to(roles.dtype), inner, columns)
        out = a.new_zeros((roles.target.count, a.shape[1], b.shape[2]))
        scales = self.scales(call, found)
        for k, (to, i, j) in enumerate(found.matrices):
            out[to].addmm_(a[i], b[j], alpha=1 if scales is None else scales[k])
        return roles.target.restored(out, rows, columns).to(roles.problem.dtype)

    def scales(self, call: HostCall, found: _Calls) -> list[float] | None:
        weights = self.weights(call, self.roles.dtype)
        if weights is not None and found.points is not None:
            weights = weights[found.points]
        return None if weights is None else weights.tolist()

    def made(self, call: HostCall) -> _Calls:
        places = places_of(self.roles, call)
        rows, points = places.rows, places.take
        if not is_sorted(rows[0]):  # what is added to stays in cache
            order = sorting(rows[0])
            rows = tuple(r.index_select(0, order) for r in rows)
            points = order if points is None else points.index_select(0, order)
        to, i, j = (r.tolist() for r in rows)
        return _Calls(tuple(zip(to, i, j)), points)


def blocks_of(roles: HostRoles) -> Blocks | None:
    if len(roles.wide) != 2 or len(roles.shared) != 3 or roles.count > MOST_CALLS:
        return None
    extents = [int(roles.problem.extents[v]) for names in roles.shared.values() for v in names]
    if prod(extents) < LEAST_BLOCK:
        return None
    return Blocks(roles, weights_of(roles), ("blocks", *roles.key))
