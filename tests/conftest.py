"""Which tests can run here: kernels need a GPU, or Triton's interpreter, or its compiler. What is
skipped says why.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import inside_tensors
from quick_interpreter import quicken


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden texts of tests/golden anew instead of comparing with them",
    )


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether Triton was told to interpret kernels; it reads this once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def pytest_configure() -> None:
    if has_triton() and is_interpreting():
        quicken()
        inside_tensors.watch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with what takes longest come first, so that no process is left alone with it in the
    end. Whole files, because their tests share fixtures.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def reason_to_skip(item: pytest.Item) -> str:
    kernels = [
        name for name in ("gpu", "interpreter", "compile_only") if item.get_closest_marker(name)
    ]
    if kernels and not has_triton():
        return "triton is not installed"
    if "gpu" in kernels and not torch.cuda.is_available():
        return "needs a GPU"
    if "interpreter" in kernels and not is_interpreting():
        return "needs TRITON_INTERPRET=1 in the environment"
    if {"gpu", "compile_only"} & set(kernels) and is_interpreting():
        return "needs Triton's compiler: TRITON_INTERPRET is set"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = reason_to_skip(item)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def in_double() -> Iterator[None]:
    """Double precision where nobody says another, from a fixed seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    """What is remembered about tensors of other tests, which may live on, is not counted."""
    from insum import memory

    memory.forget()
    yield
    memory.forget()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which handwritten kernels are launched, by their names."""
    from insum.runtime.handwritten.kernel import Handwritten

    found: list[str] = []
    call = Handwritten.__call__

    def counted(self: Any, programs: int, *arguments: Any) -> None:
        found.append(self.name)
        call(self, programs, *arguments)

    monkeypatch.setattr(Handwritten, "__call__", counted)
    return found


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Generated kernels and nothing else, on memory that holds NaN."""
    import insum  # only where it is asked for: some tests count what importing it takes
    from kernels import ONLY_FUSED, poison_new_memory

    poison_new_memory(monkeypatch)
    with insum.settings(**ONLY_FUSED):
        yield
