"""Fused ops as generated kernels, in Triton's interpreter, with index tensors taken as on a GPU:
known, wrapped, or seen once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import insum
from insum import facts
from insum.compat import tensors as guards
from insum.facts import known
from insum.fusion import computed, op
from insum.fusion.indices import select
from insum.runtime.handwritten.looking import looked_at
from kernels import strategy_of, watch_programs

from .op_specs import spec
from .programs import E, F, N, compiled, counts, graph_of

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("as_on_a_gpu")]
#: Calls until an index tensor that comes back has its schedule.
KNOWN = facts.SEEN_AGAIN + 3


def aggregate(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]] * w[:, None])


def test_edges_that_come_back_take_the_short_way(
    monkeypatch: pytest.MonkeyPatch, searches: list[object]
) -> None:
    run, graphs = compiled(aggregate)
    x, w, edges = torch.randn(N, F), torch.randn(E), graph_of()
    seen = watch_programs(monkeypatch)
    for _ in range(KNOWN):
        assert_close(run(x, w, edges), aggregate(x, w, edges))
    assert strategy_of(seen[0]) == "atomic" and strategy_of(seen[-1]) == "segment"
    before = len(searches)
    for _ in range(3):
        assert_close(run(x, w, edges), aggregate(x, w, edges))
    assert len(searches) == before and counts(graphs) == [1]
    edges[1, 0] = (edges[1, 0] + 1) % N  # written to: what was known is void
    assert_close(run(x, w, edges), aggregate(x, w, edges))
    assert len(searches) == before + 1 and strategy_of(seen[-1]) == "atomic"


def test_edges_that_never_come_back_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Tensor] = []
    look = lambda t: (looked.append(t), looked_at(t))[1]
    monkeypatch.setattr("insum.runtime.which_program.looked_at", look)
    run, _ = compiled(aggregate)
    x, w = torch.randn(N, F), torch.randn(E)
    kept = [graph_of(seed=seed) for seed in range(6)]
    for edges in kept:
        assert_close(run(x, w, edges), aggregate(x, w, edges))
    assert not looked
    assert [known(select(edges, ((0, 1),))) for edges in kept] == [None] * 6
    for _ in range(KNOWN):  # now it has come back
        assert_close(run(x, w, kept[-1]), aggregate(x, w, kept[-1]))
    assert known(select(kept[-1], ((0, 1),))) is not None and len(looked) == 2, "each row once"


def test_edges_made_in_the_graph(
    monkeypatch: pytest.MonkeyPatch, built: list[object], searches: list[object]
) -> None:
    """They are new at every call, and their kernel is not."""

    def program(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
        return aggregate(x, w, edges.roll(1, 1).flip(1) + (x[0, 0] > 99))

    run, graphs = compiled(program)
    x, w = torch.randn(N, F), torch.randn(E)
    seen = watch_programs(monkeypatch)
    for seed in range(6):
        edges = graph_of(seed=seed)
        assert_close(run(x, w, edges), program(x, w, edges))
    assert len({id(one) for one in seen[1:]}) == 1 and counts(graphs) == [1]
    assert len(built) == 1, "also for the first call, which goes through the dispatcher"


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
    evaluated: list[int] = []
    original = computed.evaluate
    monkeypatch.setattr(
        computed, "evaluate", lambda *given: (evaluated.append(step), original(*given))[1]
    )
    seen = watch_programs(monkeypatch)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run, graphs = compiled(program, fullgraph=True, dynamic=True)
        for step in range(2 * KNOWN):
            if step == KNOWN:
                assert {strategy_of(one) for one in seen[-2:]} == {"segment"}
                kinds[:5] = 1 - kinds[:5]  # other edges now
            result, expected = run(x, w, edges, kinds), program(x, w, edges, kinds)
            assert_close(result, expected)
            assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (result, expected)))
    assert counts(graphs) == [1, 1]
    assert set(evaluated) == {0, KNOWN}, "at the first step, and when the edges have changed"


def test_new_edges_beside_known_ones() -> None:
    """Nothing that was found out about the known ones may hold values of the new ones."""

    def program(x: Tensor, w: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return x.new_zeros(N, F).index_add(0, dst, x[src + 0] * w[:, None])

    run, _ = compiled(program)
    x, w, dst = torch.randn(N, F), torch.randn(E), graph_of()[1].sort().values
    for _ in range(KNOWN):  # dst is known from elsewhere
        insum.insum("y[d[e]] = w[e]", d=dst, w=w, sizes={0: N})
    assert known(dst) is not None
    for seed in range(4):
        src = graph_of(seed=seed)[0]
        assert_close(run(x, w, dst, src), program(x, w, dst, src))
    assert known(dst) is not None


def test_negative_indices() -> None:
    run, _ = compiled(aggregate)
    x, w, edges = torch.randn(N, F), torch.randn(E), graph_of()
    edges[0, ::4] -= N
    for step in range(6):
        given = edges.clone() if step > 2 else edges
        assert_close(run(x, w, given), aggregate(x, w, given))


@pytest.mark.parametrize("value", [N, -N - 1])
def test_indices_out_of_range(value: int) -> None:
    """Whether the graph makes them, or computes them once: what they would have contributed shows
    as NaN, and the error comes with the next call.
    """
    edges, x, w = graph_of(), torch.randn(N, F), torch.randn(E)
    edges[0, 5] = value
    new, _ = compiled(lambda x, w, edges: aggregate(x, w, edges + (x[0, 0] > 99)))
    once, _ = compiled(lambda x, w, edges: aggregate(x, w, edges + 0))
    passed, _ = compiled(aggregate)
    for run in (new, once, passed):
        result = run(x, w, edges)
        assert result.isnan().any(1).nonzero().tolist() == [[int(edges[1, 5])]]
        with pytest.raises(insum.IndexRangeError, match=f"is {value}, .* which has size 10"):
            run(x, w, graph_of())


def test_into_what_is_there() -> None:
    def program(out: Tensor, x: Tensor, m: Tensor, edges: Tensor) -> Tensor:
        return out.index_add_(0, edges[1], x[edges[0]] @ m)

    edges, x, m, out = graph_of(), torch.randn(N, F), torch.randn(F, 16), torch.randn(N, 16)
    text = spec("out[d[i],j] += x[s[i],k] * m[k,j]", ("x", "m"), wraps="s", sizes="")
    for _ in range(KNOWN):
        expected = program(out.clone(), x, m, edges)
        torch.ops.insum.fused_into_(out, text, [x, m, edges], [])
        assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_memory_that_compiled_code_uses_again() -> None:
    """Inductor may put other index values into the memory of an index tensor that it made, and no
    version counter tells.
    """
    x, w, rows = torch.randn(N, F), torch.randn(E), graph_of().clone()
    text = spec("out[d[i],j] = x[s[i],j] * w[i]", ("x", "w"), passing="ds")
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            for seed in range(KNOWN):
                rows.data.copy_(graph_of(seed=seed))
                assert_close(
                    torch.ops.insum.fused(text, [x, w, rows], [N, F]), aggregate(x, w, rows)
                )
        finally:
            torch.use_deterministic_algorithms(False)
    rows.data[0, 7] = N
    torch.ops.insum.fused(text, [x, w, rows], [N, F])
    with pytest.raises(insum.IndexRangeError, match=r"s\[7\] is 10"):
        insum.synchronize()


def test_the_short_way_compares_everything(searches: list[object]) -> None:
    """Index tensors by identity and version, others by their kind; whatever differs goes the way
    that looks.
    """
    run, _ = compiled(aggregate)
    x, w, edges = torch.randn(N, F), torch.randn(E), graph_of()

    def is_short(*given: Tensor) -> bool:
        before = len(searches)
        assert_close(run(*given), aggregate(*given))
        return len(searches) == before

    for _ in range(KNOWN):
        is_short(x, w, edges)
    assert is_short(x, w, edges)
    assert is_short(x + 1, w * 2, edges), "other values of the same kind"
    with insum.settings(scatter="atomic"):
        assert not is_short(x, w, edges)
    assert not is_short(torch.randn(F, N).t(), w, edges)
    assert not is_short(x, w, graph_of(seed=3))
    assert is_short(x, w, edges)
    edges[0, 0] = (edges[0, 0] + 1) % N
    assert not is_short(x, w, edges)
    for _ in range(KNOWN):
        is_short(x, w, edges)
    assert is_short(x, w, edges)
    edges.data = graph_of(seed=4)
    assert not is_short(x, w, edges)


def count_dispatches(monkeypatch: pytest.MonkeyPatch, op: Any) -> list[int]:
    """Calls of an op that get as far as the dispatcher."""
    seen, dispatch = [0], op._op.dispatch

    def counted(*arguments: Any, **named: Any) -> Any:
        seen[0] += 1
        return dispatch(*arguments, **named)

    monkeypatch.setattr(op._op, "dispatch", counted)
    return seen


SPEC = spec("out[d[i],j] += x[s[i],j]", ("x",))


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
        assert [passes(call()) for _ in range(4)] == [0, 0, 0, 0]
        assert passes(fused(SPEC, tensors=[x, edges], sizes=[N, F])) == 1
        assert passes(call(x.as_subclass(Named))) > 0
        assert passes(call(x.t().contiguous().t())) == 0
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
    assert dispatched == [0]


def test_largest_values_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, edges, x = torch.ops.insum.fused_extremum.default, graph_of(), torch.randn(N, F)
    text = spec("out[d[i],j] max= x[s[i],j]", ("x",))
    dispatched = count_dispatches(monkeypatch, largest)
    for include_self in (False, True):
        base = torch.full((N, F), 0.5)
        expected = base.scatter_reduce(
            0, edges[1][:, None].expand(-1, F), x[edges[0]], "amax", include_self=include_self
        )
        with torch.no_grad():
            for _ in range(3):
                assert_close(largest(base, text, [x, edges], [N, F], include_self), expected)
    assert dispatched == [0]


def test_without_guards_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has none, tensors are compared one property after the other."""
    monkeypatch.setattr(guards, "_tensor_guard", lambda tensors, exact: None)
    edges = graph_of(seed=5)
    dispatched = count_dispatches(monkeypatch, torch.ops.insum.fused.default)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(N, F)
            assert_close(
                torch.ops.insum.fused.default(SPEC, [x, edges], [N, F]),
                torch.zeros(N, F).index_add(0, edges[1], x[edges[0]]),
            )
    assert dispatched == [0]


