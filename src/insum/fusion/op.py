"""The ops that fused chains become: ``insum::fused``, into a tensor that is there
``insum::fused_into`` and ``insum::fused_into_``, and for largest and smallest values
``insum::fused_extremum``.

They mean what ``insum::contract`` means, and take index tensors the way compiled graphs have them:
as rows of a larger tensor, with negative values that count from the end, and made anew at each
call. They stand in graphs that hold their own backward; they have no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from insum.compat.calls import PLAIN, are_plain, shorten
from insum.fusion import ways
from insum.fusion.computed import computed
from insum.fusion.indices import (
    Selects,
    is_passing,
    looks_are_free,
    part,
    read,
    seen_once,
    select,
    wrapped,
    written,
)
from insum.lang.expr import Access
from insum.lang.parser import parse
from insum.ops import decode
from insum.plan.facts import known, pass_by
from insum.request import Request, prepare
from insum.runtime import fused
from insum.runtime.program import Program
from insum.settings import settings


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor that an op computes itself, from integer tensors that it is passed."""

    name: str
    program: str
    sources: tuple[str, ...]
    sizes: tuple[int, ...]
    """Places of the sizes that the program takes among those of the op."""
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.name}={self.program}@{','.join(self.sources)}"
            f"@{','.join(map(str, self.sizes))}@{self.dtype}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """All of a fused op that is not a tensor or a size. As text it is the op's first argument.

    The text is one line without quotes: Inductor writes the nodes of a graph, unquoted, into
    comments of the code that it generates.
    """

    statement: str
    names: tuple[str, ...]
    (
        """Of the tensors that are passed: those of the statement, tensors of which index """
        """tensors """
        """are parts, and what others are computed from."""
    )
    views: tuple[tuple[str, str, Selects], ...]
    """Index tensors: name, tensor of which it is a part, and which part."""
    size_names: str
    wraps: frozenset[str]
    """Index tensors in which a negative value counts from the end."""
    passing: frozenset[str]
    """Index tensors that the graph makes anew at each call."""
    origins: tuple[Computed, ...] = ()
    (
        """Tensors that are computed from others, once while those stay the same. They are not """
        """passed."""
    )

    def __str__(self) -> str:
        views = ";".join(
            ":".join([f"{name}<{base}", *written(selects)]) for name, base, selects in self.views
        )
        origins = ";".join(map(str, self.origins))
        fields = (
            self.statement,
            ",".join(self.names),
            views,
            self.size_names,
            ",".join(sorted(self.wraps)),
            ",".join(sorted(self.passing)),
            origins,
        )
        return "|".join(fields)

    @property
    def plain(self) -> tuple[tuple[str, int], ...]:
        """Tensors that the statement reads as they are, and their places among those that are
        passed.
        """
        taken = {base for _, base, _ in self.views} | {
            name for one in self.origins for name in one.sources
        }
        return tuple((name, place) for place, name in enumerate(self.names) if name not in taken)


@functools.lru_cache(maxsize=4096)
def spec_of(text: str) -> Spec:
    """The reverse of ``str(spec)``."""
    statement, names, views, size_names, wraps, passing, origins = text.split("|")
    read_views = []
    for one in _split(views, ";"):
        name, _, rest = one.partition("<")
        base, *selects = rest.split(":")
        read_views.append((name, base, read(selects)))
    found = tuple(map(_computed_of, _split(origins, ";")))
    return Spec(
        statement,
        _split(names, ","),
        tuple(read_views),
        size_names,
        frozenset(_split(wraps, ",")),
        frozenset(_split(passing, ",")),
        found,
    )


def _computed_of(text: str) -> Computed:
    name, _, rest = text.partition("=")
    program, sources, sizes, dtype = rest.split("@")
    return Computed(name, program, _split(sources, ","), tuple(map(int, _split(sizes, ","))), dtype)


def _split(line: str, mark: str) -> tuple[str, ...]:
    return tuple(line.split(mark)) if line else ()


@dataclass(frozen=True, slots=True)
class Places:
    """A specification by the places of tensors and sizes among those that are passed."""

    plain: tuple[tuple[str, int], ...]
    views: tuple[tuple[str, str, int | None, Selects], ...]
    (
        """Index tensors: name, tensor of which it is a part, its place where it is passed, and """
        """which part."""
    )
    origins: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...]
    (
        """Computed tensors: name, program, and the places of tensors and sizes that it is """
        """applied """
        """to."""
    )
    decisive: tuple[int, ...]
    """Tensors that decide index tensors, and what is computed."""


@functools.lru_cache(maxsize=4096)
def _places(spec: Spec) -> Places:
    place = {name: k for k, name in enumerate(spec.names)}
    origins = tuple(
        (one.name, one.program, tuple(place[s] for s in one.sources), one.sizes)
        for one in spec.origins
    )
    views = tuple((name, base, place.get(base), selects) for name, base, selects in spec.views)
    decisive = dict.fromkeys(
        [at for _, _, at, _ in views if at is not None]
        + [k for _, _, sources, _ in origins for k in sources]
    )
    return Places(spec.plain, views, origins, tuple(decisive))


def _values(spec: Spec, tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Tensors by the names of the statement."""
    places = _places(spec)
    made: dict[str, Tensor] = {}
    for name, program, sources, own in places.origins:
        made[name] = computed(
            program, tuple(sizes[k] for k in own), tuple(tensors[k] for k in sources)
        )
    found: dict[str, Any] = {}
    for name, base, place, selects in places.views:
        if place is None:
            found[name] = (part if type(made[base]) in PLAIN else select)(made[base], selects)
        elif type(tensors[place]) not in PLAIN:
            found[name] = select(tensors[place], selects)
        elif name in spec.passing:
            # A new object: compiled code may fill this one with other values, which no version
            # counter tells.
            found[name] = select(tensors[place].data, selects)
        else:
            found[name] = part(tensors[place], selects)
    bases = {base for _, base, _, _ in places.views}
    found |= {name: value for name, value in made.items() if name not in bases}
    for name, at in places.plain:
        found[name] = tensors[at]
    return found


