"""What result objects show in notebooks, and the kernel in Python without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import insum
from insum.distributed import plan
from insum.formats import COO, GroupCOO, suggest
from insum.formats.tune import TunedFormat
from insum.fusion.report import Failed, Fused, Left, MovedProduct, Once, Report
from insum.nn.swapping import Replacement, Swapped
from insum.runtime.search import TriedChoice, Tuned

X = torch.ones(4, 4)


def test_every_result_object_has_html() -> None:
    report = Report(
        (Fused("C[i] = A[i] * x[j<k]", "add_1", ("a", "b"), True, 12_000),),
        (Left("sum_2", "nothing is <gathered>", False),),
        (Once(("mask",), ("edges",)),),
        (Failed("chains", "a mistake"),),
        (MovedProduct("mm", "multiplied before it is <gathered>"),),
    )
    things: list[Any] = [
        suggest(torch.eye(8)),
        report,
        Report(),
        COO.from_dense(X),
        insum.explain("y[i] = A[i,j]", A=X),
        insum.explain("y[i] = A[i,j]", A=COO.from_dense(X)),
        insum.nn.sparsify(torch.nn.Sequential(torch.nn.Linear(8, 8)), 0.5, rows=8),
        insum.tune("y[i] = A[i,j]", A=X),
        Tuned("y", (), 1.0, 2.0, (TriedChoice((insum.Config(),), 1.0, "<gathered>"),)),
        TunedFormat(COO.from_dense(X), 1, {1: 2.0, 0: 3.0}, 1.5),
        Swapped((Replacement("a", "o3.Linear", "Linear"),), (("b", "it is <gathered>"),)),
        plan(COO.from_dense(X), 2),
    ]
    for thing in things:
        text = thing._repr_html_()
        assert text.startswith("<") and text.count("<table") == text.count("</table>"), thing
        assert "<gathered>" not in text
    assert "12,000 elements" in report._repr_html_() and "backward" in report._repr_html_()
    assert Report()._repr_html_() == "<p>nothing to fuse</p>"


@pytest.mark.parametrize("A", [X, GroupCOO.from_dense(X), X.numpy()])
def test_kernels_are_shown_without_a_gpu(A: Any) -> None:
    page = insum.explain("C[m,n] = A[m,k] * B[k,n]", A=A, B=X, gpu="sm_90")
    assert "@triton.jit" in str(page) and "model" in str(page)
    assert "@triton.jit" not in str(insum.explain("C[m,n] = A[m,k] * B[k,n]", A=A, B=X))


def test_profilers_show_statements() -> None:
    """Of a call, of the statements derived from it, and of a kernel; nobody else pays for it."""
    x = torch.ones(3, requires_grad=True)
    with torch.profiler.profile() as profile:
        insum.insum("y[i] = A[i,j] * x[j]", A=X[:, :3], x=x).sum().backward()
    names = [e.name for e in profile.events() if e.name.startswith("insum: ")]
    assert names == ["insum: y[i] = A[i,j] * x[j]", "insum: dx[j] += dy[i] * A[i,j]"]
    page = str(insum.explain("y[i] = A[i,j] * x[j]", A=X, x=X[0], gpu="sm_90"))
    assert "def insum_y_i__A_i_j__x_j__store(" in page


def test_gpus_that_are_none() -> None:
    for wrong in ("hopper", "sm_1", "sm_900", "gfx", "sm_90 "):
        with pytest.raises(insum.SettingsError, match=f"gpu is '{wrong}'"):
            insum.explain("y[i] = A[i,j]", A=X, gpu=wrong)
    for gpu in ("sm_75", "sm_90a", "sm_120", "gfx90a", "gfx1201"):
        assert "@triton.jit" in str(insum.explain("y[i] = A[i,j]", A=X, gpu=gpu))
    with pytest.raises(insum.BindingError, match="names a tensor 'gpu', which is an option here"):
        insum.explain("y[i] = gpu[i,j]", gpu=X)  # type: ignore[arg-type]
    page = insum.explain("y[i] = A[i,j]", A=X.to(torch.complex64), gpu="sm_90")
    assert "no fused kernel" in str(page)
