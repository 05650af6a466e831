"""Operands of NumPy, SciPy and torch.sparse, taken as they are; dimensions that are not named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import insum
from insum.formats import COO, ELL, BlockGroupCOO, GroupCOO, SparseFormat

torch.manual_seed(0)
A = torch.where(torch.rand(8, 6) < 0.4, torch.randn(8, 6), torch.zeros(()))
B = torch.randn(6, 4)
STATEMENT = "C[m,n] = A[m,k] * B[k,n]"


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "made",
    [
        lambda: A.to_sparse(),
        lambda: A.to_sparse_csr(),
        lambda: A.to_sparse_csc(),
        lambda: A.to_sparse_bsr((2, 3)),
        lambda: sp.csr_array(A.numpy()),
        lambda: sp.csc_matrix(A.numpy()),
        lambda: sp.bsr_array(A.numpy(), blocksize=(4, 2)),
        lambda: sp.coo_array(A.numpy()),
        lambda: sp.dia_array(A.numpy()),
        lambda: A.numpy(),
        lambda: np.asfortranarray(A.numpy()),
        lambda: A.flip(0).numpy()[::-1],
        lambda: GroupCOO.from_dense(A),
        lambda: np.broadcast_to(A.numpy(), A.shape),
    ],
)
def test_operands_are_taken_as_they_are(made: Any) -> None:
    held = made()
    for got in (
        insum.insum(STATEMENT, A=held, B=B),
        insum.einsum(STATEMENT, A=held, B=B),
        insum.einsum("mk,kn->mn", held, B),
        insum.einsum("mk,kn->mn", held, B.numpy()),
    ):
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, A @ B)
    assert "index" in str(insum.explain(STATEMENT, A=held, B=B))


def test_batched_blocks() -> None:
    x = torch.stack([A, A * 2])
    blocks = x.to_sparse_bsr((2, 3))
    torch.testing.assert_close(insum.einsum("bmk,kn->bmn", blocks, B), x @ B)


def test_arrays_are_written_into() -> None:
    out = np.ones((8, 4), dtype=np.float32)
    got = insum.insum("C[m,n] += A[m,k] * B[k,n]", C=out, A=A.numpy(), B=B)
    torch.testing.assert_close(torch.from_numpy(out), 1 + A @ B)
    assert got.data_ptr() == out.ctypes.data
    locked = np.ones(3)
    locked.flags.writeable = False
    with pytest.raises(insum.BindingError, match="cannot be written to through a tensor"):
        insum.insum("C[i] += s", C=locked, s=2.0)
    assert insum.insum("C[i] = D[i]", D=locked).tolist() == [1.0] * 3
    assert insum.insum("C[i] = s * D[i]", D=locked, s=np.float32(2)).tolist() == [2.0] * 3
    rows = np.array([0, 2])
    got = insum.insum("y[rows[p]] = x[p]", rows=rows, x=torch.ones(2), out_shape=(3,))
    assert got.tolist() == [1.0, 0.0, 1.0]


def test_what_cannot_be_taken_is_an_error() -> None:
    with pytest.raises(insum.DtypeError, match="A is "):
        insum.insum("y[i] = A[i]", A=np.array([None, "x"], dtype=object))
    with pytest.raises(insum.DtypeError, match="A is "):
        insum.insum("y[i] = A[i]", A=[1.0])
    with pytest.raises(insum.BindingError, match="an operand is sparse, and padded"):
        insum.insum(STATEMENT, A=COO.from_dense(A), B=B, padded=("B",))
    broken = torch.sparse_coo_tensor(
        torch.tensor([[0], [9]]), torch.ones(1), check_invariants=False
    )
    with pytest.raises(insum.InsumError):
        insum.einsum(
            "mk,kn->mn",
            torch.sparse_coo_tensor(
                broken._indices() + 90, torch.ones(1), (8, 6), check_invariants=False
            ),
            B,
        )


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_dimensions_that_are_not_named(lead: tuple[int, ...]) -> None:
    x = torch.randn(*lead, 6)
    for a in (A, ELL.from_dense(A), GroupCOO.from_dense(A)):
        for got in (
            insum.einsum("Y[...,m] = A[m,k] * X[..., k]", A=a, X=x),
            insum.einsum("mk,...k->...m", a, x),
        ):
            torch.testing.assert_close(got, x @ A.T)
    torch.testing.assert_close(insum.einsum("Y[...] = X[...] * s", X=x, s=2.0), 2 * x)
    rows = torch.tensor([1, 0, 1])
    got = insum.einsum("Y[..., i] = X[..., rows[i]]", X=x, rows=rows)
    torch.testing.assert_close(got, x[..., rows])


@pytest.mark.parametrize(
    ("left", "right"),
    [((4, 5), (1, 5)), ((4, 1), (5,)), ((4, 1), (1, 5)), ((1, 1), (1,)), ((1,), (0,)), ((), (4,))],
)
def test_dots_broadcast_extents_of_1(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    x = torch.randn(*left, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(*right, 3, dtype=torch.float64, requires_grad=True)
    for one in ("...k,...k->...", "...k,...j->...jk", "...k,...k"):
        got, want = insum.einsum(one, x, y), torch.einsum(one, x, y)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.square().sum(), (x, y)),
            torch.autograd.grad(want.square().sum(), (x, y)),
        )
    a = GroupCOO.from_dense(A[:, :3].double())
    got = insum.einsum("Y[...,m] = A[m,k] * X[...,k] * Z[...,k]", A=a, X=x, Z=y)
    torch.testing.assert_close(got, (x * y) @ A[:, :3].double().T)


def test_what_is_written_to_is_not_broadcast() -> None:
    total = torch.ones(4, 5)
    insum.einsum("C[...] += X[...,k]", C=total, X=torch.ones(1, 5, 3))
    assert bool((total == 4).all())
    with pytest.raises(insum.BindingError, match="two extents"):
        insum.einsum("C[...] += X[...,k]", C=torch.ones(1, 5), X=torch.ones(4, 5, 3))
    with pytest.raises(insum.BindingError, match="two extents"):  # nor what is sparse
        insum.einsum("...k,...k->...", COO.from_dense(torch.ones(1, 3)), torch.ones(4, 3))


def test_dots_in_the_wrong_place() -> None:
    for wrong in ("Y[...] = ... * X[...]", "Y[..., ...] = X[...]", "Y[...] = X[... "):
        with pytest.raises(insum.InsumError, match=r"no dimensions are left out|never closed"):
            insum.einsum(wrong, X=B)
    with pytest.raises(insum.BindingError, match="fewer than are named"):
        insum.einsum("Y[...,i,j,k] = X[...,i,j,k]", X=B)


def test_compiled_statements_and_tuning() -> None:
    product = insum.compile(STATEMENT)
    for held in (A.numpy(), COO.from_dense(A), A):
        torch.testing.assert_close(product(A=held, B=B), A @ B)
    assert "m: free, 8" in repr(product)
    assert insum.tune(STATEMENT, A=A.numpy(), B=B).trials == ()
    with pytest.raises(insum.UnsupportedError, match="an operand is sparse"):
        insum.tune(STATEMENT, A=COO.from_dense(A), B=B)


def test_formats_in_a_compiled_function() -> None:
    compiled = torch.compile(
        lambda held, right: insum.insum(STATEMENT, A=held, B=right), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(COO.from_dense(A), B), A @ B)


# --- classes derived from a format ----------------------------------------------------------------


class Adjacency(COO):
    """A class of a user's own, whose name says nothing of a format."""


