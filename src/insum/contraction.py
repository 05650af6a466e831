"""The order in which the factors of a product are multiplied, two at a time: the one that takes the
fewest steps, and writes least on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeAlias

from insum.lang.problem import Size

#: Which two of the factors that are left are multiplied next; the product comes last.
Pair: TypeAlias = tuple[int, int]
#: Up to so many factors every order is looked at.
_FEW = 5
#: What writing an element of an intermediate product costs, in multiplications.
_WRITING = 8


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
    """The best order for factors with these variables, of which some are kept.

    >>> sizes = dict(i=1000, j=2, k=1000, l=2)
    >>> cheapest(["ij", "jk", "kl"], "il", sizes).pairs
    ((1, 2), (0, 1))
    """
    sets = tuple(frozenset(f) for f in factors)
    sizes = tuple(sorted((v, int(extents[v])) for v in frozenset().union(*sets)))
    return _cheapest(sets, frozenset(kept), sizes)


@lru_cache(maxsize=1024)
def _cheapest(
    factors: tuple[frozenset[str], ...],
    kept: frozenset[str],
    sizes: tuple[tuple[str, int], ...],
) -> Order:
    if len(factors) < 2:
        return Order()
    extents = dict(sizes)
    found: list[tuple[int, Pair, tuple[frozenset[str], ...]]] = []
    for b in range(len(factors)):
        for a in range(b):
            rest = tuple(f for k, f in enumerate(factors) if k not in (a, b))
            both = factors[a] | factors[b]
            product = both & kept.union(*rest)
            writing = _WRITING * _volume(product, extents) if rest else 0
            found.append((_volume(both, extents) + writing, (a, b), (*rest, product)))
    if len(factors) > _FEW:
        found = [min(found, key=lambda one: one[0])]
    orders = []
    for steps, pair, left in found:
        after = _cheapest(left, kept, sizes)
        largest = after.largest
        if len(left) > 1 and _volume(left[-1], extents) > _volume(largest, extents):
            largest = left[-1]
        orders.append(Order((pair, *after.pairs), steps + after.steps, largest))
    return min(orders, key=lambda order: order.steps)


def _volume(vars: frozenset[str], extents: Mapping[str, int]) -> int:
    return prod(extents[v] for v in vars)
