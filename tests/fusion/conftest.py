"""Each test compiles anew and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import insum.fusion


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    insum.fusion.clear()
    yield
    torch._dynamo.reset()
