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
from insum.plan.config import power_of_two
from insum.request import request_of
from insum.runtime import bounds, fused, launch
from kernels import bound

pytestmark = pytest.mark.compile_only

#: Registers that one thread can have: a kernel that takes them all had to do without some.
MOST_REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
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
    compiled: launch.Compiled
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
    problem = call.problem()
    program = fused.plan_only(problem, call.values, architecture=target)
    for step in program.steps:
        plan = step.prepared.plan
        for one in step.launches:
            arguments = one.bound(call.values, *program.examples(step))
            found = launch.compile_for(
                one.function, arguments, target, warps=one.config.warps, stages=one.config.stages
            )
            yield Result(
                call.name, plan.strategy, plan.roles.dot, one.config, found, spilled(found)
            )


def spilled(found: launch.Compiled) -> int:
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


@pytest.mark.parametrize("target", launch.TARGETS)
@pytest.mark.parametrize("name", APPLICATIONS)
def test_application(name: str, target: str) -> None:
    results = [result for call in calls(name) for result in compiled(call, target)]
    print("", *results, sep="\n")
    assert len(results) >= len(calls(name))
    for result in results:
        assert result.spilled == 0, result
        assert 0 < result.compiled.registers < MOST_REGISTERS[target], result
    forward = [result for result in results if result.call == name]
    if target == "sm_90" and ("block SpMM" in name or "convolution" in name):
        assert all(result.compiled.uses("wgmma") for result in forward), (
            "Hopper's matrix instructions"
        )
        assert all(result.compiled.uses("cp.async") for result in forward), "gathers are pipelined"
    if target == "sm_80" and any(result.dot for result in forward):
        assert all(result.compiled.uses("cp.async") for result in forward)
    if target == "gfx942" and any(result.dot for result in forward):
        assert all(result.compiled.uses("mfma") for result in forward)


@pytest.mark.parametrize("target", launch.TARGETS)
@pytest.mark.parametrize("wraps", [False, True])
def test_index_tensors_against_their_range(wraps: bool, target: str) -> None:
    pointers = (
        torch.empty(1, dtype=torch.int32),
        torch.empty(1, dtype=torch.int64),
        torch.empty(1, dtype=torch.int32),
    )
    found = launch.compile_for(
        bounds._function(wraps), [*pointers, 4099, 2**33], target, warps=4, stages=1
    )
    assert found.stack == 0 and 0 < found.registers < 64


FLOAT32 = {
    "a product": "C[i,j] = A[i,k] * B[k,j]",
    "a gathered product": "C[I[i],j] = A[I[i],k] * B[k,j]",
    "functions in a product": "C[i,j] = exp(A[i,k]) * sigmoid(B[k,j])",
    "scales on both sides": "C[i,j] = A[i,k] * B[k,j] * u[i] * v[k]",
}


@pytest.mark.parametrize("target", launch.TARGETS)
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
    for _, found in fused.compile_only(problem, values, target):
        assert spilled(found) == 0, f"{found.registers} registers"


def test_the_list_is_complete() -> None:
    assert list(usual()) == APPLICATIONS


@pytest.mark.parametrize(
    "name", ["block SpMM, BlockGroupCOO", "convolution by voxel", "convolution, grouped"]
)
def test_operands_are_born_in_their_layout(name: str) -> None:
    """No reshape and no transposition, in the text and in what the compiler makes of it."""
    for call in calls(name):
        for step in fused.plan_only(call.problem(), call.values).steps:
            for one in step.launches:
                assert not re.search(
                    r"tl\.(trans|permute|reshape|view)\b|\.T\b", one.kernel.source
                ), one.kernel.source


def test_half_outputs_are_accumulated_in_float32() -> None:
    (result,) = compiled(calls("convolution, grouped")[0], "sm_90")
    assert result.strategy == "atomic"
    assert not re.search(r"(red|atom)\S*\.f16", result.compiled.assembly["ptx"])


@pytest.mark.parametrize("target", launch.TARGETS)
@pytest.mark.parametrize("number", [1, 3, 2**40])
@pytest.mark.parametrize("operator", ["max=", "+="])
def test_integers_that_are_passed(operator: str, number: int, target: str) -> None:
    """Triton makes a constant of 1, and passes others in 32 or 64 bits; the result is an int64 in
    any case.
    """
    values: dict[str, Any] = {
        "D": torch.tensor([0, 1], dtype=torch.int8),
        "E": torch.tensor([0, -1, 1, 0], dtype=torch.int16),
        "a": number,
        "b": 7,
    }
    call = Call(
        "numbers", request_of(f"C[E[2*D[j] + j]] {operator} -a * b", None, {0: 2}, ("E",)), values
    )
    assert list(compiled(call, target))


# --- how often ------------------------------------------------------------------------------------


def sources(statement: str, cases: list[dict[str, Any]], sizes: list[dict[int, int]]) -> set[str]:
    """Texts of the kernels of one statement for many tensors."""
    found = set()
    for values, size in zip(cases, sizes, strict=True):
        for step in fused.plan_only(bound(statement, values, size), values).steps:
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


def test_specialised_by_divisibility_alone() -> None:
    """What compiling depends on besides the text: whether an integer is 1 or a multiple of 16, and
    kinds of pointers.
    """
    assert launch.argument_kind(1) == ("constexpr", False)
    assert launch.argument_kind(17) == ("i32", False) and launch.argument_kind(32) == ("i32", True)
    assert launch.argument_kind(2**31) == ("i64", True) and launch.argument_kind(2**31 + 1) == (
        "i64",
        False,
    )
    assert launch.argument_kind(torch.empty(1, dtype=torch.bfloat16)) == ("*bf16", True)
