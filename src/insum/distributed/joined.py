"""The rows of one rank as one pattern: for what cannot be computed part by part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insum.errors import UnsupportedError
from insum.formats import COO, SparseFormat


@dataclass(frozen=True, eq=False)
class JoinedPattern:
    """A pattern sorted by row, and where its entries are in the values of the two parts."""

    pattern: COO
    own: Tensor
    far: Tensor
    sorting: Tensor

    @property
    def rows(self) -> Tensor:
        return self.pattern.indices[0]

    @property
    def columns(self) -> Tensor:
        return self.pattern.indices[1]

    def with_values(self, own: Tensor | None, far: Tensor | None) -> COO:
        if own is None or far is None:
            return self.pattern
        every = [own.flatten().index_select(0, self.own), far.flatten().index_select(0, self.far)]
        return self.pattern.with_values(torch.cat(every).index_select(0, self.sorting))


def joined_pattern(own: SparseFormat, far: SparseFormat, sums_travel: bool) -> JoinedPattern:
    """Columns of ``own``, then those of ``far``."""
    if sums_travel:
        raise UnsupportedError(
            "this partition sends sums of rows, and the entries that they are sums of are on other "
            "ranks",
            expected="a partition in which every rank holds all entries of its rows",
            remedy='partition(..., send="rows")',
        )
    if own.block_shape_or_none is not None or own.ndim != 2:
        raise UnsupportedError(
            f"the entries of a {type(own).__name__} of {own.ndim} dimensions are no edges",
            expected="a matrix of single entries",
            remedy="to_format(GroupCOO) before partition",
        )
    rows = torch.cat([part.pattern().entries().coords[0].long() for part in (own, far)])
    first, second = (part.pattern().entries().coords[1].long() for part in (own, far))
    columns = torch.cat([first, second + own.shape[1]])
    shape = own.shape[0], own.shape[1] + far.shape[1]
    sorting = torch.argsort(rows * shape[1] + columns)
    pattern = COO.from_entries((rows, columns), None, shape, validate=False)
    return JoinedPattern(pattern, _positions(own), _positions(far), sorting)


def _positions(part: SparseFormat) -> Tensor:
    """Where entries are among all positions."""
    mask = part.mask()
    if mask is None:
        return torch.arange(part.stored, device=part.device)
    return mask.reshape(-1).nonzero().squeeze(1)
