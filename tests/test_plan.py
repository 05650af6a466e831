"""How statements are planned: roles, strategies and their reasons, widths and dtypes; what a plan
prints; what has no kernel and why.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

import applications
import insum
from insum.codegen.arguments import Passed, Pointer
from insum.plan import first_guess, orientation
from insum.plan.config import Config
from insum.plan.draft import CannotFuse
from insum.plan.plan import Plan
from insum.runtime import inspection
from kernels import bound, plan_of, plans_of

pytestmark = pytest.mark.compile_only  # plans end in loaded kernels, for which triton must be there

SPMM = "C[AM[p],n] += AV[p] * B[AK[p],n]"
BLOCKS = "C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]"
SORTED, UNSORTED, UNIQUE = (
    torch.tensor([0, 0, 1, 3, 3]),
    torch.tensor([3, 0, 1, 3, 0]),
    torch.tensor([3, 0, 4, 1, 2]),
)


def spmm(index: torch.Tensor, n: int = 8, rows: int = 6, **more: Any) -> Plan:
    return plan_of(
        SPMM,
        {0: rows},
        AM=index,
        AV=torch.randn(5),
        AK=torch.zeros(5, dtype=torch.int64),
        B=torch.randn(2, n),
        **more,
    )


def blocks(
    index: torch.Tensor, size: int = 32, n: int = 64, dtype: torch.dtype = torch.float16
) -> Plan:
    values = {
        "AV": torch.empty(5, size, size, dtype=dtype),
        "B": torch.empty(2, size, n, dtype=dtype),
    }
    return plan_of(BLOCKS, {0: 6}, AM=index, AK=torch.zeros(5, dtype=torch.int64), **values)


# --- roles ----------------------------------------------------------------------------------------


def roles(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {
        name: found
        for name in ("m", "n", "k", "loops", "outer", "grid")
        if (found := getattr(plan.roles, name))
    }


def test_a_matrix_product() -> None:
    plan = plan_of("C[i,j] = A[i,k] * B[k,j]", A=torch.randn(64, 48), B=torch.randn(48, 64))
    assert plan.roles.dot and roles(plan) == {"m": ("i",), "n": ("j",), "k": ("k",)}
    assert (plan.roles.left, plan.roles.right, plan.roles.post) == ((0,), (1,), ())


def test_the_order_of_factors_does_not_matter() -> None:
    plan = plan_of("C[i,j] = B[k,j] * A[i,k]", A=torch.randn(64, 48), B=torch.randn(48, 64))
    assert roles(plan) == {"m": ("i",), "n": ("j",), "k": ("k",)} and (
        plan.roles.left,
        plan.roles.right,
    ) == ((1,), (0,))


def test_batches_and_scales() -> None:
    plan = plan_of(
        "C[b,i,j] = s[b] * A[b,i,k] * B[b,k,j] * t[j]",
        A=torch.randn(3, 64, 48),
        B=torch.randn(3, 48, 64),
        s=torch.randn(3),
        t=torch.randn(64),
    )
    assert roles(plan) == {"m": ("i",), "n": ("j",), "k": ("k",), "grid": ("b",)}
    assert plan.roles.post == (0, 3), "factors without k are multiplied after the product"


def test_short_variables_are_flattened_into_an_axis() -> None:
    plan = plan_of("C[a,i,j] = A[a,i,k] * B[k,j]", A=torch.randn(20, 8, 48), B=torch.randn(48, 64))
    assert set(plan.roles.m) == {"a", "i"} and plan.roles.n == ("j",) and not plan.roles.grid


def test_entries_of_a_row_are_flattened_with_the_block() -> None:
    plan = blocks(SORTED, 32)
    assert plan.roles.k == ("p", "bk") and plan.segment is not None and not plan.segment.tiled


@pytest.mark.parametrize("size", [12, 20, 24, 40, 48, 100])
def test_entries_that_divide_no_tile_are_joined_all_the_same(size: int) -> None:
    plan = blocks(SORTED, size)
    assert plan.roles.k == ("p", "bk") and not plan.roles.loops


@pytest.mark.parametrize("size", [128, 200])
def test_long_entries_are_looped_over(size: int) -> None:
    plan = blocks(SORTED, size)
    assert plan.roles.k == ("bk",) and plan.roles.loops == ("p",)


def test_entries_with_an_index_for_each_place_of_a_tile_are_looped_over() -> None:
    """A tile of several entries would read a matrix of indices instead of a few."""
    index = torch.zeros(5, 64, dtype=torch.int64)
    plan = plan_of(
        "C[AM[p],i,n] += A[J[p,i],k] * W[p,k,n]",
        {0: 6},
        AM=SORTED,
        J=index,
        A=torch.empty(9, 24, dtype=torch.float16),
        W=torch.empty(5, 24, 64, dtype=torch.float16),
    )
    assert plan.roles.dot and plan.roles.k == ("k",) and plan.roles.loops == ("p",)


#: What is decided for blocks by their sides: rows of blocks on M, the tile, and its buffers.
TILES = {
    (8, 8): (False, (256, 8, 32), 3),
    (12, 12): (False, (256, 16, 64), 2),  # five blocks nearly fill a tile of 64
    (20, 20): (False, (256, 32, 64), 2),
    (24, 24): (False, (256, 32, 32), 3),  # no tile is nearly filled: tiles end inside of blocks
    (8, 64): (False, (128, 16, 64), 2),
    (40, 40): (True, (64, 256, 32), 3),
    (48, 48): (True, (64, 256, 32), 3),
    (64, 8): (True, (64, 256, 32), 3),
    (64, 64): (True, (64, 128, 64), 3),
    (128, 128): (True, (128, 128, 32), 4),
    (128, 64): (True, (128, 128, 64), 3),
}


@pytest.mark.parametrize("block", TILES, ids=str)
def test_tiles_by_the_sides_of_blocks(block: tuple[int, int]) -> None:
    high, tile, stages = TILES[block]
    one = applications.block_spmm(
        rows=64, columns=64, block=block, n=4096, density=0.1, dtype=torch.float16, filled=False
    )
    (step,) = inspection.plan_only(one.forward.problem(), one.values).steps
    ((config,), (launch,)) = step.choice, step.launches
    assert (launch.plan.roles.m == ("bm",)) == high
    assert ((config.m, config.n, config.k), config.stages) == (tile, stages)


@pytest.mark.parametrize(("channels", "depth"), [(128, 128), (192, 64), (96, 128), (120, 128)])
def test_steps_divide_what_is_summed_or_take_all_of_it(channels: int, depth: int) -> None:
    one = applications.convolution(
        voxels=3000,
        offsets=9,
        inputs=channels,
        outputs=128,
        layout="by voxel",
        density=0.3,
        kinds=4,
        dtype=torch.float16,
        filled=False,
    )
    (step,) = inspection.plan_only(one.forward.problem(), one.values).steps
    assert step.choice[0].k == depth


def test_tiles_for_other_architectures_are_halved_across_their_wide_side() -> None:
    one = applications.block_spmm(
        rows=64, columns=64, block=48, n=4096, density=0.1, dtype=torch.float16, filled=False
    )
    for architecture, tile in (("sm_80", (64, 128)), ("sm_100", (64, 128)), ("gfx942", (64, 256))):
        program = inspection.plan_only(one.forward.problem(), one.values, architecture=architecture)
        (config,) = program.steps[0].choice
        assert (config.m, config.n) == tile


def test_small_extents_are_not_worth_a_matrix_instruction() -> None:
    assert not plan_of(
        "C[i,j] = A[i,k] * B[k,j]", A=torch.randn(4, 48), B=torch.randn(48, 64)
    ).roles.dot
    assert not plan_of("C[i] = A[i,k] * B[k]", A=torch.randn(64, 48), B=torch.randn(48)).roles.dot


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 64), (4, 64), (4, 4), (7, 20)])
def test_a_thin_side_of_a_matrix_product(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Of tensor cores most may be idle; of a product in single precision they are no help."""
    plan = plan_of(
        "Y[x,m] = X[nb[z,x],c] * W[z,c,m]",
        X=torch.randn(500, inputs).to(dtype),
        W=torch.randn(9, inputs, outputs).to(dtype),
        nb=torch.randint(0, 500, (9, 500)),
    )
    assert plan.roles.dot == (dtype == torch.float16)


