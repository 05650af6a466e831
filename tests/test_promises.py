"""The page "What we promise": every test that it names is there, and every promise names one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import insum
from insum.testing import tolerance

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert any(test.startswith("test_") for test in tests)
    assert not name or name in tests


@pytest.mark.parametrize("title", SECTIONS)
def test_every_promise_names_a_test(title: str) -> None:
    assert re.search(r"`tests/[\w/]+\.py", SECTIONS[title])


def test_the_page_holds_what_was_asked_for() -> None:
    wanted = ("stale", "Threads", "disk", "Security", "order of sums", "Accuracy", "Fusion")
    assert [w for w in wanted if not any(w in title for title in SECTIONS)] == []


def bounds() -> Iterator[tuple[torch.dtype, float]]:
    for names, bound in re.findall(r"^\| ([\w, ]+) \| ([\de.-]+) \|$", PAGE, re.MULTILINE):
        for name in names.replace("integers", "int64").replace("booleans", "bool").split(", "):
            yield getattr(torch, name), float(bound)


def test_bounds_are_those_of_the_tests() -> None:
    found = dict(bounds())
    assert len(found) == 8
    assert {dtype: tolerance(dtype).rtol for dtype in found} == found


def test_the_same_bits() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        x, d = torch.randn(4000, 3), torch.randint(0, 7, (4000,))
        call = insum.compile("y[d[e],f] = x[e,f]", out_shape=(7, 3))
        first = call(x=x, d=d)
        assert all(torch.equal(call(x=x, d=d), first) for _ in range(20))
        assert all(torch.equal(call(x=x, d=d.clone()), first) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
