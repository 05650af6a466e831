"""Rows ordered by their words, and tiles of them with the steps that they have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from insum.plan.strategies.packing import TILE
from insum.runtime.handwritten import packs

pytestmark = pytest.mark.interpreter


def words_of(rows: int, steps: int) -> Tensor:
    """Words with bits that are the rarer the higher they are, as `packs.words_for` has them."""
    draw = torch.Generator().manual_seed(rows + steps)
    per = packs.bits_per_word(steps)
    words = torch.zeros(-(-steps // per), rows, dtype=torch.int64)
    for step in range(steps):
        has = torch.rand(rows, generator=draw) < 1 / (step + 1.5)
        words[step // per] |= has.long() << step % per
    return words.int() if per == 31 else words


def whole(words: Tensor, steps: int) -> list[int]:
    """The words of each row as one number."""
    per = packs.bits_per_word(steps)
    return [sum(int(w) << per * at for at, w in enumerate(column)) for column in words.T.tolist()]


def rank(number: int) -> int:
    """The place of a number in the reflected binary code."""
    found = 0
    while number:
        found, number = found ^ number, number >> 1
    return found


def shortened(number: int) -> int:
    """A number without what comes behind its first bits."""
    behind = max(0, number.bit_length() - packs.FIRST_BITS)
    return number >> behind << behind


def length_of(words: Tensor, steps: int, order: Tensor) -> int:
    """The steps of all tiles of rows in an order."""
    made = packs.tiled(words, order, torch.arange(steps, dtype=torch.int32))
    return int((made["end"] - made["start"]).sum())


SIZES = [(1, 1), (5, 3), (1024, 27), (2600, 27), (700, 31), (300, 40), (300, 81), (200, 130)]
SIZES += [(100, 512)]


@pytest.mark.parametrize(("rows", "steps"), SIZES)
def test_rows_come_in_the_order_of_their_rarest_steps(rows: int, steps: int) -> None:
    words = words_of(rows, steps)
    order = packs.order_of(words, steps, thorough=True).tolist()
    ranks = [rank(number) for number in whole(words, steps)]
    if len(words) > 1:
        ranks = [shortened(number) for number in ranks]
    # Stable: what is alike keeps its order, so that results do not depend on the run.
    assert order == sorted(range(rows), key=lambda row: (-ranks[row], row))


@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (5, 3), (1024, 27), (2600, 27), (700, 31)])
def test_short_words_are_told_apart_by_buckets(rows: int, steps: int) -> None:
    words = words_of(rows, steps)
    order = packs.order_of(words, steps, thorough=False)
    ranks = torch.tensor([rank(number) for number in whole(words, steps)])
    drawn = ranks[torch.arange(packs.WINDOW) * rows // packs.WINDOW].sort()[0]
    limits = drawn[:: packs.WINDOW // packs.BUCKETS].contiguous()
    bucket = torch.searchsorted(limits[1:], ranks, right=True).tolist()
    assert order.tolist() == sorted(range(rows), key=lambda row: (-bucket[row], row))


def test_buckets_leave_nearly_as_few_steps_as_an_order_of_all_rows() -> None:
    words = words_of(12_000, 27)
    best = length_of(words, 27, packs.order_of(words, 27, thorough=True))
    quick = length_of(words, 27, packs.order_of(words, 27, thorough=False))
    drawn = length_of(words, 27, torch.arange(12_000))
    assert best <= quick <= 1.05 * best < 0.9 * drawn, (best, quick, drawn)


@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (130, 3), (1300, 27), (300, 40), (200, 130)])
def test_tiles_list_the_steps_of_their_rows(rows: int, steps: int) -> None:
    words, names = words_of(rows, steps), torch.randperm(steps).int()
    made = packs.tiled(words, packs.order_of(words, steps, thorough=False), names)
    every = whole(words, steps)
    placed = made["rows"].flatten().tolist()
    assert sorted(row for row in placed if row >= 0) == list(range(rows))
    assert all(row < 0 for row in placed[rows:])
    for tile, own in enumerate(made["rows"].tolist()):
        held = 0
        for row in own:
            held |= every[row] if row >= 0 else 0
        want = [int(names[bit]) for bit in range(steps) if held >> bit & 1]
        start, end = int(made["start"][tile]), int(made["end"][tile])
        assert start == tile * steps
        assert made["steps"][start:end].tolist() == want
        assert made["back"][start:end].tolist() == [steps - 1 - step for step in want]


def locally(rows: list[int]) -> list[int]:
    """The words of a window, bits that most of them have lowest, and below those that none has."""
    bits = range(max(rows).bit_length())
    count = [sum(row >> bit & 1 for row in rows) or 2 * packs.WINDOW for bit in bits]
    lowest_first = sorted(bits, key=lambda bit: (-count[bit], bit))
    return [sum((row >> bit & 1) << k for k, bit in enumerate(lowest_first)) for row in rows]


@pytest.mark.parametrize(("rows", "steps"), [(1024, 27), (2500, 31), (1500, 45), (1100, 120)])
def test_windows_are_sorted_by_what_is_rare_in_them(rows: int, steps: int) -> None:
    words = words_of(rows, steps)
    made = packs.tiled(words, torch.arange(rows), torch.arange(steps, dtype=torch.int32))
    every, placed = whole(words, steps), made["rows"].flatten().tolist()
    for first in range(0, rows, packs.WINDOW):
        own = range(first, min(first + packs.WINDOW, rows))
        local = dict(zip(own, locally([every[row] for row in own])))
        behind = max(0, max(local.values()).bit_length() - packs.LOCAL_BITS)
        want = sorted(own, key=lambda row: (-rank(local[row] >> behind), row))
        assert placed[first : first + len(want)] == want


@pytest.mark.parametrize("steps", [27, 81])
def test_what_is_rare_in_windows_leaves_fewer_steps(steps: int) -> None:
    """Rows of four kinds, each with steps of its own that are rare in it."""
    draw = torch.Generator().manual_seed(0)
    kind = torch.arange(8192) // 2048
    chance = 0.5 ** (1 + torch.rand(4, steps, generator=draw) * 6)
    has = torch.rand(8192, steps, generator=draw) < chance[kind]
    per = packs.bits_per_word(steps)
    words = torch.zeros(-(-steps // per), 8192, dtype=torch.int64)
    for step in range(steps):
        words[step // per] |= has[:, step].long() << step % per
    words = words.int() if per == 31 else words
    found = length_of(words, steps, torch.arange(8192))
    whole_order = packs.order_of(words, steps, thorough=True)
    tiles = has[whole_order].view(-1, TILE, steps).any(1).sum()
    assert found < 0.95 * int(tiles), (found, int(tiles))


def test_more_windows_than_are_counted_are_sorted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(2600, 27)
    monkeypatch.setattr(packs, "MOST_WINDOWS", 2)
    order = packs.order_of(words, 27, thorough=False)
    assert order.tolist() == packs.order_of(words, 27, thorough=True).tolist()
