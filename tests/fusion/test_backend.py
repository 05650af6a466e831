"""The backend by name, the pass of the default backend, options, reports, and a torch without a
place for passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import insum
import insum.fusion
from insum import bounded
from insum.compat import compiler
from insum.errors import SettingsError
from insum.settings import SettingValues, _from_environment

from .programs import E, F, N, Somewhere, agrees, compiled, fused_ops, graph_of, leaf

ROOT = Path(__file__).parent.parent.parent
EDGES = graph_of()


def aggregate(x: Tensor, w: Tensor) -> Tensor:
    return x.new_zeros(N, F).index_add(0, EDGES[1], x[EDGES[0]] * w[:, None]).relu()


@pytest.fixture
def inductor_config() -> Any:
    from torch._inductor import config

    with config.patch(force_disable_caches=True):
        yield config


def test_the_name_is_known() -> None:
    assert "insum" in torch._dynamo.list_backends(())
    assert (
        '[project.entry-points."torch_dynamo_backends"]\ninsum = "insum.fusion:backend"'
        in (ROOT / "pyproject.toml").read_text()
    )


def test_through_inductor(inductor_config: Any) -> None:
    run = torch.compile(
        aggregate, backend="insum", options={"insum.fuse": "always"}, fullgraph=True
    )
    agrees(aggregate, run, (leaf(N, F), leaf(E)))
    assert [found.backward for found in insum.fusion.report().fused] == [False, True, True]


def test_the_default_backend(inductor_config: Any) -> None:
    assert inductor_config.joint_custom_pre_pass is None
    with insum.settings(fuse="always"), insum.fusion.enabled():
        agrees(aggregate, torch.compile(aggregate), (leaf(N, F), leaf(E)))
    assert len(insum.fusion.report().fused) == 3
    assert inductor_config.joint_custom_pre_pass is None


def test_enable_and_disable(inductor_config: Any) -> None:
    mine = lambda graph: None
    with inductor_config.patch(joint_custom_pre_pass=mine):
        assert insum.fusion.enable() and insum.fusion.enable()
        assert inductor_config.joint_custom_pre_pass is not mine
        with insum.fusion.enabled():
            pass
        assert inductor_config.joint_custom_pre_pass is not mine  # it was on before the block
        insum.fusion.disable()
        insum.fusion.disable()
        assert inductor_config.joint_custom_pre_pass is mine


def test_a_pass_that_is_there_runs_first(inductor_config: Any) -> None:
    seen: list[str] = []
    with inductor_config.patch(joint_custom_pre_pass=lambda graph: seen.append("theirs")):
        found = compiler.joint_pass(lambda graph: seen.append("ours"), "key")
        found(torch.fx.Graph())
        # theirs cannot be told from others, so nothing is cached
        assert seen == ["theirs", "ours"] and found.uuid() is None
    assert compiler.joint_pass(lambda graph: None, "key").uuid() is not None


def test_a_torch_without_a_place_for_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "joint_pass", lambda function, identity: None)
    monkeypatch.setattr(compiler, "inductor", lambda graph, inputs, patches: graph.forward)
    bounded.say_again()
    x, w = torch.randn(N, F), torch.randn(E)
    with pytest.warns(UserWarning, match="nothing is fused"):
        assert_close(torch.compile(aggregate, backend="insum")(x, w), aggregate(x, w))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_close(torch.compile(aggregate, backend="insum")(x, w), aggregate(x, w))
        assert insum.fusion.enable() is False


def test_without_an_operator_for_writing_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from insum.fusion import rewrite

    monkeypatch.setattr(rewrite, "functional_call", lambda: None)
    program = lambda x, y: y.index_add(0, EDGES[1], x[EDGES[0]])
    run = torch.compile(
        program, backend="insum", options={"insum.fuse": "always", "insum.rest": "eager"}
    )
    agrees(program, run, (leaf(N, F), leaf(N, F)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"insum.fuse": "often"},
            "options['insum.fuse'] is 'often'\n  expected: 'auto', 'always' or 'never'",
        ),
        (
            {"insum.rest": "lazy"},
            "options['insum.rest'] is 'lazy'\n  expected: 'inductor', 'eager' or a function of a "
            "graph module and its inputs",
        ),
        (
            {"insum.fuze": "always"},
            "there is no option 'insum.fuze'\n  expected: 'insum.fuse' or 'insum.rest'; options "
            "without 'insum.' are Inductor's",
        ),
        (
            {"insum.rest": "eager", "insum.": "always"},
            "there is no option 'insum.'\n  expected: 'insum.fuse' or 'insum.rest'; options "
            "without 'insum.' are Inductor's",
        ),
        (
            {"fuze": "always"},
            "there is no option 'fuze', neither of insum nor of Inductor\n  expected: "
            "'insum.fuse', 'insum.rest', or an option of torch._inductor.list_options()\n"
            "  try: 'insum.fuse'",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=r"insum\.") as caught:
        torch.compile(aggregate, backend="insum", options=options)(
            torch.randn(N, F), torch.randn(E)
        )
    chain = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert message in {str(e) for e in chain if isinstance(e, SettingsError)}


def test_modes_are_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(
        compiler,
        "inductor",
        lambda graph, inputs, patches: (given.append(patches), graph.forward)[1],
    )
    torch.compile(aggregate, backend="insum", mode="max-autotune-no-cudagraphs")(
        torch.randn(N, F), torch.randn(E)
    )
    assert given[0]["max_autotune"] is True and "joint_custom_pre_pass" in given[0]


def test_graphs_that_will_be_replayed_take_index_tensors_as_they_come(
    inductor_config: Any,
) -> None:
    for on, expected in ((False, ""), (True, "arg1_1_0,arg1_1_1")):
        graph = traced(gathered, torch.randn(N, F), EDGES)
        insum.fusion.fuse(graph, "always", captured=on)
        fused = [n for n in graph.nodes if n.target is torch.ops.insum.fused.default]
        assert [str(n.args[0]).split("|")[5] for n in fused] == [expected]
    assert compiler.uses_cuda_graphs() is False
    with inductor_config.patch({"triton.cudagraphs": True}):
        assert compiler.uses_cuda_graphs() is True


@pytest.mark.parametrize("captured", [False, True])
def test_what_is_left_to_inductor_where_nothing_is_known(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, by itself: only chains with a matrix product in them gain from one kernel with
    atomics.
    """
    from insum.fusion import cost, roots

    monkeypatch.setattr(cost, "value_of", lambda node: Somewhere())
    monkeypatch.setattr(roots, "WORTH_A_SCATTER", 1)
    why = "nothing is known of the index, and Inductor makes one kernel of it too"

    def program(x: Tensor, w: Tensor, edges: Tensor, where: Tensor) -> Tensor:
        found = where.long() * edges[0] % N  # depends on numbers: nothing is known of it
        out = x.new_zeros(N, F).index_add(0, found, x[edges[0]])
        out = out.relu().index_add(0, found, x[edges[1]] @ w)
        return out.relu().index_add(0, edges[1], x[edges[0]] * 2.0)

    arguments = torch.randn(N, F), torch.randn(F, F), EDGES, torch.rand(E)
    graph = traced(program, *arguments)
    report = insum.fusion.fuse(graph, "auto", captured=captured)
    assert [found.why for found in report.left] == [why] * (2 if captured else 1)
    assert ["@" in str(found) or "k0" in found.statement for found in report.fused] == (
        [True] if captured else [True, False]
    )
    assert (
        len(insum.fusion.fuse(traced(program, *arguments), "always", captured=captured).fused) == 3
    )


