"""Functions of integer tensors alone: masks, degrees, normalisations. Computed once while the
tensors stay the same, and nobody waits for them.
"""

from __future__ import annotations

import gc
import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.testing import assert_close

import insum.fusion
from insum import memory
from insum.compat import sizes
from insum.fusion import computed, hoist
from insum.fusion.origin import evaluate, origin_of, waits

from .programs import E, F, N, agrees, compiled, counts, graph_of, leaf

aten = torch.ops.aten
KINDS = torch.randint(0, 3, (E,), generator=torch.Generator().manual_seed(1))
MASKED = "aten.eq.Scalar(s1,0)~aten.index.Tensor(s0,[None,v0])"


@pytest.fixture(autouse=True)
def everything_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> Any:
    memory.forget()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def relations(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
    """A mean over the edges of each kind, and a product."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    for k in range(w.shape[0]):
        src, dst = edges[:, kinds == k]
        total = x.new_zeros(x.shape).index_add(0, dst, x[src])
        degree = x.new_zeros(x.shape[0]).index_add(0, dst, x.new_ones(dst.shape[0])).clamp(min=1)
        out = out + (total / degree[:, None]) @ w[k]
    return out


def normalised(x: Tensor, edges: Tensor) -> Tensor:
    """Self-loops are taken out and put in again, and edges weighted by degrees."""
    edges = torch.cat([edges[:, edges[0] != edges[1]], torch.arange(x.shape[0]).expand(2, -1)], 1)
    src, dst = edges
    degree = x.new_zeros(x.shape[0]).index_add(0, dst, x.new_ones(edges.shape[1]))
    weight = degree[src].rsqrt() * degree[dst].rsqrt()
    return x.new_zeros(x.shape).index_add(0, dst, x[src] * weight[:, None])


def nodes(graphs: list[GraphModule]) -> list[Node]:
    return [n for g in graphs for n in g.graph.nodes if n.op == "call_function"]


def waiting(graphs: list[GraphModule]) -> list[str]:
    """What waits for the device, or asks for a size that it would have to wait for."""
    return [
        str(n)
        for n in nodes(graphs)
        if waits(n)
        or n.target is aten._assert_scalar.default
        or isinstance(n.meta.get("val"), torch.SymInt)
    ]


# --- whole programs -------------------------------------------------------------------------------


def test_relations_do_not_wait() -> None:
    run, graphs = compiled(relations, fullgraph=True)
    arguments = leaf(N, F), leaf(3, F, 4), graph_of(), KINDS
    for _ in range(3):
        agrees(relations, run, arguments, rtol=1e-4, atol=1e-5)
    assert counts(graphs) == [1, 1] and not waiting(graphs), str(insum.fusion.report())
    (once,) = insum.fusion.report().once
    assert str(once).startswith("once   ") and str(once).endswith("stay the same")
    assert all(
        found.notes[0].startswith("3 chains of one form, of which each has its own rows")
        for found in insum.fusion.report().fused
    )


def test_relations_one_by_one_do_not_wait() -> None:
    """With a number of nodes that is not known they are not put together."""
    run, graphs = compiled(relations, fullgraph=True, dynamic=True)
    arguments = leaf(N, F), leaf(3, F, 4), graph_of(), KINDS
    for _ in range(3):
        agrees(relations, run, arguments, rtol=1e-4, atol=1e-5)
    assert counts(graphs) == [3, 3] and not [n for n in nodes(graphs) if waits(n)], str(
        insum.fusion.report()
    )
    (once,) = insum.fusion.report().once
    assert len(once.nodes) == 3 and all(
        "is computed once, while" in found.notes[0] for found in insum.fusion.report().fused
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_normalisation_is_part_of_the_statement(dynamic: bool | None) -> None:
    run, graphs = compiled(normalised, fullgraph=True, dynamic=dynamic)
    for _ in range(3):
        agrees(normalised, run, (leaf(N, F), graph_of()), rtol=1e-4, atol=1e-5)
    assert counts(graphs) == [1, 1] and not [n for n in nodes(graphs) if waits(n)], str(
        insum.fusion.report()
    )
    assert not insum.fusion.report().once, "nobody else reads it"


@pytest.mark.parametrize("dynamic", [None, True])
def test_through_inductor(dynamic: bool | None) -> None:
    """Which must not miss the symbols that are gone."""
    for program, arguments in (
        (relations, (leaf(N, F), leaf(3, F, 4), graph_of(), KINDS)),
        (normalised, (leaf(N, F), graph_of())),
    ):
        run = torch.compile(
            program,
            backend="insum",
            fullgraph=True,
            dynamic=dynamic,
            options={"insum.fuse": "always"},
        )
        for _ in range(3):
            agrees(program, run, arguments, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_edges_that_change() -> None:
    """Written to in place, exchanged by .data, or others altogether: nothing old is used."""
    run, _ = compiled(relations, fullgraph=True, dynamic=True)
    x, w, edges, kinds = leaf(N, F), leaf(3, F, 4), graph_of(), KINDS.clone()
    changes = [
        lambda: None,
        lambda: edges[:, :9].random_(0, N),
        lambda: kinds[:9].random_(0, 3),
        lambda: setattr(edges, "data", graph_of(N, E, 5)),
        lambda: setattr(kinds, "data", KINDS.flip(0).clone()),
    ]
    for change in (*changes, *changes):
        change()
        agrees(relations, run, (x, w, edges, kinds), rtol=1e-4, atol=1e-5)
    for edge_count in (E, 12, 50):
        agrees(
            relations,
            run,
            (x, w, graph_of(N, edge_count), torch.randint(0, 3, (edge_count,))),
            rtol=1e-4,
            atol=1e-5,
        )


def test_relations_without_edges() -> None:
    run, _ = compiled(relations, fullgraph=True)
    for kinds in (torch.zeros_like(KINDS), torch.full_like(KINDS, 7)):
        agrees(relations, run, (leaf(N, F), leaf(3, F, 4), graph_of(), kinds), rtol=1e-4, atol=1e-5)


def test_results_may_be_written_to() -> None:
    """What is remembered is copied for whoever else reads it."""

    def program(x: Tensor, edges: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        src, dst = edges[:, kinds == 1]
        degree = x.new_zeros(N).index_add(0, dst, x.new_ones(dst.shape[0]))
        return x.new_zeros(N, F).index_add(0, dst, x[src]), degree

    run, graphs = compiled(program, fullgraph=True)
    x, edges = torch.randn(N, F), graph_of()
    for _ in range(3):
        got, want = run(x, edges, KINDS), program(x, edges, KINDS)
        assert_close(got, want)
        for one in got:
            one.fill_(torch.nan)
    assert not waiting(graphs)


def test_a_check_of_the_program_stays() -> None:
    """What torch knows of a mask is certain; what somebody asks for is not."""

    def program(x: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        some = edges[:, kinds == 1]
        torch._check(some.shape[1] <= 12)
        return x.new_zeros(N, F).index_add(0, some[1], x[some[0]])

    run, graphs = compiled(program, fullgraph=True)
    few = torch.zeros(E, dtype=torch.int64)
    few[:5] = 1
    assert_close(run(torch.ones(N, F), graph_of(), few), program(torch.ones(N, F), graph_of(), few))
    assert waiting(graphs)
    with pytest.raises(RuntimeError, match="<= 12"):
        run(torch.ones(N, F), graph_of(), torch.ones_like(few))


def test_a_mask_that_others_read_too() -> None:
    """Numbers of the masked edges, which are no function of integers: their size needs a value."""

    def program(x: Tensor, v: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        mask = kinds == 1
        some = edges[:, mask]
        return x.new_zeros(N, F).index_add(0, some[1], x[some[0]] * v[mask][:, None])

    def twice(x: Tensor, v: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        some = edges[:, kinds == 1]
        return x.new_zeros(N, F).index_add(0, some[1], x[some[0]] * v[kinds == 1][:, None])

    # Not ``twice`` with Inductor, which fails on it without the pass too.
    for function, options in (
        (program, {}),
        (program, {"insum.rest": "eager"}),
        (twice, {"insum.rest": "eager"}),
    ):
        torch._dynamo.reset()
        run = torch.compile(
            function, backend="insum", fullgraph=True, options={"insum.fuse": "always", **options}
        )
        for _ in range(3):
            agrees(function, run, (leaf(N, F), leaf(E), graph_of(), KINDS), rtol=1e-4, atol=1e-5)


def test_sums_are_copied_when_they_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A degree without a mask: adding up a few entries again takes no longer than the copy."""

    def counted(x: Tensor, edges: Tensor) -> Tensor:
        degree = x.new_zeros(N).index_add(0, edges[1], x.new_ones(edges.shape[1])).clamp(min=1)
        return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]]) + degree[:, None]

    for worth, expected in ((hoist.WORTH_A_COPY, 0), (E, 1)):
        monkeypatch.setattr(hoist, "WORTH_A_COPY", worth)
        torch._dynamo.reset()
        insum.fusion.clear()
        run, _ = compiled(counted, fullgraph=True)
        for _ in range(2):
            agrees(counted, run, (leaf(N, F), graph_of()), rtol=1e-4, atol=1e-5)
        assert len(insum.fusion.report().once) == expected


