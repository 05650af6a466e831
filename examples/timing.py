"""What the examples share: the median time of a function, and the device to run on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def median_ms(
    function: Callable[[], object], device: torch.device | str, repeat: int = 10
) -> float:
    """Median milliseconds of a call, after two to warm up; on a GPU the device is waited for."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    times = []
    for _ in range(repeat + 2):
        wait()
        start = time.perf_counter()
        function()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def report(name: str, ours: float, rivals: dict[str, float | str]) -> None:
    """One line for insum and one for every rival: its time, or why it has none."""
    print(f"{name}: insum {ours:.2f} ms")
    for rival, found in rivals.items():
        print(
            f"{name}: {rival} "
            + (
                f"{found:.2f} ms ({found / ours:.2f} times ours)"
                if isinstance(found, float)
                else f"not measured: {found}"
            )
        )
