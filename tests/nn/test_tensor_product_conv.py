"""The convolution over edges: equal to e3nn's product on gathered rows, in values and gradients of
both orders; equivariant; without anything of the size of edges times channels.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import insum
from insum.call.request import request_of
from insum.nn import Irreps, TensorProduct, TensorProductConv
from insum.nn.patterns import arrays_of
from insum.runtime import inspection, one_launch
from insum.testing.as_on_a_gpu import pretended
from kernels import watch_programs
from nn.test_tensor_product import rotation

Instructions = list[tuple[Any, ...]]


pytestmark = pytest.mark.usefixtures("in_double")


def every_path(in1: str, in2: str, out: str, mode: str, weights: bool = True) -> Instructions:
    terms = [list(Irreps.of(irreps)) for irreps in (in1, in2, out)]
    return [
        (a, b, c, mode, weights)
        for a, (_, one) in enumerate(terms[0])
        for b, (_, two) in enumerate(terms[1])
        for c, (_, three) in enumerate(terms[2])
        if three in one * two
    ]


DEGREE_2 = ("2x0e+2x1o+2x2e", "0e+1o+2e", "2x0e+2x1o+2x2e")
UNEQUAL = ("2x0e+3x1o", "2x0e+1o", "3x1o+2x0e+3x0e+1x0o+2x1o")
CASES: dict[str, tuple[str, str, str, Instructions]] = {
    "uvu": (*DEGREE_2, every_path(*DEGREE_2, "uvu")),
    "uvu, no weights": (*DEGREE_2, every_path(*DEGREE_2, "uvu", False)),
    "uvw": (*UNEQUAL, every_path(*UNEQUAL, "uvw")),
    "all": (
        "2x0e+2x1o",
        "2x0e+2x1o",
        "2x0e+2x1o+2x1e+4x0e+4x1o+1x1e",
        [
            (1, 0, 1, "uvu", True),
            (0, 1, 1, "uvu", False),
            (1, 1, 2, "uuw", True, 0.5),
            (0, 0, 3, "uvuv", True),
            (1, 1, 5, "u<vw", True),
        ],
    ),
}


def graph(nodes: int = 4, edges: int = 7) -> Tensor:
    return torch.randint(nodes, (2, edges))


def given(conv: TensorProductConv, edge_index: Tensor, nodes: int = 4) -> list[Tensor]:
    edges = edge_index.shape[1]
    shapes = [(nodes, conv.irreps_in1.dim), (edges, conv.irreps_in2.dim)]
    own = [(conv.weight_numel,) if conv.shared_weights else (edges, conv.weight_numel)]
    return [torch.randn(*s, requires_grad=True) for s in shapes + own * bool(conv.weight_numel)]


def by_hand(product: Any, edge_index: Tensor, nodes: int) -> Any:
    def call(x: Tensor, y: Tensor, *weight: Tensor) -> Tensor:
        rows = product(x[edge_index[0]], y, *weight)
        return torch.zeros(nodes, rows.shape[1]).index_add(0, edge_index[1], rows)

    return call


def derivatives(call: Any, leaves: list[Tensor]) -> list[Tensor]:
    """The result, its gradients, and gradients of the size of those."""
    out = call(*leaves)
    first = torch.autograd.grad(out.square().sum() + out.sum(), leaves, create_graph=True)
    size = sum(g.square().sum() for g in first)
    assert isinstance(size, Tensor)
    return [out, *first, *torch.autograd.grad(size, leaves)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_is_e3nns_product_on_gathered_rows(name: str, shared: bool) -> None:
    o3 = pytest.importorskip("e3nn.o3", reason="e3nn is not installed: not compared with it")
    options = {"shared_weights": shared, "internal_weights": False}
    conv = TensorProductConv(*CASES[name], **options)
    product = o3.TensorProduct(*CASES[name], **options)
    assert str(o3.Irreps(conv.irreps_out)) == str(product.irreps_out)
    edge_index = graph()
    leaves = given(conv, edge_index)
    call = lambda x, y, *w: conv(x, y, edge_index, *w)
    want = derivatives(by_hand(product, edge_index, 4), leaves)
    for looks in (False,) if shared else (False, True):  # on a CPU; the statements of a GPU
        with mock.patch("insum.call.prepared.kernels_look_on", lambda device, looks=looks: looks):
            for one, other in zip(derivatives(call, leaves), want, strict=True):
                assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_nodes_that_are_others(layout: str) -> None:
    conv = TensorProductConv(*CASES["uvu"], layout=layout)
    product = TensorProduct(*CASES["uvu"], layout=layout, shared_weights=False)
    edge_index = torch.stack([torch.randint(4, (7,)), torch.randint(6, (7,))])
    x, y, w = given(conv, edge_index)
    got = conv(x, y, edge_index, w, num_nodes=6)
    assert_close(got, by_hand(product, edge_index, 6)(x, y, w))
    alone = conv(x, y[:0], edge_index[:, :0], w[:0])
    assert_close(alone, torch.zeros(4, conv.irreps_out.dim))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equivariance(name: str, shared: bool) -> None:
    conv = TensorProductConv(*CASES[name], shared_weights=shared, internal_weights=False)
    edge_index, axis = graph(), torch.randn(3)
    x, y, *w = given(conv, edge_index)
    for inversion in (False, True):
        D1, D2, D3 = (
            rotation(irreps, axis, inversion)
            for irreps in (conv.irreps_in1, conv.irreps_in2, conv.irreps_out)
        )
        turned = conv(x @ D1.T, y @ D2.T, edge_index, *w)
        assert_close(turned, conv(x, y, edge_index, *w) @ D3.T)


def test_second_derivatives_at_degree_3() -> None:
    irreps = "1x0e+1x1o+1x2e+1x3o", "0e+1o+2e+3o", "1x0e+1x1o+1x2e+1x3o"
    conv = TensorProductConv(*irreps, every_path(*irreps, "uvu"))
    edge_index = torch.tensor([[0, 1, 1], [1, 0, 1]])
    leaves = given(conv, edge_index, 2)
    call = lambda x, y, w: conv(x, y, edge_index, w)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_internal_weights_and_states() -> None:
    conv = TensorProductConv(*CASES["uvu"], shared_weights=True)
    product = TensorProduct(*CASES["uvu"])
    conv.load_state_dict(product.state_dict())
    edge_index = graph()
    x, y, _ = given(conv, edge_index)
    assert_close(conv(x, y, edge_index), by_hand(product, edge_index, 4)(x, y))
    assert "shared" in repr(conv)
    assert conv.float()(x.float(), y.float(), edge_index).dtype == torch.float32


# --- what runs on a GPU ---


class Largest(TorchDispatchMode):
    """How many elements the largest new tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                self.found = max(self.found, one.numel())
        return out


