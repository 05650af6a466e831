"""Indices inside of indices, patterns beside other indices, and index values beyond 32 bits, as on
a GPU: where something is out of range nothing is read or written through it, and it is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import facts
from insum.testing.as_on_a_gpu import pretended

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    with pretended():
        yield


def reported() -> str:
    with pytest.raises(insum.IndexRangeError) as caught:
        insum.synchronize()
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("value", [3, 2**31, 2**32, 2**32 + 1, -(2**32), 2**40, 2**62, -(2**63)])
def test_values_that_32_bits_would_cut(value: int) -> None:
    index, x = torch.tensor([0, value, 1]), torch.tensor([1.0, 2.0, 3.0])
    gathered = insum.insum("y[e] = x[s[e]]", s=index, x=x)
    assert f"s[1] is {value}" in reported()
    assert gathered[1].isnan() and gathered[[0, 2]].tolist() == [1.0, 2.0]
    scattered = insum.insum("z[s[e]] = x[e]", s=index.clone(), x=x, out_shape=(3,))
    assert f"s[1] is {value}" in reported()
    assert scattered.tolist() == [1.0, 3.0, 0.0]


def test_a_multiple_of_an_index_that_32_bits_would_cut() -> None:
    d = torch.tensor([1, -(2**31)], dtype=torch.int32)
    got = insum.insum(
        "y[2*d[e] + f] = x[e] * z[f]",
        d=d,
        x=torch.tensor([1.0, 10.0]),
        z=torch.ones(2),
        out_shape=(4,),
    )
    reported()
    assert got.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("wrong", [7, -2, 3])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_an_index_inside_of_what_is_written_to(wrong: int, width: int) -> None:
    x = torch.tensor([[1.0], [10.0], [100.0]]).repeat(1, width)
    d, s = torch.tensor([0, 1, 2]), torch.tensor([1, wrong, 2])
    got = insum.insum("y[d[s[e]],f] = x[e,f]", d=d, s=s, x=x, out_shape=(3, width))
    assert f"s[1] is {wrong}" in reported()
    assert got[:, 0].tolist() == [0.0, 1.0, 100.0]


def test_two_levels_that_are_known_to_be_out_of_range() -> None:
    """The inner one is complained of; nothing is looked up with it."""
    d, s = insum.unchanging(torch.tensor([0, 9, 2])), insum.unchanging(torch.tensor([1, 7, 2]))
    with pytest.raises(insum.IndexRangeError, match=r"s\[1\] is 7"):
        insum.insum("y[d[s[e]]] = x[e]", d=d, s=s, x=torch.ones(3), out_shape=(3,))


def test_a_constant_inside_of_a_constant() -> None:
    P, Q = insum.constant(torch.tensor([0, 5, 1])), insum.constant(torch.tensor([3, 1, 2, 0]))
    with pytest.raises(insum.IndexRangeError, match=r"P\[1\] is 5"):
        insum.insum("y[Q[P[p]],f] = x[p,f]", P=P, Q=Q, x=torch.ones(3, 4), out_shape=(7, 4))


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("statement", ["=", "+=", "max="])
def test_one_tensor_that_is_promised_and_one_that_was_never_seen(
    statement: str, in_order: bool
) -> None:
    d = insum.unchanging(torch.tensor([0, 0, 1, 1, 2] if in_order else [2, 0, 1, 1, 0]))
    x, s = torch.randn(4, 6), torch.tensor([0, 1, 2, 3, 0])
    where = d[:, None].expand(5, 6)
    start = torch.zeros(3, 6) if statement != "max=" else torch.full((3, 6), -torch.inf)
    want = start.clone().scatter_reduce(0, where, x[s], "amax" if statement == "max=" else "sum")
    given: dict[str, Any] = {"y": start} if statement == "+=" else {"out_shape": (3, 6)}
    got = insum.insum(f"y[d[e],f] {statement} x[s[e],f]", d=d, s=s, x=x, **given)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("known", [True, False])
def test_entries_that_nothing_depends_on(known: bool) -> None:
    """A pattern in rows: what is beyond the end of a row is not counted."""
    d, I = torch.tensor([0, 0, 1, 1, 2]), insum.constant(torch.tensor([0, 2, 1, 2]))
    if known:
        facts.facts_of(d)
        insum.unchanging(d)
    got = insum.insum(
        "y[d[e],I[p],f] = v[p] * x[p,f]",
        d=d,
        I=I,
        v=torch.ones(4),
        x=torch.ones(4, 6),
        out_shape=(3, 3, 6),
    )
    assert got[:, 0, 0].tolist() == [2.0, 2.0, 1.0]
    assert got[:, 2, 0].tolist() == [4.0, 4.0, 2.0]


def test_a_pattern_in_rows_that_are_read_as_well() -> None:
    """The index that rows are made of stands on the right, too."""
    d, I = torch.tensor([2, 0, 1, 2]), insum.constant(torch.tensor([1, 0]))
    x, y = draw(), torch.randn(3, 6)
    insum.unchanging(d)
    got = insum.insum(
        "z[d[e],I[p],f] = x[e,p,f] * y[d[e],f]", d=d, I=I, x=x, y=y, out_shape=(3, 2, 6)
    )
    want = torch.zeros(3, 2, 6).index_add(0, d, x.flip(1) * y[d][:, None])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("factors", ["", "v[p] * ", "w[e] * "])
def test_a_pattern_beside_a_gather_that_is_summed_over(factors: str) -> None:
    I, s, x = insum.constant(torch.tensor([0, 1])), torch.tensor([0, 1, 2, 3, 0]), draw()
    values: dict[str, Any] = {"I": I, "s": s, "x": x}
    values |= {"v": torch.ones(2)} if "v" in factors else {"w": torch.ones(5)} if factors else {}
    got = insum.insum(f"y[I[p],f] = {factors}x[s[e],p,f]", **values, out_shape=(2, 6))
    torch.testing.assert_close(got, x[s].sum(0), atol=1e-5, rtol=1e-5)


def draw() -> Tensor:
    return torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))


def test_every_call_on_a_tensor_that_is_out_of_range_is_reported() -> None:
    index, x = torch.tensor([0, 9, 1]), torch.ones(3)
    for _ in range(3):
        got = insum.insum("y[e] = x[s[e]]", s=index, x=x)
        assert "s[1] is 9" in reported() and got[1].isnan()
