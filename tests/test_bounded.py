"""After thousands of calls of random sizes, strides and settings: few kernels, stores within their
bounds, and memory that stays what it was. Launches are stubbed; what they would compile is counted.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.call import prepared as calls
from insum.call.bound import BoundCall
from insum.plan.sizes import OUT, WORK
from insum.runtime import fused_kind, program, which_program
from insum.runtime.bound_launch import BoundLaunch
from insum.runtime.prologue import prologue
from insum.runtime.shelf import MOST_CLASSES, MOST_GENERAL, precision_of, wishes_of
from insum.testing import draw_cases
from kernels import ONLY_FUSED
from scatters import draw_scatters

pytestmark = pytest.mark.interpreter
CALLS = 2500
#: Compiled kernels of one statement, and of each that is derived from it.
MOST_KERNELS = 64
#: What the process may grow by in as many calls again, in bytes, and how often it may grow by more:
#: what leaks grows each time, what an allocator keeps for later does not.
GROWTH, AGAIN = 8 * 2**20, 2
#: Any widths, not only those that tiles divide.
WIDTHS = (1, 7, 16, 33, 64, 100, 128, 200)

#: Settings, whether torch is to be deterministic, and its precision of float32 products.
ALTERNATIVES: tuple[tuple[dict[str, Any], bool, str], ...] = (
    ({}, False, "highest"),
    ({}, False, "high"),
    ({}, True, "highest"),
    ({"check": "never"}, False, "highest"),
    ({"check": "always"}, False, "highest"),
    ({"scatter": "atomic"}, False, "highest"),
    ({"scatter": "segment"}, False, "high"),
    ({"tier": "stable"}, False, "highest"),
)


class Counter:
    """Stands for launches, and notes what each would have compiled."""

    def __init__(self) -> None:
        self.calls = 0
        self.kernels: dict[str, set[object]] = defaultdict(set)

    def __call__(
        self,
        one: BoundLaunch,
        programs: int,
        arguments: list[Any],
        values: Any = None,
        out: Tensor | None = None,
        work: Tensor | None = None,
    ) -> None:
        unaligned = 0
        for place, name, anywhere in one.pointers:
            tensor = arguments[place] if values is None else {OUT: out, WORK: work}.get(name)
            tensor = values.get(name) if tensor is None else tensor
            tensor = one.held[name] if tensor is None else tensor
            unaligned = 2 * unaligned + (anywhere or tensor.data_ptr() % 16 != 0)
        launch = one.launch
        self.kernels[launch.plan.statement].add((*launch.text, one.types, one.variant(unaligned)))


@dataclass
class Draw:
    """Random calls."""

    random: random.Random
    #: Index tensors that may come back, by what they stand for.
    pools: dict[object, list[Any]] = field(default_factory=dict)

    def number(self, most: int) -> int:
        """A size of any order of magnitude."""
        return round(math.exp(self.random.uniform(0, math.log(most))))

    def width(self) -> int:
        return self.random.choice(WIDTHS)

    def dense(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that lies in memory in one of several ways."""
        way = self.random.choice(("plain", "plain", "plain", "turned", "sliced", "padded", "wide"))
        if way == "turned":
            return torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
        if way == "sliced":
            return torch.empty((shape[0] + 1, *shape[1:]), dtype=dtype)[1:]
        if way == "padded":
            return torch.empty((*shape[:-1], shape[-1] + 3), dtype=dtype)[..., : shape[-1]]
        if way == "wide":
            return torch.empty((1, *shape[1:]), dtype=dtype).expand(shape)
        return torch.empty(shape, dtype=dtype)

    def again(self, pool: object, make: Callable[[], Any]) -> Any:
        """Something new, or what came lately."""
        held = self.pools.setdefault(pool, [])
        if held and self.random.random() < 0.3:
            return self.random.choice(held)
        held.append(make())
        del held[:-4]
        return held[-1]


def edges(draw: Draw) -> Tensor:
    def made() -> tuple[Tensor, Tensor, int]:
        nodes, count = draw.number(4000), draw.number(4000)
        s, d = torch.randint(0, nodes, (2, count))
        return s, d, nodes

    s, d, nodes = draw.again("edges", made)
    f = draw.width()
    x, w = draw.dense(nodes, f), draw.dense(len(s))
    x.requires_grad_()
    w.requires_grad_()
    result = insum.insum("y[d[e],f] = w[e] * x[s[e],f]", out_shape=(nodes, f), d=d, s=s, w=w, x=x)
    wanted = draw.random.choice(((x,), (w,), (x, w)))
    torch.autograd.grad(result, wanted, draw.dense(nodes, f))
    return result


