"""What is known about index tensors, for how long, and the schedules that are made of it, against
plain loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import insum
from insum.plan import facts as facts_module
from insum.plan import schedule
from insum.plan.facts import constant, declare, facts_of, known, segment_pointers
from insum.plan.schedule import SHORT, Segments, scaled, segments, tasks

QUICK = settings(max_examples=150, deadline=None, database=None, derandomize=True)
values_of = st.lists(st.integers(-1, 12), max_size=30)


# --- facts ----------------------------------------------------------------------------------------


@QUICK
@given(
    values_of, st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8]), st.booleans()
)
def test_facts_are_true(values: list[int], dtype: torch.dtype, folded: bool) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    if folded and len(values) % 2 == 0:
        tensor = tensor.reshape(-1, 2)
    facts = facts_of(tensor)
    assert facts.sorted == (values == sorted(values))
    assert facts.unique == (len(set(values)) == len(values))
    if values:
        assert (facts.low, facts.high, facts.padded) == (min(values), max(values), min(values) < 0)
    else:
        assert (facts.low, facts.high, facts.padded) == (0, -1, False)
    assert not facts.constant


def test_facts_read_in_row_major_order_whatever_the_strides() -> None:
    rows = torch.tensor([[0, 3], [1, 4], [2, 5]])
    assert not facts_of(rows).sorted and facts_of(rows.t()).sorted


def test_facts_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compute = facts_module._compute
    monkeypatch.setattr(facts_module, "_compute", lambda t: calls.append(1) or compute(t))
    tensor = torch.tensor([0, 1, 2])
    assert facts_of(tensor) is facts_of(tensor) is known(tensor)
    assert len(calls) == 1


def test_another_tensor_with_the_same_values_is_another_tensor() -> None:
    one, two = torch.tensor([0, 1]), torch.tensor([0, 1])
    assert known(two) is None and facts_of(one) is not facts_of(two)
    assert facts_of(one).serial != facts_of(two).serial


def test_declared_facts_are_taken_as_they_are() -> None:
    tensor = torch.tensor([5, 1])
    declared = declare(tensor, low=0, high=9, sorted=True, unique=True)
    assert facts_of(tensor) is declared and known(tensor) is declared


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "copy_": lambda t: t.copy_(t.flip(0)),
    "an element": lambda t: t.__setitem__(0, 7),
    "a view": lambda t: t[1:].zero_(),
    "a reshaped view": lambda t: t.view(-1, 1).zero_(),
    "an out= argument": lambda t: torch.add(t, 1, out=t),
    "resize and set": lambda t: t.set_(torch.tensor([9, 9, 9])),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_makes_facts_void(write: str) -> None:
    tensor = torch.tensor([0, 1, 2])
    before = facts_of(tensor)
    WRITES[write](tensor)
    assert known(tensor) is None
    after = facts_of(tensor)
    assert after is not before and after.serial != before.serial
    assert (after.low, after.high) == (int(tensor.min()), int(tensor.max()))


def test_writing_ends_a_promise() -> None:
    tensor = constant(torch.tensor([2, 0, 1]))
    assert facts_of(tensor).constant
    tensor[0] = 1
    assert not facts_of(tensor).constant


def test_a_promise_is_public_and_returns_its_tensor() -> None:
    tensor = torch.tensor([2, 0, 1])
    assert insum.constant(tensor) is tensor and facts_of(tensor).constant


def test_inference_tensors_have_facts() -> None:
    with torch.inference_mode():
        tensor = torch.tensor([0, 2, 2])
        assert facts_of(tensor).sorted and facts_of(tensor) is known(tensor)


def test_facts_from_several_threads() -> None:
    tensors = [torch.arange(n) for n in range(50)]
    found: list[list[int]] = []

    def work() -> None:
        found.append([facts_of(t).high for t in tensors])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[n - 1 for n in range(50)]] * 8


# --- segments -------------------------------------------------------------------------------------


def spans(base: Segments) -> list[list[int]]:
    """The entries of every row."""
    return [list(range(s, e)) for s, e in zip(base.start.tolist(), base.end.tolist(), strict=True)]


@QUICK
@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.integers(1, 14),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_segments(values: list[int], rows: int, dtype: torch.dtype) -> None:
    values = sorted(v for v in values if v < rows)
    base = segments(torch.tensor(values, dtype=dtype), rows)
    assert spans(base) == [[k for k, v in enumerate(values) if v == r] for r in range(rows)]
    assert base.rows == rows and base.entries == len(values)
    assert base.longest == max((values.count(r) for r in range(rows)), default=0)
    pointers = segment_pointers(torch.tensor(values, dtype=dtype), rows)
    assert pointers.tolist() == [sum(v < r for v in values) for r in range(rows + 1)]


@QUICK
@given(st.lists(st.integers(-1, 5), max_size=30))
def test_entries_without_a_row_belong_to_none(values: list[int]) -> None:
    values = sorted(values)
    found = {k for row in spans(segments(torch.tensor(values, dtype=torch.int64), 6)) for k in row}
    assert found == {k for k, v in enumerate(values) if v >= 0}


@QUICK
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(-1, 3), min_size=3, max_size=3)),
        max_size=12,
    )
)
def test_slots_of_groups(groups: list[tuple[int, list[int]]]) -> None:
    """Every entry holds three slots; where padding only ends rows it is cut off, else it stays."""
    groups = sorted(groups, key=lambda g: g[0])
    rows = torch.tensor([g[0] for g in groups], dtype=torch.int64)
    slots = torch.tensor([g[1] for g in groups], dtype=torch.int64).reshape(-1, 3)
    base = segments(rows, 5)
    whole, trimmed = scaled(base, 3, None)
    assert (
        spans(whole)
        == [
            [3 * p + q for p, g in enumerate(groups) for q in range(3) if g[0] == r]
            for r in range(5)
        ]
        and not trimmed
    )
    found, trimmed = scaled(base, 3, slots >= 0)
    flat = slots.reshape(-1).tolist()
    held = [[k for k in row if flat[k] >= 0] for row in spans(whole)]
    trailing = all(row[: len(kept)] == kept for row, kept in zip(spans(whole), held, strict=True))
    assert trimmed == trailing
    assert spans(found) == (held if trailing else spans(whole))


# --- tasks ----------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.integers(0, 150), min_size=1, max_size=12), st.integers(1, 80))
def test_tasks_cover_every_entry_once(lengths: list[int], limit: int) -> None:
    """Simulates the kernels: long pieces, short ones, then the combination of the rows that were
    cut.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    base = Segments(
        torch.from_numpy(starts.copy()), torch.from_numpy(ends.copy()), max(lengths), int(ends[-1])
    )
    work = tasks(base, limit)
    numbers = np.random.default_rng(0).integers(1, 1000, int(ends[-1]))
    out, workspace = np.full(len(lengths), -1), np.full(work.slots, -1)
    for start, end, row in zip(
        work.start.tolist(), work.end.tolist(), work.row.tolist(), strict=True
    ):
        assert end - start <= limit
        place, at = (out, row) if row >= 0 else (workspace, -1 - row)
        assert place[at] == -1, "written twice"
        place[at] = numbers[start:end].sum()
    for row, first, last in zip(
        work.split_rows.tolist(), work.split_start.tolist(), work.split_end.tolist(), strict=True
    ):
        assert out[row] == -1 and last - first > 1
        out[row] = workspace[first:last].sum()
    assert out.tolist() == [int(numbers[s:e].sum()) for s, e in zip(starts, ends, strict=True)]


