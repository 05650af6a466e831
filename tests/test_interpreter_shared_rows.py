"""Gradients that gather the same rows, entry by entry, are one kernel: the sum over a row's entries
owns the loops, and what each entry has is written while they are walked.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import insum
from insum.lang.parser import parse
from insum.ops.shared_rows import named_alike, renamed, sharing
from insum.plan import guess_rows
from insum.runtime import one_launch
from insum.runtime.ready import NotYet
from insum.together import AskedResult, results_of
from kernels import error

NODES, EDGES = 12, 70
#: Of edges whose rows are cut: another class of sizes.
MORE_EDGES = 140
each = pytest.mark.parametrize
#: Statement, what it reads beside ``s`` and ``d``, and how many of its gradients are one launch.
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], int]] = {
    "a weight for each edge": (
        "y[d[e],f] = w[e] * x[s[e],f]",
        {"w": (EDGES,), "x": (NODES, 20)},
        2,
    ),
    "heads": (
        "y[d[e],h,f] = w[e,h] * x[s[e],h,f]",
        {"w": (EDGES, 3), "x": (NODES, 3, 17)},
        2,
    ),
    "a weight for each column": (
        "y[d[e],f] = w[e,f] * x[s[e],f]",
        {"w": (EDGES, 66), "x": (NODES, 66)},
        2,
    ),
    "two weights and a function": (
        "y[d[e],f] = w[e] * g[e] * sigmoid(x[s[e],f])",
        {"w": (EDGES,), "g": (EDGES,), "x": (NODES, 18)},
        3,
    ),
    "rows from both ends": (
        "y[d[e],f] = w[e] * x[s[e],f] * z[d[e],f]",
        {"w": (EDGES,), "x": (NODES, 16), "z": (NODES, 16)},
        2,
    ),
    "a batch": (
        "y[b,d[e],f] = w[b,e] * x[b,s[e],f]",
        {"w": (2, EDGES), "x": (2, NODES, 24)},
        2,
    ),
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of how many statements launches were, of those that wrote several results, and whether rows
    were cut into pieces.
    """
    found: list[tuple[int, bool]] = []
    launched = one_launch._launched

    def spy(kept: one_launch.OneLaunch, parts: Any) -> Any:
        (step,) = kept.ready.program.steps
        found.append((len(kept.order), bool(step.workspace)))  # which pieces go to
        return launched(kept, parts)

    monkeypatch.setattr(one_launch, "_launched", spy)
    return found