def _request(spec: Spec, sizes: Sequence[Any]) -> Request:
    return decode((spec.statement, "", [], "", [], spec.size_names, sizes, "", None, ""))[0]


def _run(
    mode: str, target: Tensor | None, text: str, tensors: Sequence[Tensor], sizes: Sequence[int]
) -> Tensor:
    quick = ways.run_path(text, mode, tensors, sizes, target)
    if quick is not None:
        return quick
    spec = spec_of(text)
    given = (*sizes,)
    values = _values(spec, tensors, given)
    passing = False
    for name, _, _ in spec.views:
        passing |= is_passing(spec, name, values[name], name in spec.passing)
    key = spec, given, mode, passing
    quick = ways.run(key, values, target) if mode != "from" else None
    if quick is None and passing and mode != "from":
        quick = ways.stretch((spec, mode), values, given, target)
    if quick is not None:
        return quick
    before = dict(values)
    result, program = _run_long(mode, target, spec, given, values, passing, key)
    if (
        program is not None
        and not passing
        and not spec.passing
        and all(values[name] is before[name] for name in values)
    ):
        places = _places(spec)
        ways.keep_path(
            text, mode, program, places.plain, places.decisive, (tensors, given, target), values
        )
    return result


def _run_long(
    mode: str,
    target: Tensor | None,
    spec: Spec,
    sizes: tuple[int, ...],
    values: dict[str, Any],
    passing: bool,
    key: object,
) -> tuple[Tensor, Program | str | None]:
    """The result, and the program for calls that are like this one, where it may be kept."""
    prepared = prepare(_request(spec, sizes), values, target)
    limits = tuple((name, high + 1, name in spec.wraps) for name, _, high in prepared.ranges)
    given = dict(values)
    for name, limit, wrap in limits:
        if passing:
            values[name] = seen_once(name, values[name], limit, wrap)
            pass_by(values[name], limit - 1)
        elif wrap:
            values[name] = wrapped(values[name], limit)
    prepared.verify(values)
    if not passing and any(_out_of_sight(values[name]) for name, _, _ in limits):
        return replace(prepared, fusable=False).run(mode, values, target), None
    result = prepared.run(mode, values, target)
    looked = (
        settings.check == "never"
        or settings.check != "always"
        and not any(map(looks_are_free, values.values()))
    )
    if not prepared.fusable or mode == "from" or not looked:
        return result, None
    program = fused.lookup(prepared.problem, values, target, None)
    if passing or all(values[name] is given[name] for name, _, _ in limits):
        ways.keep(key, program, given, limits if passing else (), target)
    if passing:
        rank = _rank(spec) if spec.size_names.startswith("out#") else 0
        ways.keep_stretch((spec, mode), program, values, spec.wraps, rank, target)
    return result, program


def _out_of_sight(tensor: Tensor) -> bool:
    """Whether nothing is known of an index tensor and nothing can be found out, since a CUDA graph
    is being captured.
    """
    return tensor.is_cuda and known(tensor) is None and torch.cuda.is_current_stream_capturing()


