"""Statements that ``insum bench survey`` asks for, of which none is of a layer of graphs: what
einsum, gather and scatter are used for elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from insum.bench.gallery import Exhibit
from insum.bench.survey_tensors import SurveyTensors, added_rows, einsum

# --- tables of numbers and of rows ----------------------------------------------------------------


def picked(d: SurveyTensors) -> Iterator[Exhibit]:
    width, taken, depth = d.about(512), d.about(256), d.about(64)
    chosen = d.below(width, d.t, taken)
    yield Exhibit(
        "numbers of each row",
        "y[b,k] = x[b,t[b,k]]",
        {"x": d.normal(d.t, width), "t": chosen},
        lambda x, t: x.gather(1, t),
        leaves=("x",),
    )
    yield Exhibit(
        "numbers into each row",
        "y[b,t[b,k]] = x[b,k]",
        {"x": d.normal(d.t, taken), "t": chosen},
        lambda x, t: x.new_zeros(x.shape[0], width).scatter_add(1, t, x),
        leaves=("x",),
        options={"out_shape": (d.t, width)},
    )
    batch, points = d.about(16), d.t // 4
    yield Exhibit(
        "neighbours in every cloud",
        "y[b,p,k,f] = x[b,t[b,p,k],f] - x[b,p,f]",
        {"x": d.normal(batch, points, depth), "t": d.below(points, batch, points, 9)},
        lambda x, t: x[torch.arange(x.shape[0], device=x.device)[:, None, None], t] - x[:, :, None],
        leaves=("x",),
    )
    yield Exhibit(
        "largest of neighbours listed",
        "y[q,f] max= x[t[q,k],f]",
        {"x": d.normal(d.n, depth), "t": d.below(d.n, d.n, 16)},
        lambda x, t: x[t].amax(1),
    )
    side, part = d.about(4096), d.about(1500)
    rows, columns = d.below(side, part), d.below(side, part)
    yield Exhibit(
        "part of a matrix",
        "y[i,j] = x[p[i],q[j]]",
        {"x": d.normal(side, side), "p": rows, "q": columns},
        lambda x, p, q: x[p[:, None], q],
        leaves=("x",),
    )
    yield Exhibit(
        "rows and columns put in order",
        "y[p[i],q[j]] = x[i,j]",
        {
            "x": d.normal(part, part),
            "p": torch.randperm(part, device=d.draw.device),
            "q": torch.randperm(part, device=d.draw.device),
        },
        lambda x, p, q: x.new_zeros(part, part).index_put((p[:, None], q), x),
        leaves=("x",),
        options={"out_shape": (part, part)},
    )


# --- algebra --------------------------------------------------------------------------------------


def algebra(d: SurveyTensors) -> Iterator[Exhibit]:
    rows, side, rank = d.t, d.about(64), d.about(32)
    yield Exhibit(
        "quadratic forms",
        "s[n] = x[n,i] * A[i,j] * x[n,j]",
        {"x": d.normal(rows, side), "A": d.normal(side, side)},
        _quadratic_forms,
        leaves=("x", "A"),
    )
    yield Exhibit(
        "products of all columns",
        "y[i,j,f] = A[i,f] * B[j,f]",
        {"A": d.normal(d.about(300), rank), "B": d.normal(d.about(400), rank)},
        lambda A, B: A[:, None] * B,
        leaves=("A", "B"),
    )
    yield Exhibit(
        "a Kronecker product",
        "y[a,b,c,e] = A[a,c] * B[b,e]",
        {"A": d.normal(side, side), "B": d.normal(rank, rank)},
        lambda A, B: A[:, None, :, None] * B[None, :, None],
        leaves=("A", "B"),
    )
    yield Exhibit(
        "traces of products",
        "s[n] = A[n,i,j] * B[n,j,i]",
        {"A": d.normal(rows // 4, side, side), "B": d.normal(rows // 4, side, side)},
        lambda A, B: (A * B.mT).sum((1, 2)),
        leaves=("A", "B"),
    )
    yield Exhibit(
        "a product of small matrices",
        "y[n,i,k] = A[n,i,j] * B[n,j,k]",
        {"A": d.normal(4 * rows, 3, 3), "B": d.normal(4 * rows, 3, 3)},
        lambda A, B: A @ B,
        leaves=("A", "B"),
    )
    yield Exhibit(
        "vectors turned, each its own way",
        "y[n,c,i] = R[n,i,j] * x[n,c,j]",
        {"R": d.normal(4 * rows, 3, 3), "x": d.normal(4 * rows, d.about(16), 3)},
        functools.partial(einsum, "nij,ncj->nci"),
        leaves=("R", "x"),
    )
    yield Exhibit(
        "absolute distances of all pairs",
        "D[i,j] = abs(X[i,c] - Y[j,c])",
        {"X": d.normal(rows // 8, side), "Y": d.normal(rows // 8, side)},
        lambda X, Y: (X[:, None] - Y).abs().sum(-1),
        leaves=("X", "Y"),
    )


# --- sums -----------------------------------------------------------------------------------------


def sums(d: SurveyTensors) -> Iterator[Exhibit]:
    width, group, channels = d.about(512), d.about(8), d.about(32)
    yield Exhibit(
        "squares of rows",
        "s[b] = x[b,f] * x[b,f]",
        {"x": d.normal(d.t, width)},
        lambda x: x.square().sum(1),
        leaves=("x",),
    )
    yield Exhibit(
        "exponentials of rows",
        "s[b] = exp(x[b,f] - m[b])",
        {"x": d.normal(d.t, width), "m": d.normal(d.t).abs()},
        lambda x, m: (x - m[:, None]).exp().sum(1),
        leaves=("x",),
    )
    yield Exhibit(
        "largest of a middle dimension",
        "y[a,c] max= x[a,b,c]",
        {"x": d.normal(d.t // 8, channels, width)},
        lambda x: x.amax(1),
    )
    yield Exhibit(
        "sums of groups of channels",
        "s[b,g] = x[b,g,c,t] * w[g,c]",
        {"x": d.normal(d.t // 8, group, channels, 64), "w": d.normal(group, channels)},
        lambda x, w: (x * w[:, :, None]).sum((2, 3)),
        leaves=("x", "w"),
    )
    yield Exhibit(
        "degrees",
        "g[i[p]] = v[p]",
        {"v": d.normal(d.e), "i": d.below(d.n, d.e)},
        lambda v, i: added_rows(i, v, d.n),
        leaves=("v",),
        options={"out_shape": (d.n,)},
    )
    groups, columns = d.about(500), d.about(128)
    yield Exhibit(
        "sums of scaled segments",
        "y[g[p],f] = x[p,f] * w[g[p]]",
        {
            "x": d.normal(d.e // 4, columns),
            "g": d.rising(groups, d.e // 4),
            "w": d.normal(groups),
        },
        lambda x, g, w: added_rows(g, x * w[g][:, None], groups),
        leaves=("x", "w"),
        options={"out_shape": (groups, columns)},
    )


# --- windows --------------------------------------------------------------------------------------


def sliding(d: SurveyTensors) -> Iterator[Exhibit]:
    length, width, band = 8 * d.t, d.about(64), d.about(9)
    yield Exhibit(
        "a matrix with bands",
        "y[i,f] = A[i,k] * x[i+k,f]",
        {"A": d.normal(length // 2, band), "x": d.normal(length // 2 + band - 1, width)},
        lambda A, x: (A[:, None] * x.unfold(0, band, 1)).sum(-1),
        leaves=("A", "x"),
    )
    yield Exhibit(
        "a filter of numbers",
        "y[t] = x[t+k] * w[k]",
        {"x": d.normal(16 * length + 4 * band - 1), "w": d.normal(4 * band)},
        lambda x, w: x.unfold(0, 4 * band, 1) @ w,
        leaves=("x", "w"),
        options={"out_shape": (16 * length,)},
    )
    batch, channels, side = d.about(8), d.about(64), d.about(64)
    pictures = d.normal(batch, channels, side + 2, side + 2)
    yield Exhibit(
        "pictures, channels apart",
        "y[b,c,h,w] = x[b,c,h+i,w+j] * k[c,i,j]",
        {"x": pictures, "k": d.normal(channels, 3, 3)},
        lambda x, k: torch.nn.functional.conv2d(x, k[:, None], groups=channels),
        leaves=("x", "k"),
        options={"out_shape": (batch, channels, side, side)},
    )
    yield Exhibit(
        "pictures, made half as large",
        "y[b,c,h,w] max= x[b,c,2*h+i,2*w+j]",
        {"x": d.normal(batch, channels, 2 * side, 2 * side)},
        lambda x: torch.nn.functional.max_pool2d(x, 2),
        options={"out_shape": (batch, channels, side, side), "sizes": {"i": 2, "j": 2}},
    )
    after = d.about(64)
    yield Exhibit(
        "a layer on pictures",
        "y[b,o,h,w] = x[b,c,h+i,w+j] * k[o,c,i,j]",
        {"x": pictures, "k": d.normal(after, channels, 3, 3)},
        lambda x, k: torch.nn.functional.conv2d(x, k),
        leaves=("x", "k"),
        options={"out_shape": (batch, after, side, side)},
    )


# --- layers ---------------------------------------------------------------------------------------


def layers(d: SurveyTensors) -> Iterator[Exhibit]:
    batch, width, after, experts = d.about(512), d.about(128), d.about(128), d.about(16)
    yield Exhibit(
        "a matrix for each sample",
        "y[b,o] = x[b,i] * W[e[b],i,o]",
        {
            "x": d.normal(batch, width),
            "W": d.normal(experts, width, after),
            "e": d.below(experts, batch),
        },
        lambda x, W, e: (x[:, None] @ W[e])[:, 0],
        leaves=("x", "W"),
    )
    ends = {"s": d.below(d.n, d.e // 4), "t": d.below(d.n, d.e // 4)}
    yield Exhibit(
        "a layer on edges",
        "y[e,o] = relu(x[s[e],c] + z[t[e],c]) * W[c,o]",
        {"x": d.normal(d.n, width), "z": d.normal(d.n, width), "W": d.normal(width, after), **ends},
        lambda x, z, W, s, t: torch.relu(x[s] + z[t]) @ W,
        leaves=("x", "z", "W"),
    )
    heads, depth = d.about(8), 2 * d.about(32)
    angles = {"C": d.normal(d.t // 4, depth), "S": d.normal(d.t // 4, depth)}
    swapped = torch.arange(depth, device=d.draw.device).roll(depth // 2)
    yield Exhibit(
        "places as angles",
        "y[b,t,h,f] = x[b,t,h,f] * C[t,f] + x[b,t,h,p[f]] * S[t,f]",
        {"x": d.normal(4, d.t // 4, heads, depth), **angles, "p": swapped},
        lambda x, C, S, p: x * C[:, None] + x[..., p] * S[:, None],
        leaves=("x",),
    )
    length = d.about(512)
    yield Exhibit(
        "scores of relative places",
        f"s[h,i,j] = q[h,i,f] * r[j-i+{length - 1},f]",
        {"q": d.normal(heads, length, depth), "r": d.normal(2 * length - 1, depth)},
        _scores_of_relative_places,
        leaves=("q", "r"),
        options={"out_shape": (heads, length, length)},
    )
    yield Exhibit(
        "sums of several tables",
        "y[n,f] = E[a[n],f] + F[b[n],f] + G[c[n],f]",
        {
            **{name: d.normal(size, width) for name, size in (("E", 50), ("F", 500), ("G", 5000))},
            **{
                name: d.below(size, d.e // 4) for name, size in (("a", 50), ("b", 500), ("c", 5000))
            },
        },
        lambda E, F, G, a, b, c: E[a] + F[b] + G[c],
        leaves=("E", "F", "G"),
    )


def _quadratic_forms(x: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    return ((x @ A) * x).sum(1)


def _scores_of_relative_places(q: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    places = torch.arange(q.shape[1], device=q.device)
    at = places - places[:, None] + q.shape[1] - 1
    return (q @ r.mT).gather(2, at.expand(q.shape[0], -1, -1))
