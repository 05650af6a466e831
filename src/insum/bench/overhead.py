"""``insum bench overhead``: host time of one warm call, everything cached, beside PyTorch's own
calls in the same run.

Sizes are small, so that a device keeps up; calls are queued without waiting for it. The least of
many short runs counts, which is the figure that neighbours on the machine disturb least. On a CPU
statements stand beside the same computation by hand.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import insum
from insum.bench.measure import in_turns, once
from insum.bench.study import Study

#: Microseconds on a GPU.
GOALS = {"insum.insum": 25.0, "compiled": 12.0}
STATEMENT = "C[rows[p],n] = vals[p] * B[cols[p],n]"
#: Calls of one short run, runs, and calls before.
CALLS, ROUNDS, WARM = 50, 300, 200
PROFILED = 2000


def on_gpu(device: torch.device) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    rows = torch.sort(torch.randint(0, 256, (1024,), device=device, dtype=torch.int32)).values
    cols = torch.randint(0, 256, (1024,), device=device, dtype=torch.int32)
    vals, B = torch.randn(1024, device=device), torch.randn(256, 64, device=device)
    A, X = (torch.randn(64, 64, device=device, dtype=torch.float16) for _ in range(2))
    blank, index = torch.zeros(256, 64, device=device), rows.long()
    update = torch.randn(1024, 64, device=device)
    spmm = insum.compile(STATEMENT, out_shape=(256, 64))
    product = insum.compile("C[i,j] = A[i,k] * B[k,j]")
    linear = torch.nn.Linear(64, 64, device=device, dtype=torch.float16)
    return {
        "insum.insum, sparse product": lambda: insum.insum(
            STATEMENT, out_shape=(256, 64), rows=rows, cols=cols, vals=vals, B=B
        ),
        "insum.insum, sparse product, in place": lambda: insum.insum(
            STATEMENT.replace("=", "+=", 1), C=blank, rows=rows, cols=cols, vals=vals, B=B
        ),
        "compiled, sparse product": lambda: spmm(rows=rows, cols=cols, vals=vals, B=B),
        "insum.insum, dense product": lambda: insum.insum("C[i,j] = A[i,k] * B[k,j]", A=A, B=X),
        "compiled, dense product": lambda: product(A=A, B=X),
        "torch.mm": lambda: torch.mm(A, X),
        "torch.index_add": lambda: torch.index_add(blank, 0, index, update),
        "torch.nn.Linear": lambda: linear(A),
    }


def on_cpu() -> dict[str, Callable[[], object]]:
    """Statements, and the same by hand."""
    A, B, C, v = torch.randn(4, 9), torch.randn(3, 5), torch.zeros(4, 5), torch.randn(9)
    D, E = torch.tensor([0, 2, 2, 1]), torch.tensor([8, 0, 3])

    def product() -> Tensor:
        return torch.einsum("yr,rx->yx", torch.index_select(A, 1, E), B)

    into, new = "C[D[y],x] += A[y,E[r]] * B[r,x]", "C[D[y],x] = A[y,E[r]] * B[r,x]"
    dense, copy = "y[i] = A[i,j] * v[j]", "y[i,j] = A[i,j]"
    return {
        f"{into}, by hand": lambda: C.index_add_(0, D, product()),
        into: lambda: insum.insum(into, C=C, A=A, B=B, D=D, E=E),
        f"{new}, by hand": lambda: torch.zeros((4, 5)).index_add_(0, D, product()),
        new: lambda: insum.insum(new, A=A, B=B, D=D, E=E, out_shape=(4, 5)),
        f"{dense}, by hand": lambda: torch.einsum("ij,j->i", A, v),
        dense: lambda: insum.insum(dense, A=A, v=v),
        f"{copy}, by hand": lambda: A.clone(),
        copy: lambda: insum.insum(copy, A=A),
    }


def microseconds(
    every: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """The least time of each."""

    def short_run(run: Callable[[], object]) -> float:
        """The device is idle when it begins, and not waited for at its end."""
        return once(lambda: [run() for _ in range(CALLS)], device, wait_for_end=False)

    for run in every.values():
        for _ in range(WARM):
            run()
    times = in_turns(every, rounds, short_run)
    return {name: 1e6 * min(own) / CALLS for name, own in times.items()}


def profile(name: str, run: Callable[[], object]) -> None:
    """Show where the time of a call goes."""
    profiled = cProfile.Profile()
    profiled.enable()
    for _ in range(PROFILED):
        run()
    profiled.disable()
    print(f"\n{name}")
    pstats.Stats(profiled).sort_stats("tottime").print_stats(14)


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: Any) -> None:
    parser.add_argument("--profile", action="store_true", help="show where the time of a call goes")


def run(study: Study) -> int:
    every = on_gpu(study.device) if study.options.gpu else on_cpu()
    with torch.no_grad():
        times = microseconds(every, study.device, ROUNDS // 30 if study.options.quick else ROUNDS)
        study.keep(microseconds=times)
        for name, taken in times.items():
            goal = GOALS.get(name.partition(",")[0]) if study.options.gpu else None
            print(f"{name:44s}{taken:8.1f} µs{f'   goal {goal:.0f}' if goal else ''}")
        for name in every if study.asked.profile else ():
            profile(name, every[name])
    return 0
