"""The four applications at their default configs on a GPU: checked against float64, then timed
beside their rivals in the same run.

    python benchmarks/kernels.py --data DIR --json FILE [--only block-spmm,spmm,conv,tensor-product]

``DIR`` holds graphs and point clouds as .npz files (see the data manifest); what is missing is
named and skipped. Times are medians of CUDA-graph replays; the memory that outputs will take is
filled with NaN before each check.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import insum
from insum.bench import block_spmm as bench_block
from insum.bench import conv as bench_conv
from insum.bench import data as bench_data
from insum.bench import spmm as bench_spmm
from insum.bench.measure import clock, poison, relative_error
from insum.bench.records import FORWARD

DEVICE = "cuda"
Rivals = dict[str, Callable[[], Any]]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return relative_error((got,), (want,))


def milliseconds(run: Callable[[], Any]) -> float:
    return clock(lambda: (run(),), torch.device(DEVICE))[0]


class Table:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        application: str,
        case: str,
        run: Callable[[], torch.Tensor],
        want: torch.Tensor,
        tolerance: float,
        rivals: Rivals,
    ) -> None:
        poison((want,), torch.float32, torch.device(DEVICE))
        off = error(run(), want)
        if not off < tolerance:
            print(f"WRONG {application} {case}: relative error {off:.2e}", flush=True)
        row: dict[str, Any] = {
            "application": application,
            "case": case,
            "error": off,
            "insum_ms": milliseconds(run),
            "ok": off < tolerance,
        }
        for name, rival in rivals.items():
            row[name] = milliseconds(rival)
        self.rows.append(row)
        print(self.line(row), flush=True)

    def line(self, row: dict[str, Any]) -> str:
        rivals = "  ".join(
            f"{k} {v:.4f} ({v / row['insum_ms']:.2f}x)"
            for k, v in row.items()
            if k not in ("application", "case", "error", "insum_ms", "ok")
        )
        return (
            f"{row['application']:15s} {row['case']:28s} error {row['error']:.1e}  insum "
            f"{row['insum_ms']:.4f} ms  {rivals}"
        )


# --- applications ---------------------------------------------------------------------------------


def block_spmm(
    table: Table,
    data: Path,
    prototypes: Any,
    sparsities: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
) -> None:
    for sparsity in sparsities:
        given = bench_block.inputs(4096, sparsity, torch.float16, torch.device(DEVICE))
        a, dense, b = given.a, given.dense, given.b
        want = dense.double() @ b.double()
        rivals: Rivals = {"torch.mm": lambda d=dense, b=b: torch.mm(d, b)}
        if prototypes is not None:
            rivals["prototype"] = prototype_block(
                prototypes, given.mask, dense, b, bench_block.BLOCK
            )
        run = lambda a=a, b=b: insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b)
        table.add("block-spmm", f"{sparsity:.0%} sparse", run, want, 2e-3, rivals)


def prototype_block(
    prototypes: Any, mask: torch.Tensor, dense: torch.Tensor, b: torch.Tensor, block: int
) -> Callable[[], Any]:
    at = mask.nonzero()
    blocks = mask.shape[0]
    v = dense.view(blocks, block, blocks, block)[at[:, 0], :, at[:, 1]].contiguous()
    ptr = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    col, c, n = at[:, 1].int().contiguous(), torch.empty_like(b), b.shape[1]
    return lambda: prototypes.block_spmm[(blocks * (n // 256),)](
        v, col, ptr, b, c, n, blocks, block, 256, 1, 1, num_warps=4, num_stages=2
    )


def spmm(
    table: Table,
    data: Path,
    names: tuple[str, ...],
    columns: int = 128,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16),
) -> None:
    found = bench_data.files(data, "indptr")
    for name in names:
        if name not in found:
            print(f"skipped: {name} (no {name}.npz in the data folder)")
            continue
        graph = bench_data.graph(name, data, torch.device(DEVICE))
        for dtype in dtypes:
            given = bench_spmm.inputs(graph, columns, dtype)
            (want,) = bench_spmm.want(given, FORWARD)
            run = lambda g=given: insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=g.a, B=g.b)
            rivals: Rivals = {"torch.sparse": lambda g=given: g.csr @ g.b}
            table.add(
                "spmm",
                f"{name} {str(dtype)[6:]}",
                run,
                want,
                1e-5 if dtype == torch.float32 else 2e-3,
                rivals,
            )


def conv(
    table: Table, data: Path, prototypes: Any, names: tuple[str, ...], channels: int = 128
) -> None:
    found = bench_data.files(data, "points")
    for name in names:
        if name not in found:
            print(f"skipped: {name} (no {name}.npz in the data folder)")
            continue
        given = bench_conv.inputs(
            bench_data.cloud(name, data, torch.device(DEVICE)), channels, torch.float16
        )
        x, w, nb_by_z, nb = given.x, given.w, given.table, given.table.t().contiguous()
        (want,) = bench_conv.want(given, FORWARD)
        rivals: Rivals = {}
        if prototypes is not None:
            out = torch.empty_like(x)
            grid = (-(-nb.shape[0] // 128),)
            sizes = (nb.shape[0], 27, channels, channels, 128, 64, 128)
            rivals["prototype"] = lambda x=x, n=nb_by_z, w=w, o=out, g=grid, s=sizes: (
                prototypes.conv_table[g](x, n, w, o, *s, num_warps=4, num_stages=2)
            )
        run = lambda x=x, n=nb_by_z, w=w: insum.insum(
            "Out[x,m] += In[Nb[z,x],c] * W[z,c,m]", padded=("Nb",), In=x, Nb=n, W=w
        )
        table.add("conv", f"{name} by offset", run, want, 2e-3, rivals)
        run = lambda x=x, n=nb, w=w: insum.insum(
            "Out[x,m] += In[Nb[x,z],c] * W[z,c,m]", padded=("Nb",), In=x, Nb=n, W=w
        )
        table.add("conv", f"{name} by voxel", run, want, 2e-3, rivals)


def product_pattern() -> tuple[torch.Tensor, ...]:
    """Paths of 0e+1o times 0e+1o into 0e+1o, grouped by path: I, J, K and coefficients, padded with
    -1.
    """
    paths = [
        [(0, 0, 0)],
        [(1 + i, 0, 1 + i) for i in range(3)],
        [(1 + i, 1 + i, 0) for i in range(3)],
        [(0, 1 + i, 1 + i) for i in range(3)],
    ]
    width = max(len(p) for p in paths)
    rows = [[*p, *[(-1, -1, -1)] * (width - len(p))] for p in paths]
    index = torch.tensor(rows, device=DEVICE, dtype=torch.int32)
    values = torch.where(index[:, :, 0] >= 0, torch.full(index.shape[:2], 0.57, device=DEVICE), 0.0)
    return (
        index[:, :, 0].contiguous(),
        index[:, :, 1].contiguous(),
        index[:, :, 2].contiguous(),
        values,
    )


def tensor_product(
    table: Table,
    prototypes: Any,
    static: Any,
    batch: int = 10_000,
    widths: tuple[int, ...] = (16, 32, 64),
) -> None:
    i, j, k, v = product_pattern()
    for channels in widths:
        torch.manual_seed(0)
        x, y = torch.randn(batch, 4, channels, device=DEVICE), torch.randn(batch, 4, device=DEVICE)
        w = torch.randn(batch, 4, channels, channels, device=DEVICE)
        path = torch.arange(4, device=DEVICE, dtype=torch.int32)
        want = torch.zeros(batch, 4, channels, device=DEVICE, dtype=torch.float64)
        for p in range(4):
            ok = i[p] >= 0
            term = (v[p, ok] * y[:, k[p, ok].long()])[:, :, None].double() * (
                x[:, j[p, ok].long()].double() @ w[:, p].double()
            )
            want.index_add_(1, i[p, ok].long(), term)
        rivals: Rivals = {}
        if static is not None:
            rivals["prototype"] = prototype_product(static, i, j, k, v, x, y, w)
        statement = "Z[b,I[p,q],w] += V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]"
        for constant in (False, True):
            index = [t.clone() for t in (i, j, k, path)]
            if constant:
                for t in index:
                    insum.constant(t)
            arguments = dict(zip(("I", "J", "K", "L"), index, strict=True), V=v, X=x, Y=y, W=w)
            run = lambda a=arguments, statement=statement: insum.insum(
                statement, sizes={1: 4}, padded=("I", "J", "K"), **a
            )
            table.add(
                "tensor-product",
                f"lmax 1, {channels} channels{', constant' if constant else ''}",
                run,
                want,
                1e-5,
                rivals,
            )


def prototype_product(
    static: Any, i: Any, j: Any, k: Any, v: Any, x: Any, y: Any, w: Any
) -> Callable[[], Any]:
    rows = zip(i.tolist(), j.tolist(), k.tolist(), v.tolist(), strict=True)
    entries = [[(a, b, c, d) for a, b, c, d in zip(*row, strict=True) if a >= 0] for row in rows]
    kernel = static.load(static.generate(entries, 4, 4, 4))
    channels, z = x.shape[2], torch.empty_like(x)
    return lambda: kernel[(-(-x.shape[0] // 4), 1)](
        x, y, w, z, x.shape[0], channels, channels, 4, channels
    )


def load_prototypes(folder: str) -> tuple[Any, Any]:
    if not folder:
        return None, None
    sys.path.insert(0, folder)
    import prototypes
    import static_pattern

    return prototypes, static_pattern


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument(
        "--prototypes", default="", help="folder with hand-written kernels to time beside ours"
    )
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default="block-spmm,spmm,conv,tensor-product")
    parser.add_argument("--graphs", default="amazon0601,ego-twitter")
    parser.add_argument("--clouds", default="pc-s3dis-ucf-lobby")
    arguments = parser.parse_args()
    data = Path(arguments.data)
    prototypes, static = load_prototypes(arguments.prototypes)
    table, only = Table(), arguments.only.split(",")
    if "block-spmm" in only:
        block_spmm(table, data, prototypes)
    if "spmm" in only:
        spmm(table, data, tuple(arguments.graphs.split(",")))
    if "conv" in only:
        conv(table, data, prototypes, tuple(arguments.clouds.split(",")))
    if "tensor-product" in only:
        tensor_product(table, prototypes, static)
    print("\n" + "\n".join(table.line(row) for row in table.rows))
    if arguments.json:
        about = {
            "command": " ".join(
                ["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]
            ),
            "date": datetime.date.today().isoformat(),
        }
        about |= {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "insum": insum.__version__,
            "rows": table.rows,
        }
        Path(arguments.json).write_text(json.dumps(about, indent=1) + "\n")
    if not all(row["ok"] for row in table.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
