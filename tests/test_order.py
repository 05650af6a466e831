"""The order of contraction: which statements are split and which are not, and that a path means
the same as one statement.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import insum
from insum.call import running
from insum.call.filled import FilledBuffers
from insum.call.prepared import BoundStage, kinds_of, prepare
from insum.call.request import Form, request_of
from insum.call.stages import Stage, layouts_of, stages_of
from insum.lang.bind import Problem
from insum.lang.expr import accesses, tensors_of, variables
from insum.lang.parser import parse
from insum.ops import eager
from insum.plan import order, steps
from insum.plan.library import is_batch_left_to_library, is_matrix_product
from insum.plan.order import Path
from insum.plan.path import operands_of
from insum.plan.reversed_path import reversed_path
from insum.testing import Case, assert_close, draw_cases, oracle
from insum.testing.as_on_a_gpu import pretended
from kernels import ONLY_FUSED, bound

CHAIN = "Y[i,l] = A[i,j] * B[j,k] * C[k,l]"
AGGREGATE = "Y[dst[e],h] = v[e] * X[src[e],f] * W[f,h]"
EVERY_WAY = [True, False, "optimal", "greedy", [(0, 1), (0, 1)], [(0, 2), (0, 1)], [(1, 2), (0, 1)]]


@pytest.fixture
def eager_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is taken wherever it has fewer points, however small the sizes."""
    for name in ("STARTED", "STARTED_ON_A_CPU", "MOVED"):
        monkeypatch.setattr(steps, name, 0)
    monkeypatch.setattr(order, "MOVED", 0)
    for name in ("CLEARLY", "TWICE", "BY_FAR"):
        monkeypatch.setattr(order, name, 1)
    for name in ("WORTH_A_CALL", "WORTH_ON_A_CPU"):
        monkeypatch.setattr(order, name, 0)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


def on_a_gpu(problem: Problem) -> Problem:
    """As it would be decided on there."""
    return replace(problem, device=torch.device("cuda"))


def described(shapes: Mapping[str, tuple[int, ...]], indices: str = "") -> dict[str, Tensor]:
    """Tensors of these shapes without memory; those named in ``indices`` hold integers."""
    names = indices.split()
    return {
        name: torch.empty(shape, device="meta", dtype=torch.int64 if name in names else None)
        for name, shape in shapes.items()
    }


def stages(
    statement: str,
    values: Mapping[str, Any],
    out_shape: tuple[int, ...] | None = None,
    padded: tuple[str, ...] = (),
    optimize: Any = True,
) -> tuple[Stage, ...]:
    request = request_of(statement, out_shape, None, padded, None, optimize)
    return stages_of(request.bind(values), request.form)


def texts(found: tuple[Stage, ...]) -> list[str]:
    return [stage.form.statement for stage in found]


# --- what is decided ------------------------------------------------------------------------------

E, N = 1_000_000, 60_000
GRAPH = {"v": (E,), "X": (N, 64), "W": (64, 64), "src": (E,), "dst": (E,)}

