"""Drawn statements under drawn placements against one process: value, first and second gradient."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import insum
from insum.lang.expr import tensors_of
from insum.lang.parser import parse
from insum.ops import encode
from insum.request import request_of
from insum.testing import Case

#: What statements are drawn from: smooth, small, some of more than one element for each rank.
OPTIONS: dict[str, Any] = {
    "differentiable": True,
    "dtypes": (torch.float64,),
    "max_points": 64,
    "max_elements": 36,
    "max_extent": 5,
    "strided": False,
}


@dataclass(frozen=True)
class Derivatives:
    """A value, its gradients, and theirs."""

    value: Tensor
    first: tuple[Tensor, ...]
    second: tuple[Tensor | None, ...]


def placements_of(tensor: Tensor, mesh: DeviceMesh, source: random.Random) -> list[Placement]:
    """For every dimension of a mesh: whole, cut, or, of what is no index, a part of a sum."""
    found: list[Placement] = []
    for _ in range(mesh.ndim):
        kind = source.randrange(5)
        if kind >= 2 and tensor.dim():
            found.append(Shard(source.randrange(tensor.dim())))
        elif kind == 1 and tensor.is_floating_point():
            found.append(Partial())
        else:
            found.append(Replicate())
    return found


def placed(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """A tensor at a placement; parts of a sum are different on every rank."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    found = distribute_tensor(tensor.detach(), mesh, whole, src_data_rank=None)
    local = found.to_local()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            shares = torch.arange(1.0, mesh.size(dim) + 1, dtype=tensor.dtype)
            cut = [Shard(0) if d == dim else Replicate() for d in range(mesh.ndim)]
            own = distribute_tensor(shares / shares.sum(), mesh, cut, src_data_rank=None)
            local = local * own.to_local().sum()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=found.shape, stride=found.stride()
    )


def whole(tensor: Any) -> Tensor:
    """What all ranks have, of a DTensor; of simulated ranks, which must agree."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.reconcile() if hasattr(full, "reconcile") else full


def derivatives(case: Case, values: Mapping[str, Any], *, op: bool = False) -> Derivatives:
    """The result of a statement and its derivatives, of what has any; ``op``: of the op itself."""
    wrt = [values[name] for name in case.inputs if name != case.target]
    sizes: Any = dict(case.sizes) or None
    if op:
        request = request_of(case.statement, None, sizes, case.padded)
        value = torch.ops.insum.contract(*encode(request, values))
    else:
        value = insum.insum(case.statement, sizes=sizes, padded=case.padded, **values)
    if not value.requires_grad:
        return Derivatives(value, (), ())
    first = torch.autograd.grad(
        (value * value.sin()).sum(), wrt, create_graph=True, materialize_grads=True
    )
    total = sum((g * g).sum() for g in first)
    second = (
        torch.autograd.grad(total, wrt, allow_unused=True) if total.requires_grad else (None,)
    )
    return Derivatives(value, first, second)


def compare(
    case: Case,
    mesh: DeviceMesh,
    source: random.Random,
    simulated: AbstractContextManager[object],
    *,
    op: bool = False,
) -> str:
    """Run a case plainly and placed, and raise where they differ; says how it was placed."""
    values = {n: v for n, v in case.values.items() if n != case.target or n in _reads(case)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    where = {name: placements_of(value, mesh, source) for name, value in tensors.items()}
    told = f"{case!r}\nplaced {where} on {tuple(mesh.shape)}"
    if not tensors:
        return told
    if case.target in case.values and case.target not in values:
        sizes = {**case.sizes, case.target: tuple(case.tensors[case.target].shape)}
        case = Case(case.statement, case.values, sizes, case.padded)
    plain = {name: _leaf(value.detach().clone()) for name, value in tensors.items()}
    want = derivatives(case, {**values, **plain})
    try:
        with simulated:
            spread = {n: _leaf(placed(v, mesh, where[n]).detach()) for n, v in tensors.items()}
            _same(derivatives(case, {**values, **spread}, op=op), want)
    except Exception as error:
        raise AssertionError(told) from error
    return told


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _same(got: Derivatives, want: Derivatives) -> None:
    pairs = zip((got.value, *got.first, *got.second), (want.value, *want.first, *want.second))
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(whole(one.detach()), other.detach(), equal_nan=True)


def _reads(case: Case) -> set[str]:
    return set(tensors_of(parse(case.statement)))
