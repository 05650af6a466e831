"""The short way: a site takes exactly the calls that are like the one it was made from, and
computes what the long way does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import api
from insum.plan.facts import constant, facts_of
from insum.request import request_of
from insum.runtime import cache, fused
from insum.runtime import site as runtime_site
from insum.runtime.site import Site, site_of

pytestmark = pytest.mark.interpreter
STATEMENT = "C[rows[p],n] = vals[p] * B[cols[p],n]"


@pytest.fixture(autouse=True, params=["torch's guards", "our own"])
def only_fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test twice: a torch without guards for tensors is served too."""
    if request.param == "our own":
        monkeypatch.setattr(runtime_site, "kinds_guard", lambda tensors: None)
    with insum.settings(backend="fused", require_fused=True):
        yield


def tensors() -> dict[str, Tensor]:
    return {
        "rows": torch.tensor([0, 0, 2, 3]),
        "cols": torch.tensor([1, 0, 2, 1]),
        "vals": torch.randn(4),
        "B": torch.randn(3, 16),
    }


def made(values: dict[str, Tensor]) -> tuple[Site, Any]:
    """A site as a call on a GPU would make it; the program is returned too, because a site does not
    keep it.
    """
    request = request_of(STATEMENT, None, {0: 4}, ())
    for name in ("rows", "cols"):
        facts_of(values[name])
    program = fused.lookup(request.bind(values), values, None)
    assert not isinstance(program, str)
    return Site(request, program, values, ("vals", "B"), ("rows", "cols")), program


def expected(values: dict[str, Tensor]) -> Tensor:
    return torch.zeros(4, values["B"].shape[1]).index_add_(
        0, values["rows"], values["vals"][:, None] * values["B"][values["cols"]]
    )


def test_it_computes_what_the_long_way_does() -> None:
    values = tensors()
    site, _program = made(values)
    for _ in range(2):
        result = site(values)
        assert result is not None and torch.allclose(result, expected(values))
    values["vals"] = torch.randn(4)
    result = site(values)
    assert result is not None and torch.allclose(result, expected(values)), (
        "other values of the same kind"
    )


OTHERS: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "shape": lambda v: {**v, "B": torch.randn(3, 17)},
    "dtype": lambda v: {**v, "B": v["B"].double()},
    "strides": lambda v: {**v, "B": torch.randn(16, 3).t()},
    "device": lambda v: {**v, "B": v["B"].to("meta")},
    "layout": lambda v: {**v, "B": v["B"].to_sparse()},
    "class": lambda v: {**v, "B": torch.nn.Parameter(v["B"])},
    "a gradient": lambda v: {**v, "B": v["B"].clone().requires_grad_()},
    "a number": lambda v: {**v, "vals": 2.0},
    "another index": lambda v: {**v, "cols": v["cols"].clone()},
    "a tensor less": lambda v: {n: t for n, t in v.items() if n != "vals"},
    "a tensor more": lambda v: {**v, "D": torch.ones(1)},
    "another name": lambda v: {**{n: t for n, t in v.items() if n != "vals"}, "w": v["vals"]},
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_call_is_left_alone(other: str) -> None:
    values = tensors()
    site, _program = made(values)
    assert site(OTHERS[other](values)) is None and site(values) is not None


def test_an_index_that_was_changed_is_another() -> None:
    values = tensors()
    site, _program = made(values)
    values["cols"][0] = 2
    assert site(values) is None
    values = tensors()
    site, _program = made(values)
    constant(values["rows"])
    assert site(values) is None


def test_a_gradient_does_not_matter_where_none_is_recorded() -> None:
    values = tensors()
    values["B"].requires_grad_()
    with torch.no_grad():
        site, _program = made(values)
        assert site(values) is not None
    assert site(values) is None


