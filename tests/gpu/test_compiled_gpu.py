"""What only a GPU can tell of compiled programs: CUDA graphs that torch.compile records, packages
with kernels inside, TorchInductor's own kernels.

Runs under pytest (``pytest -m gpu tests/gpu/test_compiled_gpu.py``) and without it: ``python
tests/gpu/test_compiled_gpu.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import applications  # noqa: E402
import insum  # noqa: E402
from applications import Application, relative_error  # noqa: E402
from insum.compat import compiler  # noqa: E402
from insum.testing import count_compiles  # noqa: E402

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:  # the functions below need nothing of it
    pass

CUDA = "cuda"
KIND: dict[str, Any] = {"dtype": torch.float32, "device": CUDA}
TOLERANCE = 2e-3  # TF32 is off, but what TorchInductor does with it is its own affair
MAKERS: dict[str, Callable[[int], Application]] = {
    "block SpMM": lambda n: applications.block_spmm(
        rows=16, columns=n, block=32, n=256, density=0.4, group=4, **KIND
    ),
    "SpMM": lambda n: applications.spmm(
        rows=500, columns=20 * n, n=64, entries=200 * n, group=4, **KIND
    ),
    "convolution": lambda n: applications.convolution(
        voxels=40 * n, offsets=27, inputs=32, outputs=64, layout="by voxel", **KIND
    ),
    "convolution, grouped": lambda n: applications.convolution(
        voxels=40 * n, offsets=27, inputs=32, outputs=64, layout="grouped", **KIND
    ),
    "tensor product": lambda n: applications.tensor_product(
        batch=20 * n, channels=32, constant=False, **KIND
    ),
}


def call(application: Application) -> Callable[..., Tensor]:
    statement, sizes, padded = application.statement, dict(application.sizes), application.padded
    return lambda **values: insum.insum(statement, sizes=sizes, padded=padded, **values)


def shuffled(application: Application, seed: int) -> Application:
    """The same shapes with other index values: entries in another order."""
    draw = torch.Generator(device=CUDA).manual_seed(seed)
    values = dict(application.values)
    lead = {"block SpMM": ("AM", "AK", "AV"), "SpMM": ("AM", "AK", "AV")}
    for start, names in lead.items():
        if application.name.startswith(start):
            order = torch.randperm(values[names[0]].shape[0], generator=draw, device=CUDA)
            values |= {name: values[name][order].contiguous() for name in names}
    if "Nb" in values:
        values["Nb"] = values["Nb"][
            torch.randperm(values["Nb"].shape[0], generator=draw, device=CUDA)
        ].contiguous()
    return Application(
        application.name,
        application.statement,
        values,
        application.sizes,
        application.padded,
        application.wanted,
        application.formula,
    )


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def skipped_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


# --- CUDA graphs ----------------------------------------------------------------------------------


def test_reduce_overhead_with_other_indices_each_time() -> None:
    """Index tensors are inputs: a recorded graph must be right for values that it has not seen."""
    for name, make in MAKERS.items():
        torch.compiler.reset()
        base, before = make(20), skipped_graphs()
        compiled = torch.compile(call(base), fullgraph=True, mode="reduce-overhead")
        with count_compiles() as count:
            for step in range(6):
                application = shuffled(base, step)
                got = compiled(**application.values).clone()
                error = relative_error(got, application.expected())
                assert error < 1e-5, f"{name}, call {step}: {error}"
        assert count.graphs == 1, name
        assert skipped_graphs() == before, f"{name}: no CUDA graph was recorded"


def test_reduce_overhead_with_gradients() -> None:
    for name, make in MAKERS.items():
        torch.compiler.reset()
        base = make(20)
        compiled = torch.compile(call(base), fullgraph=True, mode="reduce-overhead")
        upstream = base.upstream()
        for step in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            application = shuffled(base, step)
            values = {
                n: v.clone().requires_grad_() if n in application.wanted else v
                for n, v in application.values.items()
            }
            compiled(**values).backward(upstream)
            for wanted, expected in application.expected_gradients(upstream).items():
                error = relative_error(values[wanted].grad, expected)
                assert error < 1e-5, f"{name}, gradient of {wanted}, call {step}: {error}"


def test_reduce_overhead_with_formats_and_without_synchronising() -> None:
    """A layer's pattern is a constant of the graph; replays wait for nothing."""
    torch.compiler.reset()
    layer = insum.nn.BlockSparseLinear.from_dense(
        nn.Linear(256, 256), density=0.3, block_shape=(32, 32)
    ).to(CUDA)
    compiled, before = (
        torch.compile(layer, fullgraph=True, mode="reduce-overhead"),
        skipped_graphs(),
    )
    for step in range(6):
        x = torch.randn(64, 256, device=CUDA)
        with torch.no_grad():
            expected = layer(x)
            if step < 4:
                got = compiled(x).clone()
            else:
                with no_synchronisation():
                    got = compiled(x).clone()
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert skipped_graphs() == before


