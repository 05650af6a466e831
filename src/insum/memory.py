"""Everything that is remembered about tensors: the one store whose keys are tensors.

An `Entry` belongs to one tensor as it is now. It is found again for the same tensor object, or
another view of it with the same place, shape and strides, while

- the object's version counter has not moved,
- it lies in the same storage: ``x.data = y`` and ``set_`` bring another, whatever its address is,
- on the CPU, its values are the same, by a copy or, where that would be long, by a fingerprint:
  there looking costs little, and nothing that writes without telling (NumPy, `torch.distributed`,
  inference mode) goes unseen.

A tensor made under inference mode has no version counter. Off the CPU nothing is remembered about
it, unless whoever made it declared it with `declare`: formats do, and `unchanging`.
What no key can see is listed in ``docs/promises.md``; `forget` is the remedy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from insum.accepted import ELEMENTS, TENSOR, takes
from insum.compat.autograd import in_backward
from insum.compat.calls import PLAIN, is_eager_call
from insum.compat.contexts import untracked
from insum.compat.locks import renew_in_children
from insum.compat.placed import is_placed, local_of
from insum.compat.raw_bytes import bytes_of, has_bytes
from insum.compat.streams import current_stream, is_capturing, is_recorded, stream_object
from insum.fingerprints import fingerprint
from insum.settings import settings

T = TypeVar("T")
#: Where in a storage a tensor lies, and how: offset, shape, strides, dtype.
MemoryPlace = tuple[int | torch.SymInt, torch.Size, tuple[int, ...], torch.dtype]
_serials = itertools.count()
#: Numbers of uses, by which the oldest is told.
stamps = itertools.count()
#: Things that are kept about one tensor, ranges that kernels have looked at, and views.
MOST_THINGS, MOST_RANGES, MOST_PARTS = 256, 64, 64
#: Bytes of a tensor up to which its values are copied: comparing takes a third to a seventh of the
#: time of multiplying, and as much memory again.
MOST_COPIED = 1 << 22

_lock = threading.RLock()
renew_in_children(_lock)


class Entry:
    """What is remembered about one tensor, and everything that was derived from it.

    Attributes:
        serial: a number that no other entry ever has, for keys of what depends on several tensors.
        declared: whoever made the tensor says that it does not change; such entries are kept for
            inference tensors too, and what takes a while to find out is found out at once.
        given: what is known of the tensor was known when it was made, and no more will be.
        called: how messages name a value of the tensor, by its place, and what the values number,
            where users know the tensor under another name than the statement does.
        sights: how many calls have met the tensor, as far as they counted; ``met``: of those that
            have a key, each.
        looked: ranges that a kernel has looked at: what it found, it has reported.
        held: whether it is in the store, and can be found again.
        in_graph: whether a CUDA graph reads what is kept here, so that it must stay where it is.
        nbytes: of the tensors that are kept here.
        parts: entries of views of the tensor, by what makes the view: found without making it.
        things: what is kept, by key.
    """

    __slots__ = (
        *("__weakref__", "_streams", "called", "declared", "given", "held", "in_graph", "looked"),
        *("met", "nbytes", "parts", "serial", "sights", "stamp", "things"),
    )

    def __init__(self, declared: bool = False) -> None:
        self.serial = next(_serials)
        self.declared = declared
        self.given = False
        self.called: tuple[str, str] | None = None
        self.sights = 0
        self.met: dict[object, int] = {}
        self.nbytes = 0
        self.held = self.in_graph = False
        self.looked: set[object] = set()
        self.parts: dict[object, Entry] = {}
        self.stamp = next(stamps)
        self.things: dict[object, Any] = {}
        #: By key, the device of a thing, the stream that it was made on, and those that have waited
        #: for it.
        self._streams: dict[object, tuple[torch.device, int, set[int]]] = {}

    def meets(self, key: object) -> int:
        """How many calls of this key have met the tensor, with this one."""
        if len(self.met) >= MOST_THINGS:
            self.met.clear()  # others are counted anew
        self.met[key] = found = self.met.get(key, 0) + 1
        return found

    def note_range(self, range_: object) -> None:
        """A kernel looks at the tensor, for this range."""
        if len(self.looked) >= MOST_RANGES:
            self.looked.clear()  # other ranges are looked at again
        self.looked.add(range_)

    def note_part(self, how: object, part: Entry) -> None:
        """``part`` is the entry of a view of this tensor, that ``how`` makes. It is that of the
        view as it is now as long as this one is known and that one is held: both are of one tensor
        object and its version.
        """
        if self.held and part.held:
            if len(self.parts) >= MOST_PARTS:
                self.parts.clear()
            self.parts[how] = part

    def __contains__(self, key: object) -> bool:
        return key in self.things

    def get(self, key: object) -> Any | None:
        """What is kept under ``key``, ready for the current stream; None if nothing is."""
        self.stamp = next(stamps)
        thing = self.things.get(key)
        if thing is not None and key in self._streams:
            self._await(key, thing)
        return thing

    def keep(self, key: object, thing: T) -> T:
        """Keep something made on the current stream. Nothing is kept that a captured CUDA graph
        will compute: until it is replayed there is nothing in it.
        """
        on, nbytes = None, 0
        for tensor in _tensors(thing):
            nbytes += tensor.nbytes
            if tensor.is_cuda:
                on = tensor.device
        if on is not None:
            if is_recorded(on):
                return thing
            self._streams[key] = on, current_stream(on), set()
        before = self.things.get(key)
        if len(self.things) >= MOST_THINGS and before is None:
            self._drop_oldest()
        self.things[key] = thing
        if before is not None:
            nbytes -= sum([t.nbytes for t in _tensors(before)])
        if nbytes:
            _account(self, nbytes)
        return thing

    def note(self, things: Mapping[str, object]) -> None:
        """Keep what was known when the tensor was made: it goes with it, and is not counted."""
        self.things.update(things)

    def drop(self, unwanted: Callable[[object], bool]) -> None:
        """Let go of what is kept under some keys."""
        with _lock:
            gone = [key for key in self.things if unwanted(key)]
            nbytes = sum(t.nbytes for key in gone for t in _tensors(self.things.pop(key)))
            for key in gone:
                self._streams.pop(key, None)
            self.nbytes -= nbytes
            if self.held:
                _total["bytes"] -= nbytes

    def remembered(self, key: object, make: Callable[[], T]) -> T:
        """What is kept under ``key``, made now if nothing is."""
        found = self.get(key)
        return self.made_once(key, make) if found is None else found

    def made_once(self, key: object, make: Callable[[], T]) -> T:
        """What two threads want at once is made once."""
        with _lock:
            if key in self.things:
                found: T | None = self.get(key)
                if found is not None:
                    return found
            return self.keep(key, make())

    def renew(self) -> None:
        """Let go of everything that was decided so far, here and where this is one of several
        tensors, because something was promised that decides it anew.
        """
        with _lock:
            if self.held:
                _total["bytes"] -= self.nbytes
            self.things, self._streams, self.nbytes = {}, {}, 0
            self.serial = next(_serials)

    def _drop_oldest(self) -> None:
        """What has a plain name stays: there are few such, and some were declared."""
        with _lock:
            key = next((k for k in self.things if not isinstance(k, str)), None)
            if key is None or self.in_graph:
                return
            old = self.things.pop(key)
            self._streams.pop(key, None)
            _account(self, -sum(t.nbytes for t in _tensors(old)))

    def _await(self, key: object, thing: Any) -> None:
        device, made_on, waited = self._streams[key]
        if is_capturing():
            # What comes from before a capture cannot be waited for in it, and need not be: a
            # capture begins on an idle device. The graph will read this at every replay.
            self.in_graph = True
            return
        stream = current_stream(device)
        if stream == made_on or stream in waited:
            return
        # No event was recorded when it was made, which takes longer than most makings: whoever
        # comes from another stream waits for all that this one has been given since.
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream_object(made_on, device))
        for tensor in _tensors(thing):
            if tensor.is_cuda:
                tensor.record_stream(current)
        waited.add(stream)


class _Owner:
    """One tensor object (of views, their base), its version, and the entries of its places."""

    __slots__ = ("entries", "looks", "reference", "version")

    def __init__(self, reference: weakref.ref[Any], version: int | None) -> None:
        self.reference, self.version = reference, version
        self.entries: dict[MemoryPlace, Entry] = {}
        #: What the values were, by place: bytes, or a fingerprint.
        self.looks: dict[MemoryPlace, bytes | int] = {}


class _Held:
    """Everything known of what lies in one storage."""

    __slots__ = ("owners", "reference")

    def __init__(self, reference: weakref.ref[Any]) -> None:
        self.reference = reference
        self.owners: dict[int, _Owner] = {}


def _storage_gone(number: int, reference: weakref.ref[Any]) -> None:
    """Drop what is known of a storage that is gone, unless another has taken its number."""
    held = _storages.get(number)
    if held is not None and held.reference is reference:
        if held.owners:
            _drop(number)
        else:
            _storages.pop(number, None)


def _owner_gone(owners: dict[int, _Owner], key: int, reference: weakref.ref[Any]) -> None:
    owner = owners.get(key)
    if owner is not None and owner.reference is reference:
        _release(owners.pop(key))


#: By identity of the storage; whoever reads compares the weak reference.
_storages: dict[int, _Held] = {}


def place_of(tensor: Tensor) -> MemoryPlace:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def known(
    tensor: Tensor, place: MemoryPlace | None = None, *, declared: bool = False
) -> Entry | None:
    """The entry of a tensor as it is now, if there is one. Asks nothing of a device. ``place``: of
    a tensor of the same shape, strides and dtype, so that it need not be asked for all of them.
    ``declared``: only of one that is said to stay as it is, which nobody need look at.
    """
    storage = tensor.untyped_storage()
    held = _storages.get(id(storage))
    if held is None or held.reference() is not storage:
        return None
    root = tensor._base
    if root is None:
        root = tensor
    owner = held.owners.get(id(root))
    if owner is None or owner.reference() is not root:
        owner = _saved(held, tensor)
        if owner is None:
            return None
    try:
        version: int | None = tensor._version
    except RuntimeError:  # made under inference mode
        version = None
    if owner.version != version:
        return None
    if place is None or place[0] != tensor.storage_offset():  # as `place_of`, on many a path
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    seen = owner.looks.get(place)  # before the entry: `made` writes it first
    entry = owner.entries.get(place)
    if seen is None or entry is None or entry.declared:
        return entry
    if declared:
        return None
    same = has_bytes(tensor, seen) if type(seen) is bytes else seen == fingerprint(tensor)
    return entry if same else None


def owner_of(tensor: Tensor) -> weakref.ref[Any] | None:
    """Of a tensor that is known the object whose version counts, as `known` finds it: the tensor,
    of a view its base, and of what autograd saved that from which it was detached.
    """
    held = _storages.get(id(tensor.untyped_storage()))
    root = tensor if tensor._base is None else tensor._base
    owner = None if held is None else held.owners.get(id(root))
    if held is not None and (owner is None or owner.reference() is not root):
        owner = _saved(held, tensor)
    return None if owner is None else owner.reference


def entry_of(tensor: Tensor, *, declared: bool = False) -> Entry:
    """The entry of a tensor as it is now, made if there is none; one that nobody will find again
    where a change of the tensor could not be seen.
    """
    found = known(tensor) or made(tensor, declared)
    if declared:
        for one in (found, *_of_views(tensor)):
            one.declared = True
    return found


def _of_views(tensor: Tensor) -> list[Entry]:
    """What is remembered of the views of a tensor: what is promised of it is promised of them."""
    held = _storages.get(id(tensor.untyped_storage()))
    owner = held.owners.get(id(tensor)) if held is not None else None
    if owner is None or owner.reference() is not tensor:
        return []
    return list(owner.entries.values())


def remembered(
    tensor: Tensor, key: object, make: Callable[[], T], *others: Tensor, eager: bool = False
) -> T:
    """``make()``, once for each key while ``tensor``, and the ``others`` that it depends on, live
    unchanged; at every call under a tracer or a transform. ``eager``: it is known that there is
    none.

    What is made must not hold one of the tensors, nor a view of it, or none would ever go.

    >>> x = torch.tensor([1, 2])
    >>> remembered(x, "sum", lambda: int(x.sum())), remembered(x, "sum", lambda: 0)
    (3, 3)
    >>> remembered(x.add_(1), "sum", lambda: int(x.sum()))
    5
    """
    if not eager and not is_eager_call((tensor, *others)):
        return make()
    key = (key, *[entry_of(other).serial for other in others]) if others else key
    entry = known(tensor) or made(tensor)
    found: T | None = entry.get(key)
    if found is not None:
        return found
    with untracked(eager=True):
        return entry.made_once(key, make)


def recalled(tensor: Tensor, key: object) -> Any | None:
    """What `remembered` keeps under a key, None where it keeps nothing, or where values would have
    to be looked at to know.
    """
    if tensor.is_cpu and can_look(tensor) or not is_eager_call((tensor,)):
        return None
    entry = known(tensor)
    return None if entry is None else entry.get(key)


def known_as(tensor: Tensor, name: str, what: str, *, declared: bool = False) -> None:
    """Messages name a value of a tensor so, by its place, and say what the values number. Where
    nothing is remembered about the tensor, the object itself keeps the name.
    """
    entry = entry_of(tensor, declared=declared)
    entry.called = name, what
    if not entry.held:
        tensor.__dict__[_NAME] = entry.called


#: What tensors keep their name under, of which nothing is remembered.
_NAME = "_insum_called"


@takes(tensor=ELEMENTS)
def unchanging(tensor: Tensor) -> Tensor:
    """Promise that an index tensor is not written to as long as it lives.

    What is found out about it is then trusted where writes could not be seen (inference mode, CUDA
    graphs that are replayed), and the best schedule is made at its first use instead of after a
    few. `insum.constant` promises more: that the values may become code.

    Args:
        tensor: An index tensor; of a DTensor, the part that lies here.

    Returns:
        The same tensor.

    Examples:
        >>> import insum, torch
        >>> edges = insum.unchanging(torch.tensor([[0, 1], [1, 0]]))
    """
    plain = type(tensor) in PLAIN or not is_placed((tensor,))
    entry_of(tensor if plain else local_of(tensor), declared=True)
    return tensor


@takes(tensor=TENSOR.optional)
def forget(tensor: Tensor | None = None) -> None:
    """Let go of what is remembered about a tensor and all that shares its storage, or about all.

    To be called after a write that nothing can see: through ``x.data``, by a kernel of one's own,
    by a collective operation into a tensor on a GPU.

    Args:
        tensor: What to forget about, of a DTensor the part that lies here; everything where none
            is given.

    Examples:
        >>> import insum, torch
        >>> insum.forget(torch.arange(3))
    """
    with _lock:
        if tensor is None:
            for number in list(_storages):
                _drop(number)
        else:
            own = local_of(tensor) if is_placed((tensor,)) else tensor
            _drop(id(own.untyped_storage()))


def can_look(tensor: Tensor) -> bool:
    """Whether values can be looked at, at every call, without waiting for a device."""
    return tensor.is_cpu


def _looked_at(tensor: Tensor) -> bytes | int:
    """What tells whether values are still the same. A copy goes with its tensor, and is not
    counted.
    """
    found = bytes_of(tensor) if tensor.nbytes <= MOST_COPIED else None
    return fingerprint(tensor) if found is None else found


# --- finding and making ---------------------------------------------------------------------------


def _saved(held: _Held, tensor: Tensor) -> _Owner | None:
    """The owner of what autograd saved: compiled graphs detach the views that they save, so that
    their backward pass gets other objects. They share storage and version counter. Outside of a
    backward pass such an object may be anything, ``x.data`` for one, whose counter starts anew.
    """
    if not in_backward():
        return None
    place = place_of(tensor)
    for owner in list(held.owners.values()):
        if place in owner.entries and owner.reference() is not None:
            return owner
    return None


def made(tensor: Tensor, declared: bool = False) -> Entry:
    """A new entry for a tensor that has none as it is now."""
    try:
        version: int | None = tensor._version
    except RuntimeError:  # made under inference mode
        version = None
    storage, root = tensor.untyped_storage(), tensor._base
    if root is None:
        root = tensor
    elif root.layout is torch.strided:  # values of a sparse tensor are views of it
        whole = known(root)
        declared = declared or whole is not None and whole.declared
    entry = Entry(declared)
    look = tensor.is_cpu and can_look(tensor)
    if version is None and not declared and not look:
        entry.called = tensor.__dict__.get(_NAME)
        return entry
    with _lock:
        number, key = id(storage), id(root)
        held = _storages.get(number)
        if held is None or held.reference() is not storage:
            gone = functools.partial(_storage_gone, number)
            held = _storages[number] = _Held(weakref.ref(storage, gone))
        owner = held.owners.get(key)
        if owner is None or owner.reference() is not root or owner.version != version:
            if owner is not None:
                _release(owner)
            gone = functools.partial(_owner_gone, held.owners, key)
            owner = held.owners[key] = _Owner(weakref.ref(root, gone), version)
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        seen = _looked_at(tensor) if look else None
        found = owner.entries.get(place)
        if found is not None and (seen is None or owner.looks.get(place) == seen):
            return found  # another thread was quicker
        if seen is not None:
            owner.looks[place] = seen
        if found is not None and found.held:
            found.held = False
            _total["bytes"] -= found.nbytes
        entry.held = True
        owner.entries[place] = entry  # last: other threads look without the lock
        return entry


# --- the budget -----------------------------------------------------------------------------------

_total = {"bytes": 0}


def _account(entry: Entry, nbytes: int) -> None:
    """Count what was just kept; where it is too much, what was not used for longest goes."""
    with _lock:
        entry.nbytes += nbytes
        if not entry.held:
            return
        _total["bytes"] += nbytes
        budget = settings.values.memory
        if _total["bytes"] <= budget:
            return
        for old in sorted(_entries(), key=lambda e: e.stamp):
            if old is not entry and old.nbytes and not old.in_graph:
                _total["bytes"] -= old.nbytes
                old.things, old._streams, old.nbytes = {}, {}, 0
            if _total["bytes"] <= budget:
                return


def _release(owner: _Owner) -> None:
    with _lock:
        for entry in owner.entries.values():
            if entry.held:
                entry.held = False
                _total["bytes"] -= entry.nbytes


def _drop(number: int) -> None:
    held = _storages.pop(number, None)
    # a copy: the collector of garbage lets go of owners at any time
    for owner in list(held.owners.values()) if held is not None else ():
        _release(owner)


def _entries() -> Iterator[Entry]:
    for held in list(_storages.values()):
        for owner in list(held.owners.values()):
            yield from list(owner.entries.values())


def _tensors(thing: Any) -> list[Tensor]:
    """The tensors in something that is kept: in itself, in tuples, lists, dictionaries and
    dataclasses.
    """
    found, open_ = [], [thing]
    while open_:
        one = open_.pop()
        if (
            isinstance(one, Tensor) and one.layout is torch.sparse_csr
        ):  # whose bytes are a full one's
            open_ += one.crow_indices(), one.col_indices(), one.values()
        elif isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, tuple | list):
            open_ += one
        elif isinstance(one, dict):
            open_ += one.values()
        else:
            for name in _field_names(type(one)):  # type: ignore[arg-type]
                open_.append(getattr(one, name))
    return found


@functools.lru_cache(maxsize=1024)
def _field_names(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass that may hold tensors."""
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(f.name for f in dataclasses.fields(kind) if f.type not in _NUMBERS)


_NUMBERS = ("int", "bool", "str", "int | None", "Mapping[str, int]")


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What is remembered: tensors, entries, and bytes of what was derived from them."""

    tensors: int
    entries: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.entries} entries about {self.tensors} tensors, {self.nbytes / 2**20:.1f} MiB"


def report() -> MemoryReport:
    """How much is remembered now.

    >>> report()  # doctest: +SKIP
    MemoryReport(tensors=2, entries=3, nbytes=4096)
    """
    entries = list(_entries())
    tensors = sum(len(held.owners) for held in list(_storages.values()))
    return MemoryReport(tensors, len(entries), sum(e.nbytes for e in entries))
