"""Drawn programs: gathers, views, products and scatters in random order agree with eager in values
and gradients, whatever is fused.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

import insum.fusion

from .programs import compiled

NODES, EDGES, HEADS, WIDTH = 6, 11, 2, 3


Step = Callable[..., Tensor]


def zeros(x: Tensor) -> Tensor:
    return x.new_zeros(NODES, HEADS, WIDTH)


def spread(index: Tensor) -> Tensor:
    return index.view(-1, 1, 1).expand(EDGES, HEADS, WIDTH)


GATHERS: list[Step] = [
    lambda x, i: x[i],
    lambda x, i: x.index_select(0, i),
    lambda x, i: x.gather(0, spread(i)),
    lambda x, i: x.transpose(0, 1)[:, i].transpose(0, 1),
    lambda x, i: x.view(NODES, -1)[i].view(EDGES, HEADS, WIDTH),
    lambda x, i: x[i - NODES],
    lambda x, i: torch.nn.functional.embedding(i, x.reshape(NODES, -1)).view(EDGES, HEADS, WIDTH),
]
#: Of messages, the two tensors of nodes, weights per edge, per edge and head, matrices, a vector,
#: and the edges.
CHANGES: list[Step] = [
    lambda z, x, y, w, a, m, b, src, dst: z * w[:, None, None],
    lambda z, x, y, w, a, m, b, src, dst: a.unsqueeze(-1) * z,
    lambda z, x, y, w, a, m, b, src, dst: z * y[dst],
    lambda z, x, y, w, a, m, b, src, dst: torch.einsum("ehc,hcd->ehd", z, m),
    lambda z, x, y, w, a, m, b, src, dst: z @ m[0],
    lambda z, x, y, w, a, m, b, src, dst: z * (x[src] * y[dst]).sum(-1, keepdim=True),
    lambda z, x, y, w, a, m, b, src, dst: -z * b,
    lambda z, x, y, w, a, m, b, src, dst: z[:, :1] * a[:, :, None],
    lambda z, x, y, w, a, m, b, src, dst: z + b,
    lambda z, x, y, w, a, m, b, src, dst: (z * 0.5).sigmoid(),
    lambda z, x, y, w, a, m, b, src, dst: functional.leaky_relu(z + y[dst], 0.2),
    lambda z, x, y, w, a, m, b, src, dst: functional.gelu(z) * a[:, :, None] + 1,
    lambda z, x, y, w, a, m, b, src, dst: torch.where(z > y[dst], z, 2 * x[src]),
    lambda z, x, y, w, a, m, b, src, dst: torch.maximum(z.clamp(-1, 0.5), -y[dst]),
    lambda z, x, y, w, a, m, b, src, dst: z / (1 + y[dst] ** 2) - w[:, None, None],
    lambda z, x, y, w, a, m, b, src, dst: functional.softplus(z - x[dst]).log1p(),
    lambda z, x, y, w, a, m, b, src, dst: z.masked_fill((z < 0) | (y[src] > 1), 0.5),
    lambda z, x, y, w, a, m, b, src, dst: (1 - z) * torch.exp(-((z - b) ** 2)),
    lambda z, x, y, w, a, m, b, src, dst: functional.elu(functional.silu(z) * y[dst]),
    lambda z, x, y, w, a, m, b, src, dst: torch.sin(z) * torch.rsqrt(1 + x[dst].abs()),
    lambda z, x, y, w, a, m, b, src, dst: z * (z != y[dst]) * (a[:, :, None] >= 0),
]
SCATTERS: list[Step] = [
    lambda z, x, src, dst: zeros(x).index_add(0, dst, z),
    lambda z, x, src, dst: zeros(x).scatter_add_(0, spread(dst), z),
    lambda z, x, src, dst: zeros(x).index_put_((dst,), z, accumulate=True),
    lambda z, x, src, dst: x.index_add(0, dst, z),
    lambda z, x, src, dst: z.sum(-1),
    lambda z, x, src, dst: z.sum((0, 2)),
    lambda z, x, src, dst: x.new_zeros(NODES, HEADS * WIDTH).index_add(
        0, dst, z.reshape(EDGES, -1)
    ),
    lambda z, x, src, dst: zeros(x).index_add(0, dst, z) + z.sum(0),
    lambda z, x, src, dst: x.new_zeros(NODES, NODES, HEADS).index_put(
        (dst, src), z.sum(-1), accumulate=True
    ),
    lambda z, x, src, dst: zeros(x).scatter_reduce(0, spread(dst), z, "amax", include_self=False),
]


def drawn(seed: int) -> tuple[Step, tuple[Tensor, ...], Tensor]:
    """A program, its leaves, and edges."""
    choose = random.Random(seed)
    gather, changes, scatter = (
        choose.choice(GATHERS),
        choose.choices(CHANGES, k=choose.randrange(4)),
        choose.choice(SCATTERS),
    )
    first, row = choose.randrange(2), choose.randrange(2)

    def program(
        x: Tensor, y: Tensor, w: Tensor, a: Tensor, m: Tensor, b: Tensor, edges: Tensor
    ) -> Tensor:
        src, dst = edges[0], edges[1]
        z = gather(y if first else x, dst if row else src)
        for change in changes:
            z = change(z, x, y, w, a, m, b, src, dst)
        return scatter(z, x, src, dst)

    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(
        *shape, generator=generator, dtype=torch.float64
    ).requires_grad_()
    shapes = (
        (NODES, HEADS, WIDTH),
        (NODES, HEADS, WIDTH),
        (EDGES,),
        (EDGES, HEADS),
        (HEADS, WIDTH, WIDTH),
        (WIDTH,),
    )
    return (
        program,
        tuple(make(*shape) for shape in shapes),
        torch.randint(0, NODES, (2, EDGES), generator=generator),
    )


def run_drawn(seed: int) -> int:
    """Compare one program; how many statements were made of it."""
    torch._dynamo.reset()
    insum.fusion.clear()
    program, leaves, edges = drawn(seed)
    run, _ = compiled(program, dynamic=[None, True][seed % 2])
    expected, result = (f(*leaves, edges) for f in (program, run))
    assert_close(result, expected)
    upstream = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).reshape(expected.shape)
    wanted, got = (
        torch.autograd.grad(out, leaves, upstream, allow_unused=True) for out in (expected, result)
    )
    for a, b in zip(got, wanted, strict=True):
        assert_close(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b)
    return len(insum.fusion.report().fused)


@pytest.mark.parametrize("block", range(3))
def test_drawn_programs(block: int) -> None:
    assert sum(run_drawn(seed) for seed in range(8 * block, 8 * block + 8)) >= 8
