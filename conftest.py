"""For tests and doctests alike: PyG exchanges ``torch.index_select`` for its own when a test
imports it. That ends with the test.
"""

from __future__ import annotations

import pytest
import torch

_index_select = torch.index_select


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.index_select = _index_select
