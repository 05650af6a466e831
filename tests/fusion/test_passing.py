"""Index tensors that are new at each call, as in mini-batches: other sizes each time, the kernels
stay. In Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum
from insum import memory
from insum.fusion import indices, op, ways
from insum.runtime import bounds, fused, launch

from .programs import F, compiled, counts, graph_of

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (indices, op):
        monkeypatch.setattr(module, "looks_are_free", lambda tensor: False)
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    memory.forget()
    for table in (
        ways._ways,
        ways._paths,
        ways._stretches,
        indices._last,
        indices._strangers,
    ):
        table.clear()
    with insum.settings(backend="fused", require_fused=True):
        yield


def weighted(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    return x.new_zeros(x.shape).index_add(0, edges[1], x[edges[0]] * w[:, None])


def multiplied(x: Tensor, m: Tensor, edges: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], m.shape[1]).index_add(0, edges[1], x[edges[0]] @ m)


def dotted(x: Tensor, y: Tensor, edges: Tensor) -> Tensor:
    return (x[edges[0]] * y[edges[1]]).sum(1)


def added(x: Tensor, out: Tensor, edges: Tensor) -> Tensor:
    return out.index_add(0, edges[1], x[edges[0]])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is planned and built from now on."""
    made: list[Any] = []
    original = fused._build
    monkeypatch.setattr(
        fused,
        "_build",
        lambda problem, *rest: (made.append(problem.extents), original(problem, *rest))[1],
    )
    return made


