"""Notes that lead to kernels compiled by earlier processes, and everything that makes them lead
nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import insum
from applications import block_spmm
from insum.compat import streams
from insum.runtime import binaries, compiling, inspection, launch
from insum.runtime.program import Program

pytestmark = pytest.mark.skipif(launch.interpreting(), reason="the interpreter compiles nothing")
TARGET = ["cuda", 90, 32]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A kernel that was compiled for a device that is not here, with folders of its own."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(launch, "source_folder", lambda: tmp_path)
    monkeypatch.setattr(launch, "current_target", lambda: TARGET)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    application = block_spmm(rows=4, columns=4, block=16, n=64, density=0.5, dtype=torch.float16)
    look = inspection.elsewhere(application.forward.problem(), application.values)
    program = look.program(anywhere=True)
    assert isinstance(program, Program)
    (one,) = look.ready(program).launches
    function, types = one.launch.function, one.types
    compiled = compiling.compile_kernel(function, types, 0, 4, 2, GPUTarget(*TARGET))
    yield SimpleNamespace(function=function, types=types, compiled=compiled)


def test_a_noted_kernel_is_found(kernel: SimpleNamespace) -> None:
    asked = kernel.function, kernel.types, 0, 4, 2
    assert binaries.recalled(*asked) is None and not binaries.is_noted(*asked)
    binaries.note(kernel.compiled, *asked)
    assert binaries.is_noted(*asked)
    found = binaries.recalled(kernel.function, kernel.types, 0, 4, 2)
    assert (
        found is not None
        and found.kernel == kernel.compiled.kernel
        and found.metadata == kernel.compiled.metadata
    )
    assert (
        found.src.signature == kernel.compiled.src.signature
        and found.src.constants == kernel.compiled.src.constants
    )


def test_other_arguments_are_another_kernel(
    kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries.note(kernel.compiled, kernel.function, kernel.types, 0, 4, 2)
    assert binaries.recalled(kernel.function, kernel.types, 0, 8, 2) is None
    assert binaries.recalled(kernel.function, kernel.types, 0, 4, 3) is None
    assert binaries.recalled(kernel.function, kernel.types, 1, 4, 2) is None, (
        "a pointer that is not aligned"
    )
    wider = [type.replace("i32", "i64") for type in kernel.types]
    assert binaries.recalled(kernel.function, wider, 0, 4, 2) is None
    monkeypatch.setenv("TRITON_SOMETHING", "1")
    assert binaries.recalled(kernel.function, kernel.types, 0, 4, 2) is None, (
        "an environment that may compile otherwise"
    )


def test_what_leads_nowhere_is_ignored(kernel: SimpleNamespace, tmp_path: Path) -> None:
    binaries.note(kernel.compiled, kernel.function, kernel.types, 0, 4, 2)
    (noted,) = tmp_path.glob("b*.json")
    text = noted.read_text()
    noted.write_text(text[: len(text) // 2])
    assert binaries.recalled(kernel.function, kernel.types, 0, 4, 2) is None, "cut in half"
    noted.write_text(text)
    for binary in (tmp_path / "triton").rglob("*.cubin"):
        binary.unlink()
    assert binaries.recalled(kernel.function, kernel.types, 0, 4, 2) is None, "the binary is gone"


def test_who_watches_the_compiler_sees_it(
    kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    binaries.note(kernel.compiled, kernel.function, kernel.types, 0, 4, 2)
    monkeypatch.setattr(knobs.compilation, "listener", lambda **_: None)
    assert binaries.recalled(kernel.function, kernel.types, 0, 4, 2) is None


def test_a_note_that_cannot_be_written_is_no_error(
    kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(launch, "source_folder", lambda: tmp_path / "file" / "absent")
    binaries.note(kernel.compiled, kernel.function, kernel.types, 0, 4, 2)
    assert binaries.recalled(kernel.function, kernel.types, 0, 4, 2) is None


@pytest.mark.parametrize(
    ("spilled", "warps"),
    [
        ({4: 0}, [4]),
        ({4: 160}, [4]),
        ({4: 400, 8: 0}, [4, 8]),
        ({4: 400, 8: 400}, [4, 8]),
        ({4: 900, 8: 400, 16: 200}, [4, 8, 16]),
        ({4: 400}, [4, 8]),  # no more warps can be compiled
        ({4: compiling.UNLOADABLE}, [4]),
        ({4: 400, 8: compiling.UNLOADABLE}, [4, 8]),
        ({4: compiling.MIXED_UP, 8: compiling.MIXED_UP, 16: 90}, [4, 8, 16]),
        ({4: compiling.MIXED_UP, 8: compiling.UNLOADABLE, 16: 90}, [4, 8, 16]),
    ],
)
def test_a_kernel_that_spills_is_compiled_for_more_warps(
    spilled: dict[int, int], warps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What helps is what runs, from then on."""
    compiled: list[int] = []

    def compile_kernel(function: object, types: object, unaligned: int, warps: int, _: int) -> int:
        compiled.append(warps)
        return warps

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    monkeypatch.setattr(binaries, "recalled", lambda *asked: None)
    monkeypatch.setattr(binaries, "note", lambda *asked: None)
    monkeypatch.setattr(launch, "flaw_of", lambda found: spilled[found])
    monkeypatch.setattr(launch, "launcher_of", lambda found: found)
    monkeypatch.setattr(launch, "loaded", {})
    monkeypatch.setattr(streams, "current_device", lambda: 0)
    application = block_spmm(rows=4, columns=4, block=16, n=64, density=0.5, dtype=torch.float16)
    config = insum.Config(m=16, n=16, k=16, warps=4, stages=2)
    problem = application.forward.problem()
    look = inspection.elsewhere(problem, application.values, config=(config,))
    program = look.program(anywhere=True)
    assert isinstance(program, Program)
    (one,) = look.ready(program).launches
    best = min(spilled, key=lambda count: (spilled[count], count))
    assert one.launcher(0) == one.launcher(0) == best and compiled == warps


def test_spills_are_counted_in_bytes_and_what_cannot_be_loaded_is_told() -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    class Loaded:
        asm: ClassVar = {"ptx": "mov.b32 %r1, 0;"}
        n_spills = 30

        def __getitem__(self, grid: tuple[int, ...]) -> None: ...

    class TooLarge:
        asm: ClassVar = {"hsaco": b""}

        def __getitem__(self, grid: tuple[int, ...]) -> None:
            raise errors.OutOfResources(1, 0, "shared memory")

    assert launch.flaw_of(Loaded()) == 120
    assert launch.flaw_of(TooLarge()) == compiling.UNLOADABLE
    moved = "mul.wide.u32 \t%rd5, %r9, 2147483648; or.b64 \t%rd6, %rd5, %rd4;"
    mixed = SimpleNamespace(asm={"ptx": moved + "mov.b64 \t{_, %r8}, %rd6;"})
    assert launch.flaw_of(mixed) == compiling.MIXED_UP
