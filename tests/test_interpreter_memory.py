"""What kernels remember of index tensors: orders, segments, inverse tables, values in the code.
Never of other tensors, nor of other values.

A stale plan gives wrong numbers without any sign, so every way in which an index tensor can change
or be exchanged is tried.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import applications
import insum
from applications import relative_error
from insum.facts import facts_of
from insum.runtime import inspection
from insum.runtime.prologue import prologue
from insum.runtime.ready import Ready
from insum.testing.as_on_a_gpu import pretended
from kernels import ONLY_FUSED, bound, error, lookup, run

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]


def spmm(rows: Tensor, columns: Tensor, values: Tensor, dense: Tensor, size: int = 5) -> float:
    """The error of one sparse product."""
    result = run(
        "C[AM[p],n] = AV[p] * B[AK[p],n]", {0: size}, AM=rows, AV=values, AK=columns, B=dense
    )
    return error(
        result,
        torch.zeros(size, dense.shape[1]).index_add(
            0, rows.long(), values[:, None] * dense[columns.long()]
        ),
    )


def arguments() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.tensor([0, 0, 1, 3, 4]),
        torch.tensor([0, 1, 2, 3, 0]),
        torch.randn(5),
        torch.randn(4, 6),
    )


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "copy_": lambda t: t.copy_(t.flip(0)),
    "one element": lambda t: t.__setitem__(0, 3),
    "through a view": lambda t: t[1:3].fill_(2),
    "through another view": lambda t: t.view(5, 1).mul_(0),
    "in no_grad": lambda t: torch.no_grad()(lambda: t.add_(1).clamp_(max=3))(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["rows", "columns", "both"])
@pytest.mark.parametrize("start", ["sorted", "unsorted"])
def test_index_tensors_that_are_written_to(start: str, which: str, change: str) -> None:
    rows, columns, values, dense = arguments()
    if start == "unsorted":
        rows.copy_(rows[torch.tensor([3, 0, 4, 1, 2])])
    assert spmm(rows, columns, values, dense) < 1e-6
    for tensor in {"rows": [rows], "columns": [columns], "both": [rows, columns]}[which]:
        CHANGES[change](tensor)
    assert spmm(rows, columns, values, dense) < 1e-6
    assert spmm(rows, columns, values, dense) < 1e-6


@pytest.mark.parametrize("start", ["sorted", "unsorted"])
def test_index_tensors_that_are_exchanged(start: str) -> None:
    """The others stay; shapes and strides stay; then the first come back."""
    rows, columns, values, dense = arguments()
    if start == "unsorted":
        rows = rows[torch.tensor([3, 0, 4, 1, 2])]
    for r, c in (
        (rows, columns),
        (rows, columns.flip(0)),
        (rows.flip(0), columns),
        (rows, columns),
        (rows.flip(0), columns.flip(0)),
    ):
        assert spmm(r, c, values, dense) < 1e-6


@pytest.mark.parametrize("strategy", ["auto", "segment", "onehot", "unrolled", "atomic"])
def test_groups_that_share_an_index_tensor(strategy: str) -> None:
    """Slots of a group format are counted for one array of rows; another array counts anew."""
    slots, values, dense = (
        torch.tensor([[0, 1], [2, -1], [3, 0], [1, -1]]),
        torch.randn(4, 2),
        torch.randn(4, 6),
    )
    parts = (torch.where(slots >= 0, values, 0)[:, :, None] * dense[slots.clamp(min=0)]).sum(1)
    rows = torch.tensor([0, 1, 1, 3])
    with insum.settings(scatter=strategy):
        for r in (
            rows,
            torch.tensor([0, 0, 1, 2]),
            rows,
            rows.copy_(torch.tensor([1, 2, 2, 3])),
            rows,
        ):
            result = run(
                "C[AM[p],n] = AV[p,q] * B[AK[p,q],n]",
                {0: 4},
                ("AK",),
                AM=r,
                AV=values,
                AK=slots,
                B=dense,
            )
            assert error(result, torch.zeros(4, 6).index_add(0, r, parts)) < 1e-6


def test_one_index_tensor_in_two_statements() -> None:
    """Variables stand for other dimensions in the second, although everything has the same name."""
    index, by, dense = torch.tensor([[3, 0], [1, 3]]), torch.tensor([1, 0]), torch.randn(2, 5)
    for statement, order in (
        ("C[D[i,j],n] = X[F[i],n]", index),
        ("C[D[j,i],n] = X[F[i],n]", index.t()),
    ):
        wanted = torch.zeros(4, 5).index_add(
            0, order.reshape(-1), dense[by].repeat_interleave(2, 0)
        )
        assert error(run(statement, {0: 4}, D=index, F=by, X=dense), wanted) < 1e-6, statement


def test_two_sizes_of_output() -> None:
    index, values = torch.tensor([2, 0, 1, 2]), torch.randn(4, 3)
    for size in (3, 5, 3):
        assert (
            error(
                run("C[I[p],n] = V[p,n]", {0: size}, I=index, V=values),
                torch.zeros(size, 3).index_add(0, index, values),
            )
            < 1e-6
        )


def test_constants_that_are_exchanged_or_written_to() -> None:
    """Their values are in the text of the kernel."""
    to, source, dense = (
        insum.constant(torch.tensor([2, 0, 1])),
        insum.constant(torch.tensor([0, 1, 2])),
        torch.randn(3, 40),
    )
    other = insum.constant(torch.tensor([2, 2, 1]))

    def check(i: Tensor, j: Tensor) -> None:
        assert (
            error(
                run("C[I[p],n] = A[J[p],n]", {0: 3}, I=i, J=j, A=dense),
                torch.zeros(3, 40).index_add(0, i, dense[j]),
            )
            < 1e-6
        )

    check(to, source)
    assert facts_of(source).constant
    check(to, other)
    check(other, source)
    check(to, source)
    source.copy_(torch.tensor([1, 1, 0]))
    check(to, source)
    assert not facts_of(source).constant, "the promise ends with the first write"


def test_patterns_that_are_promoted_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that keeps coming back becomes code after some calls; then it is written to."""
    monkeypatch.setattr("insum.plan.strategies.one_hot.ONEHOT_WORK", 1)
    application = applications.tensor_product(
        batch=2, channels=8, constant=False, dtype=torch.float32
    )
    used, launched = [], []
    run_ready = Ready.__call__

    def watched(ready: Ready, *rest: object) -> Tensor:
        launched.append(ready.program.steps[0].planned.plan.strategy)
        return run_ready(ready, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Ready, "__call__", watched)
    for _ in range(6):
        assert relative_error(application.forward.run(), application.expected()) < 2e-6
        used.append(launched[-1])
    assert used[0] == "onehot" and used[-1] == "unrolled"
    for name in "IJKV":
        application.values[name].copy_(application.values[name].flip(0))
    assert relative_error(application.forward.run(), application.expected()) < 2e-6


