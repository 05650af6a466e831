"""Graph convolutions with the weights of their namesakes in PyG."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from insum.accepted import COUNT, FLAG, SIZE, TENSOR, TEXT, Accepted, takes
from insum.api import insum, sum_onto
from insum.errors import BindingError, UnsupportedError
from insum.formats import SparseFormat
from insum.formats.operands import StatementOwner
from insum.nn.checks import EDGES, PAIR, kernels_look, layer_takes, node_rows, one_device
from insum.nn.edges import check_edges, gcn_ends
from insum.nn.functional import _REDUCTIONS, aggregated, over_ends
from insum.nn.lazy import CHANNEL_PAIR, CHANNELS, linear_of, sized_by_success, waits
from insum.nn.relations import check_relations, groups, listed

SIDES = Accepted(
    "a pair of them: sources, and targets or None",
    lambda v: isinstance(v, tuple | list) and len(v) == 2 and all(map(TENSOR.optional.fits, v)),
)
SIZES = Accepted(
    "a pair of numbers or None",
    lambda v: isinstance(v, tuple | list) and len(v) == 2 and all(map(COUNT.optional.fits, v)),
)


def _targets(
    size: tuple[int | None, int | None] | None, source: Tensor, nodes: int | None
) -> int | None:
    """How many targets there are, as PyG's ``size`` or our own argument says."""
    if size is None:
        return nodes
    if size[0] is not None and size[0] != source.shape[0]:
        raise BindingError(
            f"size is {tuple(size)}, but x has {source.shape[0]} rows",
            expected=f"({source.shape[0]}, targets)",
        )
    return size[1] if size[1] is not None else nodes


def _check_aggregation(aggr: str) -> None:
    if aggr not in _REDUCTIONS:
        raise UnsupportedError(
            f"there is no aggregation {aggr!r}",
            expected='"add" (or "sum"), "mean", "max" or "min"',
        )


def _both(channels: int | tuple[int, int]) -> tuple[int, int]:
    """Features of sources and of targets."""
    pair = channels if isinstance(channels, tuple | list) else (channels, channels)
    return int(pair[0]), int(pair[1])


def _aggregated_through(
    linear: nn.Linear,
    edge_index: Tensor | SparseFormat | StatementOwner,
    x: Tensor,
    weight: Tensor | None,
    aggr: str,
    nodes: int | None,
    root: nn.Linear | None,
    target: Tensor | None,
) -> Tensor:
    """``linear(aggregate(x)) + root(target)``; sums and means are taken on the narrower side of
    ``linear``. Behind it they start from all that is added to them.
    """
    if linear.out_features >= linear.in_features or aggr in ("max", "min"):
        out: Tensor = linear(aggregated(edge_index, x, weight, aggr, nodes))
        return out if root is None else out + root(target)
    base = linear.bias
    if root is not None:
        base = root(target) if base is None else root(target) + base
    rows = nn.functional.linear(x, linear.weight)
    return aggregated(edge_index, rows, weight, aggr, nodes, base)


