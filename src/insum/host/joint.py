"""Several statements on the same tensors as one graph, such as the gradients of one backward pass:
what they read and compute in common is read and computed once, a part of one variable at a time
where it would leave the cache. (A kernel computes it in passing, wherever it is read.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from insum.graph.lower import Lowered, live_terms
from insum.graph.value import meeting_dtype
from insum.host import chunks
from insum.host.by_row import ByRow
from insum.host.operations import (
    add_at,
    add_rows,
    einsum,
    einsum_without_library,
    lower_on_host,
    made_in_order,
)
from insum.host.places import Lowering
from insum.host.roles import FLOATS, cast
from insum.host.rows import ScaledRows
from insum.lang.bind import Problem, Value

#: Bytes of intermediates that may be made at once, where no variable runs through all statements.
MOST_AT_ONCE = 1 << 23
#: What takes no time, or makes memory that is written to: these are not shared.
_VIEWS = {"contiguous", "expand", "reshape", "size", "to", "unfold"}
_VIEW_FUNCTIONS = {
    *(torch.arange, torch.diagonal, torch.flatten, torch.narrow, torch.permute, torch.select),
    *(torch.squeeze, torch.unflatten, torch.unsqueeze),
}
_EINSUMS = {torch.einsum, einsum, einsum_without_library}
_COMMUTATIVE = {torch.add, torch.mul}
_MAKERS = {torch.zeros, torch.full, torch.empty}


@dataclass(frozen=True, slots=True)
class JointMember:
    """One of the statements, and the dimension of its output along which the variable runs that is
    done in parts, -1 where it is summed or where there is none.
    """

    problem: Problem
    graph: Lowered
    along: int

    @property
    def sums(self) -> bool:
        """Whether its graph adds to memory that is there."""
        return self.graph.mode == "into"


@dataclass(frozen=True, slots=True, eq=False)
class JointGraph:
    """``arguments`` are a kind and a name each: the ``output`` of a member, by its number, that is
    added to; a ``tensor``; the ``size`` of a variable; the ``shape`` of a member's output. Done for
    ``step`` places of ``var`` after the other, which runs along ``dims`` of tensors.
    """

    module: GraphModule
    members: tuple[JointMember, ...]
    arguments: tuple[tuple[str, Any], ...]
    var: str
    step: int
    dims: Mapping[str, int]

    def __call__(self, values: Mapping[str, Value]) -> list[Tensor]:
        extents = {v: n for one in self.members for v, n in one.problem.extents.items()}
        whole = int(extents.get(self.var, 1))
        if self.step >= whole:
            return self.finished(self.run(values, extents, self.outputs(only_sums=True)))
        outputs, part = self.outputs(only_sums=False), dict(values)
        for start in range(0, whole, self.step):
            length = min(self.step, whole - start)
            for name, dim in self.dims.items():
                tensor: Any = values[name]
                part[name] = tensor.narrow(dim, start, length)
            into = [
                out if out is None or one.along < 0 else out.narrow(one.along, start, length)
                for one, out in zip(self.members, outputs)
            ]
            found = self.run(part, {**extents, self.var: length}, into)
            for one, here, result in zip(self.members, into, found):
                if not one.sums and here is not None:
                    here.copy_(result)
        return self.finished([out for out in outputs if out is not None])

    def outputs(self, *, only_sums: bool) -> list[Tensor | None]:
        """Memory for results: of sums zeros."""
        return [
            (torch.zeros if one.sums else torch.empty)(
                [int(n) for n in one.problem.shape], dtype=meeting_dtype(one.problem)
            )
            if one.sums or not only_sums
            else None
            for one in self.members
        ]

    def run(
        self, values: Mapping[str, Value], extents: Mapping[str, Any], into: Sequence[Tensor | None]
    ) -> list[Tensor]:
        given: list[Any] = []
        for kind, name in self.arguments:
            match kind:
                case "output":
                    given.append(into[name])
                case "tensor":
                    given.append(values[name])
                case "size":
                    given.append(extents[name])
                case _:
                    out = into[name]
                    given.append(self.members[name].problem.shape if out is None else out.shape)
        found: list[Tensor] = self.module.forward(*given)
        return found

    def finished(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Results in their dtypes, none in the memory of another."""
        found: list[Tensor] = []
        for one, result in zip(self.members, results):
            own = cast(result, one.problem.dtype)
            at = own.untyped_storage().data_ptr()
            shared = any(at == other.untyped_storage().data_ptr() for other in found)
            found.append(own.clone() if shared else own)
        return found


