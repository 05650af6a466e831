"""A pass that fails, or gives something else, leaves the graph as it was, says so once, and does
not fail the program; and what is not to be fused is not touched at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

import insum.fusion
from insum import bounded
from insum.fusion import rewrite, trial

from .programs import E, F, N, agrees, compiled, counts, graph_of, leaf

aten = torch.ops.aten
SRC, DST = graph_of()
SAID = "a pass of fusion failed"


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    bounded.say_again()


def aggregate(x: Tensor, w: Tensor) -> Tensor:
    return torch.zeros(N, F).index_add(0, DST, x[SRC] * w[:, None]).relu()


def fails(graph: Graph, *rest: Any, **more: Any) -> Any:
    """Leaves a graph half done."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    with graph.inserting_before(nodes[1]):
        nodes[1].replace_all_uses_with(graph.call_function(aten.neg.default, (nodes[0],)))
    graph.erase_node(nodes[1])
    raise IndexError("tuple index out of range")


def other_values(change: Callable[[Tensor], Any], *arguments: Any) -> Callable[..., Any]:
    """A pass after which the last node gives something else than is noted at it."""

    def work(graph: Graph, *rest: Any, **more: Any) -> Any:
        *_, last, output = graph.nodes
        assert isinstance(last, Node)
        with graph.inserting_before(output):
            new = graph.call_function(change, (last, *arguments))  # type: ignore[arg-type]
            new.meta["val"] = last.meta["val"]
        output.replace_input_with(last, new)
        return []

    return work


def other_reads(graph: Graph, *rest: Any, **more: Any) -> Any:
    """A pass after which the last node reads something of another shape."""
    *_, last, _ = graph.nodes
    was = last.args[0].meta["val"]  # type: ignore[union-attr]
    other = next(n for n in graph.nodes if n.meta["val"].shape != was.shape)
    last.args = (other, *last.args[1:])
    return []


def restrided(graph: Graph, *rest: Any, **more: Any) -> Any:
    """A pass after which a matrix lies otherwise in memory."""
    node = next(n for n in reversed(graph.nodes) if _is_matrix(n.meta.get("val")))
    users = list(node.users)
    rows, columns = node.meta["val"].shape
    with graph.inserting_after(node):
        new = graph.call_function(aten.as_strided.default, (node, [rows, columns], [1, rows]))
        new.meta["val"] = node.meta["val"]
    for user in users:
        user.replace_input_with(node, new)
    return []


def _is_matrix(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and min(value.shape) > 1


BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "an error": (fails, "IndexError: tuple index out of range"),
    "a shape": (other_values(aten.unsqueeze.default, 0), "Changed: unsqueeze_default"),
    "a dtype": (other_values(torch.ops.prims.convert_element_type.default, torch.half), "float16"),
    "strides": (other_values(aten.as_strided.default, [N, F], [1, N]), "Changed: as_strided"),
    "what is read": (other_reads, "instead of"),
    "a value that is not": (other_values(lambda x: None), "NoneType"),
}
STAGES = {
    "search": "_worth_it",
    "relations": "_join_relations",
    "series": "_join_series",
    "chains": "_replace_each",
    "sums in place": "_add_in_place",
    "hoist": "hoist",
    "saved values": "save",
}


@pytest.mark.parametrize("how", BROKEN)
def test_the_program_does_without_a_pass_that_fails(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work, words), stage = BROKEN[how], "chains"
    monkeypatch.setattr(rewrite, STAGES[stage], work)
    run, _ = compiled(aggregate)
    x, w = torch.randn(N, F), torch.randn(E)
    with pytest.warns(UserWarning, match=SAID) as said:
        torch.testing.assert_close(run(x, w), aggregate(x, w))
    assert sum(SAID in str(one.message) for one in said) == 1
    failed = insum.fusion.report().failed
    assert {one.stage for one in failed} == {stage} and words in failed[0].why
    assert f"failed {stage}: " in str(insum.fusion.report())
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        torch._dynamo.reset()
        torch.testing.assert_close(run(x, w), aggregate(x, w))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["an error", "a shape", "a dtype", "strides"])
