"""One tree of errors. Every message states the fact, what was expected and what to do about it.

The low levels raise with the fact alone; the statement, a caret and the tensors that were passed are added where they are
known, so that a message reads the same whichever stage found the mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "AutogradError",
    "BindingError",
    "DeviceError",
    "DtypeError",
    "FormatError",
    "IndexRangeError",
    "InsumError",
    "NotFusedError",
    "SettingsError",
    "StatementError",
    "UnsupportedError",
]


@dataclass(frozen=True, slots=True)
class Span:
    """A place in the text of a statement: characters ``start`` up to, not including, ``end``."""

    start: int
    end: int


class InsumError(Exception):
    """Base of every error that insum raises on purpose.

    >>> import insum, torch
    >>> try:
    ...     insum.insum("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(4))
    ... except insum.InsumError as error:
    ...     print(str(error).splitlines()[0])
    index 'j' has two extents: 3 in A[i,j] (dimension 1) and 4 in x[j] (dimension 0)
    """

    def __init__(
        self,
        fact: str,
        *,
        expected: str = "",
        remedy: str = "",
        statement: str = "",
        span: Span | None = None,
        passed: Sequence[str] = (),
    ) -> None:
        self.fact, self.expected, self.remedy = fact, expected, remedy
        self.statement, self.span, self.passed = statement, span, tuple(passed)
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [self.fact]
        if self.statement:
            lines += _with_caret(self.statement, self.span)
        lines += [f"    {line}" for line in self.passed]
        if self.expected:
            lines.append(f"  expected: {self.expected}")
        if self.remedy:
            lines.append(f"  try: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.fact, self.expected, self.remedy, self.statement, self.span, self.passed)


def _rebuild(kind: type[InsumError], fact: str, expected: str, remedy: str, statement: str, span: Span | None, passed: tuple[str, ...]) -> InsumError:
    return kind(fact, expected=expected, remedy=remedy, statement=statement, span=span, passed=passed)


_WIDTH = 100


def _with_caret(statement: str, span: Span | None) -> list[str]:
    """The statement on one line (cut around the caret where it is long) and a caret line under it."""
    text = "".join(c if c.isprintable() else " " for c in statement)
    if span is None:
        return [f"    {text if len(text) <= _WIDTH else text[:_WIDTH] + '...'}"]
    first = max(0, min(span.start - _WIDTH // 2, len(text) - _WIDTH))
    window = text[first : first + _WIDTH]
    left, right = "..." if first else "", "..." if first + _WIDTH < len(text) else ""
    width = max(1, min(span.end, first + _WIDTH) - span.start)
    return [f"    {left}{window}{right}", "    " + " " * (len(left) + span.start - first) + "^" * width]


class StatementError(InsumError, ValueError):
    """The text is not a statement of the language."""


class BindingError(InsumError, ValueError):
    """The tensors that were passed do not fit the statement: names, ranks, extents, sizes."""


class DtypeError(InsumError, TypeError):
    """A tensor has a dtype that the statement cannot use in that place."""


class DeviceError(InsumError, RuntimeError):
    """The tensors of one statement are on different devices."""


class IndexRangeError(InsumError, IndexError):
    """An index value lies outside the dimension it indexes."""


class AutogradError(InsumError, RuntimeError):
    """The call would do what autograd forbids, such as writing into a leaf that requires a gradient."""


class FormatError(InsumError, ValueError):
    """The arrays of a sparse format contradict each other, or a conversion got input it cannot take."""


class SettingsError(InsumError, ValueError):
    """A setting has a value it cannot take."""


class UnsupportedError(InsumError, NotImplementedError):
    """A well-formed request that insum does not do; the message names the supported alternative."""


class NotFusedError(InsumError, RuntimeError):
    """``settings.require_fused`` is on and the statement has no fused kernel; the message says why."""
