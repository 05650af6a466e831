"""What is seen while benchmarks run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from insum.bench.progress import Progress
from insum.bench.records import Row

ROW = Row("spmm", "cora", "float32", "forward", "insum", "ok", milliseconds=1.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.start("SpMM")
        progress.show(ROW, "the line")
    seen = capsys.readouterr()
    assert seen.out == "the line\n" and seen.err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    out, error = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    with Progress() as progress:
        for title in ("SpMM", "Convolution"):
            progress.start(title)
            progress.show(ROW, "the line")
        assert progress.bar is not None
        progress.bar.refresh()
    assert out.getvalue() == "" and "Convolution" in error.getvalue() and "cora" in error.getvalue()


def test_lines_on_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with Progress() as progress:
        progress.start("SpMM")
        progress.show(ROW, "the line")
    assert out.getvalue() == "the line\n"
