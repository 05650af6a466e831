"""Products that accumulate in different dtypes, added to targets of any layout: one decision where
they meet, and nothing written beside the target.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from kernels import bound, lookup, strategy_of, watch_programs

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

FLOATS = (torch.float16, torch.float32, torch.float64)
TOLERANCE = {torch.float16: 4e-3, torch.float32: 3e-6, torch.float64: 1e-13}
#: How a target of 4 x 3 lies in a larger tensor, which is returned too.
LAYOUTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "contiguous": lambda x: ((held := x.clone()), held),
    "transposed": lambda x: ((held := x.t().contiguous()), held.t()),
    "sliced": lambda x: ((held := _around(x)), held[1:5, 2:5]),
    "stepped": lambda x: ((held := _around(x)), held[:8:2, :6:2]),
    "sliced and transposed": lambda x: ((held := _around(x).t().contiguous()), held.t()[1:5, 2:5]),
}
#: Terms over 4 x 3: text, and the value it should have.
TERMS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "A{k}[i,j]": lambda v: v["A"],
    "B{k}[i,l] * C{k}[l,j]": lambda v: v["B"] @ v["C"],
    "b{k}[i]": lambda v: v["b"][:, None],
    "s{k} * A{k}[i,j]": lambda v: v["s"] * v["A"],
    "exp(A{k}[i,j])": lambda v: v["A"].exp(),
}


def _around(x: Tensor) -> Tensor:
    return torch.randn(9, 8).to(x.dtype)


def drawn(source: random.Random, count: int) -> tuple[str, dict[str, Tensor], Tensor]:
    """A right side of ``count`` terms, each with tensors of one dtype, and its value in float64."""
    texts, values, total = [], {}, torch.zeros(4, 3, dtype=torch.float64)
    for k in range(count):
        dtype, text = source.choice(FLOATS), source.choice(list(TERMS))
        own = {
            "A": torch.randn(4, 3).to(dtype),
            "B": torch.randn(4, 5).to(dtype),
            "C": torch.randn(5, 3).to(dtype),
            "b": torch.randn(4).to(dtype),
            "s": torch.randn(()).to(dtype),
        }
        total = total + TERMS[text]({name: t.double() for name, t in own.items()})
        texts.append(text.format(k=k))
        values |= {f"{name}{k}": t for name, t in own.items() if f"{name}{k}" in texts[-1]}
    return " + ".join(texts), values, total


def coarsest(values: dict[str, Tensor], target: Tensor) -> float:
    return max(TOLERANCE[t.dtype] for t in (*values.values(), target))


def check_in_place(case: int, layout: str, statement: str, rows: Tensor | None = None) -> None:
    source = random.Random(case)
    torch.manual_seed(case)
    right, values, total = drawn(source, source.choice((1, 2, 2, 3)))
    start = torch.randn(4, 3).to(source.choice(FLOATS))
    held, target = LAYOUTS[layout](start)
    target.copy_(start)
    before = held.clone()
    more: dict[str, Any] = {} if rows is None else {"rows": rows}
    if rows is not None:
        total = torch.zeros(4, 3, dtype=torch.float64).index_add(0, rows.long(), total)
    insum.insum(f"{statement} += {right}", out=target, **values, **more)
    near = coarsest(values, target)
    torch.testing.assert_close(target.double(), start.double() + total, rtol=near, atol=3 * near)
    target.copy_(start)
    assert torch.equal(held, before), "what lies around the target was written"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", range(12))
def test_into_a_target(case: int, layout: str) -> None:
    check_in_place(case, layout, "out[i,j]")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [[0, 1, 1, 3], [3, 0, 1, 1], [2, 0, 3, 1]])
@pytest.mark.parametrize("scatter", ["auto", "atomic"])
def test_scattered_into_a_target(rows: list[int], layout: str, scatter: Any) -> None:
    for case in range(3):
        with insum.settings(scatter=scatter):
            check_in_place(100 + case, layout, "out[rows[i],j]", torch.tensor(rows))


@pytest.mark.parametrize("case", range(12))
def test_into_a_new_tensor(case: int) -> None:
    source = random.Random(case)
    torch.manual_seed(case)
    right, values, total = drawn(source, 2)
    got = insum.insum(f"y[i,j] = {right}", sizes={"i": 4, "j": 3}, **values)
    near = coarsest(values, got)
    torch.testing.assert_close(got.double(), total, rtol=near, atol=3 * near)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("order", [0, 1])
def test_products_of_a_statement_agree(dtype: torch.dtype, order: int) -> None:
    """A wide product before or after a narrow one: all accumulate in its dtype, and meet there."""
    torch.manual_seed(0)
    narrow, wide = torch.randn(4, 3).to(dtype), torch.randn(4, 3, 1, dtype=torch.float64)
    values: dict[str, Any] = {"A": narrow, "B": wide, "out": torch.zeros(4, 3, dtype=dtype)}
    right = ["A[i,j]", "1e-9 * B[i,j,k]"]
    statement = f"out[i,j] += {' + '.join(right if order else right[::-1])}"
    program = lookup(bound(statement, values), values, values["out"])
    assert program.buffer == torch.float64
    assert {step.planned.plan.accumulator for step in program.steps} == {"float64"}
    insum.insum(statement, **values)
    assert torch.equal(values["out"], (narrow.double() + 1e-9 * wide[..., 0]).to(dtype))


#: Statements of several products, and in how many kernels they are added up.
SUMS = {
    "y[i[p],n] = v[p] * x[j[p],n] + v[p] * z[j[p],n]": 1,
    "y[i[p],n] += v[p] * x[j[p],n] - 2 * z[i[p],n] + v[p]": 1,
    "y[p,n] = x[j[p],n] - x[i[p],n] + 0.5": 1,
    "y[i[p],n] = v[p] * x[j[p],n] + v[p] * x[j[p],m] * w[m,n]": 2,  # which is summed over m
    "y[i[p],n] max= v[p] * x[j[p],n] + z[j[p],n]": 1,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("statement", SUMS)
def test_products_with_one_value_at_each_point_are_one(statement: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    floats = {"v": (40,), "x": (7, 4), "z": (7, 4), "w": (4, 4)}
    values: dict[str, Any] = {
        name: torch.randint(-4, 5, shape).to(dtype)
        for name, shape in floats.items()
        if f"{name}[" in statement
    }
    values |= {name: torch.randint(0, 7, (40,)) for name in "ij"}
    if "y[i" in statement:
        values["y"] = torch.randint(-4, 5, (7, 4)).to(dtype)
    named = {n: t.double() if t.dtype == dtype else t.clone() for n, t in values.items()}
    program = lookup(bound(statement, values), values, values.get("y"))
    assert len(program.steps) == (
        SUMS[statement] if dtype.is_floating_point else len(program.steps)
    )
    got, want = insum.insum(statement, **values), insum.insum(statement, **named)
    torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


def test_what_one_product_lacks_others_have() -> None:
    """Places that padding leaves out of one of them: they are not added up at each point."""
    x, j = torch.randn(5, 3), torch.tensor([0, -1, 4, 2])
    values = {"x": x, "z": torch.randn(4, 3), "j": j}
    got = insum.insum("y[p,n] = x[j[p],n] + z[p,n]", padded=("j",), **values)
    torch.testing.assert_close(got, torch.where((j >= 0)[:, None], x[j], 0) + values["z"])


@pytest.mark.parametrize("order", [0, 1])
def test_kernels_that_know_nothing_agree(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with index values that nobody has looked at."""
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    seen = watch_programs(monkeypatch)
    torch.manual_seed(0)
    values = {
        "A": torch.randn(6, 3),
        "B": torch.randn(6, 3, dtype=torch.float64),
        "rows": torch.tensor([3, 0, 0, 1, 2, 3]),
    }
    right = ["A[i,j]", "B[i,j]"][:: 1 if order else -1]
    statement = f"out[rows[i],j] += {' + '.join(right)}"
    held = torch.randn(3, 4)
    target, start = held.t(), held.t().clone()
    assert insum.insum(statement, out=target, **values) is target
    insum.synchronize()
    (program,) = seen
    assert program.buffer == torch.float64 and strategy_of(program) == "atomic"
    total = values["A"].double() + values["B"]
    want = start.double().index_add(0, values["rows"], total)
    torch.testing.assert_close(target.double(), want, rtol=1e-6, atol=1e-6)
