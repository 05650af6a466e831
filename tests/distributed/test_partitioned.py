"""Partitions on one rank, some of which send to themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import insum
from distributed.to_itself import one_rank, to_itself
from insum.distributed import distribute_rows, explain, partition, partition_edges
from insum.formats import COO, ELL, BlockCOO

PRODUCT = "Y[m,n] = A[m,k] * X[k,n]"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs Gloo")
    yield one_rank()
    dist.destroy_process_group()


@pytest.fixture
def dense(doubles: None) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 6) * (torch.rand(6, 6) < 0.6)


@pytest.fixture
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("statement", [PRODUCT, "Y[k,n] = A[m,k] * X[m,n]"])
def test_gradients_of_every_order(mesh: DeviceMesh, dense: Tensor, statement: str) -> None:
    A = to_itself(COO.from_dense(dense), mesh)

    def product(x: Tensor, *values: Tensor) -> Tensor:
        return insum.einsum(statement, A=A.with_values(values), X=x)

    x = torch.randn(6, 2, requires_grad=True)
    given = (x, *(v.clone().requires_grad_() for v in A.values))
    want = (dense if statement is PRODUCT else dense.T) @ x
    torch.testing.assert_close(product(*given), want)
    assert torch.autograd.gradcheck(product, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(product, given, fast_mode=True)


def test_the_own_part_runs_between_the_ends_of_the_exchange(
    mesh: DeviceMesh, dense: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, and backward the other way round."""
    from insum.distributed import exchange

    seen: list[str] = []
    for name in ("begin", "end"):
        was = getattr(exchange._Passage, name)
        monkeypatch.setattr(
            exchange._Passage,
            name,
            lambda *a, was=was, name=name: (seen.append(name), was(*a))[1],
        )
    A = to_itself(COO.from_dense(dense), mesh).requires_grad_()
    x = torch.randn(6, 2, requires_grad=True)
    A.own.values.register_hook(lambda grad: seen.append("own"))
    Y = A @ x
    assert seen == ["begin", "begin", "end", "end"]
    seen.clear()
    Y.sum().backward()
    first, last = seen.index("begin"), len(seen) - 1 - seen[::-1].index("end")
    assert first < seen.index("own") < last and len(seen) == 5


def test_compiled_whole(mesh: DeviceMesh, dense: Tensor) -> None:
    A = to_itself(COO.from_dense(dense), mesh)
    x = torch.randn(6, 2, requires_grad=True)
    compiled = torch.compile(
        lambda x: insum.einsum(PRODUCT, A=A, X=x).sin(), fullgraph=True, backend="aot_eager"
    )
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    (want,) = torch.autograd.grad((dense @ x).sin().sum(), x)
    torch.testing.assert_close(grad, want)


def test_explained(mesh: DeviceMesh) -> None:
    A = partition(COO.from_dense(torch.eye(4)), mesh)
    found = explain(A, columns=8)
    assert found.rows_exchanged == 0 and "nothing travels" in str(found)
    assert A.traffic[0].own == A.nnz == 4 and A.row_range == range(4)
    assert "<td>4</td>" in found._repr_html_() and "<td>own</td>" in A._repr_html_()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda a, m: partition(a, None), "a DeviceMesh of one dimension"),
        (lambda a, m: partition(torch.eye(2), m), "a format of insum.formats"),
        (lambda a, m: partition(a, m, balance="bytes"), "balance is 'bytes'"),
        (lambda a, m: partition(a, m, send="all"), "send is 'all'"),
        (lambda a, m: partition(a, m, order="best"), '"rcm" or a permutation'),
        (lambda a, m: partition(a, m, order=torch.zeros(4).int()), "no permutation"),
        (lambda a, m: partition(a, m, order=torch.zeros(3).int()), "4 integers"),
        (lambda a, m: partition(COO.from_dense(torch.ones(3)), m), "no rows that could be cut"),
        (
            lambda a, m: partition(COO.from_dense(torch.ones(2, 3)), m, order="rcm"),
            "a square matrix",
        ),
        (lambda a, m: partition_edges(torch.zeros(3, 1).int(), m, num_nodes=2), "(2, edges)"),
        (lambda a, m: partition_edges(torch.ones(2, 1).int(), m, num_nodes=1), "1"),
        (
            lambda a, m: partition_edges(torch.ones(2, 1).int(), m, num_nodes=2, format="BlockCOO"),
            "a format of single entries",
        ),
        (
            lambda a, m: partition_edges(torch.ones(2, 1).int(), m, num_nodes=2, order="rcm"),
            "an order as a tensor",
        ),
        (lambda a, m: distribute_rows(torch.ones(3), partition(a, m)), "4 rows"),
        (lambda a, m: explain(a), "insum.distributed.partition gave"),
        (lambda a, m: partition(a, m) @ torch.ones(3, 1), "rows, but rank 0 holds 4"),
        (
            lambda a, m: insum.einsum("y[m] = A[m,k] * A[m,k]", A=partition(a, m)),
            "A stands 2 times",
        ),
        (
            lambda a, m: insum.einsum("y[m] = A[m,m]", A=partition(a, m)),
            "not read at two variables",
        ),
        (
            lambda a, m: insum.einsum("y[m] = A[m,k] * X[k+1]", A=partition(a, m), X=torch.ones(4)),
            "on several ranks",
        ),
        (
            lambda a, m: insum.einsum("y[m] = A[m,k]", A=partition(a, m), out_shape=(4,)),
            "sizes that operands tell",
        ),
        (
            lambda a, m: insum.einsum("y[m] = A[m,k] * B[m,k]", A=partition(a, m), B=a),
            "are sparse",
        ),
        (
            lambda a, m: insum.nn.GATConv(1, 1)(
                torch.ones(4, 1), partition(BlockCOO.from_dense(torch.eye(4), block_shape=2), m)
            ),
            "no edges",
        ),
        (lambda a, m: partition(a, m).with_values((torch.ones(4),)), "own, far and out"),
        (lambda a, m: insum.distributed.gcn_norm(partition(a.pattern(), m)), "with values"),
        (lambda a, m: insum.distributed.save(a, "x"), "insum.distributed.partition gave"),
        (lambda a, m: insum.distributed.load("nothing there", m), "a folder that save wrote"),
    ],
)
def test_messages(mesh: DeviceMesh, run, message: str) -> None:
    with pytest.raises(insum.InsumError) as caught:
        run(COO.from_dense(torch.eye(4)), mesh)
    assert message in str(caught.value)


def test_sums_that_travel_are_no_edges(mesh: DeviceMesh) -> None:
    A = to_itself(COO.from_dense(torch.ones(4, 4)), mesh)
    for run in (
        lambda: insum.nn.GATConv(1, 1)(torch.ones(4, 1), A),
        lambda: insum.einsum("y[m] max= A[m,k] * X[k]", A=A, X=torch.ones(4)),
    ):
        with pytest.raises(insum.UnsupportedError, match='send="rows"'):
            run()


def test_formats_of_a_partition(mesh: DeviceMesh) -> None:
    A = partition(ELL.from_dense(torch.eye(3)), mesh)
    assert isinstance(A.own, ELL) and A.to(torch.float16).dtype == torch.float16
    assert A.pattern().values == () and "rows 0 to 3" in repr(A)
