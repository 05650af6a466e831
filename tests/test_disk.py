"""Disks that are full, read-only or broken, writers that are killed, files that are anything:
insum works on without what it cannot keep, says so once, and computes what it always does.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from insum.codegen.kernel import Kernel
from insum.plan.config import Config
from insum.runtime import cache, disk, launch

KERNEL = Kernel("insum_kernel", "@triton.jit\ndef insum_kernel(x_ptr):\n    return\n", ("x_ptr",))
HEADER = '"""y[i] = x[i]"""'
KEY = cache.Key("plan", "i:4", "cpu", "1", "2", "3")
ENTRY = cache.CachedChoice(KEY, "y[i] = x[i]", (Config(m=16),), 5.0, 6.0, "quick")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("triton")
    made = tmp_path / "cache"
    monkeypatch.setenv("INSUM_CACHE_DIR", str(made))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "loaded_kernels", {})
    disk.warn_unwritten.cache_clear()
    disk._usable.cache_clear()
    cache.forget()
    return made


def load() -> Any:
    launch.forget()
    return launch.load(KERNEL, HEADER)


def remember() -> Any:
    cache.remember(ENTRY)
    return cache.recall(KEY)


#: What is kept on disk, and how it is kept.
KEPT: dict[str, Callable[[], Any]] = {"a kernel": load, "a choice": remember}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


# --- no room --------------------------------------------------------------------------------------


class Full:
    """A file on a disk that is full: half of what is written fits."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        self.file.write(text[: len(text) // 2])
        self.file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", KEPT)
def test_a_full_disk(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = os.fdopen
    monkeypatch.setattr(os, "fdopen", lambda *a, **k: Full(original(*a, **k)))
    with caplog.at_level(logging.WARNING, "insum"):
        assert KEPT[what]() and KEPT[what]()
    said = [one for one in caplog.messages if "No space left" in one]
    assert len(said) == 1 and "all else works" in said[0]
    assert files(folder) == [], "half a file was left"


FULL = """
import resource, signal, sys, torch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))
sys.dont_write_bytecode = True
import insum
from insum.codegen.kernel import Kernel
from insum.plan.config import Config
from insum.runtime import cache, disk, launch

text = "@triton.jit\\ndef insum_kernel(x_ptr):\\n    return\\n"
assert launch.load(Kernel("insum_kernel", text, ("x_ptr",)), '\"\"\"y[i] = x[i]\"\"\"')
key = cache.Key("plan", "i:4", "cpu", "1", "2", "3")
cache.remember(cache.CachedChoice(key, "y[i] = x[i]", (Config(m=16),), 5.0, 6.0, "quick"))
assert cache.recall(key) == (Config(m=16),)
assert insum.insum("y[i] = 2 * x[i]", x=torch.ones(2)).tolist() == [2, 2]
print("fine")
"""


def test_a_limit_of_the_system(folder: Path) -> None:
    assert _run(FULL) == "fine"
    assert all(path.stat().st_size == 0 or path.suffix != ".py" for path in files(folder))
    assert not list(folder.rglob(".writing-*"))


def _run(program: str, **environment: str | None) -> str:
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given |= {name: value for name, value in environment.items() if value is not None}
    for name in [name for name, value in environment.items() if value is None]:
        given.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- no folder ------------------------------------------------------------------------------------


def test_no_folder_at_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the cache nor a temporary folder can be written."""
    folder.parent.joinpath("file").write_text("in the way")
    monkeypatch.setenv("INSUM_CACHE_DIR", str(folder.parent / "file" / "cache"))

    def refuse(*_: object, **__: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with caplog.at_level(logging.WARNING, "insum"):
        assert load() and load() and remember()
    assert sum("nothing is kept on disk" in one for one in caplog.messages) == 1


HOMELESS = """
import os, pathlib, torch, insum
from insum.runtime import cache, disk, launch

assert "~" not in disk.cache_folder().parts, disk.cache_folder()
assert not pathlib.Path("~").exists()
assert insum.insum("y[i] = 2 * x[i]", x=torch.ones(2)).tolist() == [2, 2]
print("fine")
"""


@pytest.mark.parametrize("home", [None, "", os.devnull])
def test_no_home(home: str | None, folder: Path) -> None:
    assert _run(HOMELESS, HOME=home, INSUM_CACHE_DIR="", TMPDIR=str(folder.parent)) == "fine"


def test_a_home_that_is_not_known(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A user without an entry among the users: ``~`` stays ``~``, and is no folder."""
    monkeypatch.delenv("INSUM_CACHE_DIR")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(folder.parent)
    assert disk.cache_folder().parent == folder.parent
    assert not Path("~").exists()


# --- killed writers -------------------------------------------------------------------------------

KILLED = """
import os, signal
from pathlib import Path
from insum.runtime import disk, launch

original = os.replace
os.replace = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
disk.write_whole(launch.source_folder() / "kill.py", "half")
"""


def test_a_writer_that_is_killed_leaves_nothing_for_long(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, timeout=600)
    assert done.returncode == -signal.SIGKILL
    (left,) = files(folder)
    assert left.name.startswith(".writing-")
    disk._usable.cache_clear()
    disk.cache_folder()
    assert files(folder) == [left], "it may still be being written"
    long_ago = time.time() - 2 * disk.ABANDONED
    os.utime(left, (long_ago, long_ago))
    disk._usable.cache_clear()
    disk.cache_folder()
    assert files(folder) == []


# --- anything in files ----------------------------------------------------------------------------

BROKEN = {
    "nothing": b"",
    "half": b'{"format": 1, "key"',
    "bytes": b"\xff\xfe\x00\x80",
    "a list": b"[]",
    "a number": b"7",
    "depth": b"[" * 100_000,
    "a huge number": b'{"format": 1, "choice": [{"m": 16}], "microseconds": 1' + b"0" * 400 + b"}",
    "other keys": b'{"format": 1, "choice": [{"wide": 16}], "key": 3}',
    "no powers": b'{"format": 1, "choice": [{"m": 3}]}',
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_files(how: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(), remember()
    for path in files(folder):
        path.write_bytes(BROKEN[how])
    cache.forget()
    with caplog.at_level(logging.WARNING, "insum"):
        assert cache.recall(KEY) is None
        assert load(), "a kernel is generated, whatever is on disk"
    assert sum("passed over" in one for one in caplog.messages) == 1
    assert remember() == ENTRY.choice
    cache.forget()
    assert cache.recall(KEY) == ENTRY.choice, "and written anew"
