"""Exported programs: kept as one op, written out as torch operations, and packaged by AOTInductor
to run where there is no insum.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.testing import assert_close

import applications
import insum
from insum.compat import compiler, cxx_runtime

KIND: dict[str, Any] = {"dtype": torch.float32}
#: The wrapper around the kernels is long; compiled without optimisation it takes half the time, and
#: headers are compiled in advance only where many packages share them.
QUICK = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
}


class Four(nn.Module):
    """The four applications and an accumulation in place: features are arguments, index tensors of
    the tensor product are buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = {name: made(7) for name, made in MAKERS.items()}
        for name in ("I", "J", "K", "L", "V"):
            self.register_buffer(name, self.calls["product"].values[name])

    def forward(
        self,
        blocks: dict[str, Tensor],
        spmm: dict[str, Tensor],
        table: dict[str, Tensor],
        product: dict[str, Tensor],
    ) -> list[Tensor]:
        held = {name: getattr(self, name) for name in ("I", "J", "K", "L", "V")}
        results = [
            self.run("blocks", blocks),
            self.run("spmm", spmm),
            self.run("table", table),
            self.run("product", {**held, **product}),
        ]
        total = torch.ones(9, 6)
        insum.insum(
            "C[AM[p],n] += AV[p,q] * B[AK[p,q],n] * s", C=total, padded=("AK",), s=0.5, **spmm
        )
        return [*results, total]

    def run(self, name: str, values: dict[str, Tensor]) -> Tensor:
        call = self.calls[name]
        return insum.insum(
            call.statement, sizes=dict(call.sizes), padded=call.padded, **values
        ).tanh()


MAKERS = {
    "blocks": lambda n: applications.block_spmm(
        rows=4, columns=n, block=4, n=6, density=0.6, group=2, **KIND
    ),
    "spmm": lambda n: applications.spmm(rows=9, columns=n, n=6, entries=5 * n, group=2, **KIND),
    "table": lambda n: applications.convolution(
        voxels=3 * n, offsets=3, inputs=5, outputs=6, layout="by voxel", **KIND
    ),
    "product": lambda n: applications.tensor_product(batch=n, channels=5, constant=False, **KIND),
}


def arguments(n: int) -> tuple[dict[str, Tensor], ...]:
    given = [dict(make(n).values) for make in MAKERS.values()]
    for name in ("I", "J", "K", "L", "V"):
        given[3].pop(name)
    return tuple(given)


@pytest.fixture(scope="module")
def model() -> Four:
    return Four()


@pytest.fixture(scope="module")
def program(model: Four) -> ExportedProgram:
    given = arguments(7)
    shapes = tuple({name: {0: Dim.AUTO} for name in part} for part in given)
    for name, fixed in ((0, ()), (1, ()), (2, ("W",)), (3, ())):
        for tensor in fixed:
            shapes[name][tensor] = {}
    return torch.export.export(model, given, dynamic_shapes=shapes)


