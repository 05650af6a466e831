"""Layers that nobody tuned for, for ``insum bench fusion --further``: those of PyG that are not
among the programs of a plain run, and messages as people write them by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from insum.bench.layer_data import HEADS, LayerData, perceptron


class Rearranged(nn.Module):
    """A layer whose arguments come in another order than features, edges, and the rest."""

    def __init__(self, layer: nn.Module, order: Callable[..., tuple[Any, ...]]) -> None:
        super().__init__()
        self.layer, self.order = layer, order

    def forward(self, x: Tensor, edges: Tensor, *more: Tensor) -> Tensor:
        found: Tensor = self.layer(*self.order(x, edges, *more))
        return found


def _before_edges(layer: nn.Module, value: Tensor) -> tuple[Any, ...]:
    return Rearranged(layer, lambda x, edges, value: (x, value, edges)), value


# --- by hand --------------------------------------------------------------------------------------


class Equivariant(nn.Module):
    """E(n): messages of both ends and of their distance, which move the points as well."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * c + 1, c), nn.SiLU(), nn.Linear(c, c), nn.SiLU())
        self.moves, self.node = nn.Linear(c, 1), nn.Linear(2 * c, c)

    def forward(self, x: Tensor, edges: Tensor, at: Tensor) -> Tensor:
        source, target = edges
        apart = at[target] - at[source]
        far = apart.square().sum(-1, keepdim=True)
        m = self.edge(torch.cat([x[target], x[source], far], -1))
        moved = torch.zeros_like(at).index_add_(0, target, apart * self.moves(m))
        near = x.new_zeros(x.shape[0], m.shape[1]).index_add_(0, target, m)
        return torch.cat([x + self.node(torch.cat([x, near], -1)), at + moved], -1)


class Vectors(nn.Module):
    """PaiNN's messages: scalars, and vectors that are turned by a direction and added."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(c, c), nn.SiLU(), nn.Linear(c, 3 * c))
        self.filters = nn.Linear(20, 3 * c)

    def forward(self, x: Tensor, edges: Tensor, v: Tensor, basis: Tensor, along: Tensor) -> Tensor:
        source, target = edges
        s, a, b = (self.inner(x)[source] * self.filters(basis)).chunk(3, -1)
        turned = v[source] * a[:, None] + b[:, None] * along[:, :, None]
        dx = torch.zeros_like(x).scatter_add_(0, target[:, None].expand_as(s), s)
        dv = torch.zeros_like(v).index_add_(0, target, turned)
        return torch.cat([(x + dx)[:, None], v + dv], 1)


class OpenedMessages(nn.Module):
    """Messages of two halves, of which one opens the other."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(c, 2 * c), nn.Linear(c, 2 * c)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        value, gate = (self.source(x)[source] + self.target(x)[target]).chunk(2, -1)
        return x + torch.zeros_like(x).index_add(0, target, value * gate.sigmoid())


class Mesh(nn.Module):
    """MeshGraphNet: values of edges are updated, added up at nodes, and both are kept."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.edge, self.node = perceptron(3 * c, c, c), perceptron(2 * c, c, c)
        self.norm = nn.LayerNorm(c)

    def forward(self, x: Tensor, edges: Tensor, value: Tensor) -> Tensor:
        source, target = edges
        new = self.norm(self.edge(torch.cat([x[source], x[target], value], -1))) + value
        total = torch.zeros_like(x).index_add(0, target, new)
        found: Tensor = x + self.node(torch.cat([x, total], -1))
        return found


class Attention(nn.Module):
    """Attention over edges as it is written without a library."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.maps = heads, nn.Linear(c, 3 * c)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        q, k, v = self.maps(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        score = (q[target] * k[source]).sum(-1) / q.shape[-1] ** 0.5
        at = target[:, None].expand_as(score)
        most = x.new_full((x.shape[0], self.heads), -torch.inf).scatter_reduce(0, at, score, "amax")
        part = (score - most[target]).exp()
        total = torch.zeros_like(most).scatter_add(0, at, part)
        part = part / (total[target] + 1e-16)
        return torch.zeros_like(v).index_add(0, target, part[..., None] * v[source]).flatten(1)


class Network(nn.Module):
    """Several layers with norms and residuals, as models have them."""

    def __init__(self, layers: list[nn.Module], c: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in layers)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.relu(layer(norm(x), edges))
        return x


# --- by name --------------------------------------------------------------------------------------


def _network(make: Callable[[], nn.Module], c: int) -> nn.Module:
    return Network([make() for _ in range(3)], c)


