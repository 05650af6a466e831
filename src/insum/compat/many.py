"""Gradients of many at once, as ``torch.autograd.grad(..., is_grads_batched=True)`` and
``torch.autograd.functional.jacobian(..., vectorize=True)`` hand them to a backward pass.

Such tensors look like one item and have no memory. They come of a mapping of torch's that is older
than `torch.vmap` and that few operations know: here they become those of `torch.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Items: TypeAlias = Sequence[Tensor | None]

#: So deep can mappings be nested.
MOST_LEVELS = 64


def _never(tensor: Any) -> bool:
    return False


#: Whether a tensor is many at once; what is none is not.
is_batched: Callable[[Any], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_legacy_batchedtensor", _never
)


def any_batched(values: Iterable[object]) -> bool:
    """Whether one of these is a tensor that is many at once."""
    for value in values:  # noqa: SIM110  # on the path of every backward pass
        if isinstance(value, Tensor) and is_batched(value):
            return True
    return False


def over_items(function: Callable[..., Items], tensors: Items) -> tuple[Tensor | None, ...]:
    """A function of tensors, some of which are many at once: what `torch.vmap` makes of it."""
    mapped, given, levels = function, list(tensors), []
    for level in range(1, MOST_LEVELS + 1):
        if not any_batched(given):
            break
        opened = [_opened(tensor, level) for tensor in given]
        if all(one is None for one in opened):
            continue
        dims = tuple([None if one is None else 0 for one in opened])
        mapped = _without_none(mapped, dims)
        given = [old if new is None else new for old, new in zip(given, opened)]
        levels.append(level)
    found = list(mapped(*given))
    for place, level in enumerate(levels, 1):  # torch wants them in this order
        dim = len(levels) - place
        found = [None if t is None else torch._add_batch_dim(t, dim, level) for t in found]
    return tuple(found)


def _opened(tensor: Tensor | None, level: int) -> Tensor | None:
    """The tensor with its items of this level in front, None where it has none."""
    if tensor is None or not is_batched(tensor):
        return None
    whole = torch._remove_batch_dim(
        tensor, level, 0, 0
    )  # of no items, where there is no such level
    return whole if whole.shape[0] or not is_batched(whole) else None


def _without_none(function: Callable[..., Items], dims: tuple[int | None, ...]) -> Any:
    """``torch.vmap`` of a function, of whose results some may be None."""

    def mapped(*tensors: Tensor | None) -> list[Tensor | None]:
        missing: list[int] = []

        def given(*items: Tensor | None) -> tuple[Tensor, ...]:
            found = function(*items)
            missing[:] = [place for place, one in enumerate(found) if one is None]
            return tuple([one for one in found if one is not None])

        results: list[Tensor | None] = list(torch.vmap(given, in_dims=dims)(*tensors))
        for place in missing:
            results.insert(place, None)
        return results

    return mapped
