"""What layers of graphs are made for, whichever they are: a graph, channels, and values drawn for
its nodes and edges.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

RELATIONS, HEADS = 4, 4
#: Elements that matrices of all edges may have; layers with such take fewer channels.
MOST_OF_MATRICES = 2**29


@dataclass(frozen=True)
class LayerData:
    """What a layer of PyG is made for: a graph, channels, and values at its edges."""

    pyg: Any
    columns: int
    edges: Tensor
    nodes: int

    def at_edges(self, *shape: int) -> Tensor:
        return torch.randn(self.edges.shape[1], *shape, device=self.edges.device)

    def at_nodes(self, *shape: int) -> Tensor:
        return torch.randn(self.nodes, *shape, device=self.edges.device)

    def distances(self) -> Tensor:
        return torch.rand(self.edges.shape[1], device=self.edges.device)

    def relations(self) -> Tensor:
        draw = torch.Generator(self.edges.device).manual_seed(1)
        count = self.edges.shape[1]
        return torch.randint(0, RELATIONS, (count,), device=self.edges.device, generator=draw)

    def degrees(self) -> Tensor:
        """How many nodes have each number of incoming edges."""
        return self.edges[1].bincount(minlength=self.nodes).bincount().cpu()

    def matrix_columns(self) -> int:
        """Channels of a layer with a matrix for each edge: a power of two."""
        most = max(1, MOST_OF_MATRICES // max(1, self.edges.shape[1]))
        return min(self.columns, 1 << (most.bit_length() - 1) // 2)


def perceptron(*widths: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        made += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*made[:-1])
