"""How formats print themselves, as text and in notebooks."""

from __future__ import annotations

import html as _html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from insum.formats.base import SparseFormat


def text(x: SparseFormat) -> str:
    """One line: format, shape, dtype, nonzeros, groups and blocks, padding share, bytes, device."""
    try:
        return _line(x)
    except Exception:  # somebody has tampered with it, and an error message tells so
        return f"{type(x).__name__}(broken)"


def _line(x: SparseFormat) -> str:
    parts = [f"shape={x.shape}", _dtype(x)]
    parts += [f"{name}={value}" for name, value in _facts(x).items()]
    return f"{type(x).__name__}({', '.join([*parts, f'{x.nbytes:,} bytes', str(x.device)])})"


def html(x: SparseFormat) -> str:
    """A small table for notebooks."""
    rows = {
        "shape": x.shape,
        "dtype": _dtype(x),
        **_facts(x),
        "bytes": f"{x.nbytes:,}",
        "device": x.device,
    }
    cells = "".join(
        f"<tr><th style='text-align:left'>{_html.escape(str(k))}</th>"
        f"<td>{_html.escape(str(v))}</td></tr>"
        for k, v in rows.items()
    )
    return f"<table><caption><b>{type(x).__name__}</b></caption>{cells}</table>"


def _dtype(x: SparseFormat) -> str:
    return "pattern" if x.dtype is None else str(x.dtype).removeprefix("torch.")


def _facts(x: SparseFormat) -> dict[str, object]:
    if x.device.type == "meta":  # nothing to count
        return x._details()
    nnz, stored = x.nnz, x.stored
    share = 1 - nnz / stored if stored else 0.0
    return {"nnz": nnz, **x._details(), "padding": f"{share:.1%}"}
