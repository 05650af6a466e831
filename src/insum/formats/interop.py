"""From and to what users already have: torch.sparse, SciPy, a PyG edge_index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from insum.accepted import NARROW_FLOATS
from insum.compat.sparse import indices_of
from insum.errors import DeviceError, DtypeError, FormatError, UnsupportedError
from insum.formats import entries as E
from insum.formats.validate import Verdict, check_shape, range_verdicts
from insum.lang.types import widened

if TYPE_CHECKING:
    from insum.formats.base import SparseFormat

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def from_entries(
    indices: Sequence[Tensor] | Tensor,
    values: Tensor | None,
    shape: tuple[int, ...],
    order: tuple[int, ...],
    check: bool,
) -> E.Entries:
    """Entries from a user's own coordinates."""
    coords = tuple(map(_signed, indices))
    check_shape(shape)
    if len(coords) != len(shape):
        raise FormatError(
            f"indices has {len(coords)} array(s), but shape {shape} has {len(shape)} dimension(s)"
        )
    for d, c in enumerate(coords):
        _check_coords(f"indices[{d}]", c, coords[0])
    if values is not None and (values.dim() != 1 or values.shape[0] != coords[0].shape[0]):
        raise FormatError(
            f"values has shape {tuple(values.shape)}",
            expected=f"({coords[0].shape[0]},), one value per entry",
        )
    if values is not None and values.device != coords[0].device:
        raise DeviceError(
            f"values are on {values.device} but indices on {coords[0].device}",
            expected="all arrays on one device",
        )
    if check:
        _check_ranges(_dimensions(coords, shape))
    return E.collect(coords, values, shape, order=order)


def from_torch(x: Tensor, check: bool) -> E.Entries:
    """Entries of a `torch.sparse` tensor."""
    check_shape(tuple(x.shape))
    if x.layout == torch.sparse_coo:
        return _from_coo(x, check)
    if x.layout in _COMPRESSED:
        return _from_compressed(x, check)
    raise UnsupportedError(
        f"from_torch got a tensor of layout {x.layout}",
        expected="strided, sparse_coo, sparse_csr, sparse_csc, sparse_bsr or sparse_bsc",
        remedy="x.to_dense() and from_dense",
    )


def from_scipy(
    x: Any, device: torch.device | str | None, dtype: torch.dtype | None, check: bool
) -> E.Entries:
    """Entries of a SciPy array; CSR, CSC and BSR are read as they are, all else through COO."""
    kind = getattr(x, "format", None)
    if kind is None or not hasattr(x, "tocoo"):
        raise FormatError(
            f"from_scipy takes a scipy.sparse array, not {type(x).__name__}",
            remedy="from_dense(torch.as_tensor(x))",
        )
    check_shape(tuple(x.shape))
    target = torch.device(device) if device is not None else torch.get_default_device()
    shape = tuple(int(s) for s in x.shape)
    if kind in ("csr", "csc", "bsr") and len(shape) == 2:
        plain, compressed = _array(x.indices, target), _array(x.indptr, target)
        values = _array(x.data, target, dtype)
        block = tuple(int(b) for b in x.blocksize) if kind == "bsr" else None
        return _Compressed(compressed, plain, values, shape, block, kind != "csc").matrix(check)
    coo = x.tocoo()
    held = coo.coords if hasattr(coo, "coords") else (coo.row, coo.col)
    coords = [_array(c, target) for c in held]
    if check:
        _check_ranges(_dimensions(coords, shape))
    return E.collect(
        coords,
        _array(coo.data, target, dtype),
        shape,
        order=tuple(range(len(shape))),
    )


