"""Arguments against a statement: names, ranks, dtypes and devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from insum.accepted import odd_tensor
from insum.errors import BindingError, DeviceError, DtypeError, InsumError, Span
from insum.lang.expr import Access, Expr, Statement, accesses, tensors_of
from insum.lang.problem import Size, Value, describe, kind_of, shown_shape
from insum.lang.types import COMPUTABLE, INTEGERS, NARROW_FLOATS, bad_call, infer, widened


def _one_of(dtypes: frozenset[torch.dtype]) -> str:
    return "one of " + ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


_COMPUTABLE, _READABLE = _one_of(COMPUTABLE), _one_of(COMPUTABLE | NARROW_FLOATS)


class Binding:
    """A statement and its arguments on their way to a problem; what is wrong with the arguments
    themselves is found here.
    """

    def __init__(
        self,
        statement: Statement,
        values: Mapping[str, Value],
        sizes: Mapping[str | int, Size | Sequence[Size]],
        padded: Sequence[str],
    ) -> None:
        self.statement, self.target = statement, statement.target
        self.text = statement.text or str(statement)
        self.reads = tensors_of(statement)
        self.check_values(values)
        self.kinds = {name: kind_of(value) for name, value in values.items()}
        self.padded = frozenset([padded] if isinstance(padded, str) else padded)
        self.seen: dict[str, tuple[Size, str]] = {}
        self.dims: list[Size | None] = [None] * len(self.target.indices)
        self.sizes = sizes

    def fail(
        self,
        kind: type[InsumError],
        fact: str,
        *,
        span: Span | None = None,
        expected: str = "",
        remedy: str = "",
        passed: Sequence[str] | None = None,
    ) -> NoReturn:
        shown = describe(self.kinds) if passed is None else passed
        raise kind(
            fact, expected=expected, remedy=remedy, statement=self.text, span=span, passed=shown
        )

    def every_access(self) -> Iterator[Access]:
        """The target first (as the same object, so that it can be told apart), then every read."""
        yield self.target
        for index in self.target.indices:
            yield from accesses(index)
        yield from accesses(self.statement.value)

    def check_values(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if not isinstance(value, Tensor | bool | int | float | complex):
                expected = "a torch.Tensor, or a Python number for a scalar"
                self.fail(
                    DtypeError,
                    f"{name} is {_kind_name(value)}",
                    span=self.span_of(name),
                    expected=expected,
                    remedy=_as_tensor(name, value),
                    passed=(),
                )
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                self.fail(
                    DtypeError,
                    f"{name} is an integer that does not fit into 64 bits",
                    span=self.span_of(name),
                    remedy=f"pass {name}=float({name})",
                    passed=(),
                )
            if isinstance(value, Tensor):
                self.check_tensor(name, value)

    def check_tensor(self, name: str, value: Tensor) -> None:
        """What is called a tensor has a shape and strides, and elements that are numbers."""
        odd = odd_tensor(value)
        if odd:
            self.fail(
                DtypeError,
                f"{name} is {odd}",
                span=self.span_of(name),
                expected="a dense (strided) tensor",
                remedy=_as_dense(name, odd),
                passed=(),
            )

    def check_names(self) -> None:
        missing = [name for name in self.reads if name not in self.kinds]
        if missing:
            passed = ", ".join(self.kinds) or "nothing"
            remedy = f"pass {missing[0]}={missing[0]}"
            self.fail(
                BindingError,
                f"unknown tensor {missing[0]!r}: the statement reads it, but it was not passed "
                f"(passed: {passed})",
                span=self.span_of(missing[0]),
                remedy=remedy,
            )
        unused = [
            name for name in self.kinds if name not in self.reads and name != self.target.tensor
        ]
        if unused:
            self.fail(
                BindingError,
                f"unused tensor {unused[0]!r}: it was passed, but the statement does not "
                "mention it",
                remedy=f"remove {unused[0]}=..., or check the spelling in the statement",
            )
        indexing = {
            atom.tensor
            for access in self.every_access()
            for index in access.indices
            for atom in accesses(index)
        }
        stray = sorted(map(str, self.padded - indexing))
        if stray:
            expected = f"index tensors: {', '.join(sorted(indexing)) or 'this statement has none'}"
            self.fail(
                BindingError,
                f"padded names {stray[0]!r}, which is no index tensor of the statement",
                expected=expected,
            )

    def span_of(self, name: str) -> Span | None:
        return next((a.span for a in self.every_access() if a.tensor == name), None)

    def check_rank(self, access: Access) -> None:
        kind = self.kinds.get(access.tensor)
        if kind is None or len(kind.shape) == len(access.indices):
            return
        have, want = len(kind.shape), len(access.indices)
        fact = (
            f"{access.tensor} has {have} dimension(s) {shown_shape(kind.shape)} but is "
            f"indexed with {want}: {access if want else access.tensor + '[]'}"
        )
        self.fail(
            BindingError,
            fact,
            span=access.span,
            remedy="write one index per dimension; a dimension to sum over needs an index too",
        )

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
                            remedy=f"{atom.tensor}.long()"
                            if self.kinds[atom.tensor].device is not None
                            else f"int({atom.tensor})",
                        )

    def check_value_dtypes(self) -> None:
        for access in (self.target, *accesses(self.statement.value, nested=False)):
            kind = self.kinds.get(access.tensor)
            stored = access.tensor == self.target.tensor
            known = COMPUTABLE if stored else COMPUTABLE | NARROW_FLOATS
            if kind is not None and kind.dtype not in known:
                dtype = str(kind.dtype).removeprefix("torch.")
                wide = "complex64" if kind.dtype.is_complex else "float32"
                to = "long()" if kind.dtype in INTEGERS else f"to(torch.{wide})"
                self.fail(
                    DtypeError,
                    f"{access.tensor} holds {dtype}, which insum does not compute with",
                    span=access.span,
                    expected=_COMPUTABLE if stored else _READABLE,
                    remedy=f"{access.tensor}.{to}",
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

    def result_dtype(self) -> torch.dtype:
        types = {name: kind.type for name, kind in self.kinds.items()}
        value: Expr = self.statement.value
        bad = bad_call(value, types)
        if bad is not None:
            self.fail(
                DtypeError, f"{bad.function} is not defined for complex numbers", span=bad.span
            )
        inferred = infer(value, types)
        inferred = replace(inferred, dtype=widened(inferred.dtype))
        if inferred.dtype not in COMPUTABLE:
            self.fail(
                DtypeError,
                f"the right side is {str(inferred.dtype).removeprefix('torch.')}, which insum "
                "does not compute with",
                expected=_COMPUTABLE,
            )
        output = self.kinds.get(self.target.tensor)
        if self.statement.operator in ("max=", "min=") and (
            inferred.dtype.is_complex or output is not None and output.dtype.is_complex
        ):
            span = self.target.span if not inferred.dtype.is_complex else None
            self.fail(
                DtypeError,
                f"{self.statement.operator} is not defined for complex numbers",
                span=span,
                remedy="reduce abs(...) instead",
            )
        if self.statement.operator == "mean=" and not _is_divisible(inferred.dtype):
            self.fail(
                DtypeError,
                f"a mean of {str(inferred.dtype).removeprefix('torch.')} is no such number",
                expected="a right side of floating-point or complex numbers",
                remedy=f"{self.statement.target} mean= 1.0 * ...",
            )
        return self.check_output_dtype(inferred.dtype)

    def check_output(self) -> None:
        """What is accumulated into can be written."""
        name, operator = self.target.tensor, self.statement.operator
        passed = self.kinds.get(name)
        if passed is not None and operator == "mean=":
            self.fail(
                BindingError,
                f"{name} is passed, but of a mean that it holds nothing tells of how many numbers",
                span=self.target.span,
                expected=f"a mean without {name}, which is a new tensor",
                remedy="give its shape as out_shape=",
            )
        if passed is not None and passed.device is None and operator != "=":
            self.fail(
                DtypeError,
                f"{name} is a number, but {operator} writes into it",
                span=self.target.span,
                expected="a tensor",
                remedy=f"pass {name}=torch.tensor({name})",
            )

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


def _is_divisible(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _kind_name(value: object) -> str:
    if value is None:
        return "None"
    module = type(value).__module__.partition(".")[0]
    return (
        "a " + type(value).__name__
        if module == "builtins"
        else f"a {module} {type(value).__name__}"
    )


def _as_dense(name: str, odd: str) -> str:
    match odd.split()[1]:
        case "parameter":
            return "run the layer that it belongs to once"
        case "nested" | "jagged":
            return f"{name}.values() of a jagged one, with an index tensor that tells the row"
        case "quantised":
            return f"{name}.dequantize()"
    return (
        "insum.einsum with a format made by "
        f"insum.formats.COO.from_torch({name}), or {name}.to_dense()"
    )


def _as_tensor(name: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return f"torch.tensor({name})"
    return (
        f"torch.as_tensor({name})"
        if hasattr(value, "__array__")
        else "insum.einsum takes sparse formats; insum takes tensors and numbers"
    )
