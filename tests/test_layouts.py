"""What is copied into another layout before a product, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.call.request import Form, request_of
from insum.call.stages import is_copyable, layouts_of, stages_of
from insum.lang.bind import Problem

CONVOLUTION = "y[b,o,t] = x[b,c,t+r] * w[o,c,r]"


def tensor(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bound(
    statement: str, sizes: dict[Any, int], values: dict[str, Any], **options: Any
) -> tuple[Problem, Form]:
    request = request_of(statement, None, sizes, (), **options)
    return request.bind(values), request.form


def statements(statement: str, sizes: dict[Any, int], **values: Tensor) -> list[str]:
    problem, form = bound(statement, sizes, values)
    assert is_copyable(problem, form)
    found = stages_of(problem, form, layouts=layouts_of(problem, values))
    assert all(one.form.dtype == torch.float16 for one in found)
    return [one.form.statement for one in found]


def test_windows_and_short_runs_are_copied() -> None:
    found = statements(CONVOLUTION, {2: 2048}, x=tensor(32, 256, 2050), w=tensor(256, 256, 3))
    assert sorted(found[:2]) == ["w_c[o,r,c] = w[o,c,r]", "x_c[b,x2,c] = x[b,c,x2]"]
    assert found[2] == "y[b,o,t] = x_c[b,t + r,c] * w_c[o,r,c]"


def test_what_lies_well_is_not() -> None:
    last = statements(
        "y[b,t,o] = x[b,t+r,c] * w[r,c,o]",
        {1: 2048},
        x=tensor(32, 2050, 256),
        w=tensor(3, 256, 256),
    )
    assert last == []
    turned = tensor(32, 2050, 256).transpose(1, 2)
    found = statements(CONVOLUTION, {2: 2048}, x=turned, w=tensor(256, 256, 3))
    assert found == ["w_c[o,r,c] = w[o,c,r]", "y[b,o,t] = x[b,c,t + r] * w_c[o,r,c]"]


def test_what_is_small_or_seldom_read_is_not() -> None:
    assert statements(CONVOLUTION, {2: 64}, x=tensor(2, 64, 66), w=tensor(64, 64, 3)) == []
    few = statements(CONVOLUTION, {2: 2**18}, x=tensor(32, 64, 2**18 + 2), w=tensor(16, 64, 3))
    assert few == ["w_c[o,r,c] = w[o,c,r]", "y[b,o,t] = x[b,c,t + r] * w_c[o,r,c]"]


def test_rows_that_wide_loads_do_not_fit_are_not() -> None:
    """A copy would be read number by number, too; but along another axis it may be wide."""
    x = tensor(32, 250, 2050)
    assert statements(CONVOLUTION, {2: 2048}, x=x, w=tensor(250, 250, 3)) == []
    found = statements(CONVOLUTION, {2: 2048}, x=x, w=tensor(256, 250, 3))
    assert found == ["w_o[c,r,o] = w[o,c,r]", "y[b,o,t] = x[b,c,t + r] * w_o[c,r,o]"]


def test_gradients_of_a_convolution() -> None:
    scatter = "dx[b,c,t+r] += dy[b,o,t] * w[o,c,r]"
    found = statements(scatter, {2: 2050}, dy=tensor(32, 256, 2048), w=tensor(256, 256, 3))
    assert sorted(found[:2]) == ["dy_o[b,t,o] = dy[b,o,t]", "w_o[c,r,o] = w[o,c,r]"]
    assert found[2] == "dx[b,c,t + r] += dy_o[b,t,o] * w_o[c,r,o]"
    weights = "dw[o,c,r] += dy[b,o,t] * x[b,c,t+r]"
    found = statements(weights, {2: 3}, dy=tensor(32, 256, 2048), x=tensor(32, 256, 2050))
    assert found == ["x_c[b,x2,c] = x[b,c,x2]", "dw[o,c,r] += dy[b,o,t] * x_c[b,t + r,c]"]


def test_one_copy_serves_two_readings() -> None:
    statement = "y[b,c,d,r] = x[b,c,t+r] * x[b,d,t+1]"
    found = statements(statement, {3: 64, "t": 2048}, x=tensor(32, 256, 2112))
    assert found == ["x_c[b,x2,c] = x[b,c,x2]", "y[b,c,d,r] = x_c[b,t + r,c] * x_c[b,t + 1,d]"]


@pytest.mark.parametrize(
    ("statement", "options"),
    [
        (CONVOLUTION, {"optimize": False}),
        (CONVOLUTION, {"optimize": [(0, 1)]}),
        (CONVOLUTION, {"config": insum.Config(m=64, n=64, k=32)}),
        ("y[b,o,t] max= x[b,c,t+r] * w[o,c,r]", {}),
        ("y[b,o,t] = exp(x[b,c,t+r]) * w[o,c,r]", {}),
        ("y[b,o,t] = x[b,c,t+r] * w[o,c,r] + w[o,0,0]", {}),
    ],
)
def test_what_is_one_statement(statement: str, options: dict[str, Any]) -> None:
    values = {"x": tensor(32, 256, 2050), "w": tensor(256, 256, 3)}
    assert not is_copyable(*bound(statement, {2: 2048}, values, **options))


def test_doubles_are_not_for_matrix_units() -> None:
    values = {"x": tensor(32, 256, 2050, dtype=torch.float64)}
    values["w"] = tensor(256, 256, 3, dtype=torch.float64)
    assert not is_copyable(*bound(CONVOLUTION, {2: 2048}, values))


def test_explain_tells_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insum.plan.layouts.LEAST_POINTS", 1)
    monkeypatch.setattr("insum.plan.layouts.LEAST_USES", 0)
    monkeypatch.setattr("insum.plan.layouts.LEAST_UNALIGNED", 0)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    x, w = torch.ones(2, 16, 21), torch.ones(16, 16, 3)
    with insum.settings(backend="fused"):
        text = str(insum.explain(CONVOLUTION, sizes={2: 19}, x=x, w=w))
    assert "layouts: copies first" in text and "  x_c[b,x2,c] = x[b,c,x2]" in text
