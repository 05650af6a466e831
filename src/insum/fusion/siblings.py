"""A loop over relations as one more dimension: chains that differ in their edges alone, and what is
done to each of their results.

``sum_r (mean over the edges of r of x) @ W[r]`` has a chain, a division and a product for each
relation. Where all edges come from masks of the same tensors, they are one chain, over the edges of
all relations, with rows ``node * relations + relation``; its result, nodes by relations by
channels, is divided at once, and one product sums over relations and channels. The gradients, sums
of the same form, follow. A row beyond the end, or counted from the end, stays one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from insum.fusion.hoist import sweep
from insum.fusion.origin import origin_of
from insum.fusion.read import IndexTensor
from insum.fusion.roots import Chain
from insum.fusion.series import leaves_of, template_of
from insum.fusion.shapes import Stop, alike, is_zero, points, same, shape_of, value_of
from insum.lang.expr import Access, accesses

aten = torch.ops.aten
_POINTWISE = {aten.div.Tensor, aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor}
#: Elements that the results of all chains may have together: they are there at the same time.
MOST_ELEMENTS = 2**28
_MOST = 64


class Cannot(Exception):
    """Nodes that are not siblings after all."""


class Siblings:
    """Puts together what can be in one graph. Everything new stands right before the sum that it is
    for.
    """

    def __init__(
        self, graph: Graph, chains: Sequence[Chain], emit: Callable[[Chain], Node]
    ) -> None:
        self.graph, self.emit = graph, emit
        self.chains = {chain.root: chain for chain in chains}
        self.stacked: dict[tuple[Node, ...], Node] = {}
        self.new: set[Node] = set()
        self.emitted: set[Node] = set()
        self.found: list[tuple[Chain, ...]] = []
        self.replaced: dict[Node, Node] = {}
        self.mode: Any = next(
            (m for c in chains if (m := getattr(value_of(c.root), "fake_mode", None)) is not None),
            contextlib.nullcontext(),
        )

    def run(self) -> None:
        for top in [
            n
            for n in self.graph.nodes
            if n.op == "call_function" and n.target is aten.add.Tensor and not n.kwargs
        ]:
            if not any(u.target is aten.add.Tensor and not u.kwargs for u in top.users):
                self.sum(top)

    def sum(self, top: Node) -> None:
        """Replace siblings among what a tree of sums adds by one term each."""
        leaves, between = leaves_of(top)
        values = [n.meta.get("val") for n in (top, *leaves)]
        if len({v.dtype if isinstance(v, Tensor) else None for v in values}) > 1:
            return
        changed = False
        for group in _groups([leaf for leaf in leaves if alike(leaf, top)], self.kind):
            term = self.tried(top, group)
            if term is None:
                continue
            leaves = [leaf for leaf in leaves if leaf not in group] + [term]
            changed = True
        if changed:
            with self.graph.inserting_before(top):
                total = leaves[0]
                for leaf in leaves[1:]:
                    total = self.made(aten.add.Tensor, total, leaf)
            total.meta = {**top.meta, **total.meta}
            top.replace_all_uses_with(total)
            self.replaced[top] = total  # which later chains may read
            sweep(self.graph, [top, *between])

    def tried(self, top: Node, group: list[Node]) -> Node | None:
        """One term for siblings, in whatever order they are added; None where they are none, and
        nothing new stays.
        """
        known, stacked, count = set(self.graph.nodes), dict(self.stacked), len(self.found)
        for ordered in (group, group[::-1]):
            try:
                with self.graph.inserting_before(top):
                    return self.rests_on_chains(self.term(ordered))
            except (Cannot, Stop):
                self.stacked = dict(stacked)
                del self.found[count:]
                sweep(self.graph, [n for n in self.graph.nodes if n not in known])
        return None

    def rests_on_chains(self, term: Node) -> Node:
        """The term, which has to be made of chains: products of dense tensors alone are left."""
        todo = [term]
        while todo:
            node = todo.pop()
            if node in self.emitted:
                return term
            todo += node.all_input_nodes if node in self.new else []
        raise Cannot

    # --- terms of a sum ---

    def kind(self, leaf: Node) -> tuple[Any, ...] | None:
        """Leaves of one kind may be siblings."""
        if leaf in self.chains:
            template = template_of(self.chains[leaf])
            return None if template is None else ("chain", template)
        if leaf.target is aten.mm.default and _slice(leaf.args[1]) is not None:
            return "product", _slice(leaf.args[1])[0]  # type: ignore[index]
        if (
            leaf.target is aten.select_scatter.default
            and is_zero(leaf.args[0])  # type: ignore[arg-type]
            and _is_product(leaf.args[1])
        ):
            return "slice", leaf.args[1].args[1]  # type: ignore[union-attr]
        return None

    def term(self, group: list[Node]) -> Node:
        if group[0] in self.chains:
            return self.chained(group)
        return self.product(group) if group[0].target is aten.mm.default else self.slices(group)

    def product(self, group: list[Node]) -> Node:
        """``sum_r A[r] @ W[r]``"""
        weight, ordered = _ordered(group, lambda leaf: _slice(leaf.args[1]))
        wide = self.wide([leaf.args[0] for leaf in ordered])
        return self.made(aten.mm.default, wide, self.flat(weight, 2))

    def slices(self, group: list[Node]) -> Node:
        """Slices ``A[r].T @ G`` of a gradient, each in its place."""
        size = shape_of(group[0])[0]
        if (
            any(leaf.args[2] != 0 for leaf in group)
            or size != len(group)
            or {leaf.args[3] for leaf in group} != {*range(len(group))}
        ):
            raise Cannot
        ordered = sorted(group, key=lambda leaf: leaf.args[3])  # type: ignore[arg-type, return-value]
        products = [leaf.args[1] for leaf in ordered]
        wide = self.wide([_transposed(p.args[0]) for p in products])  # type: ignore[union-attr]
        turned = self.made(aten.permute.default, wide, [1, 0])
        return self.made(
            aten.view.default,
            self.made(aten.mm.default, turned, products[0].args[1]),  # type: ignore[union-attr]
            list(shape_of(group[0])),
        )

    def chained(self, group: list[Node]) -> Node:
        """Chains that gather each from its own tensor and add to the same result: gathered from all
        of those at once.
        """
        chains = [self.chains[leaf].after(self.replaced) for leaf in group]
        own = [
            name
            for k, (name, node) in enumerate(chains[0].tensors)
            if any(c.tensors[k][1] is not node for c in chains)
        ]
        if len(own) != 1:
            raise Cannot
        place = [name for name, _ in chains[0].tensors].index(own[0])
        reads = [a for a in _accesses(chains[0]) if a.tensor == own[0]]
        index = reads[0].indices[0].atom if len(reads) == 1 and reads[0].indices else None
        if not isinstance(index, Access):
            raise Cannot
        stacked = self.stack([c.tensors[place][1] for c in chains])
        rows = self.made(
            aten.view.default, stacked, [shape_of(stacked)[0] * len(group), *shape_of(stacked)[2:]]
        )
        tensors = tuple(
            (name, rows if name == own[0] else node) for name, node in chains[0].tensors
        )
        return self.chain(chains, index.tensor, tensors, chains[0].zeros)

    # --- results of siblings, put together ---

    def wide(self, nodes: Sequence[Any]) -> Node:
        """Matrices beside each other."""
        return self.flat(self.stack(nodes), 1)

    def flat(self, node: Node, end: int) -> Node:
        """Two dimensions as one: the first two (``end`` 2), or the two after the first."""
        shape = shape_of(node)
        if (
            len(shape) != 3
            or not isinstance(shape[1], int)
            or not isinstance(shape[2], int)
            or end == 2
            and not isinstance(shape[0], int)
        ):
            raise Cannot
        return self.made(
            aten.view.default,
            node,
            [shape[0] * shape[1], shape[2]] if end == 2 else [shape[0], shape[1] * shape[2]],
        )

    def stack(self, nodes: Sequence[Any]) -> Node:
        """One tensor for all: ``[n, r, ...]`` of tensors ``[n, ...]``."""
        key = tuple(nodes)
        if not all(isinstance(n, Node) and n.op == "call_function" for n in key):
            raise Cannot
        if key not in self.stacked:
            self.stacked[key] = self._stack(key)
        return self.stacked[key]

    def _stack(self, nodes: tuple[Node, ...]) -> Node:
        first = nodes[0]
        if (
            len({n.target for n in nodes}) != 1
            or not alike(*nodes)
            or points(shape_of(first)) * len(nodes) > MOST_ELEMENTS
        ):
            raise Cannot
        if all(n in self.chains for n in nodes):
            return self.scattered([self.chains[n].after(self.replaced) for n in nodes])
        if (
            len(shape_of(first)) == 1
            and (origin := origin_of(*nodes, sums=True)) is not None
            and origin.costly
        ):
            return self.made(aten.stack.default, list(nodes), 1)
        if first.target in _POINTWISE and not any(n.kwargs for n in nodes):
            new = self.made(
                first.target, *(self.operand([n.args[k] for n in nodes]) for k in range(2))
            )
            # else it is the same for all
            whole = len(shape_of(new)) == 3 and same(shape_of(new)[1], len(nodes))
            return new if whole else _no()
        if first.target in (aten.view.default, aten.expand.default, aten.unsqueeze.default):
            return self.viewed(nodes)
        if first.target is aten.mm.default:
            return self.multiplied(nodes)
        raise Cannot

    def operand(self, nodes: list[Any]) -> Any:
        if all(n is nodes[0] or not isinstance(n, Node) and n == nodes[0] for n in nodes):
            if isinstance(nodes[0], Node) and shape_of(nodes[0]):
                return (
                    self.made(aten.unsqueeze.default, nodes[0], 1)
                    if len(shape_of(nodes[0])) == 2
                    else _no()
                )
            return nodes[0]
        return (
            self.stack(nodes)
            if all(isinstance(n, Node) and len(shape_of(n)) == 2 for n in nodes)
            else _no()
        )

    def viewed(self, nodes: tuple[Node, ...]) -> Node:
        """A view that leaves rows alone, of all at once."""
        sources = [n.args[0] for n in nodes]
        if not all(
            isinstance(s, Node) and shape_of(s) and same(shape_of(s)[0], shape_of(n)[0])
            for s, n in zip(sources, nodes, strict=True)
        ):
            raise Cannot
        shape = shape_of(nodes[0])
        if len(shape) != 2 or not isinstance(shape[1], int):
            raise Cannot
        target = aten.view.default
        if nodes[0].target is aten.expand.default:
            target = aten.expand.default
            if any(len(shape_of(s)) != 2 for s in sources):  # type: ignore[arg-type]
                raise Cannot  # rows that are made by expanding
        return self.made(target, self.stack(sources), [shape[0], len(nodes), shape[1]])

    def multiplied(self, nodes: tuple[Node, ...]) -> Node:
        """``G @ W[r].T``, all of them beside each other."""
        left = nodes[0].args[0]
        if any(n.args[0] is not left for n in nodes):
            raise Cannot
        weight, ordered = _ordered(
            list(nodes), lambda n: _slice(_transposed(n.args[1], otherwise=n))
        )
        if tuple(ordered) != nodes:
            raise Cannot
        turned = self.made(aten.permute.default, self.flat(weight, 2), [1, 0])
        return self.made(
            aten.view.default,
            self.made(aten.mm.default, left, turned),
            [shape_of(nodes[0])[0], len(nodes), shape_of(nodes[0])[1]],
        )

    def scattered(self, chains: list[Chain]) -> Node:
        """Chains that gather from the same tensors and add each to its own result."""
        first = chains[0]
        if any([n for _, n in c.tensors] != [n for _, n in first.tensors] for c in chains):
            raise Cannot
        places = first.statement.target.indices
        target = places[0].atom if places else None
        if not isinstance(target, Access) or first.zeros is None:
            raise Cannot
        shape = shape_of(first.root)
        count = len(chains)
        zeros = self.made(
            aten.full.default,
            [shape[0] * count, *shape[1:]],
            0,
            dtype=value_of(first.root).dtype,
            device=value_of(first.root).device,
        )
        return self.made(
            aten.view.default,
            self.chain(chains, target.tensor, first.tensors, zeros),
            [shape[0], count, *shape[1:]],
        )

    def chain(
        self,
        chains: list[Chain],
        numbered: str,
        tensors: tuple[tuple[str, Node], ...],
        zeros: Node | None,
    ) -> Node:
        """One chain over the points of all; the index tensor ``numbered`` of each leads to its own
        rows.
        """
        first = chains[0]
        count = len(chains)
        plain = all(
            c.initial is None
            and c.dims == tuple(range(len(shape_of(c.root))))
            and c.statement.operator == "="
            for c in chains
        )
        if (
            not plain
            or zeros is None
            or len({_form(c) for c in chains}) != 1
            or _form(first) is None
            or any(c.zeros is None for c in chains)
            or _reads(first).count(numbered) != 1
        ):
            raise Cannot
        names = [t.name for t in first.indices]
        indices = []
        for k, name in enumerate(names):
            parts = [self.part(c.indices[k]) for c in chains]
            if name == numbered:
                parts = [self.numbered(part, r, count) for r, part in enumerate(parts)]
            every = self.made(aten.cat.default, parts)
            limit = first.indices[k].limit
            indices.append(
                IndexTensor(name, every, (), limit * count if name == numbered else limit)
            )
            origin = origin_of(every)
            if origin is None or any(not c.overwritten.isdisjoint(origin.sources) for c in chains):
                raise Cannot
        extents = {
            v: self.place(v, place, first, indices[0].base, zeros)
            for v, place in first.extents.items()
        }
        merged = replace(
            first, root=zeros, zeros=zeros, tensors=tensors, indices=tuple(indices), extents=extents
        )
        self.found.append(tuple(chains))
        new = self.emit(merged)
        self.emitted.add(new)
        return new

    def numbered(self, part: Node, number: int, count: int) -> Node:
        """Rows as rows of all chains together, of which there may be more than a narrow dtype can
        tell.
        """
        if value_of(part).dtype != torch.int64:
            part = self.made(aten._to_copy.default, part, dtype=torch.int64)
        return self.made(aten.add.Tensor, self.made(aten.mul.Tensor, part, count), number)

    def place(
        self, variable: str, place: tuple[Node, int], chain: Chain, every: Node, zeros: Node
    ) -> tuple[Node, int]:
        """A node and a dimension that a variable ranges over, none that is about to go. ``every``:
        an index tensor over all points.
        """
        if variable == _point(chain):
            return every, 0
        dim = next(
            (d for d, i in enumerate(chain.statement.target.indices) if i.var == variable), None
        )
        return place if dim is None else (zeros, dim)

    def part(self, index: IndexTensor) -> Node:
        """An index tensor as a node of one dimension."""
        node = index.base
        if index.base.op == "placeholder" or origin_of(index.base) is None:
            raise Cannot
        for dim, place in reversed(index.selects):
            node = self.made(aten.select.int, node, dim, place)
        return node if len(shape_of(node)) == 1 else _no()

    def made(self, target: Any, *arguments: Any, **more: Any) -> Node:
        """A node, with the value that tracing would have left at it. Sizes have to be numbers."""
        if any(
            isinstance(s, torch.SymInt)
            for a in arguments
            for s in (a if isinstance(a, list) else [a])
        ):
            raise Cannot
        with self.mode:
            value = target(*[_value(a) for a in arguments], **more)
        node = self.graph.call_function(target, tuple(arguments), more)
        node.meta["val"] = value
        self.new.add(node)
        return node


def _no() -> Any:
    raise Cannot


def _value(argument: Any) -> Any:
    match argument:
        case Node():
            return argument.meta["val"]
        case list() | tuple():
            return [_value(a) for a in argument]
    return argument


def _groups(
    leaves: Iterable[Node], kind: Callable[[Node], tuple[Any, ...] | None]
) -> list[list[Node]]:
    """Groups of leaves of one kind, two at least, none of which somebody else reads."""
    groups: dict[Any, list[Node]] = {}
    for leaf in leaves:
        if isinstance(leaf, Node) and len(leaf.users) == 1 and (found := kind(leaf)) is not None:
            groups.setdefault(found, []).append(leaf)
    return [
        group
        for group in groups.values()
        if 2 <= len(group) <= _MOST and len(set(group)) == len(group)
    ]


def _slice(node: Any) -> tuple[Node, int] | None:
    """Of ``W[r]`` the tensor and the number."""
    if (
        not isinstance(node, Node)
        or node.target is not aten.select.int
        or node.args[1] != 0
        or not isinstance(node.args[2], int)
    ):
        return None
    source = node.args[0]
    size = shape_of(source)[0]  # type: ignore[arg-type]
    return (source, node.args[2] % size) if isinstance(size, int) else None  # type: ignore[return-value]


def _ordered(
    nodes: list[Node], slice_of: Callable[[Node], tuple[Node, int] | None]
) -> tuple[Node, list[Node]]:
    """The tensor of which each node has its own slice, all of them, and the nodes in that order."""
    found = [slice_of(n) for n in nodes]
    if any(f is None for f in found):
        raise Cannot
    sources, places = {f[0] for f in found if f}, [f[1] for f in found if f]
    (source, *others) = sources
    if others or sorted(places) != list(range(len(nodes))) or shape_of(source)[0] != len(nodes):
        raise Cannot
    return source, [
        node for _, node in sorted(zip(places, nodes, strict=True), key=lambda pair: pair[0])
    ]


def _is_product(node: Any) -> bool:
    return isinstance(node, Node) and node.target is aten.mm.default and len(node.users) == 1


def _transposed(node: Any, otherwise: Any = None) -> Any:
    """Of ``A.T`` the matrix; else ``otherwise``."""
    if (
        isinstance(node, Node)
        and node.target is aten.permute.default
        and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    ):
        return node.args[0]
    return otherwise


def _accesses(chain: Chain) -> list[Access]:
    return list(accesses(chain.statement.value, nested=False))


def _form(chain: Chain) -> tuple[str, tuple[bool, ...]] | None:
    """What siblings have in common: the statement, and where negative indices count from the
    end.
    """
    template = template_of(chain)
    wraps = tuple(t.name in chain.wrapped for t in chain.indices)
    return None if template is None else (template, wraps)


def _reads(chain: Chain) -> list[str]:
    """The index tensors that a statement reads, as often as it does."""
    every = (chain.statement.target, *_accesses(chain))
    return [i.atom.tensor for one in every for i in one.indices if isinstance(i.atom, Access)]


def _point(chain: Chain) -> str | None:
    """The variable that all index tensors are read at."""
    inner = [
        i.atom
        for access in (chain.statement.target, *_accesses(chain))
        for i in access.indices
        if isinstance(i.atom, Access)
    ]
    return inner[0].indices[0].var if inner else None