SPLIT: dict[str, tuple[str, dict[str, tuple[int, ...]], str, tuple[int, ...] | None, list[str]]] = {
    "a chain": (
        CHAIN,
        dict.fromkeys("ABC", (1024, 1024)),
        "",
        None,
        ["A_B[i,k] = A[i,j] * B[j,k]", "Y[i,l] = A_B[i,k] * C[k,l]"],
    ),
    "a chain that ends in a vector": (
        CHAIN,
        {"A": (1024, 1024), "B": (1024, 1024), "C": (1024, 1)},
        "",
        None,
        ["B_C[j,l] = B[j,k] * C[k,l]", "Y[i,l] = A[i,j] * B_C[j,l]"],
    ),
    "a product of every row that is gathered": (
        AGGREGATE,
        GRAPH,
        "src dst",
        (N, 64),
        ["X_W[x0,h] = X[x0,f] * W[f,h]", "Y[dst[e],h] = v[e] * X_W[src[e],h]"],
    ),
    "a sum before the product": (
        AGGREGATE,
        {**GRAPH, "X": (8 * N, 64), "W": (64, 256)},
        "src dst",
        (N // 8, 256),
        ["v_X[dst[e],f] = v[e] * X[src[e],f]", "Y[y0,h] = v_X[y0,f] * W[f,h]"],
    ),
    "the gradient of weights": (
        "dW[f,h] += dY[dst[e],h] * v[e] * X[src[e],f]",
        {**{name: shape for name, shape in GRAPH.items() if name != "W"}, "dY": (N, 64)},
        "src dst",
        None,
        ["dY_v[src[e],h] = dY[dst[e],h] * v[e]", "dW[f,h] += dY_v[x0,h] * X[x0,f]"],
    ),
    "a bilinear form on edges": (
        "S[e] = X[i[e],f] * W[f,g] * Z[j[e],g]",
        {"X": (N, 64), "W": (64, 64), "Z": (N, 64), "i": (E,), "j": (E,)},
        "i j",
        None,
        ["X_W[x0,g] = X[x0,f] * W[f,g]", "S[e] = X_W[i[e],g] * Z[j[e],g]"],
    ),
    "of two terms, the one that pays": (
        "Y[i,l] = A[i,j] * B[j,k] * C[k,l] - 2 * b[l]",
        {**dict.fromkeys("ABC", (1024, 1024)), "b": (1024,)},
        "",
        None,
        ["A_B[i,k] = A[i,j] * B[j,k]", "Y[i,l] = A_B[i,k] * C[k,l] - 2 * b[l]"],
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_split(name: str) -> None:
    statement, shapes, indices, out_shape, want = SPLIT[name]
    assert texts(stages(statement, described(shapes, indices), out_shape)) == want


def equivariant(edges: int, points: int, degree: int, paths: int) -> dict[str, tuple[int, ...]]:
    size = (degree + 1) ** 2
    return {
        "V": (points,),
        "X": (edges // 10, size, 64),
        "Y": (edges, size),
        "W": (edges, paths, 64),
        **dict.fromkeys("IJKL", (points,)),
        **dict.fromkeys(("src", "dst"), (edges,)),
    }


CONVOLUTION = "Z[dst[e],I[p],u] = V[p] * X[src[e],J[p],u] * Y[e,K[p]] * W[e,L[p],u]"
LAYER = "Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[L[p],u,w]"
FUSED: dict[str, tuple[str, dict[str, tuple[int, ...]], str, tuple[int, ...] | None]] = {
    "a product with scales": (
        "C[AM[p],n] = s[AM[p]] * AV[p,q] * B[AK[p,q],n] * t[n]",
        {"s": (N,), "AV": (E // 8, 8), "AM": (E // 8,), "AK": (E // 8, 8), "B": (N, 128)}
        | {"t": (128,)},
        "AM AK",
        (N, 128),
    ),
    "MTTKRP": (
        "M[i[p],r] = v[p] * B[j[p],r] * C[k[p],r]",
        {"v": (E,), "B": (N, 64), "C": (N, 64), **dict.fromkeys("ijk", (E,))},
        "i j k",
        (N, 64),
    ),
    "SDDMM": (
        "S[p] = v[p] * A[i[p],k] * B[j[p],k]",
        {"v": (E,), "A": (N, 64), "B": (N, 64), **dict.fromkeys("ij", (E,))},
        "i j",
        None,
    ),
    "an equivariant convolution of degree 1": (
        CONVOLUTION,
        equivariant(100_000, 11, 1, 4),
        "I J K L src dst",
        (10_000, 4, 64),
    ),
    "an equivariant convolution of degree 2": (
        CONVOLUTION,
        equivariant(100_000, 83, 2, 11),
        "I J K L src dst",
        (10_000, 9, 64),
    ),
    "an equivariant convolution of degree 3": (
        CONVOLUTION,
        equivariant(50_000, 480, 3, 34),
        "I J K L src dst",
        (5_000, 16, 64),
    ),
    "a layer of equivariant products": (
        LAYER,
        {"V": (34, 20), "X": (10_000, 16, 64), "Y": (10_000, 16), "W": (34, 64, 64), "L": (34,)}
        | dict.fromkeys("IJK", (34, 20)),
        "I J K L",
        (10_000, 16, 64),
    ),
    "a convolution over pairs of voxels": (
        "Out[X[p,q],m] = V[p,q] * In[Y[p,q],c] * W[Z[p],c,m]",
        {"V": (16_000, 64), "X": (16_000, 64), "Y": (16_000, 64), "Z": (16_000,)}
        | {"In": (100_000, 128), "W": (27, 128, 128)},
        "X Y Z",
        (100_000, 128),
    ),
    "a scaled dense product": (
        "Y[i,j] = A[i,k] * s[k] * B[k,j]",
        {"A": (4096, 4096), "s": (4096,), "B": (4096, 4096)},
        "",
        None,
    ),
    "a short chain": (CHAIN, dict.fromkeys("ABC", (16, 16)), "", None),
    "a largest value": (CHAIN.replace("=", "max="), dict.fromkeys("ABC", (1024, 1024)), "", None),
}


@pytest.mark.parametrize("name", FUSED)
def test_what_stays_one_statement(name: str) -> None:
    statement, shapes, indices, out_shape = FUSED[name]
    assert stages(statement, described(shapes, indices), out_shape) == ()


def test_truth_values_stay_one_statement() -> None:
    values = {name: torch.empty(1024, 1024, dtype=torch.bool, device="meta") for name in "ABC"}
    assert stages(CHAIN, values) == ()


def test_a_config_is_for_one_kernel() -> None:
    values = described(dict.fromkeys("ABC", (1024, 1024)))
    request = request_of(CHAIN, None, None, (), insum.Config(m=64, n=64, k=32))
    assert stages_of(request.bind(values), request.form) == ()


def test_no_buffer_as_large_as_nonzeros_times_columns() -> None:
    """Many kinds of edges: fewer points do not pay for so much memory."""
    shapes = {**GRAPH, "v": (E, 8), "W": (64, 8, 64)}
    values = described(shapes, "src dst")
    statement = "Y[dst[e],h] = v[e,g] * X[src[e],f] * W[f,g,h]"
    assert stages(statement, values, (N, 64)) == ()
    assert len(stages(statement, values, (N, 64), optimize="optimal")) == 2


def test_sizes_of_a_class_take_the_same_path() -> None:
    """Whichever of them comes first."""
    for first, second in ((130, 250), (250, 130)):
        found = []
        for size in (first, second):
            found.append(texts(stages(CHAIN, described(dict.fromkeys("ABC", (size, size))))))
        assert found[0] == found[1]


def test_the_kept_order_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    searches = []
    monkeypatch.setattr(
        "insum.call.prepared.stages_of",
        lambda *given, **more: searches.append(1) or stages_of(*given, **more),
    )
    for size in (129, 200, 256, 129):
        values = {name: torch.ones(size, size) for name in "ABC"}
        assert insum.insum(CHAIN, **values)[0, 0] == size * size
    assert len(searches) == 1


def long_chain(count: int, side: int) -> tuple[str, dict[str, Tensor]]:
    ends = [f"v{number}" for number in range(count + 1)]
    steps = [f"A{k}[{a},{b}]" for k, (a, b) in enumerate(itertools.pairwise(ends))]
    shapes = {f"A{k}": (side, side) for k in range(count)}
    return f"Y[{ends[0]},{ends[-1]}] = " + " * ".join(steps), described(shapes)


@pytest.mark.parametrize("count", [20, 60])
def test_long_chains_are_split_and_few_pairs_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    looked, look = [], steps.StepBuilder.buffer
    monkeypatch.setattr(steps.StepBuilder, "buffer", lambda *a: looked.append(a[2]) or look(*a))
    statement, values = long_chain(count, 512)
    assert len(stages(statement, values)) == count - 1, "as many products of two matrices"
    assert len(looked) <= 6 * count


def test_a_variable_of_all_factors_makes_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, look = [], steps.StepBuilder.buffer
    monkeypatch.setattr(steps.StepBuilder, "buffer", lambda *a: looked.append(a[2]) or look(*a))
    factors = " * ".join(f"A{k}[p,q{k}]" for k in range(40))
    values = described({f"A{k}": (4096, 512) for k in range(40)})
    assert len(stages(f"y[p] = {factors}", values, optimize="greedy")) > 1
    assert len(looked) <= 15 * 40


def test_absent_points_stay_absent() -> None:
    """What is 0 because it is absent must not meet what others have for that point."""
    D, nan = torch.tensor([0, -1, 1]), float("nan")
    a, b, w = torch.ones(3), torch.ones(2, 4), torch.tensor([1.0, nan, 1.0])
    values = {"a": a, "b": b, "w": w, "D": D}
    statement = "y[n] = a[p] * b[D[p],n] * w[p]"
    assert insum.insum(statement, padded=("D",), **values).tolist() == [2.0] * 4
    for path in EVERY_WAY[4:]:
        found = insum.insum(statement, padded=("D",), optimize=path, **values)
        assert found.tolist() == [2.0] * 4
    with pytest.raises(insum.UnsupportedError, match="cannot be a statement of their own"):
        insum.insum(
            "y[n] = a[p] * relu(b[D[p],n] + a[p]) * w[p]",
            padded=("D",),
            optimize=[(0, 1), (0, 1)],
            **values,
        )


# --- what it means --------------------------------------------------------------------------------


def paths(count: int, source: random.Random) -> Path:
    """A path of so many factors, drawn."""
    steps = []
    while count > 2 and source.random() < 0.8:
        size = source.randint(2, count - 1)
        steps.append(tuple(sorted(source.sample(range(count), size))))
        count -= size - 1
    return (*steps, tuple(range(count)))


def long_cases(count: int, **options: Any) -> Iterator[tuple[Case, int]]:
    """Drawn cases with a product of three and more factors, and how many those are."""
    for case in draw_cases(count, **options):
        terms = bound(case.statement, case.values, case.sizes, case.padded).terms
        most = max(len(operands_of(term)) for term in terms)
        if most >= 3:
            yield case, most


def called(case: Case, **options: Any) -> Tensor:
    copy = case.clone()
    return insum.insum(
        copy.statement, sizes=copy.sizes, padded=copy.padded, **copy.values, **options
    )  # type: ignore[arg-type]


def splits(case: Case, wish: str) -> bool:
    request = request_of(case.statement, None, dict(case.sizes), case.padded, None, wish)
    return bool(stages_of(request.bind(case.values), request.form))


def test_drawn_statements_in_every_order(eager_splits: None) -> None:
    """All that a statement may hold, with searches that split wherever they can."""
    split = 0
    for case, _ in long_cases(400, seed=31, max_factors=5, dtypes=(torch.float64,), mixed=False):
        found = {wish: splits(case, wish) for wish in ("optimal", "greedy")}
        split += sum(found.values())
        # what is not split is one statement, whichever way was looked
        wishes = [wish for wish in found if found[wish]] or ["greedy"]
        want = case.expected()
        for wish in wishes:
            assert_close(called(case, optimize=wish), want, case.precision)
    assert split > 50, "too few of them were split to tell"


def test_drawn_products_of_two_factors_on_every_path() -> None:
    """Read through an index after their product, or scattered before it, wherever that can be."""
    options: dict[str, Any] = {"max_factors": 2, "dtypes": (torch.float64,), "mixed": False}
    taken = dict.fromkeys((((0, 1), (0,)), ((0,), (0, 1)), ((1,), (0, 1))), 0)
    for case in draw_cases(500, seed=34, product_only=True, max_variables=4, **options):
        (*others, term) = bound(case.statement, case.values, case.sizes, case.padded).terms
        if others or len(operands_of(term)) != 2:
            continue
        for path in taken:
            try:
                found = called(case, optimize=list(path))
            except insum.UnsupportedError as error:
                assert "of their own" in str(error)
                continue
            taken[path] += 1
            assert_close(found, case.expected(), case.precision)
    # few are scattered to fewer places than there are contributions
    assert taken[((0, 1), (0,))] > 100 and sum(taken.values()) > 103, taken


TWO_FACTORS = {
    "Y[dst[e],h] = X[src[e],f] * W[f,h]": [
        "X_W[x0,h] = X[x0,f] * W[f,h]",
        "Y[dst[e],h] = X_W[src[e],h]",
    ],
    "Y[dst[e],h] = M[e,f] * W[f,h]": [
        "M_1[dst[e],f] = M[e,f]",
        "Y[y0,h] = M_1[y0,f] * W[f,h]",
    ],
    # the gradient of W in the first
    "D[f,h] = X[src[e],f] * G[dst[e],h]": [
        "X_1[dst[e],f] = X[src[e],f]",
        "D[f,h] = X_1[g0,f] * G[g0,h]",
    ],
    # and in the second
    "D[f,h] = M[e,f] * G[dst[e],h]": [
        "M_1[dst[e],f] = M[e,f]",
        "D[f,h] = M_1[g0,f] * G[g0,h]",
    ],
}


@pytest.mark.parametrize("statement", TWO_FACTORS)
def test_two_factors_are_multiplied_where_there_are_fewer_rows(statement: str) -> None:
    """Before they are gathered, or after they were scattered: for each node, not for each edge."""
    shapes = {"X": (N, 64), "G": (N, 64), "M": (E, 64), "W": (64, 64), "src": (E,), "dst": (E,)}
    used = {name: shape for name, shape in shapes.items() if f"{name}[" in statement}
    values, rows = described(used, "src dst"), N if statement[0] == "Y" else 64
    assert texts(stages(statement, values, (rows, 64))) == TWO_FACTORS[statement]
    assert stages(statement, values, (rows, 64), optimize=False) == ()
    for few, many in ((2000, 8000), (E, E)):  # too little to save, and no fewer rows
        sizes = {N: few, E: many}
        other = {name: tuple(sizes.get(n, n) for n in shape) for name, shape in used.items()}
        left = (few if rows == N else rows, 64)
        assert stages(statement, described(other, "src dst"), left) == ()


@pytest.mark.parametrize("padded", [(), ("src", "dst")], ids=["all", "some"])
@pytest.mark.parametrize("path", [[(0, 1), (0,)], [(0,), (0, 1)]])
def test_paths_of_two_factors(path: Any, padded: tuple[str, ...]) -> None:
    """As `explain` writes them; with places that are absent, in place, and with gradients."""
    given = {name: value for name, value in graph(dtype=torch.float64).items() if name != "v"}
    statement = "Y[dst[e],h] = X[src[e],f] * W[f,h]"
    if padded:
        given["src"][::3], given["dst"][::4] = -1, -1

    def product(X: Tensor, W: Tensor, optimize: Any = path) -> Tensor:
        named = {**given, "X": X, "W": W}
        return insum.insum(statement, out_shape=(6, 4), padded=padded, optimize=optimize, **named)

    leaves = given["X"].clone().requires_grad_(), given["W"].clone().requires_grad_()
    want = product(*leaves, optimize=False)
    torch.testing.assert_close(product(*leaves), want)
    assert gradcheck(product, leaves)
    Y = torch.ones(6, 4, dtype=torch.float64)
    insum.insum(statement.replace("=", "+=", 1), Y=Y, padded=padded, optimize=path, **given)
    torch.testing.assert_close(Y, 1 + want.detach())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.int64, torch.int8),
        (torch.int64, torch.bool),
        (torch.float32, torch.float16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float64, torch.complex64),
    ],
    ids=str,
)
def test_what_is_scattered_first_is_added_up_in_full(
    first: torch.dtype, second: torch.dtype
) -> None:
    """In what the products would be added up in, and not in what it is stored in."""
    rows = torch.arange(3000) % 3
    a, b = torch.ones(4, dtype=first), torch.full((3000,), 100).to(second)
    statement, given = "Y[O[b],a] = A[a] * B[b]", {"A": a, "B": b, "O": rows}
    got = insum.insum(statement, out_shape=(3, 4), optimize=[(1,), (0, 1)], **given)
    want = insum.insum(statement, out_shape=(3, 4), optimize=False, **given)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_halves_are_added_up_in_single_precision_on_a_gpu(dtype: torch.dtype) -> None:
    """Their sum may be too large for float16 where that of the products is not; and only through
    the left side: else matrix units do it.
    """
    shapes = {"X": (N, 64), "G": (N, 64), "M": (E, 64), "W": (64, 64), "src": (E,), "dst": (E,)}
    values = described(shapes, "src dst")
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in values.items()}

    def found(statement: str, rows: int | None, *names: str) -> tuple[Stage, ...]:
        request = request_of(statement, rows and (rows, 64), None, ())
        problem = request.bind({name: given[name] for name in names})
        return stages_of(on_a_gpu(problem), request.form)

    first, last = found("Y[dst[e],h] = M[e,f] * W[f,h]", N, "M", "W", "dst")
    assert (first.form.dtype, last.form.dtype) == (torch.float32, dtype)
    assert first.form.statement == "M_1[dst[e],f] = M[e,f]"
    through = found("D[f,h] = X[src[e],f] * G[dst[e],h]", None, "X", "G", "src", "dst")
    assert len(through) == (2 if dtype == torch.float32 else 0)


NUMBERS = {
    "Y[b,o] = X[b,i] * c[q[i,o]]": ["c_1[i,o] = c[q[i,o]]", "Y[b,o] = X[b,i] * c_1[i,o]"],
    "D[q[i,o]] = X[b,i] * G[b,o]": ["X_G[i,o] = X[b,i] * G[b,o]", "D[q[i,o]] = X_G[i,o]"],
    "Y[b,o] = X[b,t[i]] * W[i,o]": ["X_1[b,i] = X[b,t[i]]", "Y[b,o] = X_1[b,i] * W[i,o]"],
    "Y[b,t[o]] = X[b,i] * W[i,o]": ["X_W[b,o] = X[b,i] * W[i,o]", "Y[b,t[o]] = X_W[b,o]"],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("statement", NUMBERS)
def test_numbers_are_gathered_or_spread_apart_from_a_product(
    statement: str, dtype: torch.dtype
) -> None:
    """On a GPU, where a library has the product then; where it is worth another call."""
    for side, want in ((1024, NUMBERS[statement]), (64, [])):
        shapes = {**dict.fromkeys(("X", "G", "W", "q"), (side, side)), "c": (16,), "t": (side,)}
        used = {name: shape for name, shape in shapes.items() if f"{name}[" in statement}
        values = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in described(used, "q t").items()
        }
        out_shape = {"D": (16,)}.get(statement[0], (side, side))
        request = request_of(statement, out_shape, None, ())
        problem = on_a_gpu(request.bind(values))
        assert texts(stages_of(problem, request.form)) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_numbers_are_gathered_apart_from_a_product_that_is_scaled(dtype: torch.dtype) -> None:
    """Quantised weights: scales are put into the code book first, or into what is gathered."""
    values = described({"X": (1024, 1024), "q": (1024, 1024), "c": (16,), "s": (1024,)}, "q")
    given = {n: v.to(dtype) if v.is_floating_point() else v for n, v in values.items()}
    request = request_of("Y[b,o] = X[b,i] * c[q[i,o]] * s[o]", None, None, ())
    problem = on_a_gpu(request.bind(given))
    assert texts(stages_of(problem, request.form)) == [
        "c_s[c0,o] = c[c0] * s[o]",
        "c_s_1[i,o] = c_s[q[i,o],o]",
        "Y[b,o] = X[b,i] * c_s_1[i,o]",
    ]


def test_tiny_matrices_are_not_left_to_a_library() -> None:
    """Of which it takes some nanoseconds each."""
    for side, left in ((3, False), (64, True)):
        shapes = {"A": (4096, side, side), "B": (4096, side, side)}
        problem = bound("Y[n,i,k] = A[n,i,j] * B[n,j,k]", described(shapes))
        problem = on_a_gpu(problem)
        sizes = {"n": 4096, "i": side, "j": side, "k": side}
        assert is_batch_left_to_library(problem, sizes, accumulates=False) == left


DIAGONALS = {
    "S[h,i,j] = Q[h,i,f] * R[j-i+END,f]": [
        "Q_R[h,i,r0] = Q[h,i,f] * R[r0,f]",
        "S[h,i,j] = Q_R[h,i,j - i + END]",
    ],
    "D[h,i,f] = S[h,i,j] * R[j-i+END,f]": [
        "S_1[h,i,j - i + END] = S[h,i,j]",
        "D[h,i,f] = S_1[h,i,r0] * R[r0,f]",
    ],
    "D[j-i+END,f] = S[h,i,j] * Q[h,i,f]": [
        "S_1[h,i,j - i + END] = S[h,i,j]",
        "D[d0,f] = S_1[h,i,d0] * Q[h,i,f]",
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("statement", DIAGONALS)
def test_places_along_a_diagonal_are_a_variable_of_a_product(
    statement: str, dtype: torch.dtype
) -> None:
    """On a GPU, where that is worth another call: no matrix units could multiply it otherwise."""
    for side, want in ((1024, DIAGONALS[statement]), (64, [])):
        text, value = statement.replace("END", str(side - 1)), statement.split("=")[1]
        shapes = {"Q": (8, side, 64), "R": (2 * side - 1, 64), "S": (8, side, side)}
        used = {name: size for name, size in shapes.items() if f"{name}[" in value}
        values = {name: found.to(dtype) for name, found in described(used).items()}
        (shape,) = (size for name, size in shapes.items() if name not in used)
        request = request_of(text, shape, None, ())
        problem = on_a_gpu(request.bind(values))
        stages = stages_of(problem, request.form)
        assert texts(stages) == [one.replace("END", str(side - 1)) for one in want]
        if want and "S_1" in want[0]:  # nothing is added up in what is moved
            assert stages[0].form.dtype == dtype


def test_drawn_products_along_diagonals() -> None:
    """By the paths that a GPU takes, and at once."""
    draw = random.Random(0)
    for _ in range(40):
        h, i, j, f = (draw.randint(1, 6) for _ in range(4))
        a, b = draw.choice((1, -1)), draw.choice((1, -1))
        ends = [sum(pair) for pair in itertools.product((0, a * (i - 1)), (0, b * (j - 1)))]
        before, behind = draw.randint(0, 2), draw.randint(0, 2)
        rows = max(ends) - min(ends) + 1 + before + behind
        place = f"{'-' if a < 0 else ''}i{'-' if b < 0 else '+'}j+{before - min(ends)}"
        values = {"T": (h, i, j), "Q": (h, i, f), "R": (rows, f)}
        given = {n: torch.randn(s, dtype=torch.float64) for n, s in values.items()}
        for text, shape, path in (
            (f"S[h,i,j] = Q[h,i,f] * R[{place},f]", (h, i, j), [(0, 1), (0,)]),
            (f"S[h,i,f] = T[h,i,j] * R[{place},f]", (h, i, f), [(0,), (0, 1)]),
            (f"S[{place},f] = T[h,i,j] * Q[h,i,f]", (rows, f), [(0,), (0, 1)]),
        ):
            used = {n: v for n, v in given.items() if f"{n}[" in text}
            one, other = (
                insum.insum(text, out_shape=shape, optimize=wish, **used) for wish in (path, False)
            )
            torch.testing.assert_close(one, other)


EDGES = {"x": (40_000, 128), "z": (40_000, 128), "s": (300_000,), "t": (300_000,)}


@pytest.mark.parametrize(("columns", "count"), [(200, 2), (64, 0)])
def test_what_is_computed_of_rows_is_computed_once(columns: int, count: int) -> None:
    """Before a product of more columns than a tile has."""
    values = described({**EDGES, "W": (128, columns)}, "s t")
    given = {n: v.half() if v.is_floating_point() else v for n, v in values.items()}
    request = request_of("y[e,o] = relu(x[s[e],c] + z[t[e],c]) * W[c,o]", None, None, ())
    problem = on_a_gpu(request.bind(given))
    stages = stages_of(problem, request.form)
    assert len(stages) == count
    if stages:
        assert texts(stages)[0] == "x_z[e,c] = relu(x[s[e],c] + z[t[e],c])"
        assert stages[0].form.dtype == torch.float16  # rounded as by PyTorch; nothing is added up


def test_gradients_go_the_way_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer of it, and each that comes back, is filled once for all of them."""
    filled = _watch_fills(monkeypatch)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    draw = torch.Generator().manual_seed(0)
    shapes = {"x": (300, 23), "W": (16, 23, 21), "z": (300, 21)}
    leaves = [
        torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_()
        for s in shapes.values()
    ]
    given = dict(zip(shapes, leaves, strict=True))
    statement = "y[b,o] = x[b,i] * W[o,i,j] * z[b,j]"
    found = insum.insum(statement, optimize=[(0, 2), (0, 1)], **given)
    assert filled == ["x_z[b,i,j] = x[b,i] * z[b,j]"]
    filled.clear()
    monkeypatch.setattr("insum.call.stages.NEARLY_ON_A_CPU", math.inf)
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    back, forward = "dy_W[b,i,j] = dy[b,o] * W[o,i,j]", "x_z[b,i,j] = x[b,i] * z[b,j]"
    assert sorted(filled) == [back, forward]
    want = torch.einsum("bi,oij,bj->bo", *leaves)
    for one, other in zip(gradients, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("factors", "others"),
    [
        (["x", "x", "z"], ["dy", "x", "z"]),  # which of both is meant?
        (["x", "W", "z"], ["dy", "W", "z", "sign(x)"]),
        (["x", "W", "z"], ["x", "W", "z"]),
    ],
)
def test_paths_that_are_not_reversed(factors: list[str], others: list[str]) -> None:
    assert reversed_path(((0, 1), (0, 1)), factors, others) is None


def test_a_path_that_gathers_is_not_reversed() -> None:
    assert reversed_path(((0, 1), (0,)), ["x", "W"], ["dy", "W"]) is None


def test_a_pattern_is_no_code_book() -> None:
    """Its places are read again and again, too, but nothing of it is a product of matrices."""
    shapes = {"V": (90,), "X": (40_000, 9, 64), "Y": (40_000, 9)}
    shapes |= dict.fromkeys(("I", "J", "K"), (90,))
    values = described(shapes, "I J K")
    request = request_of("Z[e,I[p],u] = V[p] * X[e,J[p],u] * Y[e,K[p]]", (40_000, 9, 64), None, ())
    problem = on_a_gpu(request.bind(values))
    assert not stages_of(problem, request.form)


def test_gradients_of_one_pass_share_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[str, int]] = []
    fill = running.fill

    def watched(one: BoundStage, *given: Any) -> Tensor:
        found = fill(one, *given)
        filled.append((one.stage.form.statement, id(found)))
        return found

    draw = torch.Generator().manual_seed(0)
    shapes = {"G": (12, 13, 14), "A": (30, 12), "B": (31, 13), "C": (32, 14)}
    given = {
        n: torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_()
        for n, s in shapes.items()
    }
    want = torch.einsum("ijk,ai,bj,ck->abc", *given.values())
    upstream = torch.randn(want.shape, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(want, [*given.values()], upstream)
    statement = "T[a,b,c] = G[i,j,k] * A[a,i] * B[b,j] * C[c,k]"
    found = insum.insum(statement, optimize="optimal", **given)
    monkeypatch.setattr(running, "fill", watched)
    gradients = torch.autograd.grad(found, [*given.values()], upstream)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert len(filled) > len({text for text, _ in filled}) > 1
    assert len({number for _, number in filled}) == len({text for text, _ in filled})


def _watch_fills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that computed a buffer."""
    run: list[str] = []
    fill, found_before = running.fill, BoundStage.filled

    def watched(one: BoundStage, given: Any, filled: FilledBuffers | None) -> Tensor:
        if filled is None or found_before(one, given, filled) is None:
            run.append(one.stage.form.statement)
        return fill(one, given, filled)

    monkeypatch.setattr(running, "fill", watched)
    return run


def _drawn_core() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"G": (30, 31, 32), "A": (5, 30), "B": (6, 31), "C": (7, 32)}
    return {
        n: torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_()
        for n, s in shapes.items()
    }


CORE = "T[a,b,c] = G[i,j,k] * A[a,i] * B[b,j] * C[c,k]"


def test_buffers_that_gradients_fill_again_are_kept_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    run, passes = _watch_fills(monkeypatch), list[int]()
    for turn in range(3):
        given = {n: (v.detach() * (turn + 1)).requires_grad_() for n, v in _drawn_core().items()}
        want = torch.einsum("ijk,ai,bj,ck->abc", *given.values())
        upstream = torch.ones_like(want)
        expected = torch.autograd.grad(want, [*given.values()], upstream)
        found = insum.insum(CORE, optimize="optimal", **given)
        forward = len(run)
        gradients = torch.autograd.grad(found, [*given.values()], upstream)
        passes.append(len(run) - forward)
        run.clear()
        for one, other in zip((found, *gradients), (want, *expected), strict=True):
            torch.testing.assert_close(one, other)
    assert passes[0] > passes[1] == passes[2]


def test_kept_buffers_are_checked_and_freed_as_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to after the call is noticed; a second pass needs ``retain_graph``; gradients
    of gradients do not read them; where hooks look on there are none.
    """
    given = _drawn_core()
    leaves = [*given.values()]
    for _ in range(2):  # the first backward pass learns what is filled again
        found = insum.insum(CORE, optimize="optimal", **given)
        (found.sum()).backward(retain_graph=True)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.append(one.shape) or one.clone(), lambda one: one
    ):
        hooked = insum.insum(CORE, optimize="optimal", **given)
    assert len(kept) == len(leaves)
    expected = torch.autograd.grad(found, leaves, torch.ones_like(found), retain_graph=True)
    for one, other in zip(torch.autograd.grad(hooked.sum(), leaves), expected, strict=True):
        torch.testing.assert_close(one, other)
    recorded = torch.autograd.grad(found.square().sum() / 2, leaves, create_graph=True)
    assert all(one.grad_fn is not None for one in recorded)
    again = insum.insum(CORE, optimize="optimal", **given)
    torch.autograd.grad(again.sum(), leaves)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(again.sum(), leaves)
    with torch.no_grad():
        given["A"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found.sum(), leaves)


def test_what_is_kept_is_the_same_when_a_checkpoint_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first backward pass learns which buffers are filled again, in the midst of others."""
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    given = _drawn_core()
    beside = [torch.randn(31, 32, 5, dtype=torch.float64).requires_grad_() for _ in range(3)]
    leaves = [*given.values(), *beside]

    def block(other: Tensor, *values: Tensor) -> Tensor:
        found = insum.insum(CORE, optimize="optimal", **dict(zip(given, values, strict=True)))
        return found.sum() + other.sin().sum()

    def gradients(run: Any) -> tuple[Tensor, ...]:
        total = sum(run(block, one, *given.values()) for one in beside)
        return torch.autograd.grad(total, leaves)

    for _ in range(2):
        found = gradients(functools.partial(checkpoint, use_reentrant=False))
        want = gradients(lambda run, *values: run(*values))
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other)


def test_large_buffers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no more than what is kept anyway, all together, and are those that are read."""
    kinds = ["read", "large", "other", "read as well", "one too many"]
    sizes = dict(zip(kinds, (40, 70, 20, 50, 20), strict=True))
    stages = [(SimpleNamespace(kinds=kind), torch.ones(sizes[kind])) for kind in kinds]
    call: Any = SimpleNamespace(prepared=SimpleNamespace(kept={*kinds} - {"other"}))
    monkeypatch.setattr(running, "buffers", lambda *given: stages)
    values = {"A": torch.ones(100), "s": 2.0}
    kept = eager._buffers_to_keep(call, values, {})
    assert [one.kinds for one, _ in kept] == ["read", "read as well"]


def test_buffers_that_are_gone_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was too large to be kept is no longer there, and another may be where it was."""
    monkeypatch.setattr("insum.call.running.MOST_FILLED", 10_000)
    n, draw = 100, torch.Generator().manual_seed(0)

    def stage(text: str, fills: str, rank: int, **sizes: int) -> BoundStage:
        keys = (*((d, None) for d in range(rank)), *((v, None) for v in sizes))
        form = Form(text, keys, (), torch.float64, None, frozenset(), "never")
        reads = tensors_of(parse(text))
        given = (*(n for _ in range(rank)), *sizes.values())
        return BoundStage(kinds_of(form), Stage(form, fills, reads, (), ()), given)

    A, B = (torch.randn(n, 2, generator=draw, dtype=torch.float64) for _ in "AB")
    values = {"A": A, "B": B, "C": torch.randn(n, generator=draw, dtype=torch.float64)}
    large = [
        stage(f"P[i,k] = {first} * {second}", "P", 2, i=n, j=2, k=n)
        for first, second in (("A[i,j]", "B[k,j]"), ("A[k,j]", "B[i,j]"))
    ]
    small = stage("Q[i] = P[i,k] * C[k]", "Q", 1, i=n, k=n)
    last = stage("y[i] = Q[i] * C[i]", "", 1, i=n)
    filled: FilledBuffers = {}
    for turn in range(12):
        stages = large[turn % 2], small, last
        got = running._run_stages(stages, "new", values, None, filled)
        first, second = (A, B) if turn % 2 == 0 else (B, A)
        torch.testing.assert_close(got, first @ second.T @ values["C"] * values["C"])


def test_gradients_of_gradients_through_shared_buffers() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"G": (3, 4, 5), "A": (6, 3), "B": (7, 4), "C": (5, 5)}
    given = [
        torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_()
        for s in shapes.values()
    ]

    def product(*values: Tensor) -> Tensor:
        statement = "T[a,b,c] = G[i,j,k] * A[a,i] * B[b,j] * C[c,k]"
        return insum.insum(statement, optimize="optimal", **dict(zip(shapes, values, strict=True)))

    assert torch.autograd.gradgradcheck(product, given)


LAST, FIRST, SECOND = [(0, 1), (0,)], [(0,), (0, 1)], [(1,), (0, 1)]
#: The paths of two statements that each has: what is gathered may also be multiplied by itself
#: before, and what the other factor has be added up through an index.
PATHS_OF_NUMBERS = dict(
    zip(
        NUMBERS,
        ([LAST, SECOND], [LAST], [LAST, FIRST, SECOND], [LAST, SECOND]),
        strict=True,
    )
)


@pytest.mark.parametrize("statement", NUMBERS)
def test_paths_of_numbers(statement: str) -> None:
    draw = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in {"X": (6, 8), "G": (6, 5), "W": (8, 5), "c": (4,)}.items()
    }
    given["q"] = torch.randint(4, (8, 5), generator=draw)
    given["t"] = torch.randint(5, (5 if "t[o]" in statement else 8,), generator=draw)
    used = {name: value for name, value in given.items() if f"{name}[" in statement}
    out_shape = (4,) if statement[0] == "D" else (6, 5)

    def product(optimize: Any) -> Tensor:
        return insum.insum(statement, out_shape=out_shape, optimize=optimize, **used)

    want, own = product(False), PATHS_OF_NUMBERS[statement]
    for optimize in (True, "optimal", *own):
        torch.testing.assert_close(product(optimize), want)
    for path in (LAST, FIRST, SECOND):
        if path not in own:
            with pytest.raises(insum.InsumError, match="cannot be a statement of their own"):
                product(path)


