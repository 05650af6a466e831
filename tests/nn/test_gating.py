"""Gates in one launch each way, in Triton's interpreter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from insum.nn import Gate
from insum.testing.as_on_a_gpu import pretended

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("in_double")]
silu, tanh, sigmoid = torch.nn.functional.silu, torch.tanh, torch.sigmoid
ONCE = ["insum_gate", "insum_gate_gradient", "insum_gate_second"]
GATES: dict[str, Callable[[], Gate]] = {
    "scalars": lambda: Gate("3x0e + 2x0e", [torch.relu, None], "", [], ""),
    "irreps": lambda: Gate("3x0e", [silu], "5x0e", [silu], "3x1o + 2x2e"),
    "functions": lambda: Gate(
        *("2x0e + 2x0o", [silu, tanh], "2x0e + 1x0e + 2x0o", [sigmoid, None, torch.abs]),
        "2x1o + 1x2e + 2x1e",
    ),
}


def orders(gate: Gate, x: Tensor, most: int) -> list[Tensor]:
    """A result, and gradients of every order up to ``most``."""
    found = [gate(x)]
    total = found[0].sin().sum()
    for order in range(most):
        (last,) = torch.autograd.grad(total, [x], create_graph=order < most - 1)
        total = last.sin().sum()
        found.append(last)
    return found


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_gate_is_its_parts(name: str, most: int, launched: list[str]) -> None:
    gate = GATES[name]()
    x = torch.randn(5, gate.irreps_in.dim, requires_grad=True)
    want = orders(gate, x, most)
    assert not launched
    with pretended(require_fused=False):
        got = orders(gate, x, most)
    if most < 3:  # of a result both are gradients, and one of them has one itself
        assert sorted({*launched}) == sorted(ONCE[: most + 1])
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("how", ["turned", "cut", "expanded"])
def test_rows_that_are_apart_in_memory(how: str) -> None:
    """What is saved for the second gradient is what came in, not a copy."""
    gate = GATES["irreps"]()
    x = torch.randn(5, gate.irreps_in.dim)
    wide = torch.cat([x, x], 1)
    ways = {"turned": x.T.contiguous().T, "cut": wide[:, : x.shape[1]], "expanded": x[:1]}
    apart = ways[how].expand_as(x).requires_grad_()
    want = orders(gate, apart, 2)
    with pretended(require_fused=False):
        got = orders(gate, apart, 2)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_force_and_its_gradient_are_a_launch_each(launched: list[str]) -> None:
    gate = GATES["irreps"]()
    x = torch.randn(5, gate.irreps_in.dim, requires_grad=True)
    with pretended(require_fused=False):
        (force,) = torch.autograd.grad(gate(x).sum(), [x], create_graph=True)
        force.square().sum().backward()
    assert launched == ONCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    gate = GATES["functions"]()
    x = torch.randn(5, gate.irreps_in.dim)
    with pretended(require_fused=False):
        got = gate(x.to(dtype))
    assert got.dtype == dtype
    assert_close(got, gate(x.to(dtype).double()).to(dtype), rtol=1e-2, atol=1e-2)


def test_rows_of_every_shape_and_gradients_of_many_at_once(launched: list[str]) -> None:
    gate = GATES["functions"]()
    x, apart = torch.randn(2, 3, gate.irreps_in.dim), torch.randn(gate.irreps_in.dim, 4).T
    want = gate(x), gate(apart), torch.autograd.functional.jacobian(gate, apart)
    with pretended(require_fused=False):
        got = gate(x), gate(apart)
        every = torch.autograd.functional.jacobian(gate, apart, vectorize=True)
        assert gate(x[:, :0]).shape == (2, 0, gate.irreps_out.dim)
    assert launched
    assert_close((*got, every), want)


def test_copies_and_what_was_stored_before() -> None:
    gate = GATES["irreps"]()
    older = copy.deepcopy(gate)
    state = {name: value for name, value in vars(gate).items() if name != "_in_one"}
    older.__dict__.clear()
    older.__setstate__(state)
    x = torch.randn(5, gate.irreps_in.dim)
    with pretended(require_fused=False):
        for other in (older, copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
            assert_close(other(x), gate(x))
