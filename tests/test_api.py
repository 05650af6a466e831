"""`insum`, `compile`, `explain` and what the package shows of itself."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

import insum
from insum import api
from insum.call import prepared as calls


def test_public_names() -> None:
    assert insum.Insum is insum.insum and insum.__version__ == "0.1.0"
    for name in insum.__all__:
        assert getattr(insum, name) is not None
    assert issubclass(insum.StatementError, insum.InsumError) and issubclass(
        insum.StatementError, ValueError
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        insum.nothing  # noqa: B018
    assert {"insum", "einsum", "formats"} <= set(dir(insum))


def test_output_sizes() -> None:
    values: dict[str, Any] = {"x": torch.arange(3.0), "D": torch.tensor([4, 0, 4])}
    expected = [1.0, 0.0, 0.0, 0.0, 2.0]
    given: list[Any] = [{0: 5}, {"0": 5}, {"D": 5}, {"D[i]": 5}, {"y": (5,)}]
    for options in [
        {"out_shape": (5,)},
        {"out_shape": [5]},
        *({"sizes": sizes} for sizes in given),
    ]:
        assert insum.insum("y[D[i]] = x[i]", **options, **values).tolist() == expected
    assert insum.insum("y[D[i]] = x[i]", y=torch.empty(5), **values).tolist() == expected


def test_sizes_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain ones are known by what they are of; others are refused as before."""
    values: dict[str, Any] = {"x": torch.arange(3.0), "D": torch.tensor([4, 0, 4])}
    text = "y[D[i]] = x[i]"
    assert insum.insum(text, sizes={0: 5}, **values).shape == (5,)
    with monkeypatch.context() as patched:
        patched.setattr(api, "request_of", None)  # which is not asked again
        assert insum.insum(text, sizes={0: 6}, **values).shape == (6,)
    for wrong in ({0: True}, {0: 5.5}, {1: 5}):
        with pytest.raises(insum.InsumError):
            insum.insum(text, sizes=wrong, **values)


def test_numpy_sizes() -> None:
    numpy = pytest.importorskip("numpy")
    assert insum.insum("y[i] = s", s=2.0, sizes={"i": numpy.int64(3)}).tolist() == [2.0] * 3
    assert insum.insum("y[i] = s", s=2.0, out_shape=numpy.zeros((4,)).shape).shape == (4,)


def test_numpy_sizes_are_taken_whatever_was_called_before() -> None:
    rows, x = torch.tensor([0, 2]), torch.ones(2, 4)
    for shape in [(3, 4), (np.int64(3), 4), (np.int64(3), np.int32(4))]:
        for sizes in [None, {0: 3}, {0: np.int64(3)}]:
            options: dict[str, Any] = {"out_shape": shape, "sizes": sizes}
            found = insum.insum("y[rows[p],n] = x[p,n]", rows=rows, x=x, **options)
            assert found.shape == (3, 4)


@pytest.mark.parametrize("sizes", [np.arange(3), np.array([]), np.array({}), [3], "n", 3])
def test_sizes_that_are_no_mapping(sizes: Any) -> None:
    with pytest.raises(insum.BindingError, match=r"^sizes is "):
        insum.insum("y[i] = x[i]", x=torch.ones(3), sizes=sizes)


def test_numbers_of_every_kind() -> None:
    x = torch.tensor([1, 2])
    for number, dtype in (
        (2, torch.int64),
        (2.0, torch.float32),
        (True, torch.int64),
        (2j, torch.complex64),
    ):
        for _ in range(2):  # the second time from the cache
            result = insum.insum("y[i] = x[i] * s", x=x, s=number)
            assert result.dtype == dtype and torch.equal(result, x * number)