def test_idle_steps_of_a_path() -> None:
    given = {"X": torch.ones(5, 3), "W": torch.ones(3, 2), "I": torch.zeros(9, dtype=torch.int64)}
    for path in ([(0, 1), (0,), (0,)], [(0, 1), (0,), (0,), (0,)]):
        with pytest.raises(insum.BindingError, match="multiplies nothing"):
            insum.insum("y[e,g] = X[I[e],f] * W[f,g]", optimize=path, **given)


def test_paths_that_take_nothing_off() -> None:
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with pytest.raises(insum.UnsupportedError, match=r"at \(0,\) of optimize cannot"):
        insum.insum("C[i,j] = a[i,k] * b[k,j]", a=a, b=b, optimize=[(0,), (0, 1)])


def test_drawn_products_on_drawn_paths() -> None:
    source, taken = random.Random(7), 0
    options = {"max_factors": 5, "max_variables": 5, "dtypes": (torch.float64,), "mixed": False}
    for case, count in long_cases(320, seed=32, product_only=True, **options):
        if len(bound(case.statement, case.values, case.sizes, case.padded).terms) != 1:
            continue
        path = paths(count, source)
        try:
            found = called(case, optimize=list(path))
        except insum.UnsupportedError as error:
            assert "of their own" in str(error)
            continue
        taken += len(path) > 1
        assert_close(found, case.expected(), case.precision)
    assert taken > 100, "too few of them took a path to tell"