class GraphConv(nn.Module):
    """``Y = aggregate(W[e] * X[src[e]]) @ lin_rel + X @ lin_root``, weight for weight
    `torch_geometric.nn.GraphConv`.

    The aggregation is one statement, ``Out[dst[e],f] = W[e] * X[src[e],f]`` (see `propagate`); sums
    and means are taken on the narrower side of ``lin_rel``. ``edge_index`` may also be the
    transposed adjacency matrix in any format (see `adjacency`), or PyG's ``adj_t``; ``x`` may be a
    pair ``(sources, targets)``.

    Args:
        in_channels: Features of a node, or a pair of them for sources and targets; -1 takes what
            the first call brings.
        out_channels: Features of a node in the result.
        aggr: ``"add"`` (or ``"sum"``), ``"mean"``, ``"max"`` or ``"min"``.
        bias: Whether ``lin_rel`` has a bias.

    Raises:
        UnsupportedError: There is no such aggregation.

    Examples:
        >>> layer = GraphConv(3, 4, aggr="mean")
        >>> layer(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([5, 4])
        >>> list(layer.state_dict())
        ['lin_rel.weight', 'lin_rel.bias', 'lin_root.weight']
    """

    @takes(in_channels=CHANNELS | CHANNEL_PAIR, out_channels=COUNT, aggr=TEXT, bias=FLAG)
    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str = "add",
        bias: bool = True,
    ) -> None:
        super().__init__()
        _check_aggregation(aggr)
        source, target = _both(in_channels)
        self.in_channels, self.out_channels, self.aggr = in_channels, out_channels, aggr
        self.lin_rel = linear_of(source, out_channels, bias=bias)
        self.lin_root = linear_of(target, out_channels, bias=False)

    def reset_parameters(self) -> None:
        """Draw all weights anew; those that wait for a first call go on waiting."""
        for linear in (self.lin_rel, self.lin_root):
            if not waits(linear):
                linear.reset_parameters()

    @layer_takes(x=TENSOR | SIDES, **EDGES, num_nodes=COUNT.optional, size=(PAIR | SIZES).optional)
    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Tensor | SparseFormat | StatementOwner,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        size: tuple[int | None, int | None] | None = None,
    ) -> Tensor:
        """Features of the target nodes.

        Args:
            x: One row for each node, or a pair for sources and targets (or None).
            edge_index: (2, edges), or the transposed adjacency matrix.
            edge_weight: (edges,), or None for 1.
            num_nodes: How many target nodes there are, where no features of theirs tell.
            size: The same as PyG has it, (sources, targets).
        """
        source, target = (x, x) if isinstance(x, Tensor) else x
        rel, root = self.lin_rel, None if target is None else self.lin_root
        if isinstance(rel, nn.LazyLinear) or isinstance(root, nn.LazyLinear):
            sizes = ((rel, source), (root, target))
            return sized_by_success(self, sizes, x, edge_index, edge_weight, num_nodes, size)
        node_rows("x", source, rel.in_features)
        one_device(x=source, target=target, weight=rel.weight)
        nodes = _targets(size, source, num_nodes) if target is None else target.shape[0]
        edges = edge_index, source, edge_weight
        return _aggregated_through(rel, *edges, self.aggr, nodes, root, target)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr!r}"


