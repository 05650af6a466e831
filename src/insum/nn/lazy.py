"""Linear layers that wait for a first call to know their size, as PyG's do."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn

from insum.accepted import COUNT, INTEGER, Accepted, F

#: A number of features, or -1 for what the first call brings.
CHANNELS = Accepted(
    "an integer of at least 0, or -1", lambda v: COUNT.fits(v) or INTEGER.fits(v) and v == -1
)
CHANNEL_PAIR = Accepted(
    "a pair of them",
    lambda v: isinstance(v, tuple | list) and len(v) == 2 and all(map(CHANNELS.fits, v)),
)


def linear_of(channels: int, out: int, *, bias: bool) -> nn.Linear:
    if channels == -1:
        return nn.LazyLinear(out, bias=bias)
    return nn.Linear(channels, out, bias=bias)


def waits(linear: nn.Linear) -> bool:
    """Whether a layer waits for a first call to know its size."""
    return isinstance(linear, nn.LazyLinear) and bool(linear.has_uninitialized_params())


def materialise(linear: nn.Linear, x: Tensor) -> bool:
    """Give a layer that has no size yet that of its weight, where a state was loaded, or that of a
    call; whether its weight was drawn.
    """
    if not isinstance(linear, nn.LazyLinear) or not isinstance(x, Tensor) or x.dim() < 1:
        return False
    drawn, held = waits(linear), linear.weight
    size = x.shape[-1] if drawn else held.shape[-1]
    with torch.no_grad():
        linear(torch.zeros(0, size, dtype=held.dtype, device=held.device))
    return drawn


class Waiting:
    """A layer that waits for its size, as it is, so that it can wait again after a failed call."""

    def __init__(self, linear: nn.LazyLinear) -> None:
        self.linear = linear
        self.held = dict(linear.__dict__)
        # hooks are found again in the very dictionaries that they were put in
        self.inside = {n: dict(v) for n, v in self.held.items() if isinstance(v, dict)}

    def again(self) -> None:
        linear = self.linear
        for parameter in linear.parameters():
            if not isinstance(parameter, nn.UninitializedParameter):
                parameter.data = parameter.data.new_empty(0)
                parameter.__class__ = nn.UninitializedParameter  # type: ignore[assignment]
        linear.__class__ = nn.LazyLinear
        linear.__dict__.clear()
        linear.__dict__.update(self.held)
        for name, inside in self.inside.items():
            held = self.held[name]
            held.clear()
            held.update(inside)


def sized_by_success(forward: F) -> F:
    """A layer that waits for its size gets that of a call that succeeds."""

    @functools.wraps(forward)
    def call(layer: nn.Module, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(layer, *args, **named)
        waiting = [Waiting(one) for one in layer.children() if waits(one)]  # type: ignore[arg-type]
        try:
            return forward(layer, *args, **named)
        except BaseException:
            for one in waiting:
                one.again()
            raise

    return cast(F, call)
