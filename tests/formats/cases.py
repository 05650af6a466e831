"""What the tests of formats share: patterns that break things, every dtype, every format with its
options.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from insum.formats import COO, ELL, BlockCOO, BlockGroupCOO, GroupCOO, NeighborTable, SparseFormat

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
#: Every format but the neighbour table, which does not hold every tensor.
GENERAL = [COO, ELL, GroupCOO, BlockCOO, BlockGroupCOO]
PATTERNS = ["random", "empty", "full", "one_row", "one_column", "empty_rows", "diagonal", "corner"]


def pattern(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A boolean mask of an adversarial kind."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(shape, dtype=torch.bool)
    noise = torch.rand(shape, generator=generator)
    match kind:
        case "random":
            mask = noise < 0.3
        case "full":
            mask = ~mask
        case "one_row" if shape[0]:
            mask[seed % shape[0]] = True
        case "one_column" if shape[-1]:
            mask[..., seed % shape[-1]] = True
        case "empty_rows":
            mask = noise < 0.5
            mask[::2] = False
        case "diagonal":
            for i in range(min(shape)):
                mask[(i,) * len(shape)] = True
        case "corner" if math.prod(shape):
            mask[(-1,) * len(shape)] = True
    return mask


def filled(mask: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Nonzero numbers of ``dtype`` where the mask is true."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1, 100, mask.shape, generator=generator)
    if dtype.is_complex:
        return torch.where(mask, torch.complex(numbers.float(), -numbers.float()), 0).to(dtype)
    sign = (
        1
        if dtype in (torch.uint8, torch.bool)
        else torch.where(torch.rand(mask.shape, generator=generator) < 0.5, -1, 1)
    )
    return torch.where(mask, numbers * sign, 0).to(dtype)


@st.composite
def dense_tensors(
    draw: Any,
    *,
    ranks: tuple[int, int] = (1, 5),
    dtypes: list[torch.dtype] | None = None,
    smallest: int = 0,
) -> Tensor:
    """A dense tensor with an adversarial pattern of nonzeros."""
    rank = draw(st.integers(*ranks))
    shape = tuple(
        draw(
            st.lists(
                st.integers(smallest, [24, 12, 7, 5, 4][rank - 1]), min_size=rank, max_size=rank
            )
        )
    )
    seed = draw(st.integers(0, 2**16))
    mask = pattern(draw(st.sampled_from(PATTERNS)), shape, seed)
    return filled(mask, draw(st.sampled_from(dtypes or DTYPES)), seed)


@st.composite
def options_for(draw: Any, format: type[SparseFormat], rank: int) -> dict[str, Any]:
    """Options of a format that fit a rank."""
    options: dict[str, Any] = {}
    if "group_dims" in format._options:
        dims = draw(st.permutations(range(rank)))
        options["group_dims"] = tuple(dims[: draw(st.integers(0, rank - 1))])
    if "group_size" in format._options:
        options["group_size"] = draw(st.sampled_from(["auto", "exact", 1, 2, 3, 8]))
    if "block_shape" in format._options:
        options["block_shape"] = tuple(
            draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
        )
    return options


@st.composite
def sparse_cases(draw: Any, **how: Any) -> tuple[Tensor, type[SparseFormat], dict[str, Any]]:
    """A dense tensor, a format for it and options."""
    x = draw(dense_tensors(**how))
    format = draw(st.sampled_from(GENERAL))
    return x, format, draw(options_for(format, x.dim()))


def single_along(x: Tensor, dim: int) -> Tensor:
    """``x`` with at most the first nonzero along ``dim`` kept, as a neighbour table can hold it."""
    nonzero = x != 0
    return torch.where(nonzero & (nonzero.cumsum(dim) == 1), x, torch.zeros_like(x))


def every_format(x: Tensor) -> list[SparseFormat]:
    """``x`` in each general format, with options that leave nothing even."""
    rank, last = x.dim(), (x.dim() - 1,) if x.dim() > 1 else ()
    made: list[SparseFormat] = [
        COO.from_dense(x),
        ELL.from_dense(x),
        GroupCOO.from_dense(x, group_size=2),
        GroupCOO.from_dense(x, group_dims=last, group_size=3),
    ]
    made += [
        ELL.from_dense(x, group_dims=last),
        BlockCOO.from_dense(x, block_shape=(2, 3, 2, 1, 2)[:rank]),
    ]
    made += [
        BlockGroupCOO.from_dense(x, block_shape=(2, 3, 2, 1, 2)[:rank], group_size=2),
        BlockGroupCOO.from_dense(x, block_shape=2, group_dims=last, group_size=2),
    ]
    return made


__all__ = [
    "DTYPES",
    "FLOATS",
    "GENERAL",
    "PATTERNS",
    "NeighborTable",
    "dense_tensors",
    "every_format",
    "filled",
    "options_for",
    "pattern",
    "single_along",
    "sparse_cases",
]
