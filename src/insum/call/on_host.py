"""A call on a CPU, which may go its own ways (`insum.host`)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.call.prepared import BoundCall
from insum.compat.calls import is_undisturbed
from insum.host.arguments import HostCall
from insum.lang.bind import Value
from insum.runtime.check import bounds_of, verify

if TYPE_CHECKING:
    from insum.host.arguments import IndexEntries
    from insum.host.joint import JointGraph
    from insum.host.places import Lowering

#: Ways that make nothing of index tensors that would be worth keeping.
KEEP_NOTHING = ("graph", "chunks")
#: Calls that are one graph with others, of one call.
MOST_JOINTS = 8


def run(
    call: BoundCall, mode: str, values: Mapping[str, Value], target: Tensor | None
) -> Tensor | None:
    """The result of the way that a CPU takes, or None where that is the graph."""
    if call.waits is None:
        from insum.host.choose import is_little, waits

        call.waits = waits(call.problem(values), call.prepared.indices)
        call.little = is_little(call.problem(values))
    lowered = call.lowerings.get(mode == "new")
    if lowered is None and not call.waits:
        lowered = lowering(call, mode, values)
        if lowered is None:
            return None
    if lowered is not None and lowered.name in KEEP_NOTHING:
        call.look_now(values)
        wrap = call.wrapped if call.prepared.form.wraps else None
        result = lowered(HostCall(values, {}, wrap))
        return result if target is None else _put(result, mode, target)
    entries = {}
    for name in call.prepared.indices:
        index: Any = values[name]
        entry = memory.known(index)
        if entry is None and call.little:
            return None
        entries[name] = entry or memory.made(index)
    given = HostCall(values, entries, call.wrapped if call.prepared.form.wraps else None)
    if call.waits and not given.comes_back(call.prepared.form.statement):
        return None
    if lowered is None:
        lowered = lowering(call, mode, values)
    if lowered is None:
        call.waits = False
        return None
    if call.checked != given.serials:  # of the same index tensors, as they are
        _check(call, entries, values)
        call.checked = given.serials
    result = lowered(given)
    return result if target is None else _put(result, mode, target)


def _put(result: Tensor, mode: str, target: Tensor) -> Tensor:
    """What is added to something."""
    return target.add_(result) if mode == "into" else (target + result).to(target.dtype)


def is_one_graph(calls: Sequence[BoundCall | None]) -> bool:
    """Whether some of these are one graph, as far as is known."""
    found = [call for call in calls if call is not None]
    return len(found) < len(calls) or found[0].joints.get(tuple(found), True) is not None


def at_once(
    calls: Sequence[BoundCall], values: Sequence[Mapping[str, Value]]
) -> list[Tensor | None]:
    """The results of calls that share what they compute, on tensors that have the same names in all
    of them, as one graph; None of those that are better by themselves.
    """
    found: list[Tensor | None] = [None] * len(calls)
    if not is_undisturbed():
        return found
    first, key = calls[0], tuple(calls)
    if key not in first.joints:
        keep(first.joints, key, _joint(calls, values), MOST_JOINTS)
    joint = first.joints[key]
    if joint is None:
        return found
    graph, numbers = joint
    every: dict[str, Value] = {}
    for number in numbers:
        call, given = calls[number], values[number]
        call.look_now(given)
        every |= given
    for number, result in zip(numbers, graph(every)):
        found[number] = result
    return found


def _joint(
    calls: Sequence[BoundCall], values: Sequence[Mapping[str, Value]]
) -> tuple[JointGraph, tuple[int, ...]] | None:
    """What of them is one graph, and which they are."""
    from insum.host.joint import joint_of  # takes a while to import

    alone = [
        k
        for k, (call, given) in enumerate(zip(calls, values))
        if call.prepared.on_host and not _is_apart(call, given)
    ]
    problems = [calls[k].problem(values[k]) for k in alone]
    ways = [lowering(calls[k], "new", values[k]) for k in alone]
    found = joint_of(problems, ways)
    return None if found is None else (found[0], tuple(alone[k] for k in found[1]))


def _is_apart(call: BoundCall, values: Mapping[str, Value]) -> bool:
    """Whether a call is several statements, or counts from the end of what its indices lead to,
    which may be another tensor in each.
    """
    several = call.prepared.orderable and bool(call.staged(values, in_place=False))
    return several or bool(call.prepared.form.wraps)


def lowering(call: BoundCall, mode: str, values: Mapping[str, Value]) -> Lowering | None:
    """How a CPU runs this call; None: as one graph."""
    new = mode == "new"
    if new not in call.lowerings:
        # takes a while to import, and GPUs need none of it
        from insum.host.choose import choose

        call.lowerings[new] = choose(call.problem(values), new=new)
    return call.lowerings[new]


def _check(call: BoundCall, entries: IndexEntries, values: Mapping[str, Value]) -> None:
    """Index values against their range, by what is remembered of them."""
    uses = call.uses(values)
    if not uses or call.prepared.settings.check == "never":
        return
    for name, low, high in call.ranges:
        bounds = entries[name].things.get("bounds")
        if bounds is None:
            look = functools.partial(bounds_of, values[name])
            bounds = entries[name].remembered("bounds", look)
        if bounds is None or bounds[0] < low or bounds[1] > high:
            break
    else:
        if call.ranges:
            return
    verify(call.problem(values), uses, values)
