"""Kernels are kept for every pattern of aligned and unaligned pointers: none is sought twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from insum.plan.config import Config
from insum.runtime import program
from insum.runtime.program import OUT, Launch


def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Launch, list[Any], list[Any]]:
    """A launch whose kernel does nothing, how often Triton was asked, and what was launched without
    asking it.
    """
    asked: list[Any] = []
    launched: list[Any] = []
    monkeypatch.setattr(
        Launch, "compiled", lambda self, arguments: asked.append(arguments) or len(asked)
    )
    monkeypatch.setattr(
        program.launch,
        "runner_of",
        lambda compiled, programs: lambda arguments: launched.append((compiled, list(arguments))),
    )
    one = Launch(None, (1,), ("a", OUT, 7), ((0, "a"), (1, OUT)), Config(), None, "")  # type: ignore[arg-type]
    return one, asked, launched


def test_each_pattern_of_alignment_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked, launched = made(monkeypatch)
    base = torch.zeros(64)
    start = (-base.data_ptr() % 16) // 4
    aligned, shifted = base[start : start + 8], base[start + 1 : start + 9]
    patterns: list[tuple[Tensor, Tensor]] = [
        (shifted, aligned),
        (aligned, aligned),
        (aligned, shifted),
        (shifted, shifted),
    ]
    for _ in range(3):
        for a, out in patterns:
            one({"a": a}, out, None)
    assert len(asked) == 4 and len(launched) == 8
    assert [kernel for kernel, _ in launched[:4]] == [1, 2, 3, 4]
    assert launched[0][1] == [shifted.data_ptr(), aligned.data_ptr(), 7]


def test_numbers_are_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    one, asked, launched = made(monkeypatch)
    for _ in range(3):
        one({"a": 2.5}, torch.zeros(4), None)
    assert len(asked) == 3 and not launched
