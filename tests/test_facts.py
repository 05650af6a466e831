"""What is known about index tensors, for how long, and what is derived from them before kernels
run, against plain loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import insum
from insum import facts as facts_module
from insum import memory
from insum.facts import constant, declare, facts_of, known, segment_pointers
from insum.plan import guess_rows, tiling
from insum.plan.sizes import power_of_two
from insum.plan.tiling import SHORT
from insum.runtime.prologue import rows as row_recipes
from insum.runtime.prologue.made import Made
from insum.runtime.prologue.rows import in_order, pieces, slots, tasks

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
    compute = facts_module.compute
    monkeypatch.setattr(facts_module, "compute", lambda t: calls.append(1) or compute(t))
    tensor = torch.tensor([0, 1, 2])
    assert facts_of(tensor) is facts_of(tensor) is known(tensor)
    assert len(calls) == 1


def test_another_tensor_with_the_same_values_is_another_tensor() -> None:
    one, two = torch.tensor([0, 1]), torch.tensor([0, 1])
    assert known(two) is None and facts_of(one) is not facts_of(two)
    assert memory.entry_of(one).serial != memory.entry_of(two).serial


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
    before, serial = facts_of(tensor), memory.entry_of(tensor).serial
    WRITES[write](tensor)
    assert known(tensor) is None
    after = facts_of(tensor)
    assert after is not before and memory.entry_of(tensor).serial != serial
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


def made(found: object) -> Made:
    """On the CPU nothing is ever on its way."""
    assert isinstance(found, Made)
    return found


def segments(values: Tensor, rows: int) -> Made:
    return made(row_recipes.segments(segment_pointers(values, rows), values.numel()))


def of_lengths(lengths: list[int]) -> Made:
    """Segments of these lengths, one after the other."""
    end = torch.tensor(lengths).cumsum(0)
    arrays = {"start": end - torch.tensor(lengths), "end": end}
    return Made(arrays, {"entries": int(end[-1])})


def spans(base: Made) -> list[list[int]]:
    """The entries of every row."""
    start, end = (base.arrays[name].tolist() for name in ("start", "end"))
    return [list(range(s, e)) for s, e in zip(start, end, strict=True)]


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
    assert base.counts == {"entries": len(values)}
    longest = max(values.count(r) for r in range(rows))
    assert base.summary.longest == (power_of_two(longest) if longest else 0)
    pointers = segment_pointers(torch.tensor(values, dtype=dtype), rows)
    assert pointers.tolist() == [sum(v < r for v in values) for r in range(rows + 1)]


@QUICK
@given(st.lists(st.integers(-1, 7), max_size=30))
def test_entries_without_a_row_belong_to_none(values: list[int]) -> None:
    values = sorted(values)
    found = {k for row in spans(segments(torch.tensor(values, dtype=torch.int64), 6)) for k in row}
    assert found == {k for k, v in enumerate(values) if 0 <= v < 6}


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
    index = torch.tensor([g[1] for g in groups], dtype=torch.int64).reshape(-1, 3)
    base = segments(rows, 5)
    whole = made(slots(base, 3, ()))
    assert not whole.summary.trimmed and whole.counts == {"entries": 3 * len(groups)}
    assert spans(whole) == [
        [3 * p + q for p, g in enumerate(groups) for q in range(3) if g[0] == r] for r in range(5)
    ]
    found = made(slots(base, 3, [index]))
    flat = index.reshape(-1).tolist()
    held = [[k for k in row if flat[k] >= 0] for row in spans(whole)]
    trailing = all(row[: len(kept)] == kept for row, kept in zip(spans(whole), held, strict=True))
    assert found.summary.trimmed == trailing
    assert spans(found) == (held if trailing else spans(whole))
    longest = max(map(len, spans(found)))
    assert longest <= found.summary.longest <= (2 * longest if trailing else 4 * longest)


def test_a_slot_is_there_where_all_padded_indices_have_it() -> None:
    base = segments(torch.tensor([0, 1]), 2)
    one, two = torch.tensor([[3, 3, -1], [3, 3, 3]]), torch.tensor([[3, -1, 3], [3, 3, -1]])
    assert spans(made(slots(base, 3, [one, two]))) == [[0], [3, 4]]


@QUICK
@given(st.lists(st.integers(-4, 9), max_size=40), st.integers(1, 8), st.booleans())
def test_the_order_of_an_index_that_is_not_sorted(
    values: list[int], rows: int, wraps: bool
) -> None:
    """Entries of a row in the order in which they came; negative values count from the end where
    they do.
    """
    found = made(in_order(torch.tensor(values, dtype=torch.int64), rows, wraps))
    meant = [v + rows if wraps and v < 0 else v for v in values]
    order = found.arrays["order"].tolist()
    assert order == sorted(range(len(values)), key=lambda k: meant[k])
    assert [[order[k] for k in row] for row in spans(found)] == [
        [k for k, v in enumerate(meant) if v == r] for r in range(rows)
    ]
    assert found.counts == {"entries": len(values)}


def test_slots_beyond_32_bits() -> None:
    start, end = torch.tensor([0, 2**30]).int(), torch.tensor([2**30, 2**31 - 9]).int()
    whole = made(slots(Made({"start": start, "end": end}, {"entries": 2**31 - 9}), 4, ()))
    assert whole.arrays["start"].tolist() == [0, 2**32]
    assert whole.arrays["end"].tolist() == [2**32, 2**33 - 36]
    assert whole.counts == {"entries": 2**33 - 36}


@QUICK
@given(
    st.lists(st.integers(0, 120), max_size=20),
    st.integers(121, 400),
    st.sampled_from([torch.int8, torch.uint8, torch.int16]),
)
def test_segments_of_more_rows_than_the_dtype_holds(
    values: list[int], rows: int, dtype: torch.dtype
) -> None:
    index = torch.tensor(sorted(values), dtype=dtype)
    expected = [sum(v < r for v in values) for r in range(rows + 1)]
    assert segment_pointers(index, rows).tolist() == expected
    assert segments(index, rows).arrays["start"].tolist() == expected[:-1]


# --- tasks ----------------------------------------------------------------------------------------


def simulated(work: Made, out: np.ndarray, entries: np.ndarray, limit: int) -> None:
    """What the kernels do: pieces of rows, into the output or into the workspace; where the last of
    a row is there, so are the others. ``out`` holds -1 where nothing was written.
    """
    arrays = {name: array.tolist() for name, array in work.arrays.items()}
    many, slots = work.counts["tasks"], work.counts["slots"]
    many = min(many, *arrays.get("count", [many]))
    workspace, summed = np.full(slots, -1), []
    assert slots % 2 == 0, "what lies behind is aligned"
    for task in range(many):
        start, end, row = (arrays[name][task] for name in ("start", "end", "row"))
        assert 0 <= end - start <= limit
        value, slot = entries[start:end].sum(), -1 - row
        if slot >= 0:
            assert workspace[slot] == -1, "written twice"
            workspace[slot] = value
            row, first = arrays["cut_row"][slot], arrays["cut_start"][slot]
            assert 0 <= first <= slot and row >= -1
            if row < 0:
                continue
            assert first < slot and (workspace[first : slot + 1] >= 0).all(), "not there yet"
            value = workspace[first : slot + 1].sum()
            summed.append((row, first, slot + 1))
        assert out[row] == -1, "written twice"
        out[row] = value
    cut = min(work.counts["cut"], *arrays.get("sum_count", [work.counts["cut"]]))
    by_rows = zip(*(arrays[f"sum_{name}"][:cut] for name in ("row", "start", "end")))
    assert sorted(by_rows) == sorted(summed), "the same by rows"


@QUICK
@given(st.lists(st.integers(0, 150), min_size=1, max_size=12), st.integers(1, 80))
def test_tasks_cover_every_entry_once(lengths: list[int], limit: int) -> None:
    """Simulates the kernels: pieces and long rows, then short ones."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    work = made(tasks(of_lengths(lengths), limit))
    numbers = np.random.default_rng(0).integers(1, 1000, int(ends[-1]))
    out = np.full(len(lengths), -1)
    simulated(work, out, numbers, limit)
    assert out.tolist() == [int(numbers[s:e].sum()) for s, e in zip(starts, ends, strict=True)]


