"""What holds for the repository as a whole: no trace of one machine, a licence, and a docstring
with an example for every public name.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

import insum

ROOT = Path(__file__).parent.parent

#: Absolute paths of the machine on which something was written. Assembled, so that this file does
#: not name them itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:" + "|".join(["work", "root", "home"]) + r")/")
#: Hosts from which packages come: where to install from is the user's choice.
HOSTS = [
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("download", "pytorch", "org"),
    ("anaconda", "org"),
    ("npmjs", "com"),
    ("npmjs", "org"),
]
REGISTRY = re.compile("|".join(re.escape(".".join(host)) for host in HOSTS))
#: Public names that are plain values and cannot carry a docstring.
VALUES = frozenset({"__version__"})


def repository_files() -> list[Path]:
    """Files that are tracked or would be with `git add .`; in an unpacked archive, which has no
    git, the files of its known folders.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        return [
            ROOT / name
            for name in listed.stdout.decode().split("\0")
            if name and (ROOT / name).is_file()
        ]
    folders = [ROOT / name for name in ("src", "tests", "docs", "benchmarks", ".ci")]
    files = [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return files + [path for path in ROOT.iterdir() if path.is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # an image
        return ""


def places(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in repository_files()
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if pattern.search(line)
    ]


def test_the_files_are_seen() -> None:
    assert {ROOT / "pyproject.toml", Path(__file__)} <= set(repository_files())


def test_no_path_of_a_machine() -> None:
    assert places(MACHINE_PATH) == []


def test_no_package_registry() -> None:
    assert places(REGISTRY) == []


@pytest.mark.parametrize(
    "text", ["see /" + "work/main", '"/' + 'root/.cache"', "(/" + "home/a)", "file:///" + "home/a"]
)
def test_the_pattern_finds_paths(text: str) -> None:
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize(
    "text", ["src/" + "work/main", "https://example.org/" + "home/", "the work/" + "home balance"]
)
def test_the_pattern_leaves_other_text_alone(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (
        "Apache License" in text
        and "Version 2.0, January 2004" in text
        and "END OF TERMS AND CONDITIONS" in text
    )


def test_public_names_exist() -> None:
    assert insum.__all__ and len(set(insum.__all__)) == len(insum.__all__)
    assert [name for name in insum.__all__ if not hasattr(insum, name)] == []


def test_public_names_have_a_docstring_with_an_example() -> None:
    """The doctests themselves are run by `make test`."""
    names = [name for name in insum.__all__ if name not in VALUES]
    assert [name for name in names if ">>>" not in (own_doc(getattr(insum, name)) or "")] == []


def own_doc(thing: object) -> str | None:
    """The docstring of the thing itself, never one inherited from a base class; an instance speaks
    through its class.
    """
    kind = (
        thing
        if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)
        else type(thing)
    )
    return kind.__doc__


def pages() -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".md"]


def test_files_that_pages_name_are_there() -> None:
    """Paths in `code`, from the root or from the package."""
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages()
        for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|toml))`", text_of(page))
        if not any((base / name).exists() for base in (ROOT, page.parent, ROOT / "src" / "insum"))
    ]
    assert missing == []


def test_the_map_of_the_source_names_modules_that_are_there() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|(.*)$", text_of(ROOT / "docs" / "design.md"), re.MULTILINE)
    package = ROOT / "src" / "insum"
    missing = [
        f"{folder}/{name}"
        for folder, row in rows
        for name in re.findall(r"`(\w+\.py)`", row)
        if not (package / folder / name).exists()
    ]
    assert len(rows) > 10 and missing == []


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without those of long texts: docstrings, and kernels as text."""
    texts = {
        line
        for node in ast.walk(function)
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return (function.end_lineno or function.lineno) - function.lineno + 1 - len(texts)


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {code_lines(node)} lines"
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > 60
    ]
    assert not long, "\n".join(long)


def type_names(tree: ast.Module) -> set[str]:
    """Classes and aliases of types at the top of a module. An underscore makes no other name."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        names |= {t.id for t in targets if isinstance(t, ast.Name) and is_type_name(t.id)}
    return {name.lstrip("_") for name in names}


def is_type_name(name: str) -> bool:
    """Whether it is written as types are, and not as constants are."""
    bare = name.lstrip("_")
    return bare[:1].isupper() and not bare.isupper()


def test_type_names_are_found() -> None:
    text = (
        "class A: pass\nclass _Bc: pass\nDe: X = int\n_Fg = int\nHI = 3\njk = 4\nclass L:\n  M = 1"
    )
    assert type_names(ast.parse(text)) == {"A", "Bc", "De", "Fg", "L"}


def test_no_type_name_has_two_meanings() -> None:
    modules = defaultdict(list)
    for path in sorted((ROOT / "src" / "insum").rglob("*.py")):
        for name in type_names(ast.parse(path.read_text(encoding="utf-8"))):
            modules[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