def test_the_cache_tells_kinds_apart() -> None:
    statement = "y[i] = x[i] * 0.5"
    assert insum.insum(statement, x=torch.ones(2)).dtype == torch.float32
    assert insum.insum(statement, x=torch.ones(2).double()).dtype == torch.float64
    integers = torch.ones(2, dtype=torch.int64)
    assert insum.insum(statement, x=integers).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert insum.insum(statement, x=integers).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert insum.insum(statement, x=torch.ones(3)).shape == (3,)
    assert insum.insum(statement, x=torch.ones(2).to_sparse()).to_dense().tolist() == [0.5, 0.5]


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds of calls, and sizes of one kind."""
    monkeypatch.setattr(calls, "MOST_KINDS", 3)
    monkeypatch.setattr(calls, "MOST_SIZES", 4)
    monkeypatch.setattr(calls, "_forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    dtypes = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32)
    for dtype in dtypes:
        for n in range(1, 9):
            result = insum.insum("y[i] = x[i]", x=torch.ones(n, dtype=dtype))
            assert result.shape == (n,) and result.dtype is dtype
    (kinds,) = calls._forms.values()
    assert 1 <= len(kinds.calls) <= 3
    assert all(1 <= len(prepared.bound) <= 4 for prepared in kinds.calls)


def test_settings_reach_prepared_calls() -> None:
    values: dict[str, Any] = {"x": torch.ones(2), "D": torch.tensor([0, 1])}
    insum.insum("y[i] = x[D[i]]", **values)
    with insum.settings(require_fused=True), pytest.raises(insum.NotFusedError):
        insum.insum("y[i] = x[D[i]]", **values)
    insum.insum("y[i] = x[D[i]]", **values)


def test_no_tensor_uses_the_default_device() -> None:
    assert insum.insum("y[i] = s", s=1, sizes={"i": 2}).device.type == "cpu"
    with torch.device("meta"):
        assert insum.insum("y[i] = s", s=1, sizes={"i": 2}).device.type == "meta"
    assert insum.insum("y[i] = s", s=1, sizes={"i": 2}).device.type == "cpu"


# --- compile --------------------------------------------------------------------------------------


def test_compile() -> None:
    call = insum.compile("C[D[p],n] += v[p] * B[E[p],n]", out_shape=(4, 3))
    values = {
        "v": torch.ones(2),
        "B": torch.randn(5, 3),
        "D": torch.tensor([1, 1]),
        "E": torch.tensor([4, 0]),
    }
    assert repr(call) == "insum.compile('C[D[p],n] += v[p] * B[E[p],n]', out_shape=(4, 3))"
    result = call(**values)
    torch.testing.assert_close(result[1], values["B"][4] + values["B"][0])
    assert repr(call).endswith("\n  p: scattered, 2; n: free, 3")
    C = torch.zeros(4, 3)
    assert call(C=C, **values) is C


@pytest.mark.parametrize("option", ["out_shape", "sizes", "padded", "config", "optimize"])
def test_a_compiled_statement_has_its_options_already(option: str) -> None:
    call: Any = insum.compile("y[i] = x[i]")
    with pytest.raises(insum.BindingError, match=f"^{option} is an option, not a tensor"):
        call(x=torch.ones(2), **{option: None})


def test_compiled_statements_pickle_and_copy() -> None:
    call = insum.compile("y[i] = x[D[i]]", sizes={"i": 2}, padded=["D"])
    values = {"x": torch.ones(3), "D": torch.tensor([2, -1])}
    call(**values)
    for other in (pickle.loads(pickle.dumps(call)), copy.deepcopy(call), copy.copy(call)):
        assert other == call and hash(other) == hash(call)
        assert torch.equal(other(**values), call(**values))
    assert insum.compile("y[i] = x[i]") != call


def test_pickles_of_compiled_statements_name_public_classes_alone() -> None:
    call = insum.compile("y[i] = A[i,j] * x[j]", config=insum.Config(m=16), optimize="greedy")
    call(A=torch.ones(2, 3), x=torch.ones(3))
    text = pickle.dumps(call, protocol=0).decode("latin-1")
    assert set(re.findall(r"insum\.[\w.]+", text)) == {"insum.api", "insum.plan.config"}
    assert pickle.loads(pickle.dumps(call)).config == call.config


def test_compiled_statements_live_in_modules() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.call = insum.compile("y[i] = A[i,j] * x[j]")
            self.weight = torch.nn.Parameter(torch.randn(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(A=self.weight, x=x)

    layer, x = Layer(), torch.randn(3)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer.weight @ x)
    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer.weight @ x
    )
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_compile_reads_the_statement_at_once() -> None:
    with pytest.raises(insum.StatementError):
        insum.compile("y[i = x[i]")


# --- explain --------------------------------------------------------------------------------------


def test_explain() -> None:
    values = {
        "AV": torch.ones(6, 2),
        "AM": torch.zeros(6, dtype=torch.int64),
        "AK": torch.zeros(6, 2, dtype=torch.int32),
        "B": torch.ones(5, 8),
    }
    explanation = insum.explain(
        "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", out_shape=(4, 8), padded=("AK",), **values
    )
    assert explanation.roles == (("p", 6, "scattered"), ("n", 8, "free"), ("q", 2, "reduced"))
    assert explanation.flops == 2 * 6 * 2 * 8
    assert explanation.bytes == 6 * 2 * 4 + 6 * 8 + 6 * 2 * 4 + 5 * 8 * 4 + 4 * 8 * 4
    assert explanation.intensity == pytest.approx(explanation.flops / explanation.bytes)
    text = str(explanation)
    for part in (
        "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
        "scattered",
        "cpu (padded)",
        "cpu (index)",
        "cpu (result)",
        "index_select",
        "torch.mul",
        "192 FLOPs",
    ):
        assert part in text
    assert explanation._repr_html_().startswith("<pre>") and "&#x27;" in explanation._repr_html_()


def test_explain_computes_nothing() -> None:
    C = torch.zeros(2)
    text = str(insum.explain("C[D[i]] += x[i]", C=C, x=torch.ones(3), D=torch.tensor([0, 1, 1])))
    assert C.tolist() == [0.0, 0.0] and "C.index_add_(0, D, x)" in text


def test_roles() -> None:
    def roles(statement: str, **values: Any) -> dict[str, str]:
        return {name: role for name, _, role in insum.explain(statement, **values).roles}

    assert roles(
        "C[b,i,j] = A[b,i,k] * B[b,k,j]", A=torch.ones(2, 3, 4), B=torch.ones(2, 4, 5)
    ) == {"b": "batch", "i": "free", "j": "free", "k": "reduced"}
    assert roles("C[i] = A[i]", A=torch.ones(2)) == {"i": "free"}


def test_explain_counts_functions_and_terms() -> None:
    assert insum.explain("y[i] = exp(x[i] + 1) * 2 - x[i]", x=torch.ones(10)).flops == 10 * (
        1 + 1 + 1 + 1
    ) + 10 * (1 + 1)
