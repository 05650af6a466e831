"""Correctness first: what is wrong, fails or has no time left gets no number."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from insum.bench import measure
from insum.bench.measure import (
    Comparison,
    Contender,
    DeviceLimits,
    ReadyContender,
    Runner,
    Work,
    autograd,
    clock,
    relative_error,
)
from insum.bench.records import BOTH, FORWARD, Row

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def limits() -> DeviceLimits:
    return DeviceLimits(CPU)


def case(*contenders: Contender) -> Comparison:
    return Comparison(
        "made",
        "a case",
        torch.float32,
        FORWARD,
        CPU,
        lambda: (torch.arange(4.0, dtype=torch.float64),),
        contenders,
        Work(1.0, 1.0),
    )


def giving(value: Callable[[], Tensor], **options: object) -> Contender:
    return Contender("one", lambda: ReadyContender(lambda: (value(),)), **options)  # type: ignore[arg-type]


def only(runner: Runner, contender: Contender) -> Row:
    (row,) = runner.rows([case(contender)])
    return row


def test_a_right_result_is_timed(limits: DeviceLimits) -> None:
    row = only(Runner(limits), giving(lambda: torch.arange(4.0), lines=7))
    assert (row.status, row.error, row.lines, row.clock) == ("ok", 0.0, 7, "host")
    assert (
        row.milliseconds
        and row.limit_percent
        and row.first_call_s is not None
        and row.memory_mib is None
    )


@pytest.mark.parametrize(
    "value",
    [
        lambda: torch.arange(4.0) + 0.1,
        lambda: torch.full((4,), math.nan),
        lambda: torch.arange(5.0),
        lambda: torch.empty(0),
    ],
    ids=["off", "nan", "shape", "empty"],
)
def test_a_wrong_result_gets_no_time(limits: DeviceLimits, value: Callable[[], Tensor]) -> None:
    row = only(Runner(limits), giving(value))
    assert (
        row.status == "WRONG"
        and row.milliseconds is None
        and row.limit_percent is None
        and "no time is given" in row.note
    )


def test_a_result_that_goes_wrong_later_gets_no_time(limits: DeviceLimits) -> None:
    calls = iter(range(100))
    row = only(Runner(limits), giving(lambda: torch.arange(4.0) + (next(calls) > 2)))
    assert row.status == "WRONG" and "warm call" in row.note and row.milliseconds is None


@pytest.mark.gpu
def test_what_is_not_written_is_seen() -> None:
    """Memory that outputs will take is filled with NaN first; a CPU's allocator does not tell which
    it hands out next.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda")
    want = torch.arange(4096.0, device=device, dtype=torch.float64)
    one = Comparison(
        "made",
        "a case",
        torch.float32,
        FORWARD,
        device,
        lambda: (want,),
        [giving(lambda: torch.empty(4096, device=device))],
        Work(1.0, 1.0),
    )
    (row,) = Runner(DeviceLimits(device)).rows([one])
    assert row.status == "WRONG" and row.error == math.inf


def test_a_failure_is_a_result(limits: DeviceLimits) -> None:
    def fail() -> ReadyContender:
        raise RuntimeError("no kernel image\nis available")

    row = only(Runner(limits), Contender("one", fail, note="a rival"))
    assert (
        row.status == "failed"
        and row.note == "a rival; RuntimeError: no kernel image"
        and row.milliseconds is None
    )


def test_a_reference_that_fails_fails_the_row(limits: DeviceLimits) -> None:
    def want() -> tuple[Tensor, ...]:
        raise RuntimeError("out of memory")

    broken = Comparison(
        "made",
        "a case",
        torch.float32,
        FORWARD,
        CPU,
        want,
        [giving(lambda: torch.arange(4.0))] * 2,
        Work(1.0, 1.0),
    )
    assert [row.status for row in Runner(limits).rows([broken])] == ["failed", "failed"]


def test_no_time_left(limits: DeviceLimits) -> None:
    row = only(Runner(limits, deadline=time.monotonic() - 1), giving(lambda: torch.arange(4.0)))
    assert row.status == "skipped" and "--budget" in row.note
    late = Runner(limits, deadline=time.monotonic() - 1, first_anyway=True)
    assert only(late, giving(lambda: torch.arange(4.0))).status == "ok"  # no table is empty