def test_nothing_is_remembered_for_graphs_that_are_replayed() -> None:
    graphs: list[Graph] = []
    keep = lambda module, inputs: (graphs.append(module.graph), module.forward)[1]
    torch.compile(normalised, backend="insum", options={"insum.fuse": "never", "insum.rest": keep})(
        torch.randn(N, F), graph_of()
    )
    report = insum.fusion.fuse(graphs[0], "always", captured=True)
    assert report.fused and not any(
        "once" in note for found in report.fused for note in found.notes
    )
    assert any(waits(n) for n in graphs[0].nodes if n.op == "call_function")


# --- what is remembered ---------------------------------------------------------------------------


def test_computed_while_the_tensors_live_unchanged() -> None:
    edges, kinds = graph_of(), KINDS.clone()
    first = computed.computed(MASKED, (), (edges, kinds))
    assert (
        torch.equal(first, edges[:, kinds == 0])
        and computed.computed(MASKED, (), (edges, kinds)) is first
    )
    kinds[0] = 1 - kinds[0].clamp(max=1)
    second = computed.computed(MASKED, (), (edges, kinds))
    assert second is not first and torch.equal(second, edges[:, kinds == 0])
    del edges, first, second
    gc.collect()
    assert not memory.report().nbytes


def test_programs_share_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    edges, runs = graph_of(), []
    original = computed._remembered
    monkeypatch.setattr(
        computed,
        "_remembered",
        lambda name, *given: original(
            name, *given[:-1], lambda: (runs.append(name), given[-1]())[1]
        ),
    )
    rows = computed.computed(f"{MASKED}~aten.select.int(v1,0,1)", (), (edges, KINDS))
    assert_close(rows, computed.computed(MASKED, (), (edges, KINDS))[1])
    assert len(runs) == 3, "two programs, one mask"
    counted = (
        "aten.eq.Scalar(s0,0)~aten.full.default([n0],1,device=device)"
        "~aten.index.Tensor(s1,[None,v0])~aten.select.int(v2,0,0)"
    )
    assert_close(computed.computed(counted, (3,), (KINDS, edges)), edges[0, KINDS == 0])
    assert len(runs) == 4, "the same mask, of tensors in another order"


