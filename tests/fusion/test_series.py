"""Chains of one form that are added up become one op: as a table where the rows of each are unique,
in groups where they are not.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import insum.fusion
from insum import facts, memory
from insum.fusion import joined

from .programs import agrees, compiled, counts, graph_of, leaf

N, PIECES = 20, 5


def unique_pairs(nodes: int = N, seed: int = 0) -> list[Tensor]:
    """As a submanifold convolution has them: no voxel twice on either side of an offset."""
    torch.manual_seed(seed)
    return [
        torch.stack([torch.randperm(nodes)[:k], torch.randperm(nodes)[:k]])
        for k in (12, 20, 9, 0, 15)
    ]


def convolution(x: Tensor, w: Tensor, *pairs: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], w.shape[2])
    for z, (i, o) in enumerate(pairs):
        out.index_add_(0, o, x[i] @ w[z])
    return out


def summed(x: Tensor, w: Tensor, *pairs: Tensor) -> Tensor:
    return functools.reduce(
        torch.add,
        [
            torch.zeros(x.shape[0], w.shape[2]).index_add(0, o, x[i] @ w[z])
            for z, (i, o) in enumerate(pairs)
        ],
    )


def started(x: Tensor, w: Tensor, *pairs: Tensor) -> Tensor:
    out = x @ w[0]
    for z, (i, o) in enumerate(pairs):
        out = out.index_add(0, o, x[i] @ w[z])
    return out


def with_more(x: Tensor, w: Tensor, *pairs: Tensor) -> Tensor:
    return summed(x, w, *pairs) + x.sum() + x @ w[1]


DUPLICATES = [graph_of(N, 12 + z, seed=z) for z in range(PIECES)]


@pytest.mark.parametrize("pairs", [unique_pairs(), DUPLICATES], ids=["table", "groups"])
@pytest.mark.parametrize(
    "program", [convolution, summed, started, with_more], ids=lambda f: f.__name__
)
def test_one_op(program: Callable[..., Tensor], pairs: list[Tensor]) -> None:
    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, (leaf(N, 8), leaf(PIECES, 8, 4), *pairs), rtol=1e-4, atol=1e-4)
    assert counts(graphs) == [1, 2], str(insum.fusion.report())
    assert all("chains of one form" in f.notes[0] for f in insum.fusion.report().fused)


def test_unique_rows_become_a_table_and_others_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    table, groups = joined._table, joined._groups
    monkeypatch.setattr(joined, "_table", lambda *args: (made.append("table"), table(*args))[1])
    monkeypatch.setattr(joined, "_groups", lambda *args: (made.append("groups"), groups(*args))[1])
    run, _ = compiled(convolution, fullgraph=True)
    with torch.no_grad():
        run(torch.randn(N, 8), torch.randn(PIECES, 8, 4), *unique_pairs())
        run(torch.randn(N, 8), torch.randn(PIECES, 8, 4), *DUPLICATES)
        run(torch.randn(300, 8), torch.randn(PIECES, 8, 4), *unique_pairs())
    assert made == ["table", "groups", "groups"], (
        "the last would be a table of which hardly anything is there"
    )


def test_negative_values_count_from_the_end() -> None:
    pairs = [p - N * (torch.arange(p.numel()).reshape(p.shape) % 2) for p in unique_pairs()]

    def program(x: Tensor, w: Tensor, *pairs: Tensor) -> Tensor:
        out = x.new_zeros(N, 4)
        for z, (i, o) in enumerate(pairs):
            out.index_put_((o,), x[i] @ w[z], accumulate=True)
        return out

    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, (leaf(N, 8), leaf(PIECES, 8, 4), *pairs), rtol=1e-4, atol=1e-4)
    assert counts(graphs) == [1, 2]


def test_values_per_point_are_left_one_by_one() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor, *pairs: Tensor) -> Tensor:
        out = x.new_zeros(N, 4)
        for z, (i, o) in enumerate(pairs):
            out = out.index_add(0, o, (v[: i.shape[0], None] * x[i]) @ w[z])
        return out

    run, graphs = compiled(program, fullgraph=True)
    agrees(
        program, run, (leaf(N, 8), leaf(PIECES, 8, 4), leaf(30), *DUPLICATES), rtol=1e-4, atol=1e-4
    )
    assert counts(graphs)[0] == PIECES


def test_a_slice_that_is_used_twice_or_not_at_all() -> None:
    def program(x: Tensor, w: Tensor, *pairs: Tensor) -> Tensor:
        out = x.new_zeros(N, 4)
        for z, (i, o) in enumerate(pairs):
            out = out.index_add(0, o, x[i] @ w[z // 2])
        return out

    run, graphs = compiled(program, fullgraph=True)
    agrees(program, run, (leaf(N, 8), leaf(PIECES, 8, 4), *DUPLICATES), rtol=1e-4, atol=1e-4)
    assert counts(graphs)[0] == PIECES, "only chains that have a slice each, all of them, are one"


def test_sizes_that_change() -> None:
    run, graphs = compiled(convolution, fullgraph=True)
    for nodes, seed in ((20, 1), (33, 2), (41, 3)):
        agrees(
            convolution,
            run,
            (leaf(nodes, 8), leaf(PIECES, 8, 4), *unique_pairs(20, seed)),
            rtol=1e-4,
            atol=1e-4,
        )
    assert counts(graphs) == [1, 2] * 2, "compiled once more, for rows of any number"


def by_index_select(x: Tensor, w: Tensor, *pairs: Tensor) -> Tensor:
    """The same as `convolution`; what is written to does not count from the end here. (What is read
    does: torch makes `index` of `index_select`.)
    """
    out = x.new_zeros(x.shape[0], w.shape[2])
    for z, (i, o) in enumerate(pairs):
        out = out.scatter_add(0, o[:, None].expand(-1, w.shape[2]), x.index_select(0, i) @ w[z])
    return out


@pytest.mark.parametrize("pairs", [unique_pairs(), DUPLICATES], ids=["table", "groups"])
@pytest.mark.parametrize(
    "side, value", [(0, N), (0, -N - 1), (0, 2**40), (1, N), (1, -1), (1, -N - 1), (1, 2**40)]
)
def test_an_index_out_of_range_is_reported(side: int, value: int, pairs: list[Tensor]) -> None:
    """-1 marks an absent point once index tensors are put together; before that it is a mistake
    like any other.
    """
    run, graphs = compiled(by_index_select, fullgraph=True)
    pairs = [p.clone() for p in pairs]
    pairs[1][side, 3] = value
    with pytest.raises(
        insum.IndexRangeError, match=f"an index is {value}, but it indexes a dimension of size {N}"
    ):
        run(torch.randn(N, 8), torch.randn(PIECES, 8, 4), *pairs)
    assert counts(graphs) == [1]


def test_an_index_before_the_beginning_is_reported() -> None:
    run, _ = compiled(convolution, fullgraph=True)
    pairs = [p.clone() for p in unique_pairs()]
    pairs[1][0, 3] = -N - 1
    with pytest.raises(insum.IndexRangeError, match=f"values from {-N} to {N - 1}"):
        run(torch.randn(N, 8), torch.randn(PIECES, 8, 4), *pairs)


def test_index_tensors_that_are_written_to() -> None:
    run, _ = compiled(convolution, fullgraph=True)
    x, w, pairs = torch.randn(N, 8), torch.randn(PIECES, 8, 4), unique_pairs()
    for _ in range(3):
        torch.testing.assert_close(
            run(x, w, *pairs), convolution(x, w, *pairs), rtol=1e-4, atol=1e-4
        )
        pairs[0].copy_(pairs[0].flip(1) if _ else pairs[0].flip(0))


def test_the_specification_as_text() -> None:
    spec = joined.Joined(
        "out[n0[point]] = x[n1[point]] * w[piece]",
        ("x", "w"),
        (((2, ((0, 1),)), (3, ())), ((2, ((0, 0),)), (4, ()))),
        frozenset({1}),
    )
    assert joined.joined_of(str(spec)) == spec and "\n" not in str(spec) and '"' not in str(spec)


@pytest.mark.interpreter
@pytest.mark.parametrize("pairs", [unique_pairs(), DUPLICATES], ids=["table", "groups"])
def test_as_kernels(pairs: list[Tensor]) -> None:
    run, _ = compiled(convolution, fullgraph=True)
    with insum.settings(backend="fused", require_fused=True):
        agrees(convolution, run, (leaf(N, 16), leaf(PIECES, 16, 16), *pairs), rtol=1e-3, atol=1e-3)


class Counted:
    """How index tensors were put together, where what is there is not looked at anew in every
    call, as on a GPU.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        for name in ("_table", "_groups"):
            monkeypatch.setattr(joined, name, self.counting(name, getattr(joined, name)))
        monkeypatch.setattr(memory, "can_look", lambda tensor: False)
        monkeypatch.setattr(joined, "known_now", facts.facts_of)
        memory.forget()

    def counting(
        self, name: str, make: Callable[..., joined.JoinedStatement]
    ) -> Callable[..., joined.JoinedStatement]:
        return lambda *arguments: (self.made.append(name[1:]), make(*arguments))[1]


