"""``insum bench formats``: how long building a format takes: CSR to every format, against
torch.sparse and SciPy, and the exact group size against one sort.

Everything is checked before it is timed. Times are medians in milliseconds, from an idle device to
an idle device.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from insum.bench import data
from insum.bench.measure import once
from insum.bench.study import Study
from insum.bench.table import aligned
from insum.formats import COO, BlockGroupCOO, GroupCOO, SparseFormat, best_group_size

MOST_BLOCK_VALUES = 1 << 28
#: torch's conversion to BSR takes time in proportion to all places where a block could be: minutes
#: beyond this many.
MOST_PLACES_FOR_TORCH_BSR = 10_000_000
#: Seconds for the repetitions of one conversion; and how long one may take to be repeated at all.
SECONDS, MOST_SECONDS = 0.5, 2.0
#: Rows of the group size that is looked for, and of the integers that are sorted.
ROWS = 1_000_000
#: Of these the entries are compared with what was put in.
CHECKED = ("insum COO", "insum GroupCOO exact", "insum BlockGroupCOO")
Conversion: TypeAlias = Callable[[], object]


@dataclass
class FormatTimes:
    """All times of one graph; None where blocks would not fit, or torch would take minutes."""

    graph: str
    rows: int
    nonzeros: int
    group_size: int
    padding: float
    milliseconds: dict[str, float | None] = field(default_factory=dict)


def median_ms(run: Conversion, device: torch.device) -> float:
    """Median over as many runs as there is time for (at least three), after one to warm up; of a
    very slow one, that one.
    """
    first = once(run, device)
    if first > MOST_SECONDS:
        return 1e3 * first
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 50):
        times.append(1e3 * once(run, device))
    return statistics.median(times)


# --- conversions ----------------------------------------------------------------------------------


def csr_of(graph: data.CsrPattern) -> Tensor:
    """With values that are not zero."""
    values = data.RandomTensors(graph.indices.device).chance(graph.nonzeros) + 0.5
    return torch.sparse_csr_tensor(
        graph.indptr, graph.indices, values, graph.shape, check_invariants=False
    )


def is_same(csr: Tensor, made: SparseFormat) -> bool:
    """Whether a format holds the same entries as the matrix."""
    found = made.to_torch(torch.sparse_coo).coalesce()
    want = csr.to_sparse(layout=torch.sparse_coo).coalesce()
    kept = found.values() != 0  # blocks have zeros
    return torch.equal(found.indices()[:, kept], want.indices()) and torch.equal(
        found.values()[kept], want.values()
    )


def conversions(csr: Tensor, block: int) -> dict[str, Conversion | None]:
    """Everything that is timed on one graph."""
    wide = _in_whole_blocks(csr, block)
    coo = csr.to_sparse(layout=torch.sparse_coo)
    places = wide.shape[0] // block * (wide.shape[1] // block)
    fits = _count_blocks(csr, block) * block**2 < MOST_BLOCK_VALUES
    exact = functools.partial(GroupCOO.from_torch, csr, group_size="exact")
    ours: dict[str, Conversion | None] = {
        "insum COO": lambda: COO.from_torch(csr),
        "insum GroupCOO": lambda: GroupCOO.from_torch(csr),
        "insum GroupCOO unchecked": lambda: GroupCOO.from_torch(csr, validate=False),
        "insum GroupCOO exact": exact,
        "insum BlockGroupCOO": (lambda: BlockGroupCOO.from_torch(csr, block_shape=block))
        if fits
        else None,
    }
    theirs: dict[str, Conversion | None] = {
        "torch to COO": csr.to_sparse_coo,
        "torch COO to CSR": coo.to_sparse_csr,
        "torch to CSC": csr.to_sparse_csc,
        "torch to BSR": (lambda: wide.to_sparse_bsr((block, block)))
        if fits and places < MOST_PLACES_FOR_TORCH_BSR
        else None,
    }
    return ours | theirs | (_of_scipy(csr, wide, block, fits) if csr.device.type == "cpu" else {})


def _of_scipy(csr: Tensor, wide: Tensor, block: int, fits: bool) -> dict[str, Conversion | None]:
    try:
        import scipy.sparse as sp
    except ImportError as missing:
        print(f"without SciPy: {missing}")
        return {}
    here, padded = (
        sp.csr_array(tuple(part.numpy() for part in _parts(m)), shape=tuple(m.shape))
        for m in (csr, wide)
    )
    return {
        "scipy to COO": here.tocoo,
        "scipy to CSC": here.tocsc,
        "scipy to BSR": (lambda: padded.tobsr((block, block))) if fits else None,
    }


def _parts(csr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return csr.values(), csr.col_indices(), csr.crow_indices()


def _in_whole_blocks(csr: Tensor, block: int) -> Tensor:
    """The matrix with as many rows and columns as whole blocks have."""
    rows, columns = (-(-size // block) * block for size in csr.shape)
    values, indices, starts = _parts(csr)
    more = starts[-1:].expand(rows - csr.shape[0])
    return torch.sparse_csr_tensor(
        torch.cat([starts, more]), indices, values, (rows, columns), check_invariants=False
    )


def _count_blocks(csr: Tensor, block: int) -> int:
    _, columns, starts = _parts(csr)
    rows = torch.arange(csr.shape[0], device=csr.device).repeat_interleave(starts.diff().long())
    keys = rows // block * -(-csr.shape[1] // block) + columns.long() // block
    return len(torch.unique(keys))


# --- measuring ------------------------------------------------------------------------------------


def measured(graph: data.CsrPattern, block: int) -> FormatTimes:
    csr, device = csr_of(graph), graph.indices.device
    made = GroupCOO.from_torch(csr)
    row = FormatTimes(graph.name, csr.shape[0], graph.nonzeros, made.group_size, made.padding)
    for label, run in conversions(csr, block).items():
        if run is not None and label in CHECKED:
            built: Any = run()
            assert is_same(csr, built), f"{label} of {graph.name} is not what was put in"
        row.milliseconds[label] = None if run is None else median_ms(run, device)
    return row


def group_size(device: torch.device, rows: int) -> dict[str, float]:
    """The exact group size of many rows against one sort of as many integers."""
    generator = torch.Generator().manual_seed(0)
    occupancy = (torch.rand(rows, generator=generator).pow(4) * 2000).long().to(device)
    numbers = torch.randint(0, 2**31 - 1, (rows,), generator=generator).to(device)
    exact = median_ms(lambda: best_group_size(occupancy), device)
    sort = median_ms(lambda: numbers.sort(), device)
    best = best_group_size(occupancy)
    ratio = exact / sort
    return {"rows": rows, "best": best, "exact_ms": exact, "sort_ms": sort, "ratio": ratio}


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: Any) -> None:
    parser.add_argument("--block", type=int, default=16, help="side of the blocks")


def run(study: Study) -> int:
    warnings.filterwarnings("ignore", message="Sparse .*")
    place, block, rows = study.options.data, study.asked.block, list[FormatTimes]()
    names = data.chosen(data.graph_names(place), study.options.names, "graph")
    quick = study.options.quick
    size = group_size(study.device, ROWS // 100 if quick else ROWS)
    for name in names[: 2 if quick else None]:
        if not study.has_time():
            print(f"no time for {name} (--budget)")
            continue
        rows.append(measured(data.graph(name, place, study.device), block))
        study.keep(block=block, group_size=size, graphs=[asdict(row) for row in rows])
        print(f"{name}: checked and timed", flush=True)
    print("\n".join(aligned(_table(rows))))
    print(
        f"exact group size of {size['rows']:,} rows: {size['exact_ms']:.2f} ms; sorting as "
        f"many integers: {size['sort_ms']:.2f} ms; ratio {size['ratio']:.2f}"
    )
    return 0


def _table(rows: list[FormatTimes]) -> list[tuple[str, ...]]:
    """A column for each graph."""
    labels = list(rows[0].milliseconds) if rows else []
    head = [("ms", *(row.graph for row in rows))]
    head.append(("nonzeros", *(f"{row.nonzeros:,}" for row in rows)))
    head.append(("group size", *(str(row.group_size) for row in rows)))
    return head + [
        (label, *("-" if (ms := r.milliseconds[label]) is None else f"{ms:.2f}" for r in rows))
        for label in labels
    ]
