"""Relations as one more dimension: loops over masked edges become one chain, one division, one
product; and what must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum
import insum.fusion
from insum import memory
from insum.fusion import siblings

from .programs import E, F, N, agrees, compiled, counts, graph_of, leaf

R = 3
KINDS = torch.randint(0, R, (E,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def everything_in_one_graph() -> Iterator[None]:
    memory.forget()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def loop(step: Callable[..., Tensor], order: Any = range(R)) -> Callable[..., Tensor]:
    """``step`` for each relation, added up."""

    def program(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], w.shape[2])
        for r in order:
            out = out + step(x, w, *edges[:, kinds == r], r)
        return out

    return program


def total(x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    return x.new_zeros(x.shape).index_add(0, dst, x[src])


def degree(x: Tensor, dst: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0]).index_add(0, dst, x.new_ones(dst.shape[0])).clamp(min=1)


PROGRAMS = {
    "sums": loop(lambda x, w, src, dst, r: total(x, src, dst) @ w[r]),
    "sums, backwards": loop(lambda x, w, src, dst, r: total(x, src, dst) @ w[r], (2, 1, 0)),
    "sums, in another order": loop(lambda x, w, src, dst, r: total(x, src, dst) @ w[r], (1, 2, 0)),
    "means": loop(lambda x, w, src, dst, r: (total(x, src, dst) / degree(x, dst)[:, None]) @ w[r]),
    "scaled": loop(
        lambda x, w, src, dst, r: (
            (0.5 * total(x, src, dst) * degree(x, dst).rsqrt().unsqueeze(1)) @ w[r]
        )
    ),
    "with the nodes themselves": loop(lambda x, w, src, dst, r: (total(x, src, dst) + x) @ w[r]),
    "counted from the end": loop(
        lambda x, w, src, dst, r: (
            torch.zeros_like(x).index_put((dst - N,), x[src - N], accumulate=True) @ w[r]
        )
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_chain(name: str) -> None:
    program = PROGRAMS[name]
    run, graphs = compiled(program, fullgraph=True)
    arguments = leaf(N, F), leaf(R, F, 6), graph_of(), KINDS
    for _ in range(2):
        agrees(program, run, arguments, rtol=1e-4, atol=1e-4)
    # In another order nothing but the forward sum is put together: gradients of products go by the
    # order of the weights.
    forward, backward = counts(graphs)
    assert forward == 1 and backward in ((1,) if name != "sums, in another order" else (1, R)), str(
        insum.fusion.report()
    )
    products = [n for g in graphs for n in g.graph.nodes if n.target is torch.ops.aten.mm.default]
    assert len(products) == 3 if backward == 1 and "themselves" not in name else len(products) >= 3


@pytest.mark.parametrize("name", PROGRAMS)
def test_through_inductor_and_without_gradients(name: str) -> None:
    program = PROGRAMS[name]
    run = torch.compile(program, backend="insum", fullgraph=True, options={"insum.fuse": "always"})
    with torch.no_grad():
        arguments = torch.randn(N, F), torch.randn(R, F, 6), graph_of(), KINDS
        assert_close(run(*arguments), program(*arguments), rtol=1e-4, atol=1e-4)
    agrees(program, run, (leaf(N, F), leaf(R, F, 6), graph_of(), KINDS), rtol=1e-4, atol=1e-4)


def test_layers_after_each_other() -> None:
    """The second reads a sum that was put together."""
    layer = PROGRAMS["means"]
    program = lambda x, w, edges, kinds: layer(layer(x, w, edges, kinds), w, edges, kinds)
    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, (leaf(N, F), leaf(R, F, F), graph_of(), KINDS), rtol=1e-3, atol=1e-3)
    assert counts(graphs) == [2, 2]


def some(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
    """Not all slices of the weights."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    for r in (0, 2):
        out = out + total(x, *edges[:, kinds == r]) @ w[r]
    return out


