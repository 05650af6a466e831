"""Chains of one form whose results are added up: the offsets of a convolution, the relations of a
graph, written as a loop.

Each reads its own index tensors and its own slice of one tensor, or writes its own slice of the
result. Together they are one statement, in which the number of the chain is one more variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from insum.fusion.joined import PIECE, POINT, Joined
from insum.fusion.roots import Chain
from insum.fusion.shapes import alike, is_one, is_zero, shape_of
from insum.lang.expr import Access, Affine, Expr, Statement, accesses, index_of, rewrite, variables

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class SeriesForm:
    """What chains have in common that can be one: a statement in which index tensors are numbered,
    and the tensors that it reads.

    Attributes:
        wraps: numbers of the index tensors in which a negative value counts from the end.
        slots: chains that belong together: the size of the dimension that each has its own slice
            of.
    """

    template: str
    values: tuple[tuple[str, Node], ...]
    wraps: frozenset[int]
    slots: int


@dataclass(frozen=True, slots=True, eq=False)
class SeriesPiece:
    """One chain of a series: its own slice, and its index tensors in the order of their numbers."""

    chain: Chain
    form: SeriesForm
    place: int


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """Pieces by the number of their slice; ``top`` is the node whose value they are, with ``rest``
    added, or added to ``initial``.

    Attributes:
        last: the one that comes last in the graph.
        shaped: has the shape of the result, and is there before the last chain is.
    """

    pieces: tuple[SeriesPiece, ...]
    top: Node
    initial: Node | None
    rest: tuple[Node, ...]
    between: tuple[Node, ...]  # nodes that nobody needs any more
    last: Chain
    shaped: Node

    def after(self, replaced: dict[Node, Node]) -> Series:
        """The same series, when nodes that it reads have been replaced."""
        pieces = tuple(
            replace(
                p,
                chain=p.chain.after(replaced),
                form=replace(
                    p.form, values=tuple((name, replaced.get(n, n)) for name, n in p.form.values)
                ),
            )
            for p in self.pieces
        )
        initial = None if self.initial is None else replaced.get(self.initial, self.initial)
        return replace(
            self, pieces=pieces, initial=initial, rest=tuple(replaced.get(n, n) for n in self.rest)
        )

    def joined(self) -> tuple[Joined, list[Node]]:
        """The op's specification, and the tensors that it takes."""
        form = self.pieces[0].form
        tensors = [node for _, node in form.values]
        bases = list(dict.fromkeys(t.base for piece in self.pieces for t in piece.chain.indices))
        place = {node: len(tensors) + k for k, node in enumerate(bases)}
        count = len(self.pieces[0].chain.indices)
        parts = tuple(
            tuple((place[p.chain.indices[n].base], p.chain.indices[n].selects) for p in self.pieces)
            for n in range(count)
        )
        names = tuple(name for name, _ in form.values)
        return Joined(form.template, names, parts, form.wraps), tensors + bases


def find(graph: Graph, chains: Sequence[Chain]) -> list[Series]:
    """All series among the chains of a graph, none of which has a chain in common with another."""
    roots = {chain.root: chain for chain in chains}
    taken: set[Node] = set()
    found: list[Series] = []
    for node in reversed(graph.nodes):
        if node in taken or node.op != "call_function":
            continue
        for series in _ending(node, roots):
            if not any(p.chain.root in taken for p in series.pieces):
                found.append(series)
                taken.update((series.top, *series.between, *(p.chain.root for p in series.pieces)))
    return found


def _ending(node: Node, roots: dict[Node, Chain]) -> Iterator[Series]:
    """The series whose value a node is."""
    if node in roots and roots[node].initial in roots:
        yield from _after_each_other(node, roots)
    elif node.target is aten.add.Tensor and not node.kwargs:
        yield from _added(node, roots)


