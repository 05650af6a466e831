"""Index tensors that are new at each call, as in mini-batches: other sizes each time, the kernels
stay. In Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum
from insum.call.prepared import kernels_look_on
from insum.plan.sizes import power_of_two
from kernels import watch_programs

from .op_specs import spec
from .programs import F, compiled, counts, graph_of

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("as_on_a_gpu")]


def weighted(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    return x.new_zeros(x.shape).index_add(0, edges[1], x[edges[0]] * w[:, None])


def multiplied(x: Tensor, m: Tensor, edges: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], m.shape[1]).index_add(0, edges[1], x[edges[0]] @ m)


def dotted(x: Tensor, y: Tensor, edges: Tensor) -> Tensor:
    return (x[edges[0]] * y[edges[1]]).sum(1)


def added(x: Tensor, out: Tensor, edges: Tensor) -> Tensor:
    return out.index_add(0, edges[1], x[edges[0]])


SIZES = [
    (20, 300),
    (20, 300),
    (20, 300),
    (24, 333),
    (31, 297),
    (16, 160),
    (17, 500),
    (20, 301),
    (9, 260),
]
#: Sizes that share a power of two share their programs. The first call of all goes through the
#: dispatcher, under which tensors are of another kind.
CLASSES = len({(power_of_two(nodes), power_of_two(edges)) for nodes, edges in SIZES}) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("program", [weighted, multiplied, dotted, added])
def test_other_sizes(program: Any, dtype: torch.dtype, built: list[object]) -> None:
    run, graphs = compiled(program, dynamic=True)
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    m, plans = torch.randn(F, 16).to(dtype), 0
    for step, (nodes, edges) in enumerate(2 * SIZES):
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
        plans = len(built) if step < len(SIZES) else plans
    assert counts(graphs) == [1]
    assert len(built) == plans <= CLASSES


def test_sizes_that_tiles_divide(built: list[object]) -> None:
    """They take the kernel that masks, as the others do."""
    run, _ = compiled(multiplied, dynamic=True)
    m, plans = torch.randn(F, 16), []
    for step, edges in enumerate((1000, 1001, 1002, 1024, 1025, 2048, 512)):
        x, given = torch.randn(20, F), graph_of(20, edges, seed=step)
        assert_close(run(x, m, given), multiplied(x, m, given), rtol=1e-4, atol=1e-3)
        plans.append(len(built))
    assert plans == [1, 1, 1, 1, 2, 2, 3], "one for each power of two"


def test_one_point() -> None:
    """A tile of one row is always full."""
    text = spec("out[d[i],j] = x[s[i],j] * w[i]", ("x", "w"), wraps="sd")
    for step in range(6):
        x, w, edges = torch.randn(20, F), torch.randn(1), torch.tensor([[step], [3]])
        expected = torch.zeros(20, F).index_put(
            (edges[1],), x[edges[0]] * w[:, None], accumulate=True
        )
        assert_close(torch.ops.insum.fused(text, [x, w, edges], [20, F]), expected)


def test_gradients_with_other_sizes(built: list[object]) -> None:
    run, _ = compiled(weighted, dynamic=True)
    plans = 0
    for step, (nodes, edges) in enumerate(2 * SIZES):
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
        plans = len(built) if step < len(SIZES) else plans
    assert len(built) == plans <= 3 * CLASSES, "one statement forward, two backward"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_index_tensors_that_do_not_lie_in_one_piece(
    dtype: torch.dtype, built: list[object]
) -> None:
    run, _ = compiled(weighted, dynamic=True)
    plans = 0
    for step, (nodes, edges) in enumerate(2 * SIZES):
        x, w = torch.randn(nodes, F), torch.randn(2 * edges)[::2]
        given = graph_of(nodes, edges, seed=step)
        given[0, ::5] -= nodes
        given = given.to(dtype).t().contiguous().t()
        assert_close(run(x, w, given), weighted(x, w, given), rtol=1e-4, atol=1e-4)
        plans = len(built) if step < len(SIZES) else plans
    assert len(built) == plans <= CLASSES


def test_sizes_that_do_not_fit_together() -> None:
    """They are an error as before, and not read beyond their end."""
    run, _ = compiled(lambda x, y, edges: dotted(x, y, edges + (x[0, 0] > 99)), dynamic=True)
    for step in range(4):
        run(torch.randn(20, F), torch.randn(20, F), graph_of(20, 100 + step, seed=step))
    bad = graph_of(20, 110)
    bad[0, 7] = 19
    result = run(torch.randn(18, F), torch.randn(20, F), bad)
    wrong = bad[0] >= 18
    assert result[wrong].isnan().all() and not result[~wrong].isnan().any()
    with pytest.raises(insum.IndexRangeError, match="which has size 18"):
        insum.synchronize()


def test_settings_that_change_between_calls(built: list[object]) -> None:
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
    looks: list[bool] = []
    watch_programs(monkeypatch, looks)
    run, _ = compiled(weighted, dynamic=True)
    for step in range(5):
        x, w, edges = (
            torch.randn(20, F).requires_grad_(),
            torch.randn(90 + step).requires_grad_(),
            graph_of(20, 90 + step, seed=step),
        )
        torch.autograd.grad(run(x, w, edges).sum(), (x, w))
        if step:  # the first call goes through the dispatcher, where nothing can be remembered
            assert looks == [True, False, False], "new edges at every step"
        looks.clear()


# --- the kernel that checks -----------------------------------------------------------------------


def gathered(index: Tensor, wraps: bool) -> Tensor:
    """One of 50 numbers for each index."""
    text = spec("out[i] = x[s[i]]", ("x",), wraps="s" if wraps else "", views="s", sizes="")
    result: Tensor = torch.ops.insum.fused(text, [torch.arange(50.0), index[None]], [])
    return result


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [1, 16, 1023, 1025, 5000])
def test_values_in_range(count: int, dtype: torch.dtype) -> None:
    index = torch.randint(0, 50, (count,)).to(dtype)
    assert torch.equal(gathered(index, False), index.float())
    index = index.clone()
    index[::3] -= 50
    assert torch.equal(gathered(index, True), torch.remainder(index, 50).float())
    insum.synchronize()  # which finds nothing


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
    index = torch.zeros(2048, dtype=torch.int64)
    index[at] = value
    result = gathered(index, wraps)
    assert result.isnan().nonzero().tolist() == ([] if fine else [[at]])
    if fine:
        insum.synchronize()
        return
    with pytest.raises(insum.IndexRangeError, match=rf"s\[{at}\] is {value}, .* has size 50"):
        insum.synchronize()


def test_where_the_kernel_is_used() -> None:
    assert not kernels_look_on(torch.device("cpu")), "on the CPU torch's own operations look"
    assert kernels_look_on(torch.device("cuda"))
