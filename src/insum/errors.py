"""One tree of errors. Every message states the fact, what was expected and what to do about it.

The low levels raise with the fact alone; the statement, a caret and the tensors that were passed
are added where they are known, so that a message reads the same whichever stage found the mistake.
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
    "RankError",
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
        self.fact, self.expected, self.remedy = map(_cut, (fact, expected, remedy))
        self.statement, self.span, self.passed = statement, span, tuple(map(_cut, passed))
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
        return _rebuild, (
            type(self),
            self.fact,
            self.expected,
            self.remedy,
            self.statement,
            self.span,
            self.passed,
        )


def _rebuild(
    kind: type[InsumError],
    fact: str,
    expected: str,
    remedy: str,
    statement: str,
    span: Span | None,
    passed: tuple[str, ...],
) -> InsumError:
    return kind(
        fact, expected=expected, remedy=remedy, statement=statement, span=span, passed=passed
    )


_WIDTH = 100
#: Characters of one part of a message; what users pass may be of any length.
_LENGTH = 1000


def _cut(text: str) -> str:
    """Short enough to be read, and of characters that can be written."""
    text = text if len(text) <= _LENGTH else text[: _LENGTH - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _with_caret(statement: str, span: Span | None) -> list[str]:
    """The statement on one line (cut around the caret where long) and a caret line under it."""
    text = "".join(c if c.isprintable() else " " for c in statement)
    if span is None:
        return [f"    {text if len(text) <= _WIDTH else text[:_WIDTH] + '...'}"]
    first = max(0, min(span.start - _WIDTH // 2, len(text) - _WIDTH))
    window = text[first : first + _WIDTH]
    left, right = "..." if first else "", "..." if first + _WIDTH < len(text) else ""
    width = max(1, min(span.end, first + _WIDTH) - span.start)
    return [
        f"    {left}{window}{right}",
        "    " + " " * (len(left) + span.start - first) + "^" * width,
    ]


class StatementError(InsumError, ValueError):
    """The text is not a statement of the language.

    >>> import insum, torch
    >>> try:
    ...     insum.compile("C[i = A[i]")
    ... except insum.StatementError as error:
    ...     print(error.fact)
    unbalanced bracket: '[' is never closed
    """


class BindingError(InsumError, ValueError):
    """The tensors that were passed do not fit the statement: names, ranks, extents, sizes.

    >>> import insum, torch
    >>> try:
    ...     insum.insum("y[i] = A[i,j]", A=torch.ones(3))
    ... except insum.BindingError as error:
    ...     print(error.fact)
    A has 1 dimension(s) (3,) but is indexed with 2: A[i,j]
    """


class DtypeError(InsumError, TypeError):
    """A tensor has a dtype that the statement cannot use in that place.

    >>> import insum, torch
    >>> try:
    ...     insum.insum("y[i] = A[D[i]]", A=torch.ones(3), D=torch.ones(2))
    ... except insum.DtypeError as error:
    ...     print(error.fact)
    D indexes A but holds float32
    """


class DeviceError(InsumError, RuntimeError):
    """The tensors of one statement are on different devices.

    >>> import insum, torch
    >>> try:
    ...     insum.insum("y[i] = A[i] * B[i]", A=torch.ones(3), B=torch.ones(3, device="meta"))
    ... except insum.DeviceError as error:
    ...     print(error.fact)
    A is on cpu but B is on meta
    """


class IndexRangeError(InsumError, IndexError):
    """An index value lies outside the dimension it indexes.

    >>> import insum, torch
    >>> try:
    ...     insum.insum("y[i] = A[i + 1]", sizes={"i": 3}, A=torch.ones(3))
    ... except insum.IndexRangeError as error:
    ...     print(error.fact)
    index i + 1 of A reaches 3, outside dimension 0 of size 3
    """


class AutogradError(InsumError, RuntimeError):
    """The call would do what autograd forbids, such as writing into a leaf that requires a
    gradient.

    >>> import insum, torch
    >>> try:
    ...     insum.insum("C[i] += A[i]", C=torch.ones(3, requires_grad=True), A=torch.ones(3))
    ... except insum.AutogradError as error:
    ...     print(error.fact)
    C is a leaf that requires a gradient, so that it cannot be written in place
    """


class FormatError(InsumError, ValueError):
    """The arrays of a sparse format contradict each other, or a conversion got input it cannot
    take.

    >>> import insum, torch
    >>> try:
    ...     insum.formats.COO(torch.ones(2), (torch.tensor([2, 0]),), shape=(3,))
    ... except insum.FormatError as error:
    ...     print(error.fact)
    entry 1 at (0,) comes after entry 0 at (2,)
    """


class SettingsError(InsumError, ValueError):
    """A setting has a value it cannot take.

    >>> import insum, torch
    >>> try:
    ...     insum.settings.check = "sometimes"
    ... except insum.SettingsError as error:
    ...     print(error.fact)
    settings.check cannot be 'sometimes'
    """


class UnsupportedError(InsumError, NotImplementedError):
    """A well-formed request that insum does not do; the message names the supported alternative.

    >>> import insum, torch
    >>> try:
    ...     A, B = (insum.formats.COO.from_dense(torch.eye(3)) for _ in range(2))
    ...     insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)
    ... except insum.UnsupportedError as error:
    ...     print(error.fact)
    A and B are both sparse and meet in index 'k': their entries would have to be intersected
    """


class NotFusedError(InsumError, RuntimeError):
    """``settings.require_fused`` is on and the statement has no fused kernel; the message says why.

    >>> import insum, torch
    >>> try:
    ...     with insum.settings(require_fused=True):
    ...         insum.insum("t[] = A[i]", A=torch.ones(3, dtype=torch.complex64))
    ... except insum.NotFusedError as error:
    ...     print(error.fact)
    no fused kernel: generated kernels do not run on cpu
    """


class RankError(InsumError, RuntimeError):
    """Ranks of a group do not agree, or another rank failed: raised on every rank that would wait.

    >>> from insum.distributed.agreement import lost
    >>> print(lost(RuntimeError("Timed out waiting 1000ms for recv operation to complete")).fact)
    an exchange with other ranks failed: Timed out waiting 1000ms for recv operation to complete
    """


class BenchError(InsumError, ValueError):
    """``insum bench`` was asked for a benchmark, a folder or a file that there is not.

    >>> from insum.bench.main import main
    >>> main(["faster"])
    insum bench: there is no benchmark 'faster'
      expected: block-spmm, spmm, conv, tensor-product, ablation, compilers, all, gallery,
      survey, equivariant, fresh, sweep, ... or report
    2
    """
