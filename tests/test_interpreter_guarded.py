"""Kernels for index tensors that nobody has looked at: in atomics, or sums sorted first and cut
into pieces that the device counts. Nothing out of range is read or written, and NaN shows where
something would have been read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.plan.questions import AskFacts, AskInside, Question
from insum.runtime import inspection
from insum.runtime.program import Program
from insum.runtime.record import record_of
from insum.testing.as_on_a_gpu import pretended
from kernels import bound

pytestmark = pytest.mark.interpreter
ROWS, PLACES = 7, 9


class Unseen:
    """Answers of which none is about values."""

    def __init__(self, look: inspection.Look) -> None:
        self.answers = look.answers

    def __call__(self, question: Question) -> Any:
        match question:
            case AskFacts():
                return None
            case AskInside():
                return False
            case _:
                return self.answers(question)


def run(
    statement: str,
    values: Mapping[str, Any],
    padded: Sequence[str] = (),
    target: Tensor | None = None,
) -> tuple[str, Tensor]:
    """The strategy and the result."""
    sizes = {0: ROWS} if "C[I" in statement else {}
    values = values if target is None else {**values, "C": target}
    look = inspection.Look(bound(statement, values, sizes, padded), values, target)
    look.answers = Unseen(look)  # type: ignore[assignment]
    program = look.program()
    assert isinstance(program, Program), program.reason
    (step,) = program.steps
    if target is None:
        return step.planned.plan.strategy, look.ready(program)(values)
    # a call in place looks first, and leaves where something was found
    values = record_of(target.device).next(lambda *found: AssertionError(found), values)
    return step.planned.plan.strategy, look.ready(program)(values, target, look=True)


@contextmanager
def determinism(on: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def drawn(entries: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "I": torch.randint(0, ROWS, (entries,), generator=generator),
        "K": torch.randint(0, PLACES, (entries,), generator=generator),
        "V": torch.randn(entries, 5, generator=generator),
        "B": torch.randn(PLACES, 5, generator=generator),
    }


def summed(index: Tensor, values: Tensor, there: Tensor | None = None) -> Tensor:
    kept = (index >= 0) & (index < ROWS)
    kept = kept if there is None else kept & there
    return torch.zeros(ROWS, values.shape[1]).index_add(0, index[kept], values[kept])


each_way = pytest.mark.parametrize(("sure", "strategy"), [(False, "atomic"), (True, "segment")])


@each_way
@pytest.mark.parametrize("entries", [1, 63, 64, 65, 400])
def test_sums(entries: int, sure: bool, strategy: str) -> None:
    given = drawn(entries)
    with determinism(sure):
        found = run("C[I[p],n] += V[p,n] * B[K[p],n]", given)
    assert found[0] == strategy
    expected = summed(given["I"], given["V"] * given["B"][given["K"]])
    torch.testing.assert_close(found[1], expected, atol=1e-4, rtol=1e-4)


@each_way
def test_into_a_target(sure: bool, strategy: str) -> None:
    given, target = drawn(300), torch.randn(ROWS, 5)
    expected = target + summed(given["I"], given["V"])
    values = {name: given[name] for name in "IV"}
    with determinism(sure):
        found, result = run("C[I[p],n] += V[p,n]", values, target=target)
    assert found == strategy and result is target
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("operator", ["max", "min"])
@pytest.mark.parametrize("entries", [5, 300])
def test_extrema_meet_in_atomics(
    entries: int, operator: str, dtype: torch.dtype, sure: bool
) -> None:
    """In every order they are the same: also in deterministic mode. NaN is NaN, as torch has it."""
    given = drawn(entries)
    given["I"][given["I"] == 2] = 3  # a row without entries
    values = given["V"] * 3
    values[::4, 0], values[:, 1] = -0.0, -values[:, 1].abs()
    if dtype.is_floating_point:
        values[1, 2], values[2, 3], values[3, 4] = (float(n) for n in ("nan", "inf", "-inf"))
        values[4, 2] = -values[1, 2]
    values = values.to(dtype)
    with determinism(sure):
        strategy, found = run(f"C[I[p],n] {operator}= V[p,n]", {"I": given["I"], "V": values})
    least = float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
    most = float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max
    expected = torch.full((ROWS, 5), least if operator == "max" else most, dtype=dtype)
    places = given["I"][:, None].expand(-1, 5).long()
    expected.scatter_reduce_(0, places, values, f"a{operator}")
    assert strategy == "atomic"
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@each_way
def test_nothing_is_written_out_of_range(sure: bool, strategy: str) -> None:
    given = drawn(300)
    given["I"][3], given["I"][5], given["I"][6] = 99, -4, ROWS
    with determinism(sure):
        found = run("C[I[p],n] += V[p,n]", {name: given[name] for name in "IV"})
    assert found[0] == strategy
    expected = summed(given["I"], given["V"])
    torch.testing.assert_close(found[1], expected, atol=1e-4, rtol=1e-4)


def test_what_was_read_out_of_range_shows() -> None:
    index = torch.tensor([0, 1, PLACES, -3, PLACES - 1])
    dense = drawn(1)["B"]
    _, found = run("C[p,n] = B[K[p],n]", {"K": index, "B": dense})
    inside = torch.tensor([0, 1, 4])
    assert torch.equal(found[inside], dense[index[inside]])
    assert found[2:4].isnan().all()


@each_way
@pytest.mark.parametrize("name", ["I", "K"])
def test_padding_is_absent(name: str, sure: bool, strategy: str) -> None:
    given = drawn(300)
    given[name][::4] = -1
    with determinism(sure):
        found = run("C[I[p],n] += V[p,n] * B[K[p],n]", given, padded=(name,))
    assert found[0] == strategy
    there = given["K"] >= 0
    expected = summed(given["I"], given["V"] * given["B"][given["K"]], there)
    torch.testing.assert_close(found[1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", ["d", "c", ""])
@pytest.mark.parametrize(
    "text",
    [
        "y[p[d[e],c[e]],f] = x[e,f]",
        "y[p[d[e],c[e]],f] max= x[e,f]",
        "y[e,f] = v[p[d[e],c[e]],f] * x[e,f]",
    ],
)
def test_an_index_of_several_is_read_where_all_are_in_range(text: str, padded: str) -> None:
    """That one is padding says nothing of the range of the others, nor of its own."""
    tensors = {
        "d": torch.randint(0, 6, (40,)),
        "c": torch.randint(0, 3, (40,)),
        "p": torch.randint(0, 4, (6, 3)),
        "x": torch.randn(40, 20),
        "v": torch.randn(4, 20),
    }
    given = {name: t for name, t in tensors.items() if f"{name}[" in text}
    given["d"][7] = 1000
    with pretended():
        insum.insum(text, **given, out_shape=(40 if text[2] == "e" else 4, 20), padded=(*padded,))
        with pytest.raises(insum.IndexRangeError, match=r"d\[7\] is 1000"):
            insum.synchronize()