def test_a_graph_recorded_by_hand_with_tensors_never_seen() -> None:
    """Nothing is known of the index tensors, and nothing may be asked: kernels that need to know
    nothing run, right for any values.
    """
    for name, make in MAKERS.items():
        base = make(20)
        # compiles: a kernel cannot be loaded while a graph is recorded
        base.run()
        held = {n: v.clone() for n, v in base.values.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = insum.insum(base.statement, sizes=dict(base.sizes), padded=base.padded, **held)
        for step in range(3):
            application = shuffled(base, step)
            for n, v in application.values.items():
                held[n].copy_(v)
            graph.replay()
            assert relative_error(out, application.expected()) < 1e-5, f"{name}, replay {step}"


# --- packages -------------------------------------------------------------------------------------


class Statements(nn.Module):
    """Every application, one after the other, as one program with one package: most of the time
    goes into the C++ around the kernels.
    """

    def __init__(self, every: dict[str, Application]) -> None:
        super().__init__()
        self.names = {name: tuple(one.values) for name, one in every.items()}
        self.calls = {name: call(one) for name, one in every.items()}

    def forward(self, given: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
        return {
            name: run(**dict(zip(self.names[name], given[name]))).tanh()
            for name, run in self.calls.items()
        }


ALONE = """
import sys, torch
sys.modules["insum"] = None
run = torch._inductor.aoti_load_package({path!r})
print("loaded", flush=True)
for given, wanted in torch.load({data!r}):
    found = run(given)
    torch.cuda.synchronize()
    for name, want in wanted.items():
        error = ((found[name].double() - want.double()).norm() / want.double().norm()).item()
        print(name, [tuple(one.shape) for one in given[name]], error, flush=True)
        assert error < 1e-5, (name, error)
print("equal")
"""


def test_packages_with_kernels_inside() -> None:
    """Exported with sizes that change, packaged with the generated kernels, and run where there is
    no insum.
    """
    every = {name: make(20) for name, make in MAKERS.items()}
    model = Statements(every)
    tensors = lambda drawn: {name: tuple(one.values.values()) for name, one in drawn.items()}
    program = torch.export.export(
        model,
        (tensors(every),),
        dynamic_shapes=({name: _moving(name, one) for name, one in every.items()},),
    )
    # In the grouped form the number of voxels is a constant of the statement.
    cases = [
        tensors(every),
        tensors({name: make(20 if "grouped" in name else 27) for name, make in MAKERS.items()}),
    ]
    with tempfile.TemporaryDirectory() as folder:
        with without_fallback():
            path = insum.export.package(
                program,
                Path(folder) / "all.pt2",
                options={"aot_inductor.compile_wrapper_opt_level": "O0"},
            )
        torch.save([(case, model(case)) for case in cases], Path(folder) / "data.pt")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        text = ALONE.format(path=path, data=str(Path(folder) / "data.pt"))
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", text],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        print(done.stdout)
        assert "equal" in done.stdout.splitlines() and not done.returncode, (
            f"exit status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        )


def _moving(name: str, application: Application) -> tuple[dict[int, Any], ...]:
    """Weights and patterns keep their shapes, features and tables do not."""
    if not name.startswith(("conv", "tensor")):
        return ({0: torch.export.Dim.AUTO},) * len(application.values)
    moving = ("In", "Nb", "X", "Y", "Z") if "In" in application.values else ("X", "Y", "W")
    return tuple(
        {0: torch.export.Dim.AUTO} if name in moving else {} for name in application.values
    )


@contextmanager
def without_fallback() -> Iterator[None]:
    """Every statement must find its kernel."""
    kept = insum.export._kernels

    def found(problem: Any, values: Any) -> Any:
        kernels = kept(problem, values)
        assert kernels is not None, f"no kernel for {problem.statement.text}"
        return kernels

    insum.export._kernels = found
    try:
        yield
    finally:
        insum.export._kernels = kept


# --- TorchInductor's kernels ----------------------------------------------------------------------


def test_the_inductor_backend() -> None:
    assert compiler.inductor_options(True)["triton.native_matmul"]
    for name, make in MAKERS.items():
        for native in (True, False):
            for n in (20, 27):
                application = make(n)
                with insum.settings(backend="inductor", native_matmul=native, require_fused=True):
                    error = relative_error(application.run(), application.expected())
                assert error < TOLERANCE, f"{name}, native {native}, {n}: {error}"


def test_gradients_through_the_inductor_backend() -> None:
    for name in ("block SpMM", "convolution"):
        application = MAKERS[name](20)
        upstream = application.upstream()
        values = {
            n: v.clone().requires_grad_() if n in application.wanted else v
            for n, v in application.values.items()
        }
        with insum.settings(backend="inductor", require_fused=True):
            call(application)(**values).backward(upstream)
        for wanted, expected in application.expected_gradients(upstream).items():
            assert relative_error(values[wanted].grad, expected) < TOLERANCE, (
                f"{name}, gradient of {wanted}"
            )


if __name__ == "__main__":
    only = sys.argv[1:]
    failed = 0
    for title, function in list(globals().items()):
        if title.startswith("test_") and (not only or any(part in title for part in only)):
            try:
                function()
                print(f"ok      {title}", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED  {title}\n{traceback.format_exc()[-2500:]}", flush=True)
    sys.exit(failed > 0)
