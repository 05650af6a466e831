"""Values of generated code. Each knows which tile axes it spans, so it is broadcast only where it
meets another (lazy broadcasting).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from insum.lang.expr import Expr, variables

#: The one order of axes in every tile: operands of ``tl.dot`` are born (M,K) and (K,N), a register
#: tile (I,N) or (M,I), and nothing is ever transposed.
ORDER = ("M", "K", "I", "N")


class Eager(tuple[str, ...]):
    """Axes of a value that was given an axis for each of (M, N, K) up front, as compilers without
    lazy broadcasting do (ablation).
    """

    __slots__ = ()
    ORDER = ("M", "N", "K")

    @staticmethod
    def marks(axis: str) -> str:
        """The subscript that gives a range over one axis all three."""
        return "[" + ", ".join(":" if a == axis else "None" for a in Eager.ORDER) + "]"


@dataclass(frozen=True, slots=True)
class Val:
    """Text that evaluates to a scalar or a tile over ``axes``; ``stage`` is the innermost loop it
    depends on.
    """

    text: str
    axes: tuple[str, ...] = ()
    stage: int = 0

    def over(self, axes: tuple[str, ...]) -> str:
        """The text, with a new axis wherever ``axes`` has one that this value does not span."""
        if not self.axes or self.axes == axes or isinstance(self.axes, Eager):
            return self.text
        marks = ", ".join(":" if a in self.axes else "None" for a in axes)
        return f"{_atom(self.text)}[{marks}]"


def union(*groups: Iterable[str]) -> tuple[str, ...]:
    groups = tuple(groups)
    present = {a for group in groups for a in group}
    found = tuple(a for a in ORDER if a in present)
    return Eager(found) if any(isinstance(group, Eager) for group in groups) else found


def combine(values: list[Val], operator: str, *, as_written: bool = False) -> Val:
    """``a + b + ...`` or ``a * b * ...`` over the union of the axes, scalars first so that they are
    added once; or ``as_written``, one after the other, where two kernels must round alike.
    """
    if len(values) == 1:
        return values[0]
    axes = union(*(v.axes for v in values))
    if as_written:
        texts = [_factor(v.over(axes) if v.axes else v.text, operator) for v in values]
        return Val(f" {operator} ".join(texts), axes, max(v.stage for v in values))
    parts = sorted(values, key=lambda v: len(v.axes))
    scalars = [v for v in parts if not v.axes]
    texts = [v.over(axes) for v in parts if v.axes]
    if scalars:
        joined = f" {operator} ".join(_factor(v.text, operator) for v in scalars)
        texts.insert(0, f"({joined})" if len(scalars) > 1 and texts else joined)
    return Val(
        f" {operator} ".join(_factor(t, operator) for t in texts),
        axes,
        max(v.stage for v in values),
    )


def narrow_first(parts: Iterable[Expr]) -> list[Expr]:
    """Factors or terms with few variables first, so that they are not broadcast before they have
    to be. An order that depends on no tile: an extremum and its gradient, which looks for what is
    equal to it, must round alike.
    """
    return sorted(parts, key=lambda part: len(set(variables(part))))


def _atom(text: str) -> str:
    return text if text.isidentifier() or _closed(text) else f"({text})"


def _factor(text: str, operator: str) -> str:
    return text if operator == "+" else _atom(text)


def _closed(text: str) -> bool:
    """Whether the text is one call, subscript or parenthesised group, so that it needs no further
    parentheses.
    """
    depth = 0
    for position, character in enumerate(text):
        if character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif depth == 0 and not (character.isalnum() or character in "_."):
            return False
        if (
            depth == 0
            and position < len(text) - 1
            and character in ")]"
            and text[position + 1] not in ".["
        ):
            return False
    return True
