"""``insum bench unet``: a whole network, MinkUNet18, on clouds that are new at every step.

A cloud is a scene that is moved and whose axes are exchanged, several of them for a batch. With
maps, what is timed begins with coordinates and features on the device; without, the maps of a cloud
are there already. A step is forward, sum and backward. What the record has already is not measured
again, so that the same command goes on where the time was up.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from insum.bench import data, measure
from insum.bench.rivals import FLEXGEMM, SPCONV, WARPCONVNET, missing, module
from insum.bench.study import Study
from insum.bench.table import aligned
from insum.errors import BenchError
from insum.nn import SparseModule, SparseTensor
from insum.nn.models import MINKUNET18, MinkUNet

CHANNELS, CLASSES, CALLS, WARM = 4, 20, 20, 4
OURS = "insum"
#: Channels of a network that a CPU runs.
NARROW = {"widths": (4,) * 8, "stem": (3, 4), "blocks": (1,) * 8}
BATCHES = (1, 4)
#: What is told to those who have to know how many batches there are at most, and how far a scene
#: reaches: places beyond that they would not find.
MOST_BATCHES, EXTENT = 64, 4096
#: How far clouds are moved.
MOVED = 100
HEAD = ("cloud", "batch", "dtype", "what", "contender", "ms", "with maps", "peak MiB", "error")


@dataclass(frozen=True)
class UNetRow:
    """One contender: milliseconds on maps that are there, and with the maps of new clouds."""

    cloud: str
    voxels: int
    batch: int
    dtype: str
    direction: str
    contender: str
    steady_ms: float = float("nan")
    fresh_ms: float = float("nan")
    peak_mib: float | None = None
    error: float | None = None
    failed: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        return self.cloud, self.batch, self.dtype, self.direction, self.contender


@dataclass(frozen=True, eq=False)
class UNetContender:
    """A network of a library, and how it takes coordinates (batch, x, y, z) and features."""

    name: str
    network: nn.Module
    given: Callable[[Tensor, Tensor, int], Any]

    def forward(self, x: Any) -> Tensor:
        out: Tensor = self.network(x).features
        return out


@dataclass(frozen=True)
class UNetCase:
    """Clouds of one scene in batches, in one precision."""

    name: str
    base: Tensor
    batch: int
    dtype: torch.dtype

    def draw(self, drawn: random.Random) -> tuple[Tensor, Tensor]:
        parts = []
        for number in range(self.batch):
            first = drawn.randrange(1 + len(self.base) // 20)
            part = self.base[first : len(self.base) - len(self.base) // 20 + first]
            part = part[:, drawn.sample(range(3), 3)] + drawn.randrange(MOVED)
            parts.append(nn.functional.pad(part, (1, 0), value=number).int())
        coords = torch.cat(parts)
        return coords, torch.randn(len(coords), CHANNELS, device=coords.device)

    @property
    def voxels(self) -> int:
        """Of a batch."""
        return self.batch * (len(self.base) - len(self.base) // 20)

    @property
    def kind(self) -> str:
        """What products are computed in: FlexGEMM and spconv take TF32 for those of float32."""
        wide = self.dtype is torch.float32 and self.base.is_cuda
        return "tf32" if wide else measure.name_of(self.dtype)

    def precision(self) -> torch.autocast:
        device = self.base.device.type
        narrow = torch.float16 if device == "cuda" else torch.bfloat16
        return torch.autocast(device, narrow, enabled=self.dtype is not torch.float32)


@contextlib.contextmanager
def products_in(kind: str) -> Iterator[None]:
    """Products of float32, those of backward passes too, are computed in TF32, or as they were."""
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else was)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was)


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--batches", default="", help="clouds in a batch (default: 1,4)")
    parser.add_argument("--calls", type=int, default=CALLS, help="timed steps")


# --- contenders -----------------------------------------------------------------------------------


def contenders(device: torch.device, skip: Callable[[str], bool]) -> Iterator[UNetContender]:
    sizes: dict[str, Any] = {"blocks": MINKUNET18} if device.type == "cuda" else NARROW
    torch.manual_seed(0)
    yield UNetContender(OURS, MinkUNet(CHANNELS, CLASSES, **sizes).to(device), _ours)
    makers = (
        (FLEXGEMM, FlexGemmUNet, _ours),
        (SPCONV, SpconvUNet, _spconvs),
        (WARPCONVNET, WarpConvUNet, _warps),
    )
    for rival, kind, given in makers:
        if not rival.absent(device) and not skip(rival.name):
            yield UNetContender(rival.name, kind(CHANNELS, CLASSES, **sizes).to(device), given)


def _ours(coords: Tensor, features: Tensor, batch: int) -> SparseTensor:
    return SparseTensor(coords, features)


def _spconvs(coords: Tensor, features: Tensor, batch: int) -> Any:
    # the extent of a scene is known to whoever made it: it is not looked for in the clouds
    made = module("spconv.pytorch").SparseConvTensor
    return made(features, coords, [EXTENT] * 3, batch)


def _warps(coords: Tensor, features: Tensor, batch: int) -> Any:
    # all clouds of a batch have as many voxels
    offsets = torch.arange(batch + 1) * (len(coords) // batch)
    made = module("warpconvnet.geometry.types.voxels").Voxels
    return made(coords[:, 1:].contiguous(), features, offsets=offsets)


class SpconvUNet(MinkUNet):
    """The same network of spconv's layers; keys say which maps are shared."""

    def same(
        self, inputs: int, outputs: int, kernel: int, level: int, bias: bool = False
    ) -> nn.Module:
        key = f"same {kernel} {level}"
        made: nn.Module = module("spconv.pytorch").SubMConv3d(
            inputs, outputs, kernel, bias=bias, indice_key=key
        )
        return made

    def down(self, inputs: int, outputs: int, level: int) -> nn.Module:
        made: nn.Module = module("spconv.pytorch").SparseConv3d(
            inputs, outputs, 2, stride=2, bias=False, indice_key=f"down {level}"
        )
        return made

    def up(self, inputs: int, outputs: int, level: int) -> nn.Module:
        inverse = module("spconv.pytorch").SparseInverseConv3d
        return _WithoutLike(inverse(inputs, outputs, 2, indice_key=f"down {level}", bias=False))

    @staticmethod
    def replaced(x: Any, features: Tensor) -> Any:
        return x.replace_feature(features)


