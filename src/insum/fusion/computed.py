"""Tensors that are a function of integer tensors alone, computed once while those live unchanged;
and the op ``insum::computed`` for those that somebody else than a fused statement reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from insum import memory
from insum.compat.calls import PLAIN, are_plain, shorten
from insum.fusion.defining import define
from insum.fusion.origin import evaluate


def computed(program: str, sizes: tuple[int, ...], sources: tuple[Tensor, ...]) -> Any:
    """What a program gives, as it was computed before where the tensors are the same and unchanged.
    Nobody may write to it.
    """
    if any(type(s) not in PLAIN for s in sources):
        return evaluate(program, sources, sizes)
    return _remembered(
        program, sources, sizes, lambda: evaluate(program, sources, sizes, _remembered)
    )


def kept_under(program: str, sizes: tuple[int, ...]) -> object:
    """The key of what a program gives, with the tensors that it is applied to."""
    return "computed", program, sizes


def _remembered(
    name: str, sources: tuple[Tensor, ...], sizes: tuple[int, ...], run: Callable[[], Any]
) -> Any:
    first, *others = sources
    return memory.remembered(
        first, kept_under(name, sizes), lambda: _promised(_own(run(), sources), sources), *others
    )


def _promised(result: Any, sources: tuple[Tensor, ...]) -> Any:
    """Of what was promised not to change no function does."""
    entries = [memory.known(source) for source in sources]
    if isinstance(result, Tensor) and all(e is not None and e.declared for e in entries):
        memory.entry_of(result, declared=True)
    return result


def _own(result: Any, sources: tuple[Tensor, ...]) -> Any:
    """A result that keeps none of the tensors alive that it was computed from: a view would."""
    places = {s.untyped_storage().data_ptr() for s in sources}
    return (
        result.clone()
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() in places
        else result
    )


# --- the op ---------------------------------------------------------------------------------------


def _op(
    program: str, tensors: list[Tensor], dtype: str, shape: list[int], sizes: list[int]
) -> Tensor:
    """A copy, because compiled code may use the memory of what it gets again."""
    found: Tensor = computed(program, (*sizes,), tuple(tensors))
    return found.clone(memory_format=torch.contiguous_format)


def _fake(
    program: str, tensors: list[Tensor], dtype: str, shape: Sequence[Any], sizes: Sequence[Any]
) -> Tensor:
    return tensors[0].new_empty(shape, dtype=getattr(torch, dtype))


_SCHEMA = (
    "computed(str program, Tensor[] tensors, str dtype, SymInt[] shape, SymInt[] sizes) -> Tensor"
)
define(_SCHEMA, _op, _fake)
OP = torch.ops.insum.computed.default
shorten(
    OP,
    lambda program, tensors, *rest: _op(program, tensors, *rest) if are_plain(tensors) else None,
)