def _after_each_other(last: Node, roots: dict[Node, Chain]) -> Iterator[Series]:
    """Chains each of which adds to the result of the one before."""
    every = [roots[last]]
    while (before := every[-1].initial) in roots and len(before.users) == 1:
        every.append(roots[before])
    pieces = [_piece(chain, None) for chain in every]
    whole = _complete(pieces)
    if whole is not None and len(whole) == len(pieces):
        first = every[-1]
        yield Series(
            whole,
            last,
            first.initial,
            (),
            tuple(c.root for c in every[1:]),
            every[0],
            first.zeros or first.initial or last,
        )


def _added(top: Node, roots: dict[Node, Chain]) -> Iterator[Series]:
    """Chains, or slices that they fill, whose results are added."""
    leaves, between = leaves_of(top)
    pieces = {leaf: _leaf_piece(leaf, roots) if alike(leaf, top) else None for leaf in leaves}
    for form in dict.fromkeys(p.form.template for p in pieces.values() if p is not None):
        own = {leaf: p for leaf, p in pieces.items() if p is not None and p.form.template == form}
        whole = _complete(list(own.values()))
        if (
            whole is not None
            and len(whole) == len(own)
            and sum(leaf in own for leaf in leaves) == len(own)
        ):
            rest = tuple(leaf for leaf in leaves if leaf not in own)
            order = {node: k for k, node in enumerate(top.graph.nodes)}
            last = max((p.chain for p in whole), key=lambda chain: order[chain.root])
            first = min(own, key=lambda leaf: order[leaf])
            yield Series(whole, top, None, rest, (*between, *own), last, _zeros(first, roots))
            return


def leaves_of(top: Node) -> tuple[list[Node], list[Node]]:
    """What a tree of sums adds, and the sums in it, but for the topmost. All of those have the same
    shape: what is broadcast is a leaf, whatever it is.
    """
    leaves, between, todo = [], [], [top]
    while todo:
        node = todo.pop()
        inner = (
            node is top
            or node.target is aten.add.Tensor
            and not node.kwargs
            and len(node.users) == 1
            and alike(node, top)
        )
        if inner and all(isinstance(a, Node) for a in node.args):
            between.append(node)
            todo += node.args  # type: ignore[arg-type]
        else:
            leaves.append(node)
    return leaves, [node for node in between if node is not top]


def _leaf_piece(leaf: Node, roots: dict[Node, Chain]) -> SeriesPiece | None:
    if len(leaf.users) != 1:
        return None
    if leaf in roots:
        return _piece(roots[leaf], None) if roots[leaf].initial is None else None
    if leaf.target is not aten.select_scatter.default:
        return None
    base, value, dim, place = leaf.args
    if (
        not isinstance(base, Node)
        or not is_zero(base)
        or value not in roots
        or roots[value].initial is not None  # type: ignore[index]
        or len(value.users) != 1  # type: ignore[union-attr]
    ):
        return None
    if not isinstance(dim, int) or not isinstance(place, int):
        return None
    rank, size = len(shape_of(leaf)), shape_of(leaf)[dim]
    return _piece(roots[value], (dim % rank, place % size)) if isinstance(size, int) else None  # type: ignore[index]


def _zeros(leaf: Node, roots: dict[Node, Chain]) -> Node:
    """What a leaf adds to: zeros of the shape of the result."""
    if leaf in roots:
        return roots[leaf].zeros or leaf
    base = leaf.args[0]
    assert isinstance(base, Node)
    return base


def _complete(pieces: Sequence[SeriesPiece | None]) -> tuple[SeriesPiece, ...] | None:
    """The pieces by their places, where they are of one form and each slice has one."""
    known = [p for p in pieces if p is not None]
    if len(known) < 2 or len(known) != len(pieces):
        return None
    form = known[0].form
    if any(p.form != form for p in known) or form.slots != len(known):
        return None
    ordered = tuple(sorted(known, key=lambda p: p.place))
    return ordered if [p.place for p in ordered] == list(range(form.slots)) else None


