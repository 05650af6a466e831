"""Products over a matrix whose rows are on four ranks, beside the same in one process."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import insum
from insum.distributed import (
    Partitioned,
    collect_rows,
    distribute_rows,
    partition,
    partition_edges,
)
from insum.formats import COO, BlockGroupCOO, NeighborTable, SparseFormat

#: What takes long to import, and is imported before processes are forked.
HEAVY = (
    "scipy.sparse.csgraph",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
)
for heavy in HEAVY:
    with contextlib.suppress(ImportError):
        importlib.import_module(heavy)

GRAPHS = Path(__file__).parents[3] / "shared" / "data" / "graphs"
NAMES = ("cora", "citeseer", "c-46", "pubmed")
PRODUCT = "Y[m,n] = A[m,k] * X[k,n]"


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def graph(name: str) -> COO:
    """A real graph where it is at hand, its first rows and columns; else one that is drawn."""
    file = GRAPHS / f"{name}.npz"
    torch.manual_seed(NAMES.index(name))
    if file.exists():
        held = np.load(file)
        rows = np.repeat(np.arange(len(held["indptr"]) - 1), np.diff(held["indptr"]))
        pairs = torch.from_numpy(np.stack([rows, held["indices"]]).astype(np.int64))
        nodes = min(4000, int(held["shape"].max()))
        pairs = pairs[:, (pairs < nodes).all(0)]
    else:
        nodes = 500
        near = torch.randint(nodes, (2, 3000))
        near[1, :2000] = (near[0, :2000] + torch.randint(20, (2000,))) % nodes
        pairs = near.unique(dim=1)
    values = torch.randn(pairs.shape[1], dtype=torch.float64)
    return COO.from_entries(tuple(pairs), values, (nodes, nodes))


def gradients(A: SparseFormat | Partitioned, X: Tensor, weight: Tensor) -> list[Tensor]:
    """Value, first and second gradients for the dense factor and the values."""
    held = A.values if isinstance(A, Partitioned) else (A.values,)
    Y = insum.einsum(PRODUCT, A=A, X=X)
    first = torch.autograd.grad(
        (Y * weight).sin().sum(), (X, *held), create_graph=True, materialize_grads=True
    )
    second = torch.autograd.grad(
        sum(g.square().sum() for g in first), (X, *held), materialize_grads=True
    )
    return [t.detach() for t in (Y, *first, *second)]


def dense_of(A: Partitioned, values: list[Tensor]) -> Tensor:
    """Numbers at the entries of a partition, of all ranks, as a dense matrix in the old order."""
    rows, columns, found = A.with_values(tuple(values)).entries()
    whole = torch.zeros(A.shape, dtype=torch.float64).index_put((rows, columns), found)
    dist.all_reduce(whole)
    return whole


def same_at_entries(A: Partitioned, values: list[Tensor], want: COO) -> None:
    """Numbers at this rank's entries beside those of one process, and every entry on one rank."""
    rows, columns, found = A.with_values(tuple(values)).entries()
    keys = want.indices[0].long() * want.shape[1] + want.indices[1]
    places = torch.searchsorted(keys, rows * want.shape[1] + columns)
    torch.testing.assert_close(found, want.values[places])
    held = torch.zeros(len(keys)).index_add(0, places, torch.ones(len(places)))
    dist.all_reduce(held)
    assert held.eq(1).all()


def check_halo_products_have_gradients_of_second_order() -> None:
    for name, kind in zip(NAMES, ("COO", "ELL", "GroupCOO", "COO")):
        A = graph(name)
        torch.manual_seed(7)
        X, weight = (torch.randn(A.shape[0], 3, dtype=torch.float64) for _ in range(2))
        alone = A.detach().requires_grad_()
        want = gradients(alone, X.clone().requires_grad_(), weight)
        for send in ("fewest", "rows"):
            part = partition(A.to_format(kind), line(), send=send).requires_grad_()
            mine = [distribute_rows(t, part) for t in (X, weight)]
            got = gradients(part, mine[0].requires_grad_(), mine[1])
            for place in (0, 1, 5):
                other = want[{0: 0, 1: 1, 5: 3}[place]]
                torch.testing.assert_close(collect_rows(got[place], part), other)
            for place, number in ((2, 2), (6, 4)):
                same_at_entries(part, got[place : place + 3], alone.with_values(want[number]))


