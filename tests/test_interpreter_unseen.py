"""Index tensors that nobody has seen before, as on a GPU: kernels that need to know nothing of
them, checks that do not wait, and better schedules for tensors that come back.

``as_on_a_gpu`` makes CPU tensors ones whose values cannot be looked at, and leaves checks to the
kernels.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import facts, memory
from insum.plan import first_guess
from insum.runtime.program import Program
from insum.runtime.prologue import made
from insum.testing import Case, draw_cases
from kernels import ONLY_FUSED, poison_new_memory, strategy_of, watch_programs
from scatters import draw_scatters

pytestmark = pytest.mark.interpreter
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32)
INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SUM = "y[d[e],f] = w[e] * x[s[e],f]"


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    poison_new_memory(monkeypatch)
    memory.forget()
    with insum.settings(**ONLY_FUSED):
        yield
    insum.synchronize()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that were launched, in order."""
    return watch_programs(monkeypatch)


def graph(edges: int = 40, rows: int = 9, columns: int = 7, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "d": torch.randint(0, rows, (edges,)),
        "s": torch.randint(0, columns, (edges,)),
        "w": torch.randn(edges),
        "x": torch.randn(columns, 5),
    }


def summed(v: dict[str, Tensor], rows: int = 9) -> Tensor:
    return torch.zeros(rows, v["x"].shape[1]).index_add(0, v["d"], v["w"][:, None] * v["x"][v["s"]])


# --- nothing is known -----------------------------------------------------------------------------


def failure(case: Case, changes: dict[str, Any]) -> str:
    try:
        with insum.settings(**changes), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            case.check()
            insum.synchronize()
    except insum.NotFusedError:
        return ""
    except Exception as error:
        return f"{changes}\n{case!r}\n{''.join(traceback.format_exception(error))}"
    return ""


