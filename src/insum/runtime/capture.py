"""Calls made while a CUDA graph is warmed up or recorded: nothing is asked of the device, and
nothing that stays is put into the graph's memory.

A recorded graph is replayed on other values of its inputs, index tensors among them. What was found
out about index values must not become part of it, unless they belong to a sparse format or were
promised to be constant: such calls run kernels that need to know nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from insum.compat.calls import cudagraph_state
from insum.lang.bind import Problem, Value
from insum.plan.config import Choice
from insum.plan.facts import known
from insum.plan.prepare import CannotFuse
from insum.runtime import fused
from insum.runtime.build import anchors
from insum.runtime.portable import Portable, portable
from insum.runtime.program import Program
from insum.settings import settings

T = TypeVar("T")
_portables: dict[object, tuple[Problem, Portable | str]] = {}
_MOST = 256


def state(problem: Problem) -> str:
    """``warmup`` or ``recording`` inside torch.compile's CUDA graphs, ``capturing`` inside one that
    the user records, else ''.
    """
    if problem.device.type != "cuda" or not anchors(problem):
        return ""
    return cudagraph_state(problem.device) or (
        "capturing" if torch.cuda.is_current_stream_capturing() else ""
    )


def run(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None,
    config: Choice | None,
    how: str,
) -> Tensor | None:
    """The result, or None where the graph of torch operations is to do it."""
    program = (
        _program(problem, values, target, config, how) if _trusted(problem, values, how) else None
    )
    if program is not None:
        return fused.execute(program, values, target)
    found = _portable(problem, values)
    if isinstance(found, str) or target is not None and problem.statement.operator != "+=":
        return None
    return found.run(problem, values, lambda function: function, target)


def _trusted(problem: Problem, values: Mapping[str, Value], how: str) -> bool:
    """Whether what is known of the index tensors will still be true when the graph is replayed."""
    facts = [known(value) for name in anchors(problem) if isinstance(value := values[name], Tensor)]
    # Whoever records a graph by hand has warmed up with these very tensors, and knows that they
    # stay.
    return all(f is not None and (how == "capturing" or f.declared or f.constant) for f in facts)


def _program(
    problem: Problem,
    values: Mapping[str, Value],
    target: Tensor | None,
    config: Choice | None,
    how: str,
) -> Program | None:
    if how == "warmup":
        found = _elsewhere(problem.device, lambda: fused.lookup(problem, values, target, config))
        return None if isinstance(found, str) else found
    return fused.kept(problem, values, target)


def _elsewhere(device: torch.device, function: Callable[[], T]) -> T:
    """Call a function in a thread and on a stream of its own, so that what it allocates does not
    lie in the graph's memory.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                results.append(function())
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    torch.cuda.current_stream(device).synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _portable(problem: Problem, values: Mapping[str, Value]) -> Portable | str:
    wishes = fused.wishes_of(False, problem.device)
    key = (
        id(problem),
        id(settings.values),
        wishes.deterministic,
        wishes.precision,
        *[v.stride() for v in values.values() if isinstance(v, Tensor)],
    )
    held = _portables.get(key)
    if held is None or held[0] is not problem:
        if len(_portables) >= _MOST:
            _portables.clear()
        try:
            found: Portable | str = portable(problem, values, wishes)
        except CannotFuse as reason:
            found = str(reason)
        held = _portables[key] = problem, found
    return held[1]
