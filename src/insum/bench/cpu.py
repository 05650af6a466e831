"""``insum bench cpu``: statements on a CPU beside what PyTorch and e3nn have for the job there:
sparse times dense, sparse convolution, tensor products of rows and along edges, windows over dense
tensors, and the statements of ``insum bench survey``; forward, and with gradients.

Contenders take turns, and each is called once before it is timed, so that nobody pays for what
another has left in caches and in the allocator. Results are compared with float64 references first.
A ratio is the median over all turns of the rival's time by ours: above 1 we are faster.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import insum
from insum.bench import conv, data, equivariant, spmm, survey, tensor_product
from insum.bench.gallery import Exhibit
from insum.bench.measure import ReadyContender, Results, in_turns, once, relative_error
from insum.bench.records import BOTH, FORWARD
from insum.bench.study import Study
from insum.bench.survey_tensors import SurveyTensors

CPU = torch.device("cpu")
APPLICATIONS = ("spmm", "conv", "tensor-product", "equivariant", "windows", "survey")
DIRECTIONS = (FORWARD, BOTH)
#: None of these was looked at while the ways of a CPU were chosen.
GRAPHS, COLUMNS = ("PROTEINS_full", "c-46", "ego-twitter"), (16, 96, 128)
CLOUDS, CHANNELS = ("pc-pcl-room_scan1", "pc-lidar-ucf-LIDAR1"), (32, 64)
MOST_VOXELS, ITEMS = 20_000, 400
PRODUCTS = ((1, 16), (1, 64), (2, 24), (3, 8))
#: Degree, channels, edges.
EDGES = ((1, 64, 2_000), (2, 32, 2_000), (2, 32, 10_000), (3, 16, 2_000))
#: Rows, entries and tokens of the statements of the survey.
SURVEYED = 4_000, 40_000, 409


@dataclass(frozen=True)
class CpuCase:
    """One case: ours and its rivals by name, and the exact results."""

    application: str
    name: str
    direction: str
    contenders: dict[str, ReadyContender]
    exact: Results


def cases(study: Study) -> Iterator[CpuCase]:
    """All, or the first of each application; made when their turn comes."""
    most = 1 if study.options.quick else None
    place, wanted = study.options.data, study.wanted(APPLICATIONS)
    if "spmm" in wanted:
        for name in GRAPHS[:most]:
            graph = data.graph(name, place, CPU)
            for columns in COLUMNS[:most]:
                yield from spmm_cases(graph, columns)
    if "conv" in wanted:
        for name in CLOUDS[:most]:
            voxels = data.cloud(name, place, CPU, MOST_VOXELS)
            for channels in CHANNELS[:most]:
                yield from conv_cases(name, voxels, channels)
    if "tensor-product" in wanted:
        for degree, channels in PRODUCTS[:most]:
            yield from product_cases(degree, channels)
    if "equivariant" in wanted:
        for degree, channels, edges in EDGES[:most]:
            yield from edge_cases(degree, channels, edges)
    if "windows" in wanted:
        for exhibit in [*windows(), *convolutions()][:most]:
            yield from exhibit_cases("windows", exhibit, "torch convolution")
    if "survey" in wanted:
        named = SurveyTensors(data.RandomTensors(CPU), *SURVEYED)
        given = named.drawn(study.options.drawn)
        exhibits = (exhibit for group in survey.GROUPS for exhibit in group(given))
        for exhibit in itertools.islice(exhibits, most):
            for tensor in exhibit.tensors.values():
                if not tensor.is_floating_point():
                    insum.unchanging(tensor)
            yield from exhibit_cases("survey", exhibit, "torch, eager")


def conv_cases(name: str, voxels: Tensor, channels: int) -> Iterator[CpuCase]:
    given = conv.inputs(voxels, channels, torch.float32)
    for direction in DIRECTIONS:
        found = {
            "insum": conv.ours(given, direction, grouped=False),
            "gather-matmul-scatter": conv.gathered(given, direction),
        }
        label = f"{name}, {len(voxels)} voxels, {channels} channels"
        yield CpuCase("convolution", label, direction, found, conv.want(given, direction))


def spmm_cases(graph: data.CsrPattern, columns: int) -> Iterator[CpuCase]:
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
        yield CpuCase("SpMM", label, direction, found, spmm.want(given, direction))


def _csr(graph: data.CsrPattern, values: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(
        graph.indptr, graph.indices, values, graph.shape, check_invariants=False
    )


def product_cases(degree: int, channels: int) -> Iterator[CpuCase]:
    given = tensor_product.inputs(degree, channels, ITEMS, torch.float32, CPU)
    label = f"degree {degree}, {channels} channels, {ITEMS} items"
    yield from beside_e3nn("tensor product", label, tensor_product, given)


def edge_cases(degree: int, channels: int, edges: int) -> Iterator[CpuCase]:
    given = equivariant.inputs(degree, channels, edges, CPU)
    label = f"degree {degree}, {channels} channels, {edges} edges"
    yield from beside_e3nn("product along edges", label, equivariant, given)


def windows() -> list[Exhibit]:
    """What a convolution of PyTorch does, too."""
    draw = data.RandomTensors(CPU)
    return [
        Exhibit(
            "a stencil of 5 x 5 on 1000 x 1204",
            "y[i,j] = w[a,b] * x[i+a,j+b]",
            {"w": draw.normal(5, 5), "x": draw.normal(1004, 1208)},
            lambda w, x: functional.conv2d(x[None, None], w[None, None])[0, 0],
            leaves=("w", "x"),
            options={"out_shape": (1000, 1204)},
        ),
        Exhibit(
            "a stencil of 3 x 3 on 300 pictures of 62 x 62",
            "y[n,i,j] = w[a,b] * x[n,i+a,j+b]",
            {"w": draw.normal(3, 3), "x": draw.normal(300, 64, 64)},
            lambda w, x: functional.conv2d(x[:, None], w[None, None])[:, 0],
            leaves=("w", "x"),
            options={"out_shape": (300, 62, 62)},
        ),
        Exhibit(
            "channels apart, 7 wide: 8 of 96 channels, 3000 long",
            "y[b,c,t] = x[b,c,t+k] * w[c,k]",
            {"x": draw.normal(8, 96, 3006), "w": draw.normal(96, 7)},
            lambda x, w: functional.conv1d(x, w[:, None], groups=96),
            leaves=("x", "w"),
            options={"out_shape": (8, 96, 3000)},
        ),
        Exhibit(
            "a filter of 50, 200000 long",
            "y[t] = x[t+k] * w[k]",
            {"x": draw.normal(200_049), "w": draw.normal(50)},
            lambda x, w: functional.conv1d(x[None, None], w[None, None])[0, 0],
            leaves=("x", "w"),
            options={"out_shape": (200_000,)},
        ),
        Exhibit(
            "every second place, 3 wide: 40 columns, 25000 long",
            "y[t,f] = x[2*t+k,f] * w[k,f]",
            {"x": draw.normal(50_001, 40), "w": draw.normal(3, 40)},
            lambda x, w: functional.conv1d(x.T[None], w.T[:, None], stride=2, groups=40)[0].T,
            leaves=("x", "w"),
            options={"out_shape": (25_000, 40)},
        ),
    ]


def convolutions() -> list[Exhibit]:
    """Windows over channels."""
    draw = data.RandomTensors(CPU)
    return [
        Exhibit(
            "64 to 64 channels, 3 x 3, on 2 pictures of 56 x 56",
            "y[b,o,i,j] = w[o,c,r,s] * x[b,c,i+r,j+s]",
            {"w": draw.normal(64, 64, 3, 3), "x": draw.normal(2, 64, 58, 58)},
            lambda w, x: functional.conv2d(x, w),
            leaves=("w", "x"),
            options={"out_shape": (2, 64, 56, 56)},
        ),
        Exhibit(
            "24 to 40 channels, innermost, 5 x 5, every second place",
            "y[b,i,j,o] = w[r,s,c,o] * x[b,2*i+r,2*j+s,c]",
            {"w": draw.normal(5, 5, 24, 40), "x": draw.normal(4, 69, 69, 24)},
            lambda w, x: functional.conv2d(
                x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), stride=2
            ).permute(0, 2, 3, 1),
            leaves=("w", "x"),
            options={"out_shape": (4, 33, 33, 40)},
        ),
        Exhibit(
            "48 to 80 channels, 3 wide and 4 apart, 2000 long",
            "y[b,o,t] = w[o,c,k] * x[b,c,t+4*k]",
            {"w": draw.normal(80, 48, 3), "x": draw.normal(6, 48, 2008)},
            lambda w, x: functional.conv1d(x, w, dilation=4),
            leaves=("w", "x"),
            options={"out_shape": (6, 80, 2000)},
        ),
        Exhibit(
            "8 groups of 12 to 20 channels, 3 x 3 x 3",
            "y[g,o,i,j,k] = w[g,o,c,r,s,t] * x[g,c,i+r,j+s,k+t]",
            {"w": draw.normal(8, 20, 12, 3, 3, 3), "x": draw.normal(8, 12, 14, 14, 14)},
            lambda w, x: functional.conv3d(x.flatten(0, 1)[None], w.flatten(0, 1), groups=8).view(
                8, 20, 12, 12, 12
            ),
            leaves=("w", "x"),
            options={"out_shape": (8, 20, 12, 12, 12)},
        ),
    ]


def exhibit_cases(application: str, exhibit: Exhibit, rival: str) -> Iterator[CpuCase]:
    for direction in DIRECTIONS if exhibit.leaves else (FORWARD,):
        found = {
            "insum": exhibit.ready(exhibit.ours, direction),
            rival: exhibit.ready(exhibit.of(exhibit.formula), direction),
        }
        yield CpuCase(application, exhibit.name, direction, found, exhibit.want(direction))


def beside_e3nn(application: str, label: str, bench: Any, given: Any) -> Iterator[CpuCase]:
    """``bench`` has ``ours``, ``e3nn`` and what they ``want``."""
    for direction in DIRECTIONS:
        found = {"insum": bench.ours(given, direction)}
        try:
            found["e3nn"] = bench.e3nn(given, direction)
        except ImportError as error:
            print(f"without e3nn: {error}")
        yield CpuCase(application, label, direction, found, bench.want(given, direction))


# --- measuring ------------------------------------------------------------------------------------


def measured(case: CpuCase, turns: int) -> Iterator[dict[str, Any]]:
    """A row for each rival."""
    errors = {
        name: relative_error(ready.canonical(ready.run()), case.exact)
        for name, ready in case.contenders.items()
    }
    times = in_turns({n: ready.run for n, ready in case.contenders.items()}, turns, milliseconds)
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
                "ratio": statistics.median(b / a for a, b in zip(ours, times[name], strict=True)),
                "error": errors["insum"],
            }


def milliseconds(run: Callable[[], object]) -> float:
    """Of a second call: the first is for caches and the allocator."""
    run()
    return 1e3 * once(run, CPU)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- the command ----------------------------------------------------------------------------------


def add_options(parser: Any) -> None:
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)


def run(study: Study) -> int:
    warnings.filterwarnings("ignore", message="Sparse")
    count, turns, rows = study.asked.threads, study.asked.turns, list[dict[str, Any]]()
    with threads(count):
        for case in cases(study):
            for row in measured(case, turns):
                rows.append(row)
                print(_line(row), flush=True)
            study.on(CPU).keep(threads=count, turns=turns, rows=rows)
    return 0 if all(row["error"] < 1e-5 for row in rows) else 1


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:<58} {row['direction']:<17} {row['rival']:<24} "
        f"{row['insum_ms']:>9.3f} {row['rival_ms']:>9.3f} {row['ratio']:>6.2f}"
    )
