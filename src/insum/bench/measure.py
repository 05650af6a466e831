"""One case after the other, one contender after the other: set up, check against float64, then
clock and memory.

A wrong result gets no time. A contender that cannot run says why in its row; nothing is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from insum.bench.options import BenchOptions
from insum.bench.records import BOTH, FORWARD, Row
from insum.runtime import timing

R = TypeVar("R")
Results: TypeAlias = tuple[Tensor, ...]
Thunk: TypeAlias = Callable[[], Results]
#: Relative error, in the 2-norm, up to which a result counts as right.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
#: Calls before anything is timed: what keeps coming back gets better schedules, the last of them at
#: the ninth call.
WARM = 10
#: Seconds that the repetitions of one contender should take.
SECONDS = {"cuda": 0.12, "cpu": 0.1}
#: Calls of which a limit of a CPU is the shortest.
LIMIT_CALLS = 30
#: Numbers that are compared in double precision at a time.
AT_ONCE = 1 << 26


@dataclass(frozen=True, eq=False)
class ReadyContender:
    """A contender that is set up: ``run`` gives the output (and gradients); ``canonical`` brings
    them to the reference's shapes, untimed.
    """

    run: Thunk
    canonical: Callable[[Results], Results] = lambda results: results
    note: str = ""


@dataclass(frozen=True, eq=False)
class Contender:
    """Somebody who can do the case. ``make`` may raise; ``slow`` takes seconds to set up;
    ``capture``: its calls fit a CUDA graph.
    """

    name: str
    make: Callable[[], ReadyContender]
    lines: int | None = None
    slow: bool = False
    capture: bool = True
    note: str = ""
    times: bool = False  # setting it up is a search that uses clocks


@dataclass(frozen=True)
class Work:
    """The least that any implementation has to do: bytes that cross memory once, and FLOPs."""

    flops: float
    bytes: float


class Inputs(Protocol):
    """What a case is about: knows the work that it is."""

    def work(self, direction: str) -> Work: ...


@dataclass(frozen=True, eq=False)
class Comparison:
    """One comparison. ``want`` computes the float64 results."""

    benchmark: str
    name: str
    dtype: torch.dtype
    direction: str
    device: torch.device
    want: Callable[[], Results]
    contenders: Sequence[Contender]
    work: Work


def cases_of(
    benchmark: str,
    name: str,
    dtype: torch.dtype,
    options: BenchOptions,
    given: Inputs,
    want: Callable[..., Results],
    contenders: Callable[..., Sequence[Contender]],
) -> Iterator[Comparison]:
    """A case for every direction that was asked for; ``want`` and ``contenders`` take the inputs
    and the direction.
    """
    for direction in options.directions:
        exact = functools.partial(want, given, direction)
        yield Comparison(
            benchmark,
            name,
            dtype,
            direction,
            options.device,
            exact,
            contenders(given, direction),
            given.work(direction),
        )


class DeviceLimits:
    """What the device reaches, measured in the same run when it is first asked for: bytes read and
    written in a row, and dense matmuls.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.flops_per_s, self._bytes = device, dict[str, float](), 0.0

    @property
    def bytes_per_s(self) -> float:
        if not self._bytes:
            source = torch.ones(
                (2**30 if self.device.type == "cuda" else 2**25) // 4, device=self.device
            )
            target = torch.empty_like(source)
            # Not copy_: inside a CUDA graph that is done by an engine of its own, which is slower
            # than kernels are.
            scale = lambda: (torch.mul(source, 2, out=target),)
            self._bytes = 2 * source.numel() * 4 / shortest(scale, self.device)
        return self._bytes

    def rate(self, dtype: torch.dtype) -> float:
        name, size = name_of(dtype), 4096 if self.device.type == "cuda" else 128
        if name not in self.flops_per_s:
            a = torch.randn(size, size, device=self.device).to(dtype)
            self.flops_per_s[name] = 2 * size**3 / shortest(lambda: (a @ a,), self.device)
        return self.flops_per_s[name]

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """The time that no implementation in this dtype can be expected to beat."""
        return max(work.bytes / self.bytes_per_s, work.flops / self.rate(dtype))

    def told(self) -> dict[str, float]:
        return {
            "TB/s": self.bytes_per_s / 1e12,
            **{f"TFLOP/s {dtype}": rate / 1e12 for dtype, rate in self.flops_per_s.items()},
        }


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Runs that share a device take turns where ``INSUM_BENCH_TURNS`` names a file to lock: one has
    the device to itself, after all that `set_up` side by side are done.
    """
    with _locked(alone=True):
        yield


@contextlib.contextmanager
def set_up() -> Iterator[None]:
    """Compile beside others that do; nobody has a `turn` meanwhile."""
    with _locked(alone=False):
        yield


@contextlib.contextmanager
def _locked(alone: bool) -> Iterator[None]:
    path = os.environ.get("INSUM_BENCH_TURNS", "")
    if not path:
        yield
        return
    import fcntl  # not on Windows

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield  # closing the file lets go


# --- clock and memory -----------------------------------------------------------------------------


def clock(
    run: Callable[[], object], device: torch.device, capture: bool = True
) -> tuple[float, str]:
    """Median milliseconds of one call, and by which clock."""
    if device.type != "cuda":
        return 1e-3 * timing.wall_timer(run, repeats(once(run, device), "cpu")), "host"
    times = repeats(once(run, device), "cuda")
    if not capture:
        return 1e-3 * timing.event_timer(run, times), "events"
    timer: timing.Timer | None = None
    try:
        timer = timing.replay_timer(device)
        return 1e-3 * timer(run, times), "CUDA graph"
    except Exception as error:
        torch.cuda.synchronize()
        why = f"{type(error).__name__}: {error}".splitlines()[0][:90]
        return 1e-3 * timing.event_timer(run, times), f"events; no CUDA graph ({why})"
    finally:
        getattr(timer, "close", lambda: None)()


def shortest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call at its best, which is what a limit is made of: a CPU that others use, too,
    is at its best in few of many calls, where a median tells of the others.
    """
    if device.type == "cuda":
        return 1e-3 * clock(run, device)[0]
    return min(once(run, device) for _ in range(LIMIT_CALLS))


