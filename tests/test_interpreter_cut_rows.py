"""Rows that were cut into pieces: whoever has the last piece of a row sums all of them, in the same
launch. Memory comes as it was left; what a call leaves there must do no harm to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import Config
from insum.codegen.functions import MARK
from insum.plan import first_guess
from insum.runtime import classify, inspection, ready
from kernels import bound, error, lookup

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

SUM = "C[I[p],n] += V[p] * B[K[p],n]"
SHORT = Config(m=4, n=16, k=2, warps=1, stages=1, split=4)
LONG = Config(m=1, n=16, k=4, warps=1, stages=1)
#: Entries of each row.
ROWS = {
    "two pieces": [5, 1, 2],
    "many": [3, 41, 0, 9, 4, 1],
    "empty rows": [0, 0, 13, 0, 8, 0],
    "one row": [17],
    "all": [8, 7, 6, 5],
    "none": [4, 2, 0, 3],
    "a tile of pieces": [6] * 9,
}
each_rows = pytest.mark.parametrize("lengths", ROWS.values(), ids=list(ROWS))


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Those that calls were given; the same again for as many elements, as an allocator does."""
    made: dict[int, Tensor] = {}
    given: list[Tensor] = []
    original = ready.maker

    def maker(shape: tuple[int, ...], *rest: Any) -> Callable[[], Tensor]:
        make = original(shape, *rest)
        if len(shape) != 1:
            return make

        def again() -> Tensor:
            given.append(made.setdefault(shape[0], make()))
            return given[-1]

        return again

    monkeypatch.setattr(ready, "maker", maker)
    return given


def has_marks(workspace: Tensor) -> bool:
    even = workspace[: workspace.numel() // 2 * 2]
    return MARK in even.view(torch.int64).tolist()


def drawn(lengths: list[int], columns: int = 18, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(len(lengths))
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return {
        "I": index,
        "K": torch.randint(0, 7, (len(index),), generator=generator),
        "V": torch.randn(len(index), generator=generator).to(dtype),
        "B": torch.randn(7, columns, generator=generator).to(dtype),
    }


def exact(values: Any, rows: int) -> Tensor:
    parts = values["V"].double()[:, None] * values["B"].double()[values["K"]]
    return torch.zeros(rows, parts.shape[1], dtype=torch.float64).index_add(0, values["I"], parts)


@each_rows
@pytest.mark.parametrize(("together", "m"), [(True, 1), (True, 4), (False, 4)])
def test_cut_rows(
    lengths: list[int],
    together: bool,
    m: int,
    workspaces: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not together:
        monkeypatch.setattr(first_guess, "ONE_LAUNCH", 0)
    values, config = drawn(lengths), (SHORT, replace(LONG, m=m))
    want = exact(values, len(lengths))
    call = lambda: insum.insum(SUM, sizes={0: len(lengths)}, config=config, **values)
    first = call()
    assert error(first, want) < 2e-6
    assert torch.equal(call(), first), "with the memory that the last call has left"
    cut = max(lengths) > SHORT.split
    assert len(workspaces) == (2 if cut else 0) and not any(map(has_marks, workspaces))
    assert len({one.data_ptr() for one in workspaces}) <= 1


def test_two_workspaces_in_turn(workspaces: list[Tensor]) -> None:
    """What is left in one of them says nothing about the other."""
    for lengths in 2 * [[20, 3], [3, 30], [2, 20]]:
        values = drawn(lengths)
        got = insum.insum(SUM, sizes={0: len(lengths)}, config=(SHORT, LONG), **values)
        assert error(got, exact(values, len(lengths))) < 2e-6
    assert len({one.data_ptr() for one in workspaces}) == 2 and len(workspaces) == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("columns", [1, 33])
def test_dtypes(dtype: torch.dtype, columns: int) -> None:
    values = drawn([7, 30, 0, 2], columns, torch.float32)
    values |= {n: values[n].mul(4).round().to(dtype) for n in ("V", "B")}
    got = insum.insum(SUM, sizes={0: 4}, config=(SHORT, LONG), **values)
    assert got.dtype == dtype and error(got, exact(values, 4)) < 1e-6


@pytest.mark.parametrize(
    "statement", ["C[b,I[p],n] += V[p] * B[b,K[p],n]", "C[I[p],b] += V[p] * A[K[p],b]"]
)
def test_more_than_columns(statement: str) -> None:
    values = drawn([7, 30, 0, 2])
    values["B"] = torch.randn(3, 7, 5)
    values["A"] = torch.randn(7, 40)
    values = {n: v for n, v in values.items() if f"{n}[" in statement}
    shape = (3, 4, 5) if "n]" in statement else (4, 40)
    call = lambda **more: insum.insum(statement, out_shape=shape, **values, **more)
    with insum.settings(backend="graph", require_fused=False):
        want = call()
    assert error(call(config=(SHORT, LONG)), want) < 2e-6


@pytest.mark.parametrize("operator", ["max=", "min="])
def test_extrema(operator: str) -> None:
    values = drawn([7, 30, 1, 2])
    values["B"][3, 4] = torch.nan
    statement = SUM.replace("+=", operator)
    call = lambda **more: insum.insum(statement, sizes={0: 4}, **values, **more)
    with insum.settings(backend="graph", require_fused=False):
        want = call()
    assert torch.equal(call(config=(SHORT, LONG)).nan_to_num(5e4), want.nan_to_num(5e4))


@pytest.mark.parametrize("lengths", [[0, 9, 30, 2], [3, 1, 0, 2]])
def test_into_what_is_passed(lengths: list[int]) -> None:
    values, start = drawn(lengths), torch.randn(4, 18)
    target = start.clone()
    insum.insum(SUM, C=target, config=(SHORT, LONG), **values)
    assert error(target, exact(values, 4) + start) < 2e-6


def test_offsets_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = classify.classified
    monkeypatch.setattr(classify, "classified", lambda *args: replace(narrow(*args), wide=True))
    values = drawn(ROWS["many"])
    got = insum.insum(SUM, sizes={0: 6}, config=(SHORT, LONG), **values)
    assert error(got, exact(values, 6)) < 2e-6


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One where there is little to do, else two; and one where no row is long."""
    values = drawn([40] * 200)
    problem = bound(SUM, values, {0: 200})
    for limit, wanted in ((2**18, 1), (4000, 2)):
        monkeypatch.setattr(first_guess, "ONE_LAUNCH", limit)
        (step,) = inspection.plan_only(problem, values).steps
        assert step.workspace and len(step.launches) == wanted
        insum.forget()
    values = drawn([30] * 200)
    (step,) = lookup(bound(SUM, values, {0: 200}), values).steps
    assert not step.workspace and len(step.launches) == 1
