"""Edges of a graph as index arrays that are prepared once: endpoints, degrees, self-loops, the
normalisation of GCNs.

What follows from an ``edge_index`` alone is remembered for that tensor. A second layer, or a second
step of training, then finds the same index arrays, and the planner what it knows about them.

On a GPU nobody looks at the edges before they are used: kernels do, and report what is no node.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.accepted import COUNT, DTYPE, FLAG, TENSOR, explains, is_common, require
from insum.api import insum
from insum.compat.calls import autocasts, is_eager_call, is_plain_call
from insum.compat.contexts import without_autocast
from insum.compat.tensors import base_of
from insum.errors import BindingError, DtypeError, InsumError
from insum.formats import COO
from insum.formats.operands import SPARSE_LAYOUTS
from insum.memory import entry_of, known_as, recalled, remembered
from insum.nn.checks import integers, kernels_look, one_device
from insum.runtime.handwritten import loops
from insum.runtime.record import out_of_range
from insum.settings import settings


def check_edges(edge_index: Tensor) -> None:
    if not is_common(edge_index):
        require("edge_index", edge_index, TENSOR)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise BindingError(
            f"edge_index has shape {tuple(edge_index.shape)}",
            expected="(2, edges): sources, then targets",
        )
    integers("edge_index", edge_index)


#: What it is remembered under that the ends of edges, which kernels look at, have their names.
NAMED = "ends of edges"


def endpoints(edge_index: Tensor, sources: int, targets: int) -> tuple[Tensor, Tensor]:
    """Source and target of every edge, each found to be a node; on a GPU as they are, for
    statements, which look themselves.

    >>> endpoints(torch.tensor([[0, 1], [2, 0]]), 2, 3)
    (tensor([0, 1], dtype=torch.int32), tensor([2, 0], dtype=torch.int32))
    """
    if recalled(edge_index, NAMED) and settings.values.check != "always":
        source, target = edge_index.unbind(0)
        return source, target
    check_edges(edge_index)
    if kernels_look(edge_index):
        source, target = plain(edge_index).unbind(0)
        own = entry_of(edge_index)  # what is promised of all is of each
        known_as(source, "edge_index[0, {}]", "nodes", declared=own.declared)
        known_as(target, "edge_index[1, {}]", "nodes", declared=own.declared)
        if plain(edge_index) is edge_index:
            own.note({NAMED: True})
        return source, target
    check_range("edge_index", edge_index, (sources, targets), "nodes")
    kind = torch.int32 if max(sources, targets) < 2**31 else torch.int64
    return remembered(
        edge_index,
        ("endpoints", kind),
        lambda: (edge_index[0].to(kind, copy=True), edge_index[1].to(kind, copy=True)),
    )


def plain(index: Tensor) -> Tensor:
    """An index tensor in a dtype that every kernel takes."""
    if index.dtype in (torch.int32, torch.int64):
        return index
    return remembered(index, "int64", lambda: index.long())


def check_range(name: str, index: Tensor, limits: tuple[int, ...], what: str) -> None:
    """All values of each row from 0 to below its limit; one look at the device for each tensor.
    Under a tracer the statement itself looks.
    """
    if not is_eager_call((index,)) or index.device.type == "meta" or not index.numel():
        return
    rows = index.reshape(len(limits), -1)
    rows = rows if rows.dtype in (torch.int32, torch.int64) else rows.long()
    bounds = remembered(
        index,
        ("bounds of rows", len(limits)),  # statements keep those of the whole tensor
        lambda: torch.stack(torch.aminmax(rows, dim=1), 1).tolist(),
    )
    for number, ((low, high), limit) in enumerate(zip(bounds, limits)):
        if low < 0 or high >= limit:
            place = int(((rows[number] < 0) | (rows[number] >= limit)).nonzero()[0])
            where = f"{number}, {place}" if index.dim() == 2 else f"{place}"
            raise out_of_range(f"{name}[{where}]", int(rows[number, place]), limit, what, when="")


def edge_weights(weight: Tensor, edges: int) -> Tensor:
    """One weight for each edge."""
    if weight.numel() != edges or weight.dim() not in (1, 2):
        raise BindingError(
            f"edge_weight has shape {tuple(weight.shape)}, but there are {edges} edges",
            expected=f"({edges},)",
        )
    return weight if weight.dim() == 1 else weight.reshape(edges)


def no_weight(weight: Tensor | None) -> None:
    """A matrix has its weights as values."""
    if weight is not None:
        raise BindingError(
            "edge_weight was passed beside a matrix",
            expected="weights as the values of the matrix",
            remedy="A.with_values(...)",
        )


def degrees(edge_index: Tensor, dst: Tensor, targets: int) -> Tensor:
    """How many edges end in each node, as float32; ``D[dst[e]] = one[e]``."""

    def count() -> Tensor:
        one = torch.ones((), device=dst.device).expand(dst.shape[0])
        return insum("D[dst[e]] = one[e]", dst=dst, one=one, out_shape=(targets,))

    return remembered(edge_index, ("degrees", targets), count)


def with_self_loops(edge_index: Tensor, nodes: int) -> Tensor:
    """The edges, and behind them one loop for each node. Loops among the edges stay where they are:
    `gcn_norm` gives them no weight.
    """

    def make() -> Tensor:
        kind = _looped_dtype(edge_index, nodes)
        own = torch.arange(nodes, device=edge_index.device, dtype=kind)
        return torch.cat([edge_index.to(kind), own.expand(2, -1)], 1)

    return remembered(edge_index, ("self-loops", nodes), make)


def _looped_dtype(edge_index: Tensor, nodes: int) -> torch.dtype:
    """A narrow dtype that holds the ends of the edges need not hold every node."""
    return torch.int32 if edge_index.dtype == torch.int32 and nodes < 2**31 else torch.int64


def _weights_fit(edge_index: Tensor, edge_weight: Tensor | None, *_: object) -> None:
    one_device(edge_index=edge_index, edge_weight=edge_weight)
    if edge_weight is not None and edge_weight.is_complex():
        raise DtypeError("edge_weight holds complex numbers", expected="real weights")


@explains(
    also=_weights_fit,
    edge_index=TENSOR,
    edge_weight=TENSOR.optional,
    num_nodes=COUNT,
    improved=FLAG,
    add_self_loops=FLAG,
    dtype=DTYPE.optional,
)
def gcn_norm(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    *,
    improved: bool = False,
    add_self_loops: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Edges with self-loops, and weights ``w[e] / sqrt(degree[src[e]] * degree[dst[e]])``, as
    `torch_geometric.nn.GCNConv` has them.

    A node with a loop of its own keeps that loop's weight (the last, where there are several);
    other loops weigh 1, or 2 where ``improved`` (which PyG 2.8 forgets where there are no weights).
    Shapes depend on shapes alone, so that this can be traced; without weights the result is kept
    with ``edge_index``.

    Args:
        edge_index: (2, edges), sources then targets.
        edge_weight: (edges,), or ``None`` for 1.
        num_nodes: How many nodes there are.
        improved: Loops that are added weigh 2.
        add_self_loops: Add a loop for each node that has none.
        dtype: Of the weights, where none are passed.

    Returns:
        The edges, and a weight for each.

    Examples:
        >>> edges, weights = gcn_norm(torch.tensor([[0, 1], [1, 0]]), None, 2)
        >>> edges
        tensor([[0, 1, 0, 1],
                [1, 0, 0, 1]])
        >>> weights
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    fill = (2 if improved else 1) if add_self_loops else None
    edges, weights = _normalised(edge_index, edge_weight, num_nodes, fill, dtype)[:2]
    # what is kept with the edges is not for others to write to
    return edges.clone(), weights.clone()


def gcn_ends(
    edge_index: Tensor, weight: Tensor | None, x: Tensor, fill: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with sources and targets apart, for features of all nodes; also of PyG's ``adj_t``.
    ``fill`` is what loops weigh, None: there are none to be added.
    """
    nodes, dtype = x.shape[0], x.dtype
    if weight is None and edge_index.device == x.device and edge_index.layout is torch.strided:
        found = recalled(edge_index, (LOOPED, nodes, fill, dtype))
        if found is not None and settings.values.check != "always":
            weights, source, target = found  # of a step before, in which all was looked at
            return source, target, weights
    if edge_index.layout in SPARSE_LAYOUTS:
        no_weight(weight)
        if tuple(edge_index.shape) != (nodes, nodes):
            raise BindingError(
                f"the adjacency matrix has shape {tuple(edge_index.shape)}, but x has {nodes} rows",
                expected=f"({nodes}, {nodes})",
            )
        edge_index, weight = COO.from_torch(edge_index).T.to_edge_index()
    one_device(edge_index=edge_index, x=x, edge_weight=weight)
    # sums of weights are as exact as the weights are, and may be kept beyond autocast
    lowers = not torch.compiler.is_compiling() and autocasts() and is_eager_call((edge_index,))
    with without_autocast() if lowers else nullcontext():
        edges, weights, ends = _normalised(edge_index, weight, nodes, fill, dtype)
    source, target = ends or endpoints(edges, nodes, nodes)
    return source, target, weights


