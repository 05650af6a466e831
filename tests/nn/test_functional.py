"""`spmm`, `sddmm` and `propagate` against dense torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from insum.formats import COO, ELL, BlockCOO, GroupCOO
from insum.nn import adjacency, propagate, sddmm, spmm

FORMATS: list[tuple[Any, dict[str, Any]]] = [
    (COO, {}),
    (ELL, {}),
    (GroupCOO, {"group_size": 2}),
    (BlockCOO, {"block_shape": (2, 3)}),
]


def matrix() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 9, dtype=torch.float64) * (torch.rand(6, 9) < 0.4)


@pytest.mark.parametrize(("format", "options"), FORMATS)
@pytest.mark.parametrize("lead", [None, (), (2,), (2, 3)])
def test_spmm(format: Any, options: dict[str, Any], lead: tuple[int, ...] | None) -> None:
    dense = matrix()
    B = (
        torch.randn(9, dtype=torch.float64)
        if lead is None
        else torch.randn(*lead, 9, 4, dtype=torch.float64)
    )
    assert_close(spmm(format.from_dense(dense, **options), B), dense @ B)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_spmm_takes_torch_sparse(layout: torch.layout) -> None:
    dense, B = matrix(), torch.randn(9, 4, dtype=torch.float64)
    assert_close(spmm(dense.to_sparse(layout=layout), B), dense @ B)


@pytest.mark.parametrize(("format", "options"), FORMATS)
def test_sddmm(format: Any, options: dict[str, Any]) -> None:
    dense = matrix()
    X, Y = torch.randn(6, 5, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    A = format.from_dense(dense, **options)
    assert_close(sddmm(A, X, Y).to_dense(), dense * (X @ Y))
    if format is not BlockCOO:
        assert_close(sddmm(A.pattern(), X, Y).to_dense(), (dense != 0) * (X @ Y))


def test_gradients_of_the_products() -> None:
    A = GroupCOO.from_dense(matrix(), group_size=2)
    assert A.values is not None
    values = A.values.clone().requires_grad_()
    X, Y = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((6, 2), (2, 9)))
    B = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v, b: spmm(A.with_values(v), b), (values, B))
    assert torch.autograd.gradcheck(
        lambda v, x, y: sddmm(A.with_values(v), x, y).values, (values, X, Y)
    )


# --- propagate ---


def graph(nodes: int = 8, edges: int = 20) -> tuple[Tensor, Tensor]:
    """Some edges twice, some nodes without any; weights of both signs."""
    torch.manual_seed(1)
    edge_index = torch.randint(0, nodes - 2, (2, edges))
    edge_index[:, -3:] = edge_index[:, :3]
    return edge_index, torch.randn(edges, dtype=torch.float64)


def by_hand(
    edge_index: Tensor, x: Tensor, weight: Tensor | None, aggr: str, targets: int
) -> Tensor:
    """One node after the other."""
    messages = x[edge_index[0]] * (
        1 if weight is None else weight.reshape(-1, *[1] * (x.dim() - 1))
    )
    rows = []
    for node in range(targets):
        mine = messages[edge_index[1] == node]
        empty = messages.sum(0) * 0
        rows.append(
            empty
            if not len(mine)
            else mine.amax(0)
            if aggr == "max"
            else mine.mean(0)
            if aggr == "mean"
            else mine.sum(0)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("aggr", ["sum", "add", "mean", "max"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [(), (3,), (2, 2)])
def test_propagate(aggr: str, weighted: bool, width: tuple[int, ...]) -> None:
    edge_index, weight = graph()
    inputs = [torch.randn(8, *width, dtype=torch.float64, requires_grad=True)] + (
        [weight.requires_grad_()] if weighted else []
    )
    got = propagate(edge_index, *inputs, aggr=aggr)
    want = by_hand(edge_index, inputs[0], inputs[1] if weighted else None, aggr, 8)
    assert_close(got, want)
    upstream = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream)
    ):
        assert_close(a, b)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_propagate_between_two_kinds_of_nodes(aggr: str) -> None:
    edge_index, _ = graph()
    x = torch.randn(6, 3, dtype=torch.float64)
    assert_close(
        propagate(edge_index, x, aggr=aggr, num_nodes=11), by_hand(edge_index, x, None, aggr, 11)
    )


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
def test_propagate_over_a_matrix(aggr: str) -> None:
    edge_index, weight = graph()
    edge_index, weight = edge_index[:, :-3], weight[:-3]  # a matrix sums what stands twice
    pairs, at = edge_index.unique(dim=1, return_inverse=True)
    weight = torch.zeros(pairs.shape[1], dtype=torch.float64).index_copy(0, at, weight)
    x = torch.randn(8, 3, dtype=torch.float64)
    A = adjacency(pairs, weight, num_nodes=8)
    assert_close(propagate(A, x, aggr=aggr), by_hand(pairs, x, weight, aggr, 8))


def test_adjacency_counts_edges_that_stand_twice() -> None:
    edge_index, _ = graph()
    assert adjacency(edge_index, num_nodes=8).to_dense().sum() == 20
    assert adjacency(edge_index, num_nodes=(6, 9)).shape == (9, 6)


def test_no_edges_and_no_nodes() -> None:
    none = torch.zeros(2, 0, dtype=torch.long)
    for aggr in ("sum", "mean", "max"):
        assert torch.equal(propagate(none, torch.randn(3, 2), aggr=aggr), torch.zeros(3, 2))
        assert propagate(none, torch.randn(0, 2), aggr=aggr).shape == (0, 2)


def test_edges_are_prepared_once_and_anew_after_a_change() -> None:
    from insum.nn.edges import endpoints

    edge_index, _ = graph()
    first = endpoints(edge_index, 8, 8)
    assert endpoints(edge_index, 8, 8)[0] is first[0]
    edge_index[0, 0] = 7
    assert endpoints(edge_index, 8, 8)[0][0] == 7
    x = torch.randn(8, 1, dtype=torch.float64)
    assert_close(propagate(edge_index, x), by_hand(edge_index, x, None, "sum", 8))


def test_what_is_prepared_under_inference_mode_can_be_trained_on() -> None:
    edge_index, _ = graph()
    with torch.inference_mode():
        propagate(edge_index, torch.randn(8, 2), aggr="mean")
    x = torch.randn(8, 2, requires_grad=True)
    propagate(edge_index, x, aggr="mean").sum().backward()
    assert x.grad is not None


def test_edges_do_not_keep_their_tensor_alive() -> None:
    import gc
    import weakref

    edge_index, _ = graph()
    propagate(edge_index, torch.randn(8, 2), aggr="mean")
    gone = weakref.ref(edge_index)
    del edge_index
    gc.collect()
    assert gone() is None
