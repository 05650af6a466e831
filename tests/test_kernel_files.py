"""Files of generated kernels: what is run is what was generated, whatever has become of a file; and
it is kept where nobody else writes.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import insum
from insum.codegen.kernel import LONGEST_NAME, Kernel
from insum.runtime import cache, compiling, disk, launch

KERNEL = Kernel("insum_kernel", "@triton.jit\ndef insum_kernel(x_ptr):\n    return\n", ("x_ptr",))
HEADER = '"""y[i] = x[i]\n\nfirst seen   i=3\n"""'
UNIX = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no such permissions here")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("triton")
    made = tmp_path / "cache"
    monkeypatch.setenv("INSUM_CACHE_DIR", str(made))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "loaded_kernels", {})
    return made


def loaded(header: str = HEADER) -> str:
    """Load the kernel as a new process does; its source, as Triton sees it."""
    launch.forget()
    function = launch.load(KERNEL, header)
    return "".join(function.src) if hasattr(function, "src") else ""


def path_of() -> Path:
    return launch.source_path(compiling.key_of(KERNEL.source))


# --- what is run ----------------------------------------------------------------------------------

MARK = "insum_test_kernel_files_ran"
SPOILT = {
    "emptied": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "another kernel": lambda text: text.replace("return", "tl.store(x_ptr, 5)"),
    "code in front": lambda text: f"import sys; sys.{MARK} = 1\n{text}",
    "code in the heading": lambda text: f'"""a"""; import sys; sys.{MARK} = 1; {text}',
    "code behind": lambda text: f"{text}\nimport sys; sys.{MARK} = 1\n",
    "bytes": lambda text: "\udcff\udcfe\x00",
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILT)
def test_a_file_that_is_not_what_was_written_is_written_anew(how: str) -> None:
    loaded()
    good = path_of().read_text()
    path_of().write_bytes(SPOILT[how](good).encode("utf-8", "surrogateescape"))
    loaded()
    assert not hasattr(sys, MARK), "it was run"
    assert path_of().read_text() == good


def test_a_file_of_an_earlier_process_is_kept() -> None:
    """Its heading tells of the sizes that were seen first; Triton's own cache knows it so."""
    loaded()
    before = path_of().stat().st_mtime_ns, path_of().read_text()
    loaded('"""y[i] = x[i]\n\nfirst seen   i=1000\n\n"""')
    assert (path_of().stat().st_mtime_ns, path_of().read_text()) == before
    module = sys.modules[f"insum_generated.{path_of().stem}"]
    assert module.__doc__ is not None and "i=3" in module.__doc__


def test_compiled_code_beside_a_file_is_not_run() -> None:
    import py_compile

    loaded()
    path, good = path_of(), path_of().read_text()
    path.write_text(f"import sys; sys.{MARK} = 1\n")
    py_compile.compile(str(path))
    compiled = next((path.parent / "__pycache__").iterdir())
    path.write_text(good)
    compiled.with_name(f"{path.stem}.{sys.implementation.cache_tag}.pyc").write_bytes(
        compiled.read_bytes()
    )
    loaded()
    assert not hasattr(sys, MARK)


def test_the_source_is_at_hand_without_the_file() -> None:
    """As Triton asks for it, when it compiles later."""
    import inspect

    loaded()
    function = launch.loaded_kernels[compiling.key_of(KERNEL.source)]
    path_of().write_text("something else\n" * 50)
    assert inspect.getsource(function.fn) == KERNEL.source


def test_a_kernel_that_cannot_be_written_is_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: object, **options: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    loaded()
    assert not path_of().exists()


def test_a_folder_that_is_gone_is_made_anew() -> None:
    loaded()
    path_of().unlink()
    path_of().parent.rmdir()
    loaded()
    assert path_of().exists()


@pytest.mark.interpreter
def test_results_do_not_depend_on_files(folder: Path) -> None:
    x = torch.ones(3)
    for _ in range(2):
        launch.forget()
        cache.forget()  # so that launches are made anew
        with insum.settings(backend="fused", require_fused=True):
            assert insum.insum("y[i] = 2 * x[i]", x=x).tolist() == [2, 2, 2]
        for path in (folder / "kernels").glob("k*.py"):
            path.write_text(path.read_text().replace("2", "5"))


def test_workers_look_too() -> None:
    loaded()
    path_of().write_text(path_of().read_text() + "\n")
    with pytest.raises(ValueError, match="is not as it was written"):
        compiling._compile_job((str(path_of()), "insum_kernel", ["*fp32"], 0, 4, 2))


# --- where it is kept -----------------------------------------------------------------------------


