"""Constant patterns that are too long for one kernel: several, which share no output and no large
factor.
"""

from __future__ import annotations

import pytest
import torch

import insum
from insum.codegen import unrolled
from insum.nn import FullyConnectedTensorProduct
from insum.plan.patterns import LONG
from insum.request import request_of
from insum.runtime import fused

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
            assert fused.strategy(problem, used) == "unrolled"
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
        program = fused.lookup(problem, values, None)
        assert not isinstance(program, str) and len(program.steps[0].launches) == 3
        seen = [
            {point[0] for point in part.pattern.points}
            for part in unrolled.parts(program.steps[0].prepared.plan)
            if part.pattern
        ]
        assert sorted(len(targets) for targets in seen) == [2, 2, 2] and len(set.union(*seen)) == 6
        got = fused.execute(program, values, None)
    terms = torch.einsum("bpu,bpuw->bpw", values["X"][:, column], values["W"][:, path])
    assert torch.allclose(got, torch.zeros(4, 6, 5).index_add_(1, out, terms), atol=1e-4)


def test_short_patterns_stay_whole() -> None:
    product = FullyConnectedTensorProduct(
        "4x0e + 4x1o", "1x0e + 1x1o", "4x0e + 4x1o", shared_weights=False, internal_weights=False
    )
    with insum.settings(backend="fused", require_fused=True):
        product(torch.randn(2, 16), torch.randn(2, 4), torch.randn(2, product.weight_numel))
