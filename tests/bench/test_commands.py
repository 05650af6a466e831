"""``insum bench``: every command runs on a CPU and leaves all files; mistakes are told before
anything runs.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from insum.bench import main as command
from insum.bench import measure, page, plots, records, rivals

SOURCE = Path(__file__).parent.parent.parent / "src"
FILES = {"bench.json", "bench.csv", "report.html"}


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """Three repetitions of everything: what is timed is not the point here."""
    before = dict(measure.SECONDS)
    measure.SECONDS["cpu"] = 0.0
    yield
    measure.SECONDS.update(before)


@pytest.fixture(scope="module")
def out(short: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All benchmarks once, on stand-ins."""
    folder = tmp_path_factory.mktemp("bench")
    assert (
        command.main(
            ["all", "--quick", "--no-slow", "--device", "cpu", "--data", "", "--out", str(folder)]
        )
        == 0
    )
    return folder


@pytest.fixture(scope="module")
def sections(out: Path) -> list[records.Section]:
    return records.read([out])


def test_every_benchmark_has_rows_that_are_right(sections: list[records.Section]) -> None:
    assert [s.benchmark for s in sections] == list(command.BENCHMARKS)
    for section in sections:
        ok = [row for row in section.rows if row.status == "ok"]
        assert ok and not section.wrong
        assert all(
            row.milliseconds and row.limit_percent and row.error is not None and row.clock == "host"
            for row in ok
        )
        assert {row.status for row in section.rows} <= {"ok", "failed", "skipped"}
    ours = [
        row
        for s in sections
        for row in s.rows
        if row.contender.startswith("insum") and row.status not in ("ok", "skipped")
    ]
    assert not ours


