"""Convolutions on a CPU: recognised by their variables, left to a library, and what the oracle
says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import insum
from insum.host import convolution_roles
from insum.testing import assert_close, oracle

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WAY = "on the CPU: convolution"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_roles, "LEAST_WINDOWS", 1)
    monkeypatch.setattr("insum.host.choose.LEAST_WORK", 1)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


@dataclass(frozen=True)
class Drawn:
    text: str
    values: dict[str, Tensor]
    shape: tuple[int, ...]
    sizes: dict[str | int, Any]

    def __call__(self, *values: Tensor, text: str = "") -> Tensor:
        given = dict(zip(self.values, values or self.values.values(), strict=True))
        return insum.insum(text or self.text, out_shape=self.shape, sizes=self.sizes, **given)

    @property
    def way(self) -> str:
        page = insum.explain(self.text, out_shape=self.shape, sizes=self.sizes, **self.values)
        return str(page)


def drawn(seed: int, dtype: torch.dtype) -> Drawn:
    """A convolution of up to three dimensions, or a gradient of one: any order of dimensions, any
    number of variables of a kind, steps, offsets, room behind the windows, any layout in memory.
    """
    draw = random.Random(seed)
    count = draw.randint(1, 3)
    pairs = [*zip("ijk", "rst", strict=True)][:count]
    extents = {v: draw.randint(1, 4 if count < 3 else 2) for pair in pairs for v in pair}

    def some(names: str) -> list[str]:
        chosen = [*names[: draw.choice([0, 1, 1, 2])]]
        extents.update({v: draw.randint(1, 3) for v in chosen})
        return chosen

    b, c, o, g = some("ab"), some("cd"), some("op"), some("g")
    pairs = [pair[::-1] if draw.random() < 0.15 else pair for pair in pairs]
    windows = [(*pair, draw.choice([1, 1, 2]), draw.choice([1, 1, 2])) for pair in pairs]
    result, kernel = [*b, *g, *o, *(v for v, *_ in windows)], [*g, *o, *c, *(w[1] for w in windows)]
    sides: dict[str, list[Any]] = {"y": result, "w": kernel, "x": [*b, *g, *c, *windows]}
    accesses, shapes = dict[str, str](), dict[str, tuple[int, ...]]()
    for name, dims in sides.items():
        draw.shuffle(dims)
        found = [_dimension(dim, extents, draw) for dim in dims]
        accesses[name] = f"{name}[{','.join(text for text, _ in found)}]"
        shapes[name] = tuple(size for _, size in found)
    target, *factors = draw.sample("ywx", 3)
    text = f"{accesses[target]} = {accesses[factors[0]]} * {accesses[factors[1]]}"
    values = {name: _laid(shapes[name], dtype, draw) for name in factors}
    return Drawn(text, values, shapes[target], dict(extents))


def _dimension(dim: Any, extents: dict[str, int], draw: random.Random) -> tuple[str, int]:
    if isinstance(dim, str):
        return dim, extents[dim]
    v, r, by, between = dim
    offset, room = draw.choice([0, 0, 1]), draw.choice([0, 0, 1])
    reach = by * (extents[v] - 1) + between * (extents[r] - 1) + 1
    return f"{by}*{v}+{between}*{r}+{offset}", reach + offset + room


def _laid(shape: tuple[int, ...], dtype: torch.dtype, draw: random.Random) -> Tensor:
    match draw.choice(["whole", "part", "turned"]):
        case "part":
            return torch.randn([n + 1 for n in shape]).to(dtype)[tuple(slice(n) for n in shape)]
        case "turned":
            return torch.randn(shape[::-1]).to(dtype).permute(*reversed(range(len(shape))))
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("seed", range(120))
def test_drawn_convolutions(seed: int, small: None) -> None:
    case = drawn(seed, FLOATS[seed % 4])
    assert WAY in case.way
    got = case()
    exact = oracle(case.text, case.values, sizes={**case.sizes, case.text[0]: case.shape})
    assert_close(got, exact)
    assert got.is_contiguous() and got.dtype is FLOATS[seed % 4]
    into = torch.ones(case.shape, dtype=torch.float64)
    name, onto = case.text[0], case.text.replace(" = ", " += ")
    assert insum.insum(onto, sizes=case.sizes, **case.values, **{name: into}) is into
    np.testing.assert_allclose(into.numpy(), exact + 1, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("seed", range(1, 7))
def test_gradients_of_any_order(seed: int, small: None) -> None:
    case = drawn(seed, torch.float64)
    leaves = [value.requires_grad_() for value in case.values.values()]
    assert torch.autograd.gradcheck(case, leaves)
    assert torch.autograd.gradgradcheck(case, leaves)


def test_sizes_of_zero(small: None) -> None:
    """A batch of none, and channels of none."""
    x, w = torch.randn(0, 3, 8), torch.randn(2, 3, 4)
    text = "y[b,o,i] = w[o,c,r] * x[b,c,i+r]"
    assert insum.insum(text, x=x, w=w, sizes={"i": 5}).shape == (0, 2, 5)
    none = insum.insum(text, x=torch.randn(2, 0, 8), w=torch.randn(2, 0, 4), sizes={"i": 5})
    assert none.shape == (2, 2, 5) and not none.any()


def test_explain_says_which_and_gradients_are_of_the_same_way(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is looked for but a library, nothing else may run."""
    x, w, y = torch.randn(2, 3, 9), torch.randn(4, 3, 3), torch.randn(2, 4, 7)
    for text, values, shape, what in (
        ("y[b,o,i] = w[o,c,r] * x[b,c,i+r]", {"w": w, "x": x}, y.shape, "a convolution,"),
        ("x[b,c,i+r] = y[b,o,i] * w[o,c,r]", {"y": y, "w": w}, x.shape, "of a convolution,"),
        ("w[o,c,r] = y[b,o,i] * x[b,c,i+r]", {"y": y, "x": x}, w.shape, "of its kernel,"),
    ):
        page = str(insum.explain(text, out_shape=tuple(shape), **values))
        assert WAY in page and f"{what} which a library runs" in page
    ran = list[bool]()
    computed = convolution_roles.Convolution.computed
    monkeypatch.setattr(
        convolution_roles.Convolution,
        "computed",
        lambda self, *given: ran.append(True) or computed(self, *given),
    )
    leaves = [x.requires_grad_(), w.requires_grad_()]
    found = insum.insum(
        "y[b,o,i] = w[o,c,r] * x[b,c,i+r]", x=leaves[0], w=leaves[1], sizes={"i": 7}
    )
    found.backward(y)
    assert len(ran) == 3
    wanted = torch.autograd.grad(functional.conv1d(x, w), leaves, y)
    torch.testing.assert_close([x.grad, w.grad], [*wanted])


