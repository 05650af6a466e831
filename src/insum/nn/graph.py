"""Graph convolutions with the weights of their namesakes in PyG."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import insum
from insum.accepted import COUNT, FLAG, SIZE, TENSOR, TEXT, Accepted, takes
from insum.compat.calls import is_plain_call
from insum.errors import BindingError, InsumError, UnsupportedError
from insum.formats import COO, GroupCOO, SparseFormat
from insum.memory import remembered
from insum.nn.checks import (
    EDGES,
    PAIR,
    integers,
    kernels_look,
    last_size,
    layer_takes,
    one_device,
)
from insum.nn.edges import check_edges, check_range, endpoints, gcn_ends, plain
from insum.nn.functional import _REDUCTIONS, _tensor, over_ends, propagate
from insum.plan.sizes import power_of_two
from insum.runtime import grouping
from insum.runtime.record import out_of_range

SIDES = Accepted(
    "a pair of them: sources, and targets or None",
    lambda v: isinstance(v, tuple | list) and len(v) == 2 and all(map(TENSOR.optional.fits, v)),
)


class GraphConv(nn.Module):
    """``Y = aggregate(W[e] * X[src[e]]) @ lin_rel + X @ lin_root``, weight for weight
    `torch_geometric.nn.GraphConv`.

    The aggregation is one statement, ``Out[dst[e],f] = W[e] * X[src[e],f]`` (see `propagate`); sums
    and means are taken on the narrower side of ``lin_rel``. ``edge_index`` may also be the
    transposed adjacency matrix in any format (see `adjacency`), ``x`` a pair ``(sources,
    targets)``.

    >>> layer = GraphConv(3, 4, aggr="mean")
    >>> layer(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
    torch.Size([5, 4])
    >>> list(layer.state_dict())
    ['lin_rel.weight', 'lin_rel.bias', 'lin_root.weight']
    """

    @takes(in_channels=COUNT | PAIR, out_channels=COUNT, aggr=TEXT, bias=FLAG)
    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str = "add",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if aggr not in _REDUCTIONS:
            raise UnsupportedError(
                f"there is no aggregation {aggr!r}", expected='"add" (or "sum"), "mean" or "max"'
            )
        both = in_channels if isinstance(in_channels, tuple | list) else (in_channels, in_channels)
        source, target = map(int, both)
        self.in_channels, self.out_channels, self.aggr = in_channels, out_channels, aggr
        self.lin_rel = nn.Linear(source, out_channels, bias=bias)
        self.lin_root = nn.Linear(target, out_channels, bias=False)

    @layer_takes(x=TENSOR | SIDES, **EDGES, num_nodes=COUNT.optional)
    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Tensor | SparseFormat,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
    ) -> Tensor:
        source, target = (x, x) if isinstance(x, Tensor) else x
        last_size("x", source, self.lin_rel.in_features, "in_channels")
        nodes = num_nodes if target is None else target.shape[0]
        if self.out_channels < self.lin_rel.in_features and self.aggr != "max":
            out = propagate(
                edge_index,
                nn.functional.linear(source, self.lin_rel.weight),
                edge_weight,
                self.aggr,
                nodes,
            )
            out = out if self.lin_rel.bias is None else out + self.lin_rel.bias
        else:
            out = self.lin_rel(propagate(edge_index, source, edge_weight, self.aggr, nodes))
        return out if target is None else out + self.lin_root(target)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, aggr={self.aggr!r}"


class GCNConv(nn.Module):
    """``Y = N @ (X @ lin) + bias`` with the symmetrically normalised adjacency ``N``, weight for
    weight `torch_geometric.nn.GCNConv`.

    One statement, ``Out[dst[e],f] = N[e] * X[src[e],f]``. Where there are no edge weights, ``N`` is
    computed once for each ``edge_index`` and kept with it (see `gcn_norm`). A matrix passed as
    ``edge_index`` is taken as normalised already.

    >>> layer = GCNConv(3, 4)
    >>> layer(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 2, 0]])).shape
    torch.Size([5, 4])
    >>> list(layer.state_dict())
    ['bias', 'lin.weight']
    """

    @takes(
        in_channels=COUNT,
        out_channels=COUNT,
        improved=FLAG,
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
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.improved, self.add_self_loops, self.normalize = improved, add_self_loops, normalize
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        nn.init.xavier_uniform_(self.lin.weight)

    @layer_takes(x=TENSOR, **EDGES)
    def forward(
        self, x: Tensor, edge_index: Tensor | SparseFormat, edge_weight: Tensor | None = None
    ) -> Tensor:
        last_size("x", x, self.in_channels, "in_channels")
        if self.normalize and isinstance(edge_index, Tensor):
            one_device(edge_index=edge_index, x=x, edge_weight=edge_weight)
            fill = (2 if self.improved else 1) if self.add_self_loops else None
            ends = gcn_ends(edge_index, edge_weight, x.shape[0], fill, x.dtype)
            out = over_ends(*ends, self.lin(x), x.shape[0])
        else:
            out = propagate(edge_index, self.lin(x), edge_weight)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"


class RelationalConv(nn.Module):
    """``Out[dst[p],m] = N[p] * In[src[p],c] * W[rel[p],c,m]``: a weight matrix for each relation,
    as `torch_geometric.nn.RGCNConv`.

    The edges are held as a sparse tensor ``A[target, source, relation]`` grouped by relation, and
    the layer is ``insum.einsum("Out[x,m] = A[x,y,z] * In[y,c] * W[z,c,m]", ...)``. With
    ``aggr="mean"`` the edges of one relation into one node are averaged, with ``"sum"`` they are
    added; the relations are summed.

    >>> layer = RelationalConv(3, 4, num_relations=2)
    >>> edge_index, edge_type = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([0, 1, 1])
    >>> layer(torch.randn(5, 3), edge_index, edge_type).shape
    torch.Size([5, 4])
    >>> list(layer.state_dict())
    ['weight', 'root', 'bias']
    """

    @takes(
        in_channels=SIZE,
        out_channels=SIZE,
        num_relations=SIZE,
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
    ) -> None:
        super().__init__()
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
        self.weight = nn.Parameter(
            nn.init.xavier_uniform_(torch.empty(num_relations, in_channels, out_channels))
        )
        self.root = (
            nn.Parameter(nn.init.xavier_uniform_(torch.empty(in_channels, out_channels)))
            if root_weight
            else None
        )
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None

    @layer_takes(x=TENSOR, edge_index=TENSOR, edge_type=TENSOR)
    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        last_size("x", x, self.in_channels, "in_channels")
        one_device(edge_index=edge_index, edge_type=edge_type, x=x)
        out = self._aggregated(x, edge_index, edge_type)
        out = out if self.root is None else out + x @ self.root
        return out if self.bias is None else out + self.bias

    def _aggregated(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        mean, nodes, count = _REDUCTIONS[self.aggr] == "mean", x.shape[0], self.num_relations
        check_edges(edge_index)
        _check_relations(edge_index, edge_type)
        if kernels_look(edge_index) and kernels_look(edge_type) and nodes < 2**31:
            found = groups(edge_index, edge_type, nodes, count, mean=mean, dtype=x.dtype)
            return insum.insum(
                "Out[X[p,q],m] = V[p,q] * In[Y[p,q],c] * W[Z[p],c,m]",
                out_shape=(nodes, self.out_channels),
                padded=("X", "Y"),
                X=found.target,
                Y=found.source,
                Z=found.relation,
                V=found.weight,
                In=x,
                W=self.weight,
            )
        A = relations(edge_index, edge_type, nodes, count, mean=mean, dtype=x.dtype)
        statement = "Out[x,m] = A[x,y,z] * In[y,c] * W[z,c,m]"
        return _tensor(insum.einsum(statement, A=A, In=x, W=self.weight))

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}, "
            f"aggr={self.aggr!r}"
        )


def relations(
    edge_index: Tensor, edge_type: Tensor, nodes: int, count: int, *, mean: bool, dtype: torch.dtype
) -> SparseFormat:
    """Edges as ``A[target, source, relation]``: grouped by relation and kept with ``edge_index``; a
    plain list of edges under a tracer.
    """
    src, dst = endpoints(edge_index, nodes, nodes)
    shape = (nodes, nodes, count)
    if not is_plain_call((edge_index, edge_type)):
        return COO(
            _shares(dst, edge_type, nodes, count, mean, dtype),
            (dst, src, edge_type),
            shape,
            validate=False,
        )
    check_range("edge_type", edge_type, (count,), "relations")
    token = remembered(edge_index, "token", object)  # these edges in this version

    def make() -> GroupCOO:
        return GroupCOO.from_entries(
            (dst, src, edge_type),
            _shares(dst, edge_type, nodes, count, mean, dtype),
            shape,
            group_dims=2,
            validate=False,
        )

    return remembered(edge_type, ("relations", token, shape, mean, dtype), make)


def _check_relations(edge_index: Tensor, edge_type: Tensor) -> None:
    if tuple(edge_type.shape) != (edge_index.shape[1],):
        raise BindingError(
            f"edge_type has shape {tuple(edge_type.shape)}",
            expected=f"({edge_index.shape[1]},), one relation for each edge",
        )
    integers("edge_type", edge_type)


#: Edges in a group on a GPU: the rows of one matrix product.
GROUP = 64


def groups(
    edge_index: Tensor, edge_type: Tensor, nodes: int, count: int, *, mean: bool, dtype: torch.dtype
) -> grouping.Grouped:
    """The same on a GPU: grouped without waiting, and kept with the edges."""

    def explain(offence: int, edge: int, value: int) -> InsumError:
        if offence == grouping.RELATION:
            return out_of_range(f"edge_type[{edge}]", value, count, "relations")
        return out_of_range(f"edge_index[{offence}, {edge}]", value, nodes, "nodes")

    def make() -> grouping.Grouped:
        edges, relation = plain(edge_index), plain(edge_type)
        counts = grouping.counted(edges, relation, nodes, count, explain)
        src, dst = endpoints(edge_index, nodes, nodes)
        shares = _shares(dst, relation, nodes, count, mean, dtype)
        size = min(GROUP, power_of_two(src.shape[0] // max(1, count)))
        return grouping.grouped(edges, relation, shares, counts, nodes, size)

    return remembered(edge_type, ("groups", nodes, count, mean, dtype), make, edge_index)


def _shares(
    dst: Tensor, edge_type: Tensor, nodes: int, count: int, mean: bool, dtype: torch.dtype
) -> Tensor:
    """1, or 1 over the number of edges with the same target and relation."""
    one = torch.ones(dst.shape[0], dtype=dtype, device=dst.device)
    if not mean:
        return one
    total = insum.insum(
        "D[dst[e],rel[e]] = one[e]", dst=dst, rel=edge_type, one=one, out_shape=(nodes, count)
    )
    return insum.insum("S[e] = reciprocal(D[dst[e],rel[e]])", D=total, dst=dst, rel=edge_type)
