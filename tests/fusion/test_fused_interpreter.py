"""Fused ops as generated kernels, in Triton's interpreter, with index tensors taken as on a GPU:
known, wrapped, or seen once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import insum
from insum import memory
from insum.fusion import indices, op, ways
from insum.fusion.op import Spec
from insum.plan.facts import known

from .programs import E, F, N, compiled, counts, graph_of

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (indices, op):
        monkeypatch.setattr(module, "looks_are_free", lambda tensor: False)
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    memory.forget()
    for table in (ways._ways, indices._last, indices._strangers):
        table.clear()
    with insum.settings(backend="fused", require_fused=True):
        yield


def aggregate(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]] * w[:, None])


def count_ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call from now on takes a short way."""
    taken: list[bool] = []
    original, shorter = ways.run, ways.run_path

    def run_path(*arguments: object) -> Tensor | None:
        result = shorter(*arguments)  # type: ignore[arg-type]
        taken.extend([True] * (result is not None))
        return result

    def run(*arguments: object) -> Tensor | None:
        result = original(*arguments)  # type: ignore[arg-type]
        taken.append(result is not None)
        return result

    monkeypatch.setattr(ways, "run", run)
    monkeypatch.setattr(ways, "run_path", run_path)
    return taken


def test_edges_that_come_back_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run, graphs = compiled(aggregate)
    x, w, edges = torch.randn(N, F), torch.randn(E), graph_of()
    taken = count_ways(monkeypatch)
    for _ in range(3):
        assert_close(run(x, w, edges), aggregate(x, w, edges))
    assert taken == [False, True, True] and counts(graphs) == [1]
    edges[1, 0] = (edges[1, 0] + 1) % N  # written to: what was known is void
    assert_close(run(x, w, edges), aggregate(x, w, edges))
    assert taken[-1] is False


def test_edges_that_never_come_back_are_not_looked_at() -> None:
    run, _ = compiled(aggregate)
    x, w = torch.randn(N, F), torch.randn(E)
    kept = [graph_of(seed=seed) for seed in range(6)]
    for edges in kept:
        assert_close(run(x, w, edges), aggregate(x, w, edges))
    rows = [known(indices.part(edges, ((0, 1),))) for edges in kept]
    assert [facts is not None for facts in rows] == [True, True, False, False, False, False]
    assert_close(run(x, w, kept[-1]), aggregate(x, w, kept[-1]))  # now it has come back
    facts = known(indices.part(kept[-1], ((0, 1),)))
    assert facts is not None and not facts.passing


def test_edges_made_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are new at every call, and their kernel is not."""

    def program(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
        return aggregate(x, w, edges.roll(1, 1).flip(1))

    run, graphs = compiled(program)
    x, w = torch.randn(N, F), torch.randn(E)
    taken = count_ways(monkeypatch)
    for seed in range(3):
        edges = graph_of(seed=seed)
        assert_close(run(x, w, edges), program(x, w, edges))
    assert taken == [False, True, True] and counts(graphs) == [1]


def test_edges_computed_from_the_same_ones_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked edges, self-loops: a function of tensors that do not change."""

    def program(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
        some = torch.cat([edges[:, kinds == 1], torch.arange(x.shape[0]).expand(2, -1)], 1)
        return x.new_zeros(N, F).index_add(0, some[1], x[some[0]] * w[: some.shape[1], None])

    x, w, edges, kinds = (
        torch.randn(N, F, requires_grad=True),
        torch.randn(2 * E),
        graph_of(),
        torch.randint(0, 2, (E,)),
    )
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run, graphs = compiled(program, fullgraph=True, dynamic=True)
        taken = count_ways(monkeypatch)
        for step in range(6):
            if step == 4:
                kinds[:5] = 1 - kinds[:5]  # other edges now
            result, expected = run(x, w, edges, kinds), program(x, w, edges, kinds)
            assert_close(result, expected)
            assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (result, expected)))
    assert counts(graphs) == [1, 1]
    # forward and backward of four steps; then the edges change
    assert taken == [False, False, *[True] * 6, False, False, True, True]


