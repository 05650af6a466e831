"""Columns in another order: one launch, and one for the gradient, which is the order back.

Split into terms, transposed and put together again, the same takes a launch and several calls for
each term, forward and backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum.call import prepared
from insum.compat.autograd import plain_apply
from insum.compat.calls import is_plain_call
from insum.compat.contexts import untracked
from insum.compat.many import is_batched
from insum.compat.streams import is_recorded
from insum.nn.irreps import Irreps
from insum.nn.mixing import columns_of


@dataclass(frozen=True)
class Reordering:
    """``places``: of every column of the result, which one of the given it is; each is one.

    >>> Reordering((2, 0, 1)).back.places
    (1, 2, 0)
    """

    places: tuple[int, ...]
    #: The order and the one back as tensors, by device; made when they are asked for.
    _orders: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}  # devices are another process's

    @property
    def back(self) -> Reordering:
        order = sorted(range(len(self.places)), key=self.places.__getitem__)
        return Reordering(tuple(order))

    def __call__(self, x: Tensor) -> Tensor:
        """Rows (b, columns) with their columns in this order."""
        found: Tensor = _apply(self._on(x.device), x)
        return found

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        found = self._orders.get(device)
        if found is None:
            with untracked():
                orders = torch.tensor([self.places, self.back.places], device=device)
                found = self._orders[device] = orders[0], orders[1]
        return found


@functools.lru_cache(maxsize=256)
def component_order(irreps: Irreps) -> Reordering:
    """From terms as (multiplicity, components), behind each other, to (components of all terms,
    multiplicity), where all have one.

    >>> component_order(Irreps.of("2x0e + 2x1o")).places
    (0, 1, 2, 5, 3, 6, 4, 7)
    """
    return Reordering(
        tuple(
            one.start + channel * one.channel_stride + component
            for one in columns_of(irreps)
            for component in range(one.components)
            for channel in range(one.channels)
        )
    )


@functools.lru_cache(maxsize=256)
def irrep_order(irreps: Irreps) -> Reordering:
    """The way back from `component_order`."""
    return component_order(irreps).back


@functools.lru_cache(maxsize=256)
def channel_order(irreps: Irreps) -> Reordering:
    """From the same to (multiplicity, components of all terms).

    >>> channel_order(Irreps.of("2x0e + 2x1o")).places
    (0, 2, 3, 4, 1, 5, 6, 7)
    """
    (channels,) = {mul for mul, _ in irreps}
    return Reordering(
        tuple(
            one.start + channel * one.channel_stride + component
            for channel in range(channels)
            for one in columns_of(irreps)
            for component in range(one.components)
        )
    )


def in_order(order: Callable[[Irreps], Reordering], irreps: Irreps, x: Tensor) -> Tensor | None:
    """Rows with their columns in an order of irreps, where calls are what takes time: on a GPU, and
    nothing looks at them.
    """
    if not prepared.kernels_look_on(x.device) or not is_plain_call((x,)):
        return None
    found = order(irreps)
    if x.device not in found._orders and is_recorded(x.device):
        return None
    return found(x)


class _Reordered(torch.autograd.Function):
    """``orders``: the one to take, and the one back."""

    @staticmethod
    def forward(ctx: Any, orders: Sequence[Tensor], x: Tensor) -> Tensor:
        ctx.orders = orders
        return x.index_select(1, orders[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        order, back = ctx.orders
        if torch.is_grad_enabled() and not is_batched(gradient):
            return None, _apply((back, order), gradient)
        return None, gradient.index_select(1, back)


_apply = plain_apply(_Reordered)
