"""The ways of a CPU: each is taken where it should be, and gives what the oracle gives."""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.bench import tensor_product
from insum.call import on_host
from insum.call.prepared import BoundCall, kinds_of
from insum.call.request import request_of
from insum.formats import COO, GroupCOO
from insum.graph.contraction import cheapest
from insum.graph.lower import lower
from insum.host import (
    bands,
    block_rows,
    blocks,
    chunks,
    diagonals,
    operations,
    pattern_axes,
    patterns,
    places,
    rows,
    runs,
)
from insum.host import choose as chooser
from insum.host.arguments import HostCall
from insum.host.places import LastWeights, Lowering
from insum.testing import Case, assert_close, draw_cases
from scatters import draw_scatters

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small statements too and at their first call, in chunks so small that there are several."""
    for name in ("LEAST_WORK", "LEAST_NEW_WORK", "LEAST_FIRST_WORK"):
        monkeypatch.setattr(chooser, name, 0)
    monkeypatch.setattr(HostCall, "comes_back", lambda self, key: True)
    monkeypatch.setattr(patterns, "STARTING", 0)
    monkeypatch.setattr(blocks, "LEAST_BLOCK", 1 << 15)
    monkeypatch.setattr(chunks, "AT_ONCE", 256)
    monkeypatch.setattr(runs, "AT_ONCE", 1 << 14)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


@dataclass(frozen=True)
class Statement:
    """A statement, how to draw its arguments, and the way that it takes."""

    way: str
    text: str
    draw: Callable[[torch.dtype], dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.way}: {self.text}"


def whole(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape)


def real(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


SPMM = "C[AM[p],n] = AV[p] * B[AK[p],n]"
GROUPED = "C[AM[p],n] = AV[p,q] * B[AK[p,q],n]"
CONVOLUTION = "Out[x,m] = In[Nb[x,z],c] * W[z,c,m]"
EXPERTS = "Y[p,n] = X[tok[p],k] * W[e[p],k,n]"
PRODUCT = "Z[b,I[p],w] = V[p] * X[b,J[p],u] * Y[b,K[p]] * W[b,L[p],u,w]"
SHORT = dict(zip("IJKL", ((4, 12), (4, 12), (3, 12), (5, 12))))


def pattern(dtype: torch.dtype, *weights: int) -> dict[str, Any]:
    short = {name: whole(*size) for name, size in SHORT.items()}
    return {
        **short,
        "V": real(dtype, 12),
        "X": real(dtype, 20, 4, 16),
        "Y": real(dtype, 20, 3),
        "W": real(dtype, 20, 5, *weights),
    }


STATEMENTS = [
    Statement(
        "rows",
        SPMM,
        lambda d: {
            "AM": whole(30, 5000),
            "AK": whole(40, 5000),
            "AV": real(d, 5000),
            "B": real(d, 40, 5),
        },
        {"out_shape": (30, 5)},
    ),
    Statement(
        "rows",
        SPMM,
        lambda d: {
            "AM": whole(300, 900).sort().values.int(),
            "AK": whole(400, 900).int(),
            "AV": real(d, 900),
            "B": real(d, 7, 400).T,
        },
        {"out_shape": (300, 7)},
    ),
    Statement(
        "rows",
        GROUPED,
        lambda d: {
            "AM": whole(300, 600),
            "AK": whole(400, 600, 4, low=-1),
            "AV": real(d, 600, 8)[:, ::2],
            "B": real(d, 400, 70),
        },
        {"out_shape": (300, 70), "padded": ("AK",)},
    ),
    Statement(
        "rows",
        "C[d[e],h,f] = a[e,h] * X[s[e],h,f]",
        lambda d: {
            "d": whole(30, 5000),
            "s": whole(40, 5000),
            "a": real(d, 5000, 3),
            "X": real(d, 40, 3, 4),
        },
        {"out_shape": (30, 3, 4)},
    ),
    Statement(
        "rows",
        "C[d[e],f] = -0.5 * r[s[e]] * a[e] * t[d[e]] * X[s[e],f]",
        lambda d: {
            "d": whole(40, 5000),
            "s": whole(40, 5000),
            "a": real(d, 5000),
            "r": real(d, 40),
            "t": real(d, 40),
            "X": real(d, 40, 8),
        },
        {"out_shape": (40, 8)},
    ),
    Statement(
        "rows",
        "C[d[e],f] = X[s[e],f]",
        lambda d: {"d": whole(40, 5000), "s": whole(40, 5000), "X": real(d, 40, 8)},
        {"out_shape": (40, 8)},
    ),
    Statement(
        "rows",
        "Y[i,AM[p]] = AV[p] * X[i,AK[p]]",
        lambda d: {
            "AM": whole(30, 5000),
            "AK": whole(40, 5000),
            "AV": real(d, 5000),
            "X": real(d, 9, 40),
        },
        {"out_shape": (9, 30)},
    ),
    Statement(
        "dots",
        "S[p] = A[AM[p],n] * B[AK[p],n]",
        lambda d: {
            "AM": whole(30, 5000),
            "AK": whole(40, 5000),
            "A": real(d, 30, 6),
            "B": real(d, 40, 6),
        },
    ),
    Statement(
        "dots",
        "S[r[p]] = v[p,q] * A[AM[p],n] * B[AK[p,q],n]",
        lambda d: {
            "r": whole(9, 1500),
            "v": real(d, 1500, 3),
            "AM": whole(30, 1500),
            "AK": whole(40, 1500, 3, low=-1),
            "A": real(d, 30, 6),
            "B": real(d, 40, 6),
        },
        {"out_shape": (9,), "padded": ("AK",)},
    ),
    Statement(
        "runs",
        CONVOLUTION,
        lambda d: {"Nb": whole(600, 600, 9, low=-1), "In": real(d, 600, 6), "W": real(d, 9, 6, 5)},
        {"padded": ("Nb",)},
    ),
    Statement(
        "runs",
        EXPERTS,
        lambda d: {
            "tok": whole(200, 5000),
            "e": whole(4, 5000),
            "X": real(d, 200, 6),
            "W": real(d, 4, 6, 5),
        },
    ),
    Statement(
        "runs",
        EXPERTS,
        lambda d: {
            "tok": whole(200, 5000),
            "e": whole(4, 5000).sort().values,
            "X": real(d, 200, 6),
            "W": real(d, 4, 6, 5),
        },
    ),
    Statement(
        "runs",
        "Y[d[p],n] = s[p] * X[tok[p],k] * W[e[p],k,n]",
        lambda d: {
            "d": whole(3000, 5000),
            "s": real(d, 5000),
            "tok": whole(200, 5000),
            "e": whole(4, 5000),
            "X": real(d, 200, 6),
            "W": real(d, 4, 6, 5),
        },
        {"out_shape": (3000, 5)},
    ),
    Statement(
        "runs",
        "G[e[p],k,n] = s[p] * X[tok[p],k] * Y[p,n]",
        lambda d: {
            "s": real(d, 5000),
            "tok": whole(3000, 5000),
            "e": whole(4, 5000),
            "X": real(d, 3000, 6),
            "Y": real(d, 5000, 5),
        },
        {"out_shape": (4, 6, 5)},
    ),
    Statement(
        "aggregated",
        "Y[d[p],n] = s[p] * X[tok[p],k] * W[e[p],k,n]",
        lambda d: {
            "d": whole(50, 5000),
            "s": real(d, 5000),
            "tok": whole(200, 5000),
            "e": whole(4, 5000),
            "X": real(d, 200, 6),
            "W": real(d, 4, 6, 5),
        },
        {"out_shape": (50, 5)},
    ),
    Statement(
        "aggregated",
        "G[e[p],k,n] = s[p] * X[tok[p],k] * Y[p,n]",
        lambda d: {
            "s": real(d, 5000),
            "tok": whole(200, 5000),
            "e": whole(4, 5000),
            "X": real(d, 200, 6),
            "Y": real(d, 5000, 5),
        },
        {"out_shape": (4, 6, 5)},
    ),
    Statement(
        "aggregated",
        "Y[d[p],n,k] = X[p,n,k] * w[k]",
        lambda d: {
            "d": whole(500, 5000, low=-1),
            "X": real(d, 5000, 2, 6),
            "w": real(d, 6),
        },
        {"out_shape": (500, 2, 6), "padded": ("d",)},
    ),
    Statement(
        "aggregated",
        "D[n] = X[s[p],n] * G[d[p],n] * v[p]",
        lambda d: {
            "s": whole(800, 5000),
            "d": whole(500, 5000),
            "X": real(d, 800, 6),
            "G": real(d, 500, 6),
            "v": real(d, 5000),
        },
    ),
    Statement(
        "scaled",
        "Y[d[p],n] = v[p] * X[n,s[p]] * w[n]",
        lambda d: {
            "d": whole(500, 5000),
            "s": whole(300, 5000, low=-1),
            "v": real(d, 5000),
            "X": real(d, 6, 300),
            "w": real(d, 6),
        },
        {"out_shape": (500, 6), "padded": ("s",)},
    ),
    Statement(
        "scaled",
        "S[p] = 2 * A[s[p],n] * B[d[p],n] * w[n]",
        lambda d: {
            "d": whole(500, 5000),
            "s": whole(300, 5000),
            "A": real(d, 300, 6),
            "B": real(d, 500, 6),
            "w": real(d, 6),
        },
    ),
    Statement(
        "blocks",
        "C[AM[p],a,n] = s[p] * AV[p,q,a,b] * B[AK[p,q],b,n]",
        lambda d: {
            "s": real(d, 20),
            "AM": whole(16, 20),
            "AK": whole(16, 20, 2, low=-1),
            "AV": real(d, 20, 2, 8, 16),
            "B": real(d, 16, 16, 256),
        },
        {"out_shape": (16, 8, 256), "padded": ("AK",)},
    ),
    Statement(
        "block rows",
        "C[AM[p],a,n] = AV[p,a,b] * B[AK[p],b,n]",
        lambda d: {
            "AM": whole(16, 40).sort().values,
            "AK": whole(16, 40),
            "AV": real(d, 40, 8, 8),
            "B": real(d, 16, 8, 30),
        },
        {"out_shape": (16, 8, 30)},
    ),
    Statement(
        "block rows",
        "C[n,AM[p],a] = B[b,AK[p,q],n] * AV[p,q,b,a] * s[p]",
        lambda d: {
            "s": real(d, 20),
            "AM": whole(16, 20),
            "AK": whole(16, 20, 2, low=-1),
            "AV": real(d, 20, 2, 8, 8),
            "B": real(d, 8, 16, 30),
        },
        {"out_shape": (30, 16, 8), "padded": ("AK",)},
    ),
    Statement("patterns", PRODUCT, lambda d: pattern(d, 16, 16), {"out_shape": (20, 4, 16)}),
    Statement(
        "patterns",
        "Z[b,I[p],u] = V[p] * X[b,J[p],u] * Y[b,K[p]] * W[b,L[p],u]",
        lambda d: {**pattern(d, 16), "I": torch.arange(12), "L": torch.arange(12) // 3},
        {"out_shape": (20, 12, 16)},
    ),
    Statement(
        "by row",
        "O[r[p],n] = X[c[p],n] * M[p,n]",
        lambda d: {
            "r": whole(90, 5000),
            "c": whole(80, 5000),
            "X": real(d, 80, 6),
            "M": real(d, 5000, 6),
        },
        {"out_shape": (90, 6)},
    ),
    Statement(
        "by row",
        "O[a,r[p],b] = tanh(X[a,c[p],b] - 2 * M[p,b]) + Y[a,c[p],b] * v[p]",
        lambda d: {
            "r": whole(90, 900, low=-1).int(),
            "c": whole(80, 900),
            "X": real(d, 3, 80, 4),
            "Y": real(d, 3, 80, 4),
            "M": real(d, 900, 4),
            "v": real(d, 900),
        },
        {"out_shape": (3, 90, 4), "padded": ("r",)},
    ),
    Statement(
        "chunks",
        "O[p,n] = X[c[p],n] * M[r[p],n]",
        lambda d: {
            "r": whole(90, 5000),
            "c": whole(80, 5000),
            "X": real(d, 80, 6),
            "M": real(d, 90, 6),
        },
    ),
    Statement(
        "chunks",
        "C[D[i],j] = tanh(A[i,k] * B[E[i,k],j])",
        lambda d: {
            "D": whole(5, 90),
            "E": whole(60, 90, 50),
            "A": real(d, 90, 50),
            "B": real(d, 60, 50),
        },
        {"out_shape": (5, 50)},
    ),
]


def way_of(statement: Statement, values: dict[str, Any]) -> str:
    options = {"out_shape": None, "sizes": None, "padded": (), **statement.options}
    text = str(insum.explain(statement.text, **options, **values))
    return text.partition("on the CPU: ")[2].partition(":")[0]


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch was built without MKL, which everybody's is who has no x86."""
    for module in ("block_rows", "operations", "rows"):
        monkeypatch.setattr(f"insum.host.{module}.has_library", lambda: False)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("statement", STATEMENTS, ids=str)
