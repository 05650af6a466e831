"""What a warm call costs on the host, counted in Python calls rather than in time, which depends on
the machine. Launches are stubbed: nothing is computed.
"""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import insum
from insum import facts, memory
from insum.bench.equivariant import inputs as products_along_edges
from insum.formats import GroupCOO
from insum.fusion.op import Spec
from insum.nn import (
    FullyConnectedTensorProduct,
    GATConv,
    Gate,
    GCNConv,
    GraphConv,
    RelationalConv,
    SAGEConv,
    SparseConv3d,
    SparseLinear,
    SparseTensor,
    TensorProductConv,
)
from insum.nn.models import MINKUNET18, MinkUNet
from insum.nn.patterns import arrays_of
from insum.runtime.bound_launch import BoundLaunch
from insum.runtime.build_product import PIECES
from insum.runtime.handwritten.kernel import Handwritten
from insum.runtime.handwritten.looking import looked_at
from insum.runtime.handwritten.reaching import Ranked
from insum.together import results_of
from kernels import ONLY_FUSED

pytestmark = pytest.mark.interpreter
STATEMENT = "y[d[e],f] = w[e] * x[s[e],f]"
WARM = 30
#: Calls of Python functions, torch's included, of a forward call; and of our own in a backward
#: pass, for each statement that is derived.
FORWARD, BACKWARD = 17, 18
#: Of our own in a fused op, into a new tensor and into one that is there.
FUSED, FUSED_INTO = 8, 10
NONE: frozenset[str] = frozenset()


#: What was launched.
launched: list[str] = []


@pytest.fixture(autouse=True)
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, without launching."""
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})

    def interpret(self: BoundLaunch, *_: Any) -> None:
        launched.append("pieces" if self.launch.kernel.name.endswith(PIECES) else "generated")

    monkeypatch.setattr(BoundLaunch, "interpret", interpret)
    launched.clear()
    memory.forget()
    with insum.settings(**ONLY_FUSED):
        yield


def python_calls(function: Callable[[], Any], below: str = "") -> Counter[str]:
    """How often each Python function is called, but for those of this file; ``below``: only those
    of a folder.
    """
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file != __file__ and file.startswith(below):
            found[frame.f_code.co_name] += 1

    gc.disable()  # what is called when something of other tests is freed is not counted
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return found


def drawn(edges: int = 1000) -> dict[str, Tensor]:
    s, d = torch.randint(0, 200, (2, edges)).unbind()
    return {"d": d, "s": s, "w": torch.randn(edges), "x": torch.randn(200, 16)}


def called(values: dict[str, Tensor]) -> Tensor:
    return insum.insum(STATEMENT, out_shape=(200, 16), **values)  # type: ignore[arg-type]


def test_a_warm_forward_call() -> None:
    values = drawn()
    for _ in range(WARM):
        called(values)
    calls = python_calls(lambda: called(values))
    assert calls.total() <= FORWARD, dict(calls)


def test_a_warm_call_under_autocast() -> None:
    """Past the dispatcher, too."""
    values = drawn()
    with torch.autocast("cpu"):
        for _ in range(WARM):
            called(values)
        calls = python_calls(lambda: called(values))
    assert calls.total() <= FORWARD + 8, calls


def test_a_warm_call_that_is_recorded_for_autograd() -> None:
    values = drawn()
    values["x"].requires_grad_()
    for _ in range(WARM):
        called(values)
    calls = python_calls(lambda: called(values))
    assert calls.total() <= FORWARD + 2, calls


@pytest.mark.parametrize("wanted", [("x",), ("x", "w")])
def test_a_warm_backward_pass(wanted: tuple[str, ...]) -> None:
    values, upstream = drawn(), torch.randn(200, 16)
    leaves = [values[name].requires_grad_() for name in wanted]
    for _ in range(WARM):
        torch.autograd.grad(called(values), leaves, upstream)
    result = called(values)
    own = str(Path(insum.__file__).parent)
    calls = python_calls(lambda: torch.autograd.grad(result, leaves, upstream), own)
    assert calls.total() <= BACKWARD * len(wanted), calls


@pytest.mark.parametrize("backward, most", [(False, 26), (True, 85)])
def test_a_warm_call_on_a_cpu(backward: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of its own ways, which looks at index values at every call, and at what follows from
    them where they are others.
    """
    monkeypatch.undo()
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    values, upstream = drawn(5000), torch.randn(200, 16)
    leaves = [values[name].requires_grad_(backward) for name in ("x", "w")]

    def step() -> None:
        result = called(values)
        if backward:
            torch.autograd.grad(result, leaves, upstream)

    with insum.settings(backend="auto", require_fused=False):
        for _ in range(WARM):
            step()
        calls = python_calls(step, str(Path(insum.__file__).parent))
    assert calls["has_bytes"] >= (6 if backward else 2) and not calls["_check"], calls
    assert calls.total() <= most, (calls.total(), calls)