def is_by_graph(way: Lowering | None) -> bool:
    """Whether a way is the graph, in whatever order; or is where index tensors are in no order."""
    if isinstance(way, ScaledRows):
        return way.out_of_order is not None
    return way is None or way.name in ("graph", "chunks", "by row")


def joint_of(
    problems: Sequence[Problem], ways: Sequence[Lowering | None]
) -> tuple[JointGraph, tuple[int, ...]] | None:
    """Those statements that are better as one graph, and their numbers. ``ways``: how each is run
    by itself.
    """
    members = tuple(k for k, way in enumerate(ways) if is_by_graph(way))
    members = tuple(k for k in members if _is_product(problems[k]))
    while len(members) > 1:
        found = _joint([problems[k] for k in members])
        if found is None:
            return None
        joint, shared = found
        gaining = tuple(k for k, gains in zip(members, shared) if gains > _loss(ways[k]))
        if gaining == members:
            return joint, members
        members = gaining
    return None


def _is_product(problem: Problem) -> bool:
    """A sum of one product of real floating numbers."""
    plain = problem.statement.operator in ("=", "+=") and not problem.target_read
    return plain and problem.dtype in FLOATS and len(live_terms(problem)) == 1


def _loss(way: Lowering | None) -> int:
    """What is summed by row takes longer in any other order."""
    return int(isinstance(way, ByRow | ScaledRows))


def _joint(problems: Sequence[Problem]) -> tuple[JointGraph, list[int]] | None:
    """One graph, and how much of each statement another one computes, too; None where sizes of one
    name differ, or where there would be too much at once.
    """
    extents: dict[str, Any] = {}
    for problem in problems:
        for name, extent in problem.extents.items():
            if extents.setdefault(name, extent) != extent:
                return None
    parted = _parted(problems)
    if parted is None:
        return None
    var, step, dims = parted
    members = []
    for problem in problems:
        wide = replace(problem, dtype=meeting_dtype(problem))
        places = chunks.dims_of(problem, var) if var else None
        along = places[1] if places else -1
        new = chunks.is_dense(problem) and (along >= 0 or not var)
        members.append(
            JointMember(problem, lower_on_host(wide, "new" if new else "into", alone=False), along)
        )
    merged = merged_graphs([member.graph for member in members])
    joint = JointGraph(merged.module, tuple(members), merged.arguments, var, step, dims)
    return joint, merged.shared


