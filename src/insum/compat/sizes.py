"""Sizes that are symbols: what is known of them, without tying them to anything."""

from __future__ import annotations

from typing import Any


def known_true(condition: Any) -> bool:
    """Whether a symbolic truth holds for all values of its symbols. Asks for no guard."""
    if isinstance(condition, bool):
        return condition
    try:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return bool(statically_known_true(condition))
    except Exception:
        return False


def size_or(size: Any, otherwise: int = 4096) -> int:
    """The number that a symbolic size had when traced, or a guess where it comes from data."""
    if isinstance(size, int):
        return size
    try:
        hint = size.node.hint
        return int(hint) if hint is not None else otherwise
    except Exception:
        return otherwise


def is_hinted(size: Any) -> bool:
    """Whether a size was known when it was traced: it does not come from data."""
    return isinstance(size, int) or size_or(size, -1) != -1


def symbols_from_data(value: Any) -> frozenset[Any]:
    """The symbols in a size, or in the shape of a tensor, that stand for numbers that come from
    data.
    """
    try:
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        return frozenset(free_unbacked_symbols(value))
    except Exception:
        return frozenset()
