"""The order in which the factors of one dense product are multiplied, two at a time: the one that
takes the fewest steps, and writes least on the way. (Which products become statements of their own,
indices and all, is decided before: ``plan/order.py``.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import TypeAlias

from insum.lang.problem import Size
from insum.plan.reversed_path import reversed_path

#: Which two of the factors that are left are multiplied next; the product comes last.
Pair: TypeAlias = tuple[int, int]
#: Up to so many factors every order is looked at.
_FEW = 5
#: What writing an element of an intermediate product costs, in multiplications.
WRITING = 8


@dataclass(frozen=True, slots=True)
class Order:
    """``steps`` are multiplications and what writing costs; ``largest`` is the set of variables of
    the largest intermediate product.
    """

    pairs: tuple[Pair, ...] = ()
    steps: int = 0
    largest: frozenset[str] = frozenset()


def cheapest(
    factors: Sequence[Sequence[str]], kept: Sequence[str], extents: Mapping[str, Size]
) -> Order:
    """The best order for factors with these variables, of which some are kept; of many factors, one
    cheapest pair after the other.

    >>> sizes = dict(i=1000, j=2, k=1000, l=2)
    >>> cheapest(["ij", "jk", "kl"], "il", sizes).pairs
    ((1, 2), (0, 1))
    """
    given = tuple(tuple(f) for f in factors)
    sizes = tuple(sorted((v, int(extents[v])) for v in {v for f in given for v in f}))
    return _cheapest(given, tuple(kept), sizes)


def saved_by_reversing(
    factors: Sequence[tuple[str, ...]],
    kept: tuple[str, ...],
    extents: Mapping[str, Size],
    pairs: Sequence[Pair],
) -> float:
    """Of the steps that gradients by all factors take, each in its own best order, the share that
    is saved where they take that of the product, reversed, and make each intermediate product once.

    >>> sizes = dict(b=200, i=50, o=80, j=100)
    >>> product = ("bi", "oij", "bj")
    >>> round(saved_by_reversing([(*f,) for f in product], ("b", "o"), sizes, [(0, 2), (0, 1)]), 2)
    0.27
    """
    sizes = {v: int(n) for v, n in extents.items()}
    labels = [str(k) for k in range(len(factors))]
    vars = dict(zip([*labels, "dy"], [*factors, kept]))
    made: dict[frozenset[str], int] = {}
    own = 0
    for number, label in enumerate(labels):
        others = ["dy", *(one for one in labels if one != label)]
        path = reversed_path(tuple(pairs), labels, others)
        if path is None or any(len(step) != 2 for step in path):
            return 0.0
        own += cheapest([vars[one] for one in others], factors[number], sizes).steps
        every = (True,) * len(others)
        left = _Remaining(tuple(vars[one] for one in others), every, factors[number])
        inside = [frozenset([one]) for one in others]
        for a, b in path:
            readers = Counter(v for f in left.factors for v in set(f))
            choice = left.choice(a, b, readers, sizes)
            both = inside[a] | inside[b]
            made[both] = choice.steps
            inside = [one for k, one in enumerate(inside) if k not in (a, b)] + [both]
            left = choice.left
    return 1 - sum(made.values()) / own


@lru_cache(maxsize=1024)
def _cheapest(
    factors: tuple[tuple[str, ...], ...], kept: tuple[str, ...], sizes: tuple[tuple[str, int], ...]
) -> Order:
    extents = dict(sizes)
    left, taken = _Remaining(factors, (True,) * len(factors), kept), []
    while len(left.factors) > _FEW:
        taken.append(min(left.choices(extents, left.likely(extents)), key=lambda c: c.steps))
        left = taken[-1].left
    order = _every(left, extents)
    for choice in reversed(taken):
        order = choice.before(order, extents)
    return order


def _every(left: _Remaining, extents: Mapping[str, int]) -> Order:
    """The best of all orders."""
    if len(left.factors) < 2:
        return Order()
    pairs = combinations(range(len(left.factors)), 2)
    orders = (c.before(_every(c.left, extents), extents) for c in left.choices(extents, pairs))
    return min(orders, key=lambda order: order.steps)


@dataclass(frozen=True, slots=True)
class _Pairing:
    """Two factors that are multiplied next, and what is left then."""

    pair: Pair
    steps: int
    left: _Remaining

    def before(self, after: Order, extents: Mapping[str, int]) -> Order:
        product, largest = self.left.factors[-1], after.largest
        if len(self.left.factors) > 1 and _volume(product, extents) > _volume(largest, extents):
            largest = frozenset(product)
        return Order((self.pair, *after.pairs), self.steps + after.steps, largest)


@dataclass(frozen=True, slots=True)
class _Remaining:
    """Factors that are left; ``given`` says whose variables have an order already: products are
    written in the order that suits. ``kept`` is the order of the result.
    """

    factors: tuple[tuple[str, ...], ...]
    given: tuple[bool, ...]
    kept: tuple[str, ...]

    def choices(self, extents: Mapping[str, int], pairs: Iterable[Pair]) -> Iterator[_Pairing]:
        readers = Counter(v for f in self.factors for v in set(f))
        for a, b in pairs:
            yield self.choice(a, b, readers, extents)

    def choice(
        self, a: int, b: int, readers: Mapping[str, int], extents: Mapping[str, int]
    ) -> _Pairing:
        mine = Counter([*set(self.factors[a]), *set(self.factors[b])])
        product = tuple(sorted(v for v in mine if v in self.kept or readers[v] > mine[v]))
        rest = [k for k in range(len(self.factors)) if k not in (a, b)]
        steps = _volume(mine, extents)
        if rest or _is_interleaved(self.kept, self.factors[a], self.factors[b]):
            steps += WRITING * _volume(product, extents)
        if is_of_vectors(self.factors[a], self.factors[b], product):
            steps += WRITING * _volume(mine, extents)
        for one, other in ((a, b), (b, a)):
            if self.given[one] and _is_moved(self.factors[one], self.factors[other], product):
                steps += WRITING * _volume(self.factors[one], extents)
        left = _Remaining(
            (*(self.factors[k] for k in rest), product),
            (*(self.given[k] for k in rest), False),
            self.kept,
        )
        return _Pairing((a, b), steps, left)

    def likely(self, extents: Mapping[str, int]) -> set[Pair]:
        """Pairs of the smallest factors that share a variable, or of the smallest of all where none
        do.
        """
        by_size = sorted(range(len(self.factors)), key=lambda k: _volume(self.factors[k], extents))
        sharing: dict[str, list[int]] = {}
        for k in by_size:
            for v in set(self.factors[k]):
                sharing.setdefault(v, []).append(k)
        found = {p for some in sharing.values() for p in combinations(sorted(some[:_FEW]), 2)}
        return found or {*combinations(sorted(by_size[:2]), 2)}


def _is_moved(factor: tuple[str, ...], other: tuple[str, ...], product: tuple[str, ...]) -> bool:
    """Whether a matrix product would have to copy a factor first: what both and the product have
    comes first, and what is summed stands together.
    """
    kinds = ["summed" if v not in product else "both" if v in other else "own" for v in factor]
    return _is_apart(kinds)


def is_of_vectors(one: Sequence[str], other: Sequence[str], kept: Sequence[str]) -> bool:
    """Whether a matrix product would be one of a vector for each place of what both factors have:
    one of them has no other variables than the other, of which some are kept and some are summed.
    """
    small, large = sorted(({*one}, {*other}), key=len)
    return small <= large and bool(small - {*kept}) and bool(small & {*kept})


def _is_interleaved(result: tuple[str, ...], one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether a matrix product would have to be copied into the order of the result: what both
    factors have comes first, and what one has stands together.
    """
    held = [(v in one, v in other) for v in result if v in one or v in other]
    return _is_apart(["both" if all(there) else "one" if there[0] else "other" for there in held])


def _is_apart(kinds: list[str]) -> bool:
    runs = [kind for k, kind in enumerate(kinds) if k == 0 or kinds[k - 1] != kind]
    rest = runs[1:] if runs[:1] == ["both"] else runs
    return len(rest) != len(set(rest)) or "both" in rest


def _volume(vars: Iterable[str], extents: Mapping[str, int]) -> int:
    return prod(extents[v] for v in vars)
