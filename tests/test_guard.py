"""The short way of a call: taken by exactly those calls that are like an earlier one, and computing
what the long way does.

A call takes it where everything that is to be launched was kept with its index tensors; otherwise
its program is looked for.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.call import prepared as calls
from insum.compat import tensors as guards
from insum.facts import constant
from insum.runtime import cache, which_program
from insum.runtime.ready import Ready
from kernels import ONLY_FUSED, strategy_of, watch_programs

pytestmark = pytest.mark.interpreter
STATEMENT = "C[rows[p],n] = vals[p] * B[cols[p],n]"


@pytest.fixture(autouse=True, params=["torch's guards", "our own"])
def only_fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test twice: a torch without guards for tensors is served too."""
    if request.param == "our own":
        monkeypatch.setattr(guards, "_tensor_guard", lambda tensors, exact: None)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    with insum.settings(**ONLY_FUSED):
        yield


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Calls that did not take the short way."""
    found: list[object] = []
    original = which_program.find

    def find(call: Any, *rest: Any) -> Any:
        found.append(call)
        return original(call, *rest)

    monkeypatch.setattr(which_program, "find", find)
    return found


def tensors() -> dict[str, Tensor]:
    return {
        "rows": torch.tensor([0, 0, 2, 3]),
        "cols": torch.tensor([1, 0, 2, 1]),
        "vals": torch.randn(4),
        "B": torch.randn(3, 16),
    }


def run(values: dict[str, Any], **options: Any) -> Tensor:
    return insum.insum(STATEMENT, **(options or {"sizes": {0: 4}}), **values)


def expected(values: dict[str, Tensor]) -> Tensor:
    return torch.zeros(4, values["B"].shape[1]).index_add_(
        0, values["rows"], values["vals"][:, None] * values["B"][values["cols"]]
    )


def is_short(searches: list[object], values: dict[str, Any]) -> bool:
    """Whether a call takes the short way; its result is right in any case."""
    before = len(searches)
    torch.testing.assert_close(run(values), expected(values))
    return len(searches) == before


def test_it_computes_what_the_long_way_does(searches: list[object]) -> None:
    values = tensors()
    assert not is_short(searches, values)
    for _ in range(3):
        assert is_short(searches, values)
    values["vals"] = torch.randn(4)
    assert is_short(searches, values), "other values of the same kind"


#: Calls that differ, and whether the call is of the same kind.
OTHERS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Any]], bool]] = {
    "shape": (lambda v: {**v, "B": torch.randn(3, 17)}, True),
    "strides": (lambda v: {**v, "B": torch.randn(16, 3).t()}, True),
    "another index": (lambda v: {**v, "cols": v["cols"].clone()}, True),
    "dtype": (lambda v: {**v, "B": v["B"].double()}, False),
    "device": (lambda v: {**v, "B": v["B"].to("meta")}, False),
    "layout": (lambda v: {**v, "B": v["B"].to_sparse()}, False),
    "class": (lambda v: {**v, "B": torch.nn.Parameter(v["B"])}, False),
    "a gradient": (lambda v: {**v, "B": v["B"].clone().requires_grad_()}, False),
    "a number": (lambda v: {**v, "vals": 2.0}, False),
    "a tensor less": (lambda v: {n: t for n, t in v.items() if n != "vals"}, False),
    "a tensor more": (lambda v: {**v, "D": torch.ones(1)}, False),
    "another name": (
        lambda v: {**{n: t for n, t in v.items() if n != "vals"}, "w": v["vals"]},
        False,
    ),
}


def outcome(values: dict[str, Any]) -> Tensor | tuple[type, str]:
    """The result, or what is wrong."""
    try:
        return run(values).detach()
    except insum.InsumError as error:
        return type(error), str(error)


@pytest.mark.parametrize("other", OTHERS)
def test_another_call_does_not_take_it(other: str, searches: list[object]) -> None:
    values = tensors()
    change, same = OTHERS[other]
    for _ in range(3):  # which is recognised by one comparison from then on
        is_short(searches, values)
    before, given = len(searches), change(values)
    (kinds,) = calls._forms.values()
    first, found = kinds.known(values, (4,)), kinds.known(given, (4,))
    assert first is not None and (found is not None) is same
    if found is not None:
        assert found.prepared is first.prepared and (found is first) is (other == "another index")
    got = outcome(given)
    assert not isinstance(got, Tensor) or len(searches) == before + 1
    with insum.settings(backend="graph", require_fused=False):
        want = outcome(given)
    if isinstance(want, Tensor):
        torch.testing.assert_close(got, want)
    else:
        assert got == want
    assert is_short(searches, values)


def test_an_index_that_was_changed_is_another(searches: list[object]) -> None:
    values = tensors()
    for name in ("cols", "rows"):
        for _ in range(3):
            is_short(searches, values)
        values[name][0] = 2
        assert not is_short(searches, values) and is_short(searches, values)
    values["rows"].numpy()[1] = 1  # which no version counter tells
    assert not is_short(searches, values)


@pytest.mark.parametrize("name", ["cols", "rows"])
def test_a_promise_is_kept_from_then_on(
    name: str, searches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, seen = tensors(), watch_programs(monkeypatch)
    for other in {"cols", "rows"} - {name}:
        constant(values[other])
    for _ in range(2):
        is_short(searches, values)
    assert strategy_of(seen[-1]) != "unrolled"
    constant(values[name])
    assert not is_short(searches, values) and strategy_of(seen[-1]) == "unrolled"
    constant(values[name])
    assert is_short(searches, values), "nothing new was promised"


def test_a_gradient_does_not_matter_where_none_is_recorded(searches: list[object]) -> None:
    values = tensors()
    values["B"].requires_grad_()
    with torch.no_grad():
        assert not is_short(searches, values) and is_short(searches, values)
        assert not run(values).requires_grad
    result = run(values)
    assert result.requires_grad
    (got,) = torch.autograd.grad(result.sum(), values["B"])
    (want,) = torch.autograd.grad(expected(values).sum(), values["B"])
    torch.testing.assert_close(got, want)


def test_modes_and_settings_matter(searches: list[object]) -> None:
    values = tensors()

    def again() -> None:
        """The modes are back."""
        assert is_short(searches, values)

    assert not is_short(searches, values)
    with insum.settings(check="never"):
        assert not is_short(searches, values)
    again()
    with torch.autocast("cpu", torch.bfloat16):
        found = run(values)
        with insum.settings(backend="graph", require_fused=False):
            torch.testing.assert_close(found, run(values))
    again()
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_short(searches, values)
    finally:
        torch.use_deterministic_algorithms(False)
    again()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert not is_short(searches, values)
    finally:
        torch.set_float32_matmul_precision(before)
    again()
    cache.forget()
    assert not is_short(searches, values), "something may have been tuned"


def test_nothing_is_kept_alive(searches: list[object]) -> None:
    memory.forget()
    values = tensors()
    for _ in range(4):
        is_short(searches, values)
    assert memory.report().entries == 2
    alive = {name: weakref.ref(tensor) for name, tensor in values.items()}
    kept = {n: t for n, t in values.items() if n != "rows"}
    del values
    gc.collect()
    assert alive["rows"]() is None and memory.report().entries == 1
    assert not is_short(searches, {**kept, "rows": torch.tensor([0, 0, 2, 3])})
    del kept
    gc.collect()
    assert not any(reference() is not None for reference in alive.values())


def test_index_values_are_looked_at_in_every_call_on_the_cpu(searches: list[object]) -> None:
    values = tensors()
    for _ in range(3):
        is_short(searches, values)
    values["cols"].data[2] = 7
    with pytest.raises(insum.IndexRangeError, match=r"cols\[2\] is 7"):
        run(values)
    values["cols"].data[2] = 0
    torch.testing.assert_close(run(values), expected(values))


@pytest.mark.filterwarnings("error")
def test_what_has_no_kernel_has_none_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once."""
    monkeypatch.setattr("insum.bounded._said", {})
    x, plain = torch.randn(4, dtype=torch.complex64), {"require_fused": False}
    for _ in range(3):
        with pytest.raises(insum.NotFusedError, match="holds complex64"):
            insum.insum("y[i] = x[i]", x=x)
    with insum.settings(**plain), pytest.warns(UserWarning, match="runs as a graph"):
        assert torch.equal(insum.insum("y[i] = x[i]", x=x), x)
    with insum.settings(**plain):
        assert torch.equal(insum.insum("y[i] = x[i]", x=x), x)


