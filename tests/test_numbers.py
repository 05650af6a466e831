"""Numbers, literals and integers are as exact as what they meet: in float64 to the last bits, on
every path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.runtime import inspection, symbolic
from kernels import ONLY_FUSED, bound, poison_new_memory

torch.manual_seed(0)
X = torch.randn(5, 7, dtype=torch.float64)
N = torch.arange(1, 8)
THIRD, TENTH = 1 / 3, 0.1

CASES: list[tuple[str, dict[str, Any], Callable[[], Tensor]]] = [
    ("y[i,j] = reciprocal(3) * x[i,j]", {}, lambda: THIRD * X),
    ("y[i,j] = 0.1 * x[i,j]", {}, lambda: TENTH * X),
    ("y[i,j] = 1e300 * x[i,j] * 1e-300", {}, lambda: X),
    ("y[i,j] = a * x[i,j]", {"a": TENTH}, lambda: TENTH * X),
    ("y[i,j] = a * x[i,j]", {"a": 1e300}, lambda: 1e300 * X),
    ("y[i,j] = a * x[i,j]", {"a": 3}, lambda: 3 * X),
    ("y[i,j] = a * x[i,j]", {"a": True}, lambda: X),
    ("y[i,j] = a * x[i,j]", {"a": 2**40 + 1}, lambda: float(2**40 + 1) * X),
    ("y[i,j] = exp(a) * x[i,j]", {"a": 0.3}, lambda: math.exp(0.3) * X),
    ("y[i,j] = 0.1 * a * exp(a + 0.1) * x[i,j]", {"a": TENTH}, lambda: 0.01 * math.exp(0.2) * X),
    ("y[i,j] = sqrt(2) * tanh(a) * x[i,j]", {"a": 0.05}, lambda: 2**0.5 * math.tanh(0.05) * X),
    ("y[i,j] = relu(a) * sigmoid(0) * x[i,j]", {"a": TENTH}, lambda: TENTH * 0.5 * X),
    ("y[i,j] = eq(a, 0.1) * x[i,j]", {"a": TENTH + 1e-12}, lambda: 0 * X),
    ("y[i,j] = eq(reciprocal(3), a) * x[i,j]", {"a": THIRD}, lambda: X),
    ("y[i,j] = x[i,j] + a * 0.1", {"a": TENTH}, lambda: X + 0.01),
    ("y[i,j] = tanh(0.1 * x[i,j])", {}, lambda: (TENTH * X).tanh()),
    ("y[i] = exp(a * x[i,j]) * 0.1", {"a": TENTH}, lambda: TENTH * (TENTH * X).exp().sum(1)),
    ("y[i] max= a * x[i,j] + reciprocal(3)", {"a": TENTH}, lambda: (TENTH * X + THIRD).amax(1)),
    ("y[i,j] = reciprocal(n[j]) * x[i,j]", {"n": N}, lambda: X / N),
    ("y[i,j] = exp(0.1 + n[j]) * x[i,j]", {"n": N}, lambda: (N.double() + TENTH).exp() * X),
    ("y[i,j] = log(n[j] * 0.3) * x[i,j]", {"n": N}, lambda: (N.double() * 0.3).log() * X),
    ("y[i,j] = reciprocal(m) * x[i,j]", {"m": torch.tensor(3)}, lambda: THIRD * X),
]  # fmt: skip
IDS = [f"{statement} {' '.join(values)}" for statement, values, _ in CASES]


def check(statement: str, values: dict[str, Any], wanted: Tensor) -> None:
    got = insum.insum(statement, x=X, **values)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("statement", "values", "wanted"), CASES, ids=IDS)
def test_numbers_beside_float64(
    statement: str, values: dict[str, Any], wanted: Callable[[], Tensor]
) -> None:
    check(statement, values, wanted())


@pytest.mark.interpreter
@pytest.mark.parametrize(("statement", "values", "wanted"), CASES, ids=IDS)
def test_numbers_in_kernels_of_float64(
    statement: str,
    values: dict[str, Any],
    wanted: Callable[[], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison_new_memory(monkeypatch)
    with insum.settings(**ONLY_FUSED):
        check(statement, values, wanted())


def accumulated(value: str, **numbers: Any) -> float:
    C = torch.zeros(3, dtype=torch.float64)
    insum.insum(f"C[i] += {value}", C=C, **numbers)
    assert C[0] == C[1] == C[2]
    return C[0].item()


def into_float64() -> None:
    assert accumulated("0.1") == TENTH
    assert accumulated("a", a=TENTH) == TENTH
    assert accumulated("reciprocal(3)") == THIRD
    assert accumulated("0.1 * a", a=TENTH) == pytest.approx(0.01, rel=1e-15)
    assert accumulated("k", k=2**53 - 1) == 2**53 - 1


def test_numbers_into_float64() -> None:
    into_float64()


@pytest.mark.interpreter
def test_numbers_into_float64_by_kernels() -> None:
    with insum.settings(**ONLY_FUSED):
        into_float64()


def test_numbers_beside_narrower_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = X.to(dtype)
        got = insum.insum("y[i,j] = reciprocal(3) * exp(a) * x[i,j]", x=x, a=0.3)
        assert got.dtype == dtype
        torch.testing.assert_close(got, (x.float() * (math.exp(0.3) / 3)).to(dtype))


def test_numbers_beside_complex_numbers() -> None:
    z = torch.complex(X, X.flip(0))
    got = insum.insum("y[i,j] = relu(a) * reciprocal(3) * exp(b) * z[i,j]", a=0.1, b=0.2 + 1j, z=z)
    assert got.dtype == torch.complex128
    factor = TENTH * THIRD * torch.tensor(0.2 + 1j, dtype=torch.complex128).exp()
    torch.testing.assert_close(got, factor * z, rtol=1e-14, atol=1e-14)


def test_integers_stay_integers() -> None:
    """Functions that keep integers are computed with all of their 64 bits."""
    n = torch.tensor([2**60 + 1, -(2**60) - 1])
    assert insum.insum("y[i] = abs(n[i])", n=n).tolist() == [2**60 + 1] * 2
    x = torch.zeros(2, dtype=torch.float64)
    assert insum.insum("y[i] = eq(n[i], k) + x[i]", n=n, k=2**60, x=x).tolist() == [0, 0]


def test_gradients_of_numbers_beside_float64() -> None:
    x = X.clone().requires_grad_()
    f = lambda x: insum.insum("y[i] = exp(a * x[i,j]) * reciprocal(3)", a=TENTH, x=x)
    assert torch.autograd.gradcheck(f, (x,))
    (got,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(got, THIRD * TENTH * (TENTH * X).exp(), rtol=1e-14, atol=1e-14)


@pytest.mark.compile_only
def test_numbers_are_passed_as_doubles() -> None:
    values = {"x": X, "a": 0.3, "k": 3}
    for target, mark in (("sm_90", ".param .f64"), ("gfx942", ".size:           8")):
        problem = bound("y[i,j] = a * k * 0.1 * x[i,j]", values)
        (one,) = [c for _, c in inspection.compile_only(problem, values, target)]
        text = one.assembly["ptx" if target == "sm_90" else "amdgcn"]
        assert mark in text
    single = bound("y[i,j] = a * x[i,j]", narrow := {"x": X.float(), "a": 0.3})
    ((_, one),) = inspection.compile_only(single, narrow, "sm_90")
    assert ".param .f32" in one.assembly["ptx"] and ".f64" not in one.assembly["ptx"]


def test_the_signature_says_double_where_it_must() -> None:
    for dtype, number, says in (
        (torch.float64, 0.3, True),
        (torch.float64, 3, False),
        (torch.float32, 0.3, False),
    ):
        values = {"x": X.to(dtype), "a": number}
        (one,) = (
            inspection.plan_only(bound("y[i,j] = a * x[i,j]", values), values).steps[0].launches
        )
        assert ('a_number: "fp64"' in one.kernel.source) is says
        assert "a_number" in {argument.name for argument in one.kernel.arguments}


def test_a_double_is_not_exported() -> None:
    values = {"x": X, "a": 0.3}
    problem = bound("y[i,j] = a * x[i,j]", values)
    with pytest.raises(symbolic.CannotFuse, match="would be passed in float32"):
        symbolic.program_of(problem, values)
    symbolic.program_of(bound("y[i,j] = a * x[i,j]", whole := {"x": X, "a": 3}), whole)