@pytest.mark.parametrize("worth", [2**28, 1])
@pytest.mark.parametrize("others", [False, True])
def test_edges_that_are_counted_at_each_call(
    others: bool, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others need their number too it is waited for in any case. A few messages are then left
    to Inductor, many are worth the longer call.
    """
    from insum.fusion import cost

    monkeypatch.setattr(cost, "value_of", lambda node: Somewhere())
    monkeypatch.setattr(cost, "WORTH_A_CALL", worth)

    def program(x: Tensor, edges: Tensor, types: Tensor) -> tuple[Tensor, ...]:
        some = edges[:, types == 1]
        out = x.new_zeros(N, F).index_add(0, some[1], x[some[0]])
        return (out, x[some[0]].relu()) if others else (out,)

    arguments = torch.randn(N, F), EDGES, torch.randint(0, 2, (E,))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(
            program, backend="insum", fullgraph=True, options={"insum.rest": "eager"}
        )
        assert_close(run(*arguments), program(*arguments))
    report = insum.fusion.report()
    assert len(report.fused) == (worth == 1 or not others)
    if worth > 1 and others:
        assert f"about {E * F:,} elements do not make up for a longer call" in report.left[0].why


@pytest.mark.parametrize("masked", [False, True])
def test_edges_whose_number_changes(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mini-batches: nothing is known of their edges, and calling a kernel takes longer than
    Inductor's. A matrix product makes up for it.
    """
    from insum.fusion import cost, roots

    monkeypatch.setattr(cost, "value_of", lambda node: Somewhere())
    monkeypatch.setattr(roots, "WORTH_A_SCATTER", 1)  # where the number stays, all is worth it

    def program(x: Tensor, m: Tensor, edges: Tensor, types: Tensor) -> Tensor:
        edges = edges[:, types == 1] if masked else edges
        out = x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]])
        return out.relu().index_add(0, edges[1], x[edges[0]] @ m)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(
            program, backend="insum", fullgraph=True, options={"insum.rest": "eager"}
        )
        for step, edges in enumerate((E, E, 45, 61)):
            arguments = (
                torch.randn(N, F),
                torch.randn(F, F),
                graph_of(N, edges, seed=step),
                torch.randint(0, 2, (edges,)),
            )
            assert_close(run(*arguments), program(*arguments), rtol=1e-4, atol=1e-4)
            if step == 1:
                assert len(insum.fusion.report().fused) == 2 and not insum.fusion.report().left
    report = insum.fusion.report()
    assert len(report.fused) == 3 and [found.why for found in report.left] == [
        "the number of its points is another from call to call, as in mini-batches, and "
        "Inductor makes one kernel of it too"
    ]


