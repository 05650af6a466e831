"""Problem: a statement with everything that its arguments' shapes, dtypes and devices decide. What
all later stages start from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from insum.errors import InsumError, Span
from insum.lang.expand import ProductTerm
from insum.lang.expr import Access, Affine, Statement, accesses, tensors_of
from insum.lang.types import Typed, accumulator, of_number

Value: TypeAlias = Tensor | bool | int | float | complex
Size: TypeAlias = int | torch.SymInt


@dataclass(frozen=True, slots=True)
class Kind:
    """What binding needs to know of one argument; a Python number has no device."""

    dtype: torch.dtype
    shape: tuple[Size, ...]
    device: torch.device | None
    strength: int

    @property
    def type(self) -> Typed:
        return Typed(self.dtype, self.strength)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{name} scalar"
            if self.device is None
            else f"{name} {shown_shape(self.shape)} on {self.device}"
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """A statement with everything that its arguments' shapes, dtypes and devices decide."""

    statement: Statement
    terms: tuple[ProductTerm, ...]
    kinds: Mapping[str, Kind]
    extents: Mapping[str, Size]
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    padded: frozenset[str]

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype in which contributions meet: float32 for half precision."""
        return accumulator(self.dtype)

    @property
    def target_read(self) -> bool:
        """Whether the target's own tensor is read too, as a value or as an index."""
        return self.statement.target.tensor in tensors_of(self.statement)

    def index_names(self) -> tuple[str, ...]:
        """Every tensor that stands in an index."""
        every = (a.tensor for _, _, index in self.index_uses() for a in accesses(index))
        return tuple(dict.fromkeys(every))

    def index_uses(self) -> Iterator[tuple[Access, int, Affine]]:
        """Every dimension that is indexed through a tensor: the access, the dimension, the
        expression.
        """
        target = self.statement.target
        for access in (
            target,
            *(a for i in target.indices for a in accesses(i)),
            *accesses(self.statement.value),
        ):
            for dim, index in enumerate(access.indices):
                if any(isinstance(atom, Access) for _, atom in index.terms):
                    yield access, dim, index

    def size_of(self, access: Access, dim: int) -> Size:
        """The length of the dimension that an access indexes; the target's is the output's."""
        return (
            self.shape[dim]
            if access is self.statement.target
            else self.kinds[access.tensor].shape[dim]
        )

    def complain(
        self,
        kind: type[InsumError],
        fact: str,
        *,
        span: Span | None = None,
        expected: str = "",
        remedy: str = "",
    ) -> InsumError:
        """An error with this problem's statement and arguments in its message."""
        statement = self.statement
        return kind(
            fact,
            expected=expected,
            remedy=remedy,
            statement=statement.text or str(statement),
            span=span,
            passed=describe(self.kinds),
        )


def resized(
    example: Problem,
    extents: Mapping[str, int],
    shape: tuple[int, ...],
    shapes: Mapping[str, Sequence[int]],
) -> Problem:
    """A problem with the extents and the output's shape of another call, whose tensors have these
    shapes.
    """
    kinds = {
        name: replace(kind, shape=tuple(shapes[name])) if name in shapes else kind
        for name, kind in example.kinds.items()
    }
    return replace(example, kinds=kinds, extents=dict(extents), shape=shape)


def describe(kinds: Mapping[str, Kind]) -> list[str]:
    """One line per argument, for messages."""
    return [f"{name}: {kind}" for name, kind in kinds.items()]


def kind_of(value: Value) -> Kind:
    if isinstance(value, Tensor):
        return Kind(value.dtype, tuple(value.shape), value.device, 2 if value.dim() else 1)
    return Kind(of_number(value).dtype, (), None, 0)


def shown_shape(shape: Sequence[Size]) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"
