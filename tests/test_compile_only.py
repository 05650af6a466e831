"""The kernels of the applications and of their gradients, compiled for GPUs that are not here, at
their default configs.

``pytest tests/test_compile_only.py -s`` prints what the compiler says of each.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import applications
import insum
from applications import Call
from insum.call.request import request_of
from insum.codegen.arguments import Pointer
from insum.plan.questions import AskFacts, AskInside, Question
from insum.plan.sizes import BASE, power_of_two
from insum.runtime import compiling, inspection, launch
from insum.runtime.bound_launch import BoundLaunch
from insum.runtime.program import Program
from kernels import bound

pytestmark = pytest.mark.compile_only

#: Registers that one thread can have: a kernel that takes them all had to do without some.
MOST_REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
#: Bytes of shared memory for one program.
MOST_SHARED = {"sm_80": 163 * 2**10, "sm_90": 227 * 2**10, "sm_100": 227 * 2**10, "gfx942": 2**16}
#: Bytes of a thread that may wait on the stack while its loops run: the assembler for Blackwell
#: puts an offset of the output there that is needed at the very end, though it has registers left.
MOST_SPILLED = 4
APPLICATIONS = [
    "block SpMM, BlockCOO",
    "block SpMM, BlockGroupCOO",
    "SpMM, COO",
    "SpMM, GroupCOO",
    "convolution by voxel",
    "convolution by offset",
    "convolution, grouped",
    "tensor product",
    "tensor product, constant",
]


@dataclass(frozen=True)
class Result:
    """One compiled kernel."""

    call: str
    strategy: str
    dot: bool
    config: insum.Config
    compiled: compiling.CompilerReport
    spilled: int

    def __str__(self) -> str:
        c = self.compiled
        matrix = next(
            (name for name in ("wgmma", "tcgen05.mma", "mfma", "mma.sync") if c.uses(name)), "-"
        )
        pipelined = "cp.async" if c.uses("cp.async") else "-"
        figures = (
            f"{c.registers:4} registers {self.spilled:4} spilled {c.shared:7} shared  "
            f"{matrix:11} {pipelined:8}"
        )
        return f"{self.call:42} {c.target:7} {self.strategy:9} {figures}  {self.config}"


@functools.cache
def usual() -> dict[str, applications.Application]:
    """Compiling reads no values, so none are written: the tensors take no memory."""
    return {a.name: a for a in applications.usual(filled=False)}


@functools.cache
def calls(name: str) -> list[Call]:
    return usual()[name].calls(filled=False)


def compiled(call: Call, target: str) -> Iterator[Result]:
    """Every kernel of a call."""
    look = inspection.elsewhere(call.problem(), call.values, architecture=target)
    for one in launches(look):
        plan, config = one.launch.plan, one.launch.config
        found = compile_one(one, target)
        yield Result(call.name, plan.strategy, plan.roles.dot, config, found, spilled(found))


def _program(look: inspection.Look) -> Program:
    program = look.program(anywhere=True)
    assert isinstance(program, Program), program.reason
    return program


def launches(look: inspection.Look) -> list[BoundLaunch]:
    return look.ready(_program(look)).launches


def compile_one(one: BoundLaunch, target: str, unaligned: int = 0) -> compiling.CompilerReport:
    """As a launch on such a device would."""
    config = one.launch.config
    return compiling.compile_for(
        one.launch.function,
        one.types,
        target,
        warps=config.warps,
        stages=config.stages,
        unaligned=unaligned,
    )


def spilled(found: compiling.CompilerReport) -> int:
    """Bytes of registers that were spilled. A stack frame may be there for other reasons, which the
    assembler tells when asked.
    """
    if not found.stack or found.target.startswith("gfx"):
        return found.stack
    import triton

    architecture = {"sm_90": "sm_90a", "sm_100": "sm_100a"}.get(found.target, found.target)
    assemblers = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for assembler in sorted(assemblers.glob("ptxas*")):
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(found.assembly["ptx"])
            file.flush()
            command = [assembler, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
            report = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        stores = re.search(r"(\d+) bytes spill stores", report)
        if stores:
            return int(stores.group(1))
    return found.stack


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize("name", APPLICATIONS)
def test_application(name: str, target: str) -> None:
    results = [result for call in calls(name) for result in compiled(call, target)]
    print("", *results, sep="\n")
    assert len(results) >= len(calls(name))
    for result in results:
        assert result.spilled <= MOST_SPILLED, result
        assert 0 < result.compiled.registers < MOST_REGISTERS[target], result
    forward = [result for result in results if result.call == name]
    if any(result.dot for result in forward):  # others bring pieces of a sum together
        forward = [result for result in forward if result.dot]
    if target == "sm_90" and ("block SpMM" in name or "convolution" in name):
        assert all(result.compiled.uses("wgmma") for result in forward), (
            "Hopper's matrix instructions"
        )
        assert all(result.compiled.uses("cp.async") for result in forward), "gathers are pipelined"
    if target == "sm_80" and any(result.dot for result in forward):
        assert all(result.compiled.uses("cp.async") for result in forward)
    if target == "gfx942" and any(result.dot for result in forward):
        assert all(result.compiled.uses("mfma") for result in forward)


MATRIX = {"sm_80": "mma.sync", "sm_90": "mma", "sm_100": "mma", "gfx942": "mfma"}
#: Blocks, and the bytes in which their values can be read.
SHAPES = [((8, 8), 4), ((20, 20), 8), ((24, 40), 16), ((48, 48), 16), ((64, 8), 16), ((100, 12), 8)]


def block_product(block: tuple[int, int]) -> Call:
    one = applications.block_spmm(
        rows=64,
        columns=64,
        block=block,
        n=2048,
        density=0.1,
        group=4,
        dtype=torch.float16,
        filled=False,
    )
    return one.forward


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize(("block", "width"), SHAPES, ids=str)
def test_blocks_of_any_shape(block: tuple[int, int], width: int, target: str) -> None:
    """On matrix instructions, with nothing spilled, in loads as wide as their rows allow."""
    call = block_product(block)
    (result,) = compiled(call, target)
    assert result.dot and result.compiled.uses(MATRIX[target]), result
    assert result.spilled <= MOST_SPILLED and result.compiled.registers < MOST_REGISTERS[target]
    if target == "sm_90":
        (one,) = launches(inspection.elsewhere(call.problem(), call.values))
        found = loads(one)
        assert found["B"] == {16} and found["AV"] == {width}, one.launch.kernel.source
        assert result.compiled.uses("cp.async"), "gathers are pipelined"
        assert result.compiled.uses("wgmma") or result.config.n == 8


class Unseen:
    """Answers for index tensors that nobody has looked at: nothing is known, and nothing is known
    to be in range.
    """

    def __init__(self, look: inspection.Look) -> None:
        self.answers = look.answers

    def __call__(self, question: Question) -> Any:
        match question:
            case AskFacts():
                return None
            case AskInside():
                return False
            case _:
                return self.answers(question)


UNSEEN = {
    "a sum": "C[AM[p],n] += AV[p] * B[AK[p],n]",
    "a maximum": "C[AM[p],n] max= AV[p] * B[AK[p],n]",
    "a minimum of doubles": "C[AM[p],n] min= F[p,n]",
    "a maximum of integers": "C[AM[p],n] max= G[p,n]",
    "blocks": "C[AM[p],m,n] += D[p,m,k] * E[AK[p],k,n]",
}


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize("name", UNSEEN)
def test_index_tensors_that_nobody_has_looked_at(name: str, target: str) -> None:
    """Sums and maxima are atomic; nothing out of range is read or written."""
    every = {
        "AM": torch.randint(0, 300, (5000,)).int(),
        "AK": torch.randint(0, 300, (5000,)).int(),
        "AV": torch.empty(5000),
        "B": torch.empty(300, 64),
        "D": torch.empty(5000, 32, 32),
        "E": torch.empty(300, 32, 64),
        "F": torch.empty(5000, 24, dtype=torch.float64),
        "G": torch.empty(5000, 24, dtype=torch.int64),
    }
    values = {n: v for n, v in every.items() if f"{n}[" in UNSEEN[name]}
    look = inspection.elsewhere(bound(UNSEEN[name], values, {0: 300}), values, architecture=target)
    look.answers = Unseen(look)  # type: ignore[assignment]
    found = launches(look)
    assert [one.launch.plan.strategy for one in found] == ["atomic"]
    assert found[0].launch.plan.guarded
    for one in found:
        assert spilled(compile_one(one, target)) == 0, one.launch.config


#: Shapes of what rows of 64 numbers start from: a bias, a row for each, a number for each.
BASES = [(64,), (300, 64), (300, 1)]


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize("shape", BASES, ids=str)
def test_sums_that_start_from_a_base(shape: tuple[int, ...], target: str) -> None:
    """One more load at the end of a row, as wide as the store."""
    values = {
        "d": torch.arange(300).repeat_interleave(16),
        "s": torch.randint(0, 300, (4800,)),
        "w": torch.empty(4800, dtype=torch.float16),
        "x": torch.empty(300, 64, dtype=torch.float16),
    }
    base = torch.empty(shape, dtype=torch.float16)
    problem = bound("y[d[e],f] += w[e] * x[s[e],f]", {**values, "y": base.expand(300, 64)})
    given = {**values, BASE: base}
    for one in launches(inspection.elsewhere(problem, given, architecture=target)):
        assert one.launch.plan.base == BASE
        assert spilled(compile_one(one, target)) == 0, one.launch.config


@pytest.mark.parametrize("target", compiling.TARGETS)
def test_what_looks_at_indices_writes_the_base(target: str) -> None:
    values = {
        "d": torch.randint(0, 300, (4800,)),
        "x": torch.empty(4800, 64, dtype=torch.float16),
    }
    base = torch.empty(64, dtype=torch.float16)
    problem = bound("y[d[e],f] += x[e,f]", {**values, "y": base.expand(300, 64)})
    look = inspection.elsewhere(problem, {**values, BASE: base}, architecture=target)
    look.answers = Unseen(look)  # type: ignore[assignment]
    check = look.ready(_program(look)).check
    assert check is not None and Pointer(BASE) in check.launch.arguments
    assert spilled(compile_one(check, target)) == 0


#: A matrix for each edge, and the gradients of rows and matrices.
OWN_MATRICES = {
    "forward": "y[d[e],o] += x[s[e],i] * W[e,i,o]",
    "gradient of rows": "z[s[e],i] += y[d[e],o] * W[e,i,o]",
    "gradient of matrices": "z[e,i,o] = y[d[e],o] * x[s[e],i]",
}


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize("name", OWN_MATRICES)
def test_matrices_of_entries(name: str, target: str) -> None:
    """Read and written once, in the widest loads and stores."""
    rows, edges = torch.empty(2000, 16), torch.randint(0, 2000, (2, 5000))
    every = {"x": rows, "y": rows, "W": torch.empty(5000, 16, 16), "s": edges[0], "d": edges[1]}
    read = OWN_MATRICES[name].split("=")[1] + "s[ d["
    values = {n: v for n, v in every.items() if f"{n}[" in read}
    sizes = {} if "matrices" in name else {0: 2000}
    problem = bound(OWN_MATRICES[name], values, sizes)
    (one,) = launches(inspection.elsewhere(problem, values, architecture=target))
    found = compile_one(one, target)
    assert spilled(found) == 0, one.launch.config
    if target == "sm_90" and "matrices" in name:
        assert "st.global.v4.b32" in found.assembly["ptx"]
    elif target == "sm_90":
        assert one.launch.plan.strategy == "atomic" and loads(one)["W"] == {16}


@pytest.mark.parametrize("target", compiling.TARGETS)
def test_left_sides_of_several_indices(target: str) -> None:
    """Rows that know where they lie."""
    values = {
        "x": torch.empty(5000, 48, dtype=torch.float16),
        "d": torch.randint(0, 100, (5000,)),
        "c": torch.randint(0, 30, (5000,)),
    }
    problem = bound("y[d[e],c[e],f] = x[e,f]", values, {"y": (100, 30, 48)})
    every = launches(inspection.elsewhere(problem, values, architecture=target))
    assert {one.launch.plan.strategy for one in every} == {"segment"}
    for one in every:
        assert spilled(compile_one(one, target)) <= 2 * MOST_SPILLED, one.launch.config


#: Statements over narrow gathered rows.
NARROW = {
    "convolution": ("o[x,m] = f[t[z,x],c] * w[z,c,m]", {"f": (5000, 16), "w": (27, 16, 32)}, 0),
    "few": ("o[x,m] = f[t[z,x],c] * w[z,c,m]", {"f": (5000, 3), "w": (27, 3, 128)}, 0),
    "gradient": ("w[z,c,m] = f[t[z,x],c] * g[x,m]", {"f": (5000, 32), "g": (5000, 16)}, 0),
    "by channel": ("w[z,c] = f[t[z,x],c] * g[x,c]", {"f": (5000, 96), "g": (5000, 96)}, 0),
    "sums": ("y[r[p],n] = v[p] * f[c[p],n]", {"v": (50_000,), "f": (5000, 8)}, 5000),
    "products": (
        "y[r[p],n] = v[p,n] * f[c[p],n] * g[c[p],n]",
        {"v": (50_000, 32), "f": (5000, 32), "g": (5000, 32)},
        5000,
    ),
    "samples": ("y[p] = f[r[p],n] * g[c[p],n]", {"f": (5000, 200), "g": (5000, 200)}, 0),
}


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_narrow_rows(name: str, dtype: torch.dtype, target: str) -> None:
    """Many loads of a warp at once fit the registers."""
    statement, shapes, rows = NARROW[name]
    values: dict[str, Any] = {n: torch.empty(s, dtype=dtype) for n, s in shapes.items()}
    absent = (torch.arange(5000) // 100 + torch.arange(27)[:, None]) % 3 > 0
    indices = {
        "t": torch.arange(5000, dtype=torch.int32).expand(27, 5000).masked_fill(absent, -1),
        "r": torch.arange(5000).repeat_interleave(10),
        "c": torch.arange(5000).repeat(10),
    }
    values |= {n: insum.unchanging(i) for n, i in indices.items() if f"{n}[" in statement}
    problem = bound(statement, values, {0: rows} if rows else None, ("t",) if "t" in values else ())
    for one in launches(inspection.elsewhere(problem, values, architecture=target)):
        assert spilled(compile_one(one, target)) == 0, one.launch.config


@pytest.mark.parametrize("shape", [(8, 32, 32), (8, 32, 64), (27, 16, 32), (27, 256, 256)])
def test_wide_products_that_meet_in_atomics_fit_shared_memory(shape: tuple[int, int, int]) -> None:
    """Of TF32, with a table that nobody has looked at: tiles are put together before they meet."""
    rows = 90_000
    values = {"g": torch.empty(rows, shape[-1]), "w": torch.empty(shape)}
    values["t"] = torch.zeros(shape[0], rows, dtype=torch.int32)
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        problem = bound("y[t[z,x],c] = g[x,m] * w[z,c,m]", values, {0: rows}, ("t",))
        look = inspection.elsewhere(problem, values)
        *_, one = launches(look)
        assert one.launch.plan.strategy == "atomic"
        assert compile_one(one, "sm_90").shared <= MOST_SHARED["sm_90"], one.launch.config
    finally:
        torch.set_float32_matmul_precision(was)


#: A convolution as its statements are run: copies, the product, and both gradients.
WINDOWS = {
    "a copy": ("z[b,u,c] = x[b,c,u]", {"x": (8, 256, 2050)}, {}),
    "a copy of images": ("z[b,u,v,c] = x[b,c,u,v]", {"x": (8, 128, 58, 58)}, {}),
    "channels first": (
        "y[b,o,t] = x[b,t+r,c] * w[o,r,c]",
        {"x": (32, 2050, 256), "w": (256, 3, 256)},
        {2: 2048},
    ),
    "channels last": (
        "y[b,t,o] = x[b,t+r,c] * w[r,c,o]",
        {"x": (32, 2050, 256), "w": (3, 256, 256)},
        {1: 2048},
    ),
    "images": (
        "y[b,o,i,j] = x[b,i+r,j+s,c] * w[o,r,s,c]",
        {"x": (32, 58, 58, 128), "w": (128, 3, 3, 128)},
        {2: 56, 3: 56},
    ),
    "small images": (
        "y[b,o,i,j] = x[b,i+r,j+s,c] * w[o,r,s,c]",
        {"x": (32, 16, 16, 512), "w": (512, 3, 3, 512)},
        {2: 14, 3: 14},
    ),
    "gradient of x": (
        "y[b,c,t+r] = g[b,t,o] * w[c,r,o]",
        {"g": (32, 2048, 256), "w": (256, 3, 256)},
        {2: 2050},
    ),
    "gradient of x, apart": (
        "y[b,c,2*t+r] = g[b,t,o] * w[c,r,o]",
        {"g": (32, 1024, 256), "w": (256, 3, 256)},
        {2: 2049},
    ),
    "gradient of w": (
        "y[o,c,r] = g[b,o,t] * x[b,t+r,c]",
        {"g": (32, 256, 2048), "x": (32, 2050, 256)},
        {2: 3},
    ),
}


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, dtype: torch.dtype, target: str) -> None:
    statement, shapes, sizes = WINDOWS[name]
    values = {n: torch.empty(shape, dtype=dtype, device="meta") for n, shape in shapes.items()}
    problem = bound(statement, values, sizes)
    *copies, one = launches(inspection.elsewhere(problem, values, architecture=target))
    assert all("__copies_w" in copy.launch.kernel.name for copy in copies)
    found = compile_one(one, target)
    plan = one.launch.plan
    assert spilled(found) <= MOST_SPILLED, one.launch.config
    assert found.shared <= MOST_SHARED[target], one.launch.config
    assert plan.strategy == "store"
    assert plan.roles.dot == ("copy" not in name)
    if plan.roles.dot and target == "sm_90":
        assert found.uses("wgmma") and found.uses("cp.async")


FLOAT32 = {
    "a product": "C[i,j] = A[i,k] * B[k,j]",
    "a gathered product": "C[I[i],j] = A[I[i],k] * B[k,j]",
    "functions in a product": "C[i,j] = exp(A[i,k]) * sigmoid(B[k,j])",
    "scales on both sides": "C[i,j] = A[i,k] * B[k,j] * u[i] * v[k]",
}


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize("name", FLOAT32)
def test_float32_products_fit_the_registers(name: str, target: str) -> None:
    """Exact products split their operands into parts, which takes registers; the first guess leaves
    room for that.
    """
    every = {
        "A": torch.empty(4096, 512),
        "B": torch.empty(512, 384),
        "I": torch.arange(4096).flip(0),
        "u": torch.empty(4096),
        "v": torch.empty(512),
    }
    values = {n: v for n, v in every.items() if f"{n}[" in FLOAT32[name]}
    problem = request_of(FLOAT32[name], (4096, 384), None, ()).bind(values)
    for _, found in inspection.compile_only(problem, values, target):
        assert spilled(found) == 0, f"{found.registers} registers"


def exponentials(statement: str) -> int:
    values = {"x": torch.empty(4096)}
    problem = request_of(statement, None, None, ()).bind(values)
    ((_, found),) = inspection.compile_only(problem, values, "sm_90")
    return found.assembly["ptx"].count("ex2.approx")


def test_a_sigmoid_and_that_of_the_opposite_share_an_exponential() -> None:
    """As they stand in the slope of a sigmoid: exponentials are what takes the time there."""
    alone = exponentials("y[n] = sigmoid(x[n])")
    assert 0 < alone == exponentials("y[n] = sigmoid(x[n]) * sigmoid(-x[n])")
    assert alone == exponentials("y[n] = 4 * sigmoid(2 * x[n]) * sigmoid(-2 * x[n])")


#: Gathers in half precision whose rows begin at multiples of 4 bytes.
PAIRED = {
    "heads of ten": ("s[p,h] = Q[i[p],h,d] * K[i[p],h,d]", {"Q": (900, 4, 10), "K": (900, 4, 10)}),
    "rows of 34": ("y[p,f] = x[i[p],f]", {"x": (900, 34)}),
}


@pytest.mark.parametrize("name", PAIRED)
def test_rows_of_even_lengths_are_read_in_pairs(name: str) -> None:
    statement, shapes = PAIRED[name]
    values = {n: torch.empty(shape, dtype=torch.float16) for n, shape in shapes.items()}
    values["i"] = torch.randint(0, 900, (50_000,))
    problem = request_of(statement, None, None, ()).bind(values)
    for _, found in inspection.compile_only(problem, values, "sm_90"):
        loads = re.findall(r"ld\.global\S*\.([bu]\d+)", found.assembly["ptx"])
        assert "b32" in loads and "b16" not in loads, loads


#: Statements of uneven sizes, with what they read.
UNEVEN = {
    "windows": ("s[b,t,r] = q[b,t,f] * k[b,t+r,f]", {"q": (9, 3260, 88), "k": (9, 3283, 88)}),
    "short heads": (
        "y[d[e],h,f] = a[e,h] * x[d[e],h,f]",
        {"a": (90_000, 10), "x": (30_000, 10, 5)},
    ),
    "short rows": ("z[d[e],h] = exp(S[e,h] - m[d[e],h])", {"S": (90_000, 6), "m": (30_000, 6)}),
    "messages": (
        "y[d[e],f] = sigmoid(a[d[e],f] + b[e,f]) * b[e,f]",
        {"a": (30_000, 110), "b": (90_000, 110)},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_sizes_fit_the_registers(name: str, dtype: torch.dtype) -> None:
    """Windows of 88 once spilled, and took thirty times as long."""
    statement, shapes = UNEVEN[name]
    values = {n: torch.empty(shape, dtype=dtype) for n, shape in shapes.items()}
    if "d[e]" in statement:
        values["d"] = insum.unchanging(torch.randint(0, 30_000, (90_000,)))
    columns = {"short heads": (10, 5), "short rows": (6,), "messages": (110,)}.get(name)
    shape = (9, 3260, 24) if columns is None else (30_000, *columns)
    problem = request_of(statement, shape, None, ()).bind(values)
    for _, found in inspection.compile_only(problem, values, "sm_90"):
        assert spilled(found) == 0, f"{found.registers} registers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("count", [22_000, 150_000])
@pytest.mark.parametrize("text", ["y[d[e]] = v[e]", "y[d[e]] = x[p[e]]", "y[d[e],c[e]] = v[e]"])
def test_rows_of_numbers_that_are_cut(text: str, count: int, dtype: torch.dtype) -> None:
    """A compiler pass fails where what is loaded is summed by a loop whose result is used twice."""
    draw = torch.Generator().manual_seed(0)
    d, c = ((torch.rand(count, generator=draw) ** 8 * 40_000).long() // k for k in (1, 20_000))
    every = {"d": insum.unchanging(d), "c": insum.unchanging(c), "v": torch.empty(count)}
    every |= {"x": torch.empty(4000), "p": insum.unchanging(d // 10)}
    used = {name: value for name, value in every.items() if f"{name}[" in text}
    values = {n: v.to(dtype) if v.is_floating_point() else v for n, v in used.items()}
    shape = (40_000, 2) if "c[e]" in text else (40_000,)
    problem = request_of(text, shape, None, ()).bind(values)
    assert all(
        spilled(found) == 0 for _, found in inspection.compile_only(problem, values, "sm_90")
    )


def test_what_would_spill_gets_more_warps() -> None:
    """A product of which one side is computed: 640 bytes of each thread once waited in memory."""
    shapes = {"x": (24380, 32), "W": (40, 32, 82), "z": (24380, 82)}
    values = {n: torch.empty(shape) for n, shape in shapes.items()}
    problem = request_of("y[b,o] = x[b,i] * W[o,i,j] * z[b,j]", None, None, ()).bind(values)
    (one,) = launches(inspection.elsewhere(problem, values))
    *_, (_, found) = inspection.compile_only(problem, values, "sm_90")
    assert (one.launch.config.warps, found.warps, found.stack) == (4, 8, 0)


def test_the_list_is_complete() -> None:
    assert list(usual()) == APPLICATIONS


@pytest.mark.parametrize(
    "name", ["block SpMM, BlockGroupCOO", "convolution by voxel", "convolution, grouped"]
)
def test_operands_are_born_in_their_layout(name: str) -> None:
    """No reshape and no transposition, in the text and in what the compiler makes of it."""
    for call in calls(name):
        for step in inspection.plan_only(call.problem(), call.values).steps:
            for one in step.launches:
                assert not re.search(
                    r"tl\.(trans|permute|reshape|view)\b|\.T\b", one.kernel.source
                ), one.kernel.source


def test_half_outputs_are_accumulated_in_float32() -> None:
    (result,) = compiled(calls("convolution, grouped")[0], "sm_90")
    assert result.strategy == "atomic"
    assert not re.search(r"(red|atom)\S*\.f16", result.compiled.assembly["ptx"])


@pytest.mark.parametrize("target", compiling.TARGETS)
@pytest.mark.parametrize("operator", ["max=", "+="])
def test_integers_that_are_passed(operator: str, target: str) -> None:
    """In 64 bits, whatever they are: the result is an int64, and there is one kernel for all."""
    texts = set()
    for number in (1, 3, 16, 2**40):
        values: dict[str, Any] = {
            "D": torch.tensor([0, 1], dtype=torch.int8),
            "E": torch.tensor([0, -1, 1, 0], dtype=torch.int16),
            "a": number,
            "b": 7,
        }
        statement = f"C[E[2*D[j] + j]] {operator} -a * b"
        call = Call("numbers", request_of(statement, None, {0: 2}, ("E",)), values)
        found = launches(inspection.elsewhere(call.problem(), call.values, architecture=target))
        assert all("i64" in one.types for one in found[:1])
        texts |= {(one.launch.kernel.source, one.types) for one in found}
    assert len(texts) == len(found)
    assert list(compiled(call, target))


# --- the width of loads ---------------------------------------------------------------------------


def loads(one: BoundLaunch, unaligned: int = 0) -> dict[str, set[int]]:
    """Bytes of the loads out of every tensor, as the assembly for Hopper has them."""
    text = compile_one(one, "sm_90", unaligned).assembly["ptx"]
    names = [a.tensor if isinstance(a, Pointer) else "" for a in one.launch.arguments]
    found: dict[str, set[int]] = {}
    for parameters, width in _traced(text):
        (name,) = {names[p] for p in parameters if p < len(names)} - {""}
        found.setdefault(name, set()).add(width)
    return found


def _traced(ptx: str) -> Iterator[tuple[set[int], int]]:
    """Every load: the parameters that its address is made of, and its bytes. What was loaded from
    memory is not followed further.
    """
    made_of: dict[str, set[str]] = {}
    parameters: dict[str, int] = {}
    found: list[tuple[str, int]] = []
    for line in re.split(r"[;\n]", re.sub(r"//.*", "", ptx)):
        text = re.sub(r"^\s*(@!?%\w+)?\s*", "", line)
        if passed := re.match(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]", text):
            parameters[passed[1]] = int(passed[2])
        elif read := re.match(r"ld\.global(\S*)\s.*\[\s*(%\w+)", text):
            several, bits = re.search(r"\.v(\d)", read[1]), re.search(r"\.[bsuf](\d+)", read[1])
            assert bits is not None, text
            found.append((read[2], int(several[1] if several else 1) * int(bits[1]) // 8))
        elif copied := re.match(r"cp\.async\.\S*global\S*\s[^,]*,\s*\[\s*(%\w+).*?, (0x\w+)", text):
            found.append((copied[1], int(copied[2], 16)))
        else:
            first, *others = re.findall(r"%[a-z]+\d+", text) or [""]
            made_of.setdefault(first, set()).update(others)
    for address, width in found:
        seen: set[str] = set()
        todo = {address}
        while todo:
            register = todo.pop()
            seen.add(register)
            todo |= made_of.get(register, set()) - seen
        yield {parameters[register] for register in seen if register in parameters}, width


def sparse(n: int, dtype: torch.dtype, heavy: int = 0) -> inspection.Look:
    """A product with a sparse matrix."""
    one = applications.spmm(
        rows=2000, columns=2000, n=n, entries=20_000, heavy=heavy, dtype=dtype, filled=False
    )
    return inspection.elsewhere(one.forward.problem(), one.values)


def convolved(channels: int, dtype: torch.dtype, density: float) -> inspection.Look:
    one = applications.convolution(
        voxels=3000,
        offsets=9,
        inputs=channels,
        outputs=channels,
        layout="by voxel",
        density=density,
        kinds=4 if density < 0.5 else 0,
        dtype=dtype,
        filled=False,
    )
    return inspection.elsewhere(one.forward.problem(), one.values)


#: Columns or channels, and how wide a load of a row can be.
WIDTHS = [
    (torch.float16, 200, 16),
    (torch.float16, 100, 8),
    (torch.float16, 72, 16),
    (torch.float32, 100, 16),
    (torch.float32, 20, 16),
    (torch.float32, 50, 8),
    (torch.float16, 128, 16),
]
each_width = pytest.mark.parametrize(("dtype", "n", "width"), WIDTHS, ids=str)


@each_width
def test_rows_of_a_dense_matrix_are_read_in_wide_loads(
    dtype: torch.dtype, n: int, width: int
) -> None:
    """Whatever the columns: neither strides nor masks may hide that rows are multiples of 16 or of
    8 bytes.
    """
    for one in launches(sparse(n, dtype)):
        assert loads(one)["B"] == {width}, one.launch.kernel.source


@each_width
def test_features_and_weights_of_a_convolution_are_read_in_wide_loads(
    dtype: torch.dtype, n: int, width: int
) -> None:
    for density in (0.3, 0.9):  # with rows in an order that fills tiles, and as they are
        every = launches(convolved(n, dtype, density))  # perhaps after copies of both
        *_, one = [one for one in every if one.launch.plan.roles.dot]
        assert ("ordered" in " ".join(one.launch.plan.why)) == (density < 0.5)
        found = loads(one)
        weights = found["<fitted>"] if "<fitted>" in found else found["W"]
        rows, wide = (found["<aligned>"], 16) if "<aligned>" in found else (found["In"], width)
        assert rows == {wide} and weights == {16 if "<fitted>" in found else width}


@pytest.mark.parametrize(("dtype", "n"), [(torch.float16, 200), (torch.float32, 20)], ids=str)
def test_pieces_of_rows_are_put_together_in_wide_loads(dtype: torch.dtype, n: int) -> None:
    *_, last = launches(sparse(n, dtype, heavy=1500))
    assert loads(last)["<work>"] == {16}, last.launch.kernel.source


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_piece_is_told_of_after_the_stores_of_all_threads(dtype: torch.dtype) -> None:
    """And whoever was told reads past its own cache."""
    (one,) = launches(sparse(128, dtype, heavy=1500))
    text = compile_one(one, "sm_90").assembly["ptx"]
    stored, _, after = text.partition("atom.global.gpu.release.exch.b64")
    assert "bar.sync" in stored[stored.rindex("st.global") :]
    told = after.index("atom.global.gpu.acquire.or.b64")
    assert "bar.sync" in after[told : after.index("ld.global.cg")]


def test_nobody_waits_where_barriers_wait_for_no_stores() -> None:
    """On AMD's GPUs one warp cannot release what another has stored: sums are a launch."""
    call = applications.spmm(
        rows=2000,
        columns=2000,
        n=128,
        entries=20_000,
        heavy=1500,
        dtype=torch.float32,
        filled=False,
    )
    for target, count in (("sm_80", 1), ("gfx942", 2)):
        look = inspection.elsewhere(call.forward.problem(), call.values, architecture=target)
        found = launches(look)
        waiting = any("insum_wait(" in one.launch.kernel.source for one in found)
        assert (len(found), waiting) == (count, count == 1)
        assert all(spilled(compile_one(one, target)) <= MOST_SPILLED for one in found)


