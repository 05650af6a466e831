"""How long building a format takes: CSR to every format, against torch.sparse and SciPy, and the
exact group size against one sort.

    python benchmarks/formats.py --data ../shared/data/graphs --device cpu --json out.json

DIR holds ``*.npz`` files with ``indptr``, ``indices`` and ``shape`` (a CSR pattern); without it,
generated stand-ins are used. Everything is checked before it is timed. Times are medians in
milliseconds, the device synchronised around each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from insum.formats import COO, BlockCOO, BlockGroupCOO, GroupCOO, SparseFormat, best_group_size

warnings.filterwarnings("ignore", message="Sparse .*")
_MOST_BLOCK_VALUES = 1 << 28
#: torch's conversion to BSR takes time in proportion to all places where a block could be: minutes
#: beyond this many.
_MOST_PLACES_FOR_TORCH_BSR = 10_000_000
Thunk = Callable[[], Any]


@dataclass
class Row:
    """All times of one graph."""

    graph: str
    rows: int
    nonzeros: int
    group_size: int
    padding: float
    milliseconds: dict[str, float | None] = field(default_factory=dict)


# --- data ---


def graphs(data: Path | None, names: list[str]) -> dict[str, sp.csr_array]:
    """CSR matrices by name, with random values; stand-ins where there is no data."""
    files = (
        sorted(f for d in (data, data / "graphs") for f in d.glob("*.npz"))
        if data and data.exists()
        else []
    )
    found: dict[str, sp.csr_array] = {}
    for file in files:
        content = np.load(file)
        if "indptr" in content and (not names or file.stem in names):
            found[file.stem] = _csr(
                content["indptr"], content["indices"], tuple(int(s) for s in content["shape"])
            )
    return found or stand_ins()


def stand_ins() -> dict[str, sp.csr_array]:
    """A skewed graph, an even one and a block-diagonal one."""
    generator = np.random.default_rng(0)
    skewed = np.minimum(generator.zipf(1.8, 50_000), 2000)
    made = {
        "made-skewed": _random_rows(skewed, 50_000, generator),
        "made-even": _random_rows(np.full(100_000, 10), 100_000, generator),
    }
    cliques = sp.block_diag([np.ones((24, 24), dtype=np.float32)] * 1000, format="csr")
    return made | {"made-cliques": sp.csr_array(cliques)}


def _random_rows(
    occupancy: np.ndarray, columns: int, generator: np.random.Generator
) -> sp.csr_array:
    indptr = np.concatenate([[0], np.cumsum(occupancy)]).astype(np.int32)
    m = _csr(
        indptr,
        generator.integers(0, columns, indptr[-1]).astype(np.int32),
        (len(occupancy), columns),
    )
    m.sum_duplicates()
    return m


def _csr(indptr: np.ndarray, indices: np.ndarray, shape: tuple[int, ...]) -> sp.csr_array:
    values = np.random.default_rng(1).random(len(indices), dtype=np.float32) + 0.5
    return sp.csr_array((values, indices, indptr), shape=shape)


def to_torch(m: sp.csr_array, device: str) -> Tensor:
    parts = (torch.as_tensor(a, device=device) for a in (m.indptr, m.indices, m.data))
    return torch.sparse_csr_tensor(*parts, m.shape, check_invariants=False)


# --- checking ---


def check(m: sp.csr_array, a: SparseFormat) -> None:
    """The format holds the same entries as the matrix."""
    back = sp.csr_array(a.cpu().to_scipy("coo"))
    back.sort_indices()
    m = m.copy()
    m.sort_indices()
    for field_ in ("indptr", "indices", "data"):
        if not np.array_equal(getattr(back, field_), getattr(m, field_)):
            raise SystemExit(f"{type(a).__name__}: {field_} is not what was put in")


# --- timing ---


def median_ms(run: Thunk, device: str, budget: float) -> float:
    """Median over as many runs as fit the budget (at least three), after one to warm up; of a very
    slow one, that one.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[float] = []
    start = time.perf_counter()
    run()
    wait()
    if time.perf_counter() - start > 2.0:
        return 1e3 * (time.perf_counter() - start)
    start = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - start < budget and len(times) < 50):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def conversions(m: sp.csr_array, t: Tensor, block: int, device: str) -> dict[str, Thunk | None]:
    """Everything that is timed on one graph; None where the blocks would not fit, or torch would
    take minutes.
    """
    padded = sp.csr_array((m.data, m.indices, m.indptr), shape=m.shape)
    padded.resize(*(-(-s // block) * block for s in m.shape))
    wide = to_torch(padded, device)
    coo = t.to_sparse_coo()
    places = wide.shape[0] // block * (wide.shape[1] // block)
    blocks = (
        BlockCOO.from_torch(wide, block_shape=block).positions[0]
        if _count_blocks(m, block) * block**2 < _MOST_BLOCK_VALUES
        else None
    )
    ours: dict[str, Thunk | None] = {
        "insum COO": lambda: COO.from_torch(t),
        "insum GroupCOO": lambda: GroupCOO.from_torch(t),
        "insum GroupCOO unchecked": lambda: GroupCOO.from_torch(t, validate=False),
        "insum GroupCOO exact": lambda: GroupCOO.from_torch(t, group_size="exact"),
        "insum BlockGroupCOO": (lambda: BlockGroupCOO.from_torch(t, block_shape=block))
        if blocks
        else None,
    }
    theirs: dict[str, Thunk | None] = {
        "torch to COO": t.to_sparse_coo,
        "torch COO to CSR": coo.to_sparse_csr,
        "torch to CSC": t.to_sparse_csc,
        "torch to BSR": (lambda: wide.to_sparse_bsr((block, block)))
        if blocks and places < _MOST_PLACES_FOR_TORCH_BSR
        else None,
    }
    if device == "cpu":
        theirs |= {
            "scipy to COO": m.tocoo,
            "scipy to CSC": m.tocsc,
            "scipy to BSR": (lambda: padded.tobsr((block, block))) if blocks else None,
        }
    return ours | theirs


def _count_blocks(m: sp.csr_array, block: int) -> int:
    rows = np.repeat(np.arange(m.shape[0]), np.diff(m.indptr)) // block
    return len(np.unique(rows * np.int64(-(-m.shape[1] // block)) + m.indices // block))


def measure(name: str, m: sp.csr_array, device: str, block: int, budget: float) -> Row:
    t = to_torch(m, device)
    a = GroupCOO.from_torch(t)
    check(m, a)
    row = Row(name, m.shape[0], m.nnz, a.group_size, a.padding)
    for label, run in conversions(m, t, block, device).items():
        if run is not None and label in (
            "insum COO",
            "insum GroupCOO exact",
            "insum BlockGroupCOO",
        ):
            check(m, run())
        row.milliseconds[label] = None if run is None else median_ms(run, device, budget)
    return row


def group_size(device: str, budget: float, rows: int = 1_000_000) -> dict[str, float]:
    """The exact group size of a million rows against one sort of a million integers, in one run."""
    generator = torch.Generator().manual_seed(0)
    occupancy = (torch.rand(rows, generator=generator).pow(4) * 2000).long().to(device)
    numbers = torch.randint(0, 2**31 - 1, (rows,), generator=generator).to(device)
    exact = median_ms(lambda: best_group_size(occupancy), device, budget)
    sort = median_ms(lambda: numbers.sort(), device, budget)
    return {
        "rows": rows,
        "best": best_group_size(occupancy),
        "exact_ms": exact,
        "sort_ms": sort,
        "ratio": exact / sort,
    }


# --- reporting ---


def table(rows: list[Row]) -> str:
    labels = list(rows[0].milliseconds)
    width = max(map(len, (r.graph for r in rows)))
    head = f"{'graph':<{width}} {'nonzeros':>11} {'g':>3} " + " ".join(
        f"{_short(label):>10}" for label in labels
    )
    lines = [head]
    for r in rows:
        times = " ".join(
            f"{'-' if (x := r.milliseconds[label]) is None else f'{x:.2f}':>10}" for label in labels
        )
        lines.append(f"{r.graph:<{width}} {r.nonzeros:>11,} {r.group_size:>3} {times}")
    return "\n".join(lines)


def _short(label: str) -> str:
    for long, short in (
        ("insum ", "i:"),
        ("torch ", "t:"),
        ("scipy ", "s:"),
        ("GroupCOO", "Group"),
        (" unchecked", "-"),
        (" exact", "*"),
        ("to ", ">"),
        (" ", ""),
    ):
        label = label.replace(long, short)
    return label


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with npz files of indptr, indices, shape")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument(
        "--graphs", default="", help="names, separated by commas; all where it is empty"
    )
    parser.add_argument("--block", type=int, default=16, help="block size of the block formats")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each measurement")
    options = parser.parse_args()
    names = [n for n in options.graphs.split(",") if n]
    rows = []
    for name, m in graphs(options.data, names).items():
        rows.append(measure(name, m, options.device, options.block, options.budget))
        print(f"{name}: checked and timed", flush=True)
    size = group_size(options.device, options.budget)
    device = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} thread(s)"
    )
    command = " ".join(["python", *(Path(a).name if a.startswith("/") else a for a in sys.argv)])
    about = {"command": command, "date": datetime.date.today().isoformat()}
    result = about | {
        "device": device,
        "torch": torch.__version__,
        "block": options.block,
        "group_size": size,
        "graphs": [asdict(r) for r in rows],
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"\nCSR to each format, milliseconds, {device}, torch {torch.__version__}, blocks of "
        f"{options.block}"
    )
    print(
        "i: insum, t: torch.sparse, s: SciPy; Group- without validation, Group* with the exact "
        "group size"
    )
    print(table(rows))
    print(
        f"exact group size of {size['rows']:,} rows: {size['exact_ms']:.2f} ms; sorting as "
        f"many integers: {size['sort_ms']:.2f} ms; ratio {size['ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