def test_a_view_keeps_nothing_alive() -> None:
    edges = graph_of()
    row = computed.computed("aten.select.int(s0,0,1)", (), (edges,))
    assert (
        torch.equal(row, edges[1])
        and row.untyped_storage().data_ptr() != edges.untyped_storage().data_ptr()
    )


def test_tensors_without_a_version_are_looked_at() -> None:
    with torch.inference_mode():
        edges = graph_of().clone()
        first = computed.computed(MASKED, (), (edges, KINDS))
        assert torch.equal(first, edges[:, KINDS == 0])
        edges.copy_(edges.flip(1))
        again = computed.computed(MASKED, (), (edges, KINDS))
        assert torch.equal(again, edges[:, KINDS == 0])


def test_the_op_fits_its_schema() -> None:
    arguments = (
        f"{MASKED}~aten.full.default([n0],0,dtype=torch.float32,device=device)",
        [graph_of(), KINDS],
        "float32",
        [N],
        [N],
    )
    assert_close(torch.ops.insum.computed(*arguments), torch.zeros(N))
    torch.library.opcheck(
        torch.ops.insum.computed.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


# --- programs -------------------------------------------------------------------------------------


def traced(program: Any, *arguments: Tensor) -> Graph:
    graphs: list[Graph] = []
    keep = lambda module, inputs: (graphs.append(module.graph), module.forward)[1]
    torch.compile(program, backend="insum", options={"insum.fuse": "never", "insum.rest": keep})(
        *arguments
    )
    return graphs[0]


def test_programs_say_what_graphs_do() -> None:
    """Every tensor of a graph that has an origin, computed by its program and by the graph."""

    def program(x: Tensor, edges: Tensor, kinds: Tensor) -> tuple[Tensor, ...]:
        some = edges[:, (kinds != 1) & (edges[0] <= edges[1])]
        loops = torch.cat([some, torch.arange(1, N - 1, device=x.device).repeat(2, 1).flip(1)], 1)
        count = torch.zeros(N, dtype=torch.int64).index_add(0, loops[0], torch.ones_like(loops[0]))
        degree = torch.zeros(N).scatter_add(0, loops[1], torch.full((loops.shape[1],), 0.5))
        scale = torch.where(degree > 0, degree.pow(-0.5), -1.0).clamp(-1e9, 1e9)
        return (
            x[loops[0]],
            count,
            scale,
            (scale[loops[1]] / 3).unsqueeze(1),
            torch.stack([count, -count]),
            kinds.nonzero(),
        )

    edges = graph_of()
    graph = traced(program, torch.randn(N, F), edges, KINDS)
    outputs = next(n for n in graph.nodes if n.op == "output").args[0]
    expected = program(torch.randn(N, F), edges, KINDS)
    told = 0
    for node, want in zip(outputs, expected, strict=True):
        origin = origin_of(node, sums=True)
        if origin is None:
            continue
        given = {"primals_2": edges, "arg1_1": edges, "arg2_1": KINDS}
        sources = [
            given.get(s.name, KINDS if s.meta["val"].dim() == 1 else edges) for s in origin.sources
        ]
        assert (
            "'" not in origin.program and '"' not in origin.program and "\n" not in origin.program
        )
        assert_close(
            evaluate(origin.program, sources, [s.meta["val"].node.hint for s in origin.sizes]), want
        )
        told += 1
    assert told == 5, "all but what is read of numbers"


def test_what_has_no_program() -> None:
    def program(x: Tensor, edges: Tensor) -> tuple[Tensor, ...]:
        return (
            x[edges[0]].argmax(1),
            edges.argsort(stable=False),
            edges + x.shape[0],
            torch.rand(3) + edges[0, 0],
        )

    graph = traced(program, torch.randn(N, F), graph_of())
    outputs = next(n for n in graph.nodes if n.op == "output").args[0]
    assert [origin_of(node, sums=True) is None for node in outputs] == [True, True, False, True]


def test_sums_of_numbers_are_no_index() -> None:
    """Their last bits may be others when they are computed again."""

    def program(edges: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.zeros(N).index_add(0, edges[0], torch.full((E,), 0.1))
        return ones, torch.zeros(N, dtype=torch.int64).index_add(0, edges[0], edges[1])

    outputs = next(n for n in traced(program, graph_of()).nodes if n.op == "output").args[0]
    assert origin_of(outputs[0]) is None and origin_of(outputs[0], sums=True) is not None
    assert origin_of(outputs[1]) is not None


def test_long_programs_and_ones_that_use_results_twice() -> None:
    """Neither recursion nor expressions that double with every line."""

    def program(edges: Tensor) -> Tensor:
        index = edges[:, edges[0] > 2]
        for _ in range(400):
            index = index + index - 1
        return index

    graph, edges = Graph(), graph_of()  # tracing the program takes torch a hundred times as long
    given = graph.placeholder("edges")
    given.meta["val"] = edges

    def called(function: Any, *arguments: Any) -> Node:
        node = graph.call_function(function, arguments)
        node.meta["val"] = function(*map_arg(arguments, lambda one: one.meta["val"]))
        return node

    mask = called(aten.gt.Scalar, called(aten.select.int, given, 0, 0), 2)
    output = called(aten.index.Tensor, given, [None, mask])
    for _ in range(400):
        output = called(aten.sub.Tensor, called(aten.add.Tensor, output, output), 1)
    origin = origin_of(output)
    assert origin is not None and origin.costly and origin.program.count("~") >= 800
    assert torch.equal(evaluate(origin.program, [edges], []), program(edges))


def test_programs_call_nothing_else() -> None:
    for bad in (
        "aten.rand.default([3])",
        "operator.setitem(s0,0,1)",
        "print(s0)",
        "[s0]",
        "aten.add.Tensor(s0,1 if s0 else 2)",
    ):
        with pytest.raises((KeyError, ValueError)):
            evaluate(bad, [graph_of()], [])


def test_certain_assertions() -> None:
    graph = Graph()
    edges, mask = graph.placeholder("edges"), graph.placeholder("mask")
    edges.meta["val"], mask.meta["val"] = graph_of(), KINDS == 1
    masked = graph.call_function(aten.index.Tensor, (edges, [None, mask]))
    masked.meta["val"] = graph_of(N, 5)
    size = graph.call_function(aten.sym_size.int, (masked, 1))
    other = graph.call_function(aten.sym_size.int, (masked, 0))

    def is_certain(function: Any, *arguments: Any) -> bool:
        condition = graph.call_function(function, arguments)
        return (
            hoist._certain(graph.call_function(aten._assert_scalar.default, (condition, "message")))
            is masked
        )

    assert (
        is_certain(operator.ge, size, 0)
        and is_certain(operator.le, size, E)
        and is_certain(operator.le, size, E + 1)
    )
    assert not is_certain(operator.le, size, E - 1) and not is_certain(operator.ge, size, 1)
    assert (
        not is_certain(operator.le, other, E)
        and not is_certain(operator.eq, size, 3)
        and not is_certain(operator.le, E, size)
    )


def test_symbols_from_data_without_torchs_help(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.fx.experimental.symbolic_shapes as shapes

    monkeypatch.delattr(shapes, "free_unbacked_symbols")
    assert sizes.symbols_from_data(torch.ones(2)) == frozenset()
