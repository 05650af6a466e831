"""Chains with functions of gathered and edge values: one statement, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import insum.fusion
from insum.fusion import cost, roots

from .programs import E, N, Somewhere, agrees, compiled, counts, graph_of, leaf
from .programs import F as C

aten = torch.ops.aten
src, dst = (row.clone() for row in graph_of())


def zeros(x: Tensor) -> Tensor:
    return x.new_zeros(N, *x.shape[1:])


def many(x: Tensor, e: Tensor) -> Tensor:
    """Whatever functions torch writes out in simpler ones."""
    m = F.gelu(x[src]) + F.silu(x[src]) * F.elu(e) + F.softplus(x[src]) / (1 + e**2)
    m = m + x[src].clamp(-1, 2) + torch.rsqrt(1 + x[src].square()) * torch.tanh(e).abs()
    return zeros(x).index_add(0, dst, m + torch.sigmoid(x[src]).log1p() * torch.sin(x[src]).cos())


#: name -> program, arguments, fused statements forward and backward
CHAINS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Any, ...]], list[int]]] = {
    "GINE": (
        lambda x, e: zeros(x).index_add(0, dst, F.relu(x[src] + e)),
        lambda: (leaf(N, C), torch.randn(E, C)),
        [1, 1],
    ),
    "GATv2": (
        lambda a, b, w: (F.leaky_relu(a[src] + b[dst], 0.2) * w).sum(-1),
        lambda: (leaf(N, 2, C), leaf(N, 2, C), leaf(2, C)),
        [1, 3],
    ),
    "FiLM": (
        lambda x, g, b: zeros(x).index_add(0, dst, F.relu(g[dst] * x[src] + b[dst])),
        lambda: (leaf(N, C), leaf(N, C), leaf(N, C)),
        [1, 3],
    ),
    "differences": (
        lambda x, e: zeros(x).index_add(0, dst, torch.tanh(x[src] - x[dst]) * e),
        lambda: (leaf(N, C), torch.randn(E, C)),
        [1, 2],
    ),
    "a distance": (
        lambda x: zeros(x[:, 0]).index_add(
            0, dst, torch.exp(-((x[src] - x[dst] + 1) ** 2).sum(1) / 2)
        ),
        lambda: (leaf(N, C),),
        [1, 2],
    ),
    "a filter of edges": (  # computed where it is read, not written first
        lambda x, e, w: zeros(x).index_add(0, dst, x[src] * (F.softplus(e) * w[:, None])),
        lambda: (leaf(N, C), torch.randn(E, C), torch.rand(E)),
        [1, 1],
    ),
    "a condition": (
        lambda x, w: zeros(x).index_add(
            0, dst, torch.where((x[src] > 0) & (x[dst] < 1), x[src], -w[:, None] * x[dst])
        ),
        lambda: (leaf(N, C), torch.randn(E)),
        [1, 2],
    ),
    "many functions": (many, lambda: (leaf(N, C), torch.randn(E, C)), [1, 7]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_values_and_gradients(name: str) -> None:
    program, make, expected = CHAINS[name]
    torch.manual_seed(0)
    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, make())
    assert counts(graphs) == expected, str(insum.fusion.report())


def test_halves_that_were_widened_are_compared_wide() -> None:
    """As a half, 0.1 is below 0.1."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        m = x[src].float()
        return zeros(m).index_add(0, dst, torch.where(m < w[src], m, 2 * w[src]))

    def chosen(x: Tensor, w: Tensor) -> Tensor:  # a condition says nothing of the result's dtype
        m = x[src].float()
        return zeros(m).index_add(0, dst, torch.where(w[src] < 0, m, 2 * m))

    x, w = torch.full((N, C), 0.1, dtype=torch.float16), torch.full((N, C), 0.1)
    for one in (program, chosen):
        insum.fusion.clear()
        run, _ = compiled(one, fullgraph=True)
        torch.testing.assert_close(run(x, w), one(x, w))
        assert "failed" not in str(insum.fusion.report())


