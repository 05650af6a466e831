"""A soak test: statements, formats, layers and fused programs, drawn at random and full of traps,
each against the oracle or against plain PyTorch, for as long as one wishes.

    python -m insum.testing.soak --minutes 60 [--gpu] [--seed 0] [--out FOLDER] [--json FILE]
    python -m insum.testing.soak --again fused:7:0.5      one trial, by its name, seed and scale

With ``TRITON_INTERPRET=1`` statements run as generated kernels on a machine without a GPU; with
``--as-on-a-gpu`` also nothing is known of the values of tensors, as there. A trial that fails is
tried again at smaller scales, and a script that repeats the smallest failing one is written to the
folder. Each trial is decided by its name, its seed and its scale alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import insum
from insum.fusion import backend
from insum.runtime import launch
from insum.testing.as_on_a_gpu import pretended
from insum.testing.draw import draw_cases
from insum.testing.hostile import attempt, quiet

SCALES = (1.0, 0.5, 0.25, 0.1)
OUT = Path("out/soak")


@dataclass(frozen=True)
class Draw:
    """What a trial draws from."""

    random: random.Random
    scale: float
    device: torch.device

    def size(self, least: int, most: int) -> int:
        return self.random.randint(least, max(least, int(most * self.scale)))

    def values(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, dtype=dtype).to(self.device)

    def index(self, count: int, below: int) -> Tensor:
        """Places, perhaps sorted, in any dtype that holds them, perhaps a view of something."""
        found = torch.randint(0, max(1, below), (count,))
        if self.random.random() < 0.4:
            found = found.sort().values
        kinds = [torch.int64, torch.int32] + ([torch.uint8] if below <= 256 else [])
        found = found.to(self.random.choice(kinds)).to(self.device)
        return torch.stack([found, found], 1)[:, 0] if self.random.random() < 0.3 else found


SoakTrial: TypeAlias = Callable[[Draw], None]


def agree(got: Tensor, want: Tensor, what: str) -> None:
    coarse = got.dtype in (torch.float16, torch.bfloat16)
    limit = 2e-2 if coarse else 1e-4 if got.dtype == torch.float32 else 1e-9
    got, want = got.detach(), want.detach().to(got.device)
    scale = float(want.double().abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(
        got.double(),
        want.double(),
        rtol=limit,
        atol=limit * (1 + scale),
        msg=lambda m: f"{what}: {m}",
    )


def compare_gradients(got: Tensor, want: Tensor, leaves: dict[str, Tensor], what: str) -> None:
    upstream = torch.randn_like(want)
    ours = torch.autograd.grad(got, tuple(leaves.values()), upstream)
    theirs = torch.autograd.grad(want, tuple(leaves.values()), upstream)
    for name, a, b in zip(leaves, ours, theirs, strict=True):
        agree(a, b, f"gradient of {what} by {name}")


# --- statements -----------------------------------------------------------------------------------


def statements(draw: Draw) -> None:
    """Drawn statements against the oracle, again after everything was written to."""
    seed = draw.random.randrange(2**31)
    for case in draw_cases(1, seed=seed):
        there = case.to(draw.device)
        there.check()
        there.check()


def aggregated(x: Tensor, w: Tensor, s: Tensor, d: Tensor) -> Tensor:
    empty = torch.zeros(x.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    return empty.index_add(0, d.long(), x[s.long()] * w[:, None])


def rewritten(draw: Draw) -> None:
    """The same index tensors call after call, written to between calls in ways that can be seen."""
    nodes, edges, width = draw.size(2, 60), draw.size(1, 400), draw.size(1, 24)
    x, w = draw.values(nodes, width).requires_grad_(), draw.values(edges).requires_grad_()
    s, d = draw.index(edges, nodes), draw.index(edges, nodes)
    for _ in range(draw.random.randint(2, 8)):
        got = insum.insum(
            "y[d[e],f] = w[e] * x[s[e],f]", x=x, w=w, s=s, d=d, out_shape=(nodes, width)
        )
        want = aggregated(x, w, s, d)
        agree(got, want, "forward")
        compare_gradients(got, want, {"x": x, "w": w}, "a sum of rows")
        _write(draw, draw.random.choice((s, d)), nodes)


def _write(draw: Draw, index: Tensor, below: int) -> None:
    place = draw.random.randrange(index.numel())
    new = torch.randint(0, below, index.shape).to(index)
    match draw.random.randrange(5):
        case 0:
            index[place] = int(new[place])
        case 1:
            index.copy_(new)
        case 2:
            with torch.no_grad():
                index.view(-1)[place:].fill_(int(new[place]))
        case 3:
            index.data = new
        case _:
            pass


def in_place(draw: Draw) -> None:
    """Accumulation into targets of any layout, which may be what is read."""
    rows, count, width = draw.size(1, 40), draw.size(1, 200), draw.size(1, 20)
    index, x = draw.index(count, rows), draw.values(count, width)
    target = draw.values(rows, width)
    target = target.t().contiguous().t() if draw.random.random() < 0.5 else target
    operator = draw.random.choice(("+=", "max=", "min="))
    where = index.long()[:, None].expand(count, width)
    reduction = {"+=": "sum", "max=": "amax", "min=": "amin"}[operator]
    want = target.clone().scatter_reduce(0, where, x, reduction)
    got = insum.insum(f"C[i[e],f] {operator} x[e,f]", C=target, i=index, x=x)
    assert got is target
    agree(target, want, operator)


def aliases(draw: Draw) -> None:
    """What is accumulated into lies, in part, over what is read: as if that were copied before."""
    rows, count, width = draw.size(1, 30), draw.size(1, 60), draw.size(1, 8)
    memory = draw.values(rows + count, width)
    start = draw.random.randint(0, rows)
    target, x = memory[:rows], memory[start : start + count]
    index = draw.index(count, rows)
    want = target.clone().index_add(0, index.long(), 2 * x.clone())
    if draw.random.random() < 0.3:  # the same memory, of which torch knows nothing
        x = x.detach()
    insum.insum("C[i[e],f] += 2 * x[e,f]", C=target, i=index, x=x)
    agree(target, want, "an alias")


def extrema(draw: Draw) -> None:
    """The largest or smallest of products, through narrow indices, with gradients."""
    nodes, edges, width = draw.size(1, 30), draw.size(1, 200), draw.size(1, 9)
    x, w = draw.values(nodes, width).requires_grad_(), draw.values(edges, width).requires_grad_()
    s, d = draw.index(edges, nodes), draw.index(edges, nodes)
    least = draw.random.random() < 0.5
    text = f"y[d[e],f] {'min=' if least else 'max='} x[s[e],f] * w[e,f]"
    got = insum.insum(text, x=x, w=w, s=s, d=d, out_shape=(nodes, width))
    start = torch.full((nodes, width), float("inf" if least else "-inf"), dtype=x.dtype)
    where = d.long()[:, None].expand(-1, width)
    want = start.to(draw.device).scatter_reduce(
        0, where, x[s.long()] * w, "amin" if least else "amax"
    )
    empty = want.isinf()
    assert torch.equal(got.isinf(), empty), "rows without edges"
    agree(got.masked_fill(empty, 0), want.masked_fill(empty, 0), "an extremum")
    upstream = torch.randn_like(want).masked_fill(empty, 0)
    ours = torch.autograd.grad(got, (x, w), upstream)
    for name, a, b in zip("xw", ours, torch.autograd.grad(want, (x, w), upstream), strict=True):
        agree(a, b, f"gradient of an extremum by {name}")


def repeated(draw: Draw) -> None:
    """One subexpression, one tensor and one index tensor in several places of a statement."""
    nodes, edges, width = draw.size(1, 40), draw.size(1, 200), draw.size(1, 12)
    x, w = draw.values(nodes, width).requires_grad_(), draw.values(edges).requires_grad_()
    s = draw.index(edges, nodes)
    text = "y[s[e],f] = (w[e] * x[s[e],f] + x[s[e],f]) * (w[e] * x[s[e],f] - x[s[e],f])"
    got = insum.insum(text, x=x, w=w, s=s, out_shape=(nodes, width))
    at, scaled = s.long(), x[s.long()] * w[:, None]
    want = torch.zeros_like(x).index_add(0, at, scaled**2 - x[at] ** 2)
    agree(got, want, "a repeated subexpression")
    compare_gradients(got, want, {"x": x, "w": w}, "a repeated subexpression")


def runs(draw: Draw) -> None:
    """Entries that choose a whole matrix, stored one by one or added to chosen rows."""
    rows, entries, matrices = draw.size(1, 40), draw.size(1, 100), draw.size(1, 8)
    k, n = draw.size(1, 24), draw.size(1, 24)
    dtype = draw.random.choice((torch.float32, torch.float64, torch.float16))
    X = draw.values(rows, k, dtype=dtype).requires_grad_()
    W = draw.values(matrices, k, n, dtype=dtype).requires_grad_()
    t, e = draw.index(entries, rows), draw.index(entries, matrices)
    for _ in range(draw.random.randint(1, 3)):
        products = (X.double()[t.long()][:, None] @ W.double()[e.long()])[:, 0]
        got = insum.insum("Y[p,n] = X[t[p],k] * W[e[p],k,n]", X=X, W=W, t=t, e=e)
        agree(got, products, "a run")
        compare_gradients(got.double(), products, {"X": X, "W": W}, "a run")
        d = draw.index(entries, rows)
        want = torch.zeros(rows, n, dtype=torch.float64, device=X.device)
        text, shape = "Y[d[p],n] = X[t[p],k] * W[e[p],k,n]", (rows, n)
        added = insum.insum(text, X=X, W=W, t=t, e=e, d=d, out_shape=shape)
        agree(added, want.index_add(0, d.long(), products.detach()), "a run that is scattered")
        _write(draw, draw.random.choice((t, e)), min(rows, matrices))


def chains(draw: Draw) -> None:
    """Several factors, in the order that pays or as asked for."""
    nodes, edges = draw.size(1, 40), draw.size(1, 200)
    f, g, h = (draw.size(1, 24) for _ in range(3))
    X, V = draw.values(nodes, f).requires_grad_(), draw.values(g, h).requires_grad_()
    W, w = draw.values(f, g).requires_grad_(), draw.values(edges).requires_grad_()
    s, d = draw.index(edges, nodes), draw.index(edges, nodes)
    order: bool | str = draw.random.choice(("auto", True, False, "greedy", "optimal"))
    got = insum.insum(
        "y[d[e],h] = w[e] * X[s[e],f] * W[f,g] * V[g,h]",
        X=X,
        W=W,
        V=V,
        w=w,
        s=s,
        d=d,
        out_shape=(nodes, h),
        optimize=order,
    )
    want = aggregated(X @ W @ V, w, s, d)
    agree(got, want, f"a chain, optimize={order!r}")
    compare_gradients(got, want, {"X": X, "W": W, "V": V, "w": w}, f"a chain, optimize={order!r}")


def patterns(draw: Draw) -> None:
    """A short pattern of constants, alone and inside of edges."""
    nodes, edges, width = draw.size(1, 30), draw.size(1, 120), draw.size(1, 40)
    size, terms = draw.size(1, 5), draw.size(1, 12)
    X, Y = draw.values(nodes, size, width).requires_grad_(), draw.values(edges, size)
    Y = Y.requires_grad_()
    fixed = {name: torch.randint(0, size, (terms,)).to(draw.device) for name in "IJK"}
    V = draw.values(terms)
    if draw.random.random() < 0.7:
        fixed = {name: insum.constant(one) for name, one in fixed.items()}
        V = insum.constant(V) if draw.random.random() < 0.5 else V
    s, d = draw.index(edges, nodes), draw.index(edges, nodes)
    text = "Z[d[e],I[p],u] = V[p] * X[s[e],J[p],u] * Y[e,K[p]]"
    tensors: dict[str, Any] = {"X": X, "Y": Y, "V": V, "s": s, "d": d, **fixed}
    got = insum.insum(text, out_shape=(nodes, size, width), **tensors)
    parts = X[s.long()][:, fixed["J"]] * (V * Y[:, fixed["K"]])[:, :, None]
    inner = torch.zeros(edges, size, width, dtype=X.dtype, device=X.device)
    inner = inner.index_add(1, fixed["I"], parts)
    want = torch.zeros_like(X).index_add(0, d.long(), inner)
    agree(got, want, "a pattern")
    compare_gradients(got, want, {"X": X, "Y": Y}, "a pattern")


def out_of_range(draw: Draw) -> None:
    """One wrong index among many is reported, and the next call is right."""
    rows, count = draw.size(1, 40), draw.size(1, 200)
    x, index = draw.values(rows, 3), draw.index(count, rows).long()
    place = draw.random.randrange(count)
    good = index.clone()
    index[place] = draw.random.choice((rows, rows + 7, -1))
    try:
        insum.insum("y[e,f] = x[i[e],f]", x=x, i=index)
        insum.synchronize()
    except insum.IndexRangeError as error:
        assert f"i[{place}] is {int(index[place])}" in str(error), str(error)
    else:
        raise AssertionError("nothing was reported")
    agree(insum.insum("y[e,f] = x[i[e],f]", x=x, i=good), x[good], "the next call")


# --- formats --------------------------------------------------------------------------------------


def formats(draw: Draw) -> None:
    """A sparse matrix in every format: there and back, and times a matrix."""
    block = draw.random.choice((1, 2, 4))
    rows, columns = block * draw.size(1, 20), block * draw.size(1, 20)
    dense = draw.values(rows, columns) * (torch.rand(rows, columns) < 0.3).to(draw.device)
    B = draw.values(columns, draw.size(1, 9))
    every: list[Any] = [
        insum.formats.COO.from_dense(dense),
        insum.formats.GroupCOO.from_dense(dense, group_dims=(0,), group_size="auto"),
        insum.formats.BlockGroupCOO.from_dense(dense, block_shape=(block, block), group_size=2),
    ]
    for one in every:
        name = type(one).__name__
        agree(one.to_dense(), dense, f"{name} and back")
        agree(one @ B, dense @ B, f"{name} times a matrix")


# --- layers ---------------------------------------------------------------------------------------


def convolutions(draw: Draw) -> None:
    """A submanifold convolution against the dense one."""
    side, count = draw.size(2, 8), draw.size(1, 120)
    every = torch.cartesian_prod(*[torch.arange(side)] * 3)
    coords = every[torch.randperm(len(every))[:count]]
    inputs, outputs = draw.size(1, 9), draw.size(1, 9)
    layer = insum.nn.SparseConv3d(inputs, outputs, 3, submanifold=True).double().to(draw.device)
    features = draw.values(len(coords), inputs).requires_grad_()
    shape = (side, side, side)
    x = insum.nn.SparseTensor(coords.to(draw.device), features, spatial_shape=shape)
    got = layer(x).features
    grid = x.to_dense(1)
    weight = layer.weight.reshape(3, 3, 3, inputs, outputs).permute(4, 3, 0, 1, 2)
    full = nn.functional.conv3d(grid, weight, layer.bias, padding=1)
    want = full[0].movedim(0, -1)[tuple(coords.to(draw.device).unbind(1))]
    agree(got, want, "convolution")
    upstream = torch.randn_like(want)
    leaves = (features, layer.weight)
    ours = torch.autograd.grad(got, leaves, upstream, retain_graph=True)
    for a, b in zip(ours, torch.autograd.grad(want, leaves, upstream), strict=True):
        agree(a, b, "gradient of a convolution")


def graph_layers(draw: Draw) -> None:
    """A GCN layer against a dense normalised adjacency."""
    nodes, edges, width = draw.size(1, 30), draw.size(1, 200), draw.size(1, 12)
    ends = torch.randint(0, nodes, (2, edges))
    ends = ends[:, ends[0] != ends[1]].to(draw.device)
    layer = insum.nn.GCNConv(width, 5).double().to(draw.device)
    x = draw.values(nodes, width)
    dense = torch.eye(nodes, dtype=torch.float64, device=draw.device)
    dense.index_put_((ends[1], ends[0]), dense.new_ones(()), accumulate=True)
    root = dense.sum(1).rsqrt()
    want = (root[:, None] * dense * root) @ layer.lin(x) + layer.bias
    for _ in range(draw.random.randint(1, 6)):
        agree(layer(x, ends), want, "GCNConv")


# --- fused programs -------------------------------------------------------------------------------


def _twice(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    m = x[e[0].long()] * w[:, None]
    empty = torch.zeros_like(x)
    return empty.index_add(0, e[1].long(), m) + 2 * empty.index_add(0, e[1].long(), m)


def _largest(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    m = x[e[0].long()] @ torch.ones(x.shape[1], 3, dtype=x.dtype, device=x.device) * w[:, None]
    at = e[1].long()[:, None].expand(-1, 3)
    return torch.zeros(x.shape[0], 3, dtype=x.dtype, device=x.device).scatter_reduce(
        0, at, m, "amax"
    )


def _views(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    both = torch.cat([e, e.flip(0)], 1)
    m = x[both[0].long()] * torch.cat([w, w])[:, None]
    return torch.zeros_like(x).index_add(0, both[1].long(), m).relu()


def _chain(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    first = torch.zeros_like(x).index_add(0, e[1].long(), x[e[0].long()])
    return first.index_add(0, e[0].long(), first[e[1].long()] * w[:, None])


def _written(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    """Writes in place between reads, of values and of indices."""
    at = e[1].long().clone()
    at[: at.numel() // 2] = e[0, : at.numel() // 2].long()
    first = torch.zeros_like(x).index_add_(0, at, x[e[0].long()] * w[:, None])
    y = x.clone()
    y[: x.shape[0] // 2].mul_(2)
    return first.index_add_(0, at, y[e[1].long()]) * y


def _softmax(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    """Attention over edges: an extremum, an exponential, a sum and a quotient."""
    at, score = e[1].long(), (x[e[0].long()] * x[e[1].long()]).sum(1) * w
    most = torch.full_like(x[:, 0], float("-inf")).scatter_reduce(0, at, score, "amax").detach()
    weight = (score - most[at]).exp()
    total = torch.zeros_like(x[:, 0]).index_add(0, at, weight)
    return torch.zeros_like(x).index_add(0, at, x[e[0].long()] * (weight / total[at])[:, None])


def _gated(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    """Functions of both ends and of edges, a condition, and the message used again."""
    here, there = x[e[0].long()], x[e[1].long()]
    m = nn.functional.leaky_relu(here - there, 0.2) * nn.functional.softplus(w)[:, None]
    m = torch.where((m > 0) | (there < here), nn.functional.gelu(m), w[:, None] / (1 + here**2))
    return torch.zeros_like(x).index_add(0, e[1].long(), m) * m.abs().sum(0).log1p()


def _attended(x: Tensor, w: Tensor, e: Tensor) -> Tensor:
    """As GATv2: scores of a function of both ends, their softmax, and the weighted sum."""
    src, at = e[0].long(), e[1].long()
    score = (nn.functional.silu(x[src] + x[at]) * x[0]).sum(1) + w
    most = torch.full_like(x[:, 0], float("-inf")).scatter_reduce(0, at, score, "amax").detach()
    weight = (score - most[at]).exp()
    total = torch.zeros_like(x[:, 0]).index_add(0, at, weight)
    return torch.zeros_like(x).index_add(0, at, (weight / total[at])[:, None] * x[src])


PROGRAMS = (_twice, _largest, _views, _chain, _written, _softmax, _gated, _attended)


def fused(draw: Draw) -> None:
    """A program of plain PyTorch, compiled, on several graphs, forward and backward."""
    program = draw.random.choice(PROGRAMS)
    torch._dynamo.reset()
    keep: dict[str, Any] = {"insum.fuse": "always", "insum.rest": "eager"}
    run = torch.compile(program, backend=backend, options=keep)
    for _ in range(2):
        nodes, edges, width = draw.size(2, 30), draw.size(2, 200), draw.size(1, 9)
        kind = draw.random.choice((torch.int64, torch.int32, torch.uint8))
        ends = torch.randint(0, nodes, (2, edges)).to(kind).to(draw.device)
        leaves = draw.values(nodes, width).requires_grad_(), draw.values(edges).requires_grad_()
        got, want = run(*leaves, ends), program(*leaves, ends)
        agree(got, want, program.__name__)
        upstream = torch.randn_like(want)
        ours = torch.autograd.grad(got, leaves, upstream)
        for a, b in zip(ours, torch.autograd.grad(want, leaves, upstream), strict=True):
            agree(a, b, f"gradient of {program.__name__}")


# --- arguments that nobody should pass ------------------------------------------------------------


def hostile(draw: Draw) -> None:
    """Right calls with a wrong argument or two: a result or an error of insum's."""
    with quiet():
        for _ in range(max(1, int(8 * draw.scale))):
            outcome = attempt(draw.random.randrange(2**31))
            assert not outcome.wrong, f"{outcome}\n{outcome.trace}"


