"""Which weights to keep: masks by magnitude, for single weights and for whole blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from insum.accepted import ELEMENTS, VALUES, Accepted, takes
from insum.errors import BindingError, FormatError
from insum.formats.entries import grid_of, padded_to
from insum.formats.validate import block_shape as checked_block
from insum.lang.types import promoted, widened

WEIGHTS = Accepted(
    "a dense tensor of numbers",
    lambda v: VALUES.fits(v) and ELEMENTS.fits(v) and v.dtype is not torch.bool,
)


@takes(weight=WEIGHTS)
def magnitude_mask(weight: Tensor, density: float) -> Tensor:
    """True at the given share of weights that are largest in magnitude.

    Args:
        weight: A tensor of any shape.
        density: The share that is kept.

    Returns:
        A mask of the same shape.

    Examples:
        >>> magnitude_mask(torch.tensor([[1.0, -4.0], [3.0, 0.5]]), density=0.5)
        tensor([[False,  True],
                [ True, False]])
    """
    return _largest(weight.detach().to(widened(weight.dtype)).abs(), density)


@takes(weight=WEIGHTS)
def block_mask(weight: Tensor, block_shape: int | tuple[int, ...], density: float) -> Tensor:
    """True at the given share of blocks that are largest in Frobenius norm; one element for each
    block of the grid.

    Args:
        weight: A matrix.
        block_shape: Rows and columns of a block, or one number for both.
        density: The share of blocks that is kept.

    Returns:
        A mask with one element for each block.

    Examples:
        >>> weight = torch.eye(4)
        >>> weight[:2, 2:] = 5
        >>> block_mask(weight, (2, 2), density=0.25)
        tensor([[False,  True],
                [False, False]])
    """
    if weight.dim() != 2:
        raise BindingError(f"weight has {weight.dim()} dimension(s)", expected="a matrix")
    wide = weight.detach().to(promoted(weight.dtype, torch.float32))
    blocks = in_blocks(wide, checked_block(block_shape, weight.dim()))
    return _largest(blocks.abs().square().sum((1, 3)), density)


def in_blocks(x: Tensor, block: tuple[int, ...]) -> Tensor:
    """A matrix as (block row, row, block column, column), the last blocks padded with zeros."""
    rows, columns = grid_of(x.shape, block)
    return padded_to(x, (rows * block[0], columns * block[1])).reshape(
        rows, block[0], columns, block[1]
    )


def over_blocks(mask: Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """A mask of blocks as a mask of single weights."""
    return mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[
        : shape[0], : shape[1]
    ]


def _largest(size: Tensor, density: float) -> Tensor:
    if not isinstance(density, int | float) or isinstance(density, bool) or not 0 <= density <= 1:
        raise FormatError(f"density is {density!r}", expected="the share that is kept, from 0 to 1")
    keep = math.floor(density * size.numel() + 0.5)
    mask = torch.zeros(size.numel(), dtype=torch.bool, device=size.device)
    mask[size.reshape(-1).topk(keep, sorted=False).indices] = True
    return mask.reshape(size.shape)
