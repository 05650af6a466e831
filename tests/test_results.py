"""The measurements that the README shows are those in the result files."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "benchmarks" / "report.py"


def test_readme_shows_the_result_files() -> None:
    done = subprocess.run(
        [sys.executable, str(REPORT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def row(
    contender: str, milliseconds: float | None, direction: str = "forward", **more: Any
) -> dict[str, Any]:
    empty = {
        "case": "50% sparse",
        "dtype": "float16",
        "direction": direction,
        "contender": contender,
        "milliseconds": milliseconds,
    }
    return {**empty, "limit_percent": 40.0, "error": 2e-4, "first_call_s": 1.5, **more}


def section(benchmark: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    about = {
        "benchmark": benchmark,
        "title": benchmark,
        "baseline": "COO, unfused",
        "command": "insum bench all",
        "date": "2026-01-02",
        "device": "GPU",
    }
    return {
        **about,
        "versions": {"torch": "2.11"},
        "limits": {"TB/s": 4.2},
        "rows": rows,
        "missing": [],
        **more,
    }


def test_the_table_of_insum_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPORT.parent)  # where its parts are
    spec = importlib.util.spec_from_file_location("report", REPORT)
    assert spec is not None and spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    both = "forward+backward"
    first = [
        row("insum", 0.5),
        row("torch.mm", 1.0),
        row("nobody", None),
        row("insum", 1.0, both),
        row("torch.mm", 3.0, both),
    ]
    sections = [
        section("block-spmm", first, missing=[{"name": "TorchBSR", "reason": "needs a GPU"}]),
        section("ablation", [row("COO, unfused", 8.0), row("insum: + index prefetch", 2.0)]),
        section("compilers", [row("insum, fused", 0.1)]),
    ]
    assert "from files" not in report.bench_table({"sections": sections})[1]
    first[1]["error"] = None  # of a run that was cut off
    (tmp_path / "bench.json").write_text(json.dumps({"format": 1, "sections": sections}))
    times = {"forward_row_ms": 1.0, "both_row_ms": 1.0}
    slower = {"program": "GCN", "torch.compile": times, "insum": {**times, "both_row_ms": 2.0}}
    (tmp_path / "fusion.json").write_text(json.dumps({"rows": [slower]}))
    fresh = [{"case": "a", "contender": c, "median_ms": 1.0} for c in ("insum", "PyG")]
    (tmp_path / "fresh.json").write_text(json.dumps({"rows": fresh, "calls": 9}))
    text = report.table(tmp_path)
    assert "calls in a row 0.50x to 0.50x, median 0.50x, slower in 1 of 1" in text
    assert "medians of 9: `a` 1.000 ms (PyG 1.000)" in text
    (tmp_path / "fusion.json").unlink()
    (tmp_path / "fresh.json").unlink()
    assert "| block-spmm | torch.mm | forward | 1 of 1 | 2.00x | 2.00x | 2.00x |" in text
    assert "| block-spmm | torch.mm | forward+backward | 1 of 1 | 3.00x | 3.00x | 3.00x |" in text
    page = report.page(tmp_path)
    assert "| 50% sparse, float16 | forward | insum | 0.500 |  | 40 % | 2e-04 |" in page
    assert "| | | torch.mm | 1.000 | 2.00x | 40 % | printed |" in page
    assert "1 of 7 times are from lines that a run had printed" in text
    assert (
        "| insum: + index prefetch | 2.000 | 4.0x |" in text
        and "| 50% sparse | insum, fused | 1.50 | 0.100 |" in text
    )
    assert "Not measured there: TorchBSR (block-spmm)." in text and "nobody" not in text
    assert report.table(tmp_path / "empty") == "No measurements yet.\n"


def test_the_gallery_has_the_line_the_times_and_the_kernel() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert text.count("\n## ") >= 24 and text.count("@triton.jit") >= 24
    assert "Y[p,n] = X[tok[p],k] * W[e[p],k,n]" in text and "| torch._grouped_mm |" in text
    pictures = re.findall(r"\((pictures/pattern-[^)]+)\)", text)
    assert len(pictures) == text.count("\n## ")
    for name in pictures:
        picture = ElementTree.parse(ROOT / "docs" / name)
        assert picture.findall(".//{*}path") and picture.findall(".//{*}text"), name
    for name in ("gallery", "applications"):
        picture = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        ElementTree.fromstring(picture)
        assert picture.count("<rect") > 8


def test_time_over_size_is_drawn_and_told() -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    part = text[text.index("## Sizes that nobody tuned for") :]
    assert "![Time over columns and channels](pictures/sweep.svg)" in part
    assert "### Convolution by channels in and out" in part and "### Where it is not smooth" in part
    picture = ElementTree.parse(ROOT / "docs" / "pictures" / "sweep.svg")
    lines = picture.findall(".//{*}polyline")
    assert len(lines) >= 4 * 5 + 2
    for line in lines:
        assert len(line.attrib["points"].split()) >= 15 and "nan" not in line.attrib["points"]


def test_figures_are_what_the_library_makes() -> None:
    """Those of docs/how-it-works.md, by ``python docs/figures.py``."""
    drawn = runpy.run_path(str(ROOT / "docs" / "figures.py"))["figures"]()
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name, picture in drawn.items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == picture, name
        assert f"pictures/{name}" in page
