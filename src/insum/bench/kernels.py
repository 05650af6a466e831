"""Which kernels a call runs, in their order, and how long each takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch

from insum.bench.measure import wait

CALLS = 5


@dataclass(frozen=True)
class KernelTimes:
    """A launch of a call, or all launches of a kernel: microseconds in one call, microseconds that
    the device was idle before, and how often it is run.

    >>> print(KernelTimes("kernel", 12.34, 1.0, 2))
         12.3 us after      1.0, 2 launches: kernel
    """

    name: str
    microseconds: float
    idle: float
    count: float

    def told(self) -> tuple[object, ...]:
        return astuple(self)

    def __str__(self) -> str:
        return (
            f"{self.microseconds:9.1f} us after {self.idle:8.1f}, {self.count:g} launches: "
            f"{self.name}"
        )


@dataclass(frozen=True)
class ProfiledLaunch:
    """One launch by the device's clock, in microseconds."""

    name: str
    start: float
    end: float


def kernel_times(run: Callable[[], object], device: torch.device) -> list[KernelTimes]:
    """The kernels of warm calls in a row; none where the device has no kernels."""
    if device.type != "cuda":
        return []
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profiler:
        for _ in range(CALLS + 1):
            run()
        wait(device)
    launches = [
        ProfiledLaunch(e.name, e.time_range.start, e.time_range.end)
        for e in profiler.events()
        if "CUDA" in str(e.device_type) and e.time_range.elapsed_us() > 0
    ]
    return summed_up(sorted(launches, key=lambda one: one.start), CALLS + 1)


def summed_up(launches: Sequence[ProfiledLaunch], calls: int) -> list[KernelTimes]:
    """Launches of several calls: in order where all calls are the same, else by name. The first
    call is left out: the profiler begins there.

    >>> once = [ProfiledLaunch("a", 0, 2), ProfiledLaunch("b", 3, 4)]
    >>> again = [ProfiledLaunch("a", 10, 12), ProfiledLaunch("b", 13, 14)]
    >>> for one in summed_up([*once, *again], 2):
    ...     print(one)
          2.0 us after      6.0, 1 launches: a
          1.0 us after      1.0, 1 launches: b
    """
    count, rest = divmod(len(launches), calls)
    names = [one.name for one in launches]
    before = dict(zip(launches[1:], launches, strict=False))
    counted = launches[count:]
    idle = {one: max(0.0, one.start - before[one].end) for one in counted if one in before}
    if rest or names != names[:count] * calls:
        groups = {
            name: [one for one in launches if one.name == name] for name in dict.fromkeys(names)
        }
        counted_calls = calls
    else:
        groups = {str(k): list(counted[k::count]) for k in range(count)}
        counted_calls = calls - 1
    return [
        KernelTimes(
            group[0].name,
            sum(one.end - one.start for one in group) / counted_calls,
            sum(idle.get(one, 0.0) for one in group) / counted_calls,
            len(group) / counted_calls,
        )
        for group in groups.values()
    ]
