"""Graph layers against PyG, with its own weights, and against dense references that need no PyG."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum.api
import insum.call.prepared
from insum.nn import GCNConv, GraphConv, RelationalConv, SAGEConv, adjacency, gcn_norm


@pytest.fixture(scope="module")
def pyg() -> Any:
    return pytest.importorskip(
        "torch_geometric.nn",
        reason="torch_geometric is not installed: the comparison with PyG is left out",
    )


def graph(nodes: int = 9, edges: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    edge_index = torch.randint(0, nodes - 2, (2, edges))
    edge_index[:, 0] = 3  # a loop
    return (
        edge_index,
        torch.rand(edges, dtype=torch.float64) + 0.1,
        torch.randn(nodes, 5, dtype=torch.float64),
    )


def compare(mine: torch.nn.Module, other: Any, x: Tensor, *rest: Tensor) -> None:
    """The same outputs, gradients of inputs and of every parameter."""
    mine.load_state_dict(other.state_dict())
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = mine(a, *rest), other(b, *rest)
    assert_close(got, want)
    upstream = torch.randn_like(want)
    got.backward(upstream)
    want.backward(upstream)
    assert_close(a.grad, b.grad)
    gradients = {name: p.grad for name, p in other.named_parameters()}
    for name, parameter in mine.named_parameters():
        assert_close(parameter.grad, gradients[name])


@pytest.mark.parametrize("aggr", ["add", "mean", "max", "min"])
@pytest.mark.parametrize("out", [3, 8], ids=["narrower", "wider"])
@pytest.mark.parametrize("weighted", [False, True])
def test_graph_conv_is_pygs(pyg: Any, aggr: str, out: int, weighted: bool) -> None:
    edge_index, weight, x = graph()
    compare(
        GraphConv(5, out, aggr=aggr).double(),
        pyg.GraphConv(5, out, aggr=aggr).double(),
        x,
        edge_index,
        *([weight] if weighted else []),
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggr": "max"},
        {"aggr": "sum", "root_weight": False, "bias": False},
        {"normalize": True, "project": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("out", [3, 8], ids=["narrower", "wider"])
def test_sage_conv_is_pygs(pyg: Any, options: dict[str, Any], out: int) -> None:
    edge_index, _, x = graph()
    mine, other = SAGEConv(5, out, **options).double(), pyg.SAGEConv(5, out, **options).double()
    compare(mine, other, x, edge_index)
    pair = SAGEConv((5, 2), out, **options).double(), pyg.SAGEConv((5, 2), out, **options).double()
    pair[0].load_state_dict(pair[1].state_dict())
    targets = torch.randn(11, 2, dtype=torch.float64)
    mine_of, other_of = (one((x, targets), edge_index) for one in pair)
    assert_close(mine_of, other_of)
    mine_of, other_of = (one((x, None), edge_index, size=(9, 11)) for one in pair)
    assert_close(mine_of, other_of)


def test_sage_conv_on_matrices_and_lazily() -> None:
    edge_index, _, x = graph()
    edge_index = edge_index.unique(dim=1)
    layer = SAGEConv(-1, 3).double()
    with pytest.raises(insum.InsumError):
        layer(x, edge_index + 100)
    assert "Lazy" in str(layer)
    want = layer(x, edge_index)
    assert_close(layer(x, adjacency(edge_index, num_nodes=9)), want)
    layer.reset_parameters()
    assert not torch.allclose(layer(x, edge_index), want)
    with pytest.raises(insum.UnsupportedError, match="how many features a source has"):
        SAGEConv(-1, 3, project=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}, {"bias": False}],
    ids=str,
)
@pytest.mark.parametrize("weighted", [False, True])
def test_gcn_conv_is_pygs(pyg: Any, options: dict[str, bool], weighted: bool) -> None:
    edge_index, weight, x = graph()
    # without weights PyG forgets `improved`
    given = [weight] if weighted else [torch.ones_like(weight)] if "improved" in options else []
    compare(
        GCNConv(5, 4, **options).double(),
        pyg.GCNConv(5, 4, **options).double(),
        x,
        edge_index,
        *given,
    )


@pytest.mark.parametrize(
    "options",
    [{"aggr": "mean"}, {"aggr": "add"}, {"num_bases": 2}, {"num_blocks": 2}],
    ids=str,
)
def test_relational_conv_is_pygs(pyg: Any, options: dict[str, Any]) -> None:
    edge_index, _, x = graph()
    rel = torch.arange(edge_index.shape[1]) % 3
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # PyG's layer makes its output in the default dtype
    try:
        x = x[:, :4].contiguous()
        compare(
            RelationalConv(4, 6, 4, **options), pyg.RGCNConv(4, 6, 4, **options), x, edge_index, rel
        )
    finally:
        torch.set_default_dtype(default)


# --- without PyG ---


def normalised(edge_index: Tensor, nodes: int) -> Tensor:
    """The dense matrix D^-1/2 (A + I) D^-1/2, with a node's own loop where it has one."""
    A = torch.zeros(nodes, nodes, dtype=torch.float64)
    A[edge_index[1], edge_index[0]] = 1
    A.fill_diagonal_(1)
    root = A.sum(1).rsqrt()
    return root[:, None] * A * root


