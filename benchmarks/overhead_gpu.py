"""CPU time of one warm call on a GPU, everything cached: insum.insum, a compiled statement,
torch.mm and torch.index_add in one run.

    python benchmarks/overhead_gpu.py [--json FILE] [--profile]

Calls are queued without waiting for the device; sizes are small, so that the device keeps up. The
least of many short runs is shown.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import insum

GOALS = {"insum.insum": 25.0, "compiled": 12.0}
STATEMENT = "C[rows[p],n] = vals[p] * B[cols[p],n]"


def cases(device: str) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    rows = torch.sort(torch.randint(0, 256, (1024,), device=device, dtype=torch.int32)).values
    cols = torch.randint(0, 256, (1024,), device=device, dtype=torch.int32)
    vals, B = torch.randn(1024, device=device), torch.randn(256, 64, device=device)
    A, X = (
        torch.randn(64, 64, device=device, dtype=torch.float16),
        torch.randn(64, 64, device=device, dtype=torch.float16),
    )
    blank, index, update = (
        torch.zeros(256, 64, device=device),
        rows.long(),
        torch.randn(1024, 64, device=device),
    )
    spmm, product = (
        insum.compile(STATEMENT, out_shape=(256, 64)),
        insum.compile("C[i,j] = A[i,k] * B[k,j]"),
    )
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


def microseconds(
    every: dict[str, Callable[[], object]],
    synchronize: Callable[[], object],
    calls: int = 50,
    rounds: int = 300,
) -> dict[str, float]:
    """The least of many short runs of each: one after the other in every round, so that a slow
    moment of the host hits all of them.
    """
    for run in every.values():
        for _ in range(200):
            run()
    best = dict.fromkeys(every, float("inf"))
    for _ in range(rounds):
        for name, run in every.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: taken / calls * 1e6 for name, taken in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="")
    parser.add_argument("--profile", action="store_true", help="show where the time of a call goes")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    every = cases(device)
    with torch.no_grad():
        times = microseconds(every, synchronize)
        for name, taken in times.items():
            goal = next(
                (
                    f"   goal {limit:.0f}"
                    for start, limit in GOALS.items()
                    if name.startswith(start)
                ),
                "",
            )
            print(f"{name:40s}{taken:8.1f} µs  {taken / times['torch.mm']:5.2f} of torch.mm{goal}")
        if arguments.profile:
            for name in ("insum.insum, sparse product", "compiled, sparse product"):
                profile = cProfile.Profile()
                profile.enable()
                for _ in range(2000):
                    every[name]()
                profile.disable()
                synchronize()
                print(f"\n{name}")
                pstats.Stats(profile).sort_stats("tottime").print_stats(14)
    if arguments.json:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        command = " ".join(
            ["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]
        )
        about = {
            "command": command,
            "date": datetime.date.today().isoformat(),
            "device": name,
            "torch": torch.__version__,
        }
        Path(arguments.json).write_text(
            json.dumps({**about, "insum": insum.__version__, "microseconds": times}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
