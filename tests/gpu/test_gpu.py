"""What only a GPU can tell: results at full size, CUDA graphs, streams, memory, determinism,
synchronisation.

Runs under pytest (``pytest -m gpu``) and without it: ``python tests/gpu/test_gpu.py [--processes 8]
[--only NAME]``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import applications  # noqa: E402
import insum  # noqa: E402
from applications import Application, relative_error  # noqa: E402
from insum import memory  # noqa: E402
from insum.runtime import inspection  # noqa: E402
from insum.testing import assert_close  # noqa: E402
from scatters import draw_scatters  # noqa: E402

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:  # the functions below need nothing of it
    pass

CUDA = "cuda"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-12}
NAMES = [a.name for a in applications.usual(filled=False)]
#: Calls after which nothing more is planned, compiled or promoted.
WARM = 6


# --- tools ----------------------------------------------------------------------------------------


def usual(name: str, **options: Any) -> Application:
    return applications.usual(CUDA, **options)[NAMES.index(name)]


def clear() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def poison(*tensors: Tensor) -> None:
    """Leave NaN in the memory that is handed out next for tensors of these sizes."""
    held = [
        torch.full_like(t, math.nan) for t in tensors if t.is_floating_point() for _ in range(2)
    ]
    del held


@contextmanager
def only_fused(**options: Any) -> Iterator[None]:
    with insum.settings(require_fused=True, **options):
        yield


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def for_each(names: list[str], check: Callable[[str], None], **options: Any) -> None:
    """One test function for each application, named after it."""
    for name in names:

        def test(name: str = name) -> None:
            with only_fused():
                check(name, **options)

        label = "_".join("".join(c if c.isalnum() else " " for c in name).lower().split())
        test.__doc__ = check.__doc__
        test.__name__ = test.__qualname__ = f"test_{check.__name__.strip('_')}_{label}" + "".join(
            f"_{v}" for v in options.values()
        ).replace("torch.", "")
        # pytest would take the default for a fixture's name.
        globals()[test.__name__] = _without_arguments(test)


def _without_arguments(test: Callable[..., None]) -> Callable[[], None]:
    def run() -> None:
        test()

    run.__name__ = run.__qualname__ = test.__name__
    run.__doc__ = test.__doc__
    return run


# --- the applications, forward and backward -------------------------------------------------------


def _values(name: str, half: torch.dtype = torch.float16) -> None:
    """Forward and backward through autograd, against float64."""
    application = usual(name, half=half)
    upstream = application.upstream()
    leaves = {
        n: v.clone().requires_grad_(n in application.wanted) for n, v in application.values.items()
    }
    for name_, tensor in application.values.items():
        if not tensor.is_floating_point():
            leaves[name_] = tensor  # with the facts that its format declared
    poison(upstream, *(leaves[n] for n in application.wanted))
    out = insum.insum(
        application.statement, sizes=dict(application.sizes), padded=application.padded, **leaves
    )
    allowed = TOLERANCE[out.dtype]
    assert relative_error(out.detach(), application.expected()) < allowed, "forward"
    poison(*(leaves[n].detach() for n in application.wanted))
    out.backward(upstream)
    for wanted, expected in application.expected_gradients(upstream).items():
        gradient = leaves[wanted].grad
        assert gradient is not None and gradient.dtype == leaves[wanted].dtype
        assert relative_error(gradient, expected) < allowed, f"gradient of {wanted}"


for_each(NAMES, _values)
for_each(
    [n for n in NAMES if "block" in n or "convolution" in n or "Group" in n],
    _values,
    half=torch.bfloat16,
)


def test_strategies_on_scattered_statements() -> None:
    """Few, since each is compiled; drawn_cases.py tries many."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64)
    for number, case in enumerate(draw_scatters(18, seed=9, dtypes=dtypes)):
        strategy = ("auto", "segment", "onehot", "unrolled", "atomic", "store")[number % 6]
        with only_fused(scatter=strategy, dot=("auto", "always")[number % 2]):
            assert_close(case.to(CUDA).run(), case.expected(), case.precision)


# --- CUDA graphs ----------------------------------------------------------------------------------


