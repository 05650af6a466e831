"""Results that are accumulated from a base: in Triton's interpreter it is read where they are
stored, with strides of its own, and left as it was.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum import memory
from insum.call.request import Request, request_of
from insum.lang.bind import bind
from insum.lang.parser import parse
from insum.ops.eager import accumulate
from insum.plan import first_guess, guess_rows
from insum.plan.sizes import BASE
from insum.runtime import inspection
from insum.runtime.ready import Ready
from insum.testing import Case, draw_cases
from insum.testing.as_on_a_gpu import pretended
from insum.testing.compare import assert_close
from kernels import STRATEGIES
from scatters import draw_scatters

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

#: As in `test_interpreter_drawn`.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64)
INDICES = (torch.int64, torch.int32, torch.uint8)
SEED = 7
SCATTERED = "y[d[e],f] += w[e] * x[s[e],f]"


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the kernels that ran were like."""
    found: Counter[str] = Counter()
    launch = Ready.__call__

    def watched(ready: Ready, *rest: Any, **more: Any) -> Tensor:
        assert ready.based, "what is accumulated from is not copied first"
        for step in ready.program.steps:
            plan = step.planned.plan
            found.update([plan.strategy, plan.reduce, f"from {plan.base or 'a copy'}"])
            found.update(["in pieces"] if step.workspace else [])
        found.update(["copied"] if ready.filled else [])
        return launch(ready, *rest, **more)

    monkeypatch.setattr(Ready, "__call__", watched)
    return found


def base_of(shape: tuple[int, ...], dtype: torch.dtype, draw: random.Random) -> Tensor:
    """A tensor that broadcasts to a shape: dimensions are left out in front or are 1, and what is
    left is contiguous, transposed, stepped or expanded.
    """
    kept = list(shape[draw.randint(0, len(shape)) if draw.random() < 0.5 else 0 :])
    kept = [1 if draw.random() < 0.2 else size for size in kept]
    layout = draw.choice(("contiguous", "transposed", "stepped", "expanded"))
    if layout == "stepped":
        wide = torch.randint(-3, 4, [2 * size + 1 for size in kept]).to(dtype)
        return wide[tuple(slice(1, 2 * size + 1, 2) for size in kept)]
    if layout == "transposed":
        dims = tuple(range(len(kept)))[::-1]
        return torch.randint(-3, 4, kept[::-1]).to(dtype).permute(dims)
    base = torch.randint(-3, 4, kept).to(dtype)
    return base.expand(shape) if layout == "expanded" else base


def from_base(case: Case, draw: random.Random) -> None:
    """A drawn statement, from a drawn base."""
    statement = parse(case.statement)
    problem = bind(statement, case.values, sizes=dict(case.sizes), padded=case.padded)
    if problem.target_read or statement.operator == "=":
        return
    name, shape = statement.target.tensor, tuple(map(int, problem.shape))
    base = base_of(shape, problem.dtype, draw)
    before = base.clone()
    values = {n: v for n, v in case.values.items() if n != name}
    sizes = ((name, shape), *((n, s) for n, s in case.sizes.items() if n != name))
    result = accumulate(Request(case.statement, sizes, case.padded), base, values)  # type: ignore[arg-type]
    whole = Case(case.statement, {**values, name: base.expand(shape)}, case.sizes, case.padded)
    assert_close(result, whole.expected(), whole.precision)
    assert torch.equal(base, before)


def drawn() -> Iterator[Case]:
    known: dict[str, Any] = {"dtypes": DTYPES, "index_dtypes": INDICES}
    yield from draw_cases(28, seed=SEED, operators=("+=", "max=", "min="), **known)
    for case in draw_scatters(14, seed=SEED):
        left, operator, right = case.statement.partition(" = ")
        yield Case(f"{left} += {right}", case.values, case.sizes, case.padded) if operator else case


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drawn_statements(strategy: str, used: Counter[str]) -> None:
    draw = random.Random(SEED)
    for number, case in enumerate(drawn()):
        dot = ("always", "auto", "never")[number % 3]
        with insum.settings(scatter=strategy, dot=dot), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # NumPy, about infinities
            try:
                from_base(case, draw)
            except insum.NotFusedError:
                continue
            except Exception as error:
                raise AssertionError(f"{strategy}, {dot}: {case!r}") from error
    wanted = {"sum", "max", "min", "store", f"from {BASE}", "copied"} | {strategy} - {"auto"}
    # sums of rows start from the base, whatever leads there
    wanted |= {"from a copy"} if strategy not in ("segment", "auto") else set()
    assert not wanted - set(used), dict(used)


def graph(nodes: int = 21, edges: int = 300, columns: int = 24) -> dict[str, Tensor]:
    """Some nodes have no edges, one has very many."""
    torch.manual_seed(0)
    d = torch.cat([torch.randint(0, nodes - 4, (edges - 90,)), torch.full((90,), 3)])
    s = torch.randint(0, nodes, (edges,))
    return {"d": d, "s": s, "w": torch.randn(edges), "x": torch.randn(nodes, columns)}


