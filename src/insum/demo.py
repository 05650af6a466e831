"""A short tour: the paper's four applications, each one line, checked and timed on whatever device
there is.

    python -m insum.demo

Every result is compared with a float64 reference, and timed beside what PyTorch itself offers for
the job on this machine. On a machine without a GPU the statements run as torch operations, in the
way that suits a CPU; their fused kernels are still generated and compiled for a GPU that need not
be here.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.api import insum
from insum.explanation import way_of
from insum.formats import BlockGroupCOO, GroupCOO
from insum.formats.einsum import einsum
from insum.lang.bind import bind
from insum.lang.parser import parse

KernelCall: TypeAlias = tuple[str, dict[str, Any], dict[str | int, Any], tuple[str, ...]]


@dataclass(frozen=True)
class Application:
    """One application: the line of user code, how to run it, its reference and what else does the
    job here.
    """

    name: str
    line: str
    run: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    rival: str
    run_rival: Callable[[], Any]
    replaces: str
    kernel: KernelCall


# --- the applications -----------------------------------------------------------------------------


def block_spmm(device: str, dtype: torch.dtype, size: int, block: int = 32) -> Application:
    generator = torch.Generator().manual_seed(0)
    mask = (
        (torch.rand(size // block, size // block, generator=generator) < 0.1)
        .repeat_interleave(block, 0)
        .repeat_interleave(block, 1)
    )
    dense = (torch.randn(size, size, generator=generator) * mask).to(device, dtype)
    B = torch.randn(size, size, generator=generator).to(device, dtype)
    A = BlockGroupCOO.from_dense(dense, block_shape=(block, block), group_size="auto")
    values: dict[str, Any] = {
        "AM": A.group_indices[0],
        "AK": A.slot_indices[0],
        "AV": A.values,
        "B": B.view(size // block, block, size),
    }
    kernel: KernelCall = (
        "C[AM[p],bm,n] += AV[p,q,bm,bk] * B[AK[p,q],bk,n]",
        values,
        {0: size // block},
        ("AK",),
    )
    return Application(
        "block SpMM",
        'einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)',
        run=lambda: einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B),
        reference=lambda: dense.double() @ B.double(),
        rival="torch.mm",
        run_rival=lambda: dense @ B,
        replaces="TorchBSR 202",
        kernel=kernel,
    )


def graph_spmm(device: str, nodes: int, columns: int = 128, degree: int = 8) -> Application:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, nodes, (nodes * degree,), generator=generator)
    columns_of = torch.randint(0, nodes, (nodes * degree,), generator=generator)
    matrix = (
        torch.sparse_coo_tensor(
            torch.stack([rows, columns_of]),
            torch.randn(nodes * degree, generator=generator),
            (nodes, nodes),
        )
        .coalesce()
        .to(device)
    )
    csr = matrix.to_sparse_csr()
    B = torch.randn(nodes, columns, generator=generator).to(device)
    A = GroupCOO.from_torch(csr, group_size="auto")
    values: dict[str, Any] = {
        "AM": A.group_indices[0],
        "AK": A.slot_indices[0],
        "AV": A.values,
        "B": B,
    }
    kernel: KernelCall = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", values, {0: nodes}, ("AK",)
    return Application(
        "graph SpMM",
        'einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)',
        run=lambda: einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B),
        reference=lambda: matrix.double() @ B.double(),
        rival="torch.sparse",
        run_rival=lambda: csr @ B,
        replaces="Sputnik 1918",
        kernel=kernel,
    )


def convolution(device: str, dtype: torch.dtype, voxels: int, channels: int = 64) -> Application:
    generator = torch.Generator().manual_seed(0)
    neighbours = torch.stack([torch.randperm(voxels, generator=generator) for _ in range(27)])
    table = (
        torch.where(torch.rand(27, voxels, generator=generator) < 0.4, neighbours, -1)
        .int()
        .to(device)
    )
    x = torch.randn(voxels, channels, generator=generator).to(device, dtype)
    w = (torch.randn(27, channels, channels, generator=generator) / channels).to(device, dtype)
    statement = "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]"

    def gathered(x: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros(voxels, channels, device=device, dtype=x.dtype)
        for z in range(27):
            here = (table[z] >= 0).nonzero()[:, 0]
            out.index_add_(0, here, x[table[z, here].long()] @ w[z])
        return out

    values: dict[str, Any] = {"In": x, "Nb": table, "W": w}
    return Application(
        "sparse conv",
        f'insum("{statement}", padded=["Nb"], In=x, Nb=table, W=w)',
        run=lambda: insum(statement, padded=("Nb",), In=x, Nb=table, W=w),
        reference=lambda: gathered(x.double(), w.double()),
        rival="gather-mm-scatter",
        run_rival=lambda: gathered(x, w),
        replaces="TorchSparse 4491",
        kernel=(statement, values, {}, ("Nb",)),
    )


def tensor_product(device: str, batch: int, channels: int = 32) -> Application:
    generator = torch.Generator().manual_seed(0)
    paths = [
        [(0, 0, 0)],
        [(1 + i, 0, 1 + i) for i in range(3)],
        [(1 + i, 1 + i, 0) for i in range(3)],
        [(0, 1 + i, 1 + i) for i in range(3)],
    ]
    rows = torch.tensor(
        [[*p, *[(-1, -1, -1)] * (3 - len(p))] for p in paths], dtype=torch.int32, device=device
    )
    I, J, K = (rows[:, :, d].contiguous() for d in range(3))
    V = torch.where(I >= 0, 1 / 3**0.5, 0.0)
    L = torch.arange(4, dtype=torch.int32, device=device)
    X, Y, W = (
        torch.randn(batch, *shape, generator=generator).to(device)
        for shape in ((4, channels), (4,), (4, channels, channels))
    )
    statement = "Z[b,I[p,q],w] += V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]"
    values: dict[str, Any] = {"V": V, "I": I, "J": J, "K": K, "L": L, "X": X, "Y": Y, "W": W}
    coefficients = torch.zeros(4, 4, 4, 4, device=device)
    at = (I >= 0).nonzero()
    coefficients[
        I[at[:, 0], at[:, 1]].long(),
        J[at[:, 0], at[:, 1]].long(),
        K[at[:, 0], at[:, 1]].long(),
        at[:, 0],
    ] = V[at[:, 0], at[:, 1]]

    def dense(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("ijkl,bju,bk,bluw->biw", coefficients.to(x.dtype), x, y, w)

    return Application(
        "tensor product",
        f'insum("{statement}", sizes={{1: 4}}, padded=["I", "J", "K"], ...)',
        run=lambda: insum(statement, sizes={1: 4}, padded=("I", "J", "K"), **values),
        reference=lambda: dense(X.double(), Y.double(), W.double()),
        rival="torch.einsum",
        run_rival=lambda: dense(X, Y, W),
        replaces="e3nn 225",
        kernel=(statement, values, {1: 4}, ("I", "J", "K")),
    )


# --- checking, timing, printing -------------------------------------------------------------------


def applications(device: str) -> list[Application]:
    gpu = device == "cuda"
    half = torch.float16 if gpu else torch.float32
    return [
        block_spmm(device, half, 4096 if gpu else 1024),
        graph_spmm(device, 400_000 if gpu else 10_000),
        convolution(device, half, 50_000 if gpu else 4_000),
        tensor_product(device, 10_000 if gpu else 1_000),
    ]


def milliseconds(
    functions: Sequence[Callable[[], Any]], device: str, budget: float = 1.0
) -> list[float]:
    """Median time of a call of each, in turns, with the device's work waited for."""
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    # a short pattern that keeps coming back is compiled into the code at its third call
    for _ in range(4):
        for function in functions:
            function()
    wait()
    times: list[tuple[float, ...]] = []
    end = time.perf_counter() + budget
    while not times or time.perf_counter() < end and len(times) < 50:
        times.append(tuple(_one(function, wait) for function in functions))
    return [statistics.median(column) for column in zip(*times)]


