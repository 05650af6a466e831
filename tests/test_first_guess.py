"""What is guessed for statements over gathered rows, as a GPU would get them; nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import insum
from insum.plan import legal
from insum.plan.config import Choice
from insum.plan.orientation import oriented
from insum.plan.plan import Plan
from insum.plan.sizes import general
from insum.runtime import inspection
from insum.runtime.build import first_choice
from kernels import bound

FORWARD, GRADIENT = "o[x,m] = f[t[z,x],c] * w[z,c,m]", "w[z,c,m] = f[t[z,x],c] * g[x,m]"
SPMM = "y[r[p],n] = v[p] * b[c[p],n]"


def guessed(
    statement: str, padded: tuple[str, ...] = (), rows: int = 0, **values: Any
) -> tuple[Plan, Choice]:
    """``rows``: of a result that is scattered to."""
    sizes = {0: rows} if rows else None
    look = inspection.elsewhere(bound(statement, values, sizes, padded), values)
    (one,) = look.planned()
    choice = first_choice(one, look.wishes)
    plan = oriented(one.plan, one.extents, choice[0].swap)
    assert legal.broken(plan, one.extents, choice) == "", choice
    return plan, choice


def table(rows: int, steps: int = 27) -> Tensor:
    """Each row has a third of the steps."""
    drawn = torch.randint(0, rows, (steps, rows), dtype=torch.int32)
    absent = (torch.arange(rows) // 100 + torch.arange(steps)[:, None]) % 3 > 0
    return insum.unchanging(drawn.masked_fill(absent, -1))


def convolution(statement: str, rows: int, width: int, dtype: torch.dtype) -> tuple[Plan, Choice]:
    values: dict[str, Any] = {"f": torch.empty(rows, width, dtype=dtype), "t": table(rows)}
    if statement == FORWARD:
        values["w"] = torch.empty(27, width, width, dtype=dtype)
    else:
        values["g"] = torch.empty(rows, width, dtype=dtype)
    return guessed(statement, ("t",), **values)


@pytest.mark.parametrize("width", [16, 24, 32])
def test_narrow_rows_have_one_config_whatever_their_number(width: int) -> None:
    few, many = (convolution(FORWARD, rows, width, torch.float16) for rows in (5000, 60_000))
    assert few[1] == many[1] and few[1][0].m == 64
    assert few[0].segment is not None and few[1][0].k == 16 * -(-width // 16)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("channels", [2, 3, 7])
def test_few_channels_are_summed_with_the_steps_of_their_table(
    channels: int, dtype: torch.dtype, precision: str
) -> None:
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for rows, outputs in ((5000, 8), (60_000, 200)):
            given = {"f": torch.empty(rows, channels, dtype=dtype), "t": table(rows)}
            given["w"] = torch.empty(27, channels, outputs, dtype=dtype)
            plan, (config,) = guessed(FORWARD, ("t",), **given)
            assert len(plan.roles.k) == 2 and not plan.roles.loops
            assert (config.m, config.k, config.warps) == (64, 16, 4)
            assert config.n == (128 if outputs > 128 else 8 if dtype == torch.float16 else 16)
    finally:
        torch.set_float32_matmul_precision(was)


def test_entries_that_are_matrices_of_few_columns_fill_tiles_together() -> None:
    """Where matrices of entries are summed, and one has less than a tile takes."""
    r, c = torch.arange(3000).repeat_interleave(4), torch.randint(0, 3000, (12_000,))
    given = {"r": insum.unchanging(r), "c": insum.unchanging(c)}
    given |= {"a": torch.empty(12_000, 16, 4).half(), "b": torch.empty(3000, 4, 64).half()}
    plan, _ = guessed("y[r[p],i,n] = a[p,i,j] * b[c[p],j,n]", rows=3000, **given)
    assert plan.segment is not None and plan.roles.k == (plan.segment.var, "j")
    # what scales entries keeps them apart
    given["s"] = torch.empty(12_000).half()
    plan, _ = guessed("y[r[p],i,n] = s[p] * a[p,i,j] * b[c[p],j,n]", rows=3000, **given)
    assert plan.segment is not None and plan.roles.k == (plan.segment.var,)


def test_of_few_wide_rows_the_sum_is_not_cut_in_half_precision() -> None:
    """Pieces would add more to the result than they read; of 32-bit numbers they read more."""
    assert convolution(GRADIENT, 1500, 256, torch.float16)[0].segment is None
    assert convolution(GRADIENT, 20_000, 256, torch.float16)[0].segment is not None
    assert convolution(GRADIENT, 1500, 256, torch.float32)[0].segment is not None


def test_what_is_shared_by_all_steps_is_read_once_for_many() -> None:
    values = {"f": torch.empty(5000, 96), "t": table(5000), "g": torch.empty(5000, 96)}
    _, (config,) = guessed("w[z,c] = f[t[z,x],c] * g[x,c]", ("t",), **values)
    assert config.m == 16 and config.n == 32


def entries(rows: int, each: int) -> dict[str, Tensor]:
    ends = torch.arange(rows).repeat_interleave(each)
    return {"r": insum.unchanging(ends), "c": insum.unchanging(ends.flip(0).contiguous())}


@pytest.mark.parametrize(("width", "k"), [(3, 16), (8, 16), (16, 8), (32, 8)])
def test_all_entries_of_narrow_rows_are_read_at_once(width: int, k: int) -> None:
    for rows in (500, 30_000):
        values = {**entries(rows, 10), "v": torch.empty(10 * rows), "b": torch.empty(rows, width)}
        _, (short, long) = guessed(SPMM, rows=rows, **values)
        assert (short.k, short.warps) == (k, 1) and long.k >= 32


def test_rows_of_few_entries_are_read_a_few_at_a_time() -> None:
    values = {**entries(30_000, 2), "v": torch.empty(60_000), "b": torch.empty(30_000, 8)}
    assert guessed(SPMM, rows=30_000, **values)[1][0].k < 8


@pytest.mark.parametrize("width", [1, 2, 5, 7, 12, 16, 20, 31, 32, 33, 64])
@pytest.mark.parametrize(
    "statement",
    [
        "y[r[p],n] = sigmoid(a[r[p],n] + b[c[p],n]) * b[c[p],n]",
        "y[r[p],n] = a[c[p],n] * b[c[p],n] * a[p,n]",
        "y[r[p],n] max= b[c[p],n]",
        "y[r[p]] = a[r[p],n] * b[c[p],n]",
    ],
)
def test_guesses_are_legal(statement: str, width: int) -> None:
    values: dict[str, Any] = {**entries(6000, 6), "b": torch.empty(6000, width)}
    if "a[" in statement:
        values["a"] = torch.empty(36_000, width)
    guessed(statement, rows=6000, **values)


@pytest.mark.parametrize("rows", [18_000, 25_000, 30_000])
@pytest.mark.parametrize("width", [72, 128, 256])
@pytest.mark.parametrize("inner", [32, 64, 96])
def test_guesses_are_legal_in_tf32(rows: int, width: int, inner: int) -> None:
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        w = torch.empty(9, inner, width)
        guessed(FORWARD, ("t",), f=torch.empty(rows, inner), t=table(rows, 9), w=w)
    finally:
        torch.set_float32_matmul_precision(was)


def test_no_buffers_where_nothing_bounds_the_result() -> None:
    values = {"a": torch.empty(100, 3, 50), "s": torch.zeros(4000, dtype=torch.long)}
    look = inspection.elsewhere(bound("y[j] max= a[s[i],k,j]", values), values)
    (one,) = look.planned()
    assert one.buffers > 1000
    (of_all,) = look.programs.plan(general(look.sizes), look.wishes, look.answers)
    assert of_all.buffers < 10


# --- sizes that no tile divides -------------------------------------------------------------------


def drawn(*shape: int, below: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    if below:
        return insum.unchanging(torch.randint(0, below, shape))
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("width", [17, 34, 59])
def test_lists_of_narrow_rows_are_read_at_once(width: int) -> None:
    """Of rows that wide loads cannot read, one step at a time took five times as long."""
    values = {"w": drawn(50_000, 8), "x": drawn(9000, width), "t": drawn(50_000, 8, below=9000)}
    _, (one,) = guessed("y[q,c] = w[q,k] * x[t[q,k],c]", **values)
    assert (one.k, one.warps) == (8, 1)


@pytest.mark.parametrize(("heads", "m"), [(3, 1), (4, 4), (5, 2), (6, 2), (8, 8)])
def test_heads_fill_their_tile(heads: int, m: int) -> None:
    values = {"Q": drawn(900, heads, 12), "K": drawn(900, heads, 12)}
    ends = {"i": drawn(60_000, below=900), "j": drawn(60_000, below=900)}
    _, (one,) = guessed("s[p,h] = Q[i[p],h,d] * K[j[p],h,d]", **values, **ends)
    assert one.m == m and one.m * one.n * one.k == 2048


@pytest.mark.parametrize(("width", "k"), [(80, 16), (64, 64), (96, 16), (88, 16)])
def test_windows_over_each_other_share_a_tile(width: int, k: int) -> None:
    values = {"q": drawn(4, 1000, width), "k": drawn(4, 1015, width)}
    sizes = {0: 4, 1: 1000, 2: 16}
    look = inspection.elsewhere(bound("s[b,t,r] = q[b,t,f] * k[b,t+r,f]", values, sizes), values)
    (one,) = look.planned()
    (choice,) = first_choice(one, look.wishes)
    assert (choice.m, choice.n, choice.k) == (8, 16, k)


def test_places_of_a_scatter_are_read_once_for_a_row() -> None:
    """Were offsets and columns one axis, a tile would read an index for each of its places."""
    values = {"dy": drawn(4000, 94), "W": drawn(9, 59, 94), "t": drawn(4000, 9, below=4000)}
    plan, (one,) = guessed("dx[t[q,k],c] = dy[q,o] * W[k,c,o]", rows=4000, **values)
    assert (plan.roles.m, plan.roles.n, plan.roles.grid) == (("q",), ("c",), ("k",))
    assert one.m == 32  # atomics take the time
    narrow = {**values, "W": drawn(9, 8, 94)}
    plan, _ = guessed("dx[t[q,k],c] = dy[q,o] * W[k,c,o]", rows=4000, **narrow)
    assert plan.roles.n == ("k", "c")


def test_short_sums_of_wide_numbers_are_one_step() -> None:
    values = {
        "dy": drawn(4000, 51, 51, dtype=torch.float32),
        "E": drawn(9000, 17, dtype=torch.float32),
        "i": drawn(4000, 51, below=9000),
    }
    _, (one,) = guessed("D[i[b,f],k] = dy[b,f,g] * E[i[b,g],k]", rows=9000, **values)
    assert (one.m, one.n, one.k, one.stages) == (64, 32, 64, 1)


def test_columns_of_short_heads_lie_in_memory() -> None:
    """Rows of six numbers are narrower than their eight heads, and are walked all the same."""
    values = {"a": drawn(60_000, 8), "x": drawn(900, 8, 6)}
    ends = {"s": drawn(60_000, below=900), "d": drawn(60_000, below=900)}
    plan, _ = guessed("y[d[e],h,f] = a[e,h] * x[s[e],h,f]", rows=900, **values, **ends)
    assert plan.roles.n == ("f",)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_few_tiles_of_dense_factors_are_small(dtype: torch.dtype) -> None:
    """Where a short sum cannot be cut into pieces; one of many rows has large ones."""
    statement = "y[a,c] = exp(z[a,b] - m[a]) * v[b,c]"
    for rows, few in ((3000, True), (90_000, False)):
        values = {"z": (rows, 250), "m": (rows,), "v": (250, 60)}
        given = {n: torch.empty(shape, dtype=dtype) for n, shape in values.items()}
        _, (one,) = guessed(statement, **given)
        assert (one.n == 32 and one.m <= 64) == few, one


def test_short_sums_of_columns_are_read_at_once() -> None:
    """As of the diagonals of a matrix: each thread sums its own columns."""
    values = {"v": torch.empty(5, 400_000), "x": torch.empty(401_000), "o": drawn(5, below=900)}
    look = inspection.elsewhere(bound("y[i] = v[k,i] * x[i+o[k]]", values, {0: 400_000}), values)
    (one,) = look.planned()
    (choice,) = first_choice(one, look.wishes)
    assert (choice.m, choice.n, choice.k, choice.stages) == (1, 512, 1, 4)


def test_long_sums_of_halves_are_cut_into_pieces() -> None:
    """Few tiles of many steps: their sums are rounded in another launch, which is little."""
    values = {"x": (3260, 93), "W": (106, 93, 112), "z": (3260, 112)}
    given = {n: torch.empty(shape, dtype=torch.float16) for n, shape in values.items()}
    problem = bound("y[b,o] = x[b,i] * W[o,i,j] * z[b,j]", given)
    (step,) = inspection.plan_only(problem, given).steps
    product, pieces = step.launches[-2:]
    assert product.counts["piece_count"] > 4 and pieces.kernel.name.endswith("pieces")


# --- sums by threads of their own -----------------------------------------------------------------


def chosen(statement: str, sizes: dict[Any, int] | None = None, **values: Any) -> Choice:
    look = inspection.elsewhere(bound(statement, values, sizes), values)
    (one,) = look.planned()
    return first_choice(one, look.wishes)


@pytest.mark.parametrize(
    ("statement", "x", "sizes", "tile"),
    [
        ("y[i,f] = a[i,k] * x[i+k,f]", (32_020, 64), {0: 32_000, 1: 64}, (8, 64)),
        ("y[i,f] = a[i,k] * x[i+k,f]", (32_020, 200), {0: 32_000, 1: 200}, (16, 32)),
        ("y[i,f] = a[i,k] * x[2*i+k,f]", (64_020, 64), {0: 32_000, 1: 64}, (4, 64)),
        ("y[t] = x[t+k] * w[k]", (900_035,), {0: 900_000}, (1, 512)),
    ],
    ids=["rows", "wide rows", "every other row", "numbers"],
)
def test_every_thread_sums_windows_of_its_own(
    statement: str, x: tuple[int, ...], sizes: dict[Any, int], tile: tuple[int, int]
) -> None:
    """Step by step, for what neighbours share is in the cache."""
    values = {"x": drawn(*x), "a": drawn(32_000, 21), "w": drawn(36)}
    used = {name: value for name, value in values.items() if f"{name}[" in statement}
    (one,) = chosen(statement, sizes, **used)
    assert (one.m, one.n, one.k, one.warps, one.stages) == (*tile, 1, 1, 4)


def test_few_windows_are_summed_by_several_threads_each() -> None:
    (one,) = chosen("y[t] = x[t+k] * w[k]", {0: 900}, x=drawn(1300), w=drawn(401))
    assert one.k > 1


@pytest.mark.parametrize(("columns", "n"), [(64, 512), (73, 128), (300, 512)])
def test_sums_of_places_put_no_threads_together(columns: int, n: int) -> None:
    """Whatever the width: places of several rows are walked as one."""
    (one,) = chosen("y[a,c] max= x[a,b,c]", x=drawn(4096, 32, columns))
    assert (one.m, one.n, one.k, one.warps, one.stages) == (1, n, 1, 4, 4)


def test_sums_down_long_columns_put_no_threads_together() -> None:
    (one,) = chosen("y[a,c] max= x[a,b,c]", x=drawn(4096, 32, 1000))
    assert (one.m, one.n, one.k, one.warps) == (1, 128, 1, 1)


def test_few_sums_have_programs_enough() -> None:
    """Several threads each, and no more of them in a tile than leave work for the others."""
    few = drawn(17, 100, 200, dtype=torch.float32)
    (one,) = chosen("y[a,c] = x[a,b,c]", x=few)
    assert one.m == 1 and one.n <= 32 and one.n * one.k == 1024
    (along,) = chosen("y[c,a] = x[c,a,b]", x=drawn(8, 256, 500))
    assert along.m == 1 and along.n <= 8 and along.k >= 256


def test_rows_that_are_gathered_number_by_number_stay_in_the_cache() -> None:
    values = {"x": drawn(9000, 500), "q": drawn(400, below=500)}
    (whole,) = chosen("y[i,j] = x[i,q[j]]", **values)
    (gathered,) = chosen("y[i,j] = x[p[i],q[j]]", p=drawn(9000, below=9000), **values)
    assert (whole.n, whole.warps) == (512, 4) and (gathered.n, gathered.warps) == (512, 2)
    lists = drawn(400, 8, below=500)
    (one,) = chosen("y[i,j] = x[i,q[j,k]]", x=values["x"], q=lists)
    assert (one.m, one.n, one.k, one.warps) == (2, 256, 4, 8)


# --- sums of rows, again --------------------------------------------------------------------------


@pytest.mark.parametrize(("entries_", "tile"), [(3, (32, 1)), (40, (4, 16))])
def test_several_threads_sum_a_row_of_numbers_of_some_length(
    entries_: int, tile: tuple[int, int]
) -> None:
    values = {"v": drawn(9000 * entries_), "r": drawn(9000 * entries_, below=9000)}
    _, choice = guessed("y[r[p]] = v[p]", rows=9000, **values)
    one = choice[0]
    assert (one.m, one.k, one.warps) == (*tile, 1)


def test_a_warp_sums_a_long_row_of_numbers() -> None:
    values = {"v": drawn(200_000), "r": insum.unchanging(torch.arange(200_000) // 2000)}
    _, choice = guessed("y[r[p]] = v[p]", rows=100, **values)
    assert choice[0].split == 256 and (choice[-1].m, choice[-1].k) == (1, 256)


@pytest.mark.parametrize(("dtype", "m"), [(torch.float16, 8), (torch.float32, 4)], ids=str)
def test_rows_that_hardly_have_entries_are_filled_a_warp_each(dtype: torch.dtype, m: int) -> None:
    """As the gradient of an embedding: what takes the time is to write zeros."""
    values = {"dy": drawn(5000, 128, dtype=dtype), "t": drawn(5000, below=60_000)}
    _, choice = guessed("dE[t[p],f] = dy[p,f]", rows=60_000, **values)
    one = choice[0]
    assert (one.m * one.n * dtype.itemsize, one.k, one.warps) == (2048, 1, 1) and one.m == m


def test_products_of_odd_width_have_few_idle_columns() -> None:
    """Of 131 columns tiles of 128 would leave one nearly empty."""
    values = {"x": drawn(9000, 131), "t": drawn(9000, 9, below=9000), "W": drawn(9, 131, 131)}
    (odd,) = chosen("y[q,o] = x[t[q,k],c] * W[k,c,o]", **values)
    even = {**values, "W": drawn(9, 131, 136)}
    (other,) = chosen("y[q,o] = x[t[q,k],c] * W[k,c,o]", **even)
    assert odd.n == 64 and other.n == 128


@pytest.mark.parametrize("width", [16, 32])
def test_of_narrow_rows_that_are_computed_few_entries_are_read_at_once(width: int) -> None:
    """However often a row stands in the function of it."""
    rows, edges = 5000, 60_000
    values = {n: drawn(rows, width) for n in ("a", "b", "g")}
    values |= {n: drawn(edges, below=rows) for n in ("i", "j")}
    gate = "sigmoid(a[i[p],c] + b[j[p],c])"
    for value in (f"g[i[p],c] * {gate}", f"g[i[p],c] * {gate} * (1 - {gate})"):
        _, choice = guessed(f"d[j[p],c] = {value}", rows=rows, **values)
        assert (choice[0].m, choice[0].k, choice[0].warps) == (4, 4, 1)


@pytest.mark.parametrize(("rows", "n", "k"), [(500, 1, 1024), (4000, 2, 512), (60_000, 16, 128)])
def test_few_rows_that_are_summed_have_a_tile_each(rows: int, n: int, k: int) -> None:
    _, (one,) = guessed("s[b] = exp(x[b,f] - m[b])", x=drawn(rows, 1500), m=drawn(rows))
    assert (one.n, one.k) == (n, k)


def test_of_few_sums_a_program_has_a_piece_of_one() -> None:
    values = {"x": drawn(17, 3, 100_000), "w": drawn(3, 17)}
    for statement in ("y[b] = x[b,a,c] * w[a,b]", "y[a,b] = x[b,a,c] * w[a,b]"):
        plan, (one,) = guessed(statement, **values)
        assert plan.roles.k == ("c",) and (one.m, one.n, one.k) == (1, 1, 2048)


def test_of_long_sums_of_runs_lines_of_memory_are_read() -> None:
    """3000 pictures of 65 x 31: there are pieces enough."""
    long, short = {"x": drawn(3, 3000, 65, 31)}, {"x": drawn(3, 60, 65, 31)}
    plan, (one,) = guessed("y[a,c,d] = x[a,b,c,d]", **long)
    assert plan.roles.flat and (one.n, one.k) == (128, 8)
    _, (one,) = guessed("y[a,c,d] = x[a,b,c,d]", **short)
    assert one.n < 128


def test_few_columns_are_read_in_deep_steps() -> None:
    values = {"z": drawn(20_000, 5), "x": drawn(256, 20_000, 5)}
    _, (one,) = guessed("y[c] = z[b,c] * x[a,b,c]", **values)
    assert (one.n, one.k) == (8, 512)


def test_columns_of_rows_that_are_gathered_are_summed_as_others() -> None:
    """Only which row is read is found by an index: one for all threads."""
    values = {"w": drawn(900), "i": drawn(128, below=900), "x": drawn(17, 128, 32, 128)}
    plan, (one,) = guessed("y[a,b,d] = w[i[b]] * x[a,b,c,d]", **values)
    assert plan.roles.n == ("d",) and (one.k, one.stages) == (1, 4)


def test_sides_share_what_is_read() -> None:
    """The largest factors lie along one side, and are read once for all of the other."""
    values = {"w": drawn(900, 100, dtype=torch.float32), "i": drawn(4, below=100)}
    values |= {n: drawn(900, 96, 96, dtype=torch.float32) for n in ("x", "z")}
    plan, _ = guessed("y[b,c,d] = w[a,i[d]] * x[a,b,c] * z[a,b,c]", **values)
    assert (plan.roles.m, plan.roles.n, plan.roles.grid) == (("d",), ("c",), ("b",))


def test_sums_go_along_what_most_is_read_along() -> None:
    values = {"z": drawn(7, 500), "x": drawn(7, 8, 500, 256)}
    plan, _ = guessed("y[a,b] = z[a,c] * x[a,b,c,d]", **values)
    assert plan.roles.k == ("d",)


@pytest.mark.parametrize("channels", [16, 32])
def test_vectors_of_rows_are_read_an_entry_at_a_time(channels: int) -> None:
    """Columns lie three numbers apart: what several entries add up to would go through all warps
    of a program.
    """
    values = {"x": drawn(90_000, channels, 3), "t": drawn(90_000, below=20_000)}
    plan, choice = guessed("y[t[e],c,i] = x[e,c,i]", rows=20_000, **values)
    assert plan.roles.n == ("c",) and (choice[0].m * choice[0].n, choice[0].k) == (256, 1)


def test_few_sums_of_what_lies_two_ways_read_lines_of_both() -> None:
    values = {"x": drawn(3000, 48, 200), "z": drawn(200, 48, 3000)}
    plan, (one,) = guessed("y[b] = x[a,b,c] * z[c,b,a]", **values)
    assert plan.roles.n == ("c",) and plan.roles.k == ("a",) and one.n * one.k > 1024


def test_short_rows_are_summed_where_they_lie() -> None:
    """Of 48 rows of eight numbers each sum is made, and not of eight columns."""
    plan, _ = guessed("y[a,b,c] = x[a,b,c,d,e]", x=drawn(48, 256, 2, 48, 8))
    assert plan.roles.k == ("e",) and plan.roles.loops == ("d",)


def test_vectors_of_gathered_rows_are_summed_number_by_number() -> None:
    """The gradient of weights of vectors: of a tile four numbers deep a quarter would be empty."""
    values = {n: drawn(20_000, 64, 3, dtype=torch.float32) for n in ("z", "v")}
    values |= {n: drawn(90_000, below=20_000) for n in ("d", "s")}
    plan, (one,) = guessed("w[e,c] = z[d[e],c,i] * v[s[e],c,i]", **values)
    assert plan.roles.k == ("i",) and (one.m, one.n, one.k, one.warps) == (4, 64, 1, 4)


def test_rows_of_a_few_numbers_are_read_together() -> None:
    """Of 16 384 rotations, each of 15 vectors."""
    values = {"R": drawn(16_384, 3, 3), "x": drawn(16_384, 15, 3)}
    plan, (one,) = guessed("y[n,c,i] = R[n,i,j] * x[n,c,j]", **values)
    assert plan.roles.m == ("c",) and one.m == 16


def test_distances_of_few_points_are_small_tiles() -> None:
    for points, n, warps in ((512, 32, 1), (4096, 128, 4)):
        values = {"X": drawn(points, 80), "Y": drawn(points, 80)}
        _, (one,) = guessed("D[i,j] = abs(X[i,c] - Y[j,c])", **values)
        assert (one.n, one.warps) == (n, warps)


def test_products_that_are_multiplied_once_more_are_cut() -> None:
    values = {"x": drawn(1024, 32), "W": drawn(88, 32, 32), "z": drawn(1024, 32)}
    _, (one,) = guessed("y[b,o] = x[b,i] * W[o,i,j] * z[b,j]", **values)
    assert (one.m, one.n, one.warps, one.split) == (64, 16, 2, 4)


def test_rows_of_windows_are_one_tile() -> None:
    """Channels apart."""
    values = {"x": drawn(16, 112, 106, 106), "k": drawn(112, 3, 3)}
    statement = "y[b,c,h,w] = x[b,c,h+i,w+j] * k[c,i,j]"
    look = inspection.elsewhere(bound(statement, values, {2: 104, 3: 104}), values)
    (planned,) = look.planned()
    (one,) = first_choice(planned, look.wishes)
    assert (one.m, one.n, one.warps) == (4, 128, 1)


def test_an_entry_of_an_odd_width_is_one_step() -> None:
    """Of 123 columns, none of which a wide load reads: steps that end inside of entries took four
    times as long.
    """
    entries = {n: drawn(512, below=64).sort().values for n in ("r", "c")}
    values = {"P": drawn(512, 123, 123), "V": drawn(64, 123, 54)}
    values |= {n: insum.unchanging(v) for n, v in entries.items()}
    _, (one,) = guessed("O[r[b],q,d] = P[b,q,k] * V[c[b],k,d]", rows=64, **values)
    assert (one.m, one.k, one.warps) == (64, 128, 8)


STORED = {
    "an index each": ("y[b,k] = x[b,t[b,k]]", {"x": (9000, 700), "t": (9000, 336)}, 4),
    "an index for many": ("y[b,k] = x[b,t[k]]", {"x": (9000, 700), "t": (336,)}, 4),
    "rows": ("y[p,f] = x[t[p],f]", {"x": (9000, 75), "t": (60_000,)}, 4),
    "pairs": ("y[i,j,f] = x[i,f] * z[j,f]", {"x": (465, 40), "z": (600, 40)}, 8),
    "long rows": ("y[p,f] = x[t[p],f]", {"x": (9000, 875), "t": (60_000,)}, 16),
    "all of a matrix": ("y[i,j] = x[i,j] * z[j]", {"x": (9000, 1435), "z": (1435,)}, 8),
}


@pytest.mark.parametrize("name", STORED)
def test_how_many_places_a_thread_writes(name: str) -> None:
    statement, shapes, places = STORED[name]
    single = torch.float32
    values = {
        n: drawn(*s, below=300) if n == "t" else drawn(*s, dtype=single) for n, s in shapes.items()
    }
    _, (one,) = guessed(statement, **values)
    assert one.m * one.n // (32 * one.warps) == places