SIZES = [
    (20, 100),
    (20, 100),
    (20, 100),
    (24, 133),
    (31, 97),
    (16, 64),
    (17, 200),
    (20, 101),
    (9, 80),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("program", [weighted, multiplied, dotted, added])
def test_other_sizes(program: Any, dtype: torch.dtype, built: list[Any]) -> None:
    run, graphs = compiled(program, dynamic=True)
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    m = torch.randn(F, 16).to(dtype)
    plans = 0
    for step, (nodes, edges) in enumerate(SIZES):
        x = torch.randn(nodes, F).to(dtype)
        second = {
            weighted: torch.randn(edges),
            multiplied: m,
            dotted: torch.randn(nodes, F),
            added: torch.randn(nodes, F),
        }[program].to(dtype)
        given = graph_of(nodes, edges, seed=step)
        given[0, ::5] -= nodes
        assert_close(run(x, second, given), program(x, second, given), **tolerance)
        plans = len(built) if step == 2 else plans
    assert counts(graphs) == [1]
    assert len(built) == plans


def test_sizes_that_tiles_divide(built: list[Any]) -> None:
    """They take the kernel that masks, as the others do."""
    run, _ = compiled(multiplied, dynamic=True)
    m, plans = torch.randn(F, 16), 0
    for step, edges in enumerate((1000, 1001, 1002, 1024, 1025, 2048, 512)):
        x, given = torch.randn(20, F), graph_of(20, edges, seed=step)
        assert_close(run(x, m, given), multiplied(x, m, given), rtol=1e-4, atol=1e-3)
        plans = len(built) if step == 2 else plans
    assert len(built) == plans


def test_one_point() -> None:
    """A tile of one row is always full."""
    spec = op.Spec(
        "out[d[i],j] = x[s[i],j] * w[i]",
        ("x", "w", "e"),
        (("d", "e", ((0, 1),)), ("s", "e", ((0, 0),))),
        "out#2",
        frozenset("sd"),
        frozenset(),
        (),
    )
    for step in range(6):
        x, w, edges = torch.randn(20, F), torch.randn(1), torch.tensor([[step], [3]])
        expected = torch.zeros(20, F).index_put(
            (edges[1],), x[edges[0]] * w[:, None], accumulate=True
        )
        assert_close(torch.ops.insum.fused(str(spec), [x, w, edges], [20, F]), expected)


def test_gradients_with_other_sizes(built: list[Any]) -> None:
    run, _ = compiled(weighted, dynamic=True)
    plans = 0
    for step, (nodes, edges) in enumerate(SIZES):
        x, w, given = (
            torch.randn(nodes, F).requires_grad_(),
            torch.randn(edges).requires_grad_(),
            graph_of(nodes, edges, seed=step),
        )
        result, expected = run(x, w, given), weighted(x, w, given)
        assert_close(result, expected, rtol=1e-4, atol=1e-4)
        upstream = torch.randn_like(expected)
        for a, b in zip(
            torch.autograd.grad(result, (x, w), upstream),
            torch.autograd.grad(expected, (x, w), upstream),
            strict=True,
        ):
            assert_close(a, b, rtol=1e-4, atol=1e-4)
        plans = len(built) if step == 2 else plans
    assert len(built) == plans


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_index_tensors_that_do_not_lie_in_one_piece(dtype: torch.dtype, built: list[Any]) -> None:
    """What is wrapped is a copy, laid out in another way than the tensor that was passed."""
    run, _ = compiled(weighted, dynamic=True)
    plans = 0
    for step, (nodes, edges) in enumerate(SIZES):
        x, w = torch.randn(nodes, F), torch.randn(2 * edges)[::2]
        given = graph_of(nodes, edges, seed=step)
        given[0, ::5] -= nodes
        given = given.to(dtype).t().contiguous().t()
        assert_close(run(x, w, given), weighted(x, w, given), rtol=1e-4, atol=1e-4)
        plans = len(built) if step == 2 else plans
    assert len(built) == plans


def test_sizes_that_do_not_fit_together() -> None:
    """They are an error as before, and not read beyond their end."""
    run, _ = compiled(lambda x, y, edges: dotted(x, y, edges + (x[0, 0] > 99)), dynamic=True)
    for step in range(4):
        run(torch.randn(20, F), torch.randn(20, F), graph_of(20, 100 + step, seed=step))
    bad = graph_of(20, 110)
    bad[0, 7] = 19
    with pytest.raises(RuntimeError, match="out of range"):
        run(torch.randn(18, F), torch.randn(20, F), bad)


def test_settings_that_change_between_calls(built: list[Any]) -> None:
    run, _ = compiled(weighted, dynamic=True)
    call = lambda edges, seed: run(
        torch.randn(20, F), torch.randn(edges), graph_of(20, edges, seed=seed)
    )
    for step in range(5):
        call(100 + step, step)
    plans = len(built)
    with insum.settings(prefetch=False):
        call(110, 7)
    assert len(built) == plans + 1


def test_the_forward_pass_has_checked_for_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    original = indices._looked_at
    monkeypatch.setattr(
        indices, "_looked_at", lambda name, *rest: (looked.append(name), original(name, *rest))[1]
    )
    run, _ = compiled(weighted, dynamic=True)
    for step in range(5):
        x, w, edges = (
            torch.randn(20, F).requires_grad_(),
            torch.randn(90 + step).requires_grad_(),
            graph_of(20, 90 + step, seed=step),
        )
        before = len(looked)
        torch.autograd.grad(run(x, w, edges).sum(), (x, w))
    assert len(looked) - before == 2, "one for each row of the edges"


# --- the kernel that checks -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [1, 16, 1023, 1025, 5000])
def test_values_in_range(count: int, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 50, (count,)).to(dtype)
    flag = torch.ones((), dtype=torch.int32)
    assert bounds.look(tensor, 50, False, flag) is tensor and flag == 1
    tensor[::3] -= 50
    wrapped = bounds.look(tensor, 50, True, flag)
    assert (
        flag == 1
        and wrapped.dtype == torch.int64
        and torch.equal(wrapped, torch.remainder(tensor.long(), 50))
    )


@pytest.mark.parametrize(
    ("value", "wraps", "fine"),
    [
        (50, False, False),
        (-1, False, False),
        (50, True, False),
        (-51, True, False),
        (-50, True, True),
        (49, True, True),
    ],
)
@pytest.mark.parametrize("at", [0, 2047])
def test_one_value(at: int, value: int, wraps: bool, fine: bool) -> None:
    tensor = torch.zeros(2048, dtype=torch.int64)
    tensor[at] = value
    flag = torch.ones((), dtype=torch.int32)
    bounds.look(tensor, 50, wraps, flag)
    assert bool(flag) == fine


def test_where_the_kernel_is_used() -> None:
    assert launch.interpreting() and not bounds.is_for(torch.zeros(3, dtype=torch.int64)), (
        "on the CPU torch's own operations look"
    )
    assert bounds.flag(torch.device("cpu")) == 1 and bounds.flag(
        torch.device("cpu")
    ) is bounds.flag(torch.device("cpu"))
