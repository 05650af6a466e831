"""Rows and columns in an order of their own: the order that was asked for, and entries in it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from insum.accepted import INTEGER_DTYPES
from insum.distributed.cuts import Cuts
from insum.distributed.division import PartitionSpec
from insum.distributed.ordering import reverse_cuthill_mckee
from insum.errors import BindingError, UnsupportedError
from insum.formats import entries as E


def ordered_entries(
    entries: E.Entries, spec: PartitionSpec, order: Any
) -> tuple[E.Entries, Tensor | None]:
    """Entries in their new order, and that order, row by row."""
    return renumbered_entries(entries, spec, order_of(entries, spec, order))


def renumbered_entries(
    entries: E.Entries, spec: PartitionSpec, order: Tensor | None
) -> tuple[E.Entries, Tensor | None]:
    if order is None:
        return entries, None
    coords = (*(renumbered(c.long(), order) for c in entries.coords[:2]), *entries.coords[2:])
    changed = replace(entries, coords=coords, order=(), pointers=None)
    return changed, _unit_rows(order, spec.block[0])


def order_of(entries: E.Entries, spec: PartitionSpec, order: Any) -> Tensor | None:
    """The order of units, as the old unit at each new place."""
    if order is None:
        return None
    even = all(size % b == 0 for size, b in zip(spec.shape, spec.block))
    if not spec.square or spec.block[0] != spec.block[1] or not even:
        raise UnsupportedError(
            f"an order of the rows and columns of a matrix {spec.shape} in blocks {spec.block}",
            expected="a square matrix that square blocks divide",
        )
    units = entries.grid[0]
    if isinstance(order, Tensor):
        return checked_order(order, units, entries.coords[0].device)
    rows, columns = (c.cpu().numpy().astype(np.int64) for c in entries.coords[:2])
    found = reverse_cuthill_mckee(rows, columns, units)
    return torch.from_numpy(found).to(entries.coords[0].device)


def checked_order(order: Tensor, units: int, device: torch.device) -> Tensor:
    if order.dtype not in INTEGER_DTYPES or order.shape != (units,):
        raise BindingError(
            f"order is a {str(order.dtype).removeprefix('torch.')} tensor {tuple(order.shape)}",
            expected=f"{units} integers, one for each row (or block of rows)",
        )
    found = order.to(device).long()
    if units and not torch.equal(found.sort().values, torch.arange(units, device=device)):
        raise BindingError(
            "order is no permutation", expected=f"every number from 0 to {units - 1} once"
        )
    return found


def renumbered(units: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return units
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    return place[units]


def _unit_rows(units: Tensor, size: int) -> Tensor:
    if size == 1:
        return units
    return (units[:, None] * size + torch.arange(size, device=units.device)).flatten()


def local_order(order: Tensor | None, cuts: Cuts, rank: int) -> Tensor | None:
    return None if order is None else order[cuts[rank] : cuts[rank + 1]].clone()


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().long().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
