"""The gallery and the sweep: small, on a CPU, so that all can be seen to work."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

from insum.bench import gallery, main, survey, surveyed_random, sweep
from insum.bench.data import RandomTensors
from insum.bench.options import BenchOptions
from insum.bench.records import FORWARD
from insum.errors import BenchError


def options(*more: str) -> main.BenchOptions:
    return main.options_of(main.parser().parse_args(["gallery", "--device", "cpu", *more]))


@pytest.mark.parametrize("benchmark", [gallery, survey], ids=["gallery", "survey"])
def test_every_statement_is_right(benchmark: ModuleType) -> None:
    """Of each exhibit our result, and its gradients where it has some, against the formula."""
    from insum.bench.measure import TOLERANCE, relative_error

    names = []
    for case in benchmark.cases(options()):
        ours = case.contenders[0]
        assert ours.name == "insum"
        error = relative_error(ours.make().run(), case.want())
        assert error <= TOLERANCE[case.dtype], f"{case.name}, {case.direction}: {error}"
        assert case.work.bytes > 0
        names.append((case.name, case.direction))
    assert len({name for name, _ in names}) >= 24
    assert any(direction != FORWARD for _, direction in names)


def test_statements_that_nobody_wrote() -> None:
    """Are right, and so are their rivals; the same seed draws the same."""
    from insum.bench.measure import TOLERANCE, relative_error

    draw = RandomTensors(torch.device("cpu"))
    found = list(itertools.islice(surveyed_random.exhibits(draw, 5, 2**12), 40))
    again = itertools.islice(surveyed_random.exhibits(draw, 5, 2**12), 40)
    assert [one.name for one in found] == [one.name for one in again]
    assert len({one.statement for one in found}) > 30
    for exhibit in found:
        (want,) = exhibit.want(FORWARD)
        assert relative_error((exhibit.ours(),), (want,)) <= TOLERANCE[torch.float32], exhibit.name
    rng = random.Random(1)
    for one in (surveyed_random.drawn(rng, 2**10) for _ in range(20)):
        values = one.tensors(RandomTensors(torch.device("cpu"), torch.float64))
        assert torch.allclose(one.by_points(**values), one.by_einsum(**values))


def test_a_section_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["gallery", "--only", "adapters", "--device", "cpu", "--out", str(tmp_path)]
    assert main.main(given) == 0
    (section,) = json.loads((tmp_path / "bench.json").read_text())["sections"]
    assert {row["contender"] for row in section["rows"]} == {"insum", "torch"}
    assert "adapters" in capsys.readouterr().out


def test_a_sweep_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["sweep", "--only", "blocks,spmm", "--device", "cpu", "--data", ""]
    file = tmp_path / "sweep.json"
    assert main.main([*given, "--json", str(file), "--budget", "0.001"]) == 0
    first = json.loads(file.read_text())["rows"] if file.exists() else []
    assert main.main([*given, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 7 and rows[: len(first)] == first
    assert all(row["error"] < 1e-5 for row in rows)
    monkeypatch.setattr(sweep, "prepared", lambda *_: pytest.fail("measured again"))
    assert main.main([*given, "--json", str(file)]) == 0
    assert "the time is up" in capsys.readouterr().out


def test_a_worker_prepares_what_it_is_told_and_waits_for_its_turn() -> None:
    options = BenchOptions(torch.device("cpu"), names=("blocks",))
    keys = [point.key for point in sweep.points(options)][:1]
    here, there = multiprocessing.Pipe()
    for message in (keys, "your turn", None):
        here.send(message)
    sweep._work(options, sweep.points, there)
    assert here.recv() == "ready"
    (row,) = here.recv()
    assert row.key == keys[0] and row.error < 1e-5


def test_a_worker_that_ends_early_is_told() -> None:
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(BenchError, match="ended early"):
        sweep._answer(here)


def test_cliffs_are_told() -> None:
    def row(size: int, milliseconds: float, rival: float) -> sweep.Swept:
        return sweep.Swept("spmm", "g", "float16", (size,), milliseconds, "torch", rival, 0.0)

    told = sweep.cliffs([row(100, 2.0, 3.0), row(128, 1.0, 0.5), row(120, 1.05, 2.0)])
    assert told == [
        "spmm g float16 100: 2.00 of size (128,)",
        "spmm g float16 128: 0.50 of torch",
    ]