def test_an_order_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    sort = prologue.in_order
    monkeypatch.setattr(prologue, "in_order", lambda *args: calls.append(1) or sort(*args))
    rows, columns, values, dense = arguments()
    rows = rows.flip(0).contiguous()
    for _ in range(3):
        assert spmm(rows, columns, values, dense) < 1e-6
        assert spmm(rows, columns, values.clone(), dense.clone()) < 1e-6
    assert len(calls) == 1


def test_inverse_tables() -> None:
    """Where an offset leads to every voxel at most once, the gradient gathers; where not, it
    scatters.
    """
    application = applications.tiny()[4]
    upstream = application.upstream()
    call = application.gradients(upstream)["In"]
    (step,) = lookup(call.problem(), call.values).steps
    assert (
        "has an inverse table" in step.planned.plan.why[-1]
        and step.planned.plan.strategy == "store"
    )
    table = application.values["Nb"]
    table[3] = table[4]  # now two voxels have the same neighbours
    assert relative_error(call.run(), application.expected_gradients(upstream)["In"]) < 2e-6
    (step,) = lookup(call.problem(), call.values).steps
    assert step.planned.plan.strategy != "store"


@pytest.mark.parametrize("places", [30, 50, 90])
def test_columns_that_are_put_in_order(places: int) -> None:
    """Through the inverse of their index tensor, as it is now: its values may change."""
    draw = torch.Generator().manual_seed(places)
    order = torch.randperm(places, generator=draw)[:30]
    v, w = torch.randn(4, 6, 30, generator=draw), torch.randn(6, 30, generator=draw)

    def moved() -> Tensor:
        return run("y[a,b,o[c]] = v[a,b,c] * w[b,c]", {2: places}, o=order, v=v, w=w)

    for _ in range(3):
        want = torch.zeros(4, 6, places)
        want[:, :, order] = v * w
        assert torch.equal(moved(), want)
        order.copy_(order.flip(0))
    order[1] = order[0]  # two columns meet
    want = torch.zeros(4, 6, places).index_add(2, order, v * w)
    torch.testing.assert_close(moved(), want)


