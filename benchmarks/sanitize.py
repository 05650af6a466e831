"""Kernels of every kind at small sizes, against double precision, for compute-sanitizer:

    python benchmarks/sanitize.py [applications] [gallery] [trials]
    python benchmarks/sanitize.py --json FILE       every tool over every part, and what it said

PyTorch's caching allocator is switched off, so that a kernel that leaves its tensor is seen to
leave it.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
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
#: Processes at a time, each with a tool of its own.
AT_ONCE = 9


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


def exhibits_agree() -> Iterator[tuple[str, bool]]:
    """Every statement of the gallery at the size that it has on a CPU: runs of a gathered index,
    patterns inside segments, orders of contraction, reductions along every axis.
    """
    options = BenchOptions(torch.device("cuda"), quick=True)
    for make in gallery.EXHIBITS:
        for exhibit in make(options):
            direction = BOTH if exhibit.leaves else FORWARD
            found = exhibit.ready(exhibit.ours, direction).run()
            error = relative_error(found, exhibit.want(direction))
            yield exhibit.name, error <= (2e-2 if exhibit.dtype.itemsize == 2 else 1e-5)


def trials_agree() -> Iterator[tuple[str, bool]]:
    """Trials of the soak test: small and odd sizes, index tensors that change, hash tables and
    kernel maps of point clouds, indices out of range.
    """
    for number, name in enumerate(n for n in soak.TRIALS if n not in ("fused", "hostile")):
        try:
            soak.trial(name, 1000 + number, 0.25, "cuda")
        except AssertionError as error:
            print(error)
            yield name, False
        else:
            yield name, True


PARTS = {"applications": applications_agree, "gallery": exhibits_agree, "trials": trials_agree}


def run_parts(names: Sequence[str]) -> int:
    """Each part once; how many results were wrong."""
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
    start = time.monotonic()
    done = subprocess.run(
        [*command, sys.executable, __file__, part], capture_output=True, text=True, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("=========")]
    places = [found[1] for line in told if (found := re.search(r"\bat (?:void )?([\w:]+)", line))]
    counted = [line for line in done.stdout.splitlines() if re.match(r"\d+ calls", line)]
    return {
        "tool": tool,
        "part": part,
        "summary": told[-1].strip("= ") if told else done.stderr[-300:],
        "checked": counted[-1] if counted else "did not finish",
        "kernels": dict(
            Counter(places)
        ),  # of the offences that are printed; torch's are among them
        "exit": done.returncode,
        "seconds": round(time.monotonic() - start),
    }


def under_every_tool(names: Sequence[str], json_file: Path) -> int:
    """Each tool over each part, a few at once; a file says what they found."""
    record = {
        "command": " ".join(["python benchmarks/sanitize.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "results": [],
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [pool.submit(under, *pair) for pair in itertools.product(TOOLS, names)]
        for done in as_completed(runs):
            result = done.result()
            record["results"].append(result)
            print(json.dumps(result), flush=True)
            json_file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return sum(result["exit"] != 0 for result in record["results"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all where none is given")
    parser.add_argument("--json", type=Path, help="run every tool over them, and say here what")
    asked = parser.parse_args()
    parts = asked.parts or list(PARTS)
    return min(1, under_every_tool(parts, asked.json) if asked.json else run_parts(parts))


if __name__ == "__main__":
    sys.exit(main())
