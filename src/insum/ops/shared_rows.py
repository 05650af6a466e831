"""Statements of one pass that gather the same rows, entry by entry: one kernel may give all of
their results, where index tensors are known (`insum.plan.beside`). Gradients of a product are, by
what is gathered and by what each entry has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product as pairs_of

from insum.lang.expr import (
    Access,
    Affine,
    Statement,
    Var,
    accesses,
    index_of,
    names_of,
    substitute,
    variables,
)


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
    found: set[str] = set()
    for (sums, one), (entrywise, other) in pairs_of(statements.items(), repeat=2):
        entries = _entries(one)
        if entries and not _entries(other) and entries <= set(variables(other.target)):
            if not _rows(one).isdisjoint(_rows(other)):
                found |= {sums, entrywise}
    return tuple(name for name in statements if name in found)


def named_alike(statement: Statement, others: Sequence[Statement]) -> Mapping[str, str]:
    """What variables of a statement without a scatter are to be called, for it to read a gathered
    row as a scatter among others does; nothing where it does, or where none reads its rows.

    >>> from insum.lang.parser import parse
    >>> one = parse("a[i,j] = g[d[i],j,k] * x[s[i],j,k]")
    >>> named_alike(one, [parse("y[s[e],h,c] = g[d[e],h,c] * w[e,h]")])
    {'i': 'e', 'j': 'h', 'k': 'c'}
    """
    rows = _rows(statement)
    for other in others:
        if _entries(statement) or not _entries(other):
            continue
        for own, row in pairs_of(rows, _rows(other)):
            if (names := _matched(own, row)) is None:
                continue
            kept = names_of(statement) - names.keys()
            if len({*names.values()}) == len(names) and kept.isdisjoint(names.values()):
                return {old: new for old, new in names.items() if old != new}
    return {}


def renamed(statement: Statement, names: Mapping[str, str]) -> Statement:
    """The statement with other names of variables."""
    change = {old: index_of(new) for old, new in names.items()}
    target = substitute(statement.target, change)
    assert isinstance(target, Access)
    return Statement(target, statement.operator, substitute(statement.value, change))


def _entries(one: Statement) -> set[str]:
    """The variables that scatter."""
    inner = (a for index in one.target.indices for a in accesses(index))
    return {v for access in inner for v in variables(access)}


def _rows(one: Statement) -> set[Access]:
    """The rows that are gathered: something beside them runs along them."""
    found = set()
    for read in accesses(one.value, nested=False):
        gathers = {v for i in read.indices for a in accesses(i) for v in variables(a)}
        if gathers and not set(variables(read)) <= gathers:
            found.add(read)
    return found


def _matched(one: Access, other: Access) -> dict[str, str] | None:
    """What variables of one are called in the other, where they are alike otherwise."""
    names: dict[str, str] = {}

    def match_indices(left: Sequence[Affine], right: Sequence[Affine]) -> bool:
        return len(left) == len(right) and all(map(match_index, left, right))

    def match_index(left: Affine, right: Affine) -> bool:
        factors = [c for c, _ in left.terms] == [c for c, _ in right.terms]
        atoms = zip((a for _, a in left.terms), (a for _, a in right.terms))
        return left.offset == right.offset and factors and all(match_atom(*a) for a in atoms)

    def match_atom(left: Var | Access, right: Var | Access) -> bool:
        match left, right:
            case Var(old), Var(new):
                return names.setdefault(old, new) == new
            case Access(tensor, indices), Access(same, others):
                return tensor == same and match_indices(indices, others)
        return False

    return names if match_atom(one, other) else None
