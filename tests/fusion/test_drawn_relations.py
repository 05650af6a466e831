"""Drawn layers over masked relations: sums, means, normalisations, self-loops, weights and largest
values, one or two of them after each other, over edges that stay, are written to, or are others.
They agree with eager in values and gradients, whatever is put together or computed once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from insum import memory

from .programs import compiled

FIRST = int(os.environ.get("INSUM_FUZZ", "0")) * 1000


@pytest.fixture(autouse=True)
def everything_in_one_graph() -> Iterator[None]:
    memory.forget()
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        yield


@dataclass(frozen=True)
class Layer:
    """What a drawn layer does."""

    order: tuple[int, ...]
    scale: str
    loops: bool
    weighted: bool
    largest: bool
    root: bool
    bias: bool
    in_place: bool
    rectified: bool

    def __call__(
        self,
        x: Tensor,
        w: Tensor,
        own: Tensor,
        bias: Tensor,
        edges: Tensor,
        kinds: Tensor,
        weights: Tensor,
    ) -> Tensor:
        out = x.new_zeros(x.shape[0], w.shape[2])
        for place, r in enumerate(self.order):
            step = (
                self.step(
                    x,
                    edges[:, kinds == r],
                    weights[kinds == r] if self.weighted else None,
                    self.largest and not place,
                )
                @ w[r]
            )
            if self.in_place:
                out += step
            else:
                out = out + step
        out = out + x @ own if self.root else out
        out = out + bias if self.bias else out
        return out.relu() if self.rectified else out

    def step(self, x: Tensor, edges: Tensor, weights: Tensor | None, largest: bool) -> Tensor:
        if self.loops:
            edges = torch.cat(
                [edges[:, edges[0] != edges[1]], torch.arange(x.shape[0]).expand(2, -1)], 1
            )
        src, dst = edges
        degree = x.new_zeros(x.shape[0]).index_add(0, dst, x.new_ones(dst.shape[0])).clamp(min=1)
        messages = x[src] if weights is None or self.loops else x[src] * weights[:, None]
        if self.scale == "both sides":
            messages = messages * (degree[src].rsqrt() * degree[dst].rsqrt())[:, None]
        zeros = x.new_zeros(x.shape)
        if largest:
            return zeros.scatter_reduce(
                0, dst[:, None].expand(-1, x.shape[1]), messages, "amax", include_self=False
            )
        total = zeros.index_add(0, dst, messages)
        match self.scale:
            case "mean":
                return total / degree[:, None]
            case "root":
                return total * degree.rsqrt().unsqueeze(1) * 0.5
        return total


def drawn(choose: random.Random) -> tuple[Callable[..., Tensor], int]:
    relations = choose.choice([2, 3, 5])
    order = list(range(relations))
    if choose.random() < 0.3:
        choose.shuffle(order)
    maybe = lambda chance: choose.random() < chance
    scale = choose.choice(["none", "mean", "root", "both sides"])
    layer = Layer(
        tuple(order),
        scale,
        maybe(0.2),
        maybe(0.2),
        maybe(0.15),
        maybe(0.5),
        maybe(0.5),
        maybe(0.3),
        maybe(0.3),
    )
    layers = choose.choice([1, 1, 2])

    def program(x: Tensor, *rest: Tensor) -> Tensor:
        for _ in range(layers):
            x = layer(x, *rest)
        return x

    return program, relations


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 10))
def test_drawn_relations(seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    program, relations = drawn(choose)
    nodes, count, width = (
        choose.choice([7, 16, 20]),
        choose.choice([12, 40, 64]),
        choose.choice([4, 8]),
    )
    run, _ = compiled(program, dynamic=choose.choice([None, None, True]))
    edges, kinds, weights = (
        torch.randint(0, nodes, (2, count)),
        torch.randint(0, relations + 1, (count,)),
        torch.rand(count),
    )
    shapes = (nodes, width), (relations, width, width), (width, width), (width,)
    for step in range(5):
        match step:
            case 2:
                edges[:, : count // 3].random_(0, nodes)
            case 3:
                edges, kinds = (
                    torch.randint(0, nodes, (2, count)),
                    torch.randint(0, relations, (count,)),
                )
            case 4:
                kinds.zero_()
        leaves = [(torch.randn(shape) * 0.4).requires_grad_() for shape in shapes]
        result, expected = (f(*leaves, edges, kinds, weights) for f in (run, program))
        assert_close(result, expected, rtol=1e-3, atol=1e-3)
        upstream = torch.randn_like(expected)
        got, wanted = (
            torch.autograd.grad(out, leaves, upstream, allow_unused=True)
            for out in (result, expected)
        )
        for a, b in zip(got, wanted, strict=True):
            assert_close(
                torch.zeros(()) if a is None else a,
                torch.zeros(()) if b is None else b,
                rtol=1e-3,
                atol=1e-3,
            )
