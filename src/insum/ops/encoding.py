"""Arguments of the torch ops: a request and its values as what a schema can say, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.call.request import Request
from insum.lang.bind import Size, Value
from insum.plan.config import choice_from, choice_text

Scalar: TypeAlias = bool | int | float | complex
Arguments: TypeAlias = tuple[
    str,
    str,
    list[Tensor],
    str,
    list[Scalar] | None,
    str,
    list[Size] | None,
    str,
    torch.dtype | None,
    str,
    str,
]


def encode(request: Request, values: Mapping[str, Value]) -> Arguments:
    """A request and its values as arguments that a torch op can take; sizes are named by
    `size_name`.
    """
    tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
    numbers = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
    if not _can_encode(request, numbers):
        # which says what is wrong; torch would only say that the op's schema does not fit
        request.bind(values)
    keys: list[str] = []
    sizes: list[Size] = []
    for key, size in request.sizes:
        keys.append(size_name(str(key), len(size) if isinstance(size, tuple) else None))
        sizes += size if isinstance(size, tuple) else (size,)
    padded, config = ",".join(request.padded), choice_text(request.config)
    # No numbers, and no sizes, are None and not an empty list, which torch.export cannot write to a
    # file or a package.
    named = (
        ",".join(tensors),
        list(tensors.values()),
        ",".join(numbers),
        list(numbers.values()) or None,
    )
    rest = padded, request.dtype, config, request.optimize
    return request.statement, *named, ";".join(keys), sizes or None, *rest


def size_name(key: str, length: int | None) -> str:
    """How a key of ``sizes`` stands among the arguments of an op: ``name#length`` for a shape, and
    for a single size the key itself, unless that would read as a shape.

    No key with a mark of ours means anything, but it has to arrive where that is said.
    """
    key = key.replace(";", "?")
    return f"{key}#{length}" if length is not None else f"{key}#" if "#" in key else key


def _can_encode(request: Request, numbers: Mapping[str, Value]) -> bool:
    sizes = [s for _, size in request.sizes for s in (size if isinstance(size, tuple) else (size,))]
    keys_fit = all(isinstance(key, str | int) for key, _ in request.sizes)
    return (
        keys_fit
        and all(isinstance(s, torch.SymInt) or _fits(s) for s in sizes)
        and all(isinstance(n, float | complex) or _fits(n) for n in numbers.values())
    )


def _fits(number: object) -> bool:
    return isinstance(number, int) and -(2**63) <= number < 2**63


def decode(arguments: Sequence[Any]) -> tuple[Request, dict[str, Value]]:
    """The reverse of `encode`."""
    statement, names, tensors, number_names, numbers, keys, sizes, *rest = arguments
    padded, dtype, config, optimize = rest
    values: dict[str, Value] = dict(zip(split_at(names, ","), tensors, strict=True))
    values.update(zip(split_at(number_names, ","), map(_plain_number, numbers or ()), strict=True))
    read: list[tuple[str | int, Size | tuple[Size, ...]]] = []
    rest = list(sizes or ())
    for key in split_at(keys, ";"):
        name, mark, length = key.rpartition("#")
        name = name if mark else key
        read.append(
            (
                int(name) if name.isdigit() else name,
                tuple(rest.pop(0) for _ in range(int(length))) if length and mark else rest.pop(0),
            )
        )
    padded_names, choice = tuple(split_at(padded, ",")), choice_from(config)
    request = Request(statement, tuple(read), padded_names, dtype, choice, optimize=optimize)
    return request, values


def decode_exactly(arguments: Sequence[Any]) -> tuple[Request, dict[str, Value]]:
    """The same, with symbolic numbers as they are: for what is traced, not only looked at."""
    request, values = decode(arguments)
    values.update(zip(split_at(arguments[3], ","), arguments[4] or ()))
    return request, values


def split_at(text: str, mark: str) -> list[str]:
    """The parts of a list that was written as text, which may be none."""
    return text.split(mark) if text else []


def _plain_number(number: Any) -> Scalar:
    """A tracer's symbolic number stands for one of its type; only the type matters where tracers
    look.
    """
    if isinstance(number, torch.SymInt):
        return 1
    result: Scalar = (
        1.0
        if isinstance(number, torch.SymFloat)
        else True
        if isinstance(number, torch.SymBool)
        else number
    )
    return result
