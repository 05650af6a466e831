"""Studies of `insum bench` on the CPU, small: each runs, is right, and leaves a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from insum.bench import data, formats, memory, overhead
from insum.bench.main import STUDIES, main, parser
from insum.lang.bind import bind
from insum.lang.parser import parse

ABOUT = {"command", "date", "device", "versions"}
CPU = torch.device("cpu")


def record_of(tmp_path: Path, name: str, *more: str) -> dict[str, Any]:
    given = [name, "--quick", "--device", "cpu", "--data", "", "--out", str(tmp_path), *more]
    assert main(given) == 0
    record: dict[str, Any] = json.loads((tmp_path / f"{name.replace('-', '_')}.json").read_text())
    assert set(record) >= ABOUT
    assert record["command"].startswith(f"insum bench {name}")
    return record


def test_every_study_has_its_own_options() -> None:
    for name in STUDIES:
        assert parser(name).parse_args([name]).what == name
    assert parser("cpu").parse_args(["cpu", "--threads", "2"]).threads == 2
    with pytest.raises(SystemExit):
        parser("fresh").parse_args(["fresh", "--threads", "2"])


def test_folders_are_for_those_that_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead", "somewhere"]) == 2
    assert "somewhere was given to a benchmark" in capsys.readouterr().out


def test_cpu(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    record = record_of(tmp_path, "cpu", "--turns", "2", "--only", "spmm,tensor-product")
    assert torch.get_num_threads() == threads
    assert record["turns"] == 2 and record["threads"] == 1
    assert {row["application"] for row in record["rows"]} <= {"SpMM", "tensor product"}
    assert all(row["insum_ms"] > 0 and row["error"] < 1e-5 for row in record["rows"])


def test_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "WARM", 2)
    monkeypatch.setattr(overhead, "PROFILED", 2)
    record = record_of(tmp_path, "overhead", "--profile")
    assert set(record["microseconds"]) == set(overhead.on_cpu())
    assert all(taken > 0 for taken in record["microseconds"].values())


def test_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "SECONDS", 0.0)
    record = record_of(tmp_path, "formats", "--only", "cora")
    (row,) = record["graphs"]
    assert row["graph"] == "cora" and row["milliseconds"]["insum GroupCOO"] > 0
    assert record["group_size"]["best"] >= 1


def test_another_matrix_is_told_from_the_same() -> None:
    csr = formats.csr_of(data.graph("cora", None, CPU))
    made = formats.GroupCOO.from_torch(csr)
    assert formats.is_same(csr, made) and not formats.is_same(csr * 2, made)


def test_memory_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--device", "cpu"]) == 2
    assert "expected: a GPU" in capsys.readouterr().out


def test_what_memory_measures_is_right() -> None:
    for case in (
        memory.block_spmm(CPU),
        memory.spmm(data.graph("cora", None, CPU)),
        memory.convolution(data.cloud("pc-pcl-room_scan1", None, CPU, 100)),
        memory.tensor_product(CPU),
    ):
        bind(parse(case.statement), case.values, **case.options)
        assert set(case.leaves) < set(case.values)
