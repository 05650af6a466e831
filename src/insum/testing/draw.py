"""The two ways to get statements with their arguments: from hypothesis, or from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from insum.testing.cases import Case, Options
from insum.testing.generate import generate

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def statements(**options: Any) -> SearchStrategy[Case]:
    """A hypothesis strategy for whole cases; keywords are the fields of `Options`.

    Args:
        options: The fields of `Options`.

    Returns:
        A strategy; hypothesis has to be installed.

    Examples:
        >>> from hypothesis import given, settings
        >>> @settings(max_examples=5, database=None, deadline=None)
        ... @given(statements(product_only=True))
        ... def test(case):
        ...     case.check()
        >>> test()
    """
    from hypothesis import strategies

    chosen = Options(**options)
    return strategies.randoms(use_true_random=False).map(lambda source: generate(source, chosen))


def draw_cases(count: int, seed: int = 0, **options: Any) -> Iterator[Case]:
    """The same cases without hypothesis: ``count`` of them, the same ones for the same seed and
    options.

    Args:
        count: How many.
        seed: Where the draws start.
        options: The fields of `Options`.

    Returns:
        The cases, one after the other.

    Examples:
        >>> for case in draw_cases(2, seed=1, product_only=True):
        ...     case.check()
    """
    chosen = Options(**options)
    for number in range(count):
        yield generate(random.Random(f"{seed}/{number}"), chosen)
