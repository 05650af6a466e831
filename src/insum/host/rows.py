"""A sum of scaled rows: a sparse matrix in CSR times a dense one, without the rows that were read
ever lying side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insum.host.parts import Weights, weights_of
from insum.host.places import Call, Segments, places_of, segments
from insum.host.roles import Roles, as_tensor

#: From so many columns on torch's own product in float64 is quicker than the library's.
_WIDE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """``C[row(p),n] += scale(p) * B[column(p),n]``."""

    roles: Roles
    weights: Weights
    name = "rows"
    why = "a sum of scaled rows is a sparse matrix (CSR, kept with the index tensors) times a dense"

    def __call__(self, call: Call) -> Tensor:
        roles, (side,) = self.roles, self.roles.wide
        columns = roles.shared.get((-1, 0), ())
        found = call.kept(("rows", roles.problem.statement, roles.sizes), lambda: self.made(call))
        matrix = as_tensor(call.values[side.access.tensor])
        dtype = roles.problem.dtype if self.is_half(matrix) else roles.dtype
        weights = found.taken(self.weights(call, dtype))
        dense = side.matrices(matrix.to(dtype), columns)
        result = sum_of_rows(found, weights, dense)
        return roles.target.restored(result, columns).to(roles.problem.dtype)

    def is_half(self, matrix: Tensor) -> bool:
        """Whether all is in one narrow dtype, whose sums the kernel takes in float32 by itself."""
        narrow = self.roles.problem.dtype
        return narrow.itemsize == 2 and all(
            kind.dtype == narrow
            for kind in self.roles.problem.kinds.values()
            if kind.dtype.is_floating_point and kind.device is not None
        )

    def made(self, call: Call) -> Segments:
        places = places_of(self.roles, call)
        return segments(places.rows[0], self.roles.target.count, places.rows[1], places.take)


def rows_of(roles: Roles) -> Rows | None:
    if len(roles.wide) != 1 or set(roles.shared) != {(-1, 0)}:
        return None
    return Rows(roles, weights_of(roles))


def sum_of_rows(entries: Segments, weights: Tensor | None, dense: Tensor) -> Tensor:
    """For each row the sum of the rows of ``dense`` that its entries name, each times its weight."""
    if dense.dtype == torch.float64:
        return _product(entries, weights, dense)
    return torch.embedding_bag(
        dense.contiguous(),
        entries.columns,
        entries.starts,
        False,
        0,  # sum
        False,
        weights,
        True,  # the last start is an end
    )[0]


def _product(entries: Segments, weights: Tensor | None, dense: Tensor) -> Tensor:
    """In float64, where bags have no vector code."""
    if weights is None:
        weights = dense.new_ones(len(entries.columns))
    shape = len(entries.starts) - 1, len(dense)
    matrix = csr(entries, weights, shape)
    if dense.shape[1] >= _WIDE:
        return torch.sparse.mm(matrix, dense.contiguous(), reduce="sum")
    return torch.mm(matrix, dense.contiguous())


def csr(entries: Segments, values: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_csr_tensor(
        entries.starts, entries.columns, values, shape, check_invariants=False
    )