def test_drawn_statements_of_all_dtypes(eager_splits: None) -> None:
    kinds = (torch.float16, torch.float32, torch.complex64, torch.int32, torch.uint8)
    for case, _ in long_cases(300, seed=33, max_factors=4, dtypes=kinds):
        found = called(case, optimize="optimal")
        assert found.dtype == called(case, optimize=False).dtype
        assert_close(found, case.expected(), case.precision)


def graph(edges: int = 40, nodes: int = 6, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "v": torch.randn(edges, **options),
        "X": torch.randn(nodes, 5, **options),
        "W": torch.randn(5, 4, **options),
        "src": torch.randint(nodes, (edges,)),
        "dst": torch.randint(nodes, (edges,)),
    }


@pytest.mark.parametrize("optimize", EVERY_WAY)
def test_gradients_of_both_orders(optimize: Any, eager_splits: None) -> None:
    values = graph(dtype=torch.float64)
    wanted = ("v", "X", "W")

    def aggregate(*leaves: Tensor) -> Tensor:
        named = {**values, **dict(zip(wanted, leaves, strict=True))}
        return insum.insum(AGGREGATE, out_shape=(6, 4), optimize=optimize, **named)

    leaves = tuple(values[name].requires_grad_() for name in wanted)
    assert gradcheck(aggregate, leaves)
    assert gradgradcheck(aggregate, leaves)


