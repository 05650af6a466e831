"""Statements with dense parts, windows and blocks that ``insum bench survey`` asks for."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch.nn import functional as F

from insum.bench.gallery import Exhibit
from insum.bench.survey_tensors import SurveyTensors, added_rows, einsum

# --- dense ----------------------------------------------------------------------------------------


def matrices(d: SurveyTensors) -> Iterator[Exhibit]:
    yield Exhibit(
        "blocks on the diagonal",
        "Y[b,n,o] = X[b,n,i] * W[n,i,o]",
        {"X": d.normal(d.t, 16, 64), "W": d.normal(16, 64, 64)},
        functools.partial(einsum, "bni,nio->bno"),
        leaves=("X", "W"),
    )
    yield Exhibit(
        "three factors of a tensor",
        "y[a,f] = T[a,b,c] * B[b,f] * D[c,f]",
        {"T": d.normal(64, 800, 128), "B": d.normal(800, 32), "D": d.normal(128, 32)},
        functools.partial(einsum, "abc,bf,cf->af"),
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


def blocks(d: SurveyTensors) -> Iterator[Exhibit]:
    number, rows = d.t // 8, max(2, d.t // 64)
    places = {"r": d.rising(rows, number), "c": d.below(rows, number)}
    yield Exhibit(
        "scores in blocks of 64",
        "S[b,q,k] = Q[r[b],q,d] * K[c[b],k,d]",
        {"Q": d.normal(rows, 64, 64), "K": d.normal(rows, 64, 64), **places},
        lambda Q, K, r, c: Q[r] @ K[c].mT,
        leaves=("Q", "K"),
    )
    yield Exhibit(
        "values in blocks of 64",
        "O[r[b],q,d] = P[b,q,k] * V[c[b],k,d]",
        {"P": d.normal(number, 64, 64), "V": d.normal(rows, 64, 64), **places},
        lambda P, V, r, c: added_rows(r, P @ V[c], rows),
        leaves=("P", "V"),
        options={"out_shape": (rows, 64, 64)},
    )


def windows(d: SurveyTensors) -> Iterator[Exhibit]:
    length = d.t // 4
    yield Exhibit(
        "scores of 32 before",
        "s[b,t,r] = q[b,t,f] * k[b,t+r,f]",
        {"q": d.normal(8, length, 64), "k": d.normal(8, length + 31, 64)},
        lambda q, k: (q[:, :, None] * k.unfold(1, 32, 1).mT).sum(-1),
        leaves=("q", "k"),
        options={"out_shape": (8, length, 32)},
    )
    yield Exhibit(
        "sums of 16 neighbours",
        "y[t,f] = x[t+r,f]",
        {"x": d.normal(d.t + 15, 128)},
        lambda x: x.unfold(0, 16, 1).sum(-1),
        leaves=("x",),
        options={"out_shape": (d.t, 128), "sizes": {"r": 16}},
    )


def products(d: SurveyTensors) -> Iterator[Exhibit]:
    yield Exhibit(
        "a bilinear layer",
        "y[b,o] = x[b,i] * W[o,i,j] * z[b,j]",
        {"x": d.normal(d.t // 4, 64), "W": d.normal(64, 64, 64), "z": d.normal(d.t // 4, 64)},
        functools.partial(einsum, "bi,oij,bj->bo"),
        leaves=("x", "W", "z"),
    )
    yield Exhibit(
        "a weighted covariance",
        "C[i,j] = w[n] * X[n,i] * X[n,j]",
        {"w": d.normal(8 * d.t), "X": d.normal(8 * d.t, 96)},
        lambda w, X: (w[:, None] * X).mT @ X,
        leaves=("w", "X"),
    )
    yield Exhibit(
        "a core and three factors",
        "T[a,b,c] = G[i,j,k] * A[a,i] * B[b,j] * C[c,k]",
        {
            "G": d.normal(16, 16, 16),
            "A": d.normal(128, 16),
            "B": d.normal(128, 16),
            "C": d.normal(d.t // 32, 16),
        },
        functools.partial(einsum, "ijk,ai,bj,ck->abc"),
        leaves=("G", "A", "B", "C"),
    )
    for columns in (3, 64):
        yield Exhibit(
            f"distances of all pairs, {columns} wide",
            "D[i,j] = pow(X[i,c] - Y[j,c], 2)",
            {"X": d.normal(d.t // 4, columns), "Y": d.normal(d.t // 4, columns)},
            lambda X, Y: (X[:, None] - Y).square().sum(-1),
            leaves=("X", "Y"),
        )
    yield Exhibit(
        "rows and columns scaled",
        "y[i,j] = a[i] * x[i,j] * b[j]",
        {"a": d.normal(d.t), "x": d.normal(d.t, 1000), "b": d.normal(1000)},
        lambda a, x, b: a[:, None] * x * b,
        leaves=("a", "x", "b"),
    )
    yield Exhibit(
        "three dimensions turned",
        "y[i,h,j] = x[j,i,h]",
        {"x": d.normal(d.t // 8, 64, 96)},
        lambda x: x.permute(1, 2, 0).contiguous(),
    )