# --- threads --------------------------------------------------------------------------------------


#: Trials of which several may run at once.
THREADED = (rewritten, in_place, formats, repeated, extrema, graph_layers, aliases, runs, chains)


def threads(draw: Draw) -> None:
    """Trials in several threads at once, with settings of their own."""
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        own = Draw(random.Random(seed), draw.scale, draw.device)
        try:
            with insum.settings(tier=own.random.choice(("auto", "stable"))):
                own.random.choice(THREADED)(own)
        except BaseException as error:
            errors.append(error)

    every = [threading.Thread(target=work, args=(draw.random.randrange(2**31),)) for _ in range(3)]
    for one in every:
        one.start()
    for one in every:
        one.join()
    if errors:
        raise errors[0]


TRIALS: dict[str, SoakTrial] = {
    one.__name__: one
    for one in (
        *(statements, rewritten, in_place, aliases, extrema, repeated, out_of_range),
        *(runs, chains, patterns),
        *(formats, convolutions, graph_layers, fused, hostile, threads),
    )
}
#: These take long to compile, and come once in so many turns.
RARE = {"fused": 8}


# --- running --------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What was tried, and what was found."""

    tried: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        every = ", ".join(f"{count} {name}" for name, count in sorted(self.tried.items()))
        total, found = self.tried.total(), len(self.found)
        return f"{total} trials in {self.seconds:.0f} s ({every}); {found} found"


