"""Windows, ``t + r``: factors copied into other layouts, scatters that are gathered, forward and
backward, in the interpreter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.plan import layouts
from insum.testing.oracle import oracle
from kernels import ONLY_FUSED, error, plan_of, strategy_of, watch_programs

pytestmark = pytest.mark.interpreter
TOLERANCE = {torch.float16: 2e-3, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies pay as if everything were larger; calls of other tests decided without."""
    monkeypatch.setattr(layouts, "LEAST_POINTS", 1)
    monkeypatch.setattr(layouts, "LEAST_USES", 0)
    monkeypatch.setattr(layouts, "LEAST_UNALIGNED", 0)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


def drawn(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sum(map(math.prod, shapes.values())))
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


FORWARD = {
    "channels first": (
        "y[b,o,t] = x[b,c,t+r] * w[o,c,r]",
        {"x": (2, 16, 21), "w": (24, 16, 3)},
        {2: 19},
    ),
    "channels last": (
        "y[b,t,o] = x[b,t+r,c] * w[r,c,o]",
        {"x": (2, 21, 16), "w": (3, 16, 24)},
        {1: 19},
    ),
    "odd": ("y[b,o,t] = x[b,c,t+r] * w[o,c,r]", {"x": (3, 9, 22), "w": (11, 9, 5)}, {2: 18}),
    "apart": ("y[b,o,t] = x[b,c,2*t+r] * w[o,c,r]", {"x": (2, 16, 21), "w": (9, 16, 3)}, {2: 10}),
    "three apart": (
        "y[b,o,t] = x[b,c,3*t+r] * w[o,c,r]",
        {"x": (1, 16, 32), "w": (16, 16, 2)},
        {2: 10},
    ),
    "spread": ("y[b,o,t] = x[b,c,t+2*r] * w[o,c,r]", {"x": (2, 16, 21), "w": (9, 16, 3)}, {2: 17}),
    "both": ("y[b,o,t] = x[b,c,2*t+3*r] * w[o,c,r]", {"x": (2, 16, 21), "w": (9, 16, 3)}, {2: 7}),
    "backwards": (
        "y[b,o,t] = x[b,c,t-r+2] * w[o,c,r]",
        {"x": (2, 16, 21), "w": (9, 16, 3)},
        {2: 19},
    ),
    "in two dimensions": (
        "y[b,o,i,j] = x[b,c,i+r,j+s] * w[o,c,r,s]",
        {"x": (1, 16, 7, 8), "w": (16, 16, 3, 2)},
        {2: 5, 3: 7},
    ),
    "scaled": (
        "y[b,o,t] = 2 * x[b,c,t+r] * w[o,c,r] * s[c]",
        {"x": (1, 16, 18), "w": (16, 16, 3), "s": (16,)},
        {2: 16},
    ),
    "without channels": ("y[b,t] = x[b,t+r] * w[r]", {"x": (3, 40), "w": (5,)}, {1: 36}),
    "functions": ("y[o,t] = exp(x[c,t+r]) * w[o,c,r]", {"x": (16, 20), "w": (16, 16, 3)}, {1: 18}),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    statement, shapes, sizes = FORWARD[name]
    values = drawn(shapes, dtype)
    want = torch.from_numpy(oracle(statement, values, sizes=sizes))
    leaves = {n: v.requires_grad_() for n, v in values.items()}
    with insum.settings(**ONLY_FUSED):
        got = insum.insum(statement, sizes=sizes, **leaves)
        upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        ours = torch.autograd.grad(got, list(leaves.values()), upstream)
    assert error(got.detach(), want) < TOLERANCE[dtype]
    exact = {n: v.detach().double().requires_grad_() for n, v in leaves.items()}
    with insum.settings(backend="graph"):
        result = insum.insum(statement, sizes=sizes, **exact)
    theirs = torch.autograd.grad(result, list(exact.values()), upstream.double())
    for mine, right in zip(ours, theirs, strict=True):
        assert error(mine, right) < TOLERANCE[dtype]


SCATTERED = {
    "a window": ("y[c,t+r] += g[o,t] * w[o,c,r]", {"g": (16, 30), "w": (16, 20, 3)}, (20, 32)),
    "a longer output": ("y[t+r] += g[t] * w[r]", {"g": (30,), "w": (3,)}, (40,)),
    "a far longer output": ("y[t+r] += g[t] * w[r]", {"g": (3,), "w": (3,)}, (400,)),
    "an offset": ("y[t+r+2] += g[t] * w[r]", {"g": (30,), "w": (3,)}, (37,)),
    "backwards": ("y[r-t+29] += g[t] * w[r]", {"g": (30,), "w": (3,)}, (32,)),
    "three variables": ("y[t+r+s] += g[t] * w[r,s]", {"g": (30,), "w": (3, 2)}, (33,)),
    "apart": ("y[c,2*t+r] += g[o,t] * w[o,c,r]", {"g": (16, 30), "w": (16, 20, 3)}, (20, 61)),
    "apart, even": ("y[2*t+r] += g[t] * w[r]", {"g": (30,), "w": (4,)}, (64,)),
    "apart, never meeting": ("y[4*t+r] += g[t] * w[r]", {"g": (30,), "w": (3,)}, (119,)),
    "only through the left side": ("y[t+r] += g[t]", {"g": (30,)}, (32,)),
    "a factor of neither": (
        "y[t+r] += g[t] * w[r] * h[k]",
        {"g": (9,), "w": (3,), "h": (4,)},
        (11,),
    ),
    "of two dimensions": (
        "y[c,i+r,2*j+s] += g[o,i,j] * w[o,c,r,s]",
        {"g": (16, 5, 6), "w": (16, 16, 3, 3)},
        (16, 7, 13),
    ),
}


def sizes_of(name: str) -> dict[Any, int]:
    sizes: dict[Any, int] = dict(enumerate(SCATTERED[name][2]))
    return {**sizes, "r": 3} if name == "only through the left side" else sizes


@functools.cache  # it takes longer than both tests that ask for it
def scattered(name: str) -> Tensor:
    statement, shapes, _ = SCATTERED[name]
    values = drawn(shapes, torch.float32)
    return torch.from_numpy(oracle(statement, values, sizes=sizes_of(name)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SCATTERED)
def test_scatters(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    statement, shapes, shape = SCATTERED[name]
    values: dict[str, Any] = drawn(shapes, torch.float32)
    sizes, want = sizes_of(name), scattered(name)
    programs = watch_programs(monkeypatch)
    far = name == "a far longer output"
    torch.use_deterministic_algorithms(deterministic)
    try:
        with insum.settings(**(ONLY_FUSED if not (far and deterministic) else {})):
            got = insum.insum(statement, sizes=sizes, **values)
            into = torch.ones(shape)
            insum.insum(
                statement, y=into, sizes={k: v for k, v in sizes.items() if k == "r"}, **values
            )
    finally:
        torch.use_deterministic_algorithms(False)
    assert error(got, want) < 1e-5
    assert error(into, want + 1) < 1e-5
    assert all(strategy_of(program) == ("atomic" if far else "store") for program in programs)


APART = {
    "a band": ("y[i,i+j,k] = x[i,j,k]", (5, 9, 3)),
    "its other end": ("y[i,2*j-i+4,k] = x[i,j,k] * w[j]", (5, 13, 3)),
    "sums": ("y[j-i+4,i] += x[i,j,k] * w[j]", (9, 5)),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", APART)
def test_places_that_tell_their_point_are_stored(name: str, deterministic: bool) -> None:
    """One dimension tells ``i``, and another with it ``j``: no two points meet."""
    text, shape = APART[name]
    values = drawn({"x": (5, 5, 3), "w": (5,), "y": shape}, torch.float32)
    read = text if "+=" in text else text.partition("=")[2]
    used = {n: v for n, v in values.items() if f"{n}[" in read}
    sizes = {} if "y" in used else dict(enumerate(shape))
    want = oracle(text, used, sizes=sizes)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with insum.settings(**ONLY_FUSED):
            got = insum.insum(text, sizes=sizes, **{n: v.clone() for n, v in used.items()})
    finally:
        torch.use_deterministic_algorithms(False)
    assert error(got, torch.as_tensor(want)) <= 1e-5
    assert plan_of(text, sizes, **used).strategy == "store"


@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_absent_point_meets_no_infinity() -> None:
    """Where factors are multiplied one by one, as on every other path."""
    values = {"g": torch.ones(6), "w": torch.tensor([1.0, math.inf])}
    with insum.settings(**ONLY_FUSED):
        got = insum.insum("y[t+r] += g[t] * w[r]", sizes={0: 7}, **values)
    assert got[0] == 1 and torch.isinf(got[1:]).all()


def test_what_is_read_through_indices_is_scattered() -> None:
    values = {"g": torch.ones(30), "I": torch.arange(30), "w": torch.ones(3)}
    plan = plan_of("y[t+r] += g[I[t]] * w[r]", {0: 32}, **values)
    assert plan.strategy == "atomic" and not plan.bounds


@pytest.mark.parametrize("more", ["2", "d[i+j]", "d[i+j] * a[i]"])
def test_a_term_that_does_not_read_all_of_its_window(more: str) -> None:
    """How many points meet in a place is not to be read off the factors then."""
    values = {n: torch.randn(k) for n, k in (("a", 4), ("b", 5), ("d", 8)) if f"{n}[" in more}
    values |= {"a": torch.randn(4), "b": torch.randn(5)}
    statement = f"C[i+j] += a[i] * b[j] + {more}"
    with insum.settings(**ONLY_FUSED):
        found = insum.insum(statement, C=torch.ones(8), **values)
    i, j = torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij")
    terms = {"2": 2.0, "d[i+j]": values.get("d", found)[i + j]}
    terms["d[i+j] * a[i]"] = terms["d[i+j]"] * values["a"][:, None]
    each = values["a"][:, None] * values["b"] + terms[more]
    wanted = torch.ones(8).index_add(0, (i + j).flatten(), each.flatten())
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("extent", [0, 1])
@pytest.mark.parametrize("var", ["t", "r", "b", "c"])
def test_empty_and_single(var: str, extent: int) -> None:
    sizes = {"b": 2, "c": 16, "o": 16, "t": 10, "r": 3, var: extent}
    b, c, o, t, r = (sizes[v] for v in "bcotr")
    long = max(t + r - 1, 0)
    values = drawn({"g": (b, o, t), "w": (o, c, r)}, torch.float32)
    statement = "y[b,c,t+r] += g[b,o,t] * w[o,c,r]"
    shape = dict(enumerate((b, c, long)))
    with insum.settings(**ONLY_FUSED):
        got = insum.insum(statement, sizes=shape, **values)
    assert error(got, torch.from_numpy(oracle(statement, values, sizes=shape))) < 1e-5


def test_other_sizes_and_layouts_of_one_statement() -> None:
    """What was decided for one call is not taken for another that lies otherwise in memory."""
    statement = "y[b,o,t] = x[b,c,t+r] * w[o,c,r]"
    for t, c in ((21, 16), (22, 16), (21, 12), (40, 32)):
        values = drawn({"x": (2, c, t), "w": (16, c, 3)}, torch.float16)
        last = {n: v.transpose(1, 2).contiguous().transpose(1, 2) for n, v in values.items()}
        want = torch.from_numpy(oracle(statement, values, sizes={2: t - 2}))
        with insum.settings(**ONLY_FUSED):
            for given in (values, last):
                assert error(insum.insum(statement, sizes={2: t - 2}, **given), want) < 2e-3


# --- windows that are apart, sums that are long, values that are not numbers ----------------------


def transposed(g: Tensor, w: Tensor, step: int) -> Tensor:
    shaped = g.double()[None, None], w.double()[None, None]
    return torch.nn.functional.conv_transpose1d(*shaped, stride=step)[0, 0]


@pytest.mark.parametrize("general", [False, True])
@pytest.mark.parametrize(("step", "width"), [(7, 15), (7, 63), (13, 27), (8, 130), (2, 9)])
def test_every_part_of_a_window_that_is_apart(
    monkeypatch: pytest.MonkeyPatch, step: int, width: int, general: bool
) -> None:
    """Sizes of a class have parts of other numbers; kernels for all sizes know none."""
    if general:
        for limit in ("MOST_FINE", "MOST_EXACT"):
            monkeypatch.setattr(f"insum.runtime.program.{limit}", 0)
    g, w = torch.randn(50), torch.randn(width)
    with insum.settings(**ONLY_FUSED):
        text, shape = f"y[{step}*t+r] += g[t] * w[r]", (step * 49 + width,)
        got = insum.insum(text, g=g, w=w, out_shape=shape)
    torch.testing.assert_close(got.double(), transposed(g, w, step), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_long_sums_through_windows(step: int, repeats: bool) -> None:
    g, w = torch.randn(3000, 3), torch.randn(3000, 3)
    want = torch.zeros(2 * step + 3, dtype=torch.float64)
    for t in range(3):
        want[step * t : step * t + 3] += (g[:, t : t + 1].double() * w.double()).sum(0)
    text, target = f"y[{step}*t+r] += g[o,t] * w[o,r]", torch.zeros(len(want))
    torch.use_deterministic_algorithms(repeats)
    try:
        with insum.settings(**ONLY_FUSED):
            found = insum.insum(text, g=g, w=w, out_shape=target.shape)
            insum.insum(text, y=target, g=g, w=w)
    finally:
        torch.use_deterministic_algorithms(False)
    for one in (found, target):
        torch.testing.assert_close(one.double(), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("operator", ["min=", "max="])
def test_extrema_through_windows_see_what_is_not_a_number(operator: str) -> None:
    g, w = torch.tensor([1.0, math.nan, 2.0, 3.0]), torch.ones(2)
    for sign in (1, -1):
        with insum.settings(backend="fused"):
            got = insum.insum(f"y[t+r] {operator} g[t] * w[r]", g=sign * g, w=w, out_shape=(5,))
        assert got.isnan().tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("deterministic", [False, True])
def test_windows_that_are_apart_and_long_sums(deterministic: bool) -> None:
    """Sums over many channels are cut into pieces; what puts these together ends where the output
    does, too. It once wrote one place beyond each row.
    """
    statement, o = "y[c,2*j+s] += g[o,j] * w[o,c,s]", 5000
    values = drawn({"g": (o, 6), "w": (o, 4, 3)}, torch.float32)
    want = torch.zeros(4, 13, dtype=torch.float64)
    for j in range(6):
        for s in range(3):
            want[:, 2 * j + s] += values["g"][:, j].double() @ values["w"][:, :, s].double()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with insum.settings(**ONLY_FUSED):
            got = insum.insum(statement, sizes={0: 4, 1: 13}, **values)
    finally:
        torch.use_deterministic_algorithms(False)
    assert error(got, want) < 1e-5


#: Places of the output that no window reaches, and what is read at places of it alone: the length
#: of the output, and how far what is read goes.
BEYOND = {
    "z[t+r] = x[t+r] * w[r] * g[t]": (10, 7),
    "z[t+r] = exp(x[t+r] * w[r]) * g[t]": (10, 7),
    "z[t+r+1] = x[t+r] * w[r] * g[t]": (10, 7),
    "z[t+r] = x[t+r+2] * w[r] * g[t]": (10, 9),
    "z[2*t+r] = x[2*t+r] * w[r] * g[t]": (14, 11),
    "z[2*t+r] = x[2*t+r+2] * w[r] * g[t]": (14, 13),
    "z[2*t+r] = x[4*t+2*r] * w[r] * g[t]": (14, 21),
    "z[t+r] = x[t+2*r] * w[r] * g[t]": (7, 9),
    "z[2*t+r] = x[t+r] * w[r] * g[t]": (14, 7),
}


@pytest.mark.parametrize("text", BEYOND)
def test_nothing_is_read_where_no_window_reaches(text: str) -> None:
    places, length = BEYOND[text]
    values = drawn({"x": (length,), "w": (3,), "g": (5,)}, torch.float32)
    want = torch.from_numpy(oracle(text, values, sizes={"z": (places,)}))
    with insum.settings(**ONLY_FUSED):
        found = insum.insum(text, **values, out_shape=(places,))
    assert error(found, want) <= 1e-6


@pytest.mark.parametrize(("windows", "wide"), [(86, 4), (84, 10), (85, 7), (80, 22)])
def test_gradients_of_extrema_of_windows_end_where_tensors_do(windows: int, wide: int) -> None:
    """Windows that are three apart, of what three does not divide."""
    x = torch.randperm(259 * 24).float().reshape(259, 24).requires_grad_()
    want = torch.stack([x[3 * i : 3 * i + wide].amin(0) for i in range(windows)])
    with insum.settings(**ONLY_FUSED):
        found = insum.insum("y[i,f] min= x[3*i+k,f]", x=x, sizes={"i": windows, "k": wide})
        (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient, *torch.autograd.grad(want.sum(), x))
