"""An extension of Griffe, which reads docstrings for the reference: examples at prompts become
blocks of code, also where no heading stands above them.
"""

from __future__ import annotations

from typing import Any

import griffe


class Doctests(griffe.Extension):  # type: ignore[misc]
    """Wraps runs of lines that begin with a prompt."""

    def on_object(self, *, obj: Any, **more: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring whose examples at the left margin are fenced: from a prompt to an empty line."""
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if line.startswith(">>>") and not inside:
            lines.append("```pycon")
            inside = True
        elif not line.strip() and inside:
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines[:-1] if lines[-1:] == [""] else lines)
