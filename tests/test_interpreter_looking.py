"""What a launch finds out about index tensors, beside what torch does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insum import facts, memory
from insum.facts import compute, from_numbers, known_now
from insum.runtime.handwritten import looking
from insum.runtime.handwritten.looking import looked_at

pytestmark = pytest.mark.interpreter
KINDS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16)


def drawn(length: int, how: str, dtype: torch.dtype) -> Tensor:
    values = torch.randint(0, 100, (length,))
    match how:
        case "sorted":
            values = values.sort().values
        case "each once":
            values = torch.randperm(length).clamp_(max=torch.iinfo(dtype).max)
        case "in steps":
            values = torch.arange(length).clamp_(max=torch.iinfo(dtype).max)
        case "padded" if dtype.is_signed:
            values[::3] = -1
    return values.to(dtype)


@pytest.mark.parametrize("most", [looking.MOST_PARTS, 2])
@pytest.mark.parametrize("how", ["any", "sorted", "each once", "in steps", "padded"])
@pytest.mark.parametrize("length", [1, 2, 5, 1023, 1024, 1025, 5000])
def test_a_launch_tells_what_torch_tells(
    length: int, how: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "MOST_PARTS", most)
    for dtype in KINDS:
        tensor = drawn(length, how, dtype)
        got, want = from_numbers(looked_at(tensor).tolist()), compute(tensor)
        assert (got.low, got.high, got.sorted) == (want.low, want.high, want.sorted)
        assert got.padded == want.padded and got.unique == (want.unique and want.sorted)


def test_a_step_down_between_two_parts() -> None:
    tensor = torch.arange(5000)
    for at in (1023, 1024, 2047, 4998):
        other = tensor.clone()
        other[at + 1] = other[at]
        told = from_numbers(looked_at(other).tolist())
        assert told.sorted and not told.unique
        other[at + 1] -= 1
        assert not from_numbers(looked_at(other).tolist()).sorted


def test_tensors_of_any_strides() -> None:
    tensor = torch.arange(4000).reshape(40, 100).t()
    told = from_numbers(looked_at(tensor).tolist())
    assert (told.low, told.high, told.sorted) == (0, 3999, False)


@pytest.fixture
def never_looked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """As on a GPU; gives the tensors that are sorted to tell what values come twice."""
    sorted_: list[Tensor] = []
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    numbers_of = facts.numbers_of
    monkeypatch.setattr(facts, "numbers_of", lambda t: (sorted_.append(t), numbers_of(t))[1])
    return sorted_


def test_edges_are_never_sorted_to_look_at_them(never_looked: list[Tensor]) -> None:
    edges = torch.randint(0, 50, (300,))
    found = [known_now(edges, None, looked_at) for _ in range(facts.SEEN_AGAIN + 1)]
    assert found[:-1] == [None] * facts.SEEN_AGAIN and found[-1] == compute(edges)
    assert not never_looked[:-1]  # the last is `compute`'s own


def test_what_may_be_a_permutation_is_sorted(never_looked: list[Tensor]) -> None:
    order = torch.randperm(300)
    found = [known_now(order, None, looked_at) for _ in range(facts.SEEN_AGAIN + 2)]
    assert found[:-1] == [None] * (facts.SEEN_AGAIN + 1) and len(never_looked) == 1
    assert found[-1] is not None and found[-1].unique and not found[-1].sorted
