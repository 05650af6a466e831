"""The search, with a clock that is not one: what is tried, what wins, what is not trusted, what is
remembered and said.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import insum
from applications import Application, block_spmm, spmm, tiny
from insum.errors import SettingsError
from insum.plan.config import Choice, Config
from insum.runtime import cache, compiling, inspection, search, timing, workers
from insum.runtime.build import first_choice
from insum.runtime.program import Program
from insum.runtime.ready import Ready
from insum.runtime.shelf import recalled
from insum.runtime.timing import wall_timer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSUM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    for name, effort in search.EFFORTS.items():  # a busy machine ends no search early
        monkeypatch.setitem(search.EFFORTS, name, dataclasses.replace(effort, seconds=3600.0))
    cache.forget()
    return tmp_path


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are written but not run: whatever the config, the result is the same."""
    instead_of_running(monkeypatch, lambda ready: torch.ones_like(ready.empty()))


def instead_of_running(
    monkeypatch: pytest.MonkeyPatch, result: Callable[[Ready], torch.Tensor]
) -> None:
    monkeypatch.setattr(Ready, "__call__", lambda self, values, target=None: result(self))


def choice_in(run: Any, step: int = 0) -> Choice:
    assert isinstance(run, functools.partial) and isinstance(run.func, Ready)
    return run.func.program.steps[step].choice


class Clock:
    """Times by a rule; remembers what it was asked for."""

    def __init__(self, rule: Callable[[Choice], float]) -> None:
        self.rule = rule
        self.asked: list[tuple[Choice, int]] = []

    def __call__(self, run: Any, repeat: int) -> float:
        self.asked.append((choice_in(run), repeat))
        return self.rule(choice_in(run))

    def count(self, choice: Choice) -> int:
        return sum(1 for c, _ in self.asked if c == choice)


def product() -> Application:
    return block_spmm(rows=8, columns=8, block=32, n=512, density=0.3, dtype=torch.float16)


def skewed() -> Application:
    return spmm(rows=500, columns=500, n=64, entries=6000, heavy=400, dtype=torch.float32)


def searched(
    application: Application, clock: Callable[..., float], effort: str = "full"
) -> search.Tuned:
    return search.tune(application.forward.problem(), application.values, None, effort, timer=clock)


def look_at(application: Application) -> inspection.Look:
    return inspection.Look(application.forward.problem(), application.values)


def first_guess(application: Application) -> Choice:
    look = look_at(application)
    (one,) = look.planned()
    return first_choice(one, look.wishes)


# --- what wins ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("computed")
def test_the_fastest_wins_and_is_remembered() -> None:
    wanted = None

    def rule(choice: Choice) -> float:
        return 5.0 if choice == wanted else 10.0

    clock = Clock(rule)
    first = searched(product(), clock, "quick")
    assert first.choice == first_guess(product()) and first.speedup == 1.0
    wanted = next(c for c, _ in clock.asked if c != first.choice)
    found = searched(product(), clock, "quick")
    assert (found.choice, found.microseconds, found.first_guess, found.speedup) == (
        wanted,
        5.0,
        10.0,
        2.0,
    )
    cache.forget()
    program = inspection.plan_only(product().forward.problem(), product().values)
    assert program.steps[0].choice != first.choice or wanted == first.choice, (
        "a later build takes what was found"
    )


@pytest.mark.usefixtures("computed")
def test_a_later_build_takes_what_was_found() -> None:
    application = product()
    found = searched(application, Clock(lambda c: float(c[0].k + c[0].n)))
    assert found.choice != first_guess(application)
    for _ in range(2):  # from memory, then from the file
        look = look_at(application)
        (one,) = look.planned()
        assert recalled(look.problem, one, look.wishes) == found.choice
        cache.forget()


@pytest.mark.usefixtures("computed")
def test_losers_are_looked_at_once_and_the_best_again() -> None:
    guess = first_guess(product())
    clock = Clock(
        lambda choice: 10.0 if choice == guess else 9.0 if choice[0].stages == 3 else 100.0
    )
    searched(product(), clock, "quick")
    slow = [c for c, _ in clock.asked if clock.rule(c) == 100.0]
    assert slow and all(clock.count(c) == 1 for c in slow)
    assert (
        max(repeat for _, repeat in clock.asked) == search.FINAL
        and clock.count(guess) == 2 + search.ROUNDS
    )