def drawn(rows: int, columns: int, share: float = 0.1, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    made[torch.rand(rows, columns, generator=generator) > share] = 0
    made[: rows // 3, 0] = 1.0  # what many rows want, and what wants many rows
    made[rows - 1, : columns // 2] = 1.0
    return made


def check_statements_over_rows_columns_and_entries() -> None:
    dense = drawn(41, 41)
    torch.manual_seed(5)
    X, Z = torch.randn(41, 3, dtype=torch.float64), torch.randn(3, 41, dtype=torch.float64)
    R = torch.rand(41, dtype=torch.float64)
    A = partition(COO.from_dense(dense), line())
    assert A.rows.moves and A.columns.moves
    x, z, r = distribute_rows(X, A), distribute_rows(Z, A, dim=1), distribute_rows(R, A)
    equal = torch.testing.assert_close
    equal(collect_rows(insum.einsum("Y[k,n] = A[m,k] * X[m,n]", A=A, X=x), A), dense.T @ X)
    equal(collect_rows(insum.einsum("Y[n,m] = A[m,k] * Z[n,k]", A=A, Z=z).T, A), dense @ Z.T)
    scaled = insum.einsum("Y[m,n] = R[m] * A[m,k] * X[k,n] * R[k]", A=A, X=x, R=r)
    equal(collect_rows(scaled, A), R[:, None] * (dense @ (R[:, None] * X)))
    equal(collect_rows(insum.einsum("mk,kn->mn", A, x), A), dense @ X)
    equal(collect_rows(A @ x[:, 0], A), dense @ X[:, 0])
    sampled = insum.einsum("S[m,k] = A[m,k] * X[m,n] * Z[n,k]", A=A, X=x, Z=z)
    equal(dense_of(sampled, list(sampled.values)), dense * (X @ Z))
    into = torch.ones(len(A.row_range), 3, dtype=torch.float64)
    assert insum.einsum("Y[m,n] += A[m,k] * X[k,n]", A=A, X=x, Y=into) is into
    equal(collect_rows(into, A), 1 + dense @ X)
    rows = partition(COO.from_dense(dense), line(), send="rows")
    for operator in ("max=", "mean="):
        text = f"Y[m,n] {operator} A[m,k] * X[k,n]"
        want = insum.einsum(text, A=COO.from_dense(dense), X=X)
        got = insum.einsum(text, A=rows, X=distribute_rows(X, rows))
        equal(collect_rows(got, rows), want)


def check_formats_orders_and_cuts() -> None:
    torch.manual_seed(5)
    order = torch.randperm(42)
    blocks = drawn(42, 42, 0.05)
    narrow = drawn(23, 9, 0.2)
    tiny = drawn(3, 3, 0.9)  # less rows than ranks
    once = torch.zeros(42, 42, dtype=torch.float64)
    once[torch.arange(42), order] = torch.randn(42, dtype=torch.float64)
    for dense, format, options in (
        (blocks, COO.from_dense(blocks), {"order": order}),
        (blocks, COO.from_dense(blocks), {"order": "rcm", "balance": "rows"}),
        (blocks, BlockGroupCOO.from_dense(blocks, block_shape=(2, 2)), {"order": "rcm"}),
        (blocks, BlockGroupCOO.from_dense(blocks, block_shape=(4, 5)), {}),
        (narrow, COO.from_dense(narrow), {"balance": "rows"}),
        (narrow, BlockGroupCOO.from_dense(narrow, block_shape=(2, 2)), {"send": "rows"}),
        (once, NeighborTable.from_dense(once), {}),
        (tiny, COO.from_dense(tiny), {}),
    ):
        A = partition(format, line(), **options)
        X = torch.randn(dense.shape[1], 2, dtype=torch.float64)
        Y = collect_rows(A @ distribute_rows(X, A), A)
        torch.testing.assert_close(Y, dense @ X)
    relations = torch.stack([blocks, blocks.flip(0)], 2)
    A = partition(COO.from_dense(relations), line())
    X, W = torch.randn(42, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    Y = insum.einsum("Y[m,o] = A[m,k,r] * X[k,i] * W[r,i,o]", A=A, X=distribute_rows(X, A), W=W)
    want = torch.einsum("mkr,ki,rio->mo", relations, X, W)
    torch.testing.assert_close(collect_rows(Y, A), want)


def check_edges_that_no_rank_has_all_of() -> None:
    torch.manual_seed(9)
    edges, weights = torch.randint(50, (2, 400)), torch.rand(400, dtype=torch.float64)
    mine = torch.arange(400) % dist.get_world_size() == dist.get_rank()
    mine[:100] = dist.get_rank() == 1
    X = torch.randn(50, 2, dtype=torch.float64)
    for order in (None, torch.randperm(50)):
        A = partition_edges(edges[:, mine], line(), weights[mine], num_nodes=50, order=order)
        whole = insum.nn.adjacency(edges, weights, num_nodes=50)
        got = collect_rows(A @ distribute_rows(X, A), A)
        torch.testing.assert_close(got, whole @ X)
    along, across = (distribute_tensor(edges, line(), [Shard(dim)]) for dim in (1, 0))
    spread = distribute_tensor(weights, line(), [Shard(0)])
    A = partition_edges(along, line(), spread, num_nodes=50)
    torch.testing.assert_close(collect_rows(A @ distribute_rows(X, A), A), whole @ X)
    assert "redistribute" in raised(lambda: partition_edges(across, line(), num_nodes=50))
    none = partition_edges(edges[:, :0], line(), num_nodes=(3, 5))
    assert none.shape == (5, 3) and none.nnz == 0


def check_layers_over_a_graph_on_several_ranks() -> None:
    torch.manual_seed(1)
    edges, nodes = torch.randint(40, (2, 200)).unique(dim=1), 40
    x = torch.randn(nodes, 3, dtype=torch.float64)
    looped, weights = insum.nn.gcn_norm(edges, None, nodes, dtype=torch.float64)
    mine = torch.arange(edges.shape[1]) % dist.get_world_size() == dist.get_rank()
    ones = torch.ones(int(mine.sum()), dtype=torch.float64)
    given = {"num_nodes": nodes, "weights": ones}
    graph = partition_edges(edges[:, mine], line(), **given)
    rows = partition_edges(edges[:, mine], line(), send="rows", **given)
    normal = insum.distributed.gcn_norm(
        partition_edges(edges[:, mine], line(), self_loops=1.0, **given)
    )
    plain = insum.nn.adjacency(edges, torch.ones(edges.shape[1]).double(), num_nodes=nodes)
    for layer, part, alone in (
        (insum.nn.GCNConv(3, 4), normal, (looped, weights)),
        (insum.nn.GraphConv(3, 4, aggr="mean"), graph, (plain,)),
        (insum.nn.GraphConv(3, 4, aggr="max"), rows, (plain,)),
        (insum.nn.GATConv(3, 4, heads=2), rows, (edges,)),
    ):
        layer = layer.double()
        if isinstance(layer, insum.nn.GCNConv):
            want = insum.nn.propagate(alone[0], layer.lin(x), alone[1]) + layer.bias
        else:
            want = layer(x, *alone)
        by_hand = torch.autograd.grad(want.square().sum(), list(layer.parameters()))
        got = layer(distribute_rows(x, part), part)
        torch.testing.assert_close(collect_rows(got, part), want.detach())
        found = torch.autograd.grad(got.square().sum(), list(layer.parameters()))
        for one, other in zip(found, by_hand):
            dist.all_reduce(one)  # each rank has what its rows say of the weights
            torch.testing.assert_close(one, other)


def check_partitions_are_saved_and_loaded() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dense, X = drawn(42, 42), torch.randn(42, 2, dtype=torch.float64)
    for number, (format, options) in enumerate(
        (
            (COO.from_dense(dense), {"order": torch.randperm(42)}),
            (BlockGroupCOO.from_dense(dense, block_shape=(2, 2)), {"send": "rows"}),
        )
    ):
        A = partition(format, line(), **options)
        path = Path(str(folder[0])) / str(number)
        insum.distributed.save(A, path)
        again = insum.distributed.load(path, line())
        assert again.row_cuts == A.row_cuts and again.traffic == A.traffic
        Y = collect_rows(again @ distribute_rows(X, again), again)
        torch.testing.assert_close(Y, dense @ X)
        fewer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        other = insum.distributed.load(path, fewer)  # on two ranks, twice
        Y = collect_rows(other @ distribute_rows(X, other), other)
        torch.testing.assert_close(Y, dense @ X)


def raised(run: Callable[[], object]) -> str:
    """The message of an error of ours."""
    try:
        run()
    except insum.InsumError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def check_what_one_rank_gets_wrong_is_an_error_on_all() -> None:
    rank, mesh = dist.get_rank(), line()
    A = COO.from_dense(drawn(20 + (rank == 2), 20))
    assert "ranks do not agree about the format" in raised(lambda: partition(A, mesh))
    A = COO.from_dense(drawn(20, 20, seed=rank))
    assert "ranks do not agree about the entries" in raised(lambda: partition(A, mesh))
    A = COO.from_dense(drawn(20, 20))
    order = torch.arange(20) if rank else torch.zeros(20, dtype=torch.int64)
    told = raised(lambda: partition(A, mesh, order=order))
    assert "no permutation" in told and (rank == 0) != told.startswith("rank 0 failed")
    edges = torch.tensor([[0], [25 if rank == 1 else 0]])
    assert "25" in raised(lambda: partition_edges(edges, mesh, num_nodes=20))
    narrow = A.to(dtype=torch.float32) if rank == 1 else A
    assert "ranks do not agree about the dtype" in raised(lambda: partition(narrow, mesh))
    pairs = edges.clamp(max=0)
    told = raised(lambda: partition_edges(pairs, mesh, num_nodes=(2, 3), self_loops=1.0))
    assert "loops between nodes of two kinds" in told
    part = partition(A, mesh)
    x = torch.ones(len(part.column_range), dtype=torch.float64)
    wide = torch.ones(len(part.row_range), 2 + (rank == 1))
    assert "about the shape of a row" in raised(lambda: collect_rows(wide, part))
    assert "about the dtype" in raised(lambda: collect_rows(x.float() if rank else x, part))
    assert "neither" in raised(lambda: insum.einsum("s[] = A[m,k] * X[k]", A=part, X=x))


def check_a_rank_that_fails_in_a_product_is_told_of() -> None:
    """Ranks that are in the exchange already do not wait for the time of their group."""
    group = dist.new_group(timeout=timedelta(seconds=300))
    mesh = DeviceMesh.from_group(group, "cpu")
    dense = drawn(40, 40, 0.5)
    A, X = partition(COO.from_dense(dense), mesh), torch.ones(40, 2, dtype=torch.float64)
    x = distribute_rows(X, A)
    for _ in range(2):  # an error of every rank leaves the group as it was
        assert "rows, but rank" in raised(lambda: A @ X[:-1])
    torch.testing.assert_close(collect_rows(A @ x, A), dense @ X)
    begin = time.perf_counter()
    told = raised(lambda: A @ (x[:-1] if dist.get_rank() == 1 else x))
    assert "x has" in told.lower() or "rows, but rank 1 holds" in told
    assert time.perf_counter() - begin < 150
    dist.barrier()


def check_the_example_reaches_the_loss_of_one_process() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    with contextlib.redirect_stdout(io.StringIO()):
        import full_graph_gnn

        for layer in ("gcn", "sage", "gat"):
            given = ["--layer", layer, "--nodes", "120", "--epochs", "4", "--check"]
            losses = full_graph_gnn.main(given)
            assert losses[-1] < losses[0]
