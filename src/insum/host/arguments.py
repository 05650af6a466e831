"""What a CPU is called with: values, and what is remembered about the index tensors among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

from insum import memory
from insum.compat.contexts import untracked
from insum.lang.bind import Value

T = TypeVar("T")
#: What is remembered about each index tensor of a call.
IndexEntries: TypeAlias = Mapping[str, memory.Entry]


def kept_with(entry: memory.Entry, key: object, make: Callable[[], T]) -> T:
    """``make()``, once while the tensor of an entry stays as it is."""
    found: T | None = entry.get(key)
    return _remembered(entry, key, make) if found is None else found


def _remembered(entry: memory.Entry, key: object, make: Callable[[], T]) -> T:
    def plainly() -> T:
        with untracked():
            return make()

    return entry.remembered(key, plainly)


class HostCall:
    """The arguments of a call: ``values`` as given, ``indices`` with negative values counted from
    the end where they are, ``entries`` of the index tensors as they were given.
    """

    __slots__ = ("_wrap", "_wrapped", "entries", "entry", "serials", "values")

    def __init__(
        self,
        values: Mapping[str, Value],
        entries: IndexEntries,
        wrap: Callable[[Mapping[str, Value]], Mapping[str, Value]] | None = None,
    ) -> None:
        """``wrap`` counts from the end, where some index is to be."""
        self.values, self.entries, self._wrap = values, entries, wrap
        self._wrapped: Mapping[str, Value] | None = None
        serials, last = [], None
        for entry in entries.values():
            serials.append(entry.serial)
            last = entry
        #: What is made is kept with the last index tensor, for these others; nothing is where there
        #: is none.
        self.entry: Any = last
        self.serials = tuple(serials)

    def indices(self) -> Mapping[str, Value]:
        if self._wrap is None:
            return self.values
        if self._wrapped is None:
            self._wrapped = self._wrap(self.values)
        return self._wrapped

    def kept(self, key: object, make: Callable[[], T], name: str | None = None) -> T:
        """``make()``, once while all index tensors stay as they are; or the one of this ``name``
        alone, for all statements that have it.
        """
        if name is None:
            entry, key = self.entry, (key, self.serials)
        else:
            entry = self.entries[name]
        found: T | None = entry.get(key)  # as in `kept_with`: every warm call passes here
        return _remembered(entry, key, make) if found is None else found

    def comes_back(self, key: object) -> bool:
        """Whether these index tensors were asked about before, or are said to stay, so that
        something is worth making that takes longer than a call without it. Where the same bits
        are wanted each time, there is no first time.
        """
        asked = "asked", key, self.serials
        if asked in self.entry:
            return True
        self.entry.keep(asked, True)
        is_known = all(e.declared for e in self.entries.values())
        return is_known or torch.are_deterministic_algorithms_enabled()

    def given(self, name: str, value: Value) -> HostCall:
        """The same call, with one value more."""
        return HostCall({**self.values, name: value}, self.entries, self._wrap)

    def among(self, names: Iterable[str]) -> HostCall:
        """The same call, of which only these index tensors are to be known."""
        return HostCall(self.values, {name: self.entries[name] for name in names}, self._wrap)
