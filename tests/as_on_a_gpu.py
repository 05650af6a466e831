"""Whoever reads a value on the host, which would wait for a GPU, is found out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from insum.facts import Coming
from insum.testing.as_on_a_gpu import waits

#: What waits for a device when it is asked of a tensor there.
READS = (
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist"),
    *("nonzero", "masked_select", "unique", "unique_consecutive", "equal", "cpu"),
)


@contextlib.contextmanager
def no_reads(allowed: int = 0) -> Iterator[list[str]]:
    """Fail where more values are read on the host than are allowed, kernels apart."""
    from triton.runtime.interpreter import GridExecutor

    reads = waits
    reads.clear()
    inside = [False]
    with pytest.MonkeyPatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, _watched(getattr(Tensor, name), name, reads, inside))
        for name in ("nonzero", "masked_select", "unique", "unique_consecutive", "equal"):
            patch.setattr(torch, name, _watched(getattr(torch, name), name, reads, inside))
        patch.setattr(Tensor, "__getitem__", _masked(Tensor.__getitem__, reads))
        patch.setattr(GridExecutor, "__call__", _kernel(GridExecutor.__call__, inside))
        patch.setattr(Coming, "numbers", _kernel(Coming.numbers, inside))  # which have arrived
        yield reads
    assert len(reads) <= allowed, reads


def _watched(original: Any, name: str, reads: list[str], inside: list[bool]) -> Any:
    def watched(*arguments: Any, **options: Any) -> Any:
        if not inside[0]:
            reads.append(name)
        return original(*arguments, **options)

    return watched


def _masked(original: Any, reads: list[str]) -> Any:
    def watched(self: Tensor, at: Any) -> Any:
        for one in at if isinstance(at, tuple) else (at,):
            if isinstance(one, Tensor) and one.dtype is torch.bool:
                reads.append("a mask as an index")
        return original(self, at)

    return watched


def _kernel(original: Any, inside: list[bool]) -> Any:
    def watched(*arguments: Any, **options: Any) -> Any:
        inside[0] = True
        try:
            return original(*arguments, **options)
        finally:
            inside[0] = False

    return watched
