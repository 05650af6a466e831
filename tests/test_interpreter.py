"""Generated kernels in Triton's interpreter: the applications and their gradients, strategies,
caches, corners.

Every new tensor holds NaN before a kernel writes to it, so that a place which is left out shows.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import applications
import insum
from applications import Application, relative_error
from insum.plan import first_guess, guess_rows
from insum.runtime import classify, inspection
from insum.runtime.program import Program
from kernels import ONLY_FUSED, STRATEGIES, bound, error, lookup, run

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("kernels_only")]

TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6, torch.float64: 1e-14}
NAN, INF = float("nan"), float("inf")


# --- applications ---------------------------------------------------------------------------------

#: Strategy of the forward kernel and of each gradient, in the order of `Application.wanted`.
EXPECTED = {
    "block SpMM, BlockCOO": ("segment", "store", "segment"),
    "block SpMM, BlockGroupCOO": ("segment", "store", "segment"),
    "SpMM, COO": ("segment", "store", "segment"),
    "SpMM, GroupCOO": ("segment", "store", "segment"),
    "convolution by voxel": ("store", "store", "store"),
    "convolution by offset": ("store", "store", "store"),
    "convolution, grouped": ("atomic", "atomic", "segment"),
    "tensor product": ("onehot", "onehot", "onehot", "store"),
    "tensor product, constant": ("unrolled", "unrolled", "unrolled", "unrolled"),
}


def small(dtype: torch.dtype) -> list[Application]:
    return applications.tiny(dtype=dtype)


def check(
    application: Application, dtype: torch.dtype, wanted: tuple[str, ...] | None = None
) -> list[str]:
    """Forward and gradients against float64; the strategies that were used."""
    upstream = application.upstream()
    expected = {"": application.expected(), **application.expected_gradients(upstream)}
    used = []
    for name, call in {"": application.forward, **application.gradients(upstream)}.items():
        if wanted is None or name in wanted:
            result = call.run()
            assert result.dtype == dtype
            assert relative_error(result, expected[name]) < TOLERANCE[dtype], call.name
            used.append(inspection.strategy(call.problem(), call.values).removesuffix(" + tl.dot"))
    return used


@pytest.mark.parametrize(
    "number", range(len(small(torch.float32))), ids=[a.name for a in small(torch.float32)]
)
def test_application(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    application = small(torch.float32)[number]
    if "tensor product" in application.name:
        # let small tensors have the strategy that large ones get
        monkeypatch.setattr("insum.plan.strategies.one_hot.ONEHOT_WORK", 1)
    strategies = check(application, torch.float32)
    if number != 5:  # the table that is not one-to-one has no inverse
        assert tuple(strategies) == EXPECTED[application.name]
    else:
        assert tuple(strategies) == ("store", "atomic", "store")


@pytest.mark.parametrize("number", [1, 3, 4, 7])
def test_application_in_half_precision(number: int) -> None:
    check(small(torch.float16)[number], torch.float16)


@pytest.mark.parametrize("number", range(4))
def test_application_in_double_precision(number: int) -> None:
    """Without tl.dot."""
    check(applications.smallest(dtype=torch.float64)[number], torch.float64)


@pytest.mark.parametrize("number", range(4))
def test_application_without_matrix_instructions(number: int) -> None:
    with insum.settings(dot="never"):
        check(applications.smallest()[number], torch.float32)


@pytest.mark.parametrize("number", [1, 7])
def test_application_without_swap_and_prefetch(number: int) -> None:
    with insum.settings(swap=False, prefetch=False):
        check(small(torch.float32)[number], torch.float32)


@pytest.mark.parametrize("number", [0, 1, 3, 4, 7])
def test_offsets_of_64_bits(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced here; on a GPU a test has tensors that need them."""
    narrow = classify.classified
    monkeypatch.setattr(classify, "classified", lambda *args: replace(narrow(*args), wide=True))
    application = small(torch.float32)[number]
    check(application, torch.float32)
    assert lookup(application.forward.problem(), application.values).steps[0].planned.plan.wide
    for kernel in inspection.kernels(application.forward.problem(), application.values):
        assert "tl.int64" in kernel.source and "tl.int32" not in kernel.source


# --- long rows ------------------------------------------------------------------------------------