@QUICK
@given(st.lists(st.integers(0, 150), min_size=1, max_size=12), st.integers(1, 80))
def test_long_tasks_come_first(lengths: list[int], limit: int) -> None:
    ends = torch.tensor(lengths).cumsum(0)
    work = tasks(Segments(ends - torch.tensor(lengths), ends, max(lengths), int(ends[-1])), limit)
    sizes = (work.end - work.start).tolist()
    assert all(size > SHORT for size in sizes[: work.long]) and all(
        size <= SHORT for size in sizes[work.long :]
    )
    assert work.count == len(sizes) == sum(max(1, -(-n // limit)) for n in lengths)
    short = work.row.tolist()[work.long :]
    whole = [row for row in short if row >= 0]
    assert whole == sorted(whole), (
        "short rows keep their order, and with it what lies near in memory"
    )


def test_rows_that_are_short_enough_stay_whole() -> None:
    work = tasks(segments(torch.tensor([0, 0, 2]), 4), 2)
    assert (
        work.slots == 0
        and work.split_rows.numel() == 0
        and sorted(work.row.tolist()) == [0, 1, 2, 3]
    )


def test_schedules_are_narrow_where_they_can_be() -> None:
    work = tasks(segments(torch.tensor([0, 0, 2]), 4), 1)
    assert {
        t.dtype
        for t in (work.start, work.end, work.row, work.split_rows, work.split_start, work.split_end)
    } == {torch.int32}
    assert segments(torch.tensor([0, 0, 2]), 4).start.dtype == torch.int32


def test_short_is_what_the_kernels_think_it_is() -> None:
    from insum.plan import model

    assert schedule.SHORT <= model.LEAVE_WHOLE <= model.SPLIT_AT
