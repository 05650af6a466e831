"""Calls of fused ops that are like one before. Index tensors of compiled graphs are parts of
others, as the two rows of a tensor of edges: here what runs such a call is found, and launched,
without making them.

What is compared is what every call is found by: kinds, sizes and strides by a guard of torch's, and
index tensors by what is remembered of them (`insum.memory`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from insum import memory
from insum.bounded import keep
from insum.call import in_kernels
from insum.call.overlap import bytes_of, written_to
from insum.call.prepared import BoundCall
from insum.compat.autograd import in_backward
from insum.compat.calls import modes_now
from insum.compat.streams import is_recorded, stream_getter
from insum.compat.tensors import kinds_guard
from insum.fusion.indices import Selects, select
from insum.plan.sizes import beside
from insum.runtime import cache
from insum.runtime.check import found as offences
from insum.runtime.launch import interpreting
from insum.settings import settings

if TYPE_CHECKING:
    from insum.runtime.fused import FusedCall
    from insum.runtime.program import Refusal
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
        entries: what is remembered of them and of their parts, its serial, and whether they are
            promised to stay.
        computed: tensors that follow from them.
        launches: what is launched, one after the other.
    """

    stream: int
    epoch: int
    owners: tuple[
        tuple[int, weakref.ref[Tensor], weakref.ref[torch.UntypedStorage], int | None, int], ...
    ]
    entries: tuple[tuple[weakref.ref[memory.Entry], int, bool], ...]
    computed: tuple[weakref.ref[Tensor], ...]
    launches: tuple[PreparedLaunch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Of a statement's result the rows that nothing is scattered to are those of another tensor.

    Attributes:
        base: the number of that tensor.
        shape: of that tensor as the op takes it, which may be a view of what is passed; the
            statement's result may lack dimensions of size 1.
        index: which of the statement's index tensors scatters; with it is kept, under ``key``,
            which rows it scatters to.
    """

    base: int
    shape: torch.Size
    index: int
    key: object

    def applied(self, result: Tensor, base: Tensor, mask: Tensor) -> Tensor:
        if base.shape != result.shape:
            base = base.reshape(result.shape)
        kept = torch.where(mask, result, base)
        return kept if kept.shape == self.shape else kept.view(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLaunch:
    """What is launched for a statement, or for several at once.

    Attributes:
        number: of the statement that it is for.
        reads: what it is passed.
        kept: where rows are kept, with the mask of those that are not.
        rooms: of other statements that it is for the numbers, and what makes their results, which
            it is passed.
    """

    number: int
    ready: weakref.ref[Ready]
    reads: tuple[PlacedPart, ...]
    kept: tuple[KeptRows, weakref.ref[Tensor]] | None = None
    rooms: tuple[tuple[int, Callable[[], Tensor]], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedStatement:
    """A statement of a call, over numbered tensors: those that are passed, behind them those that
    follow from them, behind those the results of statements before.

    Attributes:
        parts: by name what the statement reads.
        indices: of each index tensor the number of the tensor of which it is a part, how that lies
            in memory, and which part.
        may_become_code: whether values of a tensor are part of the program where an index tensor is
            promised to stay.
    """

    fused: FusedCall
    parts: dict[str, PlacedPart]
    indices: tuple[tuple[int, memory.MemoryPlace, Selects], ...]
    may_become_code: bool
    kept: KeptRows | None = None

    def renumbered(self, numbers: Sequence[int]) -> RepeatedStatement:
        """The same, of tensors that have other numbers."""
        parts = {name: (numbers[n], start, how) for name, (n, start, how) in self.parts.items()}
        indices = tuple((numbers[n], place, how) for n, place, how in self.indices)
        kept = None if self.kept is None else replace(self.kept, base=numbers[self.kept.base])
        return RepeatedStatement(self.fused, parts, indices, self.may_become_code, kept)

    def settled(
        self, target: Tensor | None, known: Mapping[int, memory.Entry]
    ) -> SettledStatement | None:
        """What is launched where this is remembered of the tensors, and of their parts; None where
        that is not kept.
        """
        entries = []
        for number, _, selects in self.indices:
            entry = known.get(number)
            part = entry.parts.get(selects) if entry is not None and selects else entry
            if part is None or not part.held or self.may_become_code and part.declared:
                return None
            entries.append(part)
        ready = self.fused.settled(target, entries)
        kept = self.kept
        mask = None if kept is None else entries[kept.index].get(kept.key)
        if ready is None or kept is not None and mask is None:
            return None
        masked = None if kept is None or mask is None else (kept, weakref.ref(mask))
        return SettledStatement(self, ready, entries, masked)


@dataclass(frozen=True, slots=True, eq=False)
class SettledStatement:
    """A statement of which everything is kept that a launch takes, with the entries of its index
    tensors; ``kept`` as `PreparedLaunch` has it.
    """

    statement: RepeatedStatement
    ready: Ready
    entries: list[memory.Entry]
    kept: tuple[KeptRows, weakref.ref[Tensor]] | None

    def alone(self, number: int) -> PreparedLaunch:
        reads = tuple(self.statement.parts[name] for name in self.ready.reads)
        return PreparedLaunch(number, weakref.ref(self.ready), reads, self.kept)


def _launches(
    settled: Sequence[SettledStatement], group: Sequence[int], first: int
) -> list[PreparedLaunch] | None:
    """What is launched for all statements, those of the group at once where that is known; None
    where nobody has tried. ``first``: the number of the first result.
    """
    if not group:
        return [one.alone(number) for number, one in enumerate(settled)]
    from insum.runtime.one_launch import OneLaunch, kept_under  # which takes a while to import

    members = [settled[number] for number in group]
    key = kept_under([(one.statement.fused, one.entries) for one in members])
    joined: OneLaunch | Refusal | None = members[0].entries[0].get(key)
    if joined is None:
        return None
    if not isinstance(joined, OneLaunch):
        return [one.alone(number) for number, one in enumerate(settled)]
    order = [group[k] for k in joined.order]
    parts: dict[str, PlacedPart] = {}
    for place, number in enumerate(order):
        parts |= settled[number].statement.parts
        if place:
            parts[beside(place)] = first + number, 0, ()
    own, *others = order
    reads = tuple(parts[name] for name in joined.ready.reads)
    rooms = tuple((number, settled[number].ready.empty) for number in others)
    found = [PreparedLaunch(own, weakref.ref(joined.ready), reads, None, rooms)]
    return found + [one.alone(k) for k, one in enumerate(settled) if k not in order]


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedCall:
    """A call over tensors of certain kinds, sizes and strides, and parts of them.

    Attributes:
        alike: whether tensors are like those of the call, of which there are ``count``; the last is
            what is written to, if anything is.
        statements: what the call runs, one after the other.
        computed: tensors that follow from integer tensors.
        reaches: bytes from the first element of each tensor to behind its last.
        decides: the number of the first tensor that decides what is launched.
        group: statements that may be in one launch, by number.
        prepared: by the storage of the first tensor that decides it, what is launched.
    """

    alike: Callable[..., bool]
    count: int
    sizes: list[int]
    modes: tuple[Any, ...]
    statements: tuple[RepeatedStatement, ...]
    computed: tuple[ComputedBefore, ...]
    reaches: tuple[int, ...]
    device: torch.device
    stream: Callable[[], int]
    decides: int
    group: tuple[int, ...] = ()
    prepared: dict[int, PreparedRun] = field(default_factory=dict)

    def run(self, tensors: Sequence[Tensor], target: Tensor | None) -> list[Tensor] | None:
        """The results; None where what is launched is not known without making the parts. Raises
        what earlier calls were found to have done wrong.
        """
        for numbers, report in offences:
            if numbers[0]:
                report()
        stream = self.stream()
        if stream and is_recorded(self.device):  # on the default stream nothing is
            return None
        first = id(tensors[self.decides].untyped_storage())
        run = self.prepared.get(first)
        values = None
        if run is not None and run.stream == stream:
            values = self.unchanged(run, tensors)
        if run is None or values is None:
            run = self.prepare(tensors, target, stream)
            if run is None:
                return None
            self.prepared.pop(first, None)
            keep(self.prepared, first, run, MOST_PREPARED)
            values = self.unchanged(run, tensors)
            if values is None:
                return None
        if target is not None and self.overlaps(tensors, target):
            return None
        by_address, behind = not interpreting(), len(values)
        values += [None] * len(self.statements)
        for one in run.launches:
            ready = one.ready()
            sources: list[Any] = []
            if ready is None:  # let go of since
                self.prepared.pop(first, None)
                return None
            for number, make in one.rooms:
                values[behind + number] = make()
            for number, start, selects in one.reads:
                value = values[number]
                sources.append(value.data_ptr() + start if by_address else select(value, selects))
            result = ready.run(sources, target)
            if one.kept is not None:
                kept, mask_of = one.kept
                if (mask := mask_of()) is None:
                    self.prepared.pop(first, None)
                    return None
                result = kept.applied(result, values[kept.base], mask)
            values[behind + one.number] = result
        if target is not None:
            written_to(target)
        return values[behind:]

    def unchanged(self, run: PreparedRun, tensors: Sequence[Tensor]) -> list[Any] | None:
        """The tensors, and those that follow from them, where what was prepared is still right."""
        if cache.state["epoch"] != run.epoch:
            return None
        for number, reference, storage, version, offset in run.owners:
            tensor, owner = tensors[number], reference()
            if owner is None:
                return None
            # of views it is the base, and of what autograd saved another object (`memory.known`)
            if tensor is not owner and tensor._base is not owner and not in_backward():
                return None
            if tensor.untyped_storage() is not storage() or tensor.storage_offset() != offset:
                return None
            if version is not None and tensor._version != version:
                return None
        stamp = next(memory.stamps)
        for entry_of, serial, declared in run.entries:
            entry = entry_of()
            if entry is None or not entry.held or entry.serial != serial:
                return None
            if entry.declared is not declared:
                return None
            entry.stamp = stamp
        values: list[Any] = [*tensors]
        for value_of in run.computed:
            value = value_of()
            if value is None:
                return None
            values.append(value)
        return values

    def prepare(
        self, tensors: Sequence[Tensor], target: Tensor | None, stream: int
    ) -> PreparedRun | None:
        """What a call on these index tensors launches, where that is kept with them."""
        known = self.entries_of(tensors)
        if known is None:
            return None
        passed = [*known]
        computed = [one.found(known) for one in self.computed]
        for number, value in enumerate(computed, len(tensors)):
            entry = None if value is None else memory.known(value)
            if value is None:
                return None
            if entry is not None and entry.held:
                known[number] = entry
        every, settled = dict.fromkeys(known.values()), []
        for statement in self.statements:
            found = statement.settled(target, known)
            if found is None:
                return None
            settled.append(found)
            every |= dict.fromkeys(found.entries)
        launches = _launches(settled, self.group, len(tensors) + len(computed))
        if launches is None:
            return None
        return PreparedRun(
            stream,
            cache.state["epoch"],
            tuple((number, *_owner(tensors[number])) for number in passed),
            tuple((weakref.ref(entry), entry.serial, entry.declared) for entry in every),
            tuple(weakref.ref(value) for value in computed if value is not None),
            tuple(launches),
        )

    def entries_of(self, tensors: Sequence[Tensor]) -> dict[int, memory.Entry] | None:
        """What is remembered of each tensor that is passed and decides what is launched; None where
        of one there is nothing.
        """
        places = {
            number: place
            for statement in self.statements
            for number, place, _ in statement.indices
            if number < len(tensors)
        }
        known: dict[int, memory.Entry] = {}
        for number in (*places, *(n for one in self.computed for n in one.sources)):
            if number not in known:
                entry = memory.known(tensors[number], places.get(number))
                if entry is None or not entry.held:
                    return None
                known[number] = entry
        return known

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
    computed: Sequence[tuple[object, tuple[int, ...], Tensor]],
    call: BoundCall,
    values: Mapping[str, Any],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    target: Tensor | None,
) -> None:
    """Recognise calls like this one from now on, where nothing decides what they launch but their
    sizes and index tensors, and something is kept with those; ``parts``: of every tensor of the
    statement its name, the number of what it is a part of, and which part; ``computed``: of those
    that follow from others, which are numbered behind them, what they are kept under, the numbers
    of the others, and they themselves.
    """
    if not call.prepared.kernels_look:  # then the host looks at indices, at every call
        return
    fused = in_kernels.alone(call, values, in_place=target is not None)
    if fused is None or not fused.keeps or not fused.is_by_indices(values):
        return
    alike = like(text, tensors, sizes, target)
    every = (*tensors, *(value for _, _, value in computed))
    if alike is None or [one.fused for one in alike.statements] != [fused]:
        at = {
            name: (number, _bytes_between(every[number], values[name]) if selects else 0, selects)
            for name, number, selects in parts
        }
        indices = tuple(
            (at[name][0], memory.place_of(every[at[name][0]]), at[name][2])
            for name in fused.kind.indices
        )
        follow = tuple(ComputedBefore(k, own, memory.place_of(value)) for k, own, value in computed)
        statement = RepeatedStatement(fused, at, indices, fused.has_few_coefficients(values))
        _keep(text, alike, _made((statement,), follow, tensors, sizes, target))
    for name, number, selects in parts:
        entry = memory.known(values[name]) if selects and name in fused.kind.indices else None
        if entry is not None and entry.held:
            memory.entry_of(every[number]).note_part(selects, entry)


def note_sequence(
    text: str,
    calls: Sequence[tuple[RepeatedCall, Sequence[int]]],
    group: tuple[int, ...],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> None:
    """Recognise calls that make several like those before; of each its tensors by their numbers
    among those that are passed, or, from -1 on downwards, as the results of calls before;
    ``group``: those that may be in one launch.
    """
    alike = like(text, tensors, sizes, None)
    ran = [statement.fused for call, _ in calls for statement in call.statements]
    if alike is not None and [one.fused for one in alike.statements] == ran:
        return
    results = len(tensors) + sum(len(call.computed) for call, _ in calls)
    statements, follow = list[RepeatedStatement](), list[ComputedBefore]()
    for call, places in calls:
        numbers = [place if place >= 0 else results - 1 - place for place in places]
        if any(numbers[n] >= len(tensors) for one in call.computed for n in one.sources):
            return  # something follows from a result
        own = range(len(tensors) + len(follow), len(tensors) + len(follow) + len(call.computed))
        follow += [
            replace(one, sources=tuple(numbers[n] for n in one.sources)) for one in call.computed
        ]
        statements += [one.renumbered([*numbers, *own]) for one in call.statements]
    if any(n >= results for statement in statements for n, _, _ in statement.indices):
        return
    made = _made(tuple(statements), tuple(follow), tensors, sizes, None, group)
    _keep(text, alike, made)


def note_kept_rows(
    text: str,
    call: RepeatedCall,
    rows: tuple[str, object],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
) -> None:
    """Recognise calls of a statement over all tensors but the last, of which rows are kept;
    ``rows``: the index tensor that scatters, and what is kept with it.
    """
    alike = like(text, tensors, sizes, None)
    (statement,) = call.statements
    if alike is not None and [one.fused for one in alike.statements] == [statement.fused]:
        return
    name, key = rows
    base = len(tensors) - 1
    kept = KeptRows(base, tensors[base].shape, list(statement.fused.kind.indices).index(name), key)
    behind = range(len(tensors), len(tensors) + len(call.computed))
    moved = replace(statement.renumbered([*range(base), *behind]), kept=kept)
    _keep(text, alike, _made((moved,), call.computed, tensors, sizes, None))


def _keep(text: str, instead_of: RepeatedCall | None, call: RepeatedCall) -> None:
    others = [one for one in _alike.pop(text, ()) if one is not instead_of]
    keep(_alike, text, (call, *others)[:MOST_ALIKE], MOST_SPECS)


def _made(
    statements: tuple[RepeatedStatement, ...],
    computed: tuple[ComputedBefore, ...],
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    target: Tensor | None,
    group: tuple[int, ...] = (),
) -> RepeatedCall:
    given = tensors if target is None else (*tensors, target)
    device, decides = statements[0].fused.kind.device, statements[0].indices[0][0]
    if decides >= len(tensors):
        decides = computed[decides - len(tensors)].sources[0]
    return RepeatedCall(
        kinds_guard(given, exact=True),
        len(given),
        list(sizes),
        modes_now(settings),
        statements,
        computed,
        tuple(map(bytes_of, given)),
        device,
        stream_getter(device),
        decides,
        group,
    )


def _bytes_between(whole: Tensor, part: Tensor) -> int:
    """How far behind the first element of a tensor a part of it begins."""
    return int(part.storage_offset() - whole.storage_offset()) * whole.itemsize