@pytest.mark.usefixtures("computed")
def test_the_first_guess_is_among_what_is_tried() -> None:
    """It is made for a class of sizes, not for these sizes."""
    application = spmm(
        rows=8000, columns=8000, n=32, entries=115_000, heavy=400, dtype=torch.float32
    )
    found = searched(application, Clock(lambda c: 1.0), "quick")
    assert found.trials[0].choice == found.choice == first_guess(application)
    assert found.microseconds == found.first_guess == 1.0


@pytest.mark.usefixtures("computed")
def test_a_hair_is_not_enough() -> None:
    guess = first_guess(product())
    assert searched(product(), Clock(lambda c: 10.0 if c == guess else 9.9)).choice == guess


@pytest.mark.usefixtures("computed")
def test_equals_are_told_apart_by_a_cold_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    guess = first_guess(product())
    clock = Clock(lambda c: 10.0 if c == guess else 5.0)
    cold = Clock(lambda c: float(c[0].k))
    monkeypatch.setattr(search, "_untimed", lambda problem: "")
    monkeypatch.setattr(search, "unusable", lambda problem: "")
    monkeypatch.setattr(
        search, "replay_timer", lambda device, cold=False, clocks=(clock, cold): clocks[cold]
    )
    found = search.tune(product().forward.problem(), product().values, None, "quick")
    assert (
        cold.asked
        and found.choice[0].k == min(c[0].k for c, _ in cold.asked)
        and found.microseconds == 5.0
    )


@pytest.mark.usefixtures("computed")
def test_full_refines_around_the_best() -> None:
    quick, full = Clock(lambda c: float(c[0].warps)), Clock(lambda c: float(c[0].warps))
    assert len(searched(product(), full, "full").trials) > 3 * len(
        searched(product(), quick, "quick").trials
    )
    assert len({c for c, _ in quick.asked}) <= 8


@pytest.mark.usefixtures("computed")
def test_short_and_long_rows_are_put_together() -> None:
    base = first_guess(skewed())

    def rule(choice: Choice) -> float:
        short, long = choice
        return (
            20.0
            - 4.0 * (short.m != base[0].m)
            - 3.0 * (long.k != base[1].k)
            - 2.0 * (short.split != base[0].split)
        )

    found = searched(skewed(), Clock(rule))
    assert found.microseconds == 11.0, "each was best alone, and they were tried together"


# --- what is not trusted --------------------------------------------------------------------------


def test_a_winner_with_another_result_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guess = first_guess(product())
    instead_of_running(
        monkeypatch,
        lambda ready: torch.full((4,), 1.0 if ready.program.steps[0].choice == guess else 1.5),
    )
    with caplog.at_level(logging.WARNING, "insum"):
        found = searched(product(), Clock(lambda c: 10.0 if c == guess else 1.0), "quick")
    assert found.choice == guess and "another result" in caplog.text


def test_a_candidate_that_fails_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_running(monkeypatch, lambda ready: torch.ones(4))

    def rule(choice: Choice) -> float:
        if choice[0].stages > 3:
            raise RuntimeError("out of resource: shared memory")
        return 20.0 - choice[0].stages

    found = searched(product(), Clock(rule))
    assert found.choice[0].stages <= 3
    failed = [t for t in found.trials if t.microseconds == float("inf")]
    assert failed and all("shared memory" in t.note for t in failed)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
)
def test_results_are_compared_by_dtype(dtype: torch.dtype) -> None:
    want = torch.arange(1, 200).to(dtype)
    assert search.same(want.clone(), want)
    assert not search.same(want * 2, want)
    if dtype.is_floating_point:
        want[3] = float("inf")
        assert search.same(want.clone(), want) and not search.same(
            torch.where(torch.isinf(want), 1.0, want).to(dtype), want
        )
        assert search.same(want * (1 + torch.finfo(dtype).eps), want)


# --- efforts, ranks, words ------------------------------------------------------------------------


