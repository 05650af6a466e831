"""``insum bench first-call``: time to the first result in a fresh process, with empty caches and
with warm ones, for each application.

Every figure comes from a process of its own. The clock starts after `import torch`; creating the
CUDA context and the operands is reported apart, and Python's bytecode is compiled beforehand, as it
is when a package is installed. "total" is `import insum`, conversion to the format and the first
call, until the result is there. ``--rivals`` also times the same computation in torch operations
under torch.compile, from empty caches.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from insum.bench import first_process
from insum.bench.study import Study

APPLICATIONS = ("block-spmm", "spmm", "conv", "tensor-product")
GOALS = {"cold": 2.5, "warm": 0.5}
#: Runs the file of a process without putting its folder among those that modules are found in.
BY_PATH = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def fresh(name: str, kind: str, folder: str, device: str) -> dict[str, float]:
    """The seconds of one process; none where it failed, and says why."""
    bytecode = Path(tempfile.gettempdir()) / "insum-first-call-bytecode"
    environment = {
        **os.environ,
        "PYTHONPYCACHEPREFIX": str(bytecode),
        "PYTHONDONTWRITEBYTECODE": "",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "INSUM_CACHE_DIR": f"{folder}/insum",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }
    done = subprocess.run(
        [sys.executable, "-c", BY_PATH, str(first_process.__file__), name, kind, device],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(first_process.RESULT)]
    if done.returncode or not lines:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(lines[-1].removeprefix(first_process.RESULT))
    return found


def measured(name: str, device: str, rivals: bool, repeat: int) -> list[dict[str, Any]]:
    """Cold, then warm, several times over; the best of each, as the machine disturbs it least."""
    kinds: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fresh(name, "cold", folder, device)  # for the bytecode
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                kinds.setdefault(kind, []).append(fresh(name, kind, folder, device))
    if rivals:
        with tempfile.TemporaryDirectory() as folder:
            kinds["torch.compile, cold"] = [fresh(name, "rival", folder, device)]
    return [{"application": name, "kind": kind, **_best(runs)} for kind, runs in kinds.items()]


def _best(runs: list[dict[str, float]]) -> dict[str, float]:
    return min(runs, key=lambda run: run.get("total", math.inf))


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: Any) -> None:
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument(
        "--rivals", action="store_true", help="also time torch.compile from empty caches"
    )


def run(study: Study) -> int:
    rows: list[dict[str, Any]] = []
    asked = study.asked
    for name in study.wanted(APPLICATIONS):
        for row in measured(name, study.device.type, asked.rivals, asked.repeat):
            rows.append(row)
            print(_line(row), flush=True)
        study.keep(rows=rows)
    return 0 if all("total" in row for row in rows) else 1


def _line(row: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{key} {value:.2f}"
        for key, value in row.items()
        if isinstance(value, float) and key != "total"
    )
    goal = f" (goal {GOALS[row['kind']]})" if row["kind"] in GOALS else ""
    return (
        f"{row['application']:15s} {row['kind']:20s} {row.get('total', float('nan')):6.2f} "
        f"s{goal:12s}  {parts}"
    )