@pytest.mark.parametrize(("wish", "dot"), [("auto", True), ("always", True), ("never", False)])
def test_matrix_instructions_as_wished(wish: str, dot: bool) -> None:
    with insum.settings(dot=wish):
        assert (
            plan_of(
                "C[i,j] = A[i,k] * B[k,j]", A=torch.randn(32, 48), B=torch.randn(48, 64)
            ).roles.dot
            == dot
        )
    with insum.settings(dot=wish):
        assert plan_of(
            "C[i,j] = A[i,k] * B[k,j]", A=torch.randn(2, 3), B=torch.randn(3, 2)
        ).roles.dot == (wish == "always")


def test_maxima_have_no_matrix_instruction() -> None:
    plan = plan_of("C[i,j] max= A[i,k] * B[k,j]", A=torch.randn(32, 48), B=torch.randn(48, 64))
    assert not plan.roles.dot and plan.reduce == "max"


def test_every_variable_has_one_place() -> None:
    for application in applications.tiny():
        for call in application.calls():
            for plan in plans_of(call.problem(), call.values):
                r = plan.roles
                places = [*r.m, *r.n, *r.k, *r.loops, *r.outer, *r.grid]
                used = {
                    v for e in (plan.target, *plan.factors) for v in insum.lang.expr.variables(e)
                }
                covered = used - set(plan.pattern.variables if plan.pattern else ())
                assert len(places) == len(set(places)) and covered <= set(places), call.name


