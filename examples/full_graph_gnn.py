"""Train a graph network on a whole graph whose nodes are on several ranks.

    torchrun --nproc-per-node 4 examples/full_graph_gnn.py              # Gloo, or NCCL with GPUs
    torchrun --nproc-per-node 4 examples/full_graph_gnn.py --layer gat --check
    python examples/full_graph_gnn.py --data FOLDER --graph cora        # one process

No rank holds the graph: each has some of the edges, and `insum.distributed.partition_edges` brings
them to the owners of their targets. In every layer rows of features travel while the entries
between a rank's own nodes are multiplied. Weights are the same on every rank; their gradients are
summed.
``--check`` trains the same network in one process as well, and compares the losses.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from gcn import labels_and_features, load_graph, made_up_graph
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import insum
from insum.distributed import Partitioned, distribute_rows, explain, gcn_norm, partition_edges

WIDTH, HIDDEN, CLASSES = 64, 32, 7


class Network(nn.Module):
    """Two layers over a graph that is one tensor of edges, or on several ranks."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        made = {
            "gcn": lambda a, b: insum.nn.GCNConv(a, b),
            "sage": lambda a, b: insum.nn.GraphConv(a, b, aggr="mean"),
            "gat": lambda a, b: insum.nn.GATConv(a, b),
        }[layer]
        self.first, self.second = made(WIDTH, HIDDEN), made(HIDDEN, CLASSES)

    def forward(self, x: Tensor, graph: Tensor | Partitioned) -> Tensor:
        out: Tensor = self.second(self.first(x, graph).relu(), graph)
        return out


def connect() -> DeviceMesh:
    """A mesh of all ranks; of this process alone where torchrun started none."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return init_device_mesh(kind, (dist.get_world_size(),))


def partitioned(edges: Tensor, nodes: int, layer: str, mesh: DeviceMesh) -> Partitioned:
    """The graph from a share of its edges on each rank, as the layer wants it."""
    mine = edges[:, dist.get_rank() :: dist.get_world_size()].to(mesh.device_type)
    match layer:
        case "gcn":
            return gcn_norm(partition_edges(mine, mesh, num_nodes=nodes, self_loops=1.0))
        case "gat":
            return partition_edges(mine, mesh, num_nodes=nodes, send="rows")
        case _:
            return partition_edges(mine, mesh, num_nodes=nodes)


def train(
    network: nn.Module,
    x: Tensor,
    graph: Tensor | Partitioned,
    labels: Tensor,
    known: Tensor,
    count: int,
    epochs: int,
    ranks: bool,
) -> list[float]:
    """Losses; ``count`` nodes are known in all, on this rank or elsewhere."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = network(x, graph)
        loss = nn.functional.cross_entropy(out[known], labels[known], reduction="sum") / count
        loss.backward()
        total = loss.detach().clone()
        if ranks:
            for each in (total, *(p.grad for p in network.parameters())):
                dist.all_reduce(each)
        optimizer.step()
        losses.append(total.item())
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with .npz files, as in gcn.py")
    parser.add_argument("--graph", default="cora")
    parser.add_argument("--nodes", type=int, default=2000, help="size of the generated graph")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--layer", choices=("gcn", "sage", "gat"), default="gcn")
    parser.add_argument("--check", action="store_true", help="train in one process as well")
    arguments = parser.parse_args(argv)
    started = not dist.is_initialized()
    mesh = connect() if started else init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    edges, nodes = (
        load_graph(arguments.data, arguments.graph)
        if arguments.data
        else made_up_graph(arguments.nodes)
    )
    labels, x = labels_and_features(edges, nodes, CLASSES, WIDTH)
    known = torch.rand(nodes) < 0.1
    network = Network(arguments.layer).to(mesh.device_type)
    begun = {name: value.clone() for name, value in network.state_dict().items()}

    graph = partitioned(edges, nodes, arguments.layer, mesh)
    mine = [distribute_rows(t.to(mesh.device_type), graph) for t in (x, labels, known)]
    losses = train(
        network, mine[0], graph, mine[1], mine[2], int(known.sum()), arguments.epochs, True
    )
    if dist.get_rank() == 0:
        print(explain(graph, columns=HIDDEN))
        print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} epochs")
    if arguments.check:
        network.load_state_dict(begun)
        whole = [t.to(mesh.device_type) for t in (x, edges, labels, known)]
        alone = train(network, *whole, int(known.sum()), arguments.epochs, False)
        apart = max(abs(a - b) for a, b in zip(losses, alone))
        assert apart < 1e-3, f"losses differ from those of one process by {apart}"
        if dist.get_rank() == 0:
            print(f"one process: {alone[-1]:.4f}; largest difference {apart:.1e}")
    if started:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
