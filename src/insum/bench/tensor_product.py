"""The equivariant tensor product, the paper's table of nine rows: degrees up to 1, 2, 3 and 16, 32,
64 channels, a weight for each item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from insum.bench import data, routes
from insum.bench.data import RandomTensors
from insum.bench.measure import (
    Comparison,
    Contender,
    ReadyContender,
    Results,
    Work,
    autograd,
    cases_of,
)
from insum.bench.options import BenchOptions
from insum.bench.records import FORWARD
from insum.bench.rivals import CUEQUIVARIANCE, E3NN, OPENEQUIVARIANCE, module
from insum.formats import GroupCOO
from insum.nn import FullyConnectedTensorProduct
from insum.nn.paths import groups_of

TITLE = "Equivariant tensor product"
STATEMENT = (
    'insum.insum("Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]", ...)'
)
BASELINE = "e3nn"
ROWS = tuple((degree, channels) for degree in (1, 2, 3) for channels in (16, 32, 64))
QUICK = ((1, 32), (2, 16), (3, 16))
ON_CPU = ((1, 16), (2, 16))
AT_ONCE = 1000  # items of the reference at a time


@dataclass(frozen=True, eq=False)
class ProductInputs:
    """Both factors and the weights, components before channels ("ir_mul"), and a gradient of the
    product; ``product`` holds the pattern.
    """

    degree: int
    channels: int
    product: FullyConnectedTensorProduct
    x: Tensor
    y: Tensor
    w: Tensor
    upstream: Tensor

    @property
    def irreps(self) -> tuple[str, str, str]:
        return irreps(self.degree, self.channels)

    @property
    def pattern(self) -> GroupCOO:
        """The coefficients of all paths, which are one group, in double precision."""
        made = self.product
        (group,) = groups_of(made.instructions, made.irreps_in1, made.irreps_in2, made.irreps_out)
        return group.coefficients(made.irreps_in1, made.irreps_in2, made.irreps_out)

    def work(self, direction: str) -> Work:
        item = self.x.element_size()
        read = (self.x.numel() + self.y.numel() + self.w.numel() + self.upstream.numel()) * item
        rows = sum(
            2 * self.product.irreps_in1[path.i_in1][1].l + 1 for path in self.product.instructions
        )
        flops = 2.0 * len(self.x) * rows * self.channels**2
        return Work(flops, read) if direction == FORWARD else Work(3 * flops, 3 * read)

    def turned(self, t: Tensor) -> Tensor:
        """From components before channels to e3nn's channels before components; and back by
        `returned`.
        """
        return reordered(t, self.degree, self.channels, back=False)

    def returned(self, t: Tensor) -> Tensor:
        return reordered(t, self.degree, self.channels, back=True)


def irreps(degree: int, channels: int) -> tuple[str, str, str]:
    """
    >>> irreps(2, 16)
    ('16x0e + 16x1o + 16x2e', '1x0e + 1x1o + 1x2e', '16x0e + 16x1o + 16x2e')
    """
    wide, one = (
        " + ".join(f"{c}x{l}{'eo'[l % 2]}" for l in range(degree + 1)) for c in (channels, 1)
    )
    return wide, one, wide


def reordered(t: Tensor, degree: int, channels: int, *, back: bool) -> Tensor:
    parts, start = [], 0
    for l in range(degree + 1):
        size = (2 * l + 1) * channels
        shape = (channels, 2 * l + 1) if back else (2 * l + 1, channels)
        parts.append(
            t[:, start : start + size].reshape(-1, *shape).transpose(1, 2).reshape(-1, size)
        )
        start += size
    return torch.cat(parts, 1).contiguous()


def inputs(
    degree: int, channels: int, batch: int, dtype: torch.dtype, device: torch.device
) -> ProductInputs:
    made = FullyConnectedTensorProduct(
        *irreps(degree, channels), shared_weights=False, internal_weights=False, layout="ir_mul"
    ).to(device, dtype)
    draw, wide = RandomTensors(device, dtype), made.irreps_in1.dim
    x, y, w, upstream = (
        draw.normal(batch, size) for size in (wide, made.irreps_in2.dim, made.weight_numel, wide)
    )
    return ProductInputs(degree, channels, made, x, y, w, upstream)


def cases(options: BenchOptions) -> Iterator[Comparison]:
    every = {f"{degree}x{channels}": (degree, channels) for degree, channels in ROWS}
    rows = (QUICK if options.quick else ROWS) if options.gpu else ON_CPU
    if options.names:
        rows = tuple(every[name] for name in data.chosen(list(every), options.names, "row"))
    for dtype in options.dtypes_or(torch.float32):
        for degree, channels in rows:
            given = inputs(degree, channels, 10_000 if options.gpu else 100, dtype, options.device)
            yield from cases_of(
                "tensor-product",
                f"degree {degree}, {channels} channels",
                dtype,
                options,
                given,
                want,
                contenders,
            )


# --- reference: path by path in float64 -----------------------------------------------------------


def want(given: ProductInputs, direction: str) -> Results:
    parts: list[Results] = []
    for start in range(0, len(given.x), AT_ONCE):
        chunk = slice(start, start + AT_ONCE)
        x, y, w, g = (t[chunk].double() for t in (given.x, given.y, given.w, given.upstream))
        if direction == FORWARD:
            parts.append((formula(given, x, y, w),))
            continue
        leaves = [t.requires_grad_() for t in (x, y, w)]
        out = formula(given, *leaves)
        parts.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
    return tuple(torch.cat(group) for group in zip(*parts, strict=True))


def formula(given: ProductInputs, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """One dense contraction with Clebsch-Gordan coefficients for each path, from the module's exact
    pattern.
    """
    channels = given.channels
    coefficients = given.pattern.to_dense().to(x)
    x, w = x.reshape(len(x), -1, channels), w.reshape(len(w), -1, channels, channels)
    out = x.new_zeros(len(x), coefficients.shape[0], channels)
    for path in range(w.shape[1]):
        out = out + torch.einsum("ijk,bju,bk,buw->biw", coefficients[..., path], x, y, w[:, path])
    return out.reshape(len(x), -1)


# --- contenders -----------------------------------------------------------------------------------


def contenders(given: ProductInputs, direction: str) -> list[Contender]:
    found = [
        Contender("insum", lambda: ours(given, direction), lines=1),
        Contender(
            "insum, e3nn's layout",
            lambda: ours_as_e3nn(given, direction),
            lines=1,
            slow=True,
            note="channels before components: reordered in each call",
        ),
    ]
    makers: list[tuple[Any, str, Callable[[ProductInputs, str], ReadyContender], bool]] = [
        (E3NN, "e3nn", e3nn, False),
        (E3NN, "e3nn, compiled", e3nn_compiled, True),
        (CUEQUIVARIANCE, "cuEquivariance", cuequivariance, False),
        (OPENEQUIVARIANCE, "OpenEquivariance", openequivariance, False),
    ]
    for rival, name, make, slow in makers:
        if not rival.absent(given.x.device):
            found.append(
                Contender(name, _late(make, given, direction), lines=rival.lines, slow=slow)
            )
    if direction == FORWARD:
        found.append(Contender("torch.compile", lambda: compiled(given), slow=True))
    return found


def _late(
    make: Callable[[ProductInputs, str], ReadyContender], given: ProductInputs, direction: str
) -> Callable[[], ReadyContender]:
    return lambda: make(given, direction)


def ours(given: ProductInputs, direction: str) -> ReadyContender:
    return autograd(given.product, (given.x, given.y, given.w), given.upstream, direction)


def ours_as_e3nn(given: ProductInputs, direction: str) -> ReadyContender:
    made = FullyConnectedTensorProduct(
        *given.irreps, shared_weights=False, internal_weights=False
    ).to(given.x.device, given.x.dtype)
    return _in_e3nns_layout(given, direction, made)


def _in_e3nns_layout(
    given: ProductInputs, direction: str, call: Callable[..., Tensor]
) -> ReadyContender:
    ready = autograd(
        call, (given.turned(given.x), given.y, given.w), given.turned(given.upstream), direction
    )

    def canonical(results: Results) -> Results:
        out, *gradients = results
        return (
            (given.returned(out), given.returned(gradients[0]), *gradients[1:])
            if gradients
            else (given.returned(out),)
        )

    return ReadyContender(ready.run, canonical)


def e3nn_module(given: ProductInputs) -> Any:
    o3 = module("e3nn.o3")
    made = o3.FullyConnectedTensorProduct(
        *given.irreps, shared_weights=False, internal_weights=False
    )
    return made.to(given.x.device, given.x.dtype)


def e3nn(given: ProductInputs, direction: str) -> ReadyContender:
    return _in_e3nns_layout(given, direction, e3nn_module(given))


def e3nn_compiled(given: ProductInputs, direction: str) -> ReadyContender:
    package = module("e3nn")
    before = package.get_optimization_defaults()
    package.set_optimization_defaults(jit_script_fx=False)  # compiled once, by torch.compile
    try:
        made = e3nn_module(given)
    finally:
        package.set_optimization_defaults(**before)
    torch.compiler.reset()
    return _in_e3nns_layout(given, direction, torch.compile(made, dynamic=False))


def cuequivariance(given: ProductInputs, direction: str) -> ReadyContender:
    cue, layers = module("cuequivariance"), module("cuequivariance_torch")
    groups = [cue.Irreps("O3", text) for text in given.irreps]
    options = {"layout": cue.ir_mul, "shared_weights": False, "internal_weights": False}
    made = layers.FullyConnectedTensorProduct(
        *groups, **options, device=given.x.device, dtype=given.x.dtype
    )
    return autograd(
        lambda x, y, w: made(x, y, w), (given.x, given.y, given.w), given.upstream, direction
    )


def openequivariance(given: ProductInputs, direction: str) -> ReadyContender:
    package = module("openequivariance")
    kind = package.Irreps if hasattr(package, "Irreps") else module("e3nn.o3").Irreps
    paths = [(p.i_in1, p.i_in2, p.i_out, "uvw", True) for p in given.product.instructions]
    problem = package.TPProblem(
        *(kind(text) for text in given.irreps), paths, shared_weights=False, internal_weights=False
    )
    made = package.TensorProduct(problem)
    return _in_e3nns_layout(given, direction, lambda x, y, w: made(x, y, w))


def plain(
    x: Tensor, y: Tensor, w: Tensor, v: Tensor, i: Tensor, j: Tensor, k: Tensor, l: Tensor
) -> Tensor:
    """Gather, batched matmul, scatter over the entries of the pattern."""
    products = torch.einsum("bpu,bpuw->bpw", x[:, j], w[:, l])
    out = torch.zeros(len(x), int(x.shape[1]), w.shape[3], device=x.device, dtype=x.dtype)
    return out.index_add(1, i, products * (v * y[:, k])[:, :, None])


def compiled(given: ProductInputs, native: bool | None = None) -> ReadyContender:
    entries = given.pattern.entries()
    i, j, k, l = (c.long().to(given.x.device) for c in entries.coords)
    v = entries.values.to(given.x)  # type: ignore[union-attr]
    channels = given.channels
    x, w = (
        given.x.reshape(len(given.x), -1, channels),
        given.w.reshape(len(given.w), -1, channels, channels),
    )
    route, note = routes.compiled(
        plain, lambda *_: given.product(given.x, given.y, given.w).reshape(x.shape), native
    )
    ready = autograd(route, (x, given.y, w, v, i, j, k, l), None, FORWARD, note)
    return ReadyContender(ready.run, lambda r: (r[0].reshape(given.x.shape),), note)
