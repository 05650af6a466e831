"""The ops that fused chains become: ``insum::fused`` and, into a tensor that is there, ``insum::fused_into`` and ``insum::fused_into_``.

They mean what ``insum::contract`` means, and take index tensors the way compiled graphs have them: as rows of a larger tensor, with
negative values that count from the end, and made anew at each call. They stand in graphs that hold their own backward; they have no gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from insum.compat import assert_async
from insum.lang.bind import Value
from insum.ops import decode
from insum.plan.facts import known, pass_by, version_of
from insum.request import Prepared, Request, prepare
from insum.settings import settings

#: Selects of the dimensions of a tensor: which, and at which place.
Selects = tuple[tuple[int, int], ...]


# --- index tensors that are parts of others -------------------------------------------------------------------------------------

_parts: dict[int, tuple[weakref.ref[Tensor], int, dict[Selects, Tensor]]] = {}


def part(base: Tensor, selects: Selects) -> Tensor:
    """``base`` at fixed places of some dimensions; the same object as long as ``base`` lives unchanged, so that what is known of it stays known."""
    if not selects:
        return base
    key, version = id(base), version_of(base)
    entry = _parts.get(key)
    if entry is None or entry[0]() is not base or entry[1] != version:
        entry = _parts[key] = (weakref.ref(base, lambda _: _parts.pop(key, None)), version, {})
    if selects not in entry[2]:
        # Of .data, because a view would keep its base alive, and with it this entry.
        entry[2][selects] = _select(base.data, selects)
    return entry[2][selects]


def _select(base: Tensor, selects: Selects) -> Tensor:
    for dim, place in reversed(selects):
        base = base.select(dim, place)
    return base


@functools.lru_cache(maxsize=4096)
def _views(text: str) -> tuple[tuple[str, str, Selects], ...]:
    """``name<base:dim.place:...;...`` taken apart."""
    found = []
    for one in text.split(";") if text else ():
        name, _, rest = one.partition("<")
        base, *selects = rest.split(":")
        found.append((name, base, tuple((int(d), int(p)) for d, _, p in (s.partition(".") for s in selects))))
    return tuple(found)


# --- index tensors that are seen once -------------------------------------------------------------------------------------------

#: Calls of a statement with index tensors that were never seen before, less those with known ones; and the last tensor that was new.
_strangers: dict[tuple[str, str], int] = {}
_last: dict[tuple[str, str], weakref.ref[Tensor]] = {}
_PATIENCE = 2


def is_passing(statement: str, name: str, tensor: Tensor, marked: bool) -> bool:
    """Whether an index tensor is not worth looking at closely: it is made at every call, or each call has come with another."""
    if tensor.is_cpu or torch.are_deterministic_algorithms_enabled():
        return False
    facts = known(tensor)
    if facts is not None and not facts.passing:
        _strangers[statement, name] = 0
        return False
    if marked or torch.cuda.is_current_stream_capturing():
        return True
    last = _last.get((statement, name))
    if last is not None and last() is tensor:
        _strangers[statement, name] = 0  # it came back
        return False
    _last[statement, name] = weakref.ref(tensor)
    seen = _strangers[statement, name] = _strangers.get((statement, name), 0) + 1
    return seen > _PATIENCE


def _wrap(tensor: Tensor, size: int, passing: bool) -> Tensor:
    """Negative values counted from the end, where there are any."""
    if passing:
        return torch.where(tensor < 0, tensor + size, tensor)
    facts = known(tensor)
    low = facts.low if facts is not None else int(tensor.min()) if tensor.numel() and not tensor.is_cpu else None
    if low is None:
        return torch.where(tensor < 0, tensor + size, tensor) if tensor.numel() and bool((tensor < 0).any()) else tensor
    if low >= 0:
        return tensor
    if facts is None:
        return torch.where(tensor < 0, tensor + size, tensor)
    if ("wrapped", size) not in facts.derived:
        facts.derived["wrapped", size] = torch.where(tensor < 0, tensor + size, tensor)
    wrapped: Tensor = facts.derived["wrapped", size]
    return wrapped


# --- kernels --------------------------------------------------------------------------------------------------------------------


def _read(arguments: Sequence[Any]) -> tuple[Request, dict[str, Value], tuple[str, ...], frozenset[str]]:
    """Request, tensors by the names of the statement, index tensors that wrap, and those that were made for this call."""
    statement, names, tensors, views, size_names, sizes, wraps, passing = arguments
    request, bases = decode((statement, names, tensors, "", [], size_names, sizes, "", None, ""))
    values: dict[str, Value] = {}
    parts = _views(views)
    taken = {base for _, base, _ in parts}
    for name, value in bases.items():
        if name not in taken:
            values[name] = value
    for name, base, selects in parts:
        tensor = bases[base]
        assert isinstance(tensor, Tensor)
        values[name] = part(tensor, selects) if type(tensor) is Tensor else _select(tensor, selects)
    return request, values, tuple(wraps.split(",")) if wraps else (), frozenset(passing.split(",")) if passing else frozenset()


def _ready(prepared: Prepared, values: dict[str, Value], wraps: tuple[str, ...], marked: frozenset[str]) -> Mapping[str, Value]:
    """Index tensors as the statement takes them: without negative values, and known, or known to be seen once."""
    limits = {name: high + 1 for name, _, high in prepared.ranges}
    for name, limit in limits.items():
        tensor = values[name]
        assert isinstance(tensor, Tensor)
        passing = is_passing(prepared.request.statement, name, tensor, name in marked)
        if name in wraps:
            tensor = values[name] = _wrap(tensor, limit, passing)
        if passing:
            if settings.check != "never" and tensor.numel():
                low, high = torch.aminmax(tensor)
                assert_async((low >= 0) & (high < limit), f"insum: an index of {name} is out of range")
            pass_by(tensor, limit - 1)
    prepared.verify(values)
    return values


def _fused(*arguments: Any) -> Tensor:
    request, values, wraps, marked = _read(arguments)
    prepared = prepare(request, values)
    return prepared.run("new", _ready(prepared, values, wraps, marked), None)


def _fused_into(initial: Tensor, *arguments: Any) -> Tensor:
    request, values, wraps, marked = _read(arguments)
    prepared = prepare(request, values, initial)
    return prepared.run("from", _ready(prepared, values, wraps, marked), initial)


def _fused_into_(target: Tensor, *arguments: Any) -> None:
    request, values, wraps, marked = _read(arguments)
    prepared = prepare(request, values, target)
    prepared.run("into", _ready(prepared, values, wraps, marked), target)


def _fused_fake(*arguments: Any) -> Tensor:
    request, values, _, _ = _read(arguments)
    problem = request.bind(values)
    return torch.empty(problem.shape, dtype=problem.dtype, device=problem.device)


def _fused_into_fake(initial: Tensor, *arguments: Any) -> Tensor:
    return torch.empty(initial.shape, dtype=initial.dtype, device=initial.device)


def _fused_into_fake_(target: Tensor, *arguments: Any) -> None:
    return None


_ARGUMENTS = "str statement, str names, Tensor[] tensors, str views, str size_names, SymInt[] sizes, str wraps, str passing"
_library = torch.library.Library("insum", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, kernel: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"insum::{name}", fake, lib=_library)


_define(f"fused({_ARGUMENTS}) -> Tensor", _fused, _fused_fake)
_define(f"fused_into(Tensor initial, {_ARGUMENTS}) -> Tensor", _fused_into, _fused_into_fake)
_define(f"fused_into_(Tensor(a!) target, {_ARGUMENTS}) -> ()", _fused_into_, _fused_into_fake_)
