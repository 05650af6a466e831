"""Fused ops that are called again: found without making their index tensors, and never stale."""

from __future__ import annotations

import contextvars
import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum
from insum import facts, memory
from insum.fusion import op, repeated
from insum.runtime import bound_launch, launch, ready
from insum.runtime.bound_launch import BoundLaunch

from .op_specs import spec
from .programs import E, F, N, compiled, graph_of

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("as_on_a_gpu")]
SPEC = spec("out[d[i],j] = x[s[i],j]", ("x",))
INTO = spec("out[d[i],j] += x[s[i],j]", ("x",))
#: Calls until an index tensor that comes back has its schedule, and calls like it are recognised.
KNOWN = facts.SEEN_AGAIN + 4


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that are made as if there had been none like them."""
    found: list[str] = []
    original = op._run_anew
    monkeypatch.setattr(repeated, "_alike", {})

    def run(mode: str, *rest: Any) -> Tensor:
        found.append(mode)
        return original(mode, *rest)

    monkeypatch.setattr(op, "_run_anew", run)
    return found


def fused(x: Tensor, edges: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.insum.fused.default(SPEC, [x, edges], [N, F])  # type: ignore[no-any-return]


def right(x: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros(N, F).index_add(0, edges[1], x[edges[0]])


def warm(edges: Tensor) -> None:
    for _ in range(KNOWN):
        x = torch.randn(N, F)
        assert_close(fused(x, edges), right(x, edges))


def test_what_comes_back_is_found_at_once(anew: list[str]) -> None:
    edges = graph_of()
    warm(edges)
    anew.clear()
    warm(edges)
    assert not anew


def test_edges_that_are_rows_of_a_larger_tensor(anew: list[str]) -> None:
    edges = torch.stack([graph_of(), graph_of(seed=1)])[1]
    warm(edges)
    anew.clear()
    warm(edges)
    assert not anew
    warm(edges.T.contiguous().T)  # other strides


def written_to(edges: Tensor) -> Tensor:
    return edges.copy_(graph_of(seed=7))


def written_to_a_row(edges: Tensor) -> Tensor:
    edges[1].copy_(graph_of(seed=7)[1])
    return edges


def exchanged(edges: Tensor) -> Tensor:
    edges.data = graph_of(seed=7)
    return edges


def set_to_another(edges: Tensor) -> Tensor:
    return edges.set_(graph_of(seed=7))  # type: ignore[call-overload, no-any-return]


def forgotten(edges: Tensor) -> Tensor:
    edges.data.copy_(graph_of(seed=7))
    insum.forget(edges)
    return edges


def another(edges: Tensor) -> Tensor:
    return graph_of(seed=7)


def freed(edges: Tensor) -> Tensor:
    storage = edges.untyped_storage().data_ptr()
    del edges
    made = [graph_of(seed=seed) for seed in range(7, 27)]
    return next((m for m in made if m.data_ptr() == storage), made[0])


@pytest.mark.parametrize(
    "change",
    [written_to, written_to_a_row, exchanged, set_to_another, forgotten, another, freed],
    ids=lambda one: one.__name__,
)
def test_nothing_stale(anew: list[str], change: Callable[[Tensor], Tensor]) -> None:
    edges = graph_of()
    warm(edges)
    anew.clear()
    held = [edges]
    del edges
    edges = change(held.pop())
    warm(edges)
    assert anew


def test_entries_of_parts() -> None:
    edges = graph_of()
    warm(edges)
    entry = memory.entry_of(edges)
    assert [entry.parts[((0, k),)] for k in range(2)] == [memory.known(edges[k]) for k in range(2)]
    edges[0, 0] = 3
    assert memory.known(edges) is None
    assert_close(fused(x := torch.randn(N, F), edges), right(x, edges))


def test_other_sizes_strides_and_settings(anew: list[str]) -> None:
    edges = graph_of()
    warm(edges)
    wide = torch.randn(N, 2 * F)
    assert_close(fused(wide[:, ::2], edges), right(wide[:, ::2], edges))
    double = torch.randn(N, F, dtype=torch.float64)
    assert_close(fused(double, edges), right(double.float(), edges).double(), atol=1e-5, rtol=0)
    anew.clear()
    torch.use_deterministic_algorithms(True)
    try:
        warm(edges)
        assert anew
    finally:
        torch.use_deterministic_algorithms(False)
    anew.clear()
    warm(edges)
    assert not anew


def test_into_what_is_there(anew: list[str]) -> None:
    edges, into = graph_of(), torch.ops.insum.fused_into_.default
    for step in range(2 * KNOWN):
        if step == KNOWN:
            anew.clear()
        x, out = torch.randn(N, F), torch.randn(N, F)
        expected, version = out + right(x, edges), out._version
        with torch.no_grad():
            into(out, INTO, [x, edges], [N, F])
        assert_close(out, expected)
        assert out._version > version
    assert not anew
    x = torch.randn(N, F)
    expected = x + right(x, edges)
    with torch.no_grad():
        into(x, INTO, [x, edges], [N, F])  # what is read is written to
    assert_close(x, expected)


def test_out_of_range_is_told_by_a_repeated_call(anew: list[str]) -> None:
    edges, bad = graph_of(), graph_of(seed=1)
    warm(edges)
    bad[0, 3] = N
    fused(torch.randn(N, F), bad)
    with pytest.raises(insum.IndexRangeError, match=f"is {N}"):
        fused(torch.randn(N, F), edges)
    warm(edges)


def test_the_host_looks_at_every_call_where_it_is_to(anew: list[str]) -> None:
    edges = graph_of()
    with insum.settings(check="always"):
        warm(edges)
        anew.clear()
        warm(edges)
    assert len(anew) == KNOWN


def test_in_the_thread_of_a_backward_pass(anew: list[str]) -> None:
    """Compiled graphs save detached views."""

    def program(x: Tensor, edges: Tensor) -> Tensor:
        return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]])

    run, _ = compiled(program)
    edges = torch.cat([graph_of(), graph_of(seed=1)], 1)[:, :E]
    x = torch.randn(N, F, requires_grad=True)

    def step() -> None:
        got, want = (torch.autograd.grad(f(x, edges).square().sum(), x)[0] for f in (run, program))
        assert_close(got, want)

    for _ in range(KNOWN):
        step()
    anew.clear()
    step()
    other = threading.Thread(target=contextvars.copy_context().run, args=(step,))
    other.start()
    other.join()
    assert not anew


def test_nothing_is_kept_alive() -> None:
    edges = graph_of()
    warm(edges)
    before = memory.report().entries
    del edges
    gc.collect()
    assert memory.report().entries <= before - 3


def test_few_weights_are_constants_only_where_edges_are_promised_to_stay(anew: list[str]) -> None:
    """Calls with them are found at once; what a promise decides is decided anew."""
    text = spec("out[d[i],j] = w[i] * x[s[i],j]", ("w", "x"))
    edges, w = graph_of(), torch.randn(E)

    def again() -> None:
        for _ in range(KNOWN):
            x = torch.randn(N, F)
            got = torch.ops.insum.fused.default(text, [w, x, edges], [N, F])
            assert_close(got, torch.zeros(N, F).index_add(0, edges[1], w[:, None] * x[edges[0]]))

    again()
    anew.clear()
    again()
    assert not anew
    insum.unchanging(edges)
    again()
    assert anew  # its values may be code


def test_at_most_so_many(anew: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_PARTS", 1)
    for seed in range(3):
        warm(graph_of(seed=seed))
    assert {len(known) for known in repeated._alike.values()} == {1}


def test_what_follows_from_edges_is_found_with_them(anew: list[str]) -> None:
    """Weights by degrees are computed once, and again when the edges change."""
    long = 1200  # fewer might be constants

    def program(x: Tensor, edges: Tensor) -> Tensor:
        degree = x.new_zeros(N).index_add(0, edges[1], x.new_ones(edges.shape[1]))
        weights = (1 / degree.clamp(min=1)).sqrt()[edges[0]]
        return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]] * weights[:, None])

    run, _ = compiled(program)
    edges, x = graph_of(edges=long), torch.randn(N, F, requires_grad=True)

    def step() -> None:
        for got, want in zip(*((f(x, edges), gradient(f)) for f in (run, program))):
            assert_close(got, want, rtol=1e-4, atol=1e-4)

    def gradient(function: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(function(x, edges).square().sum(), x)[0]

    for _ in range(KNOWN):
        step()
    anew.clear()
    step()
    assert not anew
    edges[1, : long // 2] = 3
    step()
    assert anew
    edges.data = graph_of(edges=long, seed=5)
    step()


# --- launches by address, as on a GPU -------------------------------------------------------------


def tensors() -> list[Tensor]:
    return [one for one in gc.get_objects() if type(one) is Tensor]


def tensor_at(address: int, kind: str, earlier: list[Tensor]) -> Tensor:
    """What lies at an address, up to the end of the storage there."""
    widths = {"*fp32": torch.float32, "*i64": torch.int64, "*i32": torch.int32}
    for one in tensors() + earlier:
        try:
            storage = one.untyped_storage()
        except (NotImplementedError, RuntimeError):  # other tests leave sparse ones behind
            continue
        start, dtype = storage.data_ptr(), widths[kind]
        if one.is_cpu and start <= address < start + storage.nbytes():
            first, width = (address - start) // dtype.itemsize, dtype.itemsize
            count = storage.nbytes() // width - first
            return torch.empty(0, dtype=dtype).set_(storage, first, (count,), (1,))  # type: ignore[call-overload, no-any-return]
    raise AssertionError(f"nothing lies at {address}")


@pytest.fixture
def by_address(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kernels are passed addresses, and what lies there is interpreted; how many were launched."""
    launched: list[int] = []
    gc.unfreeze()
    earlier = tensors()
    gc.freeze()  # the millions of objects of other tests are not looked through for each argument
    names = {**vars(launch), "interpreting": lambda: False}
    for module in (bound_launch, ready):
        monkeypatch.setattr(module, "launch", SimpleNamespace(**names))
    monkeypatch.setattr(repeated, "interpreting", lambda: False)

    def compiled(self: BoundLaunch, unaligned: int) -> Callable[[int, list[Any]], None]:
        def launch(programs: int, arguments: list[Any]) -> None:
            given = list(arguments)
            for place, _, _ in self.pointers:
                given[place] = tensor_at(given[place], self.types[place], earlier)
            launched.append(programs)
            self.launch.function[(programs,)](*given)

        return launch

    monkeypatch.setattr(BoundLaunch, "compiled", compiled)
    return launched


