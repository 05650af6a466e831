"""What follows from a tensor alone, kept as long as that tensor lives and is not written into."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from insum.compat.calls import is_plain_call
from insum.plan.facts import version_of

T = TypeVar("T")


@dataclass(slots=True)
class _Kept:
    reference: weakref.ref[Tensor]
    version: int
    things: dict[object, Any] = field(default_factory=dict)


_memory: dict[int, _Kept] = {}


def remembered(tensor: Tensor, key: object, make: Callable[[], T]) -> T:
    """``make()``, once for each key and version of the tensor; at every call under a tracer or a
    transform.

    What is made must not hold the tensor itself, nor a view of it, or neither would ever go.

    >>> x = torch.tensor([1, 2])
    >>> remembered(x, "sum", lambda: int(x.sum())), remembered(x, "sum", lambda: 0)
    (3, 3)
    >>> remembered(x.add_(1), "sum", lambda: int(x.sum()))
    5
    """
    if not is_plain_call((tensor,)):
        return make()
    things = _things(tensor)
    if key not in things:
        with torch.inference_mode(False), torch.no_grad():
            things[key] = make()
    found: T = things[key]
    return found


def _things(tensor: Tensor) -> dict[object, Any]:
    number, version = id(tensor), version_of(tensor)
    kept = _memory.get(number)
    if kept is None or kept.reference() is not tensor or kept.version != version:
        kept = _memory[number] = _Kept(
            weakref.ref(tensor, lambda _: _memory.pop(number, None)), version
        )
    return kept.things
