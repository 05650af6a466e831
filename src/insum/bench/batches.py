"""``insum bench fusion --batches``: two layers of PyG trained on sampled neighbourhoods, as
NeighborLoader gives them: another subgraph of another size at each step.

Batches are sampled before anything is timed, and all ways get the same ones. Per way: seconds of
the first steps, in which everything is compiled, and milliseconds of a step after that: gather the
features, forward, loss, backward, optimizer.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import insum.fusion
from insum.bench import data
from insum.bench.layer_data import HEADS
from insum.bench.measure import release, set_up, turn, wait
from insum.bench.programs import SMALL_EDGES, SMALL_NODES
from insum.bench.rivals import module
from insum.bench.study import Study

GOAL = 1.2
FANOUTS, SEEDS, CLASSES = (15, 10), 1024, 16
WARM_STEPS = 30


@dataclass(frozen=True, eq=False)
class Batch:
    """A sampled neighbourhood: nodes of the whole graph, those asked for first, and edges between
    them by their places here; targets do not decrease.
    """

    nodes: Tensor
    edges: Tensor


def sampled(
    graph: data.CsrPattern, seeds: Tensor, fanouts: Sequence[int], draw: torch.Generator
) -> Batch:
    """Up to so many neighbours of each node, without repetition, hop by hop."""
    pointers = graph.indptr.long()
    place = torch.full((graph.shape[0],), -1, device=seeds.device)
    place[seeds] = torch.arange(len(seeds), device=seeds.device)
    nodes, front, found = [seeds], seeds, list[Tensor]()
    count = len(seeds)
    for fanout in fanouts:
        source, owner = _neighbours(graph.indices.long(), pointers, front, fanout, draw)
        new = torch.unique(source[place[source] < 0])
        place[new] = torch.arange(count, count + len(new), device=seeds.device)
        found.append(torch.stack([place[source], place[front[owner]]]))
        nodes.append(new)
        front, count = new, count + len(new)
    return Batch(torch.cat(nodes), torch.cat(found, 1).contiguous())


def _neighbours(
    indices: Tensor, pointers: Tensor, front: Tensor, fanout: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Neighbours of nodes, and the place of the node that each belongs to."""
    lengths = pointers[front + 1] - pointers[front]
    owner = torch.repeat_interleave(torch.arange(len(front), device=front.device), lengths)
    begins = lengths.cumsum(0) - lengths
    rank = torch.arange(len(owner), device=front.device) - begins[owner]
    chance = torch.rand(len(owner), device=front.device, generator=draw, dtype=torch.float64)
    order = (owner + chance).argsort()  # drawn within each node
    chosen = order[rank < fanout]
    return indices[pointers[front[owner[chosen]]] + rank[chosen]], owner[chosen]


