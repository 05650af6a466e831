"""The order of contraction on a GPU: buffers between kernels, and products left to cuBLAS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.testing import assert_close, draw_cases
from kernels import error

pytestmark = pytest.mark.gpu
CHAIN = "Y[i,l] = A[i,j] * B[j,k] * C[k,l]"
AGGREGATE = "Y[dst[e],h] = v[e] * X[src[e],f] * W[f,h]"
PATHS = [True, "optimal", "greedy", [(0, 1), (0, 1)], [(1, 2), (0, 1)]]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def graph(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    edges, nodes = 200_000, 5_000
    return {
        "v": torch.randn(edges, device="cuda", dtype=dtype),
        "X": torch.randn(nodes, 64, device="cuda", dtype=dtype),
        "W": torch.randn(64, 64, device="cuda", dtype=dtype),
        "src": torch.randint(nodes, (edges,), device="cuda"),
        "dst": torch.randint(nodes, (edges,), device="cuda"),
    }


def expected(values: dict[str, Tensor]) -> Tensor:
    v, X, W = (values[name].double() for name in ("v", "X", "W"))
    rows = v[:, None] * (X @ W)[values["src"]]
    return torch.zeros(5_000, 64, device="cuda", dtype=torch.float64).index_add(
        0, values["dst"], rows
    )


@pytest.mark.parametrize("optimize", PATHS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_path(optimize: Any, dtype: torch.dtype) -> None:
    values = graph(dtype)
    want = expected(values)
    found = insum.insum(AGGREGATE, out_shape=(5_000, 64), optimize=optimize, **values)
    assert found.dtype == dtype and error(found, want) < TOLERANCE[dtype]
    total = torch.zeros_like(found)
    insum.insum(AGGREGATE.replace("=", "+="), Y=total, optimize=optimize, **values)
    assert error(total, want) < TOLERANCE[dtype]
    insum.synchronize()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_chain_is_two_products(dtype: torch.dtype) -> None:
    A, B, C = (torch.randn(512, 512, device="cuda", dtype=dtype) for _ in range(3))
    want = A.double() @ B.double() @ C.double()
    assert error(insum.insum(CHAIN, A=A, B=B, C=C), want) < TOLERANCE[dtype]
    with insum.settings(require_fused=True):
        assert error(insum.insum(CHAIN, A=A, B=B, C=C), want) < TOLERANCE[dtype]


def test_gradients() -> None:
    values = graph(torch.float64)
    leaves = [values[name].requires_grad_() for name in ("v", "X", "W")]
    found = insum.insum(AGGREGATE, out_shape=(5_000, 64), **values)
    got = torch.autograd.grad(found.square().sum(), leaves)
    want = torch.autograd.grad(expected(values).square().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 1e-11


def test_an_output_stays_as_it_was_where_an_index_is_out_of_range() -> None:
    for name in ("src", "dst"):
        values = graph()
        values[name][17] = 5_000
        for optimize in PATHS:
            total = torch.ones(5_000, 64, device="cuda")
            with pytest.raises(insum.IndexRangeError):
                insum.insum(AGGREGATE.replace("=", "+="), Y=total, optimize=optimize, **values)
                insum.synchronize()
            assert bool((total == 1).all()), (name, optimize)


def test_deterministic_mode() -> None:
    values = graph()
    try:
        torch.use_deterministic_algorithms(True)
        first = insum.insum(AGGREGATE, out_shape=(5_000, 64), **values)
        for _ in range(4):
            assert torch.equal(first, insum.insum(AGGREGATE, out_shape=(5_000, 64), **values))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_recorded_graph() -> None:
    values = graph()
    values = {n: insum.unchanging(v) if n in ("src", "dst") else v for n, v in values.items()}
    for _ in range(3):
        want = insum.insum(AGGREGATE, out_shape=(5_000, 64), **values)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        found = insum.insum(AGGREGATE, out_shape=(5_000, 64), **values)
    recorded.replay()
    assert error(found, want) < 1e-5


def test_a_matrix_product_is_left_to_the_library() -> None:
    A, B = torch.randn(64, 32, 48, device="cuda"), torch.randn(64, 48, 40, device="cuda")
    statement = "C[b,i,j] = A[b,i,k] * B[b,k,j]"
    assert "cuBLAS" in str(insum.explain(statement, A=A, B=B))
    assert torch.equal(insum.insum(statement, A=A, B=B), torch.einsum("bik,bkj->bij", A, B))
    with insum.settings(backend="fused"):
        assert "cuBLAS" not in str(insum.explain(statement, A=A, B=B))
        assert error(insum.insum(statement, A=A, B=B), A.double() @ B.double()) < 1e-5
    config = insum.Config(m=32, n=32, k=16)
    assert "cuBLAS" not in str(insum.explain(statement, A=A, B=B, config=config))
    assert "cuBLAS" in insum.tune(statement, A=A, B=B).source


def test_drawn_statements_wherever_they_can_be_split() -> None:
    for case in draw_cases(60, seed=5, max_factors=4, dtypes=(torch.float64,), mixed=False):
        moved = case.to("cuda")
        found = insum.insum(
            moved.statement,
            sizes=moved.sizes,
            padded=moved.padded,
            optimize="optimal",
            **moved.values,
        )
        assert_close(found.cpu(), case.expected(), case.precision)
