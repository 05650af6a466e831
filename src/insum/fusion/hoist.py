"""What a graph need not do at each call: compute functions of integer tensors alone, and count out
masks that nobody reads any more.

Fused statements compute such tensors themselves, and once. Here others get them from
``insum::computed``; then the masks, the degrees and the assertions about their sizes are gone, and
with them the waiting for the device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from insum.compat.sizes import known_true, symbols_from_data
from insum.fusion import computed
from insum.fusion.later import later_of
from insum.fusion.origin import SUMS, Origin, has_known_shape, origin_of, pure_nodes, waits
from insum.fusion.report import Once
from insum.fusion.roots import Chain
from insum.fusion.shapes import alike, is_contiguous, points, same, shape_of
from insum.fusion.views import VIEWS
from insum.lang.bind import Size

aten = torch.ops.aten
COMPUTED = computed.OP
#: Entries that are added up below which a copy of the result takes as long as adding them up again.
WORTH_A_COPY = 2**22


def sweep(
    graph: Graph, nodes: Iterable[Node], stays: Callable[[Node], bool] = lambda node: False
) -> None:
    """Remove those of the nodes that nobody reads any more, and what only they read."""
    erased: set[Node] = set()
    order = {node: k for k, node in enumerate(graph.nodes)}
    for node in sorted((n for n in dict.fromkeys(nodes) if n in order), key=lambda n: -order[n]):
        stack = [node]
        while stack:
            one = stack.pop()
            if (
                one in erased
                or one.users
                or one.op != "call_function"
                or one.is_impure()
                or stays(one)
            ):
                continue
            below = one.all_input_nodes
            graph.erase_node(one)
            erased.add(one)
            stack += below


# --- what is alive --------------------------------------------------------------------------------


def still_waited_for(graph: Graph, chains: Sequence[Chain]) -> frozenset[Node]:
    """Index tensors that are counted out at each call although the chains that read them could do
    without: somebody else reads them.
    """
    bases = {base for chain in chains for base in chain.origins() if not has_known_shape(base)}
    return (
        frozenset(bases & _alive(graph, {chain.root: chain for chain in chains}))
        if bases
        else frozenset()
    )


def _alive(graph: Graph, chains: dict[Node, Chain]) -> set[Node]:
    """Nodes that are needed when chains compute what they can themselves, `hoist` has done its
    work, and nobody asks for what is certain.
    """
    known = _KnownOrigins(graph)
    alive: set[Node] = set()
    certain = {n: source for n in graph.nodes if (source := _certain(n)) is not None}
    todo = [
        n
        for n in graph.nodes
        if n.op == "output" or n.op == "call_function" and n.is_impure() and n not in certain
    ]
    while todo:
        while todo:
            node = todo.pop()
            if node in alive:
                continue
            alive.add(node)
            if node in chains:
                own = chains[node].origins()
                todo += [n for n in chains[node].leaves if n not in own] + _sized_by(chains[node])
            elif not known.is_worth_it(node):
                todo += node.all_input_nodes
        # A size that other tensors have too: where it is asked for, its symbol gets its value.
        symbols = {
            symbol
            for node in alive
            if isinstance(value := node.meta.get("val"), Tensor)
            for symbol in symbols_from_data(value)
        }
        todo = [
            n
            for n, source in certain.items()
            if n not in alive
            and (source in alive or symbols & symbols_from_data(source.meta["val"]))
        ]
    return alive


def _sized_by(chain: Chain) -> list[Node]:
    """Nodes that a chain which scatters nothing asks for the shape of its result."""
    if chain.zeros is not None or chain.initial is not None:
        return [n for n in (chain.zeros, chain.initial) if n is not None]
    return [
        node for node, dim in chain.extents.values() if not isinstance(shape_of(node)[dim], int)
    ]


def _certain(node: Node) -> Node | None:
    """Of an assertion that cannot fail the tensor whose size it asks for; None for others."""
    if node.target is not aten._assert_scalar.default or not isinstance(node.args[0], Node):
        return None
    condition = node.args[0]
    if condition.target not in (operator.ge, operator.le):
        return None
    size, limit = condition.args
    if not isinstance(size, Node) or size.target is not aten.sym_size.int:
        return None
    source = size.args[0]
    assert isinstance(source, Node)
    bound: Any = limit.meta.get("val") if isinstance(limit, Node) else limit
    if condition.target is operator.ge:
        return source if isinstance(bound, int) and bound <= 0 else None
    most = _most(source, size.args[1])
    return source if most is not None and known_true(bound >= most) else None


def _most(node: Node, dim: Any) -> Size | None:
    """The most entries that a mask lets through."""
    if not waits(node):
        return None
    mask = node.args[0]
    if node.target is aten.index.Tensor:
        positions = [d for d, t in enumerate(node.args[1]) if t is not None]  # type: ignore[arg-type]
        mask = node.args[1][positions[0]]  # type: ignore[index]
        if positions != [dim] or len(shape_of(mask)) != 1:  # type: ignore[arg-type]
            return None
    elif node.target is aten.nonzero.default and dim != 0:
        return None
    total: Size = 1
    for size in shape_of(mask):  # type: ignore[arg-type]
        total = total * size
    return total


# --- functions of integer tensors alone -----------------------------------------------------------


class _KnownOrigins:
    """Origins of nodes, each looked for once. What is written to is none: the backward pass would
    find something else there.
    """

    def __init__(self, graph: Graph) -> None:
        self.origins: dict[Node, Origin | None] = {}
        self.pure, self.overwritten = pure_nodes(graph), later_of(graph).overwritten
        self.symbols = [
            n
            for n in graph.nodes
            if n.op == "placeholder" and isinstance(n.meta.get("val"), SymInt)
        ]

    def origin(self, node: Node) -> Origin | None:
        if node not in self.origins:
            computes = (
                node.op == "call_function"
                and node in self.pure
                and isinstance(node.meta.get("val"), Tensor)
            )
            origin = origin_of(node, sums=True) if computes else None
            gone = origin is not None and not self.overwritten.isdisjoint(origin.sources)
            self.origins[node] = None if gone else origin
        return self.origins[node]

    def is_worth_it(self, node: Node) -> bool:
        """Whether a tensor had better be copied than computed."""
        origin = self.origin(node)
        if (
            origin is None
            or not origin.costly
            or not has_known_shape(node)
            or not is_contiguous(node.meta["val"])
        ):
            return False
        return all(self.size(s) is not None for s in shape_of(node)) and _takes_long(node)

    def size(self, size: Size) -> int | Node | None:
        """A size as a number, or as the node that is passed for it."""
        return (
            size
            if isinstance(size, int)
            else next((n for n in self.symbols if same(n.meta["val"], size)), None)
        )


def _takes_long(node: Node) -> bool:
    below: set[Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one not in below:
            below.add(one)
            todo += one.all_input_nodes
    summed = [
        points(shape_of(n)) for one in below if one.target in SUMS for n in one.all_input_nodes[1:]
    ]
    return any(map(waits, below)) or max(summed, default=0) >= WORTH_A_COPY


def hoist(graph: Graph) -> tuple[Once, ...]:
    """Take out of a graph what depends on integer tensors alone, and then what nobody reads any
    more.
    """
    known = _KnownOrigins(graph)
    chosen = [
        node
        for node in graph.nodes
        if known.is_worth_it(node) and node.target not in VIEWS and _is_read(node, known)
    ]
    groups = [
        (group, origin)
        for group in _groups(chosen)
        if (origin := origin_of(*group, sums=True)) is not None
    ]
    found = [_replace(graph, group, origin, known) for group, origin in groups]
    sweep(graph, chosen)
    alive = _alive(graph, {})
    for node in [n for n in graph.nodes if n not in alive and _certain(n) is not None]:
        inputs = node.all_input_nodes
        graph.erase_node(node)
        sweep(graph, inputs)
    return tuple(found)


def _is_read(node: Node, known: _KnownOrigins) -> bool:
    """Whether somebody reads a node, or a view of it, who depends on more than integer tensors."""
    return any(
        _is_read(u, known) if u.target in VIEWS else known.origin(u) is None and _reads_values(u)
        for u in node.users
    )


def _reads_values(node: Node) -> bool:
    """Whether a node asks for more than sizes."""
    return node.op == "output" or isinstance(node.meta.get("val"), Tensor | list | tuple)


def _groups(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes of one shape and of the same sources together, as far as a program may be long: one
    call gives all of them.
    """
    groups: list[list[Node]] = []
    for node in nodes:
        for group in groups:
            if alike(group[0], node) and (one := origin_of(*group, node, sums=True)) is not None:
                first = origin_of(*group, sums=True)
                if first is not None and set(one.sources) == set(first.sources):
                    group.append(node)
                    break
        else:
            groups.append([node])
    return groups


def _replace(graph: Graph, nodes: list[Node], origin: Origin, known: _KnownOrigins) -> Once:
    value = nodes[0].meta["val"]
    count = [len(nodes)] if len(nodes) > 1 else []
    shape = [*count, *(known.size(s) for s in shape_of(nodes[0]))]
    arguments = (
        origin.program,
        list(origin.sources),
        str(value.dtype).removeprefix("torch."),
        shape,
        list(origin.sizes),
    )
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        every = graph.call_function(COMPUTED, arguments)
        every.meta = {**nodes[0].meta, "val": value.new_empty([*count, *value.shape])}
        for k, node in enumerate(nodes):
            one = graph.call_function(aten.select.int, (every, 0, k)) if count else every
            one.meta = dict(node.meta) if count else one.meta
            node.replace_all_uses_with(one)
    return Once(tuple(node.name for node in nodes), tuple(s.name for s in origin.sources))
