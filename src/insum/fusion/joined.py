"""The op that a series of chains becomes, ``insum::fused_series``: their index tensors as one, made
once and kept while those live unchanged.

Where the rows that each chain writes (or reads) are unique, they become a table, a row of the table
for each chain: no two points meet, and a kernel can order what it reads. Where they are not, or
hardly any are there, the points of each chain are put into groups of equal size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.call import running
from insum.call.prepared import prepare
from insum.call.request import Request
from insum.compat.calls import PLAIN
from insum.errors import IndexRangeError
from insum.facts import known_now
from insum.fusion.defining import define
from insum.fusion.indices import Selects, read, select, wrapped, written
from insum.fusion.report import note_run
from insum.lang.expr import Access, Affine, Expr, Statement, accesses, index_of, rewrite
from insum.lang.parser import parse

#: Variables of a template: the points of a chain, and the number of the chain. In the statements it
#: becomes, a row, or a group and a place in it.
POINT, PIECE, ROW, GROUP, SLOT = "point", "piece", "row", "group", "slot"
#: Points of one group, and how many times as many places as points a table may have.
GROUP_SIZE, SPARSEST = 64, 8
SelectedTensor: TypeAlias = tuple[int, Selects]


@dataclass(frozen=True, slots=True)
class Joined:
    """All of an op that is not a tensor or a size. As text, one line without quotes, it is the op's
    first argument.

    Attributes:
        parts: for each index tensor and each chain: which of the tensors that are passed, and which
            part of it.
        wraps: index tensors in which a negative value counts from the end.
    """

    template: str
    values: tuple[str, ...]
    parts: tuple[tuple[SelectedTensor, ...], ...]
    wraps: frozenset[int]

    def __str__(self) -> str:
        parts = ";".join(
            ",".join(":".join([str(place), *written(selects)]) for place, selects in one)
            for one in self.parts
        )
        return "|".join(
            [self.template, ",".join(self.values), parts, ",".join(map(str, sorted(self.wraps)))]
        )


@functools.lru_cache(maxsize=1024)
def joined_of(text: str) -> Joined:
    """The reverse of ``str(joined)``."""
    template, values, parts, wraps = text.split("|")
    note_run(template)  # here, because this is done once for each
    numbers = frozenset(map(int, wraps.split(","))) if wraps else frozenset()
    return Joined(
        template, tuple(values.split(",")), tuple(_parts(one) for one in parts.split(";")), numbers
    )


def _parts(text: str) -> tuple[SelectedTensor, ...]:
    found = []
    for one in text.split(","):
        place, *selects = one.split(":")
        found.append((int(place), read(selects)))
    return tuple(found)


# --- the statement --------------------------------------------------------------------------------


def as_table(template: Statement, rows: str) -> Statement:
    """Points are rows of a table, named by the index tensor ``rows``: ``out[n0[point],m] =
    X[n1[point],c]`` is ``out[row,m] = X[n1[piece,row],c]``.
    """

    def index(old: Affine) -> Affine:
        atom = old.atom
        if not isinstance(atom, Access):
            return old
        return (
            index_of(ROW)
            if atom.tensor == rows
            else Affine(((1, Access(atom.tensor, (index_of(PIECE), index_of(ROW)))),))
        )

    return _indexed(template, index)


def as_groups(template: Statement) -> Statement:
    """Points are places in groups, each of one chain: ``W[piece,c]`` is ``W[pieces[group],c]``."""

    def index(old: Affine) -> Affine:
        atom = old.atom
        if isinstance(atom, Access):
            return Affine(((1, Access(atom.tensor, (index_of(GROUP), index_of(SLOT)))),))
        return Affine(((1, Access("pieces", (index_of(GROUP),))),)) if old.var == PIECE else old

    return _indexed(template, index)


def _indexed(template: Statement, index: Callable[[Affine], Affine]) -> Statement:
    def change(access: Access) -> Expr:
        return Access(access.tensor, tuple(index(i) for i in access.indices))

    target = change(template.target)
    assert isinstance(target, Access)
    return Statement(target, template.operator, rewrite(template.value, change))


def limits(template: Statement, shapes: Mapping[str, Sequence[int]]) -> dict[str, set[int]]:
    """The sizes of the dimensions that each index tensor indexes."""
    found: dict[str, set[int]] = {}
    for access in (template.target, *accesses(template.value, nested=False)):
        for dim, index in enumerate(access.indices):
            if isinstance(index.atom, Access):
                found.setdefault(index.atom.tensor, set()).add(int(shapes[access.tensor][dim]))
    return found


# --- index tensors --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class JoinedStatement:
    """One statement for all chains, and the index tensors that it reads."""

    statement: str
    indices: dict[str, Tensor]

    @property
    def padded(self) -> tuple[str, ...]:
        return tuple(name for name in self.indices if name != "pieces")


def made_for(text: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> JoinedStatement:
    joined = joined_of(text)
    first, *others = tensors[len(joined.values) :]
    make = functools.partial(_make, joined, tensors, sizes)
    if any(type(t) not in PLAIN for t in tensors):
        return make(closely=False)
    closely = all(known_now(t) is not None for t in (first, *others))
    key = "joined", text, tuple(sizes), closely
    return memory.remembered(first, key, lambda: make(closely=closely), *others)


def _make(
    joined: Joined, tensors: Sequence[Tensor], sizes: Sequence[int], *, closely: bool
) -> JoinedStatement:
    template = parse(joined.template)
    shapes = {
        **dict(zip(joined.values, (t.shape for t in tensors))),
        template.target.tensor: tuple(sizes),
    }
    most = limits(template, shapes)
    parts: dict[str, list[Tensor]] = {}
    seen: dict[str, list[Tensor]] = {}
    for k, one in enumerate(joined.parts):
        limit, wraps = min(most[f"n{k}"]), k in joined.wraps
        own = [select(tensors[place], selects) for place, selects in one]
        if closely:
            for part in own:
                _check(joined, part, limit, wraps)
        parts[f"n{k}"] = [wrapped(p, limit) if wraps else _never_absent(p, limit) for p in own]
        seen[f"n{k}"] = own
    rows = _rows(template, seen, most) if closely else None
    return _groups(template, parts) if rows is None else _table(template, parts, rows, most)


def _never_absent(tensor: Tensor, limit: int) -> Tensor:
    """Once put together with others, -1 is an absent point: a negative index is made one that is
    out of range all the same.
    """
    return torch.where(tensor < 0, limit, tensor)


def _check(joined: Joined, tensor: Tensor, limit: int, wraps: bool) -> None:
    """An index tensor whose values are known has none out of range."""
    facts, low = known_now(tensor), -limit if wraps else 0
    if facts is None or not tensor.numel() or facts.low >= low and facts.high < limit:
        return
    bad = facts.low if facts.low < low else facts.high
    raise IndexRangeError(
        f"an index is {bad}, but it indexes a dimension of size {limit}",
        statement=joined.template,
        expected=f"values from {low} to {limit - 1}",
    )


def _rows(
    template: Statement, parts: Mapping[str, list[Tensor]], most: Mapping[str, set[int]]
) -> str | None:
    """The index tensor whose values can number the rows of a table: no value comes twice in a
    chain, and most of them come.
    """
    points, count = sum(map(len, next(iter(parts.values())))), len(next(iter(parts.values())))
    scattered = [i.atom.tensor for i in template.target.indices if isinstance(i.atom, Access)]
    for name in dict.fromkeys((*scattered, *parts)):
        limit = min(most[name])
        if (
            len(parts) < 2
            or len(most[name]) > 1
            or scattered
            and name not in scattered
            or count * limit > SPARSEST * points
        ):
            continue
        if all((f := known_now(p)) is not None and f.unique and f.low >= 0 for p in parts[name]):
            return name
    return None


def _table(
    template: Statement, parts: Mapping[str, list[Tensor]], rows: str, most: Mapping[str, set[int]]
) -> JoinedStatement:
    found: dict[str, Tensor] = {}
    for name, own in parts.items():
        if name != rows:
            dtype = torch.int32 if min(most[name]) < 2**31 else torch.int64
            table = found[name] = torch.full(
                (len(own), min(most[rows])), -1, dtype=dtype, device=own[0].device
            )
            for k, (at, values) in enumerate(zip(parts[rows], own)):
                table[k, at.long()] = values.to(dtype)
    return JoinedStatement(str(as_table(template, rows)), found)


def _groups(template: Statement, parts: Mapping[str, list[Tensor]]) -> JoinedStatement:
    own = next(iter(parts.values()))
    counts = [math.ceil(p.numel() / GROUP_SIZE) for p in own]
    found: dict[str, Tensor] = {}
    for name, every in parts.items():
        flat = found[name] = torch.full(
            (sum(counts) * GROUP_SIZE,), -1, dtype=torch.int64, device=own[0].device
        )
        start = 0
        for piece, count in zip(every, counts):
            flat[start : start + piece.numel()] = piece
            start += count * GROUP_SIZE
        found[name] = flat.view(-1, GROUP_SIZE)
    pieces, start = torch.empty(sum(counts), dtype=torch.int64, device=own[0].device), 0
    for k, count in enumerate(counts):
        pieces[start : start + count] = k
        start += count
    found["pieces"] = pieces
    return JoinedStatement(str(as_groups(template)), found)


# --- the op ---------------------------------------------------------------------------------------


def _fused_series(
    initial: Tensor | None, spec: str, tensors: list[Tensor], sizes: list[int]
) -> Tensor:
    joined = joined_of(spec)
    made = made_for(spec, tensors, sizes)
    values = {**dict(zip(joined.values, tensors)), **made.indices}
    request = Request(
        made.statement if initial is None else made.statement.replace(" = ", " += ", 1),
        (("out", tuple(sizes)),),
        made.padded,
    )
    prepared = prepare(request, values, initial)
    prepared.verify(values)
    return running.run(prepared, "new" if initial is None else "from", values, initial)


def _fused_series_fake(
    initial: Tensor | None, spec: str, tensors: list[Tensor], sizes: list[Any]
) -> Tensor:
    dtype = functools.reduce(
        torch.promote_types, (t.dtype for t in tensors[: len(joined_of(spec).values)])
    )
    return tensors[0].new_empty(sizes, dtype=dtype if initial is None else initial.dtype)


define(
    "fused_series(Tensor? initial, str spec, Tensor[] tensors, SymInt[] sizes) -> Tensor",
    _fused_series,
    _fused_series_fake,
)
