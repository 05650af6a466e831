"""Irreducible representations of rotations and reflections, and sums of them, as e3nn writes them:
``16x0e + 16x1o``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from insum.accepted import COUNT, Accepted, is_integer, require
from insum.errors import Span, StatementError

_TERM = re.compile(r"\s*(?:(?P<mul>\d+)\s*x\s*)?(?P<l>\d+)\s*(?P<parity>[eoy])\s*")
_PARITY = {"e": 1, "o": -1}
PARITY = Accepted("1 or -1", lambda v: is_integer(v) and abs(v) == 1)


@dataclass(frozen=True, order=True)
class Irrep:
    """Degree ``l`` and parity ``p``, 1 (even) or -1 (odd): ``2 * l + 1`` components.

    >>> Irrep(1, -1), Irrep(1, -1).dim
    (Irrep(l=1, p=-1), 3)
    >>> [str(ir) for ir in Irrep(1, -1) * Irrep(1, -1)]
    ['0e', '1e', '2e']
    """

    l: int
    p: int

    def __post_init__(self) -> None:
        require("l", self.l, COUNT)
        require("p", self.p, PARITY)

    @property
    def dim(self) -> int:
        return 2 * self.l + 1

    def __mul__(self, other: Irrep) -> tuple[Irrep, ...]:
        """What the tensor product of two holds."""
        require("what an irrep is multiplied with", other, IRREP)
        return tuple(
            Irrep(l, self.p * other.p) for l in range(abs(self.l - other.l), self.l + other.l + 1)
        )

    def __str__(self) -> str:
        return f"{self.l}{'e' if self.p > 0 else 'o'}"


@dataclass(frozen=True)
class Irreps:
    """A sum of irreps with multiplicities, in order; a vector in it holds each term as
    (multiplicity, components).

    >>> irreps = Irreps.of("8x0e + 4x1o")
    >>> irreps.dim, str(irreps), irreps.slices()[1]
    (20, '8x0e+4x1o', slice(8, 20, None))
    >>> Irreps.of("8x0e + 4xo")
    Traceback (most recent call last):
        ...
    insum.errors.StatementError: ' 4xo' is not an irrep
        8x0e + 4xo
              ^^^^
      expected: terms such as 16x1o: multiplicity, x, degree, parity (e, o, or y for that of the
      spherical harmonics)
    """

    terms: tuple[tuple[int, Irrep], ...]

    def __post_init__(self) -> None:
        require("terms", self.terms, TERMS)

    @classmethod
    def of(cls, irreps: object) -> Irreps:
        """From text, from irreps of ours, or from anything that prints as such text, as e3nn's
        irreps do.
        """
        if isinstance(irreps, Irreps):
            return irreps
        if isinstance(irreps, Irrep):
            return cls(((1, irreps),))
        text = irreps if isinstance(irreps, str) else str(irreps)
        return cls(tuple(_terms(text)))

    @property
    def dim(self) -> int:
        return sum(mul * ir.dim for mul, ir in self.terms)

    def slices(self) -> tuple[slice, ...]:
        """Where each term lies in a vector."""
        ends = [0]
        for mul, ir in self.terms:
            ends.append(ends[-1] + mul * ir.dim)
        return tuple(slice(a, b) for a, b in itertools.pairwise(ends))

    def __iter__(self) -> Iterator[tuple[int, Irrep]]:
        return iter(self.terms)

    def __len__(self) -> int:
        return len(self.terms)

    def __getitem__(self, number: int) -> tuple[int, Irrep]:
        return self.terms[number]

    def __str__(self) -> str:
        return "+".join(f"{mul}x{ir}" for mul, ir in self.terms)


IRREP = Accepted("an Irrep", lambda v: isinstance(v, Irrep))


def _is_term(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return COUNT.fits(value[0]) and IRREP.fits(value[1])


TERMS = Accepted(
    "a tuple of pairs: a multiplicity and an Irrep",
    lambda v: isinstance(v, tuple) and all(map(_is_term, v)),
)


def _terms(text: str) -> Iterator[tuple[int, Irrep]]:
    start = 0
    for part in text.split("+") if text.strip() else ():
        match = _TERM.fullmatch(part)
        if match is None:
            expected = (
                "terms such as 16x1o: multiplicity, x, degree, parity (e, o, or y for "
                "that of the spherical harmonics)"
            )
            raise StatementError(
                f"{part!r} is not an irrep",
                statement=text,
                span=Span(start, start + max(1, len(part))),
                expected=expected,
            )
        l = int(match["l"])
        yield int(match["mul"] or 1), Irrep(l, _PARITY.get(match["parity"], (-1) ** l))
        start += len(part) + 1
