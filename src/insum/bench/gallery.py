"""``insum bench gallery``: statements of all kinds, each with its line, what people use for it
today, and the time that reading and writing everything once takes.

Indices are those of calls that come back: what is derived from them is there. Formulas are
PyTorch's own operations; in double precision they say what is right, in the statement's dtype they
are a rival.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import insum
from insum.bench.data import RandomTensors, coefficients, degrees, promised
from insum.bench.measure import Comparison, Contender, ReadyContender, Results, Work, autograd
from insum.bench.options import BenchOptions
from insum.bench.records import FORWARD

TITLE = "Gallery"
STATEMENT = "insum.insum(STATEMENT, ...)"
BASELINE = "torch"
HALF = torch.bfloat16

Formula = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Exhibit:
    """A statement and its data.

    Attributes:
        formula: What is right, of the same names as the tensors of the statement.
        flops: Of a forward pass.
        rivals: By name, others who can do it; they may raise where they cannot run.
        leaves: What gradients are taken of; none where the formula has none of interest.
        options: Of the statement.
        plain: Whether the formula itself, in the statement's dtype, is a rival.
    """

    name: str
    statement: str
    tensors: Mapping[str, Tensor]
    formula: Formula
    flops: float = 0.0
    rivals: Mapping[str, Formula] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return next(t.dtype for t in self.tensors.values() if t.is_floating_point())

    def ours(self, *values: Tensor) -> Tensor:
        given: dict[str, Any] = {**self.tensors, **dict(zip(self.leaves, values)), **self.options}
        found: Tensor = insum.insum(self.statement, **given)
        return found

    def of(self, formula: Formula) -> Formula:
        """A formula as a function of the leaves."""

        def call(*values: Tensor) -> Tensor:
            return formula(**{**self.tensors, **dict(zip(self.leaves, values))})

        return call

    def want(self, direction: str) -> Results:
        wide = {n: t.double() if t.is_floating_point() else t for n, t in self.tensors.items()}
        if direction == FORWARD:
            return (self.formula(**wide),)
        held = {n: wide[n].requires_grad_() for n in self.leaves}
        out = self.formula(**{**wide, **held})
        upstream = self.upstream(out)
        return (out.detach(), *torch.autograd.grad(out, list(held.values()), upstream))

    def upstream(self, like: Tensor) -> Tensor:
        drawn = RandomTensors(like.device, torch.float32, seed=1).normal(*like.shape)
        return drawn.to(self.dtype).to(like.dtype)

    def ready(self, call: Formula, direction: str) -> ReadyContender:
        leaves = [self.tensors[n] for n in self.leaves]
        if direction == FORWARD:
            return autograd(call, leaves, None, direction)
        with torch.no_grad():
            like = call(*leaves)
        return autograd(call, leaves, self.upstream(like), direction)

    def work(self, out: int, direction: str) -> Work:
        """Tensors cross memory once forward; backward they and the gradient of the result are read,
        and gradients are written.
        """
        read = sum(t.nbytes for t in self.tensors.values())
        written = out * self.dtype.itemsize
        if direction == FORWARD:
            return Work(self.flops, read + written)
        gradients = sum(self.tensors[n].nbytes for n in self.leaves)
        return Work((1 + len(self.leaves)) * self.flops, 2 * read + 2 * written + gradients)


def cases(options: BenchOptions) -> Iterator[Comparison]:
    for make in EXHIBITS:
        for exhibit in make(options):
            if options.names and not any(n in exhibit.name for n in options.names):
                continue
            yield from compared(exhibit, options, "gallery")


def compared(exhibit: Exhibit, options: BenchOptions, benchmark: str) -> Iterator[Comparison]:
    """A case for each direction that has gradients of interest."""
    for tensor in exhibit.tensors.values():
        if not tensor.is_floating_point():
            insum.unchanging(tensor)
    with torch.no_grad():
        out = exhibit.ours(*(exhibit.tensors[n] for n in exhibit.leaves)).numel()
    for direction in options.directions:
        if direction != FORWARD and not exhibit.leaves:
            continue
        yield Comparison(
            benchmark,
            exhibit.name,
            exhibit.dtype,
            direction,
            options.device,
            functools.partial(exhibit.want, direction),
            list(_contenders(exhibit, direction)),
            exhibit.work(out, direction),
        )


def _contenders(exhibit: Exhibit, direction: str) -> Iterator[Contender]:
    yield Contender("insum", functools.partial(exhibit.ready, exhibit.ours, direction), lines=1)
    rivals = {"torch": exhibit.formula} if exhibit.plain else {}
    for name, formula in {**rivals, **exhibit.rivals}.items():
        make = functools.partial(exhibit.ready, exhibit.of(formula), direction)
        yield Contender(name, make, slow=name == "torch.compile")


def sizes_here(options: BenchOptions, *sizes: int) -> tuple[int, ...]:
    """As they are on a GPU, far smaller elsewhere and with --quick: all can be seen to work."""
    full = options.gpu and not options.quick
    return sizes if full else tuple(max(8, n // 64) for n in sizes)


# --- matrices that entries choose -----------------------------------------------------------------


def _by_value(X: Tensor, W: Tensor, e: Tensor) -> Tensor:
    """Rows times the matrix of their value, one product for each."""
    parts = torch.zeros(len(X), W.shape[2], dtype=X.dtype, device=X.device)
    for number in range(W.shape[0]):
        at = (e == number).nonzero().flatten()
        parts = parts.index_copy(0, at, X[at] @ W[number])
    return parts


def _grouped_mm(X: Tensor, tok: Tensor, W: Tensor, e: Tensor) -> Tensor:
    ends = torch.searchsorted(
        e, torch.arange(W.shape[0], device=e.device, dtype=e.dtype), right=True
    )
    found: Tensor = torch._grouped_mm(X[tok], W, offs=ends.int())
    return found


def experts(options: BenchOptions) -> Iterator[Exhibit]:
    for tokens, number, k, n in (
        (8192, 8, 2048, 4096),
        (4096, 64, 2048, 1408),
        (256, 64, 2048, 1408),
        (3000, 16, 1000, 1200),
    ):
        tokens, k, n = sizes_here(options, tokens, k, n)
        draw = RandomTensors(options.device, HALF)
        e = (draw.chance(tokens) * number).long().sort().values.int()
        tensors = {
            "X": draw.normal(tokens, k),
            "tok": torch.randperm(tokens, device=options.device).int(),
            "W": draw.normal(number, k, n, scale=k**-0.5),
            "e": e,
        }
        yield Exhibit(
            f"experts {tokens} of {number}, {k} x {n}",
            "Y[p,n] = X[tok[p],k] * W[e[p],k,n]",
            tensors,
            lambda X, tok, W, e: _by_value(X[tok], W, e),
            2.0 * tokens * k * n,
            {"torch._grouped_mm": _grouped_mm},
            ("X", "W"),
            plain=False,
        )


def relations(options: BenchOptions) -> Iterator[Exhibit]:
    edges, nodes = sizes_here(options, 400_000, 20_000)
    draw = RandomTensors(options.device, HALF)
    s, d = ((draw.chance(edges) * nodes).int() for _ in range(2))
    relation = (draw.chance(edges) * 12).int()
    tensors = {"X": draw.normal(nodes, 64), "W": draw.normal(12, 64, 64), "s": s, "d": d}

    def formula(X: Tensor, W: Tensor, s: Tensor, d: Tensor, r: Tensor) -> Tensor:
        out = torch.zeros(nodes, 64, dtype=X.dtype, device=X.device)
        return out.index_add(0, d, _by_value(X[s], W, r))

    yield Exhibit(
        "relations, 12 of 64 x 64",
        "Y[d[p],n] = X[s[p],k] * W[r[p],k,n]",
        {**tensors, "r": relation},
        formula,
        2.0 * edges * 64 * 64,
        leaves=("X", "W"),
        options={"out_shape": (nodes, 64)},
    )


def adapters(options: BenchOptions) -> Iterator[Exhibit]:
    batch, length, k = sizes_here(options, 64, 128, 4096)
    draw = RandomTensors(options.device, HALF)
    tensors = {
        "X": draw.normal(batch, length, k),
        "A": draw.normal(32, k, 16, scale=k**-0.5),
        "a": (draw.chance(batch) * 32).int(),
    }
    yield Exhibit(
        "adapters of rank 16",
        "Y[b,s,r] = X[b,s,k] * A[a[b],k,r]",
        tensors,
        lambda X, A, a: X @ A[a],
        2.0 * batch * length * k * 16,
        leaves=("X", "A"),
    )


# --- equivariant networks -------------------------------------------------------------------------


def convolutions(options: BenchOptions) -> Iterator[Exhibit]:
    for degree, edges in ((1, 100_000), (2, 100_000), (3, 50_000)):
        edges, nodes = sizes_here(options, edges, edges // 20)
        products = degrees(degree, even=True)
        fixed, paths = promised(coefficients(products), options.device), len(products)
        draw, size = RandomTensors(options.device), (degree + 1) ** 2
        dst = (draw.chance(edges) * nodes).int().sort().values
        tensors = {
            "X": draw.normal(nodes, size, 64),
            "Y": draw.normal(edges, size),
            "W": draw.normal(edges, paths, 64),
            "src": (draw.chance(edges) * nodes).int(),
            "dst": dst,
        }
        formula = functools.partial(_convolution, size, paths)
        yield Exhibit(
            f"tensor-product convolution, degree {degree}",
            "Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]",
            {**tensors, **fixed},
            formula,
            leaves=("X", "Y", "W"),
            options={"out_shape": (nodes, size, 64)},
        )


def _convolution(size: int, paths: int, *, X: Tensor, Y: Tensor, W: Tensor, **t: Tensor) -> Tensor:
    dense = torch.zeros(paths, size, size, size, dtype=X.dtype, device=X.device)
    dense[tuple(t[n].long() for n in "LIJK")] = t["V"].to(X.dtype)
    parts = []
    for start in range(0, len(Y), 10_000):  # or it would not fit into memory
        at = slice(start, start + 10_000)
        gathered = torch.einsum("pijk,ek->epij", dense, Y[at])
        rows = torch.einsum("epij,eju->epiu", gathered, X[t["src"][at]])
        parts.append(torch.einsum("epiu,epu->eiu", rows, W[at]))
    return torch.zeros_like(X).index_add(0, t["dst"], torch.cat(parts))


# --- dense, and nearly ----------------------------------------------------------------------------


def dense(options: BenchOptions) -> Iterator[Exhibit]:
    draw = RandomTensors(options.device, torch.float16)
    (n,) = sizes_here(options, 4096)
    square = {"A": draw.normal(n, n), "B": draw.normal(n, n, scale=n**-0.5)}
    yield Exhibit(
        f"matrix product of {n}",
        "C[i,j] = A[i,k] * B[k,j]",
        square,
        lambda A, B: A @ B,
        2.0 * n**3,
        leaves=("A", "B"),
    )
    (n,) = sizes_here(options, 1024)
    three = {name: draw.normal(n, n, scale=n**-0.5) for name in "ABC"}
    yield Exhibit(
        f"chain of three, {n} each",
        "Y[i,l] = A[i,j] * B[j,k] * C[k,l]",
        three,
        lambda A, B, C: (A @ B) @ C,
        4.0 * n**3,
        leaves=("A", "B", "C"),
    )
    batch, channels, length = sizes_here(options, 32, 256, 2048)
    signal = {
        "x": draw.normal(batch, channels, length + 2),
        "w": draw.normal(channels, channels, 3, scale=(3 * channels) ** -0.5),
    }
    yield Exhibit(
        "1-D convolution",
        "y[b,o,t] = x[b,c,t+r] * w[o,c,r]",
        signal,
        lambda x, w: torch.nn.functional.conv1d(x, w),
        6.0 * batch * channels * channels * length,
        options={"out_shape": (batch, channels, length)},
    )


def reductions(options: BenchOptions) -> Iterator[Exhibit]:
    (n,) = sizes_here(options, 16_384)
    a = {"a": RandomTensors(options.device).normal(n, n)}
    for name, statement, formula in (
        ("maximum along the first axis", "y[j] max= a[i,j]", lambda a: a.amax(0)),
        ("maximum along the last axis", "y[i] max= a[i,j]", lambda a: a.amax(1)),
        ("sum along the first axis", "y[j] = a[i,j]", lambda a: a.sum(0)),
        ("sum along the last axis", "y[i] = a[i,j]", lambda a: a.sum(1)),
    ):
        yield Exhibit(name, statement, a, formula)
    small = {"a": RandomTensors(options.device).normal(*sizes_here(options, 512, 512), 512)}
    for name, statement, formula in (
        ("maximum along the middle axis", "y[i,k] max= a[i,j,k]", lambda a: a.amax(1)),
        ("sum along the middle axis", "y[i,k] = a[i,j,k]", lambda a: a.sum(1)),
    ):
        yield Exhibit(name, statement, small, formula)


# --- gathers and scatters -------------------------------------------------------------------------


def gathers(options: BenchOptions) -> Iterator[Exhibit]:
    draw, single = RandomTensors(options.device, HALF), RandomTensors(options.device)
    points, rows = sizes_here(options, 2_000_000, 100_000)
    i, j, k = ((single.chance(points) * rows).int() for _ in range(3))
    factors = {
        "v": single.normal(points),
        "B": single.normal(rows, 32),
        "C": single.normal(rows, 32),
    }
    yield Exhibit(
        "MTTKRP, rank 32",
        "M[i[p],r] = v[p] * B[j[p],r] * C[k[p],r]",
        {**factors, "i": i.sort().values, "j": j, "k": k},
        lambda v, B, C, i, j, k: torch.zeros(rows, 32, dtype=v.dtype, device=v.device).index_add(
            0, i, v[:, None] * B[j] * C[k]
        ),
        leaves=("v", "B", "C"),
        options={"out_shape": (rows, 32)},
    )
    sides = {"A": draw.normal(rows, 64), "B": draw.normal(rows, 64)}
    yield Exhibit(
        "sampled product, width 64",
        "S[p] = A[i[p],k] * B[j[p],k]",
        {**sides, "i": i, "j": j},
        lambda A, B, i, j: (A[i] * B[j]).sum(1),
        leaves=("A", "B"),
    )
    bags, words = sizes_here(options, 65_536, 200_000)
    word = (single.chance(bags, 32) * words).int()
    yield Exhibit(
        "weighted embedding bag",
        "y[b,f] = w[b,t] * E[word[b,t],f]",
        {"E": draw.normal(words, 128), "word": word, "w": draw.normal(bags, 32)},
        lambda E, word, w: (w[:, :, None] * E[word]).sum(1),
        rivals={"torch.embedding_bag": _embedding_bag},
        leaves=("E", "w"),
    )
    pages, length = sizes_here(options, 4096, 256)
    each = max(1, length // 16)
    table = torch.randperm(pages, device=options.device)[: 32 * each].view(32, -1).int()
    yield Exhibit(
        "paged scores",
        "S[b,h,t,s] = Q[b,h,d] * K[page[b,t],s,h,d]",
        {"Q": draw.normal(32, 32, 128), "K": draw.normal(pages, 16, 32, 128), "page": table},
        lambda Q, K, page: torch.einsum("bhd,btshd->bhts", Q, K[page]),
    )


def _embedding_bag(E: Tensor, word: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.embedding_bag(word, E, per_sample_weights=w, mode="sum")


def messages(options: BenchOptions) -> Iterator[Exhibit]:
    nodes, edges = sizes_here(options, 50_000, 1_000_000)
    draw, single = RandomTensors(options.device, torch.float16), RandomTensors(options.device)
    s = (single.chance(edges) * nodes).int()
    d = (single.chance(edges) * nodes).int().sort().values
    ends = {"s": s, "d": d}
    heads = {"a": draw.normal(edges, 4), "x": draw.normal(nodes, 4, 32)}
    yield Exhibit(
        "attention's weighted sum, 4 heads",
        "y[d[e],h,f] = a[e,h] * x[s[e],h,f]",
        {**heads, **ends},
        lambda a, x, s, d: torch.zeros_like(x).index_add(0, d, a[:, :, None] * x[s]),
        leaves=("a", "x"),
        options={"out_shape": (nodes, 4, 32)},
    )
    for width in (60, 200):
        values = {"w": draw.normal(edges), "x": draw.normal(nodes, width)}
        yield Exhibit(
            f"sparse times dense, {width} columns",
            "y[d[e],f] = w[e] * x[s[e],f]",
            {**values, **ends},
            lambda w, x, s, d: torch.zeros_like(x).index_add(0, d, w[:, None] * x[s]),
            rivals={"torch.sparse": functools.partial(_csr, nodes)},
            leaves=("w", "x"),
            options={"out_shape": (nodes, width)},
        )
    yield Exhibit(
        "largest neighbour",
        "y[d[e],f] max= x[s[e],f]",
        {"x": draw.normal(nodes, 64), **ends},
        lambda x, s, d: torch.full_like(x, -math.inf).index_reduce(0, d, x[s], "amax"),
        options={"out_shape": (nodes, 64)},
    )
    counted = {"one": torch.ones(16 * edges, device=options.device)}
    bins = (single.chance(16 * edges) * 1000).int()
    yield Exhibit(
        "histogram of 1000 bins",
        "h[b[e]] = one[e]",
        {**counted, "b": bins},
        lambda one, b: torch.zeros(1000, dtype=one.dtype, device=one.device).index_add(0, b, one),
        options={"out_shape": (1000,)},
    )


def _csr(nodes: int, w: Tensor, x: Tensor, s: Tensor, d: Tensor) -> Tensor:
    pointers = torch.searchsorted(d, torch.arange(nodes + 1, device=d.device, dtype=d.dtype))
    matrix = torch.sparse_csr_tensor(pointers.int(), s, w, (nodes, nodes))
    return matrix @ x


EXHIBITS: tuple[Callable[[BenchOptions], Iterator[Exhibit]], ...] = (
    experts,
    relations,
    adapters,
    convolutions,
    dense,
    reductions,
    gathers,
    messages,
)
