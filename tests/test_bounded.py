"""After thousands of calls of random sizes, strides and settings: few kernels, stores within their
bounds, and memory that stays what it was. Launches are stubbed; what they would compile is counted.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
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
from insum import facts, memory
from insum.call import prepared as calls
from insum.call import running
from insum.call.prepared import BoundCall
from insum.codegen.unrolled import emit_unrolled
from insum.plan.sizes import OUT, WORK
from insum.runtime import fused_kind, program, which_program
from insum.runtime.bound_launch import BoundLaunch
from insum.runtime.handwritten import packs
from insum.runtime.handwritten.kernel import Handwritten
from insum.runtime.prologue import prologue, tables
from insum.runtime.shelf import (
    ANY_WIDTH,
    MOST_CLASSES,
    MOST_OWN,
    MOST_SHARED,
    Programs,
    Shelf,
    precision_of,
    wishes_of,
)
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
#: Limits of kernels, each of which lets calls share more.
LEVELS = ("MOST_FINE", "MOST_BY_LENGTH", "MOST_BY_WIDTH", "MOST_EXACT")


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """As on a GPU, without launching."""
    counter = Counter()
    monkeypatch.setattr(memory, "can_look", lambda tensor: False)
    monkeypatch.setattr("insum.call.prepared.kernels_look_on", lambda device: True)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})
    monkeypatch.setattr(BoundLaunch, "interpret", lambda *given: counter(*given))

    monkeypatch.setattr(prologue, "on_device", lambda table: False)
    ran = running.run

    def run(one: BoundCall, *given: Any) -> Tensor:
        counter.calls += 1
        return ran(one, *given)

    monkeypatch.setattr(running, "run", run)

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


def test_columns_of_any_width(counter: Counter) -> None:
    """Though they are classed by what divides them."""
    draw = Draw(random.Random(0))
    while counter.calls < CALLS:
        p = draw.number(20_000)
        x, w = draw.dense(draw.number(500), 300).requires_grad_(), draw.dense(p)
        y = insum.insum("y[b,p] = x[b,t[p]] * w[p]", x=x, w=w, t=torch.randint(0, 300, (p,)))
        torch.autograd.grad(y, x, torch.empty_like(y))
    found = {statement: len(kernels) for statement, kernels in counter.kernels.items()}
    assert len(found) == 2 and max(found.values()) <= MOST_KERNELS, found


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
            assert len(shelf.classes) <= MOST_CLASSES
            assert len(shelf.shared) <= MOST_SHARED
        for one in kinds.calls:
            assert len(one.bound) <= calls.MOST_SIZES and len(one.recent) <= calls.MOST_RECENT
            assert len(one.fused.unseen) <= which_program.MOST_UNSEEN
    about = memory.report()
    assert about.nbytes == memory._total["bytes"] <= insum.settings.memory
    for entry in memory._entries():
        assert len(entry.things) <= memory.MOST_THINGS and len(entry.looked) <= memory.MOST_RANGES


def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


@pytest.mark.parametrize("scatter", ["auto", "segment", "onehot"])
@pytest.mark.parametrize("limits", [LEVELS[: k + 1] for k in range(len(LEVELS))])
def test_kernels_that_sizes_share_are_right(
    limits: tuple[str, ...], scatter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for kernels of single classes, those of the same widths, of any
    widths, or of all sizes; strategies that hold a whole dimension in a tile do not apply.
    """
    for limit in limits:
        monkeypatch.setattr(program, limit, 0)
    without_programs(monkeypatch)
    cases = (*draw_cases(20, seed=7), *draw_scatters(12, seed=7))
    for case in cases if limits == LEVELS else cases[len(limits) % 3 :: 3]:
        with insum.settings(**ONLY_FUSED, scatter=scatter), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy, about infinities
            with contextlib.suppress(insum.NotFusedError):
                case.check()
    levels = {one.level for s in shelves() for one in s.shared.values()}
    assert levels == {len(limits)}
    assert limits != LEVELS or not any(s.room.kernels for s in shelves())


