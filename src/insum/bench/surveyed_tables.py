"""Statements over tables and lists of rows that ``insum bench survey`` asks for."""

from __future__ import annotations

from collections.abc import Iterator

from insum.bench.gallery import Exhibit
from insum.bench.survey_tensors import SurveyTensors

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


def lookups(d: SurveyTensors) -> Iterator[Exhibit]:
    tokens = d.t // 16
    yield Exhibit(
        "tokens and places",
        "y[b,t,f] = E[i[b,t],f] + P[t,f]",
        {"E": d.normal(d.n, 256), "P": d.normal(16, 256), "i": d.below(d.n, tokens, 16)},
        lambda E, P, i: E[i] + P,
        leaves=("E", "P"),
    )
    yield Exhibit(
        "pairs of fields",
        "y[b,f,g] = E[i[b,f],k] * E[i[b,g],k]",
        {"E": d.normal(d.n, 32), "i": d.below(d.n, d.t // 2, 26)},
        lambda E, i: E[i] @ E[i].mT,
        leaves=("E",),
    )
    yield Exhibit(
        "codes of eight parts",
        "y[n] = T[m,q[n,m]]",
        {"T": d.normal(8, 256), "q": d.below(256, d.e, 8)},
        lambda T, q: T.gather(1, q.T).sum(0),
        leaves=("T",),
    )
    yield Exhibit(
        "weights of a code book",
        "y[b,o] = x[b,i] * c[q[i,o]]",
        {"x": d.normal(256, 1024), "c": d.normal(16), "q": d.below(16, 1024, 1024)},
        lambda x, c, q: x @ c[q],
        leaves=("x", "c"),
    )
    yield Exhibit(
        "numbers of sixteen each",
        "y[r] = v[r,k] * x[c[r,k]]",
        {"v": d.normal(d.n, 16), "x": d.normal(d.n), "c": d.below(d.n, d.n, 16)},
        lambda v, x, c: (v * x[c]).sum(1),
        leaves=("v", "x"),
    )


def choices(d: SurveyTensors) -> Iterator[Exhibit]:
    for columns in (3, 64):
        yield Exhibit(
            f"rows chosen, {columns} wide",
            "y[p,f] = x[i[p],f]",
            {"x": d.normal(d.n, columns), "i": d.below(d.n, d.e)},
            lambda x, i: x[i],
            leaves=("x",),
        )
    yield Exhibit(
        "four corners of a picture",
        "y[c,p] = w[p,k] * x[c,t[p,k]]",
        {"x": d.normal(64, d.t), "w": d.normal(d.n, 4), "t": d.below(d.t, d.n, 4)},
        lambda x, w, t: (x[:, t] * w).sum(-1),
        leaves=("x", "w"),
    )
    yield Exhibit(
        "rows of a low rank",
        "y[b,o] = x[b,i] * A[a[b],i,r] * B[a[b],r,o]",
        {
            "x": d.normal(256, 1024),
            "A": d.normal(32, 1024, 16),
            "B": d.normal(32, 16, 1024),
            "a": d.below(32, 256),
        },
        lambda x, A, B, a: (x[:, None] @ A[a] @ B[a])[:, 0],
        leaves=("x", "A", "B"),
    )
