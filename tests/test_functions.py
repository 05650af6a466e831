"""The functions of the language: values beside the oracle and torch, gradients to second order,
what is written and what it means.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import insum
from insum.lang.derive import adjoint
from insum.lang.parser import parse
from insum.testing import oracle

TO, FROM = torch.tensor([1, 0, 1]), torch.tensor([2, 2, 0])
U = "A[i,j] + 0.5 * b[of[i]]"
#: Every function as a statement of one value; what torch makes of that value ``u``.
FORMS = {
    "sin(u)": torch.sin,
    "cos(u)": torch.cos,
    "erf(u)": torch.erf,
    "expm1(u)": torch.expm1,
    "log1p(abs(u))": lambda u: u.abs().log1p(),
    "leaky_relu(u)": F.leaky_relu,
    "leaky_relu(u, 0.2)": lambda u: F.leaky_relu(u, 0.2),
    "elu(u)": F.elu,
    "elu(u, 1.5)": lambda u: F.elu(u, 1.5),
    "gelu(u)": F.gelu,
    "silu(u)": F.silu,
    "softplus(u)": F.softplus,
    "(u) ** 2": torch.square,
    "(u) ** -3": lambda u: u**-3,
    "(1 + (u)**2) ** 0.7": lambda u: (1 + u * u) ** 0.7,
    "(1 + (u)**2) ** -0.5": lambda u: (1 + u * u).rsqrt(),
    "pow(u, 1) + pow(u, 0)": lambda u: u + 1,
    "1 / (2 + sin(u))": lambda u: 1 / (2 + u.sin()),
    "maximum(u, 0.25)": lambda u: u.clamp(min=0.25),
    "minimum(u, sin(u))": lambda u: torch.minimum(u, u.sin()),
    "where(u > 0.1, sin(u), 3)": lambda u: torch.where(u > 0.1, u.sin(), 3.0),
    "(u <= 0.2) * exp(u)": lambda u: (u <= 0.2) * u.exp(),
    "(u != 0.2) * (u >= 0) * (u < 9) * whole(u)": lambda u: u * (u >= 0),
    "whole(u) * ones(u)": lambda u: u,
}


def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "A": torch.randn(3, 2, dtype=torch.float64),
        "b": torch.randn(3, dtype=torch.float64),
    }


def written(form: str) -> str:
    """A form as a statement that gathers and scatters."""
    return "y[to[i]] = " + re.sub(r"\bu\b", U, form)


def torchs(form: str, A: Tensor, b: Tensor) -> Tensor:
    found = FORMS[form](A + 0.5 * b[FROM][:, None]).sum(1)
    return torch.zeros(2, dtype=A.dtype).index_add(0, TO, found)


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form: str) -> None:
    statement, given = written(form), values()
    index = {"to": TO, "of": FROM}
    assert parse(str(parse(statement))) == parse(statement)
    wanted = torchs(form, **given)
    meant = oracle(statement, {**given, **index}, sizes={0: 2})
    torch.testing.assert_close(torch.from_numpy(meant), wanted)
    leaves = [v.requires_grad_() for v in given.values()]
    ours = insum.insum(statement, sizes={0: 2}, **given, **index)
    for a, b in zip(_derivatives(ours, leaves), _derivatives(torchs(form, **given), leaves)):
        torch.testing.assert_close(a, b)


def _derivatives(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """A value, its gradients and theirs."""
    weight = torch.tensor([1.0, -2.0], dtype=y.dtype)
    first = torch.autograd.grad(y @ weight, leaves, create_graph=True, materialize_grads=True)
    total = sum((g * g).sum() for g in first)
    second = (
        torch.autograd.grad(total, leaves, materialize_grads=True)
        if isinstance(total, Tensor) and total.requires_grad
        else [torch.zeros_like(v) for v in leaves]
    )
    return [y, *first, *second]


def test_third_order() -> None:
    x = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    ours, theirs = insum.insum("t[] = silu(x[i]) * gelu(x[i])", x=x), F.silu(x) * F.gelu(x)
    for _ in range(3):
        (ours,) = torch.autograd.grad(ours.sum(), x, create_graph=True)
        (theirs,) = torch.autograd.grad(theirs.sum(), x, create_graph=True)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("statement", "tensor", "expected"),
    [
        # 1 at every j, of which only A tells
        ("y[i] = whole(A[i,j] + b[i])", "b", "db[i] += dy[i] * ones(A[i,j])"),
        ("y[i] = whole(A[i,j] + b[i])", "A", "dA[i,j] += dy[i]"),
        ("y[i] = whole(A[i,j] + b[i]) * c[j]", "b", "db[i] += dy[i] * c[j]"),
        # padding in S is known from nothing else
        ("y[i] = whole(A[S[i,j]] + b[i,j])", "b", "db[i,j] += dy[i] * ones(A[S[i,j]])"),
        (
            "y[i] = where(c[i], A[i,j], b[i])",
            "b",
            "db[i] += dy[i] * where(c[i], 0, 1) * ones(A[i,j])",
        ),
        ("y[i] = x[i] ** 2", "x", "dx[i] += 2 * dy[i] * whole(x[i])"),
        ("y[i] = leaky_relu(x[i], 0.2)", "x", "dx[i] += dy[i] * where(lt(0, x[i]), 1, 0.2)"),
    ],
)
def test_adjoint(statement: str, tensor: str, expected: str) -> None:
    assert adjoint(statement, tensor).statements == (expected,)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("y[i] = a[i] / b[i] / 4", "y[i] = 0.25 * a[i] * reciprocal(b[i])"),
        ("y[i] = -a[i] ** 2 * 3 ** 2", "y[i] = -9 * pow(a[i], 2)"),
        ("y[i] = a[i] ** -0.5 + 2 ** -1", "y[i] = pow(a[i], -0.5) + 0.5"),
        ("y[i] = (a[i] > b[i]) + (a[i] >= b[i])", "y[i] = lt(b[i], a[i]) + le(b[i], a[i])"),
        ("y[i] = a[i] == b[i]", "y[i] = eq(a[i], b[i])"),
        ("y[i] -= a[i] - b[i]", "y[i] += -(a[i] - b[i])"),
        ("y[i] = elu(a[i])", "y[i] = elu(a[i], 1.0)"),
    ],
)
def test_what_is_written_is_short_for_functions(text: str, same: str) -> None:
    assert str(parse(text)) == str(parse(same)) == same


def test_subtraction_in_place() -> None:
    y, a = torch.ones(3), torch.tensor([1.0, 2.0, 4.0])
    assert insum.insum("y[to[i]] -= a[i]", y=y, a=a, to=torch.tensor([0, 0, 2])) is y
    assert y.tolist() == [-2.0, 1.0, -3.0]


@pytest.mark.parametrize("graded", [False, True])
def test_compiled(graded: bool) -> None:
    def run(a: Tensor, b: Tensor, to: Tensor) -> Tensor:
        y = a.new_ones(3)
        insum.insum(
            "y[to[i]] -= where(a[i] > 0.5, gelu(a[i]) / b[i], b[i] ** 2)", y=y, a=a, b=b, to=to
        )
        return y

    given = torch.tensor([0.2, 1.0, -1.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 2])
    a = given[0].requires_grad_(graded)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    ours, theirs = compiled(a, *given[1:]), run(a, *given[1:])
    torch.testing.assert_close(ours, theirs)
    assert theirs.tolist() != [1.0, 1.0, 1.0]
    if graded:
        first, second = (torch.autograd.grad(y.sum(), a)[0] for y in (ours, theirs))
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    ("statement", "dtype"),
    [
        ("y[i] = n[i] / 2", torch.float32),
        ("y[i] = n[i] ** 2", torch.int64),
        ("y[i] = n[i] ** -1", torch.float32),
        ("y[i] = n[i] ** 0.5", torch.float32),
        ("y[i] = maximum(n[i], 3)", torch.int64),
        ("y[i] = where(h[i] > 0, n[i], 7)", torch.int64),  # a condition has no say
        ("y[i] = where(n[i], h[i], 0)", torch.float16),
        ("y[i] = silu(n[i])", torch.float32),
        ("y[i] = (n[i] < 3) * h[i]", torch.float16),
    ],
)
def test_dtypes(statement: str, dtype: torch.dtype) -> None:
    given = {"n": torch.tensor([1, 2, 5]), "h": torch.tensor([0.5, -1.0, 0.0]).half()}
    given = {name: v for name, v in given.items() if f"{name}[" in statement}
    found = insum.insum(statement, **given)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), torch.from_numpy(oracle(statement, given)).double())


def test_what_is_absent_stays_absent() -> None:
    """A function of nothing is not a function of 0: padding contributes nothing at all."""
    table, x = torch.tensor([[0, -1], [1, 0]]), torch.tensor([1.0, 2.0], requires_grad=True)
    run = lambda x: insum.insum(
        "y[i] = cos(x[S[i,j]]) + 0 * whole(x[S[i,j]] + 1)", x=x, S=table, padded=("S",)
    )
    assert_close = torch.testing.assert_close
    assert_close(run(x).detach(), torch.stack([x[0].cos(), x[1].cos() + x[0].cos()]).detach())
    run(x).sum().backward()
    assert_close(x.grad, -(torch.tensor([2.0, 1.0]) * x.detach().sin()))


def test_exponents_in_parentheses() -> None:
    x = torch.tensor([1.0, 8.0])
    assert_close = torch.testing.assert_close
    assert_close(insum.insum("y[i] = x[i] ** (1/3) - x[i] ** -(2)", x=x), x ** (1 / 3) - x**-2)


def test_halves_are_ordered_beside_floats_as_in_torch() -> None:
    x = torch.tensor([0.1, 0.5])
    ours = insum.insum("y[i] = (h[i] < x[i]) + (h[i] <= 0.1)", h=x.half(), x=x)
    assert ours.tolist() == [2, 0]
    assert (x.half() < x).tolist() == [True, False]


def test_tangents_of_integers() -> None:
    x, n = torch.tensor([1.0, -1.0]), torch.arange(2)
    run = lambda x: insum.insum("y[i] = where(x[i] > 0, 1, n[i])", x=x, n=n)
    assert torch.equal(torch.func.jvp(run, (x,), (x,))[0], torch.tensor([1, 1]))


def test_slopes_of_integers_are_floats() -> None:
    n = torch.tensor([-3, 0, 4])
    ours = insum.insum("y[i] = leaky_relu(n[i], 2)", n=n)
    torch.testing.assert_close(ours, torch.tensor([-6.0, 0.0, 4.0]))


def test_two_kinds_of_halves_are_compared_as_they_are() -> None:
    x = torch.tensor([0.1, 0.5])
    ours = insum.insum("y[i] = a[i] == b[i]", a=x.half(), b=x.bfloat16())
    assert ours.tolist() == (x.half() == x.bfloat16()).tolist() == [0, 1]


def test_not_a_number_and_infinities() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1e30, -1e30])
    for form, theirs in {
        "maximum(x[i], 0)": x.clamp(min=0),
        "softplus(x[i])": F.softplus(x),
        "leaky_relu(x[i])": F.leaky_relu(x),
        "elu(x[i])": F.elu(x),
        "x[i] ** -2": x**-2,
        "where(x[i] > 0, x[i], 1)": torch.where(x > 0, x, 1),
        "ones(x[i])": torch.ones_like(x),
    }.items():
        torch.testing.assert_close(insum.insum(f"y[i] = {form}", x=x), theirs, equal_nan=True)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("y[i] = x[i] / 0", "a division by the number 0"),
        ("y[i] = max(x[i], 0)", "write maximum(x, y)"),
        ("y[i] = x[i] ** (x[i])", "an exponent is a number"),
        ("y[i] = x[i] ** x[i]", "an exponent is a number"),
        ("y[i] = x[i] ** 2 ** 3", "an exponent is a number"),
        ("y[i] = pow(x[i], x[i])", "the last argument of pow is a number, found x[i]"),
        ("y[i] = pow(x[i])", "pow takes 1 argument(s) and a number, found 1"),
        ("y[i] = elu(x[i], 1, 2)", "elu takes 1 argument(s) and perhaps a number (1.0), found 3"),
        ("y[i] = where(x[i], 1)", "where takes 3 argument(s), found 2"),
        ("y[i] = 0 < x[i] < 1", "comparisons do not chain"),
        ("y[i] = (-8) ** 0.5 * x[i]", "-8 ** 0.5 is no number that a tensor can hold"),
        ("y[i] = 10 ** 400 * x[i]", "10 ** 400 is no number that a tensor can hold"),
        ("y[i] == x[i]", "found '==' after the left side"),
    ],
)
def test_messages(statement: str, says: str) -> None:
    with pytest.raises(insum.InsumError, match=re.escape(says)):
        insum.insum(statement, x=torch.ones(2))


def test_complex_numbers_have_no_order() -> None:
    z = torch.ones(2, dtype=torch.complex64)
    for form in ("maximum(z[i], 1)", "z[i] < 1", "gelu(z[i])"):
        with pytest.raises(insum.InsumError, match="is not defined for complex numbers"):
            insum.insum(f"y[i] = {form}", z=z)
    run = lambda z: insum.insum("y[i] = sin(z[i]) ** 2 / z[i]", z=z)
    z = torch.randn(2, dtype=torch.complex128, requires_grad=True)
    torch.testing.assert_close(run(z), z.sin() ** 2 / z)
    assert torch.autograd.gradcheck(run, z) and torch.autograd.gradgradcheck(run, z)
