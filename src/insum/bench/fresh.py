"""``insum bench fresh``: calls on data that were never seen, as point clouds, mini-batches and
molecules are in use.

Every call gets new tensors of a new size, uniform within a quarter of the size that is named. What
is timed is the wall time from an idle device to an idle device: host, prologues and kernels. A
training step is forward, sum, backward and an update by SGD.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import insum
from insum.bench import data, measure
from insum.bench.options import BenchOptions
from insum.bench.rivals import FLEXGEMM, PYG, module
from insum.bench.study import Study
from insum.bench.table import aligned
from insum.runtime import launch

TITLE = "calls on new data"
CALLS, WARM, SPREAD = 200, 10, 0.25
#: How far clouds are moved.
MOVED = 1000
#: Nodes, edges and columns of the graphs; voxels and channels of the clouds; edges and channels of
#: the tensor product; and all of them where there is no GPU.
SIZES = {"nodes": 20_000, "edges": 200_000, "columns": 128, "voxels": 90_000, "channels": 64}
SMALL = {"nodes": 200, "edges": 1_000, "columns": 8, "voxels": 300, "channels": 8}
AGGREGATE = "y[d[e],f] = x[s[e],f]"
PRODUCT = "Z[dst[e],I[p,q],u] = V[p,q] * X[src[e],J[p,q],u] * Y[e,K[p,q]] * W[e,L[p],u]"
HEAD = ("case", "contender", "median ms", "p99", "max", "wanted", "compiled", "waits", "error")

CallArguments = tuple[Any, ...]


@dataclass(frozen=True)
class FreshContender:
    """Who runs a case. ``waits`` tells that it is not held to never waiting for the device."""

    name: str
    run: Callable[..., Any]
    waits: bool = True


@dataclass(frozen=True)
class FreshCase:
    """Data that are drawn anew for every call, who runs on them, and what is right.

    Attributes:
        wanted_ms: What a call may take on an H200.
        exact: The result in double precision, or None where another case has told.
    """

    name: str
    wanted_ms: float
    draw: Callable[[random.Random], CallArguments]
    contenders: tuple[FreshContender, ...]
    exact: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class Timed:
    """One contender in one case. ``waits`` is what a call waited for, empty where for nothing."""

    case: str
    contender: str
    median_ms: float
    p99_ms: float
    max_ms: float
    wanted_ms: float
    compiled: int
    waits: str
    error: float | None


# --- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSizes:
    device: torch.device
    place: Path | None
    of: dict[str, int]

    def near(self, name: str, drawn: random.Random) -> int:
        return int(self.of[name] * drawn.uniform(1 - SPREAD, 1 + SPREAD))

    def graph(self, drawn: random.Random) -> CallArguments:
        nodes, edges = self.near("nodes", drawn), self.near("edges", drawn)
        x = torch.randn(nodes, self.of["columns"], device=self.device)
        return x, torch.randint(0, nodes, (2, edges), device=self.device)

    def cloud(self, base: Tensor, drawn: random.Random) -> CallArguments:
        """A part of a scene, moved and turned, with features."""
        wanted = self.near("voxels", drawn)
        first = drawn.randrange(max(1, base.shape[0] - wanted))
        part = base[first : first + wanted]
        part = part[:, drawn.sample(range(3), 3)] + drawn.randrange(MOVED)
        coords = nn.functional.pad(part, (1, 0)).int()
        kind = torch.float16 if self.device.type == "cuda" else torch.float32
        features = torch.randn(len(coords), self.of["channels"], device=self.device, dtype=kind)
        return coords, features

    def molecules(self, drawn: random.Random) -> CallArguments:
        """Edges of atoms, in the order in which a neighbour list has them."""
        nodes, edges = self.near("nodes", drawn) // 4, self.near("edges", drawn) // 2
        ends = torch.randint(0, nodes, (2, edges), device=self.device)
        ends[1] = ends[1].sort().values
        channels = self.of["channels"]
        x = torch.randn(nodes, 4, channels, device=self.device)
        y = torch.randn(edges, 4, device=self.device)
        w = torch.randn(edges, 5, channels, device=self.device)
        return x, y, w, ends


def scene(sizes: DataSizes) -> Tensor:
    """Voxels of a cloud, and of copies beside it where it is too small for the largest part; none
    is at a negative place, which FlexGEMM does not see.
    """
    names = data.cloud_names(sizes.place)
    name = next((n for n in names if "lidar" in n.lower()), names[-1])
    base = data.cloud(name, sizes.place, sizes.device)
    needed = math.ceil(2 * sizes.of["voxels"] / base.shape[0])
    width = int(base[:, 0].max() - base[:, 0].min()) + 10
    step = torch.tensor([width, 0, 0], device=base.device)
    return torch.cat([base - base.amin(0) + k * step for k in range(needed)])


# --- cases ----------------------------------------------------------------------------------------


def cases(options: BenchOptions) -> Iterator[FreshCase]:
    cuda = options.device.type == "cuda"
    sizes = DataSizes(options.device, options.data, SIZES if cuda else SMALL)
    yield from _graph_cases(sizes)
    yield from _cloud_cases(sizes)
    yield _product_case(sizes)


def _graph_cases(sizes: DataSizes) -> Iterator[FreshCase]:
    def ours(x: Tensor, edges: Tensor) -> Tensor:
        return insum.insum(AGGREGATE, x=x, s=edges[0], d=edges[1], out_shape=x.shape)

    def torchs(x: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])

    yield FreshCase(
        "y[d[e],f] = x[s[e],f], new edges",
        0.12,
        sizes.graph,
        (FreshContender("insum", ours, False), FreshContender("torch index_add_", torchs)),
        lambda x, edges: torchs(x.double(), edges),
    )
    same = sizes.graph(random.Random(1))
    for name, wanted, draw in (
        ("GCNConv step, new edges", 1.0, sizes.graph),
        ("GCNConv step, same edges", 0.8, lambda drawn: same),
    ):
        yield FreshCase(name, wanted, draw, tuple(_gcn_contenders(sizes)), None)


def _gcn_contenders(sizes: DataSizes) -> Iterator[FreshContender]:
    from insum.nn import GCNConv

    columns = sizes.of["columns"]
    yield FreshContender("insum", training(GCNConv(columns, columns).to(sizes.device)), False)
    # what of a step is PyTorch's own: the same without edges
    alone = nn.Linear(columns, columns).to(sizes.device)
    yield FreshContender("torch Linear, no edges", training(lambda x, edges: alone(x), alone))
    if not PYG.absent(sizes.device):
        theirs = module("torch_geometric.nn").GCNConv(columns, columns)
        yield FreshContender("PyG", training(theirs.to(sizes.device)))


def _cloud_cases(sizes: DataSizes) -> Iterator[FreshCase]:
    from insum.nn import SparseConv3d, SparseTensor

    base, channels = scene(sizes), sizes.of["channels"]
    kind = torch.float16 if sizes.device.type == "cuda" else torch.float32
    layers = nn.Sequential(
        *(SparseConv3d(channels, channels, 3, submanifold=True, bias=False) for _ in range(2))
    ).to(sizes.device, kind)
    draw = lambda drawn: sizes.cloud(base, drawn)

    def one(coords: Tensor, features: Tensor) -> Tensor:
        with torch.no_grad():
            return layers[0](SparseTensor(coords, features)).features  # type: ignore[no-any-return]

    def exact(coords: Tensor, features: Tensor) -> Tensor:
        return exact_convolution(coords, features, layers[0].weight.detach())  # type: ignore[operator]

    contenders = [FreshContender("insum", one, False)]
    if not FLEXGEMM.absent(sizes.device):
        theirs = flexgemm(layers[0].weight.detach(), int(base.max()) + MOVED)  # type: ignore[operator]
        contenders.append(FreshContender("FlexGEMM", theirs))
    yield FreshCase("map and convolution, new cloud", 0.40, draw, tuple(contenders), exact)
    both = lambda coords, features: layers(SparseTensor(coords, features)).features
    step = FreshContender("insum", training(both, layers), False)
    yield FreshCase("two convolutions, step, new cloud", 1.8, draw, (step,))


def _product_case(sizes: DataSizes) -> FreshCase:
    found = data.grouped_coefficients(data.degrees(1))
    fixed: dict[str, Any] = data.promised(found, sizes.device)

    def ours(x: Tensor, y: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return insum.insum(
            PRODUCT,
            **fixed,
            X=x,
            Y=y,
            W=w,
            src=ends[0],
            dst=ends[1],
            out_shape=x.shape,
            padded=("I", "J", "K"),
        )

    def exact(x: Tensor, y: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        dense = torch.zeros(5, 4, 4, 4, dtype=torch.float64, device=x.device)
        p, q = (fixed["I"] >= 0).nonzero(as_tuple=True)
        at = (fixed["L"][p].long(), *(fixed[n][p, q].long() for n in "IJK"))
        dense[at] = fixed["V"][p, q].double()
        own = torch.einsum(
            "pijk,eju,ek,epu->eiu", dense, x.double()[ends[0]], y.double(), w.double()
        )
        return torch.zeros_like(x, dtype=torch.float64).index_add_(0, ends[1], own)

    contenders = (FreshContender("insum", ours, False),)
    return FreshCase(
        "tensor-product convolution, new edges", 0.30, sizes.molecules, contenders, exact
    )


def training(run: Callable[..., Tensor], layer: nn.Module | None = None) -> Callable[..., Tensor]:
    """A step of a layer: forward, sum, backward, SGD."""
    trained: Any = run if layer is None else layer
    update = torch.optim.SGD(trained.parameters(), 1e-6)

    def step(*arguments: Tensor) -> Tensor:
        result = run(*arguments)
        update.zero_grad()
        result.sum().backward()  # type: ignore[no-untyped-call]
        update.step()
        return result

    return step


def exact_convolution(coords: Tensor, features: Tensor, weight: Tensor) -> Tensor:
    """In double precision, offset by offset, with maps of PyTorch's own operations."""
    low = coords.amin(0).long() - 1
    size = coords.amax(0).long() - low + 2
    weights = torch.stack([size[1:].prod(), size[2:].prod(), size[3], torch.ones_like(size[0])])
    keys, order = ((coords.long() - low) * weights).sum(1).sort()
    wanted = ((coords.long() - low) * weights).sum(1)
    result = torch.zeros(*features.shape[:1], weight.shape[2], dtype=torch.float64).to(
        weight.device
    )
    steps = torch.cartesian_prod(*[torch.arange(-1, 2)] * 3).to(coords.device)
    for number, step in enumerate(steps):
        key = wanted + (step * weights[1:]).sum()
        at = torch.searchsorted(keys, key).clamp_(max=len(keys) - 1)
        there = keys[at] == key
        rows = features.double()[order[at]] * there[:, None]
        result += rows @ weight[number].double()
    return result


