"""Programs that are one statement become one op, forward and backward, and give what they gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nn
from torch import Tensor

import insum.fusion

from .programs import E, F, N, agrees, compiled, counts, graph_of, leaf

src, dst = (row.clone() for row in graph_of())
zeros = lambda x, *shape: x.new_zeros(*shape)

#: name -> program, arguments, ops in the forward and in the backward graph.
CHAINS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Any, ...]], list[int]]] = {
    "gather and scatter": (
        lambda x: zeros(x, N, F).index_add(0, dst, x[src]),
        lambda: (leaf(N, F),),
        [1, 1],
    ),
    "weights per edge": (
        lambda x, w: zeros(x, N, F).index_add(0, dst, x[src] * w[:, None]),
        lambda: (leaf(N, F), leaf(E)),
        [1, 2],
    ),
    "index_select": (
        lambda x, w: zeros(x, N, F).index_add_(0, dst, x.index_select(0, src) * w[:, None]),
        lambda: (leaf(N, F), leaf(E)),
        [1, 2],
    ),
    "scatter_add": (
        lambda x, w: zeros(x, N, F).scatter_add_(0, dst[:, None].expand(E, F), w[:, None] * x[src]),
        lambda: (leaf(N, F), leaf(E)),
        [1, 2],
    ),
    "scatter_reduce": (
        lambda x: zeros(x, N, F).scatter_reduce(0, dst[:, None].expand(E, F), x[src], "sum"),
        lambda: (leaf(N, F),),
        [1, 1],
    ),
    "index_put": (
        lambda x, w: zeros(x, N, F).index_put_((dst,), x[src] * w[:, None], accumulate=True),
        lambda: (leaf(N, F), leaf(E)),
        [1, 2],
    ),
    "gather op": (
        lambda x: zeros(x, N, F).index_add(0, dst, x.gather(0, src[:, None].expand(E, F))),
        lambda: (leaf(N, F),),
        [1, 1],
    ),
    "another dimension": (
        lambda x, w: zeros(x, F, N).index_add(1, dst, x.t()[:, src] * w),
        lambda: (leaf(N, F), leaf(E)),
        [1, 2],
    ),
    "two scattered dimensions": (
        lambda a, b: torch.zeros(N, N).index_put(
            (dst, src), (a[dst] * b[src]).sum(-1), accumulate=True
        ),
        lambda: (leaf(N, F), leaf(N, F)),
        [1, 2],
    ),
    "matrix per program": (
        lambda x, w: zeros(x, N, 5).index_add(0, dst, x[src] @ w),
        lambda: (leaf(N, F), leaf(F, 5)),
        [1, 2],
    ),
    "matrix per relation": (
        lambda x, w: zeros(x, N, 5).index_add(
            0, dst, torch.bmm(x[src].unsqueeze(1), w[dst % 3]).squeeze(1)
        ),
        lambda: (leaf(N, F), leaf(3, F, 5)),
        [1, 2],
    ),
    "einsum": (
        lambda x, w: zeros(x, N, 5).index_add(0, dst, torch.einsum("ei,eij->ej", x[src], w[src])),
        lambda: (leaf(N, F), leaf(N, F, 5)),
        [1, 2],
    ),
    "einsum over heads": (
        lambda x, w: zeros(x, N, 2, 3).index_add(0, dst, torch.einsum("ehc,hcd->ehd", x[src], w)),
        lambda: (leaf(N, 2, 4), leaf(2, 4, 3)),
        [1, 2],
    ),
    "dot products of edges": (
        lambda a, b: (a[src] * b[dst]).sum(-1),
        lambda: (leaf(N, F), leaf(N, F)),
        [1, 2],
    ),
    "attention": (
        lambda q, k, v: zeros(q, N, F).index_add(
            0, dst, v[src] * (q[dst] * k[src]).sum(-1, keepdim=True).exp()
        ),
        lambda: (leaf(N, F), leaf(N, F), leaf(N, F)),
        [2, 4],
    ),
    "embeddings": (
        lambda t, u: torch.bmm(
            nn.embedding(src, t).unsqueeze(1), nn.embedding(dst, u).unsqueeze(2)
        ).squeeze(),
        lambda: (leaf(N, F), leaf(N, F)),
        [1, 2],
    ),
    "bag of embeddings": (
        lambda t, w: (nn.embedding(src.view(5, 6), t) * w[:, :, None]).sum(1),
        lambda: (leaf(N, F), leaf(5, 6)),
        [1, 2],
    ),
    "added to what is there": (
        lambda x, w, y: y.index_add(0, dst, x[src] * w[:, None]),
        lambda: (leaf(N, F), leaf(E), leaf(N, F)),
        [1, 2],
    ),
    "negated and scaled": (
        lambda x, w: zeros(x, N, F).index_add(0, dst, -0.5 * x[src] * w[:, None]),
        lambda: (leaf(N, F), leaf(E)),
        [1, 2],
    ),
    "selected and sliced": (
        lambda x, w: zeros(x, N, 3).index_add(0, dst, x[1][src, 1:4] * w[:, None]),
        lambda: (leaf(2, N, F), leaf(E)),
        [1, 2],
    ),
    "result of size 1": (
        lambda x, w: zeros(x, N, 1).index_add(0, dst, x[src] * w[:, None]),
        lambda: (leaf(N, 1), torch.randn(E)),
        [1, 1],
    ),
    "a part of the weights": (
        lambda x, w: zeros(x, N, F).index_add(0, dst, x[src] * w[:E, None]),
        lambda: (leaf(N, F), leaf(2 * E)),
        [1, 2],
    ),
    "split heads": (
        lambda x, w: (
            zeros(x, N, 2, 4).index_add(0, dst, x.view(N, 2, 4)[src] * w[:, :, None]).view(N, F)
        ),
        lambda: (leaf(N, F), leaf(E, 2)),
        [1, 2],
    ),
    "merged heads": (
        lambda x, w: zeros(x, N, F).index_add(
            0, dst, (x.view(N, 2, 4)[src] * w[:, :, None]).view(E, F)
        ),
        lambda: (leaf(N, F), leaf(E, 2)),
        [1, 2],
    ),
    "half precision": (
        lambda x, w: zeros(x, N, F).index_add(0, dst, x[src] * w[:, None]),
        lambda: (leaf(N, F, dtype=torch.bfloat16), leaf(E, dtype=torch.bfloat16)),
        [1, 2],
    ),
    "double precision": (
        lambda x, w: zeros(x, N, F).index_add(0, dst, x[src] * w[:, None]),
        lambda: (leaf(N, F, dtype=torch.float64), leaf(E, dtype=torch.float64)),
        [1, 2],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_one_op_forward_and_backward(name: str) -> None:
    program, make, expected = CHAINS[name]
    run, graphs = compiled(program, fullgraph=True)
    tolerance = {"rtol": 0.05, "atol": 0.1} if "half" in name else {}
    agrees(program, run, make(), **tolerance)
    assert counts(graphs) == expected, str(insum.fusion.report())


@pytest.mark.parametrize(
    "name",
    [
        "weights per edge",
        "matrix per program",
        "attention",
        "scatter_add",
        "added to what is there",
    ],
)
def test_without_gradients(name: str) -> None:
    program, make, expected = CHAINS[name]
    run, graphs = compiled(program, fullgraph=True)
    arguments = [a.detach() for a in make()]
    agrees(program, run, arguments)
    assert counts(graphs) == expected[:1]


def test_nothing_of_the_size_of_the_messages_is_kept_for_the_backward_pass() -> None:
    many = 400
    edges = graph_of(N, many)
    run, graphs = compiled(
        lambda x, w, edges: zeros(x, N, F).index_add(0, edges[1], x[edges[0]] * w[:, None])
    )
    run(leaf(N, F), leaf(many), edges).sum().backward()
    saved = [
        n.meta["val"]
        for n in graphs[0].graph.find_nodes(op="output")[0].all_input_nodes
        if isinstance(n.meta.get("val"), Tensor)
    ]
    assert max(t.numel() for t in saved if t.is_floating_point()) == many
    assert max(t.numel() for t in saved) == 2 * many  # the edges themselves


def test_a_chain_of_steps_adds_in_place() -> None:
    """The offsets of a convolution: the first step makes the result, the others add to it."""
    edges = [graph_of(seed=z) for z in range(3)]

    def convolution(x: Tensor, *w: Tensor) -> Tensor:
        out = zeros(x, N, 5)
        for z, (i, o) in enumerate(edges):
            out.index_add_(0, o, x[i] @ w[z])
        return out

    run, graphs = compiled(convolution, fullgraph=True)
    agrees(convolution, run, (leaf(N, F), *[leaf(F, 5) for _ in range(3)]), rtol=1e-4, atol=1e-4)
    assert counts(graphs) == [3, 6]
    in_place = [
        sum(str(torch.ops.insum.fused_into_.default) in map(str, n.args) for n in g.graph.nodes)
        for g in graphs
    ]
    assert in_place == [2, 2]


def test_a_product_that_is_needed_elsewhere_is_read_from_where_it_is() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x[src] * x[dst]).sum(-1)
        return zeros(x, N, F).index_add(0, dst, scores[:, None] * x[src]), scores

    run, graphs = compiled(program, fullgraph=True)
    x, w = torch.randn(N, F), torch.randn(E)
    for a, b in zip(run(x, w), program(x, w), strict=True):
        torch.testing.assert_close(a, b)
    assert counts(graphs) == [2]