def test_gcn_conv_is_a_product_with_the_normalised_matrix() -> None:
    edge_index, _, x = graph()
    edge_index = edge_index.unique(dim=1)
    layer = GCNConv(5, 4).double()
    assert_close(layer(x, edge_index), normalised(edge_index, 9) @ x @ layer.lin.weight.T)
    edges, weights = gcn_norm(edge_index, None, 9, dtype=torch.float64)
    assert_close(layer(x, adjacency(edges, weights, num_nodes=9)), layer(x, edge_index))


def test_the_gradient_of_edge_weights_flows_through_the_normalisation() -> None:
    edge_index, weight, x = graph()
    layer = GCNConv(5, 2).double()
    assert torch.autograd.gradcheck(lambda w: layer(x, edge_index, w), (weight.requires_grad_(),))


def test_graph_conv_with_two_kinds_of_nodes() -> None:
    edge_index, weight, x = graph()
    layer = GraphConv((5, 2), 4).double()
    targets = torch.randn(11, 2, dtype=torch.float64)
    sums = torch.zeros(11, 5, dtype=torch.float64).index_add(
        0, edge_index[1], weight[:, None] * x[edge_index[0]]
    )
    assert_close(
        layer((x, targets), edge_index, weight), layer.lin_rel(sums) + layer.lin_root(targets)
    )
    assert_close(layer((x, None), edge_index, weight, num_nodes=11), layer.lin_rel(sums))


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_relational_conv_by_hand(aggr: str) -> None:
    edge_index, _, x = graph()
    rel = torch.arange(edge_index.shape[1]) % 3
    layer = RelationalConv(5, 4, 3, aggr=aggr).double()
    want = x @ layer.root + layer.bias
    for r in range(3):
        for node in range(9):
            mine = x[edge_index[0, (rel == r) & (edge_index[1] == node)]]
            if len(mine):
                want[node] = (
                    want[node] + (mine.mean(0) if aggr == "mean" else mine.sum(0)) @ layer.weight[r]
                )
    assert_close(layer(x, edge_index, rel), want)
    bare = RelationalConv(5, 4, 3, aggr=aggr, root_weight=False, bias=False).double()
    bare.load_state_dict({"weight": layer.weight.detach()})
    assert_close(bare(x, edge_index, rel), want - x @ layer.root - layer.bias)


def test_a_graph_without_edges() -> None:
    none, x = torch.zeros(2, 0, dtype=torch.long), torch.randn(4, 5)
    for layer in (GraphConv(5, 3), GraphConv(5, 3, aggr="max"), GCNConv(5, 3)):
        assert layer(x, none).shape == (4, 3)
    assert RelationalConv(5, 3, 2)(x, none, torch.zeros(0, dtype=torch.long)).shape == (4, 3)