def flexgemm(weight: Tensor, extent: int) -> Callable[..., Tensor]:
    ops = module("flex_gemm.ops.spconv")
    ops.set_algorithm(ops.Algorithm.MASKED_IMPLICIT_GEMM_SPLITK)
    theirs = weight.permute(2, 0, 1).reshape(weight.shape[2], 3, 3, 3, weight.shape[1]).contiguous()

    def call(coords: Tensor, features: Tensor) -> Tensor:
        # the extent of a scene is known to whoever made it: it is not looked for in the clouds
        shape = torch.Size([1, weight.shape[1], extent, extent, extent])
        out: Tensor = ops.sparse_submanifold_conv3d(features, coords, shape, weight=theirs)[0]
        return out

    return call


# --- timing ---------------------------------------------------------------------------------------


def timed(case: FreshCase, device: torch.device, calls: int) -> list[Timed]:
    """All contenders of a case, in turns on the same data."""
    drawn, seconds = random.Random(0), {c.name: list[float]() for c in case.contenders}
    errors = {c.name: error_of(case, c, device) for c in case.contenders}
    for _ in range(WARM):
        arguments = case.draw(drawn)
        for one in case.contenders:
            one.run(*arguments)
    compiled = dict.fromkeys(seconds, 0)
    for _ in range(calls):
        arguments = case.draw(drawn)
        for one in case.contenders:
            before = launch.compile_count()
            seconds[one.name].append(measure.once(functools.partial(one.run, *arguments), device))
            compiled[one.name] += launch.compile_count() - before
    waits = {c.name: waited_for(case, c, device, drawn) for c in case.contenders}
    return [
        _summary(case, name, own, compiled[name], waits[name], errors[name])
        for name, own in seconds.items()
    ]


