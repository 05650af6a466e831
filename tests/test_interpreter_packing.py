"""Rows of a padded table in an order that fills tiles: the same results, fewer steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import insum
from insum.call.request import request_of
from insum.plan.strategies.packing import TILE
from insum.runtime import build_tiles
from insum.runtime.prologue.made import Made
from insum.runtime.prologue.tables import WORTH, by_step, packed
from kernels import lookup

pytestmark = pytest.mark.interpreter
ROWS, STEPS, CHANNELS = 1100, 9, 16


@pytest.fixture(autouse=True)
def only_fused() -> Iterator[None]:
    with insum.settings(backend="fused", require_fused=True):
        yield


def table(rows: int = ROWS, steps: int = STEPS, density: float = 0.5) -> Tensor:
    """Nb[z,x]: every row has the middle step and those of one of four kinds, at ``density``; no two
    rows lead to the same place.
    """
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(0, 4, (rows,), generator=generator)
    found = torch.full((steps, rows), -1, dtype=torch.int32)
    for z in range(steps):
        some = (kind == z % 4) & (torch.rand(rows, generator=generator) < density)
        found[z] = torch.where(some, torch.randperm(rows, generator=generator).int(), -1)
    found[steps // 2] = torch.arange(rows)
    return found


def operands(
    steps: int = STEPS, rows: int = ROWS, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, CHANNELS, dtype=dtype), torch.randn(steps, CHANNELS, 16, dtype=dtype)


def expected(x: Tensor, nb: Tensor, w: Tensor) -> Tensor:
    gathered = torch.where((nb >= 0)[:, :, None], x.double()[nb.clamp(min=0).long()], 0.0)
    return torch.einsum("zxc,zcm->xm", gathered, w.double())


def strategy(
    statement: str, values: dict[str, Tensor], shape: tuple[int, ...] | None = None
) -> str:
    program = lookup(request_of(statement, shape, None, ("Nb",)).bind(values), values)
    assert not isinstance(program, str)
    return "; ".join(program.steps[0].planned.plan.why)


BY_STEP, BY_ROW = "Out[x,m] += In[Nb[z,x],c] * W[z,c,m]", "Out[x,m] += In[Nb[x,z],c] * W[z,c,m]"


@pytest.mark.parametrize("statement", [BY_STEP, BY_ROW])
@pytest.mark.parametrize("rows", [ROWS, 9 * TILE])
def test_values_and_gradients(statement: str, rows: int) -> None:
    nb, (x, w) = table(rows), operands(rows=rows)
    given = nb if statement == BY_STEP else nb.t().contiguous()
    assert "ordered by what Nb has" in strategy(statement, {"In": x, "Nb": given, "W": w})
    x, w = x.requires_grad_(), w.requires_grad_()
    result = insum.insum(statement, padded=("Nb",), In=x, Nb=given, W=w)
    want = expected(x, nb, w)
    assert torch.allclose(result.double(), want, atol=1e-4)
    upstream = torch.randn_like(result)
    for got, true in zip(
        torch.autograd.grad(result, (x, w), upstream),
        torch.autograd.grad(want, (x, w), upstream.double()),
        strict=True,
    ):
        assert torch.allclose(got.double(), true.double(), rtol=1e-4, atol=1e-3)


def test_steps_that_outnumber_channels() -> None:
    """They are ordered as well, but for the fewest channels, which tiles of steps read best."""
    nb = table()
    torch.manual_seed(1)
    x, w = torch.randn(ROWS, 8).half(), torch.randn(STEPS, 8, 4).half()
    assert "ordered by what Nb has" in strategy(BY_STEP, {"In": x, "Nb": nb, "W": w})
    result = insum.insum(BY_STEP, padded=("Nb",), In=x, Nb=nb, W=w)
    assert torch.allclose(result.double(), expected(x, nb, w), rtol=2e-2, atol=5e-2)
    few = {"In": x[:, :4], "Nb": nb, "W": w[:, :4]}
    assert "ordered by what" not in strategy(BY_STEP, few)
    wide, w = torch.randn(ROWS, 16).half(), torch.randn(40, 16, 16).half()
    assert "ordered by what" in strategy(BY_STEP, {"In": wide, "Nb": table(steps=40), "W": w})


@pytest.mark.parametrize("outputs", [8, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels", [2, 3, 4, 5, 6, 7])
def test_few_channels_fill_tiles_together_with_steps(
    channels: int, dtype: torch.dtype, outputs: int
) -> None:
    """What else is in memory behind a row is infinite, and none of it is summed."""
    torch.manual_seed(channels)
    nb, room = table(), torch.full((ROWS, 11), float("inf"), dtype=dtype)
    x, w = room[:, 1 : 1 + channels], torch.randn(STEPS, channels, outputs, dtype=dtype)
    x.copy_(torch.randn(ROWS, channels))
    values = {"In": x, "Nb": nb, "W": w}
    program = lookup(request_of(BY_STEP, None, None, ("Nb",)).bind(values), values)
    assert not isinstance(program, str)
    plan = program.steps[0].planned.plan
    assert plan.segment is not None and plan.roles.k == (plan.segment.var, "c")
    result = insum.insum(BY_STEP, padded=("Nb",), **values)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert torch.allclose(result.double(), expected(x, nb, w), atol=tolerance)


def test_the_gradient_of_a_table_is_ordered_too() -> None:
    nb, (x, w) = table(), operands()
    statement, values = "dIn[Nb[z,x],c] += G[x,m] * W[z,c,m]", {"Nb": nb, "G": x, "W": w}
    assert "ordered by what" in strategy(statement, values, (ROWS, CHANNELS))


@pytest.mark.parametrize("channels", [64, 48, 24, 16])
def test_where_rows_are_summed_each_step_walks_its_tiles(channels: int) -> None:
    nb, x = table(rows=5000), torch.randn(5000, channels)
    statement, values = "dW[z,c,m] += G[x,m] * In[Nb[z,x],c]", {"Nb": nb, "G": x, "In": x}
    assert "left out" in strategy(statement, values)
    result = insum.insum(statement, padded=("Nb",), **values)
    gathered = torch.where((nb >= 0)[:, :, None], x.double()[nb.clamp(min=0).long()], 0.0)
    assert torch.allclose(
        result.double(), torch.einsum("xm,zxc->zcm", x.double(), gathered), rtol=1e-4, atol=1e-3
    )
    torch.use_deterministic_algorithms(True)
    try:
        assert "left out" not in strategy(statement, values), "pieces would meet in any order"
    finally:
        torch.use_deterministic_algorithms(False)


def test_it_adds_to_what_is_there() -> None:
    nb, (x, w) = table(), operands()
    target = torch.randn(ROWS, 16)
    want = target.double() + expected(x, nb, w)
    assert torch.allclose(
        insum.insum(BY_STEP, padded=("Nb",), Out=target, In=x, Nb=nb, W=w).double(), want, atol=1e-4
    )


def cut(statement: str, values: dict[str, Tensor]) -> int:
    """Into how many pieces the lists of steps are cut."""
    program = lookup(request_of(statement, None, None, ("Nb",)).bind(values), values)
    assert not isinstance(program, str)
    (step,) = program.steps
    found = max(int(launch.counts.get("piece_count", 1)) for launch in step.launches)  # type: ignore[arg-type]
    assert bool(step.workspace) == (found > 1) and not step.atomic
    return found


@pytest.mark.parametrize("steps", [27, 81])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_lists_of_few_tiles_are_cut(steps: int, dtype: torch.dtype) -> None:
    """All tiles run at once, and the longest list would decide."""
    nb, (x, w) = table(steps=steps), operands(steps=steps, dtype=dtype)
    nb[:, 200:230] = -1
    values = {"In": x, "Nb": nb, "W": w}
    assert cut(BY_STEP, values) > 2
    result = insum.insum(BY_STEP, padded=("Nb",), **values)
    want, within = expected(x, nb, w), {torch.float32: 1e-4, torch.float16: 2e-2}[dtype]
    assert torch.allclose(result.double(), want, atol=within) and not result[200:230].any()
    target = torch.randn(ROWS, 16, dtype=dtype)
    want += target.double()
    insum.insum(BY_STEP, padded=("Nb",), Out=target, **values)
    assert torch.allclose(target.double(), want, atol=within)


def test_pieces_of_lists_read_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights whose rows lie across the sum are copied; what comes back is the same every time."""
    monkeypatch.setattr("insum.plan.copying.LEAST_POINTS", 2**20)
    nb, x = table(steps=27), torch.randn(ROWS, 40)
    values = {"In": x, "Nb": nb, "W": torch.randn(27, 40, 24)}
    program = lookup(request_of(BY_STEP, None, None, ("Nb",)).bind(values), values)
    assert not isinstance(program, str)
    assert program.steps[0].copies and cut(BY_STEP, values) > 1
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (insum.insum(BY_STEP, padded=("Nb",), **values) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.allclose(first.double(), expected(x, nb, values["W"]), atol=1e-3)
    assert torch.equal(first, again)


def test_lists_stay_whole_where_a_factor_follows() -> None:
    """Which would be multiplied with every piece, also with those that have nothing."""
    nb, (x, w), s = table(steps=27), operands(steps=27), torch.ones(ROWS)
    nb[:, ::3] = torch.where(torch.arange(27)[:, None] == 5, nb[:, ::3], -1)
    s[::50] = float("inf")
    statement, values = f"{BY_STEP} * S[x]", {"In": x.abs(), "Nb": nb, "W": w.abs(), "S": s}
    assert cut(statement, values) == 1
    result = insum.insum(statement, padded=("Nb",), **values)
    there = (nb >= 0).any(0)
    assert not result[there].isnan().any() and result[there & s.isinf()].isinf().all()


def test_lists_stay_whole_where_sizes_have_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the workspace would have none."""
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    monkeypatch.setattr("insum.runtime.program.Room.level", property(lambda room: 4))
    summed, together = [], build_tiles._together
    monkeypatch.setattr(build_tiles, "_together", lambda *a: summed.append(a) or together(*a))
    nb, (x, w) = table(steps=27), operands(steps=27)
    result = insum.insum(BY_STEP, padded=("Nb",), In=x, Nb=nb, W=w)
    assert torch.allclose(result.double(), expected(x, nb, w), atol=1e-4) and not summed


def test_a_config_is_asked_for_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a statement has kernels enough, and by default would cut nothing."""
    monkeypatch.setattr(build_tiles, "MOST_TO_CUT", 0)
    summed, together = [], build_tiles._together
    monkeypatch.setattr(build_tiles, "_together", lambda *a: summed.append(a[1]) or together(*a))
    nb, (x, w) = table(steps=27), operands(steps=27)
    for config, pieces in ((None, []), (insum.Config(m=64, n=16, k=16, split=5), [5])):
        summed.clear()
        monkeypatch.setattr("insum.call.prepared._forms", {})
        monkeypatch.setattr("insum.call.lookup._fronts", {})
        result = insum.insum(BY_STEP, padded=("Nb",), config=config, In=x, Nb=nb, W=w)
        assert torch.allclose(result.double(), expected(x, nb, w), atol=1e-4) and summed == pieces


def test_lists_of_many_tiles_stay_whole() -> None:
    nb, x = table(rows=20_000, steps=27), torch.randn(20_000, 64)
    assert cut(BY_STEP, {"In": x, "Nb": nb, "W": torch.randn(27, 64, 64)}) == 1


def test_rows_without_anything_are_zero() -> None:
    nb, (x, w) = table(), operands()
    nb[:, 100:300] = -1
    result = insum.insum(BY_STEP, padded=("Nb",), In=x, Nb=nb, W=w)
    assert (
        torch.allclose(result.double(), expected(x, nb, w), atol=1e-4) and not result[100:300].any()
    )


def test_more_steps_than_a_sort_key_has_bits() -> None:
    nb, (x, w) = table(steps=70, density=0.9), operands(steps=70)
    assert torch.allclose(
        insum.insum(BY_STEP, padded=("Nb",), In=x, Nb=nb, W=w).double(),
        expected(x, nb, w),
        atol=1e-3,
    )


def test_a_table_that_is_written_to_is_ordered_anew() -> None:
    nb, (x, w) = table(), operands()
    insum.insum(BY_STEP, padded=("Nb",), In=x, Nb=nb, W=w)
    nb.copy_(nb.roll(37, 1))
    assert torch.allclose(
        insum.insum(BY_STEP, padded=("Nb",), In=x, Nb=nb, W=w).double(),
        expected(x, nb, w),
        atol=1e-4,
    )


def test_full_tables_and_short_ones_stay_as_they_are() -> None:
    full = torch.stack([torch.randperm(ROWS).int() for _ in range(STEPS)])
    full[0, 0] = -1
    x, w = operands()
    assert "ordered" not in strategy(BY_STEP, {"In": x, "Nb": full, "W": w})
    assert "ordered" not in strategy(BY_STEP, {"In": x[:500], "Nb": table(500), "W": w})


def ordered(present: Tensor) -> Made:
    found = packed(present)
    assert isinstance(found, Made)
    return found


def test_the_order_leaves_out_only_what_is_absent_in_a_whole_tile() -> None:
    present = table().t() >= 0
    order = ordered(present)
    rows, steps = order.arrays["rows"].long(), order.arrays["steps"]
    assert sorted(rows[rows >= 0].tolist()) == list(range(ROWS)) and rows.shape[1] == TILE
    start, end = (order.arrays[name].tolist() for name in ("start", "end"))
    for tile, (first, last) in enumerate(zip(start, end, strict=True)):
        inside = rows[tile][rows[tile] >= 0]
        assert steps[first:last].tolist() == present[inside].any(0).nonzero()[:, 0].tolist()
    lengths = [last - first for first, last in zip(start, end, strict=True)]
    assert lengths == sorted(lengths, reverse=True), "tiles with many steps come first"
    assert order.counts == {
        "tiles": len(lengths),
        "lanes": TILE,
        "width": STEPS,
        "total": sum(lengths),
        "entries": sum(lengths),
        "turned": 0,
    }
    assert order.summary.worth == (sum(lengths) <= WORTH * len(lengths) * STEPS)


def test_an_order_is_worth_it_where_it_leaves_out_enough() -> None:
    present = torch.zeros(4 * TILE, 4, dtype=torch.bool)
    present[:, 0] = True
    assert ordered(present).summary.worth
    assert not ordered(torch.ones_like(present)).summary.worth


@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
def test_by_step_every_tile_of_a_step_is_walked_once(density: float) -> None:
    order = ordered(torch.rand(ROWS, STEPS) < density)
    pieces = by_step(order)
    assert isinstance(pieces, Made)
    tile, step, start, end = (
        pieces.arrays[name].tolist() for name in ("tile", "step", "start", "end")
    )
    assert len(step) == len(start) == len(end) == pieces.counts["pieces"]
    walked = [(s, tile[k]) for s, a, b in zip(step, start, end, strict=True) for k in range(a, b)]
    bounds = zip(order.arrays["start"].tolist(), order.arrays["end"].tolist(), strict=True)
    has = [
        (int(s), number)
        for number, (first, last) in enumerate(bounds)
        for s in order.arrays["steps"][first:last]
    ]
    assert sorted(walked) == sorted(has)