def test_states_round_trip() -> None:
    edge_index, _, x = graph()
    rel = torch.zeros(edge_index.shape[1], dtype=torch.long)
    for make, rest in (
        (lambda: GraphConv(5, 4), ()),
        (lambda: GCNConv(5, 4), ()),
        (lambda: RelationalConv(5, 4, 2), (rel,)),
    ):
        one, two = make().double(), make().double()
        two.load_state_dict(one.state_dict())
        assert torch.equal(one(x, edge_index, *rest), two(x, edge_index, *rest))


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.int32],
    ids=str,
)
def test_edges_in_a_dtype_that_does_not_hold_every_node(dtype: torch.dtype) -> None:
    edges, _, _ = graph()
    x = torch.randn(300, 5)
    relation = torch.arange(edges.shape[1]) % 2
    kind = dtype if dtype not in (torch.uint16, torch.uint32) else torch.int64
    for layer, more, narrow in (
        (GCNConv(5, 4), (), ()),
        (GCNConv(5, 4, add_self_loops=False), (), ()),
        (GraphConv(5, 4, aggr="mean"), (), ()),
        (GraphConv(5, 4, aggr="max"), (), ()),
        (RelationalConv(5, 4, 300), (relation,), (relation.to(kind),)),
    ):
        assert_close(layer(x, edges.to(dtype), *narrow), layer(x, edges, *more))


def test_normalised_edges_are_the_callers() -> None:
    """What is kept with the edges does not change when a caller writes to what it was given."""
    edges, x = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.eye(3)
    layer = GCNConv(3, 3)
    before = layer(x, edges).detach().clone()
    found, weights = gcn_norm(edges, None, 3)
    found.zero_()
    weights.mul_(2)
    assert torch.equal(layer(x, edges), before)


# --- what PyG's layers take ---


def test_sizes_of_a_first_call() -> None:
    edge_index, _, x = graph()
    x = x.float()
    torch.manual_seed(1)
    lazy = GraphConv(-1, 4)
    lazy.reset_parameters()
    assert lazy(x, edge_index).shape == (9, 4) and lazy.lin_rel.in_features == 5
    pair = GraphConv((-1, 3), 4)
    assert pair((x, torch.ones(2, 3)), edge_index[:, :0]).shape == (2, 4)
    gcn = GCNConv(-1, 4)
    assert gcn(x, edge_index).shape == (9, 4) and gcn.lin.weight.shape == (4, 5)
    assert GCNConv(-1, 4).double()(x.double(), edge_index).dtype == torch.float64
    loaded = GCNConv(-1, 4)
    loaded.load_state_dict(gcn.state_dict())
    assert torch.equal(loaded(x, edge_index), gcn(x, edge_index))
    before = gcn.lin.weight.clone()
    gcn.reset_parameters()
    assert not torch.equal(gcn.lin.weight, before)
    with pytest.raises(insum.BindingError, match="in the last dimension"):
        gcn(x[:, :3], edge_index)
    rgcn = RelationalConv(5, 4, 2)
    before = rgcn.weight.detach().clone()
    rgcn.reset_parameters()
    assert not torch.equal(rgcn.weight, before)


@pytest.mark.parametrize("make", [GraphConv, GCNConv])
def test_a_failed_call_gives_no_size(make: Any) -> None:
    edge_index, _, x = graph()
    layer, wrong = make(-1, 4).double(), edge_index + 9
    parameters = list(layer.parameters())
    for _ in range(2):
        with pytest.raises(insum.InsumError):
            layer(x, wrong)
    assert make(-1, 4).state_dict().keys() == layer.state_dict().keys()
    assert layer(x[:, :3], edge_index).shape == (9, 4)  # another size than that of the failed call
    assert [*map(id, parameters)] == [*map(id, layer.parameters())]
    loaded = make(3, 4).double()
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded(x[:, :3], edge_index), layer(x[:, :3], edge_index))


def test_weights_that_are_learned_are_not_cached() -> None:
    edge_index, weight, x = graph()
    layer, other = GCNConv(5, 4, cached=True).double(), GCNConv(5, 4).double()
    other.load_state_dict(layer.state_dict())
    weight.requires_grad_()
    for scale in (1, 2):
        for one in (layer, other):
            one(x, edge_index, weight * torch.linspace(1, scale, len(weight))).sum().backward()
        assert_close(layer.lin.weight.grad, other.lin.weight.grad)
    assert weight.grad is not None and bool((weight.grad != 0).any())


