"""Passes over a graph, each of which is taken as a whole or not at all.

Afterwards each node that a pass made is run on fake tensors and has to give the value that is noted
at it; each node that was there before has to read values like those that it read before. So the
outputs are what they were, in shape, dtype, layout and device. Where that is not so, and whatever
else goes wrong, the graph is put back as it was: a program never fails because of a pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from insum.bounded import is_first
from insum.fusion.report import Failed
from insum.fusion.shapes import is_one, same

T = TypeVar("T")


class Changed(Exception):
    """A pass has changed what a graph computes; the text says where."""


@dataclass(slots=True)
class PassTrial:
    """Runs passes over one graph, and keeps what failed."""

    graph: Graph
    failed: list[Failed] = field(default_factory=list)

    def run(self, name: str, work: Callable[[], T], otherwise: T) -> T:
        """What a pass gives; ``otherwise``, and the graph as it was, where it fails."""
        before = [_Before(node) for node in self.graph.nodes]
        try:
            result = work()
            self.graph.lint()
            _check(self.graph, {one.node: one for one in before})
        except Exception as error:  # whatever it is, the program can do without the pass
            _put_back(self.graph, before)
            self._say(Failed(name, f"{type(error).__name__}: {error}".splitlines()[0]))
            return otherwise
        return result

    def _say(self, failed: Failed) -> None:
        self.failed.append(failed)
        if is_first(str(failed)):
            warnings.warn(
                f"insum: a pass of fusion {failed} (the program is compiled without it)",
                stacklevel=3,
            )


class _Before:
    """A node and what a pass may change about it; the rest stays with the node, erased or not."""

    __slots__ = ("args", "kwargs", "meta", "node")

    def __init__(self, node: Node) -> None:
        self.node, self.args, self.kwargs, self.meta = node, node.args, node.kwargs, {**node.meta}


def _put_back(graph: Graph, before: list[_Before]) -> None:
    """Make the nodes of a graph anew, as they were; what is passed to it stays."""
    calls = [node for node in graph.nodes if node.op != "placeholder"]
    for node in calls:  # first, as the order may be any
        node.args, node.kwargs = (), {}
    for node in calls:
        graph.erase_node(node)
    now: dict[Node, Node] = {}
    for one in before:
        node = one.node
        if node.op != "placeholder":
            args, kwargs = map_arg((one.args, one.kwargs), now.__getitem__)
            node = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        now[one.node] = node
        node.meta = one.meta


# --- is it the same? ------------------------------------------------------------------------------


def _check(graph: Graph, before: dict[Node, _Before]) -> None:
    mode = next((m for n in graph.nodes if (m := _mode(n.meta.get("val"))) is not None), None)
    for node in graph.nodes:
        if node in before:
            _check_reads(node, before)
        elif mode is not None and not alike(found := _run(node, mode), node.meta.get("val")):
            raise Changed(f"{node.name} is {_text(node.meta.get('val'))}, but gives {_text(found)}")


def _check_reads(node: Node, before: dict[Node, _Before]) -> None:
    """Whether a node that stayed reads what it read, or something like it."""
    was, now = _reads((before[node].args, before[node].kwargs)), _reads((node.args, node.kwargs))
    if len(was) != len(now):
        raise Changed(f"{node.name} reads {len(now)} values instead of {len(was)}")
    for old, new in zip(was, now, strict=True):
        expected, found = before[old].meta.get("val"), new.meta.get("val")
        if old is not new and not alike(found, expected):
            raise Changed(f"{node.name} reads {_text(found)} instead of {_text(expected)}")


def _reads(arguments: Any) -> list[Node]:
    """The nodes among arguments, as often as they are there."""
    found: list[Node] = []
    map_arg(arguments, found.append)
    return found


def _mode(value: Any) -> Any:
    return getattr(value, "fake_mode", None)


def _run(node: Node, mode: Any) -> Any:
    """What a node gives for the values that its arguments have."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def alike(a: Any, b: Any) -> bool:
    """Whether two values, or lists of them, cannot be told from each other by shape and kind."""
    match a, b:
        case Tensor(), Tensor():
            kinds = ((v.dtype, v.device, v.layout, v.dim()) for v in (a, b))
            return len({*kinds}) == 1 and all(map(same, a.shape, b.shape)) and _laid_out(a, b)
        case (tuple() | list(), tuple() | list()):
            return len(a) == len(b) and all(map(alike, a, b))
        case (int() | torch.SymInt(), int() | torch.SymInt()):
            return same(a, b)
    return type(a) is type(b)


def _laid_out(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same strides, as far as they matter."""
    if a.layout != torch.strided or any(isinstance(s, int) and s == 0 for s in a.shape):
        return True
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(is_one(size) or same(one, other) for size, one, other in strides)


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = f"{tuple(value.shape)} {value.dtype} {value.device.type} strides {value.stride()}"
    return kind.replace("torch.", "")
