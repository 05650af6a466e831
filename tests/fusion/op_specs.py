"""Specifications of fused ops, as compiled graphs have them: two index tensors that are the rows of
one.
"""

from __future__ import annotations

from collections.abc import Sequence

from insum.fusion.op import Spec

#: Rows of the tensor ``e``: where edges end, and where they start.
ROWS = {"d": 1, "s": 0}


def spec(
    statement: str,
    names: Sequence[str],
    *,
    wraps: str = "",
    passing: str = "",
    views: str = "ds",
    sizes: str = "out#2",
) -> str:
    """The first argument of an op for a statement over ``names`` and the index tensors ``views``,
    given by their letters.
    """
    parts = tuple((name, "e", ((0, ROWS[name]),)) for name in views)
    return str(
        Spec(statement, (*names, "e"), parts, sizes, frozenset(wraps), frozenset(passing), ())
    )
