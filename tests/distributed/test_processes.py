"""Everything that needs several processes, in one group of four: see `worker`.

One test, because a second one may run in another process of pytest's, which would start four more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs Gloo")
def test_checks_hold_in_four_processes() -> None:
    """Every function ``check_*`` of ``checks_*.py``."""
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "distributed.worker"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert found.returncode == 0, found.stdout + found.stderr
