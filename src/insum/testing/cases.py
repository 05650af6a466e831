"""A statement together with arguments that fit it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from insum.lang.bind import Value
from insum.lang.expr import Call, Expr, Product, Sum
from insum.lang.parser import parse
from insum.lang.types import Typed, infer, is_rounded
from insum.testing.compare import assert_close
from insum.testing.features import features
from insum.testing.oracle import oracle

CaseSizes: TypeAlias = Mapping[str | int, int | tuple[int, ...]]

FLOATS = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FUNCTIONS = (
    "abs",
    "relu",
    "tanh",
    "sigmoid",
    "exp",
    "sqrt",
    "log",
    "reciprocal",
    "expm1",
    "log1p",
    "sin",
    "cos",
    "erf",
    "leaky_relu",
    "elu",
    "gelu",
    "silu",
    "softplus",
    "pow",
    "maximum",
    "minimum",
    "where",
    "whole",
    "ones",
    "ne",
    "lt",
    "le",
    "sign",
    "step",
    "conj",
    "eq",
)


@dataclass(frozen=True)
class Options:
    """What drawn statements may hold.

    Args:
        operators: Choose from these.
        functions: Choose from these.
        dtypes: Choose from these, one for each statement unless ``mixed``.
        index_dtypes: Choose from these.
        mixed: Several dtypes in one statement.
        differentiable: Values away from kinks, ties and overlapping memory, outputs always finite;
            use with float64 and complex128.
        product_only: One product of accesses, perhaps with a literal, under ``=`` or ``+=``: what
            fused kernels take.
        max_points: Loop points of a term, at most.
        max_elements: Elements of one tensor, at most.
        max_rank: Dimensions of a tensor, at most.
        max_factors: Factors of a product, at most.
        max_terms: Terms of a sum, at most.
        max_variables: Index variables, at most.
        max_extent: The extent of one, at most.
        max_indirection: Index tensors inside of each other, at most.
        zero_extents: Allow extents of 0.
        padded: Allow absent entries.
        strided: Allow tensors that do not lie in one piece.
        scalars: Allow Python numbers.
        affine: Allow sums as indices.
        indirect: Allow index tensors.

    Examples:
        >>> from insum.testing import draw_cases
        >>> next(draw_cases(1, product_only=True)).statement  # doctest: +ELLIPSIS
        '...'
    """

    operators: tuple[str, ...] = ("=", "+=", "max=", "min=")
    functions: tuple[str, ...] = FUNCTIONS
    dtypes: tuple[torch.dtype, ...] = FLOATS
    index_dtypes: tuple[torch.dtype, ...] = (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    )
    mixed: bool = True
    differentiable: bool = False
    product_only: bool = False
    max_points: int = 200
    max_elements: int = 400
    max_rank: int = 5
    max_factors: int = 3
    max_terms: int = 3
    max_variables: int = 6
    max_extent: int = 4
    max_indirection: int = 2
    zero_extents: bool = True
    padded: bool = True
    strided: bool = True
    scalars: bool = True
    affine: bool = True
    indirect: bool = True


@dataclass(frozen=True, eq=False)
class Case:
    """A statement with arguments. Its ``repr`` is the call that runs it, strides and all.

    Args:
        statement: One statement of the language.
        values: A tensor or number for each name.
        sizes: As in `insum`.
        padded: As in `insum`.

    Examples:
        >>> import torch
        >>> values = {"A": torch.ones(2), "D": torch.tensor([1, 1])}
        >>> case = Case("C[D[p]] += A[p]", values, sizes={"C": (3,)})
        >>> case
        insum.insum('C[D[p]] += A[p]', sizes={'C': (3,)}, A=torch.tensor([1.0, 1.0]),
        D=torch.tensor([1, 1], dtype=torch.int64))
        >>> case.expected()
        array([0., 2., 0.])
        >>> case.check()
    """

    statement: str
    values: Mapping[str, Value]
    sizes: CaseSizes = field(default_factory=dict)
    padded: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.values.items() if isinstance(value, Tensor)}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments that can have a gradient: floating or complex tensors."""
        return tuple(
            name
            for name, value in self.tensors.items()
            if value.is_floating_point() or value.is_complex()
        )

    @property
    def target(self) -> str:
        return parse(self.statement).target.tensor

    @property
    def precision(self) -> torch.dtype:
        """The coarsest dtype that takes part, which decides the tolerance; that of integers where
        nothing is floating.
        """
        statement = parse(self.statement)
        types = {name: _typed(value) for name, value in self.values.items()}
        # what is made of numbers and integers alone is as exact as what it meets
        parts = [p for p in _parts(statement.value) if is_rounded(p, types)]
        dtypes = [infer(e, types).dtype for e in (statement.value, *parts)]
        if statement.target.tensor in types:
            dtypes.append(types[statement.target.tensor].dtype)
        return max(dtypes, key=_coarseness)

    @property
    def features(self) -> frozenset[str]:
        """Labels of what the case exercises, such as ``rank 3``, ``repeated index``, ``zero
        extent``, ``float16``.
        """
        return features(parse(self.statement), self.values, self.padded)

    def to(self, device: str | torch.device) -> Case:
        """The same case with its tensors on another device; strides and offsets are kept."""
        return replace(
            self,
            values={
                name: _relaid(v, device) if isinstance(v, Tensor) else v
                for name, v in self.values.items()
            },
        )

    def clone(self) -> Case:
        """The same case with tensors of its own, for calls that write into them."""
        return replace(
            self,
            values={
                name: _relaid(v, v.device) if isinstance(v, Tensor) else v
                for name, v in self.values.items()
            },
        )

    def run(self) -> Tensor:
        """The result of ``insum.insum`` on a clone."""
        from insum.api import insum  # on which nothing else here rests

        values: dict[str, Any] = dict(self.clone().values)
        return insum(self.statement, sizes=dict(self.sizes) or None, padded=self.padded, **values)

    def expected(self) -> np.ndarray[Any, Any]:
        """The oracle's result."""
        return oracle(self.statement, self.values, sizes=dict(self.sizes), padded=self.padded)

    def check(self) -> None:
        """Raise AssertionError unless `run` gives what the oracle gives."""
        assert_close(self.run(), self.expected(), self.precision)

    def __repr__(self) -> str:
        options = [f"sizes={dict(self.sizes)!r}"] * bool(self.sizes)
        options += [f"padded={self.padded!r}"] * bool(self.padded)
        values = (f"{n}={_show(v)}" for n, v in self.values.items())
        return f"insum.insum({', '.join([repr(self.statement), *options, *values])})"