def test_columns_in_order_are_gathered() -> None:
    order = torch.randperm(30)
    values = {"o": order, "v": torch.randn(4, 6, 30)}
    problem = bound("y[a,b,o[c]] = v[a,b,c]", values, {2: 30})
    (step,) = lookup(problem, values).steps
    assert "has an inverse table" in step.planned.plan.why[-1] and not step.planned.fill


def test_nothing_keeps_tensors_alive() -> None:
    rows, columns, values, dense = arguments()
    rows = rows.flip(0).contiguous()
    spmm(rows, columns, values, dense)
    watched = [weakref.ref(t) for t in (rows, values, dense)]
    del rows, values, dense
    gc.collect()
    assert [w() for w in watched] == [None, None, None]


# --- deterministic mode ---------------------------------------------------------------------------


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("number", range(4))
def test_deterministic_mode_has_no_atomics(number: int, deterministic: None) -> None:
    application = [applications.tiny()[0], applications.tiny()[3], *applications.smallest()[2:]][
        number
    ]
    upstream = application.upstream()
    expected = {"": application.expected(), **application.expected_gradients(upstream)}
    for name, call in {"": application.forward, **application.gradients(upstream)}.items():
        assert relative_error(call.run(), expected[name]) < 2e-6
        assert all(
            "atomic" not in kernel.source
            for kernel in inspection.kernels(call.problem(), call.values)
        ), call.name


def test_deterministic_mode_refuses_what_it_cannot_order(deterministic: None) -> None:
    index = torch.tensor([0, 1, 0])
    with pytest.raises(
        insum.NotFusedError,
        match="deterministic mode, and indices lead to too many places",
    ):
        run("C[I[p],I[p]] += V[p]", {0: 30, 1: 30}, I=index, V=torch.randn(3))


def test_atomics_that_were_asked_for_are_not_used_either(deterministic: None) -> None:
    with insum.settings(scatter="atomic"):
        rows, columns, values, dense = arguments()
        assert spmm(rows.flip(0).contiguous(), columns, values, dense) < 1e-6


@pytest.mark.parametrize("text", ["mean= w[e] * x[s[e],f]", "= w[e] * x[s[e],f] * share[d[e]]"])
def test_a_number_of_each_row_beside_a_padded_index(text: str) -> None:
    """It is read once for the row, whichever of its entries are absent."""
    s, d = torch.randint(-1, 30, (200,)), torch.randint(0, 30, (200,)).sort().values
    given = {"s": s, "d": d, "w": torch.rand(200), "x": torch.randn(30, 16)}
    if "share" in text:
        given["share"] = torch.randn(30)

    def found() -> Tensor:
        return insum.insum(f"y[d[e],f] {text}", out_shape=(30, 16), padded=("s",), **given)

    with insum.settings(backend="graph", require_fused=False):
        expected = found()
    with insum.settings(**ONLY_FUSED):
        torch.testing.assert_close(found(), expected)


def test_rows_that_stay_beside_a_padded_index_that_is_new() -> None:
    """Where padding stands in it is not asked at its first call."""
    R = insum.unchanging(torch.randint(0, 4, (30,), dtype=torch.int32).sort().values)
    V, B = torch.randn(30, 3, 8, 8), torch.randn(6, 8, 16)
    for _ in range(3):
        K = torch.randint(-1, 6, (30, 3), dtype=torch.int32)
        given = {"R": R, "K": K, "V": V, "B": B}
        with pretended():
            found = insum.insum(
                "C[R[p],i,n] = V[p,q,i,k] * B[K[p,q],k,n]",
                padded=("K",),
                out_shape=(4, 8, 16),
                **given,
            )
        there = B[K.long().clamp(min=0)] * (K >= 0)[..., None, None]
        expected = torch.zeros(4, 8, 16).index_add(
            0, R.long(), torch.einsum("pqik,pqkn->pin", V, there)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