def test_without_a_gpu_the_first_guess_stands_and_says_so() -> None:
    application = tiny()[0]
    tuned = insum.tune(
        application.statement,
        sizes=dict(application.sizes),
        padded=application.padded,
        **application.values,
    )
    assert (
        tuned.source.startswith("first guess: ")
        and "cpu" in tuned.source
        and "config=insum.Config(" in str(tuned)
    )
    assert list(cache.entries()) == [], "a guess is not kept as if it had been measured"
    compiled = insum.compile("y[i] = A[i,j] * x[j]")
    assert compiled.tune(A=torch.ones(2, 3), x=torch.ones(3)).config is not None


def test_wrong_efforts_are_refused() -> None:
    for effort in ("none", "some"):
        with pytest.raises(SettingsError, match="'quick' or 'full'"):
            insum.tune("y[i] = A[i]", effort=effort, A=torch.ones(3))


def test_tuning_finds_the_mistakes_that_a_call_would_find() -> None:
    with pytest.raises(insum.BindingError):
        insum.tune("y[i] = A[i,j] * x[j]", A=torch.ones(2, 3), x=torch.ones(4))
    with pytest.raises(insum.IndexRangeError):
        insum.tune("y[D[i]] = A[i]", out_shape=(2,), A=torch.ones(2), D=torch.tensor([0, 7]))


@pytest.mark.usefixtures("computed")
def test_the_winner_is_one_line_that_can_be_pasted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "insum"):
        found = searched(skewed(), Clock(lambda c: float(c[0].m)), "quick")
    (line,) = [r.getMessage() for r in caplog.records]
    assert eval(line.partition("config=")[2], {"insum": insum}) == found.config == found.choice
    caplog.clear()
    monkeypatch.setenv("RANK", "3")
    with caplog.at_level(logging.INFO, "insum"):
        searched(skewed(), Clock(lambda c: float(c[0].m)), "quick")
    assert not caplog.records, "other ranks are silent"


@pytest.mark.usefixtures("computed")
def test_nothing_is_written_to_the_terminal_that_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    searched(product(), Clock(lambda c: 1.0), "quick")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.usefixtures("computed")
def test_a_terminal_gets_a_progress_bar_and_the_winner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    searched(product(), Clock(lambda c: 1.0), "quick")
    assert "config=insum.Config(" in capsys.readouterr().err


@pytest.mark.usefixtures("computed")
def test_accumulating_statements_are_tried_on_copies() -> None:
    A, x, y = torch.ones(4, 3), torch.ones(3), torch.zeros(4)
    problem = insum.call.request.request_of("y[i] += A[i,j] * x[j]", None, None, ()).bind(
        {"A": A, "x": x, "y": y}
    )
    seen = []

    def timer(run: Any, repeat: int) -> float:
        seen.append(run.args[1])
        return 1.0

    search.tune(problem, {"A": A, "x": x, "y": y}, y, "quick", timer=timer)
    assert seen and all(t is not y and t.data_ptr() != y.data_ptr() for t in seen) and not y.any()


@pytest.mark.usefixtures("computed")
def test_a_sum_of_products_is_tuned_product_by_product() -> None:
    A, B = torch.ones(64, 32), torch.ones(32, 64)
    values = {"A": A, "B": B, "D": torch.ones(64, 64)}
    problem = insum.call.request.request_of(
        "C[i,j] = A[i,k] * B[k,j] + D[i,j]", None, None, ()
    ).bind(values)
    found = search.tune(
        problem,
        values,
        None,
        "quick",
        timer=lambda run, repeat: 10.0 - 0.5 * choice_in(run, 1)[0].warps,
    )
    assert len(found.choice) == 2 and len(list(cache.entries())) == 2
    program = inspection.plan_only(problem, values, config=found.choice)
    assert tuple(step.choice[0] for step in program.steps) == found.choice


def test_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_running(monkeypatch, lambda ready: torch.ones(4))
    monkeypatch.setitem(search.EFFORTS, "quick", search.Effort(8, 0, 0.0))
    found = searched(product(), Clock(lambda c: 1.0), "quick")
    assert found.choice == first_guess(product()) and {t.note for t in found.trials[1:]} == {
        "no time left"
    }


# --- the first call -------------------------------------------------------------------------------


