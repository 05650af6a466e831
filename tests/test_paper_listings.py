"""The statements of the paper, as they are written there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import insum
from insum import Insum


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def blocks(a: Tensor, bm: int, bk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Coordinates and values of the nonzero blocks of a matrix."""
    tiled = a.reshape(a.shape[0] // bm, bm, a.shape[1] // bk, bk).permute(0, 2, 1, 3)
    m, k = tiled.abs().amax((2, 3)).nonzero(as_tuple=True)
    return m, k, tiled[m, k]


def sparse(rows: int, columns: int, density: float = 0.3) -> Tensor:
    return torch.where(torch.rand(rows, columns) < density, torch.randn(rows, columns), 0.0)


def test_section_5_1() -> None:
    A, B, C = torch.randn(6, 9), torch.randn(4, 5), torch.randn(8, 5)
    D, E = torch.randint(8, (6,)), torch.randint(9, (4,))
    expected = C.clone().index_add_(
        dim=0, index=D, source=torch.einsum("yr,rx->yx", torch.index_select(A, dim=1, index=E), B)
    )
    result = Insum("C[D[y],x] += A[y,E[r]] * B[r,x]", C=C, A=A, B=B, D=D, E=E)
    assert result is C
    torch.testing.assert_close(C, expected)


def test_section_5_1_lowers_to_the_listing() -> None:
    A, B, C, D, E = (
        torch.ones(6, 9),
        torch.ones(4, 5),
        torch.ones(8, 5),
        torch.zeros(6, dtype=torch.long),
        torch.zeros(4, dtype=torch.long),
    )
    graph = insum.explain("C[D[y],x] += A[y,E[r]] * B[r,x]", C=C, A=A, B=B, D=D, E=E).graph
    assert "torch.index_select(A, 1, E)" in graph
    assert "torch.einsum('yr,rx->yx', A_gathered, B)" in graph
    assert "C.index_add_(0, D, contracted)" in graph


def test_elementwise_coo() -> None:
    a, B = sparse(1, 12)[0], torch.randn(12)
    (AI,) = a.nonzero(as_tuple=True)
    torch.testing.assert_close(
        Insum("C[AI[p]] = AV[p] * B[AI[p]]", AV=a[AI], AI=AI, B=B, out_shape=(12,)), a * B
    )


def test_gather_and_scatter_at_once() -> None:
    A, B, X, Y = torch.randn(5, 7), torch.randn(7), torch.tensor([0, 2, 2]), torch.tensor([4, 0, 1])
    torch.testing.assert_close(
        Insum("C[X[i]] = A[Y[i],j] * B[j]", A=A, B=B, X=X, Y=Y, out_shape=(3,)),
        torch.zeros(3).index_add(0, X, A[Y] @ B),
    )


def test_spmm_coo() -> None:
    a, B = sparse(9, 7), torch.randn(7, 5)
    AM, AK = a.nonzero(as_tuple=True)
    torch.testing.assert_close(
        Insum(
            "C[AM[p],n] += AV[p] * B[AK[p],n]", C=torch.zeros(9, 5), AV=a[AM, AK], AM=AM, AK=AK, B=B
        ),
        a @ B,
    )


def test_spmm_group_coo() -> None:
    a, B, size = sparse(9, 7), torch.randn(7, 5), 2
    groups = [
        (m, ks[q : q + size])
        for m in range(9)
        for ks in [a[m].nonzero()[:, 0].tolist()]
        for q in range(0, len(ks), size)
    ]
    AM = torch.tensor([m for m, _ in groups])
    AK = torch.tensor([ks + [-1] * (size - len(ks)) for _, ks in groups])
    # what stands in the padding must not matter
    AV = torch.where(AK >= 0, a[AM[:, None], AK.clamp(min=0)], float("nan"))
    torch.testing.assert_close(
        Insum(
            "C[AM[p],n] = AV[p,q] * B[AK[p,q],n]",
            AV=AV,
            AM=AM,
            AK=AK,
            B=B,
            out_shape=(9, 5),
            padded=("AK",),
        ),
        a @ B,
    )


def test_spmm_block_coo() -> None:
    a, B = (
        torch.randn(8, 6)
        * (torch.rand(4, 3) < 0.6).float().repeat_interleave(2, 0).repeat_interleave(2, 1),
        torch.randn(6, 5),
    )
    AM, AK, AV = blocks(a, 2, 2)
    C = Insum(
        "C[AM[p],bm,n] = AV[p,bm,bk] * B[AK[p],bk,n]",
        AV=AV,
        AM=AM,
        AK=AK,
        B=B.reshape(3, 2, 5),
        sizes={"AM": 4},
    )
    torch.testing.assert_close(C.reshape(8, 5), a @ B)


def test_spmm_block_group_coo() -> None:
    a, B = torch.randn(8, 6), torch.randn(6, 5)
    AM, AK, AV = blocks(a, 2, 2)
    AM, AK, AV = AM[::3], AK.reshape(-1, 3), AV.reshape(-1, 3, 2, 2)  # every row has three blocks
    C = Insum(
        "C[AM[p],bm,n] = AV[p,q,bm,bk] * B[AK[p,q],bk,n]",
        AV=AV,
        AM=AM,
        AK=AK,
        B=B.reshape(3, 2, 5),
        sizes={"AM": 4},
    )
    torch.testing.assert_close(C.reshape(8, 5), a @ B)


def test_dense_matmul_of_the_figures() -> None:
    A, B = torch.randn(6, 4), torch.randn(4, 5)
    torch.testing.assert_close(Insum("C[y,x] = A[y,r] * B[r,x]", A=A, B=B), A @ B)