def skewed(**options: Any) -> Application:
    return applications.spmm(
        rows=50, columns=20_000, n=8, entries=1500, heavy=4000, dtype=torch.float32, **options
    )


@pytest.mark.parametrize("group", [0, 4])
@pytest.mark.parametrize("many", [False, True])
def test_long_rows_are_cut(group: int, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if many:  # as it is where there are more entries than the interpreter could walk
        for limit in ("ONE_LAUNCH", "FEW_ENTRIES", "TINY_ENTRIES"):
            monkeypatch.setattr(first_guess, limit, 0)
        monkeypatch.setattr(guess_rows, "FEW_ENTRIES", 0)
    application = skewed(group=group)
    assert relative_error(application.forward.run(), application.expected()) < 2e-6
    (step,) = lookup(application.forward.problem(), application.values).steps
    assert step.workspace and len(step.launches) == (2 if many else 1), (
        "long pieces, where there are many entries, and short ones; whoever has the last sums all"
    )


def test_cut_rows_into_a_target() -> None:
    application = skewed()
    start = torch.randn(8, 50).t()
    target = start.clone()
    result = run(application.statement, C=target, **application.values)
    assert result is target
    assert relative_error(target, application.expected() + start) < 2e-6


@pytest.mark.parametrize("operator", ["max=", "min="])
def test_cut_rows_of_an_extremum(operator: str) -> None:
    index = torch.cat([torch.zeros(5000), torch.arange(2, 40)]).long()
    values = torch.randn(len(index), 3)
    wanted = torch.full((40, 3), -INF if operator == "max=" else INF)
    wanted.scatter_reduce_(
        0, index[:, None].expand(-1, 3), values, "amax" if operator == "max=" else "amin"
    )
    assert torch.equal(run(f"C[I[p],n] {operator} V[p,n]", {0: 40}, I=index, V=values), wanted)


# --- accumulating into what is passed -------------------------------------------------------------


def laid_out(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor of random numbers in some layout, and all of the memory around it."""
    rows, columns = shape
    memory = torch.full((2 * rows + 1, 2 * columns + 1), NAN, dtype=dtype)
    match kind:
        case "contiguous":
            view = memory.reshape(-1)[: rows * columns].view(shape)
        case "transposed":
            view = memory.reshape(-1)[: rows * columns].view(columns, rows).t()
        case "stepped":
            view = memory[1::2, 1::2]
        case "offset":
            view = memory.reshape(-1)[3 : 3 + rows * columns].view(shape)
        case _:
            raise AssertionError(kind)
    view.copy_(torch.randn(shape))
    return view, memory


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "stepped", "offset"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_accumulate_into_a_target(strategy: str, layout: str, dtype: torch.dtype) -> None:
    """What lies between the target's elements stays as it was."""
    torch.manual_seed(0)
    rows = torch.tensor([3, 1, 4, 0]) if strategy == "store" else torch.tensor([0, 1, 1, 4])
    columns, scale, dense = (
        torch.tensor([2, 0, 1, 2]),
        torch.randn(4).to(dtype),
        torch.randn(3, 9).to(dtype),
    )
    target, memory = laid_out(layout, (6, 9), dtype)
    before, gaps = target.double(), memory.isnan()
    statement = "C[AM[p],n] += AV[p] * B[AK[p],n]"
    values = {"AM": rows, "AV": scale, "AK": columns, "B": dense, "C": target}
    with insum.settings(scatter=strategy):
        assert run(statement, **values) is target
        problem = bound(statement, values)
        (step,) = lookup(problem, values, target).steps
        assert strategy == "auto" or step.planned.plan.strategy == strategy
    wanted = before.index_add(0, rows, scale.double()[:, None] * dense.double()[columns])
    assert error(target, wanted) < TOLERANCE[dtype]
    assert torch.equal(memory.isnan(), gaps)


@pytest.mark.parametrize("strategy", ["auto", "segment", "onehot", "atomic"])
def test_accumulate_blocks_into_a_target(strategy: str) -> None:
    """The same with tl.dot, into a target whose dimensions are permuted."""
    application = small(torch.float32)[0]
    start = torch.randn(40, 4, 16).permute(1, 2, 0)
    target = start.clone()
    with insum.settings(scatter=strategy):
        run(application.statement, C=target, **application.values)
    assert relative_error(target, application.expected() + start) < 2e-6


def test_accumulate_a_sum_of_products() -> None:
    a, b, c = torch.randn(5, 7), torch.randn(7), torch.randn(5)
    target = torch.randn(5).half()
    wanted = target.double() + a.double() @ b.double() - 2 * c.double()
    assert (
        error(
            run("y[i] += A[i,j] * b[j] - 2 * c[i]", y=target, A=a.half(), b=b.half(), c=c.half()),
            wanted,
        )
        < 4e-3
    )


# --- sums of products, pointwise functions, extrema, scalars --------------------------------------


def test_pointwise_functions_and_numbers() -> None:
    a, x, b = torch.randn(5, 7), torch.arange(7.0), torch.randn(5)
    wanted = (a * x).relu().sum(1) + 2 * b - 0.5 * a.tanh().sum(1)
    assert (
        error(
            run(
                "y[i] = relu(A[i,j] * x[j]) + 2 * b[i] - alpha * tanh(A[i,j])",
                A=a,
                x=x,
                b=b,
                alpha=0.5,
            ),
            wanted,
        )
        < 1e-6
    )


def test_functions_of_numbers_alone() -> None:
    a = torch.tensor([1, 2, 3])
    assert (
        error(
            run("y[i] = A[i] * log(W) + exp(2)", A=a, W=3),
            a * torch.tensor(3.0).log() + torch.tensor(2.0).exp(),
        )
        < 1e-6
    )


def test_scalars_and_histograms() -> None:
    index = torch.randint(0, 4, (30,))
    assert run("t[] = A[i,i]", A=3 * torch.eye(6)) == 18
    assert torch.equal(run("h[I[p]] += 1", {0: 4}, I=index), torch.bincount(index, minlength=4))
    assert torch.equal(
        run("h[I[p]] += 1", {0: 4}, I=index.sort().values), torch.bincount(index, minlength=4)
    )


@pytest.mark.parametrize("strategy", ["auto", "segment"])
@pytest.mark.parametrize("channels", [8, 20])
def test_entries_with_matrices_of_their_own(channels: int, strategy: str) -> None:
    x, w = torch.randn(9, channels), torch.randn(37, channels, channels + 4)
    s, d = torch.randint(0, 9, (37,)), torch.randint(0, 7, (37,))
    dy = torch.randn(7, channels + 4)
    with insum.settings(scatter=strategy):
        y = run("y[d[e],o] += x[s[e],i] * W[e,i,o]", {0: 7}, x=x, W=w, s=s, d=d)
        dx = run("dx[s[e],i] += dy[d[e],o] * W[e,i,o]", {0: 9}, dy=dy, W=w, s=s, d=d)
        dw = run("dW[e,i,o] += dy[d[e],o] * x[s[e],i]", dy=dy, x=x, s=s, d=d)
    wanted = torch.zeros_like(dy).index_add(0, d, (x[s][:, None] @ w)[:, 0])
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    wanted = torch.zeros_like(x).index_add(0, s, (w @ dy[d][:, :, None])[:, :, 0])
    torch.testing.assert_close(dx, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dw, x[s][:, :, None] * dy[d][:, None])


@pytest.mark.parametrize("strategy", ["auto", "segment", "atomic"])
@pytest.mark.parametrize("operator", ["max=", "min="])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_extrema(operator: str, strategy: str, dtype: torch.dtype) -> None:
    index, values = torch.randint(0, 4, (30,)), (10 * torch.randn(30, 6)).to(dtype)
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    nothing = (info.min if operator == "max=" else info.max) * (
        INF if dtype.is_floating_point else 1
    )
    start = torch.full((5, 6), nothing, dtype=dtype)
    wanted = start.scatter_reduce(
        0, index[:, None].expand(30, 6), values, "amax" if operator == "max=" else "amin"
    )
    with insum.settings(scatter=strategy):
        assert torch.equal(run(f"C[I[p],n] {operator} V[p,n]", {0: 5}, I=index, V=values), wanted)


#: What is there, and what arrives: both signs, zeros, infinities and NaN.
SIGNED = torch.tensor([-INF, -2.5, -1.0, -0.0, 0.0, 1.0, 2.5, INF, NAN])


@pytest.mark.parametrize("operator", ["max=", "min="])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_atomics_are_sent_where_they_change_something(operator: str, dtype: torch.dtype) -> None:
    numbers = SIGNED.to(dtype) if dtype.is_floating_point else torch.arange(-4, 5)
    old, new = numbers.repeat_interleave(len(numbers)), numbers.repeat(len(numbers))
    wanted = torch.maximum(old, new) if operator == "max=" else torch.minimum(old, new)
    places = torch.randperm(len(old))
    with insum.settings(scatter="atomic"):
        got = run(f"y[d[e]] {operator} v[e]", y=old.clone(), d=places, v=new[places])
    torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("operator", ["max=", "min="])
def test_what_meets_nan_is_nan(operator: str) -> None:
    """As in torch, in sums over the tile and from step to step, for rows of any length."""
    rows = torch.tensor([0] * 40 + [1, 1, 3])
    values = torch.randn(43, 5)
    values[7, 2], values[39, 0], values[42, 4] = (float("nan"),) * 3
    want = torch.full((4, 5), -torch.inf if operator == "max=" else torch.inf)
    want = want.scatter_reduce(
        0, rows[:, None].expand(43, 5), values, "amax" if operator == "max=" else "amin"
    )
    for scatter in ("auto", "atomic"):
        with insum.settings(scatter=scatter):
            got = run(f"C[r[e],f] {operator} v[e,f]", {0: 4}, r=rows, v=values)
        torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(
        run(f"C[e] {operator} v[e,f]", v=values),
        values.amax(1) if operator == "max=" else values.amin(1),
        equal_nan=True,
    )
    torch.testing.assert_close(
        run("C[e,f] = relu(v[e,f])", v=values), values.relu(), equal_nan=True
    )


@pytest.mark.parametrize("heads", [1, 3, 4, 20])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_heads_beside_rows(heads: int, order: str) -> None:
    """A short kept variable shares the tile with the rows of a segmented output, long and cut rows
    included.
    """
    lengths = torch.tensor([0, 1, 300, 2, 0, 40, 7])
    rows = torch.repeat_interleave(torch.arange(7), lengths)
    rows = rows if order == "sorted" else rows[torch.randperm(len(rows))]
    cols, a, x = (
        torch.randint(0, 9, (len(rows),)),
        torch.randn(len(rows), heads),
        torch.randn(9, heads, 16),
    )
    want = torch.zeros(7, heads, 16).index_add(0, rows, a[:, :, None] * x[cols])
    got = run("C[r[e],h,c] = a[e,h] * x[k[e],h,c]", {0: 7}, r=rows, k=cols, a=a, x=x)
    assert error(got, want.double()) < 1e-5


def test_zero_sizes() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(
        run("C[I[p],n] += V[p,n]", {0: 3}, I=none, V=torch.ones(0, 4)), torch.zeros(3, 4)
    )
    assert run("C[I[p],n] += V[p,n]", {0: 3}, I=torch.tensor([0]), V=torch.ones(1, 0)).shape == (
        3,
        0,
    )
    assert torch.equal(run("y[i] = A[i,j]", A=torch.ones(2, 0)), torch.zeros(2))
    assert torch.equal(run("y[i] max= A[i,j]", A=torch.ones(2, 0)), torch.full((2,), -INF))
    target = torch.ones(3, 4)
    assert torch.equal(
        run("C[I[p],n] += V[p,n]", C=target, I=none, V=torch.ones(0, 4)), torch.ones(3, 4)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_without_entries(strategy: str) -> None:
    index, values = torch.tensor([1, 4, 6]), torch.randn(3, 5)
    with insum.settings(scatter=strategy):
        assert (
            error(
                run("C[I[p],n] += V[p,n]", {0: 8}, I=index, V=values),
                torch.zeros(8, 5).index_add(0, index, values),
            )
            < 1e-6
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_absent_entries_contribute_nothing(strategy: str, bad: float) -> None:
    """Not even where their values are infinite, or where the row that a clamped index would read
    is.
    """
    index, slots = torch.tensor([0, 1, 1, 3]), torch.tensor([[1, -1], [2, 1], [-1, -1], [2, -1]])
    values, dense = torch.randn(4, 2), torch.randn(3, 9)
    values[slots < 0] = bad
    dense[0] = bad
    there = slots >= 0
    parts = (
        torch.where(there, values, 0)[:, :, None]
        * torch.where(there[:, :, None], dense[slots.clamp(min=0)], 0)
    ).sum(1)
    with insum.settings(scatter=strategy):
        result = run(
            "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]",
            {0: 5},
            ("AK",),
            AM=index,
            AV=values,
            AK=slots,
            B=dense,
        )
    assert error(result, torch.zeros(5, 9).index_add(0, index, parts)) < 1e-6


def test_absent_places_of_the_output() -> None:
    index, values = torch.tensor([2, -1, 0, -1]), torch.randn(4, 5)
    for strategy in STRATEGIES:
        with insum.settings(scatter=strategy):
            result = run("C[I[p],n] += V[p,n]", {0: 4}, ("I",), I=index, V=values)
        assert (
            error(result, torch.zeros(4, 5).index_add(0, torch.tensor([2, 0]), values[[0, 2]]))
            < 1e-6
        ), strategy


def test_padding_read_on_both_sides() -> None:
    """The index that scatters also gathers, where its padding counts as well."""
    index, dense = torch.tensor([3, -1, 0, 3]), torch.randn(5, 4)
    there = index[index >= 0]
    wanted = torch.zeros(5, 4).index_add(0, there, dense[there].sum(0).expand(3, 4))
    for strategy in STRATEGIES:
        with insum.settings(scatter=strategy):
            assert (
                error(run("C[D[j],i] = A[D[k],i]", {0: 5}, ("D",), D=index, A=dense), wanted) < 1e-6
            ), strategy


def test_absent_points_of_a_stored_output() -> None:
    """Where another index says that a point is absent, its place gets zero, and no other place is
    touched.
    """
    to, source = torch.tensor([3, 0, 1]), torch.tensor([-1, 2, -1])
    dense, scale = torch.randn(3, 5), torch.randn(3, 5)
    wanted = torch.zeros(4, 5)
    wanted[0] = dense[2] * scale[1]
    assert (
        error(
            run("C[D[p],n] = A[E[p],n] * B[p,n]", {0: 4}, ("E",), D=to, E=source, A=dense, B=scale),
            wanted,
        )
        < 1e-6
    )
    assert (
        error(
            run(
                "C[D[p],n] = A[E[p],n] * B[p,n]",
                {0: 4},
                ("E",),
                D=torch.tensor([3, 0, 1]),
                E=source,
                A=dense,
                B=scale,
            ),
            wanted,
        )
        < 1e-6
    )
    target = torch.randn(4, 5)
    wanted = wanted + target
    assert (
        error(
            run(
                "C[D[p],n] += A[E[p],n] * B[p,n]",
                None,
                ("E",),
                D=to,
                E=source,
                A=dense,
                B=scale,
                C=target,
            ),
            wanted,
        )
        < 1e-6
    )


@pytest.mark.parametrize("index", [[0, 0, 2, 2, 3], [2, 0, 3, 2, 0]])
def test_a_scale_for_each_block(index: list[int]) -> None:
    """A factor that has the entry but not the contracted index is multiplied after each entry's
    product.
    """
    rows, columns = torch.tensor(index), torch.tensor([1, 0, 2, 1, 1])
    blocks, scale, both, dense = (
        torch.randn(5, 16, 16),
        torch.randn(5),
        torch.randn(5, 16, 24),
        torch.randn(3, 16, 24),
    )
    products = blocks @ dense[columns]
    for factor, parts in (
        ("S[p]", scale[:, None, None] * products),
        ("T[p,bm,n]", both * products),
    ):
        values = {"S": scale} if factor == "S[p]" else {"T": both}
        result = run(
            f"C[AM[p],bm,n] += {factor} * AV[p,bm,bk] * B[AK[p],bk,n]",
            {0: 5},
            AM=rows,
            AV=blocks,
            AK=columns,
            B=dense,
            **values,
        )
        assert error(result, torch.zeros(5, 16, 24).index_add(0, rows, parts)) < 1e-5, factor


def test_a_sorted_index_of_two_dimensions_over_tensors_that_do_not_flatten() -> None:
    """Entries have no common number there, so that they are walked through positions."""
    index, values = torch.tensor([[0, 0, 1], [1, 3, 3]]), torch.randn(3, 2).t()
    for strategy in STRATEGIES:
        with insum.settings(scatter=strategy):
            assert (
                error(
                    run("C[D[p,q]] += V[p,q]", {0: 4}, D=index, V=values),
                    torch.zeros(4).index_add(0, index.reshape(-1), values.reshape(-1)),
                )
                < 1e-6
            )


def test_registers_take_one_side_of_a_product() -> None:
    """Both variables of the index would be sides of a matrix product; the register tile can take
    only one of them.
    """
    index, a, b, scale = (
        torch.randint(0, 5, (9, 8)),
        torch.randn(9, 8),
        torch.randn(8, 8),
        torch.randn(9, 8),
    )
    wanted = torch.zeros(5).index_add(0, index.reshape(-1), (scale * (a @ b.t())).reshape(-1))
    for dot in ("auto", "always", "never"):
        with insum.settings(scatter="onehot", dot=dot):
            assert (
                error(
                    run("C[D[p,q]] = A[p,k] * B[q,k] * W[p,q]", {0: 5}, D=index, A=a, B=b, W=scale),
                    wanted,
                )
                < 1e-5
            )


# --- names ----------------------------------------------------------------------------------------

HOSTILE = (
    "class",
    "lambda",
    "tl",
    "triton",
    "pid",
    "acc",
    "A_s0",
    "A_ptr",
    "row",
    "slot",
    "t",
    "out",
    "out_at",
    "out_stride",
    "out_stride0",
    "work_at",
)
HOSTILE += ("work", "seg_start", "m_ok", "range", "task", "_", "__", "insum_kernel")


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_for_a_tensor(name: str) -> None:
    """As the output, as an operand, and as the index tensor; none may take the place of a name of
    the kernel.
    """
    rows, columns, scale, dense = (
        torch.tensor([0, 1, 1, 4]),
        torch.tensor([2, 0, 1, 2]),
        torch.randn(4),
        torch.randn(3, 9),
    )
    wanted = torch.zeros(6, 9).index_add(0, rows, scale[:, None] * dense[columns])
    for role in ("C", "AM", "AV", "AK", "B"):
        names = {key: name if key == role else key for key in ("C", "AM", "AV", "AK", "B")}
        statement = "{C}[{AM}[p],n] += {AV}[p] * {B}[{AK}[p],n]".format(**names)
        values = {names["AM"]: rows, names["AV"]: scale, names["AK"]: columns, names["B"]: dense}
        for strategy in ("segment", "atomic"):
            with insum.settings(scatter=strategy):
                assert error(run(statement, {0: 6}, **values), wanted) < 1e-6, (statement, strategy)


@pytest.mark.parametrize("name", HOSTILE)
def test_any_name_for_an_index(name: str) -> None:
    application = small(torch.float32)[1]
    for variable in ("p", "q", "n", "bk"):
        statement = re.sub(rf"\b{variable}\b", name, application.statement)
        assert name in statement
        assert (
            relative_error(
                run(statement, dict(application.sizes), application.padded, **application.values),
                application.expected(),
            )
            < 2e-6
        ), statement


def test_names_that_differ_in_what_is_appended() -> None:
    """A tensor ``A`` of two dimensions has strides ``A_s0`` and ``A_s1``; ``A_s0`` may be a tensor
    as well, and ``i_size`` an index.
    """
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    statement = "C[i,i_size] = A[i,A_i] * A_s0[A_i,i_size]"
    assert error(run(statement, A=a, A_s0=b), a @ b) < 1e-6


def test_memory_of_results_is_poisoned() -> None:
    """Else the tests of this file would not see what a kernel forgets to write."""
    x = torch.randn(5, 3)
    problem = bound("C[i,j] = x[i,j]", {"x": x})
    look = inspection.Look(problem, {"x": x})
    program = look.program()
    assert isinstance(program, Program) and look.ready(program).empty().isnan().all()


# --- numbers --------------------------------------------------------------------------------------

BIG = 100_000


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize(
    ("statement", "numbers", "factor"),
    [
        ("C[i] = a * b * x[i]", {"a": BIG, "b": BIG}, BIG * BIG),
        ("C[i] = (a + b) * x[i]", {"a": 2**31 - 1, "b": 2**31 - 1}, 2**32 - 2),
        ("C[i] = -3 * a * b * x[i]", {"a": BIG, "b": 1}, -3 * BIG),
        ("C[i] = a * b * x[i]", {"a": True, "b": BIG}, BIG),
        ("C[i] = a * x[i]", {"a": 2**40}, 2**40),
    ],
)
def test_integers_that_are_passed_do_not_overflow(
    statement: str, numbers: dict[str, int], factor: int, dtype: torch.dtype
) -> None:
    """A kernel gets an integer in 32 bits where it fits, but may not compute so."""
    x = torch.tensor([1, 2, -3, 0, 5], dtype=dtype)
    assert error(run(statement, x=x, **numbers), x * factor) < 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("operator", "wanted"), [("max=", [-3, -3]), ("min=", [-3, -3]), ("+=", [-3, -6])]
)
def test_a_number_alone_where_points_are_absent(
    operator: str, wanted: list[int], strategy: str
) -> None:
    rows = torch.tensor([0, -1, 1, 0, -1, 1, 0], dtype=torch.int16)
    with insum.settings(scatter=strategy):
        result = run(
            f"C[E[2*D[j] + j]] {operator} -a",
            {0: 2},
            ("E",),
            D=torch.tensor([0, 0, 0, 1], dtype=torch.int8),
            E=rows,
            a=3,
        )
    assert result.dtype == torch.int64 and result.tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("rows", [128, 256, 300])
def test_rows_that_the_dtype_of_the_index_does_not_hold(dtype: torch.dtype, rows: int) -> None:
    order = torch.tensor([0, 0, 3, 99])
    for index in (order, order.flip(0), order[:, None].expand(4, 2).contiguous()):
        value = torch.arange(1.0, 1 + index.numel()).reshape(index.shape)
        statement = "y[r[p]] = v[p]" if index.dim() == 1 else "y[r[p,q]] = v[p,q]"
        got = run(statement, {0: rows}, r=index.to(dtype), v=value)
        assert torch.equal(
            got, torch.zeros(rows).index_add(0, index.reshape(-1), value.reshape(-1))
        )


ONE_HOT = {
    "rows": ("C[r[p],n] = x[p,n]", (40, 32), (16, 32)),
    "columns": ("C[n,r[p]] = x[n,p]", (33, 40), (33, 16)),
    "columns of rows": ("C[n,r[p]] = x[p,n]", (40, 32), (32, 16)),
    "one place each": ("C[r[p]] = x[p,n]", (40, 32), (16,)),
    "rows of matrices": ("C[h,r[p],n] = x[p,h,n]", (40, 3, 20), (3, 16, 20)),
}


@pytest.mark.parametrize("name", ONE_HOT)
def test_register_tiles_in_every_orientation(name: str) -> None:
    """On tensor cores, where all sides are long enough, and elsewhere."""
    statement, shape, out = ONE_HOT[name]
    torch.manual_seed(0)
    values = {"r": torch.randint(0, 16, (40,)), "x": torch.randn(shape)}
    with insum.settings(backend="fused", require_fused=True, scatter="onehot"):
        found = insum.insum(statement, out_shape=out, **values)
    with insum.settings(backend="graph", require_fused=False):
        torch.testing.assert_close(found, insum.insum(statement, out_shape=out, **values))


def test_register_tiles_of_matrices_that_are_scattered() -> None:
    torch.manual_seed(0)
    values = {"r": torch.randint(0, 10, (64,)), "c": torch.randint(0, 5, (64,))}
    values |= {"a": torch.randn(64, 2, 17, 2), "b": torch.randn(5, 2, 2, 40)}
    statement = "o[r[p],h,i,n] = a[p,h,i,j] * b[c[p],h,j,n]"
    with insum.settings(**ONLY_FUSED):
        found = insum.insum(statement, sizes={0: 10}, **values)
    each = torch.einsum("phij,phjn->phin", values["a"], values["b"][values["c"]])
    wanted = torch.zeros(10, 2, 17, 40).index_add(0, values["r"], each)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
