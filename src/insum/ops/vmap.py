"""`torch.vmap`: a batched statement is the same statement with one more index variable in front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from insum.call.request import Request
from insum.lang.bind import Size, Value, kind_of
from insum.lang.expr import (
    Access,
    Affine,
    Atom,
    Expr,
    Statement,
    fresh,
    index_of,
    names_of,
    rewrite,
)
from insum.lang.parser import parse
from insum.lang.types import Typed, infer


def batched(
    request: Request,
    values: Mapping[str, Value],
    dims: Mapping[str, int | None],
    size: Size,
    *,
    new: bool = False,
) -> tuple[Request, dict[str, Value]]:
    """The request and values with the batch as a leading index variable. ``dims``: where each
    tensor has its batch dimension, if it has one. ``new``: whether the result is a new tensor.
    """
    statement = parse(request.statement)
    batch = fresh("batch", names_of(statement))
    target = statement.target.tensor
    # The output has the batch, so that a tensor which also gives the output's shape must have it
    # too.
    chosen = {name for name, dim in dims.items() if dim is not None} | ({target} & values.keys())
    moved = {
        name: front(value, dims.get(name), size)
        if name in chosen and isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }
    text = str(_led(statement, chosen, batch))
    dtype = request.dtype
    if new and dtype is None and target not in values:
        dtype = _dtype(statement, values, dims)
    sizes = _shifted(request, statement, batch, size)
    return replace(request, statement=text, sizes=sizes, dtype=dtype, config=None), moved


def _dtype(
    statement: Statement, values: Mapping[str, Value], dims: Mapping[str, int | None]
) -> torch.dtype:
    """The dtype that one item's result would have: a scalar promotes less than the tensor that a
    batch of scalars is.
    """
    kinds = {name: kind_of(value) for name, value in values.items()}
    ranks = {name: len(k.shape) - (dims.get(name) is not None) for name, k in kinds.items()}
    types = {
        name: Typed(k.dtype, k.strength if k.device is None else 2 if ranks[name] else 1)
        for name, k in kinds.items()
    }
    return infer(statement.value, types).dtype


def front(tensor: Tensor, dim: int | None, size: Size) -> Tensor:
    """The tensor with its batch dimension first; one without gets an expanded one."""
    return (
        tensor.movedim(dim, 0)
        if dim is not None
        else tensor.unsqueeze(0).expand(size, *tensor.shape)
    )


def front_of_base(request: Request, base: Tensor, dim: int | None, size: Size) -> Tensor:
    """What a batched statement accumulates from: behind the batch, in all dimensions of the result
    but the batch, which it may have been broadcast to.
    """
    led, rank = front(base, dim, size), len(parse(request.statement).target.indices)
    missing = rank - led.dim()
    return led.reshape(led.shape[0], *[1] * missing, *led.shape[1:]) if missing > 0 else led


def _led(statement: Statement, chosen: set[str], batch: str) -> Statement:
    def lead(access: Access) -> Access:
        indices = tuple(map(lead_index, access.indices))
        return Access(
            access.tensor, (index_of(batch), *indices) if access.tensor in chosen else indices
        )

    def lead_index(index: Affine) -> Affine:
        terms: tuple[tuple[int, Atom], ...] = tuple(
            (c, lead(a) if isinstance(a, Access) else a) for c, a in index.terms
        )
        return Affine(terms, index.offset)

    target = Access(
        statement.target.tensor, (index_of(batch), *map(lead_index, statement.target.indices))
    )
    value: Expr = rewrite(statement.value, lead)
    return Statement(target, statement.operator, value)


def _shifted(
    request: Request, statement: Statement, batch: str, size: Size
) -> tuple[tuple[str | int, Size | tuple[Size, ...]], ...]:
    """Output dimensions move by one; sizes given by the text of an index become sizes of
    dimensions, because the text changes.
    """
    shifted: list[tuple[str | int, Size | tuple[Size, ...]]] = [(batch, size)]
    for key, value in request.sizes:
        if isinstance(value, tuple):
            shifted.append((key, (size, *value)))
        elif isinstance(key, int) or key.isdigit():
            shifted.append((int(key) + 1, value))
        else:
            dims = [d + 1 for d, i in enumerate(statement.target.indices) if _names(i, key)]
            shifted += [(d, value) for d in dims] or [(key, value)]
    return tuple(dict(shifted).items())


def _names(index: Affine, key: str) -> bool:
    """Whether ``sizes={key: n}`` speaks of this left-side index (but not as a variable)."""
    atom = index.atom
    return index.var is None and (
        str(index).replace(" ", "") == key.replace(" ", "")
        or isinstance(atom, Access)
        and atom.tensor == key
    )
