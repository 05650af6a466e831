"""Train a two-layer GCN on a citation graph and time it beside PyG.

    python examples/gcn.py                              # a generated graph
    python examples/gcn.py --data FOLDER --graph cora   # FOLDER/cora.npz: indptr, indices, shape

The layer's aggregation is one statement: Out[dst[e],f] = N[e] * X[src[e],f]. Data folders hold
structure only, so labels spread over the graph from random nodes, and features are the labels
drowned in noise: a network that does not look at the graph cannot do well.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from timing import default_device, median_ms, report
from torch import Tensor, nn

from insum.nn import GCNConv, propagate


def load_graph(folder: Path, name: str) -> tuple[Tensor, int]:
    held = np.load(folder / f"{name}.npz")
    rows = np.repeat(np.arange(int(held["shape"][0])), np.diff(held["indptr"]))
    return torch.from_numpy(np.stack([held["indices"].astype(np.int64), rows])), int(
        held["shape"][0]
    )


def made_up_graph(nodes: int, degree: int = 4) -> tuple[Tensor, int]:
    """Edges within neighbourhoods on a ring and some across it, both ways."""
    a = torch.arange(nodes).repeat(degree // 2)
    near = (a + torch.randint(1, 20, a.shape)) % nodes
    b = torch.where(torch.rand(a.shape) < 0.05, torch.randint(0, nodes, a.shape), near)
    return torch.cat([torch.stack([a, b]), torch.stack([b, a])], 1).unique(dim=1), nodes


def labels_and_features(
    edge_index: Tensor, nodes: int, classes: int, width: int
) -> tuple[Tensor, Tensor]:
    votes = nn.functional.one_hot(torch.randint(0, classes, (nodes,)), classes).float()
    for _ in range(30):
        votes = votes + propagate(edge_index, votes, aggr="mean")
        votes = votes / votes.sum(1, keepdim=True)
    labels = (votes - votes.mean(0)).argmax(1)
    return labels, torch.randn(classes, width)[labels] * 0.3 + torch.randn(nodes, width)


class GCN(nn.Module):
    """Two convolutions; ``conv`` is ours or PyG's, which have the same weights."""

    def __init__(
        self, conv: Callable[[int, int], nn.Module], width: int, hidden: int, classes: int
    ) -> None:
        super().__init__()
        self.first, self.second = conv(width, hidden), conv(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, edge_index).relu(), edge_index)
        return out


def train(
    model: nn.Module, x: Tensor, edge_index: Tensor, labels: Tensor, known: Tensor, epochs: int
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(epochs):
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = nn.functional.cross_entropy(out[known], labels[known])
        loss.backward()
        optimizer.step()
        if epoch % max(1, epochs // 5) == 0 or epoch == epochs - 1:
            accuracy = (out.argmax(1) == labels)[~known].float().mean()
            print(f"epoch {epoch:4d}  loss {loss.item():.4f}  test accuracy {accuracy.item():.3f}")


def step_ms(model: nn.Module, x: Tensor, edge_index: Tensor, labels: Tensor) -> float:
    def step() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x, edge_index), labels).backward()

    return median_ms(step, x.device)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with .npz files; without it a graph is generated"
    )
    parser.add_argument("--graph", default="cora")
    parser.add_argument("--nodes", type=int, default=2000, help="size of the generated graph")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--device", default=default_device())
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    edge_index, nodes = (
        load_graph(arguments.data, arguments.graph)
        if arguments.data
        else made_up_graph(arguments.nodes)
    )
    labels, x = labels_and_features(edge_index, nodes, classes=7, width=64)
    known = torch.rand(nodes) < 0.1
    edge_index, labels, x, known = (t.to(arguments.device) for t in (edge_index, labels, x, known))
    print(f"{nodes} nodes, {edge_index.shape[1]} edges, on {x.device}")

    model = GCN(GCNConv, 64, 32, 7).to(x.device)
    train(model, x, edge_index, labels, known, arguments.epochs)
    report(
        "one step",
        step_ms(model, x, edge_index, labels),
        {"PyG": against_pyg(model, x, edge_index, labels)},
    )


def against_pyg(model: nn.Module, x: Tensor, edge_index: Tensor, labels: Tensor) -> float | str:
    try:
        from torch_geometric.nn import GCNConv as Theirs
    except ImportError:
        return "torch_geometric is not installed"
    other = GCN(Theirs, 64, 32, 7).to(x.device)
    other.load_state_dict(model.state_dict())
    print(
        "largest difference from PyG with the same weights: "
        f"{(other(x, edge_index) - model(x, edge_index)).abs().max().item():.1e}"
    )
    return step_ms(other, x, edge_index, labels)


if __name__ == "__main__":
    main()
