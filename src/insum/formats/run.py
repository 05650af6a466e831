"""Running a rewritten statement: arguments cut out of formats and tensors, results put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum import api
from insum.compat.calls import PLAIN
from insum.compat.placed import beside
from insum.errors import BindingError, DeviceError, InsumError
from insum.explanation import Explanation
from insum.formats.base import SparseFormat, refuse_broken
from insum.formats.contents import signature_of
from insum.formats.entries import padded_to
from insum.formats.rewrite import Rewrite, RewrittenStatement, rewrite
from insum.formats.spell import Source
from insum.lang.bind import Size, Value
from insum.plan.path import Optimize

FormatOrValue: TypeAlias = SparseFormat | Value
GivenSizes: TypeAlias = Mapping[str | int, Size | Sequence[Size]]


def rewritten(text: str, given: Mapping[str, FormatOrValue], dense_output: bool) -> Rewrite:
    """The rewritten form of a statement for these operands; remembered by text and kinds: ranks,
    groups, blocks, and which index arrays are the same object.
    """
    found: list[tuple[object, ...]] = []
    seen: list[Tensor] = []
    formats = 0
    for x in given.values():  # a loop, on the path of every call
        formats += isinstance(x, SparseFormat)
    for name, x in given.items():
        if isinstance(x, SparseFormat):
            # index arrays of several formats are counted together
            signature = x.signature if formats == 1 else signature_of(x, seen)
            found.append((name, signature, x.values is None))
        else:
            found.append((name, x.ndim if isinstance(x, Tensor) else 0))
    return rewrite(text, tuple(found), dense_output)


# --- running ---


def run_formats(
    statement: str,
    given: Mapping[str, FormatOrValue],
    dense_output: bool = False,
    out_shape: Sequence[Size] | None = None,
    sizes: GivenSizes | None = None,
    optimize: Optimize = True,
) -> Any:
    """A statement some of whose operands are formats."""
    try:
        plan = rewritten(statement, given, dense_output)
        return FormatCall(plan, given, out_shape, sizes, optimize).run()
    except InsumError:
        raise
    except Exception:
        refuse_broken(given)
        raise


#: Arguments that are made for a statement; the others are held by an operand.
MADE = frozenset({"ones", "unit", "edge"})


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
        """The result. Operands on two devices are found where the statements are bound, once for
        each kind of tensors; what is said of them is said in terms of the operands.
        """
        extents, plan = self.extents(), self.plan
        passed = self.given.get(plan.target)
        try:
            if plan.result_like:
                return self.sparse(passed)
            shape = self.shape(extents)
            if passed is not None:
                return self.into(passed)
            if len(plan.pieces) == 1:
                return self.dense(plan.pieces[0], shape)
            return _sum([self.dense(piece, shape) for piece in plan.pieces])
        except DeviceError:
            self.check_devices()
            raise

    def explained(self, gpu: str = "") -> list[Explanation]:
        """What each statement would do, on a GPU of that architecture where one is named."""
        extents = self.extents()
        self.check_devices()
        like = self.given.get(self.plan.result_like)
        shape = self.values_shape(like) if isinstance(like, SparseFormat) else self.shape(extents)
        return [
            api.explain_dense(p.statement, self.arguments(p), **self.options(p, shape), gpu=gpu)
            for p in self.plan.pieces
        ]

    def extents(self) -> dict[str, Size]:
        """Extents of all index variables, the same wherever they stand."""
        extents: dict[str, Size] = {}
        for variable, places in self.plan.places:
            for name, dim in places:
                size = self.given[name].shape[dim]  # type: ignore[union-attr]
                if size != extents.setdefault(variable, size):
                    raise self.two_extents(variable, places, (size, name, dim))
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
        told: dict[Any, Any] = dict(self.sizes) if self.sizes else {}
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
        given = self.arguments(piece)
        if shape is None or piece.splits or self.sizes:
            result = api.insum(piece.statement, **self.options(piece, shape), **given)
            return result if shape is None else _joined(result, shape, piece.splits)
        return api.insum(
            piece.statement, out_shape=shape, padded=piece.padded, optimize=self.optimize, **given
        )

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
        plain = True
        for source in piece.sources:
            x, field = self.given[source.operand], source.field
            held = getattr(x, field) if field and field not in MADE else x
            if source.splits or held is None or field in MADE:
                held = self.made(source, piece)
            found[source.name] = held = held[source.number] if isinstance(held, tuple) else held
            plain = plain and type(held) in PLAIN
        if plain:
            return found
        own = [s.name for s in piece.sources if isinstance(self.given[s.operand], SparseFormat)]
        return beside(found, own)

    def made(self, source: Source, piece: RewrittenStatement) -> Tensor:
        """An argument that no operand holds as it is."""
        x = self.given[source.operand]
        if not isinstance(x, SparseFormat):
            assert isinstance(x, Tensor)
            return _split(x, source.splits, source.is_index)
        match source.field:
            case "unit":
                return torch.ones((), dtype=self.dtype(piece), device=x.device).expand(
                    x.grid[source.number]
                )
            case "edge":
                return _edge(x, source.number)
        return x.ones(self.dtype(piece))

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
