"""Everything that is remembered about tensors: the one store whose keys are tensors.

An `Entry` belongs to one tensor as it is now. It is found again for the same tensor object, or
another view of it with the same place, shape and strides, while

- the object's version counter has not moved,
- it lies in the same storage: ``x.data = y`` and ``set_`` bring another, whatever its address is,
- on the CPU, its values have the same fingerprint: there looking costs little, and nothing that
  writes without telling (NumPy, `torch.distributed`, inference mode) goes unseen.

A tensor made under inference mode has no version counter. Off the CPU nothing is remembered about
it, unless whoever made it declared it with `declare`: formats do, and `unchanging`.
What no key can see is listed in ``docs/promises.md``; `forget` is the remedy.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from insum.compat.calls import current_stream, in_backward, is_plain_call
from insum.settings import settings

T = TypeVar("T")
#: Where in a storage a tensor lies, and how: offset, shape, strides, dtype.
Place = tuple[int | torch.SymInt, torch.Size, tuple[int, ...], torch.dtype]
_serials = itertools.count()
_stamps = itertools.count()
_lock = threading.RLock()


class Entry:
    """What is remembered about one tensor, and everything that was derived from it.

    Attributes:
        serial: a number that no other entry ever has, for keys of what depends on several tensors.
        declared: whoever made the tensor says that it does not change; such entries are kept for
            inference tensors too, and what takes a while to find out is found out at once.
        sights: how many calls have met the tensor, as far as they counted.
        held: whether it is in the store, and can be found again.
        nbytes: of the tensors that are kept here.
    """

    __slots__ = ("_streams", "_things", "declared", "held", "nbytes", "serial", "sights", "stamp")

    def __init__(self, declared: bool = False) -> None:
        self.serial = next(_serials)
        self.declared = declared
        self.sights = 0
        self.nbytes = 0
        self.held = False
        self.stamp = next(_stamps)
        self._things: dict[object, Any] = {}
        #: By key, the stream on which a thing was made with the event that ends its making, and
        #: the streams that have waited for it.
        self._streams: dict[object, tuple[Any, set[int]]] = {}

    def get(self, key: object) -> Any | None:
        """What is kept under ``key``, ready for the current stream; None if nothing is."""
        thing = self._things.get(key)
        if thing is not None and key in self._streams:
            self._await(key, thing)
        return thing

    def keep(self, key: object, thing: T) -> T:
        """Keep something made on the current stream. Nothing is kept that a captured CUDA graph
        will compute: until it is replayed there is nothing in it.
        """
        tensors = list(_tensors(thing))
        on = next((t.device for t in tensors if t.is_cuda), None)
        if on is not None:
            if torch.cuda.is_current_stream_capturing():
                return thing
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(on))
            self._streams[key] = event, {current_stream(on)}
        self._things[key] = thing
        if tensors:
            _account(self, sum(t.nbytes for t in tensors))
        return thing

    def remembered(self, key: object, make: Callable[[], T]) -> T:
        """What is kept under ``key``, made now if nothing is."""
        found = self.get(key)
        if found is None:
            with _lock:  # what two threads want at once is made once
                found = self.get(key)
                if found is None:
                    found = self.keep(key, make())
        return found

    def _await(self, key: object, thing: Any) -> None:
        event, waited = self._streams[key]
        tensors = [t for t in _tensors(thing) if t.is_cuda]
        if not tensors or (stream := current_stream(tensors[0].device)) in waited:
            return
        current = torch.cuda.current_stream(tensors[0].device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)
        if not torch.cuda.is_current_stream_capturing():
            waited.add(stream)


class _Owner:
    """One tensor object (of views, their base), its version, and the entries of its places."""

    __slots__ = ("entries", "fingerprints", "reference", "version")

    def __init__(self, reference: weakref.ref[Tensor], version: int | None) -> None:
        self.reference, self.version = reference, version
        self.entries: dict[Place, Entry] = {}
        self.fingerprints: dict[Place, int] = {}


class _Held:
    """Everything known of what lies in one storage."""

    __slots__ = ("owners", "reference")

    def __init__(self, reference: weakref.ref[Any]) -> None:
        self.reference = reference
        self.owners: dict[int, _Owner] = {}


#: By identity of the storage; whoever reads compares the weak reference.
_storages: dict[int, _Held] = {}


def known(tensor: Tensor) -> Entry | None:
    """The entry of a tensor as it is now, if there is one. Asks nothing of a device."""
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
    if owner.version != version_of(tensor):
        return None
    place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    entry = owner.entries.get(place)
    if entry is not None and can_look(tensor) and owner.fingerprints[place] != fingerprint(tensor):
        return None
    return entry


def entry_of(tensor: Tensor, *, declared: bool = False) -> Entry:
    """The entry of a tensor as it is now, made if there is none; one that nobody will find again
    where a change of the tensor could not be seen.
    """
    found = known(tensor)
    if found is None:
        with _lock:  # another thread may have been quicker
            found = known(tensor) or _made(tensor, declared)
    found.declared |= declared
    found.stamp = next(_stamps)
    return found


def remembered(tensor: Tensor, key: object, make: Callable[[], T], *others: Tensor) -> T:
    """``make()``, once for each key while ``tensor``, and the ``others`` that it depends on, live
    unchanged; at every call under a tracer or a transform.

    What is made must not hold one of the tensors, nor a view of it, or none would ever go.

    >>> x = torch.tensor([1, 2])
    >>> remembered(x, "sum", lambda: int(x.sum())), remembered(x, "sum", lambda: 0)
    (3, 3)
    >>> remembered(x.add_(1), "sum", lambda: int(x.sum()))
    5
    """
    if not is_plain_call((tensor, *others)):
        return make()
    key = (key, *[entry_of(other).serial for other in others]) if others else key

    def plainly() -> T:
        with torch.inference_mode(False), torch.no_grad():
            return make()

    return entry_of(tensor).remembered(key, plainly)


def unchanging(tensor: Tensor) -> Tensor:
    """Promise that an index tensor is not written to as long as it lives.

    What is found out about it is then trusted where writes could not be seen (inference mode, CUDA
    graphs that are replayed), and the best schedule is made at its first use instead of after a
    few. `insum.constant` promises more: that the values may become code.

    Args:
        tensor: an index tensor.

    Returns:
        The same tensor.

    Examples:
        >>> import insum, torch
        >>> edges = insum.unchanging(torch.tensor([[0, 1], [1, 0]]))
    """
    entry_of(tensor, declared=True)
    return tensor


def forget(tensor: Tensor | None = None) -> None:
    """Let go of what is remembered about a tensor and all that shares its storage, or about all.

    To be called after a write that nothing can see: through ``x.data``, by a kernel of one's own,
    by a collective operation into a tensor on a GPU.

    Args:
        tensor: what to forget about; everything where none is given.

    Examples:
        >>> import insum, torch
        >>> insum.forget(torch.arange(3))
    """
    with _lock:
        if tensor is None:
            for number in list(_storages):
                _drop(number)
        else:
            _drop(id(tensor.untyped_storage()))


def version_of(tensor: Tensor) -> int | None:
    """The counter that in-place writes advance; tensors made under inference mode have none."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def can_look(tensor: Tensor) -> bool:
    """Whether values can be looked at, at every call, without waiting for a device."""
    return tensor.is_cpu


