"""Finds fused ops of a graph that can be called as one: those that share index tensors, none of
which waits for anything but views between them. Calling costs the host as much as launching does;
of several, calling them as one is most of it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from insum.fusion import sequence_op
from insum.fusion.hoist import sweep
from insum.fusion.later import later_of
from insum.fusion.op import KEPT_ROWS, spec_of
from insum.fusion.report import note_written
from insum.fusion.sequence_op import SequenceMember, text_of
from insum.fusion.shapes import is_contiguous, shape_of, value_of
from insum.fusion.views import INDICES, VIEWS, reshaped
from insum.lang.expr import Statement
from insum.lang.parser import parse
from insum.ops.shared_rows import named_alike, renamed

assert sequence_op  # which registers the op
FUSED, EXTREMUM = torch.ops.insum.fused.default, torch.ops.insum.fused_extremum.default
SEQUENCE = torch.ops.insum.fused_sequence.default
#: What tracing noted at a node about its value.
_OWN_META = ("val", "tensor_meta", "unbacked_bindings", "eager_input_vals", "example_value")


@dataclass(slots=True, eq=False)
class _OpenSequence:
    """Fused ops that are called as one, as far as a graph was read.

    Attributes:
        views: of results, each with that result: statements may read them.
        behind: what reads results, and what reads that: it comes after all of the sequence.
    """

    members: list[Node]
    backward: bool
    indices: set[Node]
    views: dict[Node, Node] = field(default_factory=dict)
    behind: dict[Node, None] = field(default_factory=dict)

    def takes(self, node: Node, backward: bool, indices: set[Node]) -> bool:
        own = {*self.members, *self.views}
        _, given, sizes = _arguments(node)
        return (
            backward == self.backward
            and not self.indices.isdisjoint(indices)
            and value_of(node).device == value_of(self.members[0]).device
            and all(n in own or n not in self.behind for n in given)
            and not any(n in own or n in self.behind for n in sizes)
        )

    def waits_for_it(self, node: Node) -> bool:
        return any(n in self.members or n in self.behind for n in node.all_input_nodes)


def join(graph: Graph) -> None:
    """Make one op of fused ops that can be called as one."""
    for found in _found(graph):
        _replace(graph, found)


def _found(graph: Graph) -> list[_OpenSequence]:
    backward = later_of(graph).backward
    found: list[_OpenSequence] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _can_join(node):
            indices = {n for n in _arguments(node)[1] if value_of(n).dtype in INDICES}
            if found and found[-1].takes(node, node in backward, indices):
                found[-1].members.append(node)
                found[-1].indices |= indices
            else:
                found.append(_OpenSequence([node], node in backward, indices))
        elif found and _keeps_its_place(node):
            found.append(_OpenSequence([], False, set()))
        elif found and found[-1].waits_for_it(node):
            found[-1].behind[node] = None
            if (result := _viewed(node, found[-1])) is not None:
                found[-1].views[node] = result
    return [one for one in found if len(one.members) > 1]


def _can_join(node: Node) -> bool:
    """Whether a node is a fused op that makes a tensor of its own, of index tensors that stay."""
    given: Any = node.args
    if node.target is FUSED:
        return not spec_of(given[0]).passing
    return node.target is EXTREMUM and given[4] is False and not spec_of(given[1]).passing


def _arguments(node: Node) -> tuple[str, list[Node], list[Any]]:
    """What a member takes: as text, tensors and sizes."""
    given: Any = node.args
    if node.target is FUSED:
        return given[0], list(given[1]), list(given[2])
    base, spec, tensors, sizes, _ = given
    return KEPT_ROWS + spec, [*tensors, base], list(sizes)


def _keeps_its_place(node: Node) -> bool:
    """Whether a node writes to something, or draws random numbers."""
    tags = getattr(node.target, "tags", ())
    schema = getattr(node.target, "_schema", None)
    writes = schema is not None and schema.is_mutable
    return node.is_impure() or writes or torch.Tag.nondeterministic_seeded in tags


def _viewed(node: Node, one: _OpenSequence) -> Node | None:
    """The result of which a node is a view, of sizes that are numbers."""
    if VIEWS.get(node.target) is not reshaped or not isinstance(node.args[0], Node):
        return None
    whole = node.args[0]
    result = whole if whole in one.members else one.views.get(whole)
    numbers = all(isinstance(size, int) for size in shape_of(node))
    plain = numbers and shape_of(node) and is_contiguous(value_of(node))
    return result if result is not None and plain and is_contiguous(value_of(result)) else None


def _replace(graph: Graph, one: _OpenSequence) -> None:
    """All members by one op, right before the last: there all that they read is there. What waits
    for them and stands before that comes behind it.
    """
    last = one.members[-1]
    tensors: list[Node] = []
    sizes: list[Any] = []
    members, statements = [], _statements(one)
    for node in one.members:
        spec, given, own = _arguments(node)
        spec = _named_alike(spec, statements)
        sizes += own
        places = [_place(n, one, tensors, sizes) for n in given]
        members.append(SequenceMember(spec, len(own), tuple(places)))
    early = _before(last, one)
    with graph.inserting_before(last):
        every = graph.call_function(SEQUENCE, (text_of(members), tensors, sizes))
        every.meta = {**_told(last), "val": [n.meta["val"] for n in one.members]}
        results = []
        for k, node in enumerate(one.members):
            result = graph.call_function(operator.getitem, (every, k))
            result.meta = {**_told(node), "val": node.meta["val"]}
            results.append(result)
    place = results[-1]
    for node in early:
        place.append(node)
        place = node
    for node, result in zip(one.members, results, strict=True):
        node.replace_all_uses_with(result)
    for node in reversed(one.members):
        graph.erase_node(node)
    sweep(graph, one.views)


def _statements(one: _OpenSequence) -> list[Statement]:
    specs = [_arguments(node)[0].removeprefix(KEPT_ROWS) for node in one.members]
    return [parse(spec_of(text).statement) for text in specs]


def _named_alike(text: str, others: Sequence[Statement]) -> str:
    """The specification with variables called as others call them that read the same rows."""
    if text.startswith(KEPT_ROWS) or (spec := spec_of(text)).size_names:
        return text
    statement = parse(spec.statement)
    names = named_alike(statement, others)
    if not names:
        return text
    written = str(renamed(statement, names))
    note_written(written)  # the report tells of it by its first names
    return str(replace(spec, statement=written))


def _place(node: Any, one: _OpenSequence, tensors: list[Node], sizes: list[Any]) -> tuple[int, int]:
    """The number of what a member takes, and of how many dimensions the view is."""
    assert isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)
    if node in one.members:
        return -1 - one.members.index(node), 0
    if node in one.views:
        shape = shape_of(node)
        sizes += shape
        return -1 - one.members.index(one.views[node]), len(shape)
    if node not in tensors:
        tensors.append(node)
    return tensors.index(node), 0


def _before(last: Node, one: _OpenSequence) -> list[Node]:
    """What waits for members and stands before the last."""
    order = {node: k for k, node in enumerate(last.graph.nodes)}
    return [node for node in one.behind if order[node] < order[last]]


def _told(node: Node) -> dict[str, Any]:
    """Where a node comes from, and what the partitioner asks for."""
    return {k: v for k, v in node.meta.items() if k not in _OWN_META}