def test_channels_stay_innermost(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gets what lies in memory, in one dimension and for a single item, too."""
    given = list[Tensor]()
    run = torch.convolution
    monkeypatch.setattr(torch, "convolution", lambda x, *rest: given.append(x) or run(x, *rest))
    for text, shape, sizes in (
        ("y[b,i,o] = w[r,c,o] * x[b,i+r,c]", (3, 10, 8), {"i": 8}),
        ("y[i,o] = w[r,c,o] * x[i+r,c]", (10, 8), {"i": 8}),
        ("y[i,j,o] = w[r,c,o] * x[i+r,j,c]", (10, 5, 8), {"i": 8}),
    ):
        x, w = torch.randn(shape), torch.randn(3, 8, 4)
        insum.insum(text, x=x, w=w, sizes=sizes)
        passed = given.pop()
        assert passed.data_ptr() == x.data_ptr()
        assert torch._prims_common.suggest_memory_format(passed) is torch.channels_last


def test_a_result_of_which_a_part_is_written(small: None) -> None:
    x, w = torch.randn(2, 3, 9), torch.randn(4, 3, 3)
    got = insum.insum(
        "y[b,1,2*i+1,o] = w[o,c,r] * x[b,c,i+r]", x=x, w=w, out_shape=(2, 2, 16, 4), sizes={"i": 7}
    )
    wanted = torch.zeros(2, 2, 16, 4)
    wanted[:, 1, 1:15:2] = functional.conv1d(x, w).transpose(1, 2)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "y[b,o,i] = w[o,c,r,i] * x[b,c,i+r]",  # a kernel for each place
        "y[b,o] = w[o,c,r] * x[b,c,i+r]",  # begins are summed
        "y[b,o,i] = w[o,c] * x[b,c,i+r]",  # and places of windows
        "y[b,o,i] = w[o,c,r] * x[b,c,i+r+s]",
        "y[b,o,i] = w[o,c,r] * x[b,c,i-r+2]",
        "y[b,o,i] = w[o,c,r] * x[b,c,i+r] * v[b]",
        "y[b,o,i,q] = w[o,c,r] * x[b,c,i+r]",
        "y[b,o,i] = relu(w[o,c,r]) * x[b,c,i+r]",
        "y[b,o,i] max= w[o,c,r] * x[b,c,i+r]",
        "y[b,o,i] = w[o,c,r] * x[n[b],c,i+r]",
    ],
)
def test_what_is_no_convolution(text: str, small: None) -> None:
    extents = {"b": 2, "o": 4, "c": 3, "i": 7, "r": 3, "s": 2, "q": 2}
    shapes = {"w": (4, 3, 3), "x": (2, 3, 10), "v": (2,)}
    if "w[o,c]" in text or "w[o,c,r,i]" in text:
        shapes["w"] = (4, 3) if "w[o,c]" in text else (4, 3, 3, 7)
    values: dict[str, Any] = {n: torch.randn(s) for n, s in shapes.items() if f"{n}[" in text}
    values |= {"n": torch.tensor([1, 0])} if "n[b]" in text else {}
    sizes: dict[str | int, Any] = {
        v: n for v, n in extents.items() if v in text.split("= ")[0] + text
    }
    assert WAY not in str(insum.explain(text, sizes=sizes, **values))
    got = insum.insum(text, sizes=sizes, **values)
    with insum.settings(backend="graph"):
        torch.testing.assert_close(got, insum.insum(text, sizes=sizes, **values))


def test_integers_are_no_convolution(small: None) -> None:
    x, w = torch.arange(54).view(2, 3, 9), torch.arange(36).view(4, 3, 3)
    text, sizes = "y[b,o,i] = w[o,c,r] * x[b,c,i+r]", {"i": 7}
    assert WAY not in str(insum.explain(text, x=x, w=w, sizes=sizes))
    wanted = functional.conv1d(x.double(), w.double()).long()
    assert torch.equal(insum.insum(text, x=x, w=w, sizes=sizes), wanted)


@pytest.mark.parametrize(
    ("text", "shapes", "sizes", "way"),
    [
        # without channels slices of long windows are many, and those of short ones long
        ("y[i] = w[r] * x[i+r]", {"w": (50,), "x": (40_049,)}, {"i": 40_000}, "convolution"),
        ("y[i] = w[r] * x[i+r]", {"w": (3,), "x": (40_002,)}, {"i": 40_000}, "slices"),
        ("y[i,f] = w[r,f] * x[i+r,f]", {"w": (3, 64), "x": (902, 64)}, {"i": 900}, "convolution"),
        ("y[f,i] = w[r,f] * x[f,i+r]", {"w": (3, 4), "x": (4, 9002)}, {"i": 9000}, "slices"),
        ("x[f,i+2*r] = w[r,f] * y[f,i]", {"w": (3, 64), "y": (64, 900)}, {1: 904}, "slices"),
        ("x[f,i+r] = w[r,f] * y[f,i]", {"w": (3, 64), "y": (64, 900)}, {1: 902}, "convolution"),
        # few windows: a product of matrices
        ("y[o,i] = w[o,c,r] * x[c,i+r]", {"w": (8, 32, 3), "x": (32, 10)}, {"i": 8}, ""),
        (
            "y[o,i] = w[o,c,r] * x[c,i+r]",
            {"w": (8, 32, 9), "x": (32, 88)},
            {"i": 80},
            "convolution",
        ),
    ],
)
def test_sizes_decide(
    text: str, shapes: dict[str, tuple[int, ...]], sizes: dict[str | int, Any], way: str
) -> None:
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    page = str(insum.explain(text, sizes=sizes, **values))
    assert f"on the CPU: {way}" in page if way else "on the CPU" not in page


def test_traced_calls_keep_the_graph() -> None:
    x, w = torch.randn(2, 8, 80), torch.randn(8, 8, 3)
    call = lambda x, w: insum.insum("y[b,o,i] = w[o,c,r] * x[b,c,i+r]", x=x, w=w, sizes={"i": 78})
    many = torch.func.vmap(call, (None, 0))(x, torch.stack([w, 2 * w]))
    torch.testing.assert_close(many[1], functional.conv1d(x, 2 * w), rtol=1e-4, atol=1e-4)
    tangent = torch.func.jvp(lambda w: call(x, w), (w,), (w,))[1]
    torch.testing.assert_close(tangent, functional.conv1d(x, w), rtol=1e-4, atol=1e-4)
