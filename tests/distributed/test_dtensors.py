"""Statements over DTensors in one process: which placements follow, that no two statements share
one, messages, explanations, compiled functions; and drawn statements on simulated ranks.

``INSUM_FUZZ`` draws 500 of them instead of two, half on a mesh of two dimensions.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import implicit_replication

import insum
from distributed.drawn import OPTIONS, compare
from insum.call.prepared import kinds_of
from insum.call.request import request_of
from insum.distributed import SparseColwise
from insum.distributed.placements import ways
from insum.lang.expr import tensors_of
from insum.lang.parser import parse
from insum.nn import BlockSparseLinear, GraphConv, SparseLinear
from insum.testing import draw_cases

FUZZ = bool(os.environ.get("INSUM_FUZZ"))
SPMM = "C[AM[p],n] = AV[p] * B[AK[p],n]"
S, R, P = Shard, Replicate(), Partial()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first; nothing is sent."""
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def spmm(
    mesh: DeviceMesh, nonzeros: Placement = R, rows: Placement = R, count: int = 4
) -> dict[str, Any]:
    places = torch.arange(count) % 4
    tensors = {"AM": places, "AK": places, "AV": torch.ones(count)}
    found: dict[str, Any] = {n: distribute_tensor(t, mesh, [nonzeros]) for n, t in tensors.items()}
    return found | {"B": distribute_tensor(torch.ones(6, 4), mesh, [rows])}


# --- rules ----------------------------------------------------------------------------------------


def reasons(statement: str) -> dict[str, tuple[str, str]]:
    """By reason the placement of the result, and what is not whole."""
    names = tensors_of(parse(statement))
    found = ways(statement, names)
    cut = [
        ", ".join(f"{n} {p}" for n, p in way.inputs.items() if p != Replicate()) for way in found
    ]
    return {way.reason: (str(way.output), inputs) for way, inputs in zip(found, cut)}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("y[i] = A[i,j] * x[j]", {
            "i is sharded": ("S(0)", "A S(0)"), "j is sharded": ("P(sum)", "A S(1), x S(0)"),
            "A is a partial sum": ("P(sum)", "A P(sum)"),
            "x is a partial sum": ("P(sum)", "x P(sum)")}),
        ("y[i] max= A[i,j]", {
            "i is sharded": ("S(0)", "A S(0)"), "j is sharded": ("P(max)", "A S(1)"),
            "A is a partial maximum": ("P(max)", "A P(max)")}),
        # inside of a function nothing is linear
        ("y[i] = exp(A[i,j]) * x[j]", {
            "i is sharded": ("S(0)", "A S(0)"), "j is sharded": ("P(sum)", "A S(1), x S(0)"),
            "x is a partial sum": ("P(sum)", "x P(sum)")}),
        # the bias would be added by every rank
        ("y[i] = A[i,j] * x[j] + b[i]", {
            "i is sharded": ("S(0)", "A S(0), b S(0)"),
            "A, b are partial sums": ("P(sum)", "A P(sum), b P(sum)"),
            "x, b are partial sums": ("P(sum)", "x P(sum), b P(sum)")}),
        # twice in one tensor, at two places of it, and beside another variable
        ("y[i] = A[i,i]", {"A is a partial sum": ("P(sum)", "A P(sum)")}),
        ("y[i,j] = x[i] * x[j]", {}),
        ("y[t] = x[t + r] * w[r]", {
            "x is a partial sum": ("P(sum)", "x P(sum)"),
            "w is a partial sum": ("P(sum)", "w P(sum)")}),
        ("y[i] = x[D[i]] * x[E[i]]", {"i is sharded": ("S(0)", "D S(0), E S(0)")}),
        ("y[i] max= relu(B[D[i],n])", {
            "i is sharded": ("S(0)", "D S(0)"), "n is sharded": ("P(max)", "B S(1)"),
            "rows D[i] of B are sharded": ("P(max)", "B S(0)")}),
    ],
)  # fmt: skip
def test_placements_follow_from_roles(statement: str, expected: dict[str, tuple[str, str]]) -> None:
    found = reasons(statement)
    assert found.pop("every rank does everything") == ("R", "")
    assert found == expected


