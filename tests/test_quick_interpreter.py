"""What is exchanged in Triton's interpreter for these tests computes the same."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from quick_interpreter import NEEDED, quicken

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.interpreter


@triton.jit
def later_of_equals(a, a_at, b, b_at):
    """The larger value and where it stands: not the same in another order."""
    second = b >= a
    return tl.where(second, b, a), tl.where(second, b_at, a_at)


@triton.jit
def largest(x, values, places, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(x + rows * N + columns)
    at = rows * N + columns + tl.zeros([M, N], tl.int32)
    found = tl.reduce((tile, at), AXIS, later_of_equals)
    kept = tl.arange(0, N if AXIS == 0 else M)
    tl.store(values + kept, found[0])
    tl.store(places + kept, found[1])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(8, 4), (1, 4), (8, 1)])
def test_reductions_by_any_function(axis: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 3, shape).float()
    values = torch.zeros(shape[1 - axis])
    places = torch.zeros(shape[1 - axis], dtype=torch.int32)
    largest[(1,)](x, values, places, axis, *shape)
    last = shape[axis] - 1 - x.flip(axis).argmax(axis)
    others = torch.arange(shape[1 - axis])
    at = last * shape[1] + others if axis == 0 else others * shape[1] + last
    assert_close(values, x.amax(axis))
    assert_close(places, at.int())


@triton.jit
def arithmetic(x, y, out, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    at = rows[:, None] * N + columns[None, :]
    tile = tl.load(x + at)
    wide = tile.to(tl.float64) * tl.load(y + columns)[None, :] + 2  # a row, then a number
    less = tl.where(tile > 1, wide - tile, tl.full([M, 1], 0.5, tl.float64))  # a column
    tl.store(out + at, less + tl.sum(tile, axis=1)[:, None] * (tl.program_id(0) + 3))


def test_shapes_and_dtypes() -> None:
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (4, 8)).float()  # sums are exact in any order
    y, out = torch.randn(8).double(), torch.zeros(4, 8).double()
    for _ in range(2):  # once with everything patched anew, once with what stayed
        arithmetic[(1,)](x, y, out, 4, 8)
        less = torch.where(x > 1, x.double() * y + 2 - x, 0.5)
        assert_close(out, less + 3 * x.sum(1, keepdim=True))


@pytest.mark.parametrize("name", NEEDED)
def test_another_interpreter_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.delattr(interpreter, name)
    before = dict(vars(interpreter))
    assert not quicken() and vars(interpreter) == before