#: Settings that change how a result is computed, and not what it is.
UNUSUAL: dict[str, tuple[Any, ...]] = {
    "check": ("always",),
    "dot": ("always", "never"),
    "swap": (False,),
    "prefetch": (False,),
    "lazy_broadcasting": (False,),
    "memory": (0, 1000),
}


@contextmanager
def drawn_settings(draw: Draw) -> Iterator[None]:
    options: dict[str, Any] = {"tier": draw.random.choice(("auto", "stable"))}
    for name, others in UNUSUAL.items():
        if draw.random.random() < 0.1:
            options[name] = draw.random.choice(others)
    if launch.interpreting():
        options["backend"] = "fused"
    if draw.random.random() < 0.2:
        options["scatter"] = draw.random.choice(
            ("atomic", "segment", "onehot", "unrolled", "store")
        )
    with insum.settings(**options):
        yield


def trial(
    name: str, seed: int, scale: float = 1.0, device: str = "cpu", as_on_a_gpu: bool = False
) -> None:
    """One trial; raises where something is wrong.

    >>> trial("in_place", seed=3)
    """
    torch.manual_seed(seed)
    draw = Draw(random.Random(seed), scale, torch.device(device))
    with pretended(require_fused=False) if as_on_a_gpu else nullcontext(), drawn_settings(draw):
        TRIALS[name](draw)