#: As `insum.bench.programs.LAYERS`.
FURTHER: dict[str, Callable[[LayerData], Any]] = {
    "GATConv-loops": lambda g: g.pyg.GATConv(g.columns, g.columns // HEADS, heads=HEADS),
    "GATConv-edges": lambda g: (
        g.pyg.GATConv(
            g.columns, g.columns // HEADS, heads=HEADS, edge_dim=16, add_self_loops=False
        ),
        g.at_edges(16),
    ),
    "TransformerConv-edges": lambda g: (
        g.pyg.TransformerConv(g.columns, g.columns // HEADS, heads=HEADS, edge_dim=16),
        g.at_edges(16),
    ),
    "GraphConv": lambda g: (g.pyg.GraphConv(g.columns, g.columns), g.distances()),
    "SAGEConv-softmax": lambda g: g.pyg.SAGEConv(g.columns, g.columns, aggr="softmax"),
    "SAGEConv-std": lambda g: g.pyg.SAGEConv(g.columns, g.columns, aggr="std"),
    "ResGatedGraphConv": lambda g: g.pyg.ResGatedGraphConv(g.columns, g.columns),
    "TAGConv": lambda g: g.pyg.TAGConv(g.columns, g.columns, normalize=False),
    "SGConv": lambda g: g.pyg.SGConv(g.columns, g.columns, 2, cached=False, add_self_loops=False),
    "ARMAConv": lambda g: g.pyg.ARMAConv(g.columns, g.columns, 2, 2),
    "AGNNConv": lambda g: g.pyg.AGNNConv(add_self_loops=False),
    "LEConv": lambda g: (g.pyg.LEConv(g.columns, g.columns), g.distances()),
    "GENConv": lambda g: g.pyg.GENConv(g.columns, g.columns),
    "CGConv": lambda g: (g.pyg.CGConv(g.columns, 16), g.at_edges(16)),
    "EGConv": lambda g: g.pyg.EGConv(g.columns, g.columns, add_self_loops=False),
    "FAConv": lambda g: _before_edges(
        g.pyg.FAConv(g.columns, cached=True, normalize=True), g.at_nodes(g.columns)
    ),
    "GCN2Conv": lambda g: _before_edges(
        g.pyg.GCN2Conv(g.columns, 0.1, cached=True), g.at_nodes(g.columns)
    ),
    "GeneralConv": lambda g: g.pyg.GeneralConv(g.columns, g.columns, attention=True),
    "PDNConv": lambda g: (
        g.pyg.PDNConv(g.columns, g.columns, 4, 8, add_self_loops=False, normalize=False),
        g.at_edges(4),
    ),
    "FeaStConv": lambda g: g.pyg.FeaStConv(g.columns, g.columns, 4, add_self_loops=False),
    "SuperGATConv": lambda g: g.pyg.SuperGATConv(
        g.columns, g.columns // HEADS, heads=HEADS, add_self_loops=False
    ),
    "PointNetConv": lambda g: _before_edges(
        g.pyg.PointNetConv(perceptron(g.columns + 3, g.columns), add_self_loops=False),
        g.at_nodes(3),
    ),
    "PointTransformerConv": lambda g: _before_edges(
        g.pyg.PointTransformerConv(g.columns, g.columns, add_self_loops=False), g.at_nodes(3)
    ),
    "HypergraphConv": lambda g: g.pyg.HypergraphConv(g.columns, g.columns),
    "DirGNNConv": lambda g: g.pyg.DirGNNConv(
        g.pyg.SAGEConv(g.columns, g.columns, root_weight=False)
    ),
    "MixHopConv": lambda g: g.pyg.MixHopConv(g.columns, g.columns, add_self_loops=False),
    "Equivariant": lambda g: (Equivariant(g.columns), g.at_nodes(3)),
    "Vectors": lambda g: (
        Vectors(g.columns),
        g.at_nodes(3, g.columns),
        g.at_edges(20),
        g.at_edges(3),
    ),
    "Gated": lambda g: OpenedMessages(g.columns),
    "Mesh": lambda g: (Mesh(g.columns), g.at_edges(g.columns)),
    "Attention": lambda g: Attention(g.columns, HEADS),
    "SAGE-network": lambda g: _network(lambda: g.pyg.SAGEConv(g.columns, g.columns), g.columns),
    "GIN-network": lambda g: _network(
        lambda: g.pyg.GINConv(perceptron(g.columns, g.columns, g.columns)), g.columns
    ),
}