@pytest.mark.interpreter
def test_effort_tunes_the_first_call_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_untimed", lambda problem: "")
    monkeypatch.setattr(
        search,
        "replay_timer",
        lambda device, cold=False: lambda run, repeat: 50.0 - choice_in(run)[0].m,
    )
    application = tiny()[0]
    efforts: list[str] = []
    real = search.tune
    monkeypatch.setattr(
        search, "tune", lambda *args, **options: efforts.append(args[3]) or real(*args, **options)
    )

    def call() -> torch.Tensor:
        return insum.insum(
            application.statement,
            sizes=dict(application.sizes),
            padded=application.padded,
            **application.values,
        )

    with insum.settings(backend="fused", require_fused=True):
        expected = call()
        assert efforts == []
        with insum.settings(effort="quick"):
            for _ in range(3):
                assert torch.allclose(call(), expected, atol=1e-4)
        assert efforts == ["quick"]
        assert torch.allclose(call(), expected, atol=1e-4)
    assert len(list(cache.entries())) == 1


@pytest.mark.interpreter
def test_tuned_launches_replace_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = torch.randn(40, 33), torch.randn(33, 50)
    statement = "C[i,j] = A[i,k] * B[k,j]"
    with insum.settings(backend="fused", require_fused=True):
        insum.insum(statement, A=A, B=B)
        problem = insum.call.request.request_of(statement, None, None, ()).bind({"A": A, "B": B})
        found = search.tune(
            problem,
            {"A": A, "B": B},
            None,
            "full",
            timer=lambda run, repeat: float(choice_in(run)[0].k),
        )
        assert found.choice[0].k == 16
        assert torch.allclose(insum.insum(statement, A=A, B=B), A @ B, atol=1e-4)
        assert "k=16" in str(insum.explain(statement, A=A, B=B))
        assert "k=32" in str(insum.explain(statement, config=Config(m=16, n=16, k=32), A=A, B=B))


# --- clocks and workers ---------------------------------------------------------------------------


