"""NeighborTable: ELL with every dimension dense but one, as sparse convolutions and fixed-degree
graphs have it.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from insum import facts
from insum.errors import FormatError
from insum.formats import arrays, layout
from insum.formats import entries as E
from insum.formats import validate as checks
from insum.formats.base import SparseFormat
from insum.formats.grouped import _slots

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False, repr=False)
class NeighborTable(SparseFormat):
    """``Map[x,y,z]`` held as ``table[x,z] -> y``: at most one entry along ``dim`` for every choice
    of the other coordinates.

    ``table`` has one axis for every dimension but ``dim``, in order; it holds the coordinate in
    ``dim``, or -1 for no entry. ``values`` has the same shape, or is ``None``: then every neighbour
    counts as 1 and no factor is spelled for it, so that ``Out[x,m] = Map[x,y,z] * In[y,c] *
    W[z,c,m]`` becomes ``Out[x,m] = In[Nb[x,z],c] * W[z,c,m]``.

    Options: ``dim`` (default 1), the dimension that is stored as a coordinate.

    Args:
        table: The coordinate in ``dim``, or -1, for every choice of the others.
        shape: The shape of the tensor.
        dim: The dimension that is stored as a coordinate.
        values: One for each place of the table, or ``None``.
        validate: Look at the arrays; what insum itself made needs no look.

    Examples:
        >>> import torch
        >>> table = torch.tensor([[-1, 0, 1], [0, 1, 2], [1, 2, -1]], dtype=torch.int32)
        >>> NeighborTable(table, shape=(3, 3, 3))
        NeighborTable(shape=(3, 3, 3), pattern, nnz=7, dim=1, padding=22.2%, 36 bytes, cpu)
    """

    table: Tensor
    shape: tuple[int, ...]
    dim: int = 1
    values: Tensor | None = None
    validate: InitVar[bool] = True
    _arrays: ClassVar[tuple[str, ...]] = ("values", "table")
    _static: ClassVar[tuple[str, ...]] = ("shape", "dim")
    _options: ClassVar[tuple[str, ...]] = ("dim",)

    @property
    def layout(self) -> layout.Layout:
        return layout.tabled(self.ndim, *layout.fixed((self.dim,)))

    def _details(self) -> dict[str, object]:
        return {"dim": self.dim}

    @classmethod
    def _order(cls, rank: int, dim: int | None = None, **options: Any) -> tuple[int, ...]:
        last = _dim(dim, rank)
        return (*(d for d in range(rank) if d != last), last)

    @classmethod
    def _build(cls, source: E.Entries, dim: int | None = None, **options: Any) -> Self:
        rank = len(source.shape)
        last = _dim(dim, rank)
        source = E.ordered(E.to_elements(source), cls._order(rank, last))
        rest = tuple(d for d in range(rank) if d != last)
        sizes = tuple(source.shape[d] for d in rest)
        place = E.linear([c.long() for c in source.coords], source.shape, rest)
        _check_single(source, place, last, rest)
        values = (
            None
            if source.values is None
            else E.placed(source.values, place, math.prod(sizes)).reshape(sizes)
        )
        table = _slots(source.coords[last], place, math.prod(sizes)).reshape(sizes)
        return cls._trusted(
            padded=table.numel() != source.count,
            values=values,
            table=table,
            shape=source.shape,
            dim=last,
        )

    def _permuted(self, dims: tuple[int, ...]) -> Self:
        rest = [d for d in range(self.ndim) if d != self.dim]
        axes = [rest.index(d) for d in dims if d != self.dim]
        turned = {
            "values": None if self.values is None else self.values.permute(axes),
            "table": self.table.permute(axes),
        }
        made = self._make(
            **turned, shape=tuple(self.shape[d] for d in dims), dim=dims.index(self.dim)
        )
        if not torch.compiler.is_compiling() and facts.known(self.table) is not None:
            arrays.declare(made, arrays.may_be_padded(self))
        return made


def _dim(dim: int | None, rank: int) -> int:
    return checks.dimension(dim, rank) if dim is not None else min(1, rank - 1)


def _check_single(source: E.Entries, place: Tensor, dim: int, rest: tuple[int, ...]) -> None:
    """At most one entry along ``dim``; the entries are sorted by the other dimensions first."""
    twice = place[1:] == place[:-1]
    if not bool(twice.any()):
        return
    at = int(twice.nonzero()[0])
    where = ", ".join(
        f"{int(source.coords[d][at])}" if d != dim else ":" for d in range(len(source.shape))
    )
    first, second = (int(source.coords[dim][at + k]) for k in (0, 1))
    raise FormatError(
        f"[{where}] has more than one entry along dimension {dim}: at {first} and {second}",
        expected="at most one, as a neighbour table has one place for each",
        remedy=f"another dim, or ELL with group_dims={rest[:1]}",
    )
