"""Finds chains in a graph: which roots are chains, what they read, and what is left and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from insum.fusion.later import Later, later_of
from insum.fusion.pointwise import SPELL
from insum.fusion.read import (
    CONTRACTIONS,
    Around,
    reaching,
)
from insum.fusion.roots import ROOTS, SCATTERS, Chain
from insum.fusion.shapes import (
    Stop,
    points,
    shape_of,
)
from insum.fusion.views import VIEWS

#: A message that somebody else needs, too, is computed anew in a scatter where all that it is
#: computed from has this many times fewer elements.
READ_ANEW = 4


@dataclass(frozen=True, slots=True)
class Chains:
    """What was found in a graph; ``left`` tells of each root that is no chain why it is none."""

    found: tuple[Chain, ...]
    left: tuple[tuple[Node, str], ...]


def find(graph: Graph, accept: Callable[[Chain], str]) -> Chains:
    """Every chain of a graph that ``accept`` has nothing to say against.

    What a chain reads through may still be needed by others. Then it is computed anyway and the
    chain takes it as it is; which may end another chain. So it is decided in rounds, until nothing
    changes: the set of kept nodes only grows.
    """
    kept: frozenset[Node] = frozenset()
    later = later_of(graph)
    while True:
        chains, left = _round(graph, kept, later, accept)
        more = (_needed(graph, chains, later) | _saved(chains, later)) - kept
        if not more:
            return Chains(
                tuple(reversed(chains.values())),
                tuple((n, _because(n, why, kept)) for n, why in left.items()),
            )
        kept |= more


def _round(
    graph: Graph,
    kept: frozenset[Node],
    later: Later,
    accept: Callable[[Chain], str],
) -> tuple[dict[Node, Chain], dict[Node, str]]:
    chains: dict[Node, Chain] = {}
    left: dict[Node, str] = {}
    inside: set[Node] = set()
    read: set[Node] = set()  # by a chain, as it is
    reaches = reaching(kept)
    for node in reversed(graph.nodes):
        if (
            node.op != "call_function"
            or node.target not in ROOTS
            or node in inside
            and node not in read
            and all(u in inside for u in node.users)
        ):
            continue
        if (
            not isinstance(node.meta.get("val"), torch.Tensor)
            or node.target not in SCATTERS
            and not any(map(reaches, node.all_input_nodes))
        ):
            continue
        try:
            backward = node in later.backward
            around = Around(kept, reaches, later.overwritten, backward, SCATTERS.keys())
            chain = ROOTS[node.target](node, around)
            why = accept(chain)
        except Stop as reason:
            why = str(reason)
        if why:
            left[node] = why
        else:
            chains[node] = chain
            inside.update(chain.inlined)
            read.update(chain.leaves)
    return chains, left


def _needed(graph: Graph, chains: dict[Node, Chain], later: Later) -> frozenset[Node]:
    """Nodes that chains read through although somebody else needs their value. Where that is the
    backward pass alone, and functions are in the chain, it may compute them again.
    """
    alive: set[Node] = set()
    todo = [n for n in graph.nodes if n.op == "output" or n.op == "call_function" and n.is_impure()]
    while todo:
        node = todo.pop()
        if node not in alive:
            alive.add(node)
            todo += chains[node].leaves if node in chains else node.all_input_nodes
    inside = {n for chain in chains.values() for n in chain.inlined} - chains.keys()
    again, by_others = _recomputed(chains, later), inside | _for_backward(graph, alive, later)
    return _summed_twice(chains) | frozenset(
        n
        for n in (inside & alive) - _cheaper_anew(chains)
        if n.target not in VIEWS and _used_outside(n, by_others if n in again else inside, alive)
    )


def _cheaper_anew(chains: dict[Node, Chain]) -> set[Node]:
    """What scatters had better compute from what it is gathered from, even where it is there:
    small tables are read in less time than a large message is.
    """
    cheap: set[Node] = set()
    dear: set[Node] = set()
    for root, chain in chains.items():
        anew = root.target in SCATTERS and CONTRACTIONS.keys().isdisjoint(
            n.target for n in chain.inlined
        )
        read = sum(points(shape_of(n)) for _, n in chain.tensors)
        for node in chain.inlined:
            is_cheap = anew and READ_ANEW * read <= points(shape_of(node))
            (cheap if is_cheap else dear).add(node)
    return cheap - dear


def _summed_twice(chains: dict[Node, Chain]) -> frozenset[Node]:
    """Sums that one chain reads through and another as they are: they are computed anyway."""
    read = {n for chain in chains.values() for n in chain.leaves}
    return frozenset(
        n
        for chain in chains.values()
        for n in chain.inlined
        if n.target in CONTRACTIONS and n is not chain.root and n in read
    )


def _for_backward(graph: Graph, alive: set[Node], later: Later) -> set[Node]:
    """Nodes of the backward pass, and those that nothing else reads."""
    found = set(later.backward)
    for node in reversed(graph.nodes):
        users = [u for u in node.users if u in alive]
        if users and all(u in found for u in users):
            found.add(node)
    return found


def _recomputed(chains: dict[Node, Chain], later: Later) -> set[Node]:
    """What forward chains with functions in them gather and compute point by point."""
    return {
        n
        for root, chain in chains.items()
        if root not in later.backward and any(n.target in SPELL for n in chain.inlined)
        for n in chain.inlined
        if n.target not in CONTRACTIONS
    }


def _saved(chains: dict[Node, Chain], later: Later) -> frozenset[Node]:
    """Nodes that chains of the backward pass read, and that have to be computed before it."""
    leaves = (n for root, one in chains.items() if root in later.backward for n in one.leaves)
    return later.computed.intersection(leaves)


def _used_outside(node: Node, inside: set[Node], alive: set[Node]) -> bool:
    """Whether somebody outside of the chains reads a node, or a view of it. Those below such a node
    are looked at in the next round.
    """
    users = [u for u in node.users if u in alive]
    return any(
        _used_outside(u, inside, alive) if u.target in VIEWS else u not in inside for u in users
    )


def _because(node: Node, why: str, kept: frozenset[Node]) -> str:
    below = [n for n in _below(node) if n in kept]
    if not below:
        return why
    users = sorted({u.name for n in below for u in n.users if u is not node})
    return (
        f"{why}; {', '.join(n.name for n in below)} is needed by {', '.join(users[:3])} too "
        "and kept"
    )


def _below(node: Node) -> list[Node]:
    found: dict[Node, None] = {}
    todo = list(node.all_input_nodes)
    while todo:
        one = todo.pop()
        if one not in found and len(found) < 16:
            found.setdefault(one)
            todo += one.all_input_nodes if one.target in VIEWS else []
    return list(found)
