"""Models of e3nn's layers with insum's in their place: the same energies, forces and gradients of
parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import insum
from insum.nn import (
    Linear,
    SymmetricContraction,
    TensorProduct,
    TensorProductConv,
    from_e3nn,
    spherical_harmonics,
    swap,
)

o3 = pytest.importorskip("e3nn.o3", reason="e3nn is not installed: nothing to swap")


pytestmark = pytest.mark.usefixtures("in_double")


class TensorProductScatter(nn.Module):
    """As NequIP has it."""

    def __init__(self, *irreps: Any) -> None:
        super().__init__()
        paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
        self.tp = o3.TensorProduct(*irreps, paths, shared_weights=False, internal_weights=False)

    def forward(
        self, x: Tensor, edge_attr: Tensor, edge_weight: Tensor, dst: Tensor, src: Tensor
    ) -> Tensor:
        rows = self.tp(x[src], edge_attr, edge_weight)
        return torch.zeros(x.shape[0], rows.shape[1]).index_add(0, dst, rows)


class Block(nn.Module):
    """As MACE has them: whether the product is fused is asked each time."""

    def __init__(self, *irreps: Any) -> None:
        super().__init__()
        paths = [(0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True)]
        self.conv_tp = o3.TensorProduct(
            *irreps, paths, shared_weights=False, internal_weights=False
        )

    def forward(self, x: Tensor, y: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
        if hasattr(self, "conv_fusion"):
            found: Tensor = self.conv_tp(x, y, w, edge_index)
            return found
        rows = self.conv_tp(x[edge_index[0]], y, w)
        return torch.zeros(x.shape[0], rows.shape[1]).index_add(0, edge_index[1], rows)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = "2x0e+2x1o", "0e+1o", "2x0e+2x1o"
        self.embedding = o3.Linear("2x0e", hidden[0], biases=True)
        self.scatter = TensorProductScatter(*hidden)
        self.block = Block(*hidden)
        self.radial = nn.Linear(1, self.scatter.tp.weight_numel + self.block.conv_tp.weight_numel)
        self.skip = o3.FullyConnectedTensorProduct(hidden[0], "2x0e", hidden[0])
        self.square = o3.TensorSquare(hidden[0], "1x0e")
        self.again = self.skip  # the same layer under two names

    def forward(self, kinds: Tensor, positions: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        vectors = positions[target] - positions[source]
        y = spherical_harmonics(1, vectors)
        weights = self.radial(vectors.square().sum(1, keepdim=True))
        first, second = weights.split(
            [self.scatter.tp.weight_numel, self.block.conv_tp.weight_numel], 1
        )
        x = self.embedding(kinds)
        x = self.scatter(x, y, first, target, source) + self.skip(x, kinds)
        x = self.block(x, y, second, edge_index) + self.again(x, kinds)
        energy: Tensor = self.square(x).sum()
        return energy


def batch(nodes: int, edges: int) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.randint(nodes, (edges,))
    target = (source + torch.randint(1, nodes, (edges,))) % nodes
    kinds = nn.functional.one_hot(torch.randint(2, (nodes,)), 2).double()
    return kinds, torch.randn(nodes, 3), torch.stack([source, target])


def everything(model: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Energy, forces, and gradients of a loss on both by all parameters."""
    kinds, positions, edge_index = given
    positions = positions.clone().requires_grad_()
    energy = model(kinds, positions, edge_index)
    (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
    loss = energy.square() + forces.square().sum()
    return [energy, forces, *torch.autograd.grad(loss, list(model.parameters()))]


def test_a_model() -> None:
    model = Model()
    given = [batch(5, 9), batch(4, 7)]
    want = [everything(model, one) for one in given]
    state, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    report = swap(model)
    told = str(report).split()
    assert len(report) == 6 and not report.kept and "MessageConv" in told
    assert isinstance(model.scatter.tp, TensorProductConv) and model.skip is model.again
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    for one, results in zip(given, want):
        for got, wanted in zip(everything(model, one), results, strict=True):
            assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    model.load_state_dict(state)
    assert len(swap(model)) == 0  # there is nothing left


def test_a_copy() -> None:
    model = Model()
    own = from_e3nn(model)
    assert type(model.skip).__module__.startswith("e3nn") and isinstance(own.skip, TensorProduct)
    given = batch(5, 9)
    for got, wanted in zip(everything(own, given), everything(model, given), strict=True):
        assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_a_swapped_block_compiled_with_edges_that_change() -> None:
    block = Block("2x0e+2x1o", "0e", "2x0e+2x1o")
    swap(nn.ModuleList([block]))
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for edges in (7, 9):
        given = torch.randn(4, 8), torch.randn(edges, 1), torch.randn(edges, 4)
        edge_index = torch.randint(4, (2, edges))
        assert_close(compiled(*given, edge_index), block(*given, edge_index))


def test_layers() -> None:
    linear = o3.Linear("2x0e+3x1o", "4x0e+1x1o", biases=True, path_normalization="path")
    ours = from_e3nn(linear)
    x = torch.randn(4, 11)
    assert isinstance(ours, Linear)
    assert_close(ours(x), linear(x), rtol=1e-10, atol=1e-10)
    wide = o3.Linear("2x0e", "3x0e", f_in=2, f_out=5)
    assert_close(from_e3nn(wide)(x[:, :4].view(4, 2, 2)), wide(x[:, :4].view(4, 2, 2)))
    product = o3.FullTensorProduct("2x0e+3x1o", "1x1o")
    assert_close(
        from_e3nn(product.float())(x.float(), x[:, :3].float()),
        product(x.float(), x[:, :3].float()),
    )


def test_mistakes() -> None:
    with pytest.raises(insum.UnsupportedError, match="Sequential has no layer"):
        from_e3nn(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(insum.UnsupportedError, match="scripted"):
        swap(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(insum.UnsupportedError, match="from_e3nn"):
        swap(o3.Linear("0e", "0e"))
    with pytest.raises(insum.InsumError, match=r"a torch\.nn\.Module"):
        swap("model")  # type: ignore[arg-type]


# --- the models themselves, where they are installed ---


def cluster(nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    positions = torch.rand(nodes, 3) * 4
    distances = torch.cdist(positions, positions)
    return positions, ((distances < 3.5) & (distances > 0)).nonzero().T, torch.randint(2, (nodes,))


def test_mace() -> None:
    modules = pytest.importorskip("mace.modules", reason="MACE is not installed: not swapped")
    kinds = modules.interaction_classes
    model = modules.ScaleShiftMACE(
        r_max=4.0,
        num_bessel=4,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=kinds["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=kinds["RealAgnosticInteractionBlock"],
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps("2x0e+2x1o"),
        MLP_irreps=o3.Irreps("2x0e"),
        gate=nn.functional.silu,
        atomic_energies=torch.tensor([1.0, 2.0]).numpy(),
        avg_num_neighbors=8,
        atomic_numbers=[1, 8],
        correlation=3,
        radial_type="bessel",
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )
    positions, edges, types = cluster(6)

    def results() -> list[Tensor]:
        given = {
            "positions": positions.clone().requires_grad_(),
            "node_attrs": nn.functional.one_hot(types, 2).double(),
            "edge_index": edges,
            "shifts": torch.zeros(edges.shape[1], 3),
            "unit_shifts": torch.zeros(edges.shape[1], 3),
            "cell": 10 * torch.eye(3),
            "batch": torch.zeros(6, dtype=torch.long),
            "ptr": torch.tensor([0, 6]),
            "head": torch.zeros(1, dtype=torch.long),
        }
        out = model(given, training=True, compute_stress=True)
        found = [out[name] for name in ("energy", "forces", "stress")]
        loss = sum(one.square().sum() for one in found)
        wanted = [p for p in model.parameters() if p.requires_grad]
        return [*found, *torch.autograd.grad(loss, wanted)]

    want, report = results(), None
    report = swap(model)
    assert len(report) == 23 and not report.kept
    assert isinstance(model.products[0].symmetric_contractions, SymmetricContraction)
    assert isinstance(model.interactions[0].conv_tp, TensorProductConv)
    for got, wanted in zip(results(), want, strict=True):
        assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_nequip() -> None:
    models = pytest.importorskip("nequip.model", reason="NequIP is not installed: not swapped")
    pytest.importorskip("nequip.utils.global_state").set_global_state()
    model = models.NequIPGNNModel(
        seed=1,
        model_dtype="float64",
        r_max=4.0,
        type_names=["H", "O"],
        l_max=2,
        num_layers=2,
        num_features=2,
        radial_mlp_width=8,
        avg_num_neighbors=8.0,
    )
    positions, edges, types = cluster(6)
    given = {
        "pos": positions,
        "edge_index": edges,
        "atom_types": types,
        "cell": 10 * torch.eye(3)[None],
        "pbc": torch.zeros(1, 3, dtype=torch.bool),
        "edge_cell_shift": torch.zeros(edges.shape[1], 3),
        "batch": torch.zeros(6, dtype=torch.long),
        "num_atoms": torch.tensor([6]),
    }

    def results() -> list[Tensor]:
        out = model(dict(given))
        found = [out[name] for name in ("total_energy", "forces", "stress")]
        loss = sum(one.square().sum() for one in found)
        wanted = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [*found, *(g for g in gradients if g is not None)]

    want, stored = results(), model.state_dict()
    told = str(swap(model))
    assert "ScatteredProduct" in told and "InteractionBlock -> Interaction" in told
    model.load_state_dict(stored)
    assert not swap(model).replaced
    for got, wanted in zip(results(), want, strict=True):
        assert_close(got, wanted, rtol=1e-10, atol=1e-10)


# --- layers that do more than e3nn's ---


class Doubled(o3.Linear):  # type: ignore[misc, name-defined]
    def forward(self, features: Tensor) -> Tensor:
        return 2 * super().forward(features)


class Renamed(o3.Linear):  # type: ignore[misc, name-defined]
    """Computes what e3nn's does."""


def plain() -> nn.Module:
    return o3.Linear("2x0e", "3x0e")  # type: ignore[no-any-return]


def hooked() -> nn.Module:
    layer = plain()
    layer.register_forward_hook(lambda module, given, out: 2 * out)
    return layer


def parametrized() -> nn.Module:
    layer = plain()
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return layer


def patched() -> nn.Module:
    layer = plain()
    before = layer.forward
    layer.forward = lambda features: 2 * before(features)
    return layer


CHANGED = {
    "it has hooks": hooked,
    "it is parametrized": parametrized,
    "Doubled has a forward of its own": lambda: Doubled("2x0e", "3x0e"),
    "Linear has a forward of its own": patched,
}


@pytest.mark.parametrize("why", CHANGED)
def test_layers_that_do_more_are_kept(why: str) -> None:
    model = nn.Sequential(CHANGED[why](), o3.Linear("3x0e", "2x0e"))
    x, changed = torch.randn(4, 2), model[0]
    want = model(x)
    report = swap(model)
    assert report.kept == (("0", why),) and [one.name for one in report.replaced] == ["1"]
    assert model[0] is changed
    assert_close(model(x), want)
    with pytest.raises(insum.UnsupportedError, match=why):
        from_e3nn(changed)


def test_derived_layers_that_compute_the_same_are_replaced() -> None:
    networks = pytest.importorskip("e3nn.nn")
    network = networks.FullyConnectedNet([3, 4], torch.tanh)
    model = nn.Sequential(Renamed("2x0e", "3x0e"), network)
    x = torch.randn(4, 2)
    want = model(x)
    report = swap(model)
    assert len(report) == 2 and not report.kept
    assert_close(model(x), want)
