"""A request: a statement and the options that it is called with, as users give them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TypeAlias

import torch
from torch import Tensor

from insum.errors import BindingError
from insum.lang.bind import Problem, Size, Value, bind
from insum.lang.expr import tensors_of
from insum.lang.measure import SizeKeys
from insum.lang.parser import parse
from insum.plan.config import Choice, Config, choice_of
from insum.plan.path import AUTO, Optimize, optimize_text, wish_of

SizesArgument: TypeAlias = Mapping[str | int, Size | Sequence[Size]] | None
RequestSizes: TypeAlias = tuple[tuple[str | int, Size | tuple[Size, ...]], ...]


@dataclass(frozen=True)
class Form:
    """A statement and its options, but for the sizes themselves: what a kind of call is found by.

    Attributes:
        size_keys: what sizes are given of; for a shape, how many.
        dtype: overrides that of the result (for gradients, which must have their input's).
        wraps: index tensors in which negative values count from the end, as in programs that were
            fused.
        optimize: the order of contraction that is wished for, as text (`plan.path`).
    """

    statement: str
    size_keys: SizeKeys = ()
    padded: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    config: Choice | None = None
    wraps: frozenset[str] = frozenset()
    optimize: str = AUTO

    @property
    def is_extremum(self) -> bool:
        return head(self.statement).operator in ("max=", "min=")

    def spread(self, initial: Tensor, sizes: Sequence[Size]) -> Tensor:
        """What is accumulated from, in the shape of the result where that was given."""
        target, place = head_of_text(self.statement).target, 0
        for key, length in self.size_keys:
            if key != target or length is None:
                place += 1 if length is None else length
                continue
            shape = tuple(sizes[place : place + length])
            try:
                return initial.expand(shape)
            except RuntimeError as error:
                raise BindingError(
                    f"what is accumulated from has shape {tuple(initial.shape)}, which does not "
                    f"broadcast to {shape}",
                    statement=self.statement,
                    expected="a tensor that broadcasts to the result",
                ) from error
        return initial

    def request(self, sizes: Sequence[Size]) -> Request:
        """The request with these sizes."""
        left, named = list(sizes), []
        for key, length in self.size_keys:
            count = 1 if length is None else length
            mine, left = left[:count], left[count:]
            named.append((key, mine[0] if length is None else tuple(mine)))
        rest = (self.padded, self.dtype, self.config, self.wraps, self.optimize)
        return Request(self.statement, tuple(named), *rest)


@dataclass(frozen=True, slots=True)
class Request:
    """A statement and the options it is called with; see `Form`."""

    statement: str
    sizes: RequestSizes = ()
    padded: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    config: Choice | None = None
    wraps: frozenset[str] = frozenset()
    optimize: str = AUTO

    @property
    def form(self) -> Form:
        rest = (self.padded, self.dtype, self.config, self.wraps, self.optimize)
        return Form(self.statement, self.size_keys, *rest)

    @property
    def size_keys(self) -> SizeKeys:
        """What the sizes are of; the sizes themselves may be others in the next call."""
        return tuple((k, len(s) if isinstance(s, tuple) else None) for k, s in self.sizes)

    @property
    def size_values(self) -> tuple[Size, ...]:
        return tuple(n for _, s in self.sizes for n in (s if isinstance(s, tuple) else (s,)))

    def bind(self, values: Mapping[str, Value], initial: Tensor | None = None) -> Problem:
        statement = parse(self.statement)
        if initial is not None and statement.target.tensor not in values:
            whole = self.form.spread(initial, self.size_values)
            values = {**values, statement.target.tensor: whole}
        problem = bind(statement, values, sizes=dict(self.sizes), padded=self.padded)
        if self.optimize != AUTO:
            wish_of(problem, self.optimize)  # which says what is wrong with it
        return problem if self.dtype is None else replace(problem, dtype=self.dtype)


def request_of(
    statement: str,
    out_shape: Sequence[Size] | None,
    sizes: SizesArgument,
    padded: Sequence[str],
    config: Config | Sequence[Config] | None = None,
    optimize: Optimize = True,
) -> Request:
    """A request from the options as users give them."""
    if not isinstance(statement, str):
        parse(statement)  # which says what a statement is
    given = given_sizes(statement, out_shape, sizes)
    if not isinstance(padded, str) and not _are_names(padded):
        raise BindingError(
            f"padded is {padded!r}",
            statement=statement,
            expected="names of index tensors",
            remedy="padded=('D',)",
        )
    return Request(
        statement,
        given,
        (padded,) if isinstance(padded, str) else tuple(padded),
        None,
        choice_of(config),
        optimize=optimize_text(optimize),
    )


def given_sizes(
    statement: str, out_shape: Sequence[Size] | None, sizes: SizesArgument
) -> RequestSizes:
    """The sizes that were given, by what they are of."""
    given: RequestSizes = ()
    if out_shape is not None:
        given = ((head(statement).target, _shape(statement, "out_shape", out_shape)),)
    if sizes is not None:
        if not isinstance(sizes, Mapping):
            remedy = "the whole shape of the output is given as out_shape="
            raise BindingError(
                f"sizes is {sizes!r}",
                statement=statement,
                expected="a dict such as {'i': 8}",
                remedy=remedy,
            )
        given += tuple((key, _size(statement, key, size)) for key, size in sizes.items())
    return given


def _are_names(padded: object) -> bool:
    if not isinstance(padded, Collection) or isinstance(padded, Tensor):
        return False
    return all(isinstance(name, str) for name in padded)


def _shape(statement: str, name: str, shape: Sequence[Size]) -> tuple[Size, ...]:
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise BindingError(
            f"{name} is {shape!r}", statement=statement, expected="a shape: a tuple of integers"
        )
    return tuple(map(_integer, shape))


def _size(statement: str, key: str | int, size: Size | Sequence[Size]) -> Size | tuple[Size, ...]:
    return (
        _shape(statement, f"sizes[{key!r}]", size)
        if isinstance(size, Sequence) and not isinstance(size, str)
        else _integer(size)
    )


def _integer(size: Size) -> Size:
    """NumPy's integers as Python's; binding refuses what is none."""
    return int(size) if isinstance(size, Integral) and not isinstance(size, bool) else size


@dataclass(frozen=True, slots=True)
class Head:
    """What the left side tells before any tensor is known."""

    target: str
    operator: str
    reads_target: bool

    def arguments(self, tensors: Mapping[str, Value]) -> Mapping[str, Value]:
        """What is read: without the output, unless the right side reads it too."""
        return (
            tensors if self.reads_target else {n: v for n, v in tensors.items() if n != self.target}
        )


def head(statement: str) -> Head:
    # which says what a statement is
    return head_of_text(statement) if isinstance(statement, str) else parse(statement)


@functools.lru_cache(maxsize=4096)
def head_of_text(statement: str) -> Head:
    """The same, where it is known to be text."""
    parsed = parse(statement)
    return Head(parsed.target.tensor, parsed.operator, parsed.target.tensor in tensors_of(parsed))
