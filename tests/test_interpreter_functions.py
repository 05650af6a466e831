"""Functions in generated kernels: the same values as torch, where a kernel sums, gathers and
scatters, and in the gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import insum
from insum.lang.bind import bind
from insum.lang.parser import parse
from insum.runtime import inspection
from test_functions import FORMS, FROM, TO, torchs, values, written

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]


#: Whose gradients are made of functions that others are not.
GRADED = ("sin(u)", "elu(u, 1.5)", "gelu(u)", "silu(u)", "whole(u) * ones(u)", "minimum(u, sin(u))")


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form: str) -> None:
    given = {name: v.float().requires_grad_() for name, v in values().items()}
    ours = insum.insum(written(form), sizes={0: 2}, to=TO, of=FROM, **given)
    theirs = torchs(form, **given)
    torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=3e-6)
    if form not in GRADED:
        return
    leaves, weight = tuple(given.values()), torch.tensor([1.0, -2.0])
    for a, b in zip(
        torch.autograd.grad(ours @ weight, leaves), torch.autograd.grad(theirs @ weight, leaves)
    ):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


SMALL = torch.tensor([1e-7, -3e-5, 0.02, 0.3, -0.9, 2.0, -40.0, 80.0, 0.0, float("nan")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", ["expm1", "log1p", "softplus", "elu", "erf"])
def test_small_and_large_arguments(function: str, dtype: torch.dtype) -> None:
    x = SMALL.to(dtype)
    x = x.clamp(min=-0.95) if function == "log1p" else x
    named = torch.nn.functional if function in ("softplus", "elu") else torch
    wanted = getattr(named, function)(x.double()).to(dtype)
    found = insum.insum(f"y[i] = {function}(x[i])", x=x)
    torch.testing.assert_close(
        found, wanted, rtol=2e-6 if dtype == torch.float32 else 1e-11, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("exponent", [-17, -2, 0, 1, 3, 16, 17, 20, 0.25, -1.5])
def test_powers(exponent: float) -> None:
    x = torch.tensor([0.0, 0.7, -1.3, 2.0, float("inf")], dtype=torch.float64)
    torch.testing.assert_close(
        insum.insum(f"y[i] = pow(x[i], {exponent})", x=x), x**exponent, equal_nan=True
    )


def test_points_that_only_ones_tells_of() -> None:
    """Summed over ``j``, with padding and a tile that is not full."""
    table = torch.tensor([[0, -1, 2], [1, 0, -1]])
    b = torch.randn(2, requires_grad=True)

    def run(b: Tensor) -> Tensor:
        return insum.insum(
            "y[i] = whole(x[S[i,j]] + b[i])", x=torch.ones(3), b=b, S=table, padded=("S",)
        )

    (gradient,) = torch.autograd.grad(run(b).sum(), b)
    assert gradient.tolist() == [2.0, 2.0]
    n = torch.zeros(5, 70)
    assert insum.insum("y[i] = ones(n[i,j])", n=n).tolist() == [70.0] * 5
    y = insum.insum("y[to[i]] = ones(n[i,j])", n=n, to=torch.tensor([0, 2, 2, 0, 0]), sizes={0: 3})
    assert y.tolist() == [210.0, 0.0, 140.0]


def test_a_function_beside_a_matrix_product() -> None:
    torch.manual_seed(0)
    x, w, g = torch.randn(20, 16), torch.randn(16, 16), torch.randn(16)
    src, dst = torch.randint(20, (32,)), torch.randint(20, (32,))
    found = insum.insum(
        "y[dst[e],n] = gelu(x[src[e],k] + g[k]) * w[k,n]",
        x=x, g=g, w=w, src=src, dst=dst, sizes={0: 20}, optimize=False,
    )  # fmt: skip
    wanted = torch.zeros(20, 16).index_add(0, dst, torch.nn.functional.gelu(x[src] + g) @ w)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_maximum_finds_its_winner(dtype: torch.dtype) -> None:
    """The maximum is rounded, the products it is compared with are not."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 16, dtype=dtype, requires_grad=True), torch.randn(16, dtype=dtype)
    (gradient,) = torch.autograd.grad(insum.insum("y[i] max= A[i,j] * b[j]", A=a, b=b).sum(), a)
    assert (gradient != 0).sum(1).ge(1).all()


def test_functions_of_integers_are_computed_as_integers() -> None:
    """In float32, 2**24 and the number behind it are equal."""
    x = torch.tensor([1.5, 2.5, 3.5])
    own, other = torch.tensor([2**24, 2**24 + 1, 7]), torch.tensor([2**24 + 1, 2**24 + 1, 8])
    yes, no = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    given = {"x": x, "own": own, "other": other, "yes": yes, "no": no}
    wanted = {
        "x[i] * (own[i] == other[i])": x * (own == other),
        "where(own[i] - other[i], x[i], 0)": torch.where(own != other, x, 0),
        "x[i] * abs(own[i] - other[i])": x * (own - other).abs(),
        "x[i] * whole(yes[i] + no[i])": x * (yes | no),
        "where(x[i] > 2.7, own[i], 0)": torch.where(x > 2.7, own, 0),
    }
    for form, value in wanted.items():
        used = {name: tensor for name, tensor in given.items() if f"{name}[" in form}
        torch.testing.assert_close(insum.insum(f"y[i] = {form}", **used), value)


