"""Compiling ahead, in other processes: each runs `runtime.compiling` as a file of its own."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from insum.runtime import compiling
from insum.runtime.compiling import REPLY, Job

_WORKER = "import runpy, sys; runpy.run_path(sys.argv[1])['serve']()"


def job(
    function: Any, name: str, types: Sequence[str], unaligned: int, warps: int, stages: int
) -> Job:
    """What a worker needs to compile a kernel just as a launch would."""
    path = inspect.getsourcefile(function.fn) or ""
    return path, name, list(types), unaligned, warps, stages


def compile_ahead(
    jobs: Sequence[Job],
    target: Sequence[Any],
    *,
    workers: int = 0,
    seconds: float = 300,
    done: Callable[[], None] = lambda: None,
) -> list[str]:
    """Compile kernels in worker processes, so that Triton's cache on disk has them; for each job ''
    or what went wrong.

    Only a head start: what a worker could not do, or the system has no worker for, is compiled, or
    fails, at the kernel's first launch.
    """
    workers = min(workers or os.cpu_count() or 1, len(jobs), 16)
    answers = ["not compiled"] * len(jobs)
    shares = [[(i, jobs[i]) for i in range(first, len(jobs), workers)] for first in range(workers)]
    running = _started(target, shares) if workers > 1 else []
    threads = [
        threading.Thread(target=_listen, args=(process, answers, done), daemon=True)
        for process in running
    ]
    end = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):  # no threads are left: their workers are ended
        for thread in threads:
            thread.start()
    for thread, process in zip(threads, running, strict=True):
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
        elif process.stdout is not None:
            process.stdout.close()
        if process.poll() is None:
            process.kill()
        process.wait()
    return answers


def _started(
    target: Sequence[Any], shares: Sequence[Sequence[tuple[int, Job]]]
) -> list[subprocess.Popen[str]]:
    """A worker for each share, as far as the system starts them; none where Python is part of
    another program, which would be started instead.
    """
    found: list[subprocess.Popen[str]] = []
    if not sys.executable or getattr(sys, "frozen", False):
        return found
    with contextlib.suppress(OSError):
        for share in shares:
            found.append(_start(target, share))
    return found


def _start(target: Sequence[Any], jobs: Sequence[tuple[int, Job]]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER, compiling.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as stream:  # it has ended already
        stream.write(json.dumps({"target": list(target), "jobs": list(jobs)}))
    return process


def _listen(process: subprocess.Popen[str], answers: list[str], done: Callable[[], None]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith(REPLY):
                position, answer = json.loads(line.removeprefix(REPLY))
                answers[position] = answer
                done()
