"""Linear layers that wait for a first call to know their size, as PyG's do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from insum.accepted import COUNT, INTEGER, TENSOR, Accepted, require
from insum.errors import BindingError

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


def _materialise(linear: nn.Linear, x: Tensor) -> bool:
    """Give a layer that has no size yet that of its weight, where a state was loaded, or that of a
    call; whether its weight was drawn.
    """
    require("x", x, TENSOR)
    if not x.dim():
        raise BindingError("x has shape ()", expected="a row for each node: (nodes, features)")
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


def sized_by_success(
    layer: nn.Module,
    sizes: Iterable[tuple[nn.Linear | None, Any]],
    *arguments: Any,
    draw: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Call a layer of which some parts wait for their size: they get that of what they are applied
    to, and keep it where the call succeeds. ``draw`` draws their weights anew.
    """
    eager = not torch.compiler.is_compiling()
    waiting = [Waiting(one) for one in layer.children() if eager and waits(one)]  # type: ignore[arg-type]
    try:
        for linear, x in sizes:
            if isinstance(linear, nn.LazyLinear) and _materialise(linear, x) and draw is not None:
                draw(linear.weight)
        return cast(Tensor, layer.forward(*arguments))
    except BaseException:
        for one in waiting:
            one.again()
        raise