def test_odd_rows_and_unaligned_tensors_are_read_one_by_one() -> None:
    """What is not provable is not claimed."""
    for one in launches(sparse(99, torch.float16)):
        assert loads(one)["B"] == {2}
    for one in launches(sparse(128, torch.float16)):
        pointers = [a.tensor for a in one.launch.arguments if isinstance(a, Pointer)]
        bit = pointers[::-1].index("B")
        assert loads(one, unaligned=1 << bit)["B"] == {2}, "as its launch counts pointers"


# --- how often ------------------------------------------------------------------------------------


def sources(statement: str, cases: list[dict[str, Any]], sizes: list[dict[int, int]]) -> set[str]:
    """Texts of the kernels of one statement for many tensors."""
    found = set()
    for values, size in zip(cases, sizes, strict=True):
        for step in inspection.plan_only(bound(statement, values, size), values).steps:
            found |= {one.kernel.source for one in step.launches}
    return found


def test_sizes_do_not_make_new_kernels() -> None:
    """Fifty sparse matrices, no two alike in nonzeros, rows or columns: one text for all, and one
    compilation for each kind of strides.
    """
    before = len(launch.loaded_kernels)
    generator = torch.Generator().manual_seed(0)
    cases, sizes = [], []
    for number in range(50):
        rows, columns, entries = 100 + 7 * number, 90 + 11 * number, 500 + 13 * number
        index = torch.arange(entries) % rows
        draw = torch.randint(0, columns, (entries,), generator=generator)
        cases.append(
            {
                "AM": index.sort().values.int(),
                "AV": torch.empty(entries),
                "AK": draw.int(),
                "B": torch.empty(columns, 64),
            }
        )
        sizes.append({0: rows})
    assert len(sources("C[AM[p],n] += AV[p] * B[AK[p],n]", cases, sizes)) == 1
    assert len(launch.loaded_kernels) - before <= 1


