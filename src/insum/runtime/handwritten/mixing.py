"""Matrix products between parts of the columns of two tensors, all of them in one launch: a program
has a tile of rows and columns of one part, and tables say where it reads and writes.

A part is the channels of one component of an irrep: so many columns, each so far from the next.
Nothing is split, copied or put together. Sums are in one order: the same numbers come out every
time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from insum.compat.tensors import empty
from insum.runtime.handwritten.kernel import Handwritten, blocks

#: Numbers in a row of each table.
BLOCK_FIELDS, PATH_FIELDS, TILE_FIELDS = 8, 8, 16
#: Rows that one program of a product takes, where there are many programs, or few.
MANY_ROWS, ROWS = 64, 32
#: Programs that keep a device busy: where there are more a tile may be larger, and where there are
#: fewer a sum is done in pieces.
PROGRAMS = 264
#: Weights of which one program adds the pieces.
PIECE_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Tiles:
    """How large the parts are that a program works on, at most: beyond it registers are spilled.

    Attributes:
        columns: channels of a product.
        summed: channels, or rows where weights are the result, that are summed at a time.
        side: channels of a tile of weights, on both sides.
    """

    columns: int
    summed: int
    side: int


#: Without matrix instructions, and with them.
WIDE_TILES, TILES = Tiles(16, 8, 16), Tiles(64, 16, 32)


def tiles_of(dtype: torch.dtype) -> Tiles:
    return WIDE_TILES if dtype == torch.float64 else TILES


@dataclass(frozen=True, slots=True, eq=False)
class ProductTables:
    """Where the programs of a product read and write, on one device.

    Attributes:
        blocks: for each block of columns of the result: its first column, how far channels are
            apart, how many there are, the first of its paths and the one behind the last, which
            component it is, and its first channel.
        paths: for each path: the first column of what it reads, how far components and channels
            are apart, how many channels there are, where its weights begin, how far they are apart
            along the channels read and written, the column of its factors.
        scales: for each path, what it is multiplied with.
        columns: channels of a block.
    """

    blocks: Tensor
    paths: Tensor
    scales: Tensor
    columns: int


@dataclass(frozen=True, slots=True, eq=False)
class WeightTables:
    """Where the programs of a gradient by weights read and write.

    Attributes:
        tiles: for each tile of the weights of a path: of what is read on the left and on the right
            the first column, how far components and channels are apart, how many channels there
            are; the number of components; where its weights begin, and how far they are apart along
            both; the column of its factors; its path.
        scales: for each path, what it is multiplied with.
        side: channels of a tile, on both sides.
    """

    tiles: Tensor
    scales: Tensor
    side: int


def _adding(total: str, left: str, right: str, precision: str) -> str:
    """A line that adds a product of matrices; without ``precision`` where there are no matrix
    instructions for it.
    """
    if precision:
        return f'{total} = tl.dot({left}, {right}, {total}, input_precision="{precision}")'
    return f"{total} += tl.sum({left}[:, :, None] * {right}[None, :, :], 1)"


def _reads(number: int, precision: str) -> str:
    """Lines that add the product of rows and weights of one pair."""
    x, w = f"x{number}", f"w{number}"
    return f"""
            {x}_at = {x}_ptr + row[:, None] * {x}_row + (first + k * k_stride)[None, :]
            x = tl.load({x}_at, mask=there[:, None] & k_there[None, :], other=0)
            {w}_at = {w}_ptr + w_at + (k * w_k)[:, None] + ((n_first + n) * w_n)[None, :]
            w = tl.load({w}_at, mask=k_there[:, None] & n_there[None, :], other=0)
            {_adding("part", "x", "w", precision)}"""


_FACTOR = """
        column = tl.load(path_at + 7)
        factor = tl.load(factor_ptr + row * factor_row + column, mask=there, other=0)
        scale = (scale * factor.to(acc.dtype))[:, None]"""


@functools.lru_cache(maxsize=64)
def product_kernel(
    rows: int, columns: int, summed: int, pairs: int, factored: bool, precision: str
) -> Handwritten:
    """``pairs``: how many products of rows and weights are added; ``factored``: rows have factors;
    ``precision``: of float32, empty for float64.
    """
    reads = "".join([_reads(number, precision) for number in range(pairs)])
    pointers = ", ".join([f"x{n}_ptr, w{n}_ptr" for n in range(pairs)])
    strides = ", ".join([f'x{n}_row: "i64"' for n in range(pairs)])
    kind = "float32" if precision else "float64"
    text = f"""@triton.jit
