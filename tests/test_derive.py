"""Adjoints as statements."""

from __future__ import annotations

import pytest
import torch

import insum
from insum.lang.derive import adjoint, winners
from insum.lang.parser import parse


@pytest.mark.parametrize(
    ("statement", "tensor", "expected"),
    [
        ("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", "AV", ["dAV[p,q] += dC[AM[p],n] * B[AK[p,q],n]"]),
        ("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", "B", ["dB[AK[p,q],n] += dC[AM[p],n] * AV[p,q]"]),
        ("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", "AM", []),
        ("y[i] = A[i,j] * x[j] + b[i]", "b", ["db[i] += dy[i]"]),
        (
            "y[i] = A[i,j] * x[j] - 2 * x[i]",
            "x",
            ["dx[j] += dy[i] * A[i,j]", "dx[i] += -2 * dy[i]"],
        ),
        ("y[i] = x[i] * x[i]", "x", ["dx[i] += 2 * dy[i] * x[i]"]),
        ("t[] = A[i,i]", "A", ["dA[i,i] += dt"]),
        ("y[i] = relu(A[i,j] + b[j])", "b", ["db[j] += dy[i] * step(A[i,j] + b[j])"]),
        ("y[i] = tanh(x[i])", "x", ["dx[i] += 4 * dy[i] * sigmoid(2 * x[i]) * sigmoid(-2 * x[i])"]),
        (
            "y[i] = sigmoid(a[i] + b[i])",
            "a",
            ["da[i] += dy[i] * sigmoid(a[i] + b[i]) * sigmoid(-(a[i] + b[i]))"],
        ),
        ("y[i] = step(x[i]) * sign(x[i]) * eq(x[i], x[i])", "x", []),
        (
            "y[i] max= A[i,j]",
            "A",
            ["dA[i,j] += dy[i] * eq(eq(A[i,j], y[i]), eq(A[i,j], A[i,j]))"],
        ),
        ("dC[i] += C[i] * dC[i]", "C", ["dC_1[i] += ddC[i] * dC[i]"]),
    ],
)
def test_adjoint(statement: str, tensor: str, expected: list[str]) -> None:
    assert list(adjoint(statement, tensor).statements) == expected


def test_adjoints_parse() -> None:
    for text in adjoint(
        "y[i] = exp(log(sqrt(abs(reciprocal(A[i,j] * -0.5 + b[i])))))", "A"
    ).statements:
        assert str(parse(text)) == text


def test_complex_factors_are_conjugated() -> None:
    names = frozenset({"y", "A", "x"})
    assert adjoint("y[i] = A[i,j] * x[j]", "A", names).statements == (
        "dA[i,j] += dy[i] * conj(x[j])",
    )
    assert adjoint("y[i] = conj(A[i,j]) * x[j]", "A", names).statements == (
        "dA[i,j] += conj(dy[i]) * x[j]",
    )
    assert adjoint("y[i] = r[i] * x[i]", "x", names).statements == ("dx[i] += dy[i] * r[i]",)


def test_winners_count_the_points_that_attain_the_result() -> None:
    attained, is_itself = "eq(2 * A[i,j], y[D[i]])", "eq(2 * A[i,j], 2 * A[i,j])"
    assert winners("y[D[i]] min= A[i,j] * 2")[0] == f"count[D[i]] += eq({attained}, {is_itself})"
    assert winners("y[i] max= y[i] * A[i,j]") == (
        "count[i] += eq(eq(y[i] * A[i,j], y_result[i]), eq(y[i] * A[i,j], y[i] * A[i,j]))",
        "count",
        "y_result",
    )


def test_ties_share_evenly_as_in_amax() -> None:
    a = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True)
    (ours,) = torch.autograd.grad(insum.insum("y[i] max= A[i,j]", A=a).sum(), a)
    (torchs,) = torch.autograd.grad(a.amax(1).sum(), a)
    torch.testing.assert_close(ours, torchs)


