"""Windows on a CPU: added up slice by slice, as the graph adds them up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import insum
from insum.host import slices
from insum.testing import assert_close, oracle

#: Shapes of what is read, and of the result.
STATEMENTS: dict[str, tuple[dict[str, tuple[int, ...]], tuple[int, ...]]] = {
    "y[i,j] = w[a,b] * x[i+a,j+b]": ({"w": (3, 2), "x": (9, 8)}, (7, 7)),
    "y[n,i,c] = w[a,c] * x[n,2*i+a+1,c]": ({"w": (3, 4), "x": (2, 12, 4)}, (2, 5, 4)),
    "y[c,t+r] = g[t,c] * w[r]": ({"g": (7, 3), "w": (4,)}, (3, 10)),
    "y[2*t+r,c] = g[c,t] * w[r,c]": ({"g": (3, 7), "w": (2, 3)}, (14, 3)),
    "w[a,b] = y[i,j] * x[i+a,j+b]": ({"y": (7, 7), "x": (9, 8)}, (3, 2)),
    "w[b,a] = y[j,i] * x[i+a,j+b] * v[i]": ({"y": (7, 6), "x": (8, 8), "v": (6,)}, (2, 3)),
    "y[j,i] = x[i+a,3] * z[i+a,j] * w[a]": ({"x": (8, 5), "z": (8, 4), "w": (3,)}, (4, 6)),
    "w[c,k] = y[b,c,t] * x[b,t+k,c]": ({"y": (2, 3, 9), "x": (2, 12, 3)}, (3, 4)),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "LEAST_POINTS", 1)
    monkeypatch.setattr("insum.host.choose.LEAST_WORK", 1)
    # which is tested by itself
    monkeypatch.setattr("insum.host.choose.convolution_of", lambda problem: None)
    monkeypatch.setattr("insum.call.prepared._forms", {})
    monkeypatch.setattr("insum.call.lookup._fronts", {})


def drawn(statement: str, dtype: torch.dtype) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    shapes, _ = STATEMENTS[statement]
    return {n: torch.randn(s, generator=draw, dtype=dtype) for n, s in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at_once", [0, 200, 1 << 20])
@pytest.mark.parametrize("statement", STATEMENTS)
def test_values(
    statement: str, at_once: int, dtype: torch.dtype, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one place, or a few, at a time, and added to what is there."""
    monkeypatch.setattr(slices, "AT_ONCE", at_once)
    values, (_, shape) = drawn(statement, dtype), STATEMENTS[statement]
    assert "slices" in str(insum.explain(statement, out_shape=shape, **values))
    got = insum.insum(statement, out_shape=shape, **values)
    with insum.settings(backend="graph"):
        want = insum.insum(statement, out_shape=shape, **values)
    torch.testing.assert_close(got, want)
    assert got.dtype is want.dtype is dtype
    into = torch.ones(shape, dtype=dtype)
    name, onto = statement.partition("[")[0], statement.replace(" = ", " += ")
    assert insum.insum(onto, **values, **{name: into}) is into
    about = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(into, want + 1, **about)  # which rounds once more


@pytest.mark.parametrize("statement", STATEMENTS)
def test_gradients(statement: str, small: None) -> None:
    values, (_, shape) = drawn(statement, torch.float64), STATEMENTS[statement]

    def call(*given: torch.Tensor) -> torch.Tensor:
        return insum.insum(statement, out_shape=shape, **dict(zip(values, given, strict=True)))

    leaves = [value.requires_grad_() for value in values.values()]
    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("text", "shape", "out_shape"),
    [
        ("y[i,c,j] = x[c,2*i+a,j+b+1]", (4, 12, 9), (5, 4, 6)),
        ("y[c,i+a,2*j+b] = x[i,j,c]", (5, 6, 3), (3, 7, 12)),
        ("y[c,i,j] = x[i+a+1,2*j+b,c]", (8, 8, 9), (9, 5, 4)),
        ("y[j,c] = x[2,j+2*a+b,c]", (3, 15, 10), (10, 10)),
        ("y[i,a,c] = x[i+a+b,c]", (12, 9), (9, 3, 9)),
        ("y[i,c] = x[i-a+b+2,c]", (12, 9), (9, 9)),
    ],
)
def test_windows_of_one_tensor(
    text: str, shape: tuple[int, ...], out_shape: tuple[int, ...], dtype: torch.dtype, small: None
) -> None:
    """Sums of what lies in them, as pooling has, and of what is written to them."""
    x, options = torch.randn(shape).to(dtype), {"out_shape": out_shape, "sizes": {"a": 3, "b": 2}}
    assert "slices" in str(insum.explain(text, x=x, **options))
    found = insum.insum(text, x=x, **options)
    assert_close(found, oracle(text, {"x": x}, sizes={"a": 3, "b": 2, "y": out_shape}))
    apart = torch.randn([3 * n for n in shape]).to(dtype)[tuple(slice(1, None, 3) for _ in shape)]
    apart.copy_(x)
    torch.testing.assert_close(insum.insum(text, x=apart, **options), found)
    if dtype is torch.float64:
        call = lambda x: insum.insum(text, x=x, **options)
        assert torch.autograd.gradcheck(call, x.requires_grad_())


