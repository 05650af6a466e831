"""`insum bench fresh` on the CPU: every case runs, is right, and is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insum.bench.main import main


def test_every_case_runs_and_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fresh", "--device", "cpu", "--data", "", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "fresh.json").read_text())
    ours = [row for row in record["rows"] if row["contender"] == "insum"]
    assert len(ours) == 6
    assert sum(row["error"] is not None for row in ours) == 3
    assert all(row["median_ms"] <= row["p99_ms"] <= row["max_ms"] for row in ours)
    assert {"command", "date", "device", "versions"} <= set(record)
    assert "tensor-product convolution" in capsys.readouterr().out
