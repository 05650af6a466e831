"""e3nn as its users know it: linear layers, products that follow from their inputs, all modes,
spherical harmonics, Wigner symbols; equal to e3nn's in values and gradients, and equivariant.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum
from insum.nn import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    Irrep,
    Irreps,
    Linear,
    SymmetricContraction,
    TensorProduct,
    spherical_harmonics,
    wigner_3j,
)
from insum.nn.symmetric_contraction import coupled
from insum.testing.hostile import symbol
from nn.test_tensor_product import rotation

MISSING = "e3nn is not installed: not compared with it"


pytestmark = pytest.mark.usefixtures("in_double")


@pytest.fixture(scope="module")
def o3() -> Any:
    pytest.importorskip("e3nn", minversion="0.6", reason=MISSING)
    return pytest.importorskip("e3nn.o3", reason=MISSING)


def equal(ours: Any, theirs: Any, *leaves: Tensor) -> None:
    """The same values, and the same gradients of leaves and weights."""
    ours.load_state_dict(theirs.state_dict())
    held = [leaf.requires_grad_() for leaf in leaves]
    results = []
    for module in (ours, theirs):
        out = module(*held)
        wanted = [*held, *module.parameters()]
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, rtol=1e-10, atol=1e-10)


def turned(
    module: Any, irreps: list[Irreps], *given: Tensor, more: tuple[Tensor, ...] = ()
) -> None:
    """What goes in turned and mirrored is what comes out turned and mirrored."""
    axis = torch.randn(3)
    out = module(*given, *more)
    for inversion in (False, True):
        D = [rotation(one, axis, inversion) for one in irreps]
        rows = [x @ d.T for x, d in zip(given, D)]
        assert_close(module(*rows, *more), out @ D[-1].T)


def drawn(seed: int, most: int = 3) -> Irreps:
    draw = random.Random(seed)
    terms = [
        (draw.randint(1, 3), Irrep(draw.randint(0, 2), draw.choice((1, -1)))) for _ in range(most)
    ]
    return Irreps(tuple(terms))


# --- linear ---


LINEAR: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("4x0e+3x1o+2x0e", "2x0e+5x1o+1x2e", {}),
    "biases": ("4x0e+3x1o+2x0o", "2x0e+5x1o+3x0o+2x0e", {"biases": True}),
    "by path": ("4x0e+3x0e+2x1o", "2x0e+2x1o", {"path_normalization": "path"}),
    "pairs": ("4x0e+3x0e", "2x0e+1x0e", {"instructions": [(0, 1), (1, 0), (0, 0)]}),
    "channels": ("2x0e+2x1o", "3x0e+1x1o", {"f_in": 3, "f_out": 2, "biases": True}),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_is_e3nns(o3: Any, name: str) -> None:
    first, out, options = LINEAR[name]
    ours, theirs = Linear(first, out, **options), o3.Linear(first, out, **options)
    lead = (5, options["f_in"]) if "f_in" in options else (2, 5)
    with torch.no_grad():
        for bias in theirs.parameters():
            bias.normal_()
    equal(ours, theirs, torch.randn(*lead, ours.irreps_in.dim))
    assert_close(ours.output_mask, theirs.output_mask)
    for mine, other in zip(ours.weight_views(), theirs.weight_views()):
        if mine.shape == other.shape:  # e3nn has biases among them
            assert_close(mine, other)


def test_linear_with_weights_of_each_item(o3: Any) -> None:
    options: dict[str, Any] = {"shared_weights": False, "internal_weights": False}
    ours, theirs = (kind("4x0e+3x1o", "2x0e+2x1o", **options) for kind in (Linear, o3.Linear))
    x, w = torch.randn(5, 13), torch.randn(5, ours.weight_numel)
    assert_close(ours(x, w), theirs(x, w), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(2))
def test_every_layer_is_equivariant(seed: int) -> None:
    """Of drawn irreps."""
    first, second, out = drawn(3 * seed), drawn(3 * seed + 1), drawn(3 * seed + 2)
    x, y = torch.randn(4, first.dim), torch.randn(4, second.dim)
    turned(Linear(first, first, biases=True), [first, first], x)
    full = FullTensorProduct(first, second)
    turned(full, [full.irreps_in1, full.irreps_in2, full.irreps_out], x, y)
    fully = FullyConnectedTensorProduct(first, second, out)
    turned(fully, [first, second, out], x, y)
    each = ElementwiseTensorProduct(first, first)
    turned(each, [each.irreps_in1, each.irreps_in2, each.irreps_out], x, x)


# --- products ---


def test_products_that_follow_from_their_inputs(o3: Any) -> None:
    x, y = torch.randn(4, 2 + 9), torch.randn(4, 5 + 3)
    for name in ("FullTensorProduct", "ElementwiseTensorProduct"):
        kind = getattr(insum.nn, name)
        second, z = (
            ("5x0e+1x1o", y) if name.startswith("Full") else ("1x1o+4x0o", torch.randn(4, 7))
        )
        for wanted in (None, ["0e", "1o", "2o"]):
            ours = kind("2x0e+3x1o", second, wanted)
            theirs = getattr(o3, name)("2x0e+3x1o", second, wanted)
            assert str(ours.irreps_out) == str(theirs.irreps_out)
            equal(ours, theirs, x.clone(), z.clone())


def test_pairs_of_multiplicities(o3: Any) -> None:
    paths = [(0, 0, 0, "uvu<v", False), (1, 1, 1, "u<vw", True), (1, 1, 2, "uvu<v", True, 0.3)]
    irreps = "3x1o+4x0e", "3x1o+4x0e", "3x1e+2x0e+6x0e"
    ours, theirs = (kind(*irreps, paths) for kind in (TensorProduct, o3.TensorProduct))
    equal(ours, theirs, torch.randn(4, 13), torch.randn(4, 13))
    assert ours.statements()[1].endswith("X[b,J[p,q],A[r]] * Y[b,K[p,q],B[r]] * W[L[p],r,w]")


@pytest.mark.parametrize("shared", [True, False])
def test_paths_of_no_pairs(shared: bool) -> None:
    """One multiplicity has no pairs: paths with weights of no elements lead nowhere."""
    paths = [(0, 0, 0, "u<vw", True), (0, 0, 1, "uvu<v", True)]
    irreps = "1x1o", "1x1o", "2x1e+0x1e+1x0e"
    product = TensorProduct(*irreps, paths, shared_weights=shared)
    assert product.weight_numel == 0 and not product.output_mask.any()
    assert_close(product(torch.randn(4, 3), torch.randn(4, 3)), torch.zeros(4, 7))


def test_what_e3nn_has_beside_products(o3: Any) -> None:
    irreps = "4x0e+4x1o", "0e+1o", "4x0e+4x1o"
    ours = FullyConnectedTensorProduct(*irreps)
    theirs = o3.FullyConnectedTensorProduct(*irreps, compile_right=True)
    ours.load_state_dict(theirs.state_dict())
    y = torch.randn(2, 3, 4)
    assert_close(ours.right(y), theirs.right(y), rtol=1e-10, atol=1e-10)
    views = zip(
        ours.weight_views(yield_instruction=True), theirs.weight_views(yield_instruction=True)
    )
    for (number, path, view), (n, instruction, other) in views:
        assert number == n and path.path_shape == instruction.path_shape
        assert path.connection_mode == instruction.connection_mode
        assert path.path_weight == pytest.approx(instruction.path_weight)
        assert_close(view, other)
    assert o3.Linear(ours.irreps_out, "2x0e")(torch.randn(2, 16)).shape == (2, 2)
    assert o3.Irrep(Irrep(1, -1)) == o3.Irrep("1o") and Irrep.of(o3.Irrep("1o")) == Irrep(1, -1)
    testing = pytest.importorskip("e3nn.util.test", reason=MISSING)
    testing.assert_equivariant(ours)
    testing.assert_equivariant(Linear("4x0e+4x1o", "2x0e+3x1o"))


def test_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    matplotlib.use("agg")
    product = FullyConnectedTensorProduct("4x0e+4x1o", "0e+1o", "4x0e+4x1o")
    figure, axes = product.visualize()
    assert len(axes.lines) == 3 * len(product.instructions) + 1
    assert {text.get_text().strip() for text in axes.texts} == {"4x0e", "4x1o", "1x0e", "1x1o"}
    matplotlib.pyplot.close(figure)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(insum.UnsupportedError, match="pip install matplotlib"):
        product.visualize()


# --- numbers ---


def test_wigner_symbols_are_e3nns_up_to_degree_6(o3: Any) -> None:
    for l1 in range(7):
        for l2 in range(l1, 7):
            for l3 in range(l2, min(l1 + l2, 6) + 1):
                assert_close(wigner_3j(l1, l2, l3), o3.wigner_3j(l1, l2, l3), rtol=0, atol=1e-10)


@pytest.mark.parametrize("normalization", ["component", "norm", "integral"])
def test_harmonics_are_e3nns(o3: Any, normalization: str) -> None:
    v = torch.randn(4, 3)
    for irreps in ("0e+1o+2e+3o", "2e+2e+0e", "2x1o", "1e+2e"):
        for normalize in (True, False):
            ours = spherical_harmonics(irreps, v, normalize=normalize, normalization=normalization)
            even = Irreps.of(irreps)[0][1].p > 0 and "1e" in irreps
            listed = [ir.l for mul, ir in Irreps.of(irreps) for _ in range(mul)]
            theirs = o3.spherical_harmonics(
                listed if even else o3.Irreps(irreps), v, normalize, normalization
            )
            assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert_close(spherical_harmonics([2, 0], v), spherical_harmonics("2e+0e", v))
    assert spherical_harmonics("", v).shape == (4, 0)
    ours = spherical_harmonics([0, 1], v, False, "norm")
    assert_close(ours, o3.spherical_harmonics([0, 1], v, False, "norm"))


# --- symmetric contraction ---


def test_symmetric_contraction() -> None:
    """Equivariant, and by hand: of degree 0 alone it is a polynomial."""
    first, out = "2x0e+2x1o", "2x0e+2x1o"
    layer = SymmetricContraction(first, out, 3, num_elements=2)
    kinds = torch.nn.functional.one_hot(torch.tensor([0, 1, 1]), 2).double()
    single = Irreps.of("0e+1o")
    x, axis = torch.randn(3, 2, 4), torch.randn(3)
    for inversion in (False, True):
        D, E = rotation(single, axis, inversion), rotation(layer.irreps_out, axis, inversion)
        assert_close(layer(x @ D.T, kinds), layer(x, kinds) @ E.T)
    scalars = SymmetricContraction("1x0e", "1x0e", 3, num_elements=1)
    s, one = torch.randn(4, 1, 1), torch.ones(4, 1)
    a, b, c = torch.cat(scalars.contractions[0].upwards(), 1).flatten()  # type: ignore[operator]
    assert_close(scalars(s, one), (a * s + b * s**2 + c * s**3).flatten(1))
    assert torch.autograd.gradgradcheck(
        lambda t: layer(t, kinds), x.clone().requires_grad_(), fast_mode=True
    )


def test_no_coupling_is_zero() -> None:
    table = coupled((Irrep(0, 1),), Irrep(1, -1), 2)
    assert table.shape == (3, 1, 1, 1) and not table.any()
    layer = SymmetricContraction("2x0e", "2x1o", 2, num_elements=1)
    x = torch.randn(3, 2, 1, requires_grad=True)
    out = layer(x, torch.ones(3, 1))
    out.sum().backward()
    assert not out.any() and x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("correlation", [1, 3])
def test_a_symmetric_contraction_of_no_nodes(correlation: int) -> None:
    layer = SymmetricContraction("2x0e+2x1o", "2x0e", correlation, num_elements=3)
    x = torch.randn(0, 2, 4, requires_grad=True)
    out = layer(x, torch.randn(0, 3))
    out.sum().backward()
    assert out.shape == (0, 2) and x.grad is not None
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64])
def test_kinds_of_nodes_in_any_dtype(dtype: torch.dtype) -> None:
    layer = SymmetricContraction("2x0e+2x1o", "2x1o", 2, num_elements=3).float()
    x, kinds = torch.randn(4, 2, 4).float(), torch.eye(3)[[0, 2, 1, 2]].float()
    out = layer(x, kinds.to(dtype))
    assert out.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(out.float(), layer(x, kinds))


# --- mistakes ---


MISTAKES: dict[str, tuple[Any, str]] = {
    "layer": (lambda: Linear("2x0e", "2x0e", path_normalization="x"), "path_normalization is 'x'"),
    "f": (lambda: Linear("2x0e", "2x0e", f_in=2), "one of f_in and f_out was given"),
    "own": (
        lambda: Linear("2x0e", "2x0e", shared_weights=False, internal_weights=True),
        "internal weights that are not shared",
    ),
    "pair": (lambda: Linear("2x0e", "2x0e", instructions=[(0, 1)]), "i_out is 1"),
    "kinds": (lambda: Linear("2x0e", "2x1o", instructions=[(0, 0)]), "0e cannot become 1o"),
    "bias": (lambda: Linear("2x0e", "2x1o", biases=[True]), "none but for 0e"),
    "size": (lambda: Linear("2x0e", "2x0e")(torch.ones(3)), "2 in the last dimension: irreps_in"),
    "weight": (
        lambda: Linear("2x0e", "2x0e", internal_weights=False)(torch.ones(2)),
        "this layer has no weight of its own",
    ),
    "weights": (
        lambda: Linear("2x0e", "2x0e")(torch.ones(2), torch.ones(3)),
        r"weight has shape \(3,\)",
    ),
    "channels": (
        lambda: Linear("2x0e", "2x0e", f_in=3, f_out=1)(torch.ones(2, 2)),
        r"expected: \(..., 3, 2\)",
    ),
    "elementwise": (lambda: ElementwiseTensorProduct("2x0e", "3x0e"), "2x0e has 2 irreps"),
    "filter": (lambda: FullTensorProduct("0e", "0e", ["0z"]), "'0z' is not an irrep"),
    "view": (
        lambda: FullTensorProduct("0e", "0e").weight_view_for_instruction(0),
        "instruction 0 has no weights",
    ),
    "normalization": (
        lambda: spherical_harmonics(1, torch.ones(3), normalization="sum"),
        "normalization is 'sum'",
    ),
    "parity": (lambda: spherical_harmonics("1o+2o", torch.ones(3)), "parities of 1x1o"),
    "multiplicities": (
        lambda: SymmetricContraction("2x0e+1x1o", "2x0e", 2, 1),
        "one for all terms",
    ),
    "correlation": (lambda: SymmetricContraction("2x0e", "2x0e", 5, 1), "1, 2, 3 or 4"),
    "features": (
        lambda: SymmetricContraction("2x0e", "2x0e", 1, 1)(torch.ones(3, 2), torch.ones(3, 1)),
        r"expected: \(nodes, 2, 1\)",
    ),
    "elements": (
        lambda: SymmetricContraction("2x0e", "2x0e", 1, 2)(torch.ones(3, 2, 1), torch.ones(3, 1)),
        r"expected: \(3, 2\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, text = MISTAKES[name]
    with pytest.raises(insum.InsumError, match=text):
        call()


def test_a_contraction_made_without_memory_gets_its_couplings_where_it_is_put() -> None:
    made = SymmetricContraction("2x0e + 2x1o", "2x0e + 2x1o", 3, 2)
    with torch.device("meta"):
        empty = SymmetricContraction("2x0e + 2x1o", "2x0e + 2x1o", 3, 2)
    assert {t.device.type for t in (*empty.parameters(), *empty.buffers())} == {"meta"}
    empty.to_empty(device="cpu").load_state_dict(made.state_dict())
    x, y = torch.randn(3, 2, 4), torch.eye(2)[[0, 1, 1]]
    assert torch.equal(empty(x, y), made(x, y))


@pytest.mark.parametrize(
    "layer", [Linear("2x0e", "3x0e"), FullyConnectedTensorProduct(*["2x0e"] * 3)]
)
def test_views_of_a_weight_without_a_shape(layer: Any) -> None:
    layer.weight = torch.nn.parameter.UninitializedParameter()
    with pytest.raises(insum.DtypeError, match="weight is a parameter without a shape yet"):
        layer.weight_view_for_instruction(0)


@pytest.mark.parametrize("number", [-1, 2, True, 0.0, "0", symbol()], ids=repr)
def test_instructions_that_are_not_there(number: Any) -> None:
    layers = Linear("2x0e+1o", "3x0e+1o"), FullyConnectedTensorProduct("0e", "0e+1o", "0e+1o")
    for layer in layers:
        with pytest.raises(insum.BindingError, match=f"there is no instruction {number}"):
            layer.weight_view_for_instruction(number)