def test_nothing_is_written_that_is_read() -> None:
    edges = graph_of()
    for _ in range(KNOWN):
        x, out = torch.randn(N, F), torch.randn(N, F)
        expected = out.index_add(0, edges[1], x[edges[0]])
        torch.ops.insum.fused_into_(out, SPEC, [x, edges], [N, F])
        assert_close(out, expected)
    both = torch.randn(N, F)
    expected = both.index_add(0, edges[1], both[edges[0]])
    torch.ops.insum.fused_into_(both, SPEC, [both, edges], [N, F])
    assert_close(both, expected)


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


def test_edges_that_change_between_calls() -> None:
    """Written to, exchanged, forgotten: what was kept for the calls before is not taken."""

    def summed(x: Tensor, edges: Tensor) -> Tensor:
        return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]])

    run, _ = compiled(summed)
    edges, x = graph_of(), torch.randn(N, F)

    def is_right(calls: int) -> None:
        for _ in range(calls):
            torch.testing.assert_close(run(x, edges), summed(x, edges))

    is_right(12)
    edges[0, :5] = edges[0, 5:10].clone()
    is_right(12)
    edges.data = graph_of(seed=7)
    is_right(12)
    insum.forget(edges)
    is_right(2)
    with insum.settings(tier="stable"):
        is_right(2)
