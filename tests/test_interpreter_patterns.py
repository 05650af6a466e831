"""Constant patterns that are too long for one kernel: several, which share no output and no large
factor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.bench import data
from insum.call.request import request_of
from insum.codegen import unrolled
from insum.nn import FullyConnectedTensorProduct
from insum.plan.tiling import LONG
from insum.runtime import inspection
from kernels import lookup

pytestmark = pytest.mark.interpreter
IRREPS, SCALARS = "4x0e + 4x1o + 4x2e", "1x0e + 1x1o + 1x2e"


def test_parts_of_a_long_pattern_give_the_whole_product() -> None:
    torch.manual_seed(0)
    product = FullyConnectedTensorProduct(
        IRREPS, SCALARS, IRREPS, shared_weights=False, internal_weights=False
    )
    x, y, weight = torch.randn(3, 36), torch.randn(3, 9), torch.randn(3, product.weight_numel)
    leaves = [t.requires_grad_() for t in (x, y, weight)]
    upstream = torch.randn(3, 36)
    with insum.settings(backend="graph"):
        want = product(x, y, weight)
        gradients = torch.autograd.grad(want, leaves, upstream)
    with insum.settings(backend="fused", require_fused=True):
        got = product(x, y, weight)
        assert torch.allclose(got, want, atol=1e-4)
        for mine, true in zip(torch.autograd.grad(got, leaves, upstream), gradients, strict=True):
            assert torch.allclose(mine, true, atol=1e-3)


@pytest.mark.parametrize("channels", [(5, 7), (8, 16), (3, 70)])
def test_rows_along_a_summed_variable(channels: tuple[int, int]) -> None:
    """Where the largest factor's rows lie along a summed variable: summed within the loop, or at
    the end where others are summed too.
    """
    u, w = channels
    torch.manual_seed(0)
    out, path, column = (
        torch.tensor([0, 1, 1, 2]),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([1, 0, 2, 1]),
    )
    values = {
        "I": out,
        "L": path,
        "J": column,
        "X": torch.randn(4, 3, u),
        "G": torch.randn(4, 3, w),
        "W": torch.randn(4, 2, u, w),
    }
    for name in "ILJ":
        insum.constant(values[name])
    picked = values["W"][:, path]
    cases = {
        "D[b,J[p],u] = G[b,I[p],w] * W[b,L[p],u,w]": (
            (4, 3, u),
            column,
            torch.einsum("bpw,bpuw->bpu", values["G"][:, out], picked),
        ),
        "S[b,J[p]] = G[b,I[p],w] * X[b,I[p],u] * W[b,L[p],u,w]": (
            (4, 3),
            column,
            torch.einsum("bpw,bpu,bpuw->bp", values["G"][:, out], values["X"][:, out], picked),
        ),
    }
    for statement, (shape, where, terms) in cases.items():
        with insum.settings(backend="fused", require_fused=True):
            used = {n: v for n, v in values.items() if n + "[" in statement}
            problem = request_of(statement, shape, None, ()).bind(used)
            assert inspection.strategy(problem, used) == "unrolled"
            got = insum.insum(statement, out_shape=shape, **used)
        assert torch.allclose(got, torch.zeros(shape).index_add_(1, where, terms), atol=1e-4), (
            statement
        )


def test_parts_share_neither_outputs_nor_large_factors() -> None:
    n = LONG + 1
    out, path, column = torch.arange(n) % 6, torch.arange(n) % 3, torch.arange(n) % 7
    values = {
        "I": out,
        "L": path,
        "J": column,
        "X": torch.randn(4, 7, 2),
        "W": torch.randn(4, 3, 2, 5),
    }
    for name in "ILJ":
        insum.constant(values[name])
    problem = request_of("Z[b,I[p],w] = X[b,J[p],u] * W[b,L[p],u,w]", (4, 6, 5), None, ()).bind(
        values
    )
    with insum.settings(backend="fused", require_fused=True):
        program = lookup(problem, values)
        assert not isinstance(program, str) and len(program.steps[0].launches) == 3
        seen = [
            {point[0] for point in part.pattern.points}
            for part in unrolled.parts(program.steps[0].planned.plan)
            if part.pattern
        ]
        assert sorted(len(targets) for targets in seen) == [2, 2, 2] and len(set.union(*seen)) == 6
        got = insum.insum(problem.statement.text, out_shape=(4, 6, 5), **values)
    terms = torch.einsum("bpu,bpuw->bpw", values["X"][:, column], values["W"][:, path])
    assert torch.allclose(got, torch.zeros(4, 6, 5).index_add_(1, out, terms), atol=1e-4)


def test_short_patterns_stay_whole() -> None:
    product = FullyConnectedTensorProduct(
        "4x0e + 4x1o", "1x0e + 1x1o", "4x0e + 4x1o", shared_weights=False, internal_weights=False
    )
    with insum.settings(backend="fused", require_fused=True):
        product(torch.randn(2, 16), torch.randn(2, 4), torch.randn(2, product.weight_numel))


# --- patterns inside of other scatters ---

CONVOLUTION = "Z[dst[e],I[p,q],u] = V[p,q] * X[src[e],J[p,q],u] * Y[e,K[p,q]] * W[e,L[p],u]"


def convolution(
    nodes: int, edges: int, channels: int, in_order: bool = False
) -> tuple[dict[str, Any], Tensor]:
    """The tensors of a tensor-product convolution, and its result from a dense pattern."""
    fixed: dict[str, Any] = data.promised(
        data.grouped_coefficients(data.degrees(1)), torch.device("cpu")
    )
    x, y = torch.randn(nodes, 4, channels), torch.randn(edges, 4)
    w, ends = torch.randn(edges, 5, channels), torch.randint(0, nodes, (2, edges))
    if in_order:
        ends[1] = ends[1].sort().values
    dense = torch.zeros(5, 4, 4, 4)
    p, q = (fixed["I"] >= 0).nonzero(as_tuple=True)
    dense[(fixed["L"][p].long(), *(fixed[n][p, q].long() for n in "IJK"))] = fixed["V"][p, q]
    messages = torch.einsum("pijk,eju,ek,epu->eiu", dense, x[ends[0]], y, w)
    want = torch.zeros(nodes, 4, channels).index_add(0, ends[1], messages)
    values = {**fixed, "X": x, "Y": y, "W": w, "src": ends[0], "dst": ends[1]}
    return values, want


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


@pytest.mark.parametrize("channels", [7, 16, 64])
@pytest.mark.parametrize("way", ["sorted", "known", "unseen", "deterministic"])
def test_a_pattern_nests_inside_of_a_scatter(
    channels: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of a row are walked in order, where there is one or one pays; else atomics."""
    torch.manual_seed(0)
    if way in ("unseen", "deterministic"):
        as_on_a_gpu(monkeypatch)
    if way == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    values, want = convolution(9, 40, channels, in_order=way == "sorted")
    options: dict[str, Any] = {"out_shape": want.shape, "padded": ("I", "J", "K")}
    leaves = [values[n].requires_grad_() for n in ("X", "Y", "W", "V")]
    upstream = torch.randn_like(want)
    with insum.settings(backend="graph"):
        exact = insum.insum(CONVOLUTION, **values, **options)
        gradients = torch.autograd.grad(exact, leaves, upstream)
    torch.testing.assert_close(exact, want, atol=1e-4, rtol=1e-4)
    with insum.settings(backend="fused", require_fused=True):
        got = insum.insum(CONVOLUTION, **values, **options)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        for mine, true in zip(torch.autograd.grad(got, leaves, upstream), gradients, strict=True):
            torch.testing.assert_close(mine, true, atol=1e-3, rtol=1e-3)
    insum.synchronize()