def ops(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def equal(model: nn.Module, run: Any) -> None:
    for n in (7, 10, 13):
        given = arguments(n)
        for got, want in zip(run(*given), model(*given), strict=True):
            assert_close(got, want)


def test_a_statement_is_one_op(model: Four, program: ExportedProgram) -> None:
    assert sum("insum." in name for name in ops(program)) == 5
    equal(model, program.module())


def test_saved_and_loaded(model: Four, program: ExportedProgram, tmp_path: Path) -> None:
    torch.export.save(program, tmp_path / "program.pt2")
    equal(model, torch.export.load(tmp_path / "program.pt2").module())


def test_decomposed(model: Four, program: ExportedProgram) -> None:
    written = insum.export.decompose(program)
    assert not any("insum" in name for name in ops(written))
    equal(model, written.module())


def test_outside_of_a_package_the_op_stays(program: ExportedProgram) -> None:
    """The rule for functionalisation is registered for good, and does nothing where it is not asked
    to.
    """
    insum.export.decompose(program)
    assert sum("insum." in name for name in ops(program.run_decompositions({}))) >= 4
    x = torch.randn(4)
    assert_close(
        torch.compile(
            lambda x: insum.insum("y[i] = x[i] * x[i]", x=x), fullgraph=True, backend="aot_eager"
        )(x),
        x * x,
    )


ALONE = """
import sys, torch
sys.modules["insum"] = None  # importing it fails
data = torch.load({data!r})
runs = [torch.export.load(path).module() for path in {programs!r}]
runs.append(torch._inductor.aoti_load_package({package!r}))
for run in runs:
    for given, wanted in data:
        torch.testing.assert_close(run(*given), wanted)
print("equal")
"""


def equal_alone(data: list[Any], folder: Path, package: str, *programs: str) -> None:
    """In a process that cannot import insum: ``data`` has arguments, each with its result."""
    torch.save(data, folder / "data.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    text = ALONE.format(data=str(folder / "data.pt"), programs=programs, package=package)
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


@pytest.mark.slow
def test_neither_program_nor_package_needs_insum(
    model: Four, program: ExportedProgram, tmp_path: Path
) -> None:
    """A program of torch operations, and one file with the compiled code of every statement; both
    run in a process that cannot import insum.
    """
    written = str(tmp_path / "program.pt2")
    torch.export.save(insum.export.decompose(program), written)
    path = insum.export.package(program, tmp_path / "package.pt2", options=QUICK)
    assert path == str(tmp_path / "package.pt2")
    equal(model, torch._inductor.aoti_load_package(path))
    data = [(arguments(n), model(*arguments(n))) for n in (7, 10)]
    equal_alone(data, tmp_path, path, written)


class Small(nn.Module):
    def forward(self, idx: Tensor, x: Tensor) -> Tensor:
        y = insum.insum("y[p] = x[idx[p]] * x[idx[p]]", idx=idx, x=x)
        return y + insum.insum("y[i] = x[0] * s", x=x, s=2.0, sizes={"i": idx.shape[0]})


@pytest.fixture(scope="module")
def small() -> ExportedProgram:
    return torch.export.export(
        Small(),
        (torch.tensor([2, 0, 1]), torch.arange(3.0)),
        dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}),
    )


@pytest.mark.slow
def test_a_package_that_calls_back(small: ExportedProgram, tmp_path: Path) -> None:
    """Packaged as it is, a program calls insum's op, and gives what insum gives, where insum was
    imported.
    """
    path = torch._inductor.aoti_compile_and_package(
        small, package_path=str(tmp_path / "op.pt2"), inductor_configs=QUICK
    )
    run = torch._inductor.aoti_load_package(path)
    idx, x = torch.tensor([3, 3, 0, 2]), torch.randn(5)
    assert_close(run(idx, x), x[idx].square() + 2 * x[0])


# --- the C++ runtime ------------------------------------------------------------------------------