def test_gradients_are_split_themselves(eager_splits: None) -> None:
    leaves = {name: torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for name in "ABC"}
    torch.autograd.grad(insum.insum(CHAIN, **leaves).sum(), list(leaves.values()))
    known = {form.statement for form in insum.call.prepared._forms}
    assert {"dY_C[i,k] = dY[i,l] * C[k,l]", "dA[i,j] += dY_C[i,k] * B[j,k]"} <= known


@pytest.mark.parametrize("optimize", EVERY_WAY)
@pytest.mark.parametrize("operator", ["=", "+="])
def test_every_way_to_accumulate(optimize: Any, operator: str) -> None:
    values = graph(dtype=torch.float64)
    statement = AGGREGATE.replace("=", operator)
    given = {**values, "Y": torch.ones(6, 4, dtype=torch.float64)}
    want = oracle(statement, given)
    assert_close(insum.insum(statement, optimize=optimize, **given), want)
    assert bool(torch.equal(given["Y"], torch.ones(6, 4).double())) is (operator == "=")


def test_the_output_may_be_a_factor() -> None:
    C, A, B = (torch.randn(3, 3, dtype=torch.float64) for _ in range(3))
    want = C + C @ A @ B
    found = insum.insum("C[i,l] += C[i,j] * A[j,k] * B[k,l]", C=C, A=A, B=B, optimize=EVERY_WAY[-1])
    assert found is C
    torch.testing.assert_close(C, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_buffers_are_as_wide_as_sums(dtype: torch.dtype) -> None:
    """A half-precision buffer would overflow, and would round once more."""
    torch.manual_seed(0)
    A, B = (300 * torch.randn(64, 64).to(dtype) for _ in range(2))
    C = (1e-3 * torch.randn(64, 64)).to(dtype)
    exact = A.double() @ B.double() @ C.double()
    assert float((A.double() @ B.double()).abs().max()) > 65504
    for path in EVERY_WAY[4:]:
        found = insum.insum(CHAIN, A=A, B=B, C=C, optimize=path)
        assert found.dtype == dtype
        torch.testing.assert_close(found, exact.to(dtype), rtol=1e-2, atol=1.0)
        rounded = (found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 0.05
        assert bool(rounded.all())


def test_deterministic_mode_repeats_every_bit() -> None:
    values = graph(4000, 50)
    try:
        torch.use_deterministic_algorithms(True)
        for optimize in EVERY_WAY:
            first = insum.insum(AGGREGATE, out_shape=(50, 4), optimize=optimize, **values)
            assert torch.equal(
                first, insum.insum(AGGREGATE, out_shape=(50, 4), optimize=optimize, **values)
            )
    finally:
        torch.use_deterministic_algorithms(False)


def test_indices_out_of_range_are_named_as_before() -> None:
    values = graph()
    values["src"][7] = 6
    for optimize in EVERY_WAY:
        with pytest.raises(insum.IndexRangeError) as caught:
            insum.insum(AGGREGATE, out_shape=(6, 4), optimize=optimize, **values)
        assert "src[7] is 6, but it indexes dimension 0 of X" in str(caught.value)


@pytest.mark.parametrize("optimize", EVERY_WAY)
def test_transforms(optimize: Any, eager_splits: None) -> None:
    values = graph(dtype=torch.float64)

    def aggregate(X: Tensor) -> Tensor:
        named = {**values, "X": X}
        return insum.insum(AGGREGATE, out_shape=(6, 4), optimize=optimize, **named)

    want = aggregate(values["X"])
    many = torch.vmap(aggregate)(torch.stack([values["X"], 2 * values["X"]]))
    torch.testing.assert_close(many, torch.stack([want, 2 * want]))
    compiled = torch.compile(aggregate, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(values["X"]), want)


def test_formats_pass_the_wish_on() -> None:
    torch.manual_seed(0)
    dense = torch.randn(12, 9) * (torch.rand(12, 9) < 0.4)
    A = insum.formats.GroupCOO.from_dense(dense, group_size=2)
    X, W = torch.randn(9, 5), torch.randn(5, 4)
    statement = "Y[m,h] = A[m,k] * X[k,f] * W[f,h]"
    for optimize in (*EVERY_WAY[:4], EVERY_WAY[-1]):
        found = insum.einsum(statement, A=A, X=X, W=W, optimize=optimize)
        torch.testing.assert_close(found, dense @ X @ W)
    page = str(insum.explain(statement, A=A, X=X, W=W, optimize=EVERY_WAY[-1]))  # type: ignore[arg-type]
    assert "X_W[x0,h] = X[x0,f] * W[f,h]" in page


# --- what is said ---------------------------------------------------------------------------------


def test_explain_shows_the_path() -> None:
    values = {name: torch.ones(256, 256) for name in "ABC"}
    found = insum.explain(CHAIN, **values)
    assert "path [(0, 1), (0, 1)], 67,108,864 FLOPs instead of 12,884,901,888" in str(found)
    assert "  A_B[i,k] = A[i,j] * B[j,k]\n  Y[i,l] = A_B[i,k] * C[k,l]" in str(found)
    assert "one statement, path [(0, 1, 2)]" in str(
        insum.explain(CHAIN, **values, optimize=[(0, 1, 2)])
    )
    assert "order" not in str(
        insum.explain("y[i] = A[i,j] * x[j]", A=values["A"], x=torch.ones(256))
    )


def test_paths_as_numpy_and_opt_einsum_write_them() -> None:
    values = {name: torch.rand(4, 4) for name in "ABC"}
    want = values["A"] @ values["B"] @ values["C"]
    for path in (["einsum_path", (1, 2), (0, 1)], [[1, 2], [0, 1]], ((1, 2), (0, 1))):
        torch.testing.assert_close(insum.insum(CHAIN, **values, optimize=path), want)


def test_compiled_statements_hold_their_path() -> None:
    chain = insum.compile(CHAIN, optimize=[(1, 2), (0, 1)])
    assert repr(chain) == f"insum.compile({CHAIN!r}, optimize=[(1, 2), (0, 1)])"
    assert chain == insum.compile(CHAIN, optimize=((1, 2), (0, 1))) != insum.compile(CHAIN)
    values = {name: torch.rand(4, 4) for name in "ABC"}
    torch.testing.assert_close(chain(**values), values["A"] @ values["B"] @ values["C"])


# --- what is left to a library --------------------------------------------------------------------

PLAIN = {"A": torch.ones(2, 3), "B": torch.ones(3, 4), "s": torch.ones(()), "D": torch.ones(3, 3)}
LIBRARY = [
    ("C[i,j] = A[i,k] * B[k,j]", True),
    ("C[j,i] += A[i,k] * B[k,j]", True),
    ("C[i,j] = 2 * A[i,k] * B[k,j]", True),
    ("C[i,j] = relu(A[i,k]) * B[k,j]", False),
    ("C[i,j] = s * A[i,k] * B[k,j]", False),
    ("C[i,j] = A[i,k] * B[k,j] + 1.0", False),
    ("C[i,j] max= A[i,k] * B[k,j]", False),
    ("C[i] = A[i,k] * B[k,j]", False),
    ("C[i,k,j] = A[i,k] * B[k,j]", False),
    ("C[i,k] = A[i,k] * D[k,k]", False),
    ("C[i,j] = A[i,1] * B[k,j]", False),
]


@pytest.mark.parametrize(("statement", "left"), LIBRARY)
def test_what_is_a_matrix_product(statement: str, left: bool) -> None:
    values = {name: value for name, value in PLAIN.items() if name in statement.partition("=")[2]}
    assert is_matrix_product(bound(statement, values), accumulates=False) is left


def test_half_precision_is_rounded_once() -> None:
    values = {name: PLAIN[name].half() for name in "AB"}
    problem = bound("C[i,j] = A[i,k] * B[k,j]", values)
    assert is_matrix_product(problem, accumulates=False)
    assert not is_matrix_product(problem, accumulates=True)
    doubled = bound("C[i,j] = 2 * A[i,k] * B[k,j]", values)
    assert not is_matrix_product(doubled, accumulates=False)
    mixed = bound("C[i,j] = A[i,k] * B[k,j]", {**values, "A": PLAIN["A"]})
    assert not is_matrix_product(mixed, accumulates=False)


# --- as generated kernels -------------------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize("optimize", EVERY_WAY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_on_every_path(optimize: Any, dtype: torch.dtype) -> None:
    values = graph(dtype=torch.float32)
    for name in ("v", "X", "W"):
        values[name] = values[name].to(dtype)
    want = oracle(AGGREGATE, values, sizes={"Y": (6, 4)})
    with insum.settings(**ONLY_FUSED):
        found = insum.insum(AGGREGATE, out_shape=(6, 4), optimize=optimize, **values)
        assert found.dtype == dtype
        assert_close(found, want)
        total = torch.zeros(6, 4, dtype=dtype)
        insum.insum(AGGREGATE.replace("=", "+="), Y=total, optimize=optimize, **values)
        assert_close(total, want)


@pytest.mark.interpreter
def test_kernels_of_drawn_products_on_drawn_paths() -> None:
    source, taken = random.Random(11), 0
    options = {"max_factors": 4, "dtypes": (torch.float64, torch.float16), "max_points": 60}
    with insum.settings(**ONLY_FUSED):
        for case, count in itertools.islice(
            long_cases(200, seed=34, product_only=True, mixed=False, **options), 40
        ):
            if len(bound(case.statement, case.values, case.sizes, case.padded).terms) != 1:
                continue
            try:
                found = called(case, optimize=list(paths(count, source)))
            except (insum.UnsupportedError, insum.NotFusedError):
                continue
            taken += 1
            assert_close(found, case.expected(), case.precision)
    assert taken > 15


@pytest.mark.interpreter
def test_gradients_through_kernels(eager_splits: None) -> None:
    values = graph(20, dtype=torch.float64)
    leaves = [values[name].requires_grad_() for name in ("v", "X", "W")]
    with insum.settings(**ONLY_FUSED):
        found = insum.insum(AGGREGATE, out_shape=(6, 4), optimize="optimal", **values)
        got = torch.autograd.grad(found.square().sum(), leaves)
    rows = values["v"][:, None] * (values["X"] @ values["W"])[values["src"]]
    want = torch.zeros(6, 4, dtype=torch.float64).index_add(0, values["dst"], rows)
    for a, b in zip(got, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.interpreter
@pytest.mark.parametrize("optimize", EVERY_WAY)
@pytest.mark.parametrize("name", ["src", "dst"])
def test_an_output_stays_as_it_was_where_an_index_is_out_of_range(
    name: str, optimize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where kernels find out: nothing may have been written by then."""
    values = graph()
    values[name][7] = 6
    with pretended():
        total = torch.ones(6, 4)
        with pytest.raises(insum.IndexRangeError):
            insum.insum(AGGREGATE.replace("=", "+="), Y=total, optimize=optimize, **values)
            insum.synchronize()
        assert bool((total == 1).all())


@pytest.mark.interpreter
def test_statements_before_the_last_have_no_indices_in_place(
    monkeypatch: pytest.MonkeyPatch, eager_splits: None
) -> None:
    values = {**graph(), "W": torch.randn(5, 32)}
    values["dst"] %= 2
    request = request_of(AGGREGATE.replace("=", "+="), (2, 32), None, ())
    with pretended():
        call = prepare(request, {**values, "Y": torch.zeros(2, 32)})
        found = [
            [one.kinds.form.statement for one in call.staged(values, in_place=in_place)]
            for in_place in (False, True)
        ]
    assert found[0][0] == "v_X[dst[e],f] = v[e] * X[src[e],f]"
    assert found[1][0] == "X_W[x0,h] = X[x0,f] * W[f,h]"


UNEVEN = {
    # statement, sizes, and what is multiplied first; nothing where one statement is best
    "a bilinear layer": ("Y[b,o] = A[b,i] * B[o,i,j] * C[b,j]", (2034, 40, 37, 48), (0, 2)),
    "its gradient": ("Y[o,i,j] = A[b,o] * B[b,i] * C[b,j]", (100, 33, 20, 5000), (1, 2)),
    "factors of a tensor": ("Y[a,f] = A[a,b,c] * B[b,f] * C[c,f]", (42, 53, 776, 103), (0, 2)),
    "sides that fill tiles": ("Y[b,o] = A[b,i] * B[o,i,j] * C[b,j]", (2048, 64, 64, 64), None),
    "what is only scaled": ("Y[i,j] = A[n] * B[n,i] * C[n,j]", (57, 57, 50_000), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", UNEVEN)
def test_dense_factors_whose_sides_no_tile_divides(name: str, dtype: torch.dtype) -> None:
    """A library takes half the time of one kernel there, whose tiles are half empty."""
    statement, sizes, first = UNEVEN[name]
    parsed = parse(statement)
    names = dict.fromkeys((*variables(parsed.target), *variables(parsed.value)))
    extents = dict(zip(names, sizes, strict=True))
    values = {
        access.tensor: torch.empty([extents[i.var or ""] for i in access.indices], dtype=dtype)
        for access in accesses(parsed.value)
    }
    request = request_of(statement, None, None, ())
    problem = on_a_gpu(request.bind(values))
    found = stages_of(problem, request.form, layouts=layouts_of(problem, values))
    paths = [stage.positions for stage in found if stage.positions]
    assert paths == ([] if first is None else [first, (0, 1)])


@pytest.mark.parametrize(
    ("text", "shapes", "equation", "fills"),
    [
        (
            "y[b,o] = x[b,i] * W[o,i,j] * z[b,j]",
            {"x": (40, 23), "W": (60, 23, 21), "z": (40, 21)},
            "bi,oij,bj->bo",
            ["dy_W[b,i,j] = dy[b,o] * W[o,i,j]", "x_z[b,i,j] = x[b,i] * z[b,j]"],
        ),
        (
            "y[a,f] = T[a,b,c] * B[b,f] * D[c,f]",
            {"T": (19, 40, 18), "B": (40, 5), "D": (18, 5)},
            "abc,bf,cf->af",
            ["B_D[b,f,c] = B[b,f] * D[c,f]", "dy_T[f,b,c] = dy[a,f] * T[a,b,c]"],
        ),
    ],
)
def test_gradients_of_a_graph_go_its_way(
    text: str,
    shapes: dict[str, tuple[int, ...]],
    equation: str,
    fills: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, where that saves matrix products: as if sizes were larger."""
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    monkeypatch.setattr("insum.call.stages.NEARLY_ON_A_CPU", math.inf)
    draw = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_()
        for s in shapes.values()
    ]
    given = dict(zip(shapes, leaves, strict=True))
    want = torch.einsum(equation, *leaves)
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    run = _watch_fills(monkeypatch)
    for least in (math.inf, 0):
        monkeypatch.setattr("insum.host.gradient_order.LEAST_REVERSED", least)
        found = insum.insum(text, **given)
        gradients = torch.autograd.grad(found.square().sum(), leaves)
        for one, other in zip((found, *gradients), (want, *wanted), strict=True):
            torch.testing.assert_close(one, other)
        assert sorted(run) == ([] if least else fills)
        monkeypatch.setattr("insum.call.prepared._forms", {})
        monkeypatch.setattr("insum.call.lookup._fronts", {})


#: What is summed by itself, or before it is scattered, and what is not.
SUMMED_FIRST: dict[str, tuple[dict[str, tuple[int, ...]], str, list[str]]] = {
    "y[b,c,d] = F[b,c,d] * G[a,b,d]": (
        {"F": (96, 256, 12), "G": (128, 96, 12)},
        "",
        ["G_1[b,d] = G[a,b,d]", "y[b,c,d] = F[b,c,d] * G_1[b,d]"],
    ),
    "y[c,d,e] = F[b,c,e] * G[a,d,e]": (
        {"F": (9, 65, 65), "G": (32, 64, 65)},
        "",
        ["F_1[c,e] = F[b,c,e]", "G_1[d,e] = G[a,d,e]", "y[c,d,e] = F_1[c,e] * G_1[d,e]"],
    ),
    "y[a,T[d]] = F[a,b,c,d] * G[a,c,d]": (
        {"F": (65, 17, 32, 200), "G": (65, 32, 200), "T": (200,)},
        "T",
        ["F_G[a,d] = F[a,b,c,d] * G[a,c,d]", "y[a,T[d]] = F_G[a,d]"],
    ),
    "y[T[b],c] = F[a,b,c]": (
        {"F": (900, 64, 96), "T": (64,)},
        "T",
        ["F_1[b,c] = F[a,b,c]", "y[T[b],c] = F_1[b,c]"],
    ),
    # one number for each entry and place, as in a convolution: sums are short beside it
    "y[T[p],n] = F[p,k] * W[k,n]": (
        {"F": (40_000, 64), "W": (64, 64), "T": (40_000,)},
        "T",
        [],
    ),
    "y[T[p],n] = w[p] * F[J[p],n]": (
        {"F": (9000, 64), "w": (90_000,), "J": (90_000,), "T": (90_000,)},
        "T J",
        [],
    ),
    # the matrix of an entry lies together
    "y[T[p],n] = F[p,k,n] * w[p,k]": (
        {"w": (900, 64), "F": (900, 64, 96), "T": (900,)},
        "T",
        [],
    ),
    # little is saved
    "y[b,d] = F[b,d] * G[a,b]": ({"F": (90, 30), "G": (20, 90)}, "", []),
}
#: What is small beside what it is made of, or lies where rows of a result read it one by one; the
#: shape of the result comes first.
SMALL_FIRST: dict[str, tuple[tuple[int, ...], dict[str, tuple[int, ...]], str, list[str]]] = {
    "y[a,c] = F[b,J[c]] * G[a,c] * H[b,c]": (
        (9000, 31),
        {"F": (16, 1000), "G": (9000, 31), "H": (16, 31), "J": (31,)},
        "J",
        ["F_H[c] = F[b,J[c]] * H[b,c]", "y[a,c] = F_H[c] * G[a,c]"],
    ),
    "y[T[b],c] = F[J[a],b] * G[d,c]": (
        (1000, 500),
        {"F": (9000, 128), "G": (17, 500), "J": (31,), "T": (128,)},
        "J T",
        ["F_1[b] = F[J[a],b]", "G_1[c] = G[d,c]", "y[T[b],c] = F_1[b] * G_1[c]"],
    ),
    # steps of a sum that is scattered wait for one another
    "y[a,T[b],d] = F[a,b,c,d]": (
        (5, 100, 24),
        {"F": (5, 500, 16, 24), "T": (500,)},
        "T",
        ["F_1[b,a,d] = F[a,b,c,d]", "y[a,T[b],d] = F_1[b,a,d]"],
    ),
    # entries lie along memory, and so would be read one by one
    "y[b,T[c],d] = F[a,b,d] * G[a,b,c] * H[c,a]": (
        (16, 20_000, 3),
        {"F": (3, 16, 3), "G": (3, 16, 90_000), "H": (90_000, 3), "T": (90_000,)},
        "T",
        ["F_G_H[c,b,d] = F[a,b,d] * G[a,b,c] * H[c,a]", "y[b,T[c],d] = F_G_H[c,b,d]"],
    ),
    # sixteen places, which many additions would wait for
    "y[a,T[c]] = F[a] * G[a,c] * H[a,b,c]": (
        (3, 16),
        {"F": (3,), "G": (3, 90_000), "H": (3, 12, 90_000), "T": (90_000,)},
        "T",
        ["F_G_H[a,c] = F[a] * G[a,c] * H[a,b,c]", "y[a,T[c]] = F_G_H[a,c]"],
    ),
    "y[J[c]] = z[b,c] * F[b,c,d] * G[c,b,d]": (
        (16,),
        {"z": (32, 3000), "F": (32, 3000, 100), "G": (3000, 32, 100), "J": (3000,)},
        "J",
        ["z_F_G[c] = z[b,c] * F[b,c,d] * G[c,b,d]", "y[J[c]] = z_F_G[c]"],
    ),
    # a matrix instruction has its points
    "y[T[b,g],k] = F[b,f,g] * G[S[b,f],k]": (
        (9000, 48),
        {"F": (500, 40, 40), "G": (9000, 48), "S": (500, 40), "T": (500, 40)},
        "S T",
        [],
    ),
}


@pytest.mark.parametrize("statement", SUMMED_FIRST)
def test_what_is_summed_before_all_else(statement: str) -> None:
    shapes, indices, want = SUMMED_FIRST[statement]
    for dtype in (torch.float32, torch.float16):
        values = {
            name: found if name in indices.split() else found.to(dtype)
            for name, found in described(shapes, indices).items()
        }
        shape = None
        if indices:
            shape = (65, 200) if "[a,T" in statement else (9000, shapes["F"][-1])
        request = request_of(statement, shape, None, ())
        found = stages_of(on_a_gpu(request.bind(values)), request.form)
        assert texts(found) == want
        # a sum may be too large for half precision where that of the whole is not
        assert all(stage.form.dtype == torch.float32 for stage in found[:-1])


@pytest.mark.parametrize("statement", SMALL_FIRST)
def test_what_is_small_is_made_first(statement: str) -> None:
    shape, shapes, indices, want = SMALL_FIRST[statement]
    for dtype in (torch.float32, torch.float16):
        values = {
            name: found if name in indices.split() else found.to(dtype)
            for name, found in described(shapes, indices).items()
        }
        request = request_of(statement, shape, None, ())
        found = stages_of(on_a_gpu(request.bind(values)), request.form)
        assert texts(found) == want
        assert all(stage.form.dtype == torch.float32 for stage in found[:-1])


def test_little_buffers_of_halves_are_not_rounded() -> None:
    """A product of two may be too large where that of the whole is not."""
    values = described(
        {"F": (9000,), "G": (100,), "H": (16, 9000), "I": (9000,), "J": (900,)}, "I J"
    )
    values = {n: v if n in "IJ" else v.half() for n, v in values.items()}
    request = request_of("y[] = F[a] * G[I[a]] * H[J[b],a]", None, None, ())
    found = stages_of(on_a_gpu(request.bind(values)), request.form)
    assert [str(stage.form.dtype)[6:] for stage in found] == ["float32", "float32", "float16"]


def test_sums_of_halves_that_are_scattered_are_not_rounded() -> None:
    """They may be too large where what they are multiplied by makes them small again."""
    shapes = {"F": (30,), "G": (9000,), "H": (40, 9000), "K": (30,), "L": (50, 40, 9000)}
    values = {n: v.half() for n, v in described(shapes).items()} | described({"T": (9000,)}, "T")
    request = request_of(
        "y[d,T[a],b] = F[b] * G[a] * H[d,a] * K[b] * L[c,d,a]", (40, 100, 30), None, ()
    )
    found = stages_of(on_a_gpu(request.bind(values)), request.form)
    assert len(found) > 1 and all(one.form.dtype == torch.float32 for one in found[:-1])


def test_an_order_of_many_indices_is_found() -> None:
    """On a CPU, where nothing is summed first: buffers of buffers have no end."""
    values = described({"A": (9,), "B": (16, 100), "C": (9,), "J": (2000,), "T": (2000,)}, "J T")
    request = request_of("y[a,T[c]] = A[a] * B[J[c],b] * C[a]", (9, 2000), None, ())
    problem = replace(request.bind(values), device=torch.device("cpu"))
    assert stages_of(problem, request.form) == ()