def test_slow_contenders_run_in_the_first_case_only(limits: DeviceLimits) -> None:
    slow = giving(lambda: torch.arange(4.0), slow=True)
    rows = list(Runner(limits, slow_cases=1).rows([case(slow), case(slow)]))
    assert [row.status for row in rows] == ["ok", "skipped"] and "--quick" in rows[1].note
    assert "--no-slow" in only(Runner(limits, slow_cases=0), slow).note


def test_rivals_that_nobody_asked_for(limits: DeviceLimits) -> None:
    one = giving(lambda: torch.arange(4.0))
    assert list(Runner(limits, unwanted=("nobody", one.name[1:])).rows([case(one)])) == []
    assert len(list(Runner(limits, unwanted=("nobody",)).rows([case(one)]))) == 1


def test_gradients_are_part_of_the_result() -> None:
    a, b, g = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    out, to_a, to_b = autograd(torch.mm, (a, b), g, BOTH).run()
    torch.testing.assert_close((out, to_a, to_b), (a @ b, g @ b.T, a.T @ g))
    assert not out.requires_grad and len(autograd(torch.mm, (a, b), None, FORWARD).run()) == 1


def test_relative_error() -> None:
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error((torch.tensor([3.0, 4.5]),), (want,)) == pytest.approx(0.1)
    assert relative_error((want.float(), want.float() * 2), (want, want)) == pytest.approx(1.0)
    assert relative_error((), (want,)) == math.inf


def test_limits_follow_the_larger_of_bytes_and_flops(limits: DeviceLimits) -> None:
    small, wide = Work(1e9, 1.0), Work(1.0, 1e9)
    assert limits.seconds(small, torch.float32) == pytest.approx(1e9 / limits.rate(torch.float32))
    assert limits.seconds(wide, torch.float32) == pytest.approx(1e9 / limits.bytes_per_s)


class OwnClock:
    """Stands for ``time``: it goes on by what calls are said to take, and nothing else."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def call(self, seconds: float) -> tuple[Tensor, ...]:
        self.now += seconds
        return ()


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> OwnClock:
    one = OwnClock()
    monkeypatch.setattr(measure, "time", one)
    monkeypatch.setattr(measure.timing, "time", one)
    return one


def test_the_clock_is_right(own_clock: OwnClock) -> None:
    milliseconds, how = clock(lambda: own_clock.call(0.01), CPU)
    assert how == "host" and milliseconds == pytest.approx(10)


def test_limits_of_a_busy_machine_are_those_of_its_best_moments(own_clock: OwnClock) -> None:
    calls = iter([*range(measure.LIMIT_CALLS)])
    run = lambda: own_clock.call(0.001 if next(calls) == 7 else 0.01)
    assert measure.shortest(run, CPU) == pytest.approx(0.001)


def test_what_no_cuda_graph_can_hold_is_timed_with_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> Callable[..., float]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(measure, "wait", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(measure.timing, "event_timer", lambda run, repeat: 2000.0)
    monkeypatch.setattr(measure.timing, "replay_timer", refuse)
    gpu = torch.device("cuda")
    assert clock(lambda: (), gpu, capture=False) == (2.0, "events")
    assert clock(lambda: (), gpu) == (
        2.0,
        "events; no CUDA graph (RuntimeError: operation not permitted when stream is capturing)",
    )
    monkeypatch.setattr(measure.timing, "replay_timer", lambda device: lambda run, repeat: 500.0)
    assert clock(lambda: (), gpu) == (0.5, "CUDA graph")


def test_runs_that_share_a_device_measure_while_nobody_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSUM_BENCH_TURNS", str(tmp_path / "turns"))
    done: list[str] = []
    both_compile, waits = threading.Barrier(2), threading.Event()

    def one() -> None:
        with measure.set_up():
            both_compile.wait(60)  # side by side with the other
            waits.wait(60)
            done.append("compiled")

    def other() -> None:
        with measure.set_up():
            both_compile.wait(60)
        waits.set()
        with measure.turn():
            done.append("measured")

    threads = [threading.Thread(target=run) for run in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == ["compiled", "measured"]