#: Of each spelling of a product over a format, the functions of our own that a warm call calls, of
#: which the statement itself is 16.
SPELLINGS: dict[str, tuple[Callable[[GroupCOO, Tensor], object], int]] = {
    "by name": (lambda a, b: insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b), 27),
    "new values": (
        lambda a, b: insum.einsum("C[m,n] = A[m,k] * B[k,n]", A=a.with_values(a.values), B=b),
        38,
    ),
    "as torch does": (lambda a, b: insum.einsum("mk,kn->mn", a, b), 41),
    "an operator": (lambda a, b: a @ b, 33),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_warm_call_over_a_format(name: str) -> None:
    """What a format and a spelling give is found once."""
    dense = torch.randn(64, 64).where(torch.rand(64, 64) < 0.2, 0)
    a, b = GroupCOO.from_dense(dense, group_size=4), torch.randn(64, 16)
    run, most = SPELLINGS[name]
    for _ in range(WARM):
        run(a, b)
    calls = python_calls(lambda: run(a, b), str(Path(insum.__file__).parent))
    assert calls.total() <= most, (calls.total(), calls)


def fused_step(edges: Tensor, into: bool) -> Callable[[], object]:
    """A fused op as compiled graphs call it."""
    rows = (("d", "e", ((0, 1),)), ("s", "e", ((0, 0),)))
    sign, names = "+=" if into else "=", ("w", "x", "e")
    spec = str(Spec(f"y[d[e],f] {sign} w[e] * x[s[e],f]", names, rows, "y#2", NONE, NONE))
    tensors = [torch.randn(edges.shape[1]), torch.randn(200, 16), edges]
    if not into:
        return lambda: torch.ops.insum.fused.default(spec, tensors, [200, 16])
    out = torch.zeros(200, 16)
    return lambda: torch.ops.insum.fused_into_.default(out, spec, tensors, [200, 16])


@pytest.mark.parametrize(("into", "most"), [(False, FUSED), (True, FUSED_INTO)])
def test_a_fused_op_that_is_called_again(into: bool, most: int) -> None:
    """No view of an index tensor is made, in a thread of autograd's as in the forward pass."""
    step = fused_step(torch.randint(0, 200, (2, 5000)), into)
    own = str(Path(insum.__file__).parent)

    def untracked() -> None:
        with torch.no_grad():
            step()

    for _ in range(WARM):
        untracked()
    context = contextvars.copy_context()  # where the settings of these tests are
    thread = threading.Thread(target=context.run, args=(untracked,))
    for run in (untracked, lambda: (thread.start(), thread.join())):
        calls = python_calls(run, own)
        calls.pop("select", None)  # which Triton's interpreter needs
        assert calls.total() <= most, calls


def weighted_sums(x: Tensor, edges: Tensor) -> Tensor:
    degrees = x.new_zeros(len(x)).index_add(0, edges[1], x.new_ones(edges.shape[1]))
    weights = degrees.clamp(min=1).rsqrt()[edges[0]]
    return x.new_zeros(x.shape).index_add(0, edges[1], x[edges[0]] * weights[:, None])


