"""The reference holds every public name, and every public name says what it does."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
MODULES = (
    "insum",
    "insum.distributed",
    "insum.formats",
    "insum.nn",
    "insum.fusion",
    "insum.export",
    "insum.testing",
)
DIRECTIVES = {
    name
    for page in (DOCS / "reference").glob("*.md")
    for name in re.findall(r"^::: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    """A page of a module shows what its ``__all__`` lists, but for names that are modules too."""
    module = importlib.import_module(name)
    assert name in DIRECTIVES
    own = {m.name for m in pkgutil.iter_modules(getattr(module, "__path__", ()))}
    shadowed = [n for n in module.__all__ if n in own and not inspect.ismodule(getattr(module, n))]
    for one in shadowed:
        shown = f"{name}.{one}.{one}"
        assert shown in DIRECTIVES or one == "settings", f"{shown} has no ::: of its own"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_says_what_it_takes_and_gives_with_an_example(name: str) -> None:
    """In Google's style, which the reference reads; that the examples run, doctest tells."""
    module = importlib.import_module(name)
    things = [(n, getattr(module, n)) for n in module.__all__]
    wanted = [(n, x) for n, x in things if inspect.isclass(x) or inspect.isroutine(x)]
    assert [(n, missing) for n, x in wanted if (missing := unsaid(x))] == []


def unsaid(thing: Any) -> list[str]:
    """The sections that a docstring lacks."""
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return [] if text else ["anything"]
    wanted: dict[str, tuple[str, ...]] = {"Examples:": ()}
    signature = inspect.signature(thing)
    if any(not n.startswith("_") and n not in ("args", "kwargs") for n in signature.parameters):
        wanted["Args:"] = ("Attributes:",)
    if inspect.isroutine(thing) and signature.return_annotation not in (None, "None"):
        wanted["Returns:"] = ("Yields:",)
    lines = text.splitlines()
    if any(line.startswith(">>>") for line in lines):
        return ["examples under a heading"]
    return [head for head, others in wanted.items() if not {head, *others} & {*lines}]


def test_links_between_pages_lead_somewhere() -> None:
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in text, page