def _summary(
    case: FreshCase, name: str, seconds: list[float], compiled: int, waits: str, error: float | None
) -> Timed:
    ranked = sorted(1e3 * s for s in seconds)
    p99 = ranked[min(len(ranked) - 1, math.ceil(0.99 * len(ranked)) - 1)]
    return Timed(
        case.name,
        name,
        statistics.median(ranked),
        p99,
        ranked[-1],
        case.wanted_ms,
        compiled,
        waits,
        error,
    )


def error_of(case: FreshCase, contender: FreshContender, device: torch.device) -> float | None:
    """The relative error of a first call, in memory that was poisoned."""
    if case.exact is None:
        return None
    arguments = case.draw(random.Random(2))
    want = case.exact(*arguments)
    kinds = {t.dtype for t in arguments if t.is_floating_point()}
    measure.poison((want,), kinds.pop(), device)
    return measure.relative_error((contender.run(*arguments),), (want,))


def waited_for(
    case: FreshCase, contender: FreshContender, device: torch.device, drawn: random.Random
) -> str:
    """What a call waits for on the device: the first line of PyTorch's complaint, if any."""
    if device.type != "cuda" or contender.waits:
        return ""
    arguments = case.draw(drawn)
    measure.wait(device)
    try:
        with no_waits():
            contender.run(*arguments)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- the command ----------------------------------------------------------------------------------


def run(study: Study) -> int:
    """Measure, show and write; 1 if a result is wrong."""
    rows: list[Timed] = []
    for case in cases(study.options):
        rows += timed(case, study.device, CALLS if study.options.gpu else 3)
        study.keep(calls=CALLS, rows=[asdict(row) for row in rows])
        for row in rows[-len(case.contenders) :]:
            print("  ".join(_cells(row)), flush=True)
    print("\n".join(aligned([HEAD, *map(_cells, rows)])))
    print(f"written: {study.file}")
    return int(any(row.error is not None and not row.error < 1e-2 for row in rows))


def _cells(row: Timed) -> tuple[str, ...]:
    return (
        row.case,
        row.contender,
        f"{row.median_ms:.3f}",
        f"{row.p99_ms:.3f}",
        f"{row.max_ms:.3f}",
        f"{row.wanted_ms:.2f}",
        str(row.compiled),
        row.waits or "-",
        "" if row.error is None else f"{row.error:.0e}",
    )
