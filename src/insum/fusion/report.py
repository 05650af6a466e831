"""What the pass did to each graph: the statements it made, and what it left and why."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from torch.fx import Node

from insum.bounded import keep
from insum.notebook import table
from insum.settings import settings


@dataclass(frozen=True, slots=True)
class Fused:
    """One statement, made of ``nodes``; about ``saved`` elements are not written to memory.

    Attributes:
        statement: What it computes.
        root: The node that it stands in for.
        nodes: Those that are no more.
        backward: Whether it belongs to the backward pass.
        saved: Elements that are not written.
        notes: What else is to be said.
        where: The module and the line that the root comes from, as far as the tracer noted them.

    Examples:
        >>> one = Fused("y[d[e]] = x[s[e]]", "index_add", ("index", "index_add"), False, 12)
        >>> len(one.nodes), one.saved
        (2, 12)
    """

    statement: str
    root: str
    nodes: tuple[str, ...]
    backward: bool
    saved: int
    notes: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        if not self.nodes:
            return f"fused  {self.statement}  ({', '.join(self.notes)})"
        when = "backward" if self.backward else "forward"
        return (
            f"fused  {self.root}: {self.statement}  ({len(self.nodes)} nodes, {when}, "
            f"{self.saved:,} elements not written){_at(self.where)}"
        )


@dataclass(frozen=True, slots=True)
class Left:
    """One scatter or sum that stayed as it was.

    Attributes:
        root: The node.
        why: Why it was left.
        backward: Whether it belongs to the backward pass.
        where: The module and the line that it comes from, as far as the tracer noted them.

    Examples:
        >>> Left("sum_1", "it gathers nothing", backward=False).why
        'it gathers nothing'
    """

    root: str
    why: str
    backward: bool
    where: str = ""

    def __str__(self) -> str:
        return f"left   {self.root}: {self.why}{_at(self.where)}"


@dataclass(frozen=True, slots=True)
class Once:
    """Nodes that are a function of integer tensors alone, and computed again only when one of those
    is another or was written to.

    Attributes:
        nodes: What is computed once.
        sources: Of which tensors.

    Examples:
        >>> Once(("eq", "nonzero"), ("kinds",)).sources
        ('kinds',)
    """

    nodes: tuple[str, ...]
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return f"once   {', '.join(self.nodes)}: while {', '.join(self.sources)} stay the same"


@dataclass(frozen=True, slots=True)
class MovedProduct:
    """A product that is computed otherwise, before statements are looked for.

    Attributes:
        root: The node.
        what: In which way.
        where: The module and the line that it comes from, as far as the tracer noted them.

    Examples:
        >>> print(MovedProduct("mm", "multiplied before it is gathered", "model.py:3"))
        moved  mm: multiplied before it is gathered  at model.py:3
    """

    root: str
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"moved  {self.root}: {self.what}{_at(self.where)}"


@dataclass(frozen=True, slots=True)
class Failed:
    """One of the passes that could not be done, which is a mistake of ours: the graph stayed as it
    was before it.

    Attributes:
        stage: Which of them.
        why: The error.

    Examples:
        >>> Failed("chains", "KeyError: 3").stage
        'chains'
    """

    stage: str
    why: str

    def __str__(self) -> str:
        return f"failed {self.stage}: {self.why}"


@dataclass(frozen=True, slots=True)
class Report:
    """All graphs since the last `clear`, or one of them.

    Attributes:
        fused: Statements that were made.
        left: What stayed as it was.
        once: What is computed once.
        failed: Passes that failed.
        moved: Products that are computed otherwise.

    Examples:
        >>> Report().fused
        ()
    """

    fused: tuple[Fused, ...] = ()
    left: tuple[Left, ...] = ()
    once: tuple[Once, ...] = ()
    failed: tuple[Failed, ...] = ()
    moved: tuple[MovedProduct, ...] = ()

    def __str__(self) -> str:
        every = (*self.fused, *self.moved, *self.once, *self.left, *self.failed)
        return "\n".join(map(str, every)) or "nothing to fuse"

    def _repr_html_(self) -> str:
        rows = [
            *(
                ("fused", one.where or one.root, f"{one.statement} ({_when(one)})")
                for one in self.fused
            ),
            *(("moved", one.where or one.root, one.what) for one in self.moved),
            *(("once", ", ".join(one.nodes), ", ".join(one.sources)) for one in self.once),
            *(("left", one.where or one.root, one.why) for one in self.left),
            *(("failed", one.stage, one.why) for one in self.failed),
        ]
        return table(("", "where", "what"), rows) if rows else "<p>nothing to fuse</p>"


def _at(where: str) -> str:
    return f"  at {where}" if where else ""


_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')


def where_of(node: Node) -> str:
    """The module and the line of the program that a node comes from; of the backward pass, what its
    gradient is of.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    named = [str(path) for path, *_ in stack.values()]
    module = re.sub(r"^L\['\w+'\]\.?", "", named[-1]) if named else ""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    line = f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""
    return ", ".join(filter(None, (module, line)))


def _when(one: Fused) -> str:
    if not one.nodes:
        return ", ".join(one.notes)
    return f"{'backward' if one.backward else 'forward'}, {one.saved:,} elements not written"


_reports: list[Report] = []
MOST_REPORTS, MOST_WRITTEN = 1000, 4096
#: Statements that were put into graphs in this process.
_written: dict[str, None] = {}


def note_written(statement: str) -> None:
    """A statement is put into a graph, of which a report will tell."""
    keep(_written, _summed(statement), None, MOST_WRITTEN)


def _summed(statement: str) -> str:
    """A statement whether or not it adds to what is there, which a later pass decides."""
    return statement.replace(" += ", " = ", 1)


def add(report: Report) -> None:
    _reports.append(report)
    del _reports[:-MOST_REPORTS]
    if "fusion" in settings.log.split(","):
        print(f"insum: fusion\n  {str(report).replace(chr(10), chr(10) + '  ')}", file=sys.stderr)


def note_run(statement: str) -> None:
    """A statement runs for the first time. One that was put into no graph here came from a cache of
    torch's: that it is there is all that is left to tell.
    """
    if _summed(statement) not in _written:
        note = "compiled by an earlier process: what was left, and where, that one has told"
        _reports.append(Report(fused=(Fused(statement, "", (), False, 0, (note,)),)))
        del _reports[:-MOST_REPORTS]


def report() -> Report:
    """What was fused and what was left, of all graphs that were compiled since `clear`. Of graphs
    that torch had in its caches, statements are there once they have run.

    Returns:
        One report of them all.

    Examples:
        >>> import insum.fusion
        >>> insum.fusion.clear()
        >>> print(insum.fusion.report())
        nothing to fuse
    """
    every = [
        tuple(one for r in _reports for one in getattr(r, name))
        for name in ("fused", "left", "once", "failed", "moved")
    ]
    return Report(*every)


def clear() -> None:
    """Forget the reports so far.

    Examples:
        >>> clear()
        >>> print(report())
        nothing to fuse
    """
    _reports.clear()
