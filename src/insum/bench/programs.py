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
from insum.bench.further_layers import FURTHER
from insum.bench.layer_data import HEADS, RELATIONS, LayerData, perceptron
from insum.bench.options import BenchOptions
from insum.bench.rivals import module

KERNELS, HOPS = 4, 10
#: Programs that are run when they are named: torch.compile alone fails on the first with some
#: versions of torch; the second masks self-loops at each call.
ON_REQUEST = ("FastRGCNConv", "GCNConv-uncached")
#: Programs that run over something else than a graph.
WITHOUT_GRAPH = ("convolution",)
#: Programs that mask edges at each call: those of each relation, or self-loops.
MASKING = ("RGCNConv", "GCNConv-uncached", "ChebConv", "GATConv-loops")
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
    """What programs run over: which graph and which cloud, how many channels, and of what kind."""

    options: BenchOptions
    graph: str
    cloud: str
    columns: int
    dtype: torch.dtype = torch.float32

    def typed(self, value: Tensor) -> Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value

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


def _pna(given: LayerData) -> Any:
    return given.pyg.PNAConv(
        given.columns,
        given.columns,
        ["mean", "min", "max", "std"],
        ["identity", "amplification", "attenuation"],
        given.degrees(),
    )


def _continuous_filters(given: LayerData) -> tuple[Any, ...]:
    """SchNet's convolution: a filter for each edge, made of 50 numbers about its length."""
    c = given.columns
    filters = nn.Sequential(nn.Linear(50, c), nn.Softplus(), nn.Linear(c, c))
    made = module("torch_geometric.nn.models.schnet").CFConv(c, c, c, filters, 2.0)
    return made, given.distances(), given.at_edges(50)


def _matrices(given: LayerData) -> tuple[Any, ...]:
    c = given.matrix_columns()
    return given.pyg.NNConv(c, c, nn.Linear(4, c * c)), given.at_edges(4)


#: Layers of PyG, and what they take beside features and edges.
LAYERS: dict[str, Callable[[LayerData], Any]] = {
    "GCNConv": lambda g: g.pyg.GCNConv(g.columns, g.columns, cached=True),
    "GCNConv-uncached": lambda g: g.pyg.GCNConv(g.columns, g.columns),
    "SAGEConv": lambda g: g.pyg.SAGEConv(g.columns, g.columns),
    "SAGEConv-max": lambda g: g.pyg.SAGEConv(g.columns, g.columns, aggr="max"),
    "GINConv": lambda g: g.pyg.GINConv(perceptron(g.columns, g.columns, g.columns)),
    "GINEConv": lambda g: (g.pyg.GINEConv(nn.Linear(g.columns, g.columns)), g.at_edges(g.columns)),
    "GATConv": lambda g: g.pyg.GATConv(
        g.columns, g.columns // HEADS, heads=HEADS, add_self_loops=False
    ),
    "GATv2Conv": lambda g: g.pyg.GATv2Conv(
        g.columns, g.columns // HEADS, heads=HEADS, add_self_loops=False
    ),
    "TransformerConv": lambda g: g.pyg.TransformerConv(g.columns, g.columns // HEADS, heads=HEADS),
    "FiLMConv": lambda g: g.pyg.FiLMConv(g.columns, g.columns),
    "CFConv": _continuous_filters,
    "EdgeConv": lambda g: g.pyg.EdgeConv(perceptron(2 * g.columns, g.columns)),
    "NNConv": _matrices,
    "PNAConv": _pna,
    "RGCNConv": lambda g: (g.pyg.RGCNConv(g.columns, g.columns, RELATIONS), g.relations()),
    "FastRGCNConv": lambda g: (
        g.pyg.FastRGCNConv(g.columns, g.columns // 4, RELATIONS),
        g.relations(),
    ),
    "APPNP": lambda g: g.pyg.APPNP(HOPS, 0.1, cached=True),
    "ChebConv": lambda g: g.pyg.ChebConv(g.columns, g.columns, 3),
    "GatedGraphConv": lambda g: g.pyg.GatedGraphConv(g.columns, 2),
    "GMMConv": lambda g: (
        g.pyg.GMMConv(g.columns, g.columns, 2, KERNELS),
        g.at_edges(2),
    ),
    "LGConv": lambda g: g.pyg.LGConv(),
}
PROGRAMS = (*LAYERS, "convolution")
FURTHER_PROGRAMS = tuple(FURTHER)


def on_graph(name: str, given: ProgramData) -> PlainProgram:
    # Else RGCNConv counts the edges of each relation in every call, and waits for the result, to
    # choose between two ways of which one is there.
    module("torch_geometric").backend.use_segment_matmul = False
    where, nodes, edges = given.edges()
    count = edges.shape[1]
    torch.manual_seed(0)
    layer = LayerData(module("torch_geometric.nn"), given.columns, edges, nodes)
    columns = layer.matrix_columns() if name == "NNConv" else given.columns
    made = {**LAYERS, **FURTHER}[name](layer)
    model, *more = made if isinstance(made, tuple) else (made,)
    x = torch.randn(nodes, columns, device=given.device)
    case = f"{where}, {nodes:,} nodes, {count:,} edges, {columns} channels"
    return PlainProgram(
        name,
        case,
        model.to(given.device, given.dtype),
        (x.to(given.dtype), edges, *(given.typed(a) for a in more)),
        count * columns,
        name in MASKING,
    )


def convolution(given: ProgramData) -> PlainProgram:
    where, voxels, pairs = given.pairs()
    torch.manual_seed(0)
    count, width = sum(p.shape[1] for p in pairs), 2 * given.columns
    case = f"{where}, {voxels:,} voxels, {count:,} pairs, {width} channels"
    model = HandConvolution(width).to(given.device, given.dtype)
    x = torch.randn(voxels, width, device=given.device).to(given.dtype)
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
