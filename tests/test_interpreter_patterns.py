"""Constant patterns that are too long for one kernel: several, which share no output and no large factor."""

from __future__ import annotations

import pytest
import torch

import insum
from insum.codegen import unrolled
from insum.nn import FullyConnectedTensorProduct
from insum.request import request_of
from insum.runtime import fused

pytestmark = pytest.mark.interpreter
IRREPS, SCALARS = "4x0e + 4x1o + 4x2e", "1x0e + 1x1o + 1x2e"


def test_parts_of_a_long_pattern_give_the_whole_product() -> None:
    torch.manual_seed(0)
    product = FullyConnectedTensorProduct(IRREPS, SCALARS, IRREPS, shared_weights=False, internal_weights=False)
    x, y, weight = torch.randn(3, 36), torch.randn(3, 9), torch.randn(3, product.weight_numel)
    with insum.settings(backend="graph"):
        want = product(x, y, weight)
    with insum.settings(backend="fused", require_fused=True):
        got = product(x, y, weight)
    assert torch.allclose(got, want, atol=1e-4)


def test_parts_share_neither_outputs_nor_large_factors() -> None:
    n = unrolled.WHOLE_UP_TO + 1
    out, path, column = torch.arange(n) % 6, torch.arange(n) % 3, torch.arange(n) % 7
    values = {"I": out, "L": path, "J": column, "X": torch.randn(4, 7, 2), "W": torch.randn(4, 3, 2, 5)}
    for name in "ILJ":
        insum.constant(values[name])
    problem = request_of("Z[b,I[p],w] = X[b,J[p],u] * W[b,L[p],u,w]", (4, 6, 5), None, ()).bind(values)
    with insum.settings(backend="fused", require_fused=True):
        program = fused.lookup(problem, values, None)
        assert not isinstance(program, str) and len(program.steps[0].launches) == 3
        seen = [{point[0] for point in part.pattern.points} for part in unrolled.parts(program.steps[0].prepared.plan) if part.pattern]
        assert sorted(len(targets) for targets in seen) == [2, 2, 2] and len(set.union(*seen)) == 6
        got = fused.execute(program, values, None)
    terms = torch.einsum("bpu,bpuw->bpw", values["X"][:, column], values["W"][:, path])
    assert torch.allclose(got, torch.zeros(4, 6, 5).index_add_(1, out, terms), atol=1e-4)


def test_short_patterns_stay_whole() -> None:
    product = FullyConnectedTensorProduct("4x0e + 4x1o", "1x0e + 1x1o", "4x0e + 4x1o", shared_weights=False, internal_weights=False)
    with insum.settings(backend="fused", require_fused=True):
        product(torch.randn(2, 16), torch.randn(2, 4), torch.randn(2, product.weight_numel))
