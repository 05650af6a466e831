"""From a matrix, or from edges of which every rank has some, to a matrix whose rows are on several
ranks.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from insum.accepted import (
    COUNT,
    ELEMENTS,
    INTEGER,
    INTEGER_DTYPES,
    NUMBER,
    TEXT,
    VALUES,
    Accepted,
    has_elements,
    require,
    takes,
)
from insum.distributed.agreement import Turns, gathered, lost, same
from insum.distributed.cuts import Cuts, even_cuts, lengths, nonzero_cuts, owners, scaled
from insum.distributed.exchange import RowExchange
from insum.distributed.needs import (
    Asked,
    HandedOver,
    Needs,
    Places,
    RankPlan,
    UnitExchange,
    needs_of,
    plan_of,
)
from insum.distributed.ordering import reverse_cuthill_mckee
from insum.distributed.partitioned import Partitioned, RankTraffic
from insum.errors import BindingError, FormatError, IndexRangeError, UnsupportedError
from insum.formats import FORMATS, BlockGroupCOO, GroupCOO, SparseFormat
from insum.formats import entries as E
from insum.formats.convert import FORMAT

Balance = Literal["nonzeros", "rows"]
Send = Literal["fewest", "rows"]


def _is_line(mesh: Any) -> bool:
    return hasattr(mesh, "get_group") and getattr(mesh, "ndim", 0) == 1


MESH = Accepted("a DeviceMesh of one dimension", _is_line)
PARTITION = Accepted("what insum.distributed.partition gave", lambda v: isinstance(v, Partitioned))
ORDER = Accepted(
    'None, "rcm" or a permutation of all rows as a tensor of integers',
    lambda v: (
        v is None or v == "rcm" if not isinstance(v, Tensor) else v.dim() == 1 and has_elements(v)
    ),
)


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
    held = _taken(entries, mine.nonzero().squeeze(1))
    order_here = _local_order(rows_order, cuts.rows, dist.get_rank(group))
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
    coords = tuple(_renumbered(end.long(), given) for end in edge_index.flip(0))
    values = weights if weights is not None else torch.ones(coords[0].shape[0], device=place)
    entries = E.Entries(coords, values.detach(), spec.shape)
    cuts = cuts_of(entries.coords[0], spec, balance, dist.get_world_size(group), group)
    sent = sent_to(entries, owners(entries.coords[0], cuts.row_units), group)
    whole = E.collect(sent.coords, sent.values, spec.shape, order=(0, 1))
    if self_loops is not None:
        whole = _with_loops(whole, cuts.rows, dist.get_rank(group), self_loops)
    mine = _local_order(given, cuts.rows, dist.get_rank(group))
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
    every = _gathered_rows(x.detach(), cuts, A.group)
    if A.order is None:
        return every
    places = _gathered_rows(A.order.to(x.device), cuts, A.group)
    return torch.empty_like(every).index_copy_(0, places, every)


def _side(A: Partitioned, side: str) -> tuple[range, int]:
    if side not in ("rows", "columns"):
        raise BindingError(f"side is {side!r}", expected='"rows" or "columns"')
    return (A.row_range, A.shape[0]) if side == "rows" else (A.column_range, A.shape[1])


# --- what every rank has to say alike -------------------------------------------------------------


@dataclass(frozen=True)
class PartitionSpec:
    """What the parts are: a kind of format with its options, and the shape of all."""

    kind: str
    options: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]

    @property
    def block(self) -> tuple[int, ...]:
        return dict(self.options).get("block_shape") or (1,) * len(self.shape)

    @property
    def square(self) -> bool:
        return self.shape[0] == self.shape[1]


def check_choices(balance: str, send: str) -> None:
    require("balance", balance, TEXT)
    require("send", send, TEXT)
    for name, value, known in (
        ("balance", balance, ("nonzeros", "rows")),
        ("send", send, ("fewest", "rows")),
    ):
        if value not in known:
            raise BindingError(f"{name} is {value!r}", expected=" or ".join(map(repr, known)))


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
        made["order"] = _order_of(entries, spec, order)
        return {
            "the format": (spec.kind, spec.shape, spec.options),
            "the entries": _digest(*entries.coords),
            "the dtype": str(format.dtype),
            "the order": None if made["order"] is None else _digest(made["order"]),
            "balance": balance,
            "send": send,
        }

    same(group, look)
    return (*_renumbered_entries(made["entries"], made["spec"], made["order"]), made["spec"])


def ordered_entries(
    entries: E.Entries, spec: PartitionSpec, order: Any
) -> tuple[E.Entries, Tensor | None]:
    """Entries in their new order, and that order, row by row."""
    return _renumbered_entries(entries, spec, _order_of(entries, spec, order))


def _renumbered_entries(
    entries: E.Entries, spec: PartitionSpec, order: Tensor | None
) -> tuple[E.Entries, Tensor | None]:
    if order is None:
        return entries, None
    coords = (*(_renumbered(c.long(), order) for c in entries.coords[:2]), *entries.coords[2:])
    changed = replace(entries, coords=coords, order=(), pointers=None)
    return changed, _unit_rows(order, spec.block[0])


def spec_of(format: SparseFormat) -> PartitionSpec:
    if format.ndim < 2:
        raise FormatError(
            f"a {type(format).__name__} of {format.ndim} dimension(s) has no rows that could be "
            "cut",
            expected="a matrix",
        )
    known = {name: getattr(format, name, None) for name in type(format)._options}
    return PartitionSpec(type(format).__name__, tuple(sorted(known.items())), tuple(format.shape))


def _digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().long().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _order_of(entries: E.Entries, spec: PartitionSpec, order: Any) -> Tensor | None:
    """The order of units, as the old unit at each new place."""
    if order is None:
        return None
    even = all(size % b == 0 for size, b in zip(spec.shape, spec.block))
    if not spec.square or spec.block[0] != spec.block[1] or not even:
        raise UnsupportedError(
            f"an order of the rows and columns of a matrix {spec.shape} in blocks {spec.block}",
            expected="a square matrix that square blocks divide",
        )
    units = entries.grid[0]
    if isinstance(order, Tensor):
        return _checked_order(order, units, entries.coords[0].device)
    rows, columns = (c.cpu().numpy().astype(np.int64) for c in entries.coords[:2])
    found = reverse_cuthill_mckee(rows, columns, units)
    return torch.from_numpy(found).to(entries.coords[0].device)


def _checked_order(order: Tensor, units: int, device: torch.device) -> Tensor:
    if order.dtype not in INTEGER_DTYPES or order.shape != (units,):
        raise BindingError(
            f"order is a {str(order.dtype).removeprefix('torch.')} tensor {tuple(order.shape)}",
            expected=f"{units} integers, one for each row (or block of rows)",
        )
    found = order.to(device).long()
    if units and not torch.equal(found.sort().values, torch.arange(units, device=device)):
        raise BindingError(
            "order is no permutation", expected=f"every number from 0 to {units - 1} once"
        )
    return found


def _renumbered(units: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return units
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    return place[units]


def _unit_rows(units: Tensor, size: int) -> Tensor:
    if size == 1:
        return units
    return (units[:, None] * size + torch.arange(size, device=units.device)).flatten()


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
            _checked_order(order, sources, edge_index.device)
        made["spec"] = PartitionSpec(options["format"], (), (targets, sources))
        return {
            "num_nodes": (sources, targets),
            "the dtype of weights": None if weights is None else str(weights.dtype),
            "the order": None if order is None else _digest(order),
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


# --- cutting --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitCuts:
    """Cuts of rows and columns, in rows and in units."""

    rows: Cuts
    columns: Cuts
    block: tuple[int, int]

    @property
    def row_units(self) -> Cuts:
        return tuple(-(-cut // self.block[0]) for cut in self.rows)

    @property
    def column_units(self) -> Cuts:
        return tuple(-(-cut // self.block[1]) for cut in self.columns)


def cuts_of(
    rows: Tensor,
    spec: PartitionSpec,
    balance: str,
    ranks: int,
    group: dist.ProcessGroup | None = None,
) -> UnitCuts:
    """Where rows and columns are cut; with a group, every rank of it has some of the entries."""
    block = spec.block
    sides = block[0], block[1]
    step = math.lcm(*sides) if spec.square else block[0]
    steps = -(-spec.shape[0] // step)
    if balance == "rows":
        found = even_cuts(steps, ranks)
    else:
        ordered = (rows.long() * block[0]).div(step, rounding_mode="floor").sort().values

        def below(row: Tensor) -> Tensor:
            count = torch.searchsorted(ordered, row)
            return count if group is None else summed(count, group)

        nonzeros = int(below(torch.tensor([steps], device=rows.device)))
        found = nonzero_cuts(below, nonzeros, steps, ranks, rows.device)
    row_cuts = scaled(found, step, spec.shape[0])
    if spec.square:
        return UnitCuts(row_cuts, row_cuts, sides)
    units = even_cuts(-(-spec.shape[1] // block[1]), ranks)
    return UnitCuts(row_cuts, scaled(units, block[1], spec.shape[1]), sides)


def _local_order(order: Tensor | None, cuts: Cuts, rank: int) -> Tensor | None:
    return None if order is None else order[cuts[rank] : cuts[rank + 1]].clone()


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


def summed(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = counts.clone()
    _carefully(lambda: dist.all_reduce(total, group=group))
    return total


def _carefully(collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as error:
        raise lost(error) from error


def _taken(entries: E.Entries, places: Tensor) -> E.Entries:
    coords = tuple(c.index_select(0, places).long() for c in entries.coords)
    values = None if entries.values is None else entries.values.detach().index_select(0, places)
    return replace(entries, coords=coords, values=values, order=(), pointers=None)


# --- sending --------------------------------------------------------------------------------------


def swapped(pieces: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """A piece from every rank, for a piece to every rank; of any lengths."""
    mine = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device)
    theirs = torch.empty_like(mine)
    _carefully(lambda: dist.all_to_all_single(theirs, mine, group=group))
    take, given = theirs.tolist(), torch.cat(list(pieces)).contiguous()
    rows = given.new_empty((sum(take), *given.shape[1:]))
    _carefully(lambda: dist.all_to_all_single(rows, given, take, mine.tolist(), group=group))
    return list(torch.split(rows, take))


def sent_to(entries: E.Entries, owner: Tensor, group: dist.ProcessGroup) -> E.Entries:
    """The entries of all ranks that belong to this one."""
    sorting = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=dist.get_world_size(group)).tolist()
    came = [
        torch.cat(swapped(torch.split(column[sorting], counts), group))
        for column in (*entries.coords, *(() if entries.values is None else (entries.values,)))
    ]
    rank = len(entries.coords)
    return replace(entries, coords=tuple(came[:rank]), values=came[rank] if came[rank:] else None)


def _gathered_rows(x: Tensor, cuts: Cuts, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks one behind the other."""
    sizes = lengths(cuts)
    padded = E.padded_to(x, (max(sizes), *x.shape[1:])).contiguous()
    every = [torch.empty_like(padded) for _ in sizes]
    _carefully(lambda: dist.all_gather(every, padded, group=group))
    return torch.cat([one[:size] for one, size in zip(every, sizes)])


