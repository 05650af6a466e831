"""Means over edges, as graph libraries write them, are one statement with a share for each edge,
which is computed once; forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import insum.fusion

from .programs import E, F, N, agrees, compiled, graph_of, leaf

ENDS = graph_of()


def mean(x: Tensor, ends: Tensor) -> Tensor:
    src, dst = ends
    total = x.new_zeros(N, F).scatter_add(0, dst[:, None].expand(E, F), x[src])
    count = x.new_zeros(N).scatter_add(0, dst, x.new_ones(E))
    return total / count.clamp(min=1).view(-1, 1).expand(N, F)


def count_of(x: Tensor, ends: Tensor) -> Tensor:
    return x.new_zeros(N).index_add(0, ends[1], x.new_ones(E)).clamp(min=1)


def square_sum(x: Tensor, ends: Tensor) -> Tensor:
    """With as many columns as rows, so that a count fits both."""
    return x.new_zeros(N, N).index_add(0, ends[1], (x @ x.T)[ends[0]])


#: Divisions that are none of a mean, or not of one that is there alone.
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "by a value": lambda x, ends: (
        x.new_zeros(N, F).index_add(0, ends[1], x[ends[0]]) / (2 + x[:, :1].abs())
    ),
    "by columns": lambda x, ends: square_sum(x, ends) / count_of(x, ends),
    "by columns, as a row": lambda x, ends: square_sum(x, ends) / count_of(x, ends)[None],
    "by columns, expanded": lambda x, ends: square_sum(x, ends) / count_of(x, ends).expand(N, N),
    "by columns, and gathered": lambda x, ends: (x @ x.T / count_of(x, ends))[ends[0]],
    "by the middle": lambda x, ends: (
        x.new_zeros(N, N, 2).index_add(0, ends[1], (x @ x.T)[:, :, None].expand(N, N, 2)[ends[0]])
        / count_of(x, ends)[:, None]
    ),
    "each column has its rows": lambda x, ends: (
        x.new_zeros(N, E).scatter_add(0, ends[1].expand(E, E), (x @ x.T)[ends[0]][:, ends[1]])
        / count_of(x, ends)[:, None]
    ),
    "the sum is needed": lambda x, ends: (
        (t := x.new_zeros(N, F).index_add(0, ends[1], x[ends[0]]))
        / x.new_zeros(N).index_add(0, ends[1], x.new_ones(E)).clamp(min=1)[:, None]
        + t.square()
    ),
}


def test_a_mean_is_one_statement() -> None:
    run, graphs = compiled(mean)
    agrees(run, mean, (leaf(N, F), ENDS))
    report = insum.fusion.report()
    assert len(report.fused) == 2 and len(report.moved) == 1 and not report.failed
    assert all("reciprocal" in one.statement for one in report.fused)
    assert all("computed once" in one.notes[0] for one in report.fused)
    names = [str(node.target) for module in graphs for node in module.graph.nodes]
    assert not any("scatter" in name or "div" in name for name in names)


def test_edges_that_change() -> None:
    run, _ = compiled(mean)
    ends, x = ENDS.clone(), leaf(N, F)
    agrees(run, mean, (x, ends))
    ends[1, 3] = (ends[1, 3] + 1) % N
    agrees(run, mean, (x, ends))


def test_a_share_that_is_read_before_and_after() -> None:
    def program(x: Tensor, ends: Tensor) -> Tensor:
        count = count_of(x, ends)[:, None]
        divided = x / count
        means = x.new_zeros(N, F).index_add(0, ends[1], x[ends[0]]) / count
        return divided[ends[0]] * means[ends[1]]

    run, _ = compiled(program)
    agrees(run, program, (leaf(N, F), ENDS))
    assert insum.fusion.report().moved and not insum.fusion.report().failed


@pytest.mark.parametrize("name", OTHERS)
def test_other_divisions(name: str) -> None:
    run, _ = compiled(OTHERS[name])
    agrees(run, OTHERS[name], (leaf(N, F), ENDS))
    assert not insum.fusion.report().failed
    assert not insum.fusion.report().moved


def test_nodes_without_edges_and_no_clamp() -> None:
    def divided(x: Tensor, ends: Tensor) -> Tensor:
        count = x.new_zeros(N).index_add(0, ends[1], x.new_ones(E))[:, None]
        return x.new_zeros(N, F).index_add(0, ends[1], x[ends[0]]) / count

    run, _ = compiled(divided)
    x, ends = leaf(N, F).detach(), ENDS.where(ENDS != 3, 4)
    torch.testing.assert_close(run(x, ends), divided(x, ends), equal_nan=True)
    assert divided(x, ends).isnan().any()


def test_half_precision_is_divided_after_the_sum() -> None:
    run, _ = compiled(mean)
    agrees(run, mean, (leaf(N, F, dtype=torch.bfloat16), ENDS), rtol=2e-2, atol=2e-2)
    assert not insum.fusion.report().moved


# --- means that one operation takes ---------------------------------------------------------------

#: What is there, what comes to it, by which index; how many statements forward.
TAKEN: dict[str, tuple[Callable[..., Tensor], int]] = {
    "scattered": (
        lambda b, x, e, how: b.scatter_reduce(0, e[1][:, None].expand(E, F), x[e[0]], **how),
        1,
    ),
    "functions": (
        lambda b, x, e, how: b.scatter_reduce(
            -2, e[1].view(-1, 1).expand(-1, F), torch.tanh(x[e[0]] * 2), **how
        ),
        1,
    ),
    "by index": (lambda b, x, e, how: b.index_reduce(0, e[1], x[e[0]], **how), 1),
    "some columns": (
        lambda b, x, e, how: b.scatter_reduce(
            0, e[1][:, None].expand(E, F - 1), x[e[0]][:, 1:], **how
        ),
        0,
    ),
    "each column has its rows": (
        lambda b, x, e, how: b.scatter_reduce(
            0, (e[1][:, None] + torch.arange(F)) % N, x[e[0]], **how
        ),
        0,
    ),
    "columns": (
        lambda b, x, e, how: (
            b.T.scatter_reduce(1, e[1].expand(F, E), x[e[0]].T.contiguous(), **how).T
        ),
        0,
    ),
    "numbers": (lambda b, x, e, how: b[:, 0].scatter_reduce(0, e[1], x[e[0], 1], **how), 1),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("name", TAKEN)
def test_means_that_one_operation_takes(name: str, include_self: bool, zero: bool) -> None:
    """Rows that nothing comes to keep what is there."""
    take, statements = TAKEN[name]
    how = {"reduce": "mean", "include_self": include_self}

    def program(base: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        return take(x.new_zeros(N, F) if zero else base, x, ends, how)

    run, _ = compiled(program, dynamic=name == "functions")
    ends = ENDS.where(ENDS != 3, 4)
    agrees(program, run, (leaf(N, F), leaf(N, F), ends))
    report = insum.fusion.report()
    assert sum(not one.backward for one in report.fused) >= statements and not report.failed


def test_a_mean_that_one_operation_takes_is_one_statement() -> None:
    """Into zeros, as graph libraries do it: with shares that are computed once."""
    take = TAKEN["scattered"][0]

    def program(x: Tensor, ends: Tensor) -> Tensor:
        return take(x.new_zeros(N, F), x, ends, {"reduce": "mean", "include_self": False})

    run, _ = compiled(program)
    agrees(program, run, (leaf(N, F), ENDS))
    forward, backward = insum.fusion.report().fused
    assert "reciprocal" in forward.statement and backward.backward
    assert "computed once" in forward.notes[0]


def test_integers_stay_integers() -> None:
    """Their mean is rounded down."""

    def program(x: Tensor, ends: Tensor) -> Tensor:
        return x.new_zeros(N).scatter_reduce(0, ends[1], x[ends[0]], "mean", include_self=False)

    run, _ = compiled(program)
    x = torch.arange(N) * 3
    torch.testing.assert_close(run(x, ENDS), program(x, ENDS))