def once(run: Callable[[], object], device: torch.device, *, wait_for_end: bool = True) -> float:
    """Seconds of one call by the host's clock, from an idle device to an idle device; without
    ``wait_for_end``, to where the host is done.
    """
    wait(device)
    start = time.perf_counter()
    run()
    if wait_for_end:
        wait(device)
    return time.perf_counter() - start


def in_turns(
    runs: Mapping[str, Callable[[], R]],
    rounds: int,
    time_of: Callable[[Callable[[], R]], float],
) -> dict[str, list[float]]:
    """The times of each by ``time_of``; one after the other in every round, so that a slow moment
    of the machine hits all of them.

    >>> in_turns({"a": lambda: 1, "b": lambda: 2}, 2, lambda run: float(run()))
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(time_of(run))
    return times


def repeats(taken: float, kind: str) -> int:
    """How often to repeat what takes so many seconds.

    >>> repeats(10.0, "cpu"), repeats(0.01, "cpu"), repeats(1e-6, "cpu")
    (1, 10, 50)
    """
    return max(1 if taken > 1 else 3, min(50, int(SECONDS[kind] / max(taken, 1e-6))))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mib(run: Thunk, device: torch.device) -> float | None:
    """MiB that a warm call allocates at its peak, its results included; None where the device does
    not tell.
    """
    return peak_bytes(run, device) / 2**20 if device.type == "cuda" else None


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call allocates on a GPU at its peak, beyond those that were there."""
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = run()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del results
    return peak


# --- checking -------------------------------------------------------------------------------------