def test_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median, in microseconds, without the first call; by a clock that nobody else keeps."""
    assert wall_timer(lambda: time.sleep(0.003), 1) >= 2000
    now, lengths = 0.0, iter([90.0, 3.0, 1.0, 7.0])

    def run() -> None:
        nonlocal now
        now += next(lengths)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now))
    assert wall_timer(run, 3) == 3e6


@pytest.mark.compile_only
def test_workers_compile_what_a_launch_would_look_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    application = product()
    look = inspection.elsewhere(application.forward.problem(), application.values)
    program = look.program(anywhere=True)
    assert isinstance(program, Program)
    (one,) = look.ready(program).launches
    source, name, types, aligned, _, stages = one.job()
    jobs = [(source, name, types, aligned, warps, stages) for warps in (4, 8)]
    done: list[int] = []
    assert workers.compile_ahead(
        jobs, ["cuda", 90, 32], workers=2, done=lambda: done.append(1)
    ) == [
        "",
        "",
    ]
    assert len(done) == 2
    before = {path.name for path in (tmp_path / "triton").iterdir()}
    assert len(before) == 2
    wrong = ("nowhere.py", "x", [], 0, 4, 2)
    assert workers.compile_ahead([*jobs, wrong], ["cuda", 90, 32], workers=2)[2] != ""
    compiling.compile_for(
        one.launch.function, one.types, "sm_90", warps=4, stages=stages, unaligned=one.usual
    )
    assert {path.name for path in (tmp_path / "triton").iterdir()} == before, (
        "found, not compiled again"
    )


@pytest.mark.gpu
def test_a_search_on_the_device() -> None:
    application = block_spmm(
        rows=64, columns=64, block=32, n=2048, density=0.1, dtype=torch.float16, device="cuda"
    )
    expected = application.run()
    tuned = insum.tune(
        application.statement,
        effort="quick",
        sizes=dict(application.sizes),
        padded=application.padded,
        **application.values,
    )
    assert (
        tuned.source == "search"
        and tuned.microseconds <= tuned.first_guess * 1.01
        and len(tuned.trials) >= 4
    )
    assert search.same(application.run(), expected)
    given = insum.insum(
        application.statement,
        sizes=dict(application.sizes),
        padded=application.padded,
        config=tuned.config,
        **application.values,
    )
    assert search.same(given, expected)


# --- the group size -------------------------------------------------------------------------------


def grouped(group_size: int = 1) -> Any:
    dense = torch.zeros(8, 64)
    dense[:, ::4] = torch.arange(1.0, 129.0).reshape(8, 16)
    return insum.formats.GroupCOO.from_dense(dense, group_size=group_size)


def test_the_fastest_group_size_is_kept() -> None:
    A, B = grouped(), torch.randn(64, 5)
    seen: list[int] = []

    def timer(run: Any, repeat: int) -> float:
        size = run.__self__.given["A"].group_size
        seen.append(size)
        assert torch.allclose(run(), A.to_dense() @ B, rtol=1e-4, atol=1e-4)
        return abs(size - 8) + 1.0

    tuned = insum.formats.tune(A, "C[m,n] = A[m,k] * B[k,n]", B=B, timer=timer)
    assert (
        seen == [1, 2, 4, 8]
        and tuned.estimate == 4.0
        and tuned.group_size == 8 == tuned.format.group_size
    )
    assert tuned.format.to_dense().equal(A.to_dense()) and "group size 8" in str(tuned)


def test_blocks_and_transposed_groups_keep_their_options() -> None:
    blocks = insum.formats.BlockGroupCOO.from_dense(
        torch.ones(32, 64), block_shape=(8, 8), group_size=1
    )
    tuned = insum.formats.tune(
        blocks,
        "C[m,n] = M[m,k] * B[k,n]",
        B=torch.ones(64, 3),
        timer=lambda run, repeat: 1.0 / run.__self__.given["M"].group_size,
    )
    assert tuned.format.block_shape_or_none == (8, 8) and tuned.group_size == max(
        tuned.microseconds
    )
    columns = grouped().T
    tuned = insum.formats.tune(
        columns, "C[k,n] = M[k,m] * B[m,n]", B=torch.ones(8, 3), timer=lambda run, repeat: 1.0
    )
    assert tuned.format.group_dims == columns.group_dims


def test_a_table_is_tried_as_a_table_and_in_groups() -> None:
    table = torch.stack([torch.randperm(200) for _ in range(5)]).int()
    table[torch.rand(5, 200) < 0.5] = -1
    A = insum.formats.NeighborTable(table, (5, 200, 200), dim=2)
    x, W = torch.randn(200, 4), torch.randn(5, 4, 3)
    statement = "Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]"
    for best in (0, 16):
        clock = lambda run, repeat, best=best: float(
            getattr(run.__self__.given["Map"], "group_size", 0) != best
        )
        tuned = insum.formats.tune(A, statement, In=x, W=W, timer=clock)
        assert tuned.group_size == best and sorted(tuned.microseconds) == [0, 16]
        assert type(tuned.format).__name__ == ("GroupCOO" if best else "NeighborTable") and (
            "group size 16" if best else "table (g*"
        ) in str(tuned)
        assert torch.allclose(
            insum.einsum(statement, Map=tuned.format, In=x, W=W),
            insum.einsum(statement, Map=A, In=x, W=W),
            atol=1e-5,
        )


def test_what_has_no_group_size_is_refused() -> None:
    with pytest.raises(insum.FormatError, match="has no group size"):
        insum.formats.tune(
            insum.formats.COO.from_dense(torch.eye(3)),
            "C[m,n] = A[m,k] * B[k,n]",
            B=torch.ones(3, 3),
        )
    with pytest.raises(insum.BindingError, match="A, B"):
        insum.formats.tune(grouped(), "C[m,n] = A[m,k] * B[k,n]")


def test_workers_that_the_system_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are then compiled by whoever launches them, and nobody is left behind."""
    jobs = [(f"nowhere{k}.py", "x", [], 0, 4, 2) for k in range(3)]
    nothing, started = ["not compiled"] * 3, []
    original = subprocess.Popen

    def first_alone(*args: Any, **options: Any) -> Any:
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(original(*args, **options))
        return started[0]

    def ahead() -> list[str]:
        return workers.compile_ahead(jobs, ["cuda", 90, 32], workers=3)

    monkeypatch.setattr(workers, "_WORKER", "import os; os.kill(os.getpid(), 9)")
    assert ahead() == nothing, "workers that are ended from outside"
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", first_alone)
        assert ahead() == nothing and started[0].returncode is not None
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: _raise(RuntimeError("no threads")))
        assert ahead() == nothing
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a worker"))
    monkeypatch.setattr(sys, "executable", None)
    assert ahead() == nothing
    monkeypatch.setattr(sys, "executable", "program")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert ahead() == nothing


def _raise(error: Exception) -> None:
    raise error
