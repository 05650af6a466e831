"""``insum bench distributed``: what a matrix on several ranks costs, as one process can tell.

- *volume*: rows that travel in a product on so many ranks, beside an all-gather, in the order given
  and after reverse Cuthill-McKee, with rows of the dense factor alone and with sums where they are
  fewer. Counted, not timed.
- *host*: host time of a warm call on one rank, beside that of a plain format.
- *model*: how long a product would take. Kernels are timed here, those of every rank one after the
  other; links are not there, and their rate and latency are assumed. It is a model, and called so.

A run that is asked for some parts leaves the others as they are in the record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import insum
from insum.bench import data, machine
from insum.bench.measure import clock, once
from insum.bench.study import Study
from insum.distributed import partition, plan
from insum.distributed.cuts import lengths
from insum.distributed.division import cuts_of, spec_of
from insum.distributed.needs import Places, planned
from insum.formats import COO, GroupCOO

GRAPHS = ("amazon0601", "ego-twitter", "copter2", "email-Enron", "kim1")
QUICK = ("cora",)
PARTS = ("volume", "host", "model")
PRODUCT = "Y[m,n] = A[m,k] * X[k,n]"
ORDERS: tuple[Any, ...] = (None, "rcm")
#: Rows of one dense factor, in elements of float32.
COLUMNS = 64


def add_options(parser: Any) -> None:
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--graphs", default="", help="names of graphs, separated by commas")
    parser.add_argument("--link", type=float, default=200.0, help="model: GB/s into a rank")
    parser.add_argument("--latency", type=float, default=20.0, help="model: us of an exchange")


def run(study: Study) -> int:
    makers: dict[str, Callable[[Study], Iterator[dict[str, Any]]]] = {
        "volume": volume,
        "host": host,
        "model": model,
    }
    found = _kept(study)
    for part in study.wanted(PARTS):
        rows: list[dict[str, Any]] = []
        about = machine.about(study.command, study.device)
        for row in makers[part](study):
            rows.append(row)
            print(", ".join(f"{k} {_shown(v)}" for k, v in row.items()), flush=True)
            found[part] = {**about, "rows": rows}
            study.keep(parts=found)
    return 0


def _kept(study: Study) -> dict[str, Any]:
    """The parts of an earlier run."""
    if not study.file.exists():
        return {}
    earlier: dict[str, Any] = json.loads(study.file.read_text(encoding="utf-8")).get("parts", {})
    return earlier


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def graphs(study: Study) -> list[str]:
    asked = [name for name in study.asked.graphs.split(",") if name]
    return asked or list(QUICK if study.options.quick else GRAPHS)


def matrix(study: Study, name: str) -> COO:
    graph = data.graph(name, study.options.data, torch.device("cpu"))
    rows = torch.repeat_interleave(torch.arange(graph.shape[0]), graph.indptr.diff().long())
    sides = (max(graph.shape),) * 2
    return COO.from_entries((rows, graph.indices.long()), None, sides, validate=False)


# --- volume ---------------------------------------------------------------------------------------


def volume(study: Study) -> Iterator[dict[str, Any]]:
    """Rows and bytes of one product."""
    ranks = study.asked.ranks
    for name in graphs(study):
        A = matrix(study, name)
        for order, send in product(ORDERS, ("rows", "fewest")):
            begin = time.perf_counter()
            found = plan(A, ranks, order=order, send=send, columns=COLUMNS)  # type: ignore[arg-type]
            entries = [rank.entries for rank in found.ranks]
            yield {
                "graph": name,
                "rows": A.shape[0],
                "nonzeros": sum(entries),
                "ranks": ranks,
                "order": order or "given",
                "send": send,
                "share": found.share,
                "all_gather_share": found.rows_of_all_gather / A.shape[0],
                "most_mb": max(map(found.bytes_received, range(ranks))) / 1e6,
                "imbalance": max(entries) * ranks / max(1, sum(entries)),
                "plan_s": time.perf_counter() - begin,
            }


# --- host time ------------------------------------------------------------------------------------


def host(study: Study) -> Iterator[dict[str, Any]]:
    """Microseconds of a warm call where nothing travels."""
    torch.manual_seed(0)
    device = study.device
    dense = torch.randn(64, 64) * (torch.rand(64, 64) < 0.2)
    A, X = COO.from_dense(dense.to(device)), torch.randn(64, 64, device=device)
    with one_rank(device) as mesh:
        part = partition(A, mesh)
        for gradients in (False, True):
            rounds = 2 if study.options.quick else 30
            times = [_host_us(one, X, gradients, device, rounds) for one in (A, part)]
            yield {
                "call": "forward and backward" if gradients else "forward",
                "plain_us": times[0],
                "partitioned_us": times[1],
                "more_us": times[1] - times[0],
            }


def _host_us(A: Any, X: Tensor, gradients: bool, device: torch.device, rounds: int) -> float:
    X = X.clone().requires_grad_(gradients)

    def call() -> None:
        out = insum.einsum(PRODUCT, A=A, X=X)
        if gradients:
            torch.autograd.grad(out, X, torch.ones_like(out))

    def calls() -> None:
        for _ in range(20):
            call()

    calls()
    runs = [once(calls, device, wait_for_end=False) for _ in range(rounds)]
    return 1e6 * min(runs) / 20


@contextmanager
def one_rank(device: torch.device) -> Iterator[DeviceMesh]:
    """A group of this process alone, where there is none."""
    started = not dist.is_initialized()
    if started:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield DeviceMesh.from_group(dist.new_group([dist.get_rank()]), device.type)
    finally:
        if started:
            dist.destroy_process_group()


# --- a model --------------------------------------------------------------------------------------


def model(study: Study) -> Iterator[dict[str, Any]]:
    """Milliseconds of one product on 1, 2, 4 ... ranks: kernels timed, links assumed."""
    most = study.asked.ranks
    counts = [2**k for k in range(most.bit_length()) if 2**k <= most]
    for name in graphs(study):
        A = matrix(study, name)
        alone = 0.0
        for ranks in counts:
            pieces = modelled(study, A, ranks)
            alone = alone or pieces["product_ms"]
            yield {"graph": name, "ranks": ranks, **pieces, "speedup": alone / pieces["product_ms"]}


def modelled(study: Study, A: COO, ranks: int) -> dict[str, float]:
    """The slowest rank, where rows travel beside own entries and far ones wait for them."""
    rows, columns = (c.long() for c in A.indices)
    cuts = cuts_of(rows, spec_of(A), "nonzeros", ranks).rows
    times, gathered = [], []
    row_ms = 1e3 * COLUMNS * 4 / (study.asked.link * 1e9)
    for rank, one in enumerate(planned(rows, columns, cuts, cuts)):
        here = lengths(cuts)[rank]
        own, far, out = (
            _kernel_ms(study, places, sides)
            for places, sides in (
                (one.own, (here, here)),
                (one.far, (here, sum(one.columns.take))),
                (one.out, (sum(one.rows.take), here)),
            )
        )
        wait = study.asked.latency / 1e3 if ranks > 1 else 0.0
        rows_in = wait + row_ms * sum(one.columns.take)
        sums_in = wait + row_ms * sum(one.rows.give)
        times.append(max(max(out + own, rows_in) + far, out + sums_in))
        gathered.append(wait + row_ms * (A.shape[1] - here) + own + far + out)
    return {"product_ms": max(times), "all_gather_ms": max(gathered)}


def _kernel_ms(study: Study, places: Places, sides: tuple[int, int]) -> float:
    """The product of one part, timed on this device."""
    if not len(places.rows):
        return 0.0
    values = torch.randn(len(places.rows))
    made = GroupCOO.from_entries((places.rows, places.columns), values, sides, validate=False)
    part, X = made.to(study.device), torch.randn(sides[1], COLUMNS, device=study.device)
    call: Callable[[], object] = lambda: insum.einsum(PRODUCT, A=part, X=X)
    for _ in range(5):  # an index tensor that comes back is looked at
        call()
    return clock(call, study.device)[0]