def test_values_and_gradients(
    statement: Statement, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_values_and_gradients(statement, dtype, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("statement", STATEMENTS, ids=str)
def test_values_and_gradients_without_the_library(
    statement: Statement,
    dtype: torch.dtype,
    without_library: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_values_and_gradients(statement, dtype, monkeypatch)


def check_values_and_gradients(
    statement: Statement, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the graph in float64, rounded once; gradients likewise."""
    torch.manual_seed(0)
    if statement.way == "by row":
        monkeypatch.setattr(chunks, "AT_ONCE", 1 << 16)
    values = statement.draw(dtype)
    library = statement.way != "block rows" or block_rows.has_library()
    # what a pattern would take is told by sizes
    without = "chunks" if statement.text.endswith("AV[p,a,b] * B[AK[p],b,n]") else "patterns"
    assert way_of(statement, values) == (statement.way if library else without)
    names = [n for n, v in values.items() if v.is_floating_point()]

    def run(**wide: torch.dtype) -> list[Tensor]:
        mine = {
            n: v.detach().to(wide.get("dtype", v.dtype)) if n in names else v
            for n, v in values.items()
        }
        leaves = [mine[n].requires_grad_() for n in names]
        out = insum.insum(statement.text, **statement.options, **mine)
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(out.shape, generator=generator).to(dtype).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    found = run()
    with insum.settings(backend="graph"):
        wanted = run(dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    for ours, exact in zip(found, wanted):
        assert ours.dtype == dtype and ours.is_contiguous()
        scale = float(exact.abs().max())
        slack = 64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * scale
        # rounded once: half a unit in the last place, and what wide sums differ by
        assert bool(((ours.double() - exact).abs() <= 0.5 * eps * exact.abs() * 1.01 + slack).all())


def cases() -> Iterator[Case]:
    yield from draw_cases(150, seed=3, dtypes=FLOATS, product_only=True)
    yield from draw_scatters(150, seed=4)


def test_drawn_statements() -> None:
    for case in cases():
        assert_close(case.run(), case.expected(), case.precision)


def test_drawn_statements_without_the_library(without_library: None) -> None:
    for case in itertools.islice(cases(), 0, None, 3):
        assert_close(case.run(), case.expected(), case.precision)


def drawn_einsum(draw: random.Random) -> tuple[str, Tensor, Tensor]:
    """Two factors over a few letters in any order, one of which may be repeated, summed alone or
    have no extent; in memory of another order.
    """
    sizes = {
        v: draw.choice([0, 1, 2, 3, 5] if draw.random() < 0.1 else [1, 2, 3, 5]) for v in "abcdef"
    }
    factors = [draw.sample("abcdef", draw.randint(1, 4)) for _ in range(2)]
    every = sorted({v for f in factors for v in f})
    kept = draw.sample(every, draw.randint(0, len(every)))
    tensors = []
    for names in factors:
        moved = draw.sample(range(len(names)), len(names))
        tensor = torch.randn([sizes[names[d]] for d in moved], dtype=torch.float64)
        tensors.append(tensor.permute([moved.index(d) for d in range(len(names))]))
    return f"{''.join(factors[0])},{''.join(factors[1])}->{''.join(kept)}", tensors[0], tensors[1]


@pytest.mark.parametrize("width", [(), (4,), (2, 0)])
def test_rows_that_several_index_tensors_choose(width: tuple[int, ...]) -> None:
    wide = torch.randn(3, 5, 4, *width)
    for x in (wide, wide.transpose(0, 1).contiguous().transpose(0, 1), wide[:, :1].expand_as(wide)):
        i, j, k = torch.randint(0, 3, (2, 1)), whole(5, 6), whole(4, 6).int()
        for indices in ((i, j), (i, j, k), (i.int(), j)):
            assert torch.equal(operations.rows_at(x, indices), x[indices])
    none = torch.zeros(0, dtype=torch.int64)
    assert operations.rows_at(wide, (none, none)).shape == (0, 4, *width)
    one = torch.tensor(2), torch.tensor(1), torch.tensor(3)
    assert torch.equal(operations.rows_at(wide, one), wide[one])


@pytest.mark.parametrize("width", [(), (4,), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_rows_that_several_index_tensors_add_to(width: tuple[int, ...], dtype: torch.dtype) -> None:
    for moved in (False, True):
        wide = torch.zeros(3, 5, 4, *width, dtype=dtype)
        wide = wide.transpose(0, 1).contiguous().transpose(0, 1) if moved else wide
        i, j, k = torch.randint(0, 3, (2, 1)), whole(5, 6), whole(4, 6).int()
        for indices in ((i, j), (i, j, k), (i.int(), j), (torch.tensor(2), torch.tensor(1))):
            at = torch.broadcast_shapes(*(index.shape for index in indices))
            values = (10 * torch.randn(*at, *wide.shape[len(indices) :])).to(dtype)
            found, want = wide.clone(), wide.clone()
            assert operations.add_at(found, indices, values, accumulate=True) is found
            want.index_put_(indices, values, accumulate=True)
            torch.testing.assert_close(found, want)
            repeated = values.new_ones(()).expand(values.shape)
            operations.add_at(found, indices, repeated, accumulate=True)
            torch.testing.assert_close(found, want.index_put_(indices, repeated, accumulate=True))


def test_products_of_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, multiplied = random.Random(0), []
    matmul, small = operations.numpy.matmul, operations.einsum_without_library
    monkeypatch.setattr(
        operations.numpy, "matmul", lambda a, b: multiplied.append(1) or matmul(a, b)
    )
    for _ in range(400):
        equation, a, b = drawn_einsum(draw)
        torch.testing.assert_close(small(equation, a, b), torch.einsum(equation, a, b))
    assert len(multiplied) > 50
    a, b = torch.randn(3, 2, 4), torch.randn(3, 4, 2)
    negated = torch._neg_view(a)
    torch.testing.assert_close(small("bij,bjk->bik", negated, b), -a @ b)
    multiplied.clear()
    with monkeypatch.context() as patched:
        patched.setattr(operations, "MOST_PRODUCT", 15)
        torch.testing.assert_close(small("bij,bjk->bik", a, b), a @ b)
    assert small("bij,bjk->bik", a.half(), b.half()).dtype == torch.float16
    assert not multiplied


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("high", [1, 7, 2**16, 2**16 + 1, 2**40, 2**61])
@pytest.mark.parametrize("vectors", [False, True])
def test_sorting_is_stable(
    high: int, threads: int, vectors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NumPy where numbers are short, or a number and its place fit one integer, for which it has
    vector code, and torch has no threads to share.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(places, "_HAS_VECTOR_CODE", vectors)
    for count in (0, 1, 2, 500, places._MANY + 3):
        numbers = torch.randint(0, high, (count,))
        assert torch.equal(places.sorting(numbers), torch.sort(numbers, stable=True).indices)
        assert torch.equal(
            places.sorting(narrowed := places.narrow(numbers)),
            torch.sort(narrowed, stable=True).indices,
        )


def test_values_that_are_summed_by_row_are_no_more_than_a_few_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer ones are never there at once."""
    monkeypatch.setattr(chunks, "AT_ONCE", 1 << 14)
    draw = lambda count: {
        "r": whole(9, count),
        "c": whole(8, count),
        "X": torch.randn(8, 6),
        "M": torch.randn(count, 6),
    }
    text, options = "O[r[p],n] = X[c[p],n] * M[p,n]", {"out_shape": (9, 6)}
    ways = [way_of(Statement("", text, lambda d: {}, options), draw(k)) for k in (5000, 6000)]
    assert ways == ["by row", "chunks"]


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("text", [SPMM, EXPERTS, "S[p] = A[AM[p],n] * B[AK[p],n]"])
def test_no_point_and_one(text: str, count: int) -> None:
    every = {
        "AM": whole(3, count),
        "AK": whole(3, count),
        "AV": torch.randn(count),
        "A": torch.randn(3, 4),
        "B": torch.randn(3, 4),
        "tok": whole(3, count),
        "e": whole(2, count),
        "X": torch.randn(3, 4),
        "W": torch.randn(2, 4, 4),
    }
    values = {
        name: every[name]
        for name in every
        if f"{name}[" in text.partition("=")[2] or name == "AM" and "AM" in text
    }
    shape = {"out_shape": (3, 4)} if text == SPMM else {}
    with insum.settings(backend="graph"):
        wanted = insum.insum(text, **shape, **values)
    torch.testing.assert_close(insum.insum(text, **shape, **values), wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "statement", [s for s in STATEMENTS if s.text in (GROUPED, CONVOLUTION)], ids=str
)
def test_absent_points_meet_nothing(statement: Statement, dtype: torch.dtype) -> None:
    values = statement.draw(dtype)
    wanted = insum.insum(statement.text, **statement.options, **values)
    index, read = ("AK", "B") if statement.text == GROUPED else ("Nb", "In")
    values[index] = torch.where(values[index] == 0, -1, values[index])
    clean = insum.insum(statement.text, **statement.options, **values)
    values[read] = values[read].clone()
    values[read][0] = torch.inf
    if "AV" in values:
        values["AV"] = torch.where(values[index] < 0, torch.nan, values["AV"])
    assert torch.equal(insum.insum(statement.text, **statement.options, **values), clean)
    assert wanted.isfinite().all()


def test_a_pattern_does_not_spread_what_is_not_finite() -> None:
    values = pattern(torch.float32, 16, 16)
    values["X"][3, 1] = torch.inf
    found = insum.insum(PRODUCT, out_shape=(20, 4, 16), **values)
    with insum.settings(backend="graph"):
        wanted = insum.insum(PRODUCT, out_shape=(20, 4, 16), **values)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found.isfinite().all(dim=-1).sum() >= 20 * 4 - 4


def test_index_tensors_that_change_are_seen() -> None:
    values = STATEMENTS[0].draw(torch.float64)
    for _ in range(3):
        values["AM"].numpy()[:] = whole(30, 5000).numpy()
        values["AK"].random_(0, 40)
        found = insum.insum(SPMM, out_shape=(30, 5), **values)
        with insum.settings(backend="graph"):
            torch.testing.assert_close(found, insum.insum(SPMM, out_shape=(30, 5), **values))


def test_the_order_of_rows_is_kept_with_their_index_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other statements, and the same one with other columns, find it."""
    sorted_: list[Tensor] = []
    sorting = places.sorting

    def counted(rows: Tensor) -> Tensor:
        sorted_.append(rows)
        return sorting(rows)

    monkeypatch.setattr(places, "sorting", counted)
    monkeypatch.setattr(pattern_axes, "MOST_POINTS", 0)
    monkeypatch.setattr(chunks, "AT_ONCE", 1 << 20)
    r, X, M = whole(9, 500), torch.randn(9, 6), torch.randn(500, 6)
    for text in ("O[r[p],n] = relu(X[c[p],n] - X[r[p],n])", "O[r[p],n] = X[c[p],n] * M[p,n]"):
        for _ in range(2):
            values = {"r": r, "c": whole(9, 500), "X": X} | ({"M": M} if "M[" in text else {})
            found = insum.insum(text, out_shape=(9, 6), **values)
            with insum.settings(backend="graph"):
                torch.testing.assert_close(
                    found, insum.insum(text, out_shape=(9, 6), **values), atol=1e-4, rtol=1e-4
                )
    assert len(sorted_) == 1
    r.random_(0, 9)
    insum.insum(text, out_shape=(9, 6), **values)
    assert len(sorted_) == 2


def test_weights_that_come_back_are_ordered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that change, seen or unseen, are ordered anew; those that always do are not kept."""
    values = {**STATEMENTS[0].draw(torch.float64), "B": torch.randn(40, 5, dtype=torch.float64)}
    values["AM"] = values["AM"].flip(0)
    run = lambda: insum.insum(SPMM, out_shape=(30, 5), **values)

    def kept() -> int:
        things = memory.entry_of(values["AV"]).things
        return sum(isinstance(key, tuple) and isinstance(key[0], LastWeights) for key in things)

    def exact() -> Tensor:
        with insum.settings(backend="graph"):
            return run()

    for _ in range(3):  # trained
        values["AV"].mul_(1.5)
        torch.testing.assert_close(run(), exact())
        assert kept() == 0
    for _ in range(3):
        torch.testing.assert_close(run(), exact())
    assert kept() == 1
    values["AV"].numpy()[7] = 100.0
    torch.testing.assert_close(run(), exact())
    values["AV"].neg_()
    torch.testing.assert_close(run(), exact())
    with torch.inference_mode():
        values["AV"] = values["AV"].clone()
        for _ in range(3):
            torch.testing.assert_close(run(), exact())


def sorted_product(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A product whose points are in the order of its rows."""
    r = whole(300, 800).sort().values
    return {"r": r, "c": whole(400, 800), "v": real(dtype, 800), "B": real(dtype, 400, 8)}


def check_sorted(values: dict[str, Tensor]) -> None:
    text = "C[r[p],n] = v[p] * B[c[p],n]"
    for _ in range(2):
        found = insum.insum(text, out_shape=(300, 8), **values)
        with insum.settings(backend="graph"):
            wanted = insum.insum(text, out_shape=(300, 8), **values)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_weights_in_order_are_read_where_they_lie() -> None:
    """Whatever is written to them, and by whom; other memory is seen, too."""
    values = sorted_product()
    v = values["v"] = values["v"].requires_grad_()
    with torch.no_grad():
        check_sorted(values)
        v.mul_(2)
        check_sorted(values)
        v.numpy()[7] = 100.0
        check_sorted(values)
        with torch.inference_mode():
            v.data.neg_()
        check_sorted(values)
        v.data = real(torch.float32, 800)
        check_sorted(values)
        v.set_(torch.zeros(1600)[::2].normal_())
        check_sorted(values)
    check_sorted({**values, "v": values["v"].detach().double(), "B": values["B"].double()})
    check_sorted({**values, "v": whole(9, 800)})
    check_sorted({**values, "B": values["B"].double()})
    check_sorted(values)


def test_weights_in_order_go_when_they_are_dropped() -> None:
    """Their matrix holds their memory, and goes with the tensor."""
    values = sorted_product()
    check_sorted(values)
    tensor, storage = weakref.ref(values["v"]), weakref.ref(values["v"].untyped_storage())
    del values["v"]
    gc.collect()
    assert tensor() is None and storage() is None


@pytest.mark.skipif(not rows.has_library(), reason="torch was built without MKL")
def test_weights_in_order_are_made_a_matrix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    csr = rows.csr
    monkeypatch.setattr(rows, "csr", lambda *given: made.append(given) or csr(*given))
    values = sorted_product()
    for _ in range(3):
        values["v"].mul_(0.5)
        check_sorted(values)
    assert len(made) == 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("text", ["y[r[p]] = v[p] * x[c[p]]", "y[i] = V[i,q] * x[I[i,q]]"])
def test_a_sum_of_numbers_is_one_of_rows(text: str, dtype: torch.dtype) -> None:
    """A sparse matrix times a vector, and the gradient of the vector."""
    if "I[" in text:
        values = {"V": real(dtype, 200, 90), "I": whole(40, 200, 90)}
    else:
        values = {"r": whole(30, 20_000), "v": real(dtype, 20_000), "c": whole(40, 20_000)}
    x = real(dtype, 40).requires_grad_()
    shape = (200,) if "I[" in text else (30,)
    call = lambda: insum.insum(text, out_shape=shape, x=x, **values)
    assert "on the CPU: rows" in str(insum.explain(text, out_shape=shape, x=x, **values))
    for _ in range(2):
        found = call()
        (gradient,) = torch.autograd.grad(found.sum(), x)
    with insum.settings(backend="graph"):
        wanted = call()
        (other,) = torch.autograd.grad(wanted.sum(), x)
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-3}.get(dtype, 0.1)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, other, rtol=tolerance, atol=tolerance)


def test_numbers_that_are_not_summed_are_no_rows() -> None:
    values = {"g": torch.randn(30), "r": whole(30, 20_000), "x": torch.randn(40)}
    values["c"] = whole(40, 20_000)
    assert "on the CPU: rows" not in str(insum.explain("v[p] = g[r[p]] * x[c[p]]", **values))


def test_values_of_a_pattern_that_change_are_seen() -> None:
    values = pattern(torch.float64, 16, 16)
    for _ in range(3):
        values["V"].normal_()
        found = insum.insum(PRODUCT, out_shape=(20, 4, 16), **values)
        with insum.settings(backend="graph"):
            torch.testing.assert_close(found, insum.insum(PRODUCT, out_shape=(20, 4, 16), **values))


def test_numbers_in_a_pattern_that_change_are_seen() -> None:
    """A number has no version; the same text may be passed a tensor, too."""
    text = PRODUCT.replace("V[p]", "exp(alpha * V[p])")
    values = pattern(torch.float64, 16, 16)
    for alpha in (1.0, 1.0, 2, torch.tensor(0.5), -1.0, torch.tensor(2.0)):
        found = insum.insum(text, out_shape=(20, 4, 16), alpha=alpha, **values)
        scaled = {**values, "V": torch.exp(float(alpha) * values["V"])}
        with insum.settings(backend="graph"):
            wanted = insum.insum(PRODUCT, out_shape=(20, 4, 16), **scaled)
        torch.testing.assert_close(found, wanted)


def test_of_trained_coefficients_only_the_last_are_kept(
    monkeypatch: pytest.MonkeyPatch, nothing_remembered: None
) -> None:
    """Where points are follows from index tensors, and is found out once."""
    values = pattern(torch.float32, 16, 16)
    made: list[object] = []
    reduced = patterns.Patterns.reduced
    monkeypatch.setattr(
        patterns.Patterns, "reduced", lambda *args: made.append(args) or reduced(*args)
    )
    run = lambda: insum.insum(PRODUCT, out_shape=(20, 4, 16), **values)
    run()
    known = [memory.entry_of(values[n]) for n in "IJK"]
    count, nbytes = sum(len(e.things) for e in known), sum(e.nbytes for e in known)
    for _ in range(5):
        values["V"] += 1
        found = run()
        with insum.settings(backend="graph"):
            torch.testing.assert_close(found, run(), atol=1e-3, rtol=1e-4)
    assert len(made) == 1
    assert sum(len(e.things) for e in known) == count
    assert sum(e.nbytes for e in known) == nbytes
    assert len(memory.entry_of(values["V"]).things) <= 1


def test_a_sum_of_halves_beyond_their_range_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern is not run again, the other way, because all results together are many."""
    values = pattern(torch.float16, 16, 16)
    for name in ("V", "X", "Y", "W"):
        values[name] = torch.full_like(values[name], 2.0)
    kept: list[object] = []
    sub = patterns.Patterns.dense
    monkeypatch.setattr(patterns.Patterns, "dense", lambda *a: kept.append(a[0]) or sub(*a))
    found = insum.insum(PRODUCT, out_shape=(20, 4, 16), **values)
    assert found.isfinite().all() and not found.sum().isfinite()
    (way,) = kept
    assert isinstance(way, patterns.Patterns)

    def fails(call: HostCall) -> Tensor:
        raise AssertionError("the other way was taken")

    object.__setattr__(way, "otherwise", fails)
    assert torch.equal(insum.insum(PRODUCT, out_shape=(20, 4, 16), **values), found)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("O[b,a] = F[t[b],a,c] * H[b,c]", (3, 50)),
        ("O[a] = exp(F[t[b],a,c]) * H[b,c]", (50,)),
        ("O[a,t[b],c] = F[t[b],a,c] * H[b,c]", (50, 30, 20)),
    ],
)
def test_a_few_places_of_a_long_axis_are_gathered(text: str, shape: tuple[int, ...]) -> None:
    """A dense tensor would read all of it, and rows would be written that nothing adds to."""
    values = {"t": whole(30, 3), "F": torch.randn(30, 50, 20), "H": torch.randn(3, 20)}
    assert way_of(Statement("", text, lambda d: values, {"out_shape": shape}), values) == "chunks"
    found = insum.insum(text, out_shape=shape, **values)
    with insum.settings(backend="graph"):
        wanted = insum.insum(text, out_shape=shape, **values)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_columns_are_not_moved_for_the_few_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_axes, "MOST_POINTS", 0)
    text, options = "O[a] = F[b,a,t[b]] * v[b]", {"out_shape": (6,)}
    for places_, way in ((1, "rows"), (17, "chunks")):
        values = {
            "t": whole(places_, 500),
            "F": torch.randn(500, 6, places_),
            "v": real(FLOATS[0], 500),
        }
        assert way_of(Statement("", text, lambda d: {}, options), values) == way


def test_columns_that_are_picked_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are read: torch picks along any dimension. Sums of many are worth moving them."""
    monkeypatch.setattr(pattern_axes, "MOST_POINTS", 0)
    x, t, w = torch.randn(20, 30), whole(30, 40), torch.randn(40)
    values = {"x": x, "t": t, "w": w}
    for text, way in (("y[b,p] = x[b,t[p]] * w[p]", ""), ("w[p] = y[b,p] * x[b,t[p]]", "")):
        given = values if text[0] == "y" else {"x": x, "t": t, "y": torch.randn(20, 40)}
        assert way_of(Statement("", text, lambda d: {}), given) in (way, "chunks")
    d, s = whole(4, 500), whole(30, 500)
    edges = {"x": x, "d": d, "s": s, "v": torch.randn(500)}
    text, options = "y[b,d[e]] = v[e] * x[b,s[e]]", {"out_shape": (20, 4)}
    assert way_of(Statement("", text, lambda d: {}, options), edges) == "rows"
    found = insum.insum(text, **edges, **options)
    torch.testing.assert_close(found, torch.zeros(20, 4).index_add(1, d, x[:, s] * edges["v"]))


def test_what_is_kept_knows_which_tensor_is_a_side() -> None:
    """An integer tensor is none: then the columns of another one are what entries have."""
    d, s, t = torch.randint(30, (3, 400)).unbind()
    z, wide, whole_ = torch.randn(30), torch.randn(30), torch.randint(5, (30,))
    for order in (torch.arange(400), d.argsort()):
        places_ = {"d": d[order], "s": s[order], "t": t[order]}
        for x in (wide, wide, whole_, wide):
            found = insum.insum("y[d[e]] = x[s[e]] * z[t[e]]", **places_, x=x, z=z, out_shape=(30,))
            torch.testing.assert_close(found, torch.zeros(30).index_add(0, d, x[s] * z[t]))


def test_numbers_out_of_order_are_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse matrix of one column is quicker only where entries lie in the order of its rows."""
    text, v, x = "y[i[p]] = v[p] * x[j[p]]", torch.randn(300), torch.randn(40)
    added: list[int] = []
    original = operations.add_rows
    monkeypatch.setattr(operations, "add_rows", lambda *given: added.append(1) or original(*given))
    monkeypatch.setattr("insum.graph.lower._graphs", {})
    operations._with_operations.cache_clear()
    for rows_, times in ((torch.arange(300) // 8, 0), (whole(40, 300), 1)):
        j = whole(40, 300)
        for _ in range(2):
            added.clear()
            found = insum.insum(text, v=v, x=x, i=rows_, j=j, out_shape=(40,))
            torch.testing.assert_close(found, torch.zeros(40).index_add(0, rows_, v * x[j]))
            assert len(added) == times
    operations._with_operations.cache_clear()


def test_a_pattern_of_integers_meets_any_dtype() -> None:
    """What is kept of it is of the dtype that it is multiplied in."""
    values = {**pattern(torch.float64, 16, 16), "V": whole(9, 12)}
    for dtype in (*FLOATS, *FLOATS[::-1]):
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in values.items()}
        found = insum.insum(PRODUCT, out_shape=(20, 4, 16), **given)
        with insum.settings(backend="graph"):
            wanted = insum.insum(PRODUCT, out_shape=(20, 4, 16), **given)
        tolerance = 1e-11 if dtype is torch.float64 else 2e-2
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_indices_out_of_range_are_found_before_anything_is_written() -> None:
    values = STATEMENTS[0].draw(torch.float32)
    C = torch.ones(30, 5)
    for bad in (40, -1):
        values["AK"][7] = bad
        with pytest.raises(insum.IndexRangeError, match=rf"AK\[7\] is {bad}"):
            insum.insum(SPMM.replace("=", "+="), C=C, **values)
    assert torch.equal(C, torch.ones(30, 5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_accumulated_in_place(dtype: torch.dtype) -> None:
    values = STATEMENTS[0].draw(dtype)
    C = real(dtype, 30, 10)[:, ::2]
    wide = {n: v.double() if v.is_floating_point() else v for n, v in values.items()}
    exact = C.double() + insum.insum(SPMM, out_shape=(30, 5), **wide)
    assert insum.insum(SPMM.replace("=", "+="), C=C, **values) is C
    torch.testing.assert_close(C, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_few_points_into_a_large_tensor_leave_the_rest_alone() -> None:
    values = {"AM": whole(9, 4), "AK": whole(9, 4), "AV": torch.randn(4), "B": torch.randn(9, 3)}
    call = _call(SPMM.replace("=", "+="), C=torch.zeros(10_000, 3), **values)
    assert on_host.lowering(call, "into", {**values, "C": torch.zeros(10_000, 3)}) is None


def test_few_points_out_of_range_are_found_before_anything_is_written() -> None:
    """The graph runs such a call: it does not look itself."""
    values = {"AM": whole(9, 4), "AK": whole(9, 4), "AV": torch.randn(4), "B": torch.randn(9, 3)}
    C = torch.zeros(10_000, 3)
    for bad in (10_000, -1):
        values["AM"][2] = bad
        with pytest.raises(insum.IndexRangeError, match=rf"AM\[2\] is {bad}"):
            insum.insum(SPMM.replace("=", "+="), C=C, **values)
    assert torch.equal(C, torch.zeros(10_000, 3))


def test_errors_of_several_statements_name_what_was_given() -> None:
    values = {"v": torch.randn(200_000), "X": torch.randn(3000, 64), "W": torch.randn(64, 64)}
    ends = {"s": whole(3000, 200_000), "d": whole(3000, 200_000)}
    text = "Y[d[e],h] = v[e] * X[s[e],f] * W[f,h]"
    assert "2 statements" in str(insum.explain(text, **values, **ends, out_shape=(3000, 64)))
    for name, bad in itertools.product("sd", (3000, -1)):
        kept = ends[name].clone()
        ends[name][7] = bad
        with pytest.raises(insum.IndexRangeError, match=rf"^{name}\[7\] is {bad}"):
            insum.insum(text, **values, **ends, out_shape=(3000, 64))
        ends[name] = kept


def _call(text: str, **values: Any) -> BoundCall:
    request = request_of(text, None, None, ())
    return kinds_of(request.form).find(values, request.size_values)


@pytest.mark.parametrize("statement", STATEMENTS, ids=str)
def test_the_same_bits_each_time(statement: Statement) -> None:
    values = statement.draw(torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            insum.insum(statement.text, **statement.options, **values) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)


def test_second_derivatives() -> None:
    AM, AK = whole(6, 40), whole(7, 40)
    AV, B = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((40,), (7, 3)))
    product = lambda AV, B: insum.insum(SPMM, AM=AM, AK=AK, AV=AV, B=B, out_shape=(6, 3))
    assert torch.autograd.gradcheck(product, (AV, B))
    assert torch.autograd.gradgradcheck(product, (AV, B))


def test_traced_calls_keep_the_graph() -> None:
    """What depends on values is no part of a trace."""
    values = STATEMENTS[0].draw(torch.float32)
    wanted = insum.insum(SPMM, out_shape=(30, 5), **values)
    call = lambda AK: insum.insum(SPMM, out_shape=(30, 5), **{**values, "AK": AK})
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(values["AK"]), wanted)
    traced = torch.jit.trace(call, (values["AK"],), check_trace=False)
    other = values["AK"].flip(0)
    torch.testing.assert_close(traced(other), call(other))
    batch = torch.stack([values["AK"], other])
    torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([wanted, call(other)]))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("way", ["rows", "dots", "runs"])
def test_nothing_has_the_size_of_points_times_columns(
    way: str, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "AT_ONCE", 1 << 20)
    points, columns = 60_000, 64
    indices = {"AM": whole(300, points), "AK": whole(400, points)}
    read = {"B": torch.randn(400, columns)}
    match way:
        case "rows":
            text, more = SPMM, {"AV": torch.randn(points)}
        case "dots":
            text, more = "S[p] = A[AM[p],n] * B[AK[p],n]", {"A": torch.randn(300, columns)}
        case _:
            text = "C[AM[p],n] = B[AK[p],k] * W[e[p],k,n]"
            more = {"e": whole(8, points), "W": torch.randn(8, columns, columns)}
    shape = {} if way == "dots" else {"out_shape": (300, columns)}
    leaves = [
        t.requires_grad_(backward)
        for t in (*read.values(), *more.values())
        if t.is_floating_point()
    ]

    def run() -> None:
        out = insum.insum(text, **shape, **indices, **read, **more)
        if backward:
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    run()
    assert _largest(run) < points * columns * 4 / 2


def _largest(run: Callable[[], object]) -> int:
    """The largest allocation of a warm call, in bytes."""
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(e.nbytes() for e in events if e.name() == "[memory]")


def test_explain_says_which_way_and_why() -> None:
    values = STATEMENTS[0].draw(torch.float32)
    text = str(insum.explain(SPMM, out_shape=(30, 5), **values))
    assert "on the CPU: rows: a sum of scaled rows is a sparse matrix (CSR" in text
    with insum.settings(backend="graph"):
        assert "on the CPU" not in str(insum.explain(SPMM, out_shape=(30, 5), **values))


def test_small_statements_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "LEAST_WORK", 1 << 14)
    values = STATEMENTS[0].draw(torch.float32)
    few = {n: v[:9] if n != "B" else v for n, v in values.items()}
    request = request_of(SPMM, (30, 5), None, ())
    found: Lowering | None = chooser.choose(request.bind(few))
    assert found is None


def test_index_tensors_that_come_back_are_worth_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made of others where the statement is not large, unless the same bits are wanted
    each time.
    """
    monkeypatch.undo()
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    made: list[str] = []
    segments = rows.segments
    monkeypatch.setattr(rows, "segments", lambda *a: made.append("rows") or segments(*a))
    values = {"AV": torch.randn(2000), "B": torch.randn(500, 16)}
    draw = lambda: {"AM": whole(500, 2000), "AK": whole(500, 2000)}
    run = lambda **ends: insum.insum(SPMM, out_shape=(500, 16), **values, **ends)
    ends, others = draw(), draw()
    first = run(**ends)
    assert not made
    torch.testing.assert_close(run(**ends), first)
    assert made == ["rows"]
    run(**others)
    assert made == ["rows"]
    ends = draw()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(run(**ends), run(**ends))
    finally:
        torch.use_deterministic_algorithms(False)
    assert made == ["rows", "rows"]


@pytest.mark.parametrize("columns, waits", [(1, True), (15, True), (16, False), (32, False)])
def test_new_indices_are_not_sorted_for_a_few_numbers_each(
    columns: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    values = {"AM": whole(500, 1 << 17), "AK": whole(500, 1 << 17), "AV": torch.randn(1 << 17)}
    request = request_of(SPMM, (500, columns), None, ())
    problem = request.bind({**values, "B": torch.randn(500, columns)})
    assert chooser.waits(problem, ("AM", "AK")) is waits


def test_short_index_tensors_are_no_pattern_where_sizes_forbid_it() -> None:
    """A dense matrix would have many more elements than there are points, whatever they are."""
    values = {"AV": torch.randn(2000), "AM": whole(500, 2000), "AK": whole(500, 2000)}
    request = request_of(SPMM, (500, 16), None, ())
    found = chooser.choose(request.bind({**values, "B": torch.randn(500, 16)}))
    assert isinstance(found, rows.ScaledRows)


@pytest.mark.parametrize("tokens, experts, width", [(2048, 8, 64), (256, 64, 128)])
def test_matrices_of_few_points_are_runs(tokens: int, experts: int, width: int) -> None:
    """Not a pattern, which multiplies with all of them; nor gathered for each point."""
    values = {
        "X": torch.randn(tokens, width),
        "tok": torch.arange(tokens),
        "e": whole(experts, tokens),
        "W": torch.randn(experts, width, width),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "AT_ONCE", 1 << 23)
        assert way_of(Statement("runs", EXPERTS, lambda d: values), values) == "runs"
        found = insum.insum(EXPERTS, **values)
    exact = torch.bmm(values["X"][:, None], values["W"][values["e"]])[:, 0]
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-3)


def test_values_of_a_sparse_tensor() -> None:
    """They are views of it, and it has no storage."""
    dense = torch.randn(30, 30) * (torch.rand(30, 30) < 0.3)
    A, B = insum.formats.COO.from_torch(dense.to_sparse().coalesce()), torch.randn(30, 200)
    for _ in range(3):
        found = insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=A, B=B)
        torch.testing.assert_close(found, dense @ B, rtol=1e-4, atol=1e-4)


def test_rows_are_added_by_indices_that_torch_is_quick_with() -> None:
    values = {"D": whole(5, 9).int(), "X": torch.randn(9, 2)}
    problem = request_of("Y[D[p],n] += X[p,n]", (5, 2), None, ()).bind(values)
    assert "torch.int64" in lower(problem).module.code


def test_the_order_of_products_follows_from_sizes() -> None:
    tall = cheapest(["ij", "jk", "kl"], "il", {"i": 1000, "j": 1000, "k": 1000, "l": 1})
    assert tall.pairs == ((1, 2), (0, 1))
    assert cheapest(["ij", "jk", "kl"], "il", {"i": 1, "j": 1000, "k": 1000, "l": 1000}).pairs[
        0
    ] == (0, 1)
    # the large factor is not moved about before it is multiplied
    product = cheapest(
        ["xacd", "bau", "bc", "bduw"], "bxw", dict(zip("xacdbuw", (4, 4, 4, 4, 900, 32, 32)))
    )
    assert product.pairs[-1] == (0, 1) and product.largest == frozenset("bxdu")


def test_many_factors_have_an_order() -> None:
    letters = "abcdefgh"
    factors = [a + b for a, b in itertools.pairwise(letters)]
    assert len(cheapest(factors, "ah", dict.fromkeys(letters, 5)).pairs) == len(factors) - 1
    names = [f"v{k}" for k in range(301)]
    chain = list(itertools.pairwise(names))
    found = cheapest(chain, ("v0", "v300"), dict.fromkeys(names, 8))
    assert found.steps < 300 * 8**3 * 3 and len(found.largest) == 2, "matrices times matrices"


@pytest.mark.parametrize("per_call", [0, runs.PER_CALL])
def test_products_of_many_small_matrices_are_no_runs(
    per_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of each item's own: calling for every matrix would take most of the time."""
    called: list[object] = []
    monkeypatch.setattr(runs, "_run", lambda *given: called.append(given))
    monkeypatch.setattr(runs, "PER_CALL", per_call)
    monkeypatch.setattr(runs, "AT_ONCE", 1 << 23)
    given = tensor_product.inputs(3, 8, 400, torch.float32, torch.device("cpu"))
    tensor_product.ours(given, "forward").run()
    assert bool(called) == (per_call == 0)


def test_little_work_is_the_graph_until_something_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is noted about tensors for it; those of formats are known, and where the same bits
    are wanted each time, nothing depends on that.
    """
    monkeypatch.setattr(chooser, "LEAST_NEW_WORK", 1 << 14)
    ways: list[str] = []
    product = rows.ScaledRows.__call__
    counted = lambda self, call: ways.append(self.name) or product(self, call)
    monkeypatch.setattr(rows.ScaledRows, "__call__", counted)
    values = sorted_product()
    run = lambda: insum.insum("C[r[p],n] = v[p] * B[c[p],n]", out_shape=(300, 8), **values)
    for _ in range(3):
        plain = run()
    assert not ways and memory.known(values["r"]) is None
    for name in ("r", "c"):
        insum.unchanging(values[name])
    torch.testing.assert_close(run(), plain)
    assert ways == ["rows"]
    values = sorted_product()
    torch.use_deterministic_algorithms(True)
    try:
        run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert ways == ["rows", "rows"]


@pytest.mark.parametrize("kind", [COO, GroupCOO])
def test_weights_over_one_memory_with_other_signs(kind: Any) -> None:
    """torch keeps the sign of an imaginary part of a conjugate beside its memory."""
    rows, columns = torch.randint(0, 20, (300,)), torch.randint(0, 30, (300,))
    options = {"group_size": 2} if kind is GroupCOO else {}
    A = kind.from_entries([rows, columns], torch.rand(300), shape=(20, 30), **options)
    z, x = torch.randn(A.values.shape, dtype=torch.complex64), torch.randn(30, 64)
    plain, turned = A.with_values(z.imag), A.with_values(z.conj().imag)
    expected = A.with_values(z.imag.clone()) @ x
    for _ in range(3):
        torch.testing.assert_close(plain @ x, expected)
        torch.testing.assert_close(turned @ x, -expected)


def test_a_kept_matrix_counts_what_it_holds(nothing_remembered: None) -> None:
    """Of a sparse matrix torch tells the bytes of a full one, which no memory would hold."""
    rows, columns = torch.randint(0, 60_000, (2, 9_000))
    A = GroupCOO.from_entries([rows, columns], torch.rand(9_000), shape=(60_000, 60_000))
    x = torch.randn(60_000, 16)
    for _ in range(6):
        A @ x
    before = memory.report().nbytes
    assert 0 < before < 2**22
    A @ x
    assert memory.report().nbytes == before


def along_edges(edges: int, nodes: int = 20) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A tensor product along edges whose coefficients have few of all pairs of places."""
    pattern = {n: torch.arange(30) // k % 6 for n, k in zip("IJKL", (1, 2, 3, 5))}
    text = "Z[d[e],I[p],u] = V[p] * X[s[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]"
    drawn = {
        "X": torch.randn(nodes, 6, 8),
        "Y": torch.randn(edges, 6),
        "W": torch.randn(edges, 6, 8),
    }
    ends = {"s": whole(nodes, edges), "d": whole(nodes, edges)}
    return text, {"V": torch.randn(30), **pattern}, {**drawn, **ends}


@pytest.mark.parametrize("edges", [1500, 6000])
def test_a_pattern_serves_new_edges(edges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made once, also where edges are as few as its points, and of pairs of places."""
    monkeypatch.undo()
    made: list[Any] = []
    make = patterns.Patterns.made
    monkeypatch.setattr(
        patterns.Patterns, "made", lambda *given: made.append(make(*given)) or made[-1]
    )
    text, fixed, _ = along_edges(edges)
    for _ in range(4):
        given = {**fixed, **along_edges(edges)[2]}
        found = insum.insum(text, out_shape=(20, 6, 8), **given)
        with insum.settings(backend="graph"):
            wanted = insum.insum(text, out_shape=(20, 6, 8), **given)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    assert len(made) == 1 and made[0].reduction.joint


def test_sums_of_no_points_do_not_meet_what_is_not_finite() -> None:
    """A relation of which a node has no edge may have any matrix."""
    text = "Y[d[p],n] = X[s[p],k] * W[e[p],k,n]"
    d, e = whole(50, 5000), whole(4, 5000)
    e[(e == 3) & (d < 10)] = 0
    values = {
        "d": d,
        "e": e,
        "s": whole(60, 5000),
        "X": torch.randn(60, 6),
        "W": torch.randn(4, 6, 5),
    }
    call = lambda: insum.insum(text, out_shape=(50, 5), **values)
    assert "on the CPU: aggregated" in str(insum.explain(text, out_shape=(50, 5), **values))
    finite = call()
    values["W"][3] = torch.inf
    found = call()
    torch.testing.assert_close(found[:10], finite[:10], rtol=1e-4, atol=1e-4)
    assert not found[10:].isfinite().any()


def test_scales_of_no_points_do_not_meet_what_is_not_finite() -> None:
    """Nor do rows that no point picks, however they are scaled."""
    d, s = whole(500, 5000), whole(300, 5000)
    d[d < 10], s[s < 10] = 10, 10
    x, w = torch.randn(300, 6), torch.randn(6)
    x[:10], w[2] = torch.nan, torch.inf
    for text, values in (
        ("Y[d[p],n] = X[p,n] * w[n]", {"X": torch.randn(5000, 6)}),
        ("Y[d[p],n] = X[s[p],n] * w[n]", {"X": x, "s": s}),
    ):
        found = insum.insum(text, out_shape=(500, 6), d=d, w=w, **values)
        assert not found[:10].any()
        assert not found[10:, 2].isfinite().any()
        assert found[10:, [0, 1, 3, 4, 5]].isfinite().all()


def test_no_more_is_scaled_than_is_read() -> None:
    """A table of many rows, of which few are picked."""
    text, d = "Y[d[p],n] = X[s[p],n] * w[n]", whole(9000, 5000)
    values = {"d": d, "s": whole(9000, 5000), "X": torch.randn(9000, 6), "w": torch.randn(6)}
    assert way_of(Statement("", text, lambda d: {}, {"out_shape": (9000, 6)}), values) == "chunks"


def test_a_graph_that_hardly_gathers_is_no_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose weights are of a code book is a matrix product as it is."""
    text, q, c = "y[b,o] = x[b,i] * c[q[i,o]]", whole(16, 16, 16), torch.randn(16)
    few, many = torch.randn(40, 16), torch.randn(4000, 16)
    assert "on the CPU: patterns" in str(insum.explain(text, x=few, q=q, c=c))
    monkeypatch.setattr(patterns, "STARTING", 1 << 21)
    assert "patterns" not in str(insum.explain(text, x=many, q=q, c=c))
    torch.testing.assert_close(insum.insum(text, x=many, q=q, c=c), many @ c[q])


# --- matrices of which every point has all --------------------------------------------------------


@pytest.mark.parametrize(
    "text, shape, way",
    [
        ("y[q,o] = x[t[q,k],c] * W[k,c,o]", (300, 70), "graph"),
        ("y[q,k,o] = x[t[q,k],c] * W[k,c,o]", (300, 9, 70), "runs"),  # a product for each anyway
        ("y[q,o] = x[t[q,k],c] * W[e[k],c,o]", (300, 70), "runs"),
        ("y[q,o] = x[t[q,k],c] * W[k,c,o] * v[q,k]", (300, 70), "runs"),
        ("W[k,c,o] = x[t[q,k],c] * y[q,o]", (9, 66, 70), "graph"),
        ("x[t[q,k],c] = y[q,o] * W[k,c,o]", (300, 66), "graph"),
        ("z[t[q,k],c] = y[q,o] * V[k,c,o]", (300, 20), "runs"),  # narrow sums
        ("x[t[q,k],o] = y[q,c] * W[k,c,o]", (300, 70), "runs"),  # of little
    ],
)
def test_all_matrices_are_one_where_every_point_has_all(
    text: str, shape: tuple[int, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "AT_ONCE", 1 << 23)
    draw = torch.Generator().manual_seed(0)
    of = {"x": (300, 66), "y": (300, 70), "W": (9, 66, 70), "v": (300, 9), "V": (9, 20, 70)}
    if "y[q,c]" in text:
        of["y"] = (300, 66)
    values = {n: torch.randn(s, generator=draw) for n, s in of.items() if f"{n}[" in text[1:]}
    values["t"] = torch.randint(0, 300, (300, 9), generator=draw)
    if "e[" in text:
        values["e"] = torch.randint(0, 9, (9,), generator=draw)
    problem = request_of(text, shape, None, ()).bind(values)
    roles = chooser.roles_of(problem)
    assert roles is not None and (runs.runs_of(roles) is None) is (way == "graph")
    exact = {n: v.double() if v.is_floating_point() else v for n, v in values.items()}
    with insum.settings(backend="graph"):
        want = insum.insum(text, out_shape=shape, **exact)
    got = insum.insum(text, out_shape=shape, **{n: insum.unchanging(v) for n, v in values.items()})
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    if way == "graph":
        values["t"][0, 0] = -1
        absent = request_of(text, shape, None, ("t",)).bind(values)
        roles = chooser.roles_of(absent)
        assert roles is not None and runs.runs_of(roles) is not None


# --- products in the order of their result --------------------------------------------------------


@pytest.mark.parametrize("kept", ["bno", "nbo", "bon", "obn", "onb", "nob"])
def test_products_are_written_where_libraries_can_write_them(
    kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices that have a row or a column in one piece; others are moved."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(80, 6, 60, generator=draw), torch.randn(6, 60, 70, generator=draw)
    written: list[tuple[int, ...]] = []
    multiply = torch.bmm

    def bmm(x: Tensor, y: Tensor, **options: Any) -> Tensor:
        written.extend(out.stride() for out in options.values())
        return multiply(x, y, **options)

    monkeypatch.setattr(torch, "bmm", bmm)
    found = operations.einsum_in_order(f"bni,nio->{kept}", a, b)
    assert found.is_contiguous() and all(1 in strides[1:] for strides in written)
    assert bool(written) is (kept in ("bno", "onb"))
    torch.testing.assert_close(found, torch.einsum(f"bni,nio->{kept}", a, b))


@pytest.mark.parametrize("order", itertools.permutations("isk"))
@pytest.mark.parametrize("equation", ["{x},ns->ink", "{x},sn->ink", "ns,{x}->ink", "{x},ns->kni"])
def test_a_matrix_times_many_is_written_where_it_belongs(
    equation: str, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, draw = {"i": 21, "s": 20, "k": 40, "n": 90}, torch.Generator().manual_seed(0)
    asked = equation.format(x="".join(order))
    names = asked.split("->")[0].split(",")
    a, b = (torch.randn([sizes[v] for v in vars], generator=draw) for vars in names)
    written: list[int] = []
    multiply = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x, **o: written.append(len(o)) or multiply(*x, **o))
    found = operations.einsum_in_order(asked, a, b)
    assert found.is_contiguous() and written == [1]
    torch.testing.assert_close(found, torch.einsum(asked, a, b))
    last = asked[-1]
    short = [
        tensor.narrow(vars.index(last), 0, 15) if last in vars else tensor
        for vars, tensor in zip(names, (a, b))
    ]
    written.clear()
    found = operations.einsum_in_order(asked, *short)
    torch.testing.assert_close(found, torch.einsum(asked, *short))
    assert found.is_contiguous() and written != [1], "few columns"
    for other in ("isk,ns->nik", "isk,ns->ikn", "isk,ns->in", "isk,nk->isn", "iik,nk->ink"):
        assert operations._in_the_middle(other) is None


# --- diagonals ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnDiagonal:
    """A statement with one index that counts along a diagonal, at drawn sizes."""

    text: str
    values: dict[str, Tensor]
    shape: tuple[int, ...]


def draw_diagonal(draw: random.Random, longest: int = 9) -> DrawnDiagonal:
    sizes = {v: draw.randint(1, 9) for v in "hijf"} | {draw.choice("ij"): draw.randint(1, longest)}
    a, b = draw.choice((1, 1, -1)), draw.choice((-1, 1, -1, 2, -2, 3))
    ends = [(by * (sizes[v] - 1)) for v, by in (("j", a), ("i", b))]
    least, most = (sum(pick(0, end) for end in ends) for pick in (min, max))
    before = draw.randint(0, 2) - least
    sizes["u"] = most + before + 1 + draw.randint(0, 2)
    steps = draw.sample([("j", a), ("i", b)], 2)
    place = "".join(f"{by:+}*{var}" for var, by in steps) + f"+{before}"
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def spelt(name: str, vars: str) -> str:
        inner = ",".join(place.lstrip("+") if v == "u" else v for v in vars)
        return f"{name}[{inner}]"

    held = {"s": draw.choice(("hij", "hji", "ihj", "jhi")), "q": draw.choice(("hif", "if", "fhi"))}
    held |= {"r": draw.choice(("uf", "fu")), "m": "ij"}
    left = draw.choice("sqr")
    read = [name for name in "sqr" if name != left] + draw.sample(["m"], draw.randint(0, 1))
    values = {}
    for name in read:
        given = torch.randn([sizes[v] for v in held[name]], generator=generator)
        values[name] = given.to(draw.choice((torch.float32, torch.float64, torch.float16)))
        if draw.random() < 0.2:
            values[name] = values[name].transpose(0, -1).contiguous().transpose(0, -1)
    scale = draw.choice(("", "2 * "))
    text = f"{spelt(left, held[left])} = {scale}{' * '.join(spelt(n, held[n]) for n in read)}"
    return DrawnDiagonal(text, values, tuple(sizes[v] for v in held[left]))


def _check(case: DrawnDiagonal) -> None:
    found = insum.insum(case.text, out_shape=case.shape, **case.values)
    sizes = {case.text[0]: case.shape}
    want = torch.from_numpy(insum.testing.oracle(case.text, case.values, sizes=sizes)).double()
    most = 1e-2 if found.dtype == torch.float16 else 1e-5
    error = (found.double() - want).norm() / want.norm().clamp(min=1e-9)
    assert error <= most and found.is_contiguous(), case


def test_diagonals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagonals, "LEAST_POINTS", 1)
    monkeypatch.setattr(diagonals, "LEAST_REUSE", 1)
    taken, run = list[str](), diagonals.Diagonals.__call__
    monkeypatch.setattr(
        diagonals.Diagonals, "__call__", lambda way, call: taken.append("") or run(way, call)
    )
    draw = random.Random(0)
    for _ in range(200):
        _check(draw_diagonal(draw))
    assert len(taken) > 60


def test_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that slide along many places, of which a part is done at a time."""
    monkeypatch.setattr(diagonals, "LEAST_POINTS", 1)
    monkeypatch.setattr(diagonals, "LEAST_REUSE", 1)
    taken, run = list[int](), bands.Bands.__call__
    monkeypatch.setattr(
        bands.Bands,
        "__call__",
        lambda way, call: taken.append(int(way.problem.extents[way.band.i])) or run(way, call),
    )
    draw = random.Random(1)
    for _ in range(200):
        monkeypatch.setattr(bands, "AT_ONCE", draw.choice((1, 4000, 1 << 22)))
        _check(draw_diagonal(draw, 60))
    assert len(taken) > 25 and max(taken) > 40


def test_the_last_part_of_bands_may_be_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 25, 40, generator=draw), torch.randn(4, 29, 40, generator=draw)
    text, shape = "s[b,t,r] = q[b,t,f] * k[b,t+r,f]", (4, 25, 5)
    monkeypatch.setattr(diagonals, "LEAST_POINTS", 4 * 40 * 5 * 4 + 1)
    found = bands.bands_of(request_of(text, shape, None, ()).bind({"q": q, "k": k}))
    assert found is not None and found.parts == (bands.Parts(0, 3, 7), bands.Parts(21, 1, 4))
    ways = {size: type(way).__name__ for size, way in found.products.items()}
    assert ways == {(3, 7): "Diagonals", (1, 4): "SubProblem"}
    want = torch.einsum("btf,btfr->btr", q, k.unfold(1, 5, 1))
    torch.testing.assert_close(insum.insum(text, q=q, k=k, out_shape=shape), want)


def test_what_is_not_finite_reaches_its_windows_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 300, 40, generator=draw), torch.randn(2, 320, 40, generator=draw)
    k[0, 100, 3], k[1, 7, 0] = math.nan, math.inf
    found = insum.insum("s[b,t,r] = q[b,t,f] * k[b,t+r,f]", q=q, k=k, out_shape=(2, 300, 21))
    windows = k.unfold(1, 21, 1)
    want = torch.einsum("btf,btfr->btr", q, windows)
    assert torch.equal(found.isfinite(), want.isfinite())
    torch.testing.assert_close(found[want.isfinite()], want[want.isfinite()])
    ds = torch.randn(2, 300, 21, generator=draw)
    found = insum.insum("dq[b,t,f] = ds[b,t,r] * k[b,t+r,f]", ds=ds, k=k)
    want = torch.einsum("btr,btfr->btf", ds, windows)
    assert torch.equal(found.isfinite(), want.isfinite())
    torch.testing.assert_close(found[want.isfinite()], want[want.isfinite()])


@pytest.mark.parametrize("text", ["s[t,r] = q[t,f] * k[t+r,f]", "s[t,r] = q[t,f] * k[t-r+40,f]"])
def test_windows_that_slide_along_many_places_are_bands(text: str) -> None:
    values = {"q": torch.ones(900, 60), "k": torch.ones(960, 60)}
    problem = request_of(text, (900, 41), None, ()).bind(values)
    found = bands.bands_of(problem)
    assert found is not None and found.parts[0].length * 20 > 900 > found.parts[0].length * 10
    for count in range(840, 960):  # whatever is left over for the last part
        shorter = {"q": torch.ones(count, 60), "k": torch.ones(count + 60, 60)}
        asked = request_of(text, (count, 41), None, ()).bind(shorter)
        assert bands.bands_of(asked) is not None
    assert chooser.choose(problem).name == "bands"  # type: ignore[union-attr]


def test_what_is_not_finite_meets_no_place_between_diagonals() -> None:
    """An infinite row that some points do not meet does nothing to them."""
    draw = torch.Generator().manual_seed(0)
    ds, r = torch.randn(4, 50, 50, generator=draw), torch.randn(99, 20, generator=draw)
    r[3] = math.inf
    found = insum.insum("dq[h,i,f] = ds[h,i,j] * r[j-i+49,f]", ds=ds, r=r)
    places = torch.arange(50) - torch.arange(50)[:, None] + 49
    want = torch.einsum("hij,ijf->hif", ds, r[places])
    assert torch.equal(found.isfinite(), want.isfinite())
    assert not want.isfinite().all() and want.isfinite().any()
    torch.testing.assert_close(found[want.isfinite()], want[want.isfinite()])


@pytest.mark.parametrize("width, columns", [(9, 4), (7, 40)])
def test_windows_that_are_no_bands(width: int, columns: int) -> None:
    """Of all places few are met: a matrix of them would be mostly zeros. Of few columns, and of
    short windows, slices are added up.
    """
    values = {"A": torch.ones(3000, width), "x": torch.ones(2999 + width, columns)}
    problem = request_of("y[i,f] = A[i,k] * x[i+k,f]", None, None, ()).bind(values)
    assert diagonals.diagonals_of(problem) is None and bands.bands_of(problem) is None
