"""Sums of scalar products: along rows that are added up through an index, and of three factors, of
which one axis is summed at the end and so held whole by one tile.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import insum
from insum import Config
from insum.plan import legal, tiling
from insum.runtime import inspection
from kernels import bound, error, plan_of

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

ALONG = "y[d[e]] = A[d[e],k] * B[s[e],k] * w[e]"
SHORT = Config(m=4, n=16, k=2, warps=1, stages=1, split=4)
LONG = Config(m=1, n=16, k=4, warps=1, stages=1)
TRIPLE = "y[n] = G[i,j] * X[t[n],i] * Y[n,j]"


def drawn(width: int, ends: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    nodes = 7
    return {
        "d": ends,
        "s": torch.randint(0, nodes, ends.shape),
        "A": torch.randn(nodes, width).to(dtype),
        "B": torch.randn(nodes, width).to(dtype),
        "w": torch.rand(ends.shape).to(dtype),
    }


def added(values: dict[str, Tensor]) -> Tensor:
    rows = values["A"].double()[values["d"]] * values["B"].double()[values["s"]]
    every = rows.sum(1) * values["w"].double()
    return every.new_zeros(7).index_add(0, values["d"], every)


@pytest.mark.parametrize("width", [7, 8, 20, 64, 100, 256, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scalar_products_that_are_added_up(width: int, dtype: torch.dtype) -> None:
    values = drawn(width, torch.randint(0, 7, (60,)), dtype)
    for _ in range(3):  # once the index was seen, another plan
        got = insum.insum(ALONG, **values, out_shape=(7,))
        assert error(got, added(values)) <= (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("width", [12, 16])
@pytest.mark.parametrize("lengths", [[5, 1, 2, 0, 0, 0, 0], [3, 41, 0, 9, 4, 1, 0], [17] * 7])
def test_rows_that_are_cut(width: int, lengths: list[int]) -> None:
    """What a piece has was summed over its columns before: they are not summed once more."""
    values = drawn(width, torch.repeat_interleave(torch.arange(7), torch.tensor(lengths)))
    insum.unchanging(values["d"])
    got = insum.insum(ALONG, **values, out_shape=(7,), config=(SHORT, LONG))
    assert error(got, added(values)) <= 1e-5


def test_a_tile_holds_all_columns() -> None:
    values = drawn(20, torch.arange(7).repeat(3).sort().values)
    with pytest.raises(insum.errors.SettingsError, match="one tile holds all of the N axis"):
        insum.insum(ALONG, **values, out_shape=(7,), config=(SHORT, LONG))


@pytest.mark.parametrize("operator", ["=", "max=", "mean="])
def test_heads(operator: str) -> None:
    values = drawn(24, torch.randint(0, 7, (50,)))
    heads = {n: values[n].view(7, 3, 8) for n in "AB"}
    found = insum.insum(
        f"y[d[e],h] {operator} A[d[e],h,k] * B[s[e],h,k]",
        **heads,
        d=values["d"],
        s=values["s"],
        out_shape=(7, 3),
    )
    every = heads["A"].double()[values["d"]] * heads["B"].double()[values["s"]]
    own = [every[values["d"] == n] for n in range(7)]
    match operator:
        case "max=":
            want = torch.stack([one.amax((0, 2)) for one in own])
        case "mean=":
            want = torch.stack([one.mean((0, 2)) for one in own])
        case _:
            want = torch.stack([one.sum((0, 2)) for one in own])
    assert error(found, want) <= 1e-5


@pytest.mark.parametrize("count", [7, 8, 9, 64, 100, 200])
@pytest.mark.parametrize("kind", ["sorted", "equal", "random"])
def test_entries_are_no_columns(count: int, kind: str) -> None:
    """Though what is read lies along them."""
    index = torch.randint(5, (count,))
    index = {"sorted": index.sort().values, "equal": torch.full((count,), 2)}.get(kind, index)
    z = torch.randn(3, count)
    for text, shape in (("y[b,t[p]] = z[b,p]", (3, 5)), ("y[t[p],b] = z[b,p]", (5, 3))):
        want = torch.zeros(3, 5).double().index_add(1, index, z.double())
        got = insum.insum(text, z=z, t=index, out_shape=shape)
        assert error(got if shape == (3, 5) else got.T, want) <= 1e-5


@pytest.mark.parametrize("i, j", [(64, 64), (65, 65), (96, 80), (100, 127), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_axis_that_is_summed_at_the_end(i: int, j: int, dtype: torch.dtype) -> None:
    """However few tiles there are, none is cut."""
    G, X, Y = (torch.randn(s).to(dtype) / s[-1] ** 0.5 for s in ((i, j), (9, i), (40, j)))
    t = torch.randint(9, (40,))
    want = torch.einsum("ij,ni,nj->n", G.double(), X.double()[t], Y.double())
    got = insum.insum(TRIPLE, G=G, X=X, Y=Y, t=t)
    assert error(got, want) <= (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_first_guesses_are_legal(architecture: str) -> None:
    """On every device: sides that are summed at the end are held whole."""
    looked = 0
    sizes = itertools.product((17, 300, 5000), (64, 65, 96, 128), (torch.float16, torch.float32))
    for number, side, dtype in sizes:
        values = {
            "G": torch.empty(side, side, dtype=dtype),
            "X": torch.empty(9, side, dtype=dtype),
            "Y": torch.empty(number, side, dtype=dtype),
            "t": torch.zeros(number, dtype=torch.int64),
        }
        look = inspection.elsewhere(bound(TRIPLE, values), values, architecture=architecture)
        for one in look.ready(look.program(anywhere=True)).launches:  # type: ignore[arg-type]
            plan, config = one.launch.plan, one.launch.config
            extents = {"n": number, "i": side, "j": side}
            if plan.roles.dot and set(plan.roles.m) | set(plan.roles.n) <= set(extents):
                assert not legal.broken(plan, extents, (config,)), (number, side, dtype, config)
                looked += 1
    assert looked == 24


def test_columns_that_are_walked() -> None:
    """The scalar product's own variable is the N axis of a segmented sum."""
    ends = torch.arange(7).repeat(9)
    plan = plan_of(ALONG, {0: 7}, **drawn(64, ends))
    assert plan.roles.n == ("k",) and tiling.sums_columns(plan) and not plan.roles.loops
