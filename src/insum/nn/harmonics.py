"""Spherical harmonics of vectors as statements, with gradients of every order.

Solid harmonics are sums of monomials of the coordinates, and their derivatives sums of harmonics of
one degree less. So one statement computes all degrees up to three, another those up to twice as
many, and one more the gradient, of the harmonics themselves:

    Y[e,I[p]] = V[p] * U[e,A[p]] * U[e,B[p]] * U[e,C[p]]
    Z[e,J[p]] = V[p] * S[e] * G[e,I[p]] * X[e,K[p]] * Y[e,M[p]]

with ``U`` a one and the vector, ``S`` one by its length, and ``X`` and ``Y`` both the harmonics.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, FLOATS, TEXT, Accepted, is_integer, require, takes
from insum.api import insum
from insum.compat.calls import is_plain_call
from insum.compat.many import any_batched, over_items
from insum.errors import BindingError, UnsupportedError
from insum.facts import constant
from insum.formats.layout import memoised
from insum.memory import unchanging
from insum.nn.checks import last_size
from insum.nn.irreps import Irrep, Irreps
from insum.nn.multilinear import Multilinear
from insum.nn.wigner import DEGREE, wigner_3j

VECTORS = Accepted(FLOATS.expected, lambda v: FLOATS.fits(v) and v.dim() <= 32)
NORMALIZATIONS = ("component", "norm", "integral")
#: Degrees that monomials are written out for.
MOST_MONOMIALS = 3
#: Up to this degree there are statements; above it a step for each degree.
MOST_STATED = 12
#: Longer patterns are looped over: as straight-line code they would not fit the registers.
MOST_UNROLLED = 256
#: Shorter vectors are not brought to length 1, as in torch and e3nn.
SHORTEST = 1e-12

MONOMIALS = "Y[e,I[p]] = V[p] * U[e,A[p]] * U[e,B[p]] * U[e,C[p]]"
PRODUCTS = "Y[e,I[p]] = V[p] * X[e,A[p]] * X[e,B[p]]"
#: Gradients by vectors: of solid harmonics, and of those of unit vectors.
SOLID = Multilinear("Z", {"V": "p", "G": "e,I[p]", "X": "e,K[p]", "Z": "e,J[p]"}, ("G", "X"))
UNIT = Multilinear(
    "Z",
    {"V": "p", "S": "e", "G": "e,I[p]", "X": "e,K[p]", "Y": "e,M[p]", "Z": "e,J[p]"},
    ("S", "G", "X", "Y"),
)
#: What the gradient by ``S`` sends to vectors.
SHRINKING = Multilinear(
    "Z", {"V": "j", "T": "e", "S": "e", "R": "e", "X": "e,j+1", "Z": "e,j"}, ("T", "S", "R", "X")
)

#: Exponents of x, y and z, and coefficients.
Polynomial: TypeAlias = dict[tuple[int, ...], float]


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
    listed = tuple(_degrees(degrees))
    _known(normalization)
    last_size("vectors", vectors, 3, "x, y, z")
    return _at(vectors, listed, normalize, normalization)


class SphericalHarmonics(nn.Module):
    """Spherical harmonics of vectors as a layer, the values of ``e3nn.o3.SphericalHarmonics``.

    All degrees are one statement up to degree 3 and two up to degree 6, and so is their gradient,
    of every order:

        Y[e,I[p]] = V[p] * U[e,A[p]] * U[e,B[p]] * U[e,C[p]]

    Args:
        degrees: As in `spherical_harmonics`: a number for all degrees up to it, a list of degrees,
            or irreps.
        normalize: Whether vectors are brought to length 1 first.
        normalization: ``"component"``, ``"norm"`` or ``"integral"``.

    Examples:
        >>> harmonics = SphericalHarmonics("0e + 1o + 2e")
        >>> harmonics
        SphericalHarmonics(1x0e+1x1o+1x2e, normalize=True, normalization='component')
        >>> harmonics(torch.randn(10, 3)).shape
        torch.Size([10, 9])
        >>> harmonics.statements()
        ('Y[e,I[p]] = V[p] * U[e,A[p]] * U[e,B[p]] * U[e,C[p]]',)
    """

    @takes(normalize=FLAG, normalization=TEXT)
    def __init__(
        self,
        degrees: int | Sequence[int] | object,
        normalize: bool = True,
        normalization: str = "component",
    ) -> None:
        super().__init__()
        self.degrees = tuple(_degrees(degrees))
        _known(normalization)
        self.normalize, self.normalization = normalize, normalization
        by_number = is_integer(degrees) or isinstance(degrees, list | tuple)
        own = Irreps(tuple((1, Irrep(l, (-1) ** l)) for l in self.degrees))
        self.irreps_out = own if by_number else Irreps.of(degrees)
        even = any(ir.p > 0 and ir.l % 2 for _, ir in self.irreps_out)
        self.irreps_in = Irreps.of("1e" if even else "1o")

    def forward(self, vectors: Tensor) -> Tensor:
        """From vectors (..., 3) to (..., irreps_out.dim)."""
        require("vectors", vectors, VECTORS)
        last_size("vectors", vectors, 3, "x, y, z")
        return _at(vectors, self.degrees, self.normalize, self.normalization)

    def statements(self) -> tuple[str, ...]:
        """The statements of a call."""
        most = max(self.degrees, default=0)
        if not 0 < most <= MOST_STATED:
            return ()
        return (MONOMIALS, *[PRODUCTS] * len(_doublings(most)))

    def extra_repr(self) -> str:
        told = f"normalize={self.normalize}, normalization={self.normalization!r}"
        return f"{self.irreps_out}, {told}"


def _known(normalization: str) -> None:
    if normalization not in NORMALIZATIONS:
        raise UnsupportedError(
            f"normalization is {normalization!r}", expected=" or ".join(map(repr, NORMALIZATIONS))
        )


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


def _at(vectors: Tensor, listed: tuple[int, ...], normalize: bool, normalization: str) -> Tensor:
    most = max(listed, default=0)
    if not 0 < most <= MOST_STATED or not is_plain_call((vectors,)):
        return _by_steps(vectors, listed, normalize, normalization)
    stated = _stated(most, normalize, normalization, vectors.device, vectors.dtype)
    found: Tensor = _Harmonics.apply(vectors.reshape(-1, 3), stated)[0]  # type: ignore[no-untyped-call]
    if listed != tuple(range(most + 1)):
        found = found.index_select(1, _columns(listed, vectors.device))
    return found.view(*vectors.shape[:-1], found.shape[1])


# --- by statements --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stated:
    """The arrays of all statements, of one dtype on one device: of the first, of those that double
    the degree, of gradients, and of the gradient by the lengths; ``degrees``: up to which each
    goes.
    """

    degrees: tuple[int, ...]
    one: Tensor
    monomials: dict[str, Any]
    products: tuple[dict[str, Any], ...]
    gradient: dict[str, Any]
    shrinking: Tensor | None


@memoised
@torch.inference_mode(False)
def _stated(
    most: int, normalize: bool, normalization: str, device: torch.device, dtype: torch.dtype
) -> _Stated:
    """Coefficients are exact until they are rounded to ``dtype``."""
    reached = (min(most, MOST_MONOMIALS), *(high for _, high in _doublings(most)))
    # steps between have norms of their own; the last one gives what is asked for
    first = normalization if len(reached) == 1 else "component"
    products = [
        _products(low, high, normalization if high == most else "component")
        for low, high in _doublings(most)
    ]
    shares = [-1 / (math.sqrt(3) * _norm(1, normalization))] * 3

    def there(pattern: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        values = torch.tensor(pattern["V"], dtype=torch.float64, device="cpu").to(device, dtype)
        indices = {
            name: torch.tensor(places, dtype=torch.int32, device="cpu").to(device)
            for name, places in pattern.items()
            if name != "V"
        }
        arrays = {"V": values, **indices}
        if values.is_meta:  # which has no values to be promised
            return arrays
        promise = constant if len(values) <= MOST_UNROLLED else unchanging
        return {n: promise(t) for n, t in arrays.items()}

    return _Stated(
        reached,
        torch.ones(1, 1, dtype=dtype, device=device),
        there(_monomials(reached[0], first)),
        tuple(there(pattern) for pattern in products),
        there(_gradient(most, normalize, normalization)),
        there({"V": shares})["V"] if normalize else None,
    )


class _Harmonics(torch.autograd.Function):
    """Harmonics of all degrees at vectors (e, 3), and one by the lengths, where they are divided by
    them. All of it is a function of the results, and so are derivatives of every order.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, stated: _Stated) -> tuple[Tensor, Tensor | None]:
        shares, unit = None, vectors
        if stated.shrinking is not None:
            lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
            shares = lengths.clamp_min_(SHORTEST).reciprocal_()
            unit = vectors * shares
            shares = shares.squeeze(1)
        both = torch.cat([stated.one.expand(len(unit), 1), unit], 1)
        rows, (first, *more) = len(unit), stated.degrees
        found = insum(MONOMIALS, out_shape=(rows, (first + 1) ** 2), **stated.monomials, U=both)
        for degree, arrays in zip(more, stated.products):
            found = insum(PRODUCTS, out_shape=(rows, (degree + 1) ** 2), **arrays, X=found)
        ctx.stated = stated
        ctx.save_for_backward(found, shares)
        ctx.set_materialize_grads(False)
        return found, shares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, of_shares: Tensor | None) -> tuple[Any, ...]:
        if any_batched((gradient, of_shares)):
            each = functools.partial(_Harmonics.backward, ctx)
            return over_items(each, (gradient, of_shares))
        found, shares = ctx.saved_tensors
        stated, shape = ctx.stated, (len(found), 3)
        if shares is None:
            given = None if gradient is None else {"G": gradient, "X": found}
            return None if given is None else SOLID({**stated.gradient, **given}, shape), None
        parts = []
        if gradient is not None:
            given = {"S": shares, "G": gradient, "X": found, "Y": found}
            parts.append(UNIT({**stated.gradient, **given}, shape))
        if of_shares is not None:
            given = {"T": of_shares, "S": shares, "R": shares, "X": found}
            parts.append(SHRINKING({"V": stated.shrinking, **given}, shape))
        return sum(parts[1:], parts[0]) if parts else None, None


