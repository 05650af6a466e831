"""Calls of fused ops that are like one before. Index tensors of compiled graphs are parts of
others, as the two rows of a tensor of edges: here what runs such a call is found, and launched,
without making them.

What is compared is what every call is found by: kinds, sizes and strides by a guard of torch's, and
index tensors by what is remembered of them (`insum.memory`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.call import in_kernels
from insum.call.bound import BoundCall
from insum.call.overlap import bytes_of, written_to
from insum.compat.calls import (
    CUDAGRAPH_TREES,
    in_backward,
    is_capturing,
    is_recorded,
    kinds_guard,
    modes_now,
    stream_getter,
)
from insum.fusion.indices import Selects, select
from insum.runtime import cache
from insum.runtime.check import found as offences
from insum.runtime.launch import interpreting
from insum.settings import settings

if TYPE_CHECKING:
    from insum.runtime.fused import FusedCall
    from insum.runtime.ready import Ready

#: Calls of one specification, specifications, and index tensors of one call.
MOST_ALIKE, MOST_SPECS, MOST_PREPARED = 4, 1024, 8
#: The place of a tensor among those that are passed, how many bytes behind its first one begins
#: that is part of it, and which part that is.
PlacedPart: TypeAlias = tuple[int, int, Selects]


@dataclass(frozen=True, slots=True, eq=False)
class ComputedBefore:
    """A tensor that follows from others, the ``sources``, with the first of which it is kept: under
    which key, and how it lies in memory.
    """

    name: str
    key: object
    sources: tuple[int, ...]
    place: memory.MemoryPlace

    def found(self, entries: Mapping[int, memory.Entry]) -> Tensor | None:
        """As it was computed, where nothing has changed since."""
        first, *others = [entries[number] for number in self.sources]
        key = (self.key, *[o.serial for o in others]) if others else self.key
        value: Tensor | None = first.get(key)
        return value if value is not None and memory.place_of(value) == self.place else None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRun:
    """What a call on certain index tensors launches, as long as those are the same and unchanged.
    It keeps nothing alive.

    Attributes:
        stream, epoch: on which, and when, it was prepared.
        owners: tensors that decide it: their number, the object that owns their version (of views
            the base), their storage, their version, and where in the storage they begin. What
            `memory.known` compares, of tensors of the same sizes and strides.
        entries: what is remembered of them and of their parts, and its serial.
        computed: tensors that follow from them; their numbers come behind those that are passed.
        ready: what is launched.
        reads: what that reads.
    """

    stream: int
    epoch: int
    owners: tuple[
        tuple[int, weakref.ref[Tensor], weakref.ref[torch.UntypedStorage], int | None, int], ...
    ]
    entries: tuple[tuple[weakref.ref[memory.Entry], int], ...]
    computed: tuple[weakref.ref[Tensor], ...]
    ready: weakref.ref[Ready]
    reads: tuple[PlacedPart, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedCall:
    """A call over tensors of certain kinds, sizes and strides, and parts of them.

    Attributes:
        alike: whether tensors are like those of the call, of which there are ``count``; the last is
            what is written to.
        parts: by name what the statement reads, but for what is computed.
        indices: of each index tensor the place of the tensor of which it is a part, how that lies
            in memory, and which part.
        computed: tensors that follow from integer tensors.
        reaches: bytes from the first element of each tensor to behind its last.
        prepared: by the storage of the first index tensor, what is launched.
    """

    alike: Callable[..., bool]
    count: int
    sizes: list[int]
    modes: tuple[Any, ...]
    fused: FusedCall
    parts: dict[str, PlacedPart]
    indices: tuple[tuple[int, memory.MemoryPlace, Selects], ...]
    computed: tuple[ComputedBefore, ...]
    reaches: tuple[int, ...]
    device: torch.device
    stream: Callable[[], int]
    capturing: Callable[[], bool]
    prepared: dict[int, PreparedRun] = field(default_factory=dict)

    def run(self, tensors: Sequence[Tensor], target: Tensor | None) -> Tensor | None:
        """The result; None where what is launched is not known without making the parts. Raises
        what earlier calls were found to have done wrong.
        """
        for numbers, report in offences:
            if numbers[0]:
                report()
        if self.capturing() or CUDAGRAPH_TREES in sys.modules and is_recorded(self.device):
            return None
        first = tensors[self.indices[0][0]].untyped_storage()
        run = self.prepared.get(id(first))
        values = None if run is None else self.unchanged(run, tensors)
        ready = None if values is None or run is None else run.ready()
        if ready is None or run is None or values is None:
            run = self.prepare(tensors, target)
            if run is None:
                return None
            self.prepared.pop(id(first), None)
            keep(self.prepared, id(first), run, MOST_PREPARED)
            values, ready = self.unchanged(run, tensors), run.ready()
            if values is None or ready is None:
                return None
        if interpreting():
            sources: list[Any] = [select(values[k], selects) for k, _, selects in run.reads]
        else:
            sources = []
            for number, start, _ in run.reads:
                sources.append(values[number].data_ptr() + start)
        if target is None:
            return ready.run(sources, None)
        if self.overlaps(tensors, target):
            return None
        ready.run(sources, target)
        return written_to(target)

    def unchanged(self, run: PreparedRun, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """The tensors, and those that follow from them, where what was prepared is still right."""
        if self.stream() != run.stream or cache.state["epoch"] != run.epoch:
            return None
        for number, reference, storage, version, offset in run.owners:
            tensor, owner = tensors[number], reference()
            root = tensor._base
            if root is None:
                root = tensor
            # of what autograd saved the object is another (`memory.known`)
            if root is not owner and (owner is None or not in_backward()):
                return None
            if tensor.untyped_storage() is not storage() or tensor.storage_offset() != offset:
                return None
            if version is not None and tensor._version != version:
                return None
        stamp = next(memory.stamps)
        for entry_of, serial in run.entries:
            entry = entry_of()
            if entry is None or not entry.held or entry.serial != serial:
                return None
            entry.stamp = stamp
        if not run.computed:
            return tensors
        values = [*tensors]
        for value_of in run.computed:
            value = value_of()
            if value is None:
                return None
            values.append(value)
        return values

    def prepare(self, tensors: Sequence[Tensor], target: Tensor | None) -> PreparedRun | None:
        """What a call on these index tensors launches, where that is kept with them."""
        known: dict[int, memory.Entry] = {}
        places = {number: place for number, place, _ in self.indices}
        for number in (*places, *(n for one in self.computed for n in one.sources)):
            if number not in known:
                entry = memory.known(tensors[number], places.get(number))
                if entry is None or not entry.held:
                    return None
                known[number] = entry
        entries = []
        for number, _, selects in self.indices:
            part = known[number].parts.get(selects) if selects else known[number]
            if part is None or not part.held:
                return None
            entries.append(part)
        ready = self.fused.settled(target, entries)
        if ready is None:
            return None
        parts = dict(self.parts)
        computed: list[weakref.ref[Tensor]] = []
        for one in self.computed:
            value = one.found(known)
            if value is None:
                return None
            parts[one.name] = len(tensors) + len(computed), 0, ()
            computed.append(weakref.ref(value))
        return PreparedRun(
            self.stream(),
            cache.state["epoch"],
            tuple((number, *_owner(tensors[number])) for number in known),
            tuple((weakref.ref(e), e.serial) for e in dict.fromkeys((*known.values(), *entries))),
            tuple(computed),
            weakref.ref(ready),
            tuple(parts[name] for name in ready.reads),
        )

    def overlaps(self, tensors: Sequence[Tensor], target: Tensor) -> bool:
        """Whether one of the tensors lies in the memory that is written to, by addresses."""
        start = target.data_ptr()
        end = start + self.reaches[-1]
        for tensor, reach in zip(tensors, self.reaches):
            first = tensor.data_ptr()
            if first < end and start < first + reach:
                return True
        return False


def _owner(
    tensor: Tensor,
) -> tuple[weakref.ref[Tensor], weakref.ref[torch.UntypedStorage], int | None, int]:
    version = None if tensor.is_inference() else tensor._version
    storage = weakref.ref(tensor.untyped_storage())
    owner = memory.owner_of(tensor) or weakref.ref(tensor)
    return owner, storage, version, int(tensor.storage_offset())


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
    fused = in_kernels.alone(call, values, in_place=target is not None)
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
    given = tensors if target is None else (*tensors, target)
    at = {
        name: (number, _bytes_between(tensors[number], values[name]) if selects else 0, selects)
        for name, number, selects in parts
    }
    indices = [(at[name][0], at[name][2]) for name in fused.kind.indices]
    device = fused.kind.device
    return RepeatedCall(
        kinds_guard(given, exact=True),
        len(given),
        list(sizes),
        modes_now(settings),
        fused,
        at,
        tuple((n, memory.place_of(tensors[n]), selects) for n, selects in indices),
        tuple(
            ComputedBefore(name, key, sources, memory.place_of(values[name]))
            for name, key, sources in computed
        ),
        tuple(map(bytes_of, given)),
        device,
        stream_getter(device),
        is_capturing if device.type == "cuda" else bool,
    )


def _bytes_between(whole: Tensor, part: Tensor) -> int:
    """How far behind the first element of a tensor a part of it begins."""
    return int(part.storage_offset() - whole.storage_offset()) * whole.itemsize