@pytest.mark.interpreter
def test_nothing_of_the_size_of_edges_times_channels() -> None:
    """But gradients of the weights, which are of that size; the edges are new at each call."""
    irreps = "16x0e+16x1o", "0e+1o", "16x0e+16x1o"
    conv = TensorProductConv(*irreps, every_path(*irreps, "uvu", False)).float()
    edges, nodes = 40, 3
    with pretended():
        for _ in range(2):
            edge_index = torch.randint(nodes, (2, edges))
            x, y = (t.detach().float().requires_grad_() for t in given(conv, edge_index, nodes))
            with Largest() as largest:
                derivatives(lambda x, y, e=edge_index: conv(x, y, e), [x, y])
            assert largest.found <= max(nodes * conv.irreps_out.dim, 4 * edges) < edges * 16


@pytest.mark.interpreter
@pytest.mark.parametrize("declared", [False, True])
def test_second_derivatives_are_few_kernels(
    declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two: by all leaves, and by the result's gradient. Edges have come back by then."""
    irreps = "4x0e+4x1o", "0e+1o", "4x0e+4x1o"
    torch.set_default_dtype(torch.float32)
    conv = TensorProductConv(*irreps, every_path(*irreps, "uvu"))
    product = TensorProduct(*irreps, every_path(*irreps, "uvu"), shared_weights=False)
    edge_index = graph(3, 8)
    leaves = given(conv, edge_index, 3)
    want = derivatives(by_hand(product, edge_index, 3), leaves)
    with pretended():
        conv.to("cpu")  # promises are forgotten where one pretends
        if declared:
            insum.unchanging(edge_index)
        programs, together = watch_programs(monkeypatch), watch_together(monkeypatch)
        found = derivatives(lambda x, y, w: conv(x, y, edge_index, w), leaves)
    for got, wanted in zip(found, want, strict=True):
        assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    sums = [p for p in programs if len(p.problem.terms) > 1]
    assert [len(p.launches) for p in sums] == [1, 1]
    assert set(together) == {3}


def watch_together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every launch that computes several results from now on, how many."""
    counts: list[int] = []
    original = one_launch._run

    def watched(*given: Any, **how: Any) -> Any:
        results, found = original(*given, **how)
        if results:
            counts.append(len(results))
        return results, found

    monkeypatch.setattr(one_launch, "_run", watched)
    return counts


@pytest.mark.interpreter
def test_gradients_by_edges_alone_are_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As forces on the first layer of a network take them; columns that fill no tile."""
    irreps = "3x0e+3x1o", "0e+1o", "3x0e+3x1o"
    torch.set_default_dtype(torch.float32)
    conv = TensorProductConv(*irreps, every_path(*irreps, "uvu"))
    product = TensorProduct(*irreps, every_path(*irreps, "uvu"), shared_weights=False)
    edge_index = graph(3, 8)
    x, y, w = given(conv, edge_index, 3)
    want = torch.autograd.grad(by_hand(product, edge_index, 3)(x, y, w).square().sum(), [y, w])
    with pretended():
        conv.to("cpu")
        insum.unchanging(edge_index)
        together = watch_together(monkeypatch)
        out = conv(x.detach(), y, edge_index, w)
        found = torch.autograd.grad(out.square().sum(), [y, w])
    for got, wanted in zip(found, want, strict=True):
        assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert together == [2]


def test_only_some_second_derivatives() -> None:
    """Of edges alone, as forces are; and without a gradient of the nodes."""
    conv, edge_index = TensorProductConv(*CASES["uvu"]), graph()
    product = TensorProduct(*CASES["uvu"], shared_weights=False)
    x, y, w = given(conv, edge_index)
    results = []
    with mock.patch("insum.call.prepared.kernels_look_on", lambda device: True):
        for call in (lambda *t: conv(*t[:2], edge_index, t[2]), by_hand(product, edge_index, 4)):
            energy = call(x.detach(), y, w).square().sum()
            (forces,) = torch.autograd.grad(energy, y, create_graph=True)
            (second,) = torch.autograd.grad(forces.square().sum(), w, create_graph=True)
            third = torch.autograd.grad(second.square().sum(), [y, w])
            results.append([forces, second, *third])
    for got, wanted in zip(*results, strict=True):
        assert_close(got, wanted)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_derivative_is_straight_line_code(deterministic: bool) -> None:
    """A program of its own for every node, in deterministic mode also for edges never seen."""
    conv = TensorProductConv(*CASES["uvu"])
    edge_index = torch.randint(200, (2, 4000))
    x, y, w = (t.detach() for t in given(conv, edge_index, 200))
    (statement,) = conv.statements()
    tensors = {
        **arrays_of(conv, 0),
        "X": x.reshape(200, 9, 2),
        "Y": y,
        "W": w.reshape(4000, -1, 2),
        "src": edge_index[0],
        "dst": edge_index[1],
    }
    problem = request_of(statement, (200, 9, 2), None, ()).bind(tensors)
    torch.use_deterministic_algorithms(deterministic)
    try:
        (step,) = inspection.plan_only(problem, tensors).steps
    finally:
        torch.use_deterministic_algorithms(False)
    assert step.planned.plan.strategy == "segment"
    assert step.planned.plan.pattern is not None


# --- mistakes ---


def test_mistakes() -> None:
    conv = TensorProductConv(*CASES["uvu"])
    edge_index = graph()
    x, y, w = given(conv, edge_index)
    with pytest.raises(insum.InsumError, match=r"y has shape \(6, 9\), but there are 7 edges"):
        conv(x, y[:6], edge_index, w)
    with pytest.raises(insum.InsumError, match=r"weight has shape \(6, 22\), but there are 7"):
        conv(x, y, edge_index, w[:6])
    with pytest.raises(insum.InsumError, match="has no weights of its own"):
        conv(x, y, edge_index)
    with pytest.raises(insum.InsumError, match=r"expected: \(2, edges\)"):
        conv(x, y, edge_index[0], w)
    with pytest.raises(insum.InsumError, match="one row for each node"):
        conv(x[None], y, edge_index, w)
    with pytest.raises(insum.IndexRangeError, match="there are 2 nodes"):
        conv(x, y, torch.full((2, 7), 2), w, num_nodes=2)
    with pytest.raises(insum.InsumError, match=r"as mode uvu<v asks"):
        TensorProductConv("3x0e", "3x0e", "4x0e", [(0, 0, 0, "uvu<v", False)])
