"""Edges of a graph as index arrays that are prepared once: endpoints, degrees, self-loops, the normalisation of GCNs.

What follows from an ``edge_index`` alone is kept with the facts about that tensor, for as long as it lives and is not written into.
A second layer, or a second step of training, then finds the same index arrays and whatever the planner knows about them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

import insum
from insum.compat import is_plain_call
from insum.errors import BindingError, IndexRangeError
from insum.nn.checks import integers
from insum.plan.facts import facts_of

T = TypeVar("T")


def remembered(tensor: Tensor, key: object, make: Callable[[], T]) -> T:
    """``make()``, kept for this tensor in its present version. The result must not hold the tensor itself, nor a view of it."""
    if not is_plain_call((tensor,)):
        return make()
    derived = facts_of(tensor).derived
    found: T | None = derived.get(("nn", key))
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            found = derived["nn", key] = make()
    return found


def check_edges(edge_index: Tensor) -> None:
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise BindingError(f"edge_index has shape {tuple(edge_index.shape)}", expected="(2, edges): sources, then targets")
    integers("edge_index", edge_index)


def endpoints(edge_index: Tensor, sources: int, targets: int) -> tuple[Tensor, Tensor]:
    """Source and target of every edge, each found to be a node.

    >>> endpoints(torch.tensor([[0, 1], [2, 0]]), 2, 3)
    (tensor([0, 1], dtype=torch.int32), tensor([2, 0], dtype=torch.int32))
    """
    check_edges(edge_index)
    kind = torch.int32 if max(sources, targets) < 2**31 else torch.int64
    src, dst = remembered(edge_index, ("endpoints", kind), lambda: (edge_index[0].to(kind, copy=True), edge_index[1].to(kind, copy=True)))
    if is_plain_call((edge_index,)):
        for row, (ends, nodes) in enumerate(((src, sources), (dst, targets))):
            check_range(f"edge_index[{row}", ends, nodes, "nodes")
    return src, dst


def check_range(name: str, index: Tensor, limit: int, what: str) -> None:
    """All values from 0 to ``limit - 1``; ``name`` is the access without its last index and bracket."""
    facts = facts_of(index)
    if facts.low < 0 or facts.high >= limit:
        place = int(((index < 0) | (index >= limit)).nonzero()[0])
        fact = f"{name}{', ' if '[' in name else '['}{place}] is {int(index[place])}, but there are {limit} {what}"
        raise IndexRangeError(fact, expected=f"values from 0 to {limit - 1}" if limit else "no edges at all")


def degrees(edge_index: Tensor, dst: Tensor, targets: int) -> Tensor:
    """How many edges end in each node, as float32; ``D[dst[e]] = one[e]``."""

    def count() -> Tensor:
        one = torch.ones((), device=dst.device).expand(dst.shape[0])
        return insum.insum("D[dst[e]] = one[e]", dst=dst, one=one, out_shape=(targets,))

    return remembered(edge_index, ("degrees", targets), count)


def with_self_loops(edge_index: Tensor, nodes: int) -> Tensor:
    """The edges, and behind them one loop for each node. Loops among the edges stay where they are: `gcn_norm` gives them no weight."""

    def make() -> Tensor:
        loops = torch.arange(nodes, device=edge_index.device, dtype=edge_index.dtype)
        return torch.cat([edge_index, loops.expand(2, -1)], 1)

    return remembered(edge_index, ("self-loops", nodes), make)


def gcn_norm(
    edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int, *, improved: bool = False, add_self_loops: bool = True, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Edges with self-loops, and weights ``w[e] / sqrt(degree[src[e]] * degree[dst[e]])``, as `torch_geometric.nn.GCNConv` has them.

    A node with a loop of its own keeps that loop's weight (the last, where there are several); other loops weigh 1, or 2 where ``improved``
    (which PyG 2.8 forgets where there are no weights). Shapes depend on shapes alone, so that this can be traced; without weights the
    result is kept with ``edge_index``.

    >>> edges, weights = gcn_norm(torch.tensor([[0, 1], [1, 0]]), None, 2)
    >>> edges
    tensor([[0, 1, 0, 1],
            [1, 0, 0, 1]])
    >>> weights
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    check_edges(edge_index)
    edges = with_self_loops(edge_index, num_nodes) if add_self_loops else edge_index
    dtype = dtype or torch.get_default_dtype()
    fill = (2.0 if improved else 1.0) if add_self_loops else None
    if edge_weight is not None:
        return edges, _normalised(edge_index, edge_weight, num_nodes, fill)
    ones = torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)
    return edges, remembered(edge_index, ("gcn", num_nodes, fill, dtype), lambda: _normalised(edge_index, ones, num_nodes, fill))


def _normalised(edge_index: Tensor, weight: Tensor, nodes: int, fill: float | None) -> Tensor:
    src, dst = endpoints(edge_index, nodes, nodes)
    if fill is not None:
        weight = _looped(src, dst, weight, nodes, fill)
        src, dst = endpoints(with_self_loops(edge_index, nodes), nodes, nodes)
    degree = insum.insum("D[dst[e]] = w[e]", dst=dst, w=weight, out_shape=(nodes,))
    root = torch.where(degree > 0, degree, 1).rsqrt() * (degree > 0)
    return insum.insum("N[e] = R[src[e]] * w[e] * R[dst[e]]", R=root, src=src, dst=dst, w=weight)


def _looped(src: Tensor, dst: Tensor, weight: Tensor, nodes: int, fill: float) -> Tensor:
    """Weights of the edges and of one loop for each node: a loop among the edges hands its weight on."""
    is_loop = src == dst
    number = torch.where(is_loop, torch.arange(src.shape[0], device=src.device), -1)
    last = torch.full((nodes,), -1, device=src.device).scatter_reduce(0, src.long(), number, "amax")
    own = torch.cat([weight, weight.new_full((1,), fill)])[last]  # -1 finds the fill
    return torch.cat([torch.where(is_loop, 0, weight), own])
