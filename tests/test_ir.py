"""Operations on tiles: they print as what they are, are broadcast where they meet, and are
rewritten without looking at text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insum.codegen.ir import (
    Assignment,
    Branch,
    Eager,
    Effect,
    Named,
    Operation,
    Return,
    Spread,
    Tile,
    apply,
    as_tile,
    chain,
    combine,
    load,
    loop,
    operation,
    product,
    store,
    terms,
    union,
    where,
)
from insum.codegen.kernel import kernel_of
from insum.codegen.passes import STEP, names_in, prefetched, side_by_side
from insum.codegen.printing import lines_of, text_of

ROWS, STEPS, COLUMNS = Named("m", ("M",)), Named("k", ("K",), 2), Named("n", ("N",))
SYMBOLS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "&": operator.and_,
    "|": operator.or_,
    "<": operator.lt,
    ">=": operator.ge,
    "==": operator.eq,
}


def arithmetic() -> st.SearchStrategy[tuple[Tile, Callable[[], Any]]]:
    """A tile, and what it evaluates to."""
    numbers = st.integers(-9, 9).map(lambda n: (as_tile(n), lambda: n))

    def deeper(
        parts: st.SearchStrategy[tuple[Tile, Callable[[], Any]]],
    ) -> st.SearchStrategy[tuple[Tile, Callable[[], Any]]]:
        def made(symbol: str, drawn: list[tuple[Tile, Callable[[], Any]]]) -> Any:
            def evaluated() -> Any:
                found = drawn[0][1]()
                for _, other in drawn[1:]:
                    found = SYMBOLS[symbol](found, other())
                return found

            return operation(symbol, *[one for one, _ in drawn]), evaluated

        several = st.sampled_from(["+", "*", "&", "|", "-"])
        pairs = st.sampled_from([*SYMBOLS])
        return st.builds(made, several, st.lists(parts, min_size=2, max_size=4)) | st.builds(
            made, pairs, st.lists(parts, min_size=2, max_size=2)
        )

    return st.recursive(numbers, deeper, max_leaves=12)


@given(arithmetic())
def test_operations_print_as_what_they_are(drawn: tuple[Tile, Callable[[], Any]]) -> None:
    value, evaluated = drawn
    try:
        expected = evaluated()
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            eval(text_of(value))
        return
    assert eval(text_of(value)) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (ROWS * 2 + 1, "m * 2 + 1"),
        (ROWS * (Named("a") + 1), "m * (a + 1)"),
        (ROWS - (Named("a") - 1), "m - (a - 1)"),
        ((as_tile(0) <= ROWS) & (ROWS < 8), "(0 <= m) & (m < 8)"),
        (as_tile(-1) - ROWS, "-1 - m"),
        (ROWS.differs(-1).to("tl.int32"), "(m != -1).to(tl.int32)"),
        (ROWS + COLUMNS, "m[:, None] + n[None, :]"),
        (ROWS + STEPS + COLUMNS, "(m[:, None] + k[None, :])[:, :, None] + n[None, None, :]"),
        (where(STEPS < 4, COLUMNS, 0), "tl.where((k < 4)[:, None], n[None, :], 0)"),
        (load(Named("p") + ROWS, ROWS < 9, 0), "tl.load(p + m, mask=m < 9, other=0)"),
        (load(Named("p"), cache=".cg"), 'tl.load(p, cache_modifier=".cg")'),
        (
            apply("tl.sum", ROWS + COLUMNS, over=("N",), axis=0),
            "tl.sum(m[:, None] + n[None, :], axis=0)",
        ),
        (product([]), "1"),
        (product([Named("a"), Named("b") * 8, 2]), "a * (b * 8) * 2"),
        (Spread(ROWS, Eager(("M",)), 0), "m[:, None, None]"),
    ],
)
def test_text(value: Tile, text: str) -> None:
    assert text_of(value) == text
    ast.parse(text)


def test_a_tile_knows_its_axes_and_its_stage() -> None:
    value = ROWS * 4 + STEPS
    assert value.axes == ("M", "K") and value.stage == 2
    assert union(("N",), ("M",)) == ("M", "N")
    assert isinstance(union(("N",), Eager(("M",))), Eager)
    assert (ROWS + 1).over(("M",)) == ROWS + 1
    assert load(Named("p") + ROWS, Named("x", (), 2) < 3).stage == 2


def test_no_axis_is_lost() -> None:
    with pytest.raises(AssertionError):
        load(Named("p") + ROWS, STEPS < 3)
    with pytest.raises(AssertionError):
        store(Named("p") + ROWS, ROWS, COLUMNS < 3)


def test_scalars_are_combined_first() -> None:
    a, b = Named("a"), Named("b")
    assert text_of(combine([ROWS, a, COLUMNS, b], "*")) == "a * b * m[:, None] * n[None, :]"
    assert text_of(combine([ROWS, a, b], "*", as_written=True)) == "m * a * b"
    assert combine([ROWS], "+") is ROWS


def test_chains_are_taken_apart_unless_they_are_grouped() -> None:
    a, b, c = Named("a"), Named("b"), Named("c")
    assert text_of(chain("+", a, b + c)) == "a + b + c"
    assert text_of(chain("+", a, (b + c).grouped())) == "a + (b + c)"
    assert terms("+", a + b + c) == [a, b, c]
    assert terms("*", a + b) == [a + b]
    assert isinstance(chain("&", a), Named) and isinstance(chain("&", a, b), Operation)


def test_statements() -> None:
    body = [
        Branch(Named("x") < 0, (Return(),)),
        loop("t", 0, Named("last"), body=[Assignment("acc", ROWS + 1, "+=")]),
        Branch(Named("x") > 0, (Effect(apply("f", 1)),), (Effect(apply("g")),)),
        store(Named("p") + ROWS + COLUMNS, ROWS, ROWS < 2),
    ]
    assert "\n".join(lines_of(body)) == (
        "if x < 0:\n    return\n"
        "for t in range(0, last):\n    acc += m + 1  # (M)\n"
        "if x > 0:\n    f(1)\nelse:\n    g()\n"
        "tl.store((p + m)[:, None] + n[None, :], m, mask=(m < 2)[:, None])  # (M,N)"
    )


def gathering() -> tuple[list[Assignment], list[Assignment], list[Assignment]]:
    """A loop in which a place is computed, an index read there, and a value read at the index."""
    place = Assignment("k_i", STEP * 4 + apply("tl.arange", 0, 4, over=("K",)))
    at, index = Named("k_i", ("K",), 2), Named("i_v1", ("K",), 2)
    read = Assignment("i_v1", load(Named("i_ptr") + at, at < Named("k_size"), -1).to("tl.int32"))
    value = load(Named("x_ptr") + index, index >= 0, 0)
    return [place], [read], [Assignment("acc", Named("acc", ("K",)) + value)]


def test_indices_are_read_one_step_ahead() -> None:
    """The step beyond the last one reads nothing."""
    counters, indices, rest = gathering()
    text = "\n".join(lines_of(prefetched(0, Named("count"), counters, indices, rest)))
    ahead = (
        "i_v1_next = tl.load(i_ptr + k_i_next, mask=({} < t_last) & (k_i_next < k_size), other=-1)"
    )
    assert ahead.format("t_first") in text and ahead.format("t + 1") in text
    assert "k_i_next = (t + 1) * 4 + tl.arange(0, 4)" in text
    assert text.index("i_v1 = i_v1_next") < text.index("acc = acc") < text.index("(t + 1) * 4")
    assert "t_last = count" in text


def test_an_index_without_a_mask_gets_one() -> None:
    read = Assignment("i_v1", load(Named("i_ptr") + STEP))
    text = "\n".join(lines_of(prefetched(0, 9, [], [read], [])))
    assert "tl.load(i_ptr + t_first, mask=t_first < t_last, other=0)" in text


def test_steps_side_by_side() -> None:
    """Each has names of its own, but for what they are summed in."""
    counters, indices, rest = gathering()
    lines = side_by_side(0, 10, [*counters, *indices, *rest], 2, total="acc")
    turns, left = lines[-2:]
    text = "\n".join(lines_of([turns]))
    assert "k_i_0 = (t + 0) * 4" in text and "k_i_1 = (t + 1) * 4" in text
    assert text.index("i_v1_1 = ") < text.index("acc = acc + tl.load(x_ptr + i_v1_0")
    assert lines_of([left])[1:] == lines_of([*counters, *indices, *rest], "    ")


def test_names_in() -> None:
    value = where(ROWS >= 0, load(Named("p") + COLUMNS + STEPS, STEPS < 1, Named("b")), 0)
    assert names_in(value) == {"m", "p", "n", "k", "b"}


def test_a_kernel_has_the_helpers_that_it_calls_and_no_others() -> None:
    """Not those that its name reads like."""
    called = [Assignment("x", apply("insum_elu", ROWS, 1))]
    found = kernel_of("insum_max_i", {}, called, wide=False).source
    assert "def insum_expm1(" in found and "def insum_tanh(" in found
    assert "def insum_max(" not in found and "def insum_min(" not in found
