"""From a matrix, or from edges of which every rank has some, to a matrix whose rows are on several
ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from insum.accepted import COUNT, ELEMENTS, INTEGER, NUMBER, TEXT, VALUES, require, takes
from insum.distributed.agreement import same
from insum.distributed.assembling import assembled
from insum.distributed.cuts import Cuts, owners
from insum.distributed.division import (
    MESH,
    ORDER,
    PARTITION,
    Balance,
    PartitionSpec,
    Send,
    check_choices,
    cuts_of,
    spec_of,
)
from insum.distributed.partitioned import Partitioned
from insum.distributed.renumbering import (
    checked_order,
    digest,
    local_order,
    order_of,
    renumbered,
    renumbered_entries,
)
from insum.distributed.transfers import gathered_rows, sent_to
from insum.errors import BindingError, FormatError, IndexRangeError, UnsupportedError
from insum.formats import FORMATS, SparseFormat
from insum.formats import entries as E
from insum.formats.base import FORMAT


@takes(mesh=MESH)
def partition(
    format: SparseFormat,
    mesh: Any,
    *,
    balance: Balance = "nonzeros",
    order: Literal["rcm"] | Tensor | None = None,
    send: Send = "fewest",
) -> Partitioned:
    """Cut the rows of a sparse matrix for the ranks of a mesh, and plan what they send each other.

    Every rank passes the same matrix and keeps its part: the entries of its rows, as many for each
    rank as for any other. Where entries are is compared between ranks, values are not: a row has
    those of the rank that keeps it. Columns are cut as rows are (evenly, where the matrix is not
    square): a rank holds the rows of the dense factor, and of the result, that its cuts name
    (`distribute_rows`). What each pair of ranks sends in a product is planned here, once, and kept
    small: rows of the dense factor, or sums that the other rank has made for rows of the result,
    whichever are fewer for each group of entries (a minimum vertex cover).

    Args:
        format: The matrix, in any format; of more dimensions the first two are cut. Blocks are not
            cut.
        mesh: One dimension of a device mesh.
        balance: ``"nonzeros"`` or ``"rows"``: what is even.
        order: An order of the rows and columns of a square matrix, as the old row at each new
            place: a tensor, or ``"rcm"`` for reverse Cuthill-McKee, which puts neighbours close
            together. `distribute_rows` and `collect_rows` go there and back.
        send: ``"fewest"``, or ``"rows"``: rows of the dense factor only, so that every rank has all
            entries of its rows, which attention and extrema need.

    Returns:
        This rank's part. Values are copies, without history.

    Raises:
        RankError: Ranks passed different matrices or options, or one of them failed.
        FormatError: The matrix has no rows that could be cut.

    Examples:
        On a ``mesh`` of one rank nothing travels:

        >>> import insum, torch
        >>> A = partition(insum.formats.COO.from_dense(torch.eye(3)), mesh)
        >>> A
        Partitioned(COO, shape=(3, 3), rank 0 of 1: rows 0 to 3, 3 entries, 0 rows come, 0 sums go)
        >>> insum.einsum("Y[m,n] = A[m,k] * X[k,n]", A=A, X=torch.ones(3, 1)).T
        tensor([[1., 1., 1.]])
    """
    group = mesh.get_group()
    entries, rows_order, spec = _agreed(group, format, balance, order, send)
    cuts = cuts_of(entries.coords[0], spec, balance, dist.get_world_size(group))
    mine = owners(entries.coords[0].long(), cuts.row_units) == dist.get_rank(group)
    held = taken_entries(entries, mine.nonzero().squeeze(1))
    order_here = local_order(rows_order, cuts.rows, dist.get_rank(group))
    return assembled(held, spec, cuts, order_here, mesh, balance, send)


@takes(mesh=MESH)
def partition_edges(
    edge_index: Tensor,
    mesh: Any,
    weights: Tensor | None = None,
    *,
    num_nodes: int | tuple[int, int],
    format: str = "GroupCOO",
    balance: Balance = "nonzeros",
    order: Tensor | None = None,
    send: Send = "fewest",
    self_loops: float | None = None,
) -> Partitioned:
    """The matrix ``A[target, source]`` of a graph of which every rank has some edges, and no rank
    all.

    Edges go to the owners of their targets. As in `insum.nn.adjacency`, an edge that is listed
    twice, by whomever, is one entry with the sum of both weights; without weights each weighs 1.
    Sums count it twice so, but means divide by entries, and attention sees one edge, where layers
    that are given the edges themselves see two.

    Args:
        edge_index: (2, edges): sources, then targets, of edges that this rank has; perhaps none.
            Or a DTensor of all edges, ``Shard(1)``.
        mesh: One dimension of a device mesh.
        weights: (edges,), of these edges; on every rank or on none. Or a DTensor, ``Shard(0)``.
        num_nodes: How many nodes there are in all, or (sources, targets).
        format: The name of a format of single entries.
        balance: As in `partition`; nonzeros are counted before equal edges are added.
        order: As in `partition`, the same tensor on every rank. ``"rcm"`` would need all edges on
            one rank.
        send: As in `partition`.
        self_loops: What a loop weighs that each node gets which has none; None: none is added.

    Returns:
        This rank's part.

    Raises:
        RankError: Ranks passed different numbers of nodes or options, or one of them failed.

    Examples:
        >>> import torch
        >>> edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> partition_edges(edges, mesh, num_nodes=3, format="COO")
        Partitioned(COO, shape=(3, 3), rank 0 of 1: rows 0 to 3, 3 entries, 0 rows come, 0 sums go)
    """
    group = mesh.get_group()
    edge_index, weights = _local("edge_index", edge_index, 1), _local("weights", weights, 0)
    options = {"format": format, "balance": balance, "send": send, "self_loops": self_loops}
    spec = _edges_spec(group, edge_index, weights, num_nodes, order, options)
    given, place = None, edge_index.device
    if order is not None:
        given = order.to(place).long()
    coords = tuple(renumbered(end.long(), given) for end in edge_index.flip(0))
    values = weights if weights is not None else torch.ones(coords[0].shape[0], device=place)
    entries = E.Entries(coords, values.detach(), spec.shape)
    cuts = cuts_of(entries.coords[0], spec, balance, dist.get_world_size(group), group)
    sent = sent_to(entries, owners(entries.coords[0], cuts.row_units), group)
    whole = E.collect(sent.coords, sent.values, spec.shape, order=(0, 1))
    if self_loops is not None:
        whole = _with_loops(whole, cuts.rows, dist.get_rank(group), self_loops)
    mine = local_order(given, cuts.rows, dist.get_rank(group))
    return assembled(whole, spec, cuts, mine, mesh, balance, send)


@takes(x=ELEMENTS, A=PARTITION, side=TEXT, dim=INTEGER)
def distribute_rows(x: Tensor, A: Partitioned, *, side: str = "columns", dim: int = 0) -> Tensor:
    """This rank's rows of a tensor that every rank has, in the order of a partition.

    Where no rank has all rows, read those of ``A.column_range`` (through ``A.order`` where there is
    one) from where they are.

    Args:
        x: One row for each column of ``A`` (for each row, with ``side="rows"``).
        A: The partition.
        side: ``"columns"`` for what ``A`` is multiplied with, ``"rows"`` for what stands beside its
            result; the same for a square matrix.
        dim: The dimension of ``x`` that is cut.

    Returns:
        A copy, through which gradients flow.

    Examples:
        >>> import torch
        >>> from insum.distributed import partition
        >>> from insum.formats import COO
        >>> A = partition(COO.from_dense(torch.eye(3)), mesh)
        >>> distribute_rows(torch.ones(3, 2), A).shape
        torch.Size([3, 2])
    """
    held, total = _side(A, side)
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != total:
        raise BindingError(
            f"x has shape {tuple(x.shape)}", expected=f"{total} rows in dimension {dim}"
        )
    if A.order is None:
        return x.narrow(dim, held.start, len(held)).clone()
    return x.index_select(dim, A.order.to(x.device))


@takes(x=ELEMENTS, A=PARTITION, side=TEXT)
def collect_rows(x: Tensor, A: Partitioned, *, side: str = "rows") -> Tensor:
    """All rows of a tensor of which every rank has its own, on every rank and in the order that was
    before `partition`: the opposite of `distribute_rows`, without gradients.

    Args:
        x: This rank's rows.
        A: The partition.
        side: As in `distribute_rows`.

    Returns:
        A new tensor.

    Examples:
        >>> import torch
        >>> from insum.distributed import partition
        >>> from insum.formats import COO
        >>> A = partition(COO.from_dense(torch.eye(3)), mesh)
        >>> collect_rows(torch.arange(3.0)[:, None], A).T
        tensor([[0., 1., 2.]])
    """
    held, _ = _side(A, side)
    cuts = A.row_cuts if side == "rows" else A.column_cuts

    def look() -> dict[str, Any]:
        if x.dim() == 0 or x.shape[0] != len(held):
            raise BindingError(
                f"x has shape {tuple(x.shape)}", expected=f"this rank's {len(held)} rows"
            )
        return {"side": side, "the shape of a row": tuple(x.shape[1:]), "the dtype": str(x.dtype)}

    same(A.group, look)
    every = gathered_rows(x.detach(), cuts, A.group)
    if A.order is None:
        return every
    places = gathered_rows(A.order.to(x.device), cuts, A.group)
    return torch.empty_like(every).index_copy_(0, places, every)


def _side(A: Partitioned, side: str) -> tuple[range, int]:
    if side not in ("rows", "columns"):
        raise BindingError(f"side is {side!r}", expected='"rows" or "columns"')
    return (A.row_range, A.shape[0]) if side == "rows" else (A.column_range, A.shape[1])


# --- what every rank has to say alike -------------------------------------------------------------


def _agreed(
    group: dist.ProcessGroup, format: SparseFormat, balance: str, order: Any, send: str
) -> tuple[E.Entries, Tensor | None, PartitionSpec]:
    """The entries in their new order, found to be the same on every rank."""
    made: dict[str, Any] = {}

    def look() -> dict[str, Any]:
        require("format", format, FORMAT)
        require("order", order, ORDER)
        check_choices(balance, send)
        spec = spec_of(format)
        entries = format.entries()
        made.update(spec=spec, entries=entries)
        made["order"] = order_of(entries, spec, order)
        return {
            "the format": (spec.kind, spec.shape, spec.options),
            "the entries": digest(*entries.coords),
            "the dtype": str(format.dtype),
            "the order": None if made["order"] is None else digest(made["order"]),
            "balance": balance,
            "send": send,
        }

    same(group, look)
    return (*renumbered_entries(made["entries"], made["spec"], made["order"]), made["spec"])


def _local(name: str, x: Any, dim: int) -> Any:
    """This rank's part of a DTensor; all else as it is."""
    if not hasattr(x, "to_local"):
        return x
    if not all(placement.is_shard(dim) for placement in x.placements):
        raise BindingError(
            f"{name} is a DTensor with placements {tuple(x.placements)}",
            expected=f"(Shard(dim={dim}),)",
            remedy=f"{name}.redistribute(placements=[Shard({dim})])",
        )
    return x.to_local()


