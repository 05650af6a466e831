"""Arithmetic, sums, slices and sizes of sparse tensors, against the dense tensors."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import insum
from insum.formats import COO, BlockGroupCOO, GroupCOO, NeighborTable, SparseFormat
from insum.formats.arrays import look

from .cases import every_format

torch.manual_seed(0)
X = torch.where(torch.rand(12, 10) < 0.3, torch.randn(12, 10), torch.zeros(()))
Y = torch.where(torch.rand(12, 10) < 0.3, torch.randn(12, 10), torch.zeros(()))
ALL = every_format(X)


def dense(x: SparseFormat | Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else x.to_dense()


@pytest.mark.parametrize("a", ALL, ids=lambda a: type(a).__name__)
def test_arithmetic_is_that_of_dense_tensors(a: SparseFormat) -> None:
    row, column, whole = torch.randn(10), torch.randn(12, 1), torch.randn(12, 10)
    for got, want in (
        (a * 2, X * 2),
        (3 * a, X * 3),
        (a / 4, X / 4),
        (np.float64(2.0) * a, X * 2),
        (a * torch.tensor(2.0), X * 2),
        (-a, -X),
        (abs(a), X.abs()),
        (a + a, 2 * X),
        (a - a * 3, -2 * X),
        (a * a, X * X),
        (a * row, X * row),
        (row * a, X * row),
        (a * column, X * column),
        (a * whole, X * whole),
        (a * whole[:1], X * whole[:1]),
        (a / whole, X / whole),
    ):
        assert isinstance(got, type(a)) and got.shape == a.shape
        torch.testing.assert_close(got.to_dense(), want)
    for got, want in ((a + whole, X + whole), (whole + a, X + whole), (whole - a, whole - X)):
        assert isinstance(got, Tensor)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("a", ALL, ids=lambda a: type(a).__name__)
def test_products_over_the_entries_that_both_have(a: SparseFormat) -> None:
    """Of one pattern in two formats, of two patterns, and of none in common."""
    empty = torch.zeros(12, 10)
    for b, want in (
        (GroupCOO.from_dense(X, group_size=4), X * X),
        (COO.from_dense(Y), X * Y),
        (COO.from_dense(Y).pattern(), X * (Y != 0)),
        (COO.from_dense(Y.double()), X.double() * Y.double()),
        (COO.from_dense(empty), empty),
    ):
        got = a * b
        assert isinstance(got, type(a)) and got.shape == a.shape
        torch.testing.assert_close(got.to_dense(), want)


def test_gradients_of_products_of_two_patterns() -> None:
    a, b = COO.from_dense(X), GroupCOO.from_dense(Y)
    a, b = (one.with_values(one.values.clone().requires_grad_()) for one in (a, b))  # type: ignore[union-attr, assignment]
    (a * b).to_dense().sum().backward()
    for one, other in ((a, Y), (b, X)):
        assert one.values is not None and one.values.grad is not None
        found = one.with_values(one.values.grad).to_dense()
        torch.testing.assert_close(found, other * (one.to_dense() != 0))


@pytest.mark.parametrize("a", ALL, ids=lambda a: type(a).__name__)
def test_sums_slices_and_sizes(a: SparseFormat) -> None:
    for dim in (None, 0, 1, -1, (0, 1), ()):
        torch.testing.assert_close(a.sum(dim), X.sum(dim) if dim != () else X)
    torch.testing.assert_close(a.sum(1, keepdim=True), X.sum(1, keepdim=True))
    assert a.size() == X.size() and a.size(-1) == 10 and len(a) == 12 and a.numel() == 120 and a
    keys: list[Any] = [
        slice(2, 7),
        slice(None, None, 3),
        (slice(1, 20), slice(-4, None)),
        (..., slice(3, 4)),
        (slice(5, 5), ...),
    ]
    for key in keys:
        got = a[key]
        assert isinstance(got, type(a)), key
        assert torch.equal(got.to_dense(), X[key]), key
        look(insum.formats.COO._build(got.entries()))  # what was built is in order
    for key in (3, -1, (slice(None), 4), (..., 2)):
        got = a[key]
        assert isinstance(got, COO) and torch.equal(got.to_dense(), X[key])
    assert torch.equal(dense(a[3, 4]), X[3, 4])
    assert [torch.equal(dense(one), row) for one, row in zip(a, X)] == [True] * 12


def test_sums_of_different_patterns_and_formats() -> None:
    for a in ALL:
        for b in (COO.from_dense(Y), BlockGroupCOO.from_dense(Y, block_shape=(5, 3))):
            got = a + b
            assert isinstance(got, type(a))
            torch.testing.assert_close(got.to_dense(), X + Y)
            torch.testing.assert_close((a - b).to_dense(), X - Y)
    many = sum(COO.from_dense(one) for one in (X, Y, X))
    torch.testing.assert_close(dense(many), 2 * X + Y)  # type: ignore[arg-type]


def test_patterns_count_as_ones() -> None:
    p = COO.from_dense(X).pattern()
    ones = (X != 0).float()
    assert torch.equal((p * 3).to_dense(), 3 * ones) and torch.equal((p + p).to_dense(), 2 * ones)
    assert (p * p).values is None and torch.equal(dense(p[0]), ones[0])
    a = COO.from_dense(X)
    assert torch.equal((p * a).to_dense(), X) and torch.equal((a * p).to_dense(), X)
    assert p.sum().item() == ones.sum() and dense(p[0, 0]).item() == ones[0, 0]


def test_gradients_pass() -> None:
    values = COO.from_dense(X).values
    assert values is not None
    v = values.clone().requires_grad_()
    a, w = COO.from_dense(X).with_values(v), torch.randn(12, 10, requires_grad=True)
    ((2 * a - a * w)[1:7].sum(0) ** 2).sum().backward()
    x, u = X.clone().requires_grad_(), w.detach().clone().requires_grad_()
    ((2 * x - x * u)[1:7].sum(0) ** 2).sum().backward()
    assert x.grad is not None and u.grad is not None and w.grad is not None
    torch.testing.assert_close(v.grad, x.grad[X != 0])
    torch.testing.assert_close(w.grad, torch.where(X != 0, u.grad, 0))
    other = COO.from_dense(Y)
    b = COO.from_dense(X).with_values(v)
    v.grad = None
    (b + other).sum().backward()
    assert torch.equal(v.grad, torch.ones_like(v))


def test_other_ranks() -> None:
    x = torch.zeros(3, 4, 5)
    x[0, 1, 2], x[2, 3, 4], x[2, 0, 0] = 1.0, 2.0, 3.0
    table = NeighborTable.from_dense(x)
    for a in (COO.from_dense(x), GroupCOO.from_dense(x), table):
        assert torch.equal(a[1:].to_dense(), x[1:]) and torch.equal(dense(a[2]), x[2])  # type: ignore[union-attr]
        assert torch.equal(a.sum((0, 2)), x.sum((0, 2)))
        w = torch.randn(4, 1)
        torch.testing.assert_close((a * w).to_dense(), x * w)
    v = COO.from_dense(torch.tensor([0.0, 3.0, 0.0, 4.0]))
    assert torch.equal(v[1:].to_dense(), torch.tensor([3.0, 0.0, 4.0]))  # type: ignore[union-attr]
    assert dense(v[3]).item() == 4 and v.sum().item() == 7


@pytest.mark.parametrize(
    "wrong, error, text",
    [
        (lambda a: a + 1, insum.UnsupportedError, "a number is added"),
        (lambda a: a / a, insum.UnsupportedError, "0 / 0"),
        (lambda a: a + COO.from_dense(Y.T), insum.BindingError, "meet"),
        (lambda a: a * torch.ones(3), insum.BindingError, "broadcasts"),
        (lambda a: a * torch.ones(1, 12, 10), insum.BindingError, "broadcasts"),
        (lambda a: a[12], insum.IndexRangeError, "outside dimension 0 of size 12"),
        (lambda a: a[::-1], insum.FormatError, "a step above 0"),
        (lambda a: a["x":], insum.FormatError, "is sliced with"),  # type: ignore[misc]
        (lambda a: a[0, 0, 0], insum.FormatError, "indexed with 3 keys"),
        (lambda a: a[torch.tensor([0])], insum.UnsupportedError, "integers, slices"),
        (lambda a: a[None], insum.UnsupportedError, "indexed with None"),
        (lambda a: a.sum((0, 0)), insum.FormatError, "twice"),
        (lambda a: a.sum(2), insum.FormatError, "dim is 2"),
        (lambda a: a.size(2), insum.FormatError, "dim is 2"),
        (lambda a: a + COO.from_dense(X).to("meta"), insum.DeviceError, "one device"),
    ],
)
def test_mistakes(wrong: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text.replace("(", r"\(")):
        wrong(COO.from_dense(X))


def test_strangers_are_left_to_themselves() -> None:
    a = COO.from_dense(X)
    for function in (operator.add, operator.mul, operator.truediv, operator.sub):
        with pytest.raises(TypeError, match="unsupported operand"):
            function(a, object())


@pytest.mark.parametrize("statement", ["A[m,k] / B[k,n]", "A[m,k] * exp(B[k,n]) / w[m]"])
def test_functions_of_what_lies_beyond_the_edge_of_blocks(statement: str) -> None:
    """Neither infinite values of a function at 0 nor gradients come from there."""
    a = BlockGroupCOO.from_dense(X.double(), block_shape=(5, 3), group_size=2)
    b, w = torch.rand(10, 2, dtype=torch.float64) + 1, torch.rand(12, dtype=torch.float64) + 1
    assert a.values is not None
    v = a.values.clone().requires_grad_()
    more = {"w": w} if "w" in statement else {}
    got = insum.einsum(f"C[m,n] = {statement}", A=a.with_values(v), B=b, **more)
    assert isinstance(got, Tensor)
    (grad,) = torch.autograd.grad(got.sum(), v)
    x = a.with_values(v).to_dense()
    want = x @ b.exp() / w[:, None] if "w" in statement else x @ (1 / b)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), v)[0])


def test_dtypes_are_those_of_torch() -> None:
    x, one = torch.tensor([[100, 0, 100], [0, 3, 100]]), torch.tensor([2.0])
    small, flags = COO.from_dense(x.to(torch.int8)), COO.from_dense(x != 0)
    assert small.sum().item() == 303 and flags.sum(1).tolist() == [2, 2]
    assert dense(small[0, 0]).dtype == torch.int8 and dense(flags[0, 1]).dtype == torch.bool
    assert (small.to(torch.float16) * one).dtype == torch.float32
    assert (small.to(torch.float16) / x.clamp(min=1)).dtype == torch.float16
    bytes_ = COO.from_dense(torch.tensor([[1, 0, 0], [0, 0, 2]], dtype=torch.uint8))
    assert (small.to(torch.float32) - bytes_).to_dense().tolist() == [[99, 0, 100], [0, 3, 98]]
    assert (torch.ones(3) - bytes_).tolist() == [[0, 1, 1], [1, 1, -1]]
    for wrong in (lambda: -flags, lambda: abs(flags), lambda: flags - flags, lambda: x - flags):
        with pytest.raises(insum.DtypeError, match="truth values"):
            wrong()
    with pytest.raises(insum.DtypeError, match="complex number"):
        small.to(torch.float16) / 2j


def test_quotients_are_not_products_with_reciprocals() -> None:
    x, by = torch.tensor([[1e-3, 0], [0, 2]]).half(), torch.tensor([1e-5, 3]).half()
    for a in (COO.from_dense(x), BlockGroupCOO.from_dense(x, block_shape=(2, 3))):
        assert torch.equal((a / by).to_dense(), x / by)
        insum.formats.validate.check(a / by)
        insum.formats.validate.check(a * float("inf"))  # zeros beyond the edge


def test_stored_zeros_of_blocks_have_gradients() -> None:
    a = BlockGroupCOO.from_dense(X, block_shape=(4, 5))
    assert a.values is not None
    v = torch.zeros_like(a.values).requires_grad_()  # as what is added to a weight begins
    (a.with_values(v) + COO.from_dense(Y))[1:].sum().backward()
    want = a.with_values(a.values * 0 + 1).to_dense()
    want[0] = 0
    assert v.grad is not None and torch.equal(a.with_values(v.grad).to_dense(), want)


@pytest.mark.parametrize("kind", [torch.float8_e5m2fnuz, torch.uint32])
def test_a_dense_factor_that_nothing_is_computed_with(kind: torch.dtype) -> None:
    other = torch.ones(3, 4).to(kind)
    name = str(kind).removeprefix("torch.")
    with pytest.raises(
        insum.DtypeError, match=f"B holds {name}, which insum does not compute with"
    ):
        COO.from_dense(torch.eye(3, 4)) * other
