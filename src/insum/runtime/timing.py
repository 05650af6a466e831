"""Clocks: microseconds of one call, by replays of a CUDA graph where there is a GPU."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

#: Takes a call and how often to repeat it; returns the microseconds of one.
Timer: TypeAlias = Callable[[Callable[[], object], int], float]
#: One replay holds so many calls that it takes about this long, as long as launching from Python
#: takes: short calls are then many, and what a replay itself costs does not show.
_REPLAY_US = 600.0
_MOST_CALLS = 20


def timer_for(device: torch.device, *, cold: bool = False) -> Timer:
    """The clock that suits a device."""
    return replay_timer(device, cold=cold) if device.type == "cuda" else wall_timer


def wall_timer(run: Callable[[], object], repeat: int) -> float:
    """Median of the host's clock, for devices that compute before they return."""
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def event_timer(run: Callable[[], object], repeat: int) -> float:
    """Median between two events on the GPU, launching from Python included, for what no CUDA graph
    can hold.
    """
    return _events(run, repeat)


def replay_timer(device: torch.device, *, cold: bool = False) -> Timer:
    """A clock that replays a CUDA graph of several calls, so that launching from Python is not
    timed.

    Operands that fit L2 stay there from call to call; with ``cold`` L2 is overwritten before each.
    """
    return ReplayTimer(device, cold)


class ReplayTimer:
    """The last call's graph, for a second and longer look at it.

    All graphs share a pool of memory and a stream, for only the last is ever replayed: memory that
    was freed on one stream is not used again on another.
    """

    def __init__(self, device: torch.device, cold: bool) -> None:
        self.device, self.cold = device, cold
        self.held: _Replay | None = None
        self.room: tuple[Any, Any] | None = None

    def __call__(self, run: Callable[[], object], repeat: int) -> float:
        with torch.cuda.device(self.device):
            if self.held is None or self.held.run is not run:
                self.room = self.room or (torch.cuda.graph_pool_handle(), torch.cuda.Stream())  # type: ignore[no-untyped-call, unused-ignore]
                old, self.held = self.held, _Replay(run, 1 if self.cold else None, *self.room)
                # not before the new one is there: a pool that nobody uses is gone
                if old is not None:
                    old.graph.reset()
            return (
                _events(self.held.graph.replay, repeat, _flush(self.device) if self.cold else None)
                / self.held.calls
            )

    def close(self) -> None:
        """Give the memory of the graphs back: the allocator does not do so by itself."""
        if self.held is not None:
            torch.cuda.synchronize(self.device)
            self.held.graph.reset()
            self.held = self.room = None
            torch.cuda.empty_cache()


class _Replay:
    """A call, and a graph of some repetitions of it."""

    def __init__(
        self, run: Callable[[], object], calls: int | None, pool: Any, stream: Any
    ) -> None:
        self.run = run
        once = _events(run, 2)  # compiles, and tells how many calls a replay should hold
        self.calls = calls or max(1, min(_MOST_CALLS, round(_REPLAY_US / max(once, 1.0))))
        self.graph = torch.cuda.CUDAGraph()
        # Not `with torch.cuda.graph`: that collects garbage and empties the allocator's cache each
        # time.
        now = torch.cuda.current_stream()
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            try:
                self.record(pool)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first failure is the one to tell
                    free_random_numbers(torch.cuda.default_generators[stream.device.index])
                raise
        now.wait_stream(stream)
        self.graph.replay()

    def record(self, pool: Any) -> None:
        self.graph.capture_begin(pool=pool)
        try:
            for _ in range(self.calls):
                self.run()
        finally:
            self.graph.capture_end()


def free_random_numbers(generator: torch.Generator) -> None:
    """After a recording that failed: torch ends it before it tells the generator of the device,
    which then takes every later draw for one of a graph and refuses it ("Offset increment outside
    graph capture"). Another state with the same seed and place knows nothing of graphs.
    """
    fresh = torch.Generator(generator.device)
    fresh.set_state(generator.get_state())
    generator.graphsafe_set_state(fresh)


def _events(
    run: Callable[[], object], repeat: int, flush: Callable[[], object] | None = None
) -> float:
    """Median microseconds between two events around ``run``."""
    run()
    times = []
    for _ in range(repeat):
        if flush is not None:
            flush()
        start, end = _event(), _event()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return statistics.median(times) * 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]


_buffers: dict[torch.device, torch.Tensor] = {}


def _flush(device: torch.device) -> Callable[[], object]:
    """Overwrites L2."""
    if device not in _buffers:
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
        _buffers[device] = torch.empty(4 * size, dtype=torch.int8, device=device)
    return _buffers[device].zero_
