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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.call import in_kernels, running
from insum.call.prepared import BoundCall, kinds_of
from insum.call.request import Form, Request
from insum.compat.calls import PLAIN, are_plain, shorten
from insum.compat.streams import is_recorded
from insum.fusion.computed import computed, kept_under
from insum.fusion.defining import define
from insum.fusion.indices import Selects, read, select, wrapped, written
from insum.fusion.repeated import like, note, note_kept_rows
from insum.fusion.report import note_run
from insum.lang.expr import Access
from insum.lang.parser import parse
from insum.ops.encoding import decode
from insum.plan.path import AUTO

#: Before the specification of a statement whose result keeps rows of the last tensor that is
#: passed: those that nothing is scattered to.
KEPT_ROWS = "kept rows, "


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor that an op computes itself, from integer tensors that it is passed.

    Attributes:
        sizes: places of the sizes that the program takes among those of the op.
    """

    name: str
    program: str
    sources: tuple[str, ...]
    sizes: tuple[int, ...]
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

    Attributes:
        names: of the tensors that are passed: those of the statement, tensors of which index
            tensors are parts, and what others are computed from.
        views: index tensors: name, tensor of which it is a part, and which part.
        wraps: index tensors in which a negative value counts from the end.
        passing: index tensors that the graph makes anew at each call.
        origins: tensors that are computed from others, once while those stay the same. They are not
            passed.
    """

    statement: str
    names: tuple[str, ...]
    views: tuple[tuple[str, str, Selects], ...]
    size_names: str
    wraps: frozenset[str]
    passing: frozenset[str]
    origins: tuple[Computed, ...] = ()

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


@dataclass(frozen=True, slots=True, eq=False)
class SpecPlaces:
    """A specification by the places of tensors and sizes among those that are passed, and what its
    calls are found by: all that is the same at every call is read out of the text once.

    Attributes:
        count: how many of the sizes are the statement's.
        views: parts of tensors that are passed: name, place, which part, and whether the graph
            makes the tensor anew at each call.
        made: parts of computed tensors: name, that of the tensor, and which part.
        origins: computed tensors: name, program, and the places of tensors and sizes that it is
            applied to.
        steady: whether all tensors are passed, parts of those that are and that stay, or computed.
        parts: of every tensor of the statement its name, of what it is a part, and which: the place
            of a tensor that is passed, or behind those, that of a computed one.
    """

    form: Form
    count: int
    plain: tuple[tuple[str, int], ...]
    views: tuple[tuple[str, int, Selects, bool], ...]
    made: tuple[tuple[str, str, Selects], ...]
    origins: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...]
    steady: bool
    parts: tuple[tuple[str, int, Selects], ...]


@functools.lru_cache(maxsize=4096)
def places_of(text: str) -> SpecPlaces:
    spec = spec_of(text)
    note_run(spec.statement)  # here, because this is done once for each
    place = {name: k for k, name in enumerate(spec.names)}
    every = place | {one.name: k for k, one in enumerate(spec.origins, len(place))}
    bases = {base for _, base, _ in spec.views}
    origins = tuple(
        (one.name, one.program, tuple(place[s] for s in one.sources), one.sizes)
        for one in spec.origins
    )
    form = _form(spec)
    return SpecPlaces(
        form,
        sum(1 if length is None else length for _, length in form.size_keys),
        spec.plain,
        tuple(
            (name, place[base], selects, name in spec.passing)
            for name, base, selects in spec.views
            if base in place
        ),
        tuple(one for one in spec.views if one[1] not in place),
        origins,
        not spec.passing,
        (
            *((name, k, ()) for name, k in spec.plain),
            *((one.name, every[one.name], ()) for one in spec.origins if one.name not in bases),
            *((name, every[base], how) for name, base, how in spec.views),
        ),
    )


def _form(spec: Spec) -> Form:
    """What the calls of a specification are found by, whatever the sizes."""
    lengths = [key.rpartition("#")[2] for key in _split(spec.size_names, ";")]
    most = sum(int(length) if length.isdigit() else 1 for length in lengths)
    return _request(spec, [1] * most).form


