"""Statements with dense parts, windows and blocks that ``insum bench survey`` asks for."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch.nn import functional as F

from insum.bench.gallery import Exhibit
from insum.bench.survey_tensors import SurveyTensors, added_rows, einsum

# --- dense ----------------------------------------------------------------------------------------


def matrices(d: SurveyTensors) -> Iterator[Exhibit]:
    number, width, after = d.about(16), d.about(64), d.about(64)
    yield Exhibit(
        "blocks on the diagonal",
        "Y[b,n,o] = X[b,n,i] * W[n,i,o]",
        {"X": d.normal(d.t, number, width), "W": d.normal(number, width, after)},
        functools.partial(einsum, "bni,nio->bno"),
        leaves=("X", "W"),
    )
    (a, b, c), rank = map(d.about, (64, 800, 128)), d.about(32)
    yield Exhibit(
        "three factors of a tensor",
        "y[a,f] = T[a,b,c] * B[b,f] * D[c,f]",
        {"T": d.normal(a, b, c), "B": d.normal(b, rank), "D": d.normal(c, rank)},
        functools.partial(einsum, "abc,bf,cf->af"),
        leaves=("B", "D"),
    )
    for rows_, named in ((8 * d.t, 300), (d.t, 1000), (64 * d.t, 8)):
        columns = d.about(named)
        yield Exhibit(
            f"sums of {columns} columns",
            "y[b] = x[a,b]",
            {"x": d.normal(rows_, columns)},
            lambda x: x.sum(0),
        )
    batch, channels = d.about(8), d.about(256)
    yield Exhibit(
        "channels apart, seven wide",
        "y[b,c,t] = x[b,c,t+k] * w[c,k]",
        {"x": d.normal(batch, channels, d.t // 4 + 6), "w": d.normal(channels, 7)},
        lambda x, w: F.conv1d(x, w[:, None], groups=channels),
        leaves=("x", "w"),
        options={"out_shape": (batch, channels, d.t // 4)},
    )


def blocks(d: SurveyTensors) -> Iterator[Exhibit]:
    number, rows = d.t // 8, max(2, d.t // 64)
    places = {"r": d.rising(rows, number), "c": d.below(rows, number)}
    side, width = d.about(64), d.about(64)
    yield Exhibit(
        f"scores in blocks of {side}",
        "S[b,q,k] = Q[r[b],q,d] * K[c[b],k,d]",
        {"Q": d.normal(rows, side, width), "K": d.normal(rows, side, width), **places},
        lambda Q, K, r, c: Q[r] @ K[c].mT,
        leaves=("Q", "K"),
    )
    yield Exhibit(
        f"values in blocks of {side}",
        "O[r[b],q,d] = P[b,q,k] * V[c[b],k,d]",
        {"P": d.normal(number, side, side), "V": d.normal(rows, side, width), **places},
        lambda P, V, r, c: added_rows(r, P @ V[c], rows),
        leaves=("P", "V"),
        options={"out_shape": (rows, side, width)},
    )


def windows(d: SurveyTensors) -> Iterator[Exhibit]:
    length, batch, width = d.t // 4, d.about(8), d.about(64)
    before, beside = d.about(32), d.about(16)
    yield Exhibit(
        f"scores of {before} before",
        "s[b,t,r] = q[b,t,f] * k[b,t+r,f]",
        {"q": d.normal(batch, length, width), "k": d.normal(batch, length + before - 1, width)},
        lambda q, k: (q[:, :, None] * k.unfold(1, before, 1).mT).sum(-1),
        leaves=("q", "k"),
        options={"out_shape": (batch, length, before)},
    )
    yield Exhibit(
        f"sums of {beside} neighbours",
        "y[t,f] = x[t+r,f]",
        {"x": d.normal(d.t + beside - 1, 2 * width)},
        lambda x: x.unfold(0, beside, 1).sum(-1),
        leaves=("x",),
        options={"out_shape": (d.t, 2 * width), "sizes": {"r": beside}},
    )


def products(d: SurveyTensors) -> Iterator[Exhibit]:
    rows, i, j, o = d.t // 4, *map(d.about, (64, 64, 64))
    yield Exhibit(
        "a bilinear layer",
        "y[b,o] = x[b,i] * W[o,i,j] * z[b,j]",
        {"x": d.normal(rows, i), "W": d.normal(o, i, j), "z": d.normal(rows, j)},
        functools.partial(einsum, "bi,oij,bj->bo"),
        leaves=("x", "W", "z"),
    )
    yield Exhibit(
        "a weighted covariance",
        "C[i,j] = w[n] * X[n,i] * X[n,j]",
        {"w": d.normal(8 * d.t), "X": d.normal(8 * d.t, d.about(96))},
        lambda w, X: (w[:, None] * X).mT @ X,
        leaves=("w", "X"),
    )
    yield Exhibit(
        "a core and three factors",
        "T[a,b,c] = G[i,j,k] * A[a,i] * B[b,j] * C[c,k]",
        {
            "G": d.normal(16, 16, 16),
            "A": d.normal(d.about(128), 16),
            "B": d.normal(d.about(128), 16),
            "C": d.normal(d.t // 32, 16),
        },
        functools.partial(einsum, "ijk,ai,bj,ck->abc"),
        leaves=("G", "A", "B", "C"),
    )
    for columns in map(d.about, (3, 64)):
        yield Exhibit(
            f"distances of all pairs, {columns} wide",
            "D[i,j] = pow(X[i,c] - Y[j,c], 2)",
            {"X": d.normal(d.t // 4, columns), "Y": d.normal(d.t // 4, columns)},
            lambda X, Y: (X[:, None] - Y).square().sum(-1),
            leaves=("X", "Y"),
        )
    width, i, j = map(d.about, (1000, 64, 96))
    yield Exhibit(
        "rows and columns scaled",
        "y[i,j] = a[i] * x[i,j] * b[j]",
        {"a": d.normal(d.t), "x": d.normal(d.t, width), "b": d.normal(width)},
        lambda a, x, b: a[:, None] * x * b,
        leaves=("a", "x", "b"),
    )
    yield Exhibit(
        "three dimensions turned",
        "y[i,h,j] = x[j,i,h]",
        {"x": d.normal(d.t // 8, i, j)},
        lambda x: x.permute(1, 2, 0).contiguous(),
    )