def test_quick_skips_nothing_on_a_cpu_that_is_busy(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours_later = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 1e4, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(measure, "time", hours_later)
    given = ["block-spmm", "--quick", "--no-slow", "--device", "cpu", "--out", str(tmp_path)]
    assert command.main(given) == 0
    (found,) = records.read([tmp_path])
    assert len({row.case for row in found.rows}) > 1
    assert {row.status for row in found.rows if "--no-slow" not in row.note} == {"ok"}


def test_forward_and_backward_in_both_precisions(sections: list[records.Section]) -> None:
    for section in sections[:4]:
        assert {row.direction for row in section.rows} == {"forward", "forward+backward"}
    spmm = next(s for s in sections if s.benchmark == "spmm")
    assert {row.dtype for row in spmm.rows} == {"float32", "float16"}


def test_the_convolution_has_both_spellings_and_the_layers_choice(
    sections: list[records.Section],
) -> None:
    rows = next(s for s in sections if s.benchmark == "conv").rows
    assert {
        "insum SparseConv3d",
        "insum, neighbour table",
        "insum, grouped pairs",
        "gather-matmul-scatter",
    } <= {row.contender for row in rows}
    assert all("chose" in row.note for row in rows if row.contender == "insum SparseConv3d")


def test_all_files_are_there(out: Path) -> None:
    pytest.importorskip("matplotlib")
    assert {f.name for f in out.iterdir()} == FILES | {f"{name}.svg" for name in command.BENCHMARKS}


def test_csv_has_every_row_and_every_missing_rival(
    out: Path, sections: list[records.Section]
) -> None:
    with (out / "bench.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == records.COLUMNS
    assert len(rows) == sum(len(s.rows) + len(s.missing) for s in sections)
    missing = {row["contender"]: row["note"] for row in rows if row["status"] == "missing"}
    assert "needs a GPU" in missing["TorchBSR"]


def test_missing_rivals_are_named_with_the_reason(
    sections: list[records.Section], out: Path
) -> None:
    text = (out / "report.html").read_text()
    for section in sections:
        for one in section.missing:
            assert one.reason and one.name in text
    if torch.cuda.is_available():
        return
    names = {m.name for s in sections for m in s.missing}
    assert {"TorchBSR", "insum, TorchInductor, native matmul", "insum, fused"} <= names


#: What would make a browser ask another machine for something.
LOADS = re.compile(
    r"""(?:src|href|data|action|xlink:href)\s*=\s*["']?\s*(?:https?:)?//|url\(\s*["']?(?:https?:)?//|@import|<script|<link|<iframe""",
    re.IGNORECASE,
)


def test_the_page_refers_to_nothing_outside_itself(out: Path) -> None:
    text = (out / "report.html").read_text()
    assert not LOADS.search(text)
    assert LOADS.search('<img src="https://example.org/x.png">') and LOADS.search("@import 'x'")


def test_the_page_shows_everything(out: Path, sections: list[records.Section]) -> None:
    text = (out / "report.html").read_text()
    assert all(
        f'id="{s.benchmark}"' in text and s.device in text and s.date in text and s.command in text
        for s in sections
    )
    assert text.count("<figure>") == len(sections) and "prefers-color-scheme: dark" in text
    assert all(
        word in text
        for word in (
            "TorchBSR 202",
            "Sputnik 1,918",
            "TorchSparse 4,491",
            "e3nn 225",
            f"torch {torch.__version__}",
        )
    )


def test_report_draws_the_same_from_the_results(out: Path, tmp_path: Path) -> None:
    assert (
        command.main(
            [
                "report",
                str(out),
                "--out",
                str(tmp_path / "again"),
                "--json",
                str(tmp_path / "copy" / "bench.json"),
            ]
        )
        == 0
    )
    for name in sorted(f.name for f in out.iterdir()):
        assert (tmp_path / "again" / name).read_text() == (out / name).read_text(), name
    assert (tmp_path / "copy" / "bench.json").read_text() == (out / "bench.json").read_text()


def test_results_of_several_runs_are_put_together(
    out: Path, tmp_path: Path, sections: list[records.Section]
) -> None:
    again = [
        replace(row, milliseconds=77.0) for row in sections[0].rows if row.case == "50% sparse"
    ] + [replace(sections[0].rows[0], case="42% sparse")]
    later = replace(
        sections[0], date="2999-01-01", command="insum bench block-spmm --only 50", rows=again
    )
    (tmp_path / "later.json").write_text(records.to_json([later]))
    (tmp_path / "elsewhere.json").write_text(records.to_json([replace(later, device="another")]))
    found = records.read([out, tmp_path / "later.json"])
    assert (
        len(found) == len(sections)
        and found[0].date == "2999-01-01"
        and found[0].command.endswith("; insum bench block-spmm --only 50")
    )
    assert len(found[0].rows) == len(sections[0].rows) + 1 and {
        r.milliseconds for r in found[0].rows if r.case == "50% sparse"
    } == {77.0}
    assert records.read([out, tmp_path / "elsewhere.json"])[0].rows == again


def test_without_matplotlib_the_page_says_so(
    sections: list[records.Section], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plots.draw(sections) == {} and "insum bench report" in plots.why_not()
    assert "matplotlib is not installed" in page.page(sections, {}, plots.why_not())


def test_a_baseline_that_is_missing_is_replaced() -> None:
    rows = [
        records.Row("b", "c", "float32", "forward", name, "ok", milliseconds=1.0)
        for name in ("insum", "other")
    ]
    assert (
        plots.baseline(rows, "e3nn") == "other"
        and plots.baseline(rows[:1], "e3nn") == "insum"
        and plots.baseline(rows, "ins") == "insum"
    )


def test_it_runs_without_any_optional_package(tmp_path: Path) -> None:
    """As on a machine that has torch and nothing else."""
    absent = ("typer", "rich", "matplotlib", "e3nn", "torch_geometric", "scipy")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "from insum.bench.main import main\nsys.exit(main())"
    )
    arguments = [
        "spmm",
        "--quick",
        "--no-slow",
        "--device",
        "cpu",
        "--data",
        "",
        "--only",
        "cora",
        "--directions",
        "forward",
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "missing: PyG: ModuleNotFoundError" in done.stdout
        and "contender" in done.stdout
        and {f.name for f in tmp_path.iterdir()} == FILES
    )


def test_data_from_a_folder(
    short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indptr = np.arange(0, 4 * 65, 4, dtype=np.int32)
    (tmp_path / "graphs").mkdir()
    np.savez(
        tmp_path / "graphs" / "ring.npz",
        indptr=indptr,
        indices=np.tile(np.arange(4, dtype=np.int32), 64),
        shape=np.array([64, 64]),
    )
    assert (
        command.main(
            [
                "spmm",
                "--no-slow",
                "--device",
                "cpu",
                "--data",
                str(tmp_path),
                "--dtypes",
                "fp32,bf16",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    rows = records.read([tmp_path / "out"])[0].rows
    assert {row.case for row in rows} == {"ring"} and {row.dtype for row in rows} == {
        "float32",
        "bfloat16",
    }
    # no folder of this machine in what is kept
    assert str(tmp_path) not in records.read([tmp_path / "out"])[0].command
    capsys.readouterr()


WRONG = [
    (
        ["faster"],
        "there is no benchmark 'faster'",
        "block-spmm, spmm, conv, tensor-product, ablation, compilers, all, gallery, survey, "
        "equivariant",
    ),
    (["spmm", "--dtypes", "fp8"], "there is no dtype 'fp8'", "fp32, fp16, bf16"),
    (
        ["spmm", "--directions", "sideways"],
        "there is no direction 'sideways'",
        "forward, backward, both",
    ),
    (
        ["spmm", "--data", "nowhere"],
        "the data folder nowhere is not there",
        "graphs/*.npz and clouds/*.npz",
    ),
    (["spmm", "--device", "tpu"], "there is no device 'tpu'", "cpu"),
    (["spmm", "--data", "", "--only", "nothing"], "there is no graph 'nothing'", "cora"),
    (["conv", "--data", "", "--only", "cora"], "there is no cloud 'cora'", "pc-s3dis-ucf-lobby"),
    (["all", "--only", "cora"], "--only cora was given to all", "sparsities (90), graphs, clouds"),
    (["block-spmm", "--only", "42"], "there is no sparsity '42'", "50, 70, 75, 80, 90, 95, 99"),
    (["tensor-product", "--only", "4x16"], "there is no row '4x16'", "1x16, 1x32"),
    (["spmm", "somewhere"], "somewhere was given to a benchmark", "one benchmark, and options"),
    (["report", "nowhere"], "there is no nowhere", "a bench.json, or a folder with one"),
]


@pytest.mark.parametrize(("arguments", "fact", "expected"), WRONG, ids=[w[1] for w in WRONG])
def test_mistakes(
    arguments: list[str], fact: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*arguments, "--out", "never-written"]) == 2
    said = capsys.readouterr().out
    assert f"insum bench: {fact}" in said and expected in said
    assert not Path("never-written").exists()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"sections": [{}]}', '{"sections": [{"rows": [{"no": 1}], "missing": []}]}'],
)
def test_a_file_that_is_no_result(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text(text)
    assert (
        command.main(["report", str(tmp_path / "other.json"), "--out", str(tmp_path / "out")]) == 2
    )
    assert "is no result of insum bench" in capsys.readouterr().out


def test_a_rival_that_is_there_but_broken_is_missing_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rival.py").write_text("raise OSError('libcuda.so.1: no such file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    rival = rivals.Rival("broken", ("broken_rival",))
    assert rival.absent(torch.device("cpu")) == "OSError: libcuda.so.1: no such file"


@pytest.mark.gpu
def test_on_a_gpu_times_are_replays_and_memory_is_told(tmp_path: Path) -> None:
    arguments = ["--quick", "--no-slow", "--data", "", "--out", str(tmp_path)]
    for what in (
        ["spmm", "--only", "cora"],
        ["conv", "--only", "pc-pcl-room_scan1"],
        ["block-spmm"],
        ["ablation"],
    ):
        assert command.main([*what, *arguments]) == 0
        (section,) = records.read([tmp_path])
        ours = [row for row in section.rows if row.contender.startswith("insum")]
        assert ours and all(
            (row.status, row.clock) == ("ok", "CUDA graph") and row.memory_mib for row in ours
        ), [row for row in ours if row.clock != "CUDA graph"]
        assert not section.notes
