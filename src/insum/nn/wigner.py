"""Real Wigner 3j symbols and spherical harmonics, in the basis of e3nn: degree 1 is (x, y, z), and
y is the polar axis.

The complex coefficients come from Racah's formula in exact fractions; one change of basis makes
them real. Everything is float64 on the CPU and kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from insum.accepted import FLAG, FLOATS, TEXT, Accepted, is_integer, is_size, require, takes
from insum.errors import BindingError, UnsupportedError
from insum.formats.layout import constant
from insum.nn.checks import last_size
from insum.nn.irreps import Irreps

#: Beyond it the numbers take hours, and nobody has use for them.
MOST_DEGREE = 50
VECTORS = Accepted(FLOATS.expected, lambda v: FLOATS.fits(v) and v.dim() <= 32)
DEGREE = Accepted(
    f"a degree from 0 to {MOST_DEGREE}", lambda v: is_size(v) and bool(v <= MOST_DEGREE)
)


@takes(l1=DEGREE, l2=DEGREE, l3=DEGREE)
@constant
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


@constant
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


NORMALIZATIONS = ("component", "norm", "integral")


@takes(vectors=VECTORS, normalize=FLAG, normalization=TEXT)
def spherical_harmonics(
    degrees: int | Sequence[int] | object,
    vectors: Tensor,
    normalize: bool = True,
    normalization: str = "component",
) -> Tensor:
    """Real spherical harmonics at vectors (..., 3): the values of ``e3nn.o3.spherical_harmonics``,
    differentiable to every order away from zero.

    Args:
        degrees: A number: all degrees from 0 to this one, ``1x0e + 1x1o + 1x2e + ...``. Otherwise
            those that are listed, in their order: a list of degrees, or irreps such as
            ``"0e + 2e"``, e3nn's too; a multiplicity says how often one stands.
        vectors: (..., 3): x, y, z.
        normalize: Whether vectors are brought to length 1 first. Otherwise degree ``l`` grows as
            the length to the power ``l``.
        normalization: What a degree at a vector of length 1 has: ``"component"``, the norm
            ``sqrt(2 l + 1)``; ``"norm"``, the norm 1; ``"integral"``, squares of components with
            the integral 1 over the sphere.

    Returns:
        (..., sum of ``2 l + 1``).

    Examples:
        >>> spherical_harmonics(1, torch.tensor([0.0, 2.0, 0.0]))
        tensor([1.0000, 0.0000, 1.7321, 0.0000])
        >>> spherical_harmonics("1o", torch.tensor([0.0, 2.0, 0.0]), normalization="norm")
        tensor([0., 1., 0.])
    """
    listed = _degrees(degrees)
    if normalization not in NORMALIZATIONS:
        raise UnsupportedError(
            f"normalization is {normalization!r}", expected=" or ".join(map(repr, NORMALIZATIONS))
        )
    last_size("vectors", vectors, 3, "x, y, z")
    unit = torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors
    found = [torch.ones_like(unit[..., :1])]
    for l in range(1, max(listed, default=0) + 1):
        step = (
            torch.tensor(_ladder_numbers(l), dtype=unit.dtype, device=unit.device)
            if torch.compiler.is_compiling()
            else _ladder(l).to(unit)
        )
        found.append(torch.einsum("ijk,...i,...j->...k", step, unit, found[-1]))
    if normalization != "component":
        square = 4 * math.pi if normalization == "integral" else None
        found = [part / math.sqrt(square or 2 * l + 1) for l, part in enumerate(found)]
    return torch.cat([unit[..., :0], *(found[l] for l in listed)], -1)


def _degrees(asked: object) -> list[int]:
    """The degrees that are asked for, one by one."""
    if is_integer(asked):
        require("degrees", asked, DEGREE)
        return list(range(int(asked) + 1))  # type: ignore[call-overload]
    if isinstance(asked, list | tuple) and all(is_integer(one) for one in asked):
        for one in asked:
            require("degrees", one, DEGREE)
        return list(asked)
    irreps = Irreps.of(asked)
    if any(ir.p not in (1, (-1) ** ir.l) for _, ir in irreps) or (
        any(ir.p != (-1) ** ir.l for _, ir in irreps) and any(ir.p < 0 for _, ir in irreps)
    ):
        raise BindingError(
            f"spherical harmonics do not have the parities of {irreps}",
            expected="parity -1 to the degree, or all even",
        )
    for _, ir in irreps:
        require("degrees", ir.l, DEGREE)
    return [ir.l for mul, ir in irreps for _ in range(mul)]


@constant
@torch.inference_mode(False)
def _ladder(l: int) -> Tensor:
    """From degree ``l - 1`` and the vector itself to degree ``l``, scaled so that unit vectors give
    norm ``sqrt(2 l + 1)``.
    """
    step = wigner_3j(1, l - 1, l)
    pole = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device="cpu")
    before = torch.zeros(2 * l - 1, dtype=torch.float64, device="cpu")
    before[l - 1] = math.sqrt(2 * l - 1)  # at the pole only m = 0 is left, and it is positive
    reached = torch.einsum("ijk,i,j->k", step, pole, before)
    return step * math.sqrt(2 * l + 1) / reached[l]


@constant
def _ladder_numbers(l: int) -> list[list[list[float]]]:
    """The same as numbers, which a tracer can hold."""
    numbers: list[list[list[float]]] = _ladder(l).tolist()
    return numbers
