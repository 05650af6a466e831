"""Extents of index variables and of the output, from tensors' shapes and from what the caller says;
symbolic sizes included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from insum.errors import BindingError, IndexRangeError, Span
from insum.lang.expr import Access, Affine, Var, variables
from insum.lang.problem import Size, shown_shape
from insum.lang.signature import Binding


class Extents:
    """Every variable has one extent, every dimension of the output one size, and affine indices
    stay inside.
    """

    def __init__(self, binding: Binding) -> None:
        self.binding = binding

    def read_sizes(self) -> None:
        """``sizes=``: by output dimension, by text of a left-side index, by index tensor, by
        variable, or the whole output.
        """
        if not isinstance(self.binding.sizes, Mapping):
            self.binding.fail(
                BindingError,
                f"sizes is a {type(self.binding.sizes).__name__}",
                expected="a dictionary",
                remedy="sizes={'i': 8}, or out_shape=(8,)",
            )
        for key, size in self.binding.sizes.items():
            if isinstance(key, bool) or not isinstance(key, str | int):
                self.binding.fail(
                    BindingError,
                    f"sizes has the key {key!r}",
                    expected="a name, or the number of an output dimension",
                )
            if isinstance(size, Sequence) and not isinstance(size, str):
                self.read_shape(key, size)
            else:
                self.check_size(f"sizes[{key!r}]", size)
                self.read_size(key, size)

    def check_size(self, what: str, size: object) -> None:
        if isinstance(size, bool) or not isinstance(size, int | torch.SymInt):
            self.binding.fail(
                BindingError,
                f"{what} is {size!r}",
                expected="an integer",
                remedy="int(...) around it" if hasattr(size, "__index__") else "",
            )
        if isinstance(size, int) and size < 0:
            self.binding.fail(BindingError, f"{what} is {size}", expected="a size of at least 0")
        if isinstance(size, int) and size >= 2**63:
            self.binding.fail(BindingError, f"{what} is {size}", expected="a size below 2**63")

    def read_shape(self, key: str | int, shape: Sequence[Size]) -> None:
        if key != self.binding.target.tensor:
            self.binding.fail(
                BindingError,
                f"sizes[{key!r}] is a shape, and {key!r} is not the output",
                remedy=f"sizes={{{self.binding.target.tensor!r}: shape}}, or out_shape=shape",
            )
        if len(shape) != len(self.binding.dims):
            self.binding.fail(
                BindingError,
                f"out_shape {shown_shape(shape)} has {len(shape)} dimension(s), but the left "
                f"side {self.binding.target} has {len(self.binding.dims)}",
                span=self.binding.target.span,
                expected="one size per index of the left side",
            )
        for dim, size in enumerate(shape):
            self.check_size(f"out_shape[{dim}]", size)
            self.set_dim(dim, size)

    def read_size(self, key: str | int, size: Size) -> None:
        if isinstance(key, int) or key.isascii() and key.isdigit():
            if int(key) >= len(self.binding.dims) or int(key) < 0:
                expected = (
                    f"a number from 0 to {len(self.binding.dims) - 1}"
                    if self.binding.dims
                    else "no size: the output is a scalar"
                )
                self.binding.fail(
                    BindingError,
                    f"sizes[{key!r}]: the output has {len(self.binding.dims)} dimension(s)",
                    span=self.binding.target.span,
                    expected=expected,
                )
            return self.set_dim(int(key), size)
        if key in {*variables(self.binding.target), *variables(self.binding.statement.value)}:
            return self.see(key, size, f"sizes[{key!r}]", None)
        text = key.replace(" ", "")
        dims = [
            d
            for d, index in enumerate(self.binding.target.indices)
            if str(index).replace(" ", "") == text
            or isinstance(index.atom, Access)
            and index.atom.tensor == key
        ]
        if key == self.binding.target.tensor:
            self.binding.fail(
                BindingError,
                f"sizes[{key!r}] is {size}, and {key!r} is the output",
                expected=f"its whole shape, of {len(self.binding.dims)} dimension(s)",
                remedy=f"sizes={{{key!r}: shape}}, or out_shape=shape",
            )
        if not dims:
            self.binding.fail(
                BindingError,
                f"sizes has no use for {key!r}",
                expected="an index variable, an output dimension (0, 1, ...), or a left-side "
                "index as it is written",
            )
        for dim in dims:
            self.set_dim(dim, size)

    def set_dim(self, dim: int, size: Size) -> None:
        known = self.binding.dims[dim]
        if known is not None and not _equal(known, size):
            self.binding.fail(
                BindingError,
                f"dimension {dim} of the output has two sizes: {known} and {size}",
                span=self.binding.target.indices[dim].span,
            )
        self.binding.dims[dim] = size

    def read_extents(self, access: Access, shape: Sequence[Size]) -> None:
        for dim, (index, size) in enumerate(zip(access.indices, shape, strict=True)):
            if access is self.binding.target:
                self.set_dim_of_target(dim, size)
            elif index.var is not None:
                self.see(index.var, size, f"{access} (dimension {dim})", index.span)

    def set_dim_of_target(self, dim: int, size: Size) -> None:
        known = self.binding.dims[dim]
        if known is not None and not _equal(known, size):
            self.binding.fail(
                BindingError,
                f"{self.binding.target.tensor} has size {size} in dimension {dim}, but sizes or "
                f"out_shape says {known}",
                span=self.binding.target.indices[dim].span,
            )
        self.binding.dims[dim] = size

    def see(self, var: str, extent: Size, place: str, span: Span | None) -> None:
        known = self.binding.seen.setdefault(var, (extent, place))
        if not _equal(known[0], extent):
            self.binding.fail(
                BindingError,
                f"index {var!r} has two extents: {known[0]} in {known[1]} and {extent} in {place}",
                span=span,
                remedy="check the order of the indices, or use another name for one of them",
            )

    def output_shape(self) -> tuple[Size, ...]:
        shape: list[Size] = []
        for dim, index in enumerate(self.binding.target.indices):
            var = index.var
            size = self.binding.dims[dim]
            if size is not None and var is not None:
                self.see(
                    var, size, f"the output {self.binding.target} (dimension {dim})", index.span
                )
            if size is None and var is not None:
                size = self.binding.seen[var][0] if var in self.binding.seen else None
            if size is None:
                self.unknown_output(dim, index)
            shape.append(size)
        return tuple(shape)

    def check_output_size(self, shape: tuple[Size, ...], dtype: torch.dtype) -> None:
        """Bytes are counted in 64 bits; whether there is so much memory is another question."""
        sizes = [size for size in shape if isinstance(size, int)]
        if len(sizes) == len(shape) and math.prod(sizes) * dtype.itemsize >= 2**63:
            self.binding.fail(
                BindingError,
                f"the output of shape {shown_shape(shape)} is too large to be addressed",
                span=self.binding.target.span,
                expected="fewer than 2**63 bytes",
            )

    def unknown_output(self, dim: int, index: Affine) -> NoReturn:
        name = self.binding.target.tensor
        shape = f"its shape as out_shape=(...), or sizes={{{dim}: n}}"
        is_mean = self.binding.statement.operator == "mean="  # which takes no output
        remedy = f"pass {shape}" if is_mean else f"pass the output as {name}=, {shape}"
        what = (
            f"index {index.var!r} stands in no tensor that was passed"
            if index.var
            else f"it is written at {index}, whose values do not tell it"
        )
        self.binding.fail(
            BindingError,
            f"the output's size in dimension {dim} is unknown: {what}",
            span=index.span,
            remedy=remedy,
        )

    def extents(self) -> dict[str, Size]:
        names = dict.fromkeys(
            (*variables(self.binding.target), *variables(self.binding.statement.value))
        )
        for name in names:
            if name not in self.binding.seen:
                span = next(
                    (
                        _var_span(i, name)
                        for a in self.binding.every_access()
                        for i in a.indices
                        if name in variables(i)
                    ),
                    None,
                )
                self.binding.fail(
                    BindingError,
                    f"the extent of index {name!r} is unknown: it stands alone in no dimension",
                    span=span,
                    remedy=f"pass sizes={{{name!r}: n}}",
                )
        return {name: self.binding.seen[name][0] for name in names}

    def check_affine_ranges(self, shape: tuple[Size, ...], extents: Mapping[str, Size]) -> None:
        for access in self.binding.every_access():
            limits = (
                shape if access is self.binding.target else self.binding.kinds[access.tensor].shape
            )
            for dim, index in enumerate(access.indices):
                self.check_affine_range(access, dim, index, limits[dim], extents)

    def check_affine_range(
        self, access: Access, dim: int, index: Affine, limit: Size, extents: Mapping[str, Size]
    ) -> None:
        ends = [extents[a.name] for _, a in index.terms if isinstance(a, Var)]
        if (
            index.var is not None
            or len(ends) < len(index.terms)
            or not all(isinstance(e, int) for e in (*ends, limit))
        ):
            return
        if 0 in ends:
            return
        reach = [c * (int(e) - 1) for (c, _), e in zip(index.terms, ends, strict=True)]
        low, high = (
            index.offset + sum(min(0, r) for r in reach),
            index.offset + sum(max(0, r) for r in reach),
        )
        bad = low if low < 0 else high
        if low < 0 or high >= limit:
            fact = (
                f"index {index} of {access.tensor} {f'reaches {bad},' if index.terms else 'is'} "
                f"outside dimension {dim} of size {limit}"
            )
            remedy = (
                "pass smaller extents with sizes=, or pad the tensor first"
                if index.terms
                else f"make {access.tensor} larger, or correct the index"
            )
            self.binding.fail(
                IndexRangeError,
                fact,
                span=index.span,
                expected=f"values from 0 to {limit - 1}" if limit else "no index at all",
                remedy=remedy,
            )


def _equal(a: Size, b: Size) -> bool:
    """Equality of extents; for symbolic ones a constraint that the tracer records instead of a
    guess.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    torch._check(a == b, lambda: f"insum: extents disagree: {a} and {b}")  # type: ignore[no-untyped-call]
    return True


def _var_span(index: Affine, name: str) -> Span | None:
    return next(
        (a.span for _, a in index.terms if isinstance(a, Var) and a.name == name), index.span
    )