def _graphs(name: str) -> None:
    """Capture once, change the values in place, replay: the same as a call."""
    application = usual(name)
    for call in application.calls():
        for _ in range(WARM):
            call.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call.run()
        for value in call.values.values():
            if value.is_floating_point():
                value.mul_(-0.5)
        eager = call.run()
        captured.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        strategy = inspection.strategy(call.problem(), call.values)
        if is_promised(call) and "atomic" not in strategy and "onehot" not in strategy:
            assert torch.equal(captured, eager), call.name
        else:
            # A graph must be right for any index values, so that it knows less of them than a
            # call does, and sums in another order.
            assert relative_error(captured, eager.double()) < TOLERANCE[eager.dtype], call.name


def is_promised(call: applications.Call) -> bool:
    """Whether all index tensors of a call were declared not to change, as those of formats are."""
    indices = [v for v in call.values.values() if not v.is_floating_point()]
    return all(memory.entry_of(index).declared for index in indices)


for_each(NAMES, _graphs)


# --- determinism ----------------------------------------------------------------------------------


def _determinism(name: str) -> None:
    """A hundred runs, bit by bit."""
    application = usual(name)
    with deterministic():
        for call in application.calls():
            first = call.run()
            assert relative_error(first, first.double()) == 0.0, "finite"
            for _ in range(99):
                assert torch.equal(call.run(), first), call.name


for_each([n for n in NAMES if n != "convolution by offset"], _determinism)


def test_determinism_where_a_table_has_no_inverse() -> None:
    application = applications.convolution(
        voxels=2000,
        offsets=9,
        inputs=64,
        outputs=64,
        layout="by voxel",
        one_to_one=False,
        dtype=torch.float16,
        device=CUDA,
    )
    upstream = application.upstream()
    call, expected = (
        application.gradients(upstream)["In"],
        application.expected_gradients(upstream)["In"],
    )
    with only_fused(), deterministic():
        first = call.run()
        assert relative_error(first, expected) < 2e-3
        assert all(torch.equal(call.run(), first) for _ in range(99))


# --- memory ---------------------------------------------------------------------------------------


def size_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def large(name: str) -> Application:
    """Sizes of real graphs and clouds, where what is kept per row and per entry is seen beside the
    data and not beside nothing.
    """
    spmm = {
        "rows": 100_000,
        "columns": 100_000,
        "n": 128,
        "entries": 1_000_000,
        "heavy": 3000,
        "dtype": torch.float32,
    }
    table = {
        "voxels": 40_000,
        "offsets": 27,
        "inputs": 128,
        "outputs": 128,
        "symmetric": True,
        "dtype": torch.float16,
    }
    match name:
        case "SpMM, COO":
            return applications.spmm(**spmm, device=CUDA)
        case "SpMM, GroupCOO":
            return applications.spmm(**spmm, group=4, device=CUDA)
        case "convolution by voxel" | "convolution by offset":
            return applications.convolution(
                **table, layout=name.removeprefix("convolution "), device=CUDA
            )
    return usual(name)


def _memory(name: str) -> None:
    """Peak of forward and backward: inputs and outputs, and a tenth of that. Kept schedules and
    orders are counted in.
    """
    clear()
    start = torch.cuda.memory_allocated()
    application = large(name)
    leaves = {
        n: v.detach().requires_grad_() if n in application.wanted else v
        for n, v in application.values.items()
    }
    upstream = application.upstream()
    inputs = size_of(*leaves.values(), upstream)
    options: dict[str, Any] = {
        "sizes": dict(application.sizes),
        "padded": application.padded,
        **leaves,
    }

    def step() -> Tensor:
        out = insum.insum(application.statement, **options)
        out.backward(upstream)
        return out

    for _ in range(WARM):
        step()
        for wanted in application.wanted:
            leaves[wanted].grad = None
    clear()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        result = insum.insum(application.statement, **options)
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated() - start
    outputs = size_of(result)
    # Contributions to a half-precision output meet in float32 where they meet in atomics: that
    # buffer is part of the result.
    wide = 2 * outputs if "atomic" in _strategies(application) and result.dtype.itemsize == 2 else 0
    assert forward <= 1.1 * (inputs + outputs) + wide, (
        f"forward: {forward} bytes for {inputs} + {outputs}"
    )
    del result
    clear()
    torch.cuda.reset_peak_memory_stats()
    out = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - start
    outputs = size_of(out, *(leaves[n].grad for n in application.wanted))  # type: ignore[arg-type]
    largest = max(size_of(leaves[n]) for n in application.wanted)
    wide = 2 * largest if "atomic" in _strategies(application) and out.dtype.itemsize == 2 else 0
    assert peak <= 1.1 * (inputs + outputs) + wide, (
        f"forward and backward: {peak} bytes for {inputs} + {outputs}"
    )


