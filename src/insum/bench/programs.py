"""Programs in plain PyTorch that ``insum bench fusion`` compiles: PyG's layers, unmodified, over a
graph, and a sparse convolution written by hand over the voxels of a point cloud.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from insum.bench import data
from insum.bench.options import BenchOptions
from insum.bench.rivals import module

RELATIONS, HEADS = 4, 4
#: Programs that are run when they are named: torch.compile alone fails on the first with some
#: versions of torch.
ON_REQUEST = ("FastRGCNConv",)
#: Programs that run over something else than a graph.
WITHOUT_GRAPH = ("convolution",)
#: Programs that mask edges: those of each relation, or self-loops.
MASKING = ("RGCNConv", "GCNConv-uncached")
#: Nodes, edges and voxels where there is no GPU.
SMALL_NODES, SMALL_EDGES, SMALL_CLOUD = 60, 400, 300


@dataclass(frozen=True)
class PlainProgram:
    """A model and what it is called with; the first argument and the parameters have gradients.

    Attributes:
        messages: elements of a tensor with one row per edge and one column per channel.
        waits: whether something in it waits for the device, as masks do. Then it can be recorded as
            a CUDA graph only where that is gone.
    """

    name: str
    case: str
    model: nn.Module
    arguments: tuple[Any, ...]
    messages: int
    waits: bool = False


@dataclass(frozen=True)
class ProgramData:
    """What programs run over: which graph and which cloud, and how many channels."""

    options: BenchOptions
    graph: str
    cloud: str
    columns: int

    @property
    def device(self) -> torch.device:
        return self.options.device

    def edges(self) -> tuple[str, int, Tensor]:
        """A name, the number of nodes, and edges (source, target)."""
        if not self.options.gpu:
            draw = torch.Generator().manual_seed(0)
            ends = torch.randint(0, SMALL_NODES, (2, SMALL_EDGES), generator=draw)
            return "drawn", SMALL_NODES, ends
        found = data.graph(self.graph, self.options.data, self.device)
        return found.name, found.shape[0], torch.stack([found.indices, found.rows()]).long()

    def pairs(self) -> tuple[str, int, list[Tensor]]:
        """A name, the number of voxels, and for each of 27 offsets the pairs (input, output)."""
        most = None if self.options.gpu else SMALL_CLOUD
        voxels = data.cloud(self.cloud, self.options.data, self.device, most)
        found = []
        for row in data.neighbour_table(voxels):
            there = (row >= 0).nonzero()[:, 0]
            found.append(torch.stack([row[there].long(), there]).contiguous())
        return self.cloud, len(voxels), found


class HandConvolution(nn.Module):
    """As people write it: for each offset gather the inputs, multiply, add to the outputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(27, channels, channels) / channels)

    def forward(self, x: Tensor, *pairs: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], self.weight.shape[2])
        for z, (i, o) in enumerate(pairs):
            out.index_add_(0, o, x[i] @ self.weight[z])
        return out


#: A layer of PyG by its number of channels.
LAYERS: dict[str, Callable[[Any, int], nn.Module]] = {
    "GCNConv": lambda pyg, c: pyg.GCNConv(c, c, cached=True),
    "GCNConv-uncached": lambda pyg, c: pyg.GCNConv(c, c),
    "GATConv": lambda pyg, c: pyg.GATConv(c, c // HEADS, heads=HEADS, add_self_loops=False),
    "SAGEConv": lambda pyg, c: pyg.SAGEConv(c, c),
    "RGCNConv": lambda pyg, c: pyg.RGCNConv(c, c, RELATIONS),
    "FastRGCNConv": lambda pyg, c: pyg.FastRGCNConv(c, c // 4, RELATIONS),
}
#: Those that take the relation of each edge.
RELATIONAL = ("RGCNConv", "FastRGCNConv")
PROGRAMS = ("GCNConv", "GCNConv-uncached", "convolution", *list(LAYERS)[2:])


def on_graph(name: str, given: ProgramData) -> PlainProgram:
    # Else RGCNConv counts the edges of each relation in every call, and waits for the result, to
    # choose between two ways of which one is there.
    module("torch_geometric").backend.use_segment_matmul = False
    where, nodes, edges = given.edges()
    columns, count = given.columns, edges.shape[1]
    torch.manual_seed(0)
    model = LAYERS[name](module("torch_geometric.nn"), columns).to(given.device)
    x = torch.randn(nodes, columns, device=given.device)
    more = (_relations(count, given.device),) if name in RELATIONAL else ()
    case = f"{where}, {nodes:,} nodes, {count:,} edges, {columns} channels"
    return PlainProgram(name, case, model, (x, edges, *more), count * columns, name in MASKING)


def _relations(edges: int, device: torch.device) -> Tensor:
    draw = torch.Generator(device).manual_seed(1)
    return torch.randint(0, RELATIONS, (edges,), device=device, generator=draw)


def convolution(given: ProgramData) -> PlainProgram:
    where, voxels, pairs = given.pairs()
    torch.manual_seed(0)
    count, width = sum(p.shape[1] for p in pairs), 2 * given.columns
    case = f"{where}, {voxels:,} voxels, {count:,} pairs, {width} channels"
    model = HandConvolution(width).to(given.device)
    x = torch.randn(voxels, width, device=given.device)
    return PlainProgram("convolution", case, model, (x, *pairs), count * width)


def made(name: str, given: ProgramData) -> PlainProgram:
    return convolution(given) if name == "convolution" else on_graph(name, given)


def names_over(wanted: Sequence[str], graphs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Programs and graphs; programs that have none are run once.

    >>> list(names_over(["SAGEConv", "convolution"], ["cora", "DD"]))
    [('SAGEConv', 'cora'), ('convolution', 'cora'), ('SAGEConv', 'DD')]
    """
    for number, graph in enumerate(graphs):
        for name in wanted:
            if not number or name not in WITHOUT_GRAPH:
                yield name, graph