def _piece(chain: Chain, written: tuple[int, int] | None) -> SeriesPiece | None:
    """A chain as a piece: with its own slice of one of the tensors that it reads, or, ``written``,
    of the result (dimension and place).
    """
    if (
        chain.statement.operator != "="
        or chain.dims != tuple(range(len(shape_of(chain.root))))
        or any(t.base.op != "placeholder" for t in chain.indices)
    ):
        return None
    if not _has_points(chain) or any(
        re.fullmatch(r"n\d+|pieces", name) for name, _ in chain.tensors
    ):
        return None
    numbers = {t.name: f"n{k}" for k, t in enumerate(chain.indices)}
    values = dict(chain.tensors)
    places: list[tuple[int, Any]] = []

    def change(access: Access) -> Expr:
        if access.tensor in numbers:
            return Access(numbers[access.tensor], (index_of(POINT),))
        return Access(
            access.tensor, tuple(index(access, d, i) for d, i in enumerate(access.indices))
        )

    def numbered(old: Affine) -> Affine:
        return Affine(
            tuple((c, change(a) if isinstance(a, Access) else a) for c, a in old.terms),  # type: ignore[misc]
            old.offset,
        )

    def index(access: Access, dim: int, old: Affine) -> Affine:
        size = shape_of(values[access.tensor])[dim]
        if not old.terms and not is_one(size):
            places.append((old.offset, size))
            return index_of(PIECE)
        return numbered(old)

    value = rewrite(chain.statement.value, change)
    target = chain.statement.target
    at = [numbered(i) for i in target.indices]
    if written is not None:
        at.insert(written[0], index_of(PIECE))
        places.append((written[1], shape_of(next(iter(chain.root.users)))[written[0]]))
    if (
        len(places) != 1
        or not isinstance(places[0][1], int)
        or any(not i.terms for i in target.indices)
    ):
        return None
    text = str(Statement(Access(target.tensor, tuple(at)), "=", value))
    wraps = frozenset(n for n, t in enumerate(chain.indices) if t.name in chain.wrapped)
    return SeriesPiece(chain, SeriesForm(text, chain.tensors, wraps, places[0][1]), places[0][0])


def template_of(chain: Chain) -> str | None:
    """What chains of one form have in common: the statement, with tensors numbered; None where its
    index tensors are not read at one variable alone.
    """
    if not _has_points(chain):
        return None
    names = {t.name: f"n{k}" for k, t in enumerate(chain.indices)} | {
        name: f"t{k}" for k, (name, _) in enumerate(chain.tensors)
    }

    def change(access: Access) -> Expr:
        return Access(
            names.get(access.tensor, access.tensor), tuple(index(i) for i in access.indices)
        )

    def index(old: Affine) -> Affine:
        return Affine(
            tuple((c, change(a) if isinstance(a, Access) else a) for c, a in old.terms),  # type: ignore[misc]
            old.offset,
        )

    target = change(chain.statement.target)
    assert isinstance(target, Access)
    return str(Statement(target, chain.statement.operator, rewrite(chain.statement.value, change)))


def _has_points(chain: Chain) -> bool:
    """Whether all index tensors are read at the same one variable, which nothing else is read at,
    and are indices by themselves.
    """
    names = {t.name for t in chain.indices}
    every = [chain.statement.target, *accesses(chain.statement.value, nested=False)]
    indices = [i for access in every for i in access.indices]
    inside = [i.atom for i in indices if any(accesses(i))]
    if not inside or not all(
        isinstance(a, Access) and a.tensor in names and len(a.indices) == 1 and a.indices[0].var
        for a in inside
    ):
        return False
    over = {a.indices[0].var for a in inside if isinstance(a, Access)}
    plain = {v for i in indices if not any(accesses(i)) for v in variables(i)}
    return len(over) == 1 and not over & plain and not {POINT, PIECE} & plain
