"""A sum of small matrix products with a matrix for each point: a sparse matrix of square blocks
times a dense one, without what is multiplied ever lying side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from insum.host.arguments import HostCall
from insum.host.library import has_library, hide_beta_warning
from insum.host.parts import Weights, weights_of
from insum.host.places import RowSegments, is_counting, narrow, places_of, segments
from insum.host.roles import HostRoles, as_tensor

#: Multiplications of a point from which on a product for each is quicker than the library's for
#: all; and sides of blocks up to which that is quicker than laying rows side by side: the more
#: columns they have, the better the library does. Measured.
MOST_PRODUCT = 1 << 17
MOST_SIDE, MOST_COLUMNS, COLUMNS_FOR_MORE = 8, 128, 8


@dataclass(frozen=True, slots=True, eq=False)
class _SortedBlocks:
    """Entries by row of blocks, and which matrix each is, None that they are all of them in
    order; ``entries.take`` says which point.
    """

    entries: RowSegments
    which: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """``C[c(p),m,n] += scale(p) * A[a(p),m,k] * B[b(p),k,n]``; ``blocks``: which factor is A."""

    roles: HostRoles
    weights: Weights
    key: tuple[object, ...]
    blocks: int
    name, slowness = "block rows", 2
    why = "a sum of products of blocks is a sparse matrix of them (BSR) times a dense"

    def __call__(self, call: HostCall) -> Tensor:
        roles, dense = self.roles, self.roles.wide[1 - self.blocks]
        rows, columns = roles.shared[-1, self.blocks], roles.shared[-1, 1 - self.blocks]
        tensor = as_tensor(call.values[dense.access.tensor]).to(roles.dtype)
        b = dense.matrices(tensor, roles.shared[0, 1], columns)
        side, width = b.shape[1:]
        shape = roles.target.count * side, dense.count * side
        matrix = self.matrix(call, rows, shape)
        out = b.new_empty((shape[0], width))
        torch.addmm(out, matrix, b.reshape(shape[1], width).contiguous(), beta=0, out=out)
        result = roles.target.restored(out.view(-1, side, width), rows, columns)
        return result.to(roles.problem.dtype)

    def matrix(self, call: HostCall, rows: tuple[str, ...], shape: tuple[int, int]) -> Tensor:
        roles, side = self.roles, self.roles.wide[self.blocks]
        found = call.kept(self.key, lambda: self.made(call))
        tensor = as_tensor(call.values[side.access.tensor]).to(roles.dtype)
        values = side.matrices(tensor, rows, roles.shared[0, 1])
        if found.which is not None:
            values = values.index_select(0, found.which)
        scale = found.entries.taken(self.weights(call, roles.dtype))
        if scale is not None:
            values = values * scale[:, None, None]
        hide_beta_warning()
        entries = found.entries
        return torch.sparse_bsr_tensor(
            entries.starts, entries.columns, values.contiguous(), shape, check_invariants=False
        )

    def made(self, call: HostCall) -> _SortedBlocks:
        places = places_of(self.roles, call)
        to, *read = places.rows
        found = segments(to, self.roles.target.count, torch.arange(len(to)), None)
        order = found.columns.long()
        which, columns = (read[k].index_select(0, order) for k in (self.blocks, 1 - self.blocks))
        points = order if places.take is None else places.take.index_select(0, order)
        take = _unless_all(points, self.roles.count)
        entries = RowSegments(found.starts, columns.to(found.starts.dtype), take)
        return _SortedBlocks(entries, _unless_all(which, self.roles.wide[self.blocks].count))


def _unless_all(numbers: Tensor, count: int) -> Tensor | None:
    """None where they are all of so many, in order."""
    return None if len(numbers) == count and is_counting(numbers) else narrow(numbers)


def block_rows_of(roles: HostRoles) -> BlockRows | None:
    if len(roles.wide) != 2 or len(roles.shared) != 3 or not has_library():
        return None
    extents = [int(roles.problem.extents[v]) for names in roles.shared.values() for v in names]
    if prod(extents) >= MOST_PRODUCT:
        return None
    for blocks, side in enumerate(roles.wide):
        rows, inner = (side.extent(roles.shared[pair]) for pair in ((-1, blocks), (0, 1)))
        columns = roles.width((-1, 1 - blocks))
        small = rows <= MOST_SIDE + min(columns, MOST_COLUMNS) // COLUMNS_FOR_MORE
        if side.count == roles.count and rows == inner and small:
            return BlockRows(roles, weights_of(roles), ("block rows", *roles.key), blocks)
    return None
