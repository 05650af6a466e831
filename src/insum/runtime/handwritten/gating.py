"""Gates of irreps, their gradient and the gradient of that, each in one launch: a program has pairs
of a row and a unit, which is a scalar with a function of it, and the columns that are multiplied
with that function, if there are any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from insum.compat.tensors import empty
from insum.runtime.handwritten.kernel import Handwritten, blocks

#: Numbers in a row of the table.
UNIT_FIELDS = 6
#: Pairs that a program takes.
PAIRS = 256
#: Functions by the number that tables have for them; 0: none.
CODES = {"silu": 1, "tanh": 2, "sigmoid": 3, "abs": 4, "relu": 5}


@dataclass(frozen=True, slots=True, eq=False)
class GateTables:
    """Where programs read and write, on one device.

    Attributes:
        units: for each unit: the column of its scalar, the first of those that it multiplies, the
            first column of the result, how many there are, whether the scalar is by itself, and the
            number of its function.
        scales: for each unit, what the argument and the value of its function are multiplied with.
        most: columns of the result that a unit has, at most.
        width: columns of rows that come in, and of the result.
    """

    units: Tensor
    scales: Tensor
    most: int
    width: tuple[int, int]


#: A function and its first two derivatives at ``t``, each multiplied with what belongs to it.
_FUNCTIONS = """
    s = 1 / (1 + tl.exp(-t))
    e = tl.exp(-2 * tl.abs(t))
    th = tl.where(t < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    sign = tl.where(t > 0, 1.0, tl.where(t < 0, -1.0, 0.0))
    f = tl.where(code == 1, t * s, t)
    f = tl.where(code == 2, th, f)
    f = tl.where(code == 3, s, f)
    f = tl.where(code == 4, tl.abs(t), f)
    f = outer * tl.where(code == 5, tl.maximum(t, 0.0), f)
    f1 = tl.where(code == 1, s * (1 + t * (1 - s)), 1.0)
    f1 = tl.where(code == 2, 1 - th * th, f1)
    f1 = tl.where(code == 3, s * (1 - s), f1)
    f1 = tl.where(code == 4, sign, f1)
    f1 = outer * inner * tl.where(code == 5, tl.where(t > 0, 1.0, 0.0), f1)
    f2 = tl.where(code == 1, s * (1 - s) * (2 + t * (1 - 2 * s)), 0.0)
    f2 = tl.where(code == 2, -2 * th * (1 - th * th), f2)
    f2 = outer * inner * inner * tl.where(code == 3, s * (1 - s) * (1 - 2 * s), f2)
"""


def _text(name: str, pointers: str, before: str, each: str, after: str, kind: str) -> str:
    """``each``: what is done for column ``d`` of a unit; a scalar by itself has one, that is 1."""
    return f"""@triton.jit
def {name}(
    {pointers}, units_ptr, scales_ptr, rows: "i64", units: "i64", most: "i64",
    x_row: "i64", z_row: "i64",
):
    pair = tl.program_id(0).to(tl.int64) * {PAIRS} + tl.arange(0, {PAIRS})
    there = pair < rows * units
    row = pair // units
    unit = pair % units
    unit_at = units_ptr + unit * {UNIT_FIELDS}
    scalar = tl.load(unit_at, mask=there, other=0)
    first = tl.load(unit_at + 1, mask=there, other=0)
    out = tl.load(unit_at + 2, mask=there, other=0)
    dim = tl.load(unit_at + 3, mask=there, other=0)
    alone = tl.load(unit_at + 4, mask=there, other=0) > 0
    code = tl.load(unit_at + 5, mask=there, other=0)
    inner = tl.load(scales_ptr + unit * 2, mask=there, other=0).to(tl.{kind})
    outer = tl.load(scales_ptr + unit * 2 + 1, mask=there, other=0).to(tl.{kind})
    scalar_at = row * x_row + scalar
    t = inner * tl.load(x_ptr + scalar_at, mask=there, other=0).to(tl.{kind})
{_FUNCTIONS}{before}
    for d in range(most):
        own = there & (d < dim)
        gated = own & (alone == 0)
        x_at = row * x_row + first + d
        z_at = row * z_row + out + d
        x = tl.load(x_ptr + x_at, mask=gated, other=0).to(tl.{kind})
        x = tl.where(alone, 1.0, x)
{each}{after}"""


def _kernels(kind: str) -> tuple[Handwritten, Handwritten, Handwritten]:
    """The gate, its gradient, and the gradient of that along ``h``, by what came in of gradients
    and of rows; computed in ``kind``.
    """
    zeros = f"tl.zeros([{PAIRS}], tl.{kind})"
    forward = _text(
        "insum_gate",
        "x_ptr, z_ptr",
        "",
        """        tl.store(z_ptr + z_at, (f * x).to(z_ptr.dtype.element_ty), mask=own)
""",
        "",
        kind,
    )
    gradient = _text(
        "insum_gate_gradient",
        "x_ptr, g_ptr, d_ptr",
        f"    total = {zeros}",
        f"""        g = tl.load(g_ptr + z_at, mask=own, other=0).to(tl.{kind})
        tl.store(d_ptr + x_at, (g * f).to(d_ptr.dtype.element_ty), mask=gated)
        total += g * x
""",
        """    tl.store(d_ptr + scalar_at, (total * f1).to(d_ptr.dtype.element_ty), mask=there)
""",
        kind,
    )
    second = _text(
        "insum_gate_second",
        "x_ptr, g_ptr, h_ptr, to_g_ptr, to_x_ptr",
        f"""    h_scalar = tl.load(h_ptr + scalar_at, mask=there, other=0).to(tl.{kind})
    total = {zeros}
    crossed = {zeros}""",
        f"""        g = tl.load(g_ptr + z_at, mask=own, other=0).to(tl.{kind})
        h = tl.load(h_ptr + x_at, mask=gated, other=0).to(tl.{kind})
        found = h * f + h_scalar * x * f1
        tl.store(to_g_ptr + z_at, found.to(to_g_ptr.dtype.element_ty), mask=own)
        found = h_scalar * g * f1
        tl.store(to_x_ptr + x_at, found.to(to_x_ptr.dtype.element_ty), mask=gated)
        total += g * x
        crossed += h * g
""",
        """    found = crossed * f1 + h_scalar * total * f2
    tl.store(to_x_ptr + scalar_at, found.to(to_x_ptr.dtype.element_ty), mask=there)
""",
        kind,
    )
    names = "insum_gate", "insum_gate_gradient", "insum_gate_second"
    first, middle, last = map(Handwritten, names, (forward, gradient, second))
    return first, middle, last


_NARROW, _WIDE = _kernels("float32"), _kernels("float64")


def _launch(number: int, tables: GateTables, *tensors: Tensor) -> None:
    x = tensors[0]
    rows, units = x.shape[0], tables.units.shape[0]
    kernel = (_WIDE if x.dtype == torch.float64 else _NARROW)[number]
    sizes = rows, units, tables.most, *tables.width
    kernel(blocks(rows * units, PAIRS), *tensors, tables.units, tables.scales, *sizes)


def gated(tables: GateTables, x: Tensor) -> Tensor:
    """Of contiguous rows."""
    found = empty((x.shape[0], tables.width[1]), x.dtype, x.device)
    _launch(0, tables, x, found)
    return found


def gradient(tables: GateTables, x: Tensor, g: Tensor) -> Tensor:
    found = empty(tuple(x.shape), x.dtype, x.device)
    _launch(1, tables, x, g, found)
    return found


def second(tables: GateTables, x: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """What the gradient along ``h`` sends to ``g``, and to ``x``."""
    to_g, to_x = empty(tuple(g.shape), x.dtype, x.device), empty(tuple(x.shape), x.dtype, x.device)
    _launch(2, tables, x, g, h, to_g, to_x)
    return to_g, to_x