def test_windows_that_nothing_sums(small: None) -> None:
    """Read as they are, as a new tensor; added in place; and written back."""
    x, sizes = torch.randn(94, 16), {"i": 90, "a": 5}
    want = x.unfold(0, 5, 1).permute(0, 2, 1)
    found = insum.insum("y[i,a,f] = x[i+a,f]", x=x, sizes=sizes)
    assert torch.equal(found, want)
    assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    into = torch.ones(90, 5, 16)
    insum.insum("y[i,a,f] += x[i+a,f]", y=into, x=x)
    torch.testing.assert_close(into, want + 1)
    z = torch.randn(90, 5, 16, dtype=torch.float64, requires_grad=True)
    call = lambda z: insum.insum("y[i+a,f] = z[i,a,f]", z=z, out_shape=(94, 16))
    assert torch.autograd.gradcheck(call, z, fast_mode=True)


@pytest.mark.parametrize("seed", range(60))
def test_drawn_windows(seed: int, small: None) -> None:
    """Dimensions with windows and without, in any order and any layout, steps and offsets."""
    draw = random.Random(seed)
    kept = draw.sample("ijkc", draw.randint(1, 3))
    looped = draw.sample("abr", draw.randint(1, min(2, len(kept))))
    extents = {v: draw.randint(1, 6) for v in (*kept, *looped)}
    windows = [(v, r, draw.choice([1, 1, 2]), draw.choice([0, 0, 1])) for v, r in zip(kept, looped)]
    read = [*windows, *(v for v in kept[len(windows) :] if draw.random() < 0.7)]
    draw.shuffle(read)
    texts, shape = [], []
    for one in read:
        if isinstance(one, str):
            texts.append(one)
            shape.append(extents[one])
        else:
            v, r, by, offset = one
            texts.append(f"{by}*{v}+{r}+{offset}")
            shape.append(by * (extents[v] - 1) + extents[r] + offset)
    weights = [*looped, *(v for v in kept if draw.random() < 0.5 or v not in "".join(texts))]
    draw.shuffle(weights)
    target = draw.sample(kept, len(kept))
    statement = f"y[{','.join(target)}] = x[{','.join(texts)}] * w[{','.join(weights)}]"
    wide = [n + draw.randint(0, 1) for n in shape]  # a part of a larger tensor
    x = torch.randn(wide, dtype=torch.float64)[tuple(slice(0, n) for n in shape)]
    w = torch.randn([extents[v] for v in weights[::-1]], dtype=torch.float64).permute(
        *reversed(range(len(weights)))
    )
    sizes: dict[Any, int] = dict(extents)
    got = insum.insum(statement, x=x, w=w, sizes=sizes)
    with insum.settings(backend="graph"):
        want = insum.insum(statement, x=x, w=w, sizes=sizes)
    torch.testing.assert_close(got, want)


def test_what_stays_as_it_is(small: None) -> None:
    """Products of matrices, and of vectors, are theirs; integers are summed as before."""
    x, w = torch.randn(4, 5, 20), torch.randn(6, 5, 3)
    for statement, values in (
        ("y[b,t] = x[b,c,t+r] * w[o,c,r]", {"x": x, "w": w}),
        ("y[o,r] = x[0,c,t+r] * w[o,c,t]", {"x": x, "w": torch.randn(6, 5, 18)}),
        ("y[t,o] = x[0,0,t+r] * w[o,0,r]", {"x": x, "w": w}),
        ("y[b,c,t] = x[b,c,t+r] * w[c,r]", {"x": x.long(), "w": w[0].long()}),
    ):
        assert "slices" not in str(insum.explain(statement, sizes={"t": 18, "r": 3}, **values))
