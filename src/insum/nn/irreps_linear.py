"""Linear maps between vectors of irreps, with the weights of their namesakes in e3nn."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, SIZE, TENSOR, TEXT, Accepted, require, takes
from insum.api import insum
from insum.compat.calls import is_plain_call
from insum.errors import BindingError, UnsupportedError
from insum.nn.checks import (
    in_irreps,
    instruction_number,
    layer_takes,
    one_device,
    refuse_own_for_each,
)
from insum.nn.irreps import Irreps
from insum.nn.mixing import ChannelMixing, MixingPath, columns_of
from insum.nn.patterns import mask_of, without_compiled_parts

if TYPE_CHECKING:
    from typing_extensions import Self

PAIRS = Accepted(
    "a list of (i_in, i_out)",
    lambda v: (
        isinstance(v, tuple | list)
        and all(isinstance(one, tuple | list) and len(one) == 2 for one in v)
    ),
)
BIASES = FLAG | Accepted(
    "one for each term of the output",
    lambda v: isinstance(v, tuple | list) and all(isinstance(one, bool) for one in v),
)
NORMALIZATIONS = ("element", "path")


@dataclass(frozen=True)
class Mixing:
    """Weights between two terms, or, where ``i_in`` is -1, a bias; called as e3nn calls it."""

    i_in: int
    i_out: int
    path_shape: tuple[int, ...]
    path_weight: float

    @property
    def numel(self) -> int:
        return math.prod(self.path_shape)


class Linear(nn.Module):
    """A linear map that keeps irreps apart and mixes their multiplicities, weight for weight
    `e3nn.o3.Linear`.

    One statement for each pair of terms of one irrep, a matrix product over what lies in memory as
    it lies:

        Z[b,w,i] = X[b,u,i] * W[u,w]

    Args:
        irreps_in: Text such as ``"16x0e + 16x1o"``, or e3nn's own.
        irreps_out: The same.
        f_in: Where features have one more dimension, (..., f_in, irreps_in.dim): its size. Weights
            are then (f_in, f_out, weight_numel).
        f_out: The size of that dimension in the result.
        internal_weights: Whether weights are parameters; by default where they are shared.
        shared_weights: One weight vector for all items, or one for each, (..., weight_numel).
        instructions: ``(i_in, i_out)``; by default all pairs of one irrep.
        biases: Whether scalars of even parity get one; or one answer for each term of the output.
        path_normalization: ``"element"`` or ``"path"``, as in e3nn.

    Examples:
        >>> linear = Linear("4x0e + 3x1o", "2x0e + 5x1o", biases=True)
        >>> linear
        Linear(4x0e+3x1o -> 2x0e+5x1o | 23 weights)
        >>> linear(torch.randn(10, 13)).shape
        torch.Size([10, 17])
        >>> linear.statements()
        ('Z[b,w,i] = X[b,u,i] * W[u,w]', 'Z[b,w,i] = X[b,u,i] * W[u,w]')
    """

    weight: Tensor
    bias: Tensor
    output_mask: Tensor
    scales: Tensor

    @takes(
        f_in=SIZE.optional,
        f_out=SIZE.optional,
        internal_weights=FLAG.optional,
        shared_weights=FLAG.optional,
        instructions=PAIRS.optional,
        biases=BIASES,
        path_normalization=TEXT,
    )
    def __init__(
        self,
        irreps_in: object,
        irreps_out: object,
        *,
        f_in: int | None = None,
        f_out: int | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        instructions: Sequence[Sequence[int]] | None = None,
        biases: bool | Sequence[bool] = False,
        path_normalization: str = "element",
    ) -> None:
        super().__init__()
        if path_normalization not in NORMALIZATIONS:
            raise UnsupportedError(
                f"path_normalization is {path_normalization!r}",
                expected=" or ".join(map(repr, NORMALIZATIONS)),
            )
        if (f_in is None) != (f_out is None):
            raise BindingError("one of f_in and f_out was given", expected="both, or none")
        self.irreps_in, self.irreps_out = Irreps.of(irreps_in), Irreps.of(irreps_out)
        self.f_in, self.f_out = f_in, f_out
        self.shared_weights = True if shared_weights is None else shared_weights
        self.internal_weights = (
            self.shared_weights if internal_weights is None else internal_weights
        )
        refuse_own_for_each(self.internal_weights, self.shared_weights)
        pairs = self._pairs(instructions)
        self._mixings = tuple(
            Mixing(
                a,
                b,
                self._shape(a, b),
                _coefficient(self.irreps_in, pairs, a, b, f_in, path_normalization),
            )
            for a, b in pairs
        )
        self._biases = tuple(
            Mixing(-1, i, (mul,), 1.0)
            for i, ((mul, _), has) in enumerate(zip(self.irreps_out, self._has_bias(biases)))
            if has
        )
        self.weight_numel = sum(one.numel for one in self._mixings)
        self.bias_numel = sum(one.numel for one in self._biases)
        self._register()
        self.register_load_state_dict_pre_hook(without_compiled_parts)  # type: ignore[no-untyped-call]

    @property
    def instructions(self) -> tuple[Mixing, ...]:
        """Weights, then biases."""
        return (*self._mixings, *self._biases)

    def _pairs(self, asked: Sequence[Sequence[int]] | None) -> list[tuple[int, int]]:
        if asked is None:
            return [
                (a, b)
                for a, (_, one) in enumerate(self.irreps_in)
                for b, (_, other) in enumerate(self.irreps_out)
                if one == other
            ]
        for number, (a, b) in enumerate(asked):
            for name, i, irreps in (("i_in", a, self.irreps_in), ("i_out", b, self.irreps_out)):
                if not isinstance(i, int) or not 0 <= i < len(irreps):
                    raise BindingError(
                        f"instruction {number}, {(a, b)}: {name} is {i}",
                        expected=f"a term of {irreps}, from 0 to {len(irreps) - 1}",
                    )
            if self.irreps_in[a][1] != self.irreps_out[b][1]:
                raise BindingError(
                    f"instruction {number}, {(a, b)}: {self.irreps_in[a][1]} cannot become "
                    f"{self.irreps_out[b][1]}",
                    expected="terms of one irrep",
                )
        return [(a, b) for a, b in asked]

    def _shape(self, a: int, b: int) -> tuple[int, int]:
        return self.irreps_in[a][0], self.irreps_out[b][0]

    def _has_bias(self, biases: bool | Sequence[bool]) -> list[bool]:
        scalar = [ir.dim == 1 and ir.p == 1 for _, ir in self.irreps_out]
        if isinstance(biases, bool):
            return [biases and is_scalar for is_scalar in scalar]
        if len(biases) != len(scalar) or any(b and not s for b, s in zip(biases, scalar)):
            raise BindingError(
                f"biases are {list(biases)} for {self.irreps_out}",
                expected="one for each term, and none but for 0e",
            )
        return list(biases)

    def _register(self) -> None:
        f = () if self.f_in is None else (self.f_in, self.f_out)
        for name, numel, lead, fill in (
            ("weight", self.weight_numel, f, torch.randn),
            ("bias", self.bias_numel, f[1:], torch.zeros),
        ):
            if self.internal_weights and numel:
                self.register_parameter(name, nn.Parameter(fill(*lead, numel)))
            else:
                self.register_buffer(name, torch.empty(0))
        reached = {one.i_out for one in self.instructions if one.numel}
        self.register_buffer("output_mask", mask_of(self.irreps_out, reached))
        self._scale()

    def _scale(self, path_weights: Sequence[float] | None = None) -> None:
        """What weights are multiplied with, for each pair of terms; by default what was asked for
        when the layer was made.
        """
        if path_weights is not None:
            pairs = zip(self._mixings, path_weights, strict=True)
            self._mixings = tuple(replace(one, path_weight=value) for one, value in pairs)
        exact: Any = {"dtype": torch.float64, "device": "cpu"}
        scales = [torch.full((one.numel,), one.path_weight, **exact) for one in self._mixings]
        whole = torch.cat([*scales, torch.ones(0, **exact)]).to(self.output_mask)
        self.register_buffer("scales", whole, persistent=False)
        self._mixing = self._paths_together()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._scale()  # as exact as the new dtype has them
        return self

    def _paths_together(self) -> ChannelMixing | None:
        """All pairs of terms as one launch, where items share their weights."""
        if self.f_in is not None or not self.shared_weights:
            return None
        paths, start = [], 0
        for one in self._mixings:
            if one.numel:
                strides = one.path_shape[1], 1
                paths.append(MixingPath(one.i_in, one.i_out, start, strides, one.path_weight))
            start += one.numel
        sides = columns_of(self.irreps_in), columns_of(self.irreps_out)
        return ChannelMixing(*sides, tuple(paths), self.weight_numel)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_mixing" not in state:  # stored when there was none
            self._mixing = self._paths_together()

    # --- the map ---

    @layer_takes(features=TENSOR, weight=TENSOR.optional, bias=TENSOR.optional)
    def forward(
        self, features: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        in_irreps("features", features, "irreps_in", self.irreps_in)
        if self.f_in is not None and (features.dim() < 2 or features.shape[-2] != self.f_in):
            raise BindingError(
                f"features have shape {tuple(features.shape)}",
                expected=f"(..., {self.f_in}, {self.irreps_in.dim})",
            )
        weight = self._given("weight", weight, self.weight_numel)
        bias = self._given("bias", bias, self.bias_numel)
        one_device(module=self.output_mask, features=features, weight=weight, bias=bias)
        mixing = self._mixing
        if (
            mixing is not None
            and features.dim() == 2
            and weight.dim() == 1
            and mixing.suits(features, weight)
        ):
            found = mixing(features, weight)
            return found + self._spread(bias, features) if self.bias_numel else found
        inner = 1 if self.f_in is None else 2
        lead = features.shape[: features.dim() - inner]
        x = features.reshape(math.prod(lead), *features.shape[-inner:])
        outer = (*lead, *(() if self.f_out is None else (self.f_out,)))
        return self._mapped(x, self._scaled(weight, lead), bias).reshape(
            *outer, self.irreps_out.dim
        )

    def _given(self, name: str, value: Tensor | None, numel: int) -> Tensor:
        if value is None:
            if numel and not self.internal_weights:
                raise BindingError(
                    f"this layer has no {name} of its own",
                    expected=f"{name}= with {numel} in the last dimension",
                )
            own: Tensor = getattr(self, name)
            return own
        if numel and (not value.dim() or value.shape[-1] != numel):
            raise BindingError(f"{name} has shape {tuple(value.shape)}", expected=f"(..., {numel})")
        return value

    def _scaled(self, weight: Tensor, lead: torch.Size) -> Tensor:
        """([items,] [f_in, f_out,] weight_numel), normalised."""
        if not self.weight_numel:
            return weight
        f = () if self.f_in is None else (self.f_in, self.f_out)
        items = () if self.shared_weights else tuple(lead)
        try:
            whole = weight.expand(*items, *f, self.weight_numel)
        except RuntimeError as error:
            raise BindingError(
                f"weight has shape {tuple(weight.shape)}",
                expected=f"{(*items, *f, self.weight_numel)}",
            ) from error
        whole = whole * self.scales
        return (
            whole if self.shared_weights else whole.reshape(math.prod(items), *f, self.weight_numel)
        )

    def _mapped(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        outputs: dict[int, Tensor] = {}
        terms = torch.split(x, list(self.irreps_in.widths), -1)
        weights = torch.split(weight, [one.numel for one in self._mixings], -1)
        for one, statement, own in zip(self._mixings, self.statements(), weights):
            if one.numel:
                mul, ir = self.irreps_in[one.i_in]
                part = terms[one.i_in].reshape(*x.shape[:-1], mul, ir.dim)
                own = own.reshape(*own.shape[:-1], *one.path_shape)
                found = _product(statement, part, own).flatten(-2)
                before = outputs.get(one.i_out)
                outputs[one.i_out] = found if before is None else before + found
        return self._joined(outputs, x, bias)

    def _bias_starts(self) -> dict[int, int]:
        """By term of the output, where its biases begin."""
        starts, start = {}, 0
        for one in self._biases:
            starts[one.i_out] = start
            start += one.numel
        return starts

    def _spread(self, bias: Tensor, x: Tensor) -> Tensor:
        """Biases in their columns of the output, and zeros in all others."""
        starts = self._bias_starts()
        parts = [
            bias.narrow(-1, starts[n], width) if n in starts else x.new_zeros(width)
            for n, width in enumerate(self.irreps_out.widths)
        ]
        return torch.cat(parts, -1)

    def _joined(self, outputs: dict[int, Tensor], x: Tensor, bias: Tensor) -> Tensor:
        shape = (x.shape[0], *(() if self.f_out is None else (self.f_out,)))
        starts = self._bias_starts()
        parts = []
        for number, (mul, ir) in enumerate(self.irreps_out):
            part = outputs.get(number)
            part = x.new_zeros(*shape, mul * ir.dim) if part is None else part
            if number in starts:
                part = part + bias.narrow(-1, starts[number], mul)
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, -1) if parts else x.new_zeros(*shape, 0)

    def statements(self) -> tuple[str, ...]:
        """The statements that a call runs, one for each pair of terms."""
        one, item = "" if self.f_in is None else "f,", "" if self.shared_weights else "b,"
        other, both = ("", "") if self.f_in is None else ("g,", "f,g,")
        text = f"Z[b,{other}w,i] = X[b,{one}u,i] * W[{item}{both}u,w]"
        return (text,) * len(self._mixings)

    # --- as e3nn has them ---

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | None = None) -> Tensor:
        """The weights between two terms, (..., u, w): a view."""
        require("weight", self.weight if weight is None else weight, TENSOR)
        instruction_number(instruction, len(self._mixings))
        weight = self._given("weight", weight, self.weight_numel)
        one = self._mixings[instruction]
        start = sum(other.numel for other in self._mixings[:instruction])
        return weight.narrow(-1, start, one.numel).view(*weight.shape[:-1], *one.path_shape)

    def weight_views(
        self, weight: Tensor | None = None, yield_instruction: bool = False
    ) -> Iterator[Any]:
        """The weights between each pair of terms; ``yield_instruction``: with its number and the
        instruction itself in front.
        """
        for number, one in enumerate(self._mixings):
            view = self.weight_view_for_instruction(number, weight)
            yield (number, one, view) if yield_instruction else view

    def extra_repr(self) -> str:
        return f"{self.irreps_in} -> {self.irreps_out} | {self.weight_numel} weights"


def _product(statement: str, x: Tensor, weight: Tensor) -> Tensor:
    """A statement of two dense factors. It would be left to a library, which is called right away
    where nothing else has to be seen to.
    """
    if x.dtype == weight.dtype and is_plain_call((x, weight)):
        return torch.einsum(_equation(statement), x, weight)
    return insum(statement, X=x, W=weight)


def _equation(statement: str) -> str:
    """
    >>> _equation("Z[b,w,i] = X[b,u,i] * W[u,w]")
    'bui,uw->bwi'
    """
    out, first, second = re.findall(r"\[(\w+)\]", statement.replace(",", ""))
    return f"{first},{second}->{out}"


def _coefficient(
    irreps: Irreps, pairs: Sequence[tuple[int, int]], a: int, b: int, f_in: int | None, rule: str
) -> float:
    """e3nn's: the number of elements that are summed, to the power -1/2."""
    others = [first for first, second in pairs if second == b]
    summed = sum(irreps[first][0] for first in others)
    count = summed if rule == "element" else irreps[a][0] * len(others)
    count *= 1 if f_in is None else f_in
    return count**-0.5 if count else 1.0
