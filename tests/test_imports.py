"""Imports point one way, are lazy where they are heavy, and change nothing.

The order is the order of the stages (docs/design.md). A new module must be given a place in
`RANKS`.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "insum"

#: What the ops hand DTensors to; the rest of that folder rests on layers.
STATEMENTS_OVER_DTENSORS = {
    f"distributed.{name}" for name in ("placements", "cost", "local", "accumulation", "dispatch")
}

#: From the bottom to the top. A module may import from its own group and from those before it. The
#: longest matching name decides, so that `lang.derive` stands apart from `lang`. "" is the
#: package's own `__init__`: the public names.
RANKS: tuple[frozenset[str], ...] = (
    frozenset({"accepted", "bounded", "errors", "fingerprints", "notebook", "settings", "compat"}),
    frozenset({"memory"}),
    frozenset({"facts"}),
    frozenset({"lang"}),
    frozenset({"plan"}),
    frozenset({"codegen"}),
    frozenset(
        {
            "lang.derive",
            "graph",
            "host",
            "runtime",
        }
    ),
    frozenset({"call"}),
    frozenset({"ops", *STATEMENTS_OVER_DTENSORS}),
    frozenset({"explanation", "export"}),
    frozenset({"formats", "api", "together", "fusion", "distributed.explained"}),
    frozenset({""}),
    frozenset({"cli", "demo", "doctor", "bench", "nn", "distributed", "__main__"}),
)
#: The test kit stands beside the order: it must not rest on what it tests.
TESTING_MAY_IMPORT = frozenset({"testing", "lang", "errors"})
#: Modules of it that nothing else of it rests on: they work on the whole library.
TESTING_OVER_ALL = (
    "testing.soak",
    "testing.as_on_a_gpu",
    "testing.hostile",
    "testing.drawn_programs",
)
#: What it does on request: call the public function that it tests, count compilations.
TESTING_MAY_CALL = TESTING_MAY_IMPORT | {"api", "compat"}

OPTIONAL = frozenset(
    {"scipy", "matplotlib", "rich", "typer", "torch_geometric", "hypothesis", "pandas"}
)
TRITON_HOMES = ("runtime.launch", "runtime.compiling", "runtime.binaries")


@dataclass(frozen=True)
class Import:
    """One imported module: where, what, and whether importing the importer runs it."""

    importer: str
    line: int
    name: str
    runs_on_import: bool

    def __str__(self) -> str:
        return f"{self.importer or 'insum'}:{self.line} imports {self.name}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(name: str, text: str, *, is_package: bool) -> Iterator[Import]:
    """Every import of a module, in whatever body, with relative names resolved."""
    package = ["insum", *filter(None, name.split("."))]
    package = package if is_package else package[:-1]

    def visit(node: ast.AST, runs: bool) -> Iterator[Import]:
        for found in _names(node, package):
            yield Import(name, getattr(node, "lineno", 0), found, runs)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            runs = False
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, runs)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, runs)

    yield from visit(ast.parse(text), True)


def _names(node: ast.AST, package: list[str]) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module, names, level):
            base = ".".join(
                [*(package[: len(package) - level + 1] if level else []), *filter(None, [module])]
            )
            # `from insum import errors` imports a module, `from insum import insum` the package.
            return [
                f"{base}.{alias.name}" if _is_module(f"{base}.{alias.name}") else base
                for alias in names
            ]
        case ast.Call(
            ast.Name("__import__")
            | ast.Attribute(attr="import_module")
            | ast.Name("import_module"),
            [ast.Constant(str(name)), *_],
        ):
            return [name]
    return []


def _is_module(name: str) -> bool:
    return name.removeprefix("insum.") in MODULES and name.startswith("insum.")


@functools.cache
def every_import() -> tuple[Import, ...]:
    texts = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    return tuple(
        found
        for name, path in MODULES.items()
        for found in imports_of(name, texts[name], is_package=path.name == "__init__.py")
    )


def top(name: str) -> str:
    return name.partition(".")[0]


def rank(name: str) -> int:
    """The place of a module of insum, given without the leading `insum.`."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for place, group in enumerate(RANKS):
            if prefix in group:
                return place
    raise AssertionError(
        f"insum.{name} has no place in RANKS of tests/test_imports.py; give it one"
    )


def inner(found: Import) -> str:
    return found.name.removeprefix("insum").removeprefix(".")


# --- the order ------------------------------------------------------------------------------------


def test_imports_point_downward() -> None:
    wrong = []
    for found in every_import():
        if top(found.name) != "insum" or top(found.importer) == "testing":
            continue
        if not found.importer and not found.runs_on_import:  # for type checkers alone
            continue
        if top(inner(found)) == "testing" or rank(inner(found)) > rank(found.importer):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports() -> None:
    needed: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in every_import():
        if found.runs_on_import and top(found.name) == "insum" and inner(found) != found.importer:
            needed[found.importer].add(inner(found))
    graphlib.TopologicalSorter(needed).prepare()  # a CycleError names the circle


def test_every_module_has_a_place() -> None:
    assert all(rank(name) >= 0 for name in MODULES if top(name) != "testing")


