"""A sum of scaled rows: a sparse matrix in CSR times a dense one, without the rows that were read
ever lying side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum.compat.tensors import empty
from insum.host.arguments import HostCall
from insum.host.library import has_library, hide_beta_warning
from insum.host.operations import lower_on_host
from insum.host.parts import SubProblem, Weights, weights_of
from insum.host.places import RowSegments, places_of, segments
from insum.host.roles import HostRoles, are_dense, one_column
from insum.lang.expr import variables

#: Measured. In float64 bags have no vector code, and in float32 the library's product is quicker
#: than they are up to so many columns. What torch has without the library never is.
_NARROW = 16
#: Points of a row that is moved, as it is read or as a result, from which on that is worth it:
#: where they are read and written, or summed on the way, too. Measured.
LEAST_OF_MOVED, LEAST_OF_SUMMED = 3, 1
#: Points of a row below which numbers are scattered one by one as quickly as they are put in order.
MANY_OF_A_ROW = 64


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRows:
    """``C[row(p),n] += scale(p) * B[column(p),n]``."""

    roles: HostRoles
    weights: Weights
    key: tuple[object, ...]
    dtype: torch.dtype
    #: What is quicker where points do not lie in the order of their rows.
    out_of_order: SubProblem | None = None
    name = "rows"
    why = "a sum of scaled rows is a sparse matrix (CSR, kept with the index tensors) times a dense"

    @property
    def slowness(self) -> int:
        """Of narrow rows looking for the next takes longer than adding it up."""
        return max(2, 8 * _NARROW // (_NARROW + 3 * self.roles.width((-1, 0))))

    def __call__(self, call: HostCall) -> Tensor:
        roles, weights, (side,) = self.roles, self.weights, self.roles.wide
        columns = roles.shared[-1, 0]
        found = call.kept(self.key, lambda: self.made(call))
        if found.take is not None and self.out_of_order is not None:
            return self.out_of_order(call.indices())
        dense: Any = call.values[side.access.tensor]
        if dense.dtype is not self.dtype:
            dense = dense.to(self.dtype)
        if not side.is_matrix:
            dense = side.matrices(dense, columns)
        if weights.name or weights.part is not None:
            given: Any = call.values[weights.name] if weights.name else None
            make = lambda: _scales(found, found.in_order(weights(call, self.dtype)), dense)
            scales = found.kept(given, self.dtype, make)
        else:
            scales = found.without_weights(self.dtype, lambda: _scales(found, None, dense))
        result = _times(found, scales, dense)
        if not roles.target.is_matrix:
            result = roles.target.restored(result, columns)
        return result if result.dtype is roles.problem.dtype else result.to(roles.problem.dtype)

    def made(self, call: HostCall) -> RowSegments:
        places = places_of(self.roles, call)
        return segments(places.rows[0], self.roles.target.count, places.rows[1], places.take)


def rows_of(roles: HostRoles) -> ScaledRows | None:
    column = one_column(roles)
    roles = column or roles
    if len(roles.wide) != 1 or set(roles.shared) != {(-1, 0)}:
        return None
    if are_dense(roles.sides) or _is_selection(roles) or _is_moved(roles):
        return None
    few = roles.target.count <= roles.count // 2
    if roles.width((-1, 0)) == 1 and not (few and not are_dense(roles.wide)):
        return None  # numbers that are summed as they lie, or hardly at all
    weights, otherwise = weights_of(roles), None
    if column is not None and roles.count < MANY_OF_A_ROW * roles.target.count:
        otherwise = SubProblem(roles.problem, lower_on_host(roles.problem))
    return ScaledRows(roles, weights, ("rows", *roles.key), _dtype(roles, weights), otherwise)


def _is_selection(roles: HostRoles) -> bool:
    """Whether rows are picked, and neither scaled nor summed."""
    left = [index.var for index in roles.target.access.indices]
    return not roles.narrow and None not in left and {*roles.points} <= {*left}


def _is_moved(roles: HostRoles) -> bool:
    """Whether rows would have to be laid side by side first, or moved to their places then, and
    that is much of what there is to do.
    """
    columns = roles.shared[-1, 0]
    moved = sum(s.count for s in (roles.target, *roles.wide) if s.is_moved(columns))
    is_sum = not {*roles.points} <= {*variables(roles.target.access)}
    return roles.count < moved * (LEAST_OF_SUMMED if is_sum else LEAST_OF_MOVED)


def _dtype(roles: HostRoles, weights: Weights) -> torch.dtype:
    """Where all is in one narrow dtype, that: the kernel takes its sums in float32 by itself. What
    is computed here is not to be rounded. Where there is no library, there is no vector code for
    narrow dtypes, either.
    """
    if not has_library():
        return roles.dtype
    kinds = [k for k in roles.problem.kinds.values() if k.device is not None]
    narrow = {k.dtype for k in kinds if k.dtype.is_floating_point} | {roles.problem.dtype}
    return roles.dtype if weights.part is not None or len(narrow) > 1 else roles.problem.dtype


def sum_of_rows(entries: RowSegments, weights: Tensor | None, dense: Tensor) -> Tensor:
    """For each row the sum of the rows of ``dense`` that its entries name, times their weights."""
    return _times(entries, _scales(entries, weights, dense), dense)


def _scales(entries: RowSegments, weights: Tensor | None, dense: Tensor) -> Tensor | None:
    """What scales entries: a sparse matrix that torch knows, or weights where bags are quicker."""
    narrow = dense.dtype is torch.float32 and dense.shape[1] <= _NARROW
    if not has_library() or not narrow and dense.dtype is not torch.float64:
        return weights
    if weights is None:
        weights = dense.new_ones(entries.columns.shape)
    # detached, it holds their memory and not the tensor
    return csr(entries, weights.detach(), (entries.starts.shape[0] - 1, dense.shape[0]))


def _times(entries: RowSegments, scales: Tensor | None, dense: Tensor) -> Tensor:
    """The product of what `_scales` gives."""
    if scales is not None and scales.layout is torch.sparse_csr:
        # into memory that is there: a product that makes its own fills it with zeros first
        result = empty((scales.shape[0], dense.shape[1]), dense.dtype, dense.device)
        return torch.addmm(result, scales, dense.contiguous(), beta=0, out=result)
    return torch.embedding_bag(
        dense.contiguous(),
        entries.columns,
        entries.starts,
        False,
        0,  # sum
        False,
        scales,
        True,  # the last start is an end
    )[0]


def csr(entries: RowSegments, values: Tensor, shape: tuple[int, int]) -> Tensor:
    hide_beta_warning()
    return torch.sparse_csr_tensor(
        entries.starts, entries.columns, values, shape, check_invariants=False
    )
