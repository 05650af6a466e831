"""Running a rewritten statement: arguments cut out of formats and tensors, results put together."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum import api
from insum.compat.placed import PLACED_HOME, beside
from insum.errors import BindingError, DeviceError
from insum.explanation import Explanation
from insum.formats.base import SparseFormat
from insum.formats.entries import padded_to
from insum.formats.rewrite import Rewrite, RewrittenStatement, rewrite
from insum.formats.spell import Source
from insum.lang.bind import Size, Value
from insum.plan.path import Optimize

FormatOrValue: TypeAlias = SparseFormat | Value
GivenSizes: TypeAlias = Mapping[str | int, Size | Sequence[Size]]


def rewritten(text: str, given: Mapping[str, FormatOrValue], dense_output: bool) -> Rewrite:
    """The rewritten form of a statement for these operands; remembered by text and kinds."""
    return rewrite(text, _signature(given), dense_output)


def _signature(given: Mapping[str, FormatOrValue]) -> tuple[tuple[object, ...], ...]:
    """What rewriting depends on: kinds, ranks, groups, blocks, and which index arrays are the same
    object.
    """
    seen: list[Tensor] = []
    found: list[tuple[object, ...]] = []
    for name, x in given.items():
        if isinstance(x, SparseFormat):
            found.append(_signature_of(name, x, seen))
        else:
            found.append((name, x.ndim if isinstance(x, Tensor) else 0))
    return tuple(found)


def _signature_of(name: str, x: SparseFormat, seen: list[Tensor]) -> tuple[object, ...]:
    rank, kind, dims, block, places, even = x.signature
    numbers: list[object] = []
    for place in places:
        one = isinstance(place, tuple)
        numbers.append(_number(_array(x, *place), seen) if one else place)
    return name, rank, kind, dims, block, tuple(numbers), x.values is None, even


def _array(x: SparseFormat, field: str, number: int) -> Tensor:
    held: Tensor | tuple[Tensor, ...] = getattr(x, field)
    return held if isinstance(held, Tensor) else held[number]


def _number(array: Tensor, seen: list[Tensor]) -> int:
    for number, other in enumerate(seen):
        if other is array:
            return number
    seen.append(array)
    return len(seen) - 1


# --- running ---


class FormatCall:
    """One call: the rewritten form and the operands."""

    def __init__(
        self,
        plan: Rewrite,
        given: Mapping[str, FormatOrValue],
        out_shape: Sequence[Size] | None = None,
        sizes: GivenSizes | None = None,
        optimize: Optimize = True,
    ) -> None:
        self.plan, self.given, self.out_shape, self.sizes = plan, given, out_shape, sizes
        self.optimize = optimize

    def run(self) -> Any:
        extents = self.check()
        passed = self.given.get(self.plan.target)
        if self.plan.result_like:
            return self.sparse(passed)
        shape = self.shape(extents)
        if passed is not None:
            return self.into(passed)
        if len(self.plan.pieces) == 1:
            return self.dense(self.plan.pieces[0], shape)
        return _sum([self.dense(piece, shape) for piece in self.plan.pieces])

    def explained(self, gpu: str = "") -> list[Explanation]:
        """What each statement would do, on a GPU of that architecture where one is named."""
        extents = self.check()
        like = self.given.get(self.plan.result_like)
        shape = self.values_shape(like) if isinstance(like, SparseFormat) else self.shape(extents)
        return [
            api.explain_dense(p.statement, self.arguments(p), **self.options(p, shape), gpu=gpu)
            for p in self.plan.pieces
        ]

    def check(self) -> dict[str, Size]:
        """Extents of all index variables, the same wherever they stand, and one device."""
        extents: dict[str, Size] = {}
        for variable, places in self.plan.places:
            for name, dim in places:
                size = self.given[name].shape[dim]  # type: ignore[union-attr]
                if size != extents.setdefault(variable, size):
                    raise self.two_extents(variable, places, (size, name, dim))
        self.check_devices()
        return extents

    def two_extents(
        self, variable: str, places: tuple[tuple[str, int], ...], other: tuple[Size, str, int]
    ) -> BindingError:
        (name, dim), *_ = places
        first = f"{self.given[name].shape[dim]} in {name} (dimension {dim})"  # type: ignore[union-attr]
        second = f"{other[0]} in {other[1]} (dimension {other[2]})"
        return BindingError(
            f"index {variable!r} has two extents: {first} and {second}",
            statement=self.plan.text,
            passed=self.passed(),
            remedy="check the order of the indices, or use another name for one of them",
        )

    def check_devices(self) -> None:
        first: tuple[str, torch.device] | None = None
        for name, x in self.given.items():
            if not (isinstance(x, SparseFormat) or isinstance(x, Tensor) and x.ndim):
                continue
            device = x.device
            if first is None:
                first = name, device
            elif device != first[1]:
                raise DeviceError(
                    f"{first[0]} is on {first[1]} but {name} is on {device}",
                    statement=self.plan.text,
                    expected="all operands on one device",
                    remedy=f"{name}.to({str(first[1])!r})",
                )

    def passed(self) -> list[str]:
        return [
            f"{name}: {type(x).__name__} {tuple(x.shape)}"
            if isinstance(x, SparseFormat | Tensor)
            else f"{name}: {x!r}"
            for name, x in self.given.items()
        ]

    def shape(self, extents: Mapping[str, Size]) -> tuple[Size, ...] | None:
        """The shape of the output, where index variables and options tell it."""
        if self.out_shape is not None:
            return tuple(self.out_shape)
        told: dict[Any, Any] = dict(self.sizes or {})
        if self.plan.target in told:
            return tuple(told[self.plan.target])
        found: list[Size] = []
        for dim, name in enumerate(self.plan.dims):
            size = extents.get(name, told.get(name)) if name is not None else told.get(dim)
            if size is None:
                return None
            found.append(size)
        return tuple(found)

    # --- outputs ---

    def options(self, piece: RewrittenStatement, shape: tuple[Size, ...] | None) -> dict[str, Any]:
        """Options of the statement's call: the shape where it is known, else what the user said of
        sizes.
        """
        always = {"padded": piece.padded, "optimize": self.optimize}
        if shape is not None:
            told = {"out_shape": _split_shape(shape, piece.splits), "sizes": self.other_sizes()}
            return {**told, **always}
        if piece.splits:
            raise BindingError(
                "the shape of the output is not known",
                statement=self.plan.text,
                passed=self.passed(),
                remedy="out_shape=(...)",
            )
        return {"sizes": self.sizes, **always}

    def dense(self, piece: RewrittenStatement, shape: tuple[Size, ...] | None) -> Tensor:
        """A new dense tensor."""
        result = api.insum(piece.statement, **self.options(piece, shape), **self.arguments(piece))
        return _joined(result, shape, piece.splits) if shape is not None else result

    def other_sizes(self) -> dict[str | int, Size | Sequence[Size]]:
        """``sizes=`` of variables that stand alone in no operand and not on the left."""
        if not self.sizes:
            return {}
        told = {name for name, _ in self.plan.places} | {
            self.plan.target,
            *(d for d in self.plan.dims if d),
        }
        return {
            key: size
            for key, size in self.sizes.items()
            if isinstance(key, str) and key not in told
        }

    def into(self, target: FormatOrValue) -> Tensor:
        """Accumulate into a dense tensor: directly where one statement does it and blocks divide
        it, else through a tensor beside it.
        """
        if not isinstance(target, Tensor):
            raise BindingError(
                f"{self.plan.target} is a {type(target).__name__}",
                statement=self.plan.text,
                expected="a tensor to accumulate into",
            )
        first, name = self.plan.pieces[0], self.plan.target
        if len(self.plan.pieces) == 1 and all(
            target.shape[dim] % size == 0 for dim, size in first.splits
        ):
            view = target.view(_split_shape(target.shape, first.splits))
            api.insum(
                first.statement,
                padded=first.padded,
                sizes=self.other_sizes(),
                optimize=self.optimize,
                **{**self.arguments(first), name: view},
            )
            return target
        sums = _sum([self.dense(piece, tuple(target.shape)) for piece in self.plan.pieces])
        indices = ",".join(f"i{d}" for d in range(target.ndim))
        return api.insum(
            f"{name}[{indices}] += {name}_sum[{indices}]",
            **{name: target, f"{name}_sum": sums},  # type: ignore[arg-type]
        )

    def sparse(self, passed: FormatOrValue | None) -> SparseFormat:
        """The pattern of an operand with new values."""
        like = self.given[self.plan.result_like]
        assert isinstance(like, SparseFormat)
        if passed is None:
            values = _sum(
                [
                    api.insum(
                        p.statement, **self.options(p, self.values_shape(like)), **self.arguments(p)
                    )
                    for p in self.plan.pieces
                ]
            )
            return like._plain().with_values(values).permute(*self.plan.permutation)
        if not isinstance(passed, SparseFormat) or passed.values is None:
            fact = (
                f"the output {self.plan.target} is a pattern and has no values to accumulate into"
            )
            raise BindingError(fact, statement=self.plan.text, remedy="with_values(...)")
        for p in self.plan.pieces:
            api.insum(
                p.statement,
                padded=p.padded,
                optimize=self.optimize,
                **{**self.arguments(p), self.plan.target: passed.values},
            )
        return passed

    def values_shape(self, x: SparseFormat) -> tuple[Size, ...]:
        return (*x.positions, *(x.block_shape_or_none or ()))

    # --- arguments ---

    def arguments(self, piece: RewrittenStatement) -> dict[str, Any]:
        """By name; a format is the same on every rank, where other operands are DTensors."""
        found: dict[str, Any] = {}
        for source in piece.sources:
            found[source.name] = self.argument(source, piece)
        if PLACED_HOME not in sys.modules:
            return found
        own = [s.name for s in piece.sources if isinstance(self.given[s.operand], SparseFormat)]
        return beside(found, own)

    def argument(self, source: Source, piece: RewrittenStatement) -> Value:
        x = self.given[source.operand]
        if not isinstance(x, SparseFormat):
            return (
                _split(x, source.splits, source.is_index)
                if isinstance(x, Tensor) and source.splits
                else x
            )
        match source.field:
            case "values" if x.values is not None:
                return x.values
            case "values" | "ones":
                return x.ones(self.dtype(piece))
            case "unit":
                return torch.ones((), dtype=self.dtype(piece), device=x.device).expand(
                    x.grid[source.number]
                )
            case "edge":
                return _edge(x, source.number)
            case field:
                return _array(x, field, source.number)

    def dtype(self, piece: RewrittenStatement) -> torch.dtype:
        """A dtype for ones that changes nothing: that of the first values in the statement."""
        for source in piece.sources:
            x = self.given[source.operand]
            if (
                not source.is_index
                and isinstance(x, SparseFormat | Tensor)
                and x.dtype is not None
                and source.field in ("", "values")
            ):
                return x.dtype
        return torch.get_default_dtype()


def _edge(x: SparseFormat, dim: int) -> Tensor:
    """For each place of each block along a dimension 0, and -1 where it lies beyond the edge."""
    assert x.block_shape_or_none is not None
    sides = x.grid[dim], x.block_shape_or_none[dim]
    places = torch.arange(math.prod(sides), device=x.device).view(sides)
    return torch.where(places < x.shape[dim], 0, -1).int()


def _sum(results: Sequence[Tensor]) -> Tensor:
    """The sum of what the statements gave; there is nearly always one."""
    total = results[0]
    for result in results[1:]:
        total = total + result
    return total


def _split(x: Tensor, splits: tuple[tuple[int, int], ...], is_index: bool) -> Tensor:
    """Dimensions cut into blocks, the last block padded: with zeros, or with -1 where the tensor is
    an index.
    """
    shape = list(x.shape)
    for dim, size in splits:
        shape[dim] = -(-shape[dim] // size) * size
    return padded_to(x, shape, -1 if is_index else 0).view(_split_shape(shape, splits))


def _split_shape(shape: Sequence[Size], splits: tuple[tuple[int, int], ...]) -> tuple[Size, ...]:
    if not splits:
        return tuple(shape)
    sizes = dict(splits)
    return tuple(
        part
        for dim, size in enumerate(shape)
        for part in ((-(-size // sizes[dim]), sizes[dim]) if dim in sizes else (size,))
    )


def _joined(x: Tensor, shape: Sequence[Size], splits: tuple[tuple[int, int], ...]) -> Tensor:
    """The opposite of `_split`: blocks put together and cut to shape."""
    for dim, _ in splits:
        x = x.flatten(dim, dim + 1)
        x = x if x.shape[dim] == shape[dim] else x.narrow(dim, 0, shape[dim])
    return x