def other_compiler(folder: Path, script: str) -> str:
    path = folder / "other-g++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def static(tmp_path: Path) -> str:
    """A compiler that gives every shared library a C++ runtime of its own."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs g++ on Linux")
    return other_compiler(
        tmp_path,
        'for one in "$@"; do [ "$one" = -shared ] && exec g++ -static-libstdc++ "$@"; done\n'
        'exec g++ "$@"',
    )


def test_the_shared_runtime_is_asked_for_where_it_must_be(
    static: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "cxx_compiler", lambda: static)
    assert cxx_runtime.libraries() == [":libstdc++.so.6"]
    for usual in ("g++", str(tmp_path / "absent"), None):
        monkeypatch.setattr(compiler, "cxx_compiler", lambda: usual)  # noqa: B023
        assert cxx_runtime.libraries() == []


@pytest.mark.parametrize("script", ["exit 1", "exit 0"])
def test_nothing_is_asked_of_a_compiler_that_does_not_compile(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = other_compiler(tmp_path, script)
    monkeypatch.setattr(compiler, "cxx_compiler", lambda: broken)
    assert cxx_runtime.libraries() == []


def test_libraries_of_the_user_are_kept(
    static: str, small: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "cxx_compiler", lambda: static)
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        compiler,
        "aot_packager",
        lambda: (
            lambda program, package_path, inductor_configs: (
                seen.append(inductor_configs) or package_path
            )
        ),
    )
    given = {"aot_inductor.custom_op_libs": ["mine"]}
    for options in (None, given):
        insum.export.package(small, tmp_path / "model.pt2", options=options)
    assert [one["aot_inductor.custom_op_libs"] for one in seen] == [
        [":libstdc++.so.6"],
        ["mine", ":libstdc++.so.6"],
    ]
    assert given == {"aot_inductor.custom_op_libs": ["mine"]}


def test_the_compiler_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.cpp_builder", None)
    assert compiler.cxx_compiler() is None


@pytest.mark.slow
def test_a_package_from_a_compiler_with_a_static_runtime(
    static: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the shared runtime, the process that loads it fails; here it must not."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    idx, x = torch.tensor([2, 0, 1]), torch.arange(3.0)
    with torch._inductor.config.patch({"cpp.cxx": (static,)}):
        path = insum.export.package(
            torch.export.export(Small(), (idx, x)), tmp_path / "small.pt2", options=QUICK
        )
    equal_alone([((idx, x), x[idx].square() + 2 * x[0])], tmp_path, path)


# --- mistakes, and other versions of torch --------------------------------------------------------


def test_the_name_of_a_package(small: ExportedProgram, tmp_path: Path) -> None:
    with pytest.raises(
        insum.UnsupportedError, match=r"cannot be written to '.*model.so'(.|\n)*ends in .pt2"
    ):
        insum.export.package(small, tmp_path / "model.so")


def test_without_packages(
    small: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "aot_packager", lambda: None)
    with pytest.raises(
        insum.UnsupportedError, match=r"no AOTInductor packages(.|\n)*insum.export.decompose"
    ):
        insum.export.package(small, tmp_path / "model.pt2")


def test_without_rules_for_functionalisation(
    small: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "functional_mode", lambda: None)
    monkeypatch.setattr(insum.export, "_register", insum.export._register.__wrapped__)
    with pytest.raises(insum.UnsupportedError, match="how it is functionalised"):
        insum.export.decompose(small)


def test_names_of_torch_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        compiler.aot_packager() is not None
        and compiler.functional_mode() is not None
        and compiler.wrap_triton() is not None
    )
    monkeypatch.setitem(sys.modules, "torch._subclasses.functional_tensor", None)
    assert compiler.functional_mode() is None


# --- with generated kernels inside, as far as can be seen without a GPU ---------------------------


@pytest.fixture
def absent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton compile for a GPU that is not there, so that torch can see which arguments a
    kernel writes.
    """
    from triton.runtime import driver

    from insum.runtime import compiling

    monkeypatch.setattr(driver, "_active", None)  # so that it is as it was when the test ends
    compiling._pretend(["cuda", 90, 32])


@pytest.mark.compile_only
def test_kernels_are_seen_by_the_tracer(absent_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    application = applications.block_spmm(
        rows=4, columns=5, block=16, n=40, density=0.4, group=2, **KIND
    )

    class Product(nn.Module):
        def forward(self, AM: Tensor, AV: Tensor, AK: Tensor, B: Tensor) -> Tensor:
            return insum.insum(
                application.statement,
                sizes=dict(application.sizes),
                padded=application.padded,
                AM=AM,
                AV=AV,
                AK=AK,
                B=B,
            )

    with FakeTensorMode():
        given = tuple(
            torch.empty(
                application.values[n].shape, dtype=application.values[n].dtype, device="cuda:0"
            )
            for n in ("AM", "AV", "AK", "B")
        )
    groups = Dim("groups")
    exported = torch.export.export(
        Product(), given, dynamic_shapes=({0: groups}, {0: groups}, {0: groups}, None)
    )
    with (
        caplog.at_level(logging.WARNING, "torch._higher_order_ops"),
        insum.export._inlined("kernels"),
    ):
        written = exported.run_decompositions({})
    (kernel,) = [
        node for node in written.graph.nodes if "triton_kernel_wrapper" in str(node.target)
    ]
    assert kernel.kwargs["tensors_to_clone"] == ["out_at"]  # nothing else is written
    # the number of programs follows the number of groups
    assert not isinstance(kernel.kwargs["grid"][0][0], int)
    assert not any("insum." in name for name in ops(written))
