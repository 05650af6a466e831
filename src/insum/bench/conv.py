"""Sparse convolution over point clouds, the paper's figure against TorchSparse: 27 offsets, 128 to
128 channels, 5 cm voxels.

The kernel map is built before the clock starts, for everybody.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import insum
from insum.bench import data, routes
from insum.bench.measure import (
    TOLERANCE,
    Comparison,
    Contender,
    ReadyContender,
    Results,
    Work,
    autograd,
    cases_of,
    no_grad,
    relative_error,
)
from insum.bench.options import BenchOptions
from insum.bench.records import FORWARD
from insum.bench.rivals import FLEXGEMM, SPCONV, TORCHSPARSE, module
from insum.formats import GroupCOO, NeighborTable, SparseFormat
from insum.nn import SparseConv3d, SparseTensor
from insum.nn.kernel_map import GROUP, kernel_map

TITLE = "Sparse convolution"
STATEMENT = 'insum.einsum("Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]", Map=Map, In=In, W=W)'
BASELINE = "gather-matmul-scatter"
QUICK = ("pc-s3dis-ucf-lobby", "pc-spconv-benchmark")
OFFSETS = 27


@dataclass(frozen=True, eq=False)
class ConvInputs:
    """Voxels with features, weights, a gradient of the output, and neighbours ``table[z,x]``."""

    voxels: Tensor
    table: Tensor
    x: Tensor
    w: Tensor
    upstream: Tensor

    def pairs(self) -> int:
        return int((self.table >= 0).sum())

    def map(self, grouped: bool) -> SparseFormat:
        """``Map[z,x,y]`` in one of its two spellings."""
        count = len(self.voxels)
        table = NeighborTable(self.table, (OFFSETS, count, count), dim=2, validate=False)
        return table.to_format(GroupCOO, group_dims=0, group_size=GROUP) if grouped else table

    def lists(self) -> list[tuple[Tensor, Tensor]]:
        """Outputs and inputs of each offset."""
        where = [(row >= 0).nonzero()[:, 0] for row in self.table]
        return [(x, row[x].long()) for x, row in zip(where, self.table, strict=True)]

    def work(self, direction: str) -> Work:
        flops = 2.0 * self.pairs() * self.w.shape[1] * self.w.shape[2]
        item = self.x.element_size()
        read = (self.x.numel() + self.upstream.numel() + self.w.numel()) * item + 4 * min(
            self.table.numel(), 2 * self.pairs()
        )
        return Work(flops, read) if direction == FORWARD else Work(3 * flops, 3 * read)


def inputs(voxels: Tensor, channels: int, dtype: torch.dtype) -> ConvInputs:
    draw, count = data.RandomTensors(voxels.device, dtype), len(voxels)
    weights = draw.normal(OFFSETS, channels, channels, scale=1 / channels)
    return ConvInputs(
        voxels,
        data.neighbour_table(voxels),
        draw.normal(count, channels),
        weights,
        draw.normal(count, channels),
    )


def cases(options: BenchOptions) -> Iterator[Comparison]:
    names = data.chosen(data.cloud_names(options.data), options.names, "cloud")
    if options.quick and not options.names:
        names = [name for name in names if name in QUICK] or names[:2]
    for name in names:
        voxels = data.cloud(name, options.data, options.device, None if options.gpu else 1000)
        for dtype in options.dtypes_or(torch.float16 if options.gpu else torch.float32):
            given = inputs(voxels, 128 if options.gpu else 16, dtype)
            label = f"{name} ({given.pairs() / len(voxels):.1f} of 27 neighbours)"
            yield from cases_of("conv", label, dtype, options, given, want, contenders)


def want(given: ConvInputs, direction: str) -> Results:
    x, w, g = given.x.double(), given.w.double(), given.upstream.double()
    out, to_x, to_w = torch.zeros_like(g), torch.zeros_like(x), torch.zeros_like(w)
    for z, (here, there) in enumerate(given.lists()):
        out.index_add_(0, here, x[there] @ w[z])
        if direction != FORWARD:
            to_x.index_add_(0, there, g[here] @ w[z].T)
            to_w[z] = x[there].T @ g[here]
    return (out,) if direction == FORWARD else (out, to_x, to_w)


def contenders(given: ConvInputs, direction: str) -> list[Contender]:
    found = [
        Contender("insum SparseConv3d", lambda: layer(given, direction), lines=1),
        Contender("insum, neighbour table", lambda: ours(given, direction, grouped=False), lines=1),
        Contender("insum, grouped pairs", lambda: ours(given, direction, grouped=True), lines=1),
        Contender(
            "gather-matmul-scatter",
            lambda: gathered(given, direction),
            note="PyTorch; lists of pairs prepared ahead",
        ),
    ]
    if direction == FORWARD:
        found.append(Contender("torch.compile", lambda: compiled(given), slow=True))
    for rival, make in ((SPCONV, spconv), (TORCHSPARSE, torchsparse), (FLEXGEMM, flexgemm)):
        if not rival.absent(given.x.device):
            found.append(
                Contender(rival.name, _late(make, given, direction), lines=rival.lines, slow=True)
            )
    return found


def _late(
    make: Callable[[ConvInputs, str], ReadyContender], given: ConvInputs, direction: str
) -> Callable[[], ReadyContender]:
    return lambda: make(given, direction)


def ours(given: ConvInputs, direction: str, *, grouped: bool) -> ReadyContender:
    found = given.map(grouped)
    call = lambda x, w: insum.einsum(
        "Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]", Map=found, In=x, W=w
    )
    return autograd(call, (given.x, given.w), given.upstream, direction)


def layer(given: ConvInputs, direction: str) -> ReadyContender:
    """The layer as a user has it; it chooses the spelling."""
    made = SparseConv3d(given.w.shape[1], given.w.shape[2], 3, bias=False, submanifold=True).to(
        given.x.device, given.x.dtype
    )
    points = SparseTensor(given.voxels, given.x)
    with torch.no_grad():
        made.weight.copy_(given.w)
        made(points)
    found = kernel_map(points.voxels, made.geometry)[1]
    note = f"chose {'the neighbour table' if isinstance(found, NeighborTable) else 'grouped pairs'}"
    call = lambda x, w: (
        torch.func.functional_call(made, {"weight": w}, (points.with_features(x),)).features
    )
    return autograd(call, (given.x, given.w), given.upstream, direction, note)


# --- rivals ---------------------------------------------------------------------------------------


def gathered(given: ConvInputs, direction: str) -> ReadyContender:
    lists = given.lists()

    def call(x: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros(len(x), w.shape[2], device=x.device, dtype=x.dtype)
        for z, (here, there) in enumerate(lists):
            out = (
                out.index_add(0, here, x[there] @ w[z])
                if torch.is_grad_enabled()
                else out.index_add_(0, here, x[there] @ w[z])
            )
        return out

    return autograd(call, (given.x, given.w), given.upstream, direction)


def plain(x: Tensor, table: Tensor, there: Tensor, w: Tensor) -> Tensor:
    """Gather, batched matmul, sum over the offsets."""
    rows = torch.where(there, x[table], 0.0)
    return torch.bmm(rows, w).sum(0)


def compiled(given: ConvInputs, native: bool | None = None) -> ReadyContender:
    found = given.map(False)
    call = lambda *_: insum.einsum(
        "Out[x,m] = Map[z,x,y] * In[y,c] * W[z,c,m]", Map=found, In=given.x, W=given.w
    )
    route, note = routes.compiled(plain, call, native)
    return autograd(
        route,
        (given.x, given.table.clamp(min=0).long(), (given.table >= 0)[:, :, None], given.w),
        None,
        FORWARD,
        note,
    )


def _batched(voxels: Tensor) -> tuple[Tensor, list[int]]:
    """Coordinates (batch, x, y, z) from zero on, and the size of the grid."""
    at = (voxels - voxels.amin(0)).int()
    return torch.nn.functional.pad(at, (1, 0)), [int(s) + 1 for s in at.amax(0)]


@dataclass(frozen=True, eq=False)
class Library:
    """A sparse-convolution library: its call on features and on weights in its own shape, and the
    way there and back from (27, in, out).
    """

    call: Callable[[Tensor, Tensor], Tensor]
    theirs: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def from_library(made: Library, given: ConvInputs, direction: str) -> ReadyContender:
    """The contender, with weights in the order in which the library walks through the offsets."""
    order = offset_order(made, given)
    ready = autograd(
        made.call, (given.x, made.theirs(given.w[order]).contiguous()), given.upstream, direction
    )

    def canonical(results: Results) -> Results:
        return (*results[:2], *(made.back(g)[torch.argsort(order)] for g in results[2:]))

    return ReadyContender(ready.run, canonical)


def offset_order(made: Library, given: ConvInputs) -> Tensor:
    """Libraries number the 27 offsets each in their way: axes in any order, from either end. The
    one that gives the result is taken.
    """
    exact = want(given, FORWARD)
    numbers = torch.arange(OFFSETS, device=given.x.device).reshape(3, 3, 3)
    for axes in itertools.permutations(range(3)):
        for order in (numbers.permute(axes).reshape(-1), numbers.permute(axes).reshape(-1).flip(0)):
            if (
                relative_error(
                    (no_grad(made.call, (given.x, made.theirs(given.w[order]).contiguous())),),
                    exact,
                )
                < TOLERANCE[given.x.dtype]
            ):
                return order
    raise RuntimeError("no order of the offsets gives the result")


def spconv(given: ConvInputs, direction: str) -> ReadyContender:
    pytorch = module("spconv.pytorch")
    at, shape = _batched(given.voxels)
    layer = pytorch.SubMConv3d(
        given.w.shape[1], given.w.shape[2], 3, bias=False, indice_key="map"
    ).to(given.x.device, given.x.dtype)
    size = layer.weight.shape
    with torch.no_grad():
        first = layer(pytorch.SparseConvTensor(given.x, at, shape, 1))

    def call(x: Tensor, w: Tensor) -> Tensor:
        points = pytorch.SparseConvTensor(x, at, shape, 1)
        points.indice_dict = first.indice_dict
        out: Tensor = torch.func.functional_call(layer, {"weight": w}, (points,)).features
        return out

    return from_library(
        Library(call, lambda w: w.permute(2, 0, 1).reshape(size), _channels_last), given, direction
    )


def torchsparse(given: ConvInputs, direction: str) -> ReadyContender:
    package, nn = module("torchsparse"), module("torchsparse.nn")
    at, _ = _batched(given.voxels)
    layer = nn.Conv3d(given.w.shape[1], given.w.shape[2], 3, bias=False).to(
        given.x.device, given.x.dtype
    )
    points = package.SparseTensor(given.x, at)
    with torch.no_grad():
        layer(points)  # builds the map, which the tensor's caches keep

    def call(x: Tensor, w: Tensor) -> Tensor:
        one = package.SparseTensor(x, at)
        one._caches = points._caches
        out: Tensor = torch.func.functional_call(layer, {"kernel": w}, (one,)).feats
        return out

    return from_library(Library(call, lambda w: w, lambda g: g), given, direction)


def flexgemm(given: ConvInputs, direction: str) -> ReadyContender:
    ops = module("flex_gemm.ops.spconv")
    ops.set_algorithm(ops.Algorithm.MASKED_IMPLICIT_GEMM_SPLITK)
    at, size = _batched(given.voxels)
    shape = torch.Size([1, given.w.shape[1], *size])
    bias = torch.zeros_like(given.w[0, 0])  # its backward pass asks for one
    kept: list[Any] = [None]

    def call(x: Tensor, w: Tensor) -> Tensor:
        out: Tensor
        out, kept[0] = ops.sparse_submanifold_conv3d(
            feats=x, coords=at, shape=shape, neighbor_cache=kept[0], weight=w, bias=bias
        )
        return out

    theirs = lambda w: w.permute(2, 0, 1).reshape(w.shape[2], 3, 3, 3, w.shape[1])
    return from_library(Library(call, theirs, _channels_last), given, direction)


def _channels_last(weight: Tensor) -> Tensor:
    """(out, 3, 3, 3, in) as (27, in, out)."""
    return weight.reshape(weight.shape[0], OFFSETS, weight.shape[-1]).permute(1, 2, 0)