def _parted(problems: Sequence[Problem]) -> tuple[str, int, dict[str, int]] | None:
    """What is done in parts, how much at a time, and along which dimensions; '' where all is done
    at once, None where that would be too much.
    """
    most = max(chunks.most_at_once(problem) for problem in problems)
    at_once = any(chunks.wants_same_bits(problem.statement.value) for problem in problems)
    if most <= (MOST_AT_ONCE if at_once else 2 * chunks.AT_ONCE):
        return "", 1, {}
    extents = {v: int(n) for problem in problems for v, n in problem.extents.items()}
    much = {v: sum(chunks.adds_up_much(problem, v) for problem in problems) for v in extents}
    for var in sorted(extents, key=lambda v: (much[v], -extents[v])) if not at_once else ():
        dims = _dims(problems, var)
        if dims is not None and extents[var] > 1:
            return var, max(1, extents[var] * (chunks.AT_ONCE // 2) // most), dims
    return ("", 1, {}) if most <= MOST_AT_ONCE else None


def _dims(problems: Sequence[Problem], var: str) -> dict[str, int] | None:
    """Along which dimensions of tensors a variable runs in all statements alike; None where it does
    not, or not through all that they make on their way.
    """
    found: dict[str, int] = {}
    for problem in problems:
        own = chunks.dims_of(problem, var)
        if own is None or var not in problem.extents or not chunks.runs_through(problem, var):
            return None
        for name in problem.kinds:
            if found.setdefault(name, own[0].get(name, -1)) != own[0].get(name, -1):
                return None
    return {name: dim for name, dim in found.items() if dim >= 0}


@dataclass(frozen=True, slots=True, eq=False)
class MergedGraphs:
    """``shared``: of each graph how many of the operations that take time another one has, too."""

    module: GraphModule
    arguments: tuple[tuple[str, Any], ...]
    shared: list[int]


def merged_graphs(graphs: Sequence[Lowered]) -> MergedGraphs:
    """Graphs as one, in which what is computed twice is computed once."""
    merged, keys = Graph(), [_arguments(number, graph) for number, graph in enumerate(graphs)]
    arguments = dict.fromkeys(chain(*keys))
    given = {key: merged.placeholder(f"given_{k}") for k, key in enumerate(arguments)}
    known: dict[object, Node] = {}
    users: dict[Node, set[int]] = {}
    results = []
    for number, (graph, own) in enumerate(zip(graphs, keys)):
        placeholders, copied = iter(own), dict[Node, Node]()
        for node in graph.module.graph.nodes:
            if node.op == "placeholder":
                copied[node] = given[next(placeholders)]
            elif node.op == "output":
                results.append(copied[node.args[0]])
            else:
                copied[node] = found = _copied(node, merged, copied, known)
                if not _is_view(node):
                    source = found.args[0] if found.target is torch.permute else found
                    users.setdefault(source, set()).add(number)  # type: ignore[arg-type]
    merged.output(results)
    made_in_order(merged)
    module = GraphModule(torch.nn.Module(), merged, class_name="Insum")
    shared = [who for who in users.values() if len(who) > 1]
    return MergedGraphs(
        module, tuple(arguments), [sum(n in who for who in shared) for n in range(len(graphs))]
    )


def _arguments(number: int, graph: Lowered) -> list[tuple[str, Any]]:
    """What a graph is called with, as `JointGraph` tells it."""
    keys: list[tuple[str, Any]] = [("output", number)] if graph.mode != "new" else []
    keys += [("tensor", name) for name in graph.inputs]
    return keys + [("size", v) if v else ("shape", number) for v in graph.sizes]


def _copied(
    node: Node, into: Graph, copied: Mapping[Node, Node], known: dict[object, Node]
) -> Node:
    """A node in another graph: that of an equal one, unless memory is written to."""
    if _writes(node) or _is_written(node):
        return into.node_copy(node, copied.__getitem__)
    args = torch.fx.map_arg(node.args, copied.__getitem__)
    kwargs = torch.fx.map_arg(node.kwargs, copied.__getitem__)
    if node.target in _COMMUTATIVE and not kwargs:
        turned = _turned(args)
        if turned is not None:
            before, order = turned
            same = _known(node.op, node.target, before, {}, into, known)
            return _known("call_function", torch.permute, (same, order), {}, into, known)
        args = tuple(sorted(args, key=repr))
    if node.target in _EINSUMS:
        return _einsum(node.target, args, into, known)
    return _known(node.op, node.target, args, kwargs, into, known)


def _known(
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    into: Graph,
    known: dict[object, Node],
) -> Node:
    """A node: that of an equal one, where there is one."""
    key = op, target, repr(args), repr(kwargs)
    found = known.get(key)
    if found is None:
        found = known[key] = into.create_node(op, target, args, kwargs)
    return found


def _turned(args: tuple[Any, ...]) -> tuple[tuple[Node, ...], tuple[int, ...]] | None:
    """The operands of a pointwise function and the order of its dimensions, where all have been
    turned the same way.
    """
    permuted = [one for one in args if isinstance(one, Node) and one.target is torch.permute]
    orders: set[Any] = {one.args[1] for one in permuted}
    if len(permuted) < len(args) or len(orders) != 1:
        return None
    before: list[Any] = sorted((one.args[0] for one in permuted), key=repr)
    return tuple(before), next(iter(orders))


def _einsum(target: Any, args: Any, into: Graph, known: dict[object, Node]) -> Node:
    """A product of tensors: that of an equal one, its dimensions in another order where that was
    asked for.
    """
    equation, *operands = args
    left, kept = equation.split("->")
    letters = dict.fromkeys(left.replace(",", ""))
    spelt = str.maketrans({letter: ascii_letters[k] for k, letter in enumerate(letters)})
    key = "einsum", left.translate(spelt), repr(operands), "".join(sorted(kept.translate(spelt)))
    own = kept.translate(spelt)
    found = known.get(key)
    if found is None:
        found = known[key] = into.call_function(target, tuple(args))
        found.meta["order"] = own
    before = found.meta["order"]
    if before == own:
        return found
    return into.call_function(torch.permute, (found, tuple(before.index(v) for v in own)))


def _writes(node: Node) -> bool:
    """Whether a node makes memory that is written to, or writes."""
    return node.target in _MAKERS or _changes(node)


def _changes(node: Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return node.target in (add_at, add_rows)


def _is_written(node: Node) -> bool:
    """Whether what a node gives is changed, itself or through a view."""
    return any(
        user.args[:1] == (node,) and (_changes(user) or _is_view(user) and _is_written(user))
        for user in node.users
    )


def _is_view(node: Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in _VIEWS
    if node.target in _VIEW_FUNCTIONS:
        return True
    is_item = getattr(node.target, "__name__", "") == "getitem"
    return is_item and not any(isinstance(one, Node) for one in _flat(node.args[1:]))


def _flat(args: Any) -> Iterator[Any]:
    if isinstance(args, tuple | list):
        for one in args:
            yield from _flat(one)
    else:
        yield args