def test_addresses_of_parts_and_results(anew: list[str], by_address: list[int]) -> None:
    """What a repeated call puts among the arguments of a kernel are the right places."""
    whole = torch.stack([graph_of(), graph_of(seed=1)])
    edges, into = whole[1], torch.ops.insum.fused_into_.default
    warm(edges)
    anew.clear()
    by_address.clear()
    warm(edges)
    assert not anew and len(by_address) >= KNOWN
    for step in range(2 * KNOWN):
        x, out = torch.randn(N + 1, F)[1:], torch.randn(N, F)
        expected = out + right(x, edges)
        with torch.no_grad():
            into(out, INTO, [x, edges], [N, F])
        assert_close(out, expected)
        anew = anew if step > KNOWN else []
    assert not anew
    edges[1].copy_(graph_of(seed=7)[1])
    warm(edges)


def test_addresses_of_what_is_computed_and_of_workspaces(by_address: list[int]) -> None:
    long = 1200

    def program(x: Tensor, edges: Tensor) -> Tensor:
        degree = x.new_zeros(N).index_add(0, edges[1], x.new_ones(edges.shape[1]))
        weights = (1 / degree.clamp(min=1)).sqrt()[edges[0]]
        return x.new_zeros(N, F).index_add(0, edges[1], x[edges[0]] * weights[:, None])

    run, _ = compiled(program)
    edges = graph_of(edges=long)
    for step in range(2 * KNOWN):
        if step in (KNOWN, KNOWN + 3):
            edges[1, : long // step] = 3
        x = torch.randn(N, F)
        with torch.no_grad():
            assert_close(run(x, edges), program(x, edges), rtol=1e-4, atol=1e-4)
    assert by_address


# --- what is prepared -----------------------------------------------------------------------------


def test_several_graphs_in_turn(anew: list[str]) -> None:
    """Each index tensor has what was prepared for it, the old ones among new ones, too."""
    graphs = [graph_of(seed=seed) for seed in range(3)]
    for edges in graphs:
        warm(edges)
    anew.clear()
    for seed in range(12):
        fresh = graph_of(seed=seed % 5 + 10)
        for edges in (*graphs, fresh):
            x = torch.randn(N, F)
            assert_close(fused(x, edges), right(x, edges))
        graphs[seed % 3].add_(1).remainder_(N)
    assert anew


def test_views_that_are_made_anew(anew: list[str]) -> None:
    """Another view object of the same memory is the same index tensor."""
    whole = torch.stack([graph_of(), graph_of(seed=1)])
    warm(whole[1])
    anew.clear()
    for _ in range(3):
        x, edges = torch.randn(N, F), whole[1]
        assert_close(fused(x, edges), right(x, edges))
    assert not anew
    x, other = torch.randn(N, F), whole[0]  # of the same sizes and strides, in the same storage
    assert_close(fused(x, other), right(x, other))


def test_moved_within_one_storage(anew: list[str]) -> None:
    whole = torch.stack([graph_of(), graph_of(seed=1)])
    edges = torch.empty(0, dtype=torch.int64)
    edges.data = whole[0]
    warm(edges)
    edges.data = whole[1]
    warm(edges)


def test_forgotten_while_another_thread_launches(anew: list[str]) -> None:
    """What is not remembered any more is not launched, though somebody holds it still."""
    edges = graph_of()
    warm(edges)
    (known,) = repeated._alike[SPEC]
    (run,) = known.prepared.values()
    held = run.launches[0].ready()
    assert held is not None
    edges.data.copy_(graph_of(seed=7))
    insum.forget(edges)
    warm(edges)
    assert anew and held is not None


def test_prepared_calls_are_few_and_keep_nothing_alive(
    anew: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeated, "MOST_PREPARED", 2)
    for seed in range(4):
        edges = graph_of(seed=seed)
        warm(edges)
    (known,) = repeated._alike[SPEC]
    assert len(known.prepared) <= repeated.MOST_PREPARED
    runs = list(known.prepared.values())
    assert any(run.launches[0].ready() is not None for run in runs)
    del edges
    gc.collect()
    assert all(run.launches[0].ready() is None for run in runs)