def _one(function: Callable[[], Any], wait: Callable[[], None]) -> float:
    function()  # what the other has left of caches and memory is not ours to pay for
    wait()
    start = time.perf_counter()
    function()
    wait()
    return 1e3 * (time.perf_counter() - start)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def kernel_note(application: Application, device: str) -> str:
    """What the generated kernel is: its strategy where it runs, the compiler's figures where there
    is no GPU to run it.
    """
    from insum.runtime import inspection

    statement, values, sizes, padded = application.kernel
    problem = bind(parse(statement), values, sizes=sizes, padded=padded)
    if device == "cuda":
        return inspection.strategy(problem, values)
    return inspection.compile_note(problem, values, "sm_90")


def way_note(application: Application, device: str) -> str:
    """Which way a CPU takes."""
    if device != "cpu":
        return ""
    statement, values, sizes, padded = application.kernel
    problem = bind(parse(statement), values, sizes=sizes, padded=padded)
    found = way_of(problem, values, new=True)
    return f"{'graph' if found is None else found.name} | "


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tour; the exit status is 1 if a result is wrong.

    >>> from insum.demo import main  # doctest: +SKIP
    >>> main()  # doctest: +SKIP
    """
    # torch.sparse, the rival, announces that it is in beta
    warnings.filterwarnings("ignore", message="Sparse")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"insum on {torch.cuda.get_device_name()}\n"
        if device == "cuda"
        else "insum on the CPU (kernels compiled for sm_90, not run)\n"
    )
    header = (
        "application",
        "error",
        "insum ms",
        "rival ms",
        "rival",
        "speed-up",
        "lines",
        "replaces (lines)",
        "kernel" if device == "cuda" else "way | kernel",
    )
    rows, wrong = [header], 0
    for application in applications(device):
        print(f"  {application.name}: {application.line}", flush=True)
        error = relative_error(application.run(), application.reference())
        wrong += not error < 2e-3
        ours, theirs = milliseconds((application.run, application.run_rival), device)
        note = way_note(application, device) + kernel_note(application, device)
        rows.append(
            (
                application.name,
                f"{error:.1e}",
                f"{ours:.3f}",
                f"{theirs:.3f}",
                application.rival,
                f"{theirs / ours:.2f}",
                "1",
                application.replaces,
                note,
            )
        )
    print("\n" + "\n".join(_aligned(rows)))
    print(
        f"\n{len(rows) - 1 - wrong} of {len(rows) - 1} applications agree with float64 references"
    )
    return 1 if wrong else 0


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
