"""A call runs one of several ways: in kernels, as a CPU has it, as a graph, or as several
statements, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from insum.call import in_kernels, on_graph, on_host
from insum.call.filled import FilledBuffers
from insum.call.prepared import BoundCall, BoundStage
from insum.compat.calls import is_profiled, is_undisturbed
from insum.lang.bind import Value
from insum.plan.sizes import BASE

#: Bytes of buffers that are kept for the next of these statements.
MOST_FILLED = 1 << 28


def run(
    call: BoundCall,
    mode: str,
    values: Mapping[str, Value],
    target: Tensor | None,
    named: bool = False,
    filled: FilledBuffers | None = None,
) -> Tensor:
    """Run generated kernels where there are some, else the graph. ``mode``: ``new``, ``from``
    (a given value), ``into`` (in place). ``named``: profilers have been told the statement.
    ``filled``: buffers of statements that were run before on some of these very tensors, which
    live on, and to which this adds.
    """
    if is_profiled() and not named:
        with torch.profiler.record_function(f"insum: {call.prepared.form.statement}"):
            return run(call, mode, values, target, True, filled)
    if call.prepared.orderable:
        stages = call.staged(values, in_place=mode == "into")
        if stages:
            if mode == "into" and call.prepared.kernels_look and call.prepared.on_path:
                call.look(values)
            return _run_stages(stages, mode, values, call.whole(target), filled)
    if call.prepared.fusable:
        fused = call.fused or in_kernels.kernels_of(call, values, target)
        if fused is not None:
            if target is None:
                found = fused(values, None)
            elif mode == "into":
                found = in_kernels.run_into(call, fused, values, target)
            else:  # what it starts from is one more tensor that kernels read
                based = call.based or call.started_from()
                found = based({**values, BASE: target}, None)
            if isinstance(found, Tensor):
                return found
            in_kernels.fall_back(call, values, found.reason)
        if call.prepared.kernels_look:
            # torch's own kernels would end the process' use of the device
            call.look_now(values)
    undisturbed = call.prepared.on_host and is_undisturbed()
    if undisturbed:
        result = on_host.run(call, mode, values, target)
        if result is not None:
            return result
    if call.prepared.on_host:
        call.look_now(values)
    if call.prepared.form.wraps:
        values = call.wrapped(values)
    return on_graph.run(call, mode, values, call.whole(target), undisturbed)


def _run_stages(
    stages: tuple[BoundStage, ...],
    mode: str,
    values: Mapping[str, Value],
    target: Tensor | None,
    filled: FilledBuffers | None,
) -> Tensor:
    """Fill one buffer after the other, then run the last statement as the whole was to be run."""
    *before, last = stages
    known = dict(values)
    for one in before:
        known[one.stage.fills] = fill(one, one.given(known), filled)
    given = last.given(known)
    return run(last.kinds.find(given, last.sizes, target), mode, given, target)


def fill(stage: BoundStage, given: Mapping[str, Value], filled: FilledBuffers | None) -> Tensor:
    """The buffer of a statement: that of another on the same tensors, where there is one."""
    before = None if filled is None else stage.filled(given, filled)
    if before is not None:
        return before
    found = run(stage.kinds.find(given, stage.sizes), "new", given, None)
    if filled is not None:
        held = sum(one.buffer.nbytes for one in filled.values())
        if found.nbytes + held <= MOST_FILLED:
            stage.add(found, given, filled)
    return found


def buffers(
    call: BoundCall, values: Mapping[str, Value], filled: FilledBuffers
) -> list[tuple[BoundStage, Tensor]]:
    """Of the statements that this call is made of those that read nothing but its values, with
    their buffers, where those have been filled.
    """
    found = []
    for one in call.staged(values, in_place=False)[:-1]:
        if values.keys() >= {*one.stage.reads}:
            buffer = one.filled(one.given(values), filled)
            if buffer is not None:
                found.append((one, buffer))
    return found