@pytest.mark.parametrize("deterministic", [False, True])
def test_drawn_statements(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        failures = [
            text
            for number, case in enumerate(
                [
                    *draw_cases(60, seed=11, dtypes=DTYPES, index_dtypes=INDICES),
                    *draw_scatters(20, seed=11),
                ]
            )
            if (text := failure(case, {"dot": ("always", "auto", "never")[number % 3]}))
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not failures, f"{len(failures)} failed, the shortest:\n{min(failures, key=len)}"


@pytest.mark.parametrize("operator", ["=", "max=", "min="])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_operators(operator: str, dtype: torch.dtype) -> None:
    v = graph()
    value = (10 * v["x"]).to(dtype)
    got = insum.insum(
        f"y[d[e],f] {operator} x[s[e],f]", d=v["d"], s=v["s"], x=value, out_shape=(9, 5)
    )
    with insum.settings(backend="graph", require_fused=False):
        want = insum.insum(
            f"y[d[e],f] {operator} x[s[e],f]", d=v["d"], s=v["s"], x=value, out_shape=(9, 5)
        )
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_other_sizes_are_the_same_program(launched: list[Program]) -> None:
    for seed, edges in enumerate((150, 170, 190, 230, 250)):
        v = graph(edges, seed=seed)
        torch.testing.assert_close(insum.insum(SUM, out_shape=(9, 5), **v), summed(v))
    assert len({id(program) for program in launched}) == 1
    assert strategy_of(launched[0]) == "atomic"


@pytest.mark.parametrize(
    ("edges", "launches"), [(1, 1), (5, 1), (63, 1), (64, 1), (65, 1), (300, 1), (1, 2), (300, 2)]
)
def test_deterministic_mode_sorts(
    edges: int, launches: int, launched: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are cut into pieces of equal length, rows of many pieces among them; of much work
    their sums have a launch of their own.
    """
    if launches == 2:
        monkeypatch.setattr(first_guess, "ONE_LAUNCH", 0)
    v = graph(edges)
    v["d"] = torch.where(torch.rand(edges) < 0.5, 3, v["d"])
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(6):
            torch.testing.assert_close(insum.insum(SUM, out_shape=(9, 5), **v), summed(v))
    finally:
        torch.use_deterministic_algorithms(False)
    assert {strategy_of(program) for program in launched} == {"segment"}
    assert len({id(program) for program in launched}) == 1, "no tier changes the order of sums"
    assert len(launched[0].launches) == launches + (launched[0].check is not None)


class Late:
    """Numbers that a device has sent, and that arrive after a while."""

    def __init__(self, numbers: Tensor, sorts: bool = True) -> None:
        self._numbers, self._asked, self.sorts = numbers.tolist(), 0, sorts

    def is_there(self) -> bool:
        self._asked += 1
        return self._asked > 2

    def numbers(self) -> Any:
        assert self._asked > 2, "the call waits for the device"
        return self._numbers


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["a sum", "a maximum", "into", "a table", "groups"])
def test_no_call_waits_for_numbers(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch, launched: list[Program]
) -> None:
    """What is derived from index tensors before their numbers have arrived serves all the same."""

    def awaited(arrays: Any, numbers: Any, finish: Any, early: Any = None) -> Any:
        together = torch.stack([n.reshape(()).long() for n in numbers])
        return made.Awaited(arrays, together, finish, early)

    monkeypatch.setattr("insum.runtime.prologue.rows.awaited", awaited)
    monkeypatch.setattr("insum.runtime.prologue.tables.awaited", awaited)
    monkeypatch.setattr(made, "Coming", Late)
    monkeypatch.setattr(facts, "Coming", Late)
    monkeypatch.setattr("insum.runtime.answers.Coming", Late)
    v, y = graph(150), torch.randn(9, 5)
    table = torch.where(torch.rand(3, 30) < 0.3, -1, torch.randint(0, 7, (3, 30)))
    groups = torch.randint(0, 7, (60, 4)).index_fill_(1, torch.tensor([3]), -1)
    rows = v["d"][:60].sort().values
    statement, values = {
        "a sum": (SUM, v),
        "a maximum": ("y[d[e],f] max= x[s[e],f]", {n: v[n] for n in "dsx"}),
        "into": (SUM.replace("=", "+="), v),
        "a table": (
            "y[r,g] = x[t[o,r],f] * m[o,f,g]",
            {"x": v["x"], "t": table, "m": torch.randn(3, 5, 16)},
        ),
        "groups": ("y[d[e],f] = x[s[e,k],f]", {"d": rows, "s": groups, "x": v["x"]}),
    }[name]
    padded = tuple({"a table": "t", "groups": "s"}.get(name, ""))
    given: dict[str, Any] = {} if name in ("into", "a table") else {"out_shape": (9, 5)}
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(2 * facts.SEEN_AGAIN + 2):
            target = {"y": y.clone()} if name == "into" else {}
            exact = {n: t.double() if t.is_floating_point() else t for n, t in values.items()}
            started = {n: t.double() for n, t in target.items()}
            with insum.settings(backend="graph", require_fused=False, check="never"):
                want = insum.insum(statement, padded=padded, **given, **exact, **started)
            got = insum.insum(statement, padded=padded, **given, **values, **target)
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    finally:
        torch.use_deterministic_algorithms(False)
    assert launched


# --- out of range ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -7, 7, 1000])
def test_a_gather_out_of_range_is_nan_and_is_reported(bad: int) -> None:
    v = graph()
    v["s"][17] = bad
    result = insum.insum(SUM, out_shape=(9, 5), **v)
    row = int(v["d"][17])
    assert result[row].isnan().all() and not result[[r for r in range(9) if r != row]].isnan().any()
    with pytest.raises(insum.IndexRangeError) as caught:
        insum.insum("y[i] = x[i]", x=torch.ones(3))
    assert f"s[17] is {bad}" in caught.value.fact and "earlier call" in caught.value.fact
    assert caught.value.statement == SUM and "size 7" in caught.value.fact
    assert torch.equal(insum.insum("y[i] = x[i]", x=torch.ones(3)), torch.ones(3)), "once"


@pytest.mark.parametrize("bad", [-1, 9, 10**6])
def test_a_scatter_out_of_range_is_dropped_and_is_reported(bad: int) -> None:
    v = graph()
    want = summed({**v, "w": v["w"].clone().index_fill_(0, torch.tensor([5]), 0.0)})
    v["d"][5] = bad
    torch.testing.assert_close(insum.insum(SUM, out_shape=(9, 5), **v), want)
    with pytest.raises(
        insum.IndexRangeError, match=rf"d\[5\] is {bad}, but it indexes dimension 0"
    ):
        insum.synchronize()
    insum.synchronize()


def test_the_report_when_the_tensor_is_gone_or_was_written_to() -> None:
    for gone in (False, True):
        v = graph()
        v["s"][[3, 30]] = 99
        insum.insum(SUM, out_shape=(9, 5), **v)
        if gone:
            del v
            gc.collect()
        else:
            v["s"].zero_()
        with pytest.raises(insum.IndexRangeError) as caught:
            insum.synchronize()
        assert "s[3] is 99, but it indexes dimension 0 of x, which has size 7" in caught.value.fact


def test_a_call_in_place_changes_nothing() -> None:
    v, y = graph(), torch.ones(9, 5)
    v["s"][39] = 7
    assert insum.insum(SUM.replace("=", "+="), y=y, **v) is y
    assert torch.equal(y, torch.ones(9, 5))
    with pytest.raises(insum.IndexRangeError, match="s\\[39\\] is 7"):
        insum.synchronize()
    v["s"][39] = 6
    insum.insum(SUM.replace("=", "+="), y=y, **v)
    torch.testing.assert_close(y, 1 + summed(v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_of_a_call_in_place_all_products_are_added_or_none(dtype: torch.dtype) -> None:
    """Also those that read no index themselves."""
    v, z = graph(), torch.randn(40, 5).to(dtype)
    v = {n: t.to(dtype) if t.is_floating_point() else t for n, t in v.items()}
    y = torch.ones(40, 5, dtype=dtype)
    statement = "y[e,f] += z[e,f] + w[e] * x[s[e],f] + 2 * z[e,f]"
    given = {"w": v["w"], "x": v["x"], "z": z}
    insum.insum(statement, y=y, s=v["s"].clone().index_fill_(0, torch.tensor([3]), 7), **given)
    assert torch.equal(y, torch.ones(40, 5, dtype=dtype))
    with pytest.raises(insum.IndexRangeError, match="s\\[3\\] is 7"):
        insum.synchronize()
    insum.insum(statement, y=y, s=v["s"], **given)
    want = 1 + 3 * z.double() + (v["w"][:, None].double() * v["x"][v["s"]].double())
    near = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(y.double(), want, rtol=near, atol=near)


def test_several_products_of_a_new_result() -> None:
    """The second adds to the first; whoever has looked at the indices before need not again."""
    v = graph()
    for _ in range(3):
        got = insum.insum("y[d[e],f] = w[e] * x[s[e],f] + 2 * x[s[e],f]", out_shape=(9, 5), **v)
        want = summed(v) + summed({**v, "w": torch.full((40,), 2.0)})
        torch.testing.assert_close(got, want)


def test_the_backward_pass_raises() -> None:
    v = graph()
    v["x"].requires_grad_()
    v["s"][0] = 7
    result = insum.insum(SUM, out_shape=(9, 5), **v)
    with pytest.raises(insum.IndexRangeError, match="earlier call"):
        result.sum().backward()


def test_the_backward_pass_trusts_the_check_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[bool] = []
    watch_programs(monkeypatch, looks)
    v = graph()
    v["x"].requires_grad_()
    insum.insum(SUM, out_shape=(9, 5), **v).sum().backward()
    assert looks == [True, False]


@pytest.mark.parametrize(
    ("statement", "values", "fact"),
    [
        (
            "y[i] = x[a[b[i]]]",
            {"a": torch.tensor([0, 5, 1]), "b": torch.tensor([0, 2, 1, 0]), "x": torch.ones(3)},
            "a[1] is 5",
        ),
        (
            "y[i] = x[a[b[i]]]",
            {"a": torch.tensor([0, 2, 1]), "b": torch.tensor([0, 3, 1, 0]), "x": torch.ones(3)},
            "b[1] is 3",
        ),
        (
            "y[i,k] = x[a[i] + k] * z[k]",
            {"a": torch.tensor([0, 2, 1]), "x": torch.ones(4), "z": torch.ones(3)},
            "index a[i] + k is 4 (at i=1, k=2)",
        ),
        (
            "y[i] = x[a[2*i]] * z[i]",
            {"a": torch.tensor([0, 9, 1, 9, 7]), "x": torch.ones(4), "z": torch.ones(3)},
            "a[4] is 7",
        ),
    ],
)
def test_nested_and_affine_indices(statement: str, values: dict[str, Tensor], fact: str) -> None:
    result = insum.insum(statement, **values)
    assert result.isnan().any() and not result.isnan().all()
    with pytest.raises(insum.IndexRangeError) as caught:
        insum.synchronize()
    assert fact in caught.value.fact


def test_values_that_nothing_refers_to_are_no_error() -> None:
    a = torch.tensor([0, 9, 1, -4, 2])
    got = insum.insum("y[i] = x[a[2*i]] * z[i]", a=a, x=torch.arange(4.0), z=torch.ones(3))
    assert got.tolist() == [0, 1, 2]
    insum.synchronize()


def test_padding_is_absent_and_the_rest_is_checked() -> None:
    a, x = torch.tensor([[0, -1], [3, 1]]), torch.arange(4.0)
    assert insum.insum("y[i] = x[a[i,k]]", padded=("a",), a=a, x=x).tolist() == [0, 4]
    insum.synchronize()
    got = insum.insum("y[i] = x[a[i,k]]", padded=("a",), a=torch.tensor([[0, -1], [-2, 1]]), x=x)
    assert got[0] == 0 and got[1].isnan()
    with pytest.raises(insum.IndexRangeError, match="or -1 for an absent entry"):
        insum.synchronize()


def test_always_and_never() -> None:
    v = graph()
    v["s"][3] = 7
    with insum.settings(check="never"):
        assert "tl.where" not in str(insum.explain(SUM, out_shape=(9, 5), **graph()))


# --- tensors that come back -----------------------------------------------------------------------


def test_a_tensor_that_comes_back_gets_the_better_schedule(launched: list[Program]) -> None:
    v = graph()
    for _ in range(facts.SEEN_AGAIN + 3):
        torch.testing.assert_close(insum.insum(SUM, out_shape=(9, 5), **v), summed(v))
    used = [strategy_of(program) for program in launched]
    assert used[0] == "atomic" and used[-1] == "segment"
    assert used == sorted(used), "and stays there"
    before = len(launched)
    v["d"].copy_(v["d"].flip(0))
    torch.testing.assert_close(insum.insum(SUM, out_shape=(9, 5), **v), summed(v))
    assert strategy_of(launched[before]) == "atomic", "what was written to is a stranger again"


def test_declared_tensors_have_it_at_once(launched: list[Program]) -> None:
    v = graph()
    insum.unchanging(v["d"])
    insum.unchanging(v["s"])
    torch.testing.assert_close(insum.insum(SUM, out_shape=(9, 5), **v), summed(v))
    assert strategy_of(launched[0]) == "segment"


def test_a_stable_tier(launched: list[Program]) -> None:
    v = graph()
    with insum.settings(tier="stable"):
        for _ in range(facts.SEEN_AGAIN + 3):
            insum.insum(SUM, out_shape=(9, 5), **v)
    assert {strategy_of(program) for program in launched} == {"atomic"}


def test_gradients_in_every_tier() -> None:
    v = graph()
    for _ in range(facts.SEEN_AGAIN + 3):
        x, w = v["x"].clone().requires_grad_(), v["w"].clone().requires_grad_()
        got = insum.insum(SUM, out_shape=(9, 5), **{**v, "x": x, "w": w})
        up = torch.randn_like(got)
        mine = torch.autograd.grad(got, (x, w), up)
        true = torch.autograd.grad(summed({**v, "x": x, "w": w}), (x, w), up)
        for a, b in zip(mine, true, strict=True):
            torch.testing.assert_close(a, b)
