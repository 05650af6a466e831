"""CPU tensors taken for ones on a GPU: their values cannot be looked at, kernels check indices
themselves, numbers that the host waits for arrive late, and new memory holds NaN.

For runs in Triton's interpreter, where it finds what otherwise only a GPU would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from insum import memory
from insum.compat import tensors
from insum.runtime.prologue import rows, tables
from insum.runtime.prologue.made import Awaited

#: Only generated kernels, whatever the device.
ONLY_FUSED: dict[str, Any] = {"backend": "fused", "require_fused": True}
#: Numbers that were waited for.
waits: list[str] = []
_tolist = Tensor.tolist


class Slow:
    """Numbers that arrive when they are asked for again."""

    def __init__(self, numbers: Tensor) -> None:
        self.found, self.asked = _tolist(numbers), 0

    def is_there(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def numbers(self) -> list[int]:
        if self.asked <= 1:
            waits.append("a number of a prologue")
        return self.found


def awaited(arrays: Any, numbers: Any, finish: Any, early: Any = None) -> Awaited:
    together = torch.stack([n.reshape(()).long() for n in numbers])
    return Awaited(arrays, together, finish, early, Slow(together))  # type: ignore[arg-type]


def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.empty` whose memory holds NaN, or a number that would show."""

    def make(*args: Any, **options: Any) -> Tensor:
        out = empty(*args, **options)
        return (
            out.fill_(float("nan") if out.is_floating_point() or out.is_complex() else 77)
            if out.numel() and out.device.type != "meta"
            else out
        )

    return make


def poisonous() -> list[tuple[Any, str, Any]]:
    """Every way to make a tensor without values, as an owner, a name and what to put there, after
    which new memory holds NaN or a number that stands out.
    """
    quick = {kind: poisoned(make) for kind, make in tensors.strided_makers().items()}
    return [
        (torch, "empty", poisoned(torch.empty)),
        (torch, "empty_strided", poisoned(torch.empty_strided)),
        (tensors, "strided_makers", lambda: quick),
    ]


@contextmanager
def pretended(**settings: Any) -> Iterator[None]:
    """Generated kernels, on tensors that nobody has seen; nothing else unless ``settings`` say
    otherwise.
    """
    import insum.call.lookup
    import insum.call.prepared

    replaced = [
        *poisonous(),
        (memory, "can_look", lambda tensor: False),
        (insum.call.prepared, "kernels_look_on", lambda device: True),
        (insum.call.prepared, "_forms", {}),
        (insum.call.lookup, "_fronts", {}),
        (rows, "awaited", awaited),
        (tables, "awaited", awaited),
    ]
    with ExitStack() as stack:
        for owner, name, new in replaced:
            stack.enter_context(mock.patch.object(owner, name, new))
        memory.forget()
        stack.callback(memory.forget)  # what was found out without looking
        with insum.settings(**{**ONLY_FUSED, **settings}):
            yield
        insum.synchronize()