def _fused(spec: str, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    return _run("new", None, spec, tensors, sizes)


def _fused_into(initial: Tensor, spec: str, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    return _run("from", initial, spec, tensors, sizes)


def _fused_into_(target: Tensor, spec: str, tensors: list[Tensor], sizes: list[int]) -> None:
    _run("into", target, spec, tensors, sizes)


def _fused_extremum(
    base: Tensor, spec: str, tensors: list[Tensor], sizes: list[int], include_self: bool
) -> Tensor:
    flat = sizes[: _scattered(spec)[0]]  # the statement has no dimensions of size 1
    if include_self:
        found = _run("from", base.reshape(flat), spec, tensors, sizes)
    else:
        found = _run("new", None, spec, tensors, sizes)
        present = _present(spec, tensors, tuple(sizes))
        if present is not None:
            found = torch.where(present, found, base.reshape(flat))
    return found if found.shape == base.shape else found.reshape(base.shape)


@functools.lru_cache(maxsize=4096)
def _scattered(text: str) -> tuple[int, int, str]:
    """Of a statement's result the number of dimensions, the one that is scattered to, and the index
    tensor that does.
    """
    indices = parse(spec_of(text).statement).target.indices
    dim, name = next(
        (d, i.atom.tensor) for d, i in enumerate(indices) if isinstance(i.atom, Access)
    )
    return len(indices), dim, name


def _present(text: str, tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> Tensor | None:
    """Rows that something is scattered to, as a mask over the result; None where these are all."""
    rank, dim, name = _scattered(text)
    tensor = _values(spec_of(text), tensors, sizes)[name]
    rows, facts = int(sizes[dim]), known(tensor) if type(tensor) in PLAIN else None
    mask: Tensor | None
    if facts is None or facts.passing or looks_are_free(tensor):
        mask = _mask(tensor, rows)
    elif ("present", rows) in facts.derived:
        mask = facts.derived["present", rows]
    else:
        mask = found = _mask(tensor, rows)
        if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            mask = facts.derived["present", rows] = None if bool(found.all()) else found
    return None if mask is None else mask.view([rows if d == dim else 1 for d in range(rank)])


def _mask(tensor: Tensor, rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.bool, device=tensor.device).index_fill(
        0, tensor.reshape(-1).long(), True
    )


def _fused_extremum_fake(
    base: Tensor, spec: str, tensors: list[Tensor], sizes: list[Any], include_self: bool
) -> Tensor:
    return torch.empty(base.shape, dtype=base.dtype, device=base.device)


def _fused_fake(spec: str, tensors: list[Tensor], sizes: list[Any]) -> Tensor:
    read = spec_of(spec)
    if read.origins:  # nothing is computed here: it may be counted out
        return torch.empty(
            sizes[: _rank(read)], dtype=_dtype(read, tensors), device=tensors[0].device
        )
    problem = _request(read, sizes).bind(_values(read, tensors, ()))
    return torch.empty(problem.shape, dtype=problem.dtype, device=problem.device)


def _rank(spec: Spec) -> int:
    """The number of dimensions of a scattered result, whose sizes come first."""
    return len(parse(spec.statement).target.indices)


def _dtype(spec: Spec, tensors: Sequence[Tensor]) -> torch.dtype:
    """Of the result: that of the factors with a dimension, or where there are none, of all."""
    bases = {base for _, base, _ in spec.views}
    read = [(tensors[place].dtype, tensors[place].dim()) for _, place in spec.plain]
    read += [(getattr(torch, one.dtype), 1) for one in spec.origins if one.name not in bases]
    ranked = [dtype for dtype, rank in read if rank] or [dtype for dtype, _ in read]
    return functools.reduce(torch.promote_types, ranked)


def _fused_into_fake(initial: Tensor, spec: str, tensors: list[Tensor], sizes: list[Any]) -> Tensor:
    return torch.empty(initial.shape, dtype=initial.dtype, device=initial.device)


def _fused_into_fake_(target: Tensor, spec: str, tensors: list[Tensor], sizes: list[Any]) -> None:
    return None


_ARGUMENTS = "str spec, Tensor[] tensors, SymInt[] sizes"
_library = torch.library.Library("insum", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, kernel: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"insum::{name}", fake, lib=_library)


_define(f"fused({_ARGUMENTS}) -> Tensor", _fused, _fused_fake)
_define(f"fused_into(Tensor initial, {_ARGUMENTS}) -> Tensor", _fused_into, _fused_into_fake)
_define(
    f"fused_extremum(Tensor base, {_ARGUMENTS}, bool include_self) -> Tensor",
    _fused_extremum,
    _fused_extremum_fake,
)
_define(f"fused_into_(Tensor(a!) target, {_ARGUMENTS}) -> ()", _fused_into_, _fused_into_fake_)


# --- the same before the dispatcher is asked, for calls like earlier ones -------------------------


def _quick(spec: str, tensors: list[Tensor], sizes: list[int]) -> tuple[Tensor] | None:
    found = ways.run_path(spec, "new", tensors, sizes, None, True)
    return None if found is None else (found,)


def _quick_into_(
    target: Tensor, spec: str, tensors: list[Tensor], sizes: list[int]
) -> tuple[None] | None:
    if type(target) not in PLAIN:
        return None
    return None if ways.run_path(spec, "into", tensors, sizes, target, True) is None else (None,)


def _quick_extremum(
    base: Tensor, spec: str, tensors: list[Tensor], sizes: list[int], include_self: bool
) -> tuple[Tensor] | None:
    if (
        include_self
        or type(base) not in PLAIN
        or not are_plain(tensors)
        or not ways.has_path(spec, "new")
    ):
        return None
    return (_fused_extremum(base, spec, tensors, sizes, include_self),)


shorten(torch.ops.insum.fused.default, _quick)
shorten(torch.ops.insum.fused_into_.default, _quick_into_)
shorten(torch.ops.insum.fused_extremum.default, _quick_extremum)
