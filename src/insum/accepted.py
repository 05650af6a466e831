"""What public functions take, said once for each: a wrong kind of argument is an error of insum's
that names it, whatever torch or Python would have made of it.

`takes` looks before a function runs. `explains` costs a warm call nothing: it looks at the
arguments when a call has failed, and lets the error through where nothing is wrong with them.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from insum.errors import DtypeError, InsumError, UnsupportedError

F = TypeVar("F", bound=Callable[..., Any])
#: Sizes of what is stored are mistakes from here on. A sparse tensor may be larger.
LIMIT = 2**31
#: What lazy modules hold before they are called.
SHAPELESS = (UninitializedParameter, UninitializedBuffer)
WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
#: What insum computes with.
COMPUTABLE = frozenset(
    {torch.float16, torch.bfloat16, *WIDE}
    | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)
#: Floats of 8 bits: read as factors, and computed with in what they meet.
NARROW_FLOATS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
INTEGER_DTYPES = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A kind of argument: how it is called, whether a value is of it, and, for objects that were
    checked when they were made, whether they still are what they were.
    """

    expected: str
    fits: Callable[[Any], bool]
    sound: Callable[[Any], object] = lambda value: True

    @property
    def optional(self) -> Accepted:
        return replace(
            self,
            expected=f"{self.expected}, or None",
            fits=lambda value: value is None or self.fits(value),
            sound=lambda value: value is None or self.sound(value),
        )

    def __or__(self, other: Accepted) -> Accepted:
        return Accepted(
            f"{self.expected}, or {other.expected}",
            lambda value: self.fits(value) or other.fits(value),
            lambda value: self.sound(value) if self.fits(value) else other.sound(value),
        )


# --- kinds ----------------------------------------------------------------------------------------


def odd_tensor(value: Tensor) -> str:
    """What a tensor is called that has no shape and strides, or no numbers as elements; '' for
    others.
    """
    if type(value) is not Tensor and isinstance(value, SHAPELESS):
        return "a parameter without a shape yet"
    if value.is_nested:
        return "a nested tensor"
    if value.is_quantized:
        return "a quantised tensor"
    if value.layout != torch.strided:
        return f"a {str(value.layout).removeprefix('torch.')} tensor"
    return ""


def is_common(value: object) -> bool:
    """Whether a value is a tensor of torch's own type as most are, which every kind of tensor
    allows but for its dtype: asked first where every step of a network asks.
    """
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
    )


def is_dense(value: object) -> bool:
    return isinstance(value, Tensor) and not odd_tensor(value)


def has_elements(value: object) -> bool:
    """Whether the elements of a tensor can be looked at; a tracer's are not there yet."""
    if not is_dense(value):
        return False
    assert isinstance(value, Tensor)
    return torch.compiler.is_compiling() or not (value.is_meta or is_fake(value))


def is_fake(value: Tensor) -> bool:
    return hasattr(value, "fake_mode")


def is_integer(value: object) -> bool:
    """Python's, NumPy's and a tracer's, but no truth values."""
    if isinstance(value, bool | Tensor):
        return False
    return isinstance(value, numbers.Integral | torch.SymInt)


def is_size(value: object, least: int = 0, limit: int = LIMIT) -> bool:
    try:
        return is_integer(value) and bool(least <= value < limit)  # type: ignore[operator]
    except Exception:  # a symbol that nothing is known of
        return False


def is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool | Tensor)


def _all(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, tuple | list) and all(map(fits, values))


def _is_device(value: object) -> bool:
    if not isinstance(value, str | int | torch.device) or isinstance(value, bool):
        return False
    try:
        return torch.device(value).type != "meta"
    except (RuntimeError, ValueError):
        return False


TENSOR = Accepted("a dense tensor", is_dense)
FLOATS = Accepted(
    "a dense tensor of floating-point numbers",
    lambda v: is_dense(v) and (v.dtype in (torch.float16, torch.bfloat16, *WIDE)),
)
#: What a layer may hold beside its weight.
HELD_FLOATS = Accepted(
    FLOATS.expected, lambda v: FLOATS.fits(v) or is_dense(v) and v.dtype in NARROW_FLOATS
)
VALUES = Accepted(
    "a dense tensor of numbers that insum computes with",
    lambda v: is_dense(v) and v.dtype in COMPUTABLE | NARROW_FLOATS,
)
ELEMENTS = Accepted("a dense tensor whose elements are here", has_elements)
ANY_TENSOR = Accepted("a tensor", lambda v: isinstance(v, Tensor) and not isinstance(v, SHAPELESS))
TENSORS = Accepted("a tuple of dense tensors", _all(is_dense))
COUNT = Accepted("an integer of at least 0", is_size)
SIZE = Accepted("an integer of at least 1", functools.partial(is_size, least=1))
COUNTS = Accepted("integers of at least 0", _all(is_size))
SHAPE = Accepted(
    "integers of at least 0, as a tuple", _all(functools.partial(is_size, limit=2**63))
)
INTEGER = Accepted("an integer", lambda v: is_integer(v) and not isinstance(v, torch.SymInt))
NUMBER = Accepted("a number", is_number)
NUMBERS = Accepted("numbers", _all(is_number))
FLAG = Accepted("True or False", lambda v: isinstance(v, bool))
TEXT = Accepted("a string", lambda v: isinstance(v, str))
CONSTANTS = Accepted(
    "a dense tensor of integers or floating-point numbers that are here",
    lambda v: has_elements(v) and (v.dtype in INTEGER_DTYPES or v.dtype.is_floating_point),
)
DEVICE = Accepted("a device that holds elements, such as 'cpu' or 'cuda:1'", _is_device)
LAYOUT = Accepted("a torch.layout", lambda v: isinstance(v, torch.layout))
DTYPE = Accepted("a torch.dtype", lambda v: isinstance(v, torch.dtype))


