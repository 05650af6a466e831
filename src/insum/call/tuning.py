"""Tuning a call: the search for the best config of each statement that it is made of."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from insum.call import running
from insum.call.prepared import BoundCall
from insum.lang.bind import Value
from insum.plan.library import WHY, is_left_to_library
from insum.runtime import search
from insum.runtime.search import Tuned


def tuned_call(call: BoundCall, values: Mapping[str, Value], effort: str) -> Tuned:
    """What a search finds for a call. Nothing that was passed is changed."""
    if call.prepared.uses and not call.prepared.kernels_look:
        call.look_now(values)  # on a CPU, too, where a call looks when it runs: this one does not
    name = call.prepared.target
    target = values[name] if name else None
    assert target is None or isinstance(target, Tensor)
    stages = call.staged(values, in_place=bool(name)) if call.prepared.orderable else ()
    parts, known = [], dict(values)
    for one in stages:
        given = one.given(known)
        into = None if one.stage.fills else target
        part = one.kinds.find(given, one.sizes, into)
        parts.append(_tuned_one(part, given, into, effort))
        if one.stage.fills:
            known[one.stage.fills] = running.run(part, "new", given, None)
    if parts:
        return search.joined(call.prepared.form.statement, parts)
    return _tuned_one(call, values, target, effort)


def _tuned_one(
    call: BoundCall, values: Mapping[str, Value], target: Tensor | None, effort: str
) -> Tuned:
    problem = call.problem(values)
    accumulates = target is not None
    if not call.prepared.fusable and is_left_to_library(problem, accumulates=accumulates):
        return Tuned(str(problem.statement), (), 0.0, 0.0, source=f"no kernel: {WHY}")
    return search.tune(problem, values, target, effort)
