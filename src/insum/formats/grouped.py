"""GroupCOO, which stores some coordinates once per group, and ELL, which does not store them at
all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from insum.errors import FormatError
from insum.formats import entries as E
from insum.formats import interop, layout
from insum.formats import validate as checks
from insum.formats.base import SparseFormat
from insum.formats.groupsize import GroupSize, resolve

if TYPE_CHECKING:
    from typing_extensions import Self

Dims = int | Sequence[int] | None


@dataclass(frozen=True, eq=False, repr=False)
class GroupCOO(SparseFormat):
    """Entries that share their coordinates in ``group_dims``, in groups of fixed size, padded.

    ``values[p,q]`` lies at ``group_indices[i][p]`` in dimension ``group_dims[i]`` and at
    ``slot_indices[j][p,q]`` in the j-th of the others; -1 there is padding. Groups are sorted by
    their coordinates, in the order of ``group_dims``. Group size 1 is COO, the largest occupancy
    ELL. Spells ``A[m,k]`` as ``AV[p,q]`` at ``AM[p], AK[p,q]``.

    Options: ``group_dims`` (default: the first dimension; none for a vector) and ``group_size``: an
    integer, ``"auto"`` (default: of the powers of two beside sqrt(S/n) the one with fewer gathers
    and scatters) or ``"exact"`` (of all sizes).

    Args:
        values: One for each slot; ``None`` in a pattern.
        group_indices: For each of ``group_dims`` the coordinate of every group.
        slot_indices: For each of the others that of every slot; -1 is padding.
        shape: The shape of the tensor.
        group_dims: The dimensions that entries of a group share.
        validate: Look at the arrays; what insum itself made needs no look.

    Examples:
        >>> import torch
        >>> x = torch.tensor([[1.0, 2, 3, 0], [4, 0, 0, 0], [0, 5, 0, 0], [0, 0, 6, 7]])
        >>> GroupCOO.from_dense(x, group_dims=0, group_size=2)
        GroupCOO(shape=(4, 4), float32, nnz=7, groups=5, group_size=2, group_dims=(0,),
        padding=30.0%, 100 bytes, cpu)
        >>> GroupCOO.from_dense(x, group_size=3).slot_indices[0]
        tensor([[ 0,  1,  2],
                [ 0, -1, -1],
                [ 1, -1, -1],
                [ 2,  3, -1]], dtype=torch.int32)
    """

    values: Tensor | None
    group_indices: tuple[Tensor, ...]
    slot_indices: tuple[Tensor, ...]
    shape: tuple[int, ...]
    group_dims: tuple[int, ...] = (0,)
    validate: InitVar[bool] = True
    _arrays: ClassVar[tuple[str, ...]] = ("values", "group_indices", "slot_indices")
    _static: ClassVar[tuple[str, ...]] = ("shape", "group_dims")
    _options: ClassVar[tuple[str, ...]] = ("group_dims", "group_size")

    @property
    def layout(self) -> layout.Layout:
        return layout.grouped(self.ndim, layout.fixed(self.group_dims))

    @property
    def sorted_dims(self) -> tuple[int, ...]:
        return self.group_dims

    @property
    def group_size(self) -> int:
        return self.positions[1]

    def _details(self) -> dict[str, object]:
        return {
            "groups": self.positions[0],
            "group_size": self.group_size,
            "group_dims": self.group_dims,
        }

    @classmethod
    def _order(cls, rank: int, group_dims: Dims = None, **options: Any) -> tuple[int, ...]:
        first = checks.group_dims(group_dims, rank)
        return (*first, *(d for d in range(rank) if d not in first))

    @classmethod
    def _build(
        cls,
        source: E.Entries,
        group_dims: Dims = None,
        group_size: GroupSize = "auto",
        **options: Any,
    ) -> Self:
        dims = checks.group_dims(group_dims, len(source.shape))
        source = E.ordered(E.to_elements(source), cls._order(len(source.shape), dims))
        packed = pack(source, dims, group_size)
        arrays = {
            "values": packed.placed(source.values),
            "group_indices": packed.groups,
            "slot_indices": packed.slots,
        }
        return cls._trusted(padded=packed.padded, **arrays, shape=source.shape, group_dims=dims)

    def _permuted(self, dims: tuple[int, ...]) -> Self:
        """Nothing moves: the grouped dimensions have other numbers, and the slot arrays another
        order.
        """
        return self._make(**{**self._fields(), **turned(self, dims, "slot_indices")})


@dataclass(frozen=True, eq=False, repr=False)
class ELL(SparseFormat):
    """As many slots for every row: the grouped dimensions are axes of the arrays, so that nothing
    is scattered.

    ``values[m,q]`` lies in row ``m`` at ``indices[j][m,q]`` in the j-th of the other dimensions; -1
    there is padding. With several ``group_dims`` the arrays have one axis for each, in that order,
    before the slots. Spells ``A[m,k]`` as ``AV[m,q]`` at ``m, AK[m,q]``.

    Options: ``group_dims`` (default: the first dimension; none for a vector).

    Args:
        values: One for each entry; ``None`` in a pattern.
        indices: For each of the other dimensions the coordinate of every slot; -1 is padding.
        shape: The shape of the tensor.
        group_dims: The dimensions that are axes of the arrays.
        validate: Look at the arrays; what insum itself made needs no look.

    Examples:
        >>> import torch
        >>> ELL.from_dense(torch.tensor([[1.0, 2, 3, 0], [4, 0, 0, 0], [0, 5, 0, 0], [0, 0, 6, 7]]))
        ELL(shape=(4, 4), float32, nnz=7, group_dims=(0,), slots=3, padding=41.7%, 96 bytes, cpu)
    """

    values: Tensor | None
    indices: tuple[Tensor, ...]
    shape: tuple[int, ...]
    group_dims: tuple[int, ...] = (0,)
    validate: InitVar[bool] = True
    _arrays: ClassVar[tuple[str, ...]] = ("values", "indices")
    _static: ClassVar[tuple[str, ...]] = ("shape", "group_dims")
    _options: ClassVar[tuple[str, ...]] = ("group_dims",)

    @property
    def layout(self) -> layout.Layout:
        return layout.rowwise(self.ndim, layout.fixed(self.group_dims))

    @property
    def slots(self) -> int:
        """Slots per row: the largest occupancy."""
        return self.positions[-1]

    def _details(self) -> dict[str, object]:
        return {"group_dims": self.group_dims, "slots": self.slots}

    @classmethod
    def _order(cls, rank: int, group_dims: Dims = None, **options: Any) -> tuple[int, ...]:
        return GroupCOO._order(rank, group_dims)

    @classmethod
    def _build(cls, source: E.Entries, group_dims: Dims = None, **options: Any) -> Self:
        dims = checks.group_dims(group_dims, len(source.shape))
        source = E.ordered(E.to_elements(source), cls._order(len(source.shape), dims))
        rows = every_row(source, dims)
        sizes = tuple(source.shape[d] for d in dims)
        width = int(rows.counts.max()) if rows.counts.numel() else 0
        shift = torch.arange(rows.counts.shape[0], device=rows.counts.device) * width - rows.starts
        place = shift.index_select(0, rows.number) + torch.arange(source.count, device=shift.device)
        total = math.prod(sizes) * width
        values = (
            None
            if source.values is None
            else E.placed(source.values, place, total).reshape(*sizes, width)
        )
        indices = tuple(
            _slots(source.coords[d], place, total).reshape(*sizes, width)
            for d in range(len(source.shape))
            if d not in dims
        )
        return cls._trusted(
            padded=total != source.count,
            values=values,
            indices=indices,
            shape=source.shape,
            group_dims=dims,
        )

    def _permuted(self, dims: tuple[int, ...]) -> Self:
        return self._make(**{**self._fields(), **turned(self, dims, "indices")})


def turned(x: Any, dims: tuple[int, ...], slots: str) -> dict[str, Any]:
    """What changes in a format with ``group_dims`` where its dimensions get another order."""
    rest = [d for d in range(x.ndim) if d not in x.group_dims]
    return {
        slots: tuple(getattr(x, slots)[rest.index(d)] for d in dims if d in rest),
        "shape": tuple(x.shape[d] for d in dims),
        "group_dims": tuple(dims.index(d) for d in x.group_dims),
    }


# --- packing entries into groups, for plain entries and for blocks ---


@dataclass(frozen=True, eq=False)
class EntryRows:
    """Runs of entries with equal grouped coordinates: those coordinates, the entries of each row,
    and the row of each entry.
    """

    coords: tuple[Tensor, ...]
    counts: Tensor
    number: Tensor

    @property
    def starts(self) -> Tensor:
        return self.counts.cumsum(0) - self.counts


@dataclass(frozen=True, eq=False)
class PackedGroups:
    """Entries in groups: the index arrays, and the slot of each entry."""

    groups: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    place: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.slots[0].shape)

    @property
    def padded(self) -> bool:
        return self.slots[0].numel() != self.place.shape[0]

    def placed(self, values: Tensor | None) -> Tensor | None:
        """Values of the entries at their slots, zero elsewhere."""
        return (
            None
            if values is None
            else E.placed(values, self.place, math.prod(self.shape)).reshape(
                *self.shape, *values.shape[1:]
            )
        )


def pack(source: E.Entries, dims: tuple[int, ...], group_size: GroupSize) -> PackedGroups:
    """Entries, sorted by ``dims`` first, into groups; one look at the device for the number of
    groups (and the group size).
    """
    rows, grid = rows_of(source, dims), source.grid
    size = resolve(group_size, rows.counts, math.prod(grid[d] for d in dims))
    per_row = (rows.counts + (size - 1)).div(size, rounding_mode="floor")
    ends = per_row.cumsum(0)
    groups = int(ends[-1]) if ends.numel() else 0
    # A row's groups lie side by side, so that its entries move together: by one shift per row.
    shift = (ends - per_row) * size - rows.starts
    place = shift.index_select(0, rows.number) + torch.arange(source.count, device=shift.device)
    heads = tuple(torch.repeat_interleave(c, per_row, output_size=groups) for c in rows.coords)
    slots = tuple(
        _slots(source.coords[d], place, groups * size).reshape(groups, size)
        for d in range(len(grid))
        if d not in dims
    )
    return PackedGroups(heads, slots, place)


def rows_of(source: E.Entries, dims: tuple[int, ...]) -> EntryRows:
    """All rows where they are not many more than the entries, else those that are not empty."""
    if math.prod(source.grid[d] for d in dims) <= 4 * source.count + (1 << 16):
        return every_row(source, dims)
    first = E.changes([source.coords[d] for d in dims])
    starts = first.nonzero().squeeze(1)
    ends = torch.cat([starts[1:], starts.new_full((1,), source.count)])[: starts.shape[0]]
    return EntryRows(
        tuple(source.coords[d][starts] for d in dims), ends - starts, torch.cumsum(first, 0) - 1
    )


#: Rows that are held whether they have entries or not.
MOST_ROWS = 2**31


def every_row(source: E.Entries, dims: tuple[int, ...]) -> EntryRows:
    """Every row, empty ones too."""
    grid = source.grid
    sizes = tuple(grid[d] for d in dims)
    rows = math.prod(sizes)
    if rows >= MOST_ROWS:
        raise FormatError(
            f"a format with a place for each of {rows} rows",
            expected=f"fewer than {MOST_ROWS}",
            remedy="COO or GroupCOO, which hold the rows that have entries",
        )
    number = E.linear(source.coords, grid, dims)
    pointers = (
        source.pointers
        if source.pointers is not None and dims == source.order[:1]
        else interop.pointers_of(number, rows)
    )
    every = torch.arange(rows, device=number.device, dtype=E.index_dtype(rows))
    coords = E.unravel(every, sizes, tuple(range(len(dims)))) if dims else ()
    return EntryRows(
        tuple(c.to(E.index_dtype(s)) for c, s in zip(coords, sizes)), pointers.diff().long(), number
    )


def _slots(coords: Tensor, place: Tensor, total: int) -> Tensor:
    """Coordinates at their slots, -1 elsewhere."""
    return coords.new_full((total,), -1).index_copy_(0, place.long(), coords)
