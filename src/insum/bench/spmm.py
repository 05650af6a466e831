"""Unstructured SpMM, the paper's figure of speed-ups over cuSPARSE: every graph of the data folder
times a dense matrix of 128 columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import insum
from insum.bench import data, routes
from insum.bench.cusparse import ALGORITHMS, CusparseProduct
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
from insum.bench.records import FORWARD
from insum.bench.rivals import CUSPARSE, PYG, module
from insum.formats import BlockGroupCOO, GroupCOO, suggest

TITLE = "SpMM"
STATEMENT = 'insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)'
BASELINE = "torch.sparse"
QUICK = ("cora", "amazon0601", "ego-twitter", "REDDIT-BINARY")
#: On a CPU, of the graphs that we know only those of up to this many nonzeros.
MOST_ON_CPU = 20_000
AT_ONCE = 1 << 22  # entries of the reference at a time


@dataclass(frozen=True, eq=False)
class SpmmInputs:
    """A graph with values as CSR, as entries, and in GroupCOO; a dense matrix; a gradient of the
    product.
    """

    graph: data.CsrPattern
    values: Tensor
    b: Tensor
    upstream: Tensor
    csr: Tensor
    a: GroupCOO

    def work(self, direction: str) -> Work:
        item, n = self.b.element_size(), self.b.shape[1]
        flops = 2.0 * self.graph.nonzeros * n
        entries = self.graph.nonzeros * (item + 4) + 4 * self.graph.shape[0]
        read = entries + (self.b.numel() + self.upstream.numel()) * item
        return Work(flops, read) if direction == FORWARD else Work(3 * flops, 3 * read)


def inputs(graph: data.CsrPattern, columns: int, dtype: torch.dtype) -> SpmmInputs:
    draw = data.RandomTensors(graph.indices.device, dtype)
    values = draw.normal(graph.nonzeros)
    csr = torch.sparse_csr_tensor(
        graph.indptr, graph.indices, values, graph.shape, check_invariants=False
    )
    b, upstream = (draw.normal(rows, columns) for rows in reversed(graph.shape))
    return SpmmInputs(graph, values, b, upstream, csr, GroupCOO.from_torch(csr, group_size="auto"))


def cases(options: BenchOptions) -> Iterator[Comparison]:
    names = data.chosen(data.graph_names(options.data), options.names, "graph")
    if options.quick and not options.names:
        names = [name for name in names if name in QUICK] or names[:4]
    for name in names:
        if not options.gpu and data.STAND_INS.get(name, (0, 0, 0))[1] > MOST_ON_CPU:
            continue
        graph = data.graph(name, options.data, options.device)
        for dtype in options.dtypes_or(torch.float32, torch.float16):
            given = inputs(graph, 128 if options.gpu else 32, dtype)
            yield from cases_of("spmm", name, dtype, options, given, want, contenders)


def want(given: SpmmInputs, direction: str) -> Results:
    graph, values, b = given.graph, given.values.double(), given.b.double()
    exact = torch.sparse_csr_tensor(
        graph.indptr, graph.indices, values, graph.shape, check_invariants=False
    )
    if direction == FORWARD:
        return (exact @ b,)
    rows, columns, g = graph.rows().long(), graph.indices.long(), given.upstream.double()
    sampled, to_b = [], torch.zeros_like(b)
    for start in range(0, len(rows), AT_ONCE):
        r, c, v = (t[start : start + AT_ONCE] for t in (rows, columns, values))
        sampled.append((g[r] * b[c]).sum(1))
        to_b.index_add_(0, c, v[:, None] * g[r])
    return exact @ b, torch.cat(sampled), to_b


def contenders(given: SpmmInputs, direction: str) -> list[Contender]:
    device = given.b.device
    found = [
        Contender("insum", lambda: ours(given, direction), lines=1),
        Contender(
            "torch.sparse (cuSPARSE)" if device.type == "cuda" else "torch.sparse",
            lambda: cusparse(given, direction),
        ),
    ]
    if direction == FORWARD and (proposed := suggest(given.csr)).format == "BlockGroupCOO":
        blocks = " x ".join(map(str, proposed.options["block_shape"]))
        built = functools.partial(in_blocks, given, proposed.options)
        found.append(Contender(f"insum, blocks of {blocks} as suggested", built, lines=2))
    if not PYG.absent(device):
        found.append(Contender("PyG", lambda: pyg(given, direction)))
    if not CUSPARSE.absent(device) and direction == FORWARD:
        found += [
            Contender(f"cuSPARSE {name}", functools.partial(prepared_cusparse, given, name))
            for name in ALGORITHMS
        ]
    if direction == FORWARD:
        found.append(Contender("torch.compile", lambda: compiled(given), slow=True))
    return found


def ours(given: SpmmInputs, direction: str) -> ReadyContender:
    a = given.a
    ready = routes.sparse_product(a, given.b, given.upstream, direction)
    there = a.slot_indices[0] >= 0
    return ReadyContender(ready.run, lambda r: (r[0], r[1][there], r[2]) if len(r) == 3 else r)


def in_blocks(given: SpmmInputs, options: dict[str, Any]) -> ReadyContender:
    """The format that `suggest` proposes, where that is another."""
    a = BlockGroupCOO.from_torch(given.csr, **options)
    return routes.sparse_product(a, given.b, given.upstream, FORWARD)


def prepared_cusparse(given: SpmmInputs, algorithm: str) -> ReadyContender:
    product = CusparseProduct(given.csr, given.b, algorithm)
    return ReadyContender(lambda: (product(),))


def cusparse(given: SpmmInputs, direction: str) -> ReadyContender:
    """CSR times dense; backward by the sampled product and the transposed matrix, its pattern
    prepared ahead.

    torch's sampled product takes no half precision on GPUs, so its operands are widened there.
    """
    csr = given.csr
    if direction == FORWARD:
        return ReadyContender(lambda: (csr @ given.b,))
    graph = given.graph
    rows = graph.rows().long()
    order = torch.argsort(graph.indices.long() * graph.shape[0] + rows)
    starts = torch.nn.functional.pad(
        torch.bincount(graph.indices.long(), minlength=graph.shape[1]).cumsum(0), (1, 0)
    ).int()
    turned = torch.sparse_csr_tensor(
        starts, rows[order].int(), given.values[order], graph.shape[::-1], check_invariants=False
    )
    wide = torch.float32
    blank = torch.sparse_csr_tensor(
        graph.indptr,
        graph.indices,
        torch.zeros_like(given.values, dtype=wide),
        graph.shape,
        check_invariants=False,
    )

    def run() -> Results:
        c = csr @ given.b
        turned.values().copy_(given.values[order])
        sampled = torch.sparse.sampled_addmm(
            blank, given.upstream.to(wide), given.b.to(wide).T, beta=0.0
        )
        return c, sampled.values().to(given.b.dtype), turned @ given.upstream

    return ReadyContender(run)


def pyg(given: SpmmInputs, direction: str) -> ReadyContender:
    """The usual message passing: gather, scale, scatter."""
    layer = module("torch_geometric.nn").SimpleConv(aggr="sum")
    edges = torch.stack([given.graph.indices.long(), given.graph.rows().long()])
    size = (given.graph.shape[1], given.graph.shape[0])

    def call(values: Tensor, b: Tensor) -> Tensor:
        out: Tensor = layer.propagate(edges, x=(b, None), edge_weight=values, size=size)
        return out

    return autograd(call, (given.values, given.b), given.upstream, direction)


def plain(values: Tensor, rows: Tensor, columns: Tensor, b: Tensor) -> Tensor:
    """Gather, scale, scatter; sums in float32."""
    out = torch.zeros(b.shape, device=b.device, dtype=torch.float32)
    return out.index_add_(0, rows, (values[:, None] * b[columns]).float()).to(b.dtype)


def compiled(given: SpmmInputs, native: bool | None = None) -> ReadyContender:
    call = lambda *_: insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=given.a, B=given.b)
    route, note = routes.compiled(plain, call, native)
    return autograd(
        route,
        (given.values, given.graph.rows().long(), given.graph.indices.long(), given.b),
        None,
        FORWARD,
        note,
    )
