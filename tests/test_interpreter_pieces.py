"""Long reductions over few places of the output are cut into pieces: sums meet in atomics, and
where the order must not differ, or there are none, in a second kernel over a workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import insum

pytestmark = pytest.mark.interpreter

LONG = 2600
STATEMENTS: dict[str, dict[str, tuple[int, ...]]] = {
    "y[j] max= a[i,j]": {"a": (LONG, 5)},
    "y[] min= a[i]": {"a": (5 * LONG,)},
    "y[i] min= a[i,j]": {"a": (3, LONG)},
    "y[j] = a[i,j]": {"a": (LONG, 5)},
    "y[j,k] max= a[i,j] * b[i,k]": {"a": (LONG, 5), "b": (LONG, 3)},
    "y[k,j] = 2 * a[i,j] * b[i,k]": {"a": (LONG, 17), "b": (LONG, 9)},
    "y[u[j]] max= a[i,j]": {"a": (LONG, 5)},
    "y[j] = a[s[i],j]": {"a": (50, 5)},
    # a loop around a contraction, whose scale is another at each of its steps
    "y[i,f] = t[i,z,k] * b[z,f] * d[k,f]": {"t": (17, 180, 40), "b": (180, 18), "d": (40, 18)},
    "y[i,f] = t[i,z,w,k] * b[z,f] * e[w,f] * d[k,f]": {
        "t": (17, 90, 3, 20),
        "b": (90, 18),
        "e": (3, 18),
        "d": (20, 18),
    },
}


def drawn(statement: str, dtype: torch.dtype) -> dict[str, Any]:
    values: dict[str, Any] = {n: torch.randn(s).to(dtype) for n, s in STATEMENTS[statement].items()}
    if "u[" in statement:
        values["u"] = insum.constant(torch.tensor([4, 1, 6, 0, 2]))
        values["out_shape"] = (8,)
    if "s[" in statement:
        values["s"] = torch.randint(0, 50, (LONG,))
    return values


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(wanted)
    try:
        with insum.settings(backend="fused", require_fused=True):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def exact(statement: str, values: dict[str, Any]) -> Tensor:
    wide = {
        n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in values.items()
    }
    return insum.insum(statement, **wide)


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("repeats", [False, True])
def test_pieces(statement: str, repeats: bool) -> None:
    dtype = torch.float16 if repeats else torch.float32
    values = drawn(statement, dtype)
    with deterministic(repeats):
        got = insum.insum(statement, **values)
        again = insum.insum(statement, **values)
        told = str(insum.explain(statement, **values))
    apart = repeats or "max=" in statement or "min=" in statement
    assert ("work_at" in told) == apart and ("piece" in told)
    assert not repeats or torch.equal(got, again)
    want, allowed = exact(statement, values), 1e-3 if dtype == torch.float16 else 2e-6
    scale = float(want[want.isfinite()].abs().max())
    torch.testing.assert_close(got.double(), want, rtol=allowed, atol=allowed * scale)


def test_pieces_that_halves_are_rounded_from() -> None:
    """The loop around the contraction is cut; what scales each of its steps stays inside."""
    draw = torch.Generator().manual_seed(0)
    x, W, z = (
        torch.randn(s, generator=draw).half() / 4 for s in ((400, 70), (24, 70, 20), (400, 20))
    )
    want = torch.einsum("bi,oij,bj->bo", x.double(), W.double(), z.double())
    with deterministic(False):
        got = insum.insum("y[b,o] = x[b,i] * W[o,i,j] * z[b,j]", x=x, W=W, z=z)
        told = str(insum.explain("y[b,o] = x[b,i] * W[o,i,j] * z[b,j]", x=x, W=W, z=z))
    assert "work_at" in told
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=5e-3)


def test_few_halves_are_added_up_where_they_would_be_rounded() -> None:
    """One launch puts pieces together and rounds them; there is none that fills."""
    a = torch.randn(LONG, 40).half()
    with deterministic(False):
        got = insum.insum("y[j] = a[i,j]", a=a)
        assert "work_at" in str(insum.explain("y[j] = a[i,j]", a=a))
        assert "work_at" not in str(insum.explain("y[j] = a[i,j]", a=a.float()))
    torch.testing.assert_close(got.double(), a.double().sum(0), rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize("operator", ["+=", "max="])
def test_pieces_in_place(operator: str) -> None:
    a, C = torch.randn(LONG, 5), torch.full((5,), 3.75)
    want = C + a.sum(0) if operator == "+=" else torch.maximum(C, a.amax(0))
    with deterministic(False):
        assert insum.insum(f"C[j] {operator} a[i,j]", C=C, a=a) is C
    torch.testing.assert_close(C, want, rtol=1e-5, atol=1e-3)


def test_nan_in_one_piece_is_seen() -> None:
    a = torch.randn(LONG, 5)
    a[LONG - 1, 2] = torch.nan
    with deterministic(False):
        got = insum.insum("y[j] max= a[i,j]", a=a)
    assert got.isnan().tolist() == [False, False, True, False, False]


def test_gradients_through_pieces() -> None:
    a = torch.randn(LONG, 3, dtype=torch.float64, requires_grad=True)
    with deterministic(True):
        got = insum.insum("y[j] max= a[i,j]", a=a)
        (found,) = torch.autograd.grad(got.sum(), a)
    (want,) = torch.autograd.grad(a.amax(0).sum(), a)
    assert torch.equal(found, want)


@pytest.mark.parametrize("statement", ["y[a] = x[a,k]", "y[a] max= x[a,k]", "y[c] = x[k,c]"])
def test_nothing_is_cut_where_there_is_nothing(statement: str) -> None:
    x = torch.ones((0, 4000) if "a" in statement else (4000, 0))
    with deterministic(False):
        assert insum.insum(statement, x=x).shape == (0,)


@pytest.mark.parametrize("statement", ["y[x,c] = a[s[z,x],c] * w[z,c]", "y[x,c] max= a[s[z,x],c]"])
@pytest.mark.parametrize("steps", [2, 7])
def test_steps_that_are_read_together(statement: str, steps: int) -> None:
    """Two turns of three, and one step that is left; or fewer steps than a turn has."""
    generator = torch.Generator().manual_seed(steps)
    values: dict[str, Any] = {
        "a": torch.randn(20, 9, generator=generator),
        "s": torch.randint(-1, 20, (steps, 33), generator=generator),
    }
    values["s"][0].clamp_(min=0)  # so that no largest value is one of nothing
    if "w" in statement:
        values["w"] = torch.randn(steps, 9, generator=generator)
    config = insum.Config(m=16, n=16, k=1, warps=4, stages=3)
    with insum.settings(backend="fused", require_fused=True):
        found = insum.insum(statement, padded=("s",), config=config, **values)
    assert torch.allclose(found, insum.insum(statement, padded=("s",), **values))