@dataclass(frozen=True)
class Where:
    """Where trials run."""

    device: str = "cpu"
    as_on_a_gpu: bool = False

    def failure(self, name: str, seed: int, scale: float) -> str:
        try:
            trial(name, seed, scale, self.device, self.as_on_a_gpu)
        except Exception:
            return traceback.format_exc()
        return ""

    def call(self, name: str, seed: int, scale: float) -> str:
        """What repeats a trial, as text."""
        return f"trial({name!r}, {seed}, {scale}, {self.device!r}, {self.as_on_a_gpu})"

    @property
    def names(self) -> list[str]:
        """The trials that can run there: the interpreter runs in one thread at a time."""
        return [n for n in TRIALS if n not in ("threads",) or not launch.interpreting()]


def shrunk(name: str, seed: int, where: Where) -> tuple[float, str]:
    """The smallest scale at which a trial fails, and how."""
    found = [(scale, where.failure(name, seed, scale)) for scale in SCALES]
    return next((pair for pair in reversed(found) if pair[1]), (1.0, "it did not fail again"))


def soak(
    seconds: float,
    seed: int = 0,
    where: Where | None = None,
    out: Path | None = None,
    names: tuple[str, ...] = (),
    trials: float = math.inf,
) -> Counts:
    """Trials until the time is up.

    Args:
        seconds: For how long.
        seed: Of the first trial; each has the next.
        where: The device, and whether tensors are taken for ones on a GPU; the CPU.
        out: The folder that scripts of what fails go to; none are written without one.
        names: Of the trials; all where none are given.
        trials: At most so many; the same ones on every machine where the time suffices.

    Returns:
        What was tried and what was found, as names that ``--again`` takes.

    Examples:
        >>> soak(60, names=("in_place",), trials=3).found
        []
    """
    counts, start, where = Counts(), time.monotonic(), where or Where()
    every = [n for n in where.names if not names or n in names]
    while counts.tried.total() < trials and time.monotonic() - start < seconds:
        turn, place = divmod(seed, len(every))
        name = every[place]
        seed += 1
        if turn % RARE.get(name, 1) and len(every) > 1:
            continue
        counts.tried[name] += 1
        if where.failure(name, seed, 1.0):
            counts.found.append(_kept(name, seed, where, out))
    counts.seconds = time.monotonic() - start
    return counts


