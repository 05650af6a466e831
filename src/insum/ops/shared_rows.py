"""Gradients of one backward pass that gather the same rows, entry by entry: one kernel may give
them all, where index tensors are known (`insum.plan.beside`).
"""

from __future__ import annotations

from collections.abc import Mapping

from insum.lang.expr import Access, Statement, accesses, variables


def sharing(statements: Mapping[str, Statement]) -> tuple[str, ...]:
    """Of statements, by name, those that a kernel may compute in one walk over entries: sums that
    are scattered, and what each entry has, of the same gathered rows.

    >>> from insum.lang.parser import parse
    >>> x = parse("dx[s[e],f] += dy[d[e],f] * w[e]")
    >>> w = parse("dw[e] += dy[d[e],f] * x[s[e],f]")
    >>> sharing({"x": x, "w": w})
    ('x', 'w')
    >>> sharing({"x": x, "W": parse("dW[f,g] += dy[d[e],f] * x[s[e],g]")})
    ()
    """
    found: dict[str, None] = {}
    for sums, one in statements.items():
        entries = _entries(one)
        for entrywise, other in statements.items():
            if (
                entries
                and _has_each(other, entries)
                and not _rows(one, entries).isdisjoint(_rows(other, entries))
            ):
                found |= {sums: None, entrywise: None}
    return tuple(name for name in statements if name in found)


def _entries(one: Statement) -> set[str]:
    """The variables that scatter."""
    return {
        v for index in one.target.indices for inner in accesses(index) for v in variables(inner)
    }


def _has_each(one: Statement, entries: set[str]) -> bool:
    """Whether a statement has a place for every entry."""
    return not _entries(one) and entries <= set(variables(one.target))


def _rows(one: Statement, entries: set[str]) -> set[Access]:
    """The rows that are gathered for each entry."""
    return {
        read
        for read in accesses(one.value, nested=False)
        if any(any(accesses(index)) for index in read.indices)
        and entries <= set(variables(read))
        and not set(variables(read)) <= entries
    }
