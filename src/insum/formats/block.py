"""BlockCOO and BlockGroupCOO: entries are dense blocks, those at the edge padded with zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from insum.formats import entries as E
from insum.formats import layout
from insum.formats import validate as checks
from insum.formats.base import SparseFormat
from insum.formats.grouped import Dims, GroupCOO, pack, turned
from insum.formats.groupsize import GroupSize

if TYPE_CHECKING:
    from typing_extensions import Self

Block = int | Sequence[int]


@dataclass(frozen=True, eq=False, repr=False)
class BlockCOO(SparseFormat):
    """``values[p]`` is the block at block coordinates ``indices[0][p], indices[1][p], ...``,
    sorted, every block once.

    Spells ``A[m,k]`` as ``AV[p,bm,bk]`` at ``(AM[p],bm), (AK[p],bk)``. Options: ``block_shape``.

    Args:
        values: A block for each entry; ``None`` in a pattern.
        indices: For each dimension the block coordinate of every entry.
        shape: The shape of the tensor.
        block_shape: The shape of a block.
        validate: Look at the arrays; what insum itself made needs no look.

    Examples:
        >>> import torch
        >>> BlockCOO.from_dense(torch.eye(5), block_shape=(2, 2))
        BlockCOO(shape=(5, 5), float32, nnz=5, blocks=3, block_shape=(2, 2), padding=58.3%,
        72 bytes, cpu)
    """

    values: Tensor | None
    indices: tuple[Tensor, ...]
    shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    validate: InitVar[bool] = True
    _arrays: ClassVar[tuple[str, ...]] = ("values", "indices")
    _static: ClassVar[tuple[str, ...]] = ("shape", "block_shape")
    _options: ClassVar[tuple[str, ...]] = ("block_shape",)

    @property
    def layout(self) -> layout.Layout:
        return layout.listed(self.ndim, blocked=True)

    @property
    def block_shape_or_none(self) -> tuple[int, ...]:
        return self.block_shape

    @property
    def sorted_dims(self) -> tuple[int, ...]:
        return tuple(range(self.ndim))

    def _details(self) -> dict[str, object]:
        return {"blocks": self.positions[0], "block_shape": self.block_shape}

    @classmethod
    def _build(cls, source: E.Entries, block_shape: Block = (), **options: Any) -> Self:
        rank = len(source.shape)
        block = checks.block_shape(block_shape, rank)
        source = E.to_blocks(source, block, tuple(range(rank)))
        return cls._trusted(
            padded=False,
            values=source.values,
            indices=source.coords,
            shape=source.shape,
            block_shape=block,
        )

    def _permuted(self, dims: tuple[int, ...]) -> Self:
        coords, block = (
            tuple(self.indices[d] for d in dims),
            tuple(self.block_shape[d] for d in dims),
        )
        return self._build(
            E.Entries(
                coords, _turned_values(self, dims), tuple(self.shape[d] for d in dims), (), block
            ),
            block_shape=block,
        )


@dataclass(frozen=True, eq=False, repr=False)
class BlockGroupCOO(SparseFormat):
    """Blocks that share their block coordinates in ``group_dims``, in groups of fixed size, padded.

    ``values[p,q]`` is the block at block coordinates ``group_indices[i][p]`` in dimension
    ``group_dims[i]`` and ``slot_indices[j][p,q]`` in the j-th of the others; -1 there is padding.
    Spells ``A[m,k]`` as ``AV[p,q,bm,bk]`` at ``(AM[p],bm), (AK[p,q],bk)``.

    Options: ``block_shape``, ``group_dims`` and ``group_size`` as in `GroupCOO`, where a block
    counts as one entry.

    Args:
        values: A block for each slot; ``None`` in a pattern.
        group_indices: For each of ``group_dims`` the block coordinate of every group.
        slot_indices: For each of the others that of every slot; -1 is padding.
        shape: The shape of the tensor.
        block_shape: The shape of a block.
        group_dims: The dimensions that blocks of a group share.
        validate: Look at the arrays; what insum itself made needs no look.

    Examples:
        >>> import torch
        >>> x = torch.zeros(6, 6)
        >>> x[:2] = 1
        >>> BlockGroupCOO.from_dense(x, block_shape=(2, 2), group_size=2)
        BlockGroupCOO(shape=(6, 6), float32, nnz=12, groups=2, group_size=2, group_dims=(0,),
        block_shape=(2, 2), padding=25.0%, 88 bytes, cpu)
    """

    values: Tensor | None
    group_indices: tuple[Tensor, ...]
    slot_indices: tuple[Tensor, ...]
    shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    group_dims: tuple[int, ...] = (0,)
    validate: InitVar[bool] = True
    _arrays: ClassVar[tuple[str, ...]] = ("values", "group_indices", "slot_indices")
    _static: ClassVar[tuple[str, ...]] = ("shape", "block_shape", "group_dims")
    _options: ClassVar[tuple[str, ...]] = ("block_shape", "group_dims", "group_size")

    @property
    def layout(self) -> layout.Layout:
        return layout.grouped(self.ndim, layout.fixed(self.group_dims), blocked=True)

    @property
    def block_shape_or_none(self) -> tuple[int, ...]:
        return self.block_shape

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
            "block_shape": self.block_shape,
        }

    @classmethod
    def _order(cls, rank: int, group_dims: Dims = None, **options: Any) -> tuple[int, ...]:
        return GroupCOO._order(rank, group_dims)

    @classmethod
    def _build(
        cls,
        source: E.Entries,
        block_shape: Block = (),
        group_dims: Dims = None,
        group_size: GroupSize = "auto",
        **options: Any,
    ) -> Self:
        rank = len(source.shape)
        block, dims = checks.block_shape(block_shape, rank), checks.group_dims(group_dims, rank)
        order = cls._order(rank, dims)
        if source.block_shape == block:
            source = E.ordered(source, order)
            packed = pack(source, dims, group_size)
            values = packed.placed(source.values)
        else:  # each value goes to its block's slot at once
            found = E.in_blocks(E.to_elements(source), block, order)
            packed = pack(found.blocks, dims, group_size)
            values = found.placed(packed.place, math.prod(packed.shape)).reshape(
                *packed.shape, *block
            )
        arrays = {"values": values, "group_indices": packed.groups, "slot_indices": packed.slots}
        return cls._trusted(
            padded=packed.padded, **arrays, shape=source.shape, block_shape=block, group_dims=dims
        )

    def _permuted(self, dims: tuple[int, ...]) -> Self:
        blocks = {
            "values": _turned_values(self, dims),
            "block_shape": tuple(self.block_shape[d] for d in dims),
        }
        return self._make(**{**self._fields(), **turned(self, dims, "slot_indices"), **blocks})


def _turned_values(x: BlockCOO | BlockGroupCOO, dims: tuple[int, ...]) -> Tensor | None:
    lead = len(x.positions)
    return None if x.values is None else x.values.permute(*range(lead), *(lead + d for d in dims))