#: What weights, sources and targets of normalised edges with loops are remembered under.
LOOPED = "gcn with loops"
#: What weights without loops are, and where those that are passed go among loops.
NORMED, SPREAD = "gcn", "spread"
#: Edges, their weights, and, where they are at hand, sources and targets.
_Normalised: TypeAlias = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]


def _normalised(
    edge_index: Tensor,
    weight: Tensor | None,
    nodes: int,
    fill: int | None,
    dtype: torch.dtype | None,
) -> _Normalised:
    check_edges(edge_index)
    dtype = dtype or torch.get_default_dtype()
    if weight is not None:
        weight = edge_weights(weight, edge_index.shape[1])
    if kernels_look(edge_index) and (weight is None or is_plain_call((weight,))):
        return _normalised_on_device(edge_index, weight, nodes, fill, dtype)
    edges = edge_index if fill is None else with_self_loops(edge_index, nodes)
    if weight is not None:
        return edges, _weighed(edge_index, weight, nodes, fill), None
    ones = torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)
    make = lambda: _weighed(edge_index, ones, nodes, fill)
    return edges, remembered(edge_index, (NORMED, nodes, fill, dtype), make), None


def _normalised_on_device(
    edge_index: Tensor, weight: Tensor | None, nodes: int, fill: int | None, dtype: torch.dtype
) -> _Normalised:
    """The same by kernels of our own; a gradient reaches weights through statements."""
    edges, kind = plain(edge_index), _looped_dtype(edge_index, nodes)

    def counted() -> Tensor:
        explain = functools.partial(_no_node, weakref.ref(entry_of(edge_index)), nodes)
        return loops.counted(edges, nodes, explain, apart=fill is not None)

    def looped() -> tuple[Tensor, Tensor, Tensor]:
        ends, weights = loops.normalised(edges, counted(), fill, dtype, kind)
        source, target = ends.unbind(0)
        for end in (source, target):  # what is no node was reported, and leads to the first one
            memory.made(end).looked.add((0, nodes))
        return weights, source, target

    if weight is None and fill is None:
        # what is remembered must not hold the edges themselves
        make = lambda: loops.normalised(edges, counted(), None, dtype, kind)[1]
        return edge_index, remembered(edge_index, (NORMED, nodes, None, dtype), make), None
    if weight is None:
        weights, *both = remembered(edge_index, (LOOPED, nodes, fill, dtype), looped, eager=True)
        return base_of(both[0]), weights, tuple(both)  # type: ignore[return-value]
    if fill is None:
        src, dst = endpoints(edge_index, nodes, nodes)
        return edge_index, _by_degree(src, dst, weight, nodes), (src, dst)
    ends, at, rest = remembered(
        edge_index,
        (SPREAD, nodes, fill, weight.dtype),
        lambda: loops.spread(edges, counted(), fill, weight.dtype, kind),
    )
    every = insum("S[e] = rest[e] + w[at[e]]", padded=("at",), rest=rest, w=weight, at=at)
    src, dst = endpoints(ends, nodes, nodes)
    return ends, _by_degree(src, dst, every, nodes), (src, dst)