@QUICK
@given(st.lists(st.integers(0, 150), min_size=1, max_size=12), st.integers(1, 80))
def test_long_tasks_come_first(lengths: list[int], limit: int) -> None:
    work = made(tasks(of_lengths(lengths), limit))
    sizes = (work.arrays["end"] - work.arrays["start"]).tolist()
    long, pieces = work.counts["long"], (work.arrays["row"] < 0).tolist()
    assert all(size > SHORT or piece for size, piece in zip(sizes[:long], pieces))
    assert all(size <= SHORT for size in sizes[long:]) and not any(pieces[long:])
    expected = sum(max(1, -(-n // limit)) for n in lengths)
    assert work.counts["tasks"] == len(sizes) == expected
    if max(lengths) > min(limit, SHORT):  # else all rows stay where they are
        assert sizes[long:] == sorted(sizes[long:], reverse=True), "a tile waits for the longest"


def test_pieces_of_a_row_are_even() -> None:
    """The longest of them decides how long the last piece waits."""
    work = made(tasks(of_lengths([100, 7, 33]), 32))
    sizes = (work.arrays["end"] - work.arrays["start"]).tolist()
    assert sorted(sizes) == [7, 16, 17, 25, 25, 25, 25] and work.counts["slots"] == 6


def test_short_rows_are_ordered_among_those_that_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are near in the output gather what is near in memory."""
    monkeypatch.setattr(row_recipes, "WINDOW", 4)
    lengths = [3, 1, 0, 2, 5, 5, 9, 1, 100, 4]
    work = made(tasks(of_lengths(lengths), 128))
    assert work.arrays["row"].tolist() == [8, 0, 3, 1, 2, 6, 4, 5, 7, 9]


def test_rows_that_are_short_enough_stay_whole() -> None:
    work = made(tasks(segments(torch.tensor([0, 0, 2]), 4), 2))
    assert work.counts["slots"] == work.arrays["cut_row"].numel() == 0
    assert sorted(work.arrays["row"].tolist()) == [0, 1, 2, 3]


def test_schedules_are_narrow_where_they_can_be() -> None:
    work = made(tasks(segments(torch.tensor([0, 0, 2]), 4), 1))
    assert {t.dtype for t in work.arrays.values()} == {torch.int32}
    assert segments(torch.tensor([0, 0, 2]), 4).arrays["start"].dtype == torch.int32
    sorted_first = made(in_order(torch.tensor([2, 0, 0]), 4, wraps=False))
    assert {t.dtype for t in made(pieces(sorted_first, 2)).arrays.values()} == {torch.int32}


def test_short_is_what_the_kernels_think_it_is() -> None:
    assert SHORT <= guess_rows.LEAVE_WHOLE <= guess_rows.SPLIT_AT
    assert row_recipes.SHORT is tiling.SHORT


# --- pieces of what was never seen ----------------------------------------------------------------


@QUICK
@given(
    st.lists(st.tuples(st.integers(-3, 12), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 10),
    st.integers(1, 70),
    st.randoms(use_true_random=False),
)
def test_pieces_cover_every_entry_of_a_row_once(
    runs: list[tuple[int, int]], rows: int, limit: int, random: Random
) -> None:
    """Simulates the kernels. Values below 0 and beyond the rows stand among the others, and belong
    to none.
    """
    values = [value for value, count in runs for _ in range(count)]
    random.shuffle(values)
    base = made(in_order(torch.tensor(values), rows, wraps=False))
    work = made(pieces(base, limit))
    numbers = np.random.default_rng(0).integers(1, 1000, len(values))
    out = np.full(rows, -1)
    simulated(work, out, numbers[base.arrays["order"].numpy()], limit)
    out[out == -1] = 0  # rows without entries have no task: the output starts from what is there
    assert out.tolist() == [
        int(sum(n for n, v in zip(numbers, values, strict=True) if v == r)) for r in range(rows)
    ]


@QUICK
@given(
    st.lists(st.integers(-2, 9), min_size=1, max_size=120), st.integers(1, 8), st.integers(1, 20)
)
def test_pieces_are_as_many_as_sizes_say(values: list[int], rows: int, limit: int) -> None:
    """How large the arrays are follows from sizes; what they hold is counted on the device."""
    order = made(in_order(torch.tensor(values), rows, wraps=False))
    work = made(pieces(order, limit))
    boundaries = -(-len(values) // limit)
    most = min(len(values), rows + boundaries)
    assert work.counts == {"tasks": most, "slots": 2 * boundaries, "cut": boundaries}
    sizes = {name: array.numel() for name, array in work.arrays.items()}
    assert {sizes[name] for name in ("start", "end", "row")} == {most}
    assert {sizes[name] for name in ("cut_row", "cut_start")} == {2 * boundaries}
    count = int(work.arrays["count"])
    assert 0 <= count <= most
    start, end = (work.arrays[name].tolist() for name in ("start", "end"))
    assert start[count:] == end[count:] == [0] * (most - count), "nothing to do beyond the last"
    assert all(s // limit == (e - 1) // limit for s, e in zip(start[:count], end[:count]))
