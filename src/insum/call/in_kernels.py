"""A call in generated kernels."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from insum.bounded import is_first
from insum.call.overlap import shares_memory, written_to
from insum.call.prepared import BoundCall
from insum.compat.calls import is_profiled
from insum.errors import NotFusedError
from insum.lang.bind import Value

if TYPE_CHECKING:
    from insum.runtime.fused import FusedCall
    from insum.runtime.program import Refusal


def kernels_of(
    call: BoundCall, values: Mapping[str, Value], target: Tensor | None
) -> FusedCall | None:
    """The generated kernels of a call that runs for the first time, or None where there are
    none.
    """
    prepared = call.prepared
    if prepared.settings.backend == "graph":
        fall_back(call, values, 'settings.backend is "graph"')
        return None
    call.fused = prepared.fused_call(call.spans, call.shape, call.extents)
    if prepared.searches:
        _search(call, values, target)
    return call.fused


def run_into(
    call: BoundCall, fused: FusedCall, values: Mapping[str, Value], target: Tensor
) -> Tensor | Refusal:
    """What accumulates into a tensor in place."""
    copied = shares_memory(target, map(values.get, call.prepared.reads))
    result = fused(values, target.clone() if copied else target)
    if not isinstance(result, Tensor):
        return result
    return target.copy_(result) if copied else written_to(target)


def alone(
    call: BoundCall, values: Mapping[str, Value], *, in_place: bool = False
) -> FusedCall | None:
    """The generated kernels of this call, where it is one statement and nothing is looked for
    first; None where it is not.
    """
    prepared = call.prepared
    if not prepared.fusable or prepared.searches or prepared.settings.backend == "graph":
        return None
    if prepared.orderable and call.staged(values, in_place=in_place):
        return None
    if call.fused is None:  # as `kernels_of`, for every new size of a training step
        call.fused = prepared.fused_call(call.spans, call.shape, call.extents)
    return call.fused


def at_once(
    calls: Sequence[BoundCall], values: Sequence[Mapping[str, Value]]
) -> list[Tensor | None]:
    """The results of several calls on tensors that have the same names in all of them, in one
    launch where one can be for several; None where there is no kernel.
    """
    every = []
    for call, given in zip(calls, values):
        fused = alone(call, given)
        if fused is None:
            return [None] * len(calls)
        if call.prepared.looks_first:
            call.look(given)
        every.append(fused)
    from insum.runtime.one_launch import run_together  # which takes a while to import

    if is_profiled():
        told = "; ".join(call.prepared.form.statement for call in calls)
        with torch.profiler.record_function(f"insum: {told}"):
            return run_together(every, values)
    return run_together(every, values)


def _search(call: BoundCall, values: Mapping[str, Value], target: Tensor | None) -> None:
    """What ``settings.effort`` asks for at the first call."""
    from insum.runtime import search  # which takes a while to import

    effort = call.prepared.settings.effort
    search.on_first_call(call.problem(values), values, target, effort)


def fall_back(call: BoundCall, values: Mapping[str, Value], why: str) -> None:
    """Say that there is no kernel, where someone wants to know."""
    problem, now = call.problem(values), call.prepared.settings
    if now.require_fused:
        raise problem.complain(
            NotFusedError,
            f"no fused kernel: {why}",
            expected="a statement that a kernel can express",
            remedy="settings.require_fused = False runs it as a graph of torch operations",
        )
    if now.backend == "fused" or "fallback" in now.log:
        text = problem.statement.text or str(problem.statement)
        message = f"insum: {text!r} runs as a graph of torch operations: {why}"
        if is_first(f"fallback of {text}"):
            warnings.warn(message, stacklevel=5)
