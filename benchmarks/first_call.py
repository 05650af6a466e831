"""Time to the first result in a fresh process, with empty caches and with warm ones, for each
application.

    python benchmarks/first_call.py [--json FILE] [--only block-spmm,spmm,conv,tensor-product]
        [--rivals]

Every figure comes from a process of its own. The clock starts after `import torch`; creating the
CUDA context and the operands is reported apart, and Python's bytecode is compiled beforehand, as it
is when a package is installed. "total" is `import insum`, conversion to the format and the first
call, until the result is there. ``--rivals`` also times the same computation in torch operations
under torch.compile, from empty caches.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

APPLICATIONS = ("block-spmm", "spmm", "conv", "tensor-product")
GOALS = {"cold": 2.5, "warm": 0.5}


# --- what a fresh process does --------------------------------------------------------------------


def operands(name: str, device: str) -> dict[str, Any]:
    """Operands made with torch alone."""
    import torch

    torch.manual_seed(0)
    half = torch.float16 if device == "cuda" else torch.float32
    if name == "block-spmm":
        mask = (
            (torch.rand(128, 128, device=device) >= 0.9)
            .repeat_interleave(32, 0)
            .repeat_interleave(32, 1)
        )
        return {
            "A": torch.randn(4096, 4096, device=device, dtype=half) * mask,
            "B": torch.randn(4096, 1024, device=device, dtype=half),
        }
    if name == "spmm":
        rows = (torch.rand(200_000, device=device) ** 3 * 20_000).long()
        index = torch.stack([rows, torch.randint(0, 20_000, (200_000,), device=device)])
        matrix = torch.sparse_coo_tensor(
            index, torch.randn(200_000, device=device), (20_000, 20_000)
        ).coalesce()
        return {"A": matrix, "B": torch.randn(20_000, 128, device=device)}
    if name == "conv":
        table = torch.stack(
            [torch.randperm(20_000, device=device, dtype=torch.int32) for _ in range(27)]
        )
        table = torch.where(torch.rand(table.shape, device=device) < 0.4, table, -1)
        weights = torch.randn(27, 128, 128, device=device, dtype=half)
        return {
            "In": torch.randn(20_000, 128, device=device, dtype=half),
            "Nb": table,
            "W": weights,
        }
    paths = [
        [(0, 0, 0)],
        [(1 + i, 0, 1 + i) for i in range(3)],
        [(1 + i, 1 + i, 0) for i in range(3)],
        [(0, 1 + i, 1 + i) for i in range(3)],
    ]
    index = torch.tensor(
        [[*p, *[(-1, -1, -1)] * (3 - len(p))] for p in paths], device=device, dtype=torch.int32
    )
    made = {name: index[:, :, d].contiguous() for d, name in enumerate("IJK")}
    made |= {"L": torch.arange(4, device=device, dtype=torch.int32), "V": (made["I"] >= 0) * 0.57}
    return {
        **made,
        "X": torch.randn(4000, 4, 32, device=device),
        "Y": torch.randn(4000, 4, device=device),
        "W": torch.randn(4000, 4, 32, 32, device=device),
    }


def converted(name: str, given: dict[str, Any]) -> dict[str, Any]:
    import insum

    if name == "block-spmm":
        return {
            **given,
            "A": insum.formats.BlockGroupCOO.from_dense(given["A"], block_shape=(32, 32)),
        }
    if name == "spmm":
        return {**given, "A": insum.formats.GroupCOO.from_torch(given["A"])}
    if name == "tensor-product":
        for index in "IJKL":
            insum.constant(given[index])
    return given


def called(name: str, given: dict[str, Any]) -> Any:
    import insum

    if name in ("block-spmm", "spmm"):
        return insum.einsum("C[m,n] = A[m,k] * B[k,n]", **given)
    if name == "conv":
        return insum.insum("Out[x,m] = In[Nb[z,x],c] * W[z,c,m]", padded=("Nb",), **given)
    return insum.insum(
        "Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]",
        sizes={1: 4},
        padded=("I", "J", "K"),
        **given,
    )


def rival(name: str, given: dict[str, Any]) -> Callable[[], Any]:
    """The same in torch operations, as one would write it for torch.compile."""
    import torch

    if name == "block-spmm":
        blocks = given["A"].reshape(128, 32, 128, 32).transpose(1, 2)
        at = blocks.abs().sum((2, 3)).nonzero()
        values, B = blocks[at[:, 0], at[:, 1]], given["B"].reshape(128, 32, -1)

        def run() -> Any:
            products = torch.einsum("pmk,pkn->pmn", values, B[at[:, 1]])
            return torch.zeros(128, 32, B.shape[2], device=B.device, dtype=torch.float32).index_add(
                0, at[:, 0], products.float()
            )
    elif name == "spmm":
        index, values, B = given["A"].indices(), given["A"].values(), given["B"]

        def run() -> Any:
            return torch.zeros_like(B).index_add(0, index[0], values[:, None] * B[index[1]])
    elif name == "conv":
        x, table, W = given["In"], given["Nb"].long(), given["W"]

        def run() -> Any:
            rows = torch.where((table >= 0)[:, :, None], x[table.clamp(min=0)], 0.0)
            return torch.einsum("zxc,zcm->xm", rows, W)
    else:
        entries = [
            (i, j, k, p)
            for p in range(4)
            for i, j, k in zip(*(given[n][p].tolist() for n in "IJK"), strict=True)
            if i >= 0
        ]
        X, Y, W = given["X"], given["Y"], given["W"]

        def run() -> Any:
            out = [torch.zeros_like(X[:, 0]) for _ in range(4)]
            for i, j, k, p in entries:
                out[i] = out[i] + 0.57 * Y[:, k, None] * torch.einsum(
                    "bu,buw->bw", X[:, j], W[:, p]
                )
            return torch.stack(out, 1)

    return torch.compile(run)


def child(name: str, kind: str) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, last = {}, time.perf_counter()

    def lap(what: str) -> None:
        nonlocal last
        synchronize()
        now = time.perf_counter()
        times[what], last = now - last, now

    torch.zeros(1, device=device).add_(1)
    lap("context")
    given = operands(name, device)
    lap("operands")
    if kind == "rival":
        rival(name, given)()
        lap("first call")
        times["total"] = times["first call"]
    else:
        import insum  # noqa: F401

        lap("import insum")
        given = converted(name, given)
        lap("convert")
        called(name, given)
        lap("first call")
        times["total"] = times["import insum"] + times["convert"] + times["first call"]
        called(name, given)
        lap("second call")
    print("RESULT " + json.dumps(times))


# --- the parent -----------------------------------------------------------------------------------


def fresh(name: str, kind: str, folder: str) -> dict[str, float]:
    bytecode = {
        "PYTHONPYCACHEPREFIX": os.path.join(tempfile.gettempdir(), "insum-first-call-bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    environment = {
        **os.environ,
        **bytecode,
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "INSUM_CACHE_DIR": f"{folder}/insum",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--child", name, kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def measured(name: str, rivals: bool, repeat: int) -> list[dict[str, Any]]:
    """Cold, then warm, several times over; the best of each, as the machine disturbs it least."""
    kinds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fresh(name, "cold", folder)  # for the bytecode
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            kinds.setdefault("cold", []).append(fresh(name, "cold", folder))
            kinds.setdefault("warm", []).append(fresh(name, "warm", folder))
    if rivals:
        with tempfile.TemporaryDirectory() as folder:
            kinds["torch.compile, cold"] = [fresh(name, "rival", folder)]
    return [
        {"application": name, "kind": kind, **min(runs, key=lambda r: r.get("total", 1e9))}
        for kind, runs in kinds.items()
    ]


def line(row: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{key} {value:.2f}"
        for key, value in row.items()
        if isinstance(value, float) and key != "total"
    )
    goal = f" (goal {GOALS[row['kind']]})" if row["kind"] in GOALS else ""
    return (
        f"{row['application']:15s} {row['kind']:20s} {row.get('total', float('nan')):6.2f} "
        f"s{goal:12s}  {parts}"
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default=",".join(APPLICATIONS))
    parser.add_argument(
        "--rivals", action="store_true", help="also time torch.compile from empty caches"
    )
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only.split(","):
        for row in measured(name, arguments.rivals, arguments.repeat):
            rows.append(row)
            print(line(row), flush=True)
    if arguments.json:
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        command = " ".join(
            ["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]
        )
        about = {
            "command": command,
            "date": datetime.date.today().isoformat(),
            "device": device,
            "torch": torch.__version__,
        }
        Path(arguments.json).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