# --- putting together -----------------------------------------------------------------------------


def assembled(
    held: E.Entries,
    spec: PartitionSpec,
    cuts: UnitCuts,
    order: Tensor | None,
    mesh: Any,
    balance: str,
    send: str,
) -> Partitioned:
    """This rank's part, from all entries of its rows; ``order`` names the old numbers of these."""
    group = mesh.get_group()
    rank, limits = dist.get_rank(group), (cuts.row_units, cuts.column_units)
    rows, columns = (c.long() for c in held.coords[:2])
    found: list[Needs] = []

    def plan() -> str:
        found.append(needs_of(rows, columns, rank, *limits, cover=send == "fewest"))
        return uuid.uuid4().hex[:12]

    name = gathered(group, plan)[0]
    (needs,) = found
    came, extra = _handed_over(held, needs, group)
    done = plan_of(rows, columns, needs, came, rank, *limits)
    turns = Turns(name, rank, dist.get_world_size(group))
    to_columns, to_rows = (
        _row_exchange(units, size, cut[rank], cut[-1], group, turns)
        for units, size, cut in (
            (done.columns, cuts.block[1], cuts.columns),
            (done.rows, cuts.block[0], cuts.rows),
        )
    )
    sides = to_columns.taken, to_rows.taken
    own, far, out = _parts(held, needs, done, extra, spec, cuts, rank, sides)
    counts = RankTraffic.counted(lengths(cuts.rows)[rank], done, to_columns, to_rows)
    return Partitioned(
        own=own,
        far=far,
        out=out,
        columns=to_columns,
        rows=to_rows,
        shape=spec.shape,
        row_cuts=cuts.rows,
        column_cuts=cuts.columns,
        order=order,
        mesh=mesh,
        traffic=tuple(gathered(group, lambda: counts)),
        balance=balance,
        send=send,
    )


