"""What the user wishes, for the whole process: attributes, environment variables ``INSUM_<NAME>``,
and a context manager.

Kept apart from `Config`, which is what the planner or the tuner chooses for one kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, fields, replace
from typing import Any

from insum.bounded import keep
from insum.errors import SettingsError

_CHOICES: dict[str, tuple[str, ...]] = {
    "check": ("async", "always", "never"),
    "backend": ("auto", "graph", "fused", "inductor"),
    "tier": ("auto", "stable"),
    "scatter": ("auto", "segment", "onehot", "unrolled", "store", "atomic"),
    "dot": ("auto", "always", "never"),
    "effort": ("none", "quick", "full"),
    "fuse": ("auto", "always", "never"),
}


@dataclass(frozen=True, slots=True)
class SettingValues:
    """All settings with their defaults.

    - ``check``: how index values are checked against their range: ``async`` (on the CPU before
      every call; on GPUs by the kernels, without waiting, so that a later call reports what is out
      of range), ``always`` (before every call, also on GPUs, which waits), ``never``.
    - ``backend``: ``auto`` (the fused kernel on GPUs, where plain matrix products are left to
      cuBLAS; the graph elsewhere), ``graph``, ``fused``, ``inductor`` (the graph, compiled by
      TorchInductor).
    - ``require_fused``: a statement without a fused kernel (or one that TorchInductor cannot
      compile, where that is the backend) is an error instead of a slower path.
    - ``native_matmul``: with ``backend="inductor"`` on GPUs, matrix products are part of the
      generated kernels.
    - ``tier``: ``auto`` gives index tensors that come back a better schedule, which may change the
      order of sums; ``stable`` keeps that of the first call.
    - ``scatter``: force one scatter strategy where it is applicable (tests and ablation).
    - ``dot``: whether contractions use ``tl.dot``.
    - ``swap``, ``prefetch``: allow the operand swap and hand-prefetched indices (ablation).
    - ``lazy_broadcasting``: operands of ``tl.dot`` are loaded in the shape it takes; without it
      they are loaded with an axis for every loop variable, then reshaped and transposed (ablation).
    - ``effort``: what the first call of a statement spends on a search for the best config:
      ``none`` (the first guess, or what an earlier search left in the cache), ``quick`` (seconds),
      ``full``.
    - ``fuse``: whether compiled graphs (`insum.fusion`) fuse a chain: ``auto`` (where it pays),
      ``always`` (wherever it is one statement), ``never``.
    - ``log``: comma-separated topics to report on standard error: ``plan``, ``kernel``,
      ``fallback``, ``fusion``. Also ``INSUM_LOGS``.
    - ``memory``: bytes that may be spent on what is derived from index tensors and kept with them
      (orders, segments, tables); beyond it, what was not used for longest goes first.
    """

    check: str = "async"
    backend: str = "auto"
    require_fused: bool = False
    native_matmul: bool = True
    tier: str = "auto"
    scatter: str = "auto"
    dot: str = "auto"
    swap: bool = True
    prefetch: bool = True
    lazy_broadcasting: bool = True
    effort: str = "none"
    fuse: str = "auto"
    log: str = ""
    memory: int = 4 * 2**30


class Settings:
    """The settings: of the process, and of blocks.

    An assignment holds for the process. A ``with`` block holds for the thread, or the task, that
    entered it and ends with it; an assignment inside a block belongs to the block. A call uses what
    holds when it is made, for its backward pass too.

    >>> import insum
    >>> insum.settings.check
    'async'
    >>> with insum.settings(check="never"):
    ...     insum.settings.check
    'never'
    >>> insum.settings.check
    'async'
    """

    __slots__ = ("_block", "_process", "hold", "let_go")
    _block: ContextVar[SettingValues | None]
    _process: SettingValues
    #: Begins a block with the settings that held elsewhere: when a call was made whose backward
    #: pass runs now, in a thread of autograd's. ``let_go`` ends it. Each backward pass does, so
    #: these are the variable's own.
    hold: Callable[[SettingValues], Token[SettingValues | None]]
    let_go: Callable[[Token[SettingValues | None]], None]

    def __init__(self, values: SettingValues) -> None:
        block: ContextVar[SettingValues | None] = ContextVar("insum_settings", default=None)
        object.__setattr__(self, "_block", block)
        object.__setattr__(self, "_process", _one(values))
        object.__setattr__(self, "hold", block.set)
        object.__setattr__(self, "let_go", block.reset)

    @property
    def values(self) -> SettingValues:
        """A frozen snapshot; hashable, so that it can be part of a cache key. Equal ones are one
        object.
        """
        return self._block.get() or self._process

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self.values, name)
        except AttributeError:
            raise AttributeError(
                f"insum.settings has no {name!r}; it has {', '.join(_names())}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        new = _one(replace(self.values, **{name: _checked(name, value)}))
        if self._block.get() is None:
            object.__setattr__(self, "_process", new)
        else:
            self._block.set(new)

    @contextmanager
    def __call__(self, **changes: Any) -> Iterator[Settings]:
        """Change settings for the length of a ``with`` block."""
        checked = {name: _checked(name, value) for name, value in changes.items()}
        token = self.hold(_one(replace(self.values, **checked)))
        try:
            yield self
        finally:
            self.let_go(token)

    def __dir__(self) -> list[str]:
        return [*_names(), "values"]

    def __reduce__(self) -> str:
        return "settings"  # copies and unpickled ones are the one object of the process

    def __repr__(self) -> str:
        now = self.values
        return f"insum.settings({', '.join(f'{n}={getattr(now, n)!r}' for n in _names())})"


MOST_SEEN = 1024
_seen: dict[SettingValues, SettingValues] = {}


def _one(values: SettingValues) -> SettingValues:
    """The one object for equal values, so that what is remembered for settings can be told by
    identity.
    """
    return keep(_seen, values, values, MOST_SEEN)


def _names() -> list[str]:
    return [f.name for f in fields(SettingValues)]


def _checked(name: str, value: Any) -> Any:
    if name not in _names():
        raise SettingsError(f"there is no setting {name!r}", expected=", ".join(_names()))
    if name in _CHOICES and not (isinstance(value, str) and value in _CHOICES[name]):
        raise SettingsError(
            f"settings.{name} cannot be {value!r}",
            expected="one of " + ", ".join(map(repr, _CHOICES[name])),
        )
    default = getattr(SettingValues(), name)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise SettingsError(f"settings.{name} cannot be {value!r}", expected="True or False")
    if type(default) is int and (type(value) is not int or value < 0):
        raise SettingsError(
            f"settings.{name} cannot be {value!r}", expected="an integer of at least 0"
        )
    if isinstance(default, str) and not isinstance(value, str):
        raise SettingsError(f"settings.{name} cannot be {value!r}", expected="a string")
    return value


def _from_environment(environment: dict[str, str]) -> SettingValues:
    changes: dict[str, Any] = {}
    for name in _names():
        text = environment.get(f"INSUM_{name.upper()}")
        if text is None and name == "log":
            text = environment.get("INSUM_LOGS")
        if text is not None:
            changes[name] = _checked(name, _read(name, text))
    return replace(SettingValues(), **changes)


def _read(name: str, text: str) -> Any:
    default = getattr(SettingValues(), name)
    if type(default) is int:
        if not text.strip().isdigit():
            raise SettingsError(f"INSUM_{name.upper()} is {text!r}", expected="an integer")
        return int(text)
    if not isinstance(default, bool):
        return text.strip().lower() if name in _CHOICES else text
    if text.strip().lower() not in ("1", "0", "true", "false", "on", "off", "yes", "no"):
        raise SettingsError(f"INSUM_{name.upper()} is {text!r}", expected="1 or 0")
    return text.strip().lower() in ("1", "true", "on", "yes")


settings = Settings(_from_environment(dict(os.environ)))