def test_index_tensors_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    run, _ = compiled(convolution, fullgraph=True)
    x, w, pairs = torch.randn(N, 8), torch.randn(PIECES, 8, 4), unique_pairs()
    right = lambda: torch.testing.assert_close(
        run(x, w, *pairs), convolution(x, w, *pairs), rtol=1e-4, atol=1e-4
    )
    for _ in range(3):
        right()
    assert counted.made == ["table"]
    pairs[0][1] = pairs[0][1].flip(0)
    right()
    right()
    assert counted.made == ["table"] * 2, "one of them was written to"
    pairs.clear()
    torch._dynamo.reset()
    gc.collect()
    assert not memory.report().nbytes, "what was made lives as long as what it was made of"


def test_other_index_tensors_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: of tensors that were never seen nothing is known, and nobody waits for it."""
    counted = Counted(monkeypatch)
    monkeypatch.setattr(joined, "known_now", lambda tensor: None)
    run, _ = compiled(convolution, fullgraph=True)
    x, w = torch.randn(N, 8), torch.randn(PIECES, 8, 4)
    for seed in range(6):
        pairs = unique_pairs(seed=seed)
        torch.testing.assert_close(
            run(x, w, *pairs), convolution(x, w, *pairs), rtol=1e-4, atol=1e-4
        )
    assert counted.made == ["groups"] * 6
    pairs = unique_pairs(seed=7)
    pairs[2][0, 1] = N
    with pytest.raises(insum.InsumError, match=rf"is {N}, but it indexes dimension 0"):
        run(x, w, *pairs)


def test_index_tensors_that_come_back_become_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    run, _ = compiled(convolution, fullgraph=True)
    x, w, pairs = torch.randn(N, 8), torch.randn(PIECES, 8, 4), unique_pairs()
    expected = convolution(x, w, *pairs)
    with monkeypatch.context() as unseen:
        unseen.setattr(joined, "known_now", lambda tensor: None)
        torch.testing.assert_close(run(x, w, *pairs), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(x, w, *pairs), expected, rtol=1e-4, atol=1e-4)
    assert counted.made == ["groups", "table"]
