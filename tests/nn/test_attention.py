"""Softmax over edges and graph attention: beside torch, PyG and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.nn import GATConv, GraphConv, edge_softmax, graph_attention

NODES, EDGES = 6, 20


def graph() -> Tensor:
    """With loops, edges that come twice, and a node that none leads to."""
    torch.manual_seed(0)
    edges = torch.randint(0, NODES - 1, (2, EDGES))
    edges[:, :3] = torch.tensor([[0, 1, 1], [0, 1, 2]])
    return edges


def dense(scores: Tensor, edges: Tensor) -> Tensor:
    """Node by node."""
    out = torch.zeros_like(scores)
    for node in range(NODES):
        at = (edges[1] == node).nonzero()[:, 0]
        out = out.index_put((at,), scores[at].softmax(0))
    return out


def test_weights_are_drawn_anew() -> None:
    layer = GATConv(5, 4, heads=2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    with torch.no_grad():
        layer.bias.fill_(3)  # type: ignore[union-attr]
    layer.reset_parameters()
    same = [torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True)]
    assert sum(same) == 1 and not layer.bias.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(EDGES,), (EDGES, 3), (EDGES, 2, 2)], ids=str)
def test_softmax(shape: tuple[int, ...]) -> None:
    edges, scores = graph(), torch.randn(shape, dtype=torch.float64) * 30
    found = edge_softmax(scores.requires_grad_(), edges, NODES)
    torch.testing.assert_close(found, dense(scores, edges))
    upstream = torch.randn_like(found)
    (ours,) = torch.autograd.grad(found, scores, upstream)
    (theirs,) = torch.autograd.grad(dense(scores, edges), scores, upstream)
    torch.testing.assert_close(ours, theirs)


def test_attention_and_its_gradients() -> None:
    edges = graph()[:, :8]
    scores = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(NODES, 2, 2, dtype=torch.float64, requires_grad=True)
    run = lambda scores, x: graph_attention(scores, x, edges)
    weight = dense(scores, edges)
    wanted = torch.zeros_like(x).index_add(0, edges[1], weight[:, :, None] * x[edges[0]])
    torch.testing.assert_close(run(scores, x), wanted)
    assert torch.autograd.gradcheck(run, (scores, x), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (scores, x), fast_mode=True)


def test_nothing_of_the_size_of_the_messages_is_kept() -> None:
    edges, kept = graph(), []
    scores, x = torch.randn(EDGES, 2, requires_grad=True), torch.randn(NODES, 2, 64)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        graph_attention(scores, x, edges)
    assert kept and max(kept) < EDGES * 2 * 64


@pytest.mark.parametrize(
    "options",
    [{}, {"heads": 3}, {"heads": 2, "concat": False}, {"add_self_loops": False, "bias": False}],
    ids=str,
)
def test_gat_conv_is_pygs(options: dict[str, Any]) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    ours, theirs = GATConv(5, 4, **options).double(), pyg.GATConv(5, 4, **options).double()
    ours.load_state_dict(theirs.state_dict())
    edges, x = graph(), torch.randn(NODES, 5, dtype=torch.float64, requires_grad=True)
    found, wanted = ours(x, edges), theirs(x, edges)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(found)
    for layer, out in ((ours, found), (theirs, wanted)):
        out.backward(upstream)
        layer.x_grad, x.grad = x.grad, None
    torch.testing.assert_close(ours.x_grad, theirs.x_grad)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, dict(theirs.named_parameters())[name].grad)


def test_loops_leave_no_places_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a CPU: there the other edges can be counted, and none is padding."""
    edges, x = torch.tensor([[0, 1, 1, 2, 2], [1, 1, 1, 0, 2]]), torch.randn(3, 5)
    asked: list[Any] = []
    run = insum.insum

    def seen(*args: Any, **options: Any) -> Any:
        asked.append((options["padded"], options["dst"]))
        return run(*args, **options)

    monkeypatch.setattr("insum.nn.attention.insum", seen)
    layer = GATConv(5, 4, bias=False)
    found = layer(x, edges)
    assert {padded for padded, _ in asked} == {()}
    assert asked[0][1].tolist() == [1, 0, 0, 1, 2]
    asked.clear()
    monkeypatch.setattr("insum.nn.attention.can_look", lambda tensor: False)
    torch.testing.assert_close(layer(x, edges.clone()), found)
    assert asked[0] == (("src", "dst"), asked[0][1]) and len(asked[0][1]) == 8


def test_compiled() -> None:
    layer, edges, x = GATConv(5, 4, heads=2), graph(), torch.randn(NODES, 5)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(x, edges), layer(x, edges))


def test_dropout_is_for_training() -> None:
    layer, edges, x = GATConv(5, 4, dropout=1.0, bias=False), graph(), torch.randn(NODES, 5)
    assert not layer(x, edges).any() and layer.eval()(x, edges).any()


X, EDGE = torch.ones(NODES, 2, 3), torch.tensor([[0, 1], [1, 2]])
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "scores": (lambda: edge_softmax(torch.ones(3), EDGE, 3), "but there are 2 edges"),
    "nodes": (lambda: edge_softmax(torch.ones(2), EDGE, 2), r"edge_index\[1, 1\] is 2"),
    "edges": (lambda: edge_softmax(torch.ones(2), EDGE[0], 2), "edge_index has shape"),
    "heads": (lambda: graph_attention(torch.ones(2, 5), X, EDGE), "scores have shape"),
    "channels": (lambda: GATConv(5, 4)(torch.ones(3, 4), EDGE), "5 in the last dimension"),
    "one row": (lambda: GATConv(5, 4)(torch.ones(5), EDGE), "a row for each node"),
    "more dimensions": (lambda: GATConv(5, 4)(torch.ones(3, 2, 5), EDGE), "a row for each node"),
    "one row of GraphConv": (lambda: GraphConv(5, 4)(torch.ones(5), EDGE), "a row for each node"),
    "a negative node": (
        lambda: GATConv(5, 4)(torch.ones(3, 5), torch.tensor([[0], [-1]])),
        r"edge_index\[1, 0\] is -1",
    ),
    "dropout": (lambda: GATConv(5, 4, dropout=2), "dropout is 2"),
    "slope": (lambda: GATConv(5, 4, negative_slope=float("nan")), "negative_slope is nan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_messages(name: str) -> None:
    call, says = WRONG[name]
    with pytest.raises(insum.InsumError, match=says):
        call()
