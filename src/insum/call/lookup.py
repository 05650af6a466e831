"""What is known of the calls of a statement, by its options as they are spelled. Usual ones are
found in one look, without a request being made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from insum.bounded import keep
from insum.call.prepared import MOST_FORMS, Kinds, kinds_of
from insum.call.request import SizesArgument, request_of
from insum.lang.bind import Size
from insum.plan.path import Optimize

#: By statement, which sizes are given and what is padded, what is known of its calls; no other
#: options.
_fronts: dict[object, Kinds] = {}


def kinds_with(
    statement: str,
    out_shape: Sequence[Size] | None,
    sizes: SizesArgument = None,
    padded: Sequence[str] = (),
    config: object = None,
    optimize: Optimize = True,
) -> tuple[Kinds, tuple[Any, ...]]:
    """What is known of the calls of a statement with these options, and the sizes among them."""
    none = sizes is None or type(sizes) is dict and not sizes
    plain: tuple[Any, ...] | None = () if none else _plain_sizes(sizes)
    common = plain is not None and type(padded) is tuple and config is None
    common = common and optimize is True and type(statement) is str
    common = common and (out_shape is None or type(out_shape) in (tuple, torch.Size))
    if common and out_shape is not None:
        for size in out_shape:  # those of other libraries are made Python's own below
            common = common and type(size) is int
    if common:
        rank = None if out_shape is None else len(out_shape)
        front = statement, rank, tuple(sizes or ()), padded
        try:
            found = _fronts.get(front)
        except TypeError:  # names that are none, which binding refuses
            found = None
        if found is not None:
            return found, plain if out_shape is None else (*out_shape, *plain)  # type: ignore[return-value, misc]
    request = request_of(statement, out_shape, sizes, padded, config, optimize)  # type: ignore[arg-type]
    found = kinds_of(request.form)
    if common:
        keep(_fronts, front, found, MOST_FORMS)
    return found, request.size_values


def _plain_sizes(sizes: SizesArgument) -> tuple[int, ...] | None:
    """Sizes that are Python's own integers, by names or numbers of dimensions; None for others."""
    if type(sizes) is not dict:
        return None
    for key, size in sizes.items():
        if type(size) is not int or type(key) is not int and type(key) is not str:
            return None
    return tuple(sizes.values())
