"""The whole text of the applications' kernels and of their gradients' kernels, as kept in
tests/golden.

After a change that was meant: ``pytest tests/test_golden.py --update-golden``, and read the
difference as part of the change.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

import applications
from applications import Application, Call
from insum.runtime import inspection

pytestmark = pytest.mark.compile_only

FOLDER = Path(__file__).parent / "golden"
SUFFIX = ".py.txt"


def usual() -> dict[str, Application]:
    """Made anew for each test: others forget what their makers declared of the index tensors."""
    return {file_name(a.name): a for a in applications.usual(filled=False)}


def file_name(name: str) -> str:
    return re.sub(r"\W+", "_", name).lower()


NAMES = list(usual())


def text_of(call: Call) -> str:
    """Every kernel of a call as it is written to disk: header and source."""
    program = inspection.plan_only(call.problem(), call.values)
    return "\n\n".join(
        f"{one.header}\n{one.kernel.source}" for step in program.steps for one in step.launches
    )


def page_of(application: Application) -> str:
    """All kernels of an application, forward first."""
    parts = [
        f"# ==== {call.name} ====\n\n{text_of(call)}" for call in application.calls(filled=False)
    ]
    return "\n\n".join(parts)


@pytest.mark.parametrize("name", NAMES)
def test_kernels(name: str, update_golden: bool) -> None:
    file, now = FOLDER / f"{name}{SUFFIX}", page_of(usual()[name])
    if update_golden:
        file.write_text(now, encoding="utf-8")
    kept = file.read_text(encoding="utf-8") if file.exists() else ""
    difference = "\n".join(
        difflib.unified_diff(
            kept.splitlines(), now.splitlines(), str(file.name), "now", lineterm=""
        )
    )
    assert kept == now, (
        "the generated text has changed; if that was meant, run pytest --update-golden\n"
        f"{difference}"
    )


def test_no_file_is_left_over() -> None:
    assert {f.name.removesuffix(SUFFIX) for f in FOLDER.glob(f"*{SUFFIX}")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_text_does_not_depend_on_the_run(name: str) -> None:
    """Two plans from tensors of their own give the same text."""
    assert page_of(usual()[name]) == page_of(usual()[name])
