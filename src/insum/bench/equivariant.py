"""``insum bench equivariant``: the convolution of equivariant networks, gather, tensor product in
mode ``uvu`` and sum at the targets, over degrees, channels and edges.

Forward, with gradients, and with the gradients of gradients that training on forces takes. Edges
are sorted by target and promised to stay; features lie as everybody likes them best.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import insum
from insum.bench import data
from insum.bench.data import RandomTensors
from insum.bench.measure import Comparison, Contender, ReadyContender, Results, Work
from insum.bench.options import BenchOptions
from insum.bench.records import BOTH, FORWARD
from insum.bench.rivals import CUEQUIVARIANCE, E3NN, OPENEQUIVARIANCE, module
from insum.bench.tensor_product import irreps, reordered
from insum.errors import BenchError
from insum.nn import TensorProduct, TensorProductConv
from insum.nn.patterns import arrays_of

TITLE = "Equivariant convolution"
STATEMENT = (
    'insum.insum("Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]", ...)'
)
BASELINE = "e3nn"
#: Gradients of gradients: what training on forces adds.
DOUBLE = "double backward"
DEGREES, CHANNELS = (1, 2, 3), (64, 32, 128)
EDGES = {"50k": 50_000, "100k": 100_000, "500k": 500_000, "2M": 2_000_000}
QUICK, ON_CPU = ("1x64x100k", "2x64x100k", "3x64x50k"), ("1x32x50k", "2x32x50k")
#: Edges that end in a node.
NEIGHBOURS = 20
#: Bytes of weights beyond which a row is left out: gradients of both orders need six times as much.
MOST_BYTES = 6 * 2**30
AT_ONCE = 10_000  # edges of the reference at a time

EdgeFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class EdgeInputs:
    """Features of nodes and edges and the weights, components before channels ("ir_mul"); what
    gradients are taken along: ``upstream`` of the result, ``along`` of its gradients.
    """

    degree: int
    channels: int
    conv: TensorProductConv
    x: Tensor
    y: Tensor
    w: Tensor
    edge_index: Tensor
    upstream: Tensor
    along: tuple[Tensor, Tensor, Tensor]

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.y, self.w

    @property
    def irreps(self) -> tuple[str, str, str]:
        return irreps(self.degree, self.channels)

    @property
    def options(self) -> dict[str, Any]:
        return {"shared_weights": False, "internal_weights": False}

    @property
    def instructions(self) -> list[tuple[int, int, int, str, bool]]:
        return [(p.i_in1, p.i_in2, p.i_out, "uvu", True) for p in self.conv.instructions]

    def work(self, direction: str) -> Work:
        """Everything crosses memory once: forward; what gradients read and write beside it; and
        what gradients of those do.
        """
        ends, features = self.edge_index.nbytes, sum(t.nbytes for t in self.leaves)
        out = self.upstream.nbytes
        forward = ends + features + out
        first = ends + 2 * features + out
        second = ends + 3 * features + 2 * out
        points = 4.0 * self.channels * len(self.y) * arrays_of(self.conv, 0)["V"].numel()
        match direction:
            case "forward":
                return Work(points, forward)
            case "forward+backward":
                return Work(4 * points, forward + first)
        return Work(13 * points, forward + first + second)

    def turned(self, t: Tensor) -> Tensor:
        """From components before channels to e3nn's channels before components; and back by
        `returned`.
        """
        return reordered(t, self.degree, self.channels, back=False)

    def returned(self, t: Tensor) -> Tensor:
        return reordered(t, self.degree, self.channels, back=True)


def inputs(degree: int, channels: int, edges: int, device: torch.device) -> EdgeInputs:
    text = irreps(degree, channels)
    paths = [(*path, "uvu", True) for path in data.degrees(degree, even=True)]
    conv = TensorProductConv(*text, paths, layout="ir_mul").to(device)
    draw, nodes = RandomTensors(device), max(2, edges // NEIGHBOURS)
    source = (draw.chance(edges) * nodes).long()
    target = (draw.chance(edges) * nodes).long().sort().values
    x, y, w, upstream, *along = (
        draw.normal(*shape)
        for shape in (
            (nodes, conv.irreps_in1.dim),
            (edges, conv.irreps_in2.dim),
            (edges, conv.weight_numel),
            (nodes, conv.irreps_out.dim),
            (nodes, conv.irreps_in1.dim),
            (edges, conv.irreps_in2.dim),
            (edges, conv.weight_numel),
        )
    )
    ends = insum.unchanging(torch.stack([source, target]))
    return EdgeInputs(degree, channels, conv, x, y, w, ends, upstream, tuple(along))  # type: ignore[arg-type]


def cases(options: BenchOptions) -> Iterator[Comparison]:
    every = {f"{d}x{c}x{e}": (d, c, n) for e, n in EDGES.items() for c in CHANNELS for d in DEGREES}
    usual = (QUICK if options.quick else tuple(every)) if options.gpu else ON_CPU
    names = data.chosen(list(every), options.names, "row") if options.names else usual
    for name in names:
        degree, channels, edges = every[name]
        if 4 * edges * channels * len(data.degrees(degree, even=True)) > MOST_BYTES:
            continue
        edges = edges if options.gpu else edges // 500
        given = inputs(degree, channels, edges, options.device)
        label = f"degree {degree}, {channels} channels, {edges} edges"
        for direction in _directions(options):
            yield Comparison(
                "equivariant",
                label,
                torch.float32,
                direction,
                options.device,
                functools.partial(want, given, direction),
                contenders(given, direction),
                given.work(direction),
            )


def _directions(options: BenchOptions) -> tuple[str, ...]:
    """Where gradients are asked for, those of both orders."""
    return (*options.directions, DOUBLE) if BOTH in options.directions else options.directions


# --- reference: some edges at a time, in float64 --------------------------------------------------


def want(given: EdgeInputs, direction: str) -> Results:
    """Every result is a sum over edges, or has a row for each."""
    found: list[list[Tensor]] = []
    for start in range(0, len(given.y), AT_ONCE):
        at = slice(start, start + AT_ONCE)
        leaves = [t.double() for t in (given.x, given.y[at], given.w[at])]
        along = [t.double() for t in (given.along[0], given.along[1][at], given.along[2][at])]
        call = functools.partial(_formula, given, given.edge_index[:, at])
        found.append(list(derived(call, leaves, given.upstream.double(), along, direction)))
    of_edges = (False, *(False, True, True) * 2, False)
    parts = zip(*found, strict=True)
    return tuple(
        torch.cat(part) if rows else functools.reduce(torch.add, part)
        for part, rows in zip(parts, of_edges)
    )


def derived(
    call: EdgeFunction, leaves: Any, upstream: Tensor, along: Any, direction: str
) -> Results:
    """The result; its gradients; and the gradients of those, by the leaves and by what the first
    were taken along.
    """
    if direction == FORWARD:
        with torch.no_grad():
            return (call(*leaves),)
    held = [t.detach().requires_grad_() for t in leaves]
    onward = upstream.detach().requires_grad_(direction == DOUBLE)
    out = call(*held)
    first = torch.autograd.grad(out, held, onward, create_graph=direction == DOUBLE)
    results = (out.detach(), *(t.detach() for t in first))
    if direction != DOUBLE:
        return results
    return (*results, *torch.autograd.grad(first, [*held, onward], along))


def _formula(given: EdgeInputs, ends: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """One dense contraction with Clebsch-Gordan coefficients for all paths."""
    size, paths = (given.degree + 1) ** 2, len(given.instructions)
    exact = given.conv._exact[0]
    dense = torch.zeros(paths, size, size, size, dtype=x.dtype, device=x.device)
    dense[tuple(exact[n].long() for n in "LIJK")] = exact["V"].to(x)
    rows = torch.einsum("pijk,ek,eju->epiu", dense, y, x.view(len(x), size, -1)[ends[0]])
    sums = torch.einsum("epiu,epu->eiu", rows, w.view(len(w), paths, -1)).flatten(1)
    return torch.zeros(len(x), sums.shape[1], dtype=x.dtype, device=x.device).index_add(
        0, ends[1], sums
    )


# --- contenders -----------------------------------------------------------------------------------


def contenders(given: EdgeInputs, direction: str) -> list[Contender]:
    makers: list[tuple[Any, str, Callable[[EdgeInputs, str], ReadyContender]]] = [
        (None, "insum", ours),
        (None, "insum, product and index_add", apart),
        (OPENEQUIVARIANCE, "OpenEquivariance", openequivariance),
        (CUEQUIVARIANCE, "cuEquivariance", cuequivariance),
        (E3NN, "e3nn", e3nn),
    ]
    return [
        Contender(name, functools.partial(make, given, direction), lines=getattr(who, "lines", 1))
        for who, name, make in makers
        if who is None or not who.absent(given.x.device)
    ]


def _ready(given: EdgeInputs, direction: str, call: EdgeFunction) -> ReadyContender:
    return ReadyContender(
        lambda: derived(call, given.leaves, given.upstream, given.along, direction)
    )


def ours(given: EdgeInputs, direction: str) -> ReadyContender:
    return _ready(given, direction, lambda x, y, w: given.conv(x, y, given.edge_index, w))


def apart(given: EdgeInputs, direction: str) -> ReadyContender:
    """The same layers without the convolution: messages are written and read."""
    made = TensorProduct(*given.irreps, given.instructions, layout="ir_mul", **given.options)
    return _ready(given, direction, _gathered(given, made.to(given.x.device)))


def _gathered(given: EdgeInputs, product: Any) -> EdgeFunction:
    source, target = given.edge_index

    def call(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, target, product(x[source], y, w))

    return call


def e3nn(given: EdgeInputs, direction: str) -> ReadyContender:
    made = module("e3nn.o3").TensorProduct(*given.irreps, given.instructions, **given.options)
    product = _gathered(given, made.to(given.x.device))
    x, y, w = given.turned(given.x), given.y, given.w
    upstream, along = given.turned(given.upstream), (given.turned(given.along[0]), *given.along[1:])

    def canonical(results: Results) -> Results:
        """Of nodes are the result, its gradient, and the outermost of the second gradients."""
        nodes = (0, 1, 4, 7)
        return tuple(given.returned(t) if n in nodes else t for n, t in enumerate(results))

    return ReadyContender(
        lambda: derived(product, (x, y, w), upstream, along, direction), canonical
    )


def openequivariance(given: EdgeInputs, direction: str) -> ReadyContender:
    package = module("openequivariance")
    problem = package.TPProblem(
        *(package.Irreps(text) for text in given.irreps),
        given.instructions,
        layout="ir_mul",
        **given.options,
    )
    made = package.TensorProductConv(problem)
    source, target = (t.contiguous() for t in given.edge_index)
    into, back = made.reorder_weights_from_e3nn, made.reorder_weights_to_e3nn
    leaves = given.x, given.y, into(given.w)
    along = *given.along[:2], into(given.along[2])

    def canonical(results: Results) -> Results:
        return tuple(back(t) if n in (3, 6) else t for n, t in enumerate(results))

    call: EdgeFunction = lambda x, y, w: made(x, y, w, target, source)
    return ReadyContender(
        lambda: derived(call, leaves, given.upstream, along, direction), canonical
    )


def cuequivariance(given: EdgeInputs, direction: str, method: str = "uniform_1d") -> ReadyContender:
    cue, layers = module("cuequivariance"), module("cuequivariance_torch")
    size, exact = (given.degree + 1) ** 2, given.conv._exact[0]
    product = cue.SegmentedTensorProduct.from_subscripts("u,u,,u")
    for operand, count, shape in (
        (0, len(given.instructions), (given.channels,)),
        (1, size, (given.channels,)),
        (2, size, ()),
        (3, size, (given.channels,)),
    ):
        product.add_segments(operand, count * [shape])
    for *places, value in zip(*(exact[n].tolist() for n in "LJKIV"), strict=True):
        product.add_path(*places, c=value)
    polynomial = cue.SegmentedPolynomial.eval_last_operand(product)
    made = layers.SegmentedPolynomial(polynomial, method=method, math_dtype=torch.float32)
    made = made.to(given.x.device)
    # where it has no kernels of its own, it warns and goes on without
    if "Naive" in type(getattr(made, "m", None)).__name__:
        raise BenchError("its kernels cannot be loaded here")
    source, target = (t.contiguous() for t in given.edge_index)

    def call(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        found: Tensor = made([w, x, y], {1: source}, {0: x}, {0: target})[0]
        return found

    return _ready(given, direction, call)
