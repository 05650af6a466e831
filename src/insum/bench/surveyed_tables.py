"""Statements over tables and lists of rows that ``insum bench survey`` asks for."""

from __future__ import annotations

from collections.abc import Iterator

from insum.bench.gallery import Exhibit
from insum.bench.survey_tensors import SurveyTensors

# --- lists of rows --------------------------------------------------------------------------------


def tables(d: SurveyTensors) -> Iterator[Exhibit]:
    for named, queries, count, width in (
        ("three nearest", 2 * d.n, 3, 96),
        ("eight corners", 4 * d.n, 8, 16),
        ("bags of 32", d.t, 32, 128),
    ):
        columns = d.about(width)
        yield Exhibit(
            f"{named}, {columns} wide",
            "y[q,c] = w[q,k] * x[t[q,k],c]",
            {
                "w": d.normal(queries, count),
                "x": d.normal(d.n, columns),
                "t": d.below(d.n, queries, count),
            },
            lambda w, x, t: (w[:, :, None] * x[t]).sum(1),
            leaves=("w", "x"),
        )
    width, after = d.about(64), d.about(64)
    yield Exhibit(
        "a layer on nine neighbours",
        "y[q,o] = x[t[q,k],c] * W[k,c,o]",
        {"x": d.normal(d.n, width), "t": d.below(d.n, d.n, 9), "W": d.normal(9, width, after)},
        lambda x, t, W: x[t].flatten(1) @ W.flatten(0, 1),
        leaves=("x", "W"),
    )


def lookups(d: SurveyTensors) -> Iterator[Exhibit]:
    places, width = d.about(16), d.about(256)
    yield Exhibit(
        "tokens and places",
        "y[b,t,f] = E[i[b,t],f] + P[t,f]",
        {
            "E": d.normal(d.n, width),
            "P": d.normal(places, width),
            "i": d.below(d.n, d.t // places, places),
        },
        lambda E, P, i: E[i] + P,
        leaves=("E", "P"),
    )
    yield Exhibit(
        "pairs of fields",
        "y[b,f,g] = E[i[b,f],k] * E[i[b,g],k]",
        {"E": d.normal(d.n, d.about(32)), "i": d.below(d.n, d.t // 2, d.about(26))},
        lambda E, i: E[i] @ E[i].mT,
        leaves=("E",),
    )
    codes = d.about(256)
    yield Exhibit(
        "codes of eight parts",
        "y[n] = T[m,q[n,m]]",
        {"T": d.normal(8, codes), "q": d.below(codes, d.e, 8)},
        lambda T, q: T.gather(1, q.T).sum(0),
        leaves=("T",),
    )
    batch, width, after = d.about(256), d.about(1024), d.about(1024)
    yield Exhibit(
        "weights of a code book",
        "y[b,o] = x[b,i] * c[q[i,o]]",
        {"x": d.normal(batch, width), "c": d.normal(16), "q": d.below(16, width, after)},
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
    for columns in map(d.about, (3, 64)):
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
        {"x": d.normal(d.about(64), d.t), "w": d.normal(d.n, 4), "t": d.below(d.t, d.n, 4)},
        lambda x, w, t: (x[:, t] * w).sum(-1),
        leaves=("x", "w"),
    )
    batch, width, after = d.about(256), d.about(1024), d.about(1024)
    yield Exhibit(
        "rows of a low rank",
        "y[b,o] = x[b,i] * A[a[b],i,r] * B[a[b],r,o]",
        {
            "x": d.normal(batch, width),
            "A": d.normal(32, width, 16),
            "B": d.normal(32, 16, after),
            "a": d.below(32, batch),
        },
        lambda x, A, B, a: (x[:, None] @ A[a] @ B[a])[:, 0],
        leaves=("x", "A", "B"),
    )