def _kept(name: str, seed: int, where: Where, out: Path | None) -> str:
    scale, text = shrunk(name, seed, where)
    found = f"{name}:{seed}:{scale}"
    print(f"FOUND {found}\n{text}", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        script = f"from insum.testing.soak import trial\n\n{where.call(name, seed, scale)}\n"
        (out / f"{name}_{seed}.py").write_text(script, encoding="utf-8")
    return found


def _record(counts: Counts, where: Where) -> dict[str, Any]:
    on_gpu = where.device == "cuda"
    return {
        "command": " ".join(["python -m insum.testing.soak", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "seconds": round(counts.seconds),
        "trials": counts.tried.total(),
        "tried": dict(sorted(counts.tried.items())),
        "found": counts.found,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Drawn programs against PyTorch and an oracle.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--as-on-a-gpu", action="store_true", help="with TRITON_INTERPRET=1")
    parser.add_argument("--only", default="", help=f"of {', '.join(TRIALS)}; separated by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--json", type=Path, help="where to write what was tried and found")
    parser.add_argument("--again", default="", help="one trial: name:seed:scale")
    asked = parser.parse_args()
    where = Where("cuda" if asked.gpu else "cpu", asked.as_on_a_gpu)
    if asked.again:
        name, seed, scale = asked.again.split(":")
        trial(name, int(seed), float(scale), where.device, where.as_on_a_gpu)
        return 0
    names = tuple(filter(None, asked.only.split(",")))
    counts = soak(60 * asked.minutes, asked.seed, where, asked.out, names)
    print(counts)
    if asked.json:
        asked.json.write_text(json.dumps(_record(counts, where), indent=1) + "\n", encoding="utf-8")
    return int(bool(counts.found))


if __name__ == "__main__":
    sys.exit(main())
