"""The ops that fused chains become: ``insum::fused`` and, into a tensor that is there, ``insum::fused_into`` and ``insum::fused_into_``.

They mean what ``insum::contract`` means, and take index tensors the way compiled graphs have them: as rows of a larger tensor, with
negative values that count from the end, and made anew at each call. They stand in graphs that hold their own backward; they have no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from insum.compat import PLAIN
from insum.fusion import ways
from insum.fusion.indices import Selects, is_passing, looks_are_free, part, recalled, seen_once, select, wrapped
from insum.ops import decode
from insum.plan.facts import known, pass_by
from insum.request import Request, prepare
from insum.runtime import fused
from insum.settings import settings


@functools.lru_cache(maxsize=4096)
def _views(text: str) -> tuple[tuple[str, str, Selects], ...]:
    """``name<base:dim.place:...;...`` taken apart."""
    found = []
    for one in text.split(";") if text else ():
        name, _, rest = one.partition("<")
        base, *selects = rest.split(":")
        found.append((name, base, tuple((int(d), int(p)) for d, _, p in (s.partition(".") for s in selects))))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()


@functools.lru_cache(maxsize=4096)
def _origins(text: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """``base=function@source,source;...`` taken apart."""
    found = []
    for one in text.split(";") if text else ():
        base, _, rest = one.partition("=")
        function, _, sources = rest.partition("@")
        found.append((base, function, tuple(sources.split(","))))
    return tuple(found)


def _values(names: str, tensors: Sequence[Tensor], views: str, origins: str = "", sizes: tuple[int, ...] = ()) -> tuple[dict[str, Any], set[str]]:
    """Tensors by the names of the statement, and those that are computed in each call from the same tensors as before."""
    bases = dict(zip(_names(names), tensors))
    same: set[str] = set()
    for base, function, sources in _origins(origins):
        if type(bases[base]) in PLAIN and not looks_are_free(bases[base]):
            before = recalled(function, sizes, tuple(bases[name] for name in sources), bases[base])
            if before is not None:
                bases[base] = before
                same.add(base)
    found: dict[str, Any] = {}
    steady: set[str] = set()
    for name, base, selects in _views(views):
        tensor = bases[base]
        found[name] = part(tensor, selects) if type(tensor) in PLAIN else select(tensor, selects)
        if base in same:
            steady.add(name)
    taken = {base for _, base, _ in _views(views)} | {name for _, _, sources in _origins(origins) for name in sources}
    found.update((name, tensor) for name, tensor in bases.items() if name not in taken)
    return found, steady


def _request(statement: str, size_names: str, sizes: Sequence[Any]) -> Request:
    return decode((statement, "", [], "", [], size_names, sizes, "", None, ""))[0]


def _run(mode: str, target: Tensor | None, arguments: Sequence[Any]) -> Tensor:
    statement, names, tensors, views, size_names, sizes, wraps, marked, origins = arguments
    values, steady = _values(names, tensors, views, origins, (*sizes,) if origins else ())
    made = set(_names(marked)) - steady
    passing = [is_passing(statement, name, values[name], name in made) for name, _, _ in _views(views)]
    key = statement, names, views, (*sizes,), mode, any(passing)
    quick = ways.run(key, values, target) if target is None or mode == "into" else None
    return quick if quick is not None else _run_long(mode, target, _request(statement, size_names, sizes), values, _names(wraps), any(passing), key)


def _run_long(mode: str, target: Tensor | None, request: Request, values: dict[str, Any], wraps: tuple[str, ...], passing: bool, key: object) -> Tensor:
    prepared = prepare(request, values, target)
    limits = tuple((name, high + 1, name in wraps) for name, _, high in prepared.ranges)
    given = dict(values)
    for name, limit, wrap in limits:
        if passing:
            values[name] = seen_once(name, values[name], limit, wrap)
            pass_by(values[name], limit - 1)
        elif wrap:
            values[name] = wrapped(values[name], limit)
    prepared.verify(values)
    if not passing and any(_out_of_sight(values[name]) for name, _, _ in limits):
        return replace(prepared, fusable=False).run(mode, values, target)
    result = prepared.run(mode, values, target)
    if prepared.fusable and mode != "from" and settings.check != "always" and (settings.check == "never" or not any(map(looks_are_free, values.values()))):
        program = fused.lookup(prepared.problem, values, target, None)
        if passing or all(values[name] is given[name] for name, _, _ in limits):
            ways.keep(key, program, given, limits if passing else (), target)
    return result


def _out_of_sight(tensor: Tensor) -> bool:
    """Whether nothing is known of an index tensor and nothing can be found out, since a CUDA graph is being captured."""
    return tensor.is_cuda and known(tensor) is None and torch.cuda.is_current_stream_capturing()


def _fused(*arguments: Any) -> Tensor:
    return _run("new", None, arguments)


def _fused_into(initial: Tensor, *arguments: Any) -> Tensor:
    return _run("from", initial, arguments)


def _fused_into_(target: Tensor, *arguments: Any) -> None:
    _run("into", target, arguments)


def _fused_fake(*arguments: Any) -> Tensor:
    statement, names, tensors, views, size_names, sizes, _, _, origins = arguments
    problem = _request(statement, size_names, sizes).bind(_values(names, tensors, views, origins)[0])
    return torch.empty(problem.shape, dtype=problem.dtype, device=problem.device)


def _fused_into_fake(initial: Tensor, *arguments: Any) -> Tensor:
    return torch.empty(initial.shape, dtype=initial.dtype, device=initial.device)


def _fused_into_fake_(target: Tensor, *arguments: Any) -> None:
    return None


_ARGUMENTS = "str statement, str names, Tensor[] tensors, str views, str size_names, SymInt[] sizes, str wraps, str passing, str origins"
_library = torch.library.Library("insum", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, kernel: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"insum::{name}", fake, lib=_library)


_define(f"fused({_ARGUMENTS}) -> Tensor", _fused, _fused_fake)
_define(f"fused_into(Tensor initial, {_ARGUMENTS}) -> Tensor", _fused_into, _fused_into_fake)
_define(f"fused_into_(Tensor(a!) target, {_ARGUMENTS}) -> ()", _fused_into_, _fused_into_fake_)