@pytest.mark.parametrize(
    "options",
    [{"sizes": {0: 4}}, {"out_shape": (4, 16)}, {"sizes": {"rows": 4}}, {"out_shape": [4, 16]}],
)
def test_calls_through_the_front_door(searches: list[object], options: dict[str, Any]) -> None:
    """Whatever the options were written as; a compiled statement goes the same way."""
    values = tensors()
    compiled = insum.compile(STATEMENT, **options)
    for step in range(4):
        for call in (
            lambda: insum.insum(STATEMENT, **options, **values),
            lambda: compiled(**values),
            lambda: compiled(**values),
        ):
            assert torch.allclose(call(), expected(values))
        assert len(searches) == 1, step
    assert len(calls._forms) == 1
    other = tensors()
    assert torch.allclose(insum.insum(STATEMENT, **options, **other), expected(other))
    assert torch.allclose(compiled(**other), expected(other))
    assert len(searches) == 2
    values["vals"].requires_grad_()
    assert (
        insum.insum(STATEMENT, **options, **values).requires_grad
        and compiled(**values).requires_grad
    )


def test_views_that_are_to_be_negated() -> None:
    """torch marks the imaginary part of a conjugate as negated and leaves the memory as it is."""
    for A in (torch.randn(5), torch.randn(5, dtype=torch.complex64).conj().imag):
        assert torch.equal(insum.insum("y[i] = A[i] * 2", A=A), A * 2)
    assert A.is_neg()