# --- the operand swap -----------------------------------------------------------------------------


def test_the_wide_side_becomes_m() -> None:
    with insum.settings(swap=False):
        plain = blocks(SORTED, 32, n=512).roles
    swapped = blocks(SORTED, 32, n=512).roles
    assert (plain.m, plain.n) == (("bm",), ("n",))
    assert (swapped.m, swapped.n, swapped.left, swapped.right) == (
        ("n",),
        ("bm",),
        plain.right,
        plain.left,
    )
    assert orientation.swapped(swapped, {"bm": 32, "n": 512}) == swapped, "once is enough"


def test_no_swap_where_m_is_wide_enough_or_settings_forbid_it() -> None:
    plan = blocks(SORTED, 64, n=512)
    assert orientation.swapped(plan.roles, {"bm": 64, "n": 512}) == plan.roles
    values = {
        "AM": SORTED,
        "AV": torch.empty(5, 32, 32),
        "AK": SORTED,
        "B": torch.empty(4, 32, 512),
    }
    problem = bound(BLOCKS, values, {0: 6})
    for allowed, side in ((True, "n"), (False, "bm")):
        with insum.settings(swap=allowed):
            (one,) = inspection.plan_only(problem, values).steps[0].launches
        assert f"{side}_i = m_tile" in one.kernel.source


def test_prefetched_indices_as_wished() -> None:
    values = {
        "AM": SORTED,
        "AV": torch.empty(5, 32, 32),
        "AK": SORTED,
        "B": torch.empty(4, 32, 512),
    }
    for wish in (True, False):
        with insum.settings(prefetch=wish):
            (one,) = inspection.plan_only(bound(BLOCKS, values, {0: 6}), values).steps[0].launches
        assert ("_next" in one.kernel.source) == wish


# --- strategies and why ---------------------------------------------------------------------------


def test_direct_and_injective_outputs_are_stored() -> None:
    assert plan_of("C[i,j] = A[j,i]", A=torch.randn(3, 4)).strategy == "store"
    plan = plan_of("C[2*i + 1] = A[i]", {0: 9}, A=torch.randn(3))
    assert plan.strategy == "store" and plan.why == ("no two points meet",)


@pytest.mark.parametrize(
    ("index", "strategy", "why"),
    [
        (SORTED, "segment", "AM is sorted"),
        (UNSORTED, "segment", "AM was sorted once"),
        (UNIQUE, "store", "AM is unique"),
        (UNIQUE.sort().values, "store", "AM is unique"),
    ],
)
def test_the_index_decides(index: torch.Tensor, strategy: str, why: str) -> None:
    plan = spmm(index)
    assert (plan.strategy, plan.why) == (strategy, (why,))


def test_trailing_padding_is_skipped_and_other_padding_masked() -> None:
    values, dense = torch.randn(3, 2), torch.randn(4, 9)
    statement, index = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", torch.tensor([0, 0, 2])
    plan = plan_of(
        statement,
        {0: 3},
        ("AK",),
        AM=index,
        AV=values,
        AK=torch.tensor([[0, 1], [2, -1], [3, -1]]),
        B=dense,
    )
    assert plan.why == ("AM is sorted", "padding ends each row and is skipped") and not plan.padded
    plan = plan_of(
        statement,
        {0: 3},
        ("AK",),
        AM=index,
        AV=values,
        AK=torch.tensor([[-1, 1], [2, -1], [3, -1]]),
        B=dense,
    )
    assert plan.why == ("AM is sorted",) and plan.padded == {"AK"}
    plan = plan_of(
        statement,
        {0: 3},
        ("AK",),
        AM=index,
        AV=values,
        AK=torch.tensor([[0, 1], [2, 0], [3, 0]]),
        B=dense,
    )
    assert not plan.padded, "padding that was allowed but is not there costs nothing"


def test_a_small_scattered_dimension_stays_in_registers() -> None:
    application = applications.usual(filled=False)[7]
    plan = plans_of(application.forward.problem(), application.values)[0]
    assert (
        plan.strategy == "onehot"
        and plan.why == ("the scattered dimension is small and stays in registers",)
        and plan.onehot == 1
    )


def test_constants_become_code() -> None:
    application = applications.usual(filled=False)[8]
    plan = plans_of(application.forward.problem(), application.values)[0]
    assert plan.strategy == "unrolled" and plan.why == ("I, J, K, L are constants of the code",)
    assert (
        plan.pattern is not None
        and plan.pattern.variables == ("p", "q")
        and len(plan.pattern.points) == 10
    )


