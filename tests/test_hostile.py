"""Arguments that nobody should pass, to every public function: a result or an error of insum's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn, ones

import insum
from insum import formats, memory
from insum import nn as layers
from insum.accepted import COUNT, TENSOR, Accepted, explains, takes
from insum.testing import hostile

#: Public names that are values, modules, results of functions, or bases that nobody calls.
NOT_CALLED = {
    *("Explanation", "InsumError", "Suggestion", "TunedFormat", "SparseFormat", "FORMATS"),
    *("LayerReport", "SparsityReport", "export", "formats", "settings"),
}


def test_a_while_of_it() -> None:
    found = [f"{o}\n{o.trace}" for o in hostile.attempts(1000, 1_000_000) if o.wrong]
    assert not found, "\n".join(found[:5])


@pytest.mark.filterwarnings("ignore")
def test_the_calls_are_right() -> None:
    for name, make in hostile.CALLS.items():
        call = make()
        try:
            call.run(**call.arguments)
        except Exception as error:
            pytest.fail(f"{name}: {error!r}")


@pytest.mark.parametrize("module", [insum, layers, formats])
def test_every_public_function_is_among_them(module: Any) -> None:
    called = "\n".join(hostile.CALLS)
    wanted = [n for n in module.__all__ if n not in NOT_CALLED and not _is_error(module, n)]
    assert [n for n in wanted if n not in called] == []


def _is_error(module: Any, name: str) -> bool:
    one = getattr(module, name)
    return inspect.isclass(one) and issubclass(one, Exception)


def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Any) -> None:
        raise IndexError("tuple index out of range")

    def writes(x: Any) -> None:
        if isinstance(x, torch.Tensor) and x.device.type == "cpu":
            with torch.no_grad():
                x.zero_()
        raise insum.BindingError("a fact", expected="something")

    monkeypatch.setattr(hostile, "CALLS", {})
    hostile.right("fails", fails, x=hostile.ones(3))
    hostile.right("writes", writes, x=hostile.ones(3))
    wrong = {o.name: o.wrong for o in hostile.attempts(80) if o.wrong}
    assert wrong["fails"] == "IndexError: tuple index out of range"
    assert wrong["writes"] == "x was changed by a call that failed"


def test_a_trial_is_decided_by_its_seed() -> None:
    assert hostile.attempts(30, seed=5) == hostile.attempts(30, seed=5)


# --- what it has found ----------------------------------------------------------------------------


def test_a_nested_tensor_does_not_end_the_process() -> None:
    """torch's guards, which recognise calls that were made before, abort on one."""
    call = "y[i] = x[i] + z[i]"
    for _ in range(3):
        insum.insum(call, x=ones(3), z=ones(3))
    nested = torch.nested.nested_tensor([ones(2), ones(3)])
    with pytest.raises(insum.DtypeError, match="z is a nested tensor"):
        insum.insum(call, x=ones(3), z=nested)


def test_degrees_that_would_take_hours() -> None:
    with pytest.raises(insum.DtypeError, match="degrees is 2147483648"):
        layers.spherical_harmonics(2**31, ones(3))


def test_a_gradient_through_a_tensor_of_inference_mode() -> None:
    with torch.inference_mode():
        x = ones(3)
    w = ones(3, requires_grad=True)
    with pytest.raises(insum.AutogradError, match="x was made under inference mode"):
        insum.insum("y[i] = w[i] * x[i]", w=w, x=x)
    with torch.no_grad():
        assert insum.insum("y[i] = w[i] * x[i]", w=w, x=x).tolist() == [1, 1, 1]


def test_blocks_of_complex_weights_are_ranked_by_their_norm() -> None:
    weight = torch.zeros(4, 4, dtype=torch.complex64)
    weight[:2, 2:] = 1j
    assert layers.block_mask(weight, (2, 2), density=0.25).tolist() == [
        [False, True],
        [False, False],
    ]


@pytest.mark.parametrize("member", ["values", "indices", "shape"])
def test_a_format_that_was_tampered_with(member: str) -> None:
    A = hostile.corrupt(formats.COO.from_dense(torch.eye(3)), member, "something")
    with pytest.raises(insum.InsumError):
        A @ ones(3)
    with pytest.raises(insum.InsumError):
        insum.einsum("y[m] = A[m,k] * x[k]", A=A, x=ones(3))
    assert repr(A), "which error messages need"


def test_long_and_odd_texts_in_messages() -> None:
    with pytest.raises(insum.UnsupportedError) as caught:
        formats.COO.from_dense(torch.eye(3)).to_scipy("\ud800" * 10_000)
    assert len(str(caught.value)) < 3000 and str(caught.value).encode()


def test_a_layer_of_another_dtype() -> None:
    with pytest.raises(insum.DtypeError, match="float16 was passed to a layer of float32"):
        layers.GraphConv(2, 3)(ones(3, 2).half(), torch.tensor([[0, 1], [1, 2]]))


@pytest.mark.parametrize(
    "call",
    [
        lambda bad: layers.GraphConv(bad, 3),
        lambda bad: layers.RelationalConv(2, bad, 2),
        lambda bad: layers.SparseConv3d(2, 3, bad),
        lambda bad: layers.propagate(bad, ones(3, 2)),
        lambda bad: layers.spmm(formats.COO.from_dense(torch.eye(3)), bad),
        lambda bad: formats.COO.from_entries(bad, None, (3,)),
        lambda bad: formats.count_groups(bad, 2),
        lambda bad: insum.unchanging(bad),
        lambda bad: layers.magnitude_mask(bad, 0.5),
        lambda bad: insum.einsum(bad, A=ones(3)),
        lambda bad: insum.insum("y[i] = x[i]", x=ones(3), padded=bad),
    ],
)
@pytest.mark.parametrize("bad", [object(), nn.UninitializedParameter(), 2.5, [[]]])
def test_kinds_of_arguments(call: Any, bad: Any) -> None:
    with pytest.raises(insum.InsumError) as caught:
        call(bad)
    assert caught.value.expected or caught.value.remedy


# --- asking for kinds -----------------------------------------------------------------------------


def test_a_function_that_explains_asks_nothing_before_it_fails() -> None:
    asked: list[object] = []

    def fits(value: object) -> bool:
        asked.append(value)
        return isinstance(value, int)

    @explains(x=Accepted("an integer", fits))
    def half(x: Any) -> Any:
        return x / 2

    assert half(3.0) == 1.5 and asked == []
    with pytest.raises(insum.DtypeError, match="x is 'a'"):
        half("a")


def test_what_is_no_fault_of_the_arguments_is_let_through() -> None:
    @takes(x=TENSOR, n=COUNT.optional)
    def broken(x: Any, n: Any = None) -> Any:
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError, match="a mistake of ours"):
        broken(ones(2), n=3)
    with pytest.raises(insum.DtypeError, match="n is -1"):
        broken(ones(2), n=-1)


def test_nothing_is_remembered_of_what_was_refused() -> None:
    memory.forget()
    with pytest.raises(insum.DtypeError):
        insum.constant(ones(3).to(torch.complex64))
    assert memory.report().entries == 0


def test_rows_that_no_memory_holds() -> None:
    with pytest.raises(insum.FormatError, match="each of 2147483648 rows"):
        formats.ELL.from_edge_index(torch.tensor([[0], [1]]), num_nodes=2**31)