def _handed_over(
    held: E.Entries, needs: Needs, group: dist.ProcessGroup
) -> tuple[list[HandedOver], list[Tensor]]:
    """What every rank asks of this one; and other coordinates and values of entries that came."""

    def swap(piece: Callable[[Asked], Tensor]) -> list[Tensor]:
        return swapped([piece(asked) for asked in needs.asked], group)

    wanted, summed_rows = swap(lambda a: a.wanted), swap(lambda a: a.summed)
    rows, columns, *rest = (
        swap(lambda a, tensor=tensor: tensor[a.moved])  # type: ignore[misc]
        for tensor in (*held.coords, *(() if held.values is None else (held.values,)))
    )
    came = [HandedOver(*one) for one in zip(wanted, summed_rows, rows, columns)]
    return came, [torch.cat(one) for one in rest]


def _row_exchange(
    units: UnitExchange, size: int, first: int, total: int, group: dist.ProcessGroup, turns: Turns
) -> RowExchange:
    rows = units.in_rows(size, first, total)
    every = summed(torch.tensor([sum(rows.give) + sum(rows.take)], device=rows.given.device), group)
    return RowExchange(
        rows.given.long(), rows.taken.long(), rows.give, rows.take, group, turns, bool(every)
    )


def _parts(
    held: E.Entries,
    needs: Needs,
    done: RankPlan,
    extra: list[Tensor],
    spec: PartitionSpec,
    cuts: UnitCuts,
    rank: int,
    travelling: tuple[int, int],
) -> tuple[SparseFormat, SparseFormat, SparseFormat]:
    """The three parts as formats: the kind that was given, and groups for what lies thinly."""
    here = cuts.rows[rank + 1] - cuts.rows[rank], cuts.columns[rank + 1] - cuts.columns[rank]
    coming, foreign = travelling
    rest = len(spec.shape) - 2
    values = extra[rest] if held.values is not None else None
    grouped = BlockGroupCOO if held.block_shape else GroupCOO
    sparse = {"block_shape": held.block_shape} if held.block_shape else {}

    def made(
        kind: type[SparseFormat], options: dict[str, Any], places: Places, sides: tuple[int, int],
        others: Sequence[Tensor], numbers: Tensor | None,
    ) -> SparseFormat:  # fmt: skip
        shape = (*sides, *spec.shape[2:])
        coords = (places.rows, places.columns, *others)
        grid = E.grid_of(shape, held.block_shape) if held.block_shape else shape
        narrow = tuple(c.to(E.index_dtype(size)) for c, size in zip(coords, grid))
        return kind._build(E.Entries(narrow, numbers, shape, (), held.block_shape), **options)

    def chosen(places: Tensor) -> tuple[list[Tensor], Tensor | None]:
        return (
            [c[places] for c in held.coords[2:]],
            None if held.values is None else held.values[places],
        )

    return (
        made(FORMATS[spec.kind], dict(spec.options), done.own, here, *chosen(needs.own)),
        made(grouped, sparse, done.far, (here[0], coming), *chosen(needs.far)),
        made(grouped, sparse, done.out, (foreign, here[1]), extra[:rest], values),
    )