def test_new_edges_beside_known_ones() -> None:
    """Nothing that was found out about the known ones may hold values of the new ones."""

    def program(x: Tensor, w: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return x.new_zeros(N, F).index_add(0, dst, x[src + 0] * w[:, None])

    run, _ = compiled(program)
    x, w, dst = torch.randn(N, F), torch.randn(E), graph_of()[1].sort().values
    insum.insum("y[d[e]] = w[e]", d=dst, w=w, sizes={0: N})  # dst is known from elsewhere
    for seed in range(4):
        src = graph_of(seed=seed)[0]
        assert_close(run(x, w, dst, src), program(x, w, dst, src))
    facts = known(dst)
    assert facts is not None and not facts.passing


def test_negative_indices() -> None:
    run, _ = compiled(aggregate)
    x, w, edges = torch.randn(N, F), torch.randn(E), graph_of()
    edges[0, ::4] -= N
    for step in range(6):
        given = edges.clone() if step > 2 else edges
        assert_close(run(x, w, given), aggregate(x, w, given))


@pytest.mark.parametrize("value", [N, -N - 1])
def test_indices_out_of_range(value: int) -> None:
    edges = graph_of()
    edges[0, 5] = value
    unseen, _ = compiled(lambda x, w, edges: aggregate(x, w, edges + (x[0, 0] > 99)))
    with pytest.raises(RuntimeError, match="out of range"):
        unseen(torch.randn(N, F), torch.randn(E), edges)
    looked_at, _ = compiled(lambda x, w, edges: aggregate(x, w, edges + 0))
    with pytest.raises(insum.IndexRangeError, match="which has size 10"):
        looked_at(torch.randn(N, F), torch.randn(E), edges)


def test_into_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(out: Tensor, x: Tensor, m: Tensor, edges: Tensor) -> Tensor:
        return out.index_add_(0, edges[1], x[edges[0]] @ m)

    edges, x, m, out = graph_of(), torch.randn(N, F), torch.randn(F, 16), torch.randn(N, 16)
    for _ in range(3):
        expected = program(out.clone(), x, m, edges)
        spec = op.Spec(
            "out[d[i],j] += x[s[i],k] * m[k,j]",
            ("x", "m", "e"),
            (("d", "e", ((0, 1),)), ("s", "e", ((0, 0),))),
            "",
            frozenset("s"),
            frozenset(),
            (),
        )
        torch.ops.insum.fused_into_(out, str(spec), [x, m, edges], [])
        assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_memory_that_compiled_code_uses_again() -> None:
    """Inductor may put other index values into the memory of an index tensor that it made, and no
    version counter tells.
    """
    x, w, rows = torch.randn(N, F), torch.randn(E), graph_of().clone()
    views = (("d", "e", ((0, 1),)), ("s", "e", ((0, 0),)))
    spec = op.Spec(
        "out[d[i],j] = x[s[i],j] * w[i]",
        ("x", "w", "e"),
        views,
        "out#2",
        frozenset(),
        frozenset("ds"),
        (),
    )
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            for seed in range(3):
                rows.data.copy_(graph_of(seed=seed))
                assert_close(
                    torch.ops.insum.fused(str(spec), [x, w, rows], [N, F]), aggregate(x, w, rows)
                )
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_shortest_way_compares_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index tensors by identity and version, others by their kind; whatever differs goes the way
    that looks.
    """
    run, _ = compiled(aggregate)
    x, w, edges = torch.randn(N, F), torch.randn(E), graph_of()
    asked: list[bool] = []
    original = ways.run_path
    monkeypatch.setattr(
        ways,
        "run_path",
        lambda *arguments: (result := original(*arguments), asked.append(result is not None))[0],
    )
    right = lambda *a: assert_close(run(*a), aggregate(*a))
    for _ in range(3):
        right(x, w, edges)
    # the first call, before the dispatcher and behind it
    assert asked == [False, False, True, True]
    right(x + 1, w * 2, edges)
    assert asked[-1] is True  # other values of the same kind
    with insum.settings(scatter="atomic"):
        right(x, w, edges)
    assert asked[-1] is False
    right(torch.randn(F, N).t(), w, edges)
    assert asked[-1] is False
    other = graph_of(seed=3)
    right(x, w, other)
    assert asked[-1] is False
    edges[0, 0] = (edges[0, 0] + 1) % N
    right(x, w, edges)
    assert asked[-1] is False
    edges.data = graph_of(seed=4)
    right(x, w, edges)
    assert asked[-1] is False


def count_dispatches(monkeypatch: pytest.MonkeyPatch, op: Any) -> list[int]:
    """Calls of an op that get as far as the dispatcher."""
    seen, dispatch = [0], op._op.dispatch

    def counted(*arguments: Any, **named: Any) -> Any:
        seen[0] += 1
        return dispatch(*arguments, **named)

    monkeypatch.setattr(op._op, "dispatch", counted)
    return seen


VIEWS = (("d", "e", ((0, 1),)), ("s", "e", ((0, 0),)))
SPEC = str(
    Spec("out[d[i],j] += x[s[i],j]", ("x", "e"), VIEWS, "out#2", frozenset(), frozenset(), ())
)


class Named(Tensor):
    """A subclass without behaviour of its own."""


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_calls_on_plain_terms_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch.ops.insum.fused.default
    x, edges = torch.randn(N, F), graph_of()
    expected = torch.zeros(N, F).index_add(0, edges[1], x[edges[0]])
    dispatched = count_dispatches(monkeypatch, fused)

    def passes(result: Tensor) -> int:
        assert_close(result, expected)
        seen, dispatched[0] = dispatched[0], 0
        return seen

    call = lambda x=x: fused(SPEC, [x, edges], [N, F])
    with torch.no_grad():
        assert [passes(call()) for _ in range(4)] == [1, 0, 0, 0]
        assert passes(fused(SPEC, tensors=[x, edges], sizes=[N, F])) == 1
        assert passes(call(x.as_subclass(Named))) > 0
        assert passes(call(x.t().contiguous().t())) == 1
        with torch.autocast("cpu"):
            assert passes(call()) == 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert passes(call()) == 1
        assert any("insum::fused" in event.key for event in profile.key_averages())
        with Seen() as mode:
            assert passes(call()) > 0
        assert any("insum.fused" in name for name in mode.names)
        assert passes(call()) == 0
    assert passes(call()) == 1  # gradients are the dispatcher's affair


def test_a_step_of_training_skips_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = compiled(aggregate)
    x, w, edges = torch.randn(N, F, requires_grad=True), torch.randn(E), graph_of()
    for _ in range(3):
        run(x, w, edges).square().sum().backward()
    dispatched = count_dispatches(monkeypatch, torch.ops.insum.fused.default)
    x.grad = None
    run(x, w, edges).square().sum().backward()
    assert dispatched == [0]
    (wanted,) = torch.autograd.grad(aggregate(x, w, edges).square().sum(), x)
    assert_close(x.grad, wanted)


def test_writing_in_place_skips_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    into, edges = torch.ops.insum.fused_into_.default, graph_of()
    dispatched = count_dispatches(monkeypatch, into)
    with torch.no_grad():
        for _ in range(3):
            x, out = torch.randn(N, F), torch.randn(N, F)
            expected = out.index_add(0, edges[1], x[edges[0]])
            assert into(out, SPEC, [x, edges], [N, F]) is None
            assert_close(out, expected)
    assert dispatched == [1]


def test_largest_values_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, edges, x = torch.ops.insum.fused_extremum.default, graph_of(), torch.randn(N, F)
    spec = str(
        Spec("out[d[i],j] max= x[s[i],j]", ("x", "e"), VIEWS, "out#2", frozenset(), frozenset(), ())
    )
    dispatched = count_dispatches(monkeypatch, largest)
    for include_self in (False, True):
        base = torch.full((N, F), 0.5)
        expected = base.scatter_reduce(
            0, edges[1][:, None].expand(-1, F), x[edges[0]], "amax", include_self=include_self
        )
        with torch.no_grad():
            for _ in range(3):
                assert_close(largest(base, spec, [x, edges], [N, F], include_self), expected)
    assert dispatched == [4]  # the first, and those that begin with what is there


def test_without_guards_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has none, tensors are compared one property after the other."""
    monkeypatch.setattr(ways, "kinds_guard", lambda tensors: None)
    edges = graph_of(seed=5)
    dispatched = count_dispatches(monkeypatch, torch.ops.insum.fused.default)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(N, F)
            assert_close(
                torch.ops.insum.fused.default(SPEC, [x, edges], [N, F]),
                torch.zeros(N, F).index_add(0, edges[1], x[edges[0]]),
            )
    assert dispatched == [1]


def test_the_shortest_way_writes_to_nothing_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = graph_of()
    taken = count_ways(monkeypatch)
    for _ in range(2):
        x, out = torch.randn(N, F), torch.randn(N, F)
        expected = out.index_add(0, edges[1], x[edges[0]])
        torch.ops.insum.fused_into_(out, SPEC, [x, edges], [N, F])
        assert_close(out, expected)
    both = torch.randn(N, F)
    expected = both.index_add(0, edges[1], both[edges[0]])
    torch.ops.insum.fused_into_(both, SPEC, [both, edges], [N, F])
    assert_close(both, expected)
    assert taken == [False, True, False]


@pytest.mark.parametrize("everywhere", [True, False])
def test_rows_that_nothing_is_scattered_to_are_found_out_once(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.arange(N).repeat(3) if everywhere else torch.arange(0, N, 2).repeat(5)
    masks: list[Tensor] = []
    original = op._mask
    monkeypatch.setattr(
        op, "_mask", lambda *arguments: (masks.append(original(*arguments)), masks[-1])[1]
    )

    def program(x: Tensor, rows: Tensor) -> Tensor:
        return x.new_ones(N, F).scatter_reduce(
            0, rows[:, None].expand(x.shape), x, "amax", include_self=False
        )

    run, _ = compiled(program, fullgraph=True)
    for _ in range(3):
        x = torch.randn(len(rows), F)
        assert_close(run(x, rows), program(x, rows))
    assert len(masks) == 1 and bool(masks[0].all()) is everywhere