def test_gradients_without_a_pass_that_fails(
    stage: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, STAGES[stage], BROKEN[how][0] if how != "strides" else restrided)
    run, graphs = compiled(aggregate)
    with pytest.warns(UserWarning, match=SAID):
        agrees(aggregate, run, (leaf(N, F), leaf(E)))
    assert counts(graphs) == ([0, 0] if stage in ("search", "chains") else [1, 2])
    assert {one.stage for one in insum.fusion.report().failed} == {stage}


def mixture(x: Tensor, w: Tensor) -> Tensor:
    """Dense products alone."""
    return sum(((x * x) @ w[r] for r in range(1, w.shape[0])), (x * x) @ w[0])


def sizes(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w[0] + x @ w[1]) * x.shape[0]


def beside_a_chain(x: Tensor, w: Tensor) -> Tensor:
    """Dense products beside a sum over edges."""
    return torch.zeros(N, F).index_add(0, DST, x[SRC]) + mixture(x, w)


def of_offsets(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(N, F)
    for r, (i, o) in enumerate((graph_of(seed=1), graph_of(seed=2))):
        out = out.index_add(0, o, x[i] @ w[r])
    return out


def test_dense_products_are_left_alone() -> None:
    arguments = leaf(N, F), leaf(2, F, F)
    for program in (mixture, beside_a_chain):
        torch._dynamo.reset()
        run, graphs = compiled(program)
        agrees(program, run, arguments, rtol=1e-4, atol=1e-4)
        products = [n for n in graphs[0].graph.nodes if n.target is aten.mm.default]
        assert len(products) == 2


@pytest.mark.parametrize("program", [aggregate, mixture, sizes, beside_a_chain, of_offsets])
@pytest.mark.parametrize("wish", ["never", "auto"])
def test_nothing_is_rewritten_where_nothing_is_to_be_fused(
    program: Callable[..., Tensor], wish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU ``auto`` fuses nothing."""
    seen: list[tuple[str, str]] = []

    def fuse(graph: Graph, *rest: Any, **more: Any) -> Any:
        before = str(graph)
        found = rewrite.fuse(graph, *rest, **more)
        seen.append((before, str(graph)))
        return found

    monkeypatch.setattr("insum.fusion.entry.fuse", fuse)
    run = torch.compile(
        program, backend="insum", options={"insum.fuse": wish, "insum.rest": "eager"}
    )
    arguments = leaf(N, F), leaf(E) if program is aggregate else leaf(2, F, F)
    agrees(program, run, arguments, rtol=1e-4, atol=1e-4)
    assert seen and all(before == after for before, after in seen)
    assert not insum.fusion.report().fused


def test_a_graph_is_put_back_node_for_node() -> None:
    """Also one that a pass has left in disorder."""
    graph = Graph()
    x = graph.placeholder("x")
    a = graph.call_function(aten.neg.default, (x,))
    b = graph.call_function(aten.add.Tensor, (a, x), {"alpha": 2})
    graph.output((b, [a, None]))
    for node in (x, a, b):
        node.meta["val"] = torch.ones(2)

    def work() -> None:
        b.args = (b, b)  # which reads itself
        a.meta["val"] = None
        graph.call_function(aten.neg.default, (b,))

    with pytest.warns(UserWarning, match=SAID):
        assert trial.PassTrial(graph).run("disorder", work, None) is None
    assert [str(n.target) for n in graph.nodes] == [
        "x",
        "aten.neg.default",
        "aten.add.Tensor",
        "output",
    ]
    _, neg, add, output = graph.nodes
    assert add.args == (neg, next(iter(graph.nodes))) and add.kwargs == {"alpha": 2}
    assert output.args[0] == (add, [neg, None])
    assert all(torch.equal(n.meta["val"], torch.ones(2)) for n in (neg, add))
    graph.lint()