def test_testing_rests_only_on_the_language() -> None:
    found = [f for f in every_import() if top(f.importer) == "testing" and top(f.name) == "insum"]
    found = [f for f in found if f.importer not in TESTING_OVER_ALL]
    wrong = [
        str(f)
        for f in found
        if top(inner(f)) not in (TESTING_MAY_IMPORT if f.runs_on_import else TESTING_MAY_CALL)
    ]
    assert not wrong, "\n".join(wrong)


def test_triton_is_imported_by_the_runtime_alone_and_late() -> None:
    wrong = [
        str(f)
        for f in every_import()
        if top(f.name) == "triton" and (f.importer not in TRITON_HOMES or f.runs_on_import)
    ]
    assert not wrong, "\n".join(wrong)


def test_optional_packages_are_imported_inside_functions() -> None:
    wrong = [str(f) for f in every_import() if top(f.name) in OPTIONAL and f.runs_on_import]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "text", "expected"),
    [
        (
            "api",
            "import torch\nfrom insum.settings import settings",
            [("torch", True), ("insum.settings", True)],
        ),
        ("lang.bind", "from .expr import Access", [("insum.lang.expr", True)]),
        ("lang.bind", "from ..errors import InsumError", [("insum.errors", True)]),
        ("api", "from insum import errors", [("insum.errors", True)]),
        ("demo", "from insum import insum", [("insum", True)]),
        ("api", "def f():\n    import triton.language as tl", [("triton.language", False)]),
        ("api", "class A:\n    import triton", [("triton", True)]),
        (
            "api",
            "if TYPE_CHECKING:\n    import scipy\nelse:\n    import rich",
            [("scipy", False), ("rich", True)],
        ),
        ("api", "async def f():\n    if True:\n        import rich", [("rich", False)]),
        ("api", "try:\n    import triton\nexcept ImportError:\n    pass", [("triton", True)]),
        (
            "api",
            "import importlib\nimportlib.import_module('triton')",
            [("importlib", True), ("triton", True)],
        ),
        ("api", "TEXT = 'import triton'", []),
    ],
)
def test_the_reader_of_imports(importer: str, text: str, expected: list[tuple[str, bool]]) -> None:
    assert [
        (found.name, found.runs_on_import) for found in imports_of(importer, text, is_package=False)
    ] == expected


# --- what importing costs and changes -------------------------------------------------------------

#: The share of the time of `import torch` that `import insum` may take after it (4 to 6 % today).
#: A share because machines differ, and processor time because other tests run beside this one.
SHARE, TRIES = 0.1, 3


def python(*args: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(SOURCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


#: Torch leaves more objects behind than a collection looks at in 80 ms, and some import after it
#: sets that off: it is no cost of ours.
TIMES = """
import gc, time
start = time.process_time(); import torch; there = time.process_time()
gc.collect(); gc.freeze()
begun = time.process_time(); import insum; done = time.process_time()
print(there - start, done - begun)
"""


def test_import_is_quick() -> None:
    tries = []
    for _ in range(TRIES):
        of_torch, ours = map(float, python("-c", TIMES).stdout.split())
        tries.append((ours / of_torch, ours, of_torch))
        if ours < of_torch * SHARE:
            return
    _, ours, of_torch = min(tries)
    raise AssertionError(
        f"import insum takes {1000 * ours:.0f} ms after the {1000 * of_torch:.0f} ms of import "
        f"torch; {SHARE:.0%} of it are allowed"
    )


STATE = r"""
import hashlib, json, logging, os, random, sys, warnings
import numpy, torch

def digest(thing):
    return hashlib.sha256(str(thing).encode()).hexdigest()[:12]

def state():
    cudnn = torch.backends.cudnn
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "seed": torch.initial_seed(),
        "rng": digest(torch.get_rng_state().tolist()),
        "python rng": digest(random.getstate()),
        "numpy rng": digest(numpy.random.get_state()[1].tolist()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic, warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "deterministic fill": torch.utils.deterministic.fill_uninitialized_memory,
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32],
        "cuda initialised": torch.cuda.is_initialized(),
        "environment": sorted(os.environ.items()),
        "warnings": [str(f) for f in warnings.filters],
        "logging": [str(h) for h in logging.getLogger().handlers] + [logging.getLogger().level],
        "excepthook": repr(sys.excepthook),
    }

before, loaded = state(), set(sys.modules)
import insum
after = state()
new = sorted({name.partition(".")[0] for name in set(sys.modules) - loaded})
changed = {k: [before[k], after[k]] for k in before if before[k] != after[k]}
print(json.dumps({"changed": changed, "new": new}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    return json.loads(python("-c", STATE).stdout.splitlines()[-1])


def test_import_changes_no_state(imported: dict[str, object]) -> None:
    assert imported["changed"] == {}


def test_import_loads_no_heavy_package(imported: dict[str, object]) -> None:
    new = imported["new"]
    assert isinstance(new, list) and "insum" in new
    assert not {"triton", *OPTIONAL} & set(new)


def test_type_checkers_know_what_is_imported_late() -> None:
    """Where nothing is said under ``TYPE_CHECKING``, such a name is ``Any`` to them."""
    import insum

    (said,) = [
        node
        for node in ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    known = {
        alias.asname or alias.name
        for node in said.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(insum._LAZY) == known
