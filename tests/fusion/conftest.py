"""Each test compiles anew and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import insum.fusion
from insum import memory
from insum.runtime import which_program
from insum.runtime.shelf import Programs


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    insum.fusion.clear()
    memory.forget()
    yield
    torch._dynamo.reset()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Generated kernels alone, with tensors whose values cannot be looked at: kernels check
    indices, and what they find is reported later.
    """
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    memory.forget()
    with insum.settings(backend="fused", require_fused=True):
        yield
    insum.synchronize()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is planned and built from now on."""
    made: list[object] = []
    original = Programs.build

    def build(self: Programs, *rest: Any, **options: Any) -> Any:
        made.append(self)
        return original(self, *rest, **options)

    monkeypatch.setattr(Programs, "build", build)
    return made


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls whose program had to be looked for."""
    found: list[object] = []
    original = which_program.find

    def find(call: Any, *rest: Any) -> Any:
        found.append(call)
        return original(call, *rest)

    monkeypatch.setattr(which_program, "find", find)
    return found
