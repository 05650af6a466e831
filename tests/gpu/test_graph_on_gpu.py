"""The graph path on a GPU: the same values as the oracle, no waiting when warm, deterministic mode,
autocast, capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import insum
from insum.testing import assert_close, draw_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PRODUCT = "C[D[y],x] += A[y,E[r]] * B[r,x]"


@pytest.fixture(autouse=True)
def graph() -> Iterator[None]:
    with insum.settings(backend="graph"):
        yield


def tensors(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    values = {
        "A": torch.randn(40, 9),
        "B": torch.randn(30, 5),
        "D": torch.randint(4, (40,)),
        "E": torch.randint(9, (30,)),
    }
    return {name: v.cuda() for name, v in values.items()} | more


KINDS = [
    (torch.float32, torch.float64),
    (torch.int64, torch.int32, torch.bool),
    (torch.float16, torch.bfloat16),
    (torch.complex64, torch.float32),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtypes", KINDS)
def test_cases(seed: int, dtypes: tuple[torch.dtype, ...]) -> None:
    for case in draw_cases(40, seed=seed, dtypes=dtypes):
        assert_close(case.to("cuda").run().cpu(), case.expected(), case.precision)


def test_numbers_in_cpu_memory() -> None:
    values = tensors(s=torch.tensor(2.0), k=torch.tensor(1))
    a, s = values["A"], values["s"]
    torch.testing.assert_close(insum.insum("y[i] = A[i,j] * s", A=a, s=s), a.sum(1) * 2)
    torch.testing.assert_close(
        insum.insum("y[i] = exp(s) * A[i,j] + s", A=a, s=s), a.sum(1) * s.exp().cuda() + 2
    )
    torch.testing.assert_close(insum.insum("y[j] = A[k[],j]", A=a, k=values["k"]), a[1])


@pytest.mark.parametrize(
    "statement",
    [
        PRODUCT,
        PRODUCT.replace("+=", "max="),
        "C[D[y],E[r]] += A[y,E[r]] * B[r,x]",
        "C[D[y],E[r]] min= A[y,E[r]] * B[r,x]",
    ],
)
def test_deterministic(statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        shape = (4, 9) if "E[r]]" in statement.split("=")[0] else (4, 5)
        results = [insum.insum(statement, out_shape=shape, **tensors()) for _ in range(5)]
        assert all(torch.equal(r, results[0]) for r in results)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_warm_call_does_not_wait() -> None:
    values = tensors()
    insum.insum(PRODUCT, out_shape=(4, 5), **values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        insum.insum(PRODUCT, out_shape=(4, 5), **values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_index_values_are_checked_once_per_version() -> None:
    values = tensors()
    insum.insum(PRODUCT, out_shape=(4, 5), **values)
    values["D"][3] = 7
    with pytest.raises(insum.IndexRangeError, match=r"D\[3\] is 7"):
        insum.insum(PRODUCT, out_shape=(4, 5), **values)


def test_capture() -> None:
    values, C = tensors(), torch.zeros(4, 5, device="cuda")
    expected = insum.insum(PRODUCT, out_shape=(4, 5), **values)
    insum.insum(PRODUCT, C=C, **values)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        insum.insum(PRODUCT, C=C, **values)
    C.zero_()
    recorded.replay()
    torch.testing.assert_close(C, expected)


def test_autocast() -> None:
    with torch.autocast("cuda", dtype=torch.float16):
        assert insum.insum(PRODUCT, out_shape=(4, 5), **tensors()).dtype == torch.float16


def test_gradients() -> None:
    values = {
        n: v.double().requires_grad_() if v.is_floating_point() else v for n, v in tensors().items()
    }
    values["A"], values["D"] = values["A"][:6].detach().requires_grad_(), values["D"][:6]
    f = lambda A, B: insum.insum(PRODUCT, A=A, B=B, D=values["D"], E=values["E"], out_shape=(4, 5))
    assert torch.autograd.gradcheck(f, (values["A"], values["B"]), nondet_tol=1e-9)


@pytest.mark.slow
def test_compiled() -> None:
    values = tensors()
    compiled = torch.compile(
        lambda **v: insum.insum(PRODUCT, out_shape=(4, 5), **v).sin(), fullgraph=True
    )
    torch.testing.assert_close(
        compiled(**values), insum.insum(PRODUCT, out_shape=(4, 5), **values).sin()
    )