def shelves() -> list[Shelf]:
    return [s for kinds in calls._forms.values() for s in kinds.shelves.values()]


def test_lengths_of_one_network_leave_room_for_its_widths(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions of many channels over tables of many lengths, as clouds that change, and their
    gradients: no call is left to kernels that know nothing of channels.
    """
    without_programs(monkeypatch)
    drawn = random.Random(0)
    channels = [(4, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128), (192, 128), (96, 96)]
    for base in (20, 90, 200, 700, 1500, 2500, 9000, 20000, 40000):
        for inputs, outputs in channels:
            rows = base + drawn.randrange(base // 2)
            Nb = torch.randint(-1, rows, (27, rows), dtype=torch.int32)
            In, W = torch.randn(rows, inputs, requires_grad=True), torch.randn(27, inputs, outputs)
            statement = "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]"
            result = insum.insum(statement, padded=("Nb",), Nb=Nb, In=In, W=W)
            torch.autograd.grad(result, In, torch.empty(rows, outputs))
    found = shelves()
    assert len(found) == 2
    for shelf in found:
        levels = {one.level for one in shelf.classes.values()}
        assert levels == {0, 1} and len(shelf.classes) == 9 * len(channels)
        assert len(shelf.shared) <= 4 * len(channels), len(shelf.shared)
        # of large tiles, too, and of weights that are copied for them
        assert len(shelf.room.kernels) <= 3 * len(channels) + 10, len(shelf.room.kernels)


#: Rows of five levels of clouds that are on the way from 30,000 voxels to 200,000.
CLOUDS = (
    (27_906, 13_490, 5_000, 1_700, 500),
    (48_503, 11_388, 2_900, 800, 230),
    (60_000, 30_000, 12_000, 4_200, 1_300),
    (173_112, 70_000, 22_000, 6_000, 1_600),
)


def convolutions(widths: tuple[int, ...]) -> Iterator[tuple[int, int, int, int, int]]:
    """Of a network that goes four levels down and up: offsets, from which level to which, and
    channels in and out.
    """
    yield 125, 0, 0, 4, 32
    width, skips = 32, [32, 32, 64, 128]
    for level in range(4):
        yield 8, level, level + 1, width, width
        yield 27, level + 1, level + 1, width, widths[level]
        yield 27, level + 1, level + 1, widths[level], widths[level]
        width = widths[level]
    for number, wide in enumerate(widths[4:]):
        level = 3 - number
        yield 8, level + 1, level, width, wide
        yield 27, level, level, wide + skips.pop(), wide
        yield 27, level, level, wide, wide
        width = wide


def kernel_map(offsets: int, rows: int, inputs: int, mirrored: bool) -> Tensor:
    """A table that is known for the map of a kernel; of its values nothing is read here."""
    table = torch.zeros(offsets, rows, dtype=torch.int32)
    dtype, shape = packs.words_for(rows, offsets)[1]
    words = torch.zeros(shape, dtype=dtype)
    entry = memory.made(table)
    entry.given = True
    names = torch.arange(offsets, dtype=torch.int32)
    known = facts.IndexFacts(0, inputs - 1, False, False, padded=True)
    entry.note({"facts": known, packs.MAP: packs.KernelMap(names, words, mirrored)})
    return table


def test_a_network_of_many_widths_keeps_its_kernels(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clouds of all sizes, alone and in batches: whatever came before, the channels of every
    convolution are known to its kernels.
    """
    without_programs(monkeypatch)
    monkeypatch.setattr(Handwritten, "__call__", lambda *_: None)
    widths = (32, 64, 128, 256, 256, 128, 96, 96)
    for rows, batch in itertools.product(CLOUDS, (1, 4)):
        sizes, maps = [batch * n for n in rows], dict[tuple[int, int, int], Tensor]()
        for z, a, b, inputs, outputs in convolutions(widths):
            table = maps.setdefault((z, a, b), kernel_map(z, sizes[b], sizes[a], a == b))
            In = torch.empty(sizes[a], inputs, dtype=torch.float16, requires_grad=True)
            W = torch.empty(z, inputs, outputs, dtype=torch.float16, requires_grad=True)
            out = insum.insum(
                "Out[x,m] = In[Nb[z,x],c] * W[z,c,m]", padded=("Nb",), Nb=table, In=In, W=W
            )
            torch.autograd.grad(out, [In, W], torch.empty_like(out))
    found = shelves()
    assert len(found) == 3
    for shelf in found:
        assert max(one.level for one in shelf.classes.values()) < ANY_WIDTH
        assert len(shelf.room.kernels) <= program.MOST_BY_WIDTH, len(shelf.room.kernels)


def _forbidden(*_: Any) -> Any:
    raise AssertionError("it is known what runs")


def test_what_runs_is_kept_for_all_sizes_of_a_network(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of hundreds of classes most have no program of their own, and all are found again."""
    without_programs(monkeypatch)

    def all_sizes() -> None:
        for f in (8, 16, 24, 32, 48, 64, 96, 128):
            for nodes in (200, 300, 700):
                for count in (900, 1500, 3000, 5000, 9000, 17000):
                    s, d = torch.randint(0, nodes, (2, count))
                    given = {"s": s, "d": d, "x": torch.empty(nodes, f)}
                    insum.insum("y[d[e],f] = x[s[e],f]", out_shape=(nodes, f), **given)

    all_sizes()
    (shelf,) = shelves()
    assert len(shelf.classes) > 96 and {one.level for one in shelf.classes.values()} == {0, 1}
    assert sum(one.level == 0 for one in shelf.classes.values()) <= MOST_OWN
    monkeypatch.setattr(Programs, "find", _forbidden)
    all_sizes()


def test_columns_that_change_over_a_matrix_that_stays(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of a sparse layer: each number of them is new, its class is not."""
    without_programs(monkeypatch)
    rows, columns = (insum.unchanging(torch.randint(0, 64, (300,))) for _ in range(2))
    values = torch.randn(300)

    def run(tokens: int) -> None:
        given = {"r": rows, "c": columns, "v": values, "x": torch.empty(tokens, 64)}
        insum.insum("y[i,r[p]] = v[p] * x[i,c[p]]", out_shape=(tokens, 64), **given)

    for tokens in (131, 135):
        run(tokens)
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "find", _forbidden)
        for tokens in range(137, 255, 2):
            run(tokens)
    for tokens in range(1, 2000, 9):
        run(tokens)
    (shelf,) = shelves()
    assert "i" in shelf.moving and len(shelf.room.kernels) <= program.MOST_BY_LENGTH


def test_padded_tensors_that_come_back_are_alike(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_programs(monkeypatch)

    def run(count: int) -> None:
        s, d = torch.randint(-1, 100, (count,)), torch.randint(0, 100, (count,))
        for _ in range(6):  # until all is known of them
            insum.insum("y[d[e],f] = x[s[e],f]", out_shape=(100, 16), padded=("s",), s=s, d=d, x=x)

    x = torch.randn(100, 16)
    run(1500)
    monkeypatch.setattr(Programs, "find", _forbidden)
    run(1600)


@pytest.mark.parametrize("limits", [LEVELS[: k + 1] for k in range(3)])
def test_patterns_become_code_whatever_is_shared(
    limits: tuple[str, ...], counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is written once for all sizes."""
    for limit in limits:
        monkeypatch.setattr(program, limit, 0)
    without_programs(monkeypatch)
    I, J = (insum.constant(torch.randint(0, 4, (7,))) for _ in range(2))
    V, before = insum.constant(torch.randn(7)), emit_unrolled.cache_info()
    for count in (300, 1000, 5000, 20000):
        X = torch.empty(count, 4, 16)
        insum.insum("Z[b,I[p],u] = V[p] * X[b,J[p],u]", out_shape=X.shape, I=I, J=J, V=V, X=X)
    (shelf,) = shelves()
    assert {one.level for one in shelf.classes.values()} == {len(limits)}
    (text,) = counter.kernels.values()
    assert len(text) == 1 and "for p" not in str(text)
    after = emit_unrolled.cache_info()
    assert after.hits > before.hits and after.misses <= before.misses + 1, (before, after)


@pytest.mark.parametrize("limits", [LEVELS[:1], LEVELS])
def test_no_inverse_table_is_larger_than_its_index(
    limits: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that calls share says little of how long a table is beside what it leads to, and that
    of all sizes does not know which dimension is the long one.
    """
    for limit in limits:
        monkeypatch.setattr(program, limit, 0)
    without_programs(monkeypatch)
    made: list[tuple[int, int]] = []
    was = tables.inverse

    def inverse(anchor: Tensor, dim: int, rows: int) -> Any:
        made.append((anchor.numel(), rows * anchor.numel() // anchor.shape[dim]))
        return was(anchor, dim, rows)

    monkeypatch.setattr(prologue, "inverse", inverse)
    for steps, length, rows in ((3, 400, 400), (3, 130, 1400), (200, 3, 300), (3, 1400, 300)):
        Nb = torch.stack([torch.randperm(max(rows, length))[:length] for _ in range(steps)]) % rows
        In, W = torch.randn(length, 16), torch.randn(steps, 16, 16)

        def run(rows: int = rows, Nb: Tensor = Nb, In: Tensor = In, W: Tensor = W) -> Tensor:
            given = {"Out": torch.zeros(rows, 16), "Nb": Nb, "In": In, "W": W}
            return insum.insum("Out[Nb[z,x],m] += In[x,c] * W[z,c,m]", **given)

        with insum.settings(backend="graph"):
            expected = run()
        with insum.settings(**ONLY_FUSED, tier="stable"):
            torch.testing.assert_close(run(), expected, atol=1e-4, rtol=1e-4)
    assert bool(made) == (len(limits) == 1), made
    assert all(table <= 2 * index for index, table in made), made


@pytest.mark.parametrize("tier", ["auto", "stable"])
def test_programs_of_all_levels_answer_the_same_questions(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of one statement on indices of all kinds, while the room for kernels is used up: what
    was planned for one answer never runs for another.
    """
    for most, limit in enumerate(LEVELS, 2):
        monkeypatch.setattr(program, limit, most)
    without_programs(monkeypatch)
    drawn = random.Random(3)
    for _ in range(18):
        edges, nodes = drawn.choice((3, 40, 200, 400)), drawn.choice((1, 30, 300))
        columns = drawn.choice((1, 7, 16, 32))
        d, s = torch.randint(0, nodes, (2, edges))
        d = drawn.choice((d, d.sort()[0], d.clamp(max=0), d.flip(0)))
        d = torch.randperm(edges)[:edges] if edges <= nodes and drawn.random() < 0.5 else d
        given = {"d": d, "s": s, "w": torch.randn(edges), "x": torch.randn(nodes, columns)}
        sizes = {"out_shape": (nodes, columns)}
        with insum.settings(backend="graph"):
            expected = insum.insum("y[d[e],f] = w[e] * x[s[e],f]", **given, **sizes)
        with insum.settings(**ONLY_FUSED, tier=tier):
            for _ in range(3):  # new, seen, known
                found = insum.insum("y[d[e],f] = w[e] * x[s[e],f]", **given, **sizes)
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    levels = {one.level for s in shelves() for one in s.shared.values()}
    assert len(LEVELS) in levels and len(levels) > 1, levels