def twice(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
    """A result that somebody else reads too."""
    products = [total(x, *edges[:, kinds == r]) @ w[r] for r in range(R)]
    return products[0] + products[1] + products[2] + products[1].relu()


def different(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
    """Steps that are not alike."""
    steps = [
        total(x, *edges[:, kinds == 0]),
        total(x, *edges[:, kinds == 1].flip(0)) * 2,
        total(x.relu(), *edges[:, kinds == 2]),
        x,
    ]
    return sum(
        (step @ w[r] for r, step in enumerate(steps)), start=x.new_zeros(x.shape[0], w.shape[2])
    )


def wider(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
    """Sums in which a term has another dtype."""
    return sum(
        (total(x, *edges[:, kinds == r]) @ w[r] for r in range(R)),
        start=torch.zeros(N, 6, dtype=torch.float64),
    )


def scaled_sum(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
    """Sums that are no plain sums, of numbers too."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    for r in range(R):
        out = torch.add(out, total(x, *edges[:, kinds == r]) @ w[r], alpha=2)
    return out + kinds.shape[0] + x.shape[0]


@pytest.mark.parametrize("program", [some, twice, different, wider, scaled_sum])
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_no_loop_over_relations(
    program: Callable[..., Tensor], dynamic: bool | None
) -> None:
    run, _ = compiled(program, fullgraph=True, dynamic=dynamic)
    relations = R + (program is different)
    agrees(
        program, run, (leaf(N, F), leaf(relations, F, 6), graph_of(), KINDS), rtol=1e-4, atol=1e-4
    )


def test_results_that_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "MOST_ELEMENTS", R * N * F - 1)
    run, graphs = compiled(PROGRAMS["means"], fullgraph=True)
    agrees(
        PROGRAMS["means"], run, (leaf(N, F), leaf(R, F, 6), graph_of(), KINDS), rtol=1e-4, atol=1e-4
    )
    assert counts(graphs) == [R, R]


def test_edges_that_are_passed_are_left_to_other_ways() -> None:
    """A list of index tensors is no function of a few of them."""

    def program(x: Tensor, w: Tensor, *edges: Tensor) -> Tensor:
        return sum((total(x, *one) @ w[r] for r, one in enumerate(edges)), start=x.new_zeros(N, 6))

    run, graphs = compiled(program, fullgraph=True)
    agrees(
        program,
        run,
        (leaf(N, F), leaf(R, F, 6), *(graph_of(N, 9 + r, seed=r) for r in range(R))),
        rtol=1e-4,
        atol=1e-4,
    )
    assert counts(graphs) == [R, R]


@pytest.mark.parametrize(("row", "value"), [(0, N), (0, -N - 1), (1, N), (1, -N - 1)])
def test_indices_out_of_range_are_still_errors(row: int, value: int) -> None:
    """A row beyond the last of one relation must not become one of the next."""
    run, _ = compiled(PROGRAMS["sums"], fullgraph=True)
    edges = graph_of()
    edges[row, 3] = value
    with pytest.raises(insum.IndexRangeError):
        run(torch.randn(N, F), torch.randn(R, F, 6), edges, KINDS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    run, graphs = compiled(PROGRAMS["means"], fullgraph=True)
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 5e-2, "atol": 5e-2}
    )
    agrees(
        PROGRAMS["means"],
        run,
        (leaf(N, F, dtype=dtype), leaf(R, F, 6, dtype=dtype), graph_of(), KINDS),
        **tolerance,
    )
    assert counts(graphs) == [1, 1]


def test_many_relations() -> None:
    """Of two digits, too."""
    relations = 11
    kinds = torch.randint(0, relations, (200,))
    program = lambda x, w, edges, kinds: sum(
        (
            (total(x, *edges[:, kinds == r]) / degree(x, edges[1][kinds == r])[:, None]) @ w[r]
            for r in range(relations)
        ),
        start=x.new_zeros(N, 6),
    )
    run, graphs = compiled(program, fullgraph=True)
    agrees(
        program,
        run,
        (leaf(N, F), leaf(relations, F, 6), graph_of(N, 200), kinds),
        rtol=1e-4,
        atol=1e-4,
    )
    assert counts(graphs) == [1, 1]
