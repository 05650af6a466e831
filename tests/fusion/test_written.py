"""Tensors that a program reads and then writes to, as when edges are put in another order at the
end of a step: the backward pass uses what the forward pass has read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum.fusion

from .programs import E, F, N, compiled, graph_of, leaf


def zeros() -> Tensor:
    return torch.zeros(N, F)


def both_ways(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    i, j = torch.cat([edges[0], edges[1]]), torch.cat([edges[1], edges[0]])
    y = zeros().index_add(0, j, x[i] * x[i].detach())
    edges.add_(1).remainder_(N)
    return y


def shifted(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    i, j = (edges[0] + 1) % N, (edges[1] + 2) % N
    y = zeros().index_add(0, j, x[i] * w[:, None])
    edges.zero_()
    return y


def copied(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    i, j = edges.clone()
    y = zeros().index_add(0, j, x[i] * w[:, None])
    edges.copy_(edges.flip(0))
    return y


def relations(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    y = zeros()
    for r in range(2):
        i, j = edges[:, edges[0] % 2 == r]
        y = y + zeros().index_add(0, j, x[i]) * (r + 1)
    edges.add_(1).remainder_(N)
    return y


def means(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    """Masks and degrees, which are computed once where edges stay."""
    y = zeros()
    for r in range(2):
        i, j = edges[:, edges[0] % 2 == r]
        degree = torch.zeros(N).index_add(0, j, torch.ones(j.shape[0])).clamp(min=1)
        y = y + (zeros().index_add(0, j, x[i]) / degree[:, None]).relu()
    edges.add_(1).remainder_(N)
    return y


def numbers(x: Tensor, w: Tensor, edges: Tensor, table: Tensor) -> Tensor:
    """What is gathered from is written to: its rows are there still."""
    y = zeros().index_add(0, edges[1], table[edges[0]] * w[:, None])
    table.add_(1)
    return y + x


def converted(x: Tensor, w: Tensor, edges: Tensor, table: Tensor) -> Tensor:
    y = zeros().index_add(0, edges[1], table.double().float()[edges[0]] * w[:, None])
    table.mul_(2)
    return y + x


def unbound(x: Tensor, w: Tensor, edges: Tensor, other: Tensor) -> Tensor:
    """Gathered through a part of a tensor, which is no longer that."""
    _, j = edges
    i, _ = other.long()
    y = zeros().index_add(0, j, x.detach()[i] * w[:, None])
    other.zero_()
    return y


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Any, ...]]]] = {
    "edges both ways": (both_ways, tuple),
    "edges that are shifted": (shifted, tuple),
    "edges that are copied": (copied, tuple),
    "relations": (relations, tuple),
    "means": (means, tuple),
    "numbers": (numbers, lambda: (torch.randn(N, F),)),
    "numbers, converted": (converted, lambda: (torch.randn(N, F),)),
    "a part of a tensor": (unbound, lambda: (graph_of(seed=3).float(),)),
}


def step(
    run: Callable[..., Tensor], arguments: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """The result, gradients, and what is in the arguments afterwards."""
    own = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    y = run(*own)
    upstream = torch.linspace(-1, 1, y.numel()).view(y.shape)
    leaves = [a for a in own if a.requires_grad]
    gradients = torch.autograd.grad(y, leaves, upstream, allow_unused=True)
    return y.detach(), list(gradients), [a.detach() for a in own]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_that_writes_to_what_it_has_read(name: str) -> None:
    program, more = PROGRAMS[name]
    arguments = leaf(N, F), leaf(E), graph_of(), *more()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run, graphs = compiled(program)
        for _ in range(2):
            for got, wanted in zip(step(run, arguments), step(program, arguments), strict=True):
                assert_close(got, wanted)
    assert insum.fusion.report().fused, str(insum.fusion.report())
    assert len(graphs) == 2


def test_edges_that_stay_are_computed_from_in_the_backward_pass_too() -> None:
    """Only what is written to is saved."""

    def program(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
        i, j = torch.cat([edges[0], edges[1]]), torch.cat([edges[1], edges[0]])
        return zeros().index_add(0, j, x[i] * x[i].detach())

    run, graphs = compiled(program)
    arguments = leaf(N, F), leaf(E), graph_of()
    for got, wanted in zip(step(run, arguments), step(program, arguments), strict=True):
        assert_close(got, wanted)
    assert not any(n.target is torch.ops.aten.cat.default for g in graphs for n in g.graph.nodes)
