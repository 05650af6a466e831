"""In Triton's interpreter: no kernel reads or writes outside of the tensors that it is passed.

A GPU says so only where memory ends there, and what was read and then masked leaves no trace in a
result.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
from torch import Tensor

#: What is exchanged here, of ``triton.runtime.interpreter``.
NEEDED = ("GridExecutor", "_interpreter")


class OutsideError(AssertionError):
    """An address that lies in none of the tensors."""


def watch() -> bool:
    """From now on every address is looked at; says whether this Triton is one where that can be
    done.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in NEEDED):
        return False
    watched = _Watched(interpreter._interpreter)
    begin = interpreter.GridExecutor._init_args_hst

    def begin_watched(self: Any, arguments: Any, named: Any) -> Any:
        found = begin(self, arguments, named)
        tensors = [one for one in (*found[0], *found[1].values()) if isinstance(one, Tensor)]
        watched.launch(self.fn.__name__, tensors)
        return found

    interpreter.GridExecutor._init_args_hst = begin_watched
    interpreter._interpreter = watched
    return True


class _Watched:
    """The operations on memory of Triton's interpreter, for tensors that are noted at a launch."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.name = memory, ""
        #: Where memory begins that tensors lie in, in order, and where it ends.
        self.starts: list[int] = []
        self.ends: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def launch(self, name: str, tensors: list[Tensor]) -> None:
        self.name = name
        spans = sorted(map(_span, tensors))
        self.starts, self.ends = [], []
        for start, end in spans:  # several may be parts of one
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(end, self.ends[-1])
            else:
                self.starts.append(start)
                self.ends.append(end)

    def load(self, places: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.look("reads", places, mask)
        return self.memory.load(places, mask, other, dtype)

    def store(self, places: Any, values: Any, mask: Any) -> Any:
        self.look("writes", places, mask)
        return self.memory.store(places, values, mask)

    def atomic_rmw(self, operation: Any, places: Any, values: Any, mask: Any, order: Any) -> Any:
        self.look("adds", places, mask)
        return self.memory.atomic_rmw(operation, places, values, mask, order)

    def look(self, does: str, places: Any, mask: Any) -> None:
        """At the least and the largest address: both lie in one tensor."""
        taken = places if np.logical_and.reduce(mask, axis=None) else places[mask.astype(bool)]
        if not taken.size:
            return
        least = int(np.minimum.reduce(taken, axis=None))
        most = int(np.maximum.reduce(taken, axis=None))
        at = bisect.bisect_right(self.starts, least) - 1
        if at < 0 or most >= self.ends[at]:
            nearest = min((abs(least - s) for s in self.starts), default=0)
            raise OutsideError(
                f"{self.name} {does} {most - least} bytes from {nearest} bytes beside a tensor on"
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where the memory of a tensor begins and ends."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + tensor.element_size() * (1 + sum((n - 1) * s for n, s in steps))
