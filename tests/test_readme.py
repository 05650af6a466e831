"""The documentation runs: every python block of README.md and docs/*.md, in order, the blocks of
one page sharing one namespace.

A block whose preceding line is `<!-- not run: reason -->` is left out and reported as skipped, with
its reason. A block that holds `>>>` prompts is checked as a doctest; any other is executed. One
page is one test, since its blocks build on each other.
"""

from __future__ import annotations

import doctest
import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS

_BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)```(?:python|py|pycon)\b[^\n]*\n(?P<code>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """A python block: the line of its first line of code (from 1), its code, and why it is not run,
    if so.
    """

    line: int
    code: str
    not_run: str | None


def blocks(text: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        above = text[: match.start()].rstrip().rpartition("\n")[2]
        note = _NOT_RUN.fullmatch(above.strip())
        found.append(
            Block(
                text.count("\n", 0, match.start("code")) + 1,
                dedent(match["code"]),
                note["reason"] if note else None,
            )
        )
    return found


def run(block: Block, namespace: dict[str, object], filename: str) -> None:
    """Run one block so that a traceback shows the line of the page."""
    if ">>>" not in block.code:
        exec(compile("\n" * (block.line - 1) + block.code, filename, "exec"), namespace)
        return
    example = doctest.DocTestParser().get_doctest(
        block.code, namespace, filename, filename, block.line - 1
    )
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(example, out=report.append, clear_globs=False)
    namespace.update(example.globs)
    assert not report, "".join(report)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_blocks_run(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    text = page.read_text(encoding="utf-8")
    # A name that is no file: torch.compile reads the whole file of what it compiles as Python.
    # Tracebacks find their lines here.
    name = f"<{page_name(page)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    for block in blocks(text):
        if block.not_run is None:
            run(block, namespace, name)


def left_out() -> list[object]:
    found = [
        (page, block)
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.not_run is not None
    ]
    return [
        pytest.param(block.not_run, id=f"{page_name(page)}:{block.line}") for page, block in found
    ]


if left_out():  # else pytest would report an empty set of parameters as a skip

    @pytest.mark.parametrize("reason", left_out())
    def test_block_left_out(reason: str) -> None:
        assert reason, "a block that is not run needs a reason"
        pytest.skip(reason)


@pytest.mark.parametrize("name", ["README.md", "docs/language.md"])
def test_pages_with_examples_have_them(name: str) -> None:
    assert (
        sum(block.not_run is None for block in blocks((ROOT / name).read_text(encoding="utf-8")))
        >= 5
    )


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text)
    assert [
        t
        for t in targets
        if "://" not in t and not t.startswith("mailto:") and not (page.parent / t).exists()
    ] == []


# --- the reader itself ----------------------------------------------------------------------------

SAMPLE = """\
```python
x = 1
```

<!-- not run: needs a GPU -->
```python
raise SystemExit
```

- in a list:

  ```python
  x += 1
  ```

```text
not python
```

```python
>>> x
2
```
"""


def test_the_reader_of_blocks() -> None:
    assert blocks(SAMPLE) == [
        Block(2, "x = 1\n", None),
        Block(7, "raise SystemExit\n", "needs a GPU"),
        Block(13, "x += 1\n", None),
        Block(21, ">>> x\n2\n", None),
    ]


def test_a_wrong_block_is_noticed() -> None:
    namespace: dict[str, object] = {}
    for block in blocks(SAMPLE):
        if block.not_run is None:
            run(block, namespace, "sample")
    with pytest.raises(AssertionError, match="Expected:"):
        run(Block(1, ">>> x\n3\n", None), namespace, "sample")
    with pytest.raises(AssertionError):
        run(Block(1, "assert x == 3\n", None), namespace, "sample")
