"""Stores with a bound: where there is too much, the oldest goes. Which there are is listed in
``docs/stores.md``.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def keep(store: dict[K, T], key: K, thing: T, most: int) -> T:
    """Put something into a store of at most ``most`` things, unless another thread was quicker;
    gives what is there now.

    >>> store = {"a": 1, "b": 2}
    >>> keep(store, "c", 3, most=2), store
    (3, {'b': 2, 'c': 3})
    """
    while len(store) >= most and key not in store:
        try:
            del store[next(iter(store))]
        except (KeyError, RuntimeError, StopIteration):  # another thread drops things too
            continue
    return store.setdefault(key, thing)


MOST_SAID = 1024
_said: dict[str, None] = {}


def is_first(text: str) -> bool:
    """Whether a text was not said before, for warnings that are given once."""
    if text in _said:
        return False
    keep(_said, text, None, MOST_SAID)
    return True


def say_again() -> None:
    """Everything may be said once more."""
    _said.clear()
