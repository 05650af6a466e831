"""Small factors that fill no tiles: copied first, forward and backward, for index tensors that are
known and for such that are not, in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.plan import aligning, copying, fitting
from insum.runtime import bound_launch, launch, ready, symbolic, unseen
from insum.runtime.bound_launch import BoundLaunch
from insum.runtime.program import Program
from kernels import ONLY_FUSED, bound, error, poison_new_memory, watch_programs

pytestmark = pytest.mark.interpreter

CONVOLUTION = "out[x,m] = f[nb[z,x],c] * w[z,c,m]"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies pay as if everything were larger; memory that nobody wrote to holds NaN."""
    monkeypatch.setattr(copying, "LEAST_POINTS", 1)
    monkeypatch.setattr(fitting, "LEAST_READS", 0)
    monkeypatch.setattr(fitting, "LEAST_TURNED", 0)
    monkeypatch.setattr(aligning, "LEAST_READS", 2**31)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    poison_new_memory(monkeypatch)
    memory.forget()
    with insum.settings(**ONLY_FUSED):
        yield


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    return watch_programs(monkeypatch)


def copied(program: Program) -> list[str]:
    """The tensors that a program copies."""
    return [one.header.split()[1] for one in program.launches if "__copies_" in one.kernel.name]


def table(voxels: int, offsets: int = 3) -> Tensor:
    torch.manual_seed(voxels)
    found = torch.randint(0, voxels, (offsets, voxels), dtype=torch.int32)
    return torch.where(torch.rand(offsets, voxels) < 0.6, found, -1)


def convolved(f: Tensor, w: Tensor, nb: Tensor) -> Tensor:
    padded = torch.cat([f.double(), torch.zeros(1, f.shape[1], dtype=torch.float64)])
    return torch.einsum("zxc,zcm->xm", padded[nb.long()], w.double())


def tracked(f: Tensor, w: Tensor) -> dict[str, Any]:
    return {"f": f.requires_grad_(), "w": w.requires_grad_()}


def check_with_gradients(out: Tensor, f: Tensor, w: Tensor, nb: Tensor, allowed: float) -> None:
    """A convolution and its gradients beside the same in double precision."""
    exact = [leaf.detach().double().requires_grad_() for leaf in (f, w)]
    want, upstream = convolved(exact[0], exact[1], nb), torch.randn_like(out)
    got = torch.autograd.grad(out, (f, w), upstream)
    right = torch.autograd.grad(want, exact, upstream.double())
    for one, other in zip((out.detach(), *got), (want.detach(), *right), strict=True):
        assert error(one, other) < allowed


def drawn(inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    nb = table(70)
    f, w = torch.randn(70, inputs), torch.randn(3, inputs, outputs) / inputs**0.5
    return f.half(), w.half(), nb


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(120, 72), (100, 20), (24, 24), (33, 136), (24, 3)]
)
def test_channels_that_fill_no_tile(inputs: int, outputs: int, launched: list[Program]) -> None:
    f, w, nb = drawn(inputs, outputs)
    f[-1], w[-1, -1, -1] = 100.0, 100.0  # what would be read past an end is large
    out = insum.insum(CONVOLUTION, **tracked(f, w), nb=insum.unchanging(nb), padded=("nb",))
    assert copied(launched[-1]) == ["w"]
    check_with_gradients(out, f, w, nb, 2e-3)


def test_gradients_of_gradients(launched: list[Program]) -> None:
    f, w, nb = drawn(40, 24)
    leaves, twice = (f.requires_grad_(), w.requires_grad_()), []
    exact = tuple(leaf.detach().double().requires_grad_() for leaf in leaves)
    upstream = torch.randn(70, 24)
    results = (
        (insum.insum(CONVOLUTION, f=f, w=w, nb=insum.unchanging(nb), padded=("nb",)), leaves),
        (convolved(*exact, nb), exact),
    )
    for out, (a, b) in results:
        (first,) = torch.autograd.grad(out, a, upstream.to(out.dtype), create_graph=True)
        twice.append(torch.autograd.grad((first / 8).pow(2).sum(), b)[0])
    assert error(*twice) < 5e-3
    assert ["w"] in map(copied, launched)