def _strategies(application: Application) -> str:
    return " ".join(
        inspection.strategy(call.problem(), call.values) for call in application.calls(filled=False)
    )


for_each(NAMES, _memory)


# --- streams and synchronisation ------------------------------------------------------------------


def _warm_calls_do_not_wait(name: str) -> None:
    """Forward and backward, after some calls: nothing is asked of the device."""
    application = usual(name)
    leaves = {
        n: v.detach().requires_grad_() if n in application.wanted else v
        for n, v in application.values.items()
    }
    upstream = application.upstream()

    def step() -> None:
        out = insum.insum(
            application.statement,
            sizes=dict(application.sizes),
            padded=application.padded,
            **leaves,
        )
        out.backward(upstream)

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    with no_synchronisation():
        step()
        step()


for_each(NAMES, _warm_calls_do_not_wait)


def test_a_second_stream() -> None:
    """Kernels go to the current stream: one that is still asleep has not written its input yet."""
    application = usual("SpMM, COO")
    with only_fused():
        expected = application.run()
        dense = application.values["B"]
        kept = dense.clone()
        stream = torch.cuda.Stream()
        dense.fill_(math.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            dense.copy_(kept)
            result = application.run()
        stream.synchronize()
        assert torch.equal(result, expected)


def test_two_threads() -> None:
    import threading

    application = usual("block SpMM, BlockGroupCOO")
    with only_fused():
        expected = application.run()
        found: list[bool] = []

        def work() -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                results = [application.run() for _ in range(20)]
                torch.cuda.current_stream().synchronize()
                found.append(all(torch.equal(r, expected) for r in results))

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 4


# --- sizes and alignment --------------------------------------------------------------------------


def test_reading_past_two_to_the_31() -> None:
    clear()
    rows, columns = 2**16 + 7, 2**15
    dense = torch.empty(rows, columns, dtype=torch.float16, device=CUDA).normal_()
    last = torch.tensor([rows - 1, 0, rows - 2, rows - 1], device=CUDA)
    with only_fused():
        assert torch.equal(insum.insum("C[p,n] = B[I[p],n]", I=last, B=dense), dense[last])
        index, scale = (
            torch.tensor([0, 1, 1, 3], device=CUDA),
            torch.randn(4, device=CUDA, dtype=torch.float16),
        )
        result = insum.insum(
            "C[AM[p],n] += AV[p] * B[AK[p],n]", sizes={0: 4}, AM=index, AV=scale, AK=last, B=dense
        )
        wanted = torch.zeros(4, columns, device=CUDA, dtype=torch.float64).index_add_(
            0, index, scale.double()[:, None] * dense[last].double()
        )
        assert relative_error(result, wanted) < 2e-3


def test_blocks_past_two_to_the_31() -> None:
    clear()
    count, block, columns = 2**11 + 3, 32, 2**15
    dense = torch.empty(count, block, columns, dtype=torch.float16, device=CUDA).normal_()
    rows, last = (
        torch.tensor([0, 0, 2], device=CUDA),
        torch.tensor([count - 1, 0, count - 2], device=CUDA),
    )
    blocks = torch.randn(3, block, block, device=CUDA, dtype=torch.float16)
    with only_fused():
        result = insum.insum(
            "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]",
            sizes={0: 3},
            AM=rows,
            AV=blocks,
            AK=last,
            B=dense,
        )
    wanted = torch.zeros(3, block, columns, device=CUDA, dtype=torch.float64).index_add_(
        0, rows, blocks.double() @ dense[last].double()
    )
    assert relative_error(result, wanted) < 2e-3


def test_writing_past_two_to_the_31() -> None:
    clear()
    rows, columns = 2**16 + 7, 2**15
    index = torch.tensor([rows - 1, 5, rows - 1, 0], device=CUDA)
    values = torch.randn(4, columns, device=CUDA, dtype=torch.float16)
    for strategy in ("segment", "atomic"):
        with only_fused(scatter=strategy):
            if strategy == "atomic":
                target = torch.zeros(rows, columns, device=CUDA, dtype=torch.float32)
                result = insum.insum("C[I[p],n] += V[p,n]", C=target, I=index, V=values.float())
            else:
                result = insum.insum("C[I[p],n] = V[p,n]", sizes={0: rows}, I=index, V=values)
        assert relative_error(result[rows - 1], (values[0] + values[2]).double()) < 2e-3
        assert (
            relative_error(result[5], values[1].double()) < 2e-3
            and relative_error(result[0], values[3].double()) < 2e-3
        )
        assert (
            int(torch.count_nonzero(result[1:5])) == 0
            and int(torch.count_nonzero(result[6 : rows - 1])) == 0
        )
        del result
        clear()


def test_pointers_that_are_not_aligned() -> None:
    """A kernel kept for aligned tensors is not used for others, and the other way round."""
    index = torch.arange(64, device=CUDA) // 4
    memory = torch.randn(64 * 32 + 8, device=CUDA, dtype=torch.float16)
    with only_fused():
        for offset in (0, 1, 0, 3, 8, 0):
            values = memory[offset : offset + 64 * 32].view(64, 32)
            wanted = torch.zeros(16, 32, device=CUDA, dtype=torch.float64).index_add_(
                0, index, values.double()
            )
            assert (
                relative_error(
                    insum.insum("C[I[p],n] = V[p,n]", sizes={0: 16}, I=index, V=values), wanted
                )
                < 2e-3
            ), offset


def test_programs_of_one_warp() -> None:
    """Triton 3.6 compiles some of them wrongly, which then get more warps."""
    draw = torch.Generator(CUDA).manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(3000, 2048, device=CUDA, dtype=dtype)
        for part in (1500, 1501, 1504):
            p, q = (torch.randint(0, 2048, (part,), device=CUDA, generator=draw) for _ in "pq")
            wanted = x[p[:, None], q]
            for m, n in ((1, 256), (2, 64), (2, 128), (2, 256), (2, 512), (4, 256)):
                config = insum.Config(m=m, n=n, k=1, warps=1, stages=1)
                poison(wanted)
                with only_fused():
                    found = insum.insum("y[i,j] = x[p[i],q[j]]", config=config, x=x, p=p, q=q)
                assert torch.equal(found, wanted), (dtype, part, m, n)


def test_factors_of_8_bits() -> None:
    places = torch.arange(64, device=CUDA)
    for narrow, dtype in itertools.product(
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float16, torch.bfloat16, torch.float32),
    ):
        values = torch.randn(64, 32, 20, device=CUDA).to(narrow)
        given = {"I": places // 4, "J": places % 9, "V": values}
        b = torch.randn(9, 20, 40, device=CUDA).to(dtype)
        each = values.double() @ b.double()[places % 9]
        wanted = each.new_zeros(16, 32, 40).index_add_(0, places // 4, each)
        with only_fused():
            found = insum.insum("C[I[p],m,n] = V[p,m,k] * B[J[p],k,n]", sizes={0: 16}, B=b, **given)
        assert found.dtype == dtype and relative_error(found, wanted) < 1e-2


def test_numbers_that_change() -> None:
    """Triton compiles for the value 1 and for multiples of 16."""
    x = torch.arange(5.0, device=CUDA)
    with only_fused():
        for number in (1, 2, 16, 1.0, 0.5, 17, -1, 0, True, 2**40):
            assert torch.equal(insum.insum("y[i] = a * x[i]", a=number, x=x), number * x), number


# --- precision ------------------------------------------------------------------------------------


def test_numbers_in_float64() -> None:
    """Passed as doubles, written exactly, and functions of them computed so."""
    x = torch.randn(300, 70, device=CUDA, dtype=torch.float64)
    tenth = torch.tensor(0.1, device=CUDA, dtype=torch.float64)
    for statement, values, wanted in (
        ("y[i,j] = a * x[i,j]", {"a": 0.1}, 0.1 * x),
        ("y[i,j] = a * x[i,j]", {"a": 1e300}, 1e300 * x),
        ("y[i,j] = k * x[i,j]", {"k": 2**40 + 1}, float(2**40 + 1) * x),
        ("y[i,j] = reciprocal(3) * 0.1 * x[i,j]", {}, 0.1 * x / 3),
        ("y[i,j] = exp(a + 0.1) * x[i,j]", {"a": 0.1}, (2 * tenth).exp() * x),
        ("y[i,j] = tanh(a * x[i,j])", {"a": 0.1}, (0.1 * x).tanh()),
        ("y[i] = sigmoid(a * x[i,j]) * 0.1", {"a": 0.1}, (0.1 * x).sigmoid().sum(1) * 0.1),
        ("y[i] max= a * x[i,j] + 0.1", {"a": 0.1}, (0.1 * x + 0.1).amax(1)),
    ):
        for _ in range(3):
            with only_fused():
                got = insum.insum(statement, x=x, **values)
            torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-14)
    C = torch.zeros(5, device=CUDA, dtype=torch.float64)
    with only_fused():
        insum.insum("C[i] += a", C=C, a=0.1)
        insum.insum("C[i] += 0.1", C=C)
    assert C.tolist() == [0.2] * 5


def test_products_of_several_precisions_into_any_target() -> None:
    torch.manual_seed(0)
    A, B = torch.randn(40, 30, device=CUDA), torch.randn(40, 50, device=CUDA, dtype=torch.float64)
    C = torch.randn(50, 30, device=CUDA)
    for right in ("A[i,j] + B[i,k] * C[k,j]", "B[i,k] * C[k,j] + A[i,j]"):
        held = torch.randn(35, 45, device=CUDA)
        before, target = held.clone(), held.t()[2:42, 3:33]
        want = target.double() + A.double() + B @ C.double()
        with only_fused():
            insum.insum(f"out[i,j] += {right}", out=target, A=A, B=B, C=C)
        torch.testing.assert_close(target.double(), want, rtol=1e-5, atol=1e-5)
        target.copy_(before.t()[2:42, 3:33])
        assert torch.equal(held, before), "what lies around the target was written"


def test_rows_that_the_dtype_of_the_index_does_not_hold() -> None:
    for dtype in (torch.int8, torch.uint8, torch.int16):
        rows = torch.tensor([0, 0, 3, 99], device=CUDA)
        v = torch.arange(1.0, 5.0, device=CUDA)
        for index in (rows, rows.flip(0)):
            with only_fused():
                got = insum.insum("y[r[p]] = v[p]", r=index.to(dtype), v=v, out_shape=(300,))
            assert torch.equal(got, torch.zeros(300, device=CUDA).index_add(0, index, v))


def test_gradients_of_extrema_that_are_nan() -> None:
    nan = float("nan")
    a = torch.tensor([[1.0, nan, 3.0, nan], [1.0, 2.0, 2.0, 1.0]], device=CUDA, requires_grad=True)
    with only_fused():
        y = insum.insum("y[i] max= a[i,j]", a=a)
        (got,) = torch.autograd.grad(y, a, torch.ones(2, device=CUDA))
    assert got.tolist() == [[0, 0.5, 0, 0.5], [0, 0.5, 0.5, 0]]


def test_kernels_are_counted() -> None:
    x = torch.ones(64, device=CUDA)
    f = lambda x: insum.insum("y[i] = 91.125 * x[i]", x=x)
    with only_fused(), insum.testing.count_compiles() as count:
        f(x)
    with only_fused(), insum.testing.count_compiles() as again:
        f(x)
        f(x + 1)
    # one that an earlier process compiled is found on disk
    assert count.kernels in (0, 1) and again.kernels == 0


def test_forward_mode() -> None:
    x = torch.arange(3.0, device=CUDA)
    f = insum.compile("y[i] = x[i] * x[i]")
    for _ in range(WARM):
        f(x=x)
    value, tangent = torch.func.jvp(lambda x: f(x=x), (x,), (x,))
    torch.testing.assert_close(value, x * x)
    torch.testing.assert_close(tangent, 2 * x * x)
    second = torch.func.hessian(lambda x: f(x=x).sum())(x)
    torch.testing.assert_close(second, 2 * torch.eye(3, device=CUDA))
    torch.testing.assert_close(_tangent(f, x), 2 * x)


def _tangent(f: Callable[..., Tensor], x: Tensor) -> Tensor:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        dual = f(x=forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(dual).tangent  # type: ignore[no-any-return]


def test_half_outputs_are_accumulated_in_float32() -> None:
    """In half precision the sum of ones would stop growing at 2048, in bfloat16 at 256."""
    for dtype, count in ((torch.float16, 4096), (torch.bfloat16, 2048)):
        ones, unsorted = (
            torch.ones(2 * count, 16, device=CUDA, dtype=dtype),
            torch.arange(2 * count, device=CUDA) % 2,
        )
        for strategy in ("auto", "segment", "onehot", "atomic"):
            for index in (unsorted, unsorted.sort().values):
                with only_fused(scatter=strategy):
                    result = insum.insum("C[I[p],n] += V[p,n]", sizes={0: 2}, I=index, V=ones)
                assert result.dtype == dtype and bool((result == count).all()), (dtype, strategy)
        with only_fused():
            assert bool((insum.insum("C[n] = V[p,n]", V=ones) == 2 * count).all())


def test_float32_products_follow_torch() -> None:
    a, b = torch.randn(256, 512, device=CUDA), torch.randn(512, 256, device=CUDA)
    before = torch.get_float32_matmul_precision()
    errors = {}
    try:
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            with only_fused():
                errors[setting] = relative_error(
                    insum.insum("C[i,j] = A[i,k] * B[k,j]", A=a, B=b), a.double() @ b.double()
                )
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 2e-6 < errors["high"] < 2e-3


def test_autocast() -> None:
    index, a, b = (
        torch.arange(64, device=CUDA) // 4,
        torch.randn(64, 32, 32, device=CUDA),
        torch.randn(64, 32, 128, device=CUDA),
    )
    a.requires_grad_()
    statement = "C[I[p],m,n] += A[p,m,k] * B[p,k,n]"
    with only_fused():
        with torch.autocast(CUDA, dtype=torch.float16):
            result = insum.insum(statement, sizes={0: 16}, I=index, A=a, B=b)
        assert result.dtype == torch.float16
        wanted = torch.zeros(16, 32, 128, device=CUDA, dtype=torch.float64).index_add(
            0, index, a.detach().double() @ b.double()
        )
        assert relative_error(result.detach(), wanted) < 2e-3
        result.float().sum().backward()
    assert a.grad is not None and a.grad.dtype == torch.float32
    assert relative_error(a.grad, b.double().sum(2)[:, None, :].expand(64, 32, 32)) < 2e-3


def test_double_backward() -> None:
    """First and second derivatives by finite differences, through generated kernels."""
    index, columns = (
        torch.tensor([0, 2, 2, 1, 0], device=CUDA),
        torch.tensor([1, 0, 1, 2, 2], device=CUDA),
    )
    values, dense = (
        torch.randn(*shape, device=CUDA, dtype=torch.float64, requires_grad=True)
        for shape in ((5,), (3, 4))
    )

    def product(values: Tensor, dense: Tensor) -> Tensor:
        return insum.insum(
            "C[AM[p],n] += AV[p] * B[AK[p],n]",
            sizes={0: 3},
            AM=index,
            AV=values,
            AK=columns,
            B=dense,
        )

    with only_fused():
        assert torch.autograd.gradcheck(product, (values, dense), nondet_tol=1e-12)
        assert torch.autograd.gradgradcheck(product, (values, dense), nondet_tol=1e-12)


def test_double_backward_of_an_application() -> None:
    application = applications.block_spmm(
        rows=8, columns=8, block=32, n=256, density=0.4, group=2, dtype=torch.float32, device=CUDA
    )
    exact = application.exact()
    leaves = {
        n: v.detach().requires_grad_() if n in application.wanted else v
        for n, v in application.values.items()
    }
    for name in application.wanted:
        exact[name].requires_grad_()

    def penalty(values: Any, run: Callable[[Any], Tensor]) -> list[Tensor]:
        out = run(values)
        grads = torch.autograd.grad(
            (out * out).sum(), [values[n] for n in application.wanted], create_graph=True
        )
        total = sum((torch.nan_to_num(g) ** 2).sum() for g in grads)
        return list(torch.autograd.grad(total, [values[n] for n in application.wanted]))

    with only_fused():
        found = penalty(
            leaves,
            lambda v: insum.insum(
                application.statement, sizes=dict(application.sizes), padded=application.padded, **v
            ),
        )
    for one, wanted in zip(found, penalty(exact, application.formula), strict=True):
        assert relative_error(one, wanted) < 1e-4


# --- without pytest -------------------------------------------------------------------------------


def every_test() -> dict[str, Callable[[], None]]:
    return {
        name: thing
        for name, thing in globals().items()
        if name.startswith("test_") and callable(thing)
    }


def attempt(name: str) -> tuple[str, float, str]:
    started = time.perf_counter()
    try:
        every_test()[name]()
        torch.cuda.synchronize()
        failure = ""
    except Exception:
        failure = traceback.format_exc()
    clear()
    return name, time.perf_counter() - started, failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a test's name")
    arguments = parser.parse_args()
    names = [name for name in every_test() if arguments.only in name]
    failed = 0
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for name, seconds, failure in pool.imap_unordered(attempt, names):
            failed += bool(failure)
            print(f"{'FAILED' if failure else 'passed'}  {name}  {seconds:.1f} s", flush=True)
            if failure:
                print(failure[-3000:], flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
