"""Products that are read at some places, and products with matrices that were scattered: no matrix
of all pairs is left, forward and backward, and where one is, there is a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.testing import assert_close

import insum.fusion
from insum.fusion import sampled
from insum.fusion.views import VIEWS

from .programs import agrees, compiled

PairsProgram: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
N, M, K, E, F = 7, 5, 3, 20, 4
torch.manual_seed(0)
rows, columns = torch.randint(0, N, (E,)), torch.randint(0, M, (E,))
rows[1], columns[1], columns[3] = rows[0], columns[0], -1  # one twice, and one from the end


def matrix(v: Tensor) -> Tensor:
    return v.new_zeros(N, M).index_put((rows, columns), v, accumulate=True)


#: Programs without a matrix of all pairs, and how many statements each is, backward included.
PROGRAMS: dict[str, tuple[PairsProgram, int]] = {
    "at places": (lambda x, y, v, z: (x @ y.T)[rows, columns], 3),
    "functions": (lambda x, y, v, z: torch.sigmoid((x @ y.T) * 0.5 + 1)[rows, columns] * v, 3),
    "scattered": (lambda x, y, v, z: matrix(v) @ z, 3),
    "from the left": (lambda x, y, v, z: x.T @ matrix(v), 3),
    "both": (lambda x, y, v, z: ((x @ y.T) * matrix(v)) @ z, 6),
    "with a sum": (lambda x, y, v, z: matrix(v).sum(1)[:, None] * (matrix(v) @ z), 3),
    "scaled": (lambda x, y, v, z: (matrix(v) * x[:, :1].abs() / 2) @ z, 3),
    "with a bias": (lambda x, y, v, z: torch.addmm(z[0], matrix(v), z), 3),
    "of a number": (lambda x, y, v, z: matrix(v.new_tensor(2.0)) @ z, 2),
}
#: Programs whose matrix has to be there.
LEFT: dict[str, PairsProgram] = {
    "used elsewhere": lambda x, y, v, z: (p := x @ y.T)[rows, columns] + p.sum(),
    "a grid": lambda x, y, v, z: (x @ y.T)[rows[:, None], columns[None]],
    "squared": lambda x, y, v, z: (matrix(v) * matrix(v)) @ z,
    "divided by what may be zero": lambda x, y, v, z: (matrix(v) / (x[:, :1] - 1)) @ z,
    "times what may be infinite": lambda x, y, v, z: (matrix(v) * x[:, :1].abs().rsqrt()) @ z,
    "divided by zero": lambda x, y, v, z: (matrix(v) / 0) @ z,
    "times infinity": lambda x, y, v, z: (matrix(v) * float("inf")) @ z,
    "overwritten": lambda x, y, v, z: v.new_zeros(N, M).index_put((rows, columns), v[0]) @ z,
    "an output": lambda x, y, v, z: matrix(v).unsqueeze(0) + (matrix(v) @ z).sum(),
}


def tensors() -> tuple[Tensor, ...]:
    shapes = ((N, K), (M, K), (E,), (M, F))
    return tuple(torch.randn(*s, dtype=torch.float64).requires_grad_() for s in shapes)


def has_pairs(graph: Graph) -> bool:
    """Whether something as large as all pairs is computed."""
    made = [n for n in graph.nodes if n.op == "call_function" and n.target not in VIEWS]
    values = [n.meta.get("val") for n in made]
    sizes = [tuple(v.shape) for v in values if isinstance(v, Tensor) and v.is_floating_point()]
    return (N, M) in sizes or (M, N) in sizes


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_pairs(name: str) -> None:
    program, count = PROGRAMS[name]
    run, graphs = compiled(program)
    agrees(run, program, tensors())
    assert not any(has_pairs(module.graph) for module in graphs)
    assert len(insum.fusion.report().fused) == count and not insum.fusion.report().failed


@pytest.mark.parametrize("name", LEFT)
def test_pairs_that_have_to_be_there(name: str) -> None:
    run, graphs = compiled(LEFT[name])
    agrees(run, LEFT[name], tensors(), equal_nan=True)
    assert has_pairs(graphs[0].graph) and not insum.fusion.report().failed


#: Programs over a single row or column, which is no matrix of pairs.
SINGLE: dict[str, PairsProgram] = {
    "a column for all": lambda x, y, v, z: (
        (v.new_zeros(N, 1).index_put((rows, 0 * rows), v, accumulate=True) * x.detach()) @ y.T
    ),
    "a row for all": lambda x, y, v, z: (
        z @ (v.new_zeros(1, F).index_put((0 * rows, rows % F), v, accumulate=True) * z.detach()).T
    ),
    "one pair": lambda x, y, v, z: (x[:1] @ y[:1].T)[0 * rows, 0 * rows],
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_rows_and_columns(name: str) -> None:
    run, _ = compiled(SINGLE[name])
    agrees(run, SINGLE[name], tensors())
    assert not insum.fusion.report().failed


def test_a_place_beyond_a_single_column_is_an_error() -> None:
    program = lambda x, y, at: (x @ y.T)[at, at]
    run, _ = compiled(program)
    with pytest.raises((IndexError, insum.InsumError)):
        run(torch.randn(N, K), torch.randn(1, K), rows)


def test_sizes_that_change() -> None:
    def program(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
        held = x.new_zeros(x.shape[0], y.shape[0])
        found = (x @ y.T)[ends[0], ends[1]]
        return held.index_put((ends[0], ends[1]), found, accumulate=True) @ y

    run, _ = compiled(program, dynamic=True)
    for count in (E, E + 3):
        x, y = (t[: 3 + count % 5] for t in tensors()[:2])
        ends = torch.randint(0, 3, (2, count))
        agrees(run, program, (x, y, ends))
    assert insum.fusion.report().fused and not insum.fusion.report().failed


def test_an_index_out_of_range_is_an_error() -> None:
    program = lambda x, y, at: (x @ y.T)[at, at]
    run, _ = compiled(program)
    x, y = torch.randn(N, K), torch.randn(N, K)
    assert_close(run(x, y, rows), program(x, y, rows))
    with pytest.raises((IndexError, insum.InsumError)):
        run(x, y, rows + N)


def test_what_is_written_to_later_is_left() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        found = (x @ y.T)[rows, columns]
        x.mul_(2)
        return found

    run, graphs = compiled(program)
    x, y = (t.detach() for t in tensors()[:2])
    want = program(x.clone(), y)
    assert_close(run(held := x.clone(), y), want)
    assert_close(held, 2 * x)
    assert has_pairs(graphs[0].graph)


def drawn_graph(nodes: int, edges: int, device: str) -> tuple[sampled._VirtualMatrices, Node]:
    """A product of ``nodes`` rows with as many, read at ``edges`` places, of fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph, aten = Graph(), torch.ops.aten
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(nodes, 64, device=device)
        at = torch.empty(edges, dtype=torch.int64, device=device)
        values = {"x": x, "y": x.T, "at": at}
        given = {name: graph.placeholder(name) for name in values}
        for name, node in given.items():
            node.meta["val"] = values[name]
        product = graph.call_function(aten.mm.default, (given["x"], given["y"]))
        product.meta["val"] = x @ x.T
        read = graph.call_function(aten.index.Tensor, (product, [given["at"], given["at"]]))
        read.meta["val"] = torch.empty(edges, device=device)
        graph.output(read)
    return sampled._VirtualMatrices(graph), product


def test_a_small_matrix_is_cheaper_as_a_whole() -> None:
    assert sampled._pays(*drawn_graph(80_000, 1_000_000, "cuda"))
    assert not sampled._pays(*drawn_graph(100, 1_000_000, "cuda"))
    assert not sampled._pays(*drawn_graph(80_000, 1_000_000, "cpu"))
