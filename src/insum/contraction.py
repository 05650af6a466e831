"""The order in which the factors of a product are multiplied, two at a time: the one that takes the
fewest steps, and writes least on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """The best order for factors with these variables, of which some are kept.

    >>> sizes = dict(i=1000, j=2, k=1000, l=2)
    >>> cheapest(["ij", "jk", "kl"], "il", sizes).pairs
    ((1, 2), (0, 1))
    """
    given = tuple(tuple(f) for f in factors)
    sizes = tuple(sorted((v, int(extents[v])) for v in {v for f in given for v in f}))
    return _cheapest(given, (True,) * len(given), frozenset(kept), sizes)


@lru_cache(maxsize=1024)
def _cheapest(
    factors: tuple[tuple[str, ...], ...],
    given: tuple[bool, ...],
    kept: frozenset[str],
    sizes: tuple[tuple[str, int], ...],
) -> Order:
    """``given`` says whose variables have an order already; products are written in the order that
    suits.
    """
    if len(factors) < 2:
        return Order()
    extents = dict(sizes)
    choices = []
    for b in range(len(factors)):
        for a in range(b):
            rest = [k for k in range(len(factors)) if k not in (a, b)]
            product = _product(factors[a], factors[b], kept.union(*(factors[k] for k in rest)))
            steps = _volume({*factors[a], *factors[b]}, extents)
            steps += WRITING * _volume(product, extents) if rest else 0
            for one, other in ((a, b), (b, a)):
                if given[one] and _is_moved(factors[one], factors[other], product):
                    steps += WRITING * _volume(factors[one], extents)
            choices.append((steps, (a, b), rest, product))
    if len(factors) > _FEW:
        choices = [min(choices, key=lambda choice: choice[0])]
    orders = []
    for steps, pair, rest, product in choices:
        left = (*[factors[k] for k in rest], product)
        after = _cheapest(left, (*[given[k] for k in rest], False), kept, sizes)
        largest = after.largest
        if rest and _volume(product, extents) > _volume(largest, extents):
            largest = frozenset(product)
        orders.append(Order((pair, *after.pairs), steps + after.steps, largest))
    return min(orders, key=lambda order: order.steps)


def _product(a: tuple[str, ...], b: tuple[str, ...], needed: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted({*a, *b} & needed))


def _is_moved(factor: tuple[str, ...], other: tuple[str, ...], product: tuple[str, ...]) -> bool:
    """Whether a matrix product would have to copy a factor first: what both and the product have
    comes first, and what is summed stands together.
    """
    kinds = ["summed" if v not in product else "both" if v in other else "own" for v in factor]
    runs = [kind for k, kind in enumerate(kinds) if k == 0 or kinds[k - 1] != kind]
    rest = runs[1:] if runs[:1] == ["both"] else runs
    return len(rest) != len(set(rest)) or "both" in rest


def _volume(vars: Iterable[str], extents: Mapping[str, int]) -> int:
    return prod(extents[v] for v in vars)