class SAGEConv(nn.Module):
    """``Y = aggregate(X[src[e]]) @ lin_l + X @ lin_r``, weight for weight
    `torch_geometric.nn.SAGEConv`.

    The aggregation is one statement, ``Out[dst[e],f] = X[src[e],f]`` (see `propagate`); sums and
    means are taken on the narrower side of ``lin_l``. ``edge_index`` may also be the transposed
    adjacency matrix in any format (see `adjacency`), or PyG's ``adj_t``, whose values are weights;
    ``x`` may be a pair ``(sources, targets)``.

    Args:
        in_channels: Features of a node, or a pair of them for sources and targets; -1 takes what
            the first call brings.
        out_channels: Features of a node in the result.
        aggr: ``"mean"``, ``"add"`` (or ``"sum"``), ``"max"`` or ``"min"``.
        normalize: Divide every row of the result by its length.
        root_weight: Add the features of a node itself, times a weight.
        project: Aggregate ``relu(X @ lin)`` instead of ``X``.
        bias: Whether ``lin_l`` has a bias.

    Raises:
        UnsupportedError: There is no such aggregation, or what is projected has no size yet.

    Examples:
        >>> layer = SAGEConv((3, 5), 4, aggr="max")
        >>> sources, targets = torch.randn(6, 3), torch.randn(2, 5)
        >>> layer((sources, targets), torch.tensor([[0, 1, 5], [1, 1, 0]])).shape
        torch.Size([2, 4])
        >>> list(layer.state_dict())
        ['lin_l.weight', 'lin_l.bias', 'lin_r.weight']
    """

    @takes(
        in_channels=CHANNELS | CHANNEL_PAIR,
        out_channels=COUNT,
        aggr=TEXT,
        normalize=FLAG,
        root_weight=FLAG,
        project=FLAG,
        bias=FLAG,
    )
    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        _check_aggregation(aggr)
        source, target = _both(in_channels)
        if project and source == -1:
            raise UnsupportedError(
                "project=True with in_channels=-1",
                expected="how many features a source has: what is projected keeps that number",
            )
        self.in_channels, self.out_channels, self.aggr = in_channels, out_channels, aggr
        self.normalize, self.root_weight, self.project = normalize, root_weight, project
        self.lin = nn.Linear(source, source) if project else None
        self.lin_l = linear_of(source, out_channels, bias=bias)
        self.lin_r = linear_of(target, out_channels, bias=False) if root_weight else None

    def reset_parameters(self) -> None:
        """Draw all weights anew; those that wait for a first call go on waiting."""
        for linear in (self.lin, self.lin_l, self.lin_r):
            if linear is not None and not waits(linear):
                linear.reset_parameters()

    @layer_takes(
        x=TENSOR | SIDES,
        edge_index=EDGES["edge_index"],
        num_nodes=COUNT.optional,
        size=(PAIR | SIZES).optional,
    )
    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Tensor | SparseFormat | StatementOwner,
        size: tuple[int | None, int | None] | None = None,
        num_nodes: int | None = None,
    ) -> Tensor:
        """Features of the target nodes.

        Args:
            x: One row for each node, or a pair for sources and targets (or None).
            edge_index: (2, edges), or the transposed adjacency matrix.
            size: (sources, targets), as PyG has it.
            num_nodes: How many target nodes there are, where no features of theirs tell.
        """
        source, target = (x, x) if isinstance(x, Tensor) else x
        rel, root = self.lin_l, None if target is None else self.lin_r
        if isinstance(rel, nn.LazyLinear) or isinstance(root, nn.LazyLinear):
            sizes = ((rel, source), (root, target))
            return sized_by_success(self, sizes, x, edge_index, size, num_nodes)
        node_rows("x", source, rel.in_features)
        one_device(x=source, target=target, weight=rel.weight)
        nodes = _targets(size, source, num_nodes) if target is None else target.shape[0]
        if self.lin is not None:
            source = self.lin(source).relu()
        edges = edge_index, source, None
        out = _aggregated_through(rel, *edges, self.aggr, nodes, root, target)
        return nn.functional.normalize(out, dim=-1) if self.normalize else out

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr!r}"


