"""Fused ops that share index tensors are called as one: an attention forward and backward, what
must not be moved, and calls that are recognised again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.testing import assert_close

import insum
import insum.fusion
from insum import facts
from insum.fusion import op, repeated
from insum.fusion.sequence_op import SequenceMember, members_of, text_of

from .op_specs import spec
from .programs import SEQUENCE, E, F, N, agrees, compiled, counts, graph_of, leaf

#: Calls until index tensors that come back have their schedule, and calls like those are
#: recognised.
KNOWN = facts.SEEN_AGAIN + 4


def attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """A softmax over edges, of two heads."""
    src, dst = ends
    q, k, v = (t.view(N, 2, F // 2) for t in (q, k, v))
    scores = (q[dst] * k[src]).sum(-1)
    rows = dst[:, None].expand(-1, 2)
    most = q.new_zeros(N, 2).scatter_reduce(0, rows, scores.detach(), "amax", include_self=False)
    weights = torch.exp(scores - most[dst])
    total = q.new_zeros(N, 2).index_add(0, dst, weights) + 1e-16
    shares = (weights / total[dst])[:, :, None]
    return q.new_zeros(N, 2, F // 2).index_add(0, dst, v[src] * shares).view(N, F)


def sequences(graph: GraphModule) -> list[int]:
    """How many statements each call of several has."""
    return [len(members_of(n.args[0])) for n in graph.graph.nodes if n.target is SEQUENCE]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_backward_pass_is_one_call(dynamic: bool | None) -> None:
    """Whatever one statement computes for another; what else there is, is views."""
    run, graphs = compiled(attention, dynamic=dynamic)
    agrees(attention, run, (leaf(N, F), leaf(N, F), leaf(N, F), graph_of()))
    assert not insum.fusion.report().failed
    assert sequences(graphs[0]) == [4]  # with the number that is added to a sum
    assert counts(graphs) == [4, 5] and sequences(graphs[1]) == ([5] if dynamic is None else [2, 3])


def test_each_has_its_edges() -> None:
    """What does not share an index tensor is called by itself."""

    def program(x: Tensor, one: Tensor, two: Tensor) -> tuple[Tensor, ...]:
        sums = [x.new_zeros(N, F).index_add(0, ends[1], x[ends[0]]) for ends in (one, two)]
        return sums[0], sums[1].exp()

    run, graphs = compiled(program)
    arguments = torch.randn(N, F), graph_of(), graph_of(seed=1)
    assert_close(run(*arguments), program(*arguments))
    assert counts(graphs) == [2] and not sequences(graphs[0])


def sums(x: Tensor, ends: Tensor) -> Tensor:
    return x.new_zeros(N, F).index_add(0, ends[1], x[ends[0]])


def test_what_waits_for_others_is_another_call() -> None:
    def program(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
        first = sums(x, ends)
        halved = first / 2  # in between, and behind both
        other = sums(y, ends.flip(0) if x.shape[0] < 0 else ends)
        return sums((first + other).relu(), ends) + halved

    run, graphs = compiled(program)
    arguments = torch.randn(N, F), torch.randn(N, F), graph_of()
    assert_close(run(*arguments), program(*arguments))
    assert sequences(graphs[0]) == [2] and counts(graphs) == [3]


@pytest.mark.parametrize("drawn_first", [True, False])
def test_random_numbers_are_drawn_in_turn(drawn_first: bool) -> None:
    """Such as depend on a result, and others."""

    def program(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        first = sums(x, ends)
        one = torch.bernoulli(first.sigmoid()) if drawn_first else torch.rand(3)
        two = torch.rand(3) if drawn_first else torch.bernoulli(first.sigmoid())
        return first, one, two, sums(x * 2, ends)

    run, _ = compiled(program)
    x, ends = torch.randn(N, F), graph_of()
    torch.manual_seed(1)
    expected = program(x, ends)
    torch.manual_seed(1)
    assert_close(run(x, ends), expected)


def test_what_is_written_to_in_between() -> None:
    def program(x: Tensor, y: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        first = sums(x, ends)
        x.add_(first)
        second = sums(x, ends)
        y.index_add_(0, ends[1], second[ends[0]])
        return first, second, sums(y, ends)

    run, _ = compiled(program)
    given = torch.randn(N, F), torch.randn(N, F)
    one, two = [t.clone() for t in given], [t.clone() for t in given]
    assert_close(run(*one, graph_of()), program(*two, graph_of()))
    assert_close(one, two)


def test_as_text() -> None:
    members = (
        SequenceMember("a[i] = b[i] * exp(c[i])|b,c||||", 0, ((0, 0), (1, 0))),
        SequenceMember("kept rows, a[d[i]] max= b[i]|b,e|d<e:0.1|a#1|||", 1, ((-1, 2), (2, 0))),
    )
    assert members_of(text_of(members)) == members
    assert '"' not in text_of(members) and "\n" not in text_of(members)


# --- the op ---------------------------------------------------------------------------------------

SUM = spec("out[d[i],j] = x[s[i],j]", ("x",))
LARGEST = op.KEPT_ROWS + spec("out[d[i],j] max= x[s[i],j]", ("x",))
#: A sum, the largest of what is summed beside what is there, a sum of that, and of a view.
TEXT = text_of(
    (
        SequenceMember(SUM, 2, ((0, 0), (1, 0))),
        SequenceMember(LARGEST, 2, ((-1, 0), (1, 0), (2, 0))),
        SequenceMember(SUM, 2, ((-2, 0), (1, 0))),
        SequenceMember(SUM, 2, ((-3, 2), (1, 0))),
    )
)
SIZES = [N, F] * 5


def several(x: Tensor, edges: Tensor, base: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found: list[Tensor] = SEQUENCE(TEXT, [x, edges, base], SIZES)
    return found


def right(x: Tensor, edges: Tensor, base: Tensor) -> list[Tensor]:
    first = sums(x, edges)
    rows = edges[1][:, None].expand(-1, F)
    second = base.scatter_reduce(0, rows, first[edges[0]], "amax", include_self=False)
    third = sums(second, edges)
    return [first, second, third, sums(third, edges)]


def fewer(seed: int = 0) -> Tensor:
    """Edges that leave some nodes out."""
    return graph_of(N - 2, E, seed)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Statements that are run as if there had been none like them."""
    found: list[str] = []
    original = op._run_anew
    monkeypatch.setattr(repeated, "_alike", {})

    def run(mode: str, target: Tensor | None, text: str, *rest: Any) -> Tensor:
        found.append(text)
        return original(mode, target, text, *rest)

    monkeypatch.setattr(op, "_run_anew", run)
    return found


