"""What a case exercises, so that a test can assert that its draws reached every corner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import Tensor

from insum.lang.bind import Value
from insum.lang.expand import expand
from insum.lang.expr import (
    Access,
    Affine,
    Call,
    Expr,
    Product,
    Statement,
    Sum,
    Var,
    accesses,
    variables,
)


def features(
    statement: Statement, values: Mapping[str, Value], padded: tuple[str, ...]
) -> frozenset[str]:
    """Labels such as ``rank 3``, ``repeated index``, ``nested indirection``, ``zero extent``,
    ``float16``.
    """
    every = [
        statement.target,
        *(a for i in statement.target.indices for a in accesses(i)),
        *accesses(statement.value),
    ]
    found = {
        statement.operator,
        *(f"rank {len(a.indices)}" for a in every),
        *_of_values(values, padded),
    }
    found |= {label for access in every for index in access.indices for label in _of_index(index)}
    found |= {
        "repeated index"
        for a in every
        if max(Counter(i.var for i in a.indices if i.var).values(), default=0) > 1
    }
    uses = Counter(
        name for access in every for name in {a.tensor for i in access.indices for a in accesses(i)}
    )
    found |= {"shared index tensor"} if max(uses.values(), default=0) > 1 else set()
    return frozenset(found | _of_statement(statement, values))


def _of_index(index: Affine) -> Iterator[str]:
    if not index.terms:
        yield "literal index"
    elif index.atom is None:
        yield "affine index"
    for _, atom in index.terms:
        if isinstance(atom, Access):
            yield "indirect index"
            if any(isinstance(a, Access) for i in atom.indices for _, a in i.terms):
                yield "nested indirection"
            if not isinstance(index.atom, Access):
                yield "affine of an index tensor"
        elif isinstance(atom, Var) and any(c < 0 for c, _ in index.terms):
            yield "negative coefficient"


def _of_values(values: Mapping[str, Value], padded: tuple[str, ...]) -> Iterator[str]:
    for name, value in values.items():
        if not isinstance(value, Tensor):
            yield "Python number"
            continue
        yield str(value.dtype).removeprefix("torch.")
        if value.numel() == 0:
            yield "zero extent"
        elif not value.is_contiguous():
            yield "strided"
        if 0 in (s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1):
            yield "expanded"
        if name in padded and bool((value == -1).any()):
            yield "padding"


def _of_statement(statement: Statement, values: Mapping[str, Value]) -> set[str]:
    target, read = statement.target, {a.tensor for a in accesses(statement.value)}
    found = {f"{c.function}()" for c in _calls(statement.value)}
    labels = {
        "several terms": len(expand(statement)) > 1,
        "several factors": any(len(t.factors) > 1 for t in expand(statement)),
        "target passed": target.tensor in values,
        "target read": target.tensor in read,
        "scatter": any(isinstance(a, Access) for i in target.indices for _, a in i.terms),
        "broadcast": not set(variables(target)) <= set(variables(statement.value)),
        "reduction": not set(variables(statement.value)) <= set(variables(target)),
        "same tensor twice": max(
            Counter(a.tensor for a in accesses(statement.value, nested=False)).values(), default=0
        )
        > 1,
    }
    return found | {label for label, holds in labels.items() if holds}


def _calls(expr: Expr) -> Iterator[Call]:
    match expr:
        case Call(_, parts):
            yield expr
        case Product(parts) | Sum(parts):
            pass
        case _:
            return
    for part in parts:
        yield from _calls(part)