def test_new_tables_of_other_sizes(
    launched: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program for all sizes of a class, and for tables that nobody has seen."""
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    for voxels, offsets in ((150, 3), (160, 3), (160, 4)):
        f, w = torch.randn(voxels, 40).half(), torch.randn(offsets, 40, 24).half()
        nb = table(voxels, offsets)
        out = insum.insum(CONVOLUTION, f=f, w=w, nb=nb, padded=("nb",))
        assert error(out, convolved(f, w, nb)) < 2e-3
    insum.synchronize()
    assert len(set(map(id, launched[:2]))) == 1 and copied(launched[0]) == ["w"]


def test_matrices_that_an_index_selects(launched: list[Program]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(300, 40).half(), torch.randn(4, 40, 24).half()
    e = torch.randint(0, 4, (300,)).sort().values
    y = insum.insum("y[p,n] = x[p,k] * w[e[p],k,n]", x=x, w=w, e=insum.unchanging(e))
    assert error(y, torch.einsum("pk,pkn->pn", x.double(), w.double()[e])) < 2e-3
    assert copied(launched[-1]) == ["w"]


def test_weights_in_another_order(launched: list[Program]) -> None:
    """Rows of the copy are what lies together; where nothing does, there is no copy."""
    f, w, nb = drawn(40, 24)
    statement, nb = "out[x,m] = f[nb[z,x],c] * w[m,z,c]", insum.unchanging(nb)
    turned = w.permute(2, 0, 1).contiguous()
    for weights in (turned, w.permute(2, 0, 1)):
        out = insum.insum(statement, f=f, w=weights, nb=nb, padded=("nb",))
        assert error(out, convolved(f, w, nb)) < 2e-3 and copied(launched[-1]) == ["w"]
    apart = torch.stack([turned, turned], -1)[..., 0]
    out = insum.insum(statement, f=f, w=apart, nb=nb, padded=("nb",))
    assert error(out, convolved(f, w, nb)) < 2e-3 and copied(launched[-1]) == []


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(64, 32), (120, 72), (33, 136), (24, 3), (130, 260)]
)
@pytest.mark.parametrize("layout", ["as it is", "along the sum", "apart"])
def test_factors_of_32_bits_are_turned(
    inputs: int, outputs: int, layout: str, launched: list[Program]
) -> None:
    """Forward and backward: there the same weights lie along the sum, or across it."""
    f, w, nb = (t.float() if t.dtype == torch.float16 else t for t in drawn(inputs, outputs))
    f[-1], w[-1, -1, -1] = 100.0, 100.0  # what would be read past an end is large
    match layout:
        case "along the sum":
            w = w.mT.contiguous().mT
        case "apart":
            w = torch.stack([w, w], -1)[..., 0]
    out = insum.insum(CONVOLUTION, **tracked(f, w), nb=insum.unchanging(nb), padded=("nb",))
    if outputs >= 8:
        assert copied(launched[-1]) == ["w"] * (layout != "along the sum")
    check_with_gradients(out, f, w, nb, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "along the sum"])
@pytest.mark.parametrize(("depth", "width"), [(8, 3), (8, 8), (8, 40), (2, 16), (12, 24), (24, 5)])
def test_rows_that_are_shorter_than_any_tile(
    depth: int, width: int, turned: bool, dtype: torch.dtype
) -> None:
    """Several entries of a segment fill a tile, each with few numbers; or columns are few."""
    torch.manual_seed(0)
    a, b = torch.randn(60, 16, depth).to(dtype), torch.randn(6, depth, width).to(dtype)
    r, c = torch.arange(5).repeat_interleave(12), torch.randint(0, 6, (60,))
    values = {"A": a, "B": b.mT.contiguous().mT if turned else b}
    indices = {"r": insum.unchanging(r), "c": insum.unchanging(c)}
    statement, shape = "Y[r[p],i,j] = A[p,i,k] * B[c[p],k,j]", (5, 16, width)
    got = insum.insum(statement, **values, **indices, out_shape=shape)  # type: ignore[arg-type]
    each = torch.einsum("pik,pkj->pij", a.double(), b.double()[c])
    assert error(got, each.new_zeros(shape).index_add(0, r, each)) < 2e-3


def test_in_place_and_in_deterministic_mode() -> None:
    f, w, nb = drawn(40, 24)
    torch.use_deterministic_algorithms(True)
    try:
        start = torch.randn(70, 24).half()
        out = start.clone()
        statement = CONVOLUTION.replace("=", "+=")
        insum.insum(statement, out=out, f=f, w=w, nb=insum.unchanging(nb), padded=("nb",))
    finally:
        torch.use_deterministic_algorithms(False)
    assert error(out, start.double() + convolved(f, w, nb)) < 2e-3


def test_friendly_sizes_are_not_copied(launched: list[Program]) -> None:
    f, w, nb = drawn(64, 32)
    insum.insum(CONVOLUTION, f=f, w=w, nb=insum.unchanging(nb), padded=("nb",))
    assert copied(launched[-1]) == []


def test_exported_programs_copy_too() -> None:
    f, w, nb = drawn(40, 24)
    values = {"f": f, "w": w, "nb": nb}
    problem = bound(CONVOLUTION, values, padded=("nb",))
    program = symbolic.program_of(problem, values)
    got = symbolic.run(program, problem, values, lambda function: function)
    assert error(got, convolved(f, w, nb)) < 2e-3 and copied(program) == ["w"]


# --- rows that wide loads cannot read -------------------------------------------------------------


@pytest.fixture
def gathered_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligning, "LEAST_READS", 0)
    monkeypatch.setattr(aligning, "LEAST_READ", 0)


def reads_aligned(program: Program) -> bool:
    return "<aligned>" in dict(program.launches[-1].plan.strides)


@pytest.mark.parametrize(("inputs", "outputs"), [(36, 24), (25, 32)])
def test_rows_that_begin_anywhere(
    inputs: int, outputs: int, launched: list[Program], gathered_often: None
) -> None:
    """One copy, or one of each factor; gradients of the weights read such rows as well."""
    f, w, nb = drawn(inputs, outputs)
    leaves = f.requires_grad_(), w.requires_grad_()
    out = insum.insum(CONVOLUTION, f=f, w=w, nb=insum.unchanging(nb), padded=("nb",))
    assert reads_aligned(launched[-1]) and copied(launched[-1]) == ["w"] * (inputs == 36) + ["f"]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = convolved(exact[0], exact[1], nb)
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    right = torch.autograd.grad(want, exact, torch.ones_like(want))
    assert error(out.detach(), want.detach()) < 2e-3
    assert max(error(g, r) for g, r in zip(got, right, strict=True)) < 2e-3


def test_such_rows_of_new_tables(
    launched: list[Program], monkeypatch: pytest.MonkeyPatch, gathered_often: None
) -> None:
    """Where indices are trusted: what leads out of range is not read from a copy."""
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    for check, copies in (("async", ["w"]), ("never", ["w", "f"])):
        launched.clear()
        for voxels in (150, 160):
            f, w, nb = torch.randn(voxels, 20).half(), torch.randn(3, 20, 24).half(), table(voxels)
            with insum.settings(check=check):
                out = insum.insum(CONVOLUTION, f=f, w=w, nb=nb, padded=("nb",))
            assert error(out, convolved(f, w, nb)) < 2e-3
        insum.synchronize()
        assert len(set(map(id, launched))) == 1 and copied(launched[0]) == copies


@pytest.mark.parametrize("known", [False, True])
def test_every_address_is_that_of_its_tensor(
    known: bool, monkeypatch: pytest.MonkeyPatch, gathered_often: None
) -> None:
    """As kernels are launched on a device; nothing is computed."""
    monkeypatch.setattr(memory, "can_look", lambda tensor: known)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    found: list[dict[str, int]] = []

    def compiled(self: BoundLaunch, unaligned: int) -> Callable[[int, list[Any]], None]:
        names = {place: name for place, name, _ in self.pointers}
        return lambda _, given: found.append({n: given[place] for place, n in names.items()})

    on_a_device = {**vars(launch), "interpreting": lambda: False}
    for module in (bound_launch, ready, unseen):
        monkeypatch.setattr(module, "launch", SimpleNamespace(**on_a_device))
    monkeypatch.setattr(BoundLaunch, "compiled", compiled)
    w = torch.randn(3, 20, 24).half()
    for voxels in (150, 160, 150):
        f, nb = torch.randn(voxels, 20).half(), table(voxels)
        found.clear()
        with insum.settings(check="never"):
            out = insum.insum(CONVOLUTION, f=f, w=w, nb=nb, padded=("nb",))
        fits, aligns, product = found
        own = {"nb": nb.data_ptr(), "<out>": out.data_ptr()}
        copies = {"<fitted>": fits.pop("<fitted>"), "<aligned>": aligns.pop("<aligned>")}
        assert fits == {"w": w.data_ptr()} and aligns == {"f": f.data_ptr()}
        assert product == {**own, **copies} and len({*product.values()}) == 4


def test_such_rows_in_exported_programs(gathered_often: None) -> None:
    f, w, nb = drawn(20, 24)
    values = {"f": f, "w": w, "nb": nb}
    problem = bound(CONVOLUTION, values, padded=("nb",))
    program = symbolic.program_of(problem, values)
    got = symbolic.run(program, problem, values, lambda function: function)
    assert error(got, convolved(f, w, nb)) < 2e-3
