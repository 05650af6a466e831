"""Tables in Markdown."""

from __future__ import annotations


def head(*columns: str) -> list[str]:
    """The first lines of a table; columns of numbers are marked by a ``>``."""
    names = " | ".join(column.removeprefix(">") for column in columns)
    return [
        f"| {names} |".replace("|  |", "| |"),
        "|" + "|".join("--:" if column.startswith(">") else "---" for column in columns) + "|",
    ]