def test_modes_and_settings_matter() -> None:
    values = tensors()
    site, _program = made(values)
    with insum.settings(check="never"):
        assert site(values) is None
    assert site(values) is not None, "the settings are back"
    with torch.autocast("cpu", torch.bfloat16):
        assert site(values) is None
    torch.use_deterministic_algorithms(True)
    try:
        assert site(values) is None
    finally:
        torch.use_deterministic_algorithms(False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert site(values) is None
    finally:
        torch.set_float32_matmul_precision(before)
    assert site(values) is not None
    cache.forget()
    assert site(values) is None, "something may have been tuned"


def test_a_site_keeps_nothing_alive() -> None:
    values = tensors()
    site, program = made(values)
    del program
    assert site(values) is not None, "the index tensor keeps it"
    request = site.request
    kept = {n: t for n, t in values.items() if n != "rows"}
    del values
    gc.collect()
    assert (
        site.program() is None
        and site({**kept, "rows": torch.tensor([0, 0, 2, 3])}) is None
        and request is site.request
    )


def test_where_there_is_none() -> None:
    values = tensors()
    site, program = made(values)
    assert site_of(site.request, program, values, (), ()) is None, (
        "on the CPU index values are looked at in every call"
    )
    assert site_of(site.request, "no kernel", values, (), ()) is None


@pytest.mark.parametrize(
    "options",
    [{"sizes": {0: 4}}, {"out_shape": (4, 16)}, {"sizes": {"rows": 4}}, {"out_shape": [4, 16]}],
)
def test_calls_through_the_front_door(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """With the CPU taken for a device: noted at the second warm call, used from then on, whatever
    the options were written as.
    """
    monkeypatch.setattr("insum.runtime.site.site_of", lambda *given: Site(*given))
    for table in ("insum.api._sites", "insum.api._calls", "insum.request._prepared"):
        monkeypatch.setattr(table, {})
    values = tensors()
    for name in ("rows", "cols"):
        facts_of(values[name])
    compiled = insum.compile(STATEMENT, **options)
    for _ in range(4):
        for call in (
            lambda: insum.insum(STATEMENT, **options, **values),
            lambda: compiled(**values),
            lambda: compiled(**values),
        ):
            assert torch.allclose(call(), expected(values))
    listed = any(isinstance(o, list) for o in options.values())
    assert len(api._sites.get(STATEMENT, ())) >= 1
    other = tensors()
    assert torch.allclose(insum.insum(STATEMENT, **options, **other), expected(other))
    assert torch.allclose(compiled(**other), expected(other))
    values["vals"].requires_grad_()
    assert (
        insum.insum(STATEMENT, **options, **values).requires_grad
        and compiled(**values).requires_grad
    )
    if not listed:
        assert compiled._sites


def test_views_that_are_to_be_negated() -> None:
    """torch marks the imaginary part of a conjugate as negated and leaves the memory as it is."""
    A = torch.randn(5, dtype=torch.complex64).conj().imag
    assert A.is_neg() and torch.equal(insum.insum("y[i] = A[i] * 2", A=A), A * 2)


def test_accumulating_in_place() -> None:
    statement, values = STATEMENT.replace("=", "+=", 1), {"C": torch.randn(4, 16), **tensors()}
    request = request_of(statement, None, None, ())
    for name in ("rows", "cols"):
        facts_of(values[name])
    program = fused.lookup(request.bind(values), values, values["C"])
    assert not isinstance(program, str)
    site = Site(request, program, values, ("vals", "B"), ("rows", "cols"), "C")
    want, version = values["C"] + expected(values), values["C"]._version
    result = site(values)
    assert result is values["C"] and torch.allclose(result, want) and result._version > version, (
        "autograd has to see that it was written"
    )
    room = torch.randn(7, 16)
    assert site({**values, "C": room[:4], "B": room[3:6]}) is None, (
        "the output lies in what is read"
    )
    assert site({**values, "C": room[:4], "B": room[4:]}) is not None
    assert site({**values, "C": torch.randn(4, 16).requires_grad_()}) is None
    with torch.inference_mode():
        inside = torch.randn(4, 16)
    assert site({**values, "C": inside}) is None


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

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    launched = lambda values, out, work: seen.append((current[0], work is None))
    for index in (0, 1, None):
        one = SimpleNamespace(
            index=index,
            empty=lambda: torch.empty(2),
            filled=True,
            start=0.0,
            buffer=None,
            work=((None, (launched,)),),
        )
        assert fused.execute(one, {}, None).tolist() == [0.0, 0.0]  # type: ignore[arg-type]
    assert seen == [(0, True), (1, True), (0, True)] and current == [0]
