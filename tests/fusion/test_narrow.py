"""Index tensors that are stored in few bits: rows are counted in as many as they need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import insum.fusion
from insum.errors import IndexRangeError
from insum.fusion import indices

from .programs import agrees, compiled, counts

R, F = 4, 3
NARROW = [torch.int8, torch.int16, torch.int32]


@pytest.fixture(autouse=True)
def everything_in_one_graph() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def relations(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], w.shape[2])
    for r in range(R):
        e = edges[:, kinds == r].long()
        out = out + torch.zeros_like(x).index_add(0, e[1], x[e[0]]) @ w[r]
    return out


@pytest.mark.parametrize("low", [0, 64])
@pytest.mark.parametrize("dtype", NARROW)
def test_relations(dtype: torch.dtype, low: int) -> None:
    """Row ``node * R + relation`` has more bits than ``node``."""
    nodes = 96 if dtype is torch.int8 else 200
    edges = torch.randint(low, nodes, (2, 60)).to(dtype)
    arguments = (
        torch.randn(nodes, F, requires_grad=True),
        torch.randn(R, F, 5, requires_grad=True),
        edges,
        torch.randint(0, R, (60,), dtype=torch.int8),
    )
    run, graphs = compiled(relations, fullgraph=True)
    agrees(relations, run, arguments, rtol=1e-4, atol=1e-4)
    assert counts(graphs) == [1, 1], str(insum.fusion.report())


def test_relations_of_many_nodes() -> None:
    nodes = 24576
    edges = torch.randint(16384, nodes, (2, 60), dtype=torch.int16)
    kinds = torch.randint(0, R, (60,))
    x, w = torch.randn(nodes, F), torch.randn(R, F, 5)
    run, _ = compiled(relations)
    torch.testing.assert_close(
        run(x, w, edges, kinds), relations(x, w, edges, kinds), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_beyond_the_end_stays_an_error(dtype: torch.dtype) -> None:
    """100 times 4 relations is within 96 times 4 rows, in 8 bits."""
    edges = torch.full((2, 60), 100, dtype=dtype)
    run, _ = compiled(relations)
    arguments = torch.randn(96, F), torch.randn(R, F, 5), edges, torch.randint(0, R, (60,))
    with pytest.raises((IndexRangeError, IndexError, RuntimeError), match=r"size|range|bounds"):
        run(*arguments)


@pytest.mark.parametrize("nodes", [100, 200, 40000])
@pytest.mark.parametrize("dtype", NARROW)
def test_from_the_end(dtype: torch.dtype, nodes: int) -> None:
    """-1 is row 199 of 200, which 8 bits do not tell."""
    index = torch.randint(-nodes, nodes, (60,)).clamp(torch.iinfo(dtype).min, 127).to(dtype)
    index[0] = -1
    place = torch.randint(0, 5, (60,))
    program = lambda x, index: torch.zeros(5, F).index_add(0, place, x[index.long()])
    run, graphs = compiled(program)
    agrees(program, run, (torch.randn(nodes, F, requires_grad=True), index))
    assert counts(graphs) == [1, 1]


@pytest.mark.parametrize("limit", [100, 200, 40000])
@pytest.mark.parametrize("dtype", NARROW)
def test_negative_values_in_narrow_dtypes(dtype: torch.dtype, limit: int) -> None:
    """Counted from the end; what is out of range stays so."""
    most = min(limit, torch.iinfo(dtype).max + 1)
    index = torch.tensor([0, 1, most - 1, -1, -most], dtype=dtype)
    expected = torch.remainder(index.long(), limit)
    assert torch.equal(indices.wrapped(index, limit).long(), expected)
    if -limit > torch.iinfo(dtype).min:
        below = torch.tensor([-limit - 1], dtype=dtype)
        assert indices.wrapped(below, limit).tolist() == [limit]