def test_ties_with_the_initial_value() -> None:
    a, c = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    result = insum.insum("c[D[i]] max= a[i]", a=a, c=c * 1, D=torch.tensor([0, 0]))
    to_a, to_c = torch.autograd.grad(result.sum(), (a, c))
    assert to_a.tolist() == [0.0, 0.5] and to_c.tolist() == [0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_maximum_finds_its_winner(dtype: torch.dtype) -> None:
    """The maximum is rounded, the products it is compared with are not: they must still agree."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 16, dtype=dtype, requires_grad=True), torch.randn(16, dtype=dtype)
    (gradient,) = torch.autograd.grad(insum.insum("y[i] max= A[i,j] * b[j]", A=a, b=b).sum(), a)
    assert (gradient != 0).sum(1).ge(1).all()


def test_gradients_have_the_dtype_of_their_input() -> None:
    a, s = (
        torch.randn(4, 3, dtype=torch.float16, requires_grad=True),
        torch.tensor(2.0, requires_grad=True),
    )
    to_a, to_s = torch.autograd.grad(
        insum.insum("y[i] = A[i,j] * s", A=a, s=s).float().sum(), (a, s)
    )
    assert to_a.dtype == torch.float16 and to_s.dtype == torch.float32
    torch.testing.assert_close(to_s, a.detach().float().sum(), rtol=1e-3, atol=1e-3)


def test_real_input_of_a_complex_product() -> None:
    a, z = (
        torch.randn(3, dtype=torch.float64, requires_grad=True),
        torch.randn(3, dtype=torch.complex128, requires_grad=True),
    )
    torch.autograd.gradcheck(
        lambda a, z: insum.insum("t[i] = a[i] * z[i] * abs(z[i])", a=a, z=z), (a, z)
    )
    torch.autograd.gradgradcheck(
        lambda a, z: insum.insum("t[i] = a[i] * z[i] * abs(z[i])", a=a, z=z), (a, z)
    )


def test_abs_of_complex_zero_has_gradient_zero() -> None:
    z = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    (gradient,) = torch.autograd.grad(insum.insum("t[] = abs(z[i])", z=z), z)
    assert gradient.tolist() == [0, 0]


def test_third_order() -> None:
    x = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    y = insum.insum("t[] = x[i] * x[i] * x[i] * exp(x[i])", x=x)
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(y, (x**3 + 9 * x**2 + 18 * x + 6) * x.exp())


def test_extent_that_the_derived_statement_cannot_tell() -> None:
    x, w = (
        torch.randn(10, dtype=torch.float64, requires_grad=True),
        torch.randn(3, dtype=torch.float64, requires_grad=True),
    )
    torch.autograd.gradcheck(
        lambda x, w: insum.insum("t[] = x[2*i+k] * w[k]", x=x, w=w, sizes={"i": 4}), (x, w)
    )


def test_padding_has_no_gradient() -> None:
    x, p = torch.randn(3, dtype=torch.float64, requires_grad=True), torch.tensor([[0, -1], [2, 0]])
    v = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda v, x: insum.insum("y[i] = v[i,q] * x[P[i,q]]", v=v, x=x, P=p, padded="P"), (v, x)
    )
    (gradient,) = torch.autograd.grad(
        insum.insum("y[i] = v[i,q] * x[P[i,q]]", v=v, x=x, P=p, padded="P").sum(), v
    )
    assert gradient[0, 1] == 0


def test_parts_of_a_gradient_that_are_spelled_alike() -> None:
    """One is repeated along columns, one along rows, of which there are not as many."""
    torch.manual_seed(0)
    s, a = torch.tensor([0, 2, 2, 1]), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        found = insum.insum("y[e] = a[s[e],k] + a[l,s[e]]", a=a, s=s)
        wanted = a[s].sum(1) + a[:, s].sum(0)
        upstream = torch.randn_like(wanted)
        grads = [torch.autograd.grad(y, a, upstream)[0] for y in (found, wanted)]
        torch.testing.assert_close(*grads)