def ends(*, in_order: bool, edges: int = EDGES) -> dict[str, Tensor]:
    """Of edges; many of them start at one node."""
    s, d = torch.randint(NODES, (edges,)), torch.randint(NODES, (edges,))
    s[: edges // 2] = 7
    s = s.sort().values if in_order else s[torch.randperm(edges)]
    return {"s": s, "d": d}


def gradients(statement: str, values: dict[str, Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    leaves = [v for v in values.values() if v.requires_grad]
    result = insum.insum(statement, out_shape=tuple(upstream.shape), **values)
    return torch.autograd.grad(result, leaves, upstream.to(result.dtype))


def wanted(statement: str, values: dict[str, Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    wide = {
        n: v.detach().double().requires_grad_() if v.is_floating_point() else v
        for n, v in values.items()
    }
    with insum.settings(backend="graph", require_fused=False):
        return gradients(statement, wide, upstream.double())


def drawn(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, **index: Tensor
) -> dict[str, Tensor]:
    edges = len(index["s"])
    made = {}
    for name, shape in shapes.items():
        own = [edges if size == EDGES else size for size in shape]
        made[name] = torch.randn(own).to(dtype).requires_grad_()
    return {**made, **index}


@pytest.mark.interpreter
@pytest.mark.usefixtures("kernels_only")
@each("cut", [False, True], ids=["whole rows", "cut rows"])
@each("in_order", [False, True], ids=["any order", "sorted"])
@each("case", CASES)
def test_gradients(
    case: str,
    in_order: bool,
    cut: bool,
    joined: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statement, shapes, count = CASES[case]
    edges = EDGES
    if cut:  # as long rows of large tensors are
        monkeypatch.setattr(guess_rows, "MANY_LAUNCHES", 32)
        edges = MORE_EDGES
    values = drawn(shapes, **ends(in_order=in_order, edges=edges))
    upstream = torch.randn(shapes["x"])
    for _ in range(3):
        got = gradients(statement, values, upstream)
    want = wanted(statement, values, upstream)
    assert all(error(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))
    assert set(joined) == {(count, cut)}


@pytest.mark.interpreter
@pytest.mark.usefixtures("kernels_only")
def test_half_precision_is_rounded_once(joined: list[tuple[int, bool]]) -> None:
    statement, shapes, _ = CASES["heads"]
    values = drawn(shapes, torch.float16, **ends(in_order=False))
    upstream = torch.randn(shapes["x"]).half()
    for _ in range(2):
        got = gradients(statement, values, upstream)
    want = wanted(statement, values, upstream)
    assert joined
    assert all(error(a, b) <= 1e-3 for a, b in zip(got, want, strict=True))


@pytest.mark.interpreter
@pytest.mark.usefixtures("kernels_only")
@each(
    "statement, shapes",
    [
        ("y[d[e],f] = w[e] * x[s[e],f]", {"w": (EDGES,), "x": (NODES, 8)}),  # narrow rows
        ("y[d[e],f] = x[s[e],f] * x[s[e],f]", {"x": (NODES, 20)}),  # one gradient
        ("y[e,f] = x[s[e],f] * z[d[e],f]", {"x": (NODES, 20), "z": (NODES, 20)}),  # two scatters
    ],
)
def test_what_shares_nothing_is_left_apart(
    statement: str, shapes: dict[str, tuple[int, ...]], joined: list[tuple[int, bool]]
) -> None:
    values = drawn(shapes, **ends(in_order=False))
    rows = EDGES if statement.startswith("y[e") else NODES
    upstream = torch.randn(rows, shapes["x"][1])
    for _ in range(3):
        got = gradients(statement, values, upstream)
    want = wanted(statement, values, upstream)
    assert all(error(a, b) <= 1e-5 for a, b in zip(got, want, strict=True)) and not joined


@pytest.mark.interpreter
@pytest.mark.usefixtures("kernels_only")
def test_index_tensors_that_change_are_not_taken_for_others(joined: list[tuple[int, bool]]) -> None:
    statement, shapes, _ = CASES["a weight for each edge"]
    index = ends(in_order=False)
    values, upstream = drawn(shapes, **index), torch.randn(NODES, 20)
    for turn in range(4):
        got = gradients(statement, values, upstream)
        want = wanted(statement, values, upstream)
        assert all(error(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))
        index["d" if turn % 2 else "s"].random_(NODES)  # in place
    assert not joined  # each was new


@pytest.mark.interpreter
@pytest.mark.usefixtures("kernels_only")
@each("edges, columns", [(EDGES, 0), (0, 20), (0, 0)])
def test_nothing_to_sum(edges: int, columns: int, joined: list[tuple[int, bool]]) -> None:
    """Of one class of sizes with rows that share a launch."""
    statement, shapes, _ = CASES["a weight for each edge"]
    index = ends(in_order=False)
    for _ in range(2):
        gradients(statement, drawn(shapes, **index), torch.randn(NODES, 20))
    count = len(joined)
    w, x = torch.randn(edges, requires_grad=True), torch.randn(NODES, columns, requires_grad=True)
    index = {name: one[:edges] for name, one in index.items()}
    for _ in range(2):
        got = gradients(statement, {"w": w, "x": x, **index}, torch.randn(NODES, columns))
    assert [one.shape for one in got] == [w.shape, x.shape]
    assert all(not one.any() for one in got) and len(joined) == count == 1


@pytest.mark.interpreter
@pytest.mark.usefixtures("kernels_only")
def test_numbers_on_their_way_are_no_reason_to_stay_apart(
    joined: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As how many pieces rows are cut into, which a GPU tells later."""
    statement, shapes, _ = CASES["a weight for each edge"]
    values, upstream = drawn(shapes, **ends(in_order=False)), torch.randn(NODES, 20)
    want = wanted(statement, values, upstream)
    with monkeypatch.context() as first:
        first.setattr(one_launch, "ready", mock.Mock(side_effect=NotYet))
        alone = gradients(statement, values, upstream)
    for got in (alone, *(gradients(statement, values, upstream) for _ in range(2))):
        assert all(error(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))
    assert joined == [(2, False)]


@pytest.mark.interpreter
@pytest.mark.usefixtures("kernels_only")
def test_variables_of_one_name_and_two_extents(joined: list[tuple[int, bool]]) -> None:
    """``h`` is another number of heads in each statement: they have no loops in common."""
    index = ends(in_order=False)
    y, w, x = torch.randn(NODES, 20), torch.randn(EDGES, 3), torch.randn(NODES, 4, 20)
    asked = [
        AskedResult("a[s[e],h,f] = y[d[e],f] * w[e,h]", (NODES, 3, 20), {"y": y, "w": w, **index}),
        AskedResult("b[e,h] = y[d[e],f] * x[s[e],h,f]", (EDGES, 4), {"y": y, "x": x, **index}),
    ]
    for _ in range(2):
        a, b = results_of(asked)
    s, d = index["s"], index["d"]
    assert error(a, torch.zeros(NODES, 3, 20).index_add(0, s, y[d][:, None] * w[..., None])) < 1e-5
    assert error(b, (y[d][:, None] * x[s]).sum(-1)) < 1e-5
    assert not joined


def test_statements_that_share_rows() -> None:
    texts = {
        "x": "dx[s[e],h,f] += dy[d[e],h,f] * w[e,h]",
        "w": "dw[e,h] += dy[d[e],h,f] * x[s[e],h,f]",
        "W": "dW[f,g] += dy[d[e],h,f] * x[s[e],h,g]",  # no place for every entry
        "z": "dz[e,h] += z[q[e],h,f] * x[r[e],h,f]",  # other rows
    }
    assert sharing({name: parse(text) for name, text in texts.items()}) == ("x", "w")


def test_variables_are_named_alike_where_that_is_safe() -> None:
    scatter = parse("y[s[e],h,c] = g[d[e],h,c] * w[e,h]")
    one = parse("a[i,j] = g[d[i],j,k] * x[s[i],j,k]")
    names = named_alike(one, [scatter])
    assert str(renamed(one, names)) == "a[e,h] = g[d[e],h,c] * x[s[e],h,c]"
    assert named_alike(renamed(one, names), [scatter]) == {}
    assert named_alike(scatter, [scatter]) == {}
    taken = parse("a[i,j] = g[d[i],j,k] * x[s[i],j,k,c]")  # c is something else
    assert named_alike(taken, [scatter]) == {}
    twice = parse("a[i] = g[d[i],j,j] * x[s[i],j]")  # two of its variables would be one
    assert named_alike(twice, [scatter]) == {}


@pytest.mark.interpreter
@pytest.mark.usefixtures("kernels_only")
@pytest.mark.parametrize("rows_", [6, 3])
def test_a_result_that_is_scattered_is_none_of_entries(rows_: int) -> None:
    """Also where no two entries meet: the rest of it is zero."""
    d, s = torch.tensor([2, 0, 1]) * (rows_ // 3), torch.tensor([1, 1, 2])
    insum.unchanging(d)
    insum.unchanging(s)
    leaves = [torch.randn(n, requires_grad=True) for n in (rows_, 3)]
    leaves.append(torch.randn(6, 20, requires_grad=True))
    a, w, x = leaves
    for _ in range(3):
        y = insum.insum(
            "y[d[e],f] = a[d[e]] * w[e] * x[s[e],f]", d=d, s=s, a=a, w=w, x=x, out_shape=(rows_, 20)
        )
        upstream = torch.randn_like(y)
        got = torch.autograd.grad(y, leaves, upstream)
        plain = torch.zeros(rows_, 20).index_add(0, d, (a[d] * w)[:, None] * x[s])
        for one, other in zip(got, torch.autograd.grad(plain, leaves, upstream)):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
