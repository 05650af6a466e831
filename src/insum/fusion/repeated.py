"""Calls of fused ops that are like one before. Index tensors of compiled graphs are parts of
others, as the two rows of a tensor of edges: here what runs such a call is found, and launched,
without making them.

What is compared is what every call is found by: kinds, sizes and strides by a guard of torch's, and
index tensors by what is remembered of them (`insum.memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.call.overlap import shares_memory, written_to
from insum.call.prepared import BoundCall
from insum.compat.calls import kinds_guard, modes_now
from insum.fusion.indices import Selects, select
from insum.runtime.launch import interpreting
from insum.settings import settings

if TYPE_CHECKING:
    from insum.runtime.fused import FusedCall

#: Calls of one specification, and specifications.
MOST_ALIKE, MOST_SPECS = 4, 1024


@dataclass(frozen=True, slots=True, eq=False)
class ComputedBefore:
    """A tensor that follows from others, the ``sources``, with the first of which it is kept: under
    which key, and how it lies in memory.
    """

    name: str
    key: object
    sources: tuple[int, ...]
    place: memory.MemoryPlace

    def found(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """As it was computed, where nothing has changed since."""
        first, *others = [memory.known(tensors[number]) for number in self.sources]
        if first is None or None in others:
            return None
        key = (self.key, *[o.serial for o in others if o is not None]) if others else self.key
        value: Tensor | None = first.get(key)
        return value if value is not None and memory.place_of(value) == self.place else None


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedCall:
    """A call over tensors of certain kinds, sizes and strides, and parts of them.

    Attributes:
        alike: whether tensors are like those of the call, of which there are ``count``; the last is
            what is written to.
        whole: names and places of tensors that are read as they are.
        parts: of the others the name, the place of the tensor of which it is a part, how many bytes
            behind the first of that it begins, and which part it is.
        indices: of each index tensor the place of the tensor of which it is a part, how that lies
            in memory, and which part.
        computed: tensors that follow from integer tensors.
    """

    alike: Callable[..., bool]
    count: int
    sizes: list[int]
    modes: tuple[Any, ...]
    fused: FusedCall
    whole: tuple[tuple[str, int], ...]
    parts: tuple[tuple[str, int, int, Selects], ...]
    indices: tuple[tuple[int, memory.MemoryPlace, Selects], ...]
    computed: tuple[ComputedBefore, ...]

    def run(self, tensors: Sequence[Tensor], target: Tensor | None) -> Tensor | None:
        """The result; None where what is launched is not known without making the parts."""
        entries: list[memory.Entry] = []
        entry: memory.Entry | None = None
        last = -1
        for number, place, selects in self.indices:
            if number != last:
                last, entry = number, memory.known(tensors[number], place)
            part = entry.parts.get(selects) if entry is not None and selects else entry
            if part is None or not part.held:
                return None
            entries.append(part)
        found = self.fused.settled(target, entries)
        if found is None or target is not None and shares_memory(target, tensors):
            return None
        values: dict[str, Any] = {name: tensors[number] for name, number in self.whole}
        for one in self.computed:
            value = one.found(tensors)
            if value is None:
                return None
            values[one.name] = value
        for name, number, start, selects in self.parts:
            base = tensors[number]
            values[name] = select(base, selects) if interpreting() else base.data_ptr() + start
        if target is None:
            return found(values)
        found(values, target)
        return written_to(target)


_alike: dict[str, tuple[RepeatedCall, ...]] = {}


def like(
    text: str, tensors: Sequence[Tensor], sizes: Sequence[int], target: Tensor | None
) -> RepeatedCall | None:
    """The call of a specification that this one is like, if there was one."""
    known = _alike.get(text)
    if known is None:
        return None
    given, modes = tensors if target is None else (*tensors, target), modes_now(settings)
    count = len(given)
    for one in known:
        if one.count == count and one.sizes == sizes and one.modes == modes:
            if one.alike(*given):
                return one
    return None


def note(
    text: str,
    parts: Sequence[tuple[str, int, Selects]],
    computed: Sequence[tuple[str, object, tuple[int, ...]]],
    call: BoundCall,
    values: Mapping[str, Any],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    target: Tensor | None,
) -> None:
    """Recognise calls like this one from now on, where nothing decides what they launch but their
    sizes and index tensors, and something is kept with those; ``parts``: of every tensor of the
    statement its name, the place of what it is a part of, and which part; ``computed``: of those
    that follow from others the name, what they are kept under, and the places of the others.
    """
    if not call.prepared.kernels_look:  # then the host looks at indices, at every call
        return
    fused = call.fused_alone(values, in_place=target is not None)
    if fused is None or not fused.keeps or not fused.is_by_indices(values):
        return
    if any(name in fused.kind.indices for name, _, _ in computed):
        return
    alike = like(text, tensors, sizes, target)
    if alike is None or alike.fused is not fused:
        made = _made(parts, computed, fused, values, tensors, sizes, target)
        others = [one for one in _alike.pop(text, ()) if one is not alike]
        keep(_alike, text, (made, *others)[:MOST_ALIKE], MOST_SPECS)
    for name, number, selects in parts:
        entry = memory.known(values[name]) if selects and name in fused.kind.indices else None
        if entry is not None and entry.held:
            memory.entry_of(tensors[number]).note_part(selects, entry)


def _made(
    parts: Sequence[tuple[str, int, Selects]],
    computed: Sequence[tuple[str, object, tuple[int, ...]]],
    fused: FusedCall,
    values: Mapping[str, Any],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    target: Tensor | None,
) -> RepeatedCall:
    at = {name: (number, selects) for name, number, selects in parts}
    given = tensors if target is None else (*tensors, target)
    return RepeatedCall(
        kinds_guard(given, exact=True),
        len(given),
        list(sizes),
        modes_now(settings),
        fused,
        tuple((name, number) for name, number, selects in parts if not selects),
        tuple(
            (name, number, _bytes_between(tensors[number], values[name]), selects)
            for name, number, selects in parts
            if selects
        ),
        tuple((n, memory.place_of(tensors[n]), how) for n, how in map(at.get, fused.kind.indices)),  # type: ignore[misc]
        tuple(
            ComputedBefore(name, key, sources, memory.place_of(values[name]))
            for name, key, sources in computed
        ),
    )


def _bytes_between(whole: Tensor, part: Tensor) -> int:
    """How far behind the first element of a tensor a part of it begins."""
    return int(part.storage_offset() - whole.storage_offset()) * whole.itemsize