def test_column_counts_make_few_kernels() -> None:
    """The number of dense columns decides the tile: one text for each power of two, and for whether
    it divides.
    """
    before = len(launch.loaded_kernels)
    index = (torch.arange(900) // 9).int()
    widths = [8 * n for n in range(1, 51)]
    cases = [
        {"AM": index, "AV": torch.empty(900), "AK": index, "B": torch.empty(100, n)} for n in widths
    ]
    tiles = {(tile := min(256, power_of_two(n)), n % tile == 0) for n in widths}
    assert len(sources("C[AM[p],n] += AV[p] * B[AK[p],n]", cases, [{0: 100}] * len(cases))) <= len(
        tiles
    )
    assert len(launch.loaded_kernels) - before <= len(tiles)


def test_block_products_of_any_size_are_one_kernel() -> None:
    cases, sizes = [], []
    for number in range(50):
        rows, columns = 8 + number, 512 * (1 + number)
        index = (torch.arange(5 * rows) // 5).int()
        blocks, dense = (
            torch.empty(shape, dtype=torch.float16)
            for shape in ((5 * rows, 32, 32), (rows, 32, columns))
        )
        cases.append({"AM": index, "AV": blocks, "AK": index, "B": dense})
        sizes.append({0: rows})
    assert len(sources("C[AM[p],bm,n] += AV[p,bm,bk] * B[AK[p],bk,n]", cases, sizes)) == 1


def test_compiled_for_the_alignment_of_pointers_alone() -> None:
    """No number becomes a constant or is known to be a multiple: units are written in the text."""
    from triton.backends.compiler import GPUTarget

    for one in launches(sparse(128, torch.float16)):
        function, config = one.launch.function, one.launch.config
        pointers = [p for p, type in enumerate(one.types) if type.startswith("*")]
        assert {type for type in one.types if not type.startswith("*")} == {"i32"}
        for unaligned in (0, 1, 5):
            target = GPUTarget(*compiling.TARGETS["sm_90"])
            found = compiling.compile_kernel(
                function, one.types, unaligned, config.warps, config.stages, target
            )
            aligned = [p for bit, p in enumerate(reversed(pointers)) if not unaligned >> bit & 1]
            assert found.src.constants == {} and set(found.src.attrs) == {(p,) for p in aligned}


def test_numbers_are_wide_where_offsets_are() -> None:
    values = {
        "A": torch.empty(2**17, 2**15, dtype=torch.int8, device="meta"),
        "x": torch.empty(2**15, device="meta"),
    }
    look = inspection.elsewhere(bound("y[i] = A[i,j] * x[j]", values), values)
    for one in launches(look):
        assert one.launch.plan.wide
        assert {type for type in one.types if not type.startswith("*")} == {"i64"}
        assert spilled(compile_one(one, "sm_90")) == 0


EVERY_FUNCTION = (
    "whole(sin(x[s[e],f]) + cos(w[e]) + tanh(w[e]) + erf(w[e]) + expm1(w[e]) + log1p(abs(w[e])) "
    "+ gelu(w[e]) + silu(w[e]) + softplus(w[e]) + elu(w[e], 1.5) + leaky_relu(w[e]) + w[e] ** 3 "
    "+ w[e] ** -0.5 + w[e] ** 1.7 + w[e] ** 19 + where(w[e] < 1, x[s[e],f], 2) "
    "+ (k[e] == 3) + k[e] ** 17 "
    "+ maximum(w[e], minimum(x[s[e],f], 0.5))) * ones(x[s[e],f])"
)


def test_offsets_are_wide_where_pieces_of_rows_are_many() -> None:
    """Though nothing that is passed is large."""
    index = torch.arange(3).repeat_interleave(20_000)
    for columns, wide in ((400, False), (400_000, True)):
        values = {"I": index, "V": torch.ones(60_000), "B": torch.empty(1, columns)}
        problem = bound("C[I[p],n] += V[p] * B[0*p,n]", values, {0: 3})
        (one,) = launches(inspection.elsewhere(problem, values))
        assert "insum_wait(" in one.launch.kernel.source
        assert ('slot_count: "i64"' in one.launch.kernel.source) == wide
        assert spilled(compile_one(one, "sm_90")) <= MOST_SPILLED


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_functions(target: str) -> None:
    edges = torch.zeros(512, dtype=torch.int64)
    values = {"x": torch.zeros(64, 64), "w": torch.ones(512)}
    values |= {"s": edges, "d": edges, "k": edges}
    problem = bound(f"y[d[e],f] = {EVERY_FUNCTION}", values, {0: 64})
    for one in launches(inspection.elsewhere(problem, values, architecture=target)):
        found = compile_one(one, target)
        assert spilled(found) <= MOST_SPILLED and 0 < found.registers < MOST_REGISTERS[target]