def _edges_spec(
    group: dist.ProcessGroup,
    edge_index: Tensor,
    weights: Tensor | None,
    num_nodes: Any,
    order: Any,
    options: dict[str, Any],
) -> PartitionSpec:
    made: dict[str, PartitionSpec] = {}

    def look() -> dict[str, Any]:
        _check_edge_options(edge_index, weights, order, options)
        both = num_nodes if isinstance(num_nodes, tuple | list) else (num_nodes, num_nodes)
        for count in both:
            require("num_nodes", count, COUNT)
        sources, targets = map(int, both)
        _check_edges(edge_index, weights, (sources, targets))
        if options["self_loops"] is not None and sources != targets:
            raise UnsupportedError("loops between nodes of two kinds", expected="one kind")
        if order is not None:
            if sources != targets:
                raise UnsupportedError("an order of nodes of two kinds", expected="one kind")
            checked_order(order, sources, edge_index.device)
        made["spec"] = PartitionSpec(options["format"], (), (targets, sources))
        return {
            "num_nodes": (sources, targets),
            "the dtype of weights": None if weights is None else str(weights.dtype),
            "the order": None if order is None else digest(order),
            **options,
        }

    same(group, look)
    return made["spec"]


def _check_edge_options(
    edge_index: Tensor, weights: Tensor | None, order: Any, options: dict[str, Any]
) -> None:
    require("edge_index", edge_index, ELEMENTS)
    require("weights", weights, VALUES.optional)
    require("order", order, ORDER)
    require("self_loops", options["self_loops"], NUMBER.optional)
    require("format", options["format"], TEXT)
    check_choices(options["balance"], options["send"])
    kind = FORMATS.get(options["format"])
    if kind is None or "block_shape" in kind._options:
        raise FormatError(f"format is {options['format']!r}", expected="a format of single entries")
    if isinstance(order, str):
        raise UnsupportedError(
            "reverse Cuthill-McKee of edges that no rank has all of",
            expected="an order as a tensor, or None",
        )


