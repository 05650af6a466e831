"""The convolution of equivariant networks: every contender that is here, small, on a CPU."""

from __future__ import annotations

import pytest
import torch

from insum.bench import equivariant
from insum.bench.main import options_of, parser
from insum.bench.measure import TOLERANCE, relative_error
from insum.bench.records import BOTH, FORWARD
from insum.bench.rivals import CUEQUIVARIANCE


@pytest.mark.parametrize("direction", [FORWARD, BOTH, equivariant.DOUBLE])
def test_everybody_computes_the_same(direction: str) -> None:
    given = equivariant.inputs(1, 4, 12, torch.device("cpu"))
    want = equivariant.want(given, direction)
    names = []
    for contender in equivariant.contenders(given, direction):
        ready = contender.make()
        error = relative_error(ready.canonical(ready.run()), want)
        assert error <= TOLERANCE[torch.float32], f"{contender.name}: {error}"
        names.append(contender.name)
    assert names[:2] == ["insum", "insum, product and index_add"]
    assert given.work(direction).bytes > 0


def test_cuequivariance_without_a_gpu() -> None:
    for name in CUEQUIVARIANCE.modules:
        pytest.importorskip(name, reason="cuEquivariance is not installed")
    given = equivariant.inputs(1, 4, 12, torch.device("cpu"))
    want = equivariant.want(given, equivariant.DOUBLE)
    ready = equivariant.cuequivariance(given, equivariant.DOUBLE, "naive")
    assert relative_error(ready.canonical(ready.run()), want) <= TOLERANCE[torch.float32]


def test_rows_and_directions() -> None:
    def names(*more: str) -> list[tuple[str, str]]:
        options = options_of(parser().parse_args(["equivariant", "--device", "cpu", *more]))
        return [(case.name, case.direction) for case in equivariant.cases(options)]

    assert len(names("--only", "3x32x50k")) == 3
    label = "degree 1, 32 channels, 100 edges"
    assert names("--only", "1x32x50k", "--directions", "forward") == [(label, FORWARD)]
    assert names("--only", "3x128x2M") == []
