"""Kernels of every kind at small sizes, against double precision, for compute-sanitizer:

    python benchmarks/sanitize.py [PART ...]        of PARTS below
    python benchmarks/sanitize.py --json FILE       every tool over every part, and what it said;
                                                    parts and --tools run again replace theirs

PyTorch's caching allocator is switched off, so that a kernel that leaves its tensor is seen to
leave it.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("tests", "src")]

import torch  # noqa: E402
import triton  # noqa: E402

import applications  # noqa: E402
from insum.bench import gallery  # noqa: E402
from insum.bench.measure import relative_error  # noqa: E402
from insum.bench.options import BenchOptions  # noqa: E402
from insum.bench.records import BOTH, FORWARD  # noqa: E402
from insum.testing import soak  # noqa: E402

TOOLS = ("memcheck", "racecheck", "initcheck")
#: Processes at a time, each with a tool of its own, and the seconds that each of them has.
AT_ONCE = 15
MOST_SECONDS = 420
#: Parts of the gallery: under racecheck some of its statements take minutes.
ROOMS = 4


def small(device: str) -> list[applications.Application]:
    """Large enough for several tiles and for rows that are cut, with sizes that no tile divides."""
    half, single = torch.float16, torch.float32
    return [
        *applications.tiny(device),
        applications.block_spmm(
            rows=5, columns=6, block=32, n=300, density=0.4, dtype=half, device=device
        ),
        applications.block_spmm(
            rows=5, columns=6, block=32, n=300, density=0.4, group=2, dtype=half, device=device
        ),
        applications.spmm(
            rows=50, columns=20_000, n=40, entries=1500, heavy=4000, dtype=single, device=device
        ),
        applications.spmm(
            rows=50,
            columns=20_000,
            n=40,
            entries=1500,
            heavy=4000,
            group=4,
            dtype=half,
            device=device,
        ),
        applications.convolution(
            voxels=300,
            offsets=9,
            inputs=40,
            outputs=72,
            layout="by voxel",
            dtype=half,
            device=device,
        ),
        applications.convolution(
            voxels=300,
            offsets=9,
            inputs=40,
            outputs=72,
            layout="grouped",
            dtype=half,
            device=device,
        ),
        applications.tensor_product(
            batch=70, channels=32, constant=False, dtype=single, device=device
        ),
        applications.tensor_product(
            batch=70, channels=32, constant=True, dtype=single, device=device
        ),
    ]


def applications_agree() -> Iterator[tuple[str, bool]]:
    """The four applications, forward and backward, against double precision."""
    for application in small("cuda"):
        upstream = application.upstream()
        expected = {"": application.expected(), **application.expected_gradients(upstream)}
        for name, call in {"": application.forward, **application.gradients(upstream)}.items():
            error = applications.relative_error(call.run(), expected[name])
            yield call.name, error <= (2e-3 if upstream.dtype == torch.float16 else 1e-5)


def exhibits_agree(room: int) -> Iterator[tuple[str, bool]]:
    """The statements in one room of the gallery at the size that they have on a CPU: runs of a
    gathered index, patterns inside segments, orders of contraction, reductions along every axis.
    """
    options = BenchOptions(torch.device("cuda"), quick=True)
    for make in gallery.EXHIBITS[room::ROOMS]:
        for exhibit in make(options):
            direction = BOTH if exhibit.leaves else FORWARD
            found = exhibit.ready(exhibit.ours, direction).run()
            error = relative_error(found, exhibit.want(direction))
            yield exhibit.name, error <= (2e-2 if exhibit.dtype.itemsize == 2 else 1e-5)


def trials_agree(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Trials of the soak test, each once."""
    for name in names:
        try:
            soak.trial(name, 1000 + list(soak.TRIALS).index(name), 0.25, "cuda")
        except AssertionError as error:
            print(error)
            yield name, False
        else:
            yield name, True