def test_what_is_partial_is_left_so_only_where_it_can_be_summed(mesh: DeviceMesh) -> None:
    A = distribute_tensor(torch.ones(4, 4), mesh, [S(1)])
    assert insum.insum("y[i] = A[i,j]", A=A).placements == (P,)
    truths = distribute_tensor(torch.ones(4, 4, dtype=torch.bool), mesh, [S(1)])
    assert insum.insum("y[i] = A[i,j]", A=truths).placements == (S(0),)


def test_no_two_statements_share_a_placement(mesh: DeviceMesh) -> None:
    """PyTorch keeps placements by the tensors of an op alone, unless it is told of the rest."""
    A, B = (distribute_tensor(torch.ones(4, 4), mesh, [p]) for p in (S(0), R))
    statements = {
        "C[i,j] = A[i,r] * B[r,j]": S(0),
        "C[j,i] = A[i,r] * B[r,j]": S(1),
        "C[i,j] = A[r,i] * B[r,j]": P,
        "C[i,j] max= A[r,i] * B[r,j]": Partial("max"),
        "C[i,j] = A[i,r] * B[r,j] + B[i,j]": R,
    }
    for _ in range(2):
        for statement, place in statements.items():
            assert insum.insum(statement, A=A, B=B).placements == (place,)
            given = statement, "A,B", [A, B], "", None, "", None, "", None, "", "auto"
            assert torch.ops.insum.contract(*given).placements == (place,)
    padded = insum.insum("C[i,j] = A[i,r] * B[r,j]", A=A, B=B, sizes={"C": (4, 4)})
    assert padded.placements == (S(0),)
    kept = kinds_of(request_of("C[i,j] = A[i,r] * B[r,j]", None, None, ()).form).placed
    assert len(kept) == 1


def test_fewest_bytes_decide(mesh: DeviceMesh) -> None:
    """The small factor travels, whichever it is."""
    for columns, place in ((2, S(0)), (64, S(1))):
        A = distribute_tensor(torch.ones(8, 8), mesh, [S(0)])
        B = distribute_tensor(torch.ones(8, columns), mesh, [S(1)])
        assert insum.insum("C[i,j] = A[i,k] * B[k,j]", A=A, B=B).placements == (place,)


# --- what users see -------------------------------------------------------------------------------


def test_an_explanation_tells_what_travels(mesh: DeviceMesh) -> None:
    page: Any = insum.explain(SPMM, out_shape=(4, 4), **spmm(mesh, S(0), S(0), 64))
    assert page.ways == ("p is sharded",)
    assert page.received == 6 * 4 * 4 // 2
    assert page.result == (P,)
    assert "B (6, 4): [Shard(dim=0)] to [Replicate()], 48 bytes to each rank" in str(page)
    assert "result: [Partial(sum)]: 64 bytes to each rank where all is needed" in str(page)
    rows: Any = insum.explain(SPMM, out_shape=(4, 4), **spmm(mesh, R, S(0)))
    assert rows.ways == ("rows AK[p] of B are sharded",) and rows.received == 0
    assert "AK_of_B" in rows._repr_html_()


def test_messages(mesh: DeviceMesh) -> None:
    given = spmm(mesh, S(0))
    with pytest.raises(insum.DeviceError) as mixed:
        insum.insum(SPMM, out_shape=(4, 4), **{**given, "B": torch.ones(6, 4)})
    assert "B is a torch.Tensor, but AM is a DTensor, placed [Shard(dim=0)]" in str(mixed.value)
    assert "B=distribute_tensor(B, AM.device_mesh, [Replicate()])" in str(mixed.value)
    with implicit_replication():
        found = insum.insum(SPMM, out_shape=(4, 4), **{**given, "B": torch.ones(6, 4)})
    assert found.placements == (P,)
    with pytest.raises(insum.DeviceError, match=r"C is a torch\.Tensor"):
        insum.insum(SPMM.replace("=", "+="), C=torch.zeros(4, 4), **given)
    with pytest.raises(insum.UnsupportedError, match=r"C is Partial\(sum\): max= needs"):
        pending = DTensor.from_local(torch.zeros(4, 4), mesh, [P])
        insum.insum(SPMM.replace("=", "max="), C=pending, **given)
    with pytest.raises(insum.UnsupportedError, match=r"this one is .Replicate"):
        insum.insum(SPMM, C=pending, **spmm(mesh))
    other = init_device_mesh("cpu", (2, 1))
    with pytest.raises(insum.DeviceError, match="B is on DeviceMesh"):
        B = distribute_tensor(torch.ones(6, 4), other, [R, R])
        insum.insum(SPMM, out_shape=(4, 4), **{**given, "B": B})
    with pytest.raises(insum.BindingError, match="'p' has two extents"):
        AV = distribute_tensor(torch.ones(3), mesh, [S(0)])
        insum.insum(SPMM, out_shape=(4, 4), **{**given, "AV": AV})
    with pytest.raises(insum.IndexRangeError):
        rows = spmm(mesh, R, S(0))
        rows["AK"] = distribute_tensor(torch.tensor([0, 1, 2, 9]), mesh, [R])
        insum.insum(SPMM, out_shape=(4, 4), **rows)


