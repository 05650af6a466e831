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


@triton.jit
def sums(x, y, other, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a + a)
    tl.store(out + N + at, a + b)  # of the same types, of two
    tl.store(
        out + (2 * N + at)[:, None],
        (a * 1)[:, None] + tl.zeros([N, 1], tl.float32) + (b + 1)[:, None],
    )
    tl.store(out + 3 * N + at, at // 2 + (at == 1) + 0.5)
    beside = tl.load(x, mask=tl.load(x) > 1e30, other=tl.load(other))
    tl.store(out + 4 * N + at, beside + tl.zeros([N], tl.float32))


def test_what_is_noted_of_a_call_holds_for_other_data() -> None:
    """In the first launch all is noted, unless it was; the same operand may be two, a number that
    is asked for whether it is zero may be none.
    """
    for seed, other in enumerate((0.0, 7.0, 0.0)):
        torch.manual_seed(seed)
        x, y, out = torch.randn(8), torch.randn(8), torch.zeros(5, 8)
        at = torch.arange(8)
        sums[(1,)](x, y, torch.tensor([other]), out, 8)
        halves = at // 2 + (at == 1) + 0.5
        beside = torch.full((8,), other)
        assert_close(out, torch.stack([x + x, x + y, x + y + 1, halves, beside]))


@triton.jit
def masked(out, number, N: tl.constexpr):
    at = tl.arange(0, N)
    # truth values by handles that say what was compared, and by ones that say truth values
    tl.store(out + at, 1, mask=(at < 6) & (number < 3))
    tl.store(out + N + at, 1, mask=(at < 6) & ((N == 8) & (number < 3)))
    tl.store(out + 2 * N + at, 1, mask=(at < 6) & (number == 8))


def test_handles_of_truth_values_say_either_type() -> None:
    for number in (1, 8, 0, 3):
        out, six = torch.zeros(3, 8), (torch.arange(8) < 6).float()
        masked[(1,)](out, number, 8)
        wanted = torch.tensor([number < 3, number < 3, number == 8]).float()
        assert_close(out, wanted[:, None] * six)


def test_what_is_noted_hangs_on_types_and_on_numbers() -> None:
    x, out = torch.arange(8), torch.zeros(8)
    for type, number in ((int, 3), (float, 3.0), (bool, 1), (int, 1), (float, 0.5), (int, 3)):
        multiplied[(1,)](x, out, type(number), 8)
        assert_close(out, x / 2 * number)
        multiplied[(1,)](x.int(), out, type(number), 8)
        assert_close(out, x / 2 * number)


@triton.jit
def multiplied(x, out, NUMBER: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) * NUMBER / 2)


@pytest.mark.parametrize("name", NEEDED)
def test_another_interpreter_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.delattr(interpreter, name)
    before = dict(vars(interpreter))
    assert not quicken() and vars(interpreter) == before
