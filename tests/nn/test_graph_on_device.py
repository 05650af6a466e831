"""Graph layers over edges that are new at every call, as on a GPU: against themselves on the CPU,
without reading a value on the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import insum
from as_on_a_gpu import no_reads
from insum import memory
from insum.nn import GCNConv, GraphConv, RelationalConv, gcn_norm, propagate
from insum.testing.as_on_a_gpu import pretended

pytestmark = pytest.mark.interpreter


@pytest.fixture
def on_device() -> Iterator[None]:
    with pretended():
        yield


def on_the_cpu(call: Callable[[], object]) -> object:
    with insum.settings(backend="graph", require_fused=False), pytest.MonkeyPatch.context() as m:
        m.setattr("insum.call.prepared.kernels_look_on", lambda device: False)
        m.setattr("insum.call.prepared._forms", {})
        m.setattr("insum.call.lookup._fronts", {})
        m.setattr(memory, "can_look", lambda tensor: tensor.is_cpu)
        memory.forget()
        found = call()
        memory.forget()
        return found


def graph(nodes: int = 9, edges: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """With loops, one node of two of them, edges twice and nodes without edges."""
    torch.manual_seed(seed)
    index = torch.randint(0, max(1, nodes - 2), (2, edges))
    index[:, : edges // 8] = 3 % nodes
    return index, torch.rand(edges) + 0.1, torch.randn(nodes, 5)


OPTIONS = [{}, {"improved": True}, {"add_self_loops": False}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [(9, 40), (1, 0), (4, 0), (1, 5), (1500, 1100)], ids=str)
def test_normalisation(
    options: dict[str, bool], weighted: bool, size: tuple[int, int], on_device: None
) -> None:
    index, weight, _ = graph(*size)
    given = weight if weighted else None
    want = on_the_cpu(lambda: gcn_norm(index, given, size[0], **options))  # type: ignore[arg-type]
    with no_reads():
        edges, found = gcn_norm(index, given, size[0], **options)  # type: ignore[arg-type]
    assert isinstance(want, tuple)
    assert torch.equal(edges, want[0])
    assert_close(found, want[1])


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(kind: torch.dtype, dtype: torch.dtype, on_device: None) -> None:
    index, _, _ = graph()
    index = index.to(kind)
    want = on_the_cpu(lambda: gcn_norm(index, None, 9, dtype=dtype))
    got = gcn_norm(index, None, 9, dtype=dtype)
    assert isinstance(want, tuple) and got[0].dtype == want[0].dtype
    assert torch.equal(got[0], want[0])
    assert_close(got[1], want[1], rtol=1e-2 if dtype != torch.float64 else 1e-12, atol=0)


def differentiated(layer: nn.Module, x: Tensor, *rest: Tensor) -> list[Tensor]:
    leaves = [x, *[t for t in rest if t.is_floating_point()], *layer.parameters()]
    out = layer(x, *rest)
    upstream = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCNConv(5, 4),
    "GCN without loops": lambda: GCNConv(5, 4, add_self_loops=False),
    "GCN without weights of its own": lambda: GCNConv(5, 4, normalize=False, bias=False),
    "sum": lambda: GraphConv(5, 4),
    "mean": lambda: GraphConv(5, 8, aggr="mean"),
    "max": lambda: GraphConv(5, 8, aggr="max"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_layers(name: str, weighted: bool, on_device: None) -> None:
    layer = LAYERS[name]()
    for seed in range(2):  # new edges in each
        index, weight, x = graph(seed=seed)
        leaves = [x.requires_grad_(), index, *([weight.requires_grad_()] if weighted else [])]
        want = on_the_cpu(lambda: differentiated(layer, *leaves))  # noqa: B023
        with no_reads():
            got = differentiated(layer, *leaves)
        assert isinstance(want, list)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_edges_that_come_back(on_device: None) -> None:
    layer, (index, _, x) = GCNConv(5, 4), graph()
    want = on_the_cpu(lambda: layer(x, index))
    for _ in range(8):
        with no_reads():
            got = layer(x, index)
        assert_close(got, want)


def test_edges_that_are_written_to(on_device: None) -> None:
    layer, (index, _, x) = GCNConv(5, 4), graph()
    for _ in range(3):
        want = on_the_cpu(lambda: layer(x, index))
        assert_close(layer(x, index), want)
        index[0].add_(1).remainder_(9)


def test_what_is_remembered_goes_with_the_edges(on_device: None) -> None:
    layer, before = GCNConv(5, 4), memory.report().entries
    for seed in range(3):
        index, _, x = graph(seed=seed)
        layer(x, index)
    del index, x
    gc.collect()
    assert memory.report().entries <= before


@pytest.mark.parametrize("aggr", ["mean", "sum"])
@pytest.mark.parametrize("size", [(9, 40, 3), (9, 300, 2), (4, 0, 2), (9, 5, 40)], ids=str)
def test_relations(aggr: str, size: tuple[int, int, int], on_device: None) -> None:
    nodes, edges, count = size
    layer = RelationalConv(5, 4, count, aggr=aggr)
    for seed in range(2):
        index, _, x = graph(nodes, edges, seed)
        relation = torch.randint(0, count, (edges,))
        leaves = [x.requires_grad_(), index, relation]
        want = on_the_cpu(lambda: differentiated(layer, *leaves))  # noqa: B023
        with no_reads():
            got = differentiated(layer, *leaves)
        assert isinstance(want, list)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, atol=1e-4, rtol=1e-4)


# --- mistakes ---


@pytest.mark.parametrize(
    "call",
    [
        lambda x, e: propagate(e, x),
        lambda x, e: propagate(e, x, aggr="mean"),
        lambda x, e: GraphConv(5, 4)(x, e),
        lambda x, e: GCNConv(5, 4)(x, e),
        lambda x, e: GCNConv(5, 4)(x, e, torch.ones(40)),
        lambda x, e: GCNConv(5, 4, add_self_loops=False)(x, e),
        lambda x, e: GCNConv(5, 4, add_self_loops=False)(x, e, torch.ones(40)),
        lambda x, e: RelationalConv(5, 4, 3)(x, e, torch.arange(40) % 3),
    ],
)
@pytest.mark.parametrize(("end", "value"), [(0, 9), (1, 12), (1, -1)])
def test_no_node(
    call: Callable[[Tensor, Tensor], Tensor], end: int, value: int, on_device: None
) -> None:
    index, _, x = graph()
    index[end, 7] = value
    with pytest.raises(insum.IndexRangeError) as caught:
        call(x, index)
        del index
        insum.synchronize()
    assert str(caught.value).startswith(
        f"edge_index[{end}, 7] is {value}, but there are 9 nodes "
        "(found on the device by an earlier call)\n  expected: values from 0 to 8"
    )


@pytest.mark.parametrize("call", [propagate, lambda e, x: GCNConv(5, 4)(x, e)])
def test_no_node_under_inference_mode(
    call: Callable[[Tensor, Tensor], Tensor], on_device: None
) -> None:
    """Nothing is remembered about such tensors, not even what users call them."""
    with torch.inference_mode():
        index, _, x = graph()
        index[0, 7] = 9
        with pytest.raises(insum.IndexRangeError, match=r"^edge_index\[0, 7\] is 9, but"):
            call(index, x)
            insum.synchronize()


@pytest.mark.parametrize("value", [3, -1])
@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_no_relation(value: int, aggr: str, on_device: None) -> None:
    index, _, x = graph()
    relation = torch.arange(40) % 3
    relation[5] = value
    with pytest.raises(insum.IndexRangeError) as caught:
        RelationalConv(5, 4, 3, aggr=aggr)(x, index, relation)
        insum.synchronize()
    assert f"edge_type[5] is {value}, but there are 3 relations (found" in str(caught.value)


def test_at_once(on_device: None) -> None:
    index, _, x = graph()
    index[1, 7] = 12
    with (
        insum.settings(check="always"),
        pytest.raises(
            insum.IndexRangeError, match=r"edge_index\[1, 7\] is 12, but there are 9 nodes\n"
        ),
    ):
        GCNConv(5, 4)(x, index)


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_relations_under_vmap(aggr: str, on_device: None) -> None:
    """Edges come in any order, also where they are not grouped first."""
    index, _, x = graph()
    layer, relation = RelationalConv(5, 4, 3, aggr=aggr), torch.arange(40) % 3
    found = torch.func.vmap(lambda rows: layer(rows, index, relation))(torch.stack([x, 2 * x]))
    want = torch.stack([layer(rows, index, relation) for rows in (x, 2 * x)])
    assert_close(found, want)


@pytest.mark.parametrize("end", [0, 1])
def test_every_call_reports_what_is_no_node(end: int, on_device: None) -> None:
    weight, x = torch.rand(3), torch.randn(4, 2)
    with_loops, without = GCNConv(2, 3), GCNConv(2, 3, add_self_loops=False)
    mean = GraphConv(2, 3, "mean")
    calls: list[Callable[[Tensor], object]] = [
        lambda edges: with_loops(x, edges),
        lambda edges: with_loops(x, edges, weight),
        lambda edges: without(x, edges),
        lambda edges: mean(x, edges),
        lambda edges: propagate(edges, x),
    ]
    for call in calls:
        edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
        edges[end, 1] = 9
        for _ in range(3):
            with pytest.raises(insum.IndexRangeError, match=rf"edge_index\[{end}, 1\] is 9"):
                call(edges)
                insum.synchronize()