def test_cached_edges_are_those_of_the_first_call() -> None:
    edge_index, _, x = graph()
    layer = GCNConv(5, 4, cached=True).double()
    first = layer(x, edge_index)
    assert torch.equal(layer(x, edge_index.flip(0)), first)
    assert torch.equal(copy.deepcopy(layer)(x, edge_index.flip(0)), first)
    layer.reset_parameters()
    assert_close(layer(x, edge_index.flip(0)), _plain(layer, x))
    assert layer.half()(x.half(), edge_index).dtype == torch.float16  # in the dtype of today


def test_blocks_of_relations_want_one_row_for_each_node() -> None:
    layer, edges = RelationalConv(4, 6, 2, num_blocks=2), torch.zeros(2, 1, dtype=torch.int64)
    for shape in ((4,), (2, 3, 4)):
        with pytest.raises(insum.BindingError, match="x has shape"):
            layer(torch.ones(shape), edges, edges[0])


def _plain(layer: GCNConv, x: Tensor) -> Tensor:
    edge_index, _, _ = graph()
    other = GCNConv(5, 4).double()
    other.load_state_dict(layer.state_dict())
    return other(x, edge_index.flip(0))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("aggr", ["add", "mean", "max", "min"])
def test_adj_t_of_torch(aggr: str) -> None:
    edge_index, _, x = graph()
    edge_index = edge_index.unique(dim=1)
    weight = torch.rand(edge_index.shape[1], dtype=torch.float64)
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), weight, (9, 9)).coalesce()
    conv, gcn = GraphConv(5, 4, aggr=aggr).double(), GCNConv(5, 4).double()
    for layout in (adj_t, adj_t.to_sparse_csr()):
        assert_close(conv(x, layout), conv(x, edge_index, weight))
        assert_close(gcn(x, layout), gcn(x, edge_index, weight))


def test_sizes_of_two_sets_of_nodes() -> None:
    edge_index, weight, x = graph()
    layer = GraphConv((5, 3), 4).double()
    got = layer((x, None), edge_index, weight, size=(9, 12))
    assert got.shape == (12, 4)
    assert_close(got, layer((x, None), edge_index, weight, num_nodes=12))
    with pytest.raises(insum.BindingError, match="but x has 9 rows"):
        layer((x, None), edge_index, weight, size=(8, 12))
    with pytest.raises(insum.UnsupportedError, match="both of num_bases and num_blocks"):
        RelationalConv(4, 4, 2, num_bases=2, num_blocks=2)
    with pytest.raises(insum.BindingError, match="3 blocks do not divide"):
        RelationalConv(4, 4, 2, num_blocks=3)
    with pytest.raises(insum.DtypeError, match="in_channels is -2"):
        GraphConv(-2, 4)


def test_edges_of_a_layer_in_a_statement() -> None:
    """What a layer keeps with edges and what a statement keeps with them are told apart."""
    nodes, edges = 50, 4000
    edge_index, edge_type = torch.randint(0, nodes, (2, edges)), torch.randint(0, 3, (edges,))
    x, weight = torch.randn(nodes, 32).double(), torch.randn(3, 32, 32).double()
    layers = (
        (GraphConv(32, 8).double(), (edge_index,)),
        (
            RelationalConv(32, 8, 3).double(),
            (edge_index, edge_type),
        ),
    )
    for _ in range(3):  # first one, then the other
        for layer, graph in layers:
            layer(x, *graph)
        summed = insum.insum("y[e[1,p],f] = x[e[0,p],f]", e=edge_index, x=x, out_shape=x.shape)
        assert_close(summed, torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))
        found = insum.insum(
            "y[p,g] = x[p,f] * W[t[p],f,g]", x=x[edge_index[0]], W=weight, t=edge_type
        )
        assert_close(found, torch.einsum("pf,pfg->pg", x[edge_index[0]], weight[edge_type]))


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_relations_under_transforms(aggr: str) -> None:
    layer = RelationalConv(3, 2, 3, aggr=aggr).double()
    edges, kinds = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 0]]), torch.tensor([0, 1, 2, 1])
    x, along = torch.randn(2, 3, 3).double()
    x.requires_grad_()
    (want,) = torch.autograd.grad(layer(x, edges, kinds).square().sum(), x)
    found = torch.func.grad(lambda given: layer(given, edges, kinds).square().sum())(x.detach())
    assert_close(found, want)
    _, tangent = torch.func.jvp(lambda given: layer(given, edges, kinds), (x,), (along,))
    assert_close(tangent, layer(x + along, edges, kinds) - layer(x, edges, kinds))


