"""Statements over edges and entries that ``insum bench survey`` asks for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from insum.bench.gallery import Exhibit
from insum.bench.survey_tensors import SurveyTensors, added_rows

# --- one value or one row for each entry ----------------------------------------------------------


def rows(d: SurveyTensors) -> Iterator[Exhibit]:
    i, j = d.below(d.n, d.e), d.below(d.n, d.e)
    ends = {"i": i, "j": j}
    for named in ((8, 16), (4, 64), (3, 20)):
        heads, depth = map(d.about, named)
        both = {"Q": d.normal(d.n, heads, depth), "K": d.normal(d.n, heads, depth)}
        yield Exhibit(
            f"scores of {heads} heads of {depth}",
            "s[p,h] = Q[i[p],h,d] * K[j[p],h,d]",
            {**both, **ends},
            lambda Q, K, i, j: (Q[i] * K[j]).sum(-1),
            leaves=("Q", "K"),
        )
    width, number = d.about(128), d.about(50)
    kinds = {"U": d.normal(d.n, width), "R": d.normal(number, width), "t": d.below(number, d.e)}
    yield Exhibit(
        f"triples, {width} wide",
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
    shape = d.about(8), d.n // 2, d.about(32)
    wide = {"X": d.normal(*shape), "Y": d.normal(*shape)}
    halved = {"i": i % (d.n // 2), "j": j % (d.n // 2)}
    yield Exhibit(
        "scores over a batch",
        "s[p] = X[b,i[p],n] * Y[b,j[p],n]",
        {**wide, **halved},
        lambda X, Y, i, j: (X[:, i] * Y[:, j]).sum((0, 2)),
    )
    width, taken = d.about(512), d.about(2048)
    yield Exhibit(
        "columns gathered",
        "y[b,p] = x[b,t[p]] * w[p]",
        {"x": d.normal(d.t, width), "t": d.below(width, taken), "w": d.normal(taken)},
        lambda x, t, w: x[:, t] * w,
        leaves=("x", "w"),
    )


# --- sums over entries ----------------------------------------------------------------------------


def messages(d: SurveyTensors) -> Iterator[Exhibit]:
    i, j = d.below(d.n, d.e), d.below(d.n, d.e)
    ends, n = {"i": i, "j": j}, d.n
    width, before = d.about(64), d.about(64)
    x, z, w = d.normal(n, width), d.normal(n, width), d.normal(before, width)
    shape = {"out_shape": (n, width)}
    yield Exhibit(
        "a layer along edges",
        "y[i[p],o] = x[j[p],c] * W[c,o]",
        {"x": d.normal(n, before), "W": w, **ends},
        lambda x, W, i, j: added_rows(i, (x @ W)[j], n),
        leaves=("x", "W"),
        options=shape,
    )
    yield Exhibit(
        "a layer on messages",
        "y[i[p],o] = m[p,c] * W[c,o]",
        {"m": d.normal(d.e, before), "W": w, "i": i},
        lambda m, W, i: added_rows(i, m, n) @ W,
        leaves=("m", "W"),
        options=shape,
    )
    yield Exhibit(
        "two kinds of rows",
        "y[i[p],n] = v[p] * x[j[p],n] + v[p] * z[j[p],n]",
        {"v": d.normal(d.e), "x": x, "z": z, **ends},
        lambda v, x, z, i, j: added_rows(i, v[:, None] * (x + z)[j], n),
        leaves=("v", "x", "z"),
        options=shape,
    )
    yield Exhibit(
        "gated messages",
        "y[i[p],c] = sigmoid(a[i[p],c] + b[j[p],c]) * x[j[p],c]",
        {"a": x, "b": z, "x": x, **ends},
        lambda a, b, x, i, j: added_rows(i, torch.sigmoid(a[i] + b[j]) * x[j], n),
        leaves=("a", "b", "x"),
        options=shape,
    )


def totals(d: SurveyTensors) -> Iterator[Exhibit]:
    n, ends = d.n, {"i": d.below(d.n, d.e), "j": d.below(d.n, d.e)}
    yield Exhibit(
        "spread over many places",
        "y[i[p]] = v[p] * x[j[p]]",
        {"v": d.normal(d.e), "x": d.normal(n), **ends},
        lambda v, x, i, j: added_rows(i, v * x[j], n),
        leaves=("v", "x"),
        options={"out_shape": (n,)},
    )
    number = d.about(512)
    few = d.below(number, d.e)
    yield Exhibit(
        "counts of pairs",
        "h[i[p],j[p]] = v[p]",
        {"v": d.normal(d.e), "i": few, "j": few.flip(0).contiguous()},
        lambda v, i, j: v.new_zeros(number, number).index_put((i, j), v, accumulate=True),
        leaves=("v",),
        options={"out_shape": (number, number)},
    )
    groups, members = max(2, d.n // 20), d.e // 2
    width, beside = d.about(16), d.about(16)
    both = {"X": d.normal(members, width), "Y": d.normal(members, beside)}
    yield Exhibit(
        "products of groups",
        "G[g[p],a,b] = X[p,a] * Y[p,b]",
        {**both, "g": d.rising(groups, members)},
        lambda X, Y, g: added_rows(g, X[:, :, None] * Y[:, None, :], groups),
        leaves=("X", "Y"),
        options={"out_shape": (groups, width, beside)},
    )


def batches(d: SurveyTensors) -> Iterator[Exhibit]:
    ends, n, half = {"s": d.below(d.n, d.e), "d": d.below(d.n, d.e)}, d.n, d.n // 4
    few = {"s": d.below(half, d.e // 4), "d": d.below(half, d.e // 4), "v": d.normal(d.e // 4)}
    for named in ((8, 8), (4, 32)):
        heads, depth = map(d.about, named)
        yield Exhibit(
            f"attention of {heads} heads of {depth}",
            "y[d[e],h,f] = a[e,h] * x[s[e],h,f]",
            {"a": d.normal(d.e, heads), "x": d.normal(n, heads, depth), **ends},
            lambda a, x, s, d: added_rows(d, a[:, :, None] * x[s], n),
            leaves=("a", "x"),
            options={"out_shape": (n, heads, depth)},
        )
    batch = d.about(8), half, d.about(32)
    yield Exhibit(
        "a batch over one graph",
        "y[b,d[e],f] = v[e] * x[b,s[e],f]",
        {"x": d.normal(*batch), **few},
        lambda x, s, d, v: x.new_zeros(batch).index_add(1, d, v[:, None] * x[:, s]),
        leaves=("x", "v"),
        options={"out_shape": batch},
    )
    channels, width, heads = d.about(64), d.about(64), d.about(4)
    yield Exhibit(
        "channels first over one graph",
        "y[c,d[e]] = v[e] * x[c,s[e]]",
        {"x": d.normal(channels, half), **few},
        lambda x, s, d, v: x.new_zeros(channels, half).index_add(1, d, v * x[:, s]),
        leaves=("x", "v"),
        options={"out_shape": (channels, half)},
    )
    # of nothing there is no largest, and no error
    all_met = {**ends, "d": torch.cat([torch.arange(n, device=ends["d"].device), ends["d"][n:]])}
    yield Exhibit(
        "largest of neighbours",
        "y[d[e],f] max= x[s[e],f] + w[e,f]",
        {"x": d.normal(n, width), "w": d.normal(d.e, width), **all_met},
        lambda x, w, s, d: x.new_full((n, width), -torch.inf).index_reduce(0, d, x[s] + w, "amax"),
        options={"out_shape": (n, width)},
    )
    scores = {"S": d.normal(d.e, heads), "m": d.normal(n, heads).abs(), "d": ends["d"]}
    yield Exhibit(
        "denominators of a softmax",
        "z[d[e],h] = exp(S[e,h] - m[d[e],h])",
        scores,
        lambda S, m, d: added_rows(d, (S - m[d]).exp(), n),
        leaves=("S",),
        options={"out_shape": (n, heads)},
    )
    yield Exhibit(
        "a tensor times two vectors",
        "y[i[p]] = v[p] * a[s[p]] * b[d[p]]",
        {"v": d.normal(d.e), "a": d.normal(n), "b": d.normal(n), "i": d.rising(n, d.e), **ends},
        lambda v, a, b, i, s, d: added_rows(i, v * a[s] * b[d], n),
        leaves=("v", "a", "b"),
        options={"out_shape": (n,)},
    )


def classes(d: SurveyTensors) -> Iterator[Exhibit]:
    for named in ((10, 64), (1000, 64), (20, 3)):
        number, columns = map(d.about, named)
        yield Exhibit(
            f"sums of {number} classes, {columns} wide",
            "M[c[n],f] = X[n,f]",
            {"X": d.normal(d.e // 2, columns), "c": d.below(number, d.e // 2)},
            lambda X, c, number=number: added_rows(c, X, number),
            leaves=("X",),
            options={"out_shape": (number, columns)},
        )
    order, width = torch.randperm(d.e // 2, device=d.draw.device), d.about(48)
    yield Exhibit(
        "rows put in order",
        "y[i[p],f] = x[p,f]",
        {"x": d.normal(d.e // 2, width), "i": order},
        lambda x, i: torch.zeros_like(x).index_copy(0, i, x),
        leaves=("x",),
        options={"out_shape": (d.e // 2, width)},
    )
