"""Statements over DTensors against one process: value, first and second gradient; and drawn
statements under drawn placements.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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
import insum.distributed
from insum.call.request import request_of
from insum.lang.expr import tensors_of
from insum.lang.parser import parse
from insum.ops.encoding import encode
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


def placements_of(tensor: Tensor, mesh: DeviceMesh, source: random.Random) -> list[Placement]:
    """For every dimension of a mesh: whole, cut, or, of what is no index, a part of a sum."""
    found: list[Placement] = []
    for _ in range(mesh.ndim):
        kind = source.randrange(5)
        if kind >= 2 and tensor.dim():
            found.append(Shard(source.randrange(tensor.dim())))
        elif kind == 1 and (tensor.is_floating_point() or tensor.is_complex()):
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
            shares = torch.arange(1.0, mesh.size(dim) + 1).to(tensor.dtype)
            cut = [Shard(0) if d == dim else Replicate() for d in range(mesh.ndim)]
            own = distribute_tensor(shares / shares.sum(), mesh, cut, src_data_rank=None)
            local = local * own.to_local().sum()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=found.shape, stride=found.stride()
    )


def whole(tensor: Any) -> Tensor:
    """What all ranks have, of a DTensor; simulated ranks must agree."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    parts = getattr(full, "_local_tensors", None)
    if parts is None:
        return full
    first, *others = parts.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
    return first


#: What torch's simulator says of parts that are cut once more, into fewer on some ranks.
NOT_SIMULATED = "'NoneType' object has no attribute 'requires_grad'"

Result = Callable[[Mapping[str, Any]], Tensor]
Place = Callable[[Tensor], Tensor]


def derivatives(run: Result, values: Mapping[str, Any], place: Place, most: int = 2) -> list[Any]:
    """A value, and gradients of all that has any up to an order, each along a fixed direction;
    None where there is none. The directions of the first are arguments of the second.
    """
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    wrt = [v for v in tensors if v.is_floating_point() or v.is_complex()]
    found: list[Any] = [run(values)]
    last = found
    for order in range(most):
        known = [one for one in last if one is not None and one.requires_grad]
        if not known:
            break
        along = [place(direction(one.shape, one.dtype, order + k)) for k, one in enumerate(known)]
        last = list(torch.autograd.grad(known, wrt, along, create_graph=True, allow_unused=True))
        found += last
        wrt += along
    return found


def direction(shape: Sequence[int], dtype: torch.dtype, start: int) -> Tensor:
    """Numbers without a pattern, the same everywhere."""
    size = math.prod(shape)
    return (torch.arange(size, dtype=torch.float64) * 1.7 + start).cos().reshape(shape).to(dtype)


def compare(
    case: Case,
    mesh: DeviceMesh,
    source: random.Random,
    simulated: AbstractContextManager[object],
    *,
    op: bool = False,
) -> str:
    """Run a case plainly and placed, and raise where they differ; says how it was placed. ``op``:
    the op itself is called.
    """
    values = {n: v for n, v in case.values.items() if n != case.target or n in _reads(case)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    where = {name: placements_of(value, mesh, source) for name, value in tensors.items()}
    told = f"{case!r}\nplaced {where} on {tuple(mesh.shape)}"
    sizes: Any = dict(case.sizes)
    if case.target in case.values and case.target not in values:
        sizes[case.target] = tuple(case.tensors[case.target].shape)

    def run(values: Mapping[str, Any]) -> Tensor:
        if op:
            request = request_of(case.statement, None, sizes, case.padded)
            called: Tensor = torch.ops.insum.contract(*encode(request, values))
            return called
        return insum.insum(case.statement, sizes=sizes, padded=case.padded, **values)

    def spread(tensor: Tensor, name: str = "") -> Tensor:
        places = where[name] if name else placements_of(tensor, mesh, source)
        return leaf(placed(tensor, mesh, places).detach())

    if tensors:
        plain = {name: leaf(value.detach().clone()) for name, value in tensors.items()}
        device = next(iter(plain.values())).device
        want = derivatives(run, {**values, **plain}, lambda one: leaf(one.to(device)))
        try:
            with simulated:
                parts = {name: spread(value, name) for name, value in tensors.items()}
                same(derivatives(run, {**values, **parts}, spread), want)
        except Exception as error:
            if str(error) != NOT_SIMULATED:
                raise AssertionError(told) from error
            told += ", which cannot be simulated"
    return told


def leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def same(got: list[Any], want: list[Any]) -> None:
    """Raise where they differ; no gradient and zeros are the same."""
    assert len(got) == len(want)
    for one, other in zip(got, want):
        if one is None or other is None:
            left = one if other is None else other
            assert left is None or not whole(left.detach()).any()
        else:
            torch.testing.assert_close(whole(one.detach()), other.detach(), equal_nan=True)


def _reads(case: Case) -> set[str]:
    return set(tensors_of(parse(case.statement)))
