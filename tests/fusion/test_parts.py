"""What is computed at edges and taken apart, and gradients that are put side by side: nothing of it
is written, and values are those of the program as it stands.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import insum.fusion

from .programs import E, F, N, agrees, compiled, graph_of, leaf

ENDS = graph_of()


def added(values: Tensor, ends: Tensor) -> Tensor:
    return values.new_zeros(N, *values.shape[1:]).index_add(0, ends[1], values)


def gated(x: Tensor, ends: Tensor) -> Tensor:
    value, gate = (x[ends[0]] * x[ends[1]]).chunk(2, -1)
    return added(value * gate.sigmoid(), ends)


def uneven(x: Tensor, ends: Tensor) -> Tensor:
    a, b, c = (x.sin()[ends[0]] + x[ends[1]]).split([1, 4, 3], 1)
    return torch.cat([added(a * b, ends), added(c, ends)], 1)


def of_three_dimensions(x: Tensor, ends: Tensor) -> Tensor:
    a, b = (x.view(N, 2, 4)[ends[0]] * x[ends[1], None, :4]).chunk(2, 1)
    return added(a * b.exp(), ends)


def broadcast(x: Tensor, ends: Tensor) -> Tensor:
    a, b = (x[ends[0]] * x[ends[1], :1]).split(4, -1)
    return added(a - b, ends)


def selected(x: Tensor, ends: Tensor) -> Tensor:
    a, b = (2 * x.index_select(0, ends[0])).chunk(2, -1)
    return added(a * b, ends)


def vectors(x: Tensor, ends: Tensor) -> Tensor:
    s, a = (torch.cat([x, x.cos()], 1)[ends[0]] * (1 + x[ends[1]].repeat(1, 2))).chunk(2, -1)
    turned = x[ends[0], None] * a[:, None]
    return torch.cat([added(s, ends)[:, None], added(turned, ends)], 1)


def sliced(x: Tensor, ends: Tensor) -> Tensor:
    whole = x[ends[0]] * x[ends[1]]
    return added(whole[:, :3] * whole[:, 3:6] - whole[:, -3:].sin(), ends)


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a gate": gated,
    "parts of unequal lengths": uneven,
    "another dimension": of_three_dimensions,
    "what is broadcast has no parts": broadcast,
    "rows that are selected": selected,
    "slices": sliced,
    "parts that begin at one place": lambda x, ends: unequal(x, ends),
    "an empty part": lambda x, ends: (
        added((p := (x[ends[0]] * x[ends[1]]).split([0, 4, 4], 1))[1] * p[2], ends)
        + p[0].sigmoid().sum()
    ),
    "a gated linear unit": lambda x, ends: added(
        torch.nn.functional.glu(x[ends[0]] * x[ends[1]], -1), ends
    ),
    "scalars and vectors": vectors,
    "a part that nobody reads": lambda x, ends: added(
        (x[ends[0]] * x[ends[1]]).chunk(4, -1)[2], ends
    ),
}


def unequal(x: Tensor, ends: Tensor) -> Tensor:
    """Parts that begin at one place, and are not equally long."""
    whole = x[ends[0]] * x[ends[1]]
    first, second = whole.chunk(2, -1)
    return (
        added(whole[:, :1] * whole[:, :4], ends)
        + added(first * second, ends)
        + whole[:, 2:4].sum()
        + whole[:, 2:].square().sum()
    )


def needed(x: Tensor, ends: Tensor) -> Tensor:
    """The whole is read as well."""
    whole = x[ends[0]] * x[ends[1]]
    a, b = whole.chunk(2, -1)
    return added(a * b, ends) + whole.sum()


LEFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the whole is needed": needed,
    "a part is returned": lambda x, ends: (x[ends[0]] * x[ends[1]]).chunk(2, -1)[1],
    "a view of a part is returned": lambda x, ends: (
        (x[ends[0]] * x[ends[1]]).chunk(2, -1)[1].unsqueeze(1)
    ),
    "memory is read by places": lambda x, ends: (
        added((p := (x[ends[0]] * x[ends[1]]).chunk(2, -1))[0], ends).sum()
        + p[1].as_strided((E, 2), (4, 1), 2).sum(0)
    ),
    "parts of rows": lambda x, ends: added(
        torch.cat([*(x[ends[0]] * x[ends[1]]).split(E // 2, 0)][::-1], 0), ends
    ),
    "of what is there": lambda x, ends: added(x.chunk(2, -1)[1][ends[0]], ends),
}


@pytest.mark.parametrize("name", TAKEN)
def test_parts_are_computed_each_for_itself(name: str) -> None:
    run, graphs = compiled(TAKEN[name])
    agrees(TAKEN[name], run, (leaf(N, F), ENDS), rtol=1e-4, atol=1e-5)
    report = insum.fusion.report()
    assert not report.failed and any("taken apart" in one.what for one in report.moved), report
    forward = [n for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert not any("split" in str(n.target) or "scatter" in str(n.target) for n in forward)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_needed_as_a_whole_is_left(name: str) -> None:
    run, _ = compiled(LEFT[name])
    agrees(LEFT[name], run, (leaf(N, F), ENDS), rtol=1e-4, atol=1e-5)
    report = insum.fusion.report()
    assert not report.failed and not any("taken apart" in one.what for one in report.moved)


def test_gradients_side_by_side_are_added_up_apart() -> None:
    """The gradient of what was taken apart: two statements, and nothing of all edges between."""
    run, graphs = compiled(gated)
    agrees(gated, run, (leaf(N, F), ENDS), rtol=1e-4, atol=1e-5)
    assert any("side by side" in one.what for one in insum.fusion.report().moved)
    backward = [n for n in graphs[1].graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    written = [n for n in backward if n.op == "call_function" and n.meta["val"].shape == (E, F)]
    assert not written


def test_weights_that_edges_are_multiplied_by() -> None:
    """Sums over edges of a product with what is put together are put together as well."""

    def program(x: Tensor, w: Tensor, basis: Tensor, ends: Tensor) -> Tensor:
        a, b = (x[ends[0]] * (basis @ w)).chunk(2, -1)
        return added(a * b, ends)

    run, _ = compiled(program)
    agrees(program, run, (leaf(N, F), leaf(5, F), torch.randn(E, 5), ENDS), rtol=1e-4, atol=1e-5)
    report = insum.fusion.report()
    assert any("side by side" in one.what for one in report.moved) and not report.failed


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    run, _ = compiled(gated)
    close = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    agrees(gated, run, (leaf(N, F, dtype=dtype), ENDS), **close)
    assert insum.fusion.report().moved and not insum.fusion.report().failed


def test_edges_that_change_in_number() -> None:
    run, _ = compiled(gated)
    for edges in (E, 2 * E, 7):
        agrees(gated, run, (leaf(N, F), graph_of(N, edges)), rtol=1e-4, atol=1e-5)
    assert insum.fusion.report().moved and not insum.fusion.report().failed


def test_an_input_that_is_written_to() -> None:
    def program(x: Tensor, ends: Tensor) -> Tensor:
        found = gated(x, ends)
        x.mul_(2)
        return found

    x = torch.randn(N, F)
    run, _ = compiled(program)
    want = program(x.clone(), ENDS)
    torch.testing.assert_close(run(x.clone(), ENDS), want)
    assert not insum.fusion.report().failed


def test_sums_into_something_wider() -> None:
    def program(x: Tensor, ends: Tensor, at: Tensor) -> Tensor:
        rows = torch.cat([x[ends[0]] * x[ends[1]], x[ends[0]]], 1)
        return x.new_zeros(5, 20).scatter_add(0, at, rows)

    run, _ = compiled(program)
    agrees(program, run, (leaf(N, F), ENDS, torch.randint(0, 5, (E, 2 * F))))
    assert not insum.fusion.report().failed


def test_a_view_of_what_lies_otherwise() -> None:
    def program(x: Tensor, ends: Tensor) -> Tensor:
        part = (x[ends[0]] * x[ends[1]])[:, :, :2]
        return added(part.permute(0, 2, 1).reshape(E, F), ends)

    run, _ = compiled(program)
    turned = torch.randn(N, 3, 4).permute(0, 2, 1).requires_grad_()
    agrees(program, run, (turned, ENDS))
    assert not insum.fusion.report().failed


def test_a_part_of_merged_dimensions() -> None:
    """A variable over a part is none over all of what a view merges."""

    def program(x: Tensor, ends: Tensor, w: Tensor) -> Tensor:
        a, b, c = x[ends[0]].sin().chunk(3, 1)
        whole = torch.cat([b, a.exp(), c], 1)
        rows = added(whole.flatten(1).reshape(whole.shape), ends)
        return torch.cat([rows.flatten(), (whole.flatten(1).t() @ w.flatten(1)).flatten()])

    run, _ = compiled(program)
    agrees(program, run, (leaf(N, 3, F), ENDS, leaf(E, 3, F)), rtol=1e-4, atol=1e-5)
    assert not insum.fusion.report().failed
