"""Index tensors as compiled graphs have them: parts of others, with negative values that count from
the end, and made anew at each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.compat.calls import assert_async
from insum.plan.facts import facts_of, known
from insum.runtime import bounds, fused
from insum.settings import settings

#: Selects of the dimensions of a tensor: which, and at which place.
Selects: TypeAlias = tuple[tuple[int, int], ...]
#: Index tensors that are seen once: name, the size of the dimension that it indexes, whether
#: negative values count from the end.
Limits: TypeAlias = tuple[tuple[str, int, bool], ...]


# --- index tensors that are parts of others -------------------------------------------------------


def part(base: Tensor, selects: Selects) -> Tensor:
    """``base`` at fixed places of some dimensions; the same object as long as ``base`` lives
    unchanged, so that what is known of it stays known.
    """
    if not selects:
        return base
    # Of .data, because a view would keep its base alive, and with it this entry.
    return memory.remembered(base, ("part", selects), lambda: select(base.data, selects))


def written(selects: Selects) -> list[str]:
    """Selects as text, for the specification of an op; `read` is the reverse."""
    return [f"{dim}.{place}" for dim, place in selects]


def read(texts: Sequence[str]) -> Selects:
    return tuple(
        (int(dim), int(place)) for dim, _, place in (text.partition(".") for text in texts)
    )


def select(base: Tensor, selects: Selects) -> Tensor:
    for dim, place in reversed(selects):
        base = base.select(dim, place)
    return base


# --- index tensors that are seen once -------------------------------------------------------------

#: Calls of an op in a row that came with an index tensor never seen before; and the last such
#: tensor.
_strangers: dict[tuple[object, str], int] = {}
_last: dict[tuple[object, str], weakref.ref[Tensor]] = {}
_PATIENCE = 2


def is_passing(op: object, name: str, tensor: Tensor, marked: bool) -> bool:
    """Whether an index tensor is not worth looking at closely: it is made at every call, or each
    call has come with another.
    """
    if looks_are_free(tensor) or torch.are_deterministic_algorithms_enabled():
        return False
    key = op, name
    facts = known(tensor)
    if facts is not None and not facts.passing:
        _strangers[key] = 0
        return False
    if marked or tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    last = _last.get(key)
    if last is not None and last() is tensor:
        _strangers[key] = 0  # it came back
        return False
    entry = memory.known(tensor)
    if entry is not None and entry.get("passing"):
        return True  # the forward pass has taken it so
    if len(_last) > 4096:
        _last.clear()
        _strangers.clear()
    _last[key] = weakref.ref(tensor)
    seen = _strangers[key] = _strangers.get(key, 0) + 1
    return seen > _PATIENCE


def looks_are_free(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting for a device."""
    return tensor.is_cpu


def wrapped(tensor: Tensor, size: int) -> Tensor:
    """Negative values counted from the end, where there are any."""
    if looks_are_free(tensor):
        return _wrap(tensor, size) if bool((tensor < 0).any()) else tensor
    facts = facts_of(tensor)
    if facts.low >= 0:
        return tensor
    key = "wrapped", size
    if key not in facts.derived:
        facts.derived[key] = _wrap(tensor, size)
    found: Tensor = facts.derived[key]
    return found


def _wrap(tensor: Tensor, size: int) -> Tensor:
    return torch.where(tensor < 0, tensor + size, tensor)


def seen_once(name: str, tensor: Tensor, limit: int, wraps: bool) -> Tensor:
    """An index tensor for a statement that takes its tensors as they come: checked on the device,
    which is not waited for.

    The backward pass reads what the forward pass has read; it is not checked again.
    """
    facts = known(tensor)
    if facts is not None and not facts.passing and facts.low >= 0 and facts.high < limit:
        # known well, but used here beside others that are not: what is known stays with the other
        # object
        return tensor.data
    if not tensor.numel() or not limit:
        return tensor.data
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return _looked_at(name, tensor, limit, wraps).data
    entry = memory.entry_of(tensor)
    entry.keep("passing", True)
    how = limit, wraps, settings.check != "never"
    return entry.remembered(how, lambda: _looked_at(name, tensor, limit, wraps)).data


def _looked_at(name: str, tensor: Tensor, limit: int, wraps: bool) -> Tensor:
    message = f"insum: an index of {name} is out of range"
    if bounds.is_for(tensor) and settings.check != "never":
        flag = bounds.flag(tensor.device)
        with fused.on_device(tensor.device):
            result = bounds.look(tensor, limit, wraps, flag)
        assert_async(flag, message)
        return result.data
    if settings.check != "never":
        low, high = torch.aminmax(tensor)
        assert_async((low >= (-limit if wraps else 0)) & (high < limit), message)
    return torch.remainder(tensor, limit) if wraps else tensor.data


def shares_memory(target: Tensor, values: Mapping[str, Any]) -> bool:
    """Whether one of the tensors that are read lies in the memory that is written to."""
    storage = target.untyped_storage().data_ptr()
    return any(v.untyped_storage().data_ptr() == storage for v in values.values())
