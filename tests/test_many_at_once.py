"""Many threads and processes that use insum at once, and for the first time at once."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import insum
from insum import memory
from insum.runtime import cache, compiling, launch, record

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
THREADS = 16
#: Seconds after which something hangs. A busy machine takes many times what a test needs.
PATIENCE = 600


def aggregated(width: int = 4, seed: int = 0, suffix: str = "") -> float:
    """How far a call, forward and backward, is from what torch gives."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, width, generator=generator, dtype=torch.float64, requires_grad=True)
    s, d = torch.randint(0, 9, (2, 40), generator=generator).unbind()
    y = insum.insum(f"y[d[e],f{suffix}] = x[s[e],f{suffix}]", x=x, s=s, d=d, out_shape=(9, width))
    want = torch.zeros(9, width, dtype=torch.float64).index_add(0, d, x[s])
    (ours,) = torch.autograd.grad(y.square().sum(), x)
    (theirs,) = torch.autograd.grad(want.square().sum(), x)
    return float(((y - want).abs().max() + (ours - theirs).abs().max()).detach())


# --- threads --------------------------------------------------------------------------------------


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """What threads give that begin at the same time."""
    start = threading.Barrier(THREADS)

    def begin(number: int) -> Any:
        start.wait(PATIENCE)
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS), timeout=PATIENCE))


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has called nothing yet."""
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    monkeypatch.setattr("insum.graph.lower._graphs", {})
    memory.forget()


def test_threads_that_call_one_statement_first(anew: None) -> None:
    assert max(at_once(lambda number: aggregated(seed=number, suffix="same"))) < 1e-9


def test_threads_that_call_statements_of_their_own(anew: None) -> None:
    assert max(at_once(lambda number: aggregated(3 + number % 3, number, f"own{number}"))) < 1e-9


def test_threads_that_share_index_tensors_and_formats(anew: None) -> None:
    dense = torch.randn(8, 8, dtype=torch.float64) * (torch.rand(8, 8) < 0.5)
    A = insum.formats.GroupCOO.from_dense(dense, group_size=2)
    B = torch.randn(8, 3, dtype=torch.float64)
    edges = torch.randint(0, 8, (2, 30))
    layer = insum.nn.GCNConv(3, 2).double()
    want = layer(B, edges)

    def work(number: int) -> float:
        product = A @ B if number % 2 else insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)
        far = (product - dense @ B).abs().max() + (layer(B, edges) - want).abs().max()
        return float(far.detach())

    assert max(at_once(work)) < 1e-9


def test_threads_that_make_formats_and_layers() -> None:
    def work(number: int) -> float:
        dense = torch.eye(6, dtype=torch.float64) * (number + 1)
        A = insum.formats.BlockGroupCOO.from_dense(dense, block_shape=(2, 2), group_size="auto")
        layer = insum.nn.SparseLinear(insum.formats.COO.from_dense(dense))
        x = torch.ones(1, 6, dtype=torch.float64)
        far = (A @ x.T - number - 1).abs().max() + (layer(x) - number - 1).abs().max()
        return float(far.detach())

    assert max(at_once(work)) == 0


def test_settings_of_threads_stay_apart() -> None:
    before = insum.settings.values

    def work(number: int) -> bool:
        wanted = ("always", "never", "async")[number % 3]
        for _ in range(50):
            with insum.settings(check=wanted):
                if insum.settings.check != wanted or aggregated() > 1e-9:
                    return False
        return insum.settings.values is before

    assert all(at_once(work))


# --- forks ----------------------------------------------------------------------------------------


def in_a_fork(work: Callable[[], object], seconds: int = PATIENCE) -> int:
    """The exit status of a forked process that does some work; it is killed where it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            status = 0 if work() else 2
        finally:
            os._exit(status)
    timer = threading.Timer(seconds, os.kill, (child, 9))
    timer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        timer.cancel()


@FORKS
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_after_use_in_the_parent() -> None:
    assert aggregated() < 1e-9
    assert in_a_fork(lambda: aggregated() < 1e-9 and aggregated(7, 1, "child") < 1e-9) == 0
    assert aggregated() < 1e-9


@FORKS
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("module", [memory, launch, cache, record])
def test_a_fork_while_a_thread_holds_a_lock(module: Any) -> None:
    """The thread is not in the child, so that nobody would let go of it there."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with module._lock:
            held.set()
            done.wait(2 * PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(PATIENCE)
    try:

        def work() -> bool:
            with module._lock:
                return aggregated(5, 2, "forked") < 1e-9

        assert in_a_fork(work) == 0
    finally:
        done.set()
        thread.join()


class Products(Dataset[Tensor]):
    """What workers of a loader compute."""

    A = insum.formats.COO.from_dense(torch.eye(4))

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Tensor:
        assert aggregated(seed=number) < 1e-9
        return self.A @ torch.full((4,), float(number))


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_loader(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system does not {how}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    loader = DataLoader(Products(), batch_size=2, num_workers=2, multiprocessing_context=how)
    found = torch.cat(list(loader))
    assert torch.equal(found, torch.arange(6.0)[:, None].expand(6, 4))


# --- processes on one folder ----------------------------------------------------------------------

KERNELS = """
import os, sys, triton
from insum.codegen.kernel import Kernel
from insum.runtime import compiling, launch

children = []
for _ in range(4):  # each with all that was imported
    children.append(os.fork())
    if not children[-1]:
        break
else:
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))
for number in range(40):
    text = f"@triton.jit\\ndef insum_kernel(x_ptr):\\n    return  # {number}\\n"
    function = launch.load(Kernel("insum_kernel", text, ("x_ptr",)), '\"\"\"y[i] = x[i]\"\"\"')
    assert function is not None
    launch.forget()
os.write(1, b"fine\\n")
os._exit(0)
"""


def test_processes_that_write_the_same_kernels(tmp_path: Path) -> None:
    import subprocess

    pytest.importorskip("triton")
    environment = {**os.environ, "INSUM_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n" * 4), done.stderr
    files = list((tmp_path / "kernels").iterdir())
    assert len(files) == 40 and all(compiling.kept_text(path) is not None for path in files)