class TwoLayers(nn.Module):
    """A classifier of nodes."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x, edges).relu(), edges)
        return found


def _sage(pyg: Any, columns: int) -> nn.Module:
    return TwoLayers(pyg.SAGEConv(columns, columns), pyg.SAGEConv(columns, CLASSES))


def _gat(pyg: Any, columns: int) -> nn.Module:
    wide = pyg.GATConv(columns, columns // HEADS, heads=HEADS, add_self_loops=False)
    return TwoLayers(wide, pyg.GATConv(columns, CLASSES, add_self_loops=False))


MODELS: dict[str, Callable[[Any, int], nn.Module]] = {"SAGEConv": _sage, "GATConv": _gat}


def ways(model: nn.Module, fuse: str) -> dict[str, Callable[..., Tensor]]:
    return {
        "eager": model,
        "torch.compile": torch.compile(model, dynamic=True),
        "insum": torch.compile(model, backend="insum", dynamic=True, options={"insum.fuse": fuse}),
    }


def trained(
    model: nn.Module,
    run: Callable[..., Tensor],
    x: Tensor,
    labels: Tensor,
    batches: Sequence[Batch],
    seeds: int,
) -> Tensor:
    """Steps of Adam; the losses."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for batch in batches:
        out = run(x[batch.nodes], batch.edges)[:seeds]
        loss = nn.functional.cross_entropy(out, labels[batch.nodes[:seeds]])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def run(study: Study) -> int:
    """1 if the losses of a way are others than those of the eager model."""
    names, rows, wrong = study.wanted(tuple(MODELS)), [], 0
    graph, seeds = _graph(study)
    pyg = module("torch_geometric.nn")
    draw = torch.Generator(study.device).manual_seed(0)
    batches = [
        sampled(graph, _seeds(graph, seeds, draw), FANOUTS, draw)
        for _ in range(WARM_STEPS + study.asked.steps)
    ]
    x = torch.randn(graph.shape[0], study.asked.columns, device=study.device, generator=draw)
    labels = torch.randint(CLASSES, (graph.shape[0],), device=study.device, generator=draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            torch.manual_seed(0)
            model = MODELS[name](pyg, study.asked.columns).to(study.device)
            row = {"program": name, "graph": graph.name, "steps": study.asked.steps}
            row |= measured(model, x, labels, batches, seeds, study)
            wrong += any(way["error"] > 1e-2 for way in row["ways"].values())
            rows.append(row)
            print(*_lines(row), sep="\n", flush=True)
            study.keep(goal=GOAL, rows=rows)
    return int(wrong > 0)


def _graph(study: Study) -> tuple[data.CsrPattern, int]:
    if study.options.gpu:
        name = study.asked.graph.split(",")[0]
        return data.graph(name, study.options.data, study.device), SEEDS
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, SMALL_NODES, (SMALL_EDGES,), generator=draw).sort().values
    pointers = torch.zeros(SMALL_NODES + 1, dtype=torch.long)
    pointers[1:] = rows.bincount(minlength=SMALL_NODES).cumsum(0)
    columns = torch.randint(0, SMALL_NODES, (SMALL_EDGES,), generator=draw)
    return data.CsrPattern("drawn", pointers, columns, (SMALL_NODES, SMALL_NODES)), 8


def _seeds(graph: data.CsrPattern, count: int, draw: torch.Generator) -> Tensor:
    order = torch.randperm(graph.shape[0], generator=draw, device=draw.device)
    return order[:count]


def measured(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    batches: Sequence[Batch],
    seeds: int,
    study: Study,
) -> dict[str, Any]:
    start, found = copy.deepcopy(model.state_dict()), dict[str, dict[str, float]]()
    want: Tensor | None = None
    torch.compiler.reset()
    insum.fusion.clear()
    for name, call in ways(model, "auto" if study.options.gpu else "always").items():
        model.load_state_dict(start)
        release(study.device)
        begin = time.perf_counter()
        with set_up():
            first = trained(model, call, x, labels, batches[:WARM_STEPS], seeds)
            wait(study.device)
        warm = time.perf_counter()
        with turn():
            wait(study.device)
            begin_steps = time.perf_counter()
            losses = trained(model, call, x, labels, batches[WARM_STEPS:], seeds)
            wait(study.device)
            end = time.perf_counter()
        losses = torch.cat([first, losses])
        want = losses if want is None else want
        error = float(((losses - want).abs() / want.abs()).max())
        found[name] = {
            "first_s": warm - begin,
            "step_ms": 1e3 * (end - begin_steps) / max(1, len(batches) - WARM_STEPS),
            "error": error if math.isfinite(error) else math.inf,
        }
    edges = sum(batch.edges.shape[1] for batch in batches) / len(batches)
    fused = [one.statement for one in insum.fusion.report().fused]
    return {"edges": edges, "ways": found, "fused": fused}


def _lines(row: dict[str, Any]) -> list[str]:
    found = row["ways"]
    lines = [f"\n{row['program']} twice, {row['graph']}, {row['edges']:,.0f} edges in a batch"]
    ours = found["insum"]["step_ms"]
    for name, way in found.items():
        times = f"{way['step_ms'] / ours:.2f}x as long" if name != "insum" else ""
        lines.append(
            f"{name:14s} {way['step_ms']:.3f} ms a step  first steps {way['first_s']:.1f} s  "
            f"losses differ by {way['error']:.0e}  {times}"
        )
    return lines