def _no_node(remembered: Any, nodes: int, end: int, edge: int, value: int) -> InsumError:
    """The error of an end of an edge that is no node. What was made of the edges is let go of, so
    that the next call on them reports, too.
    """
    entry: memory.Entry | None = remembered()
    if entry is not None:
        entry.drop(lambda key: isinstance(key, tuple) and key[0] in (LOOPED, NORMED, SPREAD))
    return out_of_range(f"edge_index[{end}, {edge}]", value, nodes, "nodes")


def _weighed(edge_index: Tensor, weight: Tensor, nodes: int, fill: float | None) -> Tensor:
    src, dst = endpoints(edge_index, nodes, nodes)
    if fill is not None:
        weight = _looped(src, dst, weight, nodes, fill)
        src, dst = endpoints(with_self_loops(edge_index, nodes), nodes, nodes)
    return _by_degree(src, dst, weight, nodes)


def _by_degree(src: Tensor, dst: Tensor, weight: Tensor, nodes: int) -> Tensor:
    degree = insum("D[dst[e]] = w[e]", dst=dst, w=weight, out_shape=(nodes,))
    root = torch.where(degree > 0, degree, 1).rsqrt() * (degree > 0)
    return insum("N[e] = R[src[e]] * w[e] * R[dst[e]]", R=root, src=src, dst=dst, w=weight)


def _looped(src: Tensor, dst: Tensor, weight: Tensor, nodes: int, fill: float) -> Tensor:
    """Weights of the edges and of one loop for each node: a loop among the edges hands its weight
    on.
    """
    is_loop = src == dst
    number = torch.where(is_loop, torch.arange(src.shape[0], device=src.device), -1)
    last = torch.full((nodes,), -1, device=src.device).scatter_reduce(0, src.long(), number, "amax")
    own = torch.cat([weight, weight.new_full((1,), fill)])[last]  # -1 finds the fill
    return torch.cat([torch.where(is_loop, 0, weight), own])