def test_halves_are_compared_with_numbers_as_torch_does() -> None:
    x = torch.tensor([0.1, 0.33, 1000.0], dtype=torch.float16)
    for form, holds in {"x[i] < 0.1": x < 0.1, "x[i] == 0.33": x == 0.33}.items():
        assert torch.equal(insum.insum(f"y[i] = {form}", x=x), holds.half())


def test_large_powers() -> None:
    n = torch.tensor([-3, 1, 2])
    assert torch.equal(insum.insum("y[i] = n[i] ** 17", n=n), n**17)
    x = torch.tensor([-0.0, -1.1, 1.1, -float("inf")])
    for exponent in (17, -17, 2.5, -3.5):
        found = insum.insum(f"y[i] = x[i] ** {exponent}", x=x)
        torch.testing.assert_close(found, x**exponent, rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("right", ["e[i] * w[i,k] * m[k] * c[i,j]", "w[i,k] * e[i] * exp(c[i,j])"])
def test_the_gradient_of_an_extremum_finds_the_product_that_was_largest(right: str) -> None:
    """Derived kernels multiply in the order of the first, or nothing equals the extremum."""
    torch.manual_seed(0)
    every = {"e": (3,), "w": (3, 4), "m": (4,), "c": (3, 5)}
    given = {
        name: torch.randn(shape, dtype=torch.float64).requires_grad_()
        for name, shape in every.items()
        if f"{name}[" in right
    }
    for _ in range(3):
        statement = f"y[j] max= {right}"
        own = torch.autograd.grad(insum.insum(statement, **given).sum(), [*given.values()])
        with insum.settings(backend="graph", require_fused=False):
            want = torch.autograd.grad(insum.insum(statement, **given).sum(), [*given.values()])
        torch.testing.assert_close(own, want)
        given = {n: torch.randn_like(t).requires_grad_() for n, t in given.items()}


def test_one_product_of_a_sum_over_nothing() -> None:
    m, a, none = torch.tensor([0, 2]), torch.randn(2), torch.randn(2, 0)
    want = torch.zeros(4).index_add(0, m, a)
    for statement in ("y[m[j]] = a[j] - M[j,k]", "y[m[j]] = -M[j,k] + a[j]"):
        found = insum.insum(statement, m=m, a=a, M=none, out_shape=(4,))
        torch.testing.assert_close(found, want)
    y = torch.ones(4)
    insum.insum("y[m[j]] += M[j,k] + a[j]", y=y, m=m, a=a, M=none)
    torch.testing.assert_close(y, want + 1)


@pytest.mark.parametrize("in_order", [True, False])
def test_what_all_entries_of_a_row_share_is_read_once(in_order: bool) -> None:
    """The index that rows are made of stands on the right side too: before the loop over a row,
    also of a row that is cut, and of one without entries.
    """
    torch.manual_seed(0)
    d = torch.tensor([0] * 3 + [2] * 700 + [3])
    d = insum.unchanging(d if in_order else d[torch.randperm(704)])
    s, x, y = torch.randint(0, 5, (704,)), torch.randn(5, 4), torch.randn(5, 4)
    statement = "out[d[e],f] = relu(whole(x[s[e],f] - y[d[e],f])) * exp(y[d[e],f])"
    given = {"d": d, "s": insum.unchanging(s), "x": x, "y": y}
    found = insum.insum(statement, out_shape=(5, 4), **given)
    m = (x[s] - y[d]).relu() * y[d].exp()
    wanted = torch.zeros(5, 4).index_add(0, d, m)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    problem = bind(parse(statement), given, sizes={"out": (5, 4)})
    text = inspection.plan_only(problem, given).steps[0].launches[0].kernel.source
    loops = [
        part.partition("    for t in ") for part in text.split("@triton.jit") if "for t" in part
    ]
    assert len(loops) == 2  # of long rows and pieces, and of short ones
    for before, _, loop in loops:
        assert "y_ptr" in before and "x_ptr +" in loop and "y_ptr +" not in loop


def test_means() -> None:
    d, s = torch.tensor([0, 2, 2, 0, 2]), torch.tensor([[1, -1], [0, 2], [-1, -1], [2, 2], [1, 0]])
    x = torch.randn(3, 4, requires_grad=True)
    y = insum.insum("y[d[e],f] mean= x[s[e,k],f]", d=d, s=s, x=x, out_shape=(4, 4), padded="s")
    rows = [x[[1, 2, 2]].mean(0), 0 * x[0], x[[0, 2, 1, 0]].mean(0), 0 * x[0]]
    torch.testing.assert_close(y, torch.stack(rows))
    (ours,) = torch.autograd.grad(y.square().sum(), x)
    (theirs,) = torch.autograd.grad(torch.stack(rows).square().sum(), x)
    torch.testing.assert_close(ours, theirs)