class GCNConv(nn.Module):
    """``Y = N @ (X @ lin) + bias`` with the symmetrically normalised adjacency ``N``, weight for
    weight `torch_geometric.nn.GCNConv`.

    One statement, ``Out[dst[e],f] = N[e] * X[src[e],f]``. Where there are no edge weights, ``N`` is
    computed once for each ``edge_index`` and kept with it (see `gcn_norm`). A matrix in a format is
    taken as normalised already; PyG's ``adj_t``, a sparse tensor of torch, is normalised as its
    edges are: a node with a loop gets none more, where PyG adds one to that of such a tensor.

    Args:
        in_channels: Features of a node; -1 takes what the first call brings.
        out_channels: Features of a node in the result.
        improved: Loops that are added weigh 2.
        add_self_loops: Add a loop for each node that has none.
        normalize: Whether edges are normalised at all.
        bias: Whether there is a bias.
        cached: Normalise the edges of the first call and use them in every later one, whatever
            edges it brings: for one graph. `reset_parameters` lets go of them. Weights that need
            a gradient change, and are normalised at every call.

    Examples:
        >>> layer = GCNConv(3, 4)
        >>> layer(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
        torch.Size([5, 4])
        >>> list(layer.state_dict())
        ['bias', 'lin.weight']
    """

    @takes(
        in_channels=CHANNELS,
        out_channels=COUNT,
        improved=FLAG,
        cached=FLAG,
        add_self_loops=FLAG,
        normalize=FLAG,
        bias=FLAG,
    )
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        add_self_loops: bool = True,
        normalize: bool = True,
        bias: bool = True,
        cached: bool = False,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.cached = in_channels, out_channels, cached
        self.improved, self.add_self_loops, self.normalize = improved, add_self_loops, normalize
        self.lin = linear_of(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, and let go of edges that were kept."""
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None
        if not waits(self.lin):
            nn.init.xavier_uniform_(self.lin.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @layer_takes(x=TENSOR, **EDGES)
    def forward(
        self,
        x: Tensor,
        edge_index: Tensor | SparseFormat | StatementOwner,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        lin, bias = self.lin, self.bias
        if isinstance(lin, nn.LazyLinear):
            draw, given = nn.init.xavier_uniform_, (x, edge_index, edge_weight)
            return sized_by_success(self, ((lin, x),), *given, draw=draw)
        node_rows("x", x, lin.in_features)
        if self.normalize and isinstance(edge_index, Tensor):
            kept = self._kept
            if kept is None or _is_learned(edge_weight):
                fill = (2 if self.improved else 1) if self.add_self_loops else None
                source, target, weights = gcn_ends(edge_index, edge_weight, x, fill)
            else:
                source, target, weights = kept
                if source.device != x.device:  # the layer may have moved since
                    source, target, weights = (t.to(x.device) for t in kept)
                    self._kept = kept if x.is_meta else (source, target, weights)
                weights = weights.to(x.dtype)  # the layer may have another since
            out = over_ends(source, target, weights, lin(x), x.shape[0], bias)
            if self.cached and kept is None and not (x.is_meta or _is_learned(edge_weight)):
                self._kept = source, target, weights
            return out
        return aggregated(edge_index, lin(x), edge_weight, base=bias)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


def _is_learned(weight: Tensor | None) -> bool:
    return weight is not None and weight.requires_grad


class RelationalConv(nn.Module):
    """``Out[dst[p],m] = N[p] * In[src[p],c] * W[rel[p],c,m]``: a weight matrix for each relation,
    as `torch_geometric.nn.RGCNConv`.

    The layer is that statement, on GPUs over edges in groups of one relation. With ``aggr="mean"``
    the edges of one relation into one node are averaged, with ``"sum"`` they are added; the
    relations are summed.

    Args:
        in_channels: Features of a node.
        out_channels: Features of a node in the result.
        num_relations: How many relations there are.
        num_bases: Weights as sums of so many, ``W[r] = comp[r,b] * weight[b]``.
        num_blocks: Weights made of so many blocks on the diagonal.
        aggr: ``"mean"`` or ``"sum"`` (or ``"add"``).
        root_weight: Add the features of a node itself, times a weight.
        bias: Whether there is a bias.

    Raises:
        UnsupportedError: There is no such aggregation, or both of bases and blocks are asked for.
        BindingError: The blocks do not divide the channels.

    Examples:
        >>> layer = RelationalConv(3, 4, num_relations=2)
        >>> edge_index, edge_type = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0, 1, 1])
        >>> layer(torch.randn(5, 3), edge_index, edge_type).shape
        torch.Size([5, 4])
        >>> list(layer.state_dict())
        ['weight', 'root', 'bias']
        >>> RelationalConv(4, 6, num_relations=9, num_blocks=2).weight.shape
        torch.Size([9, 2, 2, 3])
    """

    @takes(
        in_channels=SIZE,
        out_channels=SIZE,
        num_relations=SIZE,
        num_bases=SIZE.optional,
        num_blocks=SIZE.optional,
        aggr=TEXT,
        root_weight=FLAG,
        bias=FLAG,
    )
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_relations: int,
        aggr: str = "mean",
        root_weight: bool = True,
        bias: bool = True,
        num_bases: int | None = None,
        num_blocks: int | None = None,
    ) -> None:
        super().__init__()
        if num_bases is not None and num_blocks is not None:
            raise UnsupportedError(
                "both of num_bases and num_blocks were given", expected="one of them"
            )
        if num_blocks is not None and (in_channels % num_blocks or out_channels % num_blocks):
            raise BindingError(
                f"{num_blocks} blocks do not divide {in_channels} and {out_channels} channels",
                expected="channels that are multiples of num_blocks",
            )
        if _REDUCTIONS.get(aggr) not in ("sum", "mean"):
            raise UnsupportedError(
                f"there is no aggregation {aggr!r} over relations",
                expected='"sum" (or "add") or "mean"',
            )
        self.in_channels, self.out_channels, self.num_relations, self.aggr = (
            in_channels,
            out_channels,
            num_relations,
            aggr,
        )
        self.num_bases, self.num_blocks = num_bases, num_blocks
        self.weight = nn.Parameter(torch.empty(self._weight_shape()))
        if num_bases is not None:
            self.comp = nn.Parameter(torch.empty(num_relations, num_bases))
        self.root = nn.Parameter(torch.empty(in_channels, out_channels)) if root_weight else None
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def _weight_shape(self) -> tuple[int, ...]:
        if self.num_blocks is not None:
            sides = self.in_channels // self.num_blocks, self.out_channels // self.num_blocks
            return self.num_relations, self.num_blocks, *sides
        return self.num_bases or self.num_relations, self.in_channels, self.out_channels

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        nn.init.xavier_uniform_(self.weight)
        if self.num_bases is not None:
            nn.init.xavier_uniform_(self.comp)
        if self.root is not None:
            nn.init.xavier_uniform_(self.root)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @layer_takes(x=TENSOR, edge_index=TENSOR, edge_type=TENSOR)
    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        node_rows("x", x, self.in_channels, only=True)
        one_device(edge_index=edge_index, edge_type=edge_type, x=x)
        base: Tensor | None = self.bias
        if self.root is not None:
            base = x @ self.root if base is None else x @ self.root + base
        return self._aggregated(x, edge_index, edge_type, base)

    def _aggregated(
        self, x: Tensor, edge_index: Tensor, edge_type: Tensor, base: Tensor | None
    ) -> Tensor:
        mean, nodes, count = _REDUCTIONS[self.aggr] == "mean", x.shape[0], self.num_relations
        check_edges(edge_index)
        check_relations(edge_index, edge_type)
        # the blocks on the diagonal are one more index of features and weights
        b, features = "", x
        out: tuple[int, ...] = (nodes, self.out_channels)
        if self.num_blocks is not None:
            blocks, channels, wide = self.weight.shape[1:]
            b, features, out = "b,", x.reshape(nodes, blocks, channels), (nodes, blocks, wide)
        if kernels_look(edge_index) and kernels_look(edge_type) and nodes < 2**31:
            found = groups(edge_index, edge_type, nodes, count, mean=mean, dtype=x.dtype)
            statement = f"Out[X[p,q],{b}m] = V[p,q] * In[Y[p,q],{b}c] * W[Z[p],{b}c,m]"
            tensors = {"X": found.target, "Y": found.source, "Z": found.relation}
            tensors |= {"V": found.weight, "In": features, "W": self._weights()}
            options: dict[str, Any] = {"out_shape": out, "padded": ("X", "Y"), **tensors}
            if base is None:
                return insum(statement, **options).reshape(nodes, self.out_channels)
            base = base.reshape(*base.shape[:-1], *out[1:]) if b else base
            return sum_onto(base, statement, **options).reshape(nodes, self.out_channels)
        source, target, shares = listed(
            edge_index, edge_type, nodes, count, mean=mean, dtype=x.dtype
        )
        result = insum(
            f"Out[X[e],{b}m] = V[e] * In[Y[e],{b}c] * W[Z[e],{b}c,m]",
            out_shape=out,
            X=target,
            Y=source,
            Z=edge_type,
            V=shares,
            In=features,
            W=self._weights(),
        )
        result = result.reshape(nodes, self.out_channels)
        return result if base is None else result + base

    def _weights(self) -> Tensor:
        """One matrix for each relation, or its blocks."""
        if self.num_bases is None:
            return self.weight
        return torch.einsum("rb,bcm->rcm", self.comp, self.weight)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}, "
            f"aggr={self.aggr!r}"
        )