def insum_mix(
    {pointers}, factor_ptr, out_ptr, blocks_ptr, paths_ptr, scales_ptr,
    rows: "i64", blocks: "i64", {strides}, factor_row: "i64", out_row: "i64",
):
    program = tl.program_id(0)
    block_at = blocks_ptr + (program % blocks) * {BLOCK_FIELDS}
    row = (program // blocks).to(tl.int64) * {rows} + tl.arange(0, {rows})
    there = row < rows
    n = tl.arange(0, {columns})
    n_there = n < tl.load(block_at + 2)
    component = tl.load(block_at + 5)
    n_first = tl.load(block_at + 6)
    acc = tl.zeros([{rows}, {columns}], tl.{kind})
    for path in range(tl.load(block_at + 3), tl.load(block_at + 4)):
        path_at = paths_ptr + path * {PATH_FIELDS}
        first = tl.load(path_at) + component * tl.load(path_at + 1)
        k_stride = tl.load(path_at + 2)
        channels = tl.load(path_at + 3)
        w_at = tl.load(path_at + 4)
        w_k = tl.load(path_at + 5)
        w_n = tl.load(path_at + 6)
        scale = tl.load(scales_ptr + path).to(acc.dtype){_FACTOR if factored else ""}
        part = tl.zeros([{rows}, {columns}], tl.{kind})
        for start in range(0, channels, {summed}):
            k = start + tl.arange(0, {summed})
            k_there = k < channels{reads}
        acc += part * scale
    out_at = tl.load(block_at) + n * tl.load(block_at + 1)
    out_at = out_ptr + row[:, None] * out_row + out_at[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & n_there[None, :])
"""
    return Handwritten("insum_mix", text, stages=3)


_ROW_FACTOR = """
        factor_at = factor_ptr + row * factor_row + tl.load(tile_at + 12)
        factor = tl.load(factor_at, mask=there, other=0)[None, :]"""


@functools.lru_cache(maxsize=64)
def weight_kernel(side: int, summed: int, factored: bool, precision: str) -> Handwritten:
    left = "(x * factor).to(x.dtype)" if factored else "x"
    text = f"""@triton.jit
def insum_mix_weights(
    x_ptr, y_ptr, factor_ptr, out_ptr, tiles_ptr, scales_ptr, rows: "i64", tiles: "i64",
    own_rows: "i64", weights: "i64", x_row: "i64", y_row: "i64", factor_row: "i64",
):
    program = tl.program_id(0)
    tile_at = tiles_ptr + (program % tiles) * {TILE_FIELDS}
    piece = (program // tiles).to(tl.int64)
    side = tl.arange(0, {side})
    u_there = side < tl.load(tile_at + 3)
    w_there = side < tl.load(tile_at + 7)
    u_at = tl.load(tile_at) + side * tl.load(tile_at + 2)
    w_at = tl.load(tile_at + 4) + side * tl.load(tile_at + 6)
    x_component = tl.load(tile_at + 1)
    y_component = tl.load(tile_at + 5)
    components = tl.load(tile_at + 8)
    acc = tl.zeros([{side}, {side}], tl.{"float32" if precision else "float64"})
    end = tl.minimum((piece + 1) * own_rows, rows)
    for start in range(piece * own_rows, end, {summed}):
        row = start + tl.arange(0, {summed})
        there = row < end{_ROW_FACTOR if factored else ""}
        for component in range(components):
            x_at = x_ptr + row[None, :] * x_row + (u_at + component * x_component)[:, None]
            x = tl.load(x_at, mask=u_there[:, None] & there[None, :], other=0)
            y_at = y_ptr + row[:, None] * y_row + (w_at + component * y_component)[None, :]
            y = tl.load(y_at, mask=there[:, None] & w_there[None, :], other=0)
            {_adding("acc", left, "y", precision)}
    acc = acc * tl.load(scales_ptr + tl.load(tile_at + 13)).to(acc.dtype)
    own = (side * tl.load(tile_at + 10))[:, None] + (side * tl.load(tile_at + 11))[None, :]
    out_at = out_ptr + piece * weights + tl.load(tile_at + 9) + own
    mask = u_there[:, None] & w_there[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
"""
    return Handwritten("insum_mix_weights", text, stages=3)


_ADD_PIECES = Handwritten(
    "insum_add_pieces",
    f"""@triton.jit
def insum_add_pieces(pieces_ptr, out_ptr, pieces: "i64", weights: "i64"):
    at = tl.program_id(0).to(tl.int64) * {PIECE_BLOCK} + tl.arange(0, {PIECE_BLOCK})
    there = at < weights
    total = tl.zeros([{PIECE_BLOCK}], pieces_ptr.dtype.element_ty)
    for piece in range(pieces):
        total += tl.load(pieces_ptr + piece * weights + at, mask=there, other=0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=there)
""",
)


def mixed(
    tables: ProductTables,
    pairs: Sequence[tuple[Tensor, Tensor]],
    factors: Tensor | None,
    width: int,
    precision: str,
) -> Tensor:
    """Rows of so many columns: the sum over pairs of rows and weights of what tables say."""
    x, many = pairs[0][0], tables.blocks.shape[0]
    rows, dtype = x.shape[0], x.dtype
    out = empty((rows, width), dtype, x.device)
    few = len(pairs) > 1 or dtype == torch.float64 or many * blocks(rows, MANY_ROWS) < PROGRAMS
    tile = ROWS if few else MANY_ROWS
    kernel = product_kernel(
        tile,
        tables.columns,
        tiles_of(dtype).summed,
        len(pairs),
        factors is not None,
        "" if dtype == torch.float64 else precision,
    )
    by_row = x if factors is None else factors
    operands, strides = [], []
    for one, weight in pairs:
        operands += [one, weight]
        strides.append(one.stride(0))
    made = by_row, out, tables.blocks, tables.paths, tables.scales
    programs = many * blocks(rows, tile)
    kernel(programs, *operands, *made, rows, many, *strides, by_row.stride(0), width)
    return out


def weights_between(
    tables: WeightTables, x: Tensor, y: Tensor, factors: Tensor | None, numel: int, precision: str
) -> Tensor:
    """What rows on both sides send to the weights between them. A few tiles are summed in pieces,
    which are then added.
    """
    rows, many, dtype = x.shape[0], tables.tiles.shape[0], x.dtype
    summed = tiles_of(dtype).summed
    pieces = min(max(1, PROGRAMS // many), blocks(rows, 4 * summed))
    own_rows = summed * blocks(rows, summed * pieces)
    pieces = blocks(rows, own_rows)
    wide = dtype if pieces == 1 or dtype == torch.float64 else torch.float32
    out = empty((pieces, numel), wide, x.device)
    precision = "" if dtype == torch.float64 else precision
    kernel = weight_kernel(tables.side, summed, factors is not None, precision)
    by_row = x if factors is None else factors
    made = x, y, by_row, out, tables.tiles, tables.scales
    strides = x.stride(0), y.stride(0), by_row.stride(0)
    kernel(many * pieces, *made, rows, many, own_rows, numel, *strides)
    if pieces == 1:
        return out.view(numel)
    total = empty((numel,), dtype, x.device)
    _ADD_PIECES(blocks(numel, PIECE_BLOCK), out, total, pieces, numel)
    return total
