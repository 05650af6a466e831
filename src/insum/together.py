"""Several statements on the same tensors: one kernel writes their results, where it can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum.api import insum
from insum.call import in_kernels
from insum.call.lookup import kinds_with
from insum.compat.calls import is_plain_call


@dataclass(frozen=True)
class AskedResult:
    """A statement, the shape of its result, and the tensors that it reads."""

    statement: str
    shape: tuple[int, ...]
    tensors: Mapping[str, Any]

    def alone(self) -> Tensor:
        return insum(self.statement, out_shape=self.shape, **self.tensors)


def results_of(asked: Sequence[AskedResult]) -> list[Tensor]:
    """The results of statements on plain tensors. A name means the same tensor in all of them."""
    if len(asked) < 2 or not _is_plain(asked):
        return [one.alone() for one in asked]
    calls = []
    for one in asked:
        kinds, sizes = kinds_with(one.statement, one.shape)
        calls.append(kinds.known(one.tensors, sizes) or kinds.find(one.tensors, sizes))
    found = in_kernels.at_once(calls, [one.tensors for one in asked])
    return [one.alone() if it is None else it for one, it in zip(asked, found)]


def _is_plain(asked: Sequence[AskedResult]) -> bool:
    """Whether kernels may be called at once: nothing else looks at what is done, and no gradients
    of the results may be asked for, which statements have by themselves.
    """
    every = [tensor for one in asked for tensor in one.tensors.values()]
    if not is_plain_call(every):
        return False
    return not (
        torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in every)
    )
