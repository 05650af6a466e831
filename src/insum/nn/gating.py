"""Gates of irreps in one launch each way, where it is calls that take time.

Parts of a gate by themselves are a statement each, of columns that are split off and put together,
and so are all their gradients. Here a gate is a function of whole rows, with its gradient and the
gradient of that; beyond them gradients are those of operations of torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from insum.call import prepared
from insum.compat.autograd import plain_apply
from insum.compat.calls import is_plain_call
from insum.compat.contexts import device_of, untracked
from insum.compat.many import any_batched, over_items
from insum.compat.streams import is_recorded
from insum.runtime.handwritten import gating as kernels
from insum.runtime.handwritten.gating import CODES, UNIT_FIELDS, GateTables
from insum.runtime.handwritten.kernel import on_device

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class GateUnit:
    """A scalar, the function of it, and what that is multiplied with.

    Attributes:
        scalar: its column.
        out: the first column of the result.
        dim: how many columns there are of it.
        first: the first column that is multiplied; None where the scalar is by itself.
        function: of the language; empty: none.
    """

    scalar: int
    out: int
    dim: int
    first: int | None
    function: str = ""
    inner: float = 1.0
    outer: float = 1.0

    def row(self) -> list[int]:
        alone = self.first is None
        code = CODES.get(self.function, 0)
        return [self.scalar, self.first or 0, self.out, self.dim, int(alone), code]


@dataclass(frozen=True)
class RowGate:
    """All units of a gate; ``width``: columns of what comes in, and of the result."""

    units: tuple[GateUnit, ...]
    width: tuple[int, int]
    _tables: dict[torch.device, GateTables] = field(default_factory=dict, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}  # devices are another process's

    def suits(self, x: Tensor) -> bool:
        return (
            prepared.kernels_look_on(x.device)
            and is_plain_call((x,))
            and x.dtype in _DTYPES
            and x.shape[0] * len(self.units) > 0
            and on_device(x)
            and (x.device in self._tables or not is_recorded(x.device))
        )

    def __call__(self, x: Tensor) -> Tensor:
        """From rows to rows."""
        found: Tensor = _apply(self, _rows(x))  # what is saved must be what came in
        return found

    def tables(self, device: torch.device) -> GateTables:
        found = self._tables.get(device)
        if found is None:
            with untracked():
                units = torch.tensor([unit.row() for unit in self.units], dtype=torch.int32)
                pairs = [(unit.inner, unit.outer) for unit in self.units]
                scales = torch.tensor(pairs, dtype=torch.float64)
                most = max(unit.dim for unit in self.units)
                assert units.shape[1] == UNIT_FIELDS
                found = GateTables(units.to(device), scales.to(device), most, self.width)
                self._tables[device] = found
        return found


class _GatedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: RowGate, x: Tensor) -> Tensor:
        ctx.gate = gate
        ctx.save_for_backward(x)
        with device_of(x):
            return kernels.gated(gate.tables(x.device), x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if any_batched((gradient,)):
            return over_items(functools.partial(_GatedRows.backward, ctx), (gradient,))
        (x,) = ctx.saved_tensors
        if not is_plain_call((gradient, x)):
            return None, _ByOperations(ctx.gate, x).gradient(gradient)
        apply = _apply_gradient if torch.is_grad_enabled() else _gradient
        return None, apply(ctx.gate, x, gradient)


def _gradient(gate: RowGate, x: Tensor, gradient: Tensor) -> Tensor:
    with device_of(x):
        return kernels.gradient(gate.tables(x.device), x, _rows(gradient))


class _GatedRowsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: RowGate, x: Tensor, gradient: Tensor) -> Tensor:
        ctx.gate = gate
        ctx.save_for_backward(x, gradient)
        return _gradient(gate, x, gradient)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Any, ...]:
        if any_batched((along,)):
            return over_items(functools.partial(_GatedRowsGradient.backward, ctx), (along,))
        x, gradient = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain_call((along, x, gradient)):
            to_gradient, to_x = _ByOperations(ctx.gate, x).second(gradient, along)
            return None, to_x, to_gradient
        with device_of(x):
            tables = ctx.gate.tables(x.device)
            to_gradient, to_x = kernels.second(tables, x, _rows(gradient), _rows(along))
        return None, to_x, to_gradient


_apply, _apply_gradient = plain_apply(_GatedRows), plain_apply(_GatedRowsGradient)


def _rows(x: Tensor) -> Tensor:
    """As kernels read them."""
    return x.resolve_neg().contiguous()


# --- by operations that others can look at --------------------------------------------------------


class _ByOperations:
    """A gate at rows, its gradient and the gradient of that, of every order and of many at once."""

    def __init__(self, gate: RowGate, x: Tensor) -> None:
        tables = gate.tables(x.device)
        scalar, first, _, dim, alone, code = tables.units.long().unbind(1)
        inner, outer = tables.scales.to(x.dtype).unbind(1)
        #: Of every column of the result its unit, and what is multiplied with a function.
        self.unit = torch.repeat_interleave(dim)
        starts = torch.cumsum(dim, 0) - dim
        places = torch.arange(len(self.unit), device=x.device) - starts[self.unit]
        self.scalar, self.alone = scalar, alone[self.unit] > 0
        self.column = torch.where(self.alone, 0, first[self.unit] + places)
        self.x = torch.where(self.alone, 1, x[:, self.column])
        found = _derivatives(inner * x[:, scalar], code)
        scales = outer, outer * inner, outer * inner * inner
        self.f, self.f1, self.f2 = (one * scale for one, scale in zip(found, scales))
        self.zeros = torch.zeros_like(x)

    def _put(self, by_column: Tensor, by_unit: Tensor) -> Tensor:
        """Of what belongs to columns that are multiplied, and to scalars, rows."""
        kept = torch.where(self.alone, 0, by_column)
        return self.zeros.index_add(1, self.column, kept).index_add(1, self.scalar, by_unit)

    def _summed(self, by_column: Tensor) -> Tensor:
        return torch.zeros_like(self.f).index_add(1, self.unit, by_column)

    def gradient(self, g: Tensor) -> Tensor:
        return self._put(g * self.f[:, self.unit], self._summed(g * self.x) * self.f1)

    def second(self, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        along = torch.where(self.alone, 0, h[:, self.column])
        scalars = h[:, self.scalar]
        first = (scalars * self.f1)[:, self.unit]
        to_scalars = (
            self._summed(along * g) * self.f1 + scalars * self._summed(g * self.x) * self.f2
        )
        return along * self.f[:, self.unit] + first * self.x, self._put(first * g, to_scalars)


def _derivatives(t: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Functions by their numbers, and their first two derivatives."""
    s, th, zero = torch.sigmoid(t), torch.tanh(t), torch.zeros_like(t)
    every = {
        0: (t, zero + 1, zero),
        CODES["silu"]: (t * s, s * (1 + t * (1 - s)), s * (1 - s) * (2 + t * (1 - 2 * s))),
        CODES["tanh"]: (th, 1 - th * th, -2 * th * (1 - th * th)),
        CODES["sigmoid"]: (s, s * (1 - s), s * (1 - s) * (1 - 2 * s)),
        CODES["abs"]: (t.abs(), t.sign(), zero),
        CODES["relu"]: (t.relu(), (t > 0).to(t.dtype), zero),
    }
    found = [zero, zero, zero]
    for number, three in every.items():
        found = [torch.where(code == number, one, other) for one, other in zip(three, found)]
    return found[0], found[1], found[2]
