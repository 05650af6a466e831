"""Attention over the edges of a graph, as statements: nothing has edges times heads times channels
elements, forward or backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from insum.accepted import COUNT, FLAG, NUMBER, SIZE, TENSOR, explains, takes
from insum.api import insum, sum_onto
from insum.compat.calls import is_eager_call
from insum.errors import BindingError, SettingsError
from insum.formats.operands import OWNER, StatementOwner
from insum.memory import can_look, remembered
from insum.nn.checks import layer_takes, node_rows, one_device
from insum.nn.edges import check_edges, endpoints


@explains(scores=TENSOR, edge_index=TENSOR, num_nodes=COUNT)
def edge_softmax(scores: Tensor, edge_index: Tensor, num_nodes: int) -> Tensor:
    """The softmax of scores over the edges into each node, as `torch_geometric.utils.softmax`.

    Three statements, ``top[dst[e],h] max= S[e,h]``, ``total[dst[e],h] = exp(S[e,h] -
    top[dst[e],h])`` and ``P[e,h] = exp(S[e,h] - top[dst[e],h]) / total[dst[e],h]``, and so are the
    gradients.

    Args:
        scores: (edges,) or (edges, heads), or with more dimensions behind the first.
        edge_index: (2, edges), sources and targets.
        num_nodes: how many nodes there are.

    Returns:
        Weights of the shape of ``scores``, which add up to 1 over the edges into each node.

    Raises:
        BindingError: there is not one row of scores for each edge.
        IndexRangeError: an edge leads to no node.

    Examples:
        >>> edge_index = torch.tensor([[0, 1, 2], [1, 2, 2]])
        >>> edge_softmax(torch.tensor([5.0, 1.0, 1.0]), edge_index, 3)
        tensor([1.0000, 0.5000, 0.5000])
    """
    rows = _rows(scores, edge_index)
    _, dst = endpoints(edge_index, num_nodes, num_nodes)
    return _softmax(rows, dst, num_nodes).reshape(scores.shape)


@explains(scores=TENSOR, x=TENSOR, edge_index=TENSOR, num_nodes=COUNT.optional)
def graph_attention(
    scores: Tensor, x: Tensor, edge_index: Tensor, num_nodes: int | None = None
) -> Tensor:
    """What reaches each node along its edges, weighed by the softmax of their scores:
    ``Out[dst[e],h,c] = P[e,h] * X[src[e],h,c]`` after `edge_softmax`.

    Args:
        scores: (edges, heads).
        x: (nodes, heads, channels), of the sources.
        edge_index: (2, edges), sources and targets.
        num_nodes: how many targets there are, where it is not the number of rows of ``x``.

    Returns:
        (targets, heads, channels); zeros where no edge leads to.

    Raises:
        BindingError: shapes do not fit.
        IndexRangeError: an edge leads to no node.

    Examples:
        >>> edge_index = torch.tensor([[0, 1], [2, 2]])
        >>> x = torch.tensor([1.0, 3.0, 5.0]).reshape(3, 1, 1)
        >>> graph_attention(torch.zeros(2, 1), x, edge_index).flatten()
        tensor([0., 0., 2.])
    """
    rows = _rows(scores, edge_index)
    one_device(edge_index=edge_index, x=x)
    if scores.dim() != 2 or x.dim() != 3 or x.shape[1] != scores.shape[1]:
        raise BindingError(
            f"scores have shape {tuple(scores.shape)} and x {tuple(x.shape)}",
            expected="(edges, heads) and (nodes, heads, channels)",
        )
    nodes = x.shape[0] if num_nodes is None else num_nodes
    src, dst = endpoints(edge_index, x.shape[0], nodes)
    return _weighed(_softmax(rows, dst, nodes), x, src, dst, nodes)


def _rows(scores: Tensor, edge_index: Tensor) -> Tensor:
    """Scores as a matrix with a row for each edge."""
    check_edges(edge_index)
    one_device(edge_index=edge_index, scores=scores)
    edges = edge_index.shape[1]
    if scores.dim() == 0 or scores.shape[0] != edges:
        raise BindingError(
            f"scores have shape {tuple(scores.shape)}, but there are {edges} edges",
            expected=f"({edges},) or ({edges}, heads)",
        )
    return scores.reshape(edges, math.prod(scores.shape[1:]))


def _softmax(scores: Tensor, dst: Tensor, nodes: int, padded: tuple[str, ...] = ()) -> Tensor:
    """Over edges of which those that are ``padded`` are not there: their weight is 0."""
    shape = (nodes, scores.shape[1])
    top = insum(
        "top[dst[e],h] max= S[e,h]", S=scores.detach(), dst=dst, out_shape=shape, padded=padded
    )
    given: dict[str, Any] = {"S": scores, "top": top, "dst": dst}
    total = insum(
        "total[dst[e],h] = exp(S[e,h] - top[dst[e],h])", out_shape=shape, padded=padded, **given
    )
    return insum(
        "P[e,h] = exp(S[e,h] - top[dst[e],h]) / total[dst[e],h]",
        total=total,
        padded=padded,
        **given,
    )


def _weighed(
    weight: Tensor,
    x: Tensor,
    src: Tensor,
    dst: Tensor,
    nodes: int,
    padded: tuple[str, ...] = (),
    base: Tensor | None = None,
) -> Tensor:
    statement, shape = "Out[dst[e],h,c] = P[e,h] * X[src[e],h,c]", (nodes, *x.shape[1:])
    tensors: dict[str, Any] = {"P": weight, "X": x, "src": src, "dst": dst}
    if base is None:
        return insum(statement, out_shape=shape, padded=padded, **tensors)
    return sum_onto(base, statement, out_shape=shape, padded=padded, **tensors)


class GATConv(nn.Module):
    """Graph attention, weight for weight `torch_geometric.nn.GATConv`: scores ``S[e,h] =
    leaky_relu(a[src[e],h] + b[dst[e],h])``, their softmax over the edges into each node, and
    ``Out[dst[e],h,c] = P[e,h] * X[src[e],h,c]``.

    Args:
        in_channels: Features of a node.
        out_channels: Features of a node in the result, for each head.
        heads: How many heads there are.
        concat: Whether heads are put one behind the other, rather than averaged.
        negative_slope: That of the leaky_relu.
        dropout: The share of weights that is left out in training.
        add_self_loops: Whether each node attends to itself, once.
        bias: Whether there is a bias.

    Examples:
        >>> layer = GATConv(3, 4, heads=2)
        >>> layer(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([5, 8])
        >>> list(layer.state_dict())
        ['att_src', 'att_dst', 'bias', 'lin.weight']
    """

    @takes(
        in_channels=COUNT,
        out_channels=SIZE,
        heads=SIZE,
        concat=FLAG,
        negative_slope=NUMBER,
        dropout=NUMBER,
        add_self_loops=FLAG,
        bias=FLAG,
    )
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(dropout, complex) or not 0 <= dropout <= 1:
            raise SettingsError(f"dropout is {dropout}", expected="a share from 0 to 1")
        if isinstance(negative_slope, complex) or not math.isfinite(negative_slope):
            raise SettingsError(f"negative_slope is {negative_slope}", expected="a finite number")
        self.in_channels, self.out_channels, self.heads = in_channels, out_channels, heads
        self.concat, self.negative_slope, self.dropout = concat, float(negative_slope), dropout
        self.add_self_loops = add_self_loops
        self.lin = nn.Linear(in_channels, heads * out_channels, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        width = heads * out_channels if concat else out_channels
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        for weight in (self.lin.weight, self.att_src, self.att_dst):
            nn.init.xavier_uniform_(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @layer_takes(x=TENSOR, edge_index=TENSOR | OWNER)
    def forward(self, x: Tensor, edge_index: Tensor | StatementOwner) -> Tensor:
        """Features of the nodes.

        Args:
            x: One row for each node.
            edge_index: (2, edges), sources and targets; or the transposed adjacency matrix with
                this rank's rows, where ``x`` has these (`insum.distributed`).
        """
        node_rows("x", x, self.in_channels, only=True)
        nodes = x.shape[0]
        rows = self.lin(x).reshape(nodes, self.heads, self.out_channels)
        if isinstance(edge_index, StatementOwner):
            sources, ends = edge_index.pulled(rows), edge_index.ends()
            src, dst, padded = self._looped(ends[0], *ends, nodes)
        else:
            one_device(edge_index=edge_index, x=x)
            sources, ends = rows, endpoints(edge_index, nodes, nodes)
            src, dst, padded = self._looped(edge_index, *ends, nodes)
        scores = insum(
            f"S[e,h] = leaky_relu(a[src[e],h] + b[dst[e],h], {self.negative_slope!r})",
            a=(sources * self.att_src).sum(-1),
            b=(rows * self.att_dst).sum(-1),
            src=src,
            dst=dst,
            padded=padded,
        )
        weight = nn.functional.dropout(
            _softmax(scores, dst, nodes, padded[1:]), self.dropout, self.training
        )
        bias = self.bias
        if self.concat:
            base = None if bias is None else bias.view(self.heads, self.out_channels)
            return _weighed(weight, sources, src, dst, nodes, padded, base).flatten(1)
        out = _weighed(weight, sources, src, dst, nodes, padded).mean(1)
        return out if bias is None else out + bias

    def _looped(
        self, edges: Tensor, src: Tensor, dst: Tensor, nodes: int
    ) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """Sources and targets, and those in which -1 stands for an edge that is not there; what
        they follow from is kept with ``edges``.
        """
        if not self.add_self_loops:
            return src, dst, ()
        return remembered(edges, ("one loop each", nodes), lambda: _looped(src, dst, nodes))

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


def _looped(src: Tensor, dst: Tensor, nodes: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The edges without their loops, and a loop for each node behind them. A loop leaves an empty
    place where counting the others would wait for a device. What is no node stays none, and where
    it was.
    """
    is_loop = (src == dst) & (src >= 0)
    own = torch.arange(nodes, device=src.device, dtype=src.dtype)
    if can_look(src) and is_eager_call((src, dst)) and _are_nodes(src, dst, nodes):
        others = ~is_loop
        return torch.cat([src[others], own]), torch.cat([dst[others], own]), ()

    def end(index: Tensor) -> Tensor:
        index = torch.where(index < 0, index - 1, index)
        return torch.cat([torch.where(is_loop, -1, index), own])

    return end(src), end(dst), ("src", "dst")


def _are_nodes(src: Tensor, dst: Tensor, nodes: int) -> bool:
    ends = torch.stack([src, dst])
    return bool(((ends >= 0) & (ends < nodes)).all())