def from_edge_index(
    edge_index: Tensor,
    weights: Tensor | None,
    num_nodes: int | tuple[int, int] | None,
    order: tuple[int, ...],
    check: bool,
) -> E.Entries:
    """Entries of a graph's matrix ``A[source, target]``."""
    edge_index = _signed(edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise FormatError(f"edge_index has shape {tuple(edge_index.shape)}", expected="(2, edges)")
    _check_coords("edge_index", edge_index[0], edge_index[0])
    if weights is not None and tuple(weights.shape) != (edge_index.shape[1],):
        raise FormatError(
            f"weights has shape {tuple(weights.shape)}",
            expected=f"({edge_index.shape[1]},), one weight per edge",
            remedy="keep features of edges dense, beside the pattern",
        )
    if num_nodes is None:
        num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    shape = tuple(map(int, num_nodes if isinstance(num_nodes, tuple | list) else (num_nodes,) * 2))
    check_shape(shape)
    if check:
        _check_ranges(
            [(f"edge_index[{d}]", edge_index[d], shape[d], f"{shape[d]} nodes") for d in (0, 1)]
        )
    return E.collect((edge_index[0], edge_index[1]), weights, shape, order=order)


def to_torch(x: SparseFormat, layout: torch.layout, block_shape: tuple[int, int] | None) -> Tensor:
    """A `torch.sparse` tensor."""
    if layout == torch.sparse_coo:
        entries = E.ordered(E.to_elements(x.entries()), tuple(range(x.ndim)))
        return torch.sparse_coo_tensor(
            torch.stack([c.long() for c in entries.coords]),
            _values(entries),
            x.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    if layout not in _COMPRESSED:
        raise UnsupportedError(
            f"to_torch({layout})",
            expected="torch.sparse_coo, sparse_csr, sparse_csc, sparse_bsr or sparse_bsc",
        )
    _check_matrix(x, f"to_torch({layout})")
    order = (0, 1) if layout in (torch.sparse_csr, torch.sparse_bsr) else (1, 0)
    entries = (
        _blocks_for(x, block_shape, order)
        if layout in _BLOCKED
        else E.ordered(E.to_elements(x.entries()), order)
    )
    pointers = pointers_of(entries.coords[order[0]], entries.grid[order[0]])
    return torch.sparse_compressed_tensor(
        pointers.long(),
        entries.coords[order[1]].long(),
        _values(entries),
        x.shape,
        layout=layout,
        check_invariants=False,
    )


def to_scipy(x: SparseFormat, kind: str | None) -> Any:
    """A `scipy.sparse` array."""
    import scipy.sparse as sp

    if x.dtype in (torch.float16, torch.bfloat16, *NARROW_FLOATS):
        raise UnsupportedError(
            f"SciPy has no sparse arrays of {x.dtype}", remedy="x.to(torch.float32).to_scipy()"
        )
    kind = kind or ("coo" if x.ndim != 2 else "bsr" if _fits_blocks(x) else "csr")
    if kind not in ("coo", "csr", "csc", "bsr"):
        raise UnsupportedError(
            f"to_scipy({kind!r})",
            expected='"coo", "csr", "csc" or "bsr"',
            remedy=f'to_scipy("coo").asformat({kind!r})',
        )
    if kind == "coo":
        entries = E.ordered(E.to_elements(x.entries()), tuple(range(x.ndim)))
        return sp.coo_array(
            (_numpy(_values(entries)), tuple(_numpy(c) for c in entries.coords)), shape=x.shape
        )
    _check_matrix(x, f"to_scipy({kind!r})")
    order = (1, 0) if kind == "csc" else (0, 1)
    entries = (
        _blocks_for(x, None, order)
        if kind == "bsr"
        else E.ordered(E.to_elements(x.entries()), order)
    )
    pointers = pointers_of(entries.coords[order[0]], entries.grid[order[0]])
    parts = (
        _numpy(_values(entries)),
        _numpy(entries.coords[order[1]]),
        _numpy(pointers).astype("int32" if entries.count < 2**31 else "int64"),
    )
    return {"csr": sp.csr_array, "csc": sp.csc_array, "bsr": sp.bsr_array}[kind](
        parts, shape=x.shape
    )


def to_edge_index(x: SparseFormat) -> tuple[Tensor, Tensor | None]:
    """``edge_index`` and weights."""
    _check_matrix(x, "to_edge_index()")
    entries = E.ordered(E.to_elements(x.entries()), (0, 1))
    return torch.stack([c.long() for c in entries.coords]), entries.values


def pointers_of(sorted_coords: Tensor, rows: int) -> Tensor:
    """Row pointers of sorted coordinates: counted on the CPU, searched for elsewhere, where
    counting needs atomics.
    """
    if sorted_coords.device.type == "cpu":
        counts = torch.bincount(sorted_coords, minlength=rows)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.searchsorted(
        sorted_coords.contiguous(),
        torch.arange(rows + 1, device=sorted_coords.device, dtype=sorted_coords.dtype),
    )


# --- torch.sparse ---


def _from_coo(x: Tensor, check: bool) -> E.Entries:
    """torch itself looks neither at the indices of a sparse tensor nor at the claim that they are
    in order.
    """
    shape, sparse = tuple(x.shape), x.sparse_dim()
    if check:
        # before torch sorts them by a key in which one out of range looks like another
        _check_ranges(_dimensions(indices_of(x), shape))
    x = x if x.is_coalesced() else x.to(widened(x.dtype)).coalesce().to(x.dtype)
    coords = tuple(c.to(E.index_dtype(s)) for c, s in zip(x.indices(), shape))
    if sparse == x.dim():
        order = tuple(range(sparse))
        return E.collect(coords, x.values(), shape, order=order, in_order=not check)
    # A hybrid tensor's dense dimensions are one block each.
    block = (1,) * sparse + shape[sparse:]
    zero = (
        coords[0].new_zeros(coords[0].shape[0])
        if coords
        else torch.zeros(x.values().shape[0], dtype=torch.int32, device=x.device)
    )
    blocks = x.values().reshape(-1, *block)
    return E.collect(
        (*coords, *[zero] * (x.dim() - sparse)),
        blocks,
        shape,
        order=tuple(range(x.dim())),
        block_shape=block,
        in_order=not check,
    )


def _from_compressed(x: Tensor, check: bool) -> E.Entries:
    by_row = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed, plain = (
        (x.crow_indices(), x.col_indices()) if by_row else (x.ccol_indices(), x.row_indices())
    )
    values, batch = x.values(), tuple(x.shape[: compressed.dim() - 1])
    if values.dim() > compressed.dim() + 2 * (x.layout in _BLOCKED):
        raise UnsupportedError(
            "from_torch got a compressed tensor with dense dimensions",
            remedy="x.to_sparse_coo(), or x.to_dense() and from_dense",
        )
    block = tuple(values.shape[compressed.dim() :]) if x.layout in _BLOCKED else None
    held = _Compressed(compressed, plain, values, tuple(x.shape), block, by_row)
    return held.batched(check) if batch else held.matrix(check)


@dataclass(frozen=True, eq=False)
class _Compressed:
    """CSR, CSC, BSR and BSC alike: pointers over one dimension of the matrices, ``plain``
    coordinates of the other.
    """

    pointers: Tensor
    plain: Tensor
    values: Tensor
    shape: tuple[int, ...]
    block: tuple[int, ...] | None
    by_row: bool

    @property
    def native(self) -> tuple[int, int]:
        """The dimension that pointers are over, and the other."""
        return (0, 1) if self.by_row else (1, 0)

    @property
    def grid(self) -> tuple[int, ...]:
        """Rows and columns of a matrix, or of its blocks."""
        return E.grid_of(self.shape[-2:], self.block) if self.block else self.shape[-2:]

    def in_dimensions(self, outer: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Rows, then columns."""
        return (outer, other) if self.by_row else (other, outer)

    def look(self) -> None:
        """Raise where pointers or coordinates are out of range."""
        _check_pointers(self.pointers, self.plain, self.grid, self.native)

    def matrix(self, check: bool) -> E.Entries:
        """The entries of one matrix; ``check``: nobody has vouched for the arrays."""
        if check:
            self.look()
        native, count = self.native, self.plain.shape[0]
        outer_dtype = E.index_dtype(max(count, self.shape[native[0]]))
        outer = torch.repeat_interleave(self.pointers.diff().to(outer_dtype), output_size=count)
        other = self.plain.to(E.index_dtype(self.shape[native[1]]))
        rises = (other[1:] > other[:-1]) | (outer[1:] != outer[:-1]) if check else None
        entries = E.collect(
            self.in_dimensions(outer, other),
            self.values,
            self.shape,
            order=native,
            block_shape=self.block,
            in_order=rises is None or bool(rises.all()),
        )
        merged = entries.count < count
        return replace(entries, pointers=None if merged or self.block else self.pointers)

    def batched(self, check: bool) -> E.Entries:
        """One matrix of the same number of entries per batch; the batch dimensions come first and
        are never blocked.
        """
        if check:
            self.look()
        batch, block, lines = self.shape[:-2], self.block, self.grid[self.native[0]]
        other = self.plain.reshape(-1)
        line = torch.repeat_interleave(
            torch.arange(math.prod(batch) * lines, device=other.device),
            self.pointers.diff(dim=-1).reshape(-1),
            output_size=other.numel(),
        )
        outer = line % lines if lines else line
        leading = E.unravel(
            line.div(max(lines, 1), rounding_mode="floor"), batch, tuple(range(len(batch)))
        )
        coords = (*leading, *self.in_dimensions(outer, other))
        narrow = tuple(c.to(E.index_dtype(s)) for c, s in zip(coords, self.shape))
        if block is None:
            return E.Entries(narrow, self.values.reshape(-1), self.shape, (), None)
        block = (*(1,) * len(batch), *block)
        return E.Entries(narrow, self.values.reshape(-1, *block), self.shape, (), block)


def _blocks_for(
    x: SparseFormat, block_shape: tuple[int, int] | None, order: tuple[int, ...]
) -> E.Entries:
    block = block_shape or x.block_shape_or_none
    if block is None:
        raise FormatError(
            f"a block layout of a {type(x).__name__} needs a block shape",
            remedy="block_shape=(32, 32)",
        )
    if any(s % b for s, b in zip(x.shape, block)):
        raise UnsupportedError(
            f"shape {x.shape} is not divisible by blocks of {tuple(block)}, which block "
            "layouts of torch and SciPy require",
            remedy="the COO or CSR layout, or a block shape that divides",
        )
    return E.to_blocks(x.entries(), tuple(block), order)


# --- small things ---


def _values(entries: E.Entries) -> Tensor:
    if entries.values is not None:
        return entries.values
    return torch.ones(
        (entries.count, *(entries.block_shape or ())), device=entries.coords[0].device
    )


def _fits_blocks(x: SparseFormat) -> bool:
    block = x.block_shape_or_none
    return block is not None and all(s % b == 0 for s, b in zip(x.shape, block))


def _check_matrix(x: SparseFormat, what: str) -> None:
    if x.ndim != 2:
        raise UnsupportedError(
            f"{what} of a tensor with {x.ndim} dimension(s)",
            expected="a matrix",
            remedy="the COO layout, which has any rank",
        )


def _signed(c: Tensor) -> Tensor:
    """Coordinates in a dtype that torch computes with; what that cannot hold is negative."""
    return c.long() if c.dtype in (torch.uint16, torch.uint32, torch.uint64) else c


def _check_coords(name: str, c: Tensor, first: Tensor) -> None:
    if c.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise DtypeError(
            f"{name} holds {str(c.dtype).removeprefix('torch.')}",
            expected="integers",
            remedy=f"{name}.long()",
        )
    if c.dim() != 1 or c.shape != first.shape:
        raise FormatError(
            f"{name} has shape {tuple(c.shape)}",
            expected=f"one coordinate per entry, {tuple(first.shape[:1])}",
        )
    if c.device != first.device:
        raise DeviceError(
            f"{name} is on {c.device} but the first on {first.device}",
            expected="all arrays on one device",
        )


def _dimensions(
    coords: Sequence[Tensor] | Tensor, shape: tuple[int, ...]
) -> list[tuple[str, Tensor, int, str]]:
    """Coordinates and what each must stay below, as `_check_ranges` takes them."""
    return [
        (f"indices[{d}]", c, size, f"dimension {d} of size {size}")
        for d, (c, size) in enumerate(zip(coords, shape))
    ]


def _check_ranges(arrays: list[tuple[str, Tensor, int, str]]) -> None:
    raise_first(
        [
            v
            for name, array, size, what in arrays
            for v in range_verdicts(name, array, size, 0, what)
        ]
    )


def raise_first(verdicts: list[Verdict]) -> None:
    """One look at the device for all verdicts."""
    for verdict, bad in zip(
        verdicts, torch.stack([v.bad for v in verdicts]).tolist() if verdicts else ()
    ):
        if bad:
            raise verdict.explain()


def _check_pointers(
    compressed: Tensor, plain: Tensor, grid: tuple[int, ...], native: tuple[int, ...]
) -> None:
    """Of one matrix, or of a batch of them along the leading dimensions."""
    rows, columns = grid[native[0]], grid[native[1]]
    if compressed.shape[-1] != rows + 1:
        raise FormatError(
            f"there are {compressed.shape[-1]} row pointers for {rows} rows", expected=f"{rows + 1}"
        )
    wide = compressed.long()
    bad = (wide[..., 0] != 0) | (wide[..., -1] != plain.shape[-1]) | (wide.diff() < 0).any(-1)
    wrong = Verdict(
        bad.any(),
        lambda: FormatError(
            "the row pointers do not rise from 0 to the number of entries",
            expected=f"0 <= ... <= {plain.shape[-1]}, never falling",
        ),
    )
    raise_first(
        [
            wrong,
            *range_verdicts(
                "indices", plain, columns, 0, f"dimension {native[1]} of size {columns}"
            ),
        ]
    )


def _array(a: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    # a copy: what SciPy does to its arrays later is no business of ours
    return torch.tensor(a, device=device, dtype=dtype)


def _numpy(t: Tensor) -> Any:
    return t.detach().cpu().numpy()
