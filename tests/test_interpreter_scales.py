"""Factors that are the same in all steps of a sum: they multiply it once, behind its loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import insum
from kernels import error

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

ROWS, ENTRIES = 13, 60
#: Every second row has no entry.
D = torch.sort(torch.randint(0, 6, (ENTRIES,)) * 2).values
SORTED, DRAWN = D, D[torch.randperm(ENTRIES)]


def by_hand(d: Tensor, messages: Tensor, scale: Tensor) -> Tensor:
    total = messages.new_zeros(ROWS, *messages.shape[1:]).index_add(0, d, messages)
    there = torch.bincount(d, minlength=ROWS).bool().view(-1, *[1] * (messages.dim() - 1))
    return torch.where(there, total * scale, 0)


@pytest.mark.parametrize("d", [SORTED, DRAWN], ids=["sorted", "drawn"])
@pytest.mark.parametrize("width", [1, 5, 16])
def test_a_scale_of_rows(d: Tensor, width: int) -> None:
    """Infinite where there is nothing to scale, as the inverse of a degree of nodes alone is."""
    x, s, a = torch.randn(9, width), torch.randint(9, (ENTRIES,)), torch.rand(ROWS)
    a[1::2] = math.inf
    given = {"d": d, "s": s, "x": x, "a": a}
    want = by_hand(d, x[s].double(), a[:, None].double())
    for _ in range(3):  # then it has come back
        y = insum.insum("y[d[e],f] = x[s[e],f] * a[d[e]]", **given, sizes={0: ROWS})
        assert error(y, want) <= 1e-6


def test_scaled_products_of_matrices() -> None:
    """A row without entries is zero, whatever scales it."""
    A, B = torch.randn(ENTRIES, 16, 16).half(), torch.randn(16, 32).half()
    a = torch.rand(16).half()
    a[3] = math.inf
    y = insum.insum("y[d[e],m,n] = A[e,m,k] * B[k,n] * a[m]", d=D, A=A, B=B, a=a, sizes={0: ROWS})
    assert not y[1::2].any() and y[::2, 3][: int(D.max()) // 2 + 1].isinf().all()
    a[3] = 1
    y = insum.insum("y[d[e],m,n] = A[e,m,k] * B[k,n] * a[m]", d=D, A=A, B=B, a=a, sizes={0: ROWS})
    want = by_hand(D, A.double() @ B.double(), a[:, None].double())
    assert error(y, want) <= 2e-3


def test_equal_factors() -> None:
    """Two of the same text are two factors; a number is one, too."""
    A, x = torch.randn(7, 40), torch.rand(7)
    y = insum.insum("y[i] = A[i,j] * A[i,j] * x[i] * x[i] * 3", A=A, x=x)
    assert error(y, 3 * (A.double() ** 2).sum(1) * x.double() ** 2) <= 1e-6


def test_they_stand_behind_the_loop() -> None:
    given = {"d": SORTED, "s": torch.randint(9, (ENTRIES,)), "x": torch.randn(9, 16)}
    text = "y[d[e],f] = x[s[e],f] * a[d[e]]"
    page = insum.explain(text, **given, a=torch.rand(ROWS), sizes={0: ROWS}, gpu="sm_90").fused
    loop, behind = page[page.index("for t in") :].split("scaled_")[:2]
    assert "a_v" not in loop and "a_v" in behind
