"""Runs every check of the modules ``checks_*.py`` in four processes of one Gloo group, once for the
whole suite: starting processes takes longer than most checks.

A check is a function without arguments whose name begins with ``check_``; it runs in every process
at the same time, and what it raises is its failure. Modules need nothing but such functions. One
module, or one function, is named on the command line to run it alone:

    PYTHONPATH=src:tests python -m distributed.worker checks_statements:check_sums

The launcher is torchrun's, told to fork: four processes then share one import of torch.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

WORLD = 4

#: How long a process waits for another one; a check that leaves a collective undone fails then.
PATIENCE = timedelta(seconds=300)


@dataclass(frozen=True)
class Outcome:
    """What a check did in one process: '' where it held, else why it did not."""

    name: str
    rank: int
    seconds: float
    failure: str


def check_names(wanted: str = "") -> list[str]:
    """``module:function`` of every check, by name; those that leave processes waiting come last."""
    found = []
    for path in sorted(Path(__file__).parent.glob("checks_*.py")):
        module = importlib.import_module(f"distributed.{path.stem}")
        found += [f"{path.stem}:{name}" for name in vars(module) if name.startswith("check_")]
    chosen = [name for name in found if name.startswith(wanted)]
    return sorted(chosen, key=lambda name: name.startswith("checks_failures"))


def check_of(name: str) -> Callable[[], None]:
    module, function = name.split(":")
    found: Callable[[], None] = getattr(importlib.import_module(f"distributed.{module}"), function)
    return found


def run_rank(names: list[str], folder: str) -> None:
    """All checks in one of the processes, until the processes disagree about one of them: what is
    left of its communication would meet that of the next.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank = dist.get_rank()
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    with open(Path(folder) / f"{rank}.jsonl", "w", buffering=1) as record:
        for outcome in _outcomes(names, rank, store):
            print(json.dumps(asdict(outcome)), file=record)
    dist.destroy_process_group()


def _outcomes(names: list[str], rank: int, store: dist.Store) -> Iterator[Outcome]:
    for name in names:
        torch.manual_seed(0)
        begin, failure = time.perf_counter(), ""
        try:
            check_of(name)()
        except Exception:
            failure = traceback.format_exc()
        yield Outcome(name, rank, time.perf_counter() - begin, failure)
        store.set(f"{name}/{rank}", "failed" if failure else "held")
        every = {bytes(store.get(f"{name}/{other}")) for other in range(WORLD)}
        if len(every) > 1:
            return


def launch(names: list[str], folder: str) -> list[Outcome]:
    """Run checks in processes of their own, and collect what they wrote."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=WORLD,
        rdzv_backend="c10d",
        rdzv_endpoint=str(Path(folder) / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        start_method="fork",
        monitor_interval=0.05,
        max_restarts=0,
        run_id="insum",
    )
    elastic_launch(config, run_rank)(names, folder)
    return [
        Outcome(**json.loads(line))
        for path in sorted(Path(folder).glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def main(arguments: list[str]) -> int:
    """Run the checks whose names begin so, or all."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = launch(check_names(*arguments[:1]), folder)
    for one in outcomes:
        print(f"{one.name} on rank {one.rank}, {one.seconds:.2f} s: {one.failure or 'held'}")
    return int(not outcomes or any(one.failure for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