# --- asking for them ------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A value in a message: what it is, where that says more than all that is in it."""
    if isinstance(value, Tensor):
        odd = odd_tensor(value)
        if odd:
            return odd
        kind = str(value.dtype).removeprefix("torch.")
        return f"a {kind} tensor {tuple(value.shape)} on {value.device}"
    if value is None or isinstance(value, str | bytes | numbers.Number | torch.dtype | range):
        return repr(value)
    if isinstance(value, tuple | list) and len(value) < 10 and all(map(_is_plain, value)):
        return repr(value)
    return f"a {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | numbers.Number)


def require(name: str, value: object, kind: Accepted, error: type[InsumError] = DtypeError) -> None:
    """Raise where an argument is not of a kind.

    >>> require("x", [1, 2], TENSOR)
    Traceback (most recent call last):
        ...
    insum.errors.DtypeError: x is [1, 2]
      expected: a dense tensor
    """
    try:
        fits = bool(kind.fits(value))
    except Exception:  # an object that does not even let itself be looked at
        fits = False
    if not fits:
        raise error(f"{name} is {shown(value)}", expected=kind.expected)


def takes(error: type[InsumError] = DtypeError, /, **kinds: Accepted) -> Callable[[F], F]:
    """A function whose arguments are looked at before it runs, and once more where it fails.

    >>> @takes(count=SIZE)
    ... def repeated(text, count):
    ...     return text * count
    >>> repeated("a", 0)
    Traceback (most recent call last):
        ...
    insum.errors.DtypeError: count is 0
      expected: an integer of at least 1
    """
    return functools.partial(_asking, error=error, kinds=kinds, first=True)


def explains(
    error: type[InsumError] = DtypeError,
    /,
    also: Callable[..., None] = lambda *arguments: None,
    **kinds: Accepted,
) -> Callable[[F], F]:
    """A function whose arguments are looked at where it fails; ``also`` looks at all of them
    together.
    """
    return functools.partial(_asking, error=error, kinds=kinds, first=False, also=also)


def _asking(
    function: F,
    *,
    error: type[InsumError],
    kinds: dict[str, Accepted],
    first: bool,
    also: Callable[..., None] = lambda *arguments: None,
) -> F:
    names = tuple(inspect.signature(function).parameters)
    unknown = kinds.keys() - {*names}
    assert not unknown, unknown

    def look(args: tuple[Any, ...], named: dict[str, Any], sound: bool = False) -> None:
        for name, value in (*zip(names, args), *named.items()):
            if name in kinds:
                require(name, value, kinds[name], error)
                if sound:
                    require_sound(name, value, kinds[name], error)

    @functools.wraps(function)
    def asked(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **named)
        if first:
            look(args, named)
        try:
            return function(*args, **named)
        except Exception as wrong:
            _refuse_tracing(wrong)
            if isinstance(wrong, InsumError):
                raise
            look(args, named, sound=True)
            also(*args, *named.values())
            raise

    return cast(F, asked)


def _refuse_tracing(wrong: Exception) -> None:
    """Say why a call failed in `torch.jit.trace`, in which sizes are tensors."""
    if torch.jit.is_tracing() and not isinstance(wrong, UnsupportedError):  # type: ignore[attr-defined,no-untyped-call]
        raise UnsupportedError(
            "torch.jit.trace cannot record this",
            expected="torch.compile or torch.export, which take every layer",
            remedy="torch.export.export(model, example), then insum.export.package(program, path)",
        ) from wrong


def require_sound(name: str, value: object, kind: Accepted, error: type[InsumError]) -> None:
    """Raise where an object is no longer what it was when it was made."""
    try:
        kind.sound(value)
    except InsumError:
        raise
    except Exception as wrong:
        raise error(
            f"{name}, a {type(value).__name__}, is not as it was made: {wrong}",
            expected=kind.expected,
        ) from wrong