def _check_edges(edge_index: Tensor, weights: Tensor | None, limits: tuple[int, int]) -> None:
    from insum.nn.edges import check_edges, check_range, edge_weights

    check_edges(edge_index)
    check_range("edge_index", edge_index, limits, "nodes")
    if edge_index.device.type != "cpu" and edge_index.numel():
        for ends, limit in zip(edge_index, limits):
            low, high = (int(v) for v in torch.aminmax(ends))
            if low < 0 or high >= limit:
                raise IndexRangeError(
                    f"edge_index holds {low if low < 0 else high}", expected=f"below {limit}"
                )
    if weights is not None:
        edge_weights(weights, edge_index.shape[1])


# --- entries --------------------------------------------------------------------------------------


def taken_entries(entries: E.Entries, places: Tensor) -> E.Entries:
    coords = tuple(c.index_select(0, places).long() for c in entries.coords)
    values = None if entries.values is None else entries.values.detach().index_select(0, places)
    return replace(entries, coords=coords, values=values, order=(), pointers=None)


def _with_loops(entries: E.Entries, cuts: Cuts, rank: int, weight: float) -> E.Entries:
    """A loop for each node of this rank that has none."""
    rows, columns = entries.coords
    have = torch.zeros(cuts[rank + 1] - cuts[rank], dtype=torch.bool, device=rows.device)
    have[rows[rows == columns].long() - cuts[rank]] = True
    more = ((~have).nonzero().squeeze(1) + cuts[rank]).to(rows.dtype)
    assert entries.values is not None
    values = torch.cat([entries.values, entries.values.new_full(more.shape, float(weight))])
    coords = torch.cat([rows, more]), torch.cat([columns, more])
    return E.Entries(coords, values, entries.shape)