def test_styles_refuse_what_they_cannot_cut(mesh: DeviceMesh) -> None:
    with pytest.raises(insum.UnsupportedError, match="SparseColwise on a Linear"):
        SparseColwise()._apply(torch.nn.Linear(4, 4), mesh)
    with pytest.raises(insum.UnsupportedError, match="a mesh of one dimension"):
        SparseColwise()._apply(torch.nn.Linear(4, 4), init_device_mesh("cpu", (2, 1)))
    layer = BlockSparseLinear.from_dense(torch.nn.Linear(8, 6), density=0.5, block_shape=2)
    with pytest.raises(insum.FormatError, match="which blocks of 2 do not divide"):
        SparseColwise()._apply(layer, mesh)


def test_layers_that_every_rank_has(mesh: DeviceMesh) -> None:
    """Sparse weights and their bias are on every rank; dense ones have to be told so."""
    x = distribute_tensor(torch.randn(4, 8), mesh, [S(0)])
    layer = SparseLinear.from_dense(torch.nn.Linear(8, 6), density=0.5)
    y: Any = layer(x)
    assert y.placements == (S(0),)
    torch.testing.assert_close(y.to_local(), layer(x.to_local()))
    y.sum().backward()
    assert type(layer.bias.grad) is Tensor and layer.bias.grad.shape == (6,)
    edges = distribute_tensor(torch.tensor([[0, 1], [1, 2]]), mesh, [R])
    graph = GraphConv(8, 3)
    with pytest.raises(insum.DeviceError, match="a DTensor was passed to a layer whose") as found:
        graph(x, edges)
    assert "distribute_module(layer, mesh)" in str(found.value)
    assert isinstance(distribute_module(graph, mesh)(x, edges), DTensor)


def test_promises_are_of_the_part_that_lies_here(mesh: DeviceMesh) -> None:
    index = distribute_tensor(torch.arange(4), mesh, [S(0)])
    assert insum.unchanging(index) is index
    assert insum.constant(index) is index
    insum.forget(index)


def test_compiled_functions(mesh: DeviceMesh) -> None:
    def run(**values: Any) -> Tensor:
        return insum.insum(SPMM, out_shape=(4, 4), **values)

    given = spmm(mesh, S(0))
    given["B"].requires_grad_()
    compiled: Any = torch.compile(run, backend="aot_eager", fullgraph=True)(**given)
    assert isinstance(compiled, DTensor) and compiled.placements == (P,)
    assert torch.equal(compiled.to_local(), run(**given).to_local())
    up = distribute_tensor(torch.ones(4, 4), mesh, [R])
    (gradient,) = torch.autograd.grad(compiled, given["B"], up)
    assert gradient.placements == (P,)


# --- simulated ranks ------------------------------------------------------------------------------


def test_drawn_statements_on_simulated_ranks() -> None:
    """Value, first and second gradient, of the call and of the op itself."""
    simulator = pytest.importorskip(
        "torch.distributed._local_tensor", reason="this torch simulates no ranks"
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for ranks, shape in ((2, (2,)), (4, (2, 2))):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        mode = simulator.LocalTensorMode(ranks)
        with mode:
            where = init_device_mesh("cpu", shape)
        count = 250 if FUZZ else 2 if ranks == 2 else 0
        for number, case in enumerate(draw_cases(count, seed=ranks, **OPTIONS)):
            compare(case, where, random.Random(number), mode, op=number % 2 == 1)
        dist.destroy_process_group()
