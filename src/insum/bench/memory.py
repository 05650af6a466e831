"""``insum bench memory``: peak memory of each application, forward and backward, beside the size of
its inputs and outputs, at the sizes of real data.

"kept" is what stays allocated between calls besides the inputs: schedules of rows, orders of sorted
indices, inverse tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import insum
from insum.bench import data
from insum.bench.measure import peak_bytes, release, wait
from insum.bench.study import Study

APPLICATIONS = ("block-spmm", "spmm", "conv", "tensor-product")
WARM = 6
GOAL = 1.1
GRAPHS, CLOUD = ("amazon0601", "ego-twitter"), "pc-s3dis-ucf-lobby"


@dataclass(frozen=True, eq=False)
class MemoryCase:
    """A statement, its arguments, and those that have gradients."""

    name: str
    statement: str
    values: Mapping[str, Tensor]
    leaves: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        return {
            name: value.detach().requires_grad_() if name in self.leaves else value
            for name, value in self.values.items()
        }


def measured(case: MemoryCase, device: torch.device) -> dict[str, Any]:
    """Bytes at the peak of a warm forward call, and of a warm forward and backward, as shares of
    inputs and outputs.
    """
    given = case.given()

    def run() -> Tensor:
        out: Tensor = insum.insum(case.statement, **case.options, **given)
        return out

    upstream = torch.randn_like(run()).detach()

    def step() -> Tensor:
        out = run()
        out.backward(upstream)  # type: ignore[no-untyped-call]
        return out

    def clear() -> None:
        for leaf in case.leaves:
            given[leaf].grad = None

    for _ in range(WARM):
        step()
        clear()
    wait(device)
    release(device)
    base, inputs = torch.cuda.memory_allocated(), size_of(upstream, *case.values.values())
    with torch.no_grad():
        forward, outputs = peak_bytes(run, device), size_of(upstream)
    both = peak_bytes(step, device)
    gradients = size_of(*(given[leaf].grad for leaf in case.leaves))
    clear()
    return {
        "application": case.name,
        "inputs": inputs,
        "outputs": outputs,
        "gradients": gradients,
        "kept": base - inputs,
        "forward": (base + forward) / (inputs + outputs),
        "both": (base + both) / (inputs + outputs + gradients),
    }


def size_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# --- applications ---------------------------------------------------------------------------------


def cases(study: Study) -> Iterator[MemoryCase]:
    """Made when their turn comes, so that only one is there at a time."""
    place, device, wanted = study.options.data, study.device, study.wanted(APPLICATIONS)
    if "block-spmm" in wanted:
        yield block_spmm(device)
    for name in GRAPHS if "spmm" in wanted else ():
        yield spmm(data.graph(name, place, device))
    if "conv" in wanted:
        yield convolution(data.cloud(CLOUD, place, device))
    if "tensor-product" in wanted:
        yield tensor_product(device)


def block_spmm(device: torch.device) -> MemoryCase:
    draw = data.RandomTensors(device, torch.float16)
    at = (draw.chance(128, 128) < 0.1).nonzero().int()
    values = {
        "AM": at[:, 0].contiguous(),
        "AK": at[:, 1].contiguous(),
        "AV": draw.normal(len(at), 32, 32),
        "B": draw.normal(128, 32, 4096),
    }
    statement = "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]"
    return MemoryCase("block SpMM", statement, values, ("AV", "B"), {"sizes": {0: 128}})


def spmm(graph: data.CsrPattern) -> MemoryCase:
    draw, rows = data.RandomTensors(graph.indices.device), graph.shape[0]
    values = {
        "AM": graph.rows(),
        "AK": graph.indices,
        "AV": draw.normal(graph.nonzeros),
        "B": draw.normal(graph.shape[1], 128),
    }
    statement, sizes = "C[AM[p],n] += AV[p] * B[AK[p],n]", {"sizes": {0: rows}}
    return MemoryCase(f"SpMM {graph.name}", statement, values, ("AV", "B"), sizes)


def convolution(voxels: Tensor) -> MemoryCase:
    draw, table = data.RandomTensors(voxels.device, torch.float16), data.neighbour_table(voxels)
    values = {
        "In": draw.normal(table.shape[1], 128),
        "Nb": table,
        "W": draw.normal(27, 128, 128, scale=1 / 128),
    }
    statement, padded = "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]", {"padded": ("Nb",)}
    return MemoryCase("convolution", statement, values, ("In", "W"), padded)


def tensor_product(device: torch.device) -> MemoryCase:
    draw = data.RandomTensors(device)
    found = data.grouped_coefficients(data.degrees(1))
    values = {
        **{name: table.to(device) for name, table in found.items()},
        "X": draw.normal(10_000, 4, 64),
        "Y": draw.normal(10_000, 4),
        "W": draw.normal(10_000, 5, 64, 64),
    }
    statement = "Z[b,I[p,q],w] += V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]"
    options = {"sizes": {1: 4}, "padded": ("I", "J", "K")}
    return MemoryCase("tensor product", statement, values, ("X", "Y", "W"), options)


# --- the command ----------------------------------------------------------------------------------


def run(study: Study) -> int:
    study.require_gpu()
    rows: list[dict[str, Any]] = []
    for case in cases(study):
        rows.append(measured(case, study.device))
        study.keep(rows=rows)
        print(_line(rows[-1]), flush=True)
    return 0


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['application']:20s} forward {row['forward']:.3f}  forward and backward "
        f"{row['both']:.3f}  kept {row['kept'] / 2**20:.1f} MiB  (goal {GOAL})"
    )
