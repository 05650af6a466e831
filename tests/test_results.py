"""The measurements that the README shows are those in the result files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_readme_shows_the_result_files() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
