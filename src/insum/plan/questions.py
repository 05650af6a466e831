"""What a plan may ask about index tensors, and what it is told.

Planning reads no values. It asks questions, and the same questions with the same answers lead to
the same plan, so that a program is found again by its answers: for other tensors of which the same
is known, and without planning anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from insum.plan.recipes import Recipe


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an index tensor, as far as plans differ by it."""

    sorted: bool
    unique: bool
    padded: bool  # negative values occur
    constant: bool  # the values may become code


@dataclass(frozen=True, slots=True)
class AskFacts:
    """What is known of an index tensor? None: nothing, it was never seen."""

    index: str


@dataclass(frozen=True, slots=True)
class AskInside:
    """Are all values of an indexed dimension known to be in range? By its number among the uses of
    the problem.
    """

    use: int


@dataclass(frozen=True, slots=True)
class AskExact:
    """The extent of a variable itself, where the code has to know it."""

    var: str


@dataclass(frozen=True, slots=True)
class AskValues:
    """All values of a short index tensor, as nested tuples."""

    index: str


@dataclass(frozen=True, slots=True)
class AskCoefficients:
    """All values of a floating-point tensor, as nested tuples; None where they were not promised to
    be constant.
    """

    tensor: str


@dataclass(frozen=True, slots=True)
class AskSummary:
    """What came out when something was derived from index tensors: a `Summary`."""

    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Summary:
    """What plans may know of what a recipe made."""

    longest: int = 0  # entries of a row, rounded up to a power of two
    trimmed: bool = False  # all padding stood at the end of rows, and none is left
    exists: bool = True  # there is an inverse table ...
    mirrored: bool = False  # ... and it is the index tensor itself, read backwards
    worth: bool = True  # the order of rows leaves out enough


Question: TypeAlias = AskFacts | AskInside | AskExact | AskValues | AskCoefficients | AskSummary
Ask: TypeAlias = Callable[[Question], Any]