@pytest.mark.parametrize("views", [False, True], ids=["edges", "views of edges"])
def test_a_training_step_of_a_compiled_program(views: bool) -> None:
    """One op forward and one backward, over weights that are computed once; autograd saves other
    objects than it was passed where those are views.
    """
    torch._dynamo.reset()
    options = {"insum.fuse": "always", "insum.rest": "eager"}
    run = torch.compile(weighted_sums, backend="insum", options=options)
    whole = torch.randint(0, 200, (2, 2, 5000))
    x, edges = torch.randn(200, 16, requires_grad=True), whole[0] if views else whole[0].clone()

    def step() -> None:
        run(x, edges).sum().backward()

    for _ in range(WARM):
        step()
    calls = python_calls(step, str(Path(insum.__file__).parent))
    calls.pop("select", None)  # which Triton's interpreter needs
    assert calls["_quick"] == 2 and calls.total() <= 2 * FUSED + calls["in_backward"], calls
    assert calls["in_backward"] == views


def attention(q: Tensor, v: Tensor, edges: Tensor) -> Tensor:
    """A softmax over edges."""
    src, dst = edges
    scores = (q[dst] * v[src]).sum(-1)
    most = q.new_zeros(len(q)).scatter_reduce(0, dst, scores.detach(), "amax", include_self=False)
    weights = torch.exp(scores - most[dst])
    total = q.new_zeros(len(q)).index_add(0, dst, weights)
    return q.new_zeros(q.shape).index_add(0, dst, v[src] * (weights / total[dst])[:, None])


def test_fused_ops_that_are_called_as_one() -> None:
    """Each costs its launch, all of them one call."""
    torch._dynamo.reset()
    options = {"insum.fuse": "always", "insum.rest": "eager"}
    run = torch.compile(attention, backend="insum", options=options)
    q, v = (torch.randn(200, 16, requires_grad=True) for _ in range(2))
    edges = torch.randint(0, 200, (2, 5000))

    def step() -> None:
        run(q, v, edges).sum().backward()

    for _ in range(WARM):
        step()
    calls = python_calls(step, str(Path(insum.__file__).parent))
    calls.pop("select", None)
    launches = calls["run"] - calls["like"]  # of each call one is that of all its statements
    assert calls["like"] < launches and calls.total() <= calls["like"] * FUSED + launches + 1, calls


def _mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))


#: Layers of PyG: of each what makes it, what it takes beside features and edges, and of the forward
#: and the backward pass how many ops of ours are called, and the calls of Python functions of our
#: own in them. All statements of an attention are one op.
PYG_STEPS: dict[str, tuple[Any, tuple[int, ...], tuple[int, int], tuple[int, int]]] = {
    "GCNConv": (lambda n: n.GCNConv(16, 16, cached=True), (), (1, 7), (1, 7)),
    "LGConv": (lambda n: n.LGConv(), (), (1, 7), (1, 7)),
    "GINConv": (lambda n: n.GINConv(_mlp()), (), (1, 7), (1, 7)),
    "GINEConv": (lambda n: n.GINEConv(torch.nn.Linear(16, 16)), (16,), (1, 7), (1, 7)),
    "SAGEConv": (lambda n: n.SAGEConv(16, 16), (), (1, 7), (1, 10)),
    "GATConv": (lambda n: n.GATConv(16, 4, 4, add_self_loops=False), (), (1, 10), (1, 11)),
}


@pytest.mark.parametrize("name", PYG_STEPS)
def test_a_step_of_a_compiled_layer(name: str) -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    make, wide, forward, backward = PYG_STEPS[name]
    torch._dynamo.reset()
    options = {"insum.fuse": "always", "insum.rest": "eager"}
    run = torch.compile(layer := make(pyg), backend="insum", options=options)
    x, edges = torch.randn(200, 16, requires_grad=True), torch.randint(0, 200, (2, 5000))
    given = x, edges, *(torch.randn(5000, width) for width in wide)
    own, leaves = str(Path(insum.__file__).parent), [x, *layer.parameters()]
    for _ in range(WARM):
        torch.autograd.grad(run(*given).sum(), leaves)
    results: list[Tensor] = []
    for function, (ops, most) in (
        (lambda: results.append(run(*given).sum()), forward),
        (lambda: torch.autograd.grad(results[0], leaves), backward),
    ):
        calls = python_calls(function, own)
        calls.pop("select", None)
        assert calls["like"] == ops and calls.total() <= most, calls


