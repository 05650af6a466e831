"""Fused programs on a GPU: values, gradients, memory, kernels, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import insum.fusion
from insum import facts
from insum.fusion import op

from .programs import graph_of

pytestmark = pytest.mark.gpu

NODES, EDGES, WIDTH = 2_000, 60_000, 64


@pytest.fixture(autouse=True)
def small_things_too() -> Iterator[None]:
    """By itself fusion leaves to Inductor what is as small as this."""
    with insum.settings(fuse="always"):
        yield


def aggregate(x: Tensor, w: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * w[:, None])


def convolution(x: Tensor, w: Tensor, *pairs: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for z, (i, o) in enumerate(pairs):
        out.index_add_(0, o, x[i] @ w[z])
    return out


def fused(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="insum", **more)


def gradients(
    function: Callable[..., Tensor], leaves: list[Tensor], *rest: Any
) -> tuple[Tensor, ...]:
    out = function(*leaves, *rest)
    # In float16, whatever the program computes in: the reference then gets the same values.
    upstream = (
        torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64)
        .to(torch.float16)
        .to(out.dtype)
        .reshape(out.shape)
    )
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], tolerance: float = 1e-4) -> None:
    for a, b in zip(got, want, strict=True):
        assert ((a.double() - b).norm() / b.norm()).item() < tolerance


def drawn(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    leaves = [
        torch.randn(NODES, WIDTH, device="cuda", dtype=dtype),
        torch.randn(EDGES, device="cuda", dtype=dtype),
    ]
    return [t.requires_grad_() for t in leaves], graph_of(NODES, EDGES).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_per_edge(dtype: torch.dtype) -> None:
    leaves, edges = drawn(dtype)
    want = gradients(aggregate, [t.detach().double().requires_grad_() for t in leaves], edges)
    run = fused(aggregate, fullgraph=True)
    for _ in range(4):  # the long way, the short way
        close(gradients(run, leaves, edges), want, 1e-4 if dtype == torch.float32 else 5e-3)
    assert len(insum.fusion.report().fused) == 3


def test_new_edges_at_each_call() -> None:
    leaves, _ = drawn()
    run = fused(aggregate, fullgraph=True)
    for seed in range(6):
        edges = graph_of(NODES, EDGES, seed).cuda()
        edges[0, ::7] -= NODES
        close(
            gradients(run, leaves, edges),
            gradients(aggregate, [t.detach().double().requires_grad_() for t in leaves], edges),
        )


def test_steps_of_a_convolution() -> None:
    pairs = [
        torch.stack([torch.randperm(NODES)[:1500], torch.randperm(NODES)[:1500]]).cuda()
        for _ in range(27)
    ]
    leaves = [
        torch.randn(NODES, WIDTH, device="cuda").requires_grad_(),
        (torch.randn(27, WIDTH, WIDTH, device="cuda") / 8).requires_grad_(),
    ]
    want = gradients(convolution, [t.detach().double().requires_grad_() for t in leaves], *pairs)
    run = fused(convolution, fullgraph=True)
    for _ in range(3):
        close(gradients(run, leaves, *pairs), want)
    assert len(insum.fusion.report().fused) == 3, "forward, and backward for inputs and weights"


def test_memory_is_that_of_the_nodes() -> None:
    leaves, edges = drawn()
    run = fused(aggregate, fullgraph=True)
    upstream = torch.randn(NODES, WIDTH, device="cuda")
    step = lambda: torch.autograd.grad(run(*leaves, edges), leaves, upstream)
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = step()
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert held and used < 4 * EDGES * WIDTH / 4  # far below one tensor of messages


def test_one_kernel_per_step() -> None:
    leaves, edges = drawn()
    run = fused(aggregate, fullgraph=True)
    with torch.no_grad():
        for _ in range(8):  # tensors that come back are looked at, without waiting for it
            run(*leaves, edges)
            torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run(*leaves, edges)
            torch.cuda.synchronize()
    kernels = [
        e
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and "memset" not in e.name.lower()
    ]
    # rows of different length launch apart, long ones are put together
    assert 1 <= len(kernels) <= 3, [e.name for e in kernels]


@pytest.mark.parametrize("count", [EDGES, EDGES - 1])
@pytest.mark.parametrize("view", [False, True])
def test_the_backward_pass_knows_its_edges(view: bool, count: int) -> None:
    """Views that autograd saves as new objects, and rows whose address is not aligned: no index is
    looked at again, no kernel loaded again.
    """
    leaves, edges = drawn()
    leaves[1] = leaves[1].detach()[:count].requires_grad_()
    edges = torch.stack([*edges, edges[0]])[:2, :count] if view else edges[:, :count].clone()
    run = fused(aggregate, fullgraph=True)
    want = gradients(aggregate, [t.detach().double().requires_grad_() for t in leaves], edges)
    for _ in range(5):
        close(gradients(run, leaves, edges), want)
    upstream = torch.randn(NODES, WIDTH, device="cuda")
    out = run(*leaves, edges)
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        torch.autograd.grad(out, leaves, upstream)
        torch.cuda.synchronize()
    names = [e.name for e in profile.events()]
    assert not [
        n
        for n in names
        if any(
            word in n.lower()
            for word in ("aminmax", "remainder", "sort", "moduleload", "librarygetkernel")
        )
    ], names


def test_a_warm_step_runs_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its backward pass, in a thread of autograd's."""
    anew: list[str] = []
    original = op._run_anew

    def run_anew(mode: str, target: Any, text: str, *rest: Any) -> Tensor:
        anew.append(text)
        return original(mode, target, text, *rest)

    monkeypatch.setattr(op, "_run_anew", run_anew)
    leaves, edges = drawn()
    run = fused(aggregate, fullgraph=True)
    for _ in range(facts.SEEN_AGAIN + 8):
        gradients(run, leaves, edges)
        torch.cuda.synchronize()  # numbers that the host waits for arrive
    anew.clear()
    gradients(run, leaves, edges)
    assert not anew


