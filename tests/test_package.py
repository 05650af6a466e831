"""What is built and shipped: the wheel and the source archive, installed where nothing else of the
repository is, and used where there is no Triton.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import insum

ROOT = Path(__file__).parent.parent
pytest.importorskip("hatchling", reason="hatchling is not installed: nothing can be built")

#: The first example of the README, a layer and what is told of Triton, without it.
USED = """
import sys
sys.modules["triton"] = None
{example}
import insum.nn, insum.doctor
assert insum.__file__.startswith({place!r}), insum.__file__
layer = insum.nn.SparseLinear.from_dense(torch.nn.Linear(8, 4), density=0.5)
layer(torch.randn(3, 8)).sum().backward()
found = {{one.what: one for one in insum.doctor.report()}}
assert not found["triton"].usable and "triton" in found["triton"].why.lower(), found["triton"]
assert not found["fused kernels here"].usable
page = insum.explain("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(3), gpu="sm_90")
assert "@triton.jit" in page.fused
try:
    with insum.settings(require_fused=True):
        insum.insum("y[i] = A[i,j]", A=torch.ones(2, 3))
except insum.NotFusedError as error:
    print(error)
"""


def built(folder: Path, target: str, source: Path = ROOT) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, which so is seen to hold what a wheel needs."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as held:
        held.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return built(tmp_path_factory.mktemp("wheel"), "wheel", source)


def test_the_archives_hold_what_they_should(archive: Path, wheel: Path) -> None:
    with tarfile.open(archive) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    wanted = ("README.md", "LICENSE", "CHANGELOG.md", "docs/tutorial.md", "mkdocs.yml", "Makefile")
    assert {*wanted} <= names and "tests/test_package.py" in names
    modules = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    shipped = set(zipfile.ZipFile(wheel).namelist())
    assert modules <= shipped and "insum/py.typed" in shipped
    others = {n for n in shipped if not n.startswith(("insum/", "insum-"))}
    assert not others and wheel.name.endswith("-py3-none-any.whl")


def test_the_metadata(wheel: Path) -> None:
    held = zipfile.ZipFile(wheel)
    (name,) = [n for n in held.namelist() if n.endswith(".dist-info/METADATA")]
    found = message_from_bytes(held.read(name))
    assert found["Name"] == "insum" and found["Version"] == insum.__version__
    assert found["Requires-Python"] == ">=3.10"
    needed = [n for n in found.get_all("Requires-Dist", []) if "extra ==" not in n]
    # on other systems than Linux nothing is asked for that is not there
    assert sorted(re.split(r"[<>=;]", n)[0].strip() for n in needed) == ["numpy", "torch", "triton"]
    assert all("Linux" in n for n in needed if n.startswith("triton"))
    classes = found.get_all("Classifier", [])
    assert all(f"Programming Language :: Python :: 3.{v}" in classes for v in range(10, 15))
    entries = next(n for n in held.namelist() if n.endswith("entry_points.txt"))
    assert b"torch_dynamo_backends" in held.read(entries)


def test_it_runs_from_the_wheel_and_without_triton(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(place)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = text.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", USED.format(example=example, place=str(place))],
        cwd=tmp_path,
        env={"PYTHONPATH": str(place), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no fused kernel" in done.stdout


def test_the_changelog_has_a_section_for_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert sections[0] == "Unreleased" and insum.__version__ in sections
