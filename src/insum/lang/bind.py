"""Statement + tensors -> Problem: names, ranks, extents, dtypes, devices and output sizes, all checked before anything runs.

Values inside index tensors are not looked at here (that needs the data); everything that shapes and dtypes tell is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from insum.errors import BindingError, DeviceError, DtypeError, IndexRangeError, InsumError, Span
from insum.lang.expand import Term, expand
from insum.lang.expr import Access, Affine, Expr, Statement, Var, accesses, tensors_of, variables
from insum.lang.types import COMPUTABLE, INTEGERS, Typed, accumulator, bad_call, infer, of_number

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
        return f"{name} scalar" if self.device is None else f"{name} {_shape(self.shape)} on {self.device}"


@dataclass(frozen=True, slots=True)
class Problem:
    """A statement with everything that its arguments' shapes, dtypes and devices decide."""

    statement: Statement
    terms: tuple[Term, ...]
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

    def index_uses(self) -> Iterator[tuple[Access, int, Affine]]:
        """Every dimension that is indexed through a tensor: the access, the dimension, the expression."""
        target = self.statement.target
        for access in (target, *(a for i in target.indices for a in accesses(i)), *accesses(self.statement.value)):
            for dim, index in enumerate(access.indices):
                if any(isinstance(atom, Access) for _, atom in index.terms):
                    yield access, dim, index

    def size_of(self, access: Access, dim: int) -> Size:
        """The length of the dimension that an access indexes; the target's is the output's."""
        return self.shape[dim] if access is self.statement.target else self.kinds[access.tensor].shape[dim]

    def complain(self, kind: type[InsumError], fact: str, *, span: Span | None = None, expected: str = "", remedy: str = "") -> InsumError:
        """An error with this problem's statement and arguments in its message."""
        statement = self.statement
        return kind(fact, expected=expected, remedy=remedy, statement=statement.text or str(statement), span=span, passed=describe(self.kinds))


def describe(kinds: Mapping[str, Kind]) -> list[str]:
    """One line per argument, for messages."""
    return [f"{name}: {kind}" for name, kind in kinds.items()]


def kind_of(value: Value) -> Kind:
    if isinstance(value, Tensor):
        return Kind(value.dtype, tuple(value.shape), value.device, 2 if value.dim() else 1)
    return Kind(of_number(value).dtype, (), None, 0)


def bind(
    statement: Statement,
    values: Mapping[str, Value],
    *,
    sizes: Mapping[str | int, Size | Sequence[Size]] | None = None,
    padded: Sequence[str] = (),
) -> Problem:
    """Check the arguments against the statement and work out extents, output shape, dtype and device.

    >>> from insum.lang.parser import parse
    >>> problem = bind(parse("y[i] = A[i,j] * x[j]"), {"A": torch.ones(2, 3), "x": torch.ones(3)})
    >>> dict(problem.extents), problem.shape, problem.dtype
    ({'i': 2, 'j': 3}, (2,), torch.float32)
    """
    return _Binder(statement, values, sizes or {}, padded).problem()


