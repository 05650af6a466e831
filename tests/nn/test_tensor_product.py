"""Tensor products: equal to e3nn's with e3nn's weights, equivariant under rotations and
reflections, differentiable twice.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from insum.nn import (
    FullyConnectedTensorProduct,
    Irrep,
    Irreps,
    TensorProduct,
    spherical_harmonics,
    wigner_3j,
)

pytestmark = pytest.mark.usefixtures("in_double")


@pytest.fixture(scope="module")
def o3() -> Any:
    e3nn = pytest.importorskip(
        "e3nn",
        minversion="0.6",
        reason="e3nn 0.6 is not installed: the comparison with e3nn is left out",
    )
    return pytest.importorskip(f"{e3nn.__name__}.o3")


def inputs(product: TensorProduct, lead: tuple[int, ...] = (3,)) -> tuple[Tensor, ...]:
    given = torch.randn(*lead, product.irreps_in1.dim), torch.randn(*lead, product.irreps_in2.dim)
    return (
        given
        if product.internal_weights or not product.weight_numel
        else (*given, torch.randn(*lead, product.weight_numel))
    )


# --- rotations, without e3nn ---


def generators(l: int) -> Tensor:
    """Of infinitesimal rotations about x, y and z, from the coupling of a degree with a vector;
    checked to be what they should be.
    """
    if l == 0:
        return torch.zeros(3, 1, 1)
    made = wigner_3j(l, 1, l).permute(1, 2, 0) * math.sqrt(l * (l + 1) * (2 * l + 1))
    made = made if torch.allclose(made[0] @ made[1] - made[1] @ made[0], made[2]) else -made
    for a, b, c in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        assert_close(made[a] @ made[b] - made[b] @ made[a], made[c])
    return made


def rotation(irreps: Irreps, axis: Tensor, inversion: bool) -> Tensor:
    """The matrix by which a rotation by ``axis`` (and an inversion) acts on a vector of irreps."""
    blocks = []
    for mul, ir in irreps:
        one = torch.matrix_exp(torch.einsum("a,aij->ij", axis, generators(ir.l))) * (
            ir.p if inversion else 1
        )
        blocks += [one] * mul
    return torch.block_diag(*blocks)


def test_degree_one_rotates_as_vectors_do() -> None:
    axis = torch.randn(3)
    skew = torch.zeros(3, 3)
    skew[[2, 0, 1], [1, 2, 0]], skew[[1, 2, 0], [2, 0, 1]] = axis, -axis
    assert_close(rotation(Irreps.of("1o"), axis, False), torch.matrix_exp(skew))


@pytest.mark.parametrize(
    ("l1", "l2", "l3"),
    [(0, 0, 0), (1, 1, 1), (1, 1, 2), (2, 1, 2), (2, 2, 3), (3, 2, 4), (4, 4, 4)],
)
def test_wigner_3j_is_invariant_and_of_norm_one(l1: int, l2: int, l3: int) -> None:
    axis, table = torch.randn(3), wigner_3j(l1, l2, l3)
    D = [rotation(Irreps.of(Irrep(l, 1)), axis, False) for l in (l1, l2, l3)]
    assert_close(torch.einsum("ijk,ia,jb,kc->abc", table, *D), table)
    assert_close(table.norm(), torch.ones(()))


def test_spherical_harmonics_rotate() -> None:
    irreps, axis, v = Irreps.of("0e+1o+2e+3o+4e"), torch.randn(3), torch.randn(5, 3)
    for inversion in (False, True):
        R, D = (rotation(Irreps.of(i), axis, inversion) for i in ("1o", irreps))
        assert_close(spherical_harmonics(4, v @ R.T), spherical_harmonics(4, v) @ D.T)
    for l, part in enumerate(spherical_harmonics(4, v).split([1, 3, 5, 7, 9], -1)):
        assert_close(part.square().sum(-1), torch.full((5,), 2.0 * l + 1))


PRODUCTS = [
    ("4x0e+4x1o", "0e+1o", "4x0e+4x1o"),
    ("4x0e+4x1o+4x2e", "0e+1o+2e", "4x0e+4x1o+4x2e"),
    ("4x0e+3x1o+2x2e", "0e+1o+2e", "4x0e+5x1o+1x1e+2x2e"),
    ("2x0e+3x1o", "4x0e+2x1o", "3x0e+2x1e+0x2e+2x3o+1x0o"),
]
INSTRUCTIONS = {
    "uvu": (
        "4x0e+4x1o",
        "3x0e+3x1o",
        "4x0e+4x1o",
        [
            (0, 0, 0, "uvu", True),
            (1, 0, 1, "uvu", True, 0.5),
            (1, 1, 0, "uvu", False),
            (0, 1, 1, "uvu", True),
        ],
    ),
    "uuu": (
        "4x0e+4x1o",
        "4x0e+4x1o",
        "4x0e+4x1o+4x1e",
        [
            (0, 0, 0, "uuu", True),
            (1, 1, 0, "uuu", True),
            (1, 0, 1, "uuu", False),
            (1, 1, 2, "uuu", True),
        ],
    ),
    "others": (
        "4x0e+4x1o",
        "4x0e+4x1o",
        "4x0e+4x1o+3x1e+16x0e+16x1o+1x0e",
        [
            (1, 1, 2, "uuw", True),
            (0, 0, 3, "uvuv", True),
            (0, 1, 4, "uvuv", False),
            (0, 1, 1, "uvv", True),
            (1, 1, 5, "uuw", False),
            (1, 1, 0, "uvw", True),
        ],
    ),
}


@pytest.mark.parametrize("irreps", PRODUCTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per item"])
def test_equivariance(irreps: tuple[str, str, str], dtype: torch.dtype, shared: bool) -> None:
    product = FullyConnectedTensorProduct(*irreps, shared_weights=shared).to(dtype)
    x, y, *weight = (t.to(dtype) for t in inputs(product, (20,)))
    for inversion in (False, True):
        axis = torch.randn(3) * 2
        A, B, C = (
            rotation(i, axis, inversion).to(dtype)
            for i in (product.irreps_in1, product.irreps_in2, product.irreps_out)
        )
        rotated, after = product(x @ A.T, y @ B.T, *weight), product(x, y, *weight) @ C.T
        assert (rotated - after).abs().max() < (
            1e-5 if dtype == torch.float32 else 1e-12
        ) * after.abs().max()


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_equivariance_of_instructions(name: str) -> None:
    product = TensorProduct(*INSTRUCTIONS[name])
    x, y = inputs(product)
    A, B, C = (
        rotation(i, torch.ones(3), True)
        for i in (product.irreps_in1, product.irreps_in2, product.irreps_out)
    )
    assert_close(product(x @ A.T, y @ B.T), product(x, y) @ C.T)


# --- e3nn ---


def compare(mine: TensorProduct, other: Any, lead: tuple[int, ...] = (2, 3)) -> None:
    mine.load_state_dict(other.state_dict())
    given = [t.requires_grad_() for t in inputs(mine, lead)]
    got, want = mine(*given), other(*given)
    assert_close(got, want)
    upstream = torch.randn_like(want)
    ours = torch.autograd.grad(got, [*given, *mine.parameters()], upstream)
    theirs = torch.autograd.grad(want, [*given, *other.parameters()], upstream)
    for a, b in zip(ours, theirs):
        assert_close(a, b)


@pytest.mark.parametrize("irreps", PRODUCTS, ids=str)
@pytest.mark.parametrize(
    "normalisation",
    [("component", "element"), ("norm", "path"), ("component", "path"), ("none", "none")],
    ids=str,
)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per item"])
def test_fully_connected_is_e3nns(
    o3: Any, irreps: tuple[str, str, str], normalisation: tuple[str, str], shared: bool
) -> None:
    options = {
        "irrep_normalization": normalisation[0],
        "path_normalization": normalisation[1],
        "shared_weights": shared,
    }
    compare(
        FullyConnectedTensorProduct(*irreps, **options),
        o3.FullyConnectedTensorProduct(*irreps, **options),
    )


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions_are_e3nns(o3: Any, name: str) -> None:
    compare(TensorProduct(*INSTRUCTIONS[name]), o3.TensorProduct(*INSTRUCTIONS[name]))


def test_variances_are_e3nns(o3: Any) -> None:
    args = (o3.Irreps("2x0e+3x1o"), o3.Irreps("0e+1o"), o3.Irreps("2x0e+3x1o"))
    instructions = [
        (0, 0, 0, "uvw", True, 2.0),
        (1, 1, 0, "uvw", True),
        (0, 1, 1, "uvw", True),
        (1, 0, 1, "uvw", True),
    ]
    options: dict[str, Any] = {"in1_var": [1.0, 2.0], "in2_var": [0.5, 1.0], "out_var": [1.0, 3.0]}
    compare(
        TensorProduct(*args, instructions, **options),
        o3.TensorProduct(*args, instructions, **options),
    )


def test_weights_given_to_the_call_are_e3nns(o3: Any) -> None:
    args = ("4x0e+4x1o", "0e+1o", "4x0e+4x1o")
    mine = FullyConnectedTensorProduct(*args, internal_weights=False)
    other = o3.FullyConnectedTensorProduct(*args, internal_weights=False)
    x, y, w = torch.randn(5, 16), torch.randn(5, 4), torch.randn(mine.weight_numel)
    assert_close(mine(x, y, w), other(x, y, w))


def test_wigner_3j_and_harmonics_are_e3nns(o3: Any) -> None:
    for l1, l2 in ((a, b) for a in range(5) for b in range(5)):
        for l3 in range(abs(l1 - l2), l1 + l2 + 1):
            assert_close(wigner_3j(l1, l2, l3), o3.wigner_3j(l1, l2, l3))
    v = torch.randn(5, 3)
    assert_close(
        spherical_harmonics(5, v),
        o3.spherical_harmonics(list(range(6)), v, normalize=True, normalization="component"),
    )
    assert_close(
        spherical_harmonics(3, v, normalize=False),
        o3.spherical_harmonics(list(range(4)), v, normalize=False, normalization="component"),
    )


# --- gradients ---


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per item"])
def test_second_derivatives(shared: bool) -> None:
    product = FullyConnectedTensorProduct(
        "2x0e+2x1o", "0e+1o", "2x0e+2x1o", shared_weights=shared, internal_weights=False
    )
    x, y, w = (
        torch.randn(2, 8),
        torch.randn(2, 4),
        torch.randn(*(() if shared else (2,)), product.weight_numel),
    )
    given = tuple(t.requires_grad_() for t in (x, y, w))
    assert torch.autograd.gradcheck(product, given)
    assert torch.autograd.gradgradcheck(product, given)


def test_second_derivatives_with_unequal_multiplicities() -> None:
    product = FullyConnectedTensorProduct("1x0e+2x1o", "2x1o", "2x0e+1x1e")
    given = tuple(t.requires_grad_() for t in inputs(product, (1,)))
    assert torch.autograd.gradgradcheck(product, given)


def test_training_on_forces() -> None:
    """The gradient, with respect to weights, of a loss on the gradient with respect to positions:
    against finite differences.
    """
    product = FullyConnectedTensorProduct("1x0e+1x1o+1x2e", "0e+1o+2e", "2x0e")
    positions = torch.randn(4, 3)

    def loss(weight: Tensor) -> Tensor:
        r = positions.clone().requires_grad_()
        Y = spherical_harmonics(2, r, normalize=False)
        energy = torch.func.functional_call(product, {"weight": weight}, (Y, Y)).square().sum()
        (force,) = torch.autograd.grad(energy, r, create_graph=True)
        return force.square().mean()

    assert torch.autograd.gradcheck(loss, (product.weight.detach().clone().requires_grad_(),))


# --- shapes, layouts, states ---


def test_leading_dimensions_broadcast() -> None:
    product = FullyConnectedTensorProduct("2x0e+2x1o", "0e+1o", "2x0e+2x1o", shared_weights=False)
    x, y, w = torch.randn(5, 1, 8), torch.randn(3, 4), torch.randn(5, 3, product.weight_numel)
    want = product(
        x.expand(5, 3, 8).reshape(15, 8), y.expand(5, 3, 4).reshape(15, 4), w.reshape(15, -1)
    ).reshape(5, 3, 8)
    assert_close(product(x, y, w), want)
    assert product(torch.randn(8), torch.randn(4), torch.randn(product.weight_numel)).shape == (8,)
    assert product(
        torch.randn(0, 8), torch.randn(0, 4), torch.randn(0, product.weight_numel)
    ).shape == (0, 8)


def transposed(x: Tensor, irreps: Irreps) -> Tensor:
    """From (multiplicity, components) to (components, multiplicity), term by term."""
    return torch.cat(
        [
            x[..., s].unflatten(-1, (mul, ir.dim)).mT.flatten(-2)
            for s, (mul, ir) in zip(irreps.slices(), irreps)
        ],
        -1,
    )


@pytest.mark.parametrize("irreps", PRODUCTS, ids=str)
def test_the_other_layout(irreps: tuple[str, str, str]) -> None:
    product = FullyConnectedTensorProduct(*irreps)
    other = FullyConnectedTensorProduct(*irreps, layout="ir_mul")
    other.load_state_dict(product.state_dict())
    x, y = inputs(product)
    got = other(transposed(x, product.irreps_in1), transposed(y, product.irreps_in2))
    assert_close(got, transposed(product(x, y), product.irreps_out))


def test_equal_multiplicities_are_one_statement() -> None:
    product = FullyConnectedTensorProduct(
        "8x0e+8x1o+8x2e", "0e+1o+2e", "8x0e+8x1o+8x2e", shared_weights=False
    )
    assert product.statements() == (
        "Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]",
    )
    unequal = FullyConnectedTensorProduct("8x0e+4x1o", "0e+1o", "8x0e+4x1o")
    assert len(unequal.statements()) == 4  # one for each pair of multiplicities


def test_outputs_that_no_path_reaches_are_zero() -> None:
    product = FullyConnectedTensorProduct("2x0e", "0e", "2x0e+3x1o+1x0o")
    out = product(torch.randn(4, 2), torch.randn(4, 1))
    assert out.shape == (4, 12) and not out[:, 2:].any()
    assert product.output_mask.tolist() == [1.0] * 2 + [0.0] * 10
    nothing = FullyConnectedTensorProduct("2x0e", "0e", "1x0o")
    assert nothing.statements() == () and not nothing(torch.randn(4, 2), torch.randn(4, 1)).any()


def test_precision_survives_a_stay_in_half() -> None:
    product = FullyConnectedTensorProduct(*PRODUCTS[1])
    exact = product.V0.clone()
    assert torch.equal(product.half().double().V0, exact)
    assert product.float().V0.dtype == torch.float32


@pytest.mark.parametrize("out", ["8x0e+8x1o", "1x0e+1x1o"])
def test_products_with_scalars_promote_dtypes(out: str) -> None:
    product = FullyConnectedTensorProduct("4x0e+4x1o", "3x0e", out).float()
    x, y = torch.randn(5, 16).float(), torch.randint(-3, 4, (5, 3)).float()
    want = product(x, y)
    for a, b in ((x, y.long()), (x, y.double()), (x.double(), y), (x, y.half())):
        got = product(a, b)
        dtypes = torch.promote_types(a.dtype, b.dtype), torch.float32
        assert got.dtype == torch.promote_types(*dtypes)
        assert_close(got.float(), want, rtol=1e-5, atol=1e-5)


def test_copies_states_and_meta() -> None:
    product = FullyConnectedTensorProduct(*PRODUCTS[2])
    x, y = inputs(product)
    assert torch.equal(copy.deepcopy(product)(x, y), product(x, y))
    with torch.device("meta"):
        empty = FullyConnectedTensorProduct(*PRODUCTS[2])
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(product.state_dict())
    assert torch.equal(empty(x, y), product(x, y))
    assert set(product.state_dict()) == {"weight", "output_mask"}


def test_modules_that_were_stored_without_a_plan() -> None:
    product = FullyConnectedTensorProduct("4x0e + 4x1o", "2x0e + 1o", "4x0e + 4x1o")
    x, y = torch.randn(3, 16), torch.randn(3, 5)
    state = dict(vars(product))
    plan = state.pop("_plan")
    older = FullyConnectedTensorProduct.__new__(FullyConnectedTensorProduct)
    older.__setstate__({**state, "_groups": plan.groups, "_scalars": plan.scalars})
    assert older._plan == plan and torch.equal(older(x, y), product(x, y))


def test_the_pattern_is_promised_to_be_constant() -> None:
    from insum.facts import facts_of

    product = FullyConnectedTensorProduct(*PRODUCTS[0])
    for made in (product, copy.deepcopy(product), copy.deepcopy(product).float()):
        assert all(facts_of(getattr(made, f"{name}0")).constant for name in "IJKL")


def test_irreps() -> None:
    irreps = Irreps.of(" 16x0e +1o+ 2 x 2y")
    assert str(irreps) == "16x0e+1x1o+2x2e" and irreps.dim == 16 + 3 + 10
    assert Irreps.of(str(irreps)) == irreps and Irreps.of("").dim == 0
    assert [str(ir) for ir in Irrep(2, -1) * Irrep(1, 1)] == ["1o", "2o", "3o"]


def test_no_normalisation_given_is_the_usual_one() -> None:
    """As in e3nn, whose wrappers pass None on."""
    given = ("2x0e + 1o", "0e + 1o", "3x0e + 2x1o")
    usual, none = (
        FullyConnectedTensorProduct(*given, **options)
        for options in ({}, {"irrep_normalization": None, "path_normalization": None})
    )
    none.load_state_dict(usual.state_dict())
    x, y = torch.randn(4, 5), torch.randn(4, 4)
    assert torch.equal(none(x, y), usual(x, y))
    named = FullyConnectedTensorProduct(
        *given, irrep_normalization="component", path_normalization="element"
    )
    named.load_state_dict(usual.state_dict())
    assert torch.equal(named(x, y), usual(x, y))
