"""What a warm call costs on the host, counted in Python calls rather than in time, which depends on
the machine. Launches are stubbed: nothing is computed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.runtime.bind import BoundLaunch
from kernels import ONLY_FUSED

pytestmark = pytest.mark.interpreter
STATEMENT = "y[d[e],f] = w[e] * x[s[e],f]"
WARM = 30
#: Calls of Python functions, torch's included, of a forward call; and of our own in a backward
#: pass, for each statement that is derived.
FORWARD, BACKWARD = 20, 60


@pytest.fixture(autouse=True)
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, without launching."""
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call._forms", {})
    monkeypatch.setattr("insum.api._fronts", {})
    monkeypatch.setattr(BoundLaunch, "interpret", lambda self, *arguments: None)
    memory.forget()
    with insum.settings(**ONLY_FUSED):
        yield


def python_calls(function: Callable[[], Any], below: str = "") -> Counter[str]:
    """How often each Python function is called, but for those of this file; ``below``: only those
    of a folder.
    """
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file != __file__ and file.startswith(below):
            found[frame.f_code.co_name] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def drawn(edges: int = 1000) -> dict[str, Tensor]:
    s, d = torch.randint(0, 200, (2, edges)).unbind()
    return {"d": d, "s": s, "w": torch.randn(edges), "x": torch.randn(200, 16)}


def called(values: dict[str, Tensor]) -> Tensor:
    return insum.insum(STATEMENT, out_shape=(200, 16), **values)  # type: ignore[arg-type]


def test_a_warm_forward_call() -> None:
    values = drawn()
    for _ in range(WARM):
        called(values)
    calls = python_calls(lambda: called(values))
    assert calls.total() <= FORWARD, calls


def test_a_warm_call_that_is_recorded_for_autograd() -> None:
    values = drawn()
    values["x"].requires_grad_()
    for _ in range(WARM):
        called(values)
    calls = python_calls(lambda: called(values))
    assert calls.total() <= FORWARD + 15, calls


@pytest.mark.parametrize("wanted", [("x",), ("x", "w")])
def test_a_warm_backward_pass(wanted: tuple[str, ...]) -> None:
    values, upstream = drawn(), torch.randn(200, 16)
    leaves = [values[name].requires_grad_() for name in wanted]
    for _ in range(WARM):
        torch.autograd.grad(called(values), leaves, upstream)
    result = called(values)
    own = str(Path(insum.__file__).parent)
    calls = python_calls(lambda: torch.autograd.grad(result, leaves, upstream), own)
    assert calls.total() <= BACKWARD * len(wanted), calls


def test_a_call_on_new_tensors_of_a_new_size() -> None:
    """Nothing is planned and nothing is written: a bounded number of steps."""
    for size in range(WARM):
        called(drawn(900 + size))
    values = drawn(999)
    calls = python_calls(lambda: called(values))
    assert calls.total() <= 75, calls
