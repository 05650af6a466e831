"""Rows that travel, with NCCL and one rank that sends to itself: results, gradients, memory, and
which stream waits for which.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import insum
from distributed.to_itself import one_rank, to_itself
from insum.distributed import collect_rows, distribute_rows, partition
from insum.distributed.partitioned import Partitioned
from insum.formats import COO, GroupCOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
PRODUCT = "Y[m,n] = A[m,k] * X[k,n]"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    if not dist.is_nccl_available():
        pytest.skip("needs NCCL")
    yield one_rank("nccl")
    dist.destroy_process_group()


def large(mesh: DeviceMesh) -> tuple[COO, Partitioned, Tensor]:
    """A band of entries, and some far from it."""
    torch.manual_seed(0)
    nodes = 200_000
    rows = torch.arange(nodes, device="cuda").repeat_interleave(12)
    columns = (rows + torch.randint(-1000, 1000, rows.shape, device="cuda")) % nodes
    far = torch.rand(rows.shape, device="cuda") < 0.05
    columns[far] = torch.randint(nodes, (int(far.sum()),), device="cuda")
    values = torch.randn(rows.shape[0], device="cuda")
    A = COO.from_entries((rows, columns), values, (nodes, nodes))
    return A, to_itself(A, mesh), torch.randn(nodes, 128, device="cuda")


def test_gradients_of_second_order(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    dense = (torch.randn(30, 30).double() * (torch.rand(30, 30) < 0.3)).cuda()
    A = to_itself(COO.from_dense(dense), mesh)

    def product(x: Tensor, *values: Tensor) -> Tensor:
        return insum.einsum(PRODUCT, A=A.with_values(values), X=x)

    x = torch.randn(30, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    given = (x, *(v.clone().requires_grad_() for v in A.values))
    torch.testing.assert_close(product(*given), dense @ x)
    assert torch.autograd.gradcheck(product, given, fast_mode=True, nondet_tol=1e-9)
    assert torch.autograd.gradgradcheck(product, given, fast_mode=True, nondet_tol=1e-9)
    whole = partition(GroupCOO.from_dense(dense), mesh, order="rcm")
    Y = collect_rows(whole @ distribute_rows(x.detach(), whole), whole)
    torch.testing.assert_close(Y, (dense @ x).detach())


def test_memory_of_a_product(mesh: DeviceMesh) -> None:
    """The result, rows that travel, and a tenth."""
    _, A, X = large(mesh)
    with torch.no_grad():
        for _ in range(5):
            insum.einsum(PRODUCT, A=A, X=X)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        Y = insum.einsum(PRODUCT, A=A, X=X)
    rows = sum(len(e.given) + e.taken for e in (A.columns, A.rows))
    allowed = Y.nbytes + rows * X.shape[1] * X.element_size()
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * allowed


def test_own_entries_do_not_wait_for_the_exchange(mesh: DeviceMesh) -> None:
    """The exchange is on a stream of its own, and runs while kernels of the other one do."""
    plain, A, X = large(mesh)
    for _ in range(5):
        Y = insum.einsum(PRODUCT, A=A, X=X)
    torch.testing.assert_close(Y, insum.einsum(PRODUCT, A=plain, X=X), rtol=1e-4, atol=1e-4)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.cuda._sleep(100_000_000)  # the host runs ahead, and streams do what they may
        insum.einsum(PRODUCT, A=A, X=X)
        torch.cuda.synchronize()
    kernels = [e for e in seen.profiler.kineto_results.events() if e.device_resource_id() > 0]
    kernels = [e for e in kernels if "cuda" in str(e.device_type()).lower()]
    sent = [e for e in kernels if "nccl" in e.name().lower() and "Kernel" in e.name()]
    computed = [e for e in kernels if e.name().startswith("insum_")]
    assert sent and len(computed) == 3
    assert not {e.device_resource_id() for e in sent} & {e.device_resource_id() for e in computed}
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in sent]
    beside = [
        min(end, e.start_ns() + e.duration_ns()) - max(start, e.start_ns())
        for start, end in spans
        for e in computed
    ]
    assert max(beside) > 0