class _Binder:
    def __init__(self, statement: Statement, values: Mapping[str, Value], sizes: Mapping[str | int, Size | Sequence[Size]], padded: Sequence[str]) -> None:
        self.statement, self.target = statement, statement.target
        self.text = statement.text or str(statement)
        self.reads = tensors_of(statement)
        self.check_values(values)
        self.kinds = {name: kind_of(value) for name, value in values.items()}
        self.padded = frozenset([padded] if isinstance(padded, str) else padded)
        self.seen: dict[str, tuple[Size, str]] = {}
        self.dims: list[Size | None] = [None] * len(self.target.indices)
        self.sizes = sizes

    def problem(self) -> Problem:
        self.check_names()
        for access in self.every_access():
            self.check_rank(access)
        self.check_index_dtypes()
        self.check_value_dtypes()
        device = self.device()
        terms = expand(self.statement)
        self.read_sizes()
        for access in self.every_access():
            if access is not self.target or self.target.tensor in self.kinds:
                self.read_extents(access, self.kinds[access.tensor].shape)
        shape = self.output_shape()
        extents = self.extents()
        self.check_affine_ranges(shape, extents)
        return Problem(self.statement, terms, self.kinds, extents, shape, self.result_dtype(terms), device, self.padded)

    def fail(
        self, kind: type[InsumError], fact: str, *, span: Span | None = None, expected: str = "", remedy: str = "", passed: Sequence[str] | None = None
    ) -> NoReturn:
        shown = describe(self.kinds) if passed is None else passed
        raise kind(fact, expected=expected, remedy=remedy, statement=self.text, span=span, passed=shown)

    def every_access(self) -> Iterator[Access]:
        """The target first (as the same object, so that it can be told apart), then every read."""
        yield self.target
        for index in self.target.indices:
            yield from accesses(index)
        yield from accesses(self.statement.value)

    # --- names and kinds of arguments ---

    def check_values(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if not isinstance(value, Tensor | bool | int | float | complex):
                expected = "a torch.Tensor, or a Python number for a scalar"
                self.fail(DtypeError, f"{name} is {_kind_name(value)}", span=self.span_of(name), expected=expected, remedy=_as_tensor(name, value), passed=())
            if isinstance(value, Tensor) and value.layout != torch.strided:
                remedy = f"insum.einsum with a format made by insum.formats.COO.from_torch({name}), or {name}.to_dense()"
                fact = f"{name} is a {str(value.layout).removeprefix('torch.')} tensor"
                self.fail(DtypeError, fact, span=self.span_of(name), expected="a dense (strided) tensor", remedy=remedy, passed=())

    def check_names(self) -> None:
        missing = [name for name in self.reads if name not in self.kinds]
        if missing:
            passed = ", ".join(self.kinds) or "nothing"
            remedy = f"pass {missing[0]}={missing[0]}"
            self.fail(
                BindingError,
                f"unknown tensor {missing[0]!r}: the statement reads it, but it was not passed (passed: {passed})",
                span=self.span_of(missing[0]),
                remedy=remedy,
            )
        unused = [name for name in self.kinds if name not in self.reads and name != self.target.tensor]
        if unused:
            self.fail(
                BindingError,
                f"unused tensor {unused[0]!r}: it was passed, but the statement does not mention it",
                remedy=f"remove {unused[0]}=..., or check the spelling in the statement",
            )
        indexing = {atom.tensor for access in self.every_access() for index in access.indices for atom in accesses(index)}
        stray = sorted(map(str, self.padded - indexing))
        if stray:
            expected = f"index tensors: {', '.join(sorted(indexing)) or 'this statement has none'}"
            self.fail(BindingError, f"padded names {stray[0]!r}, which is no index tensor of the statement", expected=expected)

    def span_of(self, name: str) -> Span | None:
        return next((a.span for a in self.every_access() if a.tensor == name), None)

    def check_rank(self, access: Access) -> None:
        kind = self.kinds.get(access.tensor)
        if kind is None or len(kind.shape) == len(access.indices):
            return
        have, want = len(kind.shape), len(access.indices)
        fact = f"{access.tensor} has {have} dimension(s) {_shape(kind.shape)} but is indexed with {want}: {access if want else access.tensor + '[]'}"
        self.fail(BindingError, fact, span=access.span, remedy="write one index per dimension; a dimension to sum over needs an index too")

    def check_index_dtypes(self) -> None:
        for access in self.every_access():
            for index in access.indices:
                for _, atom in index.terms:
                    if isinstance(atom, Access) and self.kinds[atom.tensor].dtype not in INTEGERS:
                        dtype = str(self.kinds[atom.tensor].dtype).removeprefix("torch.")
                        self.fail(
                            DtypeError,
                            f"{atom.tensor} indexes {access.tensor} but holds {dtype}",
                            span=atom.span,
                            expected="an integer tensor (any integer dtype)",
                            remedy=f"{atom.tensor}.long()" if self.kinds[atom.tensor].device is not None else f"int({atom.tensor})",
                        )

    def check_value_dtypes(self) -> None:
        for access in (self.target, *accesses(self.statement.value, nested=False)):
            kind = self.kinds.get(access.tensor)
            if kind is not None and kind.dtype not in COMPUTABLE:
                dtype = str(kind.dtype).removeprefix("torch.")
                remedy = (
                    f"{access.tensor}.long()" if kind.dtype in INTEGERS else f"{access.tensor}.to(torch.{'complex64' if kind.dtype.is_complex else 'float32'})"
                )
                self.fail(
                    DtypeError, f"{access.tensor} holds {dtype}, which insum does not compute with", span=access.span, expected=_COMPUTABLE, remedy=remedy
                )

    def device(self) -> torch.device:
        chosen, by = None, ""
        for name, kind in self.kinds.items():
            if kind.device is None or kind.strength < 2 and kind.device.type == "cpu":
                continue
            if chosen is None:
                chosen, by = kind.device, name
            elif kind.device != chosen:
                self.fail(
                    DeviceError,
                    f"{by} is on {chosen} but {name} is on {kind.device}",
                    span=self.span_of(name),
                    expected="all tensors on one device",
                    remedy=f"{name}.to({str(chosen)!r})",
                )
        return chosen if chosen is not None else torch.get_default_device()

    # --- extents ---

    def read_sizes(self) -> None:
        """``sizes=``: by output dimension, by text of a left-side index, by index tensor, by variable, or the whole output."""
        if not isinstance(self.sizes, Mapping):
            self.fail(BindingError, f"sizes is a {type(self.sizes).__name__}", expected="a dictionary", remedy="sizes={'i': 8}, or out_shape=(8,)")
        for key, size in self.sizes.items():
            if isinstance(key, bool) or not isinstance(key, str | int):
                self.fail(BindingError, f"sizes has the key {key!r}", expected="a name, or the number of an output dimension")
            if isinstance(size, Sequence) and not isinstance(size, str):
                self.read_shape(key, size)
            else:
                self.check_size(f"sizes[{key!r}]", size)
                self.read_size(key, size)

    def check_size(self, what: str, size: object) -> None:
        if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
            self.fail(BindingError, f"{what} is {size!r}", expected="an integer", remedy="int(...) around it" if hasattr(size, "__index__") else "")
        if isinstance(size, int) and size < 0:
            self.fail(BindingError, f"{what} is {size}", expected="a size of at least 0")

    def read_shape(self, key: str | int, shape: Sequence[Size]) -> None:
        if key != self.target.tensor:
            self.fail(
                BindingError, f"sizes[{key!r}] is a shape, and {key!r} is not the output", remedy=f"sizes={{{self.target.tensor!r}: shape}}, or out_shape=shape"
            )
        if len(shape) != len(self.dims):
            self.fail(
                BindingError,
                f"out_shape {_shape(shape)} has {len(shape)} dimension(s), but the left side {self.target} has {len(self.dims)}",
                span=self.target.span,
                expected="one size per index of the left side",
            )
        for dim, size in enumerate(shape):
            self.check_size(f"out_shape[{dim}]", size)
            self.set_dim(dim, size)

    def read_size(self, key: str | int, size: Size) -> None:
        if isinstance(key, int) or key.isascii() and key.isdigit():
            if int(key) >= len(self.dims) or int(key) < 0:
                expected = f"a number from 0 to {len(self.dims) - 1}" if self.dims else "no size: the output is a scalar"
                self.fail(BindingError, f"sizes[{key!r}]: the output has {len(self.dims)} dimension(s)", span=self.target.span, expected=expected)
            return self.set_dim(int(key), size)
        if key in {*variables(self.target), *variables(self.statement.value)}:
            return self.see(key, size, f"sizes[{key!r}]", None)
        text = key.replace(" ", "")
        dims = [
            d
            for d, index in enumerate(self.target.indices)
            if str(index).replace(" ", "") == text or isinstance(index.atom, Access) and index.atom.tensor == key
        ]
        if key == self.target.tensor:
            self.fail(
                BindingError,
                f"sizes[{key!r}] is {size}, and {key!r} is the output",
                expected=f"its whole shape, of {len(self.dims)} dimension(s)",
                remedy=f"sizes={{{key!r}: shape}}, or out_shape=shape",
            )
        if not dims:
            self.fail(
                BindingError,
                f"sizes has no use for {key!r}",
                expected="an index variable, an output dimension (0, 1, ...), or a left-side index as it is written",
            )
        for dim in dims:
            self.set_dim(dim, size)

    def set_dim(self, dim: int, size: Size) -> None:
        known = self.dims[dim]
        if known is not None and not _equal(known, size):
            self.fail(BindingError, f"dimension {dim} of the output has two sizes: {known} and {size}", span=self.target.indices[dim].span)
        self.dims[dim] = size

    def read_extents(self, access: Access, shape: Sequence[Size]) -> None:
        for dim, (index, size) in enumerate(zip(access.indices, shape, strict=True)):
            if access is self.target:
                self.set_dim_of_target(dim, size)
            elif index.var is not None:
                self.see(index.var, size, f"{access} (dimension {dim})", index.span)

    def set_dim_of_target(self, dim: int, size: Size) -> None:
        known = self.dims[dim]
        if known is not None and not _equal(known, size):
            self.fail(
                BindingError,
                f"{self.target.tensor} has size {size} in dimension {dim}, but sizes or out_shape says {known}",
                span=self.target.indices[dim].span,
            )
        self.dims[dim] = size

    def see(self, var: str, extent: Size, place: str, span: Span | None) -> None:
        known = self.seen.setdefault(var, (extent, place))
        if not _equal(known[0], extent):
            self.fail(
                BindingError,
                f"index {var!r} has two extents: {known[0]} in {known[1]} and {extent} in {place}",
                span=span,
                remedy="check the order of the indices, or use another name for one of them",
            )

    def output_shape(self) -> tuple[Size, ...]:
        shape: list[Size] = []
        for dim, index in enumerate(self.target.indices):
            var = index.var
            size = self.dims[dim]
            if size is not None and var is not None:
                self.see(var, size, f"the output {self.target} (dimension {dim})", index.span)
            if size is None and var is not None:
                size = self.seen[var][0] if var in self.seen else None
            if size is None:
                self.unknown_output(dim, index)
            shape.append(size)
        return tuple(shape)

    def unknown_output(self, dim: int, index: Affine) -> NoReturn:
        name = self.target.tensor
        remedy = f"pass the output as {name}=, its shape as out_shape=(...), or sizes={{{dim}: n}}"
        what = f"index {index.var!r} stands in no tensor that was passed" if index.var else f"it is written at {index}, whose values do not tell it"
        self.fail(BindingError, f"the output's size in dimension {dim} is unknown: {what}", span=index.span, remedy=remedy)

    def extents(self) -> dict[str, Size]:
        names = dict.fromkeys((*variables(self.target), *variables(self.statement.value)))
        for name in names:
            if name not in self.seen:
                span = next((_var_span(i, name) for a in self.every_access() for i in a.indices if name in variables(i)), None)
                self.fail(
                    BindingError, f"the extent of index {name!r} is unknown: it stands alone in no dimension", span=span, remedy=f"pass sizes={{{name!r}: n}}"
                )
        return {name: self.seen[name][0] for name in names}

    def check_affine_ranges(self, shape: tuple[Size, ...], extents: Mapping[str, Size]) -> None:
        for access in self.every_access():
            limits = shape if access is self.target else self.kinds[access.tensor].shape
            for dim, index in enumerate(access.indices):
                self.check_affine_range(access, dim, index, limits[dim], extents)

    def check_affine_range(self, access: Access, dim: int, index: Affine, limit: Size, extents: Mapping[str, Size]) -> None:
        ends = [extents[a.name] for _, a in index.terms if isinstance(a, Var)]
        if index.var is not None or len(ends) < len(index.terms) or not all(isinstance(e, int) for e in (*ends, limit)):
            return
        if 0 in ends:
            return
        reach = [c * (int(e) - 1) for (c, _), e in zip(index.terms, ends, strict=True)]
        low, high = index.offset + sum(min(0, r) for r in reach), index.offset + sum(max(0, r) for r in reach)
        bad = low if low < 0 else high
        if low < 0 or high >= limit:
            fact = f"index {index} of {access.tensor} {f'reaches {bad},' if index.terms else 'is'} outside dimension {dim} of size {limit}"
            remedy = "pass smaller extents with sizes=, or pad the tensor first" if index.terms else f"make {access.tensor} larger, or correct the index"
            self.fail(IndexRangeError, fact, span=index.span, expected=f"values from 0 to {limit - 1}" if limit else "no index at all", remedy=remedy)

    # --- dtypes ---

    def result_dtype(self, terms: tuple[Term, ...]) -> torch.dtype:
        types = {name: kind.type for name, kind in self.kinds.items()}
        value: Expr = self.statement.value
        bad = bad_call(value, types)
        if bad is not None:
            self.fail(DtypeError, f"{bad.function} is not defined for complex numbers", span=bad.span)
        inferred = infer(value, types)
        if inferred.dtype not in COMPUTABLE:
            self.fail(DtypeError, f"the right side is {str(inferred.dtype).removeprefix('torch.')}, which insum does not compute with", expected=_COMPUTABLE)
        output = self.kinds.get(self.target.tensor)
        if self.statement.operator in ("max=", "min=") and (inferred.dtype.is_complex or output is not None and output.dtype.is_complex):
            span = self.target.span if not inferred.dtype.is_complex else None
            self.fail(DtypeError, f"{self.statement.operator} is not defined for complex numbers", span=span, remedy="reduce abs(...) instead")
        return self.check_output_dtype(inferred.dtype)

    def check_output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        passed = self.kinds.get(self.target.tensor)
        if passed is None:
            return dtype
        if not torch.can_cast(dtype, passed.dtype):
            have, got = (str(d).removeprefix("torch.") for d in (passed.dtype, dtype))
            self.fail(
                DtypeError,
                f"the output {self.target.tensor} holds {have}, but the right side is {got}",
                span=self.target.span,
                expected=f"an output of dtype {got}",
                remedy=f"{self.target.tensor}.to(torch.{got})",
            )
        return passed.dtype


_COMPUTABLE = "one of " + ", ".join(sorted(str(d).removeprefix("torch.") for d in COMPUTABLE))


def _kind_name(value: object) -> str:
    if value is None:
        return "None"
    module = type(value).__module__.partition(".")[0]
    return "a " + type(value).__name__ if module == "builtins" else f"a {module} {type(value).__name__}"


def _as_tensor(name: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return f"torch.tensor({name})"
    return f"torch.as_tensor({name})" if hasattr(value, "__array__") else "insum.einsum takes sparse formats; insum takes tensors and numbers"


def _equal(a: Size, b: Size) -> bool:
    """Equality of extents; for symbolic ones a constraint that the tracer records instead of a guess."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    torch._check(a == b, lambda: f"insum: extents disagree: {a} and {b}")  # type: ignore[no-untyped-call]
    return True


def _var_span(index: Affine, name: str) -> Span | None:
    return next((a.span for _, a in index.terms if isinstance(a, Var) and a.name == name), index.span)


def _shape(shape: Sequence[Size]) -> str:
    return "(" + ", ".join(str(s) for s in shape) + ("," if len(shape) == 1 else "") + ")"