def _values(text: str, tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Tensors by the names of the statement."""
    places = places_of(text)
    found: dict[str, Any] = {}
    for name, place, selects, passing in places.views:
        base = tensors[place]
        if passing and type(base) in PLAIN:
            # A new object: compiled code may fill this one with other values, which no version
            # counter tells.
            base = base.data
        found[name] = select(base, selects)
    if places.origins:
        _add_computed(places, tensors, sizes, found)
    for name, place in places.plain:
        found[name] = tensors[place]
    return found


def _add_computed(
    places: SpecPlaces, tensors: Sequence[Tensor], sizes: tuple[int, ...], found: dict[str, Any]
) -> None:
    made = {
        name: computed(program, tuple(sizes[k] for k in own), tuple(tensors[k] for k in sources))
        for name, program, sources, own in places.origins
    }
    for name, base, selects in places.made:
        found[name] = select(made[base], selects)
    bases = {base for _, base, _ in places.made}
    found |= {name: value for name, value in made.items() if name not in bases}


def _request(spec: Spec, sizes: Sequence[Any]) -> Request:
    plain = decode((spec.statement, "", [], "", [], spec.size_names, sizes, "", None, "", AUTO))[0]
    return replace(plain, wraps=spec.wraps)


def _run(
    mode: str, target: Tensor | None, text: str, tensors: Sequence[Tensor], sizes: Sequence[int]
) -> Tensor:
    alike = like(text, tensors, sizes, target) if mode != "from" else None
    found = None if alike is None else alike.run(tensors, target)
    return _run_anew(mode, target, text, tensors, sizes) if found is None else found[0]


def _run_anew(
    mode: str, target: Tensor | None, text: str, tensors: Sequence[Tensor], sizes: Sequence[int]
) -> Tensor:
    """As if there had been no call like it."""
    if text.startswith(KEPT_ROWS):
        return _run_kept_rows(text, tensors, sizes)
    found = _OpCall.of(text, tensors, sizes, target)
    result = running.run(found.call, mode, found.values, target)
    if mode != "from":
        found.noted(target)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _OpCall:
    """A call of a fused op: what runs it, on which values of its statement."""

    text: str
    tensors: Sequence[Tensor]
    sizes: Sequence[int]
    call: BoundCall
    values: dict[str, Any]

    @classmethod
    def of(
        cls, text: str, tensors: Sequence[Tensor], sizes: Sequence[int], target: Tensor | None
    ) -> _OpCall:
        places, given = places_of(text), (*sizes,)
        values = _values(text, tensors, given)
        call = kinds_of(places.form).find(values, given[: places.count], target)
        call.verify(values)
        return cls(text, tensors, sizes, call, values)

    def noted(self, target: Tensor | None) -> None:
        """Calls like it are recognised from now on, where all that it is passed stays."""
        places = places_of(self.text)
        if not places.steady:
            return
        kept = []
        for _, program, sources, own in places.origins:
            numbers = tuple(self.sizes[k] for k in own)
            value = computed(program, numbers, tuple(self.tensors[k] for k in sources))
            kept.append((kept_under(program, numbers), sources, value))
        given = self.tensors, self.sizes, target
        note(self.text, places.parts, kept, self.call, self.values, *given)


#: A fused op: its specification, tensors and sizes.
FusedArguments: TypeAlias = tuple[str, Sequence[Tensor], Sequence[int]]


def run_at_once(ops: Sequence[FusedArguments]) -> list[Tensor]:
    """What ``insum::fused`` does for several over the same tensors, in one launch where it can."""
    found = [_OpCall.of(*one, None) for one in ops]
    results = in_kernels.at_once([one.call for one in found], [one.values for one in found])
    every = []
    for one, result in zip(found, results):
        every.append(running.run(one.call, "new", one.values, None) if result is None else result)
        one.noted(None)
    return every


def run_fused(spec: str, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    """What ``insum::fused`` does."""
    return _run("new", None, spec, tensors, sizes)


def _fused_into(initial: Tensor, spec: str, tensors: list[Tensor], sizes: list[int]) -> Tensor:
    return _run("from", initial, spec, tensors, sizes)


def _fused_into_(target: Tensor, spec: str, tensors: list[Tensor], sizes: list[int]) -> None:
    _run("into", target, spec, tensors, sizes)


def _fused_extremum(
    base: Tensor, spec: str, tensors: list[Tensor], sizes: list[int], include_self: bool
) -> Tensor:
    if not include_self:
        return run_fused(KEPT_ROWS + spec, [*tensors, base], sizes)
    flat = _flat(base, spec, sizes)
    there = base.clone(memory_format=torch.contiguous_format)
    found = _run("into", there if flat is None else there.view(flat), spec, tensors, sizes)
    return found if flat is None else there


def _flat(base: Tensor, spec: str, sizes: Sequence[int]) -> list[int] | None:
    """The shape of a statement's result, where it has not all of the dimensions of size 1."""
    rank = _scattered(spec)[0]
    return None if base.dim() == rank else list(sizes[:rank])


def _run_kept_rows(text: str, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """A statement over all tensors but the last, of which it keeps the rows that nothing is
    scattered to.
    """
    spec, (*own, base) = text.removeprefix(KEPT_ROWS), tensors
    found, flat = _run("new", None, spec, own, sizes), _flat(base, spec, sizes)
    mask, key = _present(spec, own, (*sizes,))
    call = like(spec, own, sizes, None)
    if call is not None:
        note_kept_rows(text, call, (_scattered(spec)[2], key), tensors, sizes)
    if flat is None:
        return torch.where(mask, found, base)
    return torch.where(mask, found, base.reshape(flat)).view(base.shape)


@functools.lru_cache(maxsize=4096)
def _scattered(text: str) -> tuple[int, int, str, bool]:
    """Of a statement's result the number of dimensions, the one that is scattered to, the index
    tensor that does, and whether a negative value of it counts from the end.
    """
    spec = spec_of(text)
    indices = parse(spec.statement).target.indices
    dim, name = next(
        (d, i.atom.tensor) for d, i in enumerate(indices) if isinstance(i.atom, Access)
    )
    return len(indices), dim, name, name in spec.wraps


def _present(text: str, tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> tuple[Tensor, object]:
    """Rows that something is scattered to, as a mask over the result, and what it is kept under."""
    rank, dim, name, wraps = _scattered(text)
    tensor, rows = _index(name, text, tensors, sizes), int(sizes[dim])
    key, entry = ("present", rows, rank, dim, wraps), memory.known(tensor)
    shape = (1,) * dim + (rows,) + (1,) * (rank - dim - 1)

    def make() -> Tensor:
        return _mask(tensor, rows, wraps).view(shape)

    if is_recorded(tensor.device) and (entry is None or not entry.declared):
        return make(), key  # a graph is replayed on other values
    return memory.remembered(tensor, key, make), key


def _index(name: str, text: str, tensors: Sequence[Tensor], sizes: tuple[int, ...]) -> Tensor:
    places = places_of(text)
    for own, place, selects, passing in places.views:
        if own == name and not passing:  # of all tensors only this one is made
            return select(tensors[place], selects)
    found: Tensor = _values(text, tensors, sizes)[name]
    return found


def _mask(tensor: Tensor, rows: int, wraps: bool) -> Tensor:
    """What is out of range is reported by the statement, and marks a row that is not there."""
    places = wrapped(tensor.reshape(-1), rows) if wraps else tensor.reshape(-1)
    places = torch.where((places >= 0) & (places < rows), places, rows).long()
    found = torch.zeros(rows + 1, dtype=torch.bool, device=tensor.device)
    return found.index_fill_(0, places, True)[:rows]


def _fused_extremum_fake(
    base: Tensor, spec: str, tensors: list[Tensor], sizes: list[Any], include_self: bool
) -> Tensor:
    return torch.empty(base.shape, dtype=base.dtype, device=base.device)


def fused_fake(spec: str, tensors: list[Tensor], sizes: list[Any]) -> Tensor:
    if spec.startswith(KEPT_ROWS):
        base = tensors[-1]
        return torch.empty(base.shape, dtype=base.dtype, device=base.device)
    read = spec_of(spec)
    if read.origins:  # nothing is computed here: it may be counted out
        return torch.empty(
            sizes[: _rank(read)], dtype=_dtype(read, tensors), device=tensors[0].device
        )
    problem = _request(read, sizes).bind(_values(spec, tensors, ()))
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


define(f"fused({_ARGUMENTS}) -> Tensor", run_fused, fused_fake)
define(f"fused_into(Tensor initial, {_ARGUMENTS}) -> Tensor", _fused_into, _fused_into_fake)
define(
    f"fused_extremum(Tensor base, {_ARGUMENTS}, bool include_self) -> Tensor",
    _fused_extremum,
    _fused_extremum_fake,
)
define(f"fused_into_(Tensor(a!) target, {_ARGUMENTS}) -> ()", _fused_into_, _fused_into_fake_)


# --- the same before the dispatcher is asked, on plain terms --------------------------------------


def _quick(spec: str, tensors: list[Tensor], sizes: list[int]) -> Tensor | None:
    alike = like(spec, tensors, sizes, None)
    found = None if alike is None else alike.run(tensors, None)
    if found is not None:
        return found[0]
    return _run_anew("new", None, spec, tensors, sizes) if are_plain(tensors) else None


def _quick_into_(
    target: Tensor, spec: str, tensors: list[Tensor], sizes: list[int]
) -> Tensor | None:
    alike = like(spec, tensors, sizes, target)
    found = None if alike is None else alike.run(tensors, target)
    if found is not None:
        return found[0]
    plain = are_plain((target, *tensors))
    return _run_anew("into", target, spec, tensors, sizes) if plain else None


def _quick_extremum(
    base: Tensor, spec: str, tensors: list[Tensor], sizes: list[int], include_self: bool
) -> Tensor | None:
    if not include_self:
        return _quick(KEPT_ROWS + spec, [*tensors, base], sizes)
    plain = are_plain((base, *tensors))
    return _fused_extremum(base, spec, tensors, sizes, include_self) if plain else None


shorten(torch.ops.insum.fused.default, _quick)
shorten(torch.ops.insum.fused_into_.default, _quick_into_, gives=False)
shorten(torch.ops.insum.fused_extremum.default, _quick_extremum)
