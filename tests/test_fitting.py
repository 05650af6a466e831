"""When a small factor is copied before the product that reads it, and what that saves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import insum
from insum.call.request import request_of
from insum.plan import fitting
from insum.runtime import compiling, inspection
from insum.runtime.bound_launch import BoundLaunch
from insum.runtime.program import Refusal

STATEMENT = "out[x,m] = f[nb[z,x],c] * w[z,c,m]"
VOXELS, OFFSETS = 20_000, 27


def look(
    inputs: int,
    outputs: int,
    dtype: torch.dtype = torch.float16,
    voxels: int = VOXELS,
    matrices: int = OFFSETS,
    turned: bool = False,
) -> inspection.Look:
    """A convolution of so many channels, as a GPU would get it; no values are written. ``turned``:
    weights lie along the sum.
    """
    nb = torch.arange(voxels, dtype=torch.int32).expand(matrices, voxels).contiguous()
    w = torch.empty(matrices, inputs, outputs, dtype=dtype)
    values = {
        "f": torch.empty(voxels, inputs, dtype=dtype),
        "w": w.mT.contiguous().mT if turned else w,
        "nb": insum.unchanging(nb),
    }
    problem = request_of(STATEMENT, None, None, ("nb",)).bind(values)
    return inspection.elsewhere(problem, values)


def launches(look: inspection.Look) -> list[BoundLaunch]:
    program = look.program(anywhere=True)
    assert not isinstance(program, Refusal), program.reason
    return look.ready(program).launches


def names(look: inspection.Look) -> list[str]:
    """Of its kernels, what they do beside the statement."""
    found = [one.launch.kernel.name.split("__")[-1] for one in launches(look)]
    return [name if name.startswith("copies") else "product" for name in found]


@pytest.mark.parametrize("channels", [(128, 72), (120, 128), (40, 40), (64, 24)])
def test_what_fills_no_tile_is_copied(channels: tuple[int, int]) -> None:
    assert names(look(*channels)) == ["copies_w", "product"]


@pytest.mark.parametrize("channels", [(128, 128), (64, 32), (48, 64)])
def test_what_fills_tiles_is_not(channels: tuple[int, int]) -> None:
    assert names(look(*channels)) == ["product"]


@pytest.mark.parametrize("inputs", [100, 25])
def test_rows_that_are_gathered_from_anywhere_are_copied(inputs: int) -> None:
    """Those of 100 halves begin at multiples of 8 bytes, those of 25 at multiples of 2."""
    *_, one = launches(look(inputs, 64))
    plan = one.launch.plan
    row = 128 if inputs == 100 else 32
    assert dict(plan.strides)["<aligned>"].units == (row, 1)
    assert f"f is copied first, in rows of {row}, which wide loads read" in plan.why


@pytest.mark.parametrize("outputs", [16, 128, 256])
def test_rows_that_no_wide_load_reads_are_copied(outputs: int) -> None:
    (*_, step) = launches(look(100, outputs))
    assert any("wide loads" in why for why in step.launch.plan.why)


def test_rows_that_are_not_copied() -> None:
    """They are gathered seldom, aligned, wide enough; or the result is wide."""
    for one in (
        look(100, 64, matrices=3, voxels=100_000),
        look(104, 64),
        look(100, 64, torch.float32),
        look(100, 512),
    ):
        assert not any(
            "wide loads" in why for step in launches(one) for why in step.launch.plan.why
        )


def test_what_is_not_worth_it() -> None:
    few, exact = look(120, 72, voxels=1000), look(32, 32, dtype=torch.float64)
    wide = look(32, 32, dtype=torch.float32, voxels=1000)
    large = look(1000, 1000, matrices=8)
    assert all(names(one) == ["product"] for one in (few, exact, wide, large))


# --- factors of 32 bits ---------------------------------------------------------------------------

GRADIENT = "dw[z,c,m] = f[nb[z,x],c] * g[x,m]"


@pytest.fixture(params=["high", "highest"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(was)


def narrow_copies(one: BoundLaunch) -> int:
    """Copies into shared memory of single numbers."""
    config = one.launch.config
    found = compiling.compile_for(
        *(one.launch.function, one.types, "sm_90"), warps=config.warps, stages=config.stages
    )
    assert found.uses("wgmma") and "cp.async.cg" in found.assembly["ptx"]
    return found.assembly["ptx"].count("cp.async.ca")


@pytest.mark.compile_only
@pytest.mark.parametrize("channels", [(32, 64), (64, 64), (96, 96), (128, 256)])
def test_wide_factors_are_turned(channels: tuple[int, int], precision: str) -> None:
    """Matrix instructions read 32-bit numbers along the sum; what lies so is read as it is."""
    for turned in (False, True):
        one = look(*channels, dtype=torch.float32, turned=turned)
        assert names(one) == [*([] if turned else ["copies_w"]), "product"]
        *_, product = launches(one)
        assert narrow_copies(product) == 0, product.launch.kernel.source
        told = any("along the sum" in why for why in product.launch.plan.why)
        assert told == (not turned)


@pytest.mark.compile_only
@pytest.mark.parametrize("channels", [64, 96, 256])
def test_what_is_summed_across_rows_goes_through_registers(channels: int, precision: str) -> None:
    """Gradients of weights read both factors across the sum."""
    nb = torch.arange(VOXELS, dtype=torch.int32).expand(OFFSETS, VOXELS).contiguous()
    values = {
        "f": torch.empty(VOXELS, channels),
        "g": torch.empty(VOXELS, channels),
        "nb": insum.unchanging(nb),
    }
    problem = request_of(GRADIENT, None, None, ("nb",)).bind(values)
    *_, product = launches(inspection.elsewhere(problem, values))
    assert narrow_copies(product) == 0, product.launch.kernel.source
    assert ("+ 0.0" in product.launch.kernel.source) == (precision == "high")


@pytest.mark.parametrize(("voxels", "channels", "large"), [(20_000, 256, True), (3000, 256, False)])
def test_turned_factors_have_large_tiles(voxels: int, channels: int, large: bool) -> None:
    """... where there are enough of them."""
    *_, one = launches(look(channels, channels, dtype=torch.float32, voxels=voxels))
    config = one.launch.config
    assert ((config.m, config.n, config.warps) == (128, 128, 8)) == large, config


def test_a_config_decides() -> None:
    """Tiles of 32 divide a sum of 96: rows that begin at sectors are then read as they are."""
    one = look(96, 128)
    for k, count in ((32, 1), (128, 2)):
        config = insum.Config(m=64, n=128, k=k, warps=4, stages=2)
        found = inspection.elsewhere(one.problem, one.values, config=(config,))
        assert len(names(found)) == count


def test_explain_tells() -> None:
    one = look(120, 72)
    program = one.program(anywhere=True)
    assert not isinstance(program, Refusal)
    told = inspection.told(one, program)
    assert "w is copied first, in 128 rows of 128, which tiles read unmasked" in told
    assert "<fitted>[" in told and "__copies_w(" in told


def test_the_copy_is_bounded() -> None:
    """At most four times the factor, which is bounded itself."""
    *_, one = launches(look(100, 72))
    counts = one.launch.counts
    assert 0 < counts["fitted_rows"] * counts["fitted_row"] * fitting.UNIT < 4 * 100 * 72
    assert fitting.MOST_NUMBERS <= 2**22


def test_networks_of_many_widths_share_kernels() -> None:
    """How long the rows of copies are is passed."""
    every = ((64, 128), (128, 128), (192, 128), (128, 96), (96, 96), (256, 256), (384, 256))
    for dtype, most in ((torch.float32, 1), (torch.float16, 2)):
        found = {one.launch.text for pair in every for one in launches(look(*pair, dtype=dtype))}
        copies = [text for text, *_ in found if "__copies_w" in text]
        assert 0 < len(copies) <= most and len(found) <= len(every) + most, copies


@pytest.mark.compile_only
def test_no_mask_takes_registers() -> None:
    registers = {}
    for channels in ((128, 128), (120, 120)):
        for one in launches(look(*channels)):
            config = one.launch.config
            found = compiling.compile_for(
                *(one.launch.function, one.types, "sm_90"),
                warps=config.warps,
                stages=config.stages,
            )
            copies = "copies" in one.launch.kernel.name
            registers[channels, copies] = found.registers
            assert not found.stack
    assert registers[(120, 120), False] < registers[(128, 128), False]
    assert registers[(120, 120), True] <= 64