def test_a_large_scatter_is_fused_with_nothing_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is computed on the way: Inductor would add it up with atomics."""

    def squares(e: Tensor, ends: Tensor) -> Tensor:
        return e.new_zeros(N, C).index_add(0, ends[1], e * e)

    run, graphs = compiled(squares)
    agrees(squares, run, (leaf(E, C), graph_of()))
    assert counts(graphs) == [0, 0]
    torch._dynamo.reset()
    monkeypatch.setattr(roots, "WORTH_A_SCATTER", E * C)
    run, graphs = compiled(squares)
    agrees(squares, run, (leaf(E, C), graph_of()))
    assert counts(graphs)[0] == 1
    (found,) = [one for one in insum.fusion.report().fused if not one.backward]
    assert found.statement.count("primals_1[i0,i1]") == 2


def relu_of_sum(x: Tensor, e: Tensor, ends: Tensor) -> Tensor:
    """As in GINEConv: the gradient of a message is that of the values of edges, too."""
    return x.new_zeros(x.shape).index_add(0, ends[1], torch.relu(x[ends[0]] + e))


def test_what_a_statement_reads_through_is_not_gathered_twice_forward() -> None:
    """The backward pass needs to know where a message was positive: it finds out itself."""
    run, graphs = compiled(relu_of_sum)
    agrees(relu_of_sum, run, (leaf(N, C), leaf(E, C), graph_of()))
    assert counts(graphs)[0] == 1
    assert aten.index.Tensor not in {n.target for n in graphs[0].graph.nodes}
    assert aten.index.Tensor in {n.target for n in graphs[1].graph.nodes}


def test_what_would_take_more_memory_is_not_computed_again() -> None:
    """Of values of edges that are computed, and needed for nothing else, signs are less."""

    def program(x: Tensor, e: Tensor, ends: Tensor) -> Tensor:
        return relu_of_sum(x, e @ e.new_ones(2, C), ends)

    run, graphs = compiled(program)
    agrees(program, run, (leaf(N, C), leaf(E, 2), graph_of()))
    (returned,) = [n for n in graphs[0].graph.nodes if n.op == "output"]
    assert torch.bool in {n.meta["val"].dtype for n in returned.all_input_nodes}


def test_a_large_message_that_is_needed_too_is_scattered_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, by itself: what counts is what is scattered, not what it is added up to."""
    monkeypatch.setattr(cost, "value_of", lambda node: Somewhere())
    monkeypatch.setattr(roots, "WORTH_A_SCATTER", E * C)
    options = {"insum.rest": "eager"}
    run = torch.compile(relu_of_sum, backend="insum", options=options)
    agrees(relu_of_sum, run, (leaf(N, C), leaf(E, C), graph_of()))
    forward, backward = insum.fusion.report().fused
    assert "relu" in forward.statement and backward.backward
    assert backward.statement == "out[primals_2_0[i0],i1] = where_1[i0,i1]"


@pytest.mark.parametrize("edges", [E, 5 * N])
def test_a_message_that_is_needed_too_is_read_from_tables_that_are_small(edges: int) -> None:
    """The gradient of a value of an edge is a row of the upstream gradient: what is scattered of
    such rows is read where they come from.
    """

    def program(x: Tensor, e: Tensor, ends: Tensor) -> Tensor:
        return x.new_zeros(x.shape).index_add(0, ends[1], x[ends[0]] + e)

    run, graphs = compiled(program)
    agrees(program, run, (leaf(N, C), leaf(edges, C), graph_of(N, edges)))
    assert counts(graphs) == [1, int(edges >= 4 * N)]
    for found in insum.fusion.report().fused:
        if found.backward:
            assert found.statement == "out[primals_2_0[i0],i1] = tangents_1[primals_2_1[i0],i1]"


# --- largest values of functions ------------------------------------------------------------------


def scores(a: Tensor, b: Tensor) -> Tensor:
    return F.leaky_relu(a[src] + b[dst], 0.2)


def largest(values: Tensor) -> Tensor:
    rows = dst[:, None].expand_as(values)
    return zeros(values).scatter_reduce(0, rows, values, "amax", include_self=False)


def softmax(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    found = scores(a, b)
    weights = torch.exp(found - largest(found.detach())[dst])
    total = zeros(weights).index_add(0, dst, weights) + 1e-16
    return zeros(x).index_add(0, dst, weights / total[dst] * x[src])


def extrema() -> list[str]:
    return [one.statement for one in insum.fusion.report().fused if "max=" in one.statement]


def test_largest_values_of_functions() -> None:
    """Nothing of an attention is written for each edge, and a number that is added to a sum is part
    of the statement that gathers it.
    """
    run, graphs = compiled(softmax)
    agrees(softmax, run, (leaf(N, C), leaf(N, C), leaf(N, C)), rtol=1e-4, atol=1e-5)
    (statement,) = extrema()
    assert "max= where(" in statement
    assert counts(graphs)[0] == 3
    nodes = [n for n in graphs[0].graph.nodes if n.op == "call_function"]
    values = [v for n in nodes if isinstance(v := n.meta["val"], Tensor)]
    assert not any(E in v.shape for v in values if v.is_floating_point())
    assert not any(n.target is aten.add.Tensor for n in nodes)


@pytest.mark.interpreter
@pytest.mark.usefixtures("as_on_a_gpu")
def test_largest_values_of_functions_in_kernels() -> None:
    run, _ = compiled(softmax)
    agrees(softmax, run, (leaf(N, C), leaf(N, C), leaf(N, C)), rtol=1e-4, atol=1e-5)
    assert any("max= where(" in one for one in extrema())


def gradient_of_it(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return largest(scores(a, b)) * x


def given_away(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return torch.cat([largest(scores(a, b).detach()), x + a + b])


def reached(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    found = scores(a, b)
    return zeros(x).index_add(0, dst, x[src] * (found == largest(found.detach())[dst]))


@pytest.mark.parametrize("program", [gradient_of_it, given_away, reached])
def test_largest_values_that_are_compared(program: Callable[..., Tensor]) -> None:
    """With what they were looked for among: that is not computed a second time."""
    run, _ = compiled(program)
    arguments = leaf(N, C), leaf(N, C), leaf(N, C)
    agrees(program, run, arguments, rtol=1e-4, atol=1e-5)
    assert extrema() and not any("where(" in one for one in extrema())


def test_a_sum_with_a_number_that_others_read() -> None:
    """It is computed once."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        total = zeros(x).index_add(0, dst, x[src]) + 3
        return total, zeros(x).index_add(0, dst, total[src] * x[src])

    run, graphs = compiled(program)
    x = torch.randn(N, C)
    for got, want in zip(run(x), program(x), strict=True):
        torch.testing.assert_close(got, want)
    assert sum(n.target is aten.add.Tensor for n in graphs[0].graph.nodes) == 1
