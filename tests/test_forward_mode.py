"""Derivatives in forward mode: tangents of statements are statements; where they are not, that is
said, and nothing is written before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

import insum
from insum import nn
from insum.compat import calls, tangents
from insum.formats import COO

Function = Callable[[Tensor], Tensor]
EDGES = torch.tensor([[0, 1], [1, 2]])
EYE = COO.from_dense(torch.eye(3))
SQUARE = insum.compile("y[i] = x[i] * x[i]")
LAYER = nn.GraphConv(1, 1)
ONES = torch.ones(3)

REACHED: dict[str, Function] = {
    "insum": lambda x: insum.insum("y[i] = x[i] * x[i]", x=x),
    "compiled": lambda x: SQUARE(x=x),
    "extremum": lambda x: insum.insum("t[] max= x[i]", x=x),
    "scalar": lambda x: insum.insum("y[i] = a * b[i]", a=x[0], b=ONES),
    "einsum": lambda x: insum.einsum("y[i] = A[i,j] * x[j]", A=EYE, x=x),  # type: ignore[return-value]
    "matmul": lambda x: EYE @ x,
    "values": lambda x: insum.einsum("y[i] = A[i,j]", A=EYE.with_values(x)),  # type: ignore[return-value]
    "sparse result": lambda x: insum.einsum("S[i,j] = A[i,j] * x[j]", A=EYE, x=x).values,  # type: ignore[union-attr,return-value]
    "layer": lambda x: LAYER(x[:, None], EDGES),
    "propagate": lambda x: nn.propagate(EDGES, x[:, None]),
    "in place": lambda x: insum.insum("C[i] += x[i]", C=torch.zeros(3), x=x),
    "largest in place": lambda x: insum.insum("C[i] max= x[i]", C=torch.zeros(3), x=x),
}
MODES: dict[str, Callable[[Function, Tensor], Any]] = {
    "dual": lambda f, x: _dual(f, x),
    "dual, graded": lambda f, x: _dual(f, x.requires_grad_()),
    "dual, no grad": lambda f, x: torch.no_grad()(_dual)(f, x),
    "jvp": lambda f, x: jvp(f, (x,), (ONES,)),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "jvp of jvp": lambda f, x: jvp(lambda x: jvp(f, (x,), (ONES,))[1], (x,), (ONES,)),
    "jvp of vmap": lambda f, x: jvp(vmap(f), (x[None],), (ONES[None],)),
    "vmap of jvp": lambda f, x: vmap(lambda x: jvp(f, (x,), (ONES,))[1])(x[None]),
}


def _dual(f: Function, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x))))


IN_PLACE = ("in place", "largest in place")
GATHERED = lambda x: torch.zeros(3, 1).index_add(0, EDGES[1], x[EDGES[0]][:, None])
PLAIN: dict[str, Function] = {
    "insum": lambda x: x * x,
    "compiled": lambda x: x * x,
    "extremum": lambda x: x.amax(),
    "scalar": lambda x: x[0] * ONES,
    "einsum": lambda x: 1 * x,
    "matmul": lambda x: 1 * x,
    "values": lambda x: 1 * x,
    "sparse result": lambda x: 1 * x,
    "layer": lambda x: LAYER.lin_rel(GATHERED(x)) + LAYER.lin_root(x[:, None]),
    "propagate": GATHERED,
    "functions": lambda x: torch.nn.functional.silu(x[:, None] + x).sum(1) / (1 + x**2),
    "ties": lambda x: torch.stack([torch.minimum(x, ONES)[1:].amax(), torch.minimum(x, ONES)[0]]),
}
REACHED |= {
    "functions": lambda x: insum.insum("y[i] = silu(x[i] + x[j]) / (1 + x[i]**2)", x=x),
    "ties": lambda x: insum.insum(
        "y[to[i]] max= minimum(x[i], 1)", x=x, to=torch.tensor([1, 0, 0]), sizes={0: 2}
    ),
}


#: Every mode where it matters, two where the way is the same.
TAKEN = [
    (reached, mode)
    for reached in PLAIN
    for mode in MODES
    if mode in ("jvp", "hessian")
    or reached in ("insum", "extremum", "scalar", "functions")
    and mode != "jvp of jvp"
]


@pytest.mark.parametrize(("reached", "mode"), TAKEN)
def test_tangents(reached: str, mode: str) -> None:
    for _ in range(2):  # the second finds what the first has left
        got, want = (MODES[mode](f[reached], torch.arange(3.0)) for f in (REACHED, PLAIN))
        torch.testing.assert_close(got, want)


def test_a_hessian_beside_reverse_mode() -> None:
    """Of gathered and scattered values, by both modes, and of a function of three tensors."""
    to, of = torch.tensor([1, 0, 1, 1]), torch.tensor([2, 0, 0, 1])

    def f(x: Tensor, w: Tensor) -> Tensor:
        statement = "y[to[e],c] = gelu(x[of[e],c] - 0.5 * x[to[e],c]) * w[e] ** 2"
        y = insum.insum(statement, x=x, w=w, to=to, of=of, sizes={0: 2})
        return (y * y.tanh()).sum()

    x = torch.randn(3, 2, dtype=torch.float64)
    w = torch.randn(4, dtype=torch.float64)
    ours = hessian(f, argnums=(0, 1))(x, w)
    theirs = jacrev(jacrev(f, argnums=(0, 1)), argnums=(0, 1))(x, w)
    torch.testing.assert_close(ours, theirs)


def test_what_is_there_counts() -> None:
    """A tangent of what is added to, and of what is compared with, out of place."""
    base = torch.tensor([1.0, 5.0, 1.0], requires_grad=True)
    x = torch.tensor([2.0, 4.0, 1.0], requires_grad=True)
    for operator, plain in (("+=", torch.add), ("max=", torch.maximum)):
        run = lambda base, x, o=operator: insum.insum(f"C[i] {o} x[i]", C=base * 1, x=x)
        with forward_ad.dual_level():
            given = [forward_ad.make_dual(t, k * ONES) for k, t in enumerate((base, x), 1)]
            got, want = (forward_ad.unpack_dual(f(*given)).tangent for f in (run, plain))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mode", ["dual", "jvp", "jacfwd", "jvp of vmap", "vmap of jvp"])
@pytest.mark.parametrize("reached", IN_PLACE)
def test_in_place_a_tangent_is_refused(reached: str, mode: str) -> None:
    # an output that is not batched is found first
    with pytest.raises(insum.AutogradError, match=r"in forward mode|not batched"):
        MODES[mode](REACHED[reached], torch.arange(3.0))


def test_the_messages() -> None:
    with pytest.raises(insum.AutogradError) as caught:
        jvp(REACHED["in place"], (ONES,), (ONES,))
    assert str(caught.value).splitlines()[:2] == [
        "x carries a tangent, but statements in place have no derivatives in forward mode",
        "    C[i] += x[i]",
    ]
    assert "functional.jvp" in caught.value.remedy
    with pytest.raises(insum.AutogradError, match=r"^C carries a tangent"):
        jvp(lambda C: insum.insum("C[i] max= b[i]", C=C * 1, b=ONES), (ONES,), (ONES,))
    with pytest.raises(insum.AutogradError, match="inside of two transforms of that mode"):
        MODES["jvp of jvp"](REACHED["insum"], ONES)
    with pytest.raises(insum.AutogradError, match="over complex numbers"):
        z = torch.ones(3, dtype=torch.complex64)
        jvp(lambda z: insum.insum("y[i] = z[i] * z[i]", z=z), (z,), (z,))


def test_nothing_is_written_before() -> None:
    C = torch.zeros(3)
    with pytest.raises(insum.AutogradError):
        _dual(lambda x: insum.insum("C[i] += x[i]", C=C, x=x), ONES)
    assert not C.any()


@pytest.mark.parametrize("mode", ["dual", "jvp", "jacfwd", "hessian", "jvp of jvp"])
def test_what_has_no_tangent_is_computed(mode: str) -> None:
    """Statements over constants, detached tensors and integers, inside of a derivative."""

    def f(x: Tensor) -> Tensor:
        constant = insum.insum("y[i] = b[i] * d[i]", b=2 * ONES, d=x.detach())
        C = torch.zeros(3)
        insum.insum("C[i] += b[i]", C=C, b=constant)
        return x * C

    plain = lambda x: x * 2 * x.detach()
    got, want = (MODES[mode](g, torch.arange(3.0)) for g in (f, plain))
    torch.testing.assert_close(got, want)


def test_what_the_message_proposes_works() -> None:
    f = REACHED["insum"]
    x = torch.arange(3.0)
    assert torch.equal(torch.autograd.functional.jvp(f, x, ONES)[1], 2 * x)
    second = jacrev(jacrev(lambda x: f(x).sum()))(x)
    assert torch.equal(second, 2 * torch.eye(3))


def test_tangents_in_compiled_code() -> None:
    f, x = REACHED["insum"], torch.arange(3.0)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="in compiled code have no derivatives in forward mode"):
        torch.compile(lambda x: jvp(f, (x,), (ONES,))[1], backend="aot_eager")(x)
    torch._dynamo.reset()
    tangent = _dual(torch.compile(f, backend="eager"), x).tangent
    torch.testing.assert_close(tangent, 2 * x)


def test_tangents_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "probed", None)
    assert torch.equal(_dual(REACHED["insum"], ONES).tangent, 2 * ONES)
    assert torch.equal(jvp(REACHED["insum"], (ONES,), (ONES,))[1], 2 * ONES)


def test_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the names that looking needs, gradients are registered all the same."""
    library = torch.library.Library("insum_test_forward_mode", "DEF")  # type: ignore[no-untyped-call]
    library.define("double(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    op = torch.ops.insum_test_forward_mode.double
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_after_autograd_keyset")
        tangents.register_autograd(
            library, op.default, lambda x: None, lambda ctx, g: 2 * g, lambda ctx, inputs, output: 0
        )
    x = torch.ones(2, requires_grad=True)
    op(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]
    monkeypatch.delattr(torch._C, "_is_fwd_grad_enabled")
    with forward_ad.dual_level():
        assert tangents.with_tangent([forward_ad.make_dual(ONES, ONES)]) == -1