def test_replayed_as_cuda_graphs() -> None:
    """Other edges in the same place: nothing found out about the first ones may be used."""
    leaves, _ = drawn()
    run = fused(aggregate, mode="reduce-overhead", fullgraph=True)
    x, w = (t.detach() for t in leaves)
    with insum.settings(fuse="always"):  # by itself it would leave this to Inductor
        for seed in range(8):
            edges = graph_of(NODES, EDGES, seed % 4).cuda()
            torch.compiler.cudagraph_mark_step_begin()
            assert_close(run(x, w, edges).clone(), aggregate(x, w, edges), rtol=1e-3, atol=1e-3)
    assert insum.fusion.report().fused


def test_the_default_backend_with_the_pass() -> None:
    leaves, edges = drawn()
    with insum.fusion.enabled():
        close(
            gradients(torch.compile(aggregate), leaves, edges),
            gradients(aggregate, [t.detach().double().requires_grad_() for t in leaves], edges),
        )


# --- masks, degrees, relations --------------------------------------------------------------------


def relations(x: Tensor, w: Tensor, edges: Tensor, kinds: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], w.shape[2])
    for r in range(w.shape[0]):
        src, dst = edges[:, kinds == r]
        degree = x.new_zeros(x.shape[0]).index_add(0, dst, x.new_ones(dst.shape[0])).clamp(min=1)
        out = out + (torch.zeros_like(x).index_add(0, dst, x[src]) / degree[:, None]) @ w[r]
    return out


def related() -> tuple[list[Tensor], Tensor, Tensor]:
    leaves = [
        torch.randn(NODES, WIDTH, device="cuda").requires_grad_(),
        (torch.randn(4, WIDTH, WIDTH, device="cuda") / 8).requires_grad_(),
    ]
    return leaves, graph_of(NODES, EDGES).cuda(), torch.randint(0, 4, (EDGES,), device="cuda")