def poison(want: Results, dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in the memory that the allocator hands out next, so that what is not written is
    seen.
    """
    held = [
        torch.full(t.shape, math.nan, device=device, dtype=dtype) for t in want for _ in range(2)
    ]
    del held


def relative_error(got: Results, want: Results) -> float:
    """The largest relative error of all results, in the 2-norm; infinite where one is not finite or
    has another shape.

    >>> relative_error((torch.tensor([1.0, 2.0]),), (torch.tensor([1.0, 2.0]),))
    0.0
    """
    if len(got) != len(want):
        return math.inf
    return max((_relative_error(g, w) for g, w in zip(got, want, strict=True)), default=0.0)


def _relative_error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return math.inf
    total, norm = 0.0, 0.0
    got, want = got.reshape(-1), want.reshape(-1)
    for start in range(0, want.numel(), AT_ONCE):  # doubles in portions
        g, w = got[start : start + AT_ONCE], want[start : start + AT_ONCE]
        total += float((g.double() - w.to(g.device, torch.float64)).square().sum())
        norm += float(w.double().square().sum())
    return math.sqrt(total / max(norm, 1e-60)) if math.isfinite(total) else math.inf


# --- running --------------------------------------------------------------------------------------


@dataclass
class Runner:
    """Turns cases into rows. ``deadline`` is the moment after which nothing new is begun;
    ``slow_cases`` bounds the slow contenders, and those with ``unwanted`` parts in their names are
    left out. ``first_anyway``: the first case is run whatever the time, but for slow contenders, so
    that no table is empty on a machine that is busy.
    """

    limits: DeviceLimits
    deadline: float = math.inf
    slow_cases: int = 10**6
    unwanted: tuple[str, ...] = ()
    first_anyway: bool = False

    def rows(self, cases: Iterable[Comparison]) -> Iterator[Row]:
        for number, case in enumerate(cases):
            want: list[Results] = []  # computed for the first contender that runs
            for contender in case.contenders:
                if any(part in contender.name for part in self.unwanted):
                    continue
                blank = Row(
                    case.benchmark,
                    case.name,
                    name_of(case.dtype),
                    case.direction,
                    contender.name,
                    "skipped",
                    lines=contender.lines,
                    note=contender.note,
                )
                reason = self.skipped(contender, number)
                if reason:
                    yield replace(blank, note=_joined(contender.note, reason))
                    continue
                yield self.row(case, contender, want, blank)
            release(case.device)

    def skipped(self, contender: Contender, number: int) -> str:
        wanted = self.first_anyway and number == 0 and not contender.slow
        if time.monotonic() > self.deadline and not wanted:
            return "no time left (--budget)"
        if contender.slow and number >= self.slow_cases:
            return "takes long to set up: left out" + (
                " by --no-slow" if self.slow_cases == 0 else " but for the first case, by --quick"
            )
        return ""

    def row(self, case: Comparison, contender: Contender, want: list[Results], blank: Row) -> Row:
        try:
            if not want:
                with turn():
                    want.append(case.want())
                    wait(case.device)
            return self.measured(case, contender, want[0], blank)
        except Exception as error:  # a rival's failure is a result
            wait_quietly(case.device)
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
            return replace(blank, status="failed", note=_joined(contender.note, why))

    def measured(self, case: Comparison, contender: Contender, want: Results, blank: Row) -> Row:
        start = time.perf_counter()
        with set_up():
            ready = contender.make()
            poison(want, case.dtype, case.device)
            first = ready.run()
            wait(case.device)
        seconds = time.perf_counter() - start
        with turn():
            if contender.times and os.environ.get("INSUM_BENCH_TURNS"):
                # once more with the device for itself; everything is compiled by now
                ready = contender.make()
            return self.clocked(
                case, contender, ready, first, want, replace(blank, first_call_s=seconds)
            )

    def clocked(
        self,
        case: Comparison,
        contender: Contender,
        ready: ReadyContender,
        first: Results,
        want: Results,
        row: Row,
    ) -> Row:
        error = relative_error(ready.canonical(first), want)
        del first
        note = _joined(contender.note, ready.note)
        row = replace(row, error=error, note=note)
        allowed = TOLERANCE[case.dtype]
        if not error <= allowed:
            return replace(
                row,
                status="WRONG",
                note=_joined(
                    note, f"relative error {error:.1e}, allowed {allowed:.0e}: no time is given"
                ),
            )
        warm(ready.run, case.device)
        # what warm calls do may be another kernel
        error = max(error, relative_error(ready.canonical(ready.run()), want))
        if not error <= allowed:
            return replace(
                row,
                status="WRONG",
                error=error,
                note=_joined(note, f"relative error {error:.1e} of a warm call: no time is given"),
            )
        memory = peak_mib(ready.run, case.device)
        milliseconds, how = clock(ready.run, case.device, contender.capture)
        percent = 100 * self.limits.seconds(case.work, case.dtype) / (1e-3 * milliseconds)
        return replace(
            row,
            status="ok",
            error=error,
            milliseconds=milliseconds,
            clock=how,
            memory_mib=memory,
            limit_percent=percent,
        )


def warm(run: Thunk, device: torch.device) -> None:
    """Some calls, fewer where one takes long."""
    start = time.perf_counter()
    for _ in range(WARM):
        run()
        wait(device)
        if time.perf_counter() - start > 1:
            return


def release(device: torch.device) -> None:
    """Between cases: nobody's memory stays with the allocator."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def wait_quietly(device: torch.device) -> None:
    """After a failure: let the device settle; what it complains about was reported already."""
    try:
        wait(device)
    except RuntimeError:
        return


def _joined(*notes: str) -> str:
    return "; ".join(n for n in notes if n)


# --- contenders from functions --------------------------------------------------------------------


def autograd(
    function: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    upstream: Tensor | None,
    direction: str,
    note: str = "",
) -> ReadyContender:
    """A contender that is a differentiable function: forward alone, or the output and the gradients
    of all ``leaves``.
    """
    if direction == FORWARD:
        return ReadyContender(lambda: (no_grad(function, leaves),), note=note)
    assert direction == BOTH and upstream is not None
    held = [leaf.detach().requires_grad_() for leaf in leaves]

    def run() -> Results:
        out = function(*held)
        return (out.detach(), *torch.autograd.grad(out, held, upstream))

    return ReadyContender(run, note=note)


def no_grad(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return function(*leaves)
