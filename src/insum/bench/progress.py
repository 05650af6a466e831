"""What one sees while it runs: a bar on a terminal with rich, else a line for each row."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from insum.bench.records import Row


class Progress:
    """``with Progress() as progress``: ``start`` a benchmark, ``show`` its rows. The bar is silent
    where standard error is no terminal.
    """

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and sys.stdout.isatty():
            self.bar = _rich_bar()
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def start(self, title: str) -> None:
        if self.bar is not None:
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.task = self.bar.add_task(title, total=None, detail="")

    def show(self, row: Row, line: str) -> None:
        if self.bar is None:
            print(line, flush=True)
        else:
            self.bar.update(
                self.task,
                advance=1,
                detail=f"{row.case}, {row.dtype}, {row.direction}: {row.contender}",
            )


def _rich_bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
    ]
    return Bar(*columns, console=Console(stderr=True), transient=True)