def test_relations_wait_for_nothing() -> None:
    """Nor does the backward pass; and the whole step can be recorded as a CUDA graph."""
    leaves, edges, kinds = related()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = fused(relations, fullgraph=True)
        want = gradients(
            relations, [t.detach().double().requires_grad_() for t in leaves], edges, kinds
        )
        for _ in range(4):
            close(gradients(run, leaves, edges, kinds), want)
    assert len(insum.fusion.report().fused) == 2 and insum.fusion.report().once
    upstream = (
        torch.linspace(-1, 1, NODES * WIDTH, device="cuda", dtype=torch.float64)
        .to(torch.float16)
        .float()
        .reshape(NODES, WIDTH)
    )
    step = lambda: torch.autograd.grad(run(*leaves, edges, kinds), leaves, upstream)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        held = step()
    for t in held:
        t.fill_(torch.nan)
    graph.replay()
    close(held, want[1:])


def test_edges_that_are_written_to() -> None:
    leaves, edges, kinds = related()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = fused(relations, fullgraph=True)
        for step in range(5):
            if step > 2:
                edges[:, : EDGES // 2].random_(0, NODES)
                kinds[::3] = step % 4
            close(
                gradients(run, leaves, edges, kinds),
                gradients(
                    relations, [t.detach().double().requires_grad_() for t in leaves], edges, kinds
                ),
            )


def test_other_numbers_of_edges_at_each_call() -> None:
    """The kernels of the first sizes serve the others: sizes that 16 divides or not, rows that are
    aligned or not.
    """
    leaves, _ = drawn()
    run = fused(aggregate, fullgraph=True, dynamic=True, options={"insum.fuse": "always"})
    for seed in range(12):
        edges = graph_of(NODES, EDGES - 37 * seed, seed).cuda()
        edges[0, ::7] -= NODES
        own = [leaves[0], torch.randn(edges.shape[1], device="cuda").requires_grad_()]
        close(
            gradients(run, own, edges),
            gradients(aggregate, [t.detach().double().requires_grad_() for t in own], edges),
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [1, 1023, 4096, 100_003])
def test_every_place_is_looked_at(count: int, dtype: torch.dtype) -> None:
    for shift in (0, 1):  # an address that is not aligned
        index = torch.randint(-50, 50, (count + shift,), device="cuda").to(dtype)[shift:]
        x = torch.randn(50, device="cuda")
        for bad in (50, -1):
            wrong = index.abs() % 50
            wrong[count // 2] = bad
            insum.insum("y[e] = x[i[e]]", x=x, i=wrong)
            with pytest.raises(insum.IndexRangeError, match=rf"i\[{count // 2}\] is {bad}"):
                insum.synchronize()
    insum.synchronize()


def failure(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "RGCNConv", "FastRGCNConv"])
def test_layers_of_pyg(name: str) -> None:
    pyg: Any = pytest.importorskip(
        "torch_geometric.nn", reason="torch_geometric is not installed: PyG's layers are left out"
    )
    types = torch.randint(0, 3, (EDGES,), device="cuda")
    make: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
        "GCNConv": (lambda: pyg.GCNConv(WIDTH, WIDTH), ()),
        "SAGEConv": (lambda: pyg.SAGEConv(WIDTH, WIDTH), ()),
        "GATConv": (lambda: pyg.GATConv(WIDTH, 16, heads=4), ()),
        "RGCNConv": (lambda: pyg.RGCNConv(WIDTH, WIDTH, 3), (types,)),
        "FastRGCNConv": (lambda: pyg.FastRGCNConv(WIDTH, 16, 3), (types,)),
    }
    build, rest = make[name]
    layer = build().cuda()
    edges = graph_of(NODES, EDGES).cuda()
    x = torch.randn(NODES, WIDTH, device="cuda")
    leaves = [x.requires_grad_()]
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        try:
            run = fused(layer, options={"insum.fuse": "always"})
            got = [gradients(run, leaves, edges, *rest) for _ in range(4)]
        except Exception:
            torch._dynamo.reset()
            if reason := failure(lambda: gradients(torch.compile(layer), leaves, edges, *rest)):
                pytest.skip(f"torch.compile alone fails on {name} too: {reason}")
            raise
    want = gradients(layer.double(), [x.detach().double().requires_grad_()], edges, *rest)
    for one in got:
        close(one, want, 1e-3)
    assert insum.fusion.report().fused