def test_fused_ops_can_be_quoted_in_comments() -> None:
    """Inductor writes nodes, as they print, into comments of the code it generates for GPUs."""

    def program(x: Tensor, y: Tensor, edges: Tensor, keep: Tensor) -> Tensor:
        some = edges[:, keep]  # from which comes an origin
        return y.index_add(0, some[1], x[some[0]]).index_add(0, edges[0], x[edges[1]] * 0.5)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run, graphs = compiled(program, fullgraph=True)
        agrees(program, run, (leaf(N, F), leaf(N, F), EDGES, torch.rand(E) > 0.5))
    nodes = [n for g in graphs for n in g.graph.nodes if n.op == "call_function"]
    assert sum(map(fused_ops, graphs)) >= 3 and all(
        len((n.format_node() or "").splitlines()) <= 1 for n in nodes
    )


def gathered(x: Tensor, edges: Tensor) -> Tensor:
    return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]])


def traced(program: Any, *arguments: Tensor) -> torch.fx.Graph:
    """The inference graph of a program, as the pass gets it."""
    graphs: list[torch.fx.Graph] = []
    torch._dynamo.reset()
    run = lambda module, inputs: (graphs.append(module.graph), module.forward)[1]
    torch.compile(program, backend="insum", options={"insum.fuse": "never", "insum.rest": run})(
        *arguments
    )
    return graphs[0]


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with insum.settings(fuse="always", log="plan,fusion"):
        torch.compile(aggregate, backend="insum", options={"insum.rest": "eager"})(
            leaf(N, F), leaf(E)
        )
    text = capsys.readouterr().err
    report = insum.fusion.report()
    assert (
        text.startswith("insum: fusion\n")
        and "fused  index_put:" in text
        and str(report.fused[0]) in text
    )
    assert report.fused[0].saved == 2 * E * F and "index" in report.fused[0].nodes
    insum.fusion.clear()
    assert str(insum.fusion.report()) == "nothing to fuse"