#: Numbers that values are multiplied with, and how many values at a time.
_CHUNK = 1 << 16


def fingerprint(tensor: Tensor) -> int:
    """A number that other values have with a probability of 2**-64."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype is not torch.int64:
        flat = flat.to(torch.float64).view(torch.int64) if flat.is_floating_point() else flat.long()
    total = flat.numel()
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        mixed = int(torch.dot(chunk, _weights(chunk.numel())))
        total = (total * 0x9E3779B97F4A7C15 + mixed) % 2**64
    return total


def _weights(count: int) -> Tensor:
    global _drawn
    if _drawn is None:
        generator = torch.Generator().manual_seed(0x1A5A)
        with torch.inference_mode(False):
            _drawn = torch.randint(
                -(2**62), 2**62, (_CHUNK,), generator=generator, device="cpu"
            ).bitwise_or_(1)
    return _drawn[:count]


_drawn: Tensor | None = None


# --- finding and making ---------------------------------------------------------------------------


def _saved(held: _Held, tensor: Tensor) -> _Owner | None:
    """The owner of what autograd saved: compiled graphs detach the views that they save, so that
    their backward pass gets other objects. They share storage and version counter. Outside of a
    backward pass such an object may be anything, ``x.data`` for one, whose counter starts anew.
    """
    if not in_backward():
        return None
    place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    for owner in list(held.owners.values()):
        if place in owner.entries and owner.reference() is not None:
            return owner
    return None


def _made(tensor: Tensor, declared: bool) -> Entry:
    version = version_of(tensor)
    entry = Entry(declared)
    if version is None and not declared and not can_look(tensor):
        return entry
    root = tensor._base
    root = tensor if root is None else root
    place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    owner = _owner(tensor.untyped_storage(), root, version)
    owner.entries[place] = entry
    entry.held = True
    if can_look(tensor):
        owner.fingerprints[place] = fingerprint(tensor)
    return entry


def _owner(storage: Any, root: Tensor, version: int | None) -> _Owner:
    number, key = id(storage), id(root)
    held = _storages.get(number)
    if held is None or held.reference() is not storage:
        # Bound here: at the end of the process the module's names are gone first.
        def gone(_: object, number: int = number, drop: Callable[[int], None] = _drop) -> None:
            drop(number)

        held = _storages[number] = _Held(weakref.ref(storage, gone))
    owner = held.owners.get(key)
    if owner is None or owner.reference() is not root or owner.version != version:
        owners = held.owners

        def dead(reference: object, key: int = key) -> None:
            found = owners.get(key)
            if found is not None and found.reference is reference:
                _release(owners.pop(key))

        if owner is not None:
            _release(owner)
        owner = owners[key] = _Owner(weakref.ref(root, dead), version)
    return owner


# --- the budget -----------------------------------------------------------------------------------

_total = {"bytes": 0}


def _account(entry: Entry, nbytes: int) -> None:
    """Count what was just kept; where it is too much, what was not used for longest goes."""
    entry.nbytes += nbytes
    if not entry.held:
        return
    with _lock:
        _total["bytes"] += nbytes
        budget = settings.memory
        if _total["bytes"] <= budget:
            return
        for old in sorted(_entries(), key=lambda e: e.stamp):
            if old is not entry and old.nbytes:
                _total["bytes"] -= old.nbytes
                old._things, old._streams, old.nbytes = {}, {}, 0
            if _total["bytes"] <= budget:
                return


def _release(owner: _Owner) -> None:
    for entry in owner.entries.values():
        entry.held = False
        _total["bytes"] -= entry.nbytes


def _drop(number: int) -> None:
    held = _storages.pop(number, None)
    for owner in held.owners.values() if held is not None else ():
        _release(owner)


def _entries() -> Iterator[Entry]:
    for held in list(_storages.values()):
        for owner in list(held.owners.values()):
            yield from list(owner.entries.values())


def _tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors in something that is kept: in itself, in tuples, lists, dictionaries and
    dataclasses.
    """
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for one in thing:
            yield from _tensors(one)
    elif isinstance(thing, dict):
        yield from _tensors(list(thing.values()))
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            yield from _tensors(getattr(thing, field.name))


@dataclasses.dataclass(frozen=True)
class Report:
    """What is remembered: tensors, entries, and bytes of what was derived from them."""

    tensors: int
    entries: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.entries} entries about {self.tensors} tensors, {self.nbytes / 2**20:.1f} MiB"


def report() -> Report:
    """How much is remembered now.

    >>> report()  # doctest: +SKIP
    Report(tensors=2, entries=3, nbytes=4096)
    """
    entries = list(_entries())
    tensors = sum(len(held.owners) for held in list(_storages.values()))
    return Report(tensors, len(entries), sum(e.nbytes for e in entries))
