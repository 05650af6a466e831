"""Statements that write one value along whole dimensions: done without those, which a view repeats.

The gradient of a sum is such a statement: ``y[i] = x[i,k]`` has ``dx[i,k] += dy[i]``, where nothing
depends on ``k``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from insum.lang.expr import Access, Statement, variables


@dataclass(frozen=True, slots=True)
class Repetition:
    """A statement without the dimensions along which it repeats what it writes.

    Attributes:
        statement: what is left to be done.
        dims: dimensions of the whole result that were left out.
        copies: the tensor, where what is left only copies one, or ''.
        order: of that tensor's dimensions in the result that is left.
    """

    statement: Statement
    dims: tuple[int, ...]
    copies: str
    order: tuple[int, ...]


def repetition_of(statement: Statement) -> Repetition:
    """What a sum repeats, and what it copies.

    >>> from insum.lang.parser import parse
    >>> found = repetition_of(parse("dx[k,i,j] += dy[j,i]"))
    >>> str(found.statement), found.dims, found.copies, found.order
    ('dx[i,j] += dy[j,i]', (0,), 'dy', (1, 0))
    >>> found = repetition_of(parse("dx[s[e],k] += 2 * dy[e]"))
    >>> str(found.statement), found.dims, found.copies
    ('dx[s[e]] += 2 * dy[e]', (1,), '')
    """
    target = statement.target
    read = set(variables(statement.value))
    on_the_left = Counter(v for index in target.indices for v in set(variables(index)))
    dims = tuple(
        dim
        for dim, index in enumerate(target.indices)
        if index.var is not None and index.var not in read and on_the_left[index.var] == 1
    )
    left = tuple(index for dim, index in enumerate(target.indices) if dim not in dims)
    rest = Statement(Access(target.tensor, left), statement.operator, statement.value)
    copied = _copied(rest)
    return Repetition(rest, dims, *(("", ()) if copied is None else copied))


def _copied(statement: Statement) -> tuple[str, tuple[int, ...]] | None:
    """The one tensor whose elements the result is, and which of its dimensions each of the result's
    is; None where the result is something else.
    """
    if not isinstance(statement.value, Access):
        return None
    source = [index.var for index in statement.value.indices]
    found = [index.var for index in statement.target.indices]
    plain = None not in source and len(set(source)) == len(source) == len(found)
    if not plain or set(found) != set(source):
        return None
    return statement.value.tensor, tuple(map(source.index, found))
