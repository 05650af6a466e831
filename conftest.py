"""For tests and doctests alike: PyG exchanges ``torch.index_select`` for its own when a test
imports it. That ends with the test. Examples that import e3nn are skipped where it is not.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

_index_select = torch.index_select


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.index_select = _index_select
    examples = item.dtest.examples if isinstance(item, pytest.DoctestItem) and item.dtest else ()
    if any("from e3nn" in one.source for one in examples) and not _has_e3nn():
        pytest.skip("e3nn is not installed")


def _has_e3nn() -> bool:
    return importlib.util.find_spec("e3nn") is not None