@pytest.mark.parametrize(("in_order", "known"), [(True, True), (False, True), (False, False)])
def test_a_nested_pattern_is_one_kernel_of_straight_line_code(
    in_order: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        as_on_a_gpu(monkeypatch)
    values, want = convolution(9, 40, 64, in_order)
    request = request_of(CONVOLUTION, want.shape, None, ("I", "J", "K"), None)
    program = lookup(request.bind(values), values)
    (step,) = program.steps
    (one,) = step.launches
    assert one.plan.strategy == ("segment" if known else "atomic") and one.plan.pattern is not None
    # one for each component of the output
    assert one.kernel.source.count("tl.store" if known else "tl.atomic_add") == 4
    loads = one.kernel.source.count("tl.load(W_ptr")
    assert loads == 5, "the weights of each path are read once"


def test_rows_without_entries_and_components_without_points() -> None:
    values, _ = convolution(9, 40, 16, in_order=True)
    values["dst"] = values["dst"].clone()
    values["dst"][values["dst"] == 4] = 5
    with insum.settings(backend="fused", require_fused=True):
        got = insum.insum(CONVOLUTION, **values, out_shape=(12, 6, 16), padded=("I", "J", "K"))
    assert not got[4].any() and not got[9:].any() and not got[:, 4:].any() and got[5].any()


def test_an_index_out_of_range_beside_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    values, want = convolution(9, 40, 8)
    for name, place in (("src", 3), ("dst", 5)):
        wrong = values[name].clone()
        wrong[place] = 9
        with insum.settings(backend="fused", require_fused=True):
            got = insum.insum(
                CONVOLUTION,
                **{**values, name: wrong},
                out_shape=want.shape,
                padded=("I", "J", "K"),
            )
            with pytest.raises(insum.IndexRangeError, match=rf"{name}\[{place}\] is 9"):
                insum.synchronize()
        assert bool(got.isnan().any()) == (name == "src")