# --- tensors with their strides -------------------------------------------------------------------


def _relaid(tensor: Tensor, device: str | torch.device) -> Tensor:
    """A copy whose memory is laid out as the original's: gaps, offset, overlap and lazy conjugation
    included.
    """
    if tensor.is_conj():
        return _relaid(tensor.conj(), device).conj()
    memory = _memory(tensor).clone().to(device)
    return torch.as_strided(memory, tensor.shape, tensor.stride(), tensor.storage_offset())


def _memory(tensor: Tensor) -> Tensor:
    """The flat memory from its start up to the tensor's last element."""
    used = (
        tensor.storage_offset()
        + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        + 1
    )
    return torch.as_strided(tensor.detach(), (used if tensor.numel() else 0,), (1,), 0)


def _show(value: Value) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_conj():
        return f"{_show(value.conj())}.conj()"
    dtype = "" if value.dtype == torch.float32 and value.numel() else f", dtype={value.dtype}"
    place = "" if value.device.type == "cpu" else f".to({str(value.device)!r})"
    if value.is_contiguous() and value.storage_offset() == 0 and value.numel():
        return f"torch.tensor({value.tolist()}{dtype}){place}"
    if value.numel() == 0:
        return f"torch.empty_strided({tuple(value.shape)}, {value.stride()}{dtype}){place}"
    return (
        f"torch.tensor({_memory(value).tolist()}{dtype}){place}"
        f".as_strided({tuple(value.shape)}, {value.stride()}, {value.storage_offset()})"
    )


# --- precision ------------------------------------------------------------------------------------


def _typed(value: Value) -> Typed:
    from insum.lang.bind import kind_of

    return kind_of(value).type


def _parts(expr: Expr) -> Iterator[Expr]:
    """The expression and what it is made of."""
    yield expr
    match expr:
        case Call(_, args) | Product(args) | Sum(args):
            for arg in args:
                yield from _parts(arg)


def _coarseness(dtype: torch.dtype) -> tuple[bool, float]:
    floating = dtype.is_floating_point or dtype.is_complex
    return floating, torch.finfo(dtype).eps if floating else 0.0