class Blocks(BlockGroupCOO):
    pass


DERIVED = [(Adjacency, COO, {}), (Blocks, BlockGroupCOO, {"block_shape": (2, 2)})]


@pytest.mark.parametrize(("derived", "base", "options"), DERIVED)
def test_a_derived_class_is_its_format_in_statements(
    derived: Any, base: Any, options: dict[str, Any]
) -> None:
    dense, b = torch.randn(4, 6), torch.randn(6, 3)
    a = derived.from_dense(dense, **options)
    torch.testing.assert_close(a @ b, dense @ b)
    torch.testing.assert_close(insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b), dense @ b)
    torch.testing.assert_close(a.sum(1), dense.sum(1))
    scaled = insum.einsum("C[m,n] = A[m,n] * B[m,n]", A=a, B=dense)
    assert type(scaled) is base
    torch.testing.assert_close(scaled.to_dense(), dense * dense)
    layer = insum.nn.SparseLinear(a)
    torch.testing.assert_close(layer(b.T), b.T @ dense.T)
    assert type(layer.weight()) is base
    assert type(a.T) is type(a * 2) is derived


def test_a_derived_class_does_not_take_the_place_of_its_format() -> None:
    known = dict(insum.formats.FORMATS)
    again = type("COO", (COO,), {})
    assert known == insum.formats.FORMATS
    a = again.from_dense(torch.eye(2))
    assert type(a.to_format("COO")) is COO and type(a @ torch.ones(2)) is Tensor


def test_derived_classes_in_a_compiled_function() -> None:
    a, b = Adjacency.from_dense(torch.eye(3)), torch.randn(3, 2)
    compiled = torch.compile(lambda a, b: a.matmul(b), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), b)


def test_a_format_of_ones_own_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insum.formats.base.FORMATS", dict(insum.formats.FORMATS))
    own = type("Own", (SparseFormat,), {"_arrays": COO._arrays, "layout": COO.layout})
    held = COO.from_dense(torch.eye(2))
    a = own._make(**held._fields())
    with pytest.raises(insum.UnsupportedError, match="A is a Own, a format that statements cannot"):
        insum.einsum("C[m] = A[m,k] * B[k]", A=a, B=torch.ones(2))
