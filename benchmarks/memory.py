"""Peak memory of each application, forward and backward, beside the size of its inputs and outputs,
at the sizes of real data.

    python benchmarks/memory.py --data DIR [--json FILE]

"kept" is what stays allocated between calls besides the inputs: schedules of rows, orders of sorted
indices, inverse tables.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import insum
import kernels
from insum.bench import data

WARM = 6
GOAL = 1.1


def size_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def measure(
    name: str, statement: str, values: dict[str, Tensor], wanted: Sequence[str], **options: Any
) -> dict[str, Any]:
    """Bytes at the peak of a warm forward call, and of a warm forward and backward, as shares of
    inputs and outputs.
    """
    leaves = {n: v.detach().requires_grad_() if n in wanted else v for n, v in values.items()}
    upstream = torch.randn_like(insum.insum(statement, **options, **leaves)).detach()

    def step() -> Tensor:
        out = insum.insum(statement, **options, **leaves)
        out.backward(upstream)
        return out

    for _ in range(WARM):
        step()
        for leaf in wanted:
            leaves[leaf].grad = None
    settle()
    base, inputs = torch.cuda.memory_allocated(), size_of(upstream, *values.values())
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        out = insum.insum(statement, **options, **leaves)
    torch.cuda.synchronize()
    forward, outputs = torch.cuda.max_memory_allocated() - base, size_of(out)
    del out
    torch.cuda.reset_peak_memory_stats()
    result = step()
    torch.cuda.synchronize()
    both, gradients = (
        torch.cuda.max_memory_allocated() - base,
        size_of(*(leaves[n].grad for n in wanted)),  # type: ignore[arg-type]
    )
    row = {
        "application": name,
        "inputs": inputs,
        "outputs": outputs,
        "gradients": gradients,
        "kept": base - inputs,
    }
    del result
    row |= {
        "forward": (base + forward) / (inputs + outputs),
        "both": (base + both) / (inputs + outputs + gradients),
    }
    print(
        f"{name:20s} forward {row['forward']:.3f}  forward and backward {row['both']:.3f}  "
        f"kept {row['kept'] / 2**20:.1f} MiB  (goal {GOAL})",
        flush=True,
    )
    return row


def block_spmm() -> dict[str, Any]:
    at = (torch.rand(128, 128, device="cuda") < 0.1).nonzero().int()
    values = {"AM": at[:, 0].contiguous(), "AK": at[:, 1].contiguous()}
    values |= {
        "AV": torch.randn(len(at), 32, 32, device="cuda").half(),
        "B": torch.randn(128, 32, 4096, device="cuda").half(),
    }
    return measure(
        "block SpMM",
        "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]",
        values,
        ("AV", "B"),
        sizes={0: 128},
    )


def spmm(file: Path) -> dict[str, Any]:
    loaded = np.load(file)
    rows = int(loaded["shape"][0])
    counts = torch.from_numpy(np.diff(loaded["indptr"]).astype(np.int64)).cuda()
    values = {
        "AM": torch.repeat_interleave(torch.arange(rows, device="cuda", dtype=torch.int32), counts)
    }
    values |= {"AK": torch.from_numpy(loaded["indices"].astype(np.int32)).cuda()}
    values |= {
        "AV": torch.randn(len(values["AM"]), device="cuda"),
        "B": torch.randn(rows, 128, device="cuda"),
    }
    del counts
    return measure(
        f"SpMM {file.stem}",
        "C[AM[p],n] += AV[p] * B[AK[p],n]",
        values,
        ("AV", "B"),
        sizes={0: rows},
    )


def convolution(file: Path) -> dict[str, Any]:
    table = data.neighbour_table(data.cloud(file.stem, file.parent, torch.device("cuda")))
    values = {"In": torch.randn(table.shape[1], 128, device="cuda").half(), "Nb": table}
    values |= {"W": torch.randn(27, 128, 128, device="cuda").half() / 128}
    return measure(
        "convolution", "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]", values, ("In", "W"), padded=("Nb",)
    )


def tensor_product() -> dict[str, Any]:
    i, j, k, v = kernels.product_pattern()
    values = {
        "I": i,
        "J": j,
        "K": k,
        "V": v,
        "L": torch.arange(4, device="cuda", dtype=torch.int32),
    }
    values |= {
        "X": torch.randn(10_000, 4, 64, device="cuda"),
        "Y": torch.randn(10_000, 4, device="cuda"),
    }
    values |= {"W": torch.randn(10_000, 4, 64, 64, device="cuda")}
    statement = "Z[b,I[p,q],w] += V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]"
    return measure(
        "tensor product", statement, values, ("X", "Y", "W"), sizes={1: 4}, padded=("I", "J", "K")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    files = {f.stem: f for f in Path(arguments.data).rglob("*.npz")}
    rows = [block_spmm()]
    for name, run in (
        ("amazon0601", spmm),
        ("ego-twitter", spmm),
        ("pc-s3dis-ucf-lobby", convolution),
    ):
        settle()
        rows += [run(files[name])] if name in files else []
        print(*([] if name in files else [f"skipped: {name} is not in the data folder"]))
    rows.append(tensor_product())
    if arguments.json:
        command = " ".join(
            ["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)]
        )
        about = {
            "command": command,
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        Path(arguments.json).write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
