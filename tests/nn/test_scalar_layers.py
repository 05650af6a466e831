"""Spherical harmonics, networks of scalars, gates and radial functions: equal to e3nn's in values
and gradients of every order, on the CPU and by generated kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import insum
from insum.nn import BesselBasis, FullyConnectedNet, Gate, SphericalHarmonics, spherical_harmonics
from insum.nn import harmonics as of_harmonics
from insum.runtime import compiling, inspection
from insum.testing import hostile
from insum.testing.as_on_a_gpu import ONLY_FUSED
from kernels import bound
from test_compile_only import MOST_REGISTERS, compile_one, launches, spilled

pytestmark = pytest.mark.usefixtures("in_double")
MISSING = "e3nn is not installed: not compared with it"
silu = torch.nn.functional.silu


def twice(function: Any, *leaves: Tensor) -> list[Tensor]:
    """Values, gradients, and gradients of a loss on both."""
    held = [leaf.clone().requires_grad_() for leaf in leaves]
    out = function(*held)
    first = torch.autograd.grad(out.square().sum(), held, create_graph=True)
    loss = out.sum() + sum(one.square().sum() for one in first)
    return [out, *first, *torch.autograd.grad(loss, held)]


def alike(ours: Any, theirs: Any, *leaves: Tensor) -> None:
    for one, other in zip(twice(ours, *leaves), twice(theirs, *leaves), strict=True):
        assert_close(one, other, rtol=1e-11, atol=1e-11)


# --- spherical harmonics ---


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("degree", [1, 3, 6, 7])
def test_harmonics_are_e3nns(degree: int, normalize: bool) -> None:
    o3 = pytest.importorskip("e3nn.o3", reason=MISSING)
    v = torch.randn(4, 2, 3)
    for normalization in ("component", "norm", "integral"):
        every = list(range(degree + 1)), [degree, 1, 1]
        for degrees in every:
            ours = SphericalHarmonics(degrees, normalize, normalization)
            theirs = o3.SphericalHarmonics(degrees, normalize, normalization)
            assert str(ours.irreps_out.simplified()) == str(theirs.irreps_out)
            unit = torch.nn.functional.normalize(v, dim=-1)
            assert_close(ours(unit), theirs(unit), rtol=0, atol=1e-14)
            alike(ours, lambda x: theirs(x).clone(), v)  # noqa: B023


def test_harmonics_have_derivatives_of_every_order() -> None:
    v = torch.randn(3, 3, requires_grad=True)
    assert torch.autograd.gradgradcheck(SphericalHarmonics(3), v)
    assert torch.autograd.gradgradcheck(SphericalHarmonics([4, 1], normalize=False), v)

    def force(x: Tensor) -> Tensor:
        energy = spherical_harmonics(2, x).pow(3).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    assert torch.autograd.gradgradcheck(force, v)


def test_harmonics_at_zero_and_of_nothing() -> None:
    zero = torch.zeros(1, 3, requires_grad=True)
    spherical_harmonics(2, zero).sum().backward()
    assert zero.grad is not None and not zero.grad.isnan().any()
    assert SphericalHarmonics(2)(torch.randn(0, 3)).shape == (0, 9)
    assert SphericalHarmonics(0)(torch.randn(2, 3)).tolist() == [[1.0], [1.0]]
    assert SphericalHarmonics("1e + 2e").irreps_in == SphericalHarmonics("1e").irreps_in


def test_transformed_harmonics_are_the_same() -> None:
    v = torch.randn(3, 3)
    layer = SphericalHarmonics(3)
    assert_close(torch.func.vmap(layer)(v), layer(v))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_close(compiled(v), layer(v))


# --- networks, gates, radial functions ---


@pytest.mark.parametrize("options", [{}, {"out_act": True, "variance_out": 3}, {"act": None}])
def test_a_network_is_e3nns(options: dict[str, Any]) -> None:
    theirs = pytest.importorskip("e3nn.nn", reason=MISSING).FullyConnectedNet
    given: dict[str, Any] = {"act": silu, **options}
    ours, other = FullyConnectedNet([3, 5, 4, 2], **given), theirs([3, 5, 4, 2], **given)
    ours.load_state_dict(other.state_dict())
    alike(ours, other, torch.randn(2, 6, 3))


def test_a_gate_is_e3nns() -> None:
    theirs = pytest.importorskip("e3nn.nn", reason=MISSING).Gate
    given = "4x0e+2x0o", [silu, torch.tanh], "3x0e+4x0o", [torch.sigmoid, torch.abs]
    for irreps in ("2x1o+3x2e+2x1e", "7x1o"):
        ours, other = Gate(*given, irreps), theirs(*given, irreps)
        assert str(ours.irreps_in) == str(other.irreps_in)
        assert str(ours.irreps_out.simplified()) == str(other.irreps_out.simplify())
        alike(ours, other, torch.randn(2, 5, ours.irreps_in.dim))


def test_radial_functions() -> None:
    basis = BesselBasis(4.0, 5, power=5, trainable=True)
    x = torch.tensor([0.3, 2.0, 3.9, 4.0, 5.0])[:, None]

    def by_hand(x: Tensor) -> Tensor:
        share = x / 4
        ending = 1 - 21 * share**5 + 35 * share**6 - 15 * share**7
        waves = torch.sin(basis.bessel_weights * x) / x * 0.5**0.5
        return waves * ending * (x < 4)

    alike(basis, by_hand, x)
    (own,) = torch.autograd.grad(basis(x).sum(), basis.bessel_weights)
    (want,) = torch.autograd.grad(by_hand(x).sum(), basis.bessel_weights)
    assert_close(own, want)


def of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(5, 3)


MISTAKES: dict[str, tuple[Any, str]] = {
    "normalization": (lambda: SphericalHarmonics(1, True, "sum"), "normalization is 'sum'"),
    "vectors": (lambda: SphericalHarmonics(1)(torch.ones(4)), "3 in the last dimension"),
    "sizes": (lambda: FullyConnectedNet([3]), "at least two sizes"),
    "activation": (lambda: FullyConnectedNet([3, 2], torch.sin), "sin is no activation"),
    "inputs": (lambda: FullyConnectedNet([3, 2])(torch.ones(2)), "3 in the last dimension"),
    "scalars": (lambda: Gate("1x1o", [silu], "", [], ""), "irreps of degree 0"),
    "activations": (lambda: Gate("1x0e", [], "", [], ""), "0 activations were given"),
    "gates": (lambda: Gate("", [], "2x0e", [silu], "3x1o"), "as many irreps"),
    "odd": (lambda: Gate("1x0o", [silu], "", [], ""), "has no parity"),
    "features": (lambda: Gate("2x0e", [silu], "", [], "")(torch.ones(3)), "2 in the last"),
    "cutoff": (lambda: BesselBasis(-1.0), "a positive number"),
    "a variance": (lambda: FullyConnectedNet([3, 2], silu, variance_in=-1), "a positive number"),
    "no list": (lambda: Gate("1x0e", 3, "", [], ""), "a list of activations"),  # type: ignore[arg-type]
    "two distances": (lambda: BesselBasis(4.0)(torch.ones(5, 2)), "distances"),
    "a fake": (lambda: FullyConnectedNet([4, 2])(hostile.fake_tensor()), "a fake tensor"),
    "inference": (lambda: FullyConnectedNet([3, 2])(of_inference()), "under inference mode"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, text = MISTAKES[name]
    with pytest.raises(insum.InsumError, match=text):
        call()


# --- by generated kernels ---


@pytest.mark.interpreter
def test_harmonics_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    v = torch.randn(5, 3)
    want = twice(SphericalHarmonics(2), v)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    with insum.settings(**ONLY_FUSED):
        got = twice(SphericalHarmonics(2), v)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["net", "gate", "radial"])
def test_scalar_layers_by_kernels(name: str) -> None:
    layer: Any = {
        "net": FullyConnectedNet([3, 4, 2], silu),
        "gate": Gate("2x0e", [silu], "2x0e", [torch.sigmoid], "2x1o"),
        "radial": BesselBasis(2.0, 3),
    }[name]
    x = {"net": torch.randn(4, 3), "gate": torch.randn(3, 10), "radial": torch.rand(4, 1) + 0.5}
    want = twice(layer, x[name])
    with insum.settings(backend="fused"):
        got = twice(layer, x[name])
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)


@pytest.mark.compile_only
def test_gradients_of_harmonics_fit_the_registers() -> None:
    rows = torch.zeros(512, 16, dtype=torch.float32)
    stated = of_harmonics._stated(3, True, "component", rows.device, rows.dtype)
    unit = of_harmonics.UNIT
    given = {"S": rows[:, 0].contiguous(), "G": rows, "X": rows, "Y": rows, **stated.gradient}
    calls = [
        (of_harmonics.MONOMIALS, {**stated.monomials, "U": rows[:, :4].contiguous()}, 16),
        (unit.statement(), given, 3),
        (unit.gradient("G"), {**given, "Z": rows[:, :3].contiguous()}, 16),
    ]
    calls[-1][1].pop("G")
    for statement, values, extent in calls:
        problem = bound(statement, values, {0: 512, 1: extent})
        for one in launches(inspection.elsewhere(problem, values, architecture="sm_90")):
            found: compiling.CompilerReport = compile_one(one, "sm_90")
            assert not spilled(found) and 0 < found.registers < MOST_REGISTERS["sm_90"]


@pytest.mark.parametrize("normalize", [True, False])
def test_harmonics_of_vectors_without_values(normalize: bool) -> None:
    """Shapes are known on the meta device, and so are those of gradients."""
    layer = SphericalHarmonics("0e + 2e + 5o", normalize)
    vectors = torch.randn(4, 3, device="meta", requires_grad=True)
    found = layer(vectors)
    (slope,) = torch.autograd.grad(found.sum(), vectors, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), vectors)
    assert found.shape == (4, 17) and slope.shape == curve.shape == (4, 3)
    assert found.device.type == "meta"


def test_a_gate_in_code_for_all_sizes() -> None:
    """A tracer takes scales of activations for unknown, then."""
    gate = Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o")
    torch._dynamo.reset()
    run = torch.compile(gate, backend="eager", fullgraph=True, dynamic=True)
    x = torch.randn(3, gate.irreps_in.dim)
    assert_close(run(x), gate(x))