def test_accumulating_in_place(searches: list[object]) -> None:
    statement, values = STATEMENT.replace("=", "+=", 1), tensors()

    def added(C: Tensor, **more: Tensor) -> Tensor:
        given = {**values, **more}
        want, version = C.detach() + expected(given), C._version
        result = insum.insum(statement, C=C, **given)
        assert result is C and torch.allclose(result, want)
        assert result._version > version, "autograd has to see that it was written"
        return result

    for _ in range(3):
        added(torch.randn(4, 16))
    assert len(searches) == 1
    room = torch.randn(7, 16)
    added(room[:4], B=room[3:6])  # the output lies in what is read
    added(room[:4], B=room[4:])
    added(torch.randn(16, 4).t())
    assert len(searches) == 2, "strides of the output are part of the call"
    with pytest.raises(RuntimeError, match="leaf"):
        insum.insum(statement, C=torch.randn(4, 16).requires_grad_(), **values)
    with torch.inference_mode():
        inside = torch.randn(4, 16)
        want = inside + expected(values)
        torch.testing.assert_close(insum.insum(statement, C=inside, **values), want)
    with pytest.raises(RuntimeError, match="inference"):
        insum.insum(statement, C=inside, **values)


def test_a_fused_call_into_a_tensor_is_seen_by_autograd() -> None:
    values = {"C": torch.randn(4, 16), **tensors()}
    weight = torch.randn(4, 16, requires_grad=True)
    product = weight * values["C"]
    insum.insum(STATEMENT.replace("=", "+=", 1), **values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_program_runs_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several GPUs, whichever is the current one; where that is the right one already, nothing
    is switched.
    """
    current, seen = [0], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr("insum.compat.streams.device_now", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1, None):
        one: Any = object.__new__(Ready)
        one.index, one.empty, one.filled = index, lambda: torch.empty(2), True
        one.start, one.buffer, one.check, one.based = 0.0, None, None, False
        launch = SimpleNamespace(interpret=lambda *given: seen.append((current[0], given[0])))
        one.reads, one.steps = (), (((), ((launch, 7, [], 0, ()),)),)
        assert one({}, None).tolist() == [0.0, 0.0]
    assert seen == [(0, 7), (1, 7), (0, 7)] and current == [0]
