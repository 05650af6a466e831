"""From DTensors to their local parts and back, with gradients of every order: torch's own ways
there end at the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from insum.compat.placed import Wrapper, local_of

#: Dtypes that not every backend of torch.distributed sends.
_UNSENT = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})


def sent(value: Any, placements: Sequence[Placement]) -> Any:
    """A DTensor at another placement, without a history; what cannot be sent travels in a wider
    dtype.
    """
    if tuple(value.placements) == tuple(placements):
        return value
    if value.dtype in _UNSENT:
        return value.to(torch.int64).redistribute(placements=placements).to(value.dtype)
    return value.redistribute(placements=placements)


def moved(value: Any, placements: Sequence[Placement]) -> Any:
    """A DTensor at another placement."""
    if tuple(value.placements) == tuple(placements):
        return value
    if torch.compiler.is_compiling():
        return value.redistribute(placements=placements)
    return _Moved.apply(value, tuple(placements))  # type: ignore[no-untyped-call]


def opened(value: Any, gradient: Sequence[Placement]) -> Tensor:
    """The local part of a DTensor, whose gradients are placed so: `Partial` where each rank has
    its own share of the gradient of what all of them have.
    """
    if torch.compiler.is_compiling():
        local: Tensor = value.to_local(grad_placements=gradient)
        return local
    found: Tensor = _Opened.apply(value, tuple(gradient))  # type: ignore[no-untyped-call]
    return found


def closed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Any:
    """A DTensor of this shape out of local parts."""
    if torch.compiler.is_compiling():
        return DTensor.from_local(local, mesh, placements, run_check=False)
    gradient = tuple([_gradient_of(p) for p in placements])
    given = mesh, tuple(placements), tuple(shape), gradient
    return _Closed.apply(local, *given)  # type: ignore[no-untyped-call]


def _gradient_of(placement: Placement) -> Placement:
    """Where the gradient of a result is needed: of a sum, on every rank that has a part of it."""
    return Replicate() if placement.is_partial() else placement


class _Moved(torch.autograd.Function):
    """The same numbers, and so are the gradients, wherever they are."""

    @staticmethod
    def forward(ctx: Any, value: DTensor, placements: tuple[Placement, ...]) -> Tensor:
        return value.redistribute(placements=placements)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0], None


class _Opened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: DTensor, gradient: tuple[Placement, ...]) -> Tensor:
        ctx.mesh, ctx.gradient = value.device_mesh, gradient
        ctx.placements, ctx.shape = tuple(value.placements), tuple(value.shape)
        return local_of(value).detach()  # autograd writes into what is returned

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.mesh, ctx.gradient, ctx.shape, ctx.placements
        return _Closed.apply(upstream[0], *given), None  # type: ignore[no-untyped-call]


class _Closed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: tuple[int, ...],
        gradient: tuple[Placement, ...],
    ) -> Tensor:
        ctx.placements, ctx.gradient = placements, gradient
        return Wrapper(mesh, placements, shape)(local.detach())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        here = moved(upstream[0], ctx.gradient)
        return opened(here, ctx.placements), None, None, None, None
