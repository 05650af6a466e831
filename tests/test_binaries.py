"""Notes that lead to kernels compiled by earlier processes, and everything that makes them lead
nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from applications import block_spmm
from insum.runtime import binaries, fused, launch

pytestmark = pytest.mark.skipif(launch.interpreting(), reason="the interpreter compiles nothing")
TARGET = ["cuda", 90, 32]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A kernel that was compiled for a device that is not here, with folders of its own."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(launch, "source_folder", lambda: tmp_path)
    monkeypatch.setattr(launch, "current_target", lambda: TARGET)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(binaries, "_held", {})
    application = block_spmm(rows=4, columns=4, block=16, n=64, density=0.5, dtype=torch.float16)
    problem = application.forward.problem()
    (one,) = fused.plan_only(problem, application.values).steps[0].launches
    out = torch.empty(1, dtype=problem.dtype)
    arguments = list(one.arguments)
    for position, name in one.names:
        arguments[position] = application.values.get(name, out)
    yield SimpleNamespace(
        function=one.function, arguments=arguments, compiled=_compile(one.function, arguments)
    )


def _compile(function: Any, arguments: list[Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = [launch.argument_kind(value)[0] for value in arguments]
    signature = dict(zip(function.arg_names, kinds, strict=True))
    constants = {
        (at,): value
        for at, (kind, value) in enumerate(zip(kinds, arguments, strict=True))
        if kind == "constexpr"
    }
    return triton.compile(
        ASTSource(function, signature, constants),
        target=GPUTarget(*TARGET),
        options={"num_warps": 4, "num_stages": 2},
    )


def test_a_noted_kernel_is_found(kernel: SimpleNamespace) -> None:
    assert binaries.recalled(kernel.function, kernel.arguments, 4, 2) is None
    binaries.note(kernel.compiled, kernel.function, kernel.arguments, 4, 2)
    found = binaries.recalled(kernel.function, kernel.arguments, 4, 2)
    assert (
        found is not None
        and found.kernel == kernel.compiled.kernel
        and found.metadata == kernel.compiled.metadata
    )
    assert (
        found.src.signature == kernel.compiled.src.signature
        and found.src.constants == kernel.compiled.src.constants
    )
    assert binaries.recalled(kernel.function, kernel.arguments, 4, 2) is found, "loaded once"


def test_other_arguments_are_another_kernel(
    kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    binaries.note(kernel.compiled, kernel.function, kernel.arguments, 4, 2)
    assert binaries.recalled(kernel.function, kernel.arguments, 8, 2) is None
    assert binaries.recalled(kernel.function, kernel.arguments, 4, 3) is None
    position = next(
        i
        for i, value in enumerate(kernel.arguments)
        if isinstance(value, torch.Tensor) and value.numel() > 1
    )
    shifted = [
        value.flatten()[1:] if i == position else value for i, value in enumerate(kernel.arguments)
    ]
    assert binaries.recalled(kernel.function, shifted, 4, 2) is None, (
        "a pointer that is not aligned"
    )
    monkeypatch.setenv("TRITON_SOMETHING", "1")
    assert binaries.recalled(kernel.function, kernel.arguments, 4, 2) is None, (
        "an environment that may compile otherwise"
    )


def test_what_leads_nowhere_is_ignored(kernel: SimpleNamespace, tmp_path: Path) -> None:
    binaries.note(kernel.compiled, kernel.function, kernel.arguments, 4, 2)
    (noted,) = tmp_path.glob("b*.json")
    text = noted.read_text()
    noted.write_text(text[: len(text) // 2])
    assert binaries.recalled(kernel.function, kernel.arguments, 4, 2) is None, "cut in half"
    noted.write_text(text)
    for binary in (tmp_path / "triton").rglob("*.cubin"):
        binary.unlink()
    assert binaries.recalled(kernel.function, kernel.arguments, 4, 2) is None, "the binary is gone"


def test_who_watches_the_compiler_sees_it(
    kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    binaries.note(kernel.compiled, kernel.function, kernel.arguments, 4, 2)
    monkeypatch.setattr(knobs.compilation, "listener", lambda **_: None)
    assert binaries.recalled(kernel.function, kernel.arguments, 4, 2) is None


def test_a_note_that_cannot_be_written_is_no_error(
    kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "source_folder", lambda: tmp_path / "absent")
    binaries.note(kernel.compiled, kernel.function, kernel.arguments, 4, 2)
    assert binaries.recalled(kernel.function, kernel.arguments, 4, 2) is None