def test_blocks_are_sorted_even_where_the_output_is_small() -> None:
    """Rows of blocks are matrix products; a register tile would give that up."""
    application = applications.block_spmm(
        rows=64, columns=64, block=32, n=4096, density=0.1, dtype=torch.float16, filled=False
    )
    plan = plans_of(*_gradient(application, "B"))[0]
    assert plan.roles.dot and plan.strategy == "segment" and plan.why == ("AK was sorted once",)


def test_a_neighbour_table_is_inverted() -> None:
    application = applications.usual(filled=False)[4]
    plan = plans_of(*_gradient(application, "In"))[0]
    assert (
        plan.strategy == "store"
        and plan.why[0] == "Nb has an inverse table"
        and "Nb_inverse" in plan.padded
    )


def _gradient(application: applications.Application, name: str) -> tuple[Any, Any]:
    call = application.gradients(application.upstream(filled=False))[name]
    return call.problem(), call.values


def test_tiles_of_several_entries_are_added_atomically() -> None:
    application = applications.usual(filled=False)[6]
    plan = plans_of(application.forward.problem(), application.values)[0]
    assert plan.strategy == "atomic" and plan.why == (
        "X is not sorted, and its tiles hold several entries of it",
    )
    torch.use_deterministic_algorithms(True)
    try:
        plan = plans_of(application.forward.problem(), application.values)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert plan.strategy == "segment" and plan.why == ("X was sorted once",)


@pytest.mark.parametrize("strategy", ["segment", "onehot", "unrolled", "atomic"])
def test_strategies_as_wished(strategy: str) -> None:
    with insum.settings(scatter=strategy):
        assert spmm(SORTED).strategy == strategy
        assert spmm(UNSORTED).strategy == strategy
        assert plan_of("C[i,j] = A[j,i]", A=torch.randn(3, 4)).strategy == "store", (
            "nothing is scattered there"
        )


def test_several_scattered_indices() -> None:
    plan = plan_of("C[I[p],I[p]] += V[p]", {0: 5, 1: 5}, I=UNSORTED, V=torch.randn(5))
    assert plan.strategy == "atomic" and plan.why == ("several scattered indices",)


EDGES = {
    "x": torch.empty(500, 16),
    "dy": torch.empty(500, 16),
    "W": torch.empty(4096, 16, 16),
    "s": torch.randint(0, 500, (4096,)),
    "d": torch.randint(0, 500, (4096,)).sort().values,
}
OWN_MATRICES = {
    "forward": ("y[d[e],o] += x[s[e],i] * W[e,i,o]", "i"),
    "gradient of rows": ("dx[s[e],i] += dy[d[e],o] * W[e,i,o]", "o"),
}


@pytest.mark.parametrize("name", OWN_MATRICES)
def test_matrices_of_entries_are_read_once(name: str) -> None:
    """Tiles hold entries with all that each sums, and not rows that walk through it."""
    statement, summed = OWN_MATRICES[name]
    read = {"x" if name == "forward" else "dy", "W", "s", "d"}
    values = {n: v for n, v in EDGES.items() if n in read}
    plan = plan_of(statement, {0: 500}, **values)
    assert plan.strategy == "atomic" and plan.why == (
        "each entry has a matrix of its own, which is read once",
    )
    assert plan.roles.m == ("e",) and plan.roles.k == (summed,) and not plan.roles.loops
    torch.use_deterministic_algorithms(True)
    try:
        assert plan_of(statement, {0: 500}, **values).strategy == "segment"
    finally:
        torch.use_deterministic_algorithms(False)


def test_short_rows_of_the_output_lie_together() -> None:
    """Programs write one piece of memory each, whatever its dimensions."""
    gradient, names = "dW[e,i,o] += dy[d[e],o] * x[s[e],i]", ("x", "dy", "s", "d")
    plan = plan_of(gradient, **{n: EDGES[n] for n in names})
    assert plan.roles.flat and plan.roles.n == ("e", "i", "o") and not plan.roles.grid
    odd = plan_of("y[a,b,c] = x[a,b] * z[c]", x=torch.empty(64, 64), z=torch.empty(999))
    assert len(odd.roles.m) == 1 and len(odd.roles.grid) == 1
    turned = plan_of("y[a,b,c] = x[c,a,b]", x=torch.empty(32, 32, 32))
    assert turned.roles.m == ("b",) and turned.roles.n == ("c",)


# --- widths and dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "accumulator", "operand"),
    [
        (torch.float16, "float32", "float16"),
        (torch.bfloat16, "float32", "bfloat16"),
        (torch.float32, "float32", "float32"),
        (torch.float64, "float64", ""),
        (torch.int64, "int64", ""),
        (torch.int32, "int64", ""),
    ],
)
def test_accumulators(dtype: torch.dtype, accumulator: str, operand: str) -> None:
    plan = plan_of(
        "C[i,j] = A[i,k] * B[k,j]",
        A=torch.zeros(32, 48, dtype=dtype),
        B=torch.zeros(48, 64, dtype=dtype),
    )
    assert (plan.accumulator, plan.operand) == (accumulator, operand)


