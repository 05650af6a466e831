"""Statements of a kernel -> text, with the axes of every tile beside its line."""

from __future__ import annotations

from collections.abc import Iterable

from insum.codegen.ir import (
    Applied,
    Assignment,
    Branch,
    Cast,
    Eager,
    Effect,
    KernelLine,
    Literal,
    Loop,
    Named,
    Operation,
    Reading,
    Return,
    Spread,
    Tile,
    TileAxes,
)

#: How tightly symbols bind; calls and names bind tightest.
_COMPARISON, _SIGNED, _ATOM = 1, 6, 7
_BINDING = {"|": 2, "&": 3, "+": 4, "-": 4, "*": 5, "/": 5, "//": 5, "%": 5}


def lines_of(statements: Iterable[KernelLine], indent: str = "") -> list[str]:
    found: list[str] = []
    deeper = indent + "    "
    for statement in statements:
        match statement:
            case Assignment(name, value, symbol):
                found.append(f"{indent}{name} {symbol} {text_of(value)}{_comment(value.axes)}")
            case Effect(call):
                found.append(f"{indent}{text_of(call)}{_comment(call.axes)}")
            case Return():
                found.append(f"{indent}return")
            case Loop(name, bounds, body):
                found.append(f"{indent}for {name} in range({_listed(bounds)}):")
                found += lines_of(body, deeper)
            case Branch(condition, body, otherwise):
                found.append(f"{indent}if {text_of(condition)}:")
                found += lines_of(body, deeper)
                if otherwise:
                    found += [f"{indent}else:", *lines_of(otherwise, deeper)]
    return found


def _comment(axes: TileAxes) -> str:
    return f"  # ({','.join(axes)})" if axes else ""


def text_of(value: Tile, least: int = 0) -> str:
    """The text of a tile, in parentheses where it binds less tightly than it has to."""
    text, binds = _text_of(value)
    return text if binds >= least else f"({text})"


def _text_of(value: Tile) -> tuple[str, int]:
    match value:
        case Named(name):
            return name, _ATOM
        case Literal(text):
            return text, _SIGNED if text.startswith("-") else _ATOM
        case Operation(symbol, (first, *rest)):
            binds = _BINDING.get(symbol, _COMPARISON)
            at_first = binds if symbol in _BINDING else binds + 1  # comparisons are no chains
            parts = [text_of(first, at_first), *[text_of(one, binds + 1) for one in rest]]
            return f" {symbol} ".join(parts), binds
        case Applied(function, args, keywords):
            named = [f"{key}={text_of(one)}" for key, one in keywords]
            return f"{function}({', '.join([*map(text_of, args), *named])})", _ATOM
        case Cast(inner, dtype, bitcast):
            how = ", bitcast=True" if bitcast else ""
            return f"{text_of(inner, _ATOM)}.to({dtype}{how})", _ATOM
        case Spread(inner, axes):
            return f"{text_of(inner, _ATOM)}[{_marks(inner.axes, axes)}]", _ATOM
        case Reading(address, mask, other, cache):
            parts = [text_of(address)]
            parts += [] if mask is None else [f"mask={text_of(mask)}"]
            parts += [] if other is None else [f"other={text_of(other)}"]
            parts += [f'cache_modifier="{cache}"'] if cache else []
            return f"tl.load({', '.join(parts)})", _ATOM
    raise AssertionError(value)


def _marks(there: TileAxes, axes: TileAxes) -> str:
    """The subscript that adds axes."""
    order = Eager.ORDER if isinstance(axes, Eager) else axes
    return ", ".join(":" if a in there else "None" for a in order)


def _listed(values: Iterable[Tile]) -> str:
    return ", ".join(map(text_of, values))
