"""Kernels that are written by hand, compiled for GPUs that are not here."""

from __future__ import annotations

import inspect

import pytest
import torch

from insum.runtime import compiling
from insum.runtime.handwritten import (
    gating,
    grouping,
    hashing,
    looking,
    loops,
    mixing,
    packs,
    reaching,
)
from insum.runtime.handwritten.kernel import Handwritten

pytestmark = pytest.mark.compile_only

I32, I64 = torch.int32, torch.int64
#: Of what channels are mixed in, with the precision of products.
MIXED = ((torch.float32, "tf32x3"), (torch.bfloat16, "tf32x3"), (torch.float64, ""))
#: Dtypes of the pointers that each is launched with: coordinates and edges come in two, words of
#: bits and results in several.
RECORD = (I32, I64, I32)
KERNELS: dict[str, tuple[Handwritten, list[tuple[torch.dtype, ...]]]] = {
    **{
        f"insert, {ndim} axes": (
            kernel,
            [(kind, kind, I32, *RECORD) for kind in ((I32, I64) if ndim == 3 else (I64,))],
        )
        for ndim, kernel in hashing._INSERTS.items()
        if ndim > 2  # of fewer axes they have fewer of the same lines
    },
    **{
        f"find, {ndim} axes, coarse {coarse}, many {many}": (
            kernel,
            [
                (own, I32, other, I64, I32, I32, words)
                for own, other, words in (
                    ((I32, I64, I32), (I64, I32, I64)) if ndim == 3 else ((I64, I64, I64),)
                )
            ],
        )
        for (ndim, coarse, many), kernel in hashing._FINDS.items()
        if ndim == 3 and coarse != many or ndim == 4 and coarse
    },
    "reach": (reaching._REACHERS[4], [(I32, I32, I32, I64, I64, I32, I64)]),
    "firsts": (reaching._FIRSTS, [(I64, I32, I64)]),
    "places": (reaching._PLACERS[4], [(I64, I32, I64, I64)]),
    "look": (looking._LOOK, [(kind, I64) for kind in (I32, I64, torch.int16, torch.uint8)]),
    "bits": (packs._BITS, [(table, I32, words) for table in (I32, I64) for words in (I32, I64)]),
    "count words": (packs._COUNT, [(I32, I32)]),
    "place words": (packs._PLACE, [(I32, I32, I64)]),
    "keys": (packs._KEYS, [(I32, I32), (I64, I64)]),
    **{
        f"steps, {parts} parts": (kernel, [(I32 if parts == 1 else I64, I64, *[I32] * 6, I64)])
        for parts, kernel in packs._STEPS.items()
        if parts in (0, 1, 3)
    },
    "by step": (packs._BY_STEP, [(I64, *[I32] * 5)]),
    "invert": (packs._INVERT, [(I32, I32)]),
    "count": (
        loops._COUNT,
        [(kind, counts, *RECORD) for kind in (I32, I64) for counts in (I32, I64)],
    ),
    "normalise": (
        loops._NORMALISE,
        [
            (kind, counts, kind, weight)
            for kind, counts in ((I32, I32), (I64, I32), (I64, I64))
            for weight in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        ],
    ),
    "count relations": (
        grouping._COUNT,
        [(edge, kind, I32, *RECORD) for edge in (I32, I64) for kind in (I32, I64)],
    ),
    "start groups": (grouping._START, [(I32, I64, I64)]),
    "fill groups": (
        grouping._FILL,
        [
            (edge, kind, weight, I64, I64, I64, I32, weight, I32)
            for edge, kind in ((I32, I64), (I64, I64))
            for weight in (torch.float16, torch.float32)
        ],
    ),
    **{
        f"mix {rows} rows of {str(dtype).removeprefix('torch.')}, {pairs} pairs": (
            mixing.product_kernel(rows, tiles.columns, tiles.summed, pairs, pairs == 1, precision),
            [(*[dtype] * (2 * pairs + 2), I32, I32, torch.float64)],
        )
        for dtype, precision in MIXED
        for tiles in [mixing.tiles_of(dtype)]
        for rows, pairs in ((mixing.MANY_ROWS, 1), (mixing.ROWS, 2))
        if precision or rows == mixing.ROWS
    },
    **{
        f"mix weights of {str(dtype).removeprefix('torch.')}": (
            mixing.weight_kernel(tiles.side, tiles.summed, True, precision),
            [(*[dtype] * 4, I32, torch.float64)],
        )
        for dtype, precision in MIXED
        for tiles in [mixing.tiles_of(dtype)]
    },
    **{
        f"{kernel.name} in {str(dtypes[-1]).removeprefix('torch.')}": (
            kernel,
            [(*[dtype] * (kernel.tensors - 2), I32, torch.float64) for dtype in dtypes],
        )
        for kernels, dtypes in (
            (gating._NARROW, (torch.float16, torch.bfloat16, torch.float32)),
            (gating._WIDE, (torch.float64,)),
        )
        for kernel in kernels
    },
    "add pieces": (
        mixing._ADD_PIECES,
        [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float64,) * 2],
    ),
    "spread": (
        loops._SPREAD,
        [
            (kind, counts, kind, I64, w)
            for kind, counts in ((I32, I32), (I64, I32), (I64, I64))
            for w in (torch.float16, torch.float32)
        ],
    ),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name: str, target: str) -> None:
    kernel, every = KERNELS[name]
    function = kernel._function()
    count = len(function.arg_names)
    for kinds in every:
        for unaligned in (0, 1) if kinds == every[0] else (0,):
            found = compiling.compile_for(
                function,
                kernel.types(kinds, count),
                target,
                warps=kernel.warps,
                stages=kernel.stages,
                unaligned=unaligned,
            )
            # products spill nothing; on sm_80 some of what looks at indices puts a few words aside
            most = 0 if kernel.name.startswith("insum_mix") else 24
            assert found.registers < 255 and found.stack <= most


def test_the_list_is_complete() -> None:
    known = {kernel.name for kernel, _ in KERNELS.values()}
    every = [
        thing
        for module in (gating, grouping, hashing, looking, mixing, packs, loops, reaching)
        for _, thing in inspect.getmembers(module)
        if isinstance(thing, Handwritten)
    ]
    every += [*hashing._INSERTS.values(), *hashing._FINDS.values()]
    every += [*reaching._REACHERS.values(), *reaching._PLACERS.values()]
    every += [*packs._STEPS.values(), *gating._NARROW, *gating._WIDE]
    known -= {"insum_mix", "insum_mix_weights"}  # which are written when they are asked for
    assert {kernel.name for kernel in every} == known