def warm(edges: Tensor) -> None:
    for _ in range(KNOWN):
        x, base = torch.randn(N, F), torch.randn(N, F)
        assert_close(several(x, edges, base), right(x, edges, base))


def test_the_op_on_a_cpu() -> None:
    warm(fewer())
    given = TEXT, [torch.randn(N, F), fewer(), torch.randn(N, F)], SIZES
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(SEQUENCE, given, test_utils=checks)


@pytest.mark.interpreter
@pytest.mark.usefixtures("as_on_a_gpu")
def test_calls_like_those_before_are_found_at_once(anew: list[str]) -> None:
    edges = fewer()
    warm(edges)
    anew.clear()
    warm(edges)
    assert not anew
    (known,) = repeated._alike[TEXT]
    assert len(known.statements) == 4


def written_to(edges: Tensor) -> Tensor:
    return edges.copy_(fewer(seed=7))


def forgotten(edges: Tensor) -> Tensor:
    edges.data.copy_(fewer(seed=7))
    insum.forget(edges)
    return edges


@pytest.mark.interpreter
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "change", [written_to, forgotten, lambda edges: fewer(seed=7)], ids=["w", "f", "other"]
)
def test_nothing_stale(anew: list[str], change: Callable[[Tensor], Tensor]) -> None:
    edges = fewer()
    warm(edges)
    anew.clear()
    edges = change(edges)
    warm(edges)
    assert anew


@pytest.mark.interpreter
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("include_self", [False, True])
def test_largest_values_that_come_back(anew: list[str], include_self: bool, wide: bool) -> None:
    """Also where what is there has a dimension of size 1 more."""
    edges, largest = fewer(), torch.ops.insum.fused_extremum.default
    text = LARGEST.removeprefix(op.KEPT_ROWS)
    for step in range(2 * KNOWN):
        if step == KNOWN:
            anew.clear()
        x, base = torch.randn(N, F), torch.randn(N, 1, F) if wide else torch.randn(N, F)
        rows, before = edges[1][:, None].expand(-1, F), base.clone()
        expected = base.reshape(N, F).scatter_reduce(
            0, rows, x[edges[0]], "amax", include_self=include_self
        )
        with torch.no_grad():
            found = largest(base, text, [x, edges], [N, F], include_self)
        assert_close(found, expected.view(base.shape))
        assert_close(base, before)
    assert not anew


@pytest.mark.interpreter
@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_are_kept_of_a_view_of_a_result(anew: list[str]) -> None:
    """A repeated call views it, too."""

    def program(x: Tensor, z: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
        first = sums(x, ends)
        found = z[ends[0]]
        rows = ends[1][:, None, None].expand_as(found)
        kept = first.view(N, 2, F // 2)
        return first, kept.scatter_reduce(0, rows, found, "amax", include_self=False)

    run, graphs = compiled(program)
    ends = fewer()
    for step in range(2 * KNOWN):
        if step == KNOWN:
            anew.clear()
        arguments = torch.randn(N, F), torch.randn(N, 2, F // 2), ends
        with torch.no_grad():
            assert_close(run(*arguments), program(*arguments))
    assert sequences(graphs[0]) == [2] and not anew
