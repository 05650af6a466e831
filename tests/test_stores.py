"""Every store that a process fills while it runs is in the table of docs/stores.md, and everything
in the table is there; bounds are kept.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import insum
from insum import bounded, memory
from insum.call.prepared import MOST_SIZES, kinds_of
from insum.call.request import request_of
from insum.runtime import launch
from insum.settings import SettingValues, _one, _seen

ROOT = Path(insum.__file__).parent
PAGE = Path(__file__).parent.parent / "docs" / "stores.md"
#: Calls that make something which can be filled.
MAKERS = ("dict", "set", "list", "defaultdict", "deque", "WeakKeyDictionary", "Counter", "Entry")
#: Methods that change what they are called on.
CHANGES = ("add", "append", "clear", "extend", "insert", "keep", "pop", "setdefault", "update")


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(ROOT.rglob("*.py")):
        name = ".".join(("insum", *file.relative_to(ROOT).with_suffix("").parts))
        yield name.removesuffix(".__init__"), ast.parse(file.read_text(encoding="utf-8"))


def _called(node: ast.AST) -> str:
    """The last part of the name of what is called."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _containers(tree: ast.Module) -> set[str]:
    """Module-level names that hold something which can be filled."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            fillable = isinstance(
                node.value,
                ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp,
            )
            if fillable or _called(node.value) in MAKERS:
                found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


@functools.cache  # three look at it
def _functions(tree: ast.Module) -> list[ast.AST]:
    """All that is inside of functions, once."""
    found, left = [], list[tuple[ast.AST, bool]]([(tree, False)])
    while left:
        node, inside = left.pop()
        inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if inside:
            found.append(node)
        left += [(inner, inside) for inner in ast.iter_child_nodes(node)]
    return found


def _changed(tree: ast.Module) -> set[str]:
    """Names, and last parts of dotted ones, that functions change what is behind of."""
    found: set[str] = set()
    for node in _functions(tree):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                found.add(_name(node.func.value))
            if _called(node) == "keep" and node.args:
                found.add(_name(node.args[0]))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(_name(node.value))
    return found - {""}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.IfExp):  # (this if that else _other).keep(...)
        return _name(node.orelse)
    if isinstance(node, ast.BoolOp):
        return _name(node.values[-1])
    return node.id if isinstance(node, ast.Name) else ""


def _globals(tree: ast.Module) -> set[str]:
    """Names that functions bind anew."""
    return {n for node in _functions(tree) if isinstance(node, ast.Global) for n in node.names}


def _caches(tree: ast.Module) -> set[str]:
    """Functions that remember what they gave."""
    found = set()
    for node in _functions(tree):
        if isinstance(node, ast.FunctionDef):
            texts = [ast.unparse(d) for d in node.decorator_list]
            if any(re.search(r"\b(lru_)?cache\b", text) for text in texts):
                found.add(node.name)
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            if any(_called(n.func) in ("lru_cache", "cache") for n in inner):
                found.add(node.name)
    return found


def stores() -> set[str]:
    """All stores of the package, by module and name."""
    trees = dict(_trees())
    changed = {name: _changed(tree) for name, tree in trees.items()}
    found = set()
    for module, tree in trees.items():
        last = module.rpartition(".")[2]
        for name in _containers(tree):
            elsewhere = any(f"{last}.{name}" in names for names in changed.values())
            if name in changed[module] or elsewhere:
                found.add(f"{module}.{name}")
        found |= {f"{module}.{name}" for name in _globals(tree) | _caches(tree)}
    return found


def listed() -> dict[str, tuple[str, ...]]:
    """The rows of the table for modules: what each line says about a store."""
    text = PAGE.read_text(encoding="utf-8").partition("## On objects")[0]
    rows = re.findall(r"^\| `([\w.]+)` \|(.*)\|$", text, re.MULTILINE)
    found = {name: tuple(cell.strip() for cell in rest.split(" | ")) for name, rest in rows}
    assert len(found) == len(rows), "a store is listed twice"
    return found


def test_every_store_is_listed() -> None:
    found, table = stores(), listed()
    assert found - set(table) == set(), "not in docs/stores.md"
    assert set(table) - found == set(), "in docs/stores.md, but no longer there"


def test_every_store_has_key_bound_and_invalidation() -> None:
    for name, cells in listed().items():
        assert len(cells) == 4 and all(cells), name


def _resolved(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def bounds() -> list[tuple[str, str, int]]:
    """Bounds that have a name, of everything in the tables."""
    text = PAGE.read_text(encoding="utf-8")
    return [
        (name, at, int(number.replace(",", "")))
        for name, number, at in re.findall(
            r"^\| `([\w.]+)` \|.*?\| ([\d,]+) \(`([\w.]+)`\) \|", text, re.MULTILINE
        )
    ]


@pytest.mark.parametrize(("name", "at", "number"), bounds(), ids=lambda v: str(v))
def test_bounds_are_what_the_page_says(name: str, at: str, number: int) -> None:
    assert _resolved(at) == number


def test_caches_have_the_size_that_the_page_says() -> None:
    for name, (_, _, bound, _) in listed().items():
        found = _resolved(name)
        if hasattr(found, "cache_parameters"):
            most = found.cache_parameters()["maxsize"]
            said = re.match(r"[\d,]+", bound)
            if most is not None:
                assert said is not None and int(said.group().replace(",", "")) == most, name
            else:
                assert not said, f"{name} has no bound"


# --- bounds are kept ------------------------------------------------------------------------------


def test_the_oldest_goes() -> None:
    store: dict[int, int] = {}
    for number in range(100):
        assert bounded.keep(store, number, number, most=10) == number
    assert list(store) == list(range(90, 100))
    assert bounded.keep(store, 95, -1, most=10) == 95


def test_things_of_one_tensor(monkeypatch: pytest.MonkeyPatch, nothing_remembered: None) -> None:
    monkeypatch.setattr(memory, "MOST_THINGS", 8)
    index = torch.arange(5)
    entry = memory.entry_of(index)
    entry.keep("facts", 1)
    before = memory.report().nbytes
    for number in range(50):
        entry.keep((number,), torch.zeros(4))
    assert len(entry.things) == 8 and entry.get("facts") == 1 and entry.get((49,)) is not None
    assert memory.report().nbytes - before == 7 * 16
    for limit in range(1000):
        entry.note_range((0, limit))
    assert len(entry.looked) <= memory.MOST_RANGES


def test_sizes_of_one_kind() -> None:
    statement = "y[i] = 3 * stored[i]"
    for count in range(2 * MOST_SIZES):
        insum.insum(statement, stored=torch.ones(count))
    (kind,) = kinds_of(request_of(statement, None, None, ()).form).calls
    assert len(kind.bound) == MOST_SIZES


def test_settings_that_were_met() -> None:
    for number in range(1200):
        _one(SettingValues(memory=number))
    assert len(_seen) <= 1024


def test_what_was_said() -> None:
    bounded.say_again()
    assert bounded.is_first("a text") and not bounded.is_first("a text")
    for number in range(2 * bounded.MOST_SAID):
        bounded.is_first(f"text {number}")
    assert len(bounded._said) == bounded.MOST_SAID
    bounded.say_again()


def test_loaded_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST_LOADED", 3)
    monkeypatch.setattr(launch, "loaded", {})
    for number in range(10):
        launch.keep_loaded(number, lambda programs, arguments: None)
    assert list(launch.loaded) == [7, 8, 9]