def test_mixed_operands_are_brought_to_one_dtype() -> None:
    plan = plan_of(
        "C[i,j] = A[i,k] * B[k,j]",
        A=torch.zeros(32, 48, dtype=torch.float16),
        B=torch.zeros(48, 64),
    )
    assert (plan.accumulator, plan.operand) == ("float32", "float32")


def test_a_double_target_is_accumulated_in_double() -> None:
    values = {
        "A": torch.zeros(32, 48),
        "B": torch.zeros(48, 64),
        "C": torch.zeros(32, 64, dtype=torch.float64),
    }
    (plan,) = plans_of(bound("C[i,j] += A[i,k] * B[k,j]", values), values, values["C"])
    assert plan.accumulator == "float64" and not plan.roles.dot and plan.accumulate


@pytest.mark.parametrize(
    ("setting", "precision"), [("highest", "tf32x3"), ("high", "tf32"), ("medium", "tf32")]
)
def test_precision_follows_torch(setting: str, precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        assert (
            plan_of(
                "C[i,j] = A[i,k] * B[k,j]", A=torch.zeros(32, 48), B=torch.zeros(48, 64)
            ).precision
            == precision
        )
        assert (
            plan_of(
                "C[i,j] = A[i,k] * B[k,j]",
                A=torch.zeros(32, 48).half(),
                B=torch.zeros(48, 64).half(),
            ).precision
            == ""
        ), "only float32 has a choice"
    finally:
        torch.set_float32_matmul_precision(before)


def test_offsets_of_64_bits_where_needed() -> None:
    """Decided by shapes and strides; the tensors are never touched."""
    large = torch.empty(2**26, 32, dtype=torch.int8, device="meta")
    small = torch.empty(2**26 - 1, 32, dtype=torch.int8, device="meta")
    assert _wide(large) and not _wide(small[:1])
    assert _wide(small[:2].as_strided((2, 2), (2**31, 1))), "two rows, far apart"
    assert _wide(small[:1].as_strided((1, 2), (2**31, 1))), "a stride that is passed all the same"
    assert _wide(small[0, :1].expand(2, 2**31)), "an extent that is"
    assert not _wide(torch.empty(2, 2))


def _wide(a: torch.Tensor) -> bool:
    values = {"A": a}
    problem = bound("y[i] = A[i,j]", values)
    return inspection.Look(problem, values).planned()[0].plan.wide


def test_large_outputs_need_64_bits() -> None:
    values = {"a": torch.empty(2**16, device="meta"), "b": torch.empty(2**15, device="meta")}
    problem = bound("C[i,j] = a[i] * b[j]", values)
    assert inspection.Look(problem, values).planned()[0].plan.wide


def test_many_pieces_of_rows_need_64_bits() -> None:
    """Though what is typical of a class, which is smaller in each of three extents, would not."""
    values = {
        "I": torch.empty(2**19 - 1, dtype=torch.int64, device="meta"),
        "V": torch.empty(2**19 - 1, device="meta"),
        "B": torch.empty(1, 511, 511, device="meta"),
    }
    torch.use_deterministic_algorithms(True)
    try:
        problem = bound("C[I[p],n,m] = V[p] * B[0*p,n,m]", values, {0: 3})
        (step,) = inspection.plan_only(problem, values).steps
    finally:
        torch.use_deterministic_algorithms(False)
    assert [one.plan.wide for one in step.launches] == [True, True]


# --- what a plan prints ---------------------------------------------------------------------------


def test_a_plan_prints_itself() -> None:
    values = {
        "AM": SORTED,
        "AV": torch.empty(5, 32, 32, dtype=torch.float16),
        "AK": SORTED,
        "B": torch.empty(4, 32, 512, dtype=torch.float16),
    }
    step = inspection.plan_only(bound(BLOCKS, values, {0: 6}), values).steps[0]
    assert step.planned.plan.describe(step.planned.shown()).splitlines() == [
        "strategy     segment: AM is sorted",
        "segments     p from start[row] to end[row]",
        "computes     C[row,bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]",
        "contraction  tl.dot in float16",
        "axes         M (n:512)  N (bm:32)  K (p:<=8, bk:32)",
        "grid         (row:<=8)   loops -",
        "accumulator  float32   offsets 32 bits",
    ]


def test_a_pattern_prints_its_points() -> None:
    application = applications.usual(filled=False)[8]
    step = inspection.plan_only(application.forward.problem(), application.values).steps[0]
    assert "pattern      10 points of (p, q) as straight-line code" in step.planned.plan.describe(
        step.planned.shown()
    )


def test_the_header_says_what_the_kernel_is_for() -> None:
    values = {"A": torch.empty(32, 48), "B": torch.empty(48, 64)}
    problem = bound("C[i,j] = A[i,k] * B[k,j]", values)
    (one,) = inspection.plan_only(problem, values).steps[0].launches
    lines = one.header.splitlines()
    assert lines[0] == '"""C[i,j] = A[i,k] * B[k,j]' and lines[-1] == '"""'
    assert f"config       {one.config}" in lines
    assert "axes         M (j:64)  N (i:32)  K (k:<=64 by 16)" in lines, (
        "classes of sizes, and the sides as the kernel has them"
    )


def test_configs_print_as_they_are_written() -> None:
    config = Config(m=64, n=128, k=32, warps=8, stages=3)
    assert eval(repr(config)) == config


# --- nothing of the user's text but names ---------------------------------------------------------


ALLOWED = re.compile(r'[A-Za-z0-9_ \[\]()+\-*=.,:;%/<>&"\'?#@\n|!]*')


@pytest.mark.parametrize(
    "statement",
    [
        'C[i] = A[i] # """; import os',
        "C[i] = A[i]\nimport os",
        'C[i] = A[i] * "x"',
        "C[i] = A[__import__('os')]",
        "C[i] = A[i]; print(1)",
        "C[i] = A[i] \\",
        "C[i] = {A[i]}",
        "C[i] = A[i] * \u00e9[i]",
        "C[i] = A[i] * x\u200b[i]",
        "C[\uff49] = A[\uff49]",
        "C[i] = A.__class__[i]",
        "C[i] = exec(A[i])",
    ],
)
def test_hostile_statements_raise_and_nothing_else(statement: str) -> None:
    with pytest.raises(insum.InsumError):
        insum.insum(statement, A=torch.zeros(3), x=torch.zeros(3))


def test_headers_hold_harmless_characters_only() -> None:
    """Whatever blanks and signs a statement was written with."""
    for statement in (
        "C[i]\t=\r\n   A[i]*2.5e-3",
        "  C [ i ] = A [ i ] - 1 * A[ i ]  ",
        "C[i] = -A[2 - i] + relu(A[i])",
    ):
        values = {"A": torch.zeros(3)}
        for step in inspection.plan_only(bound(statement, values), values).steps:
            for one in step.launches:
                assert ALLOWED.fullmatch(one.header) and ALLOWED.fullmatch(one.kernel.source), (
                    one.header
                )
                assert (
                    one.header.count('"""') == 2
                    and one.header.startswith('"""')
                    and one.header.endswith('"""')
                )


def test_text_in_headers_is_filtered() -> None:
    from insum.runtime.build_product import as_comment

    assert as_comment('a"""b\\n\u00e9{}') == "a???b?n???" and len(as_comment("x" * 1000)) == 400


def test_every_name_of_a_kernel_has_a_suffix_or_is_ours() -> None:
    """Names of the statement never stand alone, so that none can take the place of a name of the
    kernel.
    """
    names = {"acc": torch.zeros(32, 48), "tl": torch.zeros(48, 64)}
    (one,) = (
        inspection.plan_only(bound("pid[t,out] = acc[t,range] * tl[range,out]", names), names)
        .steps[0]
        .launches
    )
    assert {argument.name for argument in one.kernel.arguments} == {
        "t_size", "out_size", "range_size", "acc_s0", "acc_ptr",
        "tl_s0", "tl_ptr", "out_stride0", "out_at",
    }  # fmt: skip


def test_names_of_the_statement_do_not_meet_names_of_arguments() -> None:
    """An index variable, a tensor and a number may be called what a kernel calls something else."""
    values = {
        "out": torch.zeros(32, 48),
        "work": torch.zeros(48, dtype=torch.float64),
        "task": 2.0,
    }
    problem = bound("seg[m,n] = out[m,n] * work[n] * task", values)
    (one,) = inspection.plan_only(problem, values).steps[0].launches
    names = [argument.name for argument in one.kernel.arguments]
    assert len(names) == len(set(names))
    assert {"out_ptr", "out_at", "work_ptr", "task_number"} <= set(names)


def test_arguments_have_types_and_are_never_specialised() -> None:
    values = {"A": torch.zeros(32, 48), "x": torch.zeros(48), "a": 2.0, "b": 3}
    problem = bound("y[i] = a * b * A[i,j] * x[j]", values)
    (one,) = inspection.plan_only(problem, values).steps[0].launches
    numbers = [a.name for a in one.kernel.arguments if not isinstance(a, Pointer)]
    assert set(numbers) == {"i_size", "j_size", "A_s0", "a_number", "b_number"}
    listed = ", ".join(f'"{name}"' for name in numbers)
    assert f"@triton.jit(do_not_specialize=[{listed}])" in one.kernel.source
    for name, type in (("i_size", "i32"), ("a_number", "fp32"), ("b_number", "i64")):
        assert f'{name}: "{type}"' in one.kernel.source


def test_numbers_are_passed_as_exactly_as_they_are_used() -> None:
    values = {"A": torch.zeros(3, dtype=torch.float64), "a": 2.0}
    (one,) = inspection.plan_only(bound("C[i] = a * A[i]", values), values).steps[0].launches
    assert Passed("a", "fp64") in one.kernel.arguments


@pytest.mark.parametrize(
    ("strides", "passed", "text"),
    [
        ((200, 1), {"A_s0"}, "(A_s0 * 8)"),
        ((100, 1), {"A_s0"}, "(A_s0 * 4)"),
        ((99, 1), {"A_s0"}, "* A_s0"),
        ((1, 200), {"A_s1"}, "(A_s1 * 8)"),
        ((0, 1), set(), "A_ptr + (i_i * 0 + j_i)"),
        ((0, 0), set(), "A_ptr + n_flat * 0"),
    ],
)
def test_strides_are_passed_where_they_are_not_known(
    strides: tuple[int, int], passed: set[str], text: str
) -> None:
    """In units that keep wide loads provable; strides of 0 and 1 are not passed at all."""
    values = {"A": torch.zeros(20_000, dtype=torch.float16).as_strided((40, 72), strides)}
    (one,) = inspection.plan_only(bound("C[i,j] = A[i,j]", values), values).steps[0].launches
    names = {argument.name for argument in one.kernel.arguments}
    assert {name for name in names if name.startswith("A_s")} == passed
    assert text in one.kernel.source, one.kernel.source


# --- what has no kernel ---------------------------------------------------------------------------

REFUSED = {
    "C[i] += A[i] * C[i]": (
        {"A": torch.zeros(3), "C": torch.zeros(3)},
        "the output is also read on the right side",
    ),
    "C[i] = A[i]": ({"A": torch.zeros(3, dtype=torch.complex64)}, "A holds complex64"),
    "C[i] = A[i] * B[i]": (
        {"A": torch.zeros(3, dtype=torch.bool), "B": torch.zeros(3, dtype=torch.bool)},
        "the result is bool",
    ),
    "C[i] max= A[i,j]": ({"A": torch.zeros(3, 3, dtype=torch.int32)}, "max of int32"),
    "C[i] = A[I[i]]": (
        {"A": torch.zeros(3), "I": torch.zeros(3, dtype=torch.uint16)},
        "I holds uint16",
    ),
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_has_no_kernel_says_why(statement: str) -> None:
    values, why = REFUSED[statement]
    with pytest.raises(CannotFuse, match=why):
        inspection.plan_only(bound(statement, values), values)


def test_many_variables_have_no_kernel() -> None:
    names = [f"v{n}" for n in range(25)]
    values = {"A": torch.zeros([1] * 13), "B": torch.zeros([1] * 12)}
    with pytest.raises(CannotFuse, match="more than 24 index variables"):
        inspection.plan_only(
            bound(f"C[] = A[{','.join(names[:13])}] * B[{','.join(names[13:])}]", values), values
        )


def test_requiring_a_kernel_is_an_error_where_there_is_none() -> None:
    with insum.settings(require_fused=True), pytest.raises(insum.NotFusedError) as caught:
        insum.insum("C[i] = A[i]", A=torch.zeros(3))
    message = str(caught.value)
    assert "no fused kernel: generated kernels do not run on cpu" in message
    assert "C[i] = A[i]" in message and "settings.require_fused = False" in message


def test_falling_back_is_said_once() -> None:
    statement = "C[i] = A[i] * 31"
    with insum.settings(backend="fused"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(insum.insum(statement, A=torch.ones(3)), torch.full((3,), 31.0))
    assert [str(w.message) for w in caught] == [
        f"insum: {statement!r} runs as a graph of torch operations: generated kernels do not "
        "run on cpu"
    ]


def test_falling_back_by_itself_is_quiet_on_a_cpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        insum.insum("C[i] = A[i] * 32", A=torch.ones(3))


def test_describe_without_a_kernel() -> None:
    values = {"A": torch.zeros(3)}
    assert (
        inspection.describe(bound("C[i] = A[i]", values), values)
        == "no fused kernel: generated kernels do not run on cpu"
    )


# --- sums over gathered rows ---


@pytest.mark.parametrize(
    ("statement", "along", "k"),
    [
        ("Out[x,c] max= In[Nb[z,x],c]", "x", 1),  # every thread its own
        ("Out[x,c] = In[Nb[z,x],c] * W[z,c]", "x", 1),
        ("Out[x,c] = In[Nb[x,z],c] * W[z,c]", "z", 1),  # each has a list of its own
        ("Out[x,c] = In[Nb[z],c] * W[x,z]", "", 16),  # one list for all
    ],
)
def test_short_sums_over_what_an_index_finds(statement: str, along: str, k: int) -> None:
    rows, steps = 3000, 16
    values = {"In": torch.empty(rows, 64, dtype=torch.float16)}
    shape = {"x": (steps, rows), "z": (rows, steps), "": (steps,)}[along]
    values["Nb"] = torch.zeros(shape, dtype=torch.int32)
    if "W" in statement:
        side = (rows, steps) if "W[x" in statement else (steps, 64)
        values["W"] = torch.empty(side, dtype=torch.float16)
    plan = plan_of(statement, padded=("Nb",), **values)
    extents = {"x": rows, "c": 64, "z": steps}
    assert first_guess.first_guess(plan, extents).k == k
    assert first_guess.first_guess(plan, {**extents, "x": 30}).k > 1  # few outputs


def test_sums_of_nothing_and_of_very_much_have_tiles() -> None:
    lists = {"x": torch.empty(10, 64), "I": torch.zeros(20_000, 0, dtype=torch.int64)}
    plan = plan_of("y[i,f] = x[I[i,k],f]", **lists)
    assert first_guess.first_guess(plan, {"i": 20_000, "k": 0, "f": 64}).stages == 1
    wide = {name: torch.empty(9, 3000, 8) for name in "xz"}
    ends = {name: torch.zeros(4000, dtype=torch.int64) for name in "IL"}
    plan = plan_of("y[e,h] = x[I[e],f,h] * z[L[e],f,h]", **wide, **ends)
    guess = first_guess.first_guess(plan, {"e": 4000, "f": 200_000, "h": 8})
    assert guess.m * guess.n * guess.k <= 4096


@pytest.mark.parametrize("batch", [2_000, 10_000, 13_000])
def test_constant_patterns_are_code_before_they_share_matrices(batch: int) -> None:
    """Weights of a tensor product are matrices that an index tensor chooses, as those of experts
    are; but which is known, and no two items have the same.
    """
    p, q, width = 5, 3, 16
    pattern = {
        "I": torch.arange(p * q).view(p, q) % 4,
        "J": torch.arange(p * q).view(p, q) // 4,
        "K": torch.arange(p * q).view(p, q) % 3,
        "L": torch.arange(p),
    }
    told = insum.explain(
        "Z[b,I[p,q],w] = V[p,q] * X[b,J[p,q],u] * Y[b,K[p,q]] * W[b,L[p],u,w]",
        **{name: insum.constant(value) for name, value in pattern.items()},
        V=insum.constant(torch.ones(p, q)),
        X=torch.empty(batch, 4, width),
        Y=torch.empty(batch, 3),
        W=torch.empty(batch, p, width, width),
        out_shape=(batch, 4, width),
        gpu="sm_90",
    )
    assert "unrolled: I, J, K, L are constants of the code" in str(told)


def test_numbers_along_entries_are_added_where_they_belong() -> None:
    """Rows of the output would be numbers far apart; but where most meet they are rows, and where
    sums are to have one order.
    """
    index = torch.randint(0, 1000, (96,))
    values = {"x": torch.empty(500, 96), "T": index}
    statement = "y[b,T[c]] = x[b,c]"
    assert plan_of(statement, {0: 500, 1: 1000}, **values).strategy == "atomic"
    many = {"x": torch.empty(500, 9600), "T": torch.randint(0, 40, (9600,))}
    assert plan_of(statement, {0: 500, 1: 40}, **many).strategy != "atomic"
    torch.use_deterministic_algorithms(True)
    try:
        assert plan_of(statement, {0: 500, 1: 1000}, **values).strategy == "segment"
    finally:
        torch.use_deterministic_algorithms(False)


def test_several_unique_indices_are_stored_through() -> None:
    p, q = torch.randperm(90), torch.randperm(50)
    values = {"x": torch.empty(90, 50), "p": p, "q": q}
    sizes = {0: 90, 1: 50}
    plan = plan_of("y[p[i],q[j]] = x[i,j]", sizes, **values)
    assert plan.strategy == "store" and "unique" in plan.why[-1]
    values["q"] = torch.randint(0, 9, (50,))
    assert plan_of("y[p[i],q[j]] = x[i,j]", sizes, **values).strategy != "store"
    both = {"x": torch.empty(90), "p": p, "q": torch.randint(0, 9, (90,))}
    assert plan_of("y[p[i],q[i]] = x[i]", sizes, **both).strategy == "store"


def test_points_that_32_bits_do_not_count_are_no_run() -> None:
    """However few the places are that indices lead them to."""
    statement = "y[J[a],K[b]] = x[a] * z[b]"
    for n, flat in ((9000, True), (50_000, False)):
        index = torch.randint(0, 64, (n,))
        values = {"x": torch.empty(n), "z": torch.empty(n), "J": index, "K": index.flip(0)}
        plan = plan_of(statement, {0: 64, 1: 64}, **values)
        assert plan.strategy == "atomic" and plan.roles.flat == flat and not plan.wide