def shared(kept: Path, mode: int) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    kept.chmod(mode)


@UNIX
@pytest.mark.parametrize("part", ["", "kernels", "tuned"])
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707, 0o770])
def test_a_folder_that_others_can_write_to(
    folder: Path,
    part: str,
    mode: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(disk, "_is_own_group", lambda group, user: False)
    folder.mkdir(mode=0o700)
    shared(folder / part, mode)
    with caplog.at_level(logging.WARNING, "insum"):
        used = cache.folder()
        assert used != folder and launch.source_folder().parent == used and used.is_dir()
        loaded()
    assert len(caplog.records) == 1 and "can be written by other users" in caplog.text
    assert not list(folder.glob("**/k*.py")) and path_of().exists()
    assert not used.stat().st_mode & 0o077


@UNIX
def test_a_folder_of_the_users_own_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As made where every user has a group, and files may be written by it."""
    monkeypatch.setattr(disk, "_is_own_group", lambda group, user: True)
    shared(folder, 0o775)
    assert cache.folder() == folder
    shared(folder, 0o777)
    disk._usable.cache_clear()
    assert cache.folder() != folder


@UNIX
def test_which_group_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd
    from types import SimpleNamespace

    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="ann"))
    for name, members, own in (
        ("ann", [], True),
        ("ann", ["ann"], True),
        ("ann", ["ann", "bob"], False),
        ("users", [], False),
    ):
        found = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda group, found=found: found)
        assert disk._is_own_group(1, 1) is own
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    assert not disk._is_own_group(1, 1), "a user without a name, as in containers"


@UNIX
def test_a_folder_of_somebody_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner:
        assert cache.folder() != folder
    else:
        assert cache.folder() == folder, "of the administrator"


@UNIX
def test_a_temporary_folder_that_somebody_made_before(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared(folder, 0o777)
    shared(tmp_path / f"insum-{os.getuid()}", 0o777)
    with caplog.at_level(logging.WARNING, "insum"):
        used = cache.folder()
    assert used not in (folder, tmp_path / f"insum-{os.getuid()}") and used.parent == tmp_path
    assert not used.stat().st_mode & 0o077 and len(caplog.records) == 1


@UNIX
def test_new_folders_are_the_users_own(folder: Path) -> None:
    before = os.umask(0)
    try:
        loaded()
    finally:
        os.umask(before)
    assert not folder.stat().st_mode & 0o077
    assert not (folder / "kernels").stat().st_mode & 0o077


# --- clearing -------------------------------------------------------------------------------------


def test_clearing_leaves_nothing(folder: Path) -> None:
    loaded()
    kernels = folder / "kernels"
    for name in ("b1.json", "b1.77.tmp", "k2.py", "k2.77.tmp", ".probe-77"):
        (kernels / name).write_text("")
    (kernels / "__pycache__").mkdir()
    (kernels / "__pycache__" / "k2.cpython-311.pyc").write_bytes(b"")
    (folder / "tuned").mkdir()
    (folder / "tuned" / "x.json").write_text("")
    assert cache.clear(kernels=False) == 1 and path_of().exists()
    assert cache.clear() == 7
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_names_tell_kernels_apart() -> None:
    """As profilers show them: by operators, products of one statement, strategies, and, where a
    statement is longer than a name, by a digest.
    """
    x, d = torch.randn(4, 4), torch.tensor([0, 1, 1, 3])
    texts = [f"z[i,j] = x[i,j] {sign} y[i,j]" for sign in ("+", "-", "*", "/", "<", "<=", "==")]
    texts += [f"z[i,j] = {'tanh(x[i,j]) * ' * 12}y[i,j] * {end}[i,j]" for end in "xy"]
    texts.append("z[i,j] = x[i,k] * y[k,j] + x[i,j]")
    pages = [insum.explain(text, x=x, y=x, gpu="sm_90").fused for text in texts]
    names = [re.findall(r"def (insum_z\w+)", page or "") for page in pages]
    every = [name for found in names for name in found]
    assert len(names[-1]) == 2 and len({*every}) == len(every) == len(texts) + 1
    assert max(map(len, every)) <= LONGEST_NAME
    own = []
    for wished in ("segment", "atomic"):
        with insum.settings(scatter=wished):
            page = insum.explain("z[d[e],j] = x[e,j]", x=x, d=d, sizes={0: 4}, gpu="sm_90").fused
        own.append(re.findall(r"def (insum_z\w+)", page or "")[0])
    assert own == ["insum_z_d_e_j__x_e_j__segment", "insum_z_d_e_j__x_e_j__atomic"]
