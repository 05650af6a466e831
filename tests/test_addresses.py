"""Arguments that `Ready` puts in their places by number are those that `BoundLaunch.start` finds by
name: addresses, alignment, workspaces and numbers. Kernels are taken for launched on a device;
nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.codegen.arguments import Pointer
from insum.compat.tensors import maker
from insum.facts import SEEN_AGAIN
from insum.plan.sizes import OUT, WORK
from insum.runtime import bound_launch, launch, ready, unseen
from insum.runtime.bound_launch import COPIES, BoundLaunch
from insum.runtime.ready import Ready

pytestmark = pytest.mark.interpreter
N, E, F, G = 33, 129, 33, 20

Launched = tuple[object, int, list[Any], int]


class _Maker:
    """Makes tensors, and keeps the last."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make = make

    def __call__(self) -> Tensor:
        self.last = self.make()
        return self.last


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """What is launched: by whom, how many programs, arguments, and which are not aligned."""
    found: list[Launched] = []

    def compiled(self: BoundLaunch, unaligned: int) -> Callable[[int, list[Any]], None]:
        one = self.launch
        return lambda programs, given: found.append((one, programs, given, unaligned))

    on_a_device = SimpleNamespace(**{**vars(launch), "interpreting": lambda: False})
    for module in (bound_launch, ready, unseen):
        monkeypatch.setattr(module, "launch", on_a_device)
    monkeypatch.setattr(ready, "maker", lambda *what: _Maker(maker(*what)))
    monkeypatch.setattr(BoundLaunch, "compiled", compiled)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    return found


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, launched: list[Launched]) -> list[int]:
    """How many launches each call was compared in."""
    counts: list[int] = []
    original = Ready.__call__

    def call(
        self: Ready, values: Mapping[str, Any], target: Tensor | None = None, *, look: bool = False
    ) -> Tensor:
        launched.clear()
        result = original(self, values, target, look=look)
        got = launched[1:] if look and self.check is not None else launched[:]
        launched.clear()
        out: Any = self.empty.last if target is None else target  # type: ignore[attr-defined]
        if target is not None and self.buffer is not None:
            one, (place, *_) = self.launches[0], _places(self.launches[0], OUT)
            assert got[0][0] is one.launch and got[0][2][place] != target.data_ptr()
            out = SimpleNamespace(data_ptr=lambda: got[0][2][place])
        for rooms, launches in self.work:
            made: Any = {name: make.last for name, make in rooms}  # type: ignore[attr-defined]
            for one in launches:
                one(values, out, made.get(WORK, made) if rooms else out)
        assert launched == got
        counts.append(len(got))
        return result

    monkeypatch.setattr(Ready, "__call__", call)
    return counts


@pytest.fixture
def compared_with_code(monkeypatch: pytest.MonkeyPatch, launched: list[Launched]) -> list[int]:
    """How many launches of the code for all sizes each call was compared in."""
    counts: list[int] = []
    original = Ready.__call__

    def call(
        self: Ready, values: Mapping[str, Any], target: Tensor | None = None, *, look: bool = False
    ) -> Tensor:
        problem = self.program.problem
        code = unseen.unseen_of(self, tuple(problem.extents), target is not None)
        launched.clear()
        result = original(self, values, target, look=look)
        want = launched[:]
        if code is not None and not code.recipes:
            launched.clear()
            spans = tuple(problem.extents.values())
            code.run(values, spans, problem.shape, target, (), look)
            assert [_but_own(*one) for one in launched] == [_but_own(*one) for one in want]
            counts.append(len(want))
        return result

    monkeypatch.setattr(Ready, "__call__", call)
    return counts


def _but_own(one: Any, programs: int, arguments: list[Any], unaligned: int) -> tuple[Any, ...]:
    """What was launched, but for addresses of memory of the call."""
    own = (OUT, WORK, *COPIES)
    names = [getattr(argument, "tensor", "") for argument in one.arguments]
    pointers = [isinstance(argument, Pointer) for argument in one.arguments]
    kept = [a for a, n, p in zip(arguments, names, pointers) if not (p and n in own)]
    return one, programs, kept, unaligned


def _places(one: BoundLaunch, name: str) -> list[int]:
    return [place for place, own, _ in one.pointers if own == name]


def unaligned(tensor: Tensor) -> Tensor:
    """The same values at an address that is no multiple of 16."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


STATEMENTS = {
    "scatter": ("C[d[i],j] = x[s[i],j]", (N, F)),
    "accumulated": ("C[d[i],j] += v[i] * x[s[i],j]", None),
    "numbers": ("C[d[i],j] = a * x[s[i],j] + b * y[t[i],j]", (N, F)),
    "product": ("C[d[i],k] = v[i] * x[s[i],j] * w[j,k]", (N, G)),
    "relations": ("C[d[i],k] = x[s[i],j] * u[r[i],j,k]", (N, G)),
    "largest": ("C[d[i],j] max= x[s[i],j]", (N, F)),
    "weights": ("C[r[i],j,k] = x[s[i],j] * z[d[i],k]", (3, F, G)),
}


PLACES = pytest.mark.parametrize("place", [torch.clone, unaligned], ids=["aligned", "unaligned"])


def drawn(
    title: str, dtype: torch.dtype, place: Callable[[Tensor], Tensor]
) -> Callable[[], Tensor]:
    """A call of a statement."""
    statement, shape = STATEMENTS[title]
    sizes = {"v": (E,), "x": (N, F), "y": (N, F), "z": (N, G), "w": (F, G), "u": (3, F, G)}
    values: dict[str, Any] = {n: place(torch.randn(s).to(dtype)) for n, s in sizes.items()}
    values |= {n: place(torch.randint(0, 3 if n == "r" else N, (E,))) for n in "dstr"}
    values |= {"a": 2.5, "b": True}
    used = {n: v for n, v in values.items() if n in statement.replace("C", "").replace("max", "")}
    if shape is None:
        used["C"] = place(torch.randn(N, F).to(dtype))
    return lambda: insum.insum(statement, out_shape=shape, **used)


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("known", [False, True], ids=["", "known"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("title", STATEMENTS)
def test_arguments(
    title: str,
    deterministic: bool,
    known: bool,
    dtype: torch.dtype,
    place: Callable[[Tensor], Tensor],
    compared: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "can_look", lambda tensor: known)
    call = drawn(title, dtype, place)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with insum.settings(backend="fused", require_fused=True, check="never"):
            for _ in range(2 if known else SEEN_AGAIN + 2):
                call()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(compared) and (compared or not known)


@PLACES
@pytest.mark.parametrize("check", ["never", "async"])
@pytest.mark.parametrize("title", STATEMENTS)
def test_arguments_of_code_for_all_sizes(
    title: str,
    check: str,
    place: Callable[[Tensor], Tensor],
    compared_with_code: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr(
        "insum.runtime.which_program.unseen_of", lambda *given: None
    )  # so that it is ready
    call = drawn(title, torch.float16, place)
    with insum.settings(backend="fused", require_fused=True, check=check):
        call()
    assert all(compared_with_code) and (compared_with_code or title in NEEDS_AN_ORDER)


#: Statements whose rows are sorted first.
NEEDS_AN_ORDER = ("weights",)
