"""The gradient of a convolution through a symmetric neighbour table gathers through the table
itself, read backwards.
"""

from __future__ import annotations

import pytest
import torch

import applications
import insum
from applications import relative_error
from kernels import lookup

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("layout", ["by voxel", "by offset"])
def test_a_symmetric_table_is_its_own_inverse(layout: str) -> None:
    application = applications.convolution(
        voxels=40,
        offsets=5,
        inputs=16,
        outputs=16,
        layout=layout,
        symmetric=True,
        dtype=torch.float32,
    )
    upstream = application.upstream()
    call, expected = (
        application.gradients(upstream)["In"],
        application.expected_gradients(upstream)["In"],
    )
    with insum.settings(backend="fused", require_fused=True):
        assert relative_error(call.run(), expected) < 2e-6
        program = lookup(call.problem(), call.values)
    assert not isinstance(program, str)
    prepared = program.steps[0].planned
    assert prepared.plan.strategy == "store" and not prepared.arrays, "no table is kept"
    assert "read backwards" in prepared.plan.why[0]