def test_a_call_on_new_tensors_of_a_new_size() -> None:
    """Nothing is planned and nothing is written: a bounded number of steps."""
    for size in range(WARM):
        called(drawn(900 + size))
    values = drawn(999)
    calls = python_calls(lambda: called(values))
    assert calls.total() <= 45, calls


@pytest.mark.parametrize(
    "statement", ["y[d[e],f] max= x[s[e],f]", "y[d[e]] min= w[e]", "y[d[e],f] mean= x[s[e],f]"]
)
def test_a_reduction_over_new_tensors(statement: str) -> None:
    """A maximum needs no order, and of a mean only the counts are new."""

    def reduced(edges: int) -> Tensor:
        values = {n: v for n, v in drawn(edges).items() if f"{n}[" in statement}
        shape = (200, 16) if "f]" in statement else (200,)
        return insum.insum(statement, **values, out_shape=shape)

    for size in range(WARM):
        reduced(900 + size)
    calls = python_calls(lambda: reduced(999), str(Path(insum.__file__).parent))
    assert calls.total() <= (110 if "mean" in statement else 43), calls
    assert not calls["in_order"], "nothing is sorted"


# --- steps of layers ------------------------------------------------------------------------------


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels written by hand are not run either: of what they make nothing is read, but for what
    they find out about indices.
    """

    def called(self: Handwritten, *arguments: Any) -> None:
        launched.append(self.name)
        if self.name == "insum_look":
            _, values, found, *_ = arguments
            found.copy_(facts.numbers_of(values))

    monkeypatch.setattr(Handwritten, "__call__", called)


def torch_ops(function: Callable[[], Any]) -> Counter[str]:
    """The operations of torch that are called, but for those inside of others."""
    with torch.autograd.profiler.profile() as profile:
        function()
    events = [e for e in profile.function_events if e.name.startswith("aten::")]
    events.sort(key=lambda e: (e.time_range.start, -e.time_range.end))
    found: Counter[str] = Counter()
    end = -1.0
    for event in events:
        if event.time_range.start >= end:
            found[event.name] += 1
            end = event.time_range.end
    return found


def work_of(
    step: Callable[..., Any], draw: Callable[[int], tuple[Any, ...]]
) -> tuple[int, list[str], Counter[str]]:
    """Of a step on data that are drawn for it: Python calls of our own, launches, torch ops."""
    for number in range(WARM):
        step(*draw(number))
    own, given = str(Path(insum.__file__).parent), draw(WARM)
    calls = python_calls(lambda: step(*given), own)
    given = draw(WARM + 1)
    launched.clear()
    step(*given)
    names, given = list(launched), draw(WARM + 2)
    return calls.total(), names, torch_ops(lambda: step(*given))


def training(net: torch.nn.Module, run: Callable[..., Tensor]) -> Callable[..., None]:
    update = torch.optim.SGD(net.parameters(), 1e-6)

    def step(*given: Any) -> None:
        result = run(*given)
        update.zero_grad()
        result.sum().backward()  # type: ignore[no-untyped-call]
        update.step()

    return step


def graph(number: int) -> tuple[Tensor, Tensor]:
    return torch.randn(100 + number, 16), torch.randint(0, 100, (2, 700 + number))


#: What torch itself does in a step of such a layer: the linear map, the sum, and what autograd and
#: the optimiser make of them; the bias is part of the statement, its gradient a sum.
LINEAR = Counter({"aten::linear": 1, "aten::sum": 1, "aten::ones_like": 1, "aten::sum_to_size": 1})
LINEAR += Counter({"aten::expand": 1, "aten::detach": 2, "aten::t": 3, "aten::mm": 1})
LINEAR += Counter({"aten::add_": 2})


def test_a_step_on_new_edges(unwritten: None) -> None:
    layer = GCNConv(16, 16)
    calls, names, ops = work_of(training(layer, layer), graph)
    assert names == ["insum_count_edges", "insum_normalise_edges", *["generated"] * 2]
    ours = ops - LINEAR
    # atomics start from a copy of the bias, which is measured as a view
    started = {"aten::copy_": 1, "aten::expand": 1}
    assert ours == {"aten::zeros": 1, "aten::unbind": 1, "aten::fill_": 1, **started}, ours
    assert calls <= 118, calls


def test_a_step_on_the_same_edges() -> None:
    layer, same = GCNConv(16, 16), graph(0)
    calls, names, ops = work_of(training(layer, layer), lambda number: same)
    assert len(names) <= 4, names
    assert not ops - LINEAR, ops - LINEAR
    assert calls <= 45, calls


def matrix() -> SparseLinear:
    return SparseLinear.from_dense(torch.randn(64, 64), torch.rand(64, 64) > 0.8)


def voxels() -> SparseTensor:
    places = torch.cartesian_prod(*[torch.arange(6)] * 3).int()
    return SparseTensor(torch.nn.functional.pad(places, (1, 0)), torch.randn(216, 64))


NODES = torch.randn(100, 16)
EDGES = torch.randint(0, 100, (2, 700))
EDGE_WEIGHTS = torch.rand(700)
#: Of each layer what makes it and what it is called with, and how many functions of our own a call
#: on the same data calls, of which a statement is about 16.
LAYERS: dict[str, tuple[Any, Any, int]] = {
    "GCNConv": (lambda: GCNConv(16, 16), lambda: (NODES, EDGES), 25),
    "GraphConv": (lambda: GraphConv(16, 16), lambda: (NODES, EDGES), 29),
    "weights": (lambda: GraphConv(16, 16), lambda: (NODES, EDGES, EDGE_WEIGHTS), 31),
    "SAGEConv": (lambda: SAGEConv(16, 16), lambda: (NODES, EDGES), 42),
    "a sum": (lambda: SAGEConv(16, 16, aggr="sum"), lambda: (NODES, EDGES), 29),
    "narrower sums": (lambda: SAGEConv(16, 8, aggr="sum"), lambda: (NODES, EDGES), 30),
    "five statements": (lambda: GATConv(16, 4, 4), lambda: (NODES, EDGES), 89),
    "RelationalConv": (
        lambda: RelationalConv(16, 16, 3),
        lambda: (NODES, EDGES, torch.arange(700) % 3),
        44,
    ),
    "SparseConv3d": (
        lambda: SparseConv3d(64, 64, 3, submanifold=True),
        lambda: (voxels(),),
        19,
    ),
    "TensorProductConv": (
        lambda: convolution(),
        lambda: (torch.randn(100, 32), torch.randn(700, 4), EDGES, torch.randn(700, 32)),
        48,
    ),
    "SparseLinear": (matrix, lambda: (torch.randn(32, 64),), 47),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_the_same_data(name: str) -> None:
    """What stands between the call of a layer and its statement is looked at once."""
    make, draw, most = LAYERS[name]
    layer, given = make(), draw()
    with torch.no_grad():
        for _ in range(WARM):
            layer(*given)
        calls = python_calls(lambda: layer(*given), str(Path(insum.__file__).parent))
    assert calls.total() <= most, (calls.total(), calls)


def cloud(number: int) -> tuple[Tensor, Tensor]:
    places = torch.cartesian_prod(*[torch.arange(18)] * 3).int()
    coords = torch.nn.functional.pad(places[: 5000 + number], (1, 0))
    return coords, torch.randn(len(coords), 64)


MAP = ["insum_insert", "insum_find", "insum_count_words", "insum_place_words", "insum_steps"]


def test_a_map_and_a_convolution(unwritten: None) -> None:
    layer = SparseConv3d(64, 64, 3, submanifold=True, bias=False)

    def step(coords: Tensor, features: Tensor) -> Tensor:
        with torch.no_grad():
            return layer(SparseTensor(coords, features)).features  # type: ignore[no-any-return]

    calls, names, ops = work_of(step, cloud)
    assert names == [*MAP, *["generated"] * 2, "pieces"]  # weights are turned first
    assert ops == {"aten::full": 1}, ops
    assert calls <= 89, calls


def test_a_step_of_two_convolutions(unwritten: None) -> None:
    layers = torch.nn.Sequential(
        *(SparseConv3d(64, 64, 3, submanifold=True, bias=False) for _ in range(2))
    )
    run = lambda coords, features: layers(SparseTensor(coords, features)).features
    calls, names, ops = work_of(training(layers, run), cloud)
    # two forward, whose weights are turned first, one back through the second
    ours = [*["generated"] * 7, *["pieces"] * 3]
    assert sorted(names) == sorted([*MAP, "insum_by_step", *ours])
    ours = ops - LINEAR
    assert ours == {"aten::full": 1, "aten::fill_": 2}, ours
    assert calls <= 228, calls


def test_a_step_under_autocast(unwritten: None) -> None:
    """Weights are cast once, and their gradients not at all."""
    layers = torch.nn.Sequential(
        *(SparseConv3d(64, 64, 3, submanifold=True, bias=False) for _ in range(2))
    )

    def run(coords: Tensor, features: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return layers(SparseTensor(coords, features.bfloat16())).features  # type: ignore[no-any-return]

    calls, names, ops = work_of(training(layers, run), cloud)
    ours = [*["generated"] * 5, *["pieces"] * 3]  # two forward, one back through the second
    assert sorted(names) == sorted([*MAP, "insum_by_step", *ours])
    assert ops["aten::to"] == len(layers) + 1, ops  # and the features
    assert ops["aten::detach"] == len(layers), ops  # gradients that are accumulated
    assert calls <= 238, calls


def test_a_map_there_and_one_back(unwritten: None, counted: None) -> None:
    """A strided convolution and its inverse: the tables of either are the inverses of the other's,
    and their order is made once.
    """
    down, up = (SparseConv3d(64, 64, 2, stride=2, bias=False, transposed=t) for t in (False, True))
    layers = torch.nn.ModuleList([down, up])

    def run(coords: Tensor, features: Tensor) -> Tensor:
        x = SparseTensor(coords, features.requires_grad_())
        kept[:] = [x]  # as whoever trains does
        return up(down(x), like=x).features  # type: ignore[no-any-return]

    kept: list[SparseTensor] = []
    calls, names, _ = work_of(training(layers, run), cloud)
    found = Counter(names)
    assert found["insum_find"] == found["insum_insert"] == found["insum_steps"] == 2, found
    assert not found["insum_invert"] and found["generated"] == 7, found
    assert calls <= 348, calls


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many voxels a strided convolution reaches is told by nobody where no kernel runs."""
    numbers = lambda self: [self.keys.shape[0] * 3 // 10, 0, 0, 0, 0, 1, 64, 64, 64]
    monkeypatch.setattr(Ranked, "numbers", numbers)


@pytest.mark.parametrize(("narrow", "most"), [(False, 2725), (True, 2930)])
def test_a_step_of_a_whole_network(narrow: bool, most: int, unwritten: None, counted: None) -> None:
    """MinkUNet18 on a new cloud: 41 convolutions over 13 maps, forward and backward."""
    net = MinkUNet(4, 20, blocks=MINKUNET18, widths=(16,) * 8, stem=(3, 16))
    kept: list[SparseTensor] = []

    def run(coords: Tensor, features: Tensor) -> Tensor:
        kept[:] = [SparseTensor(coords, features[:, :4])]
        with torch.autocast("cpu", enabled=narrow):
            return net(kept[0]).features.float()  # type: ignore[no-any-return]

    calls, names, ops = work_of(training(net, run), cloud)
    found = Counter(names)
    layers = [m for m in net.modules() if isinstance(m, SparseConv3d)]
    alone = sum(m.geometry.volume == 1 for m in layers)
    turned = 0 if narrow else 1  # weights of one layer over all voxels
    assert found["generated"] == 3 * (len(layers) - alone) - 1 + turned, found
    assert found["insum_find"] == 13 and not found["insum_invert"], found
    # of five maps the tiles of every step are listed, too, for the gradients of weights
    own = len(names) - found["generated"] - found["pieces"]
    assert own <= 50 and found["insum_by_step"] == 5, found
    # of clouds whose tiles all run at once; of halves also where they are rounded by them
    assert found["pieces"] <= 24 + 7 * narrow, found
    assert ops["aten::matmul"] == alone and not ops["aten::select_backward"], ops
    assert ops["aten::detach"] == len(list(net.parameters())), ops
    # of a strided map the first box is looked for, keys are sorted, and skips are joined
    assert ops["aten::aminmax"] == 1 and ops["aten::sort"] == ops["aten::cat"] == 4, ops
    assert not ops["aten::cumsum"] and not ops["aten::index"], ops
    casts = sum(m.geometry.volume > 1 for m in layers) if narrow else 0
    assert ops["aten::to"] <= casts + 21 * narrow + 1, ops
    assert calls <= most, calls


# --- products along edges -------------------------------------------------------------------------


def equivariant(number: int) -> tuple[Tensor, ...]:
    """Features of nodes and edges, new edges, weights: of sizes that no other step has."""
    nodes, edges = 40 + number, 300 + number
    x, y, w = torch.randn(nodes, 32), torch.randn(edges, 4), torch.randn(edges, 32)
    leaves = [t.requires_grad_() for t in (x, y, w)]
    return *leaves, torch.randint(0, nodes, (2, edges))


def convolution() -> TensorProductConv:
    paths = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    irreps = "8x0e+8x1y", "0e+1y", "8x0e+8x1y"
    return TensorProductConv(*irreps, [(*path, "uvu", True) for path in paths], layout="ir_mul")


def forces_step(conv: TensorProductConv, layers: int) -> Callable[..., None]:
    """Energies of some layers over one graph, forces, and the gradient of a loss on both."""

    def step(x: Tensor, y: Tensor, w: Tensor, edges: Tensor) -> None:
        found = x
        for _ in range(layers):
            found = conv(found, y, edges, w)
        (forces,) = torch.autograd.grad(found.sum(), y, create_graph=True)
        torch.autograd.grad(forces.square().sum() + found.sum(), (x, w))

    return step


def test_a_step_with_forces_on_new_edges(unwritten: None) -> None:
    """Several statements in one launch are bound to nothing, as single ones are not; and what is
    derived of a product is not spelt again.
    """
    torch.manual_seed(0)
    step = forces_step(convolution(), layers=3)
    for number in range(WARM):
        step(*equivariant(number))
    given = equivariant(WARM)
    calls = python_calls(lambda: step(*given), str(Path(insum.__file__).parent))
    # forces ask for no gradient of weights, nor, at the first layer, of nodes: one is by itself
    assert calls["run_together"] == 8 and calls["_run"] == 7, calls
    assert not calls["_product"] and not calls["_passed_to"], "nothing is derived or bound"
    # edges are looked at in two launches, instead of forty torch operations
    assert calls.total() <= 1361, calls.total()


def test_statements_of_one_launch_on_new_tensors(unwritten: None) -> None:
    """They cost no more than each of them would by itself."""
    conv = convolution()
    for number in range(WARM):
        x, y, w, edges = equivariant(number)
        torch.autograd.grad(conv(x, y, edges, w).sum(), (x, y, w))
    asked: list[Any] = []
    x, y, w, edges = equivariant(WARM)
    with mock.patch("insum.nn.multilinear.results_of", lambda a: asked.append(a) or results_of(a)):
        torch.autograd.grad(conv(x, y, edges, w).sum(), (x, y, w))
    (group,) = asked
    own = str(Path(insum.__file__).parent)
    with torch.no_grad():
        for _ in range(4):  # until all is known of the edges
            results_of(group)
        together = python_calls(lambda: results_of(group), own)
        alone = python_calls(lambda: [one.alone() for one in group], own)
    for calls in (together, alone):
        for name in ("<listcomp>", "<dictcomp>", "<genexpr>"):  # no calls since Python 3.12, or few
            calls.pop(name, None)
    assert together["_launched"] == 1 and together.total() <= alone.total(), (together, alone)


def test_what_looks_at_new_edges_writes_what_their_sums_start_from(unwritten: None) -> None:
    layer = SAGEConv(16, 8, aggr="sum")
    with torch.no_grad():
        calls, names, ops = work_of(layer, graph)
    assert names == ["generated"] * 2, names  # which looks, and which sums
    # the sum of the bias and a node's own features, and a view for the sizes
    both = Counter({"aten::linear": 2, "aten::add": 1, "aten::unbind": 1, "aten::expand": 1})
    assert ops == both, ops
    assert calls <= 80, calls


# --- between products along edges -----------------------------------------------------------------


def with_forces(layer: Callable[..., Tensor], *given: Tensor) -> Callable[[], None]:
    """A step of training on gradients by the first tensor, for all."""

    def step() -> None:
        out = layer(*given)
        (forces,) = torch.autograd.grad(out.square().sum(), given[0], create_graph=True)
        torch.autograd.grad(forces.square().sum() + out.sum(), given)

    return step


def rows(number: int, *widths: int) -> list[Tensor]:
    return [torch.randn(40 + number, width, requires_grad=True) for width in widths]


def test_a_gate_with_forces_on_new_rows(unwritten: None) -> None:
    silu = torch.nn.functional.silu
    gate = Gate("8x0e", [silu], "16x0e", [silu], "8x1o + 8x2e")
    for number in range(3):
        with_forces(gate, *rows(number, gate.irreps_in.dim))()
    step = with_forces(gate, *rows(3, gate.irreps_in.dim))
    launched.clear()
    step()
    # of the result, twice, for a loss on both
    wanted = ["insum_gate", "insum_gate_gradient", "insum_gate_second", "insum_gate_gradient"]
    assert sorted(launched) == sorted(wanted)
    calls = python_calls(step, str(Path(insum.__file__).parent))
    assert calls.total() <= 75, calls.total()


def test_a_product_with_embeddings_on_new_rows() -> None:
    """Scalars that have gradients of their own: one product of all matrices, and for each path one
    that reads and writes in place, each time that one of three follows of two.
    """
    product = FullyConnectedTensorProduct("8x0e + 8x1o", "8x0e", "24x0e + 8x1o")
    widths = product.irreps_in1.dim, product.irreps_in2.dim
    for number in range(3):
        with_forces(product, *rows(number, *widths))()
    step = with_forces(product, *rows(3, *widths))
    ops = torch_ops(step)
    # results, forces, what these send on to matrices and results, and what results send to both
    assert ops["aten::baddbmm_"] == 2 * 6, ops
    assert ops["aten::cat"] == ops["aten::bmm"] == 0, ops
    calls = python_calls(step, str(Path(insum.__file__).parent))
    assert calls.total() <= 160, calls.total()


def test_index_tensors_that_come_back_are_looked_at_in_one_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Handwritten, "__call__", lambda self, *_: launched.append(self.name))
    edges = torch.randint(0, 50, (300,))
    ops = torch_ops(lambda: looked_at(edges))
    assert ops == Counter({"aten::detach": 1, "aten::reshape": 1}), ops
    assert launched == ["insum_look"]


def test_a_new_class_of_sizes() -> None:
    """It is planned anew, with every place of its pattern: that must not be felt as a hiccup."""
    layer = products_along_edges(2, 8, 20, torch.device("cpu")).conv
    own = str(Path(insum.__file__).parent)
    sizes = layer.irreps_in1.dim, layer.irreps_in2.dim, layer.weight_numel

    def call(edges: int) -> None:
        ends = torch.randint(0, edges // 10, (2, edges))
        x, y, w = (torch.randn(n, d) for n, d in zip((edges // 10, edges, edges), sizes))
        layer(x, y, ends, w)

    for edges in (1000, 1010, 1020):
        call(edges)
    points = len(arrays_of(layer, 0)["V"])
    calls = python_calls(lambda: call(9000), own)
    assert calls.total() <= 150 * points, (calls.total(), points, calls.most_common(10))