class Inner(nn.Module):
    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, dst, x[src].relu())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Inner()])

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        return self.convs[0](x, src, dst).sum(0)


#: Each process of its own that compiles, but for what both import.
COMPILED_TWICE = """
import os, sys, torch, insum.fusion, torch._inductor.compile_fx
def f(x, s, d): return torch.zeros_like(x).index_add(0, d, x[s] * 2)
def g(x, s, d): return torch.zeros_like(x).index_add(0, d, x[s] * x[d])
x, (s, d) = torch.ones(9, 4), torch.arange(16).view(2, 8) % 9
for programs in ((f,), (g, f)):
    if not os.fork():
        for one in programs:
            run = torch.compile(one, backend="insum", options={"insum.fuse": "always"})
            assert torch.equal(run(x, s, d), one(x, s, d))
        print(insum.fusion.report())
        sys.exit()
    assert os.wait()[1] == 0
    print("next", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_report_of_what_torch_has_in_its_cache(tmp_path: Path) -> None:
    """Another process compiles one of two programs, and tells the statements of both."""
    own = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # for two kernels
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_TWICE],
        env=os.environ | own,
        check=True,
        capture_output=True,
        text=True,
    )
    told = done.stdout.split("next\n")[:2]
    assert "3 nodes, forward" in told[0] and "by an earlier process" not in told[0], told
    made, found = sorted(told[1].splitlines(), key=lambda line: "by an earlier process" in line)
    assert "nodes, forward" in made and "by an earlier process" not in made, told
    assert found.removeprefix("fused").partition("(")[0].strip() in told[0], told


def test_the_report_names_modules_and_lines() -> None:
    insum.fusion.clear()
    options = {"insum.rest": "eager", "insum.fuse": "always"}
    run = torch.compile(Outer(), backend="insum", options=options)
    run(leaf(N, F), *graph_of()).sum().backward()
    report = insum.fusion.report()
    line = Inner.forward.__code__.co_firstlineno + 1
    here = f"convs.0, test_backend.py:{line}"
    assert [one.where for one in report.fused] == [here, here]
    assert "relu(primals_1[primals_2[i0],i1])" in str(report.fused[0])  # what is gathered
    assert str(report).count(f"at {here}") == 2 and here in report._repr_html_()


def test_the_environment() -> None:
    assert _from_environment({"INSUM_LOGS": "fusion"}) == SettingValues(log="fusion")
    assert _from_environment({"INSUM_LOG": "plan", "INSUM_LOGS": "fusion"}) == SettingValues(
        log="plan"
    )
    assert _from_environment({"INSUM_FUSE": "always"}) == SettingValues(fuse="always")


def test_importing_insum_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch, insum; assert 'insum.fusion' not in sys.modules; insum.fusion; "
        "assert 'torch._dynamo' in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        check=True,
        timeout=600,
    )


def test_what_is_small_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from insum.fusion import cost

    monkeypatch.setattr(cost, "value_of", lambda node: Somewhere())
    report = insum.fusion.fuse(traced(gathered, torch.randn(N, F), EDGES), "auto")
    (left,) = report.left
    assert not report.fused and left.why.startswith("Inductor makes one kernel of it too")
    assert f"its {E * F:,} elements do not make up for a longer call" in left.why