def library_agrees() -> Iterator[tuple[str, bool]]:
    """A matrix product by PyTorch alone, to know what the tools say of kernels that are not ours:
    initcheck does not see what the library writes through the tensor memory accelerator.
    """
    a, b = (torch.randn(64, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    yield "torch.mm", relative_error([a @ b], [a.double() @ b.double()]) <= 2e-3


#: Small and odd sizes, index tensors that change, hash tables and kernel maps of point clouds,
#: indices out of range.
TRIALS = {
    "statements": ("statements", "aliases", "extrema", "repeated"),
    "writes": ("rewritten", "in_place", "out_of_range"),
    "threads": ("threads",),
    "shared": ("runs", "chains", "patterns"),
    "layers": ("formats", "convolutions", "graph_layers"),
}
PARTS: dict[str, Callable[[], Iterator[tuple[str, bool]]]] = {
    "applications": applications_agree,
    **{f"gallery-{n + 1}": functools.partial(exhibits_agree, n) for n in range(ROOMS)},
    "library": library_agrees,
    **{part: functools.partial(trials_agree, names) for part, names in TRIALS.items()},
}


def run_parts(names: Sequence[str]) -> int:
    """Each part once; how many results were wrong."""
    # Where a tool brings a call to a stand, this says where.
    faulthandler.dump_traceback_later(MOST_SECONDS - 20)
    wrong = total = 0
    for part in names:
        for name, right in PARTS[part]():
            torch.cuda.synchronize()
            total, wrong = total + 1, wrong + (not right)
            print(f"{'ok   ' if right else 'WRONG'} {part}: {name}", flush=True)
    print(f"{total} calls, {wrong} wrong")
    return wrong


def under(tool: str, part: str) -> dict[str, Any]:
    """What one tool says of one part, in a process of its own."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    command += ["--print-limit", "20000", sys.executable, __file__, part]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS
        )
        code, text, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as stopped:
        code, text = 124, (stopped.stdout or b"").decode()
        errors = (stopped.stderr or b"").decode()
    told = [line for line in text.splitlines() if line.startswith("=========")]
    places = [found[1] for line in told if (found := re.search(r"\bat (?:void )?([\w:]+)", line))]
    passed = sum(line.startswith(("ok ", "WRONG")) for line in text.splitlines())
    counted = [line for line in text.splitlines() if re.match(r"\d+ calls", line)]
    return {
        "tool": tool,
        "part": part,
        "summary": told[-1].strip("= ") if told and code != 124 else errors[-3000:],
        "checked": counted[-1] if counted else f"{passed} calls until it was stopped",
        # Kernels that the offences are in, PyTorch's own among them.
        "kernels": dict(Counter(places)),
        "first": [line.strip("= ") for line in told[:12]] if code else [],
        "exit": code,
        "seconds": round(time.monotonic() - start),
    }


def under_tools(tools: Sequence[str], names: Sequence[str], json_file: Path) -> int:
    """Each tool over each part, a few at once; a file says what they found."""
    record = {
        "command": "python benchmarks/sanitize.py --json FILE",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    results = json.loads(json_file.read_text())["results"] if json_file.exists() else []
    results = [old for old in results if old["tool"] not in tools or old["part"] not in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        # Once without a tool, so that every kernel is compiled before the tools' clocks run.
        list(pool.map(lambda part: subprocess.run([sys.executable, __file__, part]), names))
        runs = [pool.submit(under, *pair) for pair in itertools.product(tools, names)]
        for done in as_completed(runs):
            results.append(done.result())
            print(json.dumps(done.result()), flush=True)
            results.sort(key=lambda one: (TOOLS.index(one["tool"]), list(PARTS).index(one["part"])))
            json_file.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")
    return sum(run.result()["exit"] != 0 for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all where none is given")
    parser.add_argument("--json", type=Path, help="run every tool over them, and say here what")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    asked = parser.parse_args()
    parts = asked.parts or list(PARTS)
    return min(1, under_tools(asked.tools, parts, asked.json) if asked.json else run_parts(parts))


if __name__ == "__main__":
    sys.exit(main())