def blocks(draw: Draw) -> Tensor:
    """A sparse matrix of blocks, its rows padded to groups."""

    def made() -> tuple[Tensor, Tensor, int]:
        groups, columns = draw.number(1000), draw.number(1000)
        g = draw.random.choice((1, 2, 3, 4, 8))
        rows = torch.randint(0, max(1, groups // 2), (groups,))
        return rows, torch.randint(-1, columns, (groups, g)), columns

    rows, places, columns = draw.again("blocks", made)
    (groups, g), side, n = places.shape, draw.random.choice((4, 8, 16, 32)), draw.width()
    values = draw.dense(groups, g, side, side, dtype=torch.float16)
    x = draw.dense(columns, side, n, dtype=torch.float16)
    x.requires_grad_()
    result = insum.insum(
        "C[R[p],i,n] = V[p,q,i,k] * B[K[p,q],k,n]",
        out_shape=(max(1, groups // 2), side, n),
        padded=("K",),
        R=rows,
        K=places,
        V=values,
        B=x,
    )
    torch.autograd.grad(result, x, draw.dense(*result.shape, dtype=torch.float16))
    return result


def convolution(draw: Draw) -> Tensor:
    def made() -> tuple[Tensor, int]:
        points, steps = draw.number(1000), draw.random.choice((1, 9, 27))
        return torch.randint(-1, points, (steps, points)), points

    neighbours, points = draw.again("points", made)
    c, m = draw.width(), draw.width()
    inputs = draw.dense(points, c, dtype=torch.float16).requires_grad_()
    weight = draw.dense(len(neighbours), c, m, dtype=torch.float16).requires_grad_()
    result = insum.insum(
        "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]", padded=("Nb",), Nb=neighbours, In=inputs, W=weight
    )
    upstream = draw.dense(points, m, dtype=torch.float16)
    wanted = draw.random.choice(((inputs,), (inputs, weight)))
    torch.autograd.grad(result, wanted, upstream)
    return result


STATEMENTS = (edges, blocks, convolution)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """As on a GPU, without launching."""
    counter = Counter()
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.api._fronts", {})
    monkeypatch.setattr(BoundLaunch, "interpret", lambda *given: counter(*given))

    monkeypatch.setattr(prologue, "on_device", lambda table: False)
    ran = BoundCall.run

    def run(one: BoundCall, *given: Any) -> Tensor:
        counter.calls += 1
        return ran(one, *given)

    monkeypatch.setattr(BoundCall, "run", run)

    def wishes(base: str, device: torch.device | None = None) -> Any:
        precision = precision_of("sm_90")  # the interpreter knows but one
        return replace(wishes_of(base, device), precision=precision)

    monkeypatch.setattr(fused_kind, "wishes_of", wishes)
    memory.forget()
    with insum.settings(**ONLY_FUSED):
        yield counter
    memory.forget()


def resident() -> int:
    """Bytes of the process in memory, but for what waits to be freed; 0 where the system does not
    tell.
    """
    gc.collect()
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def called(draw: Draw, function: Callable[[Draw], Tensor]) -> None:
    with ExitStack() as stack:
        changes, deterministic, precision = draw.random.choice(ALTERNATIVES)
        stack.enter_context(insum.settings(**changes))
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        torch.set_float32_matmul_precision(precision)
        try:
            function(draw)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")


def test_thousands_of_calls(counter: Counter) -> None:
    """Statements and those of their gradients count as calls."""
    torch.manual_seed(0)
    draw, grown = Draw(random.Random(0)), []
    while len(grown) < 2 or grown[-1] > GROWTH and len(grown) < 2 + AGAIN:
        before, end = resident(), counter.calls + CALLS
        while counter.calls < end:
            called(draw, draw.random.choice(STATEMENTS))
        grown.append(resident() - before)
    found = {statement: len(kernels) for statement, kernels in counter.kernels.items()}
    assert len(found) == 8 and max(found.values()) <= MOST_KERNELS, found
    assert max(found.values()) > program.MOST_EXACT, "the calls are too much alike"
    _check_bounds()
    draw.pools.clear()
    gc.collect()
    assert memory.report().entries == 0
    assert grown[-1] <= GROWTH, [f"{one / 2**20:.1f} MiB" for one in grown]


def _check_bounds() -> None:
    """Everything that hangs on statements, kinds and tensors."""
    every = list(calls._forms.values())
    assert len(every) <= calls.MOST_FORMS
    for kinds in every:
        assert len(kinds.calls) <= calls.MOST_KINDS and len(kinds.shelves) <= calls.MOST_KINDS
        for shelf in kinds.shelves.values():
            assert len(shelf.exact) <= MOST_CLASSES
            assert len(shelf.general) <= MOST_GENERAL
        for one in kinds.calls:
            assert len(one.bound) <= calls.MOST_SIZES and len(one.recent) <= calls.MOST_RECENT
            assert len(one.fused.unseen) <= which_program.MOST_UNSEEN
    about = memory.report()
    assert about.nbytes == memory._total["bytes"] <= insum.settings.memory
    for entry in memory._entries():
        assert len(entry.things) <= memory.MOST_THINGS and len(entry.looked) <= memory.MOST_RANGES


@pytest.mark.parametrize("scatter", ["auto", "segment", "onehot"])
def test_kernels_for_all_sizes_are_right(scatter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for kernels of single classes; strategies that hold a whole dimension
    in a tile do not apply.
    """
    monkeypatch.setattr(program, "MOST_EXACT", 0)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.api._fronts", {})
    for case in (*draw_cases(20, seed=7), *draw_scatters(12, seed=7)):
        with insum.settings(**ONLY_FUSED, scatter=scatter), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy, about infinities
            with contextlib.suppress(insum.NotFusedError):
                case.check()
    shelves = [s for kinds in calls._forms.values() for s in kinds.shelves.values()]
    assert shelves and not any(s.exact or s.room.kernels for s in shelves)
