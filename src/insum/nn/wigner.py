"""Real Wigner 3j symbols in the basis of e3nn: degree 1 is (x, y, z), and y is the polar axis.

The complex coefficients come from Racah's formula in exact fractions; one change of basis makes
them real. Everything is float64 on the CPU and kept.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from insum.accepted import Accepted, is_size, takes
from insum.errors import BindingError
from insum.formats.layout import memoised

#: Beyond it the numbers take hours, and nobody has use for them.
MOST_DEGREE = 50
DEGREE = Accepted(
    f"a degree from 0 to {MOST_DEGREE}", lambda v: is_size(v) and bool(v <= MOST_DEGREE)
)


@takes(l1=DEGREE, l2=DEGREE, l3=DEGREE)
@memoised
@torch.inference_mode(False)
def wigner_3j(l1: int, l2: int, l3: int) -> Tensor:
    """The invariant tensor (2 l1 + 1, 2 l2 + 1, 2 l3 + 1) of three degrees, of norm 1; do not write
    into it.

    Args:
        l1: The first degree.
        l2: The second.
        l3: The third, from ``abs(l1 - l2)`` to ``l1 + l2``.

    Returns:
        The tensor, in double precision.

    Examples:
        >>> wigner_3j(1, 1, 0)[:, :, 0]
        tensor([[0.5774, 0.0000, 0.0000],
                [0.0000, 0.5774, 0.0000],
                [0.0000, 0.0000, 0.5774]], dtype=torch.float64)
    """
    if not abs(l1 - l2) <= l3 <= l1 + l2:
        raise BindingError(
            f"degrees {l1}, {l2}, {l3} do not couple",
            expected=f"the third from {abs(l1 - l2)} to {l1 + l2}",
        )
    coupled = torch.zeros(2 * l1 + 1, 2 * l2 + 1, 2 * l3 + 1, dtype=torch.complex128, device="cpu")
    for m1 in range(-l1, l1 + 1):
        for m2 in range(max(-l2, -l3 - m1), min(l2, l3 - m1) + 1):
            coupled[l1 + m1, l2 + m2, l3 + m1 + m2] = _clebsch_gordan(l1, m1, l2, m2, l3)
    real = torch.einsum(
        "ai,bj,ck,abc->ijk", _real_basis(l1), _real_basis(l2), _real_basis(l3).conj(), coupled
    ).real
    # what should be zero is zero: it decides the pattern
    real = torch.where(real.abs() < 1e-14, 0, real)
    return real.div(torch.linalg.vector_norm(real)).contiguous()


def _clebsch_gordan(l1: int, m1: int, l2: int, m2: int, l3: int) -> float:
    """``<l1 m1 l2 m2 | l3 m1+m2>`` by Racah's formula."""
    f, m3 = math.factorial, m1 + m2
    square = Fraction(
        (2 * l3 + 1) * f(l3 + l1 - l2) * f(l3 - l1 + l2) * f(l1 + l2 - l3), f(l1 + l2 + l3 + 1)
    )
    square *= f(l3 + m3) * f(l3 - m3) * f(l1 - m1) * f(l1 + m1) * f(l2 - m2) * f(l2 + m2)
    total = Fraction(0)
    for k in range(max(0, l2 - l3 - m1, l1 - l3 + m2), min(l1 + l2 - l3, l1 - m1, l2 + m2) + 1):
        below = (
            f(k)
            * f(l1 + l2 - l3 - k)
            * f(l1 - m1 - k)
            * f(l2 + m2 - k)
            * f(l3 - l2 + m1 + k)
            * f(l3 - l1 - m2 + k)
        )
        total += Fraction((-1) ** k, below)
    return math.copysign(math.sqrt(square * total * total), total)


@memoised
def _real_basis(l: int) -> Tensor:
    """Rows are complex, columns real harmonics. The phase ``(-i)**l`` makes the coupled
    coefficients real.
    """
    rows = [[0j] * (2 * l + 1) for _ in range(2 * l + 1)]
    root = 1 / math.sqrt(2)
    rows[l][l] = 1
    for m in range(1, l + 1):
        rows[l - m][l + m], rows[l - m][l - m] = root, -1j * root
        rows[l + m][l + m], rows[l + m][l - m] = (-1) ** m * root, 1j * (-1) ** m * root
    return (-1j) ** l * torch.tensor(rows, dtype=torch.complex128, device="cpu")