@memoised
@torch.inference_mode(False)
def _columns(listed: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the components of degrees are among those of all."""
    places = [place for l in listed for place in range(l * l, (l + 1) ** 2)]
    return torch.tensor(places, device=device)


# --- patterns -------------------------------------------------------------------------------------


def _norm(l: int, normalization: str) -> float:
    """By what components are multiplied that have the norm ``sqrt(2 l + 1)``."""
    match normalization:
        case "norm":
            return 1 / math.sqrt(2 * l + 1)
        case "integral":
            return 1 / math.sqrt(4 * math.pi)
    return 1.0


def _doublings(most: int) -> list[tuple[int, int]]:
    """From which degree to which statements of products go, upwards.

    >>> _doublings(2), _doublings(6), _doublings(7)
    ([], [(3, 6)], [(3, 6), (6, 7)])
    """
    steps, low = [], MOST_MONOMIALS
    while low < most:
        steps.append((low, min(2 * low, most)))
        low = steps[-1][1]
    return steps


@memoised
def _polynomials(l: int) -> list[Polynomial]:
    """The solid harmonics of a degree."""
    if not l:
        return [{(0, 0, 0): 1.0}]
    step, before = _ladder(l), _polynomials(l - 1)
    found: list[Polynomial] = [defaultdict(float) for _ in range(2 * l + 1)]
    for i, j, k in step.nonzero().tolist():
        for powers, value in before[j].items():
            higher = tuple(power + (axis == i) for axis, power in enumerate(powers))
            found[k][higher] += float(step[i, j, k]) * value
    return [{at: v for at, v in one.items() if abs(v) > 1e-13} for one in found]


def _monomials(most: int, normalization: str) -> dict[str, list[Any]]:
    pattern: dict[str, list[Any]] = {name: [] for name in "VIABC"}
    for l in range(min(most, MOST_MONOMIALS) + 1):
        for k, polynomial in enumerate(_polynomials(l)):
            for powers, value in polynomial.items():
                factors = [axis + 1 for axis, power in enumerate(powers) for _ in range(power)]
                row = (*factors, *[0] * (MOST_MONOMIALS - len(factors)))
                for name, entry in zip("VIABC", (value * _norm(l, normalization), l * l + k, *row)):
                    pattern[name].append(entry)
    return pattern


def _products(low: int, high: int, normalization: str) -> dict[str, list[Any]]:
    """From all degrees up to ``low`` to all up to ``high``, of norm ``sqrt(2 l + 1)`` before."""
    pattern: dict[str, list[Any]] = {name: [] for name in "VIAB"}
    for l in range(high + 1):
        first = min(l, low)
        table = _coupling(first, l - first, l) * _norm(l, normalization)
        starts = first**2, (l - first) ** 2, l * l
        for place, value in zip(table.nonzero().tolist(), table[table != 0].tolist()):
            a, b, k = (start + at for start, at in zip(starts, place))
            for name, entry in zip("VIAB", (value, k, a, b)):
                pattern[name].append(entry)
    return pattern


def _gradient(most: int, normalize: bool, normalization: str) -> dict[str, list[Any]]:
    """Of every component by every coordinate what it is of other components: those of one degree
    less; and, where the length stays 1, less what points along the vector.
    """
    sums: dict[tuple[int, ...], float] = defaultdict(float)
    for l in range(1, most + 1):
        table = _descent(l) * _norm(l, normalization) / _norm(l - 1, normalization)
        for place, value in zip(table.nonzero().tolist(), table[table != 0].tolist()):
            j, i, k = place
            sums[j, l * l + i, (l - 1) ** 2 + k, 0] += value / _norm(0, normalization)
        for i in range(l * l, (l + 1) ** 2) if normalize else ():
            for j in range(3):
                sums[j, i, i, j + 1] -= l / (math.sqrt(3) * _norm(1, normalization))
    if not normalize:
        sums = {at: value * _norm(0, normalization) for at, value in sums.items()}
    names = "VJIKM" if normalize else "VJIK"
    rows = [(value, *at) for at, value in sums.items()]
    return {name: [row[n] for row in rows] for n, name in enumerate(names)}


@memoised
@torch.inference_mode(False)
def _coupling(first: int, second: int, l: int) -> Tensor:
    """By which two degrees make the highest that they can, all of norm ``sqrt(2 l + 1)`` at unit
    vectors.
    """
    table = wigner_3j(first, second, l)
    # at the pole only m = 0 is left, and it is positive
    reached = float(table[first, second, l])
    reached *= math.sqrt((2 * first + 1) * (2 * second + 1))
    return table * math.sqrt(2 * l + 1) / reached


@memoised
@torch.inference_mode(False)
def _descent(l: int) -> Tensor:
    """(3, 2 l + 1, 2 l - 1): the derivatives of a degree by coordinates, of the degree below."""
    table = wigner_3j(1, l, l - 1)
    reached = float(table[1, l, l - 1]) * math.sqrt(2 * l - 1)
    return table * l * math.sqrt(2 * l + 1) / reached


# --- by torch's operations: where somebody traces or transforms, and at high degrees --------------


def _by_steps(
    vectors: Tensor, listed: tuple[int, ...], normalize: bool, normalization: str
) -> Tensor:
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
        found = [part * _norm(l, normalization) for l, part in enumerate(found)]
    return torch.cat([unit[..., :0], *(found[l] for l in listed)], -1)


@memoised
@torch.inference_mode(False)
def _ladder(l: int) -> Tensor:
    """From the vector itself and degree ``l - 1`` to degree ``l``, of norm ``sqrt(2 l + 1)``."""
    return _coupling(1, l - 1, l) * math.sqrt(3)


@memoised
def _ladder_numbers(l: int) -> list[list[list[float]]]:
    """The same as numbers, which a tracer can hold."""
    numbers: list[list[list[float]]] = _ladder(l).tolist()
    return numbers
