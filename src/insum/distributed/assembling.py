"""The part of a rank, put together from the entries of its rows and what other ranks ask for."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from insum.distributed.agreement import Turns, gathered
from insum.distributed.cuts import lengths
from insum.distributed.division import PartitionSpec, UnitCuts
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
from insum.distributed.partitioned import Partitioned, RankTraffic
from insum.distributed.transfers import summed, swapped
from insum.formats import FORMATS, BlockGroupCOO, GroupCOO, SparseFormat
from insum.formats import entries as E


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
        found.append(needs_of(rows, columns, rank, cuts.column_units, cover=send == "fewest"))
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
