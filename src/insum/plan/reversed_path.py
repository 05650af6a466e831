"""The order of contraction of gradients: that of the product itself, seen from another factor.

A path is a tree with factors as leaves and the result at its root. The gradient by one of them is
the product of all others with the gradient that arrives, and the same tree with that factor as its
root is an order for it. Along its edges lie buffers of the product itself, and what comes back past
them: the gradients by all factors need each of these once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from insum.plan.order import Path

#: A factor, by its text; a buffer of the product, by number; what comes back to one, by its own.
_Node: TypeAlias = "str | int | tuple[int]"
#: What a step takes, and what it makes of it.
_Taking: TypeAlias = tuple[Sequence[_Node], _Node]


def reversed_path(path: Path, factors: Sequence[str], others: Sequence[str]) -> Path | None:
    """The path of a gradient, whose factors are the ``others``; None where these are not all but
    one of the ``factors`` of the product, and the gradient that arrives.

    >>> reversed_path(((0, 2), (0, 1)), ["x", "W", "z"], ["dy", "W", "z"])
    ((0, 1), (0, 1))
    >>> reversed_path(((0, 2), (0, 1)), ["x", "W", "z"], ["dy", "x", "z"])
    ((1, 2), (0, 1))
    >>> reversed_path(((0, 1), (0, 1)), ["x", "x", "z"], ["dy", "x", "z"])
    """
    missing = [factor for factor in factors if factor not in others]
    arrives = [factor for factor in others if factor not in factors]
    apart = len({*factors}) == len(factors) == len(others)
    if len(missing) != 1 or len(arrives) != 1 or not apart:
        return None
    inside = _tree(path, factors)
    if any(len(nodes) < 2 for nodes in inside.values()):
        return None  # something is gathered or scattered by itself
    return _positions(_steps(inside, missing[0], arrives[0]), others)


def _tree(path: Path, factors: Sequence[str]) -> dict[int, list[_Node]]:
    """What the buffers of a path are made of; the last is the result."""
    left: list[_Node] = [*factors]
    inside: dict[int, list[_Node]] = {}
    for number, step in enumerate(path):
        inside[number] = [left[position] for position in step]
        left = [*(one for one in left if one not in inside[number]), number]
    return inside


def _steps(inside: Mapping[int, Sequence[_Node]], leaf: str, arrives: str) -> Iterator[_Taking]:
    """From the result down to a leaf: what came back so far times what lies beside the way."""
    above = {one: number for number, nodes in inside.items() for one in nodes}
    way: list[_Node] = [leaf]
    while way[-1] in above:
        way.append(above[way[-1]])
    back: _Node = arrives
    for number, towards in zip(way[:0:-1], way[-2::-1], strict=True):
        assert isinstance(number, int)
        beside = [one for one in inside[number] if one != towards]
        for one in beside:
            yield from _filled(inside, one)
        yield [back, *beside], (number,)
        back = (number,)


def _filled(inside: Mapping[int, Sequence[_Node]], node: _Node) -> Iterator[_Taking]:
    """Of what a buffer of the product is made, where it is one."""
    if isinstance(node, int):
        for one in inside[node]:
            yield from _filled(inside, one)
        yield inside[node], node


def _positions(steps: Iterator[_Taking], others: Sequence[str]) -> Path:
    left: list[_Node] = [*others]
    path = []
    for taken, made in steps:
        path.append(tuple(sorted(left.index(one) for one in taken)))
        left = [*(one for one in left if one not in taken), made]
    return tuple(path)