class WarpConvUNet(MinkUNet):
    """The same network of WarpConvNet's layers, which keep their maps with the voxels."""

    def same(
        self, inputs: int, outputs: int, kernel: int, level: int, bias: bool = False
    ) -> nn.Module:
        return self.conv(inputs, outputs, kernel, bias=bias)

    def down(self, inputs: int, outputs: int, level: int) -> nn.Module:
        return self.conv(inputs, outputs, 2, stride=2, bias=False)

    def up(self, inputs: int, outputs: int, level: int) -> nn.Module:
        return self.conv(inputs, outputs, 2, stride=2, bias=False, transposed=True)

    @staticmethod
    def conv(inputs: int, outputs: int, kernel: int, **options: object) -> nn.Module:
        made = module("warpconvnet.nn.modules.sparse_conv").SparseConv3d
        layer: nn.Module = made(inputs, outputs, kernel, **options)
        return layer

    @staticmethod
    def replaced(x: Any, features: Tensor) -> Any:
        return x.replace(batched_features=features)


class _WithoutLike(nn.Module):
    """A layer that knows by its key where its outputs are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, like: Any) -> Any:
        return self.layer(x)


class FlexGemmUNet(MinkUNet):
    """Convolutions over the same voxels by FlexGEMM, of as many offsets as its fastest algorithm
    takes; strided ones, whose inverse it has not, by insum.
    """

    def same(
        self, inputs: int, outputs: int, kernel: int, level: int, bias: bool = False
    ) -> nn.Module:
        if kernel == 1 or kernel**3 > FlexGemmConv.MOST_OFFSETS:
            return super().same(inputs, outputs, kernel, level, bias)
        return FlexGemmConv(inputs, outputs, kernel)


class FlexGemmConv(SparseModule):
    """A submanifold convolution whose maps are kept with the voxels.

    Not its variant that splits long sums: that one is tuned for every number of parts, which takes
    minutes for each network, cloud and precision, and helps where there are few voxels and the host
    is waited for.
    """

    MOST_OFFSETS = 32

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        bound = (inputs * kernel**3) ** -0.5
        weight = torch.empty(outputs, kernel, kernel, kernel, inputs).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        self.register_buffer("bias", torch.zeros(outputs))  # its backward pass asks for one

    def forward(self, x: SparseTensor) -> SparseTensor:
        ops = module("flex_gemm.ops.spconv")
        ops.set_algorithm(ops.Algorithm.MASKED_IMPLICIT_GEMM)
        narrow = torch.is_autocast_enabled(x.device.type)
        kind = torch.get_autocast_dtype(x.device.type) if narrow else x.dtype
        maps = x.voxels.maps
        coords = maps.get("flexgemm coords")
        if coords is None:
            coords = maps["flexgemm coords"] = x.coords.int()
        out, maps["flexgemm"] = ops.sparse_submanifold_conv3d(
            feats=x.features.to(kind),
            coords=coords,
            shape=torch.Size([MOST_BATCHES, self.weight.shape[-1], EXTENT, EXTENT, EXTENT]),
            neighbor_cache=maps.get("flexgemm"),
            weight=self.weight.to(kind),
            bias=self.get_buffer("bias").to(kind),
        )
        return x.with_features(out)


# --- timing ---------------------------------------------------------------------------------------


class UNetSteps:
    """Steps of one contender on clouds of a case."""

    def __init__(self, case: UNetCase, one: UNetContender, direction: str) -> None:
        self.case, self.one, self.backward = case, one, direction != "forward"
        self.device, self.drawn = case.base.device, random.Random(0)
        for _ in range(WARM if self.device.type == "cuda" else 1):
            self.fresh(*case.draw(self.drawn))
        self.same = one.given(*case.draw(self.drawn), case.batch)
        self.step(self.same)

    def step(self, x: Any) -> Tensor:
        with self.case.precision(), torch.set_grad_enabled(self.backward):
            out = self.one.forward(x)
        if self.backward:
            self.one.network.zero_grad()
            out.float().sum().backward()  # type: ignore[no-untyped-call]
        return out

    def fresh(self, coords: Tensor, features: Tensor) -> Tensor:
        return self.step(self.one.given(coords, features, self.case.batch))

    def with_maps(self) -> float:
        """Milliseconds on a cloud that was never seen."""
        run = functools.partial(self.fresh, *self.case.draw(self.drawn))
        return 1e3 * measure.once(run, self.device)

    def steady(self) -> float:
        """Milliseconds on maps that are there."""
        return 1e3 * measure.once(functools.partial(self.step, self.same), self.device)

    def peak_mib(self) -> float | None:
        coords, features = self.case.draw(self.drawn)
        return measure.peak_mib(lambda: (self.fresh(coords, features),), self.device)


def measured(
    case: UNetCase, every: Sequence[UNetContender], direction: str, calls: int
) -> list[UNetRow]:
    """All contenders, in turns: hosts are now quick, now slow. A rival that fails is told of, and
    hides no other.
    """
    blank = UNetRow(case.name, case.voxels, case.batch, case.kind, direction, "nobody")
    ready, failed = dict[str, UNetSteps](), dict[str, str]()
    for one in every:
        try:
            ready[one.name] = UNetSteps(case, one, direction)
        except Exception as wrong:
            if one.name == OURS:
                raise
            failed[one.name] = f"{type(wrong).__name__}: {wrong}".splitlines()[0][:200]
    fresh, steady = (
        measure.in_turns({n: getattr(one, how) for n, one in ready.items()}, calls, lambda r: r())
        for how in ("with_maps", "steady")
    )
    rows = [
        replace(
            blank,
            contender=name,
            steady_ms=statistics.median(steady[name]),
            fresh_ms=statistics.median(fresh[name]),
            peak_mib=one.peak_mib(),
            error=error_of(case, one.one) if name == OURS and not one.backward else None,
        )
        for name, one in ready.items()
    ]
    return rows + [replace(blank, contender=name, failed=why) for name, why in failed.items()]


def error_of(case: UNetCase, one: UNetContender) -> float:
    """Of the whole network in evaluation, on a part of a cloud, beside itself in double precision
    on the host.
    """
    coords, features = case.draw(random.Random(3))
    coords, features = coords[:500], features[:500]
    was = one.network.training
    exact = copy.deepcopy(one.network).double().cpu().eval()
    one.network.eval()
    with torch.no_grad(), case.precision():
        got = one.forward(one.given(coords, features, case.batch))
    one.network.train(was)
    with torch.no_grad():
        want = exact(SparseTensor(coords.cpu(), features.double().cpu())).features
    return measure.relative_error((got.cpu(),), (want,))


def cases(study: Study) -> Iterator[UNetCase]:
    options = study.options
    names = data.chosen(data.cloud_names(options.data), options.names, "cloud")
    names = names if options.names else names[: 4 if options.gpu and not options.quick else 1]
    batches = [int(b) for b in study.asked.batches.split(",") if b] or BATCHES
    for name in names:
        base = data.cloud(name, options.data, options.device, None if options.gpu else 60)
        base = base - base.amin(0)
        if int(base.max()) + MOVED >= EXTENT:
            raise BenchError(f"{name} is wider than {EXTENT - MOVED} voxels", expected="less")
        for batch in batches if options.gpu else batches[:1]:
            for dtype in options.dtypes_or(torch.float32, torch.float16):
                yield UNetCase(name, base, batch, dtype)


def run(study: Study) -> int:
    """Measure what the record lacks until the time is up, show and write; 1 if a result is
    wrong.
    """
    rows = {row.key: row for row in _read(study.file) if not row.failed}
    calls = study.asked.calls if study.options.gpu else 1
    every = list(contenders(study.device, lambda name: any(s in name for s in study.options.skip)))
    absent = missing("unet", study.device)
    for one in absent:
        print(f"{one.name} is not measured: {one.reason}")
    for case, direction in itertools.product(cases(study), ("forward", "forward+backward")):
        if all((*_key(case, direction), one.name) in rows for one in every):
            continue
        if not study.has_time():
            print("the time is up; the same command goes on from here")
            break
        with products_in(case.kind):
            found = measured(case, every, direction, calls)
        for row in found:
            rows[row.key] = row
            print("  ".join(_cells(row)), flush=True)
        kept = [asdict(row) for row in rows.values()]
        study.keep(calls=calls, rows=kept, missing=[asdict(one) for one in absent])
    print("\n".join(aligned([HEAD, *map(_cells, rows.values())])))
    print(f"written: {study.file}")
    return int(any(row.error is not None and not row.error < 3e-2 for row in rows.values()))


def _key(case: UNetCase, direction: str) -> tuple[object, ...]:
    return case.name, case.batch, case.kind, direction


def _read(file: Path) -> list[UNetRow]:
    if not file.exists():
        return []
    found = json.loads(file.read_text(encoding="utf-8")).get("rows", [])
    return [UNetRow(**row) for row in found]


def _cells(row: UNetRow) -> tuple[str, ...]:
    return (
        row.cloud,
        str(row.batch),
        row.dtype,
        row.direction,
        row.contender,
        row.failed or f"{row.steady_ms:.2f}",
        "" if row.failed else f"{row.fresh_ms:.2f}",
        "" if row.peak_mib is None else f"{row.peak_mib:.0f}",
        "" if row.error is None else f"{row.error:.0e}",
    )
