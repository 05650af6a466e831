"""Block SpMM, the paper's figure of speed-ups over dense matmul: 4096 x 4096 times 4096 x 4096,
blocks of 32 x 32, by sparsity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import insum
from insum.bench import data, routes
from insum.bench.data import RandomTensors
from insum.bench.measure import (
    Comparison,
    Contender,
    ReadyContender,
    Results,
    Work,
    autograd,
    cases_of,
)
from insum.bench.options import BenchOptions
from insum.bench.records import BOTH, FORWARD
from insum.bench.rivals import SPARSE_BSR, TORCH_BSR
from insum.compat import sparse
from insum.formats import BlockGroupCOO
from insum.runtime import timing

TITLE = "Block SpMM"
STATEMENT = 'insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)'
BASELINE = "torch.mm"
BLOCK = 32
SPARSITIES = (0.5, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99)
QUICK = (0.5, 0.8, 0.95)
#: TorchBSR's search compiles for every set of parameters it tries; the CUDA graph's clock then
#: takes next to nothing.
SEARCH_SECONDS = 24.0
_found: dict[tuple[torch.dtype, int], dict[str, int]] = {}


@dataclass(frozen=True, eq=False)
class BlockInputs:
    """A block-sparse matrix in all its forms, a dense one, and a gradient of the product."""

    mask: Tensor  # of blocks
    dense: Tensor
    b: Tensor
    upstream: Tensor
    a: BlockGroupCOO

    @property
    def blocks(self) -> int:
        return int(self.mask.sum())

    def spread(self) -> Tensor:
        return spread(self.mask)

    def work(self, direction: str) -> Work:
        size, item = self.dense.shape[0], self.dense.element_size()
        flops = 2.0 * self.blocks * BLOCK * BLOCK * size
        read = self.blocks * (BLOCK * BLOCK * item + 8) + 2 * size * size * item
        return Work(flops, read) if direction == FORWARD else Work(3 * flops, 3 * read)


def spread(mask: Tensor) -> Tensor:
    return mask.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def inputs(
    size: int, sparsity: float, dtype: torch.dtype, device: torch.device, **options: Any
) -> BlockInputs:
    draw = RandomTensors(device, dtype)
    mask = draw.chance(size // BLOCK, size // BLOCK) >= sparsity
    dense = draw.normal(size, size) * spread(mask)
    a = BlockGroupCOO.from_dense(
        dense, block_shape=(BLOCK, BLOCK), **{"group_size": "auto", **options}
    )
    return BlockInputs(mask, dense, draw.normal(size, size), draw.normal(size, size), a)


def cases(options: BenchOptions) -> Iterator[Comparison]:
    size = 4096 if options.gpu else 256
    half = (torch.float16,) if options.quick else (torch.float16, torch.bfloat16)
    for dtype in options.dtypes_or(*(half if options.gpu else (torch.float32,))):
        for sparsity in sparsities(options):
            given = inputs(size, sparsity, dtype, options.device)
            yield from cases_of(
                "block-spmm", f"{sparsity:.0%} sparse", dtype, options, given, want, contenders
            )


def sparsities(options: BenchOptions) -> list[float]:
    every = {f"{100 * sparsity:.0f}": sparsity for sparsity in SPARSITIES}
    if options.names:
        return [every[name] for name in data.chosen(list(every), options.names, "sparsity")]
    return list(QUICK if options.quick else SPARSITIES)


def want(given: BlockInputs, direction: str) -> Results:
    a, b, g = (t.double() for t in (given.dense, given.b, given.upstream))
    return (a @ b,) if direction == FORWARD else (a @ b, (g @ b.T) * given.spread(), a.T @ g)


def contenders(given: BlockInputs, direction: str) -> list[Contender]:
    found = [
        Contender("insum", lambda: ours(given, direction), lines=1),
        Contender("torch.mm", lambda: dense(given, direction)),
        Contender(
            "TorchBSR", lambda: torch_bsr(given, direction, tuned=False), lines=TORCH_BSR.lines
        ),
    ]
    if direction == BOTH:
        found.append(Contender("masked torch.mm", lambda: masked(given)))
    else:
        found.append(
            Contender(
                "TorchBSR, tuned",
                lambda: torch_bsr(given, direction, tuned=True),
                lines=TORCH_BSR.lines,
                times=True,
            )
        )
        if not SPARSE_BSR.absent(given.b.device):
            found.append(Contender(SPARSE_BSR.name, lambda: sparse_bsr(given)))
        found.append(Contender("torch.compile", lambda: compiled(given), slow=True))
    absent = bool(TORCH_BSR.absent(given.b.device))
    return [c for c in found if not (absent and c.name.startswith("TorchBSR"))]


def ours(given: BlockInputs, direction: str) -> ReadyContender:
    a = given.a
    ready = routes.sparse_product(a, given.b, given.upstream, direction)

    def canonical(results: Results) -> Results:
        c, *gradients = results
        return (c, a.with_values(gradients[0]).to_dense(), gradients[1]) if gradients else (c,)

    return ReadyContender(ready.run, canonical)


def dense(given: BlockInputs, direction: str) -> ReadyContender:
    ready = autograd(torch.mm, (given.dense, given.b), given.upstream, direction)
    where = given.spread()
    return ReadyContender(ready.run, lambda r: (r[0], r[1] * where, r[2]) if len(r) == 3 else r)


def masked(given: BlockInputs) -> ReadyContender:
    where = given.spread()
    return autograd(
        lambda a, b: torch.mm(a * where, b), (given.dense, given.b), given.upstream, BOTH
    )


# --- TorchBSR: PyTorch's Triton kernels for BSR ---------------------------------------------------


def torch_bsr(given: BlockInputs, direction: str, *, tuned: bool) -> ReadyContender:
    kernels = sparse.bsr_kernels()
    bsr = as_bsr(given.dense)
    meta, note = None, ""
    if tuned:
        meta = tuned_meta(kernels, bsr, given.b)
        note = "torch.sparse._triton_ops_meta found " + ", ".join(
            f"{k} {v}" for k, v in meta.items()
        )

    def product(a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = kernels.mm(b, a, b, beta=0, alpha=1, meta=meta)
        return out

    if direction == FORWARD:
        return ReadyContender(lambda: (product(bsr, given.b),), note=note)
    # What a layer over these kernels would do: the transposed matrix for one gradient, a sampled
    # product for the other.
    turned, order = as_bsr(given.dense.T.contiguous()), transposed_order(bsr)

    def run() -> Results:
        c = product(bsr, given.b)
        turned.values().copy_(bsr.values()[order].transpose(1, 2))
        return (
            c,
            kernels.sampled(bsr, given.upstream, given.b.T, beta=0.0),
            product(turned, given.upstream),
        )

    return ReadyContender(run, lambda r: (r[0], r[1].to_dense(), r[2]), note)


def tuned_meta(kernels: Any, bsr: Tensor, b: Tensor) -> dict[str, int]:
    """PyTorch's own search over its kernel's parameters, by the clock that counts here: a CUDA
    graph. After a while nothing new is tried.
    """
    columns, clock = b.shape[1], timing.replay_timer(b.device)
    before = _found.get((b.dtype, columns))  # for another sparsity: a good place to start from
    end = time.monotonic() + (SEARCH_SECONDS if before is None else SEARCH_SECONDS / 3)
    start = before or {
        "GROUP_SIZE_ROW": 1,
        "num_stages": 1,
        "num_warps": 4,
        "SPLIT_N": max(columns // BLOCK, 1),
    }

    def microseconds(meta: dict[str, int]) -> float:
        return (
            math.inf
            if time.monotonic() > end
            else clock(lambda: kernels.mm(b, bsr, b, beta=0, alpha=1, meta=meta), 5)
        )

    def step(name: str, value: int, direction: int, meta: dict[str, int]) -> int:
        if name not in ("SPLIT_N", "num_warps"):
            return max(1, value + direction)
        moved = value << direction if direction > 0 else max(1, value >> -direction)
        return (
            moved
            if name == "num_warps" or columns % moved == 0 and moved <= columns // BLOCK
            else value
        )

    try:
        found: dict[str, int] = kernels.minimize(microseconds, start, start, step, max_step=2)[0]
    finally:
        getattr(clock, "close", lambda: None)()
    _found[b.dtype, columns] = found
    return found


def as_bsr(dense: Tensor) -> Tensor:
    return dense.to_sparse_bsr((BLOCK, BLOCK))


def transposed_order(bsr: Tensor) -> Tensor:
    """Which block of the matrix each block of its transpose is."""
    count = bsr.crow_indices().diff()
    row = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    return torch.argsort(bsr.col_indices() * len(count) + row)


def sparse_bsr(given: BlockInputs) -> ReadyContender:
    bsr = as_bsr(given.dense)
    return ReadyContender(lambda: (bsr @ given.b,))


# --- torch.compile --------------------------------------------------------------------------------


def plain(values: Tensor, rows: Tensor, columns: Tensor, b: Tensor) -> Tensor:
    """Gather, batched matmul, scatter."""
    wide = b.reshape(-1, BLOCK, b.shape[1])
    parts = torch.bmm(values, wide[columns])
    out = torch.zeros(wide.shape[0], BLOCK, b.shape[1], device=b.device, dtype=torch.float32)
    return out.index_add_(0, rows, parts.float()).to(b.dtype).reshape(b.shape)


def compiled(given: BlockInputs, native: bool | None = None) -> ReadyContender:
    at = given.mask.nonzero()
    blocks = len(given.mask)
    values = given.dense.reshape(blocks, BLOCK, blocks, BLOCK)[at[:, 0], :, at[:, 1]].contiguous()
    call = lambda *_: insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=given.a, B=given.b)
    route, note = routes.compiled(plain, call, native)
    return autograd(
        route, (values, at[:, 0].contiguous(), at[:, 1].contiguous(), given.b), None, FORWARD, note
    )