def test_cached_edges_stay_as_exact_as_they_were_found() -> None:
    layer, edges = GCNConv(3, 2, cached=True).double(), torch.tensor([[0, 1, 2, 0], [1, 0, 0, 2]])
    x, state = torch.randn(3, 3).double(), copy.deepcopy(layer.state_dict())
    want = layer(x, edges)
    layer.half()(x.half(), edges)
    layer.double().load_state_dict(state)
    assert_close(layer(x, edges), want)


def test_weights_are_normalised_without_autocast() -> None:
    layer, edges = GCNConv(3, 2, cached=True), torch.tensor([[0, 1, 2, 0], [1, 0, 0, 2]])
    x, weight = torch.randn(3, 3), torch.rand(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x, edges, weight)
    found = layer(x, edges, weight)
    plain = GCNConv(3, 2)
    plain.load_state_dict(layer.state_dict())
    assert_close(found, plain(x, edges, weight))


def test_a_matrix_of_other_nodes() -> None:
    x, small = torch.randn(5, 3), torch.eye(4).to_sparse()
    with pytest.raises(insum.BindingError, match=r"shape \(4, 4\), but x has 5 rows"):
        GCNConv(3, 2)(x, small)
    wide = torch.zeros(4, 5).to_sparse()
    with pytest.raises(insum.BindingError, match=r"shape \(4, 5\), but there are 5 targets"):
        GraphConv(3, 2)(x, wide)
    with pytest.raises(insum.BindingError, match="edge_weight was passed beside a matrix"):
        GCNConv(3, 2)(x, torch.eye(5).to_sparse(), torch.ones(5))


def test_edges_that_are_kept_move_with_the_layer() -> None:
    layer, x, edges = GCNConv(3, 2, cached=True), torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]])
    wanted, before = layer(x, edges), copy.deepcopy(layer.state_dict())
    moved = layer.to("meta")
    assert moved(x.to("meta"), edges.to("meta")).is_meta
    moved.to_empty(device="cpu").load_state_dict(before)
    assert_close(moved(x, edges), wanted)
    fresh = GCNConv(3, 2, cached=True).to("meta")
    fresh(x.to("meta"), edges.to("meta"))  # what has no values is not kept
    fresh.to_empty(device="cpu").reset_parameters()
    assert fresh(x, edges).shape == (4, 2)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_relations_of_unsigned_integers(dtype: torch.dtype) -> None:
    layer, x, edges = RelationalConv(3, 2, 2), torch.randn(4, 3), torch.tensor([[0, 1], [1, 2]])
    kinds = torch.tensor([0, 1])
    assert torch.equal(layer(x, edges, kinds.to(dtype)), layer(x, edges, kinds))


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_a_first_call_is_rounded_as_the_next_ones(
    aggr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insum.call.prepared, "_forms", {})  # nothing has been called before
    monkeypatch.setattr(insum.call.lookup, "_fronts", {})
    torch.manual_seed(0)
    layer = SAGEConv(16, 4, aggr=aggr).bfloat16()
    x, edges = torch.randn(30, 16).bfloat16(), torch.randint(0, 30, (2, 200))
    torch.use_deterministic_algorithms(True)
    try:
        first, *rest = (layer(x, edges) for _ in range(3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, one) for one in rest)
