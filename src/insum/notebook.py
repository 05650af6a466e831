"""Tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]], above: str = "") -> str:
    """HTML of a table, with a line of text above it.

    >>> table(["a"], [["<b>"]], "x < y")
    '<p>x &lt; y</p><table><tr><th>a</th></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """
    body = "".join(_row(cells, "td") for cells in rows)
    title = f"<p>{html.escape(above)}</p>" if above else ""
    return f"{title}<table>{_row(head, 'th')}{body}</table>"


def _row(cells: Sequence[object], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(str(c))}</{tag}>' for c in cells)}</tr>"
