"""Irreducible representations of rotations and reflections, and sums of them, as e3nn writes them:
``16x0e + 16x1o``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from insum.accepted import COUNT, Accepted, is_integer, require
from insum.errors import BindingError, Span, StatementError

_TERM = re.compile(r"\s*(?:(?P<mul>\d+)\s*x\s*)?(?P<l>\d+)\s*(?P<parity>[eoy])\s*")
_PARITY = {"e": 1, "o": -1}
PARITY = Accepted("1 or -1", lambda v: is_integer(v) and abs(v) == 1)


class _DegreeAndParity(NamedTuple):
    l: int
    p: int


class Irrep(_DegreeAndParity):
    """Degree ``l`` and parity ``p``, 1 (even) or -1 (odd): ``2 * l + 1`` components. A pair, which
    e3nn takes for one of its own.

    Attributes:
        l: The degree.
        p: The parity.

    Examples:
        >>> Irrep(1, -1), Irrep(1, -1).dim
        (Irrep(l=1, p=-1), 3)
        >>> [str(ir) for ir in Irrep(1, -1) * Irrep(1, -1)]
        ['0e', '1e', '2e']
    """

    __slots__ = ()

    def __new__(cls, l: int, p: int) -> Irrep:
        require("l", l, COUNT)
        require("p", p, PARITY)
        return super().__new__(cls, l, p)

    @classmethod
    def of(cls, irrep: object) -> Irrep:
        """From text such as ``"1o"``, or from anything that prints as such text."""
        if isinstance(irrep, Irrep):
            return irrep
        match = _TERM.fullmatch(text := str(irrep))
        if match is None or match["mul"] is not None:
            raise StatementError(
                f"{text!r} is not an irrep",
                statement=text,
                span=Span(0, max(1, len(text))),
                expected="a degree and a parity, such as 1o",
            )
        return _matched(match)

    @property
    def dim(self) -> int:
        return 2 * self.l + 1

    def __mul__(self, other: object) -> tuple[Irrep, ...]:  # type: ignore[override]
        """What the tensor product of two holds."""
        require("what an irrep is multiplied with", other, IRREP)
        assert isinstance(other, Irrep)
        return tuple(
            Irrep(l, self.p * other.p) for l in range(abs(self.l - other.l), self.l + other.l + 1)
        )

    def __str__(self) -> str:
        return f"{self.l}{'e' if self.p > 0 else 'o'}"


@dataclass(frozen=True, repr=False)
class Irreps:
    """A sum of irreps with multiplicities, in order; a vector in it holds each term as
    (multiplicity, components).

    Args:
        terms: Multiplicity and irrep of each term; `Irreps.of` reads text.

    Examples:
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
    #: Of a vector, and of each term in it: asked for at every call of a layer.
    dim: int = field(init=False, compare=False)
    widths: tuple[int, ...] = field(init=False, compare=False)
    #: By multiplicity, the components of all terms that have it.
    extents: Mapping[int, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        require("terms", self.terms, TERMS)
        self.__setstate__({"terms": self.terms})

    def __setstate__(self, state: dict[str, Any]) -> None:
        widths = tuple([mul * ir.dim for mul, ir in state["terms"]])
        extents: dict[int, int] = {}
        for mul, ir in state["terms"]:
            extents[mul] = extents.get(mul, 0) + ir.dim
        known = {"widths": widths, "dim": sum(widths), "extents": extents}
        self.__dict__.update(terms=state["terms"], **known)
        self.__dict__["_hash"] = hash(self.terms)  # asked for at every call of a layer

    def __hash__(self) -> int:
        found: int = self.__dict__["_hash"]
        return found

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

    def slices(self) -> tuple[slice, ...]:
        """Where each term lies in a vector."""
        ends = [0]
        for width in self.widths:
            ends.append(ends[-1] + width)
        return tuple(slice(a, b) for a, b in itertools.pairwise(ends))

    def simplified(self) -> Irreps:
        """Neighbours of one irrep as one term, terms without any left out.

        >>> str(Irreps.of("2x0e + 3x0e + 0x1o + 1x0e").simplified())
        '6x0e'
        """
        found: list[tuple[int, Irrep]] = []
        for mul, ir in self.terms:
            if found and found[-1][1] == ir:
                found[-1] = found[-1][0] + mul, ir
            elif mul:
                found.append((mul, ir))
        return Irreps(tuple(found))

    def __iter__(self) -> Iterator[tuple[int, Irrep]]:
        return iter(self.terms)

    def __len__(self) -> int:
        return len(self.terms)

    def __getitem__(self, number: int) -> tuple[int, Irrep]:
        return self.terms[number]

    def __repr__(self) -> str:
        return f"Irreps.of({str(self)!r})"

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


def aligned(first: Irreps, second: Irreps) -> Iterator[tuple[int, Irrep, Irrep]]:
    """Both cut into terms of the same multiplicities.

    >>> [(mul, str(a), str(b)) for mul, a, b in aligned(Irreps.of("3x0e"), Irreps.of("1x0e+2x1o"))]
    [(1, '0e', '0e'), (2, '0e', '1o')]
    """
    counts = [sum(mul for mul, _ in irreps) for irreps in (first, second)]
    if counts[0] != counts[1]:
        raise BindingError(
            f"{first} has {counts[0]} irreps, but {second} has {counts[1]}",
            expected="as many irreps in both",
        )
    one, other = ([ir for mul, ir in irreps for _ in range(mul)] for irreps in (first, second))
    for (a, b), run in itertools.groupby(zip(one, other)):
        yield len(list(run)), a, b


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
        yield int(match["mul"] or 1), _matched(match)
        start += len(part) + 1


def _matched(match: re.Match[str]) -> Irrep:
    l = int(match["l"])
    return Irrep(l, _PARITY.get(match["parity"], (-1) ** l))
