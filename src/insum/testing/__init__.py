"""The test kit: an oracle, drawn statements, comparison to the precision of a dtype, and a counter
of compilations.

For testing code that builds on insum, and insum itself. hypothesis is imported only when a strategy
is made.

>>> from insum.testing import draw_cases
>>> for case in draw_cases(3, seed=0):
...     case.check()  # the library against the oracle
"""

from insum.testing.cases import Case, Options
from insum.testing.compare import Tolerance, assert_close, tolerance
from insum.testing.counter import Compilations, count_compiles
from insum.testing.draw import draw_cases, statements
from insum.testing.oracle import oracle

__all__ = [
    "Case",
    "Compilations",
    "Options",
    "Tolerance",
    "assert_close",
    "count_compiles",
    "draw_cases",
    "oracle",
    "statements",
    "tolerance",
]