def in_float64(base: Tensor, values: dict[str, Tensor]) -> Tensor:
    message = values["w"].double()[:, None] * values["x"].double()[values["s"]]
    whole = base.double().expand(values["x"].shape).clone()
    return whole.index_add(0, values["d"], message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(24,), (21, 24), (21, 1), ()], ids=str)
@pytest.mark.parametrize("unseen", [False, True])
def test_edges(shape: tuple[int, ...], dtype: torch.dtype, unseen: bool) -> None:
    """Rows without entries are the base; edges that were never seen are added to a copy of it, and
    those that come back are stored with it.
    """
    values = {n: v.to(dtype) if v.is_floating_point() else v for n, v in graph().items()}
    base, request = torch.randn(shape).to(dtype), request_of(SCATTERED, (21, 24), None, ())
    wanted = in_float64(base, values)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    with pretended() if unseen else insum.settings():
        for _ in range(6):
            result = accumulate(request, base, values)
            assert result.dtype == dtype
            torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)
    memory.forget()


def test_deterministic_mode() -> None:
    values, base = graph(), torch.randn(24)
    request = request_of(SCATTERED, (21, 24), None, ())
    torch.use_deterministic_algorithms(True)
    try:
        with pretended():
            first, *rest = (accumulate(request, base, values) for _ in range(6))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first, one) for one in rest)
    torch.testing.assert_close(first.double(), in_float64(base, values), rtol=1e-5, atol=1e-5)


def test_an_index_out_of_range() -> None:
    """It is absent, and told of later; nothing of the result is left as the memory was."""
    values, base = graph(), torch.randn(24)
    inside = in_float64(base, {n: v[:-1] if n != "x" else v for n, v in values.items()})
    values["d"][-1] = 21
    with pretended():
        result = accumulate(request_of(SCATTERED, (21, 24), None, ()), base, values)
        torch.testing.assert_close(result.double(), inside, rtol=1e-5, atol=1e-5)
        with pytest.raises(insum.IndexRangeError, match=r"d\[299\] is 21"):
            insum.synchronize()


def test_a_sum_of_products() -> None:
    """The first product starts from the base, the others from its result; rounded once."""
    torch.manual_seed(0)
    a, b, c = torch.randn(5, 7).half(), torch.randn(7).half(), torch.randn(5).half()
    base = torch.tensor([1000.0]).half()
    request = request_of("y[i] += A[i,j] * b[j] - 2 * c[i]", (5,), None, ())
    result = accumulate(request, base, {"A": a, "b": b, "c": c})
    wanted = 1000 + a.double() @ b.double() - 2 * c.double()
    torch.testing.assert_close(result.double(), wanted, rtol=2**-11, atol=0)


def test_a_base_that_is_an_input_as_well() -> None:
    values = graph(nodes=24)
    values["x"] = x = torch.randn(24, 24)
    result = accumulate(request_of(SCATTERED, (24, 24), None, ()), x.t(), values)
    torch.testing.assert_close(result.double(), in_float64(x.t(), values), rtol=1e-5, atol=1e-5)


def test_a_row_of_a_base_is_loaded_once() -> None:
    """Along dimensions that repeat it no address is computed."""
    values, base = graph(), torch.randn(24)
    values["d"] = values["d"].sort().values
    problem = bind(parse(SCATTERED), {**values, "y": base.expand(21, 24)})
    (step,) = inspection.plan_only(problem, {**values, BASE: base}).steps
    source = step.launches[-1].kernel.source
    assert "base_stride" not in source and "= tl.load(base_at + f_i, " in source, source


@pytest.mark.parametrize("shape", [(8,), (9, 8), (9, 1)], ids=str)
@pytest.mark.parametrize("launches", [1, 2])
def test_a_row_of_several_pieces_has_its_base_once(
    monkeypatch: pytest.MonkeyPatch, used: Counter[str], launches: int, shape: tuple[int, ...]
) -> None:
    """Whoever puts pieces together adds it: one of their programs, or a launch after them."""
    monkeypatch.setattr(guess_rows, "MANY_LAUNCHES", 0)
    monkeypatch.setattr(first_guess, "ONE_LAUNCH", 2**18 if launches == 1 else 0)
    insum.forget()
    d = torch.cat([torch.full((300,), 3), torch.randint(0, 8, (40,))]).sort().values
    values = {"d": d, "s": torch.randint(0, 9, (340,)), "w": torch.randn(340)}
    values["x"], base = torch.randn(9, 8), torch.randn(shape)
    messages = values["w"][:, None].double() * values["x"][values["s"]].double()
    expected = base.double().expand(9, 8).clone().index_add_(0, d, messages)
    request = request_of(SCATTERED, (9, 8), None, (), None)
    for _ in range(3):
        got = accumulate(request, base, values).double()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert used["in pieces"] and used[f"from {BASE}"]
