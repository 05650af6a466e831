"""``insum bench survey``: statements that people write every day and that nobody tuned for, each
beside the same in PyTorch's own operations, eager and compiled.

What falls short here is a cliff: a statement of which something was planned badly. Sizes are those
of a layer. Indices come back, as in the gallery, whose exhibits these are too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from insum.bench.data import RandomTensors
from insum.bench.gallery import Exhibit, compared, sizes_here
from insum.bench.measure import Comparison
from insum.bench.options import BenchOptions

TITLE = "Survey"
STATEMENT = "insum.insum(STATEMENT, ...)"
BASELINE = "torch.compile"


@dataclass(frozen=True, eq=False)
class SurveyTensors:
    """Tensors of one dtype, and sizes as they are here: ``n`` rows, ``e`` entries, ``t`` tokens."""

    options: BenchOptions
    dtype: torch.dtype
    n: int
    e: int
    t: int

    def normal(self, *shape: int) -> Tensor:
        return RandomTensors(self.options.device, self.dtype, seed=sum(shape)).normal(*shape)

    def below(self, limit: int, *shape: int, seed: int = 1) -> Tensor:
        draw = RandomTensors(self.options.device, seed=seed + sum(shape))
        return (draw.chance(*shape) * limit).long().clamp(max=limit - 1)

    def rising(self, limit: int, count: int) -> Tensor:
        return self.below(limit, count).sort().values


def cases(options: BenchOptions) -> Iterator[Comparison]:
    n, e, t = sizes_here(options, 40_000, 400_000, 8192)
    for dtype in options.dtypes_or(torch.float32, torch.float16):
        given = SurveyTensors(options, dtype, n, e, t)
        for group in (rows, messages, totals, tables, matrices):
            for exhibit in group(given):
                if options.names and not any(name in exhibit.name for name in options.names):
                    continue
                rival = {"torch.compile": torch.compile(exhibit.formula)}
                yield from compared(replace(exhibit, rivals=rival), options, "survey")


def _added(index: Tensor, rows: Tensor, count: int) -> Tensor:
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, index, rows)


# --- one value or one row for each entry ----------------------------------------------------------


def rows(d: SurveyTensors) -> Iterator[Exhibit]:
    i, j = d.below(d.n, d.e, seed=2), d.below(d.n, d.e, seed=3)
    ends = {"i": i, "j": j}
    for heads, depth in ((8, 16), (4, 64), (3, 20)):
        both = {"Q": d.normal(d.n, heads, depth), "K": 2 * d.normal(d.n, heads, depth)}
        yield Exhibit(
            f"scores of {heads} heads of {depth}",
            "s[p,h] = Q[i[p],h,d] * K[j[p],h,d]",
            {**both, **ends},
            lambda Q, K, i, j: (Q[i] * K[j]).sum(-1),
            leaves=("Q", "K"),
        )
    kinds = {"U": d.normal(d.n, 128), "R": d.normal(50, 128), "t": d.below(50, d.e)}
    yield Exhibit(
        "triples, 128 wide",
        "s[p] = U[i[p],f] * R[t[p],f] * U[j[p],f]",
        {**kinds, **ends},
        lambda U, R, t, i, j: (U[i] * R[t] * U[j]).sum(-1),
        leaves=("U", "R"),
    )
    yield Exhibit(
        "squared distances",
        "s[p] = pow(X[i[p],c] - X[j[p],c], 2)",
        {"X": d.normal(d.n, 3), **ends},
        lambda X, i, j: (X[i] - X[j]).square().sum(-1),
        leaves=("X",),
    )
    wide = {"X": d.normal(8, d.n // 2, 32), "Y": 2 * d.normal(8, d.n // 2, 32)}
    halved = {"i": i % (d.n // 2), "j": j % (d.n // 2)}
    yield Exhibit(
        "scores over a batch",
        "s[p] = X[b,i[p],n] * Y[b,j[p],n]",
        {**wide, **halved},
        lambda X, Y, i, j: (X[:, i] * Y[:, j]).sum((0, 2)),
    )
    yield Exhibit(
        "columns gathered",
        "y[b,p] = x[b,t[p]] * w[p]",
        {"x": d.normal(d.t, 512), "t": d.below(512, 2048), "w": d.normal(2048)},
        lambda x, t, w: x[:, t] * w,
        leaves=("x", "w"),
    )


# --- sums over entries ----------------------------------------------------------------------------


def messages(d: SurveyTensors) -> Iterator[Exhibit]:
    i, j = d.below(d.n, d.e, seed=2), d.below(d.n, d.e, seed=3)
    ends, n = {"i": i, "j": j}, d.n
    x, w = d.normal(n, 64), d.normal(64, 64)
    shape = {"out_shape": (n, 64)}
    yield Exhibit(
        "a layer along edges",
        "y[i[p],o] = x[j[p],c] * W[c,o]",
        {"x": x, "W": w, **ends},
        lambda x, W, i, j: _added(i, (x @ W)[j], n),
        leaves=("x", "W"),
        options=shape,
    )
    yield Exhibit(
        "a layer on messages",
        "y[i[p],o] = m[p,c] * W[c,o]",
        {"m": d.normal(d.e, 64), "W": w, "i": i},
        lambda m, W, i: _added(i, m, n) @ W,
        leaves=("m", "W"),
        options=shape,
    )
    yield Exhibit(
        "two kinds of rows",
        "y[i[p],n] = v[p] * x[j[p],n] + v[p] * z[j[p],n]",
        {"v": d.normal(d.e), "x": x, "z": 2 * x, **ends},
        lambda v, x, z, i, j: _added(i, v[:, None] * (x + z)[j], n),
        leaves=("v", "x", "z"),
        options=shape,
    )
    yield Exhibit(
        "gated messages",
        "y[i[p],c] = sigmoid(a[i[p],c] + b[j[p],c]) * x[j[p],c]",
        {"a": x, "b": 2 * x, "x": x, **ends},
        lambda a, b, x, i, j: _added(i, torch.sigmoid(a[i] + b[j]) * x[j], n),
        leaves=("a", "b", "x"),
        options=shape,
    )


def totals(d: SurveyTensors) -> Iterator[Exhibit]:
    n, ends = d.n, {"i": d.below(d.n, d.e, seed=2), "j": d.below(d.n, d.e, seed=3)}
    yield Exhibit(
        "spread over many places",
        "y[i[p]] = v[p] * x[j[p]]",
        {"v": d.normal(d.e), "x": d.normal(n), **ends},
        lambda v, x, i, j: _added(i, v * x[j], n),
        leaves=("v", "x"),
        options={"out_shape": (n,)},
    )
    few = d.below(512, d.e, seed=5)
    yield Exhibit(
        "counts of pairs",
        "h[i[p],j[p]] = v[p]",
        {"v": d.normal(d.e), "i": few, "j": few.flip(0).contiguous()},
        lambda v, i, j: v.new_zeros(512, 512).index_put((i, j), v, accumulate=True),
        leaves=("v",),
        options={"out_shape": (512, 512)},
    )
    groups, members = max(2, d.n // 20), d.e // 2
    both = {"X": d.normal(members, 16), "Y": 2 * d.normal(members, 16)}
    yield Exhibit(
        "products of groups",
        "G[g[p],a,b] = X[p,a] * Y[p,b]",
        {**both, "g": d.rising(groups, members)},
        lambda X, Y, g: _added(g, X[:, :, None] * Y[:, None, :], groups),
        leaves=("X", "Y"),
        options={"out_shape": (groups, 16, 16)},
    )


# --- lists of rows --------------------------------------------------------------------------------


def tables(d: SurveyTensors) -> Iterator[Exhibit]:
    for name, queries, count, columns in (
        ("three nearest, 96 wide", 2 * d.n, 3, 96),
        ("eight corners, 16 wide", 4 * d.n, 8, 16),
        ("bags of 32, 128 wide", d.t, 32, 128),
    ):
        yield Exhibit(
            name,
            "y[q,c] = w[q,k] * x[t[q,k],c]",
            {
                "w": d.normal(queries, count),
                "x": d.normal(d.n, columns),
                "t": d.below(d.n, queries, count),
            },
            lambda w, x, t: (w[:, :, None] * x[t]).sum(1),
            leaves=("w", "x"),
        )
    yield Exhibit(
        "a layer on nine neighbours",
        "y[q,o] = x[t[q,k],c] * W[k,c,o]",
        {"x": d.normal(d.n, 64), "t": d.below(d.n, d.n, 9), "W": d.normal(9, 64, 64)},
        lambda x, t, W: x[t].flatten(1) @ W.flatten(0, 1),
        leaves=("x", "W"),
    )


# --- dense ----------------------------------------------------------------------------------------


def matrices(d: SurveyTensors) -> Iterator[Exhibit]:
    yield Exhibit(
        "blocks on the diagonal",
        "Y[b,n,o] = X[b,n,i] * W[n,i,o]",
        {"X": d.normal(d.t, 16, 64), "W": d.normal(16, 64, 64)},
        functools.partial(_einsum, "bni,nio->bno"),
        leaves=("X", "W"),
    )
    yield Exhibit(
        "three factors of a tensor",
        "y[a,f] = T[a,b,c] * B[b,f] * D[c,f]",
        {"T": d.normal(64, 800, 128), "B": d.normal(800, 32), "D": d.normal(128, 32)},
        functools.partial(_einsum, "abc,bf,cf->af"),
        leaves=("B", "D"),
    )
    for rows_, columns in ((8 * d.t, 300), (d.t, 1000), (64 * d.t, 8)):
        yield Exhibit(
            f"sums of {columns} columns",
            "y[b] = x[a,b]",
            {"x": d.normal(rows_, columns)},
            lambda x: x.sum(0),
        )
    yield Exhibit(
        "channels apart, seven wide",
        "y[b,c,t] = x[b,c,t+k] * w[c,k]",
        {"x": d.normal(8, 256, d.t // 4 + 6), "w": d.normal(256, 7)},
        lambda x, w: F.conv1d(x, w[:, None], groups=256),
        leaves=("x", "w"),
        options={"out_shape": (8, 256, d.t // 4)},
    )


def _einsum(equation: str, **tensors: Tensor) -> Tensor:
    return torch.einsum(equation, *tensors.values())
