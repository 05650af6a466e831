"""Statements on a CPU beside what PyTorch and e3nn have for the job there: sparse times dense,
sparse convolution, tensor products; forward, and with gradients.

    python benchmarks/cpu.py [--data DIR] [--json FILE] [--threads 1] [--turns 15]

Contenders take turns, and each is called once before it is timed, so that nobody pays for what
another has left in caches and in the allocator. Results are compared with float64 references first.
A ratio is the median over all turns of the rival's time by ours: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from insum.bench import conv, data, spmm, tensor_product
from insum.bench.measure import ReadyContender, Results, relative_error
from insum.bench.records import FORWARD

CPU = torch.device("cpu")
DIRECTIONS = (FORWARD, "forward+backward")
#: None of these was looked at while the ways of a CPU were chosen.
GRAPHS, COLUMNS = ("PROTEINS_full", "c-46", "ego-twitter"), (16, 96, 128)
CLOUDS, CHANNELS = ("pc-pcl-room_scan1", "pc-lidar-ucf-LIDAR1"), (32, 64)
MOST_VOXELS, ITEMS = 20_000, 400
PRODUCTS = ((1, 16), (1, 64), (2, 24), (3, 8))


@dataclass(frozen=True)
class Case:
    """One case: ours and its rivals by name, and the exact results."""

    application: str
    name: str
    direction: str
    contenders: dict[str, ReadyContender]
    exact: Results


def cases(place: Path | None) -> Iterator[Case]:
    for name in GRAPHS:
        graph = data.graph(name, place, CPU)
        for columns in COLUMNS:
            yield from spmm_cases(graph, columns)
    for name in CLOUDS:
        voxels = data.cloud(name, place, CPU, MOST_VOXELS)
        for channels in CHANNELS:
            given = conv.inputs(voxels, channels, torch.float32)
            for direction in DIRECTIONS:
                found = {
                    "insum": conv.ours(given, direction, grouped=False),
                    "gather-matmul-scatter": conv.gathered(given, direction),
                }
                label = f"{name}, {len(voxels)} voxels, {channels} channels"
                yield Case("convolution", label, direction, found, conv.want(given, direction))
    for degree, channels in PRODUCTS:
        yield from product_cases(degree, channels)


def spmm_cases(graph: data.CsrPattern, columns: int) -> Iterator[Case]:
    given = spmm.inputs(graph, columns, torch.float32)
    wide = replace(graph, indptr=graph.indptr.long(), indices=graph.indices.long())
    longer = replace(given, graph=wide, csr=_csr(wide, given.values))
    for direction in DIRECTIONS:
        found = {
            "insum": spmm.ours(given, direction),
            "torch.sparse CSR": spmm.cusparse(longer, direction),
            "torch.sparse CSR, int32": spmm.cusparse(given, direction),
        }
        label = f"{graph.name}, {graph.nonzeros} nonzeros, {columns} columns"
        yield Case("SpMM", label, direction, found, spmm.want(given, direction))


def _csr(graph: data.CsrPattern, values: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(
        graph.indptr, graph.indices, values, graph.shape, check_invariants=False
    )


def product_cases(degree: int, channels: int) -> Iterator[Case]:
    given = tensor_product.inputs(degree, channels, ITEMS, torch.float32, CPU)
    for direction in DIRECTIONS:
        found = {"insum": tensor_product.ours(given, direction)}
        try:
            found["e3nn"] = tensor_product.e3nn(given, direction)
        except ImportError as error:
            print(f"without e3nn: {error}")
        label = f"degree {degree}, {channels} channels, {ITEMS} items"
        exact = tensor_product.want(given, direction)
        yield Case("tensor product", label, direction, found, exact)


# --- measuring ------------------------------------------------------------------------------------


def measured(case: Case, turns: int) -> Iterator[dict[str, Any]]:
    """A row for each rival."""
    errors = {
        name: relative_error(ready.canonical(ready.run()), case.exact)
        for name, ready in case.contenders.items()
    }
    times: dict[str, list[float]] = {name: [] for name in case.contenders}
    for _ in range(turns):
        for name, ready in case.contenders.items():
            ready.run()
            times[name].append(milliseconds(ready.run))
    ours = times["insum"]
    for name in case.contenders:
        if name != "insum":
            yield {
                "application": case.application,
                "case": case.name,
                "direction": case.direction,
                "rival": name,
                "insum_ms": statistics.median(ours),
                "rival_ms": statistics.median(times[name]),
                "ratio": statistics.median(b / a for a, b in zip(ours, times[name])),
                "error": errors["insum"],
            }


def milliseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--data", default=None, help="graphs and clouds; '' for stand-ins")
    parser.add_argument("--json", default="", help="where to write the result")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="Sparse")
    torch.set_num_threads(options.threads)
    rows = []
    for case in cases(data.folder(options.data)):
        for row in measured(case, options.turns):
            rows.append(row)
            print(
                f"{row['case']:<58} {row['direction']:<17} {row['rival']:<24} "
                f"{row['insum_ms']:>9.3f} {row['rival_ms']:>9.3f} {row['ratio']:>6.2f}",
                flush=True,
            )
    if options.json:
        result = {
            "command": f"python benchmarks/cpu.py --threads {options.threads}",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "torch": torch.__version__,
            "threads": options.threads,
            "turns": options.turns,
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["error"] < 1e-5 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
