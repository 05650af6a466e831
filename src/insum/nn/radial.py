"""Functions of distances that end smoothly at a cutoff."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from insum.accepted import FLAG, SIZE, TENSOR, Accepted, takes
from insum.api import insum
from insum.nn.checks import last_size, layer_takes

LENGTH = Accepted(
    "a positive number", lambda v: isinstance(v, int | float) and 0 < float(v) < math.inf
)


def envelope(power: float, cutoff: float, distance: str = "X[e]") -> str:
    """A polynomial that is 1 at 0 and has two zero derivatives at the cutoff, beyond which it is 0,
    as an expression.

    >>> envelope(2, 1.0)
    'where(X[e] < 1.0, 1 - 6.0 * X[e]**2 + 8.0 * X[e]**3 - 3.0 * X[e]**4, 0)'
    """
    share = distance if cutoff == 1 else f"({distance} * {1 / cutoff!r})"
    p, factors = (
        power,
        ((power + 1) * (power + 2) / 2, power * (power + 2), power * (power + 1) / 2),
    )
    a, b, c = map(float, factors)
    powers = [f"{share}**{_plain(p + more)}" for more in range(3)]
    inside = f"1 - {a!r} * {powers[0]} + {b!r} * {powers[1]} - {c!r} * {powers[2]}"
    return f"where({distance} < {float(cutoff)!r}, {inside}, 0)"


def bessel(factor: float, power: float, cutoff: float, scale: float = 1.0) -> str:
    """A statement: sines over the distance, times an envelope."""
    inner = "W[n] * X[e]" if scale == 1 else f"{scale!r} * W[n] * X[e]"
    return f"R[e,n] = {factor!r} * sin({inner}) / X[e] * {envelope(power, cutoff)}"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else repr(float(number))


class BesselBasis(nn.Module):
    """Bessel functions of distances times a polynomial that ends them at the cutoff, as MACE and
    NequIP describe edges, in one statement:

        R[e,n] = c * sin(W[n] * X[e]) / X[e] * where(X[e] < r, 1 - 21 * X[e]**5 + ..., 0)

    Args:
        r_max: The cutoff.
        num_basis: How many functions.
        power: Of the polynomial: the higher, the later it falls.
        trainable: Whether the frequencies ``bessel_weights`` are parameters.

    Examples:
        >>> basis = BesselBasis(4.0, 8)
        >>> basis
        BesselBasis(r_max=4.0, num_basis=8, power=6)
        >>> basis(torch.rand(10, 1) * 4).shape
        torch.Size([10, 8])
    """

    bessel_weights: Tensor

    @takes(r_max=LENGTH, num_basis=SIZE, power=LENGTH, trainable=FLAG)
    def __init__(
        self, r_max: float, num_basis: int = 8, power: float = 6, trainable: bool = False
    ) -> None:
        super().__init__()
        self.r_max, self.num_basis, self.power = float(r_max), num_basis, power
        weights = (
            math.pi / self.r_max * torch.arange(1, num_basis + 1).to(torch.get_default_dtype())
        )
        if trainable:
            self.bessel_weights = nn.Parameter(weights)
        else:
            self.register_buffer("bessel_weights", weights)

    @layer_takes(distances=TENSOR)
    def forward(self, distances: Tensor) -> Tensor:
        """From distances (..., 1) to (..., num_basis)."""
        last_size("distances", distances, 1, "one distance")
        found = insum(self.statement(), X=distances.reshape(-1), W=self.bessel_weights)
        return found.view(*distances.shape[:-1], self.num_basis)

    def statement(self) -> str:
        """The statement of a call."""
        return bessel(math.sqrt(2 / self.r_max), self.power, self.r_max)

    def extra_repr(self) -> str:
        return f"r_max={self.r_max}, num_basis={self.num_basis}, power={self.power}"
